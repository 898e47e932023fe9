"""Taps by phase and tiles of positions, shared by the planners for few channels (few_channels.cuh).

A part is the box of the tensor with few channels that a tile of positions reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, product
from math import gcd, prod
from typing import Any

from ...planning.arguments import per_axis
from ...planning.geometry import Gather, Triple
from ...planning.launch import Constants, axis_constants
from ...planning.problem import Device, Problem, Strides
from ...planning.side import Side

LINE_ITEMS = 8  # the length of a line in shared memory is a multiple of 8 elements


def origin(gather: Gather) -> int:
    """Returns the index of the first element that position 0 reads; it may be negative."""
    return gather.reach[0]


def span(gather: Gather) -> int:
    return gather.reach[1] - gather.reach[0]


@dataclass(frozen=True)
class Taps:
    """Lists the taps phase after phase, and the offset at which each reads, relative to `origin`."""

    side: Side
    taps: tuple[Triple, ...]
    offsets: tuple[Triple, ...]
    counts: tuple[int, ...]  # number of taps of each phase

    @classmethod
    def of(cls, side: Side) -> Taps:
        taps, offsets, counts = [], [], []
        for phase in product(*(range(gather.phases) for gather in side.gathers)):
            of_phase = list(zip(side.gathers, phase, strict=True))
            found = list(product(*(range(gather.count[f]) for gather, f in of_phase)))
            for js in found:
                taps.append(tuple(gather.tap(f, j) for (gather, f), j in zip(of_phase, js, strict=True)))
                offsets.append(
                    tuple(gather.offset(f, j) - origin(gather) for (gather, f), j in zip(of_phase, js, strict=True))
                )
            counts.append(len(found))
        return cls(side, tuple(taps), tuple(offsets), tuple(counts))

    @property
    def phases(self) -> int:
        return len(self.counts)

    def constants(self) -> Constants:
        return (
            ("kReduced", self.side.reduced),
            ("kPhases", self.phases),
            ("kFirstTap", tuple(accumulate(self.counts, initial=0))),
            *((f"kTap{n}", tuple(tap[i] for tap in self.taps)) for i, n in enumerate("DHW")),
            *((f"kOffset{n}", tuple(offset[i] for offset in self.offsets)) for i, n in enumerate("DHW")),
            *((f"kOrigin{n}", origin(gather)) for n, gather in zip("DHW", self.side.gathers, strict=True)),
            *axis_constants(self.side.gathers, "input_step", "output_step"),
        )


@dataclass(frozen=True)
class Tile:
    """Describes a box of positions, and the part of the tensor with few channels that it reads."""

    side: Side
    size: Triple
    vector: int  # elements per asynchronous copy of the part; 0 if copied one by one through registers

    @property
    def part(self) -> Triple:
        d, h, w = (
            (n - 1) * gather.input_step + span(gather) + 1
            for n, gather in zip(self.size, self.side.gathers, strict=True)
        )
        return d, h, w

    @property
    def lines(self) -> int:
        return self.side.reduced * self.part[0] * self.part[1]

    @property
    def line_vectors(self) -> int:
        """The number of aligned vectors that cover a line of the part, each moved by one copy."""
        vector = max(1, self.vector)
        return -(-(origin(self.side.gathers[2]) % vector + self.part[2]) // vector)

    @property
    def line_pitch(self) -> int:
        return -(-self.line_vectors * max(1, self.vector) // LINE_ITEMS) * LINE_ITEMS

    @property
    def part_bytes(self) -> int:
        return self.lines * self.line_pitch * self.side.problem.item_bytes

    @property
    def counts(self) -> Triple:
        """The number of tiles along each dimension."""
        d, h, w = (-(-max(1, n) // of) for n, of in zip(self.side.grid, self.size, strict=True))
        return d, h, w

    @property
    def count(self) -> int:
        return self.side.problem.batch * prod(self.counts)

    @property
    def arguments(self) -> dict[str, Any]:
        """The values of `struct Tiles`."""
        return {
            "tile": self.size,
            "part": self.part,
            "line_pitch": self.line_pitch,
            "line_vectors": self.line_vectors,
            "count": self.count,
            **per_axis("by", self.counts),
            "part_by_d": self.part[0],
            "part_by_h": self.part[1],
            "by_line_vectors": self.line_vectors,
        }

    def __str__(self) -> str:
        return " x ".join(map(str, self.size)) + " positions per tile"


def copied_at_once(problem: Problem, strides: Strides, width: int) -> int:
    """Returns the elements per copy, a divisor of a tensor's strides and width; 0 for elements one by one through
    registers."""
    per_word = 4 // problem.item_bytes
    *others, w = strides
    if problem.aligned and w == 1:
        for vector in (16 // problem.item_bytes, 8 // problem.item_bytes, per_word):
            if not any(v % vector for v in (*others, width)):
                return vector
    return 1 if per_word == 1 else 0


def tiles(side: Side, rows: int, multiple: int, part_limit: int) -> list[Tile]:
    """Returns boxes of up to `rows` positions whose parts have at most `part_limit` bytes.

    The width of a box is divisible by `multiple` and by the vectors of its part.
    """
    vector = copied_at_once(side.problem, side.x, side.x_size[2])
    step = max(1, vector) // gcd(side.gathers[2].input_step, max(1, vector))
    multiple = max(multiple, step)  # both are powers of two
    d, h, w = (max(1, size) for size in side.grid)
    pieces = [-(-w // cuts) for cuts in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)]
    widths = {-(-piece // multiple) * multiple for piece in pieces}
    widths |= {rows >> i for i in range(5)}
    found = [
        Tile(side, (max(1, min(d, rows // (width * height))), height, width), vector)
        for width in sorted(widths)
        if width % multiple == 0 and 0 < width <= min(rows, w + multiple - 1)
        for height in range(1, min(h, rows // width) + 1)
    ]
    return [tile for tile in found if tile.part_bytes <= part_limit]


def fastest(
    side: Side, rows: int, multiple: int, bytes: int, cost: Callable[[Tile], float], device: Device
) -> tuple[Tile, int] | None:
    """Returns the tile with the least total cost and its blocks per multiprocessor, or None if no tile fits.

    A block has shared memory for two parts beside `bytes` bytes; `cost` is the cost of one tile. See `tiles` for the
    others.
    """
    found = []
    for blocks, slowdown in ((2, 1.0), (1, 1.4)):  # a single resident block idles at its barriers
        room = ((device.shared_bytes + 1024) // blocks - 1024 - bytes) // 2
        fitting = tiles(side, rows, multiple, room)
        tile = min(fitting, key=lambda tile: prod(tile.counts) * cost(tile), default=None)
        if tile is not None:
            found.append((tile.count * cost(tile) * slowdown, blocks, tile))
    if not found:
        return None
    _, blocks, tile = min(found, key=lambda one: one[:2])
    return tile, blocks
