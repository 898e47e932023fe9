"""Compiles the kernels of all layers before the first of them is timed, several at a time.

NVRTC needs about a second for a kernel and runs in as many threads as there are cores. Compiling while something is
timed would disturb the clock, so it comes first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import torch
from torch import nn

from tconv3d import compiler
from tconv3d.explain import launches
from tconv3d.launch import Constants, Launch
from tconv3d.problem import Pass

from .layers import Layer
from .precision import DTYPES, LAYOUTS, in_layout, precision

Kernel = tuple[str, Constants]
MOST_THREADS = 12


def kernels(
    layers: Mapping[str, Layer], kinds: Sequence[tuple[str, str]], passes: Collection[Pass], gpu: str | None = None
) -> Iterator[Kernel]:
    """What the layers will launch in these precisions and layouts, each kernel once. `gpu` as for `explain`."""
    seen: set[Kernel] = set()
    for layer in layers.values():
        for dtype, layout in kinds:
            with precision(dtype):
                launched = {(each.kernel, each.constants) for each in _launches(layer, dtype, layout, passes, gpu)}
            yield from launched - seen
            seen |= launched


def _launches(layer: Layer, dtype: str, layout: str, passes: Collection[Pass], gpu: str | None) -> tuple[Launch, ...]:
    try:
        model = in_layout(layer.module(DTYPES[dtype], "meta"), layout)
        x = layer.input(DTYPES[dtype], "meta").contiguous(memory_format=LAYOUTS[layout])
        (convolution,) = (module for module in model.modules() if isinstance(module, nn.ConvTranspose3d))
        return launches(convolution, x, passes, gpu)
    except (RuntimeError, ValueError):  # it fails again where the layer is run, and is reported there
        return ()


def compile_all(wanted: Iterable[Kernel], arch: str, progress: Callable[[int, int], None]) -> int:
    """Puts the kernels into the cache and says how many. `progress` is told how many are done, and of how many.

    Planning holds Python's lock and compiling does not: one goes on beside the other. A kernel that cannot be
    compiled fails where it runs.
    """
    waiting: set[Future[compiler.Compiled]] = set()
    threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    try:
        for name, constants in wanted:
            waiting.add(threads.submit(compiler.compile, name, constants, arch))
            progress(sum(future.done() for future in waiting), len(waiting))
        for done, _ in enumerate(as_completed(waiting), 1):
            progress(done, len(waiting))
    finally:
        threads.shutdown(cancel_futures=True)  # after an interruption what has not begun is not begun
    return len(waiting)


def architecture() -> str:
    """Of the GPU at hand."""
    return compiler.architecture(torch.cuda.get_device_capability())
