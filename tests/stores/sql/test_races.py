"""Many threads, many processes, one key."""

from __future__ import annotations

import multiprocessing

import pytest

from flask_idempotency.engine.model import Claimed, InFlight, OnExpiry, Replayed
from flask_idempotency.testing.contract.stress import at_once
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, stand
from flask_idempotency.testing.doubles import FrozenClock
from tests.stores.sql.conftest import OpenStore, by_every_strategy
from tests.stores.sql.contenders import contend

pytestmark = pytest.mark.slow

THREADS, ROUNDS = 32, 40
PROCESSES, THREADS_EACH = 4, 8


@by_every_strategy
def test_of_all_threads_exactly_one_is_granted(open_store: OpenStore, strategy: str) -> None:
    """In every round, and everybody else hears of it or of its answer."""
    store = open_store(strategy=strategy)
    for _ in range(ROUNDS):
        key = a_key()

        def claim_and_complete(key: object = key) -> object:
            token = a_token()
            outcome = store.claim(a_request(key), token=token, lease=LEASE)  # type: ignore[arg-type]
            if isinstance(outcome, Claimed):
                store.complete(key, token, PAYLOAD, keep=KEEP)  # type: ignore[arg-type]
            return type(outcome)

        outcomes = at_once(*[claim_and_complete] * THREADS)

        assert 1 == outcomes.count(Claimed)
        assert set(outcomes) <= {Claimed, InFlight, Replayed}


@by_every_strategy
def test_of_all_threads_exactly_one_takes_over(open_store: OpenStore, clock: FrozenClock, strategy: str) -> None:
    """A lapsed claim has one successor, and nobody else is told that it is theirs."""
    store = open_store(strategy=strategy)
    for _ in range(ROUNDS):
        key = a_key()
        stand(store, clock, key, "lapsed, takeover")
        ask = a_request(key, on_lapse=OnExpiry.TAKEOVER)

        outcomes = at_once(*[lambda ask=ask: store.claim(ask, token=a_token(), lease=LEASE)] * THREADS)

        assert [2] == [outcome.held.attempt for outcome in outcomes if isinstance(outcome, Claimed)]
        assert THREADS - 1 == sum(isinstance(outcome, InFlight) for outcome in outcomes)


@pytest.mark.parametrize("database_url", ("postgresql", "sqlite"), indirect=True)
def test_of_all_processes_threads_exactly_one_is_granted(records_url: str) -> None:
    """By fences that rise from round to round, whichever process takes them."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES * THREADS_EACH), context.Queue()
    processes = [
        context.Process(target=contend, args=(records_url, ROUNDS, THREADS_EACH, barrier, results))
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    gathered = [results.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(60)

    wins = sorted(win for won, _ in gathered for win in won)
    outcomes = [outcome for _, seen in gathered for outcome in seen]
    assert list(range(ROUNDS)) == [number for number, _ in wins]
    assert PROCESSES * THREADS_EACH * ROUNDS == len(outcomes)
    assert set(outcomes) <= {"Claimed", "InFlight", "Replayed"}
    assert sorted(fence for _, fence in wins) == [fence for _, fence in wins]
