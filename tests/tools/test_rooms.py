"""The order of the checkout: tests in the rooms of the package, and commands that name modules that exist."""

from __future__ import annotations

import importlib
import re

from places import PYTHONPATH, ROOT, TESTS

PACKAGE = ROOT / "tconv3d"


def test_tests_have_the_rooms_of_the_package() -> None:
    rooms = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert {room for room in rooms if not (PACKAGE / room).is_dir()} == set()
    assert not list(TESTS.glob("test_*.py")), "a test of no room"


def test_no_test_imports_from_another() -> None:
    imports = re.compile(r"^ *(?:from|import) (?:test_\w+|conftest)\b", re.MULTILINE)
    assert [path.name for path in TESTS.rglob("*.py") if imports.search(path.read_text())] == []


def test_processes_find_what_tests_find() -> None:
    configured = re.search(r"^pythonpath = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert configured is not None
    assert [str(ROOT / each) for each in re.findall(r'"(.*?)"', configured[1])] == PYTHONPATH.split(":")


def test_the_makefile_imports_what_exists() -> None:
    """Where nothing is installed, a check whose question fails is skipped: a wrong name would switch it off."""
    found = re.findall(r"from (tconv3d\S*) import (\w+)", (ROOT / "Makefile").read_text())
    assert found
    for package, name in found:
        importlib.import_module(f"{package}.{name}")


def test_every_folder_of_sources_is_formatted() -> None:
    """The Makefile's patterns reach every header and source file of the package."""
    (patterns,) = re.findall(r"^CUDA_SOURCES := \$\(wildcard (.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    formatted = {path for pattern in patterns.split() for path in ROOT.glob(pattern)}
    assert formatted == {path for end in ("cuh", "h", "cpp") for path in PACKAGE.rglob(f"*.{end}")}
