"""Writes the expressions that kernels evaluate as formulas for the reader of an exported file.

    formula("Smallest<Largest<Value, Number<0, 0>>, Number<1, 0>>")    # "min(max(z, 0), 1)"

In a formula z is the element that the kernel has, v0, v1 and so on are numbers per channel, t0, t1 elements of other
tensors, and a, b, c numbers that are computed once. This module knows the names of the C++ types alone.
"""

from __future__ import annotations

from .trace_base import listed

_INFIX = {
    "Sum": "+", "Difference": "-", "Product": "*", "Quotient": "/", "Power": "**", "Less": "<", "LessOrEqual": "<=",
    "Greater": ">", "GreaterOrEqual": ">=", "Equal": "==", "NotEqual": "!=", "Both": "and", "Either": "or",
}  # fmt: skip
_CALLED = {
    "Absolute": "abs", "Exponential": "exp", "ExponentialMinusOne": "expm1", "Logarithm": "log",
    "LogarithmOfOnePlus": "log1p", "SquareRoot": "sqrt", "ReciprocalSquareRoot": "rsqrt", "HyperbolicTangent": "tanh",
    "ErrorFunction": "erf", "RoundDown": "floor", "RoundUp": "ceil", "RoundNearest": "round", "Sine": "sin",
    "Cosine": "cos", "Largest": "max", "Smallest": "min", "Not": "not", "Reciprocal": "1 / ", "Negative": "-",
}  # fmt: skip
_REDUCED = {"Adding": "sum", "FindingLargest": "maximum", "FindingSmallest": "minimum"}


def formula(cpp: str) -> str:
    """Returns the formula of an expression, of a list of them, or of a program along an axis."""
    name, *inside = listed(cpp.replace("tconv3d::", ""))
    if name == "AxisProgram":
        return _along_axis(*inside)
    found = []
    while name == "ExpressionList":
        found.append(_bare(_written(inside[0], 0)))
        name, *inside = listed(inside[1])
    return ", ".join(found) if found else _bare(_written(cpp.replace("tconv3d::", ""), 0))


def _along_axis(result: str, steps: str) -> str:
    """Says what is reduced along the axis; expressions that use the results would be longer than they are clear."""
    name, *inside = listed(steps)
    reduced = []
    while name == "Then":
        _, how, *_ = listed(inside[0])
        reduced.append(_REDUCED.get(how, "place of the maximum" if how == "LocatingLargest" else how))
        name, *inside = listed(inside[1])
    kind = "every element" if result.startswith("EachElement") else "every position"
    return f"{', '.join(reduced)} along the axis, and from these the result of {kind}"


def _written(cpp: str, local: int) -> str:
    """Writes an expression; `local` numbers are known already."""
    name, *inside = listed(cpp)
    if name in ("Vectored", "Whole"):
        return f"{'v' if name == 'Vectored' else 't'}{inside[0]}"
    if name == "Number":
        return f"{int(inside[0]) * 2.0 ** int(inside[1]):.9g}"
    if name == "Local":
        return chr(ord("a") + int(inside[0]))
    if name == "Let":
        first, rest = (_bare(_written(each, local + i)) for i, each in enumerate(inside))
        return f"{rest} with {chr(ord('a') + local)} = {first}"
    if name in ("Value", "Infinity"):
        return "z" if name == "Value" else "-inf" if inside == ["true"] else "inf"
    operands = [_written(each, local) for each in inside]
    if name == "Choice":
        return f"({operands[1]} if {operands[0]} else {operands[2]})"
    if name in _INFIX:
        return f"({operands[0]} {_INFIX[name]} {operands[1]})"
    return f"{_CALLED.get(name, name.lower())}({', '.join(map(_bare, operands))})"


def _bare(text: str) -> str:
    """Returns a formula without brackets around the whole."""
    depths = [text[: i + 1].count("(") - text[: i + 1].count(")") for i in range(len(text) - 1)]
    return text[1:-1] if text.startswith("(") and text.endswith(")") and min(depths) > 0 else text
