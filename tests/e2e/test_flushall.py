"""A Redis in front that is wiped, frozen, killed and started again under load, or was never told: payments do not notice."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.books import Books
from tests.e2e.conftest import Figures, Serve, keys
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Server
from tests.e2e.purchases import Crowd, Purchase, assert_paid_once
from tests.e2e.shop import APPLICATION
from tests.lab.redis import StartRedis, connect
from tests.long import unless_long

CHAOS_SECONDS = unless_long(20, long=60)
CLIENTS = 6
RECENT = 50
"""Purchases that are asked about again: those whose answers are in Redis, or were until now."""

LEAST_PURCHASES = unless_long(60, long=200)
LEAST_LOST = unless_long(30, long=100)
"""Less would be no load, or a cache that was never there to be lost."""


@pytest.fixture
def cache(start_redis: StartRedis) -> RedisServer:
    return start_redis()


@pytest.fixture
def shop(books: Books, cache: RedisServer, serve_once: Serve) -> Server:
    config = {"IDEMPOTENCY_REDIS_URL": cache.url}
    return serve_once(books.url, app=APPLICATION, workers=2, threads=CLIENTS, config=config, arguments=("--preload",))


class Weather:
    """What befalls a Redis. `wait` lets some seconds pass."""

    def __init__(self, server: RedisServer, wait: Callable[[float], None]) -> None:
        self._server = server
        self._wait = wait
        self.lost = 0
        """Answers that were there when they were wiped."""
        self.seen = Counter[str]()

    def blow(self) -> None:
        self._wait(random.uniform(0, 0.05))
        what = random.choices(["flush", "freeze", "restart"], [100, 5, 2])[0]
        self.seen[what] += 1
        if what == "flush":
            with connect(self._server.url) as client:
                found, _ = client.pipeline().dbsize().flushall().execute()
                self.lost += found
        elif what == "freeze":
            self._server.pause()
            self._wait(random.uniform(0, 0.5))
            self._server.resume()
        else:
            self._server.kill()
            self._wait(random.uniform(0, 0.5))
            self._server.restart()


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("books", ["postgresql"], indirect=True)
def test_13_wiped_at_any_moment_a_cache_costs_no_payment_and_no_answer(
    shop: Server, cache: RedisServer, books: Books, ledger: Ledger, figures: Figures
) -> None:
    """Every key runs once and has one row, and whoever asks gets the one answer, wherever it was kept."""
    recent: deque[Purchase] = deque(maxlen=RECENT)

    def buy() -> Purchase:
        purchase = Purchase()
        recent.append(purchase)  # at once, so that others ask about it while it is being paid
        purchase.pay(shop.port)
        for _ in range(3):
            recent[random.randrange(len(recent))].attempt(shop.port)
        return purchase

    crowd = Crowd(CLIENTS, buy)
    weather = Weather(cache, crowd.wait)
    ends = time.monotonic() + CHAOS_SECONDS
    while time.monotonic() < ends:
        weather.blow()
    purchases = crowd.stop()

    figures(purchases=len(purchases), answers_lost=weather.lost, **weather.seen)
    assert len(purchases) >= LEAST_PURCHASES
    assert weather.lost >= LEAST_LOST
    assert [ledger.runs(purchase.order.case) for purchase in purchases] == [1] * len(purchases)
    assert {told for purchase in purchases for told in purchase.refusals} <= {(409, "in-flight")}
    assert sum(purchase.lost for purchase in purchases) == 0
    assert_paid_once(books, shop.port, purchases)


@pytest.mark.parametrize("books", ["postgresql"], indirect=True)
def test_14_a_worker_killed_before_it_has_told_the_cache_leaves_that_to_the_first_replay(
    shop: Server, cache: RedisServer, books: Books, ledger: Ledger
) -> None:
    """It was committed and nobody heard of it: PostgreSQL replays it, and from then on Redis does."""
    purchase = Purchase()
    lost = purchase.attempt(shop.port, "die:committed")
    before = keys(cache)
    purchase.pay(shop.port)

    assert (lost, before) == (None, [])
    assert len(keys(cache)) == 1
    assert ledger.runs(purchase.order.case) == 1
    assert_paid_once(books, shop.port, [purchase])
