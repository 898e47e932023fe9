"""Writes the plans of many layers as text, to show that a change of the sources leaves all plans as they were.

python benchmarks/plans.py --seeds 1 2 3 --random 8 > before.txt
python benchmarks/plans.py --seeds 1 2 3 --random 8 > after.txt
diff before.txt after.txt

A plan is its kernel, tile, reason and workspace, and of every launch the kernel, the constants, the scalars as bytes,
the grid, the threads and the shared memory. `--family halo` asks that family alone. `--without` leaves out constants
of these names, for a change that names them differently.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.planning import gpus, planner
from tconv3d.planning.problem import Device, Pass, Plan, Problem
from tconv3d.tools.bench.layers import LAYERS, random_layers
from tconv3d.tools.bench.precision import LAYOUTS
from tconv3d.tools.bench.problems import problems_of_layer

KINDS = ("tf32", "float32", "float16", "bfloat16")


def plans_of(problems: dict[Pass, Problem], device: Device, family: str) -> Iterator[tuple[str, Plan]]:
    """Yields the plans of a layer's forward and backward pass, or those of one family, with the names of passes."""
    if not family:
        yield "forward", planner.plan(problems[Pass.FORWARD], device)
        backward = tuple(problem for which, problem in problems.items() if which is not Pass.FORWARD)
        yield "backward", planner.plan_gradients(backward, device)
        return
    module = dict(planner.FAMILIES)[family]
    for which, problem in problems.items():
        if module.why_not(problem, device) is None:
            yield which.value, module.plan(problem, device)


def described(plan: Plan, without: frozenset[str]) -> Iterator[str]:
    """Yields the lines that describe a plan."""
    yield f"  {plan.kernel}: {plan.why}"
    yield f"  {plan.tile}"
    yield f"  {plan.workspace_bytes} bytes, {plan.regions}, {plan.packed_bytes} packed, {plan.moments} moments"
    for launch in plan.launches:
        yield f"  {launch.kernel} grid {launch.grid} threads {launch.threads} shared {launch.shared_bytes}"
        yield f"    {launch.pointers} {len(launch.scalars)} bytes {zlib.crc32(launch.scalars):08x}"
        yield "    " + "; ".join(f"{name}={value}" for name, value in launch.constants if name not in without)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", default=list(LAYERS), help="layers of the table")
    parser.add_argument("--random", type=int, default=8, help="random layers for each seed")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--gpus", nargs="*", default=["H200", "A100"], choices=gpus.GPUS)
    parser.add_argument("--family", default="", choices=("", *dict(planner.FAMILIES)))
    parser.add_argument("--without", nargs="*", default=[], metavar="CONSTANT")
    args = parser.parse_args()
    layers = {name: LAYERS[name] for name in args.layers}
    for seed in args.seeds:
        layers |= random_layers(args.random, seed)
    for name, layer in layers.items():
        for gpu in args.gpus:
            for kind in args.kinds:
                for layout in args.layouts:
                    planner.forget()
                    problems = {problem.which: problem for problem in problems_of_layer(layer, kind, layout)}
                    for which, plan in plans_of(problems, gpus.GPUS[gpu].device, args.family):
                        print(f"{name} {gpu} {kind} {layout} {which}")
                        print("\n".join(described(plan, frozenset(args.without))), flush=True)


if __name__ == "__main__":
    main()
