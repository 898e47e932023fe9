"""Plans few_weight_grad.cuh: the weight gradient of layers with few input or few output channels.

A GEMM with K = positions: rows are the channels of the tensor with many channels, columns are the taps and channels
of the tensor with few. The compile-time constants depend on the layer and on the vector lengths that divide its
tensors' strides and width; the shape of a tile is a run-time argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ...planning import offers, tensor_cores
from ...planning.calibration import Work
from ...planning.launch import Constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, is_channels_last, last_offset
from ...planning.scalars import INT32_MAX, SCALARS, power_of_two_up
from ...planning.side import Side
from ...planning.sums import weight_sums
from .arguments import FEW_WEIGHT_GRAD
from .tiles import Taps, Tile, copied_at_once, fastest

MAX_FEW = 4  # channels per group of the tensor with few channels
MIN_MANY = 8  # channels per group of the tensor with many channels
WARPS = 8  # per block
SUMS = 64  # accumulators per thread
ROW_TILES = 4  # tiles of 16 channels per block, at most
# Bytes of a shared-memory buffer for the tensor with many channels: two buffers per block, two blocks per
# multiprocessor.
BUFFER_BYTES = 40 * 1024
MAX_ROWS = 256  # positions per tile
LINE_BYTES = 32  # cost of starting a line, as the number of bytes that take equally long to copy
BARRIER_BYTES = 8 * 1024  # cost of a barrier, as the number of bytes that take equally long to copy
START, TILE = 25000.0, 8000.0  # cycles of a block for its start and the sum of partial results, and per tile


def few_side(problem: Problem) -> Side:
    """Returns the pass that would compute the tensor with many channels from the tensor with few channels."""
    g = problem.geometry
    which = Pass.INPUT_GRAD if g.out_per_group <= g.in_per_group else Pass.FORWARD
    return Side.of(replace(problem, which=which))


@dataclass(frozen=True)
class Layout:
    """Derives the compile-time constants: taps, and how a block's warps divide rows, columns and positions."""

    taps: Taps

    @property
    def side(self) -> Side:
        return self.taps.side

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """Phase and first column within the phase of every tile of 8 columns."""
        return tuple(
            (f, first) for f, n in enumerate(self.taps.counts) for first in range(0, n * self.side.reduced, 8)
        )

    @property
    def row_tiles(self) -> int:
        return min(ROW_TILES, -(-self.side.outs // 16))

    @property
    def _most_tiles(self) -> int:
        return max(1, SUMS // (4 * self.row_tiles))

    @property
    def sets(self) -> int:
        """The number of warps of a block with different columns; warps with equal columns split the positions."""
        return min(WARPS, power_of_two_up(-(-len(self.columns) // self._most_tiles)))

    @property
    def warp_tiles(self) -> int:
        return min(self._most_tiles, -(-len(self.columns) // self.sets))

    @property
    def block_tiles(self) -> int:
        return self.sets * self.warp_tiles

    @property
    def kinds(self) -> int:
        many = -(-self.side.outs // (16 * self.row_tiles))
        return self.side.problem.geometry.groups * many * -(-len(self.columns) // self.block_tiles)

    @property
    def run(self) -> int:
        """The number of neighbouring positions that a lane loads: 16 bytes."""
        return 16 // self.side.problem.item_bytes

    @property
    def rows(self) -> int:
        """The most positions that a tile can have."""
        group, channels = 4 * self.run, 16 * self.row_tiles
        fit = BUFFER_BYTES // (channels * self.taps.phases * self.side.problem.item_bytes)
        return max(group, min(MAX_ROWS, power_of_two_up(fit // 2 + 1)))

    @property
    def phase_pitch(self) -> int:
        """Elements from phase to phase in shared memory, padded so that neighbouring phases use different banks."""
        per_word = 4 // self.side.problem.item_bytes
        return self.rows + (16 * per_word - self.rows) % (32 * per_word)

    @property
    def channel_pitch(self) -> int:
        per_word = 4 // self.side.problem.item_bytes
        pitch = self.taps.phases * self.phase_pitch
        return pitch + (16 * per_word - pitch) % (32 * per_word)

    @property
    def buffer_bytes(self) -> int:
        return 16 * self.row_tiles * self.channel_pitch * self.side.problem.item_bytes

    @property
    def table_bytes(self) -> int:
        return -(-self.rows // self.run // 4) * 16

    def shared_bytes(self, tile: Tile) -> int:
        adding = self.table_bytes + self.sets * 32 * self.row_tiles * self.warp_tiles * 16
        return max(adding, self.table_bytes + 2 * self.buffer_bytes + 2 * tile.part_bytes)


@lru_cache(maxsize=1024)
def choose(problem: Problem, device: Device) -> tuple[Layout, Tile, int] | None:
    """Returns layout, tile and blocks per multiprocessor with the least to copy, or None if no tile fits."""
    layout = Layout(Taps.of(few_side(problem)))

    def work(tile: Tile) -> float:
        """Returns the cost of a tile in bytes: copies of both tensors with an extra cost per line, and a barrier."""
        (d, h, w), steps = tile.size, [gather.output_step for gather in layout.side.gathers]
        lines = 16 * layout.row_tiles * d * steps[0] * h * steps[1]
        line = w * steps[2] * problem.item_bytes + LINE_BYTES
        part = tile.part[2] * problem.item_bytes + LINE_BYTES
        return lines * line + 2 * tile.lines * part + BARRIER_BYTES

    found = fastest(layout.side, layout.rows, layout.run, layout.table_bytes + 2 * layout.buffer_bytes, work, device)
    return None if found is None else (layout, *found)


def why_not(problem: Problem, device: Device) -> str | None:
    g = problem.geometry
    if problem.which is not Pass.WEIGHT_GRAD:
        return f"computes weight gradients, not the pass {problem.which.value}"
    if refusal := tensor_cores.why_not(problem, device, tensor_cores.WARP):
        return refusal
    few, many = sorted((g.in_per_group, g.out_per_group))
    if few > MAX_FEW:
        return f"more than {MAX_FEW} channels per group on both sides"
    if many < MIN_MANY:
        return f"fewer than {MIN_MANY} channels per group on either side"
    if few_side(problem).positions >= 2**31:
        return "the volume is too large"
    if choose(problem, device) is None:
        return "the taps reach too far for shared memory"
    return None


PASSES = (Pass.WEIGHT_GRAD,)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offers.one_by_one(PASSES, "few_weight_grad", wanted, device, why_not, work, plan)


def work(problem: Problem, device: Device) -> Work:
    """Returns the work of both launches: the cycles of the busiest multiprocessor, up to 40% fewer than measured."""
    choice = choose(problem, device)
    assert choice is not None, "work() of a problem that why_not() refuses"
    layout, tile, blocks = choice
    return Work(2, START + TILE * -(-tile.count // _splits(layout, tile, blocks, device)))


def _splits(layout: Layout, tile: Tile, blocks: int, device: Device) -> int:
    """Returns the split-K factor: into how many parts the positions are divided."""
    g = layout.side.problem.geometry
    wanted = max(1, device.multiprocessors * blocks // layout.kinds)
    room = device.workspace_bytes // (4 * g.in_channels * g.out_per_group * g.taps)
    return max(1, min(tile.count, wanted, room))


def plan(problem: Problem, device: Device) -> Plan:
    choice = choose(problem, device)
    assert choice is not None, "plan() of a problem that why_not() refuses"
    layout, tile, blocks = choice
    side = layout.side
    p = side.problem
    splits = _splits(layout, tile, blocks, device)
    vector, channel_lanes = _vector(layout), _channel_lanes(side)
    lines_d, lines_h = (n * gather.output_step for n, gather in zip(tile.size[:2], side.gathers[:2], strict=True))
    line_vectors = tile.size[2] * side.gathers[2].output_step // max(1, vector)
    tile_vectors = lines_d * lines_h * line_vectors
    lanes = min(32 * WARPS // channel_lanes, power_of_two_up(tile_vectors))
    many, few = {Pass.INPUT_GRAD: ("x", "dy"), Pass.FORWARD: ("dy", "x")}[p.which]
    main = FEW_WEIGHT_GRAD.launch(
        splits * layout.kinds,
        32 * WARPS,
        _constants(layout, tile, vector, channel_lanes),
        {"many": many, "few": few, "parts": "workspace"},
        shared_bytes=layout.shared_bytes(tile),
        min_blocks=2,
        many_strides=side.y,
        few_strides=side.x,
        many_size=side.y_size,
        few_size=side.x_size,
        tiles=tile.arguments,
        line_vectors=line_vectors,
        tile_vectors=tile_vectors,
        copy_lanes_shift=lanes.bit_length() - 1,
        by_line_vectors=line_vectors,
        by_tile_lines=lines_h,
    )
    sums, why = weight_sums(p, [main], splits), "positions as K on tensor cores, columns of taps"
    return Plan("few_weight_grad", why, sums.launches, sums.bytes, f"{tile}, {splits} parts")


def _vector(layout: Layout) -> int:
    """Returns the elements per copy of the tensor with many channels; 0 if copied one by one through registers."""
    side = layout.side
    if side.gathers[2].output_step != 1:
        return 1 if side.problem.item_bytes == 4 else 0
    return copied_at_once(side.problem, side.y, side.y_size[2])


def _channel_lanes(side: Side) -> int:
    """Returns how many neighbouring threads copy neighbouring channels: 8 if channels are contiguous, else 1."""
    return 8 if is_channels_last(side.y) else 1


def _constants(layout: Layout, tile: Tile, vector: int, channel_lanes: int) -> Constants:
    side = layout.side
    p, g = side.problem, side.problem.geometry
    many_is_input = p.which is Pass.INPUT_GRAD
    reach = [
        (n + layout.rows) * gather.output_step for n, gather in zip(side.grid, side.gathers, strict=True)
    ]  # a tile may extend beyond the volume
    wide = last_offset((2, 16 * layout.row_tiles, *reach), (0, *side.y[1:])) > INT32_MAX
    return (
        ("Scalar", SCALARS[p.dtype]),
        ("kWide", wide or side.wide),
        ("kVector", vector),
        ("kPartVector", tile.vector),
        ("kChannelLanes", channel_lanes),
        ("kGroups", g.groups),
        ("kManyPerGroup", side.outs),
        ("kManyStride", g.out_per_group * g.taps if many_is_input else g.taps),
        ("kFewStride", g.taps if many_is_input else g.out_per_group * g.taps),
        ("kRowTiles", layout.row_tiles),
        ("kSets", layout.sets),
        ("kWarpTiles", layout.warp_tiles),
        ("kTiles", len(layout.columns)),
        ("kTilePhase", tuple(f for f, _ in layout.columns)),
        ("kTileColumn", tuple(first for _, first in layout.columns)),
        ("kRows", layout.rows),
        ("kPhasePitch", layout.phase_pitch),
        ("kChannelPitch", layout.channel_pitch),
        ("kTaps", g.taps),
        ("kKernelH", g.kernel[1]),
        ("kKernelW", g.kernel[2]),
        *layout.taps.constants(),
    )
