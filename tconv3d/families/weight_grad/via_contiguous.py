"""Plans for the weight gradient of channels-last tensors by the kernel for contiguous tensors.

`hopper_weight_grad` is fastest where lines of positions are contiguous in memory. This family first transposes x and
dy to contiguous tensors (device/turn.cuh) in a bounded workspace. It is chosen where the transposes and the kernel
are predicted to be faster than any kernel that reads the channels-last tensors directly. In names, "turned" means
transposed from channels-last to contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ...planning import calibration, offers
from ...planning.calibration import Work
from ...planning.offers import Answer, Offer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, Strides, dense_strides
from ...planning.turning import TURNED_BYTES, Turning, channels_last, turn, turning
from ...planning.workspace import placed
from . import hopper

MAX_BYTES = 2**28  # most bytes that are transposed at a time
MAX_SLICES = 8  # most slices of the batch, which are computed one after another

# Kind of the rates, which are derived: those that `tconv3d calibrate` measured are of a transpose that copied words.
KIND = "copies of 16 bytes"


def turnings(p: Problem) -> list[Turning]:
    """Returns the transposes of those tensors, out of dy and x, that are channels-last."""
    g = p.geometry
    tensors: list[tuple[str, Strides, tuple[int, ...]]] = [
        ("dy", p.output, (p.batch, g.out_channels, *p.output_size)),
        ("x", p.input, (p.batch, g.in_channels, *p.input_size)),
    ]
    return [
        turning(name, f"turned {name}", shape, p.item_bytes)
        for name, strides, shape in tensors
        if channels_last(strides, shape)
    ]


def turned(p: Problem) -> Problem:
    """Returns the problem with the strides that dy and x have after they are transposed."""
    g, names = p.geometry, [each.from_ for each in turnings(p)]
    output = dense_strides((p.batch, g.out_channels, *p.output_size)) if "dy" in names else p.output
    input = dense_strides((p.batch, g.in_channels, *p.input_size)) if "x" in names else p.input
    return replace(p, input=input, output=output, aligned=p.aligned or len(names) == 2)


def slices_of(p: Problem) -> int:
    """Returns how many equal slices of the batch are transposed one after another; 0 if MAX_SLICES do not suffice."""
    item = sum(each.rows * each.columns for each in turnings(p)) * p.item_bytes
    fitting = [n for n in range(1, MAX_SLICES + 1) if p.batch % n == 0 and 0 < p.batch // n * item <= MAX_BYTES]
    return min(fitting, default=0)


# ---- The interface of the family to the planner.


def _why_never(problem: Problem, device: Device) -> str | None:
    """Returns a reason for refusal that is known without a search for a tiling, or None."""
    p, found = problem, turnings(problem)
    if p.which is not Pass.WEIGHT_GRAD:
        return f"computes weight gradients, not the pass {p.which.value}"
    if "dy" not in [each.from_ for each in found]:
        return "dy is not channels-last"
    if p.item_bytes not in (2, 4):
        return f"elements of {p.dtype} are not turned"
    slices = slices_of(p)
    if not device.workspace_bytes:
        return "memory is short"
    if not slices:
        return f"contiguous tensors would take more than {MAX_BYTES >> 20} MB at a time, or nothing"
    if refusal := hopper.why_never(_of_slice(p, slices), device):
        return f"of contiguous tensors: {refusal}"
    return None


def why_not(problem: Problem, device: Device) -> str | None:
    if refusal := _why_never(problem, device):
        return refusal
    refusal = hopper.why_not(_of_slice(problem, slices_of(problem)), device)
    return f"of contiguous tensors: {refusal}" if refusal else None


def _of_slice(p: Problem, slices: int) -> Problem:
    """Returns the weight gradient of a slice of the batch, of tensors that have been transposed."""
    return replace(turned(p), batch=p.batch // slices)


PASSES = (Pass.WEIGHT_GRAD,)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    ask = "turned", wanted, device, _why_never, work, plan
    found = [*offers.one_by_one(PASSES, *ask), *offers.weight_with_bias(*ask)]
    return [_bounded(answer) if isinstance(answer, Offer) else answer for answer in found]


def _bounded(offer: Offer) -> Offer:
    """Returns an offer with its kind of rates and a lower bound of its work, which needs no search for a tiling."""
    p, device = offer.problem, offer.device
    one = _of_slice(p, slices_of(p))
    of_slice = hopper.least_cycles(one, device)
    factor = calibration.surcharge("turned", device, KIND)
    if kind := hopper.kind_of(one):
        factor = max(factor, calibration.surcharge(hopper.KERNEL, device, kind))
    return replace(offer, kind=KIND, surcharge=factor, least=_work(p, of_slice, device))


def work(problem: Problem, device: Device) -> Work:
    """Returns the predicted work of the plan's launches; infinite, and never the cheapest, if no tiling fits."""
    one = _of_slice(problem, slices_of(problem))
    return _work(problem, inf if hopper.why_not(one, device) else hopper.cycles(one, device), device)


def _work(p: Problem, of_slice: float, device: Device) -> Work:
    """Returns the work of the copies, with the predicted time of the other launches as cycles.

    `of_slice`: the cycles of the weight gradient of a slice.
    """
    slices = slices_of(p)
    inner = Work(2, of_slice)
    one = _of_slice(p, slices)
    microseconds = slices * calibration.microseconds(hopper.KERNEL, one, inner, device, hopper.kind_of(one))
    rate = calibration.rates_of("turned", KIND, device)["kilocycles"]
    moved = sum(each.moved_bytes for each in turnings(p))
    return Work(slices, 1e3 * microseconds / rate + moved / (TURNED_BYTES * device.multiprocessors))


def plan(problem: Problem, device: Device) -> Plan:
    slices = slices_of(problem)
    return _around(problem, slices, hopper.plan(_of_slice(problem, slices), device, slices))


def _around(p: Problem, slices: int, inner: Plan) -> Plan:
    """Returns the plan for contiguous tensors, with the launches that write them inserted."""
    found = turnings(p)
    names = {"workspace": "parts", **{each.from_: each.to for each in found}}
    sizes = [(each.to, -(-each.count // slices * p.item_bytes)) for each in found]
    end, regions = placed((*sizes, ("parts", inner.workspace_bytes)))
    parts = dict(regions)["parts"]
    own = [replace(each, pointers=tuple(names.get(n, n) for n in each.pointers)) for each in inner.launches]
    mains = [launch for launch in own if launch.kernel == "hopper_weight_grad"]
    launches, each_has = [], len(mains) // slices
    for i in range(slices):
        items = p.batch // slices
        launches.append(turn([replace(each, items=items, first=i * items) for each in found], overlaps=False))
        # An overlapping launch may read x and dy before it waits for the transpose, so this one must not overlap.
        launches.append(replace(mains[i * each_has], overlaps=False))
        launches += mains[i * each_has + 1 : (i + 1) * each_has]
    turns = "" if slices == 1 else f", in {slices} slices of the batch"
    return replace(
        inner,
        kernel=f"turn + {inner.kernel}",
        why=f"{inner.why}; {' and '.join(each.from_ for each in found)} written as contiguous tensors before{turns}",
        launches=(*launches, *own[len(mains) :]),
        workspace_bytes=end,
        regions=(*regions, *((name, parts + at) for name, at in inner.regions)),
    )
