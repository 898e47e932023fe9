"""A convolution, ReLU and GroupNorm: 64 to 128 channels, kernel 3, norm of 8 groups, on 32 x 32 x 32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tconv3d

SHAPE = (16, 64, 32, 32, 32)  # [N, C_in, D, H, W]
REDUCED = (1, 64, 2, 3, 5)


class Model(nn.Module):
    """Runs PyTorch's transposed 3D convolution, ReLU and GroupNorm. `groups` counts the groups of the GroupNorm."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, groups: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=bias)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.group_norm(torch.relu(self.conv_transpose(x)))


class ModelNew(tconv3d.ConvTranspose3dReLUGroupNorm):
    """Runs this library's fused block in place of PyTorch's three layers."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, groups: int, bias: bool = False
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, num_groups=groups, bias=bias)


def get_inputs(shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    return [torch.randn(shape)]


def get_init_inputs() -> list[Any]:
    in_channels, out_channels, kernel_size, groups = 64, 128, 3, 8
    return [in_channels, out_channels, kernel_size, groups]
