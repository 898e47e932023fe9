"""Plans depthwise_tiles_weight_grad.cuh: the weight gradient of depthwise layers, a tile of a plane per thread.

Sums are added in float32, for all types but float64. The compile-time constants depend on the layer, the memory
format, and the tile of a block. A model of instructions and bytes chooses the tile among a few of the layer
(`planning/repertoire.py`), so that most new volumes use a kernel that is already compiled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from math import inf, prod

from ...planning import offers
from ...planning.calibration import Work
from ...planning.geometry import Axis, Triple
from ...planning.launch import Constants, axis_constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, is_channels_last
from ...planning.repertoire import Repertoire, typical_problems
from ...planning.scalars import SCALARS
from ...planning.sums import BIAS_PARTS, stored_type, unsplit, weight_sums
from .arguments import DEPTHWISE_TILES_WEIGHT_GRAD
from .slabs import BARRIERS, COPY, L2, WARP, WARPS, Slab, block_constants, grains, resident, shifted, sides

MAX_REGISTERS = 200  # estimated registers per thread
MOST_PAIRS = 64  # pairs of a channel of x and a channel of dy in a group
MOST_THREADS = 512  # per block
MOST_PLANE_TAPS = 64  # sums of a thread
MOST_PRODUCTS = 4096  # multiply-adds of the unrolled code
MOST_TERMS = 768  # products that a thread adds to one sum, which bounds the rounding error of the sum
TILES = tuple(product((2, 3, 4, 6), (4, 8)))  # candidates for the positions of a thread along h and w
# Builds whose threads have several taps along depth, and read each row of dy once for all of them.
MEMBERS = 2, 3  # candidates for these taps
SHARED_TILES = (4, 4), (6, 4), (2, 8), (4, 8)  # candidates for the positions of a thread
SHARED_REPEATS = 1, 2  # candidates for the tiles of a thread
MOST_SHARED_PRODUCTS = 1600  # multiply-adds of the unrolled code: 28 KB of instructions
MEMBERS_REGISTERS = 24  # beside sums, a tile of x for each member and a row of dy
REPEATS = 1, 2, 4  # candidates for the tiles of a thread
CHANNELS = 8, 16, 32  # candidates for the channels of a block if channels are neighbours in memory
ADDING = 3500  # cycles of an H200 for the launch that adds the parts: 2 us
FINALISTS = 8  # tilings that are compared at several lengths along depth


@dataclass(frozen=True)
class Tiling:
    """Describes the tiles of a block and counts what they cost."""

    problem: Problem
    gradients: Slab  # planes of dy
    inputs: Slab  # planes of x
    members: int = 1  # the most taps along depth of a thread

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """Taps along depth that the same threads compute, because they use the same planes of dy."""
        return _teams(self.problem.geometry.axes[0], self.members)

    @property
    def active(self) -> int:
        """Threads of a team that have a tile."""
        return self.inputs.tiles_h * self.inputs.tiles_w * self.inputs.threads

    @property
    def lanes(self) -> int:
        """Threads of a team."""
        return -(-self.active // WARP) * WARP

    @cached_property
    def threads(self) -> int:
        return self.lanes * len(self.teams)

    @property
    def plane_taps(self) -> int:
        return prod(self.problem.geometry.kernel[1:])

    @property
    def products(self) -> int:
        """Multiply-adds of a thread for a tile and one tap along depth."""
        return self.inputs.tile_h * self.inputs.tile_w * self.plane_taps

    @property
    def registers(self) -> int:
        """An estimate of the registers per thread."""
        tile = self.inputs.tile_h * self.inputs.tile_w
        if self.members > 1:
            return self.members * (self.plane_taps + tile) + self.gradients.reads + MEMBERS_REGISTERS
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
        ring = last - first + 2 + (self.members > 1)  # and a plane of zeros
        arriving = self.gradients.raw_bytes or self.gradients.bytes
        planes = stride * (self.gradients.bytes + arriving) + ring * self.inputs.bytes
        totals = 4 * self.threads * ((self.members * self.plane_taps + self.problem.bias) | 1)
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

    @property
    def compiles(self) -> bool:
        """Tells whether a thread's tile fits pieces, registers and unrolled code, however many tiles a block has."""
        return (
            self.gradients.fits
            and self.inputs.fits
            and self.registers <= MAX_REGISTERS
            and self.members * self.products <= (MOST_PRODUCTS if self.members == 1 else MOST_SHARED_PRODUCTS)
        )

    def fits(self, device: Device) -> bool:
        return self.compiles and self.threads <= MOST_THREADS and self.shared_bytes <= device.shared_bytes

    def tile_cycles(self, members: int) -> float:
        """Cycles of a multiprocessor for a warp's products of one tile with as many taps along depth."""
        dy, x, g = self.gradients, self.inputs, self.problem.geometry
        rows = members * x.tile_h
        loads = dy.rows_read * (dy.vectors + dy.conversions) + rows * (x.vectors + x.conversions)
        own = members * x.tile_h * x.tile_w * prod(g.stride) / g.kernel[0]
        issued = members * self.products + loads + (own if self.problem.bias else 0) + 24
        return max(issued / 4, dy.rows_read * dy.row_wavefronts + rows * x.row_wavefronts)

    @cached_property
    def step_cycles(self) -> float:
        """Cycles of a multiprocessor for all that a block does with one plane of x."""
        stride = self.problem.geometry.stride[0]
        fills = self.gradients.fill_instructions(self.threads, stride) + self.inputs.fill_instructions(self.threads)
        sizes = Counter(map(len, self.teams))
        products = sum(number * self.tile_cycles(size) for size, number in sizes.items())
        return products * self.inputs.repeats * (self.lanes // WARP) + fills * (self.threads // WARP) / 4 + 40

    def cycles(self, length: int, device: Device) -> float:
        """Returns the cycles of the busiest multiprocessor if blocks have `length` planes of x."""
        problem, (first, last) = self.problem, self.shifts
        g, warps = problem.geometry, self.threads // WARP
        parts = -(-problem.input_size[0] // length)
        partly = 1 + (self.members - 1) / (2 * length)  # planes at either end that only some taps of a team use
        block = length * partly * self.step_cycles + 3000 + 4 * g.taps * self.inputs.threads / WARP
        blocks = prod(self.blocks) * parts * problem.batch
        per_multiprocessor = -(-blocks // device.multiprocessors)
        resident = min(self.resident(device), per_multiprocessor)
        arithmetic = per_multiprocessor * block * (max(1.0, WARPS / (resident * warps)) + BARRIERS / resident)
        sums = 8 * blocks * self.inputs.threads * g.taps  # bytes of partial sums, written and read
        planes = (length + last - first) * g.stride[0]
        read = blocks * (planes * self.gradients.traffic + length * self.inputs.traffic)
        memory = max((problem.bytes + sums) / COPY, (read + sums) / L2) / device.multiprocessors
        return max(arithmetic, memory) + 0.2 * min(arithmetic, memory)

    def splits(self, length: int) -> int:
        """Returns the number of partial sums if blocks have `length` planes of x."""
        by_h, by_w, _ = self.blocks
        return self.problem.batch * -(-self.problem.input_size[0] // length) * by_h * by_w

    def parts_bytes(self, length: int) -> int:
        """Returns the bytes of the partial sums."""
        g = self.problem.geometry
        weight, bias = g.in_channels * g.out_per_group * g.taps, g.out_channels if self.problem.bias else 0
        return 4 * self.splits(length) * (weight + bias)

    def length(self, device: Device) -> int:
        """Returns the planes of x per block that take the fewest cycles, or 0 if no workspace is large enough."""
        depth = self.problem.input_size[0]
        lengths = {min(-(-depth // parts), self.longest) for parts in range(1, min(depth, 16) + 1)}
        fitting = [length for length in sorted(lengths) if self.parts_bytes(length) <= device.workspace_bytes]

        def cycles(length: int) -> float:
            return self.cycles(length, device) + (ADDING if self.splits(length) > 1 else 0)

        return min(fitting, key=cycles, default=0)


@lru_cache(maxsize=256)
def _teams(axis: Axis, members: int) -> tuple[tuple[int, ...], ...]:
    """Returns the taps along depth in teams of up to `members` that use the same planes of dy."""
    teams: list[tuple[int, ...]] = []
    for phase in range(axis.stride):
        taps = [t for t in range(axis.kernel) if axis.phase(t) == phase]
        count = -(-len(taps) // members)  # teams of about equal size
        teams += [tuple(taps[len(taps) * i // count : len(taps) * (i + 1) // count]) for i in range(count)]
    return tuple(teams)


def _shifts(problem: Problem, grain: int) -> bool:
    """Tells whether planes of dy arrive as they lie in memory."""
    return shifted(problem, problem.output, grain)


def _candidates(problem: Problem, device: Device, shared: bool) -> list[Tiling]:
    _, h, w = problem.geometry.axes
    spans = tuple(axis.dilation * (axis.kernel - 1) + 1 for axis in (h, w))
    last, groups, item = is_channels_last(problem.output), problem.geometry.groups, problem.item_bytes
    g = problem.geometry
    pairs = [(i, o) for i in range(g.in_per_group) for o in range(g.out_per_group)]
    grains_x = grains(problem, problem.input, problem.input_size[2], g.in_channels)
    grains_dy = grains(problem, problem.output, problem.output_size[2], g.out_channels)
    raw = _shifts(problem, grains_dy[0])
    most = max(len(team) for team in _teams(problem.geometry.axes[0], max(MEMBERS)))
    counts = [n for n in MEMBERS if n <= most] if shared else [1]

    def tilings(
        tile: tuple[int, int], members: int, count: int, tiles: tuple[int, int], repeats: int
    ) -> list[Tiling]:
        inputs = Slab(last, item, count * g.in_per_group, *tiles, *tile, 1, 1, 1, 1, 0, grains_x[0], repeats,
                      tuple(i for i, _ in pairs), g.in_per_group)  # fmt: skip
        slabs = [
            replace(inputs, channels=count * g.out_per_group, readers=tuple(o for _, o in pairs),
                    group=g.out_per_group, step_h=h.stride, step_w=w.stride, span_h=spans[0],
                    span_w=spans[1], first_w=-w.padding, grain=grain, raw=raw)
            for grain in ([1] if raw else grains_dy)
        ]  # fmt: skip
        return [Tiling(problem, slab, inputs, members) for slab in slabs]

    found = []
    for tile, members in product(SHARED_TILES if shared else TILES, counts):
        if not last and not any(each.compiles for each in tilings(tile, members, 1, (1, 1), 1)):
            continue
        rows, columns = -(-problem.input_size[1] // tile[0]), -(-problem.input_size[2] // tile[1])
        for tiles_w, repeats in product(sides(columns), SHARED_REPEATS if shared else REPEATS):
            for tiles_h in sides(-(-rows // repeats)):
                for count in _channels(last, groups, len(pairs), tiles_h * tiles_w):
                    fitting = [
                        each
                        for each in tilings(tile, members, count, (tiles_h, tiles_w), repeats)
                        if each.fits(device)
                    ]
                    found += sorted(fitting, key=lambda tiling: tiling.step_cycles)[:1]
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


Choice = tuple[Slab, Slab, int]  # the slabs of dy and of x, and the most taps along depth of a thread
_repertoire = Repertoire[tuple[object, ...], tuple[int, Triple], Choice]()


def forget() -> None:
    """Forgets the first volume of every layer, so that the next volume counts as the first."""
    _own.cache_clear()
    _repertoire.forget()


@lru_cache(maxsize=1024)
def _own(problem: Problem, device: Device, shared: bool) -> Choice | None:
    """Returns the choice with the fewest cycles by the model for this volume, or None if none fits.

    Sums for the bias are few, so that a build without them is as good with them, unless they make it too large.
    """
    if problem.bias:
        choice = _own(replace(problem, bias=False), device, shared)
        if choice is None or _of_choice(problem, device, choice) is not None:
            return choice
    found = _candidates(problem, device, shared)

    def nominal(tiling: Tiling) -> float:
        return tiling.cycles(min(-(-problem.input_size[0] // 3), tiling.longest), device)

    found = sorted(found, key=nominal)[:FINALISTS]
    found = [
        replace(tiling, gradients=tiling.gradients.settled(), inputs=tiling.inputs.settled())
        for tiling in found
        if tiling.fits(device)
    ]
    found = [tiling for tiling in found if tiling.fits(device) and tiling.length(device) > 0]
    best = min(found, key=lambda tiling: tiling.cycles(tiling.length(device), device), default=None)
    return None if best is None else (best.gradients, best.inputs, best.members)


def _of_choice(problem: Problem, device: Device, choice: Choice) -> Tiling | None:
    """Returns the tiling of a choice with copies as wide as this volume's lines allow, or None if it does not fit."""
    gradients, inputs, members = choice
    g = problem.geometry
    if not gradients.last == is_channels_last(problem.output) == is_channels_last(problem.input):
        return None
    widest_x = grains(problem, problem.input, problem.input_size[2], g.in_channels)[0]
    widest_dy = grains(problem, problem.output, problem.output_size[2], g.out_channels)[0]
    raw = _shifts(problem, widest_dy)
    tiling = Tiling(
        problem,
        replace(gradients, grain=1 if raw else min(gradients.grain, widest_dy), raw=raw),
        replace(inputs, grain=min(inputs.grain, widest_x)),
        members,
    )
    return tiling if tiling.fits(device) and tiling.length(device) > 0 else None


def _tiling(problem: Problem, device: Device, shared: bool = False) -> Tiling | None:
    """Returns the tiling for a volume, one of a few of its layer, or None if none fits."""

    def cost(choice: Choice, _: float) -> float:
        tiling = _of_choice(problem, device, choice)
        return inf if tiling is None else tiling.cycles(tiling.length(device), device)

    choice = _repertoire.choose(
        (problem.geometry, problem.dtype, problem.bias, is_channels_last(problem.output), device, shared),
        (problem.batch, problem.input_size),
        lambda: _own(problem, device, shared),
        lambda: (found for each in typical_problems(problem) if (found := _own(each, device, shared)) is not None),
        cost,
    )
    return None if choice is None else _of_choice(problem, device, choice)


def why_not(problem: Problem, device: Device, shared: bool = False) -> str | None:
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
    if shared and max(len(team) for team in _teams(problem.geometry.axes[0], max(MEMBERS))) == 1:
        return "no two taps along depth use the same planes of dy"
    if _tiling(problem, device, shared) is None:
        return "no tile fits registers, shared memory and workspace"
    return None


PASSES = (Pass.WEIGHT_GRAD,)  # passes that this family computes
KERNEL = "depthwise_tiles_weight_grad"
SHARED = "depthwise_teams_weight_grad"  # threads with several taps along depth


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    answers: list[Answer] = []
    for name, shared in ((KERNEL, False), (SHARED, True)):
        refuses, counts = partial(why_not, shared=shared), partial(work, shared=shared)
        makes = partial(plan, shared=shared)
        answers += offers.one_by_one(PASSES, name, wanted, device, refuses, counts, makes)
        answers += offers.weight_with_bias(name, wanted, device, refuses, counts, makes)
    return answers


def work(problem: Problem, device: Device, shared: bool = False) -> Work:
    """Returns the work of the launches: cycles by the model."""
    tiling, launches = _tiling(problem, device, shared), 2 + problem.bias
    if tiling is None:
        return Work(launches, inf, tensor_cores=False)
    length = tiling.length(device)
    spared = launches - 1 if unsplit(problem, tiling.splits(length)) else launches - 2
    return Work(launches, tiling.cycles(length, device), spared=spared, tensor_cores=False)


def plan(problem: Problem, device: Device, shared: bool = False) -> Plan:
    tiling = _tiling(problem, device, shared)
    assert tiling is not None, problem
    length, slab = tiling.length(device), tiling.inputs
    parts = -(-problem.input_size[0] // length)
    by_h, by_w, chunks = tiling.blocks
    splits = tiling.splits(length)
    main = DEPTHWISE_TILES_WEIGHT_GRAD.launch(
        splits * chunks,
        tiling.threads,
        (*_constants(tiling), ("Stored", stored_type(problem, splits))),
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
    sums, why = weight_sums(problem, [main], splits, narrows=True), "multiply-adds, planes in shared memory"
    tile = f"each thread {slab.tile_h} x {slab.tile_w} positions of a plane, walking {length} along depth"
    return Plan(SHARED if shared else KERNEL, why, sums.launches, sums.bytes, f"{tile}, {splits} parts", sums.regions)


def _constants(tiling: Tiling) -> Constants:
    problem, inputs = tiling.problem, tiling.inputs
    d, h, w = axes = problem.geometry.axes
    first, last = tiling.shifts
    teams = tiling.teams
    places = {tap: i * tiling.members + m for i, team in enumerate(teams) for m, tap in enumerate(team)}
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
        ("kMembers", tiling.members),
        ("kTeams", len(teams)),
        ("kTeamSize", tuple(len(team) for team in teams)),
        ("kTeamPhase", tuple(d.phase(team[0]) for team in teams)),
        ("kHasTeamOf", tuple(int(any(len(team) == n for team in teams)) for n in range(1, tiling.members + 1))),
        ("kShift", tuple(d.shift(team[min(m, len(team) - 1)]) for team in teams for m in range(tiling.members))),
        ("kPlaceOfTap", tuple(places[t] for t in range(d.kernel))),
        ("kSpanH", tiling.gradients.span_h),
        ("kSpanW", tiling.gradients.span_w),
        ("kFirstShift", first),
        ("kLastShift", last),
        ("kBias", problem.bias),
        ("kOwnH", tuple(int(h.is_own(t)) for t in range(h.kernel))),
        ("kOwnW", tuple(int(w.is_own(t)) for t in range(w.kernel))),
    )
