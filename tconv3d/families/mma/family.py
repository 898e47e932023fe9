"""Offers both kinds of blocks on mma.sync: those of `planner.py`, and those of `ahead.py` where they are possible."""

from __future__ import annotations

from ...planning.offers import Answer, Offer, Wanted
from ...planning.problem import Device
from . import ahead, planner

HAS_EPILOGUE = planner.HAS_EPILOGUE
HOLDS_CHANNELS = planner.HOLDS_CHANNELS
leaves_moments = planner.leaves_moments


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    others = [answer for answer in ahead.offer(wanted, device) if isinstance(answer, Offer)]
    return [*planner.offer(wanted, device), *others]


def forget() -> None:
    """Forgets all choices, so that the next volume of every layer counts as its first."""
    planner.forget()
    ahead.forget()
