"""Results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .results import ModelRow, Results, Row, summarize


def show(results: Results, console: Console) -> None:
    """All that was found, then what went wrong."""
    if results.rows:
        console.print(_timed(results) if results.kind == "bench" else _checked(results))
    if results.models:
        console.print(_models(results.models))
    if results.host_us:
        times = ", ".join(f"{name.removesuffix('_us')} {value:.1f}" for name, value in results.host_us.items())
        console.print(f"microseconds of the host per call: {times}", highlight=False)
    for line in _summary(results):
        console.print(line, highlight=False)
    for row in results.rows:
        if row.failed:
            console.print(f"failed: {row.layer} {row.dtype} {row.layout} {row.which}: {row.failed}", markup=False)
        for name, reason in row.torch_failed.items():
            console.print(f"PyTorch's {name}: {row.layer} {row.dtype} {row.layout}: {reason}", markup=False)
    for model in results.models:
        if model.failed:
            console.print(f"failed: {model.model} {model.dtype} {model.layout}: {model.failed}", markup=False)
    if results.seconds:
        compiled = f", {results.compiled} kernels compiled in {results.compile_s:.0f} s" if results.compiled else ""
        console.print(f"{results.seconds:.0f} s in all{compiled}", highlight=False)
    if results.interrupted:
        console.print("interrupted: this is what was measured until then")


def _timed(results: Results) -> Table:
    gpu = results.machine["gpu"]
    caption = "times in ms; floor: the larger of moving every tensor once and of the arithmetic, at measured ceilings"
    table = Table(title=f"tconv3d beside PyTorch on {gpu}", caption=caption)
    for heading in ("layer", "type", "pass", "kernel"):
        table.add_column(heading, overflow="fold")
    for heading in ("floor", "ours", "x floor", "PyTorch", "best", "gain", "over best", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for row in results.rows:
        best = row.best
        cells = [
            *_first(row, previous),
            row.kernel if not row.failed else "[red]failed[/]",
            *map(milliseconds, (row.floor_ms, row.ours_ms)),
            ratio(row.over_floor),
            *map(milliseconds, (row.default_ms, best[1] if best else None)),
            f"[bold]{ratio(row.gain)}[/]",
            _over_best(row.gain_over_best),
            _error(row),
        ]
        table.add_row(*cells)
        previous = row.layer
    return table


def _checked(results: Results) -> Table:
    gpu = results.machine["gpu"]
    place = gpu if results.settings["device"] == "cuda" else "the CPU, in the emulator (reduced volumes)"
    table = Table(title=f"Errors against float64 on {place}", caption="relative error of a whole tensor")
    for heading in ("layer", "type", "pass", "kernel"):
        table.add_column(heading, overflow="fold")
    for heading in ("ours", "PyTorch"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for row in results.rows:
        theirs = "" if row.torch_error is None else f"{row.torch_error:.1e}"
        kernel = row.kernel if not row.failed else "[red]failed[/]"
        table.add_row(*_first(row, previous), kernel, _error(row), theirs)
        previous = row.layer
    return table


def _models(rows: Sequence[ModelRow]) -> Table:
    table = Table(title="Whole models, before and after accelerate", caption="times in ms")
    for heading in ("model", "type"):
        table.add_column(heading, overflow="fold")
    for heading in ("swapped", "pass", "before", "after", "gain", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        kind = f"{row.dtype} {row.layout}"
        if row.failed:
            table.add_row(row.model, kind, "", "[red]failed[/]", "", "", "", "")
        for which, before in row.before_ms.items():
            after = row.after_ms.get(which)
            difference = "" if row.difference is None else f"[{'green' if row.ok else 'red'}]{row.difference:.1e}[/]"
            times = milliseconds(before), milliseconds(after), f"[bold]{ratio(before / after if after else None)}[/]"
            table.add_row(row.model, kind, str(row.swapped), which, *times, difference)
    return table


def _summary(results: Results) -> list[str]:
    """Geometric means, and what is wrong or slower."""
    lines = []
    found = summarize(results.rows)
    for each in found:
        text = f"{each.dtype} {each.layout} {each.which}, geometric mean of {each.layers}: "
        text += f"{ratio(each.over_floor)} the floor"
        if each.gain is not None:
            text += f", gain {ratio(each.gain)}, over PyTorch's best {ratio(each.gain_over_best)}"
        lines.append(text)
    for each in found:
        if each.slower:
            kind = f"{each.dtype} {each.layout} {each.which}"
            names = f"{len(each.slower)} of {each.layers}: {', '.join(each.slower)}"
            lines.append(f"[yellow]Slower than PyTorch's best, {kind}, {names}[/]")
    wrong = [row for row in results.rows if row.right is False]
    if wrong:
        names = ", ".join(f"{row.layer} {row.dtype} {row.layout} {row.which}" for row in wrong)
        lines.append(f"[red]Not within the tolerance of float64: {names}[/]")
    return lines


def _first(row: Row, previous: str) -> tuple[str, str, str]:
    kind = row.dtype + ("" if row.layout == "contiguous" else " last")
    return ("" if row.layer == previous else row.layer), kind, row.which


def _error(row: Row) -> str:
    if row.error is None:
        return ""
    return f"[{'green' if row.right else 'red'}]{row.error:.1e}[/]"


def _over_best(value: float | None) -> str:
    return ratio(value) if value is None or value >= 1 else f"[yellow]{ratio(value)}[/]"


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"
