"""The wheel: pure Python, with everything inside that a kernel needs to be compiled or emulated."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from places import ROOT

from tconv3d import emulator

# Compiles a kernel out of the sources that the wheel brought.
PROGRAM = """
import torch, tconv3d
x, w = torch.randn(1, 2, 2, 3, 2), torch.randn(2, 3, 2, 2, 2)
with tconv3d.use_backend("emulator"):
    y = tconv3d.conv_transpose3d(x, w, stride=2)
torch.testing.assert_close(y, torch.conv_transpose3d(x, w, stride=2))
print(tconv3d.__file__)
"""


def have_setuptools() -> bool:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network out of a copy of the sources."""
    if not have_setuptools():
        pytest.skip("building a wheel needs setuptools 77 or newer")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "tconv3d", source / "tconv3d", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "tconv3d_autoload.py"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(target)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = target.glob("*.whl")
    return file


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    files = (file for file in (ROOT / "tconv3d").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    expected = {file.relative_to(ROOT).as_posix() for file in files}
    assert any(name.endswith(".cuh") for name in expected)
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in inside if name.endswith("/METADATA"))
        (scripts,) = (archive.read(name).decode() for name in inside if name.endswith("/entry_points.txt"))
    assert expected - inside == set()
    assert {name for name in inside if not name.startswith("tconv3d")} == set(), "only the package is installed"
    assert "License-Expression: Apache-2.0" in metadata
    assert "tconv3d = tconv3d.tools.cli:main" in scripts
    assert "[torch.backends]\ntconv3d = tconv3d_autoload:announce" in scripts and "tconv3d_autoload.py" in inside
    for extra in ("cu12", "cu13"):
        assert f"Provides-Extra: {extra}" in metadata


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
def test_kernels_compile_out_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed)
