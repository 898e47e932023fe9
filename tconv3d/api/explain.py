"""Provides `explain`: which kernels a layer would run, why, and the least time that the hardware allows.

`explain` needs no GPU and launches nothing. It asks the planner by the same functions as the executor, so that the
explained plan is the plan that runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isinf, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from .. import emulator
from ..families.norm import planner as norm_planner
from ..families.norm.planner import Activation, NormProblem, Wanted
from ..families.pytorch.planner import KERNEL as PYTORCH
from ..planning import gpus, planner
from ..planning.geometry import Geometry
from ..planning.gpus import DEFAULT_GPU, Gpu
from ..planning.launch import Launch
from ..planning.offers import Answer, Offer, Refusal
from ..planning.problem import Device, Norm, Pass, Plan, Problem, is_channels_last
from ..runtime import compiler, packs
from ..tails.algebra import Moved
from ..tails.kinds import Kind
from ..torch_ops import checks, choosing, executor, ops, problems, pytorch_ops
from ..torch_ops.backend import current_backend
from ..torch_ops.checks import Convolution
from ..torch_ops.problems import DTYPES, OperandAddresses
from . import survey
from .explanation import AxisExplanation, Explanation, PassExplanation, in_microseconds
from .fuse import FusedTail, with_tail
from .modules import ConvTranspose3dReLU, ConvTranspose3dReLUGroupNorm, resolved_output_padding

LEFT = "PyTorch's operator"  # shown in place of a kernel's name if the planner refuses a layer


def explain(
    layer_or_input: torch.nn.ConvTranspose3d | ConvTranspose3dReLUGroupNorm | FusedTail | Tensor,
    *arguments: Any,
    gpu: str | None = None,
    **keywords: Any,
) -> Explanation:
    """Says which kernels a layer or a call would run, and why.

    >>> tconv3d.explain(layer, input)                          # a layer; the input as a tensor or as its shape
    >>> tconv3d.explain(input, weight, bias, stride=2)         # the arguments of conv_transpose3d
    >>> tconv3d.explain(layer, (1, 32, 64, 64, 64), gpu="H200")
    >>> tconv3d.explain(tconv3d.fuse(layer, tail), input, residual)   # a block, and what its tail takes

    `gpu` is a name (`tconv3d.planning.gpus.GPUS`) or a compute capability ("9.0"). The default is the present GPU, or
    H200 if there is none, or the emulator under use_backend("emulator"). The environment variable TCONV3D_AS makes
    each of these plan as another GPU. Tensors may be on the meta device.
    """
    if isinstance(layer_or_input, FusedTail):
        call = call_of(layer_or_input.convolution, *arguments[:1], **keywords)
        with planner.aside():
            return _explain_tail(layer_or_input, call, arguments[1:], gpu)
    call = call_of(layer_or_input, *arguments, **keywords)
    with planner.aside():
        if isinstance(layer_or_input, (ConvTranspose3dReLUGroupNorm, ConvTranspose3dReLU)):
            return _explain_fused(layer_or_input, call, gpu)
        return _explain(*call, find_gpu(gpu, call[0]))


def launches(
    layer: torch.nn.ConvTranspose3d | ConvTranspose3dReLUGroupNorm,
    input: Tensor | Sequence[int],
    device: Device,
    passes: Collection[Pass] = tuple(Pass),
) -> tuple[Launch, ...]:
    """Returns the kernel launches of a layer's passes, which can be compiled before its first call.

    The launches of calls that keep the packed weight are included, and those of all offers that the first call times.
    """
    call = call_of(layer, input)
    problems = [problem for problem in problems_of(*call) if problem.which in passes]
    if problems and _refusal(problems[0]) is not None:
        return ()
    plans: list[Plan] = []
    if isinstance(layer, ConvTranspose3dReLU):
        problems[0] = _activated_problem(call, None)
    elif isinstance(layer, ConvTranspose3dReLUGroupNorm):
        problems[0] = _activated_problem(call, layer.group_norm)
        normalize, gradient = _norm_plans(problems[0], layer.group_norm, device)
        plans = [normalize, gradient] if len(passes) > 1 else [normalize]
        # The norm's gradient includes the gradient of the convolution's bias.
        problems = [problem for problem in problems if problem.which is not Pass.BIAS_GRAD]
    plans += _plans(problems, device)
    return _launches_of(plans)


def tail_launches(block: FusedTail, input: Tensor, extra: Sequence[Any], device: Device) -> tuple[Launch, ...]:
    """Returns the launches of the convolution in a call of a block without gradients, which evaluate its tail.

    Passes over the convolution's result are not among them. Tensors may be on the meta device.
    """
    call = call_of(block.convolution, input)
    kind = block.example_kind(input, extra)
    problem = None if isinstance(kind, str) else _tail_problem(kind, call, device)
    if problem is None or _refusal(problem) is not None:
        return ()
    return _launches_of(_plans([problem], device))


def _launches_of(plans: Sequence[Plan]) -> tuple[Launch, ...]:
    return tuple(launch for plan in plans for launch in plan.every_launch)


def _plans(problems: Sequence[Problem], device: Device) -> list[Plan]:
    """Returns the plans of a training step: the forward pass, then the gradients of one backward pass."""
    forward = [problem for problem in problems if problem.which is Pass.FORWARD]
    gradients = tuple(problem for problem in problems if problem.which is not Pass.FORWARD)
    plans = [replace(planner.plan(problem, device), passes=(Pass.FORWARD,)) for problem in forward]
    plans += planner.gradient_plans(gradients, device)
    if executor.is_present(device):
        for asked in (tuple(forward), gradients):
            plans += choosing.contending_plans({problem.which: problem for problem in asked}, device)
    return plans


Call = tuple[Tensor, Tensor, Tensor | None, Convolution]


def call_of(
    layer_or_input: torch.nn.ConvTranspose3d | ConvTranspose3dReLUGroupNorm | Tensor, *arguments: Any, **keywords: Any
) -> Call:
    """Returns the convolution of a layer and its input, or of the arguments of `conv_transpose3d`."""
    layer = layer_or_input
    if isinstance(layer, Tensor):
        _check_arguments(_call, "an input tensor", layer, *arguments, **keywords)
        return _call(layer, *arguments, **keywords)
    layer = checked_layer(layer, "a ConvTranspose3d layer, a fused block or an input tensor")
    _check_arguments(_call_of_layer, "a layer", layer, *arguments, **keywords)
    return _call_of_layer(layer, *arguments, **keywords)


def checked_layer(
    layer: object, expected: str = "a ConvTranspose3d layer or a fused block"
) -> torch.nn.ConvTranspose3d:
    """Returns the convolution of a layer or of a fused block; raises a TypeError for anything else."""
    if isinstance(layer, ConvTranspose3dReLUGroupNorm):
        return layer.conv_transpose
    if not isinstance(layer, torch.nn.ConvTranspose3d):
        advice = ": name one of its layers" if isinstance(layer, torch.nn.Module) else ""
        raise TypeError(f"expected {expected}, but got {checks.kind_of(layer)}{advice}")
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise TypeError("expected a layer that has its shape, but got a lazy one: call it once with an input")
    return layer


def _check_arguments(function: Callable[..., Call], first: str, *arguments: Any, **keywords: Any) -> None:
    """Raises a TypeError for missing or extra arguments that does not name an internal function."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        names = ", ".join(list(inspect.signature(function).parameters)[1:])
        raise TypeError(f"after {first}, expected {names}: {error}") from None


def _call_of_layer(
    layer: torch.nn.ConvTranspose3d, input: Tensor | Sequence[int], output_size: list[int] | None = None
) -> Call:
    weight = survey.weight_of(layer)
    if not isinstance(input, Tensor):
        if not isinstance(input, Sequence) or not all(isinstance(size, int) for size in input):
            raise TypeError(f"expected input to be a Tensor or its shape (five integers), but got {input!r}")
        input = torch.empty(tuple(input), dtype=weight.dtype, device="meta")
    output_padding = resolved_output_padding(layer, input, output_size)
    settings: list[Any] = [layer.stride, layer.padding, output_padding, layer.groups, layer.dilation]
    return _call(input, weight, layer.bias, *settings)


def _call(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Call:
    checks.check_tensors(input, weight, bias)
    checks.check_rank(input, weight)
    convolution = checks.convolution_of(stride, padding, output_padding, groups, dilation)
    return (input.unsqueeze(0) if input.dim() == 4 else input), weight, bias, convolution


def find_gpu(name: str | None, tensor: Tensor) -> tuple[Device, Gpu | None]:
    """Returns the device to plan for, and its ceilings if they are known."""
    if name is None and current_backend() == "emulator":
        return executor.device_of(torch.empty(0)), None
    if name is None and not torch.cuda.is_available():
        default = gpus.find(DEFAULT_GPU)
        return gpus.as_told(default.device), default
    if name is None:
        index = tensor.get_device() if tensor.is_cuda else torch.cuda.current_device()
        device = executor.device_of(torch.empty(0, device=f"cuda:{index}"))
        return device, gpus.known(device)
    found = gpus.find(name)
    return found.device, found


def _precision(problem: Problem) -> str:
    """Says in words how exact the products are."""
    if problem.loose:
        return "float32 products: TF32 is allowed, but PyTorch computes layers with such groups in float32"
    return "TF32 products allowed" if problem.tf32 else f"{problem.dtype} products"


def _explain(
    input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution, found: tuple[Device, Gpu | None]
) -> Explanation:
    device, gpu = found
    problems = problems_of(input, weight, bias, convolution)
    geometry, dtype = problems[0].geometry, problems[0].dtype
    refusal = _refusal(problems[0])
    passes = _explain_passes(problems, device, gpu)
    output_shape = (input.shape[0], geometry.out_channels, *problems[0].output_size)
    return Explanation(
        layer=describe(geometry, bias is not None),
        input_shape=tuple(input.shape),
        output_shape=output_shape,
        dtype=dtype,
        precision=_precision(problems[0]),
        layout="channels_last_3d" if pytorch_ops.suggests_channels_last(input) else "contiguous",
        gpu=f"{device.name} (compute capability {device.capability[0]}.{device.capability[1]})",
        ceilings="not known" if gpu is None else f"{gpu.copy} TB/s, {gpu.source}",
        here=_here(input, weight, refusal, passes),
        taps=geometry.taps,
        phases=geometry.phases,
        empty_phases=geometry.empty_phases,
        axes=tuple(
            AxisExplanation(
                name,
                tuple(tuple((tap, axis.shift(tap)) for tap in axis.taps(f)) for f in range(axis.stride)),
            )
            for name, axis in zip(("depth", "height", "width"), geometry.axes, strict=True)
            if refusal is None
        ),
        passes=passes,
    )


def problems_of(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    convolution: Convolution,
    contiguous_gradient: bool = False,
) -> list[Problem]:
    """Returns the problems of a training step, made by the functions that the executor uses.

    The output gradient is assumed to be a new tensor with the output's strides, or contiguous if told so.
    """
    at = OperandAddresses(*(0 if tensor.is_meta else tensor.data_ptr() for tensor in (input, weight)))
    input, weight = _on_meta(input), _on_meta(weight)  # an input given as a shape has no device
    bias = None if bias is None else _on_meta(bias)
    if input.dtype not in DTYPES:
        checks.check_forward(input, weight, bias, convolution)
        dtype = str(input.dtype).removeprefix("torch.")
        raise NotImplementedError(f"PyTorch's operator runs dtype {dtype}: tconv3d has no kernel for it")
    forward, (shape, strides) = problems.forward(input, weight, bias, convolution, at)
    grad_output = torch.empty_strided(shape, strides, dtype=input.dtype, device="meta")
    grad_output = grad_output.contiguous() if contiguous_gradient else grad_output
    size, kernel = forward.input_size, forward.geometry.kernel
    asked = [
        problems.input_grad(grad_output, weight, size, convolution, at),
        problems.weight_grad(grad_output, input, kernel, convolution, at),
        *([] if bias is None else [problems.bias_grad(grad_output, at)]),
    ]
    return [forward, *(problem for problem, _ in asked)]


def _on_meta(tensor: Tensor) -> Tensor:
    """Returns a meta tensor with equal strides, even for views with gaps, whose strides `Tensor.to` would change."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _refusal(problem: Problem) -> str | None:
    """Returns why the planner leaves a call to PyTorch's operator, or None if it does not."""
    try:
        planner.check_limits(problem)
    except planner.Refused as refusal:
        return str(refusal)
    return None


def _explain_passes(problems: Sequence[Problem], device: Device, gpu: Gpu | None) -> tuple[PassExplanation, ...]:
    reason = _refusal(problems[0])
    if reason is not None:
        left = Plan(LEFT, reason, (), tile="PyTorch's choice")
        return tuple(_explain_pass(problem, left, gpu) for problem in problems)
    explained: list[PassExplanation] = []
    for forward in (True, False):
        wanted = {p.which: p for p in problems if (p.which is Pass.FORWARD) is forward}
        if wanted:
            explained += _explain_call(wanted, device, gpu)
    return tuple(explained)


def _explain_call(wanted: Mapping[Pass, Problem], device: Device, gpu: Gpu | None) -> Iterator[PassExplanation]:
    """Explains the passes of one call: a forward pass, or the gradients of a backward pass."""
    present, backend = executor.is_present(device), current_backend()
    settings = choosing.circumstances(present, backend)
    if not present and device != executor.device_of(torch.empty(0)):  # a GPU by name: what would run there
        settings = False, backend in ("auto", "torch")
    with planner.meeting(wanted, device):
        choice = choosing.choice(wanted, device, settings, present)
        plans = {which: plan for plan in planner.plans_of(choice.cover, wanted, device) for which in plan.passes}
    offers = [each for each in choice.answers if isinstance(each, Offer)]
    times = [each.microseconds for each in offers if each.kernel == PYTORCH]
    theirs = next((time for time in times if not isinf(time)), None)
    later = choosing.measures(wanted, offers, device, settings[0], present)
    measured = "not measured yet: offers are timed at the first call" if later else ""
    measured = measured if choice.winner is None else str(choice.winner)
    for which, problem in wanted.items():
        offer = next(offer for offer in choice.cover if which in offer.passes)
        passed_over = _passed_over(which, offer, choice.answers)
        if not settings[1]:
            passed_over[PYTORCH] = choosing.why_no_pytorch(present, backend) or "it is not asked in the emulator"
        yield replace(
            _explain_pass(problem, plans[which], gpu),
            passed_over=passed_over,
            predicted_us=None if isinf(offer.microseconds) else offer.microseconds,
            pytorch_us=theirs,
            packed=_packed(plans[which], device),
            measured=measured,
            measured_us={} if choice.winner is None else {t.name: t.microseconds for t in choice.winner.timings},
        )


def _passed_over(which: Pass, taken: Offer, answers: Sequence[Answer]) -> dict[str, str]:
    """Returns the answers of all kernels that were not taken for a pass, in words."""
    found: dict[str, str] = {}
    for answer in answers:
        if which not in answer.passes or (answer.kernel, answer.passes) == (taken.kernel, taken.passes):
            continue
        others = [each.value for each in answer.passes if each is not which]
        if isinstance(answer, Refusal):
            found.setdefault(answer.kernel, answer.why)
            continue
        beside = f" together with {' and '.join(others)}" if others else ""
        found[answer.kernel + beside] = _price(answer, taken)
    return found


def _price(offer: Offer, taken: Offer) -> str:
    """Says how long an offer that was not taken is predicted to take."""
    # The planner predicts a time only if the lower bound could still win; otherwise the bound itself is shown.
    if offer.least_microseconds >= taken.microseconds:
        return f"predicted to take at least {in_microseconds(offer.least_microseconds)}"
    if isinf(offer.microseconds):
        return (
            "its time is not known before it is timed on a GPU" if offer.kernel == PYTORCH else "no build of it fits"
        )
    text = f"predicted to take {in_microseconds(offer.microseconds)}"
    surcharge = offer.taken.surcharge
    if surcharge == 1.0:
        return text
    if isinf(surcharge):
        return f"{text}; it is not taken by prediction, because nobody has measured it on this GPU"
    doubt = "by rates derived from another kernel's"
    if offer.kernel == PYTORCH:
        doubt = f"right within a factor of {surcharge:.2g}"
    return f"{text}, {doubt}; it is taken if {in_microseconds(offer.price)} is the least"


def _explain_pass(problem: Problem, plan: Plan, gpu: Gpu | None) -> PassExplanation:
    several = plan.passes if len(plan.passes) > 1 else ()
    comes_with = bool(several) and problem.which is not several[0]
    bound = None
    if gpu is not None:
        moving = problem.bytes / gpu.copy >= problem.flops / gpu.rate(problem)
        bound = "memory" if moving else "arithmetic"
    return PassExplanation(
        name=problem.which.value,
        kernel=plan.kernel,
        why=plan.why,
        passed_over={},
        tile=plan.tile,
        launches=0 if comes_with else len(plan.launches),
        workspace_bytes=0 if comes_with else plan.workspace_bytes,
        bytes=problem.bytes,
        flops=problem.flops,
        floor_ms=None if gpu is None else gpu.floor_ms(problem),
        bound_by=bound,
        kept_bytes=(plan.kept or plan).packed_bytes,
        together=tuple(which.value for which in several),
    )


def _packed(plan: Plan, device: Device) -> str:
    """Says which kernels of a plan come from loaded packs; empty if no pack is loaded."""
    if not packs.loaded():
        return ""
    kernels = dict.fromkeys((launch.kernel, launch.constants) for launch in plan.launches)
    arch = compiler.architecture(device.compiled_capability)
    names = [
        emulator.packed_name(*each) if device == executor.EMULATED else compiler.packed_name(*each, arch)
        for each in kernels
    ]
    holders = [pack for name in names if (pack := packs.holder(name)) is not None]
    places = ", ".join(dict.fromkeys(str(pack.path) for pack in holders))
    return f"{len(holders)} of {len(names)} kernels from " + (f"the pack {places}" if holders else "loaded packs")


# ---- Layers with a fused ReLU or GroupNorm.


def _explain_fused(
    layer: ConvTranspose3dReLUGroupNorm | ConvTranspose3dReLU, call: Call, gpu: str | None
) -> Explanation:
    """Returns the convolution's explanation with the passes that a fused ReLU or GroupNorm changes or adds."""
    device, ceilings = find_gpu(gpu, call[0])
    plain = _explain(*call, (device, ceilings))
    norm = layer.group_norm if isinstance(layer, ConvTranspose3dReLUGroupNorm) else None
    problem = _activated_problem(call, norm)
    (forward,) = _explain_passes([problem], device, ceilings)
    if norm is None:
        return replace(plain, layer=f"{plain.layer}, ReLU", passes=(forward, *plain.passes[1:]))
    normalize, gradient = _norm_plans(problem, norm, device)
    moved = activation(problem).bytes
    gradients = [each for each in problems_of(*call) if each.which in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)]
    passes = (
        forward,
        replace(_explain_sweep("normalize", normalize, 2 * moved, ceilings), packed=_packed(normalize, device)),
        # The norm's gradient includes the gradient of the convolution's bias.
        replace(
            _explain_sweep("norm_grad", gradient, (5 if gradient.kernel == "norm_grad" else 3) * moved, ceilings),
            packed=_packed(gradient, device),
        ),
        *_explain_passes(gradients, device, ceilings),
    )
    text = f"{plain.layer}, ReLU, GroupNorm of {norm.num_groups} groups{'' if norm.affine else ', not affine'}"
    return replace(plain, layer=text, passes=passes)


def _explain_tail(block: FusedTail, call: Call, extra: Sequence[Any], gpu: str | None) -> Explanation:
    """Returns the convolution's explanation with a forward pass that evaluates a tail, and what becomes of the rest.

    Gradients are those of calls that record them, whose forward pass stores the convolution's plain result.
    """
    device, ceilings = find_gpu(gpu, call[0])
    report, kind = block.example_report(call[0], extra, device), block.example_kind(call[0], extra)
    plain = replace(_explain(*call, (device, ceilings)), tail=tuple(report.lines))
    if isinstance(kind, str):
        return replace(plain, layer=f"{plain.layer}, tail")
    problem = _tail_problem(kind, call, device)
    forward = [] if problem is None else _explain_passes([problem], device, ceilings)
    return replace(plain, layer=f"{plain.layer}, tail", passes=(*forward, *plain.passes[1:]))


def _tail_problem(kind: Kind, call: Call, device: Device) -> Problem | None:
    """Returns the forward pass that evaluates a tail, or None if the tail leaves no convolution."""
    stages = kind.prepared.stages
    if stages.moved is not None:
        given = _moved_call(stages.moved, call)
        if given is None:
            return None
        call = given
    return with_tail(kind, problems_of(*call)[0], device)[0]


def _moved_call(moved: Moved, call: Call) -> Call | None:
    """Returns the convolution that computes a linear operator of another one's result, or None if a product does."""
    input, weight, bias, _ = call
    found: list[Call] = []

    def convolve(*given: Any) -> Tensor:
        found.append(given)
        return torch.conv_transpose3d(*given[:3], *given[3])

    operands = moved.operands(_on_meta(weight), None if bias is None else _on_meta(bias))
    moved.forward(_on_meta(input), *operands, convolve)
    return found[0] if found else None


def activation(problem: Problem) -> Activation:
    """Returns the result of a forward pass as the norm's planner describes it."""
    last = is_channels_last(problem.output)
    size = prod(problem.output_size)
    return Activation(problem.batch, problem.geometry.out_channels, size, problem.dtype, last)


def _norm_plans(problem: Problem, norm: torch.nn.GroupNorm, device: Device) -> tuple[Plan, Plan]:
    """Returns the plans of normalization and of its gradient, for a norm after a forward pass."""
    parameter = next((DTYPES[tensor.dtype] for tensor in norm.parameters()), problem.dtype)
    normed = NormProblem(activation(problem), problem.dtype, parameter, norm.num_groups)
    wanted = Wanted(True, norm.affine, problem.bias)
    return norm_planner.plan_normalize(normed, device), norm_planner.plan_gradient(normed, wanted, device)


def _activated_problem(call: Call, norm: torch.nn.GroupNorm | None) -> Problem:
    forward = problems_of(*call)[0]
    if norm is None:
        return replace(forward, relu=True)
    checks.check_norm_groups(forward.geometry.out_channels, norm.num_groups)
    return replace(forward, relu=True, norm=Norm(norm.num_groups, norm.eps))


def _explain_sweep(name: str, plan: Plan, moved: int, gpu: Gpu | None) -> PassExplanation:
    """Explains a pass over memory, whose arithmetic takes negligible time."""
    return PassExplanation(
        name=name,
        kernel=plan.kernel,
        why=plan.why,
        passed_over={},
        tile=plan.tile,
        launches=len(plan.launches),
        workspace_bytes=plan.workspace_bytes,
        bytes=moved,
        flops=0,
        floor_ms=None if gpu is None else moved / gpu.copy / 1e9,
        bound_by=None if gpu is None else "memory",
    )


def _here(input: Tensor, weight: Tensor, refusal: str | None, passes: Sequence[PassExplanation]) -> str:
    if input.is_meta or weight.is_meta:
        return "nothing runs: the tensors are on the meta device"
    try:
        reason = ops.why_not_ours(input)
    except (RuntimeError, NotImplementedError) as error:
        return f"an error: {error}"
    if reason is None and refusal is not None and current_backend() != "auto":
        return f"an error: tconv3d has no kernel: {refusal}"
    if reason is not None or refusal is not None:
        return f"PyTorch's operator ({reason or refusal})"
    theirs = [each.name for each in passes if each.kernel == PYTORCH]
    if theirs:
        ours = "" if len(theirs) == len(passes) else "; these kernels for all others"
        return f"PyTorch's operator, the fastest offer, for {', '.join(theirs)}{ours}"
    return "these kernels" if input.is_cuda else "these kernels, in the emulator"


def describe(geometry: Geometry, bias: bool) -> str:
    """Describes a layer in few words: settings with PyTorch's default value are left out."""

    def three(values: tuple[int, ...]) -> str:
        return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))

    text = f"ConvTranspose3d {geometry.in_channels} -> {geometry.out_channels}, kernel {three(geometry.kernel)}"
    for name in ("stride", "padding", "output_padding", "dilation"):
        values = tuple(getattr(axis, name) for axis in geometry.axes)
        if set(values) != {1 if name in ("stride", "dilation") else 0}:
            text += f", {name} {three(values)}"
    return text + (f", groups {geometry.groups}" if geometry.groups > 1 else "") + ("" if bias else ", no bias")
