"""Who computes the moments for a norm: the kernel that the planner takes, or a pass over its result."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layers import Layer
from preferred import forgetting
from problems import A100, H200, problem

from tconv3d.planning import calibration, planner, repertoire, statistics
from tconv3d.planning.calibration import Work
from tconv3d.planning.offers import Offer, Refusal
from tconv3d.planning.problem import Device, Norm, Pass, Problem
from tconv3d.torch_ops import choosing

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
MONAI = Layer(64, 16, (32, 32, 32), T3, T2, T1, T1, batch=4)
WIDE = Layer(128, 64, (32, 32, 32), T3)
LAYERS = {
    "monai": MONAI,
    "wide": WIDE,
    "odd rows": Layer(32, 32, (32, 48, 48), T3, T2, T1, batch=4),
    "few inputs": Layer(3, 32, (32, 32, 32), T3, T2, T1, T1),
    "groups": Layer(32, 32, (16, 16, 16), T3, T1, T1, groups=4),
    "empty batch": replace(MONAI, batch=0),
}


def normed(layer: Layer, dtype: str, groups: int) -> Problem:
    return replace(problem(layer, Pass.FORWARD, dtype), relu=True, norm=Norm(groups, 1e-5))


def offers(wanted: Problem, device: Device) -> dict[str, Offer]:
    found = planner.answers({wanted.which: wanted}, device)
    offered = [answer for answer in found if isinstance(answer, Offer)]
    assert len({offer.kernel for offer in offered}) == len(offered), "winners tell offers apart by their kernels"
    return {offer.kernel: offer for offer in offered}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
def test_every_family_offers_its_cheaper_way(name: str, dtype: str, device: Device) -> None:
    """The price is that of the kernel, and of the pass where the plan has one; no family refuses for the norm."""
    wanted = normed(LAYERS[name], dtype, 4)
    behind = calibration.reading_microseconds(wanted, device)
    with forgetting(), planner.meeting({wanted.which: wanted}, device):
        found = offers(wanted, device)
        plain = offers(replace(wanted, norm=None), device)
        assert found.keys() == plain.keys()
        for kernel, offer in found.items():
            (plan,) = planner.plans_of((offer,), {wanted.which: wanted}, device)
            kernels = [launch.kernel for launch in plan.launches]
            assert kernels[-1] == "statistics" and plan.moments > 0
            passed = "channel_moments" in kernels
            assert plan.tile.endswith("a pass over its result leaves the moments" if passed else "of its result")
            if passed:
                assert offer.microseconds == pytest.approx(plain[kernel].microseconds + behind)
            assert offer.least_microseconds <= offer.price <= plain[kernel].price + behind + 1e-9


def test_a_pass_reads_the_result_once_at_the_bandwidth_of_a_copy() -> None:
    wanted = normed(MONAI, "bfloat16", 4)
    launch = calibration.DEFAULT["launches"]
    assert calibration.reading_microseconds(wanted, H200) == pytest.approx(launch + 4 * 16 * 64**3 * 2 / 4.27e6)


def test_the_cheaper_way_may_be_either() -> None:
    """Narrow layers are read again, and wide ones leave the moments in their kernel."""
    for layer, passed in ((MONAI, True), (WIDE, False)):
        plan = planner.plan(normed(layer, "bfloat16", 4), H200)
        assert plan.kernel == "halo" and ("channel_moments" in [each.kernel for each in plan.launches]) == passed


@pytest.mark.parametrize("first", ["norm", "plain"])
def test_a_layer_with_and_without_a_norm_has_a_build_for_each(first: str) -> None:
    """What was planned first is not the build of the other, which may not be able to leave moments."""
    wanted = normed(WIDE, "bfloat16", 4)
    both = [wanted, replace(wanted, norm=None)]
    with forgetting():
        alone = []
        for each in both:
            planner.forget()
            alone.append(planner.plan(each, H200))
        planner.forget()
        together = {each.norm: planner.plan(each, H200) for each in (both if first == "norm" else both[::-1])}
        assert [together[each.norm] for each in both] == alone
        assert repertoire.TYPICAL


def test_the_dearer_way_is_not_searched_where_its_bound_tells_enough() -> None:
    """Both ways of a family have bounds; the second is counted only if its bound is below the price of the first."""
    wanted = normed(WIDE, "bfloat16", 4)
    offer = offers(wanted, A100)["mma"]
    assert isinstance(offer, statistics.Cheaper) and offer.least is not None

    def refuse() -> Work:
        raise AssertionError("the work was counted")

    way = offer.ways[0]
    dearer = replace(way, work=refuse, behind=10 * way.microseconds)
    assert statistics.Cheaper.of(dearer, way).taken is way
    with pytest.raises(AssertionError):
        assert statistics.Cheaper.of(replace(way, work=refuse), way).price


def test_ways_are_joined_by_kernel() -> None:
    """A family that leaves moments makes one offer; a refusal stays unless the family takes the layer with a norm."""
    wanted = normed(WIDE, "bfloat16", 4)
    asked = {wanted.which: wanted}
    plain = list(offers(replace(wanted, norm=None), H200).values())
    leaving = [offer for offer in plain if offer.kernel == "halo"]
    refusal = Refusal("halo", (Pass.FORWARD,), "for no reason")
    joined = statistics.answers([refusal, *plain[:1]], leaving, asked, H200)
    assert joined[0] is leaving[0]
    alone = statistics.answers([refusal], [], asked, H200)
    assert alone == [refusal]
    both = statistics.answers(plain, leaving, asked, H200)
    assert sum(isinstance(each, statistics.Cheaper) for each in both) == 1


@pytest.mark.parametrize("taken", ["leaving", "passed"])
def test_the_way_that_is_taken_tells_whether_it_is_timed(taken: str) -> None:
    """A price above the predicted time has its offer timed at a layer's first call, also behind two ways."""
    offer = offers(normed(WIDE, "bfloat16", 4), H200)["halo"]
    assert isinstance(offer, statistics.Cheaper)
    way = replace(offer.ways[0], surcharge=1.2, work=lambda: Work(1, 1.0), behind=0.0, least=None)
    other = replace(way, surcharge=1.0, behind=0.0 if taken == "passed" else 1e6)
    found = statistics.Cheaper.of(way, other)
    assert found.taken.surcharge == (1.2 if taken == "leaving" else 1.0)
    wanted = {found.problem.which: found.problem}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "_winners_count", lambda _: True)
        patch.setattr(choosing, "when_measured", lambda: "auto")
        patch.setattr(calibration, "doubt", lambda *_: 1.0)
        assert choosing.measures(wanted, [found], H200, False, True) == (taken == "leaving")


@pytest.mark.parametrize("ins, outs", [(3, 32), (32, 3), (4, 32)])
def test_narrow_layers_have_a_price_above_the_predicted_time(ins: int, outs: int) -> None:
    """No GPU has timed halo and mma with one to three channels on a side, so they are timed before they are taken."""
    wanted = problem(Layer(ins, outs, (16, 16, 16), T3, T2, T1, T1), Pass.FORWARD, "bfloat16")
    for device in (H200, A100):
        found = offers(wanted, device)
        for kernel in {"halo", "mma"} & found.keys():
            plain = calibration.surcharge(kernel, device, calibration.kind_of(wanted))
            assert found[kernel].surcharge == plain * (1.2 if min(ins, outs) < 4 else 1.0)
