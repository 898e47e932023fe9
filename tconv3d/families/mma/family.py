"""Offers all kinds of blocks on mma.sync: those of `planner.py`, and those of `ahead.py` and `far.py`."""

from __future__ import annotations

from ...planning.offers import Answer, Offer, Wanted
from ...planning.problem import Device
from . import ahead, far, planner

HAS_EPILOGUE = planner.HAS_EPILOGUE
HOLDS_CHANNELS = planner.HOLDS_CHANNELS
leaves_moments = planner.leaves_moments


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    others = [*ahead.offer(wanted, device), *far.offer(wanted, device)]
    return [*planner.offer(wanted, device), *(answer for answer in others if isinstance(answer, Offer))]


def forget() -> None:
    """Forgets all choices, so that the next volume of every layer counts as its first."""
    planner.forget()
    ahead.forget()
    far.forget()
