"""Defines a fixture that counts the passes on this library's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from tconv3d.torch_ops import executor

PASSES = ("forward", "input_grad", "weight_grad", "bias_grad")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Counts how often each pass ran on this library's kernels, alone or in a backward pass."""
    counts = dict.fromkeys(PASSES, 0)
    backward = executor.backward

    def counting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any, **keywords: Any) -> Tensor:
            counts["forward"] += 1
            return original(*arguments, **keywords)

        return run

    def together(*arguments: Any) -> list[Tensor | None]:
        for name, wanted in zip(PASSES[1:], arguments[3], strict=True):
            counts[name] += wanted
        return backward(*arguments)

    monkeypatch.setattr(executor, "forward", counting(executor.forward))
    monkeypatch.setattr(executor, "backward", together)
    yield counts
