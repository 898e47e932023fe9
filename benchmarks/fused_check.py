"""Times the fused block (ConvTranspose3d, ReLU, GroupNorm) beside PyTorch's layers.

    python benchmarks/fused_check.py --json fused.json
    python benchmarks/fused_check.py --only task --no-torch

The reference task is timed, forward and as a training step, beside eager PyTorch and `torch.compile` in the same
process, with the peak memory of a step and with its parts. Times are medians of CUDA events with a cold L2 cache. The
error of a norm of values with a large mean is told too. The documents' tables are filled from the JSON file. Results
are checked by `tconv3d verify` and by the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tconv3d
from tconv3d.families.norm.planner import Wanted
from tconv3d.tools import tasks
from tconv3d.tools.bench.accuracy import relative_error
from tconv3d.tools.bench.precision import DTYPES
from tconv3d.tools.bench.results import describe_machine, write_json
from tconv3d.torch_ops import executor, norm_executor
from tconv3d.torch_ops.clock import Clock

SECTIONS = ("large_mean", "parts", "task")


def set_precision(name: str) -> None:
    """Sets the precision of float32 convolutions for all threads, without restoring it."""
    torch.backends.cudnn.conv.fp32_precision = "tf32" if name == "tf32" else "ieee"  # type: ignore[attr-defined]


def large_mean() -> dict[str, float]:
    """Returns the errors of ours and of PyTorch's float32 for values of mean 1e4 and deviation 1 before the norm."""
    set_precision("float32")
    x = torch.randn(2, 8, 32, 32, 32, device="cuda") + 1e4
    weight = torch.zeros(8, 8, 1, 1, 1, device="cuda")
    weight[torch.arange(8), torch.arange(8)] = 1
    expected = torch.nn.functional.group_norm(x.double(), 4)
    ours = tconv3d.conv_transpose3d_relu_group_norm(x, weight, None, 4)
    theirs = torch.nn.functional.group_norm(x, 4)
    return {"ours": relative_error(ours, expected), "torch": relative_error(theirs, expected)}


def step(model: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(model(x), [x, *parameters], grad)


def peak_bytes(run: Callable[[], Any]) -> int:
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def time_task(dtype: str, clock: Clock, torch_too: bool, compiled: bool) -> dict[str, Any]:
    task = tasks.load("relu_group_norm")
    set_precision(dtype)
    x = task.get_inputs()[0].to("cuda", DTYPES[dtype])
    theirs = task.Model(*task.get_init_inputs()).to("cuda", DTYPES[dtype])
    ours = task.ModelNew(*task.get_init_inputs()).to("cuda", DTYPES[dtype])
    ours.load_state_dict(theirs.state_dict())
    last = torch.channels_last_3d
    ways: dict[str, tuple[Any, nn.Module, Tensor, bool]] = {"ours": (ours, ours, x, False)}
    if torch_too:
        ways |= {
            "eager": (theirs, theirs, x, False),
            "eager, benchmark": (theirs, theirs, x, True),
            "eager, channels-last": (theirs, theirs, x.contiguous(memory_format=last), True),
        }
    if torch_too and compiled:
        ways["compile"] = (torch.compile(theirs), theirs, x, True)
    found: dict[str, Any] = {}
    for name, (call, model, input, benchmark) in ways.items():
        torch.backends.cudnn.benchmark = benchmark
        try:
            with torch.no_grad():
                times = {"forward_ms": clock(lambda call=call, input=input: call(input))}
                grad = torch.randn_like(call(input))
            leaf = input.detach().requires_grad_()
            parameters = list(model.parameters())

            def run(call: Any = call, p: list[Tensor] = parameters, x: Tensor = leaf, g: Tensor = grad) -> None:
                step(call, p, x, g)

            times["step_ms"] = clock(run)
            found[name] = {**times, "step_peak_bytes": peak_bytes(run)}
        except Exception as error:
            found[name] = {"failed": f"{error!r:.500}"}
        print(dtype, name, found[name], flush=True)
    torch.backends.cudnn.benchmark = False
    return found


def time_parts(dtype: str, clock: Clock) -> dict[str, float]:
    """Returns the milliseconds of each part of our forward and backward pass."""
    task = tasks.load("relu_group_norm")
    set_precision(dtype)
    x = task.get_inputs()[0].to("cuda", DTYPES[dtype])
    model = task.ModelNew(*task.get_init_inputs()).to("cuda", DTYPES[dtype])
    w = model.conv_transpose.weight.detach()
    gamma, beta = model.group_norm.weight.detach(), model.group_norm.bias.detach()
    one, none = (1, 1, 1), (0, 0, 0)
    settings = (one, none, none, 1, one)
    r, statistics = executor.forward_with_statistics(x, w, None, 8, 1e-5, settings)
    dy = torch.randn_like(r)
    everything = Wanted(True, True, False)
    dz = norm_executor.gradient(dy, r, statistics, gamma, gamma.dtype, everything)[0]
    size = tuple(x.shape[2:])
    return {
        "convolution": clock(lambda: executor.forward(x, w, None, settings)),
        "with ReLU": clock(lambda: executor.forward(x, w, None, settings, relu=True)),
        "with ReLU and statistics": clock(lambda: executor.forward_with_statistics(x, w, None, 8, 1e-5, settings)),
        "normalize in place": clock(lambda: norm_executor.normalize(r, statistics, gamma, beta, r, r.dtype)),
        "normalize": clock(lambda: norm_executor.normalize(r, statistics, gamma, beta, None, r.dtype)),
        "norm gradient": clock(lambda: norm_executor.gradient(dy, r, statistics, gamma, gamma.dtype, everything)),
        "input gradient": clock(lambda: executor.input_grad(dz, w, size, settings)),
        "weight gradient": clock(lambda: executor.weight_grad(dz, x, (3, 3, 3), settings)),
        "copy of the result": clock(lambda: dy.copy_(dz)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=0.15, help="seconds per timing")
    parser.add_argument("--dtype", nargs="+", default=["tf32", "bfloat16"])
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-torch", action="store_true", help="time ours alone")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    args = parser.parse_args()
    command = " ".join(["python", "benchmarks/fused_check.py", *sys.argv[1:]])
    found: dict[str, Any] = {"machine": describe_machine(), "origin": f"one run of `{command}`"}

    def save() -> None:
        if args.json:
            write_json(found, args.json)

    if "large_mean" in args.only:
        found["large_mean"] = large_mean()
        print("large mean", found["large_mean"], flush=True)
    clock = Clock(args.budget)
    if "parts" in args.only:
        found["parts"] = {dtype: time_parts(dtype, clock) for dtype in args.dtype}
        print("parts", json.dumps(found["parts"], indent=1), flush=True)
        save()
    if "task" in args.only:
        found["task"] = {}
        for dtype in args.dtype:
            found["task"][dtype] = time_task(dtype, clock, not args.no_torch, not args.no_compile)
            save()


if __name__ == "__main__":
    main()
