"""Registers the operators of the convolution with PyTorch, and calls them for the rest of the package.

The operators are closed under differentiation: the derivative of each, in reverse and in forward mode, is a
combination of the others, so second derivatives run on the same kernels. A ReLU behind the forward pass is part of
its kernel; the backward pass masks the gradient first.

The package calls the functions at the end of this file. They skip the dispatcher if nothing but autograd could
observe the call, because dispatching through Python costs more than the launch. Under torch.func every call goes
through the dispatcher, which applies one transform after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..planning.geometry import Triple
from . import casting_executor, checks, executor, pytorch_ops, subclasses
from .backend import Backend, current_backend, use_backend
from .casting import autocast_type, cast_operand, casts, fresh, fresh_cast, kept_cast
from .checks import Convolution
from .dispatch import (
    below_autograd,
    device_type,
    in_forward_mode,
    named_call,
    needed_gradients,
    recording,
    runs,
    save_for_forward,
    tangents_of,
    unchanged,
    unchanged_but_cast,
    unobserved,
)
from .problems import DTYPES
from .pytorch_ops import result_strides
from .registration import apply, register, register_derivatives

# ---- choice of the implementation


def why_not_ours(tensor: Tensor, backend: Backend | None = None) -> str | None:
    """Returns why PyTorch's operator runs for this tensor, or None if this library's kernels do.

    `backend` is the current one by default. Tensors of subclasses with rules (DTensor) always go to this library's
    operators, whose rules ask again for the tensor of a rank: PyTorch's operator returns wrong results for DTensors
    whose channels are split.
    """
    if subclasses.ruled(tensor):
        return None
    backend = backend or current_backend()
    if backend == "torch":
        return 'use_backend("torch")'
    if torch._C._is_tracing() and torch.onnx.is_in_onnx_export():
        return "ONNX has PyTorch's operators only"
    if backend == "cuda" and not tensor.is_cuda:
        raise RuntimeError(f'use_backend("cuda") expects CUDA tensors, but got a tensor on {tensor.device}')
    if backend == "emulator" and tensor.device.type != "cpu":
        raise RuntimeError(f'use_backend("emulator") expects CPU tensors, but got a tensor on {tensor.device}')
    if backend == "auto" and not tensor.is_cuda:
        return f"{tensor.device.type} tensors run PyTorch's operator"
    reason = _unsupported(tensor)
    if reason is None:
        return None
    pytorch_ops.leave(reason, backend, stacklevel=4)
    return reason


def _unsupported(tensor: Tensor) -> str | None:
    if tensor.is_nested:
        return "nested tensors are not supported"
    if tensor.dtype not in DTYPES:
        return f"dtype {tensor.dtype} is not one of float32, float16, bfloat16, float64"
    if tensor.is_cuda:
        if torch.version.hip is not None:
            return "this PyTorch is built for ROCm"
        capability = executor.device_of(tensor).capability
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


# ---- implementations by this library's kernels or by PyTorch's operator


def either(name: str) -> Callable[..., Any]:
    """Returns the function of this name of `executor` or of `pytorch_ops`, as its first argument decides.

    The functions are looked up when they are called.
    """

    def run(first: Tensor, *arguments: Any, **options: Any) -> Any:
        ours = why_not_ours(first) is None
        return getattr(executor if ours else pytorch_ops, name)(first, *arguments, **options)

    return run


_forward, _input_grad = either("forward"), either("input_grad")
_weight_grad, _bias_grad = either("weight_grad"), either("bias_grad")


# ---- autograd, with each operator's derivative in terms of the others


def wanted_gradients(ctx: Any) -> executor.Wanted:
    """Returns which gradients of input, weight and bias this backward pass must compute.

    If the weight's gradient is wanted, the bias's gradient is computed too without asking PyTorch: it is little extra
    work, and asking about a leaf that `autograd.grad` names costs 20 us for an exception. Nothing is asked of a layer
    whose input needs no gradient: one of its parameters' gradients is wanted, or nobody would call.
    """
    _, needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    if not needs_input:
        return False, needs_weight, needs_bias
    if not (needs_bias and needs_weight):
        return needed_gradients(ctx)[1:4]
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    weight = runs(nodes[-2])
    return runs(nodes[0]), weight, weight or runs(nodes[-1])


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Adds the terms of a tangent. None is zero."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        alone: bool,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        relu: bool,
    ) -> Tensor:
        if alone:
            result = executor.forward(input, weight, bias, convolution, relu)
        else:
            with below_autograd():
                result = _operator(relu)(input, weight, bias, *convolution)
        # Only tensors that a wanted gradient needs are saved. The result is saved if it is the ReLU's mask.
        mask = result if relu else None
        kept = input if weight.requires_grad else None, weight if input.requires_grad else None
        ctx.save_for_backward(*kept, mask)
        ctx.call = input.shape, weight.shape, convolution, current_backend()
        save_for_forward(ctx, alone, input, weight, mask)
        return result

    @staticmethod
    def jvp(ctx: Any, _: None, dx: Tensor | None, dw: Tensor | None, db: Tensor | None, *__: None) -> Tensor | None:
        input, weight, mask = ctx.saved_tensors
        with tangents_of():
            found = tangent_of(input, weight, dx, dw, db, ctx.call[2])
            return found if found is None or mask is None else torch.ops.aten.threshold_backward(found, mask, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        input, weight, mask = ctx.saved_tensors
        passed = grad if mask is None else torch.ops.aten.threshold_backward(grad, mask.detach(), 0)
        return None, *gradients_of(passed, input, weight, wanted_gradients(ctx), *ctx.call), None, None


class _AutocastForward(torch.autograd.Function):
    """Casts operands to `dtype`. The engine casts the gradients of weight and bias back to the types of the two.

    The input has the type already if it needs a gradient.

    The cast weight is saved, as PyTorch's autocast saves it: the weight may change before the backward pass. Second
    derivatives need the weight itself, which is part of the graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        alone: bool,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        relu: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        needs_input = input.requires_grad
        made = casting_executor.forward(input, weight, bias, convolution, relu, dtype, needs_input)
        if made is not None:
            fresh(weight)
            result, input, cast = made
        else:
            cast, input = fresh_cast(weight, dtype), input.to(dtype)
            result = executor.forward(input, cast, cast_operand(bias, dtype, device_type(input)), convolution, relu)
        kept = input if weight.requires_grad else None, cast if needs_input else None
        ctx.save_for_backward(*kept, result if relu else None)
        ctx.call = input.shape, weight.shape, convolution, current_backend()
        ctx.original = weight, weight._version
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mask = ctx.saved_tensors
        if weight is not None and torch.is_grad_enabled():
            original, version = ctx.original
            if original._version != version:
                raise RuntimeError(
                    "the weight was modified by an inplace operation between the forward pass and a backward pass "
                    f"with create_graph=True: expected version {version}, but got version {original._version}"
                )
            weight = original.to(weight.dtype)
        passed = grad if mask is None else torch.ops.aten.threshold_backward(grad, mask.detach(), 0)
        return None, *gradients_of(passed, input, weight, wanted_gradients(ctx), *ctx.call), None, None, None


def _operator(relu: bool) -> Any:
    return torch.ops.tconv3d.conv_transpose3d_relu.default if relu else torch.ops.tconv3d.conv_transpose3d.default


def tangent_of(
    input: Tensor,
    weight: Tensor,
    dx: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
    convolution: Convolution,
) -> Tensor | None:
    """Returns the tangent of the forward pass. The pass is linear in the input and the weight, and adds the bias."""
    of_input = None if dx is None else _any_conv_transpose3d(dx, weight, convolution)
    of_weight = None if dw is None else _any_conv_transpose3d(input, dw, convolution)
    found = _sum(of_input, of_weight)
    if db is None:
        return found
    if found is not None:
        return found + db[:, None, None, None]
    size = checks.check_channels(weight, convolution).output_size(tuple(input.shape[2:]))
    return db[:, None, None, None].expand(input.shape[0], -1, *size).clone()


def gradients_of(
    grad: Tensor,
    input: Any,  # Tensor, or None if no wanted gradient needs it; likewise `weight`
    weight: Any,
    wanted: executor.Wanted,
    input_shape: torch.Size,
    weight_shape: torch.Size,
    convolution: Convolution,
    backend: Backend,
) -> Sequence[Tensor | None]:
    """Returns the wanted gradients of input, weight and bias.

    One call of the executor computes them together if this library's kernels run, nothing but autograd can change the
    call, and no graph is recorded. An active profiler does not change which kernels run.
    """
    together = any(wanted) and unchanged(grad, input, weight) and not torch.is_grad_enabled()
    if together and why_not_ours(grad, backend) is None:
        if torch._C._autograd._profiler_enabled():
            shown = grad, tuple(input_shape), tuple(weight_shape), tuple(wanted), *convolution
            arguments = grad, input, weight, wanted, input_shape, weight_shape, convolution, backend
            return named_call("conv_transpose3d_backward", executor.backward, shown, *arguments)
        return executor.backward(grad, input, weight, wanted, input_shape, weight_shape, convolution, backend)
    size, kernel = tuple(input_shape[2:]), tuple(weight_shape[2:])
    with use_backend(backend):
        return (
            _gradient(False, grad, weight, size, convolution) if wanted[0] else None,
            _gradient(True, grad, input, kernel, convolution) if wanted[1] else None,
            _any_bias_grad(grad) if wanted[2] else None,
        )


class _Gradient(torch.autograd.Function):
    """Computes the gradient of the input or of the weight. It is linear in dy, and in the other of the two tensors.

    `other` is the weight for the input's gradient and the input for the weight's; `size` is that of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        alone: bool,
        of_weight: bool,
        grad_output: Tensor,
        other: Tensor,
        size: Triple,
        convolution: Convolution,
    ) -> Tensor:
        needs_output, needs_other = grad_output.requires_grad, other.requires_grad
        ctx.save_for_backward(grad_output if needs_other else None, other if needs_output else None)
        ctx.call = of_weight, size, tuple(other.shape[2:]), convolution, current_backend()
        save_for_forward(ctx, alone, grad_output, other)
        if alone:
            return (_weight_grad if of_weight else _input_grad)(grad_output, other, size, convolution)
        with below_autograd():
            return _gradient_operator(of_weight)(grad_output, other, size, *convolution)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, dy: Tensor | None, dother: Tensor | None, *___: None) -> Tensor | None:
        grad_output, other = ctx.saved_tensors
        of_weight, size, _, convolution, _ = ctx.call
        with tangents_of():
            return _sum(
                None if dy is None else _gradient(of_weight, dy, other, size, convolution),
                None if dother is None else _gradient(of_weight, grad_output, dother, size, convolution),
            )

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        grad_output, other = ctx.saved_tensors
        of_weight, _, size, convolution, backend = ctx.call
        _, _, needs_output, needs_other, _, _ = needed_gradients(ctx)
        with use_backend(backend):
            input, weight = (other, grad) if of_weight else (grad, other)
            dy = _any_conv_transpose3d(input, weight, convolution) if needs_output else None
            dother = _gradient(not of_weight, grad_output, grad, size, convolution) if needs_other else None
        return None, None, dy, dother, None, None


def _gradient_operator(of_weight: bool) -> Any:
    operators = torch.ops.tconv3d
    found = operators.conv_transpose3d_weight_grad if of_weight else operators.conv_transpose3d_input_grad
    return found.default


class _BiasGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, alone: bool, grad_output: Tensor) -> Tensor:
        ctx.shape = grad_output.shape
        if alone:
            return _bias_grad(grad_output)
        with below_autograd():
            return torch.ops.tconv3d.conv_transpose3d_bias_grad.default(grad_output)

    @staticmethod
    def jvp(ctx: Any, _: None, dy: Tensor) -> Tensor:
        with tangents_of():
            return _any_bias_grad(dy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad[:, None, None, None].expand(ctx.shape)


# ---- registrations


def fake_forward(input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution) -> Tensor:
    geometry = checks.check_forward(input, weight, bias, convolution)
    shape = (input.shape[0], geometry.out_channels, *geometry.output_size(tuple(input.shape[2:])))
    return input.new_empty_strided(shape, result_strides(shape, input, weight))


def _fake_input_grad(grad_output: Tensor, weight: Tensor, size: Triple, convolution: Convolution) -> Tensor:
    shape = (grad_output.shape[0], weight.shape[0], *size)
    return grad_output.new_empty_strided(shape, result_strides(shape, grad_output, weight))


def _fake_weight_grad(grad_output: Tensor, input: Tensor, kernel: Triple, convolution: Convolution) -> Tensor:
    return input.new_empty((input.shape[1], grad_output.shape[1] // convolution[3], *kernel))


def _fake_bias_grad(grad_output: Tensor) -> Tensor:
    return grad_output.new_empty((grad_output.shape[1],))


def _record_forward(*arguments: Any, relu: bool) -> Any:
    return apply(_Forward, False, *arguments, relu)


def _record_gradient(*arguments: Any, of_weight: bool) -> Any:
    return apply(_Gradient, False, of_weight, *arguments)


register("conv_transpose3d", _forward, fake_forward)
register("conv_transpose3d_relu", partial(_forward, relu=True), fake_forward)
register("conv_transpose3d_input_grad", _input_grad, _fake_input_grad)
register("conv_transpose3d_weight_grad", _weight_grad, _fake_weight_grad)
register("conv_transpose3d_bias_grad", _bias_grad, _fake_bias_grad)
register_derivatives("conv_transpose3d", partial(_record_forward, relu=False))
register_derivatives("conv_transpose3d_relu", partial(_record_forward, relu=True))
register_derivatives("conv_transpose3d_input_grad", partial(_record_gradient, of_weight=False))
register_derivatives("conv_transpose3d_weight_grad", partial(_record_gradient, of_weight=True))
register_derivatives("conv_transpose3d_bias_grad", partial(apply, _BiasGrad, False))


# ---- entry points


# `apply` of the C++ base class skips the Python code for torch.func in `Function.apply`, which takes 5 us per call.
# Calls under torch.func never get here: `unchanged` excludes them.
_apply_forward = super(torch.autograd.Function, _Forward).apply
_apply_autocast_forward = super(torch.autograd.Function, _AutocastForward).apply


def conv_transpose3d(
    input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution, relu: bool = False
) -> Tensor:
    """Runs the operator for tensors that this library's kernels take (see `why_not_ours`)."""
    if unchanged_but_cast(input, weight, bias):
        watched = torch._C._autograd._profiler_enabled()
        dtype = autocast_type(device_type(input))
        if dtype is not None:
            if not watched and input.dtype is not torch.float64 and not in_forward_mode():
                return _cast_and_run(input, weight, bias, convolution, relu, dtype)
        elif not recording(input, weight, bias):
            if watched:
                shown = input, weight, bias, *convolution
                name = "conv_transpose3d_relu" if relu else "conv_transpose3d"
                return named_call(name, executor.forward, shown, input, weight, bias, convolution, relu, True)
            return executor.forward(input, weight, bias, convolution, relu, True)
        elif not watched:
            return _apply_forward(True, input, weight, bias, convolution, relu)
    result: Tensor = _operator(relu)(input, weight, bias, *convolution)
    return result


def _cast_and_run(
    input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution, relu: bool, dtype: torch.dtype
) -> Tensor:
    """Runs the operator under autocast without the dispatcher, which costs more than the casts."""
    where, records = device_type(input), recording(input, weight, bias)
    if input.dtype is not dtype and not (records and casts(weight, dtype, where) and not input.requires_grad):
        input = input.to(dtype)
    if not records:
        if casts(weight, dtype, where):
            weight = kept_cast(weight, dtype)
        if bias is not None and casts(bias, dtype, where):
            bias = kept_cast(bias, dtype)
        return executor.forward(input, weight, bias, convolution, relu, True)
    if casts(weight, dtype, where):
        return _apply_autocast_forward(True, input, weight, bias, convolution, relu, dtype)
    return _apply_forward(True, input, weight, cast_operand(bias, dtype, where), convolution, relu)


def _any_conv_transpose3d(input: Tensor, weight: Tensor, convolution: Convolution) -> Tensor:
    """Runs the forward pass for second derivatives, on the backend of the original call."""
    if torch.compiler.is_compiling() or why_not_ours(input) is None:
        return conv_transpose3d(input, weight, None, convolution)
    stride, padding, output_padding, groups, dilation = convolution
    return torch.conv_transpose3d(input, weight, None, stride, padding, output_padding, groups, dilation)


def _gradient(of_weight: bool, grad_output: Tensor, other: Tensor, size: Triple, convolution: Convolution) -> Tensor:
    """Returns the gradient of the weight or of the input (see `_Gradient`)."""
    if not unobserved(grad_output, other):
        result: Tensor = _gradient_operator(of_weight)(grad_output, other, size, *convolution)
        return result
    if recording(grad_output, other):
        return _Gradient.apply(True, of_weight, grad_output, other, size, convolution)
    return (_weight_grad if of_weight else _input_grad)(grad_output, other, size, convolution)


def _any_bias_grad(grad_output: Tensor) -> Tensor:
    if not unobserved(grad_output, None):
        return torch.ops.tconv3d.conv_transpose3d_bias_grad.default(grad_output)
    if recording(grad_output):
        return _BiasGrad.apply(True, grad_output)
    return _bias_grad(grad_output)
