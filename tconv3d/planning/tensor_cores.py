"""What tensor cores take: the first questions of every planner whose kernel multiplies on them.

Knows types and devices. No kernel, no geometry.
"""

from __future__ import annotations

from .problem import Device, Problem

OPERANDS = {"float32": 0, "float16": 1, "bfloat16": 2}  # ptx::Operand

WARP, WARPGROUP = (8, 0), (9, 0)  # the compute capability that has the instructions
STRICT_TERMS = 48  # of a sum from which three TF32 products have at most the error of multiply-adds (measured)


def why_not(problem: Problem, device: Device, needed: tuple[int, int], in_halves: bool = False) -> str | None:
    """Why the products cannot be done there, or nothing. What warpgroups have was there in one generation alone.

    `in_halves`: the kernel can split floats in two TF32 numbers, for strict float32.
    """
    if problem.dtype not in OPERANDS:
        return f"{problem.dtype} has no matrix instruction here"
    if problem.dtype == "float32" and not problem.tf32 and not in_halves:
        return "float32 products must stay exact (TF32 is off)"
    if device.capability < needed or (needed == WARPGROUP and device.capability[0] != WARPGROUP[0]):
        has, needs = (".".join(map(str, version)) for version in (device.capability, needed))
        return f"needs compute capability {needs}, the device has {has}"
    return None


def why_not_halves(terms: float) -> str | None:
    """Why a sum of so many products must not be one of three TF32 products each, or nothing."""
    if terms < STRICT_TERMS:
        return f"the error of three TF32 products is above that of multiply-adds in sums of {terms:.0f} terms"
    return None
