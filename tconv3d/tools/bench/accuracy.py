"""Errors against float64: ours, and PyTorch's beside them, on the same random inputs.

The error of a tensor is the norm of its difference from PyTorch's result in float64, as a part of that result's norm.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .cases import Case, leaves
from .precision import LAYOUTS, TOLERANCE


@dataclass(frozen=True)
class Errors:
    """Of the output and, if asked for, of the gradients of the input and of each parameter, by name."""

    ours: dict[str, float]
    theirs: dict[str, float]

    def of(self, which: str) -> tuple[float, float]:
        """Ours and PyTorch's for one pass: the output's error, or the largest of the gradients'."""
        ours, theirs = (
            torch.tensor([error for name, error in errors.items() if (name == "output") == (which == "forward")])
            for errors in (self.ours, self.theirs)
        )
        return float(ours.max()), float(theirs.max())  # unlike Python's max, these do not pass over a NaN


def right(error: float, which: str, case: Case) -> bool:
    """Whether the error of a pass is one of rounding. A NaN is not."""
    limit: float = TOLERANCE[case.precision]
    if case.layer.follow and which == "backward":
        # Where rounding moves a value across zero, the ReLU's gradient is off by all of it. How many are is in
        # proportion to the rounding, and the norm of so many is in proportion to their root. (A tap in a wrong place
        # is off by about 1.)
        limit = 3 * limit**0.5
    return error <= limit


def check(case: Case, backward: bool, whole: bool = False) -> Errors:
    """Runs ours, PyTorch's and float64, which is slow: unless the `whole` batch is asked for, two samples of it."""
    if not backward:
        ends = sorted({0, case.layer.batch - 1})
        with torch.no_grad():
            exact = _double(case.theirs)(case.x[ends].double())
            with poisoned():
                ours = case.ours(case.x)[ends]
            theirs = case.theirs(case.x)[ends]
        return Errors({"output": relative_error(ours, exact)}, {"output": relative_error(theirs, exact)})
    _, *rest = case.layer.output_shape
    x = case.x if whole else case.x[:2]
    grad = torch.randn((x.shape[0], *rest), device=x.device).to(x.dtype)
    grad = grad.contiguous(memory_format=LAYOUTS[case.layout])
    expected = _exact(case.theirs, x, grad)
    with poisoned():
        ours = results(case.ours, x, grad)
    found = _errors(ours, expected)
    del ours
    return Errors(found, _errors(results(case.theirs, x, grad), expected))


def results(model: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of the parameters."""
    x, wanted = leaves(model, x)
    y = model(x)
    names = ["input", *(name for name, _ in model.named_parameters())]
    gradients = torch.autograd.grad(y, wanted, grad)
    return {"output": y.detach(), **dict(zip(names, gradients, strict=True))}


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are filled with NaN: an element that no kernel writes shows."""
    memory: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        memory.fill_uninitialized_memory = filled


def _double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def _exact(model: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """What `results` should be, sample by sample: float64 of a whole batch may not fit."""
    model = _double(model)
    parts = [
        results(model, x[n : n + 1].double(), grad[n : n + 1].double()) for n in range(x.shape[0])
    ]  # no layer here mixes samples
    return {
        name: (torch.cat if name in ("output", "input") else sum_of)([part[name] for part in parts])
        for name in parts[0]
    }


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(found[name], exact[name]) for name in exact}
