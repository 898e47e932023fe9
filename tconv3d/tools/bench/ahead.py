"""Plans all layers and compiles their kernels before the first of them is timed, in as many processes as pay.

Both take seconds for a layer, and both leave what they found in the disk cache. Done while something is timed they
would disturb the clock, so they come first. The processes do not touch the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeAlias

import torch
from torch import nn

from tconv3d.api.explain import launches
from tconv3d.planning.launch import Constants, Launch
from tconv3d.planning.problem import Device, Pass
from tconv3d.runtime import compiler

from .layers import Layer
from .precision import DTYPES, LAYOUTS, in_layout, precision

Kernel: TypeAlias = tuple[str, Constants]
Work: TypeAlias = tuple[Layer, str, str]  # with its precision and layout
MOST_PROCESSES = 12
WORTH_IT = 3  # layers: starting the processes takes as long as compiling fewer


def compile_all(
    work: Sequence[Work], passes: Collection[Pass], device: Device, done: Callable[[], None]
) -> set[Kernel]:
    """Fills the cache with what the layers will launch; calls `done` after each. Says which kernels it was."""
    found: set[Kernel] = set()
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(work))
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    try:
        waiting = [pool.submit(compile_one, *each, passes, device) for each in work]
        for future in as_completed(waiting):
            found |= future.result()
            done()
    finally:
        pool.shutdown(cancel_futures=True)  # after an interruption what has not begun is not begun
    return found


def compile_one(layer: Layer, dtype: str, layout: str, passes: Collection[Pass], device: Device) -> set[Kernel]:
    """The kernels of one layer, compiled. What fails here fails again where the layer runs, and is reported there."""
    found: set[Kernel] = set()
    try:
        for launch in kernels(layer, dtype, layout, passes, device):
            compiler.compile(launch.kernel, launch.constants, compiler.architecture(device.compiled_capability))
            found.add((launch.kernel, launch.constants))
    except (RuntimeError, ValueError, ImportError):
        pass
    return found


def kernels(layer: Layer, dtype: str, layout: str, passes: Collection[Pass], device: Device) -> tuple[Launch, ...]:
    """What a layer will launch in a precision and layout."""
    model = in_layout(layer.module(DTYPES[dtype], "meta"), layout)
    x = layer.input(DTYPES[dtype], "meta").contiguous(memory_format=LAYOUTS[layout])
    (convolution,) = (module for module in model.modules() if isinstance(module, nn.ConvTranspose3d))
    with precision(dtype):
        return launches(convolution, x, device, passes)
