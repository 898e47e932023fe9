"""`fuse` joins a transposed convolution and what follows it, any Python function of its result, to one module.

The function (the tail) is traced once for each kind of call. What can be computed from the convolution's sums is
computed in its kernel, what needs statistics or other tensors in one pass over the result, and the rest in PyTorch
(`tails/stages.py`). Calls that record gradients store the convolution's result and run tail and gradients as passes
over it, if the whole tail can run so; otherwise the tail runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ..planning.planner import Refused
from ..tails.algebra import Layer
from ..tails.expressions import VALUE
from ..tails.running import Prepared
from ..tails.stages import stages
from ..tails.tracing import CannotTrace, trace
from ..torch_ops import checks, dispatch, ops
from ..torch_ops.chain_ops import Chain
from ..torch_ops.checks import convolution_of
from ..torch_ops.problems import tf32_of
from ..torch_ops.pytorch_ops import result_strides
from .modules import ConvTranspose3d, arguments

MOST_KINDS = 64  # kinds of calls whose stages a module remembers


@dataclass(frozen=True)
class FuseReport:
    """Says what becomes of the parts of a tail: `str()` for people."""

    weight: str  # the affine map that moves into the weight, "" if there is none
    kernel: str  # the expression that the convolution's kernel evaluates, "" if there is none
    statistics: str  # the means and variances that are taken of the result, "" if there are none
    passes: tuple[str, ...]  # the expressions of every pass over the result
    pytorch: tuple[str, ...]  # the operators that run in PyTorch behind the fused part
    why_not: str = ""  # why nothing is fused

    def __str__(self) -> str:
        if self.why_not:
            return f"not fused: {self.why_not}"
        lines = (
            ("in the weight", self.weight),
            ("in the convolution's kernel", self.kernel),
            ("statistics of its result", self.statistics),
            *(("in one pass over its result", each) for each in self.passes),
            ("in PyTorch", ", ".join(self.pytorch)),
        )
        return "\n".join(f"{name}: {text}" for name, text in lines if text) or "nothing follows the convolution"


class FusedTail(nn.Module):
    """Runs a transposed convolution and its tail, fused where that is possible."""

    def __init__(self, convolution: nn.ConvTranspose3d, tail: Callable[..., Any], exact_order: bool) -> None:
        super().__init__()
        self.convolution = convolution
        self.tail = tail
        self.exact_order = exact_order
        self._prepared: dict[Any, Prepared | str] = {}

    def forward(self, input: Tensor, *extra: Any) -> Any:
        """Takes the convolution's input, and what the tail takes after the convolution's result."""
        prepared = self._prepare(input, extra)
        if isinstance(prepared, str):
            return self._unfused(input, *extra)
        weight, bias, *settings = arguments(self.convolution, input, None)
        convolution = convolution_of(*settings)
        try:
            if not self._recording(prepared, input, extra):
                with torch.no_grad():
                    return prepared.run(input, weight, bias, convolution, extra)
            passes = prepared.differentiable
            if passes.possible and not extra:
                return Chain.apply(passes, self._unfused, input, weight, bias, convolution, *passes.wanted)
        except Refused:  # the planner leaves this layer to PyTorch's operator
            pass
        return self._unfused(input, *extra)

    def _unfused(self, input: Tensor, *extra: Any) -> Any:
        return self.tail(self.convolution(input), *extra)

    def _recording(self, prepared: Prepared, input: Tensor, extra: tuple[Any, ...]) -> bool:
        """Tells whether a call records gradients."""
        if not torch.is_grad_enabled():
            return False
        layer = self.convolution
        tensors = [input, layer.weight, layer.bias, *extra, *prepared.differentiable.wanted]
        return any(isinstance(each, Tensor) and each.requires_grad for each in tensors)

    def report(self, input: Tensor, *extra: Any) -> FuseReport:
        """Returns what becomes of the tail in a call with these arguments that records no gradients."""
        with torch.no_grad():
            prepared = self._prepare(input, extra)
        if isinstance(prepared, str):
            return FuseReport("", "", "", (), (), prepared)
        s = prepared.stages
        taken = s.statistics
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
            passes=s.rounds.passes,
            pytorch=s.rounds.left_names,
        )

    def train(self, mode: bool = True) -> FusedTail:
        """Switches between training and evaluation; what was computed from weights is computed again."""
        self._prepared.clear()
        super().train(mode)
        return self

    def _prepare(self, input: Tensor, extra: tuple[Any, ...]) -> Prepared | str:
        """Returns the stages of a call, or why it is not fused."""
        why = self._why_not(input, extra)
        if why is not None:
            return why
        key = self._key(input, extra)
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= MOST_KINDS:
                self._prepared.clear()
            prepared = self._prepared[key] = self._traced(input, extra)
        return prepared

    def _traced(self, input: Tensor, extra: tuple[Any, ...]) -> Prepared | str:
        weight, bias, *settings = arguments(self.convolution, input, None)
        convolution = convolution_of(*settings)
        geometry = checks.check_forward(input, weight, bias, convolution)
        shape = (input.shape[0], geometry.out_channels, *geometry.output_size(tuple(input.shape[2:])))
        layout = shape, result_strides(shape, input, weight), input.dtype, input.device
        try:
            size, kernel = input.shape[2:], weight.shape[2:]
            layer = Layer((size[0], size[1], size[2]), (kernel[0], kernel[1], kernel[2]), convolution)
            return Prepared(stages(trace(self.tail, *layout, extra), self.exact_order, layer=layer))
        except CannotTrace as error:
            return f"the tail cannot be traced: {error}"

    def _why_not(self, input: Tensor, extra: tuple[Any, ...]) -> str | None:
        layer = self.convolution
        tensors = [input, layer.weight, *([] if layer.bias is None else [layer.bias])]
        tensors += [each for each in extra if isinstance(each, Tensor)]
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return "a transform or a compiler looks at the call"
        if input.dim() != 5 or input.numel() == 0:
            return "the input is no batch of volumes"
        if not all(map(dispatch.is_plain, tensors)):
            return "a tensor is not plain memory"
        if torch.is_autocast_enabled(input.device.type):
            return "autocast chooses the types of every operator"
        if type(layer) not in (nn.ConvTranspose3d, ConvTranspose3d) or "forward" in layer.__dict__:
            return "the convolution has a forward of its own"
        if self._watched():
            return "hooks listen to a layer"
        return ops.why_not_ours(input)

    def _watched(self) -> bool:
        """Tells whether hooks listen to the convolution or to a module of the tail."""
        if module_hooks._has_any_global_hook():
            return True
        inside = [module for child in self.children() for module in child.modules()]
        return any(
            each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
            for each in inside
        )

    def _key(self, input: Tensor, extra: tuple[Any, ...]) -> Any:
        """Returns what a trace depends on: shapes, types, layouts, modes of modules, and their parameters."""
        modules = self.tail.modules() if isinstance(self.tail, nn.Module) else ()
        state = tuple(
            (module.training, *map(id, module._parameters.values()), *map(id, module._buffers.values()))
            for module in modules
        )
        passed = tuple(
            (each.shape, each.stride(), each.dtype, each.device) if isinstance(each, Tensor) else repr(each)
            for each in extra
        )
        return input.shape, input.stride(), input.dtype, input.device, tf32_of(input), passed, state


def fuse(layer: nn.ConvTranspose3d, tail: Callable[..., Any], *, exact_order: bool = False) -> FusedTail:
    """Returns a module that computes `tail(layer(input), *more)`, fused into the convolution where that is possible.

    `layer` is a transposed convolution of PyTorch or of this library; its parameters stay its own. `tail` is a
    module, or any function of the convolution's result and of further arguments of the call. Which tensors a function
    captures is found out when a call of a new kind is traced. `exact_order=True` keeps affine maps (inference
    BatchNorm, scales) out of the weight, so that products are rounded as without the map. `FusedTail.report(input)`
    says what is fused.
    """
    if not isinstance(layer, nn.ConvTranspose3d):
        raise TypeError(f"fuse: expected an nn.ConvTranspose3d, got {type(layer).__name__}")
    checks.check_callable(tail, "tail", "fuse")
    return FusedTail(layer, tail, exact_order)
