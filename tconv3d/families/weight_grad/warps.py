"""Plans for the weight gradient on tensor cores (tensor_weight_grad.cuh).

Chooses which channels and taps a block owns, how its warps share them, the box of positions that it copies at a time,
and into how many parts the positions are divided (split-K). The compiled constants depend on the layer alone, never
on the volume.

Terms: a word is 32 bits, one float32 or two 16-bit elements; a segment is four words along w; a chunk is four
segments, one for each lane of a quad. A plane is one phase of dy along w. A tile is a box of positions. A job is what
a warp copies at a time: some channels of 32 slots, each the words of one load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import inf, prod
from operator import itemgetter

from ...planning import offers, tensor_cores
from ...planning.arguments import per_axis
from ...planning.calibration import Work
from ...planning.effort import WARP_TILINGS, Effort
from ...planning.geometry import Geometry
from ...planning.launch import Constants, Launch, axis_constants
from ...planning.offers import Answer, Offer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, contiguous_strides
from ...planning.scalars import SCALARS
from ...planning.sums import BIAS_PARTS, Sum, WeightSums, add_parts, weight_sums
from .arguments import TENSOR_WEIGHT_GRAD
from .segments import SEGMENT, Box, vector_of, wide
from .warps_tiling import Buffers, Layer, Planes, Tiling, best_wide_box, boxes, copied_words, plane_words

CHUNK = 4  # segments that a warp multiplies at a time
SEGMENTS = (8, 16, 32, 64)  # segments of a tile to try
REGISTERS = 65536  # 32-bit registers of a multiprocessor
# Registers of a thread besides sums and fragments of x, without and with loads in flight.
REGISTERS_ASYNC, REGISTERS_SYNC = 44, 56
MIN_EFFICIENCY = 0.25  # least fraction of a channel tile's products that belong to real channels
# Rates and costs of a multiprocessor, for choosing between tilings.
CYCLES_PER_MULTIPLY = 8.0  # cycles of a matrix instruction on one of the four schedulers
PRODUCTS_PER_CYCLE = 512.0  # TF32 multiply-adds of a multiprocessor, as CYCLES_PER_MULTIPLY says
L2_BYTES_PER_CYCLE = 24.0
LATENCY = 700.0  # cycles until a job's loads arrive
TILE_OVERHEAD = 400.0  # cycles per tile of a barrier and of waiting for the first chunk
# The bias gradient: the factor on cycles (additions counted in machine code delay blocks by up to 1%, because most
# wait for tensor cores or L2), and the price over the predicted time.
BIAS_ADDING, BIAS_SURCHARGE = 1.01, 1.02
ROUNDING = 1.0 - 1e-9  # factor that keeps bounds below predictions in spite of rounding errors
# Strict float32, counted in the source of the kernel and not measured.
SPLITTING = 6  # instructions that split a word into its high and its low half
ADDING = 5  # instructions that add one sum of a chunk to its total and keep the rounding error


# ---- The choice of a tiling.


def _candidates(layer: Layer) -> Iterator[tuple[Tiling, list[int]]]:
    """Yields tilings with the most segments of a tile, and all numbers of segments that each may have."""
    g = layer.geometry
    tiles_in, tiles_out = -(-g.in_per_group // 16), -(-g.out_per_group // 8)
    taps = len(layer.pieces[0])
    block_rows = [
        (d, h)
        for d, h in product(range(1, min(g.kernel[0], 5) + 1), range(1, min(g.kernel[1], 8) + 1))
        if not (g.kernel[0] % d or g.kernel[1] % h)  # else the last block would have empty rows
    ]
    for (warps, blocks), ti, to in product(
        ((8, 1), (8, 2), (12, 1), (4, 2), (4, 4)), range(1, min(4, tiles_in) + 1), range(1, min(4, tiles_out) + 1)
    ):
        room = _room(warps * blocks)
        others = _other_registers(layer, ti)
        per_tile = layer.tile_sums * (2 if layer.strict else 1)  # strict float32 also holds what additions round off
        if per_tile * taps * ti * to > room - others:
            continue
        for wi, wo, wr in product((1, 2, 3, 4), (1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 6, 8)):
            if warps % (wi * wo * wr) or (wi - 1) * ti >= tiles_in or (wo - 1) * to >= tiles_out:
                continue
            slices = warps // (wi * wo * wr)
            sizes = [segments for segments in SEGMENTS if segments % (CHUNK * slices) == 0]
            for rows_d, rows_h in block_rows if sizes else ():
                rows = -(-rows_d * rows_h // wr)
                if rows_d * rows_h < wr or rows_d * rows_h > 5 * wr:
                    continue
                if per_tile * rows * taps * ti * to + rows + others > room:
                    continue
                stages = 3 if layer.asynchronous else 2
                yield (
                    Tiling(warps, blocks, ti, to, wi, wo, rows_d, rows_h, wr, slices, sizes[-1], stages, stages > 2),
                    sizes,
                )


def _room(warps: int) -> int:
    """Returns the registers that a thread may have if so many warps share a multiprocessor."""
    return min(248, REGISTERS // (32 * warps) // 8 * 8)


def _other_registers(layer: Layer, tiles_in: int) -> int:
    """Returns the registers for fragments, addresses and loads in flight."""
    stride = layer.geometry.stride[2]
    others = 8 * tiles_in + (REGISTERS_ASYNC if layer.asynchronous else REGISTERS_SYNC) + (8 if stride > 1 else 0)
    others += 8 if layer.whole_lines else 0  # windows have both phases
    if layer.strict:  # the low halves of a window, and those of x or the sums of a chunk
        others += 8 + (16 if layer.half_rows else 8 * tiles_in)
    return others


def _may_pair(layer: Layer, planes: Planes, tiling: Tiling) -> bool:
    """Tells whether a warp may multiply two lines of x at a time, whose taps read most lines of dy together."""
    g, rows = layer.geometry, tiling.rows
    neighbours = g.stride[1] == 1 and g.axes[1].dilation == 1 and tiling.rows_h % rows == 0
    whole = rows * tiling.warps_rows == tiling.rows_d * tiling.rows_h
    needed = layer.tile_sums * tiling.tiles(planes.taps) + _other_registers(layer, tiling.tiles_in)
    fits = needed + 8 * tiling.tiles_in <= _room(tiling.warps * tiling.blocks)
    return rows > 1 and neighbours and whole and fits and tiling.asynchronous and not layer.strict


def _pairs(layer: Layer, planes: Planes, tiling: Tiling) -> bool:
    """Tells whether a warp multiplies two lines of x at a time."""
    if tiling.segments % (2 * CHUNK * tiling.slices) or not _may_pair(layer, planes, tiling):
        return False
    return best_wide_box(layer.geometry, planes, tiling.block_rows, tiling.segments).h % 2 == 0


def _slots(layer: Layer, planes: Planes, tiling: Tiling, box: Box) -> tuple[int, int]:
    """Returns the loads per channel of x and per channel of dy that a box takes."""
    along_d, along_h = box.lines(layer.geometry, tiling.block_rows)
    line = -(-planes.line_words(box.w) // max(1, layer.vector_y)) * len(planes.offsets)
    return box.segments * SEGMENT // max(1, layer.vector_x), along_d * along_h * line


def _jobs(layer: Layer, tiling: Tiling, slots: tuple[int, int]) -> tuple[int, int]:
    channels = (tiling.block_in(layer.geometry), tiling.block_out)
    of_lanes, of_lane = layer.lane_channels(tiling), layer.loads(tiling)
    x, y = (-(-s * a // 32) * -(-c // (a * b)) for s, c, a, b in zip(slots, channels, of_lanes, of_lane, strict=True))
    return x, y


def _warp_cycles(
    layer: Layer, planes: Planes, tiling: Tiling, segments: int, pairs: bool
) -> tuple[float, float, float]:
    """Returns the cycles of tensor cores, of shared memory and of issuing instructions, for the products of one tile
    of every block of a multiprocessor."""
    chunks = -(-segments // (CHUNK * tiling.slices))
    tiles = tiling.tiles(planes.taps)
    multiplies = 2 * tiles * layer.instructions
    lines = (tiling.rows + 1) / 2 if pairs else tiling.rows  # lines of dy for each line of x
    loads = 2 * tiling.tiles_in + lines * tiling.tiles_out * planes.words / SEGMENT
    warps = tiling.warps * tiling.blocks
    rounding = SPLITTING * SEGMENT if layer.strict else 2 * SEGMENT if layer.dtype == "float32" else 0
    adding = ADDING * tiles * layer.tile_sums if layer.strict else 0
    return (
        warps / 4 * chunks * multiplies * CYCLES_PER_MULTIPLY,
        warps * chunks * loads * SEGMENT,
        warps / 4 * chunks * (multiplies + loads * (1 + rounding) + adding),
    )


def _joined(*parts: float) -> float:
    """Returns the cycles of a tile whose activities overlap: 15% of the shorter ones are not hidden."""
    return max(parts) + 0.15 * (sum(parts) - max(parts)) + TILE_OVERHEAD


def _tile_cycles(layer: Layer, planes: Planes, tiling: Tiling, box: Box) -> float:
    """Predicts the cycles in which every block of a multiprocessor computes one tile."""
    return _joined(*_tile_parts(layer, planes, tiling, box))


def _tile_parts(layer: Layer, planes: Planes, tiling: Tiling, box: Box) -> tuple[float, ...]:
    """Returns the cycles of tensor cores, shared memory, issue slots, L2 and exposed latency, for one tile of every
    block of a multiprocessor."""
    jobs = _jobs(layer, tiling, _slots(layer, planes, tiling, box))
    words = copied_words(layer.geometry, planes, tiling.block_rows, box)
    return _parts(layer, planes, tiling, box.segments, jobs, words, _pairs(layer, planes, tiling))


def _parts(
    layer: Layer,
    planes: Planes,
    tiling: Tiling,
    segments: int,
    all_jobs: tuple[float, float],
    words: float,
    pairs: bool,
) -> tuple[float, ...]:
    """Returns the parts of `_tile_parts` for jobs of x and of dy, and words that are copied of a channel of dy."""
    multiplying, sharing, issuing = _warp_cycles(layer, planes, tiling, segments, pairs)
    jobs_x, jobs_y = all_jobs
    jobs = tiling.blocks * (jobs_x + jobs_y)
    loads_x, loads_y = layer.loads(tiling)
    loaded = jobs_x * loads_x * max(1, layer.vector_x) + jobs_y * loads_y * max(1, layer.vector_y)
    copied = segments * SEGMENT * tiling.block_in(layer.geometry) + words * tiling.block_out
    per_word = (2 if layer.vector_y == 0 else 1) + (2 if layer.channels_last else 1)
    return (
        multiplying,
        sharing + tiling.blocks * loaded * per_word,
        issuing + jobs / 4 * 100,
        tiling.blocks * copied * 4 / L2_BYTES_PER_CYCLE,
        0.0 if tiling.asynchronous else jobs / (tiling.warps * tiling.blocks) * LATENCY,
    )


def _least_of_segment(layer: Layer, planes: Planes, rows: tuple[int, int]) -> tuple[float, float]:
    """Returns the fewest loads and the fewest copied words per segment and channel of dy, for blocks of `rows`."""
    loads, words = [], []
    for segments in SEGMENTS:
        box = best_wide_box(layer.geometry, planes, rows, segments)
        along_d, along_h = box.lines(layer.geometry, rows)
        line = -(-planes.line_words(box.w) // max(1, layer.vector_y)) * len(planes.offsets)
        loads.append(along_d * along_h * line / segments)
        words.append(copied_words(layer.geometry, planes, rows, box) / segments)
    return min(loads), min(words)


def _least_cost(layer: Layer, planes: Planes, tiling: Tiling, least: tuple[float, float]) -> float:
    """Returns a lower bound of `_cost` for this and all smaller numbers of segments.

    `least` is what `_least_of_segment` returns for the rows of the tiling's blocks.
    """
    g, segments = layer.geometry, tiling.segments
    loads, words = least
    (loads_x, loads_y), (_, lanes_y) = layer.loads(tiling), layer.lane_channels(tiling)
    jobs = (
        segments * SEGMENT / max(1, layer.vector_x) / 32 * tiling.block_in(g) / loads_x,
        segments * loads * lanes_y / 32 * -(-tiling.block_out // (lanes_y * loads_y)),
    )
    pairs = _may_pair(layer, planes, tiling)
    cycles = _joined(*_parts(layer, planes, tiling, segments, jobs, segments * words, pairs))
    return ROUNDING * cycles / (tiling.blocks * segments) * tiling.kinds(g)


def _cost(layer: Layer, planes: Planes, tiling: Tiling, device: Device) -> float | None:
    """Predicts the cycles per segment of a large volume; None for a tiling that does not fit shared memory."""
    buffers = Buffers.of(layer, planes, tiling)
    if buffers.bytes > device.shared_bytes or (buffers.bytes + 1024) * tiling.blocks > device.shared_bytes + 1024:
        return None
    if buffers.table_slots > 16384:
        return None
    box = best_wide_box(layer.geometry, planes, tiling.block_rows, tiling.segments)
    cycles = _tile_cycles(layer, planes, tiling, box) / (tiling.blocks * tiling.segments)
    return cycles * tiling.kinds(layer.geometry)


@lru_cache(maxsize=1024)
def tiling_of(layer: Layer, device: Device) -> Tiling | None:
    """Returns the tiling with the least predicted time; None if no tiling fits."""
    planes, effort = layer.planes(layer.pieces[0]), Effort(WARP_TILINGS)
    of_rows: dict[tuple[int, int], tuple[float, float]] = {}
    bounded = []
    for number, (tiling, sizes) in enumerate(_candidates(layer)):
        rows = tiling.block_rows
        if rows not in of_rows:
            of_rows[rows] = _least_of_segment(layer, planes, rows)
        bounded.append((_least_cost(layer, planes, tiling, of_rows[rows]), number, tiling, sizes))
    best, found = (inf, 0, 0), None
    for least, number, largest, sizes in sorted(bounded, key=itemgetter(0, 1)):
        if least > best[0] or (effort.spent and found is not None):
            break
        for segments in sizes:
            tiling = replace(largest, segments=segments)
            cost = _cost(layer, planes, tiling, device)
            effort.count(cost is not None)
            if cost is not None and (cost, number, segments) < best:
                best, found = (cost, number, segments), tiling
    return found


# ---- The interface of the family to the planner.


def _layer(p: Problem) -> Layer:
    g = p.geometry
    channels_last = all(strides[1] == 1 and strides[4] != 1 for strides in (p.input, p.output))
    strict = p.dtype == "float32" and not p.tf32
    # Both phases have taps, and their words have room in registers.
    whole = g.stride[2] == 2 and g.kernel[2] > 1 and g.axes[2].dilation % 2 == 1 and not strict and p.output[4] == 1
    vector_x = vector_of(p, p.input, p.input_size[2])
    vector_y = vector_of(p, p.output, p.output_size[2] if whole or g.stride[2] == 1 else 1)
    return Layer(g, p.dtype, channels_last, vector_x, vector_y, strict, whole)


def why_not(problem: Problem, device: Device) -> str | None:
    """Returns why the family does not take a problem, or None if it does."""
    if refusal := _why_never(problem, device):
        return refusal
    return None if tiling_of(_layer(problem), device) else "the taps reach too far for shared memory"


def _why_never(problem: Problem, device: Device) -> str | None:
    """Returns a reason for refusal that is known without a search for a tiling, or None."""
    p, g = problem, problem.geometry
    if p.which is not Pass.WEIGHT_GRAD:
        return f"computes weight gradients, not the pass {p.which.value}"
    if p.bias and not g.own_taps_cover:
        return "no set of taps reads every output once, as a bias's gradient needs it"
    if refusal := tensor_cores.why_not(p, device, tensor_cores.WARP, in_halves=True):
        return refusal
    if _layer(p).strict and (refusal := tensor_cores.why_not_halves(p.batch * prod(p.input_size), p.loose)):
        return refusal
    rows = 8 if g.in_per_group <= 8 else -(-g.in_per_group // 16) * 16
    padded_channels = max(rows, 16) * -(-g.out_per_group // 8) * 8
    if g.in_per_group * g.out_per_group < MIN_EFFICIENCY * padded_channels:
        return f"{g.in_per_group} x {g.out_per_group} channels per group leave tensor cores idle"
    if any(size > 2**20 for size in p.input_size) or p.batch * max(p.input_size) >= 2**30:
        return "the volume is too long"
    return None


PASSES = (Pass.WEIGHT_GRAD,)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    ask = "tensor_weight_grad", wanted, device, _why_never, work, plan
    found = [*offers.one_by_one(PASSES, *ask), *offers.weight_with_bias(*ask)]
    return [_bounded(answer) if isinstance(answer, Offer) else answer for answer in found]


def _bounded(offer: Offer) -> Offer:
    """Returns an offer with a lower bound of its work, which needs no search for a tiling.

    Nobody has measured the kernel with a bias gradient, which has a surcharge.
    """
    if offer.problem.bias:
        offer = replace(offer, surcharge=max(offer.surcharge, BIAS_SURCHARGE))
    p, layer = offer.problem, _layer(offer.problem)
    products = PRODUCTS_PER_CYCLE * 4 / p.item_bytes / layer.instructions * offer.device.multiprocessors
    return replace(offer, least=Work(2, p.flops / 2 / products))


def work(problem: Problem, device: Device) -> Work:
    """Returns the predicted work of the plan's launches; infinite, and never the cheapest, if no tiling fits."""
    if tiling_of(_layer(problem), device) is None:
        return Work(2, inf)
    found = cycles(problem, device)
    if not problem.bias:
        return Work(2, found)
    return Work(2 if _added_together(problem) else 3, BIAS_ADDING * found)


def plan(problem: Problem, device: Device) -> Plan:
    tiling = tiling_of(_layer(problem), device)
    assert tiling is not None, "plan() of a problem that why_not() refuses"
    return plan_tiling(problem, device, tiling)


def plan_tiling(p: Problem, device: Device, tiling: Tiling) -> Plan:
    """Returns the plan for a given tiling, so that benchmarks can compare tilings."""
    g, layer = p.geometry, _layer(p)
    count = g.in_channels * g.out_per_group * g.taps
    pieces = [(taps, layer.planes(taps)) for taps in layer.pieces]
    box = _box(p, layer, pieces[0][1], tiling)
    splits = _splits(p, device, layer, pieces[0][1], tiling, box, count)
    slots = _bias_slots(layer, tiling) if p.bias else 0
    mains = tuple(_main(p, layer, i, planes, tiling, splits) for i, (_, planes) in enumerate(pieces))
    sums = _sums(p, mains, splits, slots)
    tile = f"{tiling} ({box.d} x {box.h} lines of {box.w * SEGMENT}), {splits} parts"
    why = "positions as K on tensor cores" + (", three TF32 products" if layer.strict else "")
    return Plan("tensor_weight_grad", why, sums.launches, sums.bytes, tile, sums.regions)


def _bias_slots(layer: Layer, tiling: Tiling) -> int:
    """Returns how many sums per output channel the blocks with one part of the positions write."""
    g = layer.geometry
    return len(layer.pieces) * tiling.row_blocks(g) * -(-g.in_per_group // tiling.block_in(g))


def _bias_constants(p: Problem, layer: Layer, piece: int, tiling: Tiling) -> Constants:
    if not p.bias:
        return (("kBias", False),)
    slots = _bias_slots(layer, tiling)
    return ("kBias", True), ("kBiasSlots", slots), ("kBiasSlot", piece * slots // len(layer.pieces))


def _added_together(p: Problem) -> bool:
    """Tells whether one launch can add the parts of both gradients: they are dense and have whole vectors."""
    g = p.geometry
    dense = contiguous_strides((g.in_channels, g.out_per_group, *g.kernel))
    return p.weight == dense and g.in_channels * g.out_per_group * g.taps % 4 == 0 and g.out_channels % 4 == 0


def _sums(p: Problem, mains: Sequence[Launch], splits: int, bias_slots: int) -> WeightSums:
    """Returns the launches `mains` and what adds their parts: the weight's, and the bias's if they are wanted."""
    g = p.geometry
    count, bias_splits = g.in_channels * g.out_per_group * g.taps, splits * bias_slots
    if not p.bias or not _added_together(p):
        return weight_sums(p, mains, splits, bias_splits)
    sums = (
        Sum("workspace", "dw", count, count, splits),
        Sum(BIAS_PARTS, "db", g.out_channels, g.out_channels, bias_splits),
    )
    start = 4 * splits * count
    end = start + 4 * bias_splits * g.out_channels
    return WeightSums((*mains, add_parts(sums, p.dtype, overlaps=False)), end, ((BIAS_PARTS, start),))


@lru_cache(maxsize=1024)
def _box(p: Problem, layer: Layer, planes: Planes, tiling: Tiling) -> Box:
    """Returns the box with the least predicted time for this volume."""
    room, pairs = Buffers.of(layer, planes, tiling).plane, _pairs(layer, planes, tiling)

    def cost(box: Box) -> float:
        d, h, w = box.count(p.input_size, layer.per_word)
        conflicts, _ = _pad(p.geometry, planes, tiling, box, room, pairs)
        return d * h * w * _tile_cycles(layer, planes, tiling, box) * (1 + 0.1 * (conflicts - 1))

    of_h = 2 if pairs else 1
    lines, rows = (max(p.input_size[0], 1), max(p.input_size[1], of_h)), tiling.block_rows
    found = (box for box in boxes(tiling.segments, lines) if box.h % of_h == 0)
    fitting = [box for box in found if plane_words(p.geometry, planes, rows, box) <= room]
    return min(fitting, key=cost)


@lru_cache(maxsize=65536)
def _bank_conflicts(box: Box, plane_rows: int, line_rows: int, pitch: int, step: int, pairs: bool) -> int:
    """Returns the most loads of dy by a quarter-warp (two channels, four segments) that share a bank; 1 is ideal.

    Two channels of phase planes lie 16 of the 32 banks apart, those of whole lines (`step` 2) 4. Where a warp
    multiplies pairs of lines, a segment stands for the pair of lines that begins with its line, and loads of x may
    conflict too, which adds to the result.
    """
    lines = 2 if pairs else 1
    worst, worst_x, apart = 1, 1, 4 if step == 1 else 1
    for chunk in range(0, box.segments // lines - CHUNK + 1, CHUNK):
        banks, banks_x = [0] * 8, [0] * 8
        for place in range(chunk, chunk + CHUNK):
            line, along = lines * (place // box.w), place % box.w
            row = line // box.h * plane_rows + line % box.h * line_rows
            first, first_x = row * pitch // SEGMENT + along * step, line * box.w + along
            for of_channel, of_channel_x in ((first, first_x), (first + apart, first_x + 4)):
                banks[of_channel % 8] += 1
                banks_x[of_channel_x % 8] += 1
        worst, worst_x = max(worst, *banks), max(worst_x, *banks_x)
    return worst + worst_x - 1


def _pad(g: Geometry, planes: Planes, tiling: Tiling, box: Box, room: int, pairs: bool) -> tuple[int, int]:
    """Returns the fewest bank conflicts between lines of dy, and the words of padding per line that achieve this."""
    plane_rows, pitch = g.stride[0] * box.lines(g, tiling.block_rows)[1], planes.line_pitch(box.w)
    pads = [pad for pad in range(0, 32, 4) if plane_words(g, planes, tiling.block_rows, box, pad) <= room]
    return min((_bank_conflicts(box, plane_rows, g.stride[1], pitch + pad, planes.step, pairs), pad) for pad in pads)


def _splits(p: Problem, device: Device, layer: Layer, planes: Planes, tiling: Tiling, box: Box, count: int) -> int:
    """Returns the number of parts (split-K) of the positions with the least predicted cycles."""
    kinds, slots = tiling.kinds(p.geometry), device.multiprocessors * tiling.blocks
    tiles = _tiles(p, layer, box)
    part = 4 * (count + (_bias_slots(layer, tiling) * p.geometry.out_channels if p.bias else 0))
    most = max(1, min(tiles, device.workspace_bytes // part, -(-4 * slots // kinds)))
    tile = _tile_cycles(layer, planes, tiling, box)
    return min(range(1, most + 1), key=lambda splits: _cycles(kinds, slots, tiles, tile, splits, count, device))


def _cycles(kinds: int, slots: int, tiles: int, tile: float, splits: int, count: int, device: Device) -> float:
    """Predicts the cycles of one launch and the sum of its parts. Blocks run in waves of `slots` blocks."""
    adding = splits * count * 8 / (16 * device.multiprocessors)
    return -(-kinds * splits // slots) * (-(-tiles // splits) + 1) * tile + adding


def cycles(p: Problem, device: Device) -> float:
    """Predicts the cycles of all launches."""
    g, layer = p.geometry, _layer(p)
    tiling = tiling_of(layer, device)
    assert tiling is not None, "cycles() of a problem that why_not() refuses"
    planes = [layer.planes(taps) for taps in layer.pieces]
    box, count = _box(p, layer, planes[0], tiling), g.in_channels * g.out_per_group * g.taps
    kinds, slots = tiling.kinds(g), device.multiprocessors * tiling.blocks
    splits = _splits(p, device, layer, planes[0], tiling, box, count)
    tile = _tile_cycles(layer, planes[0], tiling, box)
    return len(planes) * _cycles(kinds, slots, _tiles(p, layer, box), tile, splits, count, device)


def parts(p: Problem, device: Device) -> tuple[float, ...]:
    """Returns the cycles for which tensor cores, shared memory, issue slots and L2 are busy in all launches, and the
    cycles of exposed latency, if the blocks fill the multiprocessors evenly."""
    g, layer = p.geometry, _layer(p)
    tiling = tiling_of(layer, device)
    assert tiling is not None, "parts() of a problem that why_not() refuses"
    planes = [layer.planes(taps) for taps in layer.pieces]
    box = _box(p, layer, planes[0], tiling)
    rounds = tiling.kinds(g) * _tiles(p, layer, box) / (tiling.blocks * device.multiprocessors)
    return tuple(len(planes) * rounds * part for part in _tile_parts(layer, planes[0], tiling, box))


def _tiles(p: Problem, layer: Layer, box: Box) -> int:
    d, h, w = box.count(p.input_size, layer.per_word)
    return p.batch * d * h * w


def _main(p: Problem, layer: Layer, piece: int, planes: Planes, tiling: Tiling, splits: int) -> Launch:
    g = p.geometry
    buffers, box = Buffers.of(layer, planes, tiling), _box(p, layer, planes, tiling)
    along_d, along_h = box.lines(g, tiling.block_rows)
    pad = _pad(g, planes, tiling, box, buffers.plane, _pairs(layer, planes, tiling))[1]
    pitch = planes.line_pitch(box.w) + pad
    return Launch(
        kernel="tensor_weight_grad",
        constants=_constants(p, layer, piece, planes, tiling, buffers),
        grid=(tiling.kinds(g) * splits, 1, 1),
        threads=32 * tiling.warps,
        shared_bytes=buffers.bytes,
        pointers=TENSOR_WEIGHT_GRAD.pointers(
            x="x", dy="dy", parts="workspace", bias_parts=BIAS_PARTS if p.bias else "null"
        ),
        scalars=TENSOR_WEIGHT_GRAD.pack(
            x_strides=p.input,
            dy_strides=p.output,
            x_size=p.input_size,
            dy_size=p.output_size,
            tile=(box.d, box.h, box.w),
            tiles=_tiles(p, layer, box),
            splits=splits,
            lines_h=along_h,
            lines=along_d * along_h,
            line_pitch=pitch,
            line_words=planes.line_words(box.w),
            **per_axis("by", box.count(p.input_size, layer.per_word)),
        ),
    )


def _constants(p: Problem, layer: Layer, piece: int, planes: Planes, tiling: Tiling, buffers: Buffers) -> Constants:
    g, taps = p.geometry, layer.pieces[piece]
    place = {t: (v, shift) for v, window in enumerate(planes.windows) for t, shift in window.taps}
    box = best_wide_box(g, planes, tiling.block_rows, tiling.segments)
    jobs = sum(_jobs(layer, tiling, _slots(layer, planes, tiling, box)))
    pairs = _pairs(layer, planes, tiling)
    chunks = tiling.segments // (CHUNK * tiling.slices * (2 if pairs else 1))
    hooks = -(-jobs // (tiling.warps * chunks))
    if not tiling.asynchronous:
        hooks = min(hooks, tiling.rows * tiling.tiles_out, 3)
    return (
        ("kThreads", 32 * tiling.warps),
        ("kMinBlocks", tiling.blocks),
        ("Scalar", SCALARS[p.dtype]),
        ("kOperand", tensor_cores.OPERANDS[p.dtype]),
        ("kHalves", 2 if layer.strict else 1),
        ("kWide", wide(p, box=64)),
        ("kVectorX", layer.vector_x),
        ("kVectorY", layer.vector_y),
        ("kLoadsX", layer.loads(tiling)[0]),
        ("kLoadsY", layer.loads(tiling)[1]),
        ("kLaneChannelsX", layer.lane_channels(tiling)[0]),
        ("kLaneChannelsY", layer.lane_channels(tiling)[1]),
        ("kChannelsLast", layer.channels_last),
        ("kHooks", hooks),
        ("kLinePairs", pairs),
        ("kStages", tiling.stages),
        ("kAsync", tiling.asynchronous),
        ("kGroups", g.groups),
        ("kInPerGroup", g.in_per_group),
        ("kOutPerGroup", g.out_per_group),
        ("kHalfRows", layer.half_rows),
        ("kTilesIn", tiling.tiles_in),
        ("kTilesOut", tiling.tiles_out),
        ("kWarpsIn", tiling.warps_in),
        ("kWarpsOut", tiling.warps_out),
        ("kWarpsRows", tiling.warps_rows),
        ("kSlices", tiling.slices),
        ("kRows", tiling.rows),
        ("kRowsD", tiling.rows_d),
        ("kRowsH", tiling.rows_h),
        ("kSegments", tiling.segments),
        ("kPitchX", buffers.pitch_x),
        ("kPlane", buffers.plane),
        ("kPitchY", buffers.pitch_y),
        ("kSlotsY", buffers.table_slots),
        ("kSharedBytes", buffers.bytes),
        ("kPhases", len(planes.offsets)),
        ("kPlaneOffset", planes.offsets),
        ("kWindows", len(planes.windows)),
        ("kWindowPhase", tuple(window.plane for window in planes.windows)),
        ("kWindowStart", tuple(window.start for window in planes.windows)),
        ("kWindowWords", planes.window_words),
        ("kStep", planes.step),
        ("kTaps", len(taps)),
        ("kTapW", tuple(taps)),
        ("kTapWindow", tuple(place[t][0] for t in taps)),
        ("kTapOffset", tuple(place[t][1] for t in taps)),
        *_bias_constants(p, layer, piece, tiling),
        *axis_constants(g.axes, "kernel", "stride", "padding", "dilation"),
    )
