"""Describes how blocks of the weight gradient on Hopper divide channels, taps, registers and shared memory.

`Layer` is what choices depend on, `Tiling` what is compiled in, and `Buffers` how a tiling and a box of positions lie
in shared memory. This module predicts no times. hopper.py explains the terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import NamedTuple

from ...planning.geometry import Geometry
from ...planning.plain_data import once
from ...planning.problem import ITEM_BYTES
from . import segments
from .hopper_taps import Lines, Planes, Rows, Words
from .segments import SEGMENT

ROW_SEGMENTS = 8  # segments of a row of K in shared memory
MAX_GROUPS = 12  # most groups of sheets in shared memory
BANKS = 32  # banks of shared memory, one word wide


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


@dataclass(frozen=True)
class Layer:
    """The properties of a layer and its tensors that the kernel is compiled for, besides the tiling."""

    geometry: Geometry
    dtype: str
    elements_x: bool  # whether 16-bit elements of x are copied one by one
    vectors_x: bool  # whether x is copied in 16-byte segments
    elements_y: bool  # whether 16-bit elements of dy are copied one by one
    vector_y: int  # most words of dy per copy; 0 if lines of dy are not whole words
    piece_x: int  # words of a copy of rows of channels of x; 0 if x does not have TF32 channels side by side
    piece_y: int  # words of a copy of rows of channels of dy, at most; 0 as for x
    at_once: int = 1  # lines of x that are treated as one
    shifted_y: bool = False  # whether lines of dy may begin at any 16-bit element of a vector of memory

    @property
    def slow(self) -> bool:
        """Whether words are copied one by one, each from an address of its own."""
        return self.elements_x

    def turners(self, share: Share) -> int:
        """Returns how many producer warps reorder x in shared memory; the other producer warps copy."""
        if self.slow:
            return 1
        words = self.geometry.stride[2] > 1 and self.vector_y == 1  # lines of dy take the most copies
        return share.producers if self.piece_x or words else 3 * share.producers // 2

    @property
    def per_word(self) -> int:
        return 4 // ITEM_BYTES[self.dtype]

    def lines(self, taps: tuple[int, ...]) -> Lines:
        fewest = self.vector_y if self.shifted_y else 1
        axis, sizes = self.geometry.axes[2], (size for size in (4, 2, 1) if fewest <= size <= self.vector_y)
        ways = (Lines(axis, taps, self.per_word, size, self.at_once, self.shifted_y) for size in sizes)
        return min(ways, key=lambda lines: lines.vectors if lines.at_once == 1 else -lines.vector)

    def words(self, taps: tuple[int, ...]) -> Words:
        axis = self.geometry.axes[2]
        # Lines of dy are copied as they lie in memory if the taps read all phases, or half of the phases, near each
        # other, if the lines would otherwise be copied element by element.
        half = self.shifted_y and axis.dilation <= axis.stride
        least = -(-axis.stride // 2) if half else axis.stride
        if axis.stride > 1 and self.vector_y and len({axis.phase(t) for t in taps}) >= least:
            return self.lines(taps)
        return Planes(Rows.of(axis, taps, self.plane_start), self.per_word, axis.stride, self.piece_y > 0)

    @property
    def plane_start(self) -> int:
        """Number of dy elements that the start of a plane is a multiple of, if the stride along w is 1."""
        return 1 if self.elements_y else self.per_word

    def takes(self, piece: Words) -> bool:
        """Tells whether x and dy can be copied the way that a tiling's taps along w read them."""
        if piece.at_once != self.at_once or piece.last != (self.piece_y > 0):
            return False
        if piece.lines:
            return piece.vector <= self.vector_y and piece.shifted == self.shifted_y
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

    @once
    def block_rows(self) -> int:
        """Most pairs of a tap along d and a tap along h that a block owns."""
        return max(len(rows.taps) for rows in self.rows_d) * max(len(rows.taps) for rows in self.rows_h)

    @once
    def row_tiles(self) -> int:
        return -(-self.block_rows * (self.out_tile // 2) // (32 * self.share.consumers))

    @once
    def planes(self) -> tuple[int, int, int]:
        w = max(len(piece.offsets) for piece in self.pieces)
        return max(len(r.offsets) for r in self.rows_d), max(len(r.offsets) for r in self.rows_h), w

    @once
    def unlike_pieces(self) -> tuple[tuple[Words, int], ...]:
        """Pieces that differ in what the predicted time of a launch depends on, each with the number of its like."""
        first: dict[tuple[object, ...], Words] = {}
        count: Counter[tuple[object, ...]] = Counter()
        for piece in self.pieces:
            stride = 1 if isinstance(piece, Lines) else piece.stride
            key = (len(piece.taps), piece.vectors, len(piece.offsets), piece.vector, piece.lines, stride)
            first.setdefault(key, piece)
            count[key] += 1
        return tuple((piece, count[key]) for key, piece in first.items())

    @once
    def reach(self) -> tuple[int, int]:
        """Largest shifts of taps along d and along h, in positions."""
        return max(rows.reach for rows in self.rows_d), max(rows.reach for rows in self.rows_h)

    @once
    def sides(self) -> int:
        """Channels interleaved in a line of dy in shared memory."""
        return 1 if self.pieces[0].lines or self.pieces[0].last else 2

    @once
    def lines(self) -> int:
        """Lines of dy in shared memory per line of a sheet: channels, or pairs of channels."""
        return self.out_tile // self.sides

    @once
    def row_segment(self) -> int:
        """Words of shared memory from one segment of rows of channels to the next: never a multiple of 16."""
        return SEGMENT * self.out_tile + (8 if self.out_tile % 4 == 0 else 0)

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
class Box(segments.Box):
    """The box of positions of one step."""

    @property
    def k_rows(self) -> int:
        return -(-self.segments // ROW_SEGMENTS)


class Contents(NamedTuple):
    """The sizes in shared memory of a tiling with a box that do not depend on padding against bank conflicts."""

    tiling: Tiling
    box: Box
    lines: int
    line_words: int
    ahead: int
    slots: int  # copies that bring one channel (or pair) of dy at one index along d
    table_planes: int  # planes along d whose slots are in the table: small planes are copied several at a time
    beside: int  # bytes of shared memory for stages of x, tables and barriers: all but the groups of sheets

    @classmethod
    def of(cls, tiling: Tiling, box: Box) -> Contents:
        pieces, (reach_d, reach_h), (d, h, w), k_rows = tiling.pieces, tiling.reach, tiling.planes, box.k_rows
        lines = box.h * pieces[0].at_once + reach_h
        line_words = max([piece.line_words(box.w) for piece in pieces])
        slots = h * lines * w * line_words // pieces[0].vector
        table_planes = box.d * d if pieces[0].at_once > 1 else 1
        in_table = 0 if pieces[0].last else slots * table_planes
        tables = 16 * in_table + 16 * k_rows * ROW_SEGMENTS
        beside = tiling.stages * k_rows * tiling.columns * 128 + tables + 8 * 3 * tiling.stages
        return cls(tiling, box, lines, line_words, -(-reach_d // box.d), slots, table_planes, beside)

    @property
    def segment_words(self) -> int:
        """Words of dy in shared memory from one segment to the next."""
        piece = self.tiling.pieces[0]
        if piece.last:
            return self.tiling.row_segment
        return SEGMENT * (piece.axis.stride if isinstance(piece, Lines) else 2)

    def group_bytes(self, sheet_words: int) -> int:
        """Returns the bytes of a group of sheets and its two barriers."""
        return 4 * self.box.d * sheet_words + 8 * 2

    def groups(self, sheet_words: int, room: int) -> int:
        """Returns how many groups of sheets fit, at most `ahead` + 3, or 0 if fewer than `ahead` + 2 fit: a step
        reads `ahead` + 1 groups while at least one is in flight."""
        fitting = (room - self.beside) // self.group_bytes(sheet_words)
        return min(fitting, self.ahead + 3, MAX_GROUPS) if fitting >= self.ahead + 2 <= MAX_GROUPS else 0

    def padded(self, room: int, pads: Iterable[int] = (0,), skews: Iterable[int] = (0,)) -> Iterator[Buffers]:
        """Yields the buffers that fit, for lines padded by `pads` words and pairs padded by `skews` words.

        Both are in ascending order: where some padding does not fit, more does not either.
        """
        sides, planes = self.tiling.sides, self.tiling.planes
        if self.tiling.pieces[0].last:
            yield from self._rows(room)
            return
        multiple = 4 // sides
        for pad in pads:
            line_pitch = -(-self.line_words // multiple) * multiple + pad
            # Planes of different phases along w are 16 of the 32 banks apart (8 words of each channel of a pair):
            # words of two planes never share a bank.
            plane_pitch = self.lines * line_pitch
            plane_pitch += (8 - plane_pitch) % 16 if planes[2] > 1 else 0
            pair_pitch = -(-sides * prod(planes) * plane_pitch // 4) * 4
            if not self.groups(self.tiling.lines * pair_pitch, room):
                return
            for skew in skews:
                groups = self.groups(self.tiling.lines * (pair_pitch + skew), room)
                if not groups:
                    break
                yield Buffers(self, line_pitch, plane_pitch, pair_pitch + skew, groups)

    def _rows(self, room: int) -> Iterator[Buffers]:
        """Yields the buffers of rows of channels, if they fit: the segments of a line follow, bank by bank, those of
        the line before."""
        segment, last = self.tiling.row_segment, self.line_words - 1
        words = last // SEGMENT * segment + (last % SEGMENT + 1) * self.tiling.out_tile
        line_pitch = -(-words // 4) * 4
        line_pitch += (self.box.w * segment - line_pitch) % BANKS if self.box.w % 4 else 0
        plane_pitch = self.lines * line_pitch
        if groups := self.groups(prod(self.tiling.planes) * plane_pitch, room):
            yield Buffers(self, line_pitch, plane_pitch, 2, groups)


class Buffers(NamedTuple):
    """Shared memory of a tiling with a box. Pitches are in words and include padding against bank conflicts."""

    contents: Contents
    line_pitch: int
    plane_pitch: int
    pair_pitch: int  # 2 in rows of channels
    groups: int

    @property
    def sheet_words(self) -> int:
        rows = prod(self.tiling.planes) * self.plane_pitch
        return rows if self.tiling.pieces[0].last else self.tiling.lines * self.pair_pitch

    @property
    def tiling(self) -> Tiling:
        return self.contents.tiling

    @property
    def box(self) -> Box:
        return self.contents.box

    @property
    def bytes(self) -> int:
        return self.contents.beside + self.groups * self.contents.group_bytes(self.sheet_words)

    @property
    def conflicts(self) -> float:
        """Average number of a quarter-warp's loads of dy (two pairs, four segments) that share a bank; 1 is ideal."""
        tiling = self.tiling
        if tiling.pieces[0].last:  # where four pairs belong to two rows of taps, their words may share banks
            return 1 + {0: 0, 2: 2}.get(tiling.out_tile // 2 % 4, 3) / (tiling.out_tile // 2)
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
    for made in Contents.of(tiling, box).padded(room, pads, range(0, 32, 4)):
        conflicts = made.conflicts
        if conflicts < fewest:
            best, fewest = made, conflicts
            if fewest == 1.0:
                break
    return best
