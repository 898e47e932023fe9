"""Fixtures: where kernels run (the GPU if there is one, else the emulator), and a record of what was compiled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import tconv3d
from tconv3d import emulator
from tconv3d.planning.launch import Launch

# The same geometries in every run: what was compiled for the emulator is compiled for the GPUs afterwards.
hypothesis.settings.register_profile(
    "tests", derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), print_blob=True
)
hypothesis.settings.load_profile("tests")

# There is a test process for each core: OpenMP's threads would mostly wait for each other's. The tests' children too.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests of what is compiled in the background start that themselves.
os.environ.setdefault("TCONV3D_BACKGROUND", "0")

RECORD = os.environ.get("TCONV3D_TEST_RECORD")  # a directory: the kernels this session ran in the emulator


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def ours(device: str) -> Iterator[str]:
    """Our kernels on the GPU, or in the emulator; strict float32, because the reference is float64."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with tconv3d.use_backend("cuda" if device == "cuda" else "emulator"):
        yield device
    torch.backends.cudnn.conv.fp32_precision = before


@pytest.fixture(autouse=True)
def restored_precision() -> Iterator[None]:
    """PyTorch's switch for TF32 is the process's: a test that turns it must not turn it for the next."""
    before = torch.backends.cudnn.conv.fp32_precision
    yield
    torch.backends.cudnn.conv.fp32_precision = before


@pytest.fixture(autouse=True, scope="session")
def record_launches() -> Iterator[None]:
    if RECORD is None:
        yield
        return
    seen: set[tuple[str, object]] = set()
    prepare = emulator.prepare

    def recording(launch: Launch, *arguments: object, **keywords: object) -> object:
        if not arguments and not keywords:  # a kernel of the package, not one that a test wrote
            seen.add((launch.kernel, launch.constants))
        return prepare(launch, *arguments, **keywords)  # type: ignore[arg-type]

    emulator.prepare = recording  # type: ignore[assignment]
    yield
    emulator.prepare = prepare
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    path = Path(RECORD) / f"launches-{worker}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sorted(seen, key=repr)))
