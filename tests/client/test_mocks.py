"""The transports under the mocks that people use in their tests: the real packages."""

from __future__ import annotations

import gzip
from pathlib import Path

import httpx
import pytest
import requests
import responses
import vcr  # type: ignore[import-untyped]

from flask_idempotency.client import OutcomeUnknown, Retries
from flask_idempotency.client.httpx import IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter
from tests.client.conftest import EACH
from tests.client.scripted import Caller, Clock, ScriptedServer, reply

JSON = {"amount": 5}
CHUNKED = (
    b"HTTP/1.1 201 X\r\nConnection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'4\r\n{"id\r\n5\r\n": 1}\r\n0\r\n\r\n'
)
ADAPTER = pytest.mark.parametrize("make_caller", ["requests"], indirect=True)
PAYMENTS = "https://shop.example/payments"


@EACH
@pytest.mark.parametrize(
    "answer",
    [reply(), CHUNKED, reply(201, gzip.compress(b'{"id": 1}'), "Content-Encoding: gzip")],
    ids=["with a length", "in chunks", "compressed"],
)
def test_a_cassette_is_recorded_and_played_back(
    server: ScriptedServer, call: Caller, tmp_path: Path, answer: bytes
) -> None:
    server.script = [answer]
    url, cassette = server.url, str(tmp_path / "cassette.yaml")
    # A connection from before must not be used again.
    call("POST", url, json=JSON)
    with vcr.use_cassette(cassette):
        recorded = call("POST", url, json=JSON)
    sent = len(server.seen)
    call("POST", url, json=JSON)
    assert (sent, len(server.seen)) == (2, 3)
    server.close()

    with vcr.use_cassette(cassette, record_mode="none") as tape:
        played = call("POST", url, json=JSON)

    assert tape.play_count == 1
    assert recorded.json() == played.json() == {"id": 1}
    assert recorded.status == played.status == 201


@ADAPTER
def test_connections_are_watched_again_after_a_cassette(server: ScriptedServer, call: Caller, tmp_path: Path) -> None:
    with vcr.use_cassette(str(tmp_path / "cassette.yaml")):
        call("POST", server.url, json=JSON)
    whole = reply()
    server.script = [whole[: whole.index(b"Content-Length")], whole]

    assert call("POST", server.url, json=JSON).json() == {"id": 1}
    assert len(server.seen) == 3


def test_a_cassette_over_https(tmp_path: Path) -> None:
    """The recorder has a class of its own for it."""
    session = requests.Session()
    session.mount("https://", IdempotentAdapter())
    cassette = tmp_path / "cassette.yaml"
    cassette.write_text(
        f"""
interactions:
- request: {{body: null, headers: {{}}, method: POST, uri: {PAYMENTS}}}
  response:
    body: {{string: '{{"id": 1}}'}}
    headers: {{Content-Length: ['9'], Content-Type: [application/json]}}
    status: {{code: 201, message: CREATED}}
version: 1
"""
    )
    with session, vcr.use_cassette(str(cassette), record_mode="none"):
        assert session.post(PAYMENTS, json=JSON, timeout=60).json() == {"id": 1}


@responses.activate
def test_a_mocked_response_needs_a_length(clock: Clock) -> None:
    """Without one it is a reply that was cut in its headers."""
    session = requests.Session()
    session.mount("https://", IdempotentAdapter(retries=Retries(timing=clock.timing())))
    responses.add("POST", PAYMENTS, json={"id": 1}, status=201)
    with pytest.raises(OutcomeUnknown):
        session.post(PAYMENTS, json=JSON, timeout=60)
    assert len({request.request.headers["Idempotency-Key"] for request in responses.calls}) == 1

    responses.reset()
    responses.add("POST", PAYMENTS, body=requests.ConnectionError("lost"))
    responses.add("POST", PAYMENTS, json={"id": 1}, status=201, auto_calculate_content_length=True)
    assert session.post(PAYMENTS, json=JSON, timeout=60).json() == {"id": 1}


def test_a_mock_transport_of_httpx(clock: Clock) -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Idempotency-Key"])
        if len(seen) == 1:
            raise httpx.ReadTimeout("lost")
        return httpx.Response(201, json={"id": 1})

    with httpx.Client(
        transport=IdempotentTransport(httpx.MockTransport(answer), retries=Retries(timing=clock.timing()))
    ) as client:
        assert client.post(PAYMENTS, json=JSON).json() == {"id": 1}
    assert len(seen) == 2
    assert len(set(seen)) == 1
