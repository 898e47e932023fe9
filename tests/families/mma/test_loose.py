"""Layers with groups in float32 where PyTorch allows TF32: three TF32 products for sums of any length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ampere import AMPERE
from layers import T1, T3, Layer, passes
from preferred import only, preferring
from problems import problem
from torch import Tensor

import tconv3d
from tconv3d import emulator
from tconv3d.families.mma import planner as mma_planner
from tconv3d.planning.problem import Pass
from tconv3d.torch_ops import executor

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

T2 = (2, 2, 2)
LAYERS = {
    "groups of 8": Layer(16, 16, (3, 3, 9), T3, T2, T1, groups=2, batch=1),
    "short sums": Layer(8, 8, (3, 3, 9), T2, T2, groups=2, batch=1),
    "wide groups, dilated": Layer(40, 24, (3, 4, 6), (3, 2, 3), (1, 2, 2), (2, 0, 1), (0, 1, 1), (2, 3, 3), groups=2),
}


@pytest.fixture(autouse=True)
def loose(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(executor, "EMULATED", AMPERE)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    tconv3d.allow_tf32_in_groups(False)
    with only("mma", "tensor_weight_grad", "direct"), preferring("mma"), tconv3d.use_backend("emulator"):
        yield


def results(layer: Layer, operands: list[Tensor], grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns the result and the input gradient, each beside what float64 says."""
    mine, of_mine = passes(tconv3d.conv_transpose3d, operands, layer.settings, grad)
    exact, of_exact = passes(F.conv_transpose3d, [t.double() for t in operands], layer.settings, grad.double())
    return [(mine, exact), (of_mine[0], of_exact[0])]


def operands_of(layer: Layer) -> tuple[list[Tensor], Tensor]:
    operands = layer.operands(torch.float32, "cpu")
    shape = F.conv_transpose3d(*operands, *layer.settings).shape
    return operands, torch.randn(shape, generator=torch.Generator().manual_seed(3))


def errors(layer: Layer) -> list[float]:
    return [float((mine - exact).norm() / exact.norm()) for mine, exact in results(layer, *operands_of(layer))]


@pytest.mark.parametrize("name", LAYERS)
def test_errors_are_of_float32(name: str) -> None:
    assert max(errors(LAYERS[name])) < 1.5e-7


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 1e-30, -3.4e38])
def test_special_values_reach_the_result(value: float) -> None:
    """One value of x, w or dy is special, and every sum that contains it is what float64 says."""
    layer = Layer(16, 16, (3, 3, 5), T3, T1, T1, groups=2, batch=1)
    operands, grad = operands_of(layer)
    tensors = [torch.ones_like(t) for t in (*operands[:2], grad)]
    for place in range(3):
        x, w, dy = (t.clone() for t in tensors)
        (x, w, dy)[place][0, 3, 1, 1, 1] = value
        for mine, exact in results(layer, [x, w, torch.zeros(16)], dy):
            if place == 1 and not exact.isfinite().all():  # padding times an infinite weight is NaN, in every kernel
                mine, exact = mine[..., 1:-1, 1:-1, 1:-1], exact[..., 1:-1, 1:-1, 1:-1]
            assert torch.allclose(mine, exact.float(), rtol=1e-6, atol=0.0, equal_nan=True)


def test_short_sums_need_the_permission() -> None:
    layer = LAYERS["short sums"]
    wanted = problem(layer, Pass.FORWARD, tf32=False)
    assert mma_planner.why_not(replace(wanted, loose=True), AMPERE) is None
    assert "multiply-adds" in (mma_planner.why_not(wanted, AMPERE) or "")
