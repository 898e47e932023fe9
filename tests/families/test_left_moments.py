"""The moments that the kernels for few input channels and for up-convolutions leave for a norm.

Statistics that are made of them are compared with float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from few_channels_layers import T1, T2, T3
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Layer, Triple, poisoned, to_tf32
from mutants import kernel_from, mutate_kernel
from orders import check_orders
from preferred import forgetting, only, preferring
from problems import H200, problem
from torch import Tensor

from tconv3d import emulator
from tconv3d.families.few_channels import inputs as few_inputs
from tconv3d.families.up import forward as up
from tconv3d.planning import planner
from tconv3d.planning.launch import Launch
from tconv3d.planning.problem import Norm, Pass, Problem, channels_last_strides, contiguous_strides
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

EPS = 1e-5
F16, BF16 = torch.float16, torch.bfloat16
DTYPES = [torch.float32, F16, BF16]
MOST = {"few_inputs": 3e-6, "up": 2e-6}  # errors of sums in float32 of products without rounding
PROCESSORS = {"few_inputs": 3, "up": 5}  # multiprocessors, so few that each has several tiles


@dataclass(frozen=True)
class Tile:
    """How blocks of up-convolutions divide the columns."""

    columns: int
    taps: int = 0  # taps of a block for channels-last tensors; all taps for others
    stages: int = 3


@dataclass(frozen=True)
class Case:
    """A layer, the channels of a norm group, and how many channels or columns share moments.

    The kernel of up-convolutions takes a case with a tile.
    """

    layer: Layer
    per_group: int
    unit: int = 0
    dtype: torch.dtype = torch.float32
    last: bool = False
    tile: Tile | None = None

    @property
    def kernel(self) -> str:
        return "up" if self.tile else "few_inputs"

    @property
    def groups(self) -> int:
        return self.layer.out_channels // self.per_group

    def tiling(self) -> up.Tiling:
        g = problem(self.layer, Pass.FORWARD).geometry
        assert self.tile is not None
        taps, dtype = self.tile.taps or g.taps, str(self.dtype)[6:]
        return up.Tiling(g, dtype, self.last, taps, self.tile.columns, self.tile.stages, few=self.last)


ODD = Layer(3, 20, (3, 5, 9), T3, T2, T1, batch=3)
ITEMS = Layer(24, 10, (3, 6, 20), T2, T2, batch=3)
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
    "up, one tile": Case(Layer(16, 8, (2, 4, 8), T2, T2, batch=1), 4, 32, tile=Tile(64)),
    "up, one channel, odd number of units": Case(Layer(20, 13, (4, 5, 10), T2, T2), 1, 8, tile=Tile(40)),
    "up, a norm group crosses blocks": Case(Layer(20, 12, (4, 5, 10), T2, T2), 6, 8, BF16, tile=Tile(40)),
    "up, one norm group": Case(Layer(16, 8, (4, 4, 10), T2, T2), 8, 32, F16, tile=Tile(32)),
    "up, three batch items, ragged tiles": Case(ITEMS, 5, 40, tile=Tile(40)),
    "up, three batch items, bfloat16": Case(ITEMS, 1, 8, BF16, tile=Tile(80)),
    "up, two lanes share a channel": Case(Layer(33, 7, (3, 4, 12), (1, 2, 2), (1, 2, 2)), 1, 4, tile=Tile(16)),
    "up, a channel for each lane": Case(Layer(17, 21, (1, 2, 72), (1, 1, 2), (1, 1, 2)), 3, 2, F16, tile=Tile(24)),
    "up, two channels for each lane": Case(Layer(24, 9, (1, 4, 16), T1, T1), 3, 1, tile=Tile(16)),
    "up, one tap along w": Case(Layer(24, 7, (4, 4, 6), (2, 2, 1), (2, 2, 1)), 1, 4, tile=Tile(24)),
    "up, four taps along w, channels in two blocks": Case(
        Layer(24, 5, (3, 4, 10), (1, 3, 4), (1, 3, 4)), 5, 4, tile=Tile(40)
    ),
    "up, more batch items than blocks": Case(Layer(16, 4, (1, 2, 4), T2, T2, batch=23), 2, 16, tile=Tile(32)),
    "up, channels last": Case(Layer(40, 24, (3, 5, 7), T2, T2), 3, 1, F16, True, Tile(64, 2)),
    "up, channels last, whole runs": Case(Layer(40, 24, (3, 5, 7), T2, T2), 8, 8, BF16, True, Tile(64, 2)),
    "up, channels last, two lanes": Case(
        Layer(40, 48, (3, 5, 7), T2, T2, batch=3), 24, 8, last=True, tile=Tile(64, 2)
    ),
    "up, channels last, whole blocks": Case(Layer(40, 64, (3, 5, 7), T2, T2), 32, 32, last=True, tile=Tile(128, 4)),
    "up, channels last, odd taps": Case(
        Layer(72, 40, (3, 5, 9), (3, 1, 3), (3, 1, 3), batch=3), 20, 4, BF16, True, Tile(96, 3, 2)
    ),
    "up, channels last, pointwise": Case(
        Layer(264, 40, (1, 9, 9), T1, bias=False), 1, 1, last=True, tile=Tile(32, 1)
    ),
}
Prepare = Callable[[Case], list[Tensor]]


@pytest.fixture
def prepare(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepare]:
    """A function that leaves a case to its kernel with its tiling, and returns the operands."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    for name, value in {"MIN_OUT": 1, "MIN_RATIO": 0, "MAX_REDUCED": 8}.items():
        monkeypatch.setattr(few_inputs, name, value)
    monkeypatch.setattr(up, "MIN_CHANNELS", 1)
    with ExitStack() as stack:
        taken = set[str]()

        def prepare_case(case: Case) -> list[Tensor]:
            if case.kernel == "up" and ours != "cpu" and torch.cuda.get_device_capability()[0] != 9:
                pytest.skip("warpgroup matrix instructions need compute capability 9.0")
            if case.kernel not in taken:
                device = replace(H200, multiprocessors=PROCESSORS[case.kernel])
                monkeypatch.setattr(executor, "device_of", lambda _: device)
                stack.enter_context(only(case.kernel, "direct"))
                stack.enter_context(preferring(case.kernel))
                taken.add(case.kernel)
            if case.tile and case.tile.columns:
                monkeypatch.setattr(up, "choose", lambda *_: case.tiling())
            torch.manual_seed(3)
            found = case.layer.operands(case.dtype, ours)
            found = [to_tf32(each) for each in found] if case.dtype is torch.float32 else found
            return [found[0].to(memory_format=torch.channels_last_3d), *found[1:]] if case.last else found

        yield prepare_case


@pytest.fixture
def emulated(ours: str) -> None:
    if ours != "cpu" or not emulator.available():
        pytest.skip("the emulator chooses the order of threads, finds races and takes other headers")


def statistics(case: Case, operands: list[Tensor], keep: bool = False) -> Tensor:
    """Returns the statistics of convolution and ReLU; memory that is not written is poisoned."""
    bias = operands[2] if len(operands) > 2 else None
    with poisoned():
        return executor.forward_with_statistics(*operands[:2], bias, case.groups, EPS, case.layer.settings, keep)[1]


def exact(case: Case, operands: list[Tensor]) -> Tensor:
    """Returns the values of every norm group, in float64."""
    wide = [each.double() for each in operands]
    bias = wide[2] if len(wide) > 2 else None
    values = F.conv_transpose3d(*wide[:2], bias, *case.layer.settings).relu()
    return values.reshape(case.layer.batch, case.groups, -1)


def check(case: Case, operands: list[Tensor], keep: bool = False) -> Tensor:
    """Compares means, relative to the largest value, and deviations, relative to themselves."""
    found, values = statistics(case, operands, keep), exact(case, operands)
    mean, deviation = values.mean(2), (values.var(2, correction=0) + EPS).sqrt()
    of_mean = (found[0].double() - mean).abs() / values.abs().amax(2).clamp(min=1e-30)
    of_deviation = (found[1].double() * deviation - 1).abs()
    assert torch.maximum(of_mean, of_deviation).nan_to_num(nan=1e30).max() < MOST[case.kernel]
    return found


@pytest.mark.parametrize("name", CASES)
def test_statistics_against_float64(name: str, prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    operands = prepare(case)
    ran: list[Launch] = []
    original = executor._steps
    monkeypatch.setattr(executor, "_steps", lambda plan, names: (ran.extend(plan.launches), original(plan, names))[1])
    check(case, operands)
    assert [launch.kernel for launch in ran][:2] == [case.kernel, "statistics"]
    assert dict(ran[0].constants)["kMomentUnit"] == case.unit


@pytest.mark.slow
@settings(max_examples=12)
@given(
    layer=small_layers((4, 5, 9), st.integers(1, 3), st.integers(1, 20)),
    divisor=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    last=st.booleans(),
)
def test_generated_geometries(layer: Layer, divisor: int, dtype: torch.dtype, last: bool, prepare: Prepare) -> None:
    per_group = layer.out_channels // (divisor if layer.out_channels % divisor == 0 else layer.out_channels)
    case = Case(layer, per_group, 0, dtype, last)
    check(case, prepare(case))


@pytest.mark.slow
@settings(max_examples=10)
@given(
    channels=st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5)),
    taps=st.sampled_from([T1, (1, 1, 2), (1, 2, 2), (3, 1, 2), (1, 1, 4), T2]),
    size=st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([8, 16, 24, 40])),
    batch=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    last=st.booleans(),
)
def test_generated_up_convolutions(
    channels: Triple, taps: Triple, size: Triple, batch: int, dtype: torch.dtype, last: bool, prepare: Prepare
) -> None:
    """The planner chooses the tiling."""
    inputs, groups, per_group = channels
    if last:
        inputs, groups, taps = 8 * inputs, 8 * groups, (taps[2], taps[0], 3)
    layer = Layer(inputs, groups * per_group, size, taps, taps, batch=batch)
    case = Case(layer, per_group, 0, dtype, last, Tile(0))
    check(case, prepare(case))


@pytest.mark.parametrize("name", ["up, three batch items, ragged tiles", "up, channels last, two lanes"])
def test_weights_that_are_kept_in_order(name: str, prepare: Prepare) -> None:
    """The first call takes the weight as it is, the second packs and keeps it, the third finds it packed."""
    case = CASES[name]
    operands = prepare(case)
    first, *others = [check(case, operands, keep=True) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)
    (task,) = executor._tasks.values()
    assert task.packing is not None and "start" in vars(task.packing)  # which the third call made


def test_a_pass_behind_weights_that_are_kept(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel leaves no moments, the pass also follows the launches that find the weight packed."""
    case = CASES["up, three batch items, ragged tiles"]
    monkeypatch.setattr(up, "leaves_moments", lambda _: False)
    operands = prepare(case)
    first, *others = [check(case, operands, keep=True) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "name",
    [
        "one channel, lines of odd length",
        "channels last, whole blocks",
        "up, three batch items, ragged tiles",
        "up, channels last, odd taps",
    ],
)
def test_a_large_mean_does_not_drown_the_deviations(name: str, prepare: Prepare) -> None:
    """The sum of squares of values near 1000 has few digits left for deviations of about 1."""
    case = CASES[name]
    operands = prepare(case)
    operands[2].fill_(1000)
    deviation = (exact(case, operands).var(2, correction=0) + EPS).sqrt()
    found = statistics(case, operands)[1].double() * deviation
    assert ((found - 1).abs() < 1e-4).all()  # values near 1000 are rounded in float32


@pytest.mark.parametrize("name", ["one channel, lines of odd length", "up, three batch items, ragged tiles"])
def test_a_first_value_far_from_the_mean(name: str, prepare: Prepare) -> None:
    """The first values of each channel are 128 deviations from the mean, and no shift is near them."""
    operands = prepare(CASES[name])
    operands[0][:, :, 0, 0, 0] *= 128  # a power of two, so that no digit is lost
    check(CASES[name], operands)


@pytest.mark.parametrize(
    "name",
    ["two lanes share four channels", "up, one channel, odd number of units", "up, channels last, pointwise"],
)
def test_special_values_stay_in_their_batch_item(name: str, prepare: Prepare) -> None:
    """A NaN in one batch item reaches the statistics of all its norm groups, and of no other batch item."""
    operands = prepare(CASES[name])
    operands[0][1, 2, 0, 2, 1] = float("nan")
    found = statistics(CASES[name], operands)
    assert found[:, 1].isnan().all() and not found[:, ::2].isnan().any()


@pytest.mark.parametrize(
    "name",
    [
        "more batch items than blocks",
        "several passes",
        "up, more batch items than blocks",
        "up, channels last, two lanes",
    ],
)
def test_no_order_of_threads_changes_a_bit(
    name: str, prepare: Prepare, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = prepare(CASES[name])
    check_orders(ours, monkeypatch, lambda: [statistics(CASES[name], operands)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "one channel, lines of odd length",
        "several passes",
        "up, three batch items, ragged tiles",
        "up, channels last, odd taps",
    ],
)
def test_no_access_to_shared_memory_races(
    name: str, prepare: Prepare, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulator._sanitizers():
        pytest.skip("the race detector runs without other sanitizers")
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")
    operands = prepare(CASES[name])
    for _ in range(2):  # with the weight as it is, and packed
        check(CASES[name], operands, keep=True)


# Broken kernels: the text and what takes its place, and the case that shows it, if not the kernel's first.
MUTANTS = {
    "few_inputs": {
        "positions that do not exist": ("line ? args.y_size.w - w : 0", "line ? 99 : 0"),
        "deviations of them": ("if (existing.has(position)) part.squares", "part.squares"),
        "the values of the batch item before": (
            "if (before == n) return;", "if (before >= 0) return;", "many tiles of each batch item",
        ),
        "the shares of two lanes": ("second / (first + second)", "0.5f"),
        "no distance of means": (" + step * distance * step}", "}"),
        "the second half of the units": ("of.first += kHalf;", ""),
        "another pass": ("kept[(pass * kLeft + k)", "kept[k", "several passes"),
        "the slot of another block": (
            "rank * kWarps + warp", "rank / 2 * 2 * kWarps + warp", "many tiles of each batch item",
        ),
        "the epilogue": ("C::Epilogue::apply(sums[together][m][tile][i])", "sums[together][m][tile][i]"),
    },
    "up": {
        "positions that do not exist": ("first + layout.own_position() < args.positions", "true"),
        "the values of the batch item before": ("if (n != item) {", "if (item < 0) {"),
        "the weight of an empty half": ("second / (first + second)", "0.5f"),
        "no distance of means": (" + step * distance * step}", "}"),
        "lanes that share a unit": ("distance >= 4 || distance < kSharing", "distance >= 4"),
        "the second half of the units": ("of.first += kHalf;", ""),
        "another lane's half": ("given = upper ? given : second;", "given = upper ? second : given;"),
        "the slot of another consumer": ("rank * 4 + warp", "rank / 2 * 8 + warp"),
        "the epilogue": ("C::Epilogue::apply(sums.at[i])", "sums.at[i]"),
    },
}  # fmt: skip
SHOWN_BY = {"few_inputs": "one channel, lines of odd length", "up": "up, one channel, odd number of units"}


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), [(kernel, name) for kernel in MUTANTS for name in MUTANTS[kernel]])
def test_mutants_are_found(kernel: str, name: str, tmp_path: Path, prepare: Prepare, emulated: None) -> None:
    text, replacement, *shown_by = MUTANTS[kernel][name]
    mutate_kernel(kernel, text, replacement, tmp_path / "kernels")
    case = CASES[shown_by[0] if shown_by else SHOWN_BY[kernel]]
    operands = prepare(case)
    with kernel_from(tmp_path / "kernels", kernel), pytest.raises(AssertionError):
        check(case, operands)


# ---- The planner's promises.


def forward_of(layer: Layer, dtype: str, last: bool) -> Problem:
    found = problem(layer, Pass.FORWARD, dtype)
    if not last:
        return found
    shapes = (layer.batch, layer.in_channels, *layer.size), (layer.batch, layer.out_channels, *found.output_size)
    return replace(found, input=channels_last_strides(shapes[0]), output=channels_last_strides(shapes[1]))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_group", [1, 4, 32])
@pytest.mark.parametrize("kernel", ["few_inputs", "up"])
def test_a_layer_with_a_norm(kernel: str, dtype: str, last: bool, per_group: int) -> None:
    """The kernel with moments is taken and spills one register at most; up-convolutions are a tenth slower."""
    first, decoder = Layer(3, 32, (64, 64, 64), T3, T2, T1, T1, batch=4), Layer(64, 32, (64, 64, 64), T2, T2)
    plain = forward_of(decoder if kernel == "up" else first, dtype, last)
    wanted = replace(plain, norm=Norm(32 // per_group, EPS))
    with forgetting():
        plan = planner.plan(wanted, H200)
    assert [launch.kernel for launch in plan.launches] == [kernel, "statistics"] and plan.moments > 0
    assert plan.tile.endswith("leaves the moments of its result")
    made = compiler.compile(kernel, plan.launches[0].constants, "sm_90a")
    # One norm group of all 32 channels leaves one number too many for the registers of few_inputs, in bfloat16.
    assert made.report.spill_stores <= (4 if kernel == "few_inputs" else 0)
    if kernel == "up":
        assert not made.serialized
        assert plan.kept is not None
        assert [each.kernel for each in plan.kept.launches] == ["up_pack", "up", "statistics"]
        assert up.work(wanted, H200).cycles < 1.1 * up.work(plain, H200).cycles


def test_results_that_read_other_tensors_get_a_pass() -> None:
    few = replace(problem(Layer(3, 32, (16, 16, 16), T3, T2, T1, T1), Pass.FORWARD), norm=Norm(4, EPS))
    assert few_inputs.leaves_moments(few) and not few_inputs.leaves_moments(replace(few, tail_wholes=1))
    many = replace(problem(Layer(64, 32, (16, 16, 16), T2, T2), Pass.FORWARD), norm=Norm(4, EPS))
    assert up.leaves_moments(many) and many.output == contiguous_strides((2, 32, 32, 32, 32))
    reading = replace(many, tail="tconv3d::Sum", tail_wholes=1)
    assert not up.leaves_moments(reading) and "reads other tensors" in (up.why_not(reading, H200) or "")
