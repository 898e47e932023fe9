"""Locks between processes, so that one of many that start together does the work and the others wait for it.

    lock = locks.acquire(path, done)     # None: `done()` has become true, or no lock can be had
    ...
    if lock is not None:
        lock.release()

A lock only saves work: whoever cannot get one goes on without it. Nobody waits forever for a process that is gone.

- A lock is an flock() on the file `path`, which the operating system releases when its holder dies.
- Shared file systems may not support flock(), or may release it late when another machine dies. Where flock() is not
  supported, the lock is the file `path` + ".claim", which one process alone can create.
- A holder shows that it lives: every `BEAT` seconds it sets the time of modification of the file. A waiting process
  that has not seen this time change for `SILENCE` seconds by its own clock removes the file, and takes the lock over.
  Clocks of different machines need not agree.
- A holder that lives but does not finish is waited for `timeout` seconds.

This module knows nothing of what the locks are for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # systems without POSIX locks
    fcntl = None  # type: ignore[assignment]

BEAT = 5.0  # seconds between two signs of life of a holder
SILENCE = 90.0  # seconds, longer than network file systems cache a file's times (60 s for NFS, by default)
LONGEST_PAUSE = 0.2  # seconds between two attempts, after many attempts
CLAIM = ".claim"


class Lock:
    """Is a lock that this process holds. A thread sets the file's time of modification until `release` is called."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._released = threading.Event()
        self._show_life()
        self._thread = threading.Thread(target=self._beat, name="tconv3d lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        if _same_file(self._descriptor, self._path):  # otherwise another process has taken the lock over
            with contextlib.suppress(OSError):  # removed before unlocking, so that newcomers create a new file
                os.unlink(self._path)
        with contextlib.suppress(OSError):  # explicit, because a forked child may hold a copy open
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            self._show_life()

    def _show_life(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)


def acquire(path: Path, done: Callable[[], bool], timeout: float) -> Lock | None:
    """Waits for the lock. Returns None once `done()` is true, or if the lock cannot be had.

    Raises TimeoutError if another process has held the lock for `timeout` seconds, and lives.
    """
    deadline, pause = time.monotonic() + timeout, 0.001
    signs: dict[Path, tuple[int | None, float]] = {}  # the last sign of life on a file, and when it was first seen
    try:
        while time.monotonic() < deadline:
            lock, busy = _attempt(path)
            if lock is not None or done():
                return lock
            _take_over_from_the_dead(busy, signs)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    except OSError:  # read-only, full, or no support for locks
        return None
    raise TimeoutError(f"another process has held {path} for {timeout:.0f} s")


def _attempt(path: Path) -> tuple[Lock | None, Path]:
    """Tries once to get the lock; returns it or None, and the file that is locked."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if fcntl is None:
            raise OSError("there is no flock()")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None, path
    except OSError:  # the file system does not support it
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(path)
        return _claim(path.with_name(path.name + CLAIM))
    if _same_file(descriptor, path):
        return Lock(path, descriptor), path
    os.close(descriptor)  # the previous holder has removed the file: the next attempt locks the present one
    return None, path


def _claim(path: Path) -> tuple[Lock | None, Path]:
    try:
        return Lock(path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)), path
    except FileExistsError:
        return None, path


def _take_over_from_the_dead(path: Path, signs: dict[Path, tuple[int | None, float]]) -> None:
    """Removes a lock's file if its holder has shown no life for `SILENCE` seconds, so that an attempt can succeed."""
    sign, now = _sign_of_life(path), time.monotonic()
    last, since = signs.setdefault(path, (sign, now))
    if sign != last:
        signs[path] = sign, now
    elif sign is not None and now - since > SILENCE:
        del signs[path]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _sign_of_life(path: Path) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return None


def _same_file(descriptor: int, name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(name))
    except FileNotFoundError:
        return False
