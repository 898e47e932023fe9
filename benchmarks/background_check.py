"""Measures what compiling in the background costs its caller: host time of a small U-Net before, during and after.

    python benchmarks/background_check.py       # takes less than a minute; uses the emulator without a GPU
    python benchmarks/background_check.py --json background.json

The network runs without gradients, and the host time of a step is the time until all its launches are queued on an
idle GPU. The phases are:

    before          nothing runs in the background
    during          the background process works as it does for users: it pauses while its caller is busy
    after           the background process has been ended
    unrestrained    the background process never pauses, which shows what pausing saves; its priority is the lowest
    beside a loop   a process of the lowest priority runs an endless loop, which shows what any busy CPU costs
    at the end      nothing runs in the background, which shows how much the machine itself has drifted

The table has for each phase the median, the mean and the 90th percentile of a step's host time, the CPU time of the
calling thread, how often that thread lost its CPU, and the CPU time that the other process took. Host time that grows
without CPU time is time spent waiting for a CPU; CPU time that grows too is a CPU that has become slower, because
another thread runs on its core or because memory and caches are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tconv3d
from tconv3d.api.explain import call_of, problems_of
from tconv3d.planning.gpus import GPUS
from tconv3d.runtime import background, yielding
from tconv3d.torch_ops import executor

LOOP = (
    "import os; os.nice(19); os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: sum(range(9999))"
)
COLUMNS = ("median_ms", "mean_ms", "p90_ms", "cpu_ms", "lost_cpu_per_s", "other_cpu_s_per_s")


class UNet(nn.Module):
    """Runs a U-Net whose decoder upsamples by transposed convolutions of kernel 3 and stride 2."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        widths = list(zip((1, *channels), channels, strict=False))
        self.down = nn.ModuleList(self._block(nn.Conv3d(a, b, 3, stride=2, padding=1), b) for a, b in widths)
        self.up = nn.ModuleList(
            self._block(tconv3d.ConvTranspose3d(b * (1 + (b != channels[-1])), a, 3, 2, 1, 1), a)
            for a, b in reversed(widths)
        )

    @staticmethod
    def _block(convolution: nn.Module, channels: int) -> nn.Module:
        return nn.Sequential(convolution, nn.InstanceNorm3d(channels), nn.PReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = skips.pop()
        for block in self.up:
            x = block(x)
            if skips:
                x = torch.cat((x, skips.pop()), 1)
        return x


def measure(step: Callable[[], object], seconds: float, other: Callable[[], float]) -> dict[str, float]:
    """Repeats a step for `seconds` and returns its host times; `other` gives the CPU seconds of the other process."""
    for _ in range(5):
        step()
    host, cpu = [], []
    lost, others, started = _lost_cpu(), other(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begun, used = time.perf_counter(), time.thread_time()
        step()
        cpu.append(1e3 * (time.thread_time() - used))
        host.append(1e3 * (time.perf_counter() - begun))
    passed = time.perf_counter() - started
    return {
        "median_ms": statistics.median(host),
        "mean_ms": statistics.mean(host),
        "p90_ms": statistics.quantiles(host, n=10)[-1],
        "cpu_ms": statistics.median(cpu),
        "lost_cpu_per_s": (_lost_cpu() - lost) / passed,
        "other_cpu_s_per_s": (other() - others) / passed,
    }


def _lost_cpu() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def cpu_of_background() -> float:
    """Returns the CPU seconds of the background process and of its child processes, which are found in /proc."""
    process = background._feeder._process
    if process is None or process.poll() is not None:
        return 0.0
    total = yielding.cpu_seconds(process.pid) or 0.0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == process.pid:
            total += yielding.cpu_seconds(int(entry.parent.name)) or 0.0
    return total


def compile_in_background(works: list[background.Work], share: float) -> None:
    background.SHARE = share
    background._feeder = background.Feeder()
    background._offered.clear()
    for work in works:
        background.offer(*work)
    deadline = time.monotonic() + 5
    while cpu_of_background() < 0.3 and time.monotonic() < deadline:
        time.sleep(0.05)


def phases(step: Callable[[], object], works: list[background.Work], seconds: float) -> dict[str, dict[str, float]]:
    def nobody() -> float:
        return 0.0

    found = {"before": measure(step, seconds, nobody)}
    for name, share, then in (("during", background.SHARE, "after"), ("unrestrained", 1.0, None)):
        compile_in_background(works, share)
        found[name] = measure(step, seconds, cpu_of_background)
        if not background.busy():
            found[name]["ended_early"] = 1.0
        background._feeder.end()
        if then:
            found[then] = measure(step, seconds, nobody)
    loop = subprocess.Popen([sys.executable, "-c", LOOP])
    try:
        found["beside a loop"] = measure(step, seconds, lambda: yielding.cpu_seconds(loop.pid) or 0.0)
    finally:
        loop.kill()
        loop.wait()
    found["at the end"] = measure(step, seconds, nobody)
    return found


def network(cuda: bool) -> tuple[Callable[[], object], list[background.Work]]:
    """Returns a step of the network, which has run once, and the work that its layers offer to the background."""
    works: list[background.Work] = []
    device = executor.device_of(torch.empty(0, device="cuda")) if cuda else GPUS["H200"].device

    def collect(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        works.append((tuple(problems_of(*call_of(layer, *inputs))[:1]), device))  # type: ignore[arg-type]

    channels, shape = ((16, 32, 64, 128, 256), (4, 1, 96, 96, 96)) if cuda else ((2, 4), (1, 1, 8, 8, 8))
    model = UNet(channels).eval().to("cuda" if cuda else "cpu")
    x = torch.randn(shape, device="cuda" if cuda else "cpu")

    def step() -> Tensor:
        with torch.no_grad(), tconv3d.use_backend("cuda" if cuda else "emulator"):
            return model(x)  # type: ignore[no-any-return]

    layers = [each for each in model.modules() if isinstance(each, tconv3d.ConvTranspose3d)]
    hooks = [layer.register_forward_pre_hook(collect) for layer in layers]
    step()
    for hook in hooks:
        hook.remove()
    return step, works


def show(found: dict[str, dict[str, float]]) -> None:
    heads = ("phase", "median ms", "mean ms", "p90 ms", "CPU ms", "lost CPU/s", "other CPU")
    print(f"{heads[0]:14}" + "".join(f"{head:>11}" for head in heads[1:]))
    for name, row in found.items():
        note = "   it was done before the phase ended" if row.get("ended_early") else ""
        print(f"{name:14}" + "".join(f"{row[column]:11.3f}" for column in COLUMNS) + note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each of the six phases (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    background.DELAY_S = 0.0
    os.environ.pop("TCONV3D_BACKGROUND", None)
    with tempfile.TemporaryDirectory(prefix="tconv3d-background-") as directory:
        os.environ["TCONV3D_CACHE_DIR"] = directory
        step, works = network(torch.cuda.is_available())
        found: dict[str, Any] = phases(step, works, options.seconds)
        background._feeder.end()
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
