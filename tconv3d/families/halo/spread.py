"""Divides the chunks of the last tiles among blocks, so that all blocks of the halo kernel end at the same time.

Chunks of tiles at the ends of depth skip products outside the input, and cost less. Tiles with equal costs stand in a
sequence, a stretch. This module knows the panels of a build by the planes that they read, and nothing else of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from ...planning.scalars import ceil_div
from .measured import CHOICES

MAX_STRETCHES = 4

# Pairs of ((planes from a position to its input, phase along d), number of panels that read there), and planes of the
# read tensor from one position to the next (`Build.depth_shifts`).
DepthShifts = tuple[tuple[tuple[tuple[int, int], int], ...], int]


@dataclass(frozen=True)
class Spread:
    """How blocks divide the chunks of the last tiles (halo_tile.cuh).

    The unit of cost is 1/WHOLE of the cost of a chunk that skips no products."""

    WHOLE: ClassVar[int] = 240

    even: int  # chunks of the tiles that are not divided
    blocks: int
    cost: int  # cost of a share, one block's part of the tiles that are divided
    first_tile: int  # index along d, or of the run, of the tile with which the sequence of tiles begins
    stretches: tuple[tuple[int, int], ...]  # for the tiles that are divided: numbers of chunks, and the cost of each

    @property
    def chunks(self) -> int:
        """The number of chunks of all tiles."""
        return self.even + sum(chunks for chunks, _ in self.stretches)

    @property
    def busiest(self) -> float:
        """The time of the busiest block, in chunks that skip no products."""
        return self.even / self.blocks + (self.cost + self.WHOLE) / self.WHOLE


NOT_SPREAD = Spread(0, 0, 0, 0, ((0, 0),) * MAX_STRETCHES)


class Stretches(NamedTuple):
    """The tiles along depth, or the runs, in stretches of equal cost; the cheaper tiles at the ends come last."""

    first_tile: int
    each: tuple[tuple[int, int], ...]  # numbers of tiles, and the cost of a chunk of each
    tiles: int
    cost: int  # cost of a chunk of every tile

    def even(self, chunks: int, of_tile: int, multiprocessors: int) -> tuple[int, int]:
        """Returns the number of blocks, and of the chunks of tiles that are not divided.

        `chunks` are those of all tiles at one place along depth, `of_tile` those of a tile.
        """
        (tiles, most), total = self.each[0], self.cost * chunks
        blocks = min(multiprocessors, ceil_div(total, most))
        together = blocks * of_tile
        return blocks, min(tiles * chunks // together, total // (together * most)) * together

    def busiest(self, chunks: int, of_tile: int, multiprocessors: int) -> float:
        """Returns `Spread.busiest` of `spread`."""
        blocks, even = self.even(chunks, of_tile, multiprocessors)
        rest = self.cost * chunks - even * self.each[0][1]
        return even / blocks + (max(1, ceil_div(rest, blocks)) + Spread.WHOLE) / Spread.WHOLE

    def spread(self, chunks: int, of_tile: int, multiprocessors: int) -> Spread:
        """Returns how blocks divide the chunks of all tiles."""
        blocks, even = self.even(chunks, of_tile, multiprocessors)
        found = [(tiles * chunks, cost) for tiles, cost in self.each]
        found[0] = (found[0][0] - even, found[0][1])
        rest = sum(n * cost for n, cost in found)
        found += [(0, 1)] * (MAX_STRETCHES - len(found))
        return Spread(even, blocks, max(1, ceil_div(rest, blocks)), self.first_tile, tuple(found))


@lru_cache(maxsize=4096)  # many builds of a search have equal shifts along depth
def stretches(shifts: DepthShifts, size: int, step: int, tiles: int, plane: int = 1) -> Stretches:
    """Returns the stretches of tiles of `step` rows, of which a plane of positions has `plane`.

    The kernel reads a tensor of `size` planes. A panel counts if any position of a tile needs it, because consumers
    that skip it wait for the others.
    """
    depths = [range(start // plane, (start + step - 1) // plane + 1) for start in range(0, tiles * step, step)]
    cost_of = {planes: _cost(shifts, planes, size) for planes in set(depths)}
    costs = [cost_of[planes] for planes in depths]
    first = costs.index(max(costs))
    found: list[tuple[int, int]] = []
    for cost in costs[first:] + costs[:first]:
        before = found[-1] if found else (0, cost)
        if before[1] == cost:
            found[-1:] = [(before[0] + 1, cost)]
        elif len(found) < MAX_STRETCHES:
            found.append((1, cost))
        else:  # there is no room for another stretch: the last one gets the average cost
            found[-1] = (before[0] + 1, max(1, round((before[0] * before[1] + cost) / (before[0] + 1))))
    return Stretches(first, tuple(found), tiles, sum(n * cost for n, cost in found))


def _cost(shifts: DepthShifts, planes: range, size: int) -> int:
    """Returns the cost of a chunk if some panels are not needed by any of these planes of positions."""
    panels, step = shifts
    needed = sum(n for (shift, phase), n in panels if any(0 <= (q + shift) * step + phase < size for q in planes))
    fraction = needed / sum(n for _, n in panels)
    return max(1, round(Spread.WHOLE * (CHOICES.chunk + (1 - CHOICES.chunk) * fraction)))


@lru_cache(maxsize=256)
def least_cost(shifts: DepthShifts, size: int, depths: tuple[tuple[int, int], ...]) -> float:
    """Returns the least average cost of the tiles' chunks, as a fraction of chunks that skip no products.

    `depths` are the possible planes of positions of a tile, each with the number of tiles along depth.
    """
    found = (stretches(shifts, size, step, tiles) for step, tiles in depths)
    return min(each.cost / (each.tiles * Spread.WHOLE) for each in found)
