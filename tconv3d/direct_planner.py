"""Plans for the direct family: forward, input gradient, weight gradient and bias gradient by multiply-adds.

Takes every problem. Chooses how many positions and channels a thread owns, and how the work is split.
"""

from __future__ import annotations

from dataclasses import dataclass

from .geometry import Gather, Triple
from .launch import Constants, Launch
from .packing import dividers, int32s, int64s, padded, walk
from .problem import Device, Pass, Plan, Problem, Strides, last_offset

SCALARS = {
    "float16": "tconv3d::Half",
    "bfloat16": "tconv3d::BFloat16",
    "float32": "float",
    "float64": "double",
}
MAX_THREADS = 256
STAGE_BYTES = 32 * 1024  # of weights that a block keeps in shared memory at a time
WORKSPACE_BYTES = 64 * 1024 * 1024  # that partial sums may take
WARPS_PER_MULTIPROCESSOR = 32  # that split kernels aim for
INT32_MAX = 2**31 - 1


def power_of_two_up(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def accumulator(dtype: str) -> tuple[str, int]:
    """The type that sums are kept in, and its size."""
    return ("double", 8) if dtype == "float64" else ("float", 4)


def why_not(problem: Problem, device: Device) -> str | None:
    """The direct family takes everything."""
    return None


def plan(problem: Problem, device: Device) -> Plan:
    if problem.which is Pass.WEIGHT_GRAD:
        return _plan_weight_grad(problem, device)
    if problem.which is Pass.BIAS_GRAD:
        return _plan_bias_grad(problem, device)
    return _plan_gather(Side.of(problem), device)


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
    def output_steps(self) -> Triple:
        d, h, w = self.gathers
        return d.output_step, h.output_step, w.output_step

    @property
    def positions(self) -> int:
        return self.problem.batch * self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True)
class GatherTile:
    """How the direct kernel divides its work."""

    unroll_w: bool  # all phases and taps along w at compile time
    channels: int  # output channels per thread
    positions: int  # positions per thread
    tiles: int  # channel tiles per block, on neighbouring threads
    vector: int  # reduced channels per load
    threads: int  # per block: fewer for small volumes, so that all multiprocessors have work

    def __str__(self) -> str:
        return f"{self.threads} threads, each {self.positions} positions x {self.channels} channels"


def _best_tile_channels(outs: int, limit: int) -> int:
    """Few idle channels in the last tile, but many channels to share one load of x."""
    sizes = [size for size in (1, 2, 4, 8) if size <= limit]
    return min(sizes, key=lambda size: -(-outs // size) * (size + 1))


def _choose_gather_tile(side: Side, device: Device) -> GatherTile:
    p, w = side.problem, side.gathers[2]
    acc_bytes = accumulator(p.dtype)[1]
    sums = 256 // acc_bytes  # accumulators a thread keeps in registers
    loads = len({w.offset(f, j) for f in range(w.phases) for j in range(w.count[f])})
    unroll = w.phases <= 4 and sum(w.count) <= 12 and 0 < loads <= 12
    phases = w.phases if unroll else 1
    channels = _best_tile_channels(side.outs, max(1, sums // (4 * phases)))
    positions = max(1, min(4, sums // (phases * channels)))
    tiles_total = -(-side.outs // channels) * p.geometry.groups
    tiles = min(power_of_two_up(tiles_total), 32 // channels) if side.y[1] == 1 and side.y[4] != 1 else 1
    threads = MAX_THREADS
    blocks_per_position = tiles_total // tiles * side.gathers[0].phases * side.gathers[1].phases

    def blocks() -> int:
        return -(-side.positions * tiles // (threads * positions)) * blocks_per_position

    while blocks() < 2 * device.multiprocessors and threads > 64 and threads // 2 >= tiles:
        threads //= 2
    vector = _load_vector(side, budget=48 // (positions * (loads if unroll else 1)))
    return GatherTile(unroll, channels, positions, tiles, vector, threads)


def _load_vector(side: Side, budget: int) -> int:
    """How many neighbouring channels one load of x may bring."""
    n, c, *rest = side.x
    vector = min(4, 16 // side.problem.item_bytes) if c == 1 and side.problem.aligned else 1
    while vector > 1 and (vector > budget or any(v % vector for v in (side.reduced, n, *rest))):
        vector //= 2
    return vector


def _stage(side: Side, tile: GatherTile, taps_w: int) -> tuple[int, int]:
    """How many channels and how many rows of taps are staged at a time."""
    d, h, _ = side.gathers
    per_channel = taps_w * tile.tiles * tile.channels * accumulator(side.problem.dtype)[1]
    fit = max(1, STAGE_BYTES // per_channel)
    channels = max(tile.vector, min(side.reduced, fit) // tile.vector * tile.vector)
    rows = max(1, min(max(d.count) * max(h.count), fit // channels))
    return channels, rows


def _w_tables(w: Gather) -> Constants:
    """The taps along w in the order of their phases, and the distinct loads that feed them."""
    taps = [(f, w.tap(f, j), w.offset(f, j)) for f in range(w.phases) for j in range(w.count[f])]
    loads = sorted({offset for _, _, offset in taps})
    return (
        ("kLoads", len(loads)),
        ("kLoadOffset", tuple(loads)),
        ("kTapPhase", tuple(f for f, _, _ in taps)),
        ("kTapIndex", tuple(t for _, t, _ in taps)),
        ("kTapLoad", tuple(loads.index(offset) for _, _, offset in taps)),
    )


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


def _plan_gather(side: Side, device: Device) -> Plan:
    p, g = side.problem, side.problem.geometry
    tile = _choose_gather_tile(side, device)
    d, h, w = side.gathers
    taps_w = sum(w.count) if tile.unroll_w else max(*w.count, 1)
    stage_channels, stage_rows = _stage(side, tile, taps_w)
    acc, acc_bytes = accumulator(p.dtype)
    store = min(tile.channels, 16 // p.item_bytes)
    storable = side.y[1] == 1 and side.outs % store == 0 and all(s % store == 0 for s in (side.y[0], *side.y[2:]))
    constants: Constants = (
        ("kThreads", MAX_THREADS),
        ("kMinBlocks", 512 // MAX_THREADS),  # at most 128 registers a thread
        ("Scalar", SCALARS[p.dtype]),
        ("Acc", acc),
        ("kWide", side.wide),
        ("kUnitW", side.x[4] == 1),
        ("kUnitC", side.x[1] == 1),
        ("kGroups", g.groups),
        ("kReducedPerGroup", side.reduced),
        ("kOutPerGroup", side.outs),
        ("kTile", tile.channels),
        ("kPositions", tile.positions),
        ("kTilesPerBlock", tile.tiles),
        ("kVector", tile.vector),
        ("kStoreVector", store if storable else 1),
        ("kStageChannels", stage_channels),
        ("kStageRows", stage_rows),
        ("kUnrollW", tile.unroll_w),
        ("kTapsW", taps_w),
        *(_w_tables(w) if tile.unroll_w else (("kLoads", 1),)),
        *_axis_tables("D", d),
        *_axis_tables("H", h),
        *_axis_tables("W", w),
    )
    tiles = -(-side.outs // tile.channels) * g.groups
    position_blocks = -(-side.positions * tile.tiles // (tile.threads * tile.positions))
    phases = d.phases * h.phases * (1 if tile.unroll_w else w.phases)
    blocks = position_blocks * -(-tiles // tile.tiles) * phases
    launch = Launch(
        kernel="direct",
        constants=constants,
        grid=(blocks, 1, 1),
        threads=tile.threads,
        shared_bytes=stage_rows * stage_channels * taps_w * tile.tiles * tile.channels * acc_bytes,
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
    return max(1, min(wanted, positions // 256, WORKSPACE_BYTES // (count * acc_bytes)))


def _reduce(dtype: str, count: int, splits: int, result: str, sizes: Triple, strides: tuple[int, int, int]) -> Launch:
    """Adds `splits` parts of `count` elements into a tensor of three dimensions."""
    threads, lanes = 256, 32 if count < 4096 else 1
    outer, middle, inner = strides
    return Launch(
        kernel="reduce",
        constants=(
            ("kThreads", threads),
            ("kMinBlocks", 1),
            ("Scalar", SCALARS[dtype]),
            ("Acc", accumulator(dtype)[0]),
            ("kLanes", lanes),
        ),
        grid=(-(-count * lanes // threads), 1, 1),
        threads=threads,
        shared_bytes=0,
        pointers=("workspace", result),
        scalars=padded(int64s(outer, 0, middle, 0, inner, count), int32s(splits), walk((sizes[1], 1, sizes[2]), 1)),
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
    lanes_are_positions = _lanes_are_positions(p.output)
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
        ),
        grid=(-(-splits * units // 4), 1, 1),
        threads=128,
        shared_bytes=0,
        pointers=("dy", "workspace"),
        scalars=padded(
            int64s(*p.output, positions),
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
