"""Runs chains in compiled graphs: operators that take a tail as text, and what autograd records of them.

`torch.compile` traces functions with tensors that have no data and perhaps no fixed sizes. A chain appears in its
graph as one operator. When the operator runs, the tail is divided into stages for the sizes at hand, as without a
compiler (`kinds.py`). What the tail writes to (running statistics) is returned as new tensors, because operators that
write to their arguments have no derivatives. This module knows tensors and operators, no kernels.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..planning.planner import Refused
from ..torch_ops import ops
from ..torch_ops.backend import current_backend
from ..torch_ops.casting import cast_operand
from ..torch_ops.checks import Convolution
from ..torch_ops.dispatch import as_if_called_first, device_type, is_plain
from ..torch_ops.pytorch_ops import statistics_dtype
from ..torch_ops.registration import register
from .kinds import Kind, Kinds
from .programs import MOST_PROGRAMS, Program, read
from .recording import Differentiable
from .tracing import STRIDES

log = logging.getLogger("tconv3d.compile")


@lru_cache(MOST_PROGRAMS)
def _warn_once(message: str) -> None:
    log.warning(message)


@lru_cache(MOST_PROGRAMS)
def kinds_of(text: str) -> Kinds:
    """Returns what calls of a program run, by their kind."""
    program = read(text)
    return Kinds(program.graph, False, program.steady, frozenset(program.written))


def under_autocast(program: Program, where: str) -> contextlib.AbstractContextManager[object]:
    """Returns the state of autocast that a program was written for."""
    if program.autocast is None and not torch.is_autocast_enabled(where):
        return contextlib.nullcontext()
    if program.autocast is None:
        return torch.autocast(where, enabled=False)
    return torch.autocast(where, program.autocast, cache_enabled=False)


# ---- what the operators compute


class _Call:
    """Holds the operands of one call of an operator, in the order of its schema: those of a chain come first."""

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
        text: str,
        *rest: Any,
    ) -> None:
        self.input, self.weight, self.bias, self.numbers, self.text = input, weight, bias, numbers, text
        *recorded, self.convolution = rest
        self.needed: Sequence[bool] = recorded[0] if recorded else ()  # which of the tensors need gradients
        self.program = read(self.text)
        places = [place for place, kind in enumerate(self.program.kinds) if kind == "tensor"]
        self.tensors = list(tensors)
        self.written = [places.index(place) for place in self.program.written]
        for index in self.written:
            self.tensors[index] = self.tensors[index].clone()
        self.extra = self.program.arguments(self.tensors, list(self.numbers))

    @property
    def news(self) -> list[Tensor]:
        """The tensors that the tail has written to."""
        return [self.tensors[index] for index in self.written]

    @cached_property
    def kind(self) -> Kind | None:
        """What the call runs, or None if PyTorch must run it."""
        given = [self.input, self.weight, *self.tensors, *([] if self.bias is None else [self.bias])]
        if ops.why_not_ours(self.input) is not None or self.input.numel() == 0 or not all(map(is_plain, given)):
            return None
        with as_if_called_first(), under_autocast(self.program, device_type(self.input)):
            operands = self.input, self.weight, self.bias, self.convolution
            found = kinds_of(self.text).find(*operands, self.extra)
        if isinstance(found, str):
            _warn_once(f"a chain of a compiled graph runs unfused: {found}")
            return None
        return found

    def unfused(self, z: Tensor | None = None) -> Tensor:
        """Computes convolution and tail one after the other."""
        if z is None:
            z = self.plain()
        with under_autocast(self.program, device_type(self.input)):
            result: Tensor = self.program.graph(z, *self.extra)
        return result

    def plain(self) -> Tensor:
        """Computes the convolution alone."""
        return torch.ops.tconv3d.conv_transpose3d.default(self.input, self.weight, self.bias, *self.convolution)

    def recorded(self) -> Differentiable | None:
        """Returns the passes of a call that records gradients, or None if PyTorch must run the tail."""
        if self.kind is None:
            return None
        kinds_of(self.text).forget_constants()
        with as_if_called_first():
            passes = self.kind.recorded_for(tuple(self.needed))
        if passes.possible and not passes.part.rest:
            return passes
        _warn_once("a chain of a compiled graph runs unfused: PyTorch computes a part of its gradients")
        return None


def _run(*operands: Any) -> list[Tensor]:
    call = _Call(*operands)
    kind, result = call.kind, None
    if kind is not None:
        weights = call.weight, call.bias
        with contextlib.suppress(Refused):  # the planner leaves this layer to PyTorch's operator
            result = kind.prepared.run(call.input, *weights, call.convolution, call.extra, weights)
    if result is None:
        return [_own(call.unfused(), None, call), *call.news]
    return [_own(result, kind, call), *call.news]


def _run_recorded(*operands: Any) -> list[Tensor]:
    call, slots = _Call(*operands), operands[-2]
    passes = call.recorded()
    if passes is not None:
        with contextlib.suppress(Refused):
            given = call.input, call.weight, call.bias, call.convolution
            boundary, z, reduced = passes.run(*given, call.tensors)
            result = passes.finish(boundary, call.tensors)
            return [_own(result, call.kind, call, z), *call.news, z, _packed(reduced, z, slots)]
    z = call.plain()
    return [_own(call.unfused(z.clone()), None, call, z), *call.news, z, _packed([], z, slots)]


def _own(result: Tensor, kind: Kind | None, call: _Call, z: Tensor | None = None) -> Tensor:
    """Returns a result in memory of its own, with the strides that PyTorch's operators give it."""
    if kind is not None:
        strides = kind.traced.meta[STRIDES]
        if result.stride() != strides:
            return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)
    others = [call.input, call.weight, *call.tensors, *([] if z is None else [z])]
    return result.clone() if _shares(result, others) else result


def _shares(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Tells whether a tensor's memory is that of another one."""
    own = tensor.untyped_storage()._cdata
    return any(each.untyped_storage()._cdata == own for each in others)


def _packed(reduced: Sequence[Tensor], z: Tensor, slots: int) -> Tensor:
    """Returns sums, means and variances as rows of one tensor, or NaN if they are more than a graph has room for."""
    rows = z.new_full((slots, z.shape[0] * z.shape[1]), float("nan"), dtype=statistics_dtype(z.dtype))
    if len(reduced) == slots and all(each.numel() <= rows.shape[1] and each.is_floating_point() for each in reduced):
        for row, each in zip(rows, reduced, strict=True):
            row[: each.numel()] = each.reshape(-1)
    return rows


def _unpacked(rows: Tensor, passes: Differentiable) -> list[Tensor] | None:
    """Returns what `_packed` has packed, or None if there was no room for it."""
    values = [node.meta["val"] for node, _ in passes.gradient.saved]
    likes = [like for each in values for like in (each if isinstance(each, (tuple, list)) else (each,))]
    fits = len(likes) == rows.shape[0] and all(
        like.numel() <= rows.shape[1] and like.dtype.is_floating_point for like in likes
    )
    if not fits:
        return None
    return [row[: like.numel()].reshape(like.shape).to(like.dtype) for row, like in zip(rows, likes, strict=True)]


def _run_grad(grad: Tensor, z: Tensor, rows: Tensor, *operands: Any) -> list[Tensor]:
    call = _Call(*operands)
    passes, needed = call.recorded(), call.needed
    saved = None if passes is None else _unpacked(rows, passes)
    likes = [z, *(each for each, need in zip(call.tensors, needed, strict=True) if need)]
    if passes is not None and saved is not None:
        found: Sequence[Tensor | None] = passes.gradients([grad], [z, *saved], call.tensors)
    else:
        leaves = [each.detach().requires_grad_() for each in likes]
        left = iter(leaves[1:])
        call.tensors = [next(left) if need else each for each, need in zip(call.tensors, needed, strict=True)]
        call.extra = call.program.arguments(call.tensors, list(call.numbers))
        with as_if_called_first(), torch.enable_grad():
            result = call.unfused(leaves[0].view_as(leaves[0]))
            found = torch.autograd.grad(result, leaves, grad, allow_unused=True)
    taken = [grad, z, rows, call.input, call.weight, *call.tensors]
    results: list[Tensor] = []
    for each, like in zip(found, likes, strict=True):
        results.append(_gradient(each, like, [*taken, *results]))
    return results


def _gradient(found: Tensor | None, like: Tensor, taken: Sequence[Tensor]) -> Tensor:
    """Returns a gradient with the strides that `_fake_grad` says, in memory that is none of the `taken` tensors'."""
    if found is None:
        return torch.zeros_like(like)
    result = torch.empty_like(like, device="meta")
    fits = found.dtype is like.dtype and found.shape == like.shape and found.stride() == result.stride()
    return found if fits and not _shares(found, taken) else torch.empty_like(like).copy_(found)


# ---- shapes


def _fake(*operands: Any) -> list[Tensor]:
    call = _Call(*operands)
    with torch.no_grad():
        return [torch.empty_like(call.unfused(_fake_result(call))), *(torch.empty_like(each) for each in call.news)]


def _fake_result(call: _Call) -> Tensor:
    return ops.fake_forward(call.input, call.weight, call.bias, call.convolution)


def _fake_recorded(*operands: Any) -> list[Tensor]:
    z, slots = _fake_result(_Call(*operands)), operands[-2]
    sums = z.new_empty((slots, z.shape[0] * z.shape[1]), dtype=statistics_dtype(z.dtype))
    return [*_fake(*operands), z, sums]


def _fake_grad(grad: Tensor, z: Tensor, rows: Tensor, *operands: Any) -> list[Tensor]:
    call = _Call(*operands)
    likes = [z, *(each for each, need in zip(call.tensors, call.needed, strict=True) if need)]
    return [torch.empty_like(each) for each in likes]


register("chain", _run, _fake)
register("chain_recorded", _run_recorded, _fake_recorded)
register("chain_grad", _run_grad, _fake_grad)


# ---- what a graph calls


@dataclass(frozen=True)
class ChainCall:
    """Calls a chain in a graph: its operands, and then what its tail takes behind the convolution's result."""

    text: str
    convolution: Convolution
    slots: int  # sums, means and variances that are saved for gradients

    @property
    def __name__(self) -> str:
        return "tconv3d_chain"

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *passed: Any) -> Tensor:
        program, where = read(self.text), input.device.type
        if program.autocast is not None:
            input, weight, bias = (cast_operand(each, program.autocast, where) for each in (input, weight, bias))  # type: ignore[assignment]
        tensors = [each for each, kind in zip(passed, program.kinds, strict=True) if kind == "tensor"]
        numbers = [each for each, kind in zip(passed, program.kinds, strict=True) if kind == "int"]
        operands = [each for each in (input, weight, bias, *tensors) if each is not None]
        if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
            needed = tuple(each.requires_grad for each in tensors)
            result, *news = _Recorded.apply(self, numbers, needed, input, weight, bias, *tensors)
        else:
            result, *news = torch.ops.tconv3d.chain.default(
                input, weight, bias, tensors, numbers, self.text, *self.convolution
            )
        with torch.no_grad():
            for place, new in zip(program.written, news, strict=True):
                passed[place].copy_(new)
        return result


class _Recorded(torch.autograd.Function):
    """Records a chain in a graph that is being compiled."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ChainCall,
        numbers: list[int],
        needed: tuple[bool, ...],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        *results, z, rows = torch.ops.tconv3d.chain_recorded.default(
            input, weight, bias, list(tensors), numbers, call.text, list(needed), call.slots, *call.convolution
        )
        written = set(read(call.text).written)
        places = [place for place, kind in enumerate(read(call.text).kinds) if kind == "tensor"]
        # The gradients read no tensor that the tail writes to; a copy of it stands for it.
        kept = [each.clone() if place in written else each for place, each in zip(places, tensors, strict=True)]
        ctx.save_for_backward(input, weight, bias, z, rows, *kept)
        ctx.call, ctx.numbers, ctx.needed, ctx.backend = call, numbers, needed, current_backend()
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        input, weight, bias, z, rows, *tensors = ctx.saved_tensors
        call = ctx.call
        dz, *rest = torch.ops.tconv3d.chain_grad.default(
            grad, z, rows, input, weight, bias, tensors, ctx.numbers, call.text, list(ctx.needed), *call.convolution
        )
        left = iter(rest)
        of_tensors = [next(left) if need else None for need in ctx.needed]
        wanted = ctx.needs_input_grad[3:6]
        shapes = input.shape, weight.shape
        own = ops.gradients_of(dz, input, weight, wanted, *shapes, call.convolution, ctx.backend)
        return None, None, None, *own, *of_tensors
