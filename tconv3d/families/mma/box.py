"""Chooses the boxes of positions of the blocks of the kernel on mma.sync, and lays out their halos (mma_tile.cuh).

The result is a pure function of a layer's geometry and its volume. This module knows nothing of builds or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ...planning.geometry import Triple
from . import crop
from .work import Work

BOX_ITEM = 0.3  # cost of an item of the halo, relative to the products of a position
BOX_LINE = 4.0  # cost of the partial sectors at the ends of a line in memory, in items


@dataclass(frozen=True)
class Box:
    """Describes the positions of a block by run-time values, which are chosen for the volume."""

    items: int  # batch items per block
    tile: Triple  # positions per batch item
    halo: Triple  # positions of the halo per batch item
    plane: int  # slots per plane of a line of the halo, where a line has one plane for each residue of the input step
    line: int  # slots from line to line of the halo along h
    sheet: int  # slots from line to line of the halo along d
    slots: int  # slots of the halo
    tiles: tuple[int, ...]  # number of boxes along n, d, h, w, of all classes of positions

    @classmethod
    def of(cls, work: Work, items: int, tile: Triple) -> Box:
        steps, whole = work.halo_steps, (work.side.problem.batch, *work.side.grid)
        halo = tuple((t - 1) * s + r + 1 for t, s, r in zip(tile, steps, work.reach, strict=True))
        plane = -(-halo[2] // steps[2])
        line = plane * steps[2] | 1
        sheet = halo[1] * line
        # The lines of the box that follow each other, also from sheet to sheet, are an odd number of slots apart
        # modulo 8: the 8 rows of one ldmatrix lie in different banks.
        sheet += (tile[1] * line - sheet) % 8
        classes = (1, *(each.present for each in work.classes))
        tiles = tuple(-(-extent // t) * n for extent, t, n in zip(whole, (items, *tile), classes, strict=True))
        return cls(items, tile, halo, plane, line, sheet, items * halo[0] * sheet, tiles)

    @property
    def positions(self) -> int:
        return self.items * prod(self.tile)

    @property
    def lines(self) -> int:
        return self.items * self.tile[0] * self.tile[1]

    @property
    def halo_items(self) -> int:
        return self.items * prod(self.halo)

    @property
    def halo_lines(self) -> int:
        return self.items * self.halo[0] * self.halo[1]

    @property
    def halo_pairs(self) -> int:
        """Pairs of positions along w; a line has one more than it needs if it begins at an even element."""
        return self.halo_lines * self.line_pairs

    @property
    def line_pairs(self) -> int:
        return self.halo[2] // 2 + 1


@lru_cache(maxsize=4096)
def boxes(work: Work, tiles_m: int, warps_m: int) -> tuple[Box, ...]:
    """Returns the cheapest boxes for `warps_m` warps, each with 16 lines and `tiles_m` positions along w.

    These are the 2 cheapest boxes and the cheapest of each width, and the 2 cheapest ones by the steps that are left.
    """
    found: dict[tuple[int, Triple], None] = {}
    depth, height, width = work.side.grid
    for warps_w in (1, 2, 4, 8):
        if warps_w > warps_m or (warps_w > 1 and (warps_w - 1) * tiles_m >= width):
            continue
        lines = 16 * warps_m // warps_w
        for h in sorted({min(lines, height, e) for e in (1, 2, 4, 8, 16, 32, 64, 128)} | _even_parts(height, lines)):
            parts = -(-depth // min(depth, lines // h))
            deep = -(-depth // parts)
            tile = (deep, h, warps_w * tiles_m)
            found[1, tile] = None
            if parts == 1 and lines >= 2 * deep * h:  # there is room for several batch items
                found[min(work.side.problem.batch, lines // (deep * h)), tile] = None

    steps, reach, batch = work.halo_steps, work.reach, work.side.problem.batch
    by_line_read, by_line_written = (BOX_LINE if line == 1 else 0.0 for line in (work.side.x[4], work.side.y[4]))

    def cost(items_and_tile: tuple[int, Triple], cropped: bool = False) -> float:
        items, (d, h, w) = items_and_tile
        halo_lines = items * ((d - 1) * steps[0] + reach[0] + 1) * ((h - 1) * steps[1] + reach[1] + 1)
        read = halo_lines * ((w - 1) * steps[2] + reach[2] + 1) + by_line_read * halo_lines
        written = by_line_written * (items * d * h)
        tiles = -(-batch // items) * -(-depth // d) * -(-height // h) * -(-width // w)
        share = 1.0
        if cropped:
            halo = tuple((t - 1) * s + r + 1 for t, s, r in zip((d, h, w), steps, reach, strict=True))
            share, read = crop.share(work, (d, h, w), 1), read * crop.inside(work, (d, h, w), halo)
        return tiles * (16 * warps_m * tiles_m * share + BOX_ITEM * read + BOX_ITEM * written)

    cheapest = sorted(found, key=cost)
    others = sorted(found, key=lambda each: cost(each, cropped=True))[:2] if work.crops else []
    widths: dict[int, tuple[int, Triple]] = {}
    for each in cheapest:
        widths.setdefault(each[1][2], each)
    return tuple(Box.of(work, *each) for each in dict.fromkeys((*cheapest[:2], *widths.values(), *others)))


@lru_cache(maxsize=4096)
def boxes_along(work: Work, warps_m: int) -> tuple[Box, ...]:
    """Returns the 2 boxes with the fewest positions in all for `warps_m` warps, each with 16 positions along w."""
    _, height, width = work.side.grid
    found = []
    for warps_w in (1, 2, 4):
        lines = warps_m // warps_w
        for h in (1, 2, 4, 8):
            if warps_w <= warps_m and h <= lines and (warps_w - 1) * 16 < width and h < 2 * height:
                found.append(Box.of(work, 1, (lines // h, h, 16 * warps_w)))
    return tuple(sorted(found, key=lambda box: (prod(box.tiles), box.halo_items, -box.tile[2]))[:2])


def _even_parts(size: int, most: int) -> set[int]:
    """Returns the extents of up to 16 equal parts of a size, without extents above `most`."""
    return {extent for parts in range(1, 17) if (extent := -(-size // parts)) <= most}
