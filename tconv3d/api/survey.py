"""Finds the transposed convolutions of a model, their places in it, and the shapes of their inputs.

This module reads models and never changes them. It knows nothing of kernels, plans or speed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils import _pytree

Shape = tuple[int, ...]


def transposed_convolutions(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Returns every transposed 3D convolution with all its names in the model (several if the layer is shared)."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_transposed_convolution(module):
            found.setdefault(module, []).append(name)
    return {module: tuple(names) for module, names in found.items()}


def is_transposed_convolution(module: nn.Module) -> bool:
    """Tells whether a module is a ConvTranspose3d, including quantized layers and layers compiled by TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(getattr(module, "original_name", "")) == "ConvTranspose3d"
    kind = type(module)
    quantized = kind.__name__ == "ConvTranspose3d" and kind.__module__.startswith("torch.ao.")
    return quantized or isinstance(module, nn.ConvTranspose3d)


def input_shapes(model: nn.Module, example_input: Any) -> dict[nn.Module, tuple[Shape, ...]]:
    """Returns the input shapes that each transposed convolution gets when the model is called with `example_input`.

    `example_input` is a tensor, a tuple of arguments or a mapping of keyword arguments. The call runs on a copy of
    the model with fake tensors: nothing is computed, no statistic of the model is updated, no random number is drawn.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        with FakeCopyMode(mode):
            # The model is copied, because a call may store tensors in its buffers and attributes.
            fake = copy.deepcopy(model)
        seen = _listen(fake)
        arguments, keywords = call_arguments(_pytree.tree_map_only(Tensor, mode.from_tensor, example_input))
        fake(*arguments, **keywords)
    layers = zip(transposed_convolutions(model), transposed_convolutions(fake), strict=True)
    return {layer: tuple(seen[twin]) for layer, twin in layers if twin in seen}


def _listen(model: nn.Module) -> dict[nn.Module, list[Shape]]:
    """Returns a dictionary that hooks fill, when the model runs, with each transposed convolution's input shapes."""
    seen: dict[nn.Module, list[Shape]] = {}

    def remember(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        shape = tuple(arguments[0].shape)
        if shape not in seen.setdefault(module, []):
            seen[module].append(shape)

    for module in transposed_convolutions(model):
        module.register_forward_pre_hook(remember)
    return seen


def call_arguments(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments, given a tensor, a tuple of arguments or a mapping of keywords."""
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    if isinstance(example_input, (tuple, list)):
        return tuple(example_input), {}
    return (example_input,), {}
