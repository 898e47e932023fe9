"""What is asked of a kernel (`Problem`), of which machine (`Device`), and the answer (`Plan`).

Plain data that the planner's parts share. Knows sizes and strides, never tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import prod

from .geometry import Geometry, Triple
from .launch import Launch

Strides = tuple[int, ...]  # (n, c, d, h, w), in elements

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Pass(Enum):
    """The four computations of a layer. Each has the shape of a loop over taps, or of a sum."""

    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    BIAS_GRAD = "bias_grad"


@dataclass(frozen=True)
class Device:
    """The machine a plan is for."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # that one block can have
    workspace_bytes: int = 64 * 1024 * 1024  # that partial sums may take
    runs_on: tuple[int, int] | None = None  # the GPU's own capability, where plans are made for another GPU

    @property
    def compiled_capability(self) -> tuple[int, int]:
        """The compute capability that kernels are compiled for."""
        return self.runs_on or self.capability

    @property
    def thrifty(self) -> Device:
        """The same when memory is short: sums are not split, and nothing is copied only to be faster."""
        return replace(self, workspace_bytes=0)


@dataclass(frozen=True)
class Norm:
    """A GroupNorm that follows, as far as its statistics go."""

    groups: int
    eps: float


@dataclass(frozen=True)
class Problem:
    """One pass of one layer over tensors of known size, type and strides.

    `input` are the strides of x or dx, `output` those of y or dy, `weight` those of w or dw: whichever of them
    the pass reads or writes.
    """

    which: Pass
    geometry: Geometry
    batch: int
    input_size: Triple
    dtype: str
    input: Strides
    weight: Strides
    output: Strides
    bias: bool = False
    tf32: bool = False  # float32 products may be rounded to TF32
    aligned: bool = True  # the addresses of x and dy, as far as they are read, are multiples of 16 bytes
    weight_aligned: bool = True  # the address of the weight, if it is read, is a multiple of 16 bytes
    relu: bool = False  # a forward pass that stores the ReLU of its result
    norm: Norm | None = None  # a forward pass that also computes the statistics of what it stores

    @property
    def activation(self) -> str:
        """The epilogue's name in device/epilogue.cuh."""
        return "tconv3d::Relu" if self.relu else "tconv3d::Identity"

    @property
    def output_size(self) -> Triple:
        return self.geometry.output_size(self.input_size)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        if self.which is Pass.BIAS_GRAD:
            return self.batch * self.geometry.out_channels * prod(self.output_size)
        return 2 * self.geometry.multiplications(self.batch, self.input_size)

    @property
    def bytes(self) -> int:
        """Every tensor of the pass moved once."""
        g = self.geometry
        x = self.batch * g.in_channels * prod(self.input_size)
        y = self.batch * g.out_channels * prod(self.output_size)
        w = g.in_channels * g.out_per_group * g.taps
        b = g.out_channels if self.bias else 0
        moved = y + b if self.which is Pass.BIAS_GRAD else x + y + w + b
        return moved * self.item_bytes


@dataclass(frozen=True)
class Plan:
    """The launches that solve a problem, in order, and the scratch memory they share."""

    kernel: str  # the name a person sees
    why: str
    launches: tuple[Launch, ...]
    workspace_bytes: int = 0
    tile: str = ""
    regions: tuple[tuple[str, int], ...] = ()  # names of places in the workspace, and where they start
    packed_bytes: int = 0  # the first launch writes these at the workspace's start, from the weight and nothing else
    moments: int = 0  # that the kernel leaves in region "moments" of each norm group of a batch item
    passes: tuple[Pass, ...] = ()  # that its launches compute, if it is one of the plans of a backward pass
    preparing: int = 0  # launches at its beginning that only prepare operands
    kept: Plan | None = None  # another, for calls that keep the packed weight: without its first launch it takes less


def bias_grad_problem(batch: int, channels: int, size: Triple, dtype: str, output: Strides) -> Problem:
    """The problem of a bias's gradient, which is the same for all layers with this output."""
    identity = Geometry.make(channels, channels, (1, 1, 1), groups=channels)
    none = (0, 0, 0, 0, 0)
    return Problem(Pass.BIAS_GRAD, identity, batch, size, dtype, none, none, output)


KINDS = (1024, 8192, 300_000)  # positions in all from which a volume is of the next kind


def volume_kind(positions: int) -> int:
    """What is worth a look, and what was tuned, differs between kinds of volume."""
    return sum(positions >= size for size in KINDS)


def dense_strides(shape: tuple[int, ...]) -> Strides:
    """The strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def contiguous_strides(shape: tuple[int, ...]) -> Strides:
    c, d, h, w = (max(extent, 1) for extent in shape[1:])
    return (c * d * h * w, d * h * w, h * w, w, 1)


def channels_last_strides(shape: tuple[int, ...]) -> Strides:
    c, d, h, w = (max(extent, 1) for extent in shape[1:])
    return (c * d * h * w, 1, h * w * c, w * c, c)


def last_offset(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The offset of a tensor's last element, in elements."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
