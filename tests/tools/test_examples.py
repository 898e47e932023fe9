"""The examples run as a user runs them, and compute the same on the kernels."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

import tconv3d
from tconv3d import emulator

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_without_a_gpu(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::UserWarning", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


@pytest.mark.slow
def test_sharded_training_is_that_of_one_process(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(ROOT / "examples" / "train_sharded.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["one", "data", "parameters", "volume"]
    assert all("on 2 processes" in line for line in lines[1:])


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("name", ["swap_unet", "fused_block", "train_decoder"])
def test_an_example_runs_on_the_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    main = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    with tconv3d.use_backend("emulator"):
        main(**({"steps": 3} if name == "train_decoder" else {}))
    assert capsys.readouterr().out.strip()


def test_the_documents_name_every_example() -> None:
    text = (ROOT / "README.md").read_text()
    assert EXAMPLES and all(f"examples/{path.name}" in text for path in EXAMPLES)
