"""Tables and lines for a terminal of any width: names are never cut short.

A table whose columns have no room beside each other becomes two lines for each row: words, and numbers under their
headings. All words are printed as they are; markup is for the numbers alone.
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

LEAST_FOLDED = 12  # characters of the one column that may fold


@dataclass(frozen=True)
class Row:
    """A name, other words, text that may take several lines, and numbers. Markup only in the numbers."""

    name: str
    words: tuple[str, ...]
    text: Text
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class Headings:
    """The names of the columns: as many as the rows have."""

    name: str
    words: tuple[str, ...]
    text: str
    numbers: tuple[str, ...]


def show(title: str, caption: str, headings: Headings, rows: Sequence[Row], console: Console) -> None:
    """Prints the rows, as one table if the console has room for it."""
    table = _wide(title, caption, headings, rows)
    needed = 1 + sum((column.min_width or 0) + 3 for column in table.columns)  # with two spaces and a line for each
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
    """Prints text. Lines that are longer than the terminal go on further to the right, between words."""
    if not sys.stdout.isatty():
        print(text)
        return
    print(wrapped(str(text), shutil.get_terminal_size().columns))


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width` characters, unless a word is longer; what goes on has four spaces more in front."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent + 4 * " ", break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)
