"""Makes the planner's problems of a benchmark layer, as a training step of the layer has them, without any data."""

from __future__ import annotations

import torch

from ...api.explain import call_of, problems_of
from ...planning.problem import Problem
from .layers import Layer
from .precision import DTYPES, LAYOUTS, in_layout, precision


def problems_of_layer(layer: Layer, dtype: str, layout: str) -> list[Problem]:
    """Returns the problems of a training step of a layer's convolution."""
    module = in_layout(layer.module(DTYPES[dtype], "meta"), layout)
    (convolution,) = (each for each in module.modules() if isinstance(each, torch.nn.ConvTranspose3d))
    x = layer.input(DTYPES[dtype], "meta").contiguous(memory_format=LAYOUTS[layout])
    with precision(dtype):
        return problems_of(*call_of(convolution, x))
