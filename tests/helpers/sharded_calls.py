"""Jobs for process groups: operators and layers on DTensors, compared with plain tensors on every rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close

import tconv3d
from tconv3d.distributed.styles import ColwiseParallel, GroupwiseParallel, RowwiseParallel

R, P = Replicate(), Partial()
Placements = Sequence[Placement]


def kernels() -> tconv3d.use_backend:
    """Selects our kernels in the emulator, with strict float32. Gloo cannot redistribute CUDA tensors."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    return tconv3d.use_backend("emulator")


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


def random_tensors(*shapes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Draws tensors that are equal on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]


def place(tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Distributes a tensor that all ranks have. Ranks of a Partial hold different parts that add up to it."""
    shares = tensor
    kept = list(placements)
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            ranks, rank = mesh.size(dim), mesh.get_local_rank(dim)
            shares, kept[dim] = shares * (2 * (rank + 1) / (ranks * (ranks + 1))), R
    spread = distribute_tensor(shares, mesh, kept, src_data_rank=None)
    local = spread.to_local()
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def whole(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor), type(tensor)
    return tensor.full_tensor()


def compare(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    placements: Sequence[Placements],
    mesh: DeviceMesh,
    settings: dict[str, Any],
    second: bool = False,
) -> tuple[str, ...]:
    """Compares result, gradients and, if asked, gradients of gradients; returns placements of all but the last."""
    tolerance = 1e-9 if tensors[0] is not None and tensors[0].dtype is torch.float64 else 3e-5
    leaves = [None if t is None else place(t, mesh, p) for t, p in zip(tensors, placements, strict=True)]
    plain = [None if t is None else t.clone() for t in tensors]
    wanted = [[t.requires_grad_() for t in each if t is not None] for each in (leaves, plain)]
    results = [function(*each, **settings) for each in (leaves, plain)]
    assert results[0].shape == results[1].shape
    assert_close(whole(results[0]), results[1], atol=tolerance, rtol=tolerance)
    (grad,) = random_tensors(results[1].shape, dtype=results[1].dtype)
    grads = [
        torch.autograd.grad(result, leaf, upstream, create_graph=second)
        for result, leaf, upstream in zip(results, wanted, (place(grad, mesh, [R] * mesh.ndim), grad), strict=True)
    ]
    for sharded, reference, leaf in zip(*grads, wanted[0], strict=True):
        assert sharded.shape == leaf.shape
        assert_close(whole(sharded), reference, atol=10 * tolerance, rtol=tolerance)
    if second:
        norms = [sum((g * g).sum() for g in each) for each in grads]
        pairs = zip(norms, wanted, strict=True)  # the bias has no second derivative
        again = [torch.autograd.grad(norm, leaf[:2]) for norm, leaf in pairs]  # type: ignore[arg-type]
        for sharded, reference in zip(*again, strict=True):
            assert_close(whole(sharded), reference, atol=1e3 * tolerance, rtol=10 * tolerance)
    found = [results[0], *grads[0]]
    return tuple(" ".join(map(_name, each.placements)) for each in found if isinstance(each, DTensor))


def _name(placement: Placement) -> str:
    return "P" if placement.is_partial() else str(placement)


# ---- jobs


def every_placement(groups: int) -> int:
    """Compares the operator, with and without ReLU, for every placement of its operands on a mesh of 4 ranks."""
    mesh = mesh_of(4)
    x, w, b = random_tensors((6, 4, 2, 3, 2), (4, 8 // groups, 3, 2, 3), (8,), dtype=torch.float64)
    settings = {"stride": (2, 1, 2), "padding": 1, "output_padding": (1, 0, 0), "groups": groups}
    count = 0
    for px, pw, pb in itertools.product((R, Shard(0), Shard(1), P), (R, *map(Shard, range(3))), (R, Shard(0), None)):
        tensors = [x, w, None if pb is None else b]
        function = (tconv3d.conv_transpose3d, tconv3d.conv_transpose3d_relu)[count % 2]
        compare(function, tensors, [[px], [pw], [pb or R]], mesh, settings, second=count % 8 == 0)
        count += 1
    return count


def two_mesh_dimensions(cases: int) -> int:
    """Compares operators on a mesh of 2 x 2 ranks, for placements, sizes and groups drawn at random."""
    mesh, draw = mesh_of(2, 2), random.Random(1)
    for _ in range(cases):
        groups = draw.choice((1, 1, 2, 4))
        # No shard is empty, because PyTorch 2.9 cannot redistribute empty shards of two mesh dimensions.
        channels, out = groups * draw.choice((4, 5, 7)), groups * draw.choice((4, 5, 7))
        shapes = (draw.choice((4, 5, 6)), channels, 2, 2, 2), (channels, out // groups, 2, 4, 1), (out,)
        placements: list[Placements] = [
            draw.choices((R, Shard(0), Shard(1), P), k=2),
            draw.choices((R, Shard(0), Shard(1), Shard(3)), k=2),
            draw.choices((R, Shard(0)), k=2),
        ]
        function = draw.choice((tconv3d.conv_transpose3d, tconv3d.conv_transpose3d_relu))
        settings = {"stride": 2, "padding": (0, 1, 0), "groups": groups}
        try:
            compare(function, random_tensors(*shapes, dtype=torch.float64), placements, mesh, settings)
        except Exception as error:
            raise AssertionError(f"{function.__name__} {shapes} {placements} {settings}: {error}") from error
    return cases


def block(*args: Any, **settings: Any) -> Tensor:
    x, w, b, norm_weight, norm_bias = args
    return tconv3d.conv_transpose3d_relu_group_norm(
        x, w, b, settings.pop("num_groups"), norm_weight, norm_bias, **settings
    )


def fused_blocks() -> dict[str, tuple[str, ...]]:
    """Compares the fused block for the placements that it has a rule for; returns the placements of the results."""
    found = {}
    for groups, mesh in itertools.product((1, 2), (mesh_of(4), mesh_of(2, 2))):
        vectors = [(8,)] * 3
        shapes = (3, 4, 2, 3, 2), (4, 8 // groups, 3, 2, 3), *vectors
        tensors = random_tensors(*shapes, dtype=torch.float64)
        settings = {"num_groups": 4, "stride": 2, "padding": 1, "groups": groups}
        splits: dict[str, list[Placement]] = {
            "replicated": [R] * 5,
            "batch": [Shard(0), R, R, R, R],
            "output channels": [R, Shard(1), Shard(0), Shard(0), Shard(0)],
            "only the weight": [R, Shard(1), R, R, R],
        }
        if groups == 2:
            splits = {"groups": [Shard(1), Shard(0), Shard(0), Shard(0), Shard(0)]}
        for name, single in splits.items():
            if mesh.ndim == 1 and groups == 2:
                continue  # two groups cannot be divided between four ranks
            other = R if name != "batch" else Shard(0)
            pairs = [[p] if mesh.ndim == 1 else [other if i == 0 else R, p] for i, p in enumerate(single)]
            found[f"{name} {groups} {mesh.ndim}"] = compare(block, tensors, pairs, mesh, dict(settings))
            with torch.no_grad():
                again = block(*(place(t, mesh, p) for t, p in zip(tensors, pairs, strict=True)), **settings)
                assert_close(whole(again), block(*tensors, **settings), atol=1e-9, rtol=1e-9)
    return found


def on_the_kernels() -> dict[str, tuple[str, ...]]:
    """Compares one call of each split on this library's kernels, in float32."""
    mesh = mesh_of(2, 2)
    splits: dict[str, tuple[int, list[Placements]]] = {
        "batch, output channels": (1, [[Shard(0), R], [R, Shard(1)], [R, Shard(0)]]),
        "batch, input channels": (1, [[Shard(0), Shard(1)], [R, Shard(0)], [R, R]]),
        "batch, groups": (2, [[Shard(0), Shard(1)], [R, Shard(0)], [R, Shard(0)]]),
    }
    found = {}
    with kernels():
        for name, (groups, placements) in splits.items():
            shapes = (3, 8, 3, 3, 3), (8, 8 // groups, 3, 3, 3), (8,)
            tensors = random_tensors(*shapes, dtype=torch.float32)
            settings = {"stride": 2, "padding": 1, "output_padding": 1, "groups": groups}
            found[name] = compare(tconv3d.conv_transpose3d, tensors, placements, mesh, settings)
    return found


def messages() -> dict[str, str]:
    """Returns what calls without a rule raise."""
    mesh = mesh_of(4)
    x, w, b = random_tensors((4, 4, 4, 4, 4), (4, 4, 3, 3, 3), (4,), dtype=torch.float64)
    settings: dict[str, Any] = {"num_groups": 2}

    def sharded(*placements: Placement) -> list[DTensor]:
        tensors = (x, w, b, b, b)[: len(placements)]
        return [place(t, mesh, [p]) for t, p in zip(tensors, placements, strict=True)]

    calls: dict[str, Callable[[], object]] = {
        "split in space": lambda: tconv3d.conv_transpose3d(*sharded(Shard(2), R, R)),
        "split in space, for statistics": lambda: block(*sharded(Shard(4), R, R, R, R), **settings),
        "split norm groups": lambda: block(*sharded(R, Shard(1), Shard(0), Shard(0), Shard(0)), **settings),
        "partial sums before the norm": lambda: block(*sharded(Shard(1), Shard(0), R, R, R), **settings),
        "a plain weight": lambda: tconv3d.conv_transpose3d(sharded(R)[0], w),
        "a plain input": lambda: tconv3d.conv_transpose3d(x, sharded(R, R)[1]),
        "two meshes": lambda: tconv3d.conv_transpose3d(sharded(R)[0], place(w, mesh_of(2, 2), [R, R])),
        # Ranks would disagree without a check of the whole shapes: 4 channels fit rank 0's shard of 7, not rank 3's.
        "wrong channels": lambda: tconv3d.conv_transpose3d(
            place(x.repeat(1, 2, 1, 1, 1)[:, :7], mesh, [Shard(1)]), place(w.repeat(2, 1, 1, 1, 1), mesh, [Shard(0)])
        ),
        "a layer of PyTorch": lambda: parallelize_module(nn.ConvTranspose3d(4, 4, 3), mesh, ColwiseParallel()),
        "another layer": lambda: parallelize_module(nn.Conv3d(4, 4, 3), mesh, RowwiseParallel()),
        "too few channels": lambda: parallelize_module(tconv3d.ConvTranspose3d(4, 6, 3), mesh, ColwiseParallel()),
        "groups by columns": lambda: parallelize_module(
            tconv3d.ConvTranspose3d(4, 4, 3, groups=4), mesh, ColwiseParallel()
        ),
        "no groups": lambda: parallelize_module(tconv3d.ConvTranspose3d(4, 4, 3), mesh, GroupwiseParallel()),
        "norm groups of a block": lambda: parallelize_module(
            tconv3d.ConvTranspose3dReLUGroupNorm(4, 8, 3, 2), mesh, ColwiseParallel()
        ),
        "rows of a block": lambda: parallelize_module(
            tconv3d.ConvTranspose3dReLUGroupNorm(4, 8, 3, 4), mesh, RowwiseParallel()
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Decoder(nn.Module):
    """Has a layer for each style."""

    def __init__(self) -> None:
        super().__init__()
        self.up1 = tconv3d.ConvTranspose3dReLU(4, 8, 2, stride=2)
        self.up2 = tconv3d.ConvTranspose3d(8, 8, 3, padding=1)
        self.up3 = tconv3d.ConvTranspose3d(8, 8, 3, padding=1, groups=4)
        self.up4 = tconv3d.ConvTranspose3dReLUGroupNorm(8, 8, 2, num_groups=4, stride=2)
        self.up5 = tconv3d.ConvTranspose3dReLU(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up5(self.up4(self.up3(self.up2(self.up1(x)))))


def _trained(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns output and parameters after two steps of training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
    parameters = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return output.detach(), {name: p.detach() for name, p in parameters.items()}


def parallelized_module(compiled: bool = False) -> None:
    """Trains a decoder whose layers are divided in all ways, and one with the batch divided, beside a plain one."""
    torch.manual_seed(3)
    plain = Decoder().double()
    (x,) = random_tensors((4, 4, 2, 2, 2), dtype=torch.float64)
    mesh = mesh_of(4)
    copies = [Decoder().double() for _ in range(2)]
    for copy in copies:
        copy.load_state_dict(plain.state_dict())
    styles = {
        "up1": ColwiseParallel(),
        "up2": RowwiseParallel(),
        "up3": GroupwiseParallel(input_layouts=R),
        "up4": ColwiseParallel(input_layouts=Shard(1)),
        "up5": RowwiseParallel(),
    }
    parallelize_module(copies[0], mesh, styles)
    assert copies[0].up1.weight.placements == (Shard(1),)
    distribute_module(copies[1], mesh)
    expected, parameters = _trained(plain, x)
    for copy, input in ((copies[0], x), (copies[1], place(x, mesh, [Shard(0)]))):
        if compiled:
            copy.compile(backend="aot_eager")
        output, found = _trained(copy, input)
        assert_close(output.full_tensor() if isinstance(output, DTensor) else output, expected, atol=1e-9, rtol=1e-9)
        assert_close(found, parameters, atol=1e-9, rtol=1e-9)
