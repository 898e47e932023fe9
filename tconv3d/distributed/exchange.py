"""Exchanges rows of a split tensor between neighbouring ranks, one dimension after another.

`Pieces` collects what a rank knows of the whole volume: its own shard, and the halos that have arrived. An `Exchange`
is one dimension's batch of messages in flight. Messages are batched point-to-point operations between neighbours; a
halo arrives in the rows of the buffer that a kernel reads it from. This module knows boxes and tensors, not layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import agreement
from .shards import Box, shared, volume


@dataclass(frozen=True)
class Neighbours:
    """Finds the ranks beside this one, and says in which order a message has its elements.

    The order must be equal on all ranks. It comes from the strides of the whole DTensor, never from those of a shard.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int | None, ...]  # the mesh dimension that splits depth, height and width
    channels_last: bool
    label: agreement.Label  # what neighbours must have in common

    def group(self, dim: int) -> Any:
        mesh_dim = self.mesh_dims[dim]
        assert mesh_dim is not None
        return self.mesh.get_group(mesh_dim)

    def rank(self, dim: int, step: int) -> int:
        """Returns the global rank of the neighbour that is `step` shards away along a dimension."""
        group = self.group(dim)
        return dist.get_global_rank(group, dist.get_rank(group) + step)


def part(tensor: Tensor, box: Box, inside: Box) -> Tensor:
    """Returns the view of a tensor [N, C, D, H, W] with the rows `box` that has the rows `inside`."""
    slices = [slice(i.start - b.start, i.stop - b.start) for b, i in zip(box, inside, strict=True)]
    index: tuple[slice, ...] = (slice(None), slice(None), *slices)
    return tensor[index]


@dataclass
class Pieces:
    """Holds disjoint pieces of the whole volume [N, C, D, H, W], by the rows that they have."""

    channels_last: bool  # the order of elements in messages
    pieces: list[tuple[Box, Tensor]] = field(default_factory=list)

    def add(self, box: Box, tensor: Tensor) -> None:
        self.pieces.append((box, tensor))

    def known(self, box: Box) -> int:
        """Returns how many positions of a box are known."""
        return sum(volume(shared(has, box)) for has, _ in self.pieces)

    def copy_into(self, target: Tensor, box: Box) -> None:
        """Copies all known rows of a box into a tensor that has these rows."""
        for has, tensor in self.pieces:
            both = shared(has, box)
            if volume(both):
                part(target, box, both).copy_(part(tensor, has, both))

    def gather(self, box: Box, dim: int) -> Tensor:
        """Returns a box of known rows in one piece of memory, rows along `dim` outermost.

        Nothing is copied if one of the pieces has the rows in this order.
        """
        for has, tensor in self.pieces:
            if shared(has, box) == box:
                rows_first = part(tensor, has, box).permute(memory_order(dim, self.channels_last))
                if rows_first.is_contiguous():
                    return rows_first
        buffer = rows_outermost(self.pieces[0][1], box, dim, self.channels_last)
        self.copy_into(buffer, box)
        return buffer.permute(memory_order(dim, self.channels_last))


def memory_order(dim: int, channels_last: bool) -> tuple[int, ...]:
    """Returns the dimensions from the outermost to the innermost in memory: `dim` (0: depth) first."""
    order = (0, 2, 3, 4, 1) if channels_last else (0, 1, 2, 3, 4)
    return (dim + 2, *(each for each in order if each != dim + 2))


def rows_outermost(like: Tensor, box: Box, dim: int, channels_last: bool) -> Tensor:
    """Returns an uninitialized tensor [N, C, *box] whose rows along `dim` are contiguous pieces of memory.

    A message of whole rows can therefore be received in place.
    """
    shape = (*like.shape[:2], *map(len, box))
    order = memory_order(dim, channels_last)
    memory = torch.empty([shape[each] for each in order], dtype=like.dtype, device=like.device)
    back = [order.index(each) for each in range(5)]
    return memory.permute(back)


@dataclass
class Exchange:
    """Holds the messages of one dimension that are in flight."""

    works: list[Any]
    alive: list[Tensor]  # memory that the messages are read from
    labels: agreement.Labels | None = None  # to be compared when they have arrived

    def wait(self) -> None:
        """Waits until all messages have arrived; on CUDA, makes the current stream wait."""
        for work in self.works:
            work.wait()
        self.alive.clear()
        if self.labels is not None:
            self.labels.compare()


_connected: WeakSet[Any] = WeakSet()  # process groups


def _connect(group: Any, device: str) -> None:
    """Connects all ranks of an NCCL group, once.

    NCCL wants all ranks to take part in a group's first operation, and a rank may have no neighbour to talk to.
    """
    if group not in _connected and dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    _connected.add(group)


def start(neighbours: Neighbours, dim: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Exchange:
    """Starts to send and receive messages, by the neighbour (-1 or +1) along a dimension. They are contiguous."""
    group = neighbours.group(dim)
    _connect(group, neighbours.mesh.device_type)
    operations = [
        dist.P2POp(operation, message, neighbours.rank(dim, step), group)
        for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
        for step, message in messages.items()
        if message.numel()
    ]
    if not operations:
        return Exchange([], [])
    device = neighbours.mesh.device_type
    labels = agreement.labels(neighbours.label, device, {operation.peer for operation in operations})
    if device == "cpu":
        works = labels.exchange(group)
        return Exchange([*works, *dist.batch_isend_irecv(operations)], list(sends.values()))
    works = dist.batch_isend_irecv([*operations, *labels.operations(group)])
    return Exchange(works, list(sends.values()), labels)
