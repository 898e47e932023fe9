"""Divides the taps of a pass into the rows, sources and windows that the kernel on mma.sync computes (mma_tile.cuh).

The result is a pure function of a layer's geometry. This module knows nothing of tiles, volumes or devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ...planning.classes import WHOLE, Classes, divided, unit_of
from ...planning.geometry import Triple
from ...planning.plain_data import once
from ...planning.problem import last_offset
from ...planning.side import Side, Unrolled

# Sources of a block phase whose items have one bit for each in a 16-bit mask; with more sources, copies compute
# which items lie inside x.
MAX_SOURCES = 16


@dataclass(frozen=True)
class Row:
    """One tap along each dimension that is not unrolled, and the place in its source's halo where it reads."""

    taps: tuple[int, ...]
    place: Triple


@dataclass(frozen=True)
class Source:
    """Groups the rows of taps of a block phase that read from one halo."""

    least: Triple  # offset in x of the halo's start, from input_step times the tile's first position
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Window:
    """Describes consecutive fragments along w that several inner taps share, each tap at its own shift."""

    place: Triple  # place in the halo, relative to the place of the row of taps
    taps: tuple[tuple[int, int], ...]  # inner tap, and its shift from the window's start in positions

    @property
    def span(self) -> int:
        return max(shift for _, shift in self.taps)


@dataclass(frozen=True)
class Work:
    """Derives the part of a build's work that depends on the layer alone."""

    side: Side  # counts the positions and steps of a class
    unrolled: int
    apart: bool = False  # every row of taps is a source of its own, because the halo of several would be too large
    lattices: int = 0  # outermost dimensions along which a block has positions of one class (planning/classes.py)
    classes: tuple[Classes, Classes, Classes] = (WHOLE, WHOLE, WHOLE)
    crops: bool = False  # a block leaves out steps whose taps read zeros beyond x alone (crop.py)

    @classmethod
    def of(cls, side: Side, unrolled: int, apart: bool = False, lattices: int = 0, crops: bool = False) -> Work:
        """Returns the work on positions of one class along the `lattices` outermost dimensions."""
        if not lattices:
            return cls(side, unrolled, apart, crops=crops)
        axes = zip(side.gathers, side.grid, strict=True)
        found = [
            divided(gather, positions, together=axis >= 3 - unrolled)
            if axis < lattices
            else (gather, WHOLE, positions)
            for axis, (gather, positions) in enumerate(axes)
        ]
        (d, h, w), (of_d, of_h, of_w), grid = zip(*found, strict=True)
        return cls(replace(side, gathers=(d, h, w), grid=grid), unrolled, apart, lattices, (of_d, of_h, of_w), crops)

    @once
    def strict(self) -> bool:
        """Tells whether every float32 product is computed as three TF32 products."""
        return self.side.problem.dtype == "float32" and not self.side.problem.tf32

    @once
    def step_bytes(self) -> int:
        """Bytes of channels per matrix instruction: 32, or 16 if a group has no more."""
        few = self.side.reduced * self.side.problem.item_bytes <= 16
        return 16 if few and not self.strict else 32

    @once
    def products(self) -> int:
        """The matrix instructions for one K step of a tile."""
        return 3 if self.strict else 1

    @once
    def inner(self) -> Unrolled:
        return Unrolled.of(self.side.gathers, self.unrolled)

    @property
    def outer_count(self) -> int:
        return 3 - self.unrolled

    @once
    def line_steps(self) -> Triple:
        """Lines (d, h) and items (w) of x from line to line, or item to item, of a halo.

        Lines are the input step apart if every phase of x has its own halo, else they are those of the lattice, or
        all lines.
        """
        d, h, _ = (gather.input_step for gather in self.side.gathers)
        of_d, of_h, of_w = (classes.unit for classes in self.classes)
        own = self.apart or d // of_d * (h // of_h) <= MAX_SOURCES
        return (d, h, of_w) if own else (of_d, of_h, of_w)

    @once
    def halo_steps(self) -> Triple:
        """Lines (d, h) and items (w) of a halo from one position of a tile to the next."""
        steps = (gather.input_step for gather in self.side.gathers)
        return tuple(step // line for step, line in zip(steps, self.line_steps, strict=True))

    @once
    def least_load(self) -> Triple:
        return tuple(min(load[i] for load in self.inner.loads) for i in range(3))

    @once
    def phases(self) -> tuple[tuple[Source, ...], ...]:
        """The sources of each block phase."""
        outer = self.side.gathers[: self.outer_count]
        return tuple(map(self._sources, product(*(range(gather.phases) for gather in outer))))

    def _sources(self, phase: Triple) -> tuple[Source, ...]:
        outer, unrolled = self.side.gathers[: self.outer_count], self.least_load[self.outer_count :]
        by_residue: dict[Triple, list[tuple[tuple[int, ...], Triple]]] = {}
        for row in product(*(range(gather.count[i]) for gather, i in zip(outer, phase, strict=True))):
            taps = tuple(gather.tap(i, j) for gather, i, j in zip(outer, phase, row, strict=True))
            offsets = (*(gather.offset(i, j) for gather, i, j in zip(outer, phase, row, strict=True)), *unrolled)
            residue = tuple(offset % step for offset, step in zip(offsets, self.line_steps, strict=True))
            by_residue.setdefault(offsets if self.apart else residue, []).append((taps, offsets))
        found = []
        for _, rows in sorted(by_residue.items()):
            least = tuple(min(offsets[i] for _, offsets in rows) for i in range(3))
            places = (
                tuple((o - at) // step for o, at, step in zip(offsets, least, self.line_steps, strict=True))
                for _, offsets in rows
            )
            found.append(
                Source(least, tuple(Row(taps, place) for (taps, _), place in zip(rows, places, strict=True)))
            )
        return tuple(found)

    @once
    def sources(self) -> tuple[Source, ...]:
        return tuple(source for phase in self.phases for source in phase)

    @once
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for source in self.sources for row in source.rows)

    @once
    def most_rows(self) -> int:
        """The most rows of taps that a block phase has."""
        return max(sum(len(source.rows) for source in phase) for phase in self.phases)

    @once
    def least_rows(self) -> int:
        """The fewest rows of taps that a source has."""
        return min((len(source.rows) for source in self.sources), default=1)

    @once
    def reach(self) -> Triple:
        """The greatest distance between two reads of one position's taps, in lines (d, h) and items (w) of a halo."""
        rows = (max((row.place[i] for row in self.rows), default=0) for i in range(3))
        furthest = (max(load[i] for load in self.inner.loads) - self.least_load[i] for i in range(3))
        loads = (distance // step for distance, step in zip(furthest, self.line_steps, strict=True))
        return tuple(map(sum, zip(rows, loads, strict=True)))

    @once
    def windows(self) -> tuple[Window, ...]:
        """The windows of a row of taps."""
        lines, step = self.line_steps, self.halo_steps[2]
        found: dict[Triple, list[tuple[int, int]]] = {}
        for number, (_, load, _) in enumerate(self.inner.taps):
            offsets = zip(self.inner.loads[load], self.least_load, lines, strict=True)
            d, h, w = ((o - at) // line for o, at, line in offsets)
            found.setdefault((d, h, w % step), []).append((number, w // step))
        windows = []
        for (d, h, plane), taps in found.items():
            first = min(shift for _, shift in taps)
            shifted = tuple((tap, shift - first) for tap, shift in taps)
            windows.append(Window((d, h, first * step + plane), shifted))
        return tuple(windows)


def lattices_of(side: Side) -> tuple[int, ...]:
    """Returns in how many of the outermost dimensions a block may have positions of one class, besides none."""
    dilated = [unit_of(gather) > 1 for gather in side.gathers]
    return (*((2,) if any(dilated[:2]) else ()), *((3,) if dilated[2] else ()))


def works(side: Side, lattices: int = 0, crops: bool = False) -> Iterator[Work]:
    """Yields the divisions of taps into rows and inner taps that are worth considering."""
    for unrolled in range(4):
        work, own = Work.of(side, unrolled, lattices=lattices, crops=crops), side.gathers[3 - unrolled :]
        if unrolled == 1 and max(own[0].phases, max(own[0].count)) == 1:
            continue  # a single tap along w leaves nothing to unroll
        if unrolled > 1 and max(gather.phases for gather in own[:-1]) == 1:
            continue
        # Lines of y that are put together in shared memory begin at its first output or behind it.
        if 0 < len(work.inner.loads) <= 32 and not (side.y[4] == 1 and work.classes[2].precedes):
            yield work


def outputs_of(side: Side) -> int:
    """Returns the number of elements of y."""
    return side.problem.batch * side.outs * side.problem.geometry.groups * prod(side.y_size)


def is_dense(side: Side) -> bool:
    """Tells whether y has no gaps in memory, so that partial sums can be laid out like it."""
    shape = (side.problem.batch, side.outs * side.problem.geometry.groups, *side.y_size)
    return last_offset(shape, side.y) + 1 == outputs_of(side)
