"""Plans few_outputs.cuh: the forward pass of layers with few output channels, products first, shifts afterwards.

A model counts what a multiprocessor has to do per position, and chooses the tile of positions, the rows of the GEMM
per warp, and the ring of input chunks in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ...planning import offers, tensor_cores
from ...planning.calibration import Work
from ...planning.geometry import Gather, Geometry
from ...planning.launch import Constants, axis_constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, last_offset
from ...planning.scalars import INT32_MAX, SCALARS, power_of_two_up
from ...planning.side import Side
from .arguments import FEW_OUTPUTS

HAS_EPILOGUE = True
HOLDS_CHANNELS = True
HEIGHTS, WIDTHS = (4, 8, 16), (8, 16, 32, 64)  # sizes of tiles along h and w, in positions
MIN_IN = 8  # input channels per group: fewer do not fill K of a matrix instruction
MAX_OUT = 4  # output channels per group: with more, channels alone fill the columns of a matrix instruction
MAX_SUMS = 96  # accumulators per thread for the GEMM
MAX_TOTALS = 48  # registers per thread for the outputs of a position
MAX_WARPS = 16  # per block
STAGES = (2, 3, 4)  # candidates for the chunks of a warp's ring
KEPT_COPIES = 8  # copies per lane and chunk up to which their addresses stay in registers

# Rates of one multiprocessor, by which the model compares tiles.
CYCLES_PER_MULTIPLY = 6.0  # cycles per matrix instruction of a scheduler, chosen by measurement on an H200
BYTES_PER_CYCLE = 18.0  # bytes per cycle read from global memory
L2_BYTES_PER_CYCLE = 16.0  # bytes per cycle read from L2
SECTOR_BYTES = 32
BARRIER_CYCLES = 100.0  # cycles from a barrier until all warps issue again
REGISTERS = 65536  # per multiprocessor


def _offsets(gather: Gather) -> list[int]:
    return [gather.offset(f, j) for f in range(gather.phases) for j in range(gather.count[f])]


def _span(gather: Gather) -> int:
    return max(_offsets(gather)) - min(_offsets(gather))


def _up(value: int, multiple: int, rest: int = 0) -> int:
    """Returns the least number >= `value` that is `rest` modulo `multiple`."""
    return value + (rest - value) % multiple


@dataclass(frozen=True)
class Layer:
    """Describes the compile-time constants that do not depend on the tile."""

    geometry: Geometry
    item_bytes: int
    channels_last: bool
    vector: int  # elements per asynchronous copy; 0 if elements are copied one by one through registers
    strict: bool = False  # every float32 product is computed as three TF32 products

    @classmethod
    def of(cls, problem: Problem) -> Layer:
        n, c, d, h, w = problem.input
        strict = problem.dtype == "float32" and not problem.tf32
        channels_last = c == 1 and w != 1
        per_word = 4 // problem.item_bytes
        contiguous, others = (c, (n, d, h, w)) if channels_last else (w, (n, c, d, h))
        length = problem.geometry.in_per_group if channels_last else problem.input_size[2]
        for vector in (16 // problem.item_bytes, 8 // problem.item_bytes, per_word):
            if contiguous == 1 and problem.aligned and not any(v % vector for v in (*others, length)):
                return cls(problem.geometry, problem.item_bytes, channels_last, vector, strict)
        return cls(problem.geometry, problem.item_bytes, channels_last, 1 if per_word == 1 else 0, strict)

    @property
    def window(self) -> int:
        d = self.geometry.axes[0]
        return max(d.dilation * (d.kernel - 1) + 1, d.stride)

    @property
    def group_tiles(self) -> int:
        """The number of 8-column tiles for the `stride` output planes that one input plane completes."""
        _, h, w = self.geometry.kernel
        return -(-self.geometry.stride[0] * h * w * self.geometry.out_per_group // 8)

    @property
    def column_tiles(self) -> int:
        stride, (_, h, w) = self.geometry.stride[0], self.geometry.kernel
        groups = -(-self.window // stride)
        rest = self.window - (groups - 1) * stride
        return (groups - 1) * self.group_tiles + -(-rest * h * w * self.geometry.out_per_group // 8)

    @property
    def step(self) -> int:
        """K of one matrix instruction, in input channels."""
        return 32 // self.item_bytes

    @property
    def halves(self) -> int:
        """The number of TF32 operands that a value is split into."""
        return 2 if self.strict else 1

    @property
    def products(self) -> int:
        """The number of matrix instructions per step and tile of the GEMM: three for split values."""
        return 3 if self.strict else 1


@dataclass(frozen=True)
class Tile:
    """Describes a block's positions with their halo, how its warps share the rows of the GEMM, and its ring."""

    layer: Layer
    h: int
    w: int
    whole: bool  # the tile spans all of x along w, so that everything beyond its ends is zero
    row_tiles: int  # tiles of 16 GEMM rows per warp
    chunk: int  # input channels per chunk, the unit that a warp copies at a time
    stages: int  # chunks in a warp's ring in shared memory

    @property
    def chunks(self) -> int:
        return -(-self.layer.geometry.in_per_group // self.chunk)

    @property
    def steps(self) -> int:
        return self.chunks * self.chunk // self.layer.step

    @property
    def halo_h(self) -> int:
        return self.h + _span(self.layer.geometry.axes[1].scatter)

    @property
    def origin_w(self) -> int:
        """Offset of a line's first element from the tile's first position, rounded down to a vector's start."""
        if self.whole:
            return 0
        first = min(_offsets(self.layer.geometry.axes[2].scatter))
        return first if self.layer.channels_last else first - first % max(1, self.layer.vector)

    @property
    def line(self) -> int:
        """Elements of a line of the tile with its halo, rounded up to whole vectors."""
        if self.whole:
            return self.w
        end = self.w + max(_offsets(self.layer.geometry.axes[2].scatter)) - self.origin_w
        return end if self.layer.channels_last else _up(end, max(1, self.layer.vector))

    @property
    def gap(self) -> int:
        """Zeros between lines in shared memory, which outputs at the borders read in place of elements outside x."""
        offsets = _offsets(self.layer.geometry.axes[2].scatter)
        return max(0, -min(offsets), max(offsets)) if self.whole else 0

    @property
    def warps(self) -> int:
        return -(-self.halo_h * self.line // (16 * self.row_tiles))

    @property
    def rows(self) -> int:
        return self.row_tiles * self.warps * 16

    @property
    def pitch(self) -> int:
        """Words from column to column in shared memory: 4 modulo 32, against bank conflicts of fragment stores."""
        return _up(self.gap + -(-self.rows // self.line) * (self.line + self.gap), 32, 4)

    @property
    def item_pitch(self) -> int:
        """Elements from channel to channel in a stage (channels-last: from row to row), without bank conflicts."""
        return self.chunk if self.layer.channels_last else 16 * self.row_tiles + 8

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory for one stage of one warp."""
        lines = 16 * self.row_tiles if self.layer.channels_last else self.chunk
        return lines * self.item_pitch * self.layer.item_bytes

    @property
    def copies(self) -> int:
        """The number of copies that a lane issues per chunk."""
        return self.row_tiles * 16 * self.chunk // max(1, self.layer.vector) // 32

    @property
    def shared_bytes(self) -> int:
        layer = self.layer
        weights = self.steps * layer.column_tiles * 256 * layer.halves
        return weights + layer.group_tiles * 8 * self.pitch * 4 + self.warps * self.stages * self.stage_bytes

    @property
    def registers(self) -> int:
        sums = self.row_tiles * self.layer.column_tiles * 4
        totals = self.layer.geometry.stride[1] * self.layer.geometry.stride[2] * self.layer.geometry.out_per_group
        kept = self.copies * (1 if self.layer.channels_last else 2) if self.copies <= KEPT_COPIES else 0
        operands = 4 * self.row_tiles
        if self.layer.strict:  # split operands, and separate accumulators for the products of one step
            operands += self.row_tiles * 8
        return _up(max(sums + operands + kept, sums + totals) + 36, 8)

    def blocks(self, device: Device) -> int:
        """Returns how many blocks fit a multiprocessor. Registers are allocated for four warps at a time."""
        by_shared = (device.shared_bytes + 1024) // (self.shared_bytes + 1024)
        return min(by_shared, REGISTERS // (self.registers * 32 * _up(self.warps, 4)))

    def fits(self, device: Device) -> bool:
        few = self.row_tiles * self.layer.column_tiles * 4 <= MAX_SUMS
        return few and self.warps <= MAX_WARPS and self.blocks(device) >= 1

    def cycles(self, device: Device) -> float:
        """Returns the predicted cycles of a multiprocessor per position and input plane."""
        layer = self.layer
        blocks, positions = self.blocks(device), self.h * self.w
        multiplies = self.warps * self.row_tiles * layer.column_tiles * self.steps * layer.products
        line = layer.geometry.in_per_group * self.line if layer.channels_last else self.line
        sectors = -(-line * layer.item_bytes // SECTOR_BYTES)
        fetched = self.halo_h * sectors * SECTOR_BYTES * (1 if layer.channels_last else layer.geometry.in_per_group)
        group = layer.group_tiles * 8
        shared = (
            self.warps * self.chunks * self.stage_bytes / 128
            + self.warps * self.steps * (4 * self.row_tiles + 2 * layer.halves * layer.column_tiles)
            + (self.rows + positions) * group / 32
        )
        per_copy = 10 if self.copies <= KEPT_COPIES else 40
        instructions = (
            multiplies * (2.3 if layer.strict else 1)  # strict products include additions to the window
            + self.warps * self.steps * (layer.column_tiles + self.row_tiles * (52 if layer.strict else 12))
            + self.warps * self.chunks * self.copies * per_copy
            + positions * group / 32 * 2
        )
        parts = (
            multiplies * CYCLES_PER_MULTIPLY / 4,
            instructions / 4,
            shared,
            fetched / L2_BYTES_PER_CYCLE,
            positions * layer.geometry.in_per_group * layer.item_bytes / BYTES_PER_CYCLE,
        )
        alone = 4 / (blocks * self.warps)  # share of the shorter parts that no other warp hides
        return (max(parts) + alone * (sum(parts) - max(parts)) + 2 * BARRIER_CYCLES / blocks) / positions

    def __str__(self) -> str:
        return f"{self.h} x {self.w} positions per block of {self.warps} warps, walking along depth"


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Returns every tile that fits, the predicted fastest first; it depends on a volume's width only below 64."""
    layer = Layer.of(problem)
    width = problem.geometry.axes[2].positions(problem.output_size[2])
    widest = max(WIDTHS[0], power_of_two_up(width))
    found = [
        Tile(layer, h, w, max(width, problem.input_size[2]) <= w, row_tiles, steps * layer.step, stages)
        for h, w, row_tiles, steps, stages in product(HEIGHTS, WIDTHS, (1, 2, 3), (1, 2), STAGES)
        if w <= widest and (steps == 1 or problem.geometry.in_per_group > layer.step)
    ]
    fitting = [tile for tile in found if tile.fits(device)]
    # Equal predictions are decided for three stages, and for chunks of two steps except for contiguous 16-bit types
    # and strict float32; chosen by measurement on an H200.
    larger = -1 if (layer.item_bytes == 4 and not layer.strict) or layer.channels_last else 1
    return sorted(fitting, key=lambda tile: (tile.cycles(device), abs(tile.stages - 3), larger * tile.chunk))


def why_not(problem: Problem, device: Device) -> str | None:
    g = problem.geometry
    if problem.which is not Pass.FORWARD:
        return "it computes the forward pass"
    if refusal := tensor_cores.why_not(problem, device, tensor_cores.WARP, in_halves=True):
        return refusal
    if g.out_per_group > MAX_OUT:
        return f"more than {MAX_OUT} output channels per group"
    if g.in_per_group < MIN_IN:
        return f"fewer than {MIN_IN} input channels per group"
    if g.stride[1] * g.stride[2] * g.out_per_group > MAX_TOTALS:
        return "the outputs of a position do not fit the registers"
    if not tiles(problem, device):
        return "the products of all taps do not fit a multiprocessor"
    if Layer.of(problem).strict:
        return tensor_cores.why_not_halves(Side.of(problem).mean_terms, problem.loose)
    return None


PASSES = (Pass.FORWARD,)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offers.one_by_one(PASSES, "few_outputs", wanted, device, why_not, work, plan)


def work(problem: Problem, device: Device) -> Work:
    """Returns the work of the launch: the predicted cycles of the busiest multiprocessor."""
    tile = tiles(problem, device)[0]
    walked, _ = _walks(problem, tile, device)
    return Work(1, walked * tile.cycles(device) * tile.h * tile.w * tile.blocks(device))


def plan(problem: Problem, device: Device) -> Plan:
    tile = tiles(problem, device)[0]
    tiles_h, tiles_w, flat = _grid(problem, tile)
    _, planes = _walks(problem, tile, device)
    parts = -(-problem.output_size[0] // planes)
    launch = FEW_OUTPUTS.launch(
        flat * parts,
        32 * tile.warps,
        _constants(problem, tile),
        {"w": "weight"},
        shared_bytes=tile.shared_bytes,
        min_blocks=tile.blocks(device),
        x_strides=problem.input,
        y_strides=problem.output,
        w_strides=problem.weight,
        x_size=problem.input_size,
        y_size=problem.output_size,
        planes=planes,
        batch=problem.batch,
        tiles_w=tiles_w,
        tiles_h=tiles_h,
        parts=parts,
    )
    why = "tensor cores, a column for every tap" + (", three TF32 products" if tile.layer.strict else "")
    return Plan("few_outputs", why, (launch,), tile=str(tile))


def _constants(problem: Problem, tile: Tile) -> Constants:
    g, layer = problem.geometry, tile.layer
    d, h, w = g.axes
    origin_h, column_line = min(_offsets(h.scatter)), tile.line + tile.gap
    taps = list(product(range(h.kernel), range(w.kernel)))
    chunk = last_offset((tile.chunk, *problem.input_size[1:]), (problem.input[1], *problem.input[3:]))
    return (
        ("Scalar", SCALARS[problem.dtype]),
        ("Epilogue", problem.activation),
        ("kHalves", layer.halves),
        ("kWide", chunk > INT32_MAX),
        ("kChannelsLast", layer.channels_last),
        ("kChannelsLastOut", problem.output[4] != 1),
        ("kVector", layer.vector),
        ("kIn", g.in_per_group),
        ("kOut", g.out_per_group),
        ("kTileH", tile.h),
        ("kTileW", tile.w),
        ("kHaloH", tile.halo_h),
        ("kLine", tile.line),
        ("kGap", tile.gap),
        ("kOriginH", origin_h),
        ("kOriginW", tile.origin_w),
        ("kPitch", tile.pitch),
        ("kItemPitch", tile.item_pitch),
        ("kChunk", tile.chunk),
        ("kStages", tile.stages),
        ("kRowTiles", tile.row_tiles),
        ("kWindow", layer.window),
        ("kStrideD", d.stride),
        ("kPaddingD", d.padding),
        ("kDilationD", d.dilation),
        *axis_constants(g.axes, "kernel"),
        ("kStrideH", h.stride),
        ("kStrideW", w.stride),
        ("kJoined", _joined(problem)),
        ("kTapPhase", tuple(h.phase(th) * w.stride + w.phase(tw) for th, tw in taps)),
        (
            "kTapOffset",
            tuple((-h.shift(th) - origin_h) * column_line - w.shift(tw) - tile.origin_w for th, tw in taps),
        ),
    )


def _joined(problem: Problem) -> int:
    """Returns how many outputs of a position and a line are contiguous and can be stored by one instruction."""
    g, (_, c, _, _, w) = problem.geometry, problem.output
    joined = g.stride[2] if w == 1 else 1
    if g.groups == 1 and w == g.out_channels and (c == 1 or g.out_channels == 1):
        joined = g.stride[2] * g.out_channels
    return joined if joined in (2, 4, 8) else 1


def _grid(problem: Problem, tile: Tile) -> tuple[int, int, int]:
    """Returns the number of tiles along h, along w, and per plane of all batch items and groups."""
    g, (_, out_h, out_w) = problem.geometry, problem.output_size
    tiles_h = -(-g.axes[1].positions(out_h) // tile.h)
    tiles_w = -(-g.axes[2].positions(out_w) // tile.w)
    return tiles_h, tiles_w, problem.batch * g.groups * tiles_h * tiles_w


def _walks(problem: Problem, tile: Tile, device: Device) -> tuple[float, int]:
    """Returns the input planes that a multiprocessor walks in all waves of blocks, and the output planes per block.

    Depth is cut so that the last wave of blocks is as full as possible, with little halo along depth.
    """
    out, axis = problem.output_size[0], problem.geometry.axes[0]
    slots = device.multiprocessors * tile.blocks(device)
    *_, flat = _grid(problem, tile)

    def cost(parts: int) -> float:
        planes = -(-out // parts)
        steps = (planes + axis.dilation * (axis.kernel - 1)) / axis.stride
        return -(-flat * -(-out // planes) // slots) * (steps + 1)

    walked, parts = min((cost(parts), parts) for parts in range(1, max(1, min(out, 64)) + 1))
    return walked, -(-out // parts)
