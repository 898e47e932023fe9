"""`.ci/run`: it brings a browser where it can, and a browser that cannot be had does not stop it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import oldest_torch
import pytest
from places import ROOT

SCRIPT = ROOT / ".ci" / "run"
NEEDED = ("bash", "dirname", "env", "timeout")


@pytest.mark.parametrize(
    ("programs", "installs", "complains"),
    [
        ({"chromium": "exit 0", "id": "echo 0", "apt-get": "exit 1"}, False, False),
        ({"id": "echo 0", "apt-get": "exit 0"}, True, False),
        ({"id": "echo 0", "apt-get": "exit 1"}, False, True),
        ({"id": "echo 0", "apt-get": "[ $2 = update ]"}, True, True),
        ({"id": "echo 1000", "apt-get": "exit 0"}, False, True),
        ({"id": "echo 0"}, False, True),
    ],
    ids=["there", "installed", "no network", "no package", "not root", "not Debian"],
)
def test_a_browser_is_installed_where_it_can_be(
    programs: dict[str, str], installs: bool, complains: bool, tmp_path: Path
) -> None:
    done, calls = run_on({**programs, "make": "exit 7"}, tmp_path)
    assert done.returncode == 7, "the status is that of the tests"
    assert calls[-1] == "make test"
    assert ("apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core" in calls) == installs
    assert ("could not be installed" in done.stdout) == complains


def test_the_oldest_pytorch_is_the_one_that_the_package_names() -> None:
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", oldest_torch.oldest())
    assert all((SCRIPT.parents[1] / test).is_file() for test in oldest_torch.TESTS)


def test_a_machine_without_network_skips_the_oldest_pytorch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert oldest_torch.main(["--short"]) == 0
    assert f"skipped: {oldest_torch.oldest()} cannot be installed here" in capfd.readouterr().out


def run_on(programs: dict[str, str], tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script on a machine that has these programs and no others, and returns what it called."""
    log = tmp_path / "log"
    for name, body in programs.items():
        file = tmp_path / name
        file.write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n{body}\n')
        file.chmod(0o755)
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        os.symlink(found, tmp_path / name)
    done = subprocess.run([SCRIPT], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    return done, log.read_text().splitlines()
