"""Geometry, type, layout and GPU -> which kernel, which tile. A pure function of plain data, explainable.

A kernel family is a module with `why_not(problem, device)` (a reason, or None if it takes the problem) and
`plan(problem, device)`. The first family of `FAMILIES` that takes a problem gets it.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

from . import (
    depthwise_planner,
    direct_planner,
    few_inputs_planner,
    few_outputs_planner,
    few_weight_grad_planner,
    halo_planner,
    hopper_weight_grad_planner,
    weight_grad_planner,
)
from .problem import Device, Plan, Problem

FAMILIES: tuple[tuple[str, ModuleType], ...] = (
    ("few_outputs", few_outputs_planner),
    ("few_inputs", few_inputs_planner),
    ("few_weight_grad", few_weight_grad_planner),
    ("halo", halo_planner),
    ("hopper_weight_grad", hopper_weight_grad_planner),
    ("tensor_weight_grad", weight_grad_planner),
    ("depthwise", depthwise_planner),
    ("direct", direct_planner),
)


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device) -> Plan:
    refusals = []
    for name, family in FAMILIES:
        refusal = family.why_not(problem, device)
        if refusal is None:
            return family.plan(problem, device)
        refusals.append(f"{name}: {refusal}")
    raise NotImplementedError(f"no kernel takes {problem} on {device}: " + "; ".join(refusals))


def refusals(problem: Problem, device: Device) -> dict[str, str]:
    """Why each family that comes before the chosen one was passed over."""
    passed = {}
    for name, family in FAMILIES:
        refusal = family.why_not(problem, device)
        if refusal is None:
            break
        passed[name] = refusal
    return passed
