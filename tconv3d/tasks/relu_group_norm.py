"""What often follows the convolution: 64 to 128 channels, kernel 3, then ReLU, then GroupNorm of 8 groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tconv3d

SHAPE = (16, 64, 32, 32, 32)  # [N, C_in, D, H, W]
REDUCED = (1, 64, 2, 3, 5)


class Model(nn.Module):
    """Transposed 3D convolution, ReLU, GroupNorm: PyTorch's. `groups` is the GroupNorm's."""

    Layer: type[nn.ConvTranspose3d] = nn.ConvTranspose3d

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, groups: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.conv_transpose = self.Layer(in_channels, out_channels, kernel_size, bias=bias)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.group_norm(torch.relu(self.conv_transpose(x)))


class ModelNew(Model):
    """The same model with this library's convolution; ReLU and GroupNorm are PyTorch's."""

    Layer = tconv3d.ConvTranspose3d


def get_inputs(shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    return [torch.randn(shape)]


def get_init_inputs() -> list[Any]:
    in_channels, out_channels, kernel_size, groups = 64, 128, 3, 8
    return [in_channels, out_channels, kernel_size, groups]
