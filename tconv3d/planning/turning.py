"""Plans launches that change a tensor's memory layout (device/turn.cuh, device/rows.cuh).

To turn a tensor means to transpose it from channels-last to contiguous or back. This module knows shapes and places,
but not what the tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any

from .arguments import CONST_POINTER, DIVIDER, INT32, INT64, POINTER, STRIDES, Arguments, Struct
from .geometry import Triple
from .launch import Launch
from .problem import ITEM_BYTES, Strides
from .scalars import SCALARS

THREADS = 256  # per block of the kernel `turn`
TILE_WORDS = 4096  # words of 4 bytes per tile
MAX_CHANNELS = 64  # channels per tile, unless there are too few positions to fill the tile
LEAST, MOST_OF_A_SIDE = 3, 9  # binary logarithms of the fewest and the most channels per tile
MOST = 3  # tensors per launch
ROW_PIECES = 8  # pieces of 16 bytes per position that a block of the kernel `rows` writes
ROW_POSITIONS = 64  # positions per block of the kernel `rows`
ROW_THREADS = 128  # threads per block of the kernel `rows`

_MATRICES = Struct(
    "Matrices",
    "A tensor as matrices that are transposed one by one, and the blocks of the launch that do it.",
    rows=INT64("Rows of a matrix that is read."),
    columns=INT64("Columns of a matrix that is read."),
    first_block=INT32("Index of the first block that works on this tensor."),
    blocks=INT32("Number of blocks that work on this tensor; 0 where the launch has fewer tensors."),
    tiles_of_rows=INT32("Tiles along the rows of a matrix."),
    tiles_of_columns=INT32("Tiles along the columns of a matrix."),
    log_rows=INT32("Binary logarithm of the rows of a tile, in elements."),
    log_columns=INT32("Binary logarithm of the columns of a tile, in elements."),
    pairs=INT32("Whether 16-bit elements are moved two by two."),
    first=INT32("Index of the first matrix that is read; it becomes the first that is written."),
)
TURN = Arguments(
    "turn",
    first_from=CONST_POINTER("The first tensor as it is."),
    second_from=CONST_POINTER("The second tensor as it is."),
    third_from=CONST_POINTER("The third tensor as it is."),
    first_to=POINTER("The first tensor with its matrices transposed."),
    second_to=POINTER("The second tensor with its matrices transposed."),
    third_to=POINTER("The third tensor with its matrices transposed."),
    first=_MATRICES("Sizes of the first tensor."),
    second=_MATRICES("Sizes of the second tensor."),
    third=_MATRICES("Sizes of the third tensor."),
)
ROWS = Arguments(
    "rows",
    x=CONST_POINTER("The tensor that is read."),
    rows=POINTER("The tensor as rows of channels, one for every position."),
    stride=STRIDES("Strides of x."),
    volume=INT64("Positions of a batch item."),
    blocks=INT32("Blocks that share the positions of a batch item."),
    by_w=DIVIDER("Divides by the size of x along w."),
    by_h=DIVIDER("Divides by the size of x along h."),
)


@dataclass(frozen=True)
class Turning:
    """Describes a tensor as a batch of matrices, each of which is transposed."""

    from_: str
    to: str
    items: int
    rows: int
    columns: int
    channels_are_rows: bool
    item_bytes: int
    pairs: bool  # 16-bit elements are moved in pairs
    first: int = 0  # index of the first matrix that is read; it becomes the first that is written

    @property
    def count(self) -> int:
        return self.items * self.rows * self.columns

    @property
    def log_tile(self) -> tuple[int, int]:
        """Binary logarithms of the rows and columns of a tile, in elements."""
        log_words = (TILE_WORDS * (2 if self.pairs else 1)).bit_length() - 1
        channels, positions = (self.rows, self.columns) if self.channels_are_rows else (self.columns, self.rows)
        log_channels = max(LEAST, (min(channels, MAX_CHANNELS) - 1).bit_length())
        if channels > MAX_CHANNELS:  # narrower tiles, where these have fewer channels past the last one
            wide, narrow = (-(-channels >> log) << log for log in (log_channels, log_channels - 1))
            log_channels -= narrow < wide
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

    def arguments(self, first_block: int) -> dict[str, int]:
        """Returns the values of `struct Matrices`; `first_block` is the first block that works on this tensor."""
        (log_rows, log_columns), (tiles_of_rows, tiles_of_columns) = self.log_tile, self.tiles
        return {
            "rows": self.rows,
            "columns": self.columns,
            "first_block": first_block,
            "blocks": self.blocks,
            "tiles_of_rows": tiles_of_rows,
            "tiles_of_columns": tiles_of_columns,
            "log_rows": log_rows,
            "log_columns": log_columns,
            "pairs": self.pairs,
            "first": self.first,
        }

    @property
    def efficiency(self) -> float:
        """The share of the tiles' channels that exist in the tensor, at most 1."""
        channels = self.rows if self.channels_are_rows else self.columns
        log_channels = self.log_tile[0 if self.channels_are_rows else 1]
        return channels / (-(-channels >> log_channels) << log_channels)


def turning(
    name: str, to: str, shape: tuple[int, ...], item_bytes: int, aligned: bool, back: bool = False
) -> Turning:
    """Returns the transposition of a tensor from channels-last to contiguous, or from contiguous if `back`."""
    channels, positions = shape[1], prod(shape[2:])
    rows, columns = (channels, positions) if back else (positions, channels)
    pairs = item_bytes == 2 and aligned and rows % 2 == 0
    return Turning(name, to, shape[0], rows, columns, back, item_bytes, pairs)


def turn(turnings: Sequence[Turning], overlaps: bool) -> Launch:
    """Returns the launch that turns up to MOST tensors of one element size."""
    places, sizes, first = dict[str, str](), dict[str, Any](), 0
    assert 0 < len(turnings) <= MOST and len({each.item_bytes for each in turnings}) == 1
    for name, each in zip_longest(("first", "second", "third"), turnings):
        places |= {f"{name}_from": each.from_ if each else "null", f"{name}_to": each.to if each else "null"}
        sizes[name] = each.arguments(first) if each else dict.fromkeys(_MATRICES.fields, 0)
        first += each.blocks if each else 0
    return TURN.launch(
        first,
        THREADS,
        (("kItemBytes", turnings[0].item_bytes), ("kTileWords", TILE_WORDS), ("kMostRows", 2 * TILE_WORDS >> LEAST)),
        places,
        min_blocks=4,
        overlaps=overlaps,
        **sizes,
    )


def channels_last(strides: Strides, shape: tuple[int, ...]) -> bool:
    """Returns whether a tensor is dense channels-last, and not contiguous at the same time."""
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
    """Returns the launch that writes operand "x", with strides `read`, as rows of channels to operand "rows".

    Values are rounded to operands of tensor cores. 16-bit types are read in vectors of 8 positions if possible, else
    of 2. `already`: x has rows of channels and is only rounded. `hopper`: the launch may overlap the previous one,
    and a store to shared memory may transpose a matrix.
    """
    (d, h, w), (n, c, *volume) = size, read
    item_bytes = ITEM_BYTES[dtype]
    items, blocks = ROW_PIECES * 16 // item_bytes, -(-d * h * w // ROW_POSITIONS)
    dense = item_bytes == 2 and aligned and volume == [h * w, w, 1]
    pairs, vectors = (dense and not any(v % positions for v in (d * h * w, n, c)) for positions in (2, 8))
    vectors = vectors and hopper
    shared_bytes = 16 * ROW_POSITIONS * ROW_PIECES if vectors else 4 * ROW_POSITIONS * (items + 1)
    return ROWS.launch(
        batch * blocks * -(-channels // items),
        ROW_THREADS,
        (
            ("Scalar", SCALARS[dtype]),
            ("kAllChannels", channels),
            ("kPositions", ROW_POSITIONS),
            ("kPairs", pairs),
            ("kVectors", vectors),
            ("kAlready", already),
            ("kOverlaps", hopper),
            ("kSharedBytes", shared_bytes),
        ),
        shared_bytes=shared_bytes,
        overlaps=hopper,
        stride=read,
        volume=d * h * w,
        blocks=blocks,
        by_w=w,
        by_h=h,
    )
