"""Plans depthwise_tiles_weight_grad.cuh: the weight gradient of depthwise layers, a tile of a plane per thread.

Sums are added in float32, for all types but float64. The compile-time constants depend on the layer, the memory
format, and the tile of a block. A model of instructions and bytes chooses the tile among a few of the layer
(`planning/repertoire.py`), so that most new volumes use a kernel that is already compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import inf, prod

from ...planning import offers
from ...planning.calibration import Work
from ...planning.geometry import Triple
from ...planning.launch import Constants, axis_constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, is_channels_last
from ...planning.repertoire import Repertoire, typical_problems
from ...planning.scalars import SCALARS
from ...planning.sums import BIAS_PARTS, weight_sums
from .arguments import DEPTHWISE_TILES_WEIGHT_GRAD
from .slabs import (
    BARRIERS,
    COPY,
    L2,
    WARP,
    WARPS,
    Slab,
    block_constants,
    grains,
    resident,
    sides,
)

MAX_REGISTERS = 200  # estimated registers per thread
MOST_PAIRS = 64  # pairs of a channel of x and a channel of dy in a group
MOST_THREADS = 512  # per block
MOST_PLANE_TAPS = 64  # sums of a thread
MOST_PRODUCTS = 4096  # multiply-adds of the unrolled code
MOST_TERMS = 768  # products that a thread adds to one sum, which bounds the rounding error of the sum
TILES = tuple(product((2, 3, 4, 6), (4, 8)))  # candidates for the positions of a thread along h and w
REPEATS = 1, 2, 4  # candidates for the tiles of a thread
CHANNELS = 8, 16, 32  # candidates for the channels of a block if channels are neighbours in memory
FINALISTS = 8  # tilings that are compared at several lengths along depth


@dataclass(frozen=True)
class Tiling:
    """Describes the tiles of a block and counts what they cost."""

    problem: Problem
    gradients: Slab  # planes of dy
    inputs: Slab  # planes of x

    @property
    def active(self) -> int:
        """Threads of a tap along depth that have a tile."""
        return self.inputs.tiles_h * self.inputs.tiles_w * self.inputs.threads

    @property
    def lanes(self) -> int:
        """Threads of a tap along depth."""
        return -(-self.active // WARP) * WARP

    @property
    def threads(self) -> int:
        return self.lanes * self.problem.geometry.kernel[0]

    @property
    def plane_taps(self) -> int:
        return prod(self.problem.geometry.kernel[1:])

    @property
    def products(self) -> int:
        """Multiply-adds of a thread for a tile."""
        return self.inputs.tile_h * self.inputs.tile_w * self.plane_taps

    @property
    def registers(self) -> int:
        """An estimate of the registers per thread."""
        tile = self.inputs.tile_h * self.inputs.tile_w
        return self.plane_taps + tile + 2 * self.gradients.reads + 44

    @property
    def shifts(self) -> tuple[int, int]:
        """The least and the greatest shift along depth."""
        axis = self.problem.geometry.axes[0]
        return axis.shift(0), axis.shift(axis.kernel - 1)

    @property
    def shared_bytes(self) -> int:
        first, last = self.shifts
        stride = self.problem.geometry.stride[0]
        planes = 2 * stride * self.gradients.bytes + (last - first + 2) * self.inputs.bytes
        totals = 4 * self.threads * ((self.plane_taps + self.problem.bias) | 1)
        return max(planes, totals)

    def resident(self, device: Device) -> int:
        """Returns the blocks per multiprocessor by registers and shared memory."""
        return resident(self.threads, self.registers, self.shared_bytes, device.shared_bytes)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks along h and w, and chunks of channels."""
        _, h, w = self.problem.input_size
        s = self.inputs
        rows, columns = s.tiles_h * s.repeats * s.tile_h, s.tiles_w * s.tile_w
        return -(-h // rows), -(-w // columns), -(-self.problem.geometry.groups // (s.channels // s.group))

    @property
    def longest(self) -> int:
        """The most planes of x per block whose sums have at most MOST_TERMS terms."""
        s = self.inputs
        return max(1, MOST_TERMS // (s.tile_h * s.tile_w * s.repeats))

    def fits(self, device: Device) -> bool:
        return (
            self.gradients.fits
            and self.inputs.fits
            and self.threads <= MOST_THREADS
            and self.registers <= MAX_REGISTERS
            and self.products <= MOST_PRODUCTS
            and self.shared_bytes <= device.shared_bytes
        )

    @cached_property
    def tile_cycles(self) -> float:
        """Cycles of a multiprocessor for a warp's products of one tile."""
        dy, x = self.gradients, self.inputs
        loads = dy.rows_read * (dy.vectors + dy.conversions) + x.tile_h * (x.vectors + x.conversions)
        own = x.tile_h * x.tile_w * prod(self.problem.geometry.stride) / self.problem.geometry.kernel[0]
        issued = self.products + loads + (own if self.problem.bias else 0) + 24
        return max(issued / 4, dy.rows_read * dy.row_wavefronts + x.tile_h * x.row_wavefronts)

    @cached_property
    def step_cycles(self) -> float:
        """Cycles of a multiprocessor for all that a block does with one plane of x."""
        g, stride = self.problem.geometry, self.problem.geometry.stride[0]
        fills = self.gradients.fill_instructions(self.threads, stride) + self.inputs.fill_instructions(self.threads)
        products = self.tile_cycles * self.inputs.repeats * g.kernel[0] * (self.lanes // WARP)
        return products + fills * (self.threads // WARP) / 4 + 40

    def cycles(self, length: int, device: Device) -> float:
        """Returns the cycles of the busiest multiprocessor if blocks have `length` planes of x."""
        problem, (first, last) = self.problem, self.shifts
        g, warps = problem.geometry, self.threads // WARP
        parts = -(-problem.input_size[0] // length)
        block = length * self.step_cycles + 3000 + 4 * g.taps * self.inputs.threads / WARP
        blocks = prod(self.blocks) * parts * problem.batch
        per_multiprocessor = -(-blocks // device.multiprocessors)
        resident = min(self.resident(device), per_multiprocessor)
        arithmetic = per_multiprocessor * block * (max(1.0, WARPS / (resident * warps)) + BARRIERS / resident)
        sums = 8 * blocks * self.inputs.threads * g.taps  # bytes of partial sums, written and read
        planes = (length + last - first) * g.stride[0]
        read = blocks * (planes * self.gradients.traffic + length * self.inputs.traffic)
        memory = max((problem.bytes + sums) / COPY, (read + sums) / L2) / device.multiprocessors
        return max(arithmetic, memory) + 0.2 * min(arithmetic, memory)

    def parts_bytes(self, length: int) -> int:
        """Returns the bytes of the partial sums."""
        g, (by_h, by_w, _) = self.problem.geometry, self.blocks
        splits = self.problem.batch * -(-self.problem.input_size[0] // length) * by_h * by_w
        return 4 * splits * (g.in_channels * g.out_per_group * g.taps + (g.out_channels if self.problem.bias else 0))

    def length(self, device: Device) -> int:
        """Returns the planes of x per block that take the fewest cycles, or 0 if no workspace is large enough."""
        depth = self.problem.input_size[0]
        lengths = {min(-(-depth // parts), self.longest) for parts in range(1, min(depth, 16) + 1)}
        fitting = [length for length in sorted(lengths) if self.parts_bytes(length) <= device.workspace_bytes]
        return min(fitting, key=lambda length: self.cycles(length, device), default=0)


def _candidates(problem: Problem, device: Device) -> list[Tiling]:
    _, h, w = problem.geometry.axes
    spans = tuple(axis.dilation * (axis.kernel - 1) + 1 for axis in (h, w))
    last, groups, item = is_channels_last(problem.output), problem.geometry.groups, problem.item_bytes
    g = problem.geometry
    pairs = [(i, o) for i in range(g.in_per_group) for o in range(g.out_per_group)]
    grains_x = grains(problem, problem.input, problem.input_size[2], g.in_channels)
    grains_dy = grains(problem, problem.output, problem.output_size[2], g.out_channels)
    found = []
    for tile_h, tile_w in TILES:
        rows, columns = -(-problem.input_size[1] // tile_h), -(-problem.input_size[2] // tile_w)
        for tiles_w, repeats in product(sides(columns), REPEATS):
            for tiles_h in sides(-(-rows // repeats)):
                for count in _channels(last, groups, len(pairs), tiles_h * tiles_w):
                    inputs = Slab(last, item, count * g.in_per_group, tiles_h, tiles_w, tile_h, tile_w, 1, 1, 1, 1, 0,
                                  grains_x[0], repeats, tuple(i for i, _ in pairs), g.in_per_group)  # fmt: skip
                    slabs = [
                        replace(inputs, channels=count * g.out_per_group, readers=tuple(o for _, o in pairs),
                                group=g.out_per_group, step_h=h.stride, step_w=w.stride, span_h=spans[0],
                                span_w=spans[1], first_w=-w.padding, grain=grain)
                        for grain in grains_dy
                    ]  # fmt: skip
                    tilings = [Tiling(problem, slab, inputs) for slab in slabs]
                    tilings = [tiling for tiling in tilings if tiling.fits(device)]
                    found += sorted(tilings, key=lambda tiling: tiling.step_cycles)[:1]
    return found


def _channels(last: bool, groups: int, pairs: int, tiles: int) -> list[int]:
    """Returns candidates for the groups of a block with this many tiles, of at most two warps per tap."""
    if tiles * pairs > 2 * WARP:
        return []
    if last:
        counts = [-(-n // pairs) for n in CHANNELS]
        return [
            n for n in dict.fromkeys(counts) if n * pairs * tiles <= 2 * WARP and (n < 2 * groups or n == counts[0])
        ]
    return sorted({1, max(1, min(groups, WARP // (tiles * pairs)))})


Choice = tuple[Slab, Slab]  # the slabs of dy and of x
_repertoire = Repertoire[tuple[object, ...], tuple[int, Triple], Choice]()


def forget() -> None:
    """Forgets the first volume of every layer, so that the next volume counts as the first."""
    _own.cache_clear()
    _repertoire.forget()


@lru_cache(maxsize=1024)
def _own(problem: Problem, device: Device) -> Choice | None:
    """Returns the choice with the fewest cycles by the model for this volume, or None if none fits."""
    found = _candidates(problem, device)

    def nominal(tiling: Tiling) -> float:
        return tiling.cycles(min(-(-problem.input_size[0] // 3), tiling.longest), device)

    found = sorted(found, key=nominal)[:FINALISTS]
    found = [
        Tiling(problem, tiling.gradients.settled(), tiling.inputs.settled())
        for tiling in found
        if tiling.fits(device)
    ]
    found = [tiling for tiling in found if tiling.fits(device) and tiling.length(device) > 0]
    best = min(found, key=lambda tiling: tiling.cycles(tiling.length(device), device), default=None)
    return None if best is None else (best.gradients, best.inputs)


def _of_choice(problem: Problem, device: Device, choice: Choice) -> Tiling | None:
    """Returns the tiling of a choice with copies as wide as this volume's lines allow, or None if it does not fit."""
    gradients, inputs = choice
    g = problem.geometry
    widest_x = grains(problem, problem.input, problem.input_size[2], g.in_channels)[0]
    widest_dy = grains(problem, problem.output, problem.output_size[2], g.out_channels)[0]
    tiling = Tiling(
        problem,
        replace(gradients, grain=min(gradients.grain, widest_dy)),
        replace(inputs, grain=min(inputs.grain, widest_x)),
    )
    return tiling if tiling.fits(device) and tiling.length(device) > 0 else None


def _tiling(problem: Problem, device: Device) -> Tiling | None:
    """Returns the tiling for a volume, one of a few of its layer, or None if none fits."""

    def cost(choice: Choice, _: float) -> float:
        tiling = _of_choice(problem, device, choice)
        return inf if tiling is None else tiling.cycles(tiling.length(device), device)

    choice = _repertoire.choose(
        (problem.geometry, problem.dtype, problem.bias, is_channels_last(problem.output), device),
        (problem.batch, problem.input_size),
        lambda: _own(problem, device),
        lambda: (found for each in typical_problems(problem) if (found := _own(each, device)) is not None),
        cost,
    )
    return None if choice is None else _of_choice(problem, device, choice)


def why_not(problem: Problem, device: Device) -> str | None:
    g = problem.geometry
    if problem.which is not Pass.WEIGHT_GRAD:
        return "it computes weight gradients"
    if g.in_per_group * g.out_per_group > MOST_PAIRS:
        return f"more than {MOST_PAIRS} pairs of channels per group"
    if problem.dtype == "float64":
        return "it adds up in float32"
    if prod(g.kernel[1:]) > MOST_PLANE_TAPS or g.kernel[0] * WARP > MOST_THREADS:
        return "the sums of the taps do not fit the registers"
    if problem.bias and not g.own_taps_cover:
        return "no set of taps reads every output once, as a bias's gradient needs it"
    if is_channels_last(problem.input) != is_channels_last(problem.output):
        return "only one of x and dy is channels-last"
    if (
        problem.batch * prod(problem.input_size) * g.in_channels * g.out_per_group >= 2**31
        or problem.output_size[2] >= 2**28
    ):
        return "the volume is too large"
    if _tiling(problem, device) is None:
        return "no tile fits registers, shared memory and workspace"
    return None


PASSES = (Pass.WEIGHT_GRAD,)  # passes that this family computes
KERNEL = "depthwise_tiles_weight_grad"


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    ask = KERNEL, wanted, device, why_not, work, plan
    return [*offers.one_by_one(PASSES, *ask), *offers.weight_with_bias(*ask)]


def work(problem: Problem, device: Device) -> Work:
    """Returns the work of the launches: cycles by the model."""
    tiling = _tiling(problem, device)
    cycles = inf if tiling is None else tiling.cycles(tiling.length(device), device)
    return Work(2 + problem.bias, cycles, tensor_cores=False)


def plan(problem: Problem, device: Device) -> Plan:
    tiling = _tiling(problem, device)
    assert tiling is not None, problem
    length, slab = tiling.length(device), tiling.inputs
    parts = -(-problem.input_size[0] // length)
    by_h, by_w, chunks = tiling.blocks
    splits = problem.batch * parts * by_h * by_w
    main = DEPTHWISE_TILES_WEIGHT_GRAD.launch(
        splits * chunks,
        tiling.threads,
        _constants(tiling),
        {"parts": "workspace", "bias_parts": BIAS_PARTS if problem.bias else "null"},
        shared_bytes=tiling.shared_bytes,
        min_blocks=tiling.resident(device),
        x_strides=problem.input,
        dy_strides=problem.output,
        x_size=problem.input_size,
        dy_size=problem.output_size,
        length=length,
        by_w=by_w,
        by_h=by_h,
        by_parts=parts,
    )
    sums, why = weight_sums(problem, splits), "multiply-adds, planes in shared memory"
    tile = f"each thread {slab.tile_h} x {slab.tile_w} positions of a plane, walking {length} along depth"
    return Plan(KERNEL, why, (main, *sums.launches), sums.bytes, f"{tile}, {splits} parts", sums.regions)


def _constants(tiling: Tiling) -> Constants:
    problem, inputs = tiling.problem, tiling.inputs
    d, h, w = axes = problem.geometry.axes
    first, last = tiling.shifts
    return (
        ("Scalar", SCALARS[problem.dtype]),
        ("kGroups", problem.geometry.groups),
        ("kIns", problem.geometry.in_per_group),
        ("kOuts", problem.geometry.out_per_group),
        ("kGroupsOfBlock", inputs.channels // inputs.group),
        *block_constants(tiling.gradients),
        ("kRepeats", inputs.repeats),
        ("kGrainX", inputs.grain),
        ("kPiecesX", inputs.pieces),
        ("kPieceStrideX", inputs.piece_stride),
        ("kSkewX", inputs.skew),
        ("kChannelSkewX", inputs.channel_skew),
        *axis_constants(axes, "kernel", "stride"),
        *axis_constants((h, w), "dilation", "padding"),
        ("kSpanH", tiling.gradients.span_h),
        ("kSpanW", tiling.gradients.span_w),
        ("kShiftD", tuple(d.shift(t) for t in range(d.kernel))),
        ("kPhaseD", tuple(d.phase(t) for t in range(d.kernel))),
        ("kFirstShift", first),
        ("kLastShift", last),
        ("kBias", problem.bias),
        ("kOwnH", tuple(int(h.is_own(t)) for t in range(h.kernel))),
        ("kOwnW", tuple(int(w.is_own(t)) for t in range(w.kernel))),
    )
