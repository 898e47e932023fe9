"""The report: one page out of a results file, whole in itself, that a real browser shows without a complaint."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import browser
import pytest

from tconv3d.tools import cli
from tconv3d.tools.bench import charts, report, results
from tconv3d.tools.bench.layers import LAYERS
from tconv3d.tools.bench.results import ModelRow, Results, Row

NASTY = "<script>alert('layer')</script>"
CEILINGS = {"copy_TBps": 4.0, "tf32_TFLOPS": 400.0, "bfloat16_TFLOPS": 800.0}
NAMES = ["grouped_strided", "large_volume", "nnunet_64_32_64", "gan_64_1_32", NASTY]


def invented_row(number: int, name: str, dtype: str, which: str) -> Row:
    layer = LAYERS.get(name, LAYERS["depthwise_64"])
    bytes_, flops = 2e9 / (number + 1), 1e12 * (number + 1)
    floor = max(bytes_ / (CEILINGS["copy_TBps"] * 1e9), flops / (CEILINGS[f"{dtype}_TFLOPS"] * 1e9))
    ours = floor * (1.2 + 0.1 * number)
    theirs = {"default": ours * (30 - 7 * number), "channels_last": ours * (6 - 1.3 * number)}
    kernel = "halo" if which == "forward" else "direct, direct_weight_grad, channel_sum"
    row = Row(name, str(layer), layer.as_dict(), layer.follow, dtype, "contiguous", which, kernel, "a tile")
    row.bytes, row.flops, row.floor_ms, row.bound_by = int(bytes_), int(flops), floor, "memory"
    row.error, row.torch_error, row.right, row.ours_ms, row.torch_ms = 2e-4, 3e-4, True, ours, theirs
    return row


@pytest.fixture
def invented() -> Results:
    """Measured nowhere: the numbers only have the right form."""
    machine: dict[str, Any] = {"gpu": "Invented GPU", "torch": "2.x", "cuda": "13.x", "tconv3d": "0.0"}
    machine |= {"commit": "0" * 40, "driver": None, "measured": "2000-01-01T00:00:00+00:00"}
    rows = [
        invented_row(number, name, dtype, which)
        for dtype in ("tf32", "bfloat16")
        for which in results.PASSES
        for number, name in enumerate(NAMES)
    ]
    failed = Row("too_large", "", {}, "", "tf32", "contiguous", "forward", failed="OutOfMemoryError: 1 TB")
    model = ModelRow("networks:unet", "tf32", "contiguous", 4, 0, {"forward": 10.0}, {"forward": 8.0}, 1e-4, True)
    return Results("bench", machine, {"budget_s": 0.15, "seed": 0}, dict(CEILINGS), [*rows, failed], [model])


@pytest.fixture
def file(invented: Results, tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    invented.write(path)
    return path


# ---- the file


def test_what_is_written_is_read_again(invented: Results, file: Path) -> None:
    invented.rows[0].error = float("nan")
    invented.write(file)
    again = results.read(file)
    assert again.as_dict() == invented.as_dict()
    assert math.isnan(again.rows[0].error or 0) and again.rows[1].error == invented.rows[1].error
    assert again.models == invented.models
    json.loads(file.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_file_describes_a_layer_once(invented: Results, file: Path) -> None:
    """A file holds a layer's shape once for all its rows, unless two layers have one name."""
    stored = json.loads(file.read_text())
    assert set(stored["layers"]) == {row.layer for row in invented.rows}
    assert not any("shape" in row or "failed" in row for row in stored["rows"][:-1])
    invented.rows[1].layer, invented.rows[1].text = invented.rows[0].layer, "another layer of this name"
    invented.write(file)
    assert results.read(file).as_dict() == invented.as_dict()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a file that"),
        ('{"format": 0, "rows": []}', "format 1"),
        ('{"format": 1, "rows": [{"layer": 1}]}', "damaged"),
        ('{"format": 1, "rows": [], "models": []}', "damaged"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_none(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["report", str(path), "-o", str(tmp_path / "report.html")]) == 1
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed
    assert not (tmp_path / "report.html").exists()


def test_results_without_times_have_no_report(invented: Results, file: Path) -> None:
    invented.models.clear()
    for row in invented.rows:
        row.ours_ms = None
    with pytest.raises(ValueError, match="no times"):
        report.page(invented)


def test_the_command_writes_the_page(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert cli.main(["report", str(file), "-o", str(target)]) == 0
    assert target.read_text() == report.page(results.read(file))
    assert str(target) in capsys.readouterr().out
    assert cli.main(["report", str(file), "-o", str(tmp_path / "no" / "page.html")]) == 1


# ---- the page as text


class Links(HTMLParser):
    """Everything that a page would load, and whether every element is closed."""

    VOID = ("meta", "link", "line", "circle")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else(invented: Results) -> None:
    page = report.page(invented)
    links = Links(page)
    assert links.loaded == ["data:,"]
    assert links.open == []
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page


def test_texts_are_escaped(invented: Results) -> None:
    invented.machine["gpu"] = "<b>GPU"
    page = report.page(invented)
    assert page.count("<script>") == 1, "the page's own"
    assert "<b>GPU" not in page and "&lt;b&gt;GPU" in page


def test_the_page_says_what_went_wrong(invented: Results) -> None:
    assert 'class="warning"' not in report.page(invented)
    assert "OutOfMemoryError: 1 TB" in report.page(invented)
    invented.rows[1].right = False
    invented.interrupted = True
    page = report.page(invented)
    assert "Wrong results" in page and "large_volume (tf32 forward)" in page
    assert "interrupted" in page


def test_bars_are_as_long_as_the_gain(invented: Results) -> None:
    rows = [(i, row) for i, row in enumerate(invented.rows[:5])]
    chart = charts.speedups(rows)
    found = re.findall(r'<b class="(\w+)([\w ]*)" style="left:([\d.]+)%;width:([\d.]+)%"', chart)
    assert [kind for kind, *_ in found] == ["default", "best"] * 5
    (one,) = re.findall(r'<i class="one" style="left:([\d.]+)%"', chart)
    slower = [bool(word) for _, word, _, _ in found]
    gains = [gain for _, row in rows for gain in (row.gain, row.gain_over_best)]
    assert slower == [gain is not None and gain < 1 for gain in gains]
    assert any(slower), "the last layer is slower than PyTorch's best: the test must see one"
    for gain, (_, word, left, width) in zip(gains, found, strict=True):
        end = float(left) if word else float(left) + float(width)
        assert 0 <= end <= 100
        assert (float(left) + float(width) if word else float(left)) == pytest.approx(float(one), abs=0.01)
        if gain == pytest.approx(gains[0]):
            longest = end
    assert longest == max(float(left) + float(width) for _, _, left, width in found)


def test_layers_stand_where_the_roofline_has_them(invented: Results) -> None:
    rows = [(i, row) for i, row in enumerate(invented.rows[:5])]
    chart = charts.roofline(rows, CEILINGS, "tf32")
    ours = re.findall(r'<circle class="ours" cx="([\d.]+)%" cy="([\d.]+)%"', chart)
    theirs = re.findall(r'<circle class="theirs" cx="([\d.]+)%" cy="([\d.]+)%"', chart)
    assert len(ours) == len(theirs) == 5
    for (x, y), (other_x, other_y), (_, row) in zip(ours, theirs, rows, strict=True):
        assert x == other_x and all(0 <= float(value) <= 100 for value in (x, y, other_y))
        assert (float(y) < float(other_y)) == bool(row.gain and row.gain > 1), "faster is higher"
    assert [float(x) for x, _ in ours] == sorted(float(x) for x, _ in ours), "more FLOP per byte is further right"
    heights = [float(y) for y in re.findall(r'<line class="roof" .*?y2="([\d.]+)%"', chart)]
    assert min(float(y) for _, y in ours) > min(heights), "no layer is above the roof"


def test_a_roof_that_is_not_seen_has_no_name(invented: Results) -> None:
    rows = [(1, invented.rows[1])]
    assert "TB/s" not in charts.roofline(rows, CEILINGS, "tf32"), "2000 FLOP per byte: the memory roof is far left"
    assert "4.00 TB/s" in charts.roofline(rows, {**CEILINGS, "tf32_TFLOPS": 40000.0}, "tf32")


def test_without_ceilings_there_is_no_roofline(invented: Results) -> None:
    assert charts.roofline([(1, invented.rows[0])], {}, "tf32") == ""
    invented.ceilings = {}
    assert "roofline-figure" not in re.sub(r"<style>.*</style>", "", report.page(invented), flags=re.DOTALL)


# ---- pictures


@pytest.mark.parametrize("which", results.PASSES)
def test_a_picture_is_one_view_of_the_page(which: str, invented: Results, file: Path, tmp_path: Path) -> None:
    target = tmp_path / "picture.svg"
    assert cli.main(["report", str(file), "-o", str(target), "--pass", which, "--dtype", "bfloat16"]) == 0
    root = ElementTree.fromstring(target.read_text())
    svg = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{svg}text")]
    assert f"{which.capitalize()}, bfloat16, contiguous, Invented GPU" in texts
    assert set(NAMES) <= set(texts), "names are escaped, and all there"
    shown = [row for row in invented.rows if (row.dtype, row.which) == ("bfloat16", which)]
    assert [f"{row.gain_over_best:.2f}\u00d7" for row in shown] == [
        element.text for element in root.iter(f"{svg}text") if element.get("class") == "strong"
    ]
    bars = [element for element in root.iter(f"{svg}rect") if element.get("class", "").startswith("best")]
    widths = [float(bar.get("width", "nan")) for bar in bars if "slower" not in bar.get("class", "")]
    assert len(bars) == len(shown) and widths == sorted(widths, reverse=True), "the invented gains fall"
    assert len([e for e in root.iter(f"{svg}circle") if e.get("class") == "ours"]) == len(shown)
    size = [float(root.get(name, "nan")) for name in ("width", "height")]
    for element in [*root.findall(f"{svg}text"), *root.findall(f"{svg}rect")]:
        x, y = float(element.get("x", "0")), float(element.get("y", "0"))
        assert 0 <= x <= size[0] and 0 <= y <= size[1]
    assert "@import" not in target.read_text() and "url(" not in target.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "picture.svg", "--dtype", "float64"], "no times of float64"),
        (["-o", "page.html", "--pass", "backward"], "a page shows everything"),
    ],
)
def test_a_picture_of_nothing(
    words: list[str], message: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words[1] = str(tmp_path / words[1])
    assert cli.main(["report", str(file), *words]) == 1
    assert message in capsys.readouterr().err
    assert not Path(words[1]).exists()


# ---- the page in a browser


@pytest.fixture
def page(invented: Results, tmp_path: Path) -> Iterator[browser.Page]:
    if browser.find() is None:
        pytest.skip("no Chromium here: the report was not opened in a browser")
    path = tmp_path / "report.html"
    path.write_text(report.page(invented))
    with browser.opened(path, tmp_path / "profile") as opened:
        yield opened


# The contrast of a text with its background, as WCAG counts it.
CONTRAST = """
((selector) => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).map(Number).slice(0, 3).map((c) => {
      c /= 255;
      return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const element = document.querySelector(selector);
  let behind = element;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  const pair = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
})("%s")
"""
# Texts that reach beyond the window on either side, or are too small to read.
BAD_TEXTS = """
[...document.querySelectorAll("main *")].filter((element) => {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const box = element.getBoundingClientRect();
  if (!own || !box.width) return false;
  const size = parseFloat(getComputedStyle(element).fontSize);
  return box.left < -0.5 || box.right > innerWidth + 0.5 || size < 10;
}).map((element) => element.className + ": " + element.textContent)
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1200])
def test_it_reads_well(page: browser.Page, width: int, dark: bool) -> None:
    page.resize(width, 800, dark)
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert page.run("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    for button in ("forward", "backward"):
        page.run(f"document.querySelector('[data-value={button}]').click()")
        assert page.run(BAD_TEXTS) == []
    visible = "[...document.querySelectorAll('.view:not([hidden]) {}')].filter(e => e.getBoundingClientRect().width)"
    assert page.run(visible.format(".bars .track b.best") + ".length") == len(NAMES)
    assert page.run(visible.format(".roofline .point") + ".length") == len(NAMES)
    assert (
        page.run("document.querySelector('.view:not([hidden]) .roofline svg').getBoundingClientRect().height") > 300
    )
    for selector in ("h1", "header p", ".bar .name", ".tiles span", "td", "dt", "[aria-pressed=true]"):
        assert page.run(CONTRAST % selector) >= 4.5, selector
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark
    artifacts = os.environ.get("TCONV3D_ARTIFACTS")
    if artifacts:
        page.screenshot(Path(artifacts) / f"report-{width}-{'dark' if dark else 'light'}.png")


def test_buttons_choose_what_is_shown(page: browser.Page) -> None:
    shown = "[...document.querySelectorAll('.view:not([hidden]) h2')].map(e => e.textContent)"
    assert page.run(shown) == ["Forward, tf32, contiguous"]
    page.run("document.querySelector('[data-value=bfloat16]').click()")
    assert page.run(shown) == ["Forward, bfloat16, contiguous"]
    page.run("document.querySelector('[data-value=backward]').click()")
    assert page.run(shown) == ["Backward, bfloat16, contiguous"]
    pressed = "[...document.querySelectorAll('[aria-pressed=true]')].map(e => e.textContent)"
    assert page.run(pressed) == ["bfloat16", "backward"]
    assert page.complaints == []


def test_a_layer_under_the_pointer_is_marked_everywhere(page: browser.Page) -> None:
    at = "document.querySelector('.view:not([hidden]) .bar[data-row=\"2\"]').dispatchEvent"
    page.run(f"{at}(new PointerEvent('pointerover', {{bubbles: true}}))")
    marked = "[...document.querySelectorAll('.chosen')].map(e => e.tagName.toLowerCase() + e.dataset.row)"
    assert sorted(page.run(marked)) == ["div2", "g2", "tr2"]
    assert page.complaints == []


def test_without_scripts_everything_is_shown(page: browser.Page) -> None:
    page.reload_without_scripts()
    assert page.run("document.querySelectorAll('.view:not([hidden])').length") == 4


def test_the_browser_would_have_said_so(tmp_path: Path) -> None:
    """A test of the test: an error, a blocked request and a text that is too wide do show."""
    if browser.find() is None:
        pytest.skip("no Chromium here: the report was not opened in a browser")
    path = tmp_path / "bad.html"
    path.write_text(
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'\">"
        "<main><p style='width:3000px'>wide</p></main><img src='https://example.invalid/x.png'>"
        "<script>undefined_function()</script>"
    )
    with browser.opened(path, tmp_path / "profile") as page:
        assert any("undefined_function" in text for text in page.complaints)
        assert any("example.invalid" in text for text in page.complaints)
        assert page.run(BAD_TEXTS) == [": wide"]
