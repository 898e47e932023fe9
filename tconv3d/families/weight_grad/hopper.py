"""Plans for the weight gradient on Hopper's warpgroup matrix instructions (hopper_weight_grad.cuh).

Chooses which channels and taps a block owns, how its warps share them, the box of positions of a step, and into how
many parts the steps are divided (split-K). The compiled constants depend on the layer and on which of four kinds
(`volume_kind`) the volume is of.

Terms: a word is 32 bits, one float32 or two 16-bit elements; a segment is four words along w; a row of K is eight
segments of x in shared memory; a chunk is four segments, one for each lane of a quad. A sheet is the part of dy that
a block's taps read for one position along d; a plane is one phase of a sheet. A piece is the taps along w of one
launch. A slot is the source and destination of one copy of dy. An item is one chunk for one tile of 64 rows.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from ...planning import calibration, offers, tensor_cores
from ...planning.arguments import per_axis
from ...planning.calibration import Work
from ...planning.geometry import Axis, Geometry, Triple
from ...planning.launch import Constants, Launch, axis_constants
from ...planning.offers import Answer, Offer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, Strides
from ...planning.scalars import SCALARS
from .arguments import HOPPER_WEIGHT_GRAD, REDUCE_TAPS
from .hopper_model import (
    JOB_CHANNELS,
    ROUNDING,
    VECTORS,
    WORDS,
    costs_of,
    elements_of,
    splits_of,
    step_work,
    steps_of,
)
from .hopper_search import MAX_SEGMENTS, best_buffers, candidates, pieces_of, tiling_cycles, tiling_of
from .hopper_search import forget as forget  # part of the family's interface to the planner
from .hopper_taps import Rows, Words
from .hopper_tiling import Buffers, Layer, Tiling
from .segments import SEGMENT, vector_of, wide

PRODUCTS_PER_CYCLE = 1024  # TF32 multiply-adds per cycle and multiprocessor
KERNEL = "hopper_weight_grad"
SHIFTED = "weight_grad, 16 bit, shifted lines"  # kind of the rates if lines of dy begin anywhere in vectors of memory
COPYING_IS_WORTH = 1.4  # longest predicted time of word-by-word copies, relative to the products


# ---- The bias gradient, which the same launches compute.


def _bias_slots(axis: Axis, kinds: tuple[Rows, ...], step: int) -> tuple[tuple[int, ...], ...]:
    """Returns, per kind of block and tap, the first slot of the tap's phase among a channel's partial sums; -1 for a
    tap that is not an own tap."""
    most = max(len(rows.taps) for rows in kinds)
    of = {tap: axis.phase(tap) * step for tap in axis.own_taps}
    return tuple(tuple(of.get(t, -1) for t in rows.taps) + (-1,) * (most - len(rows.taps)) for rows in kinds)


def _bias_constants(p: Problem, tiling: Tiling, piece: Words) -> Constants:
    if not p.bias:
        return (("kBias", False),)
    d, h, w = p.geometry.axes
    return (
        ("kBias", True),
        ("kBiasSlots", bias_slots(p.geometry, tiling)),
        ("kBiasSlotD", _bias_slots(d, tiling.rows_d, h.stride)),
        ("kBiasSlotH", _bias_slots(h, tiling.rows_h, 1)),
        ("kBiasSlotW", tiling.pieces.index(piece) * d.stride * h.stride),
        ("kBiasWords", piece.own_words(w)),
    )


def bias_slots(g: Geometry, tiling: Tiling) -> int:
    """Returns how many sums per output channel the blocks with one part of the positions and one tile of input
    channels write: one for each row of own taps."""
    return len(tiling.pieces) * g.stride[0] * g.stride[1]


# ---- The interface of the family to the planner.


def layer_of(p: Problem) -> Layer:
    x, y = vector_of(p, p.input, p.input_size[2]), vector_of(p, p.output, p.output_size[2])
    elements_y = y == 0 or (p.item_bytes == 2 and p.geometry.stride[2] > 1)
    y = y if p.output[4] == 1 else 0
    layer = Layer(p.geometry, p.dtype, x == 0, x == SEGMENT, elements_y, y, *_pieces(p))
    if p.item_bytes == 2 and y == 0 and p.aligned and p.output[4] == 1:
        shifted = replace(layer, vector_y=SEGMENT, shifted_y=True)
        if all(piece.lines for pieces in pieces_of(shifted) for piece in pieces):
            return shifted
    (_, height, width), half = p.input_size, SEGMENT * layer.per_word // 2
    if width != half or height % 2 or p.input[3:] != (half, 1) or wide(p, MAX_SEGMENTS):
        return layer
    twice = replace(layer, vectors_x=vector_of(p, as_walked(p, 2)[1], 2 * width) == SEGMENT, at_once=2)
    in_lines = all(piece.lines for pieces in pieces_of(twice) for piece in pieces)
    return twice if in_lines and twice.vectors_x else layer


def _unit_c(p: Problem) -> tuple[bool, bool]:
    """Returns whether x and dy have contiguous channels."""
    x, y = (strides[1] == 1 and strides[4] != 1 for strides in (p.input, p.output))
    return x, y


def _pieces(p: Problem) -> tuple[int, int]:
    """Returns how many words one copy has of the channels of a position of x and dy, or 0 as `Layer` says."""
    g = p.geometry

    def words(strides: Strides, channels: int) -> int:
        multiples = (*strides[:1], *strides[2:], channels)
        return next(n for n in (4, 2, 1) if n == 1 or (p.aligned and not any(v % n for v in multiples)))

    found = zip(_unit_c(p), (p.input, p.output), (g.in_per_group, g.out_per_group), strict=True)
    x, y = (words(strides, channels) if unit_c else 0 for unit_c, strides, channels in found)
    return x, y


def as_walked(p: Problem, at_once: int) -> tuple[Triple, tuple[int, ...]]:
    """Returns the size and strides of x with `at_once` adjacent lines treated as one."""
    depth, height, width = p.input_size
    return (depth, height // at_once, width * at_once), (*p.input[:3], at_once * p.input[3], p.input[4])


def why_never(problem: Problem, device: Device) -> str | None:
    """Returns a reason for refusal that is known without a search for a tiling, or None."""
    p, g = problem, problem.geometry
    if p.which is not Pass.WEIGHT_GRAD:
        return f"computes weight gradients, not the pass {p.which.value}"
    if p.bias and not g.own_taps_cover:
        return "no set of taps reads every output once, as a bias's gradient needs it"
    if refusal := tensor_cores.why_not(p, device, tensor_cores.WARPGROUP):
        return refusal
    if p.item_bytes == 2 and any(_unit_c(p)):
        return "a word of 16-bit elements has two channels"
    if any(size > 2**20 for size in p.input_size) or p.batch * max(p.input_size) >= 2**30:
        return "the volume is too long"
    if any(axis.kernel * axis.dilation + axis.padding + 128 * axis.stride > 2**14 for axis in g.axes):
        return "the taps reach too far"
    return None


def least_cycles(problem: Problem, device: Device) -> float:
    """Returns a lower bound of `cycles` without a search for a tiling: a block, and the products of warpgroups."""
    layer, rate = layer_of(problem), PRODUCTS_PER_CYCLE * 4 / problem.item_bytes
    block = VECTORS.block if not (layer.slow or layer.elements_y) else min(VECTORS.block, WORDS.block)
    return ROUNDING * (block + problem.flops / 2 / rate / device.multiprocessors)


def why_not(problem: Problem, device: Device) -> str | None:
    if refusal := why_never(problem, device):
        return refusal
    p = problem
    layer = layer_of(p)
    size, _ = as_walked(p, layer.at_once)
    found = tiling_of(layer, device, p.batch, size)
    if found is None and next(candidates(layer), None) is None:
        return "no tiling has enough products that count and few enough registers"
    made = best_buffers(layer, found, size, device.shared_bytes) if found else None
    if made is None:
        return "the taps reach too far for shared memory"
    works = [step_work(layer, made, piece) for piece in made.tiling.pieces]
    products, copying = sum(work.products for work in works), sum(work.copying for work in works)
    if costs_of(layer, made.tiling.pieces[0]) is WORDS and COPYING_IS_WORTH * products < copying:
        return "copying operands that are not words along w would take longer than the products"
    return None


def cycles(problem: Problem, device: Device) -> float:
    """Predicts the cycles of all launches."""
    layer = layer_of(problem)
    size, _ = as_walked(problem, layer.at_once)
    tiling = tiling_of(layer, device, problem.batch, size)
    assert tiling is not None, "cycles() of a problem that why_not() refuses"
    return tiling_cycles(layer, tiling, problem.batch, size, device)


PASSES = (Pass.WEIGHT_GRAD,)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    ask = KERNEL, wanted, device, why_not, work, plan
    found = [*offers.one_by_one(PASSES, *ask), *offers.weight_with_bias(*ask)]
    return [_with_kind(answer) if isinstance(answer, Offer) else answer for answer in found]


def _with_kind(offer: Offer) -> Offer:
    if kind := kind_of(offer.problem):
        return replace(offer, kind=kind, surcharge=calibration.surcharge(KERNEL, offer.device, kind))
    return offer


def kind_of(problem: Problem) -> str:
    """Returns the kind of the rates for a problem if it is not `calibration.kind_of`, else an empty text."""
    return SHIFTED if layer_of(problem).shifted_y else ""


def work(problem: Problem, device: Device) -> Work:
    """Returns the predicted work of the plan's launches."""
    return Work(2, cycles(problem, device))


def plan(problem: Problem, device: Device, slices: int = 1, tiling: Tiling | None = None) -> Plan:
    """Returns the plan, for the best tiling unless one is given.

    With several `slices`, the problem is one of so many equal slices of the batch: each slice has launches of its
    own, and one launch adds the partial sums of all slices.
    """
    p, g, layer = problem, problem.geometry, layer_of(problem)
    size, _ = as_walked(p, layer.at_once)
    chosen = tiling or tiling_of(layer, device, p.batch, size)
    made = best_buffers(layer, chosen, size, device.shared_bytes) if chosen else None
    assert made is not None, "plan() of a problem that why_not() refuses"
    tiling, count = made.tiling, elements_of(g)
    splits = splits_of(layer, made, p.batch, size, device, slices)
    direct = splits == slices == 1 and _direct(p, device, tiling)
    parts = 0 if direct else slices * splits
    own_bias_parts = splits * -(-g.in_per_group // tiling.columns) * bias_slots(g, tiling) if p.bias else 0
    bias_parts = slices * own_bias_parts
    mains = tuple(_main(p, layer, made, piece, splits, direct) for piece in tiling.pieces)
    regions = [("bias_parts", 4 * parts * count)] if p.bias else []
    if slices > 1:
        mains = tuple(_of_slice(main, i) for i in range(slices) for main in mains)
        regions += [(f"workspace {i}", 4 * i * splits * count) for i in range(slices)]
    if slices > 1 and p.bias:
        first, step = 4 * parts * count, 4 * own_bias_parts * g.out_channels
        regions += [(f"bias_parts {i}", first + i * step) for i in range(slices)]
    sums = (_sum_of_parts(p, device, tiling.kinds(g), parts, bias_parts),) if parts or p.bias else ()
    box = made.box
    tile = f"{tiling}, steps of {box.d} x {box.h} lines of {box.w * SEGMENT} words, {splits} parts"
    return Plan(
        "hopper_weight_grad",
        "positions as K on warpgroup tensor cores",
        (*mains, *sums),
        4 * (parts * count + bias_parts * g.out_channels),
        tile,
        tuple(regions),
    )


def _of_slice(main: Launch, index: int) -> Launch:
    """Returns the launch for one slice of the batch, with workspace regions of its own for its partial sums."""
    own = {name: f"{name} {index}" for name in ("workspace", "bias_parts")}
    return replace(main, pointers=tuple(own.get(name, name) for name in main.pointers))


def _slices(device: Device, kinds: int) -> int:
    """Returns how many warps share the partial sums of an element: more where few kinds of blocks share the GPU,
    since there are many parts then.

    The exact number of parts is not used: it depends on the volume, and a compiled constant must not.
    """
    return max(slices for slices in (1, 2, 4, 8) if slices == 1 or 8 * slices <= device.multiprocessors // kinds)


def _result_bytes(tiling: Tiling) -> int:
    """Returns the bytes of shared memory through which a block writes a single part to the result."""
    taps = tiling.block_rows * max(len(piece.taps) for piece in tiling.pieces)
    words = tiling.out_tile * (taps + 1 - taps % 2)
    return 4 * tiling.columns * (words + (20 - words) % 16)


def _direct(p: Problem, device: Device, tiling: Tiling) -> bool:
    """Tells whether a single part can be written straight to the result: dw is contiguous, and shared memory has room
    to transpose a block's sums."""
    g = p.geometry
    dense = (g.out_per_group * g.taps, g.taps, g.kernel[1] * g.kernel[2], g.kernel[2], 1)
    return _result_bytes(tiling) <= device.shared_bytes and p.weight == dense


def _sum_of_parts(p: Problem, device: Device, kinds: int, splits: int, bias_parts: int) -> Launch:
    """Returns the launch that adds the parts of the weight gradient (none if `splits` is 0) and the bias gradient."""
    g, (ci, co, _, _, tap) = p.geometry, p.weight
    slices = _slices(device, kinds)

    def blocks(rows: int) -> int:
        return -(-g.out_per_group * g.taps // rows) * -(-g.in_channels // 32)

    rows = 64 // slices  # 8 rows per warp
    while rows > max(2, 8 // slices) and blocks(rows) < 3 * device.multiprocessors:
        rows //= 2
    bias_blocks = -(-g.out_channels // 8) if p.bias else 0
    weight_blocks, channels = (blocks(rows), g.in_channels) if splits else (0, 0)
    bias_places = {"bias_parts": "bias_parts", "bias": "db"} if p.bias else {"bias_parts": "null", "bias": "null"}
    return REDUCE_TAPS.launch(
        weight_blocks + bias_blocks,
        256,
        (("Scalar", SCALARS[p.dtype]), ("kRows", rows), ("kSlices", slices), ("kBias", p.bias)),
        {"parts": "workspace", "result": "dw", **bias_places},
        overlaps=True,
        stride_in=ci,
        stride_out=co,
        stride_tap=tap,
        count=elements_of(g),
        splits=splits,
        taps=g.taps,
        out=g.out_per_group,
        **{"in": channels},
        bias_splits=bias_parts,
        channels=g.out_channels,
    )


def _main(p: Problem, layer: Layer, made: Buffers, piece: Words, splits: int, direct: bool) -> Launch:
    g, contents, tiling, box = p.geometry, made.contents, made.tiling, made.box
    size, strides = as_walked(p, layer.at_once)
    steps = steps_of(p.batch, size, layer, box)
    jobs = box.d * tiling.planes[0] // contents.table_planes * -(-tiling.lines // _job_lines(tiling))
    jobs = contents.lines if layer.piece_y else jobs
    places = {"parts": "null", "result": "dw"} if direct else {"parts": "workspace", "result": "null"}
    return HOPPER_WEIGHT_GRAD.launch(
        tiling.kinds(g) * splits,
        tiling.share.threads,
        _constants(p, layer, tiling, piece),
        {**places, "bias_parts": "bias_parts" if p.bias else "null"},
        shared_bytes=max(made.bytes, _result_bytes(tiling)) if direct else made.bytes,
        overlaps=True,
        x_strides=strides,
        dy_strides=p.output,
        x_size=size,
        dy_size=p.output_size,
        box=(box.d, box.h, box.w),
        steps=steps,
        splits=splits,
        ahead=contents.ahead,
        groups=made.groups,
        lines=contents.lines,
        line_words=contents.line_words,
        line_pitch=made.line_pitch,
        plane_pitch=made.plane_pitch,
        pair_pitch=made.pair_pitch,
        **per_axis("by", box.count(size, layer.per_word)),
        by_jobs=jobs,
    )


def _job_lines(tiling: Tiling) -> int:
    """Returns how many channels of dy, or pairs of channels, a producer warp copies at a time: a divisor of
    `tiling.lines`."""
    if tiling.pieces[0].last:
        return 1
    sizes = [size for size in range(1, 2 * JOB_CHANNELS + 1) if tiling.lines % size == 0]
    few = max(size for size in sizes if size <= JOB_CHANNELS)
    return few if 2 * few >= JOB_CHANNELS else sizes[-1]


def _rows_constants(name: str, kinds: tuple[Rows, ...]) -> Constants:
    """Returns the tables by kind of block, with rows padded to one length by zeros that are never read."""
    taps, planes = max(len(rows.taps) for rows in kinds), max(len(rows.offsets) for rows in kinds)

    def table(values: list[tuple[int, ...]], length: int) -> tuple[tuple[int, ...], ...]:
        return tuple((*row, *([0] * (length - len(row)))) for row in values)

    return (
        (f"kKinds{name}", len(kinds)),
        (f"kRows{name}", taps),
        (f"kPlanes{name}", planes),
        (f"kCount{name}", tuple(len(rows.taps) for rows in kinds)),
        (f"kPlaneOffset{name}", table([rows.offsets for rows in kinds], planes)),
        (f"kTap{name}", table([rows.taps for rows in kinds], taps)),
        (f"kPlane{name}", table([rows.planes for rows in kinds], taps)),
        (f"kShift{name}", table([rows.shifts for rows in kinds], taps)),
    )


def _constants(p: Problem, layer: Layer, tiling: Tiling, piece: Words) -> Constants:
    g = p.geometry
    return (
        ("Scalar", SCALARS[p.dtype]),
        ("kWide", wide(p, MAX_SEGMENTS)),
        ("kElementsX", layer.elements_x),
        ("kVectorsX", layer.vectors_x),
        ("kElementsY", layer.elements_y and not piece.lines),
        ("kLines", piece.lines),
        ("kVectorY", piece.vector),
        ("kShifted", piece.shifted),
        ("kLinesAtOnce", piece.at_once),
        ("kPieceX", layer.piece_x),
        ("kPieceY", gcd(layer.piece_y, tiling.out_tile) if layer.piece_y else 0),
        ("kConsumers", tiling.share.consumers),
        ("kProducers", tiling.share.producers),
        ("kTurners", layer.turners(tiling.share)),
        ("kConsumerRegisters", tiling.share.consumer),
        ("kProducerRegisters", tiling.share.producer),
        ("kStages", tiling.stages),
        ("kDepth", tiling.depth),
        ("kGroups", g.groups),
        ("kInPerGroup", g.in_per_group),
        ("kOutPerGroup", g.out_per_group),
        ("kColumns", tiling.columns),
        ("kOutTile", tiling.out_tile),
        ("kRowTiles", tiling.row_tiles),
        ("kJobLines", _job_lines(tiling)),
        *_rows_constants("D", tiling.rows_d),
        *_rows_constants("H", tiling.rows_h),
        ("kPlanesW", tiling.planes[2]),
        ("kPlaneOffsetW", (*piece.offsets, *([0] * (tiling.planes[2] - len(piece.offsets))))),
        ("kTaps", len(piece.taps)),
        ("kTapW", piece.taps),
        *piece.constants,
        *_bias_constants(p, tiling, piece),
        *axis_constants(g.axes, "kernel", "stride"),
    )
