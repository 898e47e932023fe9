"""Measures the host time of a call: how long Python takes to launch a layer that has run before."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tconv3d

CALLS, SAMPLES = 50, 20

# Names of the circumstances, with which the keys of the times end, and what they are in words.
CIRCUMSTANCES = {
    "": "without gradients",
    "_inference": "in inference mode",
    "_autocast": "under autocast without gradients",
    "_grad": "with gradients",
    "_autocast_grad": "under autocast with gradients",
    "_step": "forward and backward",
    "_autocast_step": "forward and backward under autocast",
}


def host_times(device: str = "cuda") -> dict[str, float]:
    """Returns microseconds per repeated call of a tiny layer, PyTorch's and ours, in each of the circumstances."""
    x = torch.randn(1, 4, 4, 4, 4, device=device)
    layers = {"torch": nn.ConvTranspose3d(4, 4, 3).to(device), "ours": tconv3d.ConvTranspose3d(4, 4, 3).to(device)}
    found = {}
    for circumstance in CIRCUMSTANCES:
        calls = {name: _call(layer, x, circumstance) for name, layer in layers.items()}
        for name, microseconds in _microseconds(calls, device).items():
            found[f"{name}{circumstance}_us"] = microseconds
    return found


def _call(layer: nn.Module, x: Tensor, circumstance: str) -> Callable[[], Any]:
    """Returns a function that calls the layer as a user does in these circumstances, `with` statements included."""
    autocast, backward = "autocast" in circumstance, circumstance.endswith("step")

    def gradients() -> contextlib.AbstractContextManager[None]:
        if circumstance.endswith(("grad", "step")):
            return contextlib.nullcontext()
        return torch.inference_mode() if circumstance == "_inference" else torch.no_grad()

    def call() -> None:
        with gradients(), torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            result = layer(x)
        if backward:
            result.sum().backward()

    return call


def _microseconds(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Returns the median microseconds of each function. Samples alternate, so that all meet the same conditions."""
    for call in calls.values():
        for _ in range(CALLS):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()  # with an empty queue a launch never waits for the GPU
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter() - started) / CALLS * 1e6)
    return {name: statistics.median(times) for name, times in samples.items()}
