"""Counts the plans of each kernel family, because a search that never reaches a family does not test it.

Some families take only large volumes, because others are faster for small ones, but the emulator can run only small
volumes. A case can name such a family to have its limits lifted (`FAVOURED`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from types import ModuleType
from typing import Any
from unittest.mock import patch

from tconv3d.families.unfold import planner as unfold_planner
from tconv3d.families.up import backward as up_backward_planner
from tconv3d.families.up import grad as up_grad_planner
from tconv3d.planning import planner
from tconv3d.planning.problem import Pass, Plan

Limits = dict[ModuleType, dict[str, Any]]  # values of constants, by planner module
NEVER = {"MIN_GAIN": inf}
ANY_GAIN = {"MIN_GAIN": dict.fromkeys(Pass, 0.0), "MIN_CHANNELS": 1, "MIN_POSITIONS": 1}
FAVOURED: dict[str, Limits] = {
    "": {},
    "unfold": {unfold_planner: {"MIN_GAIN": 0.0}},
    "up_backward": {unfold_planner: NEVER, up_backward_planner: {"MIN_GAIN": 0.0}},  # also up_backward_last
    "up_grad": {unfold_planner: NEVER, up_backward_planner: NEVER, up_grad_planner: ANY_GAIN},
}


def names() -> list[str]:
    return [name for name, _ in planner.FAMILIES]


@contextlib.contextmanager
def limited(limits: Limits) -> Iterator[None]:
    """Gives constants of planners other values within the context; cached plans are not made again."""
    with contextlib.ExitStack() as stack:
        for planner_of, constants in limits.items():
            stack.enter_context(patch.multiple(planner_of, **constants))
        yield


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Yields a counter of the plans that each family makes within the context."""
    counts: Counter[str] = Counter()

    def counting(name: str, plan: Callable[..., Plan | None]) -> Callable[..., Plan | None]:
        def counting_plan(*arguments: Any) -> Plan | None:
            found = plan(*arguments)
            if found is not None:
                counts[name] += 1
            return found

        return counting_plan

    with contextlib.ExitStack() as stack:
        for name, family in planner.FAMILIES:
            for function in ("plan", "plan_together"):
                if hasattr(family, function):
                    stack.enter_context(patch.object(family, function, counting(name, getattr(family, function))))
        yield counts
