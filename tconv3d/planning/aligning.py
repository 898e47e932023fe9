"""Offers gradients whose output gradient has lines of odd length, by way of a copy that kernels can read in vectors.

Kernels copy lines of 16-bit elements in words or vectors. Where lines have an odd length, half of them begin in the
middle of a word, and kernels fall back to single elements. This module copies dy once, in one of two ways, and asks
the planner for the cheapest cover of the gradients of the copy:

- Lines are followed by columns of zeros up to whole vectors (device/align.cuh), and the layer has so much more output
  padding along w: the zeros add nothing to any gradient.
- dy, and x for a weight gradient, are written as channels-last tensors (device/turn.cuh), in which every position
  begins at a multiple of 16 bytes.

It needs no kernel of any family, and works on every GPU that the families work on. The predicted time is that of the
cover and of the copy. This module knows nothing of which families there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from . import calibration
from .arguments import CONST_POINTER, DIVIDER, INT32, INT64, POINTER, Arguments
from .calibration import Work
from .detour import Asking, Planning, behind_copies
from .geometry import Geometry
from .launch import Launch
from .offers import Answer, Cover, Offer, Refusal, Wanted
from .problem import (
    Device,
    Pass,
    Plan,
    Problem,
    Strides,
    bias_grad_problem,
    channels_last_strides,
    contiguous_strides,
)
from .turning import turn, turning

KERNEL = "align"
VECTOR = 8  # elements of 16 bits in 16 bytes
TO_ROWS = "to_rows"  # names the offers by way of channels-last copies
MOST_BYTES = 2**29  # bytes of the copies
# Bytes that the transpose reads and writes per cycle and multiprocessor. The rate is derived, not measured: it is 85%
# of the 18.4 bytes that the memory of an H200 copies. A warp takes 15 instructions, counted in machine code, for 256
# bytes of rows of odd length; a multiprocessor issues 55 in the time that memory takes.
TURNED_BYTES = 15.6
THREADS = 256
AT_ONCE = 4  # vectors per thread
ALIGNED, ROWS_DY, ROWS_X = "aligned dy", "dy as rows", "x as rows"  # regions of the workspace

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


def as_rows(problem: Problem) -> Problem:
    """Returns the problem on channels-last copies of dy and, for the weight gradient, of x."""
    shape = shape_of(problem)
    strides = channels_last_strides(shape)
    if problem.which is Pass.BIAS_GRAD:
        return bias_grad_problem(problem.batch, shape[1], shape[2:], problem.dtype, strides)
    if problem.which is Pass.INPUT_GRAD:
        return replace(problem, output=strides, aligned=True)
    return replace(problem, output=strides, input=channels_last_strides(_x_shape(problem)), aligned=True)


def _x_shape(problem: Problem) -> tuple[int, ...]:
    return (problem.batch, problem.geometry.in_channels, *problem.input_size)


@dataclass(frozen=True)
class Copy:
    """Describes a way to copy: the offer's kernel, the problems on the copies, and how to launch what makes them."""

    kernel: str
    problems: dict[Pass, Problem]
    launch: Callable[[], Launch]  # for copies of at most MOST_BYTES
    copies: dict[str, tuple[str, int]]  # region of the workspace and bytes, by the operand that is copied
    cycles: float  # cycles of the launch, if not counted by the rate per byte of the tensors
    why: str


def _padded_copy(main: Problem, wanted: Wanted) -> Copy:
    shape = aligned_shape(main)
    why = f"dy copied to lines of {shape[4]} elements before"
    problems = {which: inner(problem) for which, problem in wanted.items()}
    return Copy(KERNEL, problems, partial(_launch, main), {"dy": (ALIGNED, 2 * prod(shape))}, 0.0, why)


def _rows_copy(main: Problem, wanted: Wanted, device: Device) -> Copy | None:
    """Returns the copy as channels-last tensors, or None if positions would not have whole vectors of channels."""
    g = main.geometry
    if main.which is not Pass.WEIGHT_GRAD or g.in_channels % VECTOR or g.out_channels % VECTOR:
        return None
    if main.input != contiguous_strides(_x_shape(main)):
        return None
    turnings = [
        turning(name, to, shape, 2, back=True)
        for name, to, shape in (("dy", ROWS_DY, shape_of(main)), ("x", ROWS_X, _x_shape(main)))
    ]
    problems = {which: as_rows(problem) for which, problem in wanted.items()}
    copies = {each.from_: (each.to, 2 * each.count) for each in turnings}
    cycles = sum(4 * each.count for each in turnings) / TURNED_BYTES / device.multiprocessors
    launch = partial(turn, turnings, overlaps=False, hopper=device.capability[0] >= 9)
    return Copy(TO_ROWS, problems, launch, copies, cycles, "dy and x written as channels-last tensors before")


def answers(wanted: Wanted, device: Device, ask: Asking, plan_of: Planning) -> list[Answer]:
    """Returns offers for all wanted gradients of a layer whose dy has 16-bit lines of odd length, or refusals.

    `ask` and `plan_of` are the planner's. Nothing is returned for other layers.
    """
    main = wanted.get(Pass.WEIGHT_GRAD) or wanted.get(Pass.INPUT_GRAD)
    if main is None or main.batch == 0 or main.item_bytes != 2 or main.output_size[2] % 2 == 0:
        return []
    if main.output != contiguous_strides(shape_of(main)):
        return []
    ways = (_padded_copy(main, wanted), _rows_copy(main, wanted, device))
    return [_answer(main, copy, device, ask, plan_of) for copy in ways if copy is not None]


def _answer(main: Problem, copy: Copy, device: Device, ask: Asking, plan_of: Planning) -> Answer:
    passes = tuple(copy.problems)
    if not device.workspace_bytes:
        return Refusal(copy.kernel, passes, "memory is short")
    if sum(size for _, size in copy.copies.values()) > MOST_BYTES:
        return Refusal(copy.kernel, passes, f"a copy of dy would take more than {MOST_BYTES >> 20} MB")
    try:
        cover = ask(copy.problems, device)
    except NotImplementedError as error:
        return Refusal(copy.kernel, passes, f"of a copy of dy: {error}")
    factor = calibration.surcharge(copy.kernel, device)
    make = partial(_plan, copy, partial(plan_of, cover, copy.problems, device))
    return Offer(copy.kernel, passes, main, device, partial(_work, copy, cover, device), make, surcharge=factor)


def _work(copy: Copy, cover: Cover, device: Device) -> Work:
    """Returns the work of a cover and of the copy: the time of the cover as cycles, and one launch."""
    rate = calibration.rates_of(copy.kernel, "any", device)["kilocycles"]
    return Work(1, 1e3 * sum(offer.microseconds for offer in cover) / rate + copy.cycles)


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


def _plan(copy: Copy, gradients: Callable[[], Plan]) -> Plan:
    """Returns the plan of the gradients: operands are copied, and every launch reads the copies."""
    return behind_copies(gradients(), copy.launch(), copy.copies, copy.why)
