"""Connections of the store: engines, pools, outages, silent servers and forks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, StaticPool, create_engine, event, make_url, text
from sqlalchemy.exc import NotSupportedError, OperationalError

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.model import Grant
from flask_idempotency.stores.sql import engines
from flask_idempotency.stores.sql.database import TRIES, Database
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from tests.lab.pgbouncer import PgBouncer
from tests.lab.postgres import PostgresServer, StartPostgres
from tests.stores.sql.conftest import MakeEngine, OpenStore, on_postgresql, on_sqlite


@pytest.fixture
def open_database() -> Iterator[Callable[..., Database]]:
    with ExitStack() as ends:

        def open_one(bind: Any) -> Database:
            database = Database(bind)
            ends.callback(database.close)
            return database

        yield open_one


OpenDatabase = Callable[..., Database]


def test_an_url_becomes_two_engines(open_database: OpenDatabase, records_url: str) -> None:
    """One for records, where every statement commits by itself, and one for work in transactions."""
    database = open_database(records_url)

    assert database.engine.pool is not database.base.pool
    with database.engine.connect() as connection, database.base.connect() as looking:
        connection.execute(text("INSERT INTO idempotency_meta VALUES ('seen', 1)"))
        assert 1 == looking.execute(text("SELECT value FROM idempotency_meta WHERE name = 'seen'")).scalar_one()


@on_postgresql
@pytest.mark.parametrize("isolation_level", ("READ COMMITTED", "SERIALIZABLE", "AUTOCOMMIT"))
def test_the_store_connects_like_the_applications_engine(
    open_database: OpenDatabase, make_engine: MakeEngine, isolation_level: str
) -> None:
    """Its connect arguments, what it listens to and how it makes connections; and not a single one of those it has."""
    base = make_engine(
        isolation_level=isolation_level, connect_args={"application_name": "shop"}, pool_size=1, max_overflow=0
    )
    heard: list[str] = []
    event.listen(base, "connect", lambda connection, record: heard.append("connect"))
    event.listen(base, "do_connect", lambda *parts: heard.append("do_connect"))
    database = open_database(base)

    with base.connect() as held:
        held.execute(text("SELECT 1"))
        heard.clear()
        with database.engine.connect() as connection:
            assert "shop" == connection.execute(text("SHOW application_name")).scalar_one()
            assert connection.connection.dbapi_connection.autocommit  # type: ignore[union-attr]
            assert ["do_connect", "connect"] == heard
        assert 1 == base.pool.checkedout()  # type: ignore[attr-defined]
    assert database.base is base


@on_postgresql
@pytest.mark.parametrize("isolation_level", ("SERIALIZABLE", "REPEATABLE READ"))
@pytest.mark.parametrize("strategy", ("row_lock", "advisory"))
def test_our_own_transactions_are_read_committed(
    make_engine: MakeEngine, records_url: str, strategy: str, isolation_level: str
) -> None:
    """
    Under anything stricter who waited for a lock does not see what was written meanwhile. The next statement is on its
    own again.
    """
    store = SqlStore(Database(make_engine(isolation_level=isolation_level)), strategy=strategy)
    levels: list[str] = []

    def ask(connection: Any, cursor: Any, *rest: Any) -> None:
        if not connection.connection.dbapi_connection.autocommit:
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])

    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.release(key, token)
    event.listen(store.database.engine, "before_cursor_execute", ask)
    # A row lock is only for a row that is there, and changes.
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    inside = set(levels)
    levels.clear()
    store.read(a_key())
    store.close()

    assert ({"read committed"}, []) == (inside, levels)


@on_postgresql
def test_sessions_that_hold_all_connections_do_not_block_the_store(make_engine: MakeEngine, records_url: str) -> None:
    """A request that claims has its session's connection already. From the same pool it would wait for itself."""
    base = make_engine(pool_size=1, max_overflow=0, pool_timeout=0.1)
    store = SqlStore(Database(base))
    with base.connect() as held:
        held.execute(text("SELECT 1"))

        assert isinstance(store.claim(a_request(a_key()), token=a_token(), lease=LEASE), Grant)
    store.close()
    assert 1 == base.pool.checkedin()  # type: ignore[attr-defined]


def test_a_pool_that_pings_does_not_ping_for_records(
    open_database: OpenDatabase, make_engine: MakeEngine, records_url: str
) -> None:
    """That would be a second round trip for each."""
    database = open_database(make_engine(pool_pre_ping=True))
    for _ in range(2):
        database.run(lambda connection: connection.execute(text("SELECT 1")).scalar_one())
    pings: list[object] = []
    database.engine.dialect.do_ping = pings.append  # type: ignore[assignment, method-assign]

    database.run(lambda connection: connection.execute(text("SELECT 1")).scalar_one())

    assert [] == pings


def test_a_function_is_called_once_at_first_use(
    open_database: OpenDatabase, make_engine: MakeEngine, records_url: str
) -> None:
    """Flask-SQLAlchemy has its engine inside an application's context, and not before."""
    asked: list[Engine] = []

    def bind() -> Engine:
        asked.append(make_engine())
        return asked[-1]

    database = open_database(bind)
    assert ([], False) == (asked, database.known)

    assert database.base is asked[0]
    assert database.engine is database.engine
    assert (1, True) == (len(asked), database.known)


def test_a_null_pool_works(make_engine: MakeEngine, records_url: str) -> None:
    """As behind a pooler: a connection for each call."""
    store = SqlStore(Database(make_engine(poolclass=NullPool)))

    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    store.close()


def test_closing_leaves_the_applications_connections_alone(make_engine: MakeEngine, records_url: str) -> None:
    base = make_engine()
    with base.connect() as connection:
        SqlStore(Database(base)).close()

        assert 1 == connection.execute(text("SELECT 1")).scalar_one()


def test_a_database_in_memory_is_refused() -> None:
    """Every connection would have one of its own. The remedy is named."""
    urls = (
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:shop?mode=memory&uri=true",
        "sqlite:///file::memory:?cache=shared&uri=true",
        make_url("sqlite://"),
    )
    for url in urls:
        with pytest.raises(ConfigurationError, match=r"sqlite:////path/to/file\.db.*memory://"):
            Database(url)


def test_an_engine_of_one_connection_is_refused() -> None:
    """It is how tests keep SQLite in memory, and shares its one connection with every session."""
    engine = create_engine("sqlite://", poolclass=StaticPool)

    with pytest.raises(ConfigurationError, match="in memory"):
        Database(engine)
    engine.dispose()


def test_other_databases_and_objects_are_refused() -> None:
    """Before the first request, and whether or not the driver is installed: nobody has tested what it does."""
    for url in ("mssql+pyodbc://sa@host/x", "oracle+oracledb://system@host/x", "duckdb:///x"):
        with pytest.raises(ConfigurationError, match=r"postgresql\+psycopg://"):
            Database(url)
    binds: tuple[Any, ...] = (None, 5, object())
    for bind in binds:
        with pytest.raises(ConfigurationError, match="Pass an Engine"):
            Database(bind)


def test_a_function_must_return_an_engine(open_database: OpenDatabase) -> None:
    with pytest.raises(ConfigurationError, match="Pass an Engine"):
        open_database(lambda: "sqlite:///file.db").engine  # noqa: B018


def test_an_error_about_an_url_does_not_quote_its_password() -> None:
    urls = (
        "postgresql://shop:hunter2@db:port/x",
        "postgres://shop:hunter2@db/x",
        "hunter2",
        "nosuch+driver://shop:hunter2@db/x",
        "postgresql+psycopg://shop:hunter2/x@db:x/y",
    )
    for url in urls:
        with pytest.raises(ConfigurationError) as caught:
            Database(url)

        assert "hunter2" not in str(caught.value)
        assert caught.value.__suppress_context__


def test_timeouts_are_set_unless_the_url_sets_them() -> None:
    """Without it a worker waits a quarter of an hour for a network that swallows what it sends."""
    usual = engines._connect_args(make_url("postgresql+psycopg://h/x"))
    chosen = engines._connect_args(make_url("postgresql+psycopg://h/x?connect_timeout=9"))

    assert {"connect_timeout": 3, "tcp_user_timeout": 5000} == usual
    assert {"tcp_user_timeout": 5000} == chosen


NAMES = text("SELECT name FROM pg_prepared_statements")


def repeated(database: Database) -> list[str]:
    """The names that a server connection has after a statement was sent twenty times."""
    for _ in range(20):
        database.run(lambda connection: connection.execute(text("SELECT 1")).scalar_one())
    return list(database.run(lambda connection: connection.execute(NAMES).scalars()))


def setting(database: Database, name: str) -> str:
    return str(database.run(lambda connection: connection.execute(text(f"SHOW {name}")).scalar_one()))


@on_postgresql
def test_statements_that_repeat_are_prepared(open_database: OpenDatabase, records_url: str) -> None:
    """Half of a replay is planning. A plan for a table that was empty must not read all of it once it is full."""
    database = open_database(records_url)

    (name,) = repeated(database)
    assert len(name) > len("_pg3_1234567")
    assert ("off", "off") == (setting(database, "enable_seqscan"), setting(database, "jit"))
    with database.base.connect() as connection:
        assert "on" == connection.execute(text("SHOW enable_seqscan")).scalar_one()


def test_behind_a_pooler_statements_are_prepared_if_it_carries_them(
    pgbouncer: PgBouncer, pgbouncer_url: str, open_database: OpenDatabase
) -> None:
    """An older one would send the name to another server connection. Settings of a session never outlive a transaction."""
    database = open_database(pgbouncer_url)

    names = repeated(database)
    assert pgbouncer.carries_statements == bool(names)
    assert not [name for name in names if not name.startswith("PGBOUNCER_")]
    assert "on" == setting(database, "enable_seqscan")


class Pooler:
    """A connection of psycopg's through a pooler that shows these prepared statements."""

    Error = OSError

    def __init__(self, *names: str) -> None:
        self.names = names
        self.prepare_threshold, self.prepared_max = None, 100
        self.room: tuple[int | None, int] | None = None

    def transaction(self) -> Any:
        return nullcontext()

    def execute(self, sql: str, *, prepare: bool) -> list[tuple[str]]:
        self.room = (self.prepare_threshold, self.prepared_max)
        if "refuses" in self.names:
            raise self.Error
        return [(name,) for name in self.names if prepare]


@pytest.mark.parametrize(
    ("names", "carried"),
    (
        (("PGBOUNCER_7",), True),
        (("PGBOUNCER_7", "PGBOUNCER_8"), True),
        (("_pg3_12",), False),
        (("PGBOUNCER_7", "_pg3_12"), False),
        ((), False),
        (("refuses",), False),
    ),
)
def test_a_pooler_carries_statements_if_it_renames_them(names: tuple[str, ...], carried: bool) -> None:
    pooler = Pooler(*names)

    assert carried == engines._are_carried(pooler)
    assert ((0, 0), (None, 100)) == (pooler.room, (pooler.prepare_threshold, pooler.prepared_max))


@on_postgresql
def test_a_prepared_statement_that_is_gone_is_sent_again(open_database: OpenDatabase, records_url: str) -> None:
    """As when a pooler was told to carry no more of them. From then on nothing is prepared."""
    database = open_database(records_url)
    repeated(database)
    database.run(lambda connection: connection.connection.dbapi_connection.pgconn.exec_(b"DEALLOCATE ALL"))  # type: ignore[union-attr]

    assert 1 == database.run(lambda connection: connection.execute(text("SELECT 1")).scalar_one())
    assert [] == repeated(database)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_prepared_statement_that_is_older_than_its_table_is_sent_again(
    request: pytest.FixtureRequest, open_database: OpenDatabase, postgres_server: PostgresServer, pooled: bool
) -> None:
    """PostgreSQL refuses it for as long as the session lives, and the session of a pooler lives on."""
    server = request.getfixturevalue("pgbouncer") if pooled else postgres_server
    with postgres_server.database() as name:
        database = open_database(server.url(name))
        read = text("SELECT kind FROM things")

        def kinds(times: int) -> list[str]:
            return [database.run(lambda connection: connection.execute(read).scalar_one()) for _ in range(times)]

        with database.base.begin() as connection:
            connection.execute(text("CREATE TABLE things AS SELECT CAST('a' AS varchar(9)) AS kind"))
        kinds(20)
        with database.base.begin() as connection:
            connection.execute(text("ALTER TABLE things ALTER COLUMN kind TYPE varchar(90)"))
        assert ["a"] * 20 == kinds(20)
        assert pooled != bool(repeated(database))
        with pytest.raises(NotSupportedError):
            database.run(
                lambda connection: connection.execute(
                    text("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '0A000'; END $$")
                )
            )
        database.close()


@on_postgresql
@pytest.mark.parametrize("threshold", [None, 5])
def test_an_applications_engine_prepares_as_the_application_wants(
    make_engine: MakeEngine, open_database: OpenDatabase, records_url: str, threshold: int | None
) -> None:
    """Its sessions are behind the same pooler, if there is one, and half of a replay is planning."""
    database = open_database(make_engine(records_url, connect_args={"prepare_threshold": threshold}))

    with database.engine.connect() as connection:
        assert threshold == connection.connection.dbapi_connection.prepare_threshold  # type: ignore[union-attr]


@on_sqlite
def test_a_commit_is_on_the_disk(open_database: OpenDatabase, records_url: str) -> None:
    database = open_database(records_url)

    with database.engine.connect() as connection:
        pragmas = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("journal_mode", "synchronous")
        ]
        waits = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()

    assert (["wal", 2], 5000) == (pragmas, waits)


@on_sqlite
def test_a_file_in_use_is_opened_all_the_same(
    open_store: OpenStore, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    To log ahead, SQLite needs the file to itself for a moment. Whoever looks must not wait for that; once it is free,
    the next connection sees to it.
    """
    monkeypatch.setattr(engines, "BUSY_MS", 3_600_000)
    store = open_store()
    with make_engine(isolation_level="AUTOCOMMIT").connect() as elsewhere:
        elsewhere.execute(text("BEGIN IMMEDIATE"))
        assert store.read(a_key()) is None
        elsewhere.execute(text("ROLLBACK"))
    store.close()

    with open_store().database.engine.connect() as connection:
        assert "wal" == connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()


@on_sqlite
def test_a_longer_timeout_of_the_application_stays(open_database: OpenDatabase, make_engine: MakeEngine) -> None:
    database = open_database(make_engine(connect_args={"timeout": 9}))

    with database.engine.connect() as connection:
        assert 9000 == connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()


@on_postgresql
def test_a_stale_connection_is_replaced_silently(open_store: OpenStore, make_engine: MakeEngine) -> None:
    """The server has ended it, as all are after a restart: the statement is sent once more, over a new one."""
    store, key, token = open_store(), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    end_all_others(make_engine)

    store.complete(key, token, PAYLOAD, keep=KEEP)
    end_all_others(make_engine)
    assert store.read(key) is not None
    end_all_others(make_engine)
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))


@on_postgresql
def test_a_connection_that_breaks_every_time_is_an_outage(open_store: OpenStore, make_engine: MakeEngine) -> None:
    store = open_store()
    tried: list[int] = []

    def breaks(connection: Any) -> None:
        tried.append(1)
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(StoreUnavailable):
        store.database.run(breaks)

    assert 2 == len(tried)


@on_postgresql
@pytest.mark.parametrize("state", ("40001", "40P01"))
def test_a_serialization_conflict_is_retried(open_store: OpenStore, state: str) -> None:
    """A few times, without waiting; then it is an outage."""
    store = open_store()
    tried: list[int] = []

    def contended(connection: Any, *, until: int) -> int:
        tried.append(1)
        if len(tried) < until:
            connection.execute(text(f"DO $$ BEGIN RAISE EXCEPTION SQLSTATE '{state}'; END $$"))
        return len(tried)

    assert TRIES == store.database.run(lambda connection: contended(connection, until=TRIES))
    tried.clear()
    with pytest.raises(StoreUnavailable):
        store.database.run(lambda connection: contended(connection, until=TRIES + 1))
    assert TRIES == len(tried)


def test_a_programming_error_is_not_an_outage(open_store: OpenStore, database_url: str) -> None:
    """It would be retried for ever, and never mended. SQLite has one name for all errors."""
    store = open_store()
    statements = ("SELEKT 1", "SELECT 1/0", "INSERT INTO idempotency_meta VALUES ('fence', NULL)")
    on_sqlite = database_url.startswith("sqlite")
    for statement in statements[: 1 if on_sqlite else None]:
        with pytest.raises(Exception, match="syntax error" if on_sqlite else r"psycopg\.errors") as caught:
            store.database.run(lambda connection, sql=statement: connection.execute(text(sql)))  # type: ignore[misc]

        assert not isinstance(caught.value, StoreUnavailable)


def test_a_database_without_our_tables_is_one_sentence_and_no_statement(
    open_database: OpenDatabase, database_url: str
) -> None:
    """In the log of every request, until somebody reads it: the SQL behind it says nothing more."""
    store = SqlStore(open_database(database_url))

    with pytest.raises(ConfigurationError, match="run `flask idempotency db upgrade`") as caught:
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)

    logged = "".join(traceback.format_exception(caught.value))
    assert (False, False) == ("INSERT INTO" in logged, "sqlalchemy" in logged)


def test_an_outage_has_its_cause(open_database: OpenDatabase, database_url: str) -> None:
    database = open_database(database_url)
    refused = OperationalError("SELECT 1", {}, ConnectionError("broken"))

    def work(connection: Connection) -> None:
        raise refused

    with pytest.raises(StoreUnavailable) as caught:
        database.run(work)

    assert refused is caught.value.__cause__


def test_a_long_task_waits_until_the_first_connection_is_set_up(
    make_engine: MakeEngine, records_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pools share what the first connection learns of the server, and each waits for its own connections only."""
    base = make_engine()
    database = Database(base)
    begun, go_on, initialize = threading.Event(), threading.Event(), base.dialect.initialize

    def slowly(connection: Connection) -> None:
        begun.set()
        assert go_on.wait(60)
        initialize(connection)

    def one(connection: Connection) -> int:
        return int(connection.execute(text("SELECT 1")).scalar_one())

    monkeypatch.setattr(base.dialect, "initialize", slowly)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(database.run, one)
        assert begun.wait(60)
        long = threads.submit(partial(database.run, one, long=True))
        # Broken, it would not wait: it would end here, with an AttributeError.
        wait([long], timeout=0.2)
        go_on.set()
        assert (1, 1) == (first.result(60), long.result(60))
    database.close()


@on_postgresql
def test_a_pool_that_is_used_up_is_an_outage(make_engine: MakeEngine, records_url: str) -> None:
    store = SqlStore(Database(make_engine(pool_size=1, max_overflow=0, pool_timeout=0.05)))
    with store.database.engine.connect(), pytest.raises(StoreUnavailable, match="became free"):
        store.read(a_key())
    store.close()


@pytest.mark.slow
def test_a_server_that_is_gone_is_an_outage_until_it_is_back(start_postgres: StartPostgres) -> None:
    """Killed, it is an outage at once. Restarted, the next call works, and what was granted is known."""
    server = start_postgres()
    server.create_database("records")
    store = SqlStore(Database(server.url("records")))
    metadata.create_all(store.database.base)
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))

    server.kill()
    with pytest.raises(StoreUnavailable):
        store.complete(key, token, PAYLOAD, keep=KEEP)
    server.restart()

    store.complete(key, token, PAYLOAD, keep=KEEP)
    record = store.read(key)
    store.close()
    assert record is not None
    assert PAYLOAD == record.payload


@on_postgresql
def test_a_silent_server_is_an_outage(
    open_store: OpenStore, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    One that keeps the connection open and never answers, as a frozen machine does. It is asked once, the connection is
    not used again, and the next one is as good as new.
    """
    store, key = open_store(), a_key()
    pid = store.database.run(lambda connection: connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
    monkeypatch.setattr(engines, "READ_TIMEOUT_SECONDS", 0.3)
    with stopped(pid):
        with pytest.raises(StoreUnavailable):
            store.read(key)

        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))


def test_a_server_that_accepts_and_never_replies_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CONNECT_SECONDS", 2)  # the least that libpq knows
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = SqlStore(Database(f"postgresql+psycopg://shop@127.0.0.1:{port}/x"))

        with pytest.raises(StoreUnavailable):
            store.read(a_key())
        store.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_shares_no_connection(records_url: str) -> None:
    """Workers of a preloaded application work at the same time as their parent, on connections of their own."""
    run = subprocess.run(
        # An inherited connection is not ours to close, whatever psycopg says of that.
        [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-m", "tests.stores.sql.forking", records_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (0, "") == (run.returncode, run.stderr)


def end_all_others(make_engine: MakeEngine) -> None:
    ends = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
    with make_engine(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text(f"{ends} AND pid <> pg_backend_pid()"))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@on_sqlite
def test_a_backup_as_documented_has_every_row(
    database_url: str, make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = tmp_path / "shop.sqlite3"
    database = Database(f"sqlite:///{shop}")
    page = (Path(__file__).parents[3] / "docs" / "guides" / "sql.md").read_text(encoding="utf-8")
    (block,) = [block for block in page.split("```python\n")[1:] if "shop.backup(" in block.partition("```")[0]]
    monkeypatch.chdir(tmp_path)
    with database.engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE payments (id INTEGER)")
        connection.exec_driver_sql("INSERT INTO payments VALUES (7)")

        copied = tmp_path / "copied.sqlite3"
        copied.write_bytes(shop.read_bytes())
        exec(block.partition("```")[0], {})  # noqa: S102 - our own page

        with make_engine(f"sqlite:///{copied}").connect() as lacking:
            assert [] == lacking.exec_driver_sql("SELECT name FROM sqlite_master").all()
        with make_engine(f"sqlite:///{tmp_path / 'backup.sqlite3'}").connect() as whole:
            assert [(7,)] == whole.exec_driver_sql("SELECT id FROM payments").all()
    database.close()


@pytest.mark.parametrize("chosen", (None, 42))
def test_a_new_connection_has_a_short_timeout_unless_the_application_chose_one(chosen: int | None) -> None:
    """libpq would wait for two minutes, and a claim is refused long before. The application's own connections keep theirs."""
    engine = create_engine(
        "postgresql+psycopg://nobody@127.0.0.1:1/nothing",
        connect_args={} if chosen is None else {"connect_timeout": chosen},
    )
    asked: list[object] = []

    def connect(*arguments: object, **options: object) -> None:
        asked.append((options.get("connect_timeout"), options.get("tcp_user_timeout")))
        raise ConnectionRefusedError

    engine.dialect.connect = connect  # type: ignore[assignment, method-assign]
    store = SqlStore(Database(engine))
    for attempt in (engine.connect, store.database.engine.connect):
        with pytest.raises(ConnectionRefusedError):
            attempt()

    assert [(chosen, None), (chosen or engines.CONNECT_SECONDS, 5000)] == asked
