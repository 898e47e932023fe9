"""Defines the flags of the command `export`, and runs it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..bench import layers
from . import DEVICES, LAYOUTS, PRECISIONS, command_line, export, export_like

_HELP = (
    "a task or a layer by name, or a layer in the words of the constructor: "
    '"64, 32, kernel_size=2, stride=2, size=64, batch=2"'
)


def add(commands: Any) -> None:
    """Adds the command to an argparse parser's subcommands."""
    parser = commands.add_parser("export", help="a layer's kernels as one Python file, without this library")
    names = ", ".join(layers.LAYERS)
    parser.add_argument("layer", nargs="?", metavar="TASK_OR_LAYER", help=f"{_HELP}. Names: {names}")
    like = "a Python file with Model, get_inputs and get_init_inputs, in place of a layer"
    parser.add_argument("--like", type=Path, metavar="REFERENCE.PY", help=like)
    parser.add_argument("-o", "--output", type=Path, default=Path("model_new.py"), help="default model_new.py")
    parser.add_argument("--dtype", nargs="+", choices=PRECISIONS, default=[], help="default: that of the inputs")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=[], help="default: that of the inputs")
    parser.add_argument("--gpu", nargs="+", choices=DEVICES, default=[], help="default: the GPU at hand, else H200")
    parser.add_argument("--forward-only", action="store_true", help="leave out the gradients")
    evaluated = "with --like: the model as it computes in evaluation, not in training (BatchNorm, Dropout)"
    parser.add_argument("--eval", action="store_true", dest="evaluated", help=evaluated)
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    if (arguments.layer is None) == (arguments.like is None):
        raise ValueError("expected a task or a layer, or --like with the file of a reference, and not both")
    if arguments.evaluated and not arguments.like:
        raise ValueError("--eval goes with --like: layers and tasks compute the same in training and evaluation")
    given = (arguments.dtype, arguments.layout, arguments.gpu, arguments.forward_only)
    like = ["--like", str(arguments.like), *(["--eval"] if arguments.evaluated else [])]
    try:
        source = arguments.like.read_text(encoding="utf-8") if arguments.like else ""
    except OSError as error:
        raise ValueError(f"cannot read {arguments.like}: {error.strerror}") from None
    text = (
        export_like(source, *given, command_line(like, *given), evaluated=arguments.evaluated)
        if arguments.like
        else export(arguments.layer, *given)
    )
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {arguments.output}: {error.strerror}") from None
    print(f"wrote {arguments.output}, {text.count(chr(10))} lines")
    return 0
