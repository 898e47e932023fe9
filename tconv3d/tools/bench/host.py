"""Measures the host time of a call: how long Python takes to launch a layer that has run before."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tconv3d

CALLS, SAMPLES = 50, 20


def host_times(device: str = "cuda") -> dict[str, float]:
    """Returns microseconds per repeated call of a tiny layer, PyTorch's and ours, without and with autograd."""
    x = torch.randn(1, 4, 4, 4, 4, device=device)
    found = {}
    for grad in (False, True):
        for name, kind in (("torch", nn.ConvTranspose3d), ("ours", tconv3d.ConvTranspose3d)):
            layer = kind(4, 4, 3).to(device).requires_grad_(grad)
            found[f"{name}{'_grad' if grad else ''}_us"] = _microseconds(lambda layer=layer: layer(x), device)  # type: ignore[misc]
    return found


def _microseconds(call: Callable[[], Any], device: str) -> float:
    for _ in range(CALLS):
        call()
    samples = []
    for _ in range(SAMPLES):
        if device == "cuda":
            torch.cuda.synchronize()  # with an empty queue a launch never waits for the GPU
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - started) / CALLS * 1e6)
    return statistics.median(samples)
