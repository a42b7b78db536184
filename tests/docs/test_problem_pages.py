"""The address in a problem's `type` leads to a page of the site."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from docs.generate import HERE, OPERATORS, PAGES
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.web.problem_types import PROBLEMS

INDEX = (HERE / "problems" / "index.md").read_text(encoding="utf-8")


def test_the_default_type_of_each_problem_has_a_page() -> None:
    """The site has a folder for each page, so `problems/in-flight.md` is served at `/problems/in-flight/`."""
    pages = {urlsplit(DOCS_URL + code).path.strip("/") + ".md" for code in PROBLEMS}

    assert pages - {*PAGES} == set()
    assert [page for page in pages if not (HERE / page).is_file()] == []
    assert '"dirhtml"' in (HERE / "__main__.py").read_text(encoding="utf-8")


def test_the_list_of_problems_has_each_of_them() -> None:
    assert [*PROBLEMS] == re.findall(r"^\| \[`([a-z-]+)`\]\(\1\.md\)", INDEX, re.MULTILINE)
    assert set(PROBLEMS) == set(OPERATORS)
