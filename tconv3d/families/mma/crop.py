"""Finds the steps of a tile of the kernel on mma.sync whose taps read x at all (mma_tile.cuh, kCrops).

Where kernels reach far beyond a small volume, most taps of a tile read zeros at every position. A block then leaves
out the steps with no other taps. This module counts what is left, as the kernel does, for a volume.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from ...planning.geometry import Triple, valid_range
from ...planning.side import Side
from .work import Work

WORTH = 1.5  # products along d and h over those inside the volume from which it is worth leaving steps out
MOST_STEPS = 63  # steps of a chunk that have a bit each in a word of 64


def is_worth(side: Side) -> bool:
    """Tells whether many products along d and h are with zeros beyond the volume."""
    computed = inside = 1
    for axis, gather, size, outputs in list(
        zip(side.problem.geometry.axes, side.gathers, side.problem.input_size, side.y_size, strict=True)
    )[:2]:
        phases = enumerate(gather.count)
        computed *= sum(count * len(range(phase, outputs, gather.output_step)) for phase, count in phases)
        inside *= axis.meetings(size)
    return computed > WORTH * inside


def may_leave_out(work: Work, rows: int) -> bool:
    """Tells whether a mask holds all steps of a block, where each step has so many rows of taps."""
    return all(sum(-(-len(source.rows) // rows) for source in phase) <= MOST_STEPS for phase in work.phases)


def share(work: Work, tile: Triple, rows: int) -> float:
    """Returns the share of all rows of taps that tiles do not leave out, where a step has so many of them."""
    return _share(work, tile[: work.outer_count], rows) if work.crops else 1.0


@lru_cache(maxsize=4096)
def _share(work: Work, tile: Triple, rows: int) -> float:
    needed = every = 0
    for number, source in enumerate(work.sources):
        count = len(source.rows)
        lengths = [(row, min(rows, count - row)) for row in range(0, count, rows)]
        steps = [((1 << length) - 1 << row, length) for row, length in lengths]
        found = {(1 << count) - 1: 1}  # numbers of tiles, by the rows that they read: a bit for each
        for axis, extent in enumerate(tile):
            found = _both(found, _read(work, number, axis, extent))
        needed += sum(n * sum(size for step, size in steps if step & read) for read, n in found.items())
        every += count * sum(found.values())
    return needed / every if every else 1.0


def _both(some: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    """Returns the rows that are read along both of two dimensions."""
    found: dict[int, int] = {}
    for (one, n), (other, m) in product(some.items(), others.items()):
        found[one & other] = found.get(one & other, 0) + n * m
    return found


@lru_cache(maxsize=1024)
def _read(work: Work, source_number: int, axis: int, tile: int) -> dict[int, int]:
    """Returns how many tiles read which rows along a dimension: those inside x for some position of the tile."""
    side, classes, source = work.side, work.classes[axis], work.sources[source_number]
    step, size, line = side.gathers[axis].input_step, side.x_size[axis], work.line_steps[axis]
    of_place: dict[int, int] = {}
    for number, row in enumerate(source.rows):
        of_place[row.place[axis]] = of_place.get(row.place[axis], 0) | 1 << number
    found: dict[int, int] = {}
    for of_class in range(classes.present):
        for first in range(0, side.grid[axis], tile):
            start = first * step + of_class * classes.x_step + source.least[axis]
            read = sum(rows for place, rows in of_place.items() if _meets(start + place * line, step, tile, size))
            found[read] = found.get(read, 0) + 1
    return found


def inside(work: Work, tile: Triple, halo: Triple) -> float:
    """Returns the share of the lines of halos that lie inside x; 1 if blocks leave no steps out."""
    return _inside(work, 0, tile[0], halo[0]) * _inside(work, 1, tile[1], halo[1]) if work.crops else 1.0


@lru_cache(maxsize=4096)
def _inside(work: Work, axis: int, tile: int, halo: int) -> float:
    """Returns the share of the places of halos along a dimension that lie inside x."""
    side, classes, line = work.side, work.classes[axis], work.line_steps[axis]
    found = every = 0
    for source in work.sources:
        for of_class in range(classes.present):
            for first in range(0, side.grid[axis], tile):
                start = first * side.gathers[axis].input_step + of_class * classes.x_step + source.least[axis]
                found += len(valid_range(start, line, halo, side.x_size[axis]))
                every += halo
    return found / every if every else 1.0


def _meets(first: int, step: int, count: int, size: int) -> bool:
    """Tells whether first + i*step lies from 0 to before size for some i < count."""
    i = max(0, -(first // step))
    return i < count and first + i * step < size
