"""Plans for the weight gradient on Hopper's warpgroup matrix instructions (hopper_weight_grad.cuh).

Chooses which channels and taps a block owns, how its warps share them, the box of positions of a step, and into how
many parts the steps are split. What is compiled in depends on the layer and on which of four kinds the volume is of.
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

from ...planning import tensor_cores
from ...planning.geometry import Axis, Geometry, Triple
from ...planning.launch import Constants, Launch
from ...planning.packing import divider, dividers, int32s, int64s, padded
from ...planning.problem import ITEM_BYTES, Device, Pass, Plan, Problem, volume_kind
from ...planning.repertoire import TYPICAL, Repertoire, nearest, searched
from ..direct.planner import SCALARS
from . import warps as weight_grad_planner
from .warps import SEGMENT, wide

ROW_SEGMENTS = 8  # of a row of K in shared memory
MAX_SEGMENTS = 128  # of a box
JOB_CHANNELS = 8  # that a producer warp copies at a time
MAX_TAPS_W = 8  # taps along w that one launch has; a wider kernel takes several
MAX_GROUPS = 12  # of sheets in shared memory
MAX_ROW_TILES = 4
BANKS = 32  # of shared memory, a word each
OTHER_REGISTERS = (18, 22)  # of a consumer, with one and with two sets of fragments
MIN_EFFICIENCY = 0.25  # of the products that count
SLICED = 4  # times as much workspace may the parts of all slices of a batch take
COPYING_IS_WORTH = 1.4  # how much longer than the products slow copies may take


class Share(NamedTuple):
    """How registers are divided: those of a thread that multiplies and of one that copies, and warpgroups of each."""

    consumer: int
    producer: int
    producers: int
    consumers: int = 2

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + self.producers)


# The first that consumers can do with. No more in all than the block's threads have when they start: what is not
# there would be waited for, forever.
SHARES = (Share(192, 64, 2), Share(200, 56, 2), Share(224, 56, 1), Share(152, 56, 1, 3))
# By the number of warpgroups that multiply, the last first.
_SHARES_OF = tuple((n, tuple(share for share in SHARES[::-1] if share.consumers == n)) for n in (2, 3))


class Costs(NamedTuple):
    """What a multiprocessor takes, in cycles, for choosing between tilings."""

    l2_bytes: float  # in a cycle
    fragments: float  # share of shared memory's cycles that tensor cores wait for, when operands are loaded
    writes: float  # likewise, when x and dy arrive
    item: float  # the operands' way to the first product
    alone: float  # more of it with one set of operands
    x_row: float  # of a producer warp: a row of K
    x_vectors: float  # a job by vectors
    x_words: float  # a job by words
    y_block: float  # a block of slots of a plane
    y_line: float  # each line of it
    copying: float  # the barriers of a step
    turning: float  # a job of x that is put in order
    overlap: float  # of what is hidden behind the longest
    tight: float  # how much longer it takes where shared memory has room for one group of sheets on its way
    step: float  # barriers, the first operands
    block: float  # tables, the sums' way out


# Fitted to 40 times on one H200; and for copies word by word, which are older and less sure.
VECTORS = Costs(60, 0.46, 0.33, 23, 8, 180, 26, 150, 400, 22, 570, 98, 0.15, 1.1, 190, 20000)
WORDS = Costs(28, 1.0, 1.0, 15, 25, 0, 0, 750, 0, 75, 0, 0, 0.35, 1.25, 250, 8000)
SECTOR_WORDS = 8  # what a memory transaction moves at least
MIN_PRODUCT_CYCLES = 12.0  # of a matrix instruction
ADDING_OVERHEAD, ADDING_BYTES = 3500.0, 9.6  # a launch; what a multiprocessor moves in a cycle when adding parts
# A block that writes its elements to their place: each of them, each run of neighbours; what `block` has of it.
RESULT_ELEMENT, RESULT_RUN, RESULT_HIDDEN = 0.85, 1.5, 10000.0
ROUGH_BYTES = 28.0  # copied in a cycle, for a first choice


@dataclass(frozen=True)
class Rows:
    """Taps along one dimension that a block has, and the phase planes that they read."""

    taps: tuple[int, ...]
    offsets: tuple[int, ...]  # per plane: the output of the first position
    planes: tuple[int, ...]  # per tap
    shifts: tuple[int, ...]  # per tap: how far it reads from the position, in positions

    @classmethod
    def of(cls, axis: Axis, taps: tuple[int, ...], align: int = 1) -> Rows:
        """Planes begin at a multiple of `align` outputs if the stride is 1."""
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
    """Ways to divide the taps of a dimension among blocks, all of which read as many planes: all together, or so many
    of a phase."""
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
    """How the taps along w read a chunk of phase planes: which words are loaded, which operands are put together."""

    rows: Rows
    per_word: int
    stride: int  # along w: what lies between the words of a plane is not copied
    lines = False
    vector = 1  # words that are copied at a time
    at_once = 1  # lines of positions that a segment has

    @property
    def taps(self) -> tuple[int, ...]:
        return self.rows.taps

    @property
    def offsets(self) -> tuple[int, ...]:
        """Per plane: the output of the first position."""
        return self.rows.offsets

    @cached_property
    def reads(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per tap and step of a chunk: plane, first word, whether it is between two words."""
        return tuple(
            tuple((plane, 2 * step + shift // self.per_word, shift % self.per_word) for step in range(2))
            for plane, shift in zip(self.rows.planes, self.rows.shifts, strict=True)
        )

    @cached_property
    def loads(self) -> tuple[tuple[int, int], ...]:
        """Plane and word, an even one."""
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
        """Words of a line of a plane that taps read."""
        return segments * SEGMENT + max(-(-shift // self.per_word) for shift in self.rows.shifts)

    @property
    def vectors(self) -> int:
        """Loads of 16 bytes from shared memory that a lane does for a chunk."""
        return len(self.loads)

    def registers(self, depth: int) -> int:
        """Of so many sets of operands; one is made of what has been loaded meanwhile."""
        if depth == 1:
            return 4 * (len(self.loads) + len({read for tap in self.reads for read in tap}))
        # Products of builds of floats with less room ran one after the other.
        return 4 * depth * (len(self.loads) + len(self.joins)) + (6 if self.per_word == 1 and self.joins else 0)

    def own_words(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Per load and word of it which elements own taps read: 1 the first, 2 the second of 16-bit ones."""
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
    """How the taps along w read a chunk of lines as they lie in memory, phases side by side."""

    axis: Axis
    taps: tuple[int, ...]
    per_word: int
    vector: int  # words that are copied at a time
    at_once: int = 1  # lines of positions that a segment has
    lines = True

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The output of the first position, where a vector begins."""
        first = min(t * self.axis.dilation - self.axis.padding for t in self.taps)
        return (first - first % (self.vector * self.per_word),)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Per tap: how far from the line's first element it reads for the first position."""
        return tuple(t * self.axis.dilation - self.axis.padding - self.offsets[0] for t in self.taps)

    @property
    def _positions(self) -> int:
        """That a lane has of a chunk, on each line."""
        return SEGMENT * self.per_word // self.at_once

    @cached_property
    def loads(self) -> tuple[tuple[int, int], ...]:
        """Lines and first words of vectors of 16 bytes."""
        vectors = sorted({word // 4 * 4 for word in self._words})
        return tuple(product(range(self.at_once), vectors))

    @cached_property
    def _words(self) -> set[int]:
        """Of a line, that taps read for a lane's positions."""
        read = {start + self.axis.stride * i for start in self.starts for i in range(self._positions)}
        return {element // self.per_word for element in read}

    @cached_property
    def joins(self) -> tuple[tuple[int, int], ...]:
        """Lines and first elements of operands."""
        return tuple(sorted({self._operand(start, step) for start in self.starts for step in range(2)}))

    def _operand(self, start: int, step: int) -> tuple[int, int]:
        """Of a step of a chunk, which has half of a segment."""
        return (step, start) if self.at_once == 2 else (0, start + step * 2 * self.per_word * self.axis.stride)

    def line_words(self, segments: int) -> int:
        """Words of a line that taps read, in whole vectors."""
        last = max(self.starts) + self.axis.stride * (segments * self._positions - 1)
        return -(-(last // self.per_word + 1) // self.vector) * self.vector

    @property
    def vectors(self) -> int:
        return 2 * len(self.loads)

    def registers(self, depth: int) -> int:
        """Of vectors of two lines, much is never read, and so not loaded."""
        words = 4 * len(self.loads) if self.at_once == 1 else len(self._words) * self.at_once
        if depth == 1:
            return 4 * len(self.joins) + 2 * words
        # Products of builds with less room for many taps ran one after the other.
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
    """What the kernel is compiled for, besides the tiling."""

    geometry: Geometry
    dtype: str
    elements_x: bool  # 16-bit elements are copied one by one
    vectors_x: bool  # x is copied by segments
    elements_y: bool
    vector_y: int  # words of dy that one copy may bring; 0: its lines are not whole words
    unit_c_x: bool  # channels are contiguous
    unit_c_y: bool
    at_once: int = 1  # lines of x that are taken as one

    @property
    def slow(self) -> bool:
        """Whether words are copied one by one, each from a place of its own."""
        return self.elements_x or self.unit_c_x or self.unit_c_y

    def costs(self, piece: Words) -> Costs:
        return WORDS if self.slow or (self.elements_y and not piece.lines) else VECTORS

    def turners(self, share: Share) -> int:
        """Producer warps that put x in order; the others copy."""
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
        # Lines, if all that lies side by side in memory is of use. Small vectors may begin closer to the first tap.
        if axis.stride > 1 and self.vector_y and len({axis.phase(t) for t in taps}) == axis.stride:
            return self.lines(taps)
        return Planes(Rows.of(axis, taps, self.plane_start), self.per_word, axis.stride)

    @property
    def plane_start(self) -> int:
        """Elements of dy that the first position of a plane is a multiple of, where positions are neighbours."""
        return 1 if self.elements_y else self.per_word

    def takes(self, piece: Words) -> bool:
        """Whether x and dy can be copied the way that a tiling's taps along w read them."""
        if piece.at_once != self.at_once:
            return False
        if piece.lines:
            return piece.vector <= self.vector_y
        return self.geometry.stride[2] > 1 or not any(start % self.plane_start for start in piece.offsets)


@dataclass(frozen=True)
class Tiling:
    """How blocks and warps divide channels and taps. Everything here is compiled in."""

    columns: int  # input channels of a block
    out_tile: int  # output channels of a block
    rows_d: tuple[Rows, ...]  # per kind of block
    rows_h: tuple[Rows, ...]
    pieces: tuple[Words, ...]  # taps along w, one launch each
    depth: int  # sets of fragments
    share: Share
    stages: int = 3

    @cached_property
    def block_rows(self) -> int:
        """Rows of taps, along d and h."""
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
        """Along d and h."""
        return max(rows.reach for rows in self.rows_d), max(rows.reach for rows in self.rows_h)

    @property
    def sides(self) -> int:
        """Channels side by side in a line of dy."""
        return 1 if self.pieces[0].lines else 2

    @property
    def lines(self) -> int:
        """Of dy in shared memory, for one place in a sheet."""
        return self.out_tile // self.sides

    def kinds(self, g: Geometry) -> int:
        """Blocks that together have all channels and taps along d and h."""
        channels = -(-g.in_per_group // self.columns) * -(-g.out_per_group // self.out_tile)
        return g.groups * channels * len(self.rows_d) * len(self.rows_h)

    @property
    def elements(self) -> int:
        """Of the weight, that a block has."""
        return self.columns * self.out_tile * self.block_rows * max(len(piece.taps) for piece in self.pieces)

    @property
    def sums(self) -> int:
        """Registers per thread."""
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
    """The positions of a step."""

    @property
    def k_rows(self) -> int:
        return -(-self.segments // ROW_SEGMENTS)


@dataclass(frozen=True)
class Contents:
    """What a tiling with a box has in shared memory, however lines and pairs are lengthened."""

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
        """From segment to segment."""
        piece = self.tiling.pieces[0]
        return SEGMENT * (piece.axis.stride if isinstance(piece, Lines) else 2)

    @cached_property
    def ahead(self) -> int:
        return -(-self.tiling.reach[0] // self.box.d)

    @cached_property
    def slots(self) -> int:
        """Copies of a channel's plane along d."""
        _, h, w = self.tiling.planes
        return h * self.lines * w * self.line_words // self.tiling.pieces[0].vector

    @property
    def table_planes(self) -> int:
        """Planes whose slots are in the table: small ones are copied several at a time."""
        return self.box.d * self.tiling.planes[0] if self.tiling.pieces[0].at_once > 1 else 1

    @cached_property
    def beside(self) -> int:
        """Bytes of everything but groups of sheets."""
        stages = self.tiling.stages * self.box.k_rows * self.tiling.columns * 128
        tables = 16 * self.slots * self.table_planes + 16 * self.box.k_rows * ROW_SEGMENTS
        return stages + tables + 8 * 3 * self.tiling.stages

    def group_bytes(self, pair_pitch: int) -> int:
        """Of a group of sheets and its barriers."""
        return 4 * self.box.d * self.tiling.lines * pair_pitch + 8 * 2

    def groups(self, pair_pitch: int, room: int) -> int:
        """Groups of sheets that fit, no more than are of use; 0 if there is no room for those at work and coming."""
        fitting = (room - self.beside) // self.group_bytes(pair_pitch)
        return min(fitting, self.ahead + 3, MAX_GROUPS) if fitting >= self.ahead + 2 <= MAX_GROUPS else 0

    def padded(self, room: int, pads: Iterable[int] = (0,), skews: Iterable[int] = (0,)) -> Iterator[Buffers]:
        """With lines and pairs that are so many words longer, as far as there is room."""
        sides, planes = self.tiling.sides, self.tiling.planes
        multiple = 4 // sides
        for pad in pads:
            line_pitch = -(-self.line_words // multiple) * multiple + pad
            # Where phases along w alternate, half of the banks more than a multiple: two planes' words meet in none.
            plane_pitch = self.lines * line_pitch
            plane_pitch += (8 - plane_pitch) % 16 if planes[2] > 1 else 0
            pair_pitch = -(-sides * prod(planes) * plane_pitch // 4) * 4
            for skew in skews:
                if groups := self.groups(pair_pitch + skew, room):
                    yield Buffers(self, line_pitch, plane_pitch, pair_pitch + skew, groups)


@dataclass(frozen=True)
class Buffers:
    """Shared memory of a tiling with a box. Pitches in words, with what lengthens them against bank conflicts."""

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
        """How many of a quarter-warp's loads of dy (two pairs, four segments) meet in a bank, on average."""
        tiling = self.tiling
        line = tiling.sides * tiling.pieces[0].at_once * self.line_pitch
        pitches = (tiling.lines * self.pair_pitch, line, self.contents.segment_words, self.pair_pitch)
        return _conflicts(self.box, *(pitch % BANKS for pitch in pitches))


@lru_cache(maxsize=65536)
def _conflicts(box: Box, sheet: int, line: int, segment: int, pair: int) -> float:
    """From the pitches of what a box has, as far as banks tell them apart: far fewer than there are buffers."""
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
    """With the pads that avoid most conflicts; None if nothing fits."""
    pads = (0,) if box.w % 4 == 0 else range(0, 16, 4 // tiling.sides)
    best, fewest = None, inf
    for made in Contents(tiling, box).padded(room, pads, range(0, 32, 4)):
        conflicts = made.conflicts
        if conflicts < fewest:
            best, fewest = made, conflicts
            if fewest == 1.0:
                break
    return best


# ---- Predicted times, in cycles of a multiprocessor.


@dataclass(frozen=True)
class StepWork:
    """What the step of one launch keeps busy."""

    products: float  # tensor cores, and what keeps them from shared memory
    copying: float  # the producers' instructions
    turning: float
    memory: float
    overlap: float
    overhead: float

    @property
    def cycles(self) -> float:
        parts = (self.products, self.copying, self.turning, self.memory)
        return max(parts) + self.overlap * (sum(parts) - max(parts)) + self.overhead

    @property
    def coming(self) -> float:
        """Sheets that no step hides."""
        return max(self.copying, self.memory)


def step_work(layer: Layer, made: Buffers, piece: Words, conflicts: float = 0.0) -> StepWork:
    """`conflicts`: taken as known, if given."""
    contents, tiling, box = made.contents, made.tiling, made.box
    share, costs = tiling.share, layer.costs(piece)
    items = 2 * box.k_rows * share.consumers * tiling.row_tiles
    planes = box.d * max(len(rows.offsets) for rows in tiling.rows_d)
    words_x, words_y = box.k_rows * 32 * tiling.columns, planes * contents.slots * piece.vector * tiling.out_tile
    turned = costs.turning > 0 and (layer.vectors_x or layer.per_word == 1)
    stride = 1 if isinstance(piece, Lines) else piece.stride
    phases = len(piece.offsets)  # those that nobody needs lie in between
    sectors = words_x * (1 + SECTOR_WORDS / (box.w * SEGMENT))  # lines begin anywhere in one
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
    """Of one producer warp."""
    costs, jobs_x = layer.costs(piece), made.box.k_rows * made.tiling.columns / JOB_CHANNELS
    together = made.table_planes
    blocks_y = planes // together * -(-made.slots * together // (32 if piece.lines else 16))
    x = costs.x_row * made.box.k_rows + jobs_x * (costs.x_vectors if layer.vectors_x else costs.x_words)
    elements = 4 / 3 if layer.elements_y and not (layer.unit_c_y or piece.lines) else 1.0
    return x + elements * blocks_y * (costs.y_block + costs.y_line * made.tiling.lines)


def item_cycles(costs: Costs, piece: Words, columns: int, depth: int, conflicts: float = 1.0) -> float:
    """A chunk of a row tile. Tensor cores wait while fragments are loaded: both come out of shared memory."""
    products = 2 * len(piece.taps) * max(columns / 2, MIN_PRODUCT_CYCLES)
    loads = costs.fragments * 16 * piece.vectors * conflicts
    return products + loads + costs.item + (costs.alone if depth == 1 else 0.0)


def boxes(size: Triple, per_word: int) -> Iterator[Box]:
    """Boxes for a volume of `size`: whole lines or parts of them, of 32 to 1024 words. Small volumes are worth a look
    at several planes of a few lines, which may fill rows of K better than all lines of one."""
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
    """Predicted cycles that one batch item of a volume takes all blocks of one kind."""
    d, h, w = made.box.count(size, layer.per_word)
    works = [step_work(layer, made, piece, conflicts) for piece in made.tiling.pieces]
    return h * w * sum(d * work.cycles + made.contents.ahead * work.coming for work in works)


@lru_cache(maxsize=4096)
def best_buffers(layer: Layer, tiling: Tiling, size: Triple, room: int) -> Buffers | None:
    # Without pads a box takes least room and, but for conflicts, least time.
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


SMALL = 4096  # positions of a batch item
NOMINAL = (64, 64, 64)  # a large volume: those tilings that are best for it are worth a look
CHOICES = (80, 60, 12, 12)  # of such tilings, by kind of volume: small ones are harder to divide evenly
AS_GOOD = 1.03  # times the predicted cycles of the best: as good, as far as the model can tell
NOMINAL_BOXES = tuple(Box(1, h, w) for h in (2, 3, 4, 6, 8, 16) for w in (4, 8))


@lru_cache(maxsize=1024)
def tilings(layer: Layer, device: Device, count: int = 1) -> tuple[Tiling, ...]:
    """The tilings that promise most, the best first."""
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
    if len({(piece.lines, piece.vector) for piece in whole}) > 1:  # a last piece that lacks a phase
        whole = tuple(replace(layer, vector_y=0).words(piece.taps) for piece in whole)
    yield whole
    if axis.stride == 1 and count == 1 and layer.vector_y > 1:
        yield (layer.lines(whole[0].taps),)
    phases = [axis.taps(phase) for phase in range(axis.stride) if axis.taps(phase)]
    if 1 < len(phases) <= 4 and axis.kernel > len(phases) and count == 1 and not whole[0].lines:
        yield tuple(layer.words(taps) for taps in phases)


def _divisions(channels: int, multiple: int, most: int) -> list[int]:
    """Sizes of tiles, multiples of `multiple`, that divide channels evenly."""
    units = -(-channels // multiple)
    return sorted({size for parts in range(1, units + 1) if (size := -(-units // parts) * multiple) <= most})


def _candidates(layer: Layer) -> Iterator[tuple[float, int, Tiling]]:
    """Tilings that fit the registers, each with a rough cost per position (halos left out) and a number."""
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
                    continue  # two keep shared memory, or what copies, busy enough
                tiles = share.consumers * row_tiles
                if useful < MIN_EFFICIENCY * blocks * columns * 64 * tiles:
                    continue
                items = [tiles * item_cycles(layer.costs(piece), piece, columns, depth) for piece in pieces]
                cost = sum(max(item, copied) + 0.1 * copied for item in items)
                number += 1
                yield cost * blocks, number, Tiling(columns, out_tile, rows_d, rows_h, pieces, depth, share)


def _shares(pairs: int, sums: int, fragments: list[int]) -> Iterator[tuple[int, int, Share]]:
    """Row tiles, sets of operands and shares of the registers for so many rows, each of two channels."""
    for consumers, shares in _SHARES_OF:
        row_tiles = -(-pairs // (32 * consumers))
        if row_tiles > MAX_ROW_TILES:
            continue
        needs = [held + row_tiles * (sums + 2) for held in fragments]
        fits = [(depth, share) for depth, need in enumerate(needs, 1) for share in shares if need <= share.consumer]
        # The most operands that fit; fewer, if that leaves more to copy with.
        ways = {share.producers: (depth, share) for depth, share in fits}
        yield from ((row_tiles, depth, share) for depth, share in ways.values())


# ---- The bias's gradient in the same pass.


def _bias_slots(axis: Axis, kinds: tuple[Rows, ...], step: int) -> tuple[tuple[int, ...], ...]:
    """Per kind and tap: where the tap's phase begins among the parts of a sum, -1 for a tap that is not its own."""
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
    """Sums per channel that the blocks with one part of the positions and some input channels write: one for each row
    of own taps."""
    return len(tiling.pieces) * g.stride[0] * g.stride[1]


# ---- The family.


def _vector(p: Problem, strides: tuple[int, ...], width: int) -> int:
    """Words that a load may bring: none may straddle the end of a line. 0: 16-bit elements one by one."""
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
    """Size and strides of x, so many lines taken as one."""
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
    """If there are slices, the problem is that of one of so many equal slices of the batch: all have their launches,
    and one launch adds up what they leave."""
    layer = _layer(problem)
    size, _ = as_walked(problem, layer.at_once)
    tiling = tiling_of(layer, device, problem.batch, size)
    made = best_buffers(layer, tiling, size, device.shared_bytes) if tiling else None
    assert made is not None, "plan() of a problem that why_not() refuses"
    return plan_buffers(problem, device, made, slices)


def cycles(problem: Problem, device: Device) -> float:
    """Predicted, of all launches."""
    layer = _layer(problem)
    size, _ = as_walked(problem, layer.at_once)
    tiling = tiling_of(layer, device, problem.batch, size)
    assert tiling is not None, "cycles() of a problem that why_not() refuses"
    return _tiling_cycles(layer, tiling, problem.batch, size, device)


def plan_together(problems: dict[Pass, Problem], device: Device) -> Plan | None:
    return weight_and_bias(problems, device, why_not, plan)


def weight_and_bias(
    problems: dict[Pass, Problem],
    device: Device,
    why_not: Callable[[Problem, Device], str | None],
    plan: Callable[[Problem, Device], Plan],
) -> Plan | None:
    """The gradients of weight and bias by a family that has the one add up the other, where both are wanted."""
    if Pass.WEIGHT_GRAD not in problems or Pass.BIAS_GRAD not in problems:
        return None
    problem = replace(problems[Pass.WEIGHT_GRAD], bias=True)
    if why_not(problem, device):
        return None
    return replace(plan(problem, device), passes=(Pass.WEIGHT_GRAD, Pass.BIAS_GRAD))


def plan_tiling(p: Problem, device: Device, tiling: Tiling) -> Plan:
    """The plan with a given tiling: what a benchmark compares."""
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
    """With places of its own for what it leaves."""
    own = {name: f"{name} {index}" for name in ("workspace", "bias_parts")}
    return replace(main, pointers=tuple(own.get(name, name) for name in main.pointers))


def _slices(device: Device, kinds: int) -> int:
    """Warps that share the parts of an element: there are many parts where few kinds of blocks share the GPU.

    (How many exactly depends on the volume, and what is compiled in must not.)
    """
    return max(slices for slices in (1, 2, 4, 8) if slices == 1 or 8 * slices <= device.multiprocessors // kinds)


def _result_bytes(tiling: Tiling) -> int:
    """Of shared memory, through which a single part goes to its place."""
    taps = tiling.block_rows * max(len(piece.taps) for piece in tiling.pieces)
    words = tiling.out_tile * (taps + 1 - taps % 2)
    return 4 * tiling.columns * (words + (20 - words) % 16)


def _direct(p: Problem, device: Device, tiling: Tiling) -> bool:
    """Whether a single part can be written as the result: a contiguous one, by way of the shared memory there is."""
    g = p.geometry
    dense = (g.out_per_group * g.taps, g.taps, g.kernel[1] * g.kernel[2], g.kernel[2], 1)
    return _result_bytes(tiling) <= device.shared_bytes and p.weight == dense


def _sum_of_parts(p: Problem, device: Device, kinds: int, splits: int, bias_parts: int) -> Launch:
    """Of the weight, unless it has none, and of the bias."""
    g, (ci, co, _, _, tap) = p.geometry, p.weight
    count, threads = _count(g), 256
    slices = _slices(device, kinds)

    def blocks(rows: int) -> int:
        return -(-g.out_per_group * g.taps // rows) * -(-g.in_channels // 32)

    rows = 64 // slices  # 8 of a warp
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
        pointers=("workspace", "dw", *(("bias_parts", "db") if p.bias else ("null", "null"))),
        scalars=padded(
            int64s(ci, co, tap, count),
            int32s(splits, g.taps, g.out_per_group, channels, bias_parts, g.out_channels),
        ),
        overlaps=True,
    )


def _steps(batch: int, size: Triple, layer: Layer, box: Box) -> int:
    return batch * prod(box.count(size, layer.per_word))


def _cycles(layer: Layer, made: Buffers, batch: int, size: Triple, device: Device) -> Callable[[int], float]:
    """Predicted, of all steps in so many parts: blocks come in waves, and parts must be added."""
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
    """Of a block that writes its sums to their place, beyond what every block takes."""
    d, h, w = tiling.rows_d[0].taps, tiling.rows_h[0].taps, tiling.pieces[0].taps
    taps = {(i * g.kernel[1] + j) * g.kernel[2] + k for i, j, k in product(d, h, w)}
    runs = tiling.columns * tiling.out_tile * sum(tap - 1 not in taps for tap in taps)
    return max(0.0, RESULT_ELEMENT * tiling.elements + RESULT_RUN * runs - RESULT_HIDDEN)


def _splits(layer: Layer, made: Buffers, batch: int, size: Triple, device: Device, slices: int = 1) -> int:
    """Into how many parts the steps are split: what fills the GPU with the least left over at the end."""
    waves = -(-4 * device.multiprocessors // made.tiling.kinds(layer.geometry))
    steps = _steps(batch, size, layer, made.box)
    room = device.workspace_bytes if slices == 1 else SLICED * device.workspace_bytes // slices
    most = max(1, min(steps, room // (_count(layer.geometry) * 4), waves))
    return min(range(1, most + 1), key=_cycles(layer, made, batch, size, device))


def _count(g: Geometry) -> int:
    """Elements of the weight."""
    return g.in_channels * g.out_per_group * g.taps


def tiling_of(layer: Layer, device: Device, batch: int, size: Triple) -> Tiling | None:
    """The tiling of a layer, if it has any: one of its repertoire, so that a new volume does not recompile."""
    return _repertoire.choose(
        (layer.geometry, layer.dtype, layer.unit_c_x, layer.unit_c_y, device),
        (layer, batch, size),
        lambda: _own_tiling(layer, device, batch, size),
        lambda: _typical_tilings(layer, device, batch * prod(size)),
        lambda tiling, _: _tiling_cycles(layer, tiling, batch, size, device),
    )


_repertoire = Repertoire[tuple[Geometry, str, bool, bool, Device], tuple[Layer, int, Triple], Tiling]()


def _typical_tilings(layer: Layer, device: Device, positions: int) -> Iterator[Tiling]:
    """The best for typical volumes of about so many positions."""
    volumes = [(batch, (edge, edge, edge * layer.at_once)) for batch, edge in TYPICAL]
    for volume in nearest(positions, ((batch * prod(size), (batch, size)) for batch, size in volumes)):
        if (found := _own_tiling(layer, device, *volume)) is not None:
            yield found


@lru_cache(maxsize=1024)
def _own_tiling(layer: Layer, device: Device, batch: int, size: Triple) -> Tiling | None:
    """The best for a volume."""
    settings = (layer, replace(device, name=""), batch, size)
    found: Tiling | None = searched(__name__, settings, Tiling | None, lambda: _best_tiling(*settings))
    return found


def _best_tiling(layer: Layer, device: Device, batch: int, size: Triple) -> Tiling | None:
    found = tilings(layer, device, CHOICES[volume_kind(batch * prod(size))])
    costs = {tiling: _tiling_cycles(layer, tiling, batch, size, device) for tiling in found}
    least = min(costs.values(), default=inf)
    if least == inf:
        return None
    # Of those that the model cannot tell apart the one that is best for large volumes.
    return next(tiling for tiling in costs if costs[tiling] <= AS_GOOD * least)


def forget() -> None:
    """The next volume of every layer is its first."""
    _own_tiling.cache_clear()
    _repertoire.forget()


def _tiling_cycles(layer: Layer, tiling: Tiling, batch: int, size: Triple, device: Device) -> float:
    """Predicted; infinite if the layer's tensors cannot be copied so, or if shared memory has no room for any box."""
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
    parts, result = ("null", "dw") if direct else ("workspace", "null")
    jobs = box.d * tiling.planes[0] // contents.table_planes * -(-tiling.lines // _job_lines(layer, tiling))
    return Launch(
        kernel="hopper_weight_grad",
        constants=_constants(p, layer, tiling, piece),
        grid=(tiling.kinds(g) * splits, 1, 1),
        threads=tiling.share.threads,
        shared_bytes=max(made.bytes, _result_bytes(tiling)) if direct else made.bytes,
        pointers=("x", "dy", parts, "bias_parts" if p.bias else "null", result),
        scalars=padded(
            int64s(*strides, *p.output),
            int32s(*size, *p.output_size, box.d, box.h, box.w, steps, splits),
            int32s(contents.ahead, made.groups, contents.lines, contents.line_words, made.line_pitch),
            int32s(made.plane_pitch, made.pair_pitch),
            dividers(box.count(size, layer.per_word)),
            divider(jobs),
        ),
        overlaps=True,
    )


def _job_lines(layer: Layer, tiling: Tiling) -> int:
    """Channels of dy, or pairs of them, that a producer warp copies at a time: a divisor of what a block has."""
    if layer.unit_c_y:
        return JOB_CHANNELS
    sizes = [size for size in range(1, 2 * JOB_CHANNELS + 1) if tiling.lines % size == 0]
    few = max(size for size in sizes if size <= JOB_CHANNELS)
    return few if 2 * few >= JOB_CHANNELS else sizes[-1]


def _rows_constants(name: str, kinds: tuple[Rows, ...]) -> Constants:
    """Tables by kind of block, filled up to one length with what is never used."""
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
