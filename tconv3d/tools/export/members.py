"""Finds members of structs that nobody writes, so that they always have the value of their declaration."""

from __future__ import annotations

from collections.abc import Iterable

from .parameters import arguments_of, parameters_of
from .program import Declaration, Unit
from .syntax import Node
from .trace import Findings

Key = tuple[str, str]  # the names of a struct and of one of its members


def never_written(units: Iterable[Unit], findings: Findings) -> set[Key]:
    """Returns members with an initializer whose name is never that of something written or referred to."""
    units = list(units)
    written = {name for unit in units for node in unit.root.walk() for name in _written(node, findings)}
    found: set[Key] = set()
    for unit in units:
        for struct in _structs(unit.declarations):
            if struct in findings.braced or struct in findings.whole:
                continue
            for name, (member, *_) in struct.members.items():
                is_number = member.value is not None and member.value.kind in ("number_literal", "identifier")
                if member.kind == "member" and is_number and name not in written:
                    found.add((struct.name, name))
    return found


def _structs(declarations: Iterable[Declaration]) -> Iterable[Declaration]:
    for declaration in declarations:
        if declaration.kind == "struct":
            yield declaration
            for inner in declaration.members.values():
                yield from _structs(inner)


def _written(node: Node, findings: Findings) -> Iterable[str]:
    """Yields the names that a node writes, or hands to something that may write them."""
    if node.kind == "assignment_expression":
        yield _last_name(node.need("left"))
    elif node.kind in ("update_expression", "pointer_expression"):
        yield _last_name(node.need("argument"))
    elif node.kind == "call_expression":
        functions = findings.calls.get(node, set())
        for i, argument in enumerate(arguments_of(node)):
            if not functions or any(_takes_reference(function, i) for function in functions):
                yield _last_name(argument)
    elif node.kind in ("gnu_asm_output_operand", "gnu_asm_input_operand", "init_declarator"):
        is_reference = node.kind != "init_declarator" or node.need("declarator").kind == "reference_declarator"
        value = node.get("value")
        if is_reference and value is not None:
            yield _last_name(value)


def _takes_reference(function: Declaration, index: int) -> bool:
    parameters = parameters_of(function)
    declarator = parameters[index].get("declarator") if index < len(parameters) else None
    return declarator is None or any(each.kind == "reference_declarator" for each in declarator.walk())


def _last_name(node: Node) -> str:
    while node.kind in ("subscript_expression", "parenthesized_expression"):
        node = node.get("argument") or node.kids[0]
    field = node.get("field")
    return field.text if field is not None else node.text
