"""Checks on random layers and a Hopper GPU whether the planner's build is among the fastest of its candidates.

    python benchmarks/planner_check.py --layers 20 --seed 0 --json planner.json

Planning and compiling take longer than measuring and need no GPU: they can run before, elsewhere, with one cache.

    python benchmarks/planner_check.py --layers 20 --seed 0 --prepare plans.pickle
    python benchmarks/planner_check.py --prepared plans.pickle --json planner.json

For every layer that the halo kernel runs, the planner's build and the builds within twice the model's best time (at
most `--most` of them) are checked against each other and timed with a cold L2 cache. The planner passes if its choice
is within 10% of the fastest for at least 9 of 10 layers. halo_fit.py reads the file of `--json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from halo_names import describe

from tconv3d.api.ahead import compile_all
from tconv3d.api.explain import call_of, problems_of
from tconv3d.api.tune import Trial, contenders, measure
from tconv3d.families.halo.launches import HaloPlan
from tconv3d.planning.gpus import DEFAULT_GPU, GPUS
from tconv3d.planning.problem import Device, Pass, Problem
from tconv3d.runtime import compiler
from tconv3d.tools import tables
from tconv3d.tools.bench.layers import Layer, random_layers
from tconv3d.tools.bench.precision import DTYPES, LAYOUTS, in_layout, precision
from tconv3d.tools.bench.results import describe_machine
from tconv3d.torch_ops import executor
from tconv3d.torch_ops.clock import Clock

CLOSE = 1.1  # largest time of a close choice, as a multiple of the fastest build's time
SHARE = 0.9  # fraction of the layers for which the choice must be close
PASSES = (Pass.FORWARD, Pass.INPUT_GRAD)


@dataclass(frozen=True)
class Work:
    """Holds one pass of one layer, and the plans of its compiled builds, the planner's choice first."""

    layer: str
    problem: Problem
    plans: list[HaloPlan]


@dataclass(frozen=True)
class Row:
    """Holds the timed builds of one pass of one layer, the planner's choice first."""

    layer: str
    which: str
    trials: list[Trial]
    builds: list[str] = field(default_factory=list)  # names of the trials' builds, as halo_fit.py reads them

    @property
    def planned_ms(self) -> float:
        return self.trials[0].ms or 0.0

    @property
    def fastest(self) -> Trial:
        return min((trial for trial in self.trials if trial.ms), key=lambda trial: trial.ms or 0.0)

    @property
    def slower(self) -> float:
        """Returns the time of the planner's choice divided by that of the fastest build."""
        return self.planned_ms / (self.fastest.ms or 1.0)


def prepare(layer: Layer, kind: tuple[str, str], device: Device, passes: Sequence[Pass], most: int) -> list[Work]:
    """Plans and compiles a layer without using the GPU; passes that another kernel runs are left out."""
    dtype, layout = kind
    module = in_layout(layer.module(DTYPES[dtype], "meta"), layout)
    x = layer.input(DTYPES[dtype], "meta").contiguous(memory_format=LAYOUTS[layout])
    with precision(dtype):
        problems = problems_of(*call_of(module, x))  # type: ignore[arg-type]
    found = []
    for problem in problems:
        plans = contenders(problem, device, most) if problem.which in passes else []
        launches = [launch for plan in plans for launch in plan.launches]
        compile_all(
            [(launch.kernel, launch.constants) for launch in launches], compiler.architecture(device.capability)
        )
        if plans:
            found.append(Work(str(layer), problem, plans))
    return found


def prepare_all(options: argparse.Namespace, device: Device) -> list[Work]:
    chosen = random_layers(options.layers, options.seed).values()
    passes = PASSES if options.backward else PASSES[:1]
    processes = min(options.processes, os.cpu_count() or 1, len(chosen))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, torch.set_num_threads, (1,)) as pool:
        kind = options.dtype, options.layout
        waiting = [pool.submit(prepare, layer, kind, device, passes, options.most) for layer in chosen]
        return [work for future in waiting for work in future.result()]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    close = sum(row.slower <= CLOSE for row in rows)
    return {
        "measured": len(rows),
        "close": close,
        "enough": bool(rows) and close >= SHARE * len(rows),
        "mean_slower": sum(row.slower for row in rows) / max(len(rows), 1),
        "rows": [asdict(row) | {"slower": row.slower} for row in rows],
    }


def show(rows: Sequence[Row], console: Console) -> None:
    found = []
    for row in rows:
        timed = sum(trial.ms is not None for trial in row.trials)
        times = f"{row.planned_ms:.4f}", f"{row.fastest.ms:.4f}", f"{row.slower:.2f}x"
        other = "" if row.fastest is row.trials[0] else row.fastest.build
        found.append(tables.Row(row.layer, (row.which, f"{timed} of {len(row.trials)}"), Text(other), times))
    numbers = ("planner ms", "fastest ms", "slower")
    headings = tables.Headings("layer", ("pass", "builds"), "the fastest build", numbers)
    tables.show("The planner's choice beside the fastest build", "", headings, found, console)
    mean = summary(rows)
    verdict = "enough" if mean["enough"] else "NOT enough"
    console.print(
        f"the planner's choice is within 10% of the fastest for {mean['close']} of {mean['measured']}: {verdict}; "
        f"on average {mean['mean_slower']:.3f} times the fastest"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20, help="how many random layers; default 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="tf32", choices=("tf32", "float16", "bfloat16"))
    parser.add_argument("--layout", default="contiguous", choices=LAYOUTS)
    parser.add_argument("--backward", action="store_true", help="the input gradient too")
    parser.add_argument("--most", type=int, default=12, help="builds beside the planner's; default 12")
    parser.add_argument("--budget", type=float, default=0.02, metavar="S", help="seconds for one timing")
    parser.add_argument("--processes", type=int, default=12, help="that plan and compile")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="only plan and compile, without a GPU")
    parser.add_argument("--prepared", type=Path, metavar="FILE", help="measure what was planned before")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    settings = {key: value for key, value in vars(options).items() if not (value is None or isinstance(value, Path))}
    if options.prepare is not None:
        options.prepare.write_bytes(pickle.dumps((settings, prepare_all(options, GPUS[DEFAULT_GPU].device))))
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("builds are timed on a GPU of compute capability 9.0, and none is visible")
    like = torch.empty(0, dtype=DTYPES[options.dtype], device="cuda")
    clock, rows = Clock(options.budget), []
    if options.prepared is not None:
        settings, prepared = pickle.loads(options.prepared.read_bytes())
    else:
        prepared = prepare_all(options, executor.device_of(like))
    for work in prepared:
        builds = [f"{describe(plan.build)}; {plan.tiling}" for plan in work.plans]
        trials = measure(work.problem, work.plans, like, clock)
        rows.append(Row(work.layer, work.problem.which.value, trials, builds))
        torch.cuda.empty_cache()
        if options.json is not None:
            found = {"machine": describe_machine(), "settings": settings, **summary(rows)}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    show(rows, Console())
    return 0 if summary(rows)["enough"] else 1


if __name__ == "__main__":
    sys.exit(main())
