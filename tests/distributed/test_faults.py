"""Faults of one rank: every rank ends in an error within the group's timeout, never in a hang or a wrong result."""

from __future__ import annotations

import faults
import pytest
from process_groups import Group, Outcome, process_group

TIMEOUT = 6.0  # seconds, of the groups that break


def check(outcomes: list[Outcome], dead: int | None = None) -> None:
    """Checks that every rank has ended in an error, the dead rank by its signal."""
    for outcome in outcomes:
        assert outcome.error is not None, f"rank {outcome.rank} returned {outcome.value}"
        assert "no answer" not in outcome.error
        assert ("exit code -9" in outcome.error) == (outcome.rank == dead), outcome.error


@pytest.mark.parametrize("job", [faults.train, faults.split_with_a_death], ids=["ddp", "split volume"])
def test_a_rank_that_dies(job: object, four_ranks: Group) -> None:
    fine = four_ranks.run(job, None)  # type: ignore[arg-type]
    assert all(isinstance(value, float) for value in fine), "the job works if nobody dies"
    with process_group(3, TIMEOUT) as three:
        check(three.outcomes(job, 2), dead=2)  # type: ignore[arg-type]


def test_layers_that_differ_between_ranks() -> None:
    with process_group(2, TIMEOUT) as two:
        outcomes = two.outcomes(faults.train_different_layers, 1)
    check(outcomes)
    assert any("sizes" in str(outcome.error) for outcome in outcomes)


def test_volumes_that_differ_between_ranks() -> None:
    """Volumes that are new to the ranks, and volumes that all ranks have computed before."""
    with process_group(2, TIMEOUT) as two:
        for number, what in enumerate(("batch", "width", "depth", "type")):
            outcomes = two.outcomes(faults.split_different, what, number % 2, number % 2 == 0)
            check(outcomes)
            assert all("expected all ranks to compute one volume" in str(outcome.error) for outcome in outcomes)
        two.run(faults.split_with_a_death, None)  # the group works after these errors
