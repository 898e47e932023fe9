"""Divides the positions of a dilated dimension into classes that read x without dilation.

The taps of a dimension read x at a distance of `unit`, so that a block of neighbouring positions needs nearly all of
x between its first and its last tap. Positions that are `number` apart form a class: all their reads lie on one
lattice of x, whose points are `unit` apart. In points of this lattice a class reads x as a layer without dilation,
and a tile of positions of one class needs no more than `tile*step + taps - 1` points.

This module knows nothing of tensors, kernels or GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from .geometry import Gather


@dataclass(frozen=True)
class Classes:
    """Describes the classes of the positions of a dimension.

    Position q of class c and phase f is output `step*q + y_step*c + starts[f]`, and tap j reads x at
    `gather.input_step*q + x_step*c + gather.offset(f, j)`, with the step of y and the gather that `divided` returns.
    """

    number: int = 1  # distance of neighbouring positions of a class, which is the most classes that there are
    unit: int = 1  # elements of x from one point of the lattice to the next
    x_step: int = 0  # elements of x from a position of class 0 to the position of class 1
    y_step: int = 0  # elements of y from an output of class 0 to the output of class 1
    starts: tuple[int, ...] = ()  # the output of each phase at position 0 of class 0; empty if it is the phase itself
    present: int = 1  # classes that have positions in this volume

    def start(self, phase: int) -> int:
        return self.starts[phase] if self.starts else phase

    @property
    def precedes(self) -> bool:
        """Tells whether position 0 of some classes and phases lies before the first output."""
        return min(self.starts, default=0) < 0


WHOLE = Classes()  # all positions of a dimension are one class


def unit_of(gather: Gather) -> int:
    """Returns the distance of neighbouring taps in x: 1 if no phase has two taps."""
    return abs(gather.offset_step) if max(gather.count) > 1 else 1


def divided(gather: Gather, positions: int, together: bool) -> tuple[Gather, Classes, int]:
    """Returns the gather of a class, the classes, and the number of positions of the largest class.

    `together`: all phases of a position are computed by one block and read one lattice of x. A class then has other
    positions in each phase, and may have one position more.
    """
    unit = unit_of(gather)
    if unit == 1:
        return gather, WHOLE, positions
    number = unit // gcd(unit, gather.input_step)
    ahead = _ahead(gather, unit) if together else (0,) * gather.phases
    most = max(ahead)
    of_class = replace(
        gather,
        input_step=gather.input_step * number,
        output_step=gather.output_step * number,
        first_offset=tuple(o - gather.input_step * k for o, k in zip(gather.first_offset, ahead, strict=True)),
    )
    starts = tuple(phase - gather.output_step * k for phase, k in enumerate(ahead))
    present = min(number, positions + most)
    classes = Classes(number, unit, gather.input_step, gather.output_step, starts, present)
    return of_class, classes, -(-(positions + most) // number)


def _ahead(gather: Gather, unit: int) -> tuple[int, ...]:
    """Returns by how many positions each phase begins earlier, so that all phases read one lattice of x.

    The largest of these numbers is the least possible. Phases without taps read nothing.
    """
    if gather.phases == 1:
        return (0,)
    assert gather.input_step == 1, "several phases step through x one by one"
    fed = [phase for phase, count in enumerate(gather.count) if count]
    choices = []
    for least in {gather.first_offset[phase] % unit for phase in fed}:
        choices.append([(gather.first_offset[phase] - least) % unit for phase in fed])
    found = dict(zip(fed, min(choices, key=lambda each: (max(each), sum(each))), strict=True))
    return tuple(found.get(phase, 0) for phase in range(gather.phases))
