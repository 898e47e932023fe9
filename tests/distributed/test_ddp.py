"""DistributedDataParallel over this library's layers: the loss and the gradients of one process."""

from __future__ import annotations

import training
from process_groups import Group


def test_ddp(four_ranks: Group) -> None:
    """Gradients, no_sync, autocast, state_dict, and `accelerate` before and after wrapping."""
    losses = four_ranks.run(training.ddp)[0]
    assert max(losses.values()) - min(losses.values()) < 1e-4 and min(losses.values()) > 0
