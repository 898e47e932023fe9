"""Tells who but the caller can see or change a call, and thus whether PyTorch's dispatcher can be skipped.

Dispatching through Python costs more than a launch. Autograd, torch.func, forward mode, autocast, compilers, tracers
and profilers each have a way of being noticed, and all of them are asked here. This module knows no operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

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
    return unchanged_but_cast(first, second, third) and not torch.is_autocast_enabled(device_type(first))


def unchanged_but_cast(first: Tensor, second: Tensor | None, third: Tensor | None = None) -> bool:
    """Tells whether nothing but autograd and autocast could change what a call does."""
    return (
        not torch.compiler.is_compiling()
        and is_plain(first)
        and (second is None or is_plain(second))
        and (third is None or is_plain(third))
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def device_type(tensor: Tensor) -> str:
    """Returns autocast's name of a tensor's device, without the object that `tensor.device` makes."""
    return "cuda" if tensor.is_cuda else "cpu"


def recording(*tensors: Tensor | None) -> bool:
    """Tells whether a call on these tensors must be recorded for derivatives."""
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return torch.is_grad_enabled() or in_forward_mode()
    return in_forward_mode()


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


def named_call(name: str, function: Callable[..., Any], shown: Sequence[Any], *arguments: Any) -> Any:
    """Calls a function without the dispatcher. A profiler sees it by the operator's name and arguments (`shown`)."""
    values = [list(value) if isinstance(value, tuple) else value for value in shown]  # the profiler shows no tuples
    with torch._C._profiler._RecordFunctionFast(f"tconv3d::{name}", values):
        return function(*arguments)


# ---- inside a node of autograd's graph


def needed_gradients(ctx: Any) -> tuple[bool, ...]:
    """Returns which gradients this backward pass must compute: `autograd.grad` may want only some of them."""
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if sum(needs) < 2:
        return needs
    # One node belongs to each argument that requires a gradient.
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple([need and runs(next(nodes)) for need in needs])


def runs(node: Any) -> bool:
    """Tells whether this backward pass runs a node of the graph."""
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


_USUAL = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def as_if_called_first() -> contextlib.AbstractContextManager[object]:
    """Lets the implementation of an operator trace and differentiate what it calls.

    PyTorch has switched off autograd and other layers of its dispatcher for what the implementation calls. Autocast
    is off inside, too, and can be switched on.
    """
    guard: contextlib.AbstractContextManager[object] = torch._C._ForceDispatchKeyGuard(*_USUAL)
    return guard


def tangents_of() -> contextlib.AbstractContextManager[None]:
    """Lets `jvp` compute a tangent: under torch.func for outer transforms alone, which may differentiate it again."""
    return below_autograd() if torch._C._are_functorch_transforms_active() else contextlib.nullcontext()


def save_for_forward(ctx: Any, alone: bool, *tensors: Tensor | None) -> None:
    """Keeps tensors until `jvp` has run. A missing tangent, or gradient, is then None instead of zeros."""
    if in_forward_mode() or (not alone and dispatched_in_forward_mode()):
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
