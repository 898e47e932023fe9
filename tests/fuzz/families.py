"""Which kernel families planned something: a search that never reaches a family says nothing of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from tconv3d.planning import planner
from tconv3d.planning.problem import Plan


def names() -> list[str]:
    return [name for name, _ in planner.FAMILIES]


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """The plans that each family makes."""
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
