"""Runs the emulated threads of a kernel in several orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tconv3d import emulator
from tconv3d.torch_ops import executor


def check_orders(device: str, monkeypatch: pytest.MonkeyPatch, run: Callable[[], Sequence[Tensor]]) -> None:
    """Checks that what a function computes is equal, bit for bit, in whatever order the emulator runs threads.

    `device` is that of the test. The test is skipped on a GPU, which chooses the order itself.
    """
    if device != "cpu":
        pytest.skip("the emulator chooses the order")
    first, original = run(), emulator.prepare
    for order in ("reversed", "shuffled:1"):
        monkeypatch.setattr(emulator, "prepare", lambda launch, order=order: original(launch, order))
        executor.forget()
        again = run()
        assert len(first) == len(again) and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
