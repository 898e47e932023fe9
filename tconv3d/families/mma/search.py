"""Finds the predicted fastest build of the kernel on mma.sync without evaluating the model for most candidates.

A lower bound of the predicted cycles is computed for every shape of a build, and for each of its boxes only if that
bound is among the least. Candidates are evaluated in the order of their bounds, until no bound is below the best
prediction, or until the limit of `planning/effort.py`. Without a limit the result is the first of the fastest
candidates of `model.candidates`, and a test compares both. This module knows nothing of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf, prod
from typing import NamedTuple

from ...planning.effort import MMA_BUILDS, Effort
from ...planning.problem import Device, Pass
from ...planning.side import Side
from . import crop, model
from .box import Box, boxes
from .model import Build, Candidate, Shape
from .work import Work, is_dense, works

ROUNDING = 1.0 - 1e-9  # factor that keeps bounds below predictions in spite of rounding errors

WEIGHT_ISSUE = model.WEIGHT_INSTRUCTIONS / 32 / 16  # instructions per byte of weights that are copied

Order = tuple[int, ...]  # place of a candidate among all, in the order of `model.candidates`


class _Group(NamedTuple):
    """All candidates with one shape and one box, and a lower bound of their predicted cycles."""

    least: float
    order: Order
    bound: _Bound
    shape: Shape
    box: Box


class _Shapes(NamedTuple):
    """All candidates with one shape, and a lower bound of their predicted cycles."""

    least: float
    order: Order
    bound: _Bound
    shape: Shape
    work: _ShapeWork

    def groups(self) -> Iterator[_Group]:
        """Yields the boxes that may fit shared memory."""
        bound, shape = self.bound, self.shape
        for place, (box, work) in enumerate(bound.boxes(shape.tiles_m, shape.warps_m)):
            if self.work.ring_bytes + work.slots * self.work.slot_bytes <= bound.device.shared_bytes:
                least = bound.cycles(shape, self.work, work)
                yield _Group(least, (*self.order[:2], place), bound, shape, box)


def fastest(
    sides: Iterable[tuple[Side, int, bool]],
    item_bytes: int,
    device: Device,
    divided: Callable[[Side], Iterable[Work]] | None = None,
) -> Candidate | None:
    """Returns the predicted fastest candidate of some sides, each with its kind of copy and whether it has rows.

    `divided` returns the divisions of taps that may be taken, in place of the usual ones.
    """
    best: tuple[float, Candidate] | None = None
    for side, copy, rows in sides:
        most = best[0] if best else inf
        divisions = works if divided is None else divided
        bounds = [_Bound(work, copy, item_bytes, device, rows) for work in divisions(side)]
        found, any_fits = _of_works(bounds, most)
        if not any_fits and divided is None:
            found, _ = _of_works([_Bound(Work(side, 0, apart=True), copy, item_bytes, device, rows)], most)
        best = found or best
    return best[1] if best else None


def _of_works(bounds: list[_Bound], most: float) -> tuple[tuple[float, Candidate] | None, bool]:
    """Returns the fastest candidate after its cycles, if below `most`, and whether any candidate fits the device."""
    waiting: list[_Shapes | _Group] = [
        shapes for number, bound in enumerate(bounds) for shapes in bound.shapes(number)
    ]
    heapify(waiting)
    best: tuple[float, Order, Candidate] | None = None
    fits, effort = False, Effort(MMA_BUILDS)
    while waiting:
        first = heappop(waiting)
        if fits and (first.least > most or effort.spent):
            break
        if isinstance(first, _Shapes):
            for group in first.groups():
                heappush(waiting, group)
            continue
        for order, candidate in _candidates(first, effort):
            fits, cycles = True, candidate.cycles(first.bound.device)
            if (cycles, order) < best[:2] if best else cycles < most:
                best, most = (cycles, order, candidate), cycles
    return (best[0], best[2]) if best else None, fits


def _candidates(group: _Group, effort: Effort) -> Iterator[tuple[Order, Candidate]]:
    """Yields the candidates of a box that fit the device, each with its place among all."""
    bound, (work_number, shape_number, box_number) = group.bound, group.order
    for number, build in enumerate(model.builds(bound.work, group.shape)):
        effort.count()
        made = Candidate(bound.work, build, group.box, bound.copy, bound.item_bytes, bound.with_rows)
        for last, candidate in enumerate(model.fitting(made, bound.device)):
            yield (work_number, shape_number, number, box_number, last), candidate


def _block(
    multiply: float, shared: float, issued: float, read: float, weight_bytes: float, storing: float
) -> tuple[float, float]:
    """Returns the cycles of a block without and with its stores, but without its waiting.

    `multiply` is to the power of TOGETHER; `shared` and `read` are bytes, and `issued` instructions, without those of
    the weights.
    """
    p = model.TOGETHER
    inner = (
        multiply
        + ((shared + weight_bytes) / model.SHARED_BYTES_PER_CYCLE) ** p
        + ((issued + WEIGHT_ISSUE * weight_bytes) / model.ISSUE_PER_CYCLE) ** p
    )
    loads = (weight_bytes + read) / model.L2_BYTES_PER_CYCLE
    return (inner + loads**p) ** (1 / p), (inner + (loads + storing) ** p) ** (1 / p)


def _hiding(alone: float, busy: float) -> float:
    """Returns the cycles of a block from those that it takes alone and those that its multiprocessor is busy."""
    return max(alone, busy) + model.OVERLAP * min(alone, busy)


class _BoxWork(NamedTuple):
    """What the bound needs to know of a box, or the least that any of several boxes has of each."""

    slots: int
    halo_items: int
    tiles: int
    positions: int
    torn: float  # `Candidate.torn`
    waste: float  # `Candidate.sector_waste` where x is contiguous along w
    share: float  # rows of taps that are not left out, at least, of all
    inside: float  # lines of halos that lie inside x, of all


class _WarpWork(NamedTuple):
    """What the bound needs to know of shapes that differ in their warps alone: counts of a warp for a whole block."""

    chunks: int
    multiplies: float
    issued: float  # instructions, without those of copies
    shared: float  # bytes of shared memory that are read
    steps: float
    rows: int  # rows of taps per step, the fewest


class _ShapeWork(NamedTuple):
    """What the bound needs to know of a shape besides a box."""

    ring_bytes: int  # bytes of two stages of weights
    slot_bytes: int  # bytes of shared memory per slot of a halo
    stay: bool  # whether all weights may stay in shared memory
    chunks: int
    copied: int  # channels of all chunks, in bytes
    multiplies: float
    multiply: float  # cycles of tensor cores, to the power of TOGETHER
    shared: float  # bytes of shared memory that are read, without those of copies
    issued: float  # instructions, without those of copies
    weight_bytes: float
    waste: float
    stores: int
    steps: float
    slices: int


class _Bound:
    """Bounds the predicted cycles of shapes from below.

    A shape's candidates differ in rows per step, stages, blocks per multiprocessor, whether weights stay in shared
    memory, and how many blocks share the channels of a tile. The bound takes the best of each for itself: the fewest
    steps, the most stages, all blocks that registers allow, and no copies of weights that may stay. With g blocks in
    all, n of them at a time on each of m multiprocessors, there are at least max(1, g / (n m)) waves, and waves times
    sharing are at least max(1, g / m).
    """

    def __init__(self, work: Work, copy: int, item_bytes: int, device: Device, rows: bool) -> None:
        copy = model.copy_of_lattice(work, copy)
        self.work, self.copy, self.item_bytes, self.device = work, copy, item_bytes, device
        phases = len(work.phases)
        self.kinds = work.side.problem.geometry.groups * phases
        self.rows, self.sources = len(work.rows) / phases, len(work.sources) / phases
        self.windows, self.spans = len(work.windows), sum(window.span for window in work.windows)
        self.inner, self.inner_phases = len(work.inner.taps), len(work.inner.phases)
        self.halves = 2 if work.strict else 1
        self.rounds = item_bytes == 4 and not rows and not work.strict
        self.writing = model.writing_rows(work.side, rows, device)
        self.copied = model.COPY_INSTRUCTIONS[copy] / 32 / model.COPY_BYTES[copy]  # instructions per byte of a halo
        # Cycles per number that is stored: of memory, and of issuing instructions.
        self.of_stored = item_bytes / model.MEMORY_BYTES_PER_CYCLE
        self.of_stores = model.STORE_INSTRUCTIONS / 32 / (1 if item_bytes == 4 else 2) / model.ISSUE_PER_CYCLE
        self.exposes = copy >= model.HALVES or work.strict
        self._adding_of: dict[int, float] = {}
        self.lines = work.side.x[4] == 1  # x is contiguous along w
        self.with_rows = rows
        self.may_split = work.side.problem.which is Pass.INPUT_GRAD and is_dense(work.side)
        self._steps: dict[int, float] = {}
        self._warps: dict[tuple[int, int, int], _WarpWork] = {}
        self._boxes: dict[tuple[int, int], list[tuple[Box, _BoxWork]]] = {}
        self._of_width: dict[int, tuple[float, float]] = {}

    def shapes(self, work_number: int) -> Iterator[_Shapes]:
        """Yields all shapes, each with a bound for all its boxes."""
        least_of: dict[tuple[int, int], _BoxWork] = {}
        for number, shape in enumerate(model.shapes(self.work, self.copy, self.item_bytes)):
            key = shape.tiles_m, shape.warps_m
            if key not in least_of:
                least_of[key] = _BoxWork(*map(min, zip(*(work for _, work in self.boxes(*key)), strict=True)))
            of_shape, box = self._of_shape(shape), least_of[key]
            if of_shape.ring_bytes + box.slots * of_shape.slot_bytes <= self.device.shared_bytes:
                least = self.cycles(shape, of_shape, box, rough=True)
                yield _Shapes(least, (work_number, number, -1), self, shape, of_shape)

    def boxes(self, tiles_m: int, warps_m: int) -> list[tuple[Box, _BoxWork]]:
        """Returns the boxes for some warps along positions."""
        key = tiles_m, warps_m
        if key not in self._boxes:
            self._boxes[key] = [(box, self._of_box(box)) for box in boxes(self.work, *key)]
        return self._boxes[key]

    def _of_box(self, box: Box) -> _BoxWork:
        width = box.tile[2]
        if width not in self._of_width:  # what is torn and wasted depends on the width of a box alone
            build = Build(self.work.unrolled, *(1,) * 8)
            one = Candidate(self.work, build, box, self.copy, self.item_bytes, self.with_rows)
            self._of_width[width] = one.torn, one.sector_waste if self.lines else 1.0
        shares = crop.share(self.work, box.tile, 1), crop.inside(self.work, box.tile, box.halo)
        counts = box.slots, box.halo_items, prod(box.tiles), box.positions
        return _BoxWork(*counts, *self._of_width[width], *shares)

    def _steps_of(self, rows: int) -> float:
        """Returns the steps of a chunk of an average block, with so many rows of taps per step."""
        if rows not in self._steps:
            all_steps = sum(-(-len(source.rows) // rows) for source in self.work.sources)
            self._steps[rows] = all_steps / len(self.work.phases)
        return self._steps[rows]

    def _of_warp(self, tiles_m: int, tiles_n: int, k_steps_of_chunk: int) -> _WarpWork:
        work, key = self.work, (tiles_m, tiles_n, k_steps_of_chunk)
        if key in self._warps:
            return self._warps[key]
        chunks = -(-work.side.reduced // (k_steps_of_chunk * work.step_bytes // self.item_bytes))
        k_steps, taps = chunks * k_steps_of_chunk, self.rows * self.inner
        tiles = k_steps * taps * tiles_m * tiles_n  # products of one tile of 16 x 8 sums
        a_loads = k_steps * self.rows * (tiles_m * self.windows + self.spans)
        b_bytes = k_steps * taps * tiles_n * 8 * work.step_bytes * self.halves
        rounding = 4 * model.ROUND_INSTRUCTIONS * a_loads if self.rounds else 0.0
        if work.strict:
            rounding = 4 * model.SPLIT_INSTRUCTIONS * a_loads + model.ADD_INSTRUCTIONS * tiles
        rows = model.rows_of_step(work, tiles_m * tiles_n * k_steps_of_chunk * work.products)
        steps = self._steps_of(rows[-1])
        control = model.STEP_INSTRUCTIONS * steps + model.HALO_INSTRUCTIONS * self.sources
        control = chunks * (control + model.ROW_INSTRUCTIONS * self.rows * self.windows)
        multiplies = tiles * work.products
        found = self._warps[key] = _WarpWork(
            chunks,
            multiplies,
            multiplies + a_loads + b_bytes / 512 + rounding + control,
            a_loads * 16 * work.step_bytes + b_bytes,
            steps,
            rows[0],
        )
        return found

    def _of_shape(self, shape: Shape) -> _ShapeWork:
        tiles_m, tiles_n, warps_m, warps_n, k_steps_of_chunk, _ = shape
        work, item_bytes, side = self.work, self.item_bytes, self.work.side
        chunks, multiplies, issued, shared, steps, rows = self._of_warp(tiles_m, tiles_n, k_steps_of_chunk)
        warps, columns = warps_m * warps_n, 8 * tiles_n * warps_n
        step_bytes = k_steps_of_chunk * work.step_bytes
        tap_bytes = self.halves * step_bytes * columns
        multiplies *= warps
        run = min(step_bytes, side.reduced * item_bytes)
        return _ShapeWork(
            # Shared memory has at least two halos, two stages of weights and, without pairs, 8 bytes per slot.
            2 * rows * self.inner * tap_bytes,
            (8 if self.copy < model.PAIRS else 0) + 2 * step_bytes,
            not work.crops and model.may_stay(work, chunks, tap_bytes, self.device),
            chunks,
            chunks * step_bytes,
            multiplies,
            (model.MULTIPLY_CYCLES * multiplies * work.step_bytes / model.K_STEP) ** model.TOGETHER,
            warps * shared,
            warps * issued,
            chunks * self.rows * self.inner * tap_bytes,
            1.0 if self.lines else max(1.0, model.SECTOR / run),
            self.inner_phases * min(columns, side.outs),
            steps,
            -(-side.outs // columns),
        )

    def cycles(self, shape: Shape, of_shape: _ShapeWork, box: _BoxWork, rough: bool = False) -> float:
        """Returns the bound of a shape with a box. A rough bound also holds for the least of several boxes."""
        item_bytes, multiprocessors, chunks = self.item_bytes, self.device.multiprocessors, of_shape.chunks
        items, left = self.sources * box.halo_items, box.share
        steps, multiplies = of_shape.steps * left, of_shape.multiplies * left
        halo_bytes, stored = items * of_shape.copied, box.positions * of_shape.stores
        storing = max(box.torn * stored * self.of_stored, stored * self.of_stores)
        issued, shared = of_shape.issued * left + self.copied * halo_bytes, of_shape.shared * left + halo_bytes
        read = items * box.inside * self.work.side.reduced * item_bytes * box.waste * of_shape.waste
        exposed = chunks * self._exposed(box, shape) if self.exposes else 0.0
        grid = box.tiles * self.kinds * of_shape.slices
        # As many blocks share a multiprocessor as registers and shared memory allow.
        taken = of_shape.ring_bytes + box.slots * of_shape.slot_bytes + model.BLOCK_OVERHEAD
        most = min(shape.blocks, (self.device.shared_bytes + model.BLOCK_OVERHEAD) // taken)
        idle = self._waiting(chunks * steps, multiplies) + exposed + storing
        even = max(1.0, grid / multiprocessors)
        weight_bytes = 0.0 if rough and of_shape.stay else of_shape.weight_bytes * left
        parts = of_shape.multiply * left**model.TOGETHER, shared, issued, read
        whole, working = _block(*parts, weight_bytes, storing)
        alone_on_most = max(1.0, grid / (most * multiprocessors))
        if rough:
            least = _hiding((whole + idle) * alone_on_most, working * even)
        else:
            least = inf
            for blocks in range(1, most + 1):
                waves = grid / (blocks * multiprocessors)
                last = model.LAST_ROUND * (-(-grid // (blocks * multiprocessors)) - waves)
                sharing = min(blocks, -(-grid // multiprocessors))
                cycles = _hiding(whole + idle, sharing * working) * (waves + last if waves > 1 else 1.0)
                least = min(least, cycles)
            if of_shape.stay:
                alone, busy = _block(*parts, 0.0, storing)
                least = min(least, model.RESIDENT * _hiding((alone + idle) * alone_on_most, busy * even))
        if self.may_split and most * multiprocessors >= 2 * grid:
            storing = stored * 4 / model.MEMORY_BYTES_PER_CYCLE
            for blocks in (most,) if rough else range(1, most + 1):
                if (room := blocks * multiprocessors // grid) > 1:  # at most so many blocks share a tile's channels
                    own = -(-chunks // room)
                    splits, part = 2 if rough else -(-chunks // own), own / chunks
                    idle = self._waiting(own * steps, multiplies * part) + exposed * part + storing
                    busy = whole * max(part, grid / multiprocessors * (1.0 if rough else part * splits))
                    divided = model.SPLIT * _hiding(whole * part + idle, busy)
                    least = min(least, divided + self._adding(splits))
        return ROUNDING * least + self.writing

    def _adding(self, splits: int) -> float:
        if splits not in self._adding_of:
            self._adding_of[splits] = model.adding(self.work.side, splits, self.device)
        return self._adding_of[splits]

    def _waiting(self, steps: float, multiplies: float) -> float:
        """Returns the cycles of barriers and of copies that arrive late, with the most stages."""
        products = model.MULTIPLY_CYCLES * multiplies / max(steps, 1.0)
        late = max(0.0, model.LATENCY_CYCLES - (max(model.STAGES) - 1) * products)
        return model.BLOCK_CYCLES + model.STEP_CYCLES * steps + late * max(0.0, steps - 1.0)

    def _exposed(self, box: _BoxWork, shape: Shape) -> float:
        """Returns the cycles of a chunk that are spent on copies through registers and on single rows of taps."""
        warps, exposed = shape.warps_m * shape.warps_n, 0.0
        if self.copy >= model.HALVES:
            most = (2 if self.copy >= model.PAIRS else 1) * model.JOB_BYTES[self.copy] * 32 * warps
            jobs = -(-box.halo_items * self.work.step_bytes * shape.steps // most)
            exposed += model.JOB_CYCLES * max(0.0, jobs * self.sources - self.rows)
        return exposed + model.ROW_CYCLES * box.share * self.rows / (warps / 4)
