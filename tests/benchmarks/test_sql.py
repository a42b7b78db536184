"""Records in SQL are timed and counted on each database."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from benchmarks import sql_apps
from benchmarks.__main__ import main
from benchmarks.apps import Gate
from benchmarks.harness import call
from benchmarks.paths import keyed_cases
from tests.benchmarks.conftest import budgets_of
from tests.lab.mariadb import MariaDbServer
from tests.lab.postgres import PostgresServer
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers


@pytest.fixture(scope="module")
def sql_document(
    redis_servers: RedisServers, postgres_server: PostgresServer, mariadb_server: MariaDbServer
) -> dict[str, Any]:
    """Made once: every application on each database takes its time to be set up."""
    with postgres_server.database() as name, redirect_stdout(StringIO()) as printed:
        arguments = ["--database-url", postgres_server.url(name), "--redis-url", redis_servers.get(REDIS_KINDS[0]).url]
        assert main(["sql", *arguments, "--rounds", "1", "--requests", "2", "--json"]) == 0
    document: dict[str, Any] = json.loads(printed.getvalue())
    return document


OURS_ON_SQL = {
    "PostgreSQL": [
        *(f"ours, insert: {path}" for path in ("first", "replay", "conflict", "mismatch")),
        *(f"ours, {strategy}: {path}" for strategy in ("row_lock", "advisory") for path in ("first", "replay")),
        *(f"ours, {effects}: {path}" for effects in ("transactional", "tiered") for path in ("first", "replay")),
        "ours, tiered, Redis gone: replay",
    ],
    "SQLite": [
        *(f"ours, insert: {path}" for path in ("first", "replay", "conflict", "mismatch")),
        *(f"ours, {effects}: {path}" for effects in ("transactional", "tiered") for path in ("first", "replay")),
        "ours, tiered, Redis gone: replay",
    ],
}
BY_HAND_IN_SQL = [
    *(f"by hand: {path}" for path in ("first", "replay", "conflict", "mismatch")),
    *(f"by hand, transactional: {path}" for path in ("first", "replay")),
]


def test_every_path_is_timed_and_counted_on_each_database(
    sql_document: dict[str, Any],
) -> None:
    """The same statements by hand stand beside them."""
    timed = ["bare Flask: POST, no key", "business alone: POST, no key", *BY_HAND_IN_SQL, "ours, Redis: replay"]
    counted = ["business alone: POST, no key", *BY_HAND_IN_SQL]
    assert {section["title"]: [row["case"] for row in section["rows"]] for section in sql_document["sections"]} == {
        "Records in PostgreSQL": [*timed, *OURS_ON_SQL["PostgreSQL"]],
        "Statements and commits on PostgreSQL": [*counted, *OURS_ON_SQL["PostgreSQL"]],
        "Records in MariaDB": [*timed, *OURS_ON_SQL["SQLite"]],
        "Statements and commits on MariaDB": [*counted, *OURS_ON_SQL["SQLite"]],
        "Records in SQLite": [*timed, *OURS_ON_SQL["SQLite"]],
        "Statements and commits on SQLite": [*counted, *OURS_ON_SQL["SQLite"]],
    }


def test_statements_commits_and_trips_are_counted_path_by_path(
    sql_document: dict[str, Any],
) -> None:
    """A count is exact on any machine. The count of the business alone shows that the counting works."""
    _, postgresql, _, mariadb, _, sqlite = sql_document["sections"]
    counts = {row["case"]: (row["statements"], row["commits"], row["trips"]) for row in postgresql["rows"]}
    assert {
        case: counts[case] for case in counts if case.startswith(("business", "by hand", "ours, i", "ours, tr"))
    } == {
        "business alone: POST, no key": (1, 1, 3),
        "by hand: first": (2, 2, 2),
        **{f"by hand: {path}": (2, 0, 2) for path in ("replay", "conflict", "mismatch")},
        "by hand, transactional: first": (3, 2, 5),
        "by hand, transactional: replay": (2, 0, 2),
        "ours, insert: first": (2, 2, 2),
        "ours, insert: replay": (1, 0, 1),
        "ours, insert: conflict": (1, 0, 1),
        "ours, insert: mismatch": (1, 0, 1),
        "ours, transactional: first": (3, 2, 5),
        "ours, transactional: replay": (1, 0, 1),
    }
    pairs = {row["case"]: (row["statements"], row["commits"]) for row in mariadb["rows"]}
    assert {case: pairs[case] for case in pairs if case.startswith(("business", "by hand", "ours, i", "ours, tr"))} == {
        "business alone: POST, no key": (1, 1),
        "by hand: first": (2, 2),
        # INSERT IGNORE begins a transaction that writes, and finds that there is nothing to write.
        **{f"by hand: {path}": (2, 1) for path in ("replay", "conflict", "mismatch")},
        "by hand, transactional: first": (3, 2),
        "by hand, transactional: replay": (2, 1),
        "ours, insert: first": (2, 2),
        **{f"ours, insert: {path}": (2, 0) for path in ("replay", "conflict", "mismatch")},
        "ours, transactional: first": (3, 2),
        "ours, transactional: replay": (2, 0),
    }
    assert {row["case"]: row["commits"] for row in sqlite["rows"] if row["case"].endswith(": first")} == {
        "by hand: first": 2,
        "by hand, transactional: first": 2,
        "ours, insert: first": 2,
        "ours, transactional: first": 2,
        "ours, tiered: first": 2,
    }
    assert ("ours, tiered: replay", 0) in [(row["case"], row["statements"]) for row in sqlite["rows"]]


def test_goals_of_sql_stand_beside_what_was_measured(sql_document: dict[str, Any]) -> None:
    """Processor time against by hand on the same database, and counts where they are promised."""
    postgresql, counted, mariadb, _, sqlite, _ = (
        budgets_of({"sections": [section]}) for section in sql_document["sections"]
    )

    assert postgresql == {
        "ours, transactional: first": ["CPU ≤ 1.25 × by hand"],
        "ours, transactional: replay": ["CPU ≤ 1.25 × by hand"],
        "ours, tiered: replay": ["CPU = on Redis"],
    }
    assert sqlite == {case: [goal.replace("1.25", "1.4") for goal in goals] for case, goals in postgresql.items()}
    assert mariadb == {**sqlite, "ours, insert: first": ["≤ 1.3 × by hand"]}
    assert counted["ours, insert: first"] == ["2 statements", "2 commits"]


def test_a_database_with_tables_is_left_alone(url: str, postgres_url: str) -> None:
    """The run makes tables and drops them, so it refuses a database that holds tables."""
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE idempotency_records AS SELECT 1 AS kept"))

    with pytest.raises(SystemExit, match="idempotency_records"):
        main(["sql", "--redis-url", url, "--database-url", postgres_url])

    with engine.connect() as connection:
        assert connection.execute(text("SELECT kept FROM idempotency_records")).scalar_one() == 1
    engine.dispose()


@pytest.mark.parametrize("transactional", [False, True])
def test_by_hand_on_sql_has_every_outcome(transactional: bool) -> None:
    """The floor of the ratios keeps its keys, and a worker that died is followed after its lease."""
    with sql_apps.sqlite() as database:
        gate = Gate()
        app = sql_apps.by_hand(database.url, gate, transactional=transactional)
        with keyed_cases("by hand", app.flask, gate) as cases:
            for case in [*cases, *cases]:
                case.check(call(case.flask, case.make()))
            held = next(case for case in cases if case.path == "conflict")
            engine = app.engines[0]
            with engine.connect() as connection:
                connection.execute(text("UPDATE benchmark_keys SET expires_at = 1"))
            gate.left.set()
            # The first worker may end between our look at its record and our claim. Then a client asks again.
            statuses = [call(app.flask, held.make()).status for _ in range(2)]
            assert statuses in ([201, 201], [409, 201])
        app.close()
