"""Cuts a volume into tiles for a build of the halo kernel, and divides the tiles among blocks.

A tiling has run-time arguments only: a new volume needs a new tiling, never another build. A sheet is a plane of a
halo; a run is a tile of rows in sequence, wherever lines end (halo.cuh).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter

from ...planning.geometry import Triple
from ...planning.scalars import INT32_MAX, ceil_div, round_up
from .boxes import Sizes, boxes
from .build import SLAB, Build, Division, Input, Output
from .job import Job
from .shared_memory import line_items, stage_rows
from .spread import Spread, Stretches, stretches


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


RUNS = 1024  # more runs than a build has; places of runs are negative, those of boxes are not


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

    @property
    def sheet_rows(self) -> int:
        """The number of rows of the halo from one plane to the next."""
        if self.length:
            return (self.length + self.reach) // self.sheet_step
        return self.halo[1] * self.halo[2] * self.items

    def spread(self, build: Build, job: Job, multiprocessors: int) -> Spread:
        """Returns how blocks divide the chunks of all tiles."""
        found, chunks = self._stretches(build, job)
        return found.spread(chunks, build.chunks, multiprocessors)

    def busiest(self, build: Build, job: Job, multiprocessors: int) -> float:
        """Returns the time of the busiest block if blocks divide the last tiles, in chunks that skip no products."""
        found, chunks = self._stretches(build, job)
        return found.busiest(chunks, build.chunks, multiprocessors)

    def mean_cost(self, build: Build, job: Job) -> float:
        """Returns the cost of an average chunk, as a fraction of one that skips no products."""
        found, _ = self._stretches(build, job)
        return found.cost / (found.tiles * Spread.WHOLE)

    def _stretches(self, build: Build, job: Job) -> tuple[Stretches, int]:
        """Returns the tiles along depth, or the runs, and the number of chunks at each place along depth."""
        shifts, size = build.depth_shifts, job.read_size[0]
        if self.length:
            found = stretches(shifts, size, self.length, self.tiles[2], self.halo[1] * self.halo[2])
        else:
            found = stretches(shifts, size, self.tile[0], self.tiles[1])
        return found, self.count // found.tiles * build.column_tiles * build.chunks

    def __str__(self) -> str:
        shared = ", shared" if self.shared else ""
        if self.length:
            through = ", through the batch" if self.sheets > 1 else ", through depth" if self.halo[0] > 1 else ""
            return f"{self.tile[0]}x{self.length} in sequence{through}{shared}"
        items = f" of {self.items} batch items" if self.items > 1 else ""
        portions = f", {self.portions} portions" if self.portions > 1 else ""
        return "x".join(map(str, self.tile)) + items + portions + shared


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


def deep_runs(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterator[Tiling]:
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
    wanted, where 0 stands for any number of tiles. If not, then none with more rounds are. Runs outside of marches
    are few, and always wanted. A march may also share the last tiles of every tiling.
    """
    runs: Iterable[Tiling] = ()
    if build.march and build.input is Input.LINES:
        runs = _whole_lines(build, batch, positions, read_size)
    elif build.march:
        runs = _runs(build, batch, positions, read_size)
    elif build.division is Division.LAST_TILES:
        runs = deep_runs(build, batch, positions, read_size)
    for place, run in enumerate(runs):
        if not build.march or worth(ceil_div(run.slabs, build.round_slabs) * run.count, run.count):
            yield place - RUNS, run
    if build.input is not Input.LINES:
        for place, sizes in boxes(build, batch, positions, worth):
            yield place, _of_box(sizes)


def _of_box(sizes: Sizes) -> Tiling:
    """Returns `Tiling(*sizes)` without its constructor, which a search would call thousands of times."""
    found = object.__new__(Tiling)
    found.__dict__.update(zip(_OF_BOX, sizes, strict=True))
    return found


_OF_BOX = ("tile", "halo", "items", "near", "tiles", "slabs", "slabs_w", "slabs_h", "group_rows", "slab_step", "run")


def tilings(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterable[Tiling]:
    """Returns all tilings of the volume that fit the build's stages, runs before boxes, small boxes first."""
    every = sorted(in_order(build, batch, positions, read_size, lambda *_: True), key=itemgetter(0))
    found = [tiling for _, tiling in every]
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
