"""The moments that the halo kernel leaves, for every kind of build, and the statistics that are made of moments."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
import torch
import torch.nn.functional as F
from halo_cases import DEVICE, SETTINGS, Case, Tensors, build_for, needs_compiler, operand
from torch import Tensor

from tconv3d import emulator
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.build import Division, Input
from tconv3d.families.halo.job import Job, job_of
from tconv3d.families.halo.launches import HaloPlan
from tconv3d.families.halo.storing import moment_band
from tconv3d.families.halo.tiling import tilings as tilings_of
from tconv3d.families.norm.arguments import STATISTICS
from tconv3d.planning.launch import Launch
from tconv3d.planning.problem import Norm

EPS = 1e-5


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def groups_of(name: str) -> int:
    """One norm group, one channel each, or something between: all of them over the settings."""
    found = divisors(SETTINGS[name].out_channels)
    return (found[0], found[-1], found[len(found) // 2], found[-2])[list(SETTINGS).index(name) % 4]


def leave(tensors: Tensors, plan: HaloPlan, groups: int, order: str = "forward") -> Tensor:
    """Runs the kernel: moments [batch, norm groups, count, 4]."""
    moments = torch.full((tensors.case.batch, groups, plan.moments, 4), nan)
    tensors.run(plan, order, moments.data_ptr())
    return moments


def expected(tensors: Tensors) -> Tensor:
    c = tensors.case
    bias = None if tensors.bias is None else tensors.bias.double()
    settings = (c.stride, c.padding, c.output_padding, c.groups, c.dilation)
    x, weight = (t.double() if c.strict else operand(t) for t in (tensors.x, tensors.weight))
    return torch.relu(F.conv_transpose3d(x, weight, bias, *settings))


def check(tensors: Tensors, plan: HaloPlan, groups: int, order: str = "forward") -> Tensor:
    """The moments of every norm group, each slot written, against the values themselves."""
    moments = leave(tensors, plan, groups, order)
    values = expected(tensors).reshape(tensors.case.batch, groups, -1)
    count, shift, total, squares = moments.double().unbind(3)
    assert torch.equal(count.sum(2), torch.full_like(count[..., 0], values.shape[2])), (plan.build, plan.tiling)
    mean = ((count * shift + total).sum(2) / values.shape[2])[..., None]
    step = shift - mean
    variance = (squares + step * (2 * total + count * step)).sum(2) / values.shape[2]
    scale = values.abs().amax(2) + 1e-30  # the values have been rounded in float32
    assert ((mean[..., 0] - values.mean(2)).abs() < 2e-6 * scale).all()
    assert ((variance - values.var(2, correction=0)).abs() < 2e-6 * scale.square()).all()
    error = (tensors.y.double() - expected(tensors)).norm() / expected(tensors).norm().clamp(min=1e-30)
    assert error < (1e-6 if tensors.y.dtype == torch.float32 else 3e-3)
    return moments


def job(tensors: Tensors, groups: int) -> Job:
    return job_of(replace(tensors.problem, relu=True, norm=Norm(groups, EPS)))


# Lines as they are in memory leave no moments, and consumers that round leave none.
WITHOUT = (Input.LINES, Input.IN_REGISTERS)
EVERY_FOURTH = [name for name in list(SETTINGS)[::4] if SETTINGS[name].build.get("input") not in WITHOUT]


@needs_compiler
@pytest.mark.parametrize("name", dict.fromkeys([*EVERY_FOURTH, "march", "groups share a tile", "batch in the rows"]))
def test_setting(name: str) -> None:
    tensors, groups = Tensors(SETTINGS[name]), groups_of(name)
    build = replace(build_for(tensors.case), division=Division.NOBODY)  # consumers that divide K leave no moments
    plan = halo_planner.plan_build(build, job(tensors, groups), DEVICE)
    assert plan is not None
    check(tensors, plan, groups)


BANDS = {1: 24, 2: 12, 4: 6, 8: 3, 24: 1}  # channels of a band: norm groups of 24 channels


@needs_compiler
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("band", BANDS)
def test_every_width_of_a_band(band: int, channels_last: bool) -> None:
    case = replace(SETTINGS["kernel equals stride"], channels_last=channels_last)
    tensors, build = Tensors(case), build_for(case)
    wanted = job(tensors, BANDS[band])
    assert moment_band(build, wanted) == band
    plan = halo_planner.plan_build(build, wanted, DEVICE)
    assert plan is not None
    check(tensors, plan, BANDS[band])


@needs_compiler
@pytest.mark.parametrize("name", ["kernel 3, stride 2", "march", "batch in the rows"])
def test_every_tiling_leaves_the_moments_of_everything(name: str) -> None:
    case = SETTINGS[name]
    tensors, build = Tensors(case), build_for(case)
    wanted = job(tensors, 4)
    tilings = list(tilings_of(build, case.batch, wanted.positions, wanted.read_size))
    if build.march:
        tilings = [t for t in tilings if t.items == 1 and (t.sheets == 1 or t.halo[1] * t.halo[2] >= t.length)]
    assert len(tilings) >= 8
    for tiling in tilings[:: max(1, len(tilings) // 12)]:
        check(tensors, halo_planner.assemble(build, tiling, wanted, DEVICE), 4)


@needs_compiler
@pytest.mark.parametrize("name", ["march", "several slabs"])
def test_moments_do_not_depend_on_who_runs_first(name: str) -> None:
    tensors = Tensors(SETTINGS[name])
    plan = halo_planner.plan_build(build_for(tensors.case), job(tensors, 2), DEVICE)
    assert plan is not None
    first = check(tensors, plan, 2)
    for order in ("reversed", "shuffled:1"):
        assert torch.equal(first, check(tensors, plan, 2, order)), "bits"


@needs_compiler
@pytest.mark.parametrize("name", ["march", "kernel 3, stride 2"])
def test_a_large_mean_does_not_drown_the_deviations(name: str) -> None:
    """The sum of 1000 squares of a million has no digit left for deviations of about 10."""
    tensors = Tensors(SETTINGS[name])
    assert tensors.bias is not None
    tensors.bias.fill_(1e6)
    plan = halo_planner.plan_build(build_for(tensors.case), job(tensors, 2), DEVICE)
    assert plan is not None
    count, shift, total, squares = leave(tensors, plan, 2).double().unbind(3)
    values = expected(tensors).reshape(tensors.case.batch, 2, -1)
    step = shift - values.mean(2)[..., None]
    variance = (squares + step * (2 * total + count * step)).sum(2) / values.shape[2]
    exact = values.var(2, correction=0)
    assert ((variance - exact).abs() < 0.05 * exact).all()


@needs_compiler
@pytest.mark.parametrize("multiprocessors", [1, 3, 7])
def test_a_march_through_the_batch_leaves_the_moments_of_every_item(multiprocessors: int) -> None:
    """Tiles touch two items, items different numbers of tiles, and shares cut tiles anywhere."""
    case = Case(16, 8, (4, 17, 18), 3, batch=3, build={"march": True, "slabs": 2})
    tensors, build, device = Tensors(case), build_for(case), replace(DEVICE, multiprocessors=multiprocessors)
    wanted = job(tensors, 2)
    runs = [t for t in tilings_of(build, case.batch, wanted.positions, wanted.read_size) if t.sheets > 1]
    assert [(run.tiles[2], run.shared) for run in runs] == [(5, False), (5, True)]
    for run in runs:
        check(tensors, halo_planner.assemble(build, run, wanted, device), 2)


def test_a_march_with_moments_has_at_most_two_batch_items_per_tile() -> None:
    case = Case(16, 8, (2, 2, 2), 3, 1, 1, batch=64, build={"march": True})
    tensors = Tensors(case)
    plain = halo_planner.plan_build(build_for(case), job_of(tensors.problem), DEVICE)
    plan = halo_planner.plan_build(build_for(case), job(tensors, 2), DEVICE)
    assert plain is not None and plan is not None
    assert plain.tiling.items * plain.tiling.sheets > 1 and plan.tiling.items * plan.tiling.sheets == 1


# ---- moments -> mean and reciprocal deviation


def statistics(moments: Tensor) -> tuple[Tensor, Tensor]:
    """[norm groups, count, 4] -> the kernel's means and reciprocal deviations."""
    kind = "double" if moments.dtype == torch.float64 else "float"
    launch = Launch(
        kernel="statistics",
        constants=(("kThreads", 64), ("kMinBlocks", 1), ("kOverlaps", False), ("Acc", kind)),
        grid=(moments.shape[0], 1, 1),
        threads=64,
        shared_bytes=0,
        pointers=STATISTICS.pointers(moments="moments", statistics="statistics"),
        scalars=STATISTICS.pack(eps=EPS, count=moments.shape[1]),
    )
    result = torch.full((2, moments.shape[0]), nan, dtype=moments.dtype)
    emulator.prepare(launch)((moments.data_ptr(), result.data_ptr()))
    return result[0], result[1]


def moments_of(values: Tensor, parts: int, shift: float) -> Tensor:
    """[norm groups, n] -> [norm groups, parts, 4], some of them empty."""
    found = []
    for part in values.double().chunk(parts, 1):
        deviation = part - shift
        count = torch.full(part.shape[:1], part.shape[1], dtype=torch.float64)
        found += [torch.stack([count, count * 0 + shift, deviation.sum(1), deviation.square().sum(1)], 1)]
        found += [torch.zeros_like(found[-1])]
    return torch.stack(found, 1).to(values.dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mean", "shift"), [(0.0, 0.0), (1e4, 1e4), (1e4, 9997.0), (-3e6, -3e6)])
def test_statistics_survive_large_means(mean: float, shift: float, dtype: torch.dtype) -> None:
    values = (torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)) + mean).to(dtype)
    means, rstds = statistics(moments_of(values, 100, shift))
    exact = values.double()
    unit = 1e-6 if dtype == torch.float32 else 1e-11  # rounding error, which the reference has too
    assert ((means.double() - exact.mean(1)).abs() < unit * (1 + abs(mean) / 10)).all()
    reference = 1 / (exact.var(1, correction=0) + EPS).sqrt()
    assert ((rstds.double() - reference).abs() < 10 * unit * reference).all()


@needs_compiler
def test_statistics_of_equal_values_and_of_nan() -> None:
    values = torch.full((2, 64), 1234.5)
    means, rstds = statistics(moments_of(values, 4, 1234.5))
    assert torch.equal(means, values[:, 0])
    torch.testing.assert_close(rstds, torch.full((2,), EPS**-0.5))
    values[1, 7] = nan
    means, rstds = statistics(moments_of(values, 4, 1234.5))
    assert means.isnan().tolist() == rstds.isnan().tolist() == [False, True]
