"""Makes what searches do with plain data most often cheap: values that are computed once, and changed copies.

Before Python 3.12, `functools.cached_property` takes a lock, and `dataclasses.replace` calls a constructor that sets
the fields of a frozen dataclass one by one. A search does either tens of thousands of times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

Data = TypeVar("Data")

if TYPE_CHECKING:
    from functools import cached_property

    once = cached_property
else:

    class once:
        """Is a property that is computed once for each object. Two threads may both compute it, to equal values."""

        def __init__(self, compute: Any) -> None:
            self.compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.name] = self.compute(instance)
            return value


def changed(value: Data, changes: dict[str, Any]) -> Data:
    """Returns a copy of a dataclass with other values of some fields, like `dataclasses.replace`.

    The dataclass must have no `__post_init__` and no slots, and its constructor must take all its fields.
    """
    fields = value.__dataclass_fields__  # type: ignore[attr-defined]
    if not changes.keys() <= fields.keys():
        raise TypeError(f"{type(value).__name__} has no fields {sorted(changes.keys() - fields.keys())}")
    found = object.__new__(type(value))
    found.__dict__.update({name: getattr(value, name) for name in fields} | changes)
    return found
