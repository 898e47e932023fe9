"""Plans for the forward pass of up-convolutions (up.cuh), whose kernel equals their stride, as in a U-Net's decoder.

Chooses how many columns (pairs of output channel and tap) a block owns, the number of stages of its ring, and how
many blocks share the positions. The compiled constants depend on the layer and on which of five kinds (NOMINAL) the
volume is of.

Terms: a tile is 64 positions; a chunk is the part of K, the input channels, that one stage of the ring holds. In
names, "last" means channels-last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, log2, prod
from typing import Any

from ...planning import offers, tensor_cores
from ...planning.calibration import Work
from ...planning.geometry import Geometry
from ...planning.launch import Constants, Launch, axis_constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import ITEM_BYTES, Device, Pass, Plan, Problem, Strides
from ...planning.scalars import SCALARS
from ...planning.workspace import placed
from .arguments import UP, UP_PACK

HAS_EPILOGUE = True
THREADS = 384
CONSUMERS = 2  # warpgroups of a block that take tiles in turn
PACK_THREADS = 128
POSITIONS = 64  # positions of a tile
ROW_BYTES, STEP_BYTES = 128, 32  # bytes of K in a swizzled row of weights, and in one matrix instruction
MIN_CHANNELS = 4  # fewest input channels
FEW_CHANNELS = 4  # most output channels of channels-last tensors that are refused
MAX_K_BYTES = 4096  # most bytes of K, since the loop over K is unrolled
MAX_COLUMNS = 256
MIN_STAGES, MAX_STAGES = 3, 16
FEW_TILES = 8  # most tiles of a block that count as few
NOMINAL = (2, 16, 128, 1024, 8192)  # tiles of the five kinds of volume: 2 batch items of 4^3, 8^3, ... 64^3 positions
SECTOR_BYTES = 32
MOMENT_BYTES = 16  # size of struct Moments<float> in bytes
REGISTERS = (40, 232)  # registers per producer and per consumer thread

STEP_COLUMN = 0.5  # cycles of a matrix instruction, per column
# For TF32 and contiguous tensors, from MANY_TILES tiles per block on: the factor on the tensor cores' cycles of a
# tile's products, and the cycles between the products of two chunks. Other cases have not been measured.
MANY_TILES, PRODUCT, BETWEEN = 64, 1.1, 210.0
AS_GOOD = 1.015  # ratio of predicted cycles to the least up to which tilings count as equally fast
# Factor on the time for channels-last tensors if the columns are no power of two, chosen by measurement on an H200.
UNEVEN = 1.3
# Instructions of a consumer warp for the moments of a tile, counted in up_moments.cuh: for each of a lane's sums (to
# add it, to subtract the mean and to square), for each unit (to join halves and lanes) and for the tile. They are
# cycles too, because a multiprocessor issues four instructions per cycle, one for each of a consumer's warps.
MOMENT_SUM, MOMENT_UNIT, MOMENT_TILE = 3.0, 20.0, 100.0


@dataclass(frozen=True)
class Costs:
    """Rates and costs of a multiprocessor, for choosing between tilings."""

    x_bytes: float  # bytes of x loaded per cycle
    y_bytes: float  # bytes of y stored per cycle
    weight_bytes: float  # bytes of weights loaded per cycle
    memory_bytes: float  # bytes of x and y moved per cycle where memory is the limit
    latency: float  # cycles until a copy arrives
    chunk: float  # cycles per chunk to reorder weights
    tile: float  # cycles per tile beside its products and the bytes that it moves
    overhead: float  # cycles from the launch until the first bytes arrive


# Costs for contiguous tensors, fitted to 23 measured times with an error of 4%.
CONTIGUOUS = Costs(32.0, 19.0, 17.5, 15.3, 1720.0, 190.0, 114.0, 10400.0)
# Costs for channels-last tensors, fitted to 32 measured times with an error of 5%.
LAST = Costs(36.0, 24.2, 18.0, 16.6, 1740.0, 60.0, 142.0, 9250.0)


@dataclass(frozen=True)
class Tiling:
    """How blocks divide columns. All fields are compiled in."""

    geometry: Geometry
    dtype: str
    last: bool  # whether tensors are channels-last
    taps: int  # taps of a block; all taps if tensors are contiguous
    columns: int  # columns of a block: pairs of tap and output channel
    stages: int  # stages of the ring of x
    few: bool = False  # whether a block has few tiles, so that its consumers begin at the same time

    @property
    def kinds(self) -> int:
        """Number of blocks that walk over the same positions."""
        g = self.geometry
        if self.last:
            return g.taps // self.taps * -(-g.out_channels * self.taps // self.columns)
        return -(-g.out_channels * g.taps // self.columns)

    @property
    def steps(self) -> int:
        """Number of matrix instructions per tile."""
        unit = ROW_BYTES if self.last else STEP_BYTES
        return -(-self.geometry.in_channels * ITEM_BYTES[self.dtype] // unit) * unit // STEP_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of x, with padding against bank conflicts and two barriers."""
        return ROW_BYTES * (POSITIONS + (0 if self.last else 8)) + 16

    @property
    def chunks(self) -> int:
        """Number of stages that a tile fills."""
        return -(-self.steps * STEP_BYTES // ROW_BYTES)

    @property
    def shared_bytes(self) -> int:
        bias, table = -(-self.columns // 2) * 8 + 8, self.columns // self.geometry.kernel[2] * 8
        return self.weight_bytes + self.stages * self.stage_bytes + bias + table + 24 + 8 * self.chunks

    @property
    def weight_bytes(self) -> int:
        """Bytes of a block's weights in the order of shared memory."""
        return self.chunks * ROW_BYTES * self.columns

    def units(self, unit: int) -> int:
        """Returns the units of columns with moments of their own of which a lane has values (up_moments.cuh)."""
        run = 16 // ITEM_BYTES[self.dtype] if self.last else 2  # neighbouring columns of a lane
        blocks = self.columns // (self.taps if self.last else 1) // (4 * run)
        return blocks * 4 * run // unit if unit >= 4 * run else blocks * max(1, run // unit)

    def __str__(self) -> str:
        return f"{POSITIONS} positions x {self.columns} columns, {self.stages} stages"


def tilings(g: Geometry, dtype: str, shared_bytes: int, last: bool) -> list[Tiling]:
    """Returns every division of columns whose weights leave room for a ring of x in shared memory."""
    found = []
    for taps, columns in _columns(g, dtype, last):
        made = Tiling(g, dtype, last, taps, columns, 0)
        stages = min(MAX_STAGES, (shared_bytes - made.shared_bytes) // made.stage_bytes)
        if columns <= MAX_COLUMNS and stages >= MIN_STAGES:
            found.append(replace(made, stages=stages))
    return found


def _columns(g: Geometry, dtype: str, last: bool) -> list[tuple[int, int]]:
    """Returns the choices for the taps and columns of a block."""
    if not last:
        groups = -(-g.out_channels * g.taps // 8)
        return [(g.taps, columns) for columns in _parts(groups, 8)]
    block = 64 // ITEM_BYTES[dtype]  # output channels that four lanes store together
    blocks = -(-g.out_channels // block)
    divisors = [taps for taps in range(1, g.taps + 1) if g.taps % taps == 0]
    return [(taps, taps * outs) for taps in divisors for outs in _parts(blocks, block)]


def _parts(count: int, unit: int) -> list[int]:
    """Returns the sizes of even parts of `count` units, where a unit has size `unit` and is not divided."""
    return list(dict.fromkeys(unit * -(-count // parts) for parts in range(1, count + 1)))


def splits_of(tiling: Tiling, tiles: int, device: Device) -> int:
    """Returns the number of blocks that share the positions: the fewest with as many tiles per block."""
    splits = max(1, min(tiles, device.multiprocessors // tiling.kinds))
    return -(-tiles // -(-tiles // splits))


def tiles_of(p: Problem) -> int:
    return p.batch * -(-prod(p.input_size) // POSITIONS)


def cycles(tiling: Tiling, tiles: int, device: Device, weight: str, unit: int = 0) -> float:
    """Predicts the cycles for a volume of `tiles` tiles and a weight of the layout `weight`.

    `unit`: how many columns share moments if the kernel leaves moments, else 0.
    """
    g, item, costs = tiling.geometry, ITEM_BYTES[tiling.dtype], LAST if tiling.last else CONTIGUOUS
    splits = splits_of(tiling, tiles, device)
    waves = -(-tiling.kinds * splits // device.multiprocessors)
    bytes_of_tile = POSITIONS * item
    x_rate = min(costs.x_bytes, tiling.stages * POSITIONS * ROW_BYTES / costs.latency)
    moving = bytes_of_tile * (g.in_channels / x_rate + tiling.columns / costs.y_bytes)
    products = tiling.steps * tiling.columns * STEP_COLUMN
    if item == 4 and not tiling.last and tiles >= MANY_TILES * splits:
        products = PRODUCT * products + BETWEEN * tiling.chunks
    if unit:  # the other consumer's products and stores go on meanwhile, as do the copies of x
        products += MOMENT_SUM * tiling.columns / 2 + MOMENT_UNIT * tiling.units(unit) + MOMENT_TILE
    # In a contiguous weight taps are adjacent, so that memory sectors also bring taps of other blocks.
    unused = max(1, min(g.taps, SECTOR_BYTES // item) // tiling.taps) if weight == "contiguous" else 1
    weights = g.in_channels * tiling.columns * item * unused / costs.weight_bytes + tiling.chunks * costs.chunk
    walk = -(-tiles // splits) * (max(moving, products) + costs.tile)
    moved = tiles * bytes_of_tile * (g.in_channels + g.out_channels * g.taps)
    memory = moved / (costs.memory_bytes * device.multiprocessors)
    if tiling.last:  # The time of loading weights does not overlap the memory traffic of x and y.
        uneven = UNEVEN if tiling.columns & (tiling.columns - 1) else 1.0
        return costs.overhead + uneven * waves * weights + max(uneven * waves * walk, memory)
    return costs.overhead + max(waves * (weights + walk), memory)


def nominal(p: Problem) -> int:
    """Returns the tiles of the kind of volume that a tiling is chosen for: one of five, so that a new volume seldom
    compiles a new kernel."""
    return min(NOMINAL, key=lambda kind: abs(log2(tiles_of(p)) - log2(kind)))


@lru_cache(maxsize=1024)
def choose(p: Problem, device: Device) -> Tiling | None:
    found = tilings(p.geometry, p.dtype, device.shared_bytes, _is_last(p))
    weight = _weight(p)
    costs = {tiling: cycles(tiling, nominal(p), device, weight) for tiling in found}
    least = min(costs.values(), default=0.0)
    equals = [tiling for tiling in found if costs[tiling] < AS_GOOD * least]  # too close for the model
    best = min(equals, key=lambda tiling: (tiling.kinds, costs[tiling], -tiling.taps), default=None)
    return best and with_turns(best, nominal(p), device)


def with_turns(tiling: Tiling, tiles: int, device: Device) -> Tiling:
    """Returns the tiling with `few` set: consumers of channels-last tensors begin at the same time if a block has at
    most FEW_TILES tiles, and take turns otherwise."""
    return replace(tiling, few=tiling.last and tiles <= FEW_TILES * splits_of(tiling, tiles, device))


# ---- The interface of the family to the planner.


def leaves_moments(problem: Problem) -> bool:
    """Tells whether the kernel stores the moments of its outputs for a norm that follows."""
    return problem.which is Pass.FORWARD and problem.norm is not None and not problem.has_operands


def why_not(problem: Problem, device: Device) -> str | None:
    p, g = problem, problem.geometry
    if p.which is not Pass.FORWARD:
        return "it computes the forward pass"
    if (refusal := tensor_cores.why_not(p, device, tensor_cores.WARPGROUP)) is not None:
        return refusal
    if p.norm is not None and not leaves_moments(p):
        return "it leaves no moments of a result that reads other tensors"
    if g.groups != 1:
        return "it takes no groups"
    if any(axis.padding or axis.output_padding or axis.dilation != 1 for axis in g.axes):
        return "padding or dilation: outputs do not have one position each"
    if g.kernel != g.stride:
        return "the kernel is not the stride"
    if not _is_last(p) and g.kernel[2] not in (1, 2, 4):
        return f"{g.kernel[2]} taps along w of contiguous tensors, not 1, 2 or 4"
    if not (_whole_channels(p) if _is_last(p) else _whole_lines(p)):
        return "positions, channels or outputs are not whole pieces of 16 bytes in a row"
    if not 0 < p.batch * prod(p.input_size) < 2**30:
        return "too many positions, or none"
    if g.in_channels < MIN_CHANNELS:
        return f"fewer than {MIN_CHANNELS} input channels leave tensor cores idle"
    if _is_last(p) and g.out_channels <= FEW_CHANNELS:
        return f"{g.out_channels} output channels of channels-last tensors are a part of what a lane stores"
    if g.in_channels * p.item_bytes > MAX_K_BYTES or choose(p, device) is None:
        return f"the weights of {g.in_channels} input channels are too many for shared memory"
    return None


def _is_last(p: Problem) -> bool:
    return p.input[1] == p.output[1] == 1 and p.output[4] != 1


def _whole_lines(p: Problem) -> bool:
    """Tells whether the positions of a channel are contiguous and whole pieces of 16 bytes, with every pair of
    positions in one line."""
    item, width = p.item_bytes, p.input_size[2]
    run = p.input[4] == 1 and _one_run(p) and prod(p.input_size) * item % 16 == 0
    x = run and all(v * item % 16 == 0 for v in p.input[:2])
    pair = 2 * min(2, p.geometry.kernel[2])  # outputs of two positions that one store writes
    y = p.output[4] == 1 and width % 2 == 0 and all(v % pair == 0 for v in p.output[:4])
    return x and y and _weight(p) == "contiguous" and p.aligned


def _whole_channels(p: Problem) -> bool:
    """Tells whether the channels of a position are whole pieces of 16 bytes and positions are evenly spaced."""
    strides = (p.input[0], p.input[4], p.output[0], *p.output[2:], p.geometry.in_channels, p.geometry.out_channels)
    whole = all(v * p.item_bytes % 16 == 0 for v in strides)
    return whole and _one_run(p) and _weight(p) in ("contiguous", "last") and p.aligned


def _weight(p: Problem) -> str:
    """Returns the layout of the weight: "contiguous", "last" or "other". With one tap, where both layouts are equal,
    it is the layout of the tensors."""
    g, (_, high, wide) = p.geometry, p.geometry.kernel
    shape = (g.in_channels, g.out_channels, *g.kernel)
    tap = {"contiguous": 1, "last": g.out_channels}
    for name, out in sorted((("contiguous", g.taps), ("last", 1)), reverse=_is_last(p)):
        wanted = (g.out_channels * g.taps, out, high * wide * tap[name], wide * tap[name], tap[name])
        if _same(p.weight, wanted, shape):
            return name
    return "other"


def _one_run(p: Problem) -> bool:
    (_, height, width), step = p.input_size, p.input[4]
    return _same(p.input[2:4], (height * width * step, width * step), p.input_size[:2])


def _same(strides: Strides, wanted: Strides, size: tuple[int, ...]) -> bool:
    """Tells whether strides are equal, ignoring dimensions of size 1, whose stride does not matter."""
    return all(a == b or n == 1 for a, b, n in zip(strides, wanted, size, strict=True))


PASSES = (Pass.FORWARD,)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offers.one_by_one(PASSES, "up", wanted, device, why_not, work, plan)


def work(problem: Problem, device: Device) -> Work:
    """Returns the predicted work of the plan's launches."""
    tiling = choose(problem, device)
    assert tiling is not None, "work() of a problem that why_not() refuses"
    unit = moment_unit(problem, tiling) if leaves_moments(problem) else 0
    predicted = cycles(tiling, tiles_of(problem), device, _weight(problem), unit)
    return Work(1, predicted)


def plan(problem: Problem, device: Device) -> Plan:
    tiling = choose(problem, device)
    assert tiling is not None, "plan() of a problem that why_not() refuses"
    p, splits = problem, splits_of(tiling, tiles_of(problem), device)
    why = "every output has one position and one tap: one product, x as it is in memory"
    tile = f"{tiling}, {splits} share the positions"
    size = tiling.kinds * tiling.weight_bytes
    kept = Plan("up", why, (_pack(p, tiling), _walk(p, tiling, splits, True)), size, tile, packed_bytes=size)
    plan = Plan("up", why, (_walk(p, tiling, splits, False),), tile=tile)
    if leaves_moments(p):
        plan, kept = (_with_moments(each, p, tiling, splits) for each in (plan, kept))
    return replace(plan, kept=kept)


def moment_unit(p: Problem, tiling: Tiling) -> int:
    """Returns how many neighbouring columns of a norm group share their moments, channels in channels-last tensors.

    They are whole blocks of the columns that four lanes have together, or a power of two that divides such a block.
    """
    assert p.norm is not None
    own = p.geometry.out_channels // p.norm.groups * (1 if tiling.last else p.geometry.taps)
    block = 64 // p.item_bytes if tiling.last else 8
    if own % block:
        return own & -own
    return gcd(own, tiling.columns // tiling.taps if tiling.last else tiling.columns)


def _moment_slots(p: Problem, tiling: Tiling, splits: int) -> int:
    """Returns how many warps store moments of a unit of a batch item."""
    consumers = min(tiles_of(p) // p.batch, CONSUMERS * splits)
    return 4 * consumers * (p.geometry.taps // tiling.taps)


def _with_moments(plan: Plan, p: Problem, tiling: Tiling, splits: int) -> Plan:
    """Returns a plan with a region for the moments that its last launch leaves."""
    g, unit = p.geometry, moment_unit(p, tiling)
    moments = g.out_channels * (1 if tiling.last else g.taps) // unit * _moment_slots(p, tiling, splits)
    end, regions = placed([("moments", p.batch * moments * MOMENT_BYTES)], plan.workspace_bytes)
    assert p.norm is not None
    return replace(plan, workspace_bytes=end, regions=regions, moments=moments // p.norm.groups)


def _walk(p: Problem, tiling: Tiling, splits: int, packed: bool) -> Launch:
    """Returns the main launch. `packed` tells whether up_pack has already reordered the weight."""
    registers = ("kProducerRegisters", REGISTERS[0]), ("kConsumerRegisters", REGISTERS[1])
    return UP.launch(
        tiling.kinds * splits,
        THREADS,
        (*_constants(p, tiling), ("kPacked", packed), *registers),
        {"weight": "workspace" if packed else "weight", "moments": "moments" if leaves_moments(p) else "null"},
        shared_bytes=tiling.shared_bytes,
        overlaps=packed,
        **_values(p, splits),
        moment_slots=_moment_slots(p, tiling, splits) if leaves_moments(p) else 0,
    )


def _pack(p: Problem, tiling: Tiling) -> Launch:
    """Returns the launch that writes the weight in the order of shared memory, which does not depend on the
    volume."""
    operands = {"x": "null", "bias": "null", "y": "workspace", "moments": "null"}
    p = replace(p, batch=1, input_size=(1, 1, 1), input=(0,) * 5, output=(0,) * 5, norm=None)
    constants, values = _constants(p, tiling), _values(p, 1)
    return UP_PACK.launch(tiling.kinds * tiling.chunks, PACK_THREADS, constants, operands, **values, moment_slots=0)


def _values(p: Problem, splits: int) -> dict[str, Any]:
    """Returns the arguments other than pointers."""
    size, tiles = p.input_size, tiles_of(p)
    weight = (
        p.geometry.out_channels * p.geometry.taps,
        *((1, 0, 0, p.geometry.out_channels) if _weight(p) == "last" else (p.geometry.taps, 0, 0, 1)),
    )
    strides = {"x_strides": p.input, "y_strides": p.output, "w_strides": weight}
    counts = {"positions": prod(size), "tiles": tiles, "splits": splits, "by_tiles": tiles // p.batch}
    return {**strides, **counts, "by_h": size[1], "by_w": size[2]}


def _constants(p: Problem, tiling: Tiling) -> Constants:
    g = p.geometry
    return (
        ("Scalar", SCALARS[p.dtype]),
        ("Epilogue", f"tconv3d::LeavingMoments<{p.activation}>" if leaves_moments(p) else p.activation),
        ("kMomentUnit", moment_unit(p, tiling) if leaves_moments(p) else 0),
        ("kIn", g.in_channels),
        ("kOut", g.out_channels),
        *axis_constants(g.axes, "kernel"),
        ("kLast", tiling.last),
        ("kWeightLast", _weight(p) == "last"),
        ("kTapTile", tiling.taps),
        ("kColumns", tiling.columns),
        ("kStages", tiling.stages),
        ("kFewTiles", tiling.few),
    )
