"""Limits the work of the searches for builds, so that every call is planned within 0.2 s.

A search looks at candidates in the order of lower bounds of their predicted times. It finds the best candidate early,
and then spends most of its time on the proof that no other is better. A limit ends the proof. It counts candidates and
not seconds, so that a plan is the same on every machine, however busy the machine is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MMA_BUILDS = 500
WARP_TILINGS = 200
HOPPER_BOXES = 40
HALO_BUILD = 1500
HALO_BUILDS = 4000

_unlimited: ContextVar[bool] = ContextVar("searches go on until the best candidate is proven to be the best", default=False)


@contextmanager
def unlimited() -> Iterator[None]:
    """Lifts all limits within its context, for tests and to measure what the limits cost."""
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
