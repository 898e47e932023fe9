"""The input gradient on Hopper's tensor cores: it gathers from the phase planes of the output gradient.

With stride 1 it is a forward pass with swapped channels and reversed taps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from halo_cases import run_launches
from layers import Layer, poisoned, to_tf32
from preferred import preferring

import tconv3d
from tconv3d import emulator
from tconv3d.api.explain import call_of, find_gpu, problems_of
from tconv3d.families.halo import candidates, constants
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.build import Division, Input, Weights
from tconv3d.families.halo.job import Job, job_of
from tconv3d.families.halo.launches import HaloPlan
from tconv3d.planning import planner
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.problem import Device, Pass, Plan, Problem

LAYERS = {
    "plain": Layer(8, 12, (3, 4, 5), (3, 3, 3)),
    "asymmetric, padded": Layer(11, 7, (5, 6, 7), (3, 2, 5), padding=(1, 0, 2)),
    "dilated, output padding": Layer(
        8, 8, (4, 5, 6), (2, 3, 2), padding=(1, 0, 1), output_padding=(1, 0, 2), dilation=(2, 1, 3)
    ),
    "groups": Layer(32, 48, (4, 5, 6), (3, 3, 3), groups=2),
    "padding beyond the kernel": Layer(8, 8, (6, 6, 6), (2, 2, 2), padding=(3, 2, 1)),
    "unet up-convolution": Layer(16, 8, (3, 4, 5), (2, 2, 2), (2, 2, 2)),
    "gan": Layer(9, 40, (3, 3, 12), (4, 4, 4), (2, 2, 2), (1, 1, 1), batch=1),
    "monai, odd sizes": Layer(12, 20, (2, 3, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
    "monai, channels last": Layer(8, 40, (2, 3, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    "unet, channels last, few channels": Layer(16, 6, (3, 4, 5), (2, 2, 2), (2, 2, 2), output_padding=(1, 0, 1)),
    "stride 3": Layer(8, 10, (2, 3, 4), (3, 4, 5), (3, 3, 3), (1, 0, 2)),
    "stride 3, channels last": Layer(8, 16, (2, 3, 4), (3, 4, 5), (3, 3, 3), (1, 0, 2)),
    "stride 4 along w, 1 along d": Layer(10, 9, (3, 2, 5), (2, 3, 5), (1, 2, 4), (1, 0, 3), (0, 0, 1), batch=1),
    "stride 5 along w": Layer(8, 8, (2, 2, 4), (1, 2, 7), (1, 2, 5), (0, 1, 3), (0, 0, 2)),
    "dilated, empty phases": Layer(8, 8, (3, 4, 3), (3, 3, 3), (2, 1, 2), (0, 2, 1), (1, 0, 1), dilation=(2, 1, 4)),
    "kernel smaller than stride": Layer(8, 12, (3, 2, 3), (2, 1, 1), (3, 2, 2), output_padding=(2, 1, 1)),
    "small groups": Layer(32, 32, (3, 4, 6), (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=4),
    "small groups, channels last": Layer(32, 32, (3, 4, 6), (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=4),
    "groups as one, channels last": Layer(48, 32, (4, 5, 6), (3, 3, 3), groups=4),
    "wide": Layer(72, 136, (3, 3, 3), (3, 3, 3), (1, 2, 2), (1, 1, 1), batch=3),
    "in portions": Layer(16, 192, (2, 3, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1), batch=1),
}


IN_16_BITS = (
    "plain",
    "groups",
    "gan",
    "monai, channels last",
    "stride 3",
    "stride 4 along w, 1 along d",
    "small groups",
    "groups as one, channels last",
    "in portions",
)


def plan_alone(x: torch.Tensor, w: torch.Tensor, *settings: Any) -> Plan:
    """Where no other gradient is wanted."""
    problems = problems_of(*call_of(x, w, None, *settings))
    (plan,) = planner.gradient_plans(tuple(p for p in problems if p.which is Pass.INPUT_GRAD), find_gpu("H200", x)[0])
    return plan


@pytest.mark.parametrize(
    ("name", "dtype"), [*((n, torch.float32) for n in LAYERS), *((n, torch.bfloat16) for n in IN_16_BITS)], ids=str
)
@preferring("halo")
def test_against_float64(name: str, dtype: torch.dtype, ours: str) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    layer = replace(LAYERS[name], bias=False)
    x, w = (to_tf32(t) if dtype == torch.float32 else t for t in layer.operands(dtype, ours))
    if name == "plain" or "channels last" in name:
        x = x.to(memory_format=torch.channels_last_3d)
    x.requires_grad_()
    plan = plan_alone(x, w, *layer.settings)
    assert plan.kernel == "halo"
    assert (name == "in portions") <= ("portions" in plan.tile)
    assert (name.startswith("groups as one") and dtype == torch.bfloat16) <= ("groups as one" in plan.tile)
    y = tconv3d.conv_transpose3d(x, w, None, *layer.settings)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(ours, dtype)
    grad = to_tf32(grad) if dtype == torch.float32 else grad
    if y.is_contiguous(memory_format=torch.channels_last_3d):
        grad = grad.to(memory_format=torch.channels_last_3d)
    with poisoned():
        (dx,) = torch.autograd.grad(y, x, grad)
    exact = x.detach().double().requires_grad_()
    reference = F.conv_transpose3d(exact, w.double(), None, *layer.settings)
    (expected,) = torch.autograd.grad(reference, exact, grad.double())
    absolute = F.conv_transpose3d(exact, w.double().abs(), None, *layer.settings)
    (bound,) = torch.autograd.grad(absolute, exact, grad.double().abs())
    rounding = 0.0 if dtype == torch.float32 else 8e-3
    wrong = ~((dx.double() - expected).abs() <= 2e-6 * bound + rounding * expected.abs())
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements wrong"


# Few multiprocessors, so that blocks get several tiles.
DEVICE = Device("small Hopper", (9, 0), 3, 232448)
LINES = {  # that may be copied as they are in memory
    "monai": Layer(24, 16, (3, 5, 8), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    "odd depth, kernel 4": Layer(16, 8, (3, 5, 6), (3, 4, 4), (2, 2, 2), (1, 1, 1), (0, 0, 0), batch=3),
    "stride 1 along depth, groups": Layer(16, 16, (4, 5, 6), (3, 2, 5), (1, 2, 2), (1, 0, 2), (0, 1, 1), groups=2),
}


class Gradient:
    """The operands of an input gradient, what it should be, and what the emulator makes of a plan."""

    def __init__(self, layer: Layer) -> None:
        self.x, self.w = (to_tf32(t) for t in layer.operands(torch.float32, "cpu"))
        exact = self.x.double().requires_grad_()
        y = F.conv_transpose3d(exact, self.w.double(), None, *layer.settings)
        self.grad = to_tf32(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
        (self.expected,) = torch.autograd.grad(y, exact, self.grad.double())
        stride, padding, output_padding, groups, dilation = layer.settings
        geometry = Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, stride, padding, output_padding,
                                 groups, dilation)  # fmt: skip
        self.job = job_of(
            Problem(Pass.INPUT_GRAD, geometry, layer.batch, layer.size, "float32", self.x.stride(), self.w.stride(),
                    self.grad.stride(), tf32=True)
        )  # fmt: skip

    def error(self, plan: HaloPlan) -> float:
        packed, dx = (torch.full((n,), float("nan")) for n in (plan.packed_bytes // 4, self.x.numel()))
        portions = torch.full((plan.portions_bytes // 4,), float("nan"))
        places = {"x": self.grad, "weight": self.w, "workspace": packed, "y": dx, "portions": portions}
        run_launches(plan, places, "shuffled:1")
        return float((dx.view_as(self.x).double() - self.expected).norm() / self.expected.norm())


@pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
@pytest.mark.parametrize("name", LINES)
def test_marches_through_lines(name: str) -> None:
    gradient = Gradient(replace(LINES[name], bias=False))
    builds = candidates.builds(candidates.Nominal.of(gradient.job), DEVICE.shared_bytes)
    found = [build for build in builds if build.input is Input.LINES]
    for build in found[:: len(found) - 1]:
        plan = halo_planner.plan_build(build, gradient.job, DEVICE)
        assert plan is not None
        assert gradient.error(plan) < 1e-6, plan.build


@pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
def test_blocks_divide_the_last_tiles() -> None:
    gradient = Gradient(Layer(16, 72, (5, 3, 4), (3, 3, 2), (2, 2, 2), (1, 1, 0), batch=3, bias=False))
    found = candidates.builds(candidates.Nominal.of(gradient.job), DEVICE.shared_bytes)
    build = next(
        b.but(weights=Weights.STREAMED, slots=3, division=Division.LAST_TILES)
        for b in found
        if b.chunks > 1 and not b.march
    )
    for multiprocessors in (2, 3, 5, 8):
        plan = halo_planner.plan_build(build, gradient.job, replace(DEVICE, multiprocessors=multiprocessors))
        assert plan is not None and plan.sum is not None
        assert gradient.error(plan) < 1e-6, (plan.build, plan.tiling, multiprocessors)


@pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
def test_a_lead_ends_where_the_border_leaves_few_panels() -> None:
    """At the borders along d a chunk has fewer panels than its lead counts on, and stages are few."""
    gradient = Gradient(
        Layer(88, 40, (1, 5, 24), (3, 4, 3), (2, 1, 2), (2, 2, 1), (0, 0, 1), (3, 1, 1), batch=1, bias=False)
    )
    found = candidates.builds(candidates.Nominal.of(gradient.job), DEVICE.shared_bytes)
    divided = (b.but(weights=Weights.STREAMED, slots=8, stages=2, division=Division.LAST_TILES) for b in found)
    build = next(b for b in divided if b.block.consumers == 2 and b.chunks > 4 and constants.lead(b) > 4)
    plan = halo_planner.plan_build(build, gradient.job, replace(DEVICE, multiprocessors=4))
    assert plan is not None and gradient.error(plan) < 1e-6


def test_what_is_no_forward_pass() -> None:
    def job(**settings: object) -> Job:
        geometry = Geometry.make(8, 8, (3, 3, 3), **settings)  # type: ignore[arg-type]
        five = (1, 1, 1, 1, 1)
        return job_of(Problem(Pass.INPUT_GRAD, geometry, 1, (9, 9, 9), "float16", five, five, five))

    assert job(stride=(1, 2, 1)).gather
    assert job(padding=(3, 0, 0)).gather
    mirrored = job(padding=(1, 2, 0))
    assert not mirrored.gather and mirrored.geometry.output_size(mirrored.read_size) == (9, 9, 9)
