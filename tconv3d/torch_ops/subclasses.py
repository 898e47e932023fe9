"""Loads rules for tensor subclasses (DTensor, say) when a program uses them, and not before.

Rules need the module that defines the subclass, and importing that module takes a second. A tensor of the subclass
exists only in a process that has imported the module. So a loader is called by the first call of an operator that
reaches the dispatcher after the module has been imported. This module knows neither subclasses nor rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

_waiting: dict[str, Callable[[], object]] = {}  # loaders, by the module that defines the subclass
_ruled: dict[type[torch.Tensor], Callable[[torch.Tensor], object]] = {}


def when_imported(module: str, load: Callable[[], object]) -> None:
    """Registers a loader, which is called once, at the first call of an operator after `module` was imported."""
    _waiting[module] = load


def load() -> None:
    """Calls the loaders whose modules have been imported by now."""
    if _waiting:
        for module in [name for name in _waiting if name in sys.modules]:
            _waiting.pop(module)()


def add(kind: type[torch.Tensor], prepare: Callable[[torch.Tensor], object]) -> None:
    """Records that the operators of this library have rules for tensors of this class.

    `prepare` is called with every result that autograd has recorded, and may register hooks for its gradient.
    """
    _ruled[kind] = prepare


def recorded(result: torch.Tensor) -> torch.Tensor:
    """Returns the result of an operator that autograd has recorded, prepared for its backward pass."""
    if (prepare := _ruled.get(type(result))) is not None:
        prepare(result)
    return result


def ruled(tensor: torch.Tensor) -> bool:
    """Tells whether the operators of this library have rules for the class of this tensor."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    load()
    return kind in _ruled
