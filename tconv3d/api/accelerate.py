"""`accelerate` moves the transposed convolutions of an existing model to this library's kernels; `restore` undoes it.

A swap changes the class of the layer object and nothing else. Parameters, buffers, hooks, device, training mode and
every reference to the layer (from an optimizer, a hook, or a second place in the model) stay valid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ..torch_ops import checks, problems
from ..torch_ops.backend import current_backend
from . import fusing, gains, plain, survey
from .explain import explain
from .forwards import PLANS
from .gains import Gain
from .modules import ConvTranspose3d
from .survey import Shape

Model = TypeVar("Model", bound=nn.Module)

# `accelerate` sets this attribute on every swapped layer. Copies and pickles carry the attribute along, so `restore`
# works on them too. Layers that were built as `tconv3d.ConvTranspose3d` lack it, and `restore` leaves them alone.
_MARK = "_swapped_by_tconv3d"
_UNREAD = "no forward was found that calls it"


@dataclass(frozen=True)
class LayerSwap:
    """Says what `accelerate` does to one transposed convolution of a model, and why."""

    places: tuple[str, ...]  # names of the layer in the model; "" is the model itself
    layer: str
    swapped: bool
    fused: bool  # whether the layer runs fused with what follows it
    reason: str  # why the layer is not swapped; "" if it is
    input_shapes: tuple[Shape, ...]  # empty if no example input was given
    gain: Gain | None
    choices: tuple[str, ...] = ()  # who computes the passes for the largest input, and why (`Explanation.choices`)
    chain: str = ""  # what runs fused, for example "conv -> batch_norm -> leaky_relu"; "" if nothing does
    why_alone: str = ""  # why nothing that follows the layer is fused with it; "" if something is

    def __str__(self) -> str:
        where = ", ".join(name or "(the model itself)" for name in self.places)
        if not (self.swapped or self.fused):
            return f"left     {where}: {self.layer}: {self.reason}"
        text = f"{'fused  ' if self.fused else 'swapped'}  {where}: {self.layer}"
        text = text if self.gain is None else f"{text}: predicted gain {self.gain}"
        chain = self.chain or (f"not fused: {self.why_alone}" if self.why_alone else "")
        return "\n".join([text, *(f"           {line}" for line in (chain, *self.choices) if line)])


@dataclass(frozen=True)
class SwapReport:
    """Says what `accelerate` does to a model: `str()` for people, `as_dict()` for programs."""

    layers: tuple[LayerSwap, ...]
    note: str = ""  # why no gain is predicted although an example input was given

    @property
    def swapped(self) -> tuple[LayerSwap, ...]:
        return tuple(layer for layer in self.layers if layer.swapped)

    @property
    def left(self) -> tuple[LayerSwap, ...]:
        return tuple(layer for layer in self.layers if not layer.swapped)

    def __str__(self) -> str:
        if not self.layers:
            return "no ConvTranspose3d in this model"
        head = f"{len(self.swapped)} of {len(self.layers)} ConvTranspose3d swapped"
        return "\n".join([head, *(f"  {layer}" for layer in self.layers), *([f"  {self.note}"] if self.note else [])])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def accelerate(
    model: Model,
    *,
    example_input: Any = None,
    report: Callable[[SwapReport], object] | None = None,
    fuse: bool = True,
) -> Model:
    """Swaps every `nn.ConvTranspose3d` of the model for this library's, in place, and returns the model.

    What follows a convolution in a `forward` or in `nn.Sequential` (norms, activations, arithmetic, reductions,
    pools) is fused with it where the forward can be read; `fuse=False` turns that off. `report` is called with a
    `SwapReport` (`report=print` prints it), which names every chain, or says why a convolution has none.

    If an `example_input` is given (a tensor, a tuple of arguments or a
    dictionary of keyword arguments), the report predicts the gain of each layer and, for a model on a GPU, says who
    computes each pass: one of this library's kernels or PyTorch's operator. `restore` undoes all changes.
    """
    checks.check_model(model, "accelerate")
    checks.check_callable(report, "report", "accelerate")
    fusable = fusing.find(model, _runs_here) if fuse else None
    found = _planned(model, example_input, fusable)
    for layer in survey.transposed_convolutions(model):
        if why_left(layer) is None:
            layer.__class__ = rebased(type(layer), nn.ConvTranspose3d, ConvTranspose3d)
            setattr(layer, _MARK, True)
    for module in [] if fusable is None else fusable.modules:
        fusing.fuse(module)
    if report is not None:
        report(found)
    return model


def restore(model: Model) -> Model:
    """Undoes `accelerate`, in place, and returns the model. Layers that were built as tconv3d's stay.

    If another library has replaced the class of a swapped module, and the class cannot be rebuilt on PyTorch's, an
    error names the class and the model is unchanged.
    """
    checks.check_model(model, "restore")
    bases: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]] = []
    for module in model.modules():
        if _MARK in module.__dict__:
            bases.append((module, ConvTranspose3d, nn.ConvTranspose3d))
        elif (fused := fusing.fused_base(module)) is not None:
            bases.append((module, *fused))
    classes = [rebased(type(module), ours, theirs) for module, ours, theirs in bases]
    for (module, *_), kind in zip(bases, classes, strict=True):
        module.__class__ = kind
        module.__dict__.pop(_MARK, None)
        module.__dict__.pop(PLANS, None)
    return model


def plan_swaps(model: nn.Module, *, example_input: Any = None, fuse: bool = True) -> SwapReport:
    """Returns what `accelerate` would do to the model, without changing it."""
    checks.check_model(model, "plan_swaps")
    return _planned(model, example_input, fusing.find(model, _runs_here) if fuse else None)


def _planned(model: nn.Module, example_input: Any, fusable: fusing.Fusable | None) -> SwapReport:
    shapes: dict[nn.Module, tuple[Shape, ...]] = {}
    note = ""
    if example_input is not None:
        try:
            shapes = survey.input_shapes(model, example_input)
        except Exception as error:  # a user's model may raise anything when its tensors have no data
            note = f"no gain is predicted: the model does not run on fake tensors ({type(error).__name__}: {error})"
    chains = {} if fusable is None else fusable.chains
    reasons = {} if fusable is None else fusable.reasons
    layers = []
    for layer, places in survey.transposed_convolutions(model).items():
        reason = why_left(layer)
        gain = None if reason is not None else _gain(layer, shapes.get(layer, ()))
        layers.append(
            LayerSwap(
                places,
                _name(layer),
                swapped=reason is None,
                fused=layer in chains,
                reason=reason or "",
                input_shapes=shapes.get(layer, ()),
                gain=gain,
                choices=() if reason is not None else _choices(layer, shapes.get(layer, ())),
                chain=chains.get(layer, ""),
                why_alone="" if layer in chains or not _runs_here(layer) else reasons.get(layer, _UNREAD),
            )
        )
    return SwapReport(tuple(layers), note)


def why_left(layer: nn.Module) -> str | None:
    """Returns why a transposed convolution is not swapped, or None if it is."""
    if isinstance(layer, torch.jit.ScriptModule):
        return "TorchScript has compiled it"
    if type(layer).__module__.startswith("torch.ao."):
        return "it is quantized"
    assert isinstance(layer, nn.ConvTranspose3d)
    if isinstance(layer, LazyModuleMixin):
        return "it is lazy: call the model once, which gives the layer its shape, then accelerate"
    kind = _before_sharding(parametrize.type_before_parametrizations(layer))
    if issubclass(kind, ConvTranspose3d):
        return "it is tconv3d's already"
    if kind is not nn.ConvTranspose3d:
        return f"{kind.__name__} is a subclass of nn.ConvTranspose3d, and what it changes would be lost"
    if plain.forward_is_replaced(kind):
        return "the forward of nn.ConvTranspose3d itself has been replaced, by another library perhaps"
    if "forward" in layer.__dict__:
        return "its forward has been replaced on the object, by a hook of another library perhaps"
    dtype = survey.weight_of(layer).dtype
    if dtype not in problems.DTYPES:
        return f"there is no kernel for {str(dtype).removeprefix('torch.')}"
    return None


def _before_sharding(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that a layer had before `fully_shard` gave it one of its own, or `kind` if that never was."""
    sharded = sys.modules.get("torch.distributed.fsdp")  # not imported here, because that takes a second
    wrapper = getattr(sharded, "FSDPModule", None)
    if wrapper is None or wrapper not in kind.__bases__:
        return kind
    return next(base for base in kind.__bases__ if base is not wrapper)


def rebased(kind: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """Returns `kind`, which is `old` or a subclass that PyTorch made at run time, derived from `new` instead.

    PyTorch makes such subclasses for one module or for all modules of a class: `parametrize` to compute a weight,
    `fully_shard` to gather it. A new class is made here, because copies or other modules may share `kind`.
    """
    if kind is old:
        return new
    if not kind.__module__.startswith("torch."):
        raise RuntimeError(f"expected the class tconv3d.{old.__name__}, but by now it is {kind.__name__}")
    bases = tuple(rebased(base, old, new) if issubclass(base, old) else base for base in kind.__bases__)
    contents = {key: value for key, value in kind.__dict__.items() if key not in ("__dict__", "__weakref__")}
    return type(kind.__name__.replace(old.__name__, new.__name__), bases, contents)


def _runs_here(layer: nn.Module) -> bool:
    """Tells whether a module is a transposed convolution whose forward is this library's, or will be."""
    if type(layer) is ConvTranspose3d:
        return "forward" not in layer.__dict__
    return type(layer) is nn.ConvTranspose3d and why_left(layer) is None


def _name(layer: nn.Module) -> str:
    kind = parametrize.type_before_parametrizations(layer).__name__
    return f"{kind}({layer.extra_repr()})" if isinstance(layer, nn.ConvTranspose3d) else kind


def _gain(layer: nn.Module, shapes: tuple[Shape, ...]) -> Gain | None:
    """Returns the predicted gain for the largest input that the layer gets, or None if there is no prediction."""
    largest = _largest(shapes)
    if largest is None or not isinstance(layer, nn.ConvTranspose3d):
        return None
    batch, _, *size = largest
    dtype = str(survey.weight_of(layer).dtype).removeprefix("torch.")
    described = {
        "batch": batch,
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "size": size,
        "kernel": layer.kernel_size,
        "stride": layer.stride,
        "groups": layer.groups,
    }
    if dtype == "float32" and problems.tf32_allowed():
        dtype = "tf32"
    return gains.predict(described, dtype, "contiguous")


def _choices(layer: nn.Module, shapes: tuple[Shape, ...]) -> tuple[str, ...]:
    """Says who computes a layer's passes for the largest input that it gets; nothing unless kernels can run here."""
    largest = _largest(shapes)
    if largest is None or not isinstance(layer, nn.ConvTranspose3d):
        return ()
    if not (survey.weight_of(layer).is_cuda or current_backend() == "emulator"):
        return ()
    return explain(layer, largest).choices


def _largest(shapes: tuple[Shape, ...]) -> Shape | None:
    batched = [shape for shape in shapes if len(shape) == 5]
    return max(batched, key=lambda shape: torch.Size(shape).numel(), default=None)
