"""Implements `tconv3d report`: results as one self-contained HTML page, which needs neither a network nor a server.

The template is `report.html` beside this file. Every text from a results file is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from . import charts
from .charts import ratio_text
from .results import ModelRow, Results, Row, geometric_mean
from .table import milliseconds

TEMPLATE = Path(__file__).with_name("report.html")
Kind = tuple[str, str, str]  # dtype, layout, pass


def page(results: Results) -> str:
    """Returns the HTML of the whole page."""
    timed = [row for row in results.rows if row.ours_ms is not None]
    if not timed and not results.models:
        raise ValueError("these results hold no times: the report is made of what `tconv3d bench --json` writes")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(row.title for row in results.rows), 1)}
    kinds = list(dict.fromkeys((row.dtype, row.layout, row.which) for row in timed))
    gpu = results.machine.get("gpu") or "an unknown GPU"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"tconv3d on {gpu}"),
        gpu=escape(gpu),
        subtitle=escape(_subtitle(results)),
        warning=_warning(results),
        choices=_choices(kinds),
        views="".join(_view(kind, _of_kind(results.rows, kind), numbers, results) for kind in kinds),
        models=_models(results.models),
        failures=_failures(results),
        facts=_facts(results),
    )


def _of_kind(rows: Iterable[Row], kind: Kind) -> list[Row]:
    return [row for row in rows if (row.dtype, row.layout, row.which) == kind and row.ours_ms is not None]


def _subtitle(results: Results) -> str:
    machine = results.machine
    parts = [f"PyTorch {machine.get('torch')}", f"CUDA {machine.get('cuda')}", f"tconv3d {machine.get('tconv3d')}"]
    measured = str(machine.get("measured") or "")[:10]
    return ", ".join([*parts, *([measured] if measured else [])])


def _warning(results: Results) -> str:
    """Warns at the top of the page of wrong results and of an interrupted run."""
    wrong = [row for row in results.rows if row.right is False]
    lines = []
    if wrong:
        names = ", ".join(dict.fromkeys(f"{row.title} ({row.dtype} {row.which})" for row in wrong))
        lines.append(f"Wrong results, not within the tolerance of float64: {names}")
    if results.interrupted:
        lines.append("The run was interrupted: not everything was measured")
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in lines)


def _choices(kinds: Sequence[Kind]) -> str:
    """Returns one group of buttons for each of type, layout and pass that has several values."""
    groups = ""
    for index, name in enumerate(("Type", "Layout", "Pass")):
        values = list(dict.fromkeys(kind[index] for kind in kinds))
        if len(values) > 1:
            buttons = "".join(
                f'<button type="button" data-index="{index}" data-value="{escape(value)}">{escape(value)}</button>'
                for value in values
            )
            groups += f'<div class="choice" role="group" aria-label="{name}">{buttons}</div>'
    return groups


def _view(kind: Kind, rows: Sequence[Row], numbers: dict[str, int], results: Results) -> str:
    """Shows one precision, layout and pass: the key figures, both charts, the table."""
    numbered = [(numbers[row.title], row) for row in rows]
    dtype, layout, which = kind
    heading = escape(f"{which.capitalize()}, {dtype}, {layout}")
    attributes = " ".join(f'data-{name}="{escape(value)}"' for name, value in zip("012", kind, strict=True))
    return (
        f'<section class="view" {attributes}><h2>{heading}</h2>'
        f'<div class="tiles">{_tiles(rows)}</div>'
        + _figure(
            "speedups",
            "Speed-up over PyTorch",
            "Solid: over the best of PyTorch&rsquo;s variants. Pale: over PyTorch as it comes. "
            "The scale is logarithmic, from 1&times; (equally fast).",
            charts.speedups(numbered),
        )
        + _figure(
            "roofline-figure",
            "Roofline",
            "Numbered dots: this library. Rings: PyTorch as it comes. The lines above are the copy bandwidth and "
            "the matrix rate that were measured in the same run.",
            _within("roofline", charts.roofline(numbered, results.ceilings, dtype)),
        )
        + f"{_table(numbered)}</section>"
    )


def _tiles(rows: Sequence[Row]) -> str:
    slower = sum(row.slower for row in rows)
    compared = sum(1 for row in rows if row.gain_over_best is not None)
    tiles = [
        (ratio_text(geometric_mean(row.gain_over_best for row in rows)), "over PyTorch&rsquo;s best, geometric mean"),
        (ratio_text(geometric_mean(row.gain for row in rows)), "over PyTorch as it comes"),
        (ratio_text(geometric_mean(row.over_floor for row in rows)), "the time the hardware needs at least"),
        (f"{compared - slower} of {compared}", "layers not slower than PyTorch&rsquo;s best"),
    ]
    return "".join(f"<div><strong>{value}</strong><span>{text}</span></div>" for value, text in tiles)


def _within(name: str, chart: str) -> str:
    return f'<div class="{name}">{chart}</div>' if chart else ""


def _figure(name: str, title: str, text: str, chart: str) -> str:
    if not chart:
        return ""
    return f'<figure class="{name}"><h3>{title}</h3><figcaption>{text}</figcaption>{chart}</figure>'


HEADINGS = (
    "Layer",
    "Kernel",
    "Floor ms",
    "Ours ms",
    "&times; floor",
    "PyTorch ms",
    "Best ms",
    "Gain",
    "Over best",
    "Error",
    "PyTorch error",
)


def _table(rows: Sequence[tuple[int, Row]]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    body = "".join(_table_row(number, row) for number, row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _table_row(number: int, row: Row) -> str:
    best = row.best or ("", None)
    name = f'<span class="number">{number}</span>{escape(row.title)}<small>{escape(row.text)}</small>'
    wrong = ' class="wrong"' if row.right is False else ""
    slower = ' class="slower"' if row.slower else ""
    cells = [
        ("", name),
        ("", escape(row.kernel)),
        ("", f"{milliseconds(row.floor_ms)}<small>{escape(row.bound_by)}</small>"),
        ("", milliseconds(row.ours_ms)),
        ("", ratio_text(row.over_floor)),
        ("", milliseconds(row.default_ms)),
        ("", f"{milliseconds(best[1])}<small>{escape(best[0])}</small>"),
        ("", ratio_text(row.gain)),
        (slower, ratio_text(row.gain_over_best)),
        (wrong, "" if row.error is None else f"{row.error:.1e}"),
        ("", "" if row.torch_error is None else f"{row.torch_error:.1e}"),
    ]
    marked = "".join(
        f'<td data-label="{heading}"{kind}>{text}</td>' for heading, (kind, text) in zip(HEADINGS, cells, strict=True)
    )
    return f'<tr data-row="{number}">{marked}</tr>'


def _models(models: Sequence[ModelRow]) -> str:
    """Returns the table of whole models before and after `accelerate`."""
    names = ("Model", "Type", "Pass", "Swapped", "Before ms", "After ms", "Gain")
    lines = ""
    for row in models:
        for which, before in row.before_ms.items():
            after = row.after_ms.get(which)
            texts = (
                escape(row.model),
                escape(f"{row.dtype}, {row.layout}"),
                escape(which),
                str(row.swapped),
                milliseconds(before),
                milliseconds(after),
                ratio_text(before / after if after else None),
            )
            cells = "".join(f'<td data-label="{name}">{text}</td>' for name, text in zip(names, texts, strict=True))
            lines += f"<tr>{cells}</tr>"
    if not lines:
        return ""
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        '<section id="models"><h2>Whole models, before and after accelerate</h2>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></section>"
    )


def _failures(results: Results) -> str:
    lines = [f"{row.title} {row.dtype} {row.layout} {row.which}: {row.failed}" for row in results.rows if row.failed]
    lines += [f"{row.model} {row.dtype} {row.layout}: {row.failed}" for row in results.models if row.failed]
    lines += [
        f"PyTorch's {name} on {row.title} {row.dtype} {row.layout}: {reason}"
        for row in results.rows
        if row.which == "forward"
        for name, reason in row.torch_failed.items()
    ]
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<section><h2>What did not run</h2><ul>{items}</ul></section>"


def _facts(results: Results) -> str:
    """Lists the machine, the measured ceilings, the host times and the settings of the run."""
    facts: dict[str, Any] = {name: value for name, value in results.machine.items() if value is not None}
    for name, value in results.ceilings.items():
        what, _, unit = name.rpartition("_")
        facts[f"measured {what}"] = f"{value:.4g} {'TB/s' if unit == 'TBps' else 'TFLOP/s'}"
    for name, value in results.host_us.items():
        facts[f"host time per call, {name.removesuffix('_us')}"] = f"{value:.1f} us"
    facts["seconds for one timing"] = results.settings.get("budget_s")
    facts["seed of inputs"] = results.settings.get("seed")
    items = "".join(f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items())
    return f"<dl>{items}</dl>"
