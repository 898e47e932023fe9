"""Breaks long lines of Python at brackets, as Python's formatters do."""

from __future__ import annotations

from collections.abc import Iterable

LINE = 118  # columns
OPENING, CLOSING = "([{", ")]}"


def wrapped(lines: Iterable[str]) -> list[str]:
    """Returns lines of code, those that are too long with what is in their last brackets on lines of their own."""
    return [short for line in lines for short in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    place = _last_brackets(line) if len(line) > LINE else None
    if place is None:
        return [line]
    first, last = place
    head, inside, rest = line[: first + 1], line[first + 1 : last], line[last:]
    pieces = _pieces(inside)
    together = f"{indent}    {', '.join(pieces)}"
    if len(together) <= LINE and len(pieces) > 1:
        return [head, together, indent + rest]
    each = [short for piece in pieces for short in _wrapped(f"{indent}    {piece},")]
    return [head, *each, indent + rest]


def _pieces(text: str) -> list[str]:
    """Returns what commas outside of brackets separate."""
    found, depth, start = [], 0, 0
    for i, letter in enumerate(f"{text},"):
        depth += (letter in OPENING) - (letter in CLOSING)
        if letter == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    return [piece for piece in found if piece]


def _last_brackets(line: str) -> tuple[int, int] | None:
    """Returns the places of the last pair of brackets that is in no other and has something in it."""
    last = None
    depth = 0
    for i in range(len(line) - 1, -1, -1):
        if line[i] in CLOSING:
            last = i if depth == 0 else last
            depth += 1
        elif line[i] in OPENING:
            depth -= 1
            if depth == 0 and last is not None and last - i > 1:
                return i, last
    return None
