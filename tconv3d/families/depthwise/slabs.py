"""Describes parts of planes in shared memory (slab.cuh), and counts what threads pay for reading and filling them.

A block has `tiles_h` x `tiles_w` tiles of `tile_h` x `tile_w` positions for each of its channels, one per thread.
Positions are `step_h` and `step_w` elements apart, and the taps of a position read `span_h` x `span_w` elements. This
module knows layouts and banks, but neither passes nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from ...planning.launch import Constants
from ...planning.problem import Problem, Strides, is_channels_last

WARP = 32  # threads
BANKS = 32  # banks of shared memory: neighbouring words of 4 bytes are in neighbouring banks
REGISTERS = 65536  # per multiprocessor
MOST_RESIDENT_THREADS = 2048  # threads of all blocks of a multiprocessor
RESERVED = 1024  # bytes of shared memory that every block has beside its own
WARPS = 8  # warps of a multiprocessor that hide the latency of shared memory
BARRIERS = 0.15  # part of its time that a block alone on a multiprocessor waits at barriers
COPY = 18.4  # bytes per cycle and multiprocessor at an H200's copy bandwidth: 4.27 TB/s, 132, 1.755 GHz
L2 = 2 * COPY  # bytes per cycle and multiprocessor that L2 delivers
SIDES = (1, 2, 3, 4, 6, 8, 12, 16)  # candidates for the tiles of a block along h and w
WASTE = 1.15  # positions that a dimension is rounded up to, over the least possible
QUARTER = 8  # threads of a warp that one 128-byte access of shared memory serves with 16 bytes each
SECTOR = 32  # bytes that L2 reads and writes together
PIECE_BYTES = 16  # bytes of the widest access
# Cycles of a multiprocessor for a store of fewer than 16 bytes to a sector of its own: an H200 takes 2.26 ms for 261
# million floats that threads store one by one.
SMALL_STORE = 2.0
# Instructions of Slab::fill, counted in compiled kernels: before the copies of a thread, for the copy of a part of a
# row, and for the copy of the same part in another plane.
SETUP_INSTRUCTIONS = 35
COPY_INSTRUCTIONS = 13
MORE_INSTRUCTIONS = 5
# Instructions for a piece of 16 bytes of Slab::fetch and of Slab::settle, counted in compiled kernels.
FETCH_INSTRUCTIONS = 34
SETTLE_INSTRUCTIONS = 30


@dataclass(frozen=True)
class Slab:
    """Describes the slab of one tensor: which elements it holds, and how threads read it."""

    last: bool  # channels are neighbours in memory
    item: int  # bytes of an element
    channels: int  # channels of the tensor
    tiles_h: int
    tiles_w: int
    tile_h: int
    tile_w: int
    step_h: int
    step_w: int
    span_h: int
    span_w: int
    first_w: int  # column of the tensor that position 0 reads first
    grain: int  # elements per asynchronous copy
    repeats: int = 1  # tiles along h of a thread
    readers: tuple[int, ...] = (0,)  # channel that each thread of a group reads first; a depthwise group has one
    group: int = 1  # channels of a group
    skew: int = 0  # elements that are left out after the rows of each tile
    channel_skew: int = 0  # elements that are left out after each channel of a contiguous tensor
    raw: bool = False  # planes arrive as they lie in memory, and are shifted into the slab
    own: int = 1  # neighbouring channels of a thread
    down: bool = False  # neighbouring threads have neighbouring tiles along h, also for contiguous tensors
    conflicts: float = 1.0  # accesses of shared memory over their number without bank conflicts

    @property
    def piece(self) -> int:
        return PIECE_BYTES // self.item

    @property
    def fits(self) -> bool:
        """Tells whether every thread's columns begin at a piece, and whole copies fill the channels."""
        if self.last:
            return self.channels % self.grain == 0 and self.channels * self.item % 4 == 0
        return self.tile_w * self.step_w % self.piece == 0

    @property
    def threads(self) -> int:
        """Threads of a block for each tile."""
        return self.owned // self.own

    @property
    def owned(self) -> int:
        """Channels of all threads of a tile: those of the tensor, or pairs of channels of two tensors."""
        return self.channels // self.group * len(self.readers)

    @property
    def before(self) -> int:
        """Columns that are copied before the first column that is read, so that copies are aligned."""
        return 0 if self.last else self.first_w % self.grain

    @property
    def rows(self) -> int:
        return (self.tiles_h * self.repeats * self.tile_h - 1) * self.step_h + self.span_h

    @property
    def cols(self) -> int:
        return self.before + (self.tiles_w * self.tile_w - 1) * self.step_w + self.span_w

    @property
    def rows_read(self) -> int:
        """Rows that a thread reads for one tile."""
        return (self.tile_h - 1) * self.step_h + self.span_h

    @property
    def reads(self) -> int:
        """Columns that a thread reads of each row."""
        return (self.tile_w - 1) * self.step_w + self.span_w

    @property
    def vectors(self) -> int:
        """Loads of a thread per row."""
        return self.reads if self.last else -(-(self.before + self.reads) // self.piece)

    @property
    def piece_stride(self) -> int:
        """Pieces from one thread to the next if that is a power of two of at most 8, else 1."""
        stride = 1 if self.last else self.tile_w * self.step_w // self.piece
        return stride if stride in (1, 2, 4, 8) else 1

    @property
    def pieces(self) -> int:
        """Pieces of a row."""
        if self.last:
            return 1
        pieces = (self.tiles_w - 1) * (self.tile_w * self.step_w // self.piece) + self.vectors
        return -(-pieces // self.piece_stride) * self.piece_stride

    @property
    def pitch(self) -> int:
        return self.cols * self.channels if self.last else self.pieces * self.piece

    @property
    def plane(self) -> int:
        """Elements of a plane: of one channel for contiguous tensors, else of all channels."""
        return self.rows * self.pitch + self.skews * self.skew + self.channel_skew

    @property
    def skews(self) -> int:
        """Places of a plane where elements are left out, after the rows of each tile but the last."""
        return (self.rows - 1) // (self.tile_h * self.step_h)

    def settled(self) -> Slab:
        """Returns the slab with the skews that have the fewest bank conflicts, and their number."""
        between = (0, 1, 2, 4) if self.channels > 1 and not self.last else (0,)
        places = [self.place(lane) for lane in range(WARP)]
        bare, skews, piece = self.rows * self.pitch, self.skews, self.piece
        best: tuple[float, int, int] = (inf, 0, 0)
        for skew, n in product(range(0, 128 // self.item, piece), between):
            conflicts = self._conflicts(places, skew, bare + skews * skew + n * piece)
            best = min(best, (conflicts, skew, n * piece))
            if conflicts == 1.0:
                break  # no skew has fewer, and the others leave out more
        conflicts, skew, channel_skew = best
        return replace(self, skew=skew, channel_skew=channel_skew, conflicts=conflicts)

    @property
    def bytes(self) -> int:
        """Bytes of a plane."""
        elements = (1 if self.last else self.channels) * self.plane
        return -(-elements * self.item // PIECE_BYTES) * PIECE_BYTES

    @property
    def raw_pieces(self) -> int:
        """Pieces that contain the columns of a row wherever it begins; 0 if copies put columns where they belong."""
        return -(-self.cols // self.piece) + 1 if self.raw else 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of a plane as it lies in memory."""
        return self.channels * self.rows * self.raw_pieces * PIECE_BYTES

    @property
    def row_wavefronts(self) -> float:
        """128-byte accesses of shared memory for the loads of one row by a warp."""
        return self.vectors * self.conflicts * (max(1, self.own * self.item // 4) if self.last else WARP // QUARTER)

    @property
    def conversions(self) -> int:
        """Instructions per row that convert elements to float32."""
        return self.reads * self.own if self.item == 2 else 0

    def fill_instructions(self, threads: int, planes: int = 1) -> int:
        """Returns the instructions of a thread that fills as many planes with the other threads of its block."""
        if self.raw:
            return planes * (
                self._line_instructions(threads, self.raw_pieces, FETCH_INSTRUCTIONS)
                + self._line_instructions(threads, self.raw_pieces - 1, SETTLE_INSTRUCTIONS)
            )
        items = self.cols * (self.channels // self.grain) if self.last else -(-self.cols // self.grain)
        width = min(items, threads)
        rows = -(-self.rows // (threads // width))
        copies = COPY_INSTRUCTIONS + MORE_INSTRUCTIONS * (planes - 1)
        return -(-items // width) * (SETUP_INSTRUCTIONS + (1 if self.last else self.channels) * (4 + rows * copies))

    def _line_instructions(self, threads: int, items: int, each: int) -> int:
        """Returns the instructions of a thread that treats as many items of every line of a plane."""
        width = min(items, threads)
        lines = -(-self.channels * self.rows // (threads // width))
        return -(-items // width) * (SETUP_INSTRUCTIONS + lines * each)

    @property
    def traffic(self) -> int:
        """Bytes of whole sectors that the copies of a plane read."""
        if self.last:
            return self.rows * self.cols * -(-self.channels * self.item // SECTOR) * SECTOR
        return self.rows * self.channels * (self.cols * self.item + SECTOR)

    def place(self, lane: int) -> tuple[int, int, int]:
        """Returns what a thread reads first, in a slab without skews: element of a channel, row of tiles, channel."""
        tiles, threads = self.tiles_h * self.tiles_w, self.threads
        if lane >= tiles * threads:
            lane = 0
        thread, tile = (lane % threads, lane // threads) if self.last else divmod(lane, tiles)
        thread *= self.own
        channel = thread // len(self.readers) * self.group + self.readers[thread % len(self.readers)]
        h, w = self.tile_of(tile)
        row = h * self.tile_h * self.step_h * self.pitch
        if self.last:
            return row + w * self.tile_w * self.step_w * self.channels + channel, h, 0
        piece = w * self.tile_w * self.step_w // self.piece
        mixed = piece ^ (piece // 8 % self.piece_stride)
        return row + mixed * self.piece, h, channel

    def tile_of(self, number: int) -> tuple[int, int]:
        """Returns where a tile of a channel lies along h and w, from its number in the order of threads."""
        if self.last or self.down:
            return number % self.tiles_h, number // self.tiles_h
        return divmod(number, self.tiles_w)

    def _conflicts(self, places: Sequence[tuple[int, int, int]], skew: int, plane: int) -> float:
        """Returns the accesses of shared memory per load of a warp over their number without bank conflicts.

        `places` are those of the lanes of a warp in a slab without skews, `plane` the elements of a plane with them.
        """
        firsts = [(at + h * skew + channel * plane) * self.item // 4 for at, h, channel in places]
        # Loads of 16 bytes begin at multiples of 16 bytes, so that each has four banks to itself.
        width = max(1, self.own * self.item // 4) if self.last else 4
        together = WARP // width
        accesses = 0
        for first in range(0, WARP, together):
            loads = [0] * (BANKS // width)
            for start in set(firsts[first : first + together]):
                loads[start // width % (BANKS // width)] += 1
            accesses += max(loads)
        return accesses * together / WARP


def resident(threads: int, registers: int, shared_bytes: int, most_shared_bytes: int) -> int:
    """Returns the blocks that a multiprocessor holds, by threads, registers per thread and shared memory."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    by_memory = (most_shared_bytes + RESERVED) // (shared_bytes + RESERVED)
    return max(1, min(by_registers, by_memory, MOST_RESIDENT_THREADS // threads))


def grains(problem: Problem, strides: Strides, width: int, channels: int) -> list[int]:
    """Returns the possible elements per copy of a tensor, the largest first."""
    item, last = problem.item_bytes, is_channels_last(strides)
    bounds = (channels, *(strides[i] for i in (0, 2, 3, 4))) if last else (width, *strides[:4])
    if not last and strides[4] != 1:
        return [1]
    sizes = [bytes // item for bytes in (16, 8, 4) if bytes >= item]
    return [size for size in sizes if problem.aligned and not any(bound % size for bound in bounds)] or [1]


def shifted(problem: Problem, strides: Strides, grain: int) -> bool:
    """Tells whether lines arrive as they lie in memory, because copies would be 4 bytes or less."""
    return problem.item_bytes == 2 and problem.aligned and strides[4] == 1 and grain * problem.item_bytes <= 4


def sides(needed: int) -> list[int]:
    """Returns candidates for the tiles of a block along a dimension that has `needed` tiles: few of them idle."""
    covered = {n: -(-needed // n) * n for n in SIDES}
    least = min(covered.values())
    return [n for n in SIDES if covered[n] <= WASTE * least]


def block_constants(slab: Slab) -> Constants:
    """Returns the constants that the kernels take under the same names: the tiles of a block, and its main slab."""
    return (
        ("kLast", slab.last),
        ("kChannels", slab.owned),
        ("kTilesH", slab.tiles_h),
        ("kTilesW", slab.tiles_w),
        ("kTileH", slab.tile_h),
        ("kTileW", slab.tile_w),
        ("kGrain", slab.grain),
        ("kBefore", slab.before),
        ("kPieces", slab.pieces),
        ("kRawPieces", slab.raw_pieces),
        ("kPieceStride", slab.piece_stride),
        ("kSkew", slab.skew),
        ("kChannelSkew", slab.channel_skew),
    )
