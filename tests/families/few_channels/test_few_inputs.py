"""Few channels in, many out, on tensor cores: forward passes and input gradients, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from few_channels_layers import DTYPES, LAYERS, T1, T2, T3, swapped
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import TRAPS, Layer, assert_right, guarded, passes, poisoned, tensor_core_error
from preferred import only, preferring
from problems import A100, H200, problem
from registers import report_of
from torch import Tensor

from tconv3d.families.few_channels import inputs as few_inputs_planner
from tconv3d.families.few_channels.tiles import Taps
from tconv3d.planning import planner
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.problem import Pass
from tconv3d.planning.side import Side
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor


@pytest.fixture
def few_inputs(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything that the family can compute goes to it; the direct family has the rest."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    monkeypatch.setattr(few_inputs_planner, "MIN_OUT", 1)
    monkeypatch.setattr(few_inputs_planner, "MIN_RATIO", 0)
    monkeypatch.setattr(few_inputs_planner, "MAX_REDUCED", 8)
    with only("few_inputs", "direct"), preferring("few_inputs"):
        yield ours


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


def grad_of(layer: Layer, operands: list[Tensor]) -> Tensor:
    shape = passes(F.conv_transpose3d, [t.double() for t in operands[:2]], layer.settings, forward_only=True)[0].shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(operands[0].device, operands[0].dtype)


def kernel_of(layer: Layer, which: Pass) -> str:
    return planner.plan(problem(layer, which), H200).kernel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, dtype: torch.dtype, few_inputs: str) -> None:
    layer = LAYERS[name]
    assert kernel_of(layer, Pass.INPUT_GRAD) == kernel_of(swapped(layer), Pass.FORWARD) == "few_inputs"
    operands = layer.operands(dtype, few_inputs)
    check(layer, operands, grad_of(layer, operands))
    check(swapped(layer), swapped(layer).operands(dtype, few_inputs))


@pytest.mark.parametrize("name", ["gan", "monai", "odd channels", "three phases along w"])
def test_channels_last(name: str, few_inputs: str) -> None:
    last = torch.channels_last_3d
    for dtype in (torch.float32, torch.bfloat16):
        operands = LAYERS[name].operands(dtype, few_inputs)
        grad = grad_of(LAYERS[name], operands).to(memory_format=last)
        operands[1] = operands[1].to(memory_format=last)  # the result's format follows
        check(LAYERS[name], operands, grad)
        operands = swapped(LAYERS[name]).operands(dtype, few_inputs)
        operands[1] = operands[1].to(memory_format=last)
        check(swapped(LAYERS[name]), [operands[0].to(memory_format=last), *operands[1:]])


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str, few_inputs: str) -> None:
    layer = replace(TRAPS[name], batch=1)
    if layer.in_channels > 8:
        layer = replace(layer, in_channels=6, out_channels=6)
    operands = layer.operands(torch.float32, few_inputs)
    check(layer, operands)
    check(layer, operands, grad_of(layer, operands))


def test_unaligned_and_strided_operands(few_inputs: str) -> None:
    layer = LAYERS["monai"]
    for dtype in (torch.float32, torch.float16):
        operands = layer.operands(dtype, few_inputs)
        grad = grad_of(layer, operands)
        shifted = torch.empty(grad.numel() + 1, dtype=dtype, device=few_inputs)[1:].view(grad.shape)
        check(layer, operands, shifted.copy_(grad))
        check(layer, operands, grad.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0))
        check(layer, operands, torch.ones((), dtype=dtype, device=few_inputs).expand(grad.shape))
        turned = operands[1].permute(1, 0, 4, 3, 2).contiguous().permute(1, 0, 4, 3, 2)
        check(layer, [operands[0], turned], grad)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "with moments"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_passes_of_the_last_block_without_a_channel(dtype: torch.dtype, norm: bool, few_inputs: str) -> None:
    """Three whole passes of channels in blocks of two: the last block has a pass behind the last channel."""
    layer = Layer(2 if dtype is torch.float32 else 4, 384, (1, 2, 8), T3, padding=T1, batch=2)
    layout = few_inputs_planner.Layout(Taps.of(Side.of(problem(layer, Pass.FORWARD, str(dtype)[6:]))))
    assert layout.kinds * layout.passes == 4 and layout.along_w and not layout.spread
    assert layout.side.outs == 3 * 8 * layout.pass_tiles
    operands = layer.operands(dtype, few_inputs)
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
def test_generated_geometries(layer: Layer, half: bool, last: bool, few_inputs: str) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    for one in (layer, swapped(layer)):
        operands = one.operands(dtype, few_inputs)
        grad = grad_of(one, operands)
        if last:
            operands = [*(t.to(memory_format=torch.channels_last_3d) for t in operands[:2]), *operands[2:]]
            grad = grad.to(memory_format=torch.channels_last_3d)
        check(one, operands) if one is layer else check(one, operands, grad)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_special_values_reach_the_result(value: float, few_inputs: str) -> None:
    layer = Layer(1, 8, (2, 2, 6), T3, padding=T1, batch=1, bias=False)  # 27 taps leave a rest of K
    x, w = torch.zeros(1, 1, 2, 2, 6, device=few_inputs), torch.ones(8, 8, 3, 3, 3, device=few_inputs)[:1]
    x[0, 0, 0, 0, 2] = value
    got = executor.forward(x, w, None, layer.settings)[0, 0, 0, 0]
    reached = got.isnan() if value != value else got == value
    # A product with a zero that is no weight would be NaN: of what the value does not reach nothing may change.
    assert reached.tolist() == [False, True, True, True, False, False]
    assert (got[~reached] == 0).all()


def test_what_it_refuses_and_why() -> None:
    layer = LAYERS["monai"]
    taken = problem(layer, Pass.INPUT_GRAD)
    assert few_inputs_planner.why_not(taken, H200) is None
    assert few_inputs_planner.why_not(taken, A100) is None
    for refused, device, reason in (
        (replace(taken, which=Pass.WEIGHT_GRAD), H200, "input gradient"),
        (replace(taken, tf32=False), H200, "TF32"),
        (taken, replace(A100, capability=(7, 5)), "8.0"),
        (problem(Layer(32, 9, (4, 4, 4), T3, T2), Pass.INPUT_GRAD), H200, "more than 8"),
        (problem(Layer(32, 5, (4, 4, 4), T3), Pass.INPUT_GRAD), H200, "more than 4"),
        (problem(Layer(7, 1, (4, 4, 4), T3), Pass.INPUT_GRAD), H200, "fewer than 8"),
        (problem(Layer(15, 4, (4, 4, 4), T3), Pass.INPUT_GRAD), H200, "fewer than 16"),
        (problem(Layer(8, 1, (4, 4, 90), (2, 2, 2), dilation=(90, 90, 90)), Pass.INPUT_GRAD), H200, "reach"),
    ):
        assert reason in (few_inputs_planner.why_not(refused, device) or "")


def test_a_new_volume_or_batch_compiles_nothing() -> None:
    for which, layer in ((Pass.INPUT_GRAD, LAYERS["gan"]), (Pass.FORWARD, swapped(LAYERS["monai"]))):
        first = few_inputs_planner.plan(problem(layer, which, size=(64, 64, 64)), H200)
        for size, batch in (((4, 8, 16), 1), ((1, 1, 4), 2), ((7, 65, 32), 3)):
            other = few_inputs_planner.plan(problem(replace(layer, batch=batch), which, size=size), H200)
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
def test_compiles_without_spills(name: str) -> None:
    for layer, which in ((LAYERS[name], Pass.INPUT_GRAD), (swapped(LAYERS[name]), Pass.FORWARD)):
        for dtype in ("float32", "float16"):
            launch = few_inputs_planner.plan(problem(layer, which, dtype), H200).launches[0]
            report = report_of(launch)
            assert report.spill_stores == 0 and report.stack_bytes == 0


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
