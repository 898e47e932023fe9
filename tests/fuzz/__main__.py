"""Implements the command line of the fuzz: `make fuzz`, or `PYTHONPATH=.:tests python -m fuzz --help`."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .search import Search
from .shrink import SECONDS

MINUTES = 10.0  # duration of a search if neither a time nor a number of cases is given


def main() -> int:
    arguments = _arguments()
    device = "cuda" if torch.cuda.is_available() and not arguments.emulator else "cpu"
    seed = random.SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    limited = arguments.minutes is not None or arguments.cases is not None
    print(f"seed {seed}; SEED={seed} repeats it", flush=True)
    with tempfile.TemporaryDirectory(prefix="tconv3d-fuzz-") as cache:  # random kernels stay out of the user's cache
        search = Search(
            seed,
            device,
            **({"plans": ("",)} if device == "cuda" else {}),
            cases=arguments.cases,
            minutes=arguments.minutes if limited else MINUTES,
            workers=arguments.workers,
            shrinking=arguments.shrink,
            environment={**(_sanitized() if arguments.sanitize else {}), "TCONV3D_CACHE_DIR": cache},
            say=lambda text: print(text, flush=True),
        )
        search.run()
    summary = search.summary()
    for name, value in summary.items():
        if name != "failures":
            print(f"{name}: {_words(value)}")
    print(f"failures: {len(search.failures)}")
    for failure in search.failures:
        print(f"\ndraw {failure.number}:\n    {failure.text}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if search.failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description="Random layers, tensors and calls against float64.")
    parser.add_argument("--seed", type=int, help="a run with the same seed draws the same cases; else a fresh one")
    parser.add_argument("--minutes", type=float, help=f"how long to draw; {MINUTES:.0f} if nothing is given")
    parser.add_argument("--cases", type=int, help="how many cases to run")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes; as many as cores if not given"
    )
    parser.add_argument("--shrink", type=float, default=SECONDS, help="seconds to make a failure simpler; 0 for none")
    parser.add_argument("--emulator", action="store_true", help="use the emulator on a machine with a GPU too")
    parser.add_argument(
        "--sanitize", action="store_true", help="AddressSanitizer and UBSan watch the emulated kernels"
    )
    parser.add_argument("--json", help="a file for the summary")
    return parser.parse_args()


def _sanitized() -> dict[str, str]:
    from sanitizing import sanitized

    return sanitized()


def _words(value: Any) -> str:
    return ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    sys.exit(main())
