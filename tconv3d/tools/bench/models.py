"""Finds the layers of a user's model, and measures the whole model before and after `accelerate`."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

import tconv3d
from tconv3d.api import survey
from tconv3d.torch_ops.clock import Timer

from .layers import Layer
from .precision import DTYPES, LAYOUTS, TOLERANCE, in_layout, precision
from .results import ModelRow

# Factor on the tolerance of one layer for a whole model, in which rounding errors add up from layer to layer.
DEPTH = 20


def load(spec: str, input_shape: tuple[int, ...] | None = None) -> tuple[nn.Module, Any]:
    """Returns the model of `package.module:factory`, and an input for it.

    The factory is called without arguments. It returns a model and an example input (a tensor, a tuple of arguments
    or a dictionary of keywords), or a model alone: then `input_shape` is the shape of the tensor it gets.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ValueError(f"expected a model as package.module:factory, got {spec!r}")
    if os.getcwd() not in sys.path:  # `python -m` has the current directory on the path too
        sys.path.insert(0, os.getcwd())
    factory = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(factory, part):
            raise ValueError(f"{module_name} has no {name}")
        factory = getattr(factory, part)
    made = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected {spec} to make an nn.Module, but got {type(model).__name__}")
    if input_shape is not None:
        example = torch.randn(input_shape)
    if example is None:
        raise ValueError(f"{spec} makes a model without an example input: give its shape with --input")
    return model, example


def layers_of(model: nn.Module, example_input: Any) -> dict[str, Layer]:
    """Returns the transposed convolutions that the input reaches, by their names in the model, without duplicates."""
    found: dict[str, Layer] = {}
    shapes = survey.input_shapes(model, example_input)
    for module, (name, *_) in survey.transposed_convolutions(model).items():
        if not isinstance(module, nn.ConvTranspose3d):
            continue
        for number, shape in enumerate(shapes.get(module, ())):
            layer = _layer(module, shape)
            if layer not in found.values():
                found[f"{name or 'model'}{f'#{number}' if number else ''}"] = layer
    return found


def _layer(module: nn.ConvTranspose3d, shape: tuple[int, ...]) -> Layer:
    batch, channels, *size = shape if len(shape) == 5 else (1, *shape)
    settings: list[Any] = [module.kernel_size, module.stride, module.padding, module.output_padding, module.dilation]
    triples = [tuple(int(n) for n in values) for values in (size, *settings)]
    more: Any = {"groups": module.groups, "bias": module.bias is not None}
    return Layer(batch, channels, module.out_channels, *triples, **more)  # type: ignore[arg-type]


def measure(
    spec: str, model: nn.Module, example_input: Any, kind: tuple[str, str], backward: bool, clock: Timer, device: str
) -> ModelRow:
    """Times the whole model before and after `accelerate`, and compares the outputs."""
    dtype, layout = kind
    model = in_layout(copy.deepcopy(model).to(device), layout).eval()
    example = _pytree.tree_map_only(Tensor, lambda x: _placed(x, device, layout, dtype), example_input)
    if dtype == "float64":
        model.double()
    report = tconv3d.plan_swaps(model)
    row = ModelRow(spec, dtype, layout, len(report.swapped), len(report.left))
    with precision(dtype), _cast(dtype, device):
        before = _output(model, example)
        row.before_ms = _times(model, example, backward, clock)
        tconv3d.accelerate(model)
        row.difference = float((_output(model, example) - before).norm() / before.norm())
        row.right = row.difference <= DEPTH * TOLERANCE[dtype]
        row.after_ms = _times(model, example, backward, clock)
    return row


def _placed(x: Tensor, device: str, layout: str, dtype: str) -> Tensor:
    x = x.to(device)
    if dtype == "float64" and x.is_floating_point():
        x = x.double()
    return x.contiguous(memory_format=LAYOUTS[layout]) if x.dim() == 5 else x


def _cast(dtype: str, device: str) -> Any:
    """Returns autocast for the 16-bit types, in which models keep float32 parameters, and else an empty context."""
    if dtype in ("float16", "bfloat16"):
        return torch.autocast("cuda" if device.startswith("cuda") else "cpu", DTYPES[dtype])
    return contextlib.nullcontext()


def _output(model: nn.Module, example: Any) -> Tensor:
    arguments, keywords = survey.call_arguments(example)
    with torch.no_grad():
        return _tensors(model(*arguments, **keywords))[0].double()


def _times(model: nn.Module, example: Any, backward: bool, clock: Timer) -> dict[str, float]:
    arguments, keywords = survey.call_arguments(example)

    def forward() -> Any:
        with torch.no_grad():
            return model(*arguments, **keywords)

    times = {"forward": clock(forward)}
    if backward:
        times["training"] = clock(_step(model, arguments, keywords))
    return times


def _step(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Callable[[], Any]:
    """Returns a call that runs the forward pass and the gradients of all trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> Any:
        outputs = [y for y in _tensors(model(*arguments, **keywords)) if y.requires_grad]
        return torch.autograd.grad([y.sum() for y in outputs], parameters, allow_unused=True)

    return step


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
