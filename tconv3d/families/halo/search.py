"""Finds the builds of the halo kernel, and their tilings, that the model predicts to be fastest.

The model (model.py) takes 20 microseconds for one tiling, and a layer has up to 600 builds with 1000 tilings each.
Lower bounds (`Least`) rule out most of them: builds are looked at in the order of a bound for all their tilings, and
the model is evaluated only for tilings whose own bound is below the best prediction. The headers of halo.cuh and
halo_layout.cuh explain the terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from math import inf, prod
from operator import itemgetter

from ...planning.effort import HALO_BUILD, HALO_BUILDS, HALO_TILING, Effort
from ...planning.plain_data import changed, once
from ...planning.scalars import ceil_div
from . import loading
from .boxes import DEPTHS, box_extents
from .build import SLAB, Build, Division, Input, Output, VariantKind
from .job import Job
from .measured import COSTS, HALVES
from .model import (
    COPY_BYTES,
    SHARED_BYTES,
    TURNED_BATCH,
    March,
    adding_cycles,
    cycles,
    piecing_cycles,
    planes_fed,
    remaining,
    rows_cycles,
    streams,
    waiting_less,
)
from .registers import batches_per_chunk, line_turns
from .spread import least_cost
from .storing import can_store, lane_channels, stored_vectors
from .tiling import Tiling, deep_runs, in_order

MAX_ROWS_BYTES = 2**29  # most bytes of the workspace for input that is rewritten as rows of channels
GLANCES = 3  # tilings of a build that are evaluated before those of other builds
PREDICTION = 8  # evaluations of the bounds of a tiling that take as long as one of the model
MAX_ROUNDS = 8  # most waves of tiles with which blocks may divide the last tiles
ROUNDING = 1.0 - 1e-9  # factor that keeps bounds below predictions in spite of rounding errors


class Least:
    """Lower bounds of the cycles that a build takes for a job: with any tiling, and with a given one.

    The model joins times that overlap by a p-norm, for every chunk of a tile. The norm of the sums over all chunks is
    not greater than the sum of the norms (Minkowski's inequality), so that the bound needs one norm.
    """

    def __init__(self, build: Build, job: Job, multiprocessors: int) -> None:
        self.build, self.job, self.multiprocessors = build, job, multiprocessors
        self.costs = costs = COSTS if build.item_bytes == 4 else HALVES
        kinds = build.kinds if build.own_shifts else build.kinds[:1]
        of_all = sum(kind.count for kind in kinds)
        # Cycles of the products of a round of slabs, with the waits for panels and operands: of the kind of variant
        # with the most taps, of the kind with the fewest, and on average.
        rounds = [self._round(kind) for kind in kinds]
        self.longest_round, self.shortest_round = rounds[0], rounds[-1]
        self.round = sum(kind.count * each for kind, each in zip(kinds, rounds, strict=True)) / of_all
        panel_bytes = sum(kind.count * kind.panel_bytes for kind in kinds) / of_all
        self.streamed = 0.0 if build.weights.resident else panel_bytes  # bytes of panels for a round of slabs
        self.store = self._store()
        self.each = costs.plane if build.march else costs.tile  # cycles per tile or plane that overlap with nothing
        self.reads = build.program.used_parts * len(build.program.sources)
        planes = build.line_planes if build.input is Input.LINES else self.reads
        self.row_bytes = build.channel_slots * planes * build.item_bytes  # bytes that are loaded of a row of a halo
        read = job.batch * build.geometry.in_channels * prod(job.read_size)
        written = job.batch * job.stored_channels * prod(job.written_size)
        moved = read + written * (costs.torn if build.torn and not job.written_last else 1.0)
        memory = moved * build.item_bytes / costs.memory_bytes
        self.memory = memory * (costs.streaming if streams(build, job) else 1.0)
        self.around = costs.start + rows_cycles(build, job, costs)
        self.last = 0.0  # cycles of work that no tile has
        if build.division is Division.LAST_TILES:
            self.around += piecing_cycles(build, multiprocessors, costs)
            self.last = costs.tile * costs.busy
        self._rooms_of: tuple[float, list[tuple[int, float]]] = (-1.0, [])  # the last result of `_rooms`
        self._prepare_loads()

    def _round(self, kind: VariantKind) -> float:
        """Returns the cycles for a round of slabs of a kind of variant, with the waits for panels and operands."""
        build, costs = self.build, self.costs
        multiplied, norm = build.round_slabs * costs.product, costs.supply
        if build.skips and build.division is not Division.LAST_TILES:
            multiplied *= remaining(build, self.job, costs)
        resident, divided = build.weights.resident, build.division is Division.CONSUMERS
        supply = 0.0 if resident else kind.panels * costs.slot / (build.block.slots - 1)
        multiply = multiplied * kind.cycles_per_slab
        if build.input.copied:
            streamed = 0 if resident else kind.panel_bytes
            multiply = max(multiply, multiplied * kind.shared_cycles + costs.filled * streamed / SHARED_BYTES)
        smooth = build.input.copied or divided
        multiply = (multiply**norm + supply**norm) ** (1 / norm) if smooth else max(multiply, supply)
        multiply = waiting_less(multiply, build, costs)
        if build.input is Input.LINES:
            turns = line_turns(build) * build.stages_filled
            return multiply + turns * costs.turn * build.tile.slabs**costs.turn_slabs
        if build.strict:
            sums = build.tile.slabs * build.columns / 2
            multiply += kind.panels * build.additions_per_panel * (costs.strict_panel + costs.strict_sum * sums)
        of_a_panel = costs.panel if resident else min(costs.supplied, costs.streamed)
        return multiply + kind.panels / build.turns * of_a_panel

    def _store(self) -> float:
        """Returns the fewest cycles of the stores for a round of slabs, in a march for one plane."""
        build, job, costs = self.build, self.job, self.costs
        outputs = build.round_slabs * SLAB * build.columns * build.turns / 32
        if build.march:
            outputs *= build.march_step / build.window
        if build.output is Output.LONG_RUNS:
            return outputs * costs.long_runs
        if build.input is Input.LINES:
            return outputs * costs.quads * (2 if build.gather else 1)
        if build.output is Output.IMAGES:
            return outputs * costs.imaged * build.item_bytes / 4
        cost = costs.store * min(1.0, costs.crooked) * min(1.0, 2 * costs.scattered)
        if build.torn:
            cost *= costs.little_hides if build.block.producers == 1 and not job.written_last else costs.apart
        at_once = lane_channels(build, job) if job.written_last else max(stored_vectors(build), default=1)
        return outputs / at_once**0.5 * cost

    # ---- loads

    def _prepare_loads(self) -> None:
        """Computes what the bound of the loaders' cycles needs of the build and the job."""
        build, job, costs = self.build, self.job, self.costs
        self.warps, self.stages_filled = build.loaders, build.stages_filled
        self.narrow = build.input is Input.LOADED and not build.gather and len(build.origins_w) == 1
        each = costs.batch * (costs.few_loaders if build.block.producers == 1 else 1.0)
        if build.output is Output.IMAGES and build.march and build.block.producers == 1 and build.item_bytes == 2:
            each /= 2
        self.batch = TURNED_BATCH if build.input is Input.TURNED else each
        items, (*outer, w) = 16 // build.item_bytes, job.read
        multiples = not any(v % items for v in (*outer, job.read_size[2]))
        whole = job.aligned and (multiples or build.input is Input.TURNED)
        step = build.program.read_step[2]
        self.vectors = build.item_bytes == 2 and w == 1 and step == build.program.parts and whole
        self.per_chunk = batches_per_chunk(build)

    def _loading(self, tiling: Tiling, rows: int) -> float:
        """Returns a lower bound of the loaders' cycles for one tile, or one plane of a march."""
        build, job, costs, warps = self.build, self.job, self.costs, self.warps
        if build.input is Input.LINES:
            return rows * self.row_bytes / costs.line + self.stages_filled * costs.line_stage
        narrow = self.narrow and tiling.items == 1 and not tiling.length and tiling.tiles[3] == 1
        groups = -(-(loading.loaded_rows(build, job, tiling) if narrow else rows) // 32)
        if build.input.copied:
            rounding = 1.0 if job.rows or build.item_bytes == 2 or build.input is Input.IN_REGISTERS else 2.0
            pieces = build.tile.row_bytes // 16
            filling = costs.copied + -(-groups // warps) * pieces * rounding * costs.copy
            filling += (rounding - 1.0) * costs.arrival
            return max(self.stages_filled * filling, groups * self.row_bytes / 16 * rounding * COPY_BYTES / 64)
        if job.read_last:
            batches = -(-groups * (build.tile.row_bytes // 16) // (4 * warps))
            busy = groups * self.row_bytes / 16 * (costs.load + 16 * costs.sector)
        elif self.vectors and tiling.items == 1 and (build.march or not tiling.length):
            batches, busy = 1, 0.0
        else:
            batches = -(-groups * self.per_chunk // warps)
            near = 1 << tiling.near_bits
            lines = near * (32 / near / tiling.halo[2] + 1)
            loads = groups * build.channel_slots * self.reads
            busy = loads * (costs.load + (build.item_bytes + 0.9 * lines) * costs.sector)
        return max(self.stages_filled * (batches * self.batch + costs.stage), busy)

    def _least_loading(self) -> float:
        """Returns a lower bound of the loaders' cycles for any tile, or one plane of a march."""
        build, costs = self.build, self.costs
        if build.input is Input.LINES:
            return self.stages_filled * costs.line_stage
        if build.input.copied:
            return self.stages_filled * costs.copied
        return self.stages_filled * (self.batch + costs.stage)

    # ---- bounds

    @once
    def _tiles_of_block(self) -> float:
        """The fewest tiles, or planes of a march, that the busiest block has for each tile of the volume."""
        build, job, costs = self.build, self.job, self.costs
        # With resident weights there is a block for every column tile, on however few multiprocessors.
        blocks = max(self.multiprocessors, build.column_tiles if build.weights.resident else 1)
        each = build.column_tiles / blocks
        if build.march:
            march = March.of(build, job.positions[0], job)
            return each * march.fed(0, march.depth) * min(1.0, costs.shared)
        return each * self._chunks_of_boxes * costs.busy if build.division is Division.LAST_TILES else each

    @once
    def _chunks_of_boxes(self) -> float:
        """The least cost of an average chunk of boxes, as a fraction of one that skips no products."""
        depths = tuple(box_extents(self.job.positions[0], DEPTHS))
        return least_cost(self.build.depth_shifts, self.job.read_size[0], depths)

    @property
    def _one_chunk(self) -> float:
        """The tiles that the busiest block has beyond its part of all, if blocks divide the last tiles: a chunk."""
        return self.costs.busy / self.build.chunks if self.build.division is Division.LAST_TILES else 0.0

    @once
    def any_tiling(self) -> float:
        """The bound for all tilings: every position is in a slab, and a block has at least one tile."""
        build, job, costs, p = self.build, self.job, self.costs, self.costs.overlap
        depth, height, width = job.positions
        slabs = job.batch * height * width * (1 if build.march else depth) / SLAB
        fewest = each = self._tiles_of_block
        if build.division is Division.LAST_TILES:
            for run in deep_runs(build, job.batch, job.positions, job.read_size):
                each *= min(1.0, run.mean_cost(build, job) / self._chunks_of_boxes)
            fewest = each + self._one_chunk
        elif fewest > 0.0:
            fewest = max(fewest, min(1.0, costs.shared))
        portion = 1 / build.chunks if build.division is Division.BLOCKS else 1.0
        rounds = slabs / build.round_slabs * each + self._one_chunk
        products = max(rounds, fewest * portion) * self.round + max(rounds, fewest) * self.store
        load = fewest * portion * self._least_loading()
        work = (load**p + products**p) ** (1 / p) + fewest * self.each + self.last
        if build.own_shifts:
            longest = portion * self.longest_round + self.store
            work = max(work, ((portion * self._least_loading()) ** p + longest**p) ** (1 / p) + self.each)
        around = self.around + (adding_cycles(1, job, costs) if build.division is Division.BLOCKS else 0.0)
        return ROUNDING * ((work**p + self.memory**p) ** (1 / p) + around)

    def room(self, most: float) -> float:
        """Returns the most cycles of work on the busiest multiprocessor for which a plan takes `most` cycles."""
        if most == inf:
            return inf
        p = self.costs.overlap
        return max(0.0, (most - self.around) ** p - self.memory**p) ** (1 / p) if most > self.around else 0.0

    @once
    def _of_a_round(self) -> float:
        """The fewest cycles of work on the busiest multiprocessor for every round of slabs of the volume's tiles."""
        return ROUNDING * self._tiles_of_block * (self.round + self.store)

    @property
    def _at_once(self) -> int:
        """The most tiles that all blocks compute at a time, outside of marches."""
        columns = self.build.column_tiles
        if not self.build.weights.resident:
            return self.multiprocessors
        return max(self.multiprocessors // columns, 1) * columns

    @once
    def _of_a_tile(self) -> float:
        """The fewest cycles for every tile of the volume, besides loads and products."""
        return ROUNDING * self._tiles_of_block * self.each

    def worth(self, room: float, limited: bool) -> Callable[[int, int], bool]:
        """Returns a function that tells whether boxes may take at most `room` cycles of work.

        Its arguments are their rounds of slabs, for the whole volume, and their number, or 0 for any number.
        """
        build, of_a_round = self.build, self.round + self.store
        if build.march or build.own_shifts or build.division is Division.BLOCKS:
            return lambda rounds, tiles: rounds * self._of_a_round + tiles * self._of_a_tile <= room
        if build.division is not Division.LAST_TILES:
            columns, at_once, most = build.column_tiles, self._at_once, room / ROUNDING

            def worth_waves(rounds: int, tiles: int) -> bool:
                if not tiles:
                    return rounds * self._of_a_round <= room
                return ceil_div(tiles * columns, at_once) * (rounds / tiles * of_a_round + self.each) <= most

            return worth_waves
        # With more tiles, the last wave is a small part of the time.
        most = MAX_ROUNDS * self.multiprocessors // build.column_tiles
        one, left = self._one_chunk * of_a_round, room - self._one_chunk * self.each - self.last

        def worth(rounds: int, tiles: int) -> bool:
            if limited and tiles > most:
                return False
            return rounds * (self._of_a_round + one / (tiles or rounds)) + tiles * self._of_a_tile <= left

        return worth

    def exceeds(self, tiling: Tiling, room: float, portions: int = 1) -> bool:
        """Returns whether the work with this tiling, divided into portions, takes more than `room` cycles."""
        build, costs, p = self.build, self.costs, self.costs.overlap
        rounds, portion = ceil_div(tiling.slabs, build.round_slabs), ceil_div(build.chunks, portions) / build.chunks
        products = rounds * (portion * self.round + self.store)
        room = room / ROUNDING - self.last
        # How blocks divide a march takes long to compute.
        times = self._tiles_of_block * tiling.count if build.march else self._times(tiling, portions)
        if times * (products + self.each) > room:
            return True
        rows = tiling.rows
        load = self._loading(tiling, rows)
        moved = rows * self.row_bytes + rounds * self.streamed
        beside = (portion * load) ** p + (portion * moved / costs.cache_bytes) ** p
        of_a_tile = (beside + products**p) ** (1 / p) + self.each
        once = costs.first * load / self.stages_filled
        if build.own_shifts:
            longest, shortest = (
                ((portion * load) ** p + (rounds * (portion * each + self.store)) ** p) ** (1 / p) + self.each
                for each in (self.longest_round, self.shortest_round)
            )
            return max(times * of_a_tile + costs.uneven * shortest, longest) + once > room
        if times * of_a_tile + once > room:
            return True
        return build.march and self._times(tiling, portions) * of_a_tile + once > room

    def _rooms(self, most: float) -> list[tuple[int, float]]:
        """Returns the numbers of portions to try, each with `room` beside the launch that adds the portions up."""
        if self._rooms_of[0] != most:
            chunks = self.build.chunks
            counts = {ceil_div(chunks, each) for each in range(1, chunks)}
            rooms = [(n, self.room(most - adding_cycles(n, self.job, self.costs))) for n in counts]
            self._rooms_of = most, rooms
        return self._rooms_of[1]

    def portions(self, tiling: Tiling, most: float) -> Iterator[int]:
        """Yields the numbers of portions, for which there are multiprocessors, that may take at most `most` cycles.

        If there are too few multiprocessors for two, the only number is 1.
        """
        at_once = self.multiprocessors // tiling.work(self.build)
        for n, room in self._rooms(most) if at_once > 1 else [(1, self.room(most))]:
            if n <= max(at_once, 1) and not self.exceeds(tiling, room, n):
                yield n

    def _times(self, tiling: Tiling, portions: int) -> float:
        """Returns how many tiles, or planes of a march, the busiest multiprocessor has."""
        build = self.build
        if build.march:
            return planes_fed(build, tiling, self.job, self.multiprocessors, self.costs)
        if build.division is Division.LAST_TILES:
            return tiling.busiest(build, self.job, self.multiprocessors) / build.chunks * self.costs.busy
        if portions > 1:
            return ceil_div(tiling.count * build.column_tiles * portions, self.multiprocessors)
        work, blocks = tiling.work(build), tiling.blocks(build, self.multiprocessors)
        return work / blocks if build.own_shifts else ceil_div(work, blocks)


def least(build: Build, job: Job, multiprocessors: int) -> Least | None:
    """Returns the bounds of a build, or None if the build cannot compute the job."""
    job = job.as_merged(build.tile.merged)
    if build.input is Input.REWRITTEN and not job.has_rows:
        return None
    if build.input is Input.TURNED and not (job.aligned and job.read[4] == 1):
        return None
    job = job.arriving(build.input)
    if not can_store(build, job) or (job.rows and job.read_bytes > MAX_ROWS_BYTES):
        return None
    if build.staged and not job.rows:
        return None  # three stages are for rows that loaders do not have to round
    return Least(build, job, multiprocessors)


@lru_cache(maxsize=256)  # a plan asks again for the tiling of the build that was chosen
def best_tiling(build: Build, job: Job, multiprocessors: int, most: float = inf) -> tuple[float, Tiling] | None:
    """Returns the fastest tiling after its predicted cycles, or None if no tiling takes at most `most` cycles."""
    bounds = least(build, job, multiprocessors)
    return None if bounds is None else _best_tiling(bounds, most, Effort(HALO_TILING))[0]


def _best_tiling(
    bounds: Least, most: float, effort: Effort, predictions: float = inf
) -> tuple[tuple[float, Tiling] | None, bool]:
    """Returns the tiling with the least predicted cycles, the first in the order of `tilings` among equals.

    The search ends after a number of predictions. The second result tells whether it has looked at all tilings.
    """
    best: tuple[float, int, Tiling] | None = None
    build, job = bounds.build, bounds.job
    room, limited = bounds.room(most), most < inf
    worth = bounds.worth(room, limited)

    def still_worth(rounds: int, tiles: int) -> bool:
        return worth(rounds, tiles)

    for place, tiling in in_order(build, job.batch, job.positions, job.read_size, still_worth):
        if predictions <= 0 or (effort.spent and (limited or best is not None)):
            return None if best is None else (best[0], best[2]), False
        effort.count()
        for made in _made(bounds, tiling, limited, most, room):
            effort.count(PREDICTION)
            predictions -= 1
            cost = cycles(build, made, job, bounds.multiprocessors)
            if cost <= most and cost < inf and (best is None or (cost, place) < best[:2]):
                best, most = (cost, place, made), cost
                room = bounds.room(most)
                worth = bounds.worth(room, limited)
    return None if best is None else (best[0], best[2]), True


def _made(bounds: Least, tiling: Tiling, limited: bool, most: float, room: float) -> Iterator[Tiling]:
    """Yields the ways to use a tiling that may take at most `most` cycles: shared or not, in several portions."""
    build, job, multiprocessors = bounds.build, bounds.job, bounds.multiprocessors
    if build.division is Division.BLOCKS:
        if limited and 2 * tiling.work(build) > multiprocessors:
            return  # there are too few multiprocessors for two portions of every tile
        for portions in bounds.portions(tiling, most):
            yield changed(tiling, {"portions": portions})
        return
    if build.division is Division.LAST_TILES:
        if limited and tiling.work(build) > MAX_ROUNDS * multiprocessors:
            return  # the last wave is a small part of the time
        if tiling.length and job.read_last and not build.input.copied:
            return  # boxes are faster for channels-last input that is loaded through registers
    many = tiling.items > 1 or (tiling.sheets > 1 and tiling.halo[1] * tiling.halo[2] < tiling.length)
    if job.norm and build.march and many:
        return  # a march can store the moments of at most two batch items per tile
    for made in (tiling, changed(tiling, {"shared": True})) if build.march else (tiling,):
        if not bounds.exceeds(made, room):
            yield made


def costs_of(
    found: Iterable[Build], job: Job, multiprocessors: int, as_good: float, most: float = inf
) -> dict[Build, float]:
    """Returns the predicted cycles of builds that take at most `most` cycles, in the order in which they are given.

    Builds that take more than `as_good` times as long as the best may be left out.
    """
    effort, best = Effort(HALO_BUILDS), inf
    bounded = [bounds for build in found if (bounds := least(build, job, multiprocessors)) is not None]
    costs: dict[Build, float] = {}

    def look(bounds: Least, limit: float, effort: Effort, predictions: float = inf) -> tuple[float, bool]:
        """Notes the cost of a build if it takes at most `limit` cycles; also tells whether all tilings were seen."""
        tiling, all_seen = _best_tiling(bounds, limit, effort, predictions)
        if tiling is not None:
            costs[bounds.build] = min(tiling[0], costs.get(bounds.build, inf))
        return costs.get(bounds.build, inf), all_seen

    # If there is no limit, the first build that has a tiling sets it: some tilings are only for want of any other.
    for bounds in bounded if most == inf else ():
        best, _ = look(bounds, inf, effort, GLANCES)
        if best < inf:
            break
    # Then a few tilings of every build tell which builds to search first.
    waiting: list[tuple[float, Least]] = []
    for bounds in sorted(bounded, key=lambda bounds: bounds.any_tiling):
        limit = min(most, as_good * best)
        if bounds.any_tiling > limit or (effort.spent and best < inf):
            break
        cost, all_seen = look(bounds, limit, effort, GLANCES)
        best = min(best, cost)
        if not all_seen:
            waiting.append((cost, bounds))
    for _, bounds in sorted(waiting, key=itemgetter(0)):
        limit = min(most, as_good * best)
        if effort.spent and best < inf:
            break
        if bounds.any_tiling <= limit:
            best = min(best, look(bounds, limit, effort.part(HALO_BUILD))[0])
    return {bounds.build: costs[bounds.build] for bounds in bounded if bounds.build in costs}
