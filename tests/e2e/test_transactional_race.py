"""Duplicates of a payment that arrive together, by every way to take a claim, and through a pooler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from threading import Barrier
from typing import Any, TypeAlias

import pytest

from tests.e2e.books import Books
from tests.e2e.conftest import Figures, Serve
from tests.e2e.ledger import PATIENCE_SECONDS, Ledger
from tests.e2e.purchases import Purchase, assert_paid_once
from tests.e2e.shop import APPLICATION
from tests.e2e.wire import Answer, Wire
from tests.lab.pgbouncer import StartPgBouncer
from tests.lab.postgres import PostgresServer
from tests.long import unless_long

SERVERS = 2
WORKERS = 2
"""Of each server. A kernel may give all connections of one to the same worker, so there are two servers."""

CLIENTS = 32
ROUNDS = unless_long(15, long=40)
POOL_SIZE = 4

# As many as there are threads; and what every user of psycopg has to say who is behind such a pooler.
ENGINE = {"pool_size": CLIENTS // SERVERS, "connect_args": {"prepare_threshold": None}}

LOCKS_OF_SESSIONS = """
    SELECT count(*) FROM pg_locks
    WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

Race: TypeAlias = Callable[..., None]


@pytest.fixture
def race(serve_once: Serve, ledger: Ledger, figures: Figures) -> Iterator[Race]:
    """So many rounds of it, in the shop of these books: one execution each, and one answer for all."""
    with ExitStack() as ends:

        def race(books: Books, strategy: str, url: str | None = None) -> None:
            config: dict[str, Any] = {"IDEMPOTENCY_CLAIM_STRATEGY": strategy}
            if books.url.startswith("postgresql"):
                config["SQLALCHEMY_ENGINE_OPTIONS"] = ENGINE
            plan: dict[str, Any] = {"workers": WORKERS, "threads": CLIENTS // SERVERS, "arguments": ("--preload",)}
            shops = [serve_once(url or books.url, app=APPLICATION, config=config, **plan) for _ in range(SERVERS)]
            wires = [ends.enter_context(Wire(shops[number % SERVERS].port)) for number in range(CLIENTS)]
            purchases = [Purchase() for _ in range(ROUNDS)]
            run(wires, purchases)

            figures(**Counter(f"{answer.status} {answer.code}" for buy in purchases for answer in buy.answers))
            assert [ledger.runs(buy.order.case) for buy in purchases] == [1] * ROUNDS
            assert {len(buy.paid) for buy in purchases} == {CLIENTS}
            assert {told for buy in purchases for told in buy.refusals} == {(409, "in-flight")}
            assert {sum(not answer.replayed for answer in buy.paid) for buy in purchases} == {1}
            assert_paid_once(books, shops[0].port, purchases)

        yield race


def run(wires: list[Wire], purchases: list[Purchase]) -> None:
    """All clients ask at the same moment; those who were refused ask again when all have been told something."""
    together = Barrier(CLIENTS)

    def send(wire: Wire, attempt: bytes) -> Answer:
        together.wait(PATIENCE_SECONDS)
        return wire.send(attempt).answer()

    with ThreadPoolExecutor(CLIENTS) as clients:
        for purchase in purchases:
            attempt = purchase.order.attempt()
            told = list(clients.map(send, wires, [attempt] * CLIENTS))
            refused = [wire for wire, answer in zip(wires, told, strict=True) if answer.status != 201]
            purchase.answers += [*told, *(wire.send(attempt).answer() for wire in refused)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("books", "strategy"),
    [
        ("postgresql", "insert"),
        ("postgresql", "row_lock"),
        ("postgresql", "advisory"),
        ("mariadb", "insert"),
        ("mariadb", "row_lock"),
        ("sqlite", "insert"),
    ],
    indirect=["books"],
)
def test_1_duplicates_that_arrive_together_pay_once(race: Race, books: Books, strategy: str) -> None:
    """
    Of 32 duplicates at several processes one runs; the others are told so or get its answer, and in the end all have it.
    """
    race(books, strategy)

    if books.url.startswith("postgresql"):
        assert books.ask(LOCKS_OF_SESSIONS) == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["insert", "advisory"])
def test_31_duplicates_behind_a_pooler_pay_once(
    race: Race, postgres_server: PostgresServer, start_pgbouncer: StartPgBouncer, strategy: str
) -> None:
    """The same where 32 clients share four connections to PostgreSQL, and get another one for every transaction."""
    pooler = start_pgbouncer(postgres_server, pool_size=POOL_SIZE)
    with postgres_server.database() as name, closing(Books(postgres_server.url(name))) as books:
        race(books, strategy, pooler.url(name))

        assert books.ask(LOCKS_OF_SESSIONS) == 0
