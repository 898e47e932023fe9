"""How long a build of the halo kernel takes for a volume: a model of its work, fitted to measured builds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, prod

from ...planning.geometry import Axis
from .build import CHUNK, SLAB, STEP_BYTES, Build, Tiling, VariantKind, ceil_div, tilings
from .job import Job


@dataclass(frozen=True)
class Costs:
    """The model's constants, in cycles of a multiprocessor unless said otherwise.

    Most are fitted by benchmarks/halo_fit.py to measured builds of reference layers on an H200 (TF32 and bfloat16);
    `tile`, `plane`, `batch`, `few_loaders`, `first`, `find`, `streamed`, `slot`, those of rows and of turns of lines,
    since, to 446 float32 builds of random and reference layers (docs/performance/planner.md). `shared`, `supplied`,
    `adding`, `pieced_bytes`, `busy`, `apart` and `little_hides` are set by hand, each by a few measured builds.
    """

    start: float = 14300.0  # of a launch
    tile: float = 3220.0  # of a tile: what nothing hides
    plane: float = 158.0  # of a plane of a march
    shared: float = 1.1  # planes of shares, times those of whole tiles: blocks side by side are at different depths
    crooked: float = 1.21  # stores of runs, times those of boxes
    batch: float = 1220.0  # of a loader warp, per batch of loads
    few_loaders: float = 1.13  # the same beside one producer warpgroup, times
    first: float = 0.565  # of the first stage's loads, what nothing is beside
    copied: float = 400.0  # of a stage that is copied past registers: from its release to its arrival
    arrival: float = 900.0  # of such a stage, until its copies have arrived, if they are to be rounded
    copy: float = 15.0  # of a loader warp, per copy
    arriving: float = 1800.0  # of such a stage, what products of few shifts wait for if there are two stages
    stage: float = 71.5  # of filling a stage: barriers
    find: float = 432.0  # of a loader warp, per batch of positions that it looks up, for every source of a tile
    load: float = 1.69  # of a load by a warp, whoever issues it
    sector: float = 1.79  # of a sector that it touches
    product: float = 0.862  # of a cycle that tensor cores should take
    panel: float = 67.4  # of a panel: barriers, and the drain of the tensor cores
    streamed: float = 100.0  # the same, of a panel out of the ring, in floats
    supplied: float = 82.6  # the same in 16 bits, and where the wait for panels is joined smoothly (`SUPPLY`)
    slot: float = 1130.0  # from a slot's release to its next panel's arrival
    rows: float = 3180.0  # of the launch that writes rows
    rows_bytes: float = 1410.0  # that it moves per cycle
    rewritten: float = 4000.0  # the same, if there are rows already
    rewritten_bytes: float = 2500.0  # that it moves per cycle
    adding: float = 7000.0  # of the launch that adds portions up
    added_bytes: float = 1650.0  # per cycle, that it moves
    pieced_bytes: float = 3000.0  # the same of pieces of tiles, most of which L2 has
    busy: float = 1.03  # of blocks that divide the last tiles: all work to the end, and share L2 and power
    store: float = 5.45  # of a store by a warp
    scattered: float = 1.1  # stores along w where rows are batch items, times others and their number (at most 8)
    apart: float = 2.2  # stores of one phase along w, times those of all
    little_hides: float = 3.5  # the same beside one producer warpgroup
    imaged: float = 3.5  # of as many outputs of 4 bytes through images
    joint: float = 1.2  # the same, written to images of long runs
    strict_panel: float = 180.0  # of strict float32, until a panel's products are there
    strict_sum: float = 10.0  # the same, of adding one of its sums to a total
    streaming: float = 0.68  # of the device memory, times other builds', where lines are taken as they are, and where
    # channels-last outputs are stored 16 bytes of a lane at a time
    line: float = 54.7  # bytes of lines as they are in memory that arrive in a cycle
    line_stage: float = 214.0  # of a stage of them
    turn: float = 108.0  # of a turn of their products: operands, which are loaded and rounded
    quads: float = 1.2  # of stores of 32 outputs out of the sums, four of a lane at a time; of two, twice as much
    cache_bytes: float = 134.0  # per cycle, from L2
    memory_bytes: float = 1650.0  # per cycle, of the whole device memory
    run: float = 0.105  # of the device memory, per run of outputs whose ends share sectors with other tiles
    joint_run: float = 0.6  # the same of those that are stored as long ones (this and `joint`: set by 15 measured)
    torn: float = 2.87  # bytes of traffic per byte of an output whose neighbours come from another column tile
    overlap: float = 2.6  # exponent of the norm that joins what overlaps: 1 is a sum, infinity the maximum


COSTS = Costs()
HALVES = replace(  # of 16-bit types: as they were fitted before, to reference layers
    COSTS,
    tile=1220.0,
    plane=153.0,
    batch=1110.0,
    few_loaders=1.0,
    first=0.0,
    slot=1010.0,
    rows=3000.0,
    rows_bytes=1650.0,
    busy=1.0,
)
CROWDED = {4: 31.0, 2: 27.0}  # bytes per cycle of input and streamed panels, by an item's, beside a march's products
UNEVEN = 0.5  # of the shortest tile: by how much blocks end at different times
MAX_ROWS_BYTES = 2**29  # that may be allocated to write what is read as rows
TURN_SLABS = 1 / 3  # exponent of the slabs of a turn: loads of several are on their way together
SUPPLY = 3.0  # exponent of the norm that joins products and the panels that they wait for
SKIPPED = 0.5  # of what is left out, what is gained: consumers wait for each other, and blocks for the last
FILLED = 0.5  # of the time that shared memory takes what arrives, what operands wait
SHARED_BYTES = 128  # per cycle, of shared memory
COPY_BYTES = 512  # of a copy by a warp
MAX_ROUNDS = 8  # of tiles, up to which blocks may divide the last ones
NARROW = 64  # columns of a matrix instruction up to which shared memory binds it, and what else passes through that


def _load_cycles(build: Build, tiling: Tiling, job: Job, costs: Costs) -> float:
    """Of the loaders, for one tile or plane: their warps wait for loads, or the multiprocessor does."""
    warps = build.loaders
    groups = ceil_div(build.loaded_rows(job, tiling), 32)
    pieces = build.row_bytes // 16
    reads = build.program.used_parts * len(build.program.sources)
    if build.lines:
        return _line_bytes(build, tiling) / costs.line + build.stages_filled * costs.line_stage
    if build.copied:
        batches = ceil_div(groups, warps)
        loads = groups * build.channel_slots * reads * build.item_bytes / 16
        rounding = 1.0 if job.rows or build.item_bytes == 2 or build.in_registers else 2.0
        filling = costs.copied + batches * pieces * rounding * costs.copy + (rounding - 1.0) * costs.arrival
        return max(build.stages_filled * filling, loads * rounding * COPY_BYTES / 64)
    if job.read_last:  # contiguous along channels: loads of 16 bytes
        batches = ceil_div(groups * pieces, 4 * warps)
        loads = groups * build.channel_slots * reads * build.item_bytes / 16
        sectors = loads * 16
    elif vectors := build.all_vectors(tiling, build.vectors(job, tiling)):
        batches = build.vector_batches(vectors)
        loads = ceil_div(vectors * build.channel_slots, 32) * len(build.program.sources)
        sectors = loads * 16.0
    else:
        batches = ceil_div(groups * build.shares, warps)
        loads = groups * build.channel_slots * reads
        near = 1 << tiling.near_bits
        lines = near * (32 / near / tiling.halo[2] + 1)
        sectors = loads * (build.item_bytes + 0.9 * lines)
    each = costs.batch * (costs.few_loaders if build.producers == 1 else 1.0)
    if build.buffers and build.march and build.producers == 1 and build.item_bytes == 2:
        each /= 2  # four warps load as much as eight do beside these stores (measured)
    waiting = build.stages_filled * (batches * each + costs.stage)
    return max(waiting, loads * costs.load + sectors * costs.sector)


def _line_bytes(build: Build, tiling: Tiling) -> float:
    """Of one step of a march through lines as they are in memory."""
    return tiling.rows * build.channel_slots * build.line_planes * build.item_bytes


def _finding_cycles(build: Build, tiling: Tiling, job: Job, costs: Costs) -> float:
    """Of the loaders: where the rows of a tile lie in every source but the first, whatever the channels are. Not in
    16 bits: that gave two of three measured input gradients to slower builds (docs/performance/planner.md)."""
    turns = ceil_div(ceil_div(build.loaded_rows(job, tiling), 32) * build.shares, build.loaders)
    return 0.0 if build.lines or build.item_bytes == 2 else costs.find * turns * (len(build.program.sources) - 1)


def _store_cycles(build: Build, tiling: Tiling, job: Job, rounds: int, planes: float, costs: Costs) -> float:
    """Of the consumers' stores, for one tile (or so many planes)."""
    outputs = rounds * build.round_slabs * SLAB * build.columns * planes
    if build.march:
        outputs = outputs * build.march_step / build.window
    if build.joint:
        return outputs / 32 * costs.joint
    if build.lines:
        return outputs / 32 * costs.quads * (2 if build.gather else 1)
    if build.buffers:
        return outputs / 32 * costs.imaged * build.item_bytes / 4
    vector = build.lane_channels(job) if job.written_last else build.vector(job, tiling)
    at_once = 1 if vector == 2 and not job.written_last else vector  # pairs along w have not been measured
    cost = costs.store * (costs.crooked if tiling.length else 1.0)
    if not job.written_last:
        cost *= costs.scattered * min(tiling.near, 8) if tiling.near > 1 else 1.0
    if build.torn:
        cost *= costs.little_hides if build.producers == 1 and not job.written_last else costs.apart
    return outputs / 32 / at_once**0.5 * cost


def _memory_cycles(build: Build, tiling: Tiling, job: Job, costs: Costs) -> float:
    """Of the device memory, for everything."""
    g, item = build.geometry, build.item_bytes
    last = job.written_last
    width = job.written_size[2]
    inputs = job.batch * g.in_channels * prod(job.read_size) * item
    lines = job.batch * g.out_channels * job.written_size[0] * job.written_size[1]
    outputs = lines * width * item
    if last:  # runs of channels
        shared = 0.0 if build.out_tile * item % 32 == 0 else lines * width / build.out_tile
        return (outputs + inputs) / costs.memory_bytes + shared * costs.run
    stride_h, stride_w = (1, 1) if build.gather else g.stride[1:]
    tile = tiling.tile[2] * stride_w
    aligned = width * item % 32 == 0 and (tile >= width or tile * item % 32 == 0)
    if tile < width:
        runs = float(lines * ceil_div(width, tile))
    else:
        runs = lines / (1 if build.split[1] else tiling.tile[1] * stride_h)
    traffic = outputs * (costs.torn if build.torn else 1.0) + inputs
    return traffic / costs.memory_bytes + (0.0 if aligned else runs * (costs.joint_run if build.joint else costs.run))


@dataclass(frozen=True)
class _March:
    """How a march goes through depth (`Work` in halo_tile.cuh)."""

    depth: int  # planes of positions of a tile
    inputs: int  # steps that have input
    outputs: int  # planes
    step: int  # of these, that a step completes
    padding: int
    window: int

    @classmethod
    def of(cls, build: Build, tiling: Tiling, job: Job) -> _March:
        inputs = ceil_div(job.read_size[0], build.program.read_step[0])
        step, padding = build.march_step, build.march_padding
        return cls(tiling.tile[0], inputs, job.written_size[0], step, padding, build.window)

    def fed(self, first: int, last: int) -> int:
        """Steps with input, for the outputs of so many planes of positions. The window's first may be those of the
        share before, too."""
        begin = max(0, ceil_div(first * self.step + self.padding - (self.window - 1), self.step))
        end = (min(last * self.step, self.outputs) - 1 + self.padding) // self.step + 1
        return max(0, min(end, self.inputs) - begin)

    def of_share(self, first: int, last: int) -> int:
        """Such steps for the planes of all tiles in sequence from the first to the last."""
        found = 0
        while first < last:
            tile = first // self.depth * self.depth
            end = min(last, tile + self.depth)
            found += self.fed(first - tile, end - tile)
            first = end
        return found


@lru_cache(maxsize=4096)
def _most_planes(march: _March, planes: int, share: int) -> int:
    """Of all shares."""
    return max(march.of_share(first, min(first + share, planes)) for first in range(0, planes, share))


def _planes(build: Build, tiling: Tiling, job: Job, multiprocessors: int, costs: Costs) -> float:
    """Planes of input that a block of a march multiplies."""
    shares, march = tiling.shares(build, multiprocessors), _March.of(build, tiling, job)
    whole = shares.even // march.depth // shares.count * march.fed(0, march.depth)
    left = _most_planes(march, shares.planes - shares.even, shares.share) if shares.share else 0
    return whole + left * costs.shared


@lru_cache(maxsize=1024)
def _inside(axis: Axis, gather: bool, positions: int, size: int) -> float:
    """Of the products of an axis, those with what lies inside of the input."""
    read = [
        (q + axis.shift(tap)) * axis.stride + axis.phase(tap) if gather else q - axis.shift(tap)
        for q in range(positions)
        for tap in range(axis.kernel)
    ]
    return sum(0 <= i < size for i in read) / len(read)


def _work_cycles(build: Build, tiling: Tiling, job: Job, planes: float, loading: float, costs: Costs) -> list[float]:
    """Of one tile of every kind of variant, or of so many planes of a march. `loading`: of a tile, or of a plane."""
    rounds = ceil_div(tiling.slabs, build.round_slabs)
    store = _store_cycles(build, tiling, job, rounds, planes, costs) * build.turns  # one consumer does
    reads = build.program.used_parts * len(build.program.sources)
    loaded = tiling.rows * build.channel_slots * reads * planes * build.item_bytes
    if build.lines:
        loaded = _line_bytes(build, tiling) * planes
    rounded_in_place = build.copied and build.item_bytes == 4 and not (job.rows or build.in_registers)
    portion = tiling.portion(build)
    load = planes * loading * portion + _finding_cycles(build, tiling, job, costs)
    loaded *= portion
    p, found = costs.overlap, []
    smooth = build.copied or build.divided
    multiplied = rounds * build.round_slabs * planes * portion * costs.product
    if build.skips and tiling.flat and not build.spread:
        multiplied *= _inside(build.geometry.axes[0], build.gather, job.positions[0], job.read_size[0]) ** SKIPPED
    for kind in build.kinds:
        panels = kind.panels * rounds * planes * portion
        streamed = 0 if build.resident else kind.panel_bytes * rounds * planes * portion
        multiply = multiplied * kind.cycles_per_slab
        if build.copied:  # what arrives in shared memory is in the way of the operands
            operands = multiplied * kind.shared_cycles
            multiply = max(multiply, operands + FILLED * (loaded + streamed) / SHARED_BYTES)
        supply = 0.0 if build.resident else panels * costs.slot / (build.slots - 1)
        multiply = (multiply**SUPPLY + supply**SUPPLY) ** (1 / SUPPLY) if smooth else max(multiply, supply)
        multiply = _waiting_less(multiply, build, costs)
        if build.lines:
            turns = build.line_turns * build.stages_filled * planes * rounds
            multiply += turns * costs.turn * build.slabs**TURN_SLABS
        else:
            short = build.item_bytes == 2 or build.divided
            of_a_panel = costs.panel if build.resident else costs.supplied if short else costs.streamed
            multiply += panels / build.turns * of_a_panel
        if build.strict:
            sums = build.slabs * build.columns / 2
            multiply += panels / build.panels_at_once * (costs.strict_panel + costs.strict_sum * sums)
        if rounded_in_place and build.program.unit * build.out_tile <= NARROW and not build.march:
            multiply += 2 * loaded / SHARED_BYTES
        cache = (loaded + streamed) / costs.cache_bytes
        even = 1 / build.chunks
        cost = sum(
            count * ((load * even) ** p + (multiply * part + store * even) ** p + (cache * part) ** p) ** (1 / p)
            for count, part in _chunk_parts(build)
        )
        if build.march and not build.resident and not build.copied:
            cost = max(cost, (loaded + streamed) / CROWDED[build.item_bytes])
        found.append(cost)
    return found


def _waiting_less(multiply: float, build: Build, costs: Costs) -> float:
    """The time of products, which is fitted to two stages of copied rows, if there are more: chunks of few shifts
    wait less for their rows."""
    if not build.staged:
        return multiply
    rows = build.stages_filled * costs.arriving
    two, more = (multiply**SUPPLY + (rows / (stages - 1)) ** SUPPLY for stages in (2, build.stages))
    return multiply * (more / two) ** (1 / SUPPLY)


def _chunk_parts(build: Build) -> list[tuple[int, float]]:
    """How many chunks have such a part of a tile's products: the last one may have less than the others."""
    steps = ceil_div(build.channel_slots, build.step_items)
    each = build.part_bytes // STEP_BYTES
    last = steps - (build.chunks - 1) * each
    if build.lines or build.portioned or last == each:
        return [(build.chunks, 1 / build.chunks)]
    return [(build.chunks - 1, each / steps), (1, last / steps)]


def cycles(build: Build, tiling: Tiling, job: Job, multiprocessors: int, costs: Costs | None = None) -> float:
    """The model: how long the busiest multiprocessor takes, or the memory for all of them."""
    costs = costs or (COSTS if build.item_bytes == 4 else HALVES)
    blocks = tiling.blocks(build, multiprocessors)
    loading = _load_cycles(build, tiling, job, costs)
    if build.march:
        planes = _planes(build, tiling, job, multiprocessors, costs)
        shares = tiling.shares(build, multiprocessors)
        tiles = shares.even / shares.count + shares.share + (tiling.tile[0] if shares.share else 0)
        (work,) = _work_cycles(build, tiling, job, planes, loading, costs)
        work += costs.tile * tiles / tiling.tile[0] + costs.plane * planes
    elif build.spread:
        (work,) = _work_cycles(build, tiling, job, 1.0, loading, costs)  # of a tile with nothing to leave out
        tiles = tiling.spread(build, job, multiprocessors).busiest / build.chunks
        work = (work * tiles + costs.tile * (tiles + 1)) * costs.busy
    elif build.own_shifts:  # blocks take turns, the longest tiles first
        each = [work + costs.tile for work in _work_cycles(build, tiling, job, 1.0, loading, costs)]
        mean = sum(kind.count * work for kind, work in zip(build.kinds, each, strict=True)) / len(build.programs)
        work = max(mean * tiling.work(build) / blocks + UNEVEN * each[-1], each[0])
    else:
        (work,) = _work_cycles(build, tiling, job, 1.0, loading, costs)
        work = (work + costs.tile) * ceil_div(tiling.work(build), blocks)
    work += build.tile_bytes / costs.cache_bytes if build.resident else 0.0
    work += costs.first * loading / build.stages_filled  # of the first stage, which nothing is beside
    memory, p = _memory_cycles(build, tiling, job, costs), costs.overlap
    memory *= costs.streaming if _streams(build, job) else 1.0
    around = _rows_cycles(build, job, costs) + (_adding_cycles(tiling, job, costs) if build.portioned else 0.0)
    if build.spread:
        around += _piecing_cycles(build, multiprocessors, costs)
    return (work**p + memory**p) ** (1 / p) + costs.start + around


def _streams(build: Build, job: Job) -> bool:
    """Whether the device memory is used best: by lines as they are, or by stores of 16 bytes of a lane."""
    return build.lines or (job.written_last and build.lane_channels(job) * build.written_bytes == 16)


def _rows_cycles(build: Build, job: Job, costs: Costs) -> float:
    """Of writing what is read as rows, before anything else."""
    if not job.rows:
        return 0.0
    if build.rewritten:
        return costs.rewritten + 2 * job.read_bytes / costs.rewritten_bytes
    return costs.rows + 2 * job.read_bytes / costs.rows_bytes


def _adding_cycles(tiling: Tiling, job: Job, costs: Costs) -> float:
    """Of adding the portions up."""
    return costs.adding + 4 * (tiling.portions + 1) * job.written_count / costs.added_bytes


def _piecing_cycles(build: Build, multiprocessors: int, costs: Costs) -> float:
    """Of adding up the pieces of tiles that blocks have divided: two of each are read, and one is written."""
    piece = 4 * build.round_slabs * SLAB * build.columns
    return costs.adding + 3 * multiprocessors * piece / costs.pieced_bytes


@dataclass(frozen=True)
class Least:
    """What a build takes at least for a job: quickly said of a tiling, and less than `cycles`."""

    build: Build
    job: Job
    costs: Costs
    products: float  # of a round of slabs, of the tensor cores alone
    round: float  # the same with what they wait for
    memory: float  # of all tiles
    around: float

    @classmethod
    def of(cls, build: Build, job: Job) -> Least:
        costs = COSTS if build.item_bytes == 4 else HALVES
        kinds = build.kinds if build.own_shifts else build.kinds[:1]
        of_all = sum(kind.count for kind in kinds)
        read = job.batch * build.geometry.in_channels * prod(job.read_size)
        written = job.batch * build.geometry.out_channels * prod(job.written_size)
        moved = read + written * (costs.torn if build.torn and not job.written_last else 1.0)
        return cls(
            build,
            job,
            costs,
            sum(kind.count * cls._products(build, kind, costs) for kind in kinds) / of_all,
            sum(kind.count * cls._round(build, job, kind, costs) for kind in kinds) / of_all,
            moved * build.item_bytes / costs.memory_bytes * (costs.streaming if _streams(build, job) else 1.0),
            costs.start + _rows_cycles(build, job, costs),
        )

    @staticmethod
    def _products(build: Build, kind: VariantKind, costs: Costs) -> float:
        return _waiting_less(build.round_slabs * kind.cycles_per_slab * costs.product, build, costs)

    @staticmethod
    def _round(build: Build, job: Job, kind: VariantKind, costs: Costs) -> float:
        """Of a round of slabs of a kind of variant: products, and the panels or operands that they wait for."""
        multiply = build.round_slabs * kind.cycles_per_slab * costs.product
        if build.skips:
            multiply *= _inside(build.geometry.axes[0], build.gather, job.positions[0], job.read_size[0]) ** SKIPPED
        if not build.resident:
            multiply = max(multiply, kind.panels * costs.slot / (build.slots - 1))
        multiply = _waiting_less(multiply, build, costs)
        if build.lines:
            turns = build.line_turns * build.stages_filled
            return multiply + turns * costs.turn * build.slabs**TURN_SLABS
        if build.strict:
            sums = build.slabs * build.columns / 2
            multiply += kind.panels / build.panels_at_once * (costs.strict_panel + costs.strict_sum * sums)
        return multiply + kind.panels / build.turns * min(costs.panel, costs.supplied, costs.streamed)

    def _rounds(self, tiling: Tiling) -> float:
        return ceil_div(tiling.slabs, self.build.round_slabs) * tiling.portion(self.build)

    def exceeds(self, tiling: Tiling, multiprocessors: int, most: float) -> bool:
        """Whether the tiling takes longer than that."""
        build, costs, p = self.build, self.costs, self.costs.overlap
        of_a_tile = costs.plane if build.march else costs.tile
        times: float
        if build.march:
            times = _planes(build, tiling, self.job, multiprocessors, costs)
        elif build.spread:
            # No chunk costs less than the part of it that is never left out: most tilings end here.
            if CHUNK * tiling.work(build) / multiprocessors * self._rounds(tiling) * self.products > most:
                return True
            times = tiling.spread(build, self.job, multiprocessors).busiest / build.chunks
        elif build.own_shifts:
            times = tiling.work(build) / tiling.blocks(build, multiprocessors)
        else:
            times = ceil_div(tiling.work(build), tiling.blocks(build, multiprocessors))
        rounds = self._rounds(tiling)
        if times * rounds * self.products > most:  # even where some are left out
            return True
        work = times * (rounds * self.round + of_a_tile)
        around = self.around + (_adding_cycles(tiling, self.job, costs) if build.portioned else 0.0)
        return (work**p + self.memory**p) ** (1 / p) + around > most


def portioned(build: Build, tiling: Tiling, multiprocessors: int) -> list[Tiling]:
    """The tiling with as many portions as there are multiprocessors for, or fewer. With one, if that is none."""
    most = multiprocessors // tiling.work(build) if build.portioned else 1
    if most < 2:
        return [tiling]
    counts = {ceil_div(build.chunks, chunks) for chunks in range(1, build.chunks)}
    return [replace(tiling, portions=n) for n in counts if n <= most]


@lru_cache(maxsize=256)  # what was chosen is asked for again when it is planned
def best_tiling(build: Build, job: Job, multiprocessors: int, most: float = inf) -> tuple[float, Tiling] | None:
    """The tiling that takes least, if it takes at most so many cycles, and these."""
    best: tuple[float, Tiling] | None = None
    job = job.as_merged(build.merged)
    if build.rewritten and not job.has_rows:
        return None
    job = job.as_copied(build.rewritten) if build.copied else job
    if not build.stores(job) or (job.rows and job.read_bytes > MAX_ROWS_BYTES):
        return None
    if build.staged and not job.rows:
        return None  # who also rounds rows has not been measured beside three stages
    least = Least.of(build, job)
    for tiling in tilings(build, job.batch, job.positions, job.read_size):
        if build.portioned and most < inf and 2 * tiling.work(build) > multiprocessors:
            continue  # as good as without portions, at best
        if build.spread and most < inf and tiling.work(build) > MAX_ROUNDS * multiprocessors:
            continue  # the last round is a small part of all
        if build.spread and tiling.length and job.read_last and not build.copied:
            continue  # runs of channels-last rows through registers lost (measured)
        many = tiling.items > 1 or (tiling.sheets > 1 and tiling.halo[1] * tiling.halo[2] < tiling.length)
        if job.norm and build.march and many:
            continue  # a march adds up the moments of one batch item, or of two
        for made in portioned(build, tiling, multiprocessors) if build.portioned else (tiling,):
            if least.exceeds(made, multiprocessors, most):
                continue
            cost = cycles(build, made, job, multiprocessors)
            if cost <= most and (best is None or cost < best[0]):
                best, most = (cost, made), cost
    return best
