"""Draws the documents' figures: the arithmetic from `tconv3d.planning.geometry`, the charts from benchmark results.

    python docs/figures.py

All indices and times in a figure come from the geometry or a results file, none is written by hand. Drawing is
reproducible byte for byte, and a test draws all figures again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.distributed.shards import Split
from tconv3d.planning.geometry import Axis
from tconv3d.tools.bench import picture, results
from tconv3d.tools.bench.drawing import FONT, Drawing

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
# Each chart has a results file and the pass that it shows.
CHARTS = {"forward": ("h200.json", "forward"), "backward": ("h200.json", "backward")}

STYLE = (
    f"\ntext {{ font: {FONT}; fill: #15181e; }}"
    + """
.card { fill: #ffffff; stroke: #e1e5eb; }
.title { font-size: 15px; font-weight: 600; }
.quiet { fill: #5d6675; }
.small { font-size: 11px; }
.cell { fill: none; stroke: #aab2bf; }
.empty { fill: #eceff3; stroke: #aab2bf; }
.p0 { fill: #b9ccf7; } .p1 { fill: #f8d3a8; } .p2 { fill: #bfe3c4; } .p3 { fill: #e8c4e6; }
line.p0 { stroke: #2457d6; } line.p1 { stroke: #b96a00; } line.p2 { stroke: #23803a; } line.p3 { stroke: #8d2f88; }
.window0 { fill: none; stroke: #2457d6; stroke-width: 2.5; }
.window1 { fill: none; stroke: #b96a00; stroke-width: 2.5; stroke-dasharray: 6 3; }
.fill0 { fill: #2457d6; } .fill1 { fill: #b96a00; }
.stored { stroke: #15181e; stroke-width: 2.5; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebf0; } .card { fill: #181c23; stroke: #2b313b; } .quiet { fill: #9aa4b2; }
  .cell { stroke: #566070; } .empty { fill: #252b35; stroke: #566070; }
  .p0 { fill: #2f4678; } .p1 { fill: #6e4413; } .p2 { fill: #235230; } .p3 { fill: #5b2a58; }
  .stored { stroke: #e8ebf0; }
}
"""
)


def canvas(width: int, height: int) -> Drawing:
    return Drawing(width, height, STYLE)


def settings(axis: Axis) -> str:
    """Describes kernel, stride and all settings of one dimension that differ from PyTorch's defaults."""
    text = f"kernel {axis.kernel}, stride {axis.stride}"
    for name, usual in (("padding", 0), ("output_padding", 0), ("dilation", 1)):
        if getattr(axis, name) != usual:
            text += f", {name.replace('_', ' ')} {getattr(axis, name)}"
    return text


def gathered(axis: Axis, phase: int) -> str:
    """Returns the formula of an output of a phase."""
    terms = []
    for tap in axis.taps(phase):
        offset = -axis.shift(tap)
        terms.append(f"w[{tap}] x[q{f' {chr(43 if offset > 0 else 8722)} {abs(offset)}' if offset else ''}]")
    return " + ".join(terms) or "nothing (the bias alone)"


def taps() -> str:
    """Draws for one dimension which inputs reach which outputs, and the outputs sorted by phase."""
    axis, size, cell = Axis(3, stride=2, padding=1, output_padding=1), 4, 58
    outputs = axis.output_size(size)
    drawing = canvas(40 + cell * outputs + 120, 330)
    drawing.text(20, 30, f"One dimension: {settings(axis)}", "title")
    left, top, bottom = 130, 50, 170
    wide = cell * outputs / size
    drawing.text(20, top + 22, "input x[i]", "quiet")
    drawing.text(20, bottom + 22, "output y[o]", "quiet")
    for i in range(size):
        for tap in range(axis.kernel):
            o = axis.stride * (i + axis.shift(tap)) + axis.phase(tap)
            if 0 <= o < outputs:
                x1, x2 = left + wide * (i + 0.5), left + cell * (o + 0.5)
                drawing.line(x1, top + 34, x2, bottom, f"p{axis.phase(tap)}")
                drawing.text(
                    x1 + 0.6 * (x2 - x1) + 7, top + 34 + 0.6 * (bottom - top - 34), f"w[{tap}]", "quiet small"
                )
        drawing.cell(left + wide * i, top, wide, 34, "", f"x[{i}]")
    for o in range(outputs):
        drawing.cell(left + cell * o, bottom, cell, 34, f"p{o % axis.stride}", f"y[{o}]")
    for phase in range(axis.stride):
        y = 225 + 46 * phase
        drawing.text(20, y + 22, f"phase {phase}", "quiet")
        plane = range(phase, outputs, axis.stride)
        for q, o in enumerate(plane):
            drawing.cell(left + cell * q, y, cell, 34, f"p{phase}", f"y[{o}]")
        drawing.text(
            left + cell * len(plane) + 14,
            y + 22,
            f"y[{axis.stride}q{f'+{phase}' if phase else ''}] = {gathered(axis, phase)}",
        )
    return drawing.svg()


TABLES = (
    Axis(3, padding=1),
    Axis(2, stride=2),
    Axis(3, stride=2, padding=1),
    Axis(4, stride=2, padding=1),
    Axis(5, stride=3, padding=1),
    Axis(3, stride=2, dilation=2),
)


def phases() -> str:
    """Draws tables of taps by phase and by the input they read, for the usual settings."""
    cell, columns = 40, 3
    drawing = canvas(860, 310)
    drawing.text(20, 30, "Taps of one dimension: a row for each phase, a column for each input that is read", "title")
    for number, axis in enumerate(TABLES):
        left, top = 90 + 275 * (number % columns), 80 + 135 * (number // columns)
        offsets = sorted({-axis.shift(tap) for tap in range(axis.kernel)})
        drawing.text(left - 70, top - 24, settings(axis))
        for column, offset in enumerate(offsets):
            name = "x[q]" if offset == 0 else f"q{offset:+d}".replace("-", chr(8722))
            drawing.text(left + cell * (column + 0.5), top - 5, name, "quiet small", "middle")
        for phase in range(axis.stride):
            y = top + 28 * phase
            drawing.text(left - 70, y + 19, f"phase {phase}", "quiet")
            for column, offset in enumerate(offsets):
                found = [tap for tap in axis.taps(phase) if -axis.shift(tap) == offset]
                kind = f"p{phase}" if found else "empty"
                drawing.cell(left + cell * column, y, cell, 28, kind, ", ".join(f"w{tap}" for tap in found))
    return drawing.svg()


def halo() -> str:
    """Draws a tile of positions with its halo, and the windows of two taps, as a plane and as rows of memory."""
    axis, side, cell = Axis(3, padding=1), 8, 26
    offsets = [-axis.shift(tap) for tap in range(axis.kernel)]
    before, after = -min(offsets), max(offsets)
    pitch = side + before + after
    drawing = canvas(860, 355)
    drawing.text(20, 30, f"One halo tile for all taps: {side} x {side} positions, {settings(axis)} each way", "title")
    left, top = 30, 55
    for h in range(pitch):
        for w in range(pitch):
            inside = before <= h < before + side and before <= w < before + side
            drawing.cell(left + cell * w, top + cell * h, cell, cell, "p0" if inside else "empty")
    drawing.text(left, top + cell * pitch + 22, "blue: the tile's own positions; grey: the halo", "quiet")
    shown = ((0, 2), (2, 1))
    memory = left + cell * pitch + 60
    drawing.text(memory, 75, f"In shared memory: {pitch * pitch} rows, one for each position, a row of channels each")
    for number, (tap_h, tap_w) in enumerate(shown):
        h, w = before - axis.shift(tap_h), before - axis.shift(tap_w)
        drawing.box(
            left + cell * w + number * 2, top + cell * h + number * 2, cell * side, cell * side, f"window{number}"
        )
        y = 115 + 85 * number
        start = h * pitch + w
        drawing.text(
            memory, y, f"tap ({tap_h}, {tap_w}) reads x[q + ({h - before}, {w - before})]: it starts at row {start}"
        )
        step = 470 / (pitch * pitch)
        drawing.cell(memory, y + 12, step * pitch * pitch, 26, "empty")
        for group in range(side):
            drawing.box(memory + step * (start + group * pitch), y + 12, step * side, 26, f"fill{number}")
    words = (
        f"Each window is {side} groups of {side} rows, {pitch} rows apart: one operand of",
        "a matrix instruction. Another tap is the same operand with another first row.",
    )
    for number, line in enumerate(words):
        drawing.text(memory, 290 + 20 * number, line, "quiet")
    return drawing.svg()


def march() -> str:
    """Draws input planes along depth, the output planes that each feeds, and which outputs are then complete."""
    drawing = canvas(860, 310)
    drawing.text(
        20, 30, "Marching along depth: each input plane is read once and feeds a window of output planes", "title"
    )
    cell, row = 30, 28
    for number, axis in enumerate((Axis(3), Axis(4, stride=2, padding=1))):
        left, top, size = 110 + 400 * number, 100, 6
        planes = [
            [axis.stride * (i + axis.shift(t)) + axis.phase(t) for t in range(axis.kernel)] for i in range(size)
        ]
        first, last = planes[0][0], min(planes[-1][-1], planes[0][0] + 9)
        drawing.text(left - 90, top - 42, settings(axis))
        for o in range(first, last + 1):
            name = str(o).replace("-", chr(8722))
            drawing.text(left + cell * (o - first + 0.5), top - 6, name, "quiet small", "middle")
        drawing.text(left - 90, top - 6, "output plane", "quiet small")
        for i, fed in enumerate(planes):
            if fed[-1] > last:
                break
            y = top + row * i
            drawing.text(left - 90, y + 18, f"input plane {i}", "quiet small")
            for tap, o in enumerate(fed):
                drawing.cell(left + cell * (o - first), y, cell, row - 4, f"p{axis.phase(tap)}", f"w{tap}")
            drawing.box(left + cell * (fed[0] - first), y, cell * axis.stride, row - 4, "stored")
    drawing.text(
        20,
        290,
        "framed: complete after this input plane, stored; a negative plane is cut off by the padding",
        "quiet",
    )
    return drawing.svg()


def split() -> str:
    """Draws one dimension of a forward pass on two ranks: own rows, messages, and outputs that wait for them."""
    split = Split(Axis(4, stride=2, padding=1), size=8, shards=2)
    cell, left, gap = 38, 120, 60
    drawing = canvas(860, 300)
    drawing.text(20, 30, f"Eight input rows on two ranks: {settings(split.axis)}", "title")
    top, bottom = 80, 190

    def place(rank: int, row: int) -> float:
        return left + row * cell + (gap if rank else 0)

    def source(rank: int, row: int) -> float:
        return place(rank, row * split.axis.stride) + cell / 2

    drawing.text(20, top + 22, "input rows", "quiet")
    drawing.text(20, bottom + 22, "output rows", "quiet")
    for rank in range(split.shards):
        targets, own = split.targets(rank), split.sources(rank)
        drawing.text(place(rank, targets.start), top - 22, f"rank {rank}", "quiet")
        for slab in split.slabs(rank):
            for target in slab.targets:
                for tap in range(split.axis.kernel):
                    row, rest = divmod(target + split.axis.padding - tap * split.axis.dilation, split.axis.stride)
                    if not rest and row in slab.halos[0]:
                        sender = 1 - rank
                        drawing.line(
                            source(sender, row) + cell / 2, top + 34, place(rank, target) + cell / 2, bottom, "p1"
                        )
                    elif not rest and row in own:
                        drawing.line(
                            source(rank, row) + cell / 2, top + 34, place(rank, target) + cell / 2, bottom, "p0"
                        )
        sent = split.halos(1 - rank)[rank]
        for row in own:
            drawing.cell(source(rank, row), top, cell, 34, "p1" if row in sent else "p0", str(row))
        waiting = {target for slab in split.slabs(rank) for target in slab.targets}
        for target in targets:
            drawing.cell(place(rank, target), bottom, cell, 34, "p1" if target in waiting else "p0", str(target))
    drawing.text(
        20,
        262,
        "orange inputs are sent to the other rank; orange outputs read them, and are computed once more",
        "quiet",
    )
    drawing.text(
        20, 284, "blue outputs need own rows alone: they are computed while the messages are in flight", "quiet"
    )
    return drawing.svg()


DRAWN: dict[str, Callable[[], str]] = {
    "taps": taps,
    "phases": phases,
    "halo": halo,
    "march": march,
    "split": split,
}


def chart(name: str) -> str:
    file, which = CHARTS[name]
    return picture.picture(results.read(RESULTS / file), "tf32", "contiguous", which)


def all_figures() -> dict[Path, str]:
    """Returns the content of every figure, keyed by its path."""
    return {FIGURES / f"{name}.svg": draw() for name, draw in DRAWN.items()} | {
        FIGURES / f"{name}.svg": chart(name) for name in CHARTS
    }


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for path, content in all_figures().items():
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
