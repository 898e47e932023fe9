"""Describes forward pass and input gradient alike, as outputs that gather from inputs.

Planners of kernels that compute both passes by the same loop start from a `Side`. This module knows geometry, sizes
and strides, but no kernel and no device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from .geometry import Gather, Triple
from .launch import Constants
from .problem import Pass, Problem, Strides, last_offset
from .scalars import INT32_MAX

# A strict float32 sum of more than 32 terms is computed as a sum of partial sums, which bounds its rounding error.
LONG_SUM = 32
# Up to 64 terms each addition to a total is compensated for its rounding error, because PyTorch's own error is small.
SHORT_SUM = 64
# Where an error of up to 1e-6 is allowed (`Problem.loose`), sums of up to 128 terms are added term by term, with an
# error of about 2e-7.
LONG_LOOSE_SUM = 128


@dataclass(frozen=True)
class Side:
    """Describes a pass: y is computed from x, which are output and input, or dx and dy for the input gradient."""

    problem: Problem
    gathers: tuple[Gather, Gather, Gather]
    reduced: int  # channels per group of x, which are summed over
    outs: int  # channels per group of y
    x: Strides
    x_size: Triple
    y: Strides
    y_size: Triple
    grid: Triple  # positions q along each dimension, each with one output per phase
    weight: Strides  # strides of the weight: channel of x, channel of y, taps d, h, w

    @classmethod
    def of(cls, problem: Problem) -> Side:
        g, size, out_size = problem.geometry, problem.input_size, problem.output_size
        ci, co, *taps = problem.weight
        d, h, w = g.axes
        grid: Triple
        if problem.which is Pass.FORWARD:
            grid = (d.positions(out_size[0]), h.positions(out_size[1]), w.positions(out_size[2]))
            gathers = (d.scatter, h.scatter, w.scatter)
            reduced, outs, weight = g.in_per_group, g.out_per_group, (ci, co, *taps)
            x, x_size, y, y_size = problem.input, size, problem.output, out_size
        else:
            grid, gathers = size, (d.gather, h.gather, w.gather)
            reduced, outs, weight = g.out_per_group, g.in_per_group, (co, ci, *taps)
            x, x_size, y, y_size = problem.output, out_size, problem.input, size
        return cls(problem, gathers, reduced, outs, x, x_size, y, y_size, grid, weight)

    @property
    def operands(self) -> dict[str, str]:
        """The operands of a kernel's pointers x, w, bias and y."""
        names = ("x", "weight", "bias", "y") if self.problem.which is Pass.FORWARD else ("dy", "weight", "null", "dx")
        return dict(zip(("x", "w", "bias", "y"), names, strict=True))

    @property
    def sizes(self) -> dict[str, Any]:
        """Strides and sizes of x, w and y as arguments of a kernel, by name."""
        return {
            "x_strides": self.x,
            "y_strides": self.y,
            "w_strides": self.weight,
            "w_group_stride": self.problem.geometry.in_per_group * self.problem.weight[0],
            "x_size": self.x_size,
            "y_size": self.y_size,
        }

    @property
    def wide(self) -> bool:
        """Tells whether an offset in elements, or an intermediate value of its computation, may exceed 32 bits."""
        reach = [
            (q - 1) * gather.input_step
            + max(abs(o) for o in gather.first_offset)
            + max(gather.count) * abs(gather.offset_step)
            for gather, q in zip(self.gathers, self.grid, strict=True)
        ]
        p, g = self.problem, self.problem.geometry
        x = last_offset((p.batch, self.reduced * g.groups, *(r + 1 for r in reach)), self.x)
        y = last_offset(
            (p.batch, self.outs * g.groups, *self.grid),
            tuple(s * k for s, k in zip(self.y, (1, 1, *self.output_steps), strict=True)),
        )
        return max(x, y + max(self.y), self.positions + 2**20) > INT32_MAX

    @property
    def terms(self) -> int:
        """The most products that an output is the sum of, over all phases."""
        return self.reduced * prod(max(gather.count) for gather in self.gathers)

    @property
    def mean_terms(self) -> float:
        """The mean number of products per output; a phase is weighted by its terms, as in the norm of an error."""
        return self.reduced * prod(sum(n * n for n in gather.count) / sum(gather.count) for gather in self.gathers)

    @property
    def chained(self) -> bool:
        """Tells whether sums are long enough to be computed as sums of partial sums, which takes more registers."""
        p = self.problem
        return p.dtype == "float32" and not p.tf32 and self.terms > (LONG_LOOSE_SUM if p.loose else LONG_SUM)

    @property
    def keeps_rest(self) -> bool:
        """Tells whether additions of partial sums are compensated for their rounding errors."""
        return self.chained and self.terms <= SHORT_SUM

    @property
    def output_steps(self) -> Triple:
        d, h, w = self.gathers
        return d.output_step, h.output_step, w.output_step

    @property
    def positions(self) -> int:
        return self.problem.batch * self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True)
class Unrolled:
    """Lists phases, taps and distinct loads along the innermost dimensions that a thread or block owns."""

    phases: tuple[Triple, ...]
    taps: tuple[tuple[int, int, Triple], ...]  # index of the phase, index of the load, tap (d, h, w)
    loads: tuple[Triple, ...]  # offset of each load in x along d, h, w

    @classmethod
    def of(cls, gathers: tuple[Gather, Gather, Gather], unrolled: int) -> Unrolled:
        one = Gather(1, 1, 0, 0, (0,), (0,), (1,))  # placeholder for a dimension that is not unrolled
        used = [one] * (3 - unrolled) + list(gathers[3 - unrolled :])
        phases = tuple(product(*(range(gather.phases) for gather in used)))
        found = [
            (f, tuple(g.tap(i, j) for g, i, j in zip(used, phase, js, strict=True)),
             tuple(g.offset(i, j) for g, i, j in zip(used, phase, js, strict=True)))
            for f, phase in enumerate(phases)
            for js in product(*(range(g.count[i]) for g, i in zip(used, phase, strict=True)))
        ]  # fmt: skip
        loads = tuple(sorted({offset for _, _, offset in found}))
        index = {offset: i for i, offset in enumerate(loads)}
        return cls(phases, tuple((f, index[offset], tap) for f, tap, offset in found), loads)

    @property
    def most_taps(self) -> int:
        """The most taps that a phase has; 1 if there are no taps."""
        return max(Counter(phase for phase, _, _ in self.taps).values(), default=1)

    def tables(self) -> Constants:
        def columns(name: str, triples: tuple[Triple, ...]) -> Constants:
            return tuple((f"k{name}{axis}", tuple(t[i] for t in triples)) for i, axis in enumerate("DHW"))

        return (
            ("kPhases", len(self.phases)),
            ("kTaps", len(self.taps)),
            ("kLoads", len(self.loads)),
            ("kTapPhase", tuple(f for f, _, _ in self.taps)),
            ("kTapLoad", tuple(load for _, load, _ in self.taps)),
            *columns("Tap", tuple(tap for _, _, tap in self.taps)),
            *columns("Load", self.loads),
            *columns("Phase", self.phases),
        )
