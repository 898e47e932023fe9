"""Finds the predicted fastest build of the kernel on mma.sync without evaluating the model for most candidates.

A lower bound of the predicted cycles is computed for every shape of a build with every box. Candidates are evaluated
in the order of their bounds, until no bound is below the best prediction. The result is the first of the fastest
candidates of `model.candidates`, and a test compares both. This module knows nothing of launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf, prod
from typing import NamedTuple

from ...planning.problem import Device, Pass
from ...planning.side import Side
from . import model
from .box import Box, boxes
from .model import Candidate, Shape
from .work import Work

ROUNDING = 1.0 - 1e-9  # factor that keeps bounds below predictions in spite of rounding errors

Order = tuple[int, ...]  # place of a candidate among all, in the order of `model.candidates`


class _Group(NamedTuple):
    """All candidates with one shape and one box, and a lower bound of their predicted cycles."""

    least: float
    order: Order
    bound: _Bound
    shape: Shape
    box: Box


def fastest(sides: Iterable[tuple[Side, int, bool]], item_bytes: int, device: Device) -> Candidate | None:
    """Returns the predicted fastest candidate of some sides, each with its kind of copy and whether it has rows."""
    best: tuple[float, Candidate] | None = None
    for side, copy, rows in sides:
        most = best[0] if best else inf
        bounds = [_Bound(work, copy, item_bytes, device, rows) for work in model.works(side)]
        found, any_fits = _of_works(bounds, most)
        if not any_fits:
            found, _ = _of_works([_Bound(Work(side, 0, apart=True), copy, item_bytes, device, rows)], most)
        best = found or best
    return best[1] if best else None


def _of_works(bounds: list[_Bound], most: float) -> tuple[tuple[float, Candidate] | None, bool]:
    """Returns the fastest candidate after its cycles, if below `most`, and whether any candidate fits the device."""
    groups = sorted(group for number, bound in enumerate(bounds) for group in bound.groups(number))
    best: tuple[float, Order, Candidate] | None = None
    fits = False
    for group in groups:
        if group.least > most and fits:
            break
        for order, candidate in _candidates(group):
            fits, cycles = True, candidate.cycles(group.bound.device)
            if (cycles, order) < best[:2] if best else cycles < most:
                best, most = (cycles, order, candidate), cycles
    return (best[0], best[2]) if best else None, fits


def _candidates(group: _Group) -> Iterator[tuple[Order, Candidate]]:
    """Yields the candidates of a box that fit the device, each with its place among all."""
    bound, (work_number, shape_number, box_number) = group.bound, group.order
    for number, build in enumerate(model.builds(bound.work, group.shape)):
        made = Candidate(bound.work, build, group.box, bound.copy, bound.item_bytes, bound.with_rows)
        for last, candidate in enumerate(model.fitting(made, bound.device)):
            yield (work_number, shape_number, number, box_number, last), candidate


class _BoxWork(NamedTuple):
    """What the bound needs to know of a box."""

    box: Box
    slots: int
    halo_items: int
    tiles: int
    positions: int
    torn: float  # `Candidate.torn`
    waste: float  # `Candidate.sector_waste` where x is contiguous along w


class _Bound:
    """Bounds the predicted cycles of shapes from below.

    A shape's candidates differ in rows per step, stages, blocks per multiprocessor, whether weights stay in shared
    memory, and how many blocks share the channels of a tile. The bound takes the best of each for itself: the fewest
    steps, the most stages, all blocks that registers allow, and no copies of weights that may stay. With g blocks in
    all, n of them at a time on each of m multiprocessors, there are at least max(1, g / (n m)) waves, and waves times
    sharing are at least max(1, g / m).
    """

    def __init__(self, work: Work, copy: int, item_bytes: int, device: Device, rows: bool) -> None:
        self.work, self.copy, self.item_bytes, self.device = work, copy, item_bytes, device
        phases = len(work.phases)
        self.kinds = work.side.problem.geometry.groups * phases
        self.rows, self.sources = len(work.rows) / phases, len(work.sources) / phases
        self.windows, self.spans = len(work.windows), sum(window.span for window in work.windows)
        self.inner, self.inner_phases = len(work.inner.taps), len(work.inner.phases)
        self.halves = 2 if work.strict else 1
        self.rounds = item_bytes == 4 and not rows and not work.strict
        self.writing = model.writing_rows(work.side, rows, device)
        self.lines = work.side.x[4] == 1  # x is contiguous along w
        self.with_rows = rows
        self.adding = model.adding(work.side, 2, device)  # of the fewest parts
        self.may_split = work.side.problem.which is Pass.INPUT_GRAD and model.is_dense(work.side)
        self._steps: dict[int, float] = {}

    def groups(self, work_number: int) -> Iterator[_Group]:
        """Yields all shapes with all their boxes."""
        known: dict[tuple[int, int], list[_BoxWork]] = {}
        for number, shape in enumerate(model.shapes(self.work, self.copy, self.item_bytes)):
            key = shape.tiles_m, shape.warps_m
            if key not in known:
                known[key] = [self._of_box(box, shape) for box in boxes(self.work, *key)]
            for place, (box, least) in enumerate(self._cycles(shape, known[key])):
                yield _Group(least, (work_number, number, place), self, shape, box)

    def _of_box(self, box: Box, shape: Shape) -> _BoxWork:
        build = next(model.builds(self.work, shape))
        one = Candidate(self.work, build, box, self.copy, self.item_bytes, self.with_rows)
        waste = one.sector_waste if self.lines else 1.0
        return _BoxWork(box, box.slots, box.halo_items, prod(box.tiles), box.positions, one.torn, waste)

    def _steps_of(self, rows: int) -> float:
        """Returns the steps of a chunk of an average block, with so many rows of taps per step."""
        if rows not in self._steps:
            all_steps = sum(-(-len(source.rows) // rows) for source in self.work.sources)
            self._steps[rows] = all_steps / len(self.work.phases)
        return self._steps[rows]

    def _cycles(self, shape: Shape, boxes: Iterable[_BoxWork]) -> Iterator[tuple[Box, float]]:
        """Yields each box that may fit shared memory with the bound."""
        tiles_m, tiles_n, warps_m, warps_n, k_steps_of_chunk, blocks = shape
        work, item_bytes, side = self.work, self.item_bytes, self.work.side
        warps, columns = warps_m * warps_n, 8 * tiles_n * warps_n
        chunk = k_steps_of_chunk * work.step_bytes // item_bytes
        chunks = -(-side.reduced // chunk)
        tap_bytes = self.halves * k_steps_of_chunk * work.step_bytes * columns
        k_steps, taps = warps * chunks * k_steps_of_chunk, self.rows * self.inner
        tiles = k_steps * taps * tiles_m * tiles_n  # products of one tile of 16 x 8 sums
        multiplies = tiles * work.products
        a_loads = k_steps * self.rows * (tiles_m * self.windows + self.spans)
        b_bytes = k_steps * taps * tiles_n * 8 * work.step_bytes * self.halves
        stay = model.may_stay(work, chunks, tap_bytes, self.device)
        weight_bytes = 0.0 if stay else chunks * taps * tap_bytes
        shared = a_loads * 16 * work.step_bytes + b_bytes + weight_bytes
        rounding = 4 * model.ROUND_INSTRUCTIONS * a_loads if self.rounds else 0.0
        if work.strict:
            rounding = 4 * model.SPLIT_INSTRUCTIONS * a_loads + model.ADD_INSTRUCTIONS * tiles
        rows = model.rows_of_step(work, tiles_m * tiles_n * k_steps_of_chunk * work.products)
        steps = self._steps_of(rows[-1])
        # Shared memory has at least two halos, two stages of weights and, unless pairs are listed, 8 bytes per slot.
        slots = (self.device.shared_bytes - 2 * rows[0] * self.inner * tap_bytes) / (
            (8 if self.copy < model.PAIRS else 0) + 2 * k_steps_of_chunk * work.step_bytes
        )
        control = model.STEP_INSTRUCTIONS * steps + model.HALO_INSTRUCTIONS * self.sources
        control = warps * chunks * (control + model.ROW_INSTRUCTIONS * self.rows * self.windows)
        issued = multiplies + a_loads + b_bytes / 512 + rounding + control
        issued += model.WEIGHT_INSTRUCTIONS / 32 * weight_bytes / 16
        copied = (
            model.COPY_INSTRUCTIONS[self.copy] / 32 / model.COPY_BYTES[self.copy]
        )  # instructions per byte of the halo
        waiting = self._waiting(chunks * steps, multiplies)
        run = min(chunk, side.reduced) * item_bytes
        waste = 1.0 if self.lines else max(1.0, model.SECTOR / run)
        stores = self.inner_phases * min(columns, side.outs)
        slices, multiprocessors = -(-side.outs // columns), self.device.multiprocessors
        p = model.TOGETHER
        multiply = (model.MULTIPLY_CYCLES * multiplies * work.step_bytes / model.K_STEP) ** p
        for box in boxes:
            if box.slots > slots:
                continue
            halo_bytes = self.sources * box.halo_items * chunks * chunk * item_bytes
            read_bytes = self.sources * box.halo_items * side.reduced * item_bytes
            stored = box.positions * stores
            storing = max(
                box.torn * stored * item_bytes / model.MEMORY_BYTES_PER_CYCLE,
                model.STORE_INSTRUCTIONS * stored / 32 / (1 if item_bytes == 4 else 2) / model.ISSUE_PER_CYCLE,
            )
            loads = (weight_bytes + read_bytes * box.waste * waste) / model.L2_BYTES_PER_CYCLE
            inner = (
                multiply
                + ((shared + halo_bytes) / model.SHARED_BYTES_PER_CYCLE) ** p
                + ((issued + copied * halo_bytes) / model.ISSUE_PER_CYCLE) ** p
            )
            grid = box.tiles * self.kinds * slices
            exposed = chunks * self._exposed(box, k_steps_of_chunk, warps)
            alone = (inner + loads**p) ** (1 / p) + waiting + exposed + storing
            alone *= max(1.0, grid / (blocks * multiprocessors))
            busy = max(1.0, grid / multiprocessors) * (inner + (loads + storing) ** p) ** (1 / p)
            least = max(alone, busy) + model.OVERLAP * min(alone, busy)
            room = blocks * multiprocessors // grid
            if self.may_split and room > 1:  # at most `room` blocks share the channels of a tile
                own = -(-chunks // room)
                whole = (inner + loads**p) ** (1 / p)
                waiting_of_own = self._waiting(own * steps, multiplies * own / chunks)
                storing = stored * item_bytes / model.MEMORY_BYTES_PER_CYCLE
                alone = whole * own / chunks + waiting_of_own + exposed * own / chunks + storing
                busy = whole * max(own / chunks, grid / multiprocessors)
                divided = model.SPLIT * (max(alone, busy) + model.OVERLAP * min(alone, busy))
                least = min(least, divided + self.adding)
            yield box.box, ROUNDING * least + self.writing

    def _waiting(self, steps: float, multiplies: float) -> float:
        """Returns the cycles of barriers and of copies that arrive late, with the most stages."""
        products = model.MULTIPLY_CYCLES * multiplies / max(steps, 1.0)
        late = max(0.0, model.LATENCY_CYCLES - (max(model.STAGES) - 1) * products)
        return model.BLOCK_CYCLES + model.STEP_CYCLES * steps + late * max(0.0, steps - 1.0)

    def _exposed(self, box: _BoxWork, k_steps: int, warps: int) -> float:
        """Returns the cycles of a chunk that are spent on copies through registers and on single rows of taps."""
        exposed = 0.0
        if self.copy >= model.HALVES:
            most = (2 if self.copy >= model.PAIRS else 1) * model.JOB_BYTES[self.copy] * 32 * warps
            jobs = -(-box.halo_items * self.work.step_bytes * k_steps // most)
            exposed += model.JOB_CYCLES * max(0.0, jobs * self.sources - self.rows)
        if self.copy >= model.HALVES or self.work.strict:
            exposed += model.ROW_CYCLES * self.rows / (warps / 4)
        return exposed
