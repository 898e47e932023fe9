"""What is printed for people, in terminals of any width: no name is cut short, and no text taken for markup."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from places import ROOT
from rich.console import Console
from rich.text import Text

import tconv3d
from tconv3d.tools import cli, tables
from tconv3d.tools.bench import results, table
from tconv3d.tools.bench.layers import LAYERS

WIDTHS = [80, 100, 120, 140, 200]
# The longest of each: of the table's layers, of a model's (MONAI's UNet), of types, of kernels that share a pass.
LONGEST = max(LAYERS, key=len)
NAMES = [LONGEST, "model.1.submodule.1.submodule.1.submodule.2.0.conv", "decoder[bold]up[0][/].conv", "random_91_39"]
KERNELS = "fused: few_weight_grad, group_backward, hopper_weight_grad"


def printed(width: int, show: Any) -> list[str]:
    file = io.StringIO()
    show(Console(file=file, width=width))
    return file.getvalue().splitlines()


def measured(kind: str, failed: str = "") -> results.Results:
    """Results as long as they get."""
    figures: dict[str, Any] = {"floor_ms": 1234.5, "ours_ms": 2345.6, "error": 1.2e-3, "torch_error": 3.4e-3}
    figures |= {"torch_ms": {"default": 34567.8, "best": 23456.7}, "right": True, "failed": failed}
    rows = [
        results.Row(name, "", {}, "", "bfloat16", "channels_last_3d", which, KERNELS, **figures)
        for name in NAMES
        for which in results.PASSES
    ]
    return results.Results(kind, {"gpu": "NVIDIA H100 80GB HBM3 [imaginary]"}, {"device": "cuda"}, rows=rows)


TIMED = ["1234.5", "2345.6", "1.90x", "34567.8", "23456.7", "14.7x", "10.0x"]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["bench", "verify"])
def test_names_and_numbers_are_whole(kind: str, width: int) -> None:
    lines = printed(width, lambda console: table.show(measured(kind), console))
    assert max(map(len, lines)) <= width
    for name in NAMES:
        assert any(name in line for line in lines), f"{name} is cut short"
    text = "\n".join(lines)
    assert "[imaginary]" in text
    figures = TIMED if kind == "bench" else ["3.4e-03"]
    for figure in (*figures, "1.2e-03", "bfloat16 last", "backward"):
        assert sum(line.count(figure) for line in lines) >= len(NAMES), f"{figure} is cut short"
    assert "…" not in text


def measured_files() -> list[results.Results]:
    found = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        with contextlib.suppress(ValueError):  # a file of another command
            found.append(results.read(path))
    return found


@pytest.mark.parametrize("width", [80, 120])
def test_what_was_measured_fits(width: int) -> None:
    files = measured_files()
    assert files
    for found in files:
        lines = printed(width, lambda console, found=found: table.show(found, console))
        text = "\n".join(lines)
        assert max(map(len, lines)) <= width
        assert all(row.layer in text for row in found.rows)
        assert "…" not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_models(width: int) -> None:
    times = {"forward": 12.345, "training": 123.4}
    last = "bfloat16", "channels_last_3d", 5, 0, times, times, 1e-4, True
    models = [
        results.ModelRow("benchmarks.monai_networks:dynunet", *last),
        results.ModelRow("package.with[brackets]:factory", "tf32", "contiguous", 0, 0, failed="[red]it[/] fails"),
    ]
    found = results.Results("bench", {"gpu": "none"}, {}, models=models)
    text = "\n".join(printed(width, lambda console: table.show(found, console)))
    for words in ("benchmarks.monai_networks:dynunet", "package.with[brackets]:factory", "[red]it[/] fails"):
        assert words in text
    for words in ("bfloat16 channels_last_3d", "5 swapped", "training", "12.345", "1.00x", "1.0e-04"):
        assert words in text


def test_a_layer_that_failed_or_is_slower_is_named_as_it_is() -> None:
    lines = printed(80, lambda console: table.show(measured("bench", failed="out of [memory]"), console))
    text = " ".join(lines)
    assert f"failed: {NAMES[2]}" in text and "out of [memory]" in text
    slower = measured("bench")
    for row in slower.rows:
        row.ours_ms, row.right = 99999.9, False
    lines = printed(200, lambda console: table.show(slower, console))
    assert any("Slower than PyTorch's best" in line for line in lines)
    assert sum(line.count(NAMES[2]) for line in lines) >= 4


def test_a_table_without_rows() -> None:
    headings = tables.Headings("layer", ("type",), "kernel", ("ms",))
    for width in (20, 80):
        assert printed(width, lambda console: tables.show("title", "caption", headings, [], console))


def test_only_the_text_folds() -> None:
    headings = tables.Headings("layer", (), "kernel", ("ms",))
    rows = [tables.Row("name", (), Text("many words that fold into a column"), ("1.0",))]
    lines = printed(40, lambda console: tables.show("", "", headings, rows, console))
    assert any(line.startswith("│ name ") and line.endswith(" 1.0 │") for line in lines)


@pytest.mark.parametrize("width", [80, 100])
def test_long_lines_go_on_between_words(width: int) -> None:
    layer = tconv3d.ConvTranspose3d(48, 24, (3, 5, 5), stride=(2, 3, 3), padding=1, device="meta")
    text = str(tconv3d.explain(layer, (2, 48, 16, 31, 33), gpu="H200"))
    assert max(map(len, text.splitlines())) > width
    found = tables.wrapped(text, width)
    assert max(map(len, found.splitlines())) <= width
    assert found.split() == text.split()
    assert tables.wrapped("a\n\n  b", width) == "a\n\n  b"


def test_explain_folds_its_lines_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["explain", "--in-channels=64", "--out-channels=32", "--kernel=3", "--size=64", "--gpu=H200"]
    assert cli.main(words) == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 < max(map(len, piped.splitlines()))
    assert shown.split() == piped.split()
