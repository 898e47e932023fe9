"""Depthwise layers with large kernels, all passes, against float64: tiles of planes in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from few_channels_layers import T1, T2, T3
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import UNIT, Layer, allowed_error, passes, poisoned, wrong_elements
from layers import check as check_layer
from preferred import counted, kernels_of, preferring
from problems import H200, problem
from weight_gradients import tensors

import tconv3d
from tconv3d.families.depthwise import slabs, tiles, tiles_weight_grad
from tconv3d.planning import calibration, planner, repertoire
from tconv3d.planning.problem import Pass, Problem, bias_grad_problem, channels_last_strides
from tconv3d.torch_ops import executor

T5 = (5, 5, 5)
LAYERS = {
    "five": Layer(3, 3, (4, 5, 6), T5, T2, T2, T1, groups=3, batch=1),
    "stride one": Layer(2, 2, (3, 4, 9), (5, 3, 5), padding=(2, 1, 2), groups=2),
    "dilated, three phases": Layer(4, 4, (4, 3, 5), (2, 3, 2), (3, 2, 3), (1, 2, 1), (1, 0, 2), (2, 3, 1), 4),
    "empty phases": Layer(5, 5, (3, 4, 4), T3, T2, (3, 2, 2), T1, T2, 5),
    "several blocks": Layer(2, 2, (9, 18, 35), (3, 5, 5), T2, (1, 2, 2), T1, groups=2, batch=1),
    "whole copies": Layer(16, 16, (3, 4, 16), (3, 3, 5), (1, 2, 2), (1, 1, 2), (0, 1, 1), groups=16, batch=1),
    "groups": Layer(6, 4, (3, 4, 9), (2, 3, 5), (2, 2, 1), (1, 1, 2), (0, 1, 0), groups=2, batch=1),
    "groups of eight": Layer(16, 16, (2, 3, 4), (1, 3, 3), T2, (0, 1, 1), (0, 1, 1), groups=2, batch=1),
}
KERNELS = {
    Pass.FORWARD: "depthwise_tiles",
    Pass.INPUT_GRAD: "depthwise_tiles",
    Pass.WEIGHT_GRAD: "depthwise_tiles_weight_grad",
}
CASES = [
    *(
        (name, dtype, last)
        for name, (dtype, last) in product(LAYERS, ((torch.float32, False), (torch.bfloat16, True)))
    ),
    *(("whole copies", dtype, last) for dtype, last in ((torch.float32, True), (torch.float16, False))),
    *(("five", torch.float16, last) for last in (False, True)),
]
ROWS = [
    ("five", torch.float32, False),
    ("dilated, three phases", torch.bfloat16, True),
    ("several blocks", torch.float16, False),
    ("groups", torch.float32, True),
    ("empty phases", torch.bfloat16, False),
]
TEAMS = [
    ("five", torch.float32, False),
    ("five", torch.bfloat16, True),
    ("stride one", torch.bfloat16, False),
    ("several blocks", torch.float32, True),
    ("empty phases", torch.float16, False),
]
# Lines of every offset and length, with one and with several channels per block, tiles that end inside of a line,
# planes with more lines than tiles, and lines of whole vectors.
LINES = {
    "odd": Layer(3, 3, (4, 9, 11), T5, T2, T2, groups=3, batch=2),
    "even, not whole vectors": Layer(3, 3, (3, 5, 9), (3, 5, 5), T2, (1, 2, 2), T1, groups=3, batch=1),
    "one tile": Layer(5, 5, (3, 3, 4), (3, 3, 3), T2, T1, groups=5, batch=1),
    "stride one": Layer(2, 2, (3, 6, 13), (3, 3, 5), padding=(1, 1, 2), groups=2),
    "three phases": Layer(2, 2, (3, 4, 6), (3, 5, 5), (1, 2, 3), (1, 2, 1), groups=2, batch=1),
    "groups": Layer(6, 4, (3, 4, 9), (2, 3, 5), (2, 2, 1), (1, 1, 2), (0, 1, 0), groups=2, batch=1),
    "empty phases": Layer(5, 5, (3, 4, 5), T3, T2, (3, 2, 2), T1, T2, 5),
    "whole vectors": Layer(4, 4, (3, 5, 16), (3, 3, 5), (1, 2, 2), (1, 1, 2), (0, 1, 1), groups=4, batch=1),
}


PREFERRED = "depthwise_tiles", "depthwise_tiles_weight_grad"


@pytest.fixture
def ours(ours: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels with tiles compute all that they can, or the parameter's kernels, the first of them first."""
    with preferring(*getattr(request, "param", PREFERRED)):
        yield ours


def check(layer: Layer, dtype: torch.dtype, last: bool, device: str) -> set[str]:
    """Compares the result and all gradients with float64, and returns the families that made plans."""
    memory_format = torch.channels_last_3d if last else torch.contiguous_format
    operands = layer.operands(dtype, device)
    operands[0] = operands[0].to(memory_format=memory_format)
    dy = tensors(layer, dtype, device)[1].to(memory_format=memory_format)
    with poisoned(), counted() as families:
        y, _ = passes(tconv3d.conv_transpose3d, operands, layer.settings, forward_only=True)
        wanted = True, True, layer.bias
        gradients = executor.backward(dy, *operands[:2], wanted, layer.size, layer.kernel, layer.settings)
    exact = [operand.double() for operand in operands]
    expected, exact_gradients = passes(F.conv_transpose3d, exact, layer.settings, dy.double())
    absolute = [operand.abs() for operand in exact]
    largest, large_gradients = passes(F.conv_transpose3d, absolute, layer.settings, dy.double().abs())
    names = ("result", "input gradient", "weight gradient", "bias gradient")[: 1 + len(operands)]
    for name, got, exactly, bound in zip(
        names, (y, *gradients), (expected, *exact_gradients), (largest, *large_gradients), strict=False
    ):
        assert got is not None and got.dtype == dtype, name
        wrong = wrong_elements(name, got, exactly, allowed_error(exactly, bound, dtype))
        assert wrong is None, wrong
    return set(families)


@pytest.mark.parametrize(("name", "dtype", "last"), CASES, ids=str)
def test_against_float64(name: str, dtype: torch.dtype, last: bool, ours: str) -> None:
    assert {"depthwise_tiles", "depthwise_tiles_weight_grad"} <= check(LAYERS[name], dtype, last, ours)


@pytest.mark.parametrize("ours", [(tiles.BY_ROWS, *PREFERRED)], ids=["rows"], indirect=True)
@pytest.mark.parametrize(("name", "dtype", "last"), ROWS, ids=str)
def test_rows_of_taps_against_float64(
    name: str, dtype: torch.dtype, last: bool, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "MANY_TAPS", 0)
    check(LAYERS[name], dtype, last, ours)
    wanted = problem(LAYERS[name], Pass.INPUT_GRAD)
    assert kernels_of({Pass.INPUT_GRAD: wanted}, H200) == {Pass.INPUT_GRAD: tiles.BY_ROWS}


@pytest.mark.parametrize("ours", [(tiles.GATHERED, *PREFERRED)], ids=["gathered"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LINES)
def test_whole_lines_against_float64(name: str, dtype: torch.dtype, ours: str) -> None:
    check(LINES[name], dtype, False, ours)
    for which in tiles.PASSES:
        wanted = problem(LINES[name], which)
        assert kernels_of({which: wanted}, H200) == {which: tiles.GATHERED}


@pytest.mark.parametrize("ours", [(tiles_weight_grad.SHARED, *PREFERRED)], ids=["teams"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["odd", "stride one", "three phases", "groups"])
def test_lines_of_16_bits_at_any_address_against_float64(name: str, dtype: torch.dtype, ours: str) -> None:
    wanted = replace(problem(LINES[name], Pass.WEIGHT_GRAD), dtype="float16")
    assert any(
        tiling is not None and tiling.gradients.raw
        for tiling in (tiles_weight_grad._tiling(wanted, H200, shared) for shared in (False, True))
    )
    check(LINES[name], dtype, False, ours)


PAIRS = {
    "odd": Layer(6, 6, (4, 9, 11), T5, T2, T2, groups=6, batch=2),
    "several blocks": Layer(36, 36, (3, 5, 9), (3, 3, 5), T2, (1, 1, 2), T1, groups=36, batch=1),
    "stride one": Layer(2, 2, (3, 6, 13), (3, 3, 5), padding=(1, 1, 2), groups=2),
    "dilated, three phases": Layer(4, 4, (4, 3, 5), (2, 3, 2), (3, 2, 3), (1, 2, 1), (1, 0, 2), (2, 3, 1), 4),
    "empty phases": Layer(8, 8, (3, 4, 5), T3, T2, (3, 2, 2), T1, T2, 8),
}


@pytest.mark.parametrize("ours", [(tiles.PAIRS, *PREFERRED)], ids=["pairs"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_channels_against_float64(name: str, dtype: torch.dtype, ours: str) -> None:
    check(PAIRS[name], dtype, True, ours)
    for which in tiles.PASSES:
        assert kernels_of({which: channels_last(problem(PAIRS[name], which))}, H200) == {which: tiles.PAIRS}


@pytest.mark.parametrize("ours", [(tiles_weight_grad.SHARED, *PREFERRED)], ids=["teams"], indirect=True)
@pytest.mark.parametrize(("name", "dtype", "last"), TEAMS, ids=str)
def test_teams_of_taps_against_float64(name: str, dtype: torch.dtype, last: bool, ours: str) -> None:
    check(LAYERS[name], dtype, last, ours)
    wanted = problem(LAYERS[name], Pass.WEIGHT_GRAD)
    assert kernels_of({Pass.WEIGHT_GRAD: wanted}, H200) == {Pass.WEIGHT_GRAD: tiles_weight_grad.SHARED}


@pytest.mark.slow
@pytest.mark.parametrize(
    "ours", [PREFERRED, (tiles.GATHERED, tiles.PAIRS, tiles_weight_grad.SHARED, *PREFERRED)], ids=str, indirect=True
)
@settings(max_examples=16)
@given(layer=small_layers((5, 5, 9), st.integers(1, 4), None), half=st.booleans(), last=st.booleans())
def test_generated_geometries(layer: Layer, half: bool, last: bool, ours: str) -> None:
    check(layer, torch.bfloat16 if half else torch.float32, last, ours)


def test_the_bias_in_the_same_pass(ours: str) -> None:
    layer = LAYERS["several blocks"]
    x, dy = tensors(layer, torch.float32, ours)
    weight = problem(layer, Pass.WEIGHT_GRAD, tf32=False)
    bias = bias_grad_problem(layer.batch, layer.out_channels, weight.output_size, "float32", weight.output)
    assert [plan.kernel for plan in planner.gradient_plans((weight, bias), H200)] == [KERNELS[Pass.WEIGHT_GRAD]]
    with poisoned():
        both = executor.backward(dy, x, None, (False, True, True), layer.size, layer.kernel, layer.settings)
        again = executor.backward(dy, x, None, (False, True, True), layer.size, layer.kernel, layer.settings)
    assert all(torch.equal(a, b) for a, b in zip(both[1:], again[1:], strict=True))  # bitwise reproducible
    exact, largest = dy.double().sum((0, 2, 3, 4)), dy.double().abs().sum((0, 2, 3, 4))
    assert bool(((both[2].double() - exact).abs() <= 4 * UNIT[torch.float32] * largest).all())


def test_unaligned_and_strided_operands(ours: str) -> None:
    layer = LAYERS["whole copies"]
    x, *others = layer.operands(torch.float16, ours)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=ours)[1:].view(x.shape).copy_(x)
    turned = x.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0)
    for one in (shifted, turned):
        check_layer(layer, torch.float16, ours, [one, *others])


def channels_last(wanted: Problem) -> Problem:
    """Returns a pass of a depthwise layer on channels-last tensors."""
    channels = wanted.geometry.groups
    shapes = [(wanted.batch, channels, *size) for size in (wanted.input_size, wanted.output_size)]
    x, y = (channels_last_strides(shape) for shape in shapes)
    return replace(wanted, input=x, output=y)


def mednext(kernel: int, which: Pass, dtype: str, last: bool) -> Problem:
    """Returns a pass of MedNeXt's up-sampling layer on a large volume."""
    triple = (kernel,) * 3
    layer = Layer(96, 96, (48, 48, 48), triple, T2, (kernel // 2,) * 3, T1, groups=96, batch=2)
    wanted = replace(problem(layer, which, tf32=False), dtype=dtype)
    return channels_last(wanted) if last else wanted


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("kernel", [5, 7])
def test_large_kernels_go_to_tiles_and_are_not_far_above_the_floor(kernel: int, which: Pass) -> None:
    for dtype, last in product(("float32", "float16"), (False, True)):
        wanted = mednext(kernel, which, dtype, last)
        taken, *_ = planner.taken({which: wanted}, H200)
        floor = max(wanted.flops / 51e6, wanted.bytes / 4.27e6)
        names = {KERNELS[which], tiles.BY_ROWS, tiles.GATHERED, tiles.PAIRS, tiles_weight_grad.SHARED}
        assert taken.kernel in names or (taken.kernel == "depthwise_lines" and kernel == 5)
        assert taken.microseconds < 3 * floor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lines_of_odd_length_are_not_far_above_the_floor(dtype: str) -> None:
    layer = Layer(96, 96, (48, 48, 48), T5, T2, T2, groups=96, batch=2)
    wanted = replace(problem(layer, Pass.FORWARD, tf32=False), dtype=dtype)
    assert wanted.output_size == (95, 95, 95)
    taken, *_ = planner.taken({Pass.FORWARD: wanted}, H200)
    assert taken.kernel == tiles.GATHERED
    assert taken.microseconds < 1.9 * max(wanted.flops / 51e6, wanted.bytes / 4.27e6)


def test_threads_of_a_warp_read_different_banks() -> None:
    for kernel, which, dtype, last in product((5, 7), (Pass.FORWARD, Pass.INPUT_GRAD), ("float32",), (False, True)):
        plan = tiles.plan(mednext(kernel, which, dtype, last), H200)
        assert plan.launches[0].shared_bytes <= H200.shared_bytes
        tiling = tiles._tiling(mednext(kernel, which, dtype, last), H200, tiles.KERNEL)
        assert tiling is not None and tiling.slab.conflicts <= 1.5


def test_settled_slabs_have_fewer_conflicts() -> None:
    slab = slabs.Slab(True, 4, 8, 4, 2, 4, 4, 2, 2, 5, 5, -2, 4)  # four tiles of a warp along h
    rows = {slab.place(lane)[0] * slab.item // 4 % slabs.BANKS for lane in range(0, slabs.WARP, slab.channels)}
    assert len(rows) == 1, "without skews, all four tiles begin in one bank"
    assert slab.settled().conflicts == 1.0 and slab.settled().skew == 8


def test_what_they_refuse_and_why() -> None:
    forward, weight = (problem(LAYERS["five"], which) for which in (Pass.FORWARD, Pass.WEIGHT_GRAD))
    assert tiles.why_not(forward, H200) is None and tiles_weight_grad.why_not(weight, H200) is None
    wide = Layer(2, 2, (3, 3, 3), (1, 9, 9), padding=(0, 4, 4), groups=2)
    apart = Layer(2, 2, (3, 3, 3), (4, 8, 8), (4, 2, 2), groups=2)  # a plane of dy feeds one plane of dx
    input_grad = problem(LAYERS["five"], Pass.INPUT_GRAD)
    last = channels_last_strides((1, 3, *LAYERS["five"].size))
    for planner_of, refused, reason in (
        (tiles, weight, "forward pass"),
        (tiles_weight_grad, forward, "weight gradients"),
        (tiles, replace(forward, dtype="float64"), "float32"),
        (tiles_weight_grad, replace(weight, dtype="float64"), "float32"),
        (tiles, problem(Layer(20, 4, (3, 3, 3), T3), Pass.FORWARD), "channels per group"),
        (tiles_weight_grad, problem(Layer(20, 4, (3, 3, 3), T3), Pass.WEIGHT_GRAD), "pairs"),
        (tiles, problem(wide, Pass.FORWARD), "registers"),
        (partial(tiles.why_not, form=tiles.BY_ROWS), input_grad, "few instructions"),
        (partial(tiles.why_not, form=tiles.BY_ROWS), problem(apart, Pass.INPUT_GRAD), "shared memory"),
        (partial(tiles_weight_grad.why_not, shared=True), problem(LAYERS["groups"], Pass.WEIGHT_GRAD), "same planes"),
        (tiles_weight_grad, problem(wide, Pass.WEIGHT_GRAD), "registers"),
        (tiles_weight_grad, replace(weight, input=last), "channels-last"),
    ):
        why_not = planner_of.why_not if isinstance(planner_of, ModuleType) else planner_of
        assert reason in (why_not(refused, H200) or "")
    assert "workspace" in (tiles_weight_grad.why_not(weight, H200.thrifty) or "")


def test_derived_rates_are_compared_at_a_price_above_the_prediction() -> None:
    for kernel in set(KERNELS.values()):
        assert kernel in calibration.measured("H200") or calibration.surcharge(kernel, H200) > 1


@pytest.mark.parametrize(("which", "last"), list(product(KERNELS, (False, True))))
def test_volumes_of_a_layer_share_few_kernels(which: Pass, last: bool) -> None:
    """The first volume has its own best kernel; others of about its size take that one or one of few others."""
    planner_of = tiles_weight_grad if which is Pass.WEIGHT_GRAD else tiles

    def constants(height: int, width: int) -> object:
        asked = problem(replace(LAYERS["five"], size=(4, height, width)), which)
        if last:
            shapes = (1, 3, *asked.input_size), (1, 3, *asked.output_size)
            asked = replace(asked, input=channels_last_strides(shapes[0]), output=channels_last_strides(shapes[1]))
        with repertoire.meeting((which, last), (height, width)):
            return planner_of.plan(asked, H200).launches[0].constants

    volumes = list(product((12, 15, 18, 19), (20, 22, 23, 24)))
    alone = []
    for each in volumes:
        planner.forget()
        alone.append(constants(*each))
    planner.forget()
    found = [constants(*each) for each in volumes]
    planner.forget()
    assert found[0] == alone[0]
    assert len(set(found)) <= 0.6 * len(set(alone)), "builds of the first and of typical volumes are taken again"
