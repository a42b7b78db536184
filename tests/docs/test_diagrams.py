"""The diagrams of docs/diagrams are drawn as their sources say, and the states are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.diagrams import DRAWN, SOURCES, NotDrawn, draw, moves
from docs.generate import HERE
from flask_idempotency.engine.model import TRANSITIONS, State

DIAGRAMS = sorted(SOURCES.glob("*.txt"))
SVG = "{http://www.w3.org/2000/svg}"


def test_diagrams_are_current() -> None:
    """`python -m docs.generate` would change nothing."""
    drawn = {source: (DRAWN / f"{source.stem}.svg").read_text(encoding="utf-8") for source in DIAGRAMS}
    assert {source: draw(source) for source in DIAGRAMS} == drawn


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


def drawings() -> Iterator[tuple[Path, ElementTree.Element]]:
    for source in DIAGRAMS:
        yield source, ElementTree.fromstring((DRAWN / f"{source.stem}.svg").read_text(encoding="utf-8"))  # noqa: S314 - our own


def test_a_diagram_is_read_aloud() -> None:
    for source, root in drawings():
        named = {each.get("id"): each.text for each in root if each.get("id")}
        assert root.get("role") == "img", source
        assert named[root.get("aria-labelledby")], source
        words = named[root.get("aria-describedby")] or ""
        assert [text for text in labels(source) if text not in words] == [], source


def labels(source: Path) -> list[str]:
    body = source.read_text(encoding="utf-8").partition("\n\n")[2].splitlines()
    return [line.partition(": ")[2] for line in body if ": " in line and not line.startswith("begin ")]


def test_a_diagram_fits_its_frame() -> None:
    """Of characters as wide as those of a wide font: no text leaves the drawing, and none is too small for a phone."""
    for source, root in drawings():
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        assert width <= 736, source  # of the site's text
        assert min(int(size) for size in re.findall(r"font:(\d+)px", root.findtext(f"{SVG}style") or "")) >= 12, source
        for text in root.iter(f"{SVG}text"):
            x, wide = float(text.get("x", 0)), 8 * len(text.text or "")
            left = {"start": x, "middle": x - wide / 2, "end": x - wide}[text.get("text-anchor", "start")]
            assert 0 <= left <= width - wide, (source, text.text)
            assert 0 < float(text.get("y", 0)) < height, (source, text.text)


def test_an_unknown_line_is_refused(tmp_path: Path) -> None:
    """An arrow, a box, an end, and a beginning without one."""
    source = tmp_path / "wrong.txt"
    for line in ("A => B: text", "A [loud]: text", "end A", "begin A: work"):
        source.write_text(f"title: T\nlanes: A | B\n{line}\n", encoding="utf-8")
        with pytest.raises(NotDrawn):
            draw(source)
