"""How often a request goes to the store and comes back: exact, so it says at once what a timing only suggests."""

from __future__ import annotations

from typing import Any

import redis

from benchmarks import budgets
from benchmarks.budgets import Verdict
from benchmarks.calls import call
from benchmarks.cases import OURS, our_cases
from benchmarks.table import Row, Section

NOTE = "Writes to the connection per request, whatever they carry; a pipeline is one."
REQUESTS = 20


class CountedConnection(redis.Connection):
    """Counts every time that something is sent, by whichever of redis-py's ways."""

    sent = 0

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        CountedConnection.sent += 1
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]


def section(url: str) -> Section:
    pool = redis.ConnectionPool.from_url(url, connection_class=CountedConnection)
    client = redis.Redis(connection_pool=pool)
    shown = Section("Round trips to Redis", NOTE)
    with client, our_cases(OURS, client) as cases:
        for case in cases:
            case.check(call(case.flask, case.make()))
            before = CountedConnection.sent
            for _ in range(REQUESTS):
                case.check(call(case.flask, case.make()))
            trips = (CountedConnection.sent - before) / REQUESTS
            allowed = budgets.TRIPS.get(case.path, 0)
            verdict = Verdict(f"{allowed}", trips, trips == allowed)
            shown.rows.append(Row(f"{case.app}: {case.path}", {"trips": trips}, [verdict]))
    return shown
