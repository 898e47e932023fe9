"""Locks between processes: one does the work, and nobody waits long for a process that is gone.

Real processes get one cache entry. A file system without flock() is imitated by an flock() that raises. A machine
that is gone without the file system's notice is imitated by a process that is stopped.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tconv3d.runtime import cache

# Loads the module without the package's front door, which imports PyTorch and takes seconds.
SCRIPT = f"""
import errno, os, sys, time, types
package = types.ModuleType("tconv3d")
package.__path__ = [{str(Path(cache.__file__).parents[1])!r}]
sys.modules["tconv3d"] = package
from tconv3d.runtime import cache, locks
marker, seconds, supported = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "flock"
locks.BEAT, locks.SILENCE = 0.1, 2.0
def unsupported(*arguments):
    raise OSError(errno.ENOLCK, "no locks available")
if not supported:
    locks.fcntl.flock = unsupported
def build():
    with open(marker, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(seconds)
    return b"from a process"
print(cache.get(cache.key("an entry"), ".cubin", build).decode(), flush=True)
"""

SYSTEMS = ("flock", "no flock")  # kinds of file systems
ANSWER = ("from a process\n", "")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / cache.LAYOUT


class Starter:
    """Starts processes that get the entry. Each build is a line in `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, seconds: float, system: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, str(self.marker), str(seconds), system]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def builds(self) -> int:
        return len(self.marker.read_text().splitlines()) if self.marker.exists() else 0

    def wait_for_a_build(self) -> None:
        deadline = time.monotonic() + 30
        while not self.builds():
            assert time.monotonic() < deadline, "nobody builds"
            time.sleep(0.005)


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    made = Starter(tmp_path / "marker")
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("system", SYSTEMS)
def test_one_of_many_builds(system: str, starter: Starter, directory: Path) -> None:
    """The build takes longer than a dead process is waited for: the holder shows that it lives."""
    processes = [starter.start(3.0, system) for _ in range(4)]
    assert [process.communicate(timeout=60) for process in processes] == [ANSWER] * 4
    assert starter.builds() == 1
    assert [file.name for file in directory.iterdir()] == [cache.key("an entry") + ".cubin"]


@pytest.mark.parametrize(
    ("system", "end"),
    [("flock", signal.SIGKILL), ("no flock", signal.SIGKILL), ("flock", signal.SIGSTOP)],
    ids=["killed", "killed, no flock", "gone unnoticed"],
)
def test_nobody_waits_for_the_dead(system: str, end: signal.Signals, starter: Starter, directory: Path) -> None:
    victim = starter.start(60.0, system)
    starter.wait_for_a_build()
    waiters = [starter.start(0.5, system) for _ in range(3)]
    time.sleep(0.5)
    assert all(waiter.poll() is None for waiter in waiters)
    victim.send_signal(end)
    assert [waiter.communicate(timeout=30) for waiter in waiters] == [ANSWER] * 3
    assert starter.builds() == 2, "one of those that waited builds"
    assert [file.suffix for file in directory.iterdir()] == [".cubin"]


def test_a_result_ends_the_waiting_although_the_lock_is_held(starter: Starter) -> None:
    """A file system may release the lock of a process that has died after its work minutes later."""
    starter.start(60.0, "flock")
    starter.wait_for_a_build()
    waiter = starter.start(60.0, "flock")
    time.sleep(0.3)
    entry = Path(cache.path(cache.key("another entry"), ".cubin", lambda: b"from a process"))
    entry.rename(entry.with_name(cache.key("an entry") + ".cubin"))
    assert waiter.communicate(timeout=30) == ANSWER
    assert starter.builds() == 1
