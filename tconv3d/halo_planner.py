"""Plans for the halo kernel: forward pass and input gradient on Hopper's tensor cores (kernels/halo.cuh explains the
words).

A pass becomes a `Job`, what the kernel reads and writes. Then three decisions, each a pure function:

- `Program` (halo_program.py): which shifts feed which phases, in which order the accumulators' columns stand, and so
  which matrix instructions there are. Follows from the geometry.
- `Build` (halo_build.py): what is compiled: columns, rows, stages, warpgroups. Follows from geometry, type, layout,
  GPU and which of four kinds the volume is of, by its size, so that a new volume of the kind does not recompile.
- `Tiling` (halo_build.py): how the volume is cut. Run-time arguments.

Builds and tilings are compared by the model of halo_model.py.

Knows sizes and strides, never tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from . import cache, direct_planner
from .geometry import Axis, Geometry, Triple
from .halo_build import STEP_BYTES, Build, Tiling, ceil_div, moment_band, round_up
from .halo_job import Job, job_of
from .halo_model import best_tiling
from .halo_program import MAX_PARTS, Dimension, Split, gather_program, splittable
from .launch import Launch
from .packing import divider, int32s, int64s, padded
from .problem import Device, Pass, Plan, Problem

HAS_EPILOGUE = True
MAX_SUMS = 128  # accumulators of a thread
STRICT_TERMS = 48  # of a sum from which three TF32 products have at most the error of multiply-adds (measured)
STRICT_SUMS = 72  # the same of strict float32: there are as many totals, and loaders need registers too
MAX_TAPS = 800  # that a block can pack
MAX_SOURCES = 64  # phase planes of the output gradient
MOMENT_BYTES = 16  # struct Moments<float>
HOPELESS = 1.5  # times the cost of the best build: not looked at for other volumes
KINDS = (
    1024,
    8192,
    300_000,
)  # positions in all from which a volume is of the next kind: a layer has a build for each
VOLUMES = (  # batch, depth, height and width: what the kinds stand for
    ((1, 4, 4), (2, 4, 4), (8, 4, 4)),
    ((2, 8, 8), (32, 4, 4), (4, 8, 8)),
    ((32, 8, 8), (2, 4, 32), (8, 16, 16), (2, 32, 32), (4, 32, 32)),
    ((16, 32, 32), (4, 64, 64), (4, 96, 96)),
)


# ---- the choice ---------------------------------------------------------------------------------------------------


def _splits(axes: tuple[Axis, Axis, Axis], march: bool) -> list[Split]:
    """None, or depth's phases apart, or height's too, or all."""
    depth, height, width = (splittable(axis) and not march for axis in axes)
    splits = [(False, False, False), (depth, False, False), (depth, height, False), (depth, height, width)]
    return list(dict.fromkeys(splits))


def max_columns(strict: bool) -> int:
    """Of all slabs of a consumer."""
    return 2 * (STRICT_SUMS if strict else MAX_SUMS)


def builds(
    geometry: Geometry, dtype: str, shared_bytes: int, gather: bool = False, strict: bool = False
) -> Iterator[Build]:
    """All builds worth a look."""
    item_bytes = 4 if dtype == "float32" else 2
    most = max_columns(strict)
    group_bytes = round_up(geometry.in_per_group * item_bytes, STEP_BYTES)
    out = round_up(geometry.out_per_group, 8)
    axes = geometry.axes
    ways = [(march, split) for march in (False, True) for split in _splits(axes, march)]
    row_parts = gather_program(axes).parts if gather else 1
    for march, split in ways[:1] if gather else ways:
        counts = [1 if apart or gather else axis.stride for axis, apart in zip(axes, split, strict=True)]
        if march:
            counts[0] = Dimension.marching(axes[0]).fields
        fields = prod(counts)
        if fields * 8 > most:
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
        widest = min(most // (fields * groups) // 8 * 8, out)
        parts = ceil_div(out, widest)
        for out_tile in dict.fromkeys(round_up(ceil_div(out, n), 8) for n in (parts, 2 * parts)):
            columns = fields * groups * out_tile
            for row_bytes, slabs, stages in product(rows, (1, 2, 3, 4), (2,)):
                if slabs * columns > most or (columns < 64 and slabs == 1):
                    continue
                # More producers would leave a consumer too few registers.
                producers = 2 if slabs * columns <= (96 if strict else 192) else 1
                build = Build(
                    geometry, gather, dtype, march, split, groups, out_tile, row_bytes, slabs, 2, producers, stages,
                    True, 1, shared_bytes, strict=strict,
                )  # fmt: skip
                if build.stage_rows >= 64:
                    yield build
                if build.tile_bytes > 0.6 * shared_bytes:
                    build = replace(build, resident=False)
                    build = replace(build, slots=max(2, min(8, 64 * 1024 // build.slot_bytes)))
                    if build.stage_rows >= 64:
                        yield build
                        yield replace(build, paired=True)


@dataclass(frozen=True)
class Nominal:
    """What a build is chosen for: a pass of a layer, and the kind of its volume."""

    geometry: Geometry
    gather: bool
    dtype: str
    written_last: bool
    kind: int  # of volume, by its size
    strict: bool = False

    @classmethod
    def of(cls, job: Job) -> Nominal:
        kind = sum(job.batch * prod(job.positions) >= size for size in KINDS)
        return cls(job.geometry, job.gather, job.dtype, job.written_last, kind, job.strict)

    @property
    def jobs(self) -> list[Job]:
        """Volumes of the kind, as far as the layer has outputs for them."""
        volumes = VOLUMES[self.kind]
        return [job for batch, depth, width in volumes if (job := self.job(batch, (depth, width, width)))]

    def job(self, batch: int, size: Triple) -> Job | None:
        g = self.geometry
        output = g.output_size(size)
        if min(output) < 1:
            return None
        read, written = (output, size) if self.gather else (size, output)
        # Other strides do not matter to the model, but for whether rows are aligned: as if they were contiguous.
        inputs, outputs = (
            (c * d * h * w, 1, h * w * c, w * c, c) if self.written_last else (c * d * h * w, d * h * w, h * w, w, 1)
            for c, (d, h, w) in ((g.in_channels, read), (g.out_channels, written))
        )
        weight = (1, 1, 1, 1, 1)
        return Job(
            g, self.gather, batch, self.dtype, read, written, inputs, outputs, weight, 1, strict=self.strict
        )  # fmt: skip


def _builds_of(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    return builds(nominal.geometry, nominal.dtype, shared_bytes, nominal.gather, nominal.strict)


@lru_cache(maxsize=1024)
def choose(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> Build | None:
    """The best build: by the model, or by measurement if the layer was tuned."""
    found = _choice(nominal, shared_bytes, multiprocessors)["build"]
    if found is None:
        return None
    return Build(nominal.geometry, nominal.gather, nominal.dtype, **{**found, "split": tuple(found["split"])})


def tuned(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> str:
    """What was measured, where the build was chosen by measurement; else nothing."""
    return str(_choice(nominal, shared_bytes, multiprocessors)["tuned"])


def keep(nominal: Nominal, shared_bytes: int, multiprocessors: int, build: Build, tuned: str) -> None:
    """Makes a build the choice from now on, in all processes. `tuned` says what was measured."""
    cache.put(_choice_key(nominal, shared_bytes, multiprocessors), ".json", _encoded(build, tuned))
    forget()


def forget() -> None:
    """The next choice comes out of the disk cache."""
    _choice.cache_clear()
    choose.cache_clear()


@lru_cache(maxsize=1024)
def _choice(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> dict[str, Any]:
    """Searched once, then kept in the disk cache."""
    key = _choice_key(nominal, shared_bytes, multiprocessors)
    search = partial(_search, nominal, shared_bytes, multiprocessors)
    choice: dict[str, Any] = json.loads(cache.get(key, ".json", lambda: _encoded(search())))
    return choice


def _choice_key(*settings: object) -> str:
    return cache.key("halo", _sources(), repr(settings))


def _encoded(build: Build | None, tuned: str = "") -> bytes:
    names = [f.name for f in fields(Build) if f.name not in ("geometry", "gather", "dtype")]
    chosen = {name: getattr(build, name) for name in names} if build else None
    return json.dumps({"build": chosen, "tuned": tuned}).encode()


@lru_cache(maxsize=1)
def _sources() -> bytes:
    """What a choice depends on beside its arguments: the programs that make it."""
    here = Path(__file__).parent
    return b"".join(path.read_bytes() for path in (here / "geometry.py", *sorted(here.glob("halo_*.py"))))


def _search(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> Build | None:
    """The build that is least slower than the best of each volume, on the average of several."""
    everything = _builds_of(nominal, shared_bytes)
    slower = _slowness([build for build in everything if not build.paired], nominal, multiprocessors)
    best = sorted(slower, key=lambda build: slower[build])[:3]
    pairs = [replace(build, paired=True) for build in best if not build.resident]  # whether to pair is asked last
    slower = _slowness([*best, *pairs], nominal, multiprocessors)
    least = min(slower.values(), default=0.0)
    equals = [build for build in slower if slower[build] < AS_GOOD * least]  # the model cannot tell them apart
    return min(equals, key=lambda build: (-build.producers, build.slabs, slower[build]), default=None)


def _slowness(found: list[Build], nominal: Nominal, multiprocessors: int) -> dict[Build, float]:
    """Of each build, how much slower it is than the best of them, added up over volumes of the kind."""
    slower = dict.fromkeys(found, 0.0)
    for job in nominal.jobs:
        tilings = {build: best_tiling(build, job, multiprocessors) for build in slower}
        costs = {build: tiling[0] for build, tiling in tilings.items() if tiling}
        least = min(costs.values(), default=0.0)
        slower = {build: slower[build] + cost / least for build, cost in costs.items() if cost < HOPELESS * least}
    return slower


# ---- the plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HaloPlan:
    """How the halo kernel solves a problem. `pack` writes `packed_bytes`, once for every version of the weight."""

    build: Build
    tiling: Tiling
    pack: Launch
    packed_bytes: int
    main: Launch
    cycles: float  # of the model
    moments: int = 0  # that the kernel leaves of each norm group of a batch item


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
    if job.gather and g.groups > 1 and g.in_per_group < 16 and job.dtype == "float32":
        return "input gradients of small float32 groups are faster without tensor cores (measured)"
    found = plan_or_none(job, device)
    if found is None:
        return f"no tile of {g.phases} phases, its halo and what a block packs fit accumulators and shared memory"
    return _why_not_strict(problem, found, device) if job.strict else None


def _why_not_strict(problem: Problem, found: HaloPlan, device: Device) -> str | None:
    """Why strict float32 is computed by multiply-adds, not by three TF32 products; or nothing."""
    terms = direct_planner.Side.of(problem).terms
    if terms < STRICT_TERMS:
        return f"the error of three TF32 products is above that of multiply-adds in sums of {terms} terms"
    if direct_planner.cycles(problem, device) < found.cycles:
        return "multiply-adds are predicted to be faster than three TF32 products"
    return None


def plan(problem: Problem, device: Device) -> Plan:
    """Packs the weight, every time: a weight may be changed through `.data`, which leaves no trace to go by."""
    job = job_of(problem)
    found = plan_or_none(job, device)
    if found is None:
        raise ValueError(why_not(problem, device))
    measured = tuned(Nominal.of(job), device.shared_bytes, device.multiprocessors)
    why = "Hopper's tensor cores" + (", three TF32 products" if job.strict else "")
    return plan_of(found, problem, f"{why}{', tuned: ' if measured else ''}{measured}")


def plan_of(found: HaloPlan, problem: Problem, why: str = "") -> Plan:
    main = found.main
    if problem.which is Pass.INPUT_GRAD:
        main = replace(main, pointers=("dy", "workspace", "null", "dx", "null"))
    tile = f"{found.build}; tiles of {found.tiling}"
    plan = Plan("halo", why, (found.pack, main), found.packed_bytes, tile)
    if problem.norm is None:
        return plan
    start = round_up(found.packed_bytes, 256)
    size = problem.batch * problem.norm.groups * found.moments * MOMENT_BYTES
    return replace(plan, workspace_bytes=start + size, moments=found.moments, regions=(("moments", start),))


def plan_or_none(job: Job, device: Device) -> HaloPlan | None:
    build = choose(Nominal.of(job), device.shared_bytes, device.multiprocessors)
    return plan_build(build, job, device) if build else None


def candidates(job: Job, device: Device, most: int) -> list[HaloPlan]:
    """The builds that the model likes best for a job and that fit all volumes of its kind, with their best tiling."""
    nominal = Nominal.of(job)
    found = [
        plan
        for build in _builds_of(nominal, device.shared_bytes)
        if (plan := plan_build(build, job, device)) is not None
    ]
    found.sort(key=lambda plan: plan.cycles)
    chosen: list[HaloPlan] = []
    for plan in found:
        if len(chosen) == most or plan.cycles > HOPELESS * found[0].cycles:
            break
        if all(best_tiling(plan.build, other, device.multiprocessors) for other in nominal.jobs):
            chosen.append(plan)
    return chosen


def plan_build(build: Build, job: Job, device: Device) -> HaloPlan | None:
    found = best_tiling(build, job, device.multiprocessors)
    if found is None or build.pack(job).shared_bytes > device.shared_bytes:
        return None
    return assemble(build, found[1], job, device, found[0])


def assemble(build: Build, tiling: Tiling, job: Job, device: Device, cost: float = 0.0) -> HaloPlan:
    """The launches of a build and a tiling."""
    work, blocks = tiling.work(build), tiling.blocks(build, device.multiprocessors)
    depth = tiling.tile[0] * (build.geometry.axes[0].stride if build.march else 1)  # marching: outputs
    _, tiles_d, tiles_h, tiles_w = tiling.tiles
    packed_bytes = build.column_tiles * build.tile_bytes
    slots = _moment_slots(build, tiling)
    vectors = build.vectors(job, tiling)
    scalars = padded(
        int64s(*job.read, *job.written),
        int32s(*job.read_size, *job.written_size, job.batch),
        int32s(depth, *tiling.tile[1:], *tiling.halo, tiling.items, tiling.near_bits, tiling.rows, tiling.slabs),
        int32s(tiling.sheets, 0 if tiling.length else tiling.tile[1], tiling.length, tiling.group_rows),
        int32s(tiling.run, *tiling.slab_step, ceil_div(tiling.slabs, build.round_slabs), work),
        int32s(build.half_bytes(tiling), build.vector(job, tiling), vectors * tiling.lines),
        *(divider(n) for n in (tiling.slabs_w, tiling.slabs_h, tiles_w, tiles_h, tiles_d)),
        *(divider(n) for n in (tiling.halo[2], tiling.halo[1], tiling.halo[0], tiling.items, vectors)),
        divider(tiling.side_by_side(build)),
    ) + int64s(slots)
    main = Launch(
        kernel="halo",
        constants=build.constants(job),
        grid=(blocks, 1, 1),
        threads=build.threads,
        shared_bytes=build.used_bytes(job, tiling),
        pointers=("x", "workspace", "bias", "y", "moments" if job.norm else "null"),
        scalars=scalars,
        overlaps=True,
    )
    bands = build.geometry.out_channels // moment_band(build, job)
    moments = slots * bands // job.norm.groups if job.norm else 0
    return HaloPlan(build, tiling, build.pack(job), packed_bytes, main, cost, moments)


def _moment_slots(build: Build, tiling: Tiling) -> int:
    """Moments that all tiles leave of a band of channels: every consumer warp once in each pass."""
    passes = ceil_div(tiling.slabs, build.slabs * build.consumers)
    return prod(tiling.tiles[1:]) * len(build.programs) * passes * 4 * build.consumers
