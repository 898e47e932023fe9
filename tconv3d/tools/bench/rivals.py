"""Times PyTorch's ways to run a layer. Our layer is compared with the `default` variant and with the fastest one.

- `default`: PyTorch with its default settings.
- `benchmark`: `torch.backends.cudnn.benchmark` is on, as in all variants below.
- `channels_last` or `contiguous`: tensors in the memory format that the caller does not use, without converting.
- `..._converted`: the other memory format, with the conversion of input and output included in the time.
- `compile`, `compile_...`: `torch.compile`, for layers with operators or a tail after the convolution.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tconv3d.torch_ops.clock import Timer

from .cases import Case, compiled, leaves
from .precision import LAYOUTS, in_layout

OTHER = {"contiguous": "channels_last_3d", "channels_last_3d": "contiguous"}
TURNS = 3  # how often `time_in_turns` times a case
SHORT = {"contiguous": "contiguous", "channels_last_3d": "channels_last"}


@dataclass(frozen=True)
class Variant:
    """Describes one way to run PyTorch's layer."""

    name: str
    benchmark: bool = True
    layout: str = ""  # memory format of weight and input; empty means the caller's
    converted: bool = False  # the time includes the conversion from and to the caller's layout
    compiled: bool = False


def variants(case: Case) -> list[Variant]:
    other = OTHER[case.layout]
    found = [
        Variant("default", benchmark=False),
        Variant("benchmark"),
        Variant(f"{SHORT[other]}_converted", layout=other, converted=True),
        Variant(SHORT[other], layout=other),
    ]
    if case.layer.follow or case.tail:
        found += [Variant("compile", compiled=True), Variant(f"compile_{SHORT[other]}", layout=other, compiled=True)]
    return found


def time_variants(case: Case, backward: bool, clock: Timer) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Returns the milliseconds by pass and variant, and the reason for each variant that failed."""
    times: dict[str, dict[str, float]] = {}
    measure = time_step if case.tail else time_passes
    failed: dict[str, str] = {}
    for variant in variants(case):
        try:
            with cudnn_benchmark(variant.benchmark):
                for which, milliseconds in measure(*build(case, variant), backward, clock).items():
                    times.setdefault(which, {})[variant.name] = milliseconds
        except Exception as error:  # cuDNN has no engine, memory runs out, or a compiler is missing
            failed[variant.name] = f"{type(error).__name__}: {error}"[:300]
    return times, failed


def build(case: Case, variant: Variant) -> tuple[Callable[..., Any], nn.Module, tuple[Tensor, ...]]:
    """Returns the callable of a variant, the module whose parameters it uses, and its inputs."""
    if not variant.layout:
        model, inputs = case.theirs, case.inputs
    else:
        model = in_layout(copy.deepcopy(case.theirs), variant.layout)
        inputs = case.inputs if variant.converted else _in_format(case.inputs, variant.layout)
    call: Callable[..., Any] = compiled(model) if variant.compiled else model
    if not variant.converted:
        return call, model, inputs
    return lambda *given: _in_format([call(*_in_format(given, variant.layout))], case.layout)[0], model, inputs


def _in_format(tensors: Sequence[Tensor], layout: str) -> tuple[Tensor, ...]:
    """Converts tensors to a memory format; tensors that are no batches of volumes have only one."""
    return tuple(each.contiguous(memory_format=LAYOUTS[layout]) if each.dim() == 5 else each for each in tensors)


def time_passes(
    call: Callable[..., Any], model: nn.Module, inputs: Sequence[Tensor], backward: bool, clock: Timer
) -> dict[str, float]:
    """Returns the milliseconds of the forward pass without autograd and, if asked for, of the backward pass alone."""
    with torch.no_grad():
        times = {"forward": clock(lambda: call(*inputs))}
    if backward:
        given, wanted = leaves(model, *inputs)
        with reusable_buffers():
            y = call(*given)
            grad = torch.randn_like(y)
            times["backward"] = clock(lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True))
    return times


def time_step(
    call: Callable[..., Any], model: nn.Module, inputs: Sequence[Tensor], step: bool, clock: Timer
) -> dict[str, float]:
    """Returns the milliseconds of the forward pass without autograd and, if asked for, of a whole training step.

    A training step is the forward pass and the gradients of all inputs and parameters, through autograd.
    """
    with torch.no_grad():
        times = {"forward": clock(lambda: call(*inputs))}
        grad = torch.randn_like(call(*inputs)) if step else None
    if step:
        given, wanted = leaves(model, *inputs)
        times["step"] = clock(lambda: torch.autograd.grad(call(*given), wanted, grad))
    return times


def time_in_turns(both: Sequence[Case], step: bool, clock: Timer) -> list[dict[str, float]]:
    """Times our modules of several cases in turns, and returns the medians of each, in milliseconds by pass.

    The GPU's clock rate changes over time: two times that are divided by each other must not lie far apart.
    """
    rounds = [[time_step(case.ours, case.ours, case.inputs, step, clock) for case in both] for _ in range(TURNS)]
    return [
        {which: statistics.median(times[which] for times in of_case) for which in of_case[0]}
        for of_case in zip(*rounds, strict=True)
    ]


@contextlib.contextmanager
def cudnn_benchmark(on: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def reusable_buffers() -> Iterator[None]:
    """Lets a compiled backward pass run several times per forward pass, by turning off buffer donation."""
    import torch._functorch.config as config

    before = config.donated_buffer
    config.donated_buffer = False
    try:
        yield
    finally:
        config.donated_buffer = before
