"""Fills the tables of README.md and docs/ from files of benchmarks/results.

    python benchmarks/readme_table.py

The text between the marks of a table is replaced. A test fills every table again and compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import split_scaling
from tconv3d.tools.bench import results
from tconv3d.tools.bench import tails as bench_tails
from tconv3d.tools.bench.host import CIRCUMSTANCES
from tconv3d.tools.bench.results import Results, Row, Summary
from tconv3d.tools.bench.table import ratio

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "benchmarks/results"
TIMES = f"{FOLDER}/h200.json"
# These files stand in for kinds of rows that h200.json does not have; `make results` measures all kinds into it.
HALF = f"{FOLDER}/h200-16-bits.json"
HALF_BACKWARD = f"{FOLDER}/h200-bf16.json"
CHANNELS_LAST = f"{FOLDER}/h200-channels-last.json"
STRICT = f"{FOLDER}/h200-fp32.json"
RANDOM = {0: f"{FOLDER}/h200-random.json", 5: f"{FOLDER}/h200-random-5.json"}  # keyed by seed
EXPORTS = f"{FOLDER}/h200-export.json"
FUSED = f"{FOLDER}/h200-fused.json"
NETWORKS = f"{FOLDER}/h200-monai.json"
TRAINING = f"{FOLDER}/h200-train.json"
TAILS = f"{FOLDER}/h200-tails.json"


def read(name: str) -> Results:
    return results.read(ROOT / name)


def read_json(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / name).read_text())
    return found


def source(name: str, machine: dict[str, Any], command: str = "", interrupted: bool = False) -> str:
    """Says which machine, commit, date, file and command a table comes from."""
    versions = [("driver", "driver"), ("CUDA", "cuda"), ("PyTorch", "torch")]
    words = [f"One {machine['gpu']}", *(f"{word} {machine[key]}" for word, key in versions if machine.get(key))]
    words += [
        f"commit {(machine['commit'] or 'unknown')[:7]}",
        *([machine["measured"][:10]] if "measured" in machine else []),
    ]
    return (
        f"{', '.join(words)}. Data: [{Path(name).name}]({{up}}{name})"
        + (f", written by `{_shortened(command)}`" if command else "")
        + (". The run was interrupted: not all layers were measured." if interrupted else ".")
    )


def _shortened(command: str) -> str:
    """Replaces a list of six or more layers in a command by their number."""
    return re.sub(r"(?<= bench)(?: [a-z]\w+){6,}", lambda names: f" <{len(names[0].split())} layers>", command)


def source_of(name: str, found: Results) -> str:
    return source(name, found.machine, found.settings["command"], found.interrupted)


def _sources(files: dict[str, Results]) -> str:
    return "\n\n".join(source_of(name, found) for name, found in files.items())


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    return [*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]


# ---- README and docs: times of the benchmark's layers


def times() -> str:
    found = read(TIMES)
    lines = _table(found, "tf32")
    if found.host_us:
        lines += ["", _host(found)]
    return "\n".join([*lines, "", source_of(TIMES, found)])


def half_times() -> str:
    """Lists this library's times and multiples of the floor: forward in both types and layouts, backward in bf16."""
    head = ["layer", "bfloat16: floor", "contiguous", "x floor", "channels-last", "x floor"]
    head += ["float16: contiguous", "x floor", "channels-last", "x floor"]
    head += ["bfloat16, backward: floor", "ours", "x floor"]
    layouts = ("contiguous", "channels_last_3d")
    kinds = [(dtype, layout, "forward") for dtype in ("bfloat16", "float16") for layout in layouts]
    kinds.append(("bfloat16", "contiguous", "backward"))
    files = [_file_with(kind, (TIMES, HALF, HALF_BACKWARD)) for kind in kinds]
    columns = [
        {row.layer: row for row in read(name).rows if _kind(row) == kind}
        for kind, name in zip(kinds, files, strict=True)
    ]
    floors = (
        0,
        len(kinds) - 1,
    )  # indices of the two columns that also show a floor: the first forward pass and the backward pass
    lines = [
        [layer, *(_over_floor(column[layer], floor=number in floors) for number, column in enumerate(columns))]
        for layer in columns[0]
    ]
    return "\n".join([*_grid(head, lines), "", _sources({name: read(name) for name in files})])


def _kind(row: Row) -> tuple[str, str, str]:
    return row.dtype, row.layout, row.which


def _file_with(kind: tuple[str, str, str], names: Sequence[str]) -> str:
    """Returns the first of the named files that has rows of this type, layout and pass."""
    return next(name for name in names if any(_kind(row) == kind for row in read(name).rows))


def _over_floor(row: Row, floor: bool = True) -> str:
    if row.failed or row.ours_ms is None or not row.floor_ms:
        return " | ".join([*(["failed"] if floor else []), "failed", ""])
    cells = [f"{row.floor_ms:.3f}"] if floor else []
    return " | ".join([*cells, f"{row.ours_ms:.3f}", ratio(row.ours_ms / row.floor_ms)])


def _table(found: Results, dtype: str) -> list[str]:
    """Lists the times of contiguous tensors, forward and backward side by side, and the means."""
    rows = {(row.layer, row.which): row for row in found.rows if (row.dtype, row.layout) == (dtype, "contiguous")}
    head = ["layer", "kernel", "floor", "ours", "PyTorch", "best", "over best"]
    head += ["backward: floor", "ours", "PyTorch", "best", "over best"]
    names = dict.fromkeys(layer for layer, _ in rows)
    lines = [[name, _times(rows[name, "forward"]), _times(rows[name, "backward"], False)] for name in names]
    means = [_means(summary) for summary in results.summarize(found.rows) if summary.dtype == dtype]
    return [*_grid(head, lines), "", *means]


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
    times = [
        f"{us[f'ours{name}_us']:.0f} / {us[f'torch{name}_us']:.0f} {words}"
        for name, words in CIRCUMSTANCES.items()
        if f"ours{name}_us" in us
    ]
    return f"Host time of a repeated call, microseconds, ours / `nn.ConvTranspose3d`: {', '.join(times)}."


# ---- docs: means of all kinds, random layers, errors


def means() -> str:
    """Lists geometric means over the benchmark's layers, by run, type, layout and pass."""
    channels_last = _file_with(("tf32", "channels_last_3d", "forward"), (TIMES, CHANNELS_LAST))
    files = {name: read(name) for name in (TIMES, channels_last, STRICT)}
    numbered = list(enumerate(files.items(), 1))
    rows = [[str(run), *cells] for run, (_, found) in numbered for cells in _summaries(found)]
    sources = [f"Run {run}: {source_of(*item)}" for run, item in numbered]
    return "\n".join([*_grid(["run", *SUMMARY], rows), "", "\n\n".join(sources)])


def random_layers() -> str:
    """Lists geometric means over random layers, and the layer with the least gain over PyTorch's best."""
    files = {name: read(name) for name in RANDOM.values()}
    head = ["seed", *SUMMARY, "closest to its best"]
    rows = [
        [str(seed), *cells, closest]
        for seed, name in RANDOM.items()
        for cells, closest in zip(_summaries(files[name]), _closest(files[name].rows), strict=True)
    ]
    return "\n".join([*_grid(head, rows), "", _sources(files)])


SUMMARY = ["type", "layout", "pass", "layers", "x floor", "over PyTorch", "over its best", "slower than its best"]


def _summaries(found: Results) -> list[list[str]]:
    rows = []
    for each in results.summarize(found.rows):
        cells = [each.dtype, each.layout, each.which, str(each.layers)]
        cells += [ratio(value) for value in (each.over_floor, each.gain, each.gain_over_best)]
        rows.append([*cells, str(len(each.slower)) if each.gain else ""])
    return rows


def _closest(rows: Sequence[Row]) -> list[str]:
    """Returns, for every summary of rows, the layer with the least gain over PyTorch's best."""
    closest = []
    for each in results.summarize(rows):
        kind = (each.dtype, each.layout, each.which)
        compared = [row for row in rows if _kind(row) == kind and row.gain_over_best]
        least = min(compared, key=lambda row: row.gain_over_best or 0.0, default=None)
        closest.append(f"{ratio(least.gain_over_best)}: {least.text}" if least else "")
    return closest


def errors() -> str:
    """Lists the largest errors by type, layout and pass; checks of equal type, layout and pass are taken together."""
    halves = [_file_with(("bfloat16", "contiguous", which), (TIMES, HALF, HALF_BACKWARD)) for which in results.PASSES]
    files = {name: read(name) for name in (TIMES, *halves, STRICT, *RANDOM.values())}
    checked: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for name, found in files.items():
        layers = "random" if name in RANDOM.values() else "benchmark"
        for row in found.rows:
            if row.error is not None and row.torch_error is not None:
                checked.setdefault((layers, *_kind(row)), []).append((row.error, row.torch_error))
    head = ["layers", "type", "layout", "pass", "checks", "ours, largest", "PyTorch's, largest"]
    lines = []
    for kind, pairs in checked.items():
        larger = sum(ours > 1.05 * theirs for ours, theirs in pairs)
        largest = [f"{max(pair[side] for pair in pairs):.1e}" for side in (0, 1)]
        lines.append([*kind, str(len(pairs)), *largest, str(larger)])
    table = _grid([*head, "checks where ours is more than 5% larger"], lines)
    return "\n".join([*table, "", _sources(files)])


# ---- docs: exported files, the fused block, whole networks, a training run


def exports() -> str:
    found = read_json(EXPORTS)
    head = ["task", "type", "layout", "same bits", "forward: file", "library", "backward: file", "library"]
    lines = []
    for row in found["rows"]:
        same = row["right"] and row["other_stream"] and all(row["same_bits"].values())
        times = [f"{ms:.3f}" for ms in (*row["forward_ms"], *row["backward_ms"])]
        lines.append([row["task"], row["dtype"], row["layout"], "yes" if same else "no", *times])
    return "\n".join([*_grid(head, lines), "", f"Milliseconds. {source(EXPORTS, found['machine'])}"])


def fused() -> str:
    """Compares the fused block with PyTorch's three layers, eager (the best of its variants) and compiled."""
    found = read_json(FUSED)
    lines = []
    for dtype, rows in found["task"].items():
        eager = [row for name, row in rows.items() if name.startswith("eager")]
        for name, key, scale in (
            ("forward, ms", "forward_ms", 1.0),
            ("training step, ms", "step_ms", 1.0),
            ("peak memory of a training step, GB", "step_peak_bytes", 1e9),
        ):
            ours, compiled = rows["ours"][key] / scale, rows["compile"][key] / scale
            best = min(row[key] for row in eager) / scale
            digits = [f"{value:.3f}" for value in (ours, best, compiled)]
            lines.append([f"{dtype}, {name}", *digits, f"{ours / min(best, compiled):.2f}"])
    head = ["task relu_group_norm", "ours", "eager, best", "`torch.compile`", "ours / best"]
    parts = found["parts"]
    part_head = ["part of a step, ms", *parts]
    part_lines = [[name, *(f"{rows[name]:.3f}" for rows in parts.values())] for name in next(iter(parts.values()))]
    origin = f"{source(FUSED, found['machine'])} The file is made of {found['origin']}."
    return "\n".join([*_grid(head, lines), "", *_grid(part_head, part_lines), "", origin])


def networks() -> str:
    """Lists the times of whole networks before and after `accelerate`."""
    found = read(NETWORKS)
    head = ["network", "layers swapped", "forward: PyTorch", "accelerated", "training step: PyTorch", "accelerated"]
    lines = []
    for model in found.models:
        pairs = [(model.before_ms[key], model.after_ms[key]) for key in ("forward", "training")]
        times = [f"{ms:.1f}" for pair in pairs for ms in pair]
        lines.append([model.model.split(":")[-1], str(model.swapped), *times])
    return "\n".join([*_grid(head, lines), "", f"Milliseconds. {source_of(NETWORKS, found)}"])


def training() -> str:
    """Compares a training run with this library's layers to one with PyTorch's."""
    found = read_json(TRAINING)
    step, same = found["step_ms"], "yes" if found["bitwise"] else "no"
    lines = [
        ["time of a step, ours / PyTorch's layers", f"{step['ours']:.2f} / {step['torch']:.2f} ms"],
        ["two runs of ours have the same losses, bit for bit", same],
        ["losses of ours and of PyTorch's differ by, on average", f"{found['difference']:.1e}"],
        ["losses of PyTorch's TF32 and strict float32 differ by, on average", f"{found['noise']:.1e}"],
    ]
    command = f"python benchmarks/train_unet.py --steps {found['settings']['steps']}"
    return "\n".join([*_grid(["training run", ""], lines), "", source(TRAINING, found["machine"], command)])


def tails() -> str:
    """Lists, for each tail, means over layers beside our convolution alone, the floor and PyTorch's best."""
    if not (ROOT / TAILS).exists():
        return "Nothing has been timed on a GPU yet."
    found = read(TAILS)
    head = [
        "tail",
        "type",
        "layout",
        "pass",
        "layers",
        "x plain convolution",
        "x floor",
        "over PyTorch's best",
        "least",
    ]
    lines = []
    for name, tail in bench_tails.TAILS.items():
        rows = [row for row in found.rows if row.tail == name]
        lines += [[tail.words, *cells, least] for cells, least in zip(_tail_means(rows), _closest(rows), strict=True)]
    means = [_means(summary) for summary in results.summarize(found.rows)]
    return "\n".join([*_grid(head, lines), "", *means, "", source_of(TAILS, found)])


def _tail_means(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [each.dtype, each.layout, each.which, str(each.layers)]
        + [ratio(value) for value in (each.over_plain, each.over_floor, each.gain_over_best)]
        for each in results.summarize(rows)
    ]


@dataclass(frozen=True)
class Table:
    """Names a place in a document, and the function that fills it."""

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
    Table("docs/performance.md", "networks", networks),
    Table("docs/performance.md", "training", training),
    Table("docs/numerics.md", "errors", errors),
    Table("docs/export.md", "export", exports),
    Table("docs/fused.md", "fused", fused),
    Table("docs/fusion.md", "tails", tails),
    Table("docs/distributed.md", "scaling", split_scaling.table),
)


def main() -> None:
    for table in TABLES:
        path = ROOT / table.document
        path.write_text(table.filled(path.read_text()))
        print(f"filled {table.name} of {table.document}")


if __name__ == "__main__":
    main()
