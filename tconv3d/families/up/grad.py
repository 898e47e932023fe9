"""Plans for single gradients of up-convolutions with many channels (up_grad.cuh).

Takes TF32 layers whose kernel equals their stride, with two taps along w, where products take longer than moving dy.
Two kernels that each read dy and keep tensor cores busy are then faster than one that reads it once (up_backward).
Chooses how many input channels and rows a block has. The compiled constants depend on the layer and on which of four
kinds (NOMINAL) the volume is of.

Terms: a row is the part of dy of one output channel, tap along d and tap along h; a piece is 16 bytes of a row, two
positions with both taps along w; a chunk is the part of K that one stage of the ring holds. The operand other than dy
is packed: written in the order of shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ...planning import calibration, offers, tensor_cores
from ...planning.arguments import per_axis
from ...planning.geometry import Geometry
from ...planning.launch import Constants, Launch, axis_constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, Strides, dense_strides
from ...planning.scalars import round_up
from ...planning.sums import Sum, add_parts
from ...planning.workspace import ALIGN, placed
from .arguments import UP_GRAD, UP_GRAD_PACK

THREADS = 384
PACK_THREADS, PACK_BLOCKS = 256, 16  # threads of a block that packs, and most such blocks per multiprocessor
SIDE = 64  # pieces (for dx) or rows (for dw) of dy in the tile of a block, half of them for each consumer warpgroup
# Per chunk of K: bytes of an input channel, pieces or rows of dy, and matrix instructions.
ROW_BYTES, CHUNK_PIECES, STEPS = 64, 8, 2
PAD_BYTES = {False: 32, True: 64}  # padding of a row of dy against bank conflicts, for dx (False) and dw (True)
MAX_COLUMNS, COLUMNS = 320, 16  # most columns (input channels) of a block, and their multiple
MIN_STAGES, MAX_STAGES = 4, 8
REGISTERS = (56, 224)  # registers per producer and per consumer thread
MIN_CHANNELS, MIN_POSITIONS = 128, 4096  # fewest input channels and positions; smaller layers were not measured
NOMINAL = (8192, 32768, 131072, 2**20)  # positions of the four kinds of volume

# Rates and costs of a multiprocessor, for choosing between tilings and for comparing with other families.
COLUMN, CHUNK = 1.6, 390.0  # cycles per chunk and column, and per chunk
STORED_BYTES = 19.0  # bytes of sums stored per cycle
MEMORY_BYTES, PACKED_BYTES, ADDED_BYTES = 15.0, 12.0, 28.0  # bytes per cycle of dy and x or dx, of packing, of adding
START, LAUNCH = 9000.0, 3500.0  # cycles to start the main launch, and to launch any other kernel


@dataclass(frozen=True)
class Tiling:
    """How blocks divide input channels. All fields are compiled in."""

    geometry: Geometry
    weight: bool  # True for the weight gradient, False for the input gradient
    columns: int  # input channels of a block
    stages: int

    @property
    def in_tiles(self) -> int:
        return -(-self.geometry.in_channels // self.columns)

    @property
    def panel_bytes(self) -> int:
        return self.columns * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: both operands of a chunk, and two barriers."""
        rows, pieces = SIDE, CHUNK_PIECES
        if not self.weight:
            rows, pieces = pieces, rows
        return self.panel_bytes + rows * (16 * pieces + PAD_BYTES[self.weight]) + 16

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes

    def __str__(self) -> str:
        side = "rows" if self.weight else "positions"
        return f"{2 * SIDE} {side} x {self.columns} columns, {self.stages} stages"


def tilings(g: Geometry, weight: bool, shared_bytes: int) -> list[Tiling]:
    """Returns every division of input channels whose stages fit shared memory."""
    found = []
    units = -(-g.in_channels // COLUMNS)
    for columns in dict.fromkeys(COLUMNS * -(-units // tiles) for tiles in range(1, units + 1)):
        made = Tiling(g, weight, columns, 0)
        stages = min(MAX_STAGES, shared_bytes // made.stage_bytes)
        if columns <= MAX_COLUMNS and stages >= MIN_STAGES:
            found.append(replace(made, stages=stages))
    return found


@dataclass(frozen=True)
class Work:
    """How a volume is divided, which the kernel takes as run-time arguments."""

    tiles: int  # tiles of positions for the input gradient, of rows of dy for the weight gradient
    sharers: int  # blocks that share the tiles for the input gradient, parts of K (split-K) for the weight gradient
    chunks: int  # chunks of an item of work: a tile, or one part of K of a tile
    blocks: int

    @classmethod
    def of(cls, tiling: Tiling, pieces: int, device: Device) -> Work:
        """Divides a volume whose rows of dy have `pieces` pieces."""
        rows = rows_of(tiling.geometry)
        tiles = -(-(rows if tiling.weight else pieces) // SIDE)
        most = max(1, device.multiprocessors // tiling.in_tiles)  # most blocks with equal columns
        if tiling.weight:
            chunks = -(-pieces // CHUNK_PIECES)
            parts = max(1, min(most // tiles, chunks // 2))
            each = round_up(-(-chunks // parts), 2)
            parts = -(-chunks // each)
            return cls(tiles, parts, each, parts * tiles * tiling.in_tiles)
        sharers = -(-tiles // -(-tiles // min(tiles, most)))
        return cls(tiles, sharers, round_up(-(-rows // CHUNK_PIECES), 2), sharers * tiling.in_tiles)

    def packed_chunks(self, tiling: Tiling) -> int:
        return self.chunks * (self.sharers if tiling.weight else 1)


def rows_of(g: Geometry) -> int:
    """Returns the rows of dy, one for each output channel, tap along d and tap along h."""
    return g.out_channels * g.kernel[0] * g.kernel[1]


def pieces_of(p: Problem) -> int:
    """Returns the pieces of a row of dy, two positions each."""
    return p.batch * prod(p.input_size) // 2


def cycles(tiling: Tiling, pieces: int, device: Device) -> float:
    """Predicts the cycles of all launches."""
    g, work = tiling.geometry, Work.of(tiling, pieces, device)
    rows, many = rows_of(g), device.multiprocessors
    item = work.chunks * (COLUMN * tiling.columns + CHUNK) + 8 * SIDE * tiling.columns / STORED_BYTES
    waves = -(-work.blocks // many)
    items = 1 if tiling.weight else -(-work.tiles // work.sharers)
    packed = 2 * tiling.in_tiles * work.packed_chunks(tiling) * tiling.panel_bytes
    moved = 16 * rows * pieces + 8 * pieces * g.in_channels
    sums = 8 * g.in_channels * rows * (work.sharers + 1) if tiling.weight and work.sharers > 1 else 0
    added = sums / (ADDED_BYTES * many) + LAUNCH if sums else 0.0
    main = START + max(waves * items * item, moved / (MEMORY_BYTES * many))
    return main + packed / (PACKED_BYTES * many) + LAUNCH + added


@lru_cache(maxsize=1024)
def choose(g: Geometry, weight: bool, positions: int, device: Device) -> Tiling | None:
    """Returns the best tiling for the kind of volume nearest to `positions`. Kinds are few, so that a new volume
    seldom compiles a new kernel."""
    nominal = min(NOMINAL, key=lambda kind: max(kind, positions) / min(kind, positions))
    found = tilings(g, weight, device.shared_bytes)
    return min(found, key=lambda tiling: cycles(tiling, nominal // 2, device), default=None)


def choose_for(p: Problem, device: Device) -> Tiling | None:
    return choose(p.geometry, p.which is Pass.WEIGHT_GRAD, p.batch * prod(p.input_size), device)


# ---- The interface of the family to the planner.


def why_not(problem: Problem, device: Device) -> str | None:
    p, g = problem, problem.geometry
    if p.which not in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
        return "it computes gradients of input and weight"
    if (refusal := tensor_cores.why_not(p, device, tensor_cores.WARPGROUP)) is not None:
        return refusal
    if p.dtype != "float32":
        return "it is for TF32"
    if g.groups != 1:
        return "it takes no groups"
    if any(axis.padding or axis.output_padding or (axis.dilation > 1 and axis.kernel > 1) for axis in g.axes):
        return "padding or dilation: outputs do not have one position each"
    if g.kernel != g.stride or g.kernel[2] != 2:
        return "the kernel is not the stride, with two taps along w"
    if not _whole_pieces(p):
        return "pairs of positions of contiguous tensors do not lie in one line"
    if not 0 < p.batch * prod(p.input_size) < 2**30 or _units(p) >= 2**31:
        return "too many positions, or none"
    if g.in_channels < MIN_CHANNELS or p.batch * prod(p.input_size) < MIN_POSITIONS:
        return f"fewer than {MIN_CHANNELS} input channels, or than {MIN_POSITIONS} positions"
    if choose_for(p, device) is None:
        return "shared memory has no room for its stages"
    return None


PASSES = (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    ask = "up_grad", wanted, device, why_not, work, plan
    return [*offers.one_by_one(PASSES, *ask), *offers.weight_with_bias(*ask)]


def work(problem: Problem, device: Device) -> calibration.Work:
    """Returns the predicted work of the plan's launches."""
    tiling = choose_for(problem, device)
    assert tiling is not None, "work() of a problem that why_not() refuses"
    launches = 3 if tiling.weight else 2
    return calibration.Work(launches, cycles(tiling, pieces_of(problem), device))


def _units(p: Problem) -> int:
    """Returns an upper bound of the units of 8 words of the packed operand."""
    return p.batch * prod(p.input_size) * (p.geometry.in_channels + MAX_COLUMNS) // 4


def _whole_pieces(p: Problem) -> bool:
    g, size = p.geometry, p.input_size
    dense = p.weight == dense_strides((g.in_channels, g.out_channels, *g.kernel)) and size[2] % 2 == 0
    dy = p.output[4] == 1 and all(v % 4 == 0 for v in p.output[:4])
    x = p.input[4] == 1 and all(v % 2 == 0 for v in p.input[:4])
    return dense and dy and x and p.aligned and (p.which is Pass.INPUT_GRAD or _one_run(p.input, size))


def _one_run(strides: Strides, size: tuple[int, ...]) -> bool:
    return strides[2:] == dense_strides(size)


def plan(problem: Problem, device: Device) -> Plan:
    tiling = choose_for(problem, device)
    assert tiling is not None, "plan() of a problem that why_not() refuses"
    return plan_tiling(problem, device, tiling)


def plan_tiling(p: Problem, device: Device, tiling: Tiling) -> Plan:
    """Returns the plan for a given tiling, so that benchmarks can compare tilings."""
    work = Work.of(tiling, pieces_of(p), device)
    packed = tiling.in_tiles * work.packed_chunks(tiling) * tiling.panel_bytes
    why = "one product with dy as it is in memory, for which the other operand is packed"
    g = p.geometry
    pack = _pack(p, device, tiling, work)
    if not tiling.weight:
        main = _main(p, tiling, work, "dx", 0, 0)
        return Plan("up_grad", why, (pack, main), packed, str(tiling), preparing=1)
    count, planes = g.in_channels * g.out_channels * g.taps, g.kernel[0] * g.kernel[1]
    pitches = round_up(count, 4), round_up(g.out_channels, 4)
    sums = []
    if work.sharers > 1:
        sums.append(Sum("dw parts", "dw", count, pitches[0], work.sharers))
    if p.bias:
        sums.append(Sum("db parts", "db", g.out_channels, pitches[1], work.sharers * planes))
    end, regions = placed(((each.parts, each.bytes) for each in sums), packed)
    main = _main(p, tiling, work, "dw parts" if work.sharers > 1 else "dw", *pitches)
    launches = (pack, main, *((add_parts(sums, p.dtype),) if sums else ()))
    return Plan("up_grad", why, launches, round_up(end, ALIGN), f"{tiling}, {work.sharers} parts", regions)


def _main(p: Problem, tiling: Tiling, work: Work, result: str, dw_pitch: int, db_pitch: int) -> Launch:
    size, bias = p.input_size, p.bias and tiling.weight
    return UP_GRAD.launch(
        work.blocks,
        THREADS,
        (
            ("kWeightGrad", tiling.weight),
            ("kBias", bias),
            *_operand_constants(tiling),
            ("kOut", p.geometry.out_channels),
            *axis_constants(p.geometry.axes, "kernel"),
            ("kStages", tiling.stages),
            ("kProducerRegisters", REGISTERS[0]),
            ("kConsumerRegisters", REGISTERS[1]),
        ),
        {"packed": "workspace", "result": result, "bias_parts": "db parts" if bias else "null"},
        shared_bytes=tiling.shared_bytes,
        overlaps=True,
        dy_strides=p.output,
        dx_strides=p.input,
        dw_pitch=dw_pitch,
        db_pitch=db_pitch,
        tiles=work.tiles,
        sharers=work.sharers,
        pieces=pieces_of(p),
        chunks=work.chunks,
        **per_axis("by", (size[0], size[1], size[2] // 2)),
    )


def _operand_constants(tiling: Tiling) -> Constants:
    return ("kIn", tiling.geometry.in_channels), ("kColumns", tiling.columns)


def _pack(p: Problem, device: Device, tiling: Tiling, work: Work) -> Launch:
    """Returns the launch that packs the weight (for dx) or x (for dw)."""
    g = p.geometry
    chunks = work.packed_chunks(tiling)
    units = tiling.in_tiles * chunks * tiling.columns * STEPS
    if tiling.weight:
        strides, item, items = p.input[:2], prod(p.input_size) // 2, p.batch
    else:
        strides, item, items = (0, g.out_channels * g.taps), g.out_channels * g.taps // 2, 1
    return UP_GRAD_PACK.launch(
        min(-(-units // PACK_THREADS), PACK_BLOCKS * device.multiprocessors),
        PACK_THREADS,
        _operand_constants(tiling),
        {"from": "x" if tiling.weight else "weight", "to": "workspace"},
        overlaps=True,
        item_stride=strides[0],
        channel_stride=strides[1],
        pairs=items * item,
        units=units,
        vectors=item % 4 == 0 and all(stride % 4 == 0 for stride in strides),
        by_item=item,
        by_panel=tiling.columns * STEPS,
        by_chunks=chunks,
    )
