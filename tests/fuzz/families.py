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
from tconv3d.families.mma import ahead as mma_ahead_planner
from tconv3d.families.up import grad as up_grad_planner
from tconv3d.planning import planner
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Plan


class Favour(NamedTuple):
    """Kernels that cost almost nothing, and constants of planners that have other values meanwhile.

    It is drawn for the layers, types and GPUs that these kernels can take. Empty tuples mean all of them.
    """

    kernels: tuple[str, ...] = ()
    limits: tuple[tuple[ModuleType, dict[str, Any]], ...] = ()
    weight: int = 2  # how often it is drawn
    kinds: tuple[str, ...] = ()  # names in `draw.KINDS`
    dtypes: tuple[str, ...] = ()  # names in `draw.DTYPES`
    plans: tuple[str, ...] = ()  # names in `draw.PLANS`


HOPPER, BEFORE = ("H200",), ("A100", "RTX 4090", "B200")  # GPUs with and without Hopper's warpgroup instructions
HALVES = ("float16", "bfloat16")
WIDE = ("any", "rows")  # kinds of layers that have many channels
SEVERAL = ("any", "up", "few", "groups", "rows", "far")  # kinds of layers that have several channels per group


# For volumes as small as the emulator's, the direct kernels are predicted to win nearly always: passes that no
# favoured kernel can compute have the kernels for special layers, the first that can, unless the case asks for the
# cheapest.
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
    "": Favour(weight=8),
    "cheapest": Favour(),
    "halo": Favour(("halo",), kinds=SEVERAL, plans=HOPPER),
    "halo_turned": Favour(("halo_turned",), kinds=SEVERAL, plans=HOPPER),
    "mma": Favour(("mma",), kinds=SEVERAL, weight=4),
    "mma_ahead": Favour(("mma_ahead",), ((mma_ahead_planner, {"FEWEST_POSITIONS": 1}),), kinds=WIDE, plans=BEFORE),
    "mma_far": Favour(("mma_far", "mma"), kinds=(*WIDE, "far")),
    "turned": Favour(("turned",), kinds=SEVERAL, plans=HOPPER),
    "rows": Favour(("rows_weight_grad",), kinds=WIDE, dtypes=HALVES, plans=HOPPER),
    "to_lines": Favour(("to_lines", "tensor_weight_grad", "hopper_weight_grad"), kinds=SEVERAL),
    "to_rows": Favour(("to_rows", "rows_weight_grad", "align"), kinds=SEVERAL),
    "direct_weight_bias": Favour(("direct_weight_bias",)),
    "unfold": Favour(("unfold",), kinds=SEVERAL, plans=HOPPER),
    "gather": Favour(("gather",), kinds=("rows", "up"), dtypes=HALVES, plans=HOPPER),
    "up_backward": Favour(("up_backward", "up_backward_last"), kinds=("up",), plans=HOPPER),
    "up_grad": Favour(
        ("up_grad",),
        ((up_grad_planner, {"MIN_CHANNELS": 1, "MIN_POSITIONS": 1}),),
        kinds=("up",),
        dtypes=("tf32",),
        plans=HOPPER,
    ),
    "depthwise_lines": Favour(("depthwise_lines",), kinds=("depthwise",)),
    "depthwise_tiles": Favour(("depthwise_tiles", "depthwise_tiles_weight_grad"), kinds=("depthwise",)),
    "depthwise_gathered": Favour(("depthwise_gathered", "depthwise_tiles_weight_grad"), kinds=("depthwise",)),
    "depthwise_pairs": Favour(("depthwise_pairs", "depthwise_tiles_weight_grad"), kinds=("depthwise",)),
    "depthwise_teams": Favour(("depthwise_tiles", "depthwise_teams_weight_grad"), kinds=("depthwise",)),
    "depthwise_rows": Favour(
        ("depthwise_rows", "depthwise_tiles", "depthwise_tiles_weight_grad"),
        ((depthwise_tiles_planner, {"MANY_TAPS": 0}),),
        kinds=("depthwise",),
    ),
}


NARROW = 4  # layers with fewer channels per group on a side leave columns or rows of a matrix instruction idle
# What kernels do besides a convolution of many channels, by the names that `paths_of` gives.
PATHS = (
    *(f"{kernel}, moments" for kernel in ("few_inputs", "halo", "mma", "up")),
    *(
        f"{kernel}, operands"
        for kernel in ("depthwise", "depthwise_lines", "direct", "few_inputs", "few_outputs", "halo", "mma", "up")
    ),
    *(f"{kernel}, narrow" for kernel in ("halo", "mma")),
    # The names of offers for the same pass by another build of a family's kernel, or by another kernel.
    *("halo_turned", "mma_ahead", "mma_far", "direct_weight_bias", "depthwise_gathered", "depthwise_pairs"),
    *("depthwise_rows", "depthwise_teams_weight_grad"),
)


def names() -> list[str]:
    return [name for name, _ in planner.FAMILIES]


def paths_of(offer: Offer, plan: Plan) -> list[str]:
    """Returns which PATHS the plan of an offer takes, and others of the same kinds."""
    found, g = [offer.kernel] * (offer.kernel not in names()), offer.problem.geometry
    for launch in plan.launches:
        epilogue = str(dict(launch.constants).get("Epilogue", ""))
        narrow = min(g.in_per_group, g.out_per_group) < NARROW
        kinds = {
            "moments": "LeavingMoments" in epilogue,
            "operands": "EvaluatedWith" in epilogue or "EvaluatedReading" in epilogue,
            "narrow": narrow and launch.kernel in ("halo", "mma"),
        }
        found += [f"{launch.kernel}, {kind}" for kind, taken in kinds.items() if taken]
    return found


@contextlib.contextmanager
def favouring(name: str) -> Iterator[None]:
    """One of `FAVOURED` is in force. What earlier cases planned stays planned: volumes follow volumes."""
    favour = FAVOURED[name]
    special = [kernel for kernel in SPECIAL if kernel not in favour.kernels and name != "cheapest"]
    with contextlib.ExitStack() as stack:
        for planner_of, constants in favour.limits:
            stack.enter_context(patch.multiple(planner_of, **constants))
        stack.enter_context(priced(*favour.kernels, *special))
        yield
