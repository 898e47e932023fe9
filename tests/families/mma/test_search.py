"""The search for the fastest build of the kernel on mma.sync finds what a comparison of all candidates finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pytest

from tconv3d.families.mma import far, model, search
from tconv3d.families.mma import planner as mma_planner
from tconv3d.families.mma.work import works
from tconv3d.planning import effort, gpus
from tconv3d.planning.problem import Device, Pass, Problem
from tconv3d.tools.bench.layers import LAYERS, Layer
from tconv3d.tools.bench.problems import problems_of_layer
from tconv3d.tools.bench.wide import wide_layers

MOST_EVALUATED = 0.25  # share of the candidates of several layers that a search may evaluate
AS_GOOD = 1.03  # most cycles of the build that a limited search finds, over those of the best build
FAR_AS_GOOD = 1.25  # AS_GOOD of builds for taps that reach far, of which there are more
KINDS, LAYOUTS = ("tf32", "bfloat16", "float16", "float32"), ("contiguous", "channels_last_3d")
DEVICES = [gpus.GPUS[name].device for name in ("H200", "A100", "RTX 4090")]
FAR = Layer(1, 8, 8, (2, 1, 5), (4, 7, 4), (2, 1, 1), (5, 3, 3), (3, 1, 0), (5, 2, 3))


def cases() -> list[tuple[Problem, Device]]:
    layers = [*wide_layers(9, 11, KINDS, LAYOUTS).values(), (FAR, ("tf32", "contiguous"))]
    problems = [each for layer, kind in layers for each in problems_of_layer(layer, *kind)]
    matrix = [each for each in problems if each.which in (Pass.FORWARD, Pass.INPUT_GRAD)]
    found = [(problem, device) for problem, device in zip(matrix, cycle(DEVICES), strict=False)]
    small = replace(DEVICES[0], shared_bytes=20_000)  # hardly a tile with its halo fits
    found += [(problem, small) for problem in matrix[-2:]]
    return [case for case in found if mma_planner.why_never(*case) is None]


def bounds_of(problem: Problem, device: Device) -> dict[tuple[model.Work, model.Shape, model.Box], float]:
    """Returns the bound of every shape with every box. The bound of a shape holds for all its boxes."""
    least: dict[tuple[model.Work, model.Shape, model.Box], float] = {}
    for side, copy, rows in mma_planner.sides(problem, device):
        for work in (*works(side), *far.divided(side), model.Work(side, 0, apart=True)):
            for shapes in search._Bound(work, copy, problem.item_bytes, device, rows).shapes(0):
                for group in shapes.groups():
                    assert shapes.least <= group.least * (1 + 1e-12), group
                    least[work, group.shape._replace(blocks=rows), group.box] = group.least
    return least


def test_the_search_leaves_out_no_faster_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate takes at least its bound, and few evaluations find the first of the fastest candidates.

    With the limit, the search finds a candidate that is nearly as fast.
    """
    predict, evaluated, all_candidates = model.Candidate.cycles, 0, 0

    def counted(self: model.Candidate, device: Device) -> float:
        nonlocal evaluated
        evaluated += 1
        return predict(self, device)

    for problem, device in cases():
        sides = list(mma_planner.sides(problem, device))
        with monkeypatch.context() as patch, effort.unlimited():
            patch.setattr(model.Candidate, "cycles", counted)
            found = search.fastest(sides, problem.item_bytes, device)
        every = [(predict(each, device), each) for each in mma_planner._all(problem, device)]
        all_candidates += len(every)
        best = min(every, key=lambda pair: pair[0], default=(0.0, None))[1]
        assert found == best, (problem, device)
        limited = search.fastest(sides, problem.item_bytes, device)
        assert (limited is None) == (best is None)
        assert best is None or limited.cycles(device) <= AS_GOOD * best.cycles(device), (problem, device)
        least = bounds_of(problem, device)
        for cycles, each in every:
            b = each.build
            shape = model.Shape(b.tiles_m, b.tiles_n, b.warps_m, b.warps_n, b.steps, each.rows)
            assert cycles >= least[each.work, shape, each.box], each
    assert 0 < evaluated < MOST_EVALUATED * all_candidates


def test_the_search_for_taps_that_reach_far_leaves_out_no_faster_candidate() -> None:
    """Lattices and steps that are left out are bounded too."""
    seen = set()
    for problem, device in cases():
        if far.why_never(problem, device) is not None:
            continue
        sides = list(mma_planner.sides(problem, device))
        with effort.unlimited():
            found = search.fastest(sides, problem.item_bytes, device, far.divided)
        every = [(each.cycles(device), each) for each in far.candidates(problem, device)]
        best = min(every, key=lambda pair: pair[0], default=(0.0, None))[1]
        assert found == best, (problem, device)
        limited = search.fastest(sides, problem.item_bytes, device, far.divided)
        assert best is None or limited.cycles(device) <= FAR_AS_GOOD * best.cycles(device), (problem, device)
        least = bounds_of(problem, device)
        for cycles, each in every:
            b = each.build
            seen.add((b.lattices, b.crops))
            shape = model.Shape(b.tiles_m, b.tiles_n, b.warps_m, b.warps_n, b.steps, each.rows)
            assert cycles >= least[each.work, shape, each.box], each
    assert len(seen) >= 4, seen


def test_the_limit_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search looks at about as many builds as its limit allows, and finds one whatever the limit."""
    problems = problems_of_layer(LAYERS["nnunet_320_320_4"], "tf32", "contiguous")
    problem = next(each for each in problems if each.which is Pass.INPUT_GRAD)
    looked_at = {}
    builds = model.builds

    def counted(work: model.Work, shape: model.Shape) -> Iterator[model.Build]:
        for build in builds(work, shape):
            looked_at[limit] += 1
            yield build

    monkeypatch.setattr(model, "builds", counted)
    for limit in (1, 100, 10**9):
        looked_at[limit] = 0
        monkeypatch.setattr(search, "MMA_BUILDS", limit)
        assert mma_planner._fastest(problem, DEVICES[1]) is not None
    assert looked_at[1] < 50 < 100 <= looked_at[100] < 150 < looked_at[10**9]
