"""Enumerates the builds of the kernel on mma.sync (mma.cuh) and predicts their time.

The result is a pure function of a layer's geometry, its volume and the device. This module knows nothing of launches.

A row of taps is one tap along each dimension that is not unrolled; rows that read from one halo form a source. A
position of the halo is an item, with a chunk of channels in slots of shared memory (mma_tile.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ...planning.plain_data import once
from ...planning.problem import Device, Pass
from ...planning.side import Side
from . import crop
from .box import Box, boxes
from .work import Work, is_dense, outputs_of, works

# Kinds of copies of the halo (kCopy): of 16 bytes or of 4 bytes (mma_copies.cuh); through registers of 2 bytes, or of
# pairs of positions of lines that begin at even elements only, or also at odd ones (mma_pairs.cuh).
PIECES, WORDS, HALVES, PAIRS, ODD_PAIRS = range(5)
COPY_BYTES = (16, 4, 2, 32, 32)  # bytes of a copy of each lane, by kind of copy
# Bytes that a thread copies between two rows of taps, by kind of copy; twice as many if it has two pairs.
JOB_BYTES = (0, 0, 16, 32, 32)

# The unit of all costs is a cycle of one multiprocessor. Rates and waiting times were fitted to 317 times, measured
# on an H200 that was told to be an A100 (2026-11-18): predictions are 17% off on average, and among 13 builds of a
# layer they choose one that takes 6% longer than the fastest. Instructions were counted.
MULTIPLY_CYCLES = 1.7  # cycles per matrix instruction if all four schedulers issue them
SHARED_BYTES_PER_CYCLE = 128.0  # bytes per cycle of shared memory
L2_BYTES_PER_CYCLE = 18.5  # bytes per cycle and multiprocessor that L2 delivers if all multiprocessors read
MEMORY_BYTES_PER_CYCLE = 14.0  # bytes per cycle and multiprocessor written to memory if all multiprocessors write
ROWS_BYTES_PER_CYCLE = 12.0  # bytes per cycle and multiprocessor read and written to rewrite x as rows of channels
LAUNCH_CYCLES = 5000.0  # cycles that an additional launch costs for its start and end
ISSUE_PER_CYCLE = 3.4  # instructions issued per cycle, one by each scheduler
# Instructions of a warp, counted in the machine code that CUDA 13.0 generates for compute capability 8.0 and 9.0.
COPY_INSTRUCTIONS = (10.0, 10.0, 18.0, 70.0, 125.0)  # instructions per copy of each lane to the halo, by kind of copy
WEIGHT_INSTRUCTIONS = 2.0  # instructions per copy of each lane to the weights
ROUND_INSTRUCTIONS = 2.0  # instructions that round one word to TF32
SPLIT_INSTRUCTIONS = 9.0  # instructions that split one word into two TF32 numbers
ADD_INSTRUCTIONS = 4.0  # instructions that add one tile of partial sums, in strict float32
ROW_INSTRUCTIONS = 3.0  # instructions for the addresses of one window of a row of taps
STEP_INSTRUCTIONS = 80.0  # instructions of a step that are no copies, loads, roundings or products
HALO_INSTRUCTIONS = 60.0  # instructions for the addresses of a halo
STORE_INSTRUCTIONS = 12.0  # instructions per store of each lane
STEP_CYCLES = 80.0  # cycles of a step's barrier and of the wait for its first fragments
LATENCY_CYCLES = 1500.0  # cycles from the issue of a copy to its arrival in shared memory
JOB_CYCLES = 750.0  # cycles from the loads of a job (words copied through registers) to its stores in shared memory
ROW_CYCLES = 280.0  # cycles that a warp waits for the first fragments of a row of taps
BLOCK_CYCLES = 13000.0  # cycles of a block before its first product and after its last
SECTOR = 32  # bytes of a sector of memory
SECTOR_ENDS = 28.0  # bytes of the sectors at both ends of an unaligned line that belong to other lines, on average
TOGETHER = 3.0  # exponent of the p-norm that joins overlapping parts: two equal parts take 1.26 times one
OVERLAP = 0.15  # share of the shorter of waiting and working that the longer does not hide
# Cycles of a tile whose first halo is already on its way, before its first product and after its last. Derived, not
# measured: half of BLOCK_CYCLES is left, the rounds of stores, each of which waits for shared memory.
AHEAD_CYCLES = 6500.0
ALONG_CYCLES = 3000.0  # AHEAD_CYCLES of tiles whose outputs are stored from registers, without rounds of stores
RESIDENT = 1.1  # factor for blocks with several tiles, which do not copy while they store
SPLIT = 1.1  # factor for blocks that share the channels of a tile, which were never measured either
LAST_ROUND = 1.0  # share of a full wave's time that the last wave of blocks takes at least

K_STEP = 32  # bytes of channels per matrix instruction
REGISTERS = 65536  # per multiprocessor
OTHER_REGISTERS = 56  # registers per thread for addresses and counters
JOB_REGISTERS = (0, 0, 12, 14, 26)  # registers per thread for words copied through registers, by kind of copy
PAIR_REGISTERS = (0, 0, 0, 10, 19)  # registers per thread for a second pair of positions, by kind of copy
STORE_BYTES = 49152  # bytes of shared memory that stage stores; at least one column tile of each warp is staged
PLACE_BYTES = 16  # bytes of shared memory for the place of a line in y
BLOCK_OVERHEAD = 1024  # bytes of shared memory that the system reserves per block
MAX_CODE = 640  # matrix instructions in the unrolled code of a row of taps
MAX_STEP_CODE = 400  # matrix instructions in the unrolled code of a step with several rows of taps
FEW_IN_STEP = 96  # matrix instructions of a step: fewer are not worth its barrier if a step may have more rows
SAFE_SUMS = 128  # accumulators per thread
STRICT_SUMS = 64  # accumulators per thread in strict float32, which has partial sums and low halves beside them
MAX_BLOCKS = 5  # blocks per multiprocessor
MAX_REGISTERS = 244  # registers per thread by the estimate `_registers`
WARPS = ((4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4))  # warps of a block along positions and along channels
ROWS = (1, 2, 3, 4, 6, 9)  # candidates for the rows of taps per stage
ANY_ROWS = (1, 2, 3, 4, 5, 6, 7, 9)  # candidates of blocks that were never measured
# From 8192 positions on, a warp has at least 6 tiles of 16 x 8 sums, unless its columns are all output channels.
FEW_TILES, MANY_POSITIONS = 6, 8192
STAGES = (2, 3)  # candidates for the stages of the ring of weights


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
    resident: bool = False  # a block computes several tiles, and all its weights stay in shared memory
    apart: bool = False  # every row of taps has a halo of its own
    splits: int = 1  # blocks that share the input channels of a tile; above 1, each stores partial sums
    ahead: bool = False  # a resident block copies the next tile's first halo while it stores
    along: bool = False  # the rows of a warp's tile are neighbours along w, and outputs are stored from registers
    crops: bool = False  # a block leaves out steps whose taps read zeros beyond x alone
    lattices: int = (
        0  # outermost dimensions along which the positions of a block are of one class (planning/classes.py)
    )

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
            f"{self.steps} steps of channels at a time, {self.stages} stages of {self.rows} rows of taps"
            + (", weights stay in shared memory" if self.resident else "")
            + (", copies go on from tile to tile" if self.ahead else "")
            + (", stored from registers" if self.along else "")
            + (", a halo for each tap" if self.apart else "")
            + (f", {self.splits} blocks for a tile's sums" if self.splits > 1 else "")
            + (", without steps beyond the volume" if self.crops else "")
            + (f", a lattice of inputs along {'dhw'[: self.lattices]}" if self.lattices else "")
        )


@dataclass(frozen=True)
class Candidate:
    """Combines a build with a box for a volume, and predicts its time."""

    work: Work
    build: Build
    box: Box
    copy: int  # kind of copy of the halo: PIECES to ODD_PAIRS
    item_bytes: int
    rows: bool = False  # another launch first rewrites x as rows of channels
    tiles_of_block: int = 1  # tiles that a block computes one after the other

    @property
    def rounds(self) -> bool:
        """Tells whether x is rounded to TF32 before each product, because no earlier launch rounded it."""
        return self.item_bytes == 4 and not self.rows and not self.work.strict

    @property
    def halves(self) -> int:
        """The TF32 numbers per value: 2 in strict float32, where a product is three TF32 products."""
        return 2 if self.work.strict else 1

    @once
    def chunk(self) -> int:
        return self.build.steps * self.work.step_bytes // self.item_bytes

    @once
    def chunks(self) -> int:
        return -(-self.work.side.reduced // self.chunk)

    @once
    def own_chunks(self) -> int:
        """The chunks of channels that a block sums over."""
        return -(-self.chunks // self.build.splits)

    @property
    def out_bytes(self) -> int:
        """Bytes of a number that is stored: an output, or a partial sum in float32."""
        return self.item_bytes if self.build.splits == 1 else 4

    @property
    def outputs(self) -> int:
        return outputs_of(self.work.side)

    @property
    def slices(self) -> int:
        return -(-self.work.side.outs // self.build.columns)

    @once
    def tap_bytes(self) -> int:
        return self.halves * self.build.steps * self.work.step_bytes * self.build.columns

    @property
    def stage_bytes(self) -> int:
        return self.build.rows * len(self.work.inner.taps) * self.tap_bytes

    @once
    def halo_buffers(self) -> int:
        steps = 1 if self.build.crops else -(-self.work.least_rows // self.build.rows)
        return max(2, -(-(self.build.stages - 1) // steps) + 1)

    @once
    def table_bytes(self) -> int:
        return -(-self.work.most_rows * len(self.work.windows) // 4) * 16

    @property
    def store_phases(self) -> int:
        """The phases along w that a line of y in shared memory interleaves."""
        whole = self.work.classes[2].number == 1
        return self.work.side.gathers[2].phases if self.work.unrolled and whole else 1

    @property
    def store_vector(self) -> int:
        """Neighbouring outputs that a lane writes to shared memory at a time: kVector of mma_stores.cuh."""
        own, most = self.build.tiles_m * self.store_phases, 16 // self.out_bytes
        return most if own % most == 0 else 4 if own % 4 == 0 else 2 if own % 2 == 0 else 1

    @property
    def store_line(self) -> int:
        """Elements from line to line of y staged in shared memory.

        They are an odd multiple of what a lane writes at a time, of a bank at least. A warp writes 8 lines of 4
        columns, and columns are odd multiples of 16 bytes apart: no two lanes then write to one bank.
        """
        unit = max(4, self.store_vector * self.out_bytes)
        return (-(-self.box.tile[2] * self.store_phases * self.out_bytes // unit) | 1) * unit // self.out_bytes

    @property
    def store_pitch(self) -> int:
        """Elements from column to column of y staged in shared memory: an odd multiple of 16 bytes."""
        lines = self.box.lines * (len(self.work.inner.phases) // self.store_phases)
        return (-(-lines * self.store_line * self.out_bytes // 16) | 1) * 16 // self.out_bytes

    @property
    def store_tiles(self) -> int:
        """The number of 8-column tiles of a warp that are staged for stores at a time; equal for all boxes."""
        each = 8 * self.build.warps_n * self.build.positions * len(self.work.inner.phases) * self.out_bytes
        return max(1, min(self.build.tiles_n, STORE_BYTES // each))

    @property
    def store_bytes(self) -> int:
        if self.work.side.y[4] != 1 or self.build.along:
            return 0
        columns = 8 * self.build.warps_n * self.store_pitch * self.out_bytes * self.store_tiles
        return columns + PLACE_BYTES * self.box.lines * (len(self.work.inner.phases) // self.store_phases)

    @property
    def copy_bytes(self) -> int:
        halos = self.halo_buffers * self.box.slots * self.build.steps * self.work.step_bytes
        return self.kept_bytes + (2 if self.build.ahead else 1) * self.list_bytes + halos

    @property
    def job_pairs(self) -> int:
        """The pairs of positions that a thread copies between two rows of taps: two if registers suffice."""
        if self.copy < PAIRS:
            return 1
        b, phases = self.build, len(self.work.inner.phases)
        needed = _registers(self.work, 4 * phases * b.tiles_m * b.tiles_n, b.tiles_m, b.tiles_n, self.copy)
        needed += PAIR_REGISTERS[self.copy]
        return 2 if needed <= MAX_REGISTERS and needed * b.threads * b.blocks <= REGISTERS else 1

    @property
    def list_bytes(self) -> int:
        """Bytes of the list of items (8 bytes each) or of pairs (16 bytes each) of a halo."""
        return 16 * (self.box.halo_pairs if self.copy >= PAIRS else -(-self.box.slots // 2))

    @property
    def weight_stages(self) -> int:
        """The stages of weights in shared memory: a ring, or all steps of a block."""
        if not self.build.resident:
            return self.build.stages
        steps = (sum(-(-len(source.rows) // self.build.rows) for source in phase) for phase in self.work.phases)
        return max(2, self.chunks * max(steps))

    @property
    def kept_bytes(self) -> int:
        """Bytes of shared memory before the items and halos: the table and the weights."""
        return self.table_bytes + self.weight_stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        if self.build.ahead:
            return self.copy_bytes + self.store_bytes
        return max(self.copy_bytes, self.store_bytes + (self.kept_bytes if self.build.resident else 0))

    def blocks_that_fit(self, device: Device) -> int:
        """Returns how many blocks fit a multiprocessor's shared memory, including the system's bytes per block."""
        return (device.shared_bytes + BLOCK_OVERHEAD) // (self.shared_bytes + BLOCK_OVERHEAD)

    @once
    def grid(self) -> int:
        g = self.work.side.problem.geometry
        blocks = -(-prod(self.box.tiles) // self.tiles_of_block) * g.groups * self.slices
        return blocks * len(self.work.phases) * self.build.splits

    def in_one_wave(self, device: Device) -> Candidate:
        """Returns the candidate with as many tiles for each block as make all blocks run at the same time."""
        kinds = self.work.side.problem.geometry.groups * self.slices * len(self.work.phases)
        blocks = max(1, self.build.blocks * device.multiprocessors // kinds)
        return replace(self, tiles_of_block=-(-prod(self.box.tiles) // blocks))

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
        *inner, storing = self.parts()
        alone = _together(inner) + self._waiting + storing
        busy = sharing * _together([*inner[:-1], inner[-1] + storing])
        tiles = self.tiles_of_block * rounds * (RESIDENT if self.build.resident and not self.build.ahead else 1.0)
        computing = tiles * (max(alone, busy) + OVERLAP * min(alone, busy))
        computing += BLOCK_CYCLES if self.build.ahead else 0.0
        following = writing_rows(self.work.side, self.rows, device) + adding(
            self.work.side, self.build.splits, device
        )
        return computing * (SPLIT if self.build.splits > 1 else 1.0) + following

    @property
    def _waiting(self) -> float:
        """Cycles for which a block idles if no other block shares its multiprocessor."""
        steps = self.own_chunks * self._steps
        products = MULTIPLY_CYCLES * self.multiplies / max(steps, 1.0)  # cycles of a step
        late = max(0.0, LATENCY_CYCLES - (self.build.stages - 1) * products)  # BLOCK_CYCLES has the first step's
        ends = BLOCK_CYCLES
        if self.build.ahead:
            ends = ALONG_CYCLES if self.build.along else AHEAD_CYCLES
        waiting = ends + STEP_CYCLES * steps + late * max(0.0, steps - 1.0)
        exposed = 0.0
        if (
            self.copy >= HALVES
        ):  # each row of taps hides one job of copies through registers, further jobs are exposed
            positions = 2 * self.box.halo_pairs if self.copy >= PAIRS else self.box.halo_items
            job_bytes = JOB_BYTES[self.copy] * self.build.threads * self.job_pairs
            jobs = -(-positions * self.work.step_bytes * self.build.steps // job_bytes)
            exposed += JOB_CYCLES * sum(max(0, jobs - self.share * len(source.rows)) for source in self.work.sources)
        if self.copy >= HALVES or self.work.strict:  # rows of taps are multiplied one by one
            warps_of_scheduler = self.build.warps_m * self.build.warps_n / 4
            exposed += ROW_CYCLES * self.share * len(self.work.rows) / warps_of_scheduler
        return waiting + self.own_chunks * exposed / len(self.work.phases)

    @once
    def _steps(self) -> float:
        """Steps of a chunk of an average block."""
        steps = sum(-(-len(source.rows) // self.build.rows) for source in self.work.sources)
        return self.share * steps / len(self.work.phases)

    @once
    def share(self) -> float:
        """The share of the rows of taps that an average block does not leave out."""
        return crop.share(self.work, self.box.tile, self.build.rows)

    @once
    def multiplies(self) -> float:
        """Matrix instructions of an average tile."""
        b = self.build
        taps = self.share * len(self.work.rows) / len(self.work.phases) * len(self.work.inner.taps)
        return b.warps_m * b.warps_n * self.own_chunks * b.steps * taps * b.tiles_m * b.tiles_n * self.work.products

    def parts(self) -> tuple[float, ...]:
        """Returns the cycles of tensor cores, shared memory, issue slots, loads and stores of an average tile."""
        b, side = self.build, self.work.side
        warps = b.warps_m * b.warps_n
        rows, sources = (len(each) / len(self.work.phases) for each in (self.work.rows, self.work.sources))
        rows *= self.share
        taps = rows * len(self.work.inner.taps)
        fragments = rows * sum(b.tiles_m + window.span for window in self.work.windows)
        k_steps = self.own_chunks * b.steps
        a_loads = warps * k_steps * fragments
        b_bytes = warps * k_steps * taps * b.tiles_n * 8 * self.work.step_bytes * self.halves
        weight_bytes = self.own_chunks * taps * self.tap_bytes / self.tiles_of_block
        item_bytes = sources * self.box.halo_items * self.item_bytes
        halo_bytes = item_bytes * self.own_chunks * self.chunk
        read_bytes = item_bytes * crop.inside(self.work, self.box.tile, self.box.halo)
        read_bytes *= min(side.reduced, self.own_chunks * self.chunk)
        shared = a_loads * 16 * self.work.step_bytes + b_bytes + weight_bytes + halo_bytes
        rounding = 4 * ROUND_INSTRUCTIONS * a_loads if self.rounds else 0.0
        if self.work.strict:
            rounding = 4 * SPLIT_INSTRUCTIONS * a_loads + ADD_INSTRUCTIONS * self.multiplies / self.work.products
        copying = WEIGHT_INSTRUCTIONS / 32 * weight_bytes / 16
        copying += COPY_INSTRUCTIONS[self.copy] / 32 * halo_bytes / COPY_BYTES[self.copy]
        control = STEP_INSTRUCTIONS * self._steps + HALO_INSTRUCTIONS * sources
        control = warps * self.own_chunks * (control + ROW_INSTRUCTIONS * rows * len(self.work.windows))
        issued = self.multiplies + a_loads + b_bytes / 512 + rounding + copying + control
        stored = self.box.positions * len(self.work.inner.phases) * min(b.columns, side.outs)
        issue_stores = STORE_INSTRUCTIONS * stored / 32 / (1 if self.out_bytes == 4 else 2)
        return (
            MULTIPLY_CYCLES * self.multiplies * self.work.step_bytes / K_STEP,
            shared / SHARED_BYTES_PER_CYCLE,
            issued / ISSUE_PER_CYCLE,
            (weight_bytes + read_bytes * self.sector_waste) / L2_BYTES_PER_CYCLE,
            max(self.torn * stored * self.out_bytes / MEMORY_BYTES_PER_CYCLE, issue_stores / ISSUE_PER_CYCLE),
        )

    @property
    def torn(self) -> float:
        """Bytes of the sectors that stores touch, divided by the bytes stored; 1 for channels-last outputs.

        L2 merges the channels of a position that several blocks store one after the other.
        """
        side = self.work.side
        if side.y[4] != 1:
            return 1.0
        apart = side.gathers[2].output_step // self.store_phases  # other blocks store the outputs in between
        line = self.box.tile[2] * self.store_phases * apart * self.out_bytes
        whole = not any(v * self.out_bytes % SECTOR for v in side.y[:4]) and line % SECTOR == 0
        return apart * (1.0 if whole else (line + SECTOR_ENDS) / line)

    @property
    def sector_waste(self) -> float:
        """Bytes read in whole sectors of 32 bytes, divided by the bytes of the halo."""
        if self.work.side.x[4] == 1:
            line = self.box.halo[2] * self.item_bytes
            return (self.box.halo[2] * min(self.work.line_steps[2] * self.item_bytes, SECTOR) + SECTOR_ENDS) / line
        run = min(self.chunk, self.work.side.reduced) * self.item_bytes
        return max(1.0, SECTOR / run)


def adding(side: Side, splits: int, device: Device) -> float:
    """Returns the cycles of the launch that adds partial sums; 0 if there is none."""
    if splits == 1:
        return 0.0
    moved = outputs_of(side) * (4 * splits + side.problem.item_bytes)
    return LAUNCH_CYCLES + moved / (ROWS_BYTES_PER_CYCLE * device.multiprocessors)


def writing_rows(side: Side, rows: bool, device: Device) -> float:
    """Returns the cycles of the launch that rewrites x as rows of channels; 0 if there is none."""
    if not rows:
        return 0.0
    elements = side.problem.batch * side.reduced * side.problem.geometry.groups * prod(side.x_size)
    moved = 2 * elements * side.problem.item_bytes
    return LAUNCH_CYCLES + moved / (ROWS_BYTES_PER_CYCLE * device.multiprocessors)


def _together(parts: list[float]) -> float:
    """Returns the cycles of overlapping parts by a p-norm: the longest part dominates."""
    return sum(part**TOGETHER for part in parts) ** (1 / TOGETHER)


def _registers(work: Work, sums: int, tiles_m: int, tiles_n: int, copy: int) -> int:
    """Returns an estimate of the registers per thread."""
    window = 4 * (tiles_m + max(window.span for window in work.windows))
    if work.strict:  # also the low halves of x and of the weight, and the partial sums of two rows of tiles
        window, sums = 2 * window, sums + 10 * tiles_n
    return sums + window + 2 * tiles_n + OTHER_REGISTERS + JOB_REGISTERS[copy]


def copy_of_lattice(work: Work, copy: int) -> int:
    """Returns the kind of copy of a halo: pairs of positions are neighbours in memory, not along a lattice."""
    return HALVES if copy >= PAIRS and work.line_steps[2] > 1 else copy


class Shape(NamedTuple):
    """The choices of a build except for its ring of weights, named as in `Build`."""

    tiles_m: int
    tiles_n: int
    warps_m: int
    warps_n: int
    steps: int
    blocks: int  # as many blocks per multiprocessor as registers allow


def shapes(work: Work, copy: int, item_bytes: int) -> Iterator[Shape]:
    """Yields every shape worth considering; a warp holds all channels if a program over channels follows the sums."""
    side, phases = work.side, len(work.inner.phases)
    steps_wanted = [n for n in (1, 2, 4) if n == 1 or side.reduced * item_bytes > K_STEP * n // 2]
    for tiles_m, tiles_n in product((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 6, 8)):
        tiles = phases * tiles_m * tiles_n
        if (
            4 * tiles > (STRICT_SUMS if work.strict else SAFE_SUMS)
            or 8 * (tiles_n - 1) >= side.outs
            or tiles_m >= 2 * side.grid[2]
        ):
            continue
        if tiles < FEW_TILES and 8 * tiles_n < side.outs and side.positions >= MANY_POSITIONS:
            continue
        needed = _registers(work, 4 * tiles, tiles_m, tiles_n, copy)
        if needed > MAX_REGISTERS:
            continue
        for (warps_m, warps_n), steps in product(WARPS, steps_wanted):
            if (warps_n - 1) * tiles_n * 8 >= side.outs:
                continue
            if side.problem.channels and (warps_n > 1 or tiles_n * 8 < side.outs):
                continue
            if len(work.inner.taps) * tiles_m * tiles_n * steps * work.products > MAX_CODE:
                continue
            if copy and warps_m * warps_n % (2 * steps):
                continue  # a round of copies has 8 positions for every word of a slot
            blocks = min(MAX_BLOCKS, REGISTERS // (32 * warps_m * warps_n * needed))
            yield Shape(tiles_m, tiles_n, warps_m, warps_n, steps, blocks)


def builds(work: Work, shape: Shape) -> Iterator[Build]:
    """Yields the builds of a shape."""
    tiles_m, tiles_n, warps_m, warps_n, steps, blocks = shape
    for rows, stages in product(rows_of_step(work, tiles_m * tiles_n * steps * work.products), STAGES):
        of_shape = (work.unrolled, tiles_m, tiles_n, warps_m, warps_n, steps, rows, stages, blocks)
        if not work.crops or crop.may_leave_out(work, rows):
            yield Build(*of_shape, apart=work.apart, crops=work.crops, lattices=work.lattices)


@lru_cache(maxsize=4096)
def rows_of_step(work: Work, multiplies: int) -> tuple[int, ...]:
    """Returns how many rows of taps a step may have, where each tap has `multiplies` matrix instructions per warp."""
    each = len(work.inner.taps) * multiplies
    counts = {len(source.rows) for source in work.sources}
    found = [
        rows
        for rows in (ANY_ROWS if work.lattices or work.crops else ROWS)
        if rows == 1 or (rows * each <= MAX_STEP_CODE and any(count % rows == 0 for count in counts))
    ]
    return tuple(r for i, r in enumerate(found) if r * each >= FEW_IN_STEP or i + 1 == len(found))


def candidates(side: Side, copy: int, item_bytes: int, device: Device, rows: bool = False) -> Iterator[Candidate]:
    """Yields every build that fits the device, with its boxes. `rows`: x was rewritten as rows of channels.

    Where taps reach so far that no halo fits, every tap gets a halo of its own.
    """
    found = None
    for found in of_works(works(side), copy, item_bytes, device, rows):
        yield found
    if found is None:
        yield from of_works([Work(side, 0, apart=True)], copy, item_bytes, device, rows)


def of_works(divided: Iterable[Work], copy: int, item_bytes: int, device: Device, rows: bool) -> Iterator[Candidate]:
    """Yields the builds of some divisions of taps that fit the device, with their boxes."""
    for work in divided:
        for shape in shapes(work, copy, item_bytes):
            for build in builds(work, shape):
                for box in boxes(work, build.tiles_m, build.warps_m):
                    made = Candidate(work, build, box, copy_of_lattice(work, copy), item_bytes, rows)
                    yield from fitting(made, device)


def fitting(found: Candidate, device: Device) -> Iterator[Candidate]:
    """Yields a candidate with as many blocks as fit the device, and with all its weights in shared memory."""
    fit = min(found.blocks_that_fit(device), found.build.blocks)
    if fit > 0:
        yield found if fit == found.build.blocks else replace(found, build=replace(found.build, blocks=fit))
        yield from _split(found, fit, device)
    if found.build.stages == 2 and not found.build.crops:
        yield from _resident(found, device)


def candidates_of(
    build: Build, side: Side, copy: int, item_bytes: int, device: Device, rows: bool
) -> Iterator[Candidate]:
    """Yields one build with each of its boxes that fit the device."""
    work = Work.of(side, build.unrolled, build.apart, build.lattices, build.crops)
    copy = copy_of_lattice(work, copy)
    for box in boxes(work, build.tiles_m, build.warps_m):
        found = Candidate(work, build, box, copy, item_bytes, rows)
        found = found.in_one_wave(device) if build.resident else found
        if found.blocks_that_fit(device) >= build.blocks:
            yield found


def may_stay(work: Work, chunks: int, tap_bytes: int, device: Device) -> bool:
    """Tells whether the weights of a block are few enough that they may all fit shared memory."""
    return chunks * work.least_rows * len(work.inner.taps) * tap_bytes <= device.shared_bytes


def _resident(found: Candidate, device: Device) -> Iterator[Candidate]:
    """Yields the candidate with all its weights in shared memory, if they fit and a block has several tiles."""
    if not may_stay(found.work, found.chunks, found.tap_bytes, device):
        return
    resident = replace(found, build=replace(found.build, resident=True))
    fit = min(resident.blocks_that_fit(device), found.build.blocks)
    if fit > 0:
        several = replace(resident, build=replace(resident.build, blocks=fit)).in_one_wave(device)
        if several.tiles_of_block > 1:
            yield several


def _split(found: Candidate, blocks: int, device: Device) -> Iterator[Candidate]:
    """Yields the candidate with its channels divided among several blocks, if its own blocks leave the GPU idle.

    Only input gradients are divided: nothing follows their sums, neither a bias nor an epilogue.
    """
    problem, room = found.work.side.problem, blocks * device.multiprocessors // found.grid
    if room < 2 or problem.which is not Pass.INPUT_GRAD or not is_dense(found.work.side):
        return
    splits = -(-found.chunks // -(-found.chunks // room))
    if splits > 1 and 4 * splits * found.outputs <= device.workspace_bytes:
        divided = replace(found, build=replace(found.build, splits=splits))
        fit = min(divided.blocks_that_fit(device), blocks)
        if fit > 0:
            yield divided if fit == found.build.blocks else replace(divided, build=replace(divided.build, blocks=fit))
