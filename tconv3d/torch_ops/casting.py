"""Casts the operands of a convolution under autocast, and keeps casts of parameters between calls without gradients.

PyTorch's autocast casts a parameter once for each autocast region. A network that only computes results opens a
region for each of its calls, and would cast every weight in each of them. A kept cast lives as long as a kept pack,
by the same rules (see `kept`), and is itself a tensor whose packs can be kept.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from . import kept
from .dispatch import device_type

_NUMBERS = {torch.bfloat16: -1, torch.float16: -2, torch.float32: -3}  # packed layouts have numbers from 0 on


def autocast_type(device_type: str) -> torch.dtype | None:
    """Returns the type that autocast casts the operands of convolutions to, or None if it is off for the device."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def casts(tensor: Tensor | None, dtype: torch.dtype, device_type: str) -> bool:
    """Tells whether autocast casts an operand: not float64, nor tensors of another device."""
    return (
        tensor is not None
        and tensor.dtype is not dtype
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        and tensor.device.type == device_type
    )


def cast_operand(tensor: Tensor | None, dtype: torch.dtype, device_type: str) -> Tensor | None:
    """Casts an operand as PyTorch's autocast does for convolutions."""
    return tensor.to(dtype) if tensor is not None and casts(tensor, dtype, device_type) else tensor


def cast_operands(
    input: Tensor, weight: Tensor, bias: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts the operands of a convolution as autocast does. With `keep`, casts of parameters are kept."""
    where = device_type(input)
    dtype = autocast_type(where)
    if dtype is None:
        return input, weight, bias
    cast = kept_cast if keep else fresh_cast
    if casts(weight, dtype, where):
        weight = cast(weight, dtype)
    if bias is not None and casts(bias, dtype, where):
        bias = cast(bias, dtype)
    return input.to(dtype) if casts(input, dtype, where) else input, weight, bias


def fresh_cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a parameter in another type for a call with gradients, after which its kept casts are not trusted."""
    fresh(parameter)
    return parameter.to(dtype)


def fresh(parameter: Tensor) -> None:
    """Notes that a call with gradients uses a parameter, so that its kept casts are not trusted any more."""
    if not kept.captured(parameter, stream_of(parameter)):
        kept.packed_for_itself(parameter)


def kept_cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a parameter in another type for a call without gradients; from the second call on the cast is kept."""
    stream = stream_of(parameter)
    number = _NUMBERS.get(dtype)
    if number is None or kept.captured(parameter, stream):
        return parameter.to(dtype)
    address, place = parameter.data_ptr(), (stream, number)
    found = kept.find(parameter, address, place)
    if found is not None:
        return found[1]
    promise = kept.promise_of(parameter, address, place, lambda: _lasting_cast(parameter, dtype))
    if promise is None:
        return parameter.to(dtype)
    promise.keep()
    return promise.pack[1]


def stream_of(tensor: Tensor) -> int:
    """Returns the handle of the stream that operators of a tensor run on; 0 stands for the default one."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


def _lasting_cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a parameter into a tensor with a version counter, which tensors made in inference mode do not have."""
    with torch.inference_mode(False), torch.no_grad():
        return parameter.to(dtype)


def below_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Switches autocast off for the operators of a block, whose casts have been chosen already."""
    where = device_type(tensor)
    if not torch.is_autocast_enabled(where):
        return contextlib.nullcontext()
    key = torch._C.DispatchKey.AutocastCUDA if where == "cuda" else torch._C.DispatchKey.AutocastCPU
    guard: contextlib.AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))
    return guard
