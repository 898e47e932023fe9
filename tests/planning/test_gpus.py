"""Every listed GPU: its names, its limits, plans that fit them, and kernels that the emulator runs as that device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused_blocks import TOLERANCE, Block, errors, run, three_layers
from layers import Layer, check, to_tf32
from preferred import forgetting

import tconv3d
from tconv3d import emulator
from tconv3d.planning import gpus, planner
from tconv3d.planning.gpus import GPUS, Gpu
from tconv3d.planning.launch import Launch
from tconv3d.planning.problem import Device, Norm, Plan
from tconv3d.runtime import compiler
from tconv3d.tools.bench.layers import LAYERS
from tconv3d.tools.bench.problems import problems_of_layer
from tconv3d.torch_ops import executor

# Maximum shared memory per block in bytes, as CUDA's programming guide lists it by compute capability.
SHARED = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
KINDS = [(dtype, layout) for dtype in ("tf32", "bfloat16") for layout in ("contiguous", "channels_last_3d")]
# Kernels with instructions of Hopper alone (wgmma).
HOPPERS = ("halo", "hopper", "rows_weight_grad", "unfold", "gather", "up")
RECORD = os.environ.get("TCONV3D_TEST_RECORD")  # directory for lists of kernels, which are compiled later


def test_every_gpu_has_the_limits_of_its_compute_capability() -> None:
    for name, gpu in GPUS.items():
        device = gpu.device
        assert device.name == name and device.shared_bytes == 1024 * SHARED[device.capability]
        assert 50 < device.multiprocessors < 200 and 0.2 < gpu.copy < 10
        # The rates of tensor cores are multiples of the rate of multiply-adds: 16 bits twice that of TF32.
        assert gpu.half == pytest.approx(2 * gpu.tf32, rel=0.03) and gpu.tf32 >= gpu.float32
    assert {gpu.device.capability for gpu in GPUS.values()} == set(SHARED)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA H200 as RTX 4090", "H200"),
        ("Tesla V100", None),
    ],
)
def test_a_gpu_is_known_by_whole_words_of_the_drivers_name(driver: str, name: str | None) -> None:
    found = gpus.known(Device(driver, (8, 0), 1, 1))
    assert (None if found is None else found.device.name) == name
    if name is not None and " as " not in driver:
        assert gpus.find(driver) is found


def launches(plan: Plan) -> Iterator[Launch]:
    for each in (plan, plan.kept):
        yield from each.launches if each is not None else ()


def part(gpu: Gpu, thorough: bool) -> Iterator[tuple[str, str, str]]:
    """Names, types and layouts of layers: a different part for each GPU, or all."""
    number = list(GPUS).index(gpu.device.name)
    for index, name in enumerate(LAYERS):
        for kind, (dtype, layout) in enumerate(KINDS):
            if thorough or (index % 5 == number % 5 and kind == number % len(KINDS)):
                yield name, dtype, layout


@pytest.mark.parametrize("name", GPUS)
def test_plans_fit_the_gpu(name: str, pytestconfig: pytest.Config) -> None:
    device, found = GPUS[name].device, dict[tuple[str, str], Launch]()
    for layer, dtype, layout in part(GPUS[name], bool(pytestconfig.getoption("--thorough"))):
        asked = problems_of_layer(LAYERS[layer], dtype, layout)
        fused = replace(asked[0], relu=True, norm=Norm(1, 1e-5))
        plans = [planner.plan(asked[0], device), planner.plan_gradients(tuple(asked[1:]), device)]
        for plan in (*plans, planner.plan(fused, device)):
            for launch in launches(plan):
                fits(launch, device)
                found.setdefault((launch.kernel, repr(launch.constants)), launch)
    assert found
    if RECORD is not None:
        Path(RECORD).mkdir(parents=True, exist_ok=True)
        planned = [(each.kernel, each.constants) for each in found.values()]
        text = {"arch": compiler.architecture(device.capability), "kernels": planned}
        Path(RECORD, f"planned-{name.replace(' ', '-')}.json").write_text(json.dumps(text))


def fits(launch: Launch, device: Device) -> None:
    constants = dict(launch.constants)
    assert launch.shared_bytes <= device.shared_bytes and 0 < launch.threads <= 1024
    assert launch.grid[0] < 2**31 and max(launch.grid[1:]) < 2**16
    if device.capability != (9, 0):
        assert not launch.kernel.startswith(HOPPERS), launch.kernel
        assert constants.get("kClusterSize", 1) == 1, launch.kernel
    assert device.capability >= (9, 0) or not (launch.overlaps or constants.get("kOverlaps")), launch.kernel


SMALL = Layer(16, 8, (3, 4, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), batch=1)


@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("name", ["A100", "A10", "L4", "H100 PCIe", "GB200", "RTX 5090"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_run_as_on_the_gpu(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator stands for a GPU of each compute capability, with all of its multiprocessors and shared memory."""
    monkeypatch.setattr(executor, "EMULATED", GPUS[name].device)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    operands = SMALL.operands(dtype, "cpu")
    operands = [to_tf32(each) for each in operands] if dtype is torch.float32 else operands
    with forgetting(), tconv3d.use_backend("emulator"):
        check(SMALL, dtype, "cpu", operands, tf32=dtype is torch.float32)


@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("name", ["A100", "A10", "L4", "H100 PCIe", "GB200", "RTX 5090"])
def test_the_fused_block_runs_as_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, and on every GPU the convolution's kernel leaves the moments for the statistics."""
    monkeypatch.setattr(executor, "EMULATED", GPUS[name].device)
    block = Block(SMALL, 2, dtype=torch.bfloat16)
    module, x = block.module("cpu"), block.input("cpu")
    with forgetting(), tconv3d.use_backend("emulator"):
        got = run(module, x)
    found = errors(got, run(three_layers(module), x.double()))
    assert all(error < TOLERANCE[torch.bfloat16] for error in found), found
    problem = problems_of_layer(LAYERS["relu_group_norm"], "bfloat16", "contiguous")[0]
    plan = planner.plan(replace(problem, relu=True, norm=Norm(8, 1e-5)), GPUS[name].device)
    assert plan.moments > 0 and "channel_moments" not in [launch.kernel for launch in plan.launches]


def test_a_device_that_is_told_to_be_another_has_its_own_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.AS, "RTX 4090")
    told = gpus.as_told(replace(GPUS["H200"].device, name="NVIDIA H200"))
    assert told.name == "NVIDIA H200 as RTX 4090" and gpus.known(told) is GPUS["H200"]
