"""Build the statements about one record, and the clauses that other files' statements share with them.

`tests/stores/sql/snapshots/` holds the text of each statement for each database. `dialects.made` makes each of them once.

Parameters: `my_…` is a value to write, `seen_…` a value that the caller read before and compares, and `now` the time if a
test passes one. Durations and times are microseconds.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from flask_idempotency.stores.sql import dialects, schema
from flask_idempotency.stores.sql.dialects import Dialect, bigint, binary, integer, string
from flask_idempotency.stores.sql.rows import FINGERPRINT_BYTES, Row
from flask_idempotency.stores.sql.writes import Write, of_chosen, proven, upserted

ONE: Final[sa.ColumnElement[int]] = sa.literal_column("1", sa.BigInteger)
ZERO: Final[sa.ColumnElement[int]] = sa.literal_column("0", sa.BigInteger)

CHANNEL: Final = "flask_idempotency"
"""The PostgreSQL channel that carries the id of each record whose claim ends, if other requests may wait for it."""

_STORED: Final = Row._fields[: Row._fields.index("erased")]
_ADDED: Final = {name: f"idempotency_quota.{name} + excluded.{name}" for name in ("records", "bytes")}
_r = schema.records.c


def server_time(dialect: Dialect) -> sa.Select[Any]:
    """Select the server's time."""
    return sa.select(dialect.now.label("now"))


def columns(*, without: str = "") -> list[sa.ColumnElement[Any]]:
    """Return the columns of a `Row` without `now`: the stored ones, and whether the response is erased with the tenant."""
    # A literal: in RETURNING on SQLite, SQLAlchemy leaves out table names, and would write tenant_id = tenant_id.
    tid = sa.literal_column("idempotency_records.tenant_id", sa.LargeBinary)
    return [*(_r[name] for name in _STORED if name != without), erased(schema.records, tid)]


# What protects a payload, of a record or of a step: both tables have the columns for it.


def erased(table: sa.Table, tid: sa.ColumnElement[bytes]) -> sa.ColumnElement[Any]:
    """Read if the payload of a row is erased with its tenant."""
    t, c = schema.tenants.c, table.c
    by_key = sa.case(
        (c.data_key_number.is_(None), c.requested_at <= t.erased_at), else_=c.data_key_number <= t.shredded_key_number
    )
    found = sa.select(by_key).where(t.tenant_id == tid, t.erased_at.is_not(None)).correlate(table)
    return found.scalar_subquery().label("erased")


def key_is_there(table: sa.Table) -> sa.ColumnElement[bool]:
    """Match a row whose tenant has this data key, and may encrypt under it."""
    k, number = schema.data_keys.c, integer("my_data_key_number")
    there = sa.select(ONE).where(k.tenant_id == table.c.tenant_id, k.number == number, k.disabled_at.is_(None))
    return sa.exists(there.correlate(table))


def is_erased_since(table: sa.Table) -> sa.ColumnElement[bool]:
    """Match a row whose tenant was erased since its request."""
    t = schema.tenants.c
    later = sa.select(ONE).where(t.tenant_id == table.c.tenant_id, t.erased_at >= table.c.requested_at)
    return sa.exists(later.correlate(table))


def holds_seen(table: sa.Table, payload: str) -> sa.ColumnElement[bool]:
    """Match a row with the payload that was seen. Compare the short columns first: a payload may have mebibytes."""
    c = table.c
    return sa.and_(
        c[f"{payload}_size"] == bigint(f"seen_{payload}_size"),
        c.wrapping_key_id.is_not_distinct_from(string("seen_wrapping_key_id")),
        c.data_key_number.is_not_distinct_from(integer("seen_data_key_number")),
        c[payload] == binary(f"seen_{payload}"),
    )


def count_by_key(table: sa.Table, label: str) -> sa.Select[Any]:
    """Count the payloads under each wrapping key. Leave out wiped ones."""
    under = sa.func.coalesce(table.c.wrapping_key_id, word("")).label("wrapping_key_id")
    counted: list[sa.ColumnElement[Any]] = [under, sa.func.count().label(label)]
    return sa.select(*counted).where(sa.func.coalesce(table.c.data_key_number, ONE) != ZERO).group_by(under)


def is_mine() -> sa.ColumnElement[bool]:
    return _r.record_id == binary("my_record_id")


def word(word: str) -> sa.ColumnElement[str]:
    """Return one of our words as a literal, so that the statement's text shows it."""
    return sa.literal_column(f"'{word}'", sa.String)


def owners(dialect: Dialect, *states: str) -> tuple[sa.Update, sa.ColumnElement[int]]:
    """Update the token's own row, if it is in one of these states. Return the update, and the server's time in it."""
    owned = sa.and_(_r.token == binary("my_token"), _r.state.in_([word(state) for state in states]))
    return _with_lock_timeout(dialect, owned)


def others_update(dialect: Dialect, *conditions: sa.ColumnElement[bool]) -> tuple[sa.Update, sa.ColumnElement[int]]:
    """Update a row without its owner's token, if it still is as seen. Return the update, and the server's time in it."""
    return _with_lock_timeout(dialect, is_as_met(), *conditions)


def is_as_met() -> sa.ColumnElement[bool]:
    """Match the row of a `SeenRecord`. A completed record may be in one of two states of the row."""
    states = (sa.bindparam("seen_state", type_=sa.String), sa.bindparam("seen_other", type_=sa.String))
    return sa.and_(
        _r.state.in_(states),
        _r.token == binary("seen_token"),
        sa.func.coalesce(_r.lease_expires_at, _r.expires_at) == bigint("seen_deadline"),
    )


def _with_lock_timeout(
    dialect: Dialect, *conditions: sa.ColumnElement[bool]
) -> tuple[sa.Update, sa.ColumnElement[int]]:
    if dialect.name != dialects.POSTGRESQL:
        return sa.update(schema.records).where(is_mine(), *conditions), dialect.now
    rid = binary("my_record_id")
    moment = dialect.moment(bounded=True).add_columns(rid.label("record_id")).subquery("moment")
    # Compared with the parameter too: a join alone makes a plan for any key, which scans a table that was small.
    return sa.update(schema.records).where(is_mine(), _r.record_id == moment.c.record_id, *conditions), moment.c.now


def if_as_seen(dialect: Dialect, condition: sa.ColumnElement[bool]) -> sa.Update:
    """Update the row if it still is as read, and if `condition` holds by the server's clock. On PostgreSQL, skip a locked
    row: a plain update would wait."""
    state = _r.state == sa.bindparam("seen_state", type_=sa.String)
    seen = is_mine(), state, _r.token == binary("seen_token"), _r.fence == bigint("seen_fence")
    return _of_free(dialect, sa.and_(*seen), condition)


def lapsed_as_met(dialect: Dialect, rule: str, reason: str, *conditions: sa.ColumnElement[bool]) -> Any:
    """Quarantine a claim whose lease has expired, if it is as seen and has this rule. Skip a locked row, but not on SQLite."""
    over = _r.lease_expires_at <= bigint("my_horizon"), _r.lease_expires_at <= dialect.now
    running = is_mine(), _r.state == word(schema.PROCESSING), is_as_met()
    seen = sa.and_(*running, _r.on_expiry == word(rule), *conditions, *over)
    values = quarantined(dialect, word(reason))
    if not dialect.returns:
        some = sa.select(_r.record_id).where(seen)
        return of_chosen(dialect, some, lambda these: sa.update(schema.records).where(these, seen).values(values))
    return _of_free(dialect, seen).values(values).returning(_r.fence)


def _of_free(dialect: Dialect, *conditions: sa.ColumnElement[bool]) -> sa.Update:
    """Update the row that matches. On PostgreSQL, a select finds it and skips it if another worker has locked it."""
    if dialect.name == dialects.POSTGRESQL:
        free = sa.select(_r.record_id).where(*conditions).correlate(None).with_for_update(skip_locked=True)
        conditions = (_r.record_id == free.scalar_subquery(),)
    return sa.update(schema.records).where(*conditions)


def is_in(dialect: Dialect, state: str) -> sa.ColumnElement[bool]:
    """Match the rows in one of the states without a completion. MySQL finds them by the index of leases: it has none of
    only these rows."""
    there = _r.state == word(state)
    return sa.and_(there, _r.lease_expires_at.is_not(None)) if dialect.name == dialects.MYSQL else there


def has_answer() -> sa.ColumnElement[bool]:
    """Match a row with a response, in any state. Only a completion stores one, and only a new claim removes it."""
    return _r.response.is_not(None)


def is_completed() -> sa.ColumnElement[bool]:
    """Match a completed row."""
    return _r.state.in_([word(state) for state in schema.ANSWERED])


def is_absent(dialect: Dialect) -> sa.ColumnElement[bool]:
    """Match a row whose key is free: it was released, or its response has expired."""
    # If a response expires before its completion, a bit is flipped: do not trust either time.
    over = sa.and_(_r.expires_at <= dialect.now, _r.expires_at >= _r.completed_at)
    expired = sa.and_(is_completed(), over)
    return sa.or_(_r.state == word(schema.RELEASED), expired)


def has_lapsed(dialect: Dialect, rule: str) -> sa.ColumnElement[bool]:
    return sa.and_(_r.state == word(schema.PROCESSING), _r.on_expiry == word(rule), _r.lease_expires_at <= dialect.now)


def ended_wait(dialect: Dialect) -> sa.ColumnElement[Any]:
    """Return the new value of `succeeded` where a claim ends: NULL. On PostgreSQL, wake the requests that wait.

    While a record is in flight, its `succeeded` is 1 if the claim lets other requests wait. An assignment reads the old
    row, and only for a row that it changes. PostgreSQL sends the message after the commit.
    """
    if dialect.name != dialects.POSTGRESQL:
        return sa.null()
    sent = sa.func.pg_notify(
        sa.literal_column(f"'{CHANNEL}'"), sa.func.encode(_r.record_id, sa.literal_column("'hex'"))
    )
    nothing = sa.cast(sa.func.nullif(sa.cast(sent, sa.Text), sa.literal_column("''")), sa.SmallInteger)
    return sa.case((sa.and_(_r.state == word(schema.PROCESSING), _r.succeeded == ONE), nothing))


def next_number(_: Dialect) -> sa.Select[Any]:
    """MariaDB: take the next fence from the sequence, under the lock of the row that gets it."""
    return sa.select(schema.fences.next_value())


def _new(dialect: Dialect) -> dict[str, sa.ColumnElement[Any]]:
    """Return the values that every grant writes, to a new row or an old one."""
    names = ("token", "fingerprint", "on_expiry", "tenant", "principal", "method", "endpoint")
    values: dict[str, sa.ColumnElement[Any]] = {name: sa.bindparam(f"my_{name}", type_=_r[name].type) for name in names}
    values["in_quota"] = sa.bindparam("my_in_quota", type_=_r.in_quota.type)
    fence: sa.ColumnElement[int] = bigint("my_fence")
    if dialect.name == dialects.POSTGRESQL:
        # Taken when the row is written, not before: otherwise a claim that waits for a lock could get a lower one.
        fence = schema.fences.next_value()
        values["succeeded"] = sa.bindparam("my_awaited", type_=_r.succeeded.type)
    return {"state": word(schema.PROCESSING), "fence": fence, **values}


OF_RESPONSE: Final = (
    "completed_at", "status", "response", "wrapping_key_id", "data_key_number", "response_expires_at"
)  # fmt: skip
"""The columns that only a row with a response has. Its size stays, so that the tenant's quota can be reduced by it."""


def regranted(
    dialect: Dialect, statement: sa.Update, *, attempt: sa.ColumnElement[int], requested_at: sa.ColumnElement[int]
) -> sa.Update:
    """Extend this update: make the row a claim in flight."""
    cleared = (*OF_RESPONSE, "expires_at", "response_size", "succeeded", "reason")
    values = {**{name: sa.null() for name in cleared}, **_new(dialect), "step_write": ZERO}
    if dialect.name == dialects.POSTGRESQL:
        # A sequence may go back: a new table has a new one, logical replication skips it, and an administrator may restart it.
        values["fence"] = sa.func.greatest(values["fence"], _r.fence + ONE)
    return statement.values(
        **values, attempt=attempt, requested_at=requested_at, lease_expires_at=dialect.now + bigint("lease")
    )


def insert(
    dialect: Dialect, *, within: sa.Select[Any] | None = None, numbered: bool = False, queues: bool = False
) -> Any:
    """Insert the row of a new key, if `within` has a row. Return no row if another worker was faster.

    For a known key, the database runs none of these: `within`; `numbered`, which takes the fence from the sequence on MariaDB;
    `queues`, which takes the advisory lock of the key on PostgreSQL.
    """
    # Set the lock timeout here, where no replay passes: it takes a third as long as a replay.
    moment = dialect.moment(bounded=True).subquery("moment")
    if queues:
        # The time is read after the wait, so that the lease is whole.
        moment = (
            sa.select(dialect.now.label("now")).select_from(advisory_lock(dialect).subquery("alone")).subquery("moment")
        )
    values: dict[str, sa.ColumnElement[Any]] = {
        "record_id": binary("my_record_id"),
        "tenant_id": binary("my_tenant_id"),
        **_new(dialect),
        "attempt": sa.literal_column("1"),
        "requested_at": moment.c.now,
        "lease_expires_at": moment.c.now + bigint("lease"),
    }
    if numbered:
        # The reply brings the number, as it does for `next_fence`.
        values["fence"] = sa.func.last_insert_id(schema.fences.next_value())
    # Without this WHERE, every replay would take a number from the sequence.
    unless_there = ~sa.exists(sa.select(sa.literal_column("1")).select_from(schema.records).where(is_mine()))
    source = sa.select(*values.values()).select_from(moment).where(unless_there)
    if within is not None:
        source = source.where(sa.exists(within))
    if numbered:
        return Write([sa.insert(schema.records).from_select(list(values), source)], numbers=True)
    return upserted(dialect, schema.records, values, ("record_id",), source=source, proof=(_r.fence,))


def cancel(dialect: Dialect) -> Any:
    """Insert a released row for a key that has none: a claim with this token may still arrive, and must fail."""
    moment = dialect.moment(bounded=True).subquery("moment")
    nothing = {name: sa.literal_column("''", _r[name].type) for name in ("tenant", "principal", "method", "endpoint")}
    values: dict[str, sa.ColumnElement[Any]] = {
        **{name: binary(f"my_{name}") for name in ("record_id", "tenant_id", "token")},
        "fingerprint": sa.bindparam("no_fingerprint", bytes(FINGERPRINT_BYTES), type_=sa.LargeBinary),
        "state": word(schema.RELEASED),
        "on_expiry": word(schema.QUARANTINE),
        **nothing,
        **dict.fromkeys(("fence", "attempt", "in_quota"), ZERO),
        "requested_at": moment.c.now,
        "expires_at": moment.c.now + sa.literal_column(str(RELEASED_KEEP), sa.BigInteger),
    }
    source = sa.select(*values.values()).select_from(moment).where(moment.c.now.is_not(None))
    return upserted(dialect, schema.records, values, ("record_id",), source=source, proof=(_r.fence,))


BOOKED: Final = ("tenant_id", "kind", "bucket_end", "window_length", "shard", "records", "bytes")
"""The columns of an entry of the quota ledger."""


def booked(dialect: Dialect, source: sa.Select[Any]) -> Any:
    """Add what this selects to `idempotency_quota`: tenant, kind, bucket end, window length, shard, records, bytes."""
    values = dict(zip(BOOKED, source.selected_columns, strict=False))
    return upserted(dialect, schema.quota_buckets, values, BOOKED[:5], _ADDED, source=source)


LAST_FENCE: Final = "fence"
"""The row of `idempotency_meta` with the last fence, for databases without sequences."""

RELEASED_KEEP: Final = 86_400_000_000
"""A released row affects no request. It stays for a day, so that an operator can see what happened to the key."""

AFTER_LAST_KEY: Final = b"\xff" * 33
"""Sorts after every record id: an id has 32 bytes."""

LEASE_EXPIRED: Final = "lease-expired"
COMMITTED_EARLY: Final = "committed-early"


def read(dialect: Dialect) -> sa.Select[Any]:
    """Read the row of a key and the time. Take no lock, and wait for none."""
    return sa.select(*columns(), dialect.now.label("now")).where(is_mine())


def read_state(dialect: Dialect) -> sa.Select[Any]:
    """Read the columns that explain why an owner's write changed no row."""
    facts: list[sa.ColumnElement[Any]] = [_r.state, _r.token, _r.expires_at, _r.completed_at, _r.in_quota]
    shown = sa.select(*facts, _r.reason, has_answer().label("answered"), dialect.now.label("now"))
    return dialect.in_session(shown.where(is_mine()))


def renew(dialect: Dialect) -> Any:
    """Extend the lease to at least this long from now. Never shorten it.

    This also works on a row in quarantine for an expired lease: the row stays there, but its owner lives.
    """
    statement, now = owners(dialect, schema.PROCESSING, schema.QUARANTINED)
    lapsing = sa.or_(_r.state == word(schema.PROCESSING), _r.reason == word(LEASE_EXPIRED))
    before: sa.ColumnElement[int] = _r.lease_expires_at
    if dialect.name == dialects.MYSQL:
        # See `SqlStore.renew`.
        before = before + sa.bindparam("later", 0, type_=sa.BigInteger)
    longer = dialect.larger(before, now + bigint("lease"))
    return proven(dialect, statement.where(lapsing).values(lease_expires_at=longer), _r.fence)


def mark_point_of_no_return(dialect: Dialect, *, commits: bool = False) -> Any:
    """Quarantine this row, and do not let a claim take it over, if its lease expires from now on.

    `commits`: in a transaction that the view commits. The reason shows later whether it did.
    """
    statement, _ = owners(dialect, schema.PROCESSING)
    reason = {"reason": word(COMMITTED_EARLY)} if commits else {}
    return proven(dialect, statement.values(on_expiry=word(schema.QUARANTINE), **reason), _r.fence)


def quarantine(dialect: Dialect) -> Any:
    """Quarantine a row, because its owner does not know the outcome."""
    statement, _ = owners(dialect, schema.PROCESSING)
    return proven(dialect, statement.values(quarantined(dialect, string("my_reason"))), _r.fence)


def quarantined(dialect: Dialect, reason: sa.ColumnElement[str]) -> dict[str, sa.ColumnElement[Any]]:
    """Return the values of a claim that ends in quarantine."""
    return {"state": word(schema.QUARANTINED), "reason": reason, "succeeded": ended_wait(dialect)}


def end_wait_silently(dialect: Dialect) -> sa.Update:
    """Let this claim end without a message."""
    statement, _ = owners(dialect, schema.PROCESSING)
    return statement.values(succeeded=sa.null())


def claim_or_read(dialect: Dialect, *, queues: bool = False) -> sa.Select[Any]:
    """PostgreSQL: return one row, with `now` and either the new row's fence in `granted` or the existing row.

    It may hold neither: another worker committed a row after this statement took its snapshot. Then send it again. A known
    key takes no fence, no lock and no attempt to insert.
    """
    granted = insert(dialect, queues=queues).cte("granted")
    moment = sa.select(dialect.now.label("now")).subquery("moment")
    both = moment.outerjoin(granted, sa.true()).outerjoin(schema.records, is_mine())
    return sa.select(granted.c.fence.label("granted"), *columns(), moment.c.now).select_from(both)


def take_over(dialect: Dialect) -> Any:
    """Take over a claim whose lease has expired. Keep the time of the first request, and whether quotas count the record."""
    over = sa.and_(has_lapsed(dialect, schema.TAKEOVER), _r.fingerprint == binary("my_fingerprint"))
    update = if_as_seen(dialect, over)
    again = regranted(dialect, update, attempt=_r.attempt + sa.literal_column("1"), requested_at=_r.requested_at)
    return proven(dialect, again.values(in_quota=_r.in_quota), _r.fence, _r.attempt)


def reclaim(dialect: Dialect, *, within: sa.Select[Any] | None = None) -> Any:
    """Claim a key that is free again, in the row of a released claim or of an expired response, if `within` has a row."""
    update = if_as_seen(dialect, is_absent(dialect))
    if within is not None:
        update = update.where(within.exists())
    first = regranted(dialect, update, attempt=sa.literal_column("1"), requested_at=dialect.now).values(steps=ZERO)
    return proven(dialect, first, _r.fence, _r.attempt)


def quarantine_expired(dialect: Dialect) -> Any:
    """Quarantine a claim whose lease has expired. Its owner can still `complete` it with its token."""
    statement = if_as_seen(dialect, has_lapsed(dialect, schema.QUARANTINE))
    return proven(dialect, statement.values(quarantined(dialect, word(LEASE_EXPIRED))), _r.fence, _r.attempt)


def read_locked(dialect: Dialect) -> sa.Select[Any]:
    """Read the row and lock it until the transaction ends. Return no row if it is absent or locked already."""
    return read(dialect).with_for_update(skip_locked=True)


def wait_to_reclaim(dialect: Dialect) -> sa.Select[Any]:
    """PostgreSQL: wait for the lock of a row whose key is free. Raise after a short lock timeout.

    A worker that locks such a row removes it or claims its key. Other rows do not match, so this does not wait for them.
    """
    moment = dialect.moment(bounded=True, lock_timeout_ms=dialects.SHORT_LOCK_TIMEOUT_MS).subquery("moment")
    absent = sa.select(_r.record_id, moment.c.lock_timeout).select_from(moment.join(schema.records, is_mine()))
    return absent.where(is_absent(dialect)).with_for_update(of=schema.records)


def advisory_lock(dialect: Dialect) -> sa.Select[Any]:
    """PostgreSQL: lock all keys of this number until the transaction ends. Read the row in the NEXT statement.

    This statement's snapshot is older than the lock. Never lock the session: behind a pooler, it serves other clients too.
    """
    moment = dialect.moment(bounded=True).subquery("moment")
    lock = sa.func.pg_advisory_xact_lock(bigint("my_number"))
    return sa.select(lock.label("locked")).select_from(moment)


def reconciling(dialect: Dialect) -> sa.Select[Any]:
    """MySQL: lock out other corrections of quotas until the transaction ends. No claim takes this lock."""
    return sa.select(schema.meta.c.value).where(schema.meta.c.name == word("store")).with_for_update()


def has_written(dialect: Dialect) -> sa.Select[Any]:
    """PostgreSQL: read whether this transaction has written: only then it has a transaction id."""
    return sa.select(sa.func.txid_current_if_assigned().is_not(None))


def next_fence(dialect: Dialect) -> Any:
    """SQLite and MySQL: take the next fence, in the transaction that grants it. Use the clock's time if it is higher.

    On MySQL the row stays locked until the end of that transaction, so grants come one after the other.

    If the row of the last fence is missing, start above the highest fence of all records. Alembic creates the table without
    rows, and an operator may delete this one.
    """
    m, name = schema.meta.c, word(LAST_FENCE)
    written = sa.select(m.value).where(m.name == name).scalar_subquery()
    # `coalesce` reads the records only if that row is missing.
    last = sa.func.coalesce(written, sa.select(sa.func.max(_r.fence)).scalar_subquery(), ZERO)
    risen = dialect.larger(last + sa.literal_column("1"), dialect.now)
    if dialect.returns:
        return upserted(dialect, schema.meta, {"name": name, "value": risen}, ("name",), ("value",), proof=(m.value,))
    # The reply to such an assignment brings the number, so that no other claim waits for a read.
    higher = sa.func.last_insert_id(dialect.larger(m.value + ONE, dialect.now))
    rise = sa.update(schema.meta).where(m.name == name).values(value=higher)
    first = sa.insert(schema.meta).from_select(["name", "value"], sa.select(name, sa.func.last_insert_id(risen)))
    return Write([rise, first, rise], numbers=True)
