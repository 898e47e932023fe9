"""The gradients of small groups in strict float32, as three TF32 products: errors, special values, plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from all_gradients import gradients, tensors
from ampere import AMPERE
from layers import Layer, passes
from mutants import kernel_from, mutate_kernel
from preferred import forgetting, kernels_of, preferring
from problems import H200, problems
from torch import Tensor

import tconv3d
from tconv3d.families.group_backward import planner as group
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Pass, Problem, channels_last_strides
from tconv3d.torch_ops import executor

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last_3d
LAYERS = {
    "grouped_strided": Layer(16, 16, (3, 3, 21), T3, T2, T1, groups=2),
    "no stride, odd channels": Layer(10, 14, (3, 4, 13), T3, groups=2, batch=1),
    "bundles, five taps along w": Layer(12, 16, (2, 3, 17), (1, 2, 5), (2, 1, 3), (0, 1, 2), (1, 0, 2), groups=4),
    "dilated": Layer(16, 8, (3, 4, 16), (3, 2, 3), (1, 2, 2), (2, 0, 1), (0, 1, 1), (2, 3, 3), groups=2),
}


@pytest.fixture(autouse=True)
def preferred(ours: str) -> Iterator[str]:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    tconv3d.allow_tf32_in_groups(False)
    with preferring("group_backward"):
        yield ours


def exact_gradients(layer: Layer, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    operands = [t.double() for t in (x, w, torch.zeros(layer.out_channels, device=x.device))]
    return passes(F.conv_transpose3d, operands, layer.settings, dy.double())[1]


def errors(layer: Layer, x: Tensor, w: Tensor, dy: Tensor) -> list[float]:
    """Returns the norms of the errors of all gradients against float64, relative to the norms of the gradients."""
    pairs = zip(gradients(layer, x, w, dy), exact_gradients(layer, x, w, dy), strict=True)
    return [float((mine.double() - exact).norm() / exact.norm()) for mine, exact in pairs]


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, CONTIGUOUS) for name in LAYERS), ("grouped_strided", LAST)], ids=str
)
def test_errors_are_of_float32(name: str, layout: torch.memory_format, preferred: str) -> None:
    layer = LAYERS[name]
    x, w, dy = tensors(layer, torch.float32, preferred)
    operands = x.contiguous(memory_format=layout), w, dy.contiguous(memory_format=layout)
    assert max(errors(layer, *operands)) < 2.5e-7


def test_errors_do_not_grow_with_the_number_of_positions(preferred: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each warp makes 400 additions of positive numbers; without totals their error would be 1e-7."""
    monkeypatch.setattr(group, "split_of", partial(one_block, group.split_of))
    layer = Layer(8, 4, (40, 4, 128), (1, 1, 1), groups=2, batch=1)
    assert errors(layer, *(t.abs() for t in tensors(layer, torch.float32, preferred)))[1] < 6e-8


@pytest.mark.parametrize("layout", [CONTIGUOUS, LAST], ids=str)
def test_two_planes_in_shared_memory_suffice(
    layout: torch.memory_format, preferred: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU without the copy engine and with little shared memory, under the race detector."""
    if preferred != "cpu":
        pytest.skip("the GPU at hand decides")
    layer = Layer(8, 8, (4, 3, 125), T3, T2, T1, groups=2, batch=1)
    x, w, dy = tensors(layer, torch.float32, preferred)
    operands = x.contiguous(memory_format=layout), w, dy.contiguous(memory_format=layout)
    weight_grad = strict(layer)[Pass.WEIGHT_GRAD]
    if layout is LAST:
        shapes = (1, 8, *layer.size), (1, 8, *weight_grad.output_size)
        x_strides, y_strides = map(channels_last_strides, shapes)
        weight_grad = replace(weight_grad, input=x_strides, output=y_strides)
    device = replace(AMPERE, shared_bytes=group.Tile(weight_grad, 1, True, 2**20).bytes(2))
    found = group.tile_of(weight_grad, True, device)
    assert found is not None and found.stages == 2
    monkeypatch.setattr(executor, "EMULATED", device)
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")
    assert max(errors(layer, *operands)) < 2.5e-7


def one_block(split_of: Callable[..., group.Split], *problem: object) -> group.Split:
    return replace(split_of(*problem), splits=1)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 1e-30, -3.4e38])
def test_special_values_reach_the_result(value: float, preferred: str) -> None:
    """One value of x, w or dy is special, and every sum that contains it is what float64 says.

    An infinite dy may make a weight gradient NaN: positions of x that do not exist are zeros.
    """
    layer = Layer(16, 16, (3, 3, 14), T3, T1, T1, groups=2, batch=1)
    ones = [torch.ones_like(t) for t in tensors(layer, torch.float32, preferred)]
    for place in range(3):
        operands = [t.clone() for t in ones]
        operands[place][0, 3, 1, 1, 1] = value
        got, exact = gradients(layer, *operands)[:2], exact_gradients(layer, *operands)[:2]
        for number, (mine, right) in enumerate(zip(got, exact, strict=True)):
            right = right.float()
            if number == 1 and place == 2:
                mine, right = (torch.where(t.isfinite(), t, torch.inf) for t in (mine, right))
            assert torch.allclose(mine, right, rtol=1e-6, atol=0.0, equal_nan=True)


def strict(layer: Layer) -> dict[Pass, Problem]:
    """Returns the problems of the gradients where PyTorch allows TF32, but computes this layer in float32."""
    found = problems(layer)
    return {which: replace(p, tf32=False, loose=which is not Pass.BIAS_GRAD) for which, p in found.items()}


def test_the_planner_takes_it_for_all_gradients() -> None:
    with forgetting():
        wanted = strict(Layer(32, 32, (32, 64, 128), T3, T2, T1, groups=4, batch=4))
        assert kernels_of(wanted, H200) == dict.fromkeys(wanted, "group_backward")
    alone = [group.work(p, H200).cycles for which, p in wanted.items() if which is not Pass.BIAS_GRAD]
    (both,) = (a.work().cycles for a in group.offer(wanted, H200) if isinstance(a, Offer) and len(a.passes) == 3)
    assert max(alone) <= both < sum(alone)


@pytest.mark.parametrize("term", ["low_a, high_b", "high_a, low_b"])
def test_a_kernel_that_leaves_out_a_product_is_found(term: str, preferred: str, tmp_path: Path) -> None:
    if preferred != "cpu":
        pytest.skip("broken kernels run in the emulator")
    layer = LAYERS["dilated"]
    mutate_kernel("group_backward", f"ptx::warp_multiply<kOperand>(sum, {term});", "", tmp_path / "kernels")
    with forgetting(), kernel_from(tmp_path / "kernels", "group_backward"):
        assert max(errors(layer, *tensors(layer, torch.float32, preferred))) > 1e-5
