"""Converts the tensors of a call to the problems that the planner solves, for the executor and for `explain`.

A problem is returned with the shape and strides of its result. Arguments are checked in this module, once. The
tensors may be on the meta device; `OperandAddresses` then gives the addresses that decide about alignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..planning.arguments import tail_pointers
from ..planning.geometry import Geometry, Triple
from ..planning.problem import (
    NO_TF32,
    TF32,
    TF32_AS_PYTORCH,
    Norm,
    Pass,
    Problem,
    Read,
    Strides,
    bias_grad_problem,
    contiguous_strides,
)
from ..planning.scalars import RESULTS
from . import checks
from .checks import Convolution
from .pytorch_ops import result_strides

DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}

RESULT_TYPES = {**DTYPES, torch.int64: "int64"}  # types of results that may be indices

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a result
Asked = tuple[Problem, Layout]


class OperandAddresses(NamedTuple):
    """Holds the addresses of a call's operands; 0 for operands that are not read or not yet allocated."""

    x: int = 0
    weight: int = 0
    dy: int = 0

    def aligned(self, *names: str) -> bool:
        """Returns whether the addresses of the named operands are multiples of 16 bytes."""
        return not any(getattr(self, name) % 16 for name in names)


def tf32_allowed() -> bool:
    """Returns PyTorch's setting for TF32 in float32 convolutions on CUDA."""
    return torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"


_in_groups = False  # whether all layers with groups are computed in TF32 where TF32 is allowed


def allow_tf32_in_groups(allowed: bool = True) -> None:
    """Lets all layers with groups round to TF32 where PyTorch's switches allow TF32, in this process from now on.

    PyTorch computes layers with groups and a stride, or with few channels per group, in float32 even where TF32 is
    allowed, and so does this library unless this function is called. In TF32 they are predicted to be two to four
    times as fast, with an error of 3e-4 in place of 1e-7.
    `torch.backends.cudnn.conv.fp32_precision = "ieee"` still switches TF32 off for all layers.

    >>> allow_tf32_in_groups()
    """
    global _in_groups
    if not isinstance(allowed, bool):
        raise TypeError(f"expected allowed to be a bool, got {allowed!r} of type {type(allowed).__name__}")
    _in_groups = allowed


def tf32_level(allowed: bool) -> int:
    """Returns what `Problem.allowing` takes if TF32 is allowed or not."""
    if not allowed:
        return NO_TF32
    return TF32 if _in_groups else TF32_AS_PYTORCH


def tf32_of(tensor: Tensor) -> int:
    """Returns for which layers the values of this tensor may be rounded to TF32 before they are multiplied."""
    return tf32_level(tensor.dtype is torch.float32 and tf32_allowed())


@dataclass(frozen=True)
class Tail:
    """Holds an expression of the convolution's result (device/expressions.cuh), and the tensors it names by index.

    `vectors` is [N, C_out, numbers of a channel] in the accumulator's type: the numbers of the vectors, and so many
    more that they are a power of two. `wholes` have the result's type, shape and strides unless `reads` says
    otherwise, and addresses that are multiples of 16 bytes.
    """

    expression: str  # the C++ name of the expression
    vectors: Tensor | None = None
    vector_count: int = 0
    wholes: tuple[Tensor, ...] = ()
    # How each of the whole tensors lies in memory, if one lies otherwise than the result.
    reads: tuple[Read, ...] = ()
    channels: str = ""  # the C++ name of the program over the channels of a position that follows the expression
    per_position: torch.dtype | None = None  # element type of a result with one number per position

    @property
    def kind(self) -> tuple[str, int, int, tuple[Read, ...], str, str]:
        """What a plan depends on: expression, numbers of vectors and whole tensors, the program and its result."""
        result = "" if self.per_position is None else RESULTS[RESULT_TYPES[self.per_position]]
        return self.expression, self.vector_count, len(self.wholes), self.reads, self.channels, result

    @property
    def sizes(self) -> dict[str, Any]:
        names = "tail", "tail_vectors", "tail_wholes", "tail_reads", "channels", "per_position"
        return dict(zip(names, self.kind, strict=True))

    @property
    def has_operands(self) -> bool:
        return self.vectors is not None or self.wholes != ()

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the operands, in the order of `arguments.tail_pointers`."""
        if not self.has_operands:
            return ()
        first = 0 if self.vectors is None else self.vectors.data_ptr()
        return first, *(whole.data_ptr() for whole in self.wholes)

    def among(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names of a forward pass's operands with those of the tail behind x, weight and bias."""
        return (*names[:3], *(tail_pointers(len(self.wholes)) if self.has_operands else ()), *names[3:])


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    convolution: Convolution,
    at: OperandAddresses,
    relu: bool = False,
    norm: Norm | None = None,
    tail: Tail | None = None,
    window: bool = False,
) -> Asked:
    geometry = checks.check_forward(input, weight, bias, convolution, window)
    if norm is not None:
        checks.check_norm_groups(geometry.out_channels, norm.groups)
    shape = (input.shape[0], geometry.out_channels, *geometry.output_size(tuple(input.shape[2:])))
    strides = result_strides(shape, input, weight)
    problem = Problem(
        Pass.FORWARD,
        geometry,
        input.shape[0],
        tuple(input.shape[2:]),
        DTYPES[input.dtype],
        input.stride(),
        weight.stride(),
        strides,
        bias=bias is not None,
        aligned=at.aligned("x"),
        weight_aligned=at.aligned("weight"),
        relu=relu,
        **({} if tail is None else tail.sizes),
        norm=norm,
    )
    if tail is not None and tail.per_position is not None:
        shape = (shape[0], 1, *shape[2:])
        strides = contiguous_strides(shape)
    return problem.allowing(tf32_of(input)), (shape, strides)


def input_grad(
    grad_output: Tensor, weight: Tensor, input_size: Triple, convolution: Convolution, at: OperandAddresses
) -> Asked:
    checks.check_same_kind(grad_output, weight, "grad_output", "weight")
    geometry = checks.check_channels(weight, convolution)
    checks.check_grad_output(geometry, grad_output, input_size)
    shape = (grad_output.shape[0], geometry.in_channels, *input_size)
    strides = result_strides(shape, grad_output, weight)
    problem = Problem(
        Pass.INPUT_GRAD,
        geometry,
        grad_output.shape[0],
        input_size,
        DTYPES[grad_output.dtype],
        strides,
        weight.stride(),
        grad_output.stride(),
        aligned=at.aligned("dy"),
        weight_aligned=at.aligned("weight"),
    )
    return problem.allowing(tf32_of(grad_output)), (shape, strides)


def weight_grad(
    grad_output: Tensor, input: Tensor, kernel: Triple, convolution: Convolution, at: OperandAddresses
) -> Asked:
    checks.check_same_kind(grad_output, input, "grad_output", "input")
    stride, padding, output_padding, groups, dilation = convolution
    geometry = Geometry.make(
        input.shape[1], grad_output.shape[1], kernel, stride, padding, output_padding, groups, dilation
    )
    checks.check_grad_output(geometry, grad_output, tuple(input.shape[2:]), input.shape[0])
    shape = (geometry.in_channels, geometry.out_per_group, *kernel)
    strides: Strides = contiguous_strides(shape)
    problem = Problem(
        Pass.WEIGHT_GRAD,
        geometry,
        input.shape[0],
        tuple(input.shape[2:]),
        DTYPES[input.dtype],
        input.stride(),
        strides,
        grad_output.stride(),
        aligned=at.aligned("x", "dy"),
    )
    return problem.allowing(tf32_of(input)), (shape, strides)


def bias_grad(grad_output: Tensor, at: OperandAddresses) -> Asked:
    batch, channels, *size = grad_output.shape
    problem = bias_grad_problem(
        batch, channels, tuple(size), DTYPES[grad_output.dtype], grad_output.stride(), at.aligned("dy")
    )
    return problem, ((channels,), (1,))


def wanted_gradients(
    grad_output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    wanted: tuple[bool, ...],
    input_size: Triple,
    kernel: Triple,
    convolution: Convolution,
    at: OperandAddresses,
) -> list[Asked | None]:
    """Returns the problems of the gradients of input, weight and bias, and None for those that are not wanted."""
    found: list[Asked | None] = [None, None, None]
    if wanted[0]:
        assert weight is not None
        found[0] = input_grad(grad_output, weight, input_size, convolution, at)
    if wanted[1]:
        assert input is not None
        found[1] = weight_grad(grad_output, input, kernel, convolution, at)
    if wanted[2]:
        found[2] = bias_grad(grad_output, at)
    return found
