"""Compares the weight gradient of a layer with float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from layers import Layer, assert_right, passes, poisoned, tensor_core_error
from torch import Tensor

from tconv3d.torch_ops import executor


def tensors(layer: Layer, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns random x and dy."""
    x, w = layer.operands(dtype, device, seed)[:2]
    shape = passes(F.conv_transpose3d, [x.double(), w.double()], layer.settings)[0].shape
    return x, torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).to(device, dtype)


def weight_grad(layer: Layer, x: Tensor, dy: Tensor) -> Tensor:
    with poisoned():
        return executor.weight_grad(dy, x, layer.kernel, layer.settings)


def check(layer: Layer, x: Tensor, dy: Tensor) -> Tensor:
    """Compares every element with float64; the allowed error is some roundings of the sum over absolute values."""
    w = torch.zeros(layer.in_channels, layer.out_channels // layer.groups, *layer.kernel, device=x.device).double()
    exact_x, exact_dy = x.double(), dy.double()
    expected = passes(F.conv_transpose3d, [exact_x, w], layer.settings, exact_dy)[1][1]
    largest = passes(F.conv_transpose3d, [exact_x.abs(), w], layer.settings, exact_dy.abs())[1][1]
    got = weight_grad(layer, x, dy)
    assert got.dtype == x.dtype
    assert_right("weight gradient", got, expected, tensor_core_error(expected, largest, x.dtype))
    return got
