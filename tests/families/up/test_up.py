"""The forward pass of up-convolutions (kernel equal to stride): against float64, and what its planner promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Layer, Triple, assert_right, passes, poisoned, tensor_core_error
from orders import check_orders
from preferred import only, preferring
from problems import A100, H200
from torch import Tensor

from tconv3d.families.up import forward as up
from tconv3d.planning import planner
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.problem import Norm, Pass, Problem, channels_last_strides, contiguous_strides
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
T2 = (2, 2, 2)


@dataclass(frozen=True)
class Case:
    """A layer, and how blocks divide it."""

    layer: Layer
    columns: int
    stages: int = 3
    taps: int = 0  # taps of a block, in channels-last tensors

    def tiling(self, dtype: torch.dtype) -> up.Tiling:
        g = geometry(self.layer)
        taps = self.taps or g.taps
        return up.Tiling(g, str(dtype)[6:], self.taps > 0, taps, self.columns, self.stages, few=self.taps > 0)


CASES = {
    "one tile": Case(Layer(16, 8, (2, 4, 8), T2, T2, batch=1), 64),
    "nothing whole": Case(Layer(20, 13, (4, 5, 10), T2, T2), 40, stages=2),
    "more stages of K than the ring has": Case(Layer(200, 6, (2, 3, 36), T2, T2, bias=False), 16),
    "three batch items": Case(Layer(24, 10, (3, 6, 20), T2, T2, batch=3), 40),
    "two taps along h": Case(Layer(33, 7, (3, 4, 12), (1, 2, 2), (1, 2, 2)), 16),
    "two taps along d": Case(Layer(40, 12, (4, 5, 36), (2, 1, 2), (2, 1, 2)), 24, 2),
    "four taps along w, odd planes": Case(Layer(24, 5, (3, 4, 10), (1, 3, 4), (1, 3, 4)), 40),
    "one tap along w": Case(Layer(24, 7, (4, 4, 6), (2, 2, 1), (2, 2, 1)), 24),
    "taps along w alone": Case(Layer(17, 21, (1, 2, 72), (1, 1, 2), (1, 1, 2)), 24, 4),
    "channels last": Case(Layer(40, 24, (3, 5, 7), T2, T2), 64, taps=2),
    "channels last, odd taps": Case(Layer(72, 40, (3, 5, 9), (3, 1, 3), (3, 1, 3), batch=3), 96, stages=2, taps=3),
    "channels last, pointwise": Case(Layer(264, 40, (1, 9, 9), (1, 1, 1), bias=False), 32, taps=1),
}
HALVES = {
    torch.float16: ["nothing whole", "two taps along d", "channels last", "four taps along w, odd planes"],
    torch.bfloat16: ["one tile", "three batch items", "two taps along h", "channels last, odd taps"],
}
RUN = [(torch.float32, name) for name in CASES]
RUN += [(dtype, name) for dtype, names in HALVES.items() for name in names]


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


def _last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last_3d)


def geometry(layer: Layer) -> Geometry:
    options = (layer.padding, layer.output_padding, layer.groups, layer.dilation)
    return Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, layer.stride, *options)


def tiled(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> Layer:
    """The layer, for which the planner has no choice."""
    monkeypatch.setattr(up, "choose", lambda *_: CASES[name].tiling(dtype))
    return CASES[name].layer


def result(layer: Layer, operands: list[Tensor], relu: bool = False, keep: bool = False) -> Tensor:
    """Returns the up kernel's result; memory that it does not write is poisoned."""
    bias = operands[2] if len(operands) > 2 else None
    with poisoned():
        return executor.forward(operands[0], operands[1], bias, layer.settings, relu, keep)


def check(layer: Layer, operands: list[Tensor], relu: bool = False) -> None:
    """Every element against float64, its error in roundings of the same sum over absolute values."""
    got, dtype = result(layer, operands, relu), operands[0].dtype
    exact = [operand.double() for operand in operands]
    expected = passes(F.conv_transpose3d, exact, layer.settings, forward_only=True)[0]
    largest = passes(F.conv_transpose3d, [one.abs() for one in exact], layer.settings, forward_only=True)[0]
    expected = expected.relu() if relu else expected
    assert got.dtype == dtype
    assert_right("result", got, expected, tensor_core_error(expected, largest, dtype))


@pytest.mark.parametrize(("dtype", "name"), RUN, ids=str)
def test_against_float64(dtype: torch.dtype, name: str, only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tiled(monkeypatch, name, dtype)
    operands = layer.operands(dtype, only_up)
    if CASES[name].taps:
        operands[0] = _last(operands[0])
    if name == "channels last, odd taps":
        operands[1] = _last(operands[1])
    check(layer, operands, relu=name in ("nothing whole", "channels last"))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "nothing whole"),
        (torch.float32, "more stages of K than the ring has"),
        (torch.float16, "channels last"),
        (torch.bfloat16, "four taps along w, odd planes"),
    ],
)
def test_weights_that_are_kept_in_order(
    dtype: torch.dtype, name: str, only_up: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call takes the weight as it is, the second packs and keeps it, the third finds it packed."""
    layer = tiled(monkeypatch, name, dtype)
    operands = layer.operands(dtype, only_up)
    if CASES[name].taps:
        operands[:2] = [one.to(memory_format=torch.channels_last_3d) for one in operands[:2]]
    first, *others = [result(layer, operands, keep=True) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)
    (task,) = executor._tasks.values()
    assert task.packing is not None and "start" in vars(task.packing)  # which the third call made


@pytest.mark.slow
@settings(max_examples=8)
@given(
    channels=st.tuples(st.integers(1, 80), st.integers(1, 40)),
    taps=st.sampled_from([(1, 1, 2), (1, 2, 2), (2, 1, 2), T2]),
    size=st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([8, 16, 24, 40])),
    batch=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    last=st.booleans(),
)
def test_generated(
    channels: tuple[int, int], taps: Triple, size: Triple, batch: int, dtype: torch.dtype, last: bool, only_up: str
) -> None:
    """As the planner has it."""
    if last:
        channels, taps = (8 * channels[0], 8 * channels[1]), (taps[2], taps[0], 3)
    layer = Layer(*channels, size, taps, taps, batch=batch)
    operands = layer.operands(dtype, only_up)
    if last:
        operands[0] = _last(operands[0])
    assert up.why_not(problem(layer, str(dtype)[6:], last), H200) is None
    check(layer, operands)


def test_parts_of_larger_tensors(only_up: str) -> None:
    """A slice of channels, and a weight that begins at an odd number of 16-bit items."""
    layer = Layer(16, 6, (2, 4, 8), T2, T2)
    x = torch.randn(2, 40, 2, 4, 8).to(only_up, torch.bfloat16)[:, 8:24]
    w = torch.randn(16 * 6 * 8 + 1).to(only_up, torch.bfloat16)[1:].view(16, 6, 2, 2, 2)
    assert w.data_ptr() % 4 == 2
    check(layer, [x, w])
    layer, w = Layer(16, 8, (2, 4, 8), T2, T2), torch.randn(16 * 8 * 8 + 1).to(only_up, torch.bfloat16)[1:]
    check(layer, [_last(x), w.view(16, 2, 2, 2, 8).permute(0, 4, 1, 2, 3)])


def test_no_order_of_threads_changes_the_result(only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tiled(monkeypatch, "more stages of K than the ring has", torch.float32)
    operands = layer.operands(torch.float32, only_up)
    check_orders(only_up, monkeypatch, lambda: [result(layer, operands)])


def test_special_values_stay_with_their_position(only_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN reaches the outputs of its own position, and nothing through what only fills a tile or a step of K."""
    layer = tiled(monkeypatch, "nothing whole", torch.float32)
    x, w, b = layer.operands(torch.float32, only_up)
    x[1, 19, 3, 4, 9] = float("nan")
    where = result(layer, [x, w, b]).isnan().any(1).nonzero()
    assert where.tolist() == [[1, d, h, v] for d in (6, 7) for h in (8, 9) for v in (18, 19)]


# ---- The planner's promises.


def problem(layer: Layer, dtype: str = "float32", last: bool = False) -> Problem:
    g = geometry(layer)
    weight = (g.in_channels, g.out_per_group, *layer.kernel)
    shapes = (
        (layer.batch, g.in_channels, *layer.size),
        weight,
        (layer.batch, g.out_channels, *g.output_size(layer.size)),
    )
    x, w, y = map(contiguous_strides, shapes)
    if last:
        x, y = map(channels_last_strides, (shapes[0], shapes[2]))
    return Problem(Pass.FORWARD, g, layer.batch, layer.size, dtype, x, w, y, tf32=True)


UP = Layer(64, 32, (64, 64, 64), T2, T2)


def test_what_it_refuses_and_why() -> None:
    taken = problem(UP)
    assert up.why_not(taken, H200) is None
    for refused, device, reason in (
        (replace(taken, which=Pass.INPUT_GRAD), H200, "forward"),
        (replace(taken, tf32=False), H200, "TF32"),
        (replace(taken, dtype="float64"), H200, "float64"),
        (replace(taken, input=channels_last_strides((2, 64, 64, 64, 64))), H200, "pieces"),
        (problem(replace(UP, in_channels=10), last=True), H200, "pieces"),
        (problem(replace(UP, out_channels=20), "bfloat16", last=True), H200, "pieces"),
        (replace(taken, output=channels_last_strides((2, 32, 128, 128, 128))), H200, "pieces"),
        (replace(taken, aligned=False), H200, "pieces"),
        (replace(taken, batch=0), H200, "none"),
        (replace(taken, norm=Norm(4, 1e-5), tail_wholes=1), H200, "moments"),
        (taken, A100, "9.0"),
        (problem(replace(UP, stride=(2, 2, 1))), H200, "stride"),
        (problem(replace(UP, kernel=(2, 2, 3), stride=(2, 2, 3))), H200, "along w"),
        (problem(replace(UP, padding=(1, 1, 1))), H200, "padding"),
        (problem(replace(UP, output_padding=(1, 0, 0))), H200, "padding"),
        (problem(replace(UP, groups=2)), H200, "groups"),
        (problem(replace(UP, in_channels=3)), H200, "channels"),
        (problem(replace(UP, out_channels=4), last=True), H200, "4 output channels"),
        (problem(replace(UP, in_channels=8192)), H200, "shared memory"),
        (problem(replace(UP, size=(8, 8, 9))), H200, "pieces"),
        (problem(replace(UP, size=(1, 3, 6))), H200, "pieces"),
    ):
        assert reason in (up.why_not(refused, device) or "")


def test_few_output_channels_have_a_column_for_every_tap() -> None:
    for layer, last, kernel in (
        (replace(UP, out_channels=3), False, "up"),
        (replace(UP, out_channels=1, kernel=(1, 2, 2), stride=(1, 2, 2)), False, "up"),
        (replace(UP, out_channels=4), True, "few_outputs"),
        (replace(UP, out_channels=2, kernel=(1, 1, 1), stride=(1, 1, 1)), False, "up"),
        (replace(UP, out_channels=2, kernel=(2, 2, 3), stride=(2, 2, 3)), False, "few_outputs"),
    ):
        assert planner.plan(problem(layer, last=last), H200).kernel == kernel


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder(dtype: str, last: bool) -> None:
    """Shared memory suffices, one wave fills the GPU, the compiler keeps products in flight and nothing spills."""
    for inputs, outputs, side in ((64, 32, 64), (256, 128, 16), (320, 256, 8)):
        (launch,) = up.plan(problem(Layer(inputs, outputs, (side,) * 3, T2, T2), dtype, last), H200).launches
        assert launch.kernel == "up" and launch.shared_bytes <= H200.shared_bytes
        assert 0.9 * H200.multiprocessors < launch.grid[0] <= H200.multiprocessors
        if side != 16:
            made = compiler.compile("up", launch.constants, "sm_90a")
            assert not made.serialized and made.report.spill_stores == 0


def test_volumes_of_a_kind_share_a_build() -> None:
    builds = {
        up.plan(problem(replace(UP, size=size, batch=batch)), H200).launches[0].constants
        for size, batch in (((64, 64, 64), 2), ((80, 48, 64), 2), ((96, 96, 96), 1), ((64, 64, 64), 5))
    }
    assert len(builds) == 1
