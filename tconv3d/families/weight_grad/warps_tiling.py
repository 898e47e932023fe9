"""Describes how blocks and warps of tensor_weight_grad.cuh divide channels, taps, positions and shared memory.

This module predicts no times. warps.py explains the terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ...planning.geometry import Axis, Geometry
from ...planning.plain_data import once
from ...planning.problem import ITEM_BYTES
from .segments import SECTOR_WORDS, SEGMENT, Box

WHOLE_SEGMENTS = 4  # most segments of a window of whole lines
MAX_TAPS_W = 8  # most taps along w of one launch; a wider kernel takes several launches


@dataclass(frozen=True)
class Window:
    """Neighbouring segments of a plane of dy, loaded once for the taps that read out of them."""

    plane: int
    start: int  # distance from the start of the plane's line, in words
    taps: tuple[tuple[int, int], ...]  # (tap along w, shift from the window's start in elements)

    @once
    def reach(self) -> int:
        return max(shift for _, shift in self.taps)

    def words(self, step: int, per_word: int) -> int:
        """Returns the words of the window, whole segments, where positions lie `step` elements apart."""
        elements = self.reach + step * (SEGMENT * per_word - 1) + 1
        return -(-elements // (SEGMENT * per_word)) * SEGMENT


@dataclass(frozen=True)
class Planes:
    """The phases of w that have taps, or whole lines as one plane, and the windows that a row of taps needs."""

    offsets: tuple[int, ...]  # per plane: index of the output that the tile's first position reads
    windows: tuple[Window, ...]
    per_word: int
    step: int = 1  # elements of a plane from one position to the next: the stride in whole lines

    @classmethod
    def of(cls, axis: Axis, taps: range, per_word: int, vector: int) -> Planes:
        """Returns the planes of some taps. With stride 1, planes begin at a multiple of `vector` outputs."""
        offsets: list[int] = []
        windows: list[Window] = []
        segment = SEGMENT * per_word
        for phase in range(axis.stride):
            fed = sorted((axis.shift(t), t) for t in taps if axis.phase(t) == phase)
            if not fed:
                continue
            first = fed[0][0]
            if axis.stride == 1:
                first -= first % vector
            offsets.append(axis.stride * first + phase)
            while fed:
                start = (fed[0][0] - first) // segment * segment
                inside = [(t, shift - first - start) for shift, t in fed if shift - first <= start + segment]
                windows.append(Window(len(offsets) - 1, start // per_word, tuple(inside)))
                fed = fed[len(inside) :]
        return cls(tuple(offsets), tuple(windows), per_word)

    @classmethod
    def whole(cls, axis: Axis, taps: range, per_word: int, vector: int) -> Planes:
        """Returns whole lines of dy, which begin at a multiple of `vector` outputs, as one plane."""
        segment, step = SEGMENT * per_word, axis.stride
        read = sorted((axis.stride * axis.shift(t) + axis.phase(t), t) for t in taps)
        first = read[0][0] - read[0][0] % vector
        windows: list[Window] = []
        while read:
            start = (read[0][0] - first) // segment * segment
            most = start + WHOLE_SEGMENTS * segment - 1 - step * (segment - 1)
            inside = [(t, at - first - start) for at, t in read if at - first <= most]
            windows.append(Window(0, start // per_word, tuple(inside)))
            read = read[len(inside) :]
        return cls((first,), tuple(windows), per_word, step)

    def __hash__(self) -> int:
        return self._hash

    @once
    def _hash(self) -> int:
        """The hash, computed once because a search uses it thousands of times as a key."""
        return hash((self.offsets, self.windows, self.per_word, self.step))

    @once
    def taps(self) -> int:
        return sum(len(window.taps) for window in self.windows)

    @once
    def window_words(self) -> tuple[int, ...]:
        return tuple(window.words(self.step, self.per_word) for window in self.windows)

    @once
    def words(self) -> int:
        """Words of all windows together."""
        return sum(self.window_words)

    def line_words(self, segments: int) -> int:
        """Returns how many words of a line the taps read."""
        last = max(window.start * self.per_word + window.reach for window in self.windows)
        return -(-(self.step * (segments * SEGMENT * self.per_word - 1) + last + 1) // self.per_word)

    def line_pitch(self, segments: int) -> int:
        """Returns how many words of a line the windows touch, a multiple of SEGMENT."""
        ends = (window.start + words for window, words in zip(self.windows, self.window_words, strict=True))
        return (segments - 1) * SEGMENT * self.step + max(ends)


@dataclass(frozen=True)
class Layer:
    """The properties of a layer and its tensors that the kernel is compiled for, besides the tiling."""

    geometry: Geometry
    dtype: str
    channels_last: bool
    vector_x: int  # words per load of x; 0 if 16-bit elements are loaded one by one
    vector_y: int  # words per load of dy; 0 if 16-bit elements are loaded one by one
    strict: bool = False  # every float32 product is computed as three TF32 products
    whole_lines: bool = False  # dy is copied as whole lines, whose phases alternate

    @once
    def per_word(self) -> int:
        return 4 // ITEM_BYTES[self.dtype]

    @once
    def half_rows(self) -> bool:
        """Tells whether the input channels of a group fill at most half of the rows of a matrix instruction."""
        return self.geometry.in_per_group <= 8

    @once
    def instructions(self) -> int:
        """Matrix instructions per product of two tiles: in strict float32 three, or two where rows are shared by the
        high and the low halves of x."""
        return 1 if not self.strict else 2 if self.half_rows else 3

    @once
    def tile_sums(self) -> int:
        """Sums per thread of a matrix tile."""
        return 2 if self.strict and self.half_rows else 4

    @once
    def pieces(self) -> tuple[range, ...]:
        """The taps along w of each launch."""
        kernel = self.geometry.kernel[2]
        count = -(-kernel // MAX_TAPS_W)
        size = -(-kernel // count)
        return tuple(range(first, min(first + size, kernel)) for first in range(0, kernel, size))

    def planes(self, taps: range) -> Planes:
        make = Planes.whole if self.whole_lines else Planes.of
        return make(self.geometry.axes[2], taps, self.per_word, max(1, self.vector_y * self.per_word))

    @once
    def asynchronous(self) -> bool:
        """Tells whether copies go to shared memory without passing registers, which moves whole words."""
        return min(self.vector_x, self.vector_y) > 0

    def lane_channels(self, tiling: Tiling) -> tuple[int, int]:
        """Returns how many channels of x and of dy the lanes of a warp copy side by side.

        They are several where a channel of x has too few slots for all lanes, or where channels are contiguous.
        """
        slots = tiling.segments * SEGMENT // max(1, self.vector_x)
        return (4, 4) if self.channels_last else (max(1, 32 // slots), 1)

    def loads(self, tiling: Tiling) -> tuple[int, int]:
        """Returns the channels of each lane in a job of x and of dy, which is the number of loads that a lane has in
        flight; without asynchronous copies they arrive in registers."""
        x, y = (8 if tiling.asynchronous or vector in (1, 2) else 4 for vector in (self.vector_x, self.vector_y))
        return min(x, max(1, tiling.block_in(self.geometry) // self.lane_channels(tiling)[0])), y


@dataclass(frozen=True)
class Tiling:
    """How blocks and warps divide channels, taps and positions. All fields are compiled in."""

    warps: int
    blocks: int  # blocks per multiprocessor
    tiles_in: int  # tiles of 16 input channels per warp
    tiles_out: int  # tiles of 8 output channels per warp
    warps_in: int
    warps_out: int
    rows_d: int  # taps along d of a block
    rows_h: int  # taps along h of a block
    warps_rows: int
    slices: int  # warps with equal taps and channels, which divide the chunks of a tile
    segments: int  # segments of a tile of positions
    stages: int  # buffers in shared memory; three if copies are asynchronous
    asynchronous: bool

    @property
    def rows(self) -> int:
        return -(-self.rows_d * self.rows_h // self.warps_rows)

    @property
    def block_rows(self) -> tuple[int, int]:
        return self.rows_d, self.rows_h

    def block_in(self, g: Geometry) -> int:
        return 8 if g.in_per_group <= 8 else 16 * self.tiles_in * self.warps_in

    @property
    def block_out(self) -> int:
        return 8 * self.tiles_out * self.warps_out

    def kinds(self, g: Geometry) -> int:
        """Returns the number of kinds of blocks, which together own all channels and taps."""
        channels = -(-g.in_per_group // self.block_in(g)) * -(-g.out_per_group // self.block_out)
        return g.groups * channels * self.row_blocks(g)

    def row_blocks(self, g: Geometry) -> int:
        """Returns the number of blocks that together have all rows of taps."""
        return -(-g.kernel[0] // self.rows_d) * -(-g.kernel[1] // self.rows_h)

    def tiles(self, taps: int) -> int:
        """Returns the matrix tiles of a warp, one for each of its taps and pairs of channel tiles."""
        return self.rows * taps * self.tiles_in * self.tiles_out

    def __str__(self) -> str:
        return (
            f"{self.warps} warps x {self.blocks} blocks, each warp {16 * self.tiles_in} x {8 * self.tiles_out} "
            f"channels x {self.rows} rows of taps, {self.slices} slices, "
            f"blocks of {self.rows_d} x {self.rows_h} rows, {self.stages} buffers of {self.segments * SEGMENT} words"
        )


def boxes(segments: int, lines: tuple[int, int]) -> Iterator[Box]:
    """Yields boxes of at most `segments` segments, none larger along d and h than the volume, whose size is
    `lines`."""
    for w in range(1, min(segments, 16) + 1):
        for h in range(1, min(segments // w, lines[1]) + 1):
            for d in range(1, min(segments // (w * h), lines[0]) + 1):
                yield Box(d, h, w)


def dy_pitch(planes: Planes, words: int) -> int:
    """Returns the next length in words of a channel of dy at which two channels lie in different banks."""
    return pitch_up(words) if planes.step == 1 else words + (4 - words) % 32


def pitch_up(words: int) -> int:
    """Returns the next length in words that is 16 more than a multiple of the 32 banks."""
    return words + (16 - words) % 32


@dataclass(frozen=True)
class Buffers:
    """Shared memory of a tiling, with room for the best box of a large volume; other boxes must fit it."""

    pitch_x: int
    plane: int
    pitch_y: int
    table_slots: int
    bytes: int

    @classmethod
    def of(cls, layer: Layer, planes: Planes, tiling: Tiling) -> Buffers:
        g = layer.geometry
        plane = _plane_room(g, planes, tiling.block_rows, tiling.segments)
        pitch_x, pitch_y = pitch_up(tiling.segments * SEGMENT), dy_pitch(planes, len(planes.offsets) * plane)
        slots = len(planes.offsets) * plane
        tables = 8 + 2 * (tiling.segments * SEGMENT + slots) + tiling.segments
        buffer = tiling.block_in(g) * pitch_x + tiling.block_out * pitch_y
        passing = (
            tiling.tiles(planes.taps) * layer.tile_sums * 32 * tiling.warps // tiling.slices
            if tiling.slices > 1
            else 0
        )
        return cls(pitch_x, plane, pitch_y, slots, 4 * max(-(-tables // 4) * 4 + tiling.stages * buffer, passing))


def _wide_boxes(segments: int) -> Iterator[Box]:
    """Yields boxes of exactly `segments` segments, with lines long enough for whole memory sectors."""
    for w in (4, 8):
        for h in range(1, segments // w + 1):
            if segments % (w * h) == 0:
                yield Box(segments // (w * h), h, w)


def plane_words(g: Geometry, planes: Planes, rows: tuple[int, int], box: Box, pad: int = 0) -> int:
    along_d, along_h = box.lines(g, rows)
    return along_d * along_h * (planes.line_pitch(box.w) + pad)


def copied_words(g: Geometry, planes: Planes, rows: tuple[int, int], box: Box) -> int:
    """Returns how many words of a channel of dy a box moves, counted in whole memory sectors."""
    along_d, along_h = box.lines(g, rows)
    return along_d * along_h * (planes.line_words(box.w) * g.stride[2] // planes.step + SECTOR_WORDS - 1)


@lru_cache(maxsize=4096)
def best_wide_box(g: Geometry, planes: Planes, rows: tuple[int, int], segments: int) -> Box:
    return min(_wide_boxes(segments), key=lambda box: copied_words(g, planes, rows, box))


@lru_cache(maxsize=4096)
def _plane_room(g: Geometry, planes: Planes, rows: tuple[int, int], segments: int) -> int:
    return pitch_up(plane_words(g, planes, rows, best_wide_box(g, planes, rows, segments)))
