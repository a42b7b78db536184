"""What tenants have and may have, for those who look after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

from sqlalchemy import Connection

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.stores.sql import completions, ledger_statements
from flask_idempotency.stores.sql.completing import entry
from flask_idempotency.stores.sql.database import Database, together
from flask_idempotency.stores.sql.dialects import POSTGRESQL, Dialect
from flask_idempotency.stores.sql.limits import limits_of, rate
from flask_idempotency.stores.sql.schema import RESPONSES
from flask_idempotency.stores.sql.statements import advisory_lock
from flask_idempotency.stores.sql.times import in_microseconds

SWEPT: Final = 1000
"""Entries in one statement of `sweep`."""


class SqlLedger:
    """Implements `upkeep.Ledger`. `now` as for `SqlDataKeys`."""

    def __init__(self, database: Database, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._now = now

    def usage(self, tid: bytes) -> Usage:
        parameters = {"my_tenant_id": tid, "now": self._now()}
        found = self._database.run(lambda connection: connection.execute(self._sent.usage, parameters).one())
        return Usage(**found._mapping)

    def limits(self, tid: bytes) -> Quota:
        found = self._database.run(
            lambda connection: connection.execute(self._sent.limits, {"my_tenant_id": tid}).one_or_none()
        )
        if found is None:
            return Quota()
        if not all(each is None or (isinstance(each, int) and each >= 0) for each in found):
            raise CorruptRecord("the limits that the database holds for a tenant cannot be read: set them again")
        if found.window == 0:
            raise CorruptRecord(
                "the limit of new keys that the database holds for a tenant cannot be read: set it again"
            )
        return Quota(found.records, found.bytes, found.in_flight, rate(found.new_keys, found.window))

    def limit(self, tid: bytes, quota: Quota) -> None:
        parameters = {"my_tenant_id": tid, **limits_of(quota)}
        self._database.run(lambda connection: connection.execute(self._sent.set_limits, parameters).one())

    def tenants(self) -> Sequence[bytes]:
        found = self._database.take_time(lambda connection: connection.execute(self._sent.tenants).scalars().all())
        return tuple(found)

    def reconcile(self, tid: bytes) -> Drift:
        """Reads the whole table of records: there is no index of them by tenant, for each completion would pay for it.

        Nobody waits for it but who does the same. It sees records and ledger in one snapshot, in which every completion
        is in both or in neither, and adds the difference, which stays right whatever was added since.
        """
        parameters = {"my_tenant_id": tid, "my_number": _chores_number(tid), "now": self._now()}

        def reconcile(connection: Connection) -> Drift:
            with together(connection):
                if connection.dialect.name == POSTGRESQL:
                    connection.execute(self._sent.chores_lock, parameters)
                found = connection.execute(self._sent.drift, parameters).all()
                for row in found:
                    mended = entry(
                        kind=RESPONSES,
                        bucket_end=row.bucket_end,
                        window_length=0,
                        records=-row.records,
                        stored=-row.bytes,
                    )
                    connection.execute(self._sent.book, {**parameters, "my_shard": 0, **mended})
            return Drift(sum(row.records for row in found), sum(row.bytes for row in found))

        return self._database.take_time(reconcile)

    def sweep(self, *, limit: int = SWEPT, horizon: float | None = None) -> int:
        """Forget up to so many entries that are over, and were by this horizon, and say how many it were. Nobody counts
        them any more."""
        by = None if horizon is None else in_microseconds(horizon)
        parameters = {"my_limit": limit, "my_horizon": by, "now": self._now()}
        return self._database.take_time(lambda connection: connection.execute(self._sent.sweep, parameters).rowcount)

    @cached_property
    def _sent(self) -> _Sent:
        return _Sent(self._database.dialect)


class _Sent:
    def __init__(self, dialect: Dialect) -> None:
        self.usage = ledger_statements.usage(dialect)
        self.limits = ledger_statements.limits(dialect)
        self.set_limits = ledger_statements.set_limits(dialect)
        self.tenants = ledger_statements.tenants_with_ledger(dialect)
        self.drift = ledger_statements.drift(dialect)
        self.sweep = ledger_statements.sweep(dialect)
        self.chores_lock = advisory_lock(dialect)
        self.book = completions.book(dialect)


def _chores_number(tid: bytes) -> int:
    """Other bits than those that claims lock the tenant by."""
    return int.from_bytes(tid[-8:], "big", signed=True) ^ 1
