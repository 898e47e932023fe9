"""Plans the pass that reduces a dense tensor along one axis, several times in a row if need be (axis_pass.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...planning.launch import Constants
from ...planning.problem import ITEM_BYTES, Device, Plan
from ...planning.scalars import RESULTS, SCALARS, accumulator, power_of_two_up
from .arguments import AXIS_PASS

THREADS = 256  # per block, if what a block holds in shared memory leaves room for several blocks
LEAST_THREADS = 32
BLOCK_BYTES = 72 << 10  # shared memory of a block of which three fit a multiprocessor of an H200
SUMMING_BLOCKS = 4  # blocks per multiprocessor that add up positions
LEAST_UNITS = 4  # positions of a thread that adds them up, at least, where a tensor has so many
LANES = 32  # threads that share a row, at most


@dataclass(frozen=True)
class Axis:
    """Describes a dense tensor in the order of its memory, [outer][length][inner], and its axis in the middle."""

    outer: int
    length: int
    inner: int
    lead: int  # outer places of a batch item, or of a channel of it if channels are outer; a volume for a batch axis
    is_channels: bool
    is_batch: bool
    batch: int
    channels: int
    channels_last: bool
    dtype: str
    aligned: bool  # the addresses of all tensors are multiples of 16 bytes

    @property
    def lanes(self) -> int:
        """Threads that share a position."""
        return min(LANES, power_of_two_up(-(-self.length // self.vector))) if self.rows else 1

    @property
    def count(self) -> int:
        """Threads that all positions take."""
        return self.outer * self.lanes if self.rows else self.outer * (self.inner // self.vector)

    @property
    def items(self) -> int:
        """Batch items whose positions are added up apart from others."""
        return self.batch if self.is_channels else 1

    @property
    def rows(self) -> bool:
        """Whether the axis is the innermost one, so that several threads share a position."""
        return self.inner == 1

    @property
    def vector(self) -> int:
        """Elements per load."""
        if not self.aligned:
            return 1
        size = self.length if self.rows else self.inner
        return min(16 // ITEM_BYTES[self.dtype], size & -size)


@dataclass(frozen=True)
class AxisProblem:
    """Describes what is computed along an axis, and the number of its operands of each kind."""

    axis: Axis
    program: str  # C++ type (axis_program.cuh)
    sweeps: int  # times that the program goes along the axis
    vectors: int
    wholes: int
    placed: int
    alongs: int
    result: str  # element type
    sums: tuple[str, ...] = ()  # expressions that are added up over positions


@lru_cache(maxsize=1024)
def plan_axis(p: AxisProblem, device: Device) -> Plan:
    a = p.axis
    threads, held, summed = _block(p, device)
    slots = slots_of(a, device) if p.sums else 1
    constants: Constants = (
        ("Scalar", SCALARS[a.dtype]),
        ("Acc", accumulator(a.dtype)[0]),
        ("Result", RESULTS[p.result]),
        ("kVector", a.vector),
        ("kChannelsLast", a.channels_last),
        ("kAxisIsChannels", a.is_channels),
        ("kAxisIsBatch", a.is_batch),
        ("kRows", a.rows),
        ("kLanes", a.lanes),
        ("kHeld", held > 0),
        ("Program", p.program),
        ("Sums", expression_list(p.sums)),
        ("kVectors", p.vectors),
        ("kWholes", p.wholes),
        ("kPlaced", p.placed),
        ("kAlongs", p.alongs),
    )
    launch = AXIS_PASS.launch(
        slots * a.items if p.sums else -(-a.count // threads),
        threads,
        constants,
        shared_bytes=held + summed,
        outer=a.outer,
        inner=a.inner,
        lead=a.lead,
        rows=a.batch * a.channels,
        slots=slots,
        held_bytes=held,
        length=a.length,
        channels=a.channels,
    )
    where = "out of shared memory" if held else "out of L1" if a.rows else "out of L2"
    why = "one read" if p.sweeps == 1 else f"one read, {p.sweeps - 1} more {where}"
    return Plan(AXIS_PASS.kernel, why, (launch,))


def slots_of(a: Axis, device: Device) -> int:
    """Returns the blocks that add up the positions of a batch item, if channels are the axis, or else of all."""
    units = -(-a.count // a.items // THREADS)
    return max(1, min(SUMMING_BLOCKS * device.multiprocessors // a.items, units // LEAST_UNITS))


def expression_list(expressions: Sequence[str]) -> str:
    """Returns a list of expressions as a C++ type (expression_list.cuh)."""
    listed = "tconv3d::NoExpression"
    for each in reversed(expressions):
        listed = f"tconv3d::ExpressionList<{each}, {listed}>"
    return listed


def _block(p: AxisProblem, device: Device) -> tuple[int, int, int]:
    """Returns the threads of a block, and the bytes of shared memory that hold columns and that hold sums."""
    a = p.axis
    held = 0 if a.rows or p.sweeps == 1 else a.length * (1 + p.wholes) * a.vector * ITEM_BYTES[a.dtype]
    # A warp adds up so many places of the axis.
    numbers = -(-a.length // (a.lanes * a.vector)) * a.vector * 32 if a.rows else a.length
    summed = numbers * len(p.sums) * accumulator(a.dtype)[1]
    for per_thread in (held, 0):
        for most in (BLOCK_BYTES, device.shared_bytes):
            threads = THREADS
            while threads >= LEAST_THREADS:
                if threads * per_thread + threads // 32 * summed <= most:
                    return threads, threads * per_thread, threads // 32 * summed
                threads //= 2
    raise AssertionError(f"sums along an axis of {a.length} do not fit into shared memory")
