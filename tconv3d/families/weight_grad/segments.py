"""Words, segments and boxes of positions, which the planners of the weight-gradient kernels share.

A word is 32 bits, one float32 or two 16-bit elements; a segment is four words along w; a box is the positions of one
step of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...planning.geometry import Geometry, Triple
from ...planning.problem import Problem, last_offset
from ...planning.scalars import INT32_MAX

SEGMENT = 4  # words of 32 bits per segment, which a lane loads at once
SECTOR_WORDS = 8  # words of a memory sector, the smallest transaction


@dataclass(frozen=True)
class Box:
    """The size of a tile of positions, chosen for the volume at run time."""

    d: int
    h: int
    w: int  # segments along w

    @property
    def segments(self) -> int:
        return self.d * self.h * self.w

    def lines(self, g: Geometry, rows: tuple[int, int]) -> tuple[int, int]:
        """Returns the lines of dy along d and h that the rows of taps of a block reach."""
        d, h, _ = g.axes
        along_d = d.stride * (self.d - 1) + d.dilation * (rows[0] - 1) + 1
        return along_d, h.stride * (self.h - 1) + h.dilation * (rows[1] - 1) + 1

    def count(self, size: Triple, per_word: int) -> Triple:
        """Returns the number of boxes along d, h and w that cover a volume."""
        return -(-size[0] // self.d), -(-size[1] // self.h), -(-size[2] // (self.w * SEGMENT * per_word))


def vector_of(p: Problem, strides: tuple[int, ...], width: int) -> int:
    """Returns the words of a load that never straddles the end of a line; 0 for 16-bit elements one by one."""
    per_word = 4 // p.item_bytes
    for words in (4, 2, 1):
        if p.aligned and strides[4] == 1 and not any(v % (words * per_word) for v in (*strides[:4], width)):
            return words
    return 1 if per_word == 1 else 0


def wide(p: Problem, box: int) -> bool:
    """Tells whether an offset, or an intermediate value of one, may exceed 32 bits. Boxes of at most `box` segments
    may begin inside the volume and end outside."""
    g = p.geometry
    reach = tuple(
        size + box * axis.stride * 8 + axis.kernel * axis.dilation + axis.padding
        for size, axis in zip(p.output_size, g.axes, strict=True)
    )
    x = last_offset((p.batch + 1, g.in_channels, *(size + box * 8 for size in p.input_size)), p.input)
    return max(x, last_offset((p.batch + 1, g.out_channels, *reach), p.output)) > INT32_MAX
