"""Pipelines of this library's layers: the loss and the gradients of one process."""

from __future__ import annotations

import training
from process_groups import process_group


def test_a_pipeline_of_two_stages() -> None:
    with process_group(2) as two:
        assert min(two.run(training.pipeline)) > 0
