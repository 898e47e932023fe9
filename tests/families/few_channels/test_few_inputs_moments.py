"""The moments that the kernel for few input channels leaves for a norm, as statistics against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from few_channels_layers import T1, T2, T3
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Layer, poisoned, to_tf32
from mutants import kernel_from, mutate_kernel
from preferred import forgetting, only, preferring
from problems import H200, problem
from torch import Tensor

from tconv3d import emulator
from tconv3d.families.few_channels import inputs as few_inputs
from tconv3d.planning import planner
from tconv3d.planning.launch import Launch
from tconv3d.planning.problem import Norm, Pass, channels_last_strides
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

EPS = 1e-5
F16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A layer, the channels of a norm group, and how many channels share moments."""

    layer: Layer
    per_group: int
    unit: int = 0
    dtype: torch.dtype = torch.float32
    last: bool = False

    @property
    def groups(self) -> int:
        return self.layer.out_channels // self.per_group


ODD = Layer(3, 20, (3, 5, 9), T3, T2, T1, batch=3)
CASES = {
    "one channel, lines of odd length": Case(ODD, 1, 1),
    "two channels": Case(Layer(2, 24, (3, 4, 6), T3, T2, T1, T1), 2, 2),
    "two lanes share four channels": Case(ODD, 4, 4, BF16),
    "whole blocks": Case(Layer(3, 32, (4, 5, 9), T3, T2, T1, T1), 16, 16, F16),
    "a norm group is no whole passes": Case(Layer(1, 48, (4, 5, 9), T3, padding=T1), 24, 24),
    "one norm group": Case(Layer(4, 32, (3, 4, 8), T3, T1, T1, batch=1), 32, 32, BF16),
    "three phases along w": Case(Layer(2, 16, (2, 3, 7), (2, 2, 5), (1, 2, 3), (0, 0, 1)), 8, 8),
    "empty phases": Case(Layer(2, 8, (3, 3, 3), T3, T2, (0, 1, 2), T1, T2), 2, 2),
    "several passes": Case(Layer(4, 104, (2, 3, 9), T3, T2, T1), 1, 1),
    "groups": Case(Layer(6, 48, (3, 4, 6), T3, T2, T1, groups=2), 16, 8),
    "a norm group across groups": Case(Layer(6, 24, (3, 4, 6), T3, T1, T1, groups=3), 12, 4, F16),
    "many tiles of each batch item": Case(Layer(2, 16, (6, 8, 20), T3, T1, T1, batch=3), 2, 2),
    "more batch items than blocks": Case(Layer(2, 16, (1, 2, 4), T2, T2, batch=23), 4, 4),
    "channels last, one channel": Case(ODD, 1, 1, last=True),
    "channels last, four channels": Case(Layer(3, 32, (3, 5, 9), T3, T2, T1), 4, 4, BF16, True),
    "channels last, two lanes": Case(Layer(3, 32, (3, 5, 9), T3, T1, T1), 8, 8, F16, True),
    "channels last, whole blocks": Case(Layer(3, 64, (3, 5, 9), T3, T2, T1), 32, 32, last=True),
}


@pytest.fixture
def few(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything that the family can compute goes to it, by few multiprocessors that have several tiles each."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    monkeypatch.setattr(few_inputs, "MIN_OUT", 1)
    monkeypatch.setattr(few_inputs, "MIN_RATIO", 0)
    monkeypatch.setattr(few_inputs, "MAX_REDUCED", 8)
    monkeypatch.setattr(executor, "device_of", lambda _: replace(H200, multiprocessors=3))
    with only("few_inputs", "direct"), preferring("few_inputs"):
        yield ours


def operands_of(case: Case, device: str) -> list[Tensor]:
    torch.manual_seed(3)
    found = case.layer.operands(case.dtype, device)
    found = [to_tf32(each) for each in found] if case.dtype is torch.float32 else found
    return [found[0].to(memory_format=torch.channels_last_3d), *found[1:]] if case.last else found


def statistics(case: Case, operands: list[Tensor]) -> Tensor:
    """Returns the statistics of convolution and ReLU; memory that is not written is poisoned."""
    bias = operands[2] if len(operands) > 2 else None
    with poisoned():
        return executor.forward_with_statistics(*operands[:2], bias, case.groups, EPS, case.layer.settings)[1]


def exact(case: Case, operands: list[Tensor]) -> Tensor:
    """Returns the values of every norm group, in float64."""
    l, wide = case.layer, [each.double() for each in operands]  # noqa: E741
    shape = (l.stride, l.padding, l.output_padding, l.groups, l.dilation)
    values = F.conv_transpose3d(wide[0], wide[1], wide[2] if len(wide) > 2 else None, *shape).relu()
    return values.reshape(l.batch, case.groups, -1)


def error(found: Tensor, values: Tensor) -> float:
    """Returns the largest error of a mean, relative to the largest value, or of a deviation, relative to itself."""
    mean, deviation = values.mean(2), (values.var(2, correction=0) + EPS).sqrt()
    of_mean = (found[0].double() - mean).abs() / values.abs().amax(2).clamp(min=1e-30)
    of_deviation = (found[1].double() * deviation - 1).abs()
    return float(torch.maximum(of_mean, of_deviation).nan_to_num(nan=1e30).max())


MOST = 3e-6  # sums in float32 of products without rounding


def check(case: Case, operands: list[Tensor]) -> Tensor:
    found = statistics(case, operands)
    assert error(found, exact(case, operands)) < MOST
    return found


@pytest.mark.parametrize("name", CASES)
def test_statistics_against_float64(name: str, few: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    ran: list[Launch] = []
    original = executor._steps
    monkeypatch.setattr(executor, "_steps", lambda plan, names: (ran.extend(plan.launches), original(plan, names))[1])
    check(case, operands_of(case, few))
    assert [launch.kernel for launch in ran][:2] == ["few_inputs", "statistics"]
    assert dict(ran[0].constants)["kMomentUnit"] == case.unit


@pytest.mark.slow
@settings(max_examples=12)
@given(
    layer=small_layers((4, 5, 9), st.integers(1, 3), st.integers(1, 20)),
    divisor=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, F16, BF16]),
    last=st.booleans(),
)
def test_generated_geometries(layer: Layer, divisor: int, dtype: torch.dtype, last: bool, few: str) -> None:
    per_group = layer.out_channels // (divisor if layer.out_channels % divisor == 0 else layer.out_channels)
    case = Case(layer, per_group, 0, dtype, last)
    check(case, operands_of(case, few))


@pytest.mark.parametrize("name", ["one channel, lines of odd length", "channels last, whole blocks"])
def test_a_large_mean_does_not_drown_the_deviations(name: str, few: str) -> None:
    """The sum of squares of values near 1000 has few digits left for deviations of about 1."""
    case = CASES[name]
    operands = operands_of(case, few)
    operands[2].fill_(1000)
    deviation = (exact(case, operands).var(2, correction=0) + EPS).sqrt()
    found = statistics(case, operands)[1].double() * deviation
    assert ((found - 1).abs() < 1e-4).all()  # values near 1000 are rounded in float32


def test_a_first_value_far_from_the_mean(few: str) -> None:
    """The first values of each channel are 128 deviations from the mean, and no shift is near them."""
    case = CASES["one channel, lines of odd length"]
    operands = operands_of(case, few)
    operands[0][:, :, 0, 0, 0] *= 128  # a power of two, so that no digit is lost
    check(case, operands)


def test_special_values_stay_in_their_batch_item(few: str) -> None:
    """A NaN in one batch item reaches the statistics of all its norm groups, and of no other batch item."""
    case = CASES["two lanes share four channels"]
    operands = operands_of(case, few)
    operands[0][1, 2, 1, 2, 1] = float("nan")
    found = statistics(case, operands)
    assert found[:, 1].isnan().all() and not found[:, ::2].isnan().any()


@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ["more batch items than blocks", "several passes"])
def test_no_order_of_threads_changes_a_bit(name: str, few: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if few != "cpu":
        pytest.skip("the emulator chooses the order")
    case = CASES[name]
    operands = operands_of(case, "cpu")
    first = statistics(case, operands)
    original = emulator.prepare
    for order in ("reversed", "shuffled:1"):
        monkeypatch.setattr(emulator, "prepare", lambda launch, order=order: original(launch, order))
        executor.forget()
        assert torch.equal(first, statistics(case, operands))


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ["one channel, lines of odd length", "several passes"])
def test_no_access_to_shared_memory_races(name: str, few: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if few != "cpu":
        pytest.skip("the emulator finds races")
    if emulator._sanitizers():
        pytest.skip("the race detector runs without other sanitizers")
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")
    check(CASES[name], operands_of(CASES[name], "cpu"))


MUTANTS = {
    "positions that do not exist": ("line ? args.y_size.w - w : 0", "line ? 99 : 0"),
    "deviations of them": ("if (existing.has(position)) part.squares", "part.squares"),
    "the values of the batch item before": ("if (before == n) return;", "if (before >= 0) return;"),
    "the shares of two lanes": ("second / (first + second)", "0.5f"),
    "no distance of means": (" + step * distance * step}", "}"),
    "the second half of the units": ("of.first += kHalf;", ""),
    "another pass": ("kept[(pass * kLeft + k)", "kept[k"),
    "the slot of another block": ("rank * kWarps + warp", "rank / 2 * 2 * kWarps + warp"),
    "the epilogue": ("C::Epilogue::apply(sums[together][m][tile][i])", "sums[together][m][tile][i]"),
}
SHOWN_BY = {
    "another pass": "several passes",
    "the values of the batch item before": "many tiles of each batch item",
    "the slot of another block": "many tiles of each batch item",
}


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path, few: str) -> None:
    if few != "cpu":
        pytest.skip("the emulator takes other headers")
    text, replacement = MUTANTS[name]
    mutate_kernel("few_inputs", text, replacement, tmp_path / "kernels")
    case = CASES[SHOWN_BY.get(name, "one channel, lines of odd length")]
    operands = operands_of(case, "cpu")
    with kernel_from(tmp_path / "kernels", "few_inputs"), pytest.raises(AssertionError):
        check(case, operands)


# ---- The planner's promises.


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_group", [1, 4, 32])
def test_a_first_layer_with_a_norm(dtype: str, last: bool, per_group: int) -> None:
    """The kernel with moments is taken and spills one register at most."""
    layer = Layer(3, 32, (64, 64, 64), T3, T2, T1, T1, batch=4)
    wanted = replace(problem(layer, Pass.FORWARD, dtype), norm=Norm(32 // per_group, EPS))
    if last:
        strides = [channels_last_strides((4, channels, side, side, side)) for channels, side in ((3, 64), (32, 128))]
        wanted = replace(wanted, input=strides[0], output=strides[1])
    with forgetting():
        plan = planner.plan(wanted, H200)
    assert [launch.kernel for launch in plan.launches] == ["few_inputs", "statistics"] and plan.moments > 0
    assert plan.tile.endswith("leaves the moments of its result")
    # One norm group of all 32 channels leaves one number too many for the registers, in bfloat16.
    assert compiler.compile("few_inputs", plan.launches[0].constants, "sm_90a").report.spill_stores <= 4


def test_results_that_read_other_tensors_get_a_pass() -> None:
    layer = Layer(3, 32, (16, 16, 16), T3, T2, T1, T1)
    wanted = replace(problem(layer, Pass.FORWARD), norm=Norm(4, EPS))
    assert few_inputs.leaves_moments(wanted)
    assert not few_inputs.leaves_moments(replace(wanted, tail_wholes=1))
