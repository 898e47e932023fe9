"""Times every tile the planner of the direct family considers, beside its prediction: is the first one the best?

python benchmarks/candidates.py grouped_strided depthwise_64 --dtype fp32 [--input-grad]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_check import DTYPES, Clock, problem_of, set_precision
from layers import LAYERS

from tconv3d import direct_planner, executor, launcher
from tconv3d.problem import Pass, Problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES))
    parser.add_argument("--layout", default="cf", choices=["cf", "cl"])
    parser.add_argument("--input-grad", action="store_true")
    parser.add_argument("--most", type=int, default=8, help="candidates to time per layer, best predicted first")
    args = parser.parse_args()
    set_precision(args.dtype)
    clock = Clock(0.05)
    for name in args.layers:
        layer = LAYERS[name]
        x, w, b = layer.tensors(DTYPES[args.dtype])
        if args.layout == "cl":
            x, w = (t.to(memory_format=torch.channels_last_3d) for t in (x, w))
        problem = problem_of(layer, x, w, args.dtype)
        y = torch.empty_strided(
            (layer.batch, layer.out_channels, *problem.output_size), problem.output, dtype=x.dtype, device="cuda"
        )
        if args.input_grad:
            fields = {**problem.__dict__, "which": Pass.INPUT_GRAD, "bias": False}
            problem = Problem(**fields)
        side = direct_planner.Side.of(problem)
        first, last = (y, x) if args.input_grad else (x, y)
        operands = (
            first.data_ptr(),
            w.data_ptr(),
            0 if args.input_grad or b is None else b.data_ptr(),
            last.data_ptr(),
        )
        for tile in direct_planner.tiles(side)[: args.most]:
            plan = direct_planner.plan_gather(side, executor.device_of(x), tile)
            call = launcher.prepare(plan.launches[0], x.get_device())
            stream = torch.cuda.current_stream().cuda_stream
            ms = clock(lambda call=call, operands=operands, stream=stream: call(operands, stream))
            predicted = direct_planner._cycles(side, tile)
            print(f"{name:20} {ms:8.3f} ms  predicted {predicted:9.2f}  {tile}", flush=True)


if __name__ == "__main__":
    main()
