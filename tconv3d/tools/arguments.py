"""Checks numbers on the command line before anything runs; messages say what was expected and what was given.

The functions are argparse types or return one; argparse prints their message after the name of the flag.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from math import inf

MOST_SEED = 2**64 - 1  # the largest seed that PyTorch's generators take


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns an argparse type for an integer from `least` to `most`."""

    def parse(text: str) -> int:
        value = _whole(text)
        if value is None or value < least or (most is not None and value > most):
            raise ArgumentTypeError(f"expected an integer {_limits(least, most)}, got {text!r}")
        return value

    return parse


def triple(least: int) -> Callable[[str], tuple[int, int, int]]:
    """Returns an argparse type for one integer for all dimensions, or three integers separated by "," or "x"."""

    def parse(text: str) -> tuple[int, int, int]:
        values = _integers(text, least)
        if values is None or len(values) not in (1, 3):
            raise ArgumentTypeError(
                f"expected one integer or depth,height,width, each {_limits(least, None)}, got {text!r}"
            )
        d, h, w = values * 3 if len(values) == 1 else values
        return d, h, w

    return parse


def shape(text: str) -> tuple[int, ...]:
    """Parses the shape of a tensor whose dimensions are all at least 1."""
    values = _integers(text, 1)
    if values is None:
        raise ArgumentTypeError(f"expected a shape of integers above 0, such as 1x1x96x96x96, got {text!r}")
    return tuple(values)


def seconds(text: str) -> float:
    """Parses a finite number of seconds above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def _integers(text: str, least: int) -> list[int] | None:
    values = [_whole(part) for part in text.replace("x", ",").split(",")]
    found = [value for value in values if value is not None and value >= least]
    return found if len(found) == len(values) else None


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _limits(least: int, most: int | None) -> str:
    return f"of at least {least}" if most is None else f"from {least} to {most}"
