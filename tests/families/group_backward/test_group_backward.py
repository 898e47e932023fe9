"""The gradients of small groups from one reading of dy: against float64, and what its planner promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from all_gradients import tensors
from ampere import AMPERE
from layers import UNIT, Layer, passes, poisoned
from orders import check_orders
from preferred import preferring
from problems import A100, H200
from torch import Tensor

from tconv3d.families.group_backward import planner as group
from tconv3d.planning import planner
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.problem import (
    Device,
    Pass,
    Problem,
    Strides,
    bias_grad_problem,
    channels_last_strides,
    contiguous_strides,
)
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor
from tconv3d.torch_ops import problems as operand_problems

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last_3d

# Odd lines, columns of several segments, bundles of several groups, taps that miss, and what output padding adds.
LAYERS = {
    "grouped_strided": Layer(16, 16, (3, 3, 21), T3, T2, T1, groups=2),
    "no stride": Layer(8, 6, (4, 5, 13), T3, groups=2, batch=1),
    "bundles": Layer(12, 18, (2, 2, 33), (2, 3, 4), (2, 1, 3), (0, 1, 2), (1, 0, 2), groups=6),
    "dilated": Layer(10, 8, (3, 4, 16), (3, 2, 3), (1, 2, 2), (2, 0, 1), (0, 1, 1), (2, 3, 3), groups=2),
    "one group": Layer(8, 8, (5, 3, 12), (4, 2, 2), (3, 2, 1), (1, 0, 0), groups=1),
    "slices": Layer(4, 24, (3, 4, 13), T3, T2, T1),
    "slices of five, groups": Layer(6, 40, (4, 3, 33), (2, 3, 3), (1, 1, 2), T1, groups=2, batch=1),
    "one piece": Layer(4, 4, (3, 2, 13), (2, 3, 4), (2, 1, 3), (0, 1, 2), (1, 0, 2)),
}
CASES = [(torch.float32, name, CONTIGUOUS) for name in LAYERS if name != "one piece"] + [
    (torch.float16, "bundles", CONTIGUOUS),
    (torch.bfloat16, "grouped_strided", CONTIGUOUS),
    (torch.float32, "grouped_strided", LAST),
    (torch.float32, "one piece", LAST),
    (torch.float32, "slices", LAST),
    (torch.bfloat16, "slices", CONTIGUOUS),
    (torch.float16, "slices of five, groups", CONTIGUOUS),
    (torch.bfloat16, "one group", LAST),
]


@pytest.fixture(params=["with the copy engine", "copied by threads"])
def hopper(ours: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of tensors; in the emulator, plans are those of a GPU with the copy engine and of one without."""
    if request.param == "copied by threads":
        if ours != "cpu":
            pytest.skip("the GPU at hand decides")
        monkeypatch.setattr(executor, "EMULATED", replace(AMPERE, shared_bytes=A100.shared_bytes))
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    with preferring("group_backward"):
        yield ours


def gradients(layer: Layer, x: Tensor, w: Tensor, dy: Tensor, wanted: tuple[bool, bool, bool]) -> list[Tensor]:
    with poisoned():
        found = executor.backward(dy, x, w, wanted, layer.size, layer.kernel, layer.settings)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize(("dtype", "name", "layout"), CASES, ids=lambda value: str(value))
def test_against_float64(dtype: torch.dtype, name: str, layout: torch.memory_format, hopper: str) -> None:
    """Every element, its error in roundings of the same sum over absolute values; together, and each alone."""
    layer = LAYERS[name]
    x, w, dy = tensors(layer, dtype, hopper)
    w = w if name == "one group" else w.contiguous(memory_format=layout)
    operands = (x.contiguous(memory_format=layout), w, dy.contiguous(memory_format=layout))
    assert all("group_backward" in kernel for kernel in kernels(layer, *operands))
    x, w, dy = (operand.double() for operand in operands)
    bias = torch.zeros(layer.out_channels, device=hopper).double()
    expected = passes(F.conv_transpose3d, [x, w, bias], layer.settings, dy)[1]
    largest = passes(F.conv_transpose3d, [x.abs(), w.abs(), bias], layer.settings, dy.abs())[1]
    got = gradients(layer, *operands, (True, True, True))
    product = 2.0**-10 if dtype == torch.float32 else 0.0  # both factors are rounded to TF32
    for mine, exact, sum_of_all in zip(got, expected, largest, strict=True):
        assert mine.shape == exact.shape and mine.dtype == dtype
        allowed = sum_of_all * (product + 20 * UNIT[torch.float32]) + exact.abs() * UNIT[dtype] + 1e-7
        assert bool(((mine.double() - exact).abs() <= allowed).all())  # NaN is wrong too
    if name in ("bundles", "grouped_strided", "slices"):
        alone = [gradients(layer, *operands, wanted)[0] for wanted in ((True, False, False), (False, True, False))]
        assert all(torch.equal(a, b) for a, b in zip(got[:2], alone, strict=True))


def test_no_order_of_threads_changes_the_result(hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["grouped_strided"]
    operands = tensors(layer, torch.float32, hopper)
    check_orders(hopper, monkeypatch, lambda: gradients(layer, *operands, (True, True, True)))


def kernels(layer: Layer, x: Tensor, w: Tensor, dy: Tensor) -> set[str]:
    """Who computes the gradients of input and weight."""
    at = operand_problems.OperandAddresses(x.data_ptr(), w.data_ptr(), dy.data_ptr())
    wanted = True, True, False
    found = operand_problems.wanted_gradients(dy, x, w, wanted, layer.size, layer.kernel, layer.settings, at)
    plans = planner.gradient_plans(tuple(each[0] for each in found if each), executor.device_of(dy))
    return {plan.kernel for plan in plans}


# ---- The planner's promises.


def problems(
    layer: Layer, dtype: str = "float32", layout: Callable[[tuple[int, ...]], Strides] = contiguous_strides
) -> dict[Pass, Problem]:
    settings = (layer.padding, layer.output_padding, layer.groups, layer.dilation)
    g = Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, layer.stride, *settings)
    shapes = ((layer.batch, g.in_channels, *layer.size), (g.in_channels, g.out_per_group, *layer.kernel))
    x, y = layout(shapes[0]), layout((layer.batch, g.out_channels, *g.output_size(layer.size)))
    w = contiguous_strides(shapes[1])
    both = (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)
    found = {which: Problem(which, g, layer.batch, layer.size, dtype, x, w, y, tf32=True) for which in both}
    bias = bias_grad_problem(layer.batch, g.out_channels, g.output_size(layer.size), dtype, y)
    return {**found, Pass.BIAS_GRAD: bias}


TASK = Layer(32, 32, (32, 64, 128), T3, T2, T1, groups=4, batch=4)


def test_what_it_refuses_and_why() -> None:
    taken = problems(TASK)[Pass.INPUT_GRAD]
    assert group.why_not(taken, H200) is None
    last = channels_last_strides((4, 32, 63, 127, 255))
    for refused, device, reason in (
        (replace(taken, which=Pass.FORWARD), H200, "gradients"),
        (replace(taken, tf32=False), H200, "TF32"),
        (replace(taken, dtype="float64"), H200, "float64"),
        (replace(taken, output=last), H200, "dense"),
        (
            problems(Layer(10, 10, (3, 4, 16), T3, groups=2), layout=channels_last_strides)[Pass.INPUT_GRAD],
            H200,
            "pieces",
        ),
        (replace(taken, aligned=False), H200, "aligned"),
        (replace(taken, batch=0), H200, "none"),
        (taken, replace(A100, capability=(7, 5)), "8.0"),
        (problems(replace(TASK, groups=2))[Pass.INPUT_GRAD], H200, "channels"),
        (problems(Layer(8, 26, (3, 4, 16), T3))[Pass.INPUT_GRAD], H200, "divisor"),
        (problems(Layer(8, 32, (64, 64, 64), T3, batch=16), "bfloat16")[Pass.INPUT_GRAD], H200, "workspace"),
        (problems(replace(TASK, groups=32))[Pass.INPUT_GRAD], H200, "channels"),
        (problems(replace(TASK, kernel=(4, 4, 4)))[Pass.INPUT_GRAD], H200, "registers"),
        (problems(Layer(2**13, 2**24, (1, 1, 12), T3, groups=2**10))[Pass.INPUT_GRAD], H200, "32 bits"),
        (problems(replace(TASK, size=(32, 64, 8)))[Pass.INPUT_GRAD], H200, "positions"),
        (problems(replace(TASK, size=(32, 64, 512)))[Pass.INPUT_GRAD], H200, "positions"),
    ):
        assert reason in (group.why_not(refused, device) or "")


@pytest.mark.parametrize(("device", "arch"), [(H200, "sm_90a"), (A100, "sm_80")], ids=["H200", "A100"])
@pytest.mark.parametrize("layout", [contiguous_strides, channels_last_strides])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_plan_without_spills(
    dtype: str, layout: Callable[[tuple[int, ...]], Strides], device: Device, arch: str
) -> None:
    wanted = problems(TASK, dtype, layout)
    (plan,) = planner.gradient_plans(tuple(wanted.values()), device)
    assert plan.kernel == "group_backward" and set(plan.passes) == set(wanted)
    assert all(launch.shared_bytes <= device.shared_bytes for launch in plan.launches)
    assert not any(launch.overlaps for launch in plan.launches) or device is H200
    made = compiler.compile("group_backward", plan.launches[0].constants, arch)
    assert made.report.spill_stores <= (0 if layout is contiguous_strides and device is H200 else 16)


def test_outputs_without_a_position_leave_the_bias_to_others() -> None:
    wanted = problems(replace(TASK, padding=(0, 0, 0)))
    plans = planner.gradient_plans(tuple(wanted.values()), H200)
    assert [plan.passes for plan in plans] == [(Pass.INPUT_GRAD, Pass.WEIGHT_GRAD), (Pass.BIAS_GRAD,)]
