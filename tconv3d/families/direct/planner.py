"""Plans the direct family: forward pass and gradients of input, weight and bias by plain multiply-adds.

The family takes every problem. Its planner chooses how many positions and channels a thread owns, and how sums over
positions are split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, prod

from ...planning import offers
from ...planning.arguments import per_axis
from ...planning.calibration import Work
from ...planning.geometry import Gather
from ...planning.launch import Constants, axis_constants
from ...planning.offers import Answer, Offer, Wanted
from ...planning.problem import (
    Device,
    Pass,
    Plan,
    Problem,
    Strides,
    channels_last_strides,
    is_channels_last,
    last_offset,
)
from ...planning.scalars import INT32_MAX, SCALARS, accumulator, power_of_two_up
from ...planning.side import Side, Unrolled
from ...planning.sums import BIAS_PARTS, bias_sum, stored_type, unsplit, weight_sums
from .arguments import CHANNEL_SUM, DIRECT, DIRECT_WEIGHT_GRAD

HAS_EPILOGUE = True
TOGETHER = "direct_weight_bias"  # gradients of weight and bias of a small volume, by one launch
MAX_THREADS = 256  # per block
MAX_TAPS = 128  # taps that a thread may own, because the loop over its taps is unrolled
MAX_REGISTERS = 96  # registers per thread for accumulators and loaded values
STAGE_BYTES = 32 * 1024  # bytes of weights that a block stages in shared memory at a time
SUM_THREADS = 256  # per block of a bias gradient whose threads have vectors of channels
WARPS_PER_MULTIPROCESSOR = 32  # resident warps that split sums aim for
MOST_TOGETHER = 4096  # positions of dy, batch included, that one warp per channel sums beside a weight gradient
LOAD_CYCLES = 400  # cycles from one load of x to the next in a multiprocessor with few warps
CHAINED = 1.35  # measured over predicted time if sums are added to totals: 1.33 and 1.40 for two layers
KEEPING_REST = 4  # instructions of a compensated addition, which keeps its rounding error


def why_not(problem: Problem, device: Device) -> str | None:
    """Returns None, because the direct family takes every problem."""
    return None


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    kernels = {Pass.WEIGHT_GRAD: "direct_weight_grad", Pass.BIAS_GRAD: "channel_sum"}
    found = [
        _with_kind(offers.alone(kernels.get(problem.which, "direct"), problem, device, why_not, work, plan))
        for problem in wanted.values()
    ]
    return [*found, *offers.weight_with_bias(TOGETHER, wanted, device, _why_not_together, _work_together, plan)]


def _why_not_together(problem: Problem, device: Device) -> str | None:
    """Returns why no launch computes the gradients of weight and bias together."""
    if problem.batch * prod(problem.output_size) > MOST_TOGETHER:
        return f"a warp sums at most {MOST_TOGETHER} positions of a channel"
    if not _lanes_are_positions(problem.input, problem.output):
        return "lanes have channels in place of positions"
    if len(plan(replace(problem, bias=False), device).launches) > 1:
        return "the weight's gradient has several parts"
    return None


def _work_together(problem: Problem, device: Device) -> Work:
    return Work(1, products=problem.flops / 2)


def _with_kind(answer: Answer) -> Answer:
    """Gives the bias gradient of dense rows a kind of its own: the rates of other rows are far higher.

    The rates were measured for rows that are whole vectors. Loops over other rows have the same instructions.
    """
    if isinstance(answer, Offer) and answer.problem.which is Pass.BIAS_GRAD and _bundle(answer.problem)[0]:
        return replace(answer, kind="bias_grad, rows of vectors")
    return answer


def work(problem: Problem, device: Device) -> Work:
    """Returns the work of the launches.

    The work of forward pass and input gradient is cycles by the model, the work of the gradients of weight and bias
    is products.
    """
    if problem.which in (Pass.FORWARD, Pass.INPUT_GRAD):
        return Work(1, cycles(problem, device), tensor_cores=False)
    return Work(2, products=problem.flops / 2, spared=2 - len(plan(problem, device).launches))


def plan(problem: Problem, device: Device) -> Plan:
    if problem.which is Pass.WEIGHT_GRAD:
        return _plan_weight_grad(problem, device)
    if problem.which is Pass.BIAS_GRAD:
        return _plan_bias_grad(problem, device)
    side = Side.of(problem)
    return plan_gather(side, device, tiles(side)[0])


@dataclass(frozen=True)
class GatherTile:
    """Describes how the direct kernel divides its work among threads."""

    unrolled: int  # innermost dimensions (0 to 3 of w, h, d) along which a thread owns all phases and taps
    channels: int  # output channels per thread
    positions: int  # positions per thread
    tiles: int  # channel tiles per block, on neighbouring threads
    vector: int  # channels that one load of x reads

    def __str__(self) -> str:
        owned = ("one phase", "all phases along w", "all phases along h, w", "all phases")[self.unrolled]
        return f"each thread {self.positions} positions x {self.channels} channels x {owned}"


def chain(side: Side, tile: GatherTile) -> int:
    """Returns after how many channels sums are added to totals and restart; 0 for never.

    The rounding error of a sum of n terms grows with the square root of n. Sums of about sqrt(n) terms each, added to
    totals, have an error that grows with the fourth root of n.
    """
    if not side.chained:
        return 0
    taps = Unrolled.of(side.gathers, tile.unrolled).most_taps
    vectors = side.terms**0.5 / (taps * tile.vector)
    parts = 1
    # Compensated sums may be so short that they restart within a vector, after 1 / parts of its channels.
    while side.keeps_rest and parts < tile.vector and parts * vectors <= 0.75:
        parts *= 2
    return tile.vector // parts if parts > 1 else tile.vector * max(1, round(vectors))


def tiles(side: Side) -> list[GatherTile]:
    """Returns every tile worth considering, the predicted fastest first."""
    acc_bytes = accumulator(side.problem.dtype)[1]
    found = []
    for unrolled in range(4):
        owned = side.gathers[3 - unrolled :]
        taps, phases = prod(sum(gather.count) for gather in owned), prod(gather.phases for gather in owned)
        if taps > MAX_TAPS or phases > MAX_REGISTERS:  # every phase takes at least one register
            continue
        inner = Unrolled.of(side.gathers, unrolled)
        if unrolled and not 0 < len(inner.loads) <= 48:
            continue
        for channels, positions in product((1, 2, 4, 8), (1, 2, 4)):
            sums = len(inner.phases) * channels * positions * (2 if side.chained else 1)
            values = len(inner.loads) * positions
            registers = (sums + values) * acc_bytes // 4 + 8 * positions
            code = len(inner.taps) * channels * positions
            if channels >= 2 * side.outs or registers > MAX_REGISTERS or code > 1024:
                continue
            vector = _load_vector(side, 48 // (values * acc_bytes // 4))
            found.append(GatherTile(unrolled, channels, positions, _tiles_per_block(side, channels), vector))
    return sorted(found, key=lambda tile: _cycles(side, tile))


def _tiles_per_block(side: Side, channels: int) -> int:
    if side.y[1] != 1 or side.y[4] == 1:
        return 1
    total = -(-side.outs // channels) * side.problem.geometry.groups
    return min(power_of_two_up(total), 32 // channels)


def _cycles(side: Side, tile: GatherTile) -> float:
    """Returns the predicted cycles of a multiprocessor per warp, output channel and position.

    The coefficients were fitted to times on an H200 (benchmarks/candidates.py). They are the cycles of a
    multiply-add, a vector of weights, a load of x, a row of taps, a phase and a store while all other units are busy.
    """
    inner = Unrolled.of(side.gathers, tile.unrolled)
    outer = side.gathers[: 3 - tile.unrolled]
    phases = prod(gather.phases for gather in outer)
    rows = prod(sum(gather.count) for gather in outer)
    p, taps, loads = tile.positions, len(inner.taps), len(inner.loads)
    vectors = taps * -(-tile.channels * accumulator(side.problem.dtype)[1] // 16)
    per_channel = 0.38 * taps * tile.channels * p + 0.5 * vectors + 1.4 * loads * p + 0.3 * p
    if side.keeps_rest:
        per_channel += 0.38 * KEEPING_REST * len(inner.phases) * tile.channels * p / chain(side, tile)
    per_row = (12 + 0.5 * loads) * p
    per_phase = (20 + 11 * len(inner.phases) * tile.channels) * p
    idle = -(-side.outs // tile.channels) * tile.channels / side.outs
    return (rows * (side.reduced * per_channel + per_row) + phases * per_phase) * idle / (p * tile.channels)


def cycles(problem: Problem, device: Device) -> float:
    """Returns the predicted cycles of the busiest multiprocessor for a forward pass or an input gradient."""
    side = Side.of(problem)
    tile = tiles(side)[0]
    warps = side.positions * side.outs * problem.geometry.groups / 32
    loads = prod(max(gather.count) for gather in side.gathers[: 3 - tile.unrolled]) * side.reduced / tile.vector
    each = _cycles(side, tile) * (CHAINED if side.chained else 1.0)
    return max(each * warps / device.multiprocessors, loads * LOAD_CYCLES)


def _load_vector(side: Side, budget: int) -> int:
    """Returns how many neighbouring channels one load of x may read, at most `budget`."""
    n, c, *rest = side.x
    vector = min(4, 16 // side.problem.item_bytes) if c == 1 and side.problem.aligned else 1
    while vector > 1 and (vector > budget or any(v % vector for v in (side.reduced, n, *rest))):
        vector //= 2
    return vector


def _stage(side: Side, tile: GatherTile, taps: int) -> tuple[int, int]:
    """Returns how many channels and how many rows of taps are staged in shared memory at a time."""
    per_channel = taps * tile.tiles * tile.channels * accumulator(side.problem.dtype)[1]
    fit = max(1, STAGE_BYTES // per_channel)
    channels = max(tile.vector, min(side.reduced, fit) // tile.vector * tile.vector)
    rows = prod(max(gather.count) for gather in side.gathers[: 3 - tile.unrolled])
    return channels, max(1, min(rows, fit // channels))


def _axis_tables(name: str, gather: Gather) -> Constants:
    return (
        (f"kPhases{name}", gather.phases),
        (f"kInputStep{name}", gather.input_step),
        (f"kOutputStep{name}", gather.output_step),
        (f"kTapStep{name}", gather.tap_step),
        (f"kOffsetStep{name}", gather.offset_step),
        (f"kFirstTap{name}", gather.first_tap),
        (f"kFirstOffset{name}", gather.first_offset),
        (f"kCount{name}", gather.count),
    )


def plan_gather(side: Side, device: Device, tile: GatherTile) -> Plan:
    p, g = side.problem, side.problem.geometry
    inner = Unrolled.of(side.gathers, tile.unrolled)
    stage_channels, stage_rows = _stage(side, tile, len(inner.taps))
    acc, acc_bytes = accumulator(p.dtype)
    store = min(tile.channels, 16 // p.item_bytes)
    aligned = side.outs % store == 0 and all(s % store == 0 for s in (side.y[0], *side.y[2:]))
    d, h, w = side.gathers
    constants: Constants = (
        ("Scalar", SCALARS[p.dtype]),
        ("Acc", acc),
        ("Epilogue", p.activation),
        ("kWide", side.wide),
        ("kUnitW", side.x[4] == 1),
        ("kUnitC", side.x[1] == 1),
        ("kGroups", g.groups),
        ("kReducedPerGroup", side.reduced),
        ("kOutPerGroup", side.outs),
        ("kUnrolled", tile.unrolled),
        ("kTile", tile.channels),
        ("kPositions", tile.positions),
        ("kTilesPerBlock", tile.tiles),
        ("kVector", tile.vector),
        ("kChain", chain(side, tile)),
        ("kKeepsRest", side.keeps_rest),
        ("kStoreVector", store if side.y[1] == 1 and aligned else 1),
        ("kPairs", tile.unrolled > 0 and w.phases == 2 and side.y[4] == 1),
        ("kStageChannels", stage_channels),
        ("kStageRows", stage_rows),
        *inner.tables(),
        *_axis_tables("D", d),
        *_axis_tables("H", h),
        *_axis_tables("W", w),
    )
    channel_tiles = -(-side.outs // tile.channels) * g.groups
    channel_blocks = -(-channel_tiles // tile.tiles)
    phases = prod(gather.phases for gather in side.gathers[: 3 - tile.unrolled])

    def blocks(threads: int) -> int:
        return -(-side.positions * tile.tiles // (threads * tile.positions)) * channel_blocks * phases

    threads = MAX_THREADS  # small volumes get smaller blocks, so that all multiprocessors have work
    while threads > 64 and blocks(threads) < 2 * device.multiprocessors:
        threads //= 2
    launch = DIRECT.launch(
        blocks(threads),
        MAX_THREADS,
        constants,
        side.operands,
        min_blocks=512 // MAX_THREADS,  # at most 128 registers per thread
        shared_bytes=stage_rows * stage_channels * len(inner.taps) * tile.tiles * tile.channels * acc_bytes,
        **side.sizes,
        positions=side.positions,
        grid=side.grid,
        **per_axis("by", side.grid),
    )
    return Plan("direct", "multiply-adds, any setting", (replace(launch, threads=threads),), tile=str(tile))


def _lanes_are_positions(*tensors: Strides) -> bool:
    """Returns whether neighbouring lanes read neighbouring positions: true unless all tensors are channels-last."""
    return not all(map(is_channels_last, tensors))


def _splits(units: int, count: int, acc_bytes: int, positions: int, device: Device) -> int:
    """Returns the split-K factor of a sum over positions: the least that fills the GPU and fits the workspace."""
    wanted = -(-device.multiprocessors * WARPS_PER_MULTIPROCESSOR // units)
    return max(1, min(wanted, positions // 256, device.workspace_bytes // (count * acc_bytes)))


@lru_cache(maxsize=64)
def _plan_weight_grad(p: Problem, device: Device) -> Plan:
    g = p.geometry
    acc, acc_bytes = accumulator(p.dtype)
    most = 384 // acc_bytes  # sums of a thread
    pieces = -(-g.kernel[2] // 8)
    taps_w = -(-g.kernel[2] // pieces)
    tile_out = min(8, power_of_two_up(g.out_per_group), max(1, most // (2 * taps_w)))
    tile_out = 1 << tile_out.bit_length() - 1
    tile_in = min(8, power_of_two_up(g.in_per_group), max(1, most // (tile_out * taps_w)))
    tile_in = 1 << tile_in.bit_length() - 1
    lanes_are_positions = _lanes_are_positions(p.input, p.output)
    tiles = g.groups * -(-g.in_per_group // tile_in) * -(-g.out_per_group // tile_out)
    units = (tiles if lanes_are_positions else -(-tiles // 32)) * g.kernel[0] * g.kernel[1] * pieces
    positions = p.batch * p.input_size[0] * p.input_size[1] * p.input_size[2]
    count = g.in_channels * g.out_per_group * g.taps
    splits = _splits(units, count, acc_bytes, positions, device)
    reach = tuple(
        size + axis.kernel * axis.dilation + axis.padding for size, axis in zip(p.output_size, g.axes, strict=True)
    )
    wide = (
        max(
            last_offset((p.batch + 1, g.in_channels, *(size + 1 for size in p.input_size)), p.input),
            last_offset((p.batch + 1, g.out_channels, *reach), p.output),
            positions + 2**16,
        )
        > INT32_MAX
    )
    constants: Constants = (
        ("Scalar", SCALARS[p.dtype]),
        ("Acc", acc),
        ("Stored", stored_type(p, splits)),
        ("kWide", wide),
        ("kUnitW", p.input[4] == 1 and p.output[4] == 1),
        ("kLanesArePositions", lanes_are_positions),
        ("kGroups", g.groups),
        ("kInPerGroup", g.in_per_group),
        ("kOutPerGroup", g.out_per_group),
        ("kTileIn", tile_in),
        ("kTileOut", tile_out),
        ("kTapsW", taps_w),
        *axis_constants(g.axes, "kernel", "stride", "padding", "dilation"),
        ("kBias", p.bias),
    )
    warps = splits * units
    main = DIRECT_WEIGHT_GRAD.launch(
        -(-(warps + (g.out_channels if p.bias else 0)) // 4),
        128,
        constants,
        {"parts": "workspace", "bias": BIAS_PARTS if p.bias else "null"},
        x_strides=p.input,
        dy_strides=p.output,
        positions=positions,
        warps=warps,
        splits=splits,
        dy_size=p.output_size,
        walk=(p.input_size, 32 if lanes_are_positions else 1),
        dy_walk=(p.output_size, 32),
        dy_positions=p.batch * prod(p.output_size),
    )
    sums = weight_sums(p, [main], splits, narrows=True)
    tile = f"each warp {tile_in} x {tile_out} channels x {taps_w} taps, {splits} parts"
    return Plan(
        TOGETHER if p.bias else "direct_weight_grad", "multiply-adds, any setting", sums.launches, sums.bytes, tile
    )


def _bundle(p: Problem) -> tuple[int, int]:
    """Returns the vectors of 16 bytes and the rows of a bundle, the fewest rows of channels that are whole vectors.

    Both are 0 unless dy is a dense channels-last matrix whose bundles fit a block.
    """
    channels, items = p.geometry.out_channels, 16 // p.item_bytes
    dense = p.output == channels_last_strides((p.batch, channels, *p.output_size))
    vectors, rows = channels // gcd(channels, items), items // gcd(channels, items)
    return (vectors, rows) if dense and p.aligned and vectors <= SUM_THREADS else (0, 0)


@lru_cache(maxsize=64)
def _plan_bias_grad(p: Problem, device: Device) -> Plan:
    channels = p.geometry.out_channels
    d, h, w = p.output_size
    positions = p.batch * d * h * w
    acc, acc_bytes = accumulator(p.dtype)
    lanes_are_positions = _lanes_are_positions(p.output) or channels < 16  # fewer channels leave most lanes idle
    units = channels if lanes_are_positions else -(-channels // 32)
    splits = _splits(units, channels, acc_bytes, positions, device)
    vectors, rows = _bundle(p)
    if vectors:
        least = 8 * (SUM_THREADS // vectors)  # bundles of a part, so that every thread has 8
        most = device.workspace_bytes // (channels * acc_bytes)
        splits = max(1, min(4 * device.multiprocessors, positions // rows // least, most))
    threads = SUM_THREADS if vectors else 128
    wide = max(last_offset((p.batch + 1, channels, d + 1, h + 1, w + 1), p.output), positions + 2**16) > INT32_MAX
    main = CHANNEL_SUM.launch(
        splits if vectors else -(-splits * units // 4),
        threads,
        (
            ("Scalar", SCALARS[p.dtype]),
            ("Acc", acc),
            ("Stored", stored_type(p, splits)),
            ("kWide", wide),
            ("kRows", vectors > 0),
            ("kUnitW", p.output[4] == 1),
            ("kLanesArePositions", lanes_are_positions),
            ("kDense", lanes_are_positions and p.output[2:] == (h * w, w, 1)),
        ),
        {"parts": "db" if unsplit(p, splits) else "workspace"},
        dy_strides=p.output,
        positions=positions,
        volume=d * h * w,
        splits=splits,
        channels=channels,
        bundle_vectors=vectors,
        bundle_rows=rows,
        walk=((d, h, w), 32 if lanes_are_positions else 1),
    )
    why, tile = "one read of the gradient", f"{splits} parts"
    if unsplit(p, splits):
        return Plan("channel_sum", why, (main,), tile=tile)
    return Plan("channel_sum", why, (main, bias_sum(p, splits)), splits * channels * acc_bytes, tile)
