"""Models for tests of `parallelize`, and the job that trains them for a step on every rank."""

from __future__ import annotations

from typing import Any

import torch
from spatial_cases import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tconv3d


class Decoder(nn.Module):
    """A small U-Net: two levels down, two up, skip connections by concatenation and by addition."""

    def __init__(self, norm: str = "group") -> None:
        super().__init__()
        norms: dict[str, Any] = {
            "group": lambda channels: nn.GroupNorm(2, channels),
            "instance": lambda channels: nn.InstanceNorm3d(channels, affine=True),
            "batch": lambda channels: nn.BatchNorm3d(channels),
            "cumulative batch": lambda channels: nn.BatchNorm3d(channels, momentum=None),
        }
        made = norms[norm]
        self.enter = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), made(4), nn.LeakyReLU(0.1))
        self.down = nn.Sequential(nn.Conv3d(4, 6, 3, stride=2, padding=1), made(6), nn.PReLU())
        self.pool = nn.MaxPool3d(2)
        self.up = nn.Sequential(nn.ConvTranspose3d(6, 6, 2, stride=2), nn.ReLU(), made(6))
        self.out = nn.ConvTranspose3d(6, 4, 4, stride=2, padding=1)
        self.average = nn.AvgPool3d(3, stride=1, padding=1, count_include_pad=False)
        self.head = nn.Conv3d(8, 3, 1)

    def forward(self, input: Tensor) -> Tensor:
        first = self.enter(input)
        second = self.down(first)
        third = self.up(self.pool(second)) + second
        return self.head(torch.cat([self.average(self.out(third)), first], 1)).sigmoid()


def made(norm: str, seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(norm).double()


Step = dict[str, Tensor]  # result, loss, gradients, and the state after a step, by name


def one_step(model: nn.Module, input: Tensor, mesh: Any = None) -> Step:
    """Trains for one step and evaluates the trained model; tensors of the result are whole."""

    def whole(tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    leaf = input.clone().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = model(leaf)
    loss = result.square().mean()
    loss.backward()
    found = {"result": whole(result), "loss": whole(loss), "input gradient": whole(leaf.grad)}
    found.update({f"gradient of {name}": whole(each.grad) for name, each in model.named_parameters()})
    optimizer.step()
    found.update({f"state {name}": whole(each) for name, each in model.state_dict().items()})
    model.eval()
    with torch.no_grad():
        found["evaluated"] = whole(model(input))
    return found


def split_step(norm: str, size: tuple[int, ...], shards: tuple[int, ...], dims: tuple[Any, ...], backend: str) -> Any:
    """Runs on every rank: one step of a parallelized decoder; None on ranks outside of the mesh."""
    from tconv3d import distributed

    mesh = mesh_of(shards)
    if mesh.get_coordinate() is None:
        return None
    model = made(norm, seed=torch.distributed.get_rank())  # the parameters of rank 0 count
    if backend == "accelerated":
        tconv3d.accelerate(model)
    names = list(model.state_dict())
    distributed.parallelize(model, mesh, dims)
    assert list(model.state_dict()) == names
    with tconv3d.use_backend("emulator" if backend == "emulator" else "auto"):
        return one_step(model, volume(size))


def volume(size: tuple[int, ...]) -> Tensor:
    return torch.randn((2, 2, *size), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
