"""Chooses the kernels of an exported file: those that the library runs on the GPU that the file is for.

If that GPU is at hand, what the library has measured counts, and what it would time at a layer's first call
(`torch_ops/choosing.py`) is timed now, on random tensors. Library and file then take the same kernels, in whatever
order they are first used, and give the same bits. Without the GPU predictions decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...api import tune
from ...families.pytorch.planner import KERNEL as PYTORCH
from ...planning import planner
from ...planning.offers import Offer
from ...planning.problem import Device, Pass, Plan, Problem
from ...torch_ops import choosing, executor
from ...torch_ops.checks import Convolution
from ..bench.precision import precision


def plan(problems: Sequence[Problem], device: Device, named: str) -> Plan:
    """Returns the plan of passes that one call computes: a forward pass, or the wanted gradients.

    `named` is the precision of the file: PyTorch's operator is timed with its switches.
    """
    with precision(named):
        found = _of_library(problems, device)
    if found is not None:
        return found
    (first, *others) = problems
    return planner.plan_gradients(tuple(problems), device) if others else planner.plan(first, device)


def _of_library(problems: Sequence[Problem], device: Device) -> Plan | None:
    """Returns the plan of the winner on a GPU at hand; None if there is no winner, or it is PyTorch's operator."""
    like, wanted = at_hand(device), {problem.which: problem for problem in problems}
    if like is None:
        return None
    here, cuda = executor.device_of(like), like.is_cuda
    tails = any(problem.tail or problem.channels for problem in problems)
    benchmark, theirs = choosing.circumstances(cuda)
    settings = benchmark, theirs and not tails  # PyTorch's operator computes no tail
    with planner.meeting(wanted, here):
        choice = choosing.choice(wanted, here, settings, cuda)
        offers = [answer for answer in choice.answers if isinstance(answer, Offer)]
        if choice.winner is not None:
            ours = not any(offer.kernel == PYTORCH for offer in choice.cover)
            return planner.plan_of(choice.cover, wanted, here) if ours else None
        if not (_can_be_timed(problems) and choosing.measures(wanted, offers, here, benchmark, cuda)):
            return None
    try:
        drawn = torch.empty(0, dtype=getattr(torch, problems[0].dtype), device=like.device)
        found, _ = choosing.plan(tune.random_call(problems, _convolution(problems[0]), drawn), settings)
    except torch.OutOfMemoryError:
        return None
    return None if found.aten else found


def at_hand(device: Device) -> Tensor | None:
    """Returns an empty tensor on this machine's present GPU if plans for the device are plans for this GPU."""
    if not torch.cuda.is_available():
        return None
    like = torch.empty(0, device="cuda")
    return like if replace(executor.device_of(like), name=device.name) == device else None


def _can_be_timed(problems: Sequence[Problem]) -> bool:
    """Tells whether random operands can be made: of a bare convolution, for more than the gradient of a bias."""
    bare = not any(problem.norm or problem.has_epilogue for problem in problems)
    return bare and any(problem.which is not Pass.BIAS_GRAD for problem in problems)


def _convolution(problem: Problem) -> Convolution:
    geometry = problem.geometry
    strides, paddings, extras, dilations = (
        (axes[0], axes[1], axes[2])
        for axes in zip(*((a.stride, a.padding, a.output_padding, a.dilation) for a in geometry.axes), strict=True)
    )
    return strides, paddings, extras, geometry.groups, dilations
