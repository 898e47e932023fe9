"""The layers benchmarks measure: the reference tasks and decoder layers of published networks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Layer:
    """A transposed convolution with its input; integers stand for all three dimensions."""

    batch: int
    in_channels: int
    out_channels: int
    size: Triple
    kernel: int | Triple
    stride: int | Triple = 1
    padding: int | Triple = 0
    output_padding: int | Triple = 0
    dilation: int | Triple = 1
    groups: int = 1

    @property
    def settings(self) -> tuple[object, ...]:
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation

    def tensors(self, dtype: torch.dtype, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        kernel = (self.kernel,) * 3 if isinstance(self.kernel, int) else self.kernel
        x = torch.randn(self.batch, self.in_channels, *self.size, device="cuda").to(dtype)
        w = torch.randn(self.in_channels, self.out_channels // self.groups, *kernel, device="cuda").to(dtype)
        b = torch.randn(self.out_channels, device="cuda").to(dtype) if bias else None
        return x, w, b


def cube(size: int) -> Triple:
    return size, size, size


LAYERS = {
    "grouped_strided": Layer(4, 32, 32, (32, 64, 128), 3, 2, 1, groups=4),
    "grouped_strided_g1": Layer(4, 32, 32, (32, 64, 128), 3, 2, 1),
    "large_volume": Layer(8, 48, 24, cube(96), 3),
    "asymmetric_kernel": Layer(16, 32, 64, cube(64), (3, 5, 5)),
    "relu_group_norm": Layer(16, 64, 128, cube(32), 3),
    "nnunet_64_32_64": Layer(2, 64, 32, cube(64), 2, 2),
    "nnunet_128_64_32": Layer(2, 128, 64, cube(32), 2, 2),
    "nnunet_256_128_16": Layer(2, 256, 128, cube(16), 2, 2),
    "nnunet_320_256_8": Layer(2, 320, 256, cube(8), 2, 2),
    "nnunet_320_320_4": Layer(2, 320, 320, cube(4), 2, 2),
    "monai_32_2_64": Layer(4, 32, 2, cube(64), 3, 2, 1, 1),
    "monai_64_16_32": Layer(4, 64, 16, cube(32), 3, 2, 1, 1),
    "monai_128_32_16": Layer(4, 128, 32, cube(16), 3, 2, 1, 1),
    "monai_384_64_8": Layer(4, 384, 64, cube(8), 3, 2, 1, 1),
    "gan_64_1_32": Layer(32, 64, 1, cube(32), 4, 2, 1),
    "gan_128_64_16": Layer(32, 128, 64, cube(16), 4, 2, 1),
    "gan_256_128_8": Layer(32, 256, 128, cube(8), 4, 2, 1),
    "gan_512_256_4": Layer(32, 512, 256, cube(4), 4, 2, 1),
    "videogpt_240_240": Layer(2, 240, 240, (4, 32, 32), 4, 2, 1),
    "depthwise_64": Layer(4, 64, 64, cube(32), 4, 2, 1, groups=64),
}
