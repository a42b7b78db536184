"""Connections that another process opened: a forked child neither uses nor closes them.

Parent and child would write to one socket and read each other's results. `Connection.close()` in the child tells the
server to end the parent's session, and SQLAlchemy sends ROLLBACK on a checked-out connection that is garbage.
Source: SQLAlchemy, "Using Connection Pools with Multiprocessing or os.fork()".
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy import Connection, Engine, Pool, event
from sqlalchemy.orm import Session

from flask_idempotency.engine.errors import InheritedConnection

PROCESS: Final = "flask_idempotency_process"
"""The entry of a pooled connection's `info` that holds the id of the process which opened it."""

REMEDY: Final = (
    "db.session holds a database connection that another process opened before this worker was forked. It is not used: "
    "both processes would read each other's results. End the transaction before the fork (db.session.remove()), and "
    "call engine.dispose(close=False) for every engine in the child (gunicorn: post_fork; Celery: "
    "worker_process_init; uWSGI: postfork)."
)

_log = logging.getLogger("flask_idempotency")

_imported_by = os.getpid()
"""A connection without the entry was opened before this module was imported, so by this process or its parents."""

_opened: WeakSet[Any] = WeakSet()
"""The pools' own entries of all connections, to find those that are checked out while the process forks."""

_kept: list[object] = []
"""Inherited pools and connections. A child keeps them: to drop one may close it, and with it the parent's session."""


def leave_to_parent(engine: Engine) -> None:
    """Give this engine a new pool in a forked child. Inherited connections that are checked out become invalid."""
    pool = engine.pool
    _kept.append(pool)
    engine.dispose(close=False)
    for record in list(_opened):
        fairy = None if record.fairy_ref is None else record.fairy_ref()
        if fairy is not None and fairy._pool is pool and not _opened_here(record.info):
            _abandon(fairy)


def abandon_inherited(session: Session) -> None:
    """Roll back what this session's copy in a forked child believes to have begun. No byte of that reaches a server."""
    transaction: Any = session.get_transaction()
    if transaction is None:
        return
    for connection in list(transaction._connections):
        if isinstance(connection, Connection) and not connection.invalidated and not _is_opened_here(connection):
            _abandon(connection.connection)
    session.rollback()


def refuse_inherited(connection: Connection) -> None:
    """Raise `InheritedConnection` if another process opened this connection. It becomes invalid first.

    So the application's own ROLLBACK does not reach the server, and its next transaction gets a new connection.
    """
    if _is_opened_here(connection):
        return
    _abandon(connection.connection)
    _log.error(REMEDY)
    raise InheritedConnection(REMEDY)


def _is_opened_here(connection: Connection) -> bool:
    return _opened_here(connection.info)


def _opened_here(info: Any) -> bool:
    process: int = info.get(PROCESS, _imported_by)
    return process == os.getpid()


def _abandon(fairy: Any) -> None:
    record = fairy._connection_record
    _kept.append((fairy, record, fairy.dbapi_connection))
    # SQLAlchemy takes a proxy without a connection for one that was invalidated, and sends nothing for its end.
    fairy.dbapi_connection = None
    if record is not None:
        record.info.setdefault(PROCESS, _imported_by)
        record.dbapi_connection = None


def _remember(connection: Any, record: Any) -> None:
    record.info[PROCESS] = os.getpid()
    _opened.add(record)


event.listen(Pool, "connect", _remember)
