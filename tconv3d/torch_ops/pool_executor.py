"""Runs pools of dense activations over windows of their volume, and their gradients (families/norm/pool.py).

Only this package calls these functions, so arguments are not checked. Prepared tasks are in the executor's table.
`vectors` is [number, N, C] in the accumulator's type; `wholes` have the type, shape and strides of x, which is dense,
[N, C, D, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..families.norm.planner import Activation
from ..families.norm.pool import Pool, Windows, plan_pool, plan_pool_grad
from ..planning.geometry import Triple
from . import executor
from .axis_executor import RESULTS, is_channels_last
from .problems import DTYPES

OPERANDS = ("x", "vectors", "whole_0", "whole_1", "whole_2", "whole_3", "null", "y", "workspace")
GRADIENT = (*OPERANDS[:6], "grad", "indices", *OPERANDS[6:])


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
) -> Tensor:
    """Returns a pool of x, [N, C, *size], in the layout of x.

    `before` and `after` are C++ names of expressions of x's elements and of the results.
    """
    y = torch.empty((*x.shape[:2], *size), dtype=dtype, device=x.device, memory_format=_layout(x))
    aligned = _aligned(x, y, *wholes)
    count = 0 if vectors is None else vectors.shape[0]
    what = windows, size, way, averages, before, after, count, len(wholes)
    key = ("pool_pass", x.dtype, x.device, x.shape, x.stride(), dtype, aligned, what)
    task = executor.known(key)
    if task is None:
        problem = Pool(*_shapes(x, aligned, size), windows, averages, count, len(wholes), RESULTS[dtype])
        plan = plan_pool(problem, way, before, after, executor.device_of(x))
        task = executor.remember(key, executor.make_task(plan, OPERANDS, (), x))
    task.launch(x, (*_addresses(x, vectors, wholes), 0, y.data_ptr()))
    return y


def gradient(
    x: Tensor,
    grad: Tensor,
    indices: Tensor | None,
    windows: Windows,
    expression: str,
    vectors: Tensor | None,
    wholes: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Returns an expression of x and of the gradient of a pool of x, which is the expression's local number.

    `grad` and `indices`, the places of the largest elements or None for averages, are of the pool's result.
    """
    grad = grad.contiguous(memory_format=_layout(x))
    indices = None if indices is None else indices.contiguous(memory_format=_layout(x))
    y = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    aligned = _aligned(x, y, grad, *wholes)
    count = 0 if vectors is None else vectors.shape[0]
    what = windows, grad.shape, grad.dtype, indices is None, expression, count, len(wholes)
    key = ("pool_grad", x.dtype, x.device, x.shape, x.stride(), dtype, aligned, what)
    task = executor.known(key)
    if task is None:
        d, h, w = grad.shape[2:]
        shapes = _shapes(x, aligned, (d, h, w))
        problem = Pool(*shapes, windows, indices is None, count, len(wholes), RESULTS[dtype])
        plan = plan_pool_grad(problem, DTYPES[grad.dtype], expression, executor.device_of(x))
        task = executor.remember(key, executor.make_task(plan, GRADIENT, (), x))
    places = 0 if indices is None else indices.data_ptr()
    task.launch(x, (*_addresses(x, vectors, wholes), grad.data_ptr(), places, 0, y.data_ptr()))
    return y


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last_3d if is_channels_last(x) else torch.contiguous_format


def _aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _shapes(x: Tensor, aligned: bool, size: Triple) -> tuple[Activation, Triple, Triple]:
    batch, channels, d, h, w = x.shape
    activation = Activation(batch, channels, prod((d, h, w)), DTYPES[x.dtype], is_channels_last(x), aligned)
    return activation, (d, h, w), size


def _addresses(x: Tensor, vectors: Tensor | None, wholes: Sequence[Tensor]) -> tuple[int, ...]:
    places = [*(tensor.data_ptr() for tensor in wholes), 0, 0, 0, 0][:4]
    return x.data_ptr(), 0 if vectors is None else vectors.data_ptr(), *places
