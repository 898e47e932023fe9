"""Says how each operator of this library runs on DTensors: which placements it takes, and which it returns.

A dimension of the mesh may split a call in five ways. `SPLITS` says for each of them where the tensors of a call lie;
it is the one table that all operators share, forward and backward:

- replicated: every rank computes everything.
- batch: every rank has some samples. Gradients of weight and bias are partial sums.
- output channels (column-parallel, groups == 1): every rank has the weights of some output channels.
- input channels (row-parallel, groups == 1): every rank has some input channels. Results are partial sums, and the
  first rank alone adds the bias.
- groups: every rank has whole groups of channels, of input, weight and output.

For each mesh dimension the operators take the split that moves the fewest bytes. Operands that lie elsewhere are
redistributed, as PyTorch's own operators do with DTensors. Two things are refused in words instead. A volume that is
split in space is never gathered: it is split because it is large, and `tconv3d.distributed` computes with it. A
GroupNorm is not computed where its groups are divided between ranks.

Rules are registered by `torch.library.register_torch_dispatch`, and use only the public methods of DTensors. They run
below autograd; the derivative of an operator is made of operators that have rules. This module must not know kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..planning.problem import channels_last_strides
from ..torch_ops import checks, subclasses
from ..torch_ops.checks import Convolution

Placements = tuple[Placement, ...]

# Where the tensors of a call lie along a mesh dimension, for each split. Tensors that a split does not name are
# replicated. x [N, C_in, D, H, W] is the input, w [C_in, C_out/groups, kD, kH, kW] the weight, b [C_out] the bias,
# y [N, C_out, D, H, W] the output, s [2, N, num_groups] the statistics of a GroupNorm, v [C_out] the weight or bias
# of a GroupNorm. dx, dw, db and dy are gradients; dv [2, C_out] are those of both vectors of a GroupNorm.
SPLITS: dict[str, dict[str, Placement]] = {
    "replicated": {},
    "batch": {
        **dict.fromkeys(("x", "y", "dx", "dy"), Shard(0)),
        **dict.fromkeys(("dw", "db", "dv"), Partial()),
        "s": Shard(1),
    },
    "output channels": {
        **dict.fromkeys(("y", "dy", "w", "dw", "dv"), Shard(1)),
        **dict.fromkeys(("b", "db", "v"), Shard(0)),
        "dx": Partial(),
        "s": Shard(2),
    },
    "input channels": {
        **dict.fromkeys(("x", "dx"), Shard(1)),
        **dict.fromkeys(("w", "dw"), Shard(0)),
        **dict.fromkeys(("y", "b"), Partial()),
    },
    "groups": {
        **dict.fromkeys(("x", "dx", "y", "dy", "dv"), Shard(1)),
        **dict.fromkeys(("w", "dw", "b", "db", "v"), Shard(0)),
        "s": Shard(2),
    },
}
_CHANNELS = ("output channels", "groups")  # the splits that divide the channels of the output


@dataclass(frozen=True)
class Operator:
    """Describes an operator to the rules."""

    name: str
    operands: tuple[str, ...]  # the tensors that it takes, by the names of `SPLITS`; they are its first arguments
    results: tuple[str, ...]
    linear: bool = True  # whether partial sums may be added up after it
    settings: bool = True  # whether its last arguments are stride, padding, output_padding, groups and dilation
    num_groups: int | None = None  # the argument that is the number of a GroupNorm's groups
    norm: bool = False  # whether it computes a GroupNorm, or a step of one


OPERATORS = (
    Operator("conv_transpose3d", ("x", "w", "b"), ("y",)),
    Operator("conv_transpose3d_input_grad", ("dy", "w"), ("dx",)),
    Operator("conv_transpose3d_weight_grad", ("dy", "x"), ("dw",)),
    Operator("conv_transpose3d_bias_grad", ("dy",), ("db",), settings=False),
    Operator("conv_transpose3d_relu", ("x", "w", "b"), ("y",), linear=False),
    Operator("conv_transpose3d_relu_statistics", ("x", "w", "b"), ("y", "s"), linear=False, norm=True, num_groups=3),
    Operator(
        "conv_transpose3d_relu_group_norm", ("x", "w", "b", "v", "v"), ("y",), linear=False, norm=True, num_groups=5
    ),
    Operator("normalize", ("y", "s", "v", "v"), ("y",), linear=False, norm=True, settings=False),
    Operator(
        "relu_group_norm_grad", ("dy", "y", "s", "v"), ("dy", "dv", "db"), linear=False, norm=True, settings=False
    ),
)


@dataclass(frozen=True)
class Extents:
    """Holds the sizes of a call on the whole mesh. A size that an operator's operands do not have is None."""

    batch: int
    in_channels: int | None
    out_channels: int
    groups: int
    num_groups: int | None  # groups of the GroupNorm

    def shape_of(self, tensor: str, local: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a result on the whole mesh, given the shape on this rank."""
        if tuple(local) == (0,):  # a gradient that is not wanted
            return (0,)
        batch, out = self.batch, self.out_channels
        first: dict[str, tuple[int | None, ...]] = {
            "y": (batch, out),
            "dy": (batch, out),
            "dx": (batch, self.in_channels),
            "dw": (self.in_channels, out // self.groups),
            "db": (out,),
            "dv": (2, out),
            "s": (2, batch, self.num_groups),
        }
        found = first[tensor]
        sizes = tuple(own if size is None else size for size, own in zip(found, local[: len(found)], strict=True))
        return (*sizes, *local[len(found) :])


# ---- what a call is


def _check(operator: Operator, arguments: Sequence[Any]) -> None:
    """Raises on every rank what a mismatch of shapes raises without DTensors. Local shapes may fit on some ranks."""
    tensors = dict(zip(operator.operands, arguments, strict=False))
    if not operator.settings:
        return
    convolution = _convolution(arguments)
    if "x" in tensors and "w" in tensors:
        checks.check_forward(tensors["x"], tensors["w"], tensors["b"], convolution)
    elif "w" in tensors:
        geometry = checks.check_channels(tensors["w"], convolution)
        checks.check_grad_output(geometry, tensors["dy"], tuple(arguments[2]))


def _convolution(arguments: Sequence[Any]) -> Convolution:
    stride, padding, output_padding, groups, dilation = arguments[-5:]
    return tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation)


def _extents(operator: Operator, arguments: Sequence[Any]) -> Extents:
    tensors = dict(zip(operator.operands, arguments, strict=False))
    groups = arguments[-2] if operator.settings else 1
    out = next((tensors[name].shape[1] for name in ("y", "dy") if name in tensors), None)
    ins = next((tensors[name].shape[dim] for name, dim in (("x", 1), ("w", 0)) if name in tensors), None)
    batch = next(tensors[name].shape[0] for name in ("x", "y", "dy") if name in tensors)
    num_groups = None if operator.num_groups is None else arguments[operator.num_groups]
    if "s" in tensors:
        num_groups = tensors["s"].shape[2]
    return Extents(batch, ins, tensors["w"].shape[1] * groups if out is None else out, groups, num_groups)


def _mesh(operator: Operator, tensors: Sequence[Tensor | None]) -> DeviceMesh:
    meshes: list[DeviceMesh] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            meshes.append(tensor.device_mesh)
        elif tensor is not None:
            raise RuntimeError(
                f"tconv3d::{operator.name}: expected all tensors to be DTensors, but got a torch.Tensor of size "
                f"{list(tensor.shape)} beside DTensors. Distribute it first (distribute_tensor, distribute_module)"
            )
    if any(mesh != meshes[0] for mesh in meshes):
        raise RuntimeError(f"tconv3d::{operator.name}: expected all DTensors on one DeviceMesh, but got {meshes}")
    return meshes[0]


def _refuse(operator: Operator, arguments: Sequence[Any], extents: Extents, mesh: DeviceMesh) -> None:
    """Raises for calls that could only be computed by gathering what somebody has split for a reason."""
    for name, tensor in zip(operator.operands, arguments, strict=False):
        if tensor is None or name not in ("x", "y", "dy"):
            continue
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard() and placement.dim >= 2 and mesh.size(dim) > 1:
                raise NotImplementedError(
                    f"tconv3d::{operator.name}: a tensor of size {list(tensor.shape)} is split in space "
                    f"({placement}), and the operator does not exchange halos. Use tconv3d.distributed for volumes "
                    "split in space, or redistribute the tensor first"
                )
            if placement.is_shard(1) and operator.norm and mesh.size(dim) > 1:
                _refuse_channels(operator, name, extents, mesh.size(dim))
    if operator.norm and "w" in operator.operands:
        for dim, placement in enumerate(arguments[1].placements):
            if placement.is_shard(1) and extents.groups == 1 and mesh.size(dim) > 1:
                _refuse_channels(operator, "y", extents, mesh.size(dim))


def _refuse_channels(operator: Operator, name: str, extents: Extents, ranks: int) -> None:
    """Raises if a GroupNorm cannot be computed with the channels of x or of y divided between ranks."""
    if name == "x" and extents.groups == 1:
        raise NotImplementedError(
            f"tconv3d::{operator.name}: input channels are split over {ranks} ranks, so the convolution's result is "
            "a partial sum, which must be added up before ReLU and GroupNorm. Use ConvTranspose3d, redistribute its "
            "result, and apply ReLU and GroupNorm to that"
        )
    if extents.num_groups is not None and extents.num_groups % ranks:
        per_group = extents.out_channels // extents.num_groups
        raise NotImplementedError(
            f"tconv3d::{operator.name}: a GroupNorm of {extents.num_groups} groups of {per_group} channels cannot be "
            f"computed with channels split over {ranks} ranks, because its statistics need all channels of a group. "
            f"Split the channels over a divisor of {extents.num_groups} ranks"
        )


# ---- the choice of a split for each mesh dimension


def _least(size: int, parts: Sequence[int]) -> int:
    """Returns the least extent that a rank gets if DTensor splits `size` over mesh dimensions of sizes `parts`."""
    for ranks in parts:
        size -= math.ceil(size / ranks) * (ranks - 1)
    return size


def _possible(split: str, operator: Operator, extents: Extents, parts: Sequence[int]) -> bool:
    """Tells whether mesh dimensions of sizes `parts` together can split a call this way, with work for all ranks."""
    ranks = math.prod(parts)
    if split in ("replicated", "batch"):
        return True
    if split in _CHANNELS and extents.num_groups is not None and extents.num_groups % ranks:
        return False
    if not operator.settings and split == "groups":  # nothing divides it from a split of the output channels
        return False
    if split == "groups":
        return extents.groups > 1 and extents.groups % ranks == 0
    if extents.groups > 1:
        return False
    if split == "output channels":
        return _least(extents.out_channels, parts) > 0
    return operator.linear and extents.in_channels is not None and _least(extents.in_channels, parts) > 0


def _cost(tensor: DTensor, dim: int, ranks: int, wanted: Placement) -> tuple[float, int]:
    """Returns how many bytes a rank sends to redistribute a tensor along a mesh dimension, and whether it moves."""
    now = tensor.placements[dim]
    if now == wanted or ranks == 1:
        return 0.0, 0
    if now.is_replicate():
        return 0.0, 1
    share = tensor.numel() * tensor.element_size() * (ranks - 1) / ranks
    if now.is_partial():
        return (share if wanted.is_shard() else 2 * share), 1
    return (share / ranks if wanted.is_shard() else share), 1


def choose(operator: Operator, tensors: Sequence[DTensor | None], extents: Extents, mesh: DeviceMesh) -> list[str]:
    """Returns the split of each mesh dimension that moves the fewest bytes. All ranks choose alike."""
    chosen: list[str] = []
    for dim in range(mesh.ndim):
        ranks = mesh.size(dim)
        costs: dict[str, tuple[float, int]] = {}
        for split, places in SPLITS.items():
            parts = [mesh.size(i) for i, other in enumerate(chosen) if other == split]
            if not _possible(split, operator, extents, [*parts, ranks]):
                continue
            pairs = [
                _cost(tensor, dim, ranks, places.get(name, Replicate()))
                for name, tensor in zip(operator.operands, tensors, strict=True)
                if tensor is not None
            ]
            costs[split] = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        chosen.append(min(costs, key=lambda split: costs[split]))
    return chosen


# ---- the call on this rank


def _placements(name: str, splits: Sequence[str]) -> Placements:
    return tuple(SPLITS[split].get(name, Replicate()) for split in splits)


def _local(tensor: DTensor, wanted: Placements) -> Tensor:
    """Returns what this rank needs of a tensor. A replicated tensor becomes partial by zeros on all ranks but one."""
    partial = [new.is_partial() and not old.is_partial() for old, new in zip(tensor.placements, wanted, strict=True)]
    reachable = tuple(Replicate() if made else new for made, new in zip(partial, wanted, strict=True))
    if tensor.placements != reachable:
        detached: Any = tensor.detach()  # PyTorch 2.9 cannot redistribute a tensor that requires a gradient here
        tensor = detached.redistribute(placements=reachable)
    local = tensor.to_local()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is not None and any(made and at > 0 for made, at in zip(partial, coordinate, strict=True)):
        return torch.zeros_like(local)
    return local


def _arguments(operator: Operator, arguments: Sequence[Any], splits: Sequence[str], mesh: DeviceMesh) -> list[Any]:
    """Returns the arguments of the call on this rank: local tensors, and numbers of groups that this rank has."""
    found = list(arguments)
    for i, name in enumerate(operator.operands):
        if found[i] is not None:
            found[i] = _local(found[i], _placements(name, splits))
    if operator.settings:
        found[-2] //= math.prod(mesh.size(dim) for dim, split in enumerate(splits) if split == "groups")
    if operator.num_groups is not None:
        found[operator.num_groups] //= math.prod(
            mesh.size(dim) for dim, split in enumerate(splits) if split in _CHANNELS
        )
    return found


def _wrap(name: str, local: Tensor, splits: Sequence[str], extents: Extents, mesh: DeviceMesh) -> DTensor:
    shape = extents.shape_of(name, local.shape)
    unwanted = shape == (0,)
    placements = [Replicate()] * mesh.ndim if unwanted else _placements(name, splits)
    strides = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
    if not local.is_contiguous():
        strides = channels_last_strides(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def _run(operator: Operator, overload: Any, arguments: Sequence[Any]) -> Any:
    """Runs an operator on DTensors."""
    tensors = arguments[: len(operator.operands)]
    mesh = _mesh(operator, tensors)
    _check(operator, arguments)
    extents = _extents(operator, arguments)
    _refuse(operator, arguments, extents, mesh)
    if operator.name == "conv_transpose3d_relu" and _has_split_inputs(tensors[0], extents, mesh):
        return _relu_of_sum(arguments, mesh)
    splits = choose(operator, tensors, extents, mesh)
    results = overload(*_arguments(operator, arguments, splits, mesh))
    if len(operator.results) == 1:
        return _wrap(operator.results[0], results, splits, extents, mesh)
    pairs = zip(operator.results, results, strict=True)
    return tuple(_wrap(name, result, splits, extents, mesh) for name, result in pairs)


def _has_split_inputs(input: DTensor, extents: Extents, mesh: DeviceMesh) -> bool:
    split = any(placement.is_shard(1) and mesh.size(dim) > 1 for dim, placement in enumerate(input.placements))
    return split and extents.groups == 1


def _relu_of_sum(arguments: Sequence[Any], mesh: DeviceMesh) -> Tensor:
    """Computes the ReLU of a convolution with split input channels: partial sums are added up before the ReLU."""
    result: DTensor = torch.ops.tconv3d.conv_transpose3d.default(*arguments)
    whole = [Replicate() if placement.is_partial() else placement for placement in result.placements]
    return result.redistribute(mesh, whole).relu()


def _prepare_gradient(result: Tensor) -> None:
    """Lets the gradient of a result arrive where the result lies.

    A gradient may arrive anywhere: replicated behind a sum, as a partial sum behind a layer with split output
    channels. It is redistributed once, and not by each operator of the backward pass, and the backward pass is split
    as the forward pass was.
    """
    assert isinstance(result, DTensor)
    placements = [Replicate() if placement.is_partial() else placement for placement in result.placements]

    def arrive(grad: Tensor) -> Tensor:
        return grad.redistribute(placements=placements) if isinstance(grad, DTensor) else grad

    if result.requires_grad:
        result.register_hook(arrive)


def _register() -> None:
    for operator in OPERATORS:

        def rule(cls: Any, overload: Any, types: Any, args: Any, kwargs: Any, operator: Operator = operator) -> Any:
            return _run(operator, overload, args)

        torch.library.register_torch_dispatch(f"tconv3d::{operator.name}", DTensor, rule, lib=_LIBRARY)
    subclasses.add(DTensor, _prepare_gradient)


_LIBRARY = torch.library.Library("tconv3d", "FRAGMENT")
_register()
