"""Implements the disk cache of compiled kernels: cubins of the compiler, shared objects of the emulator.

    key = cache.key(sources.digest(files), unit, architecture, *options, compiler_version)
    cubin = cache.get(key, ".cubin", build)       # bytes
    library = cache.path(key, ".so", build)       # a file that can be dlopen'ed
    cache.put(key, ".json", payload)              # replaces an existing entry

`build() -> bytes` is called when the entry is missing or damaged, by one thread of one process at a time; the others
wait for the result (`locks`). An exception in `build` reaches the caller, and nothing is stored.

An entry is one file, `<key><suffix>`: the payload, then a trailer with the payload's checksum. The loader of shared
objects ignores bytes after an ELF image, so `path` needs no second file. An entry is written under a temporary name
and renamed, so a reader sees all of it or nothing. A process that dies while it builds is not waited for, and one
that lives but does not finish is waited for `LOCK_TIMEOUT` seconds.

The cache is never a reason to fail. If it cannot be written (no home, read-only, full disk), one warning says why,
and payloads stay in the memory of this process or, for `path`, in a temporary directory that is removed at exit. A
read-only directory that has entries is still read.

Entries are code that this process will run. Therefore a directory or an entry that another user could have written
(`trust`) is not read; a warning says what to do, and the user's own cache directory is used instead.

Loaded packs (`packs`) are looked at first: an entry of a pack is never built, and needs no directory.

Entries lie in a directory named after the layout of the cache (`LAYOUT`). Entries of an older layout are never read:
`outdated` counts them, and `clear` and `clear_outdated` remove them.

This module knows nothing of CUDA, of C++, or of what the payloads mean.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from . import locks, packs, trust

LOCK_TIMEOUT = 300.0  # seconds, longer than any compile takes, so that only a stuck process exceeds it
LOCKING = True  # whether this process takes locks; if not, other processes may build the same entry
LAYOUT = "v2"  # subdirectory that holds the entries, renamed whenever older entries cannot be read
STALE_AFTER = 3600.0  # seconds after which a lock file or temporary file counts as abandoned

_MAGIC = b"tconv3d1"
_TRAILER_BYTES = hashlib.sha256().digest_size + len(_MAGIC)
# Only files with these names are counted or removed, because the directory may hold other files of the user.
_ENTRY = re.compile(r"[0-9a-f]{64}\.\w+")
_LEFTOVER = re.compile(r"[0-9a-f]{64}\.\w+\.(lock|lock\.claim|[0-9a-f]+\.tmp)")


class Size(NamedTuple):
    """Says how much the cache holds on disk."""

    entries: int
    bytes: int


def directory() -> Path | None:
    """Returns the cache's directory: `TCONV3D_CACHE_DIR`, or `tconv3d` in the user's cache directory.

    The result is None if there is no home directory. The directory need not exist, be writable or be trusted.
    """
    if chosen := os.environ.get("TCONV3D_CACHE_DIR"):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    return _users_own()


def _users_own() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # unset, or relative, which the XDG specification says to ignore
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".cache")
    return Path(base, "tconv3d")


def place() -> Path | None:
    """Returns where entries are: in `directory()`, or in the user's own if another user could have written there.

    The result is None if neither can be used. The place need not exist or be writable.
    """
    root, own = directory(), _users_own()
    if root is None:
        return None
    reason = _distrust(root / LAYOUT)
    if reason is None:
        return root / LAYOUT
    instead = own / LAYOUT if own is not None and _distrust(own / LAYOUT) is None else None
    _warn(
        f"compiled kernels of another user are not run: {reason}, so the cache in {root} is not used. Set "
        "TCONV3D_CACHE_DIR to a directory of your own, or make this one yours alone (chown, chmod go-w). Until then "
        + (f"the cache is {own}." if instead else "compiled kernels are not kept for the next process.")
    )
    return instead


_trusted: set[Path] = set()  # directories that exist and that only this user can write


def _distrust(entries: Path) -> str | None:
    if entries in _trusted:
        return None
    reason = trust.why_not_directory(entries)
    if reason is None and entries.exists():
        _trusted.add(entries)
    return reason


def key(*parts: str | bytes) -> str:
    """Returns the name of an entry: a hash of all parts that its content depends on, and of their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def get(key: str, suffix: str, build: Callable[[], bytes]) -> bytes:
    """Returns the payload of an entry, and builds it if it is missing."""
    return _noted(key + suffix, _fetch(key + suffix, build)[0])


def path(key: str, suffix: str, build: Callable[[], bytes]) -> Path:
    """Returns a file, valid in this process, that begins with an entry's payload, and builds it if it is missing."""
    payload, stored = _fetch(key + suffix, build)
    return stored if stored is not None else temporary(key, suffix, payload)


def temporary(key: str, suffix: str, payload: bytes) -> Path:
    """Returns a file that begins with a payload and is removed when this process ends."""
    with _thread_lock(key + suffix):
        file = _private_directory() / (key + suffix)
        if _read(file) is None:
            _write(file, payload)
        return file


def put(key: str, suffix: str, payload: bytes) -> None:
    """Writes an entry, and replaces an existing one. For payloads that do not come from `get`'s `build`."""
    name, root = key + suffix, place()
    file = root / name if root is not None else None
    with _thread_lock(name), _process_lock(file, lambda: False):
        _unstored.pop(name, None)
        _store(name, file, payload)


def find(key: str, suffix: str) -> bytes | None:
    """Returns the payload of an entry, or None if there is no entry."""
    name = key + suffix
    if (found := packs.find(name)) is None:
        root = place()
        found = _look_up(name, root / name if root is not None else None)
    return None if found is None else _noted(name, found)


_notes: ContextVar[dict[str, bytes] | None] = ContextVar("entries to be noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[dict[str, bytes]]:
    """Yields a dictionary of the names and payloads of all entries that this thread gets or finds meanwhile."""
    notes: dict[str, bytes] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def _noted(name: str, payload: bytes) -> bytes:
    if (notes := _notes.get()) is not None:
        notes[name] = payload
    return payload


def payloads(suffix: str) -> Iterator[bytes]:
    """Yields the payloads of all entries on disk with this suffix."""
    for file in _files(place(), _ENTRY):
        if file.suffix == suffix and (payload := _read(file)) is not None:
            yield payload


def size() -> Size:
    """Returns how much the cache holds on disk in entries that this version can use."""
    return _size(_files(place(), _ENTRY))


def outdated() -> Size:
    """Returns how much the cache holds on disk in entries of older layouts, which are never read."""
    return _size(_outdated_files())


def clear() -> Size:
    """Removes every entry and the leftover files of interrupted processes; returns how many entries were removed."""
    root = place()
    removed = _remove(_files(root, _ENTRY) + _outdated_files())
    _remove(_files(root, _LEFTOVER))
    _unstored.clear()
    return removed


def clear_outdated() -> Size:
    """Removes the entries of older layouts; returns how many were removed."""
    return _remove(_outdated_files())


def _outdated_files() -> list[Path]:
    """Returns files of older layouts: the first used the cache's directory itself, later ones use `v<number>`."""
    root = directory()
    older = [f"v{number}" for number in range(2, int(LAYOUT[1:]))]
    places = [root, *(root / name for name in older)] if root is not None else []
    return [file for place in places for pattern in (_ENTRY, _LEFTOVER) for file in _files(place, pattern)]


def _size(files: list[Path]) -> Size:
    return Size(len(files), sum(_bytes_of(file) for file in files))


def _remove(files: list[Path]) -> Size:
    before = _size(files)
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
    after = _size([file for file in files if file.exists()])
    return Size(before.entries - after.entries, before.bytes - after.bytes)


# The functions below read one entry from disk, or build it and write it to disk.

_unstored: dict[str, bytes] = {}  # payloads that could not be written
_thread_locks: dict[str, threading.Lock] = {}
_warned: set[str] = set()
_swept: set[Path] = set()


def _fetch(name: str, build: Callable[[], bytes]) -> tuple[bytes, Path | None]:
    """Returns an entry's payload, and its file or None if the entry has no file of its own."""
    if (packed := packs.find(name)) is not None:
        return packed, None
    root = place()
    file = root / name if root is not None else None
    if (payload := _look_up(name, file)) is not None:
        return payload, file if name not in _unstored else None
    with _thread_lock(name), _process_lock(file, lambda: _look_up(name, file) is not None):
        if (payload := _look_up(name, file)) is None:  # another process may have built it while this one waited
            payload = build()
            _store(name, file, payload)
        return payload, file if name not in _unstored else None


def _look_up(name: str, file: Path | None) -> bytes | None:
    if (payload := _unstored.get(name)) is not None:
        return payload
    return _read(file) if file is not None else None


def _store(name: str, file: Path | None, payload: bytes) -> None:
    try:
        if file is None and directory() is not None:  # `place` has already warned why the directory is not used
            _unstored[name] = payload
            return
        if file is None:
            raise FileNotFoundError("there is no home directory")
        _open_directory(file.parent)
        _write(file, payload)
    except OSError as error:
        _unstored[name] = payload
        _warn(f"compiled kernels are not kept for the next process, the cache cannot be written: {error}")


def _read(file: Path) -> bytes | None:
    """Returns an entry's payload; None if it is missing, unreadable, damaged or could be another user's."""
    try:
        with open(file, "rb") as stream:
            reason = trust.why_not_file(os.fstat(stream.fileno()))
            data = stream.read() if reason is None else b""
    except OSError:
        return None
    if reason is not None:
        _warn(f"a compiled kernel of another user is not run, but compiled again: {file} {reason}")
    payload, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    return payload if trailer == hashlib.sha256(payload).digest() + _MAGIC else None


def _write(file: Path, payload: bytes) -> None:
    """Writes an entry under a temporary name, then renames it.

    There is no fsync: after a power failure the checksum detects damage, and a rebuild costs less than syncing.
    """
    temporary = file.with_name(f"{file.name}.{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb", opener=_own_file) as stream:
            stream.write(payload)
            stream.write(hashlib.sha256(payload).digest() + _MAGIC)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _own_file(name: str, flags: int) -> int:
    """Opens a file that only this user can write, whatever the umask is."""
    return os.open(name, flags, 0o644)


@contextlib.contextmanager
def _thread_lock(name: str) -> Iterator[None]:
    with _thread_locks.setdefault(name, threading.Lock()):
        yield


@contextlib.contextmanager
def _process_lock(file: Path | None, done: Callable[[], bool]) -> Iterator[None]:
    """Holds the entry's lock against other processes, or runs without one if `done()` is true or there are no locks.

    The lock only saves work: entries are replaced atomically, so data is safe without it.
    """
    lock = _acquire(file.with_name(file.name + ".lock"), done) if file is not None and LOCKING else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _acquire(path: Path, done: Callable[[], bool]) -> locks.Lock | None:
    try:
        _open_directory(path.parent)
        return locks.acquire(path, done, LOCK_TIMEOUT)
    except TimeoutError as error:
        _warn(f"{error}: compiling beside it")
    except OSError:  # read-only, or full; `_store` warns if necessary
        pass
    return None


def _open_directory(root: Path) -> None:
    """Makes the directory, and once per process removes leftover files of killed processes."""
    for missing in reversed([each for each in (root, *root.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    root.mkdir(exist_ok=True)  # raises if a file has this name
    if (reason := _distrust(root)) is not None:
        raise PermissionError(reason)
    if root in _swept:
        return
    _swept.add(root)
    for file in _files(root, _LEFTOVER):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > STALE_AFTER:
                file.unlink()


def _files(root: Path | None, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return [file for file in root.iterdir() if pattern.fullmatch(file.name)] if root is not None else []
    except OSError:
        return []


def _bytes_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # another process may have removed the file
        return 0


def _warn(message: str) -> None:
    """Warns once per process for each text before the first colon of a message."""
    kind = message.split(":")[0]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn("tconv3d: " + message, RuntimeWarning, stacklevel=2)


_private: tuple[int, Path] | None = None  # process id of the owner, and the temporary directory


def _private_directory() -> Path:
    """Returns a temporary directory of this process, which is removed at exit."""
    global _private
    if _private is None or _private[0] != os.getpid():  # a forked child must not use its parent's directory
        _private = os.getpid(), Path(tempfile.mkdtemp(prefix="tconv3d-"))
    return _private[1]


@atexit.register
def _remove_private_directory() -> None:
    if _private is not None and _private[0] == os.getpid():
        shutil.rmtree(_private[1], ignore_errors=True)


def _after_fork() -> None:
    _thread_locks.clear()  # the threads that hold locks do not exist in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
