"""Cuts a volume into tiles for a build of the halo kernel, and divides the tiles among blocks.

A tiling has run-time arguments only: a new volume needs a new tiling, never another build. A sheet is a plane of a
halo; a run is a tile of rows in sequence, wherever lines end (halo.cuh).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from operator import itemgetter
from typing import ClassVar, NamedTuple

from ...planning.geometry import Triple
from ...planning.scalars import INT32_MAX
from .build import SLAB, Build, Division, Input, Output, ceil_div, round_up
from .job import Job
from .measured import CHOICES
from .shared_memory import line_items, stage_rows


@dataclass(frozen=True)
class Shares:
    """How the planes of a march are divided among blocks (halo_tile.cuh)."""

    planes: int  # planes of all tiles in sequence
    even: int  # planes of the tiles that are not divided
    share: int  # planes of a share, one block's part of the tiles that are divided; 0 if none are
    count: int  # number of shares
    beside: int  # column tiles that neighbouring blocks compute at the same time
    in_turn: int  # column tiles that one block computes one after the other
    pieces: int  # most pieces into which shares cut a tile


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


MAX_STRETCHES = 4
first, second = itemgetter(0), itemgetter(1)
RUNS = 1024  # more runs than a build has; places of runs are negative, those of boxes are not
NOT_SPREAD = Spread(0, 0, 0, 0, ((0, 0),) * MAX_STRETCHES)


@dataclass(frozen=True)
class Tiling:
    """The cut of a volume into tiles, and of a tile's positions into slabs (arguments.py explains the numbers)."""

    tile: Triple  # positions of a tile; in a march all of depth
    halo: Triple
    items: int  # batch items per tile
    near: int  # batch items of a tile whose rows of one position are neighbours
    tiles: tuple[int, int, int, int]  # number of tiles along the batch, d, h and w
    slabs: int
    slabs_w: int
    slabs_h: int
    group_rows: int
    slab_step: Triple
    run: int
    length: int = 0  # rows of a tile that is a run of lines in sequence; 0 if tiles are boxes
    sheets: int = 1  # batch items whose lines follow each other in a run
    reach: int = 0  # rows behind a run that its positions read
    shared: bool = False  # whether the blocks of a march divide the last tiles, to end at the same time
    portions: int = 1  # blocks that divide the chunks of a tile
    sheet_step: int = 1  # planes from one sheet of a run's halo to the next

    @property
    def rows(self) -> int:
        return self.halo[0] * (self.length + self.reach) if self.length else prod(self.halo) * self.items

    @property
    def lines(self) -> int:
        """The number of lines of a halo, or the most lines that the halo of a run touches."""
        return ceil_div(self.rows - 1, self.halo[2]) + 1 if self.length else prod(self.halo[:2])

    @property
    def item_tiles(self) -> int:
        """The most tiles that touch a batch item."""
        return (self.halo[1] * self.halo[2] - 2) // self.length + 2 if self.sheets > 1 else prod(self.tiles[1:])

    @property
    def flat(self) -> bool:
        """Whether every slab has the positions of a single plane."""
        sheet = self.halo[1] * self.halo[2] * self.items
        return self.length == 0 and self.slab_step[0] == sheet

    @property
    def near_bits(self) -> int:
        """The binary logarithm of the number of batch items, at most 8, that neighbouring lanes load."""
        return min(self.items, 8).bit_length() - 1

    @property
    def count(self) -> int:
        return prod(self.tiles)

    def work(self, build: Build) -> int:
        """Returns tiles times column tiles times portions, the units of work outside of marches."""
        return self.count * build.column_tiles * self.portions

    def portion(self, build: Build) -> float:
        """Returns the largest fraction of a tile's chunks that a block has."""
        return ceil_div(build.chunks, self.portions) / build.chunks

    def blocks(self, build: Build, multiprocessors: int) -> int:
        if build.march:
            shares = self.shares(build, multiprocessors)
            return shares.count * shares.beside
        blocks = max(min(self.work(build), multiprocessors), 1)
        if build.weights.resident:  # every block has the panels of a single column tile
            blocks = max(blocks // build.column_tiles, 1) * build.column_tiles
        return blocks

    def shares(self, build: Build, multiprocessors: int) -> Shares:
        """Returns how blocks divide a march."""
        columns, depth = build.column_tiles, self.tile[0]
        divisors = [columns] if build.weights.resident else [n for n in range(1, columns + 1) if columns % n == 0]
        beside = max(divisors, key=lambda n: (multiprocessors // n * n, n))
        tiles = self.count * (columns // beside)
        count = max(1, multiprocessors // beside)
        if not self.shared:
            count = min(count, tiles)
        even = tiles // count * count if self.shared else round_up(tiles, count)
        rest = max(0, tiles - even) * depth
        share = max(1, ceil_div(rest, count))
        if even == 0:
            count = ceil_div(rest, share)
        pieces = (depth - 2) // share + 2 if rest and depth > 1 else 1
        return Shares(tiles * depth, even * depth, share if rest else 0, count, beside, columns // beside, pieces)

    def chunk_costs(self, build: Build, job: Job) -> tuple[float, ...]:
        """Returns the cost of a chunk in each tile along d, or each run, as a fraction of one that skips no products.

        A panel counts if any position of the tile needs it: consumers that skip it wait for the others."""
        if not self.length:
            return _chunk_costs(build, job.read_size[0], self.tile[0], self.tiles[1])
        return _chunk_costs(build, job.read_size[0], self.length, self.tiles[2], self.halo[1] * self.halo[2])

    @property
    def sheet_rows(self) -> int:
        """The number of rows of the halo from one plane to the next."""
        if self.length:
            return (self.length + self.reach) // self.sheet_step
        return self.halo[1] * self.halo[2] * self.items

    def spread(self, build: Build, job: Job, multiprocessors: int) -> Spread:
        """Returns how blocks divide the chunks of all tiles; the cheaper tiles at the ends of depth come last."""
        costs = [max(1, round(Spread.WHOLE * cost)) for cost in self.chunk_costs(build, job)]
        first = costs.index(max(costs))
        chunks = self.count // len(costs) * build.column_tiles * build.chunks
        stretches: list[tuple[int, int]] = []
        for cost in costs[first:] + costs[:first]:
            before = stretches[-1] if stretches else (0, cost)
            if before[1] == cost:
                stretches[-1:] = [(before[0] + chunks, cost)]
            elif len(stretches) < MAX_STRETCHES:
                stretches.append((chunks, cost))
            else:  # there is no room for another stretch: the last one gets the average cost
                all_chunks = before[0] + chunks
                stretches[-1] = (all_chunks, max(1, round((before[0] * before[1] + chunks * cost) / all_chunks)))
        total = sum(n * cost for n, cost in stretches)
        blocks = min(multiprocessors, ceil_div(total, stretches[0][1]))
        round_chunks = blocks * build.chunks
        rounds = min(stretches[0][0] // round_chunks, total // (round_chunks * stretches[0][1]))
        even = rounds * round_chunks
        stretches[0] = (stretches[0][0] - even, stretches[0][1])
        rest = sum(n * cost for n, cost in stretches)
        stretches += [(0, 1)] * (MAX_STRETCHES - len(stretches))
        return Spread(even, blocks, max(1, ceil_div(rest, blocks)), first, tuple(stretches))

    def __str__(self) -> str:
        shared = ", shared" if self.shared else ""
        if self.length:
            through = ", through the batch" if self.sheets > 1 else ", through depth" if self.halo[0] > 1 else ""
            return f"{self.tile[0]}x{self.length} in sequence{through}{shared}"
        items = f" of {self.items} batch items" if self.items > 1 else ""
        portions = f", {self.portions} portions" if self.portions > 1 else ""
        return "x".join(map(str, self.tile)) + items + portions + shared


@lru_cache(maxsize=1024)  # tilings of a build differ mostly in height and width
def _chunk_costs(build: Build, size: int, step: int, tiles: int, plane: int = 1) -> tuple[float, ...]:
    """Returns `Tiling.chunk_costs` for tiles of `step` rows, of which a plane of positions has `plane`."""
    starts = range(0, tiles * step, step)
    depths = [range(start // plane, (start + step - 1) // plane + 1) for start in starts]
    needed = {planes: build.needed_panels(planes, size) for planes in set(depths)}
    return tuple(CHOICES.chunk + (1 - CHOICES.chunk) * needed[planes] for planes in depths)


def _slab_layouts(tile: Triple, halo: Triple, items: int) -> Iterator[tuple[int, int, int, int, int, Triple, int]]:
    """Yields ways to cut a tile into slabs: (near items, slabs, slabs_w, slabs_h, group_rows, slab_step, run)."""
    depth, height, width = tile
    _, halo_h, halo_w = halo
    line, sheet = halo_w * items, halo_h * halo_w * items
    everything = INT32_MAX
    near = 8 // width
    if width * near == 8 and items % (8 * near) == 0:  # slabs of one line of 8 groups of near items
        across = items // (8 * near)
        step = (sheet, line, 8 * halo_w * near)
        yield near, depth * height * across, across, height, halo_w * near, step, everything
    elif width * near == 8 and items % near == 0 and height * (items // near) % 8 == 0:  # slabs of 8 lines
        across = height * (items // near) // 8
        yield near, depth * across, across, 1, halo_w * near, (sheet, 0, 8 * halo_w * near), everything
    if width * items % 8 == 0:
        across = width * items // 8
        if height % 8 == 0 or depth == 1:  # slabs of 8 rows on each of 8 lines
            down = -(-height // 8)
            yield items, depth * down * across, across, down, line, (sheet, 8 * line, 8), everything
        if depth % 8 == 0 and sheet < 2**14:  # slabs of 8 rows on each of 8 planes
            yield items, depth // 8 * height * across, across, height, sheet, (8 * sheet, line, 8), everything
    # Slabs of 64 rows in sequence may lie in a line, in a plane, or anywhere in the halo.
    run = width * items
    yield items, depth * height * -(-run // SLAB), -(-run // SLAB), height, 8, (sheet, line, SLAB), run
    run = (height - 1) * line + width * items
    yield items, depth * -(-run // SLAB), -(-run // SLAB), 1, 8, (sheet, 0, SLAB), run
    run = (depth - 1) * sheet + (height - 1) * line + width * items
    yield items, -(-run // SLAB), -(-run // SLAB), 1, 8, (0, 0, SLAB), run


def _extents(size: int, fixed: Iterable[int]) -> list[int]:
    """Returns the candidates for a tile's extent along a dimension of `size` positions."""
    even = {ceil_div(size, parts) for parts in range(1, 9)}
    return sorted(even | {value for value in fixed if value < size + 7})


def _runs(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterator[Tiling]:
    """Yields tilings of a march into runs of the lines of a plane, of one batch item or of all in sequence."""
    if build.output is Output.IMAGES:
        return  # images need slabs that end where lines end
    _, height, width = positions
    pitch = _pitches(build, positions, read_size)
    line, sheet = pitch[2], pitch[1] * pitch[2]
    length = SLAB * build.round_slabs
    _, span_h, span_w = build.program.span
    reach = span_h * line + span_w
    if length + reach > stage_rows(build):
        return
    for sheets in {1, batch}:
        rows = (sheets - 1) * sheet + (height - 1) * line + width
        if rows + length + reach > INT32_MAX // 2:
            continue
        tiles = (batch // sheets, 1, ceil_div(rows, length), 1)
        yield _run(build, positions, (1, pitch[1], pitch[2]), tiles, sheets, reach)


def _pitches(build: Build, positions: Triple, read_size: Triple) -> list[int]:
    """Returns the planes of a batch item, the lines of a plane and the rows of a line in a run, with zeros between.

    The zeros behind a line are also the zeros before the next line; planes and batch items share zeros likewise."""
    return [
        extent
        + dimension.span
        - min(max(0, -dimension.origin), max(0, extent + dimension.span + dimension.origin - size))
        for extent, dimension, size in zip(positions, build.program.dimensions, read_size, strict=True)
    ]


def _run(
    build: Build, positions: Triple, halo: Triple, tiles: tuple[int, int, int, int], sheets: int, reach: int
) -> Tiling:
    # Two slabs alternate every 8 rows, so that a warp has 32 rows in sequence.
    woven = build.tile.slabs % 2 == 0
    across, down, group, step = (
        (2, build.round_slabs // 2, 16, (0, 2 * SLAB, 8)) if woven else (build.round_slabs, 1, 8, (0, 0, SLAB))
    )
    return Tiling(
        positions, halo, 1, 1, tiles, build.round_slabs, across, down, group,
        step, INT32_MAX, SLAB * build.round_slabs, sheets, reach,
    )  # fmt: skip


def _deep_runs(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterator[Tiling]:
    """Yields tilings into runs of all lines of a batch item, wherever lines and planes end.

    The halo of such a run has a sheet for every displacement along d."""
    if build.gather or len(build.programs) > 1:
        return
    _, height, width = _pitches(build, positions, read_size)
    span_d, span_h, span_w = build.span
    length, step = SLAB * build.round_slabs, build.sheet_step
    reach = round_up(length + span_h * width + span_w, step) - length  # rows of a sheet are a multiple of step
    rows = ((positions[0] - 1) * height + positions[1] - 1) * width + positions[2]
    sheets = span_d // step + 1
    if sheets * (length + reach) > stage_rows(build) or rows + length + reach > INT32_MAX // 2:
        return
    tiling = _run(build, positions, (sheets, height, width), (batch, 1, ceil_div(rows, length), 1), 1, reach)
    yield replace(tiling, sheet_step=step)


def in_order(
    build: Build, batch: int, positions: Triple, read_size: Triple, worth: Callable[[int, int], bool]
) -> Iterator[tuple[int, Tiling]]:
    """Yields tilings of the volume that fit the build's stages, each with its place in `tilings`.

    `worth` tells whether tilings with a number of rounds of slabs, for all tiles together, and a number of tiles are
    wanted; if not, then none with more of both. A march may use every tiling also with shared last tiles.
    """
    runs: Iterable[Tiling] = ()
    if build.march and build.input is Input.LINES:
        runs = _whole_lines(build, batch, positions, read_size)
    elif build.march:
        runs = _runs(build, batch, positions, read_size)
    elif build.division is Division.LAST_TILES:
        runs = _deep_runs(build, batch, positions, read_size)
    for place, run in enumerate(runs):
        if worth(ceil_div(run.slabs, build.round_slabs) * run.count, run.count):
            yield place - RUNS, run
    for rounds, place, count, sizes in () if build.input is Input.LINES else _boxes(build, batch, positions):
        if worth(rounds, count):
            yield place, Tiling(*sizes)
        elif not worth(rounds, 0):
            return  # all others have more rounds


def tilings(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterable[Tiling]:
    """Returns all tilings of the volume that fit the build's stages, runs before boxes, small boxes first."""
    found = [tiling for _, tiling in sorted(in_order(build, batch, positions, read_size, lambda *_: True), key=first)]
    if not build.march:
        return found
    return [each for tiling in found for each in (tiling, replace(tiling, shared=True))]


def _whole_lines(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterator[Tiling]:
    """Yields tilings of a march into tiles of whole lines, whose positions are rows in sequence."""
    depth, height, width = positions
    most = build.round_slabs * SLAB // width
    for lines in {ceil_div(height, parts) for parts in range(ceil_div(height, max(1, most)), height + 1)}:
        halo = (1, build.lines_read(lines), read_size[2])
        if lines > most or channel_pitch(prod(halo), build.item_bytes) > line_items(build):
            continue
        slabs = ceil_div(lines * width, SLAB)
        tiles = (batch, 1, ceil_div(height, lines), 1)
        yield Tiling(
            (depth, lines, width), halo, 1, 1, tiles, slabs, slabs, 1, 8, (0, 0, SLAB), lines * width
        )  # fmt: skip


def channel_pitch(items: int, item_bytes: int) -> int:
    """Returns the elements from one channel to the next in a stage of lines (`pitch` in halo_lines.cuh)."""
    in_word = 4 // item_bytes
    beside = 8 // in_word
    return in_word * ((items // in_word + 31 - beside) // 32 * 32 + beside)


def forget_boxes() -> None:
    """Clears the cached boxes, which many builds of a search share, at the end of the search."""
    _fitting_boxes.cache_clear()
    _all_boxes.cache_clear()
    _known_ways.cache_clear()


class _Boxes(NamedTuple):
    """The parameters of boxes except for the size of a stage. Many builds of a search have equal parameters."""

    march: bool
    span: Triple
    slabs: int
    per_round: int
    max_passes: int
    images: bool
    item_bytes: int
    batch: int
    positions: Triple


def _boxes(build: Build, batch: int, positions: Triple) -> list[tuple[int, int, int, Sizes]]:
    """Returns the tilings into boxes of positions, those with the fewest rounds first."""
    slabs = build.tile.slabs, build.round_slabs, build.max_passes
    boxes = _Boxes(build.march, build.span, *slabs, build.output is Output.IMAGES, build.item_bytes, batch, positions)
    return _fitting_boxes(boxes, stage_rows(build))


# What a box is made of: the arguments of `Tiling` up to `run`. Thousands of tuples of integers are cheaper than as
# many tilings, and the garbage collector does not visit them.
Sizes = tuple[Triple, Triple, int, int, tuple[int, int, int, int], int, int, int, int, Triple, int]


@lru_cache(maxsize=128)
def _fitting_boxes(boxes: _Boxes, room: int) -> list[tuple[int, int, int, Sizes]]:
    """Returns the boxes that fit a stage of `room` rows, each cut in the first of the ways with the fewest slabs.

    Before each box stand the rounds of slabs of all tiles, by which boxes are sorted, the place among all boxes, and
    the number of tiles.
    """
    found = []
    for place, (rows, count, ways) in enumerate(_all_boxes(boxes)):
        if rows <= room:
            fitting = ways if max(ways)[0] < room else [way for way in ways if way[0] < room]
            if fitting:
                _, slabs, _, sizes = min(fitting, key=second)
                found.append((-(-slabs // boxes.per_round) * count, place, count, sizes))
    found.sort()
    return found


# A way to cut a box: the last row that it reads, its number of slabs, those along w, and its sizes.
Way = tuple[int, int, int, Sizes]
# The ways to cut boxes by their size (items, depth, height, width), after the rows of a halo and the number of tiles.
Ways = dict[tuple[int, int, int, int], tuple[int, int, list[Way]]]


@lru_cache(maxsize=16)
def _known_ways(march: bool, span: Triple, batch: int, positions: Triple) -> Ways:
    """Returns the ways that builds of a search with this march and span have asked for; they fill it."""
    return {}


def _ways(march: bool, span: Triple, batch: int, positions: Triple, box: tuple[int, int, int, int]) -> list[Way]:
    """Returns all ways to cut a box."""
    items, depth, height, width = box
    span_d, span_h, span_w = span
    halo: Triple = (1 if march else depth + span_d, height + span_h, width + span_w)
    line, sheet = halo[2] * items, halo[1] * halo[2] * items
    displacement = (0 if march else span_d) * sheet + span_h * line
    tile: Triple = (positions[0] if march else depth, height, width)
    depths, heights, widths = (-(-all_of // own) for all_of, own in zip(positions, tile, strict=True))
    tiles = (-(-batch // items), depths, heights, widths)
    found: list[Way] = []
    for near, slabs, slabs_w, slabs_h, group_rows, step, run in _slab_layouts((depth, height, width), halo, items):
        sheets = -(-slabs // (slabs_w * slabs_h))
        last = (sheets - 1) * step[0] + (slabs_h - 1) * step[1] + (slabs_w - 1) * step[2] + 7 * group_rows + 7
        sizes = (tile, halo, items, near, tiles, slabs, slabs_w, slabs_h, group_rows, step, run)
        found.append((last + displacement + span_w * near, slabs, slabs_w, sizes))
    return found


@lru_cache(maxsize=16)
def _all_boxes(boxes: _Boxes) -> list[tuple[int, int, list[Way]]]:
    """Returns for each box the rows of its halo, the number of tiles, and the ways to cut the box."""
    march, span, slabs_together, per_round, max_passes, images, item_bytes, batch, positions = boxes
    small = prod(positions) < 512
    items_options = [i for i in (1, 2, 4, 8, 16, 32, 64) if i == 1 or (small and i < 2 * batch)]
    depths = [1] if march else _extents(positions[0], (1, 2, 3, 4, 6, 8))
    most = per_round * max_passes
    least = min(SLAB * per_round // 2, prod(positions) * batch // 256)  # smaller tiles are mostly overhead
    known = _known_ways(march, span, batch, positions)
    found = []
    for box in product(
        items_options,
        depths,
        _extents(positions[1], (1, 2, 4, 8, 16, 24, 32)),
        _extents(positions[2], (8, 16, 24, 32)),
    ):
        items, depth, height, width = box
        volume = depth * height * width * items
        if volume > most * SLAB or (volume < least and (depth, height, width) != positions):
            continue
        if box not in known:
            every = _ways(march, span, batch, positions, box)
            _, halo, _, _, tiles, *_ = every[0][3]
            known[box] = prod(halo) * items, prod(tiles), every
        rows, count, every = known[box]
        ways: list[Way] = []
        for way in every:
            last, slabs, slabs_w, sizes = way
            if slabs > most:
                continue
            # A consumer stores a whole line through images or, with 16-bit types, a part of a line: parts are slower
            # in float32.
            in_line = slabs_w == slabs_together or (slabs_w % slabs_together == 0 and item_bytes == 2)
            if images and (sizes[-1] != width or items > 1 or not in_line):
                continue
            for reached, fewer, *_ in ways:
                if reached <= last and fewer <= slabs:
                    break  # a previous way has no more slabs, and fits wherever this way fits
            else:
                ways.append(way)
        if ways:
            found.append((rows, count, ways))
    return found
