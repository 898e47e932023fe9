"""Plans for the gradients of wide layers on small volumes, as two plain matrix products (kernels/unfold.cuh,
kernels/unfolded_products.cuh).

The output gradient is unfolded: every pair of position and tap has its element. That takes memory, and passes through
the L2 cache; where positions are few and channels many, products whose operands lie as they are needed gain more.
Chosen where the models of both ways say so. What is compiled in depends on the layer, and on the columns of a block
and the channels that a block unfolds, which are chosen for the volume.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, inf, prod

from . import (
    few_inputs_planner,
    few_outputs_planner,
    few_weight_grad_planner,
    group_backward_planner,
    halo_planner,
    tensor_cores,
    up_backward_planner,
    up_grad_planner,
)
from .geometry import Geometry, Triple
from .launch import Launch
from .packing import divider, int32s, int64s, padded
from .problem import Device, Pass, Plan, Problem
from .repertoire import TYPICAL, Repertoire, nearest, searched
from .sums import Sum, add_parts
from .up_backward_planner import contiguous

UNFOLD_THREADS = 256
CHANNELS = (1, 2, 4, 8)  # output channels of a block that unfolds
AT_ONCE = 2  # 8 rows of a panel of x each, that a warp writes
IMAGE_BYTES = 100 * 1024  # of shared memory
TERMS = 32  # of a panel
ROW_BYTES = 4 * TERMS
REGISTERS = {2: (40, 232), 3: (40, 152)}  # of those who copy, of those who multiply, by warpgroups of these
MOST_COLUMNS = {2: 288, 3: 192}
COLUMNS = (64, 96, 128, 160, 192, 224, 256, 288)
MOST_STAGES, LEAST_STAGES = 6, 3
REGION_ALIGN = 256
MOST_SUMMING = 8  # blocks of a multiprocessor

# What a multiprocessor does, in cycles of 1.755 GHz. Fitted to 48 times of an H200, which are 9% off on average.
BLOCK_CYCLES = 6000.0  # the first panels' way, the sums' way out
PRODUCTS = 800.0  # of two numbers each, per cycle
L2_BYTES = 38.0  # brought per cycle
PART_BYTES = 18.0  # of parts, written and read again
READ_WORD, COPIED_WORD, WRITTEN_WORD, SLICE = 0.275, 0.06, 0.216, 470.0  # of blocks that unfold
PLACE = 0.08  # of a word in the image of one channel, found once for all
TORN = 1.1  # times as long, where sectors are written in two parts
UNFOLD_CYCLES = 2900.0  # until the first words are there, and the last have gone
ENOUGH = 2.5  # blocks that must be there to keep memory busy
BIAS = 1.2  # times as long, where they add up dy
LAUNCH = 3500.0
# What other families take, of what they predict: halo kernel and weight gradient together, those of up-convolutions
# on few and on more positions.
APART, UP_FEW, UP, FEW = 0.85, 1.15, 0.95, 1024
MIN_GAIN = 1.1  # predicted, because the models are off by as much


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Operands:
    """The matrices of both products."""

    geometry: Geometry
    batch: int
    size: Triple

    def typical(self, device: Device) -> list[Operands]:
        """Typical volumes near this one, of those that have room in the workspace."""
        volumes = (replace(self, batch=batch, size=(edge, edge, edge)) for batch, edge in TYPICAL)
        fitting = ((each.batch * each.positions, each) for each in volumes if each.outputs and each.fits(device))
        return nearest(self.batch * self.positions, fitting)

    def fits(self, device: Device) -> bool:
        return sum(self.regions.values()) <= device.workspace_bytes

    @property
    def positions(self) -> int:
        return prod(self.size)

    @property
    def pitch(self) -> int:
        """Positions of a batch item, filled up to whole sectors."""
        return round_up(self.positions, 8)

    @property
    def columns_x(self) -> int:
        return self.batch * self.pitch

    @property
    def outputs(self) -> int:
        return self.batch * self.geometry.out_channels * prod(self.geometry.output_size(self.size))

    @property
    def terms(self) -> int:
        """Pairs of output channel and tap."""
        return self.geometry.out_channels * self.geometry.taps

    @property
    def chunks_x(self) -> int:
        return -(-self.terms // TERMS)

    @property
    def chunks_w(self) -> int:
        return -(-self.columns_x // TERMS)

    @property
    def panel_rows(self) -> int:
        return self.chunks_w * TERMS

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of what is written for the products."""
        rows = self.geometry.in_channels
        return {
            "x panels": ROW_BYTES * self.chunks_w * rows,
            "position panels": ROW_BYTES * self.chunks_x * self.panel_rows,
        }


@dataclass(frozen=True)
class Slices:
    """What a block unfolds: some output channels, for some lines of positions: whole planes, or lines of one."""

    operands: Operands
    channels: int
    lines: int

    @property
    def count(self) -> int:
        """Of a batch item."""
        return -(-prod(self.operands.size[:2]) // self.lines)

    @property
    def image(self) -> Triple:
        """Outputs that the positions reach, and those that follow them up to the next slice's or the end: so every
        output is in the image of its own slice. Lines have an odd length, so that they begin in different banks."""
        (d, h, w), axes = self.operands.size, self.operands.geometry.axes
        planes, lines = -(-self.lines // h), min(self.lines, h)
        extents = []
        for size, own, axis in zip((d, h, w), (planes, lines, w), axes, strict=True):
            reached = (own - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1
            last = (size - 1) // own * own  # the first position of the last slice
            rest = axis.output_size(size) - last * axis.stride
            extents.append(max(reached, axis.padding + max(own * axis.stride if last else 0, rest)))
        return extents[0], extents[1], extents[2] | 1

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        taps, positions = self.operands.geometry.taps, self.lines * self.operands.size[2]
        return 4 * (self.channels * (taps + (prod(self.image) | 1)) + positions + 80)

    @property
    def blocks(self) -> int:
        o = self.operands
        return o.batch * -(-o.geometry.out_channels // self.channels) * self.count

    @property
    def whole(self) -> bool:
        """Whether nobody writes parts of 16 bytes."""
        return self.channels * self.operands.geometry.taps % 4 == 0

    def cycles(self, device: Device) -> float:
        o = self.operands
        torn = self.channels * o.geometry.taps % 8 != 0
        copied = (COPIED_WORD * self.channels + PLACE) * prod(self.image)
        written = WRITTEN_WORD * self.channels * o.geometry.taps * self.lines * o.size[2] * (TORN if torn else 1.0)
        read = READ_WORD * o.outputs / device.multiprocessors
        own = self.blocks / device.multiprocessors
        at_once = device.shared_bytes // (self.bytes + 1024)
        waves = max(1.0, own / min(8, at_once))
        reading = read * max(1.0, ENOUGH / own)
        return (own + ceil(own)) / 2 * (copied + written) + own * SLICE + reading + waves * UNFOLD_CYCLES


Compiled = tuple[int, int, int]  # columns of both products, and how many warpgroups multiply

# What is compiled is chosen from the layer's repertoire, so that a new volume does not recompile.
_channels = Repertoire[tuple[Geometry, Device], Operands, int]()
_compiled = Repertoire[tuple[Geometry, Device], Operands, Compiled]()


def forget() -> None:
    """The next volume of every layer is its first."""
    _channels.forget()
    _compiled.forget()
    for found in (slices_of, tiling_of, _own_channels, _own_compiled):
        found.cache_clear()


@lru_cache(maxsize=1024)
def slices_of(o: Operands, device: Device) -> Slices | None:
    channels = _channels.choose(
        (o.geometry, device),
        o,
        lambda: _own_channels(o, device),
        lambda: (found for each in o.typical(device) if (found := _own_channels(each, device)) is not None),
        lambda channels, _: best.cycles(device) if (best := _best_slices(o, (channels,), device)) else inf,
    )
    return None if channels is None else _best_slices(o, (channels,), device)


@lru_cache(maxsize=1024)
def _own_channels(o: Operands, device: Device) -> int | None:
    best = _best_slices(o, CHANNELS, device)
    return None if best is None else best.channels


def _best_slices(o: Operands, channels: tuple[int, ...], device: Device) -> Slices | None:
    d, h, _ = o.size
    lines = [*(n for n in range(1, h) if h % n == 0), *(h * planes for planes in range(1, d + 1))]
    found = (Slices(o, each, n) for each in channels for n in lines)
    fitting = [slices for slices in found if slices.whole and slices.bytes <= IMAGE_BYTES]
    return min(fitting, key=lambda slices: slices.cycles(device), default=None)


@dataclass(frozen=True)
class Tiling:
    """Columns of a block of either product, into how many portions its terms are divided, and how many warpgroups
    multiply."""

    columns_x: int
    columns_w: int
    portions_x: int = 1
    portions_w: int = 1
    consumers: int = 2

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def stage_bytes(self) -> int:
        return (self.rows + max(self.columns_x, self.columns_w)) * ROW_BYTES

    def stages(self, device: Device) -> int:
        return min(MOST_STAGES, (device.shared_bytes - 256) // self.stage_bytes)

    def blocks(self, o: Operands) -> tuple[int, int]:
        ins = o.geometry.in_channels
        x = -(-ins // self.rows) * -(-o.columns_x // self.columns_x) * self.portions_x
        return x, -(-o.terms // self.rows) * -(-ins // self.columns_w) * self.portions_w

    def __str__(self) -> str:
        return (
            f"{self.rows} input channels x {self.columns_x} positions in {self.portions_x} portions, "
            f"{self.rows} terms x {self.columns_w} input channels in {self.portions_w}"
        )


def _block_cycles(rows: int, columns: int, used: int, chunks: int) -> float:
    """`used`: rows of both operands that there are."""
    products = rows * columns * TERMS / PRODUCTS
    return chunks * max(products, used * ROW_BYTES / L2_BYTES) + BLOCK_CYCLES


def products_cycles(o: Operands, tiling: Tiling, device: Device) -> float:
    """Predicted, of both products and the sum of parts."""
    rows, ins = tiling.rows, o.geometry.in_channels
    of_x, of_w = min(rows, ins) + min(tiling.columns_x, o.columns_x), min(rows, o.terms) + min(tiling.columns_w, ins)
    x = _block_cycles(rows, tiling.columns_x, of_x, -(-o.chunks_x // tiling.portions_x))
    w = _block_cycles(rows, tiling.columns_w, of_w, -(-o.chunks_w // tiling.portions_w))
    blocks_x, blocks_w = tiling.blocks(o)
    parts = sum(4 * count * number for _, count, number in _parts(o, tiling))
    adding = LAUNCH + parts / (PART_BYTES * device.multiprocessors) if parts else 0.0
    return _last(((x, blocks_x), (w, blocks_w)), device.multiprocessors) + adding


def _last(work: tuple[tuple[float, int], ...], workers: int) -> float:
    """When the last of several blocks is done, if each begins on the first multiprocessor that is free."""
    busy = [0.0] * workers
    for cycles, count in work:
        for _ in range(count):
            heapq.heapreplace(busy, busy[0] + cycles)
    return max(busy)


def _parts(o: Operands, tiling: Tiling) -> list[tuple[str, int, int]]:
    """Results of which there are parts: their elements, and how many parts."""
    g = o.geometry
    found = [
        ("dx", o.batch * g.in_channels * o.positions, tiling.portions_x),
        ("dw", g.in_channels * o.terms, tiling.portions_w),
    ]
    return [(name, count, number) for name, count, number in found if number > 1]


@lru_cache(maxsize=1024)
def tiling_of(o: Operands, device: Device) -> Tiling:
    chosen = _compiled.choose(
        (o.geometry, device),
        o,
        lambda: _own_compiled(o, device),
        lambda: (_own_compiled(each, device) for each in o.typical(device)),
        lambda compiled, _: products_cycles(o, _best_tiling(o, (compiled,), device), device),
    )
    assert chosen is not None, "every volume has a tiling"
    return _best_tiling(o, (chosen,), device)


@lru_cache(maxsize=1024)
def _own_compiled(o: Operands, device: Device) -> Compiled:
    """The best for a volume."""
    choices: list[Compiled] = []
    for consumers, most in MOST_COLUMNS.items():
        columns = [n for n in COLUMNS if n <= most]
        choices += [(*both, consumers) for both in product(columns, columns)]

    def search() -> Compiled:
        best = _best_tiling(o, choices, device)
        return best.columns_x, best.columns_w, best.consumers

    return searched("unfold", (o, replace(device, name="")), search)


def _best_tiling(o: Operands, choices: Sequence[Compiled], device: Device) -> Tiling:
    found: list[Tiling] = []
    for columns_x, columns_w, consumers in choices:
        found += _portioned(o, Tiling(columns_x, columns_w, consumers=consumers), device)
    return min(found, key=lambda tiling: products_cycles(o, tiling, device))


def _portioned(o: Operands, tiling: Tiling, device: Device) -> Iterator[Tiling]:
    """With numbers of portions that are worth a try."""
    if tiling.stages(device) < LEAST_STAGES:
        return
    x, w = tiling.blocks(o)
    for portions_w in _portions(w, o.chunks_w, device):
        left = max(device.multiprocessors - w * portions_w, 1)
        for portions_x in {*_portions(x, o.chunks_x, device), max(1, min(left // x, o.chunks_x))}:
            portioned = replace(tiling, portions_x=portions_x, portions_w=portions_w)
            if sum(4 * count * number for _, count, number in _parts(o, portioned)) <= device.workspace_bytes:
                yield portioned


def _portions(blocks: int, chunks: int, device: Device) -> set[int]:
    """Numbers of portions worth a try: such that blocks fill the GPU, or a half or a third of it."""
    return {max(1, min(device.multiprocessors // (n * blocks), chunks)) for n in (1, 2, 3)} | {1}


def cycles(o: Operands, device: Device, bias: bool) -> float:
    """Predicted, of the whole plan."""
    slices = slices_of(o, device)
    assert slices is not None, "cycles() of what why_not_together() refuses"
    unfolding = slices.cycles(device) * (BIAS if bias else 1.0)
    return 2 * LAUNCH + unfolding + products_cycles(o, tiling_of(o, device), device)


# ---- The family.


def why_not(problem: Problem, device: Device) -> str | None:
    return "computes gradients together, none alone"


def why_not_together(problems: dict[Pass, Problem], device: Device) -> str | None:
    if not {Pass.INPUT_GRAD, Pass.WEIGHT_GRAD} <= problems.keys():
        return "the gradients of input and weight are not both wanted"
    p, q = problems[Pass.INPUT_GRAD], problems[Pass.WEIGHT_GRAD]
    g = p.geometry
    if refusal := tensor_cores.why_not(p, device, tensor_cores.WARPGROUP):
        return refusal
    if p.dtype != "float32":
        return "16-bit types"
    if g.groups != 1:
        return "groups"
    x = contiguous((p.batch, g.in_channels, *p.input_size))
    weight = contiguous((g.in_channels, g.out_channels, *g.kernel))
    if (p.input, q.input, p.weight, q.weight) != (x, x, weight, weight):
        return "tensors are not contiguous"
    if p.output != contiguous((p.batch, g.out_channels, *p.output_size)):
        return "dy is not contiguous"
    if not prod(p.output_size) * p.batch * prod(p.input_size):
        return "nothing to add"
    o = Operands(g, p.batch, p.input_size)
    if slices_of(o, device) is None:
        return "channels of dy are too large for shared memory"
    if not o.fits(device):
        return f"operands would take more than {device.workspace_bytes >> 20} MB"
    return None


def plan_together(problems: dict[Pass, Problem], device: Device) -> Plan | None:
    if why_not_together(problems, device) is not None:
        return None
    p = problems[Pass.INPUT_GRAD]
    o = Operands(p.geometry, p.batch, p.input_size)
    if MIN_GAIN:
        apart = cycles_apart(problems, device)
        if not apart or apart < MIN_GAIN * cycles(o, device, Pass.BIAS_GRAD in problems):
            return None
    return plan_tiling(problems, device, tiling_of(o, device))


def cycles_apart(problems: dict[Pass, Problem], device: Device) -> float:
    """Predicted, of the families that take these gradients otherwise. Nothing, if they are others than those whose
    models have been compared with this one."""
    p, q = problems[Pass.INPUT_GRAD], problems[Pass.WEIGHT_GRAD]
    if (tiling := up_backward_planner.best_tiling(problems, device)) is not None:
        few = p.batch * prod(p.input_size) <= FEW
        return (UP_FEW if few else UP) * up_backward_planner.cycles(tiling, p, device)
    others = (
        (few_outputs_planner, p),
        (few_inputs_planner, p),
        (few_weight_grad_planner, q),
        (group_backward_planner, p),
    )
    if any(family.why_not(problem, device) is None for family, problem in others):
        return 0.0
    if halo_planner.why_not(p, device) is not None:
        return 0.0
    total = 0.0
    for each in (p, q):
        other = up_grad_planner.other_cycles(each, device)
        if other is None:
            return 0.0
        total += up_grad_planner.cycles_of(each, device) or APART * other
    return total


def plan_tiling(problems: dict[Pass, Problem], device: Device, tiling: Tiling) -> Plan:
    """The plan with a given tiling: what a benchmark compares."""
    p = problems[Pass.INPUT_GRAD]
    g, o = p.geometry, Operands(p.geometry, p.batch, p.input_size)
    slices, bias = slices_of(o, device), Pass.BIAS_GRAD in problems
    assert slices is not None, "a plan of what why_not_together() refuses"
    sums = [
        Sum(f"{name} parts", name, count, round_up(count, 4), number) for name, count, number in _parts(o, tiling)
    ]
    if bias:
        sums.append(Sum("db parts", "db", g.out_channels, round_up(g.out_channels, 4), p.batch * slices.count))
    regions, end = [], 0
    for name, size in (*o.regions.items(), *((each.parts, 4 * each.pitch * each.number) for each in sums)):
        regions.append((name, end))
        end += round_up(size, REGION_ALIGN)
    return Plan(
        "unfold",
        "few positions: dy unfolded, two matrix products",
        (
            _unfold(p, slices, bias),
            _products(o, tiling, device),
            *([add_parts(sums, p.dtype, MOST_SUMMING * device.multiprocessors)] if sums else []),
        ),
        end,
        str(tiling),
        tuple(regions),
        passes=(Pass.INPUT_GRAD, Pass.WEIGHT_GRAD, *((Pass.BIAS_GRAD,) if bias else ())),
    )


def _unfold(p: Problem, slices: Slices, bias: bool) -> Launch:
    o, g = slices.operands, p.geometry
    of_x = -(-(-(-g.in_channels // 8) * o.chunks_w) // (UNFOLD_THREADS // 32 * AT_ONCE))
    axes = tuple(zip("DHW", g.axes, strict=True))
    return Launch(
        kernel="unfold",
        constants=(
            ("kThreads", UNFOLD_THREADS),
            ("kMinBlocks", 1),
            ("kIn", g.in_channels),
            ("kOut", g.out_channels),
            ("kChannels", slices.channels),
            ("kAtOnce", AT_ONCE),
            ("kBias", bias),
            *((f"kKernel{n}", axis.kernel) for n, axis in axes),
            *((f"kStride{n}", axis.stride) for n, axis in axes),
            *((f"kPadding{n}", axis.padding) for n, axis in axes),
            *((f"kDilation{n}", axis.dilation) for n, axis in axes),
        ),
        grid=(slices.blocks + of_x, 1, 1),
        threads=UNFOLD_THREADS,
        shared_bytes=slices.bytes,
        pointers=("dy", "x", "x panels", "position panels", "db parts" if bias else "null"),
        scalars=padded(
            int32s(*slices.image, *p.output_size, o.batch, o.positions, o.pitch, o.panel_rows),
            int32s(slices.lines, slices.count, slices.blocks),
            *(divider(n) for n in (*o.size[1:], *slices.image[1:], o.pitch // 8)),
        ),
    )


def _products(o: Operands, tiling: Tiling, device: Device) -> Launch:
    g = o.geometry
    parts = {name: count for name, count, _ in _parts(o, tiling)}
    blocks_x, blocks_w = tiling.blocks(o)
    stages = tiling.stages(device)
    return Launch(
        kernel="unfolded_products",
        constants=(
            ("kThreads", 128 * (tiling.consumers + 1)),
            ("kMinBlocks", 1),
            ("kTerms", o.terms),
            ("kConsumers", tiling.consumers),
            ("kColumnsX", tiling.columns_x),
            ("kColumnsW", tiling.columns_w),
            ("kStages", stages),
            ("kProducerRegisters", REGISTERS[tiling.consumers][0]),
            ("kConsumerRegisters", REGISTERS[tiling.consumers][1]),
        ),
        grid=(blocks_x + blocks_w, 1, 1),
        threads=128 * (tiling.consumers + 1),
        shared_bytes=stages * (tiling.stage_bytes + 16),
        pointers=(
            "weight",
            "position panels",
            "x panels",
            *(f"{name} parts" if name in parts else name for name in ("dx", "dw")),
        ),
        scalars=padded(
            int64s(*(round_up(parts.get(name, 0), 4) for name in ("dx", "dw"))),
            int32s(g.in_channels, o.positions, o.pitch, o.columns_x, o.panel_rows),
            int32s(o.chunks_x, o.chunks_w, tiling.portions_x, tiling.portions_w, blocks_x),
            divider(o.pitch),
        ),
        overlaps=True,
    )
