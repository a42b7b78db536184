"""The address in a problem's `type` leads to a page of the site."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest

from docs.generate import HERE, OPERATORS, PAGES
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.web.problems import PROBLEMS

INDEX = (HERE / "problems" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", PROBLEMS)
def test_the_default_type_of_a_problem_has_a_page(code: str) -> None:
    """The site has a folder for each page, so `problems/in-flight.md` is served at `/problems/in-flight/`."""
    path = urlsplit(DOCS_URL + code).path.strip("/")

    assert (HERE / f"{path}.md").is_file()
    assert f"{path}.md" in PAGES
    assert '"dirhtml"' in (HERE / "__main__.py").read_text(encoding="utf-8")


def test_the_list_of_problems_has_each_of_them() -> None:
    assert [*PROBLEMS] == re.findall(r"^\| \[`([a-z-]+)`\]\(\1\.md\)", INDEX, re.MULTILINE)
    assert set(PROBLEMS) == set(OPERATORS)


@pytest.mark.parametrize("code", PROBLEMS)
def test_a_problem_that_a_machine_may_repeat_is_shown_as_such(code: str) -> None:
    assert PROBLEMS[code].retry == PROBLEMS[code].again.startswith("yes")
