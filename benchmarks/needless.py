"""Tells which kernels, and which choices of the halo kernel's builds, the predicted times could do without.

python benchmarks/needless.py --random 120 --seed 21 --gpu H200
python benchmarks/needless.py --builds --random 60

Every layer of the table and some random ones are planned: forward pass and gradients, in three types and both
layouts. Each kernel is left out in turn, and so, with --builds, is each choice of the halo kernel (how input arrives,
how sums leave, who divides K, where weights live, ...). A row says in how many calls it is the only best, in how many
by 3% and by 10%, and in which call the most. What nowhere wins by 3% is not worth its lines. Needs no GPU: times are
predicted.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from math import inf
from pathlib import Path

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.families.halo import boxes
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.build import Build
from tconv3d.families.halo.candidates import Nominal, builds_of, last_tiles_divided
from tconv3d.families.halo.job import job_of
from tconv3d.families.halo.search import best_tiling
from tconv3d.planning import gpus, planner
from tconv3d.planning.offers import Offer, cheapest
from tconv3d.planning.problem import Device, Pass, Problem
from tconv3d.tools.bench.layers import LAYERS, random_layers
from tconv3d.tools.bench.precision import LAYOUTS
from tconv3d.tools.bench.problems import problems_of_layer

KINDS = ("tf32", "bfloat16", "float32")
BACKWARD = (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD, Pass.BIAS_GRAD)
WANTED = ((Pass.FORWARD,), BACKWARD, BACKWARD[:2], BACKWARD[1:], *((which,) for which in BACKWARD))
FAR = 1.25  # multiple of the best predicted time above which a build's time is not computed

Losses = dict[str, list[tuple[float, str]]]  # time without something as a multiple of the best, and the call


def kernels(problems: Mapping[Pass, Problem], device: Device) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields, for each set of passes, the least price without each of its kernels; "" stands for none left out."""
    for passes in WANTED:
        if not set(passes) <= problems.keys():
            continue
        wanted = {which: problems[which] for which in passes}
        planner.forget()
        with planner.meeting(wanted, device):
            offers = [answer for answer in planner.answers(wanted, device) if isinstance(answer, Offer)]
        prices = {}
        for name in {"", *(offer.kernel for offer in offers)}:
            cover = cheapest(passes, [offer for offer in offers if offer.kernel != name])
            prices[name] = inf if cover is None else sum(offer.price for offer in cover)
        yield " and ".join(which.value for which in passes), prices


def builds(problems: Mapping[Pass, Problem], device: Device) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields, for each pass of the halo kernel, the least cycles without each of the choices that builds have."""
    for which in (Pass.FORWARD, Pass.INPUT_GRAD):
        if halo_planner.why_not(problems[which], device) is not None:
            continue
        job, found = job_of(problems[which]), dict[frozenset[str], float]()
        nominal = Nominal.of(job)
        for build in chain(*(kind(nominal, device.shared_bytes) for kind in (builds_of, last_tiles_divided))):
            key = frozenset(choices(build))
            most = min(found.get(key, inf), FAR * min(found.values(), default=inf))
            if (tiling := best_tiling(build, job, device.multiprocessors, most)) is not None:
                found[key] = tiling[0]
        boxes.forget()
        names = {"", *chain(*found)}
        yield which.value, {name: _least(found, name) for name in names}


def _least(found: Mapping[frozenset[str], float], without: str) -> float:
    return min((cycles for names, cycles in found.items() if without not in names), default=inf)


def choices(build: Build) -> Iterator[str]:
    """Yields the names of a build's choices."""
    yield f"input {build.input.name}"
    yield f"output {build.output.name}"
    yield f"division {build.division.name}"
    yield f"weights {build.weights.name}"
    others = {
        "march": build.march,
        "three stages": build.staged,
        "three consumers": build.block.consumers == 3,
        "merged groups": build.tile.merged > 1,
        "groups together": build.tile.groups > 1,
        "variants with shifts of their own": build.own_shifts,
        "phases apart along w": build.split[2],
    }
    yield from (name for name, holds in others.items() if holds)


def show(losses: Losses, names: Collection[str], console: Console) -> None:
    worst = {name: max(losses[name], default=(1.0, "")) for name in names}
    for name in sorted(names, key=lambda name: worst[name][0]):
        counts = [sum(loss > least for loss, _ in losses[name]) for least in (1.0, 1.03, 1.1)]
        most = f"{worst[name][0]:.2f}x in {worst[name][1]}" if counts[0] else ""
        console.print(
            f"{name:34} best {counts[0]:5}  by 3% {counts[1]:5}  by 10% {counts[2]:5}  {most}", soft_wrap=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=120, help="random layers beside those of the table")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--gpu", default=gpus.DEFAULT_GPU, choices=gpus.GPUS)
    parser.add_argument("--builds", action="store_true", help="choices of the halo kernel's builds, not kernels")
    args = parser.parse_args()
    device, console = gpus.GPUS[args.gpu].device, Console()
    losses: Losses = defaultdict(list)
    names: set[str] = set()
    for name, layer in track({**LAYERS, **random_layers(args.random, args.seed)}.items(), console=console):
        for kind in KINDS:
            for layout in LAYOUTS:
                problems = {problem.which: problem for problem in problems_of_layer(layer, kind, layout)}
                for passes, least in (builds if args.builds else kernels)(problems, device):
                    best = least.pop("")
                    names |= least.keys()
                    for left_out, time in least.items():
                        if time > best:
                            losses[left_out].append((time / best, f"{name}, {kind}, {layout}, {passes}: {layer}"))
    show(losses, names, console)


if __name__ == "__main__":
    main()
