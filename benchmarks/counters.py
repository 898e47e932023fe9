"""Reads hardware counters of every kernel of the reference tasks with `ncu`, to see what limits them on this GPU.

    python benchmarks/counters.py --out counters.txt
    python benchmarks/counters.py large_volume --kind bfloat16 --passes forward

Caches are flushed before each kernel, as in the benchmarks; clocks are not fixed. No pass is begun after `--seconds`
seconds; each pass is launched once, and `ncu` replays each of its kernels until all counters are read.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.planning.launch import Launch
from tconv3d.runtime import launcher
from tconv3d.tools.bench import cases
from tconv3d.tools.bench.layers import LAYERS
from tconv3d.tools.bench.precision import precision
from tconv3d.tools.bench.results import describe_machine

NAMES = ("grouped_strided", "large_volume", "asymmetric_kernel", "relu_group_norm")
KINDS = ("tf32", "bfloat16")
PASSES = ("forward", "backward")

# Each entry is a counter of ncu, its heading in the table, and the number it is divided by.
COUNTERS = (
    ("gpu__time_duration.sum", "us", 1e3),
    ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "tensor %", 1),
    ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed", "shared %", 1),
    ("smsp__issue_active.avg.pct_of_peak_sustained_elapsed", "issue %", 1),
    ("lts__t_tag_requests.avg.pct_of_peak_sustained_elapsed", "L2 tags %", 1),
    ("lts__xbar2lts_cycles_active.avg.pct_of_peak_sustained_elapsed", "to L2 %", 1),
    ("lts__lts2xbar_cycles_active.avg.pct_of_peak_sustained_elapsed", "from L2 %", 1),
    ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "memory %", 1),
    ("dram__bytes_read.sum", "read MB", 1e6),
    ("dram__bytes_write.sum", "written MB", 1e6),
    ("lts__t_sectors_op_read.sum", "L2 sectors read M", 1e6),
    ("lts__t_sectors_op_write.sum", "L2 sectors written M", 1e6),
    ("l1tex__data_bank_conflicts_pipe_lsu.sum", "bank conflicts M", 1e6),
)


def record() -> list[str]:
    """Returns a list to which every launch from now on appends the name of its kernel."""
    launched: list[str] = []
    original = launcher._starter

    def recording(launch: Launch, *rest: object) -> Callable[..., None]:
        start = original(launch, *rest)  # type: ignore[arg-type]

        def run(*arguments: object) -> None:
            launched.append(launch.kernel)
            start(*arguments)  # type: ignore[arg-type]

        return run

    launcher._starter = recording
    return launched


def watched(names: Sequence[str], kinds: Sequence[str], passes: Sequence[str], seconds: float, log: Path) -> None:
    """Runs the passes under `ncu`, and writes to `log` which layer, type and pass each kernel belongs to."""
    launched = record()
    until = time.monotonic() + seconds
    profiler = torch.cuda.cudart()
    found: list[tuple[str, str, str, str]] = []
    for which in passes:
        for kind in kinds:
            for name in names:
                if time.monotonic() > until:
                    return
                with precision(kind):
                    run = prepared(name, kind, which)
                    for _ in range(3):  # the second run packs the weight for later calls, the third reuses it
                        run()
                    torch.cuda.synchronize()
                    before = len(launched)
                    profiler.cudaProfilerStart()
                    run()
                    torch.cuda.synchronize()
                    profiler.cudaProfilerStop()
                found += [(name, kind, which, kernel) for kernel in launched[before:]]
                log.write_text(json.dumps(found))
                torch.cuda.empty_cache()


def prepared(name: str, kind: str, which: str) -> Callable[[], object]:
    """Returns a call that runs one pass of a layer and can be repeated."""
    case = cases.build(LAYERS[name], kind, "contiguous", "cuda")
    if which == "forward":
        return torch.no_grad()(lambda: case.ours(case.x))
    (x,), leaves = cases.leaves(case.ours, case.x)
    y = case.ours(x)
    dy = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def table(report: str, found: Sequence[Sequence[str]]) -> list[str]:
    """Returns a heading and one line for each kernel."""
    lines = report.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    rows = [row for row in csv.DictReader(lines[first:]) if row["ID"]]  # the line of units has no ID
    rows = [row for row in rows if row["Kernel Name"].startswith("tconv3d")]
    out = ["layer, type, pass, kernel | " + " | ".join(title for _, title, _ in COUNTERS)]
    for what, row in zip(found, rows, strict=False):
        values = [float(row[name].replace(",", "")) / unit if row.get(name) else None for name, _, unit in COUNTERS]
        out.append(", ".join(what) + " | " + " | ".join("-" if v is None else f"{v:.4g}" for v in values))
    if len(rows) != len(found):
        out.append(f"{len(rows)} kernels were counted and {len(found)} launched: lines may be of others")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--kind", nargs="+", default=KINDS)
    parser.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--watched", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watched:
        watched(options.names, options.kind, options.passes, options.seconds, options.watched)
        return
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        parser.error("counters are read by ncu on a CUDA GPU, and none is visible")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "launched.json"
        command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
        command += ["--print-units", "base", "--metrics", ",".join(name for name, _, _ in COUNTERS)]
        command += [sys.executable, __file__, *options.names, "--kind", *options.kind, "--passes", *options.passes]
        command += ["--seconds", str(options.seconds), "--watched", str(log)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode or not log.exists():
            sys.exit(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}")
        lines = table(done.stdout, json.loads(log.read_text()))
    machine = describe_machine()
    lines.insert(0, f"{machine['gpu']}, commit {(machine['commit'] or 'unknown')[:7]}, {machine['measured'][:10]}")
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
