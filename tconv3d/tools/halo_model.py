"""`tconv3d calibrate --models`: times builds of the halo kernel, and fits the constants of its model to the times.

For each pass of random and named layers, the planner's build and the builds with the least predicted times are
compiled, checked against each other and timed. The constants of `Costs` (families/halo/measured.py) are those that
predict the times best: each in turn is made larger or smaller as long as that helps, in steps that get finer. The
constants of `Choices` change what is compiled, so that layers are planned and timed again with other values.

The file that is written is what `planning.calibration.model_constants` reads.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..api.ahead import compile_all
from ..api.tune import contenders, measure
from ..families.halo.build import Build
from ..families.halo.job import Job, job_of
from ..families.halo.launches import HaloPlan
from ..families.halo.measured import CHOICES, COSTS, HALVES, Choices, Costs
from ..families.halo.model import cycles
from ..families.halo.tiling import Tiling
from ..planning.calibration import DEFAULT, MODEL_FILE, MODELS, REFERENCE
from ..planning.problem import Device, Pass, Problem
from ..runtime import compiler, plain
from ..torch_ops import executor
from ..torch_ops.clock import Clock
from .bench.layers import LAYERS, Layer, random_layers
from .bench.precision import LAYOUTS
from .bench.problems import problems_of_layer

KINDS = tuple(product(("tf32", "bfloat16"), LAYOUTS))
MOST = 12  # builds timed beside the planner's, for each pass of a layer
CLOSE = 1.1  # largest time of a close choice, as a multiple of the fastest build's time
STEPS = (1.4, 1.2, 1.1, 1.05, 1.02)  # factors by which a constant is changed, one after the other
SWEEPS = 2  # times that all constants are changed by each factor
SETTLED = 0.001  # weight of the distance from the present constants, which keeps those that no time depends on
FACTORS = (0.5, 0.7, 1.4, 2.0)  # factors on a constant of `Choices` to try
GAIN = 0.005  # smallest fraction of the time that another value of `Choices` must save
CYCLES = 1e3 / DEFAULT["kilocycles"]  # cycles per millisecond


@dataclass(frozen=True)
class Work:
    """One pass of a layer, and the plans of its compiled builds, the planner's choice first."""

    layer: str
    problem: Problem
    plans: list[HaloPlan]


@dataclass(frozen=True)
class Sample:
    """One timed build of a pass."""

    layer: str
    problem: Problem
    build: Build
    tiling: Tiling
    ms: float

    @cached_property
    def job(self) -> Job:
        return job_of(self.problem).as_merged(self.build.tile.merged).arriving(self.build.input)

    def predicted(self, costs: Costs, multiprocessors: int) -> float:
        """Returns the predicted time in milliseconds."""
        return cycles(self.build, self.tiling, self.job, multiprocessors, costs) / CYCLES


# ---- measuring


def prepare(name: str, layer: Layer, dtype: str, layout: str, device: Device, most: int) -> list[Work]:
    """Plans and compiles a layer without using the GPU; passes that another kernel runs are left out."""
    found = []
    for problem in problems_of_layer(layer, dtype, layout):
        plans = contenders(problem, device, most) if problem.which in (Pass.FORWARD, Pass.INPUT_GRAD) else []
        launches = {(launch.kernel, launch.constants) for plan in plans for launch in plan.launches}
        compile_all(tuple(sorted(launches, key=repr)), compiler.architecture(device.capability))
        if plans:
            found.append(Work(f"{name} {dtype} {layout} {problem.which.value}", problem, plans))
    return found


def prepare_all(layers: Mapping[str, Layer], device: Device, most: int, model: Path | None = None) -> list[Work]:
    """Plans and compiles in a process for each core, with the constants of another file if `model` names one."""
    if model is not None:
        os.environ[MODEL_FILE] = str(model)
    try:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), spawn, torch.set_num_threads, (1,)) as pool:
            waiting = [pool.submit(prepare, *each, *kind, device, most) for each in layers.items() for kind in KINDS]
            return [work for future in waiting for work in future.result()]
    finally:
        os.environ.pop(MODEL_FILE, None)


def samples_of(works: Iterable[Work], clock: Clock) -> Iterator[Sample]:
    """Times the builds of each pass, those that give wrong results excepted."""
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    for work in works:
        like = torch.empty(0, dtype=names[work.problem.dtype], device="cuda")
        trials = measure(work.problem, work.plans, like, clock)
        for plan, trial in zip(work.plans, trials, strict=True):
            if trial.ms is not None:
                yield Sample(work.layer, work.problem, plan.build, plan.tiling, trial.ms)
        torch.cuda.empty_cache()


# ---- fitting


def loss(samples: Sequence[Sample], costs: Costs, start: Costs, multiprocessors: int) -> float:
    """Rates a model mostly by the relative errors within a layer and by fast builds, on which a choice depends."""
    total, by_layer = 0.0, _by_layer(samples)
    for group in by_layer.values():
        fastest = min(sample.ms for sample in group)
        weights = [(fastest / sample.ms) ** 4 for sample in group]
        errors = [math.log(sample.predicted(costs, multiprocessors) / sample.ms) for sample in group]
        mean = sum(w * error for w, error in zip(weights, errors, strict=True)) / sum(weights)
        spread = sum(w * min(abs(error - mean), 1.0) ** 1.5 for w, error in zip(weights, errors, strict=True))
        total += spread / sum(weights) + 0.3 * abs(mean) ** 1.5
    pairs = [(getattr(costs, field.name), getattr(start, field.name)) for field in fields(Costs)]
    drift = [math.log(new / old) ** 2 for new, old in pairs if old > 0]
    return total / len(by_layer) + SETTLED * sum(drift) / len(drift)


def _by_layer(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found = defaultdict(list)
    for sample in samples:
        found[sample.layer].append(sample)
    return found


def fit(
    samples: Sequence[Sample], start: Costs, multiprocessors: int, names: Sequence[str] = (), sweeps: int = SWEEPS
) -> Costs:
    """Returns the constants that predict the times best: all of them, or those that are named."""
    best, least = start, loss(samples, start, start, multiprocessors)
    for step in (step for step in STEPS for _ in range(sweeps)):
        for name in names or [field.name for field in fields(Costs)]:
            for factor in (step, 1 / step):
                while True:
                    value = getattr(best, name) * factor
                    tried = replace(best, **{name: max(1.0, value) if name == "overlap" else value})
                    found = loss(samples, tried, start, multiprocessors) if tried != best else least
                    if found >= least:
                        break
                    best, least = tried, found
    return best


def close_choices(samples: Sequence[Sample], costs: Costs, multiprocessors: int) -> tuple[int, int]:
    """Returns for how many passes the model's choice is within 10% of the fastest build, and how many there are."""
    groups = _by_layer(samples).values()
    chosen = [min(group, key=lambda sample: sample.predicted(costs, multiprocessors)) for group in groups]
    best = [min(sample.ms for sample in group) for group in groups]
    return sum(each.ms <= CLOSE * ms for each, ms in zip(chosen, best, strict=True)), len(chosen)


def choose(start: Choices, timed: Callable[[Choices], Mapping[str, float]]) -> Choices:
    """Returns the values with which layers take the least time; `timed` returns the times of layers by name."""
    best, times = start, timed(start)
    for name in [field.name for field in fields(Choices)]:
        present = getattr(best, name)
        for factor in FACTORS:
            tried = replace(best, **{name: present * factor})
            found = timed(tried)
            both = times.keys() & found.keys()
            ratio = sum(math.log(found[layer] / times[layer]) for layer in both) / max(1, len(both))
            if ratio < -GAIN:
                best, times = tried, found
    return best


# ---- the file


def write(path: Path, gpu: str, origin: str, float32: Costs, halves: Costs, choices: Choices) -> None:
    """Writes all constants with their units, and `origin` as the origin of each."""
    units = {
        name: constant["unit"]
        for section, constants in _stored().items()
        if section != "origins"
        for name, constant in constants.items()
    }
    sections: dict[str, Any] = {"origins": {"fitted": origin}}
    for section, values in (("float32", float32), ("16 bit", halves), ("choices", choices)):
        sections[section] = {
            name: {"value": float(f"{value:.3g}"), "unit": units[name], "origin": "fitted"}
            for name, value in asdict(values).items()
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of({"gpu": gpu, "halo": sections}))


def _stored() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((MODELS / f"{REFERENCE.lower()}.json").read_text())["halo"]
    return found


def text_of(document: Mapping[str, Any]) -> str:
    """Returns a file of constants as JSON, one constant to a line."""
    sections = [
        f'  "{section}": {{\n'
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(each)}" for name, each in constants.items())
        + "\n  }"
        for section, constants in document["halo"].items()
    ]
    body = ",\n".join(sections)
    return f'{{\n "gpu": {json.dumps(document["gpu"])},\n "halo": {{\n{body}\n }}\n}}\n'


# ---- the command


def calibrate(path: Path, count: int, seed: int, console: Console, samples_path: Path | None = None) -> None:
    """Measures, fits and writes. Samples in a file that exists are read instead of measured."""
    device = executor.device_of(torch.empty(0, device="cuda"))
    layers, clock = {**LAYERS, **random_layers(count, seed)}, Clock()
    if samples_path is not None and samples_path.is_file():
        samples: list[Sample] = [plain.loads(line, Sample) for line in samples_path.read_text().splitlines()]
    else:
        works = prepare_all(layers, device, MOST)
        samples = list(samples_of(track(works, "measuring builds", console=console), clock))
        if samples_path is not None:
            samples_path.write_text("".join(plain.dumps(sample) + "\n" for sample in samples))
    found = []
    for item_bytes, start in ((4, COSTS), (2, HALVES)):
        some = [sample for sample in samples if sample.build.item_bytes == item_bytes]
        costs = fit(some, start, device.multiprocessors) if some else start
        for words, each in (("before", start), ("after", costs)):
            close, passes = close_choices(some, each, device.multiprocessors)
            console.print(f"{8 * item_bytes} bits, {words}: within 10% of the fastest for {close} of {passes} passes")
        found.append(costs)
    gpu, origin = (
        torch.cuda.get_device_name(),
        f"tconv3d calibrate --models {path.name} --layers {count} --seed {seed}",
    )
    with tempfile.TemporaryDirectory() as folder:

        def timed(choices: Choices) -> dict[str, float]:
            model = Path(folder, "model.json")
            write(model, gpu, origin, found[0], found[1], choices)
            works = prepare_all(LAYERS, device, 0, model)
            return {sample.layer: sample.ms for sample in samples_of(works, clock)}

        choices = choose(CHOICES, timed)
    write(path, gpu, origin, found[0], found[1], choices)
    console.print(f"{len(samples)} times of builds: {path}")
