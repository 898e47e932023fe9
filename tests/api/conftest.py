"""Counts the fused chains of forwards, for tests that need no kernel."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tconv3d.api import forwards


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts chains that run fused; their layers run one by one."""
    ran: list[str] = []

    def run(self: forwards.FusedChain, input: Tensor, *passed: Any) -> Any:
        ran.append(self.words)
        return self._unfused(input, *passed)

    monkeypatch.setattr(forwards, "current_backend", lambda: "emulator")
    monkeypatch.setattr(forwards.FusedChain, "forward", run)
    return ran
