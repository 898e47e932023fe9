"""The disk cache: entries survive processes, and every way they can go wrong ends in a right result."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tconv3d.runtime import cache, locks, trust

KEY = cache.key("an entry")
PAYLOAD = b"payload" * 1000


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and a module that has not warned yet."""
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache, "_unstored", {})
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_swept", set())
    monkeypatch.setattr(cache, "_trusted", set())
    return root / cache.LAYOUT


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """A warning that no test asked for is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Build:
    """A build that counts its runs."""

    def __init__(self, payload: bytes = PAYLOAD) -> None:
        self.payload = payload
        self.runs = 0

    def __call__(self) -> bytes:
        self.runs += 1
        return self.payload


def never() -> bytes:
    raise AssertionError("built again")


def files(root: Path) -> list[str]:
    return sorted(file.name for file in root.iterdir())


# Storing and finding


def test_put_replaces_what_is_there(directory: Path) -> None:
    cache.put(KEY, ".json", b"first")
    assert cache.get(KEY, ".json", never) == b"first"
    cache.put(KEY, ".json", b"second")
    assert cache.get(KEY, ".json", never) == b"second"
    assert files(directory) == [KEY + ".json"]


def test_put_where_nothing_can_be_written(directory: Path) -> None:
    directory.write_text("a file in the directory's place")
    for payload in (b"first", b"second"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache.put(KEY, ".json", payload)
        assert cache.get(KEY, ".json", never) == payload
    directory.unlink()
    cache.put(KEY, ".json", b"third")
    assert cache.get(KEY, ".json", never) == b"third"
    assert files(directory) == [KEY + ".json"]


def test_entries_are_found_without_being_built(directory: Path) -> None:
    assert cache.find(KEY, ".json") is None and not list(cache.payloads(".json"))
    cache.put(KEY, ".json", b"first")
    cache.put(KEY, ".tuned", b"second")
    assert cache.find(KEY, ".json") == b"first"
    assert list(cache.payloads(".tuned")) == [b"second"]


def test_an_entry_is_built_once(directory: Path) -> None:
    build = Build()
    assert cache.get(KEY, ".cubin", build) == PAYLOAD
    assert cache.get(KEY, ".cubin", never) == PAYLOAD
    assert build.runs == 1
    assert files(directory) == [KEY + ".cubin"]  # no lock, no temporary file is left


def test_a_path_begins_with_the_payload(directory: Path) -> None:
    file = cache.path(KEY, ".so", Build())
    assert file == directory / (KEY + ".so")
    assert file.read_bytes().startswith(PAYLOAD)
    assert cache.path(KEY, ".so", never) == file


def test_an_empty_payload_is_an_entry() -> None:
    assert cache.get(KEY, ".cubin", lambda: b"") == b""
    assert cache.get(KEY, ".cubin", never) == b""


def test_parts_of_a_key_do_not_run_together() -> None:
    assert cache.key("ab", "c") != cache.key("a", "bc")
    assert cache.key("a") != cache.key("a", "")


def test_a_failed_build_stores_nothing_and_frees_the_lock(directory: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.get(KEY, ".cubin", lambda: bytes(1 // 0))
    assert files(directory) == []
    assert cache.get(KEY, ".cubin", Build()) == PAYLOAD


def test_size_and_clear_see_only_what_is_ours(directory: Path) -> None:
    cache.get(KEY, ".cubin", Build())
    cache.path(KEY, ".so", Build())
    (directory / "thesis.pdf").write_text("not ours")
    (directory / f"{KEY}.cubin.0123456789abcdef.tmp").write_text("left by a killed process")
    size = cache.size()
    assert size.entries == 2
    assert size.bytes > 2 * len(PAYLOAD)
    assert cache.clear() == size
    assert files(directory) == ["thesis.pdf"]
    assert cache.size() == (0, 0)


def test_an_absent_cache_is_empty() -> None:
    assert cache.size() == (0, 0)
    assert cache.clear() == (0, 0)


# Where


def test_the_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("TCONV3D_CACHE_DIR", "~/kernels")
    assert cache.directory() == Path("/home/somebody/kernels")
    monkeypatch.delenv("TCONV3D_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/somebody")
    assert cache.directory() == Path("/var/cache/somebody/tconv3d")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.directory() == Path("/home/somebody/.cache/tconv3d")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.directory() == Path("/home/somebody/.cache/tconv3d")


# Older layouts


def test_entries_of_an_older_layout_are_counted_removed_and_never_read(directory: Path) -> None:
    old = directory.parent / f"{KEY}.cubin"
    cache.get(KEY, ".cubin", Build())
    (directory / old.name).rename(old)
    (directory.parent / "thesis.pdf").write_text("not ours")
    build = Build(b"new")
    assert cache.get(KEY, ".cubin", build) == b"new" and build.runs == 1
    assert cache.size().entries == 1
    assert cache.outdated() == (1, old.stat().st_size)
    assert cache.clear_outdated().entries == 1
    assert cache.outdated() == (0, 0) and cache.size().entries == 1
    old.write_text("once more")
    assert cache.clear().entries == 2
    assert files(directory.parent) == ["thesis.pdf", cache.LAYOUT]


# Other users


def foreign(result: os.stat_result, **changes: int) -> os.stat_result:
    """What `stat` says, but of a file of another user, or with another mode."""
    fields = list(result)
    fields[0], fields[4] = changes.get("mode", result.st_mode), changes.get("uid", result.st_uid)
    return os.stat_result(fields)


def pretend(monkeypatch: pytest.MonkeyPatch, path: Path, **changes: int) -> None:
    """Makes the system say that a file or directory has another owner or mode."""
    real_stat, real_fstat = os.stat, os.fstat

    def stat(name: Any, *rest: Any, **keywords: Any) -> os.stat_result:
        found = real_stat(name, *rest, **keywords)
        return foreign(found, **changes) if name == path else found

    def fstat(descriptor: int) -> os.stat_result:
        found = real_fstat(descriptor)
        return foreign(found, **changes) if os.path.samestat(found, real_stat(path)) else found

    monkeypatch.setattr(trust.os, "stat", stat)
    monkeypatch.setattr(trust.os, "fstat", fstat)


STRANGER = {"uid": os.geteuid() + 4242}
posix = pytest.mark.skipif(trust.pwd is None, reason="owners and modes are those of POSIX")


@posix
@pytest.mark.parametrize(
    ("changes", "reason"),
    [(STRANGER, "belongs to user"), ({"mode": 0o100666}, "written by everybody"), ({"mode": 0o100664}, "group 77")],
)
def test_an_entry_that_another_user_could_have_written_is_built_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], reason: str
) -> None:
    cache.get(KEY, ".cubin", Build(b"planted"))
    file = directory / f"{KEY}.cubin"
    planted = file.stat().st_ino
    with monkeypatch.context() as patch:
        pretend(patch, file, **changes)
        patch.setattr(trust, "_is_private", lambda *_: False)
        with pytest.warns(RuntimeWarning, match="compiled kernel of another user is not run") as caught:
            assert cache.find(KEY, ".cubin") is None and not list(cache.payloads(".cubin"))
            assert cache.get(KEY, ".cubin", Build(b"our own")) == b"our own"
    assert len(caught) == 1 and reason.split()[0] in str(caught[0].message)
    assert file.stat().st_ino != planted
    assert cache.get(KEY, ".cubin", never) == b"our own"


@posix
@pytest.mark.parametrize("which", ["entries", "cache", "above"])
@pytest.mark.parametrize("changes", [STRANGER, {"mode": 0o40777}])
def test_a_directory_that_another_user_can_write_is_not_used(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, changes: dict[str, int]
) -> None:
    """Neither is it read nor written; the user's own cache takes its place."""
    cache.get(KEY, ".so", Build(b"planted"))
    before = files(directory)
    own = tmp_path / "own"
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    monkeypatch.setattr(cache, "_trusted", set())
    wrong = {"entries": directory, "cache": directory.parent, "above": tmp_path}[which]
    if which == "above":  # the other cache must not be below it too
        monkeypatch.setenv("XDG_CACHE_HOME", str(own := tmp_path.parent / f"{tmp_path.name}-own"))
    pretend(monkeypatch, wrong, **changes)
    with pytest.warns(RuntimeWarning, match="Set TCONV3D_CACHE_DIR to a directory of your own") as caught:
        file = cache.path(KEY, ".so", Build(b"our own"))
        assert cache.path(KEY, ".so", never) == file
        cache.put(cache.key("a choice"), ".json", b"{}")
    assert file == own / "tconv3d" / cache.LAYOUT / f"{KEY}.so"
    assert str(wrong) in str(caught[0].message) and len(caught) == 1
    assert files(directory) == before
    assert own.stat().st_mode & 0o077 == 0, "made for this user alone"


@posix
def test_without_a_trusted_directory_nothing_is_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get(KEY, ".cubin", Build(b"planted"))
    monkeypatch.setattr(cache, "_trusted", set())
    monkeypatch.setattr(cache, "_users_own", lambda: None)
    pretend(monkeypatch, directory, **STRANGER)
    check_both_ways_without_a_disk("not kept for the next process")
    assert files(directory) == [f"{KEY}.cubin"]


@posix
def test_whom_a_directory_is_trusted_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    for mode, trusted in ((0o700, True), (0o755, True), (0o775, False), (0o777, False), (0o1777, False)):
        place.chmod(mode)
        monkeypatch.setattr(trust, "_is_private", lambda *_: False)
        assert (trust.why_not_directory(place) is None) == trusted, oct(mode)
        monkeypatch.setattr(trust, "_is_private", lambda *_: True)
        assert (trust.why_not_directory(place) is None) == (trusted or mode == 0o775), oct(mode)
    below = place / "below"
    below.mkdir(mode=0o700)
    for mode, trusted in ((0o755, True), (0o777, False), (0o1777, True)):  # as /tmp is
        place.chmod(mode)
        assert (trust.why_not_directory(below) is None) == trusted, oct(mode)
    place.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(below)
    assert "can be written by everybody" in (trust.why_not_directory(link) or ""), "what it points to can be replaced"
    place.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setattr(trust.os, "stat", lambda path, **_: foreign(os.lstat(path), uid=0))
    assert trust.why_not_directory(place / "below") is None, "root could write it anyway"


@posix
def test_entries_are_this_users_whatever_the_umask(directory: Path) -> None:
    before = os.umask(0)
    try:
        cache.get(KEY, ".cubin", Build())
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / f"{KEY}.cubin").stat().st_mode & 0o022 == 0


# Damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[: len(data) // 2], id="truncated"),
        pytest.param(lambda data: data[:-1], id="one byte short"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: b"\x00" * len(data), id="zeros"),  # what a power failure leaves
        pytest.param(lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], id="one bit flipped"),
    ],
)
def test_a_damaged_entry_is_rebuilt(directory: Path, damage: Callable[[bytes], bytes]) -> None:
    cache.get(KEY, ".cubin", Build())
    file = directory / (KEY + ".cubin")
    good = file.read_bytes()
    file.write_bytes(damage(good))
    build = Build()
    assert cache.get(KEY, ".cubin", build) == PAYLOAD
    assert build.runs == 1
    assert file.read_bytes() == good


def test_replacing_a_damaged_entry_leaves_its_readers_alone(directory: Path) -> None:
    file = cache.path(KEY, ".so", Build())
    file.write_bytes(b"damaged")
    with open(file, "rb") as reader:  # as a process that has the library mapped
        cache.path(KEY, ".so", Build())
        assert reader.read() == b"damaged"


# Nowhere to write


def check_both_ways_without_a_disk(reason: str) -> None:
    """`get` and `path` work, build once, and warn once."""
    build, other = Build(), Build(b"library")
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        assert cache.get(KEY, ".cubin", build) == PAYLOAD
        assert cache.get(KEY, ".cubin", never) == PAYLOAD
        file = cache.path(KEY, ".so", other)
        assert cache.path(KEY, ".so", never) == file
    assert file.read_bytes().startswith(b"library")
    assert (build.runs, other.runs, len(caught)) == (1, 1, 1)


def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check_both_ways_without_a_disk("Not a directory")


def test_a_missing_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TCONV3D_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for an unknown user
    assert cache.directory() is None
    check_both_ways_without_a_disk("there is no home directory")
    assert cache.size() == (0, 0)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory(directory: Path) -> None:
    directory.mkdir(mode=0o500)
    check_both_ways_without_a_disk("Permission denied")


def test_an_unwritable_directory_seen_by_root(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_writes(monkeypatch, errno.EROFS)
    check_both_ways_without_a_disk("Read-only file system")


def test_a_read_only_cache_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get(KEY, ".cubin", Build())
    refuse_writes(monkeypatch, errno.EROFS)
    assert cache.get(KEY, ".cubin", never) == PAYLOAD


def refuse_writes(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Opening a file for writing in the cache fails; in the temporary directory it works."""
    real_open, root = open, os.environ["TCONV3D_CACHE_DIR"]

    def refusing(file: Any, mode: str = "r", *rest: Any, **keywords: Any) -> Any:
        if "x" in mode and str(file).startswith(root):
            raise OSError(code, os.strerror(code), str(file))
        return real_open(file, mode, *rest, **keywords)

    monkeypatch.setattr("builtins.open", refusing)


def test_a_disk_that_fills_up_during_a_write(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = open

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(bytes(data)[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def filling(file: Any, mode: str = "r", *rest: Any, **keywords: Any) -> Any:
        ours = str(file).startswith(str(directory))
        return Full(file, mode) if ours else real_open(file, mode, *rest, **keywords)

    monkeypatch.setattr("builtins.open", filling)
    check_both_ways_without_a_disk("No space left on device")
    assert files(directory) == []  # the half-written file is gone


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a file system takes more rights than this process has")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tiny_disk))
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert cache.get(KEY, ".cubin", Build(bytes(200_000))) == bytes(200_000)
    assert files(tiny_disk / cache.LAYOUT) == []
    assert cache.get(cache.key("a small one"), ".cubin", Build()) == PAYLOAD
    assert cache.size().entries == 1


# Many at once


def test_threads_build_an_entry_once() -> None:
    started = threading.Event()
    runs: list[int] = []

    def build() -> bytes:
        runs.append(1)
        started.wait(0.2)  # long enough for the others to arrive
        return PAYLOAD

    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(cache.get(KEY, ".cubin", build))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [PAYLOAD] * 8
    assert len(runs) == 1


def test_threads_build_different_entries_at_once() -> None:
    meeting = threading.Barrier(2, timeout=10)  # passes only if both builds run at the same time

    def build() -> bytes:
        meeting.wait()
        return PAYLOAD

    keys = [cache.key("one"), cache.key("two")]
    threads = [threading.Thread(target=cache.get, args=(key, ".cubin", build)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not meeting.broken
    assert cache.size().entries == 2


# Loads the module without the package's front door, which imports PyTorch and takes seconds.
IMPORT = f"""
import os, signal, sys, time, types
package = types.ModuleType("tconv3d")
package.__path__ = [{str(Path(cache.__file__).parents[1])!r}]
sys.modules["tconv3d"] = package
from tconv3d.runtime import cache
"""

GET = """
cache.LOCK_TIMEOUT = float(sys.argv[3])
def build():
    with open(sys.argv[1], "a") as marker:
        marker.write(f"{os.getpid()}\\n")
    time.sleep(float(sys.argv[2]))
    return b"from a process"
print(cache.get(cache.key("an entry"), ".cubin", build).decode(), flush=True)
"""


def start(marker: Path, build_seconds: float, timeout: float = 60) -> subprocess.Popen[str]:
    """A process that gets the entry; its builds are lines in the marker file."""
    command = [sys.executable, "-c", IMPORT + GET, str(marker), str(build_seconds), str(timeout)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.005)


def test_processes_build_an_entry_once(tmp_path: Path, directory: Path) -> None:
    marker = tmp_path / "marker"
    processes = [start(marker, 1.0) for _ in range(6)]
    results = [process.communicate(timeout=60) for process in processes]
    assert results == [("from a process\n", "")] * 6
    assert len(marker.read_text().splitlines()) == 1
    assert files(directory) == [KEY + ".cubin"]


def test_a_killed_build_leaves_nothing_locked(tmp_path: Path, directory: Path) -> None:
    marker = tmp_path / "marker"
    victim = start(marker, 60)
    wait_for(marker)
    waiter = start(tmp_path / "second", 0)  # waits for the victim's lock, then builds itself
    time.sleep(0.3)
    assert waiter.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert waiter.communicate(timeout=30) == ("from a process\n", "")
    assert files(directory) == [KEY + ".cubin"]


def test_a_stuck_build_is_not_waited_for_forever(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    stuck = start(marker, 60)
    try:
        wait_for(marker)
        output, errors = start(tmp_path / "second", 0, timeout=0.2).communicate(timeout=30)
    finally:
        stuck.kill()
        stuck.communicate()
    assert output == "from a process\n"
    assert "compiling beside it" in errors


def test_a_lock_is_that_of_the_file_that_is_there(directory: Path) -> None:
    """Who waited for a lock file that its holder removed must not think it holds the present one."""
    lock = directory / f"{KEY}.cubin.lock"
    first = cache._acquire(lock, lambda: False)
    assert first is not None
    waiting: list[locks.Lock | None] = []
    thread = threading.Thread(target=lambda: waiting.append(cache._acquire(lock, lambda: False)))
    thread.start()
    time.sleep(0.1)
    lock.unlink()
    first.release()
    thread.join(30)
    (second,) = waiting
    assert second is not None
    assert os.fstat(second._descriptor).st_ino == lock.stat().st_ino
    second.release()
    assert files(directory) == []


def test_a_process_killed_while_writing_leaves_no_entry(directory: Path) -> None:
    """Stops a process by SIGKILL between the two writes of an entry."""
    script = """
cache._MAGIC = type("", (), {"__radd__": lambda self, other: os.kill(os.getpid(), signal.SIGKILL)})()
cache.get(cache.key("an entry"), ".cubin", lambda: b"half" * 10_000)
"""
    killed = subprocess.run([sys.executable, "-c", IMPORT + script])
    assert killed.returncode == -signal.SIGKILL
    left = files(directory)
    assert any(name.endswith(".tmp") for name in left)
    assert KEY + ".cubin" not in left
    assert cache.get(KEY, ".cubin", Build()) == PAYLOAD


def test_old_leftovers_are_swept_and_young_ones_are_not(directory: Path) -> None:
    directory.mkdir()
    old = [directory / f"{KEY}.cubin.{'0' * 16}.tmp", directory / f"{KEY}.so.lock", directory / f"{KEY}.so"]
    young = directory / f"{KEY}.cubin.{'1' * 16}.tmp"
    for file in [*old, young]:
        file.write_text("left")
    for file in old:
        os.utime(file, (time.time() - 2 * cache.STALE_AFTER,) * 2)
    cache.get(cache.key("another"), ".cubin", Build())
    assert [file.exists() for file in old] == [False, False, True]  # an old entry is no leftover
    assert young.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_during_a_build_can_build() -> None:
    """The child has a copy of a locked lock whose holder does not exist there."""
    building, finish = threading.Event(), threading.Event()

    def build() -> bytes:
        building.set()
        finish.wait(30)
        return PAYLOAD

    thread = threading.Thread(target=cache.get, args=(KEY, ".cubin", build))
    thread.start()
    building.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        with cache._thread_lock(KEY + ".cubin"):
            os._exit(0)
    deadline = time.monotonic() + 10
    pid, status = os.waitpid(child, os.WNOHANG)
    while pid == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
        pid, status = os.waitpid(child, os.WNOHANG)
    finish.set()
    thread.join()
    if pid == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (pid, status) == (child, 0)
