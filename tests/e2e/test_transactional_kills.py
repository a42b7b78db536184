"""Workers killed at any moment of a transactional request: one execution is kept, and everybody is told of that one."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.e2e.books import Books
from tests.e2e.conftest import Figures, Serve
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Server, kill
from tests.e2e.purchases import Crowd, Purchase, assert_paid_once
from tests.e2e.shop import APPLICATION
from tests.long import unless_long

ROUNDS = unless_long(100, long=300)
LONGEST_SECONDS = 0.03
"""A little longer than a request takes, so that some die after their answer as well."""

POINTS = ("began", "claimed", "flushed")
"""From its beginning alone few would get as far as their commit: a new worker's first request is its slowest."""

LEAST_HITS = unless_long(15, long=60)
LEAST_REPEATS = unless_long(4, long=20)
"""Less would be no chaos: requests that lost their worker, and those among them whose view had been entered."""

KILLS = 300
CLIENTS = 6
COMMIT_SECONDS = 0.004
"""Longer than a COMMIT takes."""

PRELOADED = ("--preload",)
"""A worker is forked in a moment, and the library must not mind where from."""


@pytest.fixture
def shop(books: Books, serve_once: Serve) -> Server:
    return serve_once(books.url, app=APPLICATION, workers=3, threads=2, lease=0.3, arguments=PRELOADED)


class Doom:
    """Kills the worker of an attempt, some time after a point of its work."""

    def __init__(self, ledger: Ledger, points: Sequence[str] = POINTS, *, longest: float = LONGEST_SECONDS) -> None:
        self.kills = 0
        self._ledger = ledger
        self._points = points
        self._longest = longest
        self._ended = threading.Event()
        ledger.forget("")  # what the workers of another test have told too late
        self._strikes: list[threading.Timer] = []
        self._executioner = threading.Thread(target=self._execute, daemon=True)
        self._executioner.start()

    def step(self) -> str:
        """Return the step that an attempt takes to be killed."""
        return f"tell:{random.choice(self._points)}"

    def close(self) -> None:
        """Return when no worker is killed any more. A late strike would cut the replies that are checked."""
        if not self._ended.is_set():
            self._ended.set()
            self._ledger.note("told", "", 0)
            self._executioner.join()
            for strike in self._strikes:
                strike.join()

    def _execute(self) -> None:
        # To the last note, which is that of `close`: what stays there ends the next one's work.
        while pid := int(self._ledger.awaited("told", "")):
            if self._ended.is_set():
                continue
            strike = threading.Timer(random.uniform(0, self._longest), self._strike, [pid])
            self._strikes.append(strike)
            strike.start()

    def _strike(self, pid: int) -> None:
        with suppress(ProcessLookupError):  # the doom of another attempt was also its own
            kill(pid)
            self.kills += 1


@pytest.fixture
def doom(ledger: Ledger) -> Iterator[Doom]:
    doom = Doom(ledger)
    yield doom
    doom.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_2_killed_at_any_moment_it_is_paid_once(
    shop: Server, books: Books, ledger: Ledger, doom: Doom, figures: Figures
) -> None:
    """Whenever a worker dies, its key ends with one row and one answer, and every answer ever given was that one."""
    purchases = [Purchase() for _ in range(ROUNDS)]
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda purchase: purchase.pay(shop.port, doom.step()), purchases))

    hits = sum(purchase.lost > 0 for purchase in purchases)
    ran_again = sum(ledger.runs(purchase.order.case) > 1 for purchase in purchases)
    died_with_their_answer = sum(purchase.paid[0].replayed for purchase in purchases)
    figures(rounds=ROUNDS, lost_their_worker=hits, ran_again=ran_again, died_with_their_answer=died_with_their_answer)
    assert hits >= LEAST_HITS
    assert ran_again >= LEAST_REPEATS
    doom.close()
    assert_paid_once(books, shop.port, purchases)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("books", ["mariadb"], indirect=True)
@pytest.mark.parametrize("point", ["committing", "claiming"])
def test_2_killed_at_a_commit_of_mariadb_it_is_paid_once(
    shop: Server, books: Books, ledger: Ledger, point: str, figures: Figures
) -> None:
    """At that of the rows with their record, and at that of the claim, 300 times each: before, in and after it."""
    doom, purchases = Doom(ledger, [point], longest=COMMIT_SECONDS), list[Purchase]()

    def buy() -> Purchase:
        purchase = Purchase()
        purchase.pay(shop.port, doom.step())
        return purchase

    crowd = Crowd(CLIENTS, buy)
    while doom.kills < KILLS:
        crowd.buys(1)
    doom.close()
    purchases = crowd.stop()

    committed = sum(purchase.lost > 0 and ledger.runs(purchase.order.case) == 1 for purchase in purchases)
    ran_again = sum(ledger.runs(purchase.order.case) > 1 for purchase in purchases)
    lost = sum(purchase.lost > 0 for purchase in purchases)
    figures(kills=doom.kills, purchases=len(purchases), lost=lost, ran_again=ran_again, ran_once=committed)
    assert_paid_once(books, shop.port, purchases)


def test_2_killed_at_a_point_it_is_paid_once(shop: Server, books: Books, ledger: Ledger) -> None:
    """
    Before the view, in it, just before its COMMIT and just after: one row, one answer, and as many runs as are needed.
    """
    purchases = {point: Purchase() for point in ("claimed", "flushed", "committing", "committed")}
    replayed = {point: purchase.pay(shop.port, f"die:{point}").replayed for point, purchase in purchases.items()}

    assert [purchase.lost for purchase in purchases.values()] == [1, 1, 1, 1]
    assert {point: ledger.runs(purchase.order.case) for point, purchase in purchases.items()} == {
        "claimed": 1,
        "flushed": 2,
        "committing": 2,
        "committed": 1,
    }
    assert [point for point in purchases if replayed[point]] == ["committed"]
    assert_paid_once(books, shop.port, list(purchases.values()))
