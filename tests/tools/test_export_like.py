"""`tconv3d export --like`: which models can be exported, and what their files keep of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tconv3d.tools import cli
from tconv3d.tools.export import NotExportableError, reference

REFERENCE = '''"""A reference."""
from __future__ import annotations
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """A Model."""
    def __init__(self, channels, scale=2.0):
        super(Model, self).__init__()
        self.scale = scale
        self.up = nn.ConvTranspose3d(channels, 6, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 6, eps=1e-3)

    def forward(self, x):
FORWARD

channels = 4

def get_inputs():
    return [torch.rand(2, channels, 3, 4, 5)]

def get_init_inputs():
    return [channels]
'''


def read(*forward: str) -> reference.Reference:
    return reference.read(REFERENCE.replace("FORWARD", "\n".join(f"        {line}" for line in forward)))


def forward_of(found: reference.Reference) -> list[str]:
    lines = found.model.split("\n")
    start = next(i for i, line in enumerate(lines) if "def forward" in line)
    end = next(i for i in range(start, len(lines)) if "return" in lines[i])
    return [line.strip() for line in lines[start + 1 : end + 1] if "settings" not in line]


CONVOLVED = "convolve(x, self.up.weight)"
BLOCK = "block(x, self.up.weight, self.norm.weight, self.norm.bias)"


@pytest.mark.parametrize(
    ("forward", "left"),
    [
        (["return self.up(x)"], [f"return {CONVOLVED}"]),
        (["x = self.up(x)", "x = F.relu(x)", "return self.norm(x)"], [f"return {BLOCK}"]),
        (["return self.norm(torch.relu(self.up(x)))"], [f"return {BLOCK}"]),
        (["y = self.up(x).relu()", "return F.group_norm(y, 2, self.norm.weight, self.norm.bias, 1e-3)"],
         [f"return {BLOCK}"]),
        (["return F.conv_transpose3d(x, self.up.weight, stride=2, padding=1)"], [f"return {CONVOLVED}"]),
        (["return torch.relu(self.up(x))"],
         [f"x = {CONVOLVED}", "# PyTorch computes what follows.", "return x.relu()"]),
        (["x = self.up(x)", "x = torch.clamp(x, min=-1.0)", "return x / self.scale"],
         [f"x = {CONVOLVED}", "# PyTorch computes what follows.", "x = x.clamp(min=-1.0)", "return x / 2.0"]),
        (["y = self.up(x * 2)", "return torch.relu(y) + y"],
         ["# PyTorch computes what comes before the convolution.", "x = x * 2",
          "up = convolve(x, self.up.weight)", "# PyTorch computes what follows.", "x = up.relu()",
          "return x + up"]),
    ],
)  # fmt: skip
def test_forwards(forward: list[str], left: list[str]) -> None:
    found = read(*forward)
    assert forward_of(found) == left
    assert found.layer.kernel == (3, 3, 3) and found.layer.stride == (2, 2, 2) and not found.layer.bias
    assert found.eps == (1e-3 if found.layer.norm_groups else 1e-5)
    assert (found.dtype, found.layout, found.layer.input_shape) == (torch.float32, "contiguous", (2, 4, 3, 4, 5))


def test_everything_else_of_the_reference_stays() -> None:
    found = read("return self.up(x)")
    assert "class ModelNew(nn.Module):" in found.model and "super(ModelNew, self)" in found.model
    assert '"""A Model."""' in found.model and "def __init__(self, channels, scale=2.0):" in found.model
    assert "__future__" not in found.model and found.written()[1] == ""
    assert found.title == "A reference."
    space: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    exec(found.model, space)
    reference_space: dict[str, Any] = {}
    exec(REFERENCE.replace("FORWARD", "        return self.up(x)"), reference_space)
    states = []
    for model in (space["ModelNew"], reference_space["Model"]):
        torch.manual_seed(3)
        states.append(model(*space["get_init_inputs"]()).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (["return torch.relu(x)"], "one transposed 3D convolution, got 0"),
        (["return self.up(self.up(x))"], "one transposed 3D convolution, got 2"),
        (["return self.up(x) if x.sum() > 0 else x"], "cannot be traced"),
        (["return self.up(x, output_size=[6, 8, 10])"], "output_size"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_words(forward: list[str], why: str) -> None:
    with pytest.raises(NotExportableError, match=why):
        read(*forward)


def test_a_file_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "reference.py"
    path.write_text("x = 1\n")
    assert cli.main(["export", "--like", str(path)]) == 1
    assert "this one has no Model, get_inputs, get_init_inputs" in capsys.readouterr().err
    assert cli.main(["export", "--like", str(tmp_path / "none.py")]) == 1
    assert "cannot read" in capsys.readouterr().err
