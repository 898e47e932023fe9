"""Times tilings of the weight gradient on Hopper beside their prediction and beside the warp-level kernel.

    python benchmarks/weight_grad_lab.py large_volume gan_128_64_16 --dtype tf32 bfloat16 --tilings 4 --json out.json

Each tiling is checked first, on two samples: fresh random inputs, poisoned results, float64 as the reference. The
first line of a layer is what the planner takes. Times are medians with L2 flushed before each run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d import checks, compiler, executor, launcher, weight_grad_planner
from tconv3d import hopper_weight_grad_planner as planner
from tconv3d.bench.layers import LAYERS, Layer
from tconv3d.bench.precision import DTYPES, TOLERANCE
from tconv3d.clock import Clock
from tconv3d.problem import Pass, Plan, Problem


def problem_and_operands(layer: Layer, name: str) -> tuple[Problem, Tensor, Tensor, Tensor]:
    """The problem, x, dy and dw."""
    shapes = layer.input_shape, layer.output_shape, layer.weight_shape
    x, dy, dw = (torch.randn(shape, device="cuda").to(DTYPES[name]) for shape in shapes)
    geometry, kind = checks.check_channels(dw, layer.settings), executor.DTYPES[x.dtype]
    strides = x.stride(), dw.stride(), dy.stride()
    problem = Problem(Pass.WEIGHT_GRAD, geometry, layer.batch, layer.size, kind, *strides, tf32=name == "tf32")
    return problem, x, dy, dw


def reference(problem: Problem, x: Tensor, dy: Tensor) -> Tensor:
    """One matrix product per tap."""
    g = problem.geometry
    before = [axis.padding for axis in g.axes]
    after = [axis.kernel * axis.dilation + axis.stride for axis in g.axes]
    padded = F.pad(dy.double(), [side for pair in zip(before[::-1], after[::-1], strict=True) for side in pair])
    rows = x.double().reshape(len(x), g.groups, g.in_per_group, -1)
    dw = torch.empty(g.in_channels, g.out_per_group, *g.kernel, dtype=torch.float64, device=x.device)
    for tap in torch.cartesian_prod(*(torch.arange(k) for k in g.kernel)).reshape(-1, 3).tolist():
        places = zip(tap, g.axes, problem.input_size, strict=True)
        shifted = padded[
            (..., *(slice(t * a.dilation, t * a.dilation + (n - 1) * a.stride + 1, a.stride) for t, a, n in places))
        ]
        columns = shifted.reshape(len(x), g.groups, g.out_per_group, -1)
        product = (rows @ columns.transpose(-1, -2)).sum(0)
        dw[(slice(None), slice(None), *tap)] = product.reshape(g.in_channels, g.out_per_group)
    return dw


def call_of(plan: Plan, x: Tensor, dy: Tensor, dw: Tensor) -> Callable[[], None]:
    workspace = torch.full((max(1, plan.workspace_bytes // 4),), nan, device="cuda")
    operands = {"x": x, "dy": dy, "dw": dw, "workspace": workspace}
    addresses = {"null": 0, **{name: tensor.data_ptr() for name, tensor in operands.items()}}
    calls = [(launcher.prepare(launch, 0), tuple(addresses[n] for n in launch.pointers)) for launch in plan.launches]
    stream = torch.cuda.current_stream().cuda_stream

    def run(keep: Tensor = workspace) -> None:
        for call, operands in calls:
            call(operands, stream)

    return run


def candidates(problem: Problem, tilings: int, boxes: int) -> Iterator[planner.Buffers]:
    """What the planner takes, then other tilings, then other boxes of the first."""
    device, layer = executor.device_of(torch.empty(0, device="cuda")), planner._layer(problem)
    size, _ = planner.as_walked(problem, layer.at_once)
    first = planner.tiling_of(layer, device, problem.batch, size)
    found = planner.tilings(layer, device, 40)
    assert first is not None, "the planner refuses the problem"
    kinds = {(t.depth, len(t.pieces), t.columns, t.row_tiles, t.share): t for t in reversed(found)}
    for tiling in dict.fromkeys([first, *sorted(kinds.values(), key=found.index)][: tilings + 1]):
        if made := planner.best_buffers(layer, tiling, size, device.shared_bytes):
            yield made
    every = (planner.buffers(first, box, device.shared_bytes) for box in planner.boxes(size, layer.per_word))
    ranked = sorted(filter(None, every), key=lambda made: planner.box_cost(layer, made, size))
    yield from ranked[1 : boxes + 1]


def measure(name: str, dtype: str, clock: Clock, tilings: int, boxes: int) -> Iterator[dict[str, Any]]:
    layer = LAYERS[name]
    problem, x, dy, dw = problem_and_operands(layer, dtype)
    device = executor.device_of(x)
    row: dict[str, Any] = {"layer": name, "dtype": dtype}
    if not weight_grad_planner.why_not(problem, device):
        plan = weight_grad_planner.plan(problem, device)
        yield {**row, "kernel": plan.kernel, "ms": clock(call_of(plan, x, dy, dw)), "tile": plan.tile}
    if refusal := planner.why_not(problem, device):
        yield {**row, "kernel": "hopper_weight_grad", "tile": f"refused: {refusal}"}
        return
    few = replace(problem, batch=min(2, layer.batch))
    exact = reference(few, x[: few.batch], dy[: few.batch])
    found = list(candidates(problem, tilings, boxes))
    plans = [planner.plan_buffers(problem, device, made) for made in found]
    arch = compiler.architecture(device.capability)
    with ThreadPoolExecutor(16) as pool:
        list(
            pool.map(
                lambda launch: compiler.compile(launch.kernel, launch.constants, arch),
                {*sum((p.launches for p in plans), ())},
            )
        )
    for made, plan in zip(found, plans, strict=True):
        dw.fill_(nan)
        call_of(planner.plan_buffers(few, device, made), x, dy, dw)()
        error = float((dw.double() - exact).norm() / exact.norm())
        size, _ = planner.as_walked(problem, made.tiling.pieces[0].at_once)
        predicted = planner.box_cost(planner._layer(problem), made, size) * layer.batch
        ms = clock(call_of(plan, x, dy, dw))
        yield {
            **row,
            "kernel": plan.kernel,
            "ms": ms,
            "tflops": problem.flops / ms / 1e9,
            "predicted_ms": predicted * made.tiling.kinds(problem.geometry) / device.multiprocessors / 1.77e6,
            "error": error,
            "wrong": not error < TOLERANCE[dtype],
            "tile": plan.tile,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--dtype", nargs="+", default=["tf32"], choices=["tf32", "float16", "bfloat16"])
    parser.add_argument("--tilings", type=int, default=0, help="others than the planner's")
    parser.add_argument("--boxes", type=int, default=0, help="others than the planner's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clock, rows = Clock(0.05), []
    for name in args.layers or list(LAYERS):
        for dtype in args.dtype:
            for row in measure(name, dtype, clock, args.tilings, args.boxes):
                rows.append(row)
                ms, predicted = row.get("ms", nan), row.get("predicted_ms", nan)
                state = "WRONG" if row.get("wrong") else f"{row.get('error', nan):.1e}"
                numbers = f"{ms:8.4f} ms, predicted {predicted:8.4f}, error {state}"
                print(f"{name:20} {dtype:8} {numbers}  {row['kernel']}: {row['tile']}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    main()
