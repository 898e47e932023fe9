"""The tables of the documents: made from results files, never by hand, never stale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import readme_table
from benchmarks.readme_table import TABLES, Table
from tconv3d.tools.bench.results import Results, Row


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
            row = Row(name, "three words", {}, "", "tf32", "contiguous", which, "halo", floor_ms=0.5, ours_ms=ours)
            row.torch_ms = {"default": 4.0, "benchmark": 2.0}
            row.error, row.torch_error = ours * 1e-4, 2e-4
            rows.append(row)
    rows[-1].failed, rows[-1].ours_ms, rows[-1].error = "no memory", None, None
    host = {"ours_us": 10.0, "torch_us": 20.0, "ours_grad_us": 30.0, "torch_grad_us": 40.0}
    return Results("bench", machine, {"command": "tconv3d bench --backward"}, rows=rows, host_us=host)


@pytest.fixture
def results_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is the invented one, and is taken to have whatever kind of rows is asked for."""
    monkeypatch.setattr(readme_table, "read", lambda name: invented())
    monkeypatch.setattr(readme_table, "_file_with", lambda kind, names: names[0])


def test_times(results_file: None) -> None:
    lines = readme_table.times().splitlines()
    assert (
        lines[2] == "| fast | halo | 0.500 | 1.000 | 4.000 | 2.000 | 2.00x | 0.500 | 1.000 | 4.000 | 2.000 | 2.00x |"
    )
    assert lines[3] == "| slow | halo | 0.500 | 3.000 | 4.000 | 2.000 | **0.67x** |  |  |  |  |  |"
    assert len({line.count("|") for line in lines[:4]}) == 1
    text = "\n".join(lines)
    assert "forward, tf32, contiguous, 2 layers" in text and "slower than it: slow" in text
    assert "10 / 20 without gradients, 30 / 40 with gradients." in text
    assert "Invented GPU, driver 1, CUDA 13, PyTorch 2, commit 0123456, 2000-01-01. Data" in text
    assert text.endswith("h200.json), written by `tconv3d bench --backward`.")


def test_means_and_errors(results_file: None) -> None:
    assert "| 1 | tf32 | contiguous | forward | 2 | 3.46x | 2.31x | 1.15x | 1 |" in readme_table.means()
    drawn = readme_table.random_layers()
    assert drawn.count("| tf32 |") == 2 * len(readme_table.RANDOM) and "| 1 | 0.67x: three words |" in drawn
    lines = readme_table.errors().splitlines()
    assert lines[2] == "| benchmark | tf32 | contiguous | forward | 4 | 3.0e-04 | 2.0e-04 | 2 |", (
        "two files, both this one"
    )
    assert lines[3] == "| benchmark | tf32 | contiguous | backward | 2 | 1.0e-04 | 2.0e-04 | 0 |"


def test_a_long_list_of_layers_is_shown_as_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    found = invented()
    found.settings["command"] = "tconv3d bench a1 b2 c3 d4 e5 f6 g7 --dtype tf32"
    assert "written by `tconv3d bench <7 layers> --dtype tf32`" in readme_table.source_of("x.json", found)


def test_results_are_only_what_tables_and_charts_are_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    for name in ("read", "read_json"):
        original = getattr(readme_table, name)

        def recording(file: str, original: Callable[[str], object] = original) -> object:
            used.add(file)
            return original(file)

        monkeypatch.setattr(readme_table, name, recording)
    for table in TABLES:
        table.fill()
    folder = readme_table.ROOT / readme_table.FOLDER
    assert {path.relative_to(readme_table.ROOT).as_posix() for path in folder.iterdir()} == used
    assert len(used) <= 12 and all(name.endswith(".json") for name in used)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 500_000


def test_only_what_is_between_the_marks_changes() -> None:
    table = Table("docs/some.md", "kind", lambda: "new ({up}file)")
    marks = "<!-- kind:begin (filled from benchmarks/results) -->", "<!-- kind:end -->"
    assert table.filled(f"a\n{marks[0]}\nold\n{marks[1]}\nb") == f"a\n{marks[0]}\nnew (../file)\n{marks[1]}\nb"
    with pytest.raises(ValueError, match="no place for kind"):
        table.filled("nothing")
    assert all(Path(readme_table.ROOT / each.document).is_file() for each in TABLES)
