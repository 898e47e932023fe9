"""`fully_shard` over this library's layers: the loss, the gradients and the training of one process."""

from __future__ import annotations

from pathlib import Path

import training
from process_groups import Group


def test_fsdp(four_ranks: Group, tmp_path: Path) -> None:
    """Gradients, mixed precision, accumulation, evaluation, checkpoints, `accelerate` before and after sharding."""
    losses = four_ranks.run(training.fsdp, str(tmp_path))[0]
    assert max(losses.values()) - min(losses.values()) < 1e-4 and min(losses.values()) > 0
