"""Computes all gradients of a layer by one call of the executor, and compares them with float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from layers import Layer, Triple, assert_right, passes, poisoned, tensor_core_error
from torch import Tensor

from tconv3d.torch_ops import executor


def tensors(layer: Layer, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, w and dy. The weight of a layer with fewer than 24 input channels begins at an unaligned address."""
    x, w = layer.operands(dtype, device)[:2]
    if layer.in_channels < 24:
        w = torch.cat([w.flatten()[:1], w.flatten()])[1:].view(w.shape)
    shape = F.conv_transpose3d(x.double(), w.double(), None, *layer.settings).shape
    return x, w, torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def gradients(layer: Layer, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    with poisoned():
        found = executor.backward(dy, x, w, (True, True, True), layer.size, layer.kernel, layer.settings)
    return [gradient for gradient in found if gradient is not None]


def check(
    layer: Layer, dtype: torch.dtype, device: str, operands: tuple[Tensor, Tensor, Tensor] | None = None
) -> list[Tensor]:
    """Compares every element with float64; the allowed error is some roundings of the sum over absolute values."""
    operands = tensors(layer, dtype, device) if operands is None else operands
    x, w, dy = (operand.double() for operand in operands)
    bias = torch.zeros(layer.out_channels, device=device).double()
    expected = passes(F.conv_transpose3d, [x, w, bias], layer.settings, dy)[1]
    largest = passes(F.conv_transpose3d, [x.abs(), w.abs(), bias], layer.settings, dy.abs())[1]
    got = gradients(layer, *operands)
    for name, mine, exact, sum_of_all in zip(("input", "weight", "bias"), got, expected, largest, strict=True):
        assert mine.dtype == dtype
        assert_right(f"{name} gradient", mine, exact, tensor_core_error(exact, sum_of_all, dtype))
    return got


def check_special_value(layer: Layer, device: str, at: Triple, position: Triple, tap: Triple) -> None:
    """Checks that a NaN in channel 3 of the output gradient reaches only one input position and one tap."""
    x, w, dy = tensors(layer, torch.float32, device)
    dy[(1, 3, *at)] = float("nan")
    dx, dw, db = gradients(layer, x, w, dy)
    assert dx.isnan().any(1).nonzero().tolist() == [[1, *position]]
    assert dw.isnan().nonzero()[:, 1:].unique(dim=0).tolist() == [[3, *tap]]
    assert db.isnan().nonzero().tolist() == [[3]]
