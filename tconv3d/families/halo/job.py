"""A pass as the halo kernel sees it: what it reads and what it writes. Knows sizes and strides, never tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ...planning.geometry import Axis, Geometry, Triple
from ...planning.problem import Norm, Pass, Problem, Strides, last_offset

MERGED_BYTES = 64  # of the channels of merged groups
LEAST_MERGED = 8  # channels of a group: of smaller ones most products would be with zeros


@dataclass(frozen=True)
class Job:
    """A pass as the kernel sees it: what it reads (x or dy) and writes (y or dx).

    `geometry` has the read channels as its input channels, and the written ones as its output channels. `gather`: a
    position gathers from all phase planes of what is read, instead of feeding all phases of what is written.
    """

    geometry: Geometry
    gather: bool
    batch: int
    dtype: str
    read_size: Triple
    written_size: Triple
    read: Strides
    written: Strides
    weight: Strides  # read channel, written channel, taps
    weight_group: int  # from the weights of one group of the layer to the next one's
    weight_tap: int = 0  # where tap (0, 0, 0) lies: at the end, where taps are taken in reverse
    bias: bool = False
    aligned: bool = True  # the address of what is read is a multiple of 16 bytes
    activation: str = "tconv3d::Identity"  # of what is written
    norm: Norm | None = None  # moments of what is written are left for it
    strict: bool = False  # float32 by three TF32 products
    rows: bool = False  # what is read are rows of operands that the launch before has written
    merged: int = 1  # groups of the layer that are one group here, whose weights are zero between them
    weight_aligned: bool = True  # the address of the weight is a multiple of 16 bytes

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def written_last(self) -> bool:
        """Whether what is written is contiguous along channels, not along w."""
        return self.written[1] == 1 and self.written[4] != 1

    @property
    def read_last(self) -> bool:
        return self.read[1] == 1 and self.read[4] != 1

    @property
    def vector_input(self) -> bool:
        """Whether 16 bytes of neighbouring channels can be loaded at once."""
        items = 16 // self.item_bytes
        n, c, *rest = self.read
        return c == 1 and self.aligned and not any(v % items for v in (self.geometry.in_per_group, n, *rest))

    @property
    def has_rows(self) -> bool:
        """Whether what is read are rows of channels that can be copied as they are."""
        return self.vector_input and self.read_last

    @property
    def dense(self) -> bool:
        """Whether what is written has no gaps."""
        sizes = (self.batch, self.geometry.out_channels, *self.written_size)
        return last_offset(sizes, self.written) + 1 == prod(sizes)

    @property
    def written_count(self) -> int:
        return self.batch * self.geometry.out_channels * prod(self.written_size)

    def as_copied(self, rewritten: bool) -> Job:
        """The job of a build that copies its input: as it is if it can be, else of rows that are written first."""
        if self.has_rows and not rewritten:
            return self
        channels, (d, h, w) = self.geometry.in_channels, self.read_size
        read = (channels * d * h * w, 1, channels * h * w, channels * w, channels)
        return replace(self, read=read, aligned=True, rows=True)

    def as_merged(self, groups: int) -> Job:
        """The job of a build that takes so many groups of the layer as one."""
        if groups == self.merged:
            return self
        return replace(self, geometry=merged_groups(self.geometry, groups), merged=groups)

    @property
    def read_bytes(self) -> int:
        return self.batch * self.geometry.in_channels * prod(self.read_size) * self.item_bytes

    @cached_property
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
            weight_aligned=p.weight_aligned,
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


def groups_to_merge(geometry: Geometry, item_bytes: int) -> int:
    """How many small groups may be one, so that what a position has of them is a piece of `MERGED_BYTES`."""
    sides = geometry.in_per_group, geometry.out_per_group
    if min(sides) < LEAST_MERGED:
        return 1
    counts = (n for n in range(1, geometry.groups + 1) if geometry.groups % n == 0)
    return max((n for n in counts if n * max(sides) * item_bytes <= MERGED_BYTES), default=1)


def merged_groups(geometry: Geometry, count: int) -> Geometry:
    """The same with so many groups as one."""
    return replace(geometry, groups=geometry.groups // count)


def mirrored_axes(geometry: Geometry) -> tuple[Axis, Axis, Axis] | None:
    """Of the forward pass that an input gradient of stride 1 is, taps reversed; None if there is no such pass."""
    d, h, w = (
        replace(axis, padding=axis.dilation * (axis.kernel - 1) - axis.padding, output_padding=-axis.output_padding)
        for axis in geometry.axes
    )
    if geometry.phases > 1 or min(axis.padding for axis in (d, h, w)) < 0:
        return None
    return d, h, w
