"""Defines the layers of the benchmark: reference tasks, decoder layers of published networks, random layers.

This module knows the shapes of a layer and how to build PyTorch's module for it; it knows nothing about timing.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

Triple = tuple[int, int, int]

# Largest number of multiplications in one pass of a reduced layer; the emulator takes some seconds for them.
REDUCED_MULTIPLICATIONS = 5e6
REDUCED_SIZE = (2, 3, 5)


@dataclass(frozen=True)
class Layer:
    """Describes a transposed convolution, the size of its input, and an optional ReLU and GroupNorm after it."""

    batch: int
    in_channels: int
    out_channels: int
    size: Triple
    kernel: Triple
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    output_padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    bias: bool = True
    norm_groups: int = 0  # groups of the GroupNorm after ReLU; 0 means that no operator follows the convolution

    @property
    def follow(self) -> str:
        """Names the operators after the convolution."""
        return "relu_group_norm" if self.norm_groups else ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `nn.ConvTranspose3d` by name, in their order."""
        return {
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "kernel_size": self.kernel,
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": self.output_padding,
            "groups": self.groups,
            "bias": self.bias,
            "dilation": self.dilation,
        }

    @property
    def settings(self) -> tuple[Triple, Triple, Triple, int, Triple]:
        """Returns the settings in the order of the arguments of `conv_transpose3d` after the tensors."""
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *self.size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        axes = zip(self.size, self.kernel, self.stride, self.padding, self.output_padding, self.dilation, strict=True)
        size = (d * (k - 1) + 1 + s * (i - 1) - 2 * p + o for i, k, s, p, o, d in axes)
        return (self.batch, self.out_channels, *size)

    @property
    def multiplications(self) -> int:
        return prod(self.input_shape) * self.out_channels // self.groups * prod(self.kernel)

    def module(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
        """Builds PyTorch's convolution, or its `nn.Sequential` with ReLU and GroupNorm."""
        convolution = nn.ConvTranspose3d(**self.arguments, device=device, dtype=dtype)
        if not self.norm_groups:
            return convolution
        norm = nn.GroupNorm(self.norm_groups, self.out_channels, device=device, dtype=dtype)
        return nn.Sequential(convolution, nn.ReLU(), norm)

    def input(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return torch.randn(self.input_shape, device=device).to(dtype)

    def reduced(self) -> Layer:
        """Returns the layer on a volume small enough for the emulator, with all channels, so kernels are equal."""
        small = _triple([min(pair) for pair in zip(self.size, REDUCED_SIZE, strict=True)])
        layer = replace(self, batch=min(self.batch, 2), size=small)
        while layer.multiplications > REDUCED_MULTIPLICATIONS and prod(layer.size) * layer.batch > 4:
            largest = max(layer.size)
            axis = layer.size.index(largest)
            size = _triple([n - (i == axis) for i, n in enumerate(layer.size)])
            layer = replace(layer, batch=1) if layer.batch > 1 else replace(layer, size=size)
        # A padding that crops the whole output needs a larger input.
        while min(layer.output_shape) <= 0:
            layer = replace(layer, size=_triple([n + 1 for n in layer.size]))
        return layer

    def __str__(self) -> str:
        """Describes the layer in few words: settings with PyTorch's default value are left out."""

        def three(values: Sequence[int]) -> str:
            return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))

        text = f"{self.in_channels} to {self.out_channels} on {self.batch}x{'x'.join(map(str, self.size))}"
        text += f", kernel {three(self.kernel)}"
        for name, usual in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1)):
            if set(getattr(self, name)) != {usual}:
                text += f", {name.replace('_', ' ')} {three(getattr(self, name))}"
        text += f", groups {self.groups}" if self.groups > 1 else ""
        return text + (f", ReLU, GroupNorm {self.norm_groups}" if self.norm_groups else "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def layer(
    batch: int,
    in_channels: int,
    out_channels: int,
    size: int | Triple,
    kernel: int | Triple,
    stride: int | Triple = 1,
    padding: int | Triple = 0,
    output_padding: int | Triple = 0,
    **more: Any,
) -> Layer:
    """Makes a layer; an integer in place of a triple is used for all three dimensions."""
    if "dilation" in more:
        more["dilation"] = _triple(more["dilation"])
    return Layer(
        batch,
        in_channels,
        out_channels,
        _triple(size),
        _triple(kernel),
        _triple(stride),
        _triple(padding),
        _triple(output_padding),
        **more,
    )


def _triple(value: int | Sequence[int]) -> Triple:
    d, h, w = (value,) * 3 if isinstance(value, int) else value
    return d, h, w


LAYERS = {
    # These are the reference tasks, without bias as in their constructors, and two layers that differ in one setting.
    "grouped_strided": layer(4, 32, 32, (32, 64, 128), 3, 2, 1, groups=4, bias=False),
    "grouped_strided_g1": layer(4, 32, 32, (32, 64, 128), 3, 2, 1, bias=False),
    "large_volume": layer(8, 48, 24, 96, 3, bias=False),
    "asymmetric_kernel": layer(16, 32, 64, 64, (3, 5, 5), bias=False),
    "relu_group_norm": layer(16, 64, 128, 32, 3, bias=False, norm_groups=8),
    "relu_group_norm_conv": layer(16, 64, 128, 32, 3, bias=False),
    # These are decoder layers of nnU-Net, MONAI's UNet, 3D-GAN and VideoGPT, and a depthwise layer as in MedNeXt.
    "nnunet_64_32_64": layer(2, 64, 32, 64, 2, 2),
    "nnunet_128_64_32": layer(2, 128, 64, 32, 2, 2),
    "nnunet_256_128_16": layer(2, 256, 128, 16, 2, 2),
    "nnunet_320_256_8": layer(2, 320, 256, 8, 2, 2),
    "nnunet_320_320_4": layer(2, 320, 320, 4, 2, 2),
    "monai_32_2_64": layer(4, 32, 2, 64, 3, 2, 1, 1),
    "monai_64_16_32": layer(4, 64, 16, 32, 3, 2, 1, 1),
    "monai_128_32_16": layer(4, 128, 32, 16, 3, 2, 1, 1),
    "monai_384_64_8": layer(4, 384, 64, 8, 3, 2, 1, 1),
    "gan_64_1_32": layer(32, 64, 1, 32, 4, 2, 1),
    "gan_128_64_16": layer(32, 128, 64, 16, 4, 2, 1),
    "gan_256_128_8": layer(32, 256, 128, 8, 4, 2, 1),
    "gan_512_256_4": layer(32, 512, 256, 4, 4, 2, 1),
    "videogpt_240_240": layer(2, 240, 240, (4, 32, 32), 4, 2, 1),
    "depthwise_64": layer(4, 64, 64, 32, 4, 2, 1, groups=64),
}

# One layer for each class of layers that networks have and the reference tasks do not.
CLASSES = {
    "odd_rows": layer(8, 64, 96, (20, 40, 40), 3, 2, 1),
    "few_inputs_odd": layer(64, 4, 24, (16, 32, 32), 3, 2, 1),
    "large_kernel": layer(8, 32, 48, 24, 5, 2, 2),
    "dilated_strided": layer(8, 48, 64, (16, 32, 32), 3, 2, 1, dilation=2),
    "depthwise_5": layer(2, 96, 96, 48, 5, 2, 2, 1, groups=96),
    "depthwise_7": layer(2, 96, 96, 48, 7, 2, 3, 1, groups=96),
    "groups_of_8": layer(8, 64, 64, (12, 24, 40), (3, 5, 7), 2, groups=8),
    "wide_small": layer(2, 320, 320, 10, 3, 2, 1, 1),
    "odd_everything": layer(3, 37, 53, (19, 23, 29), (4, 3, 2), (1, 2, 2)),
}


def named(names: Sequence[str]) -> dict[str, Layer]:
    """Returns the layers with the given names."""
    known = {**LAYERS, **CLASSES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no layer is called {', '.join(map(repr, unknown))}: expected some of {', '.join(known)}")
    return {name: known[name] for name in names}


# ---- random layers


# Combinations of kernel, stride, padding, output padding and dilation that networks use, each with its draw weight.
_SETTINGS: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, {"kernel": 2, "stride": 2}),
    (3, {"kernel": 3, "stride": 2, "padding": 1, "output_padding": 1}),
    (3, {"kernel": 4, "stride": 2, "padding": 1}),
    (2, {"kernel": 3, "padding": 1}),
    (1, {"kernel": 3}),
    (1, {"kernel": 3, "stride": 2, "padding": 1}),
    (1, {"kernel": (1, 2, 2), "stride": (1, 2, 2)}),
    (1, {"kernel": (3, 4, 4), "stride": (1, 2, 2), "padding": 1}),
    (1, {"kernel": 5, "stride": 2, "padding": 2, "output_padding": 1}),
    (1, {"kernel": (1, 5, 5), "padding": (0, 2, 2)}),
    (1, {"kernel": 4, "stride": 4}),
    (1, {"kernel": 3, "stride": 3}),
    (1, {"kernel": (3, 5, 5), "stride": (2, 3, 3), "padding": 1}),
    (1, {"kernel": 3, "padding": 2, "dilation": 2}),
    (1, {"kernel": 1}),
)
_CHANNELS = (8, 12, 16, 20, 24, 30, 32, 40, 48, 64, 72, 80, 96, 100, 128, 160, 192, 240, 256, 320, 384, 512)
_MOST_ELEMENTS = 2**28
_LEAST_MULTIPLICATIONS, _MOST_MULTIPLICATIONS = 1e8, 6e11


def random_layers(count: int, seed: int) -> dict[str, Layer]:
    """Draws layers like those of decoders, large enough to be worth measuring; a seed always gives equal layers."""
    draw = random.Random(seed)
    found: dict[str, Layer] = {}
    while len(found) < count:
        candidate = _random_layer(draw)
        elements = max(prod(candidate.input_shape), prod(candidate.output_shape))
        worth = _LEAST_MULTIPLICATIONS <= candidate.multiplications <= _MOST_MULTIPLICATIONS
        if worth and elements <= _MOST_ELEMENTS and min(candidate.output_shape) > 0:
            found[f"random_{seed}_{len(found)}"] = candidate
    return found


def _random_layer(draw: random.Random) -> Layer:
    weights, settings = zip(*_SETTINGS, strict=True)
    (setting,) = draw.choices(settings, weights)
    in_channels = draw.choice(_CHANNELS)
    # Most decoder layers halve the channels, and the last layer of a decoder has few output channels.
    kind = draw.choices(("half", "any", "few", "grouped", "depthwise"), (8, 4, 2, 2, 1))[0]
    groups = 1
    if kind == "half":
        out_channels = max(1, in_channels // 2)
    elif kind == "any":
        out_channels = draw.choice(_CHANNELS)
    elif kind == "few":
        out_channels = draw.randint(1, 4)
    else:
        divisors = [n for n in (2, 4, 8) if in_channels % n == 0]
        groups = in_channels if kind == "depthwise" else draw.choice(divisors)
        out_channels = in_channels
    width = draw.choice((4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96))
    depth = draw.choice((width, width, width, max(2, width // 2), max(2, width // 4)))
    return layer(
        draw.choice((1, 1, 2, 2, 4, 8)),
        in_channels,
        out_channels,
        (depth, width, width),
        groups=groups,
        bias=draw.random() < 0.7,
        **setting,
    )


# ---- a layer in words


def parse(text: str) -> Layer:
    """Parses a layer written like PyTorch's constructor or repr, with the arguments `size` and optionally `batch`.

    >>> parse("64, 32, kernel_size=2, stride=2, size=64, batch=2")
    >>> parse("ConvTranspose3d(64, 32, kernel_size=(2, 2, 2), stride=(2, 2, 2), size=(48, 64, 64))")
    """
    text = text.strip()
    inner = text.removeprefix("nn.").removeprefix("ConvTranspose3d").strip()
    source = f"f{inner}" if inner.startswith("(") and inner.endswith(")") else f"f({inner})"
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("not a list of arguments")
        arguments = [ast.literal_eval(argument) for argument in call.args]
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return _from_arguments(*arguments, **keywords)
    except (SyntaxError, TypeError, ValueError, RuntimeError) as error:
        what = str(error).removeprefix("_from_arguments() ")
        raise ValueError(
            f'expected a layer like "64, 32, kernel_size=2, stride=2, size=64, batch=2", got {text!r}: {what}'
        ) from None


def _from_arguments(
    in_channels: int,
    out_channels: int,
    kernel_size: int | Triple,
    stride: int | Triple = 1,
    padding: int | Triple = 0,
    output_padding: int | Triple = 0,
    groups: int = 1,
    bias: bool = True,
    dilation: int | Triple = 1,
    *,
    size: int | Triple,
    batch: int = 1,
    norm_groups: int = 0,
) -> Layer:
    settings = (stride, padding, output_padding)
    given = {"in_channels": in_channels, "out_channels": out_channels, "kernel_size": kernel_size, "stride": stride}
    given |= {"dilation": dilation, "groups": groups, "size": size, "batch": batch}
    for name, value in given.items():
        _check_least(name, value, 1)
    for name, value in (("padding", padding), ("output_padding", output_padding), ("norm_groups", norm_groups)):
        _check_least(name, value, 0)
    found = layer(
        batch,
        in_channels,
        out_channels,
        size,
        kernel_size,
        *settings,
        dilation=dilation,
        groups=groups,
        bias=bias,
        norm_groups=norm_groups,
    )
    with torch.device("meta"):
        found.module(device="meta")(found.input(device="meta"))  # PyTorch raises an error for invalid settings
    return found


def _check_least(name: str, value: int | Sequence[int], least: int) -> None:
    """Raises ValueError unless the value is one or several integers that are all at least `least`."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    if not all(type(each) is int and each >= least for each in values):
        raise ValueError(f"expected {name} to be at least {least}, got {name}={value!r}")
