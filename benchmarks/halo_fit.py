"""Fits the constants of the halo planner's model to tables that planner_check.py wrote. Needs no GPU.

    python benchmarks/halo_fit.py planner_7.json planner_8.json

It prints the constants, which tconv3d/planning/models/ has, the error of the model, and for every layer how much
slower the build with the least predicted time is than the fastest measured build.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from math import exp, log
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from halo_names import describe, geometry_of

from tconv3d.families.halo import job as halo_job
from tconv3d.families.halo.build import Build
from tconv3d.families.halo.candidates import Nominal, builds_of
from tconv3d.families.halo.job import Job
from tconv3d.families.halo.measured import COSTS, HALVES, Costs
from tconv3d.families.halo.model import cycles, portioned
from tconv3d.families.halo.tiling import Tiling, tilings
from tconv3d.planning.geometry import Triple
from tconv3d.planning.problem import Device, Pass, Problem
from tconv3d.tools.bench.layers import Layer, random_layers

H200 = Device("H200", (9, 0), 132, 232448)
GIGAHERTZ = 1.75


@dataclass(frozen=True)
class Sample:
    """Holds one measured build of a layer."""

    layer: str
    build: Build
    tiling: Tiling
    job: Job
    ms: float

    def model(self, costs: Costs) -> float:
        return cycles(self.build, self.tiling, self.job, 132, costs) / GIGAHERTZ / 1e6


def strides(channels: int, size: Triple, channels_last: bool) -> tuple[int, ...]:
    d, h, w = size
    if channels_last:
        return (channels * d * h * w, 1, channels * h * w, channels * w, channels)
    return (channels * d * h * w, d * h * w, h * w, w, 1)


def job_of_layer(layer: Layer, dtype: str, channels_last: bool, which: str) -> Job:
    g = geometry_of(layer)
    x = strides(layer.in_channels, layer.size, channels_last)
    y = strides(layer.out_channels, g.output_size(layer.size), channels_last)
    w = strides(g.out_per_group, g.kernel, False)
    return halo_job.job_of(Problem(Pass(which), g, layer.batch, layer.size, dtype, x, w, y, which == "forward", True))


def _without_units(build: str) -> str:
    """Removes the instruction's unit from a build's name, because planners of other versions may choose another."""
    return re.sub(r" \(unit [^)]*\)", "", build)


@lru_cache(maxsize=1)
def _builds(nominal: Nominal) -> list[Build]:
    return list(builds_of(nominal, H200.shared_bytes))


def sample_of(name: str, job: Job, build: str, tiling: str, ms: float) -> Sample | None:
    """Returns the sample of a table's row, or None if the planner no longer considers that build."""
    for made in _builds(Nominal.of(job)):
        if _without_units(describe(made)) == _without_units(build):
            read = job.as_merged(made.tile.merged).arriving(made.input)
            for cut in tilings(made, job.batch, job.positions, job.read_size):
                for whole in portioned(made, cut, H200.multiprocessors):
                    if str(whole) == tiling:
                        return Sample(name, made, whole, read, ms)
    print("no longer a candidate:", name, build, tiling)
    return None


def read(table: Path) -> list[Sample]:
    found = json.loads(table.read_text())
    return [sample for row in _rows(found) if (sample := sample_of(*row)) is not None]


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, Job, str, str, float]]:
    """Yields layer, job, build, tiling and milliseconds of each build that planner_check.py timed."""
    settings = found["settings"]
    layers = {str(layer): layer for layer in random_layers(settings["layers"], settings["seed"]).values()}
    dtype = "float32" if settings["dtype"] == "tf32" else settings["dtype"]
    for row in found["rows"]:
        job = job_of_layer(layers[row["layer"]], dtype, settings["layout"] == "channels_last", row["which"])
        for trial, build in zip(row["trials"], row["builds"], strict=True):
            if trial["ms"] is not None:
                yield f"{row['layer']} {dtype} {row['which']}", job, *build.split("; "), trial["ms"]


def loss(samples: list[Sample], costs: Costs, start: Costs) -> float:
    """Rates a model mostly by the relative errors within a layer and by fast builds, on which a choice depends."""
    by_layer: dict[str, list[tuple[float, float]]] = {}
    for s in samples:
        by_layer.setdefault(s.layer, []).append((s.ms, log(s.model(costs) / s.ms)))
    total = 0.0
    for group in by_layer.values():
        fastest = min(ms for ms, _ in group)
        weights = [(fastest / ms) ** 4 for ms, _ in group]
        mean = sum(w * error for w, (_, error) in zip(weights, group, strict=True)) / sum(weights)
        spread = sum(w * min(abs(e - mean), 1.0) ** 1.5 for w, (_, e) in zip(weights, group, strict=True))
        total += spread / sum(weights) + 0.3 * abs(mean) ** 1.5
    pairs = [(getattr(costs, f.name), getattr(start, f.name)) for f in fields(Costs)]
    drift = [log(new / old) ** 2 for new, old in pairs if old > 0]
    return total / len(by_layer) + 0.001 * sum(drift) / len(drift)


def fit(samples: list[Sample], start: Costs, steps: int, seed: int) -> Costs:
    """Searches by random steps of a few constants at a time, whose size decreases."""
    draw = random.Random(seed)
    best, best_loss, size = start, loss(samples, start, start), 0.3
    for i in range(steps):
        values = asdict(best)
        for name in values:
            if draw.random() < 0.35:
                values[name] *= exp(draw.gauss(0, size))
        costs = Costs(**values)
        if (found := loss(samples, costs, start)) < best_loss:
            best, best_loss = costs, found
        if i % (steps // 6 + 1) == steps // 6:
            size *= 0.7
    return best


def report(samples: list[Sample], costs: Costs, verbose: bool) -> None:
    if not samples:
        sys.exit("no row of these tables is a build that the planner still considers")
    by_layer: dict[str, list[Sample]] = {}
    for s in samples:
        by_layer.setdefault(s.layer, []).append(s)
    good = 0
    for layer, group in by_layer.items():
        chosen, best = min(group, key=lambda s: s.model(costs)), min(group, key=lambda s: s.ms)
        good += chosen.ms <= 1.1 * best.ms
        print(f"{layer:50} best {best.ms:8.4f} chosen {chosen.ms:8.4f} ({chosen.ms / best.ms:.2f})")
        for s in sorted(group, key=lambda s: s.ms) if verbose else ():
            model = s.model(costs)
            print(f"  {s.ms:8.4f} {model:8.4f} {model / s.ms:5.2f}  {describe(s.build)}; {s.tiling}")
    rms = (sum(log(s.model(costs) / s.ms) ** 2 for s in samples) / len(samples)) ** 0.5
    print(f"within 10% of the best: {good} of {len(by_layer)} layers; error of the model {100 * rms:.0f}%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=1500, help="of the search; 0: only report")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    samples = [sample for table in options.tables for sample in read(table)]
    if len({sample.build.item_bytes for sample in samples}) > 1:
        sys.exit("float32 and 16-bit types have constants of their own: fit their tables one by one")
    start = HALVES if samples and samples[0].build.item_bytes == 2 else COSTS
    costs = fit(samples, start, options.steps, options.seed) if options.steps else start
    report(samples, costs, options.verbose)
    for name, value in asdict(costs).items():
        print(f'   "{name}": {value:.3g}')


if __name__ == "__main__":
    main()
