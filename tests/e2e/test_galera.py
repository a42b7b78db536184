"""Three nodes of Galera that are killed and cut off under load, and replies of COMMITs that are lost: all is paid once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import pytest
from sqlalchemy import create_engine, update

from tests.e2e.books import Books
from tests.e2e.conftest import Figures, Serve
from tests.e2e.customers import Customers, judge
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Server
from tests.e2e.purchases import Crowd, Purchase, assert_paid_once
from tests.e2e.shop import APPLICATION, Account
from tests.e2e.test_lost_commits import attempt
from tests.e2e.test_transactional_kills import Doom
from tests.lab.galera import Balancer, GaleraCluster, GaleraNode
from tests.sql_backends import make_tables

pytestmark = pytest.mark.slow

SOAK_SECONDS: Final = float(os.environ.get("CHAOS_SECONDS") or 240)
CLIENTS: Final = 4
TENANTS: Final = 12
LEASE: Final = 1.0
KILLED: Final = 0.1
"""The part of all purchases whose worker is killed at a COMMIT."""
FEW: Final = 10
"""So many purchases go well between two things that happen to a node."""
GUST_SECONDS: Final = 0.3
ASKED_SECONDS: Final = 90.0

REFUSALS: Final = {
    (409, "in-flight"),
    (500, None),
    (503, "store-unavailable"),
    (503, "transaction-conflict"),
}
"""What a transactional view's client may be told besides its answer. A 500 is the view's own: its statement met a conflict, or
found no server."""

LOST: Final = {"reply": "replies lost", "request": "requests lost"}

PLAIN_REFUSALS: Final = {(409, "in-flight"), (409, "outcome-unknown"), (503, "store-unavailable")}


class Weather:
    """Loses requests and replies of COMMITs, and leads the last of the lines to another node, at any moment. `blow` does one
    thing to a node, and returns when all nodes are back."""

    def __init__(self, cluster: GaleraCluster, lines: Sequence[Balancer]) -> None:
        self._cluster = cluster
        self._lines = lines
        self._ended = threading.Event()
        self._gusts = threading.Thread(target=self._lose, daemon=True)
        self.seen = Counter[str]()

    def blow(self, what: str, node: GaleraNode, then: Callable[[GaleraNode], None]) -> None:
        self.seen[what] += 1
        if what == "killed":
            node.kill()
            self._pass(2.0)
        else:
            node.isolate()
            then(node)
        self._cluster.mend()
        self._pass(1.0)

    def _pass(self, at_most: float) -> None:
        self._ended.wait(random.uniform(0, at_most))

    def _lose(self) -> None:
        while not self._ended.wait(random.uniform(0, GUST_SECONDS)):
            match random.choice(("reply", "request", "way")):
                case "reply":
                    random.choice(self._lines).lose_reply()
                    self.seen["reply"] += 1
                case "request":
                    random.choice(self._lines).lose_request()
                    self.seen["request"] += 1
                case _:
                    self._lines[-1].turn_to(random.choice(self._cluster.nodes))
                    self._lines[-1].cut()
                    self.seen["ways turned"] += 1

    def __enter__(self) -> Self:
        self._gusts.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._gusts.join()
        for line in self._lines:
            self.seen.subtract(line.lose_nothing())
        self.seen = Counter({LOST.get(name, name): number for name, number in self.seen.items()})


@pytest.fixture
def name(galera: GaleraCluster) -> Iterator[str]:
    with galera.database() as name:
        yield name


@pytest.fixture
def other_name(galera: GaleraCluster) -> Iterator[str]:
    with galera.database() as name:
        yield name


@pytest.fixture
def lines(galera: GaleraCluster) -> Iterator[list[Balancer]]:
    """One way to each node, and one that changes. Of its server, records and rows may go to different nodes."""
    with ExitStack() as ends:
        lines = [ends.enter_context(Balancer(galera.nodes)) for _ in range(len(galera.nodes) + 1)]
        for line, node in zip(lines, galera.nodes, strict=False):
            line.turn_to(node)
        yield lines


@pytest.fixture
def books(galera: GaleraCluster, name: str) -> Iterator[Books]:
    books = Books(galera.nodes[0].url(name))
    yield books
    books.close()


@pytest.fixture
def doom(ledger: Ledger) -> Iterator[Doom]:
    doom = Doom(ledger, ["claiming", "committing"], longest=0.006)
    yield doom
    doom.close()


def run_shops(
    weather: Weather, galera: GaleraCluster, shops: Sequence[Server], doom: Doom, until: Callable[[int], str]
) -> list[Purchase]:
    """Return what was bought while the weather blew, and what was asked of nodes that were cut off.

    `until` returns what happens to a node next, after so many things. Nothing: it is over.
    """

    def pay(purchase: Purchase, *steps: str) -> Purchase:
        deadline = time.monotonic() + ASKED_SECONDS
        answer = purchase.attempt(random.choice(shops).port, *steps)
        while answer is None or answer.status != 201:
            assert time.monotonic() < deadline, f"not paid in {ASKED_SECONDS} s: {answer}"
            time.sleep(0.02)
            answer = purchase.attempt(random.choice(shops).port)
        return purchase

    def buy() -> Purchase:
        return pay(Purchase(), *([doom.step()] if random.random() < KILLED else []))

    early = list[Purchase]()

    def ask(node: GaleraNode) -> None:
        refused = Purchase()
        early.append(refused)
        answer = refused.attempt(shops[galera.nodes.index(node)].port)
        assert answer is not None
        assert answer.told == (503, "store-unavailable")

    crowd = Crowd(CLIENTS, buy)
    number = 0
    with weather:
        while what := until(number):
            crowd.buys(FEW)
            weather.blow(what, galera.nodes[number % len(galera.nodes)], ask)
            number += 1
        crowd.buys(FEW)
    doom.close()
    purchases = crowd.stop()
    return [*purchases, *map(pay, early)]


def shops_of(serve_once: Serve, lines: Sequence[Balancer], name: str, **plan: object) -> list[Server]:
    return [serve_once(line.url(name), lease=LEASE, name=str(number), **plan) for number, line in enumerate(lines)]


def judge_shops(
    galera: GaleraCluster, books: Books, ledger: Ledger, shops: Sequence[Server], purchases: Sequence[Purchase]
) -> dict[str, object]:
    galera.mend()
    for shop in shops:
        # By each node: what was told is what it has.
        assert_paid_once(books, shop.port, purchases)
    told = Counter(answer.told for purchase in purchases for answer in purchase.answers if answer.status != 201)
    assert set(told) <= REFUSALS
    runs = [ledger.runs(purchase.order.case) for purchase in purchases]
    return {
        "purchases": len(purchases),
        "workers lost": sum(purchase.lost for purchase in purchases),
        "views entered again": sum(number > 1 for number in runs),
        "told": dict(told),
    }


def test_rows_that_another_node_has_changed_first_are_not_committed_and_the_retry_pays(
    galera: GaleraCluster, lines: list[Balancer], books: Books, name: str, serve_once: Serve, ledger: Ledger
) -> None:
    """The view is not run again in its own request: its client gets 503 and may try again, and the key is free at once."""
    (shop,) = shops_of(serve_once, lines[:1], name, app=APPLICATION)
    purchase, engine = Purchase(), create_engine(galera.nodes[1].url(name))

    def change(by: int) -> None:
        with engine.begin() as there:
            there.execute(update(Account).values(balance=Account.balance + by))

    refused = attempt(purchase, shop, ledger, lambda: change(1))
    runs = ledger.runs(purchase.order.case)
    change(-1)
    engine.dispose()
    again = purchase.attempt(shop.port)

    assert (1, (503, "transaction-conflict")) == (runs, refused.told)
    assert again is not None
    assert (201, False, 2) == (again.status, again.replayed, ledger.runs(purchase.order.case))
    assert_paid_once(books, shop.port, [purchase])


@pytest.mark.timeout(300)
def test_a_node_killed_and_one_cut_off(
    galera: GaleraCluster,
    lines: list[Balancer],
    books: Books,
    name: str,
    serve_once: Serve,
    ledger: Ledger,
    doom: Doom,
    figures: Figures,
) -> None:
    """The rows of each purchase are there once, each answer tells of them, and a node without a majority refuses."""
    shops = shops_of(serve_once, lines, name, app=APPLICATION, arguments=("--preload",))
    weather = Weather(galera, lines)
    purchases = run_shops(weather, galera, shops, doom, lambda number: ("killed", "cut off", "")[number])

    figures(**judge_shops(galera, books, ledger, shops, purchases), kills=doom.kills, **weather.seen)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_nodes_killed_and_cut_off_in_turn(
    galera: GaleraCluster,
    lines: list[Balancer],
    books: Books,
    name: str,
    other_name: str,
    serve_once: Serve,
    ledger: Ledger,
    doom: Doom,
    figures: Figures,
) -> None:
    """The same for minutes. Beside it, views with effects elsewhere: none of these happens twice."""
    shops = shops_of(serve_once, lines, name, app=APPLICATION, workers=2, threads=4, arguments=("--preload",))
    make_tables(galera.nodes[0].url(other_name))
    services = shops_of(serve_once, lines, other_name)
    customers = Customers([service.port for service in services], TENANTS, patience=3)
    others = Crowd(2, customers.buy)
    weather = Weather(galera, lines)
    ends = time.monotonic() + SOAK_SECONDS

    def until(number: int) -> str:
        return "" if time.monotonic() > ends else ("killed", "cut off")[number // len(galera.nodes) % 2]

    purchases = run_shops(weather, galera, shops, doom, until)
    orders = others.stop()
    galera.mend()
    with ThreadPoolExecutor(CLIENTS) as clients:
        paid = list(clients.map(lambda order: customers.insist(order, patience=LEASE), orders))
    for order in orders:
        # By each node.
        for service in services:
            order.attempt(service.port, "effect")

    oracle = judge(orders, ledger)
    told = Counter(answer.told for order in orders for answer in order.answers if answer.status != 201)
    unknown = {order.order.case for order, is_paid in zip(orders, paid, strict=True) if not is_paid}
    elsewhere = {"orders": len(orders), "orders whose outcome is unknown": len(unknown), "orders told": dict(told)}
    figures(**judge_shops(galera, books, ledger, shops, purchases), kills=doom.kills, **weather.seen, **elsewhere)
    oracle.check()
    assert set(told) <= PLAIN_REFUSALS
    assert {1} >= {len(ledger.effects(order.order.case)) for order in orders if order.paid}
