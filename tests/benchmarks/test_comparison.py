"""One table has by hand, ours and the peer, in process and under gunicorn, with the goals of each outcome."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import redis

from benchmarks.__main__ import empty_server
from benchmarks.harness import (
    BARE,
    BY_HAND,
    CONFLICT,
    EMPTY_HOOKS,
    FIRST,
    MISMATCH,
    OURS,
    OUTCOMES,
    PEER,
    REPLAY,
    UNCOMPRESSED,
    Case,
    Cores,
    call,
    measure,
)
from benchmarks.paths import ABSENT, our_cases, redis_cases
from benchmarks.server_cost import counting_proxy, kept_bytes, round_trips, server_times
from flask_idempotency.stores.memory import MemoryStore
from tests.benchmarks.conftest import PATHS, budgets_of, measured, needs_peer

COLUMNS = ["requests/s", "p50", "p99", "CPU", "× by hand", "trips", "Redis", "its CPU", "bytes"]
SERVED = ["gunicorn/s", "of by hand", "its p50", "its p99", "worker CPU"]


@needs_peer
def test_every_path_of_every_application_is_in_one_table(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A table without a row hides a goal."""
    document = measured(capsys, "--seconds", "0.1", "--redis-url", url)
    table, commands = document["sections"]
    rows = {row["case"]: row for row in table["rows"]}
    goals = budgets_of({"sections": [table]})

    assert list(rows) == [
        *(f"{path}: {app}" for path in PATHS[:2] for app in (BARE, EMPTY_HOOKS, BY_HAND, OURS, PEER)),
        *(
            f"{path}: {app}"
            for path in OUTCOMES
            for app in (BY_HAND, OURS, UNCOMPRESSED, PEER)
            if (app, path) not in ABSENT
        ),
    ]
    assert list(rows[f"first: {OURS}"]) == ["case", *COLUMNS, *SERVED, "verdicts"]
    assert all(
        isinstance(rows[f"first: {app}"][column], float | int)
        for app in (OURS, UNCOMPRESSED, PEER)
        for column in COLUMNS
    )
    assert (
        rows[f"first: {OURS}"]["bytes"] < rows[f"first: {UNCOMPRESSED}"]["bytes"] < rows[f"first: {BY_HAND}"]["bytes"]
    )
    assert goals == {
        "GET: ours": ["≤ +6 µs CPU", "0 trips"],
        "POST, no key: ours": ["≤ +6 µs CPU", "0 trips"],
        "first: ours": [
            "≤ 1.25 × by hand",
            "gunicorn ≥ 0.85 of by hand",
            "gunicorn ≥ 1.0 of Powertools",
            "server CPU ≤ 180 µs",
            "2 trips",
            "≤ 1,600 B",
        ],
        "replay: ours": [
            "≤ 1.4 × by hand",
            "gunicorn ≥ 0.85 of by hand",
            "gunicorn ≥ 1.4 of Powertools",
            "server CPU ≤ 65 µs",
            "1 trips",
            "p99 < 2 ms",
        ],
        "conflict: ours": ["≤ 1.25 × by hand", "1 trips"],
        "mismatch: ours": ["≤ 1.3 × by hand", "1 trips"],
    }
    assert {row["case"]: set(row) - {"case", "verdicts", "all"} for row in commands["rows"]} == {
        **{f"first: {app}": {"claim", "complete"} for app in (BY_HAND, OURS, UNCOMPRESSED)},
        f"replay: {UNCOMPRESSED}": {"claim"},
        **{f"{path}: {app}": {"claim"} for path in (REPLAY, CONFLICT, MISMATCH) for app in (BY_HAND, OURS)},
        f"first: {PEER}": {"SET"},
        **{f"{path}: {PEER}": {"SET", "GET"} for path in (REPLAY, CONFLICT)},
    }
    with redis.Redis.from_url(url) as client:
        assert client.dbsize() == 0


@pytest.mark.parametrize("name", [BY_HAND, OURS, pytest.param(PEER, marks=needs_peer)])
def test_an_application_has_every_outcome_that_is_compared(url: str, name: str) -> None:
    """So its row is of that outcome. A service that forgets its keys would be the fastest."""
    with empty_server(url, Cores()) as (client, _), ExitStack() as ends:
        cases = ends.enter_context(redis_cases(client, url, name))
        assert [case.path for case in cases] == [path for path in PATHS if (name, path) not in ABSENT]
        for case in cases:
            case.check(call(case.flask, case.make()))
            case.check(call(case.flask, case.make()))


def test_round_trips_are_counted_path_by_path(url: str) -> None:
    """The count is exact on any machine, and SPEC section 7 names it."""
    with empty_server(url, Cores()), ExitStack() as ends:
        proxy, through = ends.enter_context(counting_proxy(url))
        client = ends.enter_context(redis.Redis.from_url(through))
        cases = ends.enter_context(redis_cases(client, through, OURS))

        assert {case.path: round_trips(proxy, case) for case in cases} == dict(
            zip(PATHS, (0, 0, 2, 1, 1, 1), strict=True)
        )


def test_the_server_counts_its_own_time(url: str) -> None:
    """By script, and its processor time has the scripts in it."""
    with empty_server(url, Cores()) as (client, _), ExitStack() as ends:
        cases = [case for case in ends.enter_context(redis_cases(client, url, BY_HAND)) if case.path == FIRST]
        (first,) = server_times(client, cases, rounds=1)

        assert set(first.commands) == {"claim", "complete"}
        assert 0 < first.commands["claim"] < first.total
        assert kept_bytes(client, cases[0].flask) > 2_000


def test_an_answer_of_another_path_is_not_measured() -> None:
    """A fast wrong response would be the best row of the table."""
    with our_cases("ours", MemoryStore()) as cases:
        replay = next(case for case in cases if case.path == "replay")
        first = next(case for case in cases if case.path == "first")
        mixed_up = Case(first.app, "first", first.flask, replay.make)

        with pytest.raises(RuntimeError, match="first"):
            measure([mixed_up], rounds=1, requests=1)
