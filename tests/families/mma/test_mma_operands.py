"""Epilogues on mma.sync that read vectors and whole tensors, for every way in which sums leave a block."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from ampere import on_ampere
from fused_blocks import FORMATS
from layers import T1, T3, Layer, poisoned
from mutants import kernel_from, mutate
from torch import Tensor, nn

import tconv3d
from tconv3d import emulator
from tconv3d.planning.launch import Launch

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

T2 = (2, 2, 2)
CASES = {
    "TF32, lines of odd length": (Layer(8, 12, (3, 4, 5), T3), torch.float32, "contiguous"),
    "pairs of 16-bit outputs": (Layer(16, 8, (2, 3, 5), T3, T2, T1), torch.bfloat16, "contiguous"),
    "lines with gaps": (Layer(4, 6, (2, 2, 3), T3, (1, 3, 7), (0, 1, 1), (0, 2, 4)), torch.float16, "contiguous"),
    "several batch items in a tile": (Layer(16, 8, T2, T3, T2, T1, batch=5), torch.bfloat16, "contiguous"),
    "channels last, vectors": (Layer(8, 24, (3, 4, 5), T3, T2, T1), torch.float16, "channels last"),
    "channels last, odd channels": (Layer(8, 14, (3, 3, 4), T3, groups=2), torch.float32, "channels last"),
}


def tail(z: Tensor, scale: Tensor, residual: Tensor, gate: Tensor) -> Tensor:
    return torch.sigmoid(z * (1 + scale[..., None, None, None]) + residual) * gate


def error(layer: Layer, dtype: torch.dtype, layout: str) -> float:
    """Returns the largest error of the result, and asserts that mma evaluates the whole tail."""
    torch.manual_seed(5)
    convolution = nn.ConvTranspose3d(
        layer.in_channels, layer.out_channels, layer.kernel, layer.stride, layer.padding, layer.output_padding,
        layer.groups, layer.bias, layer.dilation,
    ).to(dtype)  # fmt: skip
    x = layer.operands(dtype, "cpu")[0].to(memory_format=FORMATS[layout])
    sums = copy.deepcopy(convolution).double()(x.double()).detach()
    wholes = [torch.randn(sums.shape).to(memory_format=FORMATS[layout]) for _ in range(2)]
    extra = [each.to(dtype) for each in (torch.randn(sums.shape[:2]), *wholes)]
    launched: list[Launch] = []
    prepare = emulator.prepare
    model = tconv3d.fuse(convolution, tail)
    with on_ampere(), poisoned(), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "prepare", lambda launch, *rest: (launched.append(launch), prepare(launch, *rest))[1])
        ours = model(x, *extra)
    (main,) = (launch for launch in launched if launch.kernel == "mma")
    assert "EvaluatedWith" in str(dict(main.constants)["Epilogue"])
    exact = tail(sums, *(each.double() for each in extra))
    return float((ours.double() - exact).abs().max())


TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("name", CASES)
def test_every_output_gets_the_operands_of_its_place(name: str) -> None:
    layer, dtype, layout = CASES[name]
    assert error(layer, dtype, layout) <= TOLERANCE[dtype]


MUTANTS = {
    "the operands of the line's start": ("w = to.w + k * kStepW", "w = to.w", "pairs of 16-bit outputs"),
    "another group's vectors": (
        "{to.n, first, to.n *",
        "{to.n, channel, to.n *",
        "channels last, odd channels",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path) -> None:
    text, replacement, case = MUTANTS[name]
    mutate("mma_stores", text, replacement, tmp_path / "kernels")
    layer, dtype, layout = CASES[case]
    with kernel_from(tmp_path / "kernels", "mma"):
        assert error(layer, dtype, layout) > 2 * TOLERANCE[dtype]
