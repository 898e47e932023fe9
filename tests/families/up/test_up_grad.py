"""Single gradients of wide up-convolutions (kernel equal to stride): against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import UNIT, Layer, Triple, assert_right
from problems import H200
from torch import Tensor

from tconv3d.families.up import grad as up_grad
from tconv3d.planning import planner
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.problem import Device, Pass, Problem, bias_grad_problem
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

T2 = (2, 2, 2)
BOTH = (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)
WIDE = Layer(320, 384, (16, 32, 32), T2, T2)


@dataclass(frozen=True)
class Case:
    """A layer, and how blocks divide it."""

    layer: Layer
    columns: int
    stages: int = 4
    multiprocessors: int = 4

    def tiling(self, weight: bool) -> up_grad.Tiling:
        return up_grad.Tiling(geometry(self.layer), weight, self.columns, self.stages)


CASES = {
    "one tile": Case(Layer(16, 8, (2, 4, 8), T2, T2, batch=1), 16),
    "nothing whole": Case(Layer(20, 13, (3, 5, 10), T2, T2), 32, stages=3),
    "many columns": Case(Layer(264, 4, (2, 3, 6), T2, T2), 272),
    "pieces in no order of 16 bytes": Case(Layer(40, 20, (3, 5, 18), T2, T2, batch=3), 48, stages=6),
    "two taps along h": Case(Layer(24, 36, (3, 7, 20), (1, 2, 2), (1, 2, 2)), 32, stages=8),
    "two tiles of columns": Case(Layer(24, 36, (4, 6, 12), T2, T2), 16),
    "two taps along d": Case(Layer(40, 40, (5, 5, 12), (2, 1, 2), (2, 1, 2), batch=3), 48),
    "many rows": Case(Layer(32, 70, (4, 6, 12), T2, T2), 32, stages=3, multiprocessors=8),
    "nine planes": Case(Layer(24, 17, (2, 3, 14), (3, 3, 2), (3, 3, 2)), 32),
}


def geometry(layer: Layer) -> Geometry:
    options = (layer.padding, layer.output_padding, layer.groups, layer.dilation)
    return Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, layer.stride, *options)


def problem(layer: Layer, which: Pass) -> Problem:
    g = geometry(layer)
    shapes = (
        (layer.batch, layer.in_channels, *layer.size),
        (layer.in_channels, layer.out_channels, *layer.kernel),
        (layer.batch, layer.out_channels, *g.output_size(layer.size)),
    )
    strides = (tuple(prod(shape[i + 1 :]) for i in range(5)) for shape in shapes)
    bias = layer.bias and which is Pass.WEIGHT_GRAD
    return Problem(which, g, layer.batch, layer.size, "float32", *strides, bias=bias, tf32=True)


@pytest.fixture
def hopper(ours: str) -> str:
    if ours != "cpu" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup matrix instructions need compute capability 9.0")
    return ours


def gradients(layer: Layer, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """Returns the gradients of input, weight and bias."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = F.conv_transpose3d(x, w, None, *layer.settings)
    return [*torch.autograd.grad(y, (x, w), dy), dy.sum((0, 2, 3, 4))]


def run(problem: Problem, device: Device, tiling: up_grad.Tiling, operands: list[Tensor]) -> dict[str, Tensor]:
    x, w, dy = operands
    results = {"dx": torch.full_like(x, torch.nan), "dw": torch.full_like(w, torch.nan)}
    results["db"] = x.new_full((dy.shape[1],), torch.nan)
    plan = up_grad.plan_tiling(problem, device, tiling)
    task = executor.make_task(plan, executor.BACKWARD, (), x)
    addresses = [tensor.data_ptr() for tensor in (dy, x, w)]
    task.launch(x.new_empty(0), (*addresses, 0, *(tensor.data_ptr() for tensor in results.values())))
    return results


def check(case: Case, which: Pass, device: str) -> None:
    """Every element against float64, its error in roundings of the same sum over absolute values."""
    layer, weight = case.layer, which is Pass.WEIGHT_GRAD
    x, w = layer.operands(torch.float32, device)[:2]
    dy = torch.randn(layer.batch, layer.out_channels, *geometry(layer).output_size(layer.size)).to(device)
    on = replace(H200, multiprocessors=case.multiprocessors)
    got = run(problem(layer, which), on, case.tiling(weight), [x, w, dy])
    exact = [tensor.double() for tensor in (x, w, dy)]
    names = ("dx", "dw", "db")
    expected = dict(zip(names, gradients(layer, *exact), strict=True))
    largest = dict(zip(names, gradients(layer, *(tensor.abs() for tensor in exact)), strict=True))
    for name in (("dw", "db") if layer.bias else ("dw",)) if weight else ("dx",):
        product = 0.0 if name == "db" else 2.0**-10  # both factors are rounded to TF32
        allowed = largest[name] * (product + 40 * UNIT[torch.float32]) + 1e-7
        assert_right(name, got[name], expected[name], allowed)


@pytest.mark.parametrize("which", BOTH)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, which: Pass, hopper: str) -> None:
    check(CASES[name], which, hopper)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    channels=st.tuples(st.integers(1, 80), st.integers(1, 40)),
    taps=st.sampled_from([(1, 1, 2), (1, 2, 2), (2, 1, 2), T2, (3, 2, 2)]),
    size=st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([2, 4, 6, 10, 32])),
    batch=st.integers(1, 3),
    which=st.sampled_from(BOTH),
    multiprocessors=st.integers(1, 12),
    any_of=st.integers(0, 100),
)
def test_generated(
    channels: tuple[int, int],
    taps: Triple,
    size: Triple,
    batch: int,
    which: Pass,
    multiprocessors: int,
    any_of: int,
    hopper: str,
) -> None:
    """In any way that the planner knows."""
    layer = Layer(*channels, size, taps, taps, batch=batch)
    ways = up_grad.tilings(geometry(layer), which is Pass.WEIGHT_GRAD, H200.shared_bytes)
    way = ways[any_of % len(ways)]
    check(Case(layer, way.columns, way.stages, multiprocessors), which, hopper)


# ---- The planner.


def test_wide_layers_get_it() -> None:
    """Both gradients of a layer with many channels and positions, the bias's with the weight's."""
    problems = {which: problem(WIDE, which) for which in BOTH}
    problems = {which: replace(each, bias=False) for which, each in problems.items()}
    bias = bias_grad_problem(WIDE.batch, WIDE.out_channels, problem(WIDE, BOTH[0]).output_size, "float32", (0,) * 5)
    plans = planner.gradient_plans((*problems.values(), bias), H200)
    assert [(plan.kernel, plan.passes) for plan in plans] == [
        ("up_grad", (Pass.INPUT_GRAD,)),
        ("up_grad", (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD)),
    ]


@pytest.mark.parametrize("which", BOTH)
def test_what_it_declines(which: Pass) -> None:
    wide = problem(WIDE, which)
    assert up_grad.why_not(wide, H200) is None
    reasons = {
        "TF32": replace(wide, tf32=False),
        "is for TF32": replace(wide, dtype="bfloat16"),
        "do not lie in one line": replace(wide, input=(1, 2, 3, 5, 1)),
        "of input and weight": replace(wide, which=Pass.FORWARD),
        "positions": problem(replace(WIDE, size=(2, 2, 4)), which),
        "input channels": problem(replace(WIDE, in_channels=64), which),
        "needs compute capability": wide,
    }
    for reason, refused in reasons.items():
        device = replace(H200, capability=(8, 0)) if refused is wide else H200
        found = up_grad.why_not(refused, device)
        assert found is not None and reason in found, (reason, found)
    for layer in (replace(WIDE, kernel=(2, 2, 3), stride=(2, 2, 3)), replace(WIDE, padding=(0, 1, 0))):
        assert up_grad.why_not(problem(layer, which), H200) is not None


@pytest.mark.parametrize("which", BOTH)
def test_what_the_compiler_makes_of_it(which: Pass) -> None:
    """No products that wait for each other, and no spills."""
    ways = up_grad.tilings(geometry(WIDE), which is Pass.WEIGHT_GRAD, H200.shared_bytes)
    for way in (ways[0], ways[len(ways) // 2], ways[-1]):
        plan = up_grad.plan_tiling(problem(WIDE, which), H200, way)
        made = compiler.compile("up_grad", plan.launches[1].constants, "sm_90a")
        assert not made.serialized and made.report.spill_loads == 0, str(way)
