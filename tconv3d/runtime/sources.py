"""Which source files a result is made from, so that its cache key covers these files and no others.

    sources.digest(sources.headers("halo"))            # a kernel: its header and every header it includes
    sources.program("tconv3d.families.halo.planner")   # a choice: its planner and every module it imports

Includes and imports are read out of the text, so a file counts even where a condition leaves it out. A header is
known by its name alone: a header that moves to another directory of `KERNELS` changes no key. A module that moves
changes the import lines of its users, so choices are searched again; compiled kernels stay.

Knows how files name each other; nothing of what is in them.
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

# Every directory with headers of kernels. File names are unique among them, because headers include each other by
# name, and both compilers get all these directories as include paths.
_ROOT = Path(__file__).parents[1]
KERNELS: tuple[Path, ...] = (_ROOT / "device", *sorted({path.parent for path in _ROOT.glob("families/*/*.cuh")}))

YOUNG_NS = 2_000_000_000  # 2 s, the coarsest clock of a file system in use

_PACKAGE = __name__.split(".")[0]
_STORAGE = frozenset({cache.__name__, trust.__name__, __name__})  # modules that keep choices and make none

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_FROM = re.compile(r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n(]*)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+([^\n]*)", re.MULTILINE)
_COMMENT = re.compile(r"#[^\n]*")

Files = dict[str, Path]


class _Read(NamedTuple):
    """A file's content as a hash, and the names that it mentions."""

    hash: bytes
    mentions: tuple[str, ...]


def digest(files: Mapping[str, Path]) -> str:
    """A hash of the names and contents of files, for `cache.key`. A file is read again when it has changed."""
    return cache.key(*(part for name in sorted(files) for part in (name, _read(files[name]).hash)))


# ---- headers


def find(name: str, directories: Sequence[Path] | None = None) -> Path | None:
    """The header of this name, in one of the directories (those of the package unless others are given)."""
    return _index(tuple(KERNELS if directories is None else directories)).get(name)


def all_headers(directories: Sequence[Path] | None = None) -> Files:
    """Every header of these directories by its name."""
    return dict(_index(tuple(KERNELS if directories is None else directories)))


def headers(kernel: str, directories: Sequence[Path] | None = None) -> Files:
    """A kernel's header and those that it includes, directly or not, by their names.

    A name that is in none of the directories is left out: it is a header of the system, or another compiler's.
    """
    return included(f"{kernel}.cuh", directories)


def included(header: str, directories: Sequence[Path] | None = None) -> Files:
    """A header and those that it includes, directly or not, by their names."""
    places = _index(tuple(KERNELS if directories is None else directories))
    return _closure(header, places.get, lambda _, path: _read(path).mentions)


def _index(directories: tuple[Path, ...]) -> Mapping[str, Path]:
    changed = tuple(_changed(directory) for directory in directories)
    return (_listed.__wrapped__ if _is_young(max(changed)) else _listed)(directories, changed)


@functools.lru_cache(maxsize=64)
def _listed(directories: tuple[Path, ...], changed: tuple[int, ...]) -> Mapping[str, Path]:
    """Names and places of headers, listed again when a file came to a directory or left it."""
    found: Files = {}
    for directory in reversed(directories):  # the first directory has the last word, as for a compiler
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
    """A module and those of the package that it imports, directly or not, by their full names."""
    return _closure(name, _module_file, lambda module, path: _imports(module, path, _read(path).mentions))


@functools.cache
def program(name: str) -> str:
    """The digest of a module and those that it imports, as this process has loaded them: they are read once."""
    return digest(modules(name))


def _module_file(name: str) -> Path | None:
    """The file of a module of this package. Modules that only store choices have no part in them, and the package's
    own `__init__` imports the whole library."""
    if not name.startswith(f"{_PACKAGE}.") or name in _STORAGE:
        return None
    path = _ROOT.joinpath(*name.split(".")[1:])
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)


def _statements(data: bytes) -> Iterable[str]:
    """Import statements, each as the module that it names and, after a space, what it imports from there."""
    text = data.decode()
    for dots, base, imported in _FROM.findall(text):
        yield f"{dots}{base} {','.join(_names(imported.strip('()')))}"
    yield from (f"{name} " for imported in _IMPORT.findall(text) for name in _names(imported))


def _names(imported: str) -> list[str]:
    return [part.split()[0] for part in _COMMENT.sub("", imported).split(",") if part.strip()]


def _imports(module: str, path: Path, statements: Iterable[str]) -> Iterable[str]:
    """Full names of what a module's import statements mention. What comes out of a plain module is no module."""
    package = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    for statement in statements:
        base, names = statement.split(" ")
        level = len(base) - len(base.lstrip("."))
        above = package[: len(package) - level + 1] if level else []
        full = ".".join([*above, *filter(None, [base[level:]])])
        yield full
        found = _module_file(full)
        if found is None or found.name == "__init__.py":
            yield from (f"{full}.{name}" for name in filter(None, names.split(",")))


# ---- both


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
    """Whether a file may change once more and keep its time, because the file system's clock is coarse."""
    return time.time_ns() - changed < YOUNG_NS


@functools.lru_cache(maxsize=1024)
def _read_once(path: Path, changed: int, size: int) -> _Read:
    data = path.read_bytes()
    names = _statements(data) if path.suffix == ".py" else _includes(data)
    return _Read(hashlib.sha256(data).digest(), tuple(names))
