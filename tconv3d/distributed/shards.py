"""Says, for a volume that is split among ranks, which rows each rank owns, needs, sends and receives.

A pass computes targets from sources: the forward pass output rows from input rows, the backward pass rows of the
input gradient from rows of the output gradient. One dimension of a pass over a split volume is a `Split`; a rank's
part of all three dimensions is a `Block`. Rows are ranges of whole-volume indices. DTensor divides both tensors as
`torch.chunk` does: the first ranks have equally many rows, the last may have fewer or none.

The rows that a rank needs and does not own are its halo. Targets that read no halo are right as soon as the rank's
own sources are convolved. The other targets form thin slabs at the two ends; a slab is computed once more, after the
halo has arrived, from the halo and the few own sources beside it.

This module is plain arithmetic on top of `planning/geometry.py`. It knows no tensors and no process groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from ..planning.geometry import Axis, Geometry

Box = tuple[range, ...]  # rows along depth, height and width

FARTHEST_SEARCH = 4096  # sizes that `Split.least_size` tries


class ShardTooSmall(ValueError):
    """Raised on every rank if a halo reaches beyond the neighbouring shard. The message says the least size."""


def chunk(size: int, shards: int, index: int) -> range:
    """Returns the rows of one shard as `torch.chunk` and DTensor divide `size` rows among `shards` shards."""
    most = -(-size // shards)
    start = min(size, most * index)
    return range(start, min(size, start + most))


def hull(ranges: list[range]) -> range:
    """Returns the rows from the first to the last row of all ranges, which may have steps."""
    filled = [each for each in ranges if each]
    if not filled:
        return range(0)
    return range(min(each[0] for each in filled), max(each[-1] for each in filled) + 1)


def common(one: range, other: range) -> range:
    """Returns the rows that are in both ranges. The first may have a step, the second has none."""
    first = one.start + -(-max(0, other.start - one.start) // one.step) * one.step
    return range(first, max(first, min(one.stop, other.stop)), one.step)


def shared(one: Box, other: Box) -> Box:
    """Returns the rows that are in both boxes."""
    return tuple(common(a, b) for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class Slab:
    """Describes targets at one end of a shard that need a halo, and the rows of the buffer they are computed from.

    The buffer has the rows `sources`. The kernel computes the targets `computed`, which begin where the padding is
    the layer's own, so that a slab needs no further kernel build; `targets`, the last of them, are kept.
    """

    targets: range
    computed: range
    sources: range
    halos: tuple[range, ...]  # rows that arrive from a neighbour


@dataclass(frozen=True)
class Split:
    """Describes one dimension of a pass over a volume of `size` input rows that is split into `shards`."""

    axis: Axis
    size: int
    shards: int = 1
    backward: bool = False

    @property
    def source_size(self) -> int:
        return self.axis.output_size(self.size) if self.backward else self.size

    @property
    def target_size(self) -> int:
        return self.size if self.backward else self.axis.output_size(self.size)

    @property
    def reversed(self) -> Split:
        """The other pass, whose targets are this pass's sources. Both have the same pairs of target and source."""
        return replace(self, backward=not self.backward)

    def sources(self, index: int) -> range:
        """Returns the source rows that a shard owns."""
        return chunk(self.source_size, self.shards, index)

    def targets(self, index: int) -> range:
        """Returns the target rows that a shard owns."""
        return chunk(self.target_size, self.shards, index)

    def reads(self, targets: range) -> list[range]:
        """Returns the sources that the taps of these targets read, as one range per tap."""
        axis, found = self.axis, []
        if not targets:
            return []
        for tap in range(axis.kernel):
            offset = tap * axis.dilation - axis.padding  # output = stride*input + offset
            if self.backward:
                stepped = range(
                    axis.stride * targets[0] + offset, axis.stride * targets[-1] + offset + 1, axis.stride
                )
            else:
                stepped = range(-((offset - targets[0]) // axis.stride), (targets[-1] - offset) // axis.stride + 1)
            found.append(common(stepped, range(self.source_size)))
        return [each for each in found if each]

    def span(self, targets: range, within: range) -> range:
        """Returns the rows from the first to the last row of `within` that a tap of these targets reads."""
        return hull([common(each, within) for each in self.reads(targets)])

    def halos(self, index: int) -> tuple[range, range]:
        """Returns the rows that a shard receives from the shard before it and from the shard after it."""
        own, targets = self.sources(index), self.targets(index)
        before = self.span(targets, range(own.start))
        return before, self.span(targets, range(own.stop, self.source_size))

    def extended(self, index: int) -> range:
        """Returns the rows that a shard has when its halos have arrived. A row between them may have no reader."""
        return hull([self.sources(index), *self.halos(index)]) or self.sources(index)

    def readers(self, index: int, sources: range) -> range:
        """Returns the shard's targets from the first to the last that reads one of these sources."""
        return self.reversed.span(sources, self.targets(index))

    def slabs(self, index: int) -> tuple[Slab, ...]:
        """Returns the slabs of a shard: one for each halo, or one for both if a target reads both halos."""
        halos = self.halos(index)
        ends = [self.readers(index, halo) for halo in halos]
        if all(ends) and ends[1].start < ends[0].stop:
            return (self._slab(hull(ends), halos),)
        return tuple(self._slab(targets, (halo,)) for targets, halo in zip(ends, halos, strict=True) if targets)

    def _slab(self, targets: range, halos: tuple[range, ...]) -> Slab:
        read, stride = hull([*self.reads(targets), *halos]), self.axis.stride
        if self.backward:
            first = min(read.start // stride, targets.start)
            return Slab(targets, range(first, targets.stop), range(first * stride, read.stop), halos)
        first = min(read.start, targets.start // stride)
        return Slab(targets, range(first * stride, targets.stop), range(first, read.stop), halos)

    def window(self, sources: range, targets: range) -> Axis:
        """Returns the axis for these sources alone and these targets."""
        return self.axis.window(targets, sources) if self.backward else self.axis.window(sources, targets)

    @property
    def misfit(self) -> tuple[int, range, int, range] | None:
        """A shard, its halo, the neighbour that should own the halo, and the rows it owns; None if all halos fit."""
        for index in range(self.shards):
            for halo, neighbour in zip(self.halos(index), (index - 1, index + 1), strict=True):
                owned = self.sources(neighbour) if 0 <= neighbour < self.shards else range(0)
                if halo and common(halo, owned) != halo:
                    return index, halo, neighbour, owned
        return None

    def check(self, name: str, transposed: bool = True) -> None:
        """Raises `ShardTooSmall` if a shard needs rows that neither it nor its neighbours own.

        A plain convolution (`transposed` is false) is a backward pass whose sources are the user's input.
        """
        found = self.misfit
        if found is None:
            return
        index, halo, neighbour, owned = found
        size, least = (self.size, self.least_size) if transposed else (self.source_size, self.least_source_size)
        advice = f"no {name} suits them" if least is None else f"the least {name} for {self.shards} shards is {least}"
        rows = "rows of the output gradient" if transposed and self.backward else "input rows"
        raise ShardTooSmall(
            f"an input of {name} {size} is too small for {self.shards} shards: shard {index} needs {len(halo)} "
            f"{rows} ({halo.start} to {halo.stop - 1}) of shard {neighbour} beside it, which has {len(owned)}; "
            f"{advice}"
        )

    @property
    def least_size(self) -> int | None:
        """The least input size above the present one whose halos fit in both passes."""
        for size in range(self.size + 1, self.size + FARTHEST_SEARCH):
            larger = replace(self, size=size)
            if (
                larger.misfit is None
                and larger.reversed.misfit is None
                and min(larger.source_size, larger.target_size)
            ):
                return size
        return None

    @property
    def least_source_size(self) -> int | None:
        """The least number of sources, above the present one, whose halos fit in a pass of as many targets."""
        for size in range(self.size + 1, self.size + FARTHEST_SEARCH):
            larger = replace(self, size=size, axis=replace(self.axis, output_padding=0))
            if larger.source_size > self.source_size and larger.misfit is None:
                return larger.source_size
        return None


@dataclass(frozen=True)
class BlockSlab:
    """Describes a slab in all three dimensions, with the axes of the window that computes it."""

    dim: int  # the dimension along which the slab is thin
    sources: Box
    computed: Box
    targets: Box
    halos: tuple[Box, ...]
    axes: tuple[Axis, ...]
    readers: tuple[Box, ...]  # for each halo the targets that read it
    reader_axes: tuple[tuple[Axis, ...], ...]  # for each halo the axes of the window from the halo to its readers


@dataclass(frozen=True)
class Stage:
    """Holds what happens along one dimension: messages by neighbour (-1 or +1), and slabs that they complete."""

    dim: int
    slabs: tuple[BlockSlab, ...]
    sends: dict[int, Box]
    receives: dict[int, Box]


@dataclass(frozen=True)
class Block:
    """Describes a rank's part of a pass over a volume that is split along one, two or three dimensions.

    Halos are exchanged one dimension after another. The messages of a later dimension include the halos of the
    earlier dimensions, so that corners arrive by way of two neighbours and every rank talks to its direct neighbours
    alone. Slabs of a later dimension overwrite targets that earlier slabs computed without the corners.
    """

    splits: tuple[Split, ...]  # depth, height, width; a dimension that is not split has one shard
    place: tuple[int, ...]  # the rank's shard along each dimension

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions (0: depth) whose halos are exchanged, in this order."""
        return tuple(dim for dim, split in enumerate(self.splits) if split.shards > 1)

    @cached_property
    def sources(self) -> Box:
        return tuple(split.sources(index) for split, index in zip(self.splits, self.place, strict=True))

    @cached_property
    def targets(self) -> Box:
        return tuple(split.targets(index) for split, index in zip(self.splits, self.place, strict=True))

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the window from the rank's own sources to its own targets."""
        return self.window(self.sources, self.targets)

    def window(self, sources: Box, targets: Box) -> tuple[Axis, ...]:
        return tuple(s.window(a, b) for s, a, b in zip(self.splits, sources, targets, strict=True))

    def reached(self, dim: int, rows: range) -> Box:
        """Returns these rows along `dim`, extended sources along earlier dimensions, own sources along later ones."""
        box = list(self.sources)
        for earlier in range(dim):
            box[earlier] = self.splits[earlier].extended(self.place[earlier])
        box[dim] = rows
        return tuple(box)

    def slabs(self, dim: int) -> Iterator[BlockSlab]:
        """Yields the slabs that the halos along a dimension complete."""
        for slab in self.splits[dim].slabs(self.place[dim]):
            sources = self.reached(dim, slab.sources)
            computed, targets = list(self.targets), list(self.targets)
            computed[dim], targets[dim] = slab.computed, slab.targets
            halos = tuple(self.reached(dim, halo) for halo in slab.halos)
            axes = self.window(sources, tuple(computed))
            readers = tuple(self.readers(dim, halo) for halo in halos)
            reader_axes = tuple(self.window(*pair) for pair in zip(halos, readers, strict=True))
            yield BlockSlab(dim, sources, tuple(computed), tuple(targets), halos, axes, readers, reader_axes)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The dimensions whose halos are exchanged, in this order."""
        return tuple(Stage(dim, tuple(self.slabs(dim)), self.sends(dim), self.receives(dim)) for dim in self.dims)

    def receives(self, dim: int) -> dict[int, Box]:
        """Returns the sources that arrive along a dimension from the neighbours -1 and +1."""
        halos = self.splits[dim].halos(self.place[dim])
        boxes = {step: self.reached(dim, halo) for step, halo in zip((-1, 1), halos, strict=True)}
        return {step: box for step, box in boxes.items() if volume(box)}

    def sends(self, dim: int) -> dict[int, Box]:
        """Returns the sources that go along a dimension to the neighbours -1 and +1."""
        found = {}
        for step in (-1, 1):
            if 0 <= self.place[dim] + step < self.splits[dim].shards:
                halo = self.splits[dim].halos(self.place[dim] + step)[step == -1]
                found[step] = self.reached(dim, halo)
        return {step: box for step, box in found.items() if volume(box)}

    @property
    def rows_sent(self) -> int:
        """The number of positions, of each channel and batch item, that the rank sends."""
        return sum(volume(box) for dim in self.dims for box in self.sends(dim).values())

    def readers(self, dim: int, halo: Box) -> Box:
        """Returns the rank's targets that read a halo along a dimension."""
        box = list(self.targets)
        box[dim] = self.splits[dim].readers(self.place[dim], halo[dim])
        return tuple(box)


def volume(box: Box) -> int:
    return prod(len(rows) for rows in box)


NAMES = ("depth", "height", "width")


@lru_cache(maxsize=4096)
def block(
    geometry: Geometry, input_size: tuple[int, ...], shards: tuple[int, ...], place: tuple[int, ...], backward: bool
) -> Block:
    """Returns a rank's part of a pass. Raises `ShardTooSmall`, on every rank alike, if a halo does not fit."""
    splits = tuple(Split(*each, backward=backward) for each in zip(geometry.axes, input_size, shards, strict=True))
    for split, name in zip(splits, NAMES, strict=True):
        split.check(name)
    return Block(splits, place)
