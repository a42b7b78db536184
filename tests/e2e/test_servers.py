"""What must hold on every server that people run Flask under: streams, hung-up clients, time-outs, cut-off bodies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.testing import TcpProxy
from tests.e2e.conftest import Serve, keys
from tests.e2e.ledger import Ledger
from tests.e2e.processes import KINDS, Kind, Server
from tests.e2e.wire import Order, Wire, ask, ask_until_settled, message

LIMIT = 256 * 1024
"""The default `max_body`."""

END_MARKER = b"0\r\n\r\n"
"""The chunk of no bytes that says that all have come."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def server(serve: Serve, kind: Kind) -> Server:
    # A sync worker does one thing at a time, and a test wants to ask while another request runs.
    return serve(kind=kind, workers=2 if kind == "sync" else 1)


def test_48_first_chunk_of_a_stream_leaves_at_once(server: Server, ledger: Ledger) -> None:
    """
    A stream's first chunk arrives before its second is made; meanwhile a retry is refused, and afterwards gets it whole.
    """
    order = Order("/stream")
    with Wire(server.port) as wire:
        answer = wire.send(order.attempt()).head()
        first = answer.readline()
        ledger.paused(order.case)
        refused = ask(server.port, order.attempt())
        ledger.let_go(order.case)
        rest = answer.read()
    again = ask_until_settled(server.port, order.attempt())

    assert first == b"first\n"
    assert refused.told == (409, "in-flight")
    assert (again.status, again.replayed, again.body) == (200, True, first + rest)
    assert ledger.runs(order.case) == 1


def test_48_a_stream_is_stored_before_its_end_is_told(
    serve_once: Serve, kind: Kind, proxy: TcpProxy, ledger: Ledger
) -> None:
    """
    A client that knows a stream to be complete can rely on it: while the store has not heard of it, the end is not told.
    """
    server = serve_once(proxy.url, kind=kind)
    order = Order("/stream")
    with Wire(server.port) as wire:
        wire.send(order.attempt()).until(b"first\n")
        ledger.paused(order.case)
        proxy.hold_requests()
        ledger.let_go(order.case)
        body = wire.until(b"second\n")
        proxy.caught()
        body += wire.so_far()
        proxy.release()
        end = wire.until(END_MARKER)

    # Behind the second line came what tells one run from another, and nothing else.
    assert re.search(rb"second\n\r\n20\r\n[0-9a-f]{32}(\r\n)?$", body)
    assert end.lstrip() == END_MARKER.lstrip()
    assert ask(server.port, order.attempt()).replayed


def test_48_a_body_of_announced_length_is_stored_before_its_last_byte(
    serve_once: Serve, kind: Kind, proxy: TcpProxy, ledger: Ledger
) -> None:
    """
    No end marker follows a body whose length was announced: some of it is held back until the store has all of it.
    """
    server = serve_once(proxy.url, kind=kind)
    order = Order("/stream")
    with Wire(server.port) as wire:
        received = wire.send(order.attempt("sized")).until(b"first\n")
        ledger.paused(order.case)
        proxy.hold_requests()
        ledger.let_go(order.case)
        received += wire.until(b"second\n")
        proxy.caught()
        received += wire.so_far()
        head, _, body = received.partition(b"\r\n\r\n")
        proxy.release()
        rest = wire.exactly(45 - len(body))

    assert b"Content-Length: 45" in head.split(b"\r\n")
    assert len(rest) > 0
    assert ask(server.port, order.attempt()).body == body + rest


def test_49_stream_that_its_client_left_is_never_an_empty_replay(serve: Serve, kind: Kind, ledger: Ledger) -> None:
    """When the client hangs up in mid-stream the view is told, and retries learn that the body was not kept."""
    # So much may be kept that size is no reason not to.
    server = serve(kind=kind, config={"IDEMPOTENCY_MAX_BODY": 2**30})
    order = Order("/stream")
    wire = Wire(server.port).send(order.attempt("flood"))
    wire.head().readline()
    ledger.paused(order.case)
    wire.reset()
    ledger.let_go(order.case)
    ledger.awaited("closed", order.case)

    again = ask_until_settled(server.port, order.attempt())

    assert again.told == (200, "response-not-kept")
    assert again.replayed
    assert ledger.runs(order.case) == 1


def test_74_answer_survives_a_client_that_hung_up(server: Server, ledger: Ledger) -> None:
    """The client resets its connection while the view runs: the view ends, and the retry gets its answer."""
    order = Order("/plain")
    wire = Wire(server.port).send(order.attempt("pause", "effect"))
    worker = ledger.paused(order.case)
    wire.reset()
    ledger.let_go(order.case)

    again = ask_until_settled(server.port, order.attempt("effect"))

    assert (again.status, again.replayed, again.json["pid"]) == (201, True, worker)
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (1, 1)


@pytest.mark.parametrize("size", [LIMIT - 1000, LIMIT + 1])
def test_53_file_is_replayed_or_leaves_a_tombstone(server: Server, ledger: Ledger, tmp_path: Path, size: int) -> None:
    """
    A file goes out whole whatever its size; one above the limit is not kept, and never sent or made a second time.
    """
    path = tmp_path / "statement"
    path.write_bytes(b"x" * size)
    order = Order("/file", headers=(("X-File", str(path)),))

    first, again = ask(server.port, order.attempt()), ask(server.port, order.attempt())

    assert (first.status, len(first.body), first.replayed) == (200, size, False)
    assert again.told == (200, "response-not-kept" if size > LIMIT else None)
    assert again.replayed
    assert ledger.runs(order.case) == 1
    if size <= LIMIT:
        assert again.body == first.body


def test_59_body_shorter_than_announced_is_refused(server: Server, store: RedisServer, ledger: Ledger) -> None:
    """
    A body that was cut off is answered with 400 where the server lets the application answer; nothing is claimed or run.
    """
    order = Order("/plain")
    headers = (("Idempotency-Key", order.key), ("X-Case", order.case), ("Content-Length", "1000"))
    with Wire(server.port) as wire:
        wire.send(message("POST", "/plain", headers, None) + b"abc").half_close()
        # Waitress waits for whole bodies: the application never hears of this one.
        if server.plan.kind == "waitress":
            assert wire.ended()
        else:
            assert wire.answer().told == (400, "truncated-body")

    assert ledger.runs(order.case) == 0
    assert keys(store) == []


@pytest.mark.parametrize("body", [b"5\r\nab", b"5\r\nabcde\r\n", b"not a size\r\nabc\r\n0\r\n\r\n"])
def test_59_broken_chunked_body_is_refused(server: Server, store: RedisServer, ledger: Ledger, body: bytes) -> None:
    """A chunked body that ends early or is garbled claims nothing and runs nothing, and its key is as good as new."""
    order = Order("/plain")
    headers = (("Idempotency-Key", order.key), ("X-Case", order.case), ("Transfer-Encoding", "chunked"))
    with Wire(server.port) as wire:
        wire.send(message("POST", "/plain", headers, None) + body).half_close()
        # A server may refuse it by itself, in its own words or without one. Gunicorn's error for a garbled size is a 500
        # in any Flask application.
        told = None if wire.ended() else wire.answer().told

    assert told in (None, (400, None), (400, "truncated-body"), (500, None))
    assert ledger.runs(order.case) == 0
    assert keys(store) == []
    assert ask(server.port, order.attempt()).status == 201


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "step", "path", "told"),
    [
        ("sync", "pause", "/plain", (409, "outcome-unknown")),
        ("sync", "pause", "/deduplicated", (201, None)),
        ("sync", "spin", "/plain", (409, "outcome-unknown")),
        ("gevent", "spin", "/plain", (409, "outcome-unknown")),
    ],
    indirect=["kind"],
)
def test_75_view_ended_by_the_servers_timeout_follows_its_policy(
    serve: Serve, kind: Kind, ledger: Ledger, step: str, path: str, told: tuple[int, str | None]
) -> None:
    """
    A worker that is told to stop in mid-view settles its claim in its last second, long before the lease would end.
    """
    server = serve(
        kind=kind, workers=2, lease=600, config={"IDEMPOTENCY_MAX_RUNTIME": 600}, arguments=("--timeout", "1")
    )
    order = Order(path)
    with Wire(server.port) as wire:
        wire.send(order.attempt(step))
        ledger.paused(order.case)

        assert ask_until_settled(server.port, order.attempt()).told == told
