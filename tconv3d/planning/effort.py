"""Limits the work of the searches for builds, so that every call is planned within 0.2 s.

A search looks at candidates in the order of lower bounds of their predicted times. It finds the best candidate early,
and then spends most of its time on the proof that no other is better. A limit ends the proof. It counts candidates
and not seconds, so that a plan is the same on every machine, however busy the machine is.

All limits stand here. A backward pass may need six searches, one family after the other, so that most searches must
end after 20 to 40 ms. Limits are as large as the layers of the benchmark table need to be predicted at most 1% slower
than without limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MMA_BUILDS = 1200  # builds with a box of the kernel on mma.sync, each at 60 microseconds
WARP_TILINGS = 300  # tilings that fit of the weight gradient on mma.sync, each at 40 microseconds
HOPPER_BOXES = 40  # boxes for one tiling of the weight gradient on Hopper, each at 50 microseconds
# Bounds of tilings of the halo kernel, each at 8 microseconds, where a prediction counts like several bounds: for all
# builds of a search, for one of them, and for the build that was chosen.
HALO_BUILDS, HALO_BUILD, HALO_TILING = 4000, 1500, 12000

_unlimited: ContextVar[bool] = ContextVar("searches go on until the best candidate is proven", default=False)


@contextmanager
def unlimited() -> Iterator[None]:
    """Lifts all limits within its context, for tests and to measure what the limits cost.

    Choices that were searched before with limits are still found in memory and in the disk cache.
    """
    token = _unlimited.set(True)
    try:
        yield
    finally:
        _unlimited.reset(token)


class Effort:
    """Counts the candidates that a search looks at; a part of it has a limit of its own and counts for the whole."""

    __slots__ = ("left", "limited", "whole")

    def __init__(self, most: int, whole: Effort | None = None) -> None:
        self.left, self.limited, self.whole = most, not _unlimited.get(), whole

    def part(self, most: int) -> Effort:
        return Effort(most, self)

    def count(self, candidates: int = 1) -> None:
        self.left -= candidates
        if self.whole is not None:
            self.whole.left -= candidates

    @property
    def spent(self) -> bool:
        """Tells whether a search that has found any candidate must end."""
        return self.limited and (self.left <= 0 or (self.whole is not None and self.whole.left <= 0))
