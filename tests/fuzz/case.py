"""Defines one case of the fuzz: a layer, the memory layout of every tensor, and the call."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from math import prod

from layers import Layer

DIMENSIONS = "ncdhw"
GRADIENTS = ("input", "weight", "bias", "norm_weight", "norm_bias")


@dataclass(frozen=True)
class Memory:
    """Describes the memory layout of a tensor. For one dimension only `step`, `expanded` and `offset` count."""

    order: str = DIMENSIONS  # dimensions from the slowest to the fastest: "ndhwc" is channels_last_3d
    gaps: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)  # unused elements after the extents of n, c, d, h, w
    step: int = 1  # stride of the fastest dimension, in elements
    expanded: str = ""  # dimensions with stride 0
    offset: int = 0  # elements from a multiple of 16 bytes to the tensor's start

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) == 1:
            return (0 if self.expanded else self.step,)
        strides, stride = [0] * 5, self.step
        for name in reversed(self.order):
            at = DIMENSIONS.index(name)
            if name not in self.expanded:
                strides[at] = stride
                stride *= shape[at] + self.gaps[at]
        return tuple(strides)


PLAIN = Memory()


TAILS = ("tail", "silu", "softmax", "largest")
# Shapes of the whole tensors that a tail reads: the result's, or with one batch item, one channel, or one of each.
RESIDUALS = ("whole", "item", "channel", "one")


@dataclass(frozen=True)
class Case:
    """Describes a call and its backward pass.

    `plans` names the GPU whose plans the emulator executes; "" is the device that the backend reports.
    """

    layer: Layer
    dtype: str = "tf32"  # as in tconv3d.tools.bench.precision: "float32" is strict
    plans: str = ""
    favoured: str = ""  # kernel family of `families.FAVOURED` whose limits on volumes are lifted
    # "relu", "norm" for ReLU and GroupNorm, or one of TAILS (`fuse`): vectors and residuals, alone or with SiLU, or a
    # softmax or the largest number over channels, behind them
    epilogue: str = ""
    # Numbers per channel and batch item that a tail reads: the first is a factor, others are added.
    vector_count: int = 1
    residuals: tuple[str, ...] = ("whole",)  # names in RESIDUALS of the tensors that a tail adds
    residual_type: str = ""  # type of the residuals; that of the result if it is empty
    norm_groups: int = 1
    affine: bool = True  # whether the norm has weight and bias
    wanted: tuple[str, ...] = ()  # names in GRADIENTS
    calls: int = 1  # without gradients the second call packs the weight for later calls, and the third reuses it
    short: bool = False  # the first workspace of the backward pass cannot be allocated
    input: Memory = PLAIN
    weight: Memory = PLAIN
    grad: Memory = PLAIN  # layout of the output gradient, and of the residuals of a tail
    vectors: Memory = PLAIN  # layout of the biases and of the norm's weight
    at_end: bool = True  # tensors end at the guard after them; else they begin at the guard before them
    order: str = "forward"  # order in which the emulator runs threads
    seed: int = 0  # seed of the tensors' values

    @property
    def positions(self) -> int:
        """Returns the number of elements of one channel of the input, over the batch."""
        return self.layer.batch * prod(self.layer.size)

    def with_layer(self, **changes: object) -> Case:
        return replace(self, layer=replace(self.layer, **changes))  # type: ignore[arg-type]


def line(value: object) -> str:
    """Returns the Python source of a case, without fields that have their default."""
    if not is_dataclass(value):
        return repr(value)
    parts = [
        f"{field.name}={line(getattr(value, field.name))}"
        for field in fields(value)
        if field.default is MISSING or getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def parse(text: str) -> Case:
    """Returns the case of a line that `line` wrote."""
    case = eval(text, {"Case": Case, "Layer": Layer, "Memory": Memory})
    assert isinstance(case, Case)
    return case
