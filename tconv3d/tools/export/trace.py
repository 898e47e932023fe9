"""Follows a kernel from its entry through everything that is compiled for given constants.

The tracer knows the values of template parameters and constants, so it walks only into branches that are taken, and
notes in `Findings` which statements it saw, which conditions had which values, and which declarations, members and
variables it needed. It is cautious: for what it does not understand, every declaration of a mentioned name is needed.
This module has the entry and the statements. It does not change any text (`rewrite` does).
"""

from __future__ import annotations

import re
from typing import Any

from .program import declarator_name, parameter_name
from .syntax import Node
from .trace_base import Findings
from .trace_expressions import Expressions
from .values import Closure, Enumerator, Functions, Instance, Object, Pointer, Record, Scope, as_int

__all__ = ["Findings", "Tracer"]

_ENDS = {"return_statement", "break_statement", "continue_statement"}


class Tracer(Expressions):
    """Traces one kernel with one set of constants."""

    def run(self) -> None:
        """Walks from `run<Config>(args)`."""
        found = self.lookup("run", self.roots["tconv3d"])
        assert isinstance(found, Functions)
        for declaration, _ in found.candidates:
            self.f.live.add(declaration)
            name = parameter_name(declaration.parameters[0])
            self.walk_function(declaration, None, {name: self.config}, [])
        self.drain()

    def need_all_of(self, name: str) -> None:
        """Needs every member of a struct."""
        found = self.lookup(name, self.roots["tconv3d"])
        assert isinstance(found, Instance)
        work = [found]
        while work:
            struct = work.pop()
            self.f.whole.add(struct.declaration)
            for member in (each for found_ in struct.declaration.members.values() for each in found_):
                if member.kind == "member":
                    self.need(member)
                    type_ = self.member_type(member, struct.scope)
                    work += [type_] if isinstance(type_, Instance) else []

    def drain(self) -> None:
        """Walks bodies until none is left, and lambdas that nobody was seen to call."""
        while self.queue:
            while self.queue:
                body, scope = self.queue.pop()
                self.f.seen.add(body)
                self.block(body, scope)
            for closure in [each for node, each in self.closures.items() if node not in self.called]:
                self.call_closure(closure, [])

    # ---- statements: each returns whether what follows in its block is never reached

    def block(self, node: Node, scope: Scope) -> bool:
        inner = Scope(scope)
        ended = False
        for statement in node.kids:
            if statement.kind == "comment":
                continue
            if ended:
                break
            ended = self.statement(statement, inner)
        return ended

    def statement(self, node: Node, scope: Scope) -> bool:
        if not self.quiet:
            self.f.seen.add(node)
        kind = node.kind
        if kind == "compound_statement":
            return self.block(node, scope)
        if kind == "if_statement":
            return self.condition(node, scope)
        if kind == "declaration":
            self.declaration(node, scope)
        elif kind == "expression_statement":
            for kid in node.kids:
                self.effect(kid, scope)
        elif kind in ("for_statement", "while_statement", "do_statement"):
            self.loop(node, scope)
        elif kind == "return_statement":
            for kid in node.kids:
                self.returned(kid, scope)
        elif kind == "static_assert_declaration":
            self.assertion(node, scope)
        elif kind == "alias_declaration":
            name = node.need("name")
            scope.names[name.text] = self.type_of(node.need("type"), scope)
            scope.places[name.text] = name
        elif kind == "else_clause":
            return self.statement(node.kids[0], scope)
        elif kind == "preproc_call":
            argument = node.get("argument")
            for word in re.findall(r"\w+", argument.text if argument is not None else ""):
                self.lookup(word, scope)
        elif kind not in _ENDS and kind != "comment":
            for kid in node.kids:
                self.value(kid, scope)
        return kind in _ENDS

    def returned(self, node: Node, scope: Scope) -> None:
        value = self.value(node, scope)
        if isinstance(value, list) and value:
            owner: Node | None = node
            while owner is not None and owner.kind not in ("function_definition", "lambda_expression"):
                owner = owner.parent
            result = owner.get("type") if owner is not None else None
            if result is not None:
                self.brace(self.type_of(result, scope), value)

    def condition(self, node: Node, scope: Scope) -> bool:
        clause = node.need("condition")
        condition = clause.need("value")
        found = self.truth(self.value(condition, scope))
        self.note(node, found)
        then, otherwise = node.need("consequence"), node.get("alternative")
        ends = [False, otherwise is None and found is not None and found]
        if found is not False:
            ends[0] = self.statement(then, Scope(scope))
        if found is not True and otherwise is not None:
            ends[1] = self.statement(otherwise, Scope(scope))
        ended = all(ends) if found is None else ends[0] if found else ends[1] and otherwise is not None
        return ended and not (found is not None and node in self.f.mixed)

    def loop(self, node: Node, scope: Scope) -> None:
        inner = Scope(scope)
        runs = self.runs(node, scope)
        self.note(node, runs)
        if runs is False:
            return
        first = node.get("initializer")
        if first is not None:
            self.statement(first, inner) if first.kind.endswith(("declaration", "statement")) else self.effect(
                first, inner
            )
        condition = node.get("condition")
        if condition is not None:
            self.value(condition.get("value") or condition, inner)
        update = node.get("update")
        if update is not None:
            self.effect(update, inner)
        self.statement(node.need("body"), inner)

    def runs(self, node: Node, scope: Scope) -> bool | None:
        """Says that a loop `for (int i = first; i < end; ...)` over known numbers never runs its body, or None."""
        first, condition = node.get("initializer"), node.get("condition")
        declarators = first.fields.get("declarator", []) if first is not None else []
        if condition is None or condition.kind != "binary_expression" or len(declarators) != 1:
            return None
        name, value = declarator_name(declarators[0]), declarators[0].get("value")
        left = condition.need("left")
        if name is None or value is None or left.text != name.text or condition.need("operator").text.strip() != "<":
            return None
        self.quiet += 1
        start, end = as_int(self.value(value, scope)), as_int(self.value(condition.need("right"), scope))
        self.quiet -= 1
        return False if start is not None and end is not None and start >= end else None

    def declaration(self, node: Node, scope: Scope) -> None:
        constant = node.has("type_qualifier", "constexpr") or node.has("type_qualifier", "const")
        type_ = self.type_of(node.need("type"), scope)
        is_auto = node.need("type").kind == "placeholder_type_specifier"
        for declarator in node.fields.get("declarator", []):
            name = declarator_name(declarator)
            value_node = declarator.get("value")
            value = self.value(value_node, scope) if value_node is not None else None
            inner = declarator.need("declarator") if declarator.kind == "init_declarator" else declarator
            own = self.wrapped(type_, inner, scope)
            if isinstance(value, list):
                value = self.brace(own, value)
            if isinstance(value, (int, Record)) and not constant:
                value = None
            if isinstance(value, (Closure, int, Record, Enumerator)):
                found: Any = value
            elif own is not None and not (isinstance(value, Object) and is_auto):
                found = Object(own)
            else:
                found = value if isinstance(value, Object) else None
            if name is not None:
                scope.names[name.text] = found
                scope.places[name.text] = name

    def effect(self, node: Node, scope: Scope) -> None:
        """Walks an expression whose value nobody takes: writing a variable or a member does not read it."""
        target = node.get("left") or node.get("argument")
        if node.kind == "comma_expression":
            self.effect(node.need("left"), scope)
            self.effect(node.need("right"), scope)
        elif node.kind == "assignment_expression" and target is not None:
            value = self.value(node.need("right"), scope)
            if isinstance(value, list):
                value = self.brace(self.object_type(target, scope), value)
            if target.kind not in ("identifier", "field_expression") or not self.purity.is_pure(node.need("right")):
                self.value(target, scope)
            else:
                self.written(node, target, scope)
        elif (
            node.kind == "update_expression"
            and target is not None
            and target.kind in ("identifier", "field_expression")
        ):
            self.written(node, target, scope)
        else:
            self.value(node, scope)

    def object_type(self, target: Node, scope: Scope) -> Any:
        self.quiet += 1
        found = self.value(target, scope)
        self.quiet -= 1
        return found.type if isinstance(found, Object) else None

    def written(self, node: Node, target: Node, scope: Scope) -> None:
        """Needs the object whose member is written, but not the member; a variable of a reference type is read."""
        writes = self.f.writes.setdefault(node, set())
        if target.kind == "field_expression":
            held = self.value(target.need("argument"), scope)
            type_ = held.type if isinstance(held, Object) else None
            type_ = type_.to if isinstance(type_, Pointer) else type_
            member = self.find_member(type_, target.need("field").text) if isinstance(type_, Instance) else None
            if member is None:
                writes.add(None)
                self.value(target, scope)
            else:
                writes.add(member[0][0])
            return
        found: Scope | None = scope
        while found is not None and target.text not in found.names:
            member = self.find_member(found.instance, target.text) if found.instance is not None else None
            if member is not None:
                writes.add(member[0][0])
                return
            found = found.parent
        place = found.places.get(target.text) if found is not None else None
        if place is None or _is_reference(place):
            writes.add(None)
            self.value(target, scope)
        else:
            writes.add(place)


def _is_reference(name: Node) -> bool:
    parent = name.parent
    while parent is not None and parent.kind.endswith("declarator"):
        if parent.kind == "reference_declarator":
            return True
        parent = parent.parent
    return False
