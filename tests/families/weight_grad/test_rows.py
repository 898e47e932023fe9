"""Weight gradients of channels-last 16-bit tensors whose rows of channels are K, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Layer, allowed_error, passes, poisoned, wrong_elements
from preferred import preferring
from problems import H200, problem
from weight_gradients import check, tensors

import tconv3d
from tconv3d import emulator
from tconv3d.families.weight_grad import rows
from tconv3d.planning.launch import Launch
from tconv3d.planning.problem import Pass, Problem, channels_last_strides
from tconv3d.torch_ops import executor

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
LAYERS = {
    "stride two, odd rows": Layer(64, 96, (3, 5, 9), T3, T2, T1),
    "few inputs": Layer(16, 40, (2, 4, 17), T3, T2, T1, T1),
    "few outputs": Layer(72, 16, (2, 3, 8), T3, T1, T1),
    "dilated": Layer(16, 32, (3, 4, 10), T3, T2, T1, (0, 1, 0), T2, batch=1),
    "large kernel": Layer(16, 32, (2, 3, 7), (1, 5, 7), (1, 2, 3), (0, 2, 1), (0, 1, 2)),
    "groups": Layer(64, 48, (3, 4, 6), T3, T2, T1, T1, groups=2),
    "padding beyond the kernel": Layer(16, 32, (4, 5, 6), T2, T1, T2, batch=1),
    "one voxel": Layer(24, 40, T1, T3, T2),
}


@pytest.fixture
def always(ours: str) -> Iterator[str]:
    """Every weight gradient that the kernel can compute goes to it."""
    if ours != "cpu" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup matrix instructions need compute capability 9.0")
    with preferring("rows_weight_grad"):
        yield ours


def compare(layer: Layer, dtype: torch.dtype, device: str, seed: int = 0) -> None:
    x, dy = (each.to(memory_format=torch.channels_last_3d) for each in tensors(layer, dtype, device, seed))
    check(layer, x, dy)


def last(layer: Layer, dtype: str = "bfloat16") -> Problem:
    found = problem(layer, Pass.WEIGHT_GRAD, dtype)
    x, y = (layer.batch, layer.in_channels), (layer.batch, layer.out_channels)
    input, output = channels_last_strides((*x, *layer.size)), channels_last_strides((*y, *found.output_size))
    return replace(found, input=input, output=output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, dtype: torch.dtype, always: str) -> None:
    assert rows.why_not(last(LAYERS[name]), executor.EMULATED) is None
    compare(LAYERS[name], dtype, always)


BIASED = {
    "inputs as rows": (True, LAYERS["stride two, odd rows"]),
    "outputs as rows": (False, Layer(16, 72, (2, 3, 8), T3, T2, T1, batch=1)),
    "groups": (True, LAYERS["groups"]),
}


@pytest.mark.parametrize("name", BIASED)
def test_bias_gradients_come_with_the_weight(name: str, always: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_are_input, layer = BIASED[name]
    monkeypatch.setattr(rows, "_sides", lambda g: (rows_are_input,))
    rows.tiling.cache_clear()
    launches: list[Launch] = []
    prepare = emulator.prepare
    monkeypatch.setattr(emulator, "prepare", lambda launch: launches.append(launch) or prepare(launch))
    x, dy = (each.to(memory_format=torch.channels_last_3d) for each in tensors(layer, torch.bfloat16, always))
    weight = layer.operands(torch.bfloat16, always)[1].requires_grad_()
    bias = torch.zeros(layer.out_channels, dtype=torch.bfloat16, device=always, requires_grad=True)
    with poisoned():
        y = tconv3d.conv_transpose3d(x, weight, bias, *layer.settings)
        dw, db = torch.autograd.grad(y, (weight, bias), dy)
    exact, largest = (each.double().sum((0, 2, 3, 4)) for each in (dy, dy.abs()))
    wrong = wrong_elements("bias gradient", db, exact, allowed_error(exact, largest, torch.bfloat16))
    assert wrong is None, wrong
    expected = passes(F.conv_transpose3d, [x.double(), weight.detach().double()], layer.settings, dy.double())[1][1]
    assert float((dw - expected).norm() / expected.norm()) < 4e-3
    if always == "cpu":
        constants = [dict(each.constants) for each in launches if each.kernel == "rows_weight_grad"]
        assert [(each["kBias"], each["kRowsAreInput"]) for each in constants] == [(True, rows_are_input)]
        assert all(each.kernel != "channel_sum" for each in launches)
    rows.tiling.cache_clear()


@pytest.mark.parametrize("box", [(1, 16), (2, 8), (4, 24), (6, 8)], ids=str)
def test_every_kind_of_box(box: tuple[int, int], always: str) -> None:
    with patch.object(rows, "BOXES", (box,)):
        rows.tiling.cache_clear()
        compare(LAYERS["stride two, odd rows"], torch.bfloat16, always)
    rows.tiling.cache_clear()


@pytest.mark.parametrize("way", (0, 1), ids=("one phase along h", "all phases along h"))
def test_every_way_to_divide_the_taps(way: int, always: str) -> None:
    divide = rows._tap_sets
    with patch.object(rows, "_tap_sets", lambda *layer: iter(list(divide(*layer))[way : way + 1])):
        rows.tiling.cache_clear()
        compare(LAYERS["stride two, odd rows"], torch.bfloat16, always)
    rows.tiling.cache_clear()


@pytest.mark.slow
@settings(max_examples=12)
@given(
    layer=small_layers((3, 5, 18), st.sampled_from((16, 40, 72)), st.sampled_from((32, 64, 80))), half=st.booleans()
)
def test_generated_layers(layer: Layer, half: bool, always: str) -> None:
    compare(layer, torch.float16 if half else torch.bfloat16, always)


def test_what_it_refuses_and_why() -> None:
    layer = Layer(64, 96, (20, 40, 40), T3, T2, T1, batch=8)
    taken = last(layer)
    assert rows.why_not(taken, H200) is None
    for refused, reason in (
        (problem(layer, Pass.WEIGHT_GRAD, "bfloat16"), "rows of channels"),
        (replace(taken, aligned=False), "rows of channels"),
        (last(layer, "float32"), "32-bit"),
        (last(replace(layer, groups=8)), "multiples of 8"),
        (last(replace(layer, in_channels=8)), "tensor cores idle"),
        (replace(taken, which=Pass.INPUT_GRAD), "input_grad"),
    ):
        assert reason in (rows.why_not(refused, H200) or "")
    dilated = last(Layer(64, 96, (4, 5, 6), T3, T2, T1, dilation=T2))
    assert rows.why_not(dilated, H200) is None
    assert "bias" in (rows.why_not(replace(dilated, bias=True), H200) or "")
    assert "Hopper" in (rows.why_not(taken, replace(H200, capability=(8, 0))) or "")


def test_a_plan_for_an_h200_fits_it() -> None:
    plan = rows.plan(last(Layer(64, 96, (20, 40, 40), T3, T2, T1, batch=8)), H200)
    assert plan.launches[0].shared_bytes <= H200.shared_bytes
    assert 0.8 * H200.multiprocessors <= plan.launches[0].grid[0] <= H200.multiprocessors
