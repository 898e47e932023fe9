"""The matrices of both products, the bands of a volume that is unfolded in several steps, and the slices of a block.

This module counts elements, bytes and the cycles of unfolding; it knows nothing of the products. planner.py explains
the terms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, prod

from ...planning.geometry import Geometry, Triple
from ...planning.problem import Device
from ...planning.repertoire import TYPICAL, nearest
from ...planning.scalars import round_up

TERMS = 32  # terms of a panel
ROW_BYTES = 4 * TERMS

# Costs of a multiprocessor in cycles at 1.755 GHz, fitted to measured times on an H200 together with those of the
# products in planner.py.
# Cycles of blocks that unfold: per word of dy read, per word copied to the image, per word written, and per block.
READ_WORD, COPIED_WORD, WRITTEN_WORD, SLICE = 0.275, 0.06, 0.216, 470.0
PLACE = 0.08  # cycles per word of one channel's image to compute an address, which all channels of the block share
TORN = 1.1  # factor on the time of writing where memory sectors are written in two parts
UNFOLD_CYCLES = 2900.0  # cycles per wave of blocks that unfold until the first words arrive and the last are stored
UNFOLDING_BYTES = 1766.0  # bytes of memory traffic per cycle of the whole GPU while unfolding
ENOUGH = 2.5  # blocks per multiprocessor that keep memory busy
BIAS = 1.2  # factor on the time of unfolding if blocks also add up dy for the bias gradient


@dataclass(frozen=True)
class Operands:
    """The matrices of both products, for a volume or for a band of it."""

    geometry: Geometry
    batch: int
    size: Triple

    def typical(self, device: Device) -> list[Operands]:
        """Returns the typical volumes nearest to this one whose operands fit the workspace."""
        volumes = (replace(self, batch=batch, size=(edge, edge, edge)) for batch, edge in TYPICAL)
        fitting = (each for each in volumes if each.outputs and each.bytes <= device.workspace_bytes)
        return nearest(self.batch * self.positions, ((each.batch * each.positions, each) for each in fitting))

    @property
    def whole(self) -> tuple[Band]:
        """The whole volume as one band."""
        return (Band(self, 0, self.batch, 0, self.size[0]),)

    @property
    def positions(self) -> int:
        return prod(self.size)

    @property
    def pitch(self) -> int:
        """Positions of a batch item, rounded up to whole memory sectors of 8 words."""
        return round_up(self.positions, 8)

    @property
    def columns_x(self) -> int:
        return self.batch * self.pitch

    @property
    def outputs(self) -> int:
        return self.batch * self.geometry.out_channels * prod(self.geometry.output_size(self.size))

    @property
    def terms(self) -> int:
        """Pairs of an output channel and a tap, which the product for dx adds up."""
        return self.geometry.out_channels * self.geometry.taps

    @property
    def chunks_x(self) -> int:
        return -(-self.terms // TERMS)

    @property
    def chunks_w(self) -> int:
        return -(-self.columns_x // TERMS)

    @property
    def panel_rows(self) -> int:
        return self.chunks_w * TERMS

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each operand that is written for the products."""
        rows = self.geometry.in_channels
        return {
            "x panels": ROW_BYTES * self.chunks_w * rows,
            "position panels": ROW_BYTES * self.chunks_x * self.panel_rows,
        }

    @property
    def bytes(self) -> int:
        return sum(self.regions.values())

    @property
    def x_bytes(self) -> int:
        """Bytes of x, and of dx."""
        return 4 * self.batch * self.geometry.in_channels * self.positions


@dataclass(frozen=True)
class Band:
    """The part of the volume that is unfolded at a time: some batch items, or some planes along d of one."""

    volume: Operands
    first_item: int
    items: int
    first_plane: int
    planes: int

    @property
    def operands(self) -> Operands:
        return replace(self.volume, batch=self.items, size=(self.planes, *self.volume.size[1:]))

    @property
    def last(self) -> bool:
        """Whether the band ends at the end of a batch item."""
        return self.first_plane + self.planes == self.volume.size[0]

    @property
    def first_line(self) -> int:
        return self.first_plane * self.volume.size[1]

    @property
    def first_column(self) -> int:
        """Index of the band's first element in x and in dx."""
        first = self.first_item * self.volume.geometry.in_channels * self.volume.positions
        return first + self.first_line * self.volume.size[2]


def bands_within(o: Operands, room: float) -> tuple[Band, ...]:
    """Returns the fewest bands whose operands each fit `room` bytes, of equal size but for the last. Returns an empty
    tuple if not even one plane fits."""
    depth = o.size[0]

    def even(count: int, fits: Callable[[int], bool]) -> int:
        """Returns the pieces per band, for the fewest bands that fit and as evenly as possible; 0 if no piece
        fits."""
        most = bisect_left(range(1, count + 1), True, key=lambda n: not fits(n))
        return -(-count // -(-count // most)) if most else 0

    def bytes_of(batch: int, planes: int) -> int:
        return replace(o, batch=batch, size=(planes, *o.size[1:])).bytes

    if items := even(o.batch, lambda n: bytes_of(n, depth) <= room):
        return tuple(Band(o, i, min(items, o.batch - i), 0, depth) for i in range(0, o.batch, items))
    planes = even(depth, lambda n: bytes_of(1, n) <= room)
    starts = range(0, depth, planes) if planes else ()
    return tuple(Band(o, i, 1, d, min(planes, depth - d)) for i in range(o.batch) for d in starts)


@dataclass(frozen=True)
class Slices:
    """The work of a block that unfolds: some output channels, for a slice of the positions. A slice is some planes
    along d, or some lines of one plane."""

    operands: Operands
    channels: int
    lines: int

    @property
    def count(self) -> int:
        """Slices of a batch item."""
        return -(-prod(self.operands.size[:2]) // self.lines)

    @property
    def image(self) -> Triple:
        """Size of the outputs that the positions reach, and of those that follow up to the next slice or the end.

        Every output is thus in the image of the slice that adds it to the bias gradient. The length of a line is odd,
        so that lines begin in different banks.
        """
        (d, h, w), axes = self.operands.size, self.operands.geometry.axes
        planes, lines = -(-self.lines // h), min(self.lines, h)
        extents = []
        for size, own, axis in zip((d, h, w), (planes, lines, w), axes, strict=True):
            reached = (own - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1
            last = (size - 1) // own * own  # first position of the last slice
            rest = axis.output_size(size) - last * axis.stride
            extents.append(max(reached, axis.padding + max(own * axis.stride if last else 0, rest)))
        return extents[0], extents[1], extents[2] | 1

    @property
    def bytes(self) -> int:
        """Bytes of shared memory."""
        taps, positions = self.operands.geometry.taps, self.lines * self.operands.size[2]
        return 4 * (self.channels * (taps + (prod(self.image) | 1)) + positions + 80)

    @property
    def blocks(self) -> int:
        o = self.operands
        return o.batch * -(-o.geometry.out_channels // self.channels) * self.count

    @property
    def whole(self) -> bool:
        """Whether the words that a block writes per position are whole pieces of 16 bytes."""
        return self.channels * self.operands.geometry.taps % 4 == 0

    def cycles(self, device: Device) -> float:
        o = self.operands
        torn = self.channels * o.geometry.taps % 8 != 0
        copied = (COPIED_WORD * self.channels + PLACE) * prod(self.image)
        written = WRITTEN_WORD * self.channels * o.geometry.taps * self.lines * o.size[2] * (TORN if torn else 1.0)
        read = READ_WORD * o.outputs / device.multiprocessors
        own = self.blocks / device.multiprocessors
        at_once = device.shared_bytes // (self.bytes + 1024)
        waves = max(1.0, own / min(8, at_once))
        reading = read * max(1.0, ENOUGH / own)
        return (own + ceil(own)) / 2 * (copied + written) + own * SLICE + reading + waves * UNFOLD_CYCLES

    def cycles_with(self, bias: bool, device: Device) -> float:
        """Predicts the cycles of the launch, including memory traffic and the blocks that write x."""
        o = self.operands
        moved = o.bytes + o.x_bytes + 4 * o.outputs
        return max(self.cycles(device) * (BIAS if bias else 1.0), moved / UNFOLDING_BYTES + UNFOLD_CYCLES)


Bands = tuple[Band, ...]
