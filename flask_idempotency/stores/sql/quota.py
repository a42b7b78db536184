"""Count what each tenant uses, keep its limits, and write claims that respect them.

An index of unfinished records counts them. A completion adds its record and bytes to a bucket of `idempotency_quota`, by the
time at which they expire. So a claim writes no counter, except under a limit on new keys. The bytes in journals are summed
where a limit on bytes is checked: few requests have a journal, and none that is completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.sql.selectable import CTE

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, Usage
from flask_idempotency.stores.sql import completion, dialects, statements
from flask_idempotency.stores.sql.capability import Make, SqlCapability
from flask_idempotency.stores.sql.completion import entry, is_remembered, outlives_response, shard_of
from flask_idempotency.stores.sql.database import transaction
from flask_idempotency.stores.sql.dialects import Dialect, bigint, binary
from flask_idempotency.stores.sql.schema import NEW_KEYS, PROCESSING, RESPONSES, quota_buckets, records, steps, tenants
from flask_idempotency.stores.sql.statements import ONE, ZERO, is_mine, word
from flask_idempotency.stores.sql.writes import of_chosen, upserted

_LIMITS = ("records", "bytes", "in_flight", "new_keys")
_l, _r, _s, _t = quota_buckets.c, records.c, steps.c, tenants.c


def insert_within(dialect: Dialect) -> sa.Select[Any]:
    """PostgreSQL: do the same as `insert`, if the tenant is below all its limits by `my_margin`.

    No row may also mean that it is not: then claim under the tenant's lock. This statement holds that lock in shared mode,
    so a worker that holds it alone sees the rows of all such statements.
    """
    return _within_limits(dialect, statements.insert)


def reclaim_within(dialect: Dialect) -> sa.Select[Any]:
    """PostgreSQL: do the same as `reclaim`, under the conditions of `insert_within`."""
    return _within_limits(dialect, statements.reclaim)


def _within_limits(dialect: Dialect, make: Make) -> sa.Select[Any]:
    limits = _limits(dialect).cte("limits")
    room = sa.select(ONE).select_from(limits).where(_has_room(dialect, limits))
    granted = make(dialect, within=room).cte("granted")
    # Count this new key in its window, if there is a limit on new keys.
    end = _window_end(dialect, limits.c.now, limits.c.window_length)
    shard = sa.bindparam("my_shard", type_=_l.shard.type)
    entry = sa.select(binary("my_tenant_id"), word(NEW_KEYS), end, limits.c.window_length, shard, ONE, ZERO)
    of_rate = entry.select_from(granted.join(limits, sa.true())).where(limits.c.new_keys.is_not(None))
    return sa.select(*granted.c).add_cte(statements.booked(dialect, of_rate).cte("into_window"))


def tenant_lock(dialect: Dialect) -> sa.Select[Any]:
    """PostgreSQL: lock out other new keys of this tenant until the transaction ends. Read in the next statement."""
    moment = dialect.moment(bounded=True, lock_timeout_ms=dialects.SHORT_LOCK_TIMEOUT_MS).subquery("moment")
    lock = sa.func.pg_advisory_xact_lock(bigint("my_tenants_number"))
    return sa.select(lock.label("locked")).select_from(moment)


def tenant_counts(dialect: Dialect) -> sa.Select[Any]:
    """Select what this tenant uses, its limits in force, and whether the key has a row."""
    limits = _limits(dialect).subquery("limits")
    now, window = limits.c.now, _window_end(dialect, limits.c.now, limits.c.window_length)
    in_force = [limits.c[name].label(f"max_{name}") for name in (*_LIMITS, "window_length")]
    counts = [
        _unfinished().label("unsettled"),
        _running(now).label("in_flight"),
        _kept(_l.records, now).label("records"),
        (_kept(_l.bytes, now) + sa.case((limits.c.bytes.is_not(None), _in_journals()), else_=ZERO)).label("bytes"),
        _new_keys(window, limits.c.window_length).label("new_keys"),
        _mine(sa.func.min(others.c.lease_expires_at), *_is_running(now)).label("first_lease"),
        _entries(sa.func.min(_l.bucket_end), _l.kind == word(RESPONSES), _l.bucket_end > now).label("first_bucket_end"),
        sa.select(ONE).select_from(records).where(is_mine()).exists().label("known"),
    ]
    return sa.select(now, *in_force, *counts).select_from(limits)


def usage(dialect: Dialect) -> sa.Select[Any]:
    """Select what this tenant uses. If windows of several lengths are open, count the one with the most new keys."""
    moment = sa.select(dialect.now.label("now")).subquery("moment")
    now = moment.c.now
    windows = sa.select(sa.func.sum(_l.records).label("keys")).where(
        _l.tenant_id == binary("my_tenant_id"), _l.kind == word(NEW_KEYS)
    )
    # MySQL knows no other table in there. Its clock stands still during a statement.
    open_now = (
        windows.where(_l.bucket_end > (dialect.now if dialect.name == dialects.MYSQL else now))
        .group_by(_l.bucket_end, _l.window_length)
        .correlate(moment)
        .subquery("windows")
    )
    counts = [
        (_unfinished() + _kept(_l.records, now)).label("records"),
        (_kept(_l.bytes, now) + _in_journals()).label("bytes"),
        _running(now).label("in_flight"),
        sa.select(_whole(sa.func.max(open_now.c["keys"]))).scalar_subquery().label("new_keys"),
    ]
    return sa.select(*counts).select_from(moment)


def limits(dialect: Dialect) -> sa.Select[Any]:
    """Select the tenant's own limits."""
    own = (_t[f"limit_{name}"].label(name) for name in (*_LIMITS, "window"))
    return sa.select(*own).where(_t.tenant_id == binary("my_tenant_id"))


def set_limits(dialect: Dialect) -> Any:
    """Set all of the tenant's own limits."""
    names = [f"limit_{name}" for name in (*_LIMITS, "window")]
    given = [*(f"my_max_{name}" for name in _LIMITS), "my_window_length"]
    values: dict[str, Any] = {
        "tenant_id": binary("my_tenant_id"),
        "last_key_number": ZERO,
        "shredded_key_number": ZERO,
        **dict(zip(names, map(bigint, given), strict=True)),
    }
    return upserted(dialect, tenants, values, ("tenant_id",), names, proof=(_t.tenant_id,))


def tenants_with_quota(dialect: Dialect) -> sa.Select[Any]:
    """Select the tenants that have a bucket, an unfinished record that counts, or their own limits."""
    limited = sa.or_(*(_t[f"limit_{name}"].is_not(None) for name in _LIMITS))
    unfinished = sa.select(others.c.tenant_id).where(others.c.in_quota == ONE, others.c.lease_expires_at.is_not(None))
    every_tenant = sa.union(sa.select(_l.tenant_id), unfinished, sa.select(_t.tenant_id).where(limited)).subquery(
        "everybody"
    )
    return sa.select(every_tenant.c.tenant_id)


def drift(dialect: Dialect) -> sa.Select[Any]:
    """Select the buckets that differ from the records. One snapshot shows both after the same completions."""
    # Read the clock once: a bucket that ends between two readings would look like a drift.
    moment = sa.select(dialect.now.label("now")).cte("moment")
    now = sa.select(moment.c.now).scalar_subquery()
    booked_ = sa.select(_l.bucket_end, _l.records, _l.bytes)
    booked_ = booked_.where(_l.tenant_id == binary("my_tenant_id"), _l.kind == word(RESPONSES), _l.bucket_end > now)
    counted = sa.select(_r.expires_at, -ONE, sa.case((outlives_response(), ZERO), else_=-_r.response_size))
    stored = sa.select(_r.response_expires_at, ZERO, -_r.response_size)
    stored = stored.where(outlives_response(), _r.response_expires_at > now)
    mine = (_r.tenant_id == binary("my_tenant_id"), _r.in_quota == ONE, is_remembered(now))
    both = sa.union_all(booked_, counted.where(*mine), stored.where(*mine)).subquery("both_")
    records_, bytes_ = (sa.cast(sa.func.sum(both.c[name]), sa.BigInteger) for name in ("records", "bytes"))
    found = sa.select(both.c.bucket_end, records_.label("records"), bytes_.label("bytes")).group_by(both.c.bucket_end)
    return found.having(sa.or_(records_ != ZERO, bytes_ != ZERO))


def delete_expired(dialect: Dialect) -> Any:
    """Delete a batch of expired buckets, which no longer count."""
    key = (_l.tenant_id, _l.kind, _l.bucket_end, _l.window_length, _l.shard)
    horizon = sa.func.coalesce(bigint("my_horizon"), _l.bucket_end)
    over = sa.select(*key).where(_l.bucket_end <= dialect.now, _l.bucket_end <= horizon)
    return of_chosen(dialect, over.limit(bigint("my_limit")), sa.delete(quota_buckets).where)


others: Final = records.alias("others")
"""The tenant's records, in a statement where `records` is the row of the claimed key."""


def _limits(dialect: Dialect) -> sa.Select[Any]:
    """Select one row: the time, read once, and the limits in force. Each of the tenant's own limits replaces the given one.
    A window's length comes with its limit of new keys."""
    moment = sa.select(dialect.now.label("now")).subquery("moment")
    in_force = [sa.func.coalesce(_t[f"limit_{name}"], bigint(f"my_max_{name}")).label(name) for name in _LIMITS]
    given = bigint("my_window_length")
    span = sa.case((_t.limit_new_keys.is_not(None), _t.limit_window), else_=given).label("window_length")
    return sa.select(moment.c.now, *in_force, span).select_from(
        moment.outerjoin(tenants, _t.tenant_id == binary("my_tenant_id"))
    )


def _has_room(dialect: Dialect, limits: CTE) -> sa.ColumnElement[bool]:
    """All counts are below their limits by `my_margin`, and no other worker holds the tenant's lock alone."""
    now, span, margin = limits.c.now, limits.c.window_length, bigint("my_margin")
    # A response in flight may have any size. So the bytes so far only limit later keys.
    below = [
        _is_below(_unfinished() + _kept(_l.records, now), limits.c.records - margin),
        _is_below(_kept(_l.bytes, now) + _in_journals(), limits.c.bytes),
        _is_below(_running(now), limits.c.in_flight - margin),
        _is_below(_new_keys(_window_end(dialect, now, span), span), limits.c.new_keys - margin),
    ]
    # In a CASE: a worker above a limit takes the lock alone next, and must not hold the shared one.
    return sa.case(
        (sa.and_(*below), sa.func.pg_try_advisory_xact_lock_shared(bigint("my_tenants_number"))), else_=sa.false()
    )


def _is_below(used: sa.ColumnElement[int], limit: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    return sa.or_(limit.is_(None), used < limit)


def _window_end(dialect: Dialect, now: sa.ColumnElement[int], span: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    return (dialect.quotient(now, span) + ONE) * span


def _unfinished() -> sa.ColumnElement[int]:
    return _mine(sa.func.count())


def _running(now: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    return _mine(sa.func.count(), *_is_running(now))


def _is_running(now: sa.ColumnElement[int]) -> tuple[sa.ColumnElement[bool], ...]:
    return others.c.lease_expires_at > now, others.c.state == word(PROCESSING)


def _mine(what: sa.ColumnElement[Any], *conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    """Aggregate the tenant's unfinished records that count. The conditions are those of the index that holds them."""
    unfinished = (
        others.c.tenant_id == binary("my_tenant_id"),
        others.c.in_quota == ONE,
        others.c.lease_expires_at.is_not(None),
    )
    return (
        sa.select(what).select_from(others).where(*unfinished, *conditions).correlate_except(others).scalar_subquery()
    )


def _in_journals() -> sa.ColumnElement[int]:
    """Sum the bytes in the journals of the tenant's unfinished records that count. A completion removes its journal."""
    of_life = sa.and_(others.c.record_id == _s.record_id, others.c.requested_at == _s.requested_at)
    unfinished = (
        _s.tenant_id == binary("my_tenant_id"),
        others.c.in_quota == ONE,
        others.c.lease_expires_at.is_not(None),
    )
    total = sa.select(_whole(sa.func.sum(_s.payload_size))).select_from(steps.join(others, of_life)).where(*unfinished)
    return total.correlate_except(others, steps).scalar_subquery()


def _kept(what: sa.ColumnElement[int], now: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    return _entries(_whole(sa.func.sum(what)), _l.kind == word(RESPONSES), _l.bucket_end > now)


def _new_keys(end: sa.ColumnElement[int], span: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    return _entries(
        _whole(sa.func.sum(_l.records)), _l.kind == word(NEW_KEYS), _l.bucket_end == end, _l.window_length == span
    )


def _entries(what: sa.ColumnElement[Any], *conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    of_tenant = sa.select(what).select_from(quota_buckets).where(_l.tenant_id == binary("my_tenant_id"), *conditions)
    return of_tenant.correlate_except(quota_buckets).scalar_subquery()


def _whole(total: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """Cast a sum back to a whole number: PostgreSQL sums BIGINT as NUMERIC."""
    return sa.cast(sa.func.coalesce(total, ZERO), sa.BigInteger)


MARGIN: Final = 128
"""How far below each limit claims run without the tenant's lock. Limits are exact while fewer claims of one tenant than this
are between their read and their commit. That is more than most servers have connections."""


def limits_of(quota: Quota) -> dict[str, int | None]:
    new_keys = quota.new_keys
    return {
        "my_max_records": quota.records,
        "my_max_bytes": quota.bytes,
        "my_max_in_flight": quota.in_flight,
        "my_max_new_keys": None if new_keys is None else new_keys.count,
        "my_window_length": None if new_keys is None else max(round(new_keys.seconds * 1_000_000), 1),
    }


def within(key: StorageKey, quota: Quota) -> dict[str, int | None]:
    """Return the parameters that a claim with a quota adds."""
    number = int.from_bytes(key.tid[:8], "big", signed=True)
    return {**limits_of(quota), "my_margin": MARGIN, "my_shard": shard_of(key), "my_tenants_number": number}


def checked(counts: Any) -> Any:
    """Return this row of `tenant_counts`. Raise `CorruptRecord` unless all of it is numbers or NULL."""
    if not all(each is None or isinstance(each, int) for each in counts):
        raise CorruptRecord("a tenant's limits or counts in the database cannot be read: set its limits again")
    if (counts.max_new_keys is None) != (counts.max_window_length is None) or (counts.max_window_length or 1) < 1:
        raise CorruptRecord("a tenant's limit of new keys in the database cannot be read: set it again")
    return counts


def rate(count: int | None, span: int | None) -> NewKeys | None:
    return None if count is None or span is None else NewKeys(count, span / 1_000_000)


class SqlLedger(SqlCapability):
    """Implements `capabilities.Ledger`."""

    def usage(self, tid: bytes) -> Usage:
        (found,) = self._rows(usage, my_tenant_id=tid)
        return Usage(**found._mapping)

    def limits(self, tid: bytes) -> Quota:
        found = self._row(limits, my_tenant_id=tid)
        if found is None:
            return Quota()
        if not all(each is None or (isinstance(each, int) and each >= 0) for each in found):
            raise CorruptRecord("a tenant's limits in the database cannot be read: set them again")
        if found.window == 0:
            raise CorruptRecord("a tenant's limit of new keys in the database cannot be read: set it again")
        return Quota(found.records, found.bytes, found.in_flight, rate(found.new_keys, found.window))

    def limit(self, tid: bytes, quota: Quota) -> None:
        self._row(set_limits, my_tenant_id=tid, **limits_of(quota))

    def tenants(self) -> Sequence[bytes]:
        return tuple(tid for (tid,) in self._rows(tenants_with_quota, long=True))

    def reconcile(self, tid: bytes) -> Drift:
        """Correct the tenant's buckets and return the difference. Read all records: each completion would pay for an index.

        Only another `reconcile` waits for it. It sees records and buckets in one snapshot, in which each completion is in
        both or in neither. It adds the difference, which stays right whatever a completion adds.
        """
        dialect = self._database.dialect
        # Other bits of the id than in the lock of claims, so that claims do not wait for it.
        number = int.from_bytes(tid[-8:], "big", signed=True) ^ 1
        parameters = {"my_tenant_id": tid, "my_number": number, "now": self._now()}

        def reconcile(connection: sa.Connection) -> Drift:
            with transaction(connection):
                if dialect.name == dialects.POSTGRESQL:
                    self._send(connection, statements.advisory_lock, parameters)
                elif dialect.name == dialects.MYSQL:
                    connection.execute(statements.reconciling(dialect)).all()
                found = self._send(connection, drift, parameters).all()
                for row in found:
                    correction = entry(bucket_end=row.bucket_end, records=-row.records, stored=-row.bytes)
                    self._send(connection, completion.book, {**parameters, "my_shard": 0, **correction})
            return Drift(sum(row.records for row in found), sum(row.bytes for row in found))

        return self._database.run(reconcile, long=True)
