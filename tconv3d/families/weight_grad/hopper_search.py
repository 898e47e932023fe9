"""Searches the tiling and the box of positions with the least predicted cycles, for the weight gradient on Hopper.

A volume gets one of the few tilings of its layer (`planning/repertoire.py`), and searched tilings are kept on disk.
hopper.py explains the terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import nsmallest
from itertools import product
from math import inf, prod
from operator import itemgetter
from typing import Any

from ...planning.effort import HOPPER_BOXES, Effort
from ...planning.geometry import Geometry, Triple
from ...planning.problem import Device, volume_kind
from ...planning.repertoire import TYPICAL, Repertoire, nearest, searched
from .hopper_model import ROUNDING, LeastCost, box_cost, costs_of, cycles_by_splits, item_cycles, splits_of
from .hopper_taps import Words, row_choices
from .hopper_tiling import SHARES, Box, Buffers, Contents, Layer, Share, Tiling, buffers
from .segments import SEGMENT

MAX_SEGMENTS = 128  # most segments of a box
MAX_TAPS_W = 8  # most taps along w of one launch; a wider kernel takes several launches
MAX_ROW_TILES = 4
OTHER_REGISTERS = (18, 22)  # a consumer thread's registers beside sums and operands, with 1 and 2 sets of operands
# More registers where both tensors have rows of channels, and where one of them has: with fewer, products are
# serialized, or producers spill.
ROWS_REGISTERS = (6, 12)
MOST_WAVES = 6  # more waves of blocks than a number of parts takes, beyond the fewest
MIN_EFFICIENCY = 0.25  # least fraction of a tiling's products that belong to real channels and taps
# The divisions by number of consumer warpgroups, the preferred ones last.
_SHARES_OF = tuple((n, tuple(share for share in SHARES[::-1] if share.consumers == n)) for n in (2, 3))
MOST_PAIRS = 32 * MAX_ROW_TILES * max(share.consumers for share in SHARES)  # most pairs of rows of a block
MOST_REGISTERS = max(share.consumer for share in SHARES)  # most registers of a consumer thread
ROUGH_BYTES = 28.0  # bytes copied per multiprocessor and cycle, for the rough cost of a candidate


def boxes(size: Triple, per_word: int) -> Iterator[Box]:
    """Yields boxes of whole lines or parts of lines for a volume of `size`. For small volumes a box may have some
    lines of several planes along d, which may fill rows of K better than all lines of one plane."""
    depth, height, width = (max(extent, 1) for extent in size)
    whole, small = -(-width // (SEGMENT * per_word)), prod(size) < SMALL
    for w in sorted({whole if whole <= 16 else 0, -(-whole // 2), 8, 4} - {0}):
        if w > whole:
            continue
        for h in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32):
            for d in (1, 2, 4, 8):
                if (h > height or d > depth) and h * d > 1:
                    continue
                if d > 1 and h < height and not small:
                    continue
                if w * h * d <= MAX_SEGMENTS:
                    yield Box(d, h, w)


@lru_cache(maxsize=64)  # a search asks twice for each tiling
def _bounded_boxes(layer: Layer, tiling: Tiling, size: Triple) -> list[tuple[float, int, Box]]:
    """Returns the boxes for a volume, each with a lower bound of its cost and its number, the least bound first."""
    bound = LeastCost(layer, tiling)
    found = [(bound.of(box, size), number, box) for number, box in enumerate(boxes(size, layer.per_word))]
    return sorted(found, key=itemgetter(0, 1))


@lru_cache(maxsize=4096)
def best_buffers(layer: Layer, tiling: Tiling, size: Triple, room: int) -> Buffers | None:
    """Returns the box with the least predicted cycles, and its buffers; None if no box fits."""
    best: Buffers | None = None
    key = (inf, inf, 0)
    effort = Effort(HOPPER_BOXES)
    for least, number, box in _bounded_boxes(layer, tiling, size):
        if least > key[0] or (effort.spent and best is not None):
            break
        effort.count()
        made = buffers(tiling, box, room)
        if made is not None and (cost := box_cost(layer, made, size)) <= key[0]:
            # Among boxes of equal cost, the one that would be faster without bank conflicts is taken.
            bare = next(Contents.of(tiling, box).padded(room))
            each = (cost, box_cost(layer, bare, size, conflicts=1.0), number)
            if each < key:
                best, key = made, each
    return best


SMALL = 4096  # positions of a batch item below which a volume counts as small
NOMINAL = (64, 64, 64)  # size of the large volume whose best tilings are searched for every volume
CHOICES = (80, 60, 12, 12)  # tilings searched per `volume_kind`: small volumes are harder to divide evenly
AS_GOOD = 1.03  # ratio of predicted cycles to the least up to which tilings count as equally fast
NOMINAL_BOXES = tuple(Box(1, h, w) for h in (2, 3, 4, 6, 8, 16) for w in (4, 8))


@lru_cache(maxsize=1024)
def tilings(layer: Layer, device: Device, count: int = 1) -> tuple[Tiling, ...]:
    """Returns the `count` tilings with the least predicted cycles for the NOMINAL volume, the fastest first."""
    costs: list[tuple[float, Tiling]] = []
    for _, _, arguments in nsmallest(max(24, 2 * count), candidates(layer)):
        tiling = Tiling(*arguments)
        bound, each = LeastCost(layer, tiling), inf
        for least, box in sorted([(bound.of(box, NOMINAL), box) for box in NOMINAL_BOXES], key=itemgetter(0)):
            if least > each:
                break
            if made := buffers(tiling, box, device.shared_bytes):
                each = min(each, box_cost(layer, made, NOMINAL))
        if each < inf:
            costs.append((each * tiling.kinds(layer.geometry), tiling))
    return tuple(tiling for _, tiling in sorted(costs, key=itemgetter(0))[:count])


def pieces_of(layer: Layer) -> Iterator[tuple[Words, ...]]:
    axis = layer.geometry.axes[2]
    count = -(-axis.kernel // MAX_TAPS_W)
    size = -(-axis.kernel // count)
    whole = tuple(
        layer.words(tuple(range(first, min(first + size, axis.kernel)))) for first in range(0, axis.kernel, size)
    )
    if len({(piece.lines, piece.vector) for piece in whole}) > 1:  # The last piece lacks a phase.
        whole = tuple(replace(layer, vector_y=0).words(piece.taps) for piece in whole)
    yield whole
    if axis.stride == 1 and count == 1 and layer.vector_y > 1:
        yield (layer.lines(whole[0].taps),)
    phases = [axis.taps(phase) for phase in range(axis.stride) if axis.taps(phase)]
    if 1 < len(phases) <= 4 and axis.kernel > len(phases) and count == 1 and not whole[0].lines:
        yield tuple(layer.words(taps) for taps in phases)


def _divisions(channels: int, multiple: int, most: int) -> list[int]:
    """Returns the tile sizes up to `most`, multiples of `multiple`, that divide channels evenly."""
    units = -(-channels // multiple)
    return sorted({size for parts in range(1, units + 1) if (size := -(-units // parts) * multiple) <= most})


def candidates(layer: Layer) -> Iterator[tuple[float, int, tuple[Any, ...]]]:
    """Yields the arguments of tilings that fit the registers, after a rough cost per position, without halos, and a
    unique number that breaks ties."""
    g, number = layer.geometry, 0
    more = 0 if not (layer.piece_x or layer.piece_y) else ROWS_REGISTERS[not (layer.piece_x and layer.piece_y)]
    channels = tuple(product(_divisions(g.in_per_group, 8, 256), _divisions(g.out_per_group, 2, 256)))
    for pieces, rows_d, rows_h in product(pieces_of(layer), row_choices(g.axes[0]), row_choices(g.axes[1])):
        taps = max(len(piece.taps) for piece in pieces)
        fragments = tuple(
            max(p.registers(depth) for p in pieces) + OTHER_REGISTERS[depth - 1] + more for depth in (1, 2)
        )
        rows = max(len(r.taps) for r in rows_d) * max(len(r.taps) for r in rows_h)
        kinds = g.groups * len(rows_d) * len(rows_h)
        planes = prod(max(len(r.offsets) for r in kinds) for kinds in (rows_d, rows_h, pieces))
        planes *= g.stride[2] if pieces[0].lines else 1
        useful = g.in_channels * g.out_per_group * g.kernel[0] * g.kernel[1]
        cycles: dict[tuple[int, int], list[float]] = {}  # cycles of an item of each piece by columns and depth
        for columns, out_tile in channels:
            pairs, sums = rows * (out_tile // 2), taps * columns // 2
            if pairs > MOST_PAIRS or sums + 2 + min(fragments) > MOST_REGISTERS:
                continue
            blocks = kinds * -(-g.in_per_group // columns) * -(-g.out_per_group // out_tile)
            copied = 64 * (columns + 1.3 * out_tile * planes) / ROUGH_BYTES
            of_consumers = tuple([-(-pairs // (32 * consumers)) for consumers, _ in _SHARES_OF])
            for row_tiles, depth, share in _shares(of_consumers, sums, fragments):
                if share.consumers > 2 and (layer.per_word == 2 or layer.slow):
                    continue  # Two consumer warpgroups already saturate shared memory or the producers.
                tiles = share.consumers * row_tiles
                if useful < MIN_EFFICIENCY * blocks * columns * 64 * tiles:
                    continue
                if (columns, depth) not in cycles:
                    each = [item_cycles(costs_of(layer, piece), piece, columns, depth) for piece in pieces]
                    cycles[columns, depth] = each
                cost = sum([max(tiles * item, copied) + 0.1 * copied for item in cycles[columns, depth]])
                number += 1
                yield cost * blocks, number, (columns, out_tile, rows_d, rows_h, pieces, depth, share)


@lru_cache(maxsize=4096)
def _shares(row_tiles: tuple[int, ...], sums: int, fragments: tuple[int, ...]) -> list[tuple[int, int, Share]]:
    """Returns row tiles per warpgroup, sets of operands and register shares, for row tiles in order of _SHARES_OF."""
    found = []
    for tiles, (_, shares) in zip(row_tiles, _SHARES_OF, strict=True):
        if tiles > MAX_ROW_TILES:
            continue
        needs = [held + tiles * (sums + 2) for held in fragments]
        fits = [(depth, share) for depth, need in enumerate(needs, 1) for share in shares if need <= share.consumer]
        # For each number of producer warpgroups, the most sets of operands that fit are taken.
        ways = {share.producers: (depth, share) for depth, share in fits}
        found += [(tiles, depth, share) for depth, share in ways.values()]
    return found


def tiling_of(layer: Layer, device: Device, batch: int, size: Triple) -> Tiling | None:
    """Returns the tiling for a volume, or None. It is one of the layer's repertoire, so that a new volume seldom
    compiles a new kernel."""
    return _repertoire.choose(
        (layer.geometry, layer.dtype, layer.piece_x, layer.piece_y, device),
        (layer, batch, size),
        lambda: own_tiling(layer, device, batch, size),
        lambda: _typical_tilings(layer, device, batch * prod(size)),
        lambda tiling, _: tiling_cycles(layer, tiling, batch, size, device),
    )


_repertoire = Repertoire[tuple[Geometry, str, int, int, Device], tuple[Layer, int, Triple], Tiling]()


def _typical_tilings(layer: Layer, device: Device, positions: int) -> Iterator[Tiling]:
    """Yields the best tilings of the typical volumes nearest to `positions`."""
    volumes = [(batch, (edge, edge, edge * layer.at_once)) for batch, edge in TYPICAL]
    for volume in nearest(positions, ((batch * prod(size), (batch, size)) for batch, size in volumes)):
        if (found := own_tiling(layer, device, *volume)) is not None:
            yield found


@lru_cache(maxsize=1024)
def own_tiling(layer: Layer, device: Device, batch: int, size: Triple) -> Tiling | None:
    """Returns the best tiling for a volume, from the cache on disk if it has been searched before."""
    settings = (layer, replace(device, name=""), batch, size)
    found: Tiling | None = searched(__name__, settings, Tiling | None, lambda: _best_tiling(*settings))
    return found


def _best_tiling(layer: Layer, device: Device, batch: int, size: Triple) -> Tiling | None:
    costs: dict[Tiling, float] = {}
    least = inf
    for tiling in tilings(layer, device, CHOICES[volume_kind(batch * prod(size))]):
        if _least_cycles(layer, tiling, batch, size, device) <= AS_GOOD * least:
            costs[tiling] = tiling_cycles(layer, tiling, batch, size, device)
            least = min(least, costs[tiling])
    if least == inf:
        return None
    # Among tilings that the model cannot tell apart, the first one is best for large volumes.
    return next(tiling for tiling in costs if costs[tiling] <= AS_GOOD * least)


def _least_cycles(layer: Layer, tiling: Tiling, batch: int, size: Triple, device: Device) -> float:
    """Returns a lower bound of `tiling_cycles`, for the best box and the best number of waves of blocks."""
    each, *_ = _bounded_boxes(layer, tiling, size)[0]
    kinds, multiprocessors = tiling.kinds(layer.geometry), device.multiprocessors
    block, fewest = costs_of(layer, tiling.pieces[0]).block, -(-kinds // multiprocessors)
    # More waves than these have more parts than `splits_of` considers.
    least = min(
        waves * (batch * each / (waves * multiprocessors // kinds) + len(tiling.pieces) * block)
        for waves in range(fewest, fewest + MOST_WAVES)
    )
    return ROUNDING * least


def forget() -> None:
    """Forgets all choices, so that the next volume of every layer counts as its first."""
    own_tiling.cache_clear()
    _repertoire.forget()


def tiling_cycles(layer: Layer, tiling: Tiling, batch: int, size: Triple, device: Device) -> float:
    """Predicts the cycles of all launches; infinite if the tensors cannot be copied as the tiling reads them, or if
    no box fits shared memory."""
    if not all(layer.takes(piece) for piece in tiling.pieces):
        return inf
    made = best_buffers(layer, tiling, size, device.shared_bytes)
    if made is None:
        return inf
    splits = splits_of(layer, made, batch, size, device)
    return len(tiling.pieces) * cycles_by_splits(layer, made, batch, size, device)(splits)
