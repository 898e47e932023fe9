"""The clock, and the ceilings of the GPU at hand: what every time is compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .precision import DTYPES, precision

L2_FLUSH_BYTES = 256 << 20  # more than the L2 cache of any GPU
COPY_BYTES = 2 << 30
PRODUCT = 8192  # rows and columns of the matrices


class Timer(Protocol):
    """Milliseconds of one call of a function, as a median of several."""

    def __call__(self, run: Callable[[], Any]) -> float: ...


class Clock:
    """Median time by CUDA events, with the L2 cache flushed before every run.

    The flush also gives the host a head start, so that what is timed is the GPU's work and not the launching of it.
    """

    def __init__(self, budget_s: float = 0.15, device: str = "cuda") -> None:
        self.flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.budget_s = budget_s

    def __call__(self, run: Callable[[], Any]) -> float:
        for _ in range(2):  # these compile, choose algorithms and fill the allocator
            run()
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once = time.perf_counter() - started + 1e-4
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(max(5, min(50, int(self.budget_s / once))))
        ]
        for begin, end in events:
            self.flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)


def measure_ceilings(clock: Timer, precisions: Sequence[str], device: str = "cuda") -> dict[str, float]:
    """Copy bandwidth in TB/s and, for each precision, the rate of a large matrix product in TFLOP/s."""
    size = COPY_BYTES if device == "cuda" else 1 << 16
    if device == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    found = {"copy_TBps": 2 * size / clock(_copy(size, device)) / 1e9}
    n = PRODUCT if device == "cuda" else 64
    for name in precisions:
        with precision(name):
            a, b = (torch.randn(n, n, device=device).to(DTYPES[name]) for _ in range(2))
            found[f"{name}_TFLOPS"] = 2 * n**3 / clock(lambda a=a, b=b: a @ b) / 1e9  # type: ignore[misc]
    return found


def _copy(size: int, device: str) -> Callable[[], Any]:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
