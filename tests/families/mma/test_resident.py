"""Blocks on mma.sync that compute several tiles, with all their weights in shared memory from the first tile on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ampere import AMPERE, on_ampere
from fused_blocks import BF16, TOLERANCE, Block, errors, three_layers
from layers import T1, T3, Layer, check, poisoned, to_tf32
from mutants import kernel_from, mutate

from tconv3d import emulator
from tconv3d.families.mma import planner as mma_planner
from tconv3d.families.mma.model import Candidate
from tconv3d.planning import gpus, planner
from tconv3d.planning.problem import Device, Pass, Problem
from tconv3d.tools.bench.layers import LAYERS
from tconv3d.tools.bench.problems import problems_of_layer

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

T2 = (2, 2, 2)
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last_3d
ONE = replace(AMPERE, multiprocessors=1, shared_bytes=166912)
CASES = {
    "up-convolution": (Layer(16, 24, (5, 4, 20), T2, T2, batch=1), torch.float32, CONTIGUOUS),
    "several chunks": (Layer(20, 12, (5, 9, 7), T3, T2, T1, T1, batch=1), torch.float32, LAST),
    "halos through registers": (Layer(16, 8, (4, 9, 17), T3, T2, T1, batch=1), torch.bfloat16, CONTIGUOUS),
    "groups, channels last": (Layer(16, 16, (4, 5, 18), T3, T1, T1, groups=2, batch=1), torch.float16, LAST),
    "empty phases": (Layer(8, 8, (5, 5, 12), T3, T2, (0, 1, 2), T1, dilation=T2), torch.float16, CONTIGUOUS),
}


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Candidate]]:
    """Only builds whose weights stay in shared memory are offered, with blocks of four tiles at most."""
    every, plan_of, found = mma_planner._all, mma_planner.plan_of, list[Candidate]()

    def resident(problem: Problem, device: Device) -> Iterator[Candidate]:
        return (each for each in every(problem, device) if each.build.resident)

    def fastest(problem: Problem, device: Device) -> mma_planner.Choice | None:
        # Where there are more steps of weights than stages of a ring, a ring would overwrite weights.
        best = min(
            resident(problem, device),
            key=lambda each: (each.weight_stages <= each.build.stages, each.cycles(device)),
            default=None,
        )
        return None if best is None else (best.build, best.rows)

    def noted(candidate: Candidate, problem: Problem) -> planner.Plan:
        found.append(candidate)
        return plan_of(candidate, problem)

    monkeypatch.setattr(mma_planner, "_all", resident)
    monkeypatch.setattr(mma_planner, "_fastest", fastest)
    monkeypatch.setattr(mma_planner, "plan_of", noted)
    monkeypatch.setattr(mma_planner, "searched", lambda name, settings, kind, search: search())
    yield found


def checked(name: str, forward_only: bool = False) -> None:
    layer, dtype, memory_format = CASES[name]
    x, *rest = layer.operands(dtype, "cpu")
    x, *rest = (to_tf32(each) for each in (x, *rest)) if dtype is torch.float32 else (x, *rest)
    with on_ampere(ONE):
        operands = [x.to(memory_format=memory_format), *rest]
        check(layer, dtype, "cpu", operands, tf32=dtype is torch.float32, forward_only=forward_only)


@pytest.mark.parametrize("name", CASES)
def test_every_element_against_float64(name: str, chosen: list[Candidate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", "shuffled:1")
    checked(name)
    assert len(chosen) >= 2 and all(each.tiles_of_block > 1 for each in chosen)


def test_every_tile_leaves_its_moments(chosen: list[Candidate]) -> None:
    block = Block(Layer(16, 16, (4, 6, 18), T3, T2, T1), 4, dtype=BF16)
    module, x = block.module("cpu"), block.input("cpu")
    with on_ampere(ONE), poisoned(), torch.no_grad():
        got = module(x)
    assert any(each.tiles_of_block > 1 for each in chosen)
    assert errors([got], [three_layers(module)(x.double()).detach()])[0] < TOLERANCE[BF16]


def test_blocks_fill_a_gpu_once() -> None:
    """All blocks run at the same time, and together they compute every tile."""
    a100 = gpus.GPUS["A100"].device
    (problem, *_) = problems_of_layer(LAYERS["nnunet_64_32_64"], "tf32", "contiguous")
    assert problem.which is Pass.FORWARD
    found = mma_planner.predicted(problem, a100, 3)
    for each in found:
        tiles = each.box.tiles[0] * each.box.tiles[1] * each.box.tiles[2] * each.box.tiles[3]
        kinds = each.slices * len(each.work.phases)
        assert each.grid <= each.build.blocks * a100.multiprocessors
        assert each.tiles_of_block * (each.grid // kinds) >= tiles
        assert each.shared_bytes <= a100.shared_bytes


MUTANTS = {
    "weights where lines of outputs are staged": (
        ": C::kResident ? reinterpret_cast<unsigned char*>(shared.items)",
        ": C::kResident ? reinterpret_cast<unsigned char*>(shared.weights)",
    ),
    "halos that others still read": ("if (!Config::kAhead && i > 0) __syncthreads();", ""),
    "the weights of another step": ("!C::kResident && at.stage + 1 == C::kStages", "at.stage + 1 == C::kStages"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, replacement = MUTANTS[name]
    mutate("mma", text, replacement, tmp_path / "kernels")
    monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", "shuffled:1")
    with kernel_from(tmp_path / "kernels", "mma"), pytest.raises(AssertionError, match="elements wrong"):
        checked("several chunks" if "step" in name else "up-convolution", forward_only=True)
