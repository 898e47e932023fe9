"""`parallelize`: a model's step on a split volume is the step of one process; what cannot be split is named."""

from __future__ import annotations

import pytest
import split_models
import torch
from process_groups import Group


@pytest.mark.parametrize(
    ("norm", "size", "shards", "dims", "backend"),
    [
        ("group", (16, 8, 8), (2,), ("depth",), "auto"),
        ("batch", (24, 8, 8), (3,), (2,), "accelerated"),
        ("instance", (16, 16, 8), (2, 2), (2, 3), "auto"),
        ("cumulative batch", (8, 16, 16), (2, 2), ("height", "width"), "accelerated"),
        ("group", (32, 8, 8), (4,), (2,), "auto"),
    ],
)
def test_a_step_of_a_split_decoder_is_that_of_one_process(
    four_ranks: Group,
    norm: str,
    size: tuple[int, ...],
    shards: tuple[int, ...],
    dims: tuple[object, ...],
    backend: str,
) -> None:
    model = split_models.made(norm, seed=0)
    expected = split_models.one_step(model, split_models.volume(size))
    by_rank = [found for found in four_ranks.run(split_models.split_step, norm, size, shards, dims, backend) if found]
    assert len(by_rank) == torch.Size(shards).numel()
    for rank, found in enumerate(by_rank):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, where=f"rank {rank}, {name}": f"{where}: {m}"
            )
