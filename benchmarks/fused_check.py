"""Checks and times the fused block (ConvTranspose3d, ReLU, GroupNorm) beside PyTorch's layers.

    python benchmarks/fused_check.py --json fused.json
    python benchmarks/fused_check.py --only checks task --no-torch

Various layers and their gradients are checked against float64 first. Then the reference task is timed, forward and as
a training step, beside eager PyTorch and `torch.compile` in the same process, with the peak memory of a step, its
parts, and the convolution with ReLU beside the plain one. Times are medians of CUDA events with a cold L2 cache. The
documents' tables are filled from the JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tconv3d
from tconv3d.families.norm.planner import Wanted
from tconv3d.tools import tasks
from tconv3d.tools.bench.precision import DTYPES
from tconv3d.tools.bench.results import describe_machine, write_json
from tconv3d.torch_ops import executor, norm_executor
from tconv3d.torch_ops.clock import Clock

SECTIONS = ("checks", "parts", "relu", "task")
# Outputs of the convolution closer to zero than this many standard deviations may change their sign by rounding.
IN_DOUBT = 1e-4
# Largest accepted relative error of a whole tensor against float64.
TOLERANCE = {"tf32": 1e-3, "float16": 3e-3, "bfloat16": 2e-2, "float64": 1e-12}


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    out_channels: int
    kernel: int
    norm_groups: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    bias: bool = True
    affine: bool = True
    dtype: str = "tf32"
    channels_last: bool = False


CASES = {
    "task": Case((2, 64, 32, 32, 32), 128, 3, 8, bias=False),
    "task, channels-last": Case((2, 64, 32, 32, 32), 128, 3, 8, channels_last=True),
    "task, bf16": Case((2, 64, 32, 32, 32), 128, 3, 8, dtype="bfloat16"),
    "up-convolution": Case((2, 64, 24, 24, 24), 32, 2, 8, 2),
    "one channel per group, bf16, channels-last": Case(
        (2, 32, 15, 17, 19), 32, 3, 32, 2, 1, dtype="bfloat16", channels_last=True
    ),
    "one group, fp16": Case((3, 32, 9, 10, 11), 48, 3, 1, 2, 1, dtype="float16"),
    "groups, not affine": Case((2, 64, 12, 12, 12), 96, 3, 12, 1, 1, 4, affine=False),
    "march": Case((1, 48, 40, 40, 40), 24, 3, 8),
    "small volume, many items": Case((9, 128, 2, 2, 2), 64, 3, 16, 2, 1),
    "few outputs": Case((2, 32, 20, 20, 20), 4, 3, 2, 2, 1),
    "float64": Case((2, 8, 7, 8, 9), 12, 3, 3, 2, 1, dtype="float64"),
    "odd volume, depthwise": Case((2, 24, 11, 12, 13), 24, 3, 6, groups=24),
}


def set_precision(name: str) -> None:
    """Sets the precision of float32 convolutions for all threads, without restoring it."""
    torch.backends.cudnn.conv.fp32_precision = "tf32" if name == "tf32" else "ieee"  # type: ignore[attr-defined]


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def to_tf32(tensor: Tensor) -> Tensor:
    """Rounds float32 to the nearest TF32 numbers, whose products are exact, so that no output changes its sign."""
    if tensor.dtype is not torch.float32:
        return tensor
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def layers(case: Case) -> tuple[nn.Module, nn.Sequential]:
    """Returns our block and PyTorch's layers in float64, with equal random parameters."""
    settings: dict[str, Any] = {"stride": case.stride, "padding": case.padding, "groups": case.groups}
    sizes = case.shape[1], case.out_channels, case.kernel
    ours = tconv3d.ConvTranspose3dReLUGroupNorm(
        *sizes, case.norm_groups, bias=case.bias, affine=case.affine, **settings
    ).to("cuda", DTYPES[case.dtype])
    with torch.no_grad():
        ours.conv_transpose.weight.copy_(to_tf32(ours.conv_transpose.weight.detach()))
    if case.affine:
        nn.init.normal_(ours.group_norm.weight, 1, 0.5)
        nn.init.normal_(ours.group_norm.bias)
    theirs = nn.Sequential(
        nn.ConvTranspose3d(*sizes, bias=case.bias, **settings),
        nn.ReLU(),
        nn.GroupNorm(case.norm_groups, case.out_channels, affine=case.affine),
    ).to("cuda", torch.float64)
    names = {"conv_transpose": "0", "group_norm": "2"}
    state = {f"{names[k.split('.')[0]]}.{k.split('.')[1]}": v.double() for k, v in ours.state_dict().items()}
    theirs.load_state_dict(state)
    return ours, theirs


def check(case: Case) -> dict[str, Any]:
    """Returns the relative errors, and whether repeated runs agree bit for bit."""
    ours, theirs = layers(case)
    x = to_tf32(torch.randn(case.shape, device="cuda").to(DTYPES[case.dtype]))
    if case.channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    leaf, exact = x.requires_grad_(), x.detach().double().requires_grad_()
    before = theirs[0](exact)
    expected = theirs[1:](before)
    grad = torch.randn(expected.shape, device="cuda").to(x.dtype)
    # The gradient is zero where rounding may change the ReLU's mask, so that no result depends on it there.
    grad[before.abs() < IN_DOUBT * before.std()] = 0
    expected.backward(grad.double())
    runs = []
    for _ in range(2):
        torch.full((expected.numel(),), float("nan"), device="cuda")  # poisons the memory that is allocated next
        y = ours(leaf)
        runs.append([y.detach(), *torch.autograd.grad(y, [leaf, *ours.parameters()], grad)])
    with torch.no_grad():
        runs.append([ours(leaf)])
    names = ["y", "dx", *(name for name, _ in ours.named_parameters())]
    references = [expected.detach(), exact.grad, *(p.grad for p in theirs.parameters())]
    errors = {n: relative_error(a, b) for n, a, b in zip(names, runs[0], references, strict=True) if b is not None}
    same = all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=False))
    return {"errors": errors, "reproducible": same, "right": max(errors.values()) < TOLERANCE[case.dtype] and same}


def check_all() -> dict[str, Any]:
    def safe(case: Case) -> dict[str, Any]:
        try:
            return {**asdict(case), **check(case)}
        except Exception as error:
            return {**asdict(case), "failed": f"{error!r:.500}", "right": False}

    set_precision("tf32")
    with ThreadPoolExecutor(12) as pool:  # compiling takes most of the time
        return dict(zip(CASES, pool.map(safe, CASES.values()), strict=True))


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
    ways: dict[str, tuple[Any, nn.Module, Tensor, bool]] = {
        "ours": (ours, ours, x, False),
    }
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


def relu_alone(dtype: str, clock: Clock) -> dict[str, dict[str, float]]:
    set_precision(dtype)
    found = {}
    for name, shape, out, kernel, stride in (
        ("task", (16, 64, 32, 32, 32), 128, 3, 1),
        ("up-convolution", (2, 64, 64, 64, 64), 32, 2, 2),
        ("march", (4, 48, 96, 96, 96), 24, 3, 1),
    ):
        x = torch.randn(shape, device="cuda").to(DTYPES[dtype])
        w = torch.randn(shape[1], out, kernel, kernel, kernel, device="cuda").to(DTYPES[dtype])
        ways = {"plain_ms": tconv3d.conv_transpose3d, "relu_ms": tconv3d.conv_transpose3d_relu}
        times: dict[str, list[float]] = {way: [] for way in ways}
        with torch.no_grad():
            for _ in range(5):  # the ways alternate, because the GPU's clock changes over time
                for way, call in ways.items():
                    times[way].append(clock(lambda call=call, x=x, w=w, s=stride: call(x, w, stride=s)))
        found[name] = {way: statistics.median(several) for way, several in times.items()}
    return found


def main() -> int:
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

    if "checks" in args.only:
        found["checks"], found["large_mean"] = check_all(), large_mean()
        for name, row in found["checks"].items():
            print("right" if row["right"] else "WRONG", name, row.get("failed", row.get("errors")), flush=True)
        print("large mean", found["large_mean"], flush=True)
        save()
    clock = Clock(args.budget)
    for section, measure in (("parts", time_parts), ("relu", relu_alone)):
        if section in args.only:
            found[section] = {dtype: measure(dtype, clock) for dtype in args.dtype}
            print(section, json.dumps(found[section], indent=1), flush=True)
            save()
    if "task" in args.only:
        found["task"] = {}
        for dtype in args.dtype:
            found["task"][dtype] = time_task(dtype, clock, not args.no_torch, not args.no_compile)
            save()
    return int(not all(row["right"] for row in found.get("checks", {}).values()))


if __name__ == "__main__":
    sys.exit(main())
