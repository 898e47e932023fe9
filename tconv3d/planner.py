"""Geometry, type, layout and GPU -> which kernel, which tile. A pure function of plain data, explainable.

A kernel family is a module with `why_not(problem, device)` (a reason, or None if it takes the problem) and
`plan(problem, device)`. The first family of `FAMILIES` that takes a problem gets it. Statistics for a norm that
follows are added here: a family only says whether its kernel has an epilogue (`HAS_EPILOGUE`: it applies
`Problem.activation`), and in its plan whether the kernel leaves the moments that statistics are made of.
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
    norm_planner,
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


def _why_not(family: ModuleType, problem: Problem, device: Device) -> str | None:
    refusal: str | None = family.why_not(problem, device)
    if refusal is None and problem.relu and not getattr(family, "HAS_EPILOGUE", False):
        return "its kernel has no epilogue for a ReLU"
    return refusal


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device) -> Plan:
    refusals = []
    for name, family in FAMILIES:
        refusal = _why_not(family, problem, device)
        if refusal is None:
            found = family.plan(problem, device)
            return norm_planner.with_statistics(found, problem, device) if problem.norm else found
        refusals.append(f"{name}: {refusal}")
    raise NotImplementedError(f"no kernel takes {problem} on {device}: " + "; ".join(refusals))


def refusals(problem: Problem, device: Device) -> dict[str, str]:
    """Why each family that comes before the chosen one was passed over."""
    passed = {}
    for name, family in FAMILIES:
        refusal = _why_not(family, problem, device)
        if refusal is None:
            break
        passed[name] = refusal
    return passed
