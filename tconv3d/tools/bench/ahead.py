"""Plans all layers and compiles their kernels in several processes before the first layer is timed.

Planning and compiling take seconds per layer and would disturb a timing that runs at the same time. Both store their
results in the disk cache. The processes do not use the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeAlias

import torch
from torch import nn

from tconv3d.api.explain import launches, tail_launches
from tconv3d.api.fuse import FusedTail
from tconv3d.planning.launch import Constants, Launch
from tconv3d.planning.problem import Device, Pass
from tconv3d.runtime import compiler

from .cases import build_with_tail
from .layers import Layer
from .precision import DTYPES, LAYOUTS, in_layout, precision

Kernel: TypeAlias = tuple[str, Constants]
Work: TypeAlias = tuple[Layer, str, str, str]  # layer, precision, layout, and the name of a tail or ""
MOST_PROCESSES = 12
WORTH_IT = 3  # smallest number of layers for which starting processes takes less time than it saves


def compile_all(
    work: Sequence[Work], passes: Collection[Pass], device: Device, done: Callable[[], None]
) -> set[Kernel]:
    """Compiles the kernels that the layers will launch, calls `done` after each layer, and returns the kernels."""
    found: set[Kernel] = set()
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(work))
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    try:
        waiting = [pool.submit(compile_one, *each, passes, device) for each in work]
        for future in as_completed(waiting):
            found |= future.result()
            done()
    finally:
        pool.shutdown(cancel_futures=True)  # an interruption cancels the layers that have not started
    return found


def compile_one(
    layer: Layer, dtype: str, layout: str, tail: str, passes: Collection[Pass], device: Device
) -> set[Kernel]:
    """Compiles and returns the kernels of one layer; an error is ignored here and reported by the layer's run."""
    found: set[Kernel] = set()
    try:
        for launch in kernels(layer, dtype, layout, tail, passes, device):
            compiler.compile(launch.kernel, launch.constants, compiler.architecture(device.compiled_capability))
            found.add((launch.kernel, launch.constants))
    except (RuntimeError, ValueError, ImportError):
        pass
    return found


def kernels(
    layer: Layer, dtype: str, layout: str, tail: str, passes: Collection[Pass], device: Device
) -> tuple[Launch, ...]:
    """Returns the launches of a layer's convolution in a precision and layout, alone and with a tail."""
    if tail:
        case = build_with_tail(layer, tail, dtype, layout, "meta", "fuse")
        convolution, x = case.convolution, case.x
    else:
        model = in_layout(layer.module(DTYPES[dtype], "meta"), layout)
        x = layer.input(DTYPES[dtype], "meta").contiguous(memory_format=LAYOUTS[layout])
        (convolution,) = (module for module in model.modules() if isinstance(module, nn.ConvTranspose3d))
    with precision(dtype):
        found = launches(convolution, x, device, passes)
        if tail:
            assert isinstance(case.ours, FusedTail)
            found += tail_launches(case.ours, x, case.extra, device)
    return found
