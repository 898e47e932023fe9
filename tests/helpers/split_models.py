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


# ---- single operators

Operator = tuple[str, dict[str, Any], tuple[Any, ...]]  # the function's name, its settings, and parameter shapes

OPERATORS: dict[str, Operator] = {
    "convolution": ("conv3d", {"padding": 1}, ((3, 2, 3, 3, 3), (3,))),
    "strided convolution": ("conv3d", {"stride": 2, "padding": (2, 1, 0)}, ((3, 2, 5, 3, 1), (3,))),
    "dilated groups": ("conv3d", {"dilation": 2, "padding": "same", "groups": 2}, ((4, 1, 3, 3, 3), None)),
    "valid": ("conv3d", {"padding": "valid"}, ((2, 2, 2, 2, 2), None)),
    "maximum": ("max_pool3d", {"kernel_size": 3, "stride": 2, "padding": 1}, ()),
    "maximum, ceil": ("max_pool3d", {"kernel_size": 2, "stride": 2, "ceil_mode": True}, ()),
    "dilated maximum": ("max_pool3d", {"kernel_size": 2, "stride": 1, "dilation": 2}, ()),
    "mean": ("avg_pool3d", {"kernel_size": 2}, ()),
    "padded mean": ("avg_pool3d", {"kernel_size": 3, "stride": 2, "padding": 1}, ()),
    "mean of what is inside": (
        "avg_pool3d", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False}, ()
    ),
    "mean, ceil": ("avg_pool3d", {"kernel_size": 2, "stride": 2, "ceil_mode": True}, ()),
    "divisor": ("avg_pool3d", {"kernel_size": 2, "divisor_override": 3}, ()),
    "group norm": ("group_norm", {"num_groups": 1}, ((2,), (2,))),
    "instance norm": ("instance_norm", {}, ((2,), (2,))),
}  # fmt: skip
SIZES = ((8, 8, 8), (9, 7, 6), (5, 10, 4))
SPLITS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((2,), (2,)), ((4,), (3,)), ((2, 2), (2, 4)))


def operator_steps(name: str, module: Any, place: Any = None) -> list[list[Any]]:
    """Returns results and gradients of an operator for all sizes and splits; whole tensors in one process."""
    function, settings, shapes = OPERATORS[name]
    found = []
    for size in SIZES:
        for shards, dims in SPLITS:
            random = torch.Generator().manual_seed(5)
            input = torch.randn((2, 2, *size), generator=random, dtype=torch.float64)
            parameters = [
                None if shape is None else torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()
                for shape in shapes
            ]
            leaf = input.clone().requires_grad_()
            split = leaf if place is None else place(leaf, shards, dims)
            named = dict(zip(("weight", "bias"), parameters, strict=False))
            try:
                result = getattr(module, function)(split, **named, **settings)
            except ValueError as error:  # a shard is smaller than a halo
                found.append([str(error)])
                continue
            factors = torch.randn(result.shape, generator=random, dtype=torch.float64)
            factors = factors if place is None else place(factors, shards, dims)
            leaves = [leaf, *(each for each in parameters if each is not None)]
            grads = torch.autograd.grad((result * factors).sum(), leaves)
            whole = result.full_tensor() if isinstance(result, DTensor) else result
            found.append([whole.detach(), *grads])
    return found


def split_operator_steps(name: str) -> list[list[Any]]:
    """Runs on every rank: results and gradients of an operator, of volumes split among all four or two ranks."""
    from torch.distributed.tensor import Shard

    from tconv3d import distributed

    def place(tensor: Tensor, shards: tuple[int, ...], dims: tuple[int, ...]) -> DTensor:
        return distributed.shard(tensor, meshes[shards], [Shard(dim) for dim in dims])

    meshes = {shards: mesh_of(shards) for shards, _ in SPLITS}
    meshes[(2,)] = _halves()
    return operator_steps(name, distributed, place)


_half: list[Any] = []


def _halves() -> Any:
    """Returns a mesh of two ranks for every rank: ranks 0 and 1, or ranks 2 and 3."""
    if not _half:
        from torch.distributed.device_mesh import init_device_mesh

        _half.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "together"))["together"])
    return _half[0]


# ---- other models


def other_models() -> dict[str, bool]:
    """Runs on every rank: tells for some models whether their results are those of one process."""
    import copy

    from tconv3d import distributed

    mesh = mesh_of((4,))
    torch.manual_seed(0)
    models = {
        "fused block": tconv3d.ConvTranspose3dReLUGroupNorm(4, 4, 4, 2, 2, 1),
        "fused ReLU": tconv3d.ConvTranspose3dReLU(4, 4, 3, 2, 1, 1),
        "ours": tconv3d.ConvTranspose3d(4, 4, 2, 2),
        "accelerated": tconv3d.accelerate(
            nn.Sequential(nn.ConvTranspose3d(4, 4, 4, 2, 1), nn.ReLU(), nn.GroupNorm(2, 4))
        ),
        "softmax": nn.Sequential(nn.Conv3d(4, 3, 1), nn.Softmax(1)),
        "no statistics": nn.BatchNorm3d(4, track_running_stats=False),
    }
    found = {}
    input = torch.randn(2, 4, 8, 4, 4, generator=torch.Generator().manual_seed(1))
    for name, model in models.items():
        expected = copy.deepcopy(model)(input)
        calls: list[str] = []
        model.register_forward_hook(lambda *_, calls=calls: calls.append("hook"))
        names = [key for key, _ in model.named_parameters()]
        distributed.parallelize(model, mesh, 2)
        got = model(input)
        whole = got.full_tensor()
        plain = type(got) is DTensor and calls == ["hook"] and names == [key for key, _ in model.named_parameters()]
        found[name] = plain and torch.allclose(whole, expected, rtol=1e-4, atol=1e-5)
    return found
