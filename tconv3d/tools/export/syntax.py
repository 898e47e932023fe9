"""Parses CUDA C++ into trees of `Node`, by tree-sitter and its C++ grammar.

CUDA's qualifiers are no C++: they are blanked before the text is parsed, so that every node's offsets are those of
the text with its qualifiers. The text must be laid out by clang-format, which tells comparisons from templates.
Conditions of the preprocessor are resolved and macros are expanded beforehand (`resolve`, `Macros`), so a tree has
neither. This module does not know any kernel.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

QUALIFIERS = re.compile(
    r"\b(?:__device__|__forceinline__|__global__|__shared__|__constant__|__grid_constant__|__restrict__"
    r"|__align__\(\d+\)|__launch_bounds__\([^()]*\))"
)
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|[A-Za-z_]\w*|##?|.', re.DOTALL)


class MissingParserError(ImportError):
    """Reports that the packages which exporting needs are not installed."""


class SyntaxNotReadError(ValueError):
    """Reports C++ that the grammar does not cover."""


class Node:
    """One node of a tree: its kind, the text it covers, its named children and the children that have a role."""

    __slots__ = ("_source", "end", "fields", "kids", "kind", "parent", "start")

    def __init__(self, kind: str, start: int, end: int, source: str, parent: Node | None) -> None:
        self.kind, self.start, self.end, self.parent, self._source = kind, start, end, parent, source
        self.kids: list[Node] = []
        self.fields: dict[str, list[Node]] = {}

    @property
    def text(self) -> str:
        return self._source[self.start : self.end]

    def get(self, role: str) -> Node | None:
        found = self.fields.get(role)
        return found[0] if found else None

    def need(self, role: str) -> Node:
        return self.fields[role][0]

    def walk(self) -> Iterator[Node]:
        """Yields this node and everything below it, in the order of the text."""
        yield self
        for kid in self.kids:
            yield from kid.walk()

    def has(self, kind: str, text: str) -> bool:
        """Says whether a direct child is of this kind and reads like this."""
        return any(kid.kind == kind and kid.text == text for kid in self.kids)


@functools.cache
def _parser() -> Any:
    try:
        import tree_sitter
        import tree_sitter_cpp
    except ImportError as error:
        raise MissingParserError(
            "exporting needs a C++ parser: pip install 'tconv3d[export]' (tree-sitter, tree-sitter-cpp, clang-format)"
        ) from error
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))


def parse(text: str) -> Node:
    """Returns the tree of a text. All of it is ASCII, so that offsets in bytes are offsets in characters."""
    blank = QUALIFIERS.sub(lambda found: " " * len(found.group()), text)
    # The grammar takes some comparisons `a < b || c > d` for templates, and no `a <= b`. In the house's layout a `<`
    # with spaces around it is a comparison, but for `template <`.
    blank = re.sub(r"(?<!template) <[ \n]", " <=", blank)
    if not blank.isascii():
        raise SyntaxNotReadError("a character outside of ASCII")
    return _converted(_parser().parse(blank.encode()).root_node, text)


def _converted(root: Any, text: str) -> Node:
    """Copies tree-sitter's tree, whose nodes are slow to ask, into ours."""
    top = Node(root.type, root.start_byte, root.end_byte, text, None)
    work = [(root, top)]
    while work:
        theirs, ours = work.pop()
        cursor = theirs.walk()
        if not cursor.goto_first_child():
            continue
        while True:
            child, role = cursor.node, cursor.field_name
            if child.type == "ERROR":
                raise SyntaxNotReadError(f"not understood: {text[child.start_byte - 40 : child.end_byte + 40]!r}")
            if child.is_named or role:
                made = Node(child.type, child.start_byte, child.end_byte, text, ours)
                if child.is_named:
                    ours.kids.append(made)
                if role:
                    ours.fields.setdefault(role, []).append(made)
                if child.child_count:
                    work.append((child, made))
            if not cursor.goto_next_sibling():
                break
    return top


# ---- the preprocessor


def resolve(text: str, defined: frozenset[str]) -> str:
    """Evaluates every `#ifdef` and `#ifndef` with the names in `defined`, and removes `#pragma once`."""
    kept: list[str] = []
    open_: list[bool] = []
    for line in text.splitlines(keepends=True):
        directive = re.match(r"\s*#\s*(ifdef|ifndef|else|endif|if|elif|pragma once)\b\s*(\w*)", line)
        which = directive.group(1) if directive else None
        if directive and which in ("ifdef", "ifndef"):
            open_.append((directive.group(2) in defined) == (which == "ifdef"))
        elif which == "else":
            open_[-1] = not open_[-1]
        elif which == "endif":
            open_.pop()
        elif which in ("if", "elif"):
            raise SyntaxNotReadError(f"a condition that is no #ifdef: {line.strip()}")
        elif which is None and all(open_):
            kept.append(line)
    return "".join(kept)


def normalise(text: str) -> str:
    """Writes `using A::b, typename A::C;` as two declarations that the grammar knows, and `__device__` before
    constexpr functions without it: the library's compiler takes every function for the device's, nvcc does not."""

    def split(found: re.Match[str]) -> str:
        names = [name.strip() for name in found.group(2).split(",")]
        return "\n".join(
            f"{found.group(1)}using {name.split('::')[-1]} = {name};"
            if name.startswith("typename ")
            else f"{found.group(1)}using {name};"
            for name in names
        )

    text = re.sub(r"^([ \t]*static )(constexpr [\w:]+ \w+\()", r"\1__device__ \2", text, flags=re.MULTILINE)
    one = r"(?:typename )?\w+(?:::\w+)+"
    return re.sub(rf"^([ \t]*)using ({one}(?:,\s*{one})*);", split, text, flags=re.MULTILINE)


class Macros:
    """Removes the `#define`s from texts and expands the macros wherever they are used."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[str] | None, str]] = {}

    def expand(self, text: str) -> str:
        kept = re.sub(
            r"(?:^//[^\n]*\n)*^[ \t]*#define (\w+)(\([^)]*\))?((?:\\\n|[^\n])*)\n",
            self._define,
            text,
            flags=re.MULTILINE,
        )
        return self._expanded(kept, frozenset()) if self._known else kept

    def _define(self, found: re.Match[str]) -> str:
        name, parameters, body = found.groups()
        names = None if parameters is None else [each.strip() for each in parameters[1:-1].split(",")]
        self._known[name] = names, re.sub(r"\s*\\\n\s*", " ", body).strip()
        return ""

    def _expanded(self, text: str, hidden: frozenset[str]) -> str:
        result, tokens = "", list(_TOKEN.finditer(text))
        i = 0
        while i < len(tokens):
            word = tokens[i].group()
            i += 1
            if word not in self._known or word in hidden:
                result += word
                continue
            names, body = self._known[word]
            if names is not None:
                given, i = _arguments([token.group() for token in tokens], i)
                body = self._filled(body, names, given, hidden)
            result += _joined(self._expanded(body, hidden | {word}))
        return result

    def _filled(self, body: str, names: list[str], given: list[str], hidden: frozenset[str]) -> str:
        if names[-1] == "...":
            rest = len(names) - 1
            names, given = [*names[:-1], "__VA_ARGS__"], [*given[:rest], ", ".join(given[rest:])]
        values = dict(zip(names, given, strict=True))
        pieces = [token.group() for token in _TOKEN.finditer(body)]
        result, i = "", 0
        while i < len(pieces):
            piece = pieces[i]
            if piece == "#" and i + 1 < len(pieces) and pieces[i + 1] in values:
                result += '"' + values[pieces[i + 1]] + '"'
                i += 1
            elif piece == "##":
                result = result.rstrip()
                while pieces[i + 1].isspace():
                    i += 1
                result += values.get(pieces[i + 1], pieces[i + 1])
                i += 1
            else:
                result += self._expanded(values[piece], hidden) if piece in values else piece
            i += 1
        return result


def _joined(text: str) -> str:
    """Writes neighbouring strings as one."""
    string = r'"((?:[^"\\]|\\.)*)"'
    return re.sub(
        rf"{string}(?:\s+{string})+", lambda found: '"' + "".join(re.findall(string, found.group())) + '"', text
    )


def _arguments(tokens: list[str], at: int) -> tuple[list[str], int]:
    """Returns the arguments of a macro call whose opening bracket is token `at` or later, and where it ends."""
    while tokens[at] != "(":
        at += 1
    depth, found = 0, [""]
    while True:
        token = tokens[at]
        at += 1
        depth += (token == "(") - (token == ")")
        if depth == 0:
            return [argument.strip() for argument in found], at
        if token == "," and depth == 1:
            found.append("")
        elif not (token == "(" and depth == 1):
            found[-1] += token
