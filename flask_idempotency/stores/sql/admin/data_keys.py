"""Keep the tenants' data keys, and read, replace and quarantine the stored responses that they encrypt.

The keys lie wrapped in the same database as the records. So one statement stores a response only if its data key is still
there, and deleting a tenant's keys erases all responses under them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.exc import DataError, IntegrityError

from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, Answer, DataKey, Page, TenantKeys
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import StoredPayload
from flask_idempotency.stores.sql import completion
from flask_idempotency.stores.sql.capability import SqlCapability
from flask_idempotency.stores.sql.completion import SqlCompleting, facts_of, is_sealed, shard_of
from flask_idempotency.stores.sql.database import Database, transaction
from flask_idempotency.stores.sql.dialects import MYSQL, SQLITE, Dialect, bigint, binary, integer, string
from flask_idempotency.stores.sql.engines import without_logging
from flask_idempotency.stores.sql.identity import IDENTITY_BYTES, identity, identity_bytes, number_lost
from flask_idempotency.stores.sql.rows import readable, row_of
from flask_idempotency.stores.sql.schema import ANSWERED, data_keys, meta, tenants
from flask_idempotency.stores.sql.statements import ZERO, word
from flask_idempotency.stores.sql.writes import proven, upserted

STORE: Final = "store"
"""The row of `idempotency_meta` that holds this database's own number."""

_log = logging.getLogger("flask_idempotency")

_t, _k = tenants.c, data_keys.c

ResultT = TypeVar("ResultT")


class JoinedTransaction:
    """Runs statements in a transaction of the application, which commits them or rolls them back."""

    def __init__(self, connection: sa.Connection, dialect: Dialect) -> None:
        self.dialect = dialect
        self._connection = connection

    def run(self, work: Callable[[sa.Connection], ResultT], *, long: bool = False) -> ResultT:
        """Do this work, and log no statement of it: the engine of the application may log parameters."""
        with without_logging(self._connection):
            return work(self._connection)


class SqlDataKeys(SqlCapability):
    """Implements `DataKeys`."""

    def __init__(self, database: Database | JoinedTransaction, *, now: Callable[[], int | None]) -> None:
        super().__init__(cast("Database", database), now=now)
        self._is_joined = isinstance(database, JoinedTransaction)

    def within(self, connection: sa.Connection) -> SqlDataKeys | None:
        """Return the same data keys as the transaction on this connection sees them, or None if they need no such view.

        SQLite has one writer at a time. If that transaction has written, a key that another connection adds would wait for its
        end, which does not come. PostgreSQL has several, and there no other request may wait for this transaction's key.
        """
        if self._is_joined:
            return None
        both = (connection.engine, self._database.base)
        if any(engine.dialect.name != SQLITE for engine in both):
            return None
        if len({os.path.realpath(engine.url.database or "") for engine in both}) > 1:
            return None
        return SqlDataKeys(JoinedTransaction(connection, self._database.dialect), now=self._now)

    def read_keys(self, tid: bytes) -> TenantKeys:
        rows = self._rows(read_keys, my_tenant_id=tid)
        if not rows:
            self._database.run(identity)
            rows = self._rows(read_keys, my_tenant_id=tid)
        if not rows:
            raise number_lost()
        keys = tuple(_key(row) for row in rows if row.number is not None)
        store, last = rows[0].store, rows[0].last
        if not isinstance(store, int) or not isinstance(last, int):
            raise CorruptRecord(
                "the row 'store' of idempotency_meta, or a tenant's last_key_number, cannot be read: restore it"
            )
        return TenantKeys(identity_bytes(store), keys, last)

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        if len(store) != IDENTITY_BYTES:
            return False
        parameters = {
            "my_tenant_id": tid,
            "my_number": key.number,
            "my_after": after,
            "my_wrapping_key_id": key.kid,
            "my_wrapped_key": key.wrapped,
            "my_store": int.from_bytes(store, "big", signed=True),
            "now": self._now(),
        }

        def add(connection: sa.Connection) -> bool:
            with nullcontext() if self._is_joined else transaction(connection):
                self._send(connection, insert_tenant, parameters)
                if self._send(connection, reserve_number, parameters).one_or_none() is None:
                    return False
                self._send(connection, insert_key, parameters)
                return True

        return self._database.run(add)

    def disable(self, tid: bytes, number: int) -> None:
        self._change(disable_key, my_tenant_id=tid, my_number=number)

    def delete(self, tid: bytes, number: int) -> None:
        self._change(delete_disabled_key, my_tenant_id=tid, my_number=number)

    def wrapped_by_other(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        rows = self._rows(wrapped_by_other, my_wrapping_key_id=kid, long=True)
        found = readable(rows, lambda row: (row.tenant_id, _key(row)))
        if len(found) < len(rows):
            _log.error(
                "Skipped %d data keys in the database that cannot be read. Restore them, or the responses that they "
                "encrypt are lost.",
                len(rows) - len(found),
            )
        return found

    def sample(self, kid: str, *, limit: int) -> Sequence[tuple[bytes, DataKey]]:
        rows = self._rows(wrapped_by, my_wrapping_key_id=kid, my_limit=limit, long=True)
        return readable(rows, lambda row: (row.tenant_id, _key(row)))

    def shred(self, tid: bytes) -> int:
        parameters = {"my_tenant_id": tid, "now": self._now()}

        def shred(connection: sa.Connection) -> int:
            with transaction(connection):
                self._send(connection, insert_tenant, parameters)
                # `add` locks the tenant's row, too. So no key can be added between this statement and the next.
                self._send(connection, mark_shredded, parameters)
                return int(self._send(connection, delete_keys, parameters).rowcount)

        return self._database.run(shred)

    def count(self) -> Mapping[str, int]:
        return {row.wrapping_key_id: row.keys_ for row in self._rows(count_keys, long=True)}


def _key(row: Any) -> DataKey:
    numbers = (row.number, *(() if row.disabled_for is None else (row.disabled_for,)))
    fits = (
        isinstance(row.wrapping_key_id, str)
        and isinstance(row.wrapped_key, bytes)
        and all(isinstance(each, int) for each in numbers)
    )
    if not fits or len(row.wrapped_key) > LARGEST_WRAPPED:
        raise CorruptRecord(
            "a row of idempotency_data_keys cannot be read: restore it, or the responses that it encrypts are lost"
        )
    return DataKey(
        row.number,
        row.wrapping_key_id,
        row.wrapped_key,
        None if row.disabled_for is None else row.disabled_for / 1_000_000,
    )


def read_keys(dialect: Dialect) -> sa.Select[Any]:
    """Select the store's number, the tenant's last key number, and the tenant's data keys in order.

    Without a data key this is one row, whose key columns are NULL.
    """
    its_keys = _k.tenant_id == binary("my_tenant_id")
    if dialect.name == MYSQL:
        # SQLAlchemy's check for joins without a condition is wrong there if a join has three tables.
        of_tenant = meta.outerjoin(data_keys, its_keys)
        its_row = sa.select(_t.last_key_number).where(_t.tenant_id == binary("my_tenant_id"))
        last: sa.ColumnElement[Any] = sa.func.coalesce(its_row.scalar_subquery(), ZERO)
    else:
        of_tenant = meta.outerjoin(tenants, _t.tenant_id == binary("my_tenant_id")).outerjoin(data_keys, its_keys)
        last = sa.func.coalesce(_t.last_key_number, ZERO)
    numbers = (meta.c.value.label("store"), last.label("last"))
    rows = sa.select(*numbers, *_shown(dialect)).select_from(of_tenant).where(meta.c.name == word(STORE))
    return rows.order_by(_k.number)


def insert_tenant(dialect: Dialect) -> Any:
    """Insert the tenant's row, without keys. Return no row if it exists."""
    values: dict[str, Any] = {"tenant_id": binary("my_tenant_id"), "last_key_number": ZERO, "shredded_key_number": ZERO}
    return upserted(dialect, tenants, values, ("tenant_id",), proof=(_t.tenant_id,))


def reserve_number(dialect: Dialect) -> Any:
    """Make this the tenant's last key number, if the last one is as seen, this one is higher, and the store is the same."""
    number, seen = integer("my_number"), integer("my_after")
    this = sa.select(meta.c.value).where(meta.c.name == word(STORE)).scalar_subquery()
    is_next = sa.and_(_t.last_key_number == seen, number > seen)
    reserved = sa.update(tenants).where(_t.tenant_id == binary("my_tenant_id"), is_next, this == bigint("my_store"))
    return proven(dialect, reserved.values(last_key_number=number), _t.last_key_number)


def insert_key(dialect: Dialect) -> sa.Insert:
    """Insert the data key of a reserved number."""
    names = ("tenant_id", "number", "wrapping_key_id", "wrapped_key")
    given = {name: sa.bindparam(f"my_{name}", type_=_k[name].type) for name in names}
    return sa.insert(data_keys).values(**given, created_at=dialect.now)


def disable_key(dialect: Dialect) -> sa.Update:
    """Let this data key encrypt no new response. A second call keeps the first time."""
    return sa.update(data_keys).where(*_is_key(), _k.disabled_at.is_(None)).values(disabled_at=dialect.now)


def delete_disabled_key(dialect: Dialect) -> sa.Delete:
    """Delete this data key, if it is disabled."""
    return sa.delete(data_keys).where(*_is_key(), _k.disabled_at.is_not(None))


def mark_shredded(dialect: Dialect) -> sa.Update:
    """Note that all data keys of the tenant are shredded, and all responses to keys that were used before are erased."""
    later = dialect.larger(sa.func.coalesce(_t.erased_at, ZERO), dialect.now)
    return (
        sa.update(tenants)
        .where(_t.tenant_id == binary("my_tenant_id"))
        .values(shredded_key_number=_t.last_key_number, erased_at=later)
    )


def delete_keys(dialect: Dialect) -> sa.Delete:
    """Delete all data keys of the tenant."""
    return sa.delete(data_keys).where(_k.tenant_id == binary("my_tenant_id"))


def wrapped_by_other(dialect: Dialect) -> sa.Select[Any]:
    """Select the data keys of all tenants that are not wrapped by this key of the ring."""
    others = sa.select(_k.tenant_id, *_shown(dialect)).where(_k.wrapping_key_id != string("my_wrapping_key_id"))
    return others.order_by(_k.tenant_id, _k.number)


def wrapped_by(dialect: Dialect) -> sa.Select[Any]:
    """Select some data keys that this key of the ring wraps."""
    some = sa.select(_k.tenant_id, *_shown(dialect)).where(_k.wrapping_key_id == string("my_wrapping_key_id"))
    return some.limit(integer("my_limit"))


def count_keys(dialect: Dialect) -> sa.Select[Any]:
    """Count the data keys that each key of the ring wraps."""
    return sa.select(_k.wrapping_key_id, sa.func.count().label("keys_")).group_by(_k.wrapping_key_id)


def _shown(dialect: Dialect) -> tuple[Any, ...]:
    return _k.number, _k.wrapping_key_id, _k.wrapped_key, (dialect.now - _k.disabled_at).label("disabled_for")


def _is_key() -> tuple[Any, Any]:
    return _k.tenant_id == binary("my_tenant_id"), _k.number == integer("my_number")


class SqlResponses(SqlCompleting):
    """Implements `Responses`, and quarantines records that cannot be read."""

    def scan(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        given: dict[str, Any] = {"my_after": after, "my_tenant_id": tid, "my_wrapping_key_id": other_than}
        # Use a connection without the read timeout of records: a page of large responses takes longer.
        rows, last = self._page(completion.page_end, completion.scan, limit=limit, long=True, **given)
        return Page(tuple(readable(rows, _answer)), after=last)

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        parameters = {**self._seen(key, old), **facts_of(new, "my")}
        grown = new.byte_size - old.byte_size

        def replace(connection: sa.Connection) -> bool:
            with transaction(connection) if grown else nullcontext():
                before = self._send(connection, completion.read_if_as_seen, parameters).one_or_none() if grown else None
                if self._send(connection, completion.replace, parameters, is_sealed(parameters)).one_or_none() is None:
                    if self._send(connection, completion.read_if_as_seen, parameters).one_or_none() is not None:
                        self._completing().refuse_without_key(connection, parameters)
                    return False
                if before is not None and before.in_quota:
                    kept = _kept_until(before)
                    self._count(connection, key, [(before.expires_at if kept is None else kept, 0, grown)])
                return True

        return self._database.run(replace)

    def count(self) -> Mapping[str, int]:
        return {row.wrapping_key_id: row.responses for row in self._rows(completion.count_responses, long=True)}

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        """Do what `Store.mark_corrupt` promises."""
        parameters = self._seen(key, payload)

        def mark_corrupt(connection: sa.Connection) -> None:
            with transaction(connection):
                row = self._send(connection, completion.read_if_as_seen, parameters).one_or_none()
                if row is None:
                    return
                if self._send(connection, completion.mark_corrupt, parameters).one_or_none() is not None:
                    self._unbook(connection, key, row)

        self._database.run(mark_corrupt)

    def mark_unreadable(self, key: StorageKey) -> None:
        """Quarantine a row that cannot be read, so that it does not expire. Do nothing if the row breaks a constraint."""
        parameters = {"my_record_id": key.rid, "now": self._now()}

        def mark_unreadable(connection: sa.Connection) -> None:
            with transaction(connection):
                row = self._send(connection, completion.read_unreadable, parameters).one_or_none()
                if row is None:
                    return
                self._send(connection, completion.mark_unreadable, parameters)
                numbers = row.in_quota, row.expires_at, row.response_size
                # Whole enough to subtract the row from the quota, which still counts it.
                whole = all(isinstance(number, int) and 0 <= number < 2**62 for number in numbers)
                if row.state in ANSWERED and whole and row.expires_at > row.now:
                    self._unbook(connection, key, row)

        try:
            self._database.run(mark_unreadable)
        except (IntegrityError, DataError, CorruptRecord):
            # A new version of the row would break the constraint, too. It stays, and every claim of its key is refused.
            return

    def _seen(self, key: StorageKey, payload: StoredPayload) -> dict[str, Any]:
        return {"my_record_id": key.rid, "now": self._now(), **facts_of(payload, "seen")}

    def _unbook(self, connection: sa.Connection, key: StorageKey, row: Any) -> None:
        if row.in_quota:
            shares = completion.shares(row.expires_at, row.response_size, _kept_until(row))
            self._count(connection, key, shares, sign=-1)

    def _count(
        self, connection: sa.Connection, key: StorageKey, shares: Sequence[tuple[int, int, int]], *, sign: int = 1
    ) -> None:
        of_key = {"my_tenant_id": key.tid, "my_shard": shard_of(key)}
        completion.count(connection, self._database.dialect, of_key, shares, sign=sign)


def _kept_until(row: Any) -> int | None:
    """Return when the response of this row expires, if the record is remembered for longer. It may be damaged."""
    kept, completed_at = row.response_expires_at, row.completed_at
    return kept if isinstance(kept, int) and isinstance(completed_at, int) and kept >= completed_at else None


def _answer(row: Any) -> Answer:
    rid, tid, *columns = row
    return Answer(StorageKey(rid, tid), row_of(columns).record())
