"""An application with a database of each kind, an outbox, and adapters that remember what they were given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import String, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from flask_idempotency import Idempotency
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.outbox import Message
from flask_idempotency.maintenance.relay import Relay, RelayReport
from flask_idempotency.outbox.outbox import Outbox, OutboxServices
from flask_idempotency.stores.sql.outbox import OutboxTable
from flask_idempotency.stores.sql.schema import outbox as outbox_rows
from flask_idempotency.testing.doubles import FrozenClock
from tests.apps import record_events
from tests.stores.sql.conftest import (
    lent_url,
    make_engine,
    on_both,
    on_each,
    on_postgresql,
    records_database,
    records_file,
    records_url,
)

__all__ = [
    "make_engine",
    "on_both",
    "on_each",
    "on_postgresql",
    "records_database",
    "records_file",
    "records_url",
]

# A SQLite file, for tests of code that is the same on both kinds of database.
database_url = pytest.fixture(params=("sqlite",), name="database_url")(lent_url)
SECRET = "for tests only: 9f2c47d1e8b35a60c1d47be2"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(20), default="new")


@dataclass
class Sent:
    """An adapter that remembers what it was given. `fail` returns what becomes of a message."""

    messages: list[Message] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    fail: Callable[[Message], Exception | None] = lambda message: None

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        self.calls.append(len(messages))
        results = [self.fail(message) for message in messages]
        self.messages += [message for message, result in zip(messages, results, strict=True) if result is None]
        return results

    @property
    def ids(self) -> list[str]:
        return [message.message_id for message in self.messages]

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]


@dataclass
class Shop:
    """One application with an outbox on one database, by a clock of the test."""

    app: Flask
    db: SQLAlchemy
    idempotency: Idempotency
    outbox: Outbox
    clock: FrozenClock
    sent: Sent = field(default_factory=Sent)
    events: list[Event] = field(default_factory=list)

    @property
    def services(self) -> OutboxServices:
        services: OutboxServices = self.app.extensions["idempotency_outbox"]
        return services

    @property
    def table(self) -> OutboxTable:
        return self.services.table

    @property
    def relay(self) -> Relay:
        return self.services.relay()

    def publish(self, topic: str = "orders", body: Any = None, **options: Any) -> str:
        """Publish one message, and commit."""
        with self.app.app_context():
            message_id = self.outbox.publish(topic, {"id": 1} if body is None else body, **options)
            self.db.session.commit()
        return message_id

    def drain(self) -> RelayReport:
        """Send until nothing is due."""
        sent = delayed = dead = 0
        while (report := self.relay.run_once()) is not None:
            sent, delayed, dead = sent + report.sent, delayed + report.delayed, dead + report.dead
        return RelayReport(sent, delayed, dead)

    def execute(self, *statements: str, **values: Any) -> None:
        with self.app.app_context(), self.db.engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement), values)

    def rows(self) -> list[Any]:
        """What is in the table, seen from outside."""
        with self.app.app_context(), self.db.engine.connect() as connection:
            return list(connection.execute(select(outbox_rows).order_by(outbox_rows.c.seq)))

    def orders(self) -> int:
        with self.app.app_context(), self.db.engine.connect() as connection:
            return len(list(connection.execute(select(Order.id))))


class OpenShop(Protocol):
    def __call__(self, url: str | None = None, *, keep: float = ..., store: Any = ..., **config: Any) -> Shop: ...


@pytest.fixture
def open_shop(records_url: str, clock: FrozenClock) -> Iterator[OpenShop]:
    with ExitStack() as ends:

        def open_one(
            url: str | None = None, *, keep: float = 0, store: Any = "flask-sqlalchemy://", **config: Any
        ) -> Shop:
            app = Flask("shop")
            app.testing = True
            app.config |= {"SQLALCHEMY_DATABASE_URI": url or records_url, "IDEMPOTENCY_SECRET": SECRET}
            app.config |= {"IDEMPOTENCY_STORE": store, "IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT": True, **config}
            db = SQLAlchemy(app, model_class=Base)
            idempotency = Idempotency(app, principal=lambda: "alice")
            outbox = idempotency.outbox(keep=keep)
            shop = Shop(app, db, idempotency, outbox, clock)
            shop.table._clock = clock
            outbox.route("*", shop.sent)
            record_events(app, shop.events)
            with app.app_context():
                Base.metadata.tables["orders"].create(db.engine, checkfirst=True)
            ends.callback(put_away, shop, shop.table)
            return shop

        yield open_one


def put_away(shop: Shop, table: OutboxTable) -> None:
    table.close()
    with shop.app.app_context():
        shop.db.session.remove()
        shop.db.engine.dispose()


@pytest.fixture
def shop(open_shop: OpenShop) -> Shop:
    return open_shop()
