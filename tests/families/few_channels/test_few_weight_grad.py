"""The weight gradient of layers with few input or few output channels on tensor cores, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from few_channels_layers import DTYPES, LAYERS, T1, T2, T3, swapped
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import TRAPS, Layer
from orders import check_orders
from preferred import only, preferring
from problems import A100, H200, problem
from registers import report_of
from weight_gradients import check, tensors, weight_grad

from tconv3d.families.few_channels import weight_grad as few_weight_grad_planner
from tconv3d.planning import planner
from tconv3d.planning.problem import Pass

KERNEL = "few_weight_grad"


@pytest.fixture
def few(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything that the family can compute goes to it; the direct family has the rest."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    monkeypatch.setattr(few_weight_grad_planner, "MIN_MANY", 1)
    monkeypatch.setattr(few_weight_grad_planner, "MAX_FEW", 8)
    with only(KERNEL, "direct"), preferring(KERNEL):
        yield ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, dtype: torch.dtype, few: str) -> None:
    for layer in (LAYERS[name], swapped(LAYERS[name])):
        assert planner.plan(problem(layer, Pass.WEIGHT_GRAD), H200).kernel == KERNEL
        check(layer, *tensors(layer, dtype, few))


@pytest.mark.parametrize("name", ["gan", "monai", "odd channels", "three phases along w"])
def test_channels_last(name: str, few: str) -> None:
    last = torch.channels_last_3d
    for dtype in (torch.float32, torch.bfloat16):
        for layer in (LAYERS[name], swapped(LAYERS[name])):
            x, dy = tensors(layer, dtype, few)
            check(layer, x.to(memory_format=last), dy.to(memory_format=last))
            check(layer, x, dy.to(memory_format=last))  # each its own


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str, few: str) -> None:
    check(TRAPS[name], *tensors(TRAPS[name], torch.float32, few))


def test_unaligned_and_strided_operands(few: str) -> None:
    layer = replace(LAYERS["monai"], size=(3, 4, 8))
    for dtype in (torch.float32, torch.float16):
        x, dy = tensors(layer, dtype, few)
        shifted = torch.empty(x.numel() + 1, dtype=dtype, device=few)[1:].view(x.shape)  # one element off
        check(layer, shifted.copy_(x), dy)
        check(layer, x.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0), dy)
        check(layer, x, torch.ones((), dtype=dtype, device=few).expand(dy.shape))
        check(layer, x, dy.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0))


@pytest.mark.slow
@settings(max_examples=15)
@given(layer=small_layers((4, 5, 9), st.integers(1, 3), st.integers(1, 20)), half=st.booleans(), last=st.booleans())
def test_generated_geometries(layer: Layer, half: bool, last: bool, few: str) -> None:
    memory_format = torch.channels_last_3d if last else torch.contiguous_format
    for one in (layer, swapped(layer)):
        x, dy = tensors(one, torch.bfloat16 if half else torch.float32, few)
        check(one, x.to(memory_format=memory_format), dy.to(memory_format=memory_format))


def test_bitwise_reproducible_in_any_order_of_threads(few: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["many tiles"]
    x, dy = tensors(layer, torch.float32, few)
    assert torch.equal(weight_grad(layer, x, dy), weight_grad(layer, x, dy))
    check_orders(few, monkeypatch, lambda: [weight_grad(layer, x, dy)])


def test_batch_zero(few: str) -> None:
    x, dy = tensors(LAYERS["monai"], torch.float32, few)
    assert not weight_grad(LAYERS["monai"], x[:0], dy[:0]).any()


def test_what_it_refuses_and_why() -> None:
    taken = problem(LAYERS["monai"], Pass.WEIGHT_GRAD)
    assert few_weight_grad_planner.why_not(taken, H200) is None
    assert few_weight_grad_planner.why_not(taken, A100) is None
    for refused, device, reason in (
        (replace(taken, which=Pass.FORWARD), H200, "weight gradients"),
        (replace(taken, tf32=False), H200, "TF32"),
        (taken, replace(A100, capability=(7, 5)), "8.0"),
        (problem(Layer(32, 5, (4, 4, 4), T3, T2), Pass.WEIGHT_GRAD), H200, "more than 4"),
        (problem(Layer(7, 1, (4, 4, 4), T3), Pass.WEIGHT_GRAD), H200, "fewer than 8"),
        (problem(Layer(8, 1, (4, 4, 90), T2, T1, dilation=(90, 90, 90)), Pass.WEIGHT_GRAD), H200, "reach"),
    ):
        assert reason in (few_weight_grad_planner.why_not(refused, device) or "")


def test_a_new_volume_or_batch_compiles_nothing() -> None:
    for layer in (LAYERS["gan"], swapped(LAYERS["monai"])):
        first = few_weight_grad_planner.plan(problem(layer, Pass.WEIGHT_GRAD, size=(64, 64, 64)), H200)
        assert first.workspace_bytes <= H200.workspace_bytes
        for size, batch in (((4, 8, 16), 1), ((1, 1, 4), 2), ((7, 65, 32), 3)):
            other = few_weight_grad_planner.plan(
                problem(replace(layer, batch=batch), Pass.WEIGHT_GRAD, size=size), H200
            )
            assert other.launches[0].constants == first.launches[0].constants


@pytest.mark.parametrize("name", ["gan", "monai", "several passes"])
def test_compiles_without_spills(name: str) -> None:
    for layer in (LAYERS[name], swapped(LAYERS[name])):
        for dtype in ("float32", "float16"):
            launch = few_weight_grad_planner.plan(problem(layer, Pass.WEIGHT_GRAD, dtype), H200).launches[0]
            report = report_of(launch)
            assert report.spill_stores <= 16 and report.stack_bytes <= 16  # a value or two that waits, by compiler
