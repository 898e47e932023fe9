"""Offers blocks on mma.sync for taps that reach far: between the points that they read, or beyond the volume.

With dilation, the positions of a block may be of one class (planning/classes.py): its halo then has only what its
taps read of x, where the halo of neighbouring positions has everything in between. If many taps read zeros beyond the
volume, a block leaves out the steps that read nothing else (crop.py). Nobody has measured these builds, which are
therefore an offer of their own beside `planner.py`, with derived rates: where times decide, both are timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import inf

from ...planning import calibration, offers
from ...planning.geometry import Triple
from ...planning.offers import Answer, Offer, Wanted
from ...planning.problem import Device, Plan, Problem
from ...planning.repertoire import Repertoire, searched, typical_problems
from ...planning.side import Side
from . import crop, model, planner, search
from .model import Candidate
from .work import Work, lattices_of, works

KERNEL = "mma_far"

Choice = planner.Choice
_repertoire = Repertoire[tuple[object, ...], tuple[int, Triple], Choice]()


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    found = offers.one_by_one(planner.PASSES, KERNEL, wanted, device, why_never, work, plan)
    return [
        replace(each, least=planner.least(each.problem, device)) if isinstance(each, Offer) else each
        for each in found
    ]


def why_never(problem: Problem, device: Device) -> str | None:
    """Returns a reason for refusal that is known without a search for a build, or None."""
    if refusal := planner.why_never(problem, device):
        return refusal
    side = Side.of(problem)
    if lattices_of(side) or crop.is_worth(side):
        return None
    return "no dimension with several taps has dilation, and most taps lie inside the volume"


def work(problem: Problem, device: Device) -> calibration.Work:
    """Returns the work of the launches as the model predicts it."""
    found = chosen(problem, device)
    if found is None or planner.why_too_far(found, problem):
        return calibration.Work(2, inf)  # work that is never the cheapest
    return calibration.Work(2, found.cycles(device))


def plan(problem: Problem, device: Device) -> Plan:
    found = chosen(problem, device)
    assert found is not None, "a plan of work that is infinite"
    return planner.plan_of(found, problem)


def forget() -> None:
    """Forgets all choices, so that the next volume of every layer counts as its first."""
    _own.cache_clear()
    _repertoire.forget()


def chosen(problem: Problem, device: Device) -> Candidate | None:
    """Returns a build of the layer's repertoire (few builds for all volumes) with its best box, or None."""
    choice = _repertoire.choose(
        planner.layer_of(problem, device),
        (problem.batch, problem.input_size),
        lambda: _own(problem, device),
        lambda: (found for each in typical_problems(problem) if (found := _own(each, device)) is not None),
        lambda choice, _: best.cycles(device) if (best := planner.best(problem, device, choice)) else inf,
    )
    return None if choice is None else planner.best(problem, device, choice)


@lru_cache(maxsize=1024)
def _own(problem: Problem, device: Device) -> Choice | None:
    """Returns the build that the model predicts to be fastest for this volume, or None."""
    settings = planner.plain(problem), replace(device, name="")
    found: Choice | None = searched(__name__, settings, Choice | None, lambda: _fastest(*settings))
    return found


def _fastest(problem: Problem, device: Device) -> Choice | None:
    found = search.fastest(planner.sides(problem, device), problem.item_bytes, device, divided)
    return None if found is None else (found.build, found.rows)


def divided(side: Side) -> list[Work]:
    """Returns the divisions of taps into rows and inner taps that are worth considering."""
    crops = crop.is_worth(side)
    numbers = (*((0,) if crops else ()), *lattices_of(side))
    return [work for lattices in numbers for work in works(side, lattices, crops)]


def candidates(problem: Problem, device: Device) -> Iterator[Candidate]:
    """Yields every build that fits the device, with its boxes."""
    for side, copy, rows in planner.sides(problem, device):
        yield from model.of_works(divided(side), copy, problem.item_bytes, device, rows)
