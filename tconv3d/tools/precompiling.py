"""Defines the flags of the command `precompile`, and runs it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import tconv3d
from tconv3d.api.deployed import LAYOUTS, PRECISIONS
from tconv3d.planning import gpus
from tconv3d.tools.arguments import shape
from tconv3d.tools.bench import layers, models
from tconv3d.tools.bench.commands import add_layer_flag

_MODEL_HELP = "the model that this function returns, alone or with an example input; `accelerate` swaps its layers"
_GPU_HELP = f"of: {gpus.names()}; with another number of multiprocessors: H100,114"


def add(commands: Any) -> None:
    """Adds the command to an argparse parser's subcommands."""
    parser = commands.add_parser("precompile", help="a model's kernels in one file, for machines without a compiler")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="PACKAGE:FACTORY", help=_MODEL_HELP)
    add_layer_flag(what)
    parser.add_argument(
        "--shape", action="append", type=shape, default=[], metavar="SHAPE", help="of a model's input: 1x1x96x96x96"
    )
    parser.add_argument("--gpu", action="append", required=True, metavar="GPU", help=_GPU_HELP)
    parser.add_argument("--dtype", nargs="+", choices=PRECISIONS, help="default: the type of each layer's input")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, help="default: the layout of each layer's input")
    parser.add_argument("--no-gradients", action="store_true", help="only the forward pass")
    parser.add_argument("--every-volume", action="store_true", help="also for inputs of other sizes")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.set_defaults(run=_precompile)


def _precompile(arguments: argparse.Namespace) -> int:
    model, inputs = _model(arguments)
    try:
        written = tconv3d.precompile(
            model,
            *inputs,
            path=arguments.output,
            gpus=arguments.gpu,
            dtypes=arguments.dtype,
            layouts=arguments.layout,
            backward=not arguments.no_gradients,
            every_volume=arguments.every_volume,
        )
    except OSError as error:
        raise ValueError(f"cannot write {arguments.output}: {error.strerror}") from None
    print(written)
    return 0


def _model(arguments: argparse.Namespace) -> tuple[torch.nn.Module, list[Any]]:
    """Returns the model and its inputs, or one of the layers with the sizes that the layers give."""
    if arguments.model is not None:
        first, *others = arguments.shape or [None]
        model, example = models.load(arguments.model, first)
        return tconv3d.accelerate(model), [example, *others]
    found = [layers.parse(text) for text in arguments.layer]
    module = torch.nn.ModuleList([tconv3d.accelerate(layer.module(device="meta")) for layer in found])
    return _Each(module), [tuple(torch.empty(layer.input_shape, device="meta") for layer in found)]


class _Each(torch.nn.Module):
    """Calls each of several layers with an input of its own."""

    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *inputs: torch.Tensor) -> None:
        for layer, input in zip(self.layers, inputs, strict=True):
            layer(input)
