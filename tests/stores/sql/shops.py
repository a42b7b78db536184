"""Applications with a database of their own, whose records are in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
from flask import Flask
from flask.testing import FlaskClient
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy_lite import SQLAlchemy as Lite
from sqlalchemy import Engine, ForeignKey, event, func, insert, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from werkzeug.test import TestResponse

from flask_idempotency.engine.events import Event
from flask_idempotency.extension import Idempotency
from flask_idempotency.stores.sql.schema import include_in, records
from tests.apps import record_events

SECRET = "for tests only: 9f2c47d1e8b35a60c1d47be2"


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


class Payment(Base):
    __tablename__ = "payments"

    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]
    # Deferred: what is wrong with a payment shows when it is committed, and not before.
    account: Mapped[int] = mapped_column(ForeignKey("accounts.id", deferrable=True, initially="DEFERRED"), default=1)


@dataclass
class Shop:
    """One application on one database."""

    app: Flask
    db: SQLAlchemy
    idempotency: Idempotency
    runs: list[Any] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def view(self, path: str = "/pay", **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return self.app.post(path, **options)

    def client(self) -> FlaskClient:
        return self.app.test_client(use_cookies=False)

    def post(self, path: str = "/pay", key: str | None = "k", **options: Any) -> TestResponse:
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.client().post(path, headers=headers, buffered=True, **options)

    def pay(self, amount: int = 100, **columns: Any) -> None:
        """What a view does: write a row, and leave the commit to others."""
        self.runs.append(amount)
        self.db.session.add(Payment(amount=amount, **columns))

    def payments(self) -> int:
        """Payments that anybody can see."""
        with self.db_engine.connect() as connection:
            found: int = connection.execute(select(func.count()).select_from(Payment)).scalar_one()
            return found

    @property
    def db_engine(self) -> Any:
        with self.app.app_context():
            return self.db.engine

    @property
    def store(self) -> Any:
        """Whatever the application has built for itself."""
        return self.app.extensions["idempotency"].built.engine._deps.store

    def record(self) -> Any:
        """The only record that there is, released ones included, as a row; None for none."""
        with self.db_engine.connect() as connection:
            return connection.execute(select(records)).one_or_none()

    def close(self) -> None:
        self.db_engine.dispose()
        store = self.store
        getattr(store, "_system", store).close()

    def told(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def open_shop(url: str, *, existing: bool = False, lite: bool = False, **config: Any) -> Shop:
    """An application whose views are transactional, with an account to pay from. `existing`: the tables are there.

    `lite`: with Flask-SQLAlchemy-Lite.
    """
    app = Flask("shop")
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": url,
        "SQLALCHEMY_ENGINES": {"default": url},
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "IDEMPOTENCY_SECRET": SECRET,
        "IDEMPOTENCY_EFFECTS": "transactional",
        **config,
    }
    db: Any = Lite() if lite else SQLAlchemy(model_class=Base)
    db.init_app(app)
    idempotency = Idempotency(app)
    shop = Shop(app, db, idempotency)
    engine = shop.db_engine
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys = ON"))
    if not existing:
        make_shop(engine)
    record_events(app, shop.events)
    return shop


def make_shop(engine: Engine) -> None:
    """Create the tables of a shop and ours, with the account to pay from."""
    include_in(Base.metadata)
    # MariaDB looks at each statement, and refuses the words.
    deferred = None if engine.dialect.name == "mysql" else True
    for key in Base.metadata.tables["payments"].foreign_key_constraints:
        key.deferrable, key.initially = deferred, "DEFERRED" if deferred else None
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(Account).values(id=1))


OpenShop: TypeAlias = Callable[..., Shop]


@pytest.fixture
def open_(database_url: str) -> Iterator[OpenShop]:
    """Opens shops on the test's database, which has their tables: one on each kind, in turn."""
    opened: list[Shop] = []

    def open_one(**config: Any) -> Shop:
        opened.append(open_shop(database_url, **{"existing": True, **config}))
        return opened[-1]

    yield open_one
    for shop in opened:
        shop.close()


@pytest.fixture
def shop(open_: OpenShop) -> Shop:
    return open_()


def paying(shop: Shop) -> None:
    """Give it the view that most tests are about."""

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        return "paid", 201


def broken_commit(shop: Shop, monkeypatch: pytest.MonkeyPatch, *, applied: bool) -> None:
    """The session's next COMMIT fails as when its connection breaks, after or before the server has carried it out."""
    dialect = shop.db_engine.dialect
    original = dialect.do_commit
    failures = [OperationalError("COMMIT", {}, ConnectionError("broken"), connection_invalidated=True)]

    def do_commit(connection: Any) -> None:
        if not failures:
            original(connection)
            return
        if applied:
            original(connection)
        raise failures.pop()

    monkeypatch.setattr(dialect, "do_commit", do_commit)
