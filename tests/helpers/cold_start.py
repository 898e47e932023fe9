"""Jobs for process groups: ranks that start together with an empty cache."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tconv3d
from tconv3d.runtime import cache


def first_call(directory: str, victim: int | None = None) -> int:
    """Runs a layer on the kernels with an empty cache; returns how many kernels this rank has compiled.

    Names of compiled kernels become lines in the file `compiled`. The victim dies while it compiles its first kernel,
    and the other ranks begin when it does.
    """
    root = Path(directory)
    compiled = root / "compiled"
    os.environ["TCONV3D_CACHE_DIR"] = str(root / "cache")
    rank, original, own = dist.get_rank(), cache.path, 0

    def counted(key: str, suffix: str, build: Callable[[], bytes]) -> Any:
        def note() -> bytes:
            nonlocal own
            own += 1
            with open(compiled, "a") as file:
                file.write(f"{key}\n")
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return build()

        return original(key, suffix, note)

    cache.path = counted  # the emulator compiles by it
    deadline = time.monotonic() + 60
    while victim not in (None, rank) and not compiled.exists():
        assert time.monotonic() < deadline, "the victim never came"
        time.sleep(0.01)
    if victim is None:
        dist.barrier()
    try:
        layer = tconv3d.ConvTranspose3d(2, 2, 2, stride=2, dtype=torch.float64)
        x = torch.ones(1, 2, 2, 2, 2, dtype=torch.float64)
        with tconv3d.use_backend("emulator"), torch.no_grad():
            found = layer(x)
        torch.testing.assert_close(found, torch.nn.ConvTranspose3d.forward(layer, x))
    finally:
        cache.path = original
    return own
