"""The groups of processes that tests of torch.distributed run in: results by rank, errors with their rank, deaths."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from process_groups import JobError, process_group


def rank_sum(value: float) -> tuple[int, float]:
    tensor = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return dist.get_rank(), float(tensor)


def failing(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a message of its own")


def ending(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def sleeping(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_jobs_return_results_by_rank_and_failures_name_their_rank() -> None:
    with process_group(2) as group:
        assert group.run(rank_sum, 2.0) == [(0, 6.0), (1, 6.0)]
        with pytest.raises(JobError, match=r"(?s)1 rank.*rank 1: ValueError: a message of its own.*in failing"):
            group.run(failing, 1)
        assert group.run(rank_sum, 1.0) == [(0, 3.0), (1, 3.0)]
        with pytest.raises(JobError, match="rank 0: the process ended with exit code 3"):
            group.run(ending, 0)


def test_a_rank_that_does_not_answer_is_named_after_the_timeout() -> None:
    with process_group(2) as group:
        outcomes = group.outcomes(sleeping, 1, timeout=-9.0)  # ten seconds of grace come on top
        assert outcomes[0].error is None
        assert outcomes[1].error is not None and "no answer" in outcomes[1].error
