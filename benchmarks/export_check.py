"""Checks on a GPU that exported files compute the library's results bit for bit, and times both.

    python benchmarks/export_check.py --json benchmarks/results/h200-export.json
    python benchmarks/export_check.py large_volume --dtype bfloat16 --layout channels_last_3d

Each file is exported, compiled by `load_inline` as a user would (all variants at once, each in a process of its own),
and run on the task's whole batch with the library's parameters. The library's results are compared with float64
first, so equal bits are right bits. Times are medians of several rounds, in which file and library alternate.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.tools import export, tasks
from tconv3d.tools.bench import accuracy, cases, layers
from tconv3d.tools.bench.cases import Case, leaves
from tconv3d.tools.bench.precision import LAYOUTS, precision
from tconv3d.tools.bench.results import describe_machine, write_json
from tconv3d.torch_ops.clock import Clock

TURNS = 5
PRECISIONS = export.PRECISIONS
Kind = tuple[str, str, str]  # task, precision, layout


@dataclass
class Row:
    task: str
    dtype: str
    layout: str
    right: bool  # whether the library agrees with float64
    same_bits: dict[str, bool]  # keyed by tensor: the output and every gradient
    other_stream: bool  # whether the output is equal, bit for bit, on a stream that is not the default one
    forward_ms: tuple[float, float]  # milliseconds of the file and of the library
    backward_ms: tuple[float, float]

    @property
    def fine(self) -> bool:
        return self.right and all(self.same_bits.values()) and self.other_stream

    @property
    def ratios(self) -> tuple[float, float]:
        return self.forward_ms[0] / self.forward_ms[1], self.backward_ms[0] / self.backward_ms[1]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_all(kinds: Sequence[Kind], folder: Path) -> None:
    """Compiles every variant in a process of its own into the extension cache of PyTorch."""
    started = time.perf_counter()
    running = [
        subprocess.Popen([sys.executable, __file__, "--compile", str(folder / f"{task}.py"), dtype, layout])
        for task, dtype, layout in kinds
    ]
    failed = [kind for kind, process in zip(kinds, running, strict=True) if process.wait() != 0]
    if failed:
        raise SystemExit(f"not compiled: {', '.join(' '.join(kind) for kind in failed)}")
    print(f"{len(kinds)} variants compiled in {time.perf_counter() - started:.0f} s")


def with_parameters_of(model: nn.Module, other: nn.Module) -> nn.Module:
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
    return model


def check(kind: Kind, folder: Path, clock: Clock) -> Row:
    task, dtype, layout = kind
    with precision(dtype):
        case = cases.build(layers.LAYERS[task], dtype, layout, "cuda")
        errors = accuracy.check(case, backward=True)
        right = all(accuracy.right(errors.of(each)[0], each, case) for each in ("forward", "backward"))
        file = load(folder / f"{task}.py")
        model = file.ModelNew(*file.get_init_inputs()).to("cuda", case.x.dtype)
        model = with_parameters_of(model.to(memory_format=LAYOUTS[layout]), case.ours)
        same, other_stream = compare(model, case)
        forward = by_turns([lambda: model(case.x), lambda: case.ours(case.x)], clock)
        return Row(*kind, right, same, other_stream, forward, backward_times(model, case, clock))


def compare(model: nn.Module, case: Case) -> tuple[dict[str, bool], bool]:
    y = case.ours(case.x)
    grad = torch.randn_like(y)
    expected = accuracy.results(case.ours, (case.x,), grad)
    with accuracy.poisoned():
        found = accuracy.results(model, (case.x,), grad)
    # Parameters may have other names in the task's model, but they come in equal order.
    same = {
        name: torch.equal(mine, theirs) for (name, mine), theirs in zip(found.items(), expected.values(), strict=True)
    }
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        again = model(case.x)
    torch.cuda.current_stream().wait_stream(stream)
    return same, torch.equal(again, y)


def backward_times(model: nn.Module, case: Case, clock: Clock) -> tuple[float, float]:
    def gradients(of: nn.Module) -> Callable[[], tuple[Tensor, ...]]:
        (x,), wanted = leaves(of, case.x)
        y = of(x)
        grad = torch.randn_like(y)
        return lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True)

    return by_turns([gradients(model), gradients(case.ours)], clock)


@torch.no_grad()
def by_turns(runs: Sequence[Callable[[], Any]], clock: Clock) -> tuple[float, float]:
    """Times both calls alternately, so that clocks and temperature are alike, and returns their medians."""
    mine, theirs = zip(*([clock(run) for run in runs] for _ in range(TURNS)), strict=True)
    return statistics.median(mine), statistics.median(theirs)


def say(row: Row) -> None:
    forward, backward = row.ratios
    print(
        f"{row.task:18} {row.dtype:9} {row.layout:17} {'same bits' if row.fine else 'NOT THE SAME'}, "
        f"forward {row.forward_ms[0]:.3f} / {row.forward_ms[1]:.3f} = {forward:.3f}, "
        f"backward {row.backward_ms[0]:.3f} / {row.backward_ms[1]:.3f} = {backward:.3f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(tasks.NAMES)}; else all")
    parser.add_argument("--dtype", nargs="+", choices=PRECISIONS, default=["tf32", "bfloat16"])
    parser.add_argument("--layout", nargs="+", choices=export.LAYOUTS, default=["contiguous"])
    parser.add_argument(
        "--files", type=Path, metavar="FOLDER", help="check these files, TASK.py; else files are exported"
    )
    parser.add_argument("--compile", nargs=3, metavar=("FILE", "PRECISION", "LAYOUT"), help="one variant, no more")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.compile:
        path, *variant = options.compile
        load(Path(path)).extension(0, *variant)
        return 0
    names = options.tasks or tasks.NAMES
    kinds = list(product(names, options.dtype, options.layout))
    with tempfile.TemporaryDirectory() as directory:
        folder = options.files or Path(directory)
        for task in names if options.files is None else ():
            (folder / f"{task}.py").write_text(export.export(task, options.dtype, options.layout))
        compile_all(kinds, folder)
        rows = []
        for kind in kinds:
            rows.append(check(kind, folder, Clock(0.03)))
            say(rows[-1])
            torch.cuda.empty_cache()
    if options.json:
        found = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
        write_json(found, options.json)
    return 0 if all(row.fine for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
