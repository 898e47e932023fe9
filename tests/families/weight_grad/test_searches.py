"""The searches of the weight gradients on tensor cores find what a comparison of all candidates finds."""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod

import pytest

from tconv3d.families.weight_grad import hopper, hopper_search, warps
from tconv3d.families.weight_grad.hopper_model import LeastCost, box_cost
from tconv3d.families.weight_grad.hopper_tiling import buffers
from tconv3d.planning import effort, gpus
from tconv3d.planning.problem import Pass, Problem, volume_kind
from tconv3d.tools.bench.layers import Layer, layer
from tconv3d.tools.bench.problems import problems_of_layer

H200 = gpus.GPUS["H200"].device
LAYERS = {
    "stride 2": layer(2, 48, 24, (6, 8, 12), 3, 2, 1, 1),
    "phases with and without taps": layer(2, 24, 40, (5, 4, 9), (2, 3, 5), (3, 1, 3), (1, 1, 2)),
    "large kernel": layer(1, 32, 32, 9, (3, 7, 7), 1, (1, 3, 3)),
}
KINDS = (("tf32", "contiguous"), ("bfloat16", "channels_last_3d"))


def weight_grad(each: Layer, kind: tuple[str, str]) -> Problem:
    return next(problem for problem in problems_of_layer(each, *kind) if problem.which is Pass.WEIGHT_GRAD)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", [*KINDS, ("float32", "contiguous"), ("float16", "contiguous")])
def test_warps(name: str, kind: tuple[str, str]) -> None:
    """Every tiling costs at least its bound, and the search finds the first of the cheapest."""
    of = warps._layer(weight_grad(LAYERS[name], kind))
    planes, best, cheapest, evaluated = of.planes(of.pieces[0]), None, inf, 0
    for largest, sizes in warps._candidates(of):
        least = warps._least_cost(of, planes, largest, warps._least_of_segment(of, planes, largest.block_rows))
        for segments in sizes:
            tiling = replace(largest, segments=segments)
            cost = warps._cost(of, planes, tiling, H200)
            assert cost is None or cost >= least, tiling
            if cost is not None and cost < cheapest:
                best, cheapest = tiling, cost
            evaluated += 1
    warps.tiling_of.cache_clear()
    with effort.unlimited():
        assert evaluated > 50 and warps.tiling_of(of, H200) == best
    warps.tiling_of.cache_clear()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", [*KINDS, ("tf32", "channels_last_3d")])
def test_boxes_of_hopper(name: str, kind: tuple[str, str]) -> None:
    """Every box costs at least its bound, and the search finds a cheapest box."""
    problem = weight_grad(LAYERS[name], kind)
    of = hopper.layer_of(problem)
    size, _ = hopper.as_walked(problem, of.at_once)
    looked_at = 0
    for tiling in hopper_search.tilings(of, H200, 12):
        bound, costs = LeastCost(of, tiling), []
        for box in hopper_search.boxes(size, of.per_word):
            if made := buffers(tiling, box, H200.shared_bytes):
                costs.append(box_cost(of, made, size))
                assert bound.of(box, size) <= costs[-1], (tiling, box)
        with effort.unlimited():
            found = hopper_search.best_buffers.__wrapped__(of, tiling, size, H200.shared_bytes)
        assert min(costs, default=None) == (None if found is None else box_cost(of, found, size))
        looked_at += len(costs)
    assert looked_at > 20


@pytest.mark.parametrize("name", LAYERS)
def test_tilings_of_hopper(name: str) -> None:
    """Every tiling takes at least its bound, and the search finds the first of those that are nearly the fastest."""
    problem = weight_grad(LAYERS[name], KINDS[0])
    of = hopper.layer_of(problem)
    size, _ = hopper.as_walked(problem, of.at_once)
    volume = problem.batch, size
    found = hopper_search.tilings(of, H200, hopper_search.CHOICES[volume_kind(problem.batch * prod(size))])
    costs = [hopper_search.tiling_cycles(of, tiling, *volume, H200) for tiling in found]
    for tiling, cost in zip(found, costs, strict=True):
        assert hopper_search._least_cycles(of, tiling, *volume, H200) <= cost, tiling
    good = (i for i, cost in enumerate(costs) if cost <= hopper_search.AS_GOOD * min(costs))
    assert hopper_search._best_tiling(of, H200, *volume) == found[next(good)]
