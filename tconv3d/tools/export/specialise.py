"""Reduces kernel headers to the source that is needed for the constants the kernels are compiled with.

Each round traces every kernel with its constants (`trace`) and writes the headers without what no trace has needed
(`rewrite`, `parameters`), until nothing more goes. A condition that is not the same for all constants stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...planning.launch import Constants
from .headers import Headers
from .parameters import without_unused_parameters
from .program import Unit
from .purity import Purity
from .rewrite import Rewriter
from .syntax import Node
from .trace import Findings, Tracer

Settings = dict[str, list[Constants]]  # keyed by kernel: the sets of constants that it is compiled with
_ROUNDS = 12


@dataclass(frozen=True)
class Part:
    """Holds the needed part of one header: the comment at its top, and the body of its namespace."""

    header: str
    comment: str
    namespace: str
    text: str
    kernel: str | None  # the kernel whose `Args` it knows, or None


def specialise(headers: Headers, settings: Settings) -> list[Part]:
    """Returns the reduced headers that the kernels need, in an order in which they can be compiled."""
    closures = {kernel: headers.closure(kernel) for kernel in settings}
    order = list(dict.fromkeys(name for closure in closures.values() for name in closure))
    texts = {name: headers.unit(name).text for name in order}
    for _ in range(_ROUNDS):
        units = {name: Unit(name, texts[name]) for name in order}
        findings = _trace(units, closures, settings)
        purity = Purity(units.values())
        written = {name: Rewriter(units[name], findings, purity.is_pure).rewritten() for name in order}
        if written == texts:
            written = without_unused_parameters(units, findings, purity)
            if written == texts:
                break
        texts = written
    return _parts(texts, closures)


def _trace(units: Mapping[str, Unit], closures: Mapping[str, list[str]], settings: Settings) -> Findings:
    """Traces all kernels. Where one set of constants ends a function early and another goes on, what follows is
    compiled for both, so it is traced for both: in a second attempt, when such places are known."""
    mixed: set[Node] = set()
    while True:
        findings = Findings(mixed=set(mixed))
        for kernel, closure in closures.items():
            for constants in settings[kernel]:
                Tracer([units[name] for name in closure], dict(constants), findings).run()
        found = {node for node, truth in findings.truth.items() if node.kind == "if_statement" and len(truth) > 1}
        if found <= mixed:
            return findings
        mixed |= found


def _parts(texts: Mapping[str, str], closures: Mapping[str, list[str]]) -> list[Part]:
    """Splits every text, and gives headers that know a kernel's `Args` to that kernel."""
    parts: list[Part] = []
    owned = {kernel: _owners(texts, closure) for kernel, closure in closures.items()}
    for kernel in (None, *closures):
        for name in dict.fromkeys(each for closure in closures.values() for each in closure):
            is_owned = {k for k, found in owned.items() if name in found}
            if kernel in is_owned or (kernel is None and not is_owned):
                part = _part(name, texts[name], kernel)
                if part is not None:
                    parts.append(part)
    return parts


def _owners(texts: Mapping[str, str], closure: list[str]) -> set[str]:
    """Returns the headers of a kernel that mention its `Args`, or structs of headers that do."""
    found: set[str] = set()
    names = {"Args"}
    for name in closure:  # each after the headers that it needs
        code = re.sub(r"//[^\n]*", "", texts[name])
        in_template = re.search(r"\bclass Args\b", code) is not None
        words = set(re.findall(r"\w+", code)) - ({"Args"} if in_template else set())
        if names & words:
            found.add(name)
            names |= set(re.findall(r"\bstruct\s+(?:alignas\([^{]*\)\s*)?(\w+)", code)) | set(
                re.findall(r"^\w[^\n;{}=]*?\b(\w+)\([^;{}]*\)\s*\{", code, re.MULTILINE)
            )
    return found


def _part(name: str, text: str, kernel: str | None) -> Part | None:
    whole = re.fullmatch(r"\s*((?://[^\n]*\n|\s)*)namespace ([\w:]+) \{\n(.*)\n\}\s*(?://[^\n]*)?\s*", text, re.DOTALL)
    if whole is None or not whole.group(3).strip():
        return None
    return Part(name, whole.group(1).strip("\n"), whole.group(2), whole.group(3).strip("\n"), kernel)
