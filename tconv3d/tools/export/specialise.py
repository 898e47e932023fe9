"""Reduces kernel headers to the source that is needed for the settings the kernels are compiled with.

Folding replaces a condition (`if constexpr`, `if`, `?:`) that has one known value in all settings by the branch it
takes. Pruning removes declarations that no remaining code mentions. Both are cautious: a condition that cannot be
evaluated stays, and a name that is mentioned anywhere keeps all declarations of that name.

This module knows the language, through `cxx`, but no kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ...planning import arguments
from ...planning.launch import Constants
from ...runtime.sources import find
from . import cxx
from .cxx import Declaration, Token

Truth = Callable[[str], "bool | None"]
Settings = dict[str, list[Constants]]  # keyed by kernel

_LINE = 110  # columns of a line, as in .clang-format
_SIZES = {"float": 4, "double": 8, "int": 4, "unsigned": 4, "long long": 8, "unsigned char": 1}
_SIZES_BY_NAME = {"tconv3d::Half": 2, "tconv3d::BFloat16": 2}
_CONSTANT = re.compile(r"k[A-Z]\w*")
_DEFINITION = re.compile(r"\bconstexpr\s+(?:\w+\s+)*?(?:\w+|ptx::\w+)\s+(?=k[A-Z]\w*\s*=)")


class Sources:
    """Reads the headers of the package, or of one other directory, each once."""

    def __init__(self, directory: Path | None = None, emulated: bool = False) -> None:
        self._directories = None if directory is None else (directory,)
        self._defined = frozenset({"TCONV3D_EMULATOR"} if emulated else ())
        self._headers: dict[str, cxx.Header] = {}

    def header(self, name: str) -> cxx.Header:
        if name not in self._headers:
            path = find(name, self._directories)
            if path is None:
                raise cxx.CxxError(f"no header is called {name}")
            text = cxx.resolve(path.read_text(), self._defined)
            text = re.sub(r"^// clang-format (on|off)\n", "", text, flags=re.MULTILINE)
            text = re.sub(r"^ *TCONV3D_ASSUME\([^;]*\);.*\n", "", text, flags=re.MULTILINE)  # emulator's checks
            self._headers[name] = cxx.header(name, text)
        return self._headers[name]

    def __contains__(self, name: str) -> bool:
        return name in self._headers or find(name, self._directories) is not None

    def closure(self, kernel: str) -> list[str]:
        """Returns the headers of a kernel, each after the headers it includes; the kernel's own header is last."""
        found: list[str] = []

        def visit(name: str) -> None:
            if name in self:
                for include in self.header(name).includes:
                    visit(include)
                if name not in found:
                    found.append(name)

        for name in self._generated(kernel):
            visit(name)
        visit(f"{kernel}.cuh")
        if f"{kernel}.cuh" not in found:
            raise cxx.CxxError(f"no kernel is called {kernel}")
        return found

    def _generated(self, kernel: str) -> list[str]:
        """The headers that a kernel's own must follow: those of its arguments' types, and one for each struct that is
        made from their declaration. Args are the kernel's own, other structs may be several kernels'."""
        declared = arguments.declared(kernel)
        if declared is None:
            return []
        names = declared.includes
        for struct in declared.generated:
            names.append(f"{f'{kernel}_arguments' if struct is declared else struct.name}.cuh")
            text = f"namespace tconv3d {{\n{struct.definition}\n}}  // namespace tconv3d"
            self._headers[names[-1]] = cxx.header(names[-1], text)
        return names


@dataclass(frozen=True)
class Part:
    """Holds the needed part of one header."""

    header: str
    comment: str
    namespace: str
    text: str
    kernel: str | None  # owner of the header, or None if kernels share it; `_owner` decides


def specialise(sources: Sources, settings: Settings) -> list[Part]:
    """Returns the reduced headers that the kernels need, in an order in which they can be compiled."""
    order: list[str] = []
    users: dict[str, list[str]] = {}
    for kernel in settings:
        for name in sources.closure(kernel):
            users.setdefault(name, []).append(kernel)
            if name not in order:
                order.append(name)
    own = {f"{kernel}.cuh" for kernel in settings}
    order.sort(key=lambda name: name in own)  # the sort is stable; headers that kernels share come first
    values = {
        kernel: [_values(sources, kernel, constants) for constants in found] for kernel, found in settings.items()
    }
    parsed = {}
    for name in order:
        parsed[name] = cxx.declarations(sources.header(name).body)
        _fold_declarations(parsed[name], _truth([v for kernel in users[name] for v in values[kernel]]))
    kept: set[int] = set()
    for kernel, found in settings.items():
        program = [d for name in sources.closure(kernel) for d in parsed[name]]
        kept |= _reachable(program, _roots(found), values[kernel])
    return [
        Part(
            name,
            sources.header(name).comment,
            sources.header(name).namespace,
            cxx.render(parsed[name], lambda declaration: id(declaration) in kept),
            _owner(name, users[name]),
        )
        for name in order
    ]


def _owner(header: str, users: list[str]) -> str | None:
    name = header.removesuffix(".cuh")
    if name in users:
        return name
    return users[0] if len(users) == 1 and name.startswith(f"{users[0]}_") else None


# ---- values of constants


def _values(sources: Sources, kernel: str, constants: Constants) -> cxx.Evaluator:
    """Returns an evaluator that knows the constants of a kernel's `Config` and the constants derived from them."""
    given = dict(constants)
    definitions = _definitions("\n".join(sources.header(name).body for name in sources.closure(kernel)))
    known: dict[str, int | None] = {}

    def lookup(qualifier: str, name: str) -> int | None:
        if qualifier in ("Config", "C"):
            value = given.get(name)
            return int(value) if isinstance(value, (bool, int)) else None
        if name not in known:
            known[name] = None  # a constant that is defined by itself has no known value
            texts = definitions.get(name, set())
            known[name] = evaluate(next(iter(texts))) if len(texts) == 1 else None
        return known[name]

    def call(qualifier: str, name: str, arguments: list[int]) -> int | None:
        value = given.get(name) if qualifier in ("Config", "C") else None
        for argument in arguments:
            if not isinstance(value, tuple) or not 0 <= argument < len(value):
                return None
            value = value[argument]
        return value if isinstance(value, int) else None

    def size_of(type_: str) -> int | None:
        value = given.get(type_, type_)
        return _SIZES.get(value) or _SIZES_BY_NAME.get(value) if isinstance(value, str) else None

    evaluate = cxx.Evaluator(lookup, call, size_of)
    return evaluate


def _definitions(text: str) -> dict[str, set[str]]:
    """Returns the expressions that define a constant of each name; template parameters get two, so stay unknown."""
    bare = re.sub(r"//[^\n]*", "", text)
    found: dict[str, set[str]] = {}
    for parameters in re.findall(r"template\s*<([^{;]*?)>\s", bare):
        for name in _CONSTANT.findall(parameters):
            found.setdefault(name, set()).update({"a parameter", "of a template"})
    for start in _DEFINITION.finditer(bare):
        rest = cxx.code(bare[start.end() : bare.index(";", start.end()) + 1])
        while rest and _CONSTANT.fullmatch(rest[0].text) and len(rest) > 1 and rest[1].text == "=":
            end = _end_of_expression(rest, 2)
            found.setdefault(rest[0].text, set()).add(" ".join(token.text for token in rest[2:end]))
            rest = rest[end + 1 :]
    return found


def _end_of_expression(found: list[Token], start: int) -> int:
    depth = 0
    for i in range(start, len(found)):
        if depth == 0 and found[i].text in (",", ";"):
            return i
        depth += (found[i].text in "([{") - (found[i].text in ")]}")
    return len(found)


def _truth(values: list[cxx.Evaluator]) -> Truth:
    """Returns a function for the truth of a condition in all settings, which is None if unknown or not the same."""

    def truth(condition: str) -> bool | None:
        found = {None if value is None else bool(value) for value in (evaluate(condition) for evaluate in values)}
        return found.pop() if len(found) == 1 else None

    return truth


# ---- folding


def fold(text: str, truth: Truth) -> str:
    """Replaces every condition whose value is known by the branch it takes."""
    return _fold_choices(_fold_branches(text, truth), truth)


def _fold_declarations(found: list[Declaration], truth: Truth) -> None:
    """Folds each declaration separately: a condition never extends over several declarations."""
    for declaration in found:
        if declaration.children:
            _fold_declarations(declaration.children, truth)
        elif declaration.kind not in ("define", "macro", "section"):
            declaration.text = fold(declaration.text, truth)


def _fold_branches(text: str, truth: Truth) -> str:
    start = 0
    while True:
        found = cxx.code(text)
        for i, token in enumerate(found):
            if token.start < start or token.text != "if":
                continue
            opening = i + 2 if found[i + 1].text == "constexpr" else i + 1
            end = cxx.closing(found, opening)
            value = truth(text[found[opening].end : found[end].start])
            if value is not None:
                text = _decide(text, found, i, end + 1, value)
                start = token.start
                break
            start = token.end
        else:
            return text


def _statement_end(found: list[Token], i: int) -> int:
    """Returns the index of the last token of the statement that begins at token `i`."""
    if found[i].text == "{":
        return cxx.closing(found, i)
    if found[i].text in ("if", "for", "while"):
        opening = next(j for j in range(i, len(found)) if found[j].text == "(")
        end = _statement_end(found, cxx.closing(found, opening) + 1)
        if found[i].text == "if" and end + 1 < len(found) and found[end + 1].text == "else":
            return _statement_end(found, end + 2)
        return end
    while found[i].text != ";":
        i = cxx.closing(found, i) if found[i].text in ("(", "[", "{") else i
        i += 1
    return i


def _decide(text: str, found: list[Token], at: int, then: int, value: bool) -> str:
    """Replaces the `if` at token `at`, whose first branch begins at token `then`, by the branch for `value`."""
    end = _statement_end(found, then)
    branch: tuple[int, int] | None = (then, end) if value else None
    if end + 1 < len(found) and found[end + 1].text == "else":
        other, end = end + 2, _statement_end(found, end + 2)
        branch = branch or (other, end)
    chained = found[at - 1].text == "else"
    alone = not chained and found[at - 1].text != ")"  # a statement of a block, not the body of a loop
    before, rest = text[: found[at].start], text[found[end].end :]
    if branch is None:
        start = found[at - 1].start if chained else found[at].start
        return _without(text, start, found[end].end) if alone or chained else f"{before}{{}}{rest}"
    inner = text[found[branch[0]].start : found[branch[1]].end]
    last = end + 1 < len(found) and found[end + 1].text == "}"
    if inner.startswith("{") and alone and (last or not _declares(inner)):
        inner = _unwrapped(inner)
    if alone and _returns(inner):
        rest = _after_block(rest)
    if inner.startswith("#"):  # a directive must begin its line
        before = before.rstrip(" ")
    return before + inner + rest


_EXPRESSIONS = {"(", "[", ".", "->", "=", "+=", "-=", "*=", "/=", "%=", "|=", "&=", "^=", "++", "--", ";"}
_STATEMENTS = {"return", "if", "for", "while", "else", "break", "continue", "asm"}


def _declares(block: str) -> bool:
    """Says whether a block may declare names, which could clash with others if its braces were removed."""
    inside, i = cxx.code(block)[1:-1], 0
    while i < len(inside):
        name = i
        while name + 2 < len(inside) and inside[name + 1].text == "::":
            name += 2
        following = inside[name + 1].text if name + 1 < len(inside) else ";"
        plain = inside[i].kind != "word" or inside[i].text in _STATEMENTS or following in _EXPRESSIONS
        if not plain:
            return True
        i = _statement_end(inside, i) + 1
    return False


def _unwrapped(block: str) -> str:
    """Returns the inside of a block in braces, dedented by two columns after the first line."""
    lines = [line.rstrip() for line in block[1:-1].strip().split("\n")]
    return "\n".join([lines[0], *(line.removeprefix("  ") for line in lines[1:])])


def _returns(branch: str) -> bool:
    """Says whether the last statement of a branch without braces is a return."""
    found = cxx.code(branch)
    starts, i = [], 0
    while i < len(found):
        starts.append(i)
        i = _statement_end(found, i) + 1
    return bool(starts) and found[starts[-1]].text == "return"


def _after_block(rest: str) -> str:
    """Removes the statements after a return, up to the end of the enclosing block."""
    depth = 0
    for token in cxx.code(rest):
        if token.text == "}" and depth == 0:
            return rest[rest.rfind("\n", 0, token.start) :] if "\n" in rest[: token.start] else rest[token.start :]
        depth += (token.text == "{") - (token.text == "}")
    return rest


def _without(text: str, start: int, end: int) -> str:
    """Removes a statement, with its line and the comment above it."""
    first = text.rfind("\n", 0, start) + 1
    alone = not text[first:start].strip() and text[end : end + 1] in ("", "\n")
    if not alone:
        return text[:start].rstrip(" ") + text[end:]
    before = text[:first]
    while (line := before.rstrip("\n").rsplit("\n", 1)[-1]).lstrip().startswith("//") and before.endswith("\n"):
        before = before[: len(before) - len(line) - 1]
    return before + text[end + 1 :]


_EDGES = {"(", "[", "{", "}", ",", ";", "=", "?", ":", "return", "+=", "-=", "*=", "/=", "%=", "|=", "&=", "^="}


def _fold_choices(text: str, truth: Truth) -> str:
    """Replaces every `condition ? a : b` whose condition has a known value by `a` or `b`."""
    start = 0
    while True:
        found = cxx.code(text)
        for i, token in enumerate(found):
            if token.start < start or token.text != "?":
                continue
            start = token.end
            first = _start_of_condition(found, i)
            value = truth(text[found[first].start : token.start]) if first < i else None
            if value is None or _in_template(found[first:i]):
                continue
            colon, end = _ends_of_choice(found, i)
            chosen = (i + 1, colon) if value else (colon + 1, end)
            inner = text[found[chosen[0]].start : found[chosen[1] - 1].end]
            left, right = found[first].start, found[end - 1].end
            if chosen[1] - chosen[0] == 1 and _needless_brackets(found, first - 1, end):
                left, right = found[first - 1].start, found[end].end
            before = _joined(text[:left], inner + text[right:])
            text = before + inner + text[right:]
            start = len(before)
            break
        else:
            return text


def _in_template(condition: list[Token]) -> bool:
    """Says whether a `<` in the condition may begin template arguments and not be a comparison."""
    before = (a for a, b in pairwise(condition) if b.text == "<")
    return any(token.kind == "word" and not _CONSTANT.fullmatch(token.text) for token in before)


def _joined(before: str, after: str) -> str:
    """Returns the text before an expression; joins a line that ends in `=` with the expression if they fit in one."""
    line = before.rstrip().rsplit("\n", 1)[-1]
    fits = len(line) + 1 + len(after.split("\n", 1)[0]) <= _LINE
    return before.rstrip() + " " if before.rstrip().endswith("=") and fits else before


def _start_of_condition(found: list[Token], question: int) -> int:
    i, depth = question - 1, 0
    while i >= 0:
        if found[i].text in (")", "]", "}"):
            depth += 1
        elif depth and found[i].text in ("(", "[", "{"):
            depth -= 1
        elif depth == 0 and found[i].text in _EDGES:
            break
        i -= 1
    return i + 1


def _ends_of_choice(found: list[Token], question: int) -> tuple[int, int]:
    """Returns the index of the `:` that belongs to a `?`, and of the token after the whole `?:` expression."""
    depth, colon, i = 0, -1, question + 1
    while i < len(found):
        if found[i].text in ("(", "[", "{"):
            i = cxx.closing(found, i)
        elif found[i].text == "?":
            depth += 1
        elif found[i].text == ":" and colon < 0 and depth == 0:
            colon = i
        elif found[i].text == ":" and depth:
            depth -= 1
        elif found[i].text in (")", "]", "}", ",", ";", ":"):
            return colon, i
        i += 1
    raise cxx.CxxError("a choice without an end")


def _needless_brackets(found: list[Token], before: int, after: int) -> bool:
    """Says whether brackets enclose only a `?:` expression, so that they can go when it becomes a single operand."""
    outer = found[before - 1]
    return found[before].text == "(" and found[after].text == ")" and outer.kind == "mark" and outer.text not in ")]>"


# ---- pruning


def _roots(settings: list[Constants]) -> set[str]:
    """Returns the names that a kernel's entry mentions: `run`, `Args`, and the types among its constants."""
    types = (value for constants in settings for _, value in constants if isinstance(value, str))
    return {"run", "Args"}.union(*(cxx.words(value) for value in types))


def _reachable(program: list[Declaration], roots: set[str], values: list[cxx.Evaluator]) -> set[int]:
    """Returns the ids of the declarations that are reachable from the roots through mentioned names."""
    macros = {d.names[0]: _macro(d.text) for d in program if d.kind == "define"}
    structs = {d.names[0] for d in program if d.kind == "struct"}
    count: dict[str, int] = {}
    for declaration in program:
        for name in declaration.names:
            count[name] = count.get(name, 0) + 1
    mentioned, kept, texts = set(roots), set(), list[str]()

    def wanted(declaration: Declaration, inside: bool) -> bool:
        if declaration.kind in ("assert", "other", "section"):
            return inside
        if declaration.kind == "macro":
            name, argument = _specialisation(declaration, macros)
            return name in mentioned and _used(name, argument, texts, values)
        if not mentioned.intersection(declaration.names):
            return False
        overloaded = not inside and count[declaration.names[0]] > 1
        return not overloaded or (cxx.words(_parameters(declaration)) & structs) <= mentioned

    def visit(declarations: Iterable[Declaration], inside: bool) -> bool:
        changed = False
        for declaration in declarations:
            if id(declaration) not in kept and wanted(declaration, inside):
                kept.add(id(declaration))
                text = declaration.head if declaration.children else declaration.text
                if declaration.kind not in ("define", "macro"):
                    texts.append(" ".join(token.text for token in cxx.code(text)))
                own = set() if declaration.kind in ("define", "macro") else set(declaration.names)
                new = _expanded(declaration.text, macros) if declaration.kind == "macro" else cxx.words(text)
                mentioned.update(new - own if declaration.kind == "struct" else new)
                changed = True
            if id(declaration) in kept and declaration.children:
                changed |= visit(declaration.children, True)
        return changed

    while visit(program, False):
        pass
    return kept


def _parameters(declaration: Declaration) -> str:
    """Returns the parameters of a function or the template arguments of a struct, which tell overloads apart."""
    text = re.sub(r"//[^\n]*\n", "", declaration.signature)
    if declaration.kind == "struct":
        return " ".join(re.findall(r"(?:struct|class)\s+\w+\s*<([^>]*)>", text))
    return text[text.find(declaration.names[0] + "(") + len(declaration.names[0]) :]


def _macro(text: str) -> tuple[list[str], str]:
    """Returns the parameters and the body of a macro, given its `#define`."""
    whole = text[text.index("#") :].replace("\\\n", " ")
    found = re.match(r"#\s*define\s+\w+(?:\(([^)]*)\))?(.*)", whole, re.DOTALL)
    assert found is not None
    parameters = [name.strip().replace("...", "__VA_ARGS__") for name in (found.group(1) or "").split(",")]
    return [name for name in parameters if name], found.group(2)


def _arguments(call: str) -> list[str]:
    found = cxx.code(call)
    opening = next(i for i, token in enumerate(found) if token.text == "(")
    inside = found[opening + 1 : cxx.closing(found, opening)]
    commas = [-1, *(i for i, token in enumerate(inside) if token.text == ","), len(inside)]
    return [" ".join(t.text for t in inside[a + 1 : b]) for a, b in pairwise(commas)]


def _specialisation(call: Declaration, macros: dict[str, tuple[list[str], str]]) -> tuple[str, str]:
    """Returns the template that a macro call specialises, and the argument: `TCONV3D_MATRIX_MULTIPLY(24, ...)`."""
    parameters, body = macros[call.names[0]]
    found = re.search(r"\bstruct\s+(\w+)<(\w+)>", body)
    if found is None or found.group(2) not in parameters:
        raise cxx.CxxError(f"a macro that specialises no template: {call.text}")
    return found.group(1), _arguments(call.text)[parameters.index(found.group(2))]


def _used(name: str, argument: str, texts: list[str], values: list[cxx.Evaluator]) -> bool:
    """Says whether a text mentions `name<expression>` whose expression equals `argument` or has no known value."""
    for text in texts:
        for expression in re.findall(rf"(?<!struct )\b{name} <([^<>;{{}}]*)>", text):
            found = {evaluate(expression) for evaluate in values}
            if None in found or int(argument) in found:
                return True
    return False


def _expanded(call: str, macros: dict[str, tuple[list[str], str]]) -> set[str]:
    """Returns all names in the expansion of a macro call, including the names of the macros."""
    found: set[str] = set()
    work = [(cxx.code(call)[0].text, _arguments(call))]
    while work:
        name, arguments = work.pop()
        found.add(name)
        parameters, body = macros[name]
        if parameters[-1:] == ["__VA_ARGS__"]:
            rest = len(parameters) - 1
            arguments = [*arguments[:rest], ", ".join(arguments[rest:])]
        for parameter, argument in zip(parameters, arguments, strict=True):
            plain = argument.replace("\\", r"\\")  # re.sub would interpret a single backslash
            body = re.sub(rf"##\s*{parameter}\b|\b{parameter}\b", plain, body)
        body = body.replace("##", "")
        for token in cxx.code(body):
            if token.text in macros:
                takes = bool(macros[token.text][0])
                work.append((token.text, _arguments(body[token.start :]) if takes else []))
        found |= cxx.words(body)
    return found
