"""Offers gradients whose output gradient has lines of odd length, by way of a copy with lines of whole vectors.

Kernels copy lines of 16-bit elements in words or vectors. Where lines have an odd length, half of them begin in the
middle of a word, and kernels fall back to single elements. This module copies dy once, with columns of zeros behind
every line (device/align.cuh), and asks the planner for the cheapest cover of the layer with so much more output
padding along w: the zeros add nothing to any gradient. It needs no kernel of any family, and works on every GPU that
the families work on. The predicted time is that of the cover and of the copy.

This module knows nothing of which families there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

from . import calibration
from .arguments import CONST_POINTER, DIVIDER, INT32, INT64, POINTER, Arguments
from .calibration import Work
from .detour import Asking, Planning, behind_copy
from .geometry import Geometry
from .launch import Launch
from .offers import Answer, Cover, Offer, Refusal, Wanted
from .problem import Device, Pass, Plan, Problem, Strides, bias_grad_problem, contiguous_strides

KERNEL = "align"
VECTOR = 8  # elements of 16 bits in 16 bytes
MOST_BYTES = 2**29  # bytes of the copy
THREADS = 256
AT_ONCE = 4  # vectors per thread
ALIGNED = "aligned dy"  # region of the workspace

ALIGN = Arguments(
    KERNEL,
    source=CONST_POINTER("The tensor that is read: lines of any length, one behind the other."),
    target=POINTER("The tensor that is written: every line is followed by zeros up to a whole vector."),
    elements=INT64("Elements of the source."),
    width=INT32("Elements of a line of the source."),
    vectors=INT32("Vectors of the target."),
    by_line=DIVIDER("Divides by the vectors of a line of the target."),
)


def shape_of(problem: Problem) -> tuple[int, ...]:
    """Returns the shape of dy."""
    return (problem.batch, problem.geometry.out_channels, *problem.output_size)


def aligned_shape(problem: Problem) -> tuple[int, ...]:
    """Returns the shape of dy with lines of whole vectors."""
    *others, width = shape_of(problem)
    return (*others, -(-width // VECTOR) * VECTOR)


def _strides(problem: Problem) -> Strides:
    return contiguous_strides(aligned_shape(problem))


def _padded(geometry: Geometry, columns: int) -> Geometry:
    """Returns the geometry with `columns` more outputs along w."""
    d, h, w = geometry.axes
    return replace(geometry, axes=(d, h, replace(w, output_padding=w.output_padding + columns)))


def inner(problem: Problem) -> Problem:
    """Returns the problem on the aligned copy of dy."""
    shape = aligned_shape(problem)
    if problem.which is Pass.BIAS_GRAD:
        return bias_grad_problem(problem.batch, shape[1], shape[2:], problem.dtype, _strides(problem))
    return replace(
        problem,
        geometry=_padded(problem.geometry, shape[4] - problem.output_size[2]),
        output=_strides(problem),
        aligned=problem.aligned or problem.which is Pass.INPUT_GRAD,  # the input gradient reads the copy alone
    )


def answers(wanted: Wanted, device: Device, ask: Asking, plan_of: Planning) -> list[Answer]:
    """Returns an offer for all wanted gradients of a layer whose dy has 16-bit lines of odd length, or a refusal.

    `ask` and `plan_of` are the planner's. Nothing is returned for other layers.
    """
    main = wanted.get(Pass.WEIGHT_GRAD) or wanted.get(Pass.INPUT_GRAD)
    if main is None or main.batch == 0 or main.item_bytes != 2 or main.output_size[2] % 2 == 0:
        return []
    if main.output != contiguous_strides(shape_of(main)):
        return []
    passes = tuple(wanted)
    if not device.workspace_bytes:
        return [Refusal(KERNEL, passes, "memory is short")]
    if 2 * prod(aligned_shape(main)) > MOST_BYTES:
        return [Refusal(KERNEL, passes, f"a copy of dy would take more than {MOST_BYTES >> 20} MB")]
    asked = {which: inner(problem) for which, problem in wanted.items()}
    try:
        cover = ask(asked, device)
    except NotImplementedError as error:
        return [Refusal(KERNEL, passes, f"of a copy of dy with longer lines: {error}")]
    factor = calibration.surcharge(KERNEL, device)
    make = partial(_plan, main, partial(plan_of, cover, asked, device))
    return [Offer(KERNEL, passes, main, device, partial(_work, cover, device), make, surcharge=factor)]


def _work(cover: Cover, device: Device) -> Work:
    """Returns the work of a cover and of the copy: the time of the cover as cycles, and one launch."""
    rate = calibration.rates_of(KERNEL, "any", device)["kilocycles"]
    return Work(1, 1e3 * sum(offer.microseconds for offer in cover) / rate)


def _launch(problem: Problem) -> Launch:
    shape = aligned_shape(problem)
    vectors = prod(shape) // VECTOR
    return ALIGN.launch(
        -(-vectors // (THREADS * AT_ONCE)),
        THREADS,
        (("kAtOnce", AT_ONCE),),
        {"source": "dy", "target": ALIGNED},
        min_blocks=4,
        elements=prod(shape_of(problem)),
        width=problem.output_size[2],
        vectors=vectors,
        by_line=shape[4] // VECTOR,
    )


def _plan(problem: Problem, gradients: Callable[[], Plan]) -> Plan:
    """Returns the plan of the gradients: dy is copied, and every launch reads the copy."""
    shape = aligned_shape(problem)
    why = f"dy copied to lines of {shape[4]} elements before"
    return behind_copy(gradients(), _launch(problem), ALIGNED, 2 * prod(shape), why)
