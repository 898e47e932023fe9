"""Keeps the comments of an exported source true: none mentions a name or a file that the source does not have.

A sentence that mentions something that is gone goes too, together with the rest of its paragraph, which may lean on
it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from .tidy import LINE

_FILE = r"\b(?:[\w/]+\.(?:cuh|cu|py|md)|\w+_\w+\.h)\b"
# Matches a case in a comment: what a member is in builds that have a constant.
_CASE = re.compile(r"[;,] with (k[A-Z]\w*)(,?) ([^;,.]*)")
_GONE = re.compile(rf"{_FILE}|\b[Ff]iles?\b|emulator|TCONV3D_")
_NAMES = re.compile(r"\bk[A-Z]\w*|\b[a-z]\w*(?=\(\))|(?<=`)[A-Za-z_]\w*(?=`)|\b[a-z]+_\w+\b|\b[A-Z]\w*(?=::)")
_LEAD = re.compile(r"([ \t]*)//( ?)(.*)")


def words_of(code: str) -> set[str]:
    """Returns the names in a source, without those that only comments mention."""
    return set(re.findall(r"[A-Za-z_]\w*", re.sub(r"//[^\n]*", "", code)))


class Facts:
    """What comments may mention: the names of a source, and the values that its constants have."""

    def __init__(self, words: set[str], values: Mapping[str, set[int]]) -> None:
        self._words, self._values = words, values

    def allow(self, sentence: str) -> bool:
        if _GONE.search(sentence) or any(name not in self._words for name in _NAMES.findall(sentence)):
            return False
        stated = re.findall(r"\b(k[A-Z]\w*) (==|>) (\d+)", sentence)
        return all(self._may_be(name, mark, int(number)) for name, mark, number in stated)

    def of_this_build(self, text: str) -> str:
        """Returns a comment without what it says of other builds: cases of constants that the source has no more."""
        first = re.match(r"With (k[A-Z]\w*): (.)", text)
        if first is not None and self._values.get(first[1]) == {1} and first[1] not in self._words:
            text = first[2].upper() + text[first.end() :]

        def case(found: re.Match[str]) -> str:
            name, comma, rest = found.groups()
            if name in self._words:
                return found.group()
            return f"; here{comma} {rest}" if self._values.get(name) == {1} else ""

        return _CASE.sub(case, text)

    def _may_be(self, name: str, mark: str, number: int) -> bool:
        """Says whether a constant has such a value in some kernel; one whose values are not known may."""
        known = self._values.get(name, {number, number + 1})
        return any(value == number if mark == "==" else value > number for value in known)


def only_true(source: str, facts: Facts) -> str:
    """Returns the source with every comment reduced to sentences that the facts allow."""
    out: list[str] = []
    block: list[str] = []
    for line in [*source.split("\n"), ""]:
        if re.match(r"\s*//", line):
            block.append(line)
            continue
        if block:
            out += _block(block, facts)
            block = []
        out.append(_beside(line, facts))
    return "\n".join(out[:-1])


def _beside(line: str, facts: Facts) -> str:
    """Reduces the comment at the end of a line of code."""
    found = re.fullmatch(r'((?:[^"/]|"(?:[^"\\]|\\.)*"|/(?!/))*?\S)(\s*)// ?(.*)', line)
    if found is None:
        return line
    text = _sentences(found.group(3), facts)
    return f"{found.group(1)}{found.group(2)}// {text}" if text else found.group(1)


def _block(lines: list[str], facts: Facts) -> list[str]:
    """Reduces a comment of its own lines, paragraph by paragraph."""
    indent = re.match(r"[ \t]*", lines[0])
    assert indent is not None
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        lead = _LEAD.match(line)
        assert lead is not None
        text = lead.group(3)
        if not text.strip():
            paragraphs.append([])
        elif text.startswith("- "):
            paragraphs.append([text])
        else:
            paragraphs[-1].append(text)
    kept = [_paragraph(paragraph, facts) for paragraph in paragraphs]
    return _written(_without_open_ends(kept, paragraphs), indent.group())


def _paragraph(lines: list[str], facts: Facts) -> list[str]:
    if not lines:
        return []
    if any(line.startswith("  ") for line in lines[0:1]):  # a formula or a loop in words
        return lines
    text = " ".join(line.strip() for line in lines)
    if text.startswith("- "):
        whole = facts.of_this_build(_bare(text[2:]))
        return [f"- {whole}"] if _sentences(whole, facts) == whole else []
    found = _sentences(text, facts)
    return [found] if found else []


def _bare(text: str) -> str:
    """Removes references to files in brackets."""
    text = re.sub(rf"\s*\((?:as\s)?{_FILE}(?:\s+says)?\)", "", text)
    return re.sub(rf",? as {_FILE} says", "", text)


def _sentences(text: str, facts: Facts) -> str:
    """Returns the sentences before the first one that mentions what is not there."""
    kept = []
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`\d])", facts.of_this_build(_bare(text))):
        if not facts.allow(sentence):
            break
        kept.append(sentence)
    return " ".join(kept)


def _without_open_ends(kept: list[list[str]], all_of: list[list[str]]) -> list[list[str]]:
    """Removes a paragraph that announces a list of which nothing is left."""
    result: list[list[str]] = []
    for i, paragraph in enumerate(kept):
        later = [j for j in range(i + 1, len(kept)) if all_of[j]]
        is_list = bool(later) and all_of[later[0]][0].startswith("- ")
        announced = (
            [kept[j] for j in later if all_of[j][0].startswith("- ")] if is_list else [kept[j] for j in later[:1]]
        )
        announces = bool(paragraph) and paragraph[-1].rstrip().endswith((":", "are"))
        if announces and not any(announced):
            shorter = re.sub(r"(?:^|(?<=[.!?]) )[^.!?]*(?::|are)$", "", paragraph[-1])
            paragraph = [shorter] if shorter else []
        if paragraph:
            result.append(paragraph)
    return result


def _written(paragraphs: list[list[str]], indent: str) -> list[str]:
    lines: list[str] = []
    for i, paragraph in enumerate(paragraphs):
        bullet, before = paragraph[0].startswith("- "), i > 0 and paragraphs[i - 1][0].startswith("- ")
        if i and not (bullet and before):
            lines.append(f"{indent}//")
        if paragraph[0].startswith("  "):
            lines += [f"{indent}// {line}" for line in paragraph]
            continue
        width = LINE - len(indent) - 3
        hanging = "  " if bullet else ""
        wrapped = textwrap.wrap(paragraph[0], width, subsequent_indent=hanging, break_long_words=False)
        lines += [f"{indent}// {line}" for line in wrapped]
    return lines
