"""The same payments service on a SQL database: with SQLAlchemy written by hand, and with ours.

By hand is what a developer who knows SQLAlchemy writes: for the record Core, compiled once, on an engine of its own that
commits every statement by itself, and Flask-SQLAlchemy's session for the rows. A key and an answer; no scope, no lease,
no token, no server's clock: the floor of what those statements cost through that library, not an alternative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flask import Flask, Response, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Column, Engine, LargeBinary, String, Table, bindparam, create_engine, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.apps import LEASE_SECONDS, PRINCIPAL, SECRET, Gate, answered, bare, ours, paid
from flask_idempotency import Idempotency
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.sql.transactional.session import TransactionalSqlStore

REFUSED = b'{"title": "in flight"}'


class Base(DeclarativeBase):
    pass


class Payment(Base):
    """The business: one row for each payment."""

    __tablename__ = "benchmark_payments"

    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    description: Mapped[str]


metadata = Base.metadata
_keys = Table("benchmark_keys", metadata, Column("key", String, primary_key=True), Column("answer", LargeBinary))
_mine = _keys.c.key == bindparam("my_key", type_=String)

# As text, which both databases understand: SQLAlchemy 2.0 compiles its own ON CONFLICT anew at every execution.
_CLAIM = text("INSERT INTO benchmark_keys (key) VALUES (:my_key) ON CONFLICT DO NOTHING RETURNING key")
_COMPLETE = update(_keys).where(_mine).values(answer=bindparam("my_answer", type_=LargeBinary))
_READ = select(_keys.c.answer).where(_mine)


@dataclass(frozen=True, slots=True)
class SqlApp:
    """An application, and the engines on which it sends statements."""

    flask: Flask
    engines: tuple[Engine, ...] = ()

    def close(self) -> None:
        for engine in self.engines:
            engine.dispose()


def business(url: str) -> SqlApp:
    """One row in one commit, and no idempotency at all."""
    db = _db()

    def pay() -> Response:
        response = _paid_into(db)
        db.session.commit()
        return response

    return SqlApp(*_with_rows(bare(pay), db, url))


def by_hand_writing(url: str) -> SqlApp:
    """The floor of a first request, two statements that commit by themselves, and of a refused one."""
    engine = _autocommit(url)

    def pay() -> Response:
        key = request.headers["Idempotency-Key"]
        with engine.connect() as connection:
            if connection.execute(_CLAIM, {"my_key": key}).one_or_none() is None:
                return _refused()
        response = paid()
        with engine.connect() as connection:
            connection.execute(_COMPLETE, {"my_key": key, "my_answer": response.get_data()})
        return response

    return SqlApp(bare(pay), (engine,))


def by_hand_transactional(url: str) -> SqlApp:
    """The floor of transactional effects: one statement that commits by itself, and one in the rows' transaction."""
    engine, db = _autocommit(url), _db()

    def pay() -> Response:
        key = request.headers["Idempotency-Key"]
        with engine.connect() as connection:
            if connection.execute(_CLAIM, {"my_key": key}).one_or_none() is None:
                return _refused()
        response = _paid_into(db)
        db.session.flush()
        db.session.connection().execute(_COMPLETE, {"my_key": key, "my_answer": response.get_data()})
        db.session.commit()
        return response

    flask, engines = _with_rows(bare(pay), db, url)
    return SqlApp(flask, (engine, *engines))


def by_hand_reading(url: str) -> SqlApp:
    """The floor of a replay: one statement. A key that it does not know runs and is stored, so that there is one."""
    engine = _autocommit(url)

    def pay() -> Response:
        key = request.headers["Idempotency-Key"]
        with engine.connect() as connection:
            stored = connection.execute(_READ, {"my_key": key}).scalar_one_or_none()
        if stored is not None:
            return answered(stored)
        response = paid()
        with engine.connect() as connection:
            connection.execute(_CLAIM, {"my_key": key})
            connection.execute(_COMPLETE, {"my_key": key, "my_answer": response.get_data()})
        return response

    return SqlApp(bare(pay), (engine,))


def ours_plain(url: str, gate: Gate, *, strategy: str = "insert") -> SqlApp:
    """Records in SQL, and effects that are somewhere else."""
    store = SqlStore(Database(url), strategy=strategy)
    return SqlApp(ours(store, gate=gate), (store.database.engine, store.database.base))


def ours_transactional(url: str, gate: Gate, *, redis_url: str | None = None) -> SqlApp:
    """The view's row and the record in one commit; with a Redis in front of the records if one is named."""
    db = _db()
    app, engines = _with_rows(bare(lambda: _paid_into(db), gate=gate), db, url)
    store = TransactionalSqlStore(Database(engines[0]), sessions=lambda: db.session)
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


def _refused() -> Response:
    return Response(REFUSED, 409, content_type="application/problem+json")
