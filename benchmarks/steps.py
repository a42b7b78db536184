"""What a durable step costs: beginning and finishing it, beside two round trips by hand, and passing one that is finished.

By hand is what a good engineer writes: one script or statement that compares the token, the fence and the number of the write,
notes the step and renews the lease, before the effect and after it. It notices no changed code, compares no arguments, and
cannot settle a step.

A request without steps is timed in an application where another endpoint has steps, and in one where none has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Final, TypeAlias
from uuid import uuid4

import redis
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, text

from benchmarks import apps, report, sql_apps
from benchmarks.apps import LEASE_SECONDS, PRINCIPAL, SECRET
from benchmarks.harness import FIRST, REPLAY, Case, Cores, Environ, call, environ, measure, timed
from benchmarks.report import Row, Section, at_most
from benchmarks.sql_apps import MISSING, Database
from flask_idempotency import Idempotency, Step, current_claim, idempotent

HAND: Final = "by hand"
STEP: Final = "step"
PASSED: Final = "finished step"
WITHOUT: Final = "no steps"
BESIDE: Final = "no steps, beside an endpoint that has steps"
SESSION_STORE: Final = "flask-sqlalchemy://"
STEPS: Final = 50
"""Steps of one request: its journal is as long as that."""
RESULT: Final = {"id": "ch_1a2b3c4d5e6f", "amount": 4200, "currency": "EUR"}
NOTE: Final = (
    "Microseconds of one step with a function that does nothing, in a request with 50: `CPU` is the view's thread, `wall` "
    "includes the server and the disk. A finished step is one that a retry passes. Ratios are medians of interleaved rounds."
)
WITHOUT_NOTE: Final = (
    "Microseconds through the WSGI callable, medians of interleaved rounds: the same endpoint in two applications."
)

# KEYS: the claim, the journal. ARGV: token and fence, number of this write, step, what to note, lease in ms.
NOTED: Final = """
if redis.call("GET", KEYS[1]) ~= ARGV[1] then return 0 end
if tonumber(ARGV[2]) > tonumber(redis.call("HGET", KEYS[2], "") or 0) then
  redis.call("HSET", KEYS[2], "", ARGV[2], ARGV[3], ARGV[4])
end
redis.call("PEXPIRE", KEYS[1], ARGV[5])
return 1
"""
TABLES: Final = (
    "CREATE TABLE hand_claims (key VARCHAR(64) PRIMARY KEY, token VARCHAR(64), fence BIGINT, number BIGINT, lease BIGINT)",
    "CREATE TABLE hand_steps (key VARCHAR(64), step VARCHAR(64), result TEXT, PRIMARY KEY (key, step))",
)
MINE: Final = (
    "UPDATE hand_claims SET lease = lease + 1, number = :number "
    "WHERE key = :key AND token = 'token' AND fence = 1 AND number < :number"
)
NOTED_POSTGRESQL: Final = text(
    f"WITH mine AS ({MINE} RETURNING key) INSERT INTO hand_steps SELECT key, :step, :result FROM mine "  # noqa: S608
    "ON CONFLICT (key, step) DO UPDATE SET result = :result"
)
NUMBERED_SQLITE: Final = text(MINE)
NOTED_SQLITE: Final = text(
    "INSERT INTO hand_steps VALUES (:key, :step, :result) ON CONFLICT (key, step) DO UPDATE SET result = :result"
)

Note: TypeAlias = Callable[[int, str, str | None], None]
"""Note this step by hand, with the number of this write, in the journal of one request."""
Times: TypeAlias = dict[str, list[tuple[float, float]]]


def sections(
    client: redis.Redis, url: str, database_url: str | None, cores: Cores, *, rounds: int, requests: int
) -> list[Section]:
    rows = _rows("Redis", url, _on_redis(client), rounds=rounds)
    with sql_apps.postgresql(database_url, cores) as database:
        if database is None:
            print(MISSING, file=sys.stderr)
        else:
            rows += _on_database(database, rounds=rounds)
            rows += _on_database(database, rounds=rounds, session=True)
    with sql_apps.sqlite() as file:
        rows += _on_database(file, rounds=rounds)
    without = _without_steps(url, rounds=rounds, requests=requests)
    return [Section("Durable steps", NOTE, rows), Section("Requests without steps, on Redis", WITHOUT_NOTE, without)]


def _without_steps(url: str, *, rounds: int, requests: int) -> list[Row]:
    plain, beside = apps.ours(url), apps.ours(url)

    @beside.post("/steps")
    @idempotent(required=True, steps=(Step("work"),))
    def steps() -> Any:
        return {"result": current_claim.step("work", _work)}, 201

    known = str(uuid4())
    call(plain, environ("POST", "/payments", body=apps.PAYMENT, key=known))
    cases = [
        Case(name, path, app, partial(_payment, known if path == REPLAY else None))
        for path in (FIRST, REPLAY)
        for name, app in ((WITHOUT, plain), (BESIDE, beside))
    ]
    timings = measure(cases, rounds=rounds, requests=requests)
    rows = []
    for floor, timing in zip(timings[::2], timings[1::2], strict=True):
        ratio = timing.processor_ratio_to(floor)
        for each in (floor, timing):
            cells = {"CPU": median(each.processor), "wall": each.typical}
            verdicts = []
            if each is timing:
                cells |= {"CPU ×": ratio, "wall ×": timing.ratio_to(floor)}
                verdicts = [at_most(f"CPU ≤ {report.WITHOUT_STEPS:.2f} ×", ratio, report.WITHOUT_STEPS)]
            rows.append(Row(f"{each.case.path}: {each.case.app}", cells, verdicts))
    return rows


def _payment(key: str | None) -> Environ:
    return environ("POST", "/payments", body=apps.PAYMENT, key=key or str(uuid4()))


def _on_database(database: Database, *, rounds: int, session: bool = False) -> list[Row]:
    """`session`: with the application's own engine. By hand always prepares its statements, and a store by URL never does."""
    name = f"{database.kind}, {SESSION_STORE}" if session else database.kind
    with _on_sql(database.url) as starting:
        return _rows(name, database.url, starting, rounds=rounds, session=session)


def _rows(store: str, url: str, starting: Callable[[str], Note], *, rounds: int, session: bool = False) -> list[Row]:
    taken: Times = {HAND: [], STEP: [], PASSED: []}
    app = _application(url, starting, taken, session=session)
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
    verdicts = []
    if case == STEP:
        pairs = list(zip(taken[STEP], taken[HAND], strict=True))
        ratio = median(ours[1] / theirs[1] for ours, theirs in pairs)
        cells |= {"CPU × by hand": median(ours[0] / theirs[0] for ours, theirs in pairs), "wall × by hand": ratio}
        verdicts = [at_most(f"wall ≤ {report.STEP_TO_BY_HAND:.2f} × by hand", ratio, report.STEP_TO_BY_HAND)]
    elif case == PASSED:
        most = report.PASSED_STEP_MICROSECONDS
        verdicts = [at_most(f"< {most:.0f} µs", passed, most)]
    return Row(f"{store}: {case}", cells, verdicts)


def _application(url: str, starting: Callable[[str], Note], taken: Times, *, session: bool) -> Flask:
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
        note, by_hand = starting(str(uuid4())), iter(range(STEPS))

        def hand() -> None:
            number = next(by_hand)
            name = str(number)
            note(2 * number + 1, name, None)
            note(2 * number + 2, name, json.dumps(_work()))

        for case, run in ((HAND, hand), (STEP, step)) if len(taken[HAND]) % 2 else ((STEP, step), (HAND, hand)):
            taken[case].append(timed(run, STEPS))
        return {"done": False}, 503

    options: dict[str, Any] = {"secret": SECRET, "lease": LEASE_SECONDS, "store": SESSION_STORE if session else url}
    app.config["IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT"] = True
    if session:
        app.config["SQLALCHEMY_DATABASE_URI"] = url
        SQLAlchemy(app)
    Idempotency(app, principal=lambda: PRINCIPAL, **options)
    return app


def _work() -> dict[str, Any]:
    return RESULT


def _on_redis(client: redis.Redis) -> Callable[[str], Note]:
    noted: Any = client.register_script(NOTED)

    def starting(key: str) -> Note:
        keys = [f"hand:claim:{key}", f"hand:steps:{key}"]
        client.set(keys[0], "token:1")

        def note(number: int, step: str, result: str | None) -> None:
            assert noted(keys=keys, args=["token:1", number, step, result or "", 30_000]) == 1

        return note

    return starting


@contextmanager
def _on_sql(url: str) -> Iterator[Callable[[str], Note]]:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    is_sqlite = engine.dialect.name == "sqlite"
    with engine.connect() as connection:
        for table in TABLES:
            connection.execute(text(table))

    def starting(key: str) -> Note:
        with engine.connect() as connection:
            connection.execute(text("INSERT INTO hand_claims VALUES (:key, 'token', 1, 0, 0)"), {"key": key})

        def note(number: int, step: str, result: str | None) -> None:
            values = {"key": key, "number": number, "step": step, "result": result}
            with engine.connect() as connection:
                if not is_sqlite:
                    assert connection.execute(NOTED_POSTGRESQL, values).rowcount == 1
                    return
                connection.execute(text("BEGIN IMMEDIATE"))
                assert connection.execute(NUMBERED_SQLITE, values).rowcount == 1
                connection.execute(NOTED_SQLITE, values)
                connection.execute(text("COMMIT"))

        return note

    try:
        yield starting
    finally:
        with engine.connect() as connection:
            for table in ("hand_steps", "hand_claims"):
                connection.execute(text(f"DROP TABLE {table}"))
        engine.dispose()
