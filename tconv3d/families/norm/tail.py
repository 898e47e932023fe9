"""Plans the pass behind a convolution that evaluates an expression of every element (tail_pass.cuh)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ...planning.problem import Device, Plan
from .arguments import TAIL_PASS
from .planner import FLIGHT, Activation, Strips


@dataclass(frozen=True)
class TailProblem:
    """Describes an expression of dense activations, of vectors, and of further tensors of the same layout."""

    activation: Activation
    result: str  # element type of the result
    expression: str  # C++ type (device/expressions.cuh)
    vectors: int
    wholes: int


@lru_cache(maxsize=1024)
def plan_tail(p: TailProblem, device: Device) -> Plan:
    strips = Strips.of(p.activation, device, FLIGHT)  # short strips, FLIGHT vectors per thread
    launch = strips.launch(
        TAIL_PASS, 0, TAIL_PASS.pointers(**{name: name for name in TAIL_PASS.pointer_names}), {}, Result=p.result
    )
    constants = (("Expression", p.expression), ("kVectors", p.vectors), ("kWholes", p.wholes))
    return Plan("tail_pass", "one read and one write", (replace(launch, constants=(*launch.constants, *constants)),))
