"""Plans for the gradients of layers with small groups (group_backward.cuh).

With at most 8 input channels per group, reading dy takes most of the time, so one reading of dy serves both
gradients, or the one that is wanted. Chooses how many lines the tile of a block has, the number of stages of its
rings, and how columns of tiles are divided among blocks; these are run-time arguments. The compiled constants depend
on the layer and on which gradients are wanted.

Terms: a bundle is the groups that a block computes together, as one group of at most 8 channels whose weights between
groups are zero. A slice is at most 8 of a group's output channels: a block computes one slice after another. A tile
is some whole lines of positions along w; a band is ROWS lines of it; a column is tiles one after another along d. A
unit is the positions that a warp computes at a time. In names, "last" means channels-last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from math import isqrt, prod

from ...planning import calibration, tensor_cores
from ...planning.calibration import Work
from ...planning.geometry import Axis, Geometry
from ...planning.launch import Constants, Launch, axis_constants
from ...planning.offers import Answer, Offer, Refusal, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, Strides, channels_last_strides, dense_strides
from ...planning.scalars import SCALARS
from ...planning.sums import Parts, sum_of_parts
from .arguments import GROUP_BACKWARD

CHANNELS = 8  # most channels of a bundle, and the columns and K of a matrix instruction
LEAST_OUTS = 4  # fewest channels of a slice
ROWS = 2  # lines of positions of a unit
UNIT = 16  # positions of a unit along w
INPUT_WARPS = 8  # warps that compute the input gradient
# Warps that produce and that compute the weight gradient, for contiguous and for channels-last tensors. A block has
# at most 16 warps in total, so that a thread can have 128 registers.
OTHER_WARPS, OTHER_WARPS_LAST = (1, 7), (2, 6)
# Stages of dy: the fewest, those that are wanted so that slow copies are hidden too, and the most.
MIN_STAGES, GOOD_STAGES, MAX_STAGES = 2, 3, 8
BARRIER_BYTES = 32 * MAX_STAGES
MAX_WEIGHTS, MAX_SUMS = 64, 80  # most registers per thread for weights, and for the sums of the weight gradient
MIN_WIDTH = 12  # fewest positions of a line, so that units are well filled
# Cycles of a multiprocessor for a product of 16 x 8 x 8. In TF32 and in 16-bit types by the measured 388 us of
# grouped_strided in bfloat16. In strict float32 derived: tensor cores take 5.4 for three matrix instructions, and so
# do the four schedulers for the 22 instructions of the loops. Both are assumed to wait for a third of the time.
MATRIX_CYCLES, MATRIX_CYCLES_STRICT = 6.0, 8.7
SLICE_CYCLES = 6000  # cycles to pass on the sums of a slice and to begin the next
COPIED_PER_CYCLE = 16  # bytes that a multiprocessor of an H200 copies per cycle
LATENCY = 1500  # cycles until a copy arrives, which two stages alone do not hide
START_PLANES = 3  # latency of a column's first planes, in the time that it takes to compute one plane of dy


def shifts(axis: Axis) -> tuple[int, int]:
    """Returns the least and the largest shift of the taps, in positions."""
    found = [axis.shift(tap) for tap in range(axis.kernel)]
    return min(found), max(found)


def reach(axis: Axis) -> int:
    return axis.dilation * (axis.kernel - 1)


def slices(g: Geometry) -> int:
    """Returns the slices that a group's output channels are divided into, the fewest that fit CHANNELS channels."""
    return next(n for n in range(-(-g.out_per_group // CHANNELS), g.out_per_group + 1) if g.out_per_group % n == 0)


def bundled(g: Geometry) -> int:
    """Returns the groups of a bundle: the largest divisor of the number of groups that fits CHANNELS channels."""
    most = max(1, CHANNELS // max(g.in_per_group, g.out_per_group))
    return max(n for n in range(1, most + 1) if g.groups % n == 0)


def ins(g: Geometry) -> int:
    """Returns the input channels of a bundle."""
    return bundled(g) * g.in_per_group


def outs(g: Geometry) -> int:
    """Returns the output channels that a block computes at a time: those of a bundle, or of a slice of a group."""
    return bundled(g) * g.out_per_group // slices(g)


@dataclass(frozen=True)
class Tile:
    """The tile of a block: some whole lines of positions, and the lines of dy that they reach, in shared memory."""

    problem: Problem
    bands: int  # bands of ROWS lines
    weight_grad: bool
    shared_bytes: int  # bytes of shared memory that the device has per block

    @property
    def lines(self) -> int:
        """Lines of positions in the tile."""
        return self.bands * ROWS

    @property
    def lines_of_dy(self) -> int:
        axis = self.problem.geometry.axes[1]
        return axis.stride * (self.lines - 1) + reach(axis) + 1

    def _pitch(self, elements: int) -> int:
        """Returns the bytes for a run of elements at any alignment, an odd multiple of 16."""
        return -(-(elements * self.problem.item_bytes + 30) // 32) * 32 + 16

    def _cell(self, channels: int) -> int:
        """Returns the bytes of some channels at one position of a channels-last tensor."""
        return channels * self.problem.item_bytes

    @property
    def pitch(self) -> int:
        """Bytes of a channel in a stage of dy; for channels-last tensors, of one phase along w of a line."""
        g, width = self.problem.geometry, self.problem.output_size[2]
        if not _last(self.problem):
            return self._pitch(self.lines_of_dy * width)
        axis = g.axes[2]
        return -(-(width + axis.padding) // axis.stride) * (self._cell(outs(g)) // 16 | 1) * 16

    @property
    def pitch_x(self) -> int:
        """Bytes of a channel in a stage of x; for channels-last tensors, of a line."""
        width = self.problem.input_size[2]
        if not _last(self.problem):
            return self._pitch(self.lines * width)
        return width * self._cell(ins(self.problem.geometry))

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of dy."""
        g = self.problem.geometry
        of = self.lines_of_dy * g.stride[2] if _last(self.problem) else outs(g)
        return of * self.pitch

    @property
    def stage_x_bytes(self) -> int:
        g = self.problem.geometry
        return (self.lines if _last(self.problem) else ins(g)) * self.pitch_x

    @property
    def copied_bytes(self) -> int:
        """Bytes of dy and x that a block copies for a position along d."""
        p, g = self.problem, self.problem.geometry
        dy = g.stride[0] * self.lines_of_dy * p.output_size[2] * outs(g)
        x = self.lines * p.input_size[2] * ins(g) if self.weight_grad else 0
        return (dy + x) * p.item_bytes

    @property
    def slots(self) -> int:
        least, largest = shifts(self.problem.geometry.axes[0])
        return largest - least + 1

    def stages_x(self, stages: int) -> int:
        """Returns the stages of x: one for every position along d that is in use, or in flight with planes of dy."""
        ahead = -(-stages // self.problem.geometry.stride[0])
        return min(MAX_STAGES, self.slots + ahead) if self.weight_grad else 0

    def bytes(self, stages: int) -> int:
        g = self.problem.geometry
        rings = stages * self.stage_bytes + self.stages_x(stages) * self.stage_x_bytes
        passed = 4 * _other_warps(self.problem)[1] * (32 * 4 * products(g) + CHANNELS) if self.weight_grad else 0
        low_weights = 64 * 4 * g.taps if _strict(self.problem) else 0
        return BARRIER_BYTES + low_weights + max(rings, passed)

    @property
    def stages(self) -> int:
        """Stages of dy, as many as fit shared memory; 0 if fewer than MIN_STAGES fit."""
        fitting = [n for n in range(MIN_STAGES, MAX_STAGES + 1) if self.bytes(n) <= self.shared_bytes]
        return fitting[-1] if fitting and self.slots < MAX_STAGES else 0

    @property
    def chunks(self) -> int:
        return -(-self.problem.input_size[2] // UNIT)

    @property
    def columns(self) -> int:
        """Number of columns along h."""
        return -(-self.problem.input_size[1] // self.lines)

    def __str__(self) -> str:
        return f"{self.lines} lines, {self.stages} planes in shared memory"


def products(g: Geometry) -> int:
    """Returns the matrix products per position of the weight gradient. Each has two taps along w, or two taps along d
    that read the same plane."""
    depth, (_, h, w) = g.axes[0], g.kernel
    counts = [len(depth.taps(phase)) for phase in range(depth.stride)]
    return h * sum(min(-(-count // 2) * w, count * -(-w // 2)) for count in counts)


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, weight_grad: bool, device: Device) -> Tile | None:
    """Returns the tile with the most lines that the warps and shared memory can take, since lines of dy between two
    tiles are read twice; None if no tile fits. GOOD_STAGES count more than lines, and Hopper never had fewer."""
    chunks = -(-problem.input_size[2] // UNIT)
    bands = min(INPUT_WARPS // chunks, -(-problem.input_size[1] // ROWS)) if chunks else 0
    stages = (GOOD_STAGES,) if _hopper(device) else (GOOD_STAGES, MIN_STAGES)
    for least, count in product(stages, range(bands, 0, -1)):
        tile = Tile(problem, count, weight_grad, device.shared_bytes)
        if tile.stages >= least:
            return tile
    return None


@dataclass(frozen=True)
class Split:
    """How columns are cut along d, and how many blocks of a bundle share them."""

    length: int  # positions along d of a column
    segments: int  # columns along d
    cost: float  # positions along d of all columns of the busiest block, with those at the ends of columns
    tasks: int  # columns of a bundle in the whole batch
    splits: int  # blocks that share the columns of a bundle


def split_of(problem: Problem, tile: Tile, bundles: int, device: Device) -> Split:
    depth = problem.input_size[0]
    splits = max(1, device.multiprocessors // bundles)
    least, largest = shifts(problem.geometry.axes[0])
    found, root = [], isqrt(depth)
    # Lengths that columns of equal lengths may have: one for each number of segments, which are few for large depths.
    lengths = {-(-depth // segments) for segments in range(1, root + 1)} | set(range(1, root + 2))
    for length in sorted(lengths, reverse=True):
        segments = -(-depth // length)
        if -(-depth // segments) != length:
            continue
        tasks = problem.batch * tile.columns * segments
        rounds = -(-tasks // min(splits, tasks))
        cost = rounds * (length + largest - least + START_PLANES / problem.geometry.stride[0])
        found.append(Split(length, segments, cost, tasks, min(splits, tasks)))
    return min(found, key=lambda split: split.cost)


# ---- The interface of the family to the planner.


def why_not(problem: Problem, device: Device) -> str | None:
    if problem.which not in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
        return "it computes the gradients of input and weight"
    return _why_not(problem, problem.which is Pass.WEIGHT_GRAD, device)


def _why_not(problem: Problem, weight_grad: bool, device: Device) -> str | None:
    g = problem.geometry
    if refusal := tensor_cores.why_not(problem, device, tensor_cores.WARP, in_halves=problem.loose):
        return refusal
    if min(g.in_per_group, g.out_per_group) < 2:
        return "fewer than 2 channels per group"
    if g.in_per_group > CHANNELS:
        return f"more than {CHANNELS} input channels per group"
    if refusal := _why_no_slices(problem, weight_grad, device):
        return refusal
    if 2 * g.taps > MAX_WEIGHTS or 4 * products(g) > MAX_SUMS:
        return "the taps do not fit the registers"
    if g.in_channels * g.out_per_group * g.taps >= 2**31:
        return "weights whose offsets exceed 32 bits"
    if not _dense(problem):
        return "the tensors are not dense, or not aligned"
    if _last(problem) and not _whole_pieces(problem):
        return "a bundle's channels of a position are not whole pieces of 16 bytes, or of 8 bytes in x"
    if not 0 < problem.batch * prod(problem.input_size) < 2**31 or min(problem.output_size) <= 0:
        return "too many positions, or none"
    if problem.input_size[2] < MIN_WIDTH:
        return f"lines of fewer than {MIN_WIDTH} positions"
    if tile_of(problem, weight_grad, device) is None:
        return "the lines that a position reaches do not fit shared memory, or have too many positions"
    return None


def _why_no_slices(p: Problem, weight_grad: bool, device: Device) -> str | None:
    g = p.geometry
    if slices(g) == 1:
        return None
    if _strict(p):
        return "several slices of output channels in strict float32"
    if outs(g) < LEAST_OUTS:
        return (
            f"more than {CHANNELS} output channels per group, which have no divisor from {LEAST_OUTS} to {CHANNELS}"
        )
    parts = Parts(p, max(1, device.multiprocessors // g.groups), 1, 1)
    if weight_grad * parts.bytes + _sums_bytes(p) > device.workspace_bytes:
        return "several slices of output channels, whose sums need too large a workspace"
    return None


def _sums_bytes(p: Problem) -> int:
    """Returns the bytes of the workspace for the sums of slices at the places of dx."""
    sums = slices(p.geometry) > 1 and p.item_bytes < 4 and p.which is Pass.INPUT_GRAD
    return 4 * p.batch * p.geometry.in_channels * prod(p.input_size) if sums else 0


def _last(p: Problem) -> bool:
    """Tells whether x and dy are channels-last."""
    return p.input[1] == p.output[1] == 1 and p.input[4] > 1


def _strict(p: Problem) -> bool:
    """Tells whether every product is computed as three TF32 products.

    The kernel splits values in fewer instructions than others do, with a relative error of 2e-7: it takes no layers
    whose float32 products must stay exact to the last bit.
    """
    return p.dtype == "float32" and not p.tf32


def _hopper(device: Device) -> bool:
    """Tells whether the device has a copy engine for runs of memory, and launches that overlap the previous one."""
    return device.capability >= (9, 0)


def _other_warps(p: Problem) -> tuple[int, int]:
    return OTHER_WARPS_LAST if _last(p) else OTHER_WARPS


def _dense(p: Problem) -> bool:
    g, layout = p.geometry, channels_last_strides if _last(p) else dense_strides
    shape = (g.in_channels, g.out_per_group, *g.kernel)
    return (
        p.aligned
        and p.input == layout((p.batch, g.in_channels, *p.input_size))
        and p.output == layout((p.batch, g.out_channels, *p.output_size))
        and (
            p.weight == dense_strides(shape)
            or (p.which is Pass.INPUT_GRAD and p.weight == channels_last_strides(shape))
        )
    )


def _whole_pieces(p: Problem) -> bool:
    g = p.geometry
    return outs(g) * p.item_bytes % 16 == 0 and ins(g) * p.item_bytes % 8 == 0


def plan(problem: Problem, device: Device) -> Plan:
    return _plan({problem.which: problem}, device)


PASSES = (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)  # passes that this family computes
COPIED_BY_THREADS = "before Hopper"  # the kind of problems, for rates, on GPUs whose threads copy runs
KERNEL, DX_SUMS = "group_backward", "dx sums"  # the name of offers, and the region of the workspace for slices


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    together: dict[Pass, Problem] = {which: p for which, p in wanted.items() if which is not Pass.BIAS_GRAD}
    answers: list[Answer] = []
    for which, problem in together.items():
        if which in PASSES:
            refusal = why_not(problem, device)
            answers.append(Refusal(KERNEL, (which,), refusal) if refusal else _offer({which: problem}, device))
    weight_grad = Pass.WEIGHT_GRAD in wanted
    if any(_why_not(problem, weight_grad, device) for problem in together.values()):
        return answers
    if weight_grad and Pass.BIAS_GRAD in wanted and together[Pass.WEIGHT_GRAD].geometry.own_taps_cover:
        together[Pass.BIAS_GRAD] = wanted[Pass.BIAS_GRAD]
    return answers if len(together) < 2 else [*answers, _offer(together, device)]


def _offer(wanted: Wanted, device: Device) -> Offer:
    first = next(iter(wanted.values()))
    kind = "sliced" if slices(first.geometry) > 1 else calibration.kind_of(first)
    kind = kind if _hopper(device) else COPIED_BY_THREADS
    factor = calibration.surcharge(KERNEL, device, kind)
    counted, make = partial(_work, wanted, device), partial(_plan, wanted, device)
    return Offer(KERNEL, tuple(wanted), first, device, counted, make, kind=kind, surcharge=factor)


def work(problem: Problem, device: Device) -> Work:
    """Returns the work of the launches for one gradient."""
    return _work({problem.which: problem}, device)


def _work(wanted: Wanted, device: Device) -> Work:
    """Returns the products of all gradients, or the cycles of the busiest multiprocessor where no rates by products
    were measured: in strict float32, for slices of output channels, and where threads copy."""
    p, weight_grad = next(iter(wanted.values())), Pass.WEIGHT_GRAD in wanted
    g, launches = p.geometry, 2 if weight_grad else 1
    if not _strict(p) and slices(g) == 1 and _hopper(device):
        return Work(launches, products=sum(p.flops / 2 for which, p in wanted.items() if which is not Pass.BIAS_GRAD))
    tile = tile_of(p, weight_grad, device)
    assert tile is not None, "the work of a problem that why_not() refuses"
    instructions = g.taps * (Pass.INPUT_GRAD in wanted) + 2 * products(g) * weight_grad
    cycles = MATRIX_CYCLES_STRICT if _strict(p) else MATRIX_CYCLES
    computing = tile.bands * tile.chunks * ROWS * instructions * cycles
    sums = 2 * 4 * tile.lines * p.input_size[2] * ins(g) * (slices(g) > 1)  # read and written again
    copying = (tile.copied_bytes + sums) / COPIED_PER_CYCLE
    copying += LATENCY * g.stride[0] * (tile.stages < GOOD_STAGES)
    planes = split_of(p, tile, g.groups // bundled(g), device).cost
    return Work(launches, cycles=slices(g) * (planes * max(computing, copying) + SLICE_CYCLES))


def _plan(wanted: Wanted, device: Device) -> Plan:
    """Returns the plan for the input gradient, the weight gradient, or both; the bias gradient may come with the
    weight gradient."""
    p, weight_grad = next(iter(wanted.values())), Pass.WEIGHT_GRAD in wanted
    tile = tile_of(p, weight_grad, device)
    assert tile is not None, "a plan of a problem that why_not() refuses"
    bundles = p.geometry.groups // bundled(p.geometry)
    split = split_of(p, tile, bundles, device)
    parts = Parts(p, split.splits, 1, 1 if Pass.BIAS_GRAD in wanted else 0)
    main = _main(wanted, tile, split, parts, device)
    launches = (main, *((sum_of_parts(p, parts, overlaps=_hopper(device)),) if weight_grad else ()))
    start, sums = parts.bytes if weight_grad else 0, _sums_bytes(p)
    regions = parts.regions if weight_grad else ()
    return Plan(
        KERNEL,
        "groups of few channels: every element of dy is read once, for all its taps",
        launches,
        start + sums,
        f"{tile}, {split.splits} parts",
        (*regions, (DX_SUMS, start)) if sums else regions,
        passes=tuple(wanted),
    )


def _main(wanted: Wanted, tile: Tile, split: Split, parts: Parts, device: Device) -> Launch:
    p = tile.problem
    input_grad, weight_grad = Pass.INPUT_GRAD in wanted, Pass.WEIGHT_GRAD in wanted
    g, stages = p.geometry, tile.stages
    producers, weight_warps = _other_warps(p)
    warps = producers, INPUT_WARPS * input_grad, weight_warps * weight_grad
    return GROUP_BACKWARD.launch(
        g.groups // bundled(g) * split.splits,
        32 * sum(warps),
        (
            *_constants(p, wanted.get(Pass.INPUT_GRAD, p).weight, *warps, Pass.BIAS_GRAD in wanted),
            ("kHopper", _hopper(device)),
        ),
        {
            "x": "x" if weight_grad else "null",
            "weight": "weight" if input_grad else "null",
            "dx": "dx" if input_grad else "null",
            "dx_sums": DX_SUMS if _sums_bytes(p) else "null",
            "parts": parts.place("dw") if weight_grad else "null",
            "bias_parts": parts.place("db") if weight_grad else "null",
        },
        shared_bytes=tile.bytes(stages),
        dy_strides=p.output,
        x_strides=p.input,
        dx_strides=p.input,
        dy_count=p.output[0] * p.batch,
        x_count=p.input[0] * p.batch,
        dw_pitch=parts.pitch("dw"),
        db_pitch=parts.pitch("db"),
        size=p.input_size,
        dy_size=p.output_size,
        tasks=split.tasks,
        splits=split.splits,
        length=split.length,
        bands=tile.bands,
        chunks=tile.chunks,
        pitch=tile.pitch,
        pitch_x=tile.pitch_x,
        stages=stages,
        stages_x=tile.stages_x(stages),
        by_columns=tile.columns,
        by_segments=split.segments,
        by_chunks=tile.chunks,
    )


def _constants(
    p: Problem, weight: Strides, producers: int, input_warps: int, weight_warps: int, bias: bool
) -> Constants:
    g, groups = p.geometry, bundled(p.geometry)
    depth, _, _ = g.axes
    least, largest = shifts(depth)
    return (
        ("Scalar", SCALARS[p.dtype]),
        ("kHalves", 2 if _strict(p) else 1),
        ("kIn", ins(g)),
        ("kOut", outs(g)),
        ("kSlices", slices(g)),
        ("kInPerGroup", g.in_per_group),
        ("kOutPerGroup", g.out_per_group),
        ("kBundles", g.groups // groups),
        *axis_constants(g.axes, "kernel", "stride"),
        *axis_constants(g.axes[1:], "dilation", "padding"),
        ("kPhaseD", tuple(depth.phase(tap) for tap in range(depth.kernel))),
        ("kShiftD", tuple(depth.shift(tap) for tap in range(depth.kernel))),
        ("kMinShiftD", least),
        ("kMaxShiftD", largest),
        ("kRows", ROWS),
        ("kMaxStages", MAX_STAGES),
        ("kProducers", producers),
        ("kInputWarps", input_warps),
        ("kWeightWarps", weight_warps),
        ("kBias", bias),
        ("kLast", _last(p)),
        ("kWeightLast", weight[4] != 1),
    )
