"""Plans few_inputs.cuh: a GEMM with K = (tap, channel) for passes that read few channels and write many.

These are the forward pass of layers with few input channels and the input gradient of layers with few output
channels. The compile-time constants depend on the layer alone; the shape of a tile is a run-time argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import gcd

from ...planning import offers, tensor_cores
from ...planning.calibration import Work
from ...planning.launch import Constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem
from ...planning.scalars import SCALARS
from ...planning.side import Side
from .arguments import FEW_INPUTS
from .tiles import Taps, Tile, fastest

HAS_EPILOGUE = True
MAX_REDUCED = 4  # read channels per group: with more, the channels of one tap alone fill K of a matrix instruction
# Read channels per group for the input gradient of a strided layer, whose phases are not contiguous in dy.
MAX_STRIDED = 8
MIN_OUT = 8  # written channels per group: a matrix instruction has 8 columns
MIN_RATIO = 4  # written channels per read channel, so that each gathered operand is used more than once
WARPS = 8  # per block
SUMS = 64  # accumulators per thread
SPREAD_SUMS = 48  # accumulators per thread where lanes exchange outputs, which takes registers
LINE_BYTES = 16  # cost of starting a line, as the number of bytes that take equally long to copy
MOMENT_BYTES = 16  # size of struct Moments<float> in bytes
BARRIER_BYTES = 8 * 1024  # cost of a barrier, as the number of bytes that take equally long to copy
WEIGHT_BYTES = 64 * 1024  # bytes of shared memory for the weights of a block
# Cycles of a block: START is constant, STAGED is paid once per K step and 8 output channels to stage the weights,
# MULTIPLIED per tile, K step, 8 output channels and 16 rows of a warp, and TILE per tile.
START, STAGED, MULTIPLIED, TILE = 5000.0, 90.0, 14.0, 8500.0
# Instructions of a warp for the moments of a set of accumulators, counted in few_inputs_moments.cuh: for each of a
# lane's sums (to add it, to subtract the mean and to square, and half a test of its position), for each unit (to join
# lanes) and for the set. A multiprocessor issues ISSUED per cycle.
MOMENT_SUM, MOMENT_UNIT, MOMENT_SET, ISSUED = 3.5, 16.0, 100.0, 4
MOVED = 10.0  # bytes of the pass's tensors per cycle and multiprocessor, at most: 1.2 times the time of a plain copy


@dataclass(frozen=True)
class Layout:
    """Derives the compile-time constants: the taps, and how a block divides rows and columns of the GEMM."""

    taps: Taps

    @property
    def side(self) -> Side:
        return self.taps.side

    @property
    def step(self) -> int:
        """K of one matrix instruction, in elements."""
        return 32 // self.side.problem.item_bytes

    @cached_property
    def first_step(self) -> tuple[int, ...]:
        """The index of the first K step of every phase, followed by the number of all K steps."""
        return tuple(accumulate((-(-n * self.side.reduced // self.step) for n in self.taps.counts), initial=0))

    @property
    def steps(self) -> int:
        return self.first_step[-1]

    @property
    def contiguous(self) -> bool:
        return self.side.y[4] == 1

    @property
    def together(self) -> int:
        """The number of phases along w that a lane computes together: 2 if their outputs are neighbours in memory."""
        return 2 if self.contiguous and self.side.gathers[2].phases == 2 else 1

    @property
    def along_w(self) -> bool:
        """Tells whether a lane's outputs are neighbours along w in memory."""
        return self.contiguous and self.side.gathers[2].phases == self.together

    @property
    def spread(self) -> bool:
        """Tells whether lines of outputs begin anywhere, so that a lane's neighbouring outputs are no vector."""
        return self.along_w and any(stride % (2 * self.together) for stride in self.side.y[:4])

    @property
    def sums(self) -> int:
        """The most accumulators per thread."""
        return SPREAD_SUMS if self.spread else SUMS

    @property
    def pass_tiles(self) -> int:
        """The number of tiles of 8 columns whose accumulators a warp holds at a time."""
        return min(-(-self.side.outs // 8), self.sums // (4 * self.together))

    @property
    def row_tiles(self) -> int:
        return max(1, min(2, self.sums // (4 * self.together * self.pass_tiles)))

    @property
    def rows(self) -> int:
        return WARPS * 16 * self.row_tiles

    @property
    def block_out(self) -> int:
        """Output channels per block: a whole number of warp passes, as many as WEIGHT_BYTES hold weights for."""
        most = max(1, WEIGHT_BYTES // max(1, self.steps * 256 * self.pass_tiles))
        passes = -(-self.side.outs // (8 * self.pass_tiles))
        return 8 * self.pass_tiles * -(-passes // -(-passes // most))

    @property
    def kinds(self) -> int:
        """The number of distinct sets of output channels that blocks compute."""
        return self.side.problem.geometry.groups * -(-self.side.outs // self.block_out)

    @property
    def paired(self) -> bool:
        """Tells whether two column tiles share 16 channels, so that a lane has 4 neighbouring channels."""
        return self.side.y[1] == 1 and not self.contiguous and self.pass_tiles % 2 == 0

    @property
    def passes(self) -> int:
        return self.block_out // (8 * self.pass_tiles)

    @property
    def moment_unit(self) -> int:
        """The number of neighbouring channels of a norm group that share moments; 0 if the kernel leaves none.

        They are whole blocks of the channels that four lanes have together, or a power of two that divides a block.
        """
        problem = self.side.problem
        if problem.norm is None or not leaves_moments(problem):
            return 0
        own = gcd(problem.geometry.out_channels // problem.norm.groups, self.side.outs)
        return own & -own if own % self._own_block else gcd(own, 8 * self.pass_tiles)

    @property
    def _own_block(self) -> int:
        return 16 if self.paired else 8

    @property
    def units(self) -> int:
        """The number of units with moments of which a lane has values in a pass (device/lane_moments.cuh)."""
        unit, run, block = self.moment_unit, self._own_block // 4, self._own_block
        return 8 * self.pass_tiles // max(unit, block) * max(1, run // unit)

    @property
    def moment_bytes(self) -> int:
        """Bytes of shared memory for the moments that every thread keeps."""
        unit, block = self.moment_unit, self._own_block
        if not unit:
            return 0
        sharing = min(4, max(1, unit * 4 // block))  # lanes that have channels of a unit
        return MOMENT_BYTES * 32 * WARPS * self.passes * -(-self.units // (8 * sharing))

    @property
    def table_bytes(self) -> int:
        words = self.steps * (self.block_out * 8 + self.step) + self.block_out
        return -(-words // 4) * 16 + self.moment_bytes


@lru_cache(maxsize=1024)
def choose(problem: Problem, device: Device) -> tuple[Layout, Tile, int] | None:
    """Returns layout, tile and blocks per multiprocessor with the least predicted work, or None if no tile fits."""
    layout = Layout(Taps.of(Side.of(problem)))

    def work(tile: Tile) -> float:
        """Returns the cost of a tile in bytes: results and copies with an extra cost per line, and a barrier."""
        (d, h, w), steps = tile.size, [gather.output_step for gather in layout.side.gathers]
        line = w * steps[2] * problem.item_bytes + LINE_BYTES
        results = min(layout.side.outs, layout.block_out) * d * steps[0] * h * steps[1] * line
        copies = tile.lines * (tile.line_vectors * max(1, tile.vector) * problem.item_bytes + LINE_BYTES)
        one_by_one = 8 if tile.vector * problem.item_bytes < 4 else 4 if tile.vector == 1 else 2
        return results + one_by_one * copies + BARRIER_BYTES

    found = fastest(layout.side, layout.rows, 2, layout.table_bytes, work, device)
    return None if found is None else (layout, *found)


def leaves_moments(problem: Problem) -> bool:
    """Tells whether the kernel stores the moments of its outputs for a norm that follows."""
    return problem.which is Pass.FORWARD and problem.norm is not None and not problem.has_operands


def why_not(problem: Problem, device: Device) -> str | None:
    if problem.which not in (Pass.FORWARD, Pass.INPUT_GRAD):
        return "it computes the forward pass and the input gradient"
    if refusal := tensor_cores.why_not(problem, device, tensor_cores.WARP):
        return refusal
    side = Side.of(problem)
    strided = problem.which is Pass.INPUT_GRAD and problem.geometry.phases > 1
    most = MAX_STRIDED if strided else MAX_REDUCED
    if side.reduced > most:
        return f"more than {most} channels per group to add up"
    if side.outs < max(MIN_OUT, MIN_RATIO * side.reduced):
        return f"fewer than {max(MIN_OUT, MIN_RATIO * side.reduced)} channels per group to compute"
    if side.positions >= 2**31:
        return "the volume is too large"
    if choose(problem, device) is None:
        return "the taps reach too far for shared memory"
    return None


PASSES = (Pass.FORWARD, Pass.INPUT_GRAD)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offers.one_by_one(PASSES, "few_inputs", wanted, device, why_not, work, plan)


def work(problem: Problem, device: Device) -> Work:
    """Returns the work of the launch: the cycles of the busiest multiprocessor, up to a third fewer than measured."""
    choice = choose(problem, device)
    assert choice is not None, "work() of a problem that why_not() refuses"
    layout, tile, blocks = choice
    products = layout.steps * layout.block_out / 8
    tiles = -(-tile.count // _walkers(layout, tile, blocks, device))
    moving = problem.bytes / (MOVED * device.multiprocessors)
    each = MULTIPLIED * products * layout.row_tiles + TILE
    if layout.moment_unit:
        sums = 4 * layout.together * layout.row_tiles * layout.pass_tiles
        instructions = MOMENT_SUM * sums + MOMENT_UNIT * layout.units + MOMENT_SET
        sets = layout.taps.phases // layout.together * layout.passes
        each += sets * instructions * WARPS * blocks / ISSUED
    return Work(1, START + STAGED * products + max(moving, tiles * each))


def _walkers(layout: Layout, tile: Tile, blocks: int, device: Device) -> int:
    """Returns the number of blocks that share the tiles of one set of output channels."""
    return min(tile.count, max(1, device.multiprocessors * blocks // layout.kinds))


def plan(problem: Problem, device: Device) -> Plan:
    choice = choose(problem, device)
    assert choice is not None, "plan() of a problem that why_not() refuses"
    layout, tile, blocks = choice
    side, unit, slots = layout.side, layout.moment_unit, 0
    walkers = _walkers(layout, tile, blocks, device)
    plan = Plan("few_inputs", "tensor cores, K = taps and channels", (), tile=str(tile))
    if unit and problem.norm:
        slots = WARPS * min(tile.count // problem.batch, walkers)
        moments = problem.geometry.out_channels // unit * slots
        size = problem.batch * moments * MOMENT_BYTES
        plan = replace(plan, workspace_bytes=size, regions=(("moments", 0),), moments=moments // problem.norm.groups)
    launch = FEW_INPUTS.launch(
        walkers * layout.kinds,
        32 * WARPS,
        _constants(layout, tile),
        {**side.operands, "moments": "moments" if unit else "null"},
        shared_bytes=layout.table_bytes + 2 * tile.part_bytes,
        min_blocks=2,
        **side.sizes,
        moment_slots=slots,
        tiles=tile.arguments,
    )
    return replace(plan, launches=(launch,))


def _constants(layout: Layout, tile: Tile) -> Constants:
    side, activation = layout.side, layout.side.problem.activation
    return (
        ("Scalar", SCALARS[side.problem.dtype]),
        ("Epilogue", f"tconv3d::LeavingMoments<{activation}>" if layout.moment_unit else activation),
        ("kWide", side.wide),
        ("kUnitC", side.y[1] == 1),
        ("kRunAlongW", layout.along_w),
        ("kSpread", layout.spread),
        ("kGroups", side.problem.geometry.groups),
        ("kOutPerGroup", side.outs),
        ("kBlockOut", layout.block_out),
        ("kPassTiles", layout.pass_tiles),
        ("kRowTiles", layout.row_tiles),
        ("kTogether", layout.together),
        ("kPairedTiles", layout.paired),
        ("kMomentUnit", layout.moment_unit),
        ("kFirstStep", layout.first_step),
        ("kRagged", any(n * side.reduced % layout.step for n in layout.taps.counts)),
        ("kPartVector", tile.vector),
        *layout.taps.constants(),
    )
