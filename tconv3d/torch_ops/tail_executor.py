"""Runs the passes behind a convolution that evaluate expressions of every element, or sum them.

Only this package calls these functions, so arguments are not checked.
`vectors` is [number of vectors, N, C] in the accumulator's type; `wholes` are up to four tensors of x's type, shape
and strides; x is dense, [N, C, D, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..families.norm.planner import Activation
from ..families.norm.tail import TailProblem, plan_pass, plan_sums
from ..planning.problem import Plan, is_channels_last
from . import executor
from .executor import Task
from .problems import DTYPES
from .pytorch_ops import statistics_dtype
from .runner import RUNNER, Runner

OPERANDS = ("x", "vectors", "whole_0", "whole_1", "whole_2", "whole_3", "null")


def evaluate(
    x: Tensor,
    expression: str,
    vectors: Tensor | None,
    wholes: Sequence[Tensor],
    dtype: torch.dtype,
    overwrite: bool,
    runner: Runner = RUNNER,
) -> Tensor:
    """Returns an expression of x. With `overwrite` x is the result if its type is the result's."""
    y = (
        x
        if overwrite and x.dtype is dtype
        else torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    )
    key = _key("tail_pass", x, (expression,), vectors, wholes, y)

    def plan() -> Plan:
        problem = _problem(x, (expression,), vectors, wholes, y)
        return plan_pass(problem, DTYPES[dtype], runner.device_of(x))

    runner.launch(key, plan, (*OPERANDS, "y", "workspace"), x, (*_listed(x, vectors, wholes), y))
    return y


def sums(
    x: Tensor,
    expressions: tuple[str, ...],
    vectors: Tensor | None,
    wholes: Sequence[Tensor],
    runner: Runner = RUNNER,
) -> Tensor:
    """Returns sums of expressions over the strips of every channel: [N, C, slots, number of expressions]."""
    key = _key("tail_sums", x, expressions, vectors, wholes, x)
    task, slots = _strips.get(key, (None, 0))
    planned: Plan | None = None
    if task is None or task is not executor.known(key):
        planned, slots = plan_sums(_problem(x, expressions, vectors, wholes, x), runner.device_of(x))

    def plan() -> Plan:
        assert planned is not None
        return planned

    parts = x.new_empty((*x.shape[:2], slots, len(expressions)), dtype=statistics_dtype(x.dtype))
    names = (*OPERANDS, "sums", "workspace")
    runner.launch(key, plan, names, x, (*_listed(x, vectors, wholes), parts))
    if planned is not None:
        _remember(key, slots)
    return parts


# Tasks with the number of strips that they sum, for as long as the executor has the same task.
_strips: dict[tuple[object, ...], tuple[Task, int]] = {}


def _remember(key: tuple[object, ...], slots: int) -> None:
    task = executor.known(key)
    if task is not None:
        if len(_strips) >= executor.MAX_TASKS:
            _strips.clear()
        _strips[key] = task, slots


def _key(
    name: str,
    x: Tensor,
    expressions: tuple[str, ...],
    vectors: Tensor | None,
    wholes: Sequence[Tensor],
    y: Tensor,
) -> tuple[object, ...]:
    aligned = _aligned(x, wholes, y)
    count = 0 if vectors is None else vectors.shape[0]
    return (name, x.dtype, x.device, x.shape, x.stride(), y.dtype, expressions, count, len(wholes), aligned)


def _aligned(x: Tensor, wholes: Sequence[Tensor], y: Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in (x, y, *wholes))


def _problem(
    x: Tensor, expressions: tuple[str, ...], vectors: Tensor | None, wholes: Sequence[Tensor], y: Tensor
) -> TailProblem:
    batch, channels, *size = x.shape
    last = is_channels_last(x.stride())
    volume = size[0] * size[1] * size[2]
    activation = Activation(batch, channels, volume, DTYPES[x.dtype], last, _aligned(x, wholes, y))
    return TailProblem(activation, expressions, 0 if vectors is None else vectors.shape[0], len(wholes))


def _listed(x: Tensor, vectors: Tensor | None, wholes: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns the operands in the order of `OPERANDS`."""
    return x, vectors, *[*wholes, None, None, None, None][:4], None
