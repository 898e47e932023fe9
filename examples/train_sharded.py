"""Trains a small 3D decoder on several processes in three ways, and compares each of them with one process.

    torchrun --nproc-per-node 2 examples/train_sharded.py

- data: every process has the whole model and some samples of each batch (DistributedDataParallel).
- parameters: every process also keeps only its share of the parameters (FSDP2, `fully_shard`).
- volume: every process has a part of every volume, split along the depth (`tconv3d.distributed.parallelize`).

Processes use one GPU each, or the CPU with PyTorch's operator. Without torchrun there is a group of one process.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import tconv3d
import tconv3d.distributed

BATCH, EDGE = 4, 4  # samples of a batch, edge of the decoder's input; BATCH is divisible by the number of processes


def decoder(device: torch.device) -> nn.Sequential:
    """From features [N, 8, 4, 4, 4] to a volume [N, 1, 16, 16, 16], with equal parameters on all processes."""
    torch.manual_seed(0)
    return nn.Sequential(
        tconv3d.ConvTranspose3dReLUGroupNorm(8, 16, kernel_size=2, num_groups=4, stride=2),
        tconv3d.ConvTranspose3dReLU(16, 8, kernel_size=4, stride=2, padding=1),
        tconv3d.ConvTranspose3d(8, 1, kernel_size=3, padding=1),
    ).to(device)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features [N, 8, 4, 4, 4] and smooth volumes [N, 1, 16, 16, 16] made from them, equal on all processes."""
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(BATCH, 8, EDGE, EDGE, EDGE, generator=generator)
    volumes = nn.functional.interpolate(features.mean(1, keepdim=True), scale_factor=4, mode="trilinear")
    return features.to(device), volumes.to(device)


def share(tensor: Tensor) -> Tensor:
    """The samples of this process."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


Step = Callable[[Tensor, Tensor], Tensor]  # from features and volumes of the whole batch to the loss of this process


def train(model: nn.Module, loss_of: Step, steps: int, device: torch.device) -> list[float]:
    """Trains the model, and returns the losses of the whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(*batch(step, device))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def by_data(device: torch.device) -> tuple[nn.Module, Step]:
    model = DistributedDataParallel(decoder(device))
    return model, lambda features, volumes: (model(share(features)) - share(volumes)).square().mean()


def by_parameters(device: torch.device, mesh: DeviceMesh) -> tuple[nn.Module, Step]:
    model = decoder(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, lambda features, volumes: (model(share(features)) - share(volumes)).square().mean()


def by_volume(device: torch.device, mesh: DeviceMesh) -> tuple[nn.Module, Step]:
    model = tconv3d.distributed.parallelize(decoder(device), mesh, dim="depth")

    def loss_of(features: Tensor, volumes: Tensor) -> Tensor:
        wanted = tconv3d.distributed.shard(volumes, mesh, [Shard(2)])
        total: DTensor = (model(features) - wanted).square().sum()
        return total.full_tensor() / volumes.numel()

    return model, loss_of


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters of a model, by their names in one process."""
    found = {name.removeprefix("module."): parameter.detach() for name, parameter in model.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in found.items()}


def start() -> torch.device:
    """Joins the group of processes that torchrun has started, or makes a group of this process alone."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # TF32 would round the results of each way in its own manner
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def compare(steps: int, device: torch.device) -> list[str]:
    """Trains in every way, prints how each went, and returns the ways that differ from one process."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = decoder(device)
    expected = train(model, lambda features, volumes: (model(features) - volumes).square().mean(), steps, device)
    first = dist.get_rank() == 0
    if first:
        print(f"one process: loss {expected[0]:.4f} to {expected[-1]:.4f} in {steps} steps")
    ways = {"data": by_data(device), "parameters": by_parameters(device, mesh), "volume": by_volume(device, mesh)}
    wrong = []
    for name, (way, loss_of) in ways.items():
        began = time.perf_counter()
        losses = train(way, loss_of, steps, device)
        whole = parameters(way)
        error = max(float((whole[key] - value).abs().max()) for key, value in parameters(model).items())
        if error > 1e-3 or abs(losses[-1] - expected[-1]) > 1e-3:
            wrong.append(name)
        if first:
            seconds = time.perf_counter() - began
            print(f"{name} on {dist.get_world_size()} processes: loss {losses[0]:.4f} to {losses[-1]:.4f}, ", end="")
            print(f"parameters differ by at most {error:.1e}, {seconds:.1f} s")
    return wrong


def main(steps: int = 8) -> None:
    wrong = compare(steps, start())
    gc.collect()  # models that hold process groups are gone before the groups end
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"not the training of one process: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
