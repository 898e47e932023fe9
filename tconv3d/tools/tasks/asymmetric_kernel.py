"""A kernel that is not a cube: 32 to 64 channels, kernel (3, 5, 5), stride 1, on 64 x 64 x 64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tconv3d

from . import OneLayer

SHAPE = (16, 32, 64, 64, 64)  # [N, C_in, D, H, W]
REDUCED = (1, 32, 3, 4, 6)


class Model(OneLayer):
    """Runs PyTorch's transposed 3D convolution, with (depth, height, width) for every setting."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int, int],
        stride: tuple[int, int, int] = (1, 1, 1),
        padding: tuple[int, int, int] = (0, 0, 0),
        output_padding: tuple[int, int, int] = (0, 0, 0),
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
    in_channels, out_channels, kernel_size = 32, 64, (3, 5, 5)
    return [in_channels, out_channels, kernel_size]
