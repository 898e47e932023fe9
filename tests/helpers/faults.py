"""Jobs for process groups in which something goes wrong on one rank."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tconv3d
from tconv3d import distributed


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(victim: int | None, steps: int = 3) -> float:
    """Trains by DDP on the CPU; the victim dies in the backward pass of the second step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(tconv3d.ConvTranspose3d(2, 2, 2, stride=2))
    for step in range(steps):
        loss = model(torch.ones(1, 2, 2, 2, 2)).square().mean()
        if step == 1 and dist.get_rank() == victim:
            die()
        loss.backward()
    return float(loss)


def train_different_layers(odd: int) -> None:
    """Wraps a layer that has another shape on one rank."""
    channels = 3 if dist.get_rank() == odd else 2
    DistributedDataParallel(tconv3d.ConvTranspose3d(2, channels, 2))


def split(volume: Tensor, victim: int | None = None) -> Tensor:
    """Runs a layer, forward and backward, on a volume split along the depth; returns this rank's part.

    The victim dies between the two passes.
    """
    torch.manual_seed(0)
    layer = tconv3d.ConvTranspose3d(2, 2, 3, padding=1, stride=2, dtype=volume.dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    input = distribute_tensor(volume, mesh, [Shard(2)], src_data_rank=None).requires_grad_()
    output: Any = distributed.conv_transpose3d(input, layer.weight, layer.bias, 2, 1)
    if dist.get_rank() == victim:
        die()
    output.to_local().square().sum().backward()
    assert isinstance(input.grad, DTensor)
    return output.to_local().detach()


def split_with_a_death(victim: int | None) -> float:
    """Runs a split layer; the victim dies between the forward and the backward pass."""
    return float(split(torch.ones(1, 2, 8, 4, 4), victim).sum())


def split_different(what: str, odd: int, known: bool) -> float:
    """Runs a split layer on a volume that has another shape, type or number of channels on one rank.

    With `known`, all ranks have computed both volumes before.
    """
    usual = torch.ones(1, 2, 8, 4, 4)
    other = {
        "batch": torch.ones(2, 2, 8, 4, 4),
        "width": torch.ones(1, 2, 8, 4, 6),
        "depth": torch.ones(1, 2, 12, 4, 4),
        "type": torch.ones(1, 2, 8, 4, 4, dtype=torch.float64),
    }[what]
    for volume in (usual, other) if known else ():
        split(volume)
    return float(split(other if dist.get_rank() == odd else usual).sum())
