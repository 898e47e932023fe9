"""Reduces kernel headers to the source that is needed for the constants the kernels are compiled with.

Each round traces every kernel with its constants (`trace`) and writes the headers without what no trace has needed
(`rewrite`, `parameters`), until nothing more goes. A condition that is not the same for all constants stays.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...planning.launch import Constants
from .headers import Headers
from .inline import with_inlined_functions
from .members import Key, never_written
from .parameters import without_unused_parameters
from .program import Unit
from .purity import Purity, called_name
from .rewrite import Rewriter
from .syntax import Node
from .trace import Findings, Tracer

Settings = dict[str, list[Constants]]  # keyed by kernel: the sets of constants that it is compiled with
_ROUNDS = 20


@dataclass(frozen=True)
class Part:
    """Holds the needed part of one header: the comment at its top, and the body of its namespace."""

    header: str
    comment: str
    namespace: str
    text: str
    kernel: str | None  # the kernel whose `Args` it knows, or None


def specialise(headers: Headers, settings: Settings, keep_arguments: bool = False) -> list[Part]:
    """Returns the reduced headers that the kernels need, in an order in which they can be compiled.

    `keep_arguments` keeps members of `Args` that no kernel reads, so that all others lie where the library has them.
    """
    closures = {kernel: headers.closure(kernel) for kernel in settings}
    order = list(dict.fromkeys(name for closure in closures.values() for name in closure))
    texts = {name: headers.unit_text(name) for name in order}
    constant: set[Key] = set()
    for _ in range(_ROUNDS):
        units = {name: _unit(name, texts[name]) for name in order}
        findings = _trace(units, closures, settings, keep_arguments, constant)
        purity = Purity(units.values())
        written = {name: Rewriter(units[name], findings, purity.is_pure).rewritten() for name in order}
        if written == texts:
            written = with_inlined_functions(units, findings, purity)
        if written == texts:
            written = without_unused_parameters(units, findings, purity)
        if written == texts:
            break
        texts = written
        constant = never_written(units.values(), findings)
    return _parts(texts, closures)


@functools.lru_cache(maxsize=512)  # most headers do not change from round to round, and exports share their headers
def _unit(name: str, text: str) -> Unit:
    return Unit(name, text)


def _trace(
    units: Mapping[str, Unit],
    closures: Mapping[str, list[str]],
    settings: Settings,
    keep_arguments: bool,
    constant: set[Key],
) -> Findings:
    """Traces all kernels. Where one set of constants ends a function early and another goes on, what follows is
    compiled for both, so it is traced for both: in a second attempt, when such places are known."""
    mixed: set[Node] = set()
    while True:
        findings = Findings(mixed=set(mixed), constant=constant)
        for kernel, closure in closures.items():
            for constants in settings[kernel]:
                tracer = Tracer([units[name] for name in closure], dict(constants), findings)
                tracer.run()
                if keep_arguments:
                    tracer.need_all_of("Args")
        kinds = ("if_statement", "qualified_identifier")  # the latter: Choose<condition, A, B>::type
        found = {node for node, truth in findings.truth.items() if node.kind in kinds and len(truth) > 1}
        if found <= mixed:
            return findings
        mixed |= found


def _parts(texts: Mapping[str, str], closures: Mapping[str, list[str]]) -> list[Part]:
    """Splits every text, and gives headers that know a kernel's `Args` to the kernels that include them."""
    units = {name: _unit(name, text) for name, text in texts.items()}
    clashing = {"Args"} | _declared_twice(units)
    owned = set().union(*(_depending(units, closure, clashing) for closure in closures.values()))
    parts = []
    for kernel, closure in ((None, list(texts)), *closures.items()):
        found = [_part(name, texts[name], kernel) for name in closure if (name in owned) == (kernel is not None)]
        parts += [part for part in found if part is not None]
    return parts


def _declared_twice(units: Mapping[str, Unit]) -> set[str]:
    """Returns the names of structs, types and constants that two headers declare, for two kernels."""
    found: dict[str, set[str]] = {}
    for name, unit in units.items():
        for declaration in unit.declarations:
            if declaration.kind != "function":
                found.setdefault(declaration.name, set()).add(name)
    return {name for name, declaring in found.items() if len(declaring) > 1}


def _depending(units: Mapping[str, Unit], closure: list[str], clashing: set[str]) -> set[str]:
    """Returns the headers of a kernel that declare or mention one of these names, or something of such a header."""
    found: set[str] = set()
    names = set(clashing)
    for name in closure:  # each after the headers that it needs
        declared = {declaration.name for declaration in units[name].declarations}
        if names & (_mentioned(units[name]) | declared):
            found.add(name)
            names |= declared
    return found


def _mentioned(unit: Unit) -> set[str]:
    """Returns the types that a unit mentions and the functions that it calls, without template parameters."""
    nodes = list(unit.root.walk())
    own = {kid.text for node in nodes if node.kind == "type_parameter_declaration" for kid in node.kids}
    types = {node.text for node in nodes if node.kind in ("type_identifier", "namespace_identifier")}
    calls = {node.need("function") for node in nodes if node.kind == "call_expression"}
    return (types | {called_name(call) for call in calls if call.kind in ("identifier", "template_function")}) - own


def _part(name: str, text: str, kernel: str | None) -> Part | None:
    whole = re.fullmatch(
        r"\s*((?://[^\n]*\n|\s)*)namespace ([\w:]+) \{\n(.*)\n\}\s*(?://[^\n]*)?\s*", text, re.DOTALL
    )
    if whole is None or not whole.group(3).strip():
        return None
    return Part(name, whole.group(1).strip("\n"), whole.group(2), whole.group(3).strip("\n"), kernel)
