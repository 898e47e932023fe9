"""Draws one precision, layout and pass of a results file as an SVG picture with both charts, for documents.

Numbers, scales, colours and roofline are taken from the page of `report`, in its light and dark variants.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import charts
from .drawing import FONT, Drawing
from .report import TEMPLATE, Kind
from .results import Results, Row
from .table import ratio

WIDTH, BAR, NAMES, VALUES = 880, 22, 190, 120
ROOFLINE = 360


def picture(results: Results, dtype: str | None = None, layout: str | None = None, which: str | None = None) -> str:
    """Draws the first precision, layout and pass in the results that match the arguments; None matches all."""
    kinds = dict.fromkeys((row.dtype, row.layout, row.which) for row in results.rows if row.ours_ms is not None)
    wanted = (dtype, layout, which)
    kind = next((k for k in kinds if all(w in (None, have) for w, have in zip(wanted, k, strict=True))), None)
    if kind is None:
        words = " ".join(word for word in wanted if word) or "anything"
        raise ValueError(f"these results hold no times of {words}")
    rows = [row for row in results.rows if (row.dtype, row.layout, row.which) == kind and row.ours_ms is not None]
    return _drawn(kind, list(enumerate(rows, 1)), results)


def _drawn(kind: Kind, rows: Sequence[tuple[int, Row]], results: Results) -> str:
    dtype, layout, which = kind
    gpu = results.machine.get("gpu") or "an unknown GPU"
    drawing, top = Drawing(WIDTH, 0, _style()), 34
    drawing.text(16, top, f"{which.capitalize()}, {dtype}, {layout}, {gpu}", "title")
    if charts.all_gains(rows):
        words = "Speed-up over PyTorch: solid over its best, pale over it as it comes"
        drawing.text(16, top + 24, words, "quiet")
        _draw_bars(drawing, rows, top + 44)
        top += 44 + BAR * len(rows) + 46
    roofline = charts.roofline(rows, results.ceilings, dtype)
    if roofline:
        words = "Roofline: numbered dots are this library, rings PyTorch as it comes"
        drawing.text(16, top + 14, words, "quiet")
        place = f'x="60" y="{top + 48}" width="{WIDTH - 84}" height="{ROOFLINE}" overflow="visible"'
        drawing.marks.append(f'<g class="roofline">{roofline.replace("<svg", f"<svg {place}", 1)}</g>')
        top += 48 + ROOFLINE + 50
    drawing.height = top
    return drawing.svg()


def _draw_bars(drawing: Drawing, rows: Sequence[tuple[int, Row]], top: int) -> None:
    scale, ticks = charts.speedup_scale(charts.all_gains(rows))
    left, width = 16 + NAMES, WIDTH - 32 - NAMES - VALUES
    bottom = top + BAR * len(rows)

    def at(value: float) -> float:
        return round(left + width * scale.clipped(value) / 100, 1)

    for tick in ticks:
        drawing.line(at(tick), top, at(tick), bottom, "one" if tick == 1 else "line")
        drawing.text(at(tick), bottom + 16, f"{tick:g}\u00d7", "quiet small", "middle")
    for index, (number, row) in enumerate(rows):
        y = top + BAR * index
        drawing.text(16, y + 15, str(number), "quiet small")
        drawing.text(40, y + 15, row.title, "name")
        for name, gain in (("default", row.gain), ("best", row.gain_over_best)):
            if gain:
                start, end = sorted((at(1), at(gain)))
                kind = f"{name} slower" if gain < 1 else name
                drawing.box(start, y + 4, round(end - start, 1), BAR - 8, kind, radius=2)
        for x, value, kind in ((WIDTH - 76, row.gain_over_best, "strong"), (WIDTH - 16, row.gain, "quiet")):
            drawing.text(x, y + 15, ratio(value).replace("x", "\u00d7"), kind, "end")


def _style() -> str:
    """Returns the CSS of a picture: colours and roofline from the report's template, and the style of the bars."""
    page = TEMPLATE.read_text(encoding="utf-8")
    colours = page[page.index(":root") : page.index("* {")]
    roofline = "\n".join(line for line in page.splitlines() if line.startswith(".roofline ."))
    return f"""
{colours}text {{ font: {FONT}; fill: var(--text); }}
.title {{ font-size: 17px; font-weight: 600; }}
.quiet {{ fill: var(--quiet); }}
.small {{ font-size: 12px; }}
.strong {{ font-weight: 600; }}
.card {{ fill: var(--card); stroke: var(--line); }}
.line {{ stroke: var(--line); }}
.one {{ stroke: var(--quiet); }}
.default {{ fill: var(--ours-pale); }}
.best {{ fill: var(--ours); }}
.slower {{ fill: var(--bad); }}
{roofline}
"""
