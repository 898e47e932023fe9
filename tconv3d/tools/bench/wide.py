"""Draws layers from nearly everything that `nn.ConvTranspose3d` takes, each with a type and a layout.

`layers.random_layers` draws layers like those of decoders. The layers here are those that nobody tuned for: odd
numbers of channels, odd edges, any legal padding, dilation together with strides, groups up to depthwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from math import prod

from .layers import Layer, Triple
from .precision import DTYPES

Kind = tuple[str, str]  # precision and layout

MOST_BYTES = 2**31  # bytes of the input, and of the output
# Numbers of multiplications that are worth a measurement and do not take PyTorch's slowest kernels minutes.
LEAST_MULTIPLICATIONS, MOST_MULTIPLICATIONS = 1e7, 6e11


def wide_layers(
    count: int, seed: int, precisions: Sequence[str], layouts: Sequence[str]
) -> dict[str, tuple[Layer, Kind]]:
    """Returns layers with the kind that each is measured in; a seed always gives equal layers."""
    draw = random.Random(seed)
    found: dict[str, tuple[Layer, Kind]] = {}
    while len(found) < count:
        kind = draw.choice(list(precisions)), draw.choice(list(layouts))
        candidate = _wide_layer(draw)
        if _worth_measuring(candidate, kind[0]):
            found[f"wide_{seed}_{len(found)}"] = candidate, kind
    return found


def _worth_measuring(layer: Layer, precision: str) -> bool:
    if min(layer.output_shape) <= 0:
        return False
    elements = max(prod(layer.input_shape), prod(layer.output_shape))
    if elements * DTYPES[precision].itemsize > MOST_BYTES:
        return False
    return LEAST_MULTIPLICATIONS <= layer.multiplications <= MOST_MULTIPLICATIONS


def _wide_layer(draw: random.Random) -> Layer:
    kernel, stride, dilation = _three(draw, 1, 7), _three(draw, 1, 4), _three(draw, 1, 3)
    if draw.random() < 0.6:  # dilation is rarer than strides
        dilation = (1, 1, 1)
    reaches = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    steps = [max(s, d) for s, d in zip(stride, dilation, strict=True)]
    padding = tuple(draw.choice((0, reach // 2, draw.randint(0, reach))) for reach in reaches)
    output_padding = tuple(draw.choice((0, draw.randrange(step))) for step in steps)
    in_channels, out_channels, groups = _channels(draw)
    size = _log(draw, 2, 160), _log(draw, 2, 160), _log(draw, 2, 160)
    if draw.random() < 0.5:
        size = (size[2], size[2], size[2])
    return Layer(
        _log(draw, 1, 128),
        in_channels,
        out_channels,
        size,
        kernel,
        stride,
        padding,  # type: ignore[arg-type]
        output_padding,  # type: ignore[arg-type]
        dilation,
        groups,
        bias=draw.random() < 0.7,
    )


def _channels(draw: random.Random) -> tuple[int, int, int]:
    """Returns input channels, output channels and groups."""
    groups = draw.choice((1, 1, 1, 1, 2, 3, 4, 8, 16, 32, 0))
    if groups == 0:  # depthwise, with one or two outputs for each input
        channels = _log(draw, 2, 640)
        return channels, channels * draw.choice((1, 1, 2)), channels
    first, second = (groups * _log(draw, 1, 640 // groups) for _ in range(2))
    return first, second, groups


def _three(draw: random.Random, least: int, most: int) -> Triple:
    one = draw.randint(least, most)
    if draw.random() < 0.6:
        return one, one, one
    return draw.randint(least, most), draw.randint(least, most), one


def _log(draw: random.Random, least: int, most: int) -> int:
    """Draws an integer, small ones more often: each doubling is equally likely."""
    return min(most, int(math.exp(draw.uniform(math.log(least), math.log(most + 1)))))
