"""Response headers that decide the client's next move are replayed, and each that is lost is named: in the log, in `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Response, after_this_request, send_file
from werkzeug.exceptions import UnprocessableEntity

from flask_idempotency import Idempotency, claim_here, idempotent
from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.web.doctor import run_checks
from flask_idempotency.web.responses import LostFields
from tests.apps import KEY, LONG, World, new_world
from tests.operations.judging import worst

DECIDING = {
    "HX-Redirect": "/orders/7",
    "HX-Location": '{"path": "/orders/7"}',
    "HX-Trigger": '{"saved": "yes"}',
    "HX-Trigger-After-Settle": "saved",
    "HX-Push-Url": "false",
    "Turbo-Location": "/orders/7",
    "X-Inertia": "true",
    "X-Inertia-Location": "/orders/7",
    "Refresh": "5; url=/orders/7",
    "Operation-Location": "/operations/7",
    "Azure-AsyncOperation": "/operations/7",
    "OData-EntityId": "Orders(7)",
    "Preference-Applied": "return=minimal",
    "Deprecation": "@1688169599",
    "Sunset": "Sat, 31 Dec 2050 23:59:59 GMT",
    "X-Total-Count": "41",
}
EXCHANGE = {
    "X-Request-ID": "secret-value",
    "X-RateLimit-Remaining": "9",
    "Access-Control-Allow-Origin": "*",
    "Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "X-Accel-Buffering": "no",
    "Server": "shop",
}
POST = {"Idempotency-Key": KEY}


def world(**policy: Any) -> World:
    made = new_world(**policy)

    @made.app.post("/pay")
    def pay() -> Any:
        return "paid", 201, {"X-Receipt": "secret-value", "X-Page": "1", **DECIDING, **EXCHANGE}

    return made


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "a replay leaves out" in record.getMessage()]


def findings(app: Flask) -> list[str]:
    with app.app_context():
        found = [each for each in run_checks(app, environ={}).findings if each.check == "headers"]
    worst(found)
    return [f"{each.text} {each.remedy}" for each in found if each.verdict is not Verdict.FINE]


def test_fields_that_decide_what_comes_next_are_replayed() -> None:
    client = world().app.test_client()
    first, again = (client.post("/pay", headers=POST) for _ in range(2))

    assert "true" == again.headers["Idempotency-Replayed"]
    assert DECIDING == {name: again.headers.get(name) for name in DECIDING}
    assert not [name for name in EXCHANGE if name in again.headers]
    assert DECIDING == {name: first.headers.get(name) for name in DECIDING}


def test_a_beginning_keeps_the_fields_that_begin_so() -> None:
    client = world(keep_headers=["X-Re*"]).app.test_client()
    again = [client.post("/pay", headers=POST) for _ in range(2)][1]

    assert "secret-value" == again.headers["X-Receipt"]
    assert "X-Request-ID" not in again.headers


def test_a_lost_field_is_named_once_without_its_value_and_with_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    made = world(keep_headers=["X-Other"])
    for key in ("a", "b", "b", "c"):
        made.app.test_client().post("/pay", headers={"Idempotency-Key": key})

    (line,) = lines(caplog)
    assert line.startswith("pay sets X-Page, X-Receipt, which a replay leaves out")
    assert 'keep_headers=["x-other", "X-Page", "X-Receipt"]' in line
    assert "IDEMPOTENCY_KEEP_HEADERS" in line
    assert "secret-value" not in caplog.text
    (finding,) = findings(made.app)
    assert "pay sets headers that its replays lack: X-Page, X-Receipt." in finding
    assert 'keep_headers=["x-other", "X-Page", "X-Receipt"]' in finding


def test_what_later_hooks_add_and_what_is_never_kept_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks run on replays too."""
    made = new_world()

    @made.app.after_request
    def later(response: Response) -> Response:
        response.headers["X-Frame-Options"] = "DENY"
        return response

    @made.app.post("/pay")
    def pay() -> Any:
        return "paid", 201, {**DECIDING, **EXCHANGE, "Connection": "X-Hop", "X-Hop": "1", "Idempotency-Replayed": "no"}

    made.app.test_client().post("/pay", headers=POST)

    assert [] == lines(caplog)
    assert [] == findings(made.app)


def test_a_response_that_is_not_kept_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made = new_world()

    @made.app.post("/pay")
    def pay() -> Any:
        return "try again", 429, {"X-Reason": "limit"}

    made.app.test_client().post("/pay", headers=POST)

    assert [] == lines(caplog)


def test_every_kind_of_view_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Streams, tombstones, errors, what `after_this_request` adds, async views and `@claim_here`."""
    made = new_world(max_body=10)
    app = made.app
    field = {"X-Receipt": "7"}

    @app.post("/stream", endpoint="stream")
    def stream() -> Response:
        def chunks() -> Iterator[str]:
            yield "paid"

        return Response(chunks(), headers=field)

    @app.post("/large", endpoint="large")
    def large() -> Response:
        return Response("x" * 100, headers=field)

    @app.post("/error", endpoint="error")
    def error() -> Response:
        raise UnprocessableEntity(response=Response("no", 422, field))

    @app.post("/later", endpoint="later")
    def later() -> str:
        @after_this_request
        def add(response: Response) -> Response:
            response.headers.update(field)
            return response

        return "paid"

    @app.post("/async", endpoint="async")
    async def asynchronous() -> Response:
        return Response("paid", headers=field)

    @app.post("/in-view", endpoint="in-view")
    @claim_here
    def in_view() -> Response:
        return Response("paid", headers=field)

    names = ["async", "error", "in-view", "large", "later", "stream"]
    for name in names:
        assert app.test_client().post(f"/{name}", headers={"Idempotency-Key": name}).headers["X-Receipt"] == "7"

    assert names == sorted(line.split()[0] for line in lines(caplog))


def test_observing_names_them_and_changes_no_response(caplog: pytest.LogCaptureFixture) -> None:
    made = world(mode="observe")
    first, again = (made.app.test_client().post("/pay", headers=POST) for _ in range(2))

    assert list(first.headers) == list(again.headers)
    assert 1 == len(lines(caplog))
    assert 1 == len(findings(made.app))


class SharedStore(MemoryStore):
    """The memory store, as one that another process could see."""


def test_doctor_in_another_process_knows_them_until_the_policy_keeps_them(caplog: pytest.LogCaptureFixture) -> None:
    store = SharedStore()

    def shop(**policy: Any) -> Flask:
        app = Flask("shop")
        Idempotency(app, store=store, secret=LONG, activity=True)

        @app.post("/pay")
        @idempotent(**policy)
        def pay() -> Any:
            return "paid", 201, {"X-Receipt": "7", "X-" + "Long-" * 20: "1"}

        return app

    served = shop()
    served.test_client().post("/pay", headers=POST)
    assert served.extensions["idempotency"].activity.flush()

    (finding,) = findings(shop())
    assert "X-Receipt" in finding
    assert [] == findings(shop(keep_headers=["X-Receipt"]))
    assert [] == findings(shop(keep_headers=["X-Rec*"]))
    assert "X-Long" in lines(caplog)[0]


def test_a_view_that_makes_up_names_is_named_for_a_few_only(caplog: pytest.LogCaptureFixture) -> None:
    made = new_world()
    names = iter(range(1000))

    @made.app.post("/pay")
    def pay() -> Any:
        return "paid", 201, {f"X-{next(names)}": "1"}

    for number in range(LostFields.MOST + 5):
        made.app.test_client().post("/pay", headers={"Idempotency-Key": f"k{number}"})

    assert LostFields.MOST == len(lines(caplog))


def test_a_body_that_a_proxy_sends_is_a_tombstone(tmp_path: Path) -> None:
    """The response's own body is empty: a replay of it would be an empty file."""
    (tmp_path / "receipt.txt").write_text("paid")
    made = new_world(config={"USE_X_SENDFILE": True})

    @made.app.post("/pay")
    def pay() -> Response:
        return send_file(tmp_path / "receipt.txt")

    first, again = (made.app.test_client().post("/pay", headers=POST) for _ in range(2))

    assert "X-Sendfile" in first.headers
    assert (200, "response-not-kept") == (again.status_code, (again.json or {})["code"])
    assert "X-Sendfile" not in again.headers


def test_a_tombstone_is_no_page_of_inertia() -> None:
    made = new_world(max_body=1)

    @made.app.post("/pay")
    def pay() -> Any:
        return "a page", 200, {"X-Inertia": "true", "HX-Redirect": "/orders/7"}

    again = [made.app.test_client().post("/pay", headers=POST) for _ in range(2)][1]

    assert ("response-not-kept", None) == ((again.json or {})["code"], again.headers.get("X-Inertia"))
    assert "/orders/7" == again.headers["HX-Redirect"]
