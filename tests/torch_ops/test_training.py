"""Training with this library's layers goes as with PyTorch's, and the same way every time."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from benchmarks import train_unet
from benchmarks.train_unet import Settings
from tconv3d import emulator

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not emulator.available(), reason="the emulator needs a C++ compiler"
)
TINY = Settings(size=8, batch=1, channels=(4, 6, 8), steps=4, samples=2)


def test_losses_agree_with_pytorch_and_repeat_bitwise(ours: str) -> None:
    first, again, theirs = (train_unet.losses(kind, TINY, ours, "float32") for kind in ("ours", "ours", "torch"))
    assert first == again
    assert first == pytest.approx(theirs, rel=1e-5)
    assert len(set(first)) == TINY.steps, "the network learns nothing"


def test_another_seed_is_another_run(ours: str) -> None:
    other = Settings(**{**vars(TINY), "seed": 1, "steps": 1})
    assert train_unet.losses("ours", other, ours, "float32") != train_unet.losses("ours", TINY, ours, "float32")[:1]


def test_half_precision_products_differ_by_more(ours: str) -> None:
    """What is called noise is there: TF32 and float32 are told apart."""
    rounded, exact = (train_unet.losses("ours", TINY, ours, dtype) for dtype in ("tf32", "float32"))
    assert 0 < train_unet.difference(rounded, exact) < 1e-2


def test_the_comparison_is_said(ours: str) -> None:
    found = train_unet.compare(Settings(**{**vars(TINY), "steps": 2}), ours, "tf32", timed=False)
    assert found["bitwise"]
    text = io.StringIO()
    train_unet.show(found | {"bitwise": False, "agree": False}, Console(file=text, width=200))
    assert "NOT the same in every bit" in text.getvalue() and "NOT within the noise" in text.getvalue()
    assert set(found["losses"]) == {"ours", "ours again", "torch", "torch, strict float32"}


def test_the_clock_runs_both(ours: str) -> None:
    times = train_unet.step_ms(TINY, ours, "float32", steps=1)
    assert set(times) == {"ours", "torch"} and min(times.values()) > 0


def test_spheres_are_where_the_mask_says() -> None:
    volumes, masks = train_unet.spheres(Settings(size=32, samples=4), "cpu")
    assert volumes.shape == masks.shape == (4, 1, 32, 32, 32)
    assert 0.002 < masks.mean() < 0.2
    assert volumes[masks == 1].mean() > volumes[masks == 0].mean() + 0.9
