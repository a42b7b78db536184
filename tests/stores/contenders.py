"""Processes whose threads all claim the same keys at the same time."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_request, a_token
from tests.forgiving import redis_store
from tests.forks import forks

MEETING_SECONDS = 60.0
PROCESSES, THREADS = 3, 4


def round_key(number: int) -> StorageKey:
    return StorageKey(rid=hashlib.sha256(b"%d" % number).digest(), tid=bytes(16))


def contended(url: str, rounds: int) -> tuple[list[tuple[int, int]], list[str]]:
    """Let all threads of all processes claim a key in each round. Return each grant's round and fence, and all outcomes."""
    context = forks()
    barrier, results = context.Barrier(PROCESSES * THREADS), context.Queue()
    processes = [context.Process(target=contend, args=(url, rounds, barrier, results)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    gathered = [results.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(60)
    outcomes = [outcome for _, seen in gathered for outcome in seen]
    assert len(outcomes) == PROCESSES * THREADS * rounds
    return sorted(win for won, _ in gathered for win in won), outcomes


def contend(url: str, rounds: int, barrier: Any, results: Any) -> None:
    """Run this in a new process. `barrier` has a place for each thread of each process."""
    store = redis_store(url) if url.startswith("redis") else SqlStore(Database(url))
    wins: list[tuple[int, int]] = []
    outcomes: list[str] = []

    def play() -> None:
        for number in range(rounds):
            token = a_token()
            barrier.wait(MEETING_SECONDS)
            outcome = store.claim(a_request(round_key(number)), token=token, lease=LEASE)
            outcomes.append(type(outcome).__name__)
            if isinstance(outcome, Grant):
                wins.append((number, outcome.fence))
                store.complete(round_key(number), token, PAYLOAD, keep=KEEP)

    players = [threading.Thread(target=play) for _ in range(THREADS)]
    for player in players:
        player.start()
    for player in players:
        player.join()
    store.close()
    results.put((wins, outcomes))
