"""A database killed, frozen, or ending our sessions, under load and in mid-view: what was told stays true."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.books import Books
from tests.e2e.conftest import Figures, Serve
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Server
from tests.e2e.purchases import Crowd, Purchase, assert_paid_once
from tests.e2e.shop import APPLICATION
from tests.e2e.wire import Wire
from tests.lab.mariadb import MariaDbServer, StartMariaDb
from tests.lab.postgres import PostgresServer, StartPostgres

CRASHES = 8
CLIENTS = 6


@pytest.fixture(params=("postgresql", "mariadb"))
def postgres(request: pytest.FixtureRequest) -> PostgresServer | MariaDbServer:
    start: StartPostgres | StartMariaDb = request.getfixturevalue(
        "start_postgres" if request.param == "postgresql" else "start_mariadb"
    )
    return start()


@pytest.fixture
def books(postgres: PostgresServer | MariaDbServer) -> Iterator[Books]:
    postgres.create_database("shop")
    books = Books(postgres.url("shop"))
    yield books
    books.close()


@pytest.fixture
def shop(books: Books, serve_once: Serve) -> Server:
    return serve_once(books.url, app=APPLICATION, workers=2, threads=CLIENTS, lease=0.5, arguments=("--preload",))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_24_nothing_that_was_told_is_lost_in_a_crash(
    shop: Server, postgres: PostgresServer | MariaDbServer, books: Books, ledger: Ledger, figures: Figures
) -> None:
    """
    While PostgreSQL is down nothing runs; when it is back the same workers go on, and what was paid was paid once.
    """

    def buy() -> Purchase:
        purchase = Purchase()
        purchase.pay(shop.port)
        return purchase

    crowd, early = Crowd(CLIENTS, buy), []
    for _ in range(CRASHES):
        crowd.buys(30)
        crowd.wait(random.uniform(0, 0.02))
        postgres.kill()
        early.append(Purchase())
        refused = early[-1].attempt(shop.port)
        postgres.restart()

        assert refused is not None
        assert refused.told == (503, "store-unavailable")
        assert ledger.runs(early[-1].order.case) == 0
    crowd.buys(30)
    purchases = [*crowd.stop(), *early]
    for purchase in early:
        purchase.pay(shop.port)

    ran_again = sum(ledger.runs(purchase.order.case) > 1 for purchase in purchases)
    figures(crashes=CRASHES, purchases=len(purchases), ran_again=ran_again)
    assert ran_again > 0
    assert_paid_once(books, shop.port, purchases)
    # A 500 is the view's own: it could not connect, between its claim and its first row.
    assert set().union(*(purchase.refusals for purchase in purchases)) <= {
        (409, "in-flight"),
        (500, None),
        (503, "store-unavailable"),
        (503, "transaction-conflict"),
    }
    assert sum(purchase.lost for purchase in purchases) == 0


def test_24_a_silent_database_is_not_waited_for_and_nothing_runs_twice(
    shop: Server, postgres: PostgresServer | MariaDbServer, books: Books, ledger: Ledger
) -> None:
    """
    PostgreSQL stops answering for longer than a lease: who asks for a claim is refused after five seconds; who is in its
    view waits until it is back, as it would without us, and its retries do not pay again.
    """
    first, other = Purchase(), Purchase()
    with Wire(shop.port) as wire, ThreadPoolExecutor(3) as clients:
        wire.send(first.order.attempt("pause:flushed"))
        ledger.paused(first.order.case)
        postgres.pause()
        told = list(clients.map(lambda purchase: purchase.attempt(shop.port), [other, first, other]))
        ledger.let_go(first.order.case)
        retries = [clients.submit(purchase.pay, shop.port) for purchase in (first, other)]
        postgres.resume()
        first.answers.append(wire.answer())
        for retry in retries:
            retry.result()

    assert [answer and answer.told for answer in told] == [(503, "store-unavailable")] * 3
    assert ledger.runs(other.order.case) == 1
    assert_paid_once(books, shop.port, [first, other])


@pytest.mark.parametrize("in_mid_view", [True, False])
def test_27_a_session_that_the_database_ends_in_mid_view_is_paid_by_the_retry(
    shop: Server, books: Books, ledger: Ledger, in_mid_view: bool
) -> None:
    """Its commit fails, its client is asked to try again, its key is free at once, and the retry runs: one row."""
    purchase = Purchase()
    with Wire(shop.port) as wire:
        wire.send(purchase.order.attempt("pause:flushed"))
        ledger.paused(purchase.order.case)
        ended = books.end_sessions(in_mid_view=in_mid_view)
        ledger.let_go(purchase.order.case)
        told = wire.answer().told
    again = purchase.attempt(shop.port)

    assert ended > 0
    assert told == (503, "transaction-conflict")
    assert again is not None
    assert (again.status, again.replayed) == (201, False)
    assert ledger.runs(purchase.order.case) == 2
    assert_paid_once(books, shop.port, [purchase])
