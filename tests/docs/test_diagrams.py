"""The diagrams of docs/diagrams are drawn as their sources say, and the states are those of the code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.diagrams import DRAWN, SOURCES, NotDrawn, draw, moves
from docs.generate import HERE
from flask_idempotency.engine.model import TRANSITIONS, State

DIAGRAMS = sorted(SOURCES.glob("*.txt"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("source", DIAGRAMS, ids=lambda source: source.stem)
def test_diagrams_are_current(source: Path) -> None:
    """`python -m docs.generate` would change nothing."""
    assert draw(source) == (DRAWN / f"{source.stem}.svg").read_text(encoding="utf-8")


def test_each_drawing_has_a_source_and_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in HERE.rglob("*.md"))
    drawn = {path.stem for path in DRAWN.glob("*.svg")}

    assert drawn == {source.stem for source in DIAGRAMS}
    assert drawn == set(re.findall(r"_static/diagrams/([\w-]+)\.svg\)", pages))


def test_the_states_are_those_of_the_code() -> None:
    name: Mapping[State | None, str] = {None: "absent", **{state: state.name for state in State}}
    drawn = list(moves(SOURCES / "states.txt"))

    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {(name[before], verb, name[after]) for (before, verb), (after, _) in TRANSITIONS.items()}


@pytest.mark.parametrize("source", DIAGRAMS, ids=lambda source: source.stem)
def test_a_diagram_is_read_aloud(source: Path) -> None:
    root = ElementTree.fromstring((DRAWN / f"{source.stem}.svg").read_text(encoding="utf-8"))  # noqa: S314 - our own
    named = {each.get("id"): each.text for each in root if each.get("id")}

    assert root.get("role") == "img"
    assert named[root.get("aria-labelledby")]
    words = named[root.get("aria-describedby")] or ""
    assert [text for text in labels(source) if text not in words] == []


def labels(source: Path) -> list[str]:
    body = source.read_text(encoding="utf-8").partition("\n\n")[2].splitlines()
    return [line.partition(": ")[2] for line in body if ": " in line and not line.startswith("begin ")]


@pytest.mark.parametrize("source", DIAGRAMS, ids=lambda source: source.stem)
def test_a_diagram_fits_its_frame(source: Path) -> None:
    """Of characters as wide as those of a wide font: no text leaves the drawing, and none is too small for a phone."""
    root = ElementTree.fromstring((DRAWN / f"{source.stem}.svg").read_text(encoding="utf-8"))  # noqa: S314 - our own
    width, height = float(root.get("width", 0)), float(root.get("height", 0))

    assert width <= 736  # of the site's text
    assert min(int(size) for size in re.findall(r"font:(\d+)px", root.findtext(f"{SVG}style") or "")) >= 12
    for text in root.iter(f"{SVG}text"):
        x, wide = float(text.get("x", 0)), 8 * len(text.text or "")
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[text.get("text-anchor", "start")]
        assert 0 <= left <= width - wide, text.text
        assert 0 < float(text.get("y", 0)) < height, text.text


@pytest.mark.parametrize(
    "line", ("A => B: text", "A [loud]: text", "end A", "begin A: work"), ids=("arrow", "box", "end", "no end")
)
def test_an_unknown_line_is_refused(line: str, tmp_path: Path) -> None:
    source = tmp_path / "wrong.txt"
    source.write_text(f"title: T\nlanes: A | B\n{line}\n", encoding="utf-8")

    with pytest.raises(NotDrawn):
        draw(source)
