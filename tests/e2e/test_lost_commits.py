"""A COMMIT that breaks off on its way there, on its way back, or arrives after its sender was given up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import make_url

from example_app.demo.servers import RedisServer
from flask_idempotency.testing.proxy import TcpProxy
from tests.e2e.books import Books
from tests.e2e.conftest import Serve, keys
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Server
from tests.e2e.purchases import Purchase, assert_paid_once
from tests.e2e.shop import APPLICATION
from tests.lab.postgres import PostgresServer

COMMIT = b"COMMIT\0"
"""As it is written on the wire. Records commit by themselves, so nothing but a session of the application's says it."""


@pytest.fixture
def books(postgres_server: PostgresServer) -> Iterator[Books]:
    with postgres_server.database() as name:
        books = Books(postgres_server.url(name))
        yield books
        books.close()


@pytest.fixture
def line(postgres_server: PostgresServer) -> Iterator[TcpProxy]:
    """The only way to the database that the shop has."""
    with TcpProxy(postgres_server.port, marker=COMMIT) as line:
        yield line


@pytest.fixture
def shop(books: Books, line: TcpProxy, store: RedisServer, serve_once: Serve) -> Server:
    url = make_url(books.url).set(port=line.port).render_as_string(hide_password=False)
    return serve_once(url, app=APPLICATION, config={"IDEMPOTENCY_REDIS_URL": store.url})


@pytest.fixture
def earlier(shop: Server) -> Purchase:
    """Something else: SQLAlchemy asks psycopg what it wants to know at first, and that commits as well."""
    purchase = Purchase()
    purchase.pay(shop.port)
    return purchase


def test_26_a_commit_whose_reply_was_lost_is_answered_as_if_nothing_had_happened(
    shop: Server, line: TcpProxy, books: Books, ledger: Ledger, earlier: Purchase
) -> None:
    """
    PostgreSQL has committed and cannot say so: the record does. The client gets its 201, and retries get the same.
    """
    purchase, commits = Purchase(), line.requests
    line.lose_reply()
    answer = purchase.attempt(shop.port)

    assert line.requests == commits + 1
    assert answer is not None
    assert (answer.status, answer.replayed) == (201, False)
    assert ledger.runs(purchase.order.case) == 1
    assert_paid_once(books, shop.port, [earlier, purchase])


def test_26_a_commit_that_never_arrived_is_asked_for_again(
    shop: Server, line: TcpProxy, books: Books, store: RedisServer, ledger: Ledger, earlier: Purchase
) -> None:
    """Nothing was committed, so the client is told to try again; nothing was cached either, and the retry runs."""
    purchase, cached = Purchase(), keys(store)
    line.lose_request()
    refused = purchase.attempt(shop.port)
    left = set(books.payments()), keys(store)
    again = purchase.attempt(shop.port)

    assert refused is not None
    assert refused.told == (503, "transaction-conflict")
    assert left == ({earlier.order.case}, cached)
    assert again is not None
    assert (again.status, again.replayed) == (201, False)
    assert ledger.runs(purchase.order.case) == 2
    assert len(keys(store)) == 2
    assert_paid_once(books, shop.port, [earlier, purchase])


def test_26_a_commit_that_arrives_when_its_client_was_told_to_try_again_still_counts(
    shop: Server, line: TcpProxy, books: Books, ledger: Ledger, earlier: Purchase
) -> None:
    """
    Nobody can say what becomes of a COMMIT that is still under way: nobody pays again before it is known, nor after.
    """
    purchase = Purchase()
    line.delay_request()
    told = [purchase.attempt(shop.port), purchase.attempt(shop.port)]
    rows = set(books.payments())
    line.deliver()
    answer = purchase.pay(shop.port)

    assert [answer and answer.told for answer in told] == [(503, "store-unavailable"), (409, "in-flight")]
    assert rows == {earlier.order.case}
    assert answer.replayed
    assert ledger.runs(purchase.order.case) == 1
    assert_paid_once(books, shop.port, [earlier, purchase])
