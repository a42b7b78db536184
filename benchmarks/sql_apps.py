"""The payments service on a SQL database, and the databases for a run: a PostgreSQL, a MariaDB, and a SQLite file.

By hand is what a good engineer who knows SQLAlchemy writes in two hooks, with what `by_hand` has on Redis. The record uses
Core, compiled once, on an engine that commits every statement. The rows use Flask-SQLAlchemy's session, and with transactional
effects the second hook writes the response in the session's transaction and commits both.
"""

from __future__ import annotations

import secrets
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flask import Flask, Response, g, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    LargeBinary,
    NullPool,
    String,
    Table,
    Text,
    bindparam,
    create_engine,
    delete,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.apps import KEEP_SECONDS, LEASE_SECONDS, PRINCIPAL, SECRET, UNRENEWED_SECONDS, Gate, bare, ours, paid
from benchmarks.by_hand import fingerprint, invalid_key, kept_headers, replayed, reused_key, running, scoped, sent_key
from benchmarks.harness import Cores, pin
from flask_idempotency import Idempotency
from flask_idempotency.stores.sql.database import Database as SqlDatabase
from flask_idempotency.stores.sql.schema import metadata as records_metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.sql.transactional.session import TransactionalSqlStore
from tests.lab import mariadb as lab_mariadb
from tests.lab.postgres import PostgresServer, installation

POSTGRESQL, MARIADB, SQLITE = "PostgreSQL", "MariaDB", "SQLite"
MISSING = (
    "NOT MEASURED: there is no PostgreSQL on this machine. `python3 run.py setup` installs the pinned one. Or name yours with "
    "--database-url or DATABASE_URL."
)
NO_MARIADB = (
    "NOT MEASURED: there is no MariaDB on this machine. Install your system's package, such as Debian's mariadb-server."
)


class Base(DeclarativeBase):
    pass


class Payment(Base):
    """The business row: one for each payment."""

    __tablename__ = "benchmark_payments"

    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str] = mapped_column(String(64))
    amount: Mapped[int]
    currency: Mapped[str] = mapped_column(String(3))
    description: Mapped[str] = mapped_column(String(500))


metadata = Base.metadata
_keys = Table(
    "benchmark_keys",
    metadata,
    Column("key", String(255), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("token", LargeBinary(16), nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("status", Integer),
    Column("headers", Text),
    Column("body", LargeBinary),
)
_mine = _keys.c.key == bindparam("my_key", type_=String)

# Text works on PostgreSQL and SQLite. SQLAlchemy 2.0 compiles its ON CONFLICT again at every execution.
_CLAIM = text(
    "INSERT INTO benchmark_keys (key, fingerprint, token, expires_at) VALUES (:key, :fingerprint, :token, :expires_at) "
    "ON CONFLICT DO NOTHING RETURNING key"
)
_CLAIM_MARIADB = text(
    "INSERT IGNORE INTO benchmark_keys (`key`, fingerprint, token, expires_at) "
    "VALUES (:key, :fingerprint, :token, :expires_at)"
)
_READ = select(_keys.c.fingerprint, _keys.c.expires_at, _keys.c.status, _keys.c.headers, _keys.c.body).where(_mine)
_FORGET = delete(_keys).where(_mine, _keys.c.expires_at < bindparam("now"))
_COMPLETE = (
    update(_keys)
    .where(_mine, _keys.c.token == bindparam("my_token", type_=LargeBinary))
    .values({name: bindparam(f"my_{name}") for name in ("status", "headers", "body", "expires_at")})
)


@dataclass(frozen=True, slots=True)
class SqlApp:
    """An application, and the engines that send its statements."""

    flask: Flask
    engines: tuple[Engine, ...] = ()

    def close(self) -> None:
        for engine in self.engines:
            engine.dispose()


def business(url: str) -> SqlApp:
    """Return the business alone: one row in one commit, and no idempotency."""
    db = _db()

    def pay() -> Response:
        response = _paid_into(db)
        db.session.commit()
        return response

    return SqlApp(*_with_rows(bare(pay), db, url))


def by_hand(url: str, gate: Gate, *, transactional: bool = False) -> SqlApp:
    """Return the service with two hooks by hand. `transactional` puts the view's row and the response in one commit."""
    engine, db = _autocommit(url), _db() if transactional else None
    app, engines = (bare(gate=gate), ()) if db is None else _with_rows(bare(lambda: _paid_into(db), gate=gate), db, url)
    ignores = engine.dialect.name == "mysql"

    def is_new(connection: Connection, claim: dict[str, object]) -> bool:
        if ignores:
            return connection.execute(_CLAIM_MARIADB, claim).rowcount == 1
        return connection.execute(_CLAIM, claim).one_or_none() is not None

    @app.before_request
    def before() -> Response | None:
        sent = sent_key()
        if sent is None:
            return None
        if not 1 <= len(sent) <= 255:
            return invalid_key()
        key, mine, token, now = scoped(sent), fingerprint(), secrets.token_bytes(16), int(time.time() * 1000)
        claim = {"key": key, "fingerprint": mine, "token": token, "expires_at": now + UNRENEWED_SECONDS * 1000}
        g.claim = key, token
        with engine.connect() as connection:
            if is_new(connection, claim):
                return None
            stored = connection.execute(_READ, {"my_key": key}).one_or_none()
            if stored is None or stored.expires_at < now:
                connection.execute(_FORGET, {"my_key": key, "now": now})
                if is_new(connection, claim):
                    return None
        g.pop("claim")
        if stored is None:
            return running()
        if stored.fingerprint != mine:
            return reused_key()
        return running() if stored.status is None else replayed(stored.status, stored.headers, stored.body)

    @app.after_request
    def after(response: Response) -> Response:
        claimed = g.pop("claim", None)
        if claimed is None or response.status_code >= 500:
            return response
        values = {
            "my_key": claimed[0],
            "my_token": claimed[1],
            "my_status": response.status_code,
            "my_headers": kept_headers(response),
            "my_body": response.get_data(),
            "my_expires_at": int(time.time() + KEEP_SECONDS) * 1000,
        }
        if db is None:
            with engine.connect() as connection:
                connection.execute(_COMPLETE, values)
            return response
        if not db.session.connection().execute(_COMPLETE, values).rowcount:
            db.session.rollback()
            return running()
        db.session.commit()
        return response

    return SqlApp(app, (engine, *engines))


def ours_plain(url: str, gate: Gate, *, strategy: str = "insert") -> SqlApp:
    """Return this library with records in SQL and effects elsewhere."""
    store = SqlStore(SqlDatabase(url), strategy=strategy)
    return SqlApp(ours(store, gate=gate), (store.database.engine, store.database.base))


def ours_transactional(url: str, gate: Gate, *, redis_url: str | None = None) -> SqlApp:
    """Return this library with the view's row and the record in one commit, and with a Redis in front if you name one."""
    db = _db()
    app, engines = _with_rows(bare(lambda: _paid_into(db), gate=gate), db, url)
    store = TransactionalSqlStore(SqlDatabase(engines[0]), sessions=lambda: db.session)
    options: dict[str, Any] = {"secret": SECRET, "lease": LEASE_SECONDS, "effects": "transactional"}
    if redis_url is not None:
        options["redis_url"] = redis_url
    Idempotency(app, principal=lambda: PRINCIPAL, store=store, **options)
    return SqlApp(app, (store.database.engine, *engines))


def _autocommit(url: str) -> Engine:
    return create_engine(url, isolation_level="AUTOCOMMIT")


def _db() -> SQLAlchemy:
    return SQLAlchemy(model_class=Base)


def _with_rows(app: Flask, db: SQLAlchemy, url: str) -> tuple[Flask, tuple[Engine, ...]]:
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    db.init_app(app)
    with app.app_context():
        return app, (db.engine,)


def _paid_into(db: SQLAlchemy) -> Response:
    response, payment = paid(), request.get_json()
    db.session.add(Payment(**{name: payment[name] for name in ("account", "amount", "currency", "description")}))
    return response


class NotEmpty(Exception):
    """The database already holds tables. A run makes its own tables and drops them, so it refuses."""


@dataclass(frozen=True, slots=True)
class Database:
    """A database. `about` is what a reader of its figures must know: the version, and what a commit waits for."""

    kind: str
    url: str
    about: str


@contextmanager
def postgresql(url: str | None, cores: Cores) -> Iterator[Database | None]:
    """Yield a PostgreSQL with our tables, on the core of the store: the named one, the tests' one, or None.

    A run drops its tables, so a named database is empty afterwards, as before.
    """
    if url is not None:
        with _tables(url):
            yield Database(POSTGRESQL, url, f"{_settings(url)}, named by you")
        return
    if installation() is None:
        yield None
        return
    with PostgresServer() as server, server.database() as name:
        # Later children inherit this: PostgreSQL starts a process for each connection.
        pin(server.pid, cores.store)
        with _tables(server.url(name)):
            yield Database(POSTGRESQL, server.url(name), f"{_settings(server.url(name))}, the tests' one")


@contextmanager
def mariadb(cores: Cores) -> Iterator[Database | None]:
    """Yield the tests' MariaDB with our tables, on the core of the store, or None where there is none."""
    if lab_mariadb.installation() is None:
        yield None
        return
    with lab_mariadb.MariaDbServer(lab_mariadb.require_mariadb()) as server, server.database() as name:
        pin(server.pid, cores.store)
        with _tables(server.url(name)):
            shown = "SELECT concat(version(), ', innodb_flush_log_at_trx_commit ', @@innodb_flush_log_at_trx_commit)"
            engine = _autocommit(server.url(name))
            with engine.connect() as connection:
                settings = connection.execute(text(shown)).scalar_one()
            engine.dispose()
            yield Database(MARIADB, server.url(name), f"{settings}, the tests' one")


@contextmanager
def sqlite() -> Iterator[Database]:
    """Yield a file with our tables, in WAL mode. Each commit waits for the disk, as the store requires."""
    with tempfile.TemporaryDirectory(prefix="idempotency-") as folder:
        url = f"sqlite:///{Path(folder) / 'benchmark.sqlite'}"
        with _tables(url):
            yield Database(SQLITE, url, f"SQLite {sqlite3.sqlite_version}, WAL, synchronous=FULL, a file in {folder}")


@contextmanager
def _tables(url: str) -> Iterator[None]:
    engine = create_engine(url, poolclass=NullPool)
    if found := inspect(engine).get_table_names():
        raise NotEmpty(
            f"The database that you named holds tables ({', '.join(found[:3])}…). The benchmarks make their tables and drop "
            "them. Name an empty database."
        )
    try:
        for each in (records_metadata, metadata):
            each.create_all(engine)
        if engine.dialect.name == "sqlite":
            with engine.connect() as connection:
                connection.execute(text("PRAGMA journal_mode=WAL"))
        yield
    finally:
        for each in (records_metadata, metadata):
            each.drop_all(engine)


def _settings(url: str) -> str:
    shown: Sequence[str] = ("server_version", "fsync", "synchronous_commit")
    engine = create_engine(url)
    with engine.connect() as connection:
        version, *settings = (connection.execute(text(f"SHOW {name}")).scalar_one() for name in shown)
    engine.dispose()
    return ", ".join([f"PostgreSQL {version}", *map(" ".join, zip(shown[1:], settings, strict=True))])
