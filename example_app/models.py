"""The service's own rows, and the database that they share with the records of idempotency keys."""

from __future__ import annotations

import sqlite3
import time
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import JSON, BigInteger, Connection, event, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import CreateTable

from flask_idempotency.stores.sql.migrations.runner import upgrade

# An advisory lock is a number, and other users of this database have theirs. This one is "payments" in ASCII.
TABLES_LOCK = 0x7061796D656E7473
BUSY_SECONDS = 30
"""How long a worker waits for the writer of an SQLite file."""


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)

if TYPE_CHECKING:
    Model = Base
else:
    Model = db.Model


class Payment(Model):
    __tablename__ = "payments"

    tenant: Mapped[str]
    principal: Mapped[str]
    account: Mapped[str]
    amount: Mapped[int]
    """In the currency's smallest unit: cents, not euros."""
    currency: Mapped[str]
    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: "pay_" + token_hex(8))
    created: Mapped[int] = mapped_column(default=lambda: int(time.time()))


class Order(Model):
    """What a checkout sold. No constraint refuses a second one: an order written twice would show."""

    __tablename__ = "orders"

    tenant: Mapped[str]
    principal: Mapped[str]
    item: Mapped[str]
    amount: Mapped[int]
    charge: Mapped[str]
    """At the card provider."""
    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: "ord_" + token_hex(8))


class LedgerEntry(Model):
    """What the ledger's consumer books of a payment. No constraint refuses a second one: a payment booked twice would show."""

    __tablename__ = "ledger_entries"

    payment: Mapped[str]
    tenant: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    id: Mapped[int] = mapped_column(primary_key=True)


class Charge(Model):
    __tablename__ = "charges"

    tenant: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    description: Mapped[str | None]
    customer: Mapped[str | None]
    captured: Mapped[bool]
    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: "ch_" + token_hex(12))
    created: Mapped[int] = mapped_column(default=lambda: int(time.time()))


class Invoice(Model):
    __tablename__ = "invoices"

    tenant: Mapped[str]
    customer: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: "inv_" + token_hex(8))


class InvoiceMarker(Model):
    """Says that a request has written its invoice: committed with it, so that a second run of the request finds both."""

    __tablename__ = "invoice_markers"

    request: Mapped[str] = mapped_column(primary_key=True)
    """The same in every attempt at one key, and no other request's. The database refuses a second one."""
    invoice: Mapped[str]
    contents: Mapped[dict[str, Any]] = mapped_column(JSON)
    """What the request wrote: the same key may come with something else after its record has ended."""


class GatewayCharge(Model):
    __tablename__ = "gateway_charges"

    tenant: Mapped[str]
    account_id: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    id: Mapped[str] = mapped_column(primary_key=True)

    @staticmethod
    def new_id() -> str:
        return "gch_" + token_hex(8)


class GatewayMarker(Model):
    """Says what became of a request: its charge, or that it was refused. The database keeps one row for each request."""

    __tablename__ = "gateway_markers"

    reference: Mapped[str] = mapped_column(primary_key=True)
    """The same in every attempt at one key, and in the resolver."""
    charge: Mapped[str | None]
    refused_up_to: Mapped[int | None] = mapped_column(BigInteger)
    """The fence of the last attempt that may not make the charge any more."""


def database_url(given: str) -> str:
    """Return the URL as SQLAlchemy needs it: for `postgres://` and `postgresql://` with the driver that is installed."""
    scheme, colon, rest = given.partition(":")
    return f"postgresql+psycopg:{rest}" if scheme in ("postgres", "postgresql") else f"{scheme}{colon}{rest}"


def install(app: Flask) -> None:
    db.init_app(app)
    with app.app_context():
        if db.engine.dialect.name == "sqlite":
            event.listen(db.engine, "connect", lambda connection, _: use_write_ahead_log(connection))
        upgrade(db.engine)
        with db.engine.begin() as connection:
            make_tables(connection)


def make_tables(connection: Connection) -> None:
    """Create the missing tables. `create_all` would fail: several workers start together, and it looks before it creates."""
    if connection.dialect.name == "postgresql":
        # Its IF NOT EXISTS looks before it creates as well.
        connection.execute(select(func.pg_advisory_xact_lock(TABLES_LOCK)))
    for table in db.metadata.sorted_tables:
        connection.execute(CreateTable(table, if_not_exists=True))


def use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Let readers of this SQLite file read while a worker writes.

    While another worker sets the mode of a new file, SQLite refuses it with "database is locked" and does not wait, whatever
    the timeout is. Workers start together, so try again.
    """
    connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
