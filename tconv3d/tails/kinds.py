"""Remembers what the calls of a tail run, by their kind: shapes, types, layouts, and the state of autocast.

A call of a new kind traces the tail and divides it into stages. This module knows graphs and tensors, no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_ops import checks
from ..torch_ops.casting import autocast_type, cast_operands
from ..torch_ops.checks import Convolution
from ..torch_ops.dispatch import device_type
from ..torch_ops.problems import tf32_of
from ..torch_ops.pytorch_ops import result_strides
from .algebra import Layer
from .recording import Differentiable
from .running import Prepared, captured_in
from .stages import stages
from .tracing import CannotTrace, trace

MOST_KINDS = 64  # kinds of calls that are remembered for a tail


@dataclass
class Kind:
    """Holds what calls of one kind run: without gradients, and with gradients of some tensors."""

    traced: fx.GraphModule
    prepared: Prepared
    captured: tuple[Tensor, ...]
    _recorded: dict[tuple[bool, ...], Differentiable] = field(default_factory=dict)

    def recorded(self, passed: Sequence[Tensor]) -> Differentiable:
        """Returns what calls run that record gradients."""
        return self.recorded_for(tuple([each.requires_grad for each in passed]), stores_z=False)

    def recorded_for(self, needed: tuple[bool, ...], stores_z: bool = True) -> Differentiable:
        """Returns what calls run that record gradients; `needed` says which of the passed tensors need one.

        Unless the convolution `stores_z`, its kernel may compute the beginning of the tail.
        """
        key = (stores_z, *needed, *[each.requires_grad for each in self.captured])
        found = self._recorded.get(key)
        if found is None:
            found = self._recorded[key] = Differentiable(self.traced, needed, stores_z)
        return found


class Kinds:
    """Holds the kinds of calls of one tail that were met so far."""

    def __init__(
        self,
        tail: Callable[..., Any],
        exact_order: bool,
        steady: frozenset[int] = frozenset(),
        written: frozenset[int] = frozenset(),
    ) -> None:
        """Takes a tail, and places of its arguments behind the convolution's result.

        `steady` are those of tensors that are mostly the same in all calls, such as parameters; `written` are those
        of tensors that the tail may write to.
        """
        self.tail, self.exact_order = tail, exact_order
        self.steady, self.written = steady, written
        self._met: dict[Any, Kind | str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what was traced: copies trace for themselves, with the tensors of their own tail."""
        return {**self.__dict__, "_met": {}}

    def forget(self) -> None:
        """Drops everything, so that the next call traces the tail again."""
        self._met.clear()

    def forget_constants(self) -> None:
        """Drops what was computed from weights and captured tensors, as kept packs are where gradients are wanted."""
        for kind in tuple(self._met.values()):
            if isinstance(kind, Kind):
                kind.prepared.forget()

    def find(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        extra: Sequence[Any],
        state: Any = None,
    ) -> Kind | str:
        """Returns what a call runs, or why its tail cannot be fused.

        The operands are those before autocast casts them. `extra` is passed to the tail behind the convolution's
        result. `state` is what the tail depends on besides.
        """
        passed = tuple(
            (each.shape, each.stride(), each.dtype, each.device) if isinstance(each, Tensor) else repr(each)
            for each in extra
        )
        own = input.shape, input.stride(), input.dtype, input.device, tf32_of(input)
        cast = autocast_type(device_type(input))
        key = *own, cast, weight.shape, weight.stride(), convolution, passed, state
        found = self._met.get(key)
        if found is None:
            if len(self._met) >= MOST_KINDS:
                self._met.clear()
            found = self._met[key] = self._traced(input, weight, bias, convolution, extra)
        return found

    def _traced(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution, extra: Sequence[Any]
    ) -> Kind | str:
        with torch.no_grad():
            input, weight, bias = cast_operands(input, weight, bias, keep=False)
        geometry = checks.check_forward(input, weight, bias, convolution)
        shape = (input.shape[0], geometry.out_channels, *geometry.output_size(tuple(input.shape[2:])))
        layout = shape, result_strides(shape, input, weight), input.dtype, input.device
        try:
            traced = trace(self.tail, *layout, extra, self.written)
        except CannotTrace as error:
            return f"the tail cannot be traced: {error}"
        size, kernel = input.shape[2:], weight.shape[2:]
        layer = Layer((size[0], size[1], size[2]), (kernel[0], kernel[1], kernel[2]), convolution)
        prepared = Prepared(stages(traced, self.exact_order, layer=layer, steady=self.steady), self.steady)
        captured = {id(each): each for each in captured_in(traced).values()}
        return Kind(traced, prepared, tuple(captured.values()))
