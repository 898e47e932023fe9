"""Launches that write channels-last tensors as contiguous ones, or the other way round (device/turn.cuh, rows.cuh).

Knows shapes and places, not what the tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..families.direct.planner import SCALARS
from .geometry import Triple
from .launch import Launch
from .packing import divider, int32s, int64s, padded
from .problem import ITEM_BYTES, Strides

THREADS = 256
TILE_WORDS = 4096
MAX_CHANNELS = 64  # of a tile, where there are positions to fill it
LEAST, MOST_OF_A_SIDE = 3, 9  # of a tile's channels, by their binary logarithm
MOST = 3  # tensors of one launch
ROW_PIECES = 8  # of 16 bytes, of a position, by a block that writes rows
ROW_POSITIONS = 64
ROW_THREADS = 128


@dataclass(frozen=True)
class Turning:
    """A tensor that is some matrices, each of which is transposed."""

    from_: str
    to: str
    items: int
    rows: int
    columns: int
    channels_are_rows: bool
    item_bytes: int
    pairs: bool  # elements of 16 bits two by two
    first: int = 0  # item that is read; what is written begins with it

    @property
    def count(self) -> int:
        return self.items * self.rows * self.columns

    @property
    def log_tile(self) -> tuple[int, int]:
        """Rows and columns of a tile, in elements."""
        log_words = (TILE_WORDS * (2 if self.pairs else 1)).bit_length() - 1
        channels, positions = (self.rows, self.columns) if self.channels_are_rows else (self.columns, self.rows)
        log_channels = max(LEAST, (min(channels, MAX_CHANNELS) - 1).bit_length())
        log_positions = min(log_words - log_channels, max(1, (positions - 1).bit_length()))
        log_channels = min(max(LEAST, (channels - 1).bit_length()), log_words - log_positions, MOST_OF_A_SIDE)
        return (log_channels, log_positions) if self.channels_are_rows else (log_positions, log_channels)

    @property
    def tiles(self) -> tuple[int, int]:
        log_rows, log_columns = self.log_tile
        return -(-self.rows >> log_rows), -(-self.columns >> log_columns)

    @property
    def blocks(self) -> int:
        return self.items * prod(self.tiles)

    @property
    def efficiency(self) -> float:
        """How much of a tile's channels there is."""
        channels = self.rows if self.channels_are_rows else self.columns
        log_channels = self.log_tile[0 if self.channels_are_rows else 1]
        return channels / (-(-channels >> log_channels) << log_channels)


def turning(
    name: str, to: str, shape: tuple[int, ...], item_bytes: int, aligned: bool, back: bool = False
) -> Turning:
    """Of a tensor with this shape; `back`: from contiguous to channels-last."""
    channels, positions = shape[1], prod(shape[2:])
    rows, columns = (channels, positions) if back else (positions, channels)
    pairs = item_bytes == 2 and aligned and rows % 2 == columns % 2 == 0
    return Turning(name, to, shape[0], rows, columns, back, item_bytes, pairs)


def turn(turnings: Sequence[Turning], overlaps: bool) -> Launch:
    """Turns some tensors at once."""
    scalars, first = b"", 0
    assert 0 < len(turnings) <= MOST and len({each.item_bytes for each in turnings}) == 1
    for each in turnings:
        scalars += int64s(each.rows, each.columns)
        scalars += int32s(first, each.blocks, *each.tiles, *each.log_tile, each.pairs, each.first)
        first += each.blocks
    missing = MOST - len(turnings)
    return Launch(
        kernel="turn",
        constants=(
            ("kThreads", THREADS),
            ("kMinBlocks", 4),
            ("kItemBytes", turnings[0].item_bytes),
            ("kTileWords", TILE_WORDS),
            ("kMostRows", 2 * TILE_WORDS >> LEAST),
        ),
        grid=(first, 1, 1),
        threads=THREADS,
        shared_bytes=0,
        pointers=(
            *[each.from_ for each in turnings] + ["null"] * missing,
            *[each.to for each in turnings] + ["null"] * missing,
        ),
        scalars=scalars + bytes(48 * missing),
        overlaps=overlaps,
    )


def channels_last(strides: Strides, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is dense with channels fastest, and turning it changes something."""
    _, c, d, h, w = shape
    return c > 1 and d * h * w > 1 and strides == (c * d * h * w, 1, c * h * w, c * w, c)


def channel_rows(
    dtype: str,
    batch: int,
    channels: int,
    size: Triple,
    read: Strides,
    aligned: bool,
    already: bool,
    hopper: bool = True,
) -> Launch:
    """Writes "x", a tensor with these strides, as rows of channels, "rows", in the numbers that tensor cores take.

    16-bit types are read by eight positions if possible, or by two. `already`: it has rows of channels, which are
    only rounded. `hopper`: the launch may overlap others, and matrices may be stored as a whole.
    """
    (d, h, w), (n, c, *volume) = size, read
    item_bytes = ITEM_BYTES[dtype]
    items, blocks = ROW_PIECES * 16 // item_bytes, -(-d * h * w // ROW_POSITIONS)
    dense = item_bytes == 2 and aligned and volume == [h * w, w, 1]
    pairs, vectors = (dense and not any(v % positions for v in (d * h * w, n, c)) for positions in (2, 8))
    vectors = vectors and hopper
    shared_bytes = 16 * ROW_POSITIONS * ROW_PIECES if vectors else 4 * ROW_POSITIONS * (items + 1)
    return Launch(
        kernel="rows",
        constants=(
            ("kThreads", ROW_THREADS),
            ("kMinBlocks", 1),
            ("Scalar", SCALARS[dtype]),
            ("kAllChannels", channels),
            ("kPositions", ROW_POSITIONS),
            ("kPairs", pairs),
            ("kVectors", vectors),
            ("kAlready", already),
            ("kOverlaps", hopper),
            ("kSharedBytes", shared_bytes),
        ),
        grid=(batch * blocks * -(-channels // items), 1, 1),
        threads=ROW_THREADS,
        shared_bytes=shared_bytes,
        pointers=("x", "rows"),
        scalars=padded(int64s(*read, d * h * w), int32s(blocks), divider(w), divider(h)),
        overlaps=hopper,
    )
