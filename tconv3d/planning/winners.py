"""Keeps on disk which offers won when they were timed, so that later calls and other processes take the same ones.

A winner belongs to a layer (geometry, type, memory layout, epilogue, wanted passes), volumes of about the same size
(`_about`), a GPU, and the versions of everything that decides about times. It also belongs to the set of
offers there were to choose from, because some offers depend on the exact volume. The first process that stores a
winner decides: others that have measured the same at the same time take the stored one.

This module knows neither tensors nor clocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ..runtime import cache, plain, sources
from .calibration import kind_of
from .offers import Cover, Offer, Wanted
from .problem import Device, Pass

SUFFIX = ".measured"  # suffix of the entries in the disk cache
PLANNER = "tconv3d.planning.planner"  # the module whose sources, with all families, decide what offers there are

Part = tuple[str, tuple[Pass, ...]]  # a kernel, and the passes that it computes


@dataclass(frozen=True)
class Timing:
    """Says how long a cover took."""

    name: str
    microseconds: float


@dataclass(frozen=True)
class Winner:
    """Holds the offers that won, and the times of all covers that were timed, the winner's first."""

    cover: tuple[Part, ...]
    timings: tuple[Timing, ...]
    where: str  # the GPU and the volume that were measured, in words

    def __str__(self) -> str:
        first, *others = (f"{each.name} {each.microseconds:.4g} us" for each in self.timings)
        return f"measured on {self.where}: {first}" + "".join(f", {other}" for other in others)


def parts(cover: Cover) -> tuple[Part, ...]:
    return tuple((offer.kernel, offer.passes) for offer in cover)


def name_of(cover: Cover) -> str:
    return " + ".join(offer.kernel for offer in cover)


def key(wanted: Wanted, device: Device, offers: Sequence[Offer], versions: Sequence[str]) -> str:
    """Returns the name of the entry; `versions` has those of PyTorch, CUDA, cuDNN and the driver."""
    first = next(iter(wanted.values()))
    layer = tuple(
        (problem.geometry, kind_of(problem), problem.dtype, problem.bias, problem.aligned, problem.weight_aligned)
        for problem in wanted.values()
    )
    volume = _about(first.batch * prod(first.input_size))
    gpu = replace(device, workspace_bytes=0)
    choice = sorted((offer.kernel, [which.value for which in offer.passes]) for offer in offers)
    settings = (layer, first.activation, first.norm, volume, gpu, choice)
    return cache.key("winner", sources.program(PLANNER), _kernels(), repr(settings), *versions)


def _about(positions: int) -> int:
    """Returns the size of a volume as a number that is the same within a factor of 4.

    PyTorch's operator and a kernel may be equally fast on a small volume, and several times apart on a larger one.
    """
    return positions.bit_length() // 2


@functools.cache
def _kernels() -> str:
    """Returns the digest of all kernels' sources, computed once per process."""
    return sources.digest(sources.all_headers())


def find(entry: str) -> Winner | None:
    """Returns the stored winner, or None if there is none or the entry does not describe one."""
    payload = cache.find(entry, SUFFIX)
    return None if payload is None else _read(payload)


def keep_first(entry: str, winner: Winner) -> Winner:
    """Stores a winner unless another one is stored already; returns the one that counts."""
    payload = cache.get(entry, SUFFIX, lambda: plain.dumps(winner).encode())
    found = _read(payload)
    if found is None:  # an entry that describes no winner is replaced
        replace_with(entry, winner)
    return found or winner


def replace_with(entry: str, winner: Winner) -> None:
    """Stores a winner in place of any other."""
    cache.put(entry, SUFFIX, plain.dumps(winner).encode())


def cover_of(winner: Winner, offers: Sequence[Offer]) -> Cover | None:
    """Returns the winner's offers among the present ones, or None if one of them is not there."""
    by_part = {(offer.kernel, offer.passes): offer for offer in offers}
    found = [by_part.get(part) for part in winner.cover]
    return tuple(offer for offer in found if offer is not None) if found and None not in found else None


def _read(payload: bytes) -> Winner | None:
    try:
        found: Winner = plain.loads(payload, Winner)
    except ValueError:
        return None
    return found if found.cover and found.timings else None
