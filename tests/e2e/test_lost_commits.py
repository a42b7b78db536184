"""A COMMIT that breaks off on its way there, on its way back, or arrives after its sender was given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from tests.e2e.wire import Answer, Wire
from tests.lab.mariadb import MariaDbServer
from tests.lab.postgres import PostgresServer

COMMITS = {"postgresql": b"COMMIT\0", "mariadb": b"\3COMMIT"}
"""As it is written on the wire. On MariaDB a claim says it as well, before the view."""


@pytest.fixture(params=COMMITS)
def database(request: pytest.FixtureRequest) -> PostgresServer | MariaDbServer:
    server: PostgresServer | MariaDbServer = request.getfixturevalue(
        "postgres_server" if request.param == "postgresql" else "mariadb_server"
    )
    return server


@pytest.fixture
def books(database: PostgresServer | MariaDbServer) -> Iterator[Books]:
    with database.database() as name:
        books = Books(database.url(name))
        yield books
        books.close()


@pytest.fixture
def line(database: PostgresServer | MariaDbServer) -> Iterator[TcpProxy]:
    """The only way to the database that the shop has."""
    marker = COMMITS["mariadb" if isinstance(database, MariaDbServer) else "postgresql"]
    with TcpProxy(database.port, marker=marker) as line:
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


def attempt(purchase: Purchase, shop: Server, ledger: Ledger, before_commit: Callable[[], None]) -> Answer:
    """Attempt it, and do this when its rows are written and not committed."""
    with Wire(shop.port) as wire:
        wire.send(purchase.order.attempt("pause:flushed"))
        ledger.paused(purchase.order.case)
        before_commit()
        ledger.let_go(purchase.order.case)
        purchase.answers.append(wire.answer())
    return purchase.answers[-1]


def test_26_a_commit_whose_reply_was_lost_is_answered_as_if_nothing_had_happened(
    shop: Server, line: TcpProxy, books: Books, ledger: Ledger, earlier: Purchase
) -> None:
    """
    The database has committed and cannot say so: the record does. The client gets its 201, and retries get the same.
    """
    purchase, commits = Purchase(), list[int]()

    def lose() -> None:
        commits.append(line.requests)
        line.lose_reply()

    answer = attempt(purchase, shop, ledger, lose)

    assert line.requests > commits[0]
    assert (answer.status, answer.replayed) == (201, False)
    assert ledger.runs(purchase.order.case) == 1
    assert_paid_once(books, shop.port, [earlier, purchase])


def test_26_a_commit_that_never_arrived_is_asked_for_again(
    shop: Server, line: TcpProxy, books: Books, store: RedisServer, ledger: Ledger, earlier: Purchase
) -> None:
    """Nothing was committed, so the client is told to try again; nothing was cached either, and the retry runs."""
    purchase, cached = Purchase(), keys(store)
    refused = attempt(purchase, shop, ledger, line.lose_request)
    left = set(books.payments()), keys(store)
    again = purchase.attempt(shop.port)

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
    told = [attempt(purchase, shop, ledger, line.delay_request), purchase.attempt(shop.port)]
    rows = set(books.payments())
    line.deliver()
    answer = purchase.pay(shop.port)

    assert [answer and answer.told for answer in told] == [(503, "store-unavailable"), (409, "in-flight")]
    assert rows == {earlier.order.case}
    assert answer.replayed
    assert ledger.runs(purchase.order.case) == 1
    assert_paid_once(books, shop.port, [earlier, purchase])
