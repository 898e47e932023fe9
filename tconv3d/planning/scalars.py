"""Provides C++ names and sizes of element types, and small arithmetic that planners share.

This module knows nothing of kernels, layers or devices.
"""

from __future__ import annotations

from .geometry import Triple
from .problem import Strides

# The C++ type of an element, by the name of PyTorch's dtype.
SCALARS = {
    "float16": "tconv3d::Half",
    "bfloat16": "tconv3d::BFloat16",
    "float32": "float",
    "float64": "double",
}
RESULTS = {**SCALARS, "int64": "long long"}  # types of results that may be indices
INT32_MAX = 2**31 - 1


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


def power_of_two_up(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def accumulator(dtype: str) -> tuple[str, int]:
    """Returns the C++ type of accumulators for an element type, and its size in bytes."""
    return ("double", 8) if dtype == "float64" else ("float", 4)


def even_pairs(strides: Strides, size: Triple) -> bool:
    """Returns whether elements 2*i and 2*i + 1 along w always both exist and are aligned as a pair."""
    return strides[4] == 1 and not any(v % 2 for v in (*strides[:4], size[2]))
