"""Plans the passes behind a convolution that evaluate expressions (tail_pass.cuh) and their sums (tail_sums.cuh)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ...planning.arguments import Arguments
from ...planning.problem import Device, Plan
from .arguments import TAIL_PASS, TAIL_SUMS
from .axis import expression_list
from .planner import FLIGHT, Activation, Strips


@dataclass(frozen=True)
class TailProblem:
    """Describes expressions of dense activations, of vectors, and of further tensors of the same layout."""

    activation: Activation
    expressions: tuple[str, ...]  # C++ types (device/expressions.cuh)
    vectors: int
    wholes: int


@lru_cache(maxsize=1024)
def plan_pass(p: TailProblem, result: str, device: Device) -> Plan:
    """Returns the plan of a pass that writes one expression, with elements of type `result`."""
    strips = Strips.of(p.activation, device, FLIGHT)  # short strips, FLIGHT vectors per thread
    return _plan(TAIL_PASS, p, strips, 0, ("Expression", p.expressions[0]), Result=result)


@lru_cache(maxsize=1024)
def plan_sums(p: TailProblem, device: Device) -> tuple[Plan, int]:
    """Returns the plan of a pass that sums expressions, and the slots of every channel of a batch item."""
    strips = Strips.of(p.activation, device)
    listed = expression_list(p.expressions)
    return _plan(TAIL_SUMS, p, strips, len(p.expressions), ("Expressions", listed)), strips.slots


def _plan(
    arguments: Arguments, p: TailProblem, strips: Strips, sums: int, expression: tuple[str, str], **types: str
) -> Plan:
    launch = strips.launch(arguments, sums, {}, {}, 2, **types)
    constants = (expression, ("kVectors", p.vectors), ("kWholes", p.wholes))
    launch = replace(launch, constants=(*launch.constants, *constants))
    return Plan(arguments.kernel, "every operand is read once", (launch,))
