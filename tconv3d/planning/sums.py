"""The launch that adds up the parts that other launches have left (device/reduce_gradients.cuh).

Knows counts and places, not what they are parts of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..families.direct.planner import SCALARS
from .launch import Launch
from .packing import int32s, int64s

THREADS = 256
MOST = 3  # results of one launch


@dataclass(frozen=True)
class Sum:
    """Parts that lie side by side, each laid out like the result: where they are, and what becomes of them."""

    parts: str
    result: str
    count: int  # elements
    pitch: int  # from part to part, in elements: a multiple of 4
    number: int  # of parts


NOTHING = Sum("null", "null", 0, 0, 0)


def add_parts(sums: Sequence[Sum], dtype: str, most_blocks: int = 2**31) -> Launch:
    """Adds parts in a fixed order, of at most MOST results.

    `most_blocks`: of a result, that there should be if more warps share its parts than one.
    """
    scalars, blocks = b"", 0
    sums = (*sums, *(NOTHING,) * (MOST - len(sums)))
    for each in sums:
        blocks_by_slices = {s: -(-each.count // (4 * THREADS // s)) for s in (1, 2, 4, 8)}
        slices = max(  # that share the parts of an element
            s for s, own in blocks_by_slices.items() if s == 1 or (s <= each.number // 2 and own <= most_blocks)
        )
        own = blocks_by_slices[slices]
        scalars += int64s(each.count, each.pitch) + int32s(each.number, slices, blocks, own)
        blocks += own
    return Launch(
        kernel="reduce_gradients",
        constants=(("kThreads", THREADS), ("kMinBlocks", 1), ("Scalar", SCALARS[dtype])),
        grid=(blocks, 1, 1),
        threads=THREADS,
        shared_bytes=0,
        pointers=(*(each.parts for each in sums), *(each.result for each in sums)),
        scalars=scalars,
        overlaps=True,
    )
