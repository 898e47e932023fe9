"""Blocks on mma.sync for taps that reach far.

Positions of a block are of one class, so that their taps read a lattice of x, or blocks leave out steps whose taps
read zeros beyond the volume.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ampere import AMPERE
from fuzz import run
from fuzz.case import Case
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import T1, T3, Layer, check, to_tf32
from mutants import kernel_from, mutate
from preferred import forgetting, only, preferring

import tconv3d
from tconv3d import emulator
from tconv3d.families.mma import far
from tconv3d.families.mma import planner as mma_planner
from tconv3d.families.mma.model import Candidate
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.problem import Device, Plan, Problem
from tconv3d.torch_ops import executor

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

T2 = (2, 2, 2)
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last_3d
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CASES = {
    "dilation alone": Layer(12, 10, (5, 6, 9), T3, padding=T2, dilation=(2, 3, 2), batch=2),
    "stride without a common divisor": Layer(8, 9, (4, 5, 7), T3, T2, T1, T1, (3, 3, 3), batch=1),
    "stride with a common divisor": Layer(8, 8, (4, 5, 6), T3, (4, 2, 4), T1, (1, 0, 2), (2, 4, 2), batch=1),
    "dilation divides stride": Layer(8, 8, (3, 4, 5), (2, 3, 3), (2, 4, 3), (1, 2, 0), (0, 1, 1), (2, 2, 3), batch=1),
    "one position of each class": Layer(8, 8, (2, 2, 3), T3, padding=(5, 5, 4), dilation=(5, 5, 5), batch=3),
    "fewer positions than classes": Layer(6, 5, (1, 2, 2), (3, 1, 3), dilation=(4, 1, 5), padding=(4, 0, 5), batch=2),
    "phases of unlike classes": Layer(
        8, 8, (5, 4, 6), (5, 4, 5), (3, 2, 3), (2, 1, 4), (1, 1, 2), (4, 3, 5), batch=1
    ),
    "groups": Layer(16, 8, (3, 5, 8), T3, (1, 2, 1), T2, (0, 1, 0), (2, 3, 2), groups=2, batch=2),
    "empty phases": Layer(8, 8, (3, 4, 5), (3, 2, 3), (2, 4, 2), (0, 1, 2), T1, (2, 4, 4), batch=1),
    "padding beyond the volume": Layer(8, 8, (2, 3, 5), (5, 7, 3), padding=(4, 3, 2), dilation=(2, 1, 1), batch=2),
    "small volume, no dilation": Layer(12, 20, (2, 3, 4), (6, 5, 2), (1, 2, 1), (3, 1, 0), batch=2),
    "sources that are left out": Layer(8, 12, (2, 2, 3), (7, 6, 3), (3, 2, 2), (3, 2, 1), (1, 1, 1), T1, batch=2),
    "no tap reads anything": Layer(8, 8, (1, 1, 4), (3, 2, 3), padding=(3, 3, 1), dilation=(5, 7, 1), batch=1),
    "several chunks": Layer(40, 24, (3, 4, 5), (3, 1, 3), padding=(2, 0, 2), dilation=(3, 1, 2), batch=2),
}
CROPPED = tuple(CASES)[tuple(CASES).index("padding beyond the volume") : -1]
WAYS = [(lattices, unrolled) for lattices in (2, 3) for unrolled in range(4)]  # `Build.lattices` and `Build.unrolled`


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Candidate]]:
    """Notes the builds that are launched."""
    plan_of, found = mma_planner.plan_of, list[Candidate]()

    def noted(candidate: Candidate, problem: Problem) -> Plan:
        found.append(candidate)
        return plan_of(candidate, problem)

    def searched(name: str, settings: tuple[Problem, Device], kind: object, search: object) -> object:
        return search()  # type: ignore[operator]

    monkeypatch.setattr(mma_planner, "plan_of", noted)
    monkeypatch.setattr(far, "searched", searched)
    monkeypatch.setattr(executor, "EMULATED", AMPERE)
    before, torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.conv.fp32_precision, "tf32"
    with tconv3d.use_backend("emulator"):
        yield found
    torch.backends.cudnn.conv.fp32_precision = before


def checked(layer: Layer, dtype: torch.dtype, memory_format: torch.memory_format, tf32: bool = True) -> None:
    operands = layer.operands(dtype, "cpu")
    x, *rest = (to_tf32(each) for each in operands) if tf32 and dtype is torch.float32 else operands
    with only("mma", "tensor_weight_grad", "direct"), preferring("mma_far", "mma"):
        check(layer, dtype, "cpu", [x.to(memory_format=memory_format), *rest], tf32=tf32 and dtype is torch.float32)


def choose(way: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the fastest build with a number of lattices and of unrolled dimensions, if there is one."""

    def fastest(problem: Problem, device: Device) -> mma_planner.Choice | None:
        every = list(far.candidates(problem, device))
        asked = [each for each in every if (each.build.lattices, each.build.unrolled) == way]
        asked = [each for each in asked if each.share < 1] or asked
        best = min(asked or every, key=lambda each: each.cycles(device), default=None)
        return None if best is None else (best.build, best.rows)

    monkeypatch.setattr(far, "_fastest", fastest)


@pytest.mark.parametrize("memory_format", [CONTIGUOUS, LAST], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_element_against_float64(
    name: str, dtype: torch.dtype, memory_format: torch.memory_format, chosen: list[Candidate]
) -> None:
    checked(CASES[name], dtype, memory_format)
    mine = [each for each in chosen if each.build.lattices or each.build.crops]
    assert len(chosen) == 2 and mine
    if name in CROPPED:
        assert any(each.build.crops for each in mine)


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", [CONTIGUOUS, LAST], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "stride without a common divisor",
        "stride with a common divisor",
        "phases of unlike classes",
        "padding beyond the volume",
        "sources that are left out",
    ],
)
def test_every_way_to_divide_a_layer(
    name: str,
    way: tuple[int, int],
    memory_format: torch.memory_format,
    chosen: list[Candidate],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose(way, monkeypatch)
    checked(CASES[name], torch.float16 if memory_format is LAST else torch.float32, memory_format)
    if way[1] < 2 and name not in CROPPED:
        assert any((each.build.lattices, each.build.unrolled) == way for each in chosen)


def test_strict_float32(chosen: list[Candidate]) -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    checked(CASES["several chunks"], torch.float32, CONTIGUOUS, tf32=False)
    assert len(chosen) == 2 and all(each.work.strict and each.build.lattices for each in chosen)
    chosen.clear()
    checked(CASES["small volume, no dilation"], torch.float32, CONTIGUOUS, tf32=False)
    assert any(each.work.strict and each.build.crops for each in chosen)


FIVE = st.integers(1, 5)


@st.composite
def dilated(draw: st.DrawFn) -> Layer:
    kernel, dilation, size = (draw(st.tuples(FIVE, FIVE, FIVE)) for _ in range(3))
    stride = draw(st.tuples(*[st.integers(1, 4)] * 3))
    padding = tuple(draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True))
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    channels = draw(st.tuples(st.integers(4, 18), st.integers(4, 18)))
    layer = Layer(*channels, size, kernel, stride, padding, extra, dilation, batch=draw(st.integers(1, 3)))
    geometry = Geometry.make(*channels, layer.kernel, *layer.settings)
    assume(min(geometry.output_size(size)) >= 1 and geometry.taps <= 40)
    assume(any(d > 1 and k > 1 for d, k in zip(dilation, kernel, strict=True)))
    return layer


@pytest.mark.slow
@settings(max_examples=12)
@given(layer=dilated(), dtype=st.sampled_from(DTYPES), last=st.booleans(), way=st.sampled_from(WAYS))
def test_generated_geometries(layer: Layer, dtype: torch.dtype, last: bool, way: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        choose(way, monkeypatch)
        checked(layer, dtype, LAST if last else CONTIGUOUS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phases of unlike classes", "sources that are left out"])
def test_no_races(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")
    monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", "shuffled:3")
    checked(CASES[name], torch.float32, CONTIGUOUS)
    checked(CASES[name], torch.bfloat16, LAST)


@pytest.mark.slow
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("name", ["phases of unlike classes", "small volume, no dilation"])
def test_nothing_beside_a_tensor_is_touched(name: str, at_end: bool, chosen: list[Candidate]) -> None:
    """Tensors lie against pages that fault, and moments of the result are stored too."""
    case = Case(CASES[name], "bfloat16", "A100", "mma_far", epilogue="norm", wanted=("input",), at_end=at_end)
    with forgetting():
        run.check(case, "cpu")
    assert any(each.build.lattices or each.build.crops for each in chosen)


class Mutant(NamedTuple):
    """A text of a header that is replaced, and the case and the way to divide it that show it."""

    header: str
    text: str
    replacement: str
    case: str
    way: tuple[int, int]


LATTICE, LEFT_OUT = ("phases of unlike classes", (3, 3)), ("small volume, no dilation", (0, 1))
MUTANTS = {
    "the class along w is another": Mutant("mma_tile", "class_w * C::kClassInputW +", "0 +", *LATTICE),
    "neighbours instead of points of the lattice": Mutant(
        "mma_copies", "w * C::kLineStepW * args", "w * args", *LATTICE
    ),
    "outputs of the first class": Mutant("mma_tile", "class_h * C::kClassOutputH +", "0 +", *LATTICE),
    "a step too many is left out": Mutant("mma_tile", "return i < count &&", "return i + 1 < count &&", *LEFT_OUT),
    "weights of other steps": Mutant("mma", "(C::kCrops ? at.row * kRowWords : 0)", "0", *LEFT_OUT),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutate(mutant.header, mutant.text, mutant.replacement, tmp_path / "kernels")
    choose(mutant.way, monkeypatch)
    with (
        kernel_from(tmp_path / "kernels", "mma"),
        forgetting(),
        pytest.raises((AssertionError, RuntimeError), match=r"elements wrong|an access"),
    ):
        checked(CASES[mutant.case], torch.float32, LAST)
