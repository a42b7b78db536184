from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from flask import Response

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings.profiles import policy_of
from flask_idempotency.web.responses import capture, replay
from tests.web.apps import new_world
from tests.web.remembering import Remembering

HTML = ("Content-Type", "text/html; charset=utf-8")


def test_an_answer_that_cannot_be_stored_is_delivered_and_leaves_a_tombstone() -> None:
    service = Remembering(lambda: ("paid", 201, {"ETag": "a\0b", "Location": "/things/7"}))

    assert b"paid" == service.post().body
    assert StoredResponse(201, metadata=(("Location", "/things/7"), HTML), kept=False) == service.result


@pytest.mark.parametrize("reason", ("Paid\0", "支払済"))
def test_a_reason_that_cannot_be_stored_leaves_a_tombstone_without_one(reason: str) -> None:
    service = Remembering(lambda: Response("paid", status=f"201 {reason}"))

    assert b"paid" == service.post().body
    assert StoredResponse(201, metadata=(HTML,), kept=False) == service.result


@pytest.mark.parametrize("size", (9, 10, 11))
@pytest.mark.parametrize("view", ("list", "announced", "stream"))
def test_only_what_is_over_the_limit_leaves_a_tombstone(view: str, size: int) -> None:
    body = b"x" * size
    views: dict[str, Callable[[], Any]] = {
        "list": lambda: Response([body[:4], body[4:]]),
        "announced": lambda: Response(iter([body]), headers={"Content-Length": str(size)}),
        "stream": lambda: iter([body]),
    }
    service = Remembering(views[view], policy=Policy(max_body=10))

    assert body == service.post().body
    assert (size <= 10, body if size <= 10 else b"") == (service.result.kept, service.result.body)


def test_a_file_over_the_limit_is_left_to_the_servers_sendfile() -> None:
    source = io.BytesIO(b"x" * 11)
    response = Response(source, headers={"Content-Length": "11"}, direct_passthrough=True)

    taken = capture(response, Policy(max_body=10), on_end=lambda end: None, abandoned=deque())

    assert (True, source, 0) == (response.response is source, response.response, source.tell())
    assert taken.result == taken.tombstone


TOMBSTONE = StoredResponse(
    201,
    reason="Made",
    metadata=(
        ("Content-Type", "application/pdf"),
        ("Content-Encoding", "gzip"),
        ("Content-Disposition", "attachment"),
        ("Content-Language", "de"),
        ("ETag", '"1"'),
        ("Last-Modified", "Tue, 14 Nov 2023 22:13:20 GMT"),
        ("Location", "/things/7"),
        ("Link", "</b>; rel=b"),
        ("Vary", "Accept"),
        ("Cache-Control", "max-age=60"),
    ),
    kept=False,
)


@pytest.mark.parametrize(
    ("profile", "content_type", "marks"),
    (
        ("ietf", "application/problem+json", ["Idempotency-Replayed"]),
        ("x-idempotency", "application/problem+json", ["X-Idempotency-Replay"]),
        ("stripe", "application/json", ["Stripe-Should-Retry", "Idempotent-Replayed"]),
        ("playbook", "application/json", ["X-Idempotency-Replayed", "X-Cache-Lookup"]),
    ),
)
def test_a_tombstone_has_the_first_status_and_a_problem_for_a_body(
    profile: str, content_type: str, marks: list[str]
) -> None:
    """What described the lost body is gone; what says something of the resource stays, and where it is to be found."""
    policy = policy_of({"profile": profile})
    again = replay(TOMBSTONE, policy=policy, response_class=Response)

    assert "201 Made" == again.status
    assert [
        ("ETag", '"1"'),
        ("Last-Modified", "Tue, 14 Nov 2023 22:13:20 GMT"),
        ("Location", "/things/7"),
        ("Link", "</b>; rel=b"),
        ("Vary", "Accept"),
        ("Content-Type", content_type),
        ("Link", '<https://flask-idempotency.readthedocs.io/problems/response-not-kept>; rel="describedby"'),
        ("Cache-Control", "no-store"),
    ] == list(again.headers)[:8]
    assert marks == [name for name, _ in list(again.headers)[8:]]
    assert b"not_kept" in again.data.replace(b"-", b"_") or b"was carried out" in again.data


@pytest.mark.parametrize("status", (200, 201, 202, 226, 303, 400, 409, 412, 500))
def test_a_tombstone_keeps_validators_of_a_success_only(status: int) -> None:
    """
    RFC 9110 section 8.8 says what they describe after a success. Of another status they may describe the lost body.
    """
    again = replay(replace(TOMBSTONE, status=status), policy=Policy(), response_class=Response)
    success = status < 300

    assert ("ETag" in again.headers, "Last-Modified" in again.headers) == (success, success)
    assert ("/things/7", "Accept") == (again.headers["Location"], again.headers["Vary"])


@pytest.mark.parametrize(
    "name",
    (
        "Content-Type",
        "Content-Encoding",
        "Content-Language",
        "Content-Location",
        "Content-Disposition",
        "Content-Range",
        "Content-MD5",
        "Content-Digest",
        "Repr-Digest",
        "Digest",
    ),
)
def test_a_tombstone_keeps_nothing_that_describes_the_lost_body(name: str) -> None:
    policy = Policy(keep_headers=frozenset({name.lower()}))
    again = replay(StoredResponse(201, metadata=((name, "lost"),), kept=False), policy=policy, response_class=Response)

    assert "lost" not in again.headers.getlist(name)


def test_a_tombstone_has_no_field_twice_that_a_renderer_sets() -> None:
    """An application's own problem may have an ETag of its own."""

    def renderer(problem: Any, **_: Any) -> Response:
        return Response("lost", headers={"ETag": '"problem"', "Location": "/help", "Link": "</help>; rel=help"})

    again = replay(TOMBSTONE, policy=Policy(), response_class=Response, renderer=renderer)

    assert [['"problem"'], ["/help"]] == [again.headers.getlist(name) for name in ("ETag", "Location")]
    assert ["</b>; rel=b", "</help>; rel=help"] == again.headers.getlist("Link")


def test_a_retry_finds_the_etag_of_a_resource_whose_answer_was_too_large() -> None:
    """So that it can change the resource, and notices if another client did."""
    world = new_world(max_body=3)

    @world.view()
    def create() -> Response:
        response = Response("created", status=201, headers={"Location": "/things/7"})
        response.set_etag("v1")
        return response

    world.post()
    again = world.post()

    assert (201, '"v1"', "/things/7") == (again.status_code, again.headers["ETag"], again.headers["Location"])
    assert "response-not-kept" == again.json["code"]  # type: ignore[index]


@pytest.mark.parametrize("status", (204, 304))
def test_a_tombstone_of_an_answer_without_a_body_has_none(status: int) -> None:
    again = replay(StoredResponse(status, kept=False), policy=Policy(), response_class=Response)

    assert (status, b"", []) == (again.status_code, again.data, again.headers.getlist("Content-Type"))


@pytest.mark.parametrize(
    "result",
    (
        StoredResponse(200, metadata=(("ETag", "a\r\nSet-Cookie: b"),)),
        StoredResponse(200, metadata=(("ETag", "a\nb"),)),
        StoredResponse(200, metadata=(("ETag", "a\0b"),)),
        StoredResponse(200, metadata=(("ETag: a\r\nX", "b"),)),
        StoredResponse(200, reason="OK\r\nX: y"),
        StoredResponse(200, reason="日本", kept=False),
    ),
)
def test_a_poisoned_store_cannot_split_a_response(result: StoredResponse) -> None:
    with pytest.raises(CorruptRecord):
        replay(result, policy=Policy(), response_class=Response)


@pytest.mark.parametrize("kept", (True, False))
@pytest.mark.parametrize(
    "name",
    (
        "Set-Cookie",
        "X-Accel-Redirect",
        "x-sendfile",
        "X-Accel-Buffering",
        "Content-Security-Policy",
        "Strict-Transport-Security",
        "Content-Length",
        "Transfer-Encoding",
        "Connection",
        "Access-Control-Allow-Origin",
        "Refresh",
        "X-Idempotency-Replay",
    ),
)
def test_a_field_that_no_answer_keeps_is_not_sent_from_the_store(name: str, kept: bool) -> None:
    """
    Somebody else wrote to the store. A server in front takes some of these for an order: to send a file of its own, say.
    """
    planted = StoredResponse(201, metadata=((name, "/etc/passwd"), ("Location", "/things/7")), kept=kept)
    again = replay(planted, policy=Policy(), response_class=Response)

    assert (name in again.headers, "/things/7") == (False, again.headers["Location"])
    assert "/etc/passwd" not in str(again.headers)


def test_the_policy_of_now_says_which_fields_a_replay_carries() -> None:
    """A field that the policy names no longer is stored still, and not sent; one that it names again is sent again."""
    stored = StoredResponse(200, metadata=(("X-Total", "7"), ("X-Page", "1"), ("x-total", "8")))
    policies = (Policy(keep_headers=frozenset({"X-total"})), Policy())

    assert [["7", "8"], []] == [
        replay(stored, policy=policy, response_class=Response).headers.getlist("X-Total") for policy in policies
    ]


@pytest.mark.parametrize(
    "result",
    (
        StoredResponse(0),
        StoredResponse(100),
        StoredResponse(101),
        StoredResponse(199, kept=False),
        StoredResponse(600),
        StoredResponse(999, kept=False),
        StoredResponse(204, body=b"HTTP/1.1 200 OK"),
        StoredResponse(304, body=b"x"),
    ),
    ids=lambda result: f"{result.status} {len(result.body)}",
)
def test_what_no_server_may_send_is_not_sent_from_the_store(result: StoredResponse) -> None:
    """
    An interim status keeps the client waiting, or switches protocols; a body where none may be is read as the next answer.
    """
    with pytest.raises(CorruptRecord):
        replay(result, policy=Policy(), response_class=Response)


@pytest.mark.parametrize("status", (0, 101, 600, 999))
def test_a_status_that_is_no_final_one_leaves_a_tombstone_of_500(status: int) -> None:
    """Clients treat such a status as a 500. It never runs again."""

    def view() -> Response:
        response = Response("paid")
        response.status_code = status
        return response

    service = Remembering(view)
    service.post()

    assert (500, False, b"") == (service.result.status, service.result.kept, service.result.body)
    again = replay(service.result, policy=Policy(), response_class=Response)
    assert (500, "application/problem+json") == (again.status_code, again.content_type)
