"""The tests of pages see what is wrong with a page: axe-core is the published one, and its findings can be read."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.browser.accessibility import SCRIPT, cut, violations
from tests.browser.chromium import Browser

CLEAN = """<!doctype html><html lang="en"><head><title>Clean</title><meta name="viewport" content="width=device-width">
<style>{style}</style></head><body><main><h1>A page</h1>{body}</main></body></html>"""


def opened(browser: Browser, body: str, style: str = "") -> Browser:
    browser.driver.get("data:text/html;charset=utf-8," + quote(CLEAN.format(body=body, style=style)))
    return browser


def test_axe_is_the_file_that_its_note_names() -> None:
    note = (SCRIPT.parent / "README.md").read_text(encoding="utf-8")
    version = re.search(r"axe-core\) (\S+),", note)
    assert version

    assert hashlib.sha256(SCRIPT.read_bytes()).hexdigest() in note
    assert f"axe v{version[1]}\n" in SCRIPT.read_text(encoding="utf-8")
    assert f"axe-core@{version[1]}`" in note
    assert {"LICENSE", "LICENSE-3RD-PARTY.txt"} <= {file.name for file in Path(SCRIPT.parent).iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ('<img src="data:,">', "image-alt"),
        ('<p style="color:#aaa;background:#fff">Pale.</p>', "color-contrast"),
        ("<form><input name=reason></form>", "label"),
        ("<table><tr><th scope=column>State</th></tr></table>", "scope-attr-valid"),
        (
            '<div style="overflow:auto;height:20px"><p style="height:90px">Long.</p></div>',
            "scrollable-region-focusable",
        ),
    ],
)
def test_a_page_that_breaks_a_rule_is_found_with_its_element(browser: Browser, body: str, rule: str) -> None:
    (found,) = violations(opened(browser, body))

    first, element, *why = found.splitlines()
    assert first.startswith(f"{rule} (")
    assert "https://dequeuniversity.com/" in first
    assert "<" in element
    assert why


@pytest.mark.slow
def test_a_clean_page_breaks_none(browser: Browser) -> None:
    assert violations(opened(browser, "<p>Words.</p>")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "style", "faults"),
    [
        ("<p>short</p>", "", 0),
        ("<p>wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww</p>", "", 1),
        ("<p>wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww</p>", "p {overflow: hidden}", 1),
        ("<p>wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww</p>", "p {overflow-wrap: anywhere}", 0),
        ("<p>wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww</p>", "main {overflow-x: auto}", 0),
        ("<p>one<br>two<br>three</p>", "p {overflow: hidden; height: 1em}", 1),
        ("<p>moved</p>", "p {position: relative; left: -40px}", 1),
        ("<input value=wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww>", "input {width: 90px}", 0),
        ("<svg width=90 height=20><text x=-8 y=15>750</text></svg>", "", 1),
        ("<svg width=90 height=20><text x=8 y=15>750</text></svg>", "", 0),
        ("<p><button>moved</button></p>", "button {position: relative; left: 300px}", 2),
    ],
)
def test_text_that_is_cut_is_found(browser: Browser, body: str, style: str, faults: int) -> None:
    browser.resize(320, 256)

    found = cut(opened(browser, body, style))

    assert len(found) == faults, found
