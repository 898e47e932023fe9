"""Times PyTorch's ways to run a layer. Our layer is compared with the `default` variant and with the fastest one.

- `default`: PyTorch with its default settings.
- `benchmark`: `torch.backends.cudnn.benchmark` is on, as in all variants below.
- `channels_last` or `contiguous`: tensors in the memory format that the caller does not use, without converting.
- `..._converted`: the other memory format, with the conversion of input and output included in the time.
- `compile`, `compile_...`: `torch.compile`, for layers with operators after the convolution, which it could fuse.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tconv3d.torch_ops.clock import Timer

from .cases import Case, leaves
from .precision import LAYOUTS, in_layout

OTHER = {"contiguous": "channels_last_3d", "channels_last_3d": "contiguous"}
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
    if case.layer.follow:
        found += [Variant("compile", compiled=True), Variant(f"compile_{SHORT[other]}", layout=other, compiled=True)]
    return found


def time_variants(case: Case, backward: bool, clock: Timer) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Returns the milliseconds by pass and variant, and the reason for each variant that failed."""
    times: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    failed: dict[str, str] = {}
    for variant in variants(case):
        try:
            with cudnn_benchmark(variant.benchmark):
                for which, milliseconds in time_passes(*build(case, variant), backward, clock).items():
                    times[which][variant.name] = milliseconds
        except Exception as error:  # cuDNN has no engine, memory runs out, or a compiler is missing
            failed[variant.name] = f"{type(error).__name__}: {error}"[:300]
    return times, failed


def build(case: Case, variant: Variant) -> tuple[Callable[[Tensor], Any], nn.Module, Tensor]:
    """Returns the callable of a variant, the module whose parameters it uses, and its input."""
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
    torch.compiler.reset()  # torch.compile stops compiling a function after several recompilations
    compiled: Callable[[Tensor], Any] = torch.compile(model)
    return compiled


def time_passes(
    call: Callable[[Tensor], Any], model: nn.Module, x: Tensor, backward: bool, clock: Timer
) -> dict[str, float]:
    """Returns the milliseconds of the forward pass without autograd and, if asked for, of the backward pass alone."""
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
    """Lets a compiled backward pass run several times per forward pass, by turning off buffer donation."""
    import torch._functorch.config as config

    before = config.donated_buffer
    config.donated_buffer = False
    try:
        yield
    finally:
        config.donated_buffer = before
