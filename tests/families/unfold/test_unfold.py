"""The gradients of small volumes as plain matrix products: against float64, and what their planner promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from all_gradients import check, check_special_value, gradients, tensors
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Layer, Triple
from orders import check_orders
from preferred import joint_plan, preferring
from problems import A100, H200, problems

from tconv3d.families.unfold import operands as unfold_operands
from tconv3d.families.unfold import planner as unfold
from tconv3d.planning import calibration, planner
from tconv3d.planning.calibration import Work
from tconv3d.planning.problem import Pass, Problem, channels_last_strides
from tconv3d.planning.repertoire import TYPICAL
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)

# Channels, terms and positions that fill nothing, and ones that do. The weights of narrow layers begin anywhere.
LAYERS = {
    "whole tiles": Layer(16, 8, (2, 4, 4), (2, 2, 4), T2),
    "nothing whole": Layer(20, 11, (2, 3, 3), T3, T2, T1, T1),
    "two row tiles": Layer(132, 3, (1, 2, 3), (3, 2, 2), (2, 1, 2), (1, 0, 0), batch=3),
    "odd terms": Layer(25, 5, (2, 2, 5), (1, 3, 3), (1, 2, 1), (0, 1, 1), batch=1),
    "dilated": Layer(8, 9, (3, 2, 4), (3, 2, 3), (1, 2, 3), (2, 0, 1), (0, 1, 1), (2, 3, 1)),
    "padding beyond the kernel": Layer(8, 4, (6, 6, 6), T2, T1, T3),
    "empty phases": Layer(7, 6, T3, T3, T2, (0, 1, 2), T1, T2),
    "up-convolution": Layer(24, 16, (3, 4, 4), T2, T2),
    "one tap": Layer(24, 12, (3, 4, 5), T1),
}
WIDE = Layer(384, 192, (2, 6, 6), T3, T2, T1, T1, batch=8)


@pytest.fixture
def unfolded(ours: str) -> Iterator[str]:
    """Every layer that the kernels can compute goes to them, whether they win or not."""
    if ours != "cpu" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup matrix instructions need compute capability 9.0")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    with preferring("unfold"):
        yield ours


def kernels(layer: Layer, bias: bool = True) -> list[str]:
    wanted = problems(layer)
    if not bias:
        del wanted[Pass.BIAS_GRAD]
    return [plan.kernel for plan in planner.gradient_plans(tuple(wanted.values()), H200)]


@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, unfolded: str) -> None:
    assert kernels(LAYERS[name]) == ["unfold"]
    check(LAYERS[name], torch.float32, unfolded)


@pytest.mark.parametrize(
    ("name", "tiling", "channels", "lines"),
    [
        ("whole tiles", (64, 96, 1, 1), 4, 4),  # planes
        ("whole tiles", (192, 192, 2, 2, 3), 2, 1),  # lines of a plane
        ("nothing whole", (64, 64, 9, 1), 8, 6),  # a chunk of terms each
        ("odd terms", (128, 64, 1, 2), 4, 4),
        ("padding beyond the kernel", (64, 64, 1, 3), 1, 2),
        ("dilated", (96, 288, 3, 2), 8, 1),
        ("one tap", (64, 64, 1, 1), 4, 8),
        ("empty phases", (64, 64, 1, 1), 4, 1),
        ("nothing whole", (64, 64, 1, 1), 4, 3),
    ],
    ids=str,
)
def test_tilings_and_slices(
    name: str, tiling: tuple[int, ...], channels: int, lines: int, unfolded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portions of either product, several tiles of columns, slices of planes and of lines."""
    monkeypatch.setattr(unfold, "tiling_of", lambda o, device: unfold.Tiling(*tiling))
    monkeypatch.setattr(unfold, "slices_of", lambda o, device: unfold_operands.Slices(o, channels, lines))
    check(LAYERS[name], torch.float32, unfolded)


def operands(layer: Layer) -> unfold_operands.Operands:
    return unfold_operands.Operands(problems(layer)[Pass.INPUT_GRAD].geometry, layer.batch, layer.size)


@pytest.mark.parametrize(
    ("name", "batch", "size", "items", "planes", "lines"),
    [
        ("nothing whole", 3, (2, 3, 3), 2, 2, 0),  # the last band is smaller
        ("one tap", 5, (3, 4, 5), 1, 3, 0),
        ("padding beyond the kernel", 2, (6, 6, 6), 1, 2, 6),
        ("padding beyond the kernel", 1, (7, 6, 6), 1, 4, 12),  # two slices of two planes; one and a half
        ("dilated", 2, (3, 6, 7), 1, 1, 3),  # lines of a plane
        ("empty phases", 2, (3, 5, 7), 1, 2, 0),
        ("whole tiles", 2, (2, 8, 4), 1, 1, 0),
    ],
    ids=str,
)
def test_bands(
    name: str,
    batch: int,
    size: Triple,
    items: int,
    planes: int,
    lines: int,
    unfolded: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other, where there is room for some batch items, or for some planes of one."""
    layer = replace(LAYERS[name], batch=batch, size=size)
    o = operands(layer)
    room = replace(o, batch=items, size=(planes, *size[1:])).bytes
    monkeypatch.setattr(unfold, "ROOMS", (room / H200.workspace_bytes,))
    unfold.forget()
    bands = unfold.bands_of(o, H200)
    assert (bands[0].items, bands[0].planes) == (items, planes) and len(bands) > 1
    if lines:
        monkeypatch.setattr(unfold, "slices_of", lambda o, device: unfold_operands.Slices(o, 4, lines))
    check(layer, torch.float32, unfolded)


def test_bands_have_every_plane_once() -> None:
    for batch, size in ((1, (7, 40, 40)), (5, (9, 20, 20)), (64, (4, 10, 10)), (2, (2, 8, 8))):
        o = operands(replace(WIDE, batch=batch, size=size))
        bands = unfold_operands.bands_within(o, unfold.ROOMS[0] * H200.workspace_bytes)
        found = [
            (item, plane)
            for band in bands
            for item in range(band.first_item, band.first_item + band.items)
            for plane in range(band.first_plane, band.first_plane + band.planes)
        ]
        assert sorted(found) == [(item, plane) for item in range(batch) for plane in range(size[0])]
        for band in bands:
            assert band.operands.bytes <= unfold.ROOMS[0] * H200.workspace_bytes
    assert not unfold.bands_of(operands(WIDE), H200.thrifty)


@pytest.mark.slow
@settings(max_examples=10)
@given(layer=small_layers((3, 4, 6), st.integers(4, 20), st.integers(1, 12)), planes=st.integers(0, 3))
def test_generated_geometries(layer: Layer, planes: int, unfolded: str) -> None:
    layer = replace(layer, batch=2)
    slices = unfold_operands.Slices(operands(layer), 4, planes * layer.size[1] or 1)
    with pytest.MonkeyPatch.context() as patch:
        if slices.whole:
            patch.setattr(unfold, "slices_of", lambda o, device: slices)
        executor.forget()
        check(layer, torch.float32, unfolded)


def test_no_order_of_threads_changes_the_result(unfolded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["two row tiles"]
    operands = tensors(layer, torch.float32, unfolded)
    check_orders(unfolded, monkeypatch, lambda: gradients(layer, *operands))


def test_special_values_stay_in_their_channel(unfolded: str) -> None:
    """A NaN reaches its own input positions and its own output channel, through nothing that only fills a tile."""
    check_special_value(LAYERS["up-convolution"], unfolded, (4, 1, 7), (2, 0, 3), (0, 1, 1))


# ---- The planner's promises.


def test_what_it_refuses_and_why() -> None:
    taken = problems(WIDE)
    assert unfold.why_not_together(taken, H200) is None

    def changed(**changes: object) -> dict[Pass, Problem]:
        return {which: replace(problem, **changes) for which, problem in taken.items()}  # type: ignore[arg-type]

    last = channels_last_strides((8, 192, 4, 12, 12))
    for refused, device, reason in (
        ({Pass.INPUT_GRAD: taken[Pass.INPUT_GRAD]}, H200, "both"),
        (changed(tf32=False), H200, "TF32"),
        (changed(dtype="float64"), H200, "float64"),
        (changed(dtype="bfloat16"), H200, "16-bit"),
        (changed(output=last), H200, "contiguous"),
        (changed(batch=0), H200, "nothing"),
        (taken, A100, "9.0"),
        (problems(replace(WIDE, groups=2)), H200, "groups"),
        (problems(replace(WIDE, size=(24, 64, 64))), H200, "parts"),
        (problems(replace(WIDE, size=(2, 200, 200))), H200, "plane"),
        (problems(Layer(8, 3, (2, 2, 2000), T3, T2)), H200, "shared memory"),
    ):
        assert reason in (unfold.why_not_together(refused, device) or "")


def test_wide_layers_on_small_volumes_get_it() -> None:
    wanted = problems(WIDE)
    (plan,) = planner.gradient_plans(tuple(wanted.values()), H200)
    assert plan.kernel == "unfold" and set(plan.passes) == set(wanted)
    assert all(launch.shared_bytes <= H200.shared_bytes for launch in plan.launches)
    assert plan.workspace_bytes < 2 * H200.workspace_bytes
    assert kernels(WIDE, bias=False) == ["unfold"]
    assert "unfold" not in kernels(Layer(64, 32, (64, 64, 64), T2, T2))


def test_a_layer_with_bias_does_not_decide_for_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    o = unfold_operands.Operands(problems(WIDE)[Pass.INPUT_GRAD].geometry, WIDE.batch, WIDE.size)
    with_bias, without = (unfold.cycles(o, H200, bias) for bias in (True, False))
    assert with_bias > without

    def price(kernel: str, problem: Problem, work: Work, *_: object) -> float:
        if kernel == "unfold":
            return work.cycles
        return (with_bias + without) / 2 if problem.which is Pass.INPUT_GRAD else 0.0

    monkeypatch.setattr(calibration, "microseconds", price)
    for order in ((True, False), (False, True)):
        unfold.forget()
        assert [("unfold" in kernels(WIDE, bias), bias) for bias in order] == [(not bias, bias) for bias in order]
    unfold.forget()


def test_larger_volumes_get_it_where_both_gradients_gain() -> None:
    """Odd lines of dy, which other kernels copy word by word; and where they have none, they do better."""
    odd = Layer(512, 240, (10, 40, 40), T3, T2, T1, batch=1)
    (plan,) = planner.gradient_plans(tuple(problems(odd).values()), H200)
    assert plan.kernel == "unfold" and "2 bands" in plan.tile and len(plan.launches) == 5
    assert plan.workspace_bytes <= (unfold.ROOMS[0] + 1) * H200.workspace_bytes
    assert "unfold" not in kernels(Layer(256, 128, (20, 80, 80), T3, T1, T1, batch=1))


def test_few_output_channels_on_small_volumes_get_it() -> None:
    """A small volume has too few tiles for kernels that walk over it; of a larger one they read everything once."""
    small = Layer(320, 4, (4, 16, 16), (4, 4, 4), T2, T1, batch=4)
    assert kernels(small) == ["unfold"]
    unfold.forget()
    assert "unfold" not in kernels(Layer(64, 1, (32, 32, 32), (4, 4, 4), T2, T1, batch=32))
    unfold.forget()


def test_a_new_volume_or_batch_compiles_nothing() -> None:
    """But what typical volumes need."""

    def compiled(layer: Layer) -> set[object]:
        plan = joint_plan(unfold, problems(layer), H200)
        return {(launch.kernel, launch.constants) for launch in plan.launches[:2]}

    def alone(layer: Layer) -> set[object]:
        unfold.forget()
        return compiled(layer)

    typical = [replace(WIDE, batch=batch, size=(edge, edge, edge)) for batch, edge in TYPICAL]
    fitting = [each for each in typical if operands(each).bytes <= H200.workspace_bytes]
    others = [replace(WIDE, batch=n, size=size) for n, size in ((7, WIDE.size), (1, (2, 6, 6)), (4, (3, 7, 5)))]
    assert alone(others[0]) != alone(WIDE)
    have = set().union(*map(alone, (WIDE, *fitting)))
    assert alone(WIDE) == compiled(WIDE)
    for other in others:
        assert compiled(other) <= have
    unfold.forget()


def test_products_are_not_serialized() -> None:
    for layer in (WIDE, replace(WIDE, in_channels=100, batch=2)):
        plan = joint_plan(unfold, problems(layer), H200)
        for launch in plan.launches[:2]:
            made = compiler.compile(launch.kernel, launch.constants, "sm_90a")
            assert not made.serialized and made.report.spill_stores == 0


def test_no_block_claims_registers_that_it_has_not() -> None:
    for consumers, (copying, multiplying) in unfold.REGISTERS.items():
        threads = 128 * (consumers + 1)
        assert 128 * (copying + consumers * multiplying) <= 65536 // threads // 8 * 8 * threads
