"""Plans for all gradients of an up-convolution of channels-last tensors that read dy once (up_backward_last.cuh).

backward.py plans the counterpart for contiguous tensors, and this module uses its model. Chooses which input channels
and elements of dy's rows a block owns, the number of stages of its rings, and into how many parts the positions are
divided (split-K). The compiled constants depend on the layer alone, never on the volume.

Terms: a row is the part of dy of one position, all taps and output channels; a chunk is 64 words of the rows of a
tile of 64 positions. In names, "last" means channels-last, and "turned" means transposed between contiguous and
channels-last.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...planning.arguments import per_axis
from ...planning.geometry import Geometry
from ...planning.launch import Launch
from ...planning.offers import Answer, Wanted
from ...planning.problem import ITEM_BYTES, Device, Pass, Plan, Problem, dense_strides
from ...planning.scalars import round_up
from ...planning.sums import Parts, sum_of_parts
from ...planning.turning import channels_last, turn, turning
from ...planning.workspace import ALIGN, placed
from . import backward as up_backward_planner
from .arguments import UP_BACKWARD_LAST
from .backward import THREADS, backward_operands, backward_sizes, constants_of, offer_together, passes_of, splits_of

TILE = 64  # positions of a tile
WORDS = 64  # words of a row of dy in a chunk
PITCH = WORDS + 8  # words in shared memory from one position to the next
PLACES_BYTES = 3 * TILE * 16
REGISTERS = (40, 104, 184)  # registers per thread of producers, input-gradient warps and weight-gradient warps

# Cycles of a multiprocessor per chunk, per chunk and input channel, and per tile, fitted to 7 measured times on one
# H200. The number of stages does not change them.
CHUNK_CYCLES, CHUNK_COLUMN_CYCLES, TILE_CYCLES = 700.0, 11.0, 1100.0


@dataclass(frozen=True)
class Tiling(up_backward_planner.Tiling):
    """How blocks divide channels and the rows of dy. All fields are compiled in."""

    @property
    def stage_bytes(self) -> int:
        return 4 * TILE * PITCH

    @property
    def resident_bytes(self) -> int:
        """Bytes of shared memory for weights, the stages of x, and tables of pieces and of addresses."""
        x = self.stages_x * TILE * ITEM_BYTES[self.dtype]
        return self.columns * (4 * self.chunks * WORDS + x) + self.chunks * WORDS // 4 * 8 + PLACES_BYTES

    @property
    def shared_bytes(self) -> int:
        barriers = 8 * (2 * self.stages + 4 * self.stages_x + 1)
        return self.resident_bytes + self.stages * self.stage_bytes + barriers

    @property
    def tile_cycles(self) -> float:
        return self.chunks * (CHUNK_CYCLES + CHUNK_COLUMN_CYCLES * self.columns) + TILE_CYCLES

    def tiles_of(self, p: Problem) -> int:
        return -(-p.batch * prod(p.input_size) // TILE)

    def __str__(self) -> str:
        return f"{self.columns} input channels x {self.chunks} x {WORDS} words, {self.stages} stages"


def tilings(g: Geometry, dtype: str, shared_bytes: int) -> list[Tiling]:
    """Returns the tilings of a layer."""
    per_word = 4 // ITEM_BYTES[dtype]
    chunks = -(-g.out_channels * g.taps // (WORDS * per_word))
    return Tiling.divided(g, dtype, chunks, slabs=per_word, step=8, shared_bytes=shared_bytes)


# ---- The interface of the family to the planner.


def why_not_together(problems: Wanted, device: Device) -> str | None:
    if refusal := up_backward_planner.why_not_layer(problems, device):
        return refusal
    if not _whole_pieces(problems[Pass.INPUT_GRAD], problems[Pass.WEIGHT_GRAD]):
        return "channels are not whole pieces of 16 bytes in channels-last tensors"
    return None


def _whole_pieces(p: Problem, q: Problem) -> bool:
    g = p.geometry
    x, y = (p.batch, g.in_channels, *p.input_size), (p.batch, g.out_channels, *p.output_size)
    last = channels_last(p.input, x) and channels_last(q.input, x) and channels_last(p.output, y)
    whole = all(n * p.item_bytes % 16 == 0 for n in (g.in_channels, g.out_channels))
    weights = _weight(p) is not None and q.weight == dense_strides((g.in_channels, g.out_channels, *g.kernel))
    return last and whole and weights and p.aligned and q.aligned


def _weight(p: Problem) -> str | None:
    """Returns the name of the weight that the kernel reads, "weight" or its transpose; None for other layouts."""
    g = p.geometry
    shape = (g.in_channels, g.out_channels, *g.kernel)
    if channels_last(p.weight, shape) or (g.taps == 1 and p.weight[:2] == (g.out_channels, 1)):
        return "weight"
    return "turned weight" if p.weight == dense_strides(shape) else None


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offer_together("up_backward_last", wanted, device, why_not_together, tilings, plan_tiling)


def plan_tiling(problems: Wanted, device: Device, tiling: Tiling) -> Plan:
    """Returns the plan for a given tiling, so that benchmarks can compare tilings."""
    p, q = problems[Pass.INPUT_GRAD], problems[Pass.WEIGHT_GRAD]
    g = p.geometry
    passes = passes_of(problems)
    parts = Parts(
        p, splits_of(tiling, tiling.tiles_of(p), device), tiling.ranges, g.taps if Pass.BIAS_GRAD in passes else 0
    )
    weight, dw = _weight(p), "dw" if g.taps == 1 else "turned dw"
    assert weight is not None, "a plan of problems that why_not_together() refuses"
    shape = (g.in_channels, g.out_channels, *g.kernel)
    launches = [_main(p, q, weight, tiling, parts), sum_of_parts(p, parts, dw)]
    if weight != "weight":
        launches.insert(0, turn([turning("weight", weight, shape, p.item_bytes, back=True)], False))
    if dw != "dw":
        launches.append(turn([turning(dw, "dw", shape, p.item_bytes)], True))
    # Transposed tensors have the size of the weight, with taps before output channels.
    turned = [name for name in (weight, dw) if name.startswith("turned")]
    end, regions = placed(((name, prod(shape) * p.item_bytes) for name in turned), parts.bytes)
    return Plan(
        "up_backward_last",
        "every output has one position and one tap: all gradients from one reading of dy",
        tuple(launches),
        round_up(end, ALIGN),
        f"{tiling}, {parts.splits} parts",
        (*parts.regions, *regions),
        passes=passes,
    )


def _main(p: Problem, q: Problem, weight: str, tiling: Tiling, parts: Parts) -> Launch:
    size = p.input_size
    return UP_BACKWARD_LAST.launch(
        tiling.kinds * parts.splits,
        THREADS,
        constants_of(p, tiling, REGISTERS),
        backward_operands(parts, weight),
        shared_bytes=tiling.shared_bytes,
        **backward_sizes(p, q, tiling, parts),
        positions=p.batch * prod(size),
        **per_axis("by", size),
    )
