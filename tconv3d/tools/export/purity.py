"""Says whether an expression only computes a value: it writes nothing, and neither do the functions that it calls."""

from __future__ import annotations

from collections.abc import Iterable

from .program import Declaration, Unit, declarator_name
from .syntax import Node

# Functions of CUDA and casts, which the grammar takes for functions.
_PURE = {"static_cast", "reinterpret_cast", "__ldg", "min", "max", "make_uint4", "make_uint2", "make_float2"}


class Purity:
    """Knows the functions of a program by their names, and judges expressions by what these functions do."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._functions: dict[str, list[Declaration]] = {}
        for unit in units:
            for declaration in unit.declarations:
                self._collect(declaration)
        self._known: dict[str, bool] = {}

    def _collect(self, declaration: Declaration) -> None:
        if declaration.kind == "function":
            self._functions.setdefault(declaration.name, []).append(declaration)
        for found in declaration.members.values():
            for member in found:
                self._collect(member)

    def is_pure(self, node: Node) -> bool:
        for each in node.walk():
            if each.kind in ("assignment_expression", "update_expression", "gnu_asm_expression", "lambda_expression"):
                return False
            if each.kind == "call_expression" and not self._calls_pure(each.need("function")):
                return False
        return True

    def _calls_pure(self, function: Node) -> bool:
        name = called_name(function)
        if name in _PURE or name.startswith("k"):  # a table of the kernel's constants
            return True
        if name not in self._known:
            self._known[name] = True  # while its body is judged: a recursion adds nothing
            found = self._functions.get(name, [])
            self._known[name] = bool(found) and all(map(self._is_pure_function, found))
        return self._known[name]

    def _is_pure_function(self, declaration: Declaration) -> bool:
        body = declaration.body
        if body is None:
            return False
        own = {name for each in body.walk() if each.kind == "declaration" for name in _values_of(each)}
        for each in body.walk():
            if each.kind in ("gnu_asm_expression", "lambda_expression"):
                return False
            if each.kind in ("assignment_expression", "update_expression"):
                target = each.get("left") or each.need("argument")
                while target.kind in ("field_expression", "subscript_expression"):
                    target = target.need("argument")
                if target.text not in own:
                    return False
            if each.kind == "call_expression" and not self._calls_pure(each.need("function")):
                return False
        return True


def called_name(function: Node) -> str:
    """Returns the last name of what a call calls: `f` of `A<B>::template f<3>` and of `a.b.f`."""
    while True:
        inner = function.get("field") or function.get("name")
        if inner is None and function.kind in ("dependent_name", "dependent_type"):
            inner = function.kids[0]
        if inner is None:
            return function.text
        function = inner


def _values_of(declaration: Node) -> set[str]:
    """Returns the names of the variables that a declaration makes, without references to other objects."""
    found = set()
    for declarator in declaration.fields.get("declarator", []):
        kinds = {each.kind for each in declarator.walk() if each.kind.endswith("declarator")}
        name = declarator_name(declarator)
        if name is not None and "reference_declarator" not in kinds and "pointer_declarator" not in kinds:
            found.add(name.text)
    return found
