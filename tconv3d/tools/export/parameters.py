"""Removes parameters that a function does not read, from its declaration and from all its calls."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .program import Declaration, Unit, declarator_name, parameter_name
from .purity import Purity
from .syntax import Node
from .trace import Findings

Edits = dict[str, list[tuple[int, int]]]  # keyed by unit: what to cut


def without_unused_parameters(units: Mapping[str, Unit], findings: Findings, purity: Purity) -> dict[str, str]:
    """Returns the texts without the parameters that no function with the same callers reads."""
    owner = {id(unit.root): name for name, unit in units.items()}
    groups = _groups(findings)
    cuts: Edits = {name: [] for name in units}
    for functions, calls in groups:
        for index in _removable(functions, calls, findings, purity):
            for function in functions:
                node = parameters_of(function)[index]
                cuts[owner[id(root_of(node))]].append((node.start, node.end))
            for call in calls:
                arguments = arguments_of(call)
                if index < len(arguments):
                    cuts[owner[id(root_of(call))]].append((arguments[index].start, arguments[index].end))
    return {name: _cut(unit.text, cuts[name]) for name, unit in units.items()}


def _groups(findings: Findings) -> list[tuple[list[Declaration], list[Node]]]:
    """Returns sets of functions that share a caller, with all calls of these functions."""
    parent: dict[Declaration, Declaration] = {}

    def root(each: Declaration) -> Declaration:
        while parent.setdefault(each, each) is not each:
            each = parent[each]
        return each

    for functions in findings.calls.values():
        first, *others = functions
        for other in others:
            parent[root(other)] = root(first)
        root(first)
    functions_of: dict[Declaration, list[Declaration]] = {}
    calls_of: dict[Declaration, list[Node]] = {}
    for each in parent:
        functions_of.setdefault(root(each), []).append(each)
    for call, functions in findings.calls.items():
        calls_of.setdefault(root(next(iter(functions))), []).append(call)
    return [(functions, calls_of[first]) for first, functions in functions_of.items()]


def _removable(functions: list[Declaration], calls: list[Node], findings: Findings, purity: Purity) -> list[int]:
    if any(function in findings.odd_calls or function.name == "operator" for function in functions):
        return []
    if any(call.kind != "call_expression" for call in calls):
        return []
    counts = {len(parameters_of(function)) for function in functions}
    found = []
    for index in range(max(counts)) if len(counts) == 1 else ():
        unread = all(_is_unread(parameters_of(function)[index], findings) for function in functions)
        given = [arguments[index] for arguments in map(arguments_of, calls) if index < len(arguments)]
        deduced = any(_is_deduced(function, index, calls) for function in functions)
        if unread and not deduced and all(map(purity.is_pure, given)):
            found.append(index)
    return found


def _is_deduced(function: Declaration, index: int, calls: list[Node]) -> bool:
    """Tells whether a parameter alone says what a template parameter is that some call does not write out."""
    words = [set(re.findall(r"\w+", parameter.text)) for parameter in parameters_of(function)]
    others = set().union(*(each for i, each in enumerate(words) if i != index))
    written = min((_written_arguments(call) for call in calls), default=0)
    names = [parameter_name(parameter) for parameter in function.parameters][written:]
    return any(name in words[index] and name not in others for name in names)


def _written_arguments(call: Node) -> int:
    """Returns how many template arguments a call writes out."""
    function = call.need("function")
    lists = [node for node in function.walk() if node.kind == "template_argument_list"]
    own = [node for node in lists if node.end == function.end]
    return len([kid for kid in own[0].kids if kid.kind != "comment"]) if own else 0


def parameters_of(function: Declaration) -> list[Node]:
    listed = function.function.get("parameters")
    return [kid for kid in listed.kids if kid.kind.endswith("parameter_declaration")] if listed is not None else []


def arguments_of(call: Node) -> list[Node]:
    return [kid for kid in call.need("arguments").kids if kid.kind != "comment"]


def _is_unread(parameter: Node, findings: Findings) -> bool:
    name = declarator_name(parameter.get("declarator"))
    return name is None or name not in findings.read


def root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _cut(text: str, cuts: list[tuple[int, int]]) -> str:
    """Removes items of lists in brackets, each with the comma after it or, if it is the last one, before it."""
    for start, end in sorted(set(cuts), reverse=True):
        after = text[end:].lstrip()
        if after.startswith(","):
            rest = after[1:].lstrip()
            text = text[:start] + rest
        else:
            text = text[:start].rstrip().removesuffix(",") + text[end:]
    return text
