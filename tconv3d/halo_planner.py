"""Plans for the halo kernel: forward pass and input gradient on Hopper's tensor cores (kernels/halo.cuh explains the
words).

A pass becomes a `Job`, what the kernel reads and writes. Then three decisions, each a pure function:

- `Program`: which shifts feed which phases, in which order the accumulators' columns stand, and so which matrix
  instructions there are. Follows from the geometry.
- `Build`: what is compiled: columns, rows, stages, warpgroups. Follows from geometry, type, layout, GPU and
  whether the volume is small, medium or large, so that a new volume of the kind does not recompile.
- `Tiling`: how the volume is cut. Run-time arguments.

Knows sizes and strides, never tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from itertools import permutations, product
from math import gcd, prod
from pathlib import Path
from typing import Any

from tconv3d import cache
from tconv3d import geometry as geometry_module
from tconv3d.direct_planner import INT32_MAX, SCALARS
from tconv3d.geometry import Axis, Geometry, Triple
from tconv3d.launch import Constants, Launch
from tconv3d.packing import divider, int32s, int64s, padded
from tconv3d.problem import Device, Norm, Pass, Plan, Problem, Strides

HAS_EPILOGUE = True
SLAB = 64  # positions of one matrix instruction
MAX_COLUMNS = 256  # of one matrix instruction, and of a slab's accumulators
STEP_BYTES = 32  # of K that one matrix instruction takes
RESERVED_BYTES = 1024 + 8 * 1152  # for barriers, and for the scratch of eight consumer warps
LOADER_BYTES = 5120  # reserved for positions that round up to whole batches of all loaders
PACKING_BYTES = 48 * 1024  # of shared memory, for a block that packs: so that several share a multiprocessor
REGISTERS = 65536  # of a multiprocessor
CONSUMER_REGISTERS = 80  # at least, beside the accumulators
PRODUCER_REGISTERS = 72  # what loaders have use for; consumers get the rest
MAX_SUMS = 128  # accumulators of a thread
MAX_PARTS = 4  # phases along w that lie side by side in a row
MAX_TAPS = 800  # that a block can pack
MAX_SOURCES = 64  # phase planes of the output gradient
MOMENT_BYTES = 16  # struct Moments<float>
STORED_BY_PARTNER = -2
WITHOUT_PARTNER = -1
HOPELESS = 2.0  # times the cost of the best build: not looked at for other volumes
KINDS = (8192, 300_000)  # positions in all from which a volume is of the next kind: a layer has a build for each
VOLUMES = (  # batch, depth, height and width: what the kinds stand for
    ((2, 4, 4), (2, 8, 8), (4, 8, 16)),
    ((8, 16, 16), (2, 32, 32), (4, 32, 32)),
    ((16, 32, 32), (4, 64, 64), (4, 96, 96)),
)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


# ---- the job ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A pass as the kernel sees it: what it reads (x or dy) and writes (y or dx).

    `geometry` has the read channels as its input channels, and the written ones as its output channels. `gather`: a
    position gathers from all phase planes of what is read, instead of feeding all phases of what is written.
    """

    geometry: Geometry
    gather: bool
    batch: int
    dtype: str
    read_size: Triple
    written_size: Triple
    read: Strides
    written: Strides
    weight: Strides  # read channel, written channel, taps
    weight_group: int  # from one group's weights to the next one's
    weight_tap: int = 0  # where tap (0, 0, 0) lies: at the end, where taps are taken in reverse
    bias: bool = False
    aligned: bool = True
    activation: str = "tconv3d::Identity"  # of what is written
    norm: Norm | None = None  # moments of what is written are left for it

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def written_last(self) -> bool:
        """Whether what is written is contiguous along channels, not along w."""
        return self.written[1] == 1 and self.written[4] != 1

    @property
    def read_last(self) -> bool:
        return self.read[1] == 1 and self.read[4] != 1

    @cached_property
    def positions(self) -> Triple:
        if self.gather:
            return self.written_size
        sizes = zip(self.geometry.axes, self.written_size, strict=True)
        return tuple(axis.positions(size) for axis, size in sizes)


def job_of(problem: Problem) -> Job:
    g, p = problem.geometry, problem
    if p.which is Pass.FORWARD:
        return Job(
            g, False, p.batch, p.dtype, p.input_size, p.output_size, p.input, p.output, p.weight,
            g.in_per_group * p.weight[0], 0, p.bias, p.aligned, p.activation, p.norm,
        )  # fmt: skip
    ci, co, *taps = p.weight
    swapped = Geometry(g.out_channels, g.in_channels, g.groups, g.axes)
    gather = Job(
        swapped, True, p.batch, p.dtype, p.output_size, p.input_size, p.output, p.input, (co, ci, *taps),
        g.in_per_group * ci, 0, False, p.aligned,
    )  # fmt: skip
    axes = mirrored_axes(g)
    if axes is None:
        return gather
    last = sum((kernel - 1) * stride for kernel, stride in zip(g.kernel, taps, strict=True))
    return replace(
        gather,
        geometry=replace(swapped, axes=axes),
        gather=False,
        weight=(co, ci, *(-stride for stride in taps)),
        weight_tap=last,
    )


def mirrored_axes(geometry: Geometry) -> tuple[Axis, Axis, Axis] | None:
    """Of the forward pass that an input gradient of stride 1 is, taps reversed; None if there is no such pass."""
    d, h, w = (
        replace(axis, padding=axis.dilation * (axis.kernel - 1) - axis.padding, output_padding=-axis.output_padding)
        for axis in geometry.axes
    )
    if geometry.phases > 1 or min(axis.padding for axis in (d, h, w)) < 0:
        return None
    return d, h, w


# ---- the program --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feed:
    """One tap of one dimension: input position q + offset feeds output `field` of position q.

    When gathering, a position has one output, and `field` is the part of the row that is read.
    """

    offset: int
    field: int
    tap: int


@dataclass(frozen=True)
class Dimension:
    """One dimension as one column tile sees it: all phases of it, or the only one that the tile computes."""

    feeds: tuple[Feed, ...]
    fields: int  # outputs per position
    offset: int  # of field 0 from output stride*q

    @classmethod
    def whole(cls, axis: Axis) -> Dimension:
        feeds = tuple(Feed(-axis.shift(t), axis.phase(t), t) for t in range(axis.kernel))
        return cls(feeds, axis.stride, 0)

    @classmethod
    def phase(cls, axis: Axis, phase: int) -> Dimension:
        return cls(tuple(Feed(-axis.shift(t), 0, t) for t in axis.taps(phase)), 1, phase)

    @classmethod
    def marching(cls, axis: Axis) -> Dimension:
        """Depth when blocks walk along it: plane i feeds outputs i*stride - padding + tap*dilation."""
        feeds = tuple(Feed(0, t * axis.dilation, t) for t in range(axis.kernel))
        return cls(feeds, max(axis.dilation * (axis.kernel - 1) + 1, axis.stride), 0)

    @classmethod
    def gathering(cls, axis: Axis, phases: Iterable[int]) -> Dimension:
        """The taps that read certain phases of dy; each phase is a part."""
        feeds = tuple(Feed(axis.shift(t), part, t) for part, phase in enumerate(phases) for t in axis.taps(phase))
        return cls(feeds, 1, 0)

    @property
    def origin(self) -> int:
        return min((feed.offset for feed in self.feeds), default=0)

    @property
    def span(self) -> int:
        """How many more inputs than positions a line of the halo has."""
        return max((feed.offset for feed in self.feeds), default=0) - self.origin

    @property
    def shape(self) -> list[tuple[int, int]]:
        """What two dimensions must share for the same instructions to serve both."""
        return [(feed.offset - self.origin, feed.field) for feed in self.feeds]


Dimensions = tuple[Dimension, Dimension, Dimension]
Split = tuple[bool, bool, bool]  # which dimensions' phases are computed by column tiles of their own


def splittable(axis: Axis) -> bool:
    """Whether the phases differ only in where they read and write."""
    shapes = [sorted(Dimension.phase(axis, phase).shape) for phase in range(axis.stride)]
    return axis.stride > 1 and all(shape == shapes[0] for shape in shapes)


def instruction_cycles(columns: int) -> float:
    """Of one matrix instruction with both operands in shared memory, of 32 bytes of K: measured (docs)."""
    return max(columns / 2, 16 + columns / 4)


@dataclass(frozen=True)
class Program:
    """The matrix instructions of one chunk of channels, for any width of a field.

    The compiler keeps matrix instructions apart (and waits between them) whose accumulators overlap in part, so the
    columns are divided into units once and for all, and an instruction computes one unit: with zero weights for those
    of its fields that the shift does not feed.
    """

    sources: tuple[Dimensions, ...]
    fields: tuple[Triple, ...]  # in the order of the columns: output offsets
    unit: int  # fields of one instruction
    patterns: tuple[tuple[int, ...], ...]  # the units that the shifts of a pattern feed
    shifts: tuple[tuple[Triple, ...], ...]  # of each source and pattern: displacements of the halo, and the part
    taps: tuple[tuple[Triple | None, ...], ...]  # of each shift: of every field of the units it feeds
    phases: tuple[Triple, ...] = ((0, 0, 0),)  # of each source: which elements of the tensor it has
    read_step: Triple = (1, 1, 1)  # from one of them to the next
    used_parts: int = 1

    @classmethod
    def make(cls, dimensions: Dimensions, fields: tuple[Triple, ...], unit: int) -> Program:
        place = {field: i for i, field in enumerate(fields)}
        fed: dict[Triple, dict[int, Triple]] = {}
        origin_d, origin_h, origin_w = (dimension.origin for dimension in dimensions)
        for d, h, w in product(*(dimension.feeds for dimension in dimensions)):
            shift = (d.offset - origin_d, h.offset - origin_h, w.offset - origin_w)
            fed.setdefault(shift, {})[place[d.field, h.field, w.field]] = (d.tap, h.tap, w.tap)
        by_pattern: dict[tuple[int, ...], list[tuple[Triple, tuple[Triple | None, ...]]]] = {}
        for displacement in sorted(fed):
            taps = fed[displacement]
            units = tuple(sorted({field // unit for field in taps}))
            panel = tuple(taps.get(u * unit + i) for u in units for i in range(unit))
            by_pattern.setdefault(units, []).append((displacement, panel))
        return cls(
            (dimensions,),
            fields,
            unit,
            tuple(by_pattern),
            tuple(tuple((*shift, 0) for shift, _ in shifts) for shifts in by_pattern.values()),
            tuple(taps for shifts in by_pattern.values() for _, taps in shifts),
        )

    @classmethod
    def gathering(cls, axes: tuple[Axis, Axis, Axis]) -> Program:
        """Of the input gradient: a source for every phase plane along d and h (and w, if a row cannot hold those)."""
        beside = axes[2].stride <= MAX_PARTS
        choices: list[list[Triple]] = [
            [(phase,) for phase in range(axis.stride) if axis.taps(phase)] for axis in axes
        ]
        if beside:
            choices[2] = [tuple(range(axes[2].stride))]
        sources, phases, shifts, taps = [], [], [], []
        for d_phases, h_phases, w_phases in product(*choices):
            d = Dimension.gathering(axes[0], d_phases)
            h = Dimension.gathering(axes[1], h_phases)
            w = Dimension.gathering(axes[2], w_phases)
            own = sorted(
                ((a.offset - d.origin, b.offset - h.origin, c.offset - w.origin, c.field), (a.tap, b.tap, c.tap))
                for a, b, c in product(d.feeds, h.feeds, w.feeds)
            )
            sources.append((d, h, w))
            phases.append((d_phases[0], h_phases[0], w_phases[0]))
            shifts.append(tuple(shift for shift, _ in own))
            taps += [(tap,) for _, tap in own]
        return cls(
            tuple(sources),
            ((0, 0, 0),),
            1,
            ((0,),),
            tuple(shifts),
            tuple(taps),
            tuple(phases),
            tuple(axis.stride for axis in axes),
            axes[2].stride if beside else 1,
        )

    @property
    def dimensions(self) -> Dimensions:
        return self.sources[0]

    @cached_property
    def span(self) -> Triple:
        """How much larger than a tile its halo is."""
        return tuple(max(source[axis].span for source in self.sources) for axis in range(3))

    @property
    def parts(self) -> int:
        """Into which a row is divided: a power of two."""
        return 1 << (self.used_parts - 1).bit_length()

    @cached_property
    def chunk_fields(self) -> int:
        """Fields of all panels of a chunk."""
        return sum(len(taps) for taps in self.taps)

    @property
    def panel_fields(self) -> int:
        """Of the largest panel."""
        return max((len(units) for units in self.patterns), default=0) * self.unit

    def cycles(self, width: int) -> float:
        """Of one slab and one step of 32 bytes."""
        units = [len(self.patterns[i % len(self.patterns)]) for i in range(len(self.shifts))]
        instructions = sum(len(shifts) * count for shifts, count in zip(self.shifts, units, strict=True))
        return instructions * instruction_cycles(self.unit * width)


def _field_orders(counts: Triple, march: bool) -> Iterator[tuple[Triple, ...]]:
    """Orders of the phases worth trying: nested loops."""
    for order in permutations(range(3)):
        if march and order[0] != 0:
            continue  # a march moves the planes of its window
        fields = []
        for phases in product(*(range(counts[axis]) for axis in order)):
            by_axis = dict(zip(order, phases, strict=True))
            fields.append((by_axis[0], by_axis[1], by_axis[2]))
        yield tuple(fields)


@lru_cache(maxsize=256)
def gather_program(axes: tuple[Axis, Axis, Axis]) -> Program:
    return Program.gathering(axes)


@lru_cache(maxsize=256)
def programs(axes: tuple[Axis, Axis, Axis], march: bool, split: Split, width: int) -> tuple[Program, ...]:
    """One program for each combination of the split dimensions' phases: the same but for origins, offsets and taps.

    Order and division of the columns are those with the cheapest instructions.
    """
    choices = [
        [Dimension.phase(axis, phase) for phase in range(axis.stride)] if apart else [Dimension.whole(axis)]
        for axis, apart in zip(axes, split, strict=True)
    ]
    if march:
        choices[0] = [Dimension.marching(axes[0])]
    variants = [(d, h, w) for d, h, w in product(*choices)]
    d, h, w = variants[0]
    orders = dict.fromkeys(_field_orders((d.fields, h.fields, w.fields), march))
    count = d.fields * h.fields * w.fields
    units = [unit for unit in range(1, count + 1) if count % unit == 0 and unit * width <= MAX_COLUMNS]
    candidates = [Program.make(variants[0], fields, unit) for fields, unit in product(orders, units)]
    best = min(candidates, key=lambda candidate: (candidate.cycles(width), len(candidate.patterns)))
    return tuple(Program.make(dimensions, best.fields, best.unit) for dimensions in variants)


# ---- the build ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Build:
    """What one compilation of the kernel is for."""

    geometry: Geometry
    gather: bool
    dtype: str
    march: bool
    split: Split
    groups_per_tile: int
    out_tile: int
    row_bytes: int
    slabs: int  # per consumer
    consumers: int
    producers: int
    stages: int
    resident: bool
    slots: int
    shared_bytes: int

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Of the variants."""
        if self.gather:
            return (gather_program(self.geometry.axes),)
        return programs(self.geometry.axes, self.march, self.split, self.out_tile)

    @property
    def program(self) -> Program:
        return self.programs[0]

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def step_items(self) -> int:
        return STEP_BYTES // self.item_bytes

    @property
    def group_slots(self) -> int:
        """Channels of a group in a row, with those that fill up its last step."""
        return round_up(self.geometry.in_per_group, self.step_items)

    @cached_property
    def channel_slots(self) -> int:
        return self.groups_per_tile * self.group_slots if self.groups_per_tile > 1 else self.geometry.in_per_group

    @property
    def part_bytes(self) -> int:
        return self.row_bytes // self.program.parts

    @cached_property
    def chunks(self) -> int:
        return ceil_div(self.channel_slots * self.item_bytes, self.part_bytes)

    @property
    def stages_filled(self) -> int:
        """For one tile (for one plane, when marching)."""
        return self.chunks * len(self.program.sources)

    @cached_property
    def steps(self) -> int:
        """Of all chunks."""
        return ceil_div(self.channel_slots, self.step_items)

    @cached_property
    def columns(self) -> int:
        return self.groups_per_tile * len(self.program.fields) * self.out_tile

    @cached_property
    def out_tiles(self) -> int:
        return ceil_div(self.geometry.out_per_group, self.out_tile)

    @cached_property
    def column_tiles(self) -> int:
        return self.geometry.groups // self.groups_per_tile * self.out_tiles * len(self.programs)

    @property
    def chunk_bytes(self) -> int:
        """Panels of one chunk of every source."""
        return self.program.chunk_fields * self.out_tile * self.part_bytes

    @cached_property
    def tile_bytes(self) -> int:
        """All panels of one column tile."""
        return self.chunks * self.chunk_bytes

    @cached_property
    def slot_bytes(self) -> int:
        return round_up(self.program.panel_fields * self.out_tile * self.part_bytes, 1024)

    @cached_property
    def panel_bytes(self) -> int:
        return self.tile_bytes if self.resident else self.slots * self.slot_bytes

    @property
    def round_slabs(self) -> int:
        """That the consumers compute at a time."""
        return self.slabs * self.consumers

    @cached_property
    def stage_rows(self) -> int:
        """As many as fit, with 8 bytes of every position that a loader's lane has."""
        left = self.shared_bytes - RESERVED_BYTES - LOADER_BYTES - self.panel_bytes
        per_stage = left // (self.stages * self.row_bytes + 8 * self.shares) * self.row_bytes
        return max(0, per_stage // 1024 * 1024 // self.row_bytes)

    @property
    def shares(self) -> int:
        """Batches of a loader for all channels of a chunk: it has 16 items of a position in flight."""
        in_flight = max(1, 16 * self.item_bytes // 16 // self.program.parts)
        return max(1, self.part_bytes // 16 // in_flight)

    @property
    def sums(self) -> int:
        """Accumulators of a consumer's thread."""
        return self.slabs * self.columns // 2

    @property
    def threads(self) -> int:
        return 128 * (self.producers + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer's and of a consumer's thread, together what the kernel starts with."""
        start = REGISTERS // self.threads // 8 * 8
        total = start * self.threads // 128
        needed = round_up(self.sums + CONSUMER_REGISTERS, 8)
        spare = (total - PRODUCER_REGISTERS * self.producers) // self.consumers // 8 * 8
        consumer = min(max(needed, spare), 232)
        left = total - self.consumers * consumer
        return min(left // self.producers // 8 * 8, start), max(consumer, start)

    @cached_property
    def cycles_per_slab(self) -> float:
        """Of the tensor cores, for all of K (of one plane, when marching)."""
        return self.program.cycles(self.out_tile) * self.steps

    @cached_property
    def max_passes(self) -> int:
        """Passes keep the stages of all chunks, so there must be room for them, and for loading ahead."""
        return 1 if self.march or self.stages <= self.stages_filled else 8

    def __str__(self) -> str:
        way = "gathering" if self.gather else "marching along depth" if self.march else "phases together"
        panels = "weights resident" if self.resident else "weights streamed"
        return (
            f"{way}, {self.columns} columns x {self.consumers} x {self.slabs} slabs of {SLAB} positions, "
            f"{self.stages} stages, {self.producers} producer warpgroup{'s' if self.producers > 1 else ''}, {panels}"
        )

    def constants(self, job: Job) -> Constants:
        g, p = self.geometry, self.program
        d, h, w = p.dimensions
        origins = p.sources if self.gather else [v.dimensions for v in self.programs]
        written_step = (1, 1, 1) if self.gather else g.stride
        producer, consumer = self.registers
        return (
            ("kThreads", self.threads),
            ("kMinBlocks", 1),
            ("Scalar", SCALARS[self.dtype]),
            ("Epilogue", f"tconv3d::LeavingMoments<{job.activation}>" if job.norm else job.activation),
            ("kMomentBand", moment_band(self, job)),
            ("kWide", _wide(job)),
            ("kBias", job.bias),
            ("kUnitC", job.read_last),
            ("kVectorInput", _vector_input(job)),
            ("kVectorParts", _vector_parts(job, p.used_parts)),
            ("kOutputUnitC", job.written_last),
            ("kProducers", self.producers),
            ("kConsumers", self.consumers),
            ("kProducerRegisters", producer),
            ("kConsumerRegisters", consumer),
            ("kStages", self.stages),
            ("kStageRows", self.stage_rows),
            ("kResident", self.resident),
            ("kSlots", self.slots),
            ("kSlotBytes", self.slot_bytes),
            ("kSharedBytes", self.shared_bytes),
            ("kSlabs", self.slabs),
            *self.layout_constants,
            ("kField", p.fields),
            ("kPartner", _partners(p.fields, job.written[4] == 1)),
            ("kStoredByPartner", STORED_BY_PARTNER),
            ("kShift", tuple(shift for shifts in p.shifts for shift in shifts)),
            ("kStrideD", written_step[0]),
            ("kStrideH", written_step[1]),
            ("kStrideW", written_step[2]),
            ("kUsedParts", p.used_parts),
            ("kReadStepD", p.read_step[0]),
            ("kReadStepH", p.read_step[1]),
            ("kReadStepW", p.read_step[2]),
            ("kReadPhase", p.phases),
            ("kOrigin", tuple(tuple(d.origin for d in dimensions) for dimensions in origins)),
            ("kOffset", tuple(tuple(d.offset for d in v.dimensions) for v in self.programs)),
            ("kMarch", self.march),
            ("kPaddingD", g.axes[0].padding),
            ("kWindow", d.fields),
            ("kSheetFields", h.fields * w.fields),
        )

    def aligned(self, job: Job, tiling: Tiling) -> bool:
        """Whether rows of outputs, and of tiles, begin and end at multiples of 16 bytes, and a warp's are neighbours.

        On shorter lines, or where phases are not neighbours, stores of single elements are faster (measured).
        """
        stride = 1 if self.gather else self.geometry.stride[2]
        if job.written[4] != 1 or self.split[2] or stride > 2 or tiling.items > 1:
            return False
        in_sequence = tiling.group_rows == 8 and tiling.tile[2] % 16 == 0 and tiling.halo[2] % 16 == 0
        rows = (*job.written[:4], job.written_size[2])
        vector = 16 // self.item_bytes
        return in_sequence and (stride == 2 or self.item_bytes == 2) and not any(row % vector for row in rows)

    @property
    def layout_constants(self) -> Constants:
        """What the halo kernel and the packing kernel share."""
        g, p = self.geometry, self.program
        return (
            ("kGroups", g.groups),
            ("kIn", g.in_per_group),
            ("kOut", g.out_per_group),
            ("kGroupsPerTile", self.groups_per_tile),
            ("kGroupSlots", self.group_slots),
            ("kOutTile", self.out_tile),
            ("kOutTiles", self.out_tiles),
            ("kVariants", len(self.programs)),
            ("kRowBytes", self.row_bytes),
            ("kParts", p.parts),
            ("kSources", len(p.sources)),
            ("kFields", len(p.fields)),
            ("kPatterns", len(p.patterns)),
            ("kUnitFields", p.unit),
            ("kPatternUnit", _running(len(units) for units in p.patterns)),
            ("kShiftRange", _running(len(shifts) for shifts in p.shifts)),
            ("kUnit", tuple(unit for units in p.patterns for unit in units)),
        )

    def pack(self, job: Job) -> Launch:
        g, p = self.geometry, self.program
        _, kernel_h, kernel_w = g.kernel
        table = tuple(
            tuple(-1 if tap is None else (tap[0] * kernel_h + tap[1]) * kernel_w + tap[2] for tap in taps)
            + (-1,) * (p.panel_fields - len(taps))
            for variant in self.programs
            for taps in variant.taps
        )
        per_column = 4 * g.taps * (self.part_bytes // self.item_bytes + 1)
        columns = next((n for n in (8, 4, 2) if n * per_column <= PACKING_BYTES), 1)
        threads = 256
        return Launch(
            kernel="pack",
            constants=(
                ("kThreads", threads),
                ("kMinBlocks", 1),
                ("Scalar", SCALARS[self.dtype]),
                *((f"kKernel{name}", size) for name, size in zip("DHW", g.kernel, strict=True)),
                ("kColumnsAtOnce", columns),
                ("kSharedBytes", columns * per_column),
                *self.layout_constants,
                ("kTap", table),
            ),
            grid=(self.column_tiles // len(self.programs) * self.chunks * (self.out_tile // columns), 1, 1),
            threads=threads,
            shared_bytes=columns * per_column,
            pointers=("weight", "workspace"),
            scalars=int64s(*job.weight, job.weight_group, job.weight_tap),
        )


def moment_band(build: Build, job: Job) -> int:
    """Neighbouring output channels whose moments are kept together: of one norm group and one tile."""
    if job.norm is None:
        return 1
    band = gcd(job.geometry.out_channels // job.norm.groups, build.geometry.out_per_group, build.out_tile)
    return band if band % 8 == 0 else band & -band


def _running(counts: Iterable[int]) -> tuple[int, ...]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return tuple(sums)


def _partners(fields: tuple[Triple, ...], neighbours: bool) -> tuple[int, ...]:
    """For each field the one that holds the next output along w, where two are stored together."""
    place = {field: i for i, field in enumerate(fields)}
    partners = [WITHOUT_PARTNER] * len(fields)
    for (d, h, w), i in place.items():
        second = place.get((d, h, w + 1))
        if neighbours and w % 2 == 0 and second is not None:
            partners[i], partners[second] = second, STORED_BY_PARTNER
    return tuple(partners)


def _wide(job: Job) -> bool:
    """Whether an offset inside one channel's volume, or to the next channel, may leave 32 bits."""
    axes = job.geometry.axes
    reach = [
        size + 2 * axis.kernel * axis.dilation + axis.padding + 64 * axis.stride
        for size, axis in zip(job.read_size, axes, strict=True)
    ]
    last = [size + 64 * axis.stride for size, axis in zip(job.written_size, axes, strict=True)]
    x = sum(size * stride for size, stride in zip(reach, job.read[2:], strict=True))
    y = sum(size * stride for size, stride in zip(last, job.written[2:], strict=True))
    return max(x, y, job.read[1]) > INT32_MAX


def _vector_input(job: Job) -> bool:
    """Whether 16 bytes of neighbouring channels can be loaded at once."""
    items = 16 // job.item_bytes
    n, c, *rest = job.read
    return c == 1 and job.aligned and not any(v % items for v in (job.geometry.in_per_group, n, *rest))


def _vector_parts(job: Job, parts: int) -> bool:
    """Whether the parts of a position can be loaded at once: all of them are inside, or none."""
    *outer, w = job.read
    even = not any(v % parts for v in (*outer, job.read_size[2]))
    return parts in (2, 4) and w == 1 and job.aligned and even


# ---- the tiling ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiling:
    """How a volume is cut into tiles, and a tile's positions into slabs."""

    tile: Triple  # positions; marching: of depth that a block walks over
    halo: Triple
    items: int  # batch items per tile
    tiles: tuple[int, int, int, int]  # batch, d, h, w
    slabs: int
    slabs_w: int
    slabs_h: int
    group_rows: int
    slab_step: Triple
    run: int

    @property
    def rows(self) -> int:
        return prod(self.halo) * self.items

    @property
    def count(self) -> int:
        return prod(self.tiles)

    def __str__(self) -> str:
        return "x".join(map(str, self.tile)) + (f" of {self.items} batch items" if self.items > 1 else "")


def _slab_layouts(tile: Triple, halo: Triple, items: int) -> Iterator[tuple[int, int, int, int, Triple, int]]:
    """Ways to cut a tile into slabs: slabs, slabs_w, slabs_h, group_rows, slab_step, run."""
    depth, height, width = tile
    _, halo_h, halo_w = halo
    line, sheet = halo_w * items, halo_h * halo_w * items
    everything = INT32_MAX
    if width * items % 8 == 0:
        across = width * items // 8
        if height % 8 == 0 or depth == 1:  # 8 rows on 8 lines
            down = ceil_div(height, 8)
            yield depth * down * across, across, down, line, (sheet, 8 * line, 8), everything
        if depth % 8 == 0 and sheet < 2**14:  # 8 rows on 8 sheets
            yield depth // 8 * height * across, across, height, sheet, (8 * sheet, line, 8), everything
    run = width * items  # 64 rows in sequence: of a line, of a sheet, of everything
    yield depth * height * ceil_div(run, SLAB), ceil_div(run, SLAB), height, 8, (sheet, line, SLAB), run
    run = (height - 1) * line + width * items
    yield depth * ceil_div(run, SLAB), ceil_div(run, SLAB), 1, 8, (sheet, 0, SLAB), run
    run = (depth - 1) * sheet + (height - 1) * line + width * items
    yield ceil_div(run, SLAB), ceil_div(run, SLAB), 1, 8, (0, 0, SLAB), run


def _extents(size: int, fixed: Iterable[int]) -> list[int]:
    """Candidates for a tile's extent along a dimension of `size` positions."""
    even = {ceil_div(size, parts) for parts in range(1, 9)}
    return sorted(even | {value for value in fixed if value < size + 7})


def tilings(build: Build, batch: int, positions: Triple) -> Iterator[Tiling]:
    """All tilings of the volume that fit the build's stages."""
    span_d, span_h, span_w = build.program.span
    per_round = build.round_slabs
    small = prod(positions) < 512
    items_options = [i for i in (1, 2, 4, 8, 16, 32, 64) if i == 1 or (small and i < 2 * batch)]
    depths = [1] if build.march else _extents(positions[0], (1, 2, 3, 4, 6, 8))
    segments = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= positions[0]] if build.march else [1]
    limit = per_round * SLAB * build.max_passes
    least = min(SLAB * per_round // 2, prod(positions) * batch // 256)  # smaller tiles are all overhead
    for items, depth, height, width in product(
        items_options,
        depths,
        _extents(positions[1], (1, 2, 4, 8, 16, 24, 32)),
        _extents(positions[2], (8, 16, 24, 32)),
    ):
        volume = depth * height * width * items
        if volume > limit or (volume < least and (depth, height, width) != positions):
            continue
        halo = (1 if build.march else depth + span_d, height + span_h, width + span_w)
        if prod(halo) * items > build.stage_rows:
            continue
        across = (ceil_div(positions[1], height), ceil_div(positions[2], width))
        line, sheet = halo[2] * items, halo[1] * halo[2] * items
        displacement = (0 if build.march else span_d) * sheet + span_h * line + span_w * items
        best: Tiling | None = None
        for slabs, slabs_w, slabs_h, group_rows, step, run in _slab_layouts((depth, height, width), halo, items):
            sheets = ceil_div(slabs, slabs_w * slabs_h)
            last = (sheets - 1) * step[0] + (slabs_h - 1) * step[1] + (slabs_w - 1) * step[2] + 7 * group_rows + 7
            if slabs > per_round * build.max_passes or last + displacement >= build.stage_rows:
                continue
            if best is None or slabs < best.slabs:
                tiles = (ceil_div(batch, items), ceil_div(positions[0], depth), *across)
                best = Tiling(
                    (depth, height, width), halo, items, tiles, slabs, slabs_w, slabs_h, group_rows, step, run
                )
        if best is None:
            continue
        for parts in segments:
            if build.march:  # a block walks over a part of the depth
                deep = ceil_div(positions[0], parts)
                tiles = (ceil_div(batch, items), ceil_div(positions[0], deep), *across)
                best = replace(best, tile=(deep, height, width), tiles=tiles)
            yield best


# ---- the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """The model's constants, in cycles of a multiprocessor unless said otherwise.

    Fitted by benchmarks/halo_fit.py to measured builds of reference layers on an H200 (TF32 and bfloat16).
    """

    start: float = 11100.0  # of a launch
    tile: float = 1590.0  # of a tile: what nothing hides
    batch: float = 1360.0  # of a loader warp, per batch of loads
    stage: float = 176.0  # of filling a stage: barriers
    load: float = 3.46  # of a load by a warp, whoever issues it
    sector: float = 1.63  # of a sector that it touches
    product: float = 0.94  # of a cycle that tensor cores should take
    panel: float = 110.0  # of a panel: barriers, and the drain of the tensor cores
    streamed: float = 160.0  # the same, of a panel out of the ring
    slot: float = 980.0  # from a slot's release to its next panel's arrival
    store: float = 5.7  # of a store by a warp
    cache_bytes: float = 38.0  # per cycle, from L2
    memory_bytes: float = 1615.0  # per cycle, of the whole device memory
    run: float = 0.04  # of the device memory, per run of outputs whose ends share sectors with other tiles
    torn: float = 1.0  # bytes of traffic per byte of an output whose neighbours come from another column tile
    overlap: float = 3.7  # exponent of the norm that joins what overlaps: 1 is a sum, infinity the maximum


COSTS = Costs()


def _load_cycles(build: Build, tiling: Tiling, job: Job, planes: int, costs: Costs) -> float:
    """Of the loaders, for one tile: either warps wait for their batches, or the multiprocessor for its loads."""
    warps = 4 * build.producers - (0 if build.resident else 1)
    groups = ceil_div(tiling.rows, 32)
    pieces = build.row_bytes // 16
    reads = build.program.used_parts * len(build.program.sources)
    if job.read_last:  # contiguous along channels: loads of 16 bytes
        batches = ceil_div(groups * pieces, 4 * warps)
        loads = groups * build.channel_slots * reads * build.item_bytes / 16
        sectors = loads * 16
    else:
        batches = ceil_div(groups * build.shares, warps)
        loads = groups * build.channel_slots * reads
        lines = 32 / (tiling.halo[2] if tiling.items == 1 else tiling.items) + (tiling.items == 1)
        sectors = loads * (build.item_bytes + 0.9 * lines)
    waiting = build.stages_filled * (batches * costs.batch + costs.stage)
    return planes * max(waiting, loads * costs.load + sectors * costs.sector)


def _store_cycles(build: Build, tiling: Tiling, job: Job, rounds: int, planes: int, costs: Costs) -> float:
    """Of the consumers' stores, for one tile."""
    outputs = float(rounds * build.round_slabs * SLAB * build.columns * planes)
    if build.march:
        outputs = outputs * build.geometry.axes[0].stride / build.program.dimensions[0].fields
    at_once = 2 if job.written_last else 16 // build.item_bytes if build.aligned(job, tiling) else 1
    return outputs / 32 / at_once**0.5 * costs.store


def _memory_cycles(build: Build, tiling: Tiling, job: Job, costs: Costs) -> float:
    """Of the device memory, for everything."""
    g, item = build.geometry, build.item_bytes
    last = job.written_last
    width = job.written_size[2]
    inputs = job.batch * g.in_channels * prod(job.read_size) * item
    lines = job.batch * g.out_channels * job.written_size[0] * job.written_size[1]
    outputs = lines * width * item
    if last:  # runs of channels
        shared = 0.0 if build.out_tile * item % 32 == 0 else lines * width / build.out_tile
        return (outputs + inputs) / costs.memory_bytes + shared * costs.run
    torn = build.split[2] and g.axes[2].stride > 1
    stride_h, stride_w = (1, 1) if build.gather else g.stride[1:]
    tile = tiling.tile[2] * stride_w
    aligned = width * item % 32 == 0 and (tile >= width or tile * item % 32 == 0)
    if tile < width:
        runs = float(lines * ceil_div(width, tile))
    else:
        runs = lines / (1 if build.split[1] else tiling.tile[1] * stride_h)
    traffic = outputs * (costs.torn if torn else 1.0) + inputs
    return traffic / costs.memory_bytes + (0.0 if aligned else runs * costs.run)


def cycles(build: Build, tiling: Tiling, job: Job, multiprocessors: int, costs: Costs = COSTS) -> float:
    """The model: how long the busiest multiprocessor takes, or the memory for all of them."""
    rounds = ceil_div(tiling.slabs, build.round_slabs)
    planes = 1
    if build.march:  # the window's first planes are computed by two blocks
        overlap = ceil_div(build.program.dimensions[0].fields, build.geometry.axes[0].stride) - 1
        planes = min(job.read_size[0], tiling.tile[0] + overlap)
    panels = len(build.program.taps) * build.chunks * rounds * planes
    multiply = rounds * build.round_slabs * build.cycles_per_slab * planes * costs.product
    if not build.resident:
        multiply = max(multiply, panels * costs.slot / (build.slots - 1))
    multiply += panels * (costs.panel if build.resident else costs.streamed)
    store = _store_cycles(build, tiling, job, rounds, planes, costs)
    load = _load_cycles(build, tiling, job, planes, costs)
    streamed = 0 if build.resident else build.tile_bytes * rounds * planes
    reads = build.program.used_parts * len(build.program.sources)
    elements = tiling.rows * build.channel_slots * reads * planes
    cache = (elements * build.item_bytes + streamed) / costs.cache_bytes
    units = tiling.count * build.column_tiles
    blocks = min(units, multiprocessors)
    if build.resident:
        blocks = max(blocks // build.column_tiles, 1) * build.column_tiles
    p = costs.overlap
    tile = (load**p + (multiply + store) ** p + cache**p) ** (1 / p)
    work = ceil_div(units, blocks) * (tile + costs.tile)
    work += build.tile_bytes / costs.cache_bytes if build.resident else 0.0
    memory = _memory_cycles(build, tiling, job, costs)
    return (work**p + memory**p) ** (1 / p) + costs.start


def best_tiling(build: Build, job: Job, multiprocessors: int) -> tuple[float, Tiling] | None:
    best: tuple[float, Tiling] | None = None
    for tiling in tilings(build, job.batch, job.positions):
        if job.norm and build.march and tiling.items > 1:
            continue  # a march adds up the moments of one batch item
        cost = cycles(build, tiling, job, multiprocessors)
        if best is None or cost < best[0]:
            best = cost, tiling
    return best


def _splits(axes: tuple[Axis, Axis, Axis], march: bool) -> list[Split]:
    """None, or depth's phases apart, or height's too, or all."""
    depth, height, width = (splittable(axis) and not march for axis in axes)
    splits = [(False, False, False), (depth, False, False), (depth, height, False), (depth, height, width)]
    return list(dict.fromkeys(splits))


def builds(geometry: Geometry, dtype: str, shared_bytes: int, gather: bool = False) -> Iterator[Build]:
    """All builds worth a look."""
    item_bytes = 4 if dtype == "float32" else 2
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
        if fields * 8 > MAX_COLUMNS:
            continue
        together = [1]  # small groups share a tile, as many as a row and the columns hold
        if not march and not any(split):
            together += [
                n
                for n in range(2, geometry.groups + 1)
                if geometry.groups % n == 0 and n * group_bytes * row_parts <= 128 and n * fields * out <= MAX_COLUMNS
            ]
        groups = together[-1]
        if groups > 1:
            rows = [min(r for r in (32, 64, 128) if r >= groups * group_bytes * row_parts)]
        else:
            whole = group_bytes * row_parts
            rows = [r for r in (128, 64, 32) if 32 * row_parts <= r < 2 * whole and (r > 32 or whole == 32)]
        widest = min(MAX_COLUMNS // (fields * groups) // 8 * 8, out)
        parts = ceil_div(out, widest)
        for out_tile in dict.fromkeys(round_up(ceil_div(out, n), 8) for n in (parts, 2 * parts)):
            columns = fields * groups * out_tile
            for row_bytes, slabs, stages in product(rows, (1, 2, 3, 4), (2, 3)):
                if slabs * columns > 2 * MAX_SUMS or (columns < 64 and slabs == 1):
                    continue
                producers = 2 if slabs * columns <= 192 else 1  # more would leave a consumer too few registers
                build = Build(
                    geometry, gather, dtype, march, split, groups, out_tile, row_bytes, slabs, 2, producers, stages,
                    True, 1, shared_bytes,
                )  # fmt: skip
                if build.tile_bytes > 0.6 * shared_bytes:
                    build = replace(build, resident=False)
                    build = replace(build, slots=max(2, min(8, 64 * 1024 // build.slot_bytes)))
                if build.stage_rows >= 64:
                    yield build


@dataclass(frozen=True)
class Nominal:
    """What a build is chosen for: a pass of a layer, and the kind of its volume."""

    geometry: Geometry
    gather: bool
    dtype: str
    written_last: bool
    kind: int  # of volume: small, medium or large

    @classmethod
    def of(cls, job: Job) -> Nominal:
        kind = sum(job.batch * prod(job.positions) >= size for size in KINDS)
        return cls(job.geometry, job.gather, job.dtype, job.written_last, kind)

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
        return Job(g, self.gather, batch, self.dtype, read, written, inputs, outputs, (1, 1, 1, 1, 1), 1)


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
    return b"".join(Path(module).read_bytes() for module in (__file__, geometry_module.__file__) if module)


def _search(nominal: Nominal, shared_bytes: int, multiprocessors: int) -> Build | None:
    """The build that is least slower than the best of each volume, on the average of several."""
    slower = dict.fromkeys(builds(nominal.geometry, nominal.dtype, shared_bytes, nominal.gather), 0.0)
    for job in nominal.jobs:
        found = {build: best_tiling(build, job, multiprocessors) for build in slower}
        costs = {build: tiling[0] for build, tiling in found.items() if tiling}
        least = min(costs.values(), default=0.0)
        slower = {build: slower[build] + cost / least for build, cost in costs.items() if cost < HOPELESS * least}
    return min(slower, key=lambda build: slower[build], default=None)


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
    if problem.dtype == "float64" or (problem.dtype == "float32" and not problem.tf32):
        return "tensor cores have no full float32 and the halo kernel no float64"
    if problem.batch == 0:
        return "there is nothing to compute"
    job = job_of(problem)
    g = job.geometry
    if not job.gather and g.phases * 8 > MAX_COLUMNS:
        return f"{g.phases} phases are more than a tile's columns hold"
    if job.gather and g.phases // (g.stride[2] if g.stride[2] <= MAX_PARTS else 1) > MAX_SOURCES:
        return f"{g.phases} phase planes are too many small products"
    if g.in_per_group < 4 or g.out_per_group < 4 or g.in_per_group * g.out_per_group < 64:
        return "fewer than 4 channels per group, or than 8 x 8, leave tensor cores idle"
    if g.taps > MAX_TAPS:
        return f"{g.taps} taps are more than a block that packs the weight holds"
    if job.gather and g.groups > 1 and g.in_per_group < 16 and job.dtype == "float32":
        return "input gradients of small float32 groups are faster without tensor cores (measured)"
    if plan_or_none(job, device) is None:
        return "the halo of one tile does not fit shared memory"
    return None


def plan(problem: Problem, device: Device) -> Plan:
    """Packs the weight, every time: a weight may be changed through `.data`, which leaves no trace to go by."""
    job = job_of(problem)
    found = plan_or_none(job, device)
    if found is None:
        raise ValueError(why_not(problem, device))
    measured = tuned(Nominal.of(job), device.shared_bytes, device.multiprocessors)
    return plan_of(found, problem, f"Hopper's tensor cores{', tuned: ' if measured else ''}{measured}")


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
        for build in builds(job.geometry, job.dtype, device.shared_bytes, job.gather)
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
    return assemble(build, found[1], job, device, found[0]) if found else None


def assemble(build: Build, tiling: Tiling, job: Job, device: Device, cost: float = 0.0) -> HaloPlan:
    """The launches of a build and a tiling."""
    work = tiling.count * build.column_tiles
    blocks = min(work, device.multiprocessors)
    if build.resident:  # a block keeps the panels of one column tile
        blocks = max(blocks // build.column_tiles, 1) * build.column_tiles
    depth = tiling.tile[0] * (build.geometry.axes[0].stride if build.march else 1)  # marching: outputs
    _, tiles_d, tiles_h, tiles_w = tiling.tiles
    packed_bytes = build.column_tiles * build.tile_bytes
    slots = _moment_slots(build, tiling)
    scalars = padded(
        int64s(*job.read, *job.written),
        int32s(*job.read_size, *job.written_size, job.batch),
        int32s(depth, *tiling.tile[1:], *tiling.halo, tiling.items, tiling.rows, tiling.slabs, tiling.group_rows),
        int32s(tiling.run, *tiling.slab_step, ceil_div(tiling.slabs, build.round_slabs), work),
        int32s(build.aligned(job, tiling)),
        *(divider(n) for n in (tiling.slabs_w, tiling.slabs_h, tiles_w, tiles_h, tiles_d)),
        *(divider(n) for n in (tiling.halo[2], tiling.halo[1], tiling.halo[0], tiling.items)),
    ) + int64s(slots)
    main = Launch(
        kernel="halo",
        constants=build.constants(job),
        grid=(blocks, 1, 1),
        threads=build.threads,
        shared_bytes=build.shared_bytes,
        pointers=("x", "workspace", "bias", "y", "moments" if job.norm else "null"),
        scalars=scalars,
    )
    bands = build.geometry.out_channels // moment_band(build, job)
    moments = slots * bands // job.norm.groups if job.norm else 0
    return HaloPlan(build, tiling, build.pack(job), packed_bytes, main, cost, moments)


def _moment_slots(build: Build, tiling: Tiling) -> int:
    """Moments that all tiles leave of a band of channels: every consumer warp once in each pass."""
    passes = ceil_div(tiling.slabs, build.slabs * build.consumers)
    return prod(tiling.tiles[1:]) * len(build.programs) * passes * 4 * build.consumers
