"""Plans depthwise_tiles.cuh: forward pass and input gradient of depthwise layers, a tile of a plane per thread.

Sums are added in exact float32 arithmetic, for all types but float64. The compile-time constants depend on the layer,
the memory format, and the tile of a block. A model of instructions and bytes chooses the tile among a few of the
layer (`planning/repertoire.py`), so that most new volumes use a kernel that is already compiled.
"""

from __future__ import annotations

from collections import Counter
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
    BANKS,
    BARRIERS,
    COPY,
    L2,
    PIECE_BYTES,
    SECTOR,
    SMALL_STORE,
    WARP,
    WARPS,
    Slab,
    block_constants,
    grains,
    resident,
    shifted,
    sides,
)

HAS_EPILOGUE = True
PASSES = (Pass.FORWARD, Pass.INPUT_GRAD)  # passes that this family computes
# The forms of builds: offers of their own, with rates of their own.
KERNEL = "depthwise_tiles"
PAIRS = "depthwise_pairs"  # threads have two neighbouring channels of channels-last tensors
BY_ROWS = "depthwise_rows"  # threads take one row of taps after another
GATHERED = "depthwise_gathered"  # outputs of contiguous tensors leave as runs of whole lines
MAX_REGISTERS = 240  # estimated registers per thread
MOST_PLANE_TAPS = 64  # weights of one tap along depth, which are in registers
MOST_PER_GROUP = 16  # channels of a group on either side
MOST_TERMS = 1024  # products that are added to one sum, which bounds its rounding error
MOST_PRODUCTS = 8192  # multiply-adds of the unrolled code
# Multiply-adds of the unrolled code of a plane and a tap for two channels of a thread: 16 KB of instructions.
MOST_OWN_PRODUCTS = 1000
TILES = ((1, 4), (2, 4), (4, 4), (1, 8), (2, 8), (4, 8), (1, 16))  # candidates for positions of a thread along h, w
ROWS = ((1, 4), (1, 8), (2, 8), (1, 16))  # the candidates of threads that take one row of taps after another
MANY_TAPS = 250  # taps whose products with a tile of 16 positions are 4000 instructions, 64 KB
FINALISTS = 8  # tilings that are compared at several lengths along depth
# Warps of a multiprocessor that hide the latency of loads of single words: with 8 of them, measured times of
# channels-last layers in 16 bits are 1.7 times the cycles that were counted, with 12 and more and vectors 1.1 times.
PAIR_WARPS = 12
# Instructions of builds that gather whole lines, counted in compiled kernels: for the outputs of a plane, for a line
# of a thread beside its stores to shared memory, for a channel's run, and for a vector of 16 bytes of it.
PLANE_INSTRUCTIONS = 50
LINE_INSTRUCTIONS = 6
RUN_INSTRUCTIONS = 35
VECTOR_INSTRUCTIONS = 4
THREADS = 256  # the most threads of a block
FEW_THREADS = 128  # blocks of contiguous tensors with fewer threads may have several channels
CHANNELS = 8, 16, 32  # candidates for the channels of a block if channels are neighbours in memory


@dataclass(frozen=True)
class Tiling:
    """Describes the tiles of a block and counts what they cost."""

    side: Side
    slab: Slab
    stored: int = 1  # neighbouring outputs that a thread stores at once, if it stores its own
    form: str = KERNEL

    @property
    def by_rows(self) -> bool:
        return self.form == BY_ROWS

    @property
    def gathers(self) -> bool:
        return self.form == GATHERED

    @property
    def own(self) -> int:
        """Neighbouring channels of a thread."""
        return self.slab.own

    @property
    def window(self) -> int:
        """Positions along depth whose sums a thread has; 1 if the ring holds all planes of a position."""
        return _window(self.side.gathers[0])

    @property
    def active(self) -> int:
        """Threads of a block that have a tile."""
        return self.slab.tiles_h * self.slab.tiles_w * self.slab.threads

    @cached_property
    def threads(self) -> int:
        return -(-self.active // WARP) * WARP

    @property
    def plane_taps(self) -> int:
        return prod(self.side.problem.geometry.kernel[1:])

    @property
    def sums(self) -> int:
        _, h, w = self.side.gathers
        return self.slab.tile_h * self.slab.tile_w * h.phases * w.phases * self.own

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
        if self.own > 1:  # rows of weights are loaded where the first row of the tile needs them
            live = weights * min(self.slab.tile_h * self.slab.step_h, self.slab.span_h) // self.slab.span_h
            return self.sums * self.window + self.own * (live + self.slab.reads) + 36
        return self.sums * self.window + weights + 2 * self.slab.reads + 40

    @property
    def sharing(self) -> int:
        """The most taps along depth that read the same plane of x for a window of positions."""
        return -(-self.side.problem.geometry.kernel[0] // self.side.gathers[0].input_step)

    @property
    def ring(self) -> int:
        """Planes in shared memory."""
        depth = self.side.gathers[0]
        if self.window > 1:
            return 1 if self.slab.raw else 2
        return _span(depth) + depth.input_step

    @cached_property
    def shared_bytes(self) -> int:
        kernel_d, kernel_h, kernel_w = self.side.problem.geometry.kernel
        row = kernel_w if self.slab.last or not self.by_rows else -(-kernel_w // 4) * 4
        pitch = kernel_h * row if self.slab.last else -(-kernel_h * row // 4) * 4
        weights = 4 * self.slab.owned * self.side.reduced * kernel_d * pitch
        planes = self.ring * self.slab.bytes + self.slab.raw_bytes
        return planes + weights + (self.runs_bytes if self.gathers else 0)

    @property
    def line(self) -> int:
        """Neighbouring outputs of a thread."""
        return self.slab.tile_w * self.side.gathers[2].phases

    @property
    def run_bytes(self) -> int:
        """Bytes of shared memory for the outputs of a plane of a channel, as whole lines."""
        lines = self.slab.tiles_h * self.slab.tile_h * self.side.gathers[1].phases
        elements = lines * self.line * self.slab.tiles_w
        return -(-elements * self.slab.item // PIECE_BYTES) * PIECE_BYTES + PIECE_BYTES

    @property
    def runs_bytes(self) -> int:
        """Bytes of shared memory for the runs of all channels, with what threads load behind the last of them."""
        vectors = -(-self.run_bytes // PIECE_BYTES // self.threads) * self.threads + 1
        return (self.slab.threads - 1) * self.run_bytes + vectors * PIECE_BYTES

    @property
    def aligned(self) -> bool:
        """Tells whether every line of y begins at a multiple of 16 bytes."""
        bounds = (self.side.y_size[2], *self.side.y[:4])
        return not any(bound * self.slab.item % PIECE_BYTES for bound in bounds)

    @property
    def products(self) -> int:
        """Multiply-adds of a thread for a plane of x and a tap along depth."""
        return self.slab.tile_h * self.slab.tile_w * self.plane_taps * self.own

    def resident(self, device: Device) -> int:
        """Returns the blocks per multiprocessor by registers and shared memory."""
        return resident(self.threads, self.registers, self.shared_bytes, device.shared_bytes)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks along h and w, and chunks of channels."""
        _, h, w = self.side.grid
        s = self.slab
        channels = self.side.problem.geometry.groups * self.side.outs
        return -(-h // (s.tiles_h * s.tile_h)), -(-w // (s.tiles_w * s.tile_w)), -(-channels // s.owned)

    def fits(self, device: Device) -> bool:
        kernel_d, kernel_h, _ = self.side.problem.geometry.kernel
        copies = 1 if self.window == 1 else kernel_d / (kernel_h if self.by_rows else 1)
        return (
            self.slab.fits
            and self.registers <= MAX_REGISTERS
            and self.products * copies <= (MOST_PRODUCTS if self.own == 1 else MOST_OWN_PRODUCTS * copies)
            and self.shared_bytes <= device.shared_bytes
            and not (self.gathers and self.blocks[1] > 1)
        )

    @cached_property
    def tap_cycles(self) -> float:
        """Cycles of a multiprocessor for a warp's products of one plane and one tap along depth."""
        return max(self.tap_costs)

    @cached_property
    def tap_costs(self) -> tuple[float, float]:
        """Cycles of the issue slots and of shared memory for a warp's products of one plane and one tap along depth.

        With a window, the rows of a plane are read once for all taps along depth that read the plane.
        """
        s, (kernel_d, kernel_h, kernel_w) = self.slab, self.side.problem.geometry.kernel
        if self.by_rows:
            weights = kernel_h * (kernel_w if s.last else -(-kernel_w // 4))
            rows, rest = kernel_h * s.tile_h, kernel_h * 12
        else:
            weights = self.plane_taps if s.last else -(-self.plane_taps // 4)
            rows, rest = s.rows_read, 12
        sharing = 1.0 if self.window == 1 else kernel_d / self.side.gathers[0].input_step
        shared_rest = rest / sharing if self.by_rows else rest
        loads = weights * self.own  # accesses of shared memory
        issued = self.products + weights + rows * (s.vectors + s.conversions) / sharing + shared_rest
        return issued / 4, loads + rows * s.row_wavefronts / sharing

    @property
    def storing_cycles(self) -> float:
        """Cycles of a multiprocessor for the stores of one output, by the sectors that the stores of a warp reach."""
        item = self.slab.item
        if self.slab.last:
            return item * max(SECTOR / (self.slab.owned * item), 1) / L2
        line = self.line
        if self.gathers or self.stored == line or self.stored * item >= PIECE_BYTES:
            return item / L2
        return SMALL_STORE / self.stored * min(line * item / SECTOR, 1)

    @cached_property
    def plane_cycles(self) -> float:
        """Cycles of a multiprocessor for all that a block does with one position along depth."""
        kernel_d, step = self.side.problem.geometry.kernel[0], self.side.gathers[0].input_step
        products = self.side.reduced * kernel_d * self.tap_cycles * (self.threads // WARP)
        return products + step * self.fill_cycles + (sum(self.store_costs) if self.gathers else 0)

    @cached_property
    def fill_cycles(self) -> float:
        """Cycles of a multiprocessor for filling one plane of the ring."""
        return self.slab.fill_instructions(self.threads) * (self.threads // WARP) / 4

    @cached_property
    def store_costs(self) -> tuple[float, float]:
        """Cycles of the issue slots and of shared memory for the stores of a warp's outputs of a plane."""
        item = self.slab.item
        if self.own > 1:  # settings of sums, and an address and a store for both channels of an output
            return self.sums * (1 + 1 + (0.5 if item == 2 else 0)) / 4, 0.0
        if not self.gathers:
            return self.sums * (2 if item == 2 else 1.5) / 4, 0.0
        # Threads put pairs, or pieces of aligned lines, at a distance of a line each.
        width = (PIECE_BYTES if self.line * item % PIECE_BYTES == 0 else 4 * item) if self.aligned else 2 * item
        puts, moves = self.sums * item / width, self.sums * item / PIECE_BYTES
        accesses = self.accesses(width)
        settings = self.sums * (1.5 if item == 2 else 1)  # sums are set, and pairs of outputs rounded
        issued = puts + settings + PLANE_INSTRUCTIONS + LINE_INSTRUCTIONS * self.sums / self.line
        issued += RUN_INSTRUCTIONS * self.slab.threads + VECTOR_INSTRUCTIONS * moves
        return issued / 4, puts * accesses + moves * PIECE_BYTES / 4

    def accesses(self, width: int) -> int:
        """Returns the accesses of shared memory by which a warp puts as many bytes of each thread's line."""
        slab, along = self.slab, self.line * self.slab.item
        down = slab.tile_h * self.side.gathers[1].phases * self.side.y_size[2] * slab.item
        return _accesses(slab.tiles_h, slab.tiles_w, slab.last or slab.down, down, along, self.run_bytes, width)

    def cycles(self, length: int, device: Device) -> float:
        """Returns the cycles of the busiest multiprocessor if blocks compute `length` positions along depth."""
        problem, depth = self.side.problem, self.side.gathers[0]
        kernel_d, warps = problem.geometry.kernel[0], self.threads // WARP
        parts = -(-self.side.grid[0] // length)
        planes = length * depth.input_step + max(_span(depth) - depth.input_step, 0)
        taps, stored = length * self.side.reduced * kernel_d * warps, depth.phases * length * warps
        if self.gathers:  # blocks of a multiprocessor hide each other's accesses of shared memory
            both = zip(self.tap_costs, self.store_costs, strict=True)
            work = max(taps * tap + stored * store for tap, store in both)
        else:
            work = taps * self.tap_cycles + stored * self.store_costs[0]
        block = work + planes * (self.fill_cycles + 30) + 2000
        blocks = prod(self.blocks) * parts * problem.batch
        per_multiprocessor = -(-blocks // device.multiprocessors)
        resident = min(self.resident(device), per_multiprocessor)
        hiding = WARPS if self.own == 1 else PAIR_WARPS
        # Threads that have met for a plane wait less when they meet again for its outputs.
        meetings = 2 * depth.phases - 1 if self.gathers else 0
        barriers = BARRIERS * (1 + (meetings + self.slab.raw) / 4)
        arithmetic = per_multiprocessor * block * (max(1.0, hiding / (resident * warps)) + barriers / resident)
        outputs = problem.batch * problem.geometry.groups * self.side.outs * prod(self.side.y_size)
        through_l2 = blocks * planes * self.slab.traffic / L2 + outputs * self.storing_cycles
        memory = max(problem.bytes / COPY, through_l2) / device.multiprocessors
        return max(arithmetic, memory) + 0.2 * min(arithmetic, memory)

    def length(self, device: Device) -> int:
        """Returns the positions along depth per block that take the fewest cycles."""
        depth = self.side.grid[0]
        lengths = sorted({-(-depth // parts) for parts in range(1, min(depth, 16) + 1)})
        return min(lengths, key=lambda length: self.cycles(length, device))


@lru_cache(maxsize=65536)
def _accesses(tiles_h: int, tiles_w: int, first_h: bool, down: int, along: int, run_bytes: int, width: int) -> int:
    """Returns the accesses of shared memory of a warp whose threads each store `width` bytes.

    Tiles are `down` and `along` bytes apart, and numbered along h first with `first_h`. Channels are `run_bytes`
    apart.
    """
    tiles, together = tiles_h * tiles_w, 4 * WARP // width
    found = 0
    for first in range(0, WARP, together):
        starts = set()
        for thread in range(first, first + together):
            channel, tile = divmod(thread, tiles)
            h, w = (tile % tiles_h, tile // tiles_h) if first_h else divmod(tile, tiles_w)
            starts.add((channel * run_bytes + h * down + w * along) // width)
        found += max(Counter(start % (4 * BANKS // width) for start in starts).values())
    return found


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


def _shifts(side: Side, grain: int) -> bool:
    """Tells whether planes of x arrive as they lie in memory: each is then shifted once, and used once."""
    return _window(side.gathers[0]) > 1 and shifted(side.problem, side.x, grain)


def _candidates(side: Side, device: Device, form: str) -> list[Tiling]:
    problem = side.problem
    _, h, w = side.gathers
    span_h, span_w = _span(h), _span(w)
    last, groups = is_channels_last(side.x), problem.geometry.groups
    grains_x = grains(problem, side.x, side.x_size[2], groups * side.reduced)
    found = []
    for tile_h, tile_w in ROWS if form == BY_ROWS else TILES:
        counts = sides(-(-side.grid[1] // tile_h)), sides(-(-side.grid[2] // tile_w))
        for tiles_h, tiles_w in product(*counts):
            if form == GATHERED and tiles_w * tile_w < side.grid[2]:  # a block has whole lines
                continue
            for count in _channels(last, groups, side, tiles_h * tiles_w, form):
                slabs = [
                    Slab(last, problem.item_bytes, count * side.reduced, tiles_h, tiles_w, tile_h, tile_w,
                         h.input_step, w.input_step, span_h, span_w, w.reach[0], grain,
                         readers=(0,) * side.outs, group=side.reduced)
                    for grain in grains_x
                ]  # fmt: skip
                if form == PAIRS:
                    slabs = [replace(slab, own=2) for slab in slabs]
                if form == GATHERED and _shifts(side, grains_x[0]):
                    slabs = [replace(slabs[0], grain=1, raw=True)]
                if form == GATHERED:
                    slabs += [replace(slab, down=True) for slab in slabs]
                tilings = [_with_stores(Tiling(side, slab, 1, form)) for slab in slabs]
                tilings = [tiling for tiling in tilings if tiling.fits(device)]
                found += sorted(tilings, key=lambda tiling: tiling.plane_cycles)[:1]
    return found


def _channels(last: bool, groups: int, side: Side, tiles: int, form: str) -> list[int]:
    """Returns candidates for the groups of a block with this many tiles."""
    own = 2 if form == PAIRS else 1
    if tiles * side.outs > THREADS * own:
        return []
    if last:
        counts = [-(-n * own // side.outs) for n in CHANNELS]
        return [
            n
            for n in dict.fromkeys(counts)
            if n * side.outs * tiles <= THREADS * own and (n < 2 * groups or n == counts[0])
        ]
    return sorted({1, max(1, min(groups, FEW_THREADS // (tiles * side.outs)))})


Choice = tuple[Slab, int]  # the slab of a block, and the neighbouring outputs that a thread stores at once
_repertoire = Repertoire[tuple[object, ...], tuple[int, Triple], Choice]()


def forget() -> None:
    """Forgets the first volume of every layer, so that the next volume counts as the first."""
    _own.cache_clear()
    _repertoire.forget()


@lru_cache(maxsize=1024)
def _own(problem: Problem, device: Device, form: str) -> Choice | None:
    """Returns the choice with the fewest cycles by the model for this volume, or None if none fits."""
    found = _candidates(Side.of(problem), device, form)
    nominal = -(-problem.input_size[0] // 3)
    found = sorted(found, key=lambda tiling: tiling.cycles(nominal, device))[:FINALISTS]
    found = [replace(tiling, slab=tiling.slab.settled()) for tiling in found]
    found = [tiling for tiling in found if tiling.fits(device)]
    best = min(found, key=lambda tiling: tiling.cycles(tiling.length(device), device), default=None)
    return None if best is None else (best.slab, best.stored)


def _of_choice(problem: Problem, device: Device, choice: Choice, form: str) -> Tiling | None:
    """Returns the tiling of a choice with copies and stores as wide as this volume's lines allow, or None."""
    side, (slab, stored) = Side.of(problem), choice
    if form == GATHERED and slab.last:  # typical volumes of single positions may have channels as neighbours
        return None
    widest = grains(problem, side.x, side.x_size[2], problem.geometry.groups * side.reduced)[0]
    raw = form == GATHERED and _shifts(side, widest)
    grain = 1 if raw else min(slab.grain, widest)
    tiling = Tiling(side, replace(slab, grain=grain, raw=raw), 1, form)
    return replace(tiling, stored=min(stored, _stored(tiling))) if tiling.fits(device) else None


def _tiling(problem: Problem, device: Device, form: str) -> Tiling | None:
    """Returns the tiling for a volume, one of a few of its layer, or None if none fits."""
    types = problem.dtype, problem.activation, is_channels_last(problem.input), is_channels_last(problem.output)

    def cost(choice: Choice, _: float) -> float:
        tiling = _of_choice(problem, device, choice, form)
        return inf if tiling is None else tiling.cycles(tiling.length(device), device)

    choice = _repertoire.choose(
        (problem.which, problem.geometry, *types, device, form),
        (problem.batch, problem.input_size),
        lambda: _own(problem, device, form),
        lambda: (found for each in typical_problems(problem) if (found := _own(each, device, form)) is not None),
        cost,
    )
    return None if choice is None else _of_choice(problem, device, choice, form)


def why_not(problem: Problem, device: Device, form: str = KERNEL) -> str | None:
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
    if form == PAIRS and (max(side.reduced, side.outs) > 1 or not _in_pairs(side)):
        return "pairs of channels are no aligned neighbours in memory"
    if form == GATHERED and (is_channels_last(side.x) or side.y[4] != 1 or side.y[3] != side.y_size[2]):
        return "lines of a channel are not a run of memory"
    if form == BY_ROWS and _window(side.gathers[0]) == 1:
        return "positions along depth have all their planes in shared memory"
    if form == BY_ROWS and g.taps < MANY_TAPS:
        return "the products of all taps are few instructions"
    if _tiling(problem, device, form) is None:
        return "no tile fits registers and shared memory"
    return None


def _in_pairs(side: Side) -> bool:
    """Tells whether an even number of channels are neighbours in memory, in both tensors, and begin at pairs."""
    tensors = side.x, side.y
    return side.problem.geometry.groups % 2 == 0 and all(
        is_channels_last(strides) and not any(strides[i] % 2 for i in (0, 2, 3, 4)) for strides in tensors
    )


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    answers: list[Answer] = []
    for form, passes in ((KERNEL, PASSES), (GATHERED, PASSES), (PAIRS, PASSES), (BY_ROWS, (Pass.INPUT_GRAD,))):
        asks = partial(why_not, form=form), partial(work, form=form), partial(plan, form=form)
        answers += offers.one_by_one(passes, form, wanted, device, *asks)
    return answers


def work(problem: Problem, device: Device, form: str = KERNEL) -> Work:
    """Returns the work of the launch: cycles by the model."""
    tiling = _tiling(problem, device, form)
    cycles = inf if tiling is None else tiling.cycles(tiling.length(device), device)
    return Work(1, cycles, tensor_cores=False)


def plan(problem: Problem, device: Device, form: str = KERNEL) -> Plan:
    tiling = _tiling(problem, device, form)
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
    return Plan(form, "multiply-adds, planes in shared memory", (launch,), tile=tile)


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
        ("kOwn", slab.own),
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
        ("kGathers", tiling.gathers),
        ("kDown", slab.last or slab.down),
        ("kAlignedLines", tiling.gathers and tiling.aligned),
        ("kTail", side.y_size[2] % tiling.line if tiling.gathers else 0),
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
