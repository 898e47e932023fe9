"""Describes a pass as the halo kernel sees it: the tensor that it reads and the tensor that it writes.

This module knows sizes and strides, never tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ...planning.geometry import Axis, Geometry, Triple
from ...planning.plain_data import once
from ...planning.problem import Norm, Pass, Problem, Strides, last_offset
from .build import Holding, Input

MERGED_BYTES = 64  # most bytes of channels per position that a merged group has, in input and in output
LEAST_MERGED = 8  # fewest channels of a group that is merged: with fewer, most products would be with zeros


@dataclass(frozen=True)
class Job:
    """One pass with the tensor that the kernel reads (x or dy) and the tensor that it writes (y or dx).

    The input channels of `geometry` are those of the read tensor, and its output channels those of the written
    tensor. If `gather` is true, a position gathers from all phase planes of the read tensor; otherwise it feeds all
    phases of the written tensor. All strides are in elements.
    """

    geometry: Geometry
    gather: bool
    batch: int
    dtype: str
    read_size: Triple
    written_size: Triple
    read: Strides
    written: Strides
    weight: Strides  # strides of the read channel, the written channel, and the taps along d, h and w
    weight_group: int  # elements from the weights of one group of the layer to those of the next group
    weight_tap: int = 0  # element of tap (0, 0, 0): not 0 if taps are read in reverse
    bias: bool = False
    aligned: bool = True  # whether the address of the read tensor is a multiple of 16 bytes
    activation: str = "tconv3d::Identity"  # device type of the activation that the epilogue applies
    norm: Norm | None = None  # norm layer for which the kernel stores moments of its outputs
    strict: bool = False  # whether each float32 product is three TF32 products
    rows: bool = False  # whether a previous launch writes the read tensor as rows of channels, rounded to operands
    merged: int = 1  # groups of the layer per group of `geometry`, with zero weights from one to another
    weight_aligned: bool = True  # whether the address of the weight is a multiple of 16 bytes
    holding: Holding = Holding.ANY  # which channels of a position a warp must hold
    turned: bool = False  # whether loaders transpose pieces of lines that asynchronous copies bring

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def written_last(self) -> bool:
        """Whether the written tensor is contiguous along channels, not along w."""
        return self.written[1] == 1 and self.written[4] != 1

    @property
    def read_last(self) -> bool:
        return self.read[1] == 1 and self.read[4] != 1

    @property
    def vector_input(self) -> bool:
        """Whether every 16 bytes of neighbouring channels of the read tensor can be one load."""
        items = 16 // self.item_bytes
        n, c, *rest = self.read
        return c == 1 and self.aligned and not any(v % items for v in (self.geometry.in_per_group, n, *rest))

    @property
    def has_rows(self) -> bool:
        """Whether the read tensor has rows of channels that asynchronous copies of 16 bytes can take."""
        return self.vector_input and self.read_last

    @property
    def dense(self) -> bool:
        """Whether the written tensor has no gaps in memory."""
        sizes = (self.batch, self.geometry.out_channels, *self.written_size)
        return last_offset(sizes, self.written) + 1 == prod(sizes)

    @property
    def stored_channels(self) -> int:
        """The numbers that are stored of a position."""
        return 1 if self.holding is Holding.REDUCED else self.geometry.out_channels

    @property
    def written_count(self) -> int:
        return self.batch * self.geometry.out_channels * prod(self.written_size)

    def arriving(self, input: Input) -> Job:
        """Returns the job as the kernel reads it if input arrives in this way.

        Asynchronous copies read rows of channels: those of the given tensor, or, if it has no such rows or they are
        rewritten, the rows that a previous launch writes to the workspace.
        """
        if not input.copied or (self.has_rows and input is not Input.REWRITTEN):
            return self
        channels, (d, h, w) = self.geometry.in_channels, self.read_size
        read = (channels * d * h * w, 1, channels * h * w, channels * w, channels)
        return replace(self, read=read, aligned=True, rows=True)

    def as_merged(self, groups: int) -> Job:
        """Returns the job for a build that merges this number of groups of the layer into one."""
        if groups == self.merged:
            return self
        return replace(self, geometry=merged_groups(self.geometry, groups), merged=groups)

    @property
    def read_bytes(self) -> int:
        return self.batch * self.geometry.in_channels * prod(self.read_size) * self.item_bytes

    @property
    def all_positions(self) -> int:
        """The number of positions of all batch items."""
        return self.batch * prod(self.positions)

    @once
    def positions(self) -> Triple:
        if self.gather:
            return self.written_size
        sizes = zip(self.geometry.axes, self.written_size, strict=True)
        return tuple(axis.positions(size) for axis, size in sizes)


def job_of(problem: Problem) -> Job:
    g, p = problem.geometry, problem
    strict = p.dtype == "float32" and not p.tf32
    if p.which is Pass.FORWARD:
        return Job(
            g, False, p.batch, p.dtype, p.input_size, p.output_size, p.input, p.output, p.weight,
            g.in_per_group * p.weight[0], 0, p.bias, p.aligned, p.activation, p.norm, strict,
            weight_aligned=p.weight_aligned, holding=_holding(p),
        )  # fmt: skip
    ci, co, *taps = p.weight
    swapped = Geometry(g.out_channels, g.in_channels, g.groups, g.axes)
    gather = Job(
        swapped, True, p.batch, p.dtype, p.output_size, p.input_size, p.output, p.input, (co, ci, *taps),
        g.in_per_group * ci, 0, False, p.aligned, strict=strict, weight_aligned=p.weight_aligned,
    )  # fmt: skip
    axes = mirrored_axes(g)
    if axes is None:
        return gather
    last = sum((kernel - 1) * stride for kernel, stride in zip(g.kernel, taps, strict=True))
    return replace(
        gather,
        geometry=replace(swapped, axes=axes),
        gather=False,
        weight=(co, ci, *(-stride for stride in taps)),
        weight_tap=last,
    )


def _holding(problem: Problem) -> Holding:
    if not problem.channels:
        return Holding.ANY
    return Holding.REDUCED if problem.per_position else Holding.ALL


def groups_to_merge(geometry: Geometry, item_bytes: int) -> int:
    """Returns how many groups to merge: the most whose channels of a position have at most `MERGED_BYTES`."""
    sides = geometry.in_per_group, geometry.out_per_group
    if min(sides) < LEAST_MERGED:
        return 1
    counts = (n for n in range(1, geometry.groups + 1) if geometry.groups % n == 0)
    return max((n for n in counts if n * max(sides) * item_bytes <= MERGED_BYTES), default=1)


def merged_groups(geometry: Geometry, count: int) -> Geometry:
    """Returns the geometry in which every `count` groups are one."""
    return replace(geometry, groups=geometry.groups // count)


def mirrored_axes(geometry: Geometry) -> tuple[Axis, Axis, Axis] | None:
    """Returns the axes of the forward pass with reversed taps that equals the input gradient of a layer of stride 1.

    Returns None if the layer has more than one phase, or if the forward pass would need negative padding.
    """
    d, h, w = (
        replace(axis, padding=axis.dilation * (axis.kernel - 1) - axis.padding, output_padding=-axis.output_padding)
        for axis in geometry.axes
    )
    if geometry.phases > 1 or min(axis.padding for axis in (d, h, w)) < 0:
        return None
    return d, h, w
