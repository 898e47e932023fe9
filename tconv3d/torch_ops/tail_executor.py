"""Runs the passes behind a convolution that evaluate expressions of every element, or sum them.

Only this package calls these functions, so arguments are not checked.
`vectors` is [number of vectors, N, C] in the accumulator's type; `wholes` are up to four tensors of x's type, shape
and strides; x is dense, [N, C, D, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..families.norm.tail import TailProblem, plan_pass, plan_sums
from ..planning.problem import Plan
from . import executor
from .executor import Task
from .problems import DTYPES
from .pytorch_ops import statistics_dtype
from .runner import READ, RUNNER, Runner, activation, are_aligned, kind_of, operands_read


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

    names = (*READ, "null", "y", "workspace")
    runner.launch(key, plan, names, x, (*operands_read(x, vectors, wholes), None, y))
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
    names = (*READ, "null", "sums", "workspace")
    runner.launch(key, plan, names, x, (*operands_read(x, vectors, wholes), None, parts))
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
    count = 0 if vectors is None else vectors.shape[0]
    return (name, *kind_of(x), y.dtype, expressions, count, len(wholes), are_aligned(x, y, *wholes))


def _problem(
    x: Tensor, expressions: tuple[str, ...], vectors: Tensor | None, wholes: Sequence[Tensor], y: Tensor
) -> TailProblem:
    count = 0 if vectors is None else vectors.shape[0]
    return TailProblem(activation(x, are_aligned(x, y, *wholes)), expressions, count, len(wholes))
