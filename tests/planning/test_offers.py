"""The contract of offers: the cheapest cover, lower bounds that save work, and refusals that say why."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
from layers import Layer
from problems import A100, H200, problem, problems

from tconv3d.planning import calibration, planner
from tconv3d.planning.calibration import Work
from tconv3d.planning.offers import Answer, Offer, Refusal, Wanted, cheapest
from tconv3d.planning.problem import Device, Pass, Plan

LAYER = Layer(16, 24, (4, 5, 6), (3, 3, 3), (2, 2, 2), (1, 1, 1))
DX, DW, DB = Pass.INPUT_GRAD, Pass.WEIGHT_GRAD, Pass.BIAS_GRAD
GRADIENTS = problems(LAYER)


@pytest.fixture(autouse=True)
def cycles_are_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "microseconds", lambda kernel, problem, work, *rest: work.cycles)


def offer(name: str, cost: float | Callable[[], float], *passes: Pass, least: float | None = None) -> Offer:
    """An offer that takes `cost` microseconds, and at least `least`."""

    def work() -> Work:
        return Work(1, cost() if callable(cost) else cost)

    bound = None if least is None else Work(1, least)
    return Offer(name, passes, GRADIENTS[passes[0]], H200, work, lambda: Plan(name, "a test", ()), bound)


def names(wanted: tuple[Pass, ...], offers: list[Offer]) -> list[str] | None:
    cover = cheapest(wanted, offers)
    return None if cover is None else [each.kernel for each in cover]


def never() -> float:
    pytest.fail("the work was counted")


def test_of_one_pass_the_cheapest_offer_is_taken() -> None:
    assert names((DX,), [offer("slow", 3, DX), offer("fast", 1, DX), offer("other pass", 0, DW)]) == ["fast"]


def test_an_offer_for_more_than_is_wanted_is_not_taken() -> None:
    assert names((DX,), [offer("alone", 3, DX), offer("both", 1, DX, DW)]) == ["alone"]
    assert names((DX,), [offer("both", 1, DX, DW)]) is None


@pytest.mark.parametrize(("joint", "expected"), [(2.9, ["joint"]), (3.1, ["dx", "dw"])])
def test_two_passes_together_or_apart(joint: float, expected: list[str]) -> None:
    assert names((DX, DW), [offer("dw", 1, DW), offer("joint", joint, DX, DW), offer("dx", 2, DX)]) == expected


def test_of_three_passes_any_two_may_come_together() -> None:
    alone = [offer("dx", 4, DX), offer("dw", 4, DW), offer("db", 4, DB)]
    for together in itertools.combinations((DX, DW, DB), 2):
        (left,) = {DX, DW, DB} - set(together)
        found = cheapest((DX, DW, DB), [*alone, offer("two", 5, *together)])
        assert found is not None and {each.passes for each in found} == {together, (left,)}
    assert names((DX, DW, DB), [*alone, offer("two", 5, DX, DW), offer("all", 8.5, DX, DW, DB)]) == ["all"]


def test_every_cover_is_exact_and_none_is_cheaper() -> None:
    """Random offers, with and without lower bounds, against all of their subsets."""
    draw, every = random.Random(1), sorted(which.value for which in (DX, DW, DB))
    sets = [subset for count in (1, 2, 3) for subset in itertools.combinations((DX, DW, DB), count)]
    for _ in range(200):
        offers = []
        for number in range(draw.randint(0, 7)):
            cost = draw.uniform(1, 9)
            least = draw.choice((None, cost * draw.random()))
            offers.append(offer(str(number), cost, *draw.choice(sets), least=least))
        covers = [
            subset
            for count in (1, 2, 3)
            for subset in itertools.combinations(offers, count)
            if sorted(which.value for each in subset for which in each.passes) == every
        ]
        best = min((sum(each.microseconds for each in subset) for subset in covers), default=None)
        found = cheapest((DX, DW, DB), offers)
        assert (None if found is None else sum(each.microseconds for each in found)) == pytest.approx(best)


def test_a_lower_bound_above_the_best_cover_saves_the_counting() -> None:
    offers = [offer("costly", never, DX, DW, least=3.5), offer("dx", 2, DX), offer("dw", 1, DW)]
    assert names((DX, DW), offers) == ["dx", "dw"]
    assert names((DX,), [offer("costly", never, DX, least=2.5), offer("dx", 2, DX)]) == ["dx"]


def test_a_lower_bound_does_not_stand_for_the_time() -> None:
    """An offer whose bound wins is counted, and then it may lose."""
    assert names((DX,), [offer("costly", 3, DX, least=1), offer("dx", 2, DX)]) == ["dx"]
    assert names((DX,), [offer("costly", 1.5, DX, least=1), offer("dx", 2, DX)]) == ["costly"]
    assert names((DX,), [offer("costly", inf, DX, least=1), offer("dx", 2, DX)]) == ["dx"]


def test_a_bound_that_wins_only_with_another_bound_is_looked_at() -> None:
    offers = [
        offer("joint", 8, DX, DW),
        offer("dx", 6, DX),
        offer("dw", 10, DW),
        offer("bound dx", 5, DX, least=5),
        offer("bound dw", 1, DW, least=1),
    ]
    assert names((DX, DW), offers) == ["bound dx", "bound dw"]


# ---- the planner


class Family:
    """A family that answers what it is told."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers

    def offer(self, wanted: Wanted, device: Device) -> list[Answer]:
        return list(self.answers)


def test_no_cover_is_an_error_with_all_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Family(Refusal("first", (DX,), "it is Monday"), offer("first", 1, DW))
    second = Family(Refusal("second", (DX,), "there are 16 channels"))
    monkeypatch.setattr(planner, "FAMILIES", (("first", first), ("second", second)))
    with pytest.raises(NotImplementedError) as error:
        planner.taken({which: GRADIENTS[which] for which in (DX, DW)}, H200)
    for words in ("input_grad, weight_grad", "first: it is Monday", "second: there are 16 channels", "H200"):
        assert words in str(error.value)


def test_a_kernel_without_epilogue_is_refused_where_a_relu_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = problem(LAYER, Pass.FORWARD)

    def family(name: str, cost: float, epilogue: bool) -> Family:
        make = Offer(name, (Pass.FORWARD,), forward, H200, lambda: Work(1, cost), lambda: Plan(name, "a test", ()))
        found = Family(make)
        found.HAS_EPILOGUE = epilogue  # type: ignore[attr-defined]
        return found

    families = (("plain", family("plain", 1, False)), ("fused", family("fused", 2, True)))
    monkeypatch.setattr(planner, "FAMILIES", families)
    assert planner.taken({Pass.FORWARD: forward}, H200)[0].kernel == "plain"
    relu = {Pass.FORWARD: replace(forward, relu=True)}
    assert planner.taken(relu, H200)[0].kernel == "fused"
    (refused,) = [each for each in planner.answers(relu, H200) if isinstance(each, Refusal)]
    assert refused.kernel == "plain" and "epilogue" in refused.why


@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
def test_families_answer_for_wanted_passes_alone(device: Device) -> None:
    """Each pass alone, and every set of gradients: answers name no pass that is not wanted, and can be planned."""
    forward = problem(LAYER, Pass.FORWARD)
    sets = [subset for count in (1, 2, 3) for subset in itertools.combinations((DX, DW, DB), count)]
    for wanted in ({Pass.FORWARD: forward}, *({which: GRADIENTS[which] for which in subset} for subset in sets)):
        for answer in planner.answers(wanted, device):
            assert answer.passes and set(answer.passes) <= set(wanted), answer
            if isinstance(answer, Offer):
                assert answer.least is None or answer.least_microseconds <= answer.microseconds, answer
                assert answer.plan().passes == answer.passes
            else:
                assert answer.why


def test_the_plans_of_a_backward_pass_are_those_of_the_cheapest_cover() -> None:
    taken = planner.taken(GRADIENTS, H200)
    plans = planner.gradient_plans(tuple(GRADIENTS.values()), H200)
    assert {plan.passes for plan in plans} == {each.passes for each in taken}


def test_an_offer_counts_its_work_once() -> None:
    counts: list[str] = []

    def counting() -> float:
        counts.append("counted")
        return 1.0

    one = offer("counted", counting, DX)
    assert cheapest((DX,), [one, offer("dear", 9, DX)]) == (one,)
    assert one.microseconds == 1.0 and counts == ["counted"]
