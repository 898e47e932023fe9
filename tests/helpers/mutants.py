"""Inserts faults into kernels, and makes the emulator run these kernels in place of the package's own."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

from tconv3d import emulator
from tconv3d.runtime import sources


def copy_headers(directory: Path) -> None:
    """Writes the headers of all kernels into one new directory."""
    directory.mkdir()
    for path in sources.all_headers().values():
        shutil.copy(path, directory)


def mutate(header: str, text: str, replacement: str, directory: Path) -> None:
    """Writes the headers of all kernels into one new directory, with one text of one header replaced."""
    copy_headers(directory)
    file = directory / f"{header}.cuh"
    source = file.read_text()
    count = source.count(text)
    assert count == 1, f"{header}.cuh has {text!r} {count} times: the mutant needs new text"
    file.write_text(source.replace(text, replacement))


def mutate_kernel(kernel: str, text: str, replacement: str, directory: Path) -> None:
    """Writes the headers of all kernels into one new directory, with a text replaced wherever a kernel has it."""
    copy_headers(directory)
    files = [directory / name for name in sources.headers(kernel)]
    found = [file for file in files if text in file.read_text()]
    assert found, f"no header of {kernel} has {text!r}: the mutant needs new text"
    for file in found:
        file.write_text(file.read_text().replace(text, replacement))


@contextlib.contextmanager
def kernel_from(directory: Path, kernel: str) -> Iterator[None]:
    """Makes the emulator compile one kernel from the headers of another directory."""
    load = emulator._load

    def load_mutant(name: str, unit: str, usual: Path | None) -> ctypes.CDLL:
        return load(name, unit, directory if name == kernel else usual)

    emulator._load = load_mutant  # type: ignore[assignment]
    try:
        yield
    finally:
        emulator._load = load
