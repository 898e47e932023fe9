"""Registers an operator's implementations with PyTorch: CPU, CUDA, fake, autograd and autocast.

An operator's schema (`operators.py`) says how many tensors come first and whether the settings of a convolution come
last. Implementations get the settings as one tuple (`Convolution`). This module knows no operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import operators, subclasses
from .casting import cast_operand
from .checks import Convolution
from .dispatch import dispatched_in_forward_mode

LIBRARY = operators.library()
SETTINGS = 5  # stride, padding, output padding, groups and dilation, the last arguments of most operators
Function = Callable[..., Any]


def settings_of(settings: Sequence[Any]) -> Convolution:
    stride, padding, output_padding, groups, dilation = settings
    return (tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation))


def cast_tensors(arguments: Sequence[Any], device_type: str) -> list[Any]:
    """Casts all tensors of a call to autocast's lower type."""
    dtype = torch.get_autocast_dtype(device_type)
    return [cast_operand(a, dtype, device_type) if isinstance(a, Tensor) else a for a in arguments]


def register(name: str, implementation: Function, fake: Function) -> None:
    """Registers what an operator computes on a CPU or a GPU, and the shapes of its results."""
    split = splitter(name)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, lambda *arguments: implementation(*split(arguments)), key)
    torch.library.register_fake(f"tconv3d::{name}", lambda *arguments: fake(*split(arguments)), lib=LIBRARY)


def register_derivatives(name: str, record: Function, cast: Function = cast_tensors) -> None:
    """Registers how autograd records an operator, and how autocast casts it.

    `record` gets the arguments of the implementation. `cast(arguments, device_type)` returns the operator's arguments
    under autocast.
    """
    overload, split, tensors = _overload(name), splitter(name), _tensors(name)

    def autograd(*arguments: Any) -> Any:
        subclasses.load()
        wanted = any(a is not None and a.requires_grad for a in arguments[:tensors])
        if (wanted and torch.is_grad_enabled()) or dispatched_in_forward_mode():
            return subclasses.recorded(record(*split(arguments)))
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    def autocast(device_type: str, key: Any) -> Function:
        def run(*arguments: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return overload(*cast(arguments, device_type))

        return run

    LIBRARY.impl(name, autograd, "Autograd")
    LIBRARY.impl(name, autocast("cuda", torch._C.DispatchKey.AutocastCUDA), "AutocastCUDA")
    LIBRARY.impl(name, autocast("cpu", torch._C.DispatchKey.AutocastCPU), "AutocastCPU")


def apply(function: Any, *arguments: Any) -> Any:
    """Records a call that came through the dispatcher, which has taken care of all other levels of torch.func."""
    allowed = torch._C._functorch.get_single_level_autograd_function_allowed()
    torch._C._functorch.set_single_level_autograd_function_allowed(True)
    try:
        return super(torch.autograd.Function, function).apply(*arguments)
    finally:
        torch._C._functorch.set_single_level_autograd_function_allowed(allowed)


def _overload(name: str) -> Any:
    return getattr(torch.ops.tconv3d, name).default


def _tensors(name: str) -> int:
    """Returns how many tensors an operator takes before its other arguments."""
    kinds = [str(argument.type) for argument in _overload(name)._schema.arguments]
    return next((i for i, kind in enumerate(kinds) if "Tensor" not in kind), len(kinds))


def splitter(name: str) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function from an operator's arguments to those of its implementation: lists become tuples, and the
    settings of the convolution one argument."""
    names = [argument.name for argument in _overload(name)._schema.arguments]
    own = len(names) - SETTINGS if "stride" in names else len(names)

    def split(arguments: Sequence[Any]) -> tuple[Any, ...]:
        first = tuple(tuple(a) if isinstance(a, list) else a for a in arguments[:own])
        return (*first, settings_of(arguments[own:])) if len(arguments) > own else first

    return split
