"""What the documents say is so: links lead somewhere, code runs, commands run."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

import tconv3d
from tconv3d.tools import cli
from tconv3d.tools.bench import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    assert names >= {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
    assert names >= {f"docs/{name}.md" for name in ("api", "distributed", "distributed-training", "export", "fused")}
    assert names >= {f"docs/{name}.md" for name in ("architecture", "kernel", "numerics", "performance")}
    assert names >= {
        f"docs/{name}.md" for name in ("benchmarking", "deploying", "quickstart", "swapping", "troubleshooting")
    }
    assert "TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()
    assert len(blocks("python")) >= 1
    assert len(commands()) >= 6


def test_the_changelog_begins_with_the_version() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased" and versions[1] == tconv3d.__version__


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


def run_once(call: Callable[[], Any]) -> float:
    call()
    return 1.0


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to run commands in, with what they speak of, and stand-ins for what they would take minutes for.

    `bench` and `verify` run as they are, but one layer at most, on a reduced volume, with PyTorch's operator in the
    kernels' place and a clock that runs everything once. test_bench.py runs them on the kernels.
    """
    monkeypatch.chdir(tmp_path)
    measure = run.measure

    def reduced(work: Any, options: Any, console: Any, place: Any, *rest: Any, **keywords: Any) -> Any:
        first = [each for each in work if (each.name, each.tail) == (work[0].name, work[0].tail)]
        few = [each._replace(layer=each.layer.reduced()) for each in first]
        clock = None if place.clock is None else run_once
        return measure(few, options, console, run.Place("cpu", "torch", clock), *rest, **keywords)

    monkeypatch.setattr(run, "measure", reduced)
    monkeypatch.setattr(run, "have_gpu", lambda: True)
    monkeypatch.setattr(run, "Clock", lambda budget: object())
    monkeypatch.setattr(torch, "compile", lambda model: model)  # seconds for each variant
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "networks.py").write_text(
        "import torch\n\ndef make_unet():\n    return torch.nn.ConvTranspose3d(1, 1, 2, stride=2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["bench", "--layer", "2, 2, 2, size=3", "--json", "results.json"]) == 0
    return tmp_path


@pytest.mark.parametrize(("document", "command"), commands(), ids=identify)
def test_commands_run(document: Path, command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    if words[0] == "make":  # this is what `make test` runs
        assert_succeeds(["make", "--dry-run", *words[1:]])
    elif words[0] == "pip":  # installing what is installed: the extra must exist
        assert_extra(words)
    elif words[0] == "tconv3d":
        assert_command_line(words[1:], monkeypatch)
    elif words[0].endswith("python") and words[1:3] == ["-m", "tconv3d"]:
        assert_command_line(words[3:], monkeypatch)
    elif words[0].endswith("python") and words[1:3] == ["-m", "pytest"]:
        alone = re.sub(r" -n \d+", "", " ".join(words[1:])).split()  # collecting needs no processes
        assert_succeeds([sys.executable, *alone, "--collect-only", "--quiet"])
    elif words[0] == "python" and words[1] in NEED_A_GPU:
        done = run_alone([sys.executable, *words[1:]])
        assert done.returncode == 2 and "none is visible" in done.stderr, "it understands its flags"
    elif words[0] in ("python", "torchrun") and words[-1].startswith("examples/"):  # test_examples.py runs them
        assert (ROOT / words[-1]).is_file()
    else:
        pytest.fail(f"no test knows how to run {command!r} of {identify(document)}")


NEED_A_GPU = ("benchmarks/train_unet.py", "benchmarks/counters.py")


def assert_extra(words: list[str]) -> None:
    (extra,) = re.findall(r"^\.\[(\w+)\]$", words[-1])
    assert extra in PROJECT["project"]["optional-dependencies"]


def assert_command_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] in ("demo", "tune"):  # minutes in the emulator, or a GPU: test_cli.py and test_tune.py run them
        cli.parser().parse_args(words)
        return
    if "benchmarks.monai_networks:dynunet" in words:
        networks = pytest.importorskip("benchmarks.monai_networks", reason="the networks come with the extra `monai`")
        monkeypatch.setattr(networks, "dynunet", functools.partial(networks.dynunet, tiny=True))
    if words[0] == "cache":  # `cache clear` must not cost anybody their kernels
        monkeypatch.setenv("TCONV3D_CACHE_DIR", "cache")
    assert cli.main(words) == 0
    for flag in ("-o", "--json"):
        if flag in words and words[words.index(flag) + 1 :]:
            assert Path(words[words.index(flag) + 1]).stat().st_size > 0


def assert_succeeds(command: list[str]) -> None:
    done = run_alone(command)
    assert done.returncode == 0, done.stdout + done.stderr


def run_alone(command: list[str]) -> subprocess.CompletedProcess[str]:
    """In a process of its own, in the checkout, without a GPU."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "PYTEST"))}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def mentions() -> list[tuple[Path, str]]:
    """Commands in the midst of a sentence."""
    pattern = re.compile(r"`((?:tconv3d|make|pip|(?:\S*/)?python) [^`]+)`")
    return [
        (document, mention)
        for document in DOCUMENTS
        for mention in dict.fromkeys(pattern.findall(BLOCK.sub("", document.read_text())))
        if not mention.startswith("tconv3d leaves this")  # a warning's text
    ]


@pytest.mark.parametrize(("document", "mention"), mentions(), ids=identify)
def test_commands_that_are_mentioned_exist(document: Path, mention: str) -> None:
    """Mentioned with some of its words: the program, the command and the flags must be there."""
    words = shlex.split(mention)
    flags = [word for word in words if word.startswith("--")]
    if words[0] == "make":
        assert_succeeds(["make", "--dry-run", *words[1:]])
    elif words[0] == "pip":
        assert_extra(words)
    elif words[0] == "tconv3d":
        (choices,) = (a.choices for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
        assert set(flags) <= set(choices[words[1]]._option_string_actions)
    elif words[0] == "python":
        source = (ROOT / words[1]).read_text()
        assert all(f'"{flag}"' in source for flag in flags)
    elif words[0] == "python" and words[1].startswith("examples/"):  # test_examples.py runs them
        assert (ROOT / words[1]).is_file()
    else:
        pytest.fail(f"no test knows {mention!r} of {identify(document)}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_variables_of_the_environment_exist(document: Path) -> None:
    sources = "".join(file.read_text() for file in (ROOT / "tconv3d").rglob("*.py"))
    for variable in re.findall(r"TCONV3D_[A-Z_]+", document.read_text()):
        assert variable in sources, f"{identify(document)} speaks of {variable}"


def test_every_room_is_in_the_architecture() -> None:
    """Every folder of the package, and every module of a room whose modules the page lists one by one."""
    package = ROOT / "tconv3d"
    described = set(re.findall(r"`([\w/]+(?:/|\.py))`", (ROOT / "docs" / "architecture.md").read_text()))
    folders = {path.parent for path in package.rglob("*.py")} | {package / "device"}
    inside = {path for path in package.glob("*/*.py") if path.name != "__init__.py"}
    names = {f"{path.relative_to(package)}{'/' if path in folders else ''}" for path in folders - {package} | inside}
    assert names - described == set(), "missing"
    there = {str(path.relative_to(package)) for path in package.rglob("*.py")} | names
    elsewhere = {name for name in described if (ROOT / name).exists()}
    assert described - there - elsewhere == set(), "gone"


def test_ci_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert [line for line in script.read_text().splitlines() if line.startswith("make")] == ["make test"]
    assert "make test" in (ROOT / "README.md").read_text()
