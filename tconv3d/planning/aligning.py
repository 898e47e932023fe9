"""Offers gradients by way of copies of dy and x that kernels can read in vectors.

Kernels copy lines of 16-bit elements in words or vectors. Where lines have an odd length, half of them begin in the
middle of a word, and kernels fall back to single elements. The weight gradient has positions as K, and most kernels
want them side by side. This module makes a copy, in one of three ways, and asks the planner for the cheapest cover of
the gradients of the copy:

- Contiguous lines of dy of odd length are followed by columns of zeros up to whole vectors (device/align.cuh), and
  the layer has so much more output padding along w: the zeros add nothing to any gradient.
- For contiguous lines of odd length, dy, and x for a weight gradient on Hopper, are written as channels-last tensors
  (device/turn.cuh), in which every position begins at a multiple of 16 bytes.
- For the gradients of weight and bias, channels-last dy and x are written as contiguous tensors (device/turn.cuh).
  Zeros follow the lines of dy up to whole vectors if their length is odd.

It needs no kernel of any family, and works on every GPU that the families work on. The predicted time is that of the
cover and of the copy. This module knows nothing of which families there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from .turning import TURNED_BYTES, Turning, channels_last, turn, turning

KERNEL = "align"
VECTOR = 8  # elements of 16 bits in 16 bytes
TO_ROWS = "to_rows"  # names the offers by way of channels-last copies
TO_LINES = "to_lines"  # names the offers by way of contiguous copies
MOST_BYTES = 2**29  # bytes of the copies
# Least channels per group and positions of x for contiguous copies: other layers have no kernels that gain from them.
LEAST_CHANNELS, LEAST_POSITIONS = 4, 64
THREADS = 256
AT_ONCE = 4  # vectors per thread
ALIGNED, ROWS_DY, ROWS_X, LINES_DY, LINES_X = (  # regions of the workspace
    "aligned dy",
    "dy as rows",
    "x as rows",
    "dy as lines",
    "x as lines",
)

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
    vector = 16 // problem.item_bytes
    return (*others, -(-width // vector) * vector)


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


def as_lines(problem: Problem, whole: bool) -> Problem:
    """Returns the problem on contiguous copies of dy and x; `whole`: the lines of dy are whole vectors."""
    shape = aligned_shape(problem) if whole else shape_of(problem)
    strides = contiguous_strides(shape)
    if problem.which is Pass.BIAS_GRAD:
        return bias_grad_problem(problem.batch, shape[1], shape[2:], problem.dtype, strides)
    copied = channels_last(problem.input, _x_shape(problem))
    return replace(
        problem,
        geometry=_padded(problem.geometry, shape[4] - problem.output_size[2]),
        output=strides,
        input=contiguous_strides(_x_shape(problem)) if copied else problem.input,
        aligned=problem.aligned or copied,
    )


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
    """Returns the copy as channels-last tensors, or None if positions would not have whole vectors of channels.

    Only Hopper has a kernel for the weight gradient that wants channels-last tensors. Elsewhere the input gradient
    alone goes by a copy, that of dy.
    """
    g = main.geometry
    both = main.which is Pass.WEIGHT_GRAD and device.capability[0] == 9
    passes = set(wanted) if both else {Pass.INPUT_GRAD} & set(wanted)
    if not passes or g.out_channels % VECTOR or (both and g.in_channels % VECTOR):
        return None
    if both and main.input != contiguous_strides(_x_shape(main)):
        return None
    turnings = [turning("dy", ROWS_DY, shape_of(main), 2, back=True)]
    if both:
        turnings.append(turning("x", ROWS_X, _x_shape(main), 2, back=True))
    problems = {which: as_rows(problem) for which, problem in wanted.items() if which in passes}
    return _turned_copy(TO_ROWS, problems, turnings, "channels-last", device)


def _turned_copy(
    kernel: str, problems: dict[Pass, Problem], turnings: Sequence[Turning], layout: str, device: Device
) -> Copy:
    copies = {each.from_: (each.to, each.written_bytes) for each in turnings}
    cycles = sum(each.moved_bytes for each in turnings) / TURNED_BYTES / device.multiprocessors
    launch = partial(turn, turnings, overlaps=False, hopper=device.capability[0] >= 9)
    plural = "tensors" if len(copies) > 1 else "tensor"
    why = f"{' and '.join(copies)} written as {layout} {plural} before"
    return Copy(kernel, problems, launch, copies, cycles, why)


def _lines_copy(main: Problem, wanted: Wanted, device: Device) -> Copy | None:
    """Returns the copy as contiguous tensors, or None if a family of its own makes such copies, or for float64.

    On Hopper, `families/weight_grad/via_contiguous.py` does for 16-bit types and TF32, where lines need no zeros.
    """
    g, whole = main.geometry, main.output_size[2] % 2 == 1
    if main.which is not Pass.WEIGHT_GRAD or main.item_bytes not in (2, 4):
        return None
    if device.capability[0] == 9 and (main.tf32 if main.item_bytes == 4 else not whole):
        return None
    if min(g.in_per_group, g.out_per_group) < LEAST_CHANNELS or main.batch * prod(main.input_size) < LEAST_POSITIONS:
        return None
    turnings = [turning("dy", LINES_DY, shape_of(main), main.item_bytes, whole=whole)]
    if channels_last(main.input, _x_shape(main)):
        turnings.append(turning("x", LINES_X, _x_shape(main), main.item_bytes))
    passes = (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD)
    problems = {which: as_lines(problem, whole) for which, problem in wanted.items() if which in passes}
    return _turned_copy(TO_LINES, problems, turnings, "contiguous", device)


def answers(wanted: Wanted, device: Device, ask: Asking, plan_of: Planning) -> list[Answer]:
    """Returns offers for gradients of a layer by way of copies, or refusals; nothing if no copy would help.

    `ask` and `plan_of` are the planner's.
    """
    main = wanted.get(Pass.WEIGHT_GRAD) or wanted.get(Pass.INPUT_GRAD)
    if main is None or main.batch == 0:
        return []
    ways: tuple[Copy | None, ...] = ()
    if channels_last(main.output, shape_of(main)):
        ways = (_lines_copy(main, wanted, device),)
    elif main.output == contiguous_strides(shape_of(main)) and main.item_bytes == 2 and main.output_size[2] % 2:
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
