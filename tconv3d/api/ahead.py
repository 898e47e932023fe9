"""`compile_ahead` compiles the kernels that future calls will launch, before the first call.

The calls are planned exactly as the executor will plan them, and kernels that are not in the disk cache are compiled
in several processes. No GPU is needed.

This module knows nothing of what a plan computes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..planning.launch import Constants, Launch
from ..planning.problem import Device, Pass
from ..runtime import compiler, plain
from . import survey
from .explain import checked_layer, find_gpu, launches
from .modules import ConvTranspose3dReLUGroupNorm

MOST_PROCESSES = 8


def compile_ahead(
    layer: torch.nn.ConvTranspose3d | ConvTranspose3dReLUGroupNorm,
    *inputs: Tensor | Sequence[int],
    gradients: bool = True,
    gpu: str | None = None,
) -> int:
    """Compiles the kernels that a layer will launch for these inputs, and returns their number.

    >>> tconv3d.compile_ahead(layer, (2, 64, 32, 32, 32), (1, 64, 160, 160, 160))

    An input is a tensor, possibly on the meta device, or a shape. The first volume of a layer in a process gets a
    build chosen for itself; all later volumes choose between this build and a few typical ones. Therefore pass the
    input of the first call first.

    gradients: also compile the backward passes. gpu: a name (`tconv3d.gpus.GPUS`) or a compute capability, to fill
    the cache for another machine; None means the GPU of this machine.
    """
    convolution = checked_layer(layer)
    if not inputs:
        raise TypeError(
            "compile_ahead() expected at least one input (a tensor or its shape) after the layer, but got none"
        )
    if gpu is None and not torch.cuda.is_available():
        raise RuntimeError("compile_ahead compiles for the present GPU, and there is none: name one, gpu='H200'")
    passes = tuple(Pass) if gradients else (Pass.FORWARD,)
    needed: list[Launch] = []
    device, _ = find_gpu(gpu, survey.weight_of(convolution))
    for input in inputs:
        needed += launches(layer, input, device, passes)
    return fill_cache(needed, device)


# NVRTC compiles one kernel at a time per process, so several processes run this program. `multiprocessing` is not
# used, because its processes import the caller's script, which may lack a `__main__` guard.
_PROGRAM = "import sys; from tconv3d.api.ahead import compile_described; compile_described(sys.stdin.read())"

Kernels = tuple[tuple[str, Constants], ...]


def fill_cache(launches: Iterable[Launch], device: Device) -> int:
    """Compiles the kernels of launches, in several processes, and returns their number.

    Compile errors are ignored here: the same kernel fails again, with a message, when it is launched.
    """
    return fill_cache_with(((launch.kernel, launch.constants) for launch in launches), device)


def fill_cache_with(wanted: Iterable[tuple[str, Constants]], device: Device) -> int:
    """Compiles kernels in several processes, as `fill_cache` does for launches."""
    kernels = tuple(dict.fromkeys(wanted))
    count = min(MOST_PROCESSES, os.cpu_count() or 1, len(kernels))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arch = compiler.architecture(device.compiled_capability)
    workers: list[subprocess.Popen[bytes]] = []
    if count == 1:
        compile_all(kernels, arch)
        return len(kernels)
    try:
        for i in range(count):
            quiet = subprocess.DEVNULL
            command = [sys.executable, "-c", _PROGRAM]
            workers.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=environment)
            )
            stream = workers[-1].stdin
            assert stream is not None
            with contextlib.suppress(BrokenPipeError), stream:
                stream.write(plain.dumps((kernels[i::count], arch)).encode())
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    return len(kernels)


def compile_described(text: str) -> None:
    """Compiles the kernels that a JSON text describes, in a process that `fill_cache` started."""
    compile_all(*plain.loads(text, tuple[Kernels, str]))


def compile_all(kernels: Kernels, arch: str) -> None:
    for name, constants in kernels:
        with contextlib.suppress(compiler.CompileError):
            compiler.compile(name, constants, arch)
