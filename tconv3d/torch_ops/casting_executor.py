"""Runs a forward pass under autocast: one launch converts its small operands, and the pass reads the copies.

PyTorch's autocast converts each operand by an operator, which takes the caller's processor longer than a launch. The
copies have the bits of PyTorch's. Those that the backward pass reads are tensors, the others lie in one scratch
memory. What is not small or not dense is left to PyTorch's operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..planning import casts
from ..planning.problem import Plan
from ..planning.scalars import round_up
from ..planning.workspace import ALIGN
from ..runtime.compiler import MissingCompilerError
from . import choosing, executor
from .checks import Convolution
from .executor import Start, Task
from .problems import DTYPES

_ORDER = ("first", "second", "third")


class Cast(NamedTuple):
    """The result of a forward pass, and the operands in its type; the weight's copy only if it was asked for."""

    result: Tensor
    input: Tensor
    weight: Tensor | None


@dataclass(frozen=True)
class _Known:
    """Holds what a repeated call launches: the conversion, and the task of the pass."""

    start: Start
    task: Task
    weight_at: int  # offset in bytes of the weight's copy in the scratch memory
    bias_at: int
    scratch_bytes: int


_known: dict[tuple[Any, ...], _Known | None] = {}  # None: PyTorch's operators convert the operands of such calls


def forget() -> None:
    """Drops what is known of earlier calls."""
    _known.clear()


choosing.on_change(forget)


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    convolution: Convolution,
    relu: bool,
    dtype: torch.dtype,
    keep_weight: bool,
) -> Cast | None:
    """Computes the forward pass of operands that autocast converts to `dtype`; the input may have it already.

    Returns None where PyTorch's operators should convert the operands, and where its operator computes the pass.
    """
    x, w = input.data_ptr(), weight.data_ptr()
    kind = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device)
    key = (
        input.dtype, input.device, input.shape, input.stride(), x % 16, weight.dtype, weight.device, weight.shape,
        weight.stride(), kind, convolution, relu, dtype, keep_weight, choosing.circumstances(input.is_cuda),
        executor.generation(),
    )  # fmt: skip
    try:
        known = _known[key]
    except KeyError:
        known = _new(key, input, weight, bias, convolution, relu, dtype, keep_weight)
    if known is None:
        return None
    first = 0
    if known.scratch_bytes:
        scratch = torch.empty(known.scratch_bytes, dtype=torch.uint8, device=input.device)
        first = scratch.data_ptr()
    copy, weight_copy, operands = input, None, [w]
    if keep_weight:
        weight_copy = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=input.device)
        results = [weight_copy.data_ptr()]
    else:
        results = [first + known.weight_at]
    if bias is not None:
        operands.append(bias.data_ptr())
        results.append(first + known.bias_at)
    if input.dtype is not dtype:
        copy = torch.empty_strided(input.shape, input.stride(), dtype=dtype, device=input.device)
        operands.append(x)
        results.append(copy.data_ptr())
    stream = torch._C._cuda_getCurrentRawStream(input.get_device()) if input.is_cuda else 0
    known.start((*operands, *results, 0), stream)
    (result,) = known.task.run(copy, (copy.data_ptr(), results[0], results[1] if bias is not None else 0))
    assert result is not None
    return Cast(result, copy, weight_copy)


def _new(
    key: tuple[Any, ...],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    convolution: Convolution,
    relu: bool,
    dtype: torch.dtype,
    keep_weight: bool,
) -> _Known | None:
    """Returns what calls with this key launch, or None; a choice that is not final is not remembered."""
    converted = [each for each in (weight, bias) if each is not None]
    converted += [input] if input.dtype is not dtype else []
    if len(_known) >= executor.MAX_TASKS:
        _known.clear()
    if not _together(converted, dtype):
        return _known.setdefault(key, None)
    rounded = None if bias is None else bias.to(dtype)
    task = executor.final_forward_task(input.to(dtype), weight.to(dtype), rounded, convolution, relu)
    if task is None:
        return None
    counts = [each.numel() for each in converted]
    launch = casts.cast(counts, DTYPES[weight.dtype], DTYPES[dtype])
    names = (*_ORDER[: len(counts)], *(f"{name} result" for name in _ORDER[: len(counts)]), "null")
    weight_bytes = 0 if keep_weight else round_up(weight.numel() * dtype.itemsize, ALIGN)
    bias_bytes = 0 if bias is None else bias.numel() * dtype.itemsize
    plan = Plan("cast", "one launch for all operands", (launch,))
    try:
        start = executor.make_task(plan, names, (), input).start
    except MissingCompilerError:  # a file of compiled kernels may have all others that the layer needs
        return _known.setdefault(key, None)
    found = _Known(start, task, 0, weight_bytes, weight_bytes + bias_bytes)
    _known[key] = found
    return found


def _together(tensors: list[Tensor], dtype: torch.dtype) -> bool:
    """Tells whether one launch converts these tensors: small and dense ones of one type on one device."""
    return all(
        0 < each.numel() <= casts.MOST_ELEMENTS
        and each.dtype is tensors[0].dtype
        and each.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and each.device == tensors[0].device
        and _dense(each)
        for each in tensors
    ) and dtype in (torch.float16, torch.bfloat16)


def _dense(tensor: Tensor) -> bool:
    """Tells whether `to` keeps a tensor's strides and every element between its first and last is its own."""
    return tensor.is_contiguous() or (
        tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    )
