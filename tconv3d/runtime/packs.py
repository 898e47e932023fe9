"""Reads and writes packs: files with compiled kernels and planners' choices, for machines that cannot compile them.

    packs.write(path, contents, sources, entries)   # entries: name, description and payload of each
    packs.load(path)                                # from now on `find` looks in this pack, too
    packs.find(name)                                # the payload of an entry in any loaded pack, or None

A pack is one file:

    16 bytes    "tconv3d pack 1" and two line feeds
    8 bytes     length of the index, little-endian
    32 bytes    SHA-256 of the index
    index       JSON: the version that wrote the pack, what it is for, and name, length and SHA-256 of each entry
    payloads    of the entries, in the order of the index, without gaps

Nothing in a pack is a pickle or Python code, and reading one runs nothing of it. `load` checks the length of the
file, the index and every payload before anything is used, in pieces of bounded size. Like a compiled extension, a
pack is trusted for what its kernels do once they are launched: a file that every user can write is refused.

    TCONV3D_PRECOMPILED     packs to load when the first kernel is looked up, separated like the paths in PATH. A pack
                            that cannot be used is left out with a warning.

This module knows nothing of what the payloads mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from . import plain

VARIABLE = "TCONV3D_PRECOMPILED"
LARGEST_INDEX = 2**24  # bytes: about 60,000 entries
PIECE = 2**20  # bytes that are read at once while a pack is checked

_MAGIC = b"tconv3d pack 1\n\n"
_HEADER_BYTES = len(_MAGIC) + 8 + hashlib.sha256().digest_size
_NAME = re.compile(r"[0-9a-f]{64}\.[a-z]+")


class PackError(ValueError):
    """Says why a file is not a pack that this version can use."""


@dataclass(frozen=True)
class Content:
    """Says in words what a part of a pack was made for."""

    gpu: str  # name, compute capability and multiprocessors
    layer: str
    dtype: str
    layout: str
    passes: str
    volumes: str  # the input shapes, and whether the kernels of other volumes are included

    def __str__(self) -> str:
        return f"{self.gpu}: {self.layer}, {self.dtype}, {self.layout}, {self.passes}, {self.volumes}"


@dataclass(frozen=True)
class Entry:
    """Describes an entry of a pack."""

    name: str
    what: str  # a description for people: a kernel with its architecture and compiler, or a choice
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """Lists what a pack holds."""

    version: str  # version of the package that wrote the pack
    sources: str  # digest of the kernels' and planners' sources, which the names of entries depend on
    contents: tuple[Content, ...]
    entries: tuple[Entry, ...]


class Place(NamedTuple):
    """Says where an entry lies in its file."""

    entry: Entry
    start: int  # offset in bytes


@dataclass
class Pack:
    """Holds a loaded pack: its index in memory, and its payloads in an open file."""

    path: Path
    index: Index
    descriptor: int  # file descriptor of the open pack
    places: dict[str, Place] = field(default_factory=dict)

    def read(self, name: str) -> bytes | None:
        """Returns the payload of an entry, or None if the pack has none of this name."""
        place = self.places.get(name)
        if place is None:
            return None
        payload = os.pread(self.descriptor, place.entry.bytes, place.start)
        if hashlib.sha256(payload).hexdigest() != place.entry.sha256:
            raise PackError(f"{self.path} was changed after it had been loaded: {place.entry.what} is damaged")
        return payload

    def described(self, most: int) -> str:
        """Returns what the pack was made for, a line for each part, and how many more there are than `most`."""
        lines = [f"  {content}" for content in self.index.contents[:most]]
        more = len(self.index.contents) - most
        return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])

    @property
    def summary(self) -> str:
        """The pack in one line: its path, number of entries, and the GPUs it was made for."""
        gpus = ", ".join(dict.fromkeys(content.gpu for content in self.index.contents)) or "no GPU"
        return f"{self.path}: {len(self.places)} entries for {gpus}"


def write(
    path: Path, version: str, sources: str, contents: Sequence[Content], entries: Iterable[tuple[str, str, bytes]]
) -> Index:
    """Writes a pack under a temporary name, then renames it; `entries` are names, descriptions and payloads."""
    kept = {name: (what, payload) for name, what, payload in entries}
    listed = [Entry(name, what, len(data), hashlib.sha256(data).hexdigest()) for name, (what, data) in kept.items()]
    index = Index(version, sources, tuple(contents), tuple(listed))
    text = plain.dumps(index).encode()
    if len(text) > LARGEST_INDEX:
        raise ValueError(f"the index has {len(text)} bytes, more than {LARGEST_INDEX}: write several packs")
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb") as stream:
            stream.write(_MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text)
            for _, data in kept.values():
                stream.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return index


# ---- reading


def read(path: Path) -> Pack:
    """Opens a pack and checks all of it; raises PackError in words if it cannot be used."""
    try:
        # The file is kept open, so that another file of this name changes nothing. A pipe is not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PackError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PackError(f"{path} is not a file")
        if found.st_mode & stat.S_IWOTH:
            raise PackError(f"{path} can be written by everybody, and its kernels would run: chmod o-w")
        index, start = _read_index(path, descriptor, found.st_size)
        pack = Pack(path, index, descriptor)
        _place_entries(pack, start, found.st_size)
        _check_payloads(pack)
        return pack
    except BaseException:
        os.close(descriptor)
        raise


def _read_index(path: Path, descriptor: int, size: int) -> tuple[Index, int]:
    """Returns the index and the offset of the first payload."""
    header = os.pread(descriptor, _HEADER_BYTES, 0)
    if not header.startswith(_MAGIC):
        other = len(header) >= len(_MAGIC) and header.startswith(b"tconv3d pack ")
        kind = "a pack of another format" if other else "not a pack"
        raise PackError(f"{path} is {kind}: expected a file that tconv3d.precompile of this version wrote")
    length = int.from_bytes(header[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if len(header) < _HEADER_BYTES or length > size - _HEADER_BYTES:
        raise PackError(f"{path} is cut off: it has {size} bytes, which end before its index does")
    if length > LARGEST_INDEX:
        raise PackError(f"{path} has an index of {length} bytes, more than {LARGEST_INDEX}")
    text = os.pread(descriptor, length, _HEADER_BYTES)
    if hashlib.sha256(text).digest() != header[len(_MAGIC) + 8 :]:
        raise PackError(f"{path} is damaged: its index does not have its checksum")
    try:
        index: Index = plain.loads(text, Index)
    except ValueError as error:
        raise PackError(f"{path} has an index that does not describe a pack: {error}") from error
    return index, _HEADER_BYTES + length


def _place_entries(pack: Pack, start: int, size: int) -> None:
    for entry in pack.index.entries:
        if not _NAME.fullmatch(entry.name) or entry.name in pack.places or entry.bytes < 0:
            raise PackError(f"{pack.path} has an entry that is not valid: {entry.name[:80]!r}, {entry.bytes} bytes")
        pack.places[entry.name] = Place(entry, start)
        start += entry.bytes
    if start != size:
        what = "is cut off" if start > size else "has more than its index says"
        raise PackError(f"{pack.path} {what}: expected {start} bytes, got {size}")


def _check_payloads(pack: Pack) -> None:
    for entry, start in pack.places.values():
        digest, end = hashlib.sha256(), start + entry.bytes
        while start < end and (piece := os.pread(pack.descriptor, min(end - start, PIECE), start)):
            digest.update(piece)
            start += len(piece)
        if digest.hexdigest() != entry.sha256:
            raise PackError(f"{pack.path} is damaged: {entry.what[:200]} does not have its checksum")


# ---- packs of this process

_loaded: list[Pack] = []
_lock = threading.Lock()
_environment_read = False


def load(path: Path) -> Pack:
    """Makes `find` look in a pack, before the packs that were loaded earlier; a file is loaded once."""
    loaded()  # packs of the environment come first
    pack = _usable(path)
    with _lock:
        _loaded[:] = [pack, *(each for each in _loaded if each.path != pack.path)]
    return pack


def unload() -> None:
    """Forgets all packs, and reads the environment variable again at the next look."""
    global _environment_read
    with _lock:
        for pack in _loaded:
            os.close(pack.descriptor)
        _loaded.clear()
        _environment_read = False


def loaded() -> tuple[Pack, ...]:
    """Returns the packs of this process, the one that is looked at first first."""
    global _environment_read
    if not _environment_read:
        with _lock:
            if not _environment_read:
                _loaded.extend(_of_environment())
                _environment_read = True
    return tuple(_loaded)


def find(name: str) -> bytes | None:
    """Returns the payload of an entry of the loaded packs, or None if none of them has it."""
    pack = holder(name)
    return None if pack is None else pack.read(name)


def holder(name: str) -> Pack | None:
    """Returns the pack that `find` reads an entry from, or None."""
    return next((pack for pack in loaded() if name in pack.places), None)


def _of_environment() -> Iterator[Pack]:
    for name in dict.fromkeys(filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))):
        try:
            yield _usable(Path(name))
        except PackError as error:
            warnings.warn(f"tconv3d: a pack that {VARIABLE} names is not used: {error}", RuntimeWarning, stacklevel=4)


def _usable(path: Path) -> Pack:
    pack = read(Path(os.path.abspath(path)))
    if pack.index.sources != fingerprint():
        os.close(pack.descriptor)
        raise PackError(
            f"{pack.path} was written by tconv3d {pack.index.version[:20]} with other kernels or planners than this "
            "installation has, so that none of its kernels would be found: write it with the version that loads it"
        )
    return pack


def fingerprint() -> str:
    """Returns a digest of all sources that the names of entries depend on."""
    from . import cache, sources  # not above, because `cache` imports this module

    return cache.key(sources.digest(sources.all_headers()), sources.program("tconv3d.planning.planner"))
