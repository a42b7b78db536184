"""The statements that put a response into a record, or change one that is there, and the class that completes a record.

The completing statement has several forms, so that no response pays for a feature that it does not use: see `Form`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import DataKeyMissing, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, State, StoredPayload
from flask_idempotency.stores import bucket_width_ms, microseconds
from flask_idempotency.stores.sql import dialects, schema, statements
from flask_idempotency.stores.sql.capability import SqlCapability
from flask_idempotency.stores.sql.database import TRIES, Database, transaction
from flask_idempotency.stores.sql.dialects import Dialect, bigint, binary, in_microseconds, made, string
from flask_idempotency.stores.sql.driver import SessionConnection, SessionCursor
from flask_idempotency.stores.sql.naming import NamedConnection
from flask_idempotency.stores.sql.rows import is_settled
from flask_idempotency.stores.sql.schema import records
from flask_idempotency.stores.sql.statements import ONE, ZERO, is_mine, word
from flask_idempotency.stores.sql.writes import proven, returned

_r = records.c
_bucket_width_ms = lru_cache(maxsize=64)(bucket_width_ms)


class Form(NamedTuple):
    """The form of a completing statement."""

    sealed: bool = False
    """Complete only if the tenant's data key exists and the tenant was not erased since the first request."""
    counted: bool = False
    """Also update the quota ledger. The plain form changes no counted record."""
    tells: bool = False
    """Return the row, for the application's transaction. On PostgreSQL the statement sets a lock timeout until that
    transaction ends, and a second read would run under it."""
    closes: bool = False
    """Also remove the journal of a request with durable steps."""
    remembers: bool = False
    """Let the record outlive its response."""


def complete(dialect: Dialect, form: Form) -> Any:
    """Store the response and keep it this long. Return the fence; with `tells`, the row without its response."""
    statement, now = statements.owners(dialect, schema.PROCESSING, schema.QUARANTINED)
    return _completed(dialect, statement, now, form)


def resolve(dialect: Dialect, form: Form) -> Any:
    """Complete a quarantined row in its owner's place, if it still is as seen. The row gets a new token."""
    statement, now = statements.others_update(dialect, _r.state == word(schema.QUARANTINED))
    return _completed(dialect, statement.values(token=binary("my_token")), now, form._replace(closes=True))


def drop_journal(dialect: Dialect) -> sa.Delete:
    """Remove what is recorded of a record's steps, in the transaction that completes or frees it."""
    return sa.delete(schema.steps).where(schema.steps.c.record_id == binary("my_record_id"))


def book(dialect: Dialect) -> Any:
    """Add these amounts to an entry of the quota ledger. Negative amounts subtract."""
    entry = [sa.bindparam(f"my_{name}", type_=schema.quota_buckets.c[name].type) for name in statements.BOOKED]
    return statements.booked(dialect, sa.select(*entry).where(ONE == ONE))


def why_not_sealed(dialect: Dialect) -> sa.Select[Any]:
    """Read why a sealed response was not stored: if its tenant was erased since, and if its data key is enabled."""
    return dialect.in_session(seal_faults(records).where(is_mine()))


def seal_faults(table: sa.Table) -> sa.Select[Any]:
    """Read if the tenant of a row was erased since its request, and if its data key is enabled."""
    erased: sa.ColumnElement[Any] = statements.is_erased_since(table).label("erased")
    return sa.select(erased, statements.key_is_there(table).label("kept"))


def may_be_sealed(table: sa.Table) -> sa.ColumnElement[bool]:
    """Match a row that may store a payload sealed with this data key."""
    return sa.and_(statements.key_is_there(table), ~statements.is_erased_since(table))


def _completed(dialect: Dialect, statement: sa.Update, now: sa.ColumnElement[int], form: Form) -> Any:
    sealed, counted, tells, closes, remembers = form
    # If the clock was set back since the request, the completion would come first, and no valid row has that.
    begins = dialect.larger(now, _r.requested_at)
    ends, until = begins + bigint("keep"), begins + bigint("remember")
    if counted:
        ends = sa.case((_r.in_quota == ONE, _next_bucket_end(dialect, ends, "width")), else_=ends)
        until = sa.case((_r.in_quota == ONE, _next_bucket_end(dialect, until, "remember_width")), else_=until)
    else:
        statement = statement.where(_r.in_quota == ZERO)
    if sealed:
        statement = statement.where(may_be_sealed(records))
    completed = statement.values(
        **_payload(),
        lease_expires_at=sa.null(),
        completed_at=begins,
        expires_at=dialect.larger(until, ends) if remembers else ends,
        reason=sa.null(),
        succeeded=statements.ended_wait(dialect),
        resolver_due_at=ZERO,
        **({"response_expires_at": ends} if remembers else {}),
    )
    told = [*statements.columns(without="response"), now.label("now")] if tells else [_r.fence]
    if closes:
        completed = completed.values(steps=ZERO, step_write=ZERO)
    entry: list[sa.ColumnElement[Any]] = [_r.tenant_id, _r.in_quota, _r.expires_at, _r.response_size] if counted else []
    if counted and remembers:
        entry.append(_r.response_expires_at)
    if dialect.name != dialects.POSTGRESQL:
        shown = told if tells else [*told, *entry]
        return (
            returned(dialect, completed, is_mine(), *shown) if tells or counted else proven(dialect, completed, *shown)
        )
    if closes:
        entry.append(_r.record_id)
    if not entry:
        return completed.returning(*told)
    done = completed.returning(*told, *(column.label(f"_{column.name}") for column in entry)).cte("done")
    statement_told = sa.select(*(column for column in done.c if not column.name.startswith("_")))
    if closes:
        statement_told = statement_told.add_cte(
            sa.delete(schema.steps).where(schema.steps.c.record_id == done.c._record_id).cte("closed")
        )
    if not counted:
        return statement_told
    if not remembers:
        added = sa.select(
            done.c._tenant_id, word(schema.RESPONSES), done.c._expires_at, ZERO, _shard(), ONE, done.c._response_size
        )
        return statement_told.add_cte(
            statements.booked(dialect, added.where(done.c._in_quota == ONE)).cte("into_ledger")
        )
    # Both may end in one bucket, and a statement must not update a row twice.
    record = sa.select(done.c._expires_at.label("bucket_end"), ONE.label("records"), ZERO.label("bytes"))
    stored = sa.select(done.c._response_expires_at, ZERO, done.c._response_size)
    two = sa.union_all(*(each.where(done.c._in_quota == ONE) for each in (record, stored))).subquery("two")
    sums = (sa.cast(sa.func.sum(two.c[name]), sa.BigInteger) for name in ("records", "bytes"))
    both = sa.select(binary("my_tenant_id"), word(schema.RESPONSES), two.c.bucket_end, ZERO, _shard(), *sums)
    return statement_told.add_cte(statements.booked(dialect, both.group_by(two.c.bucket_end)).cte("into_ledger"))


def _payload() -> dict[str, Any]:
    """Return the values of a completed row that `facts_of` has as parameters."""
    names = ("state", "status", "response_size", "response", "wrapping_key_id", "data_key_number")
    return {name: sa.bindparam(f"my_{name}", type_=_r[name].type) for name in names}


def _next_bucket_end(dialect: Dialect, ends: sa.ColumnElement[int], width_name: str) -> sa.ColumnElement[int]:
    width = bigint(width_name)
    return dialect.quotient(ends + width - ONE, width) * width


def _shard() -> sa.ColumnElement[int]:
    return sa.bindparam("my_shard", type_=sa.SmallInteger)


def page_end(dialect: Dialect) -> sa.Select[Any]:
    """Read the last row of a page, and the next row if there is one. Return no row if the page is not full."""
    rest = sa.select(_r.record_id).where(_r.record_id > binary("my_after")).order_by(_r.record_id)
    return rest.offset(dialect.all_but_one("my_limit")).limit(sa.literal_column("2"))


def scan(dialect: Dialect) -> sa.Select[Any]:
    """Read the live responses of a page. Two parameters limit it: a tenant, and a wrapping key to leave out."""
    tenant_id, wrapping_key_id = binary("my_tenant_id"), string("my_wrapping_key_id")
    shown = sa.select(_r.record_id, _r.tenant_id, *statements.columns(), dialect.now.label("now"))
    return shown.where(
        _r.record_id > binary("my_after"),
        _r.record_id <= binary("my_until"),
        is_answer(dialect),
        _r.tenant_id == sa.func.coalesce(tenant_id, _r.tenant_id),
        sa.or_(wrapping_key_id.is_(None), sa.func.coalesce(_r.wrapping_key_id, word("")) != wrapping_key_id),
    ).order_by(_r.record_id)


def count_responses(dialect: Dialect) -> sa.Select[Any]:
    """Count the responses under each wrapping key. Include expired responses, but not wiped ones."""
    return statements.count_by_key(records, "responses").where(statements.is_completed())


def replace(dialect: Dialect, sealed: bool = False) -> Any:
    """Replace the payload if it still is the one that was seen. Keep the time at which it expires.

    `sealed`: refuse if the new payload's data key is missing, or the tenant was erased since the first request.
    """
    statement = sa.update(records).where(is_mine(), is_answer(dialect), _holds_seen())
    if sealed:
        statement = statement.where(may_be_sealed(records))
    return proven(dialect, statement.values(_payload()), _r.fence)


def read_if_as_seen(dialect: Dialect) -> sa.Select[Any]:
    """Return a row if the payload still is the one that was seen. Lock it, but not on SQLite."""
    entry = (_r.in_quota, *COUNTED_BY)
    return _locked(dialect, sa.select(*entry).where(is_mine(), is_answer(dialect), _holds_seen()))


def mark_corrupt(dialect: Dialect) -> Any:
    """Quarantine a completed row whose response cannot be opened. Keep all its data, and do not let it expire."""
    statement = sa.update(records).where(is_mine(), is_answer(dialect), _holds_seen())
    return proven(dialect, _condemned(dialect, statement, dialect.now), _r.fence)


def read_unreadable(dialect: Dialect) -> sa.Select[Any]:
    """Read the columns of an unreadable row that the quota ledger needs. Lock the row, but not on SQLite."""
    entry = (_r.state, _r.in_quota, *COUNTED_BY, dialect.now.label("now"))
    return _locked(dialect, sa.select(*entry).where(is_mine(), _r.state != word(schema.QUARANTINED)))


def mark_unreadable(dialect: Dialect) -> Any:
    """Quarantine an unreadable row, and do not let it expire. So its request does not run again."""
    since = sa.func.coalesce(_r.lease_expires_at, dialect.now)
    return proven(dialect, _condemned(dialect, sa.update(records).where(is_mine()), since), _r.fence)


def _condemned(dialect: Dialect, statement: sa.Update, since: sa.ColumnElement[int]) -> sa.Update:
    values: dict[Any, Any] = {
        _r.state: word(schema.QUARANTINED),
        _r.reason: word(CORRUPT),
        _r.lease_expires_at: since,
        _r.expires_at: sa.null(),
        _r.response_expires_at: sa.null(),
        # A quarantined row no longer shows in its state if the response is a success.
        _r.succeeded: sa.case(
            (_r.state == word(schema.COMPLETED), ONE), (_r.state == word(schema.FAILED), ZERO), else_=_r.succeeded
        ),
    }
    return dialect.assigned(statement, values, last=_r.state)


def is_answer(dialect: Dialect) -> sa.ColumnElement[bool]:
    """Match a completed row whose response is not expired."""
    return sa.and_(is_remembered(dialect.now), sa.or_(~outlives_response(), _r.response_expires_at > dialect.now))


def is_remembered(now: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    """Match a completed row that is not expired, although its response may be."""
    return sa.and_(statements.is_completed(), _r.expires_at > now)


def outlives_response() -> sa.ColumnElement[bool]:
    """Match a completed row that is remembered for longer than its response: see `Row.kept_until`."""
    # Never NULL, so that it can be negated.
    return sa.func.coalesce(_r.response_expires_at >= _r.completed_at, sa.false())


COUNTED_BY: Final = (_r.completed_at, _r.expires_at, _r.response_expires_at, _r.response_size)
"""The columns of a completed row that say how a quota counts it."""


def shares(expires_at: int, size: int, response_expires_at: int | None = None) -> list[tuple[int, int, int]]:
    """Return how a quota counts a completed record: the end of each bucket, with its records and its bytes.

    Pass `response_expires_at` if the record outlives its response.
    """
    if response_expires_at is None:
        return [(expires_at, 1, size)]
    return [(expires_at, 1, 0), (response_expires_at, 0, size)]


def count(
    connection: SessionConnection,
    dialect: Dialect,
    parameters: Mapping[str, Any],
    shares: Iterable[tuple[int, int, int]],
    *,
    sign: int = 1,
) -> None:
    """Add these shares to the quota ledger, or subtract them. `parameters` hold `my_tenant_id` and `my_shard`."""
    for end, one, stored in shares:
        amounts = entry(bucket_end=end, records=sign * one, stored=sign * stored)
        connection.execute(made(book, dialect), {**parameters, **amounts})


def _holds_seen() -> sa.ColumnElement[bool]:
    """Match the payload that was seen."""
    return sa.and_(
        _r.state == sa.bindparam("seen_state", type_=sa.String),
        _r.status == sa.bindparam("seen_status", type_=_r.status.type),
        statements.holds_seen(records, "response"),
    )


def _locked(dialect: Dialect, statement: sa.Select[Any]) -> sa.Select[Any]:
    return statement if dialect.name == dialects.SQLITE else statement.with_for_update()


SHARDS: Final = 8
"""Ledger rows that share the concurrent completions of a tenant. With one row, each would wait for another's commit.

Measured: 2,188 a second with one row, 7,089 with eight (correctness.md, section 4).
"""


class CompletionWriter:
    """Complete records with the form of the statement that each needs. Use the plain form until a record is counted."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect: Dialect = dialect
        self.counts: bool = False
        """True if quotas are in use. While it is False, a counted record costs one more statement."""

    def write(
        self,
        connection: SessionConnection,
        parameters: dict[str, Any],
        *,
        alone: bool = True,
        resolving: bool = False,
        tells: bool = False,
        checked: bool = False,
        closes: bool = False,
    ) -> Any | None:
        """Complete a record. Return None if no row was changed.

        * `alone`: the connection commits each statement by itself. Otherwise this is part of its transaction.
        * `resolving`: complete in the owner's place. `parameters` then hold the record that was seen.
        * `tells`: return the row without its response.
        * `checked`: the caller has just called `refuse_without_key`.
        * `closes`: remove the journal too. `resolving` always does.
        """
        dialect, counted, closes = self.dialect, self.counts, closes or resolving
        sealed, remembers = bool(parameters["my_data_key_number"]) and not checked, "remember" in parameters
        statement = made(resolve if resolving else complete, dialect, Form(sealed, counted, tells, closes, remembers))
        if dialect.name == dialects.POSTGRESQL or not (counted or closes):
            return connection.execute(statement, parameters).one_or_none()
        # A cursor of a session never is alone.
        with (
            nullcontext()
            if isinstance(connection, SessionCursor | NamedConnection) or not alone
            else transaction(connection)
        ):
            found = connection.execute(statement, parameters).one_or_none()
            if found is not None and closes:
                connection.execute(made(drop_journal, dialect), parameters)
            if found is not None and counted and found.in_quota:
                kept = found.response_expires_at if remembers else None
                count(connection, dialect, parameters, shares(found.expires_at, found.response_size, kept))
        return found

    def complete(self, connection: SessionConnection, parameters: dict[str, Any], closes: bool = False) -> None:
        """Complete a record for its owner, on a connection that commits each statement. `closes` as for `write`."""
        for _ in range(TRIES):
            if self.write(connection, parameters, closes=closes) is not None:
                return
            found = connection.execute(made(statements.read_state, self.dialect), parameters).one_or_none()
            if is_settled(found, parameters["my_token"], schema.ANSWERED):
                return
            self.look_again(connection, parameters, found)
        raise StoreUnavailable(f"the row changed between read and write {TRIES} times")

    def look_again(self, connection: SessionConnection, parameters: dict[str, Any], standing: Any) -> None:
        """Prepare another try after a write changed no row of its owner. Raise `DataKeyMissing` if that was the reason."""
        self.counts = self.counts or bool(standing.in_quota)
        self.refuse_without_key(connection, parameters)

    def refuse_without_key(self, connection: SessionConnection, parameters: dict[str, Any]) -> None:
        """Raise `DataKeyMissing` if a completion with these parameters would fail for want of its data key."""
        if is_sealed(parameters):
            refuse_sealed(connection.execute(made(why_not_sealed, self.dialect), parameters).one_or_none())


class SqlCompleting(SqlCapability):
    """A capability that completes records, or changes their responses. `completing` returns the store's writer."""

    def __init__(
        self, database: Database, completing: Callable[[], CompletionWriter], *, now: Callable[[], int | None]
    ) -> None:
        super().__init__(database, now=now)
        self._completing = completing


def refuse_sealed(why: Any | None) -> None:
    """Raise `DataKeyMissing` if this row of `why_not_sealed` is the reason why a payload was not stored."""
    if why is not None and (why.erased or not why.kept):
        raise DataKeyMissing(erased=bool(why.erased))


def answer_of(key: StorageKey, payload: StoredPayload, keep: float, remember: float | None = None) -> dict[str, Any]:
    """Return the parameters of `complete`, but for `my_record_id`, `my_token` and `now`."""
    longer = {}
    if remember is not None and remember > keep:
        longer = {"remember": microseconds(remember), "remember_width": _bucket_width_ms(remember) * 1000}
    return {
        **longer,
        **facts_of(payload, "my"),
        "my_shard": key.rid[0] % SHARDS,
        "keep": microseconds(keep),
        "width": _bucket_width_ms(keep) * 1000,
    }


def facts_of(payload: StoredPayload, whose: str) -> dict[str, Any]:
    """Return a payload as parameters. `whose` is `my` for values to write, and `seen` for values to compare."""
    by = payload.sealed_by
    return {
        f"{whose}_state": schema.COMPLETED if payload.success else schema.FAILED,
        f"{whose}_status": payload.status,
        f"{whose}_response_size": payload.byte_size,
        f"{whose}_response": payload.data,
        f"{whose}_wrapping_key_id": None if by is None else by.kid,
        f"{whose}_data_key_number": None if by is None else by.number,
    }


_ROW_STATES: Final = {
    State.PROCESSING: (schema.PROCESSING, schema.PROCESSING),
    State.QUARANTINED: (schema.QUARANTINED, schema.QUARANTINED),
    State.COMPLETED: schema.ANSWERED,
}


def as_seen(seen: SeenRecord) -> dict[str, Any]:
    """Return the parameters of `statements.is_as_met`, which compares a record with what the caller saw."""
    state, other = _ROW_STATES[seen.record.state]
    return {
        "my_record_id": seen.key.rid,
        "seen_state": state,
        "seen_other": other,
        "seen_token": seen.record.token,
        "seen_deadline": in_microseconds(
            seen.record.deadline if seen.record.remembered_until is None else seen.record.remembered_until
        ),
    }


def shard_of(key: StorageKey) -> int:
    return key.rid[0] % SHARDS


def is_sealed(parameters: dict[str, Any]) -> bool:
    """Return True if the response needs a data key. Number 0 means none."""
    return bool(parameters["my_data_key_number"])


def entry(
    *, bucket_end: int, records: int, stored: int, kind: str = schema.RESPONSES, window_length: int = 0
) -> dict[str, Any]:
    """Return the parameters of `book`, but for `my_tenant_id` and `my_shard`. The default is an entry of responses."""
    return {
        "my_kind": kind,
        "my_bucket_end": bucket_end,
        "my_window_length": window_length,
        "my_records": records,
        "my_bytes": stored,
    }
