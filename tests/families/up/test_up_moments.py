"""The moments that the kernel of up-convolutions leaves for a norm, as statistics against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Layer, Triple, poisoned, to_tf32
from mutants import kernel_from, mutate_kernel
from preferred import forgetting, only, preferring
from problems import H200, problem
from torch import Tensor

from tconv3d import emulator
from tconv3d.families.up import forward as up
from tconv3d.planning import planner
from tconv3d.planning.launch import Launch
from tconv3d.planning.problem import Norm, Pass, channels_last_strides, contiguous_strides
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
T2 = (2, 2, 2)


@dataclass(frozen=True)
class Case:
    """A layer, the channels of a norm group, and how blocks divide the columns; `taps` for channels-last tensors."""

    layer: Layer
    columns: int
    per_group: int
    dtype: torch.dtype = torch.float32
    taps: int = 0
    stages: int = 3
    unit: int = 0  # columns or channels that share moments, where the name tells it

    @property
    def groups(self) -> int:
        return self.layer.out_channels // self.per_group

    def tiling(self) -> up.Tiling:
        g = problem(self.layer, Pass.FORWARD).geometry
        taps = self.taps or g.taps
        return up.Tiling(g, str(self.dtype)[6:], self.taps > 0, taps, self.columns, self.stages, few=self.taps > 0)


F16, BF16 = torch.float16, torch.bfloat16
ITEMS = Layer(24, 10, (3, 6, 20), T2, T2, batch=3)
CASES = {
    "one tile": Case(Layer(16, 8, (2, 4, 8), T2, T2, batch=1), 64, 4, unit=32),
    "one channel, odd number of units": Case(Layer(20, 13, (4, 5, 10), T2, T2), 40, 1, unit=8),
    "a norm group crosses blocks": Case(Layer(20, 12, (4, 5, 10), T2, T2), 40, 6, BF16, unit=8),
    "one norm group": Case(Layer(16, 8, (4, 4, 10), T2, T2), 32, 8, F16, unit=32),
    "three batch items, ragged tiles": Case(ITEMS, 40, 5, unit=40),
    "three batch items, bfloat16": Case(ITEMS, 80, 1, BF16, unit=8),
    "two lanes share a channel": Case(Layer(33, 7, (3, 4, 12), (1, 2, 2), (1, 2, 2)), 16, 1, unit=4),
    "a channel for each lane": Case(Layer(17, 21, (1, 2, 72), (1, 1, 2), (1, 1, 2)), 24, 3, F16, unit=2),
    "two channels for each lane": Case(Layer(24, 9, (1, 4, 16), (1, 1, 1), (1, 1, 1)), 16, 3, unit=1),
    "one tap along w": Case(Layer(24, 7, (4, 4, 6), (2, 2, 1), (2, 2, 1)), 24, 1, unit=4),
    "four taps along w, channels in two blocks": Case(Layer(24, 5, (3, 4, 10), (1, 3, 4), (1, 3, 4)), 40, 5, unit=4),
    "more batch items than blocks": Case(Layer(16, 4, (1, 2, 4), T2, T2, batch=23), 32, 2, unit=16),
    "channels last": Case(Layer(40, 24, (3, 5, 7), T2, T2), 64, 3, F16, 2, unit=1),
    "channels last, whole runs": Case(Layer(40, 24, (3, 5, 7), T2, T2), 64, 8, BF16, 2, unit=8),
    "channels last, two lanes": Case(Layer(40, 48, (3, 5, 7), T2, T2, batch=3), 64, 24, taps=2, unit=8),
    "channels last, whole blocks": Case(Layer(40, 64, (3, 5, 7), T2, T2), 128, 32, taps=4, unit=32),
    "channels last, odd taps": Case(Layer(72, 40, (3, 5, 9), (3, 1, 3), (3, 1, 3), batch=3), 96, 20, BF16, 3, 2, 4),
    "channels last, pointwise": Case(Layer(264, 40, (1, 9, 9), (1, 1, 1), bias=False), 32, 1, taps=1, unit=1),
}


@pytest.fixture
def only_up(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every layer that the kernel can compute goes to it, by few multiprocessors that have several tiles each."""
    if ours != "cpu" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup matrix instructions need compute capability 9.0")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    monkeypatch.setattr(up, "MIN_CHANNELS", 1)
    monkeypatch.setattr(executor, "device_of", lambda _: replace(H200, multiprocessors=5))
    with only("up", "direct"), preferring("up"):
        yield ours


def operands_of(case: Case, device: str) -> list[Tensor]:
    torch.manual_seed(3)
    found = case.layer.operands(case.dtype, device)
    found = [to_tf32(each) for each in found] if case.dtype is torch.float32 else found
    if case.taps:
        found[0] = found[0].to(memory_format=torch.channels_last_3d)
    return found


def statistics(case: Case, operands: list[Tensor], keep: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the result of convolution and ReLU and its statistics; memory that is not written is poisoned."""
    bias = operands[2] if len(operands) > 2 else None
    with poisoned():
        return executor.forward_with_statistics(
            operands[0], operands[1], bias, case.groups, EPS, case.layer.settings, keep
        )


def exact(case: Case, operands: list[Tensor]) -> Tensor:
    """Returns the values of every norm group, in float64."""
    l, wide = case.layer, [each.double() for each in operands]  # noqa: E741
    values = F.conv_transpose3d(*wide, stride=l.stride).relu()
    return values.reshape(l.batch, case.groups, -1)


def error(case: Case, found: Tensor, values: Tensor) -> float:
    """Returns the largest error of a mean, relative to the largest value, or of a deviation, relative to itself."""
    mean, deviation = values.mean(2), (values.var(2, correction=0) + EPS).sqrt()
    of_mean = (found[0].double() - mean).abs() / values.abs().amax(2).clamp(min=1e-30)
    of_deviation = (found[1].double() * deviation - 1).abs()
    return float(torch.maximum(of_mean, of_deviation).nan_to_num(nan=1e30).max())


MOST = 2e-6  # sums in float32 of products without rounding


def check(case: Case, operands: list[Tensor], keep: bool = False) -> Tensor:
    _, found = statistics(case, operands, keep)
    assert error(case, found, exact(case, operands)) < MOST
    return found


def tiled(monkeypatch: pytest.MonkeyPatch, name: str) -> Case:
    """The case, for which the planner has no choice."""
    case = CASES[name]
    monkeypatch.setattr(up, "choose", lambda *_: case.tiling())
    return case


@pytest.mark.parametrize("name", CASES)
def test_statistics_against_float64(name: str, only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiled(monkeypatch, name)
    operands = operands_of(case, only_up)
    ran: list[Launch] = []
    original = executor._steps
    monkeypatch.setattr(executor, "_steps", lambda plan, names: (ran.extend(plan.launches), original(plan, names))[1])
    check(case, operands)
    assert [launch.kernel for launch in ran][:2] == ["up", "statistics"]
    assert dict(ran[0].constants)["kMomentUnit"] == case.unit


@pytest.mark.slow
@settings(max_examples=10)
@given(
    channels=st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5)),
    taps=st.sampled_from([(1, 1, 1), (1, 1, 2), (1, 2, 2), (3, 1, 2), (1, 1, 4), T2]),
    size=st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([8, 16, 24, 40])),
    batch=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    last=st.booleans(),
)
def test_generated(
    channels: Triple, taps: Triple, size: Triple, batch: int, dtype: torch.dtype, last: bool, only_up: str
) -> None:
    """As the planner has it."""
    inputs, groups, per_group = channels
    if last:
        inputs, groups, taps = 8 * inputs, 8 * groups, (taps[2], taps[0], 3)
    layer = Layer(inputs, groups * per_group, size, taps, taps, batch=batch)
    case = Case(layer, 0, per_group, dtype, int(last))
    check(case, operands_of(case, only_up))


@pytest.mark.parametrize("name", ["three batch items, ragged tiles", "channels last, two lanes"])
def test_weights_that_are_kept_in_order(name: str, only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call takes the weight as it is, the second packs and keeps it, the third finds it packed."""
    case = tiled(monkeypatch, name)
    operands = operands_of(case, only_up)
    first, *others = [check(case, operands, keep=True) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)
    (task,) = executor._tasks.values()
    assert task.packing is not None and "start" in vars(task.packing)  # which the third call made


def test_a_pass_behind_weights_that_are_kept(only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel leaves no moments, the pass also follows the launches that find the weight packed."""
    case = tiled(monkeypatch, "three batch items, ragged tiles")
    monkeypatch.setattr(up, "leaves_moments", lambda _: False)
    operands = operands_of(case, only_up)
    first, *others = [check(case, operands, keep=True) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["three batch items, ragged tiles", "channels last, odd taps"])
def test_a_large_mean_does_not_drown_the_deviations(name: str, only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of squares of values near 1000 has few digits left for deviations of about 1."""
    case = tiled(monkeypatch, name)
    operands = operands_of(case, only_up)
    operands[2].fill_(1000)
    values = exact(case, operands)
    found = statistics(case, operands)[1]
    deviation = (values.var(2, correction=0) + EPS).sqrt()
    assert ((found[1].double() * deviation - 1).abs() < 1e-4).all()  # values near 1000 are rounded in float32


def test_a_first_value_far_from_the_mean(only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first value of each channel is 128 deviations from the mean, and no shift is near it."""
    case = tiled(monkeypatch, "three batch items, ragged tiles")
    operands = operands_of(case, only_up)
    operands[0][:, :, 0, 0, 0] *= 128  # a power of two, so that no digit is lost
    check(case, operands)


@pytest.mark.parametrize("name", ["one channel, odd number of units", "channels last, pointwise"])
def test_special_values_stay_in_their_norm_group(name: str, only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in one batch item reaches the statistics of all its norm groups, and of no other batch item."""
    case = tiled(monkeypatch, name)
    operands = operands_of(case, only_up)
    operands[0][1, 3, 0, 2, 1] = float("nan")
    found = statistics(case, operands)[1]
    assert found[:, 1].isnan().all() and not found[:, :1].isnan().any()


@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ["more batch items than blocks", "channels last, two lanes"])
def test_no_order_of_threads_changes_a_bit(name: str, only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if only_up != "cpu":
        pytest.skip("the emulator chooses the order")
    case = tiled(monkeypatch, name)
    operands = operands_of(case, "cpu")
    first = statistics(case, operands)[1]
    original = emulator.prepare
    for order in ("reversed", "shuffled:1"):
        monkeypatch.setattr(emulator, "prepare", lambda launch, order=order: original(launch, order))
        executor.forget()
        assert torch.equal(first, statistics(case, operands)[1])


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ["three batch items, ragged tiles", "channels last, odd taps"])
def test_no_access_to_shared_memory_races(name: str, only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if only_up != "cpu":
        pytest.skip("the emulator finds races")
    if emulator._sanitizers():
        pytest.skip("the race detector runs without other sanitizers")
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")
    case = tiled(monkeypatch, name)
    operands = operands_of(case, "cpu")
    for _ in range(2):  # with the weight as it is, and packed
        check(case, operands, keep=True)


MUTANTS = {
    "positions that do not exist": ("first + layout.own_position() < args.positions", "true"),
    "the values of the batch item before": ("if (n != item) {", "if (item < 0) {"),
    "the weight of an empty half": ("second / (first + second)", "0.5f"),
    "no distance of means": (" + step * distance * step}", "}"),
    "lanes that share a unit": ("distance >= 4 || distance < kSharing", "distance >= 4"),
    "the second half of the units": ("of.first += kHalf;", ""),
    "another lane's half": ("given = upper ? given : second;", "given = upper ? second : given;"),
    "the slot of another consumer": ("rank * 4 + warp", "rank / 2 * 8 + warp"),
    "the epilogue": ("C::Epilogue::apply(sums.at[i])", "sums.at[i]"),
}


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path, only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if only_up != "cpu":
        pytest.skip("the emulator takes other headers")
    text, replacement = MUTANTS[name]
    mutate_kernel("up", text, replacement, tmp_path / "kernels")
    case = tiled(monkeypatch, "one channel, odd number of units")
    operands = operands_of(case, only_up)
    with kernel_from(tmp_path / "kernels", "up"), pytest.raises(AssertionError):
        check(case, operands)


# ---- The planner's promises.


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_group", [1, 4, 32])
def test_a_decoder_with_a_norm(dtype: str, last: bool, per_group: int) -> None:
    """The kernel with moments is taken, is at most a tenth slower by prediction, and spills no registers."""
    layer = Layer(64, 32, (64, 64, 64), T2, T2)
    plain = problem(layer, Pass.FORWARD, dtype)
    if last:
        strides = [channels_last_strides((2, channels, side, side, side)) for channels, side in ((64, 64), (32, 128))]
        plain = replace(plain, input=strides[0], output=strides[1])
    wanted = replace(plain, norm=Norm(32 // per_group, EPS))
    with forgetting():
        plan = planner.plan(wanted, H200)
    assert [launch.kernel for launch in plan.launches] == ["up", "statistics"] and plan.moments > 0
    assert plan.tile.endswith("leaves the moments of its result")
    assert plan.kept is not None and [each.kernel for each in plan.kept.launches] == ["up_pack", "up", "statistics"]
    assert up.work(wanted, H200).cycles < 1.1 * up.work(plain, H200).cycles
    made = compiler.compile("up", plan.launches[0].constants, "sm_90a")
    assert not made.serialized and made.report.spill_stores == 0


def test_results_that_read_other_tensors_get_a_pass() -> None:
    layer = Layer(64, 32, (16, 16, 16), T2, T2)
    wanted = replace(problem(layer, Pass.FORWARD), norm=Norm(4, EPS), tail="tconv3d::Sum", tail_wholes=1)
    assert not up.leaves_moments(wanted) and "reads other tensors" in (up.why_not(wanted, H200) or "")
    assert up.leaves_moments(replace(wanted, tail_wholes=0))
    assert wanted.output == contiguous_strides((2, 32, 32, 32, 32))
