"""Launches every kernel on small layers, for tools that watch a program on the GPU.

compute-sanitizer --tool memcheck python benchmarks/every_kernel.py
compute-sanitizer --tool racecheck python benchmarks/every_kernel.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tconv3d
from tconv3d import executor, planner
from tconv3d.problem import Plan

# name: input shape, weight shape, settings of conv_transpose3d
LAYERS = {
    "plain": ((2, 16, 5, 9, 11), (16, 24, 3, 3, 3), {}),
    "strided": ((2, 16, 4, 7, 9), (16, 16, 3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "upsample": ((1, 32, 5, 6, 9), (32, 16, 2, 2, 2), {"stride": 2}),
    "gan": ((3, 64, 4, 4, 4), (64, 32, 4, 4, 4), {"stride": 2, "padding": 1}),
    "few outputs": ((1, 16, 5, 9, 20), (16, 1, 4, 4, 4), {"stride": 2, "padding": 1}),
    "groups": ((2, 32, 4, 6, 9), (32, 8, 3, 3, 3), {"stride": 2, "padding": 1, "groups": 4}),
    "depthwise": ((1, 6, 5, 5, 9), (6, 1, 3, 3, 3), {"groups": 6, "dilation": 2}),
}


def main() -> None:
    kernels: set[str] = set()

    def watching(original: Callable[..., Plan]) -> Callable[..., Plan]:
        def watched(*arguments: object) -> Plan:
            plan = original(*arguments)
            kernels.update(launch.kernel for launch in plan.launches)
            return plan

        return watched

    for name in ("plan", "plan_gradients"):
        setattr(executor.planner, name, watching(getattr(planner, name)))
    for name, (x_shape, w_shape, settings) in LAYERS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for layout in (torch.contiguous_format, torch.channels_last_3d):
                x = torch.randn(x_shape, device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
                w = torch.randn(w_shape, device="cuda", dtype=dtype, requires_grad=True)
                groups = settings.get("groups", 1)
                b = torch.randn(w_shape[1] * groups, device="cuda", dtype=dtype, requires_grad=True)
                y = tconv3d.conv_transpose3d(x, w, b, **settings)
                y.backward(torch.randn_like(y))
        torch.cuda.synchronize()
        print(name, flush=True)
    print("kernels:", ", ".join(sorted(kernels)))


if __name__ == "__main__":
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    main()
