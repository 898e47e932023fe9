"""Finds the transposed convolutions of a model, their places in it, and the shapes of their inputs.

This module reads models and never changes them. It knows nothing of kernels, plans or speed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.utils import parametrize
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


def weight_of(layer: nn.ConvTranspose3d) -> Tensor:
    """Returns the weight of a layer, or a tensor like it if a parametrization computes the weight.

    Computing it may change the layer: `spectral_norm` updates its buffers whenever the weight is read in training.
    """
    if not parametrize.is_parametrized(layer, "weight"):
        return layer.weight
    computed_from: Any = layer.parametrizations["weight"]  # type: ignore[index]
    stored: Tensor = computed_from.original if computed_from.is_tensor else computed_from.original0
    return stored.new_empty((layer.in_channels, layer.out_channels // layer.groups, *layer.kernel_size))


def input_shapes(model: nn.Module, example_input: Any) -> dict[nn.Module, tuple[Shape, ...]]:
    """Returns the input shapes that each transposed convolution gets when the model is called with `example_input`.

    `example_input` is a tensor, a tuple of arguments or a mapping of keyword arguments. The call runs on a copy of
    the model with fake tensors: nothing is computed, no statistic of the model is updated, no random number is drawn.
    """
    found = calls(model, example_input, is_transposed_convolution)
    return {layer: tuple(dict.fromkeys(call.shape for call in those)) for layer, those in found.items()}


class LayerCall(NamedTuple):
    """Describes the input of one call of a layer, and the output size that the call asked for."""

    shape: Shape
    strides: Shape
    dtype: torch.dtype
    output_size: tuple[int, ...] | None


def calls(
    model: nn.Module, example_input: Any, wanted: Callable[[nn.Module], bool]
) -> dict[nn.Module, tuple[LayerCall, ...]]:
    """Returns the different calls that each wanted layer gets when the model is called, as `input_shapes` does."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        with FakeCopyMode(mode):
            # The model is copied, because a call may store tensors in its buffers and attributes.
            fake = copy.deepcopy(model)
        layers = zip(_unique(model, wanted), _unique(fake, wanted), strict=True)
        seen = {layer: _listen(twin) for layer, twin in layers}
        arguments, keywords = call_arguments(_pytree.tree_map_only(Tensor, mode.from_tensor, example_input))
        fake(*arguments, **keywords)
    return {layer: tuple(found) for layer, found in seen.items() if found}


def _unique(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    return [module for module in model.modules() if wanted(module)]


def _listen(layer: nn.Module) -> dict[LayerCall, None]:
    """Returns a dictionary whose keys a hook adds when the layer is called: one for each different call."""
    seen: dict[LayerCall, None] = {}

    def remember(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x, *rest = arguments or (keywords["input"],)
        size = keywords.get("output_size") or (rest[0] if rest else None)
        seen[LayerCall(tuple(x.shape), tuple(x.stride()), x.dtype, None if size is None else tuple(size))] = None

    layer.register_forward_pre_hook(remember, with_kwargs=True)
    return seen


def call_arguments(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments, given a tensor, a tuple of arguments or a mapping of keywords."""
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    if isinstance(example_input, (tuple, list)):
        return tuple(example_input), {}
    return (example_input,), {}
