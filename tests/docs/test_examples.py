"""Each endpoint of the guides serves requests as it stands: a success, its retry, and a failure and the retry after it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from flask import Flask, Response, request
from flask_login import LoginManager, UserMixin  # type: ignore[import-untyped]
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import TestResponse

from docs.generate import HERE
from tests.docs.test_pages import BLOCK, ROOT, surroundings
from tests.docs.test_steps_guide import Base

GUIDES: Final = {path.name: path.read_text(encoding="utf-8") for path in sorted((HERE / "guides").glob("*.md"))}
UNSAFE: Final = re.compile(r'^\s*@\w+\.(?:post|put|patch|delete|route)\("([^"]+)"', re.MULTILINE)

ELSEWHERE: Final = {
    "external-effects.md": "tests/docs/test_external_effects.py",
    "forms.md": "tests/docs/test_forms.py",
    "migrating.md": "tests/docs/test_migrating.py",
    "sql.md": "tests/docs/test_sql_guides.py",
    "steps.md": "tests/docs/test_steps_guide.py",
    "testing.md": "tests/docs/test_pages.py",  # its blocks send their requests themselves
}
"""Guides with an application that another test calls."""


@dataclass(frozen=True)
class Example:
    """One endpoint of a guide, a request to it, and the statuses that the text around it promises."""

    page: str
    block: int
    """The number of its block on the page, from 0."""
    path: str
    status: int = 201
    after_failure: int = 409
    """The status of the next attempt, if the application failed when the view had responded."""
    required: bool = True
    replays: bool = True
    url: str = ""
    """The path of the request, if the route has variables."""
    sent: Mapping[str, Any] = field(default_factory=lambda: {"json": {"amount": 5}})
    keyed: bool = True
    """Whether the client sends a key in the header."""
    names: Mapping[str, Any] = field(default_factory=dict)
    """What the application has beside the example."""


def _charge(*arguments: Any, key: str = "") -> dict[str, Any]:
    return {"id": "ch_1"}


PROVIDER: Final = SimpleNamespace(charge=_charge, verify=lambda body, signature: signature == "good")
STRIPE: Final = {"json": {"id": "evt_1", "type": "charge.succeeded"}}

EXAMPLES: Final = (
    Example("browser.md", 0, "/orders", required=False, sent={"data": {"item": "book"}}),
    Example("changing-steps.md", 1, "/quotes", names={"provider": PROVIDER}, after_failure=201),
    Example("endpoints.md", 0, "/orders"),
    Example("endpoints.md", 1, "/transfers", required=False),
    Example("endpoints.md", 2, "/purchases"),
    Example("endpoints.md", 4, "/checkout"),  # its payment fails with it, and is plain
    Example("external-effects.md", 0, "/payments", after_failure=201),
    Example("flask-neighbours.md", 0, "/payments"),
    Example("flask-neighbours.md", 2, "/payments"),
    Example("identity.md", 1, "/orders", required=False),
    Example("observe.md", 2, "/payments", required=False, after_failure=201),
    *(Example("openapi.md", block, "/payments") for block in (0, 3, 4, 5)),
    Example("openapi.md", 2, "/", url="/payments/"),
    Example("outbox.md", 0, "/payments", after_failure=201),
    Example("outbox.md", 3, "/charges"),
    Example("policy-document.md", 0, "/payments/<payment_id>/refunds", url="/payments/7/refunds"),
    Example("policy-document.md", 1, "/accounts/<name>", url="/accounts/alice", required=False),
    Example("policy-document.md", 1, "/accounts/login", 200, 200, required=False, replays=False),
    Example("policy-document.md", 2, "/internal/settlements", 200, required=False),
    Example("status.md", 0, "/payments", required=False),
    Example("steps.md", 3, "/orders", names={"provider": PROVIDER}, after_failure=201),
    Example("stripe-clients.md", 2, "/v1/charges", 200, 500, required=False),
    Example("transactional.md", 0, "/payments", after_failure=201),
    Example("uploads-and-streams.md", 0, "/scans", required=False, sent={"data": {"scan": (__file__, "scan.png")}}),
    Example("uploads-and-streams.md", 1, "/reports"),
    Example("uploads-and-streams.md", 2, "/chats", 202),
    Example("uploads-and-streams.md", 2, "/chats/7/events", 200, 200, required=False, replays=False),
    Example("waiting.md", 0, "/payments"),
    Example("webhooks.md", 0, "/webhooks/stripe", 204, 204, sent=STRIPE, keyed=False),
    Example("webhooks.md", 1, "/webhooks/bank", 204, sent={"json": {"account": 7, "sequence": 1}}, keyed=False),
    Example(
        "webhooks.md",
        2,
        "/webhooks/provider",
        204,
        sent={**STRIPE, "headers": {"Signature": "good"}},
        keyed=False,
        names={"provider": PROVIDER},
    ),
    Example("webhooks.md", 3, "/webhooks/mail", 204, 204, sent={"json": [{"id": "a"}]}, keyed=False, replays=False),
)
IDS: Final = [f"{example.page}:{example.block}{example.path}" for example in EXAMPLES]


class User(UserMixin):  # type: ignore[misc]
    id = "alice"


def fail(response: Response) -> Response:
    if "X-Fail" in request.headers:
        raise RuntimeError("the application failed behind its view")
    return response


@contextmanager
def serving(example: Example, folder: Path, **names: Any) -> Iterator[Flask]:
    """Run the example, in an application whose keys are in its own database unless the example makes its own."""
    block = BLOCK.findall(GUIDES[example.page])[example.block]
    names = {**surroundings(), **example.names, **names}
    app, db = names["app"], SQLAlchemy(model_class=Base)
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{folder / 'guide.sqlite3'}",
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "SECRET_KEY": "kept-in-tests-only",
    }
    db.init_app(app)
    login = LoginManager(app)
    login.request_loader(lambda got: None if "X-Unknown" in got.headers else User())
    names["db"] = db
    app.after_request(fail)
    exec(compile(block, example.page, "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    if names["app"] is not app:
        app, db = names["app"], names["db"]
        app.after_request(fail)
    if names["blueprint"].deferred_functions:
        app.register_blueprint(names["blueprint"])
    if "idempotency" not in app.extensions:
        names["idempotency"].init_app(app)
    if example.path == "/checkout":
        app.post("/payments")(lambda: ({"paid": True}, 201))

    if "sqlalchemy" in app.extensions:
        with app.app_context():
            db.create_all()
    yield app
    if "idempotency_outbox" in app.extensions:
        app.extensions["idempotency_outbox"].table.close()
    if "sqlalchemy" in app.extensions:
        with app.app_context():
            db.session.remove()
            db.engine.dispose()


def send(app: Flask, example: Example, *, key: str = "k", **headers: str) -> TestResponse:
    sent = dict(example.sent)
    headers = {**sent.pop("headers", {}), **headers}
    if example.keyed and key:
        headers["Idempotency-Key"] = key
    url = example.url or example.path
    return app.test_client(use_cookies=False).post(url, headers=headers, buffered=True, **sent)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDEMPOTENCY_SECRET", "s-9f2c47d1e8b35a60")


def test_every_endpoint_of_every_guide_is_called() -> None:
    shown = {
        (page, number, path)
        for page, text in GUIDES.items()
        for number, block in enumerate(BLOCK.findall(text))
        for path in UNSAFE.findall(block)
    }
    called = {(example.page, example.block, example.path) for example in EXAMPLES}

    assert called <= shown
    assert set() == {each for each in shown - called if each[0] not in ELSEWHERE}
    assert [] == [name for name in ELSEWHERE.values() if not (ROOT / name).is_file()]


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_an_example_runs_once_and_replays(example: Example, tmp_path: Path) -> None:
    """Or is tried again as its effects say, if it failed."""
    with serving(example, tmp_path) as app:
        policies = app.extensions["idempotency"].policies
        answers = [send(app, example) for _ in range(2)]
        keyless = send(app, example, key="").status_code

        assert [] == policies.faults()
        assert [example.status] * 2 == [answer.status_code for answer in answers], answers[0].get_data(as_text=True)
        assert [answers[0].data] * 2 == [answer.data for answer in answers]
        replayed = {"Idempotency-Replayed", "Idempotent-Replayed"}
        assert [False, example.replays] == [bool(replayed & {*answer.headers.keys()}) for answer in answers]
        assert not example.keyed or (400 if example.required else example.status) == keyless
        if example.keyed:
            fail_and_try_again(app, example)
    # Without a key in the header, the same request would be a replay there.
    if not example.keyed:
        (tmp_path / "again").mkdir()
        with serving(example, tmp_path / "again") as app:
            fail_and_try_again(app, example)


def fail_and_try_again(app: Flask, example: Example) -> None:
    statuses = [send(app, example, key="f", **headers).status_code for headers in ({"X-Fail": "1"}, {})]

    assert [500, example.after_failure] == statuses
