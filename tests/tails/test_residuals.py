"""Tensors that an epilogue reads beside the sums: with one batch item or channel for all, and of another type."""

from __future__ import annotations

from pathlib import Path

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


def test_a_residual_that_is_used_with_gradients_too() -> None:
    """PyTorch computes gradients of a tensor for all channels of all items, and the report says so."""
    block = tconv3d.fuse(nn.ConvTranspose3d(16, 8, 3), tail)
    x, residual = torch.randn(2, 16, 3, 4, 5), torch.randn(5, 6, 7, requires_grad=True)
    with tconv3d.use_backend("emulator"):
        assert any("in PyTorch" in text for text in block.report(x, residual).gradients)
        (ours,) = torch.autograd.grad(block(x, residual).sum(), residual)
    (theirs,) = torch.autograd.grad(tail(block.convolution(x), residual).sum(), residual)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
