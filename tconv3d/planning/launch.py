"""What one kernel launch consists of, before tensors have addresses.

The planner writes it, the compiler, the launcher and the emulator read it. Imports nothing of the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Table: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]
Constant: TypeAlias = bool | int | str | Table
Constants: TypeAlias = tuple[tuple[str, Constant], ...]


@dataclass(frozen=True)
class Launch:
    """One launch of the kernel in the header `<kernel>.cuh`.

    The kernel's `Args` is the addresses of `pointers` followed by the bytes of `scalars`; planners get both from the
    declaration of the kernel's arguments (arguments.py).
    """

    kernel: str
    constants: Constants
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    pointers: tuple[str, ...]
    scalars: bytes
    overlaps: bool = False  # may begin before the launch before it has ended: its kernel waits where it must
