"""Prepares a layer for measuring or checking: PyTorch's module, ours with equal parameters, and an input."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tconv3d

from .layers import Layer
from .precision import DTYPES, LAYOUTS, in_layout


@dataclass(frozen=True)
class Case:
    """Holds the modules and the input of one layer in one precision and layout, on a device."""

    layer: Layer
    precision: str
    layout: str
    theirs: nn.Module
    ours: nn.Module
    x: Tensor

    @property
    def convolution(self) -> nn.ConvTranspose3d:
        (found,) = (module for module in self.ours.modules() if isinstance(module, nn.ConvTranspose3d))
        return found


def build(layer: Layer, precision: str, layout: str, device: str) -> Case:
    """Makes a case with new random parameters and input, in the given layout."""
    dtype = DTYPES[precision]
    theirs = in_layout(layer.module(dtype, device), layout)
    with torch.no_grad():
        for module in theirs.modules():
            if isinstance(module, nn.GroupNorm):  # the default affine map, an identity, would hide errors
                module.weight.normal_()
                module.bias.normal_()
    x = layer.input(dtype, device).contiguous(memory_format=LAYOUTS[layout])
    return Case(layer, precision, layout, theirs, tconv3d.accelerate(copy.deepcopy(theirs)), x)


def leaves(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the input with `requires_grad`, and all tensors whose gradients the backward pass computes."""
    x = x.detach().requires_grad_()
    return x, [x, *model.parameters()]
