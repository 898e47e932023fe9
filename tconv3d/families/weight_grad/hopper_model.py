"""Predicts the cycles of the weight gradient on Hopper, per multiprocessor, to choose between tilings.

The number of parts of the positions (split-K) follows from the prediction. hopper.py explains the terms.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from ...planning.geometry import Geometry, Triple
from ...planning.problem import Device
from .hopper_taps import Lines, Words
from .hopper_tiling import Box, Buffers, Contents, Layer, Tiling
from .segments import SECTOR_WORDS, SEGMENT

JOB_CHANNELS = 8  # channels that a producer warp copies at a time
SLICED = 4  # workspace limit for the parts of all slices of a batch, in multiples of `Device.workspace_bytes`


class Costs(NamedTuple):
    """Costs per multiprocessor, in cycles unless stated otherwise, for choosing between tilings."""

    l2_bytes: float  # bytes per cycle from the L2 cache
    fragments: float  # fraction of the shared-memory cycles of fragment loads for which tensor cores wait
    writes: float  # fraction of the shared-memory cycles of storing x and dy for which tensor cores wait
    item: float  # cycles per item until its operands reach the first product
    alone: float  # additional cycles per item with a single set of operands
    x_row: float  # cycles of a producer warp per row of K
    x_vectors: float  # cycles of a producer warp per job of x copied in 16-byte vectors
    x_words: float  # cycles of a producer warp per job of x copied word by word
    y_block: float  # cycles of a producer warp per block of slots of a plane of dy
    y_line: float  # cycles of a producer warp per line (channel or pair of channels) of a block of slots
    copying: float  # cycles per step of the producers' barriers
    turning: float  # cycles per job of x whose words are reordered in shared memory
    overlap: float  # fraction of the shorter activities' time that is not hidden behind the longest one
    tight: float  # factor on memory time where shared memory has room for one group of sheets in flight
    step: float  # cycles per step of barriers and the first operands
    block: float  # cycles per block of building tables and storing the sums


# VECTORS is fitted to 40 measured times on one H200. WORDS is for copies word by word; its fit is less precise.
VECTORS = Costs(60, 0.46, 0.33, 23, 8, 180, 26, 150, 400, 22, 570, 98, 0.15, 1.1, 190, 20000)
WORDS = Costs(28, 1.0, 1.0, 15, 25, 0, 0, 750, 0, 75, 0, 0, 0.35, 1.25, 250, 8000)


def costs_of(layer: Layer, piece: Words) -> Costs:
    return WORDS if layer.slow or (layer.elements_y and not piece.lines) else VECTORS


# Cycles of a producer warp for rows of channels: per copy of x, per line of dy, per copy of dy (of tiles of a
# multiple of 4 channels, whose segments are further apart, and of others), and per job of x that is transposed. They
# are derived from the compiled loops, which have 19, 90, 13, 8 and 35 instructions for these, at 4 cycles per
# instruction, to which the fitted costs of the other copies amount too.
ROW_COPY_X, ROW_LINE_Y, ROW_COPY_Y, ROW_TURNING = 76.0, 360.0, (52.0, 33.0), 140.0
# Cycles for 16-bit lines of dy that begin at any element of a vector of memory: of a producer warp per line of a
# block of slots, beyond `Costs.y_line`, and per item. They are derived from the compiled loops: a copy takes 16
# instructions instead of 6, and an item 50 more than the 165 that it takes otherwise. No GPU has run them.
SHIFTED_LINE, SHIFTED_ITEM = 40.0, 40.0
ROUNDING = 1.0 - 1e-9  # factor that keeps bounds below predictions in spite of rounding errors
MIN_PRODUCT_CYCLES = 12.0  # least cycles of a matrix instruction
ADDING_OVERHEAD, ADDING_BYTES = 3500.0, 9.6  # cycles to launch the sum of parts; bytes per cycle and multiprocessor
# A block that writes its sums straight to the result takes RESULT_ELEMENT cycles per element and RESULT_RUN cycles
# per run of adjacent elements; `Costs.block` already includes RESULT_HIDDEN of these cycles.
RESULT_ELEMENT, RESULT_RUN, RESULT_HIDDEN = 0.85, 1.5, 10000.0


# ---- Predicted times in cycles per multiprocessor.


class StepWork(NamedTuple):
    """Predicted cycles of the activities of one step of one launch."""

    products: float  # cycles of tensor cores, with their waits for shared memory
    copying: float  # cycles of the copying producer warps
    turning: float  # cycles of the producer warps that reorder x
    memory: float  # cycles of transfers from the L2 cache
    overlap: float  # fraction of the shorter activities' time that is not hidden behind the longest one
    overhead: float  # cycles of barriers and the first operands

    @property
    def cycles(self) -> float:
        parts = (self.products, self.copying, self.turning, self.memory)
        longest = max(parts)
        return longest + self.overlap * (sum(parts) - longest) + self.overhead

    @property
    def coming(self) -> float:
        """Cycles to bring a group of sheets before the first step, which no products hide."""
        return max(self.copying, self.memory)


def step_work(layer: Layer, made: Buffers, piece: Words, conflicts: float = 0.0) -> StepWork:
    """Predicts one step. `conflicts`, if not 0, replaces `made.conflicts`."""
    contents = made.contents
    tiling, box, k_rows = contents.tiling, contents.box, contents.box.k_rows
    share, costs, turners = tiling.share, costs_of(layer, piece), layer.turners(tiling.share)
    items = 2 * k_rows * share.consumers * tiling.row_tiles
    planes = box.d * tiling.planes[0]
    words_x, words_y = k_rows * 32 * tiling.columns, planes * contents.slots * piece.vector * tiling.out_tile
    turned = costs.turning > 0 and (layer.vectors_x or layer.per_word == 1)
    turn = ROW_TURNING if layer.piece_x else costs.turning
    stride = 1 if isinstance(piece, Lines) else piece.stride
    phases = len(piece.offsets)  # phases that taps read; unused phases lie between them in memory
    # A line, or a tile of a row of channels, may begin anywhere in a sector.
    length_x = tiling.columns if layer.piece_x else box.w * SEGMENT
    sectors = words_x * (1 + (0 if layer.piece_x and length_x % SECTOR_WORDS == 0 else SECTOR_WORDS / length_x))
    if piece.last:
        sectors += words_y * (1 + (SECTOR_WORDS / tiling.out_tile if tiling.out_tile % SECTOR_WORDS else 0))
    else:
        sectors += words_y * stride / phases * (1 + SECTOR_WORDS / (contents.line_words * stride))
    return StepWork(
        products=items * item_cycles(costs, piece, tiling.columns, tiling.depth, conflicts or made.conflicts)
        + costs.writes * ((3 if turned else 1) * words_x + words_y) / 32,
        copying=_copy_cycles(layer, contents, piece, planes) / (4 * share.producers - turners) + costs.copying,
        turning=turn * k_rows * tiling.columns / JOB_CHANNELS / turners if turned else 0.0,
        memory=4 * sectors / costs.l2_bytes * (costs.tight if made.groups < contents.ahead + 3 else 1.0),
        overlap=costs.overlap,
        overhead=costs.step,
    )


def _copy_cycles(layer: Layer, made: Contents, piece: Words, planes: int) -> float:
    """Returns the cycles that one producer warp alone would take to copy a step's x and dy."""
    costs, k_rows, together = costs_of(layer, piece), made.box.k_rows, made.table_planes
    jobs_x = k_rows * made.tiling.columns / JOB_CHANNELS
    blocks_y = planes // together * -(-made.slots * together // (32 if piece.lines else 16))
    x = costs.x_row * k_rows + jobs_x * (costs.x_vectors if layer.vectors_x else costs.x_words)
    if layer.piece_x:
        rows, copies = row_copies(made.tiling.columns // layer.piece_x)
        x = ROW_COPY_X * 32 * k_rows / rows * copies
    if piece.last:
        rows, copies = row_copies(made.tiling.out_tile // gcd(layer.piece_y, made.tiling.out_tile))
        phases = made.tiling.planes[2] if rows % made.tiling.planes[2] == 0 else 1
        jobs = planes * made.slots // made.line_words // phases
        each = ROW_COPY_Y[made.tiling.out_tile % 4 > 0]
        return x + jobs * (ROW_LINE_Y + each * -(-made.line_words // (rows // phases)) * copies)
    elements = 4 / 3 if layer.elements_y and not piece.lines else 1.0
    return x + elements * blocks_y * (costs.y_block + line_cycles(costs, piece) * made.tiling.lines)


def line_cycles(costs: Costs, piece: Words) -> float:
    """Returns the cycles of a producer warp per line of a block of slots."""
    return costs.y_line + (SHIFTED_LINE if piece.shifted else 0.0)


def row_copies(pieces: int) -> tuple[int, int]:
    """Returns the rows of channels that a warp copies at a time, and its copies for each (`RowLanes` in
    hopper_weight_grad_producers.cuh)."""
    fitting = (lanes for lanes in (pieces, 32, 16, 8) if lanes < pieces or lanes == pieces <= 32)
    ways = [(32 // lanes, -(-pieces // lanes)) for lanes in fitting]
    return min(reversed(ways), key=lambda way: way[1] / way[0])


def item_cycles(costs: Costs, piece: Words, columns: int, depth: int, conflicts: float = 1.0) -> float:
    """Returns the cycles of a chunk of a row tile. Tensor cores wait for some of the time in which fragments are
    loaded, since both read shared memory."""
    products = 2 * len(piece.taps) * max(columns / 2, MIN_PRODUCT_CYCLES)
    loads = costs.fragments * 16 * piece.vectors * conflicts
    shifts = SHIFTED_ITEM if piece.shifted else 0.0
    return products + loads + shifts + costs.item + (costs.alone if depth == 1 else 0.0)


def box_cost(layer: Layer, made: Buffers, size: Triple, conflicts: float = 0.0) -> float:
    """Predicts the cycles that the blocks of one kind take in total for one batch item of a volume."""
    d, h, w = made.box.count(size, layer.per_word)
    cycles = 0.0
    for piece, count in made.tiling.unlike_pieces:
        work = step_work(layer, made, piece, conflicts)
        cycles += count * (d * work.cycles + made.contents.ahead * work.coming)
    return h * w * cycles


class _PieceRates(NamedTuple):
    """What the bound needs to know of a piece: cycles per row of K, and per word or block of slots of dy."""

    alike: int  # pieces that are like this one
    products: float  # per row of K: products, and stores of x to shared memory
    writes: float  # per slot of dy: stores to shared memory
    copies_x: float  # per row of K
    copies_y: float  # per block of slots
    block: int  # slots of a block
    turning: float  # per row of K
    memory_x: float  # per row of K, without partial sectors
    memory_y: float  # per slot of dy, without partial sectors
    partial: int  # words of partial sectors of a line; 0 for rows of channels, of which only the words are counted
    stride: int
    costs: Costs

    @classmethod
    def of(cls, layer: Layer, tiling: Tiling, piece: Words, count: int) -> _PieceRates:
        costs, turners, columns = costs_of(layer, piece), layer.turners(tiling.share), tiling.columns
        turned = costs.turning > 0 and (layer.vectors_x or layer.per_word == 1)
        stride, copiers = 1 if isinstance(piece, Lines) else piece.stride, 4 * tiling.share.producers - turners
        jobs = columns / JOB_CHANNELS
        items = 2 * tiling.share.consumers * tiling.row_tiles * item_cycles(costs, piece, columns, tiling.depth)
        elements = 4 / 3 if layer.elements_y and not piece.lines else 1.0
        words, rows = piece.vector * tiling.out_tile, layer.piece_x or piece.last
        turning = min(costs.turning, ROW_TURNING) if rows else costs.turning
        copied = 0.0 if rows else 1 / copiers
        return cls(
            count,
            items + costs.writes * (3 if turned else 1) * columns,
            costs.writes * words / 32,
            copied * (costs.x_row + jobs * (costs.x_vectors if layer.vectors_x else costs.x_words)),
            copied * elements * (costs.y_block + line_cycles(costs, piece) * tiling.lines),
            32 if piece.lines else 16,
            turning * jobs / turners if turned else 0.0,
            4 * 32 * columns / costs.l2_bytes,
            4 * words * (1 if rows else stride / len(piece.offsets)) / costs.l2_bytes,
            0 if rows else SECTOR_WORDS,
            stride,
            costs,
        )


class LeastCost:
    """Lower bounds of `box_cost` for the boxes of a tiling: no bank conflicts, and room for all groups of sheets."""

    def __init__(self, layer: Layer, tiling: Tiling) -> None:
        self.tiling, self.per_word = tiling, layer.per_word
        self.line_words: dict[int, int] = {}
        self.pieces = [_PieceRates.of(layer, tiling, piece, count) for piece, count in tiling.unlike_pieces]

    def of(self, box: Box, size: Triple) -> float:
        tiling, first, k_rows = self.tiling, self.tiling.pieces[0], box.k_rows
        if box.w not in self.line_words:
            self.line_words[box.w] = max([piece.line_words(box.w) for piece in tiling.pieces])
        line_words, planes = self.line_words[box.w], box.d * tiling.planes[0]
        lines = box.h * first.at_once + tiling.reach[1]
        slots = tiling.planes[1] * lines * tiling.planes[2] * line_words // first.vector
        together = planes if first.at_once > 1 else 1
        ahead, cycles, all_slots = -(-tiling.reach[0] // box.d), 0.0, planes * slots
        d, h, w = box.count(size, self.per_word)
        for rates in self.pieces:
            costs = rates.costs
            products = k_rows * rates.products + all_slots * rates.writes
            blocks = planes // together * -(-slots * together // rates.block)
            copying = k_rows * rates.copies_x + blocks * rates.copies_y + costs.copying
            memory = k_rows * rates.memory_x * (1 + rates.partial / (box.w * SEGMENT))
            memory += all_slots * rates.memory_y * (1 + rates.partial / (line_words * rates.stride))
            turning = k_rows * rates.turning
            longest = max(products, copying, turning, memory)
            step = longest + costs.overlap * (products + copying + turning + memory - longest) + costs.step
            cycles += rates.alike * (d * step + ahead * max(copying, memory))
        return ROUNDING * h * w * cycles


def steps_of(batch: int, size: Triple, layer: Layer, box: Box) -> int:
    return batch * prod(box.count(size, layer.per_word))


def cycles_by_splits(layer: Layer, made: Buffers, batch: int, size: Triple, device: Device) -> Callable[[int], float]:
    """Returns a function that predicts the cycles of all steps for a number of parts: blocks run in waves, and parts
    are added afterwards."""
    steps, depths = steps_of(batch, size, layer, made.box), made.box.count(size, layer.per_word)[0]
    work = max(
        (step_work(layer, made, piece) for piece, _ in made.tiling.unlike_pieces), key=lambda work: work.cycles
    )
    step, ahead, coming = work.cycles, made.contents.ahead, work.coming
    kinds, elements = made.tiling.kinds(layer.geometry), elements_of(layer.geometry)
    block = costs_of(layer, made.tiling.pieces[0]).block

    def of_parts(splits: int) -> float:
        waves = -(-kinds * splits // device.multiprocessors)
        moved = (splits + 1 if splits > 1 else 0) * 4 * elements
        adding = ADDING_OVERHEAD + moved / (ADDING_BYTES * device.multiprocessors) if splits > 1 else 0.0
        each = -(-steps // splits)
        runs = max(1.0, each / depths)
        last = block + (_result_cycles(made.tiling, layer.geometry) if splits == 1 else 0.0)
        return waves * (each * step + runs * ahead * coming + last) + adding

    return of_parts


def _result_cycles(tiling: Tiling, g: Geometry) -> float:
    """Returns the cycles that a block takes to write its sums straight to the result, beyond `Costs.block`."""
    d, h, w = tiling.rows_d[0].taps, tiling.rows_h[0].taps, tiling.pieces[0].taps
    taps = {(i * g.kernel[1] + j) * g.kernel[2] + k for i, j, k in product(d, h, w)}
    runs = tiling.columns * tiling.out_tile * sum(tap - 1 not in taps for tap in taps)
    return max(0.0, RESULT_ELEMENT * tiling.elements + RESULT_RUN * runs - RESULT_HIDDEN)


def splits_of(layer: Layer, made: Buffers, batch: int, size: Triple, device: Device, slices: int = 1) -> int:
    """Returns the number of parts (split-K) of the steps with the least predicted cycles."""
    waves = -(-4 * device.multiprocessors // made.tiling.kinds(layer.geometry))
    steps = steps_of(batch, size, layer, made.box)
    room = device.workspace_bytes if slices == 1 else SLICED * device.workspace_bytes // slices
    most = max(1, min(steps, room // (elements_of(layer.geometry) * 4), waves))
    return min(range(1, most + 1), key=cycles_by_splits(layer, made, batch, size, device))


def elements_of(g: Geometry) -> int:
    """Returns the number of elements of the weight."""
    return g.in_channels * g.out_per_group * g.taps
