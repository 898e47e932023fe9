"""Defines fixtures: kernels run on the GPU if there is one, else in the emulator, and launches can be recorded."""

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

# Every run draws equal geometries, so that the recorded kernels, which are compiled for GPUs later, do not change.
hypothesis.settings.register_profile(
    "tests", derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), print_blob=True
)
hypothesis.settings.load_profile("tests")

# Each core has a test process, so further OpenMP threads, in the processes that tests start too, would only compete.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Compiling in the background is off; tests of it turn it on themselves.
os.environ.setdefault("TCONV3D_BACKGROUND", "0")

RECORD = os.environ.get("TCONV3D_TEST_RECORD")  # directory for a list of the kernels run in the emulator


# A test with many parameters runs with every sixth combination in make test, or with more or fewer in these files;
# `pytest --thorough` (make test-thorough) runs all. Tests marked `thorough` run there alone.
OTHERS = 6
THINNED = {
    **dict.fromkeys(("halo", "mma", "weight_grad", "far", "narrow", "channel_sum", "few_launches"), 9),
    **dict.fromkeys(("broken_twins", "fuzz", "mutants", "races", "errors", "wrong_arguments"), 3),
    **dict.fromkeys(("alignment", "conv_transpose3d", "input_grad", "moments"), 8),
    **dict.fromkeys(("depthwise", "few_channels", "few_outputs", "tiles"), 10),
    **dict.fromkeys(("fused", "reductions"), 5),
    **dict.fromkeys(("up", "up_backward", "up_grad", "rows"), 8),
    **dict.fromkeys(("reuse", "fuse", "folding", "windows"), 4),
    **dict.fromkeys(("export", "export_chain", "specialise", "bench"), 10),
    **dict.fromkeys(("group_backward", "unfold"), 5),
    **dict.fromkeys(("docs", "compatibility", "house_rules"), 1),
}
FEW = 3  # combinations of one test that are all run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every combination of parameters")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps every third to tenth combination of parameters of long tests, unless somebody asks for single tests."""
    if config.getoption("--thorough") or any("::" in argument for argument in config.args):
        return
    groups: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        groups.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    left_out = [
        item
        for (path, _), group in groups.items()
        for i, item in enumerate(group)
        if len(group) > FEW and i % THINNED.get(path.stem.removeprefix("test_"), OTHERS)
    ]
    left_out += [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in gone]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def strict_float32(restored_precision: None) -> None:
    """No TF32, which the emulator rounds to as a GPU does: references are float64."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"


@pytest.fixture
def ours(device: str, strict_float32: None) -> Iterator[str]:
    """Selects our kernels on the GPU or in the emulator."""
    with tconv3d.use_backend("cuda" if device == "cuda" else "emulator"):
        yield device


@pytest.fixture(autouse=True)
def restored_precision() -> Iterator[None]:
    """Restores the switches for TF32, which are global to the process, after every test.

    Tests of kernels in TF32 want it for layers with groups too.
    """
    before = torch.backends.cudnn.conv.fp32_precision
    tconv3d.allow_tf32_in_groups()
    yield
    torch.backends.cudnn.conv.fp32_precision = before
    tconv3d.allow_tf32_in_groups(False)


@pytest.fixture(autouse=True, scope="session")
def record_launches() -> Iterator[None]:
    if RECORD is None:
        yield
        return
    seen: set[tuple[str, object]] = set()
    prepare = emulator.prepare

    def recording(launch: Launch, *arguments: object, **keywords: object) -> object:
        if not arguments and not keywords:  # further arguments may name a test's own kernel
            seen.add((launch.kernel, launch.constants))
        return prepare(launch, *arguments, **keywords)  # type: ignore[arg-type]

    emulator.prepare = recording  # type: ignore[assignment]
    yield
    emulator.prepare = prepare
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    path = Path(RECORD) / f"launches-{worker}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sorted(seen, key=repr)))
