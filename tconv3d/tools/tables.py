"""Prints tables and lines on a terminal of any width without truncating names.

A table that is too wide for the console is printed with two lines for each row: the words, and the numbers under
their headings. Words are printed as they are; rich markup is interpreted in numbers only.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

LEAST_FOLDED = 12  # smallest width, in characters, of the one column whose text may wrap


@dataclass(frozen=True)
class Row:
    """Holds one table row: a name, other words, text that may wrap, and numbers, which may contain rich markup."""

    name: str
    words: tuple[str, ...]
    text: Text
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class Headings:
    """Holds the column headings, one for each field of a `Row`."""

    name: str
    words: tuple[str, ...]
    text: str
    numbers: tuple[str, ...]


def show(title: str, caption: str, headings: Headings, rows: Sequence[Row], console: Console) -> None:
    """Prints the rows, as one table if the console has room for it."""
    table = _wide(title, caption, headings, rows)
    needed = 1 + sum((column.min_width or 0) + 3 for column in table.columns)  # 3: two spaces and a border
    console.print(table if needed <= console.width else _narrow(title, caption, headings, rows), highlight=False)


def _wide(title: str, caption: str, headings: Headings, rows: Sequence[Row]) -> Table:
    lines: list[list[Text]] = []
    previous = None
    for row in rows:
        name = "" if row.name == previous else row.name
        lines.append([Text(name), *map(Text, row.words), row.text, *map(Text.from_markup, row.numbers)])
        previous = row.name
    table = Table(title=Text(title), caption=Text(caption))
    names = (headings.name, *headings.words, headings.text, *headings.numbers)
    folded = len(headings.words) + 1
    for index, heading in enumerate(names):
        longest = max([len(heading), *(line[index].cell_len for line in lines)])
        if index == folded:
            table.add_column(heading, overflow="fold", min_width=min(longest, LEAST_FOLDED))
        else:
            table.add_column(heading, justify="right" if index > folded else "left", no_wrap=True, min_width=longest)
    for line in lines:
        table.add_row(*line)
    return table


def _narrow(title: str, caption: str, headings: Headings, rows: Sequence[Row]) -> RenderableType:
    numbers = [[Text.from_markup(number) for number in row.numbers] for row in rows]
    head = [Text(heading, style="bold") for heading in headings.numbers]
    widths = [2 + max(cell.cell_len for cell in column) for column in zip(head, *numbers, strict=True)]
    lines: list[Text] = [Text(title, style="italic"), _aligned(head, widths)]
    for row, cells in zip(rows, numbers, strict=True):
        words = Text(" ".join(word for word in (row.name, *row.words) if word), style="bold")
        if row.text:
            words = Text.assemble(words, ": ", row.text)
        lines += [words, _aligned(cells, widths)]
    return Group(*lines, Text(caption, style="dim italic"))


def _aligned(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text(overflow="fold")
    for cell, width in zip(cells, widths, strict=True):
        line.append(" " * (width - cell.cell_len))
        line.append_text(cell)
    return line


def print_lines(text: object) -> None:
    """Prints text; on a terminal, lines wider than it are wrapped between words and continued with an indent."""
    if not sys.stdout.isatty():
        print(text)
        return
    print(wrapped(str(text), shutil.get_terminal_size().columns))


def wrapped(text: str, width: int) -> str:
    """Wraps lines to `width` characters, without breaking words; continuation lines are indented by four spaces."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent + 4 * " ", break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)
