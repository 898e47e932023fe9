"""Runs GroupNorm with known statistics, and the backward pass of GroupNorm and the ReLU before it.

`executor` computes the convolution with the statistics.
Only this package calls these functions, so arguments are not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..families.norm import planner as norm_planner
from ..families.norm.planner import NormProblem, Wanted
from ..planning.problem import Plan
from .problems import DTYPES
from .runner import RUNNER, activation, are_aligned, kind_of

NORMALIZE = ("x", "statistics", "weight", "bias", "y", "workspace")
GRADIENT = ("dy", "x", "statistics", "weight", "null", "dz", "dparameters", "dbias", "workspace")


def normalize(
    x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Normalizes x, dense [N, C, D, H, W], with statistics [2, N, groups]. `out` is x, or None for a new tensor."""
    parameter = weight if weight is not None else bias
    y = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device) if out is None else out
    aligned = are_aligned(x, y)
    kind = None if parameter is None else parameter.dtype
    key = ("normalize", *kind_of(x), statistics.shape, dtype, kind, aligned)

    def plan() -> Plan:
        return norm_planner.plan_normalize(_problem(x, statistics, dtype, kind, aligned), RUNNER.device_of(x))

    RUNNER.launch(key, plan, NORMALIZE, x, (x, statistics, _dense(weight, kind), _dense(bias, kind), y))
    return y


def gradient(
    dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor | None, parameter: torch.dtype, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the ReLU's input, of weight and bias [2, C], and of the convolution's bias [C].

    x is the result of the ReLU, and dy may have any strides. Gradients that are not wanted are empty tensors.
    """
    if dy.stride() != x.stride():
        dy = torch.empty_strided(x.shape, x.stride(), dtype=dy.dtype, device=dy.device).copy_(dy)
    needs_dz = wanted.input or wanted.bias
    dz = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if needs_dz else x.new_empty(0)
    channels = x.shape[1]
    dparameters = x.new_empty((2, channels) if wanted.parameters else (0,), dtype=parameter)
    dbias = x.new_empty((channels,) if wanted.bias else (0,))
    aligned = are_aligned(dy, x, dz)
    key = ("norm_grad", *kind_of(x), statistics.shape, dy.dtype, parameter, wanted, aligned)

    def plan() -> Plan:
        problem = _problem(x, statistics, dy.dtype, parameter, aligned)
        return norm_planner.plan_gradient(problem, wanted, RUNNER.device_of(x))

    operands = dy, x, statistics, _dense(weight, parameter), None, dz, dparameters, dbias
    RUNNER.launch(key, plan, GRADIENT, x, operands)
    return dz, dparameters, dbias


def _problem(
    x: Tensor, statistics: Tensor, result: torch.dtype, parameter: torch.dtype | None, aligned: bool
) -> NormProblem:
    kind = DTYPES[x.dtype if parameter is None else parameter]
    return NormProblem(activation(x, aligned), DTYPES[result], kind, statistics.shape[2])


def _dense(tensor: Tensor | None, kind: torch.dtype | None) -> Tensor | None:
    """Returns a parameter as the kernel reads it: contiguous, and of the type that the kernel is compiled for."""
    if tensor is None or (tensor.stride(0) == 1 and tensor.dtype is kind):
        return tensor
    return tensor.to(kind).contiguous()
