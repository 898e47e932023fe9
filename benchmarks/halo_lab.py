"""Measures builds of the halo kernel against each other and against the planner's model, on a Hopper GPU.

    python benchmarks/halo_lab.py --layers large_volume,gan_128_64_16 --dtypes float32 --top 8 --out lab.json

For every layer it takes the builds that the model likes best, each with its best tiling, checks each against PyTorch
in full float32, and times it with a cold L2. The table says what the model said, so that the model's
constants can be corrected: they are in tconv3d/halo_model.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from halo_fit import job_of as job_of_layer
from halo_names import describe, geometry_of

from tconv3d import compiler, halo_planner, launcher
from tconv3d.bench.layers import LAYERS, Layer
from tconv3d.halo_job import job_of
from tconv3d.launch import Launch
from tconv3d.problem import Device, Pass, Problem

GIGAHERTZ = 1.75  # for the model's cycles
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass
class Row:
    """One measurement."""

    layer: str
    dtype: str
    layout: str
    which: str
    build: str
    tile: str
    model_ms: float
    ms: float
    error: float


def compile_launch(launch: Launch) -> tuple[int, str]:
    compiled = compiler.compile(launch.kernel, launch.constants, "sm_90a")
    return compiled.report.spill_loads, compiled.serialized


def milliseconds(run: Callable[[], None], flush: torch.Tensor, repeats: int) -> float:
    times = []
    for i in range(repeats + 2):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


class Bench:
    """The tensors of one pass of one layer, and PyTorch's result."""

    def __init__(self, layer: Layer, dtype: str, channels_last: bool, which: Pass = Pass.FORWARD) -> None:
        geometry = geometry_of(layer)
        form = torch.channels_last_3d if channels_last else torch.contiguous_format
        x = layer.input(TYPES[dtype], "cuda").contiguous(memory_format=form)
        self.weight, self.bias = (
            torch.randn(shape, device="cuda").to(TYPES[dtype]) for shape in (layer.weight_shape, layer.out_channels)
        )
        torch.backends.cudnn.allow_tf32 = False
        whole = x.float().requires_grad_(which is Pass.INPUT_GRAD)
        y = F.conv_transpose3d(whole, self.weight.float(), self.bias.float(), *layer.settings)
        if which is Pass.INPUT_GRAD:
            self.read = torch.randn_like(y).to(TYPES[dtype]).contiguous(memory_format=form)
            (self.reference,) = torch.autograd.grad(y, whole, self.read.float())
        else:
            self.read, self.reference = x, y
        self.written = torch.empty_like(self.reference, dtype=TYPES[dtype]).contiguous(memory_format=form)
        sides = (self.read, self.written) if which is Pass.FORWARD else (self.written, self.read)
        problem = Problem(
            which, geometry, layer.batch, layer.size, dtype, sides[0].stride(), self.weight.stride(),
            sides[1].stride(), which is Pass.FORWARD, True,
        )  # fmt: skip
        self.job = job_of(problem)

    def runner(self, plan: halo_planner.HaloPlan) -> Callable[[], None]:
        packed = torch.full((plan.packed_bytes,), 255, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        launcher.prepare(plan.pack, 0)((self.weight.data_ptr(), packed.data_ptr()), stream)
        run = launcher.prepare(plan.main, 0)
        rest = (packed.data_ptr(), self.bias.data_ptr(), self.written.data_ptr(), 0)
        if plan.rows is None:
            return lambda: (run((self.read.data_ptr(), *rest), stream), packed)[0]  # keeps `packed` alive
        rows = torch.full((plan.rows_bytes,), 255, dtype=torch.uint8, device="cuda")
        write_rows = launcher.prepare(plan.rows, 0)

        def both() -> None:
            write_rows((self.read.data_ptr(), rows.data_ptr()), stream)
            run((rows.data_ptr(), *rest), stream)

        return lambda: (both(), packed)[0]

    def error(self, run: Callable[[], None]) -> float:
        self.written.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        return ((self.written.float() - self.reference).norm() / self.reference.norm()).item()


@dataclass(frozen=True)
class Subject:
    """A pass of a layer to be measured."""

    name: str
    dtype: str
    channels_last: bool
    which: Pass

    @property
    def layout(self) -> str:
        return "channels_last" if self.channels_last else "contiguous"

    def candidates(self, device: Device, top: int) -> list[halo_planner.HaloPlan]:
        job = job_of_layer(self.name, self.dtype, self.channels_last, self.which.value)
        return halo_planner.candidates(job, device, top)


def measure(
    subject: Subject, plans: list[halo_planner.HaloPlan], reports: list[tuple[int, str]], flush: torch.Tensor
) -> list[Row]:
    bench = Bench(LAYERS[subject.name], subject.dtype, subject.channels_last, subject.which)
    rows = []
    for plan, (spills, warning) in zip(plans, reports, strict=True):
        run = bench.runner(plan)
        row = Row(
            subject.name,
            subject.dtype,
            subject.layout,
            subject.which.value,
            describe(plan.build),
            str(plan.tiling),
            plan.cycles / GIGAHERTZ / 1e6,
            0.0,
            bench.error(run),
        )
        row.ms = milliseconds(run, flush, 7)
        rows.append(row)
        note = (
            ("" if row.error < TOLERANCE[subject.dtype] else "  WRONG")
            + (f"  spills {spills}" if spills else "")
            + warning[:90]
        )
        print(
            f"{subject.name:18} {subject.dtype:8} {row.ms:8.4f} ms  model {row.model_ms:8.4f}  {row.error:.1e}  "
            f"{row.build}; {row.tile}{note}",
            flush=True,
        )
    best = min(rows, key=lambda row: row.ms)
    print(
        f"--> {best.layer} {best.dtype} {best.layout} {best.which}: best {best.ms:.4f}, "
        f"the model's first {rows[0].ms:.4f} ms",
        flush=True,
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--layouts", default="contiguous", help="contiguous, channels_last or both, with a comma")
    parser.add_argument("--passes", default="forward", help="forward, input_grad or both, with a comma")
    parser.add_argument("--top", type=int, default=6)
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = launcher.device_properties(0)
    device = Device(found.name, found.capability, found.multiprocessors, found.shared_bytes)
    subjects = [
        Subject(name, dtype, layout == "channels_last", Pass(which))
        for name in options.layers.split(",")
        for dtype in options.dtypes.split(",")
        for layout, which in product(options.layouts.split(","), options.passes.split(","))
    ]
    with ProcessPoolExecutor(options.processes) as pool:  # everything is compiled before anything is measured
        waiting = [pool.submit(subject.candidates, device, options.top) for subject in subjects]
        plans = [each.result() for each in waiting]
        reports = [[pool.submit(compile_launch, plan.main) for plan in each] for each in plans]
        for each in reports:
            for report in each:
                report.result()
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    rows: list[Row] = []
    for subject, candidates, compiled in zip(subjects, plans, reports, strict=True):
        if not candidates:
            continue
        rows += measure(subject, candidates, [report.result() for report in compiled], flush)
        if options.out:
            options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
