"""Depthwise layers, all passes, against float64: threads that walk along depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from few_channels_layers import T1, T2, T3
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import TRAPS, UNIT, Layer, check, poisoned
from preferred import preferring
from problems import H200, problem
from weight_gradients import tensors, weight_grad

from tconv3d.families.depthwise import planner as depthwise_planner
from tconv3d.planning import planner
from tconv3d.planning.problem import Pass, bias_grad_problem, channels_last_strides
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

LAYERS = {
    "gan": Layer(6, 6, (5, 4, 7), (4, 4, 4), T2, T1, groups=6),
    "stride one": Layer(3, 3, (4, 5, 6), T3, padding=T1, groups=3),
    "many blocks": Layer(2, 2, (9, 12, 19), T3, T2, T1, T1, groups=2, batch=1),
    "one channel": Layer(1, 1, (3, 4, 5), T3, T2, T1),
    "dilated, three phases": Layer(4, 4, (4, 3, 5), (2, 3, 2), (3, 2, 3), (1, 2, 1), (1, 0, 2), (2, 3, 1), 4),
    "empty phases": Layer(5, 5, (3, 4, 4), T3, T2, (3, 2, 2), T1, T2, 5),
}


@pytest.fixture
def ours(ours: str) -> Iterator[str]:
    """The two kernels compute all that they can, lines of vectors first."""
    with preferring("depthwise_lines", "depthwise"):
        yield ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, dtype: torch.dtype, ours: str) -> None:
    for which in (Pass.FORWARD, Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
        plan = planner.plan(problem(LAYERS[name], which, tf32=False), H200)
        assert plan.kernel == ("depthwise_weight_grad" if which is Pass.WEIGHT_GRAD else "depthwise")
    check(LAYERS[name], dtype, ours)


@pytest.mark.parametrize("name", ["gan", "many blocks"])
def test_the_bias_in_the_same_pass(name: str, ours: str) -> None:
    layer = LAYERS[name]
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = tensors(layer, dtype, ours)
        weight = problem(layer, Pass.WEIGHT_GRAD, tf32=False)
        bias = bias_grad_problem(layer.batch, layer.out_channels, weight.output_size, "float32", weight.output)
        assert [plan.kernel for plan in planner.gradient_plans((weight, bias), H200)] == ["depthwise_weight_grad"]
        with poisoned():
            wanted = False, True, True
            _, dw, db = executor.backward(dy, x, None, wanted, layer.size, layer.kernel, layer.settings)
        assert dw is not None and db is not None and torch.equal(dw, weight_grad(layer, x, dy))
        exact, largest = dy.double().sum((0, 2, 3, 4)), dy.double().abs().sum((0, 2, 3, 4))
        allowed = 4 * UNIT[torch.float32] * largest + UNIT[dtype] * exact.abs()
        assert bool(((db.double() - exact).abs() <= allowed).all())


MANY_CHANNELS = Layer(35, 35, (3, 5, 5), T3, T2, T1, T1, groups=35)  # two chunks, more patches than blocks
LAST = {  # with the channels of a thread that walks along w, in float32
    "pairs": (LAYERS["gan"], 2),
    "dilated, three phases": (LAYERS["dilated, three phases"], 4),
    "empty phases": (replace(LAYERS["empty phases"], in_channels=8, out_channels=8, groups=8, bias=False), 2),
    "two chunks": (Layer(136, 136, (2, 3, 4), T3, T2, T1, T1, groups=136, batch=1), 4),
    "parts of lines": (Layer(4, 4, (1, 2, 70), (1, 3, 3), padding=(0, 1, 1), groups=4), 4),
    "no vectors": (MANY_CHANNELS, 1),
}


@pytest.mark.parametrize("name", LAST)
def test_channels_last(name: str, ours: str) -> None:
    layer, vector = LAST[name]
    forward = problem(layer, Pass.FORWARD, tf32=False)
    x, y = (channels_last_strides((layer.batch, layer.groups, *size)) for size in (layer.size, forward.output_size))
    constants = dict(planner.plan(replace(forward, input=x, output=y), H200).launches[0].constants)
    assert constants.get("kVector", 1) == vector
    for dtype in (torch.float32, torch.bfloat16):
        operand, *others = layer.operands(dtype, ours)
        check(layer, dtype, ours, [operand.to(memory_format=torch.channels_last_3d), *others])


def test_channels_last_has_as_many_parts_as_the_gpu_has_blocks() -> None:
    large = replace(MANY_CHANNELS, batch=64, size=(32, 64, 64))
    last = channels_last_strides((64, 35, *large.size))
    main, reduce = depthwise_planner.plan(replace(problem(large, Pass.WEIGHT_GRAD), input=last), H200).launches
    assert main.kernel == "depthwise_weight_grad" and reduce.kernel == "reduce"
    assert main.grid[0] % 2 == 0 and main.grid[0] <= 132 * dict(main.constants)["kMinBlocks"]


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str, ours: str) -> None:
    layer = replace(TRAPS[name], in_channels=2, out_channels=2, groups=2)
    check(layer, torch.float32, ours)


def test_tensor_cores_leave_the_weight_gradient_alone() -> None:
    layer = Layer(64, 64, (8, 8, 16), (4, 4, 4), T2, T1, groups=64)
    for which in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
        assert planner.plan(problem(layer, which, tf32=True), H200).kernel.startswith("depthwise")


def test_unaligned_and_strided_operands(ours: str) -> None:
    layer = LAYERS["gan"]
    for dtype in (torch.float32, torch.float16):
        x, *others = layer.operands(dtype, ours)
        shifted = torch.empty(x.numel() + 1, dtype=dtype, device=ours)[1:].view(x.shape).copy_(x)
        turned = x.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0)
        for one in (shifted, turned):
            check(layer, dtype, ours, [one, *others])


@pytest.mark.slow
@settings(max_examples=12)
@given(layer=small_layers((5, 5, 9), st.integers(1, 3), None), half=st.booleans())
def test_generated_geometries(layer: Layer, half: bool, ours: str) -> None:
    check(layer, torch.bfloat16 if half else torch.float32, ours)


def test_bitwise_reproducible(ours: str) -> None:
    x, dy = tensors(LAYERS["many blocks"], torch.float32, ours)
    first = weight_grad(LAYERS["many blocks"], x, dy)
    assert torch.equal(weight_grad(LAYERS["many blocks"], x, dy), first)
    assert not weight_grad(LAYERS["many blocks"], x[:0], dy[:0]).any()


def test_what_it_refuses_and_why() -> None:
    taken = problem(LAYERS["gan"], Pass.WEIGHT_GRAD)
    assert depthwise_planner.why_not(taken, H200) is None
    for refused, reason in (
        (replace(taken, which=Pass.BIAS_GRAD), "bias"),
        (replace(taken, dtype="float64"), "float32"),
        (problem(Layer(4, 8, (3, 3, 3), T3, groups=4), Pass.FORWARD), "one channel"),
        (problem(Layer(2, 2, (3, 3, 3), (7, 7, 7), padding=T3, groups=2), Pass.FORWARD), "registers"),
    ):
        assert reason in (depthwise_planner.why_not(refused, H200) or "")


def test_a_new_volume_or_batch_compiles_nothing() -> None:
    for which in (Pass.FORWARD, Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
        first = depthwise_planner.plan(problem(LAYERS["gan"], which, size=(64, 64, 64)), H200)
        for size, batch in (((4, 8, 17), 1), ((1, 1, 5), 2), ((7, 65, 33), 3)):
            other = depthwise_planner.plan(problem(replace(LAYERS["gan"], batch=batch), which, size=size), H200)
            assert [one.constants for one in other.launches] == [one.constants for one in first.launches]


@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.INPUT_GRAD, Pass.WEIGHT_GRAD], ids=str)
def test_keeps_weights_and_sums_in_registers(which: Pass) -> None:
    try:
        compiler.version()
    except compiler.MissingCompilerError:
        pytest.skip("NVRTC is not installed")
    for dtype in ("float32", "float16"):
        launch = depthwise_planner.plan(problem(LAYERS["gan"], which, dtype), H200).launches[0]
        report = compiler.compile(launch.kernel, launch.constants, "sm_90a").report
        assert report.spill_stores <= 48  # some values that wait; with fewer blocks they would fit, and it is slower
