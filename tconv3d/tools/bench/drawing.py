"""Builds SVG pictures: a list of elements on a card, for the charts of results and the figures of the documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

# The `style` of every drawing uses this font in its CSS rule for texts.
FONT = '13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'


@dataclass
class Drawing:
    """Collects texts, rectangles and lines, whose CSS classes `style` defines. Sizes are in pixels."""

    width: int
    height: int
    style: str
    marks: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.marks.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, radius: int = 0) -> None:
        corner = f' rx="{radius}"' if radius else ""
        size = f'width="{width:g}" height="{height:g}"{corner}'
        self.marks.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size}/>')

    def cell(self, x: float, y: float, width: float, height: float, kind: str, text: str = "") -> None:
        """Adds a rectangle with a frame, and a text in its centre."""
        self.box(x, y, width, height, f"cell {kind}")
        if text:
            self.text(x + width / 2, y + height / 2 + 4.5, text, anchor="middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.marks.append(f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>')

    def svg(self) -> str:
        marks = "\n".join(self.marks)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}">\n<style>{self.style}</style>\n'
            f'<rect class="card" width="{self.width}" height="{self.height}" rx="12"/>\n{marks}\n</svg>\n'
        )
