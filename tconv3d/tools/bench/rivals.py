"""PyTorch's ways to run the same layer. What ours is compared with is the first of them, and the best.

- `default`: as it comes.
- `benchmark`: `torch.backends.cudnn.benchmark`.
- the other memory format, with the conversion from and to the caller's counted, and as if the caller had used it
  all along.
- `compile`: `torch.compile`, where operators follow the convolution that it could fuse.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tconv3d.api.clock import Timer

from .cases import Case, leaves
from .precision import LAYOUTS, in_layout

OTHER = {"contiguous": "channels_last_3d", "channels_last_3d": "contiguous"}
SHORT = {"contiguous": "contiguous", "channels_last_3d": "channels_last"}


@dataclass(frozen=True)
class Variant:
    """One way to run PyTorch's layer."""

    name: str
    benchmark: bool = True
    layout: str = ""  # of the weights and of what the layer gets, if not the caller's
    converted: bool = False  # the conversion from and to the caller's layout is counted
    compiled: bool = False


def variants(case: Case) -> list[Variant]:
    other = OTHER[case.layout]
    found = [
        Variant("default", benchmark=False),
        Variant("benchmark"),
        Variant(f"{SHORT[other]}_converted", layout=other, converted=True),
        Variant(SHORT[other], layout=other),
    ]
    if case.layer.follow:
        found += [Variant("compile", compiled=True), Variant(f"compile_{SHORT[other]}", layout=other, compiled=True)]
    return found


def time_variants(case: Case, backward: bool, clock: Timer) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Milliseconds by pass and variant, and the variants that failed, with the reason."""
    times: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    failed: dict[str, str] = {}
    for variant in variants(case):
        try:
            with cudnn_benchmark(variant.benchmark):
                for which, milliseconds in time_passes(*build(case, variant), backward, clock).items():
                    times[which][variant.name] = milliseconds
        except Exception as error:  # cuDNN without an engine, memory, a compiler that is not there
            failed[variant.name] = f"{type(error).__name__}: {error}"[:300]
    return times, failed


def build(case: Case, variant: Variant) -> tuple[Callable[[Tensor], Any], nn.Module, Tensor]:
    """What to call, the module whose parameters it uses, and the input to call it with."""
    if not variant.layout:
        model, x = case.theirs, case.x
    else:
        model = in_layout(copy.deepcopy(case.theirs), variant.layout)
        x = case.x if variant.converted else case.x.contiguous(memory_format=LAYOUTS[variant.layout])
    call: Callable[[Tensor], Any] = _compiled(model) if variant.compiled else model
    if not variant.converted:
        return call, model, x
    there, back = LAYOUTS[variant.layout], LAYOUTS[case.layout]
    return lambda x: call(x.contiguous(memory_format=there)).contiguous(memory_format=back), model, x


def _compiled(model: nn.Module) -> Callable[[Tensor], Any]:
    torch.compiler.reset()  # it gives up on code that it has compiled for several modules before
    compiled: Callable[[Tensor], Any] = torch.compile(model)
    return compiled


def time_passes(
    call: Callable[[Tensor], Any], model: nn.Module, x: Tensor, backward: bool, clock: Timer
) -> dict[str, float]:
    """Milliseconds of the forward pass without autograd and, if asked for, of the backward pass alone."""
    with torch.no_grad():
        times = {"forward": clock(lambda: call(x))}
    if backward:
        x, wanted = leaves(model, x)
        with reusable_buffers():
            y = call(x)
            grad = torch.randn_like(y)
            times["backward"] = clock(lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True))
    return times


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
    """A compiled backward pass may otherwise run only once per forward."""
    import torch._functorch.config as config

    before = config.donated_buffer
    config.donated_buffer = False
    try:
        yield
    finally:
        config.donated_buffer = before
