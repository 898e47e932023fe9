"""Functions with the names, arguments and meaning of `torch.nn.functional`, and functions that fuse several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..torch_ops import fused_ops, ops
from ..torch_ops.checks import are_tensors, check_norm, check_rank, check_tensors, convolution_of, integer


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Computes `torch.nn.functional.conv_transpose3d` on this library's kernels.

    input: (N, C_in, D, H, W) or (C_in, D, H, W). weight: (C_in, C_out / groups, kD, kH, kW). bias: (C_out).
    Tuples are (depth, height, width).
    """
    if not are_tensors(input, weight, bias):
        settings = stride, padding, output_padding, groups, dilation
        return _overridden(conv_transpose3d, input, weight, bias, *settings)
    if not torch.compiler.is_compiling() and ops.why_not_ours(input) is not None:
        return torch.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)
    convolution = convolution_of(stride, padding, output_padding, groups, dilation)
    check_rank(input, weight)
    if input.dim() == 4:
        return ops.conv_transpose3d(input.unsqueeze(0), weight, bias, convolution).squeeze(0)
    return ops.conv_transpose3d(input, weight, bias, convolution)


def conv_transpose3d_relu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Computes `torch.relu(conv_transpose3d(...))` in one kernel, with the arguments of `conv_transpose3d`."""
    if not are_tensors(input, weight, bias):
        settings = stride, padding, output_padding, groups, dilation
        return _overridden(conv_transpose3d_relu, input, weight, bias, *settings)
    if not torch.compiler.is_compiling() and ops.why_not_ours(input) is not None:
        result = torch.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)
        return torch.relu(result)
    convolution = convolution_of(stride, padding, output_padding, groups, dilation)
    check_rank(input, weight)
    if input.dim() == 4:
        return ops.conv_transpose3d(input.unsqueeze(0), weight, bias, convolution, relu=True).squeeze(0)
    return ops.conv_transpose3d(input, weight, bias, convolution, relu=True)


def conv_transpose3d_relu_group_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Computes `group_norm(relu(conv_transpose3d(...)), num_groups, norm_weight, norm_bias, eps)`.

    `groups` belongs to the convolution, `num_groups` to the norm. norm_weight and norm_bias: (C_out).
    """
    if not are_tensors(input, weight, bias):
        norm, settings = (
            (num_groups, norm_weight, norm_bias, eps),
            (stride, padding, output_padding, groups, dilation),
        )
        return _overridden(conv_transpose3d_relu_group_norm, input, weight, bias, *norm, *settings)
    if not torch.compiler.is_compiling() and ops.why_not_ours(input) is not None:
        result = torch.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)
        return F.group_norm(torch.relu(result), num_groups, norm_weight, norm_bias, eps)
    if input.dim() == 4:  # PyTorch's GroupNorm treats the first dimension as the batch, even of an unbatched input
        result = conv_transpose3d_relu(input, weight, bias, stride, padding, output_padding, groups, dilation)
        return F.group_norm(result, num_groups, norm_weight, norm_bias, eps)
    convolution = convolution_of(stride, padding, output_padding, groups, dilation)
    num_groups = integer(num_groups, "num_groups")
    check_rank(input, weight)
    check_norm(input, weight, norm_weight, norm_bias, num_groups, convolution)
    return fused_ops.conv_transpose3d_relu_group_norm(
        input, weight, bias, norm_weight, norm_bias, num_groups, eps, convolution
    )


def _overridden(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Calls `__torch_function__` of an operand that is no tensor, as PyTorch's functions do. torch.fx needs it."""
    operands = arguments[:3]
    if not has_torch_function(operands):
        check_tensors(*operands)
    result: Tensor = handle_torch_function(function, operands, *arguments)
    return result
