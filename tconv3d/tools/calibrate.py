"""`tconv3d calibrate`: measures every family's offers on the GPU at hand and fits the rates that the planner uses.

For layers of the benchmark and random ones, in several types and layouts, every offer for the forward pass and for
the backward pass is compiled, run once and timed; so is PyTorch's operator. The rates of a kernel are those that
predict its times best: the least mean relative error, no rate below zero, for each pass, type and layout that
has enough measured times. The file that is written is what `planning/calibration.py` reads.

`--pytorch FILE ...` measures nothing: it fits PyTorch's rates alone, to the times in results of `tconv3d bench`, and
puts them into a file of rates that exists. Only PyTorch's default settings count, in the caller's memory layout.

`--models FILE` fits the constants of the halo kernel's model instead (halo_model.py), which the rates build on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.progress import track

from ..api.ahead import compile_all
from ..api.tune import random_call
from ..families.pytorch import planner as pytorch_planner
from ..planning import aligning, planner
from ..planning.calibration import TERMS, terms
from ..planning.offers import Offer, Wanted
from ..planning.problem import Device, Pass, Plan, Problem
from ..runtime import compiler
from ..torch_ops import executor
from ..torch_ops.choosing import Call
from ..torch_ops.clock import Clock, Timer
from ..torch_ops.problems import DTYPES as DTYPE_NAMES
from . import halo_model
from .arguments import integer
from .bench.layers import CLASSES, LAYERS, Layer, random_layers
from .bench.precision import precision
from .bench.problems import problems_of_layer
from .bench.results import Row, describe_machine, read
from .bench.wide import wide_layers

KINDS = (
    ("tf32", "contiguous"),
    ("tf32", "channels_last_3d"),
    ("bfloat16", "contiguous"),
    ("bfloat16", "channels_last_3d"),
    ("float32", "contiguous"),
)
ERRORS = (
    "typical_error is the median of |ln(predicted / measured)|; largest_error is the factor within which 95% of the "
    "measured times are"
)
Work: TypeAlias = tuple[str, Layer, str, str]  # name, layer, precision and memory layout
# Offers that run other kernels on copies of their operands: the work of such an offer holds the predicted times of
# these kernels, and would change with rates fitted to it. The launches that copy keep derived rates.
DETOURS = (aligning.KERNEL, aligning.TO_ROWS)
LEAST_TIMES = 6  # measured times of a kind from which it gets rates of its own
REWEIGHTED = 30  # rounds of least squares in a fit
SMALL_ERROR = 0.02  # error of a logarithm below which rows have equal weights
HOPELESS = 4.0  # An offer predicted to take so many times the least is not worth compiling.


@dataclass(frozen=True)
class Timed:
    """One measured offer."""

    layer: str
    kernel: str
    kind: str
    passes: tuple[str, ...]
    terms: dict[str, float]
    microseconds: float
    predicted: float = math.nan  # microseconds, by the rates at the time of the measurement


@dataclass(frozen=True)
class Candidate:
    """An offer as plain data: its plan, the work that it states, and the call that it is for."""

    layer: str
    dtype: str
    wanted: dict[Pass, Problem]
    kernel: str
    kind: str  # kind of the rates that predict its time
    passes: tuple[Pass, ...]
    terms: dict[str, float]
    plan: Plan
    predicted: float  # microseconds, by the present rates


def prepare(name: str, layer: Layer, dtype: str, layout: str, device: Device) -> list[Candidate]:
    """All offers worth a measurement, planned and compiled. Runs in a process that does not touch the GPU."""
    problems = problems_of_layer(layer, dtype, layout)
    found: list[Candidate] = []
    for forward in (True, False):
        wanted = {p.which: p for p in problems if (p.which is Pass.FORWARD) is forward}
        offers = [answer for answer in planner.answers(wanted, device) if isinstance(answer, Offer)]
        for passes in dict.fromkeys(offer.passes for offer in offers):
            same = [offer for offer in offers if offer.passes == passes]
            least = min(offer.microseconds for offer in same)
            for o in same:
                if o.microseconds <= HOPELESS * least and math.isfinite(o.microseconds):
                    amount = terms(o.problem, o.work())
                    label = f"{name} {dtype} {layout}"
                    found.append(
                        Candidate(label, dtype, wanted, o.kernel, o.rates, o.passes, amount, o.plan(), o.microseconds)
                    )
    launches = {(launch.kernel, launch.constants) for each in found for launch in each.plan.launches}
    compile_all(tuple(sorted(launches, key=repr)), compiler.architecture(device.capability))
    return found


def chosen_work(count: int, seed: int, wide: int) -> list[Work]:
    """Returns the named layers and `count` random ones in all kinds, and `wide` of any geometry in a kind of each."""
    layers = {**LAYERS, **CLASSES, **random_layers(count, seed)}
    found = [(name, layer, *kind) for (name, layer), kind in itertools.product(layers.items(), KINDS)]
    precisions, layouts = (list(dict.fromkeys(names)) for names in zip(*KINDS, strict=True))
    drawn = wide_layers(wide, seed, precisions, layouts)
    return found + [(name, layer, *kind) for name, (layer, kind) in drawn.items()]


def prepare_all(work: Sequence[Work], console: Console) -> list[Candidate]:
    """Plans and compiles in a process for each core."""
    device = executor.device_of(torch.empty(0, device="cuda"))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, torch.set_num_threads, (1,)) as pool:
        waiting = [pool.submit(prepare, *each, device) for each in work]
        return [each for future in track(waiting, "compiling", console=console) for each in future.result()]


def measure(work: Sequence[Work], console: Console) -> list[Timed]:
    """Times every candidate, and PyTorch's operator for each set of passes that a candidate computes.

    An interruption returns the times that were measured until then.
    """
    found = prepare_all(work, console)
    clock = Clock(0.004)
    rows: list[Timed] = []
    calls = [list(each) for _, each in itertools.groupby(found, key=lambda each: (each.layer, tuple(each.wanted)))]
    try:
        for same in track(calls, "measuring", console=console):
            try:
                rows += _measure_call(same, clock)
            except torch.OutOfMemoryError:
                console.print(f"{same[0].layer}: out of memory")
            torch.cuda.empty_cache()
    except KeyboardInterrupt:
        console.print(f"interrupted: fitting the {len(rows)} times that were measured until then")
    return rows


def _measure_call(same: Sequence[Candidate], clock: Timer, device: str = "cuda") -> Iterator[Timed]:
    name, wanted = same[0].layer, same[0].wanted
    with precision(same[0].dtype):
        call = _random_call(wanted, device)
        for each in same:
            ms = clock(call.prepare(each.plan))
            values = tuple(which.value for which in each.passes)
            yield Timed(name, each.kernel, each.kind, values, each.terms, 1e3 * ms, each.predicted)
        del call  # frees its tensors
        for passes in dict.fromkeys((tuple(wanted), *((w,) for w in wanted if w is not Pass.BIAS_GRAD))):
            asked = {which: wanted[which] for which in passes}
            yield timed_pytorch(name, asked, clock(_random_call(asked, device).theirs))


def _random_call(wanted: Wanted, device: str) -> Call:
    """Returns a call of the wanted passes on random tensors."""
    problem = next(each for each in wanted.values() if each.which is not Pass.BIAS_GRAD)
    dtype = next(each for each, name in DTYPE_NAMES.items() if name == problem.dtype)
    axes = problem.geometry.axes
    stride, padding, output_padding, dilation = (
        (getattr(axes[0], name), getattr(axes[1], name), getattr(axes[2], name))
        for name in ("stride", "padding", "output_padding", "dilation")
    )
    settings = stride, padding, output_padding, problem.geometry.groups, dilation
    return random_call(tuple(wanted.values()), settings, torch.empty(0, dtype=dtype, device=device))


def timed_pytorch(name: str, wanted: Wanted, ms: float) -> Timed:
    """Returns a time of PyTorch's operator, with the work that the operator's offer states."""
    amount = terms(next(iter(wanted.values())), pytorch_planner.counted(wanted))
    passes = tuple(which.value for which in wanted)
    return Timed(name, pytorch_planner.KERNEL, pytorch_planner.kind_of(wanted), passes, amount, 1e3 * ms)


def pytorch_times(rows: Iterable[Row]) -> Iterator[Timed]:
    """Yields the times of PyTorch's operator, with its default settings, in results of `tconv3d bench`."""
    for row in rows:
        ms = row.torch_ms.get("default")
        if ms is None or row.follow:
            continue
        shape: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.shape.items()}
        layer = Layer(**shape)
        forward = row.which == "forward"
        problems = [
            p for p in problems_of_layer(layer, row.dtype, row.layout) if (p.which is Pass.FORWARD) is forward
        ]
        yield timed_pytorch(row.layer, {problem.which: problem for problem in problems}, ms)


# ---- fitting


def fit(rows: Iterable[Timed]) -> dict[str, dict[str, Any]]:
    """Rates by kernel and kind, and for every kernel those of all its kinds together."""
    by_kernel: dict[str, dict[str, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.kernel in DETOURS:
            continue
        by_kernel[row.kernel][row.kind].append(row)
        by_kernel[row.kernel]["any"].append(row)
    return {
        kernel: {
            kind: fit_rates(same) for kind, same in sorted(kinds.items()) if len(same) >= LEAST_TIMES or kind == "any"
        }
        for kernel, kinds in sorted(by_kernel.items())
    }


def fit_rates(rows: Sequence[Timed]) -> dict[str, Any]:
    """The positive rates with the least mean relative error. There are four terms, so every subset is tried; with
    the cycles of the kernel's model, if it has one: else layers with many more cycles than those measured would cost
    no more than they.
    """
    best: tuple[float, dict[str, float]] = (math.inf, {})
    used = [term for term in TERMS if any(row.terms[term] for row in rows)]
    for count in range(1, len(used) + 1):
        for subset in itertools.combinations(used, count):
            if "kilocycles" in used and "kilocycles" not in subset:
                continue
            rates = _fitted_rates(rows, subset)
            if rates is not None and (error := _error(rows, rates)) < best[0] * 0.98 - 1e-9:
                best = error, rates
    error, rates = best
    errors = sorted(abs(math.log(predict(row, rates) / row.microseconds)) for row in rows)
    return {
        "rates": {term: float(f"{rate:.4g}") for term, rate in rates.items()},
        "times": len(rows),
        "typical_error": round(statistics.median(errors), 3),
        "largest_error": round(math.exp(errors[math.ceil(0.95 * len(errors)) - 1]), 3),
    }


def predict(row: Timed, rates: Mapping[str, float]) -> float:
    return max(1e-3, sum(rate * row.terms[term] for term, rate in rates.items()))


def _error(rows: Sequence[Timed], rates: Mapping[str, float]) -> float:
    """Returns the mean error of the predictions' logarithms, to which a few rows that fit badly add little."""
    return statistics.mean(abs(math.log(predict(row, rates) / row.microseconds)) for row in rows)


def _fitted_rates(rows: Sequence[Timed], subset: Sequence[str]) -> dict[str, float] | None:
    """Returns the rates with the least mean error, by least squares with weights that fall with a row's error."""
    matrix = torch.tensor([[row.terms[t] / row.microseconds for t in subset] for row in rows], dtype=torch.float64)
    if matrix.shape[0] < matrix.shape[1]:
        return None
    weights, rates = torch.ones(len(rows), 1, dtype=torch.float64), None
    for _ in range(REWEIGHTED):
        found = torch.linalg.lstsq(matrix * weights, weights, driver="gelsd").solution
        if found.min() <= 0:
            break
        rates = dict(zip(subset, found[:, 0].tolist(), strict=True))
        error = torch.log(torch.clamp(matrix @ found, min=1e-6)).abs()
        weights = 1 / torch.clamp(error, min=SMALL_ERROR).sqrt()
    return rates


def add(commands: Any) -> None:
    """The command's flags."""
    parser = commands.add_parser("calibrate", help="measure every kernel's offers on this GPU and fit their rates")
    parser.add_argument("--layers", type=integer(0), default=40, metavar="N", help="random layers beside named ones")
    parser.add_argument("--wide", type=integer(0), default=60, metavar="N", help="random layers of any geometry")
    parser.add_argument("--seed", type=integer(0), default=7, metavar="N")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--out", type=Path, metavar="FILE", help="where the fitted rates go")
    goal.add_argument("--models", type=Path, metavar="FILE", help="where the constants of the halo kernel's model go")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="times of builds for --models, read or written")
    parser.add_argument("--times", type=Path, metavar="FILE", help="where the measured times go too")
    parser.add_argument(
        "--pytorch",
        type=Path,
        nargs="+",
        metavar="RESULTS.json",
        help="measure nothing: fit PyTorch's rates to its times in these results of `bench`, and put them into --out",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.pytorch:
        if not arguments.out:
            raise ValueError("--pytorch puts rates into the file of --out")
        fit_pytorch(arguments.out, arguments.pytorch, Console())
        return 0
    if not torch.cuda.is_available():
        raise RuntimeError("calibrate measures on a GPU, and there is none")
    if arguments.models:
        if torch.cuda.get_device_capability() != (9, 0):
            raise RuntimeError("the halo kernel runs on GPUs of compute capability 9.0 alone")
        halo_model.calibrate(arguments.models, arguments.layers, arguments.seed, Console(), arguments.samples)
        return 0
    calibrate(arguments.out, arguments.layers, arguments.wide, arguments.seed, Console(), arguments.times)
    return 0


def calibrate(path: Path, count: int, wide: int, seed: int, console: Console, rows_path: Path | None = None) -> None:
    """Measures, fits and writes. `rows_path`: where the measured times go, for another look at them."""
    rows = measure(chosen_work(count, seed, wide), console)
    if rows_path is not None:
        rows_path.write_text(json.dumps([asdict(row) for row in rows]))
    path.parent.mkdir(parents=True, exist_ok=True)
    unit = "microseconds per launch, per 1000 cycles, per MB of the pass's tensors, per 1e9 products"
    origin = f"tconv3d calibrate --layers {count} --wide {wide} --seed {seed}"
    text = {"machine": describe_machine(), "origin": origin, "unit": unit, "errors": ERRORS, "kernels": fit(rows)}
    path.write_text(json.dumps(text, indent=1) + "\n")
    console.print(f"{len(rows)} times of {len({row.kernel for row in rows})} kernels: {path}")


def fit_pytorch(path: Path, results: Sequence[Path], console: Console) -> None:
    """Fits PyTorch's rates to its times in results of `bench`, and puts them into a file of rates."""
    stored = json.loads(path.read_text())
    rows: list[Timed] = []
    for each in results:
        found = read(each)
        if found.machine["gpu"] != stored["machine"]["gpu"]:
            raise ValueError(f"{each.name} was measured on {found.machine['gpu']}, not {stored['machine']['gpu']}")
        rows += pytorch_times(found.rows)
    if not rows:
        raise ValueError("these results have no time of PyTorch's operator")
    names = " ".join(each.name for each in results)
    stored["pytorch_origin"] = f"tconv3d calibrate --pytorch {names} --out {path.name}"
    stored["errors"] = ERRORS
    stored["kernels"] = stored.pop("kernels") | fit(rows)  # the kernels come last in the file
    path.write_text(json.dumps(stored, indent=1) + "\n")
    console.print(f"{len(rows)} times of PyTorch's operator: {path}")
