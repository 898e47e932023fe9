"""The search for the fastest build of the kernel on mma.sync finds what a comparison of all candidates finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

from tconv3d.families.mma import model, search
from tconv3d.families.mma import planner as mma_planner
from tconv3d.planning import gpus
from tconv3d.planning.problem import Device, Pass, Problem
from tconv3d.tools.bench.layers import Layer
from tconv3d.tools.bench.problems import problems_of_layer
from tconv3d.tools.bench.wide import wide_layers

MOST_EVALUATED = 0.25  # share of the candidates of several layers that a search may evaluate
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
    return [case for case in found if mma_planner._why_never(*case) is None]


def test_the_search_leaves_out_no_faster_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate takes at least its bound, and few evaluations find the first of the fastest candidates."""
    least: dict[tuple[model.Work, model.Shape, model.Box], float] = {}
    groups, predict, evaluated, all_candidates = search._Bound.groups, model.Candidate.cycles, 0, 0

    def noted(self: search._Bound, number: int) -> list[search._Group]:
        found = list(groups(self, number))
        least.update({(self.work, group.shape._replace(blocks=0), group.box): group.least for group in found})
        return found

    def counted(self: model.Candidate, device: Device) -> float:
        nonlocal evaluated
        evaluated += 1
        return predict(self, device)

    monkeypatch.setattr(search._Bound, "groups", noted)
    for problem, device in cases():
        least.clear()
        with monkeypatch.context() as patch:
            patch.setattr(model.Candidate, "cycles", counted)
            found = search.fastest(mma_planner._sides(problem, device), problem.item_bytes, device)
        every = [(predict(each, device), each) for each in mma_planner._all(problem, device)]
        all_candidates += len(every)
        best = min(every, key=lambda pair: pair[0], default=(0.0, None))[1]
        assert found == best, (problem, device)
        for cycles, each in every:
            b = each.build
            shape = model.Shape(b.tiles_m, b.tiles_n, b.warps_m, b.warps_n, b.steps, 0)
            assert cycles >= least[each.work, shape, each.box], each
    assert 0 < evaluated < MOST_EVALUATED * all_candidates
