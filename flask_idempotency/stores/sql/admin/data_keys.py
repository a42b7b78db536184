"""Responses that are there already, and the data keys that some of them are sealed with.

Statements about responses are in `completion.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    Connection,
    Delete,
    Insert,
    Integer,
    LargeBinary,
    Select,
    Text,
    Update,
    and_,
    bindparam,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, Answer, DataKey, Page, TenantKeys
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import StoredPayload
from flask_idempotency.stores.sql import completion
from flask_idempotency.stores.sql.completion import CompletionWriter, entry, facts_of, is_sealed, shard_of
from flask_idempotency.stores.sql.database import Database, transaction
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.identity import IDENTITY_BYTES, identity, nameless, spelt
from flask_idempotency.stores.sql.rows import row_of
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, RESPONSES, data_keys, meta, tenants
from flask_idempotency.stores.sql.statements import ONE, ZERO, word

_LAST: Final = b"\xff" * 33
"""Behind every key there is: those have 32 bytes."""


class SqlResponses:
    """Implements `capabilities.Responses`, and quarantines what cannot be read. `now` as for `SqlDataKeys`."""

    def __init__(
        self, database: Database, completing: Callable[[], CompletionWriter], *, now: Callable[[], int | None]
    ) -> None:
        self._database = database
        self._completing = completing
        self._now = now

    def scan(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        dialect = self._database.dialect
        asked = {
            "my_after": after,
            "my_limit": limit,
            "my_tenant_id": tid,
            "my_wrapping_key_id": other_than,
            "now": self._now(),
        }

        def page(connection: Connection) -> tuple[Sequence[Any], bytes | None]:
            ends = connection.execute(completion.page_end(dialect), asked).scalars().all()
            last = ends[0] if len(ends) > 1 else None
            return connection.execute(completion.page(dialect), {**asked, "my_until": last or _LAST}).all(), last

        # Not the connections for records: a page of large answers may take its time.
        found, last = self._database.run(page, long=True)
        return Page(tuple(answer for row in found if (answer := _answer(row)) is not None), after=last)

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        parameters = {**_seen(key, old, self._now()), **facts_of(new, "my")}

        def replace(connection: Connection) -> bool:
            if new.byte_size == old.byte_size:
                return self._replace(connection, parameters)
            with transaction(connection):
                return self._replace(connection, parameters, key=key, grown=new.byte_size - old.byte_size)

        return self._database.run(replace)

    def count(self) -> Mapping[str, int]:
        dialect = self._database.dialect
        found = self._database.run(
            lambda connection: connection.execute(completion.count_answers(dialect)).all(), long=True
        )
        return {row.wrapping_key_id: row.responses for row in found}

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        """As `Store.condemn` says."""
        dialect = self._database.dialect
        parameters = _seen(key, payload, self._now())

        def condemn(connection: Connection) -> None:
            with transaction(connection):
                found = connection.execute(completion.holds(dialect), parameters).one_or_none()
                if (
                    found is not None
                    and connection.execute(completion.condemn(dialect), parameters).one_or_none() is not None
                ):
                    self._take_away(connection, key, found)

        self._database.run(condemn)

    def distrust(self, key: StorageKey) -> None:
        """A row that cannot be read at all goes where time does not end it, as far as it can be written."""
        dialect = self._database.dialect
        parameters = {"my_record_id": key.rid, "now": self._now()}

        def distrust(connection: Connection) -> None:
            with transaction(connection):
                found = connection.execute(completion.unreadable(dialect), parameters).one_or_none()
                if found is None:
                    return
                connection.execute(completion.distrust(dialect), parameters)
                if found.state in (COMPLETED, FAILED) and _can_be_counted(found):
                    self._take_away(connection, key, found)

        try:
            self._database.run(distrust)
        except (IntegrityError, DataError, CorruptRecord):
            # It breaks rules that it would break again: so it stays as it is, and is refused each time.
            return

    def _replace(
        self, connection: Connection, parameters: dict[str, Any], *, key: StorageKey | None = None, grown: int = 0
    ) -> bool:
        dialect = self._database.dialect
        before = None if key is None else connection.execute(completion.holds(dialect), parameters).one_or_none()
        statement = completion.replace_sealed(dialect) if is_sealed(parameters) else completion.replace(dialect)
        if connection.execute(statement, parameters).one_or_none() is None:
            if connection.execute(completion.holds(dialect), parameters).one_or_none() is not None:
                self._completing().refuse_without_key(connection, parameters)
            return False
        if key is not None and before is not None and before.in_quota:
            self._book(connection, key, bucket_end=before.expires_at, records=0, stored=grown)
        return True

    def _take_away(self, connection: Connection, key: StorageKey, found: Any) -> None:
        if found.in_quota:
            self._book(connection, key, bucket_end=found.expires_at, records=-1, stored=-found.response_size)

    def _book(self, connection: Connection, key: StorageKey, *, bucket_end: int, records: int, stored: int) -> None:
        dialect = self._database.dialect
        added = entry(kind=RESPONSES, bucket_end=bucket_end, window_length=0, records=records, stored=stored)
        connection.execute(completion.book(dialect), {"my_tenant_id": key.tid, "my_shard": shard_of(key), **added})


def _seen(key: StorageKey, payload: StoredPayload, now: int | None) -> dict[str, Any]:
    return {"my_record_id": key.rid, "now": now, **facts_of(payload, "seen")}


def _answer(row: Any) -> Answer | None:
    rid, tid, *columns = row
    try:
        return Answer(StorageKey(rid, tid), row_of(columns).record())
    except CorruptRecord:
        return None


def _can_be_counted(found: Any) -> bool:
    """Whether the ledger still counts it, and under what, is to be told from the row."""
    numbers = found.in_quota, found.expires_at, found.response_size
    return all(isinstance(number, int) and 0 <= number < 2**62 for number in numbers) and found.expires_at > found.now


STORE: Final = "store"
"""The row of `idempotency_meta` that tells this database from others."""

_t, _k = tenants.c, data_keys.c


def shelf(dialect: Dialect) -> Select[Any]:
    """The store's number and the tenant's last one, once for each data key, in their order; once where there is none."""
    of_tenant = meta.outerjoin(tenants, _t.tenant_id == _tid()).outerjoin(data_keys, _k.tenant_id == _tid())
    told = (meta.c.value.label("store"), func.coalesce(_t.last_key_number, ZERO).label("last"))
    shown = select(*told, *_shown(dialect)).select_from(of_tenant).where(meta.c.name == word(STORE))
    return shown.order_by(_k.number)


def first_key(dialect: Dialect) -> ReturningInsert[Any]:
    """The tenant is there from now on, without keys. Returns nothing if it was."""
    source = select(_tid(), ZERO, ZERO).where(ONE == ONE).suffix_with("ON CONFLICT (tenant_id) DO NOTHING")
    return (
        sqlalchemy.insert(tenants)
        .from_select(["tenant_id", "last_key_number", "shredded_key_number"], source)
        .returning(_t.tenant_id)
    )


def take_number(dialect: Dialect) -> ReturningUpdate[Any]:
    """The number is the tenant's last one from now on, if it is above the last that was seen, and this is that store."""
    number, seen = _number(), bindparam("my_after", type_=Integer)
    this = select(meta.c.value).where(meta.c.name == word(STORE)).scalar_subquery()
    is_next = and_(_t.last_key_number == seen, number > seen)
    next_one = update(tenants).where(_t.tenant_id == _tid(), is_next, this == bindparam("my_store", type_=BigInteger))
    return next_one.values(last_key_number=number).returning(_t.last_key_number)


def add_key(dialect: Dialect) -> Insert:
    """The key of a number that was just taken."""
    kept = [
        ("tenant_id", _tid()),
        ("number", _number()),
        ("wrapping_key_id", bindparam("my_wrapping_key_id", type_=Text)),
        ("wrapped_key", bindparam("my_wrapped_key", type_=LargeBinary)),
        ("created_at", dialect.now),
    ]
    return sqlalchemy.insert(data_keys).values(dict(kept))


def close_key(dialect: Dialect) -> Update:
    """It seals no more, since when it was first told so."""
    return update(data_keys).where(*_is_key(), _k.disabled_at.is_(None)).values(disabled_at=dialect.now)


def retire_key(dialect: Dialect) -> Delete:
    """A key that seals no more is gone."""
    return delete(data_keys).where(*_is_key(), _k.disabled_at.is_not(None))


def erase(dialect: Dialect) -> Update:
    """No data key of the tenant's may open anything from now on, and no answer to a key that was used before."""
    later = getattr(func, dialect.greatest)(func.coalesce(_t.erased_at, ZERO), dialect.now)
    return update(tenants).where(_t.tenant_id == _tid()).values(shredded_key_number=_t.last_key_number, erased_at=later)


def destroy_keys(dialect: Dialect) -> Delete:
    """All that the tenant has."""
    return delete(data_keys).where(_k.tenant_id == _tid())


def other_keys(dialect: Dialect) -> Select[Any]:
    """Everybody's data keys that another key of the ring wraps."""
    others = select(_k.tenant_id, *_shown(dialect)).where(
        _k.wrapping_key_id != bindparam("my_wrapping_key_id", type_=Text)
    )
    return others.order_by(_k.tenant_id, _k.number)


def count_keys(dialect: Dialect) -> Select[Any]:
    """How many there are under each key of the ring."""
    return select(_k.wrapping_key_id, func.count().label("keys_")).group_by(_k.wrapping_key_id)


def _shown(dialect: Dialect) -> tuple[Any, ...]:
    return _k.number, _k.wrapping_key_id, _k.wrapped_key, (dialect.now - _k.disabled_at).label("disabled_for")


def _is_key() -> tuple[Any, Any]:
    return _k.tenant_id == _tid(), _k.number == _number()


def _tid() -> Any:
    return bindparam("my_tenant_id", type_=LargeBinary)


def _number() -> Any:
    return bindparam("my_number", type_=Integer)


_log = logging.getLogger("flask_idempotency")


class SqlDataKeys:
    """Implements `capabilities.DataKeys`. `now` says what time it is, or None to leave that to the server."""

    def __init__(self, database: Database, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._now = now

    def read_keys(self, tid: bytes) -> TenantKeys:
        dialect = self._database.dialect
        parameters = {"my_tenant_id": tid, "now": self._now()}
        found = self._database.run(lambda connection: connection.execute(shelf(dialect), parameters).all())
        if not found:
            self._database.run(identity)
            found = self._database.run(lambda connection: connection.execute(shelf(dialect), parameters).all())
        if not found:
            raise nameless()
        keys = tuple(_key(row) for row in found if row.number is not None)
        store, last = found[0].store, found[0].last
        if not isinstance(store, int) or not isinstance(last, int):
            raise CorruptRecord("the database's own number, or a tenant's last data key, cannot be read: restore it")
        return TenantKeys(spelt(store), keys, last)

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        dialect = self._database.dialect
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
            with transaction(connection):
                connection.execute(first_key(dialect), parameters)
                if connection.execute(take_number(dialect), parameters).one_or_none() is None:
                    return False
                connection.execute(add_key(dialect), parameters)
                return True

        return self._database.run(add)

    def disable(self, tid: bytes, number: int) -> None:
        dialect = self._database.dialect
        self._execute(close_key(dialect), tid, number)

    def delete(self, tid: bytes, number: int) -> None:
        dialect = self._database.dialect
        self._execute(retire_key(dialect), tid, number)

    def wrapped_by_other(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        dialect = self._database.dialect
        parameters = {"my_wrapping_key_id": kid, "now": self._now()}
        found = self._database.run(
            lambda connection: connection.execute(other_keys(dialect), parameters).all(), long=True
        )
        return list(_readable(found))

    def shred(self, tid: bytes) -> int:
        dialect = self._database.dialect
        parameters = {"my_tenant_id": tid, "now": self._now()}

        def destroy(connection: Connection) -> int:
            with transaction(connection):
                connection.execute(first_key(dialect), parameters)
                # Whoever adds a key meanwhile holds the tenant's row, or waits for it: what is deleted is all there is.
                connection.execute(erase(dialect), parameters)
                return connection.execute(destroy_keys(dialect), parameters).rowcount

        return self._database.run(destroy)

    def count(self) -> Mapping[str, int]:
        dialect = self._database.dialect
        found = self._database.run(lambda connection: connection.execute(count_keys(dialect)).all(), long=True)
        return {row.wrapping_key_id: row.keys_ for row in found}

    def _execute(self, statement: Any, tid: bytes, number: int) -> None:
        parameters = {"my_tenant_id": tid, "my_number": number, "now": self._now()}
        self._database.run(lambda connection: connection.execute(statement, parameters))


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
