"""Checks and times the layers named on the command line, in one process; a table last, JSON beside it.

    python benchmarks/gpu_check.py large_volume gan_128_64_16 --dtype tf32 bf16 --backward --torch --json out.json

Correctness comes first: fresh random inputs, poisoned results, float64 as the reference (on the first and the last
sample). Times are medians of CUDA events with L2 flushed before each run, ours and PyTorch's in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from layers import LAYERS, Layer

import tconv3d
from tconv3d import checks, executor, planner
from tconv3d.problem import Pass, Problem

DTYPES = {
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
# Largest accepted relative error of a whole tensor against float64.
TOLERANCE = {"tf32": 1e-3, "fp32": 3e-6, "fp16": 2e-3, "bf16": 1e-2, "fp64": 1e-13}


def set_precision(name: str) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32" if name == "tf32" else "ieee"


class Clock:
    """Median time of a function in milliseconds, with L2 flushed before every run."""

    def __init__(self, budget_s: float) -> None:
        self.flush = torch.empty(256 * 1024 * 1024, dtype=torch.uint8, device="cuda")
        self.budget_s = budget_s

    def __call__(self, run: Callable[[], Any]) -> float:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once = time.perf_counter() - start + 1e-4
        count = max(5, min(50, int(self.budget_s / once)))
        events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(count)]
        for begin, end in events:
            self.flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)


def measure_ceilings(clock: Clock) -> dict[str, float]:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    found = {"copy_TBps": 2 * source.numel() / clock(lambda: target.copy_(source)) / 1e9}
    for name in ("fp32", "tf32", "fp16", "bf16"):
        torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
        a, b = (torch.randn(8192, 8192, device="cuda").to(DTYPES[name]) for _ in range(2))
        found[f"{name}_TFLOPS"] = 2 * 8192**3 / clock(lambda a=a, b=b: a @ b) / 1e9
    found["fp64_TFLOPS"] = 67.0
    return found


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def check(layer: Layer, x: Tensor, w: Tensor, b: Tensor | None, backward: bool) -> dict[str, float]:
    """Relative errors of ours and of PyTorch's against float64; the gradients only of the whole batch."""
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    if b is not None:
        leaves.append(b.detach().requires_grad_())
    bias = leaves[2] if b is not None else None
    torch.full((x.numel(),), nan, device="cuda")  # poison what the allocator hands out next
    y = tconv3d.conv_transpose3d(leaves[0], leaves[1], bias, *layer.settings)
    errors = {}
    ends = [0] if layer.batch == 1 else [0, layer.batch - 1]
    exact = F.conv_transpose3d(x[ends].double(), w.double(), None if b is None else b.double(), *layer.settings)
    errors["forward"] = relative_error(y[ends], exact)
    theirs = F.conv_transpose3d(x, w, b, *layer.settings)
    errors["torch_forward"] = relative_error(theirs[ends], exact)
    del theirs, exact
    if backward:
        grad = torch.randn_like(y)
        got = torch.autograd.grad(y, leaves, grad)
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        total = [torch.zeros_like(d) for d in doubles]
        for n in range(layer.batch):  # sample by sample: float64 of everything would not fit
            part = F.conv_transpose3d(
                doubles[0][n : n + 1], doubles[1], doubles[2] if b is not None else None, *layer.settings
            )
            for sum_, term in zip(total, torch.autograd.grad(part, doubles, grad[n : n + 1].double()), strict=True):
                sum_ += term
        for name, ours, reference in zip(("dx", "dw", "db"), got, total, strict=False):
            errors[name] = relative_error(ours, reference)
    return errors


def time_torch(
    clock: Clock, layer: Layer, x: Tensor, w: Tensor, b: Tensor | None, backward: bool
) -> dict[str, float]:
    """PyTorch's variants: as it comes, cudnn.benchmark, channels-last."""
    times: dict[str, float] = {}
    for name, benchmark, layout in (
        ("default", False, None),
        ("benchmark", True, None),
        ("channels_last", True, torch.channels_last_3d),
    ):
        torch.backends.cudnn.benchmark = benchmark
        args = (x, w) if layout is None else (x.to(memory_format=layout), w.to(memory_format=layout))
        times[name] = clock(lambda args=args: F.conv_transpose3d(*args, b, *layer.settings))
        if backward:
            times[f"{name}_backward"] = clock(backward_of(F.conv_transpose3d, *args, b, layer))
    torch.backends.cudnn.benchmark = False
    return times


def backward_of(function: Any, x: Tensor, w: Tensor, b: Tensor | None, layer: Layer) -> Callable[[], Any]:
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    if b is not None:
        leaves.append(b.detach().requires_grad_())
    y = function(leaves[0], leaves[1], leaves[2] if b is not None else None, *layer.settings)
    grad = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)


def problem_of(layer: Layer, x: Tensor, w: Tensor, name: str) -> Problem:
    convolution = tuple((v,) * 3 if isinstance(v, int) and i != 3 else v for i, v in enumerate(layer.settings))
    geometry = checks.check_channels(w, convolution)
    y = executor.output_strides(geometry, x, w)
    return Problem(
        Pass.FORWARD, geometry, layer.batch, tuple(x.shape[2:]), executor.DTYPES[x.dtype], x.stride(), w.stride(), y,
        bias=True, tf32=name == "tf32",
    )  # fmt: skip


def floor_ms(problem: Problem, name: str, ceilings: dict[str, float], products: int = 1) -> float:
    moving = problem.bytes / ceilings["copy_TBps"] / 1e9
    return max(moving, products * problem.flops / ceilings[f"{name}_TFLOPS"] / 1e9)


def host_times() -> dict[str, float]:
    """Microseconds of host time of a repeated call."""
    x = torch.randn(1, 4, 4, 4, 4, device="cuda")
    found = {}
    for grad in (False, True):
        for name, kind in (("torch", torch.nn.ConvTranspose3d), ("ours", tconv3d.ConvTranspose3d)):
            module = kind(4, 4, 3).cuda().requires_grad_(grad)
            for _ in range(50):
                module(x)
            torch.cuda.synchronize()
            samples = []
            for _ in range(20):
                start = time.perf_counter()
                for _ in range(50):
                    module(x)
                samples.append((time.perf_counter() - start) / 50 * 1e6)
                torch.cuda.synchronize()
            found[f"{name}{'_grad' if grad else ''}_us"] = statistics.median(samples)
    return found


def run(
    name: str, dtype: str, layout: str, args: argparse.Namespace, clock: Clock, ceilings: dict[str, float]
) -> dict[str, Any]:
    layer = LAYERS[name]
    set_precision(dtype)
    x, w, b = layer.tensors(DTYPES[dtype], bias=not args.no_bias)
    if layout == "cl":
        x, w = (t.to(memory_format=torch.channels_last_3d) for t in (x, w))
    problem = problem_of(layer, x, w, dtype)
    row: dict[str, Any] = {"layer": name, "dtype": dtype, "layout": layout}
    plan = planner.plan(problem, executor.device_of(x))
    row |= {"kernel": plan.kernel, "tile": plan.tile, "floor_ms": floor_ms(problem, dtype, ceilings)}
    if not args.no_check:
        row["errors"] = check(layer, x, w, b, args.backward)
        row["correct"] = all(e <= TOLERANCE[dtype] for k, e in row["errors"].items() if not k.startswith("torch"))
    if not args.no_time:
        row["ms"] = clock(lambda: tconv3d.conv_transpose3d(x, w, b, *layer.settings))
        if args.backward:
            row["backward_floor_ms"] = floor_ms(problem, dtype, ceilings, products=2)
            row["backward_ms"] = clock(backward_of(tconv3d.conv_transpose3d, x, w, b, layer))
        if args.torch:
            row["torch"] = time_torch(clock, layer, x, w, b, args.backward)
    return row


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'layer':22} {'dtype':5} {'lay':3} {'kernel':8} {'error':>8} {'floor':>7} {'ms':>8} {'x floor':>7} "
          f"{'torch':>7} {'best':>7} {'bwd fl':>7} {'bwd ms':>8} {'best':>7}  errors")  # fmt: skip
    for row in rows:
        if "failed" in row:
            print(f"{row['layer']:22} {row['dtype']:5} {row['layout']:3} FAILED {row['failed']}")
            continue
        errors, theirs = row.get("errors", {}), row.get("torch", {})
        best = min((v for k, v in theirs.items() if "backward" not in k), default=nan)
        best_backward = min((v for k, v in theirs.items() if "backward" in k), default=nan)
        ms = row.get("ms", nan)
        print(
            f"{row['layer']:22} {row['dtype']:5} {row['layout']:3} {row['kernel']:8} "
            f"{errors.get('forward', nan):8.1e} {row['floor_ms']:7.3f} {ms:8.3f} {ms / row['floor_ms']:7.2f} "
            f"{theirs.get('default', nan):7.3f} {best:7.3f} {row.get('backward_floor_ms', nan):7.3f} "
            f"{row.get('backward_ms', nan):8.3f} {best_backward:7.3f}  "
            + " ".join(f"{k}={v:.1e}" for k, v in errors.items() if k != "forward")
            + ("" if row.get("correct", True) else "  WRONG")
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", default=list(LAYERS), help="default: all")
    parser.add_argument("--dtype", nargs="+", default=["tf32"], choices=list(DTYPES))
    parser.add_argument("--layout", nargs="+", default=["cf"], choices=["cf", "cl"], help="channels first, last")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--torch", action="store_true", help="time PyTorch's variants too")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-bias", action="store_true")
    parser.add_argument("--host", action="store_true", help="host time of a repeated call")
    parser.add_argument("--budget", type=float, default=0.15, help="seconds per timing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**31)
    clock = Clock(args.budget)
    ceilings = measure_ceilings(clock)
    rows = []
    for name in args.layers or LAYERS:
        for dtype in args.dtype:
            for layout in args.layout:
                try:
                    rows.append(run(name, dtype, layout, args, clock, ceilings))
                except Exception as error:
                    rows.append({"layer": name, "dtype": dtype, "layout": layout, "failed": f"{error!r:.300}"})
                torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "ceilings": ceilings,
        "host": host_times() if args.host else {},
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print({k: round(v, 2) for k, v in (ceilings | result["host"]).items()})
    show(rows)
    return int(any("failed" in row or not row.get("correct", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
