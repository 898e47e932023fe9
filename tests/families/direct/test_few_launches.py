"""Gradients of weight and bias by few launches: one launch for both, and one that adds the parts of both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import UNIT, Layer
from preferred import forgetting, preferring
from problems import H200, problems

import tconv3d
from tconv3d import emulator
from tconv3d.planning import planner, sums
from tconv3d.planning.problem import Pass
from tconv3d.torch_ops import executor

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA and not emulator.available(), reason="neither a GPU nor a C++ compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TINY = Layer(4, 4, (4, 4, 4), (3, 3, 3), batch=1)
WANTED = (False, True, True)


def kernels(layer: Layer, passes: tuple[Pass, ...]) -> list[str]:
    wanted = tuple(each for which, each in problems(layer).items() if which in passes)
    return [launch.kernel for launch in planner.plan_gradients(wanted, H200).launches]


def check(layer: Layer, dtype: torch.dtype, dy: torch.Tensor | None = None, shift: int = 0) -> list[torch.Tensor]:
    """Compares the gradients of weight and bias with float64; dy and x may begin `shift` elements off a vector."""
    torch.manual_seed(3)
    device = "cuda" if CUDA else "cpu"

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros(tensor.numel() + shift, dtype=dtype, device=device)
        memory[shift:] = tensor.flatten().to(dtype)
        return memory[shift:].view(tensor.shape)

    x = shifted(torch.randn(layer.batch, layer.in_channels, *layer.size))
    size = problems(layer)[Pass.WEIGHT_GRAD].output_size
    grad = shifted(torch.randn(layer.batch, layer.out_channels, *size)) if dy is None else dy
    with tconv3d.use_backend("cuda" if CUDA else "emulator"):
        found = executor.backward(grad, x, None, WANTED, layer.size, layer.kernel, layer.settings)
    stride, padding, output_padding, groups, dilation = layer.settings
    weight = torch.zeros(layer.in_channels, layer.out_channels // groups, *layer.kernel, dtype=torch.float64)
    weight.requires_grad_()
    bias = torch.zeros(layer.out_channels, dtype=torch.float64, requires_grad=True)
    wide, wide_grad = (each.cpu().double() for each in (x, grad))
    settings = stride, padding, output_padding, groups, dilation
    exact = torch.nn.functional.conv_transpose3d(wide, weight, bias, *settings)
    exact.backward(wide_grad, retain_graph=True)
    for ours, theirs in zip(found[1:], (weight.grad, bias.grad), strict=True):
        assert ours is not None and theirs is not None
        error = (ours.cpu().double() - theirs).abs().max()
        assert error <= 4 * UNIT[dtype] * theirs.abs().max() + (1e-12 if dtype is torch.float64 else 1e-5)
    return [each for each in found if each is not None]


def test_a_tiny_layer_needs_one_launch() -> None:
    with forgetting():
        assert kernels(TINY, (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD)) == ["direct_weight_grad"]


def test_a_gradient_with_one_part_is_written_by_the_kernel() -> None:
    with forgetting(), preferring("direct_weight_grad", "channel_sum"):
        assert kernels(TINY, (Pass.WEIGHT_GRAD,)) == ["direct_weight_grad"]
        assert kernels(TINY, (Pass.BIAS_GRAD,)) == ["channel_sum"]
        assert kernels(replace(TINY, size=(16, 16, 16)), (Pass.WEIGHT_GRAD,)) == ["direct_weight_grad", "reduce"]


def test_one_launch_adds_the_parts_of_two_plans() -> None:
    last = Layer(32, 2, (48, 48, 48), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), batch=4)
    with forgetting():
        found = kernels(last, (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD))
    assert found == ["few_weight_grad", "channel_sum", "reduce"]


def test_parts_of_two_plans_lie_apart() -> None:
    layer = replace(TINY, size=(16, 16, 16))
    wanted = tuple(each for which, each in problems(layer).items() if which in (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD))
    with forgetting(), preferring("direct_weight_grad", "channel_sum"):
        alone = [planner.plan(each, H200) for each in wanted]
        both = planner.plan_gradients(wanted, H200)
    assert [launch.kernel for launch in both.launches] == ["direct_weight_grad", "channel_sum", "reduce"]
    first, second, adding = both.launches
    starts = {"workspace": 0, **dict(both.regions)}
    places = sorted(starts[name] for launch in (first, second) for name in launch.pointers if name in starts)
    assert places[0] == 0 and places[1] >= alone[0].workspace_bytes
    assert both.workspace_bytes >= places[1] + alone[1].workspace_bytes
    assert [starts[name] for name in adding.pointers[::2]] == places and adding.pointers[1::2] == ("dw", "db")


def test_only_sums_of_one_type_are_joined() -> None:
    def adding(dtype: str) -> list[object]:
        return [sums.reduce_parts(dtype, count, 5, name, (1, 1, count), (0, 0, 1)) for name, count in SIZES]

    (first, second), (other, _) = adding("float32"), adding("float16")
    together = sums.joined(first, second)  # type: ignore[arg-type]
    assert sums.adds_one(first) and not sums.adds_one(together)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be one launch"):
        sums.joined(first, other)  # type: ignore[arg-type]


SIZES = (("dw", 70000), ("db", 33))  # few and many threads for an element


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_one_launch_for_both(dtype: torch.dtype, shift: int) -> None:
    with forgetting(), preferring("direct_weight_bias"):
        check(TINY, dtype, shift=shift)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_sum(dtype: torch.dtype) -> None:
    """The gradient of `sum` has strides of 0."""
    dy = torch.full((), 0.75, dtype=dtype, device="cuda" if CUDA else "cpu").expand(1, 4, 6, 6, 6)
    with forgetting(), preferring("direct_weight_bias"):
        check(TINY, dtype, dy)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_geometries(data: st.DataObject) -> None:
    """Layers of all settings, of which small ones have one launch and others two kernels and one sum."""
    draw = data.draw
    groups = draw(st.sampled_from((1, 1, 2)))
    triples = [st.tuples(*[st.integers(1, most)] * 3) for most in (9, 4, 3)]
    size, kernel, stride = (draw(each) for each in triples)
    channels = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    layer = Layer(
        groups * channels[0], groups * channels[1], size, kernel, stride, groups=groups, batch=draw(st.integers(1, 2))
    )
    dtype = draw(st.sampled_from(DTYPES))
    with forgetting(), preferring("direct_weight_bias", "direct_weight_grad", "channel_sum"):
        check(layer, dtype)


@pytest.mark.parametrize("ways", [("direct_weight_bias",), ("direct_weight_grad", "channel_sum")], ids=str)
def test_results_are_the_same_every_time_and_without_races(
    ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")
    layer = TINY if len(ways) == 1 else replace(TINY, size=(9, 9, 10))
    with forgetting(), preferring(*ways):
        first, second = check(layer, torch.float32), check(layer, torch.float32)
    assert all(map(torch.equal, first, second))
