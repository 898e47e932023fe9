"""Strict float32 (TF32 switched off): three TF32 products or multiply-adds, with the error of float32 or less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from layers import Layer
from torch import Tensor

import tconv3d
from tconv3d.api.explain import Explanation

WIDE = Layer(48, 40, (3, 5, 9), (3, 3, 3), (2, 2, 2), (1, 1, 1))  # its input gradient gathers
NARROW = Layer(64, 1, (3, 4, 5), (4, 4, 4), (2, 2, 2), (1, 1, 1))
LONG = Layer(7, 2, (3, 4, 5), (5, 5, 5))  # too few channels for tensor cores, and long sums
SHORT = Layer(16, 16, (3, 5, 9), (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=2)  # 8 to 64 terms, 37 by their weight


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def explained(layer: Layer, size: int = 32) -> Explanation:
    x, *rest = replace(layer, size=(size, size, size)).operands(torch.float32, "meta")
    return tconv3d.explain(x, *rest, *layer.settings, gpu="H200")


def result_and_gradient(
    function: Callable[..., Tensor], operands: list[Tensor], layer: Layer
) -> tuple[Tensor, Tensor]:
    x, *rest = operands
    y = function(x.requires_grad_(), *rest, *layer.settings)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize(
    ("layer", "kernel"), [(WIDE, "halo"), (NARROW, "few_outputs"), (LONG, "direct")], ids=["wide", "narrow", "long"]
)
def test_error_is_at_most_that_of_float32(layer: Layer, kernel: str, ours: str) -> None:
    """A sequential sum has 4e-7 of the long layer. (Tensor cores round otherwise than the emulator.)"""
    assert {p.name: p.kernel for p in explained(layer).passes}["forward"] == kernel
    operands = layer.operands(torch.float32, ours)
    got = result_and_gradient(tconv3d.conv_transpose3d, operands, layer)
    exact = result_and_gradient(F.conv_transpose3d, [t.detach().double() for t in operands], layer)
    assert all(error(*pair) < 2e-7 for pair in zip(got, exact, strict=True))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_error_of_few_terms_is_that_of_compensated_sums(layout: torch.memory_format, ours: str) -> None:
    """Plain sums have 1.1e-7 here, sums of sums 7.3e-8, PyTorch on an H200 6.9e-8."""
    assert explained(SHORT).kernel == "direct"
    assert "37 terms" in explained(SHORT).passes[0].passed_over["halo"]
    x, *rest = SHORT.operands(torch.float32, ours)
    x = x.contiguous(memory_format=layout)
    got = tconv3d.conv_transpose3d(x, *rest, *SHORT.settings)
    exact = F.conv_transpose3d(x.double(), *(t.double() for t in rest), *SHORT.settings)
    assert error(got, exact) < 6.8e-8


def test_infinite_sums_stay_infinite_where_rests_are_kept(ours: str) -> None:
    x, *rest = SHORT.operands(torch.float32, ours)
    x[0, 3, 1, 2, 4], x[0, 12, 2, 3, 3] = float("inf"), 3e38
    got = tconv3d.conv_transpose3d(x, *rest, *SHORT.settings)
    exact = F.conv_transpose3d(x, *rest, *SHORT.settings)
    assert torch.equal(got.isnan(), exact.isnan()) and torch.equal(got.isinf(), exact.isinf())
    assert exact.isinf().any()


def test_explain_says_which_products_are_computed(ours: str) -> None:
    assert all("three TF32 products" in explained(layer).passes[0].why for layer in (WIDE, NARROW))
    short = replace(WIDE, in_channels=40, kernel=(2, 2, 2), padding=(0, 0, 0))
    assert "40 terms" in explained(short).passes[0].passed_over["halo"]
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert "three" not in explained(WIDE).passes[0].why
