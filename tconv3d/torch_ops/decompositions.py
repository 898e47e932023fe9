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

from . import pytorch_ops
from .flops import when_imported
from .registration import splitter


def _relu(*operands: Any) -> Tensor:
    return torch.relu(torch.conv_transpose3d(*operands))


def _block(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    norm_weight, norm_bias, num_groups, eps, dtype, *settings = rest
    result = _relu(input, weight, bias, *settings).to(dtype)
    return torch.nn.functional.group_norm(result, num_groups, norm_weight, norm_bias, eps)


def _with_settings(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes the settings of a convolution as one argument, with the operator's arguments."""
    return lambda *arguments: function(*splitter(name)(arguments))


_TABLE: dict[str, Callable[..., Any]] = {
    "conv_transpose3d": torch.conv_transpose3d,
    "conv_transpose3d_relu": _relu,
    "conv_transpose3d_relu_group_norm": _block,
    **{
        name: _with_settings(name, function)
        for name, function in (
            ("conv_transpose3d_input_grad", pytorch_ops.input_grad),
            ("conv_transpose3d_weight_grad", pytorch_ops.weight_grad),
            ("conv_transpose3d_relu_statistics", pytorch_ops.forward_with_statistics),
        )
    },
    "conv_transpose3d_bias_grad": pytorch_ops.bias_grad,
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
