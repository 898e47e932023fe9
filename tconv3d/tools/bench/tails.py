"""Defines the tails of the benchmark: models that run a transposed convolution and what follows it in networks.

Every model is written as people write them: its `forward` calls the convolution and then PyTorch's functions and
modules. This module knows layers and models; it knows nothing about fusing and timing.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import LAYERS, Layer, layer, random_layers

NORM_GROUPS = 8  # groups of a GroupNorm; fewer if they do not divide the channels


class Model(nn.Module):
    """Holds the convolution, which is the first module of every model, so that its parameters come first."""

    def __init__(self, conv: nn.ConvTranspose3d) -> None:
        super().__init__()
        self.conv = conv


class Pointwise(Model):
    """Scales and shifts every channel, and applies SiLU and a clamp."""

    def __init__(self, conv: nn.ConvTranspose3d) -> None:
        super().__init__(conv)
        self.scale = nn.Parameter(torch.ones(conv.out_channels, 1, 1, 1))
        self.shift = nn.Parameter(torch.zeros(conv.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) * self.scale + self.shift
        return torch.clamp(F.silu(y), -1.0, 2.0)


class Residual(Model):
    """Adds a tensor of the result's shape, and applies an activation."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.leaky_relu(self.conv(x) + skip, 0.1)


class BatchNormLeakyReLU(Model):
    """Applies BatchNorm and LeakyReLU."""

    def __init__(self, conv: nn.ConvTranspose3d) -> None:
        super().__init__(conv)
        self.norm = nn.BatchNorm3d(conv.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.conv(x)), 0.2)


class BatchNormReLU(Model):
    """Applies BatchNorm and ReLU."""

    def __init__(self, conv: nn.ConvTranspose3d) -> None:
        super().__init__(conv)
        self.norm = nn.BatchNorm3d(conv.out_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)))


class InstanceNormLeakyReLU(Model):
    """Applies InstanceNorm with an affine map and LeakyReLU, as nnU-Net does."""

    def __init__(self, conv: nn.ConvTranspose3d) -> None:
        super().__init__(conv)
        self.norm = nn.InstanceNorm3d(conv.out_channels, affine=True)
        self.activation = nn.LeakyReLU(0.01, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)))


class GroupNormSiLU(Model):
    """Applies GroupNorm and SiLU, as decoders of autoencoders do."""

    def __init__(self, conv: nn.ConvTranspose3d) -> None:
        super().__init__(conv)
        self.norm = nn.GroupNorm(gcd(NORM_GROUPS, conv.out_channels), conv.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class ReLUGroupNorm(Model):
    """Applies ReLU and GroupNorm, as the reference task relu_group_norm does."""

    def __init__(self, conv: nn.ConvTranspose3d) -> None:
        super().__init__(conv)
        self.group_norm = nn.GroupNorm(gcd(NORM_GROUPS, conv.out_channels), conv.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.group_norm(torch.relu(self.conv(x)))


class Softmax(Model):
    """Applies a softmax over channels, as the last layer of a segmentation network does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.conv(x), dim=1)


class LogSumExp(Model):
    """Reduces the channels by log-sum-exp, and applies Hardswish."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.logsumexp(self.conv(x), dim=1, keepdim=True)
        return F.hardswish(y - 0.5)


class AveragePool(Model):
    """Averages windows of 2 x 2 x 2."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool3d(self.conv(x), 2)


class MaxPool(Model):
    """Takes the maxima of windows of 2 x 2 x 2, shifts every channel, and applies tanh."""

    def __init__(self, conv: nn.ConvTranspose3d) -> None:
        super().__init__(conv)
        self.pool = nn.MaxPool3d(2)
        self.shift = nn.Parameter(torch.zeros(conv.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.pool(self.conv(x)) + self.shift)


class GlobalMean(Model):
    """Averages every channel over the volume."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean(dim=(2, 3, 4))


class ActivatedGlobalMean(Model):
    """Applies ReLU, and averages every channel over the volume."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)).mean(dim=(2, 3, 4))


class ChannelMean(Model):
    """Averages the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean(dim=1, keepdim=True)


class DepthMean(Model):
    """Averages along the depth."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean(dim=2)


@dataclass(frozen=True)
class Tail:
    """Describes one tail, and what measuring it must know."""

    words: str
    model: type[Model]
    training: bool = False  # the model is in training mode also where no gradients are recorded
    residual: bool = False  # `forward` takes a tensor of the convolution's output shape
    over_batch: bool = False  # a sample's result depends on the other samples


TAILS = {
    "pointwise": Tail("scale, shift, SiLU, clamp", Pointwise),
    "residual": Tail("+ residual, LeakyReLU", Residual, residual=True),
    "batch_norm_eval": Tail("inference BatchNorm, LeakyReLU", BatchNormLeakyReLU),
    "batch_norm_train": Tail("training BatchNorm, ReLU", BatchNormReLU, training=True, over_batch=True),
    "instance_norm": Tail("InstanceNorm, LeakyReLU", InstanceNormLeakyReLU),
    "group_norm": Tail("GroupNorm, SiLU", GroupNormSiLU),
    "relu_group_norm": Tail("ReLU, GroupNorm", ReLUGroupNorm),
    "softmax": Tail("softmax over channels", Softmax),
    "logsumexp": Tail("log-sum-exp over channels, Hardswish", LogSumExp),
    "avg_pool": Tail("average pool 2", AveragePool),
    "max_pool": Tail("max pool 2, shift, tanh", MaxPool),
    "global_mean": Tail("global mean", GlobalMean),
    "relu_global_mean": Tail("ReLU, global mean", ActivatedGlobalMean),
    "channel_mean": Tail("mean over channels", ChannelMean),
    "depth_mean": Tail("mean over depth", DepthMean),
}

# Layers that are measured with every tail unless others are named: layers of the benchmark of different kinds, and
# layers with output rows of odd length or with few input channels.
DEFAULT_LAYERS = {
    **{name: LAYERS[name] for name in ("large_volume", "relu_group_norm_conv", "nnunet_64_32_64", "monai_64_16_32")},
    "odd_rows_32_32": layer(4, 32, 32, (32, 48, 48), 3, 2, 1),
    "few_inputs_3_32": layer(4, 3, 32, 64, 3, 2, 1, 1),
}


def model_of(tail: Tail, layer: Layer, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    """Builds the model of a layer's convolution and a tail, with random parameters and running statistics."""
    convolution = replace(layer, norm_groups=0).module(dtype, device)
    assert isinstance(convolution, nn.ConvTranspose3d)
    model = tail.model(convolution).to(device, dtype).train(tail.training)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not name.startswith("conv.") and tensor.is_floating_point():
                # The defaults, ones and zeros, would hide errors. Scales and variances stay away from zero.
                tensor.normal_().mul_(0.5).add_(1 if name.endswith(("scale", "weight")) else 0)
                if name.endswith("running_var"):
                    tensor.square_().add_(0.5)
    return model


def alone(model: Model) -> nn.Module:
    """Returns a copy of the model without its convolution, which is a function of the convolution's result."""
    left = copy.copy(model)
    left._modules = {**model._modules, "conv": nn.Identity()}
    return left


def reduced(layer: Layer) -> Layer:
    """Returns the layer on a volume small enough for the emulator, whose result has a window of 2 x 2 x 2."""
    small = layer.reduced()
    while min(small.output_shape[2:]) < 2:
        d, h, w = small.size
        small = replace(small, size=(d + 1, h + 1, w + 1))
    return small


def named(names: Sequence[str]) -> dict[str, Layer]:
    """Returns layers of the benchmark or of `DEFAULT_LAYERS` by their names."""
    every = {**LAYERS, **DEFAULT_LAYERS}
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ValueError(f"no layer is called {', '.join(map(repr, unknown))}: expected some of {', '.join(every)}")
    return {name: every[name] for name in names}


def random_pairs(count: int, seed: int, names: Sequence[str] = tuple(TAILS)) -> list[tuple[str, Layer, str]]:
    """Draws layers like those of decoders, some with few input channels, each with one of the named tails.

    Every tail is drawn once before one is drawn again. A seed always gives equal pairs.
    """
    draw = random.Random(seed)
    waiting: list[str] = []
    pairs = []
    for name, drawn in random_layers(count, seed).items():
        few = draw.randint(1, 4) if draw.random() < 0.2 else 0
        if few:
            drawn = replace(drawn, in_channels=few, groups=1)
        if not waiting:
            waiting = draw.sample(list(names), len(names))
        pairs.append((name, drawn, waiting.pop()))
    return pairs
