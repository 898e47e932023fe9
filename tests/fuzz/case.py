"""What one case of the fuzz is: a layer, how every tensor lies in memory, and how it is called."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from math import prod

from layers import Layer

DIMENSIONS = "ncdhw"
GRADIENTS = ("input", "weight", "bias", "norm_weight", "norm_bias")


@dataclass(frozen=True)
class Memory:
    """How a tensor lies in memory. A tensor of one dimension has only `step`, `expanded` and `offset`."""

    order: str = DIMENSIONS  # dimensions from the slowest to the fastest: "ndhwc" is channels_last_3d
    gaps: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)  # elements to leave out after each of n, c, d, h, w
    step: int = 1  # the stride of the fastest dimension
    expanded: str = ""  # dimensions with stride 0
    offset: int = 0  # elements between the last multiple of 16 bytes and the tensor's start

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


@dataclass(frozen=True)
class Case:
    """A call and its backward pass.

    `plans` names the GPU whose plans the emulator executes; "" is the device at hand.
    """

    layer: Layer
    dtype: str = "tf32"  # as in tconv3d.tools.bench.precision: "float32" is strict
    plans: str = ""
    favoured: str = ""  # of `families.FAVOURED`: kernels that take volumes for which they are not worth it, too
    epilogue: str = ""  # "relu", or "norm" for ReLU and GroupNorm
    norm_groups: int = 1
    affine: bool = True  # whether the norm has weight and bias
    wanted: tuple[str, ...] = ()  # of GRADIENTS
    calls: int = 1  # without gradients the second call packs the weight to keep it, and the third finds it
    short: bool = False  # the first workspace of the backward pass cannot be allocated
    input: Memory = PLAIN
    weight: Memory = PLAIN
    grad: Memory = PLAIN
    vectors: Memory = PLAIN  # biases, and the norm's weight
    at_end: bool = True  # tensors end where their guard begins; else they begin where their guard ends
    order: str = "forward"  # of the emulator's threads
    seed: int = 0  # of the values

    @property
    def positions(self) -> int:
        """Elements of one channel of the input, over the batch."""
        return self.layer.batch * prod(self.layer.size)

    def with_layer(self, **changes: object) -> Case:
        return replace(self, layer=replace(self.layer, **changes))  # type: ignore[arg-type]


def line(value: object) -> str:
    """Python source of a case, without what has its default."""
    if not is_dataclass(value):
        return repr(value)
    parts = [
        f"{field.name}={line(getattr(value, field.name))}"
        for field in fields(value)
        if field.default is MISSING or getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def parse(text: str) -> Case:
    """The case that `line` wrote."""
    case = eval(text, {"Case": Case, "Layer": Layer, "Memory": Memory})
    assert isinstance(case, Case)
    return case
