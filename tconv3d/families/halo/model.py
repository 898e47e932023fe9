"""Predicts how long a build of the halo kernel takes for a volume, by a model that is fitted to measured builds.

The headers of halo.cuh (march, run, slab, stage, spread), halo_layout.cuh (field, panel, source, chunk, variant) and
halo_images.cuh (image) explain the terms. A round is what all consumers of a block multiply at a time, a share the
planes or chunks that a block takes of the tiles that blocks divide (halo_tile.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

from ...planning.geometry import Axis
from ...planning.scalars import ceil_div
from . import loading
from .build import SLAB, STEP_BYTES, Build, Division, Holding, Input, Output
from .job import Job
from .measured import COSTS, HALVES, Costs
from .registers import batches_per_chunk, line_turns
from .storing import lane_channels, moment_band, vector
from .tiling import Tiling

SHARED_BYTES = 128  # bytes per cycle of shared memory
COPY_BYTES = 512  # bytes of an asynchronous copy by a warp
# Cycles of a loader warp per batch of pieces of lines (halo_turns.cuh), and how often they pass shared memory: they
# arrive, are loaded twice as wide as they are, and stored. The constants are derived, not measured: two batches are
# on their way, so that a batch takes half of the time of `Costs.batch`, and more for its 200 instructions.
TURNED_BATCH, TURNED_PASSES = 650.0, 4.0
NARROW = 64  # most columns of a matrix instruction that is bound by the bandwidth of shared memory


def _load_cycles(build: Build, tiling: Tiling, job: Job, costs: Costs) -> float:
    """Returns the loaders' cycles for one tile, or one plane of a march.

    They are bound by the latency of each warp's loads or by the load throughput of the multiprocessor.
    """
    warps = build.loaders
    groups = ceil_div(loading.loaded_rows(build, job, tiling), 32)
    pieces = build.tile.row_bytes // 16
    reads = build.program.used_parts * len(build.program.sources)
    if build.input is Input.LINES:
        return _line_bytes(build, tiling) / costs.line + build.stages_filled * costs.line_stage
    if build.input.copied:
        batches = ceil_div(groups, warps)
        loads = groups * build.channel_slots * reads * build.item_bytes / 16
        rounding = 1.0 if job.rows or build.item_bytes == 2 or build.input is Input.IN_REGISTERS else 2.0
        filling = costs.copied + batches * pieces * rounding * costs.copy + (rounding - 1.0) * costs.arrival
        return max(build.stages_filled * filling, loads * rounding * COPY_BYTES / 64)
    if job.read_last:  # contiguous along channels: loads of 16 bytes
        batches = ceil_div(groups * pieces, 4 * warps)
        loads = groups * build.channel_slots * reads * build.item_bytes / 16
        sectors = loads * 16
    elif vectors := loading.all_vectors(build, tiling, loading.vectors(build, job, tiling)):
        batches = loading.vector_batches(build, vectors)
        if build.input is Input.TURNED:
            return build.stages_filled * (batches * TURNED_BATCH + costs.stage)
        loads = ceil_div(vectors * build.channel_slots, 32) * len(build.program.sources)
        sectors = loads * 16.0
    elif build.input is Input.TURNED:
        return inf  # lines are too short for vectors
    else:
        batches = ceil_div(groups * batches_per_chunk(build), warps)
        loads = groups * build.channel_slots * reads
        near = 1 << tiling.near_bits
        lines = near * (32 / near / tiling.halo[2] + 1)
        sectors = loads * (build.item_bytes + 0.9 * lines)
    each = costs.batch * (costs.few_loaders if build.block.producers == 1 else 1.0)
    imaged = build.output is Output.IMAGES and build.march
    if imaged and build.block.producers == 1 and build.item_bytes == 2:
        each /= 2  # beside stores through images, four loader warps load as much as eight
    waiting = build.stages_filled * (batches * each + costs.stage)
    return max(waiting, loads * costs.load + sectors * costs.sector)


def _line_bytes(build: Build, tiling: Tiling) -> float:
    """Returns the bytes that one step of a march loads of lines as they lie in memory."""
    return tiling.rows * build.channel_slots * build.line_planes * build.item_bytes


def _finding_cycles(build: Build, tiling: Tiling, job: Job, costs: Costs) -> float:
    """Returns the loaders' cycles to look up where the rows of a tile lie in every source but the first.

    The number of channels does not matter. For 16-bit types the cycles are not counted, because with them the model
    preferred slower builds for two of three measured input gradients.
    """
    turns = ceil_div(ceil_div(loading.loaded_rows(build, job, tiling), 32) * batches_per_chunk(build), build.loaders)
    if build.input is Input.LINES or build.item_bytes == 2:
        return 0.0
    return costs.find * turns * (len(build.program.sources) - 1)


def _store_cycles(build: Build, tiling: Tiling, job: Job, rounds: int, planes: float, costs: Costs) -> float:
    """Returns the cycles of the consumers' stores for one tile, or for `planes` planes of a march."""
    outputs = rounds * build.round_slabs * SLAB * build.columns * planes
    if build.march:
        outputs = outputs * build.march_step / build.window
    if job.holding is Holding.REDUCED:
        return outputs / build.tile.outputs / 32 * costs.store
    if build.output is Output.LONG_RUNS:
        return outputs / 32 * costs.long_runs
    if build.input is Input.LINES:
        return outputs / 32 * costs.quads * (2 if build.gather else 1)
    if build.output is Output.IMAGES:
        return outputs / 32 * costs.imaged * build.item_bytes / 4
    at_once = lane_channels(build, job) if job.written_last else vector(build, job, tiling)
    if at_once == 2 and not job.written_last:
        at_once = 1  # a pair along w counts like a single output
    cost = costs.store * (costs.crooked if tiling.length else 1.0)
    if not job.written_last:
        cost *= costs.scattered * min(tiling.near, 8) if tiling.near > 1 else 1.0
    if build.torn:
        cost *= costs.little_hides if build.block.producers == 1 and not job.written_last else costs.apart
    return outputs / 32 / at_once**0.5 * cost


def _moment_cycles(build: Build, job: Job, rounds: int, planes: float, costs: Costs) -> float:
    """Returns the consumers' cycles for the moments of one tile, or of `planes` planes of a march."""
    if job.norm is None:
        return 0.0
    outputs = rounds * build.round_slabs * SLAB * build.columns * planes
    if build.march:
        outputs = outputs * build.march_step / build.window
    narrow = build.tile.outputs // 4 * build.tile.groups if moment_band(build, job) == 1 else 0
    return outputs / 32 * costs.moment + rounds * planes * narrow * costs.narrow_band


def _memory_cycles(build: Build, tiling: Tiling, job: Job, costs: Costs) -> float:
    """Returns the device memory cycles for all inputs and outputs of the halo kernel."""
    g, item = build.geometry, build.item_bytes
    last = job.written_last
    width = job.written_size[2]
    inputs = job.batch * g.in_channels * prod(job.read_size) * item
    lines = job.batch * job.stored_channels * job.written_size[0] * job.written_size[1]
    outputs = lines * width * item
    if last:  # a run of outputs is the channels of one position
        shared = 0.0 if build.tile.outputs * item % 32 == 0 else lines * width / build.tile.outputs
        return (outputs + inputs) / costs.memory_bytes + shared * costs.run
    stride_h, stride_w = (1, 1) if build.gather else g.stride[1:]
    tile = tiling.tile[2] * stride_w
    aligned = width * item % 32 == 0 and (tile >= width or tile * item % 32 == 0)
    if tile < width:
        runs = float(lines * ceil_div(width, tile))
    else:
        runs = lines / (1 if build.split[1] else tiling.tile[1] * stride_h)
    traffic = outputs * (costs.torn if build.torn else 1.0) + inputs
    of_a_run = costs.long_run if build.output is Output.LONG_RUNS else costs.run
    return traffic / costs.memory_bytes + (0.0 if aligned else runs * of_a_run)


@dataclass(frozen=True)
class March:
    """The sizes by which a march goes through depth (`Work` in halo_tile.cuh)."""

    depth: int  # planes of positions in a tile
    inputs: int  # steps that have input
    outputs: int  # planes of outputs
    step: int  # planes of outputs that a step completes
    padding: int  # step i of the march feeds the planes of outputs from i * step - padding on
    window: int  # planes of outputs that a step feeds

    @classmethod
    def of(cls, build: Build, depth: int, job: Job) -> March:
        inputs = ceil_div(job.read_size[0], build.program.read_step[0])
        step, padding = build.march_step, build.march_padding
        return cls(depth, inputs, job.written_size[0], step, padding, build.window)

    def fed(self, first: int, last: int) -> int:
        """Returns the number of steps with input that feed the outputs of planes `first` to before `last` of a tile.

        The first of these steps may feed planes before `first` as well, so that neighbouring shares both count them.
        """
        begin = max(0, ceil_div(first * self.step + self.padding - (self.window - 1), self.step))
        end = (min(last * self.step, self.outputs) - 1 + self.padding) // self.step + 1
        return max(0, min(end, self.inputs) - begin)

    def of_share(self, first: int, last: int) -> int:
        """Returns the number of steps with input for planes `first` to before `last` of all tiles in sequence."""
        found = 0
        while first < last:
            tile = first // self.depth * self.depth
            end = min(last, tile + self.depth)
            found += self.fed(first - tile, end - tile)
            first = end
        return found


@lru_cache(maxsize=4096)
def _most_planes(march: March, planes: int, share: int) -> int:
    """Returns the most steps with input that any share has."""
    return max(march.of_share(first, min(first + share, planes)) for first in range(0, planes, share))


def planes_fed(build: Build, tiling: Tiling, job: Job, multiprocessors: int, costs: Costs) -> float:
    """Returns the most planes of input that a block of a march multiplies; planes of shares count `shared` times."""
    shares, march = tiling.shares(build, multiprocessors), March.of(build, tiling.tile[0], job)
    whole = shares.even // march.depth // shares.count * march.fed(0, march.depth)
    left = _most_planes(march, shares.planes - shares.even, shares.share) if shares.share else 0
    return whole + left * costs.shared


def remaining(build: Build, job: Job, costs: Costs) -> float:
    """Returns the fraction of the time of products that remains when products outside the input are skipped."""
    inside = _inside(build.geometry.axes[0], build.gather, job.positions[0], job.read_size[0])
    return float(inside**costs.skipped)


@lru_cache(maxsize=1024)
def _inside(axis: Axis, gather: bool, positions: int, size: int) -> float:
    """Returns the fraction of the products along an axis whose input lies inside the tensor."""
    read = [
        (q + axis.shift(tap)) * axis.stride + axis.phase(tap) if gather else q - axis.shift(tap)
        for q in range(positions)
        for tap in range(axis.kernel)
    ]
    return sum(0 <= i < size for i in read) / len(read)


def _work_cycles(build: Build, tiling: Tiling, job: Job, planes: float, loading: float, costs: Costs) -> list[float]:
    """Returns the cycles of one tile, or of `planes` planes of a march, for every kind of variant.

    `loading` is the loaders' cycles per tile, or per plane.
    """
    rounds = ceil_div(tiling.slabs, build.round_slabs)
    # If the consumers divide K, one of them stores for all.
    store = _store_cycles(build, tiling, job, rounds, planes, costs) * build.turns
    store += _moment_cycles(build, job, rounds, planes, costs)
    reads = build.program.used_parts * len(build.program.sources)
    loaded = tiling.rows * build.channel_slots * reads * planes * build.item_bytes
    if build.input is Input.LINES:
        loaded = _line_bytes(build, tiling) * planes
    rounded_in_place = build.input is Input.COPIED and build.item_bytes == 4 and not job.rows
    portion = tiling.portion(build)
    load = planes * loading * portion + _finding_cycles(build, tiling, job, costs)
    loaded *= portion
    p, norm, found = costs.overlap, costs.supply, []
    resident = build.weights.resident
    divided = build.division is Division.CONSUMERS
    smooth = build.input.copied or divided
    multiplied = rounds * build.round_slabs * planes * portion * costs.product
    if build.skips and tiling.flat and build.division is not Division.LAST_TILES:
        multiplied *= remaining(build, job, costs)
    for kind in build.kinds:
        panels = kind.panels * rounds * planes * portion
        streamed = 0 if resident else kind.panel_bytes * rounds * planes * portion
        multiply = multiplied * kind.cycles_per_slab
        if build.input.copied or build.input is Input.TURNED:  # data that arrive in shared memory delay operands
            operands, passes = multiplied * kind.shared_cycles, 1.0 if build.input.copied else TURNED_PASSES
            multiply = max(multiply, operands + costs.filled * (passes * loaded + streamed) / SHARED_BYTES)
        supply = 0.0 if resident else panels * costs.slot / (build.block.slots - 1)
        multiply = (multiply**norm + supply**norm) ** (1 / norm) if smooth else max(multiply, supply)
        multiply = waiting_less(multiply, build, costs)
        if build.input is Input.LINES:
            turns = line_turns(build) * build.stages_filled * planes * rounds
            multiply += turns * costs.turn * build.tile.slabs**costs.turn_slabs
        else:
            short = build.item_bytes == 2 or divided
            of_a_panel = costs.panel if resident else costs.supplied if short else costs.streamed
            multiply += panels / build.turns * of_a_panel
        if build.strict:
            sums = build.tile.slabs * build.columns / 2
            multiply += panels * build.additions_per_panel * (costs.strict_panel + costs.strict_sum * sums)
        if rounded_in_place and build.program.unit * build.tile.outputs <= NARROW and not build.march:
            multiply += 2 * loaded / SHARED_BYTES
        cache = (loaded + streamed) / costs.cache_bytes
        even = 1 / build.chunks
        cost = sum(
            count * ((load * even) ** p + (multiply * part + store * even) ** p + (cache * part) ** p) ** (1 / p)
            for count, part in _chunk_parts(build)
        )
        if build.march and not resident and not build.input.copied:
            cost = max(cost, (loaded + streamed) / costs.crowded)
        found.append(cost)
    return found


def waiting_less(multiply: float, build: Build, costs: Costs) -> float:
    """Returns the cycles of products with the build's number of stages, from the cycles fitted to two stages.

    More stages of copied rows shorten the waits for rows, which matter for chunks with few shifts.
    """
    if not build.staged:
        return multiply
    rows, norm = build.stages_filled * costs.arriving, costs.supply
    two, more = (multiply**norm + (rows / (stages - 1)) ** norm for stages in (2, build.block.stages))
    return multiply * (more / two) ** (1 / norm)


def _chunk_parts(build: Build) -> list[tuple[int, float]]:
    """Returns pairs of a number of chunks and the fraction of a tile's products that each of them has.

    The last chunk may have fewer products than the others.
    """
    steps = ceil_div(build.channel_slots, build.step_items)
    each = build.part_bytes // STEP_BYTES
    last = steps - (build.chunks - 1) * each
    even = build.input is Input.LINES or build.division is Division.BLOCKS or last == each
    if even:
        return [(build.chunks, 1 / build.chunks)]
    return [(build.chunks - 1, each / steps), (1, last / steps)]


def cycles(build: Build, tiling: Tiling, job: Job, multiprocessors: int, costs: Costs | None = None) -> float:
    """Returns the predicted cycles of a build and a tiling, with all launches.

    The work of the busiest multiprocessor and the device memory's traffic overlap in part (`Costs.overlap`).
    """
    costs = costs or (COSTS if build.item_bytes == 4 else HALVES)
    blocks = tiling.blocks(build, multiprocessors)
    loading = _load_cycles(build, tiling, job, costs)
    if build.march:
        planes = planes_fed(build, tiling, job, multiprocessors, costs)
        shares = tiling.shares(build, multiprocessors)
        tiles = shares.even / shares.count + shares.share + (tiling.tile[0] if shares.share else 0)
        (work,) = _work_cycles(build, tiling, job, planes, loading, costs)
        work += costs.tile * tiles / tiling.tile[0] + costs.plane * planes
    elif build.division is Division.LAST_TILES:
        (work,) = _work_cycles(build, tiling, job, 1.0, loading, costs)  # a tile that skips no products
        tiles = tiling.busiest(build, job, multiprocessors) / build.chunks
        work = (work * tiles + costs.tile * (tiles + 1)) * costs.busy
    elif build.own_shifts:  # blocks take tiles in turn, the longest first
        each = [work + costs.tile for work in _work_cycles(build, tiling, job, 1.0, loading, costs)]
        mean = sum(kind.count * work for kind, work in zip(build.kinds, each, strict=True)) / len(build.programs)
        work = max(mean * tiling.work(build) / blocks + costs.uneven * each[-1], each[0])
    else:
        (work,) = _work_cycles(build, tiling, job, 1.0, loading, costs)
        work = (work + costs.tile) * ceil_div(tiling.work(build), blocks)
    if build.weights.resident:
        work += build.tile_bytes / costs.cache_bytes
    work += costs.first * loading / build.stages_filled  # the first stage's loads
    memory, p = _memory_cycles(build, tiling, job, costs), costs.overlap
    memory *= costs.streaming if streams(build, job) else 1.0
    around = rows_cycles(build, job, costs)
    if build.division is Division.BLOCKS:
        around += adding_cycles(tiling.portions, job, costs)
    if build.division is Division.LAST_TILES:
        around += piecing_cycles(build, multiprocessors, costs)
    return (work**p + memory**p) ** (1 / p) + costs.start + around


def streams(build: Build, job: Job) -> bool:
    """Returns whether a build reaches the best device memory bandwidth (`Costs.streaming`).

    It loads lines as they lie in memory, or its lanes store 16 bytes of channels-last outputs at a time.
    """
    lanes = job.written_last and lane_channels(build, job) * build.written_bytes == 16
    return build.input is Input.LINES or lanes


def rows_cycles(build: Build, job: Job, costs: Costs) -> float:
    """Returns the cycles of the launch that writes the read tensor as rows of channels, or 0 if there is none."""
    if not job.rows:
        return 0.0
    if build.input is Input.REWRITTEN:
        return costs.rewritten + 2 * job.read_bytes / costs.rewritten_bytes
    return costs.rows + 2 * job.read_bytes / costs.rows_bytes


def adding_cycles(portions: int, job: Job, costs: Costs) -> float:
    """Returns the cycles of the launch that adds up the portions."""
    return costs.adding + 4 * (portions + 1) * job.written_count / costs.added_bytes


def piecing_cycles(build: Build, multiprocessors: int, costs: Costs) -> float:
    """Returns the cycles of the launch that adds up pieces of divided tiles: it reads two pieces and writes one."""
    piece = 4 * build.round_slabs * SLAB * build.columns
    return costs.adding + 3 * multiprocessors * piece / costs.pieced_bytes
