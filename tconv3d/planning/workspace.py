"""Places regions of a workspace one behind the other. This module knows names and sizes, not what regions hold."""

from __future__ import annotations

from collections.abc import Iterable

from .scalars import round_up

ALIGN = 256  # bytes to whose multiples regions begin

Regions = tuple[tuple[str, int], ...]  # names of regions, and their offsets in bytes


def placed(sizes: Iterable[tuple[str, int]], end: int = 0) -> tuple[int, Regions]:
    """Returns the size in bytes of a workspace, and regions of these names and sizes that begin behind `end`."""
    regions = []
    for name, size in sizes:
        start = round_up(end, ALIGN)
        regions.append((name, start))
        end = start + size
    return end, tuple(regions)
