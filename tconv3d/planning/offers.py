"""Defines the contract between the planner and the kernel families: offers, refusals, and the cheapest cover.

A family is asked once per call: `offer(wanted, device)` gets the wanted passes with their problems and answers with
offers and refusals. An offer says which of the wanted passes it computes, its predicted time, and how to make the
plan. A refusal says in words why the family does not compute a pass. A family knows nothing of other families: only
the planner compares. A cover is a set of offers that computes every wanted pass exactly once.

PyTorch's operator is a family like any other (`families/pytorch`). Its predictions are less certain than those for
this library's kernels, so that its offers are compared at a price above the predicted time (`Offer.surcharge`).

The caller's processor needs time for a call and for every launch. Where a GPU computes the passes of a cover in less
than that, the launches are what takes time, and a cover costs that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter, itemgetter
from typing import Protocol, TypeAlias

from . import calibration
from .calibration import Work
from .problem import Device, Pass, Plan, Problem
from .sums import adds_one

# Microseconds of the caller's processor for a launch, and for the rest of a call. On the machine of an H200 they are
# 6 to 12, and 30 or more (2026-11-19); the least that any machine is known to need counts here.
LAUNCHING, CALLING = 6.0, 10.0
MOST_LAUNCHES = 8  # no cover has more launches, as far as its price is concerned
LAUNCHES_OF_PYTORCH = 2  # launches of PyTorch's operator for each pass: the arithmetic, and a sum or a conversion

Wanted: TypeAlias = Mapping[Pass, Problem]


@dataclass(frozen=True)
class Offer:
    """Holds the passes that a family would compute, a function that counts the work, and one that makes the plan.

    The rates of the device convert work to microseconds (`calibration.py`). Counting work may take up to 0.1 s, so
    that `work` is called only if the lower bound `least` could still win.
    """

    kernel: str
    passes: tuple[Pass, ...]
    problem: Problem  # problem of the first pass, whose type and layout select the rates
    device: Device
    work: Callable[[], Work] = field(repr=False, compare=False)
    make: Callable[[], Plan] = field(repr=False, compare=False)
    least: Work | None = None
    kind: str = ""  # kind of the rates (`calibration.kind_of`); the kind of `problem` by default
    surcharge: float = 1.0  # factor from the predicted time to the price, for predictions that may be far too low
    behind: float = 0.0  # microseconds of a launch that the planner adds behind those of the family's plan

    @property
    def rates(self) -> str:
        """The kind of the rates by which the time is predicted."""
        return self.kind or calibration.kind_of(self.problem)

    @cached_property
    def taken(self) -> Offer:
        """The offer that is carried out: this one, unless it stands for several ways (`statistics.py`)."""
        return self

    @cached_property
    def microseconds(self) -> float:
        """The predicted time in microseconds; infinite if nobody has measured such a call."""
        own = calibration.microseconds(self.kernel, self.problem, self.work(), self.device, self.kind)
        return own + self.behind

    @property
    def price(self) -> float:
        """The time in microseconds by which the planner compares this offer with others."""
        return (self.microseconds - self.behind) * self.surcharge + self.behind

    @cached_property
    def least_microseconds(self) -> float:
        """A lower bound of the predicted time in microseconds; 0 if the family gives none."""
        if self.least is None:
            return 0.0
        own = calibration.microseconds(self.kernel, self.problem, self.least, self.device, self.kind)
        return own + self.behind

    def plan(self) -> Plan:
        return replace(self._made, passes=self.passes)

    @cached_property
    def _made(self) -> Plan:
        return self.make()

    @cached_property
    def launches(self) -> tuple[int, bool]:
        """The number of launches, and whether the last of them can be one with that of another offer's plan.

        A launch that packs the weight does not count: calls without gradients reuse what it has written.
        """
        plan = self._made
        if plan.aten:
            return LAUNCHES_OF_PYTORCH * len(self.passes), False
        return len(plan.launches) - (plan.packed_bytes > 0), plan.launches != () and adds_one(plan.launches[-1])


@dataclass(frozen=True)
class Refusal:
    """Says why a family does not compute some passes."""

    kernel: str
    passes: tuple[Pass, ...]
    why: str


Answer: TypeAlias = Offer | Refusal


class Family(Protocol):
    """Describes the function that the planner needs of every planner module in `families/`."""

    def offer(self, wanted: Wanted, device: Device) -> Iterable[Answer]: ...


# What a family says of a problem on a device: why it does not compute it, its work, and its plan.
WhyNot: TypeAlias = Callable[[Problem, Device], str | None]
Count: TypeAlias = Callable[[Problem, Device], Work]
Make: TypeAlias = Callable[[Problem, Device], Plan]


def one_by_one(
    passes: Sequence[Pass], kernel: str, wanted: Wanted, device: Device, why_not: WhyNot, work: Count, plan: Make
) -> list[Answer]:
    """Returns one answer for each wanted pass among `passes`, for a family that computes each of them alone."""
    asked = [problem for problem in wanted.values() if problem.which in passes]
    return [alone(kernel, problem, device, why_not, work, plan) for problem in asked]


def weight_with_bias(
    kernel: str, wanted: Wanted, device: Device, why_not: WhyNot, work: Count, plan: Make
) -> list[Answer]:
    """Returns the answer of a family whose kernel computes the gradients of weight and bias together."""
    if Pass.WEIGHT_GRAD not in wanted or Pass.BIAS_GRAD not in wanted:
        return []
    problem = replace(wanted[Pass.WEIGHT_GRAD], bias=True)
    return [alone(kernel, problem, device, why_not, work, plan, (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD))]


def alone(
    kernel: str,
    problem: Problem,
    device: Device,
    why_not: WhyNot,
    work: Count,
    plan: Make,
    passes: tuple[Pass, ...] = (),
) -> Answer:
    """Returns an offer for a problem, or the refusal that `why_not` gives; `passes` are more than the problem's."""
    passes = passes or (problem.which,)
    if refusal := why_not(problem, device):
        return Refusal(kernel, passes, refusal)
    make = partial(plan, problem, device)
    factor = calibration.surcharge(kernel, device, calibration.kind_of(problem))
    counted = partial(_with_program, work, problem, device)
    return Offer(kernel, passes, problem, device, counted, make, surcharge=factor)


def _with_program(work: Count, problem: Problem, device: Device) -> Work:
    """Returns the work of a pass and of the program over channels that follows it."""
    found = work(problem, device)
    return replace(found, cycles=found.cycles + calibration.program_cycles(problem, device))


Cover: TypeAlias = tuple[Offer, ...]


def cheapest(wanted: Sequence[Pass], offers: Sequence[Offer]) -> Cover | None:
    """Returns the offers that compute every wanted pass exactly once at the least price, or None."""
    return next(iter(ranked(wanted, offers, 1)), None)


def ranked(
    wanted: Sequence[Pass],
    offers: Sequence[Offer],
    most: int,
    by: Callable[[Offer], float] = attrgetter("price"),
    launching: bool = True,
) -> list[Cover]:
    """Returns the covers with the least prices, at most `most`, the cheapest first.

    The price of a cover is the sum of what `by` says of its offers, but with `launching` at least the time that the
    caller's processor needs for the launches. Of covers with equal prices the one with the least sum comes first.

    An offer with a lower bound is priced at the bound until it is part of one of these covers. Only then is its work
    counted, and covers are compared again.
    """
    counted = {id(offer) for offer in offers if offer.least is None}
    covers = list(_covers(frozenset(wanted), offers))

    def price(offer: Offer) -> float:
        return by(offer) if id(offer) in counted else offer.least_microseconds

    while True:
        best = list[tuple[float, float, Cover]]()  # price, sum and cover
        unknown = set[int]()
        for total, cover in sorted([(sum(map(price, cover)), cover) for cover in covers], key=itemgetter(0)):
            if len(best) == most and total >= best[-1][0]:
                break
            counts = launching and total < CALLING + LAUNCHING * MOST_LAUNCHES
            least = CALLING + LAUNCHING * len(cover) if counts else 0.0  # each offer has a launch
            if len(best) == most and (max(total, least), total) >= best[-1][:2]:
                continue
            unknown |= {id(offer) for offer in cover} - counted
            if counts and not unknown:
                least = CALLING + LAUNCHING * _launches(cover)
            best = sorted([*best, (max(total, least), total, cover)], key=itemgetter(0, 1))[:most]
        if not unknown:
            return [cover for _, _, cover in best]
        counted |= unknown


def _launches(cover: Cover) -> int:
    """Returns the number of launches of a cover's plan, where one launch adds the parts of two plans."""
    found = [offer.launches for offer in cover]
    return sum(number for number, _ in found) - max(0, sum(adds for _, adds in found) - 1)


def fastest(wanted: Sequence[Pass], offers: Sequence[Offer]) -> Cover | None:
    """Returns the cover with the least predicted time, however uncertain the predictions are, or None."""
    return next(iter(ranked(wanted, offers, 1, attrgetter("microseconds"), launching=False)), None)


def _covers(wanted: frozenset[Pass], offers: Sequence[Offer]) -> Iterator[Cover]:
    """Yields all covers, which are few, because at most three passes are wanted."""
    if not wanted:
        yield ()
        return
    first = next(which for which in Pass if which in wanted)
    for offer in offers:
        if first in offer.passes and wanted.issuperset(offer.passes):
            for rest in _covers(wanted - set(offer.passes), offers):
                yield (offer, *rest)
