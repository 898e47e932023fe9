"""`precompile`: what it packs is what calls launch, in a process that can neither compile nor write a cache."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_model import SHAPES, model
from places import PYTHONPATH
from preferred import forgetting
from torch import nn

import tconv3d
from tconv3d import emulator
from tconv3d.api import deployed
from tconv3d.planning import planner
from tconv3d.planning.gpus import GPUS, device_named
from tconv3d.planning.launch import Constants
from tconv3d.planning.problem import Device
from tconv3d.runtime import background, compiler, packs
from tconv3d.torch_ops import choosing, executor

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
needs_compiler = pytest.mark.skipif(
    pytest.importorskip("importlib.util").find_spec("cuda.core") is None, reason="compiling needs cuda-core"
)


@pytest.fixture(autouse=True)
def no_packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(packs.VARIABLE, raising=False)
    packs.unload()
    yield
    packs.unload()


# A process with the model of this file, in which nothing can be compiled or written.
ELSEWHERE = """
import sys, warnings
import torch, tconv3d
from packed_model import SHAPES, model
from tconv3d import emulator
from tconv3d.runtime import cache
warnings.simplefilter("error")
assert not emulator.available()
path = sys.argv[1]
"""


def elsewhere(script: str, path: Path, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    empty = tmp_path / "empty"
    empty.mkdir(exist_ok=True)
    settings = {"PATH": str(empty), "TCONV3D_CACHE_DIR": "/proc/no/such/place", "PYTHONPATH": PYTHONPATH}
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", packs.VARIABLE)}
    command = [sys.executable, "-c", ELSEWHERE + textwrap.dedent(script), str(path)]
    return subprocess.run(
        command, env=kept | settings | environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not emulator.available():
        pytest.skip("the emulator needs a C++ compiler")
    path = tmp_path_factory.mktemp("packed") / "model.tconv3d"
    written = tconv3d.precompile(model(), *SHAPES, path=path, gpus="emulator", dtypes=["float32"])
    assert written.kernels > 5 and written.bytes == path.stat().st_size
    return path


RUN = """
def run(shape):
    y = torch.randn(shape, generator=torch.Generator().manual_seed(1)), model().double()
    x, exact = y[0].double().requires_grad_(), y[1]
    ours, found = model(), y[0].clone().requires_grad_()
    with tconv3d.use_backend("torch"):
        expected = exact(x)
        expected.square().sum().backward()
    with tconv3d.use_backend("emulator"):
        with torch.no_grad():
            for _ in range(3):  # the second keeps the packed weight, the third finds it
                ours(found)
        result = ours(found)
        result.square().sum().backward()
    pairs = [(result, expected), (found.grad, x.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(ours.parameters(), exact.parameters(), strict=True)]
    for a, b in pairs:
        assert float((a - b).detach().norm() / b.detach().norm()) < 1e-5
torch.backends.cudnn.conv.fp32_precision = "ieee"
"""


def test_a_packed_model_runs_without_compiler_and_cache(packed: Path, tmp_path: Path) -> None:
    """Both volumes, in the order in which they were not packed, forward and backward, against float64.

    A type that is not packed is then an error that names the pack.
    """
    script = RUN + "for shape in reversed(SHAPES): run(shape)\ntorch.set_default_dtype(torch.float64)\nprint('ran')\n"
    script += "tconv3d.use_backend('emulator')\nmodel()(torch.zeros(1, 4, 1, 1, 1))"
    done = elsewhere(script, packed, tmp_path, TCONV3D_PRECOMPILED=str(packed))
    assert done.stdout == "ran\n", done.stderr
    assert "found none: install g++" in done.stderr and f"not in the pack {packed}: " in done.stderr
    assert "for emulator (9.0, 4 multiprocessors)" in done.stderr


@needs_emulator
def test_explain_says_which_kernels_come_from_a_pack(packed: Path) -> None:
    layer = model()[3]
    with (
        tconv3d.use_backend("emulator"),
        forgetting(),
    ):  # other tests may have met the layer with another volume first
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        x = torch.zeros(1, 4, 4, 6, 8)
        assert "from" not in str([each.packed for each in tconv3d.explain(layer, x).passes])
        tconv3d.load_precompiled(packed)
        explained = tconv3d.explain(layer, x)
        assert f"1 of 1 kernels from the pack {packed}" in str(explained)
        assert all(each.packed.split()[0] == each.packed.split()[2] != "0" for each in explained.passes)
        other = tconv3d.explain(tconv3d.ConvTranspose3d(3, 5, 3), torch.zeros(1, 3, 4, 4, 4))
    assert other.passes[0].packed == "0 of 1 kernels from loaded packs"


@needs_compiler
@pytest.mark.parametrize(("gpu", "arch"), [("H200", "sm_90a"), ("A100", "sm_80")])
def test_packed_cubins_are_the_compilers(tmp_path: Path, gpu: str, arch: str) -> None:
    layer, path = tconv3d.ConvTranspose3d(32, 4, 1), tmp_path / "layer.tconv3d"
    written = tconv3d.precompile(layer, (1, 32, 2, 3, 4), path=path, gpus=[gpu], dtypes=["float32"], backward=False)
    (variant,) = deployed.variants(deployed.layers_of(layer, [(1, 32, 2, 3, 4)])[0], ["float32"], None, False)
    kernels = {(each.kernel, each.constants) for each in deployed.launches([variant], GPUS[gpu].device)}
    assert written.kernels == len(kernels) > 0
    cubins = {each: compiler.compile(*each, arch).cubin for each in kernels}
    pack = packs.load(path)
    for (kernel, constants), cubin in cubins.items():
        entry = pack.read(compiler.packed_name(kernel, constants, arch))
        assert entry is not None and entry.endswith(cubin) and cubin.startswith(b"\x7fELF")
        assert compiler.compile(kernel, constants, arch).cubin == cubin
        what = {each.name: each.what for each in pack.index.entries}
        assert f"{kernel} for {arch}, NVRTC" in what[compiler.packed_name(kernel, constants, arch)]


Kernels = set[tuple[str, Constants]]


def kernels_in_order(calls: list[deployed.Variant], device: Device) -> Kernels:
    """The kernels that a process launches which gets these calls in this order, with all gradients."""
    planner.forget()
    found: Kernels = set()
    for call in calls:
        plans = planner.plan(call.forward, device), planner.plan_gradients(call.problems[1:], device)
        found |= {(launch.kernel, launch.constants) for plan in plans for launch in plan.launches}
    return found


@pytest.mark.parametrize(("gpu", "volumes"), [("H200", 2), ("A100", 3)])
def test_volumes_may_come_in_any_order(gpu: str, volumes: int) -> None:
    layer = tconv3d.ConvTranspose3d(32, 16, 3, stride=2, padding=1)
    shapes = [(1, 32, 4, 4, 8), (1, 32, 32, 32, 32), (8, 32, 12, 12, 12)]
    found = deployed.layers_of(layer, shapes[:volumes])
    calls = deployed.variants(found[0], [torch.bfloat16], ["channels_last_3d"], True)
    device = GPUS[gpu].device
    with planner.aside():
        have = {(each.kernel, each.constants) for each in deployed.launches(calls, device)}
        for order in permutations(calls):
            assert kernels_in_order(list(order), device) <= have
        planner.forget()


def test_offers_that_the_first_call_times_are_packed() -> None:
    """Nobody has calibrated the A100, so that the first call there times the best few offers."""
    (layer,) = deployed.layers_of(tconv3d.ConvTranspose3d(16, 8, 2, stride=2), [(1, 16, 8, 8, 8)])
    (call,) = deployed.variants(layer, ["bfloat16"], None, False)
    device = GPUS["A100"].device
    with planner.aside():
        have = {(each.kernel, each.constants) for each in deployed.launches([call], device)}
        timed = choosing.contending_plans({call.forward.which: call.forward}, device)
        assert len(timed) > 1
        assert {(each.kernel, each.constants) for plan in timed for each in plan.launches} <= have
        planner.forget()


def test_every_volume_after_a_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Volumes and batch sizes that were not named launch packed kernels if a named volume came before them."""
    monkeypatch.setattr(background, "EDGES", (8,))  # fewer volumes, which take less time to plan
    monkeypatch.setattr(background, "BATCHES", (1,))
    monkeypatch.setattr(background, "RESTS", (0, 1))
    layer, device = tconv3d.ConvTranspose3d(16, 2, 1), GPUS["A100"].device
    (found,) = deployed.layers_of(layer, [(1, 16, 4, 4, 8)])
    named = deployed.variants(found, ["bfloat16"], None, False)
    shapes = [(3, 16, 5, 6, 9), (1, 16, 40, 40, 40)]
    (others,) = deployed.layers_of(layer, shapes)
    with planner.aside():
        have = {(each.kernel, each.constants) for each in deployed.launches(named, device)}
        have |= set(deployed.launches_of_every_volume(named, device))
        for other in deployed.variants(others, ["bfloat16"], None, False):
            planner.forget()
            plans = [planner.plan(each.forward, device) for each in (*named, other)]
            assert {(launch.kernel, launch.constants) for plan in plans for launch in plan.launches} <= have
        planner.forget()


@pytest.mark.parametrize(
    ("name", "gpu"), [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100")]
)
def test_the_drivers_name_of_a_gpu_gives_the_kernels_of_its_listed_name(name: str, gpu: str) -> None:
    (layer,) = deployed.layers_of(tconv3d.ConvTranspose3d(16, 8, 2, stride=2), [(1, 16, 8, 8, 8)])
    calls = deployed.variants(layer, ["bfloat16"], None, True)
    listed = GPUS[gpu].device
    with planner.aside():
        assert kernels_in_order(calls, replace(listed, name=name)) == kernels_in_order(calls, listed)
        planner.forget()


def test_types_and_layouts_of_the_calls_or_as_told() -> None:
    found = deployed.layers_of(model(), [torch.zeros(SHAPES[0]).to(memory_format=torch.channels_last_3d), SHAPES[1]])
    assert [(each.name, each.relu, each.norm is None) for each in found] == [("0", True, False), ("3", False, True)]
    first = deployed.variants(found[0], None, None, True)
    assert [(each.shape, each.layout, each.forward.dtype) for each in first] == [
        ("1x4x2x3x4", "channels_last_3d", "float32"),
        ("2x4x2x2x2", "contiguous", "float32"),
    ]
    last = deployed.variants(replace(found[1], calls=found[1].calls[:1]), None, ["channels_last_3d"], True)[0]
    assert [each.which for each in last.turned] == [each.which for each in last.problems[1:]]
    assert last.turned[0].output[4] == 1 != last.problems[1].output[4] and first[0].turned == first[1].turned == ()
    assert first[0].forward.relu and first[0].forward.norm is not None and len(first[0].problems) == 3
    told = deployed.variants(found[1], ["tf32", "float32", torch.bfloat16], ["contiguous"], False)
    assert [(each.forward.dtype, each.forward.tf32) for each in told[:3]] == [
        ("float32", True),
        ("float32", False),
        ("bfloat16", False),
    ]
    assert all(len(each.problems) == 1 and each.layout == "contiguous" for each in told)


def test_a_shape_is_an_input_like_the_models_parameters() -> None:
    there = nn.Sequential(nn.Conv3d(2, 4, 1), nn.ConvTranspose3d(4, 2, 2)).to("meta", torch.bfloat16)
    (found,) = deployed.layers_of(there, [(1, 2, 3, 3, 3)])
    assert found.name == "1" and found.calls[0].shape == (1, 4, 3, 3, 3) and found.calls[0].dtype == torch.bfloat16


def test_an_output_size_that_a_call_asks_for_is_packed() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = tconv3d.ConvTranspose3d(2, 2, 3, stride=2, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x, output_size=[8, 8, 8])

    (found,) = deployed.layers_of(Sized(), [(1, 2, 4, 4, 4)])
    (call,) = deployed.variants(found, None, None, True)
    assert call.forward.output_size == (8, 8, 8)


def test_gpus_with_another_number_of_multiprocessors() -> None:
    assert device_named("H100,114") == replace(GPUS["H100"].device, multiprocessors=114)
    assert device_named("8.0").name == "A100"
    with pytest.raises(ValueError, match="A100,108"):
        device_named("H100,many")


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "reason"),
    [
        ((nn.Linear(2, 2),), {}, TypeError, "at least one input"),
        (("model", SHAPES[0]), {}, TypeError, "an nn.Module, but got"),
        ((nn.Linear(2, 2), (1, 2)), {}, ValueError, "no input reaches one"),
        ((nn.ConvTranspose3d(4, 4, 2), SHAPES[0]), {"dtypes": ["int8"]}, ValueError, "expected dtypes among"),
        ((nn.ConvTranspose3d(4, 4, 2), SHAPES[0]), {"layouts": ["nhwc"]}, ValueError, "expected layouts among"),
        ((nn.ConvTranspose3d(4, 4, 2), SHAPES[0]), {"gpus": ["H2000"]}, ValueError, "expected a GPU of"),
        ((nn.ConvTranspose3d(4, 4, 2), (1, 4, 0, 2, 2)), {}, RuntimeError, "Expected|expected|non-zero"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[object, ...], keywords: dict[str, object], error: type, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        tconv3d.precompile(*arguments, path=tmp_path / "pack", **{"gpus": "H200"} | keywords)  # type: ignore[arg-type]
    assert not (tmp_path / "pack").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is none: name one"):
        tconv3d.precompile(nn.ConvTranspose3d(4, 4, 2), SHAPES[0], path=tmp_path / "pack")


def test_packing_has_no_effect_on_later_calls(packed: Path) -> None:
    """The first volume that a process runs gets its own build, whatever was packed before."""
    before = dict(executor._tasks)
    layer = tconv3d.ConvTranspose3d(4, 2, 1)
    with planner.aside():
        planner.forget()
        (call,) = deployed.variants(deployed.layers_of(layer, [SHAPES[1]])[0], ["float32"], None, True)
        own = kernels_in_order([call], executor.EMULATED)
        planner.forget()
        tconv3d.precompile(layer, SHAPES[0], path=packed.with_name("other"), gpus="emulator", backward=False)
        assert {(e.kernel, e.constants) for e in planner.plan(call.forward, executor.EMULATED).launches} <= own
        planner.forget()
    assert executor._tasks == before


@needs_emulator
def test_a_pack_holds_measured_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What won on the machine that writes the pack is taken where it is loaded, without a measurement."""

    class Invented:
        """A clock by which each candidate takes longer than the next."""

        def __init__(self) -> None:
            self.count = 0

        def __call__(self, run: Any, *arguments: Any) -> float:
            self.count += 1
            return 10.0 / self.count

    def never(*arguments: Any) -> float:
        raise AssertionError("a packed winner is not measured again")

    layer = tconv3d.ConvTranspose3d(4, 6, 3, dtype=torch.float64)
    x, path = torch.randn(1, 4, 3, 3, 3, dtype=torch.float64), tmp_path / "layer.tconv3d"
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path / "here"))
    executor.forget()
    with tconv3d.use_backend("emulator"), torch.no_grad():
        with choosing.measured_by(Invented()):
            layer(x)
            written = tconv3d.precompile(layer, x, path=path, gpus="emulator", backward=False)
        index = packs.read(path).index
        assert sum(entry.name.endswith(".measured") for entry in index.entries) == 1 and written.choices >= 1
        monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path / "elsewhere"))
        executor.forget()
        tconv3d.load_precompiled(path)
        with choosing.measured_by(never):
            layer(x)
    executor.forget()
