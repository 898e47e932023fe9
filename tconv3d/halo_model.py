"""How long a build of the halo kernel takes for a volume: a model of its work, fitted to measured builds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from .halo_build import SLAB, Build, Tiling, ceil_div, tilings
from .halo_job import Job


@dataclass(frozen=True)
class Costs:
    """The model's constants, in cycles of a multiprocessor unless said otherwise.

    Fitted by benchmarks/halo_fit.py to measured builds of reference layers on an H200 (TF32 and bfloat16).
    """

    start: float = 14300.0  # of a launch
    tile: float = 1220.0  # of a tile: what nothing hides
    plane: float = 153.0  # of a plane of a march
    shared: float = 1.1  # planes of shares, times those of whole tiles: blocks side by side are at different depths
    crooked: float = 1.21  # stores of runs, times those of boxes
    batch: float = 1110.0  # of a loader warp, per batch of loads
    stage: float = 71.5  # of filling a stage: barriers
    load: float = 1.69  # of a load by a warp, whoever issues it
    sector: float = 1.79  # of a sector that it touches
    product: float = 0.862  # of a cycle that tensor cores should take
    panel: float = 67.4  # of a panel: barriers, and the drain of the tensor cores
    streamed: float = 82.6  # the same, of a panel out of the ring
    slot: float = 1010.0  # from a slot's release to its next panel's arrival
    store: float = 5.45  # of a store by a warp
    cache_bytes: float = 134.0  # per cycle, from L2
    memory_bytes: float = 1650.0  # per cycle, of the whole device memory
    run: float = 0.105  # of the device memory, per run of outputs whose ends share sectors with other tiles
    torn: float = 2.87  # bytes of traffic per byte of an output whose neighbours come from another column tile
    overlap: float = 2.6  # exponent of the norm that joins what overlaps: 1 is a sum, infinity the maximum


COSTS = Costs()


def _load_cycles(build: Build, tiling: Tiling, job: Job, planes: float, costs: Costs) -> float:
    """Of the loaders, for one tile or so many planes: their warps wait for loads, or the multiprocessor does."""
    warps = build.loaders
    groups = ceil_div(tiling.rows, 32)
    pieces = build.row_bytes // 16
    reads = build.program.used_parts * len(build.program.sources)
    if job.read_last:  # contiguous along channels: loads of 16 bytes
        batches = ceil_div(groups * pieces, 4 * warps)
        loads = groups * build.channel_slots * reads * build.item_bytes / 16
        sectors = loads * 16
    elif vectors := build.vectors(job, tiling) * tiling.lines:
        batches = build.vector_batches(vectors)
        loads = ceil_div(vectors * build.channel_slots, 32) * len(build.program.sources)
        sectors = loads * 16.0
    else:
        batches = ceil_div(groups * build.shares, warps)
        loads = groups * build.channel_slots * reads
        near = 1 << tiling.near_bits
        lines = near * (32 / near / tiling.halo[2] + 1)
        sectors = loads * (build.item_bytes + 0.9 * lines)
    waiting = build.stages_filled * (batches * costs.batch + costs.stage)
    return planes * max(waiting, loads * costs.load + sectors * costs.sector)


def _store_cycles(build: Build, tiling: Tiling, job: Job, rounds: int, planes: float, costs: Costs) -> float:
    """Of the consumers' stores, for one tile (or so many planes)."""
    outputs = rounds * build.round_slabs * SLAB * build.columns * planes
    if build.march:
        outputs = outputs * build.geometry.axes[0].stride / build.program.dimensions[0].fields
    vector = 2 if job.written_last else build.vector(job, tiling)
    at_once = 1 if vector == 2 and not job.written_last else vector  # pairs along w have not been measured
    return outputs / 32 / at_once**0.5 * costs.store * (costs.crooked if tiling.length else 1.0)


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
    torn = build.split[2] and g.axes[2].stride > 1
    stride_h, stride_w = (1, 1) if build.gather else g.stride[1:]
    tile = tiling.tile[2] * stride_w
    aligned = width * item % 32 == 0 and (tile >= width or tile * item % 32 == 0)
    if tile < width:
        runs = float(lines * ceil_div(width, tile))
    else:
        runs = lines / (1 if build.split[1] else tiling.tile[1] * stride_h)
    traffic = outputs * (costs.torn if torn else 1.0) + inputs
    return traffic / costs.memory_bytes + (0.0 if aligned else runs * costs.run)


def _planes(build: Build, tiling: Tiling, job: Job, multiprocessors: int, costs: Costs) -> float:
    """Planes of input that a block of a march multiplies. The window's first are those of the share before, too."""
    shares, depth = tiling.shares(build, multiprocessors), tiling.tile[0]
    fed = min(1.0, job.read_size[0] / depth)
    whole = shares.even // depth // shares.count * depth * fed
    twice = (
        ceil_div(build.program.dimensions[0].fields, build.geometry.axes[0].stride) - 1 if shares.share % depth else 0
    )
    return whole + (shares.share * fed + twice) * costs.shared


def cycles(build: Build, tiling: Tiling, job: Job, multiprocessors: int, costs: Costs = COSTS) -> float:
    """The model: how long the busiest multiprocessor takes, or the memory for all of them."""
    rounds = ceil_div(tiling.slabs, build.round_slabs)
    planes = _planes(build, tiling, job, multiprocessors, costs) if build.march else 1.0
    panels = len(build.program.taps) * build.chunks * rounds * planes
    multiply = rounds * build.round_slabs * build.cycles_per_slab * planes * costs.product
    if not build.resident:
        multiply = max(multiply, panels * costs.slot / (build.slots - 1))
    multiply += panels * (costs.panel if build.resident else costs.streamed)
    store = _store_cycles(build, tiling, job, rounds, planes, costs)
    load = _load_cycles(build, tiling, job, planes, costs)
    streamed = 0 if build.resident else build.tile_bytes * rounds * planes
    reads = build.program.used_parts * len(build.program.sources)
    elements = tiling.rows * build.channel_slots * reads * planes
    cache = (elements * build.item_bytes + streamed) / costs.cache_bytes
    p = costs.overlap
    work = (load**p + (multiply + store) ** p + cache**p) ** (1 / p)
    if build.march:
        shares = tiling.shares(build, multiprocessors)
        tiles = shares.even / shares.count + shares.share + (tiling.tile[0] if shares.share else 0)
        work += costs.tile * tiles / tiling.tile[0] + costs.plane * planes
    else:
        work = (work + costs.tile) * ceil_div(tiling.work(build), tiling.blocks(build, multiprocessors))
    work += build.tile_bytes / costs.cache_bytes if build.resident else 0.0
    memory = _memory_cycles(build, tiling, job, costs)
    return (work**p + memory**p) ** (1 / p) + costs.start


def _products(build: Build, tiling: Tiling, job: Job, multiprocessors: int) -> float:
    """Cycles of the tensor cores alone: quickly said, and less than `cycles`."""
    if build.march:
        times = _planes(build, tiling, job, multiprocessors, COSTS)
    else:
        times = ceil_div(tiling.work(build), tiling.blocks(build, multiprocessors))
    rounds = ceil_div(tiling.slabs, build.round_slabs)
    return times * rounds * build.round_slabs * build.cycles_per_slab * COSTS.product


@lru_cache(maxsize=256)  # what was chosen is asked for again when it is planned
def best_tiling(build: Build, job: Job, multiprocessors: int) -> tuple[float, Tiling] | None:
    best: tuple[float, Tiling] | None = None
    for tiling in tilings(build, job.batch, job.positions, job.read_size):
        many = tiling.items > 1 or (tiling.sheets > 1 and tiling.halo[1] * tiling.halo[2] < tiling.length)
        if job.norm and build.march and many:
            continue  # a march adds up the moments of one batch item, or of two
        if best is not None and _products(build, tiling, job, multiprocessors) > best[0]:
            continue
        cost = cycles(build, tiling, job, multiprocessors)
        if best is None or cost < best[0]:
            best = cost, tiling
    return best
