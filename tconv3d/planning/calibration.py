"""Converts the work that a kernel family counts to microseconds, by rates measured on a GPU.

A family states its work in the terms of its own model (`Work`): launches, and cycles of the busiest multiprocessor or
multiply-adds. The rates of a kernel on a GPU are data (`rates/<gpu>.json`), fitted to measured times by `tconv3d
calibrate`. A GPU without measured rates uses the rates of the reference GPU, scaled by memory bandwidth, by the rates
of its tensor cores and multiply-adds, and by its number of multiprocessors.

A kernel that nobody has measured yet may have rates that were derived from those of a similar kernel
(`rates/derived/<gpu>.json`, which says from which and how). They count until the kernel is measured, at a price above
the predicted time.

A prediction is not exact. The file also says how far the predictions of a kernel were from the measured times.

The constants of a family's model that were measured on the reference GPU are data too (`models/<gpu>.json`), with the
unit and the origin of each.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isinf, prod
from pathlib import Path
from typing import Any

from . import gpus
from .gpus import GPUS, Gpu
from .problem import Device, Pass, Problem, is_channels_last

DIRECTORY = Path(__file__).with_name("rates")
DERIVED = DIRECTORY / "derived"
MODELS = Path(__file__).with_name("models")
MODEL_FILE = "TCONV3D_MODEL_FILE"  # environment variable: a file of constants in place of the folder's, to try others
REFERENCE = "H200"  # the GPU whose rates are scaled for GPUs without measured rates
INSTRUCTIONS = 0.7  # per operation of a program over channels; a softmax has 12 operations and takes 8 instructions
SHARING = 4  # lanes that share the channels of a position
LANES = 128  # instructions that a multiprocessor issues per cycle, each for one lane
NARROW = 4  # least channels per group on each side of the layers whose times on tensor cores are known
DERIVED_SURCHARGE = 1.2  # price over predicted time of a kernel with derived rates, unless these say another
CONTIGUOUS, ODD_LINES = "contiguous", "odd lines"  # layouts in the names of kinds
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
    spared: int = 0  # launches fewer than those of the measured plans to whose times the rates were fitted
    tensor_cores: bool = True  # the cycles are of matrix instructions rather than of multiply-adds


def terms(problem: Problem, work: Work) -> dict[str, float]:
    """Returns the work on a problem in the units of the rates, by the names in TERMS."""
    values = (float(work.launches), work.cycles / 1e3, problem.bytes / 1e6, work.products / 1e9)
    return dict(zip(TERMS, values, strict=True))


def kind_of(problem: Problem) -> str:
    """Returns pass, type and memory layout as one text, the key of a kernel's rates.

    Contiguous tensors with lines of odd length are a layout of their own: kernels copy and store such lines by
    smaller accesses.
    """
    strict = problem.dtype == "float32" and not problem.tf32
    dtype = "strict" if strict else "16 bit" if problem.item_bytes == 2 else problem.dtype
    bias = problem.which is Pass.BIAS_GRAD
    odd = problem.output_size[2] % 2 or (not bias and problem.input_size[2] % 2)
    last = is_channels_last(problem.output if bias else problem.input)
    layout = "channels last" if last else ODD_LINES if odd else CONTIGUOUS
    return f"{problem.which.value}, {dtype}, {layout}"


def microseconds(kernel: str, problem: Problem, work: Work, device: Device, kind: str = "") -> float:
    """Returns the predicted time of a kernel's work on a device; infinite cycles take an infinite time.

    `kind` is the kind of the problem by default.
    """
    if isinf(work.cycles):  # infinite even for kernels whose rate per cycle is 0
        return inf
    rates = rates_of(kernel, kind or kind_of(problem), device, work.tensor_cores)
    found = sum(rates.get(term, 0.0) * amount for term, amount in terms(problem, work).items())
    return max(found - DEFAULT["launches"] * work.spared, min(found, DEFAULT["launches"]))


def narrow_surcharge(problem: Problem) -> float:
    """Returns the factor on the price of kernels for wide layers that also take layers of few channels.

    Their models were fitted to layers with at least NARROW channels on each side, and no GPU has timed others.
    """
    g = problem.geometry
    return DERIVED_SURCHARGE if min(g.in_per_group, g.out_per_group) < NARROW else 1.0


def pass_microseconds(problem: Problem, device: Device) -> float:
    """Returns the predicted time of a pass that reads a forward pass's result and writes what follows it."""
    y = _result_bytes(problem)
    written = y // problem.geometry.out_channels if problem.per_position else y
    return _moving_microseconds(y + written, device)


def reading_microseconds(problem: Problem, device: Device) -> float:
    """Returns the predicted time of a pass that reads a forward pass's result and writes next to nothing."""
    return _moving_microseconds(_result_bytes(problem), device)


def _result_bytes(problem: Problem) -> int:
    return problem.batch * problem.geometry.out_channels * prod(problem.output_size) * problem.item_bytes


def _moving_microseconds(moved: int, device: Device) -> float:
    """Returns the time of a launch that moves this number of bytes at the bandwidth of a copy."""
    gpu = gpus.known(device) or GPUS[REFERENCE]
    return DEFAULT["launches"] + moved / (gpu.copy * 1e6)


def program_cycles(problem: Problem, device: Device) -> float:
    """Returns the cycles of a multiprocessor for a program over channels, which no other warp hides.

    Operations of elements are counted for each channel of a position, those of positions for each lane that has it.
    """
    final, *steps = problem.channels.split("tconv3d::Then<")
    positions = problem.batch * prod(problem.output_size)
    operations = 0
    for part in (final, *steps):
        each = part.startswith("tconv3d::Reduced<") or "EachElement<" in part
        channels = problem.geometry.out_channels
        operations += part.count("<") * (channels if each else min(channels, SHARING))
    return positions * operations * INSTRUCTIONS / (LANES * device.multiprocessors)


def _rated(device: Device) -> str:
    """Returns the name of the GPU whose rates are used for a device: its own, or the reference GPU."""
    gpu = gpus.known(device)
    return gpu.device.name if gpu is not None and measured(gpu.device.name) else REFERENCE


@lru_cache(maxsize=4096)
def rates_of(kernel: str, kind: str, device: Device, tensor_cores: bool = True) -> dict[str, float]:
    """Returns the microseconds per unit of every term, scaled if the device has no measured rates."""
    gpu, name = gpus.known(device), _rated(device)
    rates: dict[str, float] = (_fitted(name, kernel, kind) or {"rates": DEFAULT})["rates"]
    if gpu is None or gpu.device.name == name:
        return rates
    return scaled(rates, GPUS[name], gpu, kind, tensor_cores)


def _fitted(name: str, kernel: str, kind: str) -> dict[str, Any] | None:
    """Returns what is stored for a kernel on a GPU: the fit to times of this kind, else the fit to all its times.

    Derived rates stand in for a kind, or for a kernel, that has no measured times. Those of contiguous tensors stand
    in for odd lines.
    """
    kinds, others = measured(name).get(kernel, {}), derived(name).get(kernel, {})
    near = kind.replace(ODD_LINES, CONTIGUOUS)
    found: dict[str, Any] | None = (
        kinds.get(kind) or others.get(kind) or kinds.get(near) or others.get(near) or kinds.get("any")
    )
    return found or others.get("any")


def has_rates(kernel: str, kind: str, device: Device) -> bool:
    """Returns whether times of this kind have been measured, on this GPU or on the one whose rates are scaled."""
    kinds = measured(_rated(device)).get(kernel, {})
    return kind in kinds or kind.replace(ODD_LINES, CONTIGUOUS) in kinds


def surcharge(kernel: str, device: Device, kind: str = "") -> float:
    """Returns the factor from a kernel's predicted time to its price: infinite if the kernel has no rates.

    A kernel without rates wins only if it is timed on the caller's tensors, or if no other takes the call. A kind
    with derived rates has a surcharge even if other kinds of the kernel were measured.
    """
    name = _rated(device)
    kinds, others = measured(name).get(kernel, {}), derived(name).get(kernel, {})
    for each in (kind, kind.replace(ODD_LINES, CONTIGUOUS), "any"):
        if each in kinds or (each == "any" and kinds):
            return 1.0
        if each in others:
            return float(others[each].get("surcharge", DERIVED_SURCHARGE))
    return inf


def calibrated(device: Device) -> bool:
    """Returns whether rates have been measured on this GPU."""
    gpu = gpus.known(device)
    return gpu is not None and bool(measured(gpu.device.name))


def largest_error(kernel: str, kind: str, device: Device) -> float | None:
    """Returns the factor within which 95% of the fitted times of a kernel lie around their predictions.

    None means that the factor is not known: no times of this kind were measured on this GPU.
    """
    gpu = gpus.known(device)
    kinds = {} if gpu is None else measured(gpu.device.name).get(kernel, {})
    found = kinds.get(kind) or kinds.get(kind.replace(ODD_LINES, CONTIGUOUS)) or {}
    return found.get("largest_error")


def doubt(kernel: str, kind: str, device: Device) -> float:
    """Returns the factor within which 95% of the measured times lie around predictions by the rates in use.

    The result is 1 if nobody has measured the kernel.
    """
    return float((_fitted(_rated(device), kernel, kind) or {}).get("largest_error", 1.0))


def scaled(
    rates: dict[str, float], measured_on: Gpu, gpu: Gpu, kind: str = "", tensor_cores: bool = True
) -> dict[str, float]:
    """Returns the rates of `measured_on` scaled to `gpu`.

    Memory scales with the bandwidth, products with the float32 rate. Cycles are of one multiprocessor, which may wait
    for its arithmetic or for memory: they scale with the scarcer of both, in what one multiprocessor gets of it.
    """

    def scarcity(ours: float, theirs: float) -> float:
        return (ours / measured_on.device.multiprocessors) / (theirs / gpu.device.multiprocessors)

    arithmetic = scarcity(_arithmetic(measured_on, kind, tensor_cores), _arithmetic(gpu, kind, tensor_cores))
    factors = {
        "kilocycles": max(arithmetic, scarcity(measured_on.copy, gpu.copy)),
        "megabytes": measured_on.copy / gpu.copy,
        "gigaproducts": measured_on.float32 / gpu.float32,
    }
    return {term: rate * factors.get(term, 1.0) for term, rate in rates.items()}


def _arithmetic(gpu: Gpu, kind: str, tensor_cores: bool) -> float:
    """Returns the rate in TFLOP/s of the arithmetic that kernels of a kind use."""
    if "float64" in kind:
        return gpu.float64
    if not tensor_cores:
        return gpu.float32
    return gpu.half if "16 bit" in kind else gpu.tf32


@lru_cache(maxsize=16)
def measured(name: str) -> dict[str, Any]:
    """Returns the fitted rates of a GPU by kernel and kind; empty if there are none."""
    return _stored(DIRECTORY, name)


@lru_cache(maxsize=16)
def derived(name: str) -> dict[str, Any]:
    """Returns derived rates for a GPU, by kernel and kind; empty if there are none."""
    return _stored(DERIVED, name)


def _stored(directory: Path, name: str) -> dict[str, Any]:
    path = directory / f"{name.lower().replace(' ', '-')}.json"
    rates: dict[str, Any] = json.loads(path.read_text())["kernels"] if path.is_file() else {}
    return rates


def model_constants(family: str) -> dict[str, dict[str, float]]:
    """Returns the values of the constants of a family's model, by section and name, on the reference GPU."""
    path = os.environ.get(MODEL_FILE) or MODELS / f"{REFERENCE.lower()}.json"
    sections = json.loads(Path(path).read_text())[family]
    sections.pop("origins")
    return {name: {key: each["value"] for key, each in found.items()} for name, found in sections.items()}
