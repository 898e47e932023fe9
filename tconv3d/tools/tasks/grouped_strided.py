"""Grouped and strided: 32 to 32 channels in 4 groups, kernel 3, stride 2, padding 1, on 32 x 64 x 128."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tconv3d

from . import OneLayer

SHAPE = (4, 32, 32, 64, 128)  # [N, C_in, D, H, W]
REDUCED = (2, 32, 3, 4, 9)


class Model(OneLayer):
    """Runs PyTorch's transposed 3D convolution."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = self.Layer(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias
        )


class ModelNew(Model):
    """Runs this library's layer in place of PyTorch's."""

    Layer = tconv3d.ConvTranspose3d


def get_inputs(shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    return [torch.randn(shape)]


def get_init_inputs() -> list[Any]:
    in_channels, out_channels, kernel_size, stride, padding, output_padding, groups = 32, 32, 3, 2, 1, 0, 4
    return [in_channels, out_channels, kernel_size, stride, padding, output_padding, groups]
