"""Records a convolution and the fused part of its tail as one node of autograd's graph.

Saved are what the convolution has stored (its result z, or a function of it from which all gradients can be
computed; nothing if no gradient reads it), the tensors that were passed to the tail, and what the convolution's own
gradients need. The gradients of the tail come first, as passes over z; then the convolution's, as without a tail.
Second derivatives run convolution and tail one after the other in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .backend import current_backend, use_backend
from .checks import Convolution
from .dispatch import unchanged_but_cast
from .ops import conv_transpose3d, gradients_of

SAVED = 3  # input, weight and bias are saved before all others


class Passes(Protocol):
    """Describes a tail that runs in passes, forward and backward (`tails.recording.Differentiable`)."""

    wanted: list[Tensor]  # captured tensors whose gradients are computed
    needed: tuple[bool, ...]  # which of the passed tensors need a gradient

    @property
    def reads_stored(self) -> bool: ...

    @property
    def read(self) -> list[Tensor]: ...

    def run(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution, passed: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Tensor, list[Tensor]]: ...

    def gradients(
        self, grads: Sequence[Tensor], saved: Sequence[Tensor | None], passed: Sequence[Tensor]
    ) -> list[Tensor | None]: ...

    def unfused(self, z: Tensor, passed: Sequence[Tensor], captured: dict[int, Tensor]) -> tuple[Tensor, ...]: ...


def chain(
    passes: Passes,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    convolution: Convolution,
    passed: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Returns the tensors at the end of the fused part; autograd records one node for all of them."""
    results: tuple[Tensor, ...] = _apply(
        passes, convolution, len(passed), input, weight, bias, *passed, *passes.wanted
    )
    return results


class Chain(torch.autograd.Function):
    """Computes a convolution and its tail. The tensors are those passed to the tail, then those it captured."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        convolution: Convolution,
        count: int,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        passed = tensors[:count]
        results, stored, saved = passes.run(input, weight, bias, convolution, passed)
        results = tuple(_no_view(each) for each in results)
        kept = stored if passes.reads_stored else None
        ctx.save_for_backward(input, weight, bias, *passed, kept, *saved)
        ctx.passes, ctx.captured, ctx.count = passes, tensors[count:], count
        ctx.versions = [(each, each._version) for each in passes.read if not each.is_inference()]
        ctx.call = input.shape, weight.shape, convolution, current_backend()
        ctx.differentiable = [each.is_floating_point() for each in results]
        ctx.mark_non_differentiable(*(each for each in results if not each.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stored = ctx.saved_tensors  # once: a checkpoint computes them when they are asked for, and only then
        operands, others = stored[:SAVED], stored[SAVED:]
        passed, saved = others[: ctx.count], others[ctx.count :]
        given = [grad for grad, kept in zip(grads, ctx.differentiable, strict=True) if kept]
        _check_versions(ctx.versions)
        if torch.is_grad_enabled() or not all(unchanged_but_cast(each, None) for each in given):
            return None, None, None, *_gradients_by_layer(ctx, operands, passed, given, torch.is_grad_enabled())
        dz, *found = ctx.passes.gradients(given, saved, passed)
        of_captured, left = found[: len(ctx.captured)], iter(found[len(ctx.captured) :])
        of_passed = [next(left) if need else None for need in ctx.passes.needed]
        del grads, given, saved, others, stored
        input, weight, _ = operands
        if dz is None:  # the tail's results do not depend on z
            return None, None, None, None, None, None, *of_passed, *of_captured
        own = gradients_of(dz, input, weight, ctx.needs_input_grad[3:6], *ctx.call)
        return None, None, None, *own, *of_passed, *of_captured


# `apply` of the C++ base class skips the Python code for torch.func, under which no chain runs.
_apply = super(torch.autograd.Function, Chain).apply


def _check_versions(versions: Sequence[tuple[Tensor, int]]) -> None:
    """Raises PyTorch's error if a captured tensor, which is not saved, has been written to since the call."""
    for tensor, version in versions:
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {str(tensor.dtype).removeprefix('torch.')} tensor of the shape {list(tensor.shape)} behind a "
                f"transposed convolution is at version {tensor._version}; expected version {version} instead"
            )


def _no_view(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same memory that is no view: autograd lets nobody write to views of a `Function`."""
    if not tensor._is_view():
        return tensor
    place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return tensor.new_empty(0).set_(*place)


def _gradients_by_layer(
    ctx: Any, operands: Sequence[Tensor | None], passed: Sequence[Tensor], grads: Sequence[Tensor], again: bool
) -> list[Tensor | None]:
    """Returns gradients that can be differentiated again, or that batched tensors and dispatcher modes take part in.

    An operand may have been computed from another one. Views of the operands stand for them, so that each gradient is
    that of one operand while the others are constant.
    """
    _, _, convolution, backend = ctx.call
    tensors = [*operands, *passed, *ctx.captured]
    with torch.enable_grad():
        views = [None if each is None else each.view_as(each) for each in tensors]
    count = SAVED + len(passed)
    input, weight, bias = views[:SAVED]
    assert input is not None and weight is not None
    with use_backend(backend), torch.enable_grad():
        z = conv_transpose3d(input, weight, bias, convolution)
        captured = dict(zip(map(id, ctx.captured), views[count:], strict=True))
        results = ctx.passes.unfused(z, views[SAVED:count], captured)
    results = [each for each in results if each.is_floating_point()]
    needs = ctx.needs_input_grad[3:]
    asked = [view for view, need in zip(views, needs, strict=True) if need and view is not None]
    found = iter(torch.autograd.grad(results, asked, grads, create_graph=again, allow_unused=True))
    return [next(found) if need else None for need in needs]
