"""Reads from a DTensor how a volume is split, and makes DTensors of results. It knows nothing of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..planning.problem import channels_last_strides, contiguous_strides
from ..torch_ops.pytorch_ops import suggests_channels_last
from .agreement import label_of
from .exchange import Neighbours
from .shards import NAMES


@dataclass(frozen=True)
class Placing:
    """Describes how a tensor [N, C, D, H, W] is divided among the ranks of a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shards: tuple[int, ...]  # along depth, height, width; 1 if a dimension is not split
    place: tuple[int, ...]  # this rank's shard along each of the three
    neighbours: Neighbours

    @property
    def spatial(self) -> tuple[int, ...]:
        """The mesh dimensions that split depth, height or width."""
        return tuple(dim for dim in self.neighbours.mesh_dims if dim is not None)

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """The mesh dimensions along which ranks have different elements, so that parameter gradients are summed."""
        return tuple(dim for dim, placement in enumerate(self.placements) if isinstance(placement, Shard))


def placing_of(input: object, function: str) -> Placing:
    """Returns how a volume is split. Raises, in words, for what cannot be computed on local shards."""
    if not isinstance(input, DTensor):
        raise TypeError(
            f"{function} expects input to be a DTensor, split along depth, height or width, but got "
            f"{type(input).__name__}"
        )
    if input.dim() != 5:
        raise RuntimeError(f"{function} expects a 5D input (N, C, D, H, W), but got one of size {list(input.shape)}")
    mesh, coordinate = input.device_mesh, input.device_mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"{function} was called on a rank that is not in the mesh {mesh}")
    mesh_dims: list[int | None] = [None, None, None]
    for mesh_dim, placement in enumerate(input.placements):
        if isinstance(placement, Replicate) or (type(placement) is Shard and placement.dim == 0):
            continue
        if type(placement) is not Shard or placement.dim == 1:
            raise RuntimeError(
                f"{function} takes shards of depth, height, width or batch (Shard(2), Shard(3), Shard(4), Shard(0)), "
                f"but the input has {placement}: redistribute it first"
            )
        if mesh_dims[placement.dim - 2] is not None:
            raise RuntimeError(f"{function} cannot split {NAMES[placement.dim - 2]} along two mesh dimensions")
        mesh_dims[placement.dim - 2] = mesh_dim
    channels_last = suggests_channels_last(input)
    return Placing(
        mesh,
        tuple(input.placements),
        tuple(1 if dim is None else mesh.size(dim) for dim in mesh_dims),
        tuple(0 if dim is None else coordinate[dim] for dim in mesh_dims),
        Neighbours(mesh, tuple(mesh_dims), channels_last, label_of(input, function, channels_last)),
    )


def local_of(input: DTensor) -> Tensor:
    """Returns this rank's shard, after a collective operation that may still be writing it."""
    return waited(input.to_local())


def waited(tensor: Tensor) -> Tensor:
    """Returns a tensor as kernels can read it, after a collective operation that may still be writing it."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def placed(local: Tensor, placing: Placing, shape: Sequence[int], channels_last: bool | None = None) -> DTensor:
    """Returns the DTensor of this shape whose local shard is given; like the input, it is channels-last or not."""
    last = placing.neighbours.channels_last if channels_last is None else channels_last
    dense = channels_last_strides if last else contiguous_strides
    return DTensor.from_local(
        local, placing.mesh, placing.placements, run_check=False, shape=torch.Size(shape), stride=dense(tuple(shape))
    )


def local_parameter(parameter: Tensor | None, name: str, placing: Placing) -> Tensor | None:
    """Returns a parameter that every rank has, as a plain tensor."""
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.device_mesh != placing.mesh or not all(isinstance(p, Replicate) for p in parameter.placements):
        raise RuntimeError(
            f"expected {name} to be a plain tensor that all ranks have, or a DTensor replicated over the input's "
            f"mesh, but got {name} with {list(parameter.placements)} on {parameter.device_mesh}"
        )
    return parameter.to_local()
