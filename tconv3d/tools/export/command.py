"""Defines the flags of the command `export`, and runs it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from ...planning import gpus
from ..bench import layers
from . import LAYOUTS, PRECISIONS, export

_HELP = (
    "a task or a layer by name, or a layer in the words of the constructor: "
    '"64, 32, kernel_size=2, stride=2, size=64, batch=2"'
)


def add(commands: Any) -> None:
    """Adds the command to an argparse parser's subcommands."""
    parser = commands.add_parser("export", help="a layer's kernels as one Python file, without this library")
    parser.add_argument("layer", metavar="TASK_OR_LAYER", help=f"{_HELP}. Names: {', '.join(layers.LAYERS)}")
    parser.add_argument("-o", "--output", type=Path, default=Path("model_new.py"), help="default model_new.py")
    parser.add_argument("--dtype", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="default: all")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: both")
    parser.add_argument("--gpu", metavar="GPU", help=f"plan for this one: {gpus.names()}; default: for all")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    words = ["tconv3d", "export", arguments.layer]
    for flag, given, every in (("dtype", arguments.dtype, PRECISIONS), ("layout", arguments.layout, LAYOUTS)):
        words += [f"--{flag}", *given] if set(given) != set(every) else []
    words += ["--gpu", arguments.gpu] if arguments.gpu else []
    text = export(arguments.layer, arguments.dtype, arguments.layout, shlex.join(words), gpu=arguments.gpu)
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {arguments.output}: {error.strerror}") from None
    print(f"wrote {arguments.output}, {text.count(chr(10))} lines")
    return 0
