"""Blocks on mma.sync whose copies go on from tile to tile, with outputs stored from memory of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ampere import AMPERE
from layers import T1, T3, Layer, check, to_tf32
from mutants import kernel_from, mutate, mutate_kernel
from preferred import only, preferring

import tconv3d
from tconv3d import emulator
from tconv3d.families.mma import ahead
from tconv3d.families.mma import planner as mma_planner
from tconv3d.families.mma.model import Candidate
from tconv3d.planning.problem import Device, Plan, Problem
from tconv3d.tools.bench import layers as bench
from tconv3d.tools.bench.problems import problems_of_layer
from tconv3d.torch_ops import executor

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

T2 = (2, 2, 2)
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last_3d
FEW = replace(AMPERE, multiprocessors=1, shared_bytes=166912)
CASES = {
    "up-convolution": (Layer(40, 24, (5, 4, 20), T2, T2, batch=1), CONTIGUOUS),
    "lines of any length": (Layer(12, 20, (3, 2, 21), T2, T2, output_padding=(1, 0, 1), batch=2), CONTIGUOUS),
    "stride 3": (Layer(8, 27, (4, 1, 13), (1, 3, 3), (1, 3, 3), output_padding=(0, 2, 2), batch=2), CONTIGUOUS),
    "odd lines": (Layer(20, 12, (5, 9, 7), T3, T2, T1, batch=2), CONTIGUOUS),
    "channels last": (Layer(16, 12, (4, 9, 17), T3, T2, T1, T1, batch=1), LAST),
    "groups": (Layer(16, 16, (4, 5, 18), T3, T2, T1, groups=2, batch=1), CONTIGUOUS),
    "empty phases": (Layer(8, 8, (5, 5, 12), T3, T2, (0, 1, 2), T1, dilation=T2), CONTIGUOUS),
    "wide kernel, groups": (Layer(32, 20, (3, 4, 19), (3, 2, 5), T2, (1, 0, 2), groups=2, batch=2), CONTIGUOUS),
    "one phase along w": (Layer(24, 24, (5, 4, 33), T3, (2, 2, 1), T1, groups=3, batch=1), CONTIGUOUS),
    "stride 4 along w": (Layer(16, 12, (5, 3, 18), (2, 2, 5), (2, 2, 4), T1, groups=2, batch=1), CONTIGUOUS),
}
TYPES = {"tf32": torch.float32, "strict": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Layers whose outputs are stored from registers, also where other builds are predicted to be faster.
FROM_REGISTERS = ("groups", "wide kernel, groups", "one phase along w", "stride 4 along w")


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Candidate]]:
    """Small volumes are offered too."""
    plan_of, found = mma_planner.plan_of, list[Candidate]()

    def noted(candidate: Candidate, problem: Problem) -> Plan:
        found.append(candidate)
        return plan_of(candidate, problem)

    def searched(name: str, settings: tuple[Problem, Device], kind: object, search: object) -> object:
        return search()  # type: ignore[operator]

    monkeypatch.setattr(ahead, "FEWEST_POSITIONS", 0)
    monkeypatch.setattr(mma_planner, "plan_of", noted)
    monkeypatch.setattr(ahead, "searched", searched)
    monkeypatch.setattr(executor, "EMULATED", FEW)
    before, torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.conv.fp32_precision, "tf32"
    with tconv3d.use_backend("emulator"):
        yield found
    torch.backends.cudnn.conv.fp32_precision = before


def checked(name: str, kind: str = "tf32") -> None:
    layer, memory_format = CASES[name]
    operands = layer.operands(TYPES[kind], "cpu")
    x, *rest = (to_tf32(each) for each in operands) if kind == "tf32" else operands
    tconv3d.allow_tf32_in_groups(kind == "tf32")
    with only("mma", "tensor_weight_grad", "direct"), preferring("mma_ahead"):
        operands = [x.to(memory_format=memory_format), *rest]
        check(layer, TYPES[kind], "cpu", operands, tf32=kind == "tf32", forward_only=True)


@pytest.mark.parametrize("name", CASES)
def test_every_element_against_float64(name: str, chosen: list[Candidate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", "shuffled:1")
    checked(name)
    mine = [each for each in chosen if each.build.ahead]
    assert mine and all(each.tiles_of_block > 1 for each in mine)
    assert all(each.build.along for each in mine) or name not in ("up-convolution", "lines of any length")


@pytest.fixture
def from_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only builds that store from registers are offered."""
    all_builds = ahead.candidates

    def along(problem: Problem, device: Device) -> Iterator[Candidate]:
        return (each for each in all_builds(problem, device) if each.build.along)

    monkeypatch.setattr(ahead, "candidates", along)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", FROM_REGISTERS)
def test_stores_from_registers(
    name: str, kind: str, chosen: list[Candidate], from_registers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of any length and alignment, of all types, where neighbouring taps read neighbouring positions."""
    monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", "shuffled:2")
    checked(name, kind)
    assert [each.work.strict for each in chosen if each.build.along] == [kind == "strict"]


@pytest.mark.parametrize(("name", "kind"), [("groups", "strict"), ("stride 4 along w", "bfloat16")])
def test_stores_from_registers_have_no_race(
    name: str, kind: str, from_registers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")
    checked(name, kind)


@pytest.mark.parametrize(
    ("text", "replacement"), [("turn_quad(values);", ""), ("own % kLineOutputs, e", "own % kLineOutputs ^ 1, e")]
)
def test_mutants_of_stores_from_registers_are_found(
    text: str, replacement: str, from_registers: None, tmp_path: Path
) -> None:
    mutate_kernel("mma", text, replacement, tmp_path / "kernels")
    with kernel_from(tmp_path / "kernels", "mma"), pytest.raises(AssertionError, match="elements wrong"):
        checked("groups")


def test_copies_are_ahead_by_one_tile_at_most_beside_empty_phases() -> None:
    layer = bench.Layer(2, 16, 16, (16, 64, 64), (1, 3, 3), (2, 2, 2), (0, 1, 1), (1, 1, 1))
    problem = problems_of_layer(layer, "tf32", "contiguous")[0]
    found = list(ahead.candidates(problem, FEW))
    steps = [[sum(-(-len(s.rows) // each.build.rows) for s in phase) for phase in each.work.phases] for each in found]
    assert any(0 in each for each in steps) and any(each.build.stages == 3 for each in found)
    for each, counts in zip(found, steps, strict=True):
        assert min(each.chunks * count for count in counts if count) >= each.build.stages - 1, each.build


MUTANTS = {
    "the halo of this tile": ("copies_of(next).copy_halo(", "copies.copy_halo("),
    "the items of this tile": ("list_items(shared.items_of(number + 1, ", "list_items(shared.items_of(number, "),
    "the buffer of the first halo": ("current.halo = next_halo;", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, replacement = MUTANTS[name]
    mutate("mma", text, replacement, tmp_path / "kernels")
    monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", "shuffled:1")
    with (
        kernel_from(tmp_path / "kernels", "mma"),
        pytest.raises((AssertionError, RuntimeError), match=r"elements wrong|an access"),
    ):
        checked("odd lines")
