"""Plans rows_weight_grad.cuh: weight gradients of channels-last 16-bit tensors on Hopper's tensor cores.

A position's channels are a row of shared memory, and rows are K of the products. A block has 64 channels of one
tensor, at most 64 of the other, and a set of taps that read the same planes of dy along d.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ...planning import offers
from ...planning.calibration import Work
from ...planning.geometry import Axis, Geometry, Triple
from ...planning.launch import axis_constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, Strides, last_offset
from ...planning.repertoire import TYPICAL, Repertoire, nearest
from ...planning.scalars import INT32_MAX, SCALARS
from ...planning.sums import joined, reduce_parts
from .arguments import ROWS_WEIGHT_GRAD

PRODUCERS, CONSUMERS = 2, 2  # warpgroups that copy, and that multiply
BIAS_PARTS = "bias parts"  # region of the workspace
THREADS = 128 * (PRODUCERS + CONSUMERS)
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 56, 200  # per thread
SUM_REGISTERS = 144  # registers per consumer thread for sums
ROW_BYTES = 128
ROW_CHANNELS = 64  # channels of a row
PIECE = 8  # channels in 16 bytes
LEAST_CHANNELS, LEAST_ROWS = 16, 32  # channels per group of either tensor, and of the one that has more
STAGES = (4, 3, 2)  # numbers of boxes in shared memory, best first
BOXES = tuple((h, w) for h, w in product((1, 2, 4, 6, 8), (8, 16, 24, 32, 40, 48)) if h % 2 == 0 or w % 16 == 0)
MOST_ROWS = 160  # positions of a box: loops over them are unrolled

# Rates and costs of the model of time, in cycles of a multiprocessor.
OPERAND_BYTES = 128.0  # Matrix instructions read this many bytes of operands in shared memory per cycle.
BYTES_PER_CYCLE = 26.0  # copied from the L2 cache
COPY_CYCLES = 100.0  # for one copy of a producer's warp
BOX_CYCLES = 120.0  # per box, for barriers and addresses
BLOCK_CYCLES = 6000.0  # per block, for the first copies and the last stores


@dataclass(frozen=True)
class TapSet:
    """Holds taps that read the same planes of dy along d."""

    taps: tuple[Triple, ...]  # tap indices along d, h, w

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once because a search uses it hundreds of times as a key."""
        return hash(self.taps)

    def runs(self, h: Axis, box: int) -> dict[int, range]:
        """Returns, by phase along h, the positions along h of the lines that the taps read for a box of lines."""
        found: dict[int, list[int]] = {}
        for tap in {tap for _, tap, _ in self.taps}:
            found.setdefault(h.phase(tap), []).append(h.shift(tap))
        return {phase: range(min(shifts), max(shifts) + box) for phase, shifts in sorted(found.items())}


@dataclass(frozen=True)
class Tiling:
    """Describes the tile of a block: the channels of x and dy, sets of taps, and the box of positions."""

    geometry: Geometry
    rows_are_input: bool  # the product's 64 rows are channels of x
    columns: int  # channels of the other tensor
    sets: tuple[TapSet, ...]
    box: tuple[int, int]  # positions along h and w
    stages: int
    bias: bool = False  # the gradient of the bias is computed too

    @cached_property
    def taps(self) -> int:
        """The most taps of a consumer."""
        return max(-(-len(each.taps) // CONSUMERS) for each in self.sets)

    @cached_property
    def phases_w(self) -> tuple[int, ...]:
        """Phases along w that taps read."""
        w = self.geometry.axes[2]
        return tuple(sorted({w.phase(t) for t in range(w.kernel)}))

    @cached_property
    def origin_w(self) -> int:
        w = self.geometry.axes[2]
        return min(w.shift(t) for t in range(w.kernel))

    @cached_property
    def pitch(self) -> int:
        """Rows of dy of a line and a phase."""
        w = self.geometry.axes[2]
        return self.box[1] + max(w.shift(t) for t in range(w.kernel)) - self.origin_w

    def lines_of(self, each: TapSet) -> tuple[int, ...]:
        """Returns the lines of dy that a set's taps read, relative to the first output line of the box."""
        h = self.geometry.axes[1]
        runs = each.runs(h, self.box[0])
        return tuple(position * h.stride + phase for phase, run in runs.items() for position in run)

    @cached_property
    def lines(self) -> int:
        """The most lines of dy of a box."""
        return max(phases * self.box[0] + beyond for phases, beyond in _most_of(self.geometry, self.sets).lines)

    def row(self, each: TapSet, tap: Triple) -> int:
        """Returns the row of dy, within a stage, that a tap reads for the first position of the box."""
        _, h, w = self.geometry.axes
        plane = self.phases_w.index(w.phase(tap[2])) * self.lines
        line = self.lines_of(each).index(h.shift(tap[1]) * h.stride + h.phase(tap[1]))
        return (plane + line) * self.pitch + w.shift(tap[2]) - self.origin_w

    @cached_property
    def stage_bytes(self) -> int:
        rows = prod(self.box) + len(self.phases_w) * self.lines * self.pitch
        return -(-rows * ROW_BYTES // 1024) * 1024

    @cached_property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + (16 * ROW_BYTES if self.bias else 0)

    def ones(self, taps: tuple[Triple, ...]) -> int:
        """Returns how many of the taps count for the gradient of the bias: each output has one such tap."""
        return sum(_is_own(self.geometry, tap) for tap in taps) if self.bias else 0

    @cached_property
    def kinds(self) -> int:
        """Blocks that share a part of the volume."""
        g = self.geometry
        x, y = (ROW_CHANNELS, self.columns) if self.rows_are_input else (self.columns, ROW_CHANNELS)
        return g.groups * -(-g.in_per_group // x) * -(-g.out_per_group // y) * len(self.sets)

    def boxes(self, batch: int, size: Triple) -> int:
        return batch * size[0] * -(-size[1] // self.box[0]) * -(-size[2] // self.box[1])

    @cached_property
    def box_cycles(self) -> float:
        most, bias_columns = _most_of(self.geometry, self.sets), bias_columns_of(self)
        taps, ones = most.taps, most.own_taps if self.bias else 0
        products = prod(self.box) / 16 * (taps * _product_cycles(self.columns) + ones * _product_cycles(bias_columns))
        x, y = (ROW_CHANNELS, self.columns) if self.rows_are_input else (self.columns, ROW_CHANNELS)
        lines_y = len(self.phases_w) * self.lines
        bytes_of_box = 2 * (prod(self.box) * x + lines_y * self.pitch * y)
        copies = self.box[0] * -(-self.box[1] // (256 // x)) + lines_y * -(-self.pitch // (256 // y))
        copying = max(bytes_of_box / BYTES_PER_CYCLE, copies / (4 * PRODUCERS) * COPY_CYCLES)
        return max(products, copying) + BOX_CYCLES

    def __str__(self) -> str:
        side = "inputs x outputs" if self.rows_are_input else "outputs x inputs"
        return f"64 x {self.columns} {side}, {self.taps} taps per warpgroup, boxes of {self.box[0]}x{self.box[1]}"


class _Most(NamedTuple):
    """The most that any of several sets of taps has; all boxes of a search share it."""

    taps: int
    own_taps: int
    lines: frozenset[tuple[int, int]]  # phases along h, and lines of dy beyond one for each phase and line of the box


@lru_cache(maxsize=64)
def _most_of(g: Geometry, sets: tuple[TapSet, ...]) -> _Most:
    d, h, w = ({tap for tap in range(axis.kernel) if axis.is_own(tap)} for axis in g.axes)
    own = (sum(i in d and j in h and k in w for i, j, k in each.taps) for each in sets)
    runs = (each.runs(g.axes[1], 0).values() for each in sets)
    lines = frozenset((len(each), sum(run.stop - run.start for run in each)) for each in runs)
    return _Most(max(len(each.taps) for each in sets), max(own), lines)


def bias_columns_of(made: Tiling) -> int:
    """Returns the columns of the products with ones: those of dy if dy is the product's columns, else the fewest."""
    return made.columns if made.rows_are_input else 8


def _product_cycles(columns: int) -> float:
    """Returns the cycles of a matrix instruction for 64 rows and 16 positions.

    Tensor cores take two columns per cycle, if the operands come in time.
    """
    return max(columns / 2, 2 * 16 * (ROW_CHANNELS + columns) / OPERAND_BYTES)


def _is_own(g: Geometry, tap: Triple) -> bool:
    return all(axis.is_own(t) for axis, t in zip(g.axes, tap, strict=True))


def _tap_sets(g: Geometry, most: int) -> Iterator[tuple[TapSet, ...]]:
    """Yields ways to divide the taps into sets of at most `most` taps with one index along d.

    In the first way, the taps of a set have one phase along h, so that a box has few lines of dy. In the second way,
    a set has taps of all phases, so that fewer sets read x, and all sets have equally many products.
    """
    d, h, w = g.axes
    widths = -(-w.kernel // most)
    across = [range(i * w.kernel // widths, (i + 1) * w.kernel // widths) for i in range(widths)]
    phases = sorted({h.phase(t) for t in range(h.kernel)})
    by_phase = [[t for t in range(h.kernel) if h.phase(t) == phase] for phase in phases]
    for ways in (by_phase, [list(range(h.kernel))]) if len(phases) > 1 else (by_phase,):
        found = []
        for tap_d, along in product(range(d.kernel), ways):
            count = -(-len(along) // max(1, most // max(map(len, across))))
            for i, widths_of_set in product(range(count), across):
                lines = along[i * len(along) // count : (i + 1) * len(along) // count]
                found.append(TapSet(tuple(product((tap_d,), lines, widths_of_set))))
        yield tuple(found)


def _columns(channels: int) -> int:
    """Returns the channels of a tile of columns: equal shares, in whole pieces of 8."""
    tiles = -(-channels // ROW_CHANNELS)
    return -(-channels // (8 * tiles)) * 8


def _sides(g: Geometry) -> tuple[bool, ...]:
    """Returns which tensors' channels may be the rows of the product: True for x, False for dy."""
    return (True, False) if g.groups == 1 else (True,)


@lru_cache(maxsize=256)
def tiling(
    g: Geometry, batch: int, size: Triple, shared_bytes: int, multiprocessors: int, bias: bool = False
) -> Tiling | None:
    """Returns the tiling with the least predicted cycles, or None if no box fits shared memory."""
    found = []
    for rows_are_input in _sides(g):
        columns = _columns(g.out_per_group if rows_are_input else g.in_per_group)
        for_bias = (columns if rows_are_input else 8) // 2 if bias else 0
        ways = _tap_sets(g, CONSUMERS * ((SUM_REGISTERS - for_bias) // (columns // 2)))
        for sets, box, stages in product(ways, BOXES, STAGES):
            if prod(box) > MOST_ROWS:
                continue
            made = Tiling(g, rows_are_input, columns, sets, box, stages, bias)
            if made.shared_bytes <= shared_bytes:
                slow = {4: 1.0, 3: 1.03, 2: 1.15}[stages]
                found.append((slow * _cycles(made, batch, size, multiprocessors, 2**40)[0], made))
    return min(found, key=lambda each: each[0])[1] if found else None


def _cycles(made: Tiling, batch: int, size: Triple, multiprocessors: int, most: int) -> tuple[float, int]:
    """Returns the least predicted cycles over numbers of parts up to `most`, and that number."""
    boxes, elements = made.boxes(batch, size), made.geometry.in_channels * made.geometry.out_per_group
    kinds, box_cycles = made.kinds, made.box_cycles
    part = 4 * elements * made.geometry.taps / (BYTES_PER_CYCLE * multiprocessors)

    def of(splits: int) -> float:
        waves = -(-kinds * splits // multiprocessors)
        return waves * (-(-boxes // splits) * box_cycles + BLOCK_CYCLES) + (splits + 1) * part

    end = max(1, min(most, boxes, -(-4 * multiprocessors // kinds)))
    best = min(range(1, end + 1), key=of)
    return of(best), best


_repertoire = Repertoire[tuple[Geometry, bool, Device], tuple[int, Triple], Tiling]()


def forget() -> None:
    """Forgets the first volume of every layer, so that the next volume counts as the first."""
    _repertoire.forget()


def _made(p: Problem, device: Device) -> Tiling | None:
    """Returns the tiling for a volume, or None. It is one of a few of the layer, so that few kernels are compiled."""
    g = p.geometry
    positions = p.batch * prod(p.input_size)
    typical = nearest(positions, ((n * edge**3, (n, (edge, edge, edge))) for n, edge in TYPICAL))

    def of(batch: int, size: Triple) -> Tiling | None:
        return tiling(g, batch, size, device.shared_bytes, device.multiprocessors, p.bias)

    return _repertoire.choose(
        (g, p.bias, device),
        (p.batch, p.input_size),
        lambda: of(p.batch, p.input_size),
        lambda: (found for volume in typical if (found := of(*volume)) is not None),
        lambda made, _: _cycles(made, p.batch, p.input_size, device.multiprocessors, 2**40)[0],
    )


def _rows_of_pieces(strides: Strides) -> bool:
    return strides[1] == 1 and all(stride % PIECE == 0 for stride in (strides[0], *strides[2:]))


# ---- The interface of the family to the planner.


def why_not(problem: Problem, device: Device) -> str | None:
    p, g = problem, problem.geometry
    if device.capability[0] != 9:
        return "it needs Hopper's warpgroup instructions"
    if p.which is not Pass.WEIGHT_GRAD:
        return f"computes weight gradients, not the pass {p.which.value}"
    if p.dtype not in ("float16", "bfloat16"):
        return "rows of 32-bit numbers cannot be K"
    if not (_rows_of_pieces(p.input) and _rows_of_pieces(p.output) and p.aligned):
        return "positions are not aligned rows of channels"
    if p.bias and not g.own_taps_cover:
        return "no set of taps reads every output once, as a bias's gradient needs it"
    fewer, more = sorted((g.in_per_group, g.out_per_group))
    if fewer % PIECE or more % PIECE:
        return f"channels per group are not multiples of {PIECE}"
    if fewer < LEAST_CHANNELS or more < LEAST_ROWS:
        return f"fewer than {LEAST_CHANNELS} x {LEAST_ROWS} channels per group leave tensor cores idle"
    made = _made(p, device)
    if made is None:
        return "no box fits shared memory"
    if made.boxes(p.batch, p.input_size) * made.kinds > INT32_MAX:
        return "the volume is too large"
    return None


PASSES = (Pass.WEIGHT_GRAD,)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    ask = "rows_weight_grad", wanted, device, why_not, work, plan
    return [*offers.one_by_one(PASSES, *ask), *offers.weight_with_bias(*ask)]


def work(problem: Problem, device: Device) -> Work:
    """Returns the predicted work of the plan's launches."""
    made = _made(problem, device)
    assert made is not None
    return Work(
        3 if problem.bias else 2,
        _cycles(made, problem.batch, problem.input_size, device.multiprocessors, _most(problem, device))[0],
    )


def _most(p: Problem, device: Device) -> int:
    """Returns the most parts that the workspace has room for."""
    return max(1, device.workspace_bytes // (4 * p.geometry.in_channels * p.geometry.out_per_group * p.geometry.taps))


def plan(problem: Problem, device: Device) -> Plan:
    p, g = problem, problem.geometry
    made = _made(p, device)
    assert made is not None
    _, splits = _cycles(made, p.batch, p.input_size, device.multiprocessors, _most(p, device))
    boxes = made.boxes(p.batch, p.input_size)
    d, h, w = g.axes
    most = made.taps
    taps = [_by_consumer(made, each) for each in made.sets]

    def padded(numbers: list[list[int]]) -> tuple[int, ...]:
        return tuple(number for own in numbers for number in (*own, *(0,) * (most - len(own))))

    main = ROWS_WEIGHT_GRAD.launch(
        made.kinds * splits,
        THREADS,
        (
            ("Scalar", SCALARS[p.dtype]),
            ("kWide", _wide(p)),
            ("kBias", p.bias),
            ("kProducers", PRODUCERS),
            ("kConsumers", CONSUMERS),
            ("kProducerRegisters", PRODUCER_REGISTERS),
            ("kConsumerRegisters", CONSUMER_REGISTERS),
            ("kStages", made.stages),
            ("kRowsAreInput", made.rows_are_input),
            ("kColumns", made.columns),
            ("kGroups", g.groups),
            ("kInPerGroup", g.in_per_group),
            ("kOutPerGroup", g.out_per_group),
            ("kTapsAll", g.taps),
            ("kBoxH", made.box[0]),
            ("kBoxW", made.box[1]),
            ("kLinesY", made.lines),
            ("kPitchY", made.pitch),
            ("kOriginW", made.origin_w),
            ("kPhasesW", len(made.phases_w)),
            ("kPhaseW", made.phases_w),
            *axis_constants(g.axes, "stride"),
            ("kSets", len(made.sets)),
            ("kTaps", most),
            ("kShiftD", tuple(d.shift(each.taps[0][0]) for each in made.sets)),
            ("kPhaseD", tuple(d.phase(each.taps[0][0]) for each in made.sets)),
            ("kLineCount", tuple(len(made.lines_of(each)) for each in made.sets)),
            ("kLineH", _table(made.lines_of(each) for each in made.sets)),
            ("kTapCount", tuple(tuple(map(len, own)) for own in taps)),
            ("kOnesCount", tuple(tuple(map(made.ones, own)) for own in taps)),
            (
                "kTapRow",
                tuple(
                    padded([[made.row(each, tap) for tap in own] for own in found])
                    for each, found in zip(made.sets, taps, strict=True)
                ),
            ),
            (
                "kTapIndex",
                tuple(
                    padded([[(t[0] * h.kernel + t[1]) * w.kernel + t[2] for t in own] for own in found])
                    for found in taps
                ),
            ),
        ),
        {"parts": "workspace", "bias_parts": BIAS_PARTS if p.bias else "null"},
        shared_bytes=made.shared_bytes,
        x_strides=p.input,
        dy_strides=p.output,
        x_size=p.input_size,
        dy_size=p.output_size,
        boxes=boxes,
        splits=splits,
        by_d=p.input_size[0],
        by_h=-(-p.input_size[1] // made.box[0]),
        by_w=-(-p.input_size[2] // made.box[1]),
    )
    count = g.in_channels * g.out_per_group * g.taps
    ci, co, _, _, tap = p.weight
    sizes, strides = (g.taps, g.in_channels, g.out_per_group), (tap, ci, co)
    if not made.rows_are_input:
        sizes, strides = (g.taps, g.out_per_group, g.in_per_group), (tap, co, ci)
    launches, end, bias_parts = (
        [main, reduce_parts(p.dtype, count, splits, "dw", sizes, strides)],
        splits * count * 4,
        0,
    )
    if p.bias:
        bias_parts, channels = splits * len(made.sets) * CONSUMERS, g.out_channels
        bias = reduce_parts(p.dtype, channels, bias_parts, "db", (1, 1, channels), (0, 0, 1), BIAS_PARTS)
        launches[1:] = [joined(launches[1], bias)]
    return Plan(
        "rows_weight_grad",
        "rows of channels as they are, positions as K on warpgroup tensor cores",
        tuple(launches),
        end + 4 * bias_parts * g.out_channels,
        f"{made}, {made.stages} stages, {splits} parts",
        ((BIAS_PARTS, end),) if p.bias else (),
    )


def _table(rows: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Returns rows of one length, filled up with zeros that are never read."""
    found = list(rows)
    most = max(map(len, found))
    return tuple((*row, *(0,) * (most - len(row))) for row in found)


def _by_consumer(made: Tiling, each: TapSet) -> list[tuple[Triple, ...]]:
    """Returns the taps of every consumer, those that count for the bias first."""
    share = -(-len(each.taps) // CONSUMERS)
    shares = (each.taps[i * share : (i + 1) * share] for i in range(CONSUMERS))
    return [tuple(sorted(taps, key=lambda tap: not made.ones((tap,)))) for taps in shares]


def _wide(p: Problem) -> bool:
    """Returns whether an offset within a plane of x or dy, also of a row that does not exist, may exceed 32 bits."""
    g = p.geometry
    reach = tuple(
        size + axis.kernel * axis.dilation + axis.padding + 64 * axis.stride
        for size, axis in zip(p.output_size, g.axes, strict=True)
    )
    x = last_offset((p.input_size[1] + 64, p.input_size[2] + 64), p.input[3:])
    return max(x, last_offset(reach[1:], p.output[3:])) + max(g.in_channels, g.out_channels) > INT32_MAX
