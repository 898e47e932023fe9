"""Plans depthwise_lines.cuh: the forward pass of depthwise layers on channels-last tensors.

A thread owns a vector of channels of a line of outputs and walks along w. All types but float64 are computed in exact
float32 arithmetic. The compile-time constants depend on the layer and the memory format alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from ...planning import offers
from ...planning.calibration import Work
from ...planning.launch import Constants, axis_constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem
from ...planning.scalars import SCALARS
from ...planning.side import Side
from .arguments import DEPTHWISE_LINES
from .slabs import COPY

HAS_EPILOGUE = True
THREADS = 128  # per block
REGISTERS = 65536  # per multiprocessor
MAX_REGISTERS = 168  # per thread, so that three blocks fit a multiprocessor
MAX_SHARED = 48 * 1024  # bytes of shared memory for the weights of a block
VECTORS = (4, 2)  # candidates for the channels per thread
LANES = 32  # vectors of a line's channels per block, at most
AHEAD = (3, 2, 1)  # candidates for the columns of x whose loads are in flight
INSTRUCTIONS = 1.45  # instructions per multiply-add in the compiled loop over columns, for vectors of two channels
LANES_PER_CYCLE = 128  # multiply-adds per cycle and multiprocessor
CALLED = 8  # columns from a thread's present column to the column that it prefetches into L2


@dataclass(frozen=True)
class Lines:
    """Derives how the threads of a block share lines of outputs."""

    side: Side
    vector: int
    ahead: int

    @property
    def rows(self) -> tuple[int, int]:
        """The most lines of x that feed a line of outputs, along d and h."""
        d, h, _ = self.side.gathers
        return max(d.count), max(h.count)

    @property
    def window(self) -> int:
        axis = self.side.problem.geometry.axes[2]
        return max(axis.dilation * (axis.kernel - 1) + 1, axis.stride)

    @property
    def lanes(self) -> int:
        return min(LANES, self.side.problem.geometry.groups // self.vector)

    @property
    def chunks(self) -> int:
        return -(-self.side.problem.geometry.groups // (self.lanes * self.vector))

    @property
    def tile(self) -> tuple[int, int]:
        """Lines of outputs per block, along d and h."""
        lines = THREADS // self.lanes
        d = 2 if lines >= 4 else 1
        return d, lines // d

    @property
    def registers(self) -> int:
        """An estimate of the registers per thread."""
        problem = self.side.problem
        rows, kernel_w = prod(self.rows), problem.geometry.kernel[2]
        values = self.ahead * rows * self.vector * problem.item_bytes // 4
        return self.vector * (rows * kernel_w + self.window + 1) + values + 2 * rows + 24

    @property
    def shared_bytes(self) -> int:
        return 4 * self.side.problem.geometry.taps * (self.lanes * self.vector + 4)

    @property
    def resident(self) -> int:
        """The number of blocks per multiprocessor that the registers allow."""
        return max(1, REGISTERS // (-(-self.registers // 8) * 8 * THREADS))

    def fits(self) -> bool:
        return self.registers <= MAX_REGISTERS and self.shared_bytes <= MAX_SHARED and prod(self.rows) <= 32


def _lines(problem: Problem) -> Lines | None:
    """Returns the widest vectors that fit the tensors and the registers, then the most loads in flight, or None."""
    side, groups = Side.of(problem), problem.geometry.groups
    strides = (side.x[0], *side.x[2:], side.y[0], *side.y[2:], groups)
    for vector, ahead in product(VECTORS, AHEAD):
        lines = Lines(side, vector, ahead)
        if problem.aligned and not any(v % vector for v in strides) and lines.fits():
            return lines
    return None


def why_not(problem: Problem, device: Device) -> str | None:
    g = problem.geometry
    if problem.which is not Pass.FORWARD:
        return "it computes the forward pass"
    if g.in_per_group != 1 or g.out_per_group != 1:
        return "more than one channel per group"
    if problem.dtype == "float64":
        return "it adds up in float32"
    if problem.input[1] != 1 or problem.output[1] != 1 or min(problem.input[4], problem.output[4]) == 1:
        return "channels are not what is contiguous"
    if any(max(gather.count) == 0 for gather in Side.of(problem).gathers):
        return "no tap reaches the output"
    if _lines(problem) is None:
        return "vectors of channels do not fit the tensors, or their weights the registers"
    return None


PASSES = (Pass.FORWARD,)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offers.one_by_one(PASSES, "depthwise_lines", wanted, device, why_not, work, plan)


def work(problem: Problem, device: Device) -> Work:
    """Returns the work of the launch: the cycles of its multiply-adds beyond those for moving the tensors.

    The rates add the bytes of the tensors. Lines of x that a phase lacks are multiplied too.
    """
    lines = _lines(problem)
    assert lines is not None, problem
    d, h, _ = lines.side.gathers
    executed = prod(max(gather.count) * gather.phases / sum(gather.count) for gather in (d, h))
    arithmetic = problem.flops / 2 * executed * INSTRUCTIONS / LANES_PER_CYCLE / device.multiprocessors
    return Work(1, max(0.0, arithmetic - problem.bytes / COPY / device.multiprocessors), tensor_cores=False)


def plan(problem: Problem, device: Device) -> Plan:
    lines = _lines(problem)
    assert lines is not None, problem
    side, (tile_d, tile_h) = lines.side, lines.tile
    out_d, out_h, out_w = side.y_size
    tiles_d, tiles_h = -(-out_d // tile_d), -(-out_h // tile_h)
    blocks = max(1, device.multiprocessors * lines.resident // lines.chunks)
    length = _length(out_w, lines, problem.batch * tiles_d * tiles_h, blocks)
    parts = -(-out_w // length)
    units = problem.batch * tiles_d * tiles_h * parts
    launch = DEPTHWISE_LINES.launch(
        min(units, blocks) * lines.chunks,
        THREADS,
        _constants(lines),
        {"w": "weight"},
        shared_bytes=lines.shared_bytes,
        min_blocks=lines.resident,
        x_strides=side.x,
        y_strides=side.y,
        w_strides=problem.weight,
        x_size=side.x_size,
        y_size=side.y_size,
        length=length,
        units=units,
        parts=parts,
        tiles_h=tiles_h,
        tiles_d=tiles_d,
    )
    tile = f"each thread {lines.vector} channels of a line, walking {length} along w"
    return Plan("depthwise_lines", "multiply-adds, walking along w", (launch,), tile=tile)


def _constants(lines: Lines) -> Constants:
    side, problem = lines.side, lines.side.problem
    d, h, _ = side.gathers
    w = problem.geometry.axes[2]
    return (
        ("Scalar", SCALARS[problem.dtype]),
        ("Epilogue", problem.activation),
        ("kStrideX", side.x[4] if side.x[4] == problem.geometry.groups else 0),
        ("kStrideY", side.y[4] if side.y[4] == problem.geometry.groups else 0),
        ("kGroups", problem.geometry.groups),
        ("kVector", lines.vector),
        ("kLanes", lines.lanes),
        *((f"kTile{n}", size) for n, size in zip("DH", lines.tile, strict=True)),
        *((f"kRows{n}", count) for n, count in zip("DH", lines.rows, strict=True)),
        *axis_constants(problem.geometry.axes, "kernel", "stride"),
        *((f"kCount{n}", gather.count) for n, gather in zip("DH", (d, h), strict=True)),
        *((f"kFirstTap{n}", gather.first_tap) for n, gather in zip("DH", (d, h), strict=True)),
        *((f"kTapStep{n}", gather.tap_step) for n, gather in zip("DH", (d, h), strict=True)),
        *((f"kFirstOffset{n}", gather.first_offset) for n, gather in zip("DH", (d, h), strict=True)),
        *((f"kOffsetStep{n}", gather.offset_step) for n, gather in zip("DH", (d, h), strict=True)),
        ("kPaddingW", w.padding),
        ("kDilationW", w.dilation),
        ("kAhead", lines.ahead),
        ("kCalled", CALLED),
    )


def _length(outputs: int, lines: Lines, flat: int, resident: int) -> int:
    """Returns the outputs along w per block that fill waves of blocks best, with few columns loaded twice."""
    stride = lines.side.problem.geometry.stride[2]

    def cost(parts: int) -> int:
        length = -(-outputs // parts)
        return -(-flat * -(-outputs // length) // resident) * (length + lines.window + 2 * stride)

    return -(-outputs // min(range(1, max(1, min(outputs, 64)) + 1), key=cost))
