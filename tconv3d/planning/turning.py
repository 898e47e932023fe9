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

THREADS = 128  # per block of the kernel `turn`
ROWS_OF_THREAD = 8  # rows of a matrix that a thread of the kernel `turn` loads (kRows in device/turn.cuh)
CHANNEL_LANES = 4  # lanes of a warp along the channels, unless there are too few channels or positions
MIN_BLOCKS = 5  # least blocks of the kernel `turn` on a multiprocessor: a thread may have 96 registers
MOST = 3  # tensors per launch
# Bytes that the transpose reads and writes per cycle and multiprocessor. The rate is derived, not measured: it is 85%
# of the 18.4 bytes that the memory of an H200 copies. A warp takes 15 instructions, counted in machine code, for 256
# bytes of rows of odd length; a multiprocessor issues 55 in the time that memory takes.
TURNED_BYTES = 15.6
ROW_PIECES = 8  # pieces of 16 bytes per position that a block of the kernel `rows` writes
ROW_POSITIONS = 64  # positions per block of the kernel `rows`
ROW_THREADS = 128  # threads per block of the kernel `rows`

_MATRICES = Struct(
    "Matrices",
    "A tensor as matrices that are transposed one by one, in tiles of a warp each.",
    elements=INT64("Elements of the tensor that is read, up to the last that exists."),
    from_rows=INT32("Rows of a matrix that is read."),
    rows=INT32("Rows of a matrix with the rows of zeros behind every line, as it is written."),
    columns=INT32("Columns of a matrix that is read."),
    first_block=INT32("Index of the first block that works on this tensor."),
    tiles=INT32("Number of tiles; 0 where the launch has fewer tensors."),
    rows_first=INT32("Whether neighbouring tiles follow each other along the rows, not along the columns."),
    by_line=DIVIDER("Divides by the rows of a line, with its rows of zeros; all rows are one line without any."),
    gap=INT32("Rows of zeros behind every line."),
    by_fast=DIVIDER("Divides by the number of tiles along the dimension of neighbouring tiles."),
    by_slow=DIVIDER("Divides by the number of tiles along the other dimension."),
    log_lanes=INT32("Binary logarithm of a warp's lanes along the rows."),
    first=INT32("Index of the first matrix that is read; it becomes the first that is written."),
)
_NOTHING = dict.fromkeys(_MATRICES.fields, 0) | {"by_line": 1, "by_fast": 1, "by_slow": 1}  # a tensor without tiles
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
    first: int = 0  # index of the first matrix that is read; it becomes the first that is written
    line: int = 0  # rows of a line, behind which the copy has rows of zeros up to a whole vector; 0 for no zeros

    @property
    def count(self) -> int:
        return self.items * self.rows * self.columns

    @property
    def gap(self) -> int:
        """The rows of zeros behind every line."""
        return -self.line % (16 // self.item_bytes)

    @property
    def written_rows(self) -> int:
        return self.rows + (self.rows // self.line * self.gap if self.line else 0)

    @property
    def written_bytes(self) -> int:
        return self.items * self.written_rows * self.columns * self.item_bytes

    @property
    def moved_bytes(self) -> int:
        """The bytes that are read and written."""
        return self.count * self.item_bytes + self.written_bytes

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns of a tile, which are a power of two."""
        of_lane = (ROWS_OF_THREAD, 16 // self.item_bytes)
        sizes, each = (self.written_rows, self.columns), of_lane
        if not self.channels_are_rows:
            sizes, each = sizes[::-1], each[::-1]
        needed = [1 << (-(-size // own) - 1).bit_length() for size, own in zip(sizes, each, strict=True)]
        positions = min(32 // min(CHANNEL_LANES, needed[0]), needed[1])
        row_lanes = 32 // positions if self.channels_are_rows else positions
        return row_lanes * of_lane[0], 32 // row_lanes * of_lane[1]

    @property
    def tiles(self) -> tuple[int, int]:
        """The number of tiles along the rows and along the columns."""
        rows, columns = self.tile
        return -(-self.written_rows // rows), -(-self.columns // columns)

    @property
    def blocks(self) -> int:
        return -(-self.items * prod(self.tiles) // (THREADS // 32))

    def arguments(self, first_block: int) -> dict[str, int]:
        """Returns the values of `struct Matrices`; `first_block` is the first block that works on this tensor."""
        of_rows, of_columns = self.tiles
        return {
            "elements": self.count + self.first * self.rows * self.columns,
            "from_rows": self.rows,
            "rows": self.written_rows,
            "columns": self.columns,
            "first_block": first_block,
            "tiles": self.items * of_rows * of_columns,
            "rows_first": self.channels_are_rows,
            "by_line": self.line + self.gap if self.line else self.rows,
            "gap": self.gap,
            "by_fast": of_rows if self.channels_are_rows else of_columns,
            "by_slow": of_columns if self.channels_are_rows else of_rows,
            "log_lanes": (self.tile[0] // ROWS_OF_THREAD).bit_length() - 1,
            "first": self.first,
        }


def turning(
    name: str, to: str, shape: tuple[int, ...], item_bytes: int, back: bool = False, whole: bool = False
) -> Turning:
    """Returns the transposition of a tensor from channels-last to contiguous, or from contiguous if `back`.

    `whole`: zeros follow every line of the contiguous tensor up to whole vectors of 16 bytes.
    """
    channels, positions = shape[1], prod(shape[2:])
    rows, columns = (channels, positions) if back else (positions, channels)
    assert not (back and whole)
    return Turning(name, to, shape[0], rows, columns, back, item_bytes, line=shape[-1] if whole else 0)


def turn(turnings: Sequence[Turning], overlaps: bool, hopper: bool = True) -> Launch:
    """Returns the launch that turns up to MOST tensors of one element size.

    `hopper`: the launch may overlap the previous one, and does if `overlaps`.
    """
    places, sizes, first = dict[str, str](), dict[str, Any](), 0
    assert 0 < len(turnings) <= MOST and len({each.item_bytes for each in turnings}) == 1
    for name, each in zip_longest(("first", "second", "third"), turnings):
        places |= {f"{name}_from": each.from_ if each else "null", f"{name}_to": each.to if each else "null"}
        sizes[name] = each.arguments(first) if each else _NOTHING
        first += each.blocks if each else 0
    return TURN.launch(
        first,
        THREADS,
        (("kItemBytes", turnings[0].item_bytes), ("kOverlaps", hopper)),
        places,
        min_blocks=MIN_BLOCKS,
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
