"""Converts the tensors of a call to the problems that the planner solves, for the executor and for `explain`.

A problem is returned with the shape and strides of its result. Arguments are checked in this module, once. The
tensors may be on the meta device; `OperandAddresses` then gives the addresses that decide about alignment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..planning.geometry import Geometry, Triple
from ..planning.problem import Norm, Pass, Problem, Strides, bias_grad_problem, contiguous_strides
from . import checks
from .checks import Convolution
from .pytorch_ops import result_strides

DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}

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


def tf32_of(tensor: Tensor) -> bool:
    """Returns whether values of this tensor may be rounded to TF32 before they are multiplied."""
    return tensor.dtype is torch.float32 and tf32_allowed()


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    convolution: Convolution,
    at: OperandAddresses,
    relu: bool = False,
    norm: Norm | None = None,
    tail: str = "",
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
        tf32=tf32_of(input),
        aligned=at.aligned("x"),
        weight_aligned=at.aligned("weight"),
        relu=relu,
        tail=tail,
        norm=norm,
    )
    return problem, (shape, strides)


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
        tf32=tf32_of(grad_output),
        aligned=at.aligned("dy"),
        weight_aligned=at.aligned("weight"),
    )
    return problem, (shape, strides)


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
        tf32=tf32_of(input),
        aligned=at.aligned("x", "dy"),
    )
    return problem, (shape, strides)


def bias_grad(grad_output: Tensor, at: OperandAddresses) -> Asked:
    batch, channels, *size = grad_output.shape
    problem = bias_grad_problem(
        batch, channels, tuple(size), DTYPES[grad_output.dtype], grad_output.stride(), at.aligned("dy")
    )
    return problem, ((channels,), (1,))
