"""Describes a kernel launch before its tensors have addresses.

Planners make launches; the compiler, the launcher and the emulator read them. This module imports nothing of the
package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Table: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]
Constant: TypeAlias = bool | int | str | Table
Constants: TypeAlias = tuple[tuple[str, Constant], ...]


@dataclass(frozen=True)
class Launch:
    """Describes one launch of the kernel in the header `<kernel>.cuh`.

    The kernel's `Args` are the addresses of the operands named by `pointers`, followed by the bytes of `scalars`.
    Planners get both from the declaration of the kernel's arguments (arguments.py).
    """

    kernel: str
    constants: Constants
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    pointers: tuple[str, ...]
    scalars: bytes
    overlaps: bool = False  # may begin before the previous launch has ended; the kernel waits for it


def axis_constants(axes: Sequence[object], *attributes: str) -> Constants:
    """Returns the constants of all axes, the last of which is w: `input_step` becomes kInputStepD, ...H and ...W."""
    letters = "DHW"[-len(axes) :]
    return tuple(
        (f"k{name.title().replace('_', '')}{letter}", getattr(axis, name))
        for name in attributes
        for letter, axis in zip(letters, axes, strict=True)
    )


def end_of_blocks(first: float, many: int, second: float, more: int, workers: int) -> float:
    """Returns the cycle in which the last block of a launch ends; each starts where a multiprocessor is free first.

    `many` blocks take `first` cycles, and `more` blocks behind them `second` cycles, on `workers` multiprocessors.
    """
    rounds, rest = divmod(many, workers)
    # Multiprocessors that become free at the same time get blocks at the same time, so that there are two groups.
    ends, counts = [rounds * first, (rounds + 1) * first], (workers - rest, rest)
    last = ends[1] if rest else ends[0]
    while more > 0:
        group = 1 if rest and ends[1] < ends[0] else 0
        ends[group] += second
        last = max(last, ends[group])
        more -= counts[group]
    return last
