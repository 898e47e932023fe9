"""Measures the time of a call on the GPU: `Clock` the median of several runs, `Stopwatch` a single run.

This module imports nothing of the package.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

L2_FLUSH_BYTES = 256 << 20  # bytes that one flush writes, more than the L2 cache of any GPU holds
FLUSH_S = 50e-6  # seconds, less than one flush takes on any GPU
MAX_FLUSHES = 20


class Timer(Protocol):
    """Returns the milliseconds that one call of a function takes."""

    def __call__(self, run: Callable[[], Any]) -> float: ...


class Clock:
    """Measures the median time between CUDA events, with the L2 cache flushed before every run.

    The flushes also keep the GPU busy while the host launches the run, so that the events time the GPU's work and
    not the host's launches. The number of flushes covers twice the measured launch time, with at most `MAX_FLUSHES`.
    """

    def __init__(self, budget_s: float = 0.15, device: str = "cuda") -> None:
        self.flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.budget_s = budget_s

    def __call__(self, run: Callable[[], Any]) -> float:
        for _ in range(2):  # warm-up runs compile kernels, choose algorithms and fill the allocator
            run()
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        once = time.perf_counter() - started + 1e-4
        flushes = min(MAX_FLUSHES, math.ceil(2 * (launched - started) / FLUSH_S))
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(max(5, min(50, int(self.budget_s / once))))
        ]
        for begin, end in events:
            for _ in range(flushes):
                self.flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)


class Stopwatch:
    """Measures the time of one run between CUDA events, with the L2 cache flushed before the run.

    Flushes keep the GPU busy while the host launches, for twice as long as the launch of the previous run took.
    """

    def __init__(self, device: torch.device) -> None:
        self.flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.flushes = 2

    def __call__(self, run: Callable[[], Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(self.flushes):
            self.flush.zero_()
        begin.record()
        started = time.perf_counter()
        run()
        launched = time.perf_counter() - started
        end.record()
        end.synchronize()
        self.flushes = max(1, min(MAX_FLUSHES, math.ceil(2 * launched / FLUSH_S)))
        return float(begin.elapsed_time(end))
