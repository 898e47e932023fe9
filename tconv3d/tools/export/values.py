"""What C++ expressions can mean to `trace`: types, numbers that are known when the kernel is compiled, functions.

An expression whose value or type is not known means None.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from .program import Declaration
from .syntax import Node

SIZES = {  # bytes
    "bool": 1, "char": 1, "unsigned char": 1, "signed char": 1, "short": 2, "unsigned short": 2,
    "int": 4, "unsigned": 4, "unsigned int": 4, "float": 4, "double": 8, "long long": 8, "unsigned long long": 8,
    "uint2": 8, "int2": 8, "float2": 8, "uint4": 16, "int4": 16, "float4": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Plain:
    """A type of the language or of CUDA."""

    name: str


@dataclass(frozen=True)
class Pointer:
    to: Any


@dataclass(frozen=True)
class Array:
    of: Any
    count: int | None


@dataclass(frozen=True)
class Enumeration:
    declaration: Declaration


@dataclass(frozen=True)
class Enumerator:
    of: Declaration
    name: str


@dataclass(frozen=True)
class Object:
    """A run-time object of a known type."""

    type: Any


@dataclass(frozen=True)
class Space:
    """A namespace."""

    name: str


@dataclass(frozen=True)
class Table:
    """A table of a kernel's constants, `Config::kShift(i, j)`."""

    values: tuple[Any, ...]


class Scope:
    """The names that are visible at a place: those declared here, then those of the enclosing scope."""

    def __init__(self, parent: Scope | None, instance: Instance | None = None, namespace: str = "") -> None:
        self.parent, self.instance, self.namespace = parent, instance, namespace
        self.names: dict[str, Any] = {}
        self.places: dict[str, Node] = {}  # where local variables and parameters are declared


@dataclass(eq=False)
class Config:
    """The constants that a kernel is compiled with."""

    constants: dict[str, Any]


class Instance:
    """A struct with values for the parameters of its template."""

    def __init__(self, declaration: Declaration, arguments: dict[str, Any], outer: Scope) -> None:
        self.declaration, self.arguments = declaration, arguments
        self.scope = Scope(outer, self)
        self.scope.names.update(arguments)
        self.bases: list[Any] = []
        self.constants: dict[Declaration, Any] = {}

    def __repr__(self) -> str:
        return f"{self.declaration.name}<{self.arguments}>"


@dataclass(eq=False)
class Closure:
    node: Node
    scope: Scope


@dataclass(eq=False)
class Record:
    """A struct whose members are known numbers."""

    type: Instance
    members: dict[str, Any]


@dataclass(frozen=True)
class Template:
    """A struct template with all its specialisations."""

    declarations: tuple[Declaration, ...]
    scope: Scope


@dataclass(frozen=True)
class Functions:
    """The overloads that a name stands for, with the template arguments that are written out.

    `of` is the known object whose member functions they are, if it is known.
    """

    candidates: tuple[tuple[Declaration, Instance | None], ...]
    arguments: Sequence[Any] = ()
    of: Record | None = None


def key(value: Any) -> Hashable:
    """Returns what two values must have in common to be the same."""
    if isinstance(value, (list, tuple)):
        return tuple(map(key, value))
    if isinstance(value, dict):
        return tuple((name, key(each)) for name, each in sorted(value.items()))
    return value if isinstance(value, Hashable) else id(value)


def as_int(value: Any) -> int | None:
    """Returns the number that a value is known to be."""
    if isinstance(value, (bool, int)):
        return int(value)
    if isinstance(value, Object) and isinstance(value.type, Instance) and value.type.declaration.name == "Int":
        return as_int(next(iter(value.type.arguments.values()), None))
    return None


def size_of(type_: Any) -> int | None:
    """Returns the bytes of a type of the language, of an array or of a pointer."""
    if isinstance(type_, Plain):
        return SIZES.get(type_.name)
    if isinstance(type_, Pointer):
        return 8
    if isinstance(type_, Array):
        each = size_of(type_.of)
        return None if each is None or type_.count is None else each * type_.count
    return None
