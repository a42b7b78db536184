"""The SQL store of an application whose own rows are in the same database, and can be committed with its records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import scoped_session

from flask_idempotency.engine.store import Clock, store_time
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.session import SessionTransactions
from flask_idempotency.stores.sql.store import SqlStore


class JointStore(SqlStore):
    """A `SqlStore` with `transactions`: what `effects="transactional"` needs.

    `sessions` returns the `scoped_session` that views write with, on the very database that `database` names.
    """

    def __init__(
        self,
        database: Database,
        *,
        sessions: Callable[[], scoped_session[Any]],
        strategy: str = "insert",
        clock: Clock = store_time,
    ) -> None:
        super().__init__(database, strategy=strategy, clock=clock)
        self.transactions = SessionTransactions(sessions, self, clock=clock)
