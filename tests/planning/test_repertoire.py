"""What is compiled is chosen from a few builds, by the layer, its first volume and the volume at hand alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from math import inf

import pytest
import torch

from tconv3d.api.explain import call_of, problems_of
from tconv3d.planning import planner, repertoire
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.problem import Problem
from tconv3d.planning.repertoire import NEAREST, TYPICAL, Repertoire, nearest
from tconv3d.tools.bench.layers import Layer, layer

H200 = GPUS["H200"].device
TYPICAL_SIZES = [batch * edge**3 for batch, edge in TYPICAL]

Choose = Callable[[int], int | None]


def family(misfits: Callable[[int, int], bool] = lambda choice, size: False) -> Choose:
    """A repertoire whose volumes and builds are numbers: a build fits best the volumes near it."""
    found = Repertoire[str, int, int]()

    def cost(choice: int, size: int, most: float) -> float:
        takes = max(choice, size) / min(choice, size)
        return takes if takes <= most and not misfits(choice, size) else inf

    def choose(size: int) -> int | None:
        typical = nearest(size, ((each, each) for each in TYPICAL_SIZES))
        return found.choose(
            "layer", size, lambda: size, lambda: iter(typical), lambda choice, most: cost(choice, size, most)
        )

    return choose


def test_the_first_volume_is_planned_for_itself() -> None:
    choose = family()
    assert choose(1000) == 1000
    assert choose(1000) == 1000


def test_others_get_the_best_of_the_first_and_of_typical_ones() -> None:
    choose = family()
    choose(1000)
    assert choose(1010) == 1000
    assert choose(60) == 64
    assert choose(2**20) == 96**3
    assert choose(32768) == 32768


def test_those_that_are_as_good_stay_with_the_first() -> None:
    choose = family()
    choose(31900)
    assert choose(32768) == 31900  # 32768 is typical, and less than 3% better


def test_where_none_of_the_nearest_fits_the_next_does() -> None:
    assert NEAREST == 2
    choose = family(lambda choice, size: choice in (64, 512))
    choose(300000)
    assert choose(60) == 300000  # fits, if badly
    choose = family(lambda choice, size: choice != size and choice in (300000, 64, 512))
    choose(300000)
    assert choose(60) == 12**3


def test_where_none_fits_a_volume_is_planned_for_itself() -> None:
    choose = family(lambda choice, size: choice != size)
    choose(300000)
    assert choose(60) == 60
    assert choose(70) == 70


def test_a_family_that_meets_a_layer_late_plans_no_volume_for_itself() -> None:
    repertoire.forget()
    choose = family()
    with repertoire.meeting("a layer", 7000):
        pass
    with repertoire.meeting("a layer", 1000):
        assert choose(1000) == 12**3
    with repertoire.meeting("a layer", 7000):
        assert choose(7000) == 7000
    with repertoire.meeting("another", 1000):
        assert family()(1000) == 1000
    repertoire.forget()


# ---- planners


LAYERS = {"halo, unfolded gradients": layer(2, 8, 8, 8, 3, 1, 1), "up-convolution": layer(2, 16, 8, 8, 2, 2)}
VOLUMES = ((1, (4, 4, 4)), (2, (9, 8, 7)), (1, (20, 20, 20)), (2, (64, 64, 65)))


def problems(of: Layer, batch: int, size: tuple[int, int, int]) -> list[Problem]:
    x = torch.empty(batch, of.in_channels, *size, device="meta")
    return problems_of(*call_of(of.module(device="meta"), x))  # type: ignore[arg-type]


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    planner.forget()
    yield
    planner.forget()


def plans(of: Layer, batch: int, size: tuple[int, int, int]) -> object:
    forward, *gradients = problems(of, batch, size)
    return planner.plan(forward, H200), planner.plan_gradients(tuple(gradients), H200)


@pytest.mark.parametrize("name", LAYERS)
def test_plans_do_not_depend_on_the_order_of_other_volumes(name: str, tf32: None) -> None:
    """Nor on which of them there were: somebody else, who met the same first volume, plans the same."""
    of = LAYERS[name]
    found: dict[object, set[object]] = {}
    for order in list(permutations(VOLUMES))[::5]:
        planner.forget()
        plans(of, of.batch, of.size)
        for volume in order:
            found.setdefault(volume, set()).add(plans(of, *volume))
    planner.forget()
    plans(of, of.batch, of.size)
    for volume in VOLUMES[:1]:
        found[volume].add(plans(of, *volume))
    assert {volume: len(different) for volume, different in found.items()} == dict.fromkeys(VOLUMES, 1)


@pytest.mark.parametrize("name", LAYERS)
def test_the_first_volume_of_a_layer_gets_its_own_plan(name: str, tf32: None) -> None:
    """Whatever other layers there were."""
    of = LAYERS[name]
    own = plans(of, *VOLUMES[0])
    planner.forget()
    for other in LAYERS.values():
        if other is not of:
            plans(other, *VOLUMES[2])
    assert plans(of, *VOLUMES[0]) == own


@pytest.mark.parametrize("name", LAYERS)
def test_who_asks_is_not_met(name: str, tf32: None) -> None:
    """Plans that somebody only looks at leave the first volume to come as the first."""
    of = LAYERS[name]
    asked, first = VOLUMES[:2]
    own = plans(of, *first)
    planner.forget()
    with planner.aside():
        plans(of, *asked)
    assert plans(of, *first) == own
    planner.forget()
    plans(of, *asked)
    assert plans(of, *first) != own, "it matters which comes first"


def test_what_a_search_found_is_found_again(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path))
    calls: list[int] = []

    def search() -> tuple[int, str]:
        calls.append(1)
        return 3, "found"

    for _ in range(2):
        assert repertoire.searched("tconv3d.planning.geometry", ("settings", 1), tuple[int, str], search) == (
            3,
            "found",
        )
    assert repertoire.searched("tconv3d.planning.geometry", ("settings", 2), tuple[int, str], search) == (3, "found")
    assert len(calls) == 2
