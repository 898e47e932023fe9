"""Programs saved by torch.export and AOTInductor, in a process that has not imported the library, and then does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import PYTHONPATH, ROOT
from torch import nn

import tconv3d
from tconv3d import emulator
from tconv3d.runtime import packs
from tconv3d.torch_ops import operators

ENTRY_POINTS = "[torch.backends]\ntconv3d = tconv3d_autoload:announce\n"

# The process can neither compile nor write a cache.
LOADER = """
import sys
import torch
assert "tconv3d" not in sys.modules
x, expected = torch.load("tensors.pt")
programs = [torch.export.load("exported.pt2").module(), torch._inductor.aoti_load_package("aoti.pt2")]
for program in programs:
    try:
        program(x)
    except RuntimeError as error:
        assert "`import tconv3d` before the program is called" in str(error), error
    else:
        raise AssertionError("ran")
import tconv3d
tconv3d.use_backend("emulator")
torch.backends.cudnn.conv.fp32_precision = "ieee"
for program in programs:
    assert float((program(x).double() - expected).norm() / expected.norm()) < 1e-6
"""


def save(folder: Path) -> None:
    """Saves a program in both formats, its input and exact output, and the kernels that it launches."""
    torch.manual_seed(0)
    layer = tconv3d.ConvTranspose3d(4, 2, 1)
    model, x = nn.Sequential(layer, nn.Tanh()).eval().requires_grad_(False), torch.randn(1, 4, 2, 3, 4)
    program = torch.export.export(model, (x,))
    torch.export.save(program, folder / "exported.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "aoti.pt2"))
    exact = torch.conv_transpose3d(x.double(), layer.weight.double(), layer.bias.double())  # type: ignore[union-attr]
    torch.save((x, exact.tanh()), folder / "tensors.pt")
    tconv3d.precompile(model, x, path=folder / "kernels.tconv3d", gpus="emulator", dtypes=["float32"], backward=False)


@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
@pytest.mark.thorough
def test_a_saved_program_says_what_to_import_and_then_runs_packed_kernels(tmp_path: Path) -> None:
    saving = f"import pathlib, test_saved_programs as t; t.save(pathlib.Path({str(tmp_path)!r}))"
    places = os.pathsep.join((PYTHONPATH, str(Path(__file__).parent)))
    # A process of its own saves: what other tests have compiled or registered has no part in the programs.
    subprocess.run([sys.executable, "-c", saving], env=os.environ | {"PYTHONPATH": places}, check=True)
    metadata = tmp_path / "site" / "tconv3d-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tconv3d\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "bin").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {
        "PYTHONPATH": f"{metadata.parent}{os.pathsep}{PYTHONPATH}",
        "PATH": str(tmp_path / "bin"),
        "TCONV3D_CACHE_DIR": "/proc/no/such/place",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # this test is about the entry point that it switches
        packs.VARIABLE: str(tmp_path / "kernels.tconv3d"),
    }
    command = [sys.executable, "-c", LOADER]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_entry_point_is_the_packages() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."torch.backends"]\ntconv3d = "tconv3d_autoload:announce"\n' in text
    assert f'NAME = "{operators.ANNOUNCED}"' in (ROOT / "tconv3d_autoload.py").read_text()


def test_every_operator_is_declared_for_processes_without_the_package() -> None:
    """An operator that is not in SCHEMAS would be unknown to a process that has not imported the package."""
    names = {schema.partition("(")[0] for schema in operators.SCHEMAS}
    registered = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("tconv3d::")
    }
    assert registered == names


# An `import torch` must not fail because of this package, whatever state it is in.
BROKEN = """
import torch, sys
import tconv3d_autoload
assert tconv3d_autoload.announce() is None
assert "tconv3d_announced_operators" not in sys.modules
"""


def test_a_broken_installation_does_not_stop_pytorch(tmp_path: Path) -> None:
    (tmp_path / "tconv3d_autoload.py").write_text((ROOT / "tconv3d_autoload.py").read_text())
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", BROKEN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
