from __future__ import annotations

from collections import deque

import pytest
from werkzeug.wrappers import Response

from flask_idempotency.engine.policy import Policy
from flask_idempotency.web.responses import capture, kept_headers


@pytest.mark.parametrize(
    "name",
    (
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
        "etag",
        "LOCATION",
        "X-Total",
    ),
)
def test_fields_of_the_answer_are_kept(name: str) -> None:
    policy = Policy(keep_headers=frozenset({"x-Total"}))

    assert ((name, "1"), (name, "2")) == kept_headers([(name, "1"), ("X-Other", "3"), (name, "2")], policy)


@pytest.mark.parametrize(
    "name",
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
        "X-Anything-Else",
        "set-COOKIE",
    ),
)
@pytest.mark.parametrize("named", (False, True))
def test_fields_of_the_exchange_are_not_kept_even_when_a_policy_names_them(name: str, named: bool) -> None:
    policy = Policy(keep_headers=frozenset({name}) if named and name != "X-Anything-Else" else frozenset())

    assert () == kept_headers([(name, "1")], policy)


def test_fields_named_in_connection_are_not_kept() -> None:
    headers = [("ETag", "1"), ("Connection", "close, etag"), ("Link", "2"), ("connection", "Link"), ("Vary", "3")]

    assert (("Vary", "3"),) == kept_headers(headers, Policy())


@pytest.mark.parametrize("value", ("a\rb", "a\nSet-Cookie: b", "a\0", "\ud800", "日本"))
def test_a_value_that_no_header_may_hold_is_not_stored(value: str) -> None:
    response = Response("paid", headers={"Location": "/payments/1"})
    response.headers._list.append(("ETag", value))  # Werkzeug refuses some of them itself
    taken = capture(response, Policy(), on_end=lambda end: None, abandoned=deque())

    assert taken.result is not None
    assert not taken.result.kept
    assert [("Location", "/payments/1")] == [pair for pair in taken.result.metadata if pair[0] != "Content-Type"]


def test_a_harmful_field_that_is_not_kept_harms_nobody() -> None:
    assert () == kept_headers([("X-Other", "a\nb")], Policy())
