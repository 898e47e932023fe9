"""Reads C++ as this project writes it: tokens, declarations with the names they declare, integer expressions.

The reader is no compiler: it relies on this project's style (one namespace per header, constants called kName,
clang-format's layout). For C++ that it does not understand it returns None or raises `CxxError`. It does not know any
kernel.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<word>[A-Za-z_]\w*)
    |(?P<number>(?:0[xX][0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?(?:[pP][+-]?\d+)?|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\w*)
    |(?P<mark>::|->|<<=|>>=|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|\#\#|<<|\S)
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_OPEN, _CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}


class CxxError(ValueError):
    """Reports C++ that this reader does not understand."""


class Token(NamedTuple):
    kind: str  # comment, directive, string, word, number, mark
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@functools.lru_cache(maxsize=8192)  # every kernel and every export read the common headers again
def tokens(text: str) -> tuple[Token, ...]:
    return tuple([Token(str(found.lastgroup), found.group(), found.start()) for found in _TOKEN.finditer(text)])


def code(text: str) -> list[Token]:
    """Returns the tokens that are neither comments nor preprocessor directives."""
    return [token for token in tokens(text) if token.kind not in ("comment", "directive")]


def words(text: str) -> set[str]:
    """Returns the identifiers in code and in preprocessor directives, without comments and strings."""
    found = set()
    for token in tokens(text):
        if token.kind == "word":
            found.add(token.text)
        elif token.kind == "directive":
            found |= words(token.text.replace("#", " ").replace("\\\n", " "))
    return found


def closing(found: Sequence[Token], index: int) -> int:
    """Returns the index of the bracket that closes the one at `index`."""
    depth = 0
    for i in range(index, len(found)):
        if found[i].kind == "mark" and found[i].text in _OPEN:
            depth += 1
        elif found[i].kind == "mark" and found[i].text in _CLOSE:
            depth -= 1
            if depth == 0:
                return i
    raise CxxError(f"a bracket is never closed: {found[index].text!r}")


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
            raise CxxError(f"a condition that is no #ifdef: {line.strip()}")
        elif which is None and all(open_):
            kept.append(line)
    return "".join(kept)


# ---- headers and declarations


@dataclass
class Header:
    """Holds one file: the comment at its top, the headers it includes, and the body of its namespace."""

    name: str
    comment: str
    includes: tuple[str, ...]
    namespace: str  # empty if the file has no code; `body` is then empty too
    body: str


def header(name: str, text: str) -> Header:
    """Parses the text of a file whose `#ifdef`s `resolve` has evaluated."""
    comment = re.match(r"(?://[^\n]*\n)*", text)
    assert comment is not None
    rest = text[comment.end() :]
    includes = tuple(re.findall(r'^#include "([^"]+)"$', rest, re.MULTILINE))
    rest = re.sub(r'^#include "[^"]+"\n', "", rest, flags=re.MULTILINE).strip()
    whole = re.fullmatch(r"namespace ([\w:]+) \{\n(.*)\n\}  // namespace [\w:]+", rest, re.DOTALL)
    if whole is None and rest:
        raise CxxError(f"{name} is not one namespace and nothing else")
    namespace, body = (whole.group(1), whole.group(2)) if whole else ("", "")
    return Header(name, comment.group(), includes, namespace, body.strip("\n"))


@dataclass
class Declaration:
    """Holds one declaration with the comment above it.

    `kind` is struct, function, constant (static constexpr), using (also enum), define, macro (the call of a macro),
    assert, section (a comment that stands alone) or other (such as data members, which are never left out).
    """

    kind: str
    text: str
    names: tuple[str, ...]
    head: str = ""  # text of a struct up to its brace, or signature of a function
    tail: str = ""  # text of a struct from its closing brace on
    children: list[Declaration] = field(default_factory=list)
    gap: str = "\n"  # newlines between the previous declaration and this one

    @property
    def signature(self) -> str:
        return self.head or self.text

    def render(self, keep: Callable[[Declaration], bool]) -> str:
        if self.kind != "struct" or not self.children:
            return self.text
        return self.head + "\n" + render(self.children, keep) + "\n" + self.tail


def render(declarations: list[Declaration], keep: Callable[[Declaration], bool]) -> str:
    """Writes the declarations that `keep` accepts, and section comments whose section has such a declaration."""
    lines: list[str] = []
    for i, declaration in enumerate(declarations):
        if declaration.kind == "section":
            rest = declarations[i + 1 :]
            following = next((j for j, d in enumerate(rest) if d.kind == "section"), len(rest))
            wanted = any(keep(d) for d in rest[:following])
        else:
            wanted = keep(declaration)
        if wanted:
            lines.append((declaration.gap if lines else "") + declaration.render(keep))
    return "".join(lines)


def declarations(text: str) -> list[Declaration]:
    """Parses the declarations in the body of a namespace or of a struct."""
    found: list[Declaration] = []
    end = 0
    for piece, start in _pieces(text):
        between = text[end:start]
        gap = "\n\n" if between.count("\n") > 1 else "\n"
        end = start + len(piece)
        indent = between[between.rfind("\n") + 1 :]
        declaration = _declaration(indent + piece)
        declaration.gap = gap
        found.append(declaration)
    return found


def _pieces(text: str) -> Iterator[tuple[str, int]]:
    """Yields the text of each declaration with its comment, and the offset where it begins."""
    found = tokens(text)
    start: int | None = None
    begun = False  # whether the declaration has code so far, not only comments
    i = 0
    while i < len(found):
        token = found[i]
        if start is None:
            start = token.start
        following = found[i + 1] if i + 1 < len(found) else None
        end = None
        if token.kind == "comment":
            gap = text[token.end : following.start] if following else "\n\n"
            if not begun and gap.count("\n") > 1:
                end = token.end
        elif token.kind == "directive":
            if not begun:
                end = token.end
        else:
            begun = True
            if token.text in _OPEN:
                i = closing(found, i)
                following = found[i + 1] if i + 1 < len(found) else None
                if token.text == "{" and _ends_with_brace(text[start : found[i].end]):
                    end = found[i].end
            elif token.text == ";":
                end = token.end
        if end is not None:
            # A comment at the end of a line belongs to the declaration before it.
            if following and following.kind == "comment" and "\n" not in text[end : following.start]:
                i += 1
                end = found[i].end
            yield text[start:end], start
            start, begun = None, False
        i += 1
    if start is not None:
        raise CxxError(f"a declaration without an end: {text[start : start + 80]!r}")


def _ends_with_brace(text: str) -> bool:
    """Says whether a declaration ends with its closing brace, as functions do; structs end with a semicolon."""
    if _struct(text) or re.search(r"\benum\b", _uncommented(text).split("{")[0]):
        return False
    depth = 0
    for token in _after_template(code(text)):
        depth += (token.text in _OPEN) - (token.text in _CLOSE)
        if depth == 0 and token.text == "=":
            return False
        if depth == 0 and token.text == ")":
            return True
    return False


_TEMPLATE = r"(?:template\s*<[^{;]*?>\s*)*"


def _uncommented(text: str) -> str:
    return re.sub(r"//[^\n]*\n", "", text).strip()


def _struct(text: str) -> re.Match[str] | None:
    bare = _uncommented(text)
    alignment = r"(?:alignas\((?:[^()]|\([^()]*\))*\)\s*)?"
    return re.match(rf"{_TEMPLATE}(?:struct|class|union)\s+{alignment}(\w+)(<[^>]*>)?", bare)


def _declaration(text: str) -> Declaration:
    found = tokens(text)
    body = [token for token in found if token.kind != "comment"]
    if not body:
        return Declaration("section", text, ())
    if body[0].kind == "directive":
        name = re.match(r"\s*#\s*define\s+(\w+)", body[0].text)
        return Declaration("define" if name else "other", text, (name.group(1),) if name else ())
    if body[0].text == "static_assert":
        return Declaration("assert", text, ())
    if body[0].text == "using":
        place = next(i for i, token in enumerate(body) if token.text in ("=", ";"))
        return Declaration("using", text, (body[place - 1].text,))
    if (named := _struct(text)) is not None:
        return _struct_declaration(text, found, named.group(1))
    if re.search(r"\benum\b", _uncommented(text).split("{")[0]):
        name = re.search(r"\benum\s+(?:class\s+)?(\w+)", text)
        return Declaration("using", text, (name.group(1),) if name else ())
    if re.fullmatch(r"[A-Z][A-Z0-9_]+", body[0].text) and body[1].text == "(":
        return Declaration("macro", text, (body[0].text,))
    return _function_or_variable(text, body)


def _struct_declaration(text: str, found: Sequence[Token], name: str) -> Declaration:
    place = next((i for i, token in enumerate(found) if token.text == "{"), None)
    if place is None:  # forward declaration
        return Declaration("struct", text, (name,), head=text)
    end = closing(found, place)
    inside = text[found[place].end : found[end].start]
    indent = re.match(r"[ \t]*", text)
    assert indent is not None
    return Declaration(
        "struct",
        text,
        (name,),
        head=text[: found[place].end],
        tail=indent.group() + text[found[end].start :],
        children=declarations(inside),
    )


def _after_template(found: list[Token]) -> list[Token]:
    """Returns the tokens of a declaration after its `template <...>`."""
    while found and found[0].text == "template":
        depth = 0
        for i, token in enumerate(found[1:], 1):
            depth += {"<": 1, ">": -1}.get(token.text, 0)
            if depth == 0:
                found = found[i + 1 :]
                break
        else:
            raise CxxError("template parameters without an end")
    return found


_ATTRIBUTES = {"__launch_bounds__", "alignas", "__align__", "decltype", "__attribute__", "sizeof"}


def _function_or_variable(text: str, body: list[Token]) -> Declaration:
    body = _after_template(body)
    depth = 0
    names: list[str] = []
    for i, token in enumerate(body):
        if depth == 0 and token.text == "operator":
            return Declaration("other", text, ())
        if depth == 0 and token.text == "=":
            names.append(body[i - 1].text)
        called = depth == 0 and token.text == "(" and body[i - 1].kind == "word"
        if called and body[i - 1].text not in _ATTRIBUTES and not names:
            brace = next((t for t in body[i:] if t.text in ("{", ";")), None)
            head = text[: brace.start] if brace else text
            return Declaration("function", text, (body[i - 1].text,), head=head)
        depth += (token.text in _OPEN) - (token.text in _CLOSE)
    if {"static", "constexpr"} <= {token.text for token in body[:4]}:
        return Declaration("constant", text, tuple(names))
    return Declaration("other", text, tuple(names))


# ---- integer expressions


Lookup = Callable[[str, str], "int | None"]  # arguments: qualifier ("Config", "", ...) and name
Call = Callable[[str, str, "list[int]"], "int | None"]

_PRECEDENCE = {
    "||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, ">": 7, "<=": 7, ">=": 7,
    "<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "%": 10,
}  # fmt: skip


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: dict[str, Callable[[int, int], int]] = {
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _truncated,
    "%": lambda a, b: a - b * _truncated(a, b),
}


class Evaluator:
    """Computes the value of an integer expression, or None if it depends on an unknown part."""

    def __init__(self, lookup: Lookup, call: Call, size_of: Callable[[str], int | None]) -> None:
        self._lookup, self._call, self._size_of = lookup, call, size_of
        self._tokens: list[Token] = []
        self._at = 0

    def __call__(self, text: str) -> int | None:
        before = self._tokens, self._at  # evaluating a constant inside an expression calls the evaluator again
        self._tokens, self._at = [token for token in code(text) if token.text != "typename"], 0
        try:
            value = self._ternary()
            return value if self._at == len(self._tokens) else None
        except (CxxError, IndexError, ZeroDivisionError):
            return None
        finally:
            self._tokens, self._at = before

    def _peek(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _take(self, expected: str = "") -> Token:
        token = self._tokens[self._at]
        if expected and token.text != expected:
            raise CxxError(f"expected {expected}, got {token.text}")
        self._at += 1
        return token

    def _ternary(self) -> int | None:
        condition = self._binary(0)
        if self._peek() != "?":
            return condition
        self._take()
        first = self._ternary()
        self._take(":")
        second = self._ternary()
        if condition is None:
            return first if first == second else None
        return first if condition else second

    def _binary(self, least: int) -> int | None:
        left = self._unary()
        while (precedence := _PRECEDENCE.get(self._peek(), 0)) > least:
            mark = self._take().text
            right = self._binary(precedence)
            left = self._join(mark, left, right)
        return left

    @staticmethod
    def _join(mark: str, left: int | None, right: int | None) -> int | None:
        if mark in ("&&", "||"):
            decisive = mark == "||"
            if any(side is not None and bool(side) == decisive for side in (left, right)):
                return int(decisive)
            return None if left is None or right is None else int(not decisive)
        return None if left is None or right is None else _BINARY[mark](left, right)

    def _unary(self) -> int | None:
        if self._peek() in ("!", "-", "+", "~"):
            mark = self._take().text
            value = self._unary()
            if value is None:
                return None
            return {"!": int(not value), "-": -value, "+": value, "~": ~value}[mark]
        return self._primary()

    def _primary(self) -> int | None:
        token = self._take()
        if token.text == "(":
            value = self._ternary()
            self._take(")")
            return value
        if token.kind == "number":
            if re.search(r"[.pP]", token.text) or (re.search(r"[eEfF]", token.text) and token.text[:2] != "0x"):
                raise CxxError("not an integer")
            return int(token.text.rstrip("uUlL"), 0)
        if token.kind != "word":
            raise CxxError(f"not an operand: {token.text}")
        if token.text in ("true", "false"):
            return int(token.text == "true")
        if token.text == "sizeof":
            return self._size_of(self._bracketed("(", ")"))
        if token.text == "static_cast":
            self._bracketed("<", ">")
            return self._primary()
        return self._name(token.text)

    def _bracketed(self, opening: str, end: str) -> str:
        self._take(opening)
        inside = []
        while self._peek() != end:
            inside.append(self._take().text)
        self._take(end)
        return " ".join(inside)

    def _name(self, name: str) -> int | None:
        qualifier = ""
        while self._peek() == "::":
            self._take()
            qualifier, name = name, self._take().text
        if self._peek() != "(":
            return self._lookup(qualifier, name)
        self._take()
        arguments: list[int | None] = []
        while self._peek() != ")":
            arguments.append(self._ternary())
            if self._peek() == ",":
                self._take()
        self._take(")")
        known = [argument for argument in arguments if argument is not None]
        return self._call(qualifier, name, known) if len(known) == len(arguments) else None
