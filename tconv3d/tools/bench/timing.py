"""Measures the ceilings of the current GPU, which give the floor of every layer's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tconv3d.torch_ops.clock import Timer

from .precision import DTYPES, precision

COPY_BYTES = 2 << 30
PRODUCT = 8192  # rows and columns of the square matrices


def measure_ceilings(clock: Timer, precisions: Sequence[str], device: str = "cuda") -> dict[str, float]:
    """Measures copy bandwidth in TB/s and, for each precision, the rate of a large matrix product in TFLOP/s."""
    size = COPY_BYTES if device == "cuda" else 1 << 16
    if device == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    found = {"copy_TBps": 2 * size / clock(_copy(size, device)) / 1e9}
    for name in precisions:
        rate = _product_rate(clock, name, device)
        if name == "float32":  # our kernels may compute a float32 product as three TF32 products
            rate = max(rate, _product_rate(clock, "tf32", device) / 3)
        found[f"{name}_TFLOPS"] = rate
    return found


def _product_rate(clock: Timer, name: str, device: str) -> float:
    n = PRODUCT if device == "cuda" else 64
    with precision(name):
        a, b = (torch.randn(n, n, device=device).to(DTYPES[name]) for _ in range(2))
        return 2 * n**3 / clock(lambda: a @ b) / 1e9


def _copy(size: int, device: str) -> Callable[[], Any]:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
