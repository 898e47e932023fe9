"""What binds the halo kernel: the time of a layer's build with parts of the kernel left out, on a Hopper GPU.

    python benchmarks/halo_ablation.py --layers large_volume,gan_512_256_4 --dtypes float32 --from lab.json

Parts are taken out by patching a copy of the kernel's text (the results are wrong then, only times are printed). A
part that costs what the whole costs when it is alone binds; parts whose times add up to the whole do not overlap.
`--from` takes the fastest build of a table of halo_lab.py, else it is the planner's choice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from halo_lab import Bench, milliseconds
from halo_names import describe

from tconv3d import compiler, halo_planner, launcher, sources
from tconv3d.bench.layers import LAYERS
from tconv3d.halo_build import tilings
from tconv3d.launch import Launch
from tconv3d.problem import Device

UNSTORED = "if (args.batch > 0) {\n} else if constexpr (Config::kOutputUnitC) {\n"
# What leaves out a part: text of kernels/halo*.cuh, and what replaces it. Conditions that never hold keep the code
# around it.
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "loads": (  # from global memory
        ("exists ? Positions::parts_of(from) : 0", "exists && args.batch < 0 ? Positions::parts_of(from) : 0"),
        ("raw[i][c] = exists ? __ldg(", "raw[i][c] = exists && args.batch < 0 ? __ldg("),
        ("return exists ? ptx::load_calling(", "return exists && address == nullptr ? ptx::load_calling("),
        ("inside ? count : 0", "inside && args.batch < 0 ? count : 0"),
        ("const bool there = bytes > 0 &&", "const bool there = args.batch < 0 &&"),
    ),
    "staging": (  # to shared memory
        ("if (row == Positions::kNoRow) return;", "if (row >= 0) return;"),
        ("if (first_row == Positions::kNoRow) return;", "if (first_row >= 0) return;"),
        ("if (row[i] == Positions::kNoRow) continue;", "if (row[i] >= 0) continue;"),
        ("ptx::store_transposed(start", "if (stage == 1) ptx::store_transposed(start"),
    ),
    "products": (
        ("ptx::MatrixMultiply<Layout", "if constexpr (false) ptx::MatrixMultiply<Layout"),
        ("ptx::MatrixMultiply<kUnit", "if constexpr (false) ptx::MatrixMultiply<kUnit"),
        ("ptx::MatrixMultiply<kColumns", "if constexpr (false) ptx::MatrixMultiply<kColumns"),
    ),
    "stores": (
        ("if constexpr (Config::kOutputUnitC) {\n", UNSTORED),
        ("if (args.vector == 2) {\n", "if (args.batch > 0) return;\n      {\n"),
        ("Images::store(args, at, me, sums", "if (args.batch < 0) Images::store(args, at, me, sums"),
        ("Lines::store(args, at, me, sums", "if (args.batch < 0) Lines::store(args, at, me, sums"),
        ("HaloWords<Config>::store(args", "if (args.batch < 0) HaloWords<Config>::store(args"),
        ("if (pair.exists)\n          write_row", "if (pair.exists && args.batch < 0)\n          write_row"),
        ("if (first < last) ptx::bulk_store", "if (bytes < 0) ptx::bulk_store"),
        ("if (own && place >= before", "if (own && bytes < 0 && place >= before"),
    ),
    "panels": (("ptx::barrier_wait(me.shared.slot_full(me.slots.index), me.slots.parity);", ";"),),  # the wait
}  # fmt: skip

VARIANTS: dict[str, tuple[str, ...]] = {
    "whole": (),
    "no loads": ("loads",),
    "no loads, staging": ("loads", "staging"),
    "no products": ("products",),
    "no stores": ("stores",),
    "no panel waits": ("panels",),
    "loader alone": ("products", "stores", "panels"),
    "products alone": ("loads", "staging", "stores", "panels"),
    "products, panels": ("loads", "staging", "stores"),
    "stores alone": ("loads", "staging", "products", "panels"),
    "nothing": ("loads", "staging", "products", "stores", "panels"),
}


def kernels_without(parts: tuple[str, ...], directory: Path) -> Path:
    """A copy of the kernels without these parts."""
    copy = directory / ("without_" + "_".join(parts))
    copy.mkdir()
    for path in sources.all_headers().values():
        shutil.copy(path, copy)
    texts = {path: path.read_text() for path in copy.glob("halo*.cuh")}
    for part in parts:
        for old, new in PARTS[part]:
            having = [path for path, text in texts.items() if old in text]
            if len(having) != 1 or texts[having[0]].count(old) != 1:
                raise ValueError(f"the kernel has changed: not one place has {old!r}")
            texts[having[0]] = texts[having[0]].replace(old, new)
    for path, text in texts.items():
        path.write_text(text)
    return copy


def compile_with(job: tuple[Path, Launch]) -> None:
    kernels, launch = job
    sources.KERNELS = (kernels,)
    compiler.compile(launch.kernel, launch.constants, "sm_90a")


def fastest(table: Path, bench: Bench, name: str, dtype: str, device: Device) -> halo_planner.HaloPlan:
    """The plan of the fastest row of a table."""
    rows = [r for r in json.loads(table.read_text()) if (r["layer"], r["dtype"]) == (name, dtype)]
    best = min(rows, key=lambda row: row["ms"])
    for build in halo_planner.builds(bench.job.geometry, dtype, device.shared_bytes):
        if describe(build) != best["build"]:
            continue
        for tiling in tilings(build, bench.job.batch, bench.job.positions, bench.job.read_size):
            if str(tiling) == best["tile"]:
                return halo_planner.assemble(build, tiling, bench.job, device)
    raise ValueError(f"the planner no longer has {best['build']}; {best['tile']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--from", type=Path, dest="table", help="a table of halo_lab.py")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    options = parser.parse_args()
    found = launcher.device_properties(0)
    device = Device(found.name, found.capability, found.multiprocessors, found.shared_bytes)
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(options.processes) as pool:
        kernels = {name: kernels_without(parts, Path(directory)) for name, parts in VARIANTS.items()}
        for name in options.layers.split(","):
            for dtype in options.dtypes.split(","):
                bench = Bench(LAYERS[name], dtype, options.channels_last)
                if options.table:
                    plan = fastest(options.table, bench, name, dtype, device)
                else:
                    plan = halo_planner.plan_or_none(bench.job, device)
                print(f"{name} {dtype}: {describe(plan.build)}; {plan.tiling}", flush=True)
                list(pool.map(compile_with, [(path, plan.main) for path in kernels.values()]))
                for variant, path in kernels.items():
                    sources.KERNELS = (path,)
                    launcher._kernels.clear()  # they are known by their constants
                    print(f"    {milliseconds(bench.runner(plan), flush, 7):8.4f} ms  {variant}", flush=True)


if __name__ == "__main__":
    main()
