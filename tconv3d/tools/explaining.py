"""Defines the flags of the command `explain`, and runs it.

A layer is described by one flag for each of its settings, by `--layer` in the words of its constructor, or by its
name; `bench.layers` reads the latter two for every command.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import nn

import tconv3d
from tconv3d.planning import gpus
from tconv3d.tools import tables
from tconv3d.tools.arguments import integer, triple
from tconv3d.tools.bench import layers
from tconv3d.tools.bench.commands import add_layer_flag
from tconv3d.tools.bench.layers import Layer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}

# Flags of a layer's settings with their argparse types and defaults; None if the setting must be given.
_SETTINGS: dict[str, tuple[Any, Any]] = {
    "in-channels": (integer(1), None),
    "out-channels": (integer(1), None),
    "kernel": (triple(1), None),
    "stride": (triple(1), (1, 1, 1)),
    "padding": (triple(0), (0, 0, 0)),
    "output-padding": (triple(0), (0, 0, 0)),
    "dilation": (triple(1), (1, 1, 1)),
    "groups": (integer(1), 1),
    "size": (triple(1), None),
    "batch": (integer(1), 1),
}


def add(commands: Any) -> None:
    """Adds the command to an argparse parser's subcommands."""
    parser = commands.add_parser("explain", help="which kernel a layer would run, and why; needs no GPU")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"layers, of: {', '.join(layers.LAYERS)}")
    add_layer_flag(parser)
    group = parser.add_argument_group("one layer", "a triple is one number, or depth,height,width")
    for name, (kind, default) in _SETTINGS.items():
        text = "the input's volume" if name == "size" else None
        if default is not None:
            text = f"default {default[0] if isinstance(default, tuple) else default}"
        metavar = "N" if name in ("in-channels", "out-channels", "groups", "batch") else "TRIPLE"
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    group.add_argument("--no-bias", action="store_true")
    call = parser.add_argument_group("input")
    call.add_argument("--dtype", choices=DTYPES, default="float32")
    call.add_argument("--layout", choices=LAYOUTS, default="contiguous")
    call.add_argument("--gpu", metavar="GPU", help=f"a name or a compute capability (9.0): {gpus.names()}")
    parser.add_argument("--json", action="store_true", help="print as JSON: a list if there are several layers")
    parser.set_defaults(run=lambda arguments: _explain(parser, arguments))


def _explain(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    dtype, found = DTYPES[arguments.dtype], []
    for layer in _layers(parser, arguments):
        x = torch.empty(layer.input_shape, dtype=dtype, device="meta", memory_format=LAYOUTS[arguments.layout])
        found.append(tconv3d.explain(_module(layer, dtype), x, gpu=arguments.gpu))
    if arguments.json:
        described = [each.as_dict() for each in found]
        print(json.dumps(described[0] if len(described) == 1 else described, indent=2))
    else:
        for each in found:
            tables.print_lines(each)
    return 0


def _layers(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[Layer]:
    """Returns the layers of names and `--layer`, or the one that the flags of its settings describe."""
    given = {name: getattr(arguments, name.replace("-", "_")) for name in _SETTINGS}
    flags = [f"--{name}" for name, value in given.items() if value is not None]
    flags += ["--no-bias"] if arguments.no_bias else []
    if arguments.names or arguments.layer:
        if flags:
            parser.error(f"expected a layer by its name, by --layer or by flags, got also {', '.join(flags)}")
        return [*layers.named(arguments.names).values(), *map(layers.parse, arguments.layer)]
    needed = [name for name, (_, default) in _SETTINGS.items() if default is None]
    if missing := [f"--{name}" for name in needed if given[name] is None]:
        parser.error(f"the following arguments are required: {', '.join(missing)} (or --layer, or a layer's name)")
    values = {name: default if given[name] is None else given[name] for name, (_, default) in _SETTINGS.items()}
    settings = {name.replace("-", "_"): value for name, value in values.items()}
    return [Layer(**settings, bias=not arguments.no_bias)]


def _module(layer: Layer, dtype: torch.dtype) -> nn.ConvTranspose3d | tconv3d.ConvTranspose3dReLUGroupNorm:
    given: dict[str, Any] = {**layer.arguments, "device": "meta", "dtype": dtype}
    if layer.norm_groups:
        return tconv3d.ConvTranspose3dReLUGroupNorm(num_groups=layer.norm_groups, **given)
    return tconv3d.ConvTranspose3d(**given)
