"""Cuts a volume into boxes of positions for a build of the halo kernel, and boxes into slabs.

A search asks hundreds of builds for their boxes, of which a volume has thousands. Boxes are therefore looked at in
the order of a lower bound of their slabs, and are only cut into slabs if the bound is low enough. Boxes and the ways
to cut them are tuples of integers, which are cheaper than tilings and which the garbage collector does not visit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, product
from math import prod
from operator import itemgetter

from ...planning.geometry import Triple
from ...planning.scalars import INT32_MAX, ceil_div
from .build import SLAB, Build, Output
from .shared_memory import stage_rows

DEPTHS = (1, 2, 3, 4, 6, 8)  # depths of boxes to try besides equal parts of the volume
MOST_SLABS = 96  # most slabs of a box: 3 consumers with 4 slabs each, in 8 passes

# The arguments of `Tiling` up to `run`.
Sizes = tuple[Triple, Triple, int, int, tuple[int, int, int, int], int, int, int, int, Triple, int]
Extents = tuple[int, int, int, int]  # batch items, and positions along d, h and w
# The fewest slabs of all boxes of the volume, the place of the box among all, the fewest slabs of the box, the number
# of boxes, the positions of the box, and its extents.
_Box = tuple[int, int, int, int, int, Extents]
# A way to cut a box into slabs: their number, the last row that they read, and `Tiling`'s `near`, `slabs_w` to `run`.
_Way = tuple[int, int, int, int, int, int, Triple, int]


def boxes(
    build: Build, batch: int, positions: Triple, worth: Callable[[int, int], bool]
) -> Iterator[tuple[int, Sizes]]:
    """Yields the boxes that fit the build's stages, each with its place among all, the fewest rounds of slabs first.

    Each box is cut in the first of the ways that fit with the fewest slabs. `worth` tells whether boxes with a number
    of rounds for the whole volume and a number of boxes are wanted; if not, none with more of both are, now or later.
    """
    together, most = build.round_slabs, build.round_slabs * build.max_passes
    least = min(SLAB * together // 2, prod(positions) * batch // 256)  # smaller boxes are mostly overhead
    cut = _cutter(build, batch, positions)
    # Boxes by their rounds for the whole volume or, until they are cut, by a lower bound of them.
    waiting: list[tuple[int, int, int, Extents, Sizes | None]] = []
    rest = iter(_all_boxes(build.march, batch, positions))
    following = next(rest, None)
    while True:
        while following is not None and (not waiting or following[0] <= waiting[0][0] * together):
            _, place, slabs, number, volume, extents = following
            if slabs <= most and (volume >= least or extents[1:] == positions):
                heappush(waiting, (ceil_div(slabs, together) * number, place, number, extents, None))
            following = next(rest, None)
        if not waiting:
            return
        rounds, place, number, extents, sizes = heappop(waiting)
        if not worth(rounds, number):
            if not worth(rounds, 0):
                return  # all others have at least as many rounds
        elif sizes is not None:
            yield place, sizes
        elif (sizes := cut(extents)) is not None:
            heappush(waiting, (ceil_div(sizes[5], together) * number, place, number, extents, sizes))


def forget() -> None:
    """Clears what many builds of a search share, at the end of the search."""
    _all_boxes.cache_clear()
    _known_ways.cache_clear()


def _cutter(build: Build, batch: int, positions: Triple) -> Callable[[Extents], Sizes | None]:
    """Returns a function that cuts a box in the first of the ways with the fewest slabs, or None if none fits."""
    march, images, together = build.march, build.output is Output.IMAGES, build.tile.slabs
    room, most = stage_rows(build), build.round_slabs * build.max_passes
    span_d, span_h, span_w = (0 if march else build.span[0]), *build.span[1:]
    known = _known_ways((span_d, span_h, span_w))
    # Through images a consumer stores a whole line or, with 16-bit types, a part of one; in float32 parts are slower.
    parts = build.item_bytes == 2

    def cut(extents: Extents) -> Sizes | None:
        items, depth, height, width = extents
        halo = (depth + span_d, height + span_h, width + span_w)
        if prod(halo) * items > room:
            return None
        if (ways := known.get(extents)) is None:
            ways = known[extents] = _ways(extents, halo)
        for slabs, last, near, slabs_w, slabs_h, group_rows, step, run in ways:
            if slabs > most:
                return None
            in_line = slabs_w == together or (parts and slabs_w % together == 0)
            if last < room and (not images or (run == width and items == 1 and in_line)):
                tile = (positions[0] if march else depth, height, width)
                deep, down, across = map(ceil_div, positions, tile)
                tiles = (ceil_div(batch, items), deep, down, across)
                return tile, halo, items, near, tiles, slabs, slabs_w, slabs_h, group_rows, step, run
        return None

    return cut


@lru_cache(maxsize=16)
def _known_ways(span: Triple) -> dict[Extents, list[_Way]]:
    """Returns the ways to cut boxes with halos that are larger by `span`, which builds of a search fill in."""
    return {}


def _ways(extents: Extents, halo: Triple) -> list[_Way]:
    """Returns all ways to cut a box with a halo into slabs, those with the fewest slabs first."""
    items, depth, height, width = extents
    halo_d, halo_h, halo_w = halo
    line, sheet = halo_w * items, halo_h * halo_w * items
    found: list[_Way] = []

    def add(near: int, slabs: int, slabs_w: int, slabs_h: int, group_rows: int, step: Triple, run: int) -> None:
        sheets = ceil_div(slabs, slabs_w * slabs_h)
        last = (sheets - 1) * step[0] + (slabs_h - 1) * step[1] + (slabs_w - 1) * step[2] + 7 * group_rows + 7
        last += (halo_d - depth) * sheet + (halo_h - height) * line + (halo_w - width) * near
        found.append((slabs, last, near, slabs_w, slabs_h, group_rows, step, run))

    everything = INT32_MAX
    near = 8 // width
    if width * near == 8 and items % (8 * near) == 0:  # slabs of one line of 8 groups of near items
        across = items // (8 * near)
        step = (sheet, line, 8 * halo_w * near)
        add(near, depth * height * across, across, height, halo_w * near, step, everything)
    elif width * near == 8 and items % near == 0 and height * (items // near) % 8 == 0:  # slabs of 8 lines
        across = height * (items // near) // 8
        add(near, depth * across, across, 1, halo_w * near, (sheet, 0, 8 * halo_w * near), everything)
    if width * items % 8 == 0:
        across = width * items // 8
        if height % 8 == 0 or depth == 1:  # slabs of 8 rows on each of 8 lines
            down = ceil_div(height, 8)
            add(items, depth * down * across, across, down, line, (sheet, 8 * line, 8), everything)
        if depth % 8 == 0 and sheet < 2**14:  # slabs of 8 rows on each of 8 planes
            add(items, depth // 8 * height * across, across, height, sheet, (8 * sheet, line, 8), everything)
    # Slabs of 64 rows in sequence may lie in a line, in a plane, or anywhere in the halo.
    run = width * items
    across = ceil_div(run, SLAB)
    add(items, depth * height * across, across, height, 8, (sheet, line, SLAB), run)
    run += (height - 1) * line
    across = ceil_div(run, SLAB)
    add(items, depth * across, across, 1, 8, (sheet, 0, SLAB), run)
    run += (depth - 1) * sheet
    across = ceil_div(run, SLAB)
    add(items, across, across, 1, 8, (0, 0, SLAB), run)
    found.sort(key=itemgetter(0))
    return found


@lru_cache(maxsize=16)
def _all_boxes(march: bool, batch: int, positions: Triple) -> list[_Box]:
    """Returns all boxes to try, with at most `MOST_SLABS`, those with the fewest slabs in all first."""
    small = prod(positions) < 512
    items_options = [i for i in (1, 2, 4, 8, 16, 32, 64) if i == 1 or (small and i < 2 * batch)]
    depths = [(1, 1)] if march else box_extents(positions[0], DEPTHS)
    heights, widths = box_extents(positions[1], (1, 2, 4, 8, 16, 24, 32)), box_extents(positions[2], (8, 16, 24, 32))
    found, places = [], count()
    for items, (depth, deep), (height, down) in product(items_options, depths, heights):
        boxes = ceil_div(batch, items) * deep * down
        for width, across in widths:
            volume = items * depth * height * width
            slabs = ceil_div(volume, SLAB)
            if slabs > MOST_SLABS:
                break  # wider boxes have more
            number = boxes * across
            found.append((slabs * number, next(places), slabs, number, volume, (items, depth, height, width)))
    found.sort()
    return found


def box_extents(size: int, fixed: Iterable[int]) -> list[tuple[int, int]]:
    """Returns a box's possible extents along a dimension of `size` positions, each with the number of boxes."""
    even = {ceil_div(size, parts) for parts in range(1, 9)}
    every = sorted(even | {value for value in fixed if value < size + 7})
    return [(extent, ceil_div(size, extent)) for extent in every]
