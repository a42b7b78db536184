"""Which strategies there are, and on which databases each can keep its promise."""

from __future__ import annotations

from typing import Final, Protocol

from sqlalchemy import Connection

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql.claims.advisory import Advisory
from flask_idempotency.stores.sql.claims.gate import Crowded
from flask_idempotency.stores.sql.claims.insert import Insert, InsertIntoFile
from flask_idempotency.stores.sql.claims.row_lock import RowLock
from flask_idempotency.stores.sql.claims.verdict import Asked
from flask_idempotency.stores.sql.dialects import Dialect


class Strategy(Protocol):
    """Takes a free key for one of all who ask, and tells the others what `judge` says."""

    def claim(self, connection: Connection, asked: Asked) -> StoreOutcome | Crowded:
        """Repeatable: the connection is fresh, and may be the second one."""
        ...


STRATEGIES: Final = {"insert": (Insert, InsertIntoFile), "row_lock": (RowLock,), "advisory": (Advisory,)}


def strategy_of(name: str, dialect: Dialect) -> Strategy:
    """This strategy for this database. Raises `ConfigurationError` where it could not keep its promise."""
    if name not in STRATEGIES:
        raise ConfigurationError(f"IDEMPOTENCY_CLAIM_STRATEGY: {name!r} is none of {', '.join(STRATEGIES)}")
    by_dialect = {which: kind for kind in STRATEGIES[name] for which in kind.dialects}
    if dialect.name not in by_dialect:
        raise ConfigurationError(
            f"IDEMPOTENCY_CLAIM_STRATEGY: {name} works on {' and '.join(by_dialect)}, not on {dialect.name}. "
            "Take insert, which works on all."
        )
    return by_dialect[dialect.name](dialect)
