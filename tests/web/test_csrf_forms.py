"""HTML forms with the real Flask-WTF: each rendering has another token, and a second click is still the same request."""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask, redirect, render_template_string
from flask.testing import FlaskClient
from flask_wtf import CSRFProtect, FlaskForm  # type: ignore[import-untyped]
from itsdangerous import TimestampSigner
from werkzeug.test import TestResponse
from wtforms import FileField, IntegerField  # type: ignore[import-untyped]

from flask_idempotency import idempotent
from tests.apps import World, is_replay, new_world

PAGE = """<form method="post">{{ form.hidden_tag() if form else csrf }}{{ idempotency_field() }}</form>"""
INPUT = re.compile(r'<input[^>]*name="([^"]+)"[^>]*value="([^"]+)"')


class PaymentForm(FlaskForm):  # type: ignore[misc]
    amount = IntegerField()
    receipt = FileField()


Fields = dict[str, Any]


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flask-WTF's tokens hold the second in which they are made: here each is made in another."""
    seconds = itertools.count(int(time.time()) - 1000)
    made = TimestampSigner.sign

    def sign(self: TimestampSigner, value: str | bytes) -> bytes:
        now = next(seconds)
        monkeypatch.setattr(self, "get_timestamp", lambda: now, raising=False)
        return made(self, value)

    monkeypatch.setattr(TimestampSigner, "sign", sign)


def shop(*, prefix: str = "", protect: bool, **config: Any) -> World:
    """`/pay` shows a form and takes it. `protect`: CSRFProtect checks each request, and parses its form, before any view."""
    config = {"WTF_CSRF_TIME_LIMIT": None, **config}
    world = new_world(Flask(__name__), config=config, form_field="idempotency_key")
    if protect:
        CSRFProtect(world.app)

    @world.app.route("/pay", methods=["GET", "POST"])
    def pay() -> Any:
        form = PaymentForm(prefix=prefix)
        if not form.is_submitted():
            return render_template_string(PAGE, form=form)
        if not form.validate():
            return form.errors, 400
        world.runs.append(form.amount.data)
        return {"paid": form.amount.data}

    return world


def rendered(client: FlaskClient) -> Fields:
    """The hidden fields of the form, as the page has them this time."""
    return dict(INPUT.findall(client.get("/pay").text))


def as_form(client: FlaskClient, fields: Fields) -> TestResponse:
    return client.post("/pay", data=fields)


def as_upload(client: FlaskClient, fields: Fields) -> TestResponse:
    """With a file, so as multipart with a new boundary."""
    return client.post("/pay", data={**fields, "receipt": (io.BytesIO(b"scan"), "scan.png")})


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(
    ("submit", "prefix", "config", "protect"),
    [
        (as_form, "", {}, True),
        (as_form, "checkout", {"WTF_CSRF_FIELD_NAME": "my_csrf"}, False),
        (as_upload, "checkout", {}, True),
        (as_upload, "", {"WTF_CSRF_FIELD_NAME": "my_csrf"}, True),
        (as_form, "checkout", {}, False),
        (as_upload, "", {}, False),
    ],
)
def test_second_click_on_a_form_that_was_rendered_again_is_a_replay(
    submit: Callable[[FlaskClient, Fields], TestResponse], prefix: str, config: Fields, protect: bool
) -> None:
    """The page was loaded twice with the key that the client keeps, so the token differs and nothing else does."""
    world = shop(prefix=prefix, protect=protect, **config)
    amount = f"{prefix}-amount" if prefix else "amount"
    with world.client() as client:
        first, second = rendered(client), rendered(client)
        key = first["idempotency_key"]
        token = next(name for name in first if name.endswith(("csrf_token", "my_csrf")))
        answers = [submit(client, {**fields, "idempotency_key": key, amount: "5"}) for fields in (first, second)]
        other = submit(client, {**second, "idempotency_key": key, amount: "6"})

    assert first[token] != second[token]
    assert ([200, 200], [False, True]) == ([a.status_code for a in answers], [is_replay(a) for a in answers])
    assert 422 == other.status_code
    assert [5] == world.runs


@pytest.mark.usefixtures("ticking")
def test_replay_passes_csrf_protection_like_any_request() -> None:
    """The token is left out of the comparison, and not out of the check."""
    world = shop(protect=True)
    with world.client() as client:
        fields = {**rendered(client), "amount": "5"}
        assert 200 == as_form(client, fields).status_code
        refused = as_form(client, {**fields, "csrf_token": "forged"})

    assert 400 == refused.status_code
    assert not is_replay(refused)


@pytest.mark.usefixtures("ticking")
def test_key_may_come_by_header_beside_the_forms_own_field() -> None:
    """A script repeats the request with the key of the form in the header, quoted."""
    world = shop(protect=True)
    with world.client() as client:
        fields = {**rendered(client), "amount": "5"}
        key = fields["idempotency_key"]
        first = as_form(client, fields)
        again = client.post("/pay", data=fields, headers={"Idempotency-Key": f'"{key}"'})
        quoted = as_form(client, {**fields, "idempotency_key": f'"{key}"'})

    assert [False, True, True] == [is_replay(answer) for answer in (first, again, quoted)]
    assert [5] == world.runs


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("protect", [True, False], ids=["CSRFProtect", "form only"])
def test_a_browser_that_adds_a_key_to_each_post_does_not_hide_the_key_of_the_form(protect: bool) -> None:
    """Firefox adds another with each click, quoted. Whatever it adds, the form's own key counts."""
    world = shop(protect=protect)
    with world.client() as client:
        fields = {**rendered(client), "amount": "5"}
        keys = ('"aa5fd1f6"', '"b4ec36aa"', "two,keys", "", None)
        clicks = [
            client.post("/pay", data=fields, headers={} if key is None else {"Idempotency-Key": key}) for key in keys
        ]

    assert [(200, index > 0) for index in range(len(keys))] == [(each.status_code, is_replay(each)) for each in clicks]
    assert [5] == world.runs


@pytest.mark.usefixtures("ticking")
def test_a_form_sent_again_after_a_reload_gets_the_stored_redirect() -> None:
    """Case 59: the page keeps its key over the reload, and the new page has another token and another stamp."""
    world = new_world(Flask(__name__), config={"WTF_CSRF_TIME_LIMIT": None}, form_field="idempotency_key")
    CSRFProtect(world.app)
    stamps = itertools.count()

    @world.app.get("/pay")
    def page() -> str:
        stamp = f'<input name="stamp" value="{next(stamps)}">'
        return render_template_string(PAGE, form=None, csrf=PaymentForm().csrf_token()) + stamp

    @world.app.post("/pay")
    @idempotent(required=True, ignore_fields=("/stamp",))
    def pay() -> Any:
        world.runs.append(1)
        return redirect("/paid", 303)

    with world.client() as client:
        first = rendered(client)
        again = {**rendered(client), "idempotency_key": first["idempotency_key"]}
        answers = [as_form(client, fields) for fields in (first, again)]

    assert not {"csrf_token", "stamp"} & {name for name in first if first[name] == again[name]}
    assert [(303, "/paid"), (303, "/paid")] == [(each.status_code, each.headers["Location"]) for each in answers]
    assert [1] == world.runs
