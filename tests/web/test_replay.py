"""Which header fields are stored, what a replay sends, and what it removes from a response of a lost claim."""

from __future__ import annotations

import gzip
import io
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from flask import Flask, Response, after_this_request
from werkzeug.datastructures import Headers
from werkzeug.test import create_environ, run_wsgi_app
from werkzeug.wrappers import Response as WerkzeugResponse

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.model import InFlight, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import PROFILES, policy_of
from flask_idempotency.web.problems import refusal, render
from flask_idempotency.web.responses import CapturedResponse, StreamEnd, capture, kept_headers, overlay
from tests.apps import Remembering, new_world, replayed


def test_fields_of_the_response_are_kept() -> None:
    for name in (
        "Content-Type",
        "Content-Language",
        "Content-Disposition",
        "Content-Encoding",
        "Location",
        "Content-Location",
        "ETag",
        "Last-Modified",
        "Link",
        "Vary",
        "Cache-Control",
        "Retry-After",
        "HX-Redirect",
        "hx-anything",
        "Turbo-Location",
        "Refresh",
        "X-Total-Count",
        "etag",
        "LOCATION",
        "X-Total",
    ):
        policy = Policy(keep_headers=frozenset({"x-Total"}))

        assert ((name, "1"), (name, "2")) == kept_headers([(name, "1"), ("X-Other", "3"), (name, "2")], policy), name


def test_fields_of_the_exchange_are_not_kept_even_when_a_policy_names_them() -> None:
    for named, name in product(
        (False, True),
        (
            "Set-Cookie",
            "WWW-Authenticate",
            "Authorization",
            "Proxy-Authenticate",
            "Proxy-Authorization",
            "Proxy-Authentication-Info",
            "Authentication-Info",
            "Authentication-Control",
            "Optional-WWW-Authenticate",
            "Cookie",
            "Set-Cookie2",
            "Clear-Site-Data",
            "DPoP-Nonce",
            "Replay-Nonce",
            "X-Auth-Token",
            "X-API-Key",
            "X-CSRF-Token",
            "Signature",
            "Date",
            "Server",
            "Age",
            "Alt-Svc",
            "Connection",
            "Keep-Alive",
            "Proxy-Connection",
            "TE",
            "Trailer",
            "Transfer-Encoding",
            "Upgrade",
            "Content-Length",
            "X-Request-ID",
            "Traceparent",
            "RateLimit-Remaining",
            "X-RateLimit-Limit",
            "Access-Control-Allow-Origin",
            "X-Accel-Redirect",
            "X-Accel-Buffering",
            "X-Sendfile",
            "Baggage",
            "X-Anything-Else",
            "set-COOKIE",
        ),
    ):
        policy = Policy(keep_headers=frozenset({name}) if named and name != "X-Anything-Else" else frozenset())

        assert () == kept_headers([(name, "1")], policy), (named, name)


def test_fields_named_in_connection_are_not_kept() -> None:
    headers = [("ETag", "1"), ("Connection", "close, etag"), ("Link", "2"), ("connection", "Link"), ("Vary", "3")]

    assert (("Vary", "3"),) == kept_headers(headers, Policy())


def test_a_value_that_no_header_may_hold_is_not_stored() -> None:
    for value in ("a\rb", "a\nSet-Cookie: b", "a\0", "\ud800", "日本"):
        response = WerkzeugResponse("paid", headers={"Location": "/payments/1"})
        response.headers._list.append(("ETag", value))  # Werkzeug refuses some of them itself
        taken = capture(response, Policy(), on_end=lambda end: None, abandoned=deque())

        assert taken.result is not None, value
        assert not taken.result.kept, value
        assert [("Location", "/payments/1")] == [pair for pair in taken.result.metadata if pair[0] != "Content-Type"], (
            value
        )


def test_a_harmful_field_that_is_not_kept_is_ignored() -> None:
    assert () == kept_headers([("X-Other", "a\nb")], Policy())


STORED = StoredResponse(
    201,
    reason="Made",
    metadata=(("Content-Type", "text/plain"), ("Vary", "Accept"), ("ETag", '"theirs"')),
    body=b"theirs",
)


def theirs() -> Any:
    return replayed(STORED, policy=Policy())


def mine() -> Response:
    response = Response(b"mine", 200, {"ETag": '"mine"', "X-Receipt": "mine", "Retry-After": "9", "Vary": "Accept"})
    response.set_cookie("seat", "mine")
    return response


def compressed(response: Response) -> Response:
    response.set_data(gzip.compress(response.get_data()))
    response.headers["Content-Encoding"] = "gzip"
    response.headers["Content-Digest"] = "sha-256=:mine:"
    response.vary.add("Accept-Encoding")
    return response


def saved(response: Response) -> Response:
    response.set_cookie("session", "fresh")
    response.headers["X-Request-Id"] = "fresh"
    return response


class Closing:
    """A stream that records its close."""

    closed = False

    def __iter__(self) -> Iterator[bytes]:
        return iter([b"mine"])

    def close(self) -> None:
        self.closed = True


class Losing:
    """An application that loses its claim after its other hooks have run."""

    def __init__(self, view: Callable[[], Any], *hooks: Callable[[Response], Response], answer: Any = theirs) -> None:
        self.ends: list[StreamEnd] = []
        self.app = app = Flask(__name__)
        app.post("/")(view)
        self.captured: list[CapturedResponse] = []

        def snap(response: Response) -> Response:
            self.captured.append(capture(response, Policy(), on_end=self.ends.append, abandoned=deque()))
            return response

        def lose(response: Response) -> Response:
            overlay(response, answer(), policy=Policy(), lost=self.captured[0])
            return response

        for hook in (lose, *reversed(hooks), snap):
            app.after_request(hook)

    def post(self) -> tuple[bytes, str, Headers]:
        body, status, headers = run_wsgi_app(self.app, create_environ(method="POST"), buffered=True)
        return b"".join(body), status, headers


def test_the_stored_response_is_delivered_whatever_hooks_did() -> None:
    body, status, headers = Losing(mine, compressed, saved).post()

    assert (b"theirs", "201 Made", "6") == (body, status, headers["Content-Length"])
    assert ('"theirs"', "text/plain") == (headers["ETag"], headers["Content-Type"])


def test_nothing_of_the_lost_response_is_delivered() -> None:
    _, _, headers = Losing(mine, compressed, saved).post()

    assert [] == [(name, value) for name, value in headers if "mine" in value or name == "Retry-After"]
    assert "Content-Encoding" not in headers


def test_headers_that_other_hooks_added_stay() -> None:
    _, _, headers = Losing(mine, compressed, saved).post()

    assert (["session=fresh; Path=/"], "fresh") == (headers.getlist("Set-Cookie"), headers["X-Request-Id"])
    assert ["Accept, Accept-Encoding"] == headers.getlist("Vary")


def test_without_other_hooks_the_result_is_the_replay_itself() -> None:
    assert list(theirs().get_wsgi_headers(create_environ())) == list(Losing(mine).post()[2])


def test_a_problem_can_replace_a_response_as_well() -> None:
    body, status, headers = Losing(
        mine,
        answer=lambda: render(
            refusal(InFlight(3)), profile=PROFILES["ietf"], docs_url=DOCS_URL, response_class=Response
        ),
    ).post()

    assert ("409 CONFLICT", "3") == (status, headers["Retry-After"])
    assert b"in-flight" in body


@pytest.mark.parametrize("passed_through", (False, True))
def test_a_stream_that_is_replaced_is_closed_and_reports_no_end(passed_through: bool) -> None:
    stream = Closing()
    service = Losing(lambda: Response(stream, direct_passthrough=passed_through))

    assert (b"theirs", True, []) == (service.post()[0], stream.closed, service.ends)


def test_a_stream_that_a_hook_has_wrapped_is_closed_and_reports_no_end() -> None:
    """Some hooks wrap a stream and never close it, such as Flask-Compress."""
    stream = Closing()

    def wrapped(response: Response) -> Response:
        source = response.response
        response.response = (bytes(chunk) for chunk in source)  # type: ignore[arg-type]
        return response

    service = Losing(lambda: Response(stream), wrapped)

    assert (b"theirs", True, []) == (service.post()[0], stream.closed, service.ends)


def test_a_stream_that_was_never_captured_is_closed_as_well() -> None:
    stream = Closing()
    overlay(Response(stream), theirs(), policy=Policy())

    assert stream.closed


def test_callbacks_at_the_end_of_the_response_still_run() -> None:
    """Werkzeug skips these callbacks for a body that is passed through, and the replay's is not."""
    called: list[bool] = []

    def view() -> Response:
        response = Response(Closing(), direct_passthrough=True)
        response.call_on_close(lambda: called.append(True))
        return response

    Losing(view).post()

    assert [True] == called


def test_a_replay_keeps_what_was_added_to_it_for_this_request() -> None:
    """An earlier hook may set a cookie by `after_this_request`: it belongs to this caller, and is set once."""
    app = Flask(__name__)

    @app.post("/")
    def never() -> str:
        raise AssertionError("a replay does not run the view")

    @app.before_request
    def language() -> None:
        @after_this_request
        def remember(response: Response) -> Response:
            response.set_cookie("lang", "de")
            response.headers["ETag"] = '"rewritten"'
            return response

    @app.before_request
    def replay() -> Any:
        return theirs()

    @app.after_request
    def again(response: Response) -> Response:
        overlay(response, theirs(), policy=Policy())
        return response

    response = app.test_client().post("/")

    assert ("201 Made", b"theirs", '"theirs"') == (response.status, response.data, response.headers["ETag"])
    assert ["lang=de; Path=/"] == response.headers.getlist("Set-Cookie")
    assert ["true"] == response.headers.getlist("Idempotency-Replayed")


HTML = ("Content-Type", "text/html; charset=utf-8")


def test_a_response_that_cannot_be_stored_is_delivered_and_leaves_a_tombstone() -> None:
    service = Remembering(lambda: ("paid", 201, {"ETag": "a\0b", "Location": "/things/7"}))

    assert b"paid" == service.post().body
    assert StoredResponse(201, metadata=(("Location", "/things/7"), HTML), kept=False) == service.result


@pytest.mark.parametrize("reason", ("Paid\0", "支払済"))
def test_a_reason_that_cannot_be_stored_leaves_a_tombstone_without_one(reason: str) -> None:
    service = Remembering(lambda: Response("paid", status=f"201 {reason}"))

    assert b"paid" == service.post().body
    assert StoredResponse(201, metadata=(HTML,), kept=False) == service.result


def only_what_is_over_the_limit_leaves_a_tombstone(view: str, size: int) -> None:
    body = b"x" * size
    views: dict[str, Callable[[], Any]] = {
        "list": lambda: Response([body[:4], body[4:]]),
        "announced": lambda: Response(iter([body]), headers={"Content-Length": str(size)}),
        "stream": lambda: iter([body]),
    }
    service = Remembering(views[view], policy=Policy(max_body=10))

    assert body == service.post().body
    assert (size <= 10, body if size <= 10 else b"") == (service.result.kept, service.result.body)


def test_only_what_is_over_the_limit_leaves_a_tombstone() -> None:
    for view, size in product(("list", "announced", "stream"), (9, 10, 11)):
        only_what_is_over_the_limit_leaves_a_tombstone(view, size)


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
    """Fields that describe the lost body are gone; fields about the resource and its location stay."""
    policy = policy_of({"profile": profile})
    again = replayed(TOMBSTONE, policy=policy)

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


def test_a_tombstone_keeps_validators_of_a_success_only() -> None:
    """RFC 9110 section 8.8 defines them after a success. After another status they may describe the lost body."""
    for status in (200, 201, 202, 226, 303, 400, 409, 412, 500):
        again = replayed(replace(TOMBSTONE, status=status), policy=Policy())
        success = status < 300

        assert ("ETag" in again.headers, "Last-Modified" in again.headers) == (success, success), status
        assert ("/things/7", "Accept") == (again.headers["Location"], again.headers["Vary"]), status


def test_a_tombstone_keeps_nothing_that_describes_the_lost_body() -> None:
    for name in (
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
    ):
        policy = Policy(keep_headers=frozenset({name.lower()}))
        again = replayed(StoredResponse(201, metadata=((name, "lost"),), kept=False), policy=policy)

        assert "lost" not in again.headers.getlist(name), name


def test_a_tombstone_has_no_field_twice_that_a_renderer_sets() -> None:
    """An application's own problem may have its own ETag."""

    def renderer(problem: Any, policy: Policy) -> Response:
        return Response("lost", headers={"ETag": '"problem"', "Location": "/help", "Link": "</help>; rel=help"})

    again = replayed(TOMBSTONE, policy=Policy(), render=renderer)

    assert [['"problem"'], ["/help"]] == [again.headers.getlist(name) for name in ("ETag", "Location")]
    assert ["</b>; rel=b", "</help>; rel=help"] == again.headers.getlist("Link")


def test_a_retry_finds_the_etag_of_a_resource_whose_response_was_too_large() -> None:
    """The client can change the resource, and notices a change by another client."""
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
def test_a_tombstone_of_a_response_without_a_body_has_none(status: int) -> None:
    again = replayed(StoredResponse(status, kept=False), policy=Policy())

    assert (status, b"", []) == (again.status_code, again.data, again.headers.getlist("Content-Type"))


def test_a_poisoned_store_cannot_split_a_response() -> None:
    for result in (
        StoredResponse(200, metadata=(("ETag", "a\r\nSet-Cookie: b"),)),
        StoredResponse(200, metadata=(("ETag", "a\nb"),)),
        StoredResponse(200, metadata=(("ETag", "a\0b"),)),
        StoredResponse(200, metadata=(("ETag: a\r\nX", "b"),)),
        StoredResponse(200, reason="OK\r\nX: y"),
        StoredResponse(200, reason="日本", kept=False),
    ):
        with pytest.raises(CorruptRecord):
            replayed(result, policy=Policy())


def test_a_field_that_no_response_keeps_is_not_sent_from_the_store() -> None:
    """An attacker wrote to the store. A proxy obeys some of these fields: X-Accel-Redirect sends one of its files."""
    for name, kept in product(
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
            "X-Idempotency-Replay",
        ),
        (True, False),
    ):
        planted = StoredResponse(201, metadata=((name, "/etc/passwd"), ("Location", "/things/7")), kept=kept)
        again = replayed(planted, policy=Policy())

        assert (name in again.headers, "/things/7") == (False, again.headers["Location"]), (name, kept)
        assert "/etc/passwd" not in str(again.headers), (name, kept)


def test_the_present_policy_decides_which_fields_a_replay_carries() -> None:
    """A field that leaves the policy stays stored and is not sent; it is sent if the policy names it again."""
    stored = StoredResponse(200, metadata=(("X-Total", "7"), ("X-Page", "1"), ("x-total", "8")))
    policies = (Policy(keep_headers=frozenset({"X-total"})), Policy())

    assert [["7", "8"], []] == [replayed(stored, policy=policy).headers.getlist("X-Total") for policy in policies]


def test_what_no_server_may_send_is_not_sent_from_the_store() -> None:
    """An interim status keeps the client waiting; the client takes a forbidden body for the next response."""
    for result in (
        StoredResponse(0),
        StoredResponse(100),
        StoredResponse(101),
        StoredResponse(199, kept=False),
        StoredResponse(600),
        StoredResponse(999, kept=False),
        StoredResponse(204, body=b"HTTP/1.1 200 OK"),
        StoredResponse(304, body=b"x"),
    ):
        with pytest.raises(CorruptRecord):
            replayed(result, policy=Policy())


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
    again = replayed(service.result, policy=Policy())
    assert (500, "application/problem+json") == (again.status_code, again.content_type)
