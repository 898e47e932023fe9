"""Defines what is to be computed (`Problem`), on which GPU (`Device`), and by which launches (`Plan`).

All planners share this plain data. This module knows sizes and strides, never tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd, prod

from .geometry import Geometry, Triple
from .launch import Launch

Strides = tuple[int, ...]  # (n, c, d, h, w), in elements

# Which products of float32 tensors may be rounded to TF32: none, those of layers that PyTorch rounds to TF32, or all.
NO_TF32, TF32_AS_PYTORCH, TF32 = 0, 1, 2
# With stride 1, PyTorch computes groups of 12 and more channels in TF32, groups of 6 and fewer in float32 (measured
# on an H200, docs/numerics.md). Nobody has measured the sizes in between, which are computed in float32 here.
WIDE_GROUP = 12

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Pass(Enum):
    """Names the four computations of a layer: three loops over taps, and the sum for the bias gradient."""

    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    BIAS_GRAD = "bias_grad"


@dataclass(frozen=True)
class Device:
    """Describes the GPU that a plan is for."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # maximum shared memory per block
    workspace_bytes: int = 64 * 1024 * 1024  # maximum workspace for partial sums and for copies that save time
    runs_on: tuple[int, int] | None = None  # capability of the present GPU if plans are made for another GPU

    @property
    def compiled_capability(self) -> tuple[int, int]:
        """The compute capability that kernels are compiled for."""
        return self.runs_on or self.capability

    @property
    def thrifty(self) -> Device:
        """The device without optional workspace, for when memory is short: neither split-K nor copies for speed."""
        return replace(self, workspace_bytes=0)


@dataclass(frozen=True)
class Norm:
    """Holds the settings of a following GroupNorm that its statistics depend on."""

    groups: int
    eps: float


def float32_in_pytorch(geometry: Geometry) -> bool:
    """Returns whether PyTorch computes a layer in float32 although TF32 is allowed.

    This is the one place that knows the rule: layers with groups that are strided or narrow. docs/numerics.md says
    which measurements it follows from, and what is not known.
    """
    narrow = min(geometry.in_per_group, geometry.out_per_group) < WIDE_GROUP
    return geometry.groups > 1 and (max(geometry.stride) > 1 or narrow)


@dataclass(frozen=True)
class Read:
    """Describes a tensor that a tail reads: its C++ type, and whether it has one batch item or channel for all."""

    scalar: str
    one_item: bool = False
    one_channel: bool = False


@dataclass(frozen=True)
class Problem:
    """Describes one pass of one layer over tensors of known size, type and strides.

    `input` has the strides of x or dx, `output` the strides of y or dy, `weight` the strides of w or dw, depending on
    which of them the pass reads or writes.
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
    loose: bool = False  # float32 products are not rounded to TF32, but a relative error of up to 1e-6 is allowed
    aligned: bool = True  # addresses of the tensors among x and dy that the pass reads are multiples of 16 bytes
    weight_aligned: bool = True  # the address of the weight, if it is read, is a multiple of 16 bytes
    relu: bool = False  # the forward pass stores the ReLU of its result
    tail: str = ""  # C++ name of the expression of its result that the forward pass stores (device/expressions.cuh)
    tail_vectors: int = 0  # vectors, numbers for each channel of a batch item, that the tail reads
    tail_wholes: int = 0  # tensors that the tail reads, of y's shape, type and strides unless `tail_reads` has others
    tail_reads: tuple[Read, ...] = ()  # how each of them lies in memory, if one of them lies otherwise than y
    norm: Norm | None = None  # the forward pass also computes the statistics of the values it stores
    # C++ name of the program over the channels of a position that follows the tail (device/axis_program.cuh)
    channels: str = ""
    per_position: str = ""  # C++ type of the elements of a result with one number per position; "" if it has channels

    def allowing(self, tf32: int) -> Problem:
        """Returns the problem in the precision that is due where PyTorch's switches allow TF32 or not.

        `tf32` is NO_TF32, TF32_AS_PYTORCH or TF32. Who allows TF32 does not need the last bit, so that a layer that
        PyTorch nevertheless computes in float32 may have an error of up to 1e-6.
        """
        if self.dtype != "float32" or self.which is Pass.BIAS_GRAD:
            tf32 = NO_TF32
        rounded = tf32 == TF32 or (tf32 == TF32_AS_PYTORCH and not float32_in_pytorch(self.geometry))
        return replace(self, tf32=rounded, loose=tf32 != NO_TF32 and not rounded)

    @property
    def activation(self) -> str:
        """The C++ name of the epilogue in device/epilogue.cuh or device/over_channels.cuh."""
        if self.channels:
            result = self.per_position or "void"
            return f"tconv3d::OverChannels<{self._pointwise}, {self.channels}, {result}, {self._rounded}>"
        return self._pointwise

    @property
    def _pointwise(self) -> str:
        if self.has_operands:
            aligned = gcd(self.geometry.out_per_group, 16)
            counts = f"{self.tail_vectors}, {self.tail_wholes}, {aligned}"
            if not self.tail_reads:
                return f"tconv3d::EvaluatedWith<{self.tail}, {self._rounded}, {counts}>"
            kinds = [self._kind(each) for each in self.tail_reads]
            listed = ", ".join([*kinds, *kinds[:1] * 4][:4])
            return f"tconv3d::EvaluatedReading<{self.tail}, {self._rounded}, {counts}, {listed}>"
        if self.tail:
            return f"tconv3d::Evaluated<{self.tail}, {self._rounded}>"
        return "tconv3d::Relu" if self.relu else "tconv3d::Identity"

    def _kind(self, read: Read) -> str:
        """Returns the C++ name of how a tensor that the tail reads lies in memory (device/epilogue.cuh)."""
        last = "true" if self.output[1] == 1 and self.output[4] != 1 else "false"
        sharing = self.geometry.out_channels if read.one_channel else 1
        return f"tconv3d::Read<{read.scalar}, {'true' if read.one_item else 'false'}, {sharing}, {last}>"

    @property
    def _rounded(self) -> str:
        """Tells C++ whether products are of TF32 or 16-bit numbers."""
        return "true" if self.item_bytes == 2 or (self.dtype == "float32" and self.tf32) else "false"

    @property
    def has_operands(self) -> bool:
        """Tells whether the epilogue reads more than the sums."""
        return self.tail_vectors + self.tail_wholes > 0

    @property
    def has_epilogue(self) -> bool:
        """Tells whether the forward pass stores anything but its sums."""
        return self.relu or self.tail != "" or self.channels != ""

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
        """The memory traffic in bytes if every tensor of the pass is moved once."""
        g = self.geometry
        x = self.batch * g.in_channels * prod(self.input_size)
        y = self.batch * g.out_channels * prod(self.output_size)
        w = g.in_channels * g.out_per_group * g.taps
        b = g.out_channels if self.bias else 0
        written = y // g.out_channels if self.per_position else y
        moved = y + b if self.which is Pass.BIAS_GRAD else x + written + w + b + self.tail_wholes * y
        return moved * self.item_bytes


@dataclass(frozen=True)
class Plan:
    """Holds the launches that solve a problem, in order, and the size of the workspace they share."""

    kernel: str  # the kernel family's name, shown to users
    why: str
    launches: tuple[Launch, ...]
    workspace_bytes: int = 0
    tile: str = ""
    regions: tuple[tuple[str, int], ...] = ()  # names of regions in the workspace, and their offsets in bytes
    # The first launch writes a packed weight of this size at the workspace's start, and reads nothing but the weight.
    packed_bytes: int = 0
    moments: int = 0  # partial statistics per norm group and batch item, written to region "moments"
    passes: tuple[Pass, ...] = ()  # passes that the launches compute, for a plan of a backward pass
    preparing: int = 0  # number of launches at the beginning that only prepare operands
    kept: Plan | None = None  # faster plan for calls that reuse a packed weight and skip the first launch
    aten: bool = False  # there are no launches: PyTorch's operator computes the passes

    @property
    def every_launch(self) -> list[Launch]:
        """The launches that do anything, and those of calls that reuse a packed weight."""
        kept = self.kept.launches if self.kept else ()
        return [launch for launch in (*self.launches, *kept) if min(launch.grid) > 0]


def bias_grad_problem(
    batch: int, channels: int, size: Triple, dtype: str, output: Strides, aligned: bool = True
) -> Problem:
    """Returns the problem of a bias gradient, which depends on the output alone."""
    identity = Geometry.make(channels, channels, (1, 1, 1), groups=channels)
    none = (0, 0, 0, 0, 0)
    return Problem(Pass.BIAS_GRAD, identity, batch, size, dtype, none, none, output, aligned=aligned)


KINDS = (1024, 8192, 300_000)  # numbers of positions, batch included, at which a volume's kind changes


def volume_kind(positions: int) -> int:
    """Returns a volume's kind by size, 0 to 3: searches and tuned builds are separate for each kind."""
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


def is_channels_last(strides: Sequence[int]) -> bool:
    """Tells whether channels, and not positions along w, are neighbours in memory."""
    return strides[1] == 1 and strides[4] != 1


def last_offset(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns the offset of a tensor's last element, in elements."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
