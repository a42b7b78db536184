"""How many statements each path sends to the database, and how many commits it makes: exact on any machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import IO, Any, Self, TypeAlias

import redis
from sqlalchemy import Engine, create_engine, event, text

from benchmarks import budgets
from benchmarks.budgets import Verdict
from benchmarks.calls import call
from benchmarks.cases import Case
from benchmarks.databases import POSTGRESQL, Database
from benchmarks.sql_cases import PLAIN, TRANSACTIONAL, sql_cases
from benchmarks.table import Row, Section

REQUESTS = 20

NOTE = (
    "Per request. `commits` are transactions that wrote something, by the database's own count; `trips` are all "
    "questions that the server answered, BEGIN, COMMIT and ROLLBACK among them."
)

_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24

Commits: TypeAlias = Callable[[], int]
"""How many there were since it was last asked."""


class Statements:
    """What these engines send: statements by SQLAlchemy's count, and round trips by libpq's own trace."""

    def __init__(self, engines: Collection[Engine]) -> None:
        self.sent = 0
        self._traces: dict[Any, IO[bytes]] = {}
        self._thread = get_ident()
        self._listened = [(engine, "before_cursor_execute", self._count) for engine in engines]
        self._listened += [(engine, "checkout", self._trace) for engine in engines if engine.driver == "psycopg"]
        for each in self._listened:
            event.listen(*each)

    @property
    def trips(self) -> int:
        total = 0
        for trace in self._traces.values():
            trace.seek(0)
            total += trace.read().count(b"\tReadyForQuery\t")
        return total

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._listened:
            event.remove(*each)
        for connection, trace in self._traces.items():
            if not connection.closed:
                connection.pgconn.untrace()
            trace.close()

    def _count(self, *_: Any) -> None:
        # A lease that is renewed meanwhile belongs to another request.
        self.sent += get_ident() == self._thread

    def _trace(self, connection: Any, *_: Any) -> None:
        if connection not in self._traces:
            self._traces[connection] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the counter
            connection.pgconn.trace(self._traces[connection].fileno())


def section(database: Database, client: redis.Redis, redis_url: str) -> Section:
    shown = Section(f"Statements and commits on {database.kind}", NOTE)
    counted = _xids if database.kind == POSTGRESQL else _commit_frames
    with (
        sql_cases(database, client, redis_url) as cases,
        counted(database.url) as commits,
        Statements({engine for _, app in cases for engine in app.engines}) as statements,
    ):
        shown.rows.extend(_row(case, statements, commits, database) for case, app in cases if app.engines)
    return shown


def _row(case: Case, statements: Statements, commits: Commits, database: Database) -> Row:
    # psycopg prepares by hand's statements when it has sent them often enough: that is asked once, and not per request.
    _call(case)
    sent_before, trips_before = statements.sent, statements.trips
    commits()
    _call(case)
    committed, sent = commits() / REQUESTS, (statements.sent - sent_before) / REQUESTS
    cells: dict[str, float | str] = {"statements": sent, "commits": committed}
    if database.kind == POSTGRESQL:
        cells["trips"] = (statements.trips - trips_before) / REQUESTS
    return Row(f"{case.app}: {case.path}", cells, _verdicts(case, sent, committed, database))


def _call(case: Case) -> None:
    for _ in range(REQUESTS):
        case.check(call(case.flask, case.make()))


def _verdicts(case: Case, sent: float, commits: float, database: Database) -> list[Verdict]:
    if case.app not in (PLAIN, TRANSACTIONAL):
        return []
    allowed = budgets.SQL_COMMITS[case.path]
    verdicts = [Verdict(f"{allowed} commits", commits, commits == allowed)]
    if case.app == PLAIN and database.kind == POSTGRESQL:
        allowed = budgets.SQL_STATEMENTS[case.path]
        verdicts.insert(0, Verdict(f"{allowed} statements", sent, sent == allowed))
    return verdicts


@contextmanager
def _xids(url: str) -> Iterator[Commits]:
    """PostgreSQL gives a transaction a number when it first writes, and only then."""
    following = text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    last = 0

    def commits() -> int:
        nonlocal last
        with engine.connect() as connection:
            before, last = last, int(connection.execute(following).scalar_one())
        return last - before

    yield commits
    engine.dispose()


@contextmanager
def _commit_frames(url: str) -> Iterator[Commits]:
    """SQLite appends pages to its log, and the last one of each commit says so."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    log = Path(f"{engine.url.database}-wal")

    def commits() -> int:
        pages = log.read_bytes() if log.exists() else b""
        size = _FRAME_HEADER_BYTES + int.from_bytes(pages[8:12], "big")
        frames = range(_WAL_HEADER_BYTES, len(pages), size)
        # Emptied each time, so that what is there next time is new.
        with engine.connect() as connection:
            connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
        return sum(pages[frame + 4 : frame + 8] != bytes(4) for frame in frames)

    yield commits
    engine.dispose()
