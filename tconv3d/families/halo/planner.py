"""Plans the halo kernel: forward pass and input gradient on Hopper's tensor cores.

A pass becomes a `Job`, the tensors that the kernel reads and writes. Three decisions follow, each a pure function:

- `Program` (program.py): which shifts feed which phases, in which order the accumulators' columns stand, and thus
  the matrix instructions. It follows from the geometry.
- `Build` (build.py): the constants that are compiled, such as columns, rows, stages and warpgroups. It follows from
  geometry, type, layout, GPU and volume, but a layer has only a few for all volumes (planning/repertoire.py).
- `Tiling` (build.py): how the volume is cut into tiles, which are run-time arguments.

The model of model.py compares builds and tilings. This module knows sizes and strides, never tensors. The headers of
halo.cuh and halo_layout.cuh explain the terms; build.py explains line, image and portion.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import chain, product
from math import inf, prod
from typing import Any

from ...planning import offers, tensor_cores
from ...planning.calibration import Work
from ...planning.geometry import Geometry, Triple
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, channels_last_strides, contiguous_strides, volume_kind
from ...planning.repertoire import TYPICAL, Repertoire, nearest
from ...planning.side import Side
from ...runtime import cache, sources
from .build import (
    STEP_BYTES,
    Build,
    ceil_div,
    forget_boxes,
    has_lines,
    round_up,
)
from .job import Job, groups_to_merge, job_of, merged_groups
from .launches import HaloPlan, assemble
from .model import NARROW, best_tiling
from .program import MAX_COLUMNS, MAX_PARTS, Dimension, Split, gather_program, separable, splittable

HAS_EPILOGUE = True
MAX_SUMS = 128  # most accumulators of a consumer thread, unless a build has a limit of its own
PART_COLUMNS = 96  # with more columns, 16-bit parts of lines are stored through images beside one producer warpgroup
BUFFERS = 2  # buffers of images per consumer: one is filled while the other is emptied
LINE_STAGES = (4, 3)  # numbers of stages to try for builds on lines: four are 4% faster on an H200, if they fit
JOINT_STAGES = (4, 3, 2)  # numbers of stages to try for builds on lines that store long runs
MAX_LINE_TILES = 4  # most tiles of output channels in builds on lines: every tile reads the same lines again
MAX_LINE_LOADS = 100  # most unrolled operand loads per step of a march on lines: from 160 on, products are serialized
MAX_LINE_WORDS = 8  # most words of a line that two positions read, each in a register of a lane
LINE_CHANNELS = 32  # most channels in a stage of lines for 16-bit types and long runs: each lane copies one channel
STRICT_SUMS = 72  # most accumulators of a consumer thread in strict float32, which has as many totals
COPIED_SUMS = 152  # most accumulators of a consumer thread beside asynchronous copies, which need few registers
THIRD_SUMS = 96  # most accumulators of a consumer thread if a block has three consumers
STAGED_ROW = 128  # bytes of a row in builds with three stages: shorter rows have more panels to wait for
MARCHING_SUMS = 96  # most accumulators of a consumer thread in strided marches that loop over chunks
COPIED_BYTES = 128  # fewest bytes of a group's channels for which rows of channels are written to be copied
COPIED_LAST_BYTES = 64  # fewest bytes of a group's channels for which channels-last input is copied
MAX_FIELDS = 32  # most fields of all slabs of a consumer: a lane's outputs of a channel fit a mask of 32 bits
SEPARATE_CHANNELS = 32  # fewest output channels for which phases with different taps get their own column tiles
MAX_TAPS = 800  # most taps that a block of the packing kernel holds
MAX_SOURCES = 64  # most phase planes of the output gradient
MOMENT_BYTES = 16  # size of struct Moments<float> in bytes
AS_GOOD = 1.03  # ratio of predicted times up to which two builds count as equally fast
SPREAD = 1.04  # ratio of predicted times: the last tiles are divided only if that saves at least 4%
TORN = 1.01  # factor on the predicted time of builds that write partial sectors, among equally fast builds
HOPELESS = 1.5  # ratio to the best predicted time above which tuning does not measure a build
RINGS = (64 * 1024,)  # bytes of all slots of streamed panels to try
MARCHING_RINGS = (64 * 1024, 128 * 1024)  # bytes of all slots to try for marches with two producer warpgroups
COPIED_RINGS = (64 * 1024, 96 * 1024, 128 * 1024)  # bytes of all slots to try beside asynchronous copies
STAGED_RINGS = (64 * 1024, 80 * 1024, 96 * 1024, 112 * 1024)  # bytes of all slots to try beside three stages
MAX_SLOTS = 8  # most slots of streamed panels
MAX_BESIDE_TWO = 192  # most columns of a matrix instruction if a spread build has two producer warpgroups
SMALL_KINDS = 2  # volumes of a smaller kind may have too few tiles for all multiprocessors, or for both consumers


# ---- the choice ---------------------------------------------------------------------------------------------------


def _splits(geometry: Geometry, march: bool) -> list[Split]:
    """Returns the splits to try: no dimension, depth, depth and height, or all three, as far as they can be split."""
    found: list[Split] = []
    for apart in (splittable, separable) if geometry.out_per_group >= SEPARATE_CHANNELS else (splittable,):
        depth, height, width = (apart(axis) and not march for axis in geometry.axes)
        found += [(False, False, False), (depth, False, False), (depth, height, False), (depth, height, width)]
    return list(dict.fromkeys(found))


def max_columns(strict: bool, copied: bool = False) -> int:
    """Returns the most columns that all slabs of a consumer may have together."""
    return 2 * (STRICT_SUMS if strict else COPIED_SUMS if copied else MAX_SUMS)


def builds(
    geometry: Geometry, dtype: str, shared_bytes: int, gather: bool = False, strict: bool = False, last: bool = False
) -> Iterator[Build]:
    """Yields all builds that the model compares. `last` says whether the tensors are channels-last."""
    yield from _builds(geometry, dtype, shared_bytes, gather, strict, copied=False)
    if gather and takes_lines(geometry, gather, dtype, strict):
        yield from _gathering_lines(geometry, shared_bytes)
    bytes = geometry.in_per_group * (4 if dtype == "float32" else 2)
    if not strict and bytes % 16 == 0 and bytes >= (COPIED_LAST_BYTES if last else COPIED_BYTES):
        for build in _builds(geometry, dtype, shared_bytes, gather, strict, copied=True):
            yield build
            if dtype == "float32" and not build.in_registers:
                yield replace(build, rewritten=True)


def _builds(
    geometry: Geometry, dtype: str, shared_bytes: int, gather: bool, strict: bool, copied: bool
) -> Iterator[Build]:
    item_bytes = 4 if dtype == "float32" else 2
    most = max_columns(strict, copied)
    group_bytes = round_up(geometry.in_per_group * item_bytes, STEP_BYTES)
    out = round_up(geometry.out_per_group, 8)
    axes = geometry.axes
    ways = [(march, split) for march in (False, True) for split in _splits(geometry, march)]
    row_parts = gather_program(axes).parts if gather else 1
    for march, split in ways[:1] if gather else ways:
        counts = [1 if apart or gather else axis.stride for axis, apart in zip(axes, split, strict=True)]
        if march:
            counts[0] = Dimension.marching(axes[0]).fields
        fields = prod(counts)
        if fields * 8 > min(most, MAX_COLUMNS):
            continue
        together = [1]  # possible numbers of small groups in a column tile
        if not march and not any(split):
            together += [
                n
                for n in range(2, geometry.groups + 1)
                if geometry.groups % n == 0 and n * group_bytes * row_parts <= 128 and n * fields * out <= most
            ]
        groups = together[-1]
        if groups > 1:
            rows = [min(r for r in (32, 64, 128) if r >= groups * group_bytes * row_parts)]
        else:
            whole = group_bytes * row_parts
            rows = [r for r in (128, 64, 32) if 32 * row_parts <= r < 2 * whole and (r > 32 or whole == 32)]
        widest = min(min(most, MAX_COLUMNS) // (fields * groups) // 8 * 8, out)
        parts = ceil_div(out, widest)
        for out_tile in dict.fromkeys(round_up(ceil_div(out, n), 8) for n in (parts, 2 * parts)):
            columns = fields * groups * out_tile
            for row_bytes, slabs, stages in product(rows, (1, 2, 3, 4), (2,)):
                if slabs * columns > most or slabs * fields > MAX_FIELDS or (columns < 64 and slabs == 1):
                    continue
                # Beside many accumulators, two producer warpgroups would leave a consumer too few registers.
                producers = 2 if slabs * columns <= (96 if strict else 192) and not copied else 1
                build = Build(
                    geometry, gather, dtype, march, split, groups, out_tile, row_bytes, slabs, 2, producers, stages,
                    True, 1, shared_bytes, strict=strict, copied=copied,
                )  # fmt: skip
                apart = _kept_apart(build)
                if build.stage_rows >= 64 and not build.own_shifts:
                    if not apart:
                        yield build
                        yield from _buffered(build)
                        yield from _in_registers(build)
                    yield from _in_lines(build)
                if not apart and (build.tile_bytes > 0.6 * shared_bytes or build.own_shifts):
                    streaming = replace(build, resident=False)
                    yield from _streaming(streaming)
                    yield from _staged(streaming)


def _kept_apart(build: Build) -> bool:
    """Returns whether the compiler serializes the matrix instructions, which took up to 1.7 times the predicted time.

    It does so in strided marches that loop over chunks, if the window is a multiple of the march's step or if there
    are many accumulators."""
    loop = build.full_chunks > 1 and len(build.program.patterns) > 1
    if not build.march or not loop or build.strict:
        return False
    return build.window % build.march_step == 0 or build.sums > MARCHING_SUMS


def _streaming(build: Build) -> Iterator[Build]:
    """Yields the build with rings of several lengths and, beside asynchronous copies, also with small panels."""
    small = replace(build, fine=True)
    kinds = (build, small) if build.copied and small.slot_bytes < build.slot_bytes else (build,)
    marching = build.march and build.producers == 2
    copied = STAGED_RINGS if build.stages > 2 else COPIED_RINGS
    rings: tuple[int, ...] = copied if build.copied else MARCHING_RINGS if marching else RINGS
    for slots, each in dict.fromkeys(
        (max(2, min(MAX_SLOTS, ring // each.slot_bytes)), each) for each in kinds for ring in rings
    ):
        streaming = replace(each, slots=slots)
        if streaming.stage_rows >= 64:
            yield streaming


def _staged(build: Build) -> Iterator[Build]:
    """Yields the build with a third stage, and also with a third consumer if there are enough registers.

    A third stage helps variants with few taps, which multiply a stage in less time than the next takes to arrive."""
    wide = build.copied and build.item_bytes == 4 and build.row_bytes == STAGED_ROW and build.slabs == 1
    if wide and build.own_shifts:
        for consumers in (2, 3) if build.sums <= THIRD_SUMS else (2,):
            yield from _streaming(replace(build, consumers=consumers, stages=3))


def _divided(build: Build) -> Build | None:
    """Returns the build with two consumers that divide K, each with every other slot, or None if it is impossible."""
    found = replace(build, divided=True, slots=build.slots if build.resident else max(4, build.slots // 2 * 2))
    return found if found.stage_rows >= 64 and not (build.march or build.gather or build.buffers) else None


def _spread(build: Build) -> Iterator[Build]:
    """Yields the build with blocks that divide the last tiles, and also with a second producer warpgroup."""
    spread = replace(build, spread=True)
    yield spread
    # Beside two producer warpgroups, wider instructions lack registers, and several fields spill, which costs 12%.
    narrow = len(build.program.fields) == 1 and build.out_tile <= MAX_BESIDE_TWO
    if build.producers == 1 and not build.copied and build.sums <= MAX_SUMS and narrow:
        for slots in dict.fromkeys((build.slots, 6, 3)):
            loaded = replace(spread, producers=2, slots=slots)
            if loaded.stage_rows >= 64:
                yield loaded


def _buffered(build: Build) -> Iterator[Build]:
    """Yields the build with stores through images, if their buffers fit shared memory."""
    whole = not build.gather and not build.split[2] and build.geometry.stride[2] > 1
    if not whole or build.strict or build.copied:
        return
    # For 16-bit types, one producer warpgroup instead of two is 4 to 7% faster if a consumer has a part of a line,
    # and 9% slower if it has a whole line.
    parts = build.item_bytes == 2 and build.march and build.slabs == 1 and build.columns > PART_COLUMNS
    found = replace(build, buffers=BUFFERS, producers=1 if parts else build.producers)
    if found.stage_rows >= 64:
        yield found


def takes_lines(geometry: Geometry, gather: bool, dtype: str, strict: bool) -> bool:
    """Returns whether there are builds that take input lines as they lie in memory (halo_lines.cuh)."""
    depth, _, width = geometry.axes
    if (dtype != "float32" and gather) or strict or width.stride != 2 or geometry.in_per_group % 8:
        return False
    if not gather:
        return Dimension.whole(width).span + 2 <= MAX_LINE_WORDS
    # No plane of dx may be complete before the first step of the march.
    reach = width.dilation * (width.kernel - 1) + 1 + width.stride
    return reach <= MAX_LINE_WORDS and depth.dilation * (depth.kernel - 1) >= depth.padding


def _in_lines(build: Build) -> Iterator[Build]:
    """Yields the build with input lines as they lie in memory, which one producer warp copies."""
    if build.march and not build.copied and takes_lines(build.geometry, False, build.dtype, build.strict):
        lines = replace(build, lines=True, producers=1)
        whole = build.slabs % lines.woven == 0 and build.part_bytes // build.item_bytes <= LINE_CHANNELS
        if whole or build.dtype == "float32":
            yield from _line_stages(lines)
        if whole:
            yield from _line_stages(replace(lines, joint=True))


def _in_registers(build: Build) -> Iterator[Build]:
    """Yields the build with consumers that round copied float32 input in registers (halo_registers.cuh)."""
    blocks = build.geometry.in_per_group % 16 == 0 and build.row_bytes >= 64
    if build.copied and build.dtype == "float32" and build.march and blocks:
        for stages in LINE_STAGES if build.register_sets else ():
            found = replace(build, stages=stages, in_registers=True)
            if found.stage_rows >= 64:
                yield found


def _gathering_lines(geometry: Geometry, shared_bytes: int) -> Iterator[Build]:
    """Yields builds of an input gradient that marches through lines of dy as they lie in memory."""
    program = gather_program(geometry.axes, march=True)
    fields, out = len(program.fields), round_up(geometry.out_per_group, 8)
    out_tiles = dict.fromkeys(round_up(ceil_div(out, parts), 8) for parts in (1, 2, 3, 4))
    for out_tile, row_bytes, slabs in product(out_tiles, (128, 64), (1, 2)):
        if slabs * out_tile * fields > max_columns(strict=False) or out_tile * fields > MAX_COLUMNS:
            continue
        build = Build(
            geometry, True, "float32", True, (False, False, False), 1, out_tile, row_bytes, slabs, 2, 1, 2, True, 1,
            shared_bytes, lines=True,
        )  # fmt: skip
        yield from _line_stages(build)


def _line_stages(build: Build) -> Iterator[Build]:
    taken = build.line_sets[0] and build.out_tiles <= MAX_LINE_TILES and build.line_loads <= MAX_LINE_LOADS
    for stages in (JOINT_STAGES if build.joint else LINE_STAGES) if taken else ():
        found = replace(build, stages=stages)
        if found.line_words >= 64:
            yield found


@dataclass(frozen=True)
class Nominal:
    """A pass of a layer with the kind of its volume: tuning keeps one build for each."""

    geometry: Geometry
    gather: bool
    dtype: str
    written_last: bool
    kind: int  # kind of the volume by its size (volume_kind)
    strict: bool = False
    lines: bool = False  # whether the kernel can take input lines as they lie in memory

    @classmethod
    def of(cls, job: Job) -> Nominal:
        kind = volume_kind(_positions(job))
        lines = takes_lines(job.geometry, job.gather, job.dtype, job.strict) and has_lines(job)
        return cls(job.geometry, job.gather, job.dtype, job.written_last, kind, job.strict, lines)


def _merged_builds(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    """Yields builds that merge small groups, so that stores of channels-last outputs have more of a position."""
    groups = groups_to_merge(nominal.geometry, 4 if nominal.dtype == "float32" else 2)
    if groups > 1 and nominal.written_last and not (nominal.gather or nominal.strict):
        geometry = merged_groups(nominal.geometry, groups)
        for build in builds(geometry, nominal.dtype, shared_bytes, last=True):
            yield replace(build, merged=groups)


def builds_of(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    last = nominal.written_last
    each = builds(nominal.geometry, nominal.dtype, shared_bytes, nominal.gather, nominal.strict, last)
    for build in chain(each, _merged_builds(nominal, shared_bytes)):
        if nominal.kind < SMALL_KINDS and build.staged:
            continue  # small volumes have too few tiles per block to profit from three stages
        yield build
        if nominal.kind < SMALL_KINDS:
            if build.can_be_portioned:
                yield replace(build, portioned=True)
            if (divided := _divided(build)) is not None:
                yield divided


def spread_builds(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    """Yields the builds whose blocks divide the last tiles."""
    last = nominal.written_last
    for build in builds(nominal.geometry, nominal.dtype, shared_bytes, nominal.gather, nominal.strict, last):
        narrow = build.item_bytes == 2 and build.program.unit * build.out_tile <= NARROW  # slower if spread
        if build.can_be_spread and not narrow:
            yield from _spread(build)


def choose(job: Job, shared_bytes: int, multiprocessors: int) -> Build | None:
    """Returns the build for a job: the fastest measured build if the layer was tuned, else one of its repertoire.

    The repertoire lets most new volumes use a build that is already compiled."""
    nominal = Nominal.of(job)
    build = _build_of(nominal, _tuning(nominal, shared_bytes, multiprocessors))
    if build is not None and best_tiling(build, job, multiprocessors) is not None:
        return build

    def own(job: Job) -> Build | None:
        return _build_of(nominal, _choice(job, shared_bytes, multiprocessors))

    def typical() -> Iterator[Build]:
        volumes = ((_positions(each), each) for each in _typical_jobs(replace(nominal, kind=0)))
        return (build for each in nearest(_positions(job), volumes) if (build := own(each)) is not None)

    return _repertoire.choose(
        (replace(nominal, kind=0, lines=False), shared_bytes, multiprocessors),
        (job.batch, job.read_size, job.written_size),
        lambda: own(job),
        typical,
        lambda build, most: found[0] if (found := best_tiling(build, job, multiprocessors, most)) else inf,
    )


_repertoire = Repertoire[tuple[Nominal, int, int], tuple[int, Triple, Triple], Build]()


def _positions(job: Job) -> int:
    return job.batch * prod(job.positions)


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
        strict=nominal.strict,
    )  # fmt: skip


def _build_of(nominal: Nominal, choice: dict[str, Any]) -> Build | None:
    found = choice["build"]
    if found is None:
        return None
    geometry = merged_groups(nominal.geometry, found["merged"])
    return Build(geometry, nominal.gather, nominal.dtype, **{**found, "split": tuple(found["split"])})


TUNED = ".tuned"  # suffix of measured choices in the disk cache


def tuned(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> str:
    """Returns what was measured if the build was chosen by measurement, else an empty string."""
    return str(_tuning(nominal, shared_bytes, multiprocessors)["tuned"])


def keep(nominal: Nominal, shared_bytes: int, multiprocessors: int, build: Build, tuned: str) -> None:
    """Makes a build the choice for all processes from now on. `tuned` says what was measured."""
    cache.put(_key("tuned", nominal, shared_bytes, multiprocessors), TUNED, _encoded(build, tuned))
    forget()


def forget() -> None:
    """Clears the choices in memory, so that the next choice is read from the disk cache."""
    _tuning.cache_clear()
    _choice.cache_clear()
    _repertoire.forget()


@lru_cache(maxsize=1024)
def _tuning(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> dict[str, Any]:
    """Returns the measured choice of the disk cache, or a choice without a build if there is none."""
    key = _key("tuned", nominal, shared_bytes, multiprocessors)
    choice: dict[str, Any] = json.loads(cache.find(key, TUNED) or _encoded(None))
    return choice


@lru_cache(maxsize=1024)
def _choice(job: Job, shared_bytes: int, multiprocessors: int) -> dict[str, Any]:
    """Returns the choice of the model, which is searched once and then read from the disk cache."""
    key = _key("chosen", job, shared_bytes, multiprocessors)
    search = partial(_search, job, shared_bytes, multiprocessors)
    choice: dict[str, Any] = json.loads(cache.get(key, ".json", lambda: _encoded(search())))
    return choice


def _key(*settings: object) -> str:
    return cache.key("choice", sources.program(__name__), repr(settings))


def _encoded(build: Build | None, tuned: str = "") -> bytes:
    names = [f.name for f in fields(Build) if f.name not in ("geometry", "gather", "dtype")]
    chosen = {name: getattr(build, name) for name in names} if build else None
    return json.dumps({"build": chosen, "tuned": tuned, "planner": sources.program(__name__)}).encode()


def outdated_tunings() -> int:
    """Returns how many measured choices in the disk cache are unused: another version of this planner made them."""
    return sum(json.loads(each)["planner"] != sources.program(__name__) for each in cache.payloads(TUNED))


def _search(job: Job, shared_bytes: int, multiprocessors: int) -> Build | None:
    """Returns the best build by the model."""
    nominal = Nominal.of(job)
    costs = _costs(builds_of(nominal, shared_bytes), job, multiprocessors)
    best = min(costs, key=lambda build: costs[build], default=None)
    divided: dict[Build, float] = {}
    if best is not None and not (best.march and best.item_bytes == 2):  # 16-bit marches are as fast as spread builds
        divided = _costs(spread_builds(nominal, shared_bytes), job, multiprocessors, costs[best] / SPREAD)
    forget_boxes()
    if best is None or divided:
        return min(divided, key=lambda build: divided[build], default=None)
    # Builds within a factor of AS_GOOD of the best are equally fast as far as the model can tell.
    equals = [build for build in costs if costs[build] < AS_GOOD * costs[best] and build.copied == best.copied]
    return min(equals, key=lambda build: (-build.producers, costs[build] * (TORN if _torn(build, job) else 1.0)))


def _torn(build: Build, job: Job) -> bool:
    """Returns whether two column tiles write parts of the same sectors of float32 outputs."""
    return build.torn and build.item_bytes == 4 and not job.written_last


def _costs(found: Iterator[Build], job: Job, multiprocessors: int, most: float = inf) -> dict[Build, float]:
    """Returns the predicted cycles of the builds that may be as fast as the best and take at most `most` cycles."""
    costs: dict[Build, float] = {}
    for build in found:
        tiling = best_tiling(build, job, multiprocessors, min(most, AS_GOOD * min(costs.values(), default=inf)))
        if tiling is not None:
            costs[build] = tiling[0]
    return costs


# ---- the plan -----------------------------------------------------------------------------------------------------


def why_not(problem: Problem, device: Device) -> str | None:
    """Returns why the halo kernel does not take a problem, or None if it does."""
    if device.capability != (9, 0):
        return "the halo kernel is for compute capability 9.0"
    if problem.which not in (Pass.FORWARD, Pass.INPUT_GRAD):
        return "the halo kernel computes the forward pass and the input gradient"
    if problem.dtype == "float64":
        return "the halo kernel has no float64"
    if problem.batch == 0:
        return "there is nothing to compute"
    job = job_of(problem)
    g = job.geometry
    if job.gather and g.phases // (g.stride[2] if g.stride[2] <= MAX_PARTS else 1) > MAX_SOURCES:
        return f"{g.phases} phase planes are too many small products"
    if g.in_per_group < 4 or g.out_per_group < 4 or g.in_per_group * g.out_per_group < 64:
        return "fewer than 4 channels per group, or than 8 x 8, leave tensor cores idle"
    if g.taps > MAX_TAPS:
        return f"{g.taps} taps are more than a block that packs the weight holds"
    found = plan_or_none(job, device)
    if found is None:
        return f"no tile of {g.phases} phases, its halo and what a block packs fit accumulators and shared memory"
    return tensor_cores.why_not_halves(Side.of(problem).mean_terms) if job.strict else None


PASSES = (Pass.FORWARD, Pass.INPUT_GRAD)  # passes that the family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offers.one_by_one(PASSES, "halo", wanted, device, why_not, work, plan)


def work(problem: Problem, device: Device) -> Work:
    """Returns the number of launches and the predicted cycles for a problem."""
    found = plan_or_none(job_of(problem), device)
    assert found is not None, "work() of a problem that why_not() refuses"
    return Work(len(found.launches), found.cycles)


def plan(problem: Problem, device: Device) -> Plan:
    job = job_of(problem)
    found = plan_or_none(job, device)
    if found is None:
        raise ValueError(why_not(problem, device))
    measured = tuned(Nominal.of(job), device.shared_bytes, device.multiprocessors)
    why = "Hopper's tensor cores" + (", three TF32 products" if job.strict else "")
    return plan_of(found, problem, f"{why}{', tuned: ' if measured else ''}{measured}")


def plan_of(found: HaloPlan, problem: Problem, why: str = "") -> Plan:
    launches = list(found.launches)
    if problem.which is Pass.INPUT_GRAD:
        names = {"x": "dy", "bias": "null", "y": "dx"}
        launches = [replace(each, pointers=tuple(names.get(p, p) for p in each.pointers)) for each in launches]
    tile = f"{found.build}; tiles of {found.tiling}"
    regions, end = [], found.packed_bytes
    norm_groups = problem.norm.groups if problem.norm else 0
    for name, size in (
        ("rows", found.rows_bytes),
        ("moments", problem.batch * norm_groups * found.moments * MOMENT_BYTES),
        ("portions", found.portions_bytes),
    ):
        if size:
            regions.append((name, round_up(end, 256)))
            end = round_up(end, 256) + size
    packed = found.packed_bytes if problem.which is Pass.FORWARD else 0  # gradients never reuse a packed weight
    return Plan(
        "halo", why, tuple(launches), end, tile, tuple(regions), packed, found.moments, preparing=found.preparing
    )


def plan_or_none(job: Job, device: Device) -> HaloPlan | None:
    build = choose(job, device.shared_bytes, device.multiprocessors)
    return plan_build(build, job, device) if build else None


def candidates(job: Job, device: Device, most: int) -> list[HaloPlan]:
    """Returns plans for at most `most` builds, those with the least predicted times, each with its best tiling."""
    found = [
        plan
        for build in chain(*(kind(Nominal.of(job), device.shared_bytes) for kind in (builds_of, spread_builds)))
        if (plan := plan_build(build, job, device)) is not None
    ]
    found.sort(key=lambda plan: plan.cycles)
    return [plan for plan in found[:most] if plan.cycles <= HOPELESS * found[0].cycles]


def plan_build(build: Build, job: Job, device: Device) -> HaloPlan | None:
    job = job.as_merged(build.merged)
    found = best_tiling(build, job, device.multiprocessors)
    if found is None or build.pack(job).shared_bytes > device.shared_bytes:
        return None
    return assemble(build, found[1], job, device, found[0])
