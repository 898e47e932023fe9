"""Runs pools of dense activations over windows of their volume, and their gradients (families/norm/pool.py).

Only this package calls these functions, so arguments are not checked.
`vectors` is [number, N, C] in the accumulator's type; `wholes` have the type, shape and strides of x, which is dense,
[N, C, D, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..families.norm.planner import Activation, Strips
from ..families.norm.pool import Pool, Windows, plan_pool, plan_pool_grad, plan_pool_grad_sums
from ..planning.geometry import Triple
from ..planning.problem import Plan
from .axis_executor import is_channels_last
from .problems import DTYPES, RESULT_TYPES
from .pytorch_ops import statistics_dtype
from .runner import READ, RUNNER, Runner, activation, are_aligned, kind_of, operands_read

OPERANDS = (*READ, "null", "y", "places", "workspace")
GRADIENT = (*READ, "grad", "indices", "null", "y", "workspace")
SUMS = (*READ, "grad", "indices", "null", "sums", "workspace")


def run(
    x: Tensor,
    windows: Windows,
    size: Triple,
    way: str,
    averages: bool,
    before: str,
    after: str,
    vectors: Tensor | None,
    wholes: Sequence[Tensor],
    dtype: torch.dtype,
    runner: Runner = RUNNER,
    with_places: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns a pool of x, [N, C, *size], in the layout of x, and the places of its elements if they are wanted.

    `before` and `after` are C++ names of expressions of x's elements and of the results. `way` is "LocatingLargest"
    if places are wanted.
    """
    y = torch.empty((*x.shape[:2], *size), dtype=dtype, device=x.device, memory_format=_layout(x))
    aligned = are_aligned(x, y, *wholes)
    count = 0 if vectors is None else vectors.shape[0]
    places = torch.empty_like(y, dtype=torch.int64) if with_places else None
    what = windows, size, way, with_places, averages, before, after, count, len(wholes)
    key = ("pool_pass", *kind_of(x), dtype, aligned, what)

    def plan() -> Plan:
        problem = Pool(*_shapes(x, aligned, size), windows, averages, count, len(wholes), RESULT_TYPES[dtype])
        return plan_pool(problem, way, with_places, before, after, runner.device_of(x))

    runner.launch(key, plan, OPERANDS, x, (*operands_read(x, vectors, wholes), None, y, places))
    return y, places


def gradient(
    x: Tensor,
    grad: Tensor,
    indices: Tensor | None,
    windows: Windows,
    expression: str,
    vectors: Tensor | None,
    wholes: Sequence[Tensor],
    dtype: torch.dtype,
    runner: Runner = RUNNER,
) -> Tensor:
    """Returns an expression of x and of the gradient of a pool of x, which is the expression's local number.

    `grad` and `indices`, the places of the largest elements or None for averages, are of the pool's result.
    """
    grad = grad.contiguous(memory_format=_layout(x))
    indices = None if indices is None else indices.contiguous(memory_format=_layout(x))
    y = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    aligned = are_aligned(x, y, grad, *wholes)
    count = 0 if vectors is None else vectors.shape[0]
    what = windows, grad.shape, grad.dtype, indices is None, expression, count, len(wholes)
    key = ("pool_grad", *kind_of(x), dtype, aligned, what)

    def plan() -> Plan:
        d, h, w = grad.shape[2:]
        shapes = _shapes(x, aligned, (d, h, w))
        problem = Pool(*shapes, windows, indices is None, count, len(wholes), RESULT_TYPES[dtype])
        return plan_pool_grad(problem, DTYPES[grad.dtype], expression, runner.device_of(x))

    runner.launch(key, plan, GRADIENT, x, (*operands_read(x, vectors, wholes), grad, indices, None, y))
    return y


def gradient_sums(
    x: Tensor,
    grad: Tensor,
    indices: Tensor | None,
    windows: Windows,
    expressions: tuple[str, ...],
    vectors: Tensor | None,
    wholes: Sequence[Tensor],
    runner: Runner = RUNNER,
) -> Tensor:
    """Returns sums of such expressions over the strips of every channel: [N, C, slots, number of expressions]."""
    grad = grad.contiguous(memory_format=_layout(x))
    indices = None if indices is None else indices.contiguous(memory_format=_layout(x))
    aligned = are_aligned(x, grad, *wholes)
    count = 0 if vectors is None else vectors.shape[0]
    d, h, w = grad.shape[2:]
    shapes = _shapes(x, aligned, (d, h, w))
    slots = Strips.of(shapes[0], runner.device_of(x)).slots
    parts = x.new_empty((*x.shape[:2], slots, len(expressions)), dtype=statistics_dtype(x.dtype))
    what = windows, grad.shape, grad.dtype, indices is None, expressions, count, len(wholes)
    key = ("pool_grad_sums", *kind_of(x), aligned, what)

    def plan() -> Plan:
        problem = Pool(*shapes, windows, indices is None, count, len(wholes), RESULT_TYPES[x.dtype])
        return plan_pool_grad_sums(problem, DTYPES[grad.dtype], expressions, runner.device_of(x))

    runner.launch(key, plan, SUMS, x, (*operands_read(x, vectors, wholes), grad, indices, None, parts))
    return parts


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last_3d if is_channels_last(x) else torch.contiguous_format


def _shapes(x: Tensor, aligned: bool, size: Triple) -> tuple[Activation, Triple, Triple]:
    _, _, d, h, w = x.shape
    return activation(x, aligned), (d, h, w), size
