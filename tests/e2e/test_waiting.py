"""Duplicates that wait for the first one's answer, where the policy lets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.ledger import PATIENCE_SECONDS, Ledger
from tests.e2e.processes import Server, kill
from tests.e2e.wire import Answer, Order, Wire, ask, message

SEATS = 2
"""The default `max_waiters`: a quarter of eight threads."""

CROWD = 200

WAIT_SECONDS = 20


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CROWD + 8) as pool:
        yield pool


@pytest.fixture
def home(serve: Serve) -> Server:
    """Where the first request runs."""
    return serve(config={"IDEMPOTENCY_WAIT": WAIT_SECONDS}, lease=1, name="home")


@pytest.fixture
def away(serve: Serve) -> Server:
    """Another process, which hears of nothing but through the store."""
    return serve(config={"IDEMPOTENCY_WAIT": WAIT_SECONDS}, lease=1, name="away")


class Duplicates:
    """Several at each server: one more than it has seats, so that the one refused says that the others wait."""

    def __init__(self, pool: ThreadPoolExecutor, order: Order, *servers: Server) -> None:
        futures = [pool.submit(ask, server.port, order.attempt()) for server in servers for _ in range(SEATS + 1)]
        self._finished = as_completed(futures, PATIENCE_SECONDS)
        self.refused = [next(self._finished).result() for _ in servers]

    def answers(self) -> list[Answer]:
        """What those that waited were told."""
        return [future.result() for future in self._finished]


def test_p70_those_who_wait_get_the_answer(
    home: Server, away: Server, ledger: Ledger, pool: ThreadPoolExecutor
) -> None:
    """Duplicates in the same process and in another one get the first one's answer as soon as there is one."""
    order = Order("/wait")
    with Wire(home.port) as wire:
        wire.send(order.attempt("pause", "effect"))
        ledger.paused(order.case)
        duplicates = Duplicates(pool, order, home, away)
        ledger.let_go(order.case)
        first = wire.answer()

    assert [answer.told for answer in duplicates.refused] == [(409, "in-flight")] * 2
    assert [(answer.status, answer.replayed, answer.body) for answer in duplicates.answers()] == [
        (201, True, first.body)
    ] * (2 * SEATS)
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (1, 1)


def test_e55_a_crowd_of_duplicates_leaves_threads_for_others(
    home: Server, ledger: Ledger, pool: ThreadPoolExecutor
) -> None:
    """
    Of 200 duplicates at a server of 8 threads as many wait as have a seat; the rest are told so, and others are served.
    """
    order = Order("/wait")
    with Wire(home.port) as wire:
        wire.send(order.attempt("pause"))
        ledger.paused(order.case)
        finished = as_completed([pool.submit(ask, home.port, order.attempt()) for _ in range(CROWD)], PATIENCE_SECONDS)
        others = [message("GET", "/free"), Order("/plain").attempt(), message("GET", "/free"), Order("/wait").attempt()]
        unrelated = [pool.submit(ask, home.port, other) for other in others]
        refused = [next(finished).result() for _ in range(CROWD - SEATS)]
        served = [future.result(PATIENCE_SECONDS).status for future in unrelated]
        ledger.let_go(order.case)
        first = wire.answer()

    assert Counter(answer.told for answer in refused) == {(409, "in-flight"): CROWD - SEATS}
    assert served == [200, 201, 200, 201]
    assert [future.result().body for future in finished] == [first.body] * SEATS
    assert ledger.runs(order.case) == 1


def test_e57_those_who_wait_for_a_killed_plain_view_are_told_that_nobody_knows(
    home: Server, away: Server, ledger: Ledger, pool: ThreadPoolExecutor
) -> None:
    """
    The owner dies while others wait: all of them get a definite answer when its lease ends, and none of them runs.
    """
    order = Order("/wait")
    duplicates = owner_killed(home, away, ledger, pool, order)

    assert [answer.told for answer in duplicates.answers()] == [(409, "outcome-unknown")] * SEATS
    assert ledger.runs(order.case) == 1


def test_e57_one_of_those_who_wait_takes_over_from_a_killed_view(
    home: Server, away: Server, ledger: Ledger, pool: ThreadPoolExecutor
) -> None:
    """The owner of a deduplicated view dies while others wait: exactly one of them runs, and all get its answer."""
    order = Order("/wait-deduplicated")
    answers = owner_killed(home, away, ledger, pool, order).answers()

    assert [answer.status for answer in answers] == [201] * SEATS
    assert len({answer.body for answer in answers}) == 1
    assert sorted(answer.replayed for answer in answers) == [False, *[True] * (SEATS - 1)]
    assert ledger.runs(order.case) == 2


def owner_killed(home: Server, away: Server, ledger: Ledger, pool: ThreadPoolExecutor, order: Order) -> Duplicates:
    """Have duplicates wait in one process for a view in another, and kill that one."""
    with Wire(home.port) as wire:
        wire.send(order.attempt("pause"))
        worker = ledger.paused(order.case)
        duplicates = Duplicates(pool, order, away)
        kill(worker)
        assert wire.ended()
    return duplicates


@pytest.mark.parametrize("path", ["/plain", "/wait"])
def test_e58_view_that_asks_its_own_service_is_refused_and_goes_on(serve: Serve, ledger: Ledger, path: str) -> None:
    """A view that sends its own request, key and all, to its own service does not wait for itself for ever."""
    server = serve(config={"IDEMPOTENCY_WAIT": 0.5}, threads=2, name="small")
    order = Order(path)

    answer = ask(server.port, order.attempt(f"ask:{path}"))

    assert (answer.status, answer.json["asked"]) == (201, 409)
    assert ledger.runs(order.case) == 1


def test_those_who_waited_in_vain_are_told_that_it_is_still_running(serve: Serve, ledger: Ledger) -> None:
    """Patience ends: who has waited for `wait` seconds is told 409, and the first one goes on."""
    server = serve(config={"IDEMPOTENCY_WAIT": 0.5}, name="impatient")
    order = Order("/wait")
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause"))
        ledger.paused(order.case)
        told = ask(server.port, order.attempt()).told
        ledger.let_go(order.case)

        assert told == (409, "in-flight")
        assert wire.answer().status == 201
