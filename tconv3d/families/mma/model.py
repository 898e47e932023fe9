"""Enumerates the builds of the kernel on mma.sync (mma.cuh) and predicts their time.

The result is a pure function of a layer's geometry, its volume and the device. This module knows nothing of launches.

A row of taps is one tap along each dimension that is not unrolled; rows that read from one halo form a source. A slot
holds a chunk of channels of one position of the halo (an item) in shared memory (mma_tile.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from ...planning.geometry import Triple
from ...planning.problem import Device
from ...planning.side import Side, Unrolled

# The unit of all costs is a cycle of one multiprocessor.
MULTIPLY_CYCLES = 2.0  # cycles per matrix instruction if all four schedulers issue them
SHARED_BYTES_PER_CYCLE = 128.0  # bytes per cycle of shared memory
L2_BYTES_PER_CYCLE = 24.0  # bytes per cycle and multiprocessor that L2 delivers if all multiprocessors read
MEMORY_BYTES_PER_CYCLE = 16.0  # bytes per cycle and multiprocessor written to memory if all multiprocessors write
ROWS_BYTES_PER_CYCLE = 12.0  # bytes per cycle and multiprocessor read and written to rewrite x as rows of channels
LAUNCH_CYCLES = 5000.0  # cycles that an additional launch costs for its start and end
ISSUE_PER_CYCLE = 4.0  # instructions issued per cycle, one by each scheduler
COPY_INSTRUCTIONS = 8.0  # instructions of a warp per copy of each lane
ROUND_INSTRUCTIONS = 2.0  # instructions that round one word to TF32
STORE_INSTRUCTIONS = 12.0  # instructions of a warp per store of each lane
STEP_CYCLES = 60.0  # cycles of the barrier of a step
JOB_CYCLES = 700.0  # cycles from the loads of a job (words copied through registers) to its stores in shared memory
JOB_WORDS = 4  # words per thread and job: kJobWords in mma_copies.cuh
ROW_CYCLES = 90.0  # cycles that a warp waits for the first fragments of a row of taps
BLOCK_CYCLES = 2500.0  # cycles of a block before its first product and after its last
TORN_STORES = 2.0  # factor on the memory cycles of stores if neighbours in memory are stored by different blocks
TOGETHER = 3.0  # exponent of the p-norm that joins overlapping parts: two equal parts take 1.26 times one
OVERLAP = 0.1  # share of the shorter of waiting and working that the longer does not hide
LAST_ROUND = 0.7  # share of a full wave's time that the last wave of blocks takes at least

SLOT_PAD = 16  # bytes after the channels of a slot, against bank conflicts
K_STEP = 32  # bytes of channels per matrix instruction
REGISTERS = 65536  # per multiprocessor
OTHER_REGISTERS = 56  # registers per thread for addresses and counters
JOB_REGISTERS = 12  # registers per thread for words copied through registers
STORE_BYTES = 49152  # bytes of shared memory that stage stores; at least one column tile of each warp is staged
BLOCK_OVERHEAD = 1024  # bytes of shared memory that the system reserves per block
MAX_CODE = 640  # matrix instructions in the unrolled code of a row of taps
SAFE_SUMS = 128  # accumulators per thread
MAX_BLOCKS = 5  # blocks per multiprocessor
MAX_REGISTERS = 244  # registers per thread by the estimate `_registers`
BOX_ITEM = 0.3  # cost of an item of the halo, relative to the products of a position
BOX_LINE = 4.0  # cost of the partial sectors at the ends of a line in memory, in items
WARPS = ((4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4))  # warps of a block along positions and along channels
ROWS = (1, 2, 4)  # candidates for the rows of taps per stage
# From 8192 positions on, a warp has at least 6 tiles of 16 x 8 sums, unless its columns are all output channels.
FEW_TILES, MANY_POSITIONS = 6, 8192
STAGES = 3  # stages of the ring of weights
MAX_SOURCES = 16  # sources of a block phase: an item of the halo has one bit for each in a 16-bit mask


@dataclass(frozen=True)
class Build:
    """Holds the compile-time choices of a kernel that the layer does not determine."""

    unrolled: int  # innermost dimensions (0 to 3 of w, h, d) along which a block has all phases
    tiles_m: int  # tiles of 16 positions per warp
    tiles_n: int  # tiles of 8 channels per warp
    warps_m: int  # warps of a block along positions
    warps_n: int  # warps of a block along channels
    steps: int  # K steps per chunk of channels
    rows: int  # rows of taps per stage
    stages: int
    blocks: int  # blocks per multiprocessor

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def positions(self) -> int:
        return 16 * self.tiles_m * self.warps_m

    @property
    def columns(self) -> int:
        return 8 * self.tiles_n * self.warps_n

    def __str__(self) -> str:
        owned = ("one phase", "all phases along w", "all phases along h, w", "all phases")[self.unrolled]
        return (
            f"{self.warps_m * self.warps_n} warps x {self.blocks} blocks, each block {self.positions} positions x "
            f"{self.columns} channels x {owned}, each warp {16 * self.tiles_m} x {8 * self.tiles_n}, "
            f"chunks of {K_STEP * self.steps} bytes, {self.stages} stages of {self.rows} rows of taps"
        )


@dataclass(frozen=True)
class Row:
    """One tap along each dimension that is not unrolled, and the place in its source's halo where it reads."""

    taps: tuple[int, ...]
    place: Triple


@dataclass(frozen=True)
class Source:
    """Groups the rows of taps of a block phase that read from one halo."""

    least: Triple  # offset in x of the halo's start, from input_step times the tile's first position
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Window:
    """Describes consecutive fragments along w that several inner taps share, each tap at its own shift."""

    place: Triple  # place in the halo, relative to the place of the row of taps
    taps: tuple[tuple[int, int], ...]  # inner tap, and its shift from the window's start in positions

    @property
    def span(self) -> int:
        return max(shift for _, shift in self.taps)


@dataclass(frozen=True)
class Work:
    """Derives the part of a build's work that depends on the layer alone."""

    side: Side
    unrolled: int

    @cached_property
    def inner(self) -> Unrolled:
        return Unrolled.of(self.side.gathers, self.unrolled)

    @property
    def outer_count(self) -> int:
        return 3 - self.unrolled

    @cached_property
    def line_steps(self) -> Triple:
        """Lines of x from line to line of a halo: the input step if every phase of x has its own halo, else 1."""
        d, h, _ = (gather.input_step for gather in self.side.gathers)
        return (d, h, 1) if d * h <= MAX_SOURCES else (1, 1, 1)

    @cached_property
    def halo_steps(self) -> Triple:
        """Lines (d, h) and items (w) of a halo from one position of a tile to the next."""
        steps = (gather.input_step for gather in self.side.gathers)
        return tuple(step // line for step, line in zip(steps, self.line_steps, strict=True))

    @cached_property
    def least_load(self) -> Triple:
        return tuple(min(load[i] for load in self.inner.loads) for i in range(3))

    @cached_property
    def phases(self) -> tuple[tuple[Source, ...], ...]:
        """The sources of each block phase."""
        outer = self.side.gathers[: self.outer_count]
        return tuple(map(self._sources, product(*(range(gather.phases) for gather in outer))))

    def _sources(self, phase: Triple) -> tuple[Source, ...]:
        outer, unrolled = self.side.gathers[: self.outer_count], self.least_load[self.outer_count :]
        by_residue: dict[Triple, list[tuple[tuple[int, ...], Triple]]] = {}
        for row in product(*(range(gather.count[i]) for gather, i in zip(outer, phase, strict=True))):
            taps = tuple(gather.tap(i, j) for gather, i, j in zip(outer, phase, row, strict=True))
            offsets = (*(gather.offset(i, j) for gather, i, j in zip(outer, phase, row, strict=True)), *unrolled)
            residue = tuple(offset % step for offset, step in zip(offsets, self.line_steps, strict=True))
            by_residue.setdefault(residue, []).append((taps, offsets))
        found = []
        for _, rows in sorted(by_residue.items()):
            least = tuple(min(offsets[i] for _, offsets in rows) for i in range(3))
            places = (
                tuple((o - at) // step for o, at, step in zip(offsets, least, self.line_steps, strict=True))
                for _, offsets in rows
            )
            found.append(
                Source(least, tuple(Row(taps, place) for (taps, _), place in zip(rows, places, strict=True)))
            )
        return tuple(found)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        return tuple(source for phase in self.phases for source in phase)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for source in self.sources for row in source.rows)

    @cached_property
    def most_rows(self) -> int:
        """The most rows of taps that a block phase has."""
        return max(sum(len(source.rows) for source in phase) for phase in self.phases)

    @cached_property
    def least_rows(self) -> int:
        """The fewest rows of taps that a source has."""
        return min((len(source.rows) for source in self.sources), default=1)

    @cached_property
    def reach(self) -> Triple:
        """The greatest distance between two reads of one position's taps, in lines (d, h) and items (w) of a halo."""
        rows = (max((row.place[i] for row in self.rows), default=0) for i in range(3))
        loads = (max(load[i] for load in self.inner.loads) - self.least_load[i] for i in range(3))
        return tuple(map(sum, zip(rows, loads, strict=True)))

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The windows of a row of taps."""
        step = self.side.gathers[2].input_step
        found: dict[Triple, list[tuple[int, int]]] = {}
        for number, (_, load, _) in enumerate(self.inner.taps):
            d, h, w = (o - at for o, at in zip(self.inner.loads[load], self.least_load, strict=True))
            found.setdefault((d, h, w % step), []).append((number, w // step))
        windows = []
        for (d, h, plane), taps in found.items():
            first = min(shift for _, shift in taps)
            shifted = tuple((tap, shift - first) for tap, shift in taps)
            windows.append(Window((d, h, first * step + plane), shifted))
        return tuple(windows)

    @property
    def dense_w(self) -> bool:
        """Tells whether a block writes all phases along w, so that its stores fill whole sectors."""
        return self.unrolled > 0 or self.side.gathers[2].output_step == 1


@dataclass(frozen=True)
class Box:
    """Describes the positions of a block by run-time values, which are chosen for the volume."""

    items: int  # batch items per block
    tile: Triple  # positions per batch item
    halo: Triple  # positions of the halo per batch item
    plane: int  # slots per plane of a line of the halo, where a line has one plane for each residue of the input step
    line: int  # slots from line to line of the halo along h
    sheet: int  # slots from line to line of the halo along d
    slots: int  # slots of the halo
    tiles: tuple[int, ...]  # number of boxes along n, d, h, w

    @classmethod
    def of(cls, work: Work, items: int, tile: Triple) -> Box:
        steps, whole = work.halo_steps, (work.side.problem.batch, *work.side.grid)
        halo = tuple((t - 1) * s + r + 1 for t, s, r in zip(tile, steps, work.reach, strict=True))
        plane = -(-halo[2] // steps[2])
        line = plane * steps[2] | 1
        sheet = halo[1] * line
        if tile[1] < 8:  # the 8 rows of one ldmatrix come from several sheets and must lie in different banks
            sheet += (_power_of_two_up(tile[1]) - sheet) % 8
        tiles = tuple(-(-extent // t) for extent, t in zip(whole, (items, *tile), strict=True))
        return cls(items, tile, halo, plane, line, sheet, items * halo[0] * sheet, tiles)

    @property
    def positions(self) -> int:
        return self.items * prod(self.tile)

    @property
    def lines(self) -> int:
        return self.items * self.tile[0] * self.tile[1]

    @property
    def halo_items(self) -> int:
        return self.items * prod(self.halo)

    @property
    def halo_lines(self) -> int:
        return self.items * self.halo[0] * self.halo[1]


def _power_of_two_up(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


@lru_cache(maxsize=4096)
def boxes(work: Work, tiles_m: int, warps_m: int) -> tuple[Box, ...]:
    """Returns the 4 cheapest boxes for `warps_m` warps, each with 16 lines and `tiles_m` positions along w."""
    found = []
    depth, height, width = work.side.grid
    for warps_w in (1, 2, 4, 8):
        if warps_w > warps_m or (warps_w > 1 and (warps_w - 1) * tiles_m >= width):
            continue
        lines = 16 * warps_m // warps_w
        for h in sorted({min(lines, height, e) for e in (1, 2, 4, 8, 16, 32, 64, 128)} | _even_parts(height, lines)):
            parts = -(-depth // min(depth, lines // h))
            box = Box.of(work, 1, (-(-depth // parts), h, warps_w * tiles_m))
            found.append(box)
            if parts == 1 and lines >= 2 * box.lines:  # there is room for several batch items
                found.append(Box.of(work, min(work.side.problem.batch, lines // box.lines), box.tile))

    def cost(box: Box) -> float:
        read = box.halo_items + (BOX_LINE * box.halo_lines if work.side.x[4] == 1 else 0.0)
        written = BOX_LINE * box.lines if work.side.y[4] == 1 else 0.0
        return prod(box.tiles) * (16 * warps_m * tiles_m + BOX_ITEM * read + BOX_ITEM * written)

    return tuple(sorted(dict.fromkeys(found), key=cost)[:4])


def _even_parts(size: int, most: int) -> set[int]:
    """Returns the extents of up to 16 equal parts of a size, without extents above `most`."""
    return {extent for parts in range(1, 17) if (extent := -(-size // parts)) <= most}


@dataclass(frozen=True)
class Candidate:
    """Combines a build with a box for a volume, and predicts its time."""

    work: Work
    build: Build
    box: Box
    copy: int  # kCopy in mma_copies.cuh: how the halo is copied to shared memory
    item_bytes: int
    rows: bool = False  # another launch first rewrites x as rows of channels

    @property
    def rounds(self) -> bool:
        """Tells whether x is rounded to TF32 before each product, because no earlier launch rounded it."""
        return self.item_bytes == 4 and not self.rows

    @property
    def chunk(self) -> int:
        return self.build.steps * K_STEP // self.item_bytes

    @property
    def chunks(self) -> int:
        return -(-self.work.side.reduced // self.chunk)

    @property
    def slices(self) -> int:
        return -(-self.work.side.outs // self.build.columns)

    @property
    def tap_bytes(self) -> int:
        return self.build.steps * K_STEP * self.build.columns

    @property
    def stage_bytes(self) -> int:
        return self.build.rows * len(self.work.inner.taps) * self.tap_bytes

    @property
    def slot_bytes(self) -> int:
        return self.build.steps * K_STEP + SLOT_PAD

    @property
    def halo_buffers(self) -> int:
        steps = -(-self.work.least_rows // self.build.rows)
        return max(2, -(-(self.build.stages - 1) // steps) + 1)

    @property
    def table_bytes(self) -> int:
        return -(-self.work.most_rows * len(self.work.windows) // 4) * 16

    @property
    def store_line(self) -> int:
        """Elements from line to line of y staged in shared memory: an odd multiple of 16 bytes."""
        phases = self.work.side.gathers[2].phases if self.work.unrolled else 1
        return (-(-self.box.tile[2] * phases * self.item_bytes // 16) | 1) * 16 // self.item_bytes

    @property
    def store_pitch(self) -> int:
        """Elements from column to column of y staged in shared memory: an odd multiple of 16 bytes."""
        phases = self.work.side.gathers[2].phases if self.work.unrolled else 1
        lines = self.box.lines * (len(self.work.inner.phases) // phases)
        return (lines * self.store_line * self.item_bytes // 16 | 1) * 16 // self.item_bytes

    @property
    def store_tiles(self) -> int:
        """The number of 8-column tiles of a warp that are staged for stores at a time; equal for all boxes."""
        each = 8 * self.build.warps_n * self.build.positions * len(self.work.inner.phases) * self.item_bytes
        return max(1, min(self.build.tiles_n, STORE_BYTES // each))

    @property
    def store_bytes(self) -> int:
        if self.work.side.y[4] != 1:
            return 0
        return 8 * self.build.warps_n * self.store_pitch * self.item_bytes * self.store_tiles

    @property
    def copy_bytes(self) -> int:
        items = -(-self.box.slots // 2) * 16
        halos = self.halo_buffers * self.box.slots * self.slot_bytes
        return self.table_bytes + self.build.stages * self.stage_bytes + items + halos

    @property
    def shared_bytes(self) -> int:
        return max(self.copy_bytes, self.store_bytes)

    def blocks_that_fit(self, device: Device) -> int:
        """Returns how many blocks fit a multiprocessor's shared memory, including the system's bytes per block."""
        return (device.shared_bytes + BLOCK_OVERHEAD) // (self.shared_bytes + BLOCK_OVERHEAD)

    @property
    def grid(self) -> int:
        g = self.work.side.problem.geometry
        return prod(self.box.tiles) * g.groups * self.slices * len(self.work.phases)

    def cycles(self, device: Device) -> float:
        """Returns the predicted cycles of the whole launch, and of the launch that rewrites x, if any.

        Blocks that share a multiprocessor are limited by its busiest unit, and hide each other's latency. A block
        that is alone on a multiprocessor takes the sum of its overlapping parts, its waiting and its stores.
        """
        resident = self.build.blocks * device.multiprocessors
        whole = self.grid / resident
        # Blocks of the last wave, which is seldom full, share their multiprocessors with fewer blocks.
        rounds = whole + LAST_ROUND * (-(-self.grid // resident) - whole) if whole > 1 else 1.0
        sharing = min(self.build.blocks, -(-self.grid // device.multiprocessors))
        *inner, storing = self._parts()
        alone = _together(inner) + self._waiting + storing
        busy = sharing * _together([*inner[:-1], inner[-1] + storing])
        return rounds * (max(alone, busy) + OVERLAP * min(alone, busy)) + self._writing_rows(device)

    def _writing_rows(self, device: Device) -> float:
        """Returns the cycles of the launch that rewrites x as rows of channels; 0 if there is none."""
        if not self.rows:
            return 0.0
        side = self.work.side
        elements = side.problem.batch * side.reduced * side.problem.geometry.groups * prod(side.x_size)
        moved = 2 * elements * self.item_bytes
        return LAUNCH_CYCLES + moved / (ROWS_BYTES_PER_CYCLE * device.multiprocessors)

    @property
    def _waiting(self) -> float:
        """Cycles for which a block idles if no other block shares its multiprocessor."""
        steps = sum(-(-len(source.rows) // self.build.rows) for source in self.work.sources)
        rows = len(self.work.rows)
        warps_of_scheduler = self.build.warps_m * self.build.warps_n / 4
        each = STEP_CYCLES * steps + ROW_CYCLES * rows / warps_of_scheduler
        if self.copy == 2:  # each row of taps hides one job of copies through registers, further jobs are exposed
            jobs = -(-self.box.halo_items * 8 * self.build.steps // (JOB_WORDS * self.build.threads))
            each += JOB_CYCLES * sum(max(0, jobs - len(source.rows)) for source in self.work.sources)
        return BLOCK_CYCLES + each * self.chunks / len(self.work.phases)

    def _parts(self) -> tuple[float, ...]:
        """Returns the cycles of tensor cores, shared memory, issue slots, loads and stores of an average block."""
        b, side = self.build, self.work.side
        warps = b.warps_m * b.warps_n
        rows, sources = (len(each) / len(self.work.phases) for each in (self.work.rows, self.work.sources))
        taps = rows * len(self.work.inner.taps)
        fragments = rows * sum(b.tiles_m + window.span for window in self.work.windows)
        k_steps = self.chunks * b.steps
        multiplies = warps * k_steps * taps * b.tiles_m * b.tiles_n
        a_loads = warps * k_steps * fragments
        b_bytes = warps * k_steps * taps * b.tiles_n * 256
        weight_bytes = self.chunks * taps * self.tap_bytes
        halo_bytes = sources * self.box.halo_items * self.chunks * self.chunk * self.item_bytes
        shared = a_loads * 512 + b_bytes + weight_bytes + halo_bytes
        rounding = 4 * ROUND_INSTRUCTIONS * a_loads if self.rounds else 0.0
        copying = COPY_INSTRUCTIONS / 32 * (weight_bytes / 16 + halo_bytes / (16, 4, 2)[self.copy])
        stored = self.box.positions * len(self.work.inner.phases) * min(b.columns, side.outs)
        issue_stores = STORE_INSTRUCTIONS * stored / 32 / (1 if self.item_bytes == 4 else 2)
        torn = 1.0 if self.work.dense_w or side.y[4] != 1 else TORN_STORES
        return (
            MULTIPLY_CYCLES * multiplies,
            shared / SHARED_BYTES_PER_CYCLE,
            (multiplies + a_loads + b_bytes / 512 + rounding + copying) / ISSUE_PER_CYCLE,
            (weight_bytes + halo_bytes * self._sector_waste) / L2_BYTES_PER_CYCLE,
            max(torn * stored * self.item_bytes / MEMORY_BYTES_PER_CYCLE, issue_stores / ISSUE_PER_CYCLE),
        )

    @property
    def _sector_waste(self) -> float:
        """Bytes read in whole sectors of 32 bytes, divided by the bytes of the halo."""
        if self.work.side.x[4] == 1:
            line = self.box.halo[2] * self.item_bytes
            return (line + 28.0) / line
        run = min(self.chunk, self.work.side.reduced) * self.item_bytes
        return max(1.0, 32.0 / run)


def _together(parts: list[float]) -> float:
    """Returns the cycles of overlapping parts by a p-norm: the longest part dominates."""
    return sum(part**TOGETHER for part in parts) ** (1 / TOGETHER)


def _registers(work: Work, sums: int, tiles_m: int, tiles_n: int, copy: int) -> int:
    """Returns an estimate of the registers per thread."""
    window = 4 * (tiles_m + max(window.span for window in work.windows))
    return sums + window + 2 * tiles_n + OTHER_REGISTERS + (JOB_REGISTERS if copy == 2 else 0)


def works(side: Side) -> Iterator[Work]:
    """Yields the divisions of taps into rows and inner taps that are worth considering."""
    for unrolled in range(4):
        work, own = Work(side, unrolled), side.gathers[3 - unrolled :]
        if unrolled == 1 and max(own[0].phases, max(own[0].count)) == 1:
            continue  # a single tap along w leaves nothing to unroll
        if unrolled > 1 and max(gather.phases for gather in own[:-1]) == 1:
            continue
        if 0 < len(work.inner.loads) <= 32:
            yield work


def builds(work: Work, copy: int, item_bytes: int) -> Iterator[Build]:
    """Yields every build worth considering, with as many blocks per multiprocessor as registers allow."""
    side, phases = work.side, len(work.inner.phases)
    steps_wanted = [n for n in (1, 2, 4) if n == 1 or side.reduced * item_bytes > K_STEP * n // 2]
    for tiles_m, tiles_n in product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8)):
        tiles = phases * tiles_m * tiles_n
        if 4 * tiles > SAFE_SUMS or 8 * (tiles_n - 1) >= side.outs or tiles_m >= 2 * side.grid[2]:
            continue
        if tiles < FEW_TILES and 8 * tiles_n < side.outs and side.positions >= MANY_POSITIONS:
            continue
        for (warps_m, warps_n), steps in product(WARPS, steps_wanted):
            if (warps_n - 1) * tiles_n * 8 >= side.outs:
                continue
            if len(work.inner.taps) * tiles_m * tiles_n * steps > MAX_CODE:
                continue
            if copy and warps_m * warps_n % (2 * steps):
                continue  # a round of copies has 8 positions for every word of a slot
            needed = _registers(work, 4 * phases * tiles_m * tiles_n, tiles_m, tiles_n, copy)
            blocks = min(MAX_BLOCKS, REGISTERS // (32 * warps_m * warps_n * needed))
            for rows in ROWS:
                if needed <= MAX_REGISTERS and rows <= max(1, work.most_rows):
                    yield Build(work.unrolled, tiles_m, tiles_n, warps_m, warps_n, steps, rows, STAGES, blocks)


def candidates(side: Side, copy: int, item_bytes: int, device: Device, rows: bool = False) -> Iterator[Candidate]:
    """Yields every build that fits the device, with its boxes. `rows`: x was rewritten as rows of channels."""
    for work in works(side):
        for build in builds(work, copy, item_bytes):
            for box in boxes(work, build.tiles_m, build.warps_m):
                found = Candidate(work, build, box, copy, item_bytes, rows)
                fit = found.blocks_that_fit(device)
                if fit >= build.blocks:
                    yield found
                elif fit > 0:
                    yield replace(found, build=replace(build, blocks=fit))


def candidates_of(
    build: Build, side: Side, copy: int, item_bytes: int, device: Device, rows: bool
) -> Iterator[Candidate]:
    """Yields one build with each of its boxes that fit the device."""
    work = Work(side, build.unrolled)
    for box in boxes(work, build.tiles_m, build.warps_m):
        found = Candidate(work, build, box, copy, item_bytes, rows)
        if found.blocks_that_fit(device) >= build.blocks:
            yield found
