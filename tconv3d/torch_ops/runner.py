"""Runs what a convolution with its tail launches: convolutions, and passes over their results.

`tails/running.py` and the executors of passes launch through a `Runner`. The exporter gives them one that writes the
launches down in place of running them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from ..families.norm.planner import Activation
from ..planning.problem import Device, Plan, is_channels_last
from . import executor
from .checks import Convolution
from .problems import DTYPES, Tail

READ = ("x", "vectors", "whole_0", "whole_1", "whole_2", "whole_3")  # what passes that evaluate expressions read


class Runner:
    """Runs convolutions and passes on the tensors of a call."""

    runs_programs = True  # one kernel computes small tensors between passes; else PyTorch's operators do

    def device_of(self, x: Tensor) -> Device:
        """Returns the device that passes over x are planned for."""
        return executor.device_of(x)

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        keep: bool,
        tail: Tail | None,
    ) -> Tensor:
        """Computes a convolution and its epilogue (`executor.forward`)."""
        return executor.forward(input, weight, bias, convolution, keep=keep, tail=tail)

    def forward_with_statistics(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: int,
        convolution: Convolution,
        keep: bool,
        tail: Tail,
    ) -> tuple[Tensor, Tensor]:
        """Computes a convolution, its epilogue and the statistics of norm groups, with an eps of 0."""
        return executor.forward_with_statistics(input, weight, bias, groups, 0.0, convolution, keep=keep, tail=tail)

    def launch(
        self,
        key: tuple[Any, ...],
        plan: Callable[[], Plan],
        names: tuple[str, ...],
        x: Tensor,
        operands: Sequence[Tensor | None],
    ) -> None:
        """Launches a pass over x. `names` are those of the operands, of which those behind "null" are written.

        Prepared tasks are in the executor's table under `key`; `plan` is called when a key is new.
        """
        task = executor.known(key)
        if task is None:
            task = executor.remember(key, executor.make_task(plan(), names, (), x))
        task.launch(x, tuple([0 if each is None else each.data_ptr() for each in operands]))


RUNNER = Runner()


def operands_read(x: Tensor, vectors: Tensor | None, wholes: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns the operands in the order of `READ`."""
    return x, vectors, *[*wholes, None, None, None, None][:4]


def activation(x: Tensor, aligned: bool) -> Activation:
    """Describes a dense tensor [N, C, D, H, W]; `aligned` tells whether all tensors of its pass are aligned."""
    batch, channels, *size = x.shape
    return Activation(batch, channels, prod(size), DTYPES[x.dtype], is_channels_last(x.stride()), aligned)


def are_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def kind_of(x: Tensor) -> tuple[Any, ...]:
    """Returns the properties of a tensor that every plan of a pass over it depends on."""
    return x.dtype, x.device, x.shape, x.stride()
