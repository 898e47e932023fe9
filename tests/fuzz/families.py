"""Counts the plans of each kernel family, because a search that never reaches a family does not test it.

Some kernels are predicted to win for large volumes alone, and the emulator takes small volumes alone. Cases name such
a kernel to have it preferred (`FAVOURED`), and limits of its family lifted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

from preferred import priced

from tconv3d.families.depthwise import tiles as depthwise_tiles_planner
from tconv3d.families.up import grad as up_grad_planner
from tconv3d.planning import planner


class Favour(NamedTuple):
    """Kernels that cost almost nothing, and constants of planners that have other values meanwhile."""

    kernels: tuple[str, ...] = ()
    limits: tuple[tuple[ModuleType, dict[str, Any]], ...] = ()


# For volumes as small as the emulator's, the direct kernels are predicted to win nearly always: cases that favour
# nothing else have the kernels for special layers, the first that can compute a pass.
SPECIAL = (
    "up",
    "few_outputs",
    "few_inputs",
    "few_weight_grad",
    "group_backward",
    "halo",
    "hopper_weight_grad",
    "tensor_weight_grad",
    "mma",
    "depthwise_lines",
    "depthwise",
)
FAVOURED: dict[str, Favour] = {
    "": Favour(SPECIAL),
    "cheapest": Favour(),
    "turned": Favour(("turned",)),
    "rows": Favour(("rows_weight_grad",)),
    "to_lines": Favour(("to_lines", "tensor_weight_grad", "hopper_weight_grad")),
    "to_rows": Favour(("to_rows", "rows_weight_grad", "align")),
    "direct_weight_bias": Favour(("direct_weight_bias",)),
    "unfold": Favour(("unfold",)),
    "gather": Favour(("gather",)),
    "depthwise_tiles": Favour(("depthwise_tiles", "depthwise_tiles_weight_grad")),
    "depthwise_teams": Favour(("depthwise_tiles", "depthwise_teams_weight_grad")),
    "depthwise_rows": Favour(
        ("depthwise_rows", "depthwise_tiles", "depthwise_tiles_weight_grad"),
        ((depthwise_tiles_planner, {"MANY_TAPS": 0}),),
    ),
    "up_backward": Favour(("up_backward", "up_backward_last")),
    "up_grad": Favour(("up_grad",), ((up_grad_planner, {"MIN_CHANNELS": 1, "MIN_POSITIONS": 1}),)),
}


def names() -> list[str]:
    return [name for name, _ in planner.FAMILIES]


@contextlib.contextmanager
def favouring(name: str) -> Iterator[None]:
    """One of `FAVOURED` is in force. What earlier cases planned stays planned: volumes follow volumes."""
    kernels, limits = FAVOURED[name]
    with contextlib.ExitStack() as stack:
        for planner_of, constants in limits:
            stack.enter_context(patch.multiple(planner_of, **constants))
        stack.enter_context(priced(*kernels))
        yield
