"""A small model that tests pack in one process and run in another."""

from __future__ import annotations

import torch
from torch import nn

import tconv3d

SHAPES = ((1, 4, 2, 3, 4), (2, 4, 2, 2, 2))  # shapes of the inputs


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.ConvTranspose3d(4, 4, 2, stride=2), nn.ReLU(), nn.GroupNorm(2, 4), nn.ConvTranspose3d(4, 2, 1)
    return tconv3d.accelerate(nn.Sequential(*layers))
