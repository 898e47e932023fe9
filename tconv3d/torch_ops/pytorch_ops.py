"""Runs PyTorch's operators for calls that this library's kernels do not take.

Results have the strides that this library's kernels would give them. This module knows tensors and settings, but not
why a call is left to PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import EllipsisType

import torch
from torch import Tensor

from ..planning.geometry import Geometry, Triple
from ..planning.problem import Strides, channels_last_strides, contiguous_strides
from .backend import Backend
from .checks import Convolution

_warned: set[str] = set()


def leave(reason: str, backend: Backend, stacklevel: int) -> None:
    """Warns once for each reason that a call is left to PyTorch's operator; raises unless the backend is "auto"."""
    if backend != "auto":
        raise NotImplementedError(f"tconv3d has no kernel: {reason}")
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"tconv3d leaves this to PyTorch's operator: {reason}", stacklevel=stacklevel + 1)


def forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution, relu: bool = False
) -> Tensor:
    stride, padding, output_padding, groups, dilation = convolution
    if _takes(convolution):
        result = torch.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)
    else:
        whole = torch.conv_transpose3d(input, weight, bias, stride, 0, 0, groups, dilation)
        size = Geometry.make(
            input.shape[1], whole.shape[1], tuple(weight.shape[2:]), stride, padding, output_padding, groups, dilation
        ).output_size(tuple(input.shape[2:]))
        result = whole.new_zeros((*whole.shape[:2], *size))
        if bias is not None:
            result += bias[:, None, None, None]
        inside, outside = _overlap(padding, size, tuple(whole.shape[2:]))
        result[inside] = whole[outside]
    return with_strides(result.relu_() if relu else result, result_strides(result.shape, input, weight))


def forward_with_statistics(
    input: Tensor, weight: Tensor, bias: Tensor | None, groups: int, eps: float, convolution: Convolution
) -> tuple[Tensor, Tensor]:
    """Returns the ReLU of the forward pass, and means and reciprocal standard deviations [2, N, groups]."""
    result = forward(input, weight, bias, convolution, relu=True)
    values = result.to(statistics_dtype(result.dtype)).unflatten(1, (groups, -1)).flatten(2)
    variance, mean = torch.var_mean(values, 2, correction=0)
    return result, torch.stack([mean, (variance + eps).rsqrt()])


def normalize(
    input: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns the GroupNorm of `input`, given means and reciprocal standard deviations [2, N, groups]."""
    per_group = input.shape[1] // statistics.shape[2]
    mean, rstd = statistics.repeat_interleave(per_group, 2)[..., None, None, None]
    scale = rstd if weight is None else rstd * weight.to(rstd.dtype)[:, None, None, None]
    shifted = (input - mean) * scale
    result = shifted if bias is None else shifted + bias.to(rstd.dtype)[:, None, None, None]
    return with_strides(result.to(dtype), input.stride())


def norm_gradient(
    grad: Tensor,
    input: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    parameters: torch.dtype,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the ReLU's input, of the norm's parameters [2, C] and of the convolution's bias."""
    batch, channels, *size = input.shape
    kind, groups = statistics.dtype, statistics.shape[2]
    dx, dweight, dbias = torch.ops.aten.native_group_norm_backward(
        grad.to(kind).contiguous(), input.to(kind).contiguous(), statistics[0].contiguous(),
        statistics[1].contiguous(), None if weight is None else weight.to(kind), batch, channels,
        size[0] * size[1] * size[2], groups, (True, True, True),
    )  # fmt: skip
    passed = torch.ops.aten.threshold_backward(dx, input, 0).to(input.dtype)
    return (
        with_strides(passed, input.stride()) if wanted[0] or wanted[2] else input.new_empty(0),
        torch.stack([dweight, dbias]).to(parameters) if wanted[1] else input.new_empty(0, dtype=parameters),
        passed.sum((0, 2, 3, 4)) if wanted[2] else input.new_empty(0),
    )


def input_grad(grad_output: Tensor, weight: Tensor, input_size: Triple, convolution: Convolution) -> Tensor:
    shape = (grad_output.shape[0], weight.shape[0], *input_size)
    result = _backward(grad_output, _shaped(grad_output, shape), weight, convolution, 0)
    return with_strides(result, result_strides(shape, grad_output, weight))


def weight_grad(grad_output: Tensor, input: Tensor, kernel: Triple, convolution: Convolution) -> Tensor:
    shape = (input.shape[1], grad_output.shape[1] // convolution[3], *kernel)
    result = _backward(grad_output, input, _shaped(grad_output, shape), convolution, 1)
    return with_strides(result, contiguous_strides(shape))


def bias_grad(grad_output: Tensor) -> Tensor:
    return grad_output.sum((0, 2, 3, 4))


def backward(
    grad_output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    wanted: Sequence[bool],
    input_size: Triple,
    kernel: Triple,
    convolution: Convolution,
) -> list[Tensor | None]:
    """Returns the wanted gradients of input, weight and bias. A tensor that no wanted gradient needs may be None."""
    found: list[Tensor | None] = [None, None, None]
    if wanted[0] and wanted[1] and _takes(convolution):  # one call, as PyTorch's own backward pass
        assert input is not None and weight is not None
        stride, padding, output_padding, groups, dilation = convolution
        rest = stride, padding, dilation, True, output_padding, groups, list(wanted)
        found = list(torch.ops.aten.convolution_backward(grad_output, input, weight, [grad_output.shape[1]], *rest))
        found[0] = with_strides(found[0], result_strides(input.shape, grad_output, weight))  # type: ignore[arg-type]
        found[1] = with_strides(found[1], contiguous_strides(weight.shape))  # type: ignore[arg-type]
        return found if wanted[2] else [*found[:2], None]
    if wanted[0]:
        assert weight is not None
        found[0] = input_grad(grad_output, weight, input_size, convolution)
    if wanted[1]:
        assert input is not None
        found[1] = weight_grad(grad_output, input, kernel, convolution)
    if wanted[2]:
        found[2] = bias_grad(grad_output)
    return found


def _backward(grad_output: Tensor, input: Tensor, weight: Tensor, convolution: Convolution, which: int) -> Tensor:
    stride, padding, output_padding, groups, dilation = convolution
    mask = [which == 0, which == 1, False]
    if not _takes(convolution):
        kernel = tuple(weight.shape[2:])
        geometry = Geometry.make(1, 1, kernel, stride, (0, 0, 0), (0, 0, 0), 1, dilation)
        size = geometry.output_size(tuple(input.shape[2:]))
        whole = grad_output.new_zeros((*grad_output.shape[:2], *size))
        inside, outside = _overlap(padding, tuple(grad_output.shape[2:]), size)
        whole[outside] = grad_output[inside]
        grad_output, padding, output_padding = whole, (0, 0, 0), (0, 0, 0)
    grads = torch.ops.aten.convolution_backward(
        grad_output, input, weight, None, stride, padding, dilation, True, output_padding, groups, mask
    )
    return grads[which]


def _takes(convolution: Convolution) -> bool:
    """Tells whether PyTorch's operator takes the settings. Those of a window may be outside its limits."""
    stride, padding, output_padding, _, dilation = convolution
    limits = zip(output_padding, map(max, stride, dilation), strict=True)
    return min(padding) >= 0 and all(0 <= extra < limit for extra, limit in limits)


def _overlap(
    padding: Triple, size: Triple, whole: Triple
) -> tuple[tuple[slice | EllipsisType, ...], tuple[slice | EllipsisType, ...]]:
    """Returns where a window of this size and the whole output without padding have elements in common.

    Element `o` of the window is element `o + padding` of the whole output. The first result indexes the window, the
    second the whole output.
    """
    first = [max(0, -p) for p in padding]
    last = [max(f, min(n, m - p)) for f, n, m, p in zip(first, size, whole, padding, strict=True)]
    inside = [slice(f, e) for f, e in zip(first, last, strict=True)]
    outside = [slice(f + p, e + p) for f, e, p in zip(first, last, padding, strict=True)]
    return (..., *inside), (..., *outside)


def _shaped(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a stand-in, with one element of memory, for an operand whose values do not matter."""
    return like.new_empty(1).expand(shape)


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Returns the tensor, copied if it has other strides."""
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def suggests_channels_last(tensor: Tensor) -> bool:
    """Tells whether PyTorch reads a tensor's strides as channels_last_3d: channels fastest, then w, h, d, n."""
    shape, strides = tensor.shape, tensor.stride()
    if strides[1] == 0:
        return False
    least = 0
    for dim in (1, 4, 3, 2, 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True


def result_strides(shape: tuple[int, ...], *operands: Tensor) -> Strides:
    """Returns the strides that PyTorch chooses: channels-last if an operand is channels-last, else contiguous."""
    if any(suggests_channels_last(operand) for operand in operands):
        return channels_last_strides(shape)
    return contiguous_strides(shape)
