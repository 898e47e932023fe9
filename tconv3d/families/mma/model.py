"""What the kernel on mma.sync can be built as, and how long a build is predicted to take (mma.cuh).

A pure function of a layer's geometry, its volume and the device. Knows no launch.
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

# Cycles of a multiprocessor are the unit of all costs.
MULTIPLY_CYCLES = 2.0  # one matrix instruction, when all four schedulers issue them
SHARED_BYTES_PER_CYCLE = 128.0
L2_BYTES_PER_CYCLE = 24.0  # that a multiprocessor gets when all of them read
MEMORY_BYTES_PER_CYCLE = 16.0  # that a multiprocessor can write to memory when all of them do
ROWS_BYTES_PER_CYCLE = 12.0  # that a multiprocessor reads and writes when x is written as rows of channels
LAUNCH_CYCLES = 5000.0  # from the end of a launch to the next one's first block, and its last block's
ISSUE_PER_CYCLE = 4.0  # instructions, one of each scheduler
COPY_INSTRUCTIONS = 8.0  # of a warp, to ask for one copy of each lane
ROUND_INSTRUCTIONS = 2.0  # that round a word to TF32
STORE_INSTRUCTIONS = 12.0  # of a warp, for one store of each lane
STEP_CYCLES = 60.0  # a barrier
JOB_CYCLES = 700.0  # from the loads of a job through registers until its words are in shared memory
JOB_WORDS = 4  # of a thread, of a job: kJobWords of kernels/mma_copies.cuh
ROW_CYCLES = 90.0  # that a warp waits for the first fragments of a row of taps
BLOCK_CYCLES = 2500.0  # from a block's start to its first product, and until its last store is done
TORN_STORES = 2.0  # times the memory cycles, where neighbours in memory are stored by different blocks
TOGETHER = 3.0  # exponent of the norm that joins parts which overlap: two equal ones take 1.26 times as long as one
OVERLAP = 0.1  # of the shorter of waiting and working is not hidden behind the longer
LAST_ROUND = 0.7  # of a round that the last one takes, however few blocks it has

SLOT_PAD = 16  # bytes after the channels of a slot
K_STEP = 32  # bytes of channels
REGISTERS = 65536  # of a multiprocessor
OTHER_REGISTERS = 56  # of a thread, for addresses and counters
JOB_REGISTERS = 12  # of a thread, for what comes through registers
STORE_BYTES = 49152  # of shared memory that stores are put together in, or one tile's, if that is more
BLOCK_OVERHEAD = 1024  # bytes of shared memory that the system takes of each block
MAX_CODE = 640  # matrix instructions that a row of taps may be unrolled to
SAFE_SUMS = 128  # accumulators of a thread
MAX_BLOCKS = 5  # of a multiprocessor
MAX_REGISTERS = 244  # of a thread, by the estimate
BOX_ITEM = 0.3  # of the time of a position's products, that an item of the halo takes
BOX_LINE = 4.0  # items that the ends of a line in memory take, whose sectors are not whole
WARPS = ((4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4))  # of a block, along positions and channels
ROWS = (1, 2, 4)  # of taps, of a stage
FEW_TILES, MANY_POSITIONS = 6, 8192  # a warp has so many tiles, or all channels, where there are so many positions
STAGES = 3
MAX_SOURCES = 16  # of a block phase, whose items a table marks by 16 bits


@dataclass(frozen=True)
class Build:
    """Everything of a kernel that is compiled in and is not the layer's."""

    unrolled: int  # innermost dimensions whose phases all are a block's own
    tiles_m: int  # tiles of 16 positions of a warp
    tiles_n: int  # tiles of 8 channels of a warp
    warps_m: int
    warps_n: int
    steps: int  # K steps of a chunk
    rows: int  # of taps, of a stage
    stages: int
    blocks: int  # of a multiprocessor

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
    """One tap along each dimension that is not unrolled, and where it reads in its source's halo."""

    taps: tuple[int, ...]
    place: Triple


@dataclass(frozen=True)
class Source:
    """Rows of taps of a block phase that read out of the same halo."""

    least: Triple  # offset in x from what the tile's first position stands for to the halo's beginning
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Window:
    """Fragments along w that several inner taps read: of each tap, how many items behind the first it begins."""

    place: Triple  # in the halo, from where the row of taps reads
    taps: tuple[tuple[int, int], ...]  # inner tap, shift

    @property
    def span(self) -> int:
        return max(shift for _, shift in self.taps)


@dataclass(frozen=True)
class Work:
    """What a build has to do, of the layer alone."""

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
        """From line to line of a halo, in lines of x: the stride, where each phase of x has a halo of its own."""
        d, h, _ = (gather.input_step for gather in self.side.gathers)
        return (d, h, 1) if d * h <= MAX_SOURCES else (1, 1, 1)

    @cached_property
    def halo_steps(self) -> Triple:
        """From position to position of a tile, in lines and items of a halo."""
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
        """Of a block phase."""
        return max(sum(len(source.rows) for source in phase) for phase in self.phases)

    @cached_property
    def least_rows(self) -> int:
        """Of a source."""
        return min((len(source.rows) for source in self.sources), default=1)

    @cached_property
    def reach(self) -> Triple:
        """How far apart what the taps of a position read lies at most, in lines and items of a halo."""
        rows = (max((row.place[i] for row in self.rows), default=0) for i in range(3))
        loads = (max(load[i] for load in self.inner.loads) - self.least_load[i] for i in range(3))
        return tuple(map(sum, zip(rows, loads, strict=True)))

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """Of a row of taps."""
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
        """Whether a block writes all phases along w."""
        return self.unrolled > 0 or self.side.gathers[2].output_step == 1


@dataclass(frozen=True)
class Box:
    """The positions of a block: run-time values, chosen for the volume."""

    items: int  # batch items
    tile: Triple  # positions of each of them
    halo: Triple
    plane: int  # slots of a plane of a line of the halo
    line: int  # slots from line to line along h
    sheet: int  # slots from line to line along d
    slots: int
    tiles: tuple[int, ...]  # how many boxes there are along n, d, h, w

    @classmethod
    def of(cls, work: Work, items: int, tile: Triple) -> Box:
        steps, whole = work.halo_steps, (work.side.problem.batch, *work.side.grid)
        halo = tuple((t - 1) * s + r + 1 for t, s, r in zip(tile, steps, work.reach, strict=True))
        plane = -(-halo[2] // steps[2])
        line = plane * steps[2] | 1
        sheet = halo[1] * line
        if tile[1] < 8:  # lines of several sheets make 8 rows: they lie in different banks
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
    """The best boxes for so many warps, each with 16 lines and tiles_m positions along w of these."""
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
    """Extents that divide a size into parts as even as can be, none above `most`."""
    return {extent for parts in range(1, 17) if (extent := -(-size // parts)) <= most}


@dataclass(frozen=True)
class Candidate:
    """A build with the box for a volume."""

    work: Work
    build: Build
    box: Box
    copy: int  # how the halo comes: kCopy of mma_copies.cuh
    item_bytes: int
    rows: bool = False  # x is written as rows of channels first

    @property
    def rounds(self) -> bool:
        """Whether TF32 numbers are rounded where they are multiplied."""
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
        """Elements from line to line of what is put together for stores: an odd number of times 16 bytes."""
        phases = self.work.side.gathers[2].phases if self.work.unrolled else 1
        return (-(-self.box.tile[2] * phases * self.item_bytes // 16) | 1) * 16 // self.item_bytes

    @property
    def store_pitch(self) -> int:
        """Elements from column to column: likewise."""
        phases = self.work.side.gathers[2].phases if self.work.unrolled else 1
        lines = self.box.lines * (len(self.work.inner.phases) // phases)
        return (lines * self.store_line * self.item_bytes // 16 | 1) * 16 // self.item_bytes

    @property
    def store_tiles(self) -> int:
        """Tiles of 8 columns of a warp that are put together at a time: the same for all boxes."""
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
        """Of a multiprocessor, by shared memory: a block's limit leaves out what the system takes of each block."""
        return (device.shared_bytes + BLOCK_OVERHEAD) // (self.shared_bytes + BLOCK_OVERHEAD)

    @property
    def grid(self) -> int:
        g = self.work.side.problem.geometry
        return prod(self.box.tiles) * g.groups * self.slices * len(self.work.phases)

    def cycles(self, device: Device) -> float:
        """Predicted for the whole launch.

        Blocks that share a multiprocessor are limited by what is busiest, and hide each other's waiting. A block
        that has one for itself takes as long as everything that it does after another.
        """
        resident = self.build.blocks * device.multiprocessors
        whole = self.grid / resident
        # The last round is seldom full, and its blocks have more of their multiprocessor to themselves.
        rounds = whole + LAST_ROUND * (-(-self.grid // resident) - whole) if whole > 1 else 1.0
        sharing = min(self.build.blocks, -(-self.grid // device.multiprocessors))
        *inner, storing = self._parts()
        alone = _together(inner) + self._waiting + storing
        busy = sharing * _together([*inner[:-1], inner[-1] + storing])
        return rounds * (max(alone, busy) + OVERLAP * min(alone, busy)) + self._writing_rows(device)

    def _writing_rows(self, device: Device) -> float:
        """Cycles of the launch that writes x as rows of channels."""
        if not self.rows:
            return 0.0
        side = self.work.side
        elements = side.problem.batch * side.reduced * side.problem.geometry.groups * prod(side.x_size)
        moved = 2 * elements * self.item_bytes
        return LAUNCH_CYCLES + moved / (ROWS_BYTES_PER_CYCLE * device.multiprocessors)

    @property
    def _waiting(self) -> float:
        """Cycles of a block in which nothing is done, if no other block shares its multiprocessor."""
        steps = sum(-(-len(source.rows) // self.build.rows) for source in self.work.sources)
        rows = len(self.work.rows)
        warps_of_scheduler = self.build.warps_m * self.build.warps_n / 4
        each = STEP_CYCLES * steps + ROW_CYCLES * rows / warps_of_scheduler
        if self.copy == 2:  # a job is hidden behind each row of taps, the others are not
            jobs = -(-self.box.halo_items * 8 * self.build.steps // (JOB_WORDS * self.build.threads))
            each += JOB_CYCLES * sum(max(0, jobs - len(source.rows)) for source in self.work.sources)
        return BLOCK_CYCLES + each * self.chunks / len(self.work.phases)

    def _parts(self) -> tuple[float, ...]:
        """Cycles of tensor cores, shared memory, issuing, loads and stores, of an average block, each alone."""
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
        """How much more than the halo is read, in whole sectors of 32 bytes."""
        if self.work.side.x[4] == 1:
            line = self.box.halo[2] * self.item_bytes
            return (line + 28.0) / line
        run = min(self.chunk, self.work.side.reduced) * self.item_bytes
        return max(1.0, 32.0 / run)


def _together(parts: list[float]) -> float:
    """Cycles of parts that overlap: little more than the longest alone, unless others are nearly as long."""
    return sum(part**TOGETHER for part in parts) ** (1 / TOGETHER)


def _registers(work: Work, sums: int, tiles_m: int, tiles_n: int, copy: int) -> int:
    """Of a thread, estimated."""
    window = 4 * (tiles_m + max(window.span for window in work.windows))
    return sums + window + 2 * tiles_n + OTHER_REGISTERS + (JOB_REGISTERS if copy == 2 else 0)


def works(side: Side) -> Iterator[Work]:
    """The divisions of taps into rows and inner taps worth a look."""
    for unrolled in range(4):
        work, own = Work(side, unrolled), side.gathers[3 - unrolled :]
        if unrolled == 1 and max(own[0].phases, max(own[0].count)) == 1:
            continue  # there is one tap along w
        if unrolled > 1 and max(gather.phases for gather in own[:-1]) == 1:
            continue
        if 0 < len(work.inner.loads) <= 32:
            yield work


def builds(work: Work, copy: int, item_bytes: int) -> Iterator[Build]:
    """Every build worth a look, with as many blocks to a multiprocessor as registers allow."""
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
                continue  # 8 positions of every word of a slot are copied at a time
            needed = _registers(work, 4 * phases * tiles_m * tiles_n, tiles_m, tiles_n, copy)
            blocks = min(MAX_BLOCKS, REGISTERS // (32 * warps_m * warps_n * needed))
            for rows in ROWS:
                if needed <= MAX_REGISTERS and rows <= max(1, work.most_rows):
                    yield Build(work.unrolled, tiles_m, tiles_n, warps_m, warps_n, steps, rows, STAGES, blocks)


def candidates(side: Side, copy: int, item_bytes: int, device: Device, rows: bool = False) -> Iterator[Candidate]:
    """Every build that fits the device, with its boxes. `rows`: the side reads rows of channels, written first."""
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
    """One build with its boxes, where it fits."""
    work = Work(side, build.unrolled)
    for box in boxes(work, build.tiles_m, build.warps_m):
        found = Candidate(work, build, box, copy, item_bytes, rows)
        if found.blocks_that_fit(device) >= build.blocks:
            yield found
