"""The house rules of CONTRIBUTING.md that a program can check: lengths of files, private names, comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

PACKAGE = ROOT / "tconv3d"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(path for end in ("cuh", "h", "cpp") for path in PACKAGE.rglob(f"*.{end}"))

MOST_LINES = 600
LONGER: set[str] = set()  # files that are still to be divided

# Modules that still import private names, each with the module that has the names.
IMPORTING_PRIVATE: set[tuple[str, str]] = set()

# Beginnings of a comment that is only understood together with the line above it.
LEANING = re.compile(r"(of|the same|that|those|its)\b", re.IGNORECASE)


def named(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_file_is_longer_than_a_reader_wants() -> None:
    lines = {named(path): len(path.read_text().splitlines()) for path in (*MODULES, *SOURCES)}
    assert {name: count for name, count in lines.items() if count > MOST_LINES and name not in LONGER} == {}


def test_inline_assembly_is_in_the_headers_named_for_it() -> None:
    assembly = re.compile(r"\basm\b\s*(?:volatile)?\s*\(")
    found = {path.name for path in SOURCES if path.suffix == ".cuh" and assembly.search(path.read_text())}
    assert found == {"ptx.cuh", "ptx_hopper.cuh"}


@pytest.mark.parametrize("name", ["ptx", "ptx_hopper"])
def test_every_instruction_has_a_twin_in_the_emulator(name: str) -> None:
    functions = re.findall(r"__forceinline__ [\w ]*?(\w+)\(", (PACKAGE / f"device/{name}.cuh").read_text())
    twins = (PACKAGE / f"emulator/include/emulated_{name}.h").read_text()
    missing = [function for function in functions if not re.search(rf"\b{function}\(", twins)]
    assert len(functions) > 20 and missing == []


# ---- private names


def imports_of(path: Path, tree: ast.Module) -> Iterator[tuple[str, ast.alias]]:
    """Yields what a module imports from the package: the full name of the module or folder, and the imported name."""
    package = module_of(path).split(".")[: None if path.name == "__init__.py" else -1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*above, *filter(None, [node.module])])
            if full.split(".")[0] == PACKAGE.name:
                yield from ((full, name) for name in node.names)


def private_names_used(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yields module and private name for every private name of another module that a module uses."""
    tree = ast.parse(text)
    modules = {module_of(each) for each in MODULES}
    known: dict[str, str] = {}
    for full, name in imports_of(path, tree):
        if f"{full}.{name.name}" in modules:
            known[name.asname or name.name] = f"{full}.{name.name}"
        elif re.match(r"_[^_]", name.name):
            yield full, name.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            module = known.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if module is not None:
                yield module, node.attr


def test_no_module_uses_private_names_of_another() -> None:
    used = {
        (named(path), module, name)
        for path in MODULES
        for module, name in private_names_used(path, path.read_text())
        if (named(path), module) not in IMPORTING_PRIVATE
    }
    assert used == set()


def test_private_names_are_found_in_both_forms() -> None:
    text = "from . import sources as s\nfrom .cache import _fetch\ns._read(s.find)\n"
    found = set(private_names_used(PACKAGE / "runtime" / "compiler.py", text))
    assert found == {("tconv3d.runtime.cache", "_fetch"), ("tconv3d.runtime.sources", "_read")}


# ---- comments


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of every docstring and of every comment that continues none."""
    own = [line.strip().startswith("#") for line in ("", *text.splitlines(), "")]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not (own[token.start[0]] and own[token.start[0] - 1]):
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (said := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), said


def cuda_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of every comment that continues none."""
    before = False
    for number, line in enumerate(text.splitlines(), 1):
        own = line.strip().startswith("//")
        if (found := re.search(r"//+ *(.*)", line)) and not (own and before):
            yield number, found[1]
        before = own


def test_comments_and_docstrings_lean_on_no_neighbour() -> None:
    leaning = [
        f"{named(path)}:{number}: {said.splitlines()[0]}"
        for paths, comments in ((MODULES, python_comments), (SOURCES, cuda_comments))
        for path in paths
        for number, said in comments(path.read_text())
        if LEANING.match(said)
    ]
    assert leaning == []


def test_leaning_comments_are_found() -> None:
    python = '"""That of all."""\nx = 1  # of a block\n# Rows.\n# That continues.\ny = 2\n# Its size.\n'
    assert [number for number, said in python_comments(python) if LEANING.match(said)] == [2, 6, 1]
    cuda = "// Rows,\n// those of x.\nint x;  // those of y\n// Of all.\n"
    assert [number for number, said in cuda_comments(cuda) if LEANING.match(said)] == [3, 4]
