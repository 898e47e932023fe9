"""Compares what a kernel computes with what PyTorch's operator computes, before the kernel is timed and can win.

Kernels are tested in the emulator and on few GPUs, and run on many. Where offers are timed at a layer's first call,
each is therefore run once on the call's own tensors, into memory full of NaN: every element must have been written,
and the result must be PyTorch's up to rounding. Rounding can be most of a result whose terms cancel, so a result that
differs is compared with float64 before the kernel is dropped.

This module knows tensors, and neither kernels nor plans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .measuring import Run, WrongResult
from .pytorch_ops import with_strides

LARGEST = 0.05  # difference from PyTorch's result, relative to that result, that needs no look at float64
WORSE = 16.0  # a kernel is wrong if its error is so many times the error of PyTorch's operator
AT_ONCE = 1 << 22  # elements that are compared at once, to bound the memory of comparing

Results = Sequence[Tensor | None]
Theirs: TypeAlias = functools.partial[Any]  # a call of PyTorch's operator, with its arguments


class Examiner:
    """Compares results with those of PyTorch's operator, which is run when the first result is compared."""

    def __init__(self, results: Callable[[], Results], theirs: Theirs) -> None:
        """`results` returns the tensors that candidates write, `theirs` PyTorch's results in the same order."""
        self.results, self.theirs = results, theirs

    def __call__(self, run: Run) -> None:
        """Runs a candidate once, and raises `WrongResult` if what it wrote is wrong."""
        if self._reference is None:
            return
        ours = self.results()
        for result in ours:
            if result is not None:
                result.fill_(float("nan"))
        run()
        for number, (result, reference) in enumerate(zip(ours, self._reference, strict=True)):
            if result is not None and reference is not None and result.numel():
                self._compare(number, result, with_strides(reference, result.stride()))

    def _compare(self, number: int, result: Tensor, reference: Tensor) -> None:
        size = float(torch.linalg.vector_norm(reference, dtype=torch.float64))
        error = distance(result, reference)
        # NaN and infinity in PyTorch's result come from the operands, and say nothing about the kernel.
        if not size < float("inf") or error <= LARGEST * size:
            return
        exact = self._exact[number] if self._exact is not None else None
        if exact is not None:
            exact = with_strides(exact, result.stride())
            if distance(result, exact) <= WORSE * distance(reference, exact):
                return
        relative = error / size if size else error
        raise WrongResult(f"its result differs from PyTorch's by {relative:.2g} of the norm of PyTorch's result")

    @functools.cached_property
    def _reference(self) -> Results | None:
        return _results(self.theirs)

    @functools.cached_property
    def _exact(self) -> Results | None:
        wide = [each.double() if isinstance(each, Tensor) else each for each in self.theirs.args]
        return _results(functools.partial(self.theirs.func, *wide, **self.theirs.keywords))


def _results(compute: Run) -> Results | None:
    """Returns the results of PyTorch's operator, or None where it cannot compute them, for lack of memory say."""
    try:
        found = compute()
    except RuntimeError:
        return None
    return [found] if isinstance(found, Tensor) else found  # type: ignore[return-value]


def distance(a: Tensor, b: Tensor) -> float:
    """Returns the Euclidean norm of the difference of two dense tensors with the same strides."""
    flat = [each.as_strided((each.numel(),), (1,)) for each in (a, b)]
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for first, second in zip(*(each.split(AT_ONCE) for each in flat), strict=True):
        total += torch.linalg.vector_norm(first.to(wide) - second.to(wide), dtype=torch.float64).square()
    return float(total.sqrt())
