"""Plans the halo kernel: forward pass and input gradient on Hopper's tensor cores.

A pass becomes a `Job`, the tensors that the kernel reads and writes. Three decisions follow, each a pure function:

- `Program` (program.py): which shifts feed which phases, in which order the accumulators' columns stand, and thus
  the matrix instructions. It follows from the geometry.
- `Build` (build.py): the choices that are compiled, such as how input arrives, columns, stages and warpgroups. It
  follows from geometry, type, layout, GPU and volume, but a layer has only a few for all volumes
  (planning/repertoire.py).
- `Tiling` (tiling.py): how the volume is cut into tiles, which are run-time arguments.

candidates.py yields the builds, and search.py compares them with their tilings by the model of model.py. This module
knows sizes and strides, never tensors. The headers of halo.cuh and halo_layout.cuh explain the terms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from math import inf

from ...planning import offers, tensor_cores
from ...planning.calibration import DERIVED_SURCHARGE, Work, narrow_surcharge
from ...planning.geometry import Triple
from ...planning.offers import Answer, Offer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, channels_last_strides, contiguous_strides
from ...planning.repertoire import TYPICAL, Repertoire, nearest, searched
from ...planning.side import Side
from ...planning.workspace import placed
from ...runtime import cache, plain, sources
from . import boxes
from .build import Build, Input
from .candidates import MEASURED_LINE_TILES, Nominal, builds_of, last_tiles_divided
from .job import Job, job_of
from .launches import HaloPlan, assemble
from .measured import VERSION
from .packing import pack
from .program import MAX_PARTS
from .search import best_tiling, costs_of

HAS_EPILOGUE = True
HOLDS_CHANNELS = True
LEAST_PAIRS = 64  # pairs of an input and an output channel of a group: fewer leave most of a product idle
TURNED_KERNEL = "halo_turned"  # names the offers by builds whose loaders transpose pieces of lines (halo_turns.cuh)
TURNED_WIDTH = 16  # least elements of a line for such builds
TURNED_STRIDES = (2, 4)  # strides along w whose phases lie side by side in a row
MAX_TAPS = 800  # most taps that a block of the packing kernel holds
MAX_SOURCES = 64  # most phase planes of the output gradient
MOMENT_BYTES = 16  # size of struct Moments<float> in bytes
AS_GOOD = 1.03  # ratio of predicted times up to which two builds count as equally fast
SPREAD = 1.04  # ratio of predicted times: the last tiles are divided only if that saves at least 4%
TORN = 1.01  # factor on the predicted time of builds that write partial sectors, among equally fast builds
UNMEASURED = 1.1  # factor on the predicted time of builds on lines with more tiles than any measured build
HOPELESS = 1.5  # ratio to the best predicted time above which tuning does not measure a build
TUNED = ".tuned"  # suffix of measured choices in the disk cache


# ---- the choice ---------------------------------------------------------------------------------------------------


def choose(job: Job, shared_bytes: int, multiprocessors: int) -> Build | None:
    """Returns the build for a job: the fastest measured build if the layer was tuned, else one of its repertoire.

    The repertoire lets most new volumes use a build that is already compiled.
    """
    nominal = Nominal.of(job)
    build = _tuning(nominal, shared_bytes, multiprocessors).build
    if build is not None and best_tiling(build, job, multiprocessors) is not None:
        return build

    def own(job: Job) -> Build | None:
        return _choice(job, shared_bytes, multiprocessors)

    def typical() -> Iterator[Build]:
        volumes = ((each.all_positions, each) for each in _typical_jobs(replace(nominal, kind=0)))
        return (build for each in nearest(job.all_positions, volumes) if (build := own(each)) is not None)

    return _repertoire.choose(
        (replace(nominal, kind=0, lines=False), job.norm is not None, shared_bytes, multiprocessors),
        (job.batch, job.read_size, job.written_size),
        lambda: own(job),
        typical,
        lambda build, most: found[0] if (found := best_tiling(build, job, multiprocessors, most)) else inf,
    )


_repertoire = Repertoire[tuple[Nominal, bool, int, int], tuple[int, Triple, Triple], Build]()


@lru_cache(maxsize=1024)
def _typical_jobs(nominal: Nominal) -> tuple[Job, ...]:
    """Returns a layer's passes over the typical volumes of the repertoire."""
    found = []
    for batch, edge in TYPICAL:
        for width in (edge, 2 * edge, edge + 1):  # lines that are multiples of 16 bytes, and others
            job = _typical_job(nominal, batch, (edge, edge, width))
            if job is not None and replace(Nominal.of(job), kind=nominal.kind) == nominal:
                found.append(job)
                break
    return tuple(found)


def _typical_job(nominal: Nominal, batch: int, size: Triple) -> Job | None:
    """Returns a layer's pass over an input of this size (a dx of this size for the input gradient)."""
    g = nominal.geometry
    other = g.output_size(size)
    if min(other) < 1:
        return None
    sizes = (other, size) if nominal.gather else (size, other)
    strides = channels_last_strides if nominal.written_last else contiguous_strides
    read, written = (
        strides((batch, channels, *each))
        for channels, each in zip((g.in_channels, g.out_channels), sizes, strict=True)
    )
    weight = strides((g.in_channels, g.out_per_group, *g.kernel))
    return Job(
        g, nominal.gather, batch, nominal.dtype, *sizes, read, written, weight, g.in_per_group * weight[0],
        strict=nominal.strict, holding=nominal.holding, turned=nominal.turned,
    )  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """A build that was chosen by measurement, as the disk cache keeps it; `build` is None if nothing was measured."""

    build: Build | None = None
    tuned: str = ""  # what was measured
    planner: str = ""  # version of the planner


def tuned(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> str:
    """Returns what was measured if the build was chosen by measurement, else an empty string."""
    return _tuning(nominal, shared_bytes, multiprocessors).tuned


def keep(nominal: Nominal, shared_bytes: int, multiprocessors: int, build: Build, tuned: str) -> None:
    """Makes a build the choice for all processes from now on. `tuned` says what was measured."""
    tuning = Tuning(build, tuned, _version())
    cache.put(_tuning_key(nominal, shared_bytes, multiprocessors), TUNED, plain.dumps(tuning).encode())
    forget()


def forget() -> None:
    """Clears the choices in memory, so that the next choice is read from the disk cache."""
    _tuning.cache_clear()
    _choice.cache_clear()
    _repertoire.forget()


@lru_cache(maxsize=1024)
def _tuning(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> Tuning:
    """Returns the measured choice of the disk cache, or a choice without a build if there is none."""
    text = cache.find(_tuning_key(nominal, shared_bytes, multiprocessors), TUNED)
    found: Tuning = plain.loads(text, Tuning) if text else Tuning()
    return found


def _tuning_key(*settings: object) -> str:
    return cache.key("choice", _version(), repr(("tuned", *settings)))


def _version() -> str:
    """Returns a digest of everything but the layer that a choice depends on."""
    return cache.key(sources.program(__name__), VERSION)


@lru_cache(maxsize=1024)
def _choice(job: Job, shared_bytes: int, multiprocessors: int) -> Build | None:
    """Returns the choice of the model, which is searched once and then read from the disk cache."""
    settings = ("chosen", VERSION, job, shared_bytes, multiprocessors)
    return searched(__name__, settings, Build | None, lambda: _search(job, shared_bytes, multiprocessors))


def outdated_tunings() -> int:
    """Returns how many measured choices in the disk cache are unused: another version of this planner made them."""
    return sum(json.loads(each)["planner"] != _version() for each in cache.payloads(TUNED))


def _search(job: Job, shared_bytes: int, multiprocessors: int) -> Build | None:
    """Returns the best build by the model."""
    nominal = Nominal.of(job)
    found = costs_of(builds_of(nominal, shared_bytes), job, multiprocessors, AS_GOOD * UNMEASURED)
    costs = {build: cost * (UNMEASURED if _is_unmeasured(build) else 1.0) for build, cost in found.items()}
    best = min(costs, key=lambda build: costs[build], default=None)
    divided: dict[Build, float] = {}
    if best is not None and not (
        best.march and best.item_bytes == 2
    ):  # dividing tiles is no faster than 16-bit marches
        limit = costs[best] / SPREAD
        divided = costs_of(last_tiles_divided(nominal, shared_bytes), job, multiprocessors, AS_GOOD, limit)
    boxes.forget()
    if best is None or divided:
        return min(divided, key=lambda build: divided[build], default=None)
    # Builds within a factor of AS_GOOD of the best are equally fast as far as the model can tell.
    good = (build for build in costs if costs[build] < AS_GOOD * costs[best])
    equals = (build for build in good if build.input.copied == best.input.copied)
    # Column tiles of a torn build write parts of the same sectors of float32 outputs.
    factor = TORN if best.item_bytes == 4 and not job.written_last else 1.0
    return min(equals, key=lambda build: (-build.block.producers, costs[build] * (factor if build.torn else 1.0)))


def _is_unmeasured(build: Build) -> bool:
    return build.input is Input.LINES and build.out_tiles > MEASURED_LINE_TILES


# ---- the plan -----------------------------------------------------------------------------------------------------


def why_not(problem: Problem, device: Device, turned: bool = False) -> str | None:
    """Returns why the halo kernel does not take a problem, or None if it does.

    `turned`: with builds whose loaders transpose pieces of lines.
    """
    if device.capability != (9, 0):
        return "the halo kernel is for compute capability 9.0"
    if problem.which not in (Pass.FORWARD, Pass.INPUT_GRAD):
        return "the halo kernel computes the forward pass and the input gradient"
    if problem.dtype == "float64":
        return "the halo kernel has no float64"
    if problem.batch == 0:
        return "there is nothing to compute"
    job = replace(job_of(problem), turned=turned)
    g = job.geometry
    if job.gather and g.phases // (g.stride[2] if g.stride[2] <= MAX_PARTS else 1) > MAX_SOURCES:
        return f"{g.phases} phase planes are too many small products"
    if g.in_per_group * g.out_per_group < LEAST_PAIRS:
        return f"fewer than {LEAST_PAIRS} pairs of channels per group leave tensor cores idle"
    if g.taps > MAX_TAPS:
        return f"{g.taps} taps are more than a block that packs the weight holds"
    found = plan_or_none(job, device)
    if found is None:
        return f"no tile of {g.phases} phases, its halo and what a block packs fit accumulators and shared memory"
    return tensor_cores.why_not_halves(Side.of(problem).mean_terms, problem.loose) if job.strict else None


PASSES = (Pass.FORWARD, Pass.INPUT_GRAD)  # passes that the family computes


def leaves_moments(problem: Problem) -> bool:
    """Tells whether the kernel stores the moments of its outputs for a norm that follows."""
    return problem.which is Pass.FORWARD and problem.norm is not None


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    found = offers.one_by_one(PASSES, "halo", wanted, device, why_not, work, plan)
    turned = {which: problem for which, problem in wanted.items() if may_turn(problem)}
    why, count, make = partial(why_not, turned=True), partial(work, turned=True), partial(plan, turned=True)
    found += offers.one_by_one(PASSES, TURNED_KERNEL, turned, device, why, count, make)
    return [_with_surcharge(answer) for answer in found]


def may_turn(problem: Problem) -> bool:
    """Returns whether loaders may transpose pieces of lines of dy, of which positions gather several phases.

    Lines that begin with whole vectors are left to loads through registers, which are as fast by the model.
    """
    if problem.which is not Pass.INPUT_GRAD or problem.item_bytes != 2 or not problem.aligned:
        return False
    (*outer, w), width = problem.output, problem.output_size[2]
    axis = problem.geometry.axes[2]
    near = axis.stride in TURNED_STRIDES and axis.dilation == 1
    return w == 1 and near and width >= TURNED_WIDTH and any(v % 8 for v in (*outer, width))


def _with_surcharge(answer: Answer) -> Answer:
    """Returns the answer at a price above the predicted time if the layer is narrow, or the build leaves moments in
    place of taking lines.

    Lines of input as they lie in memory leave no moments. The model is fitted to the best builds of a layer without a
    norm, and has hardly seen the others where lines can be taken: the price is as for derived rates.
    """
    if not isinstance(answer, Offer):
        return answer
    factor = narrow_surcharge(answer.problem)
    if answer.problem.norm and Nominal.of(job_of(answer.problem)).lines:
        factor *= DERIVED_SURCHARGE
    return replace(answer, surcharge=answer.surcharge * factor)


def work(problem: Problem, device: Device, turned: bool = False) -> Work:
    """Returns the number of launches and the predicted cycles for a problem."""
    found = plan_or_none(replace(job_of(problem), turned=turned), device)
    assert found is not None, "work() of a problem that why_not() refuses"
    return Work(len(found.launches), found.cycles)


def plan(problem: Problem, device: Device, turned: bool = False) -> Plan:
    job = replace(job_of(problem), turned=turned)
    found = plan_or_none(job, device)
    if found is None:
        raise ValueError(why_not(problem, device, turned))
    measured = tuned(Nominal.of(job), device.shared_bytes, device.multiprocessors)
    why = "Hopper's tensor cores" + (", three TF32 products" if job.strict else "")
    return plan_of(found, problem, f"{why}{', tuned: ' if measured else ''}{measured}")


def plan_of(found: HaloPlan, problem: Problem, why: str = "") -> Plan:
    launches = list(found.launches)
    if problem.which is Pass.INPUT_GRAD:
        names = {"x": "dy", "bias": "null", "y": "dx"}
        launches = [replace(each, pointers=tuple(names.get(p, p) for p in each.pointers)) for each in launches]
    tile = f"{found.build}; tiles of {found.tiling}"
    norm_groups = problem.norm.groups if problem.norm else 0
    sizes = {
        "rows": found.rows_bytes,
        "moments": problem.batch * norm_groups * found.moments * MOMENT_BYTES,
        "portions": found.portions_bytes,
    }
    end, regions = placed(((name, size) for name, size in sizes.items() if size), found.packed_bytes)
    packed = found.packed_bytes if problem.which is Pass.FORWARD else 0  # gradients never reuse a packed weight
    return Plan("halo", why, tuple(launches), end, tile, regions, packed, found.moments, preparing=found.preparing)


def plan_or_none(job: Job, device: Device) -> HaloPlan | None:
    build = choose(job, device.shared_bytes, device.multiprocessors)
    return plan_build(build, job, device) if build else None


def candidates(job: Job, device: Device, most: int) -> list[HaloPlan]:
    """Returns plans for at most `most` builds, those with the least predicted times, each with its best tiling."""
    found = [
        plan
        for build in chain(*(kind(Nominal.of(job), device.shared_bytes) for kind in (builds_of, last_tiles_divided)))
        if (plan := plan_build(build, job, device)) is not None
    ]
    found.sort(key=lambda plan: plan.cycles)
    return [plan for plan in found[:most] if plan.cycles <= HOPELESS * found[0].cycles]


def plan_build(build: Build, job: Job, device: Device) -> HaloPlan | None:
    job = job.as_merged(build.tile.merged)
    found = best_tiling(build, job, device.multiprocessors)
    if found is None or pack(build, job).shared_bytes > device.shared_bytes:
        return None
    return assemble(build, found[1], job, device, found[0])
