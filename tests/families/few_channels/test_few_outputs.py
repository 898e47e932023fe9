"""The forward pass with few output channels on tensor cores, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import few_channels_layers
import pytest
import torch
from few_channels_layers import T1, T2, T3
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import TRAPS, Layer, check, to_tf32
from preferred import only, preferring
from problems import A100, H200, problem
from registers import report_of

import tconv3d
from tconv3d.families.few_channels import outputs as few_outputs_planner
from tconv3d.planning.problem import Pass

LAYERS = {
    **few_channels_layers.LAYERS,
    "several tiles and parts": Layer(8, 1, (30, 11, 19), (2, 3, 3), T1, (0, 1, 1), batch=1),
    "flat": Layer(16, 4, (9, 4, 5), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "outputs that no plane feeds": Layer(8, 1, (2, 3, 3), T1, (3, 3, 3), T1),
    "deep dilation": Layer(8, 1, (5, 3, 4), (3, 2, 2), (2, 1, 1), (1, 0, 0), (0, 0, 0), (3, 1, 1)),
    "wide, whole vectors": Layer(40, 1, (2, 9, 64), T3, T2, T1, T1, batch=1),
}


@pytest.fixture
def few_outputs(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything that the family can compute goes to it; the direct family has the rest."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    monkeypatch.setattr(few_outputs_planner, "MIN_IN", 1)
    with only("few_outputs", "direct"), preferring("few_outputs"):
        yield ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, dtype: torch.dtype, few_outputs: str) -> None:
    operands = LAYERS[name].operands(dtype, few_outputs)
    if dtype == torch.float32:  # products of such numbers are exact
        operands = [to_tf32(operand) for operand in operands]
    assert tconv3d.explain(*operands[:2], None, *LAYERS[name].settings, gpu="H200").kernel == "few_outputs"
    check(LAYERS[name], dtype, few_outputs, operands, forward_only=True)


def exact(layer: Layer, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Operands whose products on tensor cores are exact."""
    operands = layer.operands(dtype, device)
    return [to_tf32(operand) for operand in operands] if dtype == torch.float32 else operands


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gan", "monai", "odd channels", "wide, whole vectors"])
def test_channels_last(name: str, dtype: torch.dtype, few_outputs: str) -> None:
    operands = exact(LAYERS[name], dtype, few_outputs)
    operands[0] = operands[0].to(memory_format=torch.channels_last_3d)
    check(LAYERS[name], dtype, few_outputs, operands, forward_only=True)


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str, few_outputs: str) -> None:
    layer = replace(TRAPS[name], batch=1)
    check(layer, torch.float32, few_outputs, exact(layer, torch.float32, few_outputs), forward_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_unaligned_and_strided_operands(dtype: torch.dtype, few_outputs: str) -> None:
    layer = replace(LAYERS["monai"], size=(3, 4, 8))
    x, *others = exact(layer, dtype, few_outputs)
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device=few_outputs)[1:].view(x.shape).copy_(x)
    turned = x.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0)
    for one in (shifted, turned, x[:, :, :1].expand(x.shape)):
        check(layer, dtype, few_outputs, [one, *others], forward_only=True)


@pytest.mark.slow
@settings(max_examples=15)
@given(layer=small_layers((5, 6, 20), st.integers(1, 20), st.integers(1, 3)), half=st.booleans(), last=st.booleans())
def test_generated_geometries(layer: Layer, half: bool, last: bool, few_outputs: str) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    operands = exact(layer, dtype, few_outputs)
    if last:
        operands[0] = operands[0].to(memory_format=torch.channels_last_3d)
    check(layer, dtype, few_outputs, operands, forward_only=True)


def test_float32_is_rounded_to_nearest(few_outputs: str) -> None:
    """Inputs halfway and more above a TF32 number go up: truncation would lose half a unit on average."""
    x = torch.full((1, 8, 2, 2, 2), 1 + 3 * 2**-12, device=few_outputs)
    w = torch.ones(8, 1, 1, 1, 1, device=few_outputs)
    assert torch.equal(
        tconv3d.conv_transpose3d(x, w), torch.full((1, 1, 2, 2, 2), 8 * (1 + 2**-10), device=few_outputs)
    )


def test_what_it_refuses_and_why() -> None:
    taken = problem(LAYERS["monai"], Pass.FORWARD)
    assert few_outputs_planner.why_not(taken, H200) is None
    assert few_outputs_planner.why_not(taken, A100) is None
    for refused, device, reason in (
        (replace(taken, which=Pass.INPUT_GRAD), H200, "forward"),
        (replace(taken, tf32=False, dtype="float64"), H200, "float64"),
        (problem(Layer(8, 1, (4, 4, 4), T2, T2), Pass.FORWARD, tf32=False), H200, "8 terms"),
        (taken, replace(A100, capability=(7, 5)), "8.0"),
        (problem(Layer(32, 5, (4, 4, 4), T3, T2), Pass.FORWARD), H200, "more than 4"),
        (problem(Layer(7, 1, (4, 4, 4), T3), Pass.FORWARD), H200, "fewer than 8"),
        (problem(Layer(8, 1, (4, 4, 4), (9, 9, 9), T1, (4, 4, 4)), Pass.FORWARD), H200, "products"),
    ):
        assert reason in (few_outputs_planner.why_not(refused, device) or "")


def test_a_new_depth_height_or_batch_compiles_nothing() -> None:
    layer = LAYERS["gan"]
    first = few_outputs_planner.plan(problem(layer, Pass.FORWARD, size=(64, 64, 128)), H200)
    for size, batch in (((4, 8, 256), 1), ((1, 1, 96), 2), ((7, 65, 132), 3)):
        other = few_outputs_planner.plan(problem(replace(layer, batch=batch), Pass.FORWARD, size=size), H200)
        assert other.launches[0].constants == first.launches[0].constants


@pytest.mark.parametrize("name", ["gan", "monai", "wide, whole vectors"])
def test_keeps_the_window_in_registers(name: str) -> None:
    for dtype in ("float32", "float16"):
        large = problem(LAYERS[name], Pass.FORWARD, dtype, size=(32, 32, 64))
        launch = few_outputs_planner.plan(large, H200).launches[0]
        report = report_of(launch)
        assert report.spill_stores <= 32  # some values that wait, none of the window
