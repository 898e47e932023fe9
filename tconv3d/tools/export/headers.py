"""Reads the headers of kernels as texts of a program: the headers that a kernel includes, its arguments' structs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ...planning import arguments
from ...planning.launch import Constants
from ...runtime.sources import find
from .syntax import Macros, SyntaxNotReadError, normalise, resolve


class Headers:
    """Reads the headers of the package, or of one other directory, each once."""

    def __init__(
        self, directory: Path | None = None, emulated: bool = False, tails: Mapping[str, Constants] | None = None
    ) -> None:
        """`tails`: for kernels whose arguments have the operands of a tail, the constants that say so."""
        self._tails = tails or {}
        self._directories = None if directory is None else (directory,)
        self._defined = frozenset({"TCONV3D_EMULATOR"} if emulated else ())
        self._texts: dict[str, str] = {}
        self._macros = Macros()

    def text(self, name: str) -> str:
        """Returns a header after the preprocessor, but with its `#include`s."""
        if name not in self._texts:
            path = find(name, self._directories)
            if path is None:
                raise SyntaxNotReadError(f"no header is called {name}")
            text = resolve(path.read_text(), self._defined)
            for include in _includes(text):  # whose macros the text may use
                if include in self:
                    self.text(include)
            text = re.sub(r"^// clang-format (on|off)\n", "", text, flags=re.MULTILINE)
            text = re.sub(r"^ *TCONV3D_ASSUME\([^;]*\);.*\n", "", text, flags=re.MULTILINE)  # emulator's checks
            self._texts[name] = normalise(self._macros.expand(text))
        return self._texts[name]

    def __contains__(self, name: str) -> bool:
        return name in self._texts or find(name, self._directories) is not None

    def closure(self, kernel: str) -> list[str]:
        """Returns the headers of a kernel, each after the headers it includes; the kernel's own header is last."""
        found: list[str] = []

        def visit(name: str) -> None:
            if name in self:
                for include in _includes(self.text(name)):
                    visit(include)
                if name not in found:
                    found.append(name)

        for name in self._generated(kernel):
            visit(name)
        visit(f"{kernel}.cuh")
        if f"{kernel}.cuh" not in found:
            raise SyntaxNotReadError(f"no kernel is called {kernel}")
        return found

    def _generated(self, kernel: str) -> list[str]:
        """Returns the headers that must come before a kernel's own: those of its arguments' types, and one for each
        struct that is made from the declaration of the arguments."""
        declared = arguments.declared(kernel, self._tails.get(kernel, ()))
        if declared is None:
            return []
        names = list(declared.includes)
        for struct in declared.generated:
            names.append(f"{f'{kernel}_arguments' if struct is declared else struct.name}.cuh")
            self._texts[names[-1]] = f"namespace tconv3d {{\n{struct.definition}\n}}  // namespace tconv3d\n"
        return names

    def unit_text(self, name: str) -> str:
        """Returns the text of a unit of the program: a header without its `#include`s."""
        return re.sub(r'^#include "[^"]+"\n', "", self.text(name), flags=re.MULTILINE)


def _includes(text: str) -> list[str]:
    return re.findall(r'^#include "([^"]+)"$', text, re.MULTILINE)
