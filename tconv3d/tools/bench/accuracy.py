"""Computes errors against float64 for our layers and for PyTorch's, on equal random inputs.

The error of a tensor is the norm of its difference from PyTorch's float64 result, divided by the norm of that result.
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
    """Holds, by tensor name, the errors of the output and, if asked for, of the input's and parameters' gradients."""

    ours: dict[str, float]
    theirs: dict[str, float]

    def of(self, which: str) -> tuple[float, float]:
        """Returns our error and PyTorch's for one pass: the output's error, or the largest error of a gradient."""
        ours, theirs = (
            torch.tensor([error for name, error in errors.items() if (name == "output") == (which == "forward")])
            for errors in (self.ours, self.theirs)
        )
        return float(ours.max()), float(theirs.max())  # Tensor.max() returns a NaN, Python's max() may not


def right(error: float, which: str, case: Case) -> bool:
    """Says whether the error of a pass is small enough to be rounding. A NaN is not."""
    limit: float = TOLERANCE[case.precision]
    if case.layer.follow and which == "backward":
        # Where rounding moves a value across zero, ReLU passes or drops its whole gradient. The number of such values
        # is proportional to the rounding error, and the norm of their errors to the square root of that number. A tap
        # in a wrong place gives a relative error of about 1.
        limit = 3 * limit**0.5
    return error <= limit


def check(case: Case, backward: bool, whole: bool = False) -> Errors:
    """Runs our model, PyTorch's and PyTorch's in float64, and returns the errors.

    Float64 is slow: at most two samples are compared, unless the backward pass is checked on the `whole` batch.
    """
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
    """Runs a model forward and backward; returns the output and the gradients of input and parameters by name."""
    x, wanted = leaves(model, x)
    y = model(x)
    names = ["input", *(name for name, _ in model.named_parameters())]
    gradients = torch.autograd.grad(y, wanted, grad)
    return {"output": y.detach(), **dict(zip(names, gradients, strict=True))}


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills new floating-point tensors with NaN, so that an element that no kernel writes is noticed."""
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
    """Computes `results` in float64, sample by sample, because a whole batch in float64 may not fit in memory."""
    model = _double(model)
    parts = [
        results(model, x[n : n + 1].double(), grad[n : n + 1].double()) for n in range(x.shape[0])
    ]  # samples are independent in all layers of the benchmark
    return {
        name: (torch.cat if name in ("output", "input") else sum_of)([part[name] for part in parts])
        for name in parts[0]
    }


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(found[name], exact[name]) for name in exact}
