"""Plans for the direct family: forward, input gradient, weight gradient and bias gradient by multiply-adds.

Takes every problem. Chooses how many positions and channels a thread owns, and how the work is split.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import prod

from ...planning.geometry import Gather, Triple
from ...planning.launch import Constants, Launch
from ...planning.packing import dividers, int32s, int64s, padded, walk
from ...planning.problem import Device, Pass, Plan, Problem, Strides, last_offset

SCALARS = {
    "float16": "tconv3d::Half",
    "bfloat16": "tconv3d::BFloat16",
    "float32": "float",
    "float64": "double",
}
HAS_EPILOGUE = True
MAX_THREADS = 256
MAX_TAPS = 128  # that a thread may have all to itself, so that the loop over them is unrolled
MAX_REGISTERS = 96  # of a thread, for its sums and loads
STAGE_BYTES = 32 * 1024  # of weights that a block keeps in shared memory at a time
WARPS_PER_MULTIPROCESSOR = 32  # that split kernels aim for
LOAD_CYCLES = 400  # from a load of x to the next, in a multiprocessor with few warps
CHAINED = 1.35  # times what the model says, where sums of sums are kept: of two measured layers, 1.33 and 1.40
LONG_SUM = 32  # terms above which strict float32 takes care of a sum's error
SHORT_SUM = 64  # terms up to which it takes most care: PyTorch's error, which grows with them, is small there
KEEPING_REST = 4  # instructions of an addition to a total that keeps what it rounds off
INT32_MAX = 2**31 - 1


def power_of_two_up(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def accumulator(dtype: str) -> tuple[str, int]:
    """The type that sums are kept in, and its size."""
    return ("double", 8) if dtype == "float64" else ("float", 4)


def even_pairs(strides: Strides, size: Triple) -> bool:
    """Whether a new tensor's elements 2*i and 2*i + 1 along w are always both there, and aligned as a pair."""
    return strides[4] == 1 and not any(v % 2 for v in (*strides[:4], size[2]))


def why_not(problem: Problem, device: Device) -> str | None:
    """The direct family takes everything."""
    return None


def plan(problem: Problem, device: Device) -> Plan:
    if problem.which is Pass.WEIGHT_GRAD:
        return _plan_weight_grad(problem, device)
    if problem.which is Pass.BIAS_GRAD:
        return _plan_bias_grad(problem, device)
    side = Side.of(problem)
    return plan_gather(side, device, tiles(side)[0])


@dataclass(frozen=True)
class Side:
    """A forward pass or an input gradient, seen as the one thing the direct kernel does: gathering."""

    problem: Problem
    gathers: tuple[Gather, Gather, Gather]
    reduced: int  # channels per group that are summed over
    outs: int  # channels per group that are computed
    x: Strides
    x_size: Triple
    y: Strides
    y_size: Triple
    grid: Triple
    weight: Strides  # reduced channel, computed channel, taps

    @classmethod
    def of(cls, problem: Problem) -> Side:
        g, size, out_size = problem.geometry, problem.input_size, problem.output_size
        ci, co, *taps = problem.weight
        d, h, w = g.axes
        grid: Triple
        if problem.which is Pass.FORWARD:
            grid = (d.positions(out_size[0]), h.positions(out_size[1]), w.positions(out_size[2]))
            gathers = (d.scatter, h.scatter, w.scatter)
            reduced, outs, weight = g.in_per_group, g.out_per_group, (ci, co, *taps)
            x, x_size, y, y_size = problem.input, size, problem.output, out_size
        else:
            grid, gathers = size, (d.gather, h.gather, w.gather)
            reduced, outs, weight = g.out_per_group, g.in_per_group, (co, ci, *taps)
            x, x_size, y, y_size = problem.output, out_size, problem.input, size
        return cls(problem, gathers, reduced, outs, x, x_size, y, y_size, grid, weight)

    @property
    def wide(self) -> bool:
        """Whether an offset, or an intermediate value of one, may leave 32 bits."""
        reach = [
            (q - 1) * gather.input_step
            + max(abs(o) for o in gather.first_offset)
            + max(gather.count) * abs(gather.offset_step)
            for gather, q in zip(self.gathers, self.grid, strict=True)
        ]
        p, g = self.problem, self.problem.geometry
        x = last_offset((p.batch, self.reduced * g.groups, *(r + 1 for r in reach)), self.x)
        y = last_offset(
            (p.batch, self.outs * g.groups, *self.grid),
            tuple(s * k for s, k in zip(self.y, (1, 1, *self.output_steps), strict=True)),
        )
        return max(x, y + max(self.y), self.positions + 2**20) > INT32_MAX

    @property
    def terms(self) -> int:
        """Products that an output is the sum of; of the phase that has most."""
        return self.reduced * prod(max(gather.count) for gather in self.gathers)

    @property
    def mean_terms(self) -> float:
        """The same on the average; a phase counts as much as it has terms, as it does in an error's norm."""
        return self.reduced * prod(sum(n * n for n in gather.count) / sum(gather.count) for gather in self.gathers)

    @property
    def chained(self) -> bool:
        """Whether the sum is so long that sums of sums are worth their registers."""
        p = self.problem
        return p.dtype == "float32" and not p.tf32 and self.terms > LONG_SUM

    @property
    def keeps_rest(self) -> bool:
        """Whether additions to totals keep what they round off."""
        return self.chained and self.terms <= SHORT_SUM

    @property
    def output_steps(self) -> Triple:
        d, h, w = self.gathers
        return d.output_step, h.output_step, w.output_step

    @property
    def positions(self) -> int:
        return self.problem.batch * self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True)
class GatherTile:
    """How the direct kernel divides its work."""

    unrolled: int  # innermost dimensions (of w, h, d) whose phases and taps are all a thread's own
    channels: int  # output channels per thread
    positions: int  # positions per thread
    tiles: int  # channel tiles per block, on neighbouring threads
    vector: int  # reduced channels per load

    def __str__(self) -> str:
        owned = ("one phase", "all phases along w", "all phases along h, w", "all phases")[self.unrolled]
        return f"each thread {self.positions} positions x {self.channels} channels x {owned}"


@dataclass(frozen=True)
class Unrolled:
    """The phases, taps and distinct loads of the innermost dimensions that a thread owns."""

    phases: tuple[Triple, ...]
    taps: tuple[tuple[int, int, Triple], ...]  # phase index, load index, tap
    loads: tuple[Triple, ...]  # offsets

    @classmethod
    def of(cls, gathers: tuple[Gather, Gather, Gather], unrolled: int) -> Unrolled:
        one = Gather(1, 1, 0, 0, (0,), (0,), (1,))  # stands for a dimension that is not unrolled
        used = [one] * (3 - unrolled) + list(gathers[3 - unrolled :])
        phases = tuple(product(*(range(gather.phases) for gather in used)))
        found = [
            (f, tuple(g.tap(i, j) for g, i, j in zip(used, phase, js, strict=True)),
             tuple(g.offset(i, j) for g, i, j in zip(used, phase, js, strict=True)))
            for f, phase in enumerate(phases)
            for js in product(*(range(g.count[i]) for g, i in zip(used, phase, strict=True)))
        ]  # fmt: skip
        loads = tuple(sorted({offset for _, _, offset in found}))
        index = {offset: i for i, offset in enumerate(loads)}
        return cls(phases, tuple((f, index[offset], tap) for f, tap, offset in found), loads)

    @property
    def most_taps(self) -> int:
        """Of a phase."""
        return max(Counter(phase for phase, _, _ in self.taps).values(), default=1)

    def tables(self) -> Constants:
        def columns(name: str, triples: tuple[Triple, ...]) -> Constants:
            return tuple((f"k{name}{axis}", tuple(t[i] for t in triples)) for i, axis in enumerate("DHW"))

        return (
            ("kPhases", len(self.phases)),
            ("kTaps", len(self.taps)),
            ("kLoads", len(self.loads)),
            ("kTapPhase", tuple(f for f, _, _ in self.taps)),
            ("kTapLoad", tuple(load for _, load, _ in self.taps)),
            *columns("Tap", tuple(tap for _, _, tap in self.taps)),
            *columns("Load", self.loads),
            *columns("Phase", self.phases),
        )


def chain(side: Side, tile: GatherTile) -> int:
    """After how many channels sums are added to totals; 0: never.

    The error of a sum of n terms grows with the square root of n; of sums of sums, with its fourth root.
    """
    if not side.chained:
        return 0
    taps = Unrolled.of(side.gathers, tile.unrolled).most_taps
    vectors = side.terms**0.5 / (taps * tile.vector)
    parts = 1
    while side.keeps_rest and parts < tile.vector and parts * vectors <= 0.75:  # of a vector
        parts *= 2
    return tile.vector // parts if parts > 1 else tile.vector * max(1, round(vectors))


def tiles(side: Side) -> list[GatherTile]:
    """Every tile worth considering, the predicted fastest first."""
    acc_bytes = accumulator(side.problem.dtype)[1]
    found = []
    for unrolled in range(4):
        owned = side.gathers[3 - unrolled :]
        taps, phases = prod(sum(gather.count) for gather in owned), prod(gather.phases for gather in owned)
        if taps > MAX_TAPS or phases > MAX_REGISTERS:  # a phase takes a register at least
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
    """Predicted cycles of a multiprocessor per warp, for an output channel at a position.

    The weights were fitted to an H200 (benchmarks/candidates.py): what a multiply-add, a vector of weights, a load
    of x, a row of taps, a phase and a store take when everything else is busy too.
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
    """Predicted for a forward pass or an input gradient: to compare with other kernels."""
    side = Side.of(problem)
    tile = tiles(side)[0]
    warps = side.positions * side.outs * problem.geometry.groups / 32
    loads = prod(max(gather.count) for gather in side.gathers[: 3 - tile.unrolled]) * side.reduced / tile.vector
    each = _cycles(side, tile) * (CHAINED if side.chained else 1.0)
    return max(each * warps / device.multiprocessors, loads * LOAD_CYCLES)


def _load_vector(side: Side, budget: int) -> int:
    """How many neighbouring channels one load of x may bring."""
    n, c, *rest = side.x
    vector = min(4, 16 // side.problem.item_bytes) if c == 1 and side.problem.aligned else 1
    while vector > 1 and (vector > budget or any(v % vector for v in (side.reduced, n, *rest))):
        vector //= 2
    return vector


def _stage(side: Side, tile: GatherTile, taps: int) -> tuple[int, int]:
    """How many channels and how many rows of taps are staged at a time."""
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
        ("kThreads", MAX_THREADS),
        ("kMinBlocks", 512 // MAX_THREADS),  # at most 128 registers a thread
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

    threads = MAX_THREADS  # fewer for small volumes, so that all multiprocessors have work
    while threads > 64 and blocks(threads) < 2 * device.multiprocessors:
        threads //= 2
    launch = Launch(
        kernel="direct",
        constants=constants,
        grid=(blocks(threads), 1, 1),
        threads=threads,
        shared_bytes=stage_rows * stage_channels * len(inner.taps) * tile.tiles * tile.channels * acc_bytes,
        pointers=("x", "weight", "bias", "y") if p.which is Pass.FORWARD else ("dy", "weight", "null", "dx"),
        scalars=padded(
            int64s(*side.x, *side.y, *side.weight, g.in_per_group * p.weight[0], side.positions),
            int32s(*side.x_size, *side.y_size, *side.grid),
            dividers(side.grid),
        ),
    )
    return Plan("direct", "multiply-adds, any setting", (launch,), tile=str(tile))


def _lanes_are_positions(*tensors: Strides) -> bool:
    """Neighbouring lanes read neighbouring positions, unless channels are what is contiguous in memory."""
    return not all(strides[1] == 1 and strides[4] != 1 for strides in tensors)


def _splits(units: int, count: int, acc_bytes: int, positions: int, device: Device) -> int:
    """Into how many parts a sum over positions is split: enough to fill the GPU, as few as that takes."""
    wanted = -(-device.multiprocessors * WARPS_PER_MULTIPROCESSOR // units)
    return max(1, min(wanted, positions // 256, device.workspace_bytes // (count * acc_bytes)))


def _reduce(
    dtype: str,
    count: int,
    splits: int,
    result: str,
    sizes: Triple,
    strides: tuple[int, int, int],
    parts: str = "workspace",
    overlaps: bool = False,
) -> Launch:
    """Adds `splits` parts of `count` elements into a tensor of three dimensions."""
    threads, acc_bytes = 256, accumulator(dtype)[1]
    lanes = 32 if count < 2**16 else 8 if count < 2**19 else 1
    outer, middle, inner = strides
    return Launch(
        kernel="reduce",
        constants=(
            ("kThreads", threads),
            ("kMinBlocks", 1),
            ("Scalar", SCALARS[dtype]),
            ("Acc", accumulator(dtype)[0]),
            ("kLanes", lanes),
            ("kOverlaps", overlaps),
        ),
        grid=(-(-count * lanes // threads), 1, 1),
        threads=threads,
        shared_bytes=threads * acc_bytes if lanes > 1 else 0,
        pointers=(parts, result),
        scalars=padded(int64s(outer, 0, middle, 0, inner, count), int32s(splits), walk((sizes[1], 1, sizes[2]), 1)),
        overlaps=overlaps,
    )


def _plan_weight_grad(p: Problem, device: Device) -> Plan:
    g = p.geometry
    acc, acc_bytes = accumulator(p.dtype)
    sums = 384 // acc_bytes
    pieces = -(-g.kernel[2] // 8)
    taps_w = -(-g.kernel[2] // pieces)
    tile_out = min(8, power_of_two_up(g.out_per_group), max(1, sums // (2 * taps_w)))
    tile_out = 1 << tile_out.bit_length() - 1
    tile_in = min(8, power_of_two_up(g.in_per_group), max(1, sums // (tile_out * taps_w)))
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
        ("kThreads", 128),
        ("kMinBlocks", 1),
        ("Scalar", SCALARS[p.dtype]),
        ("Acc", acc),
        ("kWide", wide),
        ("kUnitW", p.input[4] == 1 and p.output[4] == 1),
        ("kLanesArePositions", lanes_are_positions),
        ("kGroups", g.groups),
        ("kInPerGroup", g.in_per_group),
        ("kOutPerGroup", g.out_per_group),
        ("kTileIn", tile_in),
        ("kTileOut", tile_out),
        ("kTapsW", taps_w),
        *((f"kKernel{n}", axis.kernel) for n, axis in zip("DHW", g.axes, strict=True)),
        *((f"kStride{n}", axis.stride) for n, axis in zip("DHW", g.axes, strict=True)),
        *((f"kPadding{n}", axis.padding) for n, axis in zip("DHW", g.axes, strict=True)),
        *((f"kDilation{n}", axis.dilation) for n, axis in zip("DHW", g.axes, strict=True)),
    )
    warps = splits * units
    main = Launch(
        kernel="direct_weight_grad",
        constants=constants,
        grid=(-(-warps // 4), 1, 1),
        threads=128,
        shared_bytes=0,
        pointers=("x", "dy", "workspace"),
        scalars=padded(
            int64s(*p.input, *p.output, positions, warps),
            int32s(splits, *p.output_size),
            walk(p.input_size, 32 if lanes_are_positions else 1),
        ),
    )
    ci, co, _, _, tap = p.weight
    reduce = _reduce(p.dtype, count, splits, "dw", (g.in_channels, g.out_per_group, g.taps), (ci, co, tap))
    tile = f"each warp {tile_in} x {tile_out} channels x {taps_w} taps, {splits} parts"
    return Plan("direct_weight_grad", "multiply-adds, any setting", (main, reduce), splits * count * acc_bytes, tile)


def _plan_bias_grad(p: Problem, device: Device) -> Plan:
    channels = p.geometry.out_channels
    d, h, w = p.output_size
    positions = p.batch * d * h * w
    acc, acc_bytes = accumulator(p.dtype)
    lanes_are_positions = _lanes_are_positions(p.output) or channels < 16  # too few to share among lanes
    units = channels if lanes_are_positions else -(-channels // 32)
    splits = _splits(units, channels, acc_bytes, positions, device)
    wide = max(last_offset((p.batch + 1, channels, d + 1, h + 1, w + 1), p.output), positions + 2**16) > INT32_MAX
    main = Launch(
        kernel="channel_sum",
        constants=(
            ("kThreads", 128),
            ("kMinBlocks", 1),
            ("Scalar", SCALARS[p.dtype]),
            ("Acc", acc),
            ("kWide", wide),
            ("kUnitW", p.output[4] == 1),
            ("kLanesArePositions", lanes_are_positions),
            ("kDense", lanes_are_positions and p.output[2:] == (h * w, w, 1)),
        ),
        grid=(-(-splits * units // 4), 1, 1),
        threads=128,
        shared_bytes=0,
        pointers=("dy", "workspace"),
        scalars=padded(
            int64s(*p.output, positions, d * h * w),
            int32s(splits, channels),
            walk((d, h, w), 32 if lanes_are_positions else 1),
        ),
    )
    reduce = _reduce(p.dtype, channels, splits, "db", (1, 1, channels), (0, 0, 1))
    return Plan(
        "channel_sum",
        "one read of the gradient",
        (main, reduce),
        splits * channels * acc_bytes,
        f"{splits} parts",
    )
