"""The applications of docs/operate/console.md let in whom they say, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask, g, request

from docs.generate import HERE
from flask_idempotency import Idempotency
from tests.console.rig import SECRET
from tests.docs.test_pages import BLOCK

BLOCKS = BLOCK.findall((HERE / "operate" / "console.md").read_text(encoding="utf-8"))


def application(containing: str) -> tuple[Flask, dict[str, Any]]:
    """Run the block of the page with this text, in an application of its own."""
    (block,) = [block for block in BLOCKS if containing in block]
    app = Flask("documentation")
    app.config.update(TESTING=True, SECRET_KEY="of-flask")
    idempotency = Idempotency(app, store="memory://", secret=SECRET, principal=lambda: None)
    names: dict[str, Any] = {"__name__": "documented", "app": app, "idempotency": idempotency, "g": g}
    exec(compile(block, "documentation", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    return app, names


def test_the_console_is_closed_until_the_application_names_an_operator() -> None:
    app, _ = application('g.get("operator")')
    app.before_request(lambda: setattr(g, "operator", request.headers.get("X-Operator")))
    client = app.test_client()

    assert [403, 200] == [
        client.get("/idempotency/", headers=headers).status_code for headers in ({}, {"X-Operator": "ann"})
    ]


@pytest.mark.parametrize(
    ("role", "statuses"), (("operator", (200, 403)), ("lead", (200, 200)), ("customer", (403, 403)))
)
def test_a_role_of_flask_login_opens_what_it_may(role: str, statuses: tuple[int, int]) -> None:
    app, names = application("LoginManager(app)")
    user = names["User"]
    names["login_manager"].user_loader(lambda id: user(id, role))
    client = app.test_client()
    assert 401 == client.get("/idempotency/").status_code
    with client.session_transaction() as session:
        session["_user_id"] = "ann"

    assert statuses == tuple(client.get(path).status_code for path in ("/idempotency/", "/idempotency/tenants/purge"))


def test_http_basic_asks_for_a_password() -> None:
    app, _ = application("HTTPBasicAuth()")
    client = app.test_client()

    closed = client.get("/idempotency/")
    wrong = client.get("/idempotency/", auth=("ann", "guessed"))
    right = client.get("/idempotency/", auth=("ann", "keep these in your secrets"))

    assert (401, 401, 200) == (closed.status_code, wrong.status_code, right.status_code)
    assert closed.headers["WWW-Authenticate"].startswith("Basic")
    assert "no-store" == closed.headers["Cache-Control"]


def test_an_operator_of_a_tenant_gets_its_records_only() -> None:
    app, _ = application("Operator(user.name")

    class User:
        name, company = "bob", "acme"

    app.before_request(lambda: setattr(g, "user", User() if "X-User" in request.headers else None))
    client, bob = app.test_client(), {"X-User": "bob"}

    assert 403 == client.get("/idempotency/records").status_code
    assert [200, 403, 403] == [
        client.get(f"/idempotency{path}", headers=bob).status_code for path in ("/records", "/", "/tenants/purge")
    ]
