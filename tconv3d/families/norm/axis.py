"""Plans the pass that reduces a dense tensor along one axis, several times in a row if need be (axis_pass.cuh)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...planning.launch import Constants
from ...planning.problem import ITEM_BYTES, Device, Plan
from ...planning.scalars import RESULTS, SCALARS, accumulator, power_of_two_up
from .arguments import AXIS_PASS

THREADS = 256  # per block, if what a block holds in shared memory leaves room for several blocks
LEAST_THREADS = 32
BLOCK_BYTES = 72 << 10  # shared memory of a block of which three fit a multiprocessor of an H200
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


@lru_cache(maxsize=1024)
def plan_axis(p: AxisProblem, device: Device) -> Plan:
    a = p.axis
    lanes = min(LANES, power_of_two_up(-(-a.length // a.vector))) if a.rows else 1
    threads, held = _held(p, device)
    count = a.outer * lanes if a.rows else a.outer * (a.inner // a.vector)
    constants: Constants = (
        ("Scalar", SCALARS[a.dtype]),
        ("Acc", accumulator(a.dtype)[0]),
        ("Result", RESULTS[p.result]),
        ("kVector", a.vector),
        ("kChannelsLast", a.channels_last),
        ("kAxisIsChannels", a.is_channels),
        ("kAxisIsBatch", a.is_batch),
        ("kRows", a.rows),
        ("kLanes", lanes),
        ("kHeld", held > 0),
        ("Program", p.program),
        ("kVectors", p.vectors),
        ("kWholes", p.wholes),
        ("kPlaced", p.placed),
        ("kAlongs", p.alongs),
    )
    launch = AXIS_PASS.launch(
        -(-count // threads),
        threads,
        constants,
        shared_bytes=held,
        outer=a.outer,
        inner=a.inner,
        lead=a.lead,
        rows=a.batch * a.channels,
        length=a.length,
        channels=a.channels,
    )
    where = "out of shared memory" if held else "out of L1" if a.rows else "out of L2"
    why = "one read" if p.sweeps == 1 else f"one read, {p.sweeps - 1} more {where}"
    return Plan(AXIS_PASS.kernel, why, (launch,))


def _held(p: AxisProblem, device: Device) -> tuple[int, int]:
    """Returns the threads of a block, and the bytes of shared memory that hold what they have read; 0 for none."""
    a = p.axis
    if a.rows or p.sweeps == 1:
        return THREADS, 0
    per_thread = a.length * (1 + p.wholes) * a.vector * ITEM_BYTES[a.dtype]
    for most in (BLOCK_BYTES, device.shared_bytes):
        threads = THREADS
        while threads >= LEAST_THREADS:
            if threads * per_thread <= most:
                return threads, threads * per_thread
            threads //= 2
    return THREADS, 0
