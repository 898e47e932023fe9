"""`tune`: in the emulator with invented times, because what is measured is not what is tested; and on a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tconv3d
from tconv3d import emulator
from tconv3d.api.ahead import fill_cache
from tconv3d.api.explain import call_of, problems_of
from tconv3d.api.tune import Bench, Tuned, tune_pass
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.job import job_of
from tconv3d.planning.problem import Device, Problem
from tconv3d.runtime import cache, compiler, sources
from tconv3d.tools import cli
from tconv3d.tools.bench import run
from tconv3d.torch_ops import executor
from tconv3d.torch_ops.executor import Task

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
needs_gpu = pytest.mark.skipif(not run.have_gpu(), reason="measuring needs a GPU")

SHAPE = (1, 8, 2, 3, 5)
ROOT = Path(tconv3d.__file__).parents[1]
EXPLAIN = f"""
import torch, tconv3d
layer = tconv3d.ConvTranspose3d(8, 8, 2, stride=2, dtype=torch.float16)
with tconv3d.use_backend("emulator"):
    print(tconv3d.explain(layer, {SHAPE}))
"""


def small_layer() -> tconv3d.ConvTranspose3d:
    return tconv3d.ConvTranspose3d(8, 8, 2, stride=2, dtype=torch.float16)


def problem() -> Problem:
    return problems_of(*call_of(small_layer(), SHAPE))[0]


def invented(*times: float) -> Callable[[Callable[[], Any]], float]:
    """A clock that runs what it is given, and says what it was told to."""
    left = iter(times)

    def clock(run: Callable[[], Any]) -> float:
        run()
        return next(left)

    return clock


def forget() -> None:
    halo_planner.forget()
    executor.forget()


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of these tests' own, for all of them: nobody else's layers may be tuned, and builds take seconds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def untuned(builds: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In the emulator, with a cache of compiled builds, but no choices."""
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(builds))
    for suffix in (".json", halo_planner.TUNED):
        for file in (builds / cache.LAYOUT).glob(f"*{suffix}"):
            file.unlink()
    forget()
    with tconv3d.use_backend("emulator"):
        yield builds
    forget()


def tune(*times: float, make_task: Callable[..., Task] = executor.make_task) -> Tuned:
    """The present build and two others, by invented times: of these three, then of the first and the best."""
    return tune_pass(problem(), torch.empty(0, dtype=torch.float16), 2, invented(*times), make_task)


def explain_elsewhere(directory: Path) -> str:
    """By a process that was not there."""
    environment = {**os.environ, "TCONV3D_CACHE_DIR": str(directory), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", EXPLAIN]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@needs_emulator
def test_the_fastest_is_kept_for_all_processes(untuned: Path) -> None:
    layer = small_layer()
    before = tconv3d.explain(layer, SHAPE).passes[0]
    reported: list[Tuned] = []
    clock = invented(3.0, 4.0, 2.0, 3.0, 2.0)
    found = tconv3d.tune(
        layer, SHAPE, gradients=False, candidates=2, offers=False, report=reported.append, clock=clock
    )
    (forward,) = found
    assert found == reported
    assert (forward.changed, forward.before_ms, forward.ms) == (True, 3.0, 2.0)
    assert str(forward) == "forward: halo, 2 ms instead of 3 ms (3 builds tried)"
    assert [trial.ms for trial in forward.trials] == [3.0, 4.0, 2.0]
    assert forward.trials[0].build == before.tile

    after = tconv3d.explain(layer, SHAPE).passes[0]
    assert after.tile == forward.trials[2].build
    assert after.why == "Hopper's tensor cores, tuned: 2 ms instead of 3 ms for batch 1 of 2x3x5 on emulator"
    elsewhere = explain_elsewhere(untuned)
    assert after.why in elsewhere and after.tile in elsewhere

    x = torch.randn(SHAPE, dtype=torch.float16)
    expected = F.conv_transpose3d(x.double(), layer.weight.double(), layer.bias.double(), 2)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-3, atol=1e-3)


@needs_emulator
def test_a_running_process_uses_it_from_the_next_call(untuned: Path) -> None:
    layer, x = small_layer(), torch.randn(SHAPE, dtype=torch.float16)
    layer(x)
    (before,) = (task for key, task in executor._tasks.items() if key[0] is problem().which)
    assert tune(3.0, 2.0, 4.0, 3.0, 2.0).changed
    layer(x)
    (after,) = (task for key, task in executor._tasks.items() if key[0] is problem().which)
    assert after is not before


@needs_emulator
def test_what_another_version_tuned_is_not_forgotten_in_silence(
    untuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(3.0, 2.0, 4.0, 3.0, 2.0).changed
    assert cli.main(["cache"]) == 0
    assert "tune" not in capsys.readouterr().out
    monkeypatch.setattr(sources, "program", lambda name: "another version")
    assert cli.main(["cache"]) == 0
    assert "1 of the tuned layers were tuned with another version: tune them again" in capsys.readouterr().out


@needs_emulator
def test_a_damaged_entry_is_the_models_choice_again(untuned: Path) -> None:
    untuned_explanation = explain_elsewhere(untuned)
    assert tune(3.0, 2.0, 4.0, 3.0, 2.0).changed
    (file,) = (untuned / cache.LAYOUT).glob(f"*{halo_planner.TUNED}")
    file.write_bytes(file.read_bytes().replace(b'"slabs":', b'"slabs":7'))
    assert explain_elsewhere(untuned) == untuned_explanation
    forget()
    assert tconv3d.explain(small_layer(), SHAPE).passes[0].why == "Hopper's tensor cores"


@needs_emulator
@pytest.mark.parametrize(
    "times",
    [
        (3.0, 3.1, 3.2),
        (3.0, 2.9, 2.95, 3.0, 2.95),  # less than 3%
        (3.0, 2.0, 4.0, 2.0, 2.0),  # the first time was of a GPU not yet awake
    ],
)
def test_what_is_not_clearly_faster_changes_nothing(times: tuple[float, ...], untuned: Path) -> None:
    before = tconv3d.explain(small_layer(), SHAPE).passes[0]
    found = tune(*times)
    assert not found.changed and found.ms == found.before_ms
    assert "stays as it is" in str(found)
    forget()
    assert tconv3d.explain(small_layer(), SHAPE).passes[0] == before


def spoiled(number: int, spoil: Callable[[Task], Task]) -> Callable[..., Task]:
    """Makes tasks, and something else of the one of this number."""
    made = iter(range(100))
    return lambda *arguments: (spoil if next(made) == number else lambda task: task)(executor.make_task(*arguments))


def with_one_wrong_element(task: Task) -> Task:
    result = executor.OPERANDS[problem().which].index("y")

    def start(operands: tuple[int, ...], stream: int) -> None:
        task.start(operands, stream)
        ctypes.memset(operands[result] + 100, 0x54, 2)

    return replace(task, start=start)


def without_work(task: Task) -> Task:
    return replace(task, start=lambda operands, stream: None)


@needs_emulator
@pytest.mark.parametrize("spoil", [with_one_wrong_element, without_work])
def test_a_wrong_result_is_not_timed(spoil: Callable[[Task], Task], untuned: Path) -> None:
    found = tune(3.0, 2.0, 3.0, 2.0, make_task=spoiled(1, spoil))
    assert [trial.ms for trial in found.trials] == [3.0, None, 2.0]
    assert "its result is wrong" in found.trials[1].why_not
    assert found.changed and f"not {found.trials[1].build}: its result is wrong" in str(found)
    assert tconv3d.explain(small_layer(), SHAPE).passes[0].tile == found.trials[2].build


@needs_emulator
def test_a_present_build_that_fails_is_an_error(untuned: Path) -> None:
    with pytest.raises(RuntimeError, match="its result is wrong"):
        tune(1.0, 1.0, make_task=spoiled(0, without_work))


@needs_emulator
def test_what_does_not_fit_the_memory_is_left_out(untuned: Path) -> None:
    def fail(task: Task) -> Task:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 planets.\nOf 2 available.")

    found = tune(3.0, 2.0, 3.0, 2.0, make_task=spoiled(1, fail))
    assert [trial.why_not for trial in found.trials] == ["", "CUDA out of memory. Tried to allocate 3 planets.", ""]
    assert found.changed


@needs_emulator
def test_under_autocast_the_type_is_the_one_it_casts_to(untuned: Path) -> None:
    layer = tconv3d.ConvTranspose3d(8, 8, 2, stride=2)
    with torch.autocast("cpu", torch.float16):
        (found,) = tconv3d.tune(
            layer, torch.randn(SHAPE), gradients=False, candidates=0, offers=False, clock=invented(1.0)
        )
    assert (found.kernel, len(found.trials)) == ("halo", 1)
    assert found.trials[0].build.startswith(str(halo_planner.choose(job_of(problem()), 232448, 4)))


def test_other_kernels_have_nothing_to_choose_from() -> None:
    layer = tconv3d.ConvTranspose3d(4, 4, 2, groups=4, dtype=torch.float64)
    with tconv3d.use_backend("emulator"):
        found = tconv3d.tune(layer, (1, 4, 3, 3, 3), offers=False, report=None, clock=invented())
    assert [each.name for each in found] == ["forward", "input_grad", "weight_grad", "bias_grad"]
    assert all(str(each) == f"{each.name}: {each.kernel}, nothing to choose from" for each in found)


def test_errors() -> None:
    layer = small_layer()
    with pytest.raises(RuntimeError, match="expects CUDA tensors, but got a weight on cpu"):
        tconv3d.tune(layer, SHAPE)
    with pytest.raises(RuntimeError, match="but this one does not: cpu tensors run PyTorch's operator"):
        tconv3d.tune(layer, SHAPE, clock=invented())
    with tconv3d.use_backend("emulator"), pytest.raises(RuntimeError, match="to have 8 channels, but got 3"):
        tconv3d.tune(layer, (1, 3, 3, 3, 3), clock=invented())


@pytest.mark.skipif(run.have_gpu(), reason="there is a GPU")
def test_the_command_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--layer", "8, 4, 2, size=4"]) == 1
    assert "none is visible" in capsys.readouterr().err


def test_operands_lie_as_the_callers_and_results_as_pytorchs() -> None:
    x = torch.empty(1, 8, 2, 3, 8)[..., ::2].expand(2, 8, 2, 3, 4)
    weight = torch.empty(8, 8, 2, 2, 2)
    forward, input_grad, *_ = problems_of(*call_of(x, weight, stride=2))
    benches = [Bench(each, torch.empty(0)) for each in (forward, input_grad)]
    assert benches[0].tensors[0].stride() == x.stride()
    assert (benches[0].shape, benches[1].shape) == ((2, 8, 4, 6, 8), (2, 8, 2, 3, 4))
    for bench in benches:
        assert bench.result.is_contiguous()


def test_candidates_are_those_that_the_model_likes_best() -> None:
    hopper = Device("H200", (9, 0), 132, 232448)
    job = job_of(problem())
    plans = halo_planner.candidates(job, hopper, 100)
    assert 2 < len(plans) == len({plan.build for plan in plans})
    assert [plan.cycles for plan in plans] == sorted(plan.cycles for plan in plans)
    assert halo_planner.candidates(job, hopper, 2) == plans[:2]


def test_compiling_ahead_leaves_kernels_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core", reason="compiling needs cuda-core")
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    hopper = Device("H200", (9, 0), 132, 232448)
    packs = [plan.pack for plan in halo_planner.candidates(job_of(problem()), hopper, 8)]
    kernels = {(pack.kernel, pack.constants) for pack in packs}
    assert len(kernels) > 1
    assert fill_cache(packs, hopper) == len(kernels)
    monkeypatch.setattr(compiler, "_build", lambda *arguments: pytest.fail("compiled once more"))
    for kernel, constants in kernels:
        assert compiler.compile(kernel, constants, "sm_90a").cubin


# ---- on a GPU


@needs_gpu
def test_tuning_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path))
    forget()
    layer = tconv3d.ConvTranspose3d(32, 16, 2, stride=2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 32, 16, 16, 16, device="cuda", dtype=torch.bfloat16)
    state = torch.cuda.get_rng_state()
    try:
        found = tconv3d.tune(layer, x, candidates=3, offers=False)
        assert torch.equal(torch.cuda.get_rng_state(), state), "the caller's random numbers are the caller's"
        explained = tconv3d.explain(layer, x).passes
        for each, now in zip(found, explained, strict=True):
            assert each.kernel == now.kernel
            assert each.changed == ("tuned: " in now.why)
            assert not any(trial.why_not for trial in each.trials)
        expected = F.conv_transpose3d(x.double(), layer.weight.double(), layer.bias.double(), 2)
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-2, atol=1e-2)
    finally:
        forget()
