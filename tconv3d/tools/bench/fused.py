"""Says in short words what became of the tail of a benchmark's case, and which kernels the planner chose for it.

Everything is asked of the module that was called, never of what fusing should have done. This module times nothing.
"""

from __future__ import annotations

import torch

import tconv3d
from tconv3d.api import forwards
from tconv3d.api.explain import LEFT
from tconv3d.api.explanation import Explanation
from tconv3d.api.forwards import Block
from tconv3d.api.fuse import FusedTail, FuseReport

from .cases import Case

COMPILED = "torch.compile"  # the compiler decides in its own graph, and its logger says what became of the chain
BLOCK = "block"  # the convolution with ReLU and GroupNorm, which has kernels of its own
PYTORCH = "PyTorch"
VIEWS = ("view", "reshape", "squeeze", "unsqueeze")  # operators that compute nothing


def words(case: Case, which: str) -> str:
    """Returns what became of the tail in calls of a model that has been called."""
    if hasattr(case.ours, "_orig_mod"):
        return COMPILED
    blocks = _blocks(case)
    if not blocks:
        (swap,) = tconv3d.plan_swaps(case.theirs).layers
        return f"not fused: {swap.why_alone or 'the forward ran as it is written'}"
    block, explained = blocks[0], explanation(case)
    if block is None:
        return BLOCK
    if explained is not None and any(each.kernel == LEFT for each in explained.passes):
        return f"not fused: {LEFT} computes the convolution"
    with torch.set_grad_enabled(which != "forward"):
        report = block.report(*case.inputs)
    return short(report) if which == "forward" else short_gradients(report)


def explanation(case: Case) -> Explanation | None:
    """Returns the explanation of the fused call, or None if there is none but the convolution's."""
    blocks = _blocks(case)
    if not blocks or blocks[0] is None:
        return None
    with torch.no_grad():
        return tconv3d.explain(blocks[0], *case.inputs)


def _blocks(case: Case) -> list[Block]:
    return [case.ours] if isinstance(case.ours, FusedTail) else forwards.blocks_of(case.ours)


def short(report: FuseReport) -> str:
    """Says where a call without gradients computes the tail: "kernel", "kernel + 1 pass", "weight"."""
    if report.why_not:
        return f"not fused: {report.why_not}"
    parts = [
        "weight" if report.weight else "",
        "kernel" if report.kernel or report.statistics else "",
        _passes(len(report.passes)) if report.passes else "",
        PYTORCH if set(report.pytorch) - set(VIEWS) else "",
    ]
    return " + ".join(filter(None, parts)) or "nothing"


def short_gradients(report: FuseReport) -> str:
    """Says how many passes over the convolution's result a training step takes in each direction."""
    if report.why_not:
        return f"not fused: {report.why_not}"
    count = {way: sum(text.startswith(f"{way} in one pass") for text in report.gradients) for way in _DIRECTIONS}
    parts = [f"{_passes(count[way])} {way}" for way in _DIRECTIONS if count[way]]
    if any("PyTorch" in text for text in report.gradients):
        parts.append(PYTORCH)
    return " + ".join(parts) or "nothing"


_DIRECTIONS = ("forward", "backward")


def _passes(count: int) -> str:
    return f"{count} pass{'' if count == 1 else 'es'}"
