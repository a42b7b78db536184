"""Records in SQL are timed and counted on both databases."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from benchmarks.__main__ import main
from tests.benchmarks.conftest import cases_of, measured
from tests.lab.postgres import PostgresServer
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers


@pytest.fixture(scope="module")
def sql_document(redis_servers: RedisServers, postgres_server: PostgresServer) -> dict[str, Any]:
    """Made once: every application on both databases takes its time to be set up."""
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
BY_HAND_IN_SQL = ["by hand: first", "by hand, transactional: first", "by hand: replay", "by hand: conflict"]


def test_every_path_is_timed_and_counted_on_both_databases(
    sql_document: dict[str, Any],
) -> None:
    """The same statements by hand stand beside them."""
    timed = ["bare Flask: POST, no key", "business alone: POST, no key", *BY_HAND_IN_SQL, "by hand, Redis: replay"]
    counted = ["business alone: POST, no key", *BY_HAND_IN_SQL]
    assert {section["title"]: [row["case"] for row in section["rows"]] for section in sql_document["sections"]} == {
        "Records in PostgreSQL": [*timed, *OURS_ON_SQL["PostgreSQL"]],
        "Statements and commits on PostgreSQL": [*counted, *OURS_ON_SQL["PostgreSQL"]],
        "Records in SQLite": [*timed, *OURS_ON_SQL["SQLite"]],
        "Statements and commits on SQLite": [*counted, *OURS_ON_SQL["SQLite"]],
    }


def test_statements_commits_and_trips_are_counted_path_by_path(
    sql_document: dict[str, Any],
) -> None:
    """A count is exact on any machine. The count of the business alone shows that the counting works."""
    _, postgresql, _, sqlite = sql_document["sections"]
    counts = {row["case"]: (row["statements"], row["commits"], row["trips"]) for row in postgresql["rows"]}
    assert {case: counts[case] for case in counts if case.startswith(("business", "ours, i", "ours, tr"))} == {
        "business alone: POST, no key": (1, 1, 3),
        "ours, insert: first": (2, 2, 2),
        "ours, insert: replay": (1, 0, 1),
        "ours, insert: conflict": (1, 0, 1),
        "ours, insert: mismatch": (1, 0, 1),
        "ours, transactional: first": (3, 2, 5),
        "ours, transactional: replay": (1, 0, 1),
    }
    assert {row["case"]: row["commits"] for row in sqlite["rows"] if row["case"].endswith(": first")} == {
        "by hand: first": 2,
        "by hand, transactional: first": 2,
        "ours, insert: first": 2,
        "ours, transactional: first": 2,
        "ours, tiered: first": 2,
    }
    assert ("ours, tiered: replay", 0) in [(row["case"], row["statements"]) for row in sqlite["rows"]]


def test_budgets_of_sql_are_targets_beside_what_was_measured(
    sql_document: dict[str, Any],
) -> None:
    """Of processor time on both databases, and of statements where they are promised."""
    rows = sql_document["sections"][0]["rows"]
    first, replay = ["≤ +350 µs cpu"], ["≤ +140 µs cpu"]
    timed = {row["case"]: [verdict["budget"] for verdict in row["verdicts"]] for row in rows}
    assert {case: budgets for case, budgets in timed.items() if budgets} == {
        **{f"ours, {which}: first": first for which in ("insert", "row_lock", "advisory", "transactional", "tiered")},
        **{f"ours, {which}: replay": replay for which in ("insert", "row_lock", "advisory", "transactional")},
        "ours, tiered, Redis gone: replay": replay,
    }


def test_without_a_postgresql_the_rest_is_measured(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output says that its tables are missing, and how to get them."""
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setattr("benchmarks.sql_apps.installation", lambda: None)

    main(["sql", "--rounds", "1", "--requests", "2", "--redis-url", url])
    shown = capsys.readouterr()

    assert "NOT MEASURED: there is no PostgreSQL" in shown.err
    assert "Records in PostgreSQL\nNOT MEASURED" in shown.out
    assert "Records in SQLite" in shown.out


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


def test_a_profile_of_a_store_in_sql_names_functions_of_it(
    url: str, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its statements, and what SQLAlchemy and the driver make of them."""
    arguments = ["--profile", "first", "--on-sql", "transactional", "--redis-url", url, "--database-url", postgres_url]
    document = measured(capsys, *arguments)

    assert {"flask_idempotency/stores/sql/transactional/session.py", "sqlalchemy/engine/base.py"} <= set(
        cases_of(document)
    )
