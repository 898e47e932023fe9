"""Runs the pass behind a convolution that evaluates an expression of every element.

Only this package calls these functions, so arguments are not checked. Prepared tasks are in the executor's table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..families.norm.planner import Activation
from ..families.norm.tail import TailProblem, plan_tail
from . import executor
from .problems import DTYPES

OPERANDS = ("x", "vectors", "whole_0", "whole_1", "whole_2", "whole_3", "null", "y", "workspace")


def evaluate(
    x: Tensor, expression: str, vectors: Tensor | None, wholes: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    """Returns the expression of x, dense [N, C, D, H, W]; x itself is overwritten if its type is the result's.

    vectors: [number of vectors, N, C], in the accumulator's type. wholes: up to four tensors of x's type, shape and
    strides.
    """
    y = x if x.dtype is dtype else torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (x, y, *wholes))
    count = 0 if vectors is None else vectors.shape[0]
    key = ("tail", x.dtype, x.device, x.shape, x.stride(), dtype, expression, count, len(wholes), aligned)
    task = executor.known(key)
    if task is None:
        batch, channels, *size = x.shape
        last = x.stride(1) == 1 and x.stride(4) != 1
        volume = size[0] * size[1] * size[2]
        activation = Activation(batch, channels, volume, DTYPES[x.dtype], last, aligned)
        problem = TailProblem(activation, DTYPES[dtype], expression, count, len(wholes))
        plan = plan_tail(problem, executor.device_of(x))
        task = executor.remember(key, executor.make_task(plan, OPERANDS, (), x))
    places = [*(tensor.data_ptr() for tensor in wholes), 0, 0, 0, 0][:4]
    task.launch(x, (x.data_ptr(), 0 if vectors is None else vectors.data_ptr(), *places, 0, y.data_ptr()))
    return y
