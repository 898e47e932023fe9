"""Combines the vectors of an epilogue before its kernel runs, so that the kernel reads and computes less.

Behind a convolution, an inference BatchNorm is ((x - mean) * rstd) * weight + bias: four vectors and four operations
for every output. As (x + before) * factor + after, with before = -mean and factor = rstd * weight, it takes three
vectors and two instructions, of which the second multiplies and adds. What is made of vectors and numbers alone is
computed once, in float64.

This module knows expressions; it knows nothing of graphs and tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .expressions import Expression, number, vector

_AFFINE = ("Sum", "Difference", "Product", "Quotient", "Negative")


def combine(expression: Expression, short: bool) -> tuple[Expression, tuple[Expression, ...]]:
    """Returns an expression with as few vectors as possible, and each of these as an expression of the old ones.

    A chain of sums and products with vectors becomes (x + before) * factor + after. With `short` it becomes
    x * factor + after if that takes no more vectors. Where x and `before` nearly cancel, its error is that of a
    float32 number of x's size, which 16-bit results do not show.
    """
    old = sorted({int(each.numbers[0]) for each in _leaves(expression) if each.name == "Vectored"})
    plain = expression, tuple(map(vector, range(old[-1] + 1 if old else 0)))
    found = [_Combining(form)(expression) for form in ((True, False) if short else (False,))]
    return min([*found, plain], key=lambda each: len(each[1]))


@dataclass(frozen=True)
class _Map:
    """Holds an affine map (x + before) * factor + after; None stands for a sum with 0 and a product with 1."""

    x: Expression
    before: Expression | None = None
    factor: Expression | None = None
    after: Expression | None = None

    def plus(self, term: Expression) -> _Map:
        if self.factor is None and self.after is None:
            return replace(self, before=_sum(self.before, term))
        return replace(self, after=_sum(self.after, term))

    def times(self, factor: Expression) -> _Map:
        after = None if self.after is None else _product(self.after, factor)
        return replace(self, factor=_product(self.factor, factor), after=after)

    def over(self, divisor: Expression) -> _Map:
        return self.times(Expression("Quotient", (number(1), divisor)))

    @property
    def shortened(self) -> _Map:
        """This map as x * factor + after."""
        if self.before is None:
            return self
        before = self.before if self.factor is None else _product(self.before, self.factor)
        return _Map(self.x, None, self.factor, _sum(before, self.after))

    @property
    def parts(self) -> tuple[Expression, ...]:
        return tuple(each for each in (self.before, self.factor, self.after) if each is not None)


class _Combining:
    """Rewrites an expression; `short` maps have no sum before the product."""

    def __init__(self, short: bool) -> None:
        self.short = short
        self.vectors: list[Expression] = []  # the new vectors, as expressions of the old ones

    def __call__(self, expression: Expression) -> tuple[Expression, tuple[Expression, ...]]:
        made = self.made(expression)
        return made, tuple(self.vectors)

    def made(self, expression: Expression) -> Expression:
        if _is_known(expression):
            return self.known(expression)
        found = _map(expression)
        if not any(_has_vectors(each) for each in found.parts):
            return replace(expression, operands=tuple(map(self.made, expression.operands)))
        found = found.shortened if self.short else found
        result = self.made(found.x)
        if found.before is not None:
            result = Expression("Sum", (result, self.known(found.before)))
        if found.factor is not None:
            result = Expression("Product", (result, self.known(found.factor)))
        if found.after is not None:
            result = Expression("Sum", (result, self.known(found.after)))
        return result

    def known(self, expression: Expression) -> Expression:
        """Returns the vector that holds an expression of vectors and numbers; numbers alone stay as they are."""
        if not _has_vectors(expression):
            return expression
        if expression not in self.vectors:
            self.vectors.append(expression)
        return vector(self.vectors.index(expression))


def _map(expression: Expression) -> _Map:
    """Returns an expression as an affine map of its largest part that is none itself."""
    if expression.name == "Negative":
        return _map(expression.operands[0]).times(number(-1))
    if expression.name in _AFFINE:
        a, b = expression.operands
        if _is_known(b):
            if expression.name == "Difference":
                return _map(a).plus(_negative(b))
            return {"Sum": _Map.plus, "Product": _Map.times, "Quotient": _Map.over}[expression.name](_map(a), b)
        if _is_known(a) and expression.name != "Quotient":
            if expression.name == "Product":
                return _map(b).times(a)
            return (_map(b) if expression.name == "Sum" else _map(b).times(number(-1))).plus(a)
    return _Map(expression)


def _is_known(expression: Expression) -> bool:
    """Tells whether an expression is made of vectors and finite numbers alone."""
    if expression.name in _AFFINE:
        return all(map(_is_known, expression.operands))
    return expression.name in ("Vectored", "Number")


def _leaves(expression: Expression) -> Iterator[Expression]:
    if not expression.operands:
        yield expression
    for each in expression.operands:
        yield from _leaves(each)


def _has_vectors(expression: Expression) -> bool:
    return any(each.name == "Vectored" for each in _leaves(expression))


def _negative(known: Expression) -> Expression:
    return Expression("Negative", (known,))


def _sum(first: Expression | None, second: Expression | None) -> Expression | None:
    if first is None or second is None:
        return second if first is None else first
    return Expression("Sum", (first, second))


def _product(first: Expression | None, second: Expression) -> Expression:
    return second if first is None else Expression("Product", (first, second))
