"""llms.txt lists every page of the site once, in the form that https://llmstxt.org asks for."""

from __future__ import annotations

import re

import pytest

from docs import llms
from docs.generate import HERE

LINE = re.compile(r"- \[[^\]\n]+\]\((https://[^)\s]+/)\)(?:: [^\n]+)?")


def test_every_page_of_the_site_is_listed_once() -> None:
    """Pages that no table of contents has are not of the site: Sphinx fails on them."""
    pages = {path.relative_to(HERE).with_suffix("").as_posix() for path in HERE.rglob("*.md")} - {"index"}
    listed = LINE.findall(llms.page())

    assert len(listed) > 80
    assert sorted(listed) == sorted(f"{llms.SITE}{name.removesuffix('index').rstrip('/')}/" for name in pages)


def test_it_has_the_form_that_a_reader_expects() -> None:
    """A heading, a quoted summary, text, then sections that are lists of links and nothing else; Optional is the last."""
    head, *sections = llms.page().split("\n## ")
    title, quoted, text = head.strip().split("\n\n")

    assert title == "# flask_idempotency"
    assert re.fullmatch(r"> \w[^\n]+\.", quoted)
    assert re.fullmatch(r"\w[^\n]+\.", text)
    assert [section.partition("\n")[0] for section in sections][-1] == "Optional"
    for section in sections:
        assert [line for line in section.splitlines()[2:] if line and not LINE.fullmatch(line)] == [], section


@pytest.mark.parametrize(
    ("name", "sentence"),
    (
        ("start/first-endpoint", r"Three minutes, from an empty folder: a payment .*\."),
        ("problems/in-flight", r"Code in-flight, status 409\."),
        ("changelog", r"All notable changes .*\."),  # it includes another file
        ("guides/openapi", r"describe adds .*"),  # it begins with code
        ("how-it-works/overview", ""),  # its text begins in its sections
        ("faq", ""),
    ),
)
def test_a_page_is_described_by_its_first_sentence(name: str, sentence: str) -> None:
    assert re.fullmatch(sentence, llms.about(name)), llms.about(name)
