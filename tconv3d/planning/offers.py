"""The contract between the planner and the kernel families: offers, refusals, and the cheapest cover.

A family is asked once per call: `offer(wanted, device)` gets the wanted passes with their problems and answers with
offers and refusals. An offer says which of the wanted passes it computes, how long that is predicted to take, and how
to make the plan. A refusal says in words why the family does not compute a pass. A family knows nothing of the other
families: the planner compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol, TypeAlias

from . import calibration
from .calibration import Work
from .problem import Device, Pass, Plan, Problem

Wanted: TypeAlias = Mapping[Pass, Problem]


@dataclass(frozen=True)
class Offer:
    """What a family would compute, the work that it would be, and the plan.

    A family counts work, and the rates of the device make microseconds of it (`calibration.py`). Counting may take
    long: `work` is called only if `least`, a lower bound that takes no time to find, could still win.
    """

    kernel: str
    passes: tuple[Pass, ...]
    problem: Problem  # of the first of the passes: rates depend on its type and layout
    device: Device
    work: Callable[[], Work] = field(repr=False, compare=False)
    make: Callable[[], Plan] = field(repr=False, compare=False)
    least: Work | None = None

    @cached_property
    def microseconds(self) -> float:
        """The predicted time."""
        return calibration.microseconds(self.kernel, self.problem, self.work(), self.device)

    @cached_property
    def least_microseconds(self) -> float:
        """What it takes at least; 0 if nobody has said it."""
        if self.least is None:
            return 0.0
        return calibration.microseconds(self.kernel, self.problem, self.least, self.device)

    def plan(self) -> Plan:
        return replace(self.make(), passes=self.passes)


@dataclass(frozen=True)
class Refusal:
    """Why a family does not compute some passes."""

    kernel: str
    passes: tuple[Pass, ...]
    why: str


Answer: TypeAlias = Offer | Refusal


class Family(Protocol):
    """What the planner needs of a kernel family: a module of `families/` has this function."""

    def offer(self, wanted: Wanted, device: Device) -> Iterable[Answer]: ...


def one_by_one(
    passes: Sequence[Pass],
    kernel: str,
    wanted: Wanted,
    device: Device,
    why_not: Callable[[Problem, Device], str | None],
    work: Callable[[Problem, Device], Work],
    plan: Callable[[Problem, Device], Plan],
) -> list[Answer]:
    """The answers of a family that computes each of some passes alone; it has no answer for others."""
    asked = [problem for problem in wanted.values() if problem.which in passes]
    return [alone(kernel, problem, device, why_not, work, plan) for problem in asked]


def alone(
    kernel: str,
    problem: Problem,
    device: Device,
    why_not: Callable[[Problem, Device], str | None],
    work: Callable[[Problem, Device], Work],
    plan: Callable[[Problem, Device], Plan],
) -> Answer:
    """The answer for one pass."""
    if refusal := why_not(problem, device):
        return Refusal(kernel, (problem.which,), refusal)
    make = partial(plan, problem, device)
    return Offer(kernel, (problem.which,), problem, device, partial(work, problem, device), make)


def weight_with_bias(
    kernel: str,
    wanted: Wanted,
    device: Device,
    why_not: Callable[[Problem, Device], str | None],
    work: Callable[[Problem, Device], Work],
    plan: Callable[[Problem, Device], Plan],
) -> list[Answer]:
    """The gradients of weight and bias by a kernel that adds up the one while it computes the other."""
    if Pass.WEIGHT_GRAD not in wanted or Pass.BIAS_GRAD not in wanted:
        return []
    passes = (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD)
    problem = replace(wanted[Pass.WEIGHT_GRAD], bias=True)
    if refusal := why_not(problem, device):
        return [Refusal(kernel, passes, refusal)]
    make = partial(plan, problem, device)
    return [Offer(kernel, passes, problem, device, partial(work, problem, device), make)]


def cheapest(wanted: Sequence[Pass], offers: Sequence[Offer]) -> tuple[Offer, ...] | None:
    """The offers that compute every wanted pass exactly once in the least predicted time, or None.

    An offer with a lower bound costs no more than that until it is part of the cheapest cover: only then is its work
    counted, and the covers are compared once more.
    """
    counted = {id(offer) for offer in offers if offer.least is None}

    def price(offer: Offer) -> float:
        return offer.microseconds if id(offer) in counted else offer.least_microseconds

    while True:
        best = _cover(frozenset(wanted), offers, price)
        unknown = {id(offer) for offer in best or ()} - counted
        if not unknown:
            return best
        counted |= unknown


def _cover(
    wanted: frozenset[Pass], offers: Sequence[Offer], price: Callable[[Offer], float]
) -> tuple[Offer, ...] | None:
    """The cheapest cover at these prices. There are at most three passes, so all covers are tried."""
    if not wanted:
        return ()
    first = next(which for which in Pass if which in wanted)
    covers = []
    for offer in offers:
        if first in offer.passes and wanted.issuperset(offer.passes):
            rest = _cover(wanted - set(offer.passes), offers, price)
            if rest is not None:
                covers.append((offer, *rest))
    return min(covers, key=lambda cover: sum(map(price, cover)), default=None)
