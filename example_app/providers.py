"""The three other companies that a checkout needs: a warehouse, a card provider and a mail service.

They are one SQLite file, apart from the service's database, so no transaction spans both. The warehouse and the mail
service know a request that comes twice by its key. The card provider does not: each call takes money, and it only tells you
later what it has done under a key.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Final

from flask import Flask, current_app

from example_app.models import use_write_ahead_log

PROVIDERS: Final = "example-providers"

TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS reservations (key TEXT PRIMARY KEY, item TEXT, id TEXT)",
    "CREATE TABLE IF NOT EXISTS charges (key TEXT, card TEXT, amount INTEGER, id TEXT)",
    "CREATE TABLE IF NOT EXISTS lookups (key TEXT)",
    "CREATE TABLE IF NOT EXISTS mails (key TEXT PRIMARY KEY, recipient TEXT, text TEXT)",
)

DECLINED: Final = "tok_declined"
"""A card that the provider refuses, without taking money."""


class CardDeclined(Exception):
    """The card provider refused the card. It took no money."""


class Providers:
    """What the three companies have done. Each call is done when it returns, whatever happens to the caller."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as connection:
            use_write_ahead_log(connection)
            for statement in TABLES:
                connection.execute(statement)

    def reserve(self, item: str, *, key: str) -> str:
        """Reserve one of this item. The same key gets the same reservation."""
        with self._open() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO reservations VALUES (?, ?, ?)", (key, item, "res_" + token_hex(8))
            )
            [(found,)] = connection.execute("SELECT id FROM reservations WHERE key = ?", (key,)).fetchall()
        return str(found)

    def charge(self, card: str, amount: int, *, key: str) -> str:
        """Take the money, each time. Raises `CardDeclined`."""
        if card == DECLINED:
            raise CardDeclined
        charge = "pch_" + token_hex(8)
        with self._open() as connection:
            connection.execute("INSERT INTO charges VALUES (?, ?, ?, ?)", (key, card, amount, charge))
        return charge

    def find_charge(self, *, key: str) -> str | None:
        """Return the charge that was made under this key, if any. None rules nothing out: a call may be on its way."""
        with self._open() as connection:
            connection.execute("INSERT INTO lookups VALUES (?)", (key,))
            row = connection.execute("SELECT id FROM charges WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def send_mail(self, recipient: str, text: str, *, key: str) -> None:
        """Send a mail. The same key sends it once."""
        with self._open() as connection:
            connection.execute("INSERT OR IGNORE INTO mails VALUES (?, ?, ?)", (key, recipient, text))

    def counts(self) -> tuple[int, int, int]:
        """Return how many reservations, charges and mails there are."""
        with self._open() as connection:
            tables = ("reservations", "charges", "mails")
            found = [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]  # noqa: S608
        reservations, charges, mails = found
        return reservations, charges, mails

    def lookups(self) -> int:
        """Return how often a charge was looked up."""
        with self._open() as connection:
            [(found,)] = connection.execute("SELECT count(*) FROM lookups").fetchall()
        return int(found)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            yield connection


def install(app: Flask) -> None:
    app.extensions[PROVIDERS] = Providers(Path(app.config["DEMO_PROVIDERS"]))


def providers() -> Providers:
    found: Providers = current_app.extensions[PROVIDERS]
    return found
