"""Runs the passes behind a convolution that evaluate expressions of every element, or sum them.

Only this package calls these functions, so arguments are not checked. Prepared tasks are in the executor's table.
`vectors` is [number of vectors, N, C] in the accumulator's type; `wholes` are up to four tensors of x's type, shape
and strides; x is dense, [N, C, D, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..families.norm.planner import Activation
from ..families.norm.tail import TailProblem, plan_pass, plan_sums
from . import executor
from .problems import DTYPES
from .pytorch_ops import statistics_dtype

OPERANDS = ("x", "vectors", "whole_0", "whole_1", "whole_2", "whole_3", "null")


def evaluate(
    x: Tensor, expression: str, vectors: Tensor | None, wholes: Sequence[Tensor], dtype: torch.dtype, overwrite: bool
) -> Tensor:
    """Returns an expression of x. With `overwrite` x is the result if its type is the result's."""
    y = (
        x
        if overwrite and x.dtype is dtype
        else torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    )
    key = _key("tail_pass", x, (expression,), vectors, wholes, y)
    task = executor.known(key)
    if task is None:
        problem = _problem(x, (expression,), vectors, wholes, y)
        plan = plan_pass(problem, DTYPES[dtype], executor.device_of(x))
        task = executor.remember(key, executor.make_task(plan, (*OPERANDS, "y", "workspace"), (), x))
    task.launch(x, (*_addresses(x, vectors, wholes), y.data_ptr()))
    return y


def sums(x: Tensor, expressions: tuple[str, ...], vectors: Tensor | None, wholes: Sequence[Tensor]) -> Tensor:
    """Returns the sums of expressions over the volume of every channel, in float64: [number of expressions, N, C]."""
    key = _key("tail_sums", x, expressions, vectors, wholes, x)
    problem = _problem(x, expressions, vectors, wholes, x)
    plan, slots = plan_sums(problem, executor.device_of(x))
    task = executor.known(key)
    if task is None:
        task = executor.remember(key, executor.make_task(plan, (*OPERANDS, "sums", "workspace"), (), x))
    parts = x.new_empty((*x.shape[:2], slots, len(expressions)), dtype=statistics_dtype(x.dtype))
    task.launch(x, (*_addresses(x, vectors, wholes), parts.data_ptr()))
    return parts.sum(2, dtype=torch.float64).permute(2, 0, 1)


def _key(name: str, x: Tensor, expressions: tuple[str, ...], vectors: Any, wholes: Any, y: Tensor) -> tuple[Any, ...]:
    aligned = _aligned(x, wholes, y)
    count = 0 if vectors is None else vectors.shape[0]
    return (name, x.dtype, x.device, x.shape, x.stride(), y.dtype, expressions, count, len(wholes), aligned)


def _aligned(x: Tensor, wholes: Sequence[Tensor], y: Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in (x, y, *wholes))


def _problem(
    x: Tensor, expressions: tuple[str, ...], vectors: Tensor | None, wholes: Sequence[Tensor], y: Tensor
) -> TailProblem:
    batch, channels, *size = x.shape
    last = x.stride(1) == 1 and x.stride(4) != 1
    volume = size[0] * size[1] * size[2]
    activation = Activation(batch, channels, volume, DTYPES[x.dtype], last, _aligned(x, wholes, y))
    return TailProblem(activation, expressions, 0 if vectors is None else vectors.shape[0], len(wholes))


def _addresses(x: Tensor, vectors: Tensor | None, wholes: Sequence[Tensor]) -> tuple[int, ...]:
    places = [*(tensor.data_ptr() for tensor in wholes), 0, 0, 0, 0][:4]
    return x.data_ptr(), 0 if vectors is None else vectors.data_ptr(), *places, 0
