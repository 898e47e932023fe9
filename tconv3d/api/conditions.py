"""Holds what a graph of a module's forward depends on, and tells whether it is still so.

A condition names a dictionary (the attributes of a module or of a class, the children of a module, global variables),
a key and what was found there. Checking one takes about 0.05 microseconds. The attributes of the module whose forward
it is are not kept: they hold the plans, which hold the conditions, and such a circle would keep a deleted model's
memory until Python looks for circles. This module knows nothing of graphs.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_MISSING: Any = object()
_CONSTANTS: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format,
    torch.layout, torch.Size,
)  # fmt: skip


def is_constant(value: Any) -> bool:
    """Tells whether a value cannot change: a number, a text, an enumeration's member, or a tuple of these."""
    if type(value) in (tuple, frozenset):
        return all(map(is_constant, value))
    return type(value) in _CONSTANTS or isinstance(value, enum.Enum)


class Conditions:
    """Collects conditions, each once, for the forward of a module with the attributes `own`."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._own = id(own)
        self._own_same: dict[str, Any] = {}
        self._own_tensors: dict[str, None] = {}
        self._same: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        self._children: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        self._tensors: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self._lengths: dict[int, tuple[Mapping[str, Any], int]] = {}
        self._orders: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
        self._equal: list[tuple[Any, Any]] = []

    def same(self, place: Any, name: str, value: Any) -> None:
        """Asks that `place[name]` stays the same object."""
        if id(place) == self._own:
            self._own_same.setdefault(name, value)
        else:
            self._same.setdefault((id(place), name), (place, name, value))

    def absent(self, place: Any, name: str) -> None:
        """Asks that `place` gets no entry with this name."""
        self.same(place, name, _MISSING)

    def child(self, place: Any, name: str, module: nn.Module) -> None:
        """Asks that `place[name]` stays the same module, which is not kept alive."""
        self._children.setdefault((id(place), name), (place, name, weakref.ref(module)))

    def tensor(self, place: Any, name: str) -> None:
        """Asks that `place[name]` stays a tensor, perhaps another one."""
        if id(place) == self._own:
            self._own_tensors[name] = None
        else:
            self._tensors.setdefault((id(place), name), (place, name))

    def length(self, place: Any) -> None:
        """Asks that `place` keeps its number of entries."""
        self._lengths.setdefault(id(place), (place, len(place)))

    def order(self, place: Any) -> None:
        """Asks that `place` keeps the names of its entries, in the same order."""
        self._orders.setdefault(id(place), (place, list(place)))

    def equal(self, value: Any, copy: Any) -> None:
        """Asks that a list or a dictionary, which may be written, stays equal to its copy."""
        self._equal.append((value, copy))

    def hold(self, own: Mapping[str, Any]) -> bool:
        """Tells whether all conditions are met; `own` are the attributes of the module whose forward it is."""
        for name, value in self._own_same.items():
            if own.get(name, _MISSING) is not value:
                return False
        if not all(isinstance(own.get(name), Tensor) for name in self._own_tensors):
            return False
        for place, name, value in self._same.values():
            if place.get(name, _MISSING) is not value:
                return False
        for place, name, reference in self._children.values():
            child = place.get(name)
            if child is None or child is not reference():
                return False
        for place, size in self._lengths.values():
            if len(place) != size:
                return False
        for place, names in self._orders.values():
            if list(place) != names:
                return False
        for place, name in self._tensors.values():
            if not isinstance(place.get(name), Tensor):
                return False
        return all(value == copy for value, copy in self._equal)
