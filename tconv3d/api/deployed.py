"""Finds the launches that calls of a layer can make on a GPU, for `precompile`.

The planner gives the first volume of a layer a build of its own, and other volumes one of a few builds that depend on
the first (`planning.repertoire`). A deployed model gets its inputs in any order, so every volume is planned as the
first, and all others after it.

This module plans calls as the executor does, and knows nothing of compilers or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ..families.norm import planner as norm_planner
from ..families.norm.planner import NormProblem, Wanted
from ..families.pytorch.planner import KERNEL as PYTORCH
from ..planning import casts, planner
from ..planning.launch import Launch
from ..planning.problem import Device, Norm, Pass, Problem, is_channels_last
from ..runtime import background
from ..torch_ops import choosing, executor
from ..torch_ops.problems import DTYPES, tf32_level
from . import fusing, survey
from .explain import Call, activation, call_of, checked_layer, problems_of
from .modules import ConvTranspose3dReLU, ConvTranspose3dReLUGroupNorm
from .survey import LayerCall

# Types by the names of the command line, and whether float32 is rounded to TF32; None for types that never are.
PRECISIONS: dict[str, tuple[torch.dtype, bool | None]] = {
    "tf32": (torch.float32, True),
    "float32": (torch.float32, False),
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "float64": (torch.float64, None),
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}


@dataclass(frozen=True)
class Deployed:
    """Describes a layer of a model, what follows it in its kernel, and its calls."""

    name: str
    convolution: nn.ConvTranspose3d
    relu: bool
    norm: nn.GroupNorm | None
    calls: tuple[LayerCall, ...]


@dataclass(frozen=True)
class Variant:
    """Describes one call of a layer by plain data: the problems of a training step, and the norm's."""

    layer: Deployed
    problems: tuple[Problem, ...]  # the forward pass, and the gradients that may be wanted
    layout: str
    turned: tuple[Problem, ...] = ()  # the gradients for a contiguous output gradient, if the output is not

    @property
    def forward(self) -> Problem:
        return self.problems[0]

    @property
    def volume(self) -> tuple[int, tuple[int, ...]]:
        return self.forward.batch, self.forward.input_size

    @property
    def shape(self) -> str:
        return "x".join(map(str, (self.forward.batch, self.forward.geometry.in_channels, *self.forward.input_size)))


def layers_of(model: nn.Module, inputs: Sequence[Any]) -> list[Deployed]:
    """Returns the layers of a model that the inputs reach, or the one layer that the model is."""
    if isinstance(model, (nn.ConvTranspose3d, ConvTranspose3dReLUGroupNorm)):
        checked_layer(model)
        return [_deployed("the layer", model, {}, [_layer_call(model, each) for each in inputs])]
    names = {module: name for name, module in model.named_modules()}
    norms = fusing.norms(model)
    found: dict[nn.Module, list[LayerCall]] = {}
    for each in inputs:
        example = _of_shape(each, model) if _is_shape(each) else each
        for layer, calls in survey.calls(model, example, _is_ours).items():
            found.setdefault(layer, []).extend(calls)
    return [_deployed(names[layer], layer, norms, calls) for layer, calls in found.items()]


def variants(
    layer: Deployed, dtypes: Sequence[torch.dtype | str] | None, layouts: Sequence[str] | None, backward: bool
) -> list[Variant]:
    """Returns the calls of a layer in the given types and layouts; None stands for those that the calls have."""
    found: dict[Variant, None] = {}
    for call in layer.calls:
        for dtype in dtypes or (call.dtype,):
            for layout in layouts or (None,):
                found[_variant(layer, call, dtype, layout, backward)] = None
    return list(found)


def launches(calls: Sequence[Variant], device: Device) -> Iterator[Launch]:
    """Yields the launches of calls, whichever of their volumes comes first."""
    for kind in dict.fromkeys(_kind(each) for each in calls):
        same = [each for each in calls if _kind(each) == kind]
        for first in dict.fromkeys(each.volume for each in same):
            planner.forget()
            for each in sorted(same, key=lambda one: one.volume != first):
                yield from _launches(each, device)
    planner.forget()


def launches_of_every_volume(calls: Sequence[Variant], device: Device) -> Iterator[tuple[str, Any]]:
    """Yields the kernels of calls with volumes of other sizes, if the volume of one of the calls comes first."""
    for each in calls:
        planner.forget()
        gradients = each.problems[1:]
        for problems in ((each.forward,), *((gradients,) if gradients else ())):
            yield from background.kernels((problems, device))


def _kind(variant: Variant) -> tuple[Any, ...]:
    """Returns what the calls have in common that share the builds of one layer."""
    return variant.forward.geometry, variant.forward.dtype, variant.forward.tf32


def _launches(variant: Variant, device: Device) -> Iterator[Launch]:
    yield from planner.plan(variant.forward, device).every_launch
    if variant.problems[1:] and variant.forward.item_bytes == 2:  # autocast converts operands of float32
        yield casts.cast([1], "float32", variant.forward.dtype)
    for gradients in (variant.problems[1:], variant.turned):
        yield from _gradient_launches(gradients, device)
    if device != executor.EMULATED:  # on some GPUs the first call times several offers, which must all be there
        for asked in ((variant.forward,), variant.problems[1:], variant.turned):
            for plan in choosing.contending_plans({problem.which: problem for problem in asked}, device):
                yield from plan.every_launch
    for asked in ((variant.forward,), *_combinations(variant.problems[1:]), *_combinations(variant.turned)):
        yield from _winner_launches({problem.which: problem for problem in asked}, device)
    if variant.layer.norm is not None:
        yield from _norm_launches(variant, variant.layer.norm, device)


def _winner_launches(wanted: dict[Pass, Problem], device: Device) -> Iterator[Launch]:
    """Yields the launches of offers that won when they were timed on this machine's GPU.

    Looking a winner up notes it for the pack (`runtime.cache.noting`).
    """
    cuda = device != executor.EMULATED
    if cuda and not executor.is_present(device):
        return
    for benchmark in (False, True):
        settings = benchmark, choosing.circumstances(cuda)[1]
        with planner.meeting(wanted, device):
            found = choosing.choice(wanted, device, settings, cuda)
            if found.winner is not None and not any(offer.kernel == PYTORCH for offer in found.cover):
                yield from planner.plan_of(found.cover, wanted, device).every_launch


def _combinations(gradients: tuple[Problem, ...]) -> Iterator[tuple[Problem, ...]]:
    for count in range(1, len(gradients) + 1):
        yield from combinations(gradients, count)


def _gradient_launches(gradients: tuple[Problem, ...], device: Device) -> Iterator[Launch]:
    """Yields the launches of every combination of gradients, also for when memory is short."""
    for problem in gradients:  # an operator of its own computes each gradient under torch.compile
        for each in (device, device.thrifty):
            yield from planner.plan(problem, each).every_launch
    for wanted in _combinations(gradients):
        if len(wanted) > 1:
            for each in (device, device.thrifty):
                yield from planner.plan_gradients(wanted, each).every_launch


def _norm_launches(variant: Variant, norm: nn.GroupNorm, device: Device) -> Iterator[Launch]:
    """Yields the launches of a norm behind the convolution, for results of the convolution's type and of float32."""
    dtype = variant.forward.dtype
    parameter = next((DTYPES[tensor.dtype] for tensor in norm.parameters()), dtype)
    for result in dict.fromkeys((dtype, parameter)):
        problem = NormProblem(activation(variant.forward), result, parameter, norm.num_groups)
        yield from norm_planner.plan_normalize(problem, device).every_launch
        for number in range(1, 8) if len(variant.problems) > 1 else ():
            wanted = Wanted(bool(number & 1), bool(number & 2) and norm.affine, bool(number & 4))
            if any((wanted.input, wanted.parameters, wanted.bias)):
                yield from norm_planner.plan_gradient(problem, wanted, device).every_launch


# ---- from models to calls


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, (nn.ConvTranspose3d, ConvTranspose3dReLUGroupNorm))


def _is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(isinstance(each, int) for each in value)


def _of_shape(shape: Sequence[int], model: nn.Module) -> Tensor:
    """Returns an input of this shape, with the type and on the device of the model's parameters."""
    like = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def _deployed(name: str, layer: Any, norms: dict[nn.Module, nn.GroupNorm], calls: Iterable[LayerCall]) -> Deployed:
    different = tuple(dict.fromkeys(calls))
    if isinstance(layer, ConvTranspose3dReLUGroupNorm):
        return Deployed(name, layer.conv_transpose, True, layer.group_norm, different)
    norm = norms.get(layer)
    return Deployed(name, layer, norm is not None or isinstance(layer, ConvTranspose3dReLU), norm, different)


def _layer_call(layer: nn.Module, input: Tensor | Sequence[int]) -> LayerCall:
    x = call_of(layer, input)[0]  # type: ignore[arg-type]
    return LayerCall(tuple(x.shape), tuple(x.stride()), x.dtype, None)


def _variant(
    layer: Deployed, call: LayerCall, wanted: torch.dtype | str, layout: str | None, backward: bool
) -> Variant:
    dtype, tf32 = PRECISIONS[wanted] if isinstance(wanted, str) else (wanted, None)
    x = torch.empty_strided(call.shape, call.strides, dtype=dtype, device="meta")
    if layout is not None:
        x = torch.empty(call.shape, dtype=dtype, device="meta", memory_format=LAYOUTS[layout])
    size = None if call.output_size is None else list(call.output_size)
    input, weight, bias, convolution = call_of(layer.convolution, x, *(() if size is None else (size,)))
    cast = _cast(dtype)
    planned: Call = input, cast(weight), None if bias is None else cast(bias), convolution
    forward, *gradients = _with_tf32(problems_of(*planned), tf32)
    _, *turned = _with_tf32(problems_of(*planned, contiguous_gradient=True), tf32)
    norm = None if layer.norm is None else Norm(layer.norm.num_groups, layer.norm.eps)
    forward = replace(forward, relu=layer.relu, norm=norm)
    if norm is not None:  # the norm's gradient includes the gradient of the convolution's bias
        gradients = [problem for problem in gradients if problem.which is not Pass.BIAS_GRAD]
        turned = []  # the norm's gradient has the layout of its input
    channels_last = is_channels_last(forward.input)
    return Variant(
        layer,
        (forward, *(gradients if backward else ())),
        layout or ("channels_last_3d" if channels_last else "contiguous"),
        tuple(turned) if backward and turned != gradients else (),
    )


def _with_tf32(problems: list[Problem], tf32: bool | None) -> list[Problem]:
    """Returns the problems with TF32 or without, or as they are for None; sums for the bias know no TF32."""
    if tf32 is None:
        return problems
    return [each if each.which is Pass.BIAS_GRAD else each.allowing(tf32_level(tf32)) for each in problems]


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Returns a function that makes a meta tensor of this type with the strides of a parameter, as autocast does."""
    return lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
