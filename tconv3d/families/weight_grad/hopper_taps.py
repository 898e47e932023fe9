"""Describes which outputs the taps of a block read, for the weight gradient on Hopper (hopper_weight_grad.cuh).

Along d and h, taps read phase planes of dy (`Rows`). Along w, the words that a lane loads from shared memory are
joined to operands of matrix instructions, from phase planes (`Planes`) or from whole lines of dy (`Lines`). This
module knows neither channels nor costs. hopper.py explains the terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from ...planning.geometry import Axis
from ...planning.launch import Constants
from ...planning.plain_data import once
from .segments import SEGMENT


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

    @once
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
    last: bool = False  # whether the channels of a position lie side by side, as rows of channels
    lines = False
    vector = 1  # words per copy
    at_once = 1  # lines of positions per segment
    shifted = False  # whether a line may begin at any element of a vector

    @property
    def taps(self) -> tuple[int, ...]:
        return self.rows.taps

    @property
    def offsets(self) -> tuple[int, ...]:
        """Per plane, the index of the output that the box's first position reads."""
        return self.rows.offsets

    @once
    def reads(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per tap and matrix instruction of a chunk: plane, first word, and whether the operand straddles words."""
        return tuple(
            tuple((plane, 2 * step + shift // self.per_word, shift % self.per_word) for step in range(2))
            for plane, shift in zip(self.rows.planes, self.rows.shifts, strict=True)
        )

    @once
    def loads(self) -> tuple[tuple[int, int], ...]:
        """Plane and first word of every load; first words are even."""
        found = set()
        for plane, word, odd in (read for tap in self.reads for read in tap):
            found |= {(plane, w - w % 2) for w in range(word, word + 2 + odd)}
        return tuple(sorted(found))

    @once
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
    shifted: bool = False  # whether a line may begin at any 16-bit element of a vector of memory
    lines = True
    last = False

    @once
    def offsets(self) -> tuple[int, ...]:
        """Index of the output where a line begins: the start of a vector at or before the first tap's output."""
        first = min(t * self.axis.dilation - self.axis.padding for t in self.taps)
        return (first - first % (self.vector * self.per_word),)

    @once
    def starts(self) -> tuple[int, ...]:
        """Per tap, the distance in elements from the line's start to what the tap reads for the first position."""
        return tuple(t * self.axis.dilation - self.axis.padding - self.offsets[0] for t in self.taps)

    @property
    def _positions(self) -> int:
        """Positions per lane, chunk and line."""
        return SEGMENT * self.per_word // self.at_once

    @once
    def loads(self) -> tuple[tuple[int, int], ...]:
        """Line and first word of every 16-byte vector that a lane loads per channel."""
        vectors = sorted({word // 4 * 4 for word in self._words})
        return tuple(product(range(self.at_once), vectors))

    @once
    def _words(self) -> set[int]:
        """Words of a line that the taps read for a lane's positions."""
        read = {start + self.axis.stride * i for start in self.starts for i in range(self._positions)}
        return {element // self.per_word for element in read}

    @once
    def joins(self) -> tuple[tuple[int, int], ...]:
        """Line and first element of every operand."""
        return tuple(sorted({self._operand(start, step) for start in self.starts for step in range(2)}))

    def _operand(self, start: int, step: int) -> tuple[int, int]:
        """Returns line and first element of the operand of one matrix instruction, which uses half a segment."""
        return (step, start) if self.at_once == 2 else (0, start + step * 2 * self.per_word * self.axis.stride)

    def line_words(self, segments: int) -> int:
        """Returns how many words of a line the taps read, rounded up to whole vectors.

        Shifted lines have a vector more.
        """
        last = max(self.starts) + self.axis.stride * (segments * self._positions - 1)
        return (-(-(last // self.per_word + 1) // self.vector) + self.shifted) * self.vector

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
