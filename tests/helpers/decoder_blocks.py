"""Blocks of decoders as people write them, for tests of forwards with fused chains."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCALE = 1.5
X = torch.randn(2, 2, 2, 3, 2, generator=torch.Generator().manual_seed(1))
SKIP = torch.randn(2, 4, 4, 6, 4, generator=torch.Generator().manual_seed(2))


def helper(y: Tensor) -> Tensor:
    return y * SCALE


class Block(nn.Module):
    """A block of a decoder as people write it."""

    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(2, 4, 2, stride=2)
        self.norm = nn.BatchNorm3d(4)
        self.act = nn.LeakyReLU(0.1, inplace=True)
        self.drop = nn.Dropout(0.5)
        self.more = nn.ModuleList([nn.Tanh(), nn.Sigmoid()])
        self.scale = nn.Parameter(torch.randn(4, 1, 1, 1))
        self.bias: nn.Parameter | None = nn.Parameter(torch.randn(4, 1, 1, 1))
        self.flag = True
        self.number = 3
        self.numbers = [1, 2]

    @property
    def doubled(self) -> int:
        return self.number * 2

    def finished(self, y: Tensor) -> Tensor:
        return helper(y) + self.doubled

    def forward(self, x: Tensor, skip: Tensor | None = None, power: float = 1) -> Tensor:
        y = self.act(self.norm(self.up(x))) * self.scale
        if skip is not None:
            y = y + skip
        if self.bias is not None:
            y = y + self.bias
        if self.flag:
            y = self.finished(y)
        for each in self.more:
            y = each(y)
        if self.training:
            y = y * 3
        return y * self.gain * sum(self.numbers) * power / 1


def block(kind: type[nn.Module] = Block, *arguments: Any) -> Any:
    torch.manual_seed(0)
    return kind(*arguments)


class Small(nn.Module):
    """A chain with norm, activation, captured and passed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(16, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm3d(8)
        self.scale = nn.Parameter(torch.randn(8, 1, 1, 1))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.up(x)) * self.scale + skip, 0.2)
