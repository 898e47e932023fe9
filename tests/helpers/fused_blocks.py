"""Lists blocks of a transposed convolution, a ReLU and a GroupNorm, and makes PyTorch's layers for comparison."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from layers import Layer, to_tf32
from torch import Tensor, nn

import tconv3d

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}
T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
# Largest relative error of a whole tensor: its own rounding, and in gradients the rounding of the gradient before it.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Block:
    """Describes a layer, and the GroupNorm after its ReLU."""

    layer: Layer
    norm_groups: int
    affine: bool = True
    dtype: torch.dtype = torch.float32
    tf32: bool = False
    kernel: str = "direct"  # name of the forward pass's kernel
    settings: dict[str, Any] = field(default_factory=dict)

    def module(self, device: str, dtype: torch.dtype | None = None) -> tconv3d.ConvTranspose3dReLUGroupNorm:
        l, kind = self.layer, self.dtype if dtype is None else dtype  # noqa: E741
        torch.manual_seed(2)
        block = tconv3d.ConvTranspose3dReLUGroupNorm(
            l.in_channels, l.out_channels, l.kernel, self.norm_groups, l.stride, l.padding, l.output_padding,
            l.groups, l.bias, l.dilation, affine=self.affine, **self.settings,
        )  # fmt: skip
        with torch.no_grad():
            for parameter in block.group_norm.parameters():
                parameter.normal_()
            block.conv_transpose.weight.copy_(to_tf32(block.conv_transpose.weight))
        return block.to(device, kind)

    def input(self, device: str, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        x = torch.randn(self.layer.batch, self.layer.in_channels, *self.layer.size)
        return to_tf32(x).to(device, self.dtype).contiguous(memory_format=memory_format)


BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
BLOCKS = {
    "plain": Block(Layer(4, 6, (3, 4, 5), T3), 2),
    "one group": Block(Layer(4, 6, (2, 3, 5), T3, T2, T1), 1),
    "one channel per group": Block(Layer(3, 5, (2, 3, 5), T2, T2), 5),
    "not affine": Block(Layer(4, 8, (3, 4, 5), T3), 4, affine=False),
    "no bias": Block(Layer(4, 6, (3, 2, 5), T3, bias=False), 3),
    "depthwise": Block(Layer(6, 6, (3, 3, 4), (4, 4, 4), T2, T1, groups=6), 2, kernel="depthwise"),
    "groups across the convolution's": Block(Layer(8, 12, (2, 3, 4), T3, T2, T1, groups=4), 2),
    "empty phases": Block(Layer(2, 4, (3, 3, 3), T3, T2, (0, 1, 2), T1, T2), 2),
    "float64": Block(Layer(3, 6, (3, 4, 5), T3, T2, T1), 3, dtype=F64),
    "long channels": Block(Layer(1, 2, (1, 40, 80), T1), 2),
    "many channels": Block(Layer(2, 1032, (1, 2, 2), T1), 4),
    "batch of many": Block(Layer(2, 4, (1, 1, 2), T2, batch=11), 4),
    "tensor cores": Block(Layer(16, 32, (3, 4, 5), T3), 4, tf32=True, kernel="halo"),
    "tensor cores, march": Block(Layer(32, 16, (4, 8, 9), T3, T2, T1), 16, dtype=BF16, kernel="halo"),
    "tensor cores, one group": Block(Layer(16, 24, (3, 4, 5), T2, T2), 1, dtype=F16, kernel="halo"),
    "tensor cores, 12 channels": Block(Layer(16, 36, (3, 4, 5), T3, groups=1), 3, tf32=True, kernel="halo"),
    "tensor cores, groups": Block(Layer(32, 32, (3, 4, 5), T3, T2, T1, groups=2), 8, dtype=BF16, kernel="halo"),
    "tensor cores, batch in a tile": Block(
        Layer(32, 16, (2, 2, 2), T3, T2, T1, batch=9), 4, dtype=BF16, kernel="halo"
    ),
    "few inputs": Block(Layer(2, 16, (3, 4, 5), T3, T2, T1), 4, tf32=True, kernel="few_inputs"),
    "few outputs": Block(Layer(16, 2, (3, 4, 5), T3), 1, tf32=True, kernel="few_outputs"),
}


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allows or forbids TF32, then forbids it, as the fixture `ours` does before the test."""
    torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"  # type: ignore[attr-defined]
    yield
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def three_layers(block: tconv3d.ConvTranspose3dReLUGroupNorm) -> nn.Sequential:
    """Returns PyTorch's layers with the block's parameters, in float64."""
    convolution = nn.ConvTranspose3d.__new__(nn.ConvTranspose3d)
    convolution.__dict__ = copy.deepcopy(block.conv_transpose).__dict__
    return nn.Sequential(convolution, nn.ReLU(), copy.deepcopy(block.group_norm)).double()


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]


def run(module: nn.Module, x: Tensor, grad: Tensor | None = None) -> list[Tensor]:
    """Returns the result, and the gradients of the input and of all parameters."""
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    grad = torch.ones_like(y) if grad is None else grad.to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], grad)]
