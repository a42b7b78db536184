"""What a client has been told, the store knows already."""

from __future__ import annotations

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.testing import TcpProxy
from tests.e2e.conftest import Serve
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Kind, Server, kill
from tests.e2e.wire import Order, Wire, ask, ask_until_settled

LEASE = 2.0


def warm_up(server: Server) -> Server:
    """Have its scripts loaded into the store, so that the next thing the store says is an answer."""
    assert ask(server.port, Order("/plain").attempt()).status == 201
    return server


@pytest.mark.parametrize("kind", ["sync", "gthread", "gevent", "waitress"])
def test_a33_no_byte_of_the_answer_leaves_before_it_is_stored(
    serve_once: Serve, kind: Kind, proxy: TcpProxy, ledger: Ledger
) -> None:
    """While the store has not taken the answer, the client gets nothing of it; when it has, all of it."""
    server = warm_up(serve_once(proxy.url, kind=kind))
    order = Order("/plain")
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause", "size:100000"))
        ledger.paused(order.case)
        proxy.hold_requests()
        ledger.let_go(order.case)
        proxy.caught()
        early = not wire.silent()
        proxy.release()
        answer = wire.answer()

    assert not early
    assert answer.status == 201
    assert ask(server.port, order.attempt()).body == answer.body


def test_a33_worker_killed_before_the_store_has_the_answer_has_told_nobody(
    serve_once: Serve, serve: Serve, proxy: TcpProxy, store: RedisServer, ledger: Ledger
) -> None:
    """
    The answer is on its way to the store when its worker dies: the client got no byte, and retries may be told otherwise.
    """
    server, other = warm_up(serve_once(proxy.url, lease=LEASE)), serve(lease=LEASE)
    order = Order("/plain")
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause"))
        worker = ledger.paused(order.case)
        proxy.hold_requests()
        ledger.let_go(order.case)
        proxy.caught()
        kill(worker)
        told_nobody = wire.ended()
        proxy.cut()

    assert told_nobody
    assert ask_until_settled(other.port, order.attempt()).told == (409, "outcome-unknown")
    assert ledger.runs(order.case) == 1


def test_a33_worker_killed_after_the_store_has_the_answer_has_not_lost_it(
    serve_once: Serve, serve: Serve, proxy: TcpProxy, ledger: Ledger
) -> None:
    """The store has the answer when its worker dies, and the client does not: the retry gets it."""
    server, other = warm_up(serve_once(proxy.url)), serve()
    order = Order("/plain")
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause"))
        worker = ledger.paused(order.case)
        proxy.hold_replies()
        ledger.let_go(order.case)
        proxy.caught()
        kill(worker)
        told_nobody = wire.ended()
        proxy.cut()

    again = ask(other.port, order.attempt())

    assert told_nobody
    assert (again.status, again.replayed, again.json["pid"]) == (201, True, worker)
    assert ledger.runs(order.case) == 1


def test_a10_lost_reply_to_a_claim_is_mended_by_asking_again(
    serve_once: Serve, proxy: TcpProxy, ledger: Ledger
) -> None:
    """
    The store granted the claim and its reply was lost: the same request asks again, and is not told that it is in flight.
    """
    server = warm_up(serve_once(proxy.url))
    order = Order("/plain")
    with Wire(server.port) as wire:
        proxy.hold_replies()
        wire.send(order.attempt("effect"))
        proxy.caught()
        proxy.cut()
        answer = wire.answer()

    assert (answer.status, answer.replayed) == (201, False)
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (1, 1)


def test_a11_lost_reply_to_a_completion_is_as_if_it_had_arrived(
    serve_once: Serve, proxy: TcpProxy, ledger: Ledger
) -> None:
    """The store took the answer and its reply was lost: the client gets the answer, and so do retries."""
    server = warm_up(serve_once(proxy.url))
    order = Order("/plain")
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause"))
        ledger.paused(order.case)
        proxy.hold_replies()
        ledger.let_go(order.case)
        proxy.caught()
        proxy.cut()
        answer = wire.answer()
    again = ask(server.port, order.attempt())

    assert (answer.status, answer.replayed) == (201, False)
    assert (again.status, again.replayed, again.body) == (201, True, answer.body)


@pytest.mark.slow
def test_a12_claim_that_nobody_heard_of_is_given_back(
    serve_once: Serve, serve: Serve, proxy: TcpProxy, ledger: Ledger
) -> None:
    """
    The store granted a claim and could never say so: the client is told 503, the view is not entered, and the key is free
    again as soon as the line is, long before the lease ends.
    """
    server = warm_up(serve_once(proxy.url, lease=600, config={"IDEMPOTENCY_MAX_RUNTIME": 600}))
    other = serve()
    order = Order("/plain")
    with Wire(server.port) as wire:
        proxy.hold_replies()
        refused = wire.send(order.attempt()).answer()
        proxy.cut()

    assert refused.told == (503, "store-unavailable")
    assert ledger.runs(order.case) == 0
    assert ask_until_settled(other.port, order.attempt()).status == 201
    assert ledger.runs(order.case) == 1
