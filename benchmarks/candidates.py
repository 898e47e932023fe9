"""Times every tile the planner of the direct family considers, beside its prediction: is the first one the best?

python benchmarks/candidates.py grouped_strided depthwise_64 --dtype float32 [--input-grad]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d import checks, direct_planner, executor, launcher
from tconv3d.bench.layers import LAYERS, Layer
from tconv3d.bench.precision import DTYPES, LAYOUTS, precision
from tconv3d.clock import Clock
from tconv3d.problem import Pass, Problem


def problem_of(layer: Layer, x: Tensor, w: Tensor, tf32: bool) -> Problem:
    geometry = checks.check_channels(w, layer.settings)
    y = executor.output_strides(geometry, x, w)
    kind = executor.DTYPES[x.dtype]
    strides = x.stride(), w.stride(), y
    return Problem(Pass.FORWARD, geometry, layer.batch, layer.size, kind, *strides, bias=True, tf32=tf32)


def time_tiles(name: str, dtype: str, layout: str, input_grad: bool, most: int, clock: Clock) -> None:
    layer = LAYERS[name]
    x = layer.input(DTYPES[dtype], "cuda").contiguous(memory_format=LAYOUTS[layout])
    w, b = (torch.randn(shape, device="cuda").to(x.dtype) for shape in (layer.weight_shape, layer.out_channels))
    w = w.contiguous(memory_format=LAYOUTS[layout])
    problem = problem_of(layer, x, w, dtype == "tf32")
    y = torch.empty_strided(layer.output_shape, problem.output, dtype=x.dtype, device="cuda")
    if input_grad:
        problem = replace(problem, which=Pass.INPUT_GRAD, bias=False)
    side = direct_planner.Side.of(problem)
    first, last = (y, x) if input_grad else (x, y)
    operands = (first.data_ptr(), w.data_ptr(), 0 if input_grad else b.data_ptr(), last.data_ptr())
    stream = torch.cuda.current_stream().cuda_stream
    for tile in direct_planner.tiles(side)[:most]:
        plan = direct_planner.plan_gather(side, executor.device_of(x), tile)
        call = launcher.prepare(plan.launches[0], x.get_device())
        ms = clock(lambda call=call: call(operands, stream))
        predicted = direct_planner._cycles(side, tile)
        print(f"{name:20} {ms:8.3f} ms  predicted {predicted:9.2f}  {tile}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--layout", default="contiguous", choices=LAYOUTS)
    parser.add_argument("--input-grad", action="store_true")
    parser.add_argument("--most", type=int, default=8, help="candidates to time per layer, best predicted first")
    args = parser.parse_args()
    clock = Clock(0.05)
    with precision(args.dtype):
        for name in args.layers:
            time_tiles(name, args.dtype, args.layout, args.input_grad, args.most, clock)


if __name__ == "__main__":
    main()
