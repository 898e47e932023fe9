"""Makes kernels for the emulator's own tests."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from probes import Kernel, probe_source

from tconv3d import emulator
from tconv3d.planning.launch import Constants, Launch


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Kernel]:
    """make(body, ...) -> a kernel to call with tensors: `args.x[i]` are its int* or float*."""

    def make(
        body: str,
        *,
        grid: tuple[int, int, int] = (1, 1, 1),
        threads: int = 32,
        shared_bytes: int = 0,
        type: str = "int",
        before: str = "",
        constants: Constants = (),
        order: str | None = None,
    ) -> Kernel:
        (tmp_path / "probe.cuh").write_text(probe_source(body, type, before))
        scalars = struct.pack("q", 0)
        constants = (("kThreads", threads), ("kMinBlocks", 1), *constants)
        launch = Launch("probe", constants, grid, threads, shared_bytes, ("a", "b", "c"), scalars)
        run = emulator.prepare(launch, order, kernels=tmp_path)

        def call(*tensors: torch.Tensor, previous: Callable[[], None] | None = None) -> None:
            addresses = [tensor.data_ptr() for tensor in tensors]
            run((*addresses, *[0] * (3 - len(addresses))), previous)

        return call

    return make
