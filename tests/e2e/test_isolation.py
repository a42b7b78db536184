"""Nothing of a caller ever reaches a log, or the name of anything in the store."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.conftest import Serve, keys
from tests.e2e.ledger import Ledger
from tests.e2e.processes import kill
from tests.e2e.service import CASE
from tests.e2e.wire import Order, Wire, ask, ask_until_settled, message

OURS = re.compile(
    rb"idm1:\{p[0-9a-f]{4}\}:(?:[izmw]|[rcgs]:[A-Za-z0-9_-]{43}|[fqkea]:[A-Za-z0-9_-]{22})"
    rb"|idm1:\{tasks\}:(?:n|l:identity:[0-9a-f]{12})"
)
"""The only keys that we may make in a Redis: a format, a partition, and a keyed digest of a record or of a tenant, or a
token; and the book of tasks, in which the application is named by a digest."""


@pytest.fixture
def monitor(store: RedisServer) -> Iterator[socket.socket]:
    """Hears every command that the store is sent."""
    with socket.create_connection(("127.0.0.1", store.port), timeout=60) as connection:
        connection.sendall(b"MONITOR\r\n")
        assert connection.recv(5) == b"+OK\r\n"
        yield connection


def heard(monitor: socket.socket) -> bytes:
    """Everything so far. The store monitors what is said on this connection, too, so that says when all is read."""
    monitor.sendall(b"ECHO that-is-all\r\n")
    commands = b""
    while b"$11\r\nthat-is-all\r\n" not in commands and b'"that-is-all"' not in commands:
        commands += monitor.recv(65536)
    return commands


CANARIES = {what: f"canary-{what}-5db3c1" for what in ("key", "principal", "tenant", "body", "quoted", "bad")}


@pytest.mark.slow
def test_66_nothing_that_a_client_sent_is_in_a_log_or_a_name(
    serve_once: Serve, store: RedisServer, ledger: Ledger, monitor: socket.socket
) -> None:
    """
    In a whole run of successes, refusals, crashes and outages, at the most talkative log level: no key, no principal, no
    tenant, no body in the log, none in the name of anything in the store, and no key or body in the store at all.
    """
    server = serve_once(lease=1)
    everything_that_can_happen(server.port, ledger)
    commands = heard(monitor)
    names = keys(store)
    store.pause()
    try:
        refused = ask(server.port, canary().attempt())
    finally:
        store.resume()

    assert refused.told == (503, "store-unavailable")
    log = server.log
    for expected in ("POST /plain", "DEBUG", " 500 ", " 503 ", " 422 ", " 409 ", "there is no such step"):
        assert expected in log
    assert {what: log.count(text) for what, text in CANARIES.items()} == dict.fromkeys(CANARIES, 0)
    assert names
    assert [name for name in names if not OURS.fullmatch(name)] == []
    # Scripts tell their keys apart from the rest: they are as many as the number before them says.
    calls = re.findall(rb'"EVALSHA" "[0-9a-f]{40}" "(\d+)"((?: "[^"]*")*)', commands)
    named = [name for count, rest in calls for name in re.findall(rb'"([^"]*)"', rest)[: int(count)]]
    about_records = [count for count, _ in calls if int(count) > 1]
    assert len(named) >= 4 * len(about_records) > 0
    assert [name for name in named if not OURS.fullmatch(name)] == []
    stored = {what: commands.count(CANARIES[what].encode()) for what in ("key", "body", "quoted", "bad")}
    assert stored == dict.fromkeys(stored, 0)


def canary(path: str = "/plain", number: int = 0) -> Order:
    """A request that can be told wherever a piece of it turns up."""
    return Order(
        path,
        key=f"{CANARIES['key']}-{number}",
        body=b'{"note": "%s"}' % CANARIES["body"].encode(),
        headers=(("Authorization", f"Bearer {CANARIES['tenant']}/{CANARIES['principal']}"),),
    )


def everything_that_can_happen(port: int, ledger: Ledger) -> None:
    """One of each: what is answered, and what goes wrong."""
    order = canary()
    assert ask(port, order.attempt()).status == 201
    assert ask(port, order.attempt()).replayed
    assert ask(port, replace(order, body=b"other").attempt()).told == (422, "key-reused")
    assert ask(port, replace(order, key=f'"{CANARIES["quoted"]}"').attempt()).status == 201
    assert ask(port, replace(order, key=f'"{CANARIES["bad"]}').attempt()).told == (400, "invalid-key")
    assert ask(port, canary(number=1).attempt("status:503")).status == 503
    assert ask(port, canary(number=2).attempt("no-such-step")).status == 500
    assert ask(port, canary("/form", number=3).attempt()).status == 200
    with Wire(port) as wire:
        headers = [("Idempotency-Key", f"{CANARIES['key']}-4"), (CASE, "cut"), ("Content-Length", "1000")]
        wire.send(message("POST", "/plain", headers, None) + CANARIES["body"].encode()).half_close()
        assert wire.answer().told == (400, "truncated-body")
    for number, path in enumerate(("/plain", "/deduplicated"), start=5):
        killed = canary(path, number)
        with Wire(port) as wire:
            wire.send(killed.attempt("pause"))
            worker = ledger.paused(killed.case)
            assert ask(port, killed.attempt()).told == (409, "in-flight")
            kill(worker)
            assert wire.ended()
        assert ask_until_settled(port, killed.attempt()).status in (201, 409)
    large = canary(number=7)
    assert ask(port, large.attempt("size:300000")).status == 201
    assert ask(port, large.attempt()).told == (201, "response-not-kept")
