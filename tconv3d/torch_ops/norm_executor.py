"""Runs GroupNorm with known statistics, and the backward pass of GroupNorm and the ReLU before it.

`executor` computes the convolution with the statistics; this module stores prepared tasks in the executor's table.
Only this package calls these functions, so arguments are not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..families.norm import planner as norm_planner
from ..families.norm.planner import Activation, NormProblem, Wanted
from ..planning.problem import is_channels_last
from . import executor
from .problems import DTYPES

NORMALIZE = ("x", "statistics", "weight", "bias", "y", "workspace")
GRADIENT = ("dy", "x", "statistics", "weight", "null", "dz", "dparameters", "dbias", "workspace")


def normalize(
    x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Normalizes x, dense [N, C, D, H, W], with statistics [2, N, groups]. `out` is x, or None for a new tensor."""
    parameter = weight if weight is not None else bias
    y = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device) if out is None else out
    aligned = x.data_ptr() % 16 == 0 and y.data_ptr() % 16 == 0
    kind = None if parameter is None else parameter.dtype
    key = ("normalize", x.dtype, x.device, x.shape, x.stride(), statistics.shape, dtype, kind, aligned)
    task = executor.known(key)
    if task is None:
        problem = _problem(x, statistics, dtype, kind, aligned)
        plan = norm_planner.plan_normalize(problem, executor.device_of(x))
        task = executor.remember(key, executor.make_task(plan, NORMALIZE, (), x))
    weight, bias = _dense(weight, kind), _dense(bias, kind)
    task.launch(x, (x.data_ptr(), statistics.data_ptr(), _address(weight), _address(bias), y.data_ptr()))
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
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (dy, x, dz))
    key = (
        "norm_grad",
        x.dtype,
        x.device,
        x.shape,
        x.stride(),
        statistics.shape,
        dy.dtype,
        parameter,
        wanted,
        aligned,
    )
    task = executor.known(key)
    if task is None:
        problem = _problem(x, statistics, dy.dtype, parameter, aligned)
        plan = norm_planner.plan_gradient(problem, wanted, executor.device_of(x))
        task = executor.remember(key, executor.make_task(plan, GRADIENT, (), x))
    weight = _dense(weight, parameter)
    inputs = dy.data_ptr(), x.data_ptr(), statistics.data_ptr(), _address(weight)
    task.launch(x, (*inputs, 0, dz.data_ptr(), dparameters.data_ptr(), dbias.data_ptr()))
    return dz, dparameters, dbias


def _problem(
    x: Tensor, statistics: Tensor, result: torch.dtype, parameter: torch.dtype | None, aligned: bool
) -> NormProblem:
    batch, channels, *size = x.shape
    last = is_channels_last(x.stride())
    activation = Activation(batch, channels, size[0] * size[1] * size[2], DTYPES[x.dtype], last, aligned)
    kind = DTYPES[x.dtype if parameter is None else parameter]
    return NormProblem(activation, DTYPES[result], kind, statistics.shape[2])


def _dense(tensor: Tensor | None, kind: torch.dtype | None) -> Tensor | None:
    """Returns a parameter as the kernel reads it: contiguous, and of the type that the kernel is compiled for."""
    if tensor is None or (tensor.stride(0) == 1 and tensor.dtype is kind):
        return tensor
    return tensor.to(kind).contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
