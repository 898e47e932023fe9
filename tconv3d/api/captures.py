"""Finds what a function captures: modules, tensors and numbers in its closure, its defaults and its global variables.

A tail is traced once, so each call looks whether a later trace would find something else. It also looks into
functions of the same package that the function calls. This module knows Python functions, no graphs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .conditions import is_constant


def captures(tail: Callable[..., Any]) -> Iterator[Any]:
    """Yields the modules, tensors and constants that a function captures.

    A module whose children a function reads by name (`self.norm`) comes with these children alone, without the rest
    of the model that it may be; any other module comes with all modules inside of it.
    """
    seen: set[int] = set()
    home: str | None = None  # the package of the first function
    waiting: list[tuple[Any, tuple[str, ...]]] = [(tail, ())]  # with the names that the function around it uses
    while waiting:
        value, names = waiting.pop()
        if is_constant(value):
            yield value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (Tensor, nn.Module)):
            yield value
            if isinstance(value, nn.Module):
                children = value._modules
                named = [children[name] for name in names if name in children]
                waiting += [(child, ()) for child in named or children.values()]
        elif isinstance(value, (list, tuple, dict)):
            inside = value.values() if isinstance(value, dict) else value
            waiting += [(each, names) for each in inside]
        elif isinstance(value, functools.partial):
            waiting += [(each, names) for each in (value.func, value.args, value.keywords)]
        elif isinstance(value, types.MethodType):
            code = getattr(value.__func__, "__code__", None)
            waiting += [(value.__self__, () if code is None else tuple(_names(code))), (value.__func__, names)]
        elif isinstance(value, types.FunctionType):
            package = str(value.__module__).partition(".")[0]
            home = home or package
            if package == "torch" or package != home:
                continue
            used = tuple(_names(value.__code__))
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
            shared = [value.__globals__[name] for name in used if name in value.__globals__]
            waiting += [(each, used) for each in (*cells, *shared, value.__defaults__, value.__kwdefaults__)]


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of attributes and global variables that code uses, with the functions inside of it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable without a value
        return False
