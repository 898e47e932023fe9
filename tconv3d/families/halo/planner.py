"""Plans for the halo kernel: forward pass and input gradient on Hopper's tensor cores (halo.cuh explains the
words).

A pass becomes a `Job`, what the kernel reads and writes. Then three decisions, each a pure function:

- `Program` (program.py): which shifts feed which phases, in which order the accumulators' columns stand, and so
  which matrix instructions there are. Follows from the geometry.
- `Build` (build.py): what is compiled: columns, rows, stages, warpgroups. Follows from geometry, type, layout,
  GPU and volume, but is one of a few that the layer has for all volumes (planning/repertoire.py).
- `Tiling` (build.py): how the volume is cut. Run-time arguments.

Builds and tilings are compared by the model of model.py.

Knows sizes and strides, never tensors.
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
MAX_SUMS = 128  # accumulators of a thread
PART_COLUMNS = 96  # of a slab, up to which one producer warpgroup for images of parts of lines was not measured
BUFFERS = 2  # of images, of a consumer: one is filled, one emptied
LINE_STAGES = (4, 3)  # of lines as they are in memory: four are 4% faster (measured), if there is room
JOINT_STAGES = (4, 3, 2)  # the same beside images of long runs
MAX_LINE_TILES = 4  # of output channels, all of which read the same lines: more have not been measured
MAX_LINE_LOADS = 100  # of operands in a step of a march, all unrolled: from 160 on, the compiler keeps products apart
MAX_LINE_WORDS = 8  # of a line that feed two positions: registers of a lane
LINE_CHANNELS = 32  # of a stage: a lane copies the lines of one
STRICT_SUMS = 72  # the same of strict float32: there are as many totals, and loaders need registers too
COPIED_SUMS = 152  # the same where loaders copy past registers, which leaves more of these
THIRD_SUMS = 96  # the same of three consumers
STAGED_ROW = 128  # bytes of the rows of a third stage: with smaller ones there are more panels to wait for (measured)
MARCHING_SUMS = 96  # accumulators of a thread in strided marches that loop over chunks
COPIED_BYTES = 128  # of a group's channels, from which rows of channels are worth a copy
COPIED_LAST_BYTES = 64  # the same where there are rows already
MAX_FIELDS = 32  # of all slabs of a consumer: outputs of a channel that a lane has fit a mask
SEPARATE_CHANNELS = 32  # from which phases of different kernels are worth column tiles of their own
MAX_TAPS = 800  # that a block can pack
MAX_SOURCES = 64  # phase planes of the output gradient
MOMENT_BYTES = 16  # struct Moments<float>
AS_GOOD = 1.03  # times the cost of the best build: as good, as far as the model can tell
SPREAD = 1.04  # times the cost of a build that divides the last tiles: what those that do not must be worse than
TORN = 1.01  # of such equals, the cost of those that write sectors in parts, times others'
HOPELESS = 1.5  # times the cost of the best build: not worth measuring
RINGS = (64 * 1024,)  # bytes of the slots that panels are streamed through
MARCHING_RINGS = (64 * 1024, 128 * 1024)  # the same of marches with two producer warpgroups (others: not measured)
COPIED_RINGS = (64 * 1024, 96 * 1024, 128 * 1024)  # the same where loaders copy past registers
STAGED_RINGS = (64 * 1024, 80 * 1024, 96 * 1024, 112 * 1024)  # the same beside more than two stages
MAX_SLOTS = 8
MAX_BESIDE_TWO = 192  # columns of a matrix instruction, beside two producer warpgroups
SMALL_KINDS = 2  # of volumes that may have too few tiles for all multiprocessors, or for both consumers of a block


# ---- the choice ---------------------------------------------------------------------------------------------------


def _splits(geometry: Geometry, march: bool) -> list[Split]:
    """None, or depth's phases apart, or height's too, or all: of dimensions whose phases are alike, or of all."""
    found: list[Split] = []
    for apart in (splittable, separable) if geometry.out_per_group >= SEPARATE_CHANNELS else (splittable,):
        depth, height, width = (apart(axis) and not march for axis in geometry.axes)
        found += [(False, False, False), (depth, False, False), (depth, height, False), (depth, height, width)]
    return list(dict.fromkeys(found))


def max_columns(strict: bool, copied: bool = False) -> int:
    """Of all slabs of a consumer."""
    return 2 * (STRICT_SUMS if strict else COPIED_SUMS if copied else MAX_SUMS)


def builds(
    geometry: Geometry, dtype: str, shared_bytes: int, gather: bool = False, strict: bool = False, last: bool = False
) -> Iterator[Build]:
    """All builds worth a look. `last`: of channels-last tensors."""
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
        together = [1]  # small groups share a tile, as many as a row and the columns hold
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
                # More producers would leave a consumer too few registers.
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
    """Whether the compiler lets every product wait for the one before ("serialized" in its log): in strided marches
    that loop over chunks, if a window is whole steps or sums are many (all that were compiled). Such builds took up
    to 1.7 times what the model says."""
    loop = build.full_chunks > 1 and len(build.program.patterns) > 1
    if not build.march or not loop or build.strict:
        return False
    return build.window % build.march_step == 0 or build.sums > MARCHING_SUMS


def _streaming(build: Build) -> Iterator[Build]:
    """The same with rings of different lengths, and, where loaders leave room for these, of small panels."""
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
    """The same with a third stage, for variants with so few taps that the rows of a stage arrive later than those of
    the one before have been multiplied; and with a third consumer, where it has registers enough."""
    wide = build.copied and build.item_bytes == 4 and build.row_bytes == STAGED_ROW and build.slabs == 1
    if wide and build.own_shifts:
        for consumers in (2, 3) if build.sums <= THIRD_SUMS else (2,):
            yield from _streaming(replace(build, consumers=consumers, stages=3))


def _divided(build: Build) -> Build | None:
    """The same with consumers that divide K: every one has every other slot."""
    found = replace(build, divided=True, slots=build.slots if build.resident else max(4, build.slots // 2 * 2))
    return found if found.stage_rows >= 64 and not (build.march or build.gather or build.buffers) else None


def _spread(build: Build) -> Iterator[Build]:
    """The same with blocks that divide the last tiles; those with many sums by two producer warpgroups, too."""
    spread = replace(build, spread=True)
    yield spread
    # Wider instructions need a kernel that starts with more registers; several fields spilled (measured: 12% slower).
    narrow = len(build.program.fields) == 1 and build.out_tile <= MAX_BESIDE_TWO
    if build.producers == 1 and not build.copied and build.sums <= MAX_SUMS and narrow:
        for slots in dict.fromkeys((build.slots, 6, 3)):
            loaded = replace(spread, producers=2, slots=slots)
            if loaded.stage_rows >= 64:
                yield loaded


def _buffered(build: Build) -> Iterator[Build]:
    """The same with stores through images, if buffers fit."""
    whole = not build.gather and not build.split[2] and build.geometry.stride[2] > 1
    if not whole or build.strict or build.copied:
        return
    # Where consumers have parts of lines, in 16 bits, four warps that load leave more to them than they lack: 4 to 7%
    # (measured). Where they have whole lines, it lost 9%.
    parts = build.item_bytes == 2 and build.march and build.slabs == 1 and build.columns > PART_COLUMNS
    found = replace(build, buffers=BUFFERS, producers=1 if parts else build.producers)
    if found.stage_rows >= 64:
        yield found


def takes_lines(geometry: Geometry, gather: bool, dtype: str, strict: bool) -> bool:
    """Whether there are builds that take lines of input as they are in memory (halo_lines.cuh)."""
    depth, _, width = geometry.axes
    if (dtype != "float32" and gather) or strict or width.stride != 2 or geometry.in_per_group % 8:
        return False
    if not gather:
        return Dimension.whole(width).span + 2 <= MAX_LINE_WORDS
    # A plane of dx must not be complete before the first step of the march.
    reach = width.dilation * (width.kernel - 1) + 1 + width.stride
    return reach <= MAX_LINE_WORDS and depth.dilation * (depth.kernel - 1) >= depth.padding


def _in_lines(build: Build) -> Iterator[Build]:
    """The same with lines of input as they are in memory, which need no loaders."""
    if build.march and not build.copied and takes_lines(build.geometry, False, build.dtype, build.strict):
        lines = replace(build, lines=True, producers=1)
        whole = build.slabs % lines.woven == 0 and build.part_bytes // build.item_bytes <= LINE_CHANNELS
        if whole or build.dtype == "float32":
            yield from _line_stages(lines)
        if whole:
            yield from _line_stages(replace(lines, joint=True))


def _in_registers(build: Build) -> Iterator[Build]:
    """The same with floats that consumers round, whose copies wait for nobody."""
    blocks = build.geometry.in_per_group % 16 == 0 and build.row_bytes >= 64
    if build.copied and build.dtype == "float32" and build.march and blocks:
        for stages in LINE_STAGES if build.register_sets else ():
            found = replace(build, stages=stages, in_registers=True)
            if found.stage_rows >= 64:
                yield found


def _gathering_lines(geometry: Geometry, shared_bytes: int) -> Iterator[Build]:
    """An input gradient that marches through lines of the output gradient as they are in memory."""
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
    """What a build is chosen for: a pass of a layer, and the kind of its volume."""

    geometry: Geometry
    gather: bool
    dtype: str
    written_last: bool
    kind: int  # of volume, by its size
    strict: bool = False
    lines: bool = False  # whether they may be taken as they are in memory

    @classmethod
    def of(cls, job: Job) -> Nominal:
        kind = volume_kind(_positions(job))
        lines = takes_lines(job.geometry, job.gather, job.dtype, job.strict) and has_lines(job)
        return cls(job.geometry, job.gather, job.dtype, job.written_last, kind, job.strict, lines)


def _merged_builds(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    """Those that take small groups as one, of channels-last results: stores have more of a position."""
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
            continue  # these have few tiles for each block
        yield build
        if nominal.kind < SMALL_KINDS:
            if build.can_be_portioned:
                yield replace(build, portioned=True)
            if (divided := _divided(build)) is not None:
                yield divided


def spread_builds(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    """Those whose blocks divide the last tiles."""
    last = nominal.written_last
    for build in builds(nominal.geometry, nominal.dtype, shared_bytes, nominal.gather, nominal.strict, last):
        narrow = build.item_bytes == 2 and build.program.unit * build.out_tile <= NARROW  # these lost (measured)
        if build.can_be_spread and not narrow:
            yield from _spread(build)


def choose(job: Job, shared_bytes: int, multiprocessors: int) -> Build | None:
    """The build for a job: the one that was measured to be best, if its layer was tuned. Otherwise one of the layer's
    repertoire: a new volume does not recompile."""
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
    """A layer's passes over typical volumes."""
    found = []
    for batch, edge in TYPICAL:
        for width in (edge, 2 * edge, edge + 1):  # whole pieces of 16 bytes, or not
            job = _typical_job(nominal, batch, (edge, edge, width))
            if job is not None and replace(Nominal.of(job), kind=nominal.kind) == nominal:
                found.append(job)
                break
    return tuple(found)


def _typical_job(nominal: Nominal, batch: int, size: Triple) -> Job | None:
    """A pass of a layer over a volume of this size: of what is read, or, of what gathers, written."""
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


TUNED = ".tuned"  # the suffix of measured choices in the disk cache


def tuned(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> str:
    """What was measured, where the build was chosen by measurement; else nothing."""
    return str(_tuning(nominal, shared_bytes, multiprocessors)["tuned"])


def keep(nominal: Nominal, shared_bytes: int, multiprocessors: int, build: Build, tuned: str) -> None:
    """Makes a build the choice from now on, in all processes. `tuned` says what was measured."""
    cache.put(_key("tuned", nominal, shared_bytes, multiprocessors), TUNED, _encoded(build, tuned))
    forget()


def forget() -> None:
    """The next choice comes out of the disk cache."""
    _tuning.cache_clear()
    _choice.cache_clear()
    _repertoire.forget()


@lru_cache(maxsize=1024)
def _tuning(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> dict[str, Any]:
    """What a tuner left in the disk cache, if one did."""
    key = _key("tuned", nominal, shared_bytes, multiprocessors)
    choice: dict[str, Any] = json.loads(cache.find(key, TUNED) or _encoded(None))
    return choice


@lru_cache(maxsize=1024)
def _choice(job: Job, shared_bytes: int, multiprocessors: int) -> dict[str, Any]:
    """Searched once, then kept in the disk cache."""
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
    """How many measured choices in the disk cache another version of this planner made: they are not used."""
    return sum(json.loads(each)["planner"] != sources.program(__name__) for each in cache.payloads(TUNED))


def _search(job: Job, shared_bytes: int, multiprocessors: int) -> Build | None:
    """The best build by the model."""
    nominal = Nominal.of(job)
    costs = _costs(builds_of(nominal, shared_bytes), job, multiprocessors)
    best = min(costs, key=lambda build: costs[build], default=None)
    divided: dict[Build, float] = {}
    if best is not None and not (best.march and best.item_bytes == 2):  # no better than marches in 16 bits (measured)
        divided = _costs(spread_builds(nominal, shared_bytes), job, multiprocessors, costs[best] / SPREAD)
    forget_boxes()
    if best is None or divided:
        return min(divided, key=lambda build: divided[build], default=None)
    # Those that the model cannot tell apart from the best.
    equals = [build for build in costs if costs[build] < AS_GOOD * costs[best] and build.copied == best.copied]
    return min(equals, key=lambda build: (-build.producers, costs[build] * (TORN if _torn(build, job) else 1.0)))


def _torn(build: Build, job: Job) -> bool:
    """Whether two column tiles write the same sectors of floats."""
    return build.torn and build.item_bytes == 4 and not job.written_last


def _costs(found: Iterator[Build], job: Job, multiprocessors: int, most: float = inf) -> dict[Build, float]:
    """Of the builds that may be as good as the best, and take at most so many cycles."""
    costs: dict[Build, float] = {}
    for build in found:
        tiling = best_tiling(build, job, multiprocessors, min(most, AS_GOOD * min(costs.values(), default=inf)))
        if tiling is not None:
            costs[build] = tiling[0]
    return costs


# ---- the plan -----------------------------------------------------------------------------------------------------


def why_not(problem: Problem, device: Device) -> str | None:
    """Why the halo kernel does not take a problem, or nothing."""
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


PASSES = (Pass.FORWARD, Pass.INPUT_GRAD)  # that the family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offers.one_by_one(PASSES, "halo", wanted, device, why_not, work, plan)


def work(problem: Problem, device: Device) -> Work:
    """What its launches do, by the model."""
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
    packed = found.packed_bytes if problem.which is Pass.FORWARD else 0  # gradients' are never kept
    return Plan(
        "halo", why, tuple(launches), end, tile, tuple(regions), packed, found.moments, preparing=found.preparing
    )


def plan_or_none(job: Job, device: Device) -> HaloPlan | None:
    build = choose(job, device.shared_bytes, device.multiprocessors)
    return plan_build(build, job, device) if build else None


def candidates(job: Job, device: Device, most: int) -> list[HaloPlan]:
    """The builds that the model likes best for a job, with their best tiling."""
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
