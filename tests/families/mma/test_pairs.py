"""Halos of contiguous 16-bit tensors for mma.sync, copied by pairs of positions, wherever lines begin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ampere import on_ampere
from layers import T1, T3, Layer, check
from mutants import kernel_from, mutate

from tconv3d import emulator
from tconv3d.families.mma import planner as mma_planner
from tconv3d.families.mma.model import HALVES, ODD_PAIRS, PAIRS, Candidate
from tconv3d.planning import aligning
from tconv3d.planning.problem import Pass

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

T2 = (2, 2, 2)
# Each layer with the kind of copy of its forward pass and of its input gradient.
CASES = {
    "pairs begin before the halo": (Layer(16, 12, (2, 3, 12), T3, T2, T1, T1), PAIRS, PAIRS),
    "an odd number of elements": (Layer(37, 11, (3, 5, 5), T3, padding=T1, batch=1), ODD_PAIRS, ODD_PAIRS),
    "three planes": (Layer(8, 20, (2, 2, 4), T3, (1, 2, 3), T1, (0, 1, 1)), PAIRS, ODD_PAIRS),
    "one channel of a piece": (Layer(9, 8, (3, 3, 6), (2, 2, 4), T2, (1, 1, 0), T1), PAIRS, ODD_PAIRS),
}


def checked(name: str, monkeypatch: pytest.MonkeyPatch, forward_only: bool = False) -> dict[Pass, Candidate]:
    """Compares every element with float64, and returns the builds that computed them, by pass."""
    found, plan_of = dict[Pass, Candidate](), mma_planner.plan_of

    def noted(candidate: Candidate, problem: mma_planner.Problem) -> mma_planner.Plan:
        found[problem.which] = candidate
        return plan_of(candidate, problem)

    monkeypatch.setattr(mma_planner, "plan_of", noted)
    monkeypatch.setattr(aligning, "answers", lambda *given: [])  # dy is read as it is, not a copy with longer lines
    monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", "shuffled:1")
    with on_ampere():
        layer = CASES[name][0]
        check(layer, torch.bfloat16, "cpu", layer.operands(torch.bfloat16, "cpu"), forward_only=forward_only)
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_element_against_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(name, monkeypatch)
    assert tuple(found[each].copy for each in (Pass.FORWARD, Pass.INPUT_GRAD)) == CASES[name][1:]


@pytest.mark.parametrize("strides", ["begins anywhere", "has gaps"])
def test_other_tensors_are_copied_by_halves(strides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole words may be read only of a tensor that begins at a word and has no gaps."""
    layer = Layer(8, 8, (2, 2, 6), T3, padding=T1, batch=1)
    x, *rest = layer.operands(torch.bfloat16, "cpu")
    wide = torch.empty(1, 8, 2, 2, 7, dtype=x.dtype)
    view = wide[..., :6] if strides == "has gaps" else wide.flatten()[1 : x.numel() + 1].view(x.shape)
    copies, plan_of = [], mma_planner.plan_of
    monkeypatch.setattr(mma_planner, "plan_of", lambda *given: copies.append(given[0].copy) or plan_of(*given))
    with on_ampere():
        check(layer, torch.bfloat16, "cpu", [view.copy_(x), *rest], forward_only=True)
    assert copies == [HALVES]


MUTANTS = {
    "pairs that begin at odd positions": ("jobs.first_w & 1;", "0 * jobs.first_w;", "pairs begin before the halo"),
    "neighbours as if they were in the line": (
        "k % 2]) &\n           jobs.masks[j]",
        "k % 2])",
        "an odd number of elements",
    ),
    "words that begin in the middle": ("8 * shifts[1];", "8 * shifts[0];", "an odd number of elements"),
    "the last elements of x": ("first | second << 16;", "first;", "an odd number of elements"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, replacement, case = MUTANTS[name]
    mutate("mma_pairs", text, replacement, tmp_path / "kernels")
    with (
        kernel_from(tmp_path / "kernels", "mma"),
        pytest.raises((AssertionError, RuntimeError), match=r"elements wrong|misaligned"),
    ):
        checked(case, monkeypatch, forward_only=case != "pairs begin before the halo")
