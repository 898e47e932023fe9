"""Softmax and reductions over channels in the convolution's own kernel: values, ties, NaN, refusals and faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from layers import poisoned
from mutants import kernel_from, mutate
from preferred import only, preferring
from tail_checks import LAST, close
from torch import Tensor, nn

import tconv3d
from tconv3d.planning import gpus, planner
from tconv3d.planning.problem import Pass
from tconv3d.tools.bench.precision import precision
from tconv3d.tools.bench.problems import problems_of_layer
from tconv3d.torch_ops import axis_executor

CONTIGUOUS = torch.contiguous_format
Tail = Callable[[Tensor, Tensor], Tensor]

# Tails of the result and of a residual: with one number for each channel, and with one number for each position.
TAILS: dict[str, Tail] = {
    "softmax of a residual": lambda z, r: torch.softmax(z * r[:, :, :1, :1, :1] + r, 1),
    "log-sum-exp": lambda z, r: F.hardswish(torch.logsumexp(z, 1, keepdim=True) - 0.5),
    "index of the largest": lambda z, r: z.clamp(max=1.0).argmax(1),
}
# Kernel, type, layout, output channels, kernel size, stride; odd rows, and channels that fill no tile of 8 columns.
CASES = {
    "few_outputs, tf32": ("few_outputs", "tf32", CONTIGUOUS, 3, 3, 2),
    "few_outputs, bfloat16, channels last": ("few_outputs", "bfloat16", LAST, 2, 2, 2),
    "few_outputs, float32": ("few_outputs", "float32", CONTIGUOUS, 4, 3, (1, 1, 2)),
    "mma, tf32": ("mma", "tf32", CONTIGUOUS, 12, 3, 2),
    "mma, bfloat16": ("mma", "bfloat16", CONTIGUOUS, 20, 3, 2),
    "mma, float16, channels last": ("mma", "float16", LAST, 24, (2, 3, 2), 1),
    "mma, float32, channels last": ("mma", "float32", LAST, 8, 3, 1),
    "halo, tf32": ("halo", "tf32", CONTIGUOUS, 16, 3, 2),
    "halo, bfloat16": ("halo", "bfloat16", CONTIGUOUS, 24, 3, (1, 2, 2)),
    "halo, bfloat16, channels last": ("halo", "bfloat16", LAST, 12, 3, 2),
    "halo, float32, channels last": ("halo", "float32", LAST, 16, 3, 1),
}


def numbers(shape: tuple[int, ...], seed: int, scale: float) -> Tensor:
    """Returns few different numbers, of which all types hold every product and sum: maxima are often tied."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)) * scale


def layer_of(name: str) -> tuple[nn.ConvTranspose3d, Tensor, Tensor]:
    """Returns a layer, its input and a residual."""
    _, kind, layout, channels, kernel, stride = CASES[name]
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    layer = nn.ConvTranspose3d(16, channels, kernel, stride=stride, padding=1 if kernel == 3 else 0)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = numbers(tuple(parameter.shape), seed, 0.125)
    x = numbers((2, 16, 3, 4, 5), 5, 1.0)
    residual = numbers(tuple(layer(x).shape), 6, 0.25)
    layer = layer.to(dtype).to(memory_format=layout)  # type: ignore[call-overload]
    return layer, x.to(dtype).to(memory_format=layout), residual.to(dtype).to(memory_format=layout)


@contextlib.contextmanager
def inside(kernel: str) -> Iterator[None]:
    """One family computes everything over channels, however long that is predicted to take; no pass does."""

    def no_pass(*_: object) -> None:
        raise AssertionError("a pass runs over the stored result")

    with only(kernel), patch.object(planner, "OVER_CHANNELS_PRICE", 0.0), patch.object(axis_executor, "run", no_pass):
        yield


def check(name: str, which: str) -> None:
    """Compares a tail that the convolution's kernel computes with float64."""
    kernel, kind, *_ = CASES[name]
    layer, x, residual = layer_of(name)
    tail = TAILS[which]
    with torch.no_grad():
        exact = tail(layer.double()(x.double()), residual.double())
        layer = layer.to(x.dtype)
        block = tconv3d.fuse(layer, tail)
        with inside(kernel), precision(kind), tconv3d.use_backend("emulator"), poisoned():
            report, ours = block.report(x, residual), block(x, residual)
    assert report.channels and not report.passes and not report.behind, report
    assert "over channels in the convolution's kernel" in str(report)
    close(ours, exact, 30 if kind == "tf32" else 1)  # TF32: the hardware's exponential


@pytest.mark.parametrize("which", TAILS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, which: str) -> None:
    check(name, which)


@pytest.mark.parametrize("name", ["few_outputs, tf32", "mma, bfloat16", "halo, tf32"])
def test_a_nan_spreads_as_in_pytorch(name: str) -> None:
    kernel, kind, *_ = CASES[name]
    layer, x, _ = layer_of(name)

    def special(z: Tensor) -> Tensor:
        return torch.where(z > 1.5, torch.nan, torch.where(z < -1.5, -torch.inf, z))

    tails: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda z: special(z).softmax(1),
        lambda z: special(z).amax(1),
        lambda z: special(z).amin(1),
        lambda z: special(z).argmax(1, keepdim=True),
    )
    with torch.no_grad(), precision(kind):
        z = layer.double()(x.double())
        layer = layer.to(x.dtype)
        for tail in tails:
            with inside(kernel), tconv3d.use_backend("emulator"):
                found = tconv3d.fuse(layer, tail)(x)
            exact = tail(z).to(found.dtype)
            torch.testing.assert_close(
                found, exact, rtol=2e-2 if x.dtype == torch.bfloat16 else 1e-4, atol=1e-6, equal_nan=True
            )
            assert not found.is_floating_point() or 0 < found.isnan().sum() < found.numel()


# What a fault makes a kernel read or write exists.
FAULTS = {
    "channels of other lanes are left out": ("over_channels", "distance = kLanes / 2", "distance = kLanes / 4"),
    "channels that do not exist count": ("over_channels", "if (channel(i) < channels) state", "state"),
    "batch items overlap": ("over_channels", "n * (channels - 1) * stride", "n * channels * stride"),
    "ties go to the last channel": ("axis_reductions", "|| at < index", "|| at > index"),
}
SHOWN = {"ties go to the last channel": "index of the largest", "batch items overlap": "log-sum-exp"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_twin_is_caught(fault: str, tmp_path: Path) -> None:
    header, text, replacement = FAULTS[fault]
    mutate(header, text, replacement, tmp_path / "mutant")
    with kernel_from(tmp_path / "mutant", "mma"), pytest.raises(AssertionError):
        check("mma, tf32", SHOWN.get(fault, "softmax of a residual"))


def test_what_stays_a_pass() -> None:
    """The report says why, and what is returned besides is stored."""
    groups = nn.ConvTranspose3d(16, 16, 3, groups=4)
    wide = nn.ConvTranspose3d(16, 520, 3)
    x, scale = torch.randn(1, 16, 4, 4, 4), torch.rand(16, 1, 1, 1)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        softmax = tconv3d.fuse(groups, lambda z: z.softmax(1))
        assert "several groups" in softmax.report(x).behind
        torch.testing.assert_close(softmax(x), groups(x).softmax(1), rtol=1e-4, atol=1e-5)
        assert "no kernel" in tconv3d.fuse(wide, lambda z: z.softmax(1)).report(x).behind
        both = tconv3d.fuse(nn.ConvTranspose3d(16, 16, 3), lambda z: (z, z.softmax(1))).report(x)
        assert both.passes and not both.channels and not both.behind
        vectors = tconv3d.fuse(nn.ConvTranspose3d(16, 16, 3), lambda z: z.softmax(1) * scale)
        assert vectors.report(x).passes


def test_segmentation_heads_are_planned_inside() -> None:
    """Layers of networks on large volumes: the kernel is predicted to be faster than one more pass."""
    from tconv3d.tools.bench.layers import LAYERS

    program = tconv3d.fuse(nn.ConvTranspose3d(8, 8, 3), lambda z: z.softmax(1))
    kind = program.example_kind(torch.empty(1, 8, 4, 4, 4), ())
    assert not isinstance(kind, str) and kind.prepared.stages.over_channels is not None
    channels = kind.prepared.stages.over_channels.program.cpp
    for gpu, layers in {"H200": ("monai_32_2_64", "monai_64_16_32"), "A100": ("monai_32_2_64",)}.items():
        for layer in layers:
            problem = problems_of_layer(LAYERS[layer], "tf32", "contiguous")[0]
            assert problem.which is Pass.FORWARD
            plain, asked = (
                replace(problem, tail="tconv3d::Value"),
                replace(problem, tail="tconv3d::Value", channels=channels),
            )
            assert planner.why_not_over_channels(asked, gpus.GPUS[gpu].device) is None
            fewer = replace(asked, per_position="float")
            assert fewer.bytes < asked.bytes == plain.bytes


def test_explain_names_it() -> None:
    block = tconv3d.fuse(nn.ConvTranspose3d(32, 2, 3, stride=2), lambda z: z.softmax(1))
    with preferring("few_outputs"):
        text = explained(block)
    assert "few_outputs" in text and "over channels in the convolution's kernel" in text


def explained(block: nn.Module) -> str:
    return str(tconv3d.explain(block, torch.empty(1, 32, 64, 64, 64, device="meta"), gpu="H200"))
