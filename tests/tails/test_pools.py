"""Pools in tails: values and gradients against float64, with overlapping, dilated and clipped windows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from layers import poisoned
from tail_checks import LAST, C, check_gradients, check_values, close, fused, moved, operand
from torch import Tensor, nn

import tconv3d
from tconv3d.families.norm.pool import Windows
from tconv3d.tails import pools
from tconv3d.torch_ops import pool_executor

TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "max pool": lambda z: F.silu(F.max_pool3d(F.silu(z), 2)),
    "overlapping max pool": lambda z: F.max_pool3d(F.silu(z), 3, 2, 1) * 2,
    "dilated max pool": lambda z: F.max_pool3d(z, 2, 1, dilation=2, ceil_mode=True),
    "average pool": lambda z: F.avg_pool3d(F.silu(z), 2),
    "overlapping average pool": lambda z: F.avg_pool3d(F.silu(z), 3, 2, 1),
    "clipped average pool": lambda z: F.avg_pool3d(F.silu(z), 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "uneven average pool": lambda z: F.silu(F.avg_pool3d(F.silu(z), (2, 3, 2), (2, 2, 3), (1, 1, 0), ceil_mode=True)),
    "divisor of its own": lambda z: F.avg_pool3d(F.silu(z), 2, divisor_override=3),
}


@pytest.mark.parametrize("name", TAILS)
def test_values(name: str) -> None:
    kinds = (
        (torch.float32, torch.contiguous_format),
        (torch.bfloat16, LAST),
        (torch.float16, torch.contiguous_format),
    )
    for dtype, layout in kinds:
        report = check_values(fused(TAILS[name], dtype), operand(dtype, layout))
        assert len(report.passes) == 1 and not report.pytorch


@pytest.mark.parametrize("name", TAILS)
def test_gradients(name: str) -> None:
    layout = LAST if len(name) % 2 else torch.contiguous_format
    check_gradients(fused(TAILS[name]), operand(torch.float32, layout), 4)


@pytest.mark.parametrize(("name", "most"), [("max pool", 4.8), ("overlapping max pool", 5.2)])
def test_a_training_step_finds_maxima_and_their_places_together(name: str, most: float) -> None:
    """The volumes that the passes read and write; the places have 8 bytes."""
    assert moved(fused(TAILS[name]), operand(torch.float32)) < most


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_maxima_and_their_places_are_one_pass(layout: torch.memory_format) -> None:
    def tail(z: Tensor) -> tuple[Tensor, Tensor]:
        largest, places = F.max_pool3d(F.silu(F.group_norm(z, 2)), 3, 2, 1, return_indices=True)
        return torch.tanh(largest), places

    report = check_values(fused(tail), operand(torch.float32, layout))
    assert len(report.passes) == 1 and "largest and its index" in report.passes[0]


def test_gradients_in_16_bits() -> None:
    check_gradients(fused(TAILS["overlapping average pool"], torch.bfloat16), operand(torch.bfloat16, LAST), 2)


def test_a_norm_before_and_a_softmax_behind_a_pool() -> None:
    """Values take one pooling pass and one pass along the channels; gradients run in passes as well."""
    norm = nn.GroupNorm(2, C)
    nn.init.normal_(norm.weight)
    model = fused(nn.Sequential(norm, nn.SiLU(), nn.MaxPool3d(2), nn.Softmax(1)))
    x = operand(torch.float32)
    report = check_values(model, x)
    assert len(report.passes) == 2 and not report.pytorch
    check_gradients(model, x, 10)


def test_pytorch_finds_places_that_float32_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have 5 x 7 x 9 positions. A pool without gradients needs no places, and an average pool never does."""
    x = operand(torch.float32).requires_grad_()
    for most, name, ours in (
        (315, "max pool", True),
        (314, "max pool", False),
        (314, "average pool", True),
    ):
        monkeypatch.setattr(pools, "MOST_PLACES", most)
        model = fused(TAILS[name])
        with tconv3d.use_backend("emulator"):
            result = model(x)
        assert (type(result.grad_fn).__name__ == "ChainBackward") == ours
        assert not check_values(model, x.detach()).pytorch


NORMED: dict[str, tuple[nn.Module, float]] = {
    "max pool": (nn.MaxPool3d(2), 5.8),
    "overlapping max pool": (nn.MaxPool3d(3, 2, 1), 7),
    "clipped average pool": (nn.AvgPool3d(3, 2, 1, ceil_mode=True, count_include_pad=False), 6),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, C), nn.BatchNorm3d(C)], ids=["GroupNorm", "BatchNorm"])
def test_gradients_of_a_norm_before_a_pool(norm: nn.Module, name: str, layout: torch.memory_format) -> None:
    """The sums that a norm's gradient needs gather the gradient of the pool, which is never written."""
    pool, most = NORMED[name]
    model, x = fused(nn.Sequential(copy.deepcopy(norm), nn.ReLU(), pool)), operand(torch.float32, layout)
    check_gradients(model, x, 30)
    assert moved(model, x) < most


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_sums_of_a_gradient_over_several_strips(layout: torch.memory_format) -> None:
    x = torch.randn((2, C, 15, 17, 19), generator=torch.Generator().manual_seed(1)).contiguous(memory_format=layout)
    wide = x.double().requires_grad_()
    y, places = F.max_pool3d(wide, 3, 2, 1, return_indices=True)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    (exact,) = torch.autograd.grad(y, wide, grad.double())
    sums = ("tconv3d::Local<0>", "tconv3d::Product<tconv3d::Value, tconv3d::Local<0>>")
    windows = Windows((3, 3, 3), (2, 2, 2), (1, 1, 1))
    with tconv3d.use_backend("emulator"), poisoned():
        found = pool_executor.gradient_sums(x, grad, places, windows, sums, None, ())
    assert found.shape[2] > 1
    for place, each in enumerate((exact, exact * wide.detach())):
        close(found.sum(2)[..., place], each.sum((2, 3, 4)))


@pytest.mark.parametrize("training", [True, False])
def test_an_average_pool_comes_before_affine_maps(training: bool) -> None:
    """Gradients of a norm's parameters are one pass of sums, of pooled numbers."""
    tail = nn.Sequential(nn.BatchNorm3d(C), nn.AvgPool3d(2), nn.SiLU(), nn.AvgPool3d(2)).train(training)
    nn.init.normal_(tail[0].weight)
    model, x = fused(tail), operand(torch.float32)
    check_values(model, x)
    check_gradients(model, x, 20)
    with tconv3d.use_backend("emulator"):
        texts = model.report(x.requires_grad_()).gradients
    assert sum("reduces" in text for text in texts) == 1 and not any("in PyTorch" in text for text in texts)
