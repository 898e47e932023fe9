"""Packs: what is written is found, and whatever else a file holds is refused in words before anything is used."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tconv3d.runtime import cache, packs
from tconv3d.runtime.packs import Content, PackError

NAMES = [cache.key(str(number)) + suffix for number, suffix in enumerate((".cubin", ".json", ".so"))]
PAYLOADS = [b"\x7fELF" + bytes(range(256)) * 5, b'{"build": null}', b""]
ENTRIES = [(name, f"entry {name[-5:]}", payload) for name, payload in zip(NAMES, PAYLOADS, strict=True)]
CONTENT = Content("H200 (9.0)", "up: ConvTranspose3d 8 -> 4", "float32", "contiguous", "forward", "inputs 1x8x4x4x4")
HEADER = 16 + 8 + 32  # magic, length and checksum of the index


@pytest.fixture(autouse=True)
def no_packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(packs.VARIABLE, raising=False)
    packs.unload()
    yield
    packs.unload()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.tconv3d"
    packs.write(path, "0.1.0", packs.fingerprint(), [CONTENT], ENTRIES)
    return path


def test_what_is_written_is_found(path: Path) -> None:
    pack = packs.load(path)
    assert pack.index.contents == (CONTENT,)
    assert [packs.find(name) for name in NAMES] == PAYLOADS
    assert packs.find(cache.key("another") + ".cubin") is None
    assert "3 entries for H200 (9.0)" in pack.summary and str(path) in pack.summary
    assert pack.described(1) == f"  {CONTENT}" and pack.described(0) == "  and 1 more"


def test_the_cache_looks_in_packs_first_and_needs_no_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_CACHE_DIR", "/proc/no/such/place")
    packs.load(path)
    with warnings.catch_warnings(), cache.noting() as noted:
        warnings.simplefilter("error")
        assert cache.get(NAMES[1][:64], ".json", lambda: pytest.fail("built")) == PAYLOADS[1]
        assert cache.find(NAMES[0][:64], ".cubin") == PAYLOADS[0]
        library = cache.path(NAMES[0][:64], ".cubin", lambda: pytest.fail("built"))
    assert library.read_bytes().startswith(PAYLOADS[0])
    assert noted == {NAMES[1]: PAYLOADS[1], NAMES[0]: PAYLOADS[0]}


def test_the_environment_names_packs_and_the_last_loaded_is_looked_at_first(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, third = tmp_path / "second", tmp_path / "third"
    for number, each in enumerate((second, third)):
        packs.write(each, "0", packs.fingerprint(), [], [(NAMES[0], "a kernel", bytes([number]))])
    monkeypatch.setenv(packs.VARIABLE, f"{path}{os.pathsep}{second}{os.pathsep}{path}{os.pathsep}")
    assert [pack.path for pack in packs.loaded()] == [path, second]
    assert packs.find(NAMES[0]) == PAYLOADS[0]
    packs.load(third)
    assert packs.find(NAMES[0]) == b"\1"
    packs.load(second)
    packs.load(third)
    assert [pack.path for pack in packs.loaded()] == [third, second, path]


def test_a_bad_pack_of_the_environment_is_a_warning(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(packs.VARIABLE, f"{tmp_path / 'missing'}{os.pathsep}{path}")
    with pytest.warns(RuntimeWarning, match="TCONV3D_PRECOMPILED names is not used: .*missing cannot be read"):
        assert [pack.path for pack in packs.loaded()] == [path]


def test_every_truncation_is_refused(path: Path) -> None:
    data = path.read_bytes()
    index = int.from_bytes(data[16:24], "little")
    edges = {0, 1, 15, 16, 23, 24, HEADER - 1, HEADER, HEADER + index, len(data)}
    for length in sorted({*edges, *(edge - 1 for edge in edges if edge), *range(0, len(data), 97)} - {len(data)}):
        path.write_bytes(data[:length])
        with pytest.raises(PackError, match=r"cut off|not a pack|damaged"):
            packs.read(path)


def test_every_changed_byte_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for position in {*range(HEADER + 4), *range(HEADER + 4, len(data), 61), len(data) - 1}:
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x20]) + data[position + 1 :])
        with pytest.raises(PackError):
            packs.read(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(PackError, match="more than its index says"):
        packs.read(path)


def with_index(path: Path, text: bytes, length: int | None = None) -> None:
    """Writes a file with a hostile index that has its right checksum."""
    size = len(text) if length is None else length
    path.write_bytes(b"tconv3d pack 1\n\n" + size.to_bytes(8, "little") + hashlib.sha256(text).digest() + text)


def index(**changes: Any) -> bytes:
    entry = {"name": NAMES[0], "what": "", "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    entry |= {key: value for key, value in changes.items() if key in entry}
    whole: dict[str, Any] = {"version": "0", "sources": "", "contents": [], "entries": [entry]}
    return json.dumps(whole | {key: value for key, value in changes.items() if key not in entry}).encode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "does not describe a pack"),
        (b"[" * 200_000, "does not describe a pack"),
        (b"9" * 10_000, "does not describe a pack"),
        (b'{"version": "0"}', "does not describe a pack"),
        (b"\xff\xfe", "does not describe a pack"),
        (index(entries="many"), "does not describe a pack"),
        (index(entries=[{}]), "does not describe a pack"),
        (index(more="fields"), "does not describe a pack"),
        (index(bytes=True), "does not describe a pack"),
        (index(bytes=1.5), "does not describe a pack"),
        (index(bytes=-1), "not valid"),
        (index(bytes=10**30), "cut off"),
        (index(name="../../etc/passwd"), "not valid"),
        (index(name=NAMES[0] + "\n"), "not valid"),
        (index(entries=json.loads(index())["entries"] * 2), "not valid"),
        (index(sha256="0"), "checksum"),
        (index(), "other kernels or planners"),
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, text: bytes, reason: str) -> None:
    path = tmp_path / "hostile"
    with_index(path, text)
    with pytest.raises(PackError, match=reason) as raised:
        packs.load(path)
    assert len(str(raised.value)) < 2000
    assert packs.loaded() == ()


def test_an_index_of_any_claimed_length_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    with_index(path, b"{}", length=2**63)
    with pytest.raises(PackError, match="cut off"):
        packs.read(path)
    with_index(path, b"{}", length=packs.LARGEST_INDEX + 1)
    with open(path, "ab") as file:
        file.truncate(2**33)  # 8 GiB that take no place on disk
    with pytest.raises(PackError, match="an index of 16777217 bytes, more than"):
        packs.read(path)


def change_mode(path: Path) -> None:
    path.chmod(0o666)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def write_other_format(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"pack 1", b"pack 2", 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_mode, "can be written by everybody"),
        (make_directory, "cannot be read|is not a file"),
        (write_other_format, "a pack of another format"),
        (Path.unlink, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_packs(path: Path, change: Callable[[Path], None], reason: str) -> None:
    change(path)
    with pytest.raises(PackError, match=reason):
        packs.load(path)


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PackError, match="is not a file"):
        packs.read(tmp_path / "pipe")


def test_a_pack_that_changes_after_it_was_loaded(path: Path) -> None:
    packs.load(path)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(PackError, match="was changed after it had been loaded"):
        packs.find(NAMES[1])
    packs.unload()


def test_a_pack_that_is_replaced_after_it_was_loaded_stays_as_it_was(path: Path) -> None:
    packs.load(path)
    packs.write(path, "0.1.0", packs.fingerprint(), [], [(NAMES[0], "another", b"another")])
    assert packs.find(NAMES[0]) == PAYLOADS[0]


def test_a_failed_write_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(packs, "LARGEST_INDEX", 10)
    with pytest.raises(ValueError, match="write several packs"):
        packs.write(path, "0", "", [], ENTRIES)
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("full")))
    monkeypatch.setattr(packs, "LARGEST_INDEX", 2**24)
    with pytest.raises(OSError, match="full"):
        packs.write(path, "0", "", [], ENTRIES)
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == [path.name]
