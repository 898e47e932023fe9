"""Tells whether calling a module runs the `forward` of its class and nothing else.

Modules that run fused are not called one by one, so nobody may listen to them: no hook of their own or of all
modules, no replaced method, no compiled call. This module knows PyTorch's modules and nothing of fusing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_hooks

from .conditions import Conditions
from .modules import ConvTranspose3d

has_global_hooks: Callable[[], bool] = module_hooks._has_any_global_hook


BASE = "_fused_from"  # the attribute of a class for fused modules that names the class it is derived from


def as_defined(kind: type[nn.Module], name: str) -> Callable[..., Any] | None:
    """Returns a method as the source file of a class defines it, or None if it has been replaced on the class."""
    method: Callable[..., Any] = getattr(kind, name)
    owner = next((base for base in kind.__mro__ if name in base.__dict__), kind)
    if BASE in owner.__dict__ and method.__name__ == name:
        return None if as_defined(owner.__dict__[BASE], name) is None else method
    defined = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else None
    return method if getattr(method, "__globals__", None) is defined else None


_SPACES: tuple[dict[str, Any], ...] = (vars(F), vars(torch))  # where the layers of PyTorch find what they compute
_DEFINED = tuple(dict(space) for space in _SPACES)


def _functions_of(forward: Any) -> dict[tuple[int, str], Any]:
    """Returns the functions of PyTorch that a forward may call by name, as they were when this module was loaded."""
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return {
        (index, name): defined[name]
        for index, defined in enumerate(_DEFINED)
        for name in names
        if callable(defined.get(name))
    }


def watch_functions(conditions: Conditions, functions: Iterable[Any]) -> None:
    """Makes conditions of functions of PyTorch: that their names still stand for them."""
    for function in functions:
        name = getattr(function, "__name__", "")
        for space in _SPACES:
            if space.get(name) is function:
                conditions.same(space, name, function)


_CALL, _CALL_IMPL = as_defined(nn.Module, "_wrapped_call_impl"), as_defined(nn.Module, "_call_impl")


class Layers:
    """Holds layers that run fused, each with its class and `forward` at the beginning."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = [(layer, type(layer), type(layer).forward, layer.__dict__) for layer in dict.fromkeys(layers)]
        self.as_defined = all(as_defined(kind, "forward") is not None for _, kind, _, _ in self._layers)
        found = [_functions_of(forward) for forward in {forward for _, _, forward, _ in self._layers}]
        named = {place: function for each in found for place, function in each.items()}
        self._functions = [(_SPACES[index], name, function) for (index, name), function in named.items()]

    def are_plain(self) -> bool:
        """Tells whether all layers are as they were, and nobody listens to one of them or to all modules."""
        if has_global_hooks() or not self.as_defined:
            return False
        for space, name, function in self._functions:
            if space.get(name) is not function:  # somebody has replaced it
                return False
        for layer, kind, forward, own in self._layers:
            if not (
                type(layer) is kind
                and kind.forward is forward
                and kind.__call__ is _CALL
                and kind._call_impl is _CALL_IMPL
                and "forward" not in own
                and "_call_impl" not in own
                and own.get("_compiled_call_impl") is None
                and not own["_forward_hooks"]
                and not own["_forward_pre_hooks"]
                and not own["_backward_hooks"]
                and not own["_backward_pre_hooks"]
            ):
                return False
        return True


def is_plain(layer: nn.Module) -> bool:
    """Tells whether calling a layer runs the `forward` that the source file of its class defines, and no hook."""
    return Layers([layer]).are_plain()


# ---- the layers of the block ConvTranspose3d -> ReLU -> GroupNorm, which PyTorch's compiler looks at too

_KINDS: tuple[type[nn.Module], ...] = (nn.ConvTranspose3d, ConvTranspose3d, nn.ReLU, nn.GroupNorm, nn.Sequential)
_FORWARDS = {kind: as_defined(kind, "forward") for kind in _KINDS}


def is_plain_part(layer: nn.Module) -> bool:
    """Tells whether calling a layer with a class in `_KINDS` runs the `forward` of its class and nothing else."""
    kind, own = type(layer), layer.__dict__
    return (
        has_own_forward(layer)
        and kind.__call__ is _CALL
        and kind._call_impl is _CALL_IMPL
        and "_call_impl" not in own
        and own.get("_compiled_call_impl") is None
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and not layer._backward_hooks
        and not layer._backward_pre_hooks
    )


def has_own_forward(layer: nn.Module) -> bool:
    """Tells whether a layer's `forward` is replaced neither on the object nor on its class, one of `_KINDS`."""
    return "forward" not in layer.__dict__ and not forward_is_replaced(type(layer))


def forward_is_replaced(kind: type[nn.Module]) -> bool:
    """Tells whether the `forward` of one of the classes in `_KINDS` has been replaced."""
    return kind.forward is not _FORWARDS[kind]
