"""`run.py bench` with tiny rounds: every row is there, held to its budget."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, text

from benchmarks import storage
from benchmarks.__main__ import main
from benchmarks.harness import EXPECTED, Case, call, choose_cores
from benchmarks.paths import our_cases
from flask_idempotency.stores.memory import MemoryStore
from tests.lab.postgres import PostgresServer
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers

PATHS = ["GET", "POST, no key", "first", "replay", "conflict", "mismatch"]


@pytest.fixture
def url(redis_servers: RedisServers) -> str:
    return redis_servers.get(REDIS_KINDS[0]).url


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--rounds", "1", "--requests", "2", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def cases_of(document: dict[str, Any]) -> list[str]:
    return [row["case"] for section in document["sections"] for row in section["rows"]]


def budgets_of(document: dict[str, Any]) -> dict[str, list[str]]:
    rows = [row for section in document["sections"] for row in section["rows"] if row["verdicts"]]
    return {row["case"]: [verdict["budget"] for verdict in row["verdicts"]] for row in rows}


def test_what_a_redis_pays_to_notice_a_loss_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ["as it is", "without the check", "one replica waited for"] == cases_of(measured(capsys, "promises"))


def test_every_path_is_timed_in_every_application(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A table without a row is a budget that nobody looks at."""
    by_hand = [path for path in PATHS if path != "mismatch"]  # without a fingerprint there is none

    assert cases_of(measured(capsys, "requests", "--redis-url", url)) == [
        "bare Flask: GET",
        "bare Flask: POST, no key",
        *(f"by hand: {path}" for path in by_hand),
        *(f"ours: {path}" for path in PATHS),
        *(f"ours, memory: {path}" for path in PATHS),
    ]


def test_every_budget_of_the_specification_is_held_against_its_path(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers of SPEC section 14 stand beside what was measured."""
    assert budgets_of(measured(capsys, "requests", "memory", "--redis-url", url)) == {
        "ours: GET": ["< 10 µs added"],
        "ours: POST, no key": ["< 10 µs added"],
        "ours: first": ["≤ 1.25 × by hand"],
        "ours: replay": ["≤ 1.25 × by hand", "p99 < 2 ms"],
        "ours: conflict": ["p99 < 5 ms"],
        "ours: mismatch": ["p99 < 5 ms"],
        "ours, memory: GET": ["< 10 µs added"],
        "ours, memory: POST, no key": ["< 10 µs added"],
        "a stored answer before compression": ["≤ 64 B on top"],
        "a charge": ["≤ 1.1 KB"],
        "a list of payments": ["≤ 1.1 KB"],
    }


def test_round_trips_are_counted_path_by_path(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The count is exact on any machine, and SPEC section 7 names it."""
    document = measured(capsys, "trips", "--redis-url", url)

    trips = {row["case"].partition(": ")[2]: row["trips"] for row in document["sections"][0]["rows"]}
    assert trips == {"GET": 0, "POST, no key": 0, "first": 2, "replay": 1, "conflict": 1, "mismatch": 1}


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
    """Beside the same statements by hand, on whichever database the records are."""
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
    """A count is exact on any machine. That of the business alone says whether the counting itself can be trusted."""
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
    """And where its tables would be is said that they are not there, and how to get them."""
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setattr("benchmarks.sql_apps.installation", lambda: None)

    main(["sql", "--rounds", "1", "--requests", "2", "--redis-url", url])
    shown = capsys.readouterr()

    assert "NOT MEASURED: there is no PostgreSQL" in shown.err
    assert "Records in PostgreSQL\nNOT MEASURED" in shown.out
    assert "Records in SQLite" in shown.out


def test_a_database_with_tables_is_left_alone(url: str, postgres_url: str) -> None:
    """The run makes tables and drops them: none of them may be somebody's."""
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE idempotency_records AS SELECT 1 AS somebody"))

    with pytest.raises(SystemExit, match="idempotency_records"):
        main(["sql", "--redis-url", url, "--database-url", postgres_url])

    with engine.connect() as connection:
        assert connection.execute(text("SELECT somebody FROM idempotency_records")).scalar_one() == 1
    engine.dispose()


@pytest.mark.slow
def test_every_application_is_served(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Under gunicorn the same floors stand beside ours."""
    document = measured(capsys, "serving", "--seconds", "0.1", "--redis-url", url)

    assert (cases_of(document), budgets_of(document)) == (
        ["bare Flask", "by hand: first", "by hand: replay", "ours: first", "ours: replay"],
        {"ours: first": ["≥ 0.55 of bare"], "ours: replay": ["≥ 0.80 of bare"]},
    )


def test_the_tables_show_the_machine_and_every_row(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers without their machine mean nothing."""
    main(["trips", "--redis-url", url])
    machine, *table = capsys.readouterr().out.splitlines()

    assert all(f"{name} " in machine for name in ("cpu", "cores", "python", "flask", "redis-py", "hiredis", "server"))
    assert [path for path in PATHS if any(line.startswith(f"ours: {path}") for line in table)] == PATHS


def test_a_profile_names_functions_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """It is for whoever wants to make a path faster, so it says where to look."""
    document = measured(capsys, "--profile", "replay", "--on-memory")

    assert any(case.startswith("flask_idempotency/web/") for case in cases_of(document))


def test_a_profile_of_a_store_in_sql_names_functions_of_it(
    url: str, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its statements, and what SQLAlchemy and the driver make of them."""
    arguments = ["--profile", "first", "--on-sql", "transactional", "--redis-url", url, "--database-url", postgres_url]
    document = measured(capsys, *arguments)

    assert {"flask_idempotency/stores/sql/transactional/session.py", "sqlalchemy/engine/base.py"} <= set(
        cases_of(document)
    )


def test_claims_among_many_keys_stand_beside_an_empty_store() -> None:
    """The full server holds that many records more than the empty one, in the store's own format."""
    shown = storage.million_section(choose_cores(), keys=500, rounds=1)

    assert [(row.case, bool(row.verdicts)) for row in shown.rows] == [
        ("empty", False),
        ("full", True),
        ("the tenant's ledger", True),
    ]


def test_what_compliance_costs_is_measured(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Encryption for small and large answers, quotas, and a tenant beside one that floods."""
    document = measured(capsys, "compliance", "--redis-url", url)
    cases = cases_of(document)
    sizes = [f"{path}, {size}" for size in ("2 KB", "256 KB") for path in ("first", "replay")]

    for settings in ("as it comes", "no compression", "encrypted", "with quotas", "both"):
        assert {f"{settings}: {size}" for size in sizes} <= set(cases)
    assert {"with quotas: over quota", "encrypted, 2 KB", "encrypted, 256 KB"} <= set(cases)
    assert {"memory": ["p99 within 10 %"], "Redis": ["p99 within 10 %"]} == budgets_of(document)


def test_a_database_in_use_is_left_alone(url: str, redis_servers: RedisServers) -> None:
    """The run fills a database and empties it: that must not be somebody's."""
    with redis.Redis.from_url(url) as client:
        client.set("somebody's", "data")

        with pytest.raises(SystemExit, match="not empty"):
            main(["trips", "--redis-url", url])

        assert client.get("somebody's") == b"data"


def test_an_unknown_part_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error measures nothing, and names what there is."""
    with pytest.raises(SystemExit):
        main(["request"])

    assert "requests, trips, serving, memory, sql, compliance" in capsys.readouterr().err


def test_an_answer_of_another_path_is_not_measured() -> None:
    """A fast wrong answer would be the best row of the table."""
    with our_cases("ours", MemoryStore()) as cases:
        replay = next(case for case in cases if case.path == "replay")
        first = next(case for case in cases if case.path == "first")
        mixed_up = Case(first.app, "first", first.flask, replay.make)
        answer = call(mixed_up.flask, mixed_up.make())

        with pytest.raises(RuntimeError, match="first"):
            mixed_up.check(answer)


def test_every_path_knows_its_status() -> None:
    """The check of answers covers all of them."""
    assert list(EXPECTED) == PATHS


@pytest.mark.slow
def test_removal_is_timed_beside_claims_and_beside_what_comes_in(postgres_url: str) -> None:
    """On a server and in a file, and nothing is left that is over."""
    shown = storage.expiry_sections(postgres_url, choose_cores(), rows=1500, seconds=2)
    rows = {row.case: row for section in shown for row in section.rows}

    assert ["PostgreSQL", "SQLite", "PostgreSQL, 2,000 a second", "SQLite, 2,000 a second"] == list(rows)
    assert [1500] * 2 == [rows[kind].cells["removed"] for kind in ("PostgreSQL", "SQLite")]
