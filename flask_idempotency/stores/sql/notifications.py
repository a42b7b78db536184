"""One PostgreSQL connection per process that listens, and wakes waiting requests when another process ends their claim.

The statement that ends a claim sends the message: see `statements.ended_wait`. PostgreSQL delivers it after the commit, so a
waiter never reads too early. PostgreSQL takes one lock of the whole cluster for each commit that notifies. So only claims that
let other requests wait send a message.
"""

from __future__ import annotations

import logging
import selectors
import time
from secrets import token_hex
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, literal_column, select, text

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.notifications import POLL_SECONDS, ThreadedNotifier
from flask_idempotency.stores.sql.admin.health import shares_sessions
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import POSTGRESQL
from flask_idempotency.stores.sql.statements import CHANNEL

DELIVERY_SECONDS: Final = 5.0
"""How long a message to itself may take before a listener takes its connection for one that receives none."""

RETRY_AFTER_SECONDS: Final = 600.0
"""How long waiters only poll, after messages did not arrive. An operator may have changed the pooler since."""

_LISTEN: Final = text(f"LISTEN {CHANNEL}")
_UNLISTEN: Final = text(f"UNLISTEN {CHANNEL}")
_NOTIFY: Final = select(func.pg_notify(literal_column(f"'{CHANNEL}'"), bindparam("my_payload")))
_PING: Final = text("SELECT 1")

_log = logging.getLogger("flask_idempotency")

_inherited: list[object] = []
"""Connections of the parent. A forked child keeps them: to drop one may close it, and with it the parent's session."""


class SqlNotifier(ThreadedNotifier):
    """Listen with one connection for all waiters of this process. It is in no pool.

    Waiters only poll on SQLite, with a driver other than psycopg, and if a pooler gives each transaction another session of
    the server, as PgBouncer does with `pool_mode = transaction`: `LISTEN` is a setting of a session.
    """

    server = "PostgreSQL"

    def __init__(self, database: Database, *, delivery_seconds: float = DELIVERY_SECONDS, **seconds: float) -> None:
        self._database = database
        self._delivery_seconds = delivery_seconds
        self._connection: Connection | None = None
        self._retry_at = float("-inf")
        self._warned = False
        super().__init__(**seconds)

    def _start_empty(self) -> None:
        super()._start_empty()
        if self._connection is not None:
            _inherited.append(self._connection)
        self._connection = None

    def _name(self, key: StorageKey) -> bytes:
        return key.rid.hex().encode()

    def _can_listen(self) -> bool:
        engine = self._database.engine
        return engine.dialect.name == POSTGRESQL and engine.driver == "psycopg" and time.monotonic() >= self._retry_at

    def _listen(self) -> None:
        with self._database.engine.connect() as connection:
            # Now the pool may open another connection, and closes this one at the end of the context.
            connection.detach()
            self._connection = connection
            try:
                self._listen_on(connection)
            finally:
                self._connection = None

    def _listen_on(self, connection: Connection) -> None:
        inbox = _Inbox(connection)
        # This finds nearly every such pooler before `LISTEN`, which would stay on a session that other clients use.
        if self._database.run(lambda other: shares_sessions(connection, other)) or not self._hears_itself(
            connection, inbox
        ):
            self._retry_at = time.monotonic() + RETRY_AFTER_SECONDS
            if not self._warned:
                self._warned = True
                _log.info(
                    "PostgreSQL notifications do not arrive: a pooler seems to share connections between transactions "
                    "(PgBouncer: pool_mode = transaction). Waiting requests poll instead, which is safe. Connect directly "
                    "or through a pooler that keeps sessions if they should wake sooner."
                )
            return
        self._connected()
        last_message_at = time.monotonic()
        while not self._ends_idle(idle_seconds=self._idle_seconds):
            for name in inbox.wait(POLL_SECONDS):
                last_message_at = time.monotonic()
                self._wake(name)
            if time.monotonic() - last_message_at > self._ping_after_seconds:
                # Raises if no reply comes.
                connection.execute(_PING)
                last_message_at = time.monotonic()

    def _hears_itself(self, connection: Connection, inbox: _Inbox) -> bool:
        """Listen, and return True if a message from another connection arrives in time."""
        payload = f"listening {token_hex(16)}"
        connection.execute(_LISTEN)
        self._database.run(lambda other: other.execute(_NOTIFY, {"my_payload": payload}).all())
        give_up_at = time.monotonic() + self._delivery_seconds
        while (left := give_up_at - time.monotonic()) > 0:
            if payload.encode() in inbox.wait(min(left, POLL_SECONDS)):
                return True
        connection.execute(_UNLISTEN)
        return False


class _Inbox:
    """The messages of one connection."""

    def __init__(self, connection: Connection) -> None:
        driver: Any = connection.connection.dbapi_connection
        self._driver = driver
        self._messages: list[bytes] = []
        # psycopg passes on here what arrives together with the reply to a statement.
        driver.add_notify_handler(lambda message: self._messages.append(message.payload.encode()))

    def wait(self, seconds: float) -> list[bytes]:
        """Return the messages that arrive within this time: at the first one, or at the end. Raise if the server has gone.

        Take the selector from its module now: under gevent, it lets other greenlets run.
        """
        self._read()
        if not self._messages:
            with selectors.DefaultSelector() as selector:
                selector.register(self._driver.fileno(), selectors.EVENT_READ)
                if selector.select(seconds):
                    self._driver.pgconn.consume_input()
            self._read()
        messages, self._messages = self._messages, []
        return messages

    def _read(self) -> None:
        while (message := self._driver.pgconn.notifies()) is not None:
            self._messages.append(message.extra)
