"""How long a new layer takes to its first result: with nothing compiled, and in a new process that finds it compiled.

    python benchmarks/start_check.py --json start.json

Each layer starts in processes of its own with a cache of its own. PyTorch and its context are up before the clock
starts; what is timed is the first call of the layer until its launches are queued (`ms`) and until the GPU has
finished (`done`), and a first call with another batch and volume, which must not compile again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.bench import cases
from tconv3d.bench.layers import LAYERS
from tconv3d.bench.precision import precision
from tconv3d.bench.results import describe_machine

NAMES = ("grouped_strided", "large_volume", "asymmetric_kernel", "relu_group_norm", "nnunet_64_32_64", "gan_64_1_32")


def timed(run: Callable[[], object]) -> dict[str, float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    return {"ms": 1e3 * (queued - started), "done": 1e3 * (time.perf_counter() - started)}


def start(name: str, dtype: str) -> dict[str, Any]:
    """Called in a new process."""
    with precision(dtype), torch.no_grad():
        case = cases.build(LAYERS[name], dtype, "contiguous", "cuda")
        x = case.x
        other = x[:1, ..., : max(1, x.shape[-1] - 1)].contiguous()
        first = timed(lambda: case.ours(x))
        return {"first": first, "again": timed(lambda: case.ours(x)), "other_volume": timed(lambda: case.ours(other))}


def in_new_process(name: str, dtype: str, cache: str) -> dict[str, Any]:
    settings = os.environ | {"TCONV3D_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, __file__, "--start", name, dtype], env=settings, stdout=subprocess.PIPE)
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(*options.start)))
        return
    rows = {}
    for name in options.names:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (in_new_process(name, options.dtype, cache) for _ in range(2))
        rows[name] = {"cold": cold, "warm": warm}
        print(
            f"{name:20} cold {cold['first']['ms']:7.1f} ms, then another volume {cold['other_volume']['ms']:6.2f}; "
            f"new process {warm['first']['ms']:6.2f} ms, another volume {warm['other_volume']['ms']:6.2f}, "
            f"again {warm['again']['ms']:6.3f}"
        )
    if options.json:
        found = {"machine": describe_machine(), "dtype": options.dtype, "layers": rows}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
