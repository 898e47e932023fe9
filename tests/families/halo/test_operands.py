"""Epilogues of the halo kernel with operands besides the sums, for every way in which its sums leave a block."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
import torch.nn.functional as F
from halo_cases import (
    DEVICE,
    LAST_TILES_DIVIDED,
    SETTINGS,
    TOLERANCE,
    Case,
    Tensors,
    build_for,
    needs_compiler,
    operand,
)

from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.build import Division
from tconv3d.families.halo.job import job_of
from tconv3d.planning.arguments import with_tail

# z * vector 0 + vector 1 + whole tensor 0 * whole tensor 1
TAIL = (
    "tconv3d::Sum<tconv3d::Sum<tconv3d::Product<tconv3d::Value, tconv3d::Vectored<0>>, tconv3d::Vectored<1>>, "
    "tconv3d::Product<tconv3d::Whole<0>, tconv3d::Whole<1>>>"
)

CASES = {
    **{
        name: SETTINGS[name]
        for name in (
            "odd channels",
            "march, stride 2",
            "groups share a tile, odd channels",
            "batch in the rows",
            "rows begin anywhere",
            "lines",
            "lines, long runs, stride 1",
            "lines, long runs, bfloat16",
            "lines, float16",
            "bfloat16, groups",
            "channels last, unaligned",
            "channels last, float16",
            "copied, channels last, rounded by consumers",
            "divided",
            "channels last, groups as one",
        )
    },
    "last tiles divided": LAST_TILES_DIVIDED,
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_every_output_gets_the_operands_of_its_place(name: str) -> None:
    check(CASES[name])


def check(case: Case) -> None:
    tensors = Tensors(case)
    problem = replace(tensors.problem, tail=TAIL, tail_vectors=2, tail_wholes=2)
    plan = halo_planner.plan_build(build_for(case), job_of(problem), DEVICE)
    assert plan is not None
    sizes = 2, 2, case.out_channels, prod(problem.output_size)
    plan = replace(
        plan, main=with_tail(plan.main, *sizes), sum=None if plan.sum is None else with_tail(plan.sum, *sizes)
    )
    assert plan.build.division is not Division.BLOCKS, "portions have no epilogue"
    random = torch.Generator().manual_seed(2)
    vectors = torch.randn(case.batch, case.out_channels, 2, generator=random)
    wholes = [torch.empty_like(tensors.y).copy_(torch.randn(tensors.y.shape, generator=random)) for _ in range(2)]
    places = {f"tail_whole_{i}": whole.data_ptr() for i, whole in enumerate(wholes)}
    tensors.run(plan, tail_vectors=vectors.data_ptr(), **places)
    x, weight = (each.double() if case.strict else operand(each) for each in (tensors.x, tensors.weight))
    bias = None if tensors.bias is None else tensors.bias.double()
    z = F.conv_transpose3d(
        x, weight, bias, case.stride, case.padding, case.output_padding, case.groups, case.dilation
    )
    scale, shift = vectors.double().unbind(-1)
    scale, shift = scale[..., None, None, None], shift[..., None, None, None]
    exact = z * scale + shift + wholes[0].double() * wholes[1].double()
    error = ((tensors.y.double() - exact).norm() / exact.norm()).item()
    assert error < TOLERANCE[case.dtype], (error, plan.build, plan.tiling)
