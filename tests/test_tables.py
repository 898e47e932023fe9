"""The tables of the documents: made from results files, never by hand, never stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import readme_table
from benchmarks.readme_table import TABLES, Table
from tconv3d.bench.results import Results, Row


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.document}-{table.name}")
def test_a_table_is_what_the_results_say(table: Table) -> None:
    text = (readme_table.ROOT / table.document).read_text()
    assert table.filled(text) == text, "stale: run `python benchmarks/readme_table.py`"


def invented() -> Results:
    """Two layers, of which one is slower than PyTorch's best and one fails backward."""
    machine = {
        "gpu": "Invented GPU",
        "driver": "1",
        "cuda": "13",
        "torch": "2",
        "commit": "0123456789",
        "measured": "2000-01-01T",
    }
    rows = []
    for name, ours in (("fast", 1.0), ("slow", 3.0)):
        for which in ("forward", "backward"):
            row = Row(name, "", {}, "", "tf32", "contiguous", which, "halo", floor_ms=0.5, ours_ms=ours)
            row.torch_ms = {"default": 4.0, "benchmark": 2.0}
            row.error, row.torch_error = ours * 1e-4, 2e-4
            rows.append(row)
    rows[-1].failed, rows[-1].ours_ms, rows[-1].error = "no memory", None, None
    host = {"ours_us": 10.0, "torch_us": 20.0, "ours_grad_us": 30.0, "torch_grad_us": 40.0}
    return Results("bench", machine, {"command": "tconv3d bench --backward"}, rows=rows, host_us=host)


@pytest.fixture
def results_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_table, "read", lambda name: invented())


def test_times(results_file: None) -> None:
    lines = readme_table.times().splitlines()
    assert (
        lines[2] == "| fast | halo | 0.500 | 1.000 | 4.000 | 2.000 | 2.00x | 0.500 | 1.000 | 4.000 | 2.000 | 2.00x |"
    )
    assert lines[3] == "| slow | halo | 0.500 | 3.000 | 4.000 | 2.000 | **0.67x** |  |  |  |  |  |"
    assert len({line.count("|") for line in lines[:4]}) == 1
    text = "\n".join(lines)
    assert "forward, tf32, contiguous, 2 layers" in text and "slower than it: slow" in text
    assert "10 / 20 without gradients, 30 / 40 with" in text
    assert "Invented GPU, driver 1, CUDA 13, PyTorch 2, commit 0123456, 2000-01-01. Data" in text
    assert text.endswith("h200.json), written by `tconv3d bench --backward`.")


def test_means_and_errors(results_file: None) -> None:
    assert "| tf32 | contiguous | forward | 2 | 3.46x | 2.31x | 1.15x | 1 |" in readme_table.means()
    assert readme_table.random_layers().count("| tf32 |") == 2
    lines = readme_table.errors().splitlines()
    assert lines[2:4] == [
        "| tf32 | forward | 2 | 3.0e-04 | 2.0e-04 | 1 |",
        "| tf32 | backward | 1 | 1.0e-04 | 2.0e-04 | 0 |",
    ]


def test_only_what_is_between_the_marks_changes() -> None:
    table = Table("docs/some.md", "kind", lambda: "new ({up}file)")
    marks = "<!-- kind:begin (filled from benchmarks/results) -->", "<!-- kind:end -->"
    assert table.filled(f"a\n{marks[0]}\nold\n{marks[1]}\nb") == f"a\n{marks[0]}\nnew (../file)\n{marks[1]}\nb"
    with pytest.raises(ValueError, match="no place for kind"):
        table.filled("nothing")
    assert all(Path(readme_table.ROOT / each.document).is_file() for each in TABLES)
