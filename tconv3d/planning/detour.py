"""Plans a layer by way of another layer: operands are copied, and the families plan the other layer.

`folding.py` and `aligning.py` offer such plans. They ask the planner for the cheapest cover of the other layer, and
join its plans with the launch that copies. This module knows plans and places in a workspace, and no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from .launch import Launch
from .offers import Cover, Wanted
from .problem import Device, Plan
from .workspace import placed

Asking: TypeAlias = Callable[[Wanted, Device], Cover]  # returns the cheapest offers of all families
Planning: TypeAlias = Callable[[Cover, Wanted, Device], Plan]  # returns one plan for all offers of a cover


def renamed(plan: Plan, names: Mapping[str, str]) -> list[Launch]:
    """Returns the launches of a plan with other names for some operands."""
    return [
        replace(launch, pointers=tuple(names.get(name, name) for name in launch.pointers)) for launch in plan.launches
    ]


def behind_copies(plan: Plan, copy: Launch, copies: Mapping[str, tuple[str, int]], why: str) -> Plan:
    """Returns the plan of gradients that read copies of operands, which `copy` writes.

    `copies` has the region and its bytes for the name of each operand that is copied.
    """
    workspace_bytes, regions = placed(copies.values(), plan.workspace_bytes)
    first, *others = renamed(plan, {operand: region for operand, (region, _) in copies.items()})
    return replace(
        plan,
        kernel=f"{copy.kernel} + {plan.kernel}",
        why=f"{why}: {plan.why}",
        # An overlapping launch may read a copy before it waits, so the one after the copy must not overlap.
        launches=(copy, replace(first, overlaps=False), *others),
        workspace_bytes=workspace_bytes,
        regions=(*plan.regions, *regions),
        packed_bytes=0,
        preparing=0,
        kept=None,
    )
