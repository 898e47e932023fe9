"""Times every tile that the planner of a family considers, to see whether the tile predicted best is the fastest.

python benchmarks/candidates.py grouped_strided depthwise_64 --dtype float32 [--input-grad]
TCONV3D_AS=A100 python benchmarks/candidates.py gan_256_128_8 --family mma --dtype tf32 [--input-grad]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.families.direct import planner as direct_planner
from tconv3d.families.mma import planner as mma_planner
from tconv3d.planning.problem import Device, Pass, Plan, Problem
from tconv3d.planning.side import Side
from tconv3d.runtime import launcher
from tconv3d.tools.bench.layers import LAYERS, Layer
from tconv3d.tools.bench.precision import DTYPES, LAYOUTS, precision
from tconv3d.torch_ops import executor, problems
from tconv3d.torch_ops.clock import Clock


def problem_of(layer: Layer, x: Tensor, w: Tensor, tf32: bool) -> Problem:
    bias = torch.empty(layer.out_channels, dtype=x.dtype, device=x.device)
    return replace(problems.forward(x, w, bias, layer.settings, problems.OperandAddresses())[0], tf32=tf32)


def plans_of(family: str, problem: Problem, device: Device, most: int) -> Iterator[tuple[str, Plan]]:
    """Yields the predicted time of each candidate, as text, and its plan."""
    if family == "mma":
        for found in mma_planner.predicted(problem, device, most):
            yield f"{found.cycles(device) / 1e3:9.1f} kcycles", mma_planner.plan_of(found, problem)
        return
    side = Side.of(problem)
    for tile in direct_planner.tiles(side)[:most]:
        yield f"{direct_planner._cycles(side, tile):9.2f}", direct_planner.plan_gather(side, device, tile)


def time_tiles(name: str, args: argparse.Namespace, clock: Clock) -> None:
    layer = LAYERS[name]
    x = layer.input(DTYPES[args.dtype], "cuda").contiguous(memory_format=LAYOUTS[args.layout])
    w, b = (torch.randn(shape, device="cuda").to(x.dtype) for shape in (layer.weight_shape, layer.out_channels))
    w = w.contiguous(memory_format=LAYOUTS[args.layout])
    problem = problem_of(layer, x, w, args.dtype == "tf32")
    y = torch.empty_strided(layer.output_shape, problem.output, dtype=x.dtype, device="cuda").normal_()
    if args.input_grad:
        problem = replace(problem, which=Pass.INPUT_GRAD, bias=False)
    names = {"x": x, "dx": x, "y": y, "dy": y, "weight": w, "bias": b}
    stream = torch.cuda.current_stream().cuda_stream
    for predicted, plan in plans_of(args.family, problem, executor.device_of(x), args.most):
        names["workspace"] = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
        times = []
        for launch in plan.launches:
            call = launcher.prepare(launch, x.get_device())
            operands = tuple(0 if each == "null" else names[each].data_ptr() for each in launch.pointers)
            times.append(clock(lambda call=call, operands=operands: call(operands, stream)))
        took = " + ".join(f"{ms:.3f}" for ms in times)
        print(f"{name:20} {took:>15} ms  predicted {predicted}  {plan.tile}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--layout", default="contiguous", choices=LAYOUTS)
    parser.add_argument("--family", default="direct", choices=("direct", "mma"))
    parser.add_argument("--input-grad", action="store_true")
    parser.add_argument("--most", type=int, default=8, help="candidates to time per layer, best predicted first")
    args = parser.parse_args()
    clock = Clock(0.05)
    with precision(args.dtype):
        for name in args.layers:
            time_tiles(name, args, clock)


if __name__ == "__main__":
    main()
