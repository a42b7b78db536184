"""Tenants' data keys, next to the records that are sealed with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from sqlalchemy import Connection

from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, DataKey, KeyShelf
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.stores.sql import key_statements
from flask_idempotency.stores.sql.database import Database, together
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.identity import IDENTITY_BYTES, identity, nameless, spelt

_log = logging.getLogger("flask_idempotency")


class SqlDataKeys:
    """Implements `upkeep.DataKeys`. `now` says what time it is, or None to leave that to the server."""

    def __init__(self, database: Database, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._now = now

    def shelf(self, tid: bytes) -> KeyShelf:
        parameters = {"my_tenant_id": tid, "now": self._now()}
        found = self._database.run(lambda connection: connection.execute(self._sent.shelf, parameters).all())
        if not found:
            self._database.run(identity)
            found = self._database.run(lambda connection: connection.execute(self._sent.shelf, parameters).all())
        if not found:
            raise nameless()
        keys = tuple(_key(row) for row in found if row.number is not None)
        store, last = found[0].store, found[0].last
        if not isinstance(store, int) or not isinstance(last, int):
            raise CorruptRecord("the database's own number, or a tenant's last data key, cannot be read: restore it")
        return KeyShelf(spelt(store), keys, last)

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        if len(store) != IDENTITY_BYTES:
            return False
        number = int.from_bytes(store, "big", signed=True)
        parameters = {
            "my_tenant_id": tid,
            "my_number": key.number,
            "my_after": after,
            "my_wrapping_key_id": key.kid,
            "my_wrapped_key": key.wrapped,
            "my_store": number,
            "now": self._now(),
        }

        def add(connection: Connection) -> bool:
            with together(connection):
                connection.execute(self._sent.first_key, parameters)
                if connection.execute(self._sent.take_number, parameters).one_or_none() is None:
                    return False
                connection.execute(self._sent.add_key, parameters)
                return True

        return self._database.run(add)

    def close(self, tid: bytes, number: int) -> None:
        self._execute(self._sent.close_key, tid, number)

    def retire(self, tid: bytes, number: int) -> None:
        self._execute(self._sent.retire_key, tid, number)

    def others(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        parameters = {"my_wrapping_key_id": kid, "now": self._now()}
        found = self._database.take_time(lambda connection: connection.execute(self._sent.other_keys, parameters).all())
        return list(_readable(found))

    def destroy(self, tid: bytes) -> int:
        parameters = {"my_tenant_id": tid, "now": self._now()}

        def destroy(connection: Connection) -> int:
            with together(connection):
                connection.execute(self._sent.first_key, parameters)
                # Whoever adds a key meanwhile holds the tenant's row, or waits for it: what is deleted is all there is.
                connection.execute(self._sent.erase, parameters)
                return connection.execute(self._sent.destroy_keys, parameters).rowcount

        return self._database.run(destroy)

    def count(self) -> Mapping[str, int]:
        found = self._database.take_time(lambda connection: connection.execute(self._sent.count_keys).all())
        return {row.wrapping_key_id: row.keys_ for row in found}

    def _execute(self, statement: Any, tid: bytes, number: int) -> None:
        parameters = {"my_tenant_id": tid, "my_number": number, "now": self._now()}
        self._database.run(lambda connection: connection.execute(statement, parameters))

    @cached_property
    def _sent(self) -> _SentDataKey:
        return _SentDataKey(self._database.dialect)


class _SentDataKey:
    def __init__(self, dialect: Dialect) -> None:
        self.shelf = key_statements.shelf(dialect)
        self.first_key = key_statements.first_key(dialect)
        self.take_number = key_statements.take_number(dialect)
        self.add_key = key_statements.add_key(dialect)
        self.close_key = key_statements.close_key(dialect)
        self.retire_key = key_statements.retire_key(dialect)
        self.erase = key_statements.erase(dialect)
        self.destroy_keys = key_statements.destroy_keys(dialect)
        self.other_keys = key_statements.other_keys(dialect)
        self.count_keys = key_statements.count_keys(dialect)


def _key(row: Any) -> DataKey:
    numbers = (row.number, *(() if row.disabled_for is None else (row.disabled_for,)))
    fits = (
        isinstance(row.wrapping_key_id, str)
        and isinstance(row.wrapped_key, bytes)
        and all(isinstance(each, int) for each in numbers)
    )
    if not fits or len(row.wrapped_key) > LARGEST_WRAPPED:
        raise CorruptRecord(
            "a data key in the database cannot be read: restore it, or the answers it has sealed are lost"
        )
    return DataKey(
        row.number,
        row.wrapping_key_id,
        row.wrapped_key,
        None if row.disabled_for is None else row.disabled_for / 1_000_000,
    )


def _readable(rows: Iterable[Any]) -> Iterator[tuple[bytes, DataKey]]:
    """Yield the data keys that can be read, with their tenants. Log how many cannot."""
    unreadable = 0
    for row in rows:
        try:
            yield row.tenant_id, _key(row)
        except CorruptRecord:
            unreadable += 1
    if unreadable:
        _log.error(
            "%d data keys in the database cannot be read and were passed over: restore them, or the answers that they have "
            "sealed are lost",
            unreadable,
        )
