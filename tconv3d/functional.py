"""The functions, with `torch.nn.functional`'s names, arguments and meaning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import ops
from .checks import check_rank, check_tensors, integer, triple


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
    """`torch.nn.functional.conv_transpose3d` on this library's kernels.

    input: (N, C_in, D, H, W) or (C_in, D, H, W). weight: (C_in, C_out / groups, kD, kH, kW). bias: (C_out).
    Tuples are (depth, height, width).
    """
    check_tensors(input, weight, bias)
    if not torch.compiler.is_compiling() and ops.why_not_ours(input) is not None:
        return torch.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)
    convolution = (
        triple(stride, "stride"),
        triple(padding, "padding"),
        triple(output_padding, "output_padding"),
        integer(groups, "groups"),
        triple(dilation, "dilation"),
    )
    check_rank(input, weight)
    if input.dim() == 4:
        return ops.conv_transpose3d(input.unsqueeze(0), weight, bias, convolution).squeeze(0)
    return ops.conv_transpose3d(input, weight, bias, convolution)
