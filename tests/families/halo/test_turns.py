"""Input gradients of 16-bit layers whose loaders transpose pieces of lines of any length (halo_turns.cuh)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from halo_cases import run_launches
from layers import Layer, guarded, shifted
from preferred import preferring
from problems import A100, H200

import tconv3d
from tconv3d import emulator
from tconv3d.families.halo import candidates, loading, model, search
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.build import Division, Weights
from tconv3d.families.halo.job import job_of
from tconv3d.families.halo.tiling import tilings
from tconv3d.planning import planner
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Device, Pass, Problem, channels_last_strides, contiguous_strides
from tconv3d.torch_ops import executor

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
LAYERS = {
    "odd lines": Layer(32, 32, (3, 5, 16), T3, T2, T1),
    "even lines that are no vectors": Layer(24, 24, (2, 3, 23), T3, T2, T1, (0, 0, 1), batch=1),
    "several chunks": Layer(40, 72, (2, 6, 20), T3, T2, T1, batch=1),
    "channels that fill no piece": Layer(40, 37, (2, 3, 17), (2, 3, 4), (1, 2, 2), (0, 1, 1), batch=1),
    "four phases": Layer(24, 48, (3, 3, 9), (2, 3, 5), (2, 2, 4), (0, 0, 3), batch=2),
    "several tiles along w": Layer(16, 24, (1, 3, 90), T3, T2, T1, batch=1),
    "lines far outside": Layer(24, 16, (2, 3, 16), (3, 3, 5), T2, (1, 1, 4), batch=2),
    "groups": Layer(64, 64, (2, 3, 12), T3, T2, T1, groups=2, batch=1),
}


@pytest.fixture(autouse=True)
def turned() -> Iterator[None]:
    if not emulator.available():
        pytest.skip("no C++ compiler")
    with preferring("halo_turned"), tconv3d.use_backend("emulator"):
        yield


def problem(layer: Layer, dtype: str = "bfloat16") -> Problem:
    geometry = Geometry.make(
        layer.in_channels, layer.out_channels, layer.kernel, layer.stride, layer.padding, layer.output_padding,
        layer.groups, layer.dilation,
    )  # fmt: skip
    x, w, y = (
        contiguous_strides(shape)
        for shape in (
            (layer.batch, layer.in_channels, *layer.size),
            (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel),
            (layer.batch, layer.out_channels, *geometry.output_size(layer.size)),
        )
    )
    return Problem(Pass.INPUT_GRAD, geometry, layer.batch, layer.size, dtype, x, w, y)


def check(layer: Layer, dtype: torch.dtype, apart: int = 0) -> None:
    """Compares with float64. Between the channels of dy are `apart` NaNs, and around it are others."""
    x, w = (operand for operand in layer.operands(dtype, "cpu")[:2])
    exact = x.double().requires_grad_()
    y = F.conv_transpose3d(exact, w.double(), None, *layer.settings)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    n, c, d, h, width = dy.shape
    pitch = d * h * width + apart
    memory = torch.full((n * c * pitch,), torch.nan, dtype=dtype)
    view = memory.as_strided(dy.shape, (c * pitch, pitch, h * width, width, 1))
    given = shifted(view.copy_(dy), 8)  # the address of dy is a multiple of 16 bytes
    with guarded():
        found = executor.input_grad(given, w, layer.size, layer.settings)
    (expected,) = torch.autograd.grad(y, exact, dy.double(), retain_graph=True)
    absolute = F.conv_transpose3d(exact, w.double().abs(), None, *layer.settings)
    (bound,) = torch.autograd.grad(absolute, exact, dy.double().abs())
    rounding = 8e-3 if dtype == torch.bfloat16 else 1e-3
    wrong = ~((found.double() - expected).abs() <= 2e-6 * bound + rounding * expected.abs() + 1e-7)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements wrong"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, (torch.bfloat16, torch.float16)[i % 2]) for i, name in enumerate(LAYERS)],
    ids=str,
)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    layer = LAYERS[name]
    plan = planner.plan(problem(layer, str(dtype).removeprefix("torch.")), H200)
    assert "pieces of input lines" in plan.tile
    check(layer, dtype)


@pytest.mark.parametrize("apart", [1, 3, 6])
def test_channels_that_begin_anywhere(apart: int) -> None:
    check(LAYERS["odd lines"], torch.bfloat16, apart)


@pytest.mark.parametrize("division", [Division.BLOCKS, Division.LAST_TILES], ids=str)
def test_blocks_divide_chunks(division: Division) -> None:
    layer = Layer(16, 72, (5, 3, 12), (3, 3, 2), T2, (1, 1, 0), batch=3, bias=False)
    x, w = layer.operands(torch.bfloat16, "cpu")
    exact = x.double().requires_grad_()
    y = F.conv_transpose3d(exact, w.double(), None, *layer.settings)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (expected,) = torch.autograd.grad(y, exact, dy.double())
    job = replace(job_of(problem(layer)), turned=True)
    found = (b for b in candidates.builds(candidates.Nominal.of(job), 232448) if b.chunks > 1)
    build = next(found).but(weights=Weights.STREAMED, slots=3, division=division)
    plan = halo_planner.plan_build(build, job, Device("small Hopper", (9, 0), 5, 232448))
    assert plan is not None and plan.sum is not None
    packed = torch.full((plan.packed_bytes // 2,), torch.nan, dtype=torch.bfloat16)
    dx, portions = torch.full_like(x, torch.nan), torch.full((plan.portions_bytes // 4,), torch.nan)
    places = {"x": dy, "weight": w, "workspace": packed, "y": dx, "portions": portions}
    run_launches(plan, places, "shuffled:1")
    assert float((dx.double() - expected).norm() / expected.norm()) < 4e-3


def test_no_tiling_takes_less_than_the_least() -> None:
    """What the search passes over without a closer look would not have been chosen."""
    job = replace(job_of(problem(Layer(48, 64, (6, 8, 24), T3, T2, T1))), turned=True)
    looked_at = 0
    for build in candidates.builds_of(candidates.Nominal.of(job), 232448):
        least = search.least(build, job, 132)
        assert least is not None
        for tiling in list(tilings(build, job.batch, job.positions, job.read_size))[::11]:
            if loading.vectors(build, job, tiling):
                takes = model.cycles(build, tiling, job, 132)
                assert least.any_tiling <= takes < math.inf
                assert not least.exceeds(tiling, least.room(takes)), (build, tiling)
                looked_at += 1
    assert looked_at > 20


def test_what_is_offered() -> None:
    """Offers are priced above their predictions until a GPU has measured them."""

    def offered(problem: Problem, device: object = H200) -> list[str]:
        answers = halo_planner.offer({problem.which: problem}, device)  # type: ignore[arg-type]
        return [answer.kernel for answer in answers if isinstance(answer, Offer)]

    taken = problem(LAYERS["odd lines"])
    assert "halo_turned" in offered(taken)
    last = channels_last_strides((2, 32, 5, 9, 31))
    for refused in (
        replace(taken, aligned=False),
        replace(taken, output=last),
        replace(taken, dtype="float32", tf32=True),
        problem(Layer(32, 32, (3, 5, 16), T3, (2, 2, 3), T1)),
        problem(Layer(32, 32, (3, 5, 16), T3, T1, T1)),
        problem(Layer(32, 32, (3, 5, 16), T3, T2, T1, (0, 0, 1))),
    ):
        assert "halo_turned" not in offered(refused)
    assert offered(taken, A100) == []
