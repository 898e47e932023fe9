"""This library's operators in terms of PyTorch's, for programs that know PyTorch's operators only.

Quantizers and other tools take a program of `torch.export` after `run_decompositions(decompositions())`. PyTorch's
ONNX exporter finds the table by itself. This module knows operators, and nothing of kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..planning.geometry import Triple
from . import pytorch_ops
from .flops import when_imported
from .registration import settings_of


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    return torch.conv_transpose3d(input, weight, bias, *settings)


def _relu(input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    return torch.relu(torch.conv_transpose3d(input, weight, bias, *settings))


def _block(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    num_groups: int,
    eps: float,
    dtype: torch.dtype,
    *settings: Any,
) -> Tensor:
    result = torch.relu(torch.conv_transpose3d(input, weight, bias, *settings)).to(dtype)
    return torch.nn.functional.group_norm(result, num_groups, norm_weight, norm_bias, eps)


def _input_grad(grad_output: Tensor, weight: Tensor, size: Triple, *settings: Any) -> Tensor:
    return pytorch_ops.input_grad(grad_output, weight, size, settings_of(settings))


def _weight_grad(grad_output: Tensor, input: Tensor, kernel: Triple, *settings: Any) -> Tensor:
    return pytorch_ops.weight_grad(grad_output, input, kernel, settings_of(settings))


def _statistics(
    input: Tensor, weight: Tensor, bias: Tensor | None, groups: int, eps: float, *settings: Any
) -> tuple[Tensor, Tensor]:
    return pytorch_ops.forward_with_statistics(input, weight, bias, groups, eps, settings_of(settings))


_TABLE: dict[str, Callable[..., Any]] = {
    "conv_transpose3d": _forward,
    "conv_transpose3d_relu": _relu,
    "conv_transpose3d_relu_group_norm": _block,
    "conv_transpose3d_input_grad": _input_grad,
    "conv_transpose3d_weight_grad": _weight_grad,
    "conv_transpose3d_bias_grad": pytorch_ops.bias_grad,
    "conv_transpose3d_relu_statistics": _statistics,
    "normalize": pytorch_ops.normalize,
    "relu_group_norm_grad": pytorch_ops.norm_gradient,
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns a table of this library's operators with functions that compute them by PyTorch's operators.

    For `torch.export`: `program.run_decompositions(tconv3d.decompositions())` gives a program without this library's
    operators, which other tools can read.
    """
    return {getattr(torch.ops.tconv3d, name).default: function for name, function in _TABLE.items()}


def add_to_onnx(exporter: Any) -> None:
    """Adds the table to the one that PyTorch's ONNX exporter makes for every export.

    PyTorch's global table of decompositions stays as it is: where the variable CI is set, Inductor refuses operators
    that are in it.
    """
    make_table = exporter.create_onnx_friendly_decomposition_table

    @functools.wraps(make_table)
    def with_ours(*args: Any, **options: Any) -> dict[Any, Callable[..., Any]]:
        return {**make_table(*args, **options), **decompositions()}

    exporter.create_onnx_friendly_decomposition_table = with_ours


when_imported("torch.onnx._internal.exporter._decomp", add_to_onnx)
