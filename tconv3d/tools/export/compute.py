"""Computes constexpr functions whose arguments are known numbers, as the compiler does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .program import Declaration, declarator_name
from .syntax import Node
from .values import Enumerator, Instance, Record, Scope, as_int

if TYPE_CHECKING:
    from .trace_base import Base

_STEPS = 100_000  # statements of one call, after which its value counts as unknown


class _UnknownError(Exception):
    """Ends a computation that needs what is not known."""


class _ReturnError(Exception):
    """Carries the value of a return statement out of the loops around it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def computed(
    tracer: Base, declaration: Declaration, instance: Instance | None, given: dict[str, Any], values: Sequence[Any]
) -> Any:
    """Returns the value of a call, or None if it is not known."""
    if declaration.body is None:
        return None
    scope = Scope(instance.scope if instance else tracer.roots[declaration.namespace])
    scope.names.update(given)
    listed = declaration.function.need("parameters").kids
    for parameter, value in zip((p for p in listed if p.kind.endswith("declaration")), values, strict=False):
        name = declarator_name(parameter.get("declarator"))
        if name is not None:
            scope.names[name.text] = value if isinstance(value, (Record, Enumerator)) else as_int(value)
    tracer.quiet += 1
    try:
        _Run(tracer).block(declaration.body, scope)
    except _ReturnError as found:
        if isinstance(found.value, list):
            return tracer.brace(tracer.type_of(declaration.core.need("type"), scope), found.value)
        return found.value if isinstance(found.value, (int, Record, Enumerator)) else None
    except _UnknownError:
        return None
    finally:
        tracer.quiet -= 1
    return None


class _Run:
    """Executes statements, with the variables in scopes."""

    def __init__(self, tracer: Base) -> None:
        self.tracer, self.left = tracer, _STEPS

    def block(self, node: Node, scope: Scope) -> None:
        inner = Scope(scope)
        for kid in node.kids:
            self.statement(kid, inner)

    def statement(self, node: Node, scope: Scope) -> None:
        self.left -= 1
        if self.left < 0:
            raise _UnknownError
        kind = node.kind
        if kind == "compound_statement":
            self.block(node, scope)
        elif kind == "return_statement":
            raise _ReturnError(self.expression(node.kids[0], scope))
        elif kind == "if_statement":
            chosen = (
                node.need("consequence") if self.holds(node.need("condition"), scope) else node.get("alternative")
            )
            if chosen is not None:
                self.statement(chosen.kids[0] if chosen.kind == "else_clause" else chosen, scope)
        elif kind == "declaration":
            self.declare(node, scope)
        elif kind == "expression_statement":
            self.expression(node.kids[0], scope)
        elif kind in ("for_statement", "while_statement"):
            self.loop(node, scope)
        elif kind not in ("comment", "preproc_call", "static_assert_declaration"):
            raise _UnknownError

    def declare(self, node: Node, scope: Scope) -> None:
        for declarator in node.fields.get("declarator", []):
            name, value = declarator_name(declarator), declarator.get("value")
            if name is None or value is None:
                raise _UnknownError
            found = self.expression(value, scope)
            if isinstance(found, list):
                found = self.tracer.brace(self.tracer.type_of(node.need("type"), scope), found)
            scope.names[name.text] = found

    def loop(self, node: Node, scope: Scope) -> None:
        inner = Scope(scope)
        first, condition, update = node.get("initializer"), node.get("condition"), node.get("update")
        if first is not None:
            self.statement(first, inner) if first.kind == "declaration" else self.expression(first, inner)
        while condition is None or self.holds(condition, inner):
            self.statement(node.need("body"), inner)
            if update is not None:
                self.expression(update, inner)

    def holds(self, node: Node, scope: Scope) -> bool:
        found = as_int(self.expression(node.get("value") or node, scope))
        if found is None:
            raise _UnknownError
        return bool(found)

    def expression(self, node: Node, scope: Scope) -> Any:
        if node.kind == "assignment_expression":
            return self.assign(node, scope)
        if node.kind == "update_expression":
            target = node.need("argument")
            before = as_int(self.tracer.value(target, scope))
            if before is None:
                raise _UnknownError
            self.store(target, before + (1 if node.need("operator").text == "++" else -1), scope)
            return before
        found = self.tracer.value(node, scope)
        if not isinstance(found, (int, list, Record, Enumerator)) and as_int(found) is None:
            raise _UnknownError
        return found

    def assign(self, node: Node, scope: Scope) -> Any:
        target, mark = node.need("left"), node.need("operator").text
        value = self.expression(node.need("right"), scope)
        before = self.tracer.value(target, scope)
        if mark != "=":
            a, b = as_int(before), as_int(value)
            value = None if a is None or b is None else compute(mark[:-1], a, b)
        elif isinstance(value, list):
            value = self.tracer.brace(before.type, value) if isinstance(before, Record) else None
        if value is None:
            raise _UnknownError
        self.store(target, value, scope)
        return value

    def store(self, target: Node, value: Any, scope: Scope) -> None:
        found: Scope | None = scope
        while found is not None and target.text not in found.names:
            found = found.parent
        if target.kind != "identifier" or found is None:
            raise _UnknownError
        found.names[target.text] = value


def compute(mark: str, a: int, b: int) -> int | None:
    """Returns the result of an operator of C++, whose division rounds towards zero."""
    if mark in ("/", "%"):
        if b == 0:
            return None
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if mark == "/" else a - b * quotient
    if mark in ("<<", ">>"):
        return None if not 0 <= b < 64 else a << b if mark == "<<" else a >> b
    table = {
        "+": a + b, "-": a - b, "*": a * b, "&": a & b, "|": a | b, "^": a ^ b,
        "==": int(a == b), "!=": int(a != b), "<": int(a < b), ">": int(a > b), "<=": int(a <= b), ">=": int(a >= b),
    }  # fmt: skip
    return table.get(mark)
