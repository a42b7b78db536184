"""The pictures of the console stand in the documentation, with words for who does not see them."""

from __future__ import annotations

import re

import pytest

from tests.browser.pictures import DRAWN, PAGES, SCHEMES, SIGNATURE, chunks, faults
from tests.docs.test_pages import ROOT

NAMES = {f"{page}-{scheme}" for page in PAGES for scheme in SCHEMES}
SHOWN = re.compile(r"!\[([^\]]*)\]\([./\w]*_static/console/([\w-]+)\.png\)")
PICTURES = sorted(DRAWN.glob("*.png"))


def test_each_page_is_there_in_light_and_dark() -> None:
    assert {path.stem for path in PICTURES} == NAMES
    assert [path.name for path in DRAWN.iterdir() if path not in PICTURES] == []


def test_a_picture_is_small_and_as_wide_as_the_window() -> None:
    assert {picture: found for picture in PICTURES if (found := faults(picture.read_bytes()))} == {}


def test_every_picture_is_on_the_page_of_the_console_with_words_for_it() -> None:
    page = (ROOT / "docs" / "operate" / "console.md").read_text(encoding="utf-8")
    shown = {name: alt for alt, name in SHOWN.findall(page)}

    assert shown.keys() == NAMES
    assert all(alt.startswith("Console, ") and alt.endswith(".") for alt in shown.values())
    assert len(set(shown.values())) == len(NAMES)


def test_the_readme_shows_one() -> None:
    shown = SHOWN.findall((ROOT / "README.md").read_text(encoding="utf-8"))

    assert [name in NAMES and len(alt) > 40 for alt, name in shown] == [True]


def test_another_file_is_no_picture() -> None:
    for fault in (b"", b"GIF89a", SIGNATURE + b"\x00\x00\x00\x01IHDRx\x00\x00\x00\x00"):
        with pytest.raises(ValueError, match=r"no PNG file|damaged"):
            list(chunks(fault))
