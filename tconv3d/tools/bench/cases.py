"""Prepares a layer, alone or with a tail, for measuring: PyTorch's module, ours with equal parameters, inputs."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import tconv3d

from . import tails
from .layers import Layer
from .precision import DTYPES, LAYOUTS, in_layout
from .tails import TAILS, Tail

WAYS = ("accelerate", "fuse", "compile")  # what makes our model of PyTorch's: `compile` compiles the accelerated one


@dataclass(frozen=True)
class Case:
    """Holds the modules and the input of one layer in one precision and layout, on a device."""

    layer: Layer
    precision: str
    layout: str
    theirs: nn.Module
    ours: nn.Module
    x: Tensor
    extra: tuple[Tensor, ...] = ()  # further arguments of the modules
    tail: Tail | None = None  # what follows the convolution, if the case is one of `bench --tails`

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.x, *self.extra

    @property
    def output_shape(self) -> torch.Size:
        """Returns the shape of the modules' result, which no kernel computes."""
        if self.tail is None:
            return torch.Size(self.layer.output_shape)
        model = tails.model_of(self.tail, self.layer, device="meta")
        with torch.no_grad():
            return model(*(each.to("meta", torch.float32) for each in self.inputs)).shape

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


def build_with_tail(layer: Layer, name: str, precision: str, layout: str, device: str, way: str) -> Case:
    """Makes a case of a layer's convolution and a tail; `way` is one of `WAYS`."""
    tail, dtype = TAILS[name], DTYPES[precision]
    layer = replace(layer, norm_groups=0)
    theirs = tails.model_of(tail, layer, dtype, device)
    in_layout(theirs, layout)
    shapes = [layer.input_shape, *([layer.output_shape] if tail.residual else [])]
    x, *extra = (
        torch.randn(shape, device=device).to(dtype).contiguous(memory_format=LAYOUTS[layout]) for shape in shapes
    )
    return Case(layer, precision, layout, theirs, _ours(copy.deepcopy(theirs), way), x, tuple(extra), tail)


def _ours(model: tails.Model, way: str) -> nn.Module:
    if way == "fuse":
        return tconv3d.fuse(model.conv, tails.alone(model))
    accelerated = tconv3d.accelerate(model)
    return compiled(accelerated) if way == "compile" else accelerated


def compiled(model: nn.Module) -> Any:
    """Returns a model compiled by `torch.compile`, which forgets the models that it has compiled before."""
    torch.compiler.reset()  # torch.compile stops compiling a function after several recompilations
    return torch.compile(model)


def plain(case: Case) -> Case:
    """Returns the case of our convolution alone, with the convolution's weight and input."""
    theirs = next(module for module in case.theirs.modules() if isinstance(module, nn.ConvTranspose3d))
    ours = tconv3d.accelerate(copy.deepcopy(theirs))
    return Case(case.layer, case.precision, case.layout, theirs, ours, case.x)


def leaves(model: nn.Module, *inputs: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Returns the inputs with `requires_grad`, and all tensors whose gradients the backward pass computes."""
    given = tuple(each.detach().requires_grad_() for each in inputs)
    return given, [*given, *model.parameters()]
