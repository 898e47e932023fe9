"""Draws the two charts of the report as HTML and SVG: a bar chart of speed-ups, and a roofline plot of all layers.

Positions are percentages of the plot, so that a chart fills the available width while its text keeps its size.
Colours are CSS classes, which the page's style defines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from .results import Row
from .table import milliseconds, ratio

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class LogScale:
    """Maps a number to a percentage of a logarithmic axis from `least` to `most`."""

    def __init__(self, least: float, most: float) -> None:
        self.least, self.most = least, most

    def __call__(self, value: float) -> float:
        return round(100 * log10(value / self.least) / log10(self.most / self.least), 3)

    def clipped(self, value: float) -> float:
        return min(100.0, max(0.0, self(value)))


# ---- speed-ups


def speedup_scale(gains: Sequence[float]) -> tuple[LogScale, list[float]]:
    """Returns an axis that contains all gains, and its ticks."""
    least = max((tick for tick in TICKS if tick <= min([*gains, 1]) and tick < 1), default=TICKS[0])
    least = 0.8 if min(gains) >= 1 else least
    most = min((tick for tick in TICKS if tick >= max([*gains, 2])), default=TICKS[-1])
    return LogScale(least, most), [tick for tick in TICKS if least <= tick <= most]


def all_gains(rows: Sequence[tuple[int, Row]]) -> list[float]:
    return [gain for _, row in rows for gain in (row.gain, row.gain_over_best) if gain]


def speedups(rows: Sequence[tuple[int, Row]]) -> str:
    """Draws a bar per layer: solid up to the gain over PyTorch's best variant, pale up to that over its default."""
    gains = all_gains(rows)
    if not gains:
        return ""
    scale, ticks = speedup_scale(gains)
    lines = "".join(f'<i class="{"one" if tick == 1 else ""}" style="left:{scale(tick)}%"></i>' for tick in ticks)
    numbers = "".join(f'<span style="left:{scale(tick)}%">{tick:g}&times;</span>' for tick in ticks)
    bars = "".join(_bar(number, row, scale) for number, row in rows)
    return (
        '<div class="bars" role="img" aria-label="Speed-up over PyTorch, per layer">'
        f'<div class="grid" aria-hidden="true">{lines}</div>'
        '<div class="bar heads"><div class="name"></div><div class="track"></div>'
        f'<div class="value"><span>best</span><span>as it comes</span></div></div>{bars}'
        f'<div class="axis" aria-hidden="true">{numbers}</div></div>'
    )


def _bar(number: int, row: Row, scale: LogScale) -> str:
    one = scale(1)
    parts = ""
    for kind, gain in (("default", row.gain), ("best", row.gain_over_best)):
        if gain:
            end = scale.clipped(gain)
            slower = " slower" if gain < 1 else ""
            left, width = min(one, end), round(abs(end - one), 3)
            parts += f'<b class="{kind}{slower}" style="left:{left}%;width:{width}%"></b>'
    best = row.best[0] if row.best else ""
    hint = f"{row.title}: {milliseconds(row.ours_ms)} ms; PyTorch {milliseconds(row.default_ms)} ms, best {best}"
    return (
        f'<div class="bar" data-row="{number}" title="{escape(hint)}">'
        f'<div class="name"><span class="number">{number}</span>{escape(row.title)}</div>'
        f'<div class="track">{parts}</div>'
        f'<div class="value"><strong>{ratio_text(row.gain_over_best)}</strong>'
        f"<span>{ratio_text(row.gain)}</span></div></div>"
    )


def ratio_text(value: float | None) -> str:
    return ratio(value).replace("x", "&times;") or "&ndash;"


# ---- roofline


def roofline(rows: Sequence[tuple[int, Row]], ceilings: Mapping[str, float], dtype: str) -> str:
    """Plots TFLOP/s over FLOP per byte for our layers and PyTorch's, under the measured ceilings of the GPU."""
    drawn = [(number, row) for number, row in rows if row.ours_ms and row.bytes and row.flops]
    copy, rate = ceilings.get("copy_TBps"), ceilings.get(f"{dtype}_TFLOPS")
    if not drawn or not copy or not rate:
        return ""
    x, y = _axes(drawn, copy, rate)
    ridge = rate / copy
    roof = [(x.least, min(rate, copy * x.least)), (ridge, rate), (x.most, min(rate, copy * x.most))]
    corners = [corner for corner in roof if x.least <= corner[0] <= x.most and y.least <= corner[1]]
    if copy * x.least < y.least:
        corners = [(y.least / copy, y.least), *corners]
    marks = _grid(x, y) + "".join(
        f'<line class="roof" x1="{x(a[0])}%" y1="{100 - y(a[1])}%" x2="{x(b[0])}%" y2="{100 - y(b[1])}%"/>'
        for a, b in pairwise(corners)
    )
    marks += _roof_names(x, y, copy, rate, dtype)
    marks += "".join(_points(number, row, x, y) for number, row in drawn)
    return f'<svg role="img" aria-label="Roofline: every layer under the ceilings of the GPU">{marks}</svg>'


def intensity(row: Row) -> float:
    """Returns FLOP per byte, if every tensor is moved once."""
    return row.flops / row.bytes


def achieved(row: Row, ms: float) -> float:
    """Returns the TFLOP/s of a pass that takes `ms` milliseconds."""
    return row.flops / ms / 1e9


def _axes(drawn: Sequence[tuple[int, Row]], copy: float, rate: float) -> tuple[LogScale, LogScale]:
    intensities = [intensity(row) for _, row in drawn]
    speeds = [achieved(row, ms) for _, row in drawn for ms in (row.ours_ms, row.default_ms) if ms]
    x = LogScale(_below(min(intensities)), _above(1.05 * max([*intensities, 1.5 * rate / copy])))
    return x, LogScale(_below(min(speeds)), _above(1.05 * rate))


def _below(value: float) -> float:
    """Returns the largest of 1, 2, 5, 10, 20, 50, ... that is not above `value`."""
    power = 10.0 ** floor(log10(value))
    return max(step * power for step in (1, 2, 5) if step * power <= value)


def _above(value: float) -> float:
    power = 10.0 ** ceil(log10(value))
    return min(step * power for step in (0.1, 0.2, 0.5, 1) if step * power >= value)


def _grid(x: LogScale, y: LogScale) -> str:
    marks = ""
    for tick in _ticks(x):
        at = x(tick)
        marks += f'<line class="tick" x1="{at}%" y1="0" x2="{at}%" y2="100%"/>'
        marks += f'<text class="label" x="{at}%" y="100%" dy="18" text-anchor="middle">{tick:g}</text>'
    for tick in _ticks(y):
        at = 100 - y(tick)
        marks += f'<line class="tick" x1="0" y1="{at}%" x2="100%" y2="{at}%"/>'
        marks += f'<text class="label" x="0" y="{at}%" dx="-8" dy="4" text-anchor="end">{tick:g}</text>'
    marks += '<text class="label" x="50%" y="100%" dy="38" text-anchor="middle">FLOP per byte</text>'
    return marks + '<text class="label" x="0" y="0" dx="-8" dy="-12">TFLOP/s</text>'


def _ticks(scale: LogScale) -> list[float]:
    """Returns the powers of ten on an axis, or their multiples by 1, 2 and 5 if there are fewer than three powers."""
    powers = range(floor(log10(scale.least)) - 1, ceil(log10(scale.most)) + 1)
    for steps in ((1,), (1, 2, 5)):
        found = [step * 10.0**power for power in powers for step in steps]
        found = [tick for tick in found if scale.least * 0.999 <= tick <= scale.most * 1.001]
        if len(found) >= 3:
            break
    return found


def _roof_names(x: LogScale, y: LogScale, copy: float, rate: float, dtype: str) -> str:
    height = 100 - y(rate)
    # The name of the memory roof stands at half its height: above the roof, where no layer can be, or below it if the
    # plot has no room to the left.
    middle = (max(y.least, copy * x.least) * rate) ** 0.5
    left, up = x.clipped(middle / copy), 100 - y(middle)
    beside = 'dx="-10" dy="-4" text-anchor="end"' if left > 25 else 'dx="12" dy="16"'
    top = f'<text class="roofname" x="100%" y="{height}%" dy="-8" text-anchor="end">{rate:.0f} TFLOP/s {dtype}</text>'
    if copy * x.least >= rate:  # the plot begins right of the ridge: it shows no memory roof
        return top
    return top + f'<text class="roofname" x="{left}%" y="{up}%" {beside}>{copy:.2f} TB/s</text>'


def _points(number: int, row: Row, x: LogScale, y: LogScale) -> str:
    """Draws our layer as a numbered dot, PyTorch's as a ring, and a line between them."""
    assert row.ours_ms
    at, ours = x(intensity(row)), 100 - y(achieved(row, row.ours_ms))
    text = f"{row.title}: {achieved(row, row.ours_ms):.3g} TFLOP/s, {ratio(row.over_floor) or '?'} the floor"
    marks = ""
    if row.default_ms:
        theirs = 100 - y(achieved(row, row.default_ms))
        text += f"; PyTorch {achieved(row, row.default_ms):.3g} TFLOP/s"
        marks += f'<line class="join" x1="{at}%" y1="{ours}%" x2="{at}%" y2="{theirs}%"/>'
        marks += f'<circle class="theirs" cx="{at}%" cy="{theirs}%" r="3.5"/>'
    marks += f'<circle class="ours" cx="{at}%" cy="{ours}%" r="8.5"/>'
    marks += f'<text class="on" x="{at}%" y="{ours}%" dy="3.5" text-anchor="middle">{number}</text>'
    return f'<g class="point" data-row="{number}"><title>{escape(text)}</title>{marks}</g>'
