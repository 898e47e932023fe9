"""Computes errors against float64 for our layers and for PyTorch's, on equal random inputs.

The error of a tensor is the norm of its difference from PyTorch's float64 result, divided by the norm of that result.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .cases import Case, leaves
from .precision import LAYOUTS, TOLERANCE

ZERO = 1e-10  # part of the largest gradient below which a gradient in float64 is rounding alone
INPUTS = ("input", "residual")  # names of the modules' arguments


@dataclass(frozen=True)
class Errors:
    """Holds, by tensor name, the errors of the output and, if asked for, of the input's and parameters' gradients."""

    ours: dict[str, float]
    theirs: dict[str, float]  # empty if PyTorch has no such operator for the type and device

    def of(self, which: str) -> tuple[float, float | None]:
        """Returns our error and PyTorch's for one pass: the output's error, or the largest error of a gradient."""
        ours, theirs = (
            torch.tensor([error for name, error in errors.items() if (name == "output") == (which == "forward")])
            for errors in (self.ours, self.theirs)
        )
        # Tensor.max() returns a NaN, Python's max() may not.
        return float(ours.max()), float(theirs.max()) if self.theirs else None


def right(error: float, which: str, case: Case) -> bool:
    """Says whether the error of a pass is small enough to be rounding. A NaN is not."""
    limit: float = TOLERANCE[case.precision]
    if (case.layer.follow or case.tail) and which != "forward":
        # Where rounding moves a value across zero, ReLU passes or drops its whole gradient. The number of such values
        # is proportional to the rounding error, and the norm of their errors to the square root of that number. A tap
        # in a wrong place gives a relative error of about 1.
        limit = 3 * limit**0.5
    return error <= limit


def check(case: Case, backward: bool, whole: bool = False) -> Errors:
    """Runs our model, PyTorch's and PyTorch's in float64, and returns the errors.

    Float64 is slow: at most two samples are compared, unless the backward pass is checked on the `whole` batch, or a
    tail makes samples depend on each other.
    """
    over_batch = case.tail is not None and case.tail.over_batch
    if not backward:
        ends = list(range(case.layer.batch)) if over_batch else sorted({0, case.layer.batch - 1})
        with torch.no_grad():
            exact = _double(case.theirs)(*(each[ends].double() for each in case.inputs))
            with poisoned():
                ours = {"output": case.ours(*case.inputs)[ends]}
            expected = {"output": exact}
            return Errors(
                _errors(ours, expected), _rival(lambda: {"output": case.theirs(*case.inputs)[ends]}, expected)
            )
    inputs = case.inputs if whole else tuple(each[:2] for each in case.inputs)
    grad = _output_gradient(case, inputs[0])
    expected = _exact(case.theirs, inputs, grad, over_batch)
    expected = {
        name: tensor for name, tensor in expected.items() if name == "output" or not _is_zero(tensor, expected)
    }
    with poisoned():
        ours = results(case.ours, inputs, grad)
    found = _errors(ours, expected)
    del ours
    return Errors(found, _rival(lambda: results(case.theirs, inputs, grad), expected))


def _is_zero(tensor: Tensor, gradients: Mapping[str, Tensor]) -> bool:
    """Tells whether a float64 gradient is zero but for rounding, as that of a bias that a norm behind it removes.

    Such a gradient is not compared: its rounding errors have no scale.
    """
    sizes = [float(each.norm()) / each.numel() ** 0.5 for name, each in gradients.items() if name != "output"]
    return float(tensor.norm()) / tensor.numel() ** 0.5 < ZERO * max(sizes)


def _output_gradient(case: Case, x: Tensor) -> Tensor:
    """Returns a random gradient of the output, for the samples of `x`."""
    _, *rest = case.output_shape
    grad = torch.randn((x.shape[0], *rest), device=x.device).to(x.dtype)
    return grad.contiguous(memory_format=LAYOUTS[case.layout]) if grad.dim() == 5 else grad


def results(model: nn.Module, inputs: Sequence[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Runs a model forward and backward; returns the output and the gradients of inputs and parameters by name."""
    given, wanted = leaves(model, *inputs)
    y = model(*given)
    names = [*INPUTS[: len(given)], *(_plain_name(name) for name, _ in model.named_parameters())]
    gradients = torch.autograd.grad(y, wanted, grad)
    return {"output": y.detach(), **dict(zip(names, gradients, strict=True))}


def _plain_name(name: str) -> str:
    """Returns the name that a parameter of a fused or compiled model has in the model as it is written."""
    return name.removeprefix("_orig_mod.").removeprefix("tail.").replace("convolution.", "conv.")


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference as a part of the exact tensor's norm, or itself if that norm is zero."""
    return float((found.double() - exact).norm() / (exact.norm() or 1))


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


def _exact(model: nn.Module, inputs: Sequence[Tensor], grad: Tensor, over_batch: bool) -> dict[str, Tensor]:
    """Computes `results` in float64.

    Samples are computed one by one, because a batch may not fit in memory, unless samples depend on each other.
    """
    model = _double(model)
    if over_batch:
        return results(model, [each.double() for each in inputs], grad.double())
    parts = [
        results(model, [each[n : n + 1].double() for each in inputs], grad[n : n + 1].double())
        for n in range(len(grad))
    ]
    return {
        name: (torch.cat if name in ("output", *INPUTS) else sum_of)([part[name] for part in parts])
        for name in parts[0]
    }


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _rival(run: Callable[[], dict[str, Tensor]], exact: dict[str, Tensor]) -> dict[str, float]:
    """Returns the errors of PyTorch's operators, or nothing if one does not exist for the type and device."""
    try:
        return _errors(run(), exact)
    except NotImplementedError:
        return {}


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(found[name], exact[name]) for name in exact}
