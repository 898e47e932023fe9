"""The documents' figures: drawn from the geometry and from results files, never stale, and right."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from places import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def load() -> ModuleType:
    """`docs/figures.py`, which is a script and belongs to no package."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


figures = load()
ALL: dict[Path, str] = figures.all_figures()


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_figure_is_what_would_be_drawn_now(path: Path) -> None:
    assert path.read_text() == ALL[path], "stale: run `python docs/figures.py`"
    assert ALL[path] == figures.all_figures()[path], "drawn twice, it differs"


def test_every_figure_is_shown_in_a_document() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {
        (document.parent / target).resolve()
        for document in documents
        for target in re.findall(r"!\[[^\]]+\]\(([^)\s]+\.svg)\)", document.read_text())
    }
    assert shown == set(figures.FIGURES.glob("*.svg")) == set(ALL)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_figure_needs_nothing_else_and_stays_within_its_frame(path: Path) -> None:
    root = ElementTree.fromstring(ALL[path])
    assert not re.search(r"url\(|@import|href", ALL[path])
    width, height = (float(root.get(name, "nan")) for name in ("width", "height"))
    for element in root:
        for name, most in (("x", width), ("x1", width), ("x2", width), ("y", height), ("y1", height), ("y2", height)):
            assert 0 <= float(element.get(name, "0")) <= most
        if element.tag == f"{SVG}rect":
            assert float(element.get("x", "0")) + float(element.get("width", "0")) <= width
            assert float(element.get("y", "0")) + float(element.get("height", "0")) <= height


def test_lines_join_what_pytorch_joins() -> None:
    """Each line of the first figure is an input that an output depends on, and no such pair is missing."""
    root = ElementTree.fromstring(figures.taps())
    cells = [[float(e.get(name, "0")) for name in ("x", "width", "y")] for e in root.iter(f"{SVG}rect")]
    inputs = [cell for cell in cells if cell[2] == 50]
    outputs = [cell for cell in cells if cell[2] == 170]

    def index(row: list[list[float]], x: float) -> int:
        (found,) = (number for number, (left, width, _) in enumerate(row) if left < x < left + width)
        return found

    ends = [[float(e.get(name, "nan")) for name in ("x1", "x2")] for e in root.iter(f"{SVG}line")]
    lines = [(index(inputs, x1), index(outputs, x2)) for x1, x2 in ends]
    eye = torch.eye(len(inputs))[:, None]
    reached = F.conv_transpose1d(eye, torch.ones(1, 1, 3), stride=2, padding=1, output_padding=1)[:, 0]
    assert reached.shape[1] == len(outputs)
    assert sorted(lines) == [tuple(pair) for pair in reached.nonzero().tolist()]


@pytest.mark.parametrize("number", range(6))
def test_tables_compute_the_transposed_convolution(number: int) -> None:
    """The formula that a table stands for, evaluated, is PyTorch's result."""
    axis = figures.TABLES[number]
    x, w = torch.randn(7, dtype=torch.float64), torch.randn(axis.kernel, dtype=torch.float64)
    expected = F.conv_transpose1d(
        x[None, None], w[None, None], None, axis.stride, axis.padding, axis.output_padding, 1, axis.dilation
    )[0, 0]
    for o in range(len(expected)):
        formula = figures.gathered(axis, o % axis.stride).replace("\u2212", "-")
        terms = re.findall(r"w\[(\d+)\] x\[q(?: ([+-]) (\d+))?\]", formula)
        total = torch.zeros((), dtype=torch.float64)
        for tap, sign, distance in terms:
            i = o // axis.stride + (int(sign + distance) if distance else 0)
            total += w[int(tap)] * x[i] if 0 <= i < len(x) else 0
        torch.testing.assert_close(total, expected[o])
        assert terms or "bias alone" in formula
