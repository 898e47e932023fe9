"""Chooses kernel and tile for geometry, element type, memory layout and GPU, as a function of plain data.

Every kernel family makes offers (`offers.py` is the contract). The planner takes the set of offers that computes all
wanted passes in the least predicted time. Wanted is one pass, or the gradients of a backward pass, of which an offer
may compute several. Launches of gradients may name any of "dy", "x", "weight", "null", "dx", "dw", "db", "workspace"
and the regions of their workspace.

The planner adds the launches for the statistics of a following norm, and their price. A family only declares
`HAS_EPILOGUE` if its kernel applies `Problem.activation`, and `HOLDS_CHANNELS` if its kernel also runs programs over
channels. A family whose kernel writes the moments for the statistics has a function `leaves_moments`, which tells for
which problems, and sets `Plan.moments`. It is asked with the norm and without it, all others only without it
(`statistics.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache
from math import isinf, prod
from types import ModuleType

from ..families.depthwise import lines as depthwise_lines_planner
from ..families.depthwise import planner as depthwise_planner
from ..families.depthwise import tiles as depthwise_tiles_planner
from ..families.depthwise import tiles_weight_grad as depthwise_tiles_weight_grad_planner
from ..families.direct import planner as direct_planner
from ..families.few_channels import inputs as few_inputs_planner
from ..families.few_channels import outputs as few_outputs_planner
from ..families.few_channels import weight_grad as few_weight_grad_planner
from ..families.gather import planner as gather_planner
from ..families.group_backward import planner as group_backward_planner
from ..families.halo import planner as halo_planner
from ..families.mma import family as mma_family
from ..families.norm import planner as norm_planner
from ..families.pytorch import planner as pytorch_planner
from ..families.unfold import planner as unfold_planner
from ..families.up import backward as up_backward_planner
from ..families.up import backward_last as up_backward_last_planner
from ..families.up import forward as up_planner
from ..families.up import grad as up_grad_planner
from ..families.weight_grad import hopper as hopper_weight_grad_planner
from ..families.weight_grad import rows as rows_weight_grad_planner
from ..families.weight_grad import via_contiguous as turned_planner
from ..families.weight_grad import warps as weight_grad_planner
from . import aligning, calibration, folding, repertoire, statistics
from .arguments import with_tail
from .launch import Launch
from .offers import Answer, Cover, Offer, Refusal, Wanted, ranked
from .problem import Device, Pass, Plan, Problem
from .scalars import INT32_MAX, round_up
from .sums import adds_one, joined
from .workspace import ALIGN

FAMILIES: tuple[tuple[str, ModuleType], ...] = (
    ("unfold", unfold_planner),
    ("gather", gather_planner),
    ("up_backward", up_backward_planner),
    ("up_backward_last", up_backward_last_planner),
    ("up", up_planner),
    ("up_grad", up_grad_planner),
    ("few_outputs", few_outputs_planner),
    ("few_inputs", few_inputs_planner),
    ("few_weight_grad", few_weight_grad_planner),
    ("group_backward", group_backward_planner),
    ("turned", turned_planner),
    ("halo", halo_planner),
    ("hopper_weight_grad", hopper_weight_grad_planner),
    ("rows_weight_grad", rows_weight_grad_planner),
    ("tensor_weight_grad", weight_grad_planner),
    ("mma", mma_family),
    ("depthwise_tiles", depthwise_tiles_planner),
    ("depthwise_tiles_weight_grad", depthwise_tiles_weight_grad_planner),
    ("depthwise_lines", depthwise_lines_planner),
    ("depthwise", depthwise_planner),
    ("direct", direct_planner),
)


# Limits that bound the time and memory of planning. Layers beyond MOST_TAPS or MOST_PHASES go to the direct family,
# whose tables have an entry for each phase along one dimension and none for each tap. Layers beyond the other limits
# are left to PyTorch's operator.
MOST_TAPS = 4096  # taps per kernel: 16 x 16 x 16
MOST_PHASES = 4096  # phases per layer: a stride of 16 x 16 x 16
MOST_DIRECT_PHASES = 2**16  # phases per layer for the direct family, which computes phases without taps too
LONGEST_STRIDE = 1024  # along one dimension: a kernel is compiled with three 32-bit tables of this length
LONGEST_KERNEL = 2**16  # taps along one dimension
FARTHEST = 2**30  # elements from an input to an output it contributes to, along one dimension: offsets have 32 bits


OVER_CHANNELS_PRICE = 1.05  # price over predicted time of kernels that run programs over channels, not yet measured


class Refused(NotImplementedError):
    """Raised for a legal call that no kernel takes, and that is left to PyTorch's operator. The message says why."""


def check_limits(problem: Problem) -> None:
    """Raises `Refused` for a layer or a volume beyond the limits of planning."""
    geometry = problem.geometry
    if geometry.phases > MOST_DIRECT_PHASES:
        raise Refused(f"a stride of {geometry.stride} has {geometry.phases} phases, more than {MOST_DIRECT_PHASES}")
    if max(geometry.stride) > LONGEST_STRIDE:
        raise Refused(f"a stride of {geometry.stride} is longer than {LONGEST_STRIDE}")
    if max(geometry.kernel) > LONGEST_KERNEL:
        raise Refused(f"a kernel of {geometry.kernel} is longer than {LONGEST_KERNEL}")
    if any(axis.kernel * axis.dilation + axis.padding + axis.stride > FARTHEST for axis in geometry.axes):
        raise Refused(f"kernel size times dilation plus padding exceeds {FARTHEST} in a dimension")
    if max(*problem.input_size, *problem.output_size) > INT32_MAX:
        raise Refused(f"a volume is longer than {INT32_MAX} in a dimension")


def _only_direct(wanted: Wanted) -> str | None:
    """Returns why only the direct family is asked for offers, or None if all families are."""
    for problem in wanted.values():
        if problem.batch == 0:
            return "there is nothing to compute"
        if any(axis.padding < 0 for axis in problem.geometry.axes):
            return "the first outputs of a window with negative padding read no input"
        taps, phases = problem.geometry.taps, problem.geometry.phases
        if taps > MOST_TAPS:
            return f"{taps} taps are more than {MOST_TAPS}"
        if phases > MOST_PHASES:
            return f"{phases} phases are more than {MOST_PHASES}"
    return None


@contextmanager
def _without_collections() -> Iterator[None]:
    """Puts off garbage collections while a call is planned.

    The many small objects of a search would make Python look through all objects of the program for cycles, of which
    planning makes next to none. With PyTorch imported this takes 80 ms, as long as the longest searches themselves.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@_without_collections()
def answers(wanted: Wanted, device: Device, pytorch: bool = False) -> list[Answer]:
    """Returns the offers and refusals of every family for the wanted passes.

    `pytorch`: PyTorch's operator may compute the call, so that it is asked too.
    """
    limit = _only_direct(wanted)
    if any(problem.norm for problem in wanted.values()):
        found = _answers_with_norm(wanted, device, limit)
    else:
        found = _answers(wanted, device, limit)
    return [*found, *pytorch_planner.offer(wanted, device)] if pytorch else found


def _answers(wanted: Wanted, device: Device, limit: str | None) -> list[Answer]:
    """Returns the answers of this library's families; `limit` says why only the direct family is asked, if it is."""
    found: list[Answer] = []
    for name, family in FAMILIES:
        if limit is not None and family is not direct_planner:
            found.append(Refusal(name, tuple(wanted), limit))
        else:
            found += _asked(family, wanted, device)
    found += folding.answers(wanted, device, taken, plan_of)
    if limit is None:
        found += aligning.answers(wanted, device, taken, plan_of)
    return found


def _answers_with_norm(wanted: Wanted, device: Device, limit: str | None) -> list[Answer]:
    """Returns the answers for a forward pass whose result needs statistics."""
    (problem,) = wanted.values()
    leaving: list[Answer] = []
    for _, family in FAMILIES if limit is None else ():
        if hasattr(family, "leaves_moments") and family.leaves_moments(problem):
            leaving += _asked(family, wanted, device)
    plain = _answers(statistics.without_norm(wanted), device, limit)
    return statistics.answers(plain, leaving, wanted, device)


def _asked(family: ModuleType, wanted: Wanted, device: Device) -> list[Answer]:
    return [_with_epilogue(answer, family, wanted) for answer in family.offer(wanted, device)]


def _with_epilogue(answer: Answer, family: ModuleType, wanted: Wanted) -> Answer:
    """Returns the answer, or a refusal if an epilogue is wanted and the family's kernel has none."""
    epilogue = any(wanted[which].has_epilogue for which in answer.passes)
    if isinstance(answer, Offer) and epilogue and not getattr(family, "HAS_EPILOGUE", False):
        return Refusal(answer.kernel, answer.passes, "its kernel has no epilogue")
    over_channels = any(wanted[which].channels for which in answer.passes)
    if isinstance(answer, Offer) and over_channels and not getattr(family, "HOLDS_CHANNELS", False):
        return Refusal(answer.kernel, answer.passes, "no warp of its kernel holds all channels of a position")
    return answer


def taken(wanted: Wanted, device: Device, pytorch: bool = False) -> Cover:
    """Returns the offers that compute all wanted passes at the least price."""
    return best(answers(wanted, device, pytorch), wanted, device, 1)[0]


def best(found: Sequence[Answer], wanted: Wanted, device: Device, most: int) -> list[Cover]:
    """Returns the covers with the least prices, at most `most` and at least one, the cheapest first."""
    covers = ranked(tuple(wanted), [answer for answer in found if isinstance(answer, Offer)], most)
    if not covers:
        refusals = "; ".join(f"{each.kernel}: {each.why}" for each in found if isinstance(each, Refusal))
        raise NotImplementedError(f"no kernels take {', '.join(w.value for w in wanted)} on {device}: {refusals}")
    return covers


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device, pytorch: bool = False) -> Plan:
    check_limits(problem)
    wanted = {problem.which: problem}
    with meeting(wanted, device):
        return plan_of(taken(wanted, device, pytorch), wanted, device)


@lru_cache(maxsize=4096)
def why_not_over_channels(problem: Problem, device: Device) -> str | None:
    """Returns why the convolution's kernel does not run the program over channels that follows it; None if it does.

    Without it the kernel stores its tail, and a pass reads that and writes the result.
    """
    if problem.geometry.groups > 1:
        return "the channels of a position are in several groups"
    check_limits(problem)
    stored = replace(problem, channels="", per_position="")
    with meeting({problem.which: problem}, device):
        found, plain = ({problem.which: each} for each in (problem, stored))
        offers = [each for each in answers(found, device) if isinstance(each, Offer)]
        best_offers = ranked(tuple(found), offers, 1)
        if not best_offers or isinf(best_offers[0][0].price):
            return "no kernel that takes the layer holds all channels of a position in a warp"
        inside = OVER_CHANNELS_PRICE * sum(offer.price for offer in best_offers[0])
        behind = sum(offer.price for offer in taken(plain, device)) + calibration.pass_microseconds(problem, device)
    if inside >= behind:
        return f"predicted {inside:.0f} us, and {behind:.0f} us with one more pass"
    return None


def check_over_channels(problem: Problem, device: Device) -> None:
    """Raises `Refused` for a problem with a program over channels that a pass over the stored tail computes."""
    if problem.channels and (why := why_not_over_channels(problem, device)) is not None:
        raise Refused(why)


def plan_of(cover: Cover, wanted: Wanted, device: Device) -> Plan:
    """Returns one plan for all passes of a cover. Offers must be asked and planned within one `meeting`."""
    return _in_turn(plans_of(cover, wanted, device))


@_without_collections()
def plans_of(cover: Cover, wanted: Wanted, device: Device) -> list[Plan]:
    """Returns the plans of a cover in the order in which they run; `Plan.passes` names the passes of each."""
    order, problem = list(Pass), next(iter(wanted.values()))
    plans = sorted((offer.plan() for offer in cover), key=lambda plan: order.index(plan.passes[0]))
    if problem.has_operands:
        plans = [_with_operands(plan, problem) for plan in plans]
    if problem.norm and not plans[0].aten:
        return [norm_planner.with_statistics(plan, problem, device) for plan in plans]
    return plans


def _with_operands(plan: Plan, problem: Problem) -> Plan:
    """Returns a plan whose launches also get the operands of the problem's tail."""
    volume = prod(problem.output_size)
    sizes = problem.tail_vectors, problem.tail_wholes, problem.geometry.out_channels, volume
    return replace(
        plan,
        launches=tuple(with_tail(launch, *sizes) for launch in plan.launches),
        kept=None if plan.kept is None else _with_operands(plan.kept, problem),
    )


def meeting(wanted: Wanted, device: Device) -> AbstractContextManager[None]:
    """Tells the repertoire which layer and volume are planned; forward pass and gradients count as two layers."""
    problem = next(iter(wanted.values()))
    layer = (problem.which is Pass.FORWARD, problem.geometry, problem.dtype, problem.tf32, problem.loose, device)
    return repertoire.meeting(layer, (problem.batch, problem.input_size))


@contextmanager
def aside() -> Iterator[None]:
    """Makes plans within its context for information only: they have no effect on the plans of later calls."""
    with repertoire.aside():
        try:
            yield
        finally:
            plan.cache_clear()


def forget() -> None:
    """Forgets the first volume of every layer, so that the next volume counts as the first."""
    plan.cache_clear()
    why_not_over_channels.cache_clear()
    repertoire.forget()
    for _, family in FAMILIES:
        if hasattr(family, "forget"):
            family.forget()


# ---- The gradients of one backward pass.


def plan_gradients(problems: tuple[Problem, ...], device: Device, pytorch: bool = False) -> Plan:
    """Returns one plan for all gradients that a backward pass wants."""
    return _in_turn(gradient_plans(problems, device, pytorch))


def gradient_plans(problems: tuple[Problem, ...], device: Device, pytorch: bool = False) -> list[Plan]:
    """Returns the plans of the wanted gradients in the order in which they run; `Plan.passes` names the gradients."""
    if not problems:
        return []
    for problem in problems:
        check_limits(problem)
    wanted = {problem.which: problem for problem in problems}
    with meeting(wanted, device):
        return plans_of(taken(wanted, device, pytorch), wanted, device)


def _in_turn(plans: Sequence[Plan]) -> Plan:
    """Joins several plans to one, whose workspaces share the same memory.

    If the first plan is an input gradient with launches that prepare operands, the other plans run between the
    preparation and the rest of the input gradient, to hide the preparation. Their workspaces then begin after the
    input gradient's workspace, so that the prepared operands are not overwritten.

    If two plans end by adding parts, one launch adds the parts of both behind the second, whose workspace then begins
    after that of the first.
    """
    if len(plans) == 1:
        return plans[0]
    first, *others = plans
    late = len(first.launches) - first.preparing if first.passes == (Pass.INPUT_GRAD,) and first.preparing else 0
    start = round_up(first.workspace_bytes, ALIGN) if late else 0
    adding = [plan for plan in plans if plan.launches and adds_one(plan.launches[-1])]
    launches, regions = _placed(first, 0)
    rest, launches = launches[len(launches) - late :], launches[: len(launches) - late]
    end, sums = first.workspace_bytes, list[Launch]()  # sums that wait for the next plan
    if len(adding) == 2 and first is adding[0]:
        sums, start = [launches.pop()], round_up(end, ALIGN)
    for plan in others:
        later, places = _placed(plan, start)
        end = max(end, start + plan.workspace_bytes)
        if len(adding) == 2 and plan in adding:
            sums, start = [*sums, later.pop()], round_up(end, ALIGN)
        launches += [*later, joined(*sums)] if len(sums) == 2 else later
        regions += places
    return Plan(
        " + ".join(plan.kernel for plan in plans),
        "; ".join(plan.why for plan in plans),
        (*launches, *rest),
        end,
        regions=tuple(regions),
        passes=tuple(which for plan in plans for which in plan.passes),
    )


def _placed(plan: Plan, start: int) -> tuple[list[Launch], list[tuple[str, int]]]:
    """Returns a plan's launches and regions, with unique names and with the workspace beginning at `start` bytes."""
    places = ([("workspace", 0)] if start else []) + list(plan.regions)
    own = {name: f"{name} of {plan.passes[0].value}" for name, _ in places}
    launches = [
        replace(launch, pointers=tuple(own.get(name, name) for name in launch.pointers)) for launch in plan.launches
    ]
    return launches, [(own[name], start + at) for name, at in places]
