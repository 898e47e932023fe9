"""Fills the tables of README.md and docs/ from files of benchmarks/results.

    python benchmarks/readme_table.py

What stands between the marks of a table is replaced. A test makes every table again and compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.bench import results
from tconv3d.bench.results import Results, Row, Summary
from tconv3d.bench.table import ratio

ROOT = Path(__file__).resolve().parent.parent
TIMES = "benchmarks/results/h200.json"
HALF = "benchmarks/results/h200-16-bits.json"  # forward
HALF_BACKWARD = "benchmarks/results/h200-bf16.json"
RANDOM = "benchmarks/results/h200-random.json"
ERRORS = "benchmarks/results/h200-verify.json"
EXPORTS = "benchmarks/results/h200-export.json"


def read(name: str) -> Results:
    return results.read(ROOT / name)


def source(name: str, found: Results) -> str:
    """Where a table comes from, in words."""
    machine, command = found.machine, found.settings["command"]
    versions = f"driver {machine['driver']}, CUDA {machine['cuda']}, PyTorch {machine['torch']}"
    return (
        f"One {machine['gpu']}, {versions}, commit {(machine['commit'] or 'unknown')[:7]}, "
        f"{machine['measured'][:10]}. Data: [{Path(name).name}]({{up}}{name})"
        + (f", written by `{command}`" if command else "")
        + (". The run was interrupted: not all layers were measured." if found.interrupted else ".")
    )


# ---- README and docs: times


def times() -> str:
    found = read(TIMES)
    lines = _table(found, "tf32")
    if found.host_us:
        lines += ["", _host(found)]
    return "\n".join([*lines, "", source(TIMES, found)])


def half_times() -> str:
    """Ours alone, as multiples of the floor: forward in both types and layouts, backward in bfloat16."""
    found, backward = read(HALF), read(HALF_BACKWARD)
    rows = {(row.layer, row.dtype, row.layout): row for row in found.rows}
    other = {row.layer: row for row in backward.rows if row.which == "backward"}
    lines = [
        "| layer | bfloat16: floor | contiguous | x floor | channels-last | x floor "
        "| float16: contiguous | x floor | channels-last | x floor | bfloat16, backward: floor | ours | x floor |",
        "| --- |" + " --- |" * 12,
    ]
    for name in dict.fromkeys(row.layer for row in found.rows):
        cells = [
            _over_floor(rows[name, dtype, layout], floor=(dtype, layout) == ("bfloat16", "contiguous"))
            for dtype in ("bfloat16", "float16")
            for layout in ("contiguous", "channels_last_3d")
        ]
        lines.append(f"| {' | '.join([name, *cells, _over_floor(other[name])])} |")
    return "\n".join([*lines, "", source(HALF, found), "", f"Backward: {source(HALF_BACKWARD, backward)}"])


def _over_floor(row: Row, floor: bool = True) -> str:
    if row.failed or row.ours_ms is None or not row.floor_ms:
        return " | ".join([*(["failed"] if floor else []), "failed", ""])
    cells = [f"{row.floor_ms:.3f}"] if floor else []
    return " | ".join([*cells, f"{row.ours_ms:.3f}", ratio(row.ours_ms / row.floor_ms)])


def _table(found: Results, dtype: str) -> list[str]:
    """Contiguous tensors: forward and backward side by side, and the means."""
    rows = {(row.layer, row.which): row for row in found.rows if (row.dtype, row.layout) == (dtype, "contiguous")}
    names = dict.fromkeys(layer for layer, _ in rows)
    return [
        "| layer | kernel | floor | ours | PyTorch | best | over best "
        "| backward: floor | ours | PyTorch | best | over best |",
        "| --- |" + " --- |" * 11,
        *(
            f"| {name} | {_times(rows[name, 'forward'])} | {_times(rows[name, 'backward'], False)} |"
            for name in names
        ),
        "",
        *(_means(summary) for summary in results.summarize(found.rows) if summary.dtype == dtype),
    ]


def _times(row: Row, kernel: bool = True) -> str:
    if row.failed or row.ours_ms is None or row.best is None or row.default_ms is None:
        return " | ".join([*(["failed"] if kernel else []), *[""] * 5])
    cells = [row.kernel] if kernel else []
    cells += [f"{ms:.3f}" for ms in (row.floor_ms or 0.0, row.ours_ms, row.default_ms, row.best[1])]
    over = ratio(row.gain_over_best)
    return " | ".join([*cells, over if not row.slower else f"**{over}**"])


def _means(summary: Summary) -> str:
    slower = f"; slower than it: {', '.join(summary.slower)}" if summary.slower else ""
    return (
        f"- {summary.which}, {summary.dtype}, {summary.layout}, {summary.layers} layers: geometric mean "
        f"{ratio(summary.over_floor)} the floor, {ratio(summary.gain)} as fast as PyTorch as it comes, "
        f"{ratio(summary.gain_over_best)} as fast as its best{slower}"
    )


def _host(found: Results) -> str:
    us = found.host_us
    return (
        f"Host time of a repeated call, microseconds, ours / `nn.ConvTranspose3d`: {us['ours_us']:.0f} / "
        f"{us['torch_us']:.0f} without gradients, {us['ours_grad_us']:.0f} / {us['torch_grad_us']:.0f} with."
    )


# ---- docs: means of all kinds, random layers, errors


def means() -> str:
    found = read(TIMES)
    return "\n".join([*_summaries(found), "", source(TIMES, found)])


def random_layers() -> str:
    found = read(RANDOM)
    return "\n".join([*_summaries(found), "", source(RANDOM, found)])


def _summaries(found: Results) -> list[str]:
    lines = ["| type | layout | pass | layers | x floor | over PyTorch | over its best | slower than its best |"]
    lines.append("| --- |" + " --- |" * 7)
    for each in results.summarize(found.rows):
        cells = [each.dtype, each.layout, each.which, str(each.layers)]
        cells += [ratio(value) for value in (each.over_floor, each.gain, each.gain_over_best)]
        lines.append(f"| {' | '.join([*cells, str(len(each.slower))])} |")
    return lines


def errors() -> str:
    """The largest errors over all layers, by type and pass."""
    found = read(ERRORS)
    lines = ["| type | pass | checks | ours, largest | PyTorch's, largest | checks where ours is larger |"]
    lines.append("| --- |" + " --- |" * 5)
    checked = [row for row in found.rows if row.error is not None and row.torch_error is not None]
    for dtype, which in dict.fromkeys((row.dtype, row.which) for row in checked):
        pairs = [(row.error, row.torch_error) for row in checked if (row.dtype, row.which) == (dtype, which)]
        worse = sum(ours > theirs for ours, theirs in pairs if ours is not None and theirs is not None)
        largest = [max(pair[side] or 0.0 for pair in pairs) for side in (0, 1)]
        lines.append(f"| {dtype} | {which} | {len(pairs)} | {largest[0]:.1e} | {largest[1]:.1e} | {worse} |")
    return "\n".join([*lines, "", source(ERRORS, found)])


# ---- docs: exported files beside the library


def exports() -> str:
    found = json.loads((ROOT / EXPORTS).read_text())
    lines = ["| task | type | layout | same bits | forward: file | library | backward: file | library |"]
    lines.append("| --- |" + " --- |" * 7)
    for row in found["rows"]:
        same = row["right"] and row["other_stream"] and all(row["same_bits"].values())
        times = [f"{ms:.3f}" for ms in (*row["forward_ms"], *row["backward_ms"])]
        cells = [row["task"], row["dtype"], row["layout"], "yes" if same else "no", *times]
        lines.append(f"| {' | '.join(cells)} |")
    machine = found["machine"]
    lines += ["", f"One {machine['gpu']}, commit {machine['commit'][:7]}, {machine['measured'][:10]}; milliseconds."]
    return "\n".join(lines)


@dataclass(frozen=True)
class Table:
    """A place in a document, and what fills it."""

    document: str
    name: str
    fill: Callable[[], str]

    def filled(self, text: str) -> str:
        begin, end = f"<!-- {self.name}:begin (filled from benchmarks/results) -->", f"<!-- {self.name}:end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{self.document} has no place for {self.name}: {begin} ... {end}")
        up = "../" * self.document.count("/")
        return pattern.sub(lambda _: f"{begin}\n{self.fill().replace('{up}', up)}\n{end}", text)


TABLES = (
    Table("README.md", "performance", times),
    Table("docs/performance.md", "means", means),
    Table("docs/performance.md", "bfloat16", half_times),
    Table("docs/performance.md", "random", random_layers),
    Table("docs/numerics.md", "errors", errors),
    Table("docs/export.md", "export", exports),
)


def main() -> None:
    for table in TABLES:
        path = ROOT / table.document
        path.write_text(table.filled(path.read_text()))
        print(f"filled {table.name} of {table.document}")


if __name__ == "__main__":
    main()
