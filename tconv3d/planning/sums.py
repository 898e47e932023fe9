"""Plans the launches that add up the partial sums of split-K kernels (device/reduce_gradients.cuh, reduce.cuh).

A part is one partial result, laid out like the whole result. This module knows counts and places of parts, but not
what they are parts of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from .arguments import CONST_POINTER, INT32, INT64, POINTER, STRIDES, WALK, Arguments, Struct
from .geometry import Triple
from .launch import Launch
from .problem import Pass, Problem, contiguous_strides
from .scalars import SCALARS, accumulator, round_up
from .workspace import ALIGN, Regions, placed

THREADS = 256  # per block
MOST = 3  # results per launch

_GRADIENT = Struct(
    "Gradient",
    "A gradient whose parts are added, and the blocks of the launch that add them.",
    count=INT64("Elements of the gradient."),
    pitch=INT64("Elements from one part to the next, a multiple of 4."),
    parts=INT32("Number of parts."),
    slices=INT32("Warps that share the parts of an element."),
    first_block=INT32("Index of the first block that works on this gradient."),
    blocks=INT32("Number of blocks that work on this gradient; 0 where the launch has fewer gradients."),
)
REDUCE_GRADIENTS = Arguments(
    "reduce_gradients",
    first_parts=CONST_POINTER("Parts of the first gradient, one after another, each laid out like the gradient."),
    second_parts=CONST_POINTER("Parts of the second gradient."),
    third_parts=CONST_POINTER("Parts of the third gradient."),
    first_result=POINTER("The first gradient."),
    second_result=POINTER("The second gradient."),
    third_result=POINTER("The third gradient."),
    first=_GRADIENT("Sizes of the first gradient."),
    second=_GRADIENT("Sizes of the second gradient."),
    third=_GRADIENT("Sizes of the third gradient."),
)
_ADDITION = Struct(
    "Addition",
    "A result whose parts are added.",
    strides=STRIDES("Strides of the result; c is unused."),
    count=INT64("Elements of a part."),
    splits=INT32("Number of parts."),
    walk=WALK("How an element's index becomes (n, d, h, w)."),
)
REDUCE = Arguments(
    "reduce",
    parts=CONST_POINTER("Partial sums: [splits][count]."),
    result=POINTER("The sums, a tensor of the size of `walk`; element i of a part is its i-th in (n, d, h, w)."),
    more_parts=CONST_POINTER("Partial sums of a second result, or null."),
    more_result=POINTER("The second result, or null."),
    addition=_ADDITION("Sizes of the first result."),
    more=_ADDITION("Sizes of the second result."),
)


@dataclass(frozen=True)
class Sum:
    """Describes a sum of parts: the operand that holds the parts one after another, and the operand of the result."""

    parts: str
    result: str
    count: int  # elements of the result
    pitch: int  # elements from one part to the next, a multiple of 4
    number: int  # number of parts

    @property
    def bytes(self) -> int:
        return 4 * self.pitch * self.number


NOTHING = Sum("null", "null", 0, 0, 0)


def add_parts(sums: Sequence[Sum], dtype: str, most_blocks: int = 2**31, overlaps: bool = True) -> Launch:
    """Returns the launch that adds the parts of at most MOST results, each in a fixed order.

    With `overlaps`, for GPUs since compute capability 9.0, it may begin before the previous launch has ended. Several
    warps share the parts of an element only if a result then needs at most `most_blocks` blocks.
    """
    places, sizes, blocks = dict[str, str](), dict[str, Any](), 0
    sums = (*sums, *(NOTHING,) * (MOST - len(sums)))
    for name, each in zip(("first", "second", "third"), sums, strict=True):
        blocks_by_slices = {s: -(-each.count // (4 * THREADS // s)) for s in (1, 2, 4, 8)}
        slices = max(  # number of warps that share the parts of an element
            s for s, own in blocks_by_slices.items() if s == 1 or (s <= each.number // 2 and own <= most_blocks)
        )
        own = blocks_by_slices[slices]
        places |= {f"{name}_parts": each.parts, f"{name}_result": each.result}
        counts = {"count": each.count, "pitch": each.pitch, "parts": each.number, "slices": slices}
        sizes[name] = {**counts, "first_block": blocks, "blocks": own}
        blocks += own
    constants = (("Scalar", SCALARS[dtype]), ("kOverlaps", overlaps))
    return REDUCE_GRADIENTS.launch(blocks, THREADS, constants, places, overlaps=overlaps, **sizes)


@dataclass(frozen=True)
class Parts:
    """Places the partial sums of a backward pass in the workspace, one region per gradient."""

    problem: Problem
    splits: int  # parts of the weight's gradient
    ranges: int  # parts of the input's gradient; 1 if it is written directly
    bias: int  # parts of the bias's gradient per split; 0 if this gradient is not wanted

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Number of elements and number of parts of each gradient, by the gradient's name."""
        p, g = self.problem, self.problem.geometry
        found = {"dw": (g.in_channels * g.out_per_group * g.taps, self.splits)}
        if self.bias:
            found["db"] = (g.out_channels, self.splits * self.bias)
        if self.ranges > 1:
            found["dx"] = (p.batch * g.in_channels * prod(p.input_size), self.ranges)
        return found

    def pitch(self, name: str) -> int:
        """Returns the elements from one part of a gradient to the next."""
        return round_up(self.counts[name][0], 4) if name in self.counts else 0

    @property
    def _placed(self) -> tuple[int, Regions]:
        return placed((f"{name} parts", 4 * parts * self.pitch(name)) for name, (_, parts) in self.counts.items())

    @property
    def regions(self) -> Regions:
        return self._placed[1]

    @property
    def bytes(self) -> int:
        return round_up(self._placed[0], ALIGN)

    def place(self, name: str, otherwise: str = "null") -> str:
        return f"{name} parts" if name in self.counts else otherwise


def sum_of_parts(p: Problem, parts: Parts, dw: str = "dw", overlaps: bool = True) -> Launch:
    """Returns the launch that adds all parts; `dw` is the operand for the weight's gradient.

    `overlaps` is that of `add_parts`.
    """
    sums = [
        Sum(parts.place(n), dw if n == "dw" else n, count, parts.pitch(n), number)
        for n, (count, number) in parts.counts.items()
    ]
    return add_parts(sums, p.dtype, overlaps=overlaps)


def reduce_parts(
    dtype: str,
    count: int,
    splits: int,
    result: str,
    sizes: Triple,
    strides: tuple[int, int, int],
    parts: str = "workspace",
    overlaps: bool = False,
) -> Launch:
    """Returns the launch that adds `splits` parts of `count` elements to a tensor of three dimensions."""
    acc, acc_bytes = accumulator(dtype)
    lanes = 32 if count < 2**16 else 8 if count < 2**19 else 1
    outer, middle, inner = strides
    addition = {
        "strides": (outer, 0, middle, 0, inner),
        "count": count,
        "splits": splits,
        "walk": ((sizes[1], 1, sizes[2]), 1),
    }
    return REDUCE.launch(
        _blocks(count, lanes),
        THREADS,
        (("Scalar", SCALARS[dtype]), ("Acc", acc), ("kOverlaps", overlaps), (_LANES, lanes), (_MORE_LANES, 0)),
        {"parts": parts, "result": result, "more_parts": "null", "more_result": "null"},
        shared_bytes=THREADS * acc_bytes if lanes > 1 else 0,
        overlaps=overlaps,
        addition=addition,
        more=bytes(_ADDITION.size),
    )


_LANES, _MORE_LANES = "kLanes", "kMoreLanes"  # constants: threads that share an element of the first, second result


def _blocks(count: int, lanes: int) -> int:
    return -(-count * lanes // THREADS)


def adds_one(launch: Launch) -> bool:
    """Tells whether a launch does nothing but add the parts of one result, so that `joined` takes it."""
    return launch.kernel == REDUCE.kernel and dict(launch.constants)[_MORE_LANES] == 0


def joined(first: Launch, second: Launch) -> Launch:
    """Returns one launch for two that each add the parts of one result, in the same order as they do.

    Both must be launches of `reduce_parts` for tensors of the same type.
    """
    lanes, more_lanes = (dict(launch.constants)[_LANES] for launch in (first, second))
    constants = {**dict(first.constants), _MORE_LANES: more_lanes}
    if {**dict(second.constants), _LANES: lanes, _MORE_LANES: more_lanes} != constants:
        raise ValueError(f"{first} and {second} cannot be one launch")
    half = len(first.scalars) // 2  # the bytes of one of two additions
    return replace(
        first,
        constants=tuple(constants.items()),
        grid=(first.grid[0] + second.grid[0], 1, 1),
        shared_bytes=max(first.shared_bytes, second.shared_bytes),
        pointers=first.pointers[:2] + second.pointers[:2],
        scalars=first.scalars[:half] + second.scalars[:half],
    )


BIAS_PARTS = "bias_parts"  # the region of the workspace with the parts of a bias gradient


def unsplit(p: Problem, splits: int) -> bool:
    """Tells whether the only part of a gradient of weight or bias lies in memory as the gradient does."""
    g = p.geometry
    return splits == 1 and (
        p.which is Pass.BIAS_GRAD or p.weight == contiguous_strides((g.in_channels, g.out_per_group, *g.kernel))
    )


def stored_type(p: Problem, splits: int) -> str:
    """Returns the C++ type of the parts that a kernel with the constant `Stored` writes.

    It is the type of the gradient where there is one part, which then is the gradient.
    """
    return SCALARS[p.dtype] if unsplit(p, splits) else accumulator(p.dtype)[0]


class WeightSums(NamedTuple):
    """The launches that compute parts of a weight gradient and add them, and the workspace of the parts."""

    launches: tuple[Launch, ...]
    bytes: int = 0
    regions: tuple[tuple[str, int], ...] = ()


def weight_sums(
    p: Problem, mains: Sequence[Launch], splits: int, bias_splits: int = 0, narrows: bool = False
) -> WeightSums:
    """Returns the launches `mains`, and the one that adds the parts which they write to "workspace" and BIAS_PARTS.

    A part of the weight's gradient has the weight's elements in the order of its dimensions, and one of the bias's
    gradient, which is wanted if the problem has a bias, one element for each output channel. There are as many parts
    of the bias's gradient as of the weight's, or `bias_splits`. A gradient with one part is not added up: the kernel
    writes it, if the part has the gradient's type. `narrows`: the kernel has the constant `stored_type`.
    """
    g, (acc, item_bytes) = p.geometry, accumulator(p.dtype)
    count, (ci, co, _, _, tap) = g.in_channels * g.out_per_group * g.taps, p.weight
    exact, bias_splits = narrows or SCALARS[p.dtype] == acc, bias_splits or splits
    adding, regions, end, written = list[Launch](), list[tuple[str, int]](), 0, dict[str, str]()
    if exact and unsplit(p, splits):
        written["workspace"] = "dw"
    else:
        adding.append(
            reduce_parts(p.dtype, count, splits, "dw", (g.in_channels, g.out_per_group, g.taps), (ci, co, tap))
        )
        end = splits * count * item_bytes
    if p.bias and exact and bias_splits == 1:
        written[BIAS_PARTS] = "db"
    elif p.bias:
        adding.append(bias_sum(p, bias_splits, BIAS_PARTS))
        regions.append((BIAS_PARTS, end))
        end += bias_splits * g.out_channels * item_bytes
    mains = [replace(main, pointers=tuple(written.get(name, name) for name in main.pointers)) for main in mains]
    return WeightSums((*mains, *([joined(*adding)] if len(adding) == 2 else adding)), end, tuple(regions))


def bias_sum(p: Problem, splits: int, parts: str = "workspace") -> Launch:
    """Returns the launch that adds the parts of the gradient of the bias."""
    channels = p.geometry.out_channels
    return reduce_parts(p.dtype, channels, splits, "db", (1, 1, channels), (0, 0, 1), parts)
