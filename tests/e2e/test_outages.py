"""A store that is gone, or silent, at the worst moments."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.conftest import Serve
from tests.e2e.ledger import PATIENCE_SECONDS, Ledger
from tests.e2e.wire import Answer, Order, Wire, ask
from tests.forgiving import look_at, make_ready
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import StartRedis


@pytest.fixture
def frail(start_redis: StartRedis) -> RedisServer:
    """A store to break, which remembers what it has acknowledged."""
    return start_redis(REDIS_KINDS[0], "--appendonly", "yes", "--appendfsync", "always")


@pytest.mark.parametrize(
    "fail",
    [pytest.param(RedisServer.kill, id="gone"), pytest.param(RedisServer.pause, id="silent")],
)
def test_a32_without_a_store_nothing_is_run(
    serve_once: Serve,
    frail: RedisServer,
    ledger: Ledger,
    fail: Callable[[RedisServer], None],
) -> None:
    """Nobody can tell whether it has been done before: 503 with Retry-After, soon, and the view is not entered."""
    server = serve_once(frail)
    ask(server.port, Order("/plain").attempt())
    order = Order("/plain")
    fail(frail)

    # Its client hears of it before its own patience ends.
    refused = ask(server.port, order.attempt())

    assert refused.told == (503, "store-unavailable")
    assert refused.header("Retry-After") == "2"
    assert ledger.runs(order.case) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "mend"),
    [
        pytest.param(RedisServer.kill, RedisServer.restart, id="gone"),
        pytest.param(RedisServer.pause, RedisServer.resume, id="silent"),
    ],
)
def test_p59_store_that_fails_in_mid_view_costs_no_answer_and_no_second_run(
    serve_once: Serve,
    frail: RedisServer,
    ledger: Ledger,
    fail: Callable[[RedisServer], None],
    mend: Callable[[RedisServer], None],
) -> None:
    """
    The work is done: its caller gets the real answer. Retries never run; when the store is back, they get that answer too.
    """
    server = serve_once(frail)
    order = Order("/plain")
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause", "effect"))
        ledger.paused(order.case)
        fail(frail)
        ledger.let_go(order.case)
        answer = wire.answer()

    refused = ask(server.port, order.attempt("effect"))
    mend(frail)
    again = until_told_otherwise(server.port, order.attempt("effect"))

    assert (answer.status, answer.replayed) == (201, False)
    assert refused.told == (503, "store-unavailable")
    assert (again.status, again.replayed, again.body) == (201, True, answer.body)
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (1, 1)


def test_p59_outage_that_outlasts_the_lease_ends_with_the_real_answer(
    serve_once: Serve, frail: RedisServer, ledger: Ledger
) -> None:
    """
    The store comes back after the lease has ended: a retry may be told that nobody knows, until the write is repeated.
    """
    server = serve_once(frail, lease=1)
    order = Order("/plain")
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause", "effect"))
        ledger.paused(order.case)
        frail.kill()
        until = time.monotonic() + 1.5
        ledger.let_go(order.case)
        answer = wire.answer()
    while time.monotonic() < until:
        assert ask(server.port, order.attempt("effect")).status == 503
    frail.restart()
    again = until_told_otherwise(server.port, order.attempt("effect"), "outcome-unknown")

    assert (again.status, again.replayed, again.body) == (201, True, answer.body)
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (1, 1)


def until_told_otherwise(port: int, data: bytes, *than: str) -> Answer:
    """Ask again while the store has not been told yet, or cannot be asked."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (answer := ask(port, data)).code in ("in-flight", "store-unavailable", *than):
        assert time.monotonic() < deadline, f"still {answer.code}"
        time.sleep(0.02)
    return answer


def test_service_starts_without_its_store(serve_once: Serve, frail: RedisServer, ledger: Ledger) -> None:
    """A store that is away when the service starts is no reason not to: keyed requests get 503 until it is there."""
    make_ready(frail.url)
    frail.kill()
    server = serve_once(frail)
    order = Order("/plain")
    refused = ask(server.port, order.attempt())
    frail.restart()
    look_at(frail.url)

    assert refused.told == (503, "store-unavailable")
    assert ask(server.port, order.attempt()).status == 201
    assert ledger.runs(order.case) == 1
