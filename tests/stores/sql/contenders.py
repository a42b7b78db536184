"""A process of threads that all want the same keys at the same time, in one database."""

from __future__ import annotations

import threading
from typing import Any

from flask_idempotency.engine.model import Grant
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_request, a_token
from tests.stores.contenders import MEETING_SECONDS, round_key


def contend(url: str, rounds: int, threads: int, barrier: Any, results: Any) -> None:
    """Run in a process of its own: `barrier` has a place for every thread of every process."""
    store = SqlStore(Database(url))
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

    players = [threading.Thread(target=play) for _ in range(threads)]
    for player in players:
        player.start()
    for player in players:
        player.join()
    store.close()
    results.put((wins, outcomes))
