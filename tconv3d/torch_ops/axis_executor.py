"""Runs passes that reduce a dense tensor along one axis (families/norm/axis_pass.cuh).

Only this package calls this function, so arguments are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ..families.norm.axis import Axis, AxisProblem, plan_axis, slots_of
from ..planning.problem import Plan
from .problems import DTYPES, RESULT_TYPES
from .pytorch_ops import statistics_dtype
from .runner import READ, RUNNER, Runner, are_aligned, kind_of, operands_read

OPERANDS = (*READ, "placed", "along", "null", "y", "sums", "workspace")


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Returns the dimensions of a dense tensor [N, C, D, H, W] from the slowest to the fastest in memory."""
    return _order(is_channels_last(x))


def _order(channels_last: bool) -> tuple[int, ...]:
    return (0, 2, 3, 4, 1) if channels_last else (0, 1, 2, 3, 4)


def is_one_axis(shape: Sequence[int], dims: frozenset[int], channels_last: bool) -> bool:
    """Tells whether dimensions are neighbours in memory: the batch alone, the channels alone, or a part of space."""
    order = [dim for dim in _order(channels_last) if shape[dim] > 1 or dim in dims]
    places = [order.index(dim) for dim in dims]
    adjacent = bool(places) and max(places) - min(places) + 1 == len(places)
    return adjacent and (len(dims) == 1 or dims.isdisjoint((0, 1)))


def run(
    x: Tensor,
    dims: frozenset[int],
    program: str,
    sweeps: int,
    each: bool,
    vectors: Tensor | None,
    wholes: Sequence[Tensor],
    placed: Tensor | None,
    along: Tensor | None,
    dtype: torch.dtype,
    overwrite: bool,
    runner: Runner = RUNNER,
    sums: tuple[str, ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """Returns what a program computes along the axis that `dims` of x, [N, C, D, H, W], are.

    The result has the shape and strides of x if `each`, else size 1 in `dims`. `vectors` is [number, N, C], `placed`
    [number, positions in the order of memory], `along` [number, length], all in the accumulator's type; `wholes` have
    the type, shape and strides of x. With `overwrite` x is the result if it has the result's type.

    With it come the `sums`, [N or 1, length, slots, number of sums]: expressions that the pass adds up over all
    positions, of each batch item alone if channels are the axis.
    """
    y = _result(x, dims, each, dtype, overwrite)
    counts = tuple(0 if tensor is None else tensor.shape[0] for tensor in (vectors, placed, along))
    aligned = are_aligned(x, y, *wholes)
    key = ("axis_pass", *kind_of(x), dims, program, dtype, counts, len(wholes), aligned, sums)
    axis = _axis(x.shape, is_channels_last(x), dims, DTYPES[x.dtype], aligned)
    parts: Tensor | None = None
    if sums:
        slots = slots_of(axis, runner.device_of(x))
        parts = x.new_empty((axis.items, axis.length, slots, len(sums)), dtype=statistics_dtype(x.dtype))

    def plan() -> Plan:
        number, of_places, alongs = counts
        operands = number, len(wholes), of_places, alongs
        problem = AxisProblem(axis, program, sweeps, *operands, RESULT_TYPES[dtype], sums)
        return plan_axis(problem, runner.device_of(x))

    runner.launch(key, plan, OPERANDS, x, (*operands_read(x, vectors, wholes), placed, along, None, y, parts))
    return y, parts


def extreme(
    x: Tensor,
    which: str,
    expression: str,
    vectors: Tensor | None,
    wholes: Sequence[Tensor],
    runner: Runner = RUNNER,
) -> Tensor:
    """Returns the "Largest" or "Smallest" value of an expression of every channel of x: [1, N, C].

    A pass takes the extremes of rows or planes, of which there are enough to fill a GPU; PyTorch takes theirs.
    """
    dims, others = (frozenset({4}), (2, 3)) if is_channels_last(x) else (frozenset({3, 4}), (2,))
    step = f"tconv3d::Reduced<tconv3d::Finding{which}, {expression}>"
    steps = f"tconv3d::Then<{step}, tconv3d::Done>"
    program = f"tconv3d::AxisProgram<tconv3d::EachPosition<tconv3d::Local<0>>, {steps}>"
    wide = statistics_dtype(x.dtype)
    found, _ = run(x, dims, program, 1, False, vectors, wholes, None, None, wide, False, runner)
    return (found.amax(others) if which == "Largest" else found.amin(others)).reshape(1, *x.shape[:2])


def _result(x: Tensor, dims: frozenset[int], each: bool, dtype: torch.dtype, overwrite: bool) -> Tensor:
    if each:
        if overwrite and x.dtype is dtype:
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    order = memory_order(x)
    sizes = [1 if dim in dims else x.shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(5)]
    return torch.empty(sizes, dtype=dtype, device=x.device).permute(back)


@lru_cache(maxsize=1024)
def _axis(shape: tuple[int, ...], last: bool, dims: frozenset[int], dtype: str, aligned: bool) -> Axis:
    order = [dim for dim in _order(last) if shape[dim] > 1 or dim in dims]
    places = [order.index(dim) for dim in dims]
    sizes = [shape[dim] for dim in order]
    outer, length = prod(sizes[: min(places)]), prod(sizes[min(places) : max(places) + 1])
    inner = prod(sizes[max(places) + 1 :])
    batch, channels = shape[:2]
    per_item = outer // batch if dims == {1} or last else outer // (batch * channels)
    lead = prod(shape[2:]) if dims == {0} else per_item
    return Axis(outer, length, inner, lead, dims == {1}, dims == {0}, batch, channels, last, dtype, aligned)


def is_channels_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(4) != 1 and x.shape[1] > 1
