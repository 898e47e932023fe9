"""Times the first call of a layer: with nothing compiled, and in a new process with the kernels in the disk cache.

    python benchmarks/start_check.py --json start.json

Each layer starts in processes of its own with a cache of its own. PyTorch and its CUDA context are initialized before
the clock starts. The first call of the layer is timed until its launches are queued (`ms`) and until the GPU has
finished (`done`), and so is a first call with another batch and volume, which must not compile again.

    python benchmarks/start_check.py --volumes monai_128_32_16 gan_512_256_4

`--volumes` times first calls with volumes of many sizes, forward and backward, after their kernels have been compiled
in the background. `--prepare` does the work of the background process for the first volume in this process.
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

from tconv3d.api.explain import call_of, problems_of
from tconv3d.families.halo import planner as halo_planner
from tconv3d.runtime import background, compiler
from tconv3d.tools.bench import cases
from tconv3d.tools.bench.layers import LAYERS
from tconv3d.tools.bench.precision import DTYPES, precision
from tconv3d.tools.bench.results import describe_machine
from tconv3d.torch_ops import executor

NAMES = ("grouped_strided", "large_volume", "asymmetric_kernel", "relu_group_norm", "nnunet_64_32_64", "gan_64_1_32")


def timed(run: Callable[[], object]) -> dict[str, float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    return {"ms": 1e3 * (queued - started), "done": 1e3 * (time.perf_counter() - started)}


def start(name: str, dtype: str) -> dict[str, Any]:
    """Times the first calls of a layer; it must be called in a new process."""
    with precision(dtype), torch.no_grad():
        case = cases.build(LAYERS[name], dtype, "contiguous", "cuda")
        x = case.x
        other = x[:1, ..., : max(1, x.shape[-1] - 1)].contiguous()
        first = timed(lambda: case.ours(x))
        return {"first": first, "again": timed(lambda: case.ours(x)), "other_volume": timed(lambda: case.ours(other))}


# Each entry is a batch and a volume: small and large ones, with rows that are multiples of 16 bytes and others.
VOLUMES = (
    (1, (4, 4, 4)), (32, (4, 4, 4)), (1, (8, 8, 8)), (3, (7, 6, 9)), (1, (16, 16, 16)), (2, (15, 13, 17)),
    (16, (8, 8, 8)), (2, (16, 20, 24)), (1, (33, 31, 30)), (4, (32, 32, 32)), (1, (64, 64, 64)), (2, (57, 61, 63)),
    (1, (80, 72, 96)),
)  # fmt: skip


def step(case: cases.Case, x: torch.Tensor) -> dict[str, Any]:
    """Times a first call, and the backward pass that follows."""
    x = x.detach().requires_grad_()
    made: list[torch.Tensor] = []
    forward = timed(lambda: made.append(case.ours(x)))
    dy = torch.ones_like(made[0])
    return {"forward": forward, "backward": timed(lambda: made[0].backward(dy))}


def counted(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Adds to the results of a run the number of kernels it compiled, and of its searches for a build."""
    counts = {"compiled": 0, "searched": 0}
    patched = ((compiler, "_build", "compiled"), (halo_planner, "_search", "searched"))
    before = [(module, name, getattr(module, name)) for module, name, _ in patched]
    for (module, name, what), (_, _, function) in zip(patched, before, strict=True):

        def counting(*arguments: Any, what: str = what, function: Any = function) -> Any:
            counts[what] += 1
            return function(*arguments)

        setattr(module, name, counting)
    try:
        return run() | counts
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def volumes(name: str, dtype: str, patience_s: float) -> None:
    """Times first calls with volumes of many sizes, after the background process has compiled their kernels."""
    with precision(dtype):
        case = cases.build(LAYERS[name], dtype, "contiguous", "cuda")
        torch.ones(1, device="cuda", requires_grad=True).backward(torch.ones(1, device="cuda"))  # starts autograd
        print(name, "first", line(counted(lambda: step(case, case.x))), flush=True)
        started = time.monotonic()
        while background.busy() and time.monotonic() - started < patience_s:
            time.sleep(0.1)
        print(name, f"waited {time.monotonic() - started:.1f} s", background.status(), flush=True)
        for batch, size in VOLUMES:
            x = torch.randn(batch, case.x.shape[1], *size, device="cuda", dtype=case.x.dtype)
            torch.cuda.synchronize()
            text = f"{batch}x{'x'.join(map(str, size))}"
            print(f"{name} {text:14}", line(counted(lambda x=x: step(case, x))), flush=True)  # type: ignore[misc]
            torch.cuda.empty_cache()


def line(found: dict[str, Any]) -> str:
    text = f"forward {found['forward']['ms']:8.2f} ms, backward {found['backward']['ms']:8.2f} ms"
    return f"{text}, {found['compiled']} compiled, {found['searched']} searched"


def prepare(name: str, dtype: str, gradients: bool) -> None:
    with precision(dtype):
        layer, device = LAYERS[name], executor.device_of(torch.empty(0, device="cuda"))
        model = layer.module(DTYPES[dtype], "meta")
        (module,) = (each for each in model.modules() if isinstance(each, torch.nn.ConvTranspose3d))
        found = problems_of(*call_of(module, layer.input(DTYPES[dtype], "meta")))
        started = time.process_time()
        background.prepare((tuple(found[1:]) if gradients else (found[0],), device))
        print(name, "gradients" if gradients else "forward", f"{time.process_time() - started:.1f} s", flush=True)


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
    parser.add_argument("--volumes", action="store_true", help="first calls with volumes of many sizes")
    parser.add_argument("--prepare", action="store_true", help="compile what these will need")
    parser.add_argument("--wait", type=float, default=300.0, help="seconds, at most, for what is compiled meanwhile")
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(*options.start)))
        return
    if options.volumes or options.prepare:
        for name in options.names:
            if options.prepare:
                prepare(name, options.dtype, False)
                prepare(name, options.dtype, True)
            else:
                volumes(name, options.dtype, options.wait)
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
