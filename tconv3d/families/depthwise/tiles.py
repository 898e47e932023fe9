"""Plans depthwise_tiles.cuh: forward pass and input gradient of depthwise layers, a tile of a plane per thread.

Sums are added in exact float32 arithmetic, for all types but float64. The compile-time constants depend on the layer,
the memory format, and the tile of a block. A model of instructions and bytes chooses the tile among a few of the
layer (`planning/repertoire.py`), so that most new volumes use a kernel that is already compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from math import inf, prod

from ...planning import offers
from ...planning.calibration import Work
from ...planning.geometry import Axis, Gather, Triple
from ...planning.launch import Constants, axis_constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, is_channels_last
from ...planning.repertoire import Repertoire, typical_problems
from ...planning.scalars import SCALARS
from ...planning.side import Side
from .arguments import DEPTHWISE_TILES
from .slabs import (
    BARRIERS,
    COPY,
    L2,
    PIECE_BYTES,
    SECTOR,
    WARP,
    WARPS,
    Slab,
    block_constants,
    grains,
    resident,
    sides,
)

HAS_EPILOGUE = True
MAX_REGISTERS = 240  # estimated registers per thread
MOST_PLANE_TAPS = 64  # weights of one tap along depth, which are in registers
MOST_PER_GROUP = 16  # channels of a group on either side
MOST_TERMS = 1024  # products that are added to one sum, which bounds its rounding error
MOST_PRODUCTS = 8192  # multiply-adds of the unrolled code
TILES = ((1, 4), (2, 4), (4, 4), (1, 8), (2, 8), (4, 8), (1, 16))  # candidates for positions of a thread along h, w
ROWS = ((1, 4), (1, 8), (2, 8), (1, 16))  # the candidates of threads that take one row of taps after another
MANY_TAPS = 250  # taps whose products with a tile of 16 positions are 4000 instructions, 64 KB
FINALISTS = 8  # tilings that are compared at several lengths along depth
# Cycles of a multiprocessor for a store of fewer than 16 bytes to a sector of its own: an H200 takes 2.26 ms for 261
# million floats that threads store one by one.
SMALL_STORE = 2.0
THREADS = 256  # the most threads of a block
FEW_THREADS = 128  # blocks of contiguous tensors with fewer threads may have several channels
CHANNELS = 8, 16, 32  # candidates for the channels of a block if channels are neighbours in memory


@dataclass(frozen=True)
class Tiling:
    """Describes the tiles of a block and counts what they cost."""

    side: Side
    slab: Slab
    stored: int = 1  # neighbouring outputs that a thread stores at once
    by_rows: bool = False  # a thread takes one row of taps after another

    @property
    def window(self) -> int:
        """Positions along depth whose sums a thread has; 1 if the ring holds all planes of a position."""
        return _window(self.side.gathers[0])

    @property
    def active(self) -> int:
        """Threads of a block that have a tile."""
        return self.slab.tiles_h * self.slab.tiles_w * self.slab.threads

    @property
    def threads(self) -> int:
        return -(-self.active // WARP) * WARP

    @property
    def plane_taps(self) -> int:
        return prod(self.side.problem.geometry.kernel[1:])

    @property
    def sums(self) -> int:
        _, h, w = self.side.gathers
        return self.slab.tile_h * self.slab.tile_w * h.phases * w.phases

    @property
    def registers(self) -> int:
        """An estimate of the registers per thread.

        The compiler merges the loops over rows of the taps that read the same plane, so that weights of several taps
        are in registers at a time.
        """
        if self.by_rows:
            return (
                self.sums * self.window + self.sharing * self.side.problem.geometry.kernel[2] + self.slab.reads + 24
            )
        weights = self.plane_taps * (2 if self.window > 1 else 1)
        return self.sums * self.window + weights + 2 * self.slab.reads + 40

    @property
    def sharing(self) -> int:
        """The most taps along depth that read the same plane of x for a window of positions."""
        return -(-self.side.problem.geometry.kernel[0] // self.side.gathers[0].input_step)

    @property
    def ring(self) -> int:
        """Planes in shared memory."""
        depth = self.side.gathers[0]
        return 2 if self.window > 1 else _span(depth) + depth.input_step

    @property
    def shared_bytes(self) -> int:
        kernel_d, kernel_h, kernel_w = self.side.problem.geometry.kernel
        row = kernel_w if self.slab.last or not self.by_rows else -(-kernel_w // 4) * 4
        pitch = kernel_h * row if self.slab.last else -(-kernel_h * row // 4) * 4
        return self.ring * self.slab.bytes + 4 * self.slab.threads * self.side.reduced * kernel_d * pitch

    @property
    def products(self) -> int:
        """Multiply-adds of a thread for a plane of x and a tap along depth."""
        return self.slab.tile_h * self.slab.tile_w * self.plane_taps

    def resident(self, device: Device) -> int:
        """Returns the blocks per multiprocessor by registers and shared memory."""
        return resident(self.threads, self.registers, self.shared_bytes, device.shared_bytes)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks along h and w, and chunks of channels."""
        _, h, w = self.side.grid
        s = self.slab
        channels = self.side.problem.geometry.groups * self.side.outs
        return -(-h // (s.tiles_h * s.tile_h)), -(-w // (s.tiles_w * s.tile_w)), -(-channels // s.threads)

    def fits(self, device: Device) -> bool:
        kernel_d, kernel_h, _ = self.side.problem.geometry.kernel
        copies = 1 if self.window == 1 else kernel_d / (kernel_h if self.by_rows else 1)
        return (
            self.slab.fits
            and self.registers <= MAX_REGISTERS
            and self.products * copies <= MOST_PRODUCTS
            and self.shared_bytes <= device.shared_bytes
        )

    @cached_property
    def tap_cycles(self) -> float:
        """Cycles of a multiprocessor for a warp's products of one plane and one tap along depth.

        With a window, the rows of a plane are read once for all taps along depth that read the plane.
        """
        s, taps = self.slab, self.plane_taps
        if self.by_rows:
            _, kernel_h, kernel_w = self.side.problem.geometry.kernel
            weights = kernel_h * (kernel_w if s.last else -(-kernel_w // 4))
            rows, sharing = (
                kernel_h * s.tile_h,
                self.side.problem.geometry.kernel[0] / self.side.gathers[0].input_step,
            )
            issued = self.products + weights + (rows * (s.vectors + s.conversions) + kernel_h * 12) / sharing
            return max(issued / 4, weights + rows * s.row_wavefronts / sharing)
        weights = taps if s.last else -(-taps // 4)
        sharing = 1.0 if self.window == 1 else self.side.problem.geometry.kernel[0] / self.side.gathers[0].input_step
        issued = self.products + weights + s.rows_read * (s.vectors + s.conversions) / sharing + 12
        return max(issued / 4, weights + s.rows_read * s.row_wavefronts / sharing)

    @property
    def storing_cycles(self) -> float:
        """Cycles of a multiprocessor for the stores of one output, by the sectors that the stores of a warp reach."""
        item = self.slab.item
        if self.slab.last:
            return item * max(SECTOR / (self.slab.threads * item), 1) / L2
        line = self.slab.tile_w * self.side.gathers[2].phases  # neighbouring outputs of a thread
        if self.stored == line or self.stored * item >= PIECE_BYTES:
            return item / L2
        return SMALL_STORE / self.stored * min(line * item / SECTOR, 1)

    @property
    def plane_cycles(self) -> float:
        """Cycles of a multiprocessor for all that a block does with one position along depth."""
        kernel_d, step = self.side.problem.geometry.kernel[0], self.side.gathers[0].input_step
        products = self.side.reduced * kernel_d * self.tap_cycles * (self.threads // WARP)
        return products + step * self.fill_cycles

    @property
    def fill_cycles(self) -> float:
        """Cycles of a multiprocessor for filling one plane of the ring."""
        return self.slab.fill_instructions(self.threads) * (self.threads // WARP) / 4

    def cycles(self, length: int, device: Device) -> float:
        """Returns the cycles of the busiest multiprocessor if blocks compute `length` positions along depth."""
        problem, depth = self.side.problem, self.side.gathers[0]
        kernel_d, warps = problem.geometry.kernel[0], self.threads // WARP
        parts = -(-self.side.grid[0] // length)
        planes = length * depth.input_step + max(_span(depth) - depth.input_step, 0)
        stores = self.sums * depth.phases * length * (2 if problem.item_bytes == 2 else 1.5) * warps / 4
        products = length * self.side.reduced * kernel_d * self.tap_cycles * warps
        block = products + planes * (self.fill_cycles + 30) + stores + 2000
        blocks = prod(self.blocks) * parts * problem.batch
        per_multiprocessor = -(-blocks // device.multiprocessors)
        resident = min(self.resident(device), per_multiprocessor)
        arithmetic = per_multiprocessor * block * (max(1.0, WARPS / (resident * warps)) + BARRIERS / resident)
        outputs = problem.batch * problem.geometry.groups * self.side.outs * prod(self.side.y_size)
        through_l2 = blocks * planes * self.slab.traffic / L2 + outputs * self.storing_cycles
        memory = max(problem.bytes / COPY, through_l2) / device.multiprocessors
        return max(arithmetic, memory) + 0.2 * min(arithmetic, memory)

    def length(self, device: Device) -> int:
        """Returns the positions along depth per block that take the fewest cycles."""
        depth = self.side.grid[0]
        lengths = sorted({-(-depth // parts) for parts in range(1, min(depth, 16) + 1)})
        return min(lengths, key=lambda length: self.cycles(length, device))


def _span(gather: Gather) -> int:
    """Returns the number of elements from the first to the last one that a position reads."""
    return gather.reach[1] - gather.reach[0] + 1


def _window(depth: Gather) -> int:
    """Returns the positions along depth that a plane feeds, or 1 if the ring holds all planes of a position."""
    first, last = _lags(depth)
    return 1 if depth.input_step == 1 else last - first + 1


def _lags(depth: Gather) -> tuple[int, int]:
    """Returns the least and the greatest number of steps from a position to the planes that feed it."""
    return depth.reach[0] // depth.input_step, depth.reach[1] // depth.input_step


def _candidates(side: Side, device: Device, by_rows: bool) -> list[Tiling]:
    problem = side.problem
    _, h, w = side.gathers
    span_h, span_w = _span(h), _span(w)
    last, groups = is_channels_last(side.x), problem.geometry.groups
    grains_x = grains(problem, side.x, side.x_size[2], groups * side.reduced)
    found = []
    for tile_h, tile_w in ROWS if by_rows else TILES:
        counts = sides(-(-side.grid[1] // tile_h)), sides(-(-side.grid[2] // tile_w))
        for tiles_h, tiles_w in product(*counts):
            for count in _channels(last, groups, side, tiles_h * tiles_w):
                slabs = [
                    Slab(last, problem.item_bytes, count * side.reduced, tiles_h, tiles_w, tile_h, tile_w,
                         h.input_step, w.input_step, span_h, span_w, w.reach[0], grain,
                         readers=(0,) * side.outs, group=side.reduced)
                    for grain in grains_x
                ]  # fmt: skip
                tilings = [_with_stores(Tiling(side, slab, 1, by_rows)) for slab in slabs]
                tilings = [tiling for tiling in tilings if tiling.fits(device)]
                found += sorted(tilings, key=lambda tiling: tiling.plane_cycles)[:1]
    return found


def _channels(last: bool, groups: int, side: Side, tiles: int) -> list[int]:
    """Returns candidates for the groups of a block with this many tiles."""
    if tiles * side.outs > THREADS:
        return []
    if last:
        counts = [-(-n // side.outs) for n in CHANNELS]
        return [
            n
            for n in dict.fromkeys(counts)
            if n * side.outs * tiles <= THREADS and (n < 2 * groups or n == counts[0])
        ]
    return sorted({1, max(1, min(groups, FEW_THREADS // (tiles * side.outs)))})


Choice = tuple[Slab, int]  # the slab of a block, and the neighbouring outputs that a thread stores at once
_repertoire = Repertoire[tuple[object, ...], tuple[int, Triple], Choice]()


def forget() -> None:
    """Forgets the first volume of every layer, so that the next volume counts as the first."""
    _own.cache_clear()
    _repertoire.forget()


@lru_cache(maxsize=1024)
def _own(problem: Problem, device: Device, by_rows: bool) -> Choice | None:
    """Returns the choice with the fewest cycles by the model for this volume, or None if none fits."""
    found = _candidates(Side.of(problem), device, by_rows)
    nominal = -(-problem.input_size[0] // 3)
    found = sorted(found, key=lambda tiling: tiling.cycles(nominal, device))[:FINALISTS]
    found = [replace(tiling, slab=tiling.slab.settled()) for tiling in found]
    found = [tiling for tiling in found if tiling.fits(device)]
    best = min(found, key=lambda tiling: tiling.cycles(tiling.length(device), device), default=None)
    return None if best is None else (best.slab, best.stored)


def _of_choice(problem: Problem, device: Device, choice: Choice, by_rows: bool) -> Tiling | None:
    """Returns the tiling of a choice with copies and stores as wide as this volume's lines allow, or None."""
    side, (slab, stored) = Side.of(problem), choice
    widest = grains(problem, side.x, side.x_size[2], problem.geometry.groups * side.reduced)[0]
    tiling = Tiling(side, replace(slab, grain=min(slab.grain, widest)), 1, by_rows)
    return replace(tiling, stored=min(stored, _stored(tiling))) if tiling.fits(device) else None


def _tiling(problem: Problem, device: Device, by_rows: bool = False) -> Tiling | None:
    """Returns the tiling for a volume, one of a few of its layer, or None if none fits."""
    types = problem.dtype, problem.activation, is_channels_last(problem.input), is_channels_last(problem.output)

    def cost(choice: Choice, _: float) -> float:
        tiling = _of_choice(problem, device, choice, by_rows)
        return inf if tiling is None else tiling.cycles(tiling.length(device), device)

    choice = _repertoire.choose(
        (problem.which, problem.geometry, *types, device, by_rows),
        (problem.batch, problem.input_size),
        lambda: _own(problem, device, by_rows),
        lambda: (found for each in typical_problems(problem) if (found := _own(each, device, by_rows)) is not None),
        cost,
    )
    return None if choice is None else _of_choice(problem, device, choice, by_rows)


def why_not(problem: Problem, device: Device, by_rows: bool = False) -> str | None:
    g = problem.geometry
    if problem.which not in PASSES:
        return "it computes forward pass and input gradient"
    if g.in_per_group > MOST_PER_GROUP or g.out_per_group > MOST_PER_GROUP:
        return f"more than {MOST_PER_GROUP} channels per group"
    if problem.dtype == "float64":
        return "it adds up in float32"
    if prod(g.kernel[1:]) > MOST_PLANE_TAPS:
        return "the taps of a plane do not fit the registers"
    side = Side.of(problem)
    if any(sum(gather.count) == 0 for gather in side.gathers):
        return "no tap reaches the output"
    if side.terms > MOST_TERMS or (side.chained and side.reduced > 1):  # PyTorch adds depthwise sums term by term
        return f"sums of {side.terms} products need partial sums"
    if side.positions * g.groups * side.outs >= 2**31 or max(side.x_size[2], side.y_size[2]) >= 2**28:
        return "the volume is too large"
    if by_rows and _window(side.gathers[0]) == 1:
        return "positions along depth have all their planes in shared memory"
    if by_rows and g.taps < MANY_TAPS:
        return "the products of all taps are few instructions"
    if _tiling(problem, device, by_rows) is None:
        return "no tile fits registers and shared memory"
    return None


PASSES = (Pass.FORWARD, Pass.INPUT_GRAD)  # passes that this family computes


KERNEL = "depthwise_tiles"
BY_ROWS = "depthwise_rows"  # threads take one row of taps after another


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    answers = offers.one_by_one(PASSES, KERNEL, wanted, device, why_not, work, plan)
    asks = partial(why_not, by_rows=True), partial(work, by_rows=True), partial(plan, by_rows=True)
    return [*answers, *offers.one_by_one((Pass.INPUT_GRAD,), BY_ROWS, wanted, device, *asks)]


def work(problem: Problem, device: Device, by_rows: bool = False) -> Work:
    """Returns the work of the launch: cycles by the model."""
    tiling = _tiling(problem, device, by_rows)
    cycles = inf if tiling is None else tiling.cycles(tiling.length(device), device)
    return Work(1, cycles, tensor_cores=False)


def plan(problem: Problem, device: Device, by_rows: bool = False) -> Plan:
    tiling = _tiling(problem, device, by_rows)
    assert tiling is not None, problem
    side, slab, length = tiling.side, tiling.slab, tiling.length(device)
    parts = -(-side.grid[0] // length)
    by_h, by_w, chunks = tiling.blocks
    launch = DEPTHWISE_TILES.launch(
        problem.batch * parts * by_h * by_w * chunks,
        tiling.threads,
        _constants(tiling),
        side.operands,
        shared_bytes=tiling.shared_bytes,
        min_blocks=tiling.resident(device),
        **side.sizes,
        grid=side.grid,
        length=length,
        by_w=by_w,
        by_h=by_h,
        by_parts=parts,
    )
    tile = f"each thread {slab.tile_h} x {slab.tile_w} positions of a plane, walking {length} along depth"
    return Plan(BY_ROWS if by_rows else KERNEL, "multiply-adds, planes in shared memory", (launch,), tile=tile)


def _with_stores(tiling: Tiling) -> Tiling:
    return replace(tiling, stored=_stored(tiling))


def _stored(tiling: Tiling) -> int:
    """Returns the most neighbouring outputs that a thread can store at once."""
    side, item = tiling.side, tiling.slab.item
    if side.y[4] != 1:
        return 1
    line = tiling.slab.tile_w * side.gathers[2].phases
    bounds = (line, side.y_size[2], *side.y[:4])
    return next(n for n in (16 // item, 8 // item, 4 // item, 1) if n >= 1 and not any(b % n for b in bounds))


def _constants(tiling: Tiling) -> Constants:
    side, slab, problem = tiling.side, tiling.slab, tiling.side.problem
    d, h, w = side.gathers
    _, axis_h, axis_w = problem.geometry.axes
    channels = problem.geometry.groups * side.outs
    return (
        ("Scalar", SCALARS[problem.dtype]),
        ("Epilogue", problem.activation),
        ("kOutChannels", channels),
        ("kReduced", side.reduced),
        ("kOuts", side.outs),
        ("kChannelsX", slab.channels),
        *block_constants(slab),
        ("kStored", tiling.stored),
        ("kStepY", side.y[4] if side.y[4] in (1, channels) else 0),
        *axis_constants(problem.geometry.axes, "kernel"),
        *axis_constants(side.gathers, "input_step", "phases"),
        *((f"kMin{n}", gather.reach[0]) for n, gather in zip("DHW", side.gathers, strict=True)),
        *(
            (f"kSpan{n}", gather.reach[1] - gather.reach[0] + 1)
            for n, gather in zip("DHW", side.gathers, strict=True)
        ),
        *_tap_tables("H", axis_h, h),
        *_tap_tables("W", axis_w, w),
        ("kCountD", d.count),
        ("kFirstTapD", d.first_tap),
        ("kTapStepD", d.tap_step),
        ("kFirstOffsetD", d.first_offset),
        ("kOffsetStepD", d.offset_step),
        ("kByRows", tiling.by_rows),
        ("kWindow", tiling.window),
        ("kFirstLag", _lags(d)[0]),
        ("kLastLag", _lags(d)[1]),
        ("kTapPlane", tuple(d.offset(0, j) % d.input_step for j in range(d.count[0])) or (0,)),
        ("kTapLag", tuple(d.offset(0, j) // d.input_step for j in range(d.count[0])) or (0,)),
    )


def _tap_tables(letter: str, axis: Axis, gather: Gather) -> Constants:
    """Returns for each tap its phase, and the element that it reads, counted from the first that position 0 reads."""
    found = {
        gather.tap(f, j): (f, gather.offset(f, j) - gather.reach[0])
        for f, count in enumerate(gather.count)
        for j in range(count)
    }
    phases, reads = zip(*(found[tap] for tap in range(axis.kernel)), strict=True)
    return (f"kTapPhase{letter}", phases), (f"kRead{letter}", reads)
