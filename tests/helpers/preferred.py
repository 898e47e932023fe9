"""Kernels that a test wants, whatever they are predicted to take: the planner's prices and families for a while."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

from tconv3d.planning import calibration, offers, planner
from tconv3d.planning.offers import Answer, Offer, Wanted
from tconv3d.planning.problem import Device, Pass, Plan
from tconv3d.torch_ops import executor

ALMOST_NOTHING = 1e-9  # times the predicted time: what an offer of a preferred kernel costs


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """Nothing planned before is used, and nothing planned meanwhile is used afterwards."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    planner.forget()
    executor.forget()


@contextlib.contextmanager
def preferring(*kernels: str) -> Iterator[None]:
    """Every pass that one of these kernels can compute goes to it, to the first of them that can."""
    with priced(*kernels), forgetting():
        yield


@contextlib.contextmanager
def priced(*kernels: str) -> Iterator[None]:
    """Offers of these kernels cost almost nothing, the first the least; launches are free. Plans stay planned."""
    predicted = calibration.microseconds
    factors = {kernel: ALMOST_NOTHING ** (len(kernels) - number) for number, kernel in enumerate(kernels)}

    def price(kernel: str, *rest: Any) -> float:
        return predicted(kernel, *rest) * factors.get(kernel, 1.0)

    measured = calibration.surcharge

    def surcharge(kernel: str, device: Device, kind: str = "") -> float:
        return 1.0 if kernel in factors else measured(kernel, device, kind)

    patches = {"microseconds": price, "surcharge": surcharge}
    with patch.multiple(calibration, **patches), patch.multiple(offers, LAUNCHING=0.0, CALLING=0.0):
        yield


@contextlib.contextmanager
def only(*names: str) -> Iterator[None]:
    """No other families are asked: what these do not compute is an error."""
    families = tuple(pair for pair in planner.FAMILIES if pair[0] in names)
    assert len(families) == len(names), names
    with patch.object(planner, "FAMILIES", families), forgetting():
        yield


def joint_plan(family: ModuleType, wanted: Wanted, device: Device) -> Plan:
    """The plan of the family's offer for the most of the wanted passes."""
    offers = [answer for answer in family.offer(wanted, device) if isinstance(answer, Offer)]
    found: Plan = max(offers, key=lambda offer: len(offer.passes)).plan()
    return found


def kernels_of(wanted: Wanted, device: Device) -> dict[Pass, str]:
    """The kernel whose offer the planner takes for each of the passes."""
    return {which: offer.kernel for offer in planner.taken(wanted, device) for which in offer.passes}


@contextlib.contextmanager
def counted(kinds: Callable[[Offer, Plan], Iterable[str]] = lambda *_: ()) -> Iterator[Counter[str]]:
    """The plans that each family makes, by its name and by what `kinds` calls them."""
    counts: Counter[str] = Counter()

    def counting(name: str, offer: Offer) -> Callable[[], Plan]:
        def counting_make() -> Plan:
            made = offer.make()
            counts.update((name, *kinds(offer, made)))
            return made

        return counting_make

    def watched(name: str, offer: Callable[[Wanted, Device], list[Answer]]) -> Callable[..., list[Answer]]:
        def watched_offer(wanted: Wanted, device: Device) -> list[Answer]:
            return [
                replace(each, make=counting(name, each)) if isinstance(each, Offer) else each
                for each in offer(wanted, device)
            ]

        return watched_offer

    with contextlib.ExitStack() as stack:
        for name, family in planner.FAMILIES:
            stack.enter_context(patch.object(family, "offer", watched(name, family.offer)))
        yield counts
