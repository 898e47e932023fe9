"""What the documents say is so: links lead somewhere, code runs, commands are understood."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tconv3d import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def identify(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value).splitlines()[0]


def blocks(language: str) -> list[tuple[Path, str]]:
    return [
        (document, code)
        for document in DOCUMENTS
        for found, code in BLOCK.findall(document.read_text())
        if found == language
    ]


def commands() -> list[tuple[Path, str]]:
    return [
        (document, line.split("  #")[0].strip())
        for document, code in blocks("bash")
        for line in code.splitlines()
        if line.strip() and not line.startswith("#")
    ]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_documents_are_there() -> None:
    names = {identify(document) for document in DOCUMENTS}
    assert names >= {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"}
    assert "TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()
    assert len(blocks("python")) >= 1
    assert len(commands()) >= 6


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_links_lead_somewhere(document: Path) -> None:
    prose = BLOCK.sub("", document.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"{identify(document)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{identify(document)} links to {target}"


@pytest.mark.parametrize(("document", "code"), blocks("python"), ids=identify)
def test_python_runs(document: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, identify(document), "exec"), {"__name__": "example"})
    if "print(" in code:
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("document", "command"), commands(), ids=identify)
def test_commands_are_understood(
    document: Path, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path))
    words = shlex.split(command)
    if words[0] == "make":
        assert_succeeds(["make", "--dry-run", *words[1:]])
    elif words[0] == "pip":
        (extra,) = re.findall(r"^\.\[(\w+)\]$", words[-1])
        assert extra in PROJECT["project"]["optional-dependencies"]
    elif words[0] == "tconv3d":
        assert_command_line(words[1:])
    elif words[0].endswith("python") and words[1:3] == ["-m", "tconv3d"]:
        assert_command_line(words[3:])
    elif words[0].endswith("python") and words[1:3] == ["-m", "pytest"]:
        alone = re.sub(r" -n \d+", "", " ".join(words[1:])).split()  # collecting needs no processes
        assert_succeeds([sys.executable, *alone, "--collect-only", "--quiet"])
    elif words[0].endswith("python"):
        assert (ROOT / words[1]).is_file(), f"{command} runs a file that is not there"
    else:
        pytest.fail(f"this test does not know how to check {command!r} of {identify(document)}")


def assert_command_line(words: list[str]) -> None:
    # Minutes, a GPU or a file of results: test_cli.py, test_bench.py and test_report.py run them.
    if words[0] in ("demo", "bench", "verify", "report"):
        cli.parser().parse_args(words)
    else:
        assert cli.main(words) == 0


def assert_succeeds(command: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "PYTEST"))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_variables_of_the_environment_exist(document: Path) -> None:
    sources = "".join(file.read_text() for file in (ROOT / "tconv3d").rglob("*.py"))
    for variable in re.findall(r"TCONV3D_[A-Z_]+", document.read_text()):
        assert variable in sources, f"{identify(document)} speaks of {variable}"


def test_every_room_is_in_the_architecture() -> None:
    described = (ROOT / "docs" / "architecture.md").read_text()
    files = {file.name for file in (ROOT / "tconv3d").glob("*.py")}
    rooms = {name for name in files if not name.startswith("__") and not name.endswith("_planner.py")}
    folders = {file.name + "/" for file in (ROOT / "tconv3d").iterdir() if file.is_dir()} - {"__pycache__/"}
    assert {name for name in rooms | folders if f"`{name}`" not in described} == set()
    assert {name for name in re.findall(r"`([a-z0-9]\w*\.py)`", described) if name not in files} == set()


def test_ci_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert [line for line in script.read_text().splitlines() if line.startswith("make")] == ["make test"]
    assert "make test" in (ROOT / "README.md").read_text()
