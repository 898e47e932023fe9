"""Lists layers for tests, and compares our passes with float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tconv3d

Triple = tuple[int, int, int]

# Relative rounding error that is allowed for one operation or one result of a type.
UNIT = {torch.float64: 2e-16, torch.float32: 1.2e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Layer:
    """Describes a transposed convolution and the size of its input."""

    in_channels: int
    out_channels: int
    size: Triple
    kernel: Triple
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    output_padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    batch: int = 2
    bias: bool = True

    @property
    def settings(self) -> tuple[Triple, Triple, Triple, int, Triple]:
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation

    def operands(self, dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
        """Returns random input, weight and, if there is one, bias."""
        random = torch.Generator().manual_seed(seed)
        shapes = [
            (self.batch, self.in_channels, *self.size),
            (self.in_channels, self.out_channels // self.groups, *self.kernel),
            *([(self.out_channels,)] if self.bias else []),
        ]
        return [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills new floating-point tensors with NaN, so that an element that no kernel writes is noticed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


GUARD = 64  # elements before and after a tensor


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Places results between guard elements, fills all with NaN, and fails if a guard element was written."""
    allocate, guards = torch.empty_strided, []

    def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], **how: Any) -> Tensor:
        count = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        memory = torch.full((count + 2 * GUARD,), torch.nan, **how)
        guards.append((memory[:GUARD], memory[GUARD + count :]))
        return memory.as_strided(size, stride, GUARD)

    torch.empty_strided = empty_strided
    try:
        yield
    finally:
        torch.empty_strided = allocate
    assert guards and all(bool(guard.isnan().all()) for both in guards for guard in both), "written outside"


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """Copies a tensor, with its strides, to `elements` elements after a multiple of 16 bytes, between NaNs."""
    count = 1 + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.full((count + elements + 2 * GUARD,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), GUARD + elements).copy_(tensor)


def passes(
    function: object,
    operands: list[Tensor],
    settings: tuple[object, ...],
    grad_output: Tensor | None = None,
    forward_only: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Returns the result, and the gradients of all operands for `grad_output`, which is all ones by default."""
    leaves = [operand.detach().requires_grad_(not forward_only) for operand in operands]
    bias = leaves[2] if len(leaves) == 3 else None
    result = function(leaves[0], leaves[1], bias, *settings)  # type: ignore[operator]
    if forward_only:
        return result, []
    grad = torch.ones_like(result) if grad_output is None else grad_output.to(result.dtype)
    return result.detach(), list(torch.autograd.grad(result, leaves, grad))


def to_tf32(tensor: Tensor) -> Tensor:
    """Rounds float32 to the nearest TF32 numbers, whose products on tensor cores are exact."""
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def check(
    layer: Layer,
    dtype: torch.dtype,
    device: str,
    operands: list[Tensor] | None = None,
    forward_only: bool = False,
    tf32: bool = False,
) -> None:
    """Compares every element of the result and of every gradient with float64.

    The error of an element is measured in roundings of its sum over absolute values, the largest value it could have
    without cancellation. An element that misses one term, or has one too many, is far outside. `tf32` rounds the
    gradient of the result to TF32; given operands must be TF32 numbers too.
    """
    operands = layer.operands(dtype, device) if operands is None else operands
    exact = [operand.double() for operand in operands]
    reference, _ = passes(F.conv_transpose3d, exact, layer.settings, forward_only=True)
    random = torch.Generator().manual_seed(1)
    grad_output = torch.randn(reference.shape, generator=random).to(device, dtype)
    grad_output = to_tf32(grad_output) if tf32 else grad_output

    def run(function: object, operands: list[Tensor], grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        return passes(function, operands, layer.settings, grad, forward_only)

    expected = run(F.conv_transpose3d, exact, grad_output.double())
    largest = run(F.conv_transpose3d, [operand.abs() for operand in exact], grad_output.double().abs())
    with poisoned():
        got = run(tconv3d.conv_transpose3d, operands, grad_output)
    names = ("result", "input gradient", "weight gradient", "bias gradient")[: 1 if forward_only else 4]
    for name, ours, exact_one, bound in zip(
        names, (got[0], *got[1]), (expected[0], *expected[1]), (largest[0], *largest[1]), strict=False
    ):
        assert ours.dtype == dtype, name
        assert_right(name, ours, exact_one, allowed_error(exact_one, bound, dtype))


def allowed_error(exact: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the allowed error of a result, given its exact sums and the sums over absolute values (`largest`)."""
    sum_unit = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    return largest * sum_unit * 12 + exact.abs() * UNIT[dtype] + 1e-7 * (dtype == torch.float16)


def wrong_elements(name: str, ours: Tensor, exact: Tensor, allowed: Tensor) -> str | None:
    """Describes the elements whose error is larger than allowed, or returns None if there are none."""
    assert ours.shape == exact.shape, name
    wrong = ~((ours.double() - exact).abs() <= allowed)  # a NaN is wrong too
    if not wrong.any():
        return None
    first = wrong.nonzero()[:1].flatten().tolist()
    return f"{name}: {int(wrong.sum())} of {wrong.numel()} elements wrong, first at {first}"


def assert_right(name: str, ours: Tensor, exact: Tensor, allowed: Tensor) -> None:
    """Fails with a description of the elements whose error is larger than allowed."""
    wrong = wrong_elements(name, ours, exact, allowed)
    assert wrong is None, wrong


def tensor_core_error(exact: Tensor, largest: Tensor, dtype: torch.dtype, roundings: int = 20) -> Tensor:
    """Returns the allowed error of sums on tensor cores, some roundings of the sum over absolute values (`largest`).

    Both factors of a float32 product are rounded to TF32, by up to 2^-11 each; products of 16-bit types are exact.
    """
    product = 2.0**-10 if dtype == torch.float32 else 0.0
    return largest * (product + roundings * UNIT[torch.float32]) + exact.abs() * UNIT[dtype] + 1e-7


T3, T1 = (3, 3, 3), (1, 1, 1)

TABLE = {
    "plain": Layer(4, 6, (3, 4, 5), T3),
    "plain, no bias": Layer(3, 5, (3, 4, 5), T3, bias=False),
    "unet up-convolution": Layer(8, 4, (3, 3, 4), (2, 2, 2), (2, 2, 2)),
    "gan": Layer(6, 3, (3, 3, 3), (4, 4, 4), (2, 2, 2), T1),
    "monai": Layer(5, 7, (2, 3, 4), T3, (2, 2, 2), T1, T1),
    "groups": Layer(8, 12, (2, 3, 4), T3, (2, 2, 2), T1, groups=4),
    "depthwise": Layer(6, 6, (3, 3, 4), (4, 4, 4), (2, 2, 2), T1, groups=6),
    "depthwise, two outputs each": Layer(3, 6, (3, 3, 4), T3, groups=3),
    "asymmetric": Layer(4, 9, (2, 4, 5), (3, 5, 1), (1, 2, 3), (1, 2, 0), (0, 1, 2)),
    "dilated": Layer(2, 3, (3, 3, 4), (3, 2, 3), (1, 2, 3), (2, 0, 1), (0, 1, 1), (2, 3, 1)),
    "many output channels": Layer(3, 33, (2, 2, 3), (2, 2, 2)),
    "many input channels": Layer(70, 3, (2, 2, 3), (2, 2, 2)),
    "one channel": Layer(1, 1, (3, 4, 5), T3, (2, 2, 2), T1),
    "wide kernel": Layer(2, 2, (1, 2, 9), (1, 2, 15), (1, 1, 1), (0, 0, 5)),
    "large stride": Layer(2, 3, (2, 2, 3), (3, 3, 3), (1, 3, 7), (0, 1, 1), (0, 2, 4)),
    "large stride and kernel": Layer(2, 2, (2, 2, 2), (5, 2, 20), (3, 2, 8), (1, 0, 9), (2, 1, 3)),
    "pointwise": Layer(5, 4, (3, 3, 3), T1),
    "single voxel": Layer(4, 4, T1, T3, (2, 2, 2)),
    "batch of one": Layer(4, 4, (2, 5, 3), T3, batch=1),
    "long line": Layer(2, 2, (1, 1, 150), T3, (2, 2, 2), T1),
}

TRAPS = {
    "division rounds down": Layer(2, 2, (2, 3, 3), T3, (2, 2, 2), (2, 2, 2)),
    "negative offsets, odd stride": Layer(2, 2, (4, 4, 4), (4, 4, 4), T3, (4, 5, 3), (2, 2, 1)),
    "weight is (in, out/groups)": Layer(6, 4, (2, 2, 2), (2, 3, 1), groups=2),
    "output_padding shifts nothing": Layer(2, 3, (2, 3, 2), T3, T3, T1, (2, 1, 2)),
    "output_padding below dilation": Layer(2, 2, (2, 3, 2), (2, 2, 2), T1, (0, 0, 0), (1, 2, 1), (2, 3, 2)),
    "tuples are (d, h, w)": Layer(2, 2, (2, 3, 4), (1, 2, 3), (3, 1, 2), (0, 1, 1), (2, 0, 1), (1, 2, 1)),
    "empty phases": Layer(2, 3, (3, 3, 3), T3, (2, 2, 2), (0, 1, 2), T1, (2, 2, 2)),
    "empty phases along w alone": Layer(2, 3, (2, 2, 3), (1, 1, 2), (1, 1, 4), (0, 0, 0), (0, 0, 3), (1, 1, 2)),
    "kernel smaller than stride": Layer(3, 2, (3, 2, 3), (2, 1, 2), (3, 4, 3), (0, 0, 0), (2, 3, 1)),
    "padding crops to almost nothing": Layer(2, 2, (2, 2, 3), T3, T1, (1, 1, 2)),
    "padding crops whole taps": Layer(2, 2, (3, 3, 3), (5, 5, 5), T1, (3, 3, 3)),
    "padding beyond the kernel": Layer(2, 2, (6, 6, 6), (2, 2, 2), T1, (3, 3, 3)),
    "spatial sizes of one": Layer(3, 3, T1, (3, 2, 1), (2, 3, 4)),
    "prime channels per group": Layer(21, 33, (2, 2, 2), (2, 2, 2), (2, 2, 2), groups=3),
}
