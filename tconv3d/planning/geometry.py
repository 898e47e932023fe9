"""Defines the arithmetic of a transposed 3D convolution: sizes, taps, phases, shifts.

Per dimension, kernel position (tap) `t` has one phase `(t*dilation - padding) mod stride` and one shift
`floor((t*dilation - padding) / stride)`: it adds `w[t] * x[q - shift]` to output `stride*q + phase`.
Kernels are compiled with the tables made here and never derive them. This module imports nothing of the package and
knows nothing of tensors, kernels or GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

Triple = tuple[int, ...]  # (depth, height, width)


@dataclass(frozen=True)
class Axis:
    """Describes one of the three dimensions of a transposed convolution."""

    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    def output_size(self, input_size: int) -> int:
        reach = self.dilation * (self.kernel - 1)
        return (input_size - 1) * self.stride - 2 * self.padding + reach + self.output_padding + 1

    def window(self, input_rows: range, output_rows: range) -> Axis:
        """Returns the axis of a window: these input rows alone, and these output rows, both counted from 0.

        Inputs outside the window read as zero. The axis has the padding `padding + output_rows.start -
        input_rows.start*stride`, which may be negative, and an output padding that may be any integer.
        """
        padding = self.padding + output_rows.start - input_rows.start * self.stride
        uncropped = Axis(self.kernel, self.stride, padding, 0, self.dilation).output_size(len(input_rows))
        return Axis(self.kernel, self.stride, padding, len(output_rows) - uncropped, self.dilation)

    def phase(self, tap: int) -> int:
        return (tap * self.dilation - self.padding) % self.stride

    def shift(self, tap: int) -> int:
        return (tap * self.dilation - self.padding) // self.stride

    def taps(self, phase: int) -> tuple[int, ...]:
        """Returns the taps that feed the outputs of one phase, in ascending order. A phase may have no tap."""
        return self.taps_by_phase[phase]

    @cached_property
    def taps_by_phase(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.stride)]
        for tap in range(self.kernel):
            found[self.phase(tap)].append(tap)
        return tuple(tuple(taps) for taps in found)

    def is_own(self, tap: int) -> bool:
        """Tells whether the tap adds input position i to one of the outputs from stride*i to stride*(i + 1) - 1."""
        return self.shift(tap) == 0

    @cached_property
    def own_taps(self) -> tuple[int, ...]:
        """The taps with shift 0, one for each phase, if they reach every output of any size exactly once; else none.

        A loop over positions and own taps then visits every output once.
        """
        own = tuple(tap for phase in range(self.stride) for tap in self.taps(phase) if self.is_own(tap))
        return own if len(own) == self.stride and self.output_size(1) <= self.stride else ()

    def positions(self, output_size: int) -> int:
        """Returns the number of positions q of the largest phase: outputs stride*q + phase < output_size."""
        return -(-output_size // self.stride)

    def meetings(self, size: int) -> int:
        """Returns how many pairs of an input position and a tap reach an output inside the tensor."""
        (count, step), (other, width) = sorted(((size, self.stride), (self.kernel, self.dilation)))
        bound = self.output_size(size)
        return sum(len(valid_range(step * i - self.padding, width, other, bound)) for i in range(count))

    @cached_property
    def scatter(self) -> Gather:
        """The forward pass: output stride*q + phase gathers x[q - shift(tap)]."""
        common = gcd(self.stride, self.dilation)
        taps = self.taps_by_phase
        return Gather(
            input_step=1,
            output_step=self.stride,
            tap_step=self.stride // common,
            offset_step=-(self.dilation // common),
            first_tap=tuple(t[0] if t else 0 for t in taps),
            first_offset=tuple(-self.shift(t[0]) if t else 0 for t in taps),
            count=tuple(len(t) for t in taps),
        )

    @cached_property
    def gather(self) -> Gather:
        """The input gradient: position i gathers dy[stride*i + tap*dilation - padding], in a single phase."""
        return Gather(
            input_step=self.stride,
            output_step=1,
            tap_step=1,
            offset_step=self.dilation,
            first_tap=(0,),
            first_offset=(-self.padding,),
            count=(self.kernel,),
        )


@dataclass(frozen=True)
class Gather:
    """Describes one dimension of a pass that computes each output from the inputs it needs.

    Output `output_step*q + phase` is the sum over `j < count[phase]` of input
    `input_step*q + first_offset[phase] + j*offset_step` times tap `first_tap[phase] + j*tap_step`.
    """

    input_step: int
    output_step: int
    tap_step: int
    offset_step: int
    first_tap: tuple[int, ...]
    first_offset: tuple[int, ...]
    count: tuple[int, ...]

    def offset(self, phase: int, j: int) -> int:
        return self.first_offset[phase] + j * self.offset_step

    def tap(self, phase: int, j: int) -> int:
        return self.first_tap[phase] + j * self.tap_step

    @property
    def phases(self) -> int:
        return len(self.count)

    @cached_property
    def reach(self) -> tuple[int, int]:
        """The first and the last index of the inputs that position 0 reads."""
        ends = [self.offset(f, j) for f, count in enumerate(self.count) if count for j in (0, count - 1)]
        return min(ends), max(ends)


@dataclass(frozen=True)
class Geometry:
    """Describes a transposed 3D convolution without its volume and batch size: what a kernel is compiled for."""

    in_channels: int
    out_channels: int
    groups: int
    axes: tuple[Axis, Axis, Axis]

    @classmethod
    def make(
        cls,
        in_channels: int,
        out_channels: int,
        kernel: Triple,
        stride: Triple = (1, 1, 1),
        padding: Triple = (0, 0, 0),
        output_padding: Triple = (0, 0, 0),
        groups: int = 1,
        dilation: Triple = (1, 1, 1),
    ) -> Geometry:
        d, h, w = (Axis(*v) for v in zip(kernel, stride, padding, output_padding, dilation, strict=True))
        return cls(in_channels, out_channels, groups, (d, h, w))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once because planners use it thousands of times as a key."""
        return hash((self.in_channels, self.out_channels, self.groups, self.axes))

    @property
    def in_per_group(self) -> int:
        return self.in_channels // self.groups

    @property
    def out_per_group(self) -> int:
        return self.out_channels // self.groups

    @property
    def kernel(self) -> Triple:
        d, h, w = self.axes
        return d.kernel, h.kernel, w.kernel

    @property
    def stride(self) -> Triple:
        d, h, w = self.axes
        return d.stride, h.stride, w.stride

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def phases(self) -> int:
        return prod(self.stride)

    @property
    def empty_phases(self) -> int:
        """The number of phases without a tap, whose outputs are the bias alone."""
        fed = prod(min(axis.kernel, axis.stride // gcd(axis.stride, axis.dilation)) for axis in self.axes)
        return self.phases - fed

    def is_own(self, tap: Triple) -> bool:
        return all(axis.is_own(t) for axis, t in zip(self.axes, tap, strict=True))

    @cached_property
    def own_taps_cover(self) -> bool:
        """Tells whether positions and own taps (`Axis.own_taps`) reach every output exactly once."""
        return all(axis.own_taps for axis in self.axes)

    def output_size(self, input_size: Triple) -> Triple:
        d, h, w = (axis.output_size(size) for axis, size in zip(self.axes, input_size, strict=True))
        return d, h, w

    def multiplications(self, batch: int, input_size: Triple) -> int:
        """Returns the multiply-adds of one pass without products that fall outside the output."""
        used = prod(axis.meetings(size) for axis, size in zip(self.axes, input_size, strict=True))
        return batch * self.in_channels * self.out_per_group * used


def valid_range(offset: int, step: int, size: int, bound: int) -> range:
    """Returns the positions i < size for which 0 <= step*i + offset < bound."""
    first = max(0, -(offset // step))
    last = min(size - 1, (bound - 1 - offset) // step)
    return range(first, max(first, last + 1))
