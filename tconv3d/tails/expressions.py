"""Converts pointwise operators of PyTorch's graphs to expressions that kernels evaluate (device/expressions.cuh).

An expression is a tree whose leaves are the number that the tail is a function of, constants, operands that are
constant along a channel's volume (vectors), and operands of the result's shape (whole tensors). This module knows
operators and C++ names; it knows nothing of graphs, tensors or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


_AFFINE: dict[str, Callable[..., Tensor]] = {
    "Sum": torch.add,
    "Difference": torch.sub,
    "Product": torch.mul,
    "Quotient": torch.div,
    "Negative": torch.neg,
}


@dataclass(frozen=True)
class Expression:
    """Holds the C++ template of an expression, its operands, and template arguments that are no expressions."""

    name: str
    operands: tuple[Expression, ...] = ()
    numbers: tuple[str, ...] = ()

    @cached_property
    def cpp(self) -> str:
        """The C++ type."""
        inside = (*self.numbers, *(operand.cpp for operand in self.operands))
        return f"tconv3d::{self.name}" + (f"<{', '.join(inside)}>" if inside else "")

    def __str__(self) -> str:
        """The expression for people: C++ names without the namespace."""
        return self.cpp.replace("tconv3d::", "")

    @property
    def degree(self) -> int | None:
        """The degree of the expression as a polynomial of its value, 0 or 1; None if it is no affine map."""
        if self.name in ("Value", "Vectored", "Number"):
            return int(self.name == "Value")
        degrees = [operand.degree for operand in self.operands]
        if self.name not in _AFFINE or any(degree is None for degree in degrees):
            return None
        first, *rest = [degree or 0 for degree in degrees]
        if self.name == "Product":
            return first + rest[0] if first + rest[0] <= 1 else None
        if self.name == "Quotient":
            return None if rest[0] else first
        return max(first, *rest) if rest else first

    def evaluate(self, value: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """Computes an affine map of a tensor with PyTorch."""
        if self.name == "Value":
            return value
        if self.name == "Vectored":
            return vectors[int(self.numbers[0])]
        if self.name == "Number":
            return torch.full_like(value, math.ldexp(int(self.numbers[0]), int(self.numbers[1])))
        return _AFFINE[self.name](*(operand.evaluate(value, vectors) for operand in self.operands))


VALUE = Expression("Value")


def vector(index: int) -> Expression:
    return Expression("Vectored", numbers=(str(index),))


def whole(index: int) -> Expression:
    return Expression("Whole", numbers=(str(index),))


def local(index: int) -> Expression:
    return Expression("Local", numbers=(str(index),))


def number(value: float | int | bool) -> Expression:
    """Returns a constant: an integer times a power of two, which every double is."""
    value = float(value)
    if math.isinf(value):
        return Expression("Infinity", numbers=("true" if value < 0 else "false",))
    if math.isnan(value):
        return Expression("Difference", (number(math.inf), number(math.inf)))
    mantissa, exponent = value.as_integer_ratio()
    power = 1 - exponent.bit_length()
    while mantissa and mantissa % 2 == 0:
        mantissa, power = mantissa // 2, power + 1
    return Expression("Number", numbers=(str(mantissa), str(power)))


Build = Callable[..., Expression]


def _plain(name: str) -> Build:
    return lambda *operands: Expression(name, operands)


def _sum(name: str) -> Build:
    def build(a: Expression, b: Expression, alpha: Expression | None = None) -> Expression:
        return Expression(name, (a, b if alpha is None else Expression("Product", (b, alpha))))

    return build


def _clamp(x: Expression, least: Expression | None = None, most: Expression | None = None) -> Expression:
    x = x if least is None else Expression("Largest", (x, least))
    return x if most is None else Expression("Smallest", (x, most))


def _relu(x: Expression) -> Expression:
    return Expression("Largest", (x, number(0)))


def _power(x: Expression, y: Expression) -> Expression:
    if y == number(1):
        return x
    if y == number(2):
        return Expression("Product", (x, x))
    return Expression("SquareRoot", (x,)) if y == number(0.5) else Expression("Power", (x, y))


def _reversed_difference(a: Expression, b: Expression, alpha: Expression | None = None) -> Expression:
    return Expression("Difference", (b, a if alpha is None else Expression("Product", (a, alpha))))


def _same(x: Expression, *_: Any, **__: Any) -> Expression:
    return x


# Operators of any overload, by name. Operands that are tensors, numbers or booleans become expressions.
OPERATORS: dict[Any, Build] = {
    aten.add: _sum("Sum"),
    aten.sub: _sum("Difference"),
    aten.rsub: _reversed_difference,
    aten.mul: _plain("Product"),
    aten.div: _plain("Quotient"),
    aten.neg: _plain("Negative"),
    aten.abs: _plain("Absolute"),
    aten.exp: _plain("Exponential"),
    aten.expm1: _plain("ExponentialMinusOne"),
    aten.log: _plain("Logarithm"),
    aten.log1p: _plain("LogarithmOfOnePlus"),
    aten.sqrt: _plain("SquareRoot"),
    aten.rsqrt: _plain("ReciprocalSquareRoot"),
    aten.reciprocal: _plain("Reciprocal"),
    aten.tanh: _plain("HyperbolicTangent"),
    aten.erf: _plain("ErrorFunction"),
    aten.sigmoid: _plain("Sigmoid"),
    aten.floor: _plain("RoundDown"),
    aten.ceil: _plain("RoundUp"),
    aten.round: _plain("RoundNearest"),
    aten.sin: _plain("Sine"),
    aten.cos: _plain("Cosine"),
    **dict.fromkeys((aten.sign, aten.sgn), _plain("Sign")),
    aten.relu: _relu,
    aten.clamp: _clamp,
    aten.clamp_min: _clamp,
    aten.clamp_max: lambda x, most: _clamp(x, None, most),
    aten.maximum: _plain("Largest"),
    aten.minimum: _plain("Smallest"),
    aten.pow: _power,
    aten.where: _plain("Choice"),
    aten.masked_fill: lambda x, mask, value: Expression("Choice", (mask, value, x)),
    aten.gt: _plain("Greater"),
    aten.ge: _plain("GreaterOrEqual"),
    aten.lt: _plain("Less"),
    aten.le: _plain("LessOrEqual"),
    aten.eq: _plain("Equal"),
    aten.ne: _plain("NotEqual"),
    aten.logical_and: _plain("Both"),
    aten.logical_or: _plain("Either"),
    aten.logical_not: _plain("Not"),
    aten.clone: _same,
    aten.alias: _same,
    aten.detach: _same,
}
