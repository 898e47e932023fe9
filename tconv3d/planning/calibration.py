"""What a GPU takes for the work of a kernel: a family counts work, measured rates make microseconds of it.

A family states its work in the terms of its own model (`Work`): cycles of the busiest multiprocessor, or bytes and
multiply-adds, and launches. The rates of a kernel on a GPU are data (`rates/<gpu>.json`), fitted to measured
times by `tconv3d calibrate`. GPUs nobody has measured take the rates of the one that was, scaled by bandwidth and
arithmetic rate; cycles of a multiprocessor are taken to be as long as there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isinf
from pathlib import Path
from typing import Any

from .gpus import GPUS, Gpu
from .problem import Device, Pass, Problem

DIRECTORY = Path(__file__).with_name("rates")
REFERENCE = "H200"  # the GPU whose rates others scale from
TERMS = ("launches", "kilocycles", "megabytes", "gigaproducts")
# The rates of a kernel that nobody has measured, in microseconds per unit: 1755 cycles take one microsecond, memory
# moves half of 4.27 MB in one, and 1e9 float32 products take 78, half of the float32 rate of an H200.
DEFAULT = {"launches": 2.0, "kilocycles": 1 / 1.755, "megabytes": 2 / 4.27, "gigaproducts": 78.0}


@dataclass(frozen=True)
class Work:
    """What the launches of a plan do: cycles of the busiest multiprocessor by the family's own model, or products
    that are added up. The bytes of the tensors are known without it."""

    launches: int = 1
    cycles: float = 0.0
    products: float = 0.0


def terms(problem: Problem, work: Work) -> dict[str, float]:
    """Work on a problem in the units of the rates."""
    values = (float(work.launches), work.cycles / 1e3, problem.bytes / 1e6, work.products / 1e9)
    return dict(zip(TERMS, values, strict=True))


def kind_of(problem: Problem) -> str:
    """What rates of a kernel may depend on beside the kernel: pass, type and memory layout."""
    strict = problem.dtype == "float32" and not problem.tf32
    dtype = "strict" if strict else "16 bit" if problem.item_bytes == 2 else problem.dtype
    strides = problem.input if problem.which is not Pass.BIAS_GRAD else problem.output
    layout = "channels last" if strides[1] == 1 and strides[4] != 1 else "contiguous"
    return f"{problem.which.value}, {dtype}, {layout}"


def microseconds(kernel: str, problem: Problem, work: Work, device: Device) -> float:
    """The predicted time of a kernel's work on a device; infinite for work of infinite cycles."""
    if isinf(work.cycles):  # also for kernels whose time does not depend on cycles
        return inf
    rates = rates_of(kernel, kind_of(problem), device)
    return sum(rates.get(term, 0.0) * amount for term, amount in terms(problem, work).items())


@lru_cache(maxsize=4096)
def rates_of(kernel: str, kind: str, device: Device) -> dict[str, float]:
    """Microseconds per unit of every term."""
    gpu = gpu_named(device.name)
    name = gpu.device.name if gpu is not None and measured(gpu.device.name) else REFERENCE
    table = measured(name)
    found = table.get(kernel, {})
    rates: dict[str, float] = (found.get(kind) or found.get("any") or {"rates": DEFAULT})["rates"]
    if gpu is None or gpu.device.name == name:
        return rates
    return scaled(rates, GPUS[name], gpu)


def scaled(rates: dict[str, float], measured_on: Gpu, gpu: Gpu) -> dict[str, float]:
    """Rates of one GPU from those of another: memory by bandwidth, products by the rate of float32."""
    factors = {"megabytes": measured_on.copy / gpu.copy, "gigaproducts": measured_on.float32 / gpu.float32}
    return {term: rate * factors.get(term, 1.0) for term, rate in rates.items()}


def gpu_named(name: str) -> Gpu | None:
    """The GPU of the table whose name is part of a device's name, the longest name first."""
    plain = name.replace("-", " ").upper()
    return next((GPUS[known] for known in sorted(GPUS, key=len, reverse=True) if known.upper() in plain), None)


@lru_cache(maxsize=16)
def measured(name: str) -> dict[str, Any]:
    """The fitted rates of a GPU, by kernel and kind; empty if nobody has measured it."""
    path = DIRECTORY / f"{name.lower().replace(' ', '-')}.json"
    if not path.is_file():
        return {}
    rates: dict[str, Any] = json.loads(path.read_text())["kernels"]
    return rates
