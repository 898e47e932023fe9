"""Checks that neighbouring ranks compute the same volume, before they use each other's rows.

Ranks whose volumes differ would wait for messages that never come, or read rows that belong elsewhere. So ranks that
exchange rows also exchange labels of 56 bytes: size, type and placements of the volume. On CPU tensors labels arrive
before rows are sent, and a difference is an error in words. On CUDA tensors labels travel with the rows and are
compared on the stream, without waiting for the GPU: a difference is a failed assertion, at the latest when the
process waits for the GPU. This module knows neither rows nor layers.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_TAG = 1  # rows have the tag 0

Label = tuple[int, ...]  # five sizes, the bytes of an element, and a hash of what else must be equal


def label_of(volume: DTensor, function: str, channels_last: bool) -> Label:
    """Returns what all ranks must have in common: size, function, type, placements and memory layout."""
    text = repr((function, volume.dtype, volume.placements, channels_last))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    return *volume.shape, volume.element_size(), number


@functools.lru_cache(maxsize=256)
def _tensor(label: Label, device: str) -> Tensor:
    return torch.tensor(label, dtype=torch.int64, device=device)


@dataclass
class Labels:
    """Holds the labels of one batch of messages: this rank's, and those that arrive, by rank."""

    label: Label
    mine: Tensor
    theirs: dict[int, Tensor]

    def operations(self, group: Any) -> list[Any]:
        """Returns the operations that carry the labels in one batch with the rows."""
        receives = [dist.P2POp(dist.irecv, tensor, rank, group) for rank, tensor in self.theirs.items()]
        return [*receives, *(dist.P2POp(dist.isend, self.mine, rank, group) for rank in self.theirs)]

    def exchange(self, group: Any) -> list[Any]:
        """Exchanges labels and compares them, before rows are sent; returns what this rank still sends."""
        arriving = [dist.irecv(tensor, rank, group, tag=_TAG) for rank, tensor in self.theirs.items()]
        sending = [dist.isend(self.mine, rank, group, tag=_TAG) for rank in self.theirs]
        for work in arriving:
            if work is not None:  # None on a rank outside the group, which has no neighbours
                work.wait()
        for rank, tensor in self.theirs.items():
            if not torch.equal(tensor, self.mine):
                raise RuntimeError(_difference(self.label, rank, tuple(tensor.tolist())))
        return sending

    def compare(self) -> None:
        """Compares labels that have arrived with the rows, on the current stream."""
        for rank, tensor in self.theirs.items():
            torch._assert_async((tensor == self.mine).all(), f"rank {rank} computes another volume than this rank")


def labels(label: Label, device: str, ranks: Iterable[int]) -> Labels:
    """Returns the labels of a batch of messages to or from these ranks. Both sides of a message send theirs."""
    mine = _tensor(label, device)
    return Labels(label, mine, {rank: torch.empty_like(mine) for rank in sorted(ranks)})


def _difference(mine: Label, rank: int, theirs: Label) -> str:
    if mine[:6] != theirs[:6]:
        return (
            f"expected all ranks to compute one volume, but this rank's has size {list(mine[:5])} with {mine[5]} "
            f"bytes per element, and rank {rank}'s has size {list(theirs[:5])} with {theirs[5]} bytes per element"
        )
    return (
        f"expected all ranks to compute one volume of size {list(mine[:5])} by the same function, but rank {rank}'s "
        "differs from this rank's in function, type, placements or memory layout"
    )
