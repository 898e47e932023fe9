"""The halo kernel in the emulator against float64: settings, builds, layouts, types; and its planner's promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from generated import axis
from halo_cases import (
    COPIED,
    DEVICE,
    FLAT,
    LAST_DIVIDED,
    LAST_TILES_DIVIDED,
    MARCH,
    PORTIONED,
    SETTINGS,
    SMALL_PANELS,
    STREAMED,
    Case,
    Tensors,
    all_tilings,
    build_for,
    needs_compiler,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tconv3d import emulator
from tconv3d.api.explain import call_of, problems_of
from tconv3d.families.halo import candidates, loading
from tconv3d.families.halo import model as halo_model
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo import search as halo_search
from tconv3d.families.halo.build import Division, Input
from tconv3d.families.halo.constants import constants
from tconv3d.families.halo.job import job_of
from tconv3d.families.halo.packing import pack
from tconv3d.families.halo.storing import can_store, vector
from tconv3d.families.halo.tiling import tilings
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.problem import Device, Pass
from tconv3d.planning.repertoire import TYPICAL
from tconv3d.planning.scalars import ceil_div
from tconv3d.runtime import compiler
from tconv3d.tools.bench.layers import LAYERS, layer


def check(case: Case, order: str = "forward") -> None:
    tensors = Tensors(case)
    plan = halo_planner.plan_build(build_for(case), job_of(tensors.problem), DEVICE)
    assert plan is not None
    tensors.check(plan, order)


@needs_compiler
@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name: str) -> None:
    check(SETTINGS[name])


@needs_compiler
@pytest.mark.parametrize("order", ["reversed", "shuffled:1", "shuffled:2"])
@pytest.mark.parametrize(
    "name",
    [
        "march",
        "weights streamed",
        "several slabs",
        "lines, bfloat16, groups",
        "lines, long runs",
        "three stages, three consumers",
    ],
)
def test_result_does_not_depend_on_who_runs_first(name: str, order: str) -> None:
    check(SETTINGS[name], order)


@st.composite
def with_lines(draw: st.DrawFn) -> Case:
    """Layers whose lines of inputs can be copied. Their rows of outputs begin anywhere, or at whole vectors."""
    (kernel_d, stride_d, padding_d, dilation_d, _), (kernel_h, stride_h, padding_h, dilation_h, _) = draw(
        st.tuples(axis, axis)
    )
    kernel_w, padding_w = draw(st.sampled_from([(3, 0), (3, 1), (2, 0), (4, 1), (5, 2)]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    size = (draw(st.integers(1, 4)), draw(st.integers(1, 7)), 8 * draw(st.integers(1, 9)))
    case = Case(
        8 * draw(st.integers(1, 3)), draw(st.integers(8, 20)), size, (kernel_d, kernel_h, kernel_w),
        (stride_d, stride_h, 2), (padding_d, padding_h, padding_w), 0, (dilation_d, dilation_h, 1),
        batch=draw(st.integers(1, 3)), dtype=dtype,
    )  # fmt: skip
    assume(min(case.geometry.output_size(size)) >= 1)
    return case


@pytest.mark.slow
@needs_compiler
@given(with_lines(), st.sampled_from(["forward", "shuffled:3"]))
@settings(max_examples=8)
def test_lines_of_any_layer(case: Case, order: str) -> None:
    tensors = Tensors(case)
    job = job_of(tensors.problem)
    found = candidates.builds_of(candidates.Nominal.of(job), DEVICE.shared_bytes)
    plans = (halo_planner.plan_build(build, job, DEVICE) for build in found if build.input is Input.LINES)
    plan = next((plan for plan in plans if plan is not None), None)
    assume(plan is not None)
    assert plan is not None
    tensors.check(plan, order)


@needs_compiler
@pytest.mark.parametrize("name", [name for name in SETTINGS if "aligned rows" in name])
def test_aligned_rows_are_stored_as_vectors(name: str) -> None:
    case = SETTINGS[name]
    tensors, build, job, found = all_tilings(case)
    for outputs in (16 // job.item_bytes, 2):
        wanted = [tiling for tiling in found if vector(build, job, tiling) == outputs]
        assert wanted, outputs
        for tiling in wanted[:: max(1, len(wanted) // 2)]:
            tensors.check(halo_planner.assemble(build, tiling, job, DEVICE))


@needs_compiler
@pytest.mark.parametrize(("dtype", "slabs"), [("bfloat16", 2), ("float16", 3), ("float32", 2)])
def test_planes_that_are_one_line_are_stored_four_outputs_at_a_time(dtype: str, slabs: int) -> None:
    # Lines of 10, planes of 60.
    case = Case(16, 8, (3, 4, 8), 3, dtype=dtype, batch=3, build={**MARCH, "slabs": slabs})
    tensors, build, job, found = all_tilings(case)
    wanted = [tiling for tiling in found if vector(build, job, tiling) == 4]
    assert {tiling.length > 0 for tiling in wanted} == {True} and len({tiling.sheets for tiling in wanted}) == 2
    for tiling in wanted:
        tensors.check(halo_planner.assemble(build, tiling, job, DEVICE))


BESIDE: dict[str, object] = {"march": False, "split": (False, False, True), "row_bytes": 64}
VECTORS = {  # inputs that are loaded by vectors of 16 bytes along w
    "six pieces": Case(40, 8, (2, 3, 16), (2, 3, 3), 1, (0, 1, 1), dtype="float16", build=FLAT),
    "march": Case(21, 8, (3, 4, 24), (2, 3, 4), 1, (1, 1, 2), dtype="bfloat16", build=MARCH),
    "several chunks, phases apart": Case(
        72, 8, (2, 2, 16), (2, 2, 4), (1, 1, 2), (0, 1, 1), dtype="bfloat16", build=BESIDE
    ),
    "weights streamed": Case(72, 8, (2, 4, 16), (1, 2, 2), 1, dtype="float16", build={**FLAT, **STREAMED}),
    "groups": Case(44, 32, (2, 2, 16), (1, 2, 2), groups=4, dtype="float16", build=FLAT),
}


@needs_compiler
@pytest.mark.parametrize("name", VECTORS)
def test_aligned_rows_are_loaded_as_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lines, tiles that begin between vectors, and by the same kernel a tensor that is not aligned."""
    monkeypatch.setattr(loading, "MAX_BESIDE", 99.0)
    case = replace(VECTORS[name], batch=1)
    tensors, build, job, tried = all_tilings(case)
    found = [t for t in tried if loading.vectors(build, job, t)]
    whole = max((t for t in found if t.tiles[3] == 1 and not t.length), key=lambda t: t.count)
    tiling = min((t for t in found if t.tiles[3] > 1 and t.tile[2] % 4), key=lambda t: t.count)
    for each in (whole, tiling):
        tensors.check(halo_planner.assemble(build, each, job, DEVICE), "shuffled:1")
    unaligned = torch.empty(tensors.x.numel() + 1, dtype=tensors.x.dtype)[1:].view(tensors.x.shape)
    tensors.x = unaligned.copy_(tensors.x)
    job, by_vector = replace(job, aligned=False), constants(build, job)
    plan = halo_planner.assemble(build, tiling, job, DEVICE)
    assert not loading.vectors(build, job, tiling) and plan.main.constants == by_vector
    tensors.check(plan)


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_runs_are_loaded_as_vectors(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_BESIDE", 99.0)
    case = replace(VECTORS["march"], size=(3, 14, 24), batch=3, dtype=dtype)
    tensors, build, job, found = all_tilings(case)
    runs = [t for t in found if t.length and loading.vectors(build, job, t)]
    assert {run.sheets for run in runs} == {1, 3} and max(run.tiles[2] for run in runs) > 1
    for run in runs:
        tensors.check(halo_planner.assemble(build, run, job, DEVICE), "shuffled:1")


PAIRS = {  # inputs whose lines are even, but no vectors
    "march": Case(21, 8, (3, 14, 10), (2, 3, 3), 1, (1, 1, 2), dtype="bfloat16", build=MARCH),
    "several chunks": Case(72, 8, (2, 3, 22), (1, 2, 3), dtype="float16", build={**FLAT, "row_bytes": 64}),
}


@needs_compiler
@pytest.mark.parametrize("name", PAIRS)
def test_even_lines_are_loaded_by_pairs(name: str) -> None:
    """Boxes and runs, and by the same kernel lines that begin at odd places."""
    case = PAIRS[name]
    tensors, build, job, found = all_tilings(case)
    paired = [t for t in found if loading.pairs(build, job, t)]
    runs = [t for t in paired if t.length]
    assert bool(runs) == build.march and len(paired) < len(found)
    boxes = [t for t in paired if not t.length]
    single = next(t for t in found if not loading.pairs(build, job, t))
    for tiling in (*runs, boxes[0], boxes[-1], single):
        tensors.check(halo_planner.assemble(build, tiling, job, DEVICE), "shuffled:1")


@needs_compiler
@pytest.mark.parametrize("name", ["kernel 3, stride 2", "march", "march, padded", "batch in the rows"])
def test_every_tiling_gives_the_same_result(name: str) -> None:
    """All cuts of a small volume into tiles and slabs: the run-time numbers of one compiled kernel."""
    case = SETTINGS[name]
    tensors, build, job, found = all_tilings(case)
    runs = [tiling for tiling in found if tiling.length]
    assert len(found) >= 8 and (runs or not build.march)
    for tiling in runs + found[len(runs) :: max(1, len(found) // 12)]:
        tensors.check(halo_planner.assemble(build, tiling, job, DEVICE))


PORTIONS = {
    "streamed": Case(72, 12, (3, 5, 6), 3, 1, 1, build={**STREAMED, "slots": 4, **PORTIONED}),
    "phases apart": Case(
        64, 32, (2, 3, 4), (3, 3, 2), 2, 1, build={"split": (True, True, False), **COPIED, **PORTIONED}
    ),
    "16 bits": Case(
        136, 9, (2, 4, 5), 2, 2, dtype="bfloat16", channels_last=True,
        build={**STREAMED, "slots": 3, **PORTIONED},
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", PORTIONS)
def test_portions_of_the_channels_add_up(name: str) -> None:
    case = PORTIONS[name]
    tensors, build = Tensors(case), build_for(case)
    job = job_of(tensors.problem)
    found = halo_search.best_tiling(build, job, 132)
    assert found is not None and found[1].portions > 1, "a GPU has more multiprocessors than this has tiles"
    for portions in {2, build.chunks}:
        plan = halo_planner.assemble(build, replace(found[1], portions=portions), job, DEVICE)
        tensors.check(plan)


SPREAD = {
    "one slab": Case(72, 64, (3, 5, 10), (3, 2, 2), 1, 1, build={**LAST_DIVIDED, "slabs": 1}),
    "padding above and below": Case(64, 16, (5, 3, 9), (4, 2, 1), batch=1, build=LAST_DIVIDED),
    "planes without input": Case(72, 8, (2, 3, 10), (3, 1, 1), 1, 0, dilation=(5, 1, 1), build=LAST_DIVIDED),
    "every other plane": Case(72, 16, (5, 3, 4), 3, 1, 2, dilation=2, build=LAST_DIVIDED),
    "every third plane, copied": Case(
        64, 8, (4, 3, 3), (3, 2, 2), 1, (3, 1, 0), dilation=(3, 2, 1), build={**LAST_DIVIDED, **COPIED}
    ),
    "many sums": Case(72, 128, (2, 3, 9), (2, 2, 1), build={**LAST_DIVIDED, "slabs": 2, "producers": 2, "slots": 3}),
    "phases together": Case(72, 8, (3, 4, 5), 3, 2, 1, 1, build=LAST_DIVIDED),
    "phases apart, copied": Case(
        64,
        32,
        (3, 3, 4),
        (4, 2, 2),
        2,
        (1, 0, 0),
        batch=1,
        build={**LAST_DIVIDED, "split": (True, True, False), **COPIED},
    ),
    "small panels": Case(
        96, 24, (3, 5, 6), 2, 2, dtype="float16", build={**LAST_DIVIDED, **COPIED, **SMALL_PANELS, "slots": 8}
    ),
    "16 bits, channels last": LAST_TILES_DIVIDED,
    "groups, channels last": Case(
        128, 32, (3, 4, 5), 3, 1, 2, groups=2, channels_last=True, build={**LAST_DIVIDED, **COPIED}
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", SPREAD)
def test_shares_of_the_chunks_add_up(name: str) -> None:
    case = SPREAD[name]
    tensors, build, job, tried = all_tilings(case)
    assert candidates.can_divide_last_tiles(build)
    found = [t for t in tried if t.slabs <= build.round_slabs]
    ways = set()
    for tiling in found[:: max(1, len(found) // 3)]:
        work = tiling.work(build) * build.chunks
        for multiprocessors in {1, 3, 5, work // 2, 2 * work} - {0}:
            device = replace(DEVICE, multiprocessors=multiprocessors)
            plan = halo_planner.assemble(build, tiling, job, device)
            spread = tiling.spread(build, job.arriving(build.input), multiprocessors)
            ways.add((spread.even > 0, spread.cost * spread.blocks > 0))
            tensors.check(plan, f"shuffled:{multiprocessors}")
    assert len(ways) > 1, "blocks took whole tiles, and pieces"


@needs_compiler
def test_input_may_have_any_strides() -> None:
    case = Case(12, 8, (3, 4, 5), 3, 2, 1)
    tensors = Tensors(case)
    wide = torch.zeros(2, 24, 3, 9, 7)
    wide[:, ::2, :, 1:5, 2:7] = tensors.x
    tensors.x = wide[:, ::2, :, 1:5, 2:7]
    plan = halo_planner.plan_build(build_for(case), job_of(tensors.problem), DEVICE)
    assert plan is not None
    tensors.check(plan)


@needs_compiler
def test_strict_float32_of_small_large_and_infinite_values() -> None:
    """Halves of a value stay finite, and what is not finite stays what it is."""
    case = Case(64, 8, (1, 1, 70), 1, batch=1, bias=False, strict=True)
    tensors, most = Tensors(case), torch.tensor(3.4028e38)  # TF32 would round it to infinity
    x, plain = tensors.x[0, :, 0, 0], slice(0, 64)
    tensors.weight.copy_(torch.eye(8).repeat(8, 1)[:, :, None, None, None])
    x.zero_()
    x[:8, plain] = (torch.rand(8, 64) + 1) * torch.logspace(-44, 38, 64)  # from subnormal numbers to large ones
    x[0, 64], x[1, 65], x[2, 66], x[3, 67] = float("inf"), -float("inf"), float("nan"), most
    x[4, 68] = x[36, 68] = most
    x[5, 69] = x[37, 69] = -most
    plan = halo_planner.plan_build(build_for(case), job_of(tensors.problem), DEVICE)
    assert plan is not None and plan.build.chunks > 1
    tensors.run(plan)
    y, exact = tensors.y[0, :, 0, 0], x[:8].double()
    allowed = 2**-22 * exact.abs() + 2**-136  # TF32 has no smaller step
    assert ((y.double() - exact).abs() <= allowed)[:, plain].all()
    assert (y[0, 64], y[1, 65]) == (float("inf"), -float("inf")) and y[2, 66].isnan()
    assert abs(y[3, 67] - most) <= 2**-22 * most
    assert (y[4, 68], y[5, 69]) == (float("inf"), -float("inf"))  # a sum that is too large


WEIGHTS = {
    "kernel 3": Case(40, 24, (3, 4, 5), (3, 3, 5)),
    "kernel 3, stride 2": Case(36, 72, (3, 4, 5), 3, 2, 1),
    "groups, bfloat16": Case(144, 48, (3, 4, 5), (2, 3, 3), groups=2, dtype="bfloat16"),
    "small groups": Case(32, 32, (3, 4, 5), 2, groups=4),
}


@needs_compiler
@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.INPUT_GRAD])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_may_have_any_strides(name: str, which: Pass) -> None:
    """Packed, a weight is the same to the bit: as it comes, channels-last, not aligned, and spread out."""
    case = WEIGHTS[name]
    tensors = Tensors(case)
    weight, results = tensors.weight, set()
    spread = torch.zeros(*weight.shape, 2, dtype=weight.dtype)[..., 0]
    beside = torch.zeros(weight.numel() + 1, dtype=weight.dtype)[1:].view(weight.shape)
    last = weight.contiguous(memory_format=torch.channels_last_3d)
    for each in (weight, last, beside.copy_(weight), spread.copy_(weight)):
        job = job_of(replace(tensors.problem, which=which, weight=each.stride()))
        build = halo_planner.choose(job, DEVICE.shared_bytes, 132)
        assert build is not None
        packed = torch.zeros(build.packed_bytes, dtype=torch.uint8)
        emulator.prepare(pack(build, job))((each.data_ptr(), packed.data_ptr()))
        results.add(packed.numpy().tobytes())
    assert len(results) == 1 and any(results.pop())


LARGE = {
    **{name: LAYERS[name] for name in ("large_volume", "grouped_strided_g1", "gan_128_64_16")},
    "32 output channels, stride 2": layer(2, 40, 32, 80, kernel=4, stride=2, padding=1),
    "few columns of lines": layer(2, 12, 160, (14, 56, 56), kernel=2, stride=2),
}


@pytest.mark.parametrize("name", LARGE)
def test_products_of_large_layers_do_not_wait_for_each_other(name: str) -> None:
    """What the emulator runs is smaller, and leaves registers free."""
    pytest.importorskip("cuda.core")
    operands = (LARGE[name].module(torch.float32, "meta"), LARGE[name].input(torch.float32, "meta"))
    forward, input_grad, *_ = (job_of(replace(problem, tf32=True)) for problem in problems_of(*call_of(*operands)))
    job = input_grad if "lines" in name else forward
    found = halo_planner.plan_or_none(job, Device("Hopper", (9, 0), 132, 232448))
    assert found is not None
    assert not compiler.compile("halo", found.main.constants, "sm_90a").serialized


def test_a_new_volume_compiles_nothing() -> None:
    """But what typical volumes need."""
    device = Device("Hopper", (9, 0), 132, 232448)
    for case in (SETTINGS["march"], SETTINGS["kernel 3, stride 2"], SETTINGS["kernel equals stride"]):

        def build(case: Case) -> tuple[candidates.Nominal, object]:
            job = job_of(Tensors(case).problem)
            return candidates.Nominal.of(job), halo_planner.choose(job, device.shared_bytes, device.multiprocessors)

        halo_planner.forget()
        nominal, first = build(case)
        assert build(case)[1] == first
        for batch, size in ((1, (2, 3, 4)), (1, (1, 1, 1)), (1, (7, 8, 9)), (2, (7, 9, 3)), (1, (5, 2, 8))):
            nominal, chosen = build(replace(case, size=size, batch=batch))
            jobs = halo_planner._typical_jobs(replace(nominal, kind=0))
            assert len(jobs) == len(TYPICAL)
            have = [halo_planner._choice(job, device.shared_bytes, device.multiprocessors) for job in jobs]
            assert chosen in (first, *have)
        halo_planner.forget()


@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.INPUT_GRAD])
@pytest.mark.parametrize(
    ("dtype", "strict"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
)
def test_no_tiling_takes_less_than_the_least(which: Pass, dtype: torch.dtype, strict: bool) -> None:
    """What the search passes over without a closer look would not have been chosen."""
    torch.backends.cudnn.conv.fp32_precision = "ieee" if strict else "tf32"
    looked_at = 0
    for small in (layer(2, 48, 24, (6, 8, 12), 3, 2, 1, 1), layer(2, 128, 64, 4, 4, 2, 1), layer(1, 24, 16, 20, 3)):
        for layout in (torch.contiguous_format, torch.channels_last_3d):
            x = small.input(dtype, "meta").contiguous(memory_format=layout)
            problems = problems_of(*call_of(small.module(dtype, "meta"), x))
            given = job_of(next(problem for problem in problems if problem.which is which))
            nominal = candidates.Nominal.of(given)
            kinds = (candidates.builds_of, candidates.last_tiles_divided)
            for build in [build for kind in kinds for build in kind(nominal, DEVICE.shared_bytes)]:
                job = given.as_merged(build.tile.merged).arriving(build.input)
                if not can_store(build, job) or (build.input is Input.REWRITTEN and not given.has_rows):
                    continue
                for multiprocessors, every in ((132, 23), (4, 101)):
                    least = halo_search.Least(build, job, multiprocessors)
                    for tiling in list(tilings(build, job.batch, job.positions, job.read_size))[::every]:
                        takes = halo_model.cycles(build, tiling, job, multiprocessors)
                        assert least.any_tiling <= takes, (build, tiling)
                        assert not least.exceeds(tiling, least.room(takes)), (build, tiling)
                        worth = least.worth(least.room(takes), limited=False)
                        rounds = ceil_div(tiling.slabs, build.round_slabs) * tiling.count
                        if build.march or not tiling.length:
                            assert worth(rounds, tiling.count) and worth(rounds, 0), (build, tiling)
                        assert least.exceeds(tiling, least.room(0.05 * takes))
                        if build.division is Division.BLOCKS:
                            takes = halo_model.cycles(build, replace(tiling, portions=2), job, multiprocessors)
                            room = least.room(takes - halo_model.adding_cycles(2, job, least.costs))
                            assert least.any_tiling <= takes and not least.exceeds(tiling, room, 2)
                        looked_at += 1
    assert looked_at > 100


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"which": Pass.WEIGHT_GRAD}, "forward"),
        ({"batch": 0}, "nothing"),
        ({"geometry": Geometry.make(8, 8, (3, 3, 3), (4, 4, 4))}, "64 phases"),
        ({"geometry": Geometry.make(8, 2, (3, 3, 3))}, "channels"),
    ],
)
def test_why_not(problem: dict[str, object], reason: str) -> None:
    base = Tensors(Case(8, 8, (3, 3, 3), 3)).problem
    assert halo_planner.why_not(base, DEVICE) is None
    refusal = halo_planner.why_not(replace(base, **problem), DEVICE)  # type: ignore[arg-type]
    assert refusal is not None and reason in refusal
    assert halo_planner.why_not(base, Device("Ampere", (8, 0), 108, 166912)) is not None
