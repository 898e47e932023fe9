"""A large volume: 48 to 24 channels, kernel 3, stride 1, on 96 x 96 x 96."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tconv3d

from . import OneLayer

SHAPE = (8, 48, 96, 96, 96)  # [N, C_in, D, H, W]
REDUCED = (1, 48, 3, 5, 9)


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
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = self.Layer(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation
        )


class ModelNew(Model):
    """Runs this library's layer in place of PyTorch's."""

    Layer = tconv3d.ConvTranspose3d


def get_inputs(shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    return [torch.randn(shape)]


def get_init_inputs() -> list[Any]:
    in_channels, out_channels, kernel_size = 48, 24, 3
    return [in_channels, out_channels, kernel_size]
