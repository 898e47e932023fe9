"""One group of four processes for all tests of a worker, because starting Python and PyTorch takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from process_groups import Group, process_group


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Group]:
    with process_group(4) as group:
        yield group
