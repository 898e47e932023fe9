"""Adds tensors of all ranks of a mesh in the order of the ranks, so that equal inputs give equal bits.

An all-reduce may add in any order, which depends on the backend and on the network. Here every rank adds one piece of
the vector, over all ranks in their order, and the pieces are gathered: as many bytes travel as in an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# PyTorch 2.13 renames the function and warns about the old name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that sums over ranks are added in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def ordered_sum(tensor: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Tensor:
    """Returns the sum of a tensor over the ranks of these mesh dimensions, equal on all of them, to the bit."""
    result = tensor
    for mesh_dim in mesh_dims:
        if mesh.size(mesh_dim) > 1:
            result = _sum_of_group(result, mesh.get_group(mesh_dim))
    return result


def _sum_of_group(tensor: Tensor, group: Any) -> Tensor:
    ranks = dist.get_world_size(group)
    count = -(-tensor.numel() // ranks)
    flat = tensor.new_zeros(ranks * count)
    flat[: tensor.numel()] = tensor.reshape(-1)
    arrived = torch.empty_like(flat)
    dist.all_to_all_single(arrived, flat, group=group)
    pieces = arrived.view(ranks, count)
    total = pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    _gather(flat, total, group=group)
    return flat[: tensor.numel()].view(tensor.shape)


def ordered_sums(tensors: Sequence[Tensor | None], mesh: DeviceMesh, mesh_dims: Sequence[int]) -> list[Tensor | None]:
    """Returns the sums of several tensors over the ranks, with one message for all; None stays None."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return list(tensors)
    total = ordered_sum(torch.cat([tensor.reshape(-1) for tensor in present]), mesh, mesh_dims)
    pieces = iter(total.split([tensor.numel() for tensor in present]))
    return [None if tensor is None else next(pieces).view(tensor.shape) for tensor in tensors]


def gathered(tensor: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Tensor:
    """Returns the tensors of all ranks of these mesh dimensions [ranks, ...], in one order on all of them."""
    result = tensor.unsqueeze(0)
    for mesh_dim in mesh_dims:
        if mesh.size(mesh_dim) > 1:
            group = mesh.get_group(mesh_dim)
            ranks = dist.get_world_size(group)
            found = result.new_empty((ranks, *result.shape))
            _gather(found.view(-1), result.contiguous().view(-1), group=group)
            result = found.flatten(0, 1)
    return result


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Tensor:
        ctx.where = mesh, mesh_dims
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = ordered_sum(grad.to(sum_dtype(grad.dtype)), *ctx.where)
        return total.to(grad.dtype), None, None


def replicated(tensor: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Tensor:
    """Returns a tensor that all ranks have, whose gradient is the sum of the gradients that the ranks compute."""
    return _Replicated.apply(tensor, mesh, tuple(mesh_dims))
