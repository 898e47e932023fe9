"""Decides whether tensor cores can compute a problem's products; every planner of a tensor-core kernel asks it.

This module knows types and devices, but no kernels and no geometry.
"""

from __future__ import annotations

from .problem import Device, Problem

OPERANDS = {"float32": 0, "float16": 1, "bfloat16": 2}  # values of the C++ enumeration ptx::Operand

# Lowest compute capabilities for kernels with mma (one warp) and wgmma (one warpgroup).
WARP, WARPGROUP = (8, 0), (9, 0)
# Strict float32 replaces every product by three TF32 products. From 48 terms per sum on, the error is at most that of
# float32 multiply-adds (docs/numerics.md).
STRICT_TERMS = 48


def why_not(problem: Problem, device: Device, needed: tuple[int, int], in_halves: bool = False) -> str | None:
    """Returns why tensor cores cannot compute the products, or None if they can.

    `needed` is `WARP` or `WARPGROUP`; only compute capability 9.x has warpgroup instructions. `in_halves`: the kernel
    can split float32 values into two TF32 values, for strict float32.
    """
    if problem.dtype not in OPERANDS:
        return f"{problem.dtype} has no matrix instruction here"
    if problem.dtype == "float32" and not problem.tf32 and not in_halves:
        return "float32 products must stay exact (TF32 is off)"
    if device.capability < needed or (needed == WARPGROUP and device.capability[0] != WARPGROUP[0]):
        has, needs = (".".join(map(str, version)) for version in (device.capability, needed))
        return f"needs compute capability {needs}, the device has {has}"
    return None


def why_not_halves(terms: float, loose: bool = False) -> str | None:
    """Returns why sums of `terms` products must not use three TF32 products for each, or None if they may.

    `loose` (`Problem.loose`): three TF32 products are always exact enough.
    """
    if terms < STRICT_TERMS and not loose:
        return f"the error of three TF32 products is above that of multiply-adds in sums of {terms:.0f} terms"
    return None
