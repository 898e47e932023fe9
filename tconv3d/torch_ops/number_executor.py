"""Runs programs that compute small tensors between the passes behind a convolution (families/norm/numbers.py).

Only this package calls these functions, so arguments are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..families.norm.numbers import Program, plan_numbers, tensor_names
from .runner import RUNNER, Runner

_NAMES = (*tensor_names(), "null")


def run(program: Program, like: Tensor, tensors: Sequence[Tensor], runner: Runner = RUNNER) -> None:
    """Runs a program on its tensors, which are contiguous and on the device of `like`."""
    padding = [None] * (len(_NAMES) - len(tensors))
    key = ("numbers", program, like.device)
    runner.launch(key, lambda: plan_numbers(program), _NAMES, like, (*tensors, *padding))
