"""One precision, layout and pass of a results file as a picture: a single SVG file with both charts, for documents.

Same numbers, scales, colours and roofline as the page of `report`, in light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from . import charts
from .report import TEMPLATE, Kind
from .results import Results, Row
from .table import ratio

WIDTH, BAR, NAMES, VALUES = 880, 22, 190, 120
ROOFLINE = 360


def picture(results: Results, dtype: str | None = None, layout: str | None = None, which: str | None = None) -> str:
    """Of the first precision, layout and pass in the results that is what was asked for."""
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
    parts, top = [], 34
    parts.append(_text(16, top, f"{which.capitalize()}, {dtype}, {layout}, {gpu}", "title"))
    if charts.all_gains(rows):
        parts.append(
            _text(16, top + 24, "Speed-up over PyTorch: solid over its best, pale over it as it comes", "quiet")
        )
        parts.append(_bars(rows, top + 44))
        top += 44 + BAR * len(rows) + 46
    roofline = charts.roofline(rows, results.ceilings, dtype)
    if roofline:
        words = "Roofline: numbered dots are this library, rings PyTorch as it comes"
        parts.append(_text(16, top + 14, words, "quiet"))
        place = f'x="60" y="{top + 48}" width="{WIDTH - 84}" height="{ROOFLINE}" overflow="visible"'
        parts.append(f'<g class="roofline">{roofline.replace("<svg", f"<svg {place}", 1)}</g>')
        top += 48 + ROOFLINE + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}">'
        f"<style>{_style()}</style>"
        f'<rect class="card" width="{WIDTH}" height="{top}" rx="12"/>{"".join(parts)}</svg>\n'
    )


def _bars(rows: Sequence[tuple[int, Row]], top: int) -> str:
    scale, ticks = charts.speedup_scale(charts.all_gains(rows))
    left, width = 16 + NAMES, WIDTH - 32 - NAMES - VALUES
    bottom = top + BAR * len(rows)

    def at(value: float) -> float:
        return round(left + width * scale.clipped(value) / 100, 1)

    marks = ""
    for tick in ticks:
        x = at(tick)
        marks += f'<line class="{"one" if tick == 1 else "line"}" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>'
        marks += _text(x, bottom + 16, f"{tick:g}\u00d7", "quiet small", "middle")
    for index, (number, row) in enumerate(rows):
        y = top + BAR * index
        marks += _text(16, y + 15, str(number), "quiet small") + _text(40, y + 15, row.layer, "name")
        for name, gain in (("default", row.gain), ("best", row.gain_over_best)):
            if gain:
                start, end = sorted((at(1), at(gain)))
                slower = " slower" if gain < 1 else ""
                box = f'x="{start}" y="{y + 4}" width="{round(end - start, 1)}" height="{BAR - 8}" rx="2"'
                marks += f'<rect class="{name}{slower}" {box}/>'
        value = ratio(row.gain_over_best).replace("x", "\u00d7")
        pale = ratio(row.gain).replace("x", "\u00d7")
        marks += _text(WIDTH - 76, y + 15, value, "strong", "end") + _text(WIDTH - 16, y + 15, pale, "quiet", "end")
    return marks


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _style() -> str:
    """The page's colours and roofline, and what its bars are in a picture."""
    page = TEMPLATE.read_text(encoding="utf-8")
    colours = page[page.index(":root") : page.index("* {")]
    roofline = "\n".join(line for line in page.splitlines() if line.startswith(".roofline ."))
    return f"""
{colours}text {{ font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text); }}
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
