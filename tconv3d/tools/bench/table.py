"""Prints results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tconv3d.tools import tables
from tconv3d.tools.tables import Headings

from .results import ModelRow, Results, Row, summarize

FAILED = Text("failed", style="red")


def show(results: Results, console: Console) -> None:
    """Prints all results, then the failures."""
    if results.rows:
        timed = _show_tails if results.rows[0].tail else _show_timed
        (timed if results.kind == "bench" else _show_checked)(results, console)
    if results.models:
        _show_models(results.models, console)
    if results.host_us:
        times = ", ".join(f"{name.removesuffix('_us')} {value:.1f}" for name, value in results.host_us.items())
        console.print(f"microseconds of the host per call: {times}", highlight=False)
    for line in _summary(results):
        console.print(line, highlight=False)
    for row in results.rows:
        if row.failed:
            console.print(f"failed: {row.title} {row.dtype} {row.layout} {row.which}: {row.failed}", markup=False)
        for name, reason in row.torch_failed.items():
            console.print(f"PyTorch's {name}: {row.title} {row.dtype} {row.layout}: {reason}", markup=False)
    for model in results.models:
        if model.failed:
            console.print(f"failed: {model.model} {model.dtype} {model.layout}: {model.failed}", markup=False)
    if results.seconds:
        compiled = f", {results.compiled} kernels compiled in {results.compile_s:.0f} s" if results.compiled else ""
        console.print(f"{results.seconds:.0f} s in all{compiled}", highlight=False)
    if results.interrupted:
        console.print("interrupted: this is what was measured until then")


def _show_timed(results: Results, console: Console) -> None:
    caption = "times in ms; floor: the larger of moving every tensor once and of the arithmetic, at measured ceilings"
    numbers = ("floor", "ours", "x floor", "PyTorch", "best", "gain", "over best", "error")
    rows = []
    for row in results.rows:
        best = row.best
        cells = (
            *map(milliseconds, (row.floor_ms, row.ours_ms)),
            ratio(row.over_floor),
            *map(milliseconds, (row.default_ms, best[1] if best else None)),
            f"[bold]{ratio(row.gain)}[/]",
            _over_best(row.gain_over_best),
            _error(row),
        )
        rows.append(_row(row, cells))
    title = f"tconv3d beside PyTorch on {results.machine['gpu']}"
    tables.show(title, caption, Headings("layer", ("type", "pass"), "kernel", numbers), rows, console)


def _show_tails(results: Results, console: Console) -> None:
    """Prints the times of layers with tails: beside our convolution alone, the floor, and PyTorch's best variant."""
    caption = (
        "times in ms; plain: our convolution alone; floor: the larger of reading the inputs and writing the last "
        "result once and of the convolution's arithmetic, at measured ceilings; best: PyTorch's fastest variant; "
        "errors against float64, ours and PyTorch's"
    )
    numbers = ("plain", "ours", "x plain", "floor", "best", "over best", "error", "PyTorch")
    rows = []
    for row in results.rows:
        cells = (
            *map(milliseconds, (row.plain_ms, row.ours_ms)),
            ratio(row.over_plain),
            *map(milliseconds, (row.floor_ms, row.best[1] if row.best else None)),
            _over_best(row.gain_over_best),
            _error(row),
            _torch_error(row),
        )
        rows.append(_row(row, cells))
    way = results.settings.get("way", "")
    title = f"tconv3d ({way}) with tails beside PyTorch on {results.machine['gpu']}"
    tables.show(title, caption, Headings("layer + tail", ("type", "pass"), "fused", numbers), rows, console)


def _show_checked(results: Results, console: Console) -> None:
    gpu = results.machine["gpu"]
    place = gpu if results.settings["device"] == "cuda" else "the CPU, in the emulator (reduced volumes)"
    rows = [_row(row, (_error(row), _torch_error(row))) for row in results.rows]
    text = "fused" if results.rows[0].tail else "kernel"
    headings = Headings("layer", ("type", "pass"), text, ("ours", "PyTorch"))
    tables.show(f"Errors against float64 on {place}", "relative error of a whole tensor", headings, rows, console)


def _show_models(models: Sequence[ModelRow], console: Console) -> None:
    rows = []
    for row in models:
        kind = f"{row.dtype} {row.layout}"
        if row.failed:
            rows.append(tables.Row(row.model, (kind, ""), FAILED, ("",) * 4))
        for which, before in row.before_ms.items():
            after = row.after_ms.get(which)
            difference = "" if row.difference is None else f"[{'green' if row.ok else 'red'}]{row.difference:.1e}[/]"
            times = milliseconds(before), milliseconds(after), f"[bold]{ratio(before / after if after else None)}[/]"
            swapped = Text(f"{row.swapped} swapped")
            rows.append(tables.Row(row.model, (kind, which), swapped, (*times, difference)))
    headings = Headings("model", ("type", "pass"), "layers", ("before", "after", "gain", "difference"))
    tables.show("Whole models, before and after accelerate", "times in ms", headings, rows, console)


def _row(row: Row, numbers: tuple[str, ...]) -> tables.Row:
    kind = row.dtype + ("" if row.layout == "contiguous" else " last")
    text = Text(row.fused if row.tail else row.kernel)
    return tables.Row(row.title, (kind, row.which), FAILED if row.failed else text, numbers)


def _summary(results: Results) -> list[Text]:
    """Returns lines with the geometric means, and the layers that are wrong or slower than PyTorch's best."""
    lines: list[Text] = []
    found = summarize(results.rows)
    for each in found:
        text = f"{each.dtype} {each.layout} {each.which}, geometric mean of {each.layers}: "
        text += f"{ratio(each.over_floor)} the floor"
        if each.over_plain is not None:
            text += f", {ratio(each.over_plain)} the plain convolution"
        if each.gain is not None:
            text += f", gain {ratio(each.gain)}, over PyTorch's best {ratio(each.gain_over_best)}"
        lines.append(Text(text))
    for each in found:
        if each.slower:
            kind = f"{each.dtype} {each.layout} {each.which}"
            names = f"{len(each.slower)} of {each.layers}: {', '.join(each.slower)}"
            lines.append(Text(f"Slower than PyTorch's best, {kind}, {names}", style="yellow"))
    wrong = [row for row in results.rows if row.right is False]
    if wrong:
        names = ", ".join(f"{row.title} {row.dtype} {row.layout} {row.which}" for row in wrong)
        lines.append(Text(f"Not within the tolerance of float64: {names}", style="red"))
    return lines


def _error(row: Row) -> str:
    if row.error is None:
        return ""
    return f"[{'green' if row.right else 'red'}]{row.error:.1e}[/]"


def _torch_error(row: Row) -> str:
    return "" if row.torch_error is None else f"{row.torch_error:.1e}"


def _over_best(value: float | None) -> str:
    return ratio(value) if value is None or value >= 1 else f"[yellow]{ratio(value)}[/]"


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"
