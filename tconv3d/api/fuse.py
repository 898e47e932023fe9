"""`fuse` joins a transposed convolution and what follows it, any Python function of its result, to one module.

The function (the tail) is traced once for each kind of call. What can be computed from the convolution's sums is
computed in its kernel, what needs statistics or other tensors in one pass over the result, and the rest in PyTorch
(`tails/stages.py`). Calls that record gradients store the convolution's result and run tail and gradients as passes
over it, if the whole tail can run so; otherwise the tail runs as it is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as module_hooks

from ..planning import planner
from ..planning.planner import Refused
from ..planning.problem import Device, Norm, Problem
from ..tails.expressions import VALUE
from ..tails.kinds import Kind, Kinds
from ..torch_ops import checks, dispatch, executor, ops, problems
from ..torch_ops.casting import cast_operands
from ..torch_ops.chain_ops import chain
from ..torch_ops.checks import Convolution, convolution_of
from ..torch_ops.dispatch import recording
from ..torch_ops.problems import OperandAddresses, Tail
from .captures import captures
from .conditions import is_constant
from .functional import conv_transpose3d
from .modules import ConvTranspose3d, arguments


@dataclass(frozen=True)
class FuseReport:
    """Says what becomes of the parts of a tail: `str()` for people."""

    weight: str  # the affine map that moves into the weight, "" if there is none
    kernel: str  # the expression that the convolution's kernel evaluates, "" if there is none
    statistics: str  # the means and variances that are taken of the result, "" if there are none
    passes: tuple[str, ...]  # the expressions of every pass over the result
    pytorch: tuple[str, ...]  # the operators that run in PyTorch, before and behind the fused part
    why_not: str = ""  # why nothing is fused
    gradients: tuple[str, ...] = ()  # what calls that record gradients run instead
    channels: str = ""  # what the kernel computes over the channels of a position, "" if there is nothing
    behind: str = ""  # why a pass computes what follows over the channels, "" if it does not

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """The report in lines."""
        if self.why_not:
            return [f"not fused: {self.why_not}"]
        lines = (
            ("in the weight", self.weight),
            ("in the convolution's kernel", self.kernel),
            ("over channels in the convolution's kernel", self.channels),
            ("statistics of its result", self.statistics),
            *(("in one pass over its result", each) for each in self.passes),
            ("not in the convolution's kernel", self.behind),
            ("in PyTorch", ", ".join(self.pytorch)),
        )
        found = [f"{name}: {text}" for name, text in lines if text] or ["nothing follows the convolution"]
        return [*found, *(f"if gradients are recorded, {text}" for text in self.gradients)]


_NOTHING = contextlib.nullcontext()

Call: TypeAlias = tuple[Kind, Tensor, Tensor | None, Convolution]  # what a call runs: weight, bias and settings


class FusedTail(nn.Module):
    """Runs a transposed convolution and its tail, fused where that is possible."""

    words = "fused"  # what a profiler shows

    def __init__(self, convolution: nn.ConvTranspose3d, tail: Callable[..., Any], exact_order: bool) -> None:
        super().__init__()
        self.convolution = convolution
        self.tail = tail
        self.exact_order = exact_order
        self._kinds = Kinds(tail, exact_order)

    def forward(self, input: Tensor, *extra: Any) -> Any:
        """Takes the convolution's input, and what the tail takes after the convolution's result."""
        if torch.compiler.is_compiling():
            return self._compiled(input, *extra)
        if torch._C._autograd._profiler_enabled():
            return dispatch.named_call(self.words, self._run, (input,), input, *extra)
        return self._run(input, *extra)

    def _run(self, input: Tensor, *extra: Any) -> Any:
        call = self._call(input, extra)
        if isinstance(call, str):
            return self._unfused(input, *extra)
        kind, weight, bias, convolution = call
        passed = [each for each in extra if isinstance(each, Tensor)]
        try:
            if not recording(input, weight, bias, *passed, *kind.captured):
                with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
                    operands = cast_operands(input, weight, bias, keep=True)
                    return kind.prepared.run(*operands, convolution, extra, (weight, bias))
            self._kinds.forget_constants()
            passes = kind.recorded(passed)
            if passes.possible:
                operands = cast_operands(input, weight, bias, keep=False)
                return passes.finish(chain(passes, *operands, convolution, passed), passed)
        except Refused:  # the planner leaves this layer to PyTorch's operator
            pass
        return self._unfused(input, *extra)

    def _compiled(self, input: Tensor, *extra: Any) -> Any:
        """Calls this library's convolution and then the tail: what is fused is decided by what compiles the graph."""
        layer = self.convolution
        if type(layer) is not nn.ConvTranspose3d or layer._forward_hooks or layer._forward_pre_hooks:
            return self._unfused(input, *extra)
        return self.tail(conv_transpose3d(input, *arguments(layer, input, None)), *extra)

    def _call(self, input: Tensor, extra: tuple[Any, ...]) -> Call | str:
        """Returns what a call runs and the operands besides the input, or why the call is not fused."""
        layer: Any = self._modules["convolution"]
        if type(layer) not in (nn.ConvTranspose3d, ConvTranspose3d) or "forward" in layer.__dict__:
            return "the convolution has a forward of its own"
        weight, bias, *settings = arguments(layer, input, None)
        why = self._why_not(input, weight, bias, extra)
        if why is not None:
            return why
        convolution, state = convolution_of(*settings), self._state()
        why = self._why_new(input, extra, state)
        kind = why or self._kinds.find(input, weight, bias, convolution, extra, state)
        return kind if isinstance(kind, str) else (kind, weight, bias, convolution)

    def _why_new(self, input: Tensor, extra: tuple[Any, ...], state: Any) -> str | None:
        """Returns why a call of this kind is not fused, although it could be."""
        return None

    def _unfused(self, input: Tensor, *extra: Any) -> Any:
        return self.tail(self.convolution(input), *extra)

    def report(self, input: Tensor, *extra: Any) -> FuseReport:
        """Returns what becomes of the tail in a call with these arguments.

        Unless gradients are switched off, what calls that record gradients run is part of the report.
        """
        call = self._call(input, extra)
        if isinstance(call, str):
            return FuseReport("", "", "", (), (), call)
        return _report(call[0], input, self, extra, executor.device_of(input))

    def example_kind(self, input: Tensor, extra: Sequence[Any]) -> Kind | str:
        """Returns what a call with tensors of this kind would run, on any device; they may have no data."""
        weight, bias, *settings = arguments(self.convolution, input, None)
        with FakeTensorMode(allow_non_fake_inputs=True):
            x, *rest = (_example(each, weight.device) for each in (input, *extra))
        return self._kinds.find(x, weight, bias, convolution_of(*settings), rest, self._state())

    def example_report(self, input: Tensor, extra: Sequence[Any], device: Device) -> FuseReport:
        """Returns the report of `example_kind` for a device."""
        kind = self.example_kind(input, extra)
        if isinstance(kind, str):
            return FuseReport("", "", "", (), (), kind)
        return _report(kind, input, self, extra, device)

    def train(self, mode: bool = True) -> FusedTail:
        """Switches between training and evaluation; what was computed from weights is computed again."""
        self._kinds.forget()
        super().train(mode)
        return self

    def _why_not(self, input: Tensor, weight: Tensor, bias: Tensor | None, extra: tuple[Any, ...]) -> str | None:
        if dispatch.in_forward_mode():
            return "derivatives are computed in forward mode"
        if not dispatch.unchanged_but_cast(input, weight, bias):
            if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
                return "a transform or a compiler looks at the call"
            if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
                return "a mode of PyTorch's dispatcher looks at the call"
            return "a tensor is not plain memory"
        if not all(dispatch.is_plain(each) for each in extra if isinstance(each, Tensor)):
            return "a tensor is not plain memory"
        if input.dim() != 5 or input.numel() == 0:
            return "the input is no batch of volumes"
        if self._watched():
            return "hooks listen to a layer"
        return ops.why_not_ours(input)

    def _watched(self) -> bool:
        """Tells whether hooks listen to the convolution or to a module of the tail."""
        if module_hooks._has_any_global_hook():
            return True
        inside = [module for child in self.children() for module in child.modules()]
        if not isinstance(self.tail, nn.Module):
            inside += [each for each in captures(self.tail) if isinstance(each, nn.Module)]
        return any(
            each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
            for each in inside
        )

    def _state(self) -> Any:
        """Returns what a trace depends on besides the arguments: modes and tensors of modules, and other captures."""
        found = self.tail.modules() if isinstance(self.tail, nn.Module) else captures(self.tail)
        return tuple([_state_of_captured(each) for each in found])


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns the mode of a module and which tensors it has, with their types and shapes."""
    own = module.__dict__
    tensors = (*own["_parameters"].values(), *own["_buffers"].values())
    return own["training"], *((id(each), each.dtype, each.shape) if each is not None else None for each in tensors)


def _state_of_captured(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return state_of(value), constants_of(value)
    return (id(value), value.dtype, value.shape) if isinstance(value, Tensor) else (type(value), value)


def constants_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns the settings of a module, such as the slope of an activation."""
    return tuple(value for name, value in module.__dict__.items() if name[0] != "_" and is_constant(value))


def _example(value: Any, device: torch.device) -> Any:
    """Returns a tensor without data on a device for a tensor, and any other value itself."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def with_tail(kind: Kind, problem: Problem, device: Device) -> tuple[Problem, str]:
    """Returns a forward pass with what its kernel computes of a tail, and why that is not more ("" if it is all)."""
    s = kind.prepared.stages
    if s.statistics is not None:
        problem = replace(problem, norm=Norm(s.statistics.groups, 0.0))
    if s.statistics is not None or s.over_channels is not None or s.epilogue != VALUE:
        vectors, wholes = len(s.vectors), len(s.operands.wholes)
        problem = replace(problem, tail=s.epilogue.cpp, tail_vectors=vectors, tail_wholes=wholes, tail_reads=s.reads)
    if s.over_channels is None:
        return problem, ""
    tail = s.over_channels_of(Tail(s.epilogue.cpp))
    inside = replace(problem, channels=tail.channels, per_position=tail.kind[-1])
    why = planner.why_not_over_channels(inside, device)
    return (inside, "") if why is None else (problem, why)


def _over_channels(kind: Kind, input: Tensor, block: FusedTail, device: Device) -> str | None:
    """Returns why the kernel does not compute what follows over channels, "" if it does; None if nothing follows."""
    if kind.prepared.stages.over_channels is None:
        return None
    weight, bias, *settings = arguments(block.convolution, input, None)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x, w, b = (_example(each, weight.device) for each in (input, weight, bias))
        operands = cast_operands(x, w, b, keep=False)
    problem, _ = problems.forward(*operands, convolution_of(*settings), OperandAddresses())
    return with_tail(kind, problem, device)[1]


def _report(kind: Kind, input: Tensor, block: FusedTail, extra: Sequence[Any], device: Device) -> FuseReport:
    s = kind.prepared.stages
    behind = _over_channels(kind, input, block, device)
    taken, passed = s.statistics, [each for each in extra if isinstance(each, Tensor)]
    layer = block.convolution
    wanted = recording(input, layer.weight, layer.bias, *passed, *kind.captured)
    return FuseReport(
        weight=", ".join(
            [
                *([] if s.affine.expression == VALUE else [str(s.affine.expression)]),
                *([] if s.moved is None else [s.moved.text]),
            ]
        ),
        kernel="" if s.epilogue == VALUE else str(s.epilogue),
        statistics=""
        if taken is None
        else f"of {taken.groups} norm groups" + (", over the batch" if taken.over_batch else ""),
        passes=s.rounds.passes[1:] if behind == "" else s.rounds.passes,
        pytorch=s.in_pytorch,
        gradients=kind.recorded(passed).texts if wanted else (),
        channels=str(s.over_channels) if behind == "" else "",
        behind=behind or "",
    )


def fuse(layer: nn.ConvTranspose3d, tail: Callable[..., Any], *, exact_order: bool = False) -> FusedTail:
    """Returns a module that computes `tail(layer(input), *more)`, fused into the convolution where that is possible.

    `layer` is a transposed convolution of PyTorch or of this library; its parameters stay its own. `tail` is a
    module, or any function of the convolution's result and of further arguments of the call. Which tensors a function
    captures is found out when a call of a new kind is traced. `exact_order=True` keeps affine maps (inference
    BatchNorm, scales) out of the weight, so that products are rounded as without the map, and in the order in which
    they are written. `FusedTail.report(input)` says what is fused.
    """
    if not isinstance(layer, nn.ConvTranspose3d):
        raise TypeError(f"fuse: expected an nn.ConvTranspose3d, got {type(layer).__name__}")
    checks.check_callable(tail, "tail", "fuse")
    return FusedTail(layer, tail, exact_order)
