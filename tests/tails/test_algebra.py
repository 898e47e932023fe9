"""Linear operators that move into the convolution: results against float64, saved work, the exact order."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tail_checks import LAST, C, check_values, close, fused, operand
from torch import Tensor, nn

import tconv3d
from tconv3d.tails.algebra import AveragePool, Layer, SpaceSum

TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over channels": lambda z: torch.tanh(z.mean(1, keepdim=True)),
    "sum over channels": lambda z: F.silu(z.sum(1)),
    "mean of everything": lambda z: (z * 2 + 1).mean(),
    "global mean": lambda z: torch.sigmoid(z.mean((2, 3, 4))),
    "adaptive average pool": lambda z: F.adaptive_avg_pool3d(z, 1),
    "sum over the batch and space": lambda z: z.sum((0, 2, 3, 4)),
    "mean over depth": lambda z: F.silu(z.mean(2)),
    "sum over planes": lambda z: z.sum((3, 4), keepdim=True),
    "average pool": lambda z: F.silu(F.avg_pool3d(z, 2)),
}


@pytest.mark.parametrize("name", TAILS)
def test_values(name: str) -> None:
    for dtype, layout in ((torch.float32, torch.contiguous_format), (torch.bfloat16, LAST)):
        report = check_values(fused(TAILS[name], dtype), operand(dtype, layout))
        assert report.weight and not report.passes
    exact = check_values(fused(TAILS[name], exact_order=True), operand(torch.float32))
    assert not exact.weight and (exact.passes or exact.pytorch or exact.channels)


def test_an_affine_map_before_a_mean_moves_with_it() -> None:
    norm = nn.BatchNorm3d(C).eval()
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    report = check_values(fused(nn.Sequential(norm, nn.AvgPool3d(2), nn.ReLU())), operand(torch.float32))
    assert "an average pool" in report.weight and "Vectored" in report.weight and not report.passes


def test_a_changed_weight_is_seen() -> None:
    model, x = fused(lambda z: z.mean((2, 3, 4))), operand(torch.float32)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        before = model(x)
        model.convolution.weight.mul_(2)
        model.convolution.bias.mul_(2)
        torch.testing.assert_close(model(x), 2 * before)


def layer_of(kernel: int, stride: int, padding: int, extra: int, groups: int, dilation: int, size: int) -> Layer:
    return Layer((size,) * 3, (kernel,) * 3, ((stride,) * 3, (padding,) * 3, (extra,) * 3, groups, (dilation,) * 3))


SETTINGS = [
    layer_of(3, 2, 1, 1, 1, 1, 4),
    layer_of(4, 2, 1, 0, 2, 1, 3),
    layer_of(2, 2, 0, 0, 1, 1, 4),
    layer_of(3, 2, 0, 1, 4, 2, 3),
    layer_of(5, 4, 3, 2, 1, 1, 4),
    layer_of(3, 1, 2, 0, 2, 1, 5),
]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, convolution: tuple[object, ...]) -> Tensor:
    return F.conv_transpose3d(x, weight, bias, *convolution)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", SETTINGS)
def test_every_setting_of_a_convolution_is_summed_and_pooled_right(layer: Layer) -> None:
    """In float64 with PyTorch's convolution: only the algebra can be wrong."""
    groups, random = layer.convolution[3], torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, *layer.input_size, generator=random, dtype=torch.float64)
    weight = torch.randn(8, 4, *layer.kernel, generator=random, dtype=torch.float64)
    bias = torch.randn(4 * groups, generator=random, dtype=torch.float64)
    z = convolve(x, weight, bias, layer.convolution)
    assert z.shape[2:] == layer.outputs
    for dims in ((2,), (3, 4), (2, 4), (2, 3, 4)):
        moved = SpaceSum(layer, dims, 0.5)
        close(moved.forward(x, *moved.operands(weight, bias), convolve), z.sum(dims, keepdim=True) / 2)
    for window, step in (((2, 2, 2), (2, 2, 2)), ((3, 1, 2), (1, 1, 2)), ((4, 4, 4), (4, 4, 4))):
        pool = AveragePool(layer, window, step)
        if pool.saves:
            pooled = pool.forward(x, *pool.operands(weight, bias), convolve)
            close(pooled, F.avg_pool3d(z, window, step))


def test_a_pool_that_saves_no_work_stays_a_pool() -> None:
    assert AveragePool(SETTINGS[0], (2, 2, 2), (2, 2, 2)).saves
    assert not AveragePool(SETTINGS[0], (3, 3, 3), (3, 3, 3)).saves  # no transposed convolution has a stride of 2/3
    assert not AveragePool(SETTINGS[5], (2, 2, 2), (2, 2, 2)).saves  # a stride of 1/2


def test_the_large_mean_of_a_large_input_keeps_its_precision() -> None:
    """Sums over ranges are added up, never subtracted, so that values far from 0 cost no digits."""
    model, x = fused(lambda z: z.mean((2, 3, 4))), operand(torch.float32) + 1000
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        ours = model(x)
        exact = copy.deepcopy(model).double()
    with torch.no_grad(), tconv3d.use_backend("torch"):
        close(ours, exact(x.double()))
