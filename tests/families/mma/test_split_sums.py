"""Input gradients on mma.sync of wide layers with small volumes, whose channels several blocks share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ampere import AMPERE, on_ampere
from layers import T1, T3, Layer, check, passes, to_tf32
from mutants import kernel_from, mutate

import tconv3d
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
MANY = replace(AMPERE, multiprocessors=64)
CASES = {
    "odd lines": (Layer(9, 80, (2, 2, 3), T3, T2, T1, batch=1), torch.bfloat16, CONTIGUOUS),
    "parts of no whole vectors": (Layer(7, 36, (1, 3, 5), T3, T1, T1, batch=1), torch.float32, CONTIGUOUS),
    "the last block sums less": (Layer(8, 40, (2, 2, 3), T2, T2), torch.float32, LAST),
    "groups": (Layer(10, 96, (2, 3, 2), (1, 3, 2), T1, groups=2, batch=1), torch.float16, LAST),
}


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Candidate]]:
    """Only builds whose channels are divided are offered for input gradients."""
    every, plan_of, found = mma_planner._all, mma_planner.plan_of, list[Candidate]()

    def divided(problem: Problem, device: Device) -> Iterator[Candidate]:
        forward = problem.which is Pass.FORWARD
        return (each for each in every(problem, device) if forward or each.build.splits > 1)

    def fastest(problem: Problem, device: Device) -> mma_planner.Choice | None:
        best = min(divided(problem, device), key=lambda each: each.cycles(device), default=None)
        return None if best is None else (best.build, best.rows)

    def noted(candidate: Candidate, problem: Problem) -> planner.Plan:
        found.append(candidate)
        return plan_of(candidate, problem)

    monkeypatch.setattr(mma_planner, "_all", divided)
    monkeypatch.setattr(mma_planner, "_fastest", fastest)
    monkeypatch.setattr(mma_planner, "plan_of", noted)
    monkeypatch.setattr(mma_planner, "searched", lambda name, settings, kind, search: search())
    yield found


def operands_of(name: str) -> list[torch.Tensor]:
    layer, dtype, memory_format = CASES[name]
    found = layer.operands(dtype, "cpu")
    x, *rest = (to_tf32(each) for each in found) if dtype is torch.float32 else found
    return [x.to(memory_format=memory_format), *rest]


def checked(name: str) -> None:
    layer, dtype, _ = CASES[name]
    with on_ampere(MANY):
        check(layer, dtype, "cpu", operands_of(name), tf32=dtype is torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_every_element_against_float64(name: str, chosen: list[Candidate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", "shuffled:1")
    checked(name)
    assert any(each.build.splits > 1 for each in chosen)


def test_the_order_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for order in ("forward", "reversed", "shuffled:2"):
        monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", order)
        with on_ampere(MANY):
            _, grads = passes(tconv3d.conv_transpose3d, operands_of("odd lines"), CASES["odd lines"][0].settings)
        results.append(grads[0])
    assert all(torch.equal(each, results[0]) for each in results)


def test_parts_fit_the_workspace() -> None:
    """A GPU without a workspace for partial sums gets one block for each tile."""
    a100 = gpus.GPUS["A100"].device
    (problem,) = (
        each
        for each in problems_of_layer(LAYERS["nnunet_320_320_4"], "tf32", "contiguous")
        if each.which is Pass.INPUT_GRAD
    )
    found = mma_planner.predicted(problem, a100, 3)
    assert found and all(4 * each.build.splits * each.outputs <= a100.workspace_bytes for each in found)
    assert mma_planner.predicted(problem, a100.thrifty, 1) == []
    adding = mma_planner.plan_of(found[0], problem).launches[-1]
    assert adding.kernel == "reduce_gradients" and not adding.overlaps  # an A100 cannot wait for another launch
    assert dict(adding.constants)["kOverlaps"] is False


MUTANTS = {
    "the weights of the first block": ("mma_copies", "* Layout::kChunks + tile.first_chunk)", "* Layout::kChunks)"),
    "the channels of the first block": ("mma", "Cursor current{tile.first_chunk};", "Cursor current{0};"),
    "every part in the same place": ("mma_stores", "tile.split * tile.args.part", "0 * tile.args.part"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path) -> None:
    mutate(*MUTANTS[name], tmp_path / "kernels")
    with kernel_from(tmp_path / "kernels", "mma"), pytest.raises(AssertionError, match="elements wrong"):
        checked("the last block sums less")
