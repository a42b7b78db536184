"""The page about HTML forms does what it says, with the real Flask-WTF and Flask-Login."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
from flask import Flask, get_template_attribute, render_template_string
from flask.testing import FlaskClient
from flask_wtf import CSRFProtect  # type: ignore[import-untyped]
from jinja2 import DictLoader
from werkzeug.test import TestResponse

from docs.generate import HERE
from flask_idempotency import idempotent
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.waiting import Waiters
from tests.docs.test_pages import BLOCK

PAGE = (HERE / "guides" / "forms.md").read_text(encoding="utf-8")
FORM, VISITORS, PROBLEMS = BLOCK.findall(PAGE)
MACRO = re.findall(r"^```jinja\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
INPUT = re.compile(r'<input[^>]*name="([^"]+)"[^>]*value="([^"]*)"')
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}

Names = dict[str, Any]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """What the page's application has defined."""
    monkeypatch.setenv("SECRET_KEY", "kept-in-tests-only")
    monkeypatch.setenv("IDEMPOTENCY_SECRET", "s-9f2c47d1e8b35a60")
    return run(FORM, {"__name__": "forms"})


def run(block: str, names: Names) -> Names:
    exec(compile(block, "forms.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    return names


def shown(page: TestResponse) -> dict[str, str]:
    """The hidden fields of a page."""
    return {name: value for name, value in INPUT.findall(page.text) if name in ("csrf_token", "idempotency_key")}


def signed_in(app: Flask, name: str = "alice") -> FlaskClient:
    client = app.test_client()
    fields = shown(client.get("/login"))
    assert 302 == client.post("/login", data={**fields, "name": name}).status_code
    return client


def send(client: FlaskClient, fields: dict[str, str], text: str) -> TestResponse:
    return client.post("/posts", data={**fields, "text": text}, headers=BROWSER)


def replayed(answer: TestResponse) -> bool:
    return "Idempotency-Replayed" in answer.headers


def test_a_form_that_is_sent_twice_makes_one_post(names: Names) -> None:
    """And the same form of another user is that user's."""
    alice, bob = signed_in(names["app"]), signed_in(names["app"], "bob")
    fields = shown(alice.get("/posts"))
    answers = [send(alice, fields, "hello") for _ in range(2)]
    other = send(bob, {**shown(bob.get("/posts")), "idempotency_key": fields["idempotency_key"]}, "hello")

    assert [(302, "/posts", False), (302, "/posts", True)] == [
        (answer.status_code, answer.headers["Location"], replayed(answer)) for answer in answers
    ]
    assert (302, False) == (other.status_code, replayed(other))
    assert [("alice", "hello"), ("bob", "hello")] == names["posts"]
    assert "Your post is published." in alice.get("/posts").text


def test_the_second_of_two_clicks_waits_for_the_first(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    app, begun, waiting, go = names["app"], Event(), Event(), Event()
    slot = Waiters.slot

    @contextmanager
    def seated(waiters: Waiters, *keys: StorageKey) -> Iterator[Event | None]:
        with slot(waiters, *keys) as ended:
            waiting.set()
            yield ended

    monkeypatch.setattr(Waiters, "slot", seated)

    class Posts(list[Any]):
        def append(self, post: Any) -> None:
            begun.set()
            assert go.wait(60)
            super().append(post)

    posts = names["posts"] = Posts()
    client, twin = signed_in(app), signed_in(app)
    fields = shown(client.get("/posts"))
    twins = {**shown(twin.get("/posts")), "idempotency_key": fields["idempotency_key"]}
    with ThreadPoolExecutor(2) as clicks:
        first = clicks.submit(send, client, fields, "hello")
        assert begun.wait(60)
        second = clicks.submit(send, twin, twins, "hello")
        waited = waiting.wait(60)
        go.set()
        answers = [first.result(), second.result()]

    assert waited
    assert [302, 302] == [answer.status_code for answer in answers]
    assert [("alice", "hello")] == posts


def test_an_invalid_form_can_be_corrected_with_its_key(names: Names) -> None:
    """After Back, or in the page that is shown. Afterwards the key belongs to what it sent."""
    client = signed_in(names["app"])
    fields = shown(client.get("/posts"))
    invalid = send(client, fields, "")
    forged = send(client, {**fields, "csrf_token": "forged"}, "hello")

    assert (422, True) == (invalid.status_code, "This field is required." in invalid.text)
    assert 422 == forged.status_code
    assert fields["idempotency_key"] != shown(invalid)["idempotency_key"]
    assert [302, 302] == [send(client, fields, "corrected").status_code for _ in range(2)]
    assert 302 == send(client, shown(invalid), "in the page that was shown").status_code
    assert 2 == len(names["posts"])

    changed = send(client, fields, "changed after Back")
    # The client of this test asks for HTML, as a browser does.
    assert (422, "text/html") == (changed.status_code, changed.mimetype)
    assert "<code>key-reused</code>" in changed.text


def test_a_client_whose_session_has_ended_gets_the_login_page(names: Names) -> None:
    """Before its first request, and before a retry. The form still works after the next sign-in."""
    app = names["app"]
    client = signed_in(app)
    fields = shown(client.get("/posts"))
    ended = app.test_client()
    ended.get("/login")  # it has a cookie, with a CSRF token

    first = send(ended, fields, "hello")
    assert (302, True) == (first.status_code, first.headers["Location"].startswith("/login"))
    again = send(client, fields, "hello")
    assert (302, "/posts", False) == (again.status_code, again.headers["Location"], replayed(again))
    retried = send(ended, fields, "hello")
    assert (302, True) == (retried.status_code, retried.headers["Location"].startswith("/login"))
    later = signed_in(app)
    assert replayed(send(later, {**shown(later.get("/posts")), "idempotency_key": fields["idempotency_key"]}, "hello"))
    assert [("alice", "hello")] == names["posts"]


def public(names: Names) -> Any:
    """A view that anybody may use, with a session cookie of Flask-WTF."""
    told: list[str] = []

    def ask() -> Any:
        form = names["PostForm"]()
        if form.validate_on_submit():
            told.append(form.text.data)
            return "asked"
        return render_template_string(names["PAGE"], form=form), 422 if form.is_submitted() else 200

    guarded = idempotent(form_field="idempotency_key", release_statuses={422})(ask)
    names["app"].add_url_rule("/public", view_func=guarded, methods=["GET", "POST"])
    return told


def ask_twice(app: Flask, client: FlaskClient, fields: dict[str, str]) -> list[tuple[int, bool]]:
    answers = [client.post("/public", data={**fields, "text": "why"}) for _ in range(2)]
    return [(answer.status_code, replayed(answer)) for answer in answers]


def test_a_public_form_needs_an_id_of_its_visitors(names: Names) -> None:
    """As the page says: refused without; with the loader, each visitor has a key space, and users keep their names."""
    app = names["app"]
    told = public(names)
    client = app.test_client()
    assert [(403, False)] * 2 == ask_twice(app, client, shown(client.get("/public")))

    app = run(FORM, names)["app"]
    run(VISITORS, names)
    told = public(names)
    one, two = app.test_client(), app.test_client()
    fields = shown(one.get("/public"))
    theirs = {**shown(two.get("/public")), "idempotency_key": fields["idempotency_key"]}

    assert [(200, False), (200, True)] == ask_twice(app, one, fields)
    assert [(200, False), (200, True)] == ask_twice(app, two, theirs)
    assert ["why", "why"] == told
    user = signed_in(app)
    assert 302 == send(user, shown(user.get("/posts")), "hello").status_code
    assert [("alice", "hello")] == names["posts"]


def test_anonymous_visitors_share_one_key_space(names: Names) -> None:
    """The risk that the page names: who sends another's key and form gets the other's response."""
    names["app"].config["IDEMPOTENCY_ALLOW_ANONYMOUS"] = True
    app = Flask("anonymous")
    app.config |= {name: value for name, value in names["app"].config.items() if name.startswith(("SECRET", "IDEMP"))}
    names["login_manager"].init_app(app)
    names["Idempotency"](app)
    names["app"] = app
    told = public(names)
    one, two = app.test_client(), app.test_client()
    fields = shown(one.get("/public"))
    theirs = {**shown(two.get("/public")), "idempotency_key": fields["idempotency_key"]}

    assert [(200, False), (200, True)] == ask_twice(app, one, fields)
    assert [(200, True)] * 2 == ask_twice(app, two, theirs)
    assert ["why"] == told


def test_a_refused_form_is_a_page_for_a_browser(names: Names) -> None:
    """And a problem for a script."""
    run(PROBLEMS, names)
    client = signed_in(names["app"])
    fields = shown(client.get("/posts"))
    send(client, fields, "hello")

    page = send(client, fields, "changed")
    script = client.post("/posts", data={**fields, "text": "changed"}, headers={"Accept": "*/*"})

    assert (422, "text/html", "no-store") == (page.status_code, page.mimetype, page.headers["Cache-Control"])
    assert "<h1>" in page.text
    assert 'href="/posts"' in page.text
    assert (422, "key-reused") == (script.status_code, script.json["code"])  # type: ignore[index]


def test_a_macro_that_pages_share_names_its_endpoint(names: Names) -> None:
    """The name of the field is that of the endpoint, wherever the macro is rendered."""
    app = names["app"]
    CSRFProtect(app)
    app.jinja_loader = DictLoader({"macros.html": MACRO})
    with app.test_request_context("/elsewhere"):
        form = get_template_attribute("macros.html", "button")("write", "Send")

    assert 'action="/posts"' in form
    assert {"csrf_token", "idempotency_key"} == set(dict(INPUT.findall(form)))
