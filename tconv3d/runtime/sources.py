"""Finds the source files that a cached result depends on, so that the cache key covers these files and no others.

    sources.digest(sources.headers("halo"))            # for a kernel: all headers it includes
    sources.program("tconv3d.families.halo.planner")   # for a planner's choice: all modules it imports

Includes and imports are found in the text, so a file counts even if a condition excludes it. Headers are identified
by name alone: moving a header to another directory of `KERNELS` changes no key. Moving a module changes the import
lines of its users, so choices are searched again; compiled kernels stay valid.

This module knows how files refer to each other, and nothing else of their content.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from . import cache, trust

# KERNELS has every directory with headers of kernels. File names are unique among them, because headers include each
# other by name, and both compilers (NVRTC and the emulator's) get all these directories as include paths.
_ROOT = Path(__file__).parents[1]
KERNELS: tuple[Path, ...] = (_ROOT / "device", *sorted({path.parent for path in _ROOT.glob("families/*/*.cuh")}))

YOUNG_NS = 2_000_000_000  # 2 s, the coarsest resolution of file times among common file systems

_PACKAGE = __name__.split(".")[0]
_STORAGE = frozenset({cache.__name__, trust.__name__, __name__})  # modules that only store choices

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_FROM = re.compile(r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n(]*)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+([^\n]*)", re.MULTILINE)
_COMMENT = re.compile(r"#[^\n]*")

Files = dict[str, Path]


class _Read(NamedTuple):
    """Holds the hash of a file's content, and the files or modules that it includes or imports."""

    hash: bytes
    mentions: tuple[str, ...]


def digest(files: Mapping[str, Path]) -> str:
    """Returns a hash of the names and contents of files, for `cache.key`. A changed file is read again."""
    return cache.key(*(part for name in sorted(files) for part in (name, _read(files[name]).hash)))


# ---- headers


def find(name: str, directories: Sequence[Path] | None = None) -> Path | None:
    """Returns the header of this name in one of the directories (by default the package's), or None."""
    return _index(tuple(KERNELS if directories is None else directories)).get(name)


def all_headers(directories: Sequence[Path] | None = None) -> Files:
    """Returns every header of the directories by its name."""
    return dict(_index(tuple(KERNELS if directories is None else directories)))


def headers(kernel: str, directories: Sequence[Path] | None = None) -> Files:
    """Returns a kernel's header and all headers that it includes, directly or indirectly, by their names.

    Names that are in none of the directories are headers of the system or of another compiler, and are left out.
    """
    return included(f"{kernel}.cuh", directories)


def included(header: str, directories: Sequence[Path] | None = None) -> Files:
    """Returns a header and all headers that it includes, directly or indirectly, by their names."""
    places = _index(tuple(KERNELS if directories is None else directories))
    return _closure(header, places.get, lambda _, path: _read(path).mentions)


def _index(directories: tuple[Path, ...]) -> Mapping[str, Path]:
    changed = tuple(_changed(directory) for directory in directories)
    return (_listed.__wrapped__ if _is_young(max(changed)) else _listed)(directories, changed)


@functools.lru_cache(maxsize=64)
def _listed(directories: tuple[Path, ...], changed: tuple[int, ...]) -> Mapping[str, Path]:
    """Lists headers by name. `changed` (modification times) makes a changed directory a new cache key."""
    found: Files = {}
    for directory in reversed(directories):  # the first directory takes precedence, as for a compiler
        if directory.is_dir():
            found.update({path.name: path for path in directory.iterdir() if path.suffix in (".cuh", ".h", ".cpp")})
    return found


def _changed(directory: Path) -> int:
    try:
        return os.stat(directory).st_mtime_ns
    except FileNotFoundError:
        return 0


def _includes(data: bytes) -> Iterable[str]:
    return [name.decode() for name in _INCLUDE.findall(data)]


# ---- modules


def modules(name: str) -> Files:
    """Returns a module and the package's modules that it imports, directly or indirectly, by their full names."""
    locate = functools.cache(_module_file)  # most modules are imported by several others
    return _closure(name, locate, lambda module, path: _imports(module, path, _read(path).mentions, locate))


@functools.cache
def program(name: str) -> str:
    """Returns the digest of a module and all modules that it imports, computed once per process."""
    return digest(modules(name))


def _module_file(name: str) -> Path | None:
    """Returns the file of a module of this package, or None if the module cannot affect a choice.

    Modules that only store choices are left out, and so is the package's `__init__`, which imports the whole library.
    """
    if not name.startswith(f"{_PACKAGE}.") or name in _STORAGE:
        return None
    path = _ROOT.joinpath(*name.split(".")[1:])
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)


def _statements(data: bytes) -> Iterable[str]:
    """Yields import statements, each as the module and, after a space, the imported names."""
    text = data.decode()
    for dots, base, imported in _FROM.findall(text):
        yield f"{dots}{base} {','.join(_names(imported.strip('()')))}"
    yield from (f"{name} " for imported in _IMPORT.findall(text) for name in _names(imported))


def _names(imported: str) -> list[str]:
    return [part.split()[0] for part in _COMMENT.sub("", imported).split(",") if part.strip()]


def _imports(
    module: str, path: Path, statements: Iterable[str], locate: Callable[[str], Path | None]
) -> Iterable[str]:
    """Yields full names of the modules that import statements may mean. Only a package can contain modules."""
    package = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    for statement in statements:
        base, names = statement.split(" ")
        level = len(base) - len(base.lstrip("."))
        above = package[: len(package) - level + 1] if level else []
        full = ".".join([*above, *filter(None, [base[level:]])])
        yield full
        found = locate(full)
        if found is None or found.name == "__init__.py":
            yield from (f"{full}.{name}" for name in filter(None, names.split(",")))


# ---- shared by headers and modules


def _closure(first: str, locate: Callable[[str], Path | None], names: Callable[[str, Path], Iterable[str]]) -> Files:
    found: Files = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name not in found and (path := locate(name)) is not None:
            found[name] = path
            waiting += names(name, path)
    return found


def _read(path: Path) -> _Read:
    stat = os.stat(path)
    read = _read_once.__wrapped__ if _is_young(stat.st_mtime_ns) else _read_once
    return read(path, stat.st_mtime_ns, stat.st_size)


def _is_young(changed: int) -> bool:
    """Tells whether a file is so new that a further change may leave its modification time the same."""
    return time.time_ns() - changed < YOUNG_NS


@functools.lru_cache(maxsize=1024)
def _read_once(path: Path, changed: int, size: int) -> _Read:
    data = path.read_bytes()
    names = _statements(data) if path.suffix == ".py" else _includes(data)
    return _Read(hashlib.sha256(data).digest(), tuple(names))
