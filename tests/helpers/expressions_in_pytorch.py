"""Evaluates the expressions of tails with PyTorch, in place of kernels that would have to be compiled.

With it, tests of how a tail is divided into stages and passes take milliseconds for a tail. The kernels themselves
have tests of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tconv3d.tails.axes import ALONG
from tconv3d.tails.expressions import Expression
from tconv3d.torch_ops import axis_executor, executor, tail_executor
from tconv3d.torch_ops.pytorch_ops import statistics_dtype

FUNCTIONS: dict[str, Any] = {
    "Sum": torch.add, "Difference": torch.sub, "Product": torch.mul, "Quotient": torch.div, "Negative": torch.neg,
    "Absolute": torch.abs, "Exponential": torch.exp, "ExponentialMinusOne": torch.expm1, "Logarithm": torch.log,
    "LogarithmOfOnePlus": torch.log1p, "SquareRoot": torch.sqrt, "ReciprocalSquareRoot": torch.rsqrt,
    "Reciprocal": torch.reciprocal, "HyperbolicTangent": torch.tanh, "ErrorFunction": torch.erf,
    "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Largest": torch.maximum, "Smallest": torch.minimum,
    "Power": torch.pow, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
    "Equal": torch.eq, "NotEqual": torch.ne, "Both": torch.logical_and, "Either": torch.logical_or,
    "Not": torch.logical_not,
}  # fmt: skip


def parsed(text: str) -> Expression:
    """Returns the expression that a C++ type names."""
    words = re.findall(r"tconv3d::\w+|[<>,]|-?\w+", text)
    expression, rest = _parsed(words)
    assert not rest
    return expression


def _parsed(words: list[str]) -> tuple[Expression, list[str]]:
    name, rest = words[0].removeprefix("tconv3d::"), words[1:]
    numbers: list[str] = []
    operands: list[Expression] = []
    if rest and rest[0] == "<":
        while rest[0] != ">":
            rest = rest[1:]
            if rest[0].startswith("tconv3d::"):
                operand, rest = _parsed(rest)
                operands.append(operand)
            else:
                numbers.append(rest[0])
                rest = rest[1:]
        rest = rest[1:]
    return Expression(name, tuple(operands), tuple(numbers)), rest


def evaluated(
    text: str, x: Tensor, vectors: Tensor | None, wholes: Sequence[Tensor], bound: tuple[Tensor, ...] = ()
) -> Tensor:
    """Returns an expression of every element of x, [N, C, D, H, W]. `bound` are local numbers that exist already."""
    places = (..., None, None, None)

    def value(expression: Expression, bound: tuple[Tensor, ...]) -> Tensor:
        name, numbers = expression.name, expression.numbers
        if name == "Value":
            return x
        if name in ("Vectored", "Whole", "Local"):
            index = int(numbers[0])
            if name == "Vectored":
                assert vectors is not None
                return vectors[index][places].to(x.dtype).expand(x.shape)
            return wholes[index] if name == "Whole" else bound[index]
        if name == "Number":
            return torch.full_like(x, math.ldexp(int(numbers[0]), int(numbers[1])))
        if name == "Infinity":
            return torch.full_like(x, -math.inf if numbers[0] == "true" else math.inf)
        if name == "Let":
            return value(expression.operands[1], (*bound, value(expression.operands[0], bound)))
        operands = [value(operand, bound) for operand in expression.operands]
        if name == "Choice":
            return torch.where(operands[0].bool(), operands[1], operands[2])
        return FUNCTIONS[name](*operands).to(x.dtype)

    return value(parsed(text), bound)


def along_axis(
    text: str,
    x: Tensor,
    dims: frozenset[int],
    vectors: Any,
    wholes: Sequence[Tensor],
    placed: Any,
    along: Any,
    summed: str = "",
) -> Tensor:
    """Returns what a program along an axis of x, [N, C, D, H, W], computes, or what is `summed` over positions."""
    over = sorted(dims)
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    order = axis_executor.memory_order(x)
    bound: list[Tensor] = []
    for each in placed if placed is not None else ():
        laid = each.to(x.dtype).reshape([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(5)])
        bound.append(laid.expand(x.shape))
    lengths = [size if dim in dims else 1 for dim, size in enumerate(x.shape)]
    sides = [each.to(x.dtype).reshape(lengths).expand(x.shape) for each in (along if along is not None else ())]
    operands = [*wholes, *[x] * (ALONG - len(wholes)), *sides]  # operands along the axis have indices from ALONG on

    def value(expression: Expression) -> Tensor:
        return evaluated(expression.cpp, x, vectors, operands, tuple(bound))

    final, steps = parsed(text).operands
    first = len(bound)
    bound += [x] * text.count("tconv3d::Then<")  # an expression binds further numbers behind those of all steps
    while steps.name == "Then":
        step, steps = steps.operands
        *way, of = step.operands
        found = value(of)
        if way:
            found = WAYS[way[0].name](found, over, shape).to(x.dtype).expand(x.shape)
        bound[first] = found
        first += 1
    if summed:
        return value(parsed(summed))
    found = value(final.operands[0])
    return found if final.name == "EachElement" else found[tuple(slice(0, size) for size in shape)]


def _located(largest: bool) -> Any:
    def locate(x: Tensor, over: list[int], shape: list[int]) -> Tensor:
        (dim,) = over
        return (x.argmax(dim) if largest else x.argmin(dim)).reshape(shape)

    return locate


WAYS: dict[str, Any] = {
    "Adding": lambda x, over, shape: x.sum(over, keepdim=True),
    "FindingLargest": lambda x, over, shape: x.amax(over, keepdim=True),
    "FindingSmallest": lambda x, over, shape: x.amin(over, keepdim=True),
    "LocatingLargest": _located(True),
    "LocatingSmallest": _located(False),
}


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the kernels of forward passes, passes and sums until the test ends, and lists those called."""
    called: list[str] = []

    def convolved(input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Any, tail: Any) -> Tensor:
        z = F.conv_transpose3d(input, weight, bias, *convolution)
        if tail is None:
            return z
        vectors = None if tail.vectors is None else tail.vectors.movedim(-1, 0)  # the kernel reads them side by side
        return evaluated(tail.expression, z, vectors, tail.wholes)

    def forward(input: Tensor, weight: Any, bias: Any, convolution: Any, keep: bool = False, tail: Any = None) -> Any:
        called.append("convolution")
        u = convolved(input, weight, bias, convolution, tail)
        if tail is None or not tail.channels:
            return u
        called.append("over channels")
        return along_axis(tail.channels, u, frozenset({1}), None, (), None, None).to(tail.per_position or u.dtype)

    def with_statistics(
        input: Tensor, weight: Any, bias: Any, groups: int, eps: float, convolution: Any, keep: bool = False,
        tail: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        called.append("convolution with statistics")
        u = convolved(input, weight, bias, convolution, tail)
        variance, mean = torch.var_mean(u.reshape(u.shape[0], groups, -1), dim=2, correction=0)
        return u, torch.stack([mean, (variance + eps).rsqrt()])

    def evaluate(
        x: Tensor, text: str, vectors: Any, wholes: Any, dtype: torch.dtype, overwrite: bool, runner: Any
    ) -> Tensor:
        called.append("pass")
        return evaluated(text, x, vectors, wholes).to(dtype).clone()

    def sums(x: Tensor, texts: tuple[str, ...], vectors: Any, wholes: Any, runner: Any) -> Tensor:
        called.append("sums")
        wide = statistics_dtype(x.dtype)
        return torch.stack([evaluated(text, x, vectors, wholes).sum((3, 4)) for text in texts], -1).to(wide)

    def extreme(x: Tensor, which: str, text: str, vectors: Any, wholes: Any, runner: Any) -> Tensor:
        called.append("extreme")
        found = evaluated(text, x, vectors, wholes, (x,))  # the first local number is the extreme itself
        return (found.amax((2, 3, 4)) if which == "Largest" else found.amin((2, 3, 4)))[None]

    def along(
        x: Tensor, dims: frozenset[int], program: str, sweeps: int, each: bool, vectors: Any, wholes: Any,
        placed: Any, sides: Any, dtype: torch.dtype, overwrite: bool, runner: Any, sums: tuple[str, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        called.append("axis")
        parts = [along_axis(program, x, dims, vectors, wholes, placed, sides, each) for each in sums]
        over = [dim for dim in range(1 if dims == {1} else 0, 5) if dim not in dims]
        batch = x.shape[0] if dims == {1} else 1
        added = [each.sum(over).reshape(batch, -1, 1).to(statistics_dtype(x.dtype)) for each in parts]
        y = along_axis(program, x, dims, vectors, wholes, placed, sides).to(dtype).clone()
        return y, torch.stack(added, -1) if added else None

    monkeypatch.setattr(executor, "forward", forward)
    monkeypatch.setattr(axis_executor, "run", along)
    monkeypatch.setattr(executor, "forward_with_statistics", with_statistics)
    monkeypatch.setattr(tail_executor, "evaluate", evaluate)
    monkeypatch.setattr(tail_executor, "sums", sums)
    monkeypatch.setattr(axis_executor, "extreme", extreme)
    return called
