"""Records in SQL, on PostgreSQL, MariaDB and SQLite: times and counts of each path, beside the same statements by hand."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from threading import get_ident
from typing import IO, Any, Final, Self, TypeAlias

from sqlalchemy import Engine, create_engine, event, text

from benchmarks import apps, report, sql_apps
from benchmarks.harness import BARE, FIRST, NO_KEY, OUTCOMES, REPLAY, Case, Cores, Timing, call, measure
from benchmarks.paths import keyed_cases, no_key_case
from benchmarks.report import Row, Section, Verdict, at_most
from benchmarks.sql_apps import MARIADB, MISSING, NO_MARIADB, POSTGRESQL, Database, NotEmpty, SqlApp

BUSINESS = "business alone"
BY_HAND, BY_HAND_TRANSACTIONAL = "by hand", "by hand, transactional"
PLAIN, ROW_LOCK, ADVISORY = "ours, insert", "ours, row_lock", "ours, advisory"
TRANSACTIONAL, TIERED, REDIS_GONE = "ours, transactional", "ours, tiered", "ours, tiered, Redis gone"
ON_REDIS = "ours, Redis"

AppPath: TypeAlias = tuple[str, str]

# What a case is compared with. A tiered replay reaches only Redis. A cache that is gone should cost nothing on top of the
# store.
FLOORS: Final[dict[AppPath, AppPath]] = {
    **{(PLAIN, path): (BY_HAND, path) for path in OUTCOMES},
    **{(app, path): (BY_HAND, path) for app in (ROW_LOCK, ADVISORY) for path in (FIRST, REPLAY)},
    **{(TRANSACTIONAL, path): (BY_HAND_TRANSACTIONAL, path) for path in (FIRST, REPLAY)},
    (TIERED, FIRST): (BY_HAND_TRANSACTIONAL, FIRST),
    (TIERED, REPLAY): (ON_REDIS, REPLAY),
    (REDIS_GONE, REPLAY): (TRANSACTIONAL, REPLAY),
}


SqlCase: TypeAlias = tuple[Case, SqlApp]

PROFILED: Final = {"insert": PLAIN, "transactional": TRANSACTIONAL, "tiered": TIERED}


def sections(url: str | None, redis_url: str, cores: Cores, *, rounds: int, requests: int) -> list[Section]:
    """Return two tables for each database. Without a PostgreSQL a sentence replaces its tables."""

    def both(database: Database) -> list[Section]:
        return [
            _timed(database, redis_url, rounds=rounds, requests=requests),
            _counted(database, redis_url),
        ]

    with _postgresql(url, cores) as database:
        shown = [_missing(POSTGRESQL, MISSING)] if database is None else both(database)
    with sql_apps.mariadb(cores) as database:
        shown += [_missing(MARIADB, NO_MARIADB)] if database is None else both(database)
    with sql_apps.sqlite() as file:
        return [*shown, *both(file)]


@contextmanager
def one_case(name: str, path: str, url: str | None, redis_url: str, cores: Cores) -> Iterator[Case]:
    """Yield one path through this library, for a profiler."""
    with _postgresql(url, cores) as found, sql_apps.sqlite() as file, our_sql_cases(found or file, redis_url) as cases:
        chosen = [case for case, _ in cases if (case.app, case.path) == (PROFILED[name], path)]
        if not chosen:
            sys.exit(f"{PROFILED[name]}: {path} is not measured")
        yield chosen[0]


@contextmanager
def _postgresql(url: str | None, cores: Cores) -> Iterator[Database | None]:
    try:
        with sql_apps.postgresql(url, cores) as database:
            yield database
    except NotEmpty as error:
        sys.exit(str(error))


def _missing(kind: str, why: str) -> Section:
    print(why, file=sys.stderr)
    return Section(f"Records in {kind}", why)


@contextmanager
def sql_cases(database: Database, redis_url: str) -> Iterator[list[SqlCase]]:
    """Yield every case on this database, with its application."""
    with ExitStack() as ends:
        bare, rows = SqlApp(apps.bare()), _until(ends, sql_apps.business(database.url))
        cases = [(no_key_case(BARE, bare.flask), bare), (no_key_case(BUSINESS, rows.flask), rows)]
        for name, transactional, paths in ((BY_HAND, False, OUTCOMES), (BY_HAND_TRANSACTIONAL, True, (FIRST, REPLAY))):
            gate = apps.Gate()
            app = _until(ends, sql_apps.by_hand(database.url, gate, transactional=transactional))
            cases += _chosen(ends, name, app, gate, paths)
        gate = apps.Gate()
        on_redis = SqlApp(apps.ours(redis_url, gate=gate))
        cases += _chosen(ends, ON_REDIS, on_redis, gate, (REPLAY,))
        yield [*cases, *ends.enter_context(our_sql_cases(database, redis_url))]


def _chosen(ends: ExitStack, name: str, app: SqlApp, gate: apps.Gate, paths: Collection[str]) -> list[SqlCase]:
    keyed = ends.enter_context(keyed_cases(name, app.flask, gate))
    return [(case, app) for case in keyed if case.path in paths]


@contextmanager
def our_sql_cases(database: Database, redis_url: str) -> Iterator[list[SqlCase]]:
    """Yield the cases of this library only."""
    with ExitStack() as ends:
        cases: list[SqlCase] = []
        for name, make, paths in _ours(database, redis_url, ends.enter_context(_gone_redis())):
            gate = apps.Gate()
            cases += _chosen(ends, name, _until(ends, make(gate)), gate, paths)
        yield cases


Ours: TypeAlias = tuple[str, Callable[[apps.Gate], SqlApp], tuple[str, ...]]


def _ours(database: Database, redis_url: str, gone: str) -> Iterator[Ours]:
    url = database.url
    yield PLAIN, lambda gate: sql_apps.ours_plain(url, gate), OUTCOMES
    if database.kind == POSTGRESQL:
        yield ROW_LOCK, lambda gate: sql_apps.ours_plain(url, gate, strategy="row_lock"), (FIRST, REPLAY)
        yield ADVISORY, lambda gate: sql_apps.ours_plain(url, gate, strategy="advisory"), (FIRST, REPLAY)
    yield TRANSACTIONAL, lambda gate: sql_apps.ours_transactional(url, gate), (FIRST, REPLAY)
    yield TIERED, lambda gate: sql_apps.ours_transactional(url, gate, redis_url=redis_url), (FIRST, REPLAY)
    yield REDIS_GONE, lambda gate: sql_apps.ours_transactional(url, gate, redis_url=gone), (REPLAY,)


@contextmanager
def _gone_redis() -> Iterator[str]:
    """Yield the URL of a port that refuses connections."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{closed.getsockname()[1]}/0"


def _until(ends: ExitStack, app: SqlApp) -> SqlApp:
    ends.callback(app.close)
    return app


TIMED_NOTE = (
    "µs through the WSGI callable, medians of interleaved rounds. `CPU` is the processor time of this process, without the "
    "server's and without waiting.\n`× floor` compares with the same path by hand, a tiered replay with a replay on Redis, and "
    "without its Redis with a replay that never had\na Redis. The goals are for processor time."
)

Timings: TypeAlias = dict[AppPath, Timing]


def _timed(database: Database, redis_url: str, *, rounds: int, requests: int) -> Section:
    with sql_cases(database, redis_url) as cases:
        measured = measure([case for case, _ in cases], rounds=rounds, requests=requests)
    timings = {(timing.case.app, timing.case.path): timing for timing in measured}
    note = f"{database.about}.\n{TIMED_NOTE}"
    return Section(
        f"Records in {database.kind}", note, [_timed_row(timing, timings, database.kind) for timing in measured]
    )


def _timed_row(timing: Timing, timings: Timings, kind: str) -> Row:
    path = timing.case.app, timing.case.path
    cells: dict[str, float | str] = {
        "p50": timing.typical,
        "p99": timing.quantile(0.99),
        "CPU": median(timing.processor),
        "× bare": timing.ratio_to(timings[BARE, NO_KEY]),
    }
    if path not in FLOORS:
        return Row(f"{timing.case.app}: {timing.case.path}", cells)
    floor = timings[FLOORS[path]]
    ratio = timing.processor_ratio_to(floor)
    cells |= {"× floor": timing.ratio_to(floor), "CPU × floor": ratio}
    verdicts: list[Verdict] = []
    if timing.case.app == TRANSACTIONAL:
        most = report.SQL_CPU_TO_BY_HAND[kind]
        verdicts = [at_most(f"CPU ≤ {most} × by hand", ratio, most)]
    elif kind == MARIADB and path == (PLAIN, FIRST):
        wall, most = timing.ratio_to(floor), report.MARIADB_FIRST_TO_BY_HAND
        verdicts = [at_most(f"≤ {most} × by hand", wall, most)]
    elif path == (TIERED, REPLAY):
        verdicts = [at_most("CPU = on Redis", ratio, report.TIERED_TO_REDIS)]
    return Row(f"{timing.case.app}: {timing.case.path}", cells, verdicts)


COUNTED_REQUESTS = 20
COUNTING_ATTEMPTS = 5

COUNTED_NOTE = (
    "Per request. `commits` are transactions that wrote, by the count of the database. `trips` are all round trips to the "
    "server, with those of BEGIN, COMMIT and ROLLBACK."
)

_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24

Commits: TypeAlias = Callable[[], int]
"""Returns how many there were since the last call."""


class Statements:
    """Counts what these engines send: statements by SQLAlchemy's events, and round trips by libpq's trace."""

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
        # A copy, because a thread that renews a lease may check a connection out now, which adds a trace.
        for trace in list(self._traces.values()):
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
        # Another thread renews the lease of another request.
        self.sent += get_ident() == self._thread

    def _trace(self, connection: Any, *_: Any) -> None:
        if connection not in self._traces:
            self._traces[connection] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the counter
            connection.pgconn.trace(self._traces[connection].fileno())


def _counted(database: Database, redis_url: str) -> Section:
    shown = Section(f"Statements and commits on {database.kind}", COUNTED_NOTE)
    commits_of = {POSTGRESQL: _xids, MARIADB: _transactions}.get(database.kind, _commit_frames)
    with (
        sql_cases(database, _patient(redis_url)) as cases,
        commits_of(database.url) as commits,
        Statements({engine for _, app in cases for engine in app.engines}) as statements,
    ):
        shown.rows.extend(_counted_row(case, statements, commits, database) for case, app in cases if app.engines)
    return shown


def _patient(redis_url: str) -> str:
    # A cache that did not answer within milliseconds is left out for a while, and the database then gets what is counted.
    return f"{redis_url}{'&' if '?' in redis_url else '?'}socket_timeout=10&socket_connect_timeout=10"


def _counted_row(case: Case, statements: Statements, commits: Commits, database: Database) -> Row:
    # psycopg prepares a statement after it has sent it some times. That costs a round trip once, and not per request.
    _call(case)
    for _ in range(COUNTING_ATTEMPTS):
        sent_before, trips_before = statements.sent, statements.trips
        commits()
        _call(case)
        committed, sent = commits() / COUNTED_REQUESTS, (statements.sent - sent_before) / COUNTED_REQUESTS
        trips = (statements.trips - trips_before) / COUNTED_REQUESTS
        # Another thread may renew the lease of a held request, which adds to a count: then count again.
        if all(number == int(number) for number in (sent, committed, trips)):
            break
    counts = {"statements": sent, "commits": committed}
    if database.kind == POSTGRESQL:
        counts["trips"] = trips
    cells: dict[str, float | str] = {
        name: int(count) if count == int(count) else count for name, count in counts.items()
    }
    return Row(f"{case.app}: {case.path}", cells, _counted_verdicts(case, sent, committed, database))


def _call(case: Case) -> None:
    for _ in range(COUNTED_REQUESTS):
        case.check(call(case.flask, case.make()))


def _counted_verdicts(case: Case, sent: float, commits: float, database: Database) -> list[Verdict]:
    if case.app not in (PLAIN, TRANSACTIONAL):
        return []
    allowed = report.SQL_COMMITS[case.path]
    verdicts = [Verdict(f"{allowed} commits", commits, commits == allowed)]
    if case.app == PLAIN and database.kind == POSTGRESQL:
        allowed = report.SQL_STATEMENTS[case.path]
        verdicts.insert(0, Verdict(f"{allowed} statements", sent, sent == allowed))
    return verdicts


@contextmanager
def _xids(url: str) -> Iterator[Commits]:
    """Count by transaction numbers: PostgreSQL assigns one at the first write of a transaction."""
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
def _transactions(url: str) -> Iterator[Commits]:
    """Count by InnoDB's own counter of transactions that wrote."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    counted = text("SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rw_commits'")
    last = 0

    def commits() -> int:
        nonlocal last
        with engine.connect() as connection:
            before, last = last, int(connection.execute(counted).scalar_one())
        return last - before

    with engine.connect() as connection:
        connection.execute(text("SET GLOBAL innodb_monitor_enable = 'trx_rw_commits'"))
    yield commits
    engine.dispose()


@contextmanager
def _commit_frames(url: str) -> Iterator[Commits]:
    """Count by the write-ahead log: SQLite appends pages, and marks the last page of each commit."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    log = Path(f"{engine.url.database}-wal")

    def commits() -> int:
        pages = log.read_bytes() if log.exists() else b""
        size = _FRAME_HEADER_BYTES + int.from_bytes(pages[8:12], "big")
        frames = range(_WAL_HEADER_BYTES, len(pages), size)
        # Empty the log, so that the next call finds new pages only.
        with engine.connect() as connection:
            connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
        return sum(pages[frame + 4 : frame + 8] != bytes(4) for frame in frames)

    yield commits
    engine.dispose()
