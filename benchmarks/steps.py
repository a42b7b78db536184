"""What a durable step costs: beginning and finishing it, beside two round trips by hand, and passing one that is finished.

By hand is what a good engineer writes: one script or statement that compares the token, notes the step and renews the lease,
before the effect and after it. It notices no changed code, compares no arguments, and cannot settle a step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, TypeAlias
from uuid import uuid4

import redis
from flask import Flask
from sqlalchemy import create_engine, text

from benchmarks import sql_apps
from benchmarks.apps import LEASE_SECONDS, PRINCIPAL, SECRET
from benchmarks.harness import Cores, call, environ, timed
from benchmarks.report import Row, Section
from benchmarks.sql_apps import MISSING, Database
from flask_idempotency import Idempotency, Step, current_claim, idempotent

HAND: Final = "by hand"
STEP: Final = "step"
PASSED: Final = "finished step"
STEPS: Final = 50
"""Steps of one request: its journal is as long as that."""
RESULT: Final = {"id": "ch_1a2b3c4d5e6f", "amount": 4200, "currency": "EUR"}
NOTE: Final = (
    "Microseconds of one step with a function that does nothing, in a request with 50: `CPU` is the view's thread, `wall` "
    "includes the server and the disk. A finished step is one that a retry passes."
)

# KEYS: the claim, the journal. ARGV: token, step, what to note, lease in ms.
NOTED: Final = """
if redis.call("GET", KEYS[1]) ~= ARGV[1] then return 0 end
redis.call("HSET", KEYS[2], ARGV[2], ARGV[3])
redis.call("PEXPIRE", KEYS[1], ARGV[4])
return 1
"""
TABLES: Final = (
    "CREATE TABLE hand_claims (key VARCHAR(64) PRIMARY KEY, token VARCHAR(64), lease_until BIGINT)",
    "CREATE TABLE hand_steps (key VARCHAR(64), step VARCHAR(64), result TEXT, PRIMARY KEY (key, step))",
)
NOTED_POSTGRESQL: Final = text(
    "WITH mine AS (UPDATE hand_claims SET lease_until = lease_until + 1 WHERE key = :key AND token = :token RETURNING key) "
    "INSERT INTO hand_steps SELECT key, :step, :result FROM mine ON CONFLICT (key, step) DO UPDATE SET result = :result"
)
RENEWED_SQLITE: Final = text("UPDATE hand_claims SET lease_until = lease_until + 1 WHERE key = :key AND token = :token")
NOTED_SQLITE: Final = text(
    "INSERT INTO hand_steps VALUES (:key, :step, :result) ON CONFLICT (key, step) DO UPDATE SET result = :result"
)

Note: TypeAlias = Callable[[str, str | None], None]
Times: TypeAlias = dict[str, list[tuple[float, float]]]


def sections(client: redis.Redis, url: str, database_url: str | None, cores: Cores, *, rounds: int) -> list[Section]:
    rows = _rows("Redis", url, _on_redis(client), rounds=rounds)
    with sql_apps.postgresql(database_url, cores) as database:
        if database is None:
            print(MISSING, file=sys.stderr)
        else:
            rows += _on_database(database, rounds=rounds)
    with sql_apps.sqlite() as file:
        rows += _on_database(file, rounds=rounds)
    return [Section("Durable steps", NOTE, rows)]


def _on_database(database: Database, *, rounds: int) -> list[Row]:
    with _on_sql(database.url) as note:
        return _rows(database.kind, database.url, note, rounds=rounds)


def _rows(store: str, url: str, note: Note, *, rounds: int) -> list[Row]:
    taken: Times = {HAND: [], STEP: [], PASSED: []}
    app = _application(url, note, taken)
    body = json.dumps({"amount": 4200}).encode()
    for _ in range(rounds + 1):
        key = str(uuid4())
        statuses = [call(app, environ("POST", "/steps", body=body, key=key)).status for _ in range(2)]
        if statuses != [503, 201]:
            raise RuntimeError(f"{store}: the request did not pause and go on, but gave {statuses}")
    # The first request warms up.
    times = {case: each[1:] for case, each in taken.items()}
    return [_row(store, case, times) for case in taken]


def _row(store: str, case: str, taken: Times) -> Row:
    used, passed = (median(each[part] for each in taken[case]) * 1e6 for part in range(2))
    cells: dict[str, float | str] = {"CPU": used, "wall": passed}
    if case == STEP:
        pairs = list(zip(taken[STEP], taken[HAND], strict=True))
        cells |= {
            "CPU × by hand": median(ours[0] / theirs[0] for ours, theirs in pairs),
            "wall × by hand": median(ours[1] / theirs[1] for ours, theirs in pairs),
        }
    return Row(f"{store}: {case}", cells)


def _application(url: str, note: Note, taken: Times) -> Flask:
    """Return an application whose first attempt takes every step and pauses, and whose second one passes them."""
    app = Flask("benchmark")

    @app.post("/steps")
    @idempotent(required=True, steps=(Step("work"),))
    def steps() -> Any:
        numbers = iter(range(STEPS))

        def step() -> None:
            current_claim.step(("work", next(numbers)), _work)

        if current_claim.attempt > 1:
            taken[PASSED].append(timed(step, STEPS))
            return {"done": True}, 201
        by_hand = iter(range(STEPS))

        def hand() -> None:
            name = str(next(by_hand))
            note(name, None)
            note(name, json.dumps(_work()))

        for case, run in ((HAND, hand), (STEP, step)) if len(taken[HAND]) % 2 else ((STEP, step), (HAND, hand)):
            taken[case].append(timed(run, STEPS))
        return {"done": False}, 503

    options: dict[str, Any] = {"secret": SECRET, "lease": LEASE_SECONDS, "store": url}
    app.config["IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT"] = True
    Idempotency(app, principal=lambda: PRINCIPAL, **options)
    return app


def _work() -> dict[str, Any]:
    return RESULT


def _on_redis(client: redis.Redis) -> Note:
    noted: Any = client.register_script(NOTED)
    client.set("hand:claim", "token")

    def note(step: str, result: str | None) -> None:
        assert noted(keys=["hand:claim", "hand:steps"], args=["token", step, result or "", 30_000]) == 1

    return note


@contextmanager
def _on_sql(url: str) -> Iterator[Note]:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    is_sqlite = engine.dialect.name == "sqlite"
    with engine.connect() as connection:
        for table in TABLES:
            connection.execute(text(table))
        connection.execute(text("INSERT INTO hand_claims VALUES ('k', 'token', 0)"))

    def note(step: str, result: str | None) -> None:
        values = {"key": "k", "token": "token", "step": step, "result": result}
        with engine.connect() as connection:
            if not is_sqlite:
                assert connection.execute(NOTED_POSTGRESQL, values).rowcount == 1
                return
            connection.execute(text("BEGIN IMMEDIATE"))
            assert connection.execute(RENEWED_SQLITE, values).rowcount == 1
            connection.execute(NOTED_SQLITE, values)
            connection.execute(text("COMMIT"))

    try:
        yield note
    finally:
        with engine.connect() as connection:
            for table in ("hand_steps", "hand_claims"):
                connection.execute(text(f"DROP TABLE {table}"))
        engine.dispose()
