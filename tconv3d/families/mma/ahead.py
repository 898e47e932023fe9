"""Offers blocks on mma.sync that stay for many tiles, for memory-bound forward passes (mma.cuh, kAhead).

All weights of a block lie in shared memory, and the last step of a tile asks for the first halo of the next one, so
that loads go on while outputs are stored. Nobody has measured these builds, which are therefore an offer of their own
beside `planner.py`, with derived rates: where times decide, both are timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import inf

from ...planning import calibration, offers
from ...planning.geometry import Triple
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem
from ...planning.repertoire import Repertoire, searched, typical_problems
from ...planning.side import Side
from . import model, planner
from .box import Box, boxes, boxes_along
from .model import PIECES, WORDS, Build, Candidate, Shape
from .work import Work, works

PASSES = (Pass.FORWARD,)
LEAST_TILES, FEWEST_TILES = 16, 4  # sums of a warp, in tiles of 16 x 8; the fewest if it has all columns of a group
WARPS = ((8, 1), (4, 2), (4, 1))
FEWEST_POSITIONS = 32768  # positions of the volumes of all batch items: fewer make too few tiles for each block
BOXES = 1  # boxes of each shape to try

Choice = tuple[Build, bool]  # a build, and whether x is first rewritten as rows of channels
_repertoire = Repertoire[tuple[object, ...], tuple[int, Triple], Choice]()


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    return offers.one_by_one(PASSES, "mma_ahead", wanted, device, why_never, work, plan)


def why_never(problem: Problem, device: Device) -> str | None:
    """Returns a reason for refusal that is known without a search for a build, or None."""
    if device.capability[0] == 9:
        return "it is for GPUs without Hopper's instructions"
    if refusal := planner.why_never(problem, device):
        return refusal
    if problem.channels or problem.norm:
        return "what follows the sums needs whole blocks"
    if problem.which is not Pass.FORWARD:
        return f"it computes forward passes, not the pass {problem.which.value}"
    products = planner.PRODUCTS_PER_CYCLE * 4 / problem.item_bytes
    if problem.bytes / model.MEMORY_BYTES_PER_CYCLE < problem.flops / 2 / products:
        return "the layer waits for tensor cores, not for memory"
    if Side.of(problem).positions < FEWEST_POSITIONS:
        return "blocks would have too few tiles"
    return None


def work(problem: Problem, device: Device) -> calibration.Work:
    """Returns the work of the launches as the model predicts it."""
    found = chosen(problem, device)
    if found is None or planner.why_too_far(found, problem):
        return calibration.Work(2, inf)  # work that is never the cheapest
    return calibration.Work(2, found.cycles(device))


def plan(problem: Problem, device: Device) -> Plan:
    found = chosen(problem, device)
    assert found is not None, "a plan of work that is infinite"
    return planner.plan_of(found, problem)


def forget() -> None:
    """Forgets all choices, so that the next volume of every layer counts as its first."""
    _own.cache_clear()
    _repertoire.forget()


def chosen(problem: Problem, device: Device) -> Candidate | None:
    """Returns a build of the layer's repertoire (few builds for all volumes) with its best box, or None."""
    layouts = problem.input[1] == 1, problem.output[4] == 1
    types = problem.dtype, problem.tf32, problem.activation
    kind = problem.which, problem.geometry, *types, *layouts
    choice = _repertoire.choose(
        (*kind, planner.copy_of(Side.of(problem)), device),
        (problem.batch, problem.input_size),
        lambda: _own(problem, device),
        lambda: (found for each in typical_problems(problem) if (found := _own(each, device)) is not None),
        lambda choice, _: best.cycles(device) if (best := _best(problem, device, choice)) else inf,
    )
    return None if choice is None else _best(problem, device, choice)


@lru_cache(maxsize=1024)
def _own(problem: Problem, device: Device) -> Choice | None:
    """Returns the build that the model predicts to be fastest for this volume, or None."""
    plain = replace(problem, relu=False, tail="", tail_vectors=0, tail_wholes=0, tail_reads=())
    settings = (plain, replace(device, name=""))
    found: Choice | None = searched(__name__, settings, Choice | None, lambda: _fastest(*settings))
    return found


def _fastest(problem: Problem, device: Device) -> Choice | None:
    best = min(candidates(problem, device), key=lambda each: each.cycles(device), default=None)
    return None if best is None else (best.build, best.rows)


@lru_cache(maxsize=4096)
def _best(problem: Problem, device: Device, choice: Choice) -> Candidate | None:
    """Returns a build with its predicted fastest box for the volume, or None if none fits."""
    build, with_rows = choice
    for side, copy, rows in planner.sides(problem, device):
        if rows == with_rows:
            work = Work(side, build.unrolled, build.apart)
            found = (_fitting(work, build, box, copy, device, rows) for box in _boxes(work, build))
            same = (each for each in found if each is not None and each.build == build)
            return min(same, key=lambda each: each.cycles(device), default=None)
    return None


def candidates(problem: Problem, device: Device) -> Iterator[Candidate]:
    """Yields all builds that fit the device and have several tiles for each block, with their cheapest boxes."""
    for side, copy, rows in planner.sides(problem, device):
        for work in works(side) if copy in (PIECES, WORDS) else ():
            if not work.unrolled:
                continue
            for shape in model.shapes(work, copy, problem.item_bytes):
                if _is_worth_trying(work, shape):
                    for build in _builds(work, shape):
                        for box in _boxes(work, build)[:BOXES]:
                            if found := _fitting(work, build, box, copy, device, rows):
                                yield found


def _boxes(work: Work, build: Build) -> tuple[Box, ...]:
    if build.along:
        return boxes_along(work, build.warps_m)
    return boxes(work, build.tiles_m, build.warps_m)


def _may_be_along(work: Work) -> bool:
    """Tells whether neighbours along w are neighbours in memory, so that the rows of a tile may lie along w."""
    along = work.side.gathers[2]
    return work.side.y[4] == 1 and along.input_step == 1 and along.output_step == along.phases in (1, 2, 4)


def _is_worth_trying(work: Work, shape: Shape) -> bool:
    tiles = len(work.inner.phases) * shape.tiles_m * shape.tiles_n
    least = FEWEST_TILES if 8 * shape.tiles_n * shape.warps_n >= work.side.outs else LEAST_TILES
    return tiles >= least and (shape.warps_m, shape.warps_n) in WARPS


def _builds(work: Work, shape: Shape) -> Iterator[Build]:
    along = shape.tiles_m == 1 and _may_be_along(work)
    rows = next(model.builds(work, shape)).rows
    for build in model.builds(work, shape):
        if build.rows == rows:
            yield replace(build, resident=True, ahead=True, along=along)


def _fitting(work: Work, build: Build, box: Box, copy: int, device: Device, rows: bool) -> Candidate | None:
    """Returns a build with as many blocks as fit, and as many tiles as make all blocks run at once; or None."""
    found = Candidate(work, build, box, copy, work.side.problem.item_bytes, rows)
    if not model.may_stay(work, found.chunks, found.tap_bytes, device):
        return None
    fit = min(found.blocks_that_fit(device), build.blocks)
    steps = (sum(-(-len(source.rows) // build.rows) for source in phase) for phase in work.phases)
    # Copies are ahead by at most one tile. Blocks of phases without taps copy nothing.
    if fit == 0 or found.chunks * min(filter(None, steps), default=0) < build.stages - 1:
        return None
    several = replace(found, build=replace(build, blocks=fit)).in_one_wave(device)
    return several if several.tiles_of_block > 1 else None
