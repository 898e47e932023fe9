"""Converts plain data (dataclasses, named tuples, tuples, enumerations, numbers, strings) to JSON and back.

    text = plain.dumps(device)
    plain.loads(text, Device)      # equal to `device`; ValueError if the text does not describe one

The reader names the expected type, and the text only fills in the values. Unlike a pickle, text from another source
may be wrong but cannot run code.

This module knows nothing of the package's own types.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def dumps(value: object) -> str:
    """Returns one line of JSON that describes the value."""
    return json.dumps(_encoded(value), separators=(",", ":"))


def loads(text: str | bytes, kind: Any) -> Any:
    """Returns the value of type `kind` that a text describes, and raises ValueError if there is none."""
    try:
        return _decoded(json.loads(text), kind)
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"no {kind} is described by {text[:100]!r}: {error}") from error


def _encoded(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return _encoded(value.value)
    if isinstance(value, tuple):  # includes named tuples
        return [_encoded(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is not plain data")


def _decoded(value: Any, kind: Any) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _one_of(value, get_args(kind))
    if origin is tuple:
        return _tuple(_list(value), get_args(kind))
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"expected the fields of {kind.__name__}, got {value!r}")
        hints = _hints(kind)
        return kind(**{name: _decoded(each, hints[name]) for name, each in value.items()})
    if isinstance(kind, type) and issubclass(kind, tuple):  # a named tuple
        return kind(*_tuple(_list(value), tuple(_hints(kind).values())))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected {kind}, got {value!r}")
    return value


def _one_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds:
        try:
            return _decoded(value, NoneType if kind is None else kind)
        except (TypeError, ValueError, KeyError):
            continue
    raise TypeError(f"expected one of {kinds}, got {value!r}")


def _tuple(values: list[Any], kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    each: Iterable[Any] = kinds
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        each = kinds[:1] * len(values)
    return tuple(_decoded(value, kind) for value, kind in zip(values, each, strict=True))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r}")
    return value


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
