"""Converts the work that a kernel family counts to microseconds, by rates measured on a GPU.

A family states its work in the terms of its own model (`Work`): launches, and cycles of the busiest multiprocessor or
multiply-adds. The rates of a kernel on a GPU are data (`rates/<gpu>.json`), fitted to measured times by `tconv3d
calibrate`. A GPU without measured rates uses the rates of the reference GPU, scaled by memory bandwidth and float32
rate; a cycle is taken to be equally long on both.

The constants of a family's model that were measured on the reference GPU are data too (`models/<gpu>.json`), with the
unit and the origin of each.
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
MODELS = Path(__file__).with_name("models")
REFERENCE = "H200"  # the GPU whose rates are scaled for GPUs without measured rates
TERMS = ("launches", "kilocycles", "megabytes", "gigaproducts")
# Rates of a kernel without measured rates, in microseconds per unit. They are derived from an H200: 1755 cycles per
# microsecond, half the memory bandwidth of 4.27 MB/us, and 78 us for 1e9 products, half the float32 rate.
DEFAULT = {"launches": 2.0, "kilocycles": 1 / 1.755, "megabytes": 2 / 4.27, "gigaproducts": 78.0}


@dataclass(frozen=True)
class Work:
    """Counts the work of a plan's launches: cycles of the busiest multiprocessor by the family's model, or products.

    The bytes of the tensors follow from the problem (`Problem.bytes`).
    """

    launches: int = 1
    cycles: float = 0.0
    products: float = 0.0


def terms(problem: Problem, work: Work) -> dict[str, float]:
    """Returns the work on a problem in the units of the rates, by the names in TERMS."""
    values = (float(work.launches), work.cycles / 1e3, problem.bytes / 1e6, work.products / 1e9)
    return dict(zip(TERMS, values, strict=True))


def kind_of(problem: Problem) -> str:
    """Returns pass, type and memory layout as one text, the key of a kernel's rates."""
    strict = problem.dtype == "float32" and not problem.tf32
    dtype = "strict" if strict else "16 bit" if problem.item_bytes == 2 else problem.dtype
    strides = problem.input if problem.which is not Pass.BIAS_GRAD else problem.output
    layout = "channels last" if strides[1] == 1 and strides[4] != 1 else "contiguous"
    return f"{problem.which.value}, {dtype}, {layout}"


def microseconds(kernel: str, problem: Problem, work: Work, device: Device) -> float:
    """Returns the predicted time of a kernel's work on a device; infinite cycles take an infinite time."""
    if isinf(work.cycles):  # infinite even for kernels whose rate per cycle is 0
        return inf
    rates = rates_of(kernel, kind_of(problem), device)
    return sum(rates.get(term, 0.0) * amount for term, amount in terms(problem, work).items())


@lru_cache(maxsize=4096)
def rates_of(kernel: str, kind: str, device: Device) -> dict[str, float]:
    """Returns the microseconds per unit of every term, scaled if the device has no measured rates."""
    gpu = gpu_named(device.name)
    name = gpu.device.name if gpu is not None and measured(gpu.device.name) else REFERENCE
    table = measured(name)
    found = table.get(kernel, {})
    rates: dict[str, float] = (found.get(kind) or found.get("any") or {"rates": DEFAULT})["rates"]
    if gpu is None or gpu.device.name == name:
        return rates
    return scaled(rates, GPUS[name], gpu)


def scaled(rates: dict[str, float], measured_on: Gpu, gpu: Gpu) -> dict[str, float]:
    """Returns the rates of `measured_on` scaled to `gpu`: memory by bandwidth, products by the float32 rate."""
    factors = {"megabytes": measured_on.copy / gpu.copy, "gigaproducts": measured_on.float32 / gpu.float32}
    return {term: rate * factors.get(term, 1.0) for term, rate in rates.items()}


def gpu_named(name: str) -> Gpu | None:
    """Returns the GPU in GPUS with the longest name that is part of a device's name, or None."""
    plain = name.replace("-", " ").upper()
    return next((GPUS[known] for known in sorted(GPUS, key=len, reverse=True) if known.upper() in plain), None)


@lru_cache(maxsize=16)
def measured(name: str) -> dict[str, Any]:
    """Returns the fitted rates of a GPU by kernel and kind; empty if there are none."""
    path = DIRECTORY / f"{name.lower().replace(' ', '-')}.json"
    if not path.is_file():
        return {}
    rates: dict[str, Any] = json.loads(path.read_text())["kernels"]
    return rates


def model_constants(family: str) -> dict[str, dict[str, float]]:
    """Returns the values of the constants of a family's model, by section and name, on the reference GPU."""
    sections = json.loads((MODELS / f"{REFERENCE.lower()}.json").read_text())[family]
    sections.pop("origins")
    return {name: {key: each["value"] for key, each in found.items()} for name, found in sections.items()}
