"""Registers the fused operators with PyTorch: the convolution with ReLU and GroupNorm, and its steps.

`conv_transpose3d_relu_group_norm` has two steps: the convolution with ReLU and statistics, then normalizing. If no
gradient is recorded, the second step works in place. Otherwise each step is a node of autograd's graph, so that the
tensors saved by the second step are freed before the first step computes gradients.

Second derivatives of the norm use PyTorch's formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..families.norm.planner import Wanted
from . import batching, executor, flops, norm_executor, pytorch_ops
from .backend import current_backend, use_backend
from .casting import cast_operand
from .checks import Convolution, number
from .dispatch import (
    below_autograd,
    in_forward_mode,
    is_plain,
    named_call,
    needed_gradients,
    recording,
    unchanged,
    unobserved,
)
from .ops import conv_transpose3d, either, fake_forward, gradients_of, why_not_ours
from .pytorch_ops import statistics_dtype
from .registration import LIBRARY, register, register_derivatives

Wants = tuple[bool, bool, bool]  # which gradients of the norm are wanted, with the fields of `Wanted` in order


class Block(NamedTuple):
    """The arguments of the convolution with ReLU and GroupNorm."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    groups: int
    eps: float
    dtype: torch.dtype  # type of the result
    convolution: Convolution


# ---- ReLU and GroupNorm by this library's kernels or by PyTorch's operators


_statistics = either("forward_with_statistics")


def _normalize(
    input: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if why_not_ours(input) is None:
        return norm_executor.normalize(input, statistics, weight, bias, None, dtype)
    return pytorch_ops.normalize(input, statistics, weight, bias, dtype)


def _gradient(
    grad: Tensor,
    input: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    parameters: torch.dtype,
    wanted: Wants,
) -> tuple[Tensor, Tensor, Tensor]:
    if why_not_ours(input) is None:
        return norm_executor.gradient(grad, input, statistics, weight, parameters, Wanted(*wanted))
    return pytorch_ops.norm_gradient(grad, input, statistics, weight, parameters, wanted)


def _block(*arguments: Any) -> Tensor:
    """Runs the whole block without recording gradients."""
    call = Block(*arguments)
    if why_not_ours(call.input) is None:
        return _ours(call)
    result, statistics = _statistics(call.input, call.weight, call.bias, call.groups, call.eps, call.convolution)
    return _normalize(result, statistics, call.norm_weight, call.norm_bias, call.dtype)


def _ours(call: Block, keep: bool = False) -> Tensor:
    """Runs the block on this library's kernels without gradients, normalizing in place if the types allow it."""
    result, statistics = executor.forward_with_statistics(
        call.input, call.weight, call.bias, call.groups, call.eps, call.convolution, keep
    )
    out = result if result.dtype is call.dtype else None
    return norm_executor.normalize(result, statistics, call.norm_weight, call.norm_bias, out, call.dtype)


# ---- autograd, with one node for each step


class _Statistics(torch.autograd.Function):
    """Computes the convolution, its ReLU and the statistics.

    In the backward pass `_Normalize` has already applied the ReLU's mask, so the incoming gradient is that of the
    ReLU's input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        alone: bool,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: int,
        eps: float,
        convolution: Convolution,
    ) -> tuple[Tensor, Tensor]:
        # Only tensors that a wanted gradient needs are saved.
        ctx.save_for_backward(input if weight.requires_grad else None, weight if input.requires_grad else None)
        ctx.call = input.shape, weight.shape, convolution, current_backend()
        if alone:
            found = executor.forward_with_statistics(input, weight, bias, groups, eps, convolution)
        else:
            with below_autograd():
                found = torch.ops.tconv3d.conv_transpose3d_relu_statistics.default(
                    input, weight, bias, groups, eps, *convolution
                )
        ctx.mark_non_differentiable(found[1])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_statistics: None) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if grad is None:
            return (None,) * 7
        wanted = (*needed_gradients(ctx)[1:3], False)  # the gradient of the bias comes from `_Normalize`
        return None, *gradients_of(grad, input, weight, wanted, *ctx.call), None, None, None


class _Normalize(torch.autograd.Function):
    """Computes the GroupNorm of a ReLU's result.

    `bias` is the convolution's bias, added before the ReLU. The gradient of `bias` is the sum over a tensor that the
    backward pass of this node writes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        alone: bool,
        input: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(input, statistics, weight)
        # Biases are not saved by `save_for_backward`: first-order gradients do not depend on their values, which may
        # therefore change before the backward pass, as in PyTorch.
        ctx.biases = norm_bias, bias
        ctx.call = eps, current_backend()
        if alone:
            return norm_executor.normalize(input, statistics, weight, norm_bias, None, dtype)
        with below_autograd():
            result: Tensor = torch.ops.tconv3d.normalize.default(input, statistics, weight, norm_bias, dtype)
            return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, statistics, weight = ctx.saved_tensors
        norm_bias, bias = ctx.biases
        eps, backend = ctx.call
        _, needs_input, _, needs_weight, needs_norm_bias, needs_bias, _, _ = needed_gradients(ctx)
        if torch.is_grad_enabled():
            tensors = (input, needs_input), (weight, needs_weight), (norm_bias, needs_norm_bias), (bias, needs_bias)
            found = _differentiable_gradient(grad, statistics.shape[2], eps, *tensors)
            return None, found[0], None, *found[1:], None, None
        parameters = next(t for t in (weight, norm_bias, input) if t is not None).dtype
        wanted = needs_input, needs_weight or needs_norm_bias, needs_bias
        with use_backend(backend):
            dz, dparameters, db = _any_gradient(grad, input, statistics, weight, parameters, wanted)
        return (
            None,
            dz if needs_input else None,
            None,
            _row(dparameters, 0) if needs_weight else None,
            _row(dparameters, 1) if needs_norm_bias else None,
            db if needs_bias else None,
            None,
            None,
        )


def _row(pair: Tensor, index: int) -> Tensor:
    """Returns a row of a matrix, by a slice for tensor subclasses: PyTorch 2.9 cannot index a DTensor twice."""
    return pair[index] if type(pair) is Tensor else pair[index : index + 1].flatten()


def _any_gradient(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad, input, _, weight = arguments[:4]
    if not unobserved(grad, input, weight):
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.tconv3d.relu_group_norm_grad.default(*arguments)
        return found
    return _gradient(*arguments)


Asked = tuple[Tensor | None, bool]  # a tensor, and whether the gradient of the tensor is needed


def _differentiable_gradient(
    grad: Tensor, groups: int, eps: float, of_input: Asked, of_weight: Asked, of_norm_bias: Asked, of_bias: Asked
) -> list[Tensor | None]:
    """Computes what `_gradient` does, by operators that can be differentiated again."""
    input, weight, norm_bias, bias = (asked[0] for asked in (of_input, of_weight, of_norm_bias, of_bias))
    assert input is not None
    # `bias - bias.detach()` is zero but links the bias to the graph: gradients of any order pass the ReLU's mask and
    # reach the bias.
    source = input if bias is None else input + (bias - bias.detach())[:, None, None, None]
    kind = grad.dtype  # widened to the type of the parameters, which may be float32 after a convolution in 16 bits
    for tensor in (weight, norm_bias):
        kind = kind if tensor is None else torch.promote_types(kind, tensor.dtype)
    masked = (source * (input.detach() > 0)).to(kind)
    parameters = [None if tensor is None else tensor.to(kind) for tensor in (weight, norm_bias)]
    result = F.group_norm(masked, groups, parameters[0], parameters[1], eps).to(grad.dtype)
    asked = of_input, of_weight, of_norm_bias, of_bias
    leaves = [tensor for tensor, needed in asked if needed and tensor is not None]
    grads = iter(torch.autograd.grad(result, leaves, grad, create_graph=True))
    return [next(grads) if needed else None for _, needed in asked]


# ---- registrations of the block and its steps


def _fake_statistics(
    input: Tensor, weight: Tensor, bias: Tensor | None, groups: int, eps: float, convolution: Convolution
) -> tuple[Tensor, Tensor]:
    shape = (2, input.shape[0], groups)
    return fake_forward(input, weight, bias, convolution), input.new_empty(shape, dtype=statistics_dtype(input.dtype))


def _fake_normalize(
    input: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return input.new_empty_strided(input.shape, input.stride(), dtype=dtype)


def _fake_gradient(
    grad: Tensor,
    input: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    parameters: torch.dtype,
    wanted: Wants,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = input.shape[1]
    return (
        input.new_empty_strided(input.shape, input.stride()) if wanted[0] or wanted[2] else input.new_empty(0),
        input.new_empty((2, channels) if wanted[1] else (0,), dtype=parameters),
        input.new_empty((channels,) if wanted[2] else (0,)),
    )


def _fake_block(*arguments: Any) -> Tensor:
    call = Block(*arguments)
    return fake_forward(call.input, call.weight, call.bias, call.convolution).to(call.dtype)


def _cast_block(arguments: tuple[Any, ...], device_type: str) -> list[Any]:
    """Casts as PyTorch's autocast does for the layers: the norm runs in float32 on CUDA, uncast on the CPU."""
    lower = torch.get_autocast_dtype(device_type)
    operands = [cast_operand(a, lower, device_type) for a in arguments[:3]]
    norm, dtype = list(arguments[3:5]), operands[0].dtype  # type: ignore[union-attr]
    if device_type == "cuda":
        norm = [cast_operand(a, torch.float32, device_type) for a in norm]
        dtype = torch.promote_types(dtype, torch.float32)
    return [*operands, *norm, *arguments[5:7], dtype, *arguments[8:]]


def _record_block(alone: bool, call: Block) -> Tensor:
    if in_forward_mode() or torch._C._are_functorch_transforms_active():
        # The steps have derivatives of the first order in reverse alone. PyTorch's GroupNorm has all others.
        result = conv_transpose3d(call.input, call.weight, call.bias, call.convolution, relu=True)
        return F.group_norm(result.to(call.dtype), call.groups, call.norm_weight, call.norm_bias, call.eps)
    constant = None if call.bias is None else call.bias.detach()  # the bias's gradient comes from the second step
    steps = (_apply_statistics, _apply_normalize) if alone else (_Statistics.apply, _Normalize.apply)
    result, statistics = steps[0](alone, call.input, call.weight, constant, call.groups, call.eps, call.convolution)
    return steps[1](alone, result, statistics, call.norm_weight, call.norm_bias, call.bias, call.eps, call.dtype)


# The steps run below autograd or in a backward pass, so that they have no derivatives.
register("conv_transpose3d_relu_statistics", _statistics, _fake_statistics)
register("normalize", _normalize, _fake_normalize)
register("relu_group_norm_grad", _gradient, _fake_gradient)
register("conv_transpose3d_relu_group_norm", _block, _fake_block)
register_derivatives(
    "conv_transpose3d_relu_group_norm", lambda *arguments: _record_block(False, Block(*arguments)), _cast_block
)
batching.register(LIBRARY)
flops.register()


# ---- entry point

# `apply` of the C++ base class skips the Python code for torch.func in `Function.apply`, which takes 5 us per call.
# Calls under torch.func never get here: `unchanged` excludes them.
_apply_statistics = super(torch.autograd.Function, _Statistics).apply
_apply_normalize = super(torch.autograd.Function, _Normalize).apply


def conv_transpose3d_relu_group_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    groups: int,
    eps: float,
    convolution: Convolution,
) -> Tensor:
    """Runs the operator for tensors that this library's kernels take (see `ops.why_not_ours`)."""
    operands = input, weight, bias, norm_weight, norm_bias
    settings = groups, number(eps, "eps"), input.dtype
    if unchanged(input, weight, bias) and all(each is None or is_plain(each) for each in operands[3:]):
        call = Block(*operands, *settings, convolution)
        watched = torch._C._autograd._profiler_enabled()
        if not recording(*operands):
            if watched:
                shown = *operands, groups, eps, None, *convolution
                return named_call("conv_transpose3d_relu_group_norm", _ours, shown, call, True)
            return _ours(call, True)
        if not watched:
            return _record_block(True, call)
    return torch.ops.tconv3d.conv_transpose3d_relu_group_norm.default(*operands, *settings, *convolution)
