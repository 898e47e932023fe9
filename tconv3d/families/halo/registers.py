"""Divides the registers of a multiprocessor among the threads of a block of the halo kernel.

Constants without a unit are register counts. They are budgets: what the compiler needs besides accumulators without
spilling. This module knows builds, not volumes.
"""

from __future__ import annotations

from functools import lru_cache

from ...planning.scalars import ceil_div, round_up
from .build import STEP_BYTES, Build, Input

REGISTERS = 65536  # registers of a multiprocessor
MOST_REGISTERS = 232  # most registers of a consumer thread: a thread has at most 255, in whole multiples of 8
CONSUMER_REGISTERS = 80  # fewest registers of a consumer thread besides its accumulators
MANY_SUMS = 96  # accumulators of a consumer thread above which FEWER_REGISTERS applies beside two producer warpgroups
FEWER_REGISTERS = 64  # fewest registers of a consumer thread besides more than MANY_SUMS accumulators
PRODUCER_REGISTERS = 64  # registers of a producer thread with 16 elements in flight; consumers get the rest
MANY_REGISTERS = 104  # registers of a producer thread with 32 elements in flight
COPYING_REGISTERS = 40  # registers of a producer thread that issues asynchronous copies
LEAST_REGISTERS = 32  # fewest registers of a producer thread, beside three consumers
STRICT_CONSUMER_REGISTERS = 56  # fewest registers of a consumer thread besides accumulators in strict float32
STRICT_PRODUCER_REGISTERS = 88  # registers of a producer thread in strict float32, which splits values in two
OPERAND_REGISTERS = 164  # most registers of a consumer thread for accumulators and operands: builds with more spill
REGISTER_SETS = 3  # sets of operands in a consumer's registers: one is loaded while two multiply


def per_thread(build: Build) -> tuple[int, int]:
    """Returns the registers of a producer thread and of a consumer thread, in all what the kernel starts with."""
    producers, consumers = build.block.producers, build.block.consumers
    start = REGISTERS // build.threads // 8 * 8
    total = start * build.threads // 128
    beside = STRICT_CONSUMER_REGISTERS if build.strict else CONSUMER_REGISTERS
    loading = STRICT_PRODUCER_REGISTERS if build.strict else PRODUCER_REGISTERS
    if build.input not in (Input.LOADED, Input.TURNED):
        loading = COPYING_REGISTERS
    elif in_flight(build) > 16:
        loading = MANY_REGISTERS
    if producers > 1 and build.sums > MANY_SUMS and not build.strict:
        beside = FEWER_REGISTERS
    needed = round_up(build.sums + beside, 8)
    spare = (total - loading * producers) // consumers // 8 * 8
    most = (total - LEAST_REGISTERS * producers) // consumers // 8 * 8
    consumer = min(max(needed, spare), most, MOST_REGISTERS)
    left = total - consumers * consumer
    return min(left // producers // 8 * 8, start), max(consumer, start)


def in_flight(build: Build) -> int:
    """Returns the number of elements in a batch that a loader's lane has in flight; registers hold two batches.

    One producer warpgroup has more registers per thread, which are used in float32 input gradients.
    """
    few = build.block.producers == 1 and build.item_bytes == 4
    many = few and build.gather and not (build.march or build.input.copied or build.strict)
    return 32 if many else 16


@lru_cache(maxsize=256)
def batches_per_chunk(build: Build) -> int:
    """Returns the number of batches in which a loader takes all channels of a chunk."""
    if build.input.copied:
        return 1
    vectors = max(1, in_flight(build) * build.item_bytes // 16 // build.program.parts)
    return max(1, build.part_bytes // 16 // vectors)


def row_sets(build: Build) -> int:
    """Returns the number of operand sets that consumers load out of rows, or 0 if registers do not suffice."""
    words = build.tile.slabs * build.tile.row_bytes // 8  # registers of a set
    return REGISTER_SETS if build.sums + REGISTER_SETS * words <= OPERAND_REGISTERS else 0


@lru_cache(maxsize=256)
def line_sets(build: Build) -> tuple[int, int]:
    """Returns the number of operand sets that consumers load out of lines, and the steps of each set.

    Both are 0 if registers do not suffice for two sets: the compiler would serialize the products.
    """
    axis = build.geometry.axes[2]
    shifts = (axis.dilation * (axis.kernel - 1) if build.gather else build.span[2]) + 1
    words = shifts + (axis.stride if build.gather else 1)
    for sets, steps in ((3, 2), (2, 2), (3, 1), (2, 1)):
        coming = 2 * words if shifts > 1 else 0  # words that become the operands of all shifts
        if build.sums + build.tile.slabs * steps * (sets * 4 * shifts + coming) <= OPERAND_REGISTERS:
            return sets, steps
    return 0, 0


def line_turns(build: Build) -> int:
    """Returns the number of turns in which the last chunk of lines is multiplied (halo_lines.cuh)."""
    steps = build.steps - (build.chunks - 1) * (build.part_bytes // STEP_BYTES)
    return build.lines_read(1) * ceil_div(steps, line_sets(build)[1])


def line_loads(build: Build) -> int:
    """Returns the number of operand loads out of lines for one step of a march, all of which are unrolled."""
    return build.tile.slabs * build.steps * build.lines_read(1) * build.line_planes
