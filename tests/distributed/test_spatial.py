"""Transposed convolutions of split volumes: bits of one process, gradients, messages, memory and errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import spatial_cases
import spatial_draws
from layers import Layer
from process_groups import Group
from spatial_cases import Case, Kernels

LAYER = Layer(4, 3, (16, 8, 8), (4, 4, 4), (2, 2, 2), (1, 1, 1))


def wrong_cases(group: Group, cases: Sequence[Case], kernels: Kernels, broken: str = "") -> list[str]:
    """Returns what is wrong with the cases, computed on the ranks of a group."""
    by_rank = group.run(spatial_cases.split_passes, cases, kernels, broken, timeout=600)
    found = []
    for number, case in enumerate(cases):
        parts = [results[number] for results in by_rank if results[number] is not None]
        expected = None if kernels == "pytorch" else spatial_cases.one_process(case, kernels)
        found += [f"{case}: {wrong}" for wrong in spatial_cases.wrong_shards(case, parts, expected)]
    return found


@pytest.mark.parametrize(
    "quarter", [0, *(pytest.param(quarter, marks=pytest.mark.thorough) for quarter in range(1, 4))]
)
def test_results_have_the_bits_of_one_process_and_gradients_are_right(four_ranks: Group, quarter: int) -> None:
    """Over 200 volumes of 12 layers: every one with the same kernels in one process, bit for bit."""
    cases = spatial_draws.cases(spatial_draws.DIRECT, each=17)
    assert len(cases) > 200 and {len(case.shards) for case in cases} == {1, 2}
    assert not wrong_cases(four_ranks, cases[quarter::4], "direct")


@pytest.mark.thorough
def test_tensor_core_kernels_take_windows(four_ranks: Group) -> None:
    cases = spatial_draws.cases(spatial_draws.TENSOR_CORES, each=2)
    assert not wrong_cases(four_ranks, cases, "tensor cores")


def test_volumes_split_without_a_gpu_are_computed_by_pytorch(four_ranks: Group) -> None:
    cases = spatial_draws.cases(spatial_draws.DIRECT, each=5, seed=1)
    assert not wrong_cases(four_ranks, [case for case in cases if "float32" in case.dtype], "pytorch")


def test_meshes_with_dimensions_of_one_rank_and_three_split_dimensions(four_ranks: Group) -> None:
    cases = [Case(LAYER, (2, 1, 2), (2, 3, 4)), Case(LAYER, (1, 4), (3, 2)), Case(LAYER, (1,), (2,))]
    assert not wrong_cases(four_ranks, cases, "direct")


def test_shards_without_rows_take_part(four_ranks: Group) -> None:
    """Nine rows on four ranks are 3, 3, 3 and 0; the last rank has no input, and no output, one, or three outputs."""
    for layer, outputs in (
        (Layer(2, 3, (9, 3, 3), (3, 1, 1), padding=(1, 0, 0)), 0),
        (Layer(2, 3, (9, 3, 3), (2, 1, 1)), 1),
        (Layer(2, 3, (9, 3, 3), (4, 1, 1)), 3),
    ):
        case = Case(layer, (4,), (2,))
        assert four_ranks.run(spatial_cases.rows_of_results, case)[3] == outputs
        assert not wrong_cases(four_ranks, [case], "direct")


@pytest.mark.parametrize("broken", ["row beside", "no halo", "halo without readers"])
def test_a_wrong_halo_is_noticed(four_ranks: Group, broken: str) -> None:
    """The comparison can fail: messages have other rows, no halo is exchanged, or halos miss in a weight gradient."""
    case = Case(LAYER, (4,), (2,))
    assert not wrong_cases(four_ranks, [case], "direct")
    assert wrong_cases(four_ranks, [case], "direct", broken)


def test_the_bytes_that_are_sent_are_those_of_the_geometry(four_ranks: Group) -> None:
    for case in (Case(LAYER, (4,), (2,)), Case(LAYER, (2, 2), (3, 4), "bfloat16", True)):
        for sent, counted in four_ranks.run(spatial_cases.bytes_sent, case):
            assert sent == counted and min(sent) > 0
    up = Case(Layer(4, 4, (8, 4, 4), (2, 2, 2), (2, 2, 2)), (4,), (2,))
    assert four_ranks.run(spatial_cases.bytes_sent, up) == [([0, 0], [0, 0])] * 4


def test_equal_steps_have_equal_bits(four_ranks: Group) -> None:
    case = Case(LAYER, (4,), (2,))
    first, second = (four_ranks.run(spatial_cases.split_passes, [case], "direct") for _ in range(2))
    for ((one, ones),), ((other, others),) in zip(first, second, strict=True):
        assert all(a.equal(b) for a, b in zip((one, *ones), (other, *others), strict=True))


def test_a_rank_of_four_needs_little_more_than_a_quarter_of_the_memory(four_ranks: Group) -> None:
    case = Case(Layer(4, 4, (64, 8, 8), (4, 4, 4), (2, 2, 2), (1, 1, 1), batch=1), (4,), (2,))
    alone = spatial_cases.peak_of_one_process(case)
    for peak, halos in four_ranks.run(spatial_cases.peak_of_a_rank, case):
        assert peak <= 0.27 * alone + halos, (peak, halos, alone)
        assert halos < 0.1 * alone


def test_shards_smaller_than_a_halo_raise_on_every_rank(four_ranks: Group) -> None:
    case = Case(Layer(2, 2, (8, 4, 4), (7, 1, 1), padding=(3, 0, 0)), (4,), (2,))
    for outcome in four_ranks.outcomes(spatial_cases.split_passes, [case], "direct"):
        assert outcome.error is not None and outcome.error.startswith(
            "ShardTooSmall: an input of depth 8 is too small"
        )
        assert outcome.error.endswith("the least depth for 4 shards is 9")
        assert outcome.seconds < 30


def test_arguments_that_cannot_be_split_are_refused_in_words(four_ranks: Group) -> None:
    expected = {
        "plain tensor": "TypeError: conv_transpose3d expects input to be a DTensor",
        "channels": "RuntimeError: conv_transpose3d takes shards of depth, height, width or batch",
        "partial": "RuntimeError: conv_transpose3d takes shards of depth, height, width or batch",
        "split weight": "RuntimeError: expected weight to be a plain tensor that all ranks have",
        "weight of another type": "RuntimeError: Input type (torch.float32) and weight type (torch.float64)",
        "wrong channels": "RuntimeError: Given transposed=1, weight of size [3, 2, 3, 3, 3], expected input",
    }
    for refusals in four_ranks.run(spatial_cases.refusals):
        assert refusals.keys() == expected.keys()
        assert all(refusals[name].startswith(text) for name, text in expected.items()), refusals


def test_batch_shards_replicated_dtensor_weights_and_autocast(four_ranks: Group) -> None:
    assert four_ranks.run(spatial_cases.other_operands) == [[]] * 4
