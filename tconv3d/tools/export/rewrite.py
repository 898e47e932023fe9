"""Writes a unit without what a trace has not needed: branches, functions, members, variables and their comments.

The text comes out in lines but not in the house's layout, which `tidy` restores. This module decides nothing by
itself about what a kernel needs; it only asks the findings of a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .program import Declaration, Unit, declarator_name
from .syntax import QUALIFIERS, Node
from .trace import Findings

_CONTAINERS = {"compound_statement", "field_declaration_list", "declaration_list", "translation_unit"}


class Rewriter:
    """Rewrites one unit. A node that has to go is rendered as None."""

    def __init__(self, unit: Unit, findings: Findings, pure: Callable[[Node], bool]) -> None:
        self.f, self.text, self.pure = findings, unit.text, pure
        self.root = unit.root
        self.declared: dict[Node, list[Declaration]] = {}
        for declaration in unit.declarations:
            self._index(declaration)

    def _index(self, declaration: Declaration) -> None:
        self.declared.setdefault(declaration.node, []).append(declaration)
        for found in declaration.members.values():
            for member in found:
                self._index(member)

    def rewritten(self) -> str:
        return self.container(self.root) + "\n"

    # ---- lists of statements or declarations

    def container(self, node: Node) -> str:
        """Renders what is inside the braces of a block, a struct or a namespace."""
        lines: list[str] = []
        comments: list[str] = []  # above the next item
        pending: list[str] = []  # a comment that stands alone, which goes if nothing follows it
        blank = False
        kept_last = False
        end = node.start
        for kid in node.kids:
            between = self.text[end : kid.start]
            gap, beside = between.count("\n") > 1, "\n" not in between and kid is not node.kids[0]
            if gap and comments:
                if not all(line.startswith("#") for line in comments):
                    pending = ["", *comments]
                comments = []
            blank |= gap
            end = kid.end
            if kid.kind == "comment" and beside:
                if kept_last and not comments:
                    lines[-1] += "  " + kid.text
                continue
            if kid.kind == "comment" or self._is_pragma(kid):
                comments.append(kid.text.rstrip("\n"))
                if kid.text.endswith("\n"):
                    end -= 1
                continue
            rendered = self.item(kid)
            if rendered:  # the grammar does not know CUDA's qualifiers, which stand before a declaration
                rendered = " ".join([*QUALIFIERS.findall(between), rendered])
            kept_last = rendered is not None and rendered != ""
            if rendered:
                lines += ["", *pending, ""] if pending else [""] * blank
                lines += [*comments, rendered]
                blank, pending = False, []
            comments = []
        return "\n".join(lines).strip("\n")

    def _is_pragma(self, node: Node) -> bool:
        return node.kind == "preproc_call"

    def item(self, node: Node) -> str | None:
        """Renders a statement or a declaration of a list, without braces around the one branch that is taken."""
        if node in self.declared:
            return self.declaration(node)
        if node.kind == "static_assert_declaration":
            return None if self.f.is_known(node) is not False and node in self.f.truth else self.copy(node)
        if node.kind == "access_specifier":
            return None
        inside_struct = node.parent is not None and node.parent.kind != "compound_statement"
        if inside_struct:
            return self.copy(node)
        return self.statement(node, spliced=True)

    def declaration(self, node: Node) -> str | None:
        found = self.declared[node]
        if found[0].kind in ("member", "constant"):
            return self.fields(node, found)
        if found[0] not in self.f.live:
            return None
        text = self.render(node)
        return f"{text};" if node.kind in ("struct_specifier", "enum_specifier") else text

    def fields(self, node: Node, found: list[Declaration]) -> str | None:
        """Renders `static constexpr int kA = 1, kB = 2;` with the names that are needed."""
        whole = found[0].outer is not None and found[0].outer in self.f.whole
        kept = [each for each in found if each in self.f.live or whole]
        if not kept:
            return None
        head = self.text[node.start : found[0].core.start]
        type_ = node.get("type")
        if type_ is not None:
            head = (
                self.text[node.start : type_.start] + self.render(type_) + self.text[type_.end : found[0].core.start]
            )
        texts = []
        for each in kept:
            value = each.value
            text = self.render(each.core)
            if value is not None and value.start >= each.core.end:
                text += self.text[each.core.end : value.start] + self.render(value)
            texts.append(text)
        return f"{head}{', '.join(texts)};"

    # ---- statements

    def statement(self, node: Node, spliced: bool = False) -> str | None:
        """Renders a statement; `spliced`: it is one of a list, so that several may take its place."""
        if node not in self.f.seen and node.kind not in ("comment", "preproc_call"):
            return None
        if node.kind == "if_statement":
            return self.condition(node, spliced)
        if node.kind == "declaration":
            return self.variables(node)
        effect = node.kids[0] if node.kind == "expression_statement" and node.kids else None
        if effect is not None and (self._is_dead_write(effect) or self._does_nothing(effect)):
            return None
        if node.kind == "static_assert_declaration":
            return self.item(node)
        if node.kind in ("for_statement", "while_statement"):
            return self.loop(node)
        if node.kind == "alias_declaration" and node.need("name") not in self.f.read:
            return None
        return self.render(node)

    def _is_dead_write(self, node: Node) -> bool:
        targets = self.f.writes.get(node)
        if not targets or None in targets:
            return False
        value = node.get("right")
        return not any(self._is_read(each) for each in targets) and (value is None or self.pure(value))

    def _does_nothing(self, node: Node) -> bool:
        """Says whether an expression assigns something to itself, or calls functions or a loop without statements."""
        if node.kind == "assignment_expression" and node.need("operator").text == "=":
            return node.need("left").text == node.need("right").text.strip("()") and self.pure(node.need("right"))
        if node.kind != "call_expression":
            return False
        given = node.need("arguments").kids
        if node.need("function").text.startswith("static_for<") and given[-1].kind == "lambda_expression":
            return not given[-1].need("body").kids
        called = self.f.calls.get(node, set())
        empty = all(each.body is not None and not each.body.kids for each in called)
        return bool(called) and empty and all(map(self.pure, given))

    def _is_read(self, target: Any) -> bool:
        if isinstance(target, Declaration):
            return target in self.f.live or (target.outer is not None and target.outer in self.f.whole)
        return target in self.f.read

    def variables(self, node: Node) -> str | None:
        """Renders a declaration of local variables with those that are read."""
        kept, removed = [], False
        for declarator in node.fields.get("declarator", []):
            name, value = declarator_name(declarator), declarator.get("value")
            is_free = value is None or value.kind == "lambda_expression" or self.pure(value)
            if name is not None and name not in self.f.read and is_free:
                removed = True
            else:
                kept.append(declarator)
        if not removed:
            return self.copy(node)
        if not kept:
            return None
        first = node.fields["declarator"][0]
        return self.text[node.start : first.start] + ", ".join(self.render(each) for each in kept) + ";"

    def loop(self, node: Node) -> str | None:
        if self.f.is_known(node) is False:  # it never runs
            return None
        body = node.need("body")
        rendered = self.branch(body)
        parts = [node.get(role) for role in ("initializer", "condition", "update")]
        if rendered == "{\n\n}" and body.kids:
            header = [part for part in parts if part is not None]
            if all(self._is_local_effect(part) for part in header):
                return None
        out, at = "", node.start
        for part in sorted((part for part in parts if part is not None), key=lambda part: part.start):
            out += self.text[at : part.start] + self.render(part)
            at = part.end
        return out + self.text[at : body.start] + rendered

    def _is_local_effect(self, node: Node) -> bool:
        """Says whether a part of a loop's header only counts a variable of the loop."""
        return not any(each.kind in ("call_expression", "gnu_asm_expression") for each in node.walk())

    def branch(self, node: Node) -> str:
        """Renders a statement that must be one statement, such as the body of a loop."""
        found = self.statement(node)
        if not found:
            return "{\n\n}"
        return found if node.kind == "compound_statement" or found.count(";") <= 1 else f"{{\n{found}\n}}"

    def condition(self, node: Node, spliced: bool) -> str | None:
        known = self.f.is_known(node)
        then, otherwise = node.need("consequence"), node.get("alternative")
        other = otherwise.kids[-1] if otherwise is not None else None
        if known is not None:
            chosen = then if known else other
            if chosen is None:
                return None
            if chosen.kind == "compound_statement" and spliced and self._may_unwrap(node, chosen):
                return self.container(chosen)
            return self.statement(chosen, spliced)
        clause = node.need("condition")
        first = self.branch(then)
        second = self.statement(other) if other is not None else None
        second = None if second == "{\n\n}" else second
        if first == "{\n\n}" and second is None and self.pure(clause):
            return None
        text = self.text[node.start : clause.start] + f"({self.render(clause.need('value'))}) {first}"
        return text + (f" else {second}" if second else "")

    def _may_unwrap(self, node: Node, block: Node) -> bool:
        """Says whether the names that a block declares clash with nothing in the block around it."""
        names = set()
        for kid in block.kids:
            declarators = kid.fields.get("declarator", []) if kid.kind == "declaration" else []
            names |= {name.text for each in declarators if (name := declarator_name(each)) is not None}
            if kid.kind == "alias_declaration":
                names.add(kid.need("name").text)
        outer = node.parent
        while outer is not None and outer.kind != "compound_statement":
            outer = outer.parent
        if outer is None or not names:
            return True
        last = outer.kids[-1] is node
        enclosing: set[str] = set()
        place: Node | None = node
        while place is not None and place.kind not in ("field_declaration_list", "declaration_list"):
            for each in place.kids if place.kind == "compound_statement" else []:
                if each.kind == "declaration":
                    found = (declarator_name(d) for d in each.fields.get("declarator", []))
                    enclosing |= {name.text for name in found if name is not None}
            place = place.parent
        after = (each for kid in outer.kids if kid.start > node.start for each in kid.walk())
        used = set() if last else {each.text for each in after if each.kind in ("identifier", "type_identifier")}
        own = {d for kid in outer.kids if kid.kind == "declaration" for d in self._names(kid)}
        return not names & (used | own) and not (names & enclosing and not last)

    def _names(self, declaration: Node) -> set[str]:
        found = (declarator_name(each) for each in declaration.fields.get("declarator", []))
        return {name.text for name in found if name is not None}

    # ---- everything else

    def render(self, node: Node) -> str:
        kind = node.kind
        if kind in _CONTAINERS:
            inside = self.container(node)
            return f"{{\n{inside}\n}}"
        if kind == "conditional_expression":
            known = self.f.is_known(node)
            if known is not None:
                return self.render(node.need("consequence" if known else "alternative"))
        if kind == "dependent_type" and self._chosen(node.kids[0]) is not None:
            return self.render(node.kids[0])
        if (chosen := self._chosen(node)) is not None:
            return self.render(chosen)
        if kind == "parenthesized_expression" and node.kids[0].kind == "conditional_expression":
            return self.bracketed(node)
        if kind == "binary_expression":
            return self.binary(node)
        if kind == "lambda_expression":
            body = node.need("body")
            return self.text[node.start : body.start] + self.render(body)
        if kind == "if_statement":
            return self.condition(node, spliced=False) or "{\n\n}"
        return self.copy(node)

    def _chosen(self, node: Node) -> Node | None:
        """Returns A or B of `Choose<condition, A, B>::type` if it is always the same."""
        scope = node.get("scope") if node.kind == "qualified_identifier" else None
        if scope is None or scope.kind != "template_type" or scope.need("name").text != "Choose":
            return None
        known, given = self.f.is_known(node), scope.need("arguments").kids
        return None if known is None else given[1 if known else 2]

    def bracketed(self, node: Node) -> str:
        """Renders `(condition ? a : b)`, without brackets if a single operand is left of it."""
        inner = node.kids[0]
        while inner.kind == "conditional_expression" and (known := self.f.is_known(inner)) is not None:
            inner = inner.need("consequence" if known else "alternative")
        text = self.render(inner)
        simple = inner.kind in (
            "number_literal",
            "identifier",
            "qualified_identifier",
            "call_expression",
            "field_expression",
        )
        parent = node.parent.kind if node.parent is not None else ""
        return text if simple and parent in ("binary_expression", "parenthesized_expression") else f"({text})"

    def binary(self, node: Node) -> str:
        mark, first, second = node.need("operator").text.strip(), node.need("left"), node.need("right")
        if mark in ("&&", "||"):
            decisive = mark == "||"
            left, right = self.f.is_known(first), self.f.is_known(second)
            if left is decisive or right is decisive or (left is not None and right is not None):
                return str(
                    left is decisive or right is decisive if decisive else not (left is False or right is False)
                ).lower()
            if left is not None:
                return self.render(second)
            if right is not None:
                return self.render(first)
            return self.copy(node)
        a, b = self.render(first), self.render(second)
        if b == "0" and second.text != "0" and mark in "+-":
            return a
        if a == "0" and first.text != "0" and mark == "+":
            return b
        if b == "1" and second.text != "1" and mark in "*/":
            return a
        return a + self.text[first.end : second.start] + b

    def copy(self, node: Node) -> str:
        """Renders a node as it is, with its children rendered."""
        out, at = [], node.start
        for kid in node.kids:
            out += [self.text[at : kid.start], self.render(kid)]
            at = kid.end
        return "".join([*out, self.text[at : node.end]])
