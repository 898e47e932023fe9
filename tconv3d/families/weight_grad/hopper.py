"""Plans for the weight gradient on Hopper's warpgroup matrix instructions (hopper_weight_grad.cuh).

Chooses which channels and taps a block owns, how its warps share them, the box of positions of a step, and into how
many parts the steps are divided (split-K). The compiled constants depend on the layer and on which of four kinds
(`volume_kind`) the volume is of.

Terms: a word is 32 bits, one float32 or two 16-bit elements; a segment is four words along w; a row of K is eight
segments of x in shared memory; a chunk is four segments, one for each lane of a quad. A sheet is the part of dy that
a block's taps read for one position along d; a plane is one phase of a sheet. A piece is the taps along w of one
launch. A slot is the source and destination of one copy of dy. An item is one chunk for one tile of 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import nsmallest
from itertools import product
from math import inf, prod
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from ...planning import offers, tensor_cores
from ...planning.arguments import per_axis
from ...planning.calibration import Work
from ...planning.geometry import Axis, Geometry, Triple
from ...planning.launch import Constants, Launch
from ...planning.offers import Answer, Wanted
from ...planning.problem import ITEM_BYTES, Device, Pass, Plan, Problem, volume_kind
from ...planning.repertoire import TYPICAL, Repertoire, nearest, searched
from ...planning.scalars import SCALARS
from . import warps as weight_grad_planner
from .arguments import HOPPER_WEIGHT_GRAD, REDUCE_TAPS
from .warps import SEGMENT, wide

ROW_SEGMENTS = 8  # segments of a row of K in shared memory
MAX_SEGMENTS = 128  # most segments of a box
JOB_CHANNELS = 8  # channels that a producer warp copies at a time
MAX_TAPS_W = 8  # most taps along w of one launch; a wider kernel takes several launches
MAX_GROUPS = 12  # most groups of sheets in shared memory
MAX_ROW_TILES = 4
BANKS = 32  # banks of shared memory, one word wide
OTHER_REGISTERS = (18, 22)  # a consumer thread's registers beside sums and operands, with 1 and 2 sets of operands
MIN_EFFICIENCY = 0.25  # least fraction of a tiling's products that belong to real channels and taps
SLICED = 4  # workspace limit for the parts of all slices of a batch, in multiples of `Device.workspace_bytes`
COPYING_IS_WORTH = 1.4  # longest predicted time of word-by-word copies, relative to the products


class Share(NamedTuple):
    """Registers per consumer (multiplying) and per producer (copying) thread, and the warpgroups of each role."""

    consumer: int
    producer: int
    producers: int
    consumers: int = 2

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + self.producers)


# Divisions of the registers, the preferred ones first. No division has more registers in total than the block has at
# launch: a warpgroup that asks for registers that do not exist waits forever.
SHARES = (Share(192, 64, 2), Share(200, 56, 2), Share(224, 56, 1), Share(152, 56, 1, 3))
# The divisions by number of consumer warpgroups, the preferred ones last.
_SHARES_OF = tuple((n, tuple(share for share in SHARES[::-1] if share.consumers == n)) for n in (2, 3))


class Costs(NamedTuple):
    """Costs per multiprocessor, in cycles unless stated otherwise, for choosing between tilings."""

    l2_bytes: float  # bytes per cycle from the L2 cache
    fragments: float  # fraction of the shared-memory cycles of fragment loads for which tensor cores wait
    writes: float  # fraction of the shared-memory cycles of storing x and dy for which tensor cores wait
    item: float  # cycles per item until its operands reach the first product
    alone: float  # additional cycles per item with a single set of operands
    x_row: float  # cycles of a producer warp per row of K
    x_vectors: float  # cycles of a producer warp per job of x copied in 16-byte vectors
    x_words: float  # cycles of a producer warp per job of x copied word by word
    y_block: float  # cycles of a producer warp per block of slots of a plane of dy
    y_line: float  # cycles of a producer warp per line (channel or pair of channels) of a block of slots
    copying: float  # cycles per step of the producers' barriers
    turning: float  # cycles per job of x whose words are reordered in shared memory
    overlap: float  # fraction of the shorter activities' time that is not hidden behind the longest one
    tight: float  # factor on memory time where shared memory has room for one group of sheets in flight
    step: float  # cycles per step of barriers and the first operands
    block: float  # cycles per block of building tables and storing the sums


# VECTORS is fitted to 40 measured times on one H200. WORDS is for copies word by word; its fit is less precise.
VECTORS = Costs(60, 0.46, 0.33, 23, 8, 180, 26, 150, 400, 22, 570, 98, 0.15, 1.1, 190, 20000)
WORDS = Costs(28, 1.0, 1.0, 15, 25, 0, 0, 750, 0, 75, 0, 0, 0.35, 1.25, 250, 8000)
SECTOR_WORDS = 8  # words of a memory sector, the smallest transaction
MIN_PRODUCT_CYCLES = 12.0  # least cycles of a matrix instruction
ADDING_OVERHEAD, ADDING_BYTES = 3500.0, 9.6  # cycles to launch the sum of parts; bytes per cycle and multiprocessor
# A block that writes its sums straight to the result takes RESULT_ELEMENT cycles per element and RESULT_RUN cycles
# per run of adjacent elements; `Costs.block` already includes RESULT_HIDDEN of these cycles.
RESULT_ELEMENT, RESULT_RUN, RESULT_HIDDEN = 0.85, 1.5, 10000.0
ROUGH_BYTES = 28.0  # bytes copied per multiprocessor and cycle, for the rough cost of a candidate


@dataclass(frozen=True)
class Rows:
    """The taps along one dimension that a block owns, and the phase planes of dy that they read."""

    taps: tuple[int, ...]
    offsets: tuple[int, ...]  # per plane: index of the output that the box's first position reads
    planes: tuple[int, ...]  # per tap: index of the plane that it reads
    shifts: tuple[int, ...]  # per tap: distance in its plane between a position and what the tap reads, in positions

    @classmethod
    def of(cls, axis: Axis, taps: tuple[int, ...], align: int = 1) -> Rows:
        """Returns the rows of some taps. With stride 1, planes begin at a multiple of `align` outputs."""
        phases = sorted({axis.phase(t) for t in taps})
        first = {phase: min(axis.shift(t) for t in taps if axis.phase(t) == phase) for phase in phases}
        if axis.stride == 1:
            first = {phase: shift - shift % align for phase, shift in first.items()}
        return cls(
            taps,
            tuple(axis.stride * first[phase] + phase for phase in phases),
            tuple(phases.index(axis.phase(t)) for t in taps),
            tuple(axis.shift(t) - first[axis.phase(t)] for t in taps),
        )

    @cached_property
    def reach(self) -> int:
        return max(self.shifts)


def row_choices(axis: Axis) -> Iterator[tuple[Rows, ...]]:
    """Yields divisions of a dimension's taps among kinds of blocks: all taps together, or each kind some taps of a
    single phase."""
    taps = tuple(range(axis.kernel))
    yield (Rows.of(axis, taps),)
    phases = [axis.taps(phase) for phase in range(axis.stride) if axis.taps(phase)]
    most = max(len(phase) for phase in phases)
    for size in range(1, most + 1):
        pieces = [phase[i : i + size] for phase in phases for i in range(0, len(phase), size)]
        if len(pieces) > 1 and (size == most or most % size == 0 or size == 1):
            yield tuple(Rows.of(axis, piece) for piece in pieces)


@dataclass(frozen=True)
class Planes:
    """How the taps along w read a chunk of phase planes: which words are loaded, and which operands are joined."""

    rows: Rows
    per_word: int
    stride: int  # stride along w: outputs of other phases between the elements of a plane are not copied
    lines = False
    vector = 1  # words per copy
    at_once = 1  # lines of positions per segment

    @property
    def taps(self) -> tuple[int, ...]:
        return self.rows.taps

    @property
    def offsets(self) -> tuple[int, ...]:
        """Per plane, the index of the output that the box's first position reads."""
        return self.rows.offsets

    @cached_property
    def reads(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per tap and matrix instruction of a chunk: plane, first word, and whether the operand straddles words."""
        return tuple(
            tuple((plane, 2 * step + shift // self.per_word, shift % self.per_word) for step in range(2))
            for plane, shift in zip(self.rows.planes, self.rows.shifts, strict=True)
        )

    @cached_property
    def loads(self) -> tuple[tuple[int, int], ...]:
        """Plane and first word of every load; first words are even."""
        found = set()
        for plane, word, odd in (read for tap in self.reads for read in tap):
            found |= {(plane, w - w % 2) for w in range(word, word + 2 + odd)}
        return tuple(sorted(found))

    @cached_property
    def joins(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(sorted({read for tap in self.reads for read in tap if read[1] % 2 or read[2]}))

    def _operand(self, read: tuple[int, int, int]) -> int:
        return -1 - self.joins.index(read) if read in self.joins else self.loads.index(read[:2])

    def line_words(self, segments: int) -> int:
        """Returns how many words of a line of a plane the taps read."""
        return segments * SEGMENT + max(-(-shift // self.per_word) for shift in self.rows.shifts)

    @property
    def vectors(self) -> int:
        """Number of 16-byte loads from shared memory per lane and chunk."""
        return len(self.loads)

    def registers(self, depth: int) -> int:
        """Returns the registers per thread of `depth` sets of operands and of the words that they are joined from."""
        if depth == 1:
            return 4 * (len(self.loads) + len({read for tap in self.reads for read in tap}))
        # TF32 builds with joined operands get 6 more registers: with fewer, products are serialized.
        return 4 * depth * (len(self.loads) + len(self.joins)) + (6 if self.per_word == 1 and self.joins else 0)

    def own_words(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Returns, per load and word, a bit mask of the elements that own taps read: 1 for the first element, 2 for
        the second 16-bit element."""
        found = {load: [0, 0] for load in self.loads}
        for tap, plane, shift in zip(self.taps, self.rows.planes, self.rows.shifts, strict=True):
            for element in range(shift, shift + SEGMENT * self.per_word) if axis.is_own(tap) else ():
                word, half = divmod(element, self.per_word)
                found[plane, word - word % 2][word % 2] |= 1 << half
        return tuple(tuple(words) for words in found.values())

    @property
    def constants(self) -> Constants:
        return (
            ("kLoads", len(self.loads)),
            ("kLoadPlane", tuple(plane for plane, _ in self.loads)),
            ("kLoadWord", tuple(word for _, word in self.loads)),
            ("kJoins", len(self.joins)),
            ("kJoinPlane", tuple(plane for plane, _, _ in self.joins)),
            ("kJoinWord", tuple(word for _, word, _ in self.joins)),
            ("kJoinOdd", tuple(odd for _, _, odd in self.joins)),
            ("kOperandOf", tuple(tuple(self._operand(read) for read in tap) for tap in self.reads)),
        )


@dataclass(frozen=True)
class Lines:
    """How the taps along w read a chunk of lines of dy as they lie in memory, with all phases side by side."""

    axis: Axis
    taps: tuple[int, ...]
    per_word: int
    vector: int  # words per copy
    at_once: int = 1  # lines of positions per segment
    lines = True

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Index of the output where a line begins: the start of a vector at or before the first tap's output."""
        first = min(t * self.axis.dilation - self.axis.padding for t in self.taps)
        return (first - first % (self.vector * self.per_word),)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Per tap, the distance in elements from the line's start to what the tap reads for the first position."""
        return tuple(t * self.axis.dilation - self.axis.padding - self.offsets[0] for t in self.taps)

    @property
    def _positions(self) -> int:
        """Positions per lane, chunk and line."""
        return SEGMENT * self.per_word // self.at_once

    @cached_property
    def loads(self) -> tuple[tuple[int, int], ...]:
        """Line and first word of every 16-byte vector that a lane loads per channel."""
        vectors = sorted({word // 4 * 4 for word in self._words})
        return tuple(product(range(self.at_once), vectors))

    @cached_property
    def _words(self) -> set[int]:
        """Words of a line that the taps read for a lane's positions."""
        read = {start + self.axis.stride * i for start in self.starts for i in range(self._positions)}
        return {element // self.per_word for element in read}

    @cached_property
    def joins(self) -> tuple[tuple[int, int], ...]:
        """Line and first element of every operand."""
        return tuple(sorted({self._operand(start, step) for start in self.starts for step in range(2)}))

    def _operand(self, start: int, step: int) -> tuple[int, int]:
        """Returns line and first element of the operand of one matrix instruction, which uses half a segment."""
        return (step, start) if self.at_once == 2 else (0, start + step * 2 * self.per_word * self.axis.stride)

    def line_words(self, segments: int) -> int:
        """Returns how many words of a line the taps read, rounded up to whole vectors."""
        last = max(self.starts) + self.axis.stride * (segments * self._positions - 1)
        return -(-(last // self.per_word + 1) // self.vector) * self.vector

    @property
    def vectors(self) -> int:
        return 2 * len(self.loads)

    def registers(self, depth: int) -> int:
        """Returns the registers per thread of `depth` sets of operands and of the words that they are joined from.

        With two lines per segment only the words that taps read are counted, since the others are not loaded.
        """
        words = 4 * len(self.loads) if self.at_once == 1 else len(self._words) * self.at_once
        if depth == 1:
            return 4 * len(self.joins) + 2 * words
        # TF32 builds with more than 4 taps at stride 1 get 12 more registers: with fewer, products are serialized.
        many = 12 if len(self.taps) > 4 and self.axis.stride == 1 and self.per_word == 1 else 0
        return 8 * len(self.joins) + words + 4 + many

    def own_words(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        found = {load: [0, 0, 0, 0] for load in self.loads}
        for tap, start in zip(self.taps, self.starts, strict=True):
            for i, line in product(range(self._positions) if axis.is_own(tap) else (), range(self.at_once)):
                word, half = divmod(start + axis.stride * i, self.per_word)
                found[line, word // 4 * 4][word % 4] |= 1 << half
        return tuple(tuple(words) for words in found.values())

    @property
    def constants(self) -> Constants:
        place = {operand: -1 - i for i, operand in enumerate(self.joins)}
        return (
            ("kLoads", len(self.loads)),
            ("kLoadPlane", tuple(line for line, _ in self.loads)),
            ("kLoadWord", tuple(word for _, word in self.loads)),
            ("kJoins", len(self.joins)),
            ("kJoinPlane", tuple(line for line, _ in self.joins)),
            ("kJoinElement", tuple(element for _, element in self.joins)),
            ("kOperandOf", tuple(tuple(place[self._operand(start, s)] for s in range(2)) for start in self.starts)),
        )


Words: TypeAlias = Planes | Lines


@dataclass(frozen=True)
class Layer:
    """The properties of a layer and its tensors that the kernel is compiled for, besides the tiling."""

    geometry: Geometry
    dtype: str
    elements_x: bool  # whether 16-bit elements of x are copied one by one
    vectors_x: bool  # whether x is copied in 16-byte segments
    elements_y: bool  # whether 16-bit elements of dy are copied one by one
    vector_y: int  # most words of dy per copy; 0 if lines of dy are not whole words
    unit_c_x: bool  # whether channels of x are contiguous
    unit_c_y: bool  # whether channels of dy are contiguous
    at_once: int = 1  # lines of x that are treated as one

    @property
    def slow(self) -> bool:
        """Whether words are copied one by one, each from an address of its own."""
        return self.elements_x or self.unit_c_x or self.unit_c_y

    def costs(self, piece: Words) -> Costs:
        return WORDS if self.slow or (self.elements_y and not piece.lines) else VECTORS

    def turners(self, share: Share) -> int:
        """Returns how many producer warps reorder x in shared memory; the other producer warps copy."""
        return 1 if self.slow else 3 * share.producers // 2

    @property
    def per_word(self) -> int:
        return 4 // ITEM_BYTES[self.dtype]

    def lines(self, taps: tuple[int, ...]) -> Lines:
        axis, sizes = self.geometry.axes[2], (size for size in (4, 2, 1) if size <= self.vector_y)
        ways = (Lines(axis, taps, self.per_word, size, self.at_once) for size in sizes)
        return min(ways, key=lambda lines: lines.vectors if lines.at_once == 1 else -lines.vector)

    def words(self, taps: tuple[int, ...]) -> Words:
        axis = self.geometry.axes[2]
        # Lines of dy are copied as they lie in memory if the taps read all phases.
        if axis.stride > 1 and self.vector_y and len({axis.phase(t) for t in taps}) == axis.stride:
            return self.lines(taps)
        return Planes(Rows.of(axis, taps, self.plane_start), self.per_word, axis.stride)

    @property
    def plane_start(self) -> int:
        """Number of dy elements that the start of a plane is a multiple of, if the stride along w is 1."""
        return 1 if self.elements_y else self.per_word

    def takes(self, piece: Words) -> bool:
        """Tells whether x and dy can be copied the way that a tiling's taps along w read them."""
        if piece.at_once != self.at_once:
            return False
        if piece.lines:
            return piece.vector <= self.vector_y
        return self.geometry.stride[2] > 1 or not any(start % self.plane_start for start in piece.offsets)


@dataclass(frozen=True)
class Tiling:
    """How blocks and warps divide channels and taps. All fields are compiled in."""

    columns: int  # input channels of a block
    out_tile: int  # output channels of a block
    rows_d: tuple[Rows, ...]  # taps along d of every kind of block
    rows_h: tuple[Rows, ...]  # taps along h of every kind of block
    pieces: tuple[Words, ...]  # taps along w of every launch
    depth: int  # sets of fragments
    share: Share
    stages: int = 3

    @cached_property
    def block_rows(self) -> int:
        """Most pairs of a tap along d and a tap along h that a block owns."""
        return max(len(rows.taps) for rows in self.rows_d) * max(len(rows.taps) for rows in self.rows_h)

    @cached_property
    def row_tiles(self) -> int:
        return -(-self.block_rows * (self.out_tile // 2) // (32 * self.share.consumers))

    @cached_property
    def planes(self) -> tuple[int, int, int]:
        w = max(len(piece.offsets) for piece in self.pieces)
        return max(len(r.offsets) for r in self.rows_d), max(len(r.offsets) for r in self.rows_h), w

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Largest shifts of taps along d and along h, in positions."""
        return max(rows.reach for rows in self.rows_d), max(rows.reach for rows in self.rows_h)

    @property
    def sides(self) -> int:
        """Channels interleaved in a line of dy in shared memory."""
        return 1 if self.pieces[0].lines else 2

    @property
    def lines(self) -> int:
        """Lines of dy in shared memory per line of a sheet: channels, or pairs of channels."""
        return self.out_tile // self.sides

    def kinds(self, g: Geometry) -> int:
        """Returns the number of kinds of blocks, which together own all channels and all taps along d and h."""
        channels = -(-g.in_per_group // self.columns) * -(-g.out_per_group // self.out_tile)
        return g.groups * channels * len(self.rows_d) * len(self.rows_h)

    @property
    def elements(self) -> int:
        """Elements of the weight that a block owns."""
        return self.columns * self.out_tile * self.block_rows * max(len(piece.taps) for piece in self.pieces)

    @property
    def sums(self) -> int:
        """Accumulator registers per consumer thread."""
        return self.row_tiles * max(len(piece.taps) for piece in self.pieces) * self.columns // 2

    def __str__(self) -> str:
        d, h = (max(len(rows.taps) for rows in kinds) for kinds in (self.rows_d, self.rows_h))
        consumers = self.share.consumers
        w = " + ".join(str(len(piece.taps)) for piece in self.pieces)
        return (
            f"{consumers} x {self.row_tiles} x 64 rows x {self.columns} columns, blocks of {self.out_tile} "
            f"outputs x {d} x {h} x {w} taps{', fragments ahead' if self.depth == 2 else ''}"
        )


@dataclass(frozen=True)
class Box(weight_grad_planner.Box):
    """The box of positions of one step."""

    @property
    def k_rows(self) -> int:
        return -(-self.segments // ROW_SEGMENTS)


@dataclass(frozen=True)
class Contents:
    """The sizes in shared memory of a tiling with a box that do not depend on padding against bank conflicts."""

    tiling: Tiling
    box: Box

    @cached_property
    def lines(self) -> int:
        return self.box.h * self.tiling.pieces[0].at_once + self.tiling.reach[1]

    @cached_property
    def line_words(self) -> int:
        return max(piece.line_words(self.box.w) for piece in self.tiling.pieces)

    @property
    def segment_words(self) -> int:
        """Words of dy in shared memory from one segment to the next."""
        piece = self.tiling.pieces[0]
        return SEGMENT * (piece.axis.stride if isinstance(piece, Lines) else 2)

    @cached_property
    def ahead(self) -> int:
        return -(-self.tiling.reach[0] // self.box.d)

    @cached_property
    def slots(self) -> int:
        """Copies that bring one channel (or pair) of dy at one index along d."""
        _, h, w = self.tiling.planes
        return h * self.lines * w * self.line_words // self.tiling.pieces[0].vector

    @property
    def table_planes(self) -> int:
        """Planes along d whose slots are in the table: small planes are copied several at a time."""
        return self.box.d * self.tiling.planes[0] if self.tiling.pieces[0].at_once > 1 else 1

    @cached_property
    def beside(self) -> int:
        """Bytes of shared memory for stages of x, tables and barriers: all but the groups of sheets."""
        stages = self.tiling.stages * self.box.k_rows * self.tiling.columns * 128
        tables = 16 * self.slots * self.table_planes + 16 * self.box.k_rows * ROW_SEGMENTS
        return stages + tables + 8 * 3 * self.tiling.stages

    def group_bytes(self, pair_pitch: int) -> int:
        """Returns the bytes of a group of sheets and its two barriers."""
        return 4 * self.box.d * self.tiling.lines * pair_pitch + 8 * 2

    def groups(self, pair_pitch: int, room: int) -> int:
        """Returns how many groups of sheets fit, at most `ahead` + 3, or 0 if fewer than `ahead` + 2 fit: a step
        reads `ahead` + 1 groups while at least one is in flight."""
        fitting = (room - self.beside) // self.group_bytes(pair_pitch)
        return min(fitting, self.ahead + 3, MAX_GROUPS) if fitting >= self.ahead + 2 <= MAX_GROUPS else 0

    def padded(self, room: int, pads: Iterable[int] = (0,), skews: Iterable[int] = (0,)) -> Iterator[Buffers]:
        """Yields the buffers that fit, for lines padded by `pads` words and pairs padded by `skews` words."""
        sides, planes = self.tiling.sides, self.tiling.planes
        multiple = 4 // sides
        for pad in pads:
            line_pitch = -(-self.line_words // multiple) * multiple + pad
            # Planes of different phases along w are 16 of the 32 banks apart (8 words of each channel of a pair):
            # words of two planes never share a bank.
            plane_pitch = self.lines * line_pitch
            plane_pitch += (8 - plane_pitch) % 16 if planes[2] > 1 else 0
            pair_pitch = -(-sides * prod(planes) * plane_pitch // 4) * 4
            for skew in skews:
                if groups := self.groups(pair_pitch + skew, room):
                    yield Buffers(self, line_pitch, plane_pitch, pair_pitch + skew, groups)


@dataclass(frozen=True)
class Buffers:
    """Shared memory of a tiling with a box. Pitches are in words and include padding against bank conflicts."""

    contents: Contents
    line_pitch: int
    plane_pitch: int
    pair_pitch: int
    groups: int

    @property
    def tiling(self) -> Tiling:
        return self.contents.tiling

    @property
    def box(self) -> Box:
        return self.contents.box

    @property
    def bytes(self) -> int:
        return self.contents.beside + self.groups * self.contents.group_bytes(self.pair_pitch)

    @property
    def conflicts(self) -> float:
        """Average number of a quarter-warp's loads of dy (two pairs, four segments) that share a bank; 1 is ideal."""
        tiling = self.tiling
        line = tiling.sides * tiling.pieces[0].at_once * self.line_pitch
        pitches = (tiling.lines * self.pair_pitch, line, self.contents.segment_words, self.pair_pitch)
        return _conflicts(self.box, *(pitch % BANKS for pitch in pitches))


@lru_cache(maxsize=65536)
def _conflicts(box: Box, sheet: int, line: int, segment: int, pair: int) -> float:
    """Computes `Buffers.conflicts` from pitches modulo the number of banks, which makes cache hits frequent."""
    total, chunks = 0, range(0, box.segments, 4)
    for chunk in chunks:
        loads = [0] * (BANKS // 4)
        for index in range(chunk, min(chunk + 4, box.segments)):
            row, w = divmod(index, box.w)
            d, h = divmod(row, box.h)
            place = d * sheet + h * line + w * segment
            for bank in (place, place + pair):
                loads[bank // 4 % (BANKS // 4)] += 1
        total += max(loads)
    return total / len(chunks)


def buffers(tiling: Tiling, box: Box, room: int) -> Buffers | None:
    """Returns the buffers with the padding that causes the fewest bank conflicts; None if nothing fits."""
    pads = (0,) if box.w % 4 == 0 else range(0, 16, 4 // tiling.sides)
    best, fewest = None, inf
    for made in Contents(tiling, box).padded(room, pads, range(0, 32, 4)):
        conflicts = made.conflicts
        if conflicts < fewest:
            best, fewest = made, conflicts
            if fewest == 1.0:
                break
    return best


# ---- Predicted times in cycles per multiprocessor.


@dataclass(frozen=True)
class StepWork:
    """Predicted cycles of the activities of one step of one launch."""

    products: float  # cycles of tensor cores, with their waits for shared memory
    copying: float  # cycles of the copying producer warps
    turning: float  # cycles of the producer warps that reorder x
    memory: float  # cycles of transfers from the L2 cache
    overlap: float  # fraction of the shorter activities' time that is not hidden behind the longest one
    overhead: float  # cycles of barriers and the first operands

    @property
    def cycles(self) -> float:
        parts = (self.products, self.copying, self.turning, self.memory)
        return max(parts) + self.overlap * (sum(parts) - max(parts)) + self.overhead

    @property
    def coming(self) -> float:
        """Cycles to bring a group of sheets before the first step, which no products hide."""
        return max(self.copying, self.memory)


def step_work(layer: Layer, made: Buffers, piece: Words, conflicts: float = 0.0) -> StepWork:
    """Predicts one step. `conflicts`, if not 0, replaces `made.conflicts`."""
    contents, tiling, box = made.contents, made.tiling, made.box
    share, costs = tiling.share, layer.costs(piece)
    items = 2 * box.k_rows * share.consumers * tiling.row_tiles
    planes = box.d * max(len(rows.offsets) for rows in tiling.rows_d)
    words_x, words_y = box.k_rows * 32 * tiling.columns, planes * contents.slots * piece.vector * tiling.out_tile
    turned = costs.turning > 0 and (layer.vectors_x or layer.per_word == 1)
    stride = 1 if isinstance(piece, Lines) else piece.stride
    phases = len(piece.offsets)  # phases that taps read; unused phases lie between them in memory
    sectors = words_x * (1 + SECTOR_WORDS / (box.w * SEGMENT))  # a line may begin anywhere in a sector
    sectors += words_y * stride / phases * (1 + SECTOR_WORDS / (contents.line_words * stride))
    return StepWork(
        products=items * item_cycles(costs, piece, tiling.columns, tiling.depth, conflicts or made.conflicts)
        + costs.writes * ((3 if turned else 1) * words_x + words_y) / 32,
        copying=_copy_cycles(layer, contents, piece, planes) / (4 * share.producers - layer.turners(share))
        + costs.copying,
        turning=costs.turning * box.k_rows * tiling.columns / JOB_CHANNELS / layer.turners(share) if turned else 0.0,
        memory=4 * sectors / costs.l2_bytes * (costs.tight if made.groups < contents.ahead + 3 else 1.0),
        overlap=costs.overlap,
        overhead=costs.step,
    )


def _copy_cycles(layer: Layer, made: Contents, piece: Words, planes: int) -> float:
    """Returns the cycles that one producer warp alone would take to copy a step's x and dy."""
    costs, jobs_x = layer.costs(piece), made.box.k_rows * made.tiling.columns / JOB_CHANNELS
    together = made.table_planes
    blocks_y = planes // together * -(-made.slots * together // (32 if piece.lines else 16))
    x = costs.x_row * made.box.k_rows + jobs_x * (costs.x_vectors if layer.vectors_x else costs.x_words)
    elements = 4 / 3 if layer.elements_y and not (layer.unit_c_y or piece.lines) else 1.0
    return x + elements * blocks_y * (costs.y_block + costs.y_line * made.tiling.lines)


def item_cycles(costs: Costs, piece: Words, columns: int, depth: int, conflicts: float = 1.0) -> float:
    """Returns the cycles of a chunk of a row tile. Tensor cores wait for some of the time in which fragments are
    loaded, since both read shared memory."""
    products = 2 * len(piece.taps) * max(columns / 2, MIN_PRODUCT_CYCLES)
    loads = costs.fragments * 16 * piece.vectors * conflicts
    return products + loads + costs.item + (costs.alone if depth == 1 else 0.0)


def boxes(size: Triple, per_word: int) -> Iterator[Box]:
    """Yields boxes of whole lines or parts of lines for a volume of `size`. For small volumes a box may have some
    lines of several planes along d, which may fill rows of K better than all lines of one plane."""
    depth, height, width = (max(extent, 1) for extent in size)
    whole, small = -(-width // (SEGMENT * per_word)), prod(size) < SMALL
    for w in sorted({whole if whole <= 16 else 0, -(-whole // 2), 8, 4} - {0}):
        if w > whole:
            continue
        for h in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32):
            for d in (1, 2, 4, 8):
                if (h > height or d > depth) and h * d > 1:
                    continue
                if d > 1 and h < height and not small:
                    continue
                if w * h * d <= MAX_SEGMENTS:
                    yield Box(d, h, w)


def box_cost(layer: Layer, made: Buffers, size: Triple, conflicts: float = 0.0) -> float:
    """Predicts the cycles that the blocks of one kind take in total for one batch item of a volume."""
    d, h, w = made.box.count(size, layer.per_word)
    works = [step_work(layer, made, piece, conflicts) for piece in made.tiling.pieces]
    return h * w * sum(d * work.cycles + made.contents.ahead * work.coming for work in works)


@lru_cache(maxsize=4096)
def best_buffers(layer: Layer, tiling: Tiling, size: Triple, room: int) -> Buffers | None:
    # A box without padding and without bank conflicts gives a lower bound of the cost of the box.
    bare = [made for box in boxes(size, layer.per_word) for made in Contents(tiling, box).padded(room)]
    least = {made.box: box_cost(layer, made, size, conflicts=1.0) for made in bare}
    best, cost = None, inf
    for box in sorted(least, key=lambda box: least[box]):
        if least[box] > cost:
            break
        made = buffers(tiling, box, room)
        if made is not None and box_cost(layer, made, size) < cost:
            best, cost = made, box_cost(layer, made, size)
    return best


SMALL = 4096  # positions of a batch item below which a volume counts as small
NOMINAL = (64, 64, 64)  # size of the large volume whose best tilings are searched for every volume
CHOICES = (80, 60, 12, 12)  # tilings searched per `volume_kind`: small volumes are harder to divide evenly
AS_GOOD = 1.03  # ratio of predicted cycles to the least up to which tilings count as equally fast
NOMINAL_BOXES = tuple(Box(1, h, w) for h in (2, 3, 4, 6, 8, 16) for w in (4, 8))


@lru_cache(maxsize=1024)
def tilings(layer: Layer, device: Device, count: int = 1) -> tuple[Tiling, ...]:
    """Returns the `count` tilings with the least predicted cycles for the NOMINAL volume, the fastest first."""
    costs: list[tuple[float, Tiling]] = []
    for _, _, tiling in nsmallest(max(24, 2 * count), _candidates(layer)):
        made = [found for box in NOMINAL_BOXES if (found := buffers(tiling, box, device.shared_bytes))]
        if made:
            each = min(box_cost(layer, m, NOMINAL) for m in made)
            costs.append((each * tiling.kinds(layer.geometry), tiling))
    return tuple(tiling for _, tiling in sorted(costs, key=itemgetter(0))[:count])


def _pieces(layer: Layer) -> Iterator[tuple[Words, ...]]:
    axis = layer.geometry.axes[2]
    count = -(-axis.kernel // MAX_TAPS_W)
    size = -(-axis.kernel // count)
    whole = tuple(
        layer.words(tuple(range(first, min(first + size, axis.kernel)))) for first in range(0, axis.kernel, size)
    )
    if len({(piece.lines, piece.vector) for piece in whole}) > 1:  # The last piece lacks a phase.
        whole = tuple(replace(layer, vector_y=0).words(piece.taps) for piece in whole)
    yield whole
    if axis.stride == 1 and count == 1 and layer.vector_y > 1:
        yield (layer.lines(whole[0].taps),)
    phases = [axis.taps(phase) for phase in range(axis.stride) if axis.taps(phase)]
    if 1 < len(phases) <= 4 and axis.kernel > len(phases) and count == 1 and not whole[0].lines:
        yield tuple(layer.words(taps) for taps in phases)


def _divisions(channels: int, multiple: int, most: int) -> list[int]:
    """Returns the tile sizes up to `most`, multiples of `multiple`, that divide channels evenly."""
    units = -(-channels // multiple)
    return sorted({size for parts in range(1, units + 1) if (size := -(-units // parts) * multiple) <= most})


def _candidates(layer: Layer) -> Iterator[tuple[float, int, Tiling]]:
    """Yields tilings that fit the registers, each after a rough cost per position, without halos, and a unique number
    that breaks ties."""
    g, number = layer.geometry, 0
    channels = tuple(product(_divisions(g.in_per_group, 8, 256), _divisions(g.out_per_group, 2, 256)))
    for pieces, rows_d, rows_h in product(_pieces(layer), row_choices(g.axes[0]), row_choices(g.axes[1])):
        taps = max(len(piece.taps) for piece in pieces)
        fragments = [max(piece.registers(depth) for piece in pieces) + OTHER_REGISTERS[depth - 1] for depth in (1, 2)]
        rows = max(len(r.taps) for r in rows_d) * max(len(r.taps) for r in rows_h)
        kinds = g.groups * len(rows_d) * len(rows_h)
        planes = prod(max(len(r.offsets) for r in kinds) for kinds in (rows_d, rows_h, pieces))
        planes *= g.stride[2] if pieces[0].lines else 1
        useful = g.in_channels * g.out_per_group * g.kernel[0] * g.kernel[1]
        for columns, out_tile in channels:
            blocks = kinds * -(-g.in_per_group // columns) * -(-g.out_per_group // out_tile)
            copied = 64 * (columns + 1.3 * out_tile * planes) / ROUGH_BYTES
            for row_tiles, depth, share in _shares(rows * (out_tile // 2), taps * columns // 2, fragments):
                if share.consumers > 2 and (layer.per_word == 2 or layer.slow):
                    continue  # Two consumer warpgroups already saturate shared memory or the producers.
                tiles = share.consumers * row_tiles
                if useful < MIN_EFFICIENCY * blocks * columns * 64 * tiles:
                    continue
                items = [tiles * item_cycles(layer.costs(piece), piece, columns, depth) for piece in pieces]
                cost = sum(max(item, copied) + 0.1 * copied for item in items)
                number += 1
                yield cost * blocks, number, Tiling(columns, out_tile, rows_d, rows_h, pieces, depth, share)


def _shares(pairs: int, sums: int, fragments: list[int]) -> Iterator[tuple[int, int, Share]]:
    """Yields row tiles per warpgroup, sets of operands and register shares for `pairs` rows of two channels each."""
    for consumers, shares in _SHARES_OF:
        row_tiles = -(-pairs // (32 * consumers))
        if row_tiles > MAX_ROW_TILES:
            continue
        needs = [held + row_tiles * (sums + 2) for held in fragments]
        fits = [(depth, share) for depth, need in enumerate(needs, 1) for share in shares if need <= share.consumer]
        # For each number of producer warpgroups, the most sets of operands that fit are taken.
        ways = {share.producers: (depth, share) for depth, share in fits}
        yield from ((row_tiles, depth, share) for depth, share in ways.values())


# ---- The bias gradient, which the same launches compute.


def _bias_slots(axis: Axis, kinds: tuple[Rows, ...], step: int) -> tuple[tuple[int, ...], ...]:
    """Returns, per kind of block and tap, the first slot of the tap's phase among a channel's partial sums; -1 for a
    tap that is not an own tap."""
    most = max(len(rows.taps) for rows in kinds)
    of = {tap: axis.phase(tap) * step for tap in axis.own_taps}
    return tuple(tuple(of.get(t, -1) for t in rows.taps) + (-1,) * (most - len(rows.taps)) for rows in kinds)


def _bias_constants(p: Problem, tiling: Tiling, piece: Words) -> Constants:
    if not p.bias:
        return (("kBias", False),)
    d, h, w = p.geometry.axes
    return (
        ("kBias", True),
        ("kBiasSlots", bias_slots(p.geometry, tiling)),
        ("kBiasSlotD", _bias_slots(d, tiling.rows_d, h.stride)),
        ("kBiasSlotH", _bias_slots(h, tiling.rows_h, 1)),
        ("kBiasSlotW", tiling.pieces.index(piece) * d.stride * h.stride),
        ("kBiasWords", piece.own_words(w)),
    )


def bias_slots(g: Geometry, tiling: Tiling) -> int:
    """Returns how many sums per output channel the blocks with one part of the positions and one tile of input
    channels write: one for each row of own taps."""
    return len(tiling.pieces) * g.stride[0] * g.stride[1]


# ---- The interface of the family to the planner.


def _vector(p: Problem, strides: tuple[int, ...], width: int) -> int:
    """Returns the words of a load that never straddles the end of a line; 0 for 16-bit elements one by one."""
    per_word = 4 // p.item_bytes
    for words in (4, 2, 1):
        if p.aligned and strides[4] == 1 and not any(v % (words * per_word) for v in (*strides[:4], width)):
            return words
    return 1 if per_word == 1 else 0


def _layer(p: Problem) -> Layer:
    x, y = _vector(p, p.input, p.input_size[2]), _vector(p, p.output, p.output_size[2])
    elements_y = y == 0 or (p.item_bytes == 2 and p.geometry.stride[2] > 1)
    unit_c_x, unit_c_y = (strides[1] == 1 and strides[4] != 1 for strides in (p.input, p.output))
    y = y if p.output[4] == 1 else 0
    layer = Layer(p.geometry, p.dtype, x == 0, x == SEGMENT, elements_y, y, unit_c_x, unit_c_y)
    (_, height, width), half = p.input_size, SEGMENT * layer.per_word // 2
    if width != half or height % 2 or p.input[3:] != (half, 1) or wide(p, MAX_SEGMENTS):
        return layer
    twice = replace(layer, vectors_x=_vector(p, as_walked(p, 2)[1], 2 * width) == SEGMENT, at_once=2)
    in_lines = all(piece.lines for pieces in _pieces(twice) for piece in pieces)
    return twice if in_lines and twice.vectors_x else layer


def as_walked(p: Problem, at_once: int) -> tuple[Triple, tuple[int, ...]]:
    """Returns the size and strides of x with `at_once` adjacent lines treated as one."""
    depth, height, width = p.input_size
    return (depth, height // at_once, width * at_once), (*p.input[:3], at_once * p.input[3], p.input[4])


def why_not(problem: Problem, device: Device) -> str | None:
    p, g = problem, problem.geometry
    if p.which is not Pass.WEIGHT_GRAD:
        return f"computes weight gradients, not the pass {p.which.value}"
    if p.bias and not g.own_taps_cover:
        return "no set of taps reads every output once, as a bias's gradient needs it"
    if refusal := tensor_cores.why_not(p, device, tensor_cores.WARPGROUP):
        return refusal
    if any(size > 2**20 for size in p.input_size) or p.batch * max(p.input_size) >= 2**30:
        return "the volume is too long"
    if any(axis.kernel * axis.dilation + axis.padding + 128 * axis.stride > 2**14 for axis in g.axes):
        return "the taps reach too far"
    layer = _layer(p)
    size, _ = as_walked(p, layer.at_once)
    found = tiling_of(layer, device, p.batch, size)
    if found is None and next(_candidates(layer), None) is None:
        return "no tiling has enough products that count and few enough registers"
    made = best_buffers(layer, found, size, device.shared_bytes) if found else None
    if made is None:
        return "the taps reach too far for shared memory"
    works = [step_work(layer, made, piece) for piece in made.tiling.pieces]
    products, copying = sum(work.products for work in works), sum(work.copying for work in works)
    if layer.costs(made.tiling.pieces[0]) is WORDS and COPYING_IS_WORTH * products < copying:
        return "copying operands that are not words along w would take longer than the products"
    return None


def plan(problem: Problem, device: Device, slices: int = 1) -> Plan:
    """Returns the plan. With several `slices`, the problem is one of so many equal slices of the batch: each slice
    has launches of its own, and one launch adds the partial sums of all slices."""
    layer = _layer(problem)
    size, _ = as_walked(problem, layer.at_once)
    tiling = tiling_of(layer, device, problem.batch, size)
    made = best_buffers(layer, tiling, size, device.shared_bytes) if tiling else None
    assert made is not None, "plan() of a problem that why_not() refuses"
    return plan_buffers(problem, device, made, slices)


def cycles(problem: Problem, device: Device) -> float:
    """Predicts the cycles of all launches."""
    layer = _layer(problem)
    size, _ = as_walked(problem, layer.at_once)
    tiling = tiling_of(layer, device, problem.batch, size)
    assert tiling is not None, "cycles() of a problem that why_not() refuses"
    return _tiling_cycles(layer, tiling, problem.batch, size, device)


PASSES = (Pass.WEIGHT_GRAD,)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    ask = "hopper_weight_grad", wanted, device, why_not, work, plan
    return [*offers.one_by_one(PASSES, *ask), *offers.weight_with_bias(*ask)]


def work(problem: Problem, device: Device) -> Work:
    """Returns the predicted work of the plan's launches."""
    return Work(2, cycles(problem, device))


def plan_tiling(p: Problem, device: Device, tiling: Tiling) -> Plan:
    """Returns the plan for a given tiling, so that benchmarks can compare tilings."""
    layer = _layer(p)
    made = best_buffers(layer, tiling, as_walked(p, layer.at_once)[0], device.shared_bytes)
    assert made is not None, "plan() of a problem that why_not() refuses"
    return plan_buffers(p, device, made)


def plan_buffers(p: Problem, device: Device, made: Buffers, slices: int = 1) -> Plan:
    g, layer, tiling = p.geometry, _layer(p), made.tiling
    count = _count(g)
    splits = _splits(layer, made, p.batch, as_walked(p, layer.at_once)[0], device, slices)
    direct = splits == slices == 1 and _direct(p, device, tiling)
    parts = 0 if direct else slices * splits
    own_bias_parts = splits * -(-g.in_per_group // tiling.columns) * bias_slots(g, tiling) if p.bias else 0
    bias_parts = slices * own_bias_parts
    mains = tuple(_main(p, layer, made, piece, splits, direct) for piece in tiling.pieces)
    regions = [("bias_parts", 4 * parts * count)] if p.bias else []
    if slices > 1:
        mains = tuple(_of_slice(main, i) for i in range(slices) for main in mains)
        regions += [(f"workspace {i}", 4 * i * splits * count) for i in range(slices)]
    if slices > 1 and p.bias:
        first, step = 4 * parts * count, 4 * own_bias_parts * g.out_channels
        regions += [(f"bias_parts {i}", first + i * step) for i in range(slices)]
    sums = (_sum_of_parts(p, device, tiling.kinds(g), parts, bias_parts),) if parts or p.bias else ()
    box = made.box
    tile = f"{tiling}, steps of {box.d} x {box.h} lines of {box.w * SEGMENT} words, {splits} parts"
    return Plan(
        "hopper_weight_grad",
        "positions as K on warpgroup tensor cores",
        (*mains, *sums),
        4 * (parts * count + bias_parts * g.out_channels),
        tile,
        tuple(regions),
    )


def _of_slice(main: Launch, index: int) -> Launch:
    """Returns the launch for one slice of the batch, with workspace regions of its own for its partial sums."""
    own = {name: f"{name} {index}" for name in ("workspace", "bias_parts")}
    return replace(main, pointers=tuple(own.get(name, name) for name in main.pointers))


def _slices(device: Device, kinds: int) -> int:
    """Returns how many warps share the partial sums of an element: more where few kinds of blocks share the GPU,
    since there are many parts then.

    The exact number of parts is not used: it depends on the volume, and a compiled constant must not.
    """
    return max(slices for slices in (1, 2, 4, 8) if slices == 1 or 8 * slices <= device.multiprocessors // kinds)


def _result_bytes(tiling: Tiling) -> int:
    """Returns the bytes of shared memory through which a block writes a single part to the result."""
    taps = tiling.block_rows * max(len(piece.taps) for piece in tiling.pieces)
    words = tiling.out_tile * (taps + 1 - taps % 2)
    return 4 * tiling.columns * (words + (20 - words) % 16)


def _direct(p: Problem, device: Device, tiling: Tiling) -> bool:
    """Tells whether a single part can be written straight to the result: dw is contiguous, and shared memory has room
    to transpose a block's sums."""
    g = p.geometry
    dense = (g.out_per_group * g.taps, g.taps, g.kernel[1] * g.kernel[2], g.kernel[2], 1)
    return _result_bytes(tiling) <= device.shared_bytes and p.weight == dense


def _sum_of_parts(p: Problem, device: Device, kinds: int, splits: int, bias_parts: int) -> Launch:
    """Returns the launch that adds the parts of the weight gradient (none if `splits` is 0) and the bias gradient."""
    g, (ci, co, _, _, tap) = p.geometry, p.weight
    count, threads = _count(g), 256
    slices = _slices(device, kinds)

    def blocks(rows: int) -> int:
        return -(-g.out_per_group * g.taps // rows) * -(-g.in_channels // 32)

    rows = 64 // slices  # 8 rows per warp
    while rows > max(2, 8 // slices) and blocks(rows) < 3 * device.multiprocessors:
        rows //= 2
    bias_blocks = -(-g.out_channels // 8) if p.bias else 0
    weight_blocks, channels = (blocks(rows), g.in_channels) if splits else (0, 0)
    return Launch(
        kernel="reduce_taps",
        constants=(
            ("kThreads", threads),
            ("kMinBlocks", 1),
            ("Scalar", SCALARS[p.dtype]),
            ("kRows", rows),
            ("kSlices", slices),
            ("kBias", p.bias),
        ),
        grid=(weight_blocks + bias_blocks, 1, 1),
        threads=threads,
        shared_bytes=0,
        pointers=REDUCE_TAPS.pointers(
            parts="workspace",
            result="dw",
            bias_parts="bias_parts" if p.bias else "null",
            bias="db" if p.bias else "null",
        ),
        scalars=REDUCE_TAPS.pack(
            stride_in=ci,
            stride_out=co,
            stride_tap=tap,
            count=count,
            splits=splits,
            taps=g.taps,
            out=g.out_per_group,
            **{"in": channels},
            bias_splits=bias_parts,
            channels=g.out_channels,
        ),
        overlaps=True,
    )


def _steps(batch: int, size: Triple, layer: Layer, box: Box) -> int:
    return batch * prod(box.count(size, layer.per_word))


def _cycles(layer: Layer, made: Buffers, batch: int, size: Triple, device: Device) -> Callable[[int], float]:
    """Returns a function that predicts the cycles of all steps for a number of parts: blocks run in waves, and parts
    are added afterwards."""
    steps, depths = _steps(batch, size, layer, made.box), made.box.count(size, layer.per_word)[0]
    work = max((step_work(layer, made, piece) for piece in made.tiling.pieces), key=lambda work: work.cycles)
    step, ahead, coming = work.cycles, made.contents.ahead, work.coming
    kinds, elements = made.tiling.kinds(layer.geometry), _count(layer.geometry)
    block = layer.costs(made.tiling.pieces[0]).block

    def of_parts(splits: int) -> float:
        waves = -(-kinds * splits // device.multiprocessors)
        moved = (splits + 1 if splits > 1 else 0) * 4 * elements
        adding = ADDING_OVERHEAD + moved / (ADDING_BYTES * device.multiprocessors) if splits > 1 else 0.0
        each = -(-steps // splits)
        runs = max(1.0, each / depths)
        last = block + (_result_cycles(made.tiling, layer.geometry) if splits == 1 else 0.0)
        return waves * (each * step + runs * ahead * coming + last) + adding

    return of_parts


def _result_cycles(tiling: Tiling, g: Geometry) -> float:
    """Returns the cycles that a block takes to write its sums straight to the result, beyond `Costs.block`."""
    d, h, w = tiling.rows_d[0].taps, tiling.rows_h[0].taps, tiling.pieces[0].taps
    taps = {(i * g.kernel[1] + j) * g.kernel[2] + k for i, j, k in product(d, h, w)}
    runs = tiling.columns * tiling.out_tile * sum(tap - 1 not in taps for tap in taps)
    return max(0.0, RESULT_ELEMENT * tiling.elements + RESULT_RUN * runs - RESULT_HIDDEN)


def _splits(layer: Layer, made: Buffers, batch: int, size: Triple, device: Device, slices: int = 1) -> int:
    """Returns the number of parts (split-K) of the steps with the least predicted cycles."""
    waves = -(-4 * device.multiprocessors // made.tiling.kinds(layer.geometry))
    steps = _steps(batch, size, layer, made.box)
    room = device.workspace_bytes if slices == 1 else SLICED * device.workspace_bytes // slices
    most = max(1, min(steps, room // (_count(layer.geometry) * 4), waves))
    return min(range(1, most + 1), key=_cycles(layer, made, batch, size, device))


def _count(g: Geometry) -> int:
    """Returns the number of elements of the weight."""
    return g.in_channels * g.out_per_group * g.taps


def tiling_of(layer: Layer, device: Device, batch: int, size: Triple) -> Tiling | None:
    """Returns the tiling for a volume, or None. It is one of the layer's repertoire, so that a new volume seldom
    compiles a new kernel."""
    return _repertoire.choose(
        (layer.geometry, layer.dtype, layer.unit_c_x, layer.unit_c_y, device),
        (layer, batch, size),
        lambda: _own_tiling(layer, device, batch, size),
        lambda: _typical_tilings(layer, device, batch * prod(size)),
        lambda tiling, _: _tiling_cycles(layer, tiling, batch, size, device),
    )


_repertoire = Repertoire[tuple[Geometry, str, bool, bool, Device], tuple[Layer, int, Triple], Tiling]()


def _typical_tilings(layer: Layer, device: Device, positions: int) -> Iterator[Tiling]:
    """Yields the best tilings of the typical volumes nearest to `positions`."""
    volumes = [(batch, (edge, edge, edge * layer.at_once)) for batch, edge in TYPICAL]
    for volume in nearest(positions, ((batch * prod(size), (batch, size)) for batch, size in volumes)):
        if (found := _own_tiling(layer, device, *volume)) is not None:
            yield found


@lru_cache(maxsize=1024)
def _own_tiling(layer: Layer, device: Device, batch: int, size: Triple) -> Tiling | None:
    """Returns the best tiling for a volume, from the cache on disk if it has been searched before."""
    settings = (layer, replace(device, name=""), batch, size)
    found: Tiling | None = searched(__name__, settings, Tiling | None, lambda: _best_tiling(*settings))
    return found


def _best_tiling(layer: Layer, device: Device, batch: int, size: Triple) -> Tiling | None:
    found = tilings(layer, device, CHOICES[volume_kind(batch * prod(size))])
    costs = {tiling: _tiling_cycles(layer, tiling, batch, size, device) for tiling in found}
    least = min(costs.values(), default=inf)
    if least == inf:
        return None
    # Among tilings that the model cannot tell apart, the first one is best for large volumes.
    return next(tiling for tiling in costs if costs[tiling] <= AS_GOOD * least)


def forget() -> None:
    """Forgets all choices, so that the next volume of every layer counts as its first."""
    _own_tiling.cache_clear()
    _repertoire.forget()


def _tiling_cycles(layer: Layer, tiling: Tiling, batch: int, size: Triple, device: Device) -> float:
    """Predicts the cycles of all launches; infinite if the tensors cannot be copied as the tiling reads them, or if
    no box fits shared memory."""
    if not all(layer.takes(piece) for piece in tiling.pieces):
        return inf
    made = best_buffers(layer, tiling, size, device.shared_bytes)
    if made is None:
        return inf
    splits = _splits(layer, made, batch, size, device)
    return len(tiling.pieces) * _cycles(layer, made, batch, size, device)(splits)


def _main(p: Problem, layer: Layer, made: Buffers, piece: Words, splits: int, direct: bool) -> Launch:
    g, contents, tiling, box = p.geometry, made.contents, made.tiling, made.box
    size, strides = as_walked(p, layer.at_once)
    steps = _steps(p.batch, size, layer, box)
    jobs = box.d * tiling.planes[0] // contents.table_planes * -(-tiling.lines // _job_lines(layer, tiling))
    return Launch(
        kernel="hopper_weight_grad",
        constants=_constants(p, layer, tiling, piece),
        grid=(tiling.kinds(g) * splits, 1, 1),
        threads=tiling.share.threads,
        shared_bytes=max(made.bytes, _result_bytes(tiling)) if direct else made.bytes,
        pointers=HOPPER_WEIGHT_GRAD.pointers(
            x="x",
            dy="dy",
            parts="null" if direct else "workspace",
            bias_parts="bias_parts" if p.bias else "null",
            result="dw" if direct else "null",
        ),
        scalars=HOPPER_WEIGHT_GRAD.pack(
            x_strides=strides,
            dy_strides=p.output,
            x_size=size,
            dy_size=p.output_size,
            box=(box.d, box.h, box.w),
            steps=steps,
            splits=splits,
            ahead=contents.ahead,
            groups=made.groups,
            lines=contents.lines,
            line_words=contents.line_words,
            line_pitch=made.line_pitch,
            plane_pitch=made.plane_pitch,
            pair_pitch=made.pair_pitch,
            **per_axis("by", box.count(size, layer.per_word)),
            by_jobs=jobs,
        ),
        overlaps=True,
    )


def _job_lines(layer: Layer, tiling: Tiling) -> int:
    """Returns how many channels of dy, or pairs of channels, a producer warp copies at a time: a divisor of
    `tiling.lines`, unless channels are contiguous."""
    if layer.unit_c_y:
        return JOB_CHANNELS
    sizes = [size for size in range(1, 2 * JOB_CHANNELS + 1) if tiling.lines % size == 0]
    few = max(size for size in sizes if size <= JOB_CHANNELS)
    return few if 2 * few >= JOB_CHANNELS else sizes[-1]


def _rows_constants(name: str, kinds: tuple[Rows, ...]) -> Constants:
    """Returns the tables by kind of block, with rows padded to one length by zeros that are never read."""
    taps, planes = max(len(rows.taps) for rows in kinds), max(len(rows.offsets) for rows in kinds)

    def table(values: list[tuple[int, ...]], length: int) -> tuple[tuple[int, ...], ...]:
        return tuple((*row, *([0] * (length - len(row)))) for row in values)

    return (
        (f"kKinds{name}", len(kinds)),
        (f"kRows{name}", taps),
        (f"kPlanes{name}", planes),
        (f"kCount{name}", tuple(len(rows.taps) for rows in kinds)),
        (f"kPlaneOffset{name}", table([rows.offsets for rows in kinds], planes)),
        (f"kTap{name}", table([rows.taps for rows in kinds], taps)),
        (f"kPlane{name}", table([rows.planes for rows in kinds], taps)),
        (f"kShift{name}", table([rows.shifts for rows in kinds], taps)),
    )


def _constants(p: Problem, layer: Layer, tiling: Tiling, piece: Words) -> Constants:
    g = p.geometry
    return (
        ("kThreads", tiling.share.threads),
        ("kMinBlocks", 1),
        ("Scalar", SCALARS[p.dtype]),
        ("kWide", wide(p, MAX_SEGMENTS)),
        ("kElementsX", layer.elements_x),
        ("kVectorsX", layer.vectors_x),
        ("kElementsY", layer.elements_y and not piece.lines),
        ("kLines", piece.lines),
        ("kVectorY", piece.vector),
        ("kLinesAtOnce", piece.at_once),
        ("kUnitCX", layer.unit_c_x),
        ("kUnitCY", layer.unit_c_y),
        ("kConsumers", tiling.share.consumers),
        ("kProducers", tiling.share.producers),
        ("kTurners", layer.turners(tiling.share)),
        ("kConsumerRegisters", tiling.share.consumer),
        ("kProducerRegisters", tiling.share.producer),
        ("kStages", tiling.stages),
        ("kDepth", tiling.depth),
        ("kGroups", g.groups),
        ("kInPerGroup", g.in_per_group),
        ("kOutPerGroup", g.out_per_group),
        ("kColumns", tiling.columns),
        ("kOutTile", tiling.out_tile),
        ("kRowTiles", tiling.row_tiles),
        ("kJobLines", _job_lines(layer, tiling)),
        *_rows_constants("D", tiling.rows_d),
        *_rows_constants("H", tiling.rows_h),
        ("kPlanesW", tiling.planes[2]),
        ("kPlaneOffsetW", (*piece.offsets, *([0] * (tiling.planes[2] - len(piece.offsets))))),
        ("kTaps", len(piece.taps)),
        ("kTapW", piece.taps),
        *piece.constants,
        *_bias_constants(p, tiling, piece),
        *((f"kKernel{n}", axis.kernel) for n, axis in zip("DHW", g.axes, strict=True)),
        *((f"kStride{n}", axis.stride) for n, axis in zip("DHW", g.axes, strict=True)),
    )
