"""One command writes the figures and the charts of docs/reference/speed.md."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import charts, page
from benchmarks.report import CPU_TO_BY_HAND
from docs.diagrams import STYLE

SVG = "{http://www.w3.org/2000/svg}"
RATIOS = {
    "first": {"ours": 1.2, "Powertools": 1.24},
    "replay": {"ours": 1.35, "Powertools": 2.34},
    "mismatch": {"ours": 1.31},
}
LEVELS = [(0, 210.0, 380.0), (1_000, 212.0, 391.0), (1_000_000, 215.0, 402.0)]
DRAWN = {
    "ratios": charts.ratios(RATIOS, CPU_TO_BY_HAND),
    "growth": charts.growth(LEVELS),
    "committed ratios": (charts.CHARTS / "ratios.svg").read_text(encoding="utf-8"),
    "committed growth": (charts.CHARTS / "growth.svg").read_text(encoding="utf-8"),
}


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
def test_a_chart_fits_its_frame_and_both_themes(drawn: str) -> None:
    """Its colours are the variables that the site switches; in an <img> they follow the system."""
    root = ElementTree.fromstring(drawn)  # noqa: S314 - our own
    width, height = float(root.get("width", 0)), float(root.get("height", 0))

    assert root.findtext(f"{SVG}style") == STYLE
    assert "prefers-color-scheme:dark" in STYLE
    assert not re.search(r'(?:fill|stroke|style)="', drawn)
    assert width <= 736  # of the site's text
    texts = list(root.iter(f"{SVG}text"))
    assert len(texts) > 5
    for text in texts:
        x, wide = float(text.get("x", 0)), 8 * len(text.text or "")
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[text.get("text-anchor", "start")]
        assert 0 <= left <= width - wide, text.text
        assert 0 < float(text.get("y", 0)) < height, text.text


def test_a_chart_is_read_aloud() -> None:
    """Its description has each number that it shows."""
    for name, values in (("ratios", ("1.20", "2.34", "1.31")), ("growth", ("1,000,000", "402", "212"))):
        root = ElementTree.fromstring(DRAWN[name])  # noqa: S314 - our own
        assert root.get("role") == "img"
        words = root.findtext(f"{SVG}desc") or ""
        assert [value for value in values if value not in words] == []


def test_the_page_has_a_place_for_every_block() -> None:
    """A block without its place would be measured and lost."""
    names = [name for name, _ in page.BLOCK.findall(page.PAGE.read_text(encoding="utf-8"))]
    source = Path(page.__file__).read_text(encoding="utf-8")

    assert len(names) == len(set(names)) > 5
    assert re.findall(r'^        "(\w+)": ', source, re.MULTILINE) == sorted(
        names, key=lambda name: source.index(f'"{name}": ')
    )


def test_a_block_replaces_the_lines_between_its_marks() -> None:
    text = "before\n<!-- measured: sql -->\nold\n<!-- end of sql -->\nafter\n"

    assert page.with_blocks(text, {"sql": "| new |\n"}) == text.replace("old\n", "\n| new |\n\n")
    with pytest.raises(ValueError, match="sql"):
        page.with_blocks(text, {"redis": "lost"})
