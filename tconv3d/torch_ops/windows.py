"""Runs the passes on a window: some input rows and some output rows of a layer, as in a volume that is split.

The settings of a window come from `Axis.window`: padding and output padding may be any integers, and inputs outside
the window read as zero. Tensors may be empty. This module chooses between this library's kernels and PyTorch's
operators as a call of the layer would. It knows neither ranks nor messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..planning.geometry import Axis
from . import executor, ops, pytorch_ops
from .checks import Convolution


def settings(axes: Sequence[Axis], groups: int) -> Convolution:
    """Returns the settings of a window with these axes."""
    stride, padding, output_padding, dilation = zip(
        *((axis.stride, axis.padding, axis.output_padding, axis.dilation) for axis in axes), strict=True
    )
    return stride, padding, output_padding, groups, dilation


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, axes: Sequence[Axis], groups: int) -> Tensor:
    """Computes input [N, C_in, D, H, W], weight [C_in, C_out/groups, kD, kH, kW], bias [C_out] -> [N, C_out, ...]."""
    size = [axis.output_size(extent) for axis, extent in zip(axes, input.shape[2:], strict=True)]
    shape = (input.shape[0], weight.shape[1] * groups, *size)
    if not input.numel() or not all(shape):
        result = input.new_zeros(shape)
        return result if bias is None else result.add_(bias[:, None, None, None])
    convolution = settings(axes, groups)
    if ops.why_not_ours(input) is None:
        return executor.forward(input, weight, bias, convolution, window=True)
    return pytorch_ops.forward(input, weight, bias, convolution)


def backward(
    grad_output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    wanted: tuple[bool, bool],
    input_size: tuple[int, ...],
    kernel: tuple[int, ...],
    axes: Sequence[Axis],
    groups: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the wanted gradients of input and weight; None for one that is not wanted, or that is zero.

    The weight's gradient needs `input`, and the input's gradient needs `weight`; either may be None if not needed.
    """
    if not grad_output.numel() or not all(input_size):
        return None, None
    convolution = settings(axes, groups)
    run = executor.backward if ops.why_not_ours(grad_output) is None else pytorch_ops.backward
    found = run(grad_output, input, weight, (*wanted, False), tuple(input_size), tuple(kernel), convolution)
    return found[0], found[1]


def bias_grad(grad_output: Tensor) -> Tensor:
    """Computes grad_output [N, C_out, oD, oH, oW] -> [C_out]."""
    if not grad_output.numel():
        return grad_output.new_zeros(grad_output.shape[1])
    if ops.why_not_ours(grad_output) is None:
        return executor.bias_grad(grad_output)
    return pytorch_ops.bias_grad(grad_output)
