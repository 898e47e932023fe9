"""Registers the operators with PyTorch: CPU, CUDA, fake, autograd and autocast implementations.

The four operators are closed under differentiation: the derivative of each, in reverse and in forward mode, is a
combination of the others, so second derivatives run on the same kernels.

The package calls the functions at the end of this file. They skip the dispatcher if nothing but autograd could
observe the call, because dispatching through Python costs more than the launch. Under torch.func every call goes
through the dispatcher, which applies one transform after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..planning.geometry import Triple
from . import checks, executor, operators, pytorch_ops, subclasses
from .backend import Backend, current_backend, use_backend
from .checks import Convolution
from .problems import DTYPES
from .pytorch_ops import result_strides

LIBRARY = operators.library()


def settings_of(settings: tuple[Any, ...]) -> Convolution:
    stride, padding, output_padding, groups, dilation = settings
    return (tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation))


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


def in_forward_mode() -> bool:
    """Tells whether tensors may carry tangents (forward-mode AD), which only an `autograd.Function` can pass on."""
    return forward_ad._current_level >= 0


def dispatched_in_forward_mode() -> bool:
    """Tells whether tensors of a call that came through the dispatcher may carry tangents.

    PyTorch's compiler replays `torch.func.jvp` without `forward_ad`'s counter of levels.
    """
    if in_forward_mode():
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    return torch._C._functorch.peek_interpreter_stack().key() == torch._C._functorch.TransformType.Jvp


# ---- implementations by this library's kernels or by PyTorch's operator


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution) -> Tensor:
    if why_not_ours(input) is None:
        return executor.forward(input, weight, bias, convolution)
    return pytorch_ops.forward(input, weight, bias, convolution)


def _input_grad(grad_output: Tensor, weight: Tensor, input_size: Triple, convolution: Convolution) -> Tensor:
    if why_not_ours(grad_output) is None:
        return executor.input_grad(grad_output, weight, input_size, convolution)
    return pytorch_ops.input_grad(grad_output, weight, input_size, convolution)


def _weight_grad(grad_output: Tensor, input: Tensor, kernel: Triple, convolution: Convolution) -> Tensor:
    if why_not_ours(grad_output) is None:
        return executor.weight_grad(grad_output, input, kernel, convolution)
    return pytorch_ops.weight_grad(grad_output, input, kernel, convolution)


def _bias_grad(grad_output: Tensor) -> Tensor:
    if why_not_ours(grad_output) is None:
        return executor.bias_grad(grad_output)
    return pytorch_ops.bias_grad(grad_output)


# ---- autograd, with each operator's derivative in terms of the others


def needed_gradients(ctx: Any) -> tuple[bool, ...]:
    """Returns which gradients this backward pass must compute: `autograd.grad` may want only some of them."""
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if sum(needs) < 2:
        return needs
    # One node belongs to each argument that requires a gradient.
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple([need and _runs(next(nodes)) for need in needs])


def wanted_gradients(ctx: Any) -> executor.Wanted:
    """Returns which gradients of input, weight and bias this backward pass must compute.

    If the weight's gradient is wanted, the bias's gradient is computed too without asking PyTorch: it is little extra
    work, and asking about a leaf that `autograd.grad` names costs 20 us for an exception.
    """
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
    if not (needs_bias and needs_weight):
        return needed_gradients(ctx)[1:4]
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    weight = _runs(nodes[-2])
    return needs_input and _runs(nodes[0]), weight, weight or _runs(nodes[-1])


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # PyTorch raises for a leaf that `autograd.grad` names, whose gradient is wanted
        return True


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Lets `Function.forward` call its operator below autograd.

    `Function.apply` has switched differentiation off. Under torch.func the operator's call goes on to an outer
    transform, which may have to differentiate it, so differentiation is switched on again.
    """
    with torch._C._AutoDispatchBelowAutograd():
        if not torch._C._are_functorch_transforms_active():
            yield
            return
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            yield


def tangents_of() -> contextlib.AbstractContextManager[None]:
    """Lets `jvp` compute a tangent: under torch.func for outer transforms alone, which may differentiate it again."""
    return below_autograd() if torch._C._are_functorch_transforms_active() else contextlib.nullcontext()


def _apply(function: Any, *arguments: Any) -> Any:
    """Records a call that came through the dispatcher, which has taken care of all other levels of torch.func."""
    allowed = torch._C._functorch.get_single_level_autograd_function_allowed()
    torch._C._functorch.set_single_level_autograd_function_allowed(True)
    try:
        return super(torch.autograd.Function, function).apply(False, *arguments)
    finally:
        torch._C._functorch.set_single_level_autograd_function_allowed(allowed)


def save_for_forward(ctx: Any, alone: bool, *tensors: Tensor) -> None:
    """Keeps tensors until `jvp` has run. A missing tangent, or gradient, is then None instead of zeros."""
    if in_forward_mode() or (not alone and dispatched_in_forward_mode()):
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Adds the terms of a tangent. None is zero."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, alone: bool, input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution
    ) -> Tensor:
        # Only tensors that a wanted gradient needs are saved.
        ctx.save_for_backward(input if weight.requires_grad else None, weight if input.requires_grad else None)
        ctx.call = input.shape, weight.shape, convolution, current_backend()
        save_for_forward(ctx, alone, input, weight)
        if alone:
            return executor.forward(input, weight, bias, convolution)
        with below_autograd():
            return torch.ops.tconv3d.conv_transpose3d.default(input, weight, bias, *convolution)

    @staticmethod
    def jvp(ctx: Any, _: None, dx: Tensor | None, dw: Tensor | None, db: Tensor | None, __: None) -> Tensor | None:
        input, weight = ctx.saved_tensors
        with tangents_of():
            return tangent_of(input, weight, dx, dw, db, ctx.call[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        input, weight = ctx.saved_tensors
        return None, *gradients_of(grad, input, weight, wanted_gradients(ctx), *ctx.call), None


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
    size, kernel = tuple(input_shape[2:]), tuple(weight_shape[2:])
    together = any(wanted) and unchanged(grad, input, weight) and not torch.is_grad_enabled()
    if together and why_not_ours(grad, backend) is None:
        if torch._C._autograd._profiler_enabled():
            shown = grad, tuple(input_shape), tuple(weight_shape), tuple(wanted), *convolution
            arguments = grad, input, weight, wanted, size, kernel, convolution, backend
            return named_call("conv_transpose3d_backward", executor.backward, shown, *arguments)
        return executor.backward(grad, input, weight, wanted, size, kernel, convolution, backend)
    with use_backend(backend):
        return (
            conv_transpose3d_input_grad(grad, weight, size, convolution) if wanted[0] else None,
            conv_transpose3d_weight_grad(grad, input, kernel, convolution) if wanted[1] else None,
            conv_transpose3d_bias_grad(grad) if wanted[2] else None,
        )


class _InputGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        alone: bool,
        grad_output: Tensor,
        weight: Tensor,
        input_size: Triple,
        convolution: Convolution,
    ) -> Tensor:
        needs_output, needs_weight = grad_output.requires_grad, weight.requires_grad
        ctx.save_for_backward(grad_output if needs_weight else None, weight if needs_output else None)
        ctx.call = tuple(weight.shape[2:]), convolution, current_backend()
        ctx.input_size = input_size
        save_for_forward(ctx, alone, grad_output, weight)
        if alone:
            return _input_grad(grad_output, weight, input_size, convolution)
        with below_autograd():
            return torch.ops.tconv3d.conv_transpose3d_input_grad.default(
                grad_output, weight, input_size, *convolution
            )

    @staticmethod
    def jvp(ctx: Any, _: None, dy: Tensor | None, dw: Tensor | None, *__: None) -> Tensor | None:
        grad_output, weight = ctx.saved_tensors
        settings = ctx.input_size, ctx.call[1]
        with tangents_of():
            return _sum(
                None if dy is None else conv_transpose3d_input_grad(dy, weight, *settings),
                None if dw is None else conv_transpose3d_input_grad(grad_output, dw, *settings),
            )

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        grad_output, weight = ctx.saved_tensors
        kernel, convolution, backend = ctx.call
        _, needs_output, needs_weight, _, _ = needed_gradients(ctx)
        with use_backend(backend):
            dy = _any_conv_transpose3d(grad, weight, convolution) if needs_output else None
            dw = conv_transpose3d_weight_grad(grad_output, grad, kernel, convolution) if needs_weight else None
        return None, dy, dw, None, None


class _WeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, alone: bool, grad_output: Tensor, input: Tensor, kernel: Triple, convolution: Convolution
    ) -> Tensor:
        needs_output, needs_input = grad_output.requires_grad, input.requires_grad
        ctx.save_for_backward(grad_output if needs_input else None, input if needs_output else None)
        ctx.call = tuple(input.shape[2:]), convolution, current_backend()
        ctx.kernel = kernel
        save_for_forward(ctx, alone, grad_output, input)
        if alone:
            return _weight_grad(grad_output, input, kernel, convolution)
        with below_autograd():
            return torch.ops.tconv3d.conv_transpose3d_weight_grad.default(grad_output, input, kernel, *convolution)

    @staticmethod
    def jvp(ctx: Any, _: None, dy: Tensor | None, dx: Tensor | None, *__: None) -> Tensor | None:
        grad_output, input = ctx.saved_tensors
        settings = ctx.kernel, ctx.call[1]
        with tangents_of():
            return _sum(
                None if dy is None else conv_transpose3d_weight_grad(dy, input, *settings),
                None if dx is None else conv_transpose3d_weight_grad(grad_output, dx, *settings),
            )

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        grad_output, input = ctx.saved_tensors
        size, convolution, backend = ctx.call
        _, needs_output, needs_input, _, _ = needed_gradients(ctx)
        with use_backend(backend):
            dy = _any_conv_transpose3d(input, grad, convolution) if needs_output else None
            dx = conv_transpose3d_input_grad(grad_output, grad, size, convolution) if needs_input else None
        return None, dy, dx, None, None


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
            return conv_transpose3d_bias_grad(dy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad[:, None, None, None].expand(ctx.shape)


# ---- registrations


def register(name: str, implementation: Any, function: Any, fake: Any, tensors: int, extra: int) -> None:
    """Registers one operator, which takes `tensors` tensors, `extra` further arguments and then the settings."""
    overload = getattr(torch.ops.tconv3d, name).default

    def split(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        own, settings = arguments[: tensors + extra], arguments[tensors + extra :]
        own = tuple(tuple(a) if isinstance(a, list) else a for a in own)
        return (*own, settings_of(settings)) if settings else own

    def device(*arguments: Any) -> Tensor:
        result: Tensor = implementation(*split(arguments))
        return result

    def autograd(*arguments: Any) -> Tensor:
        subclasses.load()
        wanted = any(a is not None and a.requires_grad for a in arguments[:tensors])
        if (wanted and torch.is_grad_enabled()) or dispatched_in_forward_mode():
            return subclasses.recorded(_apply(function, *split(arguments)))
        with torch._C._AutoDispatchBelowAutograd():
            below: Tensor = overload(*arguments)
            return below

    def autocast(device_type: str) -> Any:
        def cast(*arguments: Any) -> Tensor:
            dtype = torch.get_autocast_dtype(device_type)
            key = getattr(torch._C.DispatchKey, "AutocastCUDA" if device_type == "cuda" else "AutocastCPU")
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                casted: Tensor = overload(
                    *(cast_operand(a, dtype, device_type) for a in arguments[:tensors]), *arguments[tensors:]
                )
                return casted

        return cast

    LIBRARY.impl(name, device, "CPU")
    LIBRARY.impl(name, device, "CUDA")
    LIBRARY.impl(name, autograd, "Autograd")
    LIBRARY.impl(name, autocast("cuda"), "AutocastCUDA")
    LIBRARY.impl(name, autocast("cpu"), "AutocastCPU")
    torch.library.register_fake(f"tconv3d::{name}", lambda *a: fake(*split(a)), lib=LIBRARY)


def cast_operand(tensor: Tensor | None, dtype: torch.dtype, device_type: str) -> Tensor | None:
    """Casts an operand as PyTorch's autocast does for convolutions: not float64, nor tensors of another device."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype) if tensor.device.type == device_type else tensor


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


register("conv_transpose3d", _forward, _Forward, fake_forward, tensors=3, extra=0)
register("conv_transpose3d_input_grad", _input_grad, _InputGrad, _fake_input_grad, tensors=2, extra=1)
register("conv_transpose3d_weight_grad", _weight_grad, _WeightGrad, _fake_weight_grad, tensors=2, extra=1)
register("conv_transpose3d_bias_grad", _bias_grad, _BiasGrad, _fake_bias_grad, tensors=1, extra=0)


# ---- entry points


_PLAIN = (Tensor, torch.nn.Parameter)
_has_storage = torch._C._has_storage


def is_plain(tensor: Tensor) -> bool:
    """Tells whether a tensor's memory holds its elements, so that kernels can read it without the dispatcher.

    The dispatcher handles tensors without storage (sparse, mkldnn, batched by vmap), with the negative bit, and zero
    tensors without memory.
    """
    return type(tensor) in _PLAIN and _has_storage(tensor) and not tensor.is_neg() and not tensor._is_zerotensor()


def unobserved(first: Tensor, second: Tensor | None, third: Tensor | None = None) -> bool:
    """Tells whether nothing but autograd could observe a call, so that the dispatcher can be skipped."""
    return unchanged(first, second, third) and not torch._C._autograd._profiler_enabled()


def unchanged(first: Tensor, second: Tensor | None, third: Tensor | None = None) -> bool:
    """Tells whether nothing but autograd could change what a call does. A profiler may observe the call."""
    return (
        not torch.compiler.is_compiling()
        and is_plain(first)
        and (second is None or is_plain(second))
        and (third is None or is_plain(third))
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled("cuda" if first.is_cuda else "cpu")
    )


def _recording(first: Tensor, second: Tensor, third: Tensor | None = None) -> bool:
    wanted = first.requires_grad or second.requires_grad or (third is not None and third.requires_grad)
    return (wanted and torch.is_grad_enabled()) or in_forward_mode()


# `apply` of the C++ base class skips the Python code for torch.func in `Function.apply`, which takes 5 us per call.
# Calls under torch.func never get here: `unchanged` excludes them.
_record_forward = super(torch.autograd.Function, _Forward).apply


def conv_transpose3d(input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution) -> Tensor:
    """Runs the operator for tensors that this library's kernels take (see `why_not_ours`)."""
    if unchanged(input, weight, bias):
        watched = torch._C._autograd._profiler_enabled()
        if not _recording(input, weight, bias):
            if watched:
                arguments = input, weight, bias, convolution, False, True
                shown = input, weight, bias, *convolution
                return named_call("conv_transpose3d", executor.forward, shown, *arguments)
            return executor.forward(input, weight, bias, convolution, False, True)
        if not watched:
            return _record_forward(True, input, weight, bias, convolution)
    return torch.ops.tconv3d.conv_transpose3d.default(input, weight, bias, *convolution)


def named_call(name: str, function: Callable[..., Any], shown: Sequence[Any], *arguments: Any) -> Any:
    """Calls a function without the dispatcher. A profiler sees it by the operator's name and arguments (`shown`)."""
    values = [list(value) if isinstance(value, tuple) else value for value in shown]  # the profiler shows no tuples
    with torch._C._profiler._RecordFunctionFast(f"tconv3d::{name}", values):
        return function(*arguments)


def _any_conv_transpose3d(input: Tensor, weight: Tensor, convolution: Convolution) -> Tensor:
    """Runs the forward pass for second derivatives, on the backend of the original call."""
    if torch.compiler.is_compiling() or why_not_ours(input) is None:
        return conv_transpose3d(input, weight, None, convolution)
    stride, padding, output_padding, groups, dilation = convolution
    return torch.conv_transpose3d(input, weight, None, stride, padding, output_padding, groups, dilation)


def conv_transpose3d_input_grad(
    grad_output: Tensor, weight: Tensor, input_size: Triple, convolution: Convolution
) -> Tensor:
    if not unobserved(grad_output, weight):
        return torch.ops.tconv3d.conv_transpose3d_input_grad.default(grad_output, weight, input_size, *convolution)
    if _recording(grad_output, weight):
        return _InputGrad.apply(True, grad_output, weight, input_size, convolution)
    return _input_grad(grad_output, weight, input_size, convolution)


def conv_transpose3d_weight_grad(
    grad_output: Tensor, input: Tensor, kernel: Triple, convolution: Convolution
) -> Tensor:
    if not unobserved(grad_output, input):
        return torch.ops.tconv3d.conv_transpose3d_weight_grad.default(grad_output, input, kernel, *convolution)
    if _recording(grad_output, input):
        return _WeightGrad.apply(True, grad_output, input, kernel, convolution)
    return _weight_grad(grad_output, input, kernel, convolution)


def conv_transpose3d_bias_grad(grad_output: Tensor) -> Tensor:
    if not unobserved(grad_output, None):
        return torch.ops.tconv3d.conv_transpose3d_bias_grad.default(grad_output)
    if _recording(grad_output, grad_output):
        return _BiasGrad.apply(True, grad_output)
    return _bias_grad(grad_output)
