"""Implements `tconv3d info | explain | demo | bench | verify | tune | report | export | precompile | cache`.

Each command parses its flags, calls the library as any user would, and prints. The exit status is 0 for success, 1 if
the library refused or a result was wrong, 2 if the command was not understood, 130 if it was interrupted. Only the
console script and `python -m tconv3d` import this module.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tconv3d
from tconv3d import emulator
from tconv3d.families.halo import planner as halo_planner
from tconv3d.runtime import background, cache, compiler, packs
from tconv3d.tools import calibrate, explaining, precompiling
from tconv3d.tools.bench import commands as bench
from tconv3d.tools.export import command as export


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(words, argparse.Namespace(words=words))
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except (ValueError, RuntimeError, TypeError, ImportError) as error:
        print(f"tconv3d: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Builds the argument parser with all commands and their flags."""
    parser = argparse.ArgumentParser(prog="tconv3d", description="ConvTranspose3d on its own CUDA kernels.")
    parser.add_argument("--version", action="version", version=f"tconv3d {tconv3d.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="versions, GPU, compiler, cache, emulator")
    info.add_argument("--json", action="store_true", help="print as JSON")
    info.set_defaults(run=_info)

    explaining.add(commands)

    bench.add(commands)
    export.add(commands)
    precompiling.add(commands)
    calibrate.add(commands)

    stored = commands.add_parser("cache", help="the compiled kernels on disk")
    stored.add_argument("action", choices=["size", "path", "clear", "clear-outdated"], nargs="?", default="size")
    stored.set_defaults(run=_cache)
    return parser


def _cache(arguments: argparse.Namespace) -> int:
    if arguments.action == "clear":
        removed = cache.clear()
        background.clear()
        print(f"removed {_kernels(removed)}")
    elif arguments.action == "clear-outdated":
        print(f"removed {_kernels(cache.clear_outdated())}")
    elif arguments.action == "size":
        print(_kernels(cache.size()))
        if (old := cache.outdated()).entries:
            print(f"{_kernels(old)} of an older version are not used: `tconv3d cache clear-outdated` removes them")
        if old_choices := halo_planner.outdated_tunings():
            print(f"{old_choices} of the tuned layers were tuned with another version: tune them again")
        for pack in packs.loaded():
            print(f"looked at first: {pack.summary}")
        if meanwhile := background.status():
            print(meanwhile)
    else:
        directory = cache.directory()
        if directory is None:
            raise RuntimeError("there is no home directory for the cache: set TCONV3D_CACHE_DIR")
        print(directory)
    return 0


def _kernels(size: cache.Size) -> str:
    return f"{size.entries} compiled kernel{'' if size.entries == 1 else 's'}, {size.bytes / 1e6:.1f} MB"


def _info(arguments: argparse.Namespace) -> int:
    facts = environment()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    table = Table(show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))  # printed without rich markup, because a message may contain tconv3d[cu13]
    Console(soft_wrap=False).print(table)
    return 0


def environment() -> dict[str, str]:
    """Describes the software and the GPUs of this machine for a bug report."""
    return {
        "tconv3d": tconv3d.__version__,
        "Python": platform.python_version(),
        "PyTorch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "GPU": _gpus(),
        "compiler": _compiler(),
        "cuda-core": _version("cuda-core"),
        "cache": f"{cache.directory() or 'no home directory'}: {_kernels(cache.size())}",
        "precompiled": "; ".join(pack.summary for pack in packs.loaded()) or f"none: {packs.VARIABLE} names no file",
        "emulator": _emulator(),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none visible"
    devices = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return "; ".join(f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}" for gpu in devices)


def _compiler() -> str:
    try:
        return compiler.version()
    except compiler.MissingCompilerError as error:
        return f"none: {error}"


def _emulator() -> str:
    return "available" if emulator.available() else "not available: it needs a C++ compiler"
