"""Plans for kernels/few_inputs.cuh: few channels in, many out, with K = (tap, channel).

The forward pass of layers with few input channels, and the input gradient of layers with few output channels. What is
compiled in depends on the layer alone; the shape of a tile is an argument.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, product

from .direct_planner import INT32_MAX, SCALARS, Side
from .geometry import Gather, Triple
from .launch import Constants, Launch
from .packing import divider, dividers, int32s, int64s, padded
from .problem import Device, Pass, Plan, Problem

MAX_REDUCED = 4  # channels per group; with more, K of channels fills the tensor cores tap by tap
MAX_STRIDED = 8  # for input gradients of strided layers: the channels of a phase plane do not lie together
MIN_OUT = 8  # and columns, too, are to be filled
WARPS = 8
SUMS = 64  # accumulators of a thread
WEIGHT_BYTES = 64 * 1024  # of weights that a block keeps in shared memory
SHARED_BYTES = 113 * 1024  # so that two blocks share a multiprocessor
LINE_ITEMS = 8  # a line of x in shared memory is a multiple of this


class Layout:
    """What the kernel is compiled for: phases, taps, and how a block divides rows and columns."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.step = 32 // side.problem.item_bytes  # K of a matrix instruction
        phases = list(product(*(range(gather.phases) for gather in side.gathers)))
        self.phases = len(phases)
        taps = [
            list(product(*(range(gather.count[f]) for gather, f in zip(side.gathers, phase, strict=True))))
            for phase in phases
        ]
        self.taps: list[tuple[Triple, Triple]] = [  # (tap, its offset in x from the tile's first)
            (
                tuple(gather.tap(f, j) for gather, f, j in zip(side.gathers, phase, js, strict=True)),
                tuple(
                    gather.offset(f, j) - origin(gather) for gather, f, j in zip(side.gathers, phase, js, strict=True)
                ),
            )
            for phase, found in zip(phases, taps, strict=True)
            for js in found
        ]
        self.first_tap = list(accumulate((len(found) for found in taps), initial=0))
        steps = [-(-len(found) * side.reduced // self.step) for found in taps]
        self.first_step = list(accumulate(steps, initial=0))
        self.contiguous = side.y[4] == 1
        self.together = 2 if self.contiguous and side.gathers[2].phases == 2 else 1
        tiles = -(-side.outs // 8)
        self.pass_tiles = min(tiles, SUMS // (4 * self.together))
        self.row_tiles = max(1, min(2, SUMS // (4 * self.together * self.pass_tiles)))
        most = max(1, WEIGHT_BYTES // max(1, self.steps * 256 * self.pass_tiles))  # passes of a block
        passes = -(-tiles // self.pass_tiles)
        self.passes = -(-passes // -(-passes // most))

    @property
    def steps(self) -> int:
        return self.first_step[-1]

    @property
    def block_out(self) -> int:
        return 8 * self.pass_tiles * self.passes

    @property
    def rows(self) -> int:
        return WARPS * 16 * self.row_tiles

    @property
    def kinds(self) -> int:
        return self.side.problem.geometry.groups * -(-self.side.outs // self.block_out)

    @property
    def table_bytes(self) -> int:
        words = self.steps * (self.block_out * 8 + self.step) + self.block_out
        return -(-words // 4) * 16


def origin(gather: Gather) -> int:
    return min(gather.offset(f, j) for f in range(gather.phases) for j in range(gather.count[f]))


def part_of(side: Side, tile: Triple) -> Triple:
    """How much of x a tile of positions reads along each dimension."""
    last = [
        max(gather.offset(f, j) for f in range(gather.phases) for j in range(gather.count[f])) - origin(gather)
        for gather in side.gathers
    ]
    d, h, w = ((n - 1) * gather.input_step + more + 1 for n, gather, more in zip(tile, side.gathers, last, strict=True))
    return d, h, w


def _shared_bytes(layout: Layout, part: Triple) -> int:
    d, h, w = part
    items = layout.side.reduced * d * h * _line_pitch(w)
    return layout.table_bytes + 2 * items * layout.side.problem.item_bytes


def _line_pitch(width: int) -> int:
    return -(-width // LINE_ITEMS) * LINE_ITEMS


def _tiles(grid: Triple, tile: Triple) -> Triple:
    d, h, w = (-(-size // of) for size, of in zip(grid, tile, strict=True))
    return d, h, w


def choose_tile(layout: Layout, limit: int) -> Triple | None:
    """The tile whose rows are filled best and whose part of x is smallest, of those that fit."""
    side, rows = layout.side, layout.rows
    d, h, w = (max(1, size) for size in side.grid)
    best, least = None, 0.0
    widths = sorted({min(rows, -(-w // cuts) + -(-w // cuts) % 2) for cuts in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)})
    for width in widths:
        for height in range(1, min(h, rows // width) + 1):
            tile = (max(1, min(d, rows // (width * height))), height, width)
            part = part_of(side, tile)
            if _shared_bytes(layout, part) > limit:
                continue
            along_d, along_h, along_w = _tiles((d, h, w), tile)
            lines = -(-side.reduced * part[0] * part[1] // WARPS)
            work = rows + 2 * lines * (4 + -(-part[2] // 32)) + 64  # products and stores, copies, a barrier
            cost = float(along_d * along_h * along_w * work)
            if best is None or cost < least:
                best, least = tile, cost
    return best


@lru_cache(maxsize=1024)
def _choice(problem: Problem, device: Device) -> tuple[Layout, Triple, int] | None:
    """Layout, tile and blocks to a multiprocessor: two if they fit, else one."""
    layout = Layout(Side.of(problem))
    for blocks, limit in ((2, min(SHARED_BYTES, device.shared_bytes)), (1, device.shared_bytes)):
        tile = choose_tile(layout, limit)
        if tile is not None:
            return layout, tile, blocks
    return None


def why_not(problem: Problem, device: Device) -> str | None:
    if problem.which not in (Pass.FORWARD, Pass.INPUT_GRAD):
        return "it computes the forward pass and the input gradient"
    if problem.dtype == "float64" or (problem.dtype == "float32" and not problem.tf32):
        return "tensor cores round products to TF32 or 16 bits"
    if device.capability < (8, 0):
        return f"needs compute capability 8.0, the device has {device.capability[0]}.{device.capability[1]}"
    side = Side.of(problem)
    strided = problem.which is Pass.INPUT_GRAD and problem.geometry.phases > 1
    most = MAX_STRIDED if strided else MAX_REDUCED
    if side.reduced > most:
        return f"more than {most} channels per group to add up"
    if side.outs < MIN_OUT:
        return f"fewer than {MIN_OUT} channels per group to compute"
    if max(*side.grid, problem.batch) >= 2**28 or side.positions >= 2**40:
        return "the volume is too long"
    if _choice(problem, device) is None:
        return "the taps reach too far for shared memory"
    return None


def plan(problem: Problem, device: Device) -> Plan:
    choice = _choice(problem, device)
    assert choice is not None, "plan() of a problem that why_not() refuses"
    layout, tile, blocks = choice
    return plan_tile(layout, tile, blocks, device)


def plan_tile(layout: Layout, tile: Triple, blocks: int, device: Device) -> Plan:
    """The plan with a given tile: what a benchmark compares."""
    side = layout.side
    p, g = side.problem, side.problem.geometry
    part = part_of(side, tile)
    counts = _tiles(side.grid, tile)
    tiles = p.batch * counts[0] * counts[1] * counts[2]
    walkers = min(tiles, max(1, device.multiprocessors * blocks // layout.kinds))
    launch = Launch(
        kernel="few_inputs",
        constants=_constants(layout),
        grid=(walkers * layout.kinds, 1, 1),
        threads=32 * WARPS,
        shared_bytes=_shared_bytes(layout, part),
        pointers=("x", "weight", "bias", "y") if p.which is Pass.FORWARD else ("dy", "weight", "null", "dx"),
        scalars=padded(
            int64s(*side.x, *side.y, *side.weight, g.in_per_group * p.weight[0]),
            int32s(*side.x_size, *side.y_size, *side.grid, *tile, *part, _line_pitch(part[2]), tiles),
            dividers(counts),
            divider(part[0]),
            divider(part[1]),
        ),
    )
    shape = " x ".join(map(str, tile))
    return Plan("few_inputs", "tensor cores, K = taps and channels", (launch,), tile=f"{shape} positions per tile")


def _constants(layout: Layout) -> Constants:
    side = layout.side
    p, g = side.problem, side.problem.geometry
    d, h, w = side.gathers
    return (
        ("kThreads", 32 * WARPS),
        ("kMinBlocks", 2),
        ("Scalar", SCALARS[p.dtype]),
        ("kWide", side.wide),
        ("kUnitC", side.y[1] == 1),
        ("kRunAlongW", layout.contiguous and w.phases == layout.together),
        ("kGroups", g.groups),
        ("kReduced", side.reduced),
        ("kOutPerGroup", side.outs),
        ("kBlockOut", layout.block_out),
        ("kPassTiles", layout.pass_tiles),
        ("kRowTiles", layout.row_tiles),
        ("kTogether", layout.together),
        ("kPhases", layout.phases),
        ("kFirstTap", tuple(layout.first_tap)),
        ("kFirstStep", tuple(layout.first_step)),
        *((f"kTap{n}", tuple(tap[i] for tap, _ in layout.taps)) for i, n in enumerate("DHW")),
        *((f"kOffset{n}", tuple(offset[i] for _, offset in layout.taps)) for i, n in enumerate("DHW")),
        *((f"kOrigin{n}", origin(gather)) for n, gather in zip("DHW", (d, h, w), strict=True)),
        *((f"kInputStep{n}", gather.input_step) for n, gather in zip("DHW", (d, h, w), strict=True)),
        *((f"kOutputStep{n}", gather.output_step) for n, gather in zip("DHW", (d, h, w), strict=True)),
    )
