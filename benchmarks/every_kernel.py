"""Launches every kernel on small layers, for tools such as compute-sanitizer.

compute-sanitizer --launch-timeout 0 --target-processes application-only python benchmarks/every_kernel.py
compute-sanitizer --launch-timeout 0 --target-processes application-only --tool racecheck \
    python benchmarks/every_kernel.py lines groups --multiprocessors 2 --kind tf32 strict

All layers run unless some are named. Missing kernels are compiled first, for all layers at once, in processes that
the tool does not watch; the watched process therefore uses the GPU late, and `--launch-timeout 0` turns the tool's
time-out off. Planned for few multiprocessors, a block has several tiles of a small layer, and its ring buffers wrap
around. At the end the script prints the kernels that it launched, and those that it did not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tconv3d
from tconv3d.planning.launch import Launch
from tconv3d.runtime import launcher, sources
from tconv3d.torch_ops import executor

# Each entry is a name with an input shape, a weight shape, and settings of conv_transpose3d.
LAYERS = {
    "plain": ((2, 16, 5, 9, 11), (16, 24, 3, 3, 3), {}),
    "strided": ((2, 16, 4, 7, 9), (16, 16, 3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "lines": ((1, 32, 6, 8, 32), (32, 32, 3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "lines, odd rows": ((1, 32, 6, 8, 32), (32, 32, 3, 3, 3), {"stride": 2, "padding": 1}),
    "upsample": ((1, 32, 5, 6, 9), (32, 16, 2, 2, 2), {"stride": 2}),
    "upsample, wider": ((2, 64, 8, 8, 12), (64, 32, 2, 2, 2), {"stride": 2}),
    "upsample, many channels": ((2, 320, 16, 16, 16), (320, 160, 2, 2, 2), {"stride": 2}),
    "gan": ((3, 64, 4, 4, 4), (64, 32, 4, 4, 4), {"stride": 2, "padding": 1}),
    "wide": ((2, 384, 8, 8, 8), (384, 64, 3, 3, 3), {"stride": 2, "padding": 1}),
    "last tiles divided": ((1, 192, 8, 4, 8), (192, 128, 3, 3, 3), {"padding": 1}),  # use with --multiprocessors 4
    "few outputs": ((1, 16, 5, 9, 20), (16, 1, 4, 4, 4), {"stride": 2, "padding": 1}),
    "groups": ((2, 32, 4, 6, 9), (32, 8, 3, 3, 3), {"stride": 2, "padding": 1, "groups": 4}),
    "small groups": ((2, 32, 4, 6, 21), (32, 8, 3, 3, 3), {"stride": 2, "padding": 1, "groups": 4}),
    "norm read once": ((6, 8, 24, 64, 64), (8, 16, 1, 1, 1), {}),
    "norm out of L2": ((6, 8, 23, 63, 61), (8, 16, 1, 1, 1), {}),
    "depthwise": ((1, 6, 5, 5, 9), (6, 1, 3, 3, 3), {"groups": 6, "dilation": 2}),
}
KINDS = {"tf32": torch.float32, "strict": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}


def watch() -> set[str]:
    """Returns a set to which every launch from now on adds the name of its kernel."""
    launched: set[str] = set()
    original = launcher.prepare_all

    def prepare_all(steps: Sequence[tuple[Launch, Sequence[int]]], device_index: int) -> launcher.Run:
        launched.update(launch.kernel for launch, _ in steps)
        return original(steps, device_index)

    launcher.prepare_all = prepare_all
    return launched


def run(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    settings: dict[str, Any],
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> None:
    """Runs a layer forward with a reused packed weight, then forward and backward, without and with a GroupNorm."""
    channels = w_shape[1] * settings.get("groups", 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    x = random(*x_shape).contiguous(memory_format=layout).requires_grad_()
    w, *vectors = (each.requires_grad_() for each in (random(*w_shape), *(random(channels) for _ in range(3))))
    norm_groups = 2 if channels % 2 == 0 else 1
    with torch.no_grad():
        for _ in range(3):  # the second call packs the weight for later calls, the third reuses it
            tconv3d.conv_transpose3d(x, w, vectors[0], **settings)
    for y in (
        tconv3d.conv_transpose3d(x, w, vectors[0], **settings),
        tconv3d.conv_transpose3d_relu_group_norm(x, w, vectors[0], norm_groups, *vectors[1:], **settings),
    ):
        y.backward(torch.randn_like(y))
    run_tails(x, w, settings)


def run_tails(x: Tensor, w: Tensor, settings: dict[str, Any]) -> None:
    """Runs a layer with what may follow it: operands in its own kernel, and a norm with passes behind it."""
    groups = settings.get("groups", 1)
    layer = nn.ConvTranspose3d(x.shape[1], w.shape[1] * groups, tuple(w.shape[2:]), **settings).to(x.device, x.dtype)
    layer.to(memory_format=torch.channels_last_3d if x.stride(1) == 1 else torch.contiguous_format)
    norm = nn.BatchNorm3d(layer.out_channels).to(x.device, x.dtype)
    with torch.no_grad():
        skip = torch.randn_like(layer(x))
    tails: tuple[Callable[..., Tensor], ...] = (
        lambda z, skip: F.leaky_relu(z * norm.weight.view(-1, 1, 1, 1) + skip, 0.1),
        lambda z, skip: F.silu(norm(z)) + skip,
        lambda z, skip: F.max_pool3d(F.silu(z + skip), 2).softmax(1),
    )
    for tail in tails:
        block = tconv3d.fuse(layer, tail)
        with torch.no_grad():
            block(x, skip)
        y = block(x, skip)
        torch.autograd.grad(y, [x, *layer.parameters()], torch.randn_like(y))


def plan_for(multiprocessors: int | None) -> None:
    """Makes planners assume this number of multiprocessors, unless it is None."""
    if multiprocessors:
        there = executor.device_of
        executor.device_of = lambda tensor: replace(there(tensor), multiprocessors=multiprocessors)


def run_all(name: str, kinds: Sequence[str], layouts: Sequence[str]) -> None:
    if name == "plain":
        run(*LAYERS[name], torch.float64, torch.contiguous_format)
    for kind in kinds:
        torch.backends.cudnn.conv.fp32_precision = "ieee" if kind == "strict" else "tf32"
        for layout in layouts:
            run(*LAYERS[name], KINDS[kind], LAYOUTS[layout])
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(LAYERS), metavar="layer")
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--multiprocessors", type=int, help="to plan for, instead of those that there are")
    options = parser.parse_args()
    run_layer = partial(run_all, kinds=options.kind, layouts=options.layout)
    started = {"initializer": plan_for, "initargs": (options.multiprocessors,)}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), **started) as pool:
        list(pool.map(run_layer, options.names))
    plan_for(options.multiprocessors)
    launched = watch()
    for name in options.names:
        run_layer(name)
        print(name, flush=True)
    headers = sources.all_headers().values()
    kernels = {path.stem for path in headers if "__device__ void run(" in path.read_text()}
    print("kernels:", ", ".join(sorted(launched)))
    print("not launched:", ", ".join(sorted(kernels - launched)) or "none")


if __name__ == "__main__":
    main()
