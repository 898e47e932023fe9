"""Jobs for process groups: a small decoder trained by DDP, FSDP2 and pipelines, compared with one process.

Every job computes the expected values itself, on every rank, from the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import tconv3d
from tconv3d.torch_ops import kept

BATCH = 8


_place = "cpu"


def device() -> str:
    return _place


@contextlib.contextmanager
def kernels(place: str = "cpu") -> Iterator[None]:
    """Selects our kernels, with strict float32: in the emulator, or on a GPU that ranks may have to share.

    Ranks that share a GPU can be connected by gloo alone, which has on CUDA tensors what DDP needs and nothing else.
    """
    global _place
    _place = place
    if place == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with tconv3d.use_backend("cuda" if place == "cuda" else "emulator"):
        yield


class Decoder(nn.Module):
    """Upsamples twice. The first three layers become one fused block if the model is accelerated."""

    def __init__(self, convolution: Callable[..., nn.Module] = tconv3d.ConvTranspose3d) -> None:
        super().__init__()
        self.first = nn.Sequential(convolution(8, 8, 2, stride=2), nn.ReLU(), nn.GroupNorm(4, 8))
        self.last = convolution(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def decoder(convolution: Callable[..., nn.Module] = tconv3d.ConvTranspose3d) -> Decoder:
    torch.manual_seed(1)
    return Decoder(convolution).to(device())


def swapped(model: nn.Module) -> bool:
    """Tells whether both layers of a decoder are this library's."""
    return all(isinstance(model.get_submodule(name), tconv3d.ConvTranspose3d) for name in ("first.0", "last"))


def batch() -> tuple[Tensor, Tensor]:
    """Draws inputs [8, 8, 2, 2, 2] and targets [8, 4, 4, 4, 4] that are equal on all ranks."""
    generator = torch.Generator().manual_seed(2)
    shapes = (BATCH, 8, 2, 2, 2), (BATCH, 4, 4, 4, 4)
    x, target = (torch.randn(*shape, generator=generator).to(device()) for shape in shapes)
    return x, target


def share(tensor: Tensor) -> Tensor:
    """Returns the samples of this rank."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def mean(value: Tensor) -> Tensor:
    """Returns the mean over all ranks of a value."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name.removeprefix("module.")] = whole(parameter.grad).detach().clone()
    return found


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return (model(x) - target).square().mean()


def step(model: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns loss and gradients of one step without an optimizer."""
    model.zero_grad()
    loss = loss_of(model, x, target)
    loss.backward()
    return loss.detach(), gradients(model)


def same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], error: float) -> None:
    """Compares the losses of ranks, and gradients, with those of one process."""
    assert_close(mean(found[0]), expected[0], atol=error, rtol=error)
    assert_close(found[1], expected[1], atol=error, rtol=error)


# ---- DDP


def ddp() -> dict[str, float]:
    """Checks gradients, swapped layers before and after wrapping, no_sync, autocast and the state of DDP models."""
    seen = {}
    with kernels("cuda" if torch.cuda.is_available() else "cpu"):
        x, target = batch()
        expected = step(decoder(), x, target)
        for name, make in {
            "ours": lambda: DistributedDataParallel(decoder()),
            "accelerated before": lambda: DistributedDataParallel(tconv3d.accelerate(decoder(nn.ConvTranspose3d))),
            "accelerated after": lambda: tconv3d.accelerate(DistributedDataParallel(decoder(nn.ConvTranspose3d))),
            "other options": lambda: DistributedDataParallel(
                decoder(), gradient_as_bucket_view=True, static_graph=True
            ),
        }.items():
            model = make()
            assert swapped(model.module)
            for _ in range(2):
                found = step(model, share(x), share(target))
            same(found, expected, 1e-4)
            seen[name] = float(mean(found[0]))
        _ddp_accumulates(x, target, expected)
        _ddp_autocasts(x, target)
        _ddp_state(x, target)
    return seen


def _ddp_accumulates(x: Tensor, target: Tensor, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Accumulates the gradients of two halves of the batch; the ranks communicate with the second alone."""
    model = DistributedDataParallel(decoder())
    halves = [share(half) for tensor in (x, target) for half in tensor.chunk(2)]
    with model.no_sync():
        (loss_of(model, halves[0], halves[2]) / 2).backward()
    local = gradients(model)["last.weight"]
    assert not torch.equal(mean(local), local), "ranks have gradients of their own until they communicate"
    (loss_of(model, halves[1], halves[3]) / 2).backward()
    assert_close(gradients(model), expected[1], atol=1e-4, rtol=1e-4)


def _ddp_autocasts(x: Tensor, target: Tensor) -> None:
    """Compares a step under autocast with the same in one process. Gradients keep the parameters' type."""
    with torch.autocast(device(), torch.bfloat16):
        expected = step(decoder(), x, target)
        found = step(DistributedDataParallel(decoder()), share(x), share(target))
    assert all(grad.dtype is torch.float32 for grad in found[1].values())
    same(found, expected, 2e-2)


def _ddp_state(x: Tensor, target: Tensor) -> None:
    """Checks that a trained model's state_dict has PyTorch's names, and loads into PyTorch's layers."""
    model = DistributedDataParallel(decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, share(x), share(target))
    optimizer.step()
    other = decoder(nn.ConvTranspose3d)
    other.load_state_dict(model.module.state_dict())
    with torch.no_grad():
        assert_close(other(x), model(x), atol=1e-4, rtol=1e-4)


# ---- FSDP2


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Shards the parameters of each layer over all ranks."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    for name in ("first", "last"):
        fully_shard(model.get_submodule(name), mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(directory: str) -> dict[str, float]:
    """Checks gradients, training, mixed precision, accumulation, evaluation and checkpoints of sharded models."""
    seen = {}
    with kernels():
        x, target = batch()
        expected = step(decoder(), x, target)
        for name, make in {
            "ours": lambda: sharded(decoder()),
            "accelerated before": lambda: sharded(tconv3d.accelerate(decoder(nn.ConvTranspose3d))),
            "accelerated after": lambda: tconv3d.accelerate(sharded(decoder(nn.ConvTranspose3d))),
            "not resharded": lambda: sharded(decoder(), reshard_after_forward=False),
        }.items():
            model = make()
            assert swapped(model)
            for _ in range(2):
                found = step(model, share(x), share(target))
            same(found, expected, 1e-4)
            seen[name] = float(mean(found[0]))
            if name == "accelerated after":
                tconv3d.restore(model)
                assert not swapped(model)
                same(step(model, share(x), share(target)), expected, 1e-4)
        _fsdp_accumulates(x, target, expected)
        _fsdp_mixes(x, target)
        _fsdp_forgets(x)
        _fsdp_trains(x, target, Path(directory))
    return seen


def _fsdp_accumulates(x: Tensor, target: Tensor, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    model: Any = sharded(decoder())
    halves = [share(half) for tensor in (x, target) for half in tensor.chunk(2)]
    model.set_requires_gradient_sync(False)
    (loss_of(model, halves[0], halves[2]) / 2).backward()
    model.set_requires_gradient_sync(True)
    (loss_of(model, halves[1], halves[3]) / 2).backward()
    assert_close(gradients(model), expected[1], atol=1e-4, rtol=1e-4)


def _fsdp_mixes(x: Tensor, target: Tensor) -> None:
    """Compares a step with parameters gathered in bfloat16 with a bfloat16 copy of the model in one process."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    found = step(sharded(decoder(), mp_policy=policy), share(x), share(target))
    assert all(grad.dtype is torch.float32 for grad in found[1].values())
    lower = decoder().bfloat16()
    lower.zero_grad()
    loss = (lower(x.bfloat16()).float() - target).square().mean()
    loss.backward()
    expected = {name: grad.float() for name, grad in gradients(lower).items()}
    same(found, (loss.detach(), expected), 3e-2)


def _fsdp_forgets(x: Tensor) -> None:
    """Checks that no packed weight outlives a change of the sharded weight, which PyTorch does not count.

    A layer in bfloat16 runs kernels that pack the weight, and calls without gradients may keep the packed copy.
    """
    torch.manual_seed(1)
    layer = tconv3d.ConvTranspose3d(16, 16, 3, padding=1, stride=2, bias=False, dtype=torch.bfloat16, device=device())
    weight = layer.weight.detach().clone()
    input = x.new_ones(1, 16, 4, 4, 4).bfloat16()
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(layer, mesh=init_device_mesh(device(), (dist.get_world_size(),)))
    with torch.no_grad():
        for factor in (1, -1, 2):
            model.reshard()
            model.weight.copy_(_like(weight * factor, model.weight))
            for _ in range(3):
                assert_close(model(input), tconv3d.conv_transpose3d(input, weight * factor, None, 2, 1))
    assert id(model.weight) not in kept._kept


def _like(tensor: Tensor, parameter: DTensor) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _fsdp_trains(x: Tensor, target: Tensor, directory: Path) -> None:
    """Trains, saves a distributed checkpoint, loads it into a fresh model and trains on, beside one process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    plain, model = decoder(), sharded(decoder())
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model)]

    def train(steps: int) -> None:
        for _ in range(steps):
            step(plain, x, target)
            step(model, share(x), share(target))
            for optimizer in optimizers:
                optimizer.step()

    train(2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers[1]), strict=True))
    assert set(state["model"]) == set(plain.state_dict()), "the names are those of the model in one process"
    dcp.save(state, checkpoint_id=directory)
    model = sharded(tconv3d.accelerate(decoder(nn.ConvTranspose3d)))
    optimizers[1] = torch.optim.Adam(model.parameters(), lr=0.01)
    fresh = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers[1]), strict=True))
    dcp.load(fresh, checkpoint_id=directory)
    set_state_dict(model, optimizers[1], model_state_dict=fresh["model"], optim_state_dict=fresh["optimizer"])
    train(1)
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    assert_close(found, dict(plain.named_parameters()), atol=1e-3, rtol=1e-3)


# ---- pipelines


def pipeline() -> float:
    """Runs two stages of the decoder on two ranks by the schedule 1F1B, and compares with one process."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    with kernels():
        x, target = batch()
        expected = step(decoder(), x, target)
        model = tconv3d.accelerate(decoder(nn.ConvTranspose3d))
        part = copy.deepcopy((model.first, model.last)[rank])
        stage = PipelineStage(part, rank, 2, torch.device(device()))
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=lambda y, t: (y - t).square().mean())
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
    prefix = ("first", "last")[rank]
    for name, parameter in part.named_parameters():
        assert parameter.grad is not None
        assert_close(parameter.grad, expected[1][f"{prefix}.{name}"], atol=1e-4, rtol=1e-4)
    if losses:
        assert_close(torch.stack(losses).mean(), expected[0], atol=1e-4, rtol=1e-4)
    return float(expected[0])
