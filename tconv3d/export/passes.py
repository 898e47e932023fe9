"""What an exported file computes: its operations, and the plan of each for every variant it may run as.

A variant is a kind of GPU, a precision and a memory format. Asks the planner what the executor asks for the same
tensors, so the exported kernels are the ones that the library runs. Knows nothing of source text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from .. import planner
from ..bench.layers import Layer
from ..executor import OPERANDS, channels_last_strides, contiguous_strides
from ..geometry import Geometry
from ..gpus import GPUS
from ..problem import Device, Pass, Plan, Problem

# What plans are made for. The shared memory of "any" is what every GPU of compute capability 8.0 and up can give.
DEVICES = {
    "hopper": GPUS["H200"].device,
    "any": Device("compute capability 8.0 and up", (8, 0), GPUS["H200"].device.multiprocessors, 101376),
}
PRECISIONS = {"float32": ("tf32", "float32"), "float16": ("float16",), "bfloat16": ("bfloat16",)}  # by dtype
LAYOUTS = ("contiguous", "channels_last_3d")
STRIDES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "contiguous": contiguous_strides,
    "channels_last_3d": channels_last_strides,
}


class NotExportableError(ValueError):
    """What was asked for cannot be written as one file."""


@dataclass(frozen=True)
class Variant:
    """What an operation is compiled for."""

    gpu: str
    precision: str
    layout: str

    def __str__(self) -> str:
        gpu = "Hopper" if self.gpu == "hopper" else "any GPU"
        return f"{gpu}, {self.precision}, {self.layout}"


@dataclass(frozen=True)
class Result:
    """A tensor that an operation writes. Volumes are in the variant's memory format."""

    name: str
    shape: tuple[int, ...]
    volume: bool = False


@dataclass(frozen=True)
class Operation:
    """One function of the exported file: named operands in, tensors out."""

    name: str
    operands: tuple[str, ...]
    results: tuple[Result, ...]
    plans: dict[Variant, Plan]


def variants(dtypes: Sequence[str], layouts: Sequence[str]) -> list[Variant]:
    precisions = [precision for dtype in dtypes for precision in PRECISIONS[dtype]]
    return [Variant(*choice) for choice in product(DEVICES, precisions, layouts)]


def operations(layer: Layer, chosen: Sequence[Variant]) -> list[Operation]:
    """The passes of a layer: forward, and the gradients of input, weight and (where there is one) bias."""
    if layer.norm_groups:
        raise NotExportableError(
            "a transposed convolution with ReLU and GroupNorm behind it cannot be exported: "
            "this version has no kernels of its own for ReLU and GroupNorm"
        )
    passes = [which for which in Pass if layer.bias or which is not Pass.BIAS_GRAD]
    return [_operation(layer, which, chosen) for which in passes]


def _operation(layer: Layer, which: Pass, chosen: Sequence[Variant]) -> Operation:
    *operands, _, result, _ = OPERANDS[which]  # before the result nothing, after it the workspace
    weight = (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel)
    results = {
        "y": Result("y", layer.output_shape, volume=True),
        "dx": Result("dx", layer.input_shape, volume=True),
        "dw": Result("dw", weight),
        "db": Result("db", (layer.out_channels,)),
    }
    if not layer.bias:
        operands = [name for name in operands if name != "bias"]
    plans = {v: planner.plan(problem(layer, which, v), DEVICES[v.gpu]) for v in chosen}
    return Operation(which.value, tuple(operands), (results[result],), plans)


def problem(layer: Layer, which: Pass, variant: Variant) -> Problem:
    """The problem that the executor makes of tensors in the variant's memory format."""
    strides = STRIDES[variant.layout]
    weight = (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel)
    output_size = layer.output_shape[2:]
    geometry = Geometry.make(
        layer.in_channels,
        layer.out_channels,
        layer.kernel,
        layer.stride,
        layer.padding,
        layer.output_padding,
        layer.groups,
        layer.dilation,
    )
    found = Problem(
        which,
        geometry,
        layer.batch,
        layer.size,
        "float32" if variant.precision == "tf32" else variant.precision,
        strides(layer.input_shape),
        strides(weight) if which is not Pass.WEIGHT_GRAD else contiguous_strides(weight),
        strides(layer.output_shape),
        bias=which is Pass.FORWARD and layer.bias,
        tf32=variant.precision == "tf32",
    )
    if which is not Pass.BIAS_GRAD:
        return found
    channels = layer.out_channels
    identity = Geometry.make(channels, channels, (1, 1, 1), groups=channels)
    none = (0,) * 5
    return replace(found, geometry=identity, input_size=output_size, input=none, weight=none, tf32=False)
