"""Makes float32 strict, because tails are compared with float64."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def strict_tails(strict_float32: None) -> None: ...
