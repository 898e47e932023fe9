"""Holds the reference tasks, one file each: PyTorch's `Model` beside this library's `ModelNew`.

The files have the layout that kernel benchmarks use: `Model` and `ModelNew` take the same constructor arguments and
the same `state_dict`; `get_init_inputs()` returns the arguments and `get_inputs()` the tensors. `get_inputs(REDUCED)`
returns a volume small enough for the emulator. Channels and hyperparameters are not reduced, so the kernels that run
are the ones that run at full size.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

from torch import Tensor, nn

NAMES = ("grouped_strided", "large_volume", "asymmetric_kernel", "relu_group_norm")


class OneLayer(nn.Module):
    """Runs one transposed 3D convolution, which the constructor of a subclass makes as `self.Layer(...)`."""

    Layer: type[nn.ConvTranspose3d] = nn.ConvTranspose3d
    conv_transpose3d: nn.ConvTranspose3d

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_transpose3d(x)


class Task(Protocol):
    """Declares what a task module in this folder provides."""

    SHAPE: tuple[int, ...]
    REDUCED: tuple[int, ...]
    Model: type[nn.Module]
    ModelNew: type[nn.Module]

    def get_inputs(self, shape: tuple[int, ...] = ...) -> list[Tensor]: ...

    def get_init_inputs(self) -> list[Any]: ...


def load(name: str) -> Task:
    """Imports and returns the task with the given name."""
    if name not in NAMES:
        raise ValueError(f"no task is called {name!r}: expected one of {', '.join(NAMES)}")
    return cast(Task, import_module(f"{__name__}.{name}"))
