"""Plans pools of activations over windows of their volume (pool_pass.cuh) and their gradients (pool_grad.cuh)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ...planning.arguments import Arguments
from ...planning.geometry import Triple
from ...planning.launch import Constants, Launch
from ...planning.problem import Device, Plan
from ...planning.scalars import INT32_MAX, RESULTS, SCALARS, accumulator
from .arguments import POOL_GRAD, POOL_GRAD_SUMS, POOL_PASS
from .axis import expression_list
from .planner import Activation, Strips

THREADS = 256


@dataclass(frozen=True)
class Windows:
    """Describes the windows of a pool, with the settings of PyTorch's pools."""

    size: Triple
    step: Triple
    padding: Triple
    dilation: Triple = (1, 1, 1)
    counts_padding: bool = True
    divisor: int = 0  # 0: the number of places of a window


@dataclass(frozen=True)
class Pool:
    """Describes a pool of activations: volumes, windows, and the number of operands of expressions."""

    activation: Activation
    x_size: Triple
    y_size: Triple
    windows: Windows
    averages: bool  # otherwise the largest element, or its place
    vectors: int
    wholes: int
    result: str  # element type


@lru_cache(maxsize=1024)
def plan_pool(p: Pool, way: str, places: bool, before: str, after: str, device: Device) -> Plan:
    """Returns the plan of a pool. `way` says how a window is reduced (axis_reductions.cuh).

    With `places` it is `LocatingLargest`, and the pass stores the largest elements and their places.
    """
    own: Constants = (("Way", f"tconv3d::{way}"), ("kPlaces", places), ("Before", before), ("After", after))
    return Plan(POOL_PASS.kernel, "one read, and one write of the result", (_launch(POOL_PASS, p, p.y_size, own),))


@lru_cache(maxsize=1024)
def plan_pool_grad(p: Pool, gradient: str, expression: str, device: Device) -> Plan:
    """Returns the plan of a pool's gradient, whose elements have the type `gradient`."""
    own: Constants = (("Gradient", SCALARS[gradient]), ("Expression", expression))
    return Plan(POOL_GRAD.kernel, "one read and one write", (_launch(POOL_GRAD, p, p.x_size, own),))


@lru_cache(maxsize=1024)
def plan_pool_grad_sums(p: Pool, gradient: str, expressions: tuple[str, ...], device: Device) -> Plan:
    """Returns the plan of a pass that sums expressions of a pool's gradient."""
    strips = Strips.of(p.activation, device)
    sizes = {"x_size": p.x_size, "y_size": p.y_size, "by_w": p.x_size[2], "by_h": p.x_size[1]}
    launch = strips.launch(POOL_GRAD_SUMS, len(expressions), {}, sizes, 2, Gradient=gradient)
    constants = (*launch.constants, *_constants(p), ("Expressions", expression_list(expressions)))
    return Plan(POOL_GRAD_SUMS.kernel, "one read", (replace(launch, constants=constants),))


def _constants(p: Pool) -> Constants:
    """Returns the constants of windows and operands."""
    w = p.windows
    triples = {"Window": w.size, "Step": w.step, "Padding": w.padding, "Dilation": w.dilation}
    return (
        *((f"k{name}{axis}", value[i]) for name, value in triples.items() for i, axis in enumerate("DHW")),
        ("kCountsPadding", w.counts_padding),
        ("kDivisor", w.divisor),
        ("kAverages", p.averages),
        ("kVectors", p.vectors),
        ("kWholes", p.wholes),
    )


def _launch(arguments: Arguments, p: Pool, written: Triple, own: Constants) -> Launch:
    """Returns a launch with a thread for every element, or vector of channels, of the written volume."""
    a = p.activation
    vector = a.vector if a.channels_last else 1
    count = a.batch * a.channels * prod(written) // vector
    constants: Constants = (
        ("Scalar", SCALARS[a.dtype]),
        ("Acc", accumulator(a.dtype)[0]),
        ("Result", RESULTS[p.result]),
        ("kVector", vector),
        ("kChannelsLast", a.channels_last),
        ("kWide", count + THREADS > INT32_MAX),
        *_constants(p),
        *own,
    )
    return arguments.launch(
        -(-count // THREADS),
        THREADS,
        constants,
        count=count,
        x_size=p.x_size,
        y_size=p.y_size,
        by_w=written[2],
        by_h=written[1],
        by_d=written[0],
        by_channels=a.channels // vector if a.channels_last else 1,
        batch=a.batch,
        channels=a.channels,
    )
