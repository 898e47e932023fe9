"""Compares the ways to get the moments of a forward pass's result, for the statistics of a norm that follows.

A kernel family may leave moments in its own kernel. Every family may also offer the layer without the norm, and a
pass that reads the result computes its moments. The planner asks for both, and this module makes one offer of each
family: the cheaper way. The price of the pass is part of the offer (`Offer.behind`); its launch is added to the plan
by the norm's planner (families/norm), which sees from `Plan.moments` that the plan leaves none.

This module knows nothing of which families there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from . import calibration
from .offers import Answer, Offer, Refusal, Wanted
from .problem import Device, Plan


@dataclass(frozen=True)
class Cheaper(Offer):
    """An offer of two ways of one family; the one with the least price is taken when the price is asked for."""

    ways: tuple[Offer, ...] = ()

    @classmethod
    def of(cls, first: Offer, second: Offer) -> Cheaper:
        least = first.least if second.least is not None else None  # work is counted at once unless both have a bound
        return cls(
            first.kernel,
            first.passes,
            first.problem,
            first.device,
            first.work,
            first.make,
            least,
            ways=(first, second),
        )

    @cached_property
    def taken(self) -> Offer:
        first, second = sorted(self.ways, key=attrgetter("least_microseconds"))
        # The work of the second way is not counted, which may take a search, where its bound tells enough.
        return first if first.price <= second.least_microseconds else min(first, second, key=attrgetter("price"))

    @cached_property
    def microseconds(self) -> float:
        return self.taken.microseconds

    @property
    def price(self) -> float:
        return self.taken.price

    @cached_property
    def least_microseconds(self) -> float:
        return min(way.least_microseconds for way in self.ways)

    def plan(self) -> Plan:
        return self.taken.plan()


def without_norm(wanted: Wanted) -> Wanted:
    """Returns the wanted passes as if no norm followed."""
    return {which: replace(problem, norm=None) for which, problem in wanted.items()}


def answers(plain: Sequence[Answer], leaving: Sequence[Answer], wanted: Wanted, device: Device) -> list[Answer]:
    """Returns the answers for a forward pass that a norm follows.

    `plain` are the answers for the same pass without the norm, and `leaving` those of the families whose kernels
    leave moments.
    """
    (problem,) = wanted.values()
    behind = calibration.reading_microseconds(problem, device)
    own = {offer.kernel: offer for offer in leaving if isinstance(offer, Offer)}
    found: list[Answer] = []
    for answer in plain:
        way = own.pop(answer.kernel, None)
        if isinstance(answer, Refusal):
            found.append(answer if way is None else way)
            continue
        passed = replace(answer, behind=behind)
        found.append(passed if way is None else Cheaper.of(way, passed))
    return [*found, *own.values()]
