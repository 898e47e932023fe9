"""Puts the value of a function in place of its calls where it only returns a number or one of its parameters.

Such functions are left where a choice between several layouts has been decided.
"""

from __future__ import annotations

from collections.abc import Mapping

from .parameters import arguments_of, parameters_of, root_of
from .program import Declaration, Unit, declarator_name
from .purity import Purity
from .syntax import Node
from .trace import Findings

_SIMPLE = {"identifier", "number_literal", "call_expression", "field_expression", "qualified_identifier"}
_LITERALS = {"number_literal": ("int", "float", "unsigned"), "true": ("bool",), "false": ("bool",)}


def with_inlined_functions(units: Mapping[str, Unit], findings: Findings, purity: Purity) -> dict[str, str]:
    """Returns the texts with calls of trivial functions replaced, one level deep: other rounds do the rest."""
    calls: dict[Declaration, list[Node]] = {}
    shared: set[Declaration] = set(findings.odd_calls)
    for call, functions in findings.calls.items():
        for function in functions:
            calls.setdefault(function, []).append(call)
            if len(functions) > 1 or call.kind != "call_expression":
                shared.add(function)
    edits: dict[int, list[tuple[int, int, str]]] = {}
    taken: dict[int, list[tuple[int, int]]] = {}
    for function, places in calls.items():
        if function in shared or function.name in ("run", "operator"):
            continue
        texts = [_value(function, call, purity) for call in places]
        if any(text is None for text in texts):
            continue
        for call, text in zip(places, texts, strict=True):
            unit = id(root_of(call))
            spans = taken.setdefault(unit, [])
            if text is not None and not any(a <= call.start < b or a < call.end <= b for a, b in spans):
                spans.append((call.start, call.end))
                edits.setdefault(unit, []).append((call.start, call.end, text))
    return {name: _edited(unit.text, edits.get(id(unit.root), [])) for name, unit in units.items()}


def _value(function: Declaration, call: Node, purity: Purity) -> str | None:
    """Returns what a call becomes, or None if the function does more than to return a literal or a parameter."""
    body, kind = function.body, function.core.get("type")
    statements = [kid for kid in body.kids if kid.kind != "comment"] if body is not None else []
    if kind is None or len(statements) != 1 or statements[0].kind != "return_statement" or not statements[0].kids:
        return None
    if not all(purity.is_pure(each) for each in call.need("arguments").kids) or call.parent is None:
        return None
    owner = call.need("function").get("argument")
    if owner is not None and not purity.is_pure(owner):
        return None
    value = statements[0].kids[0]
    if kind.text in _LITERALS.get(value.kind, ()):
        is_float = value.text.endswith("f") and not value.text.startswith("0x")
        return (
            value.text if is_float == (kind.text == "float") and call.parent.kind != "expression_statement" else None
        )
    for parameter, given in zip(parameters_of(function), arguments_of(call), strict=False):
        name = declarator_name(parameter.get("declarator"))
        if value.kind == "identifier" and name is not None and name.text == value.text:
            if parameter.need("type").text != kind.text or parameter.need("declarator").kind != "identifier":
                return None
            bare = given.kind in _SIMPLE or call.parent.kind in (
                "argument_list",
                "init_declarator",
                "return_statement",
            )
            return given.text if bare else f"({given.text})"
    return None


def _edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text
