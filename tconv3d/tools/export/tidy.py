"""Lays out C++ text as clang-format does, in the style of this project."""

from __future__ import annotations

import subprocess

from .syntax import MissingParserError

# The style of the repository's .clang-format, which an installed package does not have, but in lines as long as those
# of the Python around it.
LINE = 118
STYLE = (
    f"{{BasedOnStyle: Google, ColumnLimit: {LINE}, AlwaysBreakTemplateDeclarations: No, "
    "PackConstructorInitializers: BinPack}"
)


def tidy(text: str) -> str:
    """Returns the text with the house's indentation and line breaks; what it means does not change."""
    try:
        from clang_format import get_executable
    except ImportError as error:
        raise MissingParserError("exporting needs clang-format: pip install 'tconv3d[export]'") from error
    command = [str(get_executable("clang-format")), "--assume-filename=exported.cu", f"--style={STYLE}"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout
