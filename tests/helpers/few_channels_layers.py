"""Lists layers with few output channels; `swapped` makes layers with few input channels of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from layers import Layer

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
# All layers have at most four output channels.
LAYERS = {
    "gan": Layer(64, 1, (4, 5, 18), (4, 4, 4), T2, T1),
    "monai": Layer(32, 2, (4, 9, 5), T3, T2, T1, T1),
    "stride one": Layer(12, 1, (3, 4, 5), T3, bias=False),
    "many tiles": Layer(8, 1, (9, 20, 19), (2, 3, 3), T2, (0, 1, 1), batch=1),
    "groups, stride beyond kernel": Layer(16, 2, (3, 4, 5), (2, 2, 3), (3, 2, 1), (1, 0, 0), (1, 1, 0), (1, 1, 2), 2),
    "odd channels": Layer(17, 3, (3, 4, 5), (2, 2, 3), (1, 2, 2), T1),
    "empty phases": Layer(8, 2, (3, 4, 5), T3, T2, (3, 2, 2), T1, T2),
    "several passes": Layer(150, 2, (2, 3, 4), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "three phases along w": Layer(9, 4, (2, 3, 7), (2, 2, 5), (1, 1, 3), (0, 0, 2), (0, 0, 1)),
    "padding beyond the kernel": Layer(8, 1, (7, 7, 7), T2, T1, T3),
}


def swapped(layer: Layer) -> Layer:
    return replace(layer, in_channels=layer.out_channels, out_channels=layer.in_channels)
