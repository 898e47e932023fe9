"""Tensors that an epilogue reads beside the sums: with one batch item or channel for all, and of another type."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import poisoned
from mutants import kernel_from, mutate
from preferred import only
from tail_checks import LAST, close
from torch import Tensor, nn

import tconv3d
from tconv3d.tools.bench.precision import precision

CONTIGUOUS = torch.contiguous_format
SHAPES = {
    "one item": lambda n, c, size: (1, c, *size),
    "no batch": lambda n, c, size: (c, *size),
    "one channel": lambda n, c, size: (n, 1, *size),
    "one for all": lambda n, c, size: (1, 1, *size),
}
# Kernel, type of the layer, type of the residual, layout, output channels, groups, kernel size, stride.
CASES = {
    "direct": ("direct", "float32", "bfloat16", CONTIGUOUS, 6, 2, 3, 2),
    "direct, channels last": ("direct", "bfloat16", "bfloat16", LAST, 8, 1, 3, 1),
    "mma": ("mma", "tf32", "float32", CONTIGUOUS, 12, 1, 3, 2),
    "mma, channels last": ("mma", "tf32", "float16", LAST, 16, 1, 3, 2),
    "halo": ("halo", "tf32", "bfloat16", CONTIGUOUS, 16, 1, 3, 2),
    "halo, channels last": ("halo", "bfloat16", "bfloat16", LAST, 24, 1, 3, 2),
    "up": ("up", "bfloat16", "bfloat16", CONTIGUOUS, 16, 1, 2, 2),
    "few_outputs, channels last": ("few_outputs", "tf32", "float16", LAST, 2, 1, 3, 2),
}


def tail(z: Tensor, residual: Tensor) -> Tensor:
    return F.leaky_relu(z + residual, 0.1) * residual


def check(name: str, which: str) -> None:
    kernel, kind, other, layout, channels, groups, size, stride = CASES[name]
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    torch.manual_seed(3)
    layer = nn.ConvTranspose3d(16, channels, size, stride=stride, padding=size // 3, groups=groups)
    layer.weight.data = torch.randint(-2, 3, layer.weight.shape) / 8.0  # all types hold every sum
    layer = layer.to(dtype).to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.randint(-2, 3, (2, 16, 3, 4, 6)).to(dtype).to(memory_format=layout)
    z = layer.double()(x.double())
    layer = layer.to(dtype)
    residual = torch.randn(SHAPES[which](2, channels, z.shape[2:])).to(getattr(torch, other))
    block = tconv3d.fuse(layer, tail)
    with torch.no_grad(), only(kernel), precision(kind), tconv3d.use_backend("emulator"), poisoned():
        report, ours = block.report(x, residual), block(x, residual)
    assert report.kernel and not report.passes and not report.pytorch, report
    close(ours, tail(z, residual.double()).detach())


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    for which in SHAPES if name in ("mma", "direct, channels last") else ("one item", "one channel"):
        check(name, which)


# What a fault makes a kernel read exists.
FAULTS = {
    "one element for all": ("found.place -= run.n * args.tail.volume * (", "found.place = 0 * (", "one item"),
    "one line for all": (
        "found.place -= (run.n * (Kind::kSharing",
        "found.place = 0 * (run.n * (Kind::kSharing",
        "one channel",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_twin_is_caught(fault: str, tmp_path: Path) -> None:
    text, replacement, which = FAULTS[fault]
    mutate("epilogue", text, replacement, tmp_path / "mutant")
    with kernel_from(tmp_path / "mutant", "mma"), pytest.raises(AssertionError):
        check("mma", which)


@pytest.mark.parametrize("layouts", [(LAST, CONTIGUOUS), (CONTIGUOUS, LAST)])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_residual_in_another_layout_that_comes_first(layouts: Any, recorded: bool) -> None:
    """PyTorch returns a sum in the layout of its first operand; the convolution's kernel does not."""
    torch.manual_seed(3)
    block = tconv3d.fuse(nn.ConvTranspose3d(16, 8, 3), lambda z, r: torch.relu(r * z + r) if recorded else r - z)
    x = torch.randn(2, 16, 3, 4, 5).to(memory_format=layouts[0])
    residual = torch.randn(2, 8, 5, 6, 7).to(memory_format=layouts[1])
    wide, other = x.double().requires_grad_(recorded), residual.double()
    exact = block.tail(copy.deepcopy(block.convolution).double()(wide), other)
    x.requires_grad_(recorded)
    with tconv3d.use_backend("emulator"), torch.set_grad_enabled(recorded), poisoned():
        ours = block(x, residual)
    close(ours.detach(), exact.detach(), 4)
    if recorded:
        close(*[torch.autograd.grad(y.square().sum(), each)[0] for y, each in ((ours, x), (exact, wide))], 20)


def test_a_residual_that_is_used_with_gradients_too() -> None:
    """PyTorch computes gradients of a tensor for all channels of all items, and the report says so."""
    block = tconv3d.fuse(nn.ConvTranspose3d(16, 8, 3), tail)
    x, residual = torch.randn(2, 16, 3, 4, 5), torch.randn(5, 6, 7, requires_grad=True)
    with tconv3d.use_backend("emulator"):
        assert any("in PyTorch" in text for text in block.report(x, residual).gradients)
        (ours,) = torch.autograd.grad(block(x, residual).sum(), residual)
    (theirs,) = torch.autograd.grad(tail(block.convolution(x), residual).sum(), residual)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
