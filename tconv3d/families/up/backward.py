"""Plans for all gradients of an up-convolution that read dy once (up_backward.cuh).

Takes layers whose kernel equals their stride, without padding, on Hopper, as in the decoder of a U-Net. Chooses which
input channels and rows a block owns, the number of stages of its rings, and into how many parts the positions are
divided (split-K). The compiled constants depend on the layer alone, never on the volume.

Terms: a row is the part of dy of one output channel, tap along d and tap along h; a piece is 16 bytes of a row. A
tile is some positions, and a chunk is some rows of a tile. A range is the rows that a block owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from ...planning import tensor_cores
from ...planning.arguments import per_axis
from ...planning.calibration import Work
from ...planning.geometry import Geometry
from ...planning.launch import Constants, Launch, axis_constants
from ...planning.offers import Answer, Offer, Refusal, Wanted
from ...planning.problem import ITEM_BYTES, Device, Pass, Plan, Problem, dense_strides
from ...planning.scalars import SCALARS
from ...planning.sums import Parts, sum_of_parts
from .arguments import UP_BACKWARD

THREADS = 512
# The shape of a chunk by the number of taps along w: rows, pieces of 16 bytes of a row in a tile, and bytes in shared
# memory from one row to the next.
ROWS = {1: 64, 2: 32, 3: 64}
PIECES = {1: 16, 2: 32, 3: 48}
PITCH_BYTES = {1: 272, 2: 544, 3: 784}
MAX_COLUMNS = 64  # most input channels of a block
MAX_SUMS = 128  # most registers per thread that accumulate the weight gradient
STAGES = (8, 7, 6, 5, 4, 3)
# Registers per thread of producers, input-gradient warps and weight-gradient warps, by bytes per element. Tiles of
# 16-bit types have twice as many positions, so their input gradient needs more accumulators.
REGISTERS = {4: (40, 104, 184), 2: (40, 120, 176)}
# Registers per thread of the three roles with three taps along w, where producers copy to more addresses.
REGISTERS_OF_THREE = (56, 104, 176)

# Rates and costs of a multiprocessor, for choosing between tilings.
L2_BYTES, MEMORY_BYTES = 28.0, 18.5  # bytes moved per cycle, by the L2 cache and by memory
CHUNK_CYCLES, CHUNK_COLUMN_CYCLES = 500.0, 8.0  # cycles per chunk, and per chunk and input channel
FEW_STAGES = {3: 1.35, 4: 1.1}  # factor on a chunk's cycles by number of stages, where few copies are in flight
TILE_CYCLES, TILE_COLUMN_CYCLES = 600.0, 10.0  # cycles per tile, and per tile and input channel: x, dx and barriers
BLOCK_OVERHEAD = 8000.0  # cycles per block to load weights, wait for the first tile and store the sums
LAUNCH = 3500.0  # cycles per launch

T = TypeVar("T", bound="Tiling")


@dataclass(frozen=True)
class Tiling:
    """How blocks divide channels and rows. All fields are compiled in."""

    geometry: Geometry
    dtype: str
    columns: int  # input channels of a block
    chunks: int  # chunks of a tile that a block owns
    ranges: int  # ranges that the rows are divided into
    stages: int  # stages of the ring of dy
    stages_x: int  # stages of the ring of x

    @classmethod
    def deep(cls: type[T], g: Geometry, dtype: str, columns: int, chunks: int, ranges: int, stages: int) -> T:
        """Returns the tiling with `stages` stages of dy, and enough stages of x that a tile's x can be requested one
        chunk before the tile's dy."""
        return cls(g, dtype, columns, chunks, ranges, stages, 1 + -(-(stages + 1) // chunks))

    @classmethod
    def divided(
        cls: type[T], g: Geometry, dtype: str, chunks_in_all: int, slabs: int, step: int, shared_bytes: int
    ) -> list[T]:
        """Returns every division of input channels into multiples of `step`, each with the fewest ranges that
        registers and shared memory allow. A chunk has `slabs` slabs of 64 rows of the weight gradient."""
        found: list[T] = []
        for in_tiles in range(-(-g.in_channels // MAX_COLUMNS), -(-g.in_channels // 8) + 1):
            columns = -(-g.in_channels // (step * in_tiles)) * step
            ranges = -(-chunks_in_all // (2 * (MAX_SUMS // (slabs * columns // 2))))
            found += cls.fitting(g, dtype, columns, chunks_in_all, ranges, shared_bytes)
        return found

    @classmethod
    def fitting(
        cls: type[T], g: Geometry, dtype: str, columns: int, chunks_in_all: int, ranges: int, shared_bytes: int
    ) -> list[T]:
        """Returns a list of the one tiling with the fewest ranges, at least `ranges`, and then the most stages that
        fit shared memory; an empty list if no tiling fits."""
        for n in range(ranges, chunks_in_all + 1):
            made = (cls.deep(g, dtype, columns, -(-chunks_in_all // n), n, stages) for stages in STAGES)
            fits = next((tiling for tiling in made if tiling.shared_bytes <= shared_bytes), None)
            if fits is not None:
                return [fits]
        return []

    @property
    def rows(self) -> int:
        return ROWS[self.geometry.kernel[2]]

    @property
    def stage_bytes(self) -> int:
        return self.rows * PITCH_BYTES[self.geometry.kernel[2]]

    @property
    def kinds(self) -> int:
        """Number of blocks that walk over the same positions."""
        return -(-self.geometry.in_channels // self.columns) * self.ranges

    @property
    def resident_bytes(self) -> int:
        """Bytes of shared memory for weights, the stages of x, and a table of rows."""
        rows = self.chunks * self.rows
        weights = rows * self.geometry.kernel[2] * ITEM_BYTES[self.dtype]
        return self.columns * (weights + self.stages_x * 256) + rows * 8

    @property
    def shared_bytes(self) -> int:
        barriers = 8 * (2 * self.stages + 3 * self.stages_x + 2)
        return self.resident_bytes + self.stages * self.stage_bytes + barriers

    @property
    def tile_cycles(self) -> float:
        words = self.rows * self.geometry.kernel[2] // 64  # words of K per chunk, relative to two taps along w
        chunk = words * (CHUNK_CYCLES + CHUNK_COLUMN_CYCLES * self.columns) * FEW_STAGES.get(self.stages, 1.0)
        return self.chunks * chunk + TILE_CYCLES + TILE_COLUMN_CYCLES * self.columns

    def tiles_of(self, p: Problem) -> int:
        return -(-pieces_of(p) // PIECES[p.geometry.kernel[2]])

    def __str__(self) -> str:
        return f"{self.columns} input channels x {self.chunks} x {self.rows} rows, {self.stages} stages"


def tilings(g: Geometry, dtype: str, shared_bytes: int) -> list[Tiling]:
    """Returns the tilings of a layer."""
    taps = g.kernel[2]
    chunks = -(-g.out_channels * g.kernel[0] * g.kernel[1] // ROWS[taps])
    slabs, step = (1, 8) if taps == 2 else (taps, 16)
    return Tiling.divided(g, dtype, chunks, slabs, step, shared_bytes)


def pieces_of(p: Problem) -> int:
    """Returns the pieces of 16 bytes of a row of dy."""
    return p.batch * prod(p.input_size) * p.geometry.kernel[2] * p.item_bytes // 16


def _vectors(p: Problem, q: Problem) -> bool:
    """Tells whether every 16 bytes of positions of x, counted across all lines of the batch, are contiguous."""
    n, c, d, h, _ = (stride * p.item_bytes % 16 == 0 for stride in q.input)
    lines = d and h and p.input_size[2] * p.item_bytes % 16 == 0
    dense = q.input[2:4] == dense_strides(p.input_size)[:2] and prod(p.input_size) * p.item_bytes % 16 == 0
    return n and c and (lines or dense)


def splits_of(tiling: Tiling, tiles: int, device: Device) -> int:
    g = tiling.geometry
    most = device.workspace_bytes // (4 * g.in_channels * g.out_channels * g.taps)
    splits = max(1, min(tiles, device.multiprocessors // tiling.kinds, most))
    return -(-tiles // -(-tiles // splits))  # the fewest splits with as many tiles per block


def cycles(tiling: Tiling, p: Problem, device: Device) -> float:
    """Predicts the cycles of the whole plan."""
    g, tiles = p.geometry, tiling.tiles_of(p)
    splits = splits_of(tiling, tiles, device)
    waves = -(-tiling.kinds * splits // device.multiprocessors)
    walk = waves * (-(-tiles // splits) * tiling.tile_cycles + BLOCK_OVERHEAD)
    parts = 8 * splits * g.in_channels * g.out_channels * g.taps
    if tiling.ranges > 1:
        parts += 8 * tiling.ranges * p.batch * g.in_channels * prod(p.input_size)
    return max(walk, _moving(p, device)) + parts / _per_cycle(L2_BYTES, device) + 2 * LAUNCH


def _moving(p: Problem, device: Device) -> float:
    """Predicts the cycles in which memory moves x, dx and dy once."""
    g = p.geometry
    size = 2 * g.in_channels * prod(p.input_size) + g.out_channels * prod(p.output_size)
    return p.batch * size * p.item_bytes / _per_cycle(MEMORY_BYTES, device)


def _per_cycle(of_one: float, device: Device) -> float:
    return of_one * device.multiprocessors


# ---- The interface of the family to the planner.


def why_not_layer(problems: Wanted, device: Device) -> str | None:
    """Returns the first refusal that does not depend on the memory layout of the tensors, or None."""
    if not {Pass.INPUT_GRAD, Pass.WEIGHT_GRAD} <= problems.keys():
        return "the gradients of input and weight are not both wanted"
    p = problems[Pass.INPUT_GRAD]
    g = p.geometry
    if refusal := tensor_cores.why_not(p, device, tensor_cores.WARPGROUP):
        return refusal
    if g.groups != 1:
        return "groups"
    if any(axis.padding or (axis.dilation > 1 and axis.kernel > 1) for axis in g.axes):
        return "padding or dilation"
    if any(axis.kernel != axis.stride for axis in g.axes):
        return "the kernel is not the stride"
    if not 0 < p.batch * prod(p.input_size) < 2**30:
        return "too many positions, or none"
    return None


def why_not_together(problems: Wanted, device: Device) -> str | None:
    if refusal := why_not_layer(problems, device):
        return refusal
    p, q = problems[Pass.INPUT_GRAD], problems[Pass.WEIGHT_GRAD]
    g = p.geometry
    if g.kernel[2] != 2 and (p.item_bytes != 4 or g.kernel[2] not in ROWS):
        return "the kernel is not 2 along w, nor 1 or 3 in TF32"
    if not _whole_pieces(p, q):
        return "lines of positions are not whole pieces of 16 bytes in contiguous tensors"
    return None


def _whole_pieces(p: Problem, q: Problem) -> bool:
    g, item = p.geometry, p.item_bytes
    weight = dense_strides((g.in_channels, g.out_channels, *g.kernel))
    dense = p.input == dense_strides((p.batch, g.in_channels, *p.input_size)) and p.weight == q.weight == weight
    whole = 8 if g.kernel[2] == 2 else 16
    lines = q.input[4] == 1 and p.output[4] == 1 and p.input_size[2] * item % whole == 0
    dy, x = all(v * item % 16 == 0 for v in p.output[:4]), all(v * item % whole == 0 for v in q.input[:4])
    return dense and lines and dy and x and p.aligned and q.aligned


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offer_together("up_backward", wanted, device, why_not_together, tilings, plan_tiling)


def offer_together(
    kernel: str,
    wanted: Wanted,
    device: Device,
    why_not: Callable[[Wanted, Device], str | None],
    tilings: Callable[[Geometry, str, int], Sequence[T]],
    plan: Callable[[Wanted, Device, T], Plan],
) -> list[Answer]:
    """Returns the answer of a kernel that computes all gradients together, with the tiling of the least predicted
    cycles."""
    if Pass.FORWARD in wanted:
        return []
    if refusal := why_not(wanted, device):
        return [Refusal(kernel, tuple(wanted), refusal)]
    p = wanted[Pass.INPUT_GRAD]
    found = tilings(p.geometry, p.dtype, device.shared_bytes)
    best = min(found, key=lambda tiling: cycles(tiling, p, device), default=None)
    if best is None:
        return [Refusal(kernel, tuple(wanted), "no tiling fits registers and shared memory")]
    work = Work(2, cycles(best, p, device))
    return [Offer(kernel, passes_of(wanted), p, device, lambda: work, lambda: plan(wanted, device, best))]


def passes_of(wanted: Wanted) -> tuple[Pass, ...]:
    """Returns the gradients that are computed together. With output padding some outputs belong to no tap, so the
    bias gradient is left to another kernel."""
    axes = wanted[Pass.INPUT_GRAD].geometry.axes
    bias = Pass.BIAS_GRAD in wanted and not any(axis.output_padding for axis in axes)
    return (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD, *((Pass.BIAS_GRAD,) if bias else ()))


def plan_tiling(problems: Wanted, device: Device, tiling: Tiling) -> Plan:
    """Returns the plan for a given tiling, so that benchmarks can compare tilings."""
    p, q = problems[Pass.INPUT_GRAD], problems[Pass.WEIGHT_GRAD]
    g = p.geometry
    passes = passes_of(problems)
    splits = splits_of(tiling, tiling.tiles_of(p), device)
    parts = Parts(p, splits, tiling.ranges, g.kernel[0] * g.kernel[1] if Pass.BIAS_GRAD in passes else 0)
    why = "every output has one position and one tap: all gradients from one reading of dy"
    return Plan(
        "up_backward",
        why,
        (_main(p, q, tiling, parts), sum_of_parts(p, parts)),
        parts.bytes,
        f"{tiling}, {splits} parts",
        parts.regions,
        passes=passes,
    )


def backward_operands(parts: Parts, weight: str = "weight") -> dict[str, str]:
    """Returns the pointers that up_backward and up_backward_last take."""
    dx, dw, db = parts.place("dx", "dx"), parts.place("dw"), parts.place("db")
    return {"dy": "dy", "x": "x", "weight": weight, "dx": dx, "parts": dw, "bias_parts": db}


def backward_sizes(p: Problem, q: Problem, tiling: Tiling, parts: Parts) -> dict[str, Any]:
    """Returns the strides, pitches and sizes that both up_backward and up_backward_last take."""
    strides = {"dy_strides": p.output, "x_strides": q.input, "dx_strides": p.input}
    pitches = {f"{name}_pitch": parts.pitch(name) for name in ("dx", "dw", "db")}
    return {**strides, **pitches, "tiles": tiling.tiles_of(p), "splits": parts.splits}


def _main(p: Problem, q: Problem, tiling: Tiling, parts: Parts) -> Launch:
    size = p.input_size
    registers = REGISTERS_OF_THREE if p.geometry.kernel[2] == 3 else REGISTERS[p.item_bytes]
    return UP_BACKWARD.launch(
        tiling.kinds * parts.splits,
        THREADS,
        constants_of(p, tiling, registers),
        backward_operands(parts),
        shared_bytes=tiling.shared_bytes,
        **backward_sizes(p, q, tiling, parts),
        pieces=pieces_of(p),
        vectors=_vectors(p, q),
        **per_axis("by", (size[0], size[1], size[2] * p.geometry.kernel[2] * p.item_bytes // 16)),
    )


def constants_of(p: Problem, tiling: Tiling, registers: tuple[int, int, int]) -> Constants:
    g = p.geometry
    producer, input_grad, weight_grad = registers
    return (
        ("Scalar", SCALARS[p.dtype]),
        ("kIn", g.in_channels),
        ("kOut", g.out_channels),
        *axis_constants(g.axes, "kernel"),
        ("kColumns", tiling.columns),
        ("kChunks", tiling.chunks),
        ("kRanges", tiling.ranges),
        ("kStages", tiling.stages),
        ("kStagesX", tiling.stages_x),
        ("kProducerRegisters", producer),
        ("kInputRegisters", input_grad),
        ("kWeightRegisters", weight_grad),
    )
