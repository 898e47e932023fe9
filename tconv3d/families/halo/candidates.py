"""Yields the builds of the halo kernel that the model compares for a layer.

Its limits leave out builds that do not fit registers and shared memory, and builds that were slower wherever they
were measured on an H200. This module knows layers and kinds of volumes, not their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from math import prod

from ...planning.geometry import Geometry
from ...planning.problem import volume_kind
from ...planning.scalars import ceil_div, round_up
from .build import STEP_BYTES, Block, Build, Division, Holding, Input, Output, Tile, Weights
from .job import Job, groups_to_merge, merged_groups
from .model import NARROW
from .program import MAX_COLUMNS, Dimension, Split, gather_program, separable, splittable
from .registers import line_loads, line_sets, row_sets
from .shared_memory import line_items, slot_bytes, stage_rows
from .storing import has_lines

LEAST_ROWS = 64  # fewest rows of a stage, or elements of a channel in a stage of lines
MAX_SUMS = 128  # most accumulators of a consumer thread, unless a build has a limit of its own
PART_COLUMNS = 96  # with more columns, 16-bit parts of lines are stored through images beside one producer warpgroup
LINE_STAGES = (4, 3)  # numbers of stages to try for builds on lines: four are 4% faster on an H200, if they fit
LONG_RUN_STAGES = (4, 3, 2)  # numbers of stages to try for builds on lines that store long runs
MAX_LINE_TILES = 12  # most tiles of output channels in builds on lines: every tile reads the lines again from L2
MEASURED_LINE_TILES = 4  # most tiles of output channels in builds on lines that were measured
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
RINGS = (64 * 1024,)  # bytes of all slots of streamed panels to try
MARCHING_RINGS = (64 * 1024, 128 * 1024)  # bytes of all slots to try for marches with two producer warpgroups
COPIED_RINGS = (64 * 1024, 96 * 1024, 128 * 1024)  # bytes of all slots to try beside asynchronous copies
STAGED_RINGS = (64 * 1024, 80 * 1024, 96 * 1024, 112 * 1024)  # bytes of all slots to try beside three stages
MAX_SLOTS = 8  # most slots of streamed panels
MAX_BESIDE_TWO = 192  # most columns of an instruction if blocks divide the last tiles beside two producer warpgroups
SMALL_KINDS = 2  # volumes of a smaller kind may have too few tiles for all multiprocessors, or for both consumers


@dataclass(frozen=True)
class Nominal:
    """A pass of a layer with the kind of its volume: tuning keeps one build for each."""

    geometry: Geometry
    gather: bool
    dtype: str
    written_last: bool
    kind: int  # kind of the volume by its size (volume_kind)
    strict: bool = False
    lines: bool = False  # whether input can arrive in lines
    holding: Holding = Holding.ANY
    turned: bool = False  # whether loaders transpose pieces of lines that asynchronous copies bring

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @classmethod
    def of(cls, job: Job) -> Nominal:
        kind = volume_kind(job.all_positions)
        lines = takes_lines(job.geometry, job.gather, job.dtype, job.strict) and has_lines(job)
        return cls(
            job.geometry, job.gather, job.dtype, job.written_last, kind, job.strict, lines, job.holding, job.turned
        )


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


def builds(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    """Yields the builds for volumes of all kinds."""
    if nominal.turned:
        yield from _turned(nominal, shared_bytes)
        return
    yield from _builds(nominal, shared_bytes, Input.LOADED)
    if nominal.gather and takes_lines(nominal.geometry, True, nominal.dtype, nominal.strict):
        yield from _gathering_lines(nominal.geometry, shared_bytes)
    bytes = nominal.geometry.in_per_group * nominal.item_bytes
    if (
        not nominal.strict
        and bytes % 16 == 0
        and bytes >= (COPIED_LAST_BYTES if nominal.written_last else COPIED_BYTES)
    ):
        for build in _builds(nominal, shared_bytes, Input.COPIED):
            yield build
            if nominal.dtype == "float32" and build.input is Input.COPIED:
                yield build.but(input=Input.REWRITTEN)


def _turned(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    """Yields the builds whose loaders transpose pieces of lines."""
    for build in _builds(nominal, shared_bytes, Input.LOADED):
        flat = build.input is Input.LOADED and not build.march and build.output is Output.DIRECT
        if not flat or build.tile.groups > 1 or build.program.read_step[2] != build.program.parts:
            continue
        if build.tile.slabs == 1 or build.block.producers == 1:
            continue  # few products, or few loaders: no such build is predicted to win
        slots = build.block.slots
        for count in (slots,) if build.weights.resident else dict.fromkeys((slots, max(2, slots // 2))):
            turned = build.but(input=Input.TURNED, slots=count)
            if stage_rows(turned) >= LEAST_ROWS:
                yield turned


def _builds(nominal: Nominal, shared_bytes: int, input: Input) -> Iterator[Build]:
    """Yields the builds whose input arrives in the given way, or in a way that follows from it."""
    strict = nominal.strict
    for march, split, tile, columns in _tiles(nominal, max_columns(strict, input.copied)):
        # Beside many accumulators, two producer warpgroups would leave a consumer too few registers.
        producers = 2 if columns <= (96 if strict else 192) and not input.copied else 1
        block = Block(consumers=2, producers=producers, stages=2, slots=1, shared_bytes=shared_bytes)
        build = Build(nominal.geometry, nominal.gather, nominal.dtype, strict, march, split, tile, block, input)
        serialized = _is_serialized(build)
        if stage_rows(build) >= LEAST_ROWS and not build.own_shifts:
            if not serialized:
                yield build
                yield from _with_images(build)
                yield from _in_registers(build)
            yield from _in_lines(build)
        if not serialized and (build.tile_bytes > 0.6 * shared_bytes or build.own_shifts):
            streaming = build.but(weights=Weights.STREAMED)
            yield from _streaming(streaming)
            yield from _staged(streaming)


def _tiles(nominal: Nominal, most: int) -> Iterator[tuple[bool, Split, Tile, int]]:
    """Yields (march, split, tile, columns) for tiles whose slabs have at most `most` columns in all per consumer."""
    geometry, axes, gather = nominal.geometry, nominal.geometry.axes, nominal.gather
    out = round_up(geometry.out_per_group, 8)
    ways = [(march, split) for march in (False, True) for split in _splits(geometry, march)]
    row_parts = gather_program(axes).parts if gather else 1
    group_bytes = round_up(geometry.in_per_group * nominal.item_bytes, STEP_BYTES) * row_parts
    for march, split in ways[:1] if gather else ways:
        counts = [1 if apart or gather else axis.stride for axis, apart in zip(axes, split, strict=True)]
        if march:
            counts[0] = Dimension.marching(axes[0]).fields
        fields = prod(counts)
        if fields * 8 > min(most, MAX_COLUMNS):
            continue
        together = [n for n in range(2, geometry.groups + 1) if geometry.groups % n == 0 and n * group_bytes <= 128]
        fitting = [n for n in together if n * fields * out <= most and not march and not any(split)]
        groups = max(fitting, default=1)
        if groups > 1:
            rows = [min(r for r in (32, 64, 128) if r >= groups * group_bytes)]
        else:
            small = group_bytes == 32
            rows = [r for r in (128, 64, 32) if 32 * row_parts <= r < 2 * group_bytes and (r > 32 or small)]
        widest = min(min(most, MAX_COLUMNS) // (fields * groups) // 8 * 8, out)
        parts = ceil_div(out, widest)
        for outputs in dict.fromkeys(round_up(ceil_div(out, n), 8) for n in (parts, 2 * parts)):
            columns = fields * groups * outputs
            for row_bytes, slabs in product(rows, (1, 2, 3, 4)):
                narrow = columns < 64 and slabs == 1
                if slabs * columns <= most and slabs * fields <= MAX_FIELDS and not narrow:
                    yield march, split, Tile(groups, outputs, slabs, row_bytes), slabs * columns


def _is_serialized(build: Build) -> bool:
    """Returns whether the compiler serializes the matrix instructions, which took up to 1.7 times the predicted time.

    It does so in strided marches that loop over chunks, if the window is a multiple of the march's step or if there
    are many accumulators."""
    full_chunks = build.channel_slots * build.item_bytes // build.part_bytes  # chunks that fill all steps of a row
    loop = full_chunks > 1 and len(build.program.patterns) > 1
    if not build.march or not loop or build.strict:
        return False
    return build.window % build.march_step == 0 or build.sums > MARCHING_SUMS


def _streaming(build: Build) -> Iterator[Build]:
    """Yields the build with rings of several lengths and, beside asynchronous copies, also with small panels."""
    kinds: list[Build] = [build]
    rings: tuple[int, ...] = RINGS
    if build.input.copied:
        small = build.but(weights=Weights.SMALL_PANELS)
        kinds += [small] if slot_bytes(small) < slot_bytes(build) else []
        rings = STAGED_RINGS if build.block.stages > 2 else COPIED_RINGS
    elif build.march and build.block.producers == 2:
        rings = MARCHING_RINGS
    for slots, each in dict.fromkeys(
        (max(2, min(MAX_SLOTS, ring // slot_bytes(each))), each) for each in kinds for ring in rings
    ):
        streaming = each.but(slots=slots)
        if stage_rows(streaming) >= LEAST_ROWS:
            yield streaming


def _staged(build: Build) -> Iterator[Build]:
    """Yields the build with a third stage, and also with a third consumer if there are enough registers.

    A third stage helps variants with few taps, which multiply a stage in less time than the next takes to arrive."""
    tile = build.tile
    wide = build.input.copied and build.item_bytes == 4 and tile.row_bytes == STAGED_ROW and tile.slabs == 1
    if wide and build.own_shifts:
        for consumers in (2, 3) if build.sums <= THIRD_SUMS else (2,):
            yield from _streaming(build.but(consumers=consumers, stages=3))


def _divided(build: Build) -> Build | None:
    """Returns the build with two consumers that divide K, each with every other slot, or None if it is impossible."""
    slots = build.block.slots if build.weights.resident else max(4, build.block.slots // 2 * 2)
    found = build.but(division=Division.CONSUMERS, slots=slots)
    flat = not (build.march or build.gather) and build.output is not Output.IMAGES
    return found if flat and stage_rows(found) >= LEAST_ROWS else None


def _can_divide_tiles(build: Build) -> bool:
    """Returns whether several blocks can divide the chunks of a tile."""
    direct = build.output is Output.DIRECT and build.input is not Input.LINES
    return direct and not (build.march or build.weights.resident) and build.chunks > 1


def can_divide_last_tiles(build: Build) -> bool:
    """Returns whether several blocks can divide the chunks of the last tiles."""
    return _can_divide_tiles(build) and not (build.strict or build.own_shifts)


def _dividing_last_tiles(build: Build) -> Iterator[Build]:
    """Yields the build with blocks that divide the last tiles, and also with a second producer warpgroup."""
    divided = build.but(division=Division.LAST_TILES)
    yield divided
    # Beside two producer warpgroups, wider instructions lack registers, and several fields spill, which costs 12%.
    narrow = len(build.program.fields) == 1 and build.tile.outputs <= MAX_BESIDE_TWO
    if build.block.producers == 1 and not build.input.copied and build.sums <= MAX_SUMS and narrow:
        for slots in dict.fromkeys((build.block.slots, 6, 3)):
            loaded = divided.but(producers=2, slots=slots)
            if stage_rows(loaded) >= LEAST_ROWS:
                yield loaded


def _with_images(build: Build) -> Iterator[Build]:
    """Yields the build with stores through images, if their buffers fit shared memory."""
    whole = not build.gather and not build.split[2] and build.geometry.stride[2] > 1
    if not whole or build.strict or build.input.copied:
        return
    # For 16-bit types, one producer warpgroup instead of two is 4 to 7% faster if a consumer has a part of a line,
    # and 9% slower if it has a whole line.
    parts = build.item_bytes == 2 and build.march and build.tile.slabs == 1 and build.columns > PART_COLUMNS
    found = build.but(output=Output.IMAGES, producers=1 if parts else build.block.producers)
    if stage_rows(found) >= LEAST_ROWS:
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
    if build.march and not build.input.copied and takes_lines(build.geometry, False, build.dtype, build.strict):
        lines = build.but(input=Input.LINES, producers=1)
        woven = 4 // build.item_bytes  # slabs that share every few positions in sequence
        whole = build.tile.slabs % woven == 0 and build.part_bytes // build.item_bytes <= LINE_CHANNELS
        if whole or build.dtype == "float32":
            yield from _line_stages(lines)
        if whole:
            yield from _line_stages(lines.but(output=Output.LONG_RUNS))


def _in_registers(build: Build) -> Iterator[Build]:
    """Yields the build with consumers that round copied float32 input in registers (halo_registers.cuh)."""
    blocks = build.geometry.in_per_group % 16 == 0 and build.tile.row_bytes >= 64
    if build.input.copied and build.dtype == "float32" and build.march and blocks:
        for stages in LINE_STAGES if row_sets(build) else ():
            found = build.but(stages=stages, input=Input.IN_REGISTERS)
            if stage_rows(found) >= LEAST_ROWS:
                yield found


def _gathering_lines(geometry: Geometry, shared_bytes: int) -> Iterator[Build]:
    """Yields builds of an input gradient that marches through lines of dy as they lie in memory."""
    program = gather_program(geometry.axes, march=True)
    fields, out = len(program.fields), round_up(geometry.out_per_group, 8)
    out_tiles = dict.fromkeys(round_up(ceil_div(out, parts), 8) for parts in (1, 2, 3, 4))
    for out_tile, row_bytes, slabs in product(out_tiles, (128, 64), (1, 2)):
        if slabs * out_tile * fields > max_columns(strict=False) or out_tile * fields > MAX_COLUMNS:
            continue
        tile = Tile(1, out_tile, slabs, row_bytes)
        block = Block(consumers=2, producers=1, stages=2, slots=1, shared_bytes=shared_bytes)
        together = (False, False, False)
        build = Build(geometry, True, "float32", False, True, together, tile, block, Input.LINES)
        yield from _line_stages(build)


def _line_stages(build: Build) -> Iterator[Build]:
    """Yields the build on lines with several numbers of stages, if registers suffice for its operands."""
    if not line_sets(build)[0] or build.out_tiles > MAX_LINE_TILES or line_loads(build) > MAX_LINE_LOADS:
        return
    for stages in LONG_RUN_STAGES if build.output is Output.LONG_RUNS else LINE_STAGES:
        found = build.but(stages=stages)
        if line_items(found) >= LEAST_ROWS:
            yield found


def _merged_builds(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    """Yields builds that merge small groups, so that stores of channels-last outputs have more of a position."""
    groups = groups_to_merge(nominal.geometry, nominal.item_bytes)
    if groups > 1 and nominal.written_last and not (nominal.gather or nominal.strict):
        merged = replace(nominal, geometry=merged_groups(nominal.geometry, groups))
        for build in builds(merged, shared_bytes):
            yield build.but(merged=groups)


def builds_of(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    """Yields the builds for volumes of one kind, except those whose blocks divide the last tiles."""
    return (build for build in _of_kind(nominal, shared_bytes) if build.holds(nominal.holding))


def _of_kind(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    for build in chain(builds(nominal, shared_bytes), _merged_builds(nominal, shared_bytes)):
        if nominal.kind < SMALL_KINDS and build.staged:
            continue  # small volumes have too few tiles per block to profit from three stages
        yield build
        if nominal.kind < SMALL_KINDS:
            if _can_divide_tiles(build):
                yield build.but(division=Division.BLOCKS)
            if (divided := _divided(build)) is not None:
                yield divided


def last_tiles_divided(nominal: Nominal, shared_bytes: int) -> Iterator[Build]:
    """Yields the builds whose blocks divide the last tiles."""
    for build in builds(nominal, shared_bytes) if nominal.holding is Holding.ANY else ():
        narrow = build.item_bytes == 2 and build.program.unit * build.tile.outputs <= NARROW  # slower if divided
        if can_divide_last_tiles(build) and not narrow:
            yield from _dividing_last_tiles(build)
