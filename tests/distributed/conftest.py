"""One group of four processes for the tests of a file, because starting Python and PyTorch takes seconds.

The group ends with the file: threads of gloo may be busy for as long as its processes live.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from process_groups import Group, process_group


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Group]:
    with process_group(4) as group:
        yield group
