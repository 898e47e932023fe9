"""Few channels on one side and many on the other, on tensor cores: passes that read or give few, against float64.

These are forward passes with few inputs, input gradients with few outputs, and weight gradients with either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import weight_gradients
from few_channels_layers import DTYPES, LAYERS, T1, T2, T3, swapped
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import TRAPS, Layer, assert_right, guarded, passes, poisoned, tensor_core_error
from orders import check_orders
from preferred import only, preferring
from problems import A100, H200, problem
from registers import report_of
from torch import Tensor

from tconv3d.families.few_channels import inputs as few_inputs_planner
from tconv3d.families.few_channels import weight_grad as few_weight_grad_planner
from tconv3d.families.few_channels.tiles import Taps
from tconv3d.planning import planner
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.problem import Pass
from tconv3d.planning.side import Side
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

KERNELS = {Pass.FORWARD: "few_inputs", Pass.INPUT_GRAD: "few_inputs", Pass.WEIGHT_GRAD: "few_weight_grad"}
PLANNERS = {"few_inputs": few_inputs_planner, "few_weight_grad": few_weight_grad_planner}
LAST = torch.channels_last_3d


@pytest.fixture
def few(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything that the kernels can compute goes to them; the direct family has the rest."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    for family, limits in (
        (few_inputs_planner, {"MIN_OUT": 1, "MIN_RATIO": 0, "MAX_REDUCED": 8}),
        (few_weight_grad_planner, {"MIN_MANY": 1, "MAX_FEW": 8}),
    ):
        for name, value in limits.items():
            monkeypatch.setattr(family, name, value)
    with only(*PLANNERS, "direct"), preferring(*PLANNERS):
        yield ours


def narrow(layer: Layer) -> Pass:
    """The pass beside the weight gradient that reads the side with few channels."""
    return Pass.INPUT_GRAD if layer.out_channels <= layer.in_channels else Pass.FORWARD


def check(layer: Layer, operands: list[Tensor], grad: Tensor | None = None) -> None:
    """The forward pass, or with `grad` the input gradient: every element, in roundings of the sum of absolutes."""
    exact = [operand.double() for operand in operands]
    positive = [operand.abs() for operand in exact]
    with poisoned():
        if grad is None:
            bias = operands[2] if len(operands) > 2 else None
            got = executor.forward(operands[0], operands[1], bias, layer.settings)
            expected = passes(F.conv_transpose3d, exact, layer.settings, forward_only=True)[0]
            largest = passes(F.conv_transpose3d, positive, layer.settings, forward_only=True)[0]
        else:
            got = executor.input_grad(grad, operands[1], tuple(operands[0].shape[2:]), layer.settings)
            expected = passes(F.conv_transpose3d, exact, layer.settings, grad.double())[1][0]
            largest = passes(F.conv_transpose3d, positive, layer.settings, grad.double().abs())[1][0]
    assert got.dtype == operands[0].dtype
    assert_right("result", got, expected, tensor_core_error(expected, largest, got.dtype, 12))


def check_both(layer: Layer, operands: list[Tensor], grad: Tensor) -> None:
    """The weight gradient, and the other pass that reads the side with few channels."""
    weight_gradients.check(layer, operands[0], grad)
    check(layer, operands, grad if narrow(layer) is Pass.INPUT_GRAD else None)


def tensors(layer: Layer, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    """Returns the operands and an output gradient."""
    return layer.operands(dtype, device), weight_gradients.tensors(layer, dtype, device)[1]


def permuted(tensor: Tensor) -> Tensor:
    return tensor.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0)


def misplaced(tensor: Tensor) -> Tensor:
    """Returns a copy at an address that is one element off."""
    return (
        torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape).copy_(tensor)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, dtype: torch.dtype, few: str) -> None:
    for layer in (LAYERS[name], swapped(LAYERS[name])):
        for which in (narrow(layer), Pass.WEIGHT_GRAD):
            assert planner.plan(problem(layer, which), H200).kernel == KERNELS[which]
        check_both(layer, *tensors(layer, dtype, few))


@pytest.mark.parametrize("name", ["gan", "monai", "odd channels", "three phases along w"])
def test_channels_last(name: str, few: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for layer in (LAYERS[name], swapped(LAYERS[name])):
            (x, w, *bias), dy = tensors(layer, dtype, few)
            last_w = w.to(memory_format=LAST)  # the result's format follows
            check_both(layer, [x.to(memory_format=LAST), last_w, *bias], dy.to(memory_format=LAST))
            check_both(layer, [x, last_w, *bias], dy.to(memory_format=LAST))  # each its own


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str, few: str) -> None:
    weight_gradients.check(TRAPS[name], *weight_gradients.tensors(TRAPS[name], torch.float32, few))
    layer = replace(TRAPS[name], batch=1)
    if layer.in_channels > 8:
        layer = replace(layer, in_channels=6, out_channels=6)
    operands, grad = tensors(layer, torch.float32, few)
    check(layer, operands)
    check(layer, operands, grad)


def test_unaligned_and_strided_operands(few: str) -> None:
    layer = replace(LAYERS["monai"], size=(3, 4, 8))
    for dtype in (torch.float32, torch.float16):
        operands, dy = tensors(layer, dtype, few)
        same = torch.ones((), dtype=dtype, device=few).expand(dy.shape)
        for grad in (misplaced(dy), permuted(dy), same):
            check(layer, operands, grad)
        turned = operands[1].permute(1, 0, 4, 3, 2).contiguous().permute(1, 0, 4, 3, 2)
        check(layer, [operands[0], turned], dy)
        x = operands[0]
        for one, other in ((misplaced(x), dy), (permuted(x), dy), (x, same), (x, permuted(dy))):
            weight_gradients.check(layer, one, other)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "with moments"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_passes_of_the_last_block_without_a_channel(dtype: torch.dtype, norm: bool, few: str) -> None:
    """Three whole passes of channels in blocks of two: the last block has a pass behind the last channel."""
    layer = Layer(2 if dtype is torch.float32 else 4, 384, (1, 2, 8), T3, padding=T1, batch=2)
    layout = few_inputs_planner.Layout(Taps.of(Side.of(problem(layer, Pass.FORWARD, str(dtype)[6:]))))
    assert layout.kinds * layout.passes == 4 and layout.along_w and not layout.spread
    assert layout.side.outs == 3 * 8 * layout.pass_tiles
    operands = layer.operands(dtype, few)
    if norm:
        with poisoned(), guarded():
            got = executor.forward_with_statistics(operands[0], operands[1], operands[2], 6, 1e-5, layer.settings)[0]
        exact = F.conv_transpose3d(*(each.double() for each in operands), padding=1).relu()
        assert (got.double() - exact).abs().max() < 0.02
        return
    with guarded():
        check(layer, operands)


@pytest.mark.slow
@settings(max_examples=15)
@given(layer=small_layers((4, 5, 9), st.integers(1, 3), st.integers(1, 20)), half=st.booleans(), last=st.booleans())
def test_generated_geometries(layer: Layer, half: bool, last: bool, few: str) -> None:
    memory_format = LAST if last else torch.contiguous_format
    for one, which in ((layer, Pass.FORWARD), (swapped(layer), Pass.INPUT_GRAD)):
        (x, w, *bias), dy = tensors(one, torch.bfloat16 if half else torch.float32, few)
        x, w, dy = (each.to(memory_format=memory_format) for each in (x, w, dy))
        weight_gradients.check(one, x, dy)
        check(one, [x, w, *bias], dy if which is Pass.INPUT_GRAD else None)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_special_values_reach_the_result(value: float, few: str) -> None:
    layer = Layer(1, 8, (2, 2, 6), T3, padding=T1, batch=1, bias=False)  # 27 taps leave a rest of K
    x, w = torch.zeros(1, 1, 2, 2, 6, device=few), torch.ones(8, 8, 3, 3, 3, device=few)[:1]
    x[0, 0, 0, 0, 2] = value
    got = executor.forward(x, w, None, layer.settings)[0, 0, 0, 0]
    reached = got.isnan() if value != value else got == value
    # A product with a zero that is no weight would be NaN: of what the value does not reach nothing may change.
    assert reached.tolist() == [False, True, True, True, False, False]
    assert (got[~reached] == 0).all()


def test_bitwise_reproducible_in_any_order_of_threads(few: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["many tiles"]
    (x, *_), dy = tensors(layer, torch.float32, few)
    first, again = (weight_gradients.weight_grad(layer, x, dy) for _ in range(2))
    assert torch.equal(first, again)
    check_orders(few, monkeypatch, lambda: [weight_gradients.weight_grad(layer, x, dy)])


def test_batch_zero(few: str) -> None:
    (x, *_), dy = tensors(LAYERS["monai"], torch.float32, few)
    assert not weight_gradients.weight_grad(LAYERS["monai"], x[:0], dy[:0]).any()


@pytest.mark.parametrize("which", [Pass.INPUT_GRAD, Pass.WEIGHT_GRAD], ids=lambda which: which.value)
def test_what_it_refuses_and_why(which: Pass) -> None:
    taken, why_not = problem(LAYERS["monai"], which), PLANNERS[KERNELS[which]].why_not
    assert why_not(taken, H200) is None and why_not(taken, A100) is None
    own = {
        Pass.INPUT_GRAD: (
            (replace(taken, which=Pass.WEIGHT_GRAD), "input gradient"),
            (problem(Layer(32, 9, (4, 4, 4), T3, T2), which), "more than 8"),
            (problem(Layer(32, 5, (4, 4, 4), T3), which), "more than 4"),
            (problem(Layer(15, 4, (4, 4, 4), T3), which), "fewer than 16"),
            (problem(Layer(8, 1, (4, 4, 90), T2, dilation=(90, 90, 90)), which), "reach"),
        ),
        Pass.WEIGHT_GRAD: (
            (replace(taken, which=Pass.FORWARD), "weight gradients"),
            (problem(Layer(32, 5, (4, 4, 4), T3, T2), which), "more than 4"),
            (problem(Layer(8, 1, (4, 4, 90), T2, T1, dilation=(90, 90, 90)), which), "reach"),
        ),
    }[which]
    both = (replace(taken, tf32=False), "TF32"), (problem(Layer(7, 1, (4, 4, 4), T3), which), "fewer than 8")
    for refused, reason in (*own, *both):
        assert reason in (why_not(refused, H200) or "")
    assert "8.0" in (why_not(taken, replace(A100, capability=(7, 5))) or "")


CALLS = [
    (Pass.INPUT_GRAD, LAYERS["gan"]),
    (Pass.FORWARD, swapped(LAYERS["monai"])),
    (Pass.WEIGHT_GRAD, LAYERS["gan"]),
    (Pass.WEIGHT_GRAD, swapped(LAYERS["monai"])),
]


@pytest.mark.parametrize(("which", "layer"), CALLS, ids=str)
def test_a_new_volume_or_batch_compiles_nothing(which: Pass, layer: Layer) -> None:
    plan = PLANNERS[KERNELS[which]].plan
    first = plan(problem(layer, which, size=(64, 64, 64)), H200)
    assert first.workspace_bytes <= H200.workspace_bytes
    for size, batch in (((4, 8, 16), 1), ((1, 1, 4), 2), ((7, 65, 32), 3)):
        other = plan(problem(replace(layer, batch=batch), which, size=size), H200)
        assert other.launches[0].constants == first.launches[0].constants


@pytest.mark.parametrize("output_padding, spread", [(0, True), (1, False)])
def test_lanes_exchange_outputs_of_lines_that_begin_anywhere(output_padding: int, spread: bool) -> None:
    layer = Layer(4, 24, (16, 32, 32), T3, T2, T1, (output_padding,) * 3, batch=64)
    for dtype in ("float32", "bfloat16"):
        found = problem(layer, Pass.FORWARD, dtype)
        plan = few_inputs_planner.plan(found, H200)
        assert dict(plan.launches[0].constants)["kSpread"] is spread
        offer = planner.taken({found.which: found}, H200)[0]
        assert offer.kernel == "few_inputs"
        assert offer.microseconds > 1e3 * GPUS["H200"].floor_ms(found), "faster than memory"


@pytest.mark.parametrize("name", ["gan", "monai", "several passes"])
@pytest.mark.parametrize("kernel", PLANNERS)
def test_compiles_without_spills(kernel: str, name: str) -> None:
    """A value or two of few_weight_grad wait in local memory, with some compilers."""
    most = {"few_inputs": 0, "few_weight_grad": 16}[kernel]
    for layer in (LAYERS[name], swapped(LAYERS[name])):
        which = narrow(layer) if kernel == "few_inputs" else Pass.WEIGHT_GRAD
        for dtype in ("float32", "float16"):
            report = report_of(PLANNERS[kernel].plan(problem(layer, which, dtype), H200).launches[0])
            assert report.spill_stores <= most and report.stack_bytes <= most


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_operands_of_16_bits_do_not_spill(arch: str) -> None:
    """Two vectors and two whole tensors, whose numbers take as many registers as the sums of a portion."""
    term = "tconv3d::Sum<tconv3d::Product<tconv3d::Value, tconv3d::Vectored<0>>, tconv3d::Vectored<1>>"
    tail = f"tconv3d::Sum<{term}, tconv3d::Product<tconv3d::Whole<0>, tconv3d::Whole<1>>>"
    layer = Layer(4, 24, (16, 32, 32), T3, T2, T1, batch=64)
    wanted = replace(problem(layer, Pass.FORWARD, "bfloat16"), tail=tail, tail_vectors=2, tail_wholes=2)
    with only("few_inputs", "direct"), preferring("few_inputs"):
        launch = planner.plan(wanted, H200).launches[0]
    assert launch.kernel == "few_inputs"
    assert compiler.compile(launch.kernel, launch.constants, arch).report.spill_stores == 0
