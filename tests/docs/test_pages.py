"""The documentation is what the code says, and what it shows runs."""

from __future__ import annotations

import ast
import re
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from flask import Blueprint, Flask, g, request

import flask_idempotency
from docs.generate import HERE, PAGES, PART, PARTS, with_parts
from flask_idempotency import Idempotency, current_claim, idempotent
from flask_idempotency.stores.memory import MemoryStore
from tests.tooling.reader import named_file

ROOT = HERE.parent
MARKDOWN = sorted([*HERE.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("[a-z]*/README.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")

WALKS = (HERE / "start" / "first-endpoint.md", HERE / "start" / "existing-application.md")
REDIS_WALK = HERE / "start" / "local-redis.md"
"""tests/docs/test_first_ten_minutes.py follows them: a block that names a file is that file."""

BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}:{number}")
    for path in MARKDOWN
    if path != ROOT / "README.md"  # tests/tooling/test_readme.py: each of its blocks is a file of its own
    for number, block in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")))
    if not (path in (*WALKS, REDIS_WALK) and named_file(block))
    if "import schemathesis" not in block  # tests/example_app/test_openapi_tools.py: it has an environment of its own
]


NAMED = re.compile(r"`([\w/.-]+\.(?:py|md))`")


def test_every_test_that_the_security_page_names_is_there() -> None:
    """A threat without its test is a wish."""
    named = NAMED.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8"))

    assert len(named) > 10
    assert [] == [name for name in named if not (ROOT / name).is_file()]


def test_generated_pages_are_current() -> None:
    """`python -m docs.generate` would change nothing."""
    stale = {
        page: text for page, render in PAGES.items() if (text := render()) != (HERE / page).read_text(encoding="utf-8")
    }

    assert stale == {}


def test_generated_parts_are_current() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in MARKDOWN}
    stale = [path for path, text in pages.items() if PART.search(text) and with_parts(text) != text]

    # Python 3.12 runs a comprehension without a call, so its walk is shorter than the page's.
    assert sys.version_info >= (3, 12) or stale == []


def test_a_generated_part_replaces_the_lines_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docs.generate.PARTS", {**PARTS, "walk": lambda: "new\n"})
    page = "before\n<!-- generated: walk -->\nold\nolder\n<!-- end of walk -->\nafter\n"

    assert with_parts(page) == page.replace("old\nolder\n", "new\n")


GUIDES = sorted(path for path in (HERE / "guides").glob("*.md") if path.name != "index.md")
FIRST_EXAMPLE_LINE = 13
"""The shortest working example of a guide begins here at the latest, behind a sentence or two."""


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_opens_with_what_it_is_for_and_an_example(guide: Path) -> None:
    title, empty, purpose, *rest = guide.read_text(encoding="utf-8").splitlines()

    assert (title[:2], empty) == ("# ", "")
    assert re.match(r"[A-Za-z`].*[.:]$", purpose)
    assert "```" in "".join(line[:3] for line in rest[: FIRST_EXAMPLE_LINE - 3])


def test_the_three_minutes_lead_to_every_page() -> None:
    """Without the lists of contents, which only the site shows."""
    found, waiting = set[Path](), [WALKS[0]]
    while waiting:
        page = waiting.pop()
        if page in found or page.suffix != ".md":
            continue
        found.add(page)
        waiting += [(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))]

    # A contributor finds the other pages of that folder in its list.
    others = {path for path in HERE.rglob("*.md") if path.parent.name != "contributing"}
    assert [] == sorted(others - found)


def test_links_between_pages_lead_somewhere() -> None:
    """Also from pages that are not of the site, such as README."""
    links = [(path, target) for path in MARKDOWN for target in LINK.findall(path.read_text(encoding="utf-8"))]

    assert len(links) > 500
    assert [f"{path}: {target}" for path, target in links if not (path.parent / target).exists()] == []


def surroundings() -> dict[str, Any]:
    """What a snippet may take for granted: an application, and names that its text does not define."""
    app = Flask("documentation")
    app.config["IDEMPOTENCY_SECRET"] = "s-9f2c47d1e8b35a60"
    return {
        **{name: getattr(flask_idempotency, name) for name in flask_idempotency.__all__},
        "__name__": "documented",  # no package's: an instance folder goes where the test is
        "app": app,
        "blueprint": Blueprint("documented", "documentation"),
        "celery_app": Celery("documentation", set_as_current=False),
        "book": lambda event: None,
        "CardDeclined": type("CardDeclined", (Exception,), {}),
        "charge": lambda payment, key: {"charged": payment, "key": key},
        "current_claim": current_claim,
        "Flask": Flask,
        "g": g,
        "idempotency": Idempotency(),
        "idempotent": idempotent,
        "provider": None,
        "request": request,
        "timedelta": timedelta,
        "validate": lambda payload: payload,
    }


def run_block(page: str, containing: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the block of a page with this text, among these names or the usual ones. Return the names after it."""
    (block,) = (block for block in BLOCK.findall(page) if containing in block)
    names = surroundings() if names is None else names
    exec(compile(block, "documentation", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    return names


@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As written; only a Redis is replaced by memory, for the snippet is not about it."""
    monkeypatch.chdir(tmp_path)  # where a relative database is made
    monkeypatch.setattr("flask_idempotency.assembly._redis_store", lambda *arguments: MemoryStore())
    monkeypatch.setenv("IDEMPOTENCY_SECRET", "s-9f2c47d1e8b35a60")
    monkeypatch.setenv("SECRET_KEY", "kept-in-tests-only")
    monkeypatch.setenv("RING_PASSPHRASE", "made of sixteen characters or more")
    monkeypatch.setenv("SHOP_API_KEY", "tok_alice")
    installed = ModuleType("flask_idempotency.janitor")
    installed.__path__ = [str(ROOT / "janitor")]  # where it is in a checkout
    monkeypatch.setitem(sys.modules, installed.__name__, installed)

    code = compile(ast.parse(block), "documentation", "exec", dont_inherit=True)
    exec(code, surroundings())  # noqa: S102 - our own pages


def test_the_quickstart_runs_a_payment_once() -> None:
    """The first snippet of the README does what the sentence below it says."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    client = run_block(page, BLOCK.findall(page)[0], {"__name__": "quickstart"})["app"].test_client()

    answers = [client.post("/payments", headers={"Idempotency-Key": "k"}) for _ in range(2)]

    assert [201, 201] == [answer.status_code for answer in answers]
    assert [None, "true"] == [answer.headers.get("Idempotency-Replayed") for answer in answers]


@pytest.mark.parametrize("ours", (True, False))
def test_what_the_transactional_page_says_is_enough_to_pay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: bool
) -> None:
    """Its application and the ways to its tables: the application's own makes all, and after ours the rest."""
    page = (HERE / "guides" / "transactional.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDEMPOTENCY_SECRET", "s-9f2c47d1e8b35a60")
    names = run_block(page, BLOCK.findall(page)[0])
    app, db = names["app"], names["db"]

    assert "`flask idempotency db upgrade`" in page
    if ours:
        assert 0 == app.test_cli_runner().invoke(args=["idempotency", "db", "upgrade"]).exit_code
    assert "`db.create_all()`" in page
    with app.app_context():
        db.create_all()
    client = app.test_client()
    answers = [client.post("/payments", json={"amount": 5}, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    with app.app_context():
        db.engine.dispose()

    assert [201, 201] == [answer.status_code for answer in answers]
    assert answers[0].json == answers[1].json
