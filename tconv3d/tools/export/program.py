"""Knows the declarations of a program: which names a namespace or a struct declares, and what it has of each.

A `Unit` is the text of one header after the preprocessor, with the namespace that it is in. This module reads
declarations and does not know what they mean; `trace` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .syntax import Node, SyntaxNotReadError, parse


@dataclass(eq=False)
class Declaration:
    """One declared name. `node` is what has to go when the declaration goes, `name_node` where the name stands.

    `kind` is struct, function, constant (static constexpr), alias, enum, member (data of a struct), variable or using
    (`using Base::name`).
    """

    kind: str
    name: str
    node: Node  # the whole declaration, with its `template <...>`
    core: Node  # the declaration without `template <...>`; for a declarator list, the declarator
    parameters: list[Node] = field(default_factory=list)  # the parameters of its template
    members: dict[str, list[Declaration]] = field(default_factory=dict)  # the members of a struct by name
    arguments: list[Node] | None = None  # template arguments of a specialisation, such as <true>
    value: Node | None = None  # the initializer of a constant or a member
    outer: Declaration | None = None
    namespace: str = ""

    @property
    def function(self) -> Node:
        """The node with the parameters of a function."""
        return _function_declarator(self.core)

    @property
    def body(self) -> Node | None:
        return self.core.get("body")


class Unit:
    """The declarations of one header."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.root = parse(text)
        self.declarations = [found for node in self.root.kids for found in _declarations(node, None, "")]


def _function_declarator(node: Node) -> Node:
    found = node.get("declarator")
    while found is not None and found.kind not in ("function_declarator", "operator_cast"):
        inner = found.get("declarator") or (found.kids[-1] if found.kids else None)
        found = inner
    if found is None:
        raise SyntaxNotReadError(f"no function: {node.text[:60]!r}")
    return found


def declarator_name(node: Node | None) -> Node | None:
    """Returns where a declarator, such as `(&slabs)[4]` or `*x = 3`, has its name."""
    while node is not None and node.kind not in ("identifier", "field_identifier", "type_identifier"):
        node = node.get("declarator") or next(
            (k for k in node.kids if k.kind.endswith(("declarator", "identifier"))), None
        )
    return node


def _declarations(node: Node, outer: Declaration | None, namespace: str) -> Iterator[Declaration]:
    whole, parameters = node, list[Node]()
    if node.kind == "namespace_definition":
        path = node.need("name").text
        for kid in node.need("body").kids:
            yield from _declarations(kid, outer, path)
        return
    while node.kind == "template_declaration":
        parameters += node.need("parameters").kids
        node = next(k for k in node.kids if k.kind not in ("template_parameter_list", "comment"))

    def made(kind: str, name: str, core: Node, value: Node | None = None) -> Declaration:
        return Declaration(kind, name, whole, core, parameters, {}, None, value, outer, namespace)

    if node.kind == "alias_declaration":
        yield made("alias", node.need("name").text, node)
    elif node.kind == "using_declaration":
        yield made("using", node.kids[0].text.split("::")[-1], node)
    elif node.kind == "function_definition":
        name = declarator_name(_function_declarator(node))
        yield made("function", name.text if name else "operator", node)
    elif node.kind == "struct_specifier":
        yield _struct(node, made("struct", "", node))
    elif node.kind in ("field_declaration", "declaration"):
        yield from _fields(node, made)
    elif node.kind == "enum_specifier":
        yield made("enum", node.need("name").text, node)
    elif node.kind not in ("comment", "static_assert_declaration", "preproc_call", "access_specifier"):
        raise SyntaxNotReadError(f"a declaration of the kind {node.kind}: {node.text[:80]!r}")


def _struct(node: Node, made: Declaration) -> Declaration:
    name = node.need("name")
    if name.kind == "template_type":
        made.arguments = name.need("arguments").kids
        name = name.need("name")
    made.name = name.text
    body = node.get("body")
    for kid in body.kids if body else []:
        for member in _declarations(kid, made, ""):
            made.members.setdefault(member.name, []).append(member)
    return made


def _fields(node: Node, made: object) -> Iterator[Declaration]:
    """Reads `static constexpr int kA = 1, kB = 2;`, data members, enumerations and declared structs."""
    assert callable(made)
    kind = node.need("type")
    if kind.kind == "enum_specifier":
        yield made("enum", kind.need("name").text, kind)
        return
    if kind.kind == "struct_specifier" and not node.fields.get("declarator"):
        yield _struct(kind, made("struct", "", kind))
        return
    constant = node.has("type_qualifier", "constexpr")
    declarators = node.fields.get("declarator", [])
    for declarator in declarators:
        if declarator.kind == "function_declarator":
            raise SyntaxNotReadError(f"a function without a body: {node.text[:80]!r}")
        name = declarator_name(declarator)
        assert name is not None
        value = declarator.get("value") or _value_after(node, declarator)
        yield made("constant" if constant else "member", name.text, declarator, value)


def _value_after(node: Node, declarator: Node) -> Node | None:
    """Returns the default value that stands behind a declarator and before the next one."""
    following = [d.start for d in node.fields["declarator"] if d.start > declarator.start]
    end = min(following, default=node.end)
    values = node.fields.get("default_value", [])
    return next((v for v in values if declarator.start < v.start < end), None)


def parameter_name(parameter: Node) -> str:
    """Returns the name of a parameter of a template."""
    found = parameter.get("name") or declarator_name(parameter.get("declarator"))
    if found is None:
        found = next((kid for kid in parameter.kids if kid.kind == "type_identifier"), None)
    return found.text if found is not None else ""
