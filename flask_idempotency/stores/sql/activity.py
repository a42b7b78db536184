"""Keep what the database holds beside its records: activity by minute and hour, observed keys, and the audit trail.

Each has a table of its own, so no claim, quota or list of records ever reads it. `SqlExpiry` removes what has expired.
Statements take the parameters that `statements.py` explains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from flask_idempotency.engine.activity import KEPT_SECONDS, ActivityBucket, ActivityPage, Counts, merged, read_counts
from flask_idempotency.engine.audit import AUDIT_KEPT_SECONDS, LONGEST_ACTOR, LONGEST_REASON, AuditEntry, read_entry
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.observations import Ending, Observed, Sighting
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.capability import Make, SqlCapability
from flask_idempotency.stores.sql.database import TRIES, transaction
from flask_idempotency.stores.sql.dialects import Dialect, bigint, binary, integer, string
from flask_idempotency.stores.sql.driver import RecordConnection
from flask_idempotency.stores.sql.rows import escape, unescape
from flask_idempotency.stores.sql.statements import server_time, word
from flask_idempotency.stores.sql.writes import of_chosen, upserted

_a, _t, _o, _u = schema.activity.c, schema.activity_tokens.c, schema.observations.c, schema.audit.c

TOKEN_SECONDS: Final = 600
"""How long a repeated `add` is recognised. A client repeats within seconds, or within minutes if it was frozen."""


class SqlActivity(SqlCapability):
    """Implement `activity.ActivityLog`: one row for each minute and hour, with the counts of all endpoints as JSON.

    One row, because a page of a day reads 1,440 of them, and not 1,440 for each endpoint.
    """

    def add(self, owner: bytes, counts: Counts, *, token: bytes) -> None:
        if not counts:
            return
        given = {"my_token": token, "now": self._now()}

        def add(connection: sa.Connection) -> None:
            with transaction(connection):
                now = self._send(connection, remember_token, given).scalar_one_or_none()
                if now is None:
                    return
                buckets = []
                for seconds in sorted(KEPT_SECONDS):
                    length = seconds * 1_000_000
                    start = now // length * length
                    ends = start + length + KEPT_SECONDS[seconds] * 1_000_000
                    of_length = {"my_length": length, "my_start": start, "my_expires_at": ends}
                    buckets.append({"my_owner": owner, **of_length})
                # Two calls may both find no row. So insert first, in the order in which rows are locked.
                self._send(connection, open_bucket, buckets)
                for bucket in buckets:
                    found = self._send(connection, lock_bucket, bucket).scalar_one()
                    total = merged([read_counts(found), counts])
                    self._send(connection, write_bucket, {**bucket, "my_counts": json.dumps(total)})

        self._database.run(add)

    def read(self, owner: bytes, *, length: int, seconds: float) -> ActivityPage:
        given = {
            "my_owner": owner,
            "my_length": microseconds(length),
            "my_span": round(min(seconds, KEPT_SECONDS[length]) * 1_000_000),
            "now": self._now(),
        }

        def read(connection: sa.Connection) -> ActivityPage:
            # Without buckets, no row would bring the time.
            now = self._send(connection, server_time, given).scalar_one()
            rows = self._send(connection, read_buckets, {**given, "my_now": now}).all()
            return ActivityPage(
                now / 1_000_000, [ActivityBucket(start // 1_000_000, read_counts(counts)) for start, counts in rows]
            )

        return self._database.run(read)


def remember_token(dialect: Dialect) -> Any:
    """Remember this call's token and return the time. Return no row if an earlier call had the same token."""
    moment = dialect.moment(bounded=True).subquery("moment")
    kept = sa.literal_column(str(TOKEN_SECONDS * 1_000_000), sa.BigInteger)
    values = {"token": binary("my_token"), "expires_at": moment.c.now + kept}
    now = (_t.expires_at - kept).label("now")
    mine = _t.token == binary("my_token")
    return upserted(dialect, schema.activity_tokens, values, ("token",), proof=(now,), key=mine)


def open_bucket(dialect: Dialect) -> Any:
    """Create the row of a minute or an hour, unless it is there."""
    names = {"owner": sa.LargeBinary, "length": sa.BigInteger, "start": sa.BigInteger, "expires_at": sa.BigInteger}
    given: list[Any] = [sa.bindparam(f"my_{name}", type_=kind) for name, kind in names.items()]
    columns = ("owner", "bucket_length", "bucket_start", "expires_at", "counts")
    return upserted(dialect, schema.activity, dict(zip(columns, [*given, word("{}")], strict=True)))


def lock_bucket(dialect: Dialect) -> sa.Select[Any]:
    """Select the counts of a minute or an hour. On PostgreSQL, lock the row until the transaction ends."""
    return sa.select(_a.counts).where(*_is_bucket()).with_for_update()


def write_bucket(dialect: Dialect) -> sa.Update:
    """Write the counts of a minute or an hour that this transaction has locked."""
    return sa.update(schema.activity).where(*_is_bucket()).values(counts=string("my_counts"))


def read_buckets(dialect: Dialect) -> sa.Select[Any]:
    """Select the buckets of one length that ended less than a span ago, the oldest first."""
    length, now = bigint("my_length"), bigint("my_now")
    mine = _a.owner == binary("my_owner"), _a.bucket_length == length
    page = sa.select(_a.bucket_start, _a.counts).where(*mine, _a.bucket_start > now - bigint("my_span") - length)
    return page.order_by(_a.bucket_start)


def _is_bucket() -> tuple[sa.ColumnElement[bool], ...]:
    return (
        _a.owner == binary("my_owner"),
        _a.bucket_length == bigint("my_length"),
        _a.bucket_start == bigint("my_start"),
    )


class SqlObservations(SqlCapability):
    """Implement `observations.Observations`: one row for each key."""

    def observe(
        self, key: StorageKey, *, token: bytes, fingerprint: bytes, lease: float, keep: float, hold_lapsed: bool
    ) -> Observed:
        given = {
            "my_record_id": key.rid,
            "my_token": token,
            "my_fingerprint": fingerprint,
            "my_lease": microseconds(lease),
            "my_keep": microseconds(keep),
            "my_hold": int(hold_lapsed),
            "now": self._now(),
        }
        return self._database.send(self._observe, given)

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._write(renew_observation, key, token, my_lease=microseconds(lease))

    def end(self, key: StorageKey, token: bytes, ending: Ending, *, keep: float) -> None:
        if ending is Ending.RELEASED:
            self._write(forget_observation, key, token)
        else:
            state = schema.REPLAY if ending is Ending.KEPT else schema.UNKNOWN
            self._write(end_observation, key, token, my_state=state, my_keep=microseconds(keep))

    def _observe(self, connection: RecordConnection, given: dict[str, Any]) -> Observed:
        for _ in range(TRIES):
            row = self._send(connection, observe, given).one_or_none()
            if row is None:
                # It is another request's. Read it, unless it ends or lapses between the two statements.
                row = self._send(connection, read_observation, given).one_or_none()
                if row is None or row.free:
                    continue
            ago = max(row.now - row.began_at, 0) / 1_000_000
            if row.fingerprint != given["my_fingerprint"]:
                return Observed(Sighting.MISMATCH, ago)
            if row.state not in schema.WATCHED:
                return Observed(Sighting.REPLAY if row.state == schema.REPLAY else Sighting.UNKNOWN, ago)
            if row.token != given["my_token"]:
                return Observed(Sighting.CONFLICT, ago)
            # A repeated call finds what the first one found.
            ago = max(row.watched_at - row.began_at, 0) / 1_000_000
            return Observed(Sighting.TAKEN_OVER if row.state == schema.TAKEN_OVER else Sighting.NEW, ago)
        raise StoreUnavailable(f"the row changed between write and read {TRIES} times")

    def _write(self, make: Make, key: StorageKey, token: bytes, **more: Any) -> None:
        given = {"my_record_id": key.rid, "my_token": token, "now": self._now(), **more}
        self._database.send(lambda connection: self._send(connection, make, given))


def observe(dialect: Dialect) -> Any:
    """Watch this request if its key is free, or if the lease of the watched one expired. With `my_hold`, note in place of
    the latter that its outcome is unknown. Return the row if it changed."""
    moment = dialect.moment(bounded=True).subquery("moment")
    until = moment.c.now + bigint("my_lease")
    values: dict[str, sa.ColumnElement[Any]] = {
        "record_id": binary("my_record_id"),
        "token": binary("my_token"),
        "fingerprint": binary("my_fingerprint"),
        "state": word(schema.NEW),
        "began_at": moment.c.now,
        "watched_at": moment.c.now,
        "lease_expires_at": until,
        "expires_at": until + bigint("my_keep"),
    }
    gone = "idempotency_observations.expires_at <= excluded.began_at"
    held = f":my_hold = 1 AND NOT ({gone})"

    def kept_if_held(column: str) -> str:
        return f"CASE WHEN {held} THEN idempotency_observations.{column} ELSE excluded.{column} END"

    sets = {
        "fingerprint": "excluded.fingerprint",
        **{column: kept_if_held(column) for column in ("token", "watched_at", "lease_expires_at")},
        "state": f"CASE WHEN {gone} THEN excluded.state WHEN :my_hold = 1 THEN '{schema.UNKNOWN}'"
        f" ELSE '{schema.TAKEN_OVER}' END",
        "began_at": f"CASE WHEN {gone} THEN excluded.began_at ELSE idempotency_observations.began_at END",
        "expires_at": f"CASE WHEN {held} THEN excluded.began_at + :my_keep ELSE excluded.expires_at END",
    }
    unless_others = (
        f"{gone} OR (idempotency_observations.fingerprint = excluded.fingerprint"
        f" AND idempotency_observations.state IN {schema.WATCHED!r}"
        " AND idempotency_observations.token <> excluded.token"
        " AND idempotency_observations.lease_expires_at <= excluded.began_at)"
    )
    binds = integer("my_hold"), bigint("my_keep")
    shown = *_shown(), dialect.now.label("now")
    return upserted(
        dialect,
        schema.observations,
        values,
        ("record_id",),
        sets,
        where=unless_others,
        binds=binds,
        proof=shown,
        key=_o.record_id == binary("my_record_id"),
    )


def read_observation(dialect: Dialect) -> sa.Select[Any]:
    """Select the observation of a key, and whether a request may be watched in its place."""
    gone = _o.expires_at <= dialect.now
    lapsed = sa.and_(
        _o.fingerprint == binary("my_fingerprint"),
        _o.state.in_([word(state) for state in schema.WATCHED]),
        _o.token != binary("my_token"),
        _o.lease_expires_at <= dialect.now,
    )
    shown = sa.select(*_shown(), dialect.now.label("now"), sa.or_(gone, lapsed).label("free"))
    return shown.where(_o.record_id == binary("my_record_id"))


def renew_observation(dialect: Dialect) -> sa.Update:
    """Extend the lease of the watched request, and its life by the same time."""
    until = dialect.larger(_o.lease_expires_at, dialect.now + bigint("my_lease"))
    lives = _o.expires_at + until - _o.lease_expires_at
    statement = sa.update(schema.observations).where(*_is_watched(dialect))
    return dialect.assigned(statement, {_o.lease_expires_at: until, _o.expires_at: lives}, last=_o.lease_expires_at)


def end_observation(dialect: Dialect) -> sa.Update:
    """Note how the watched request ended."""
    return (
        sa.update(schema.observations)
        .where(*_is_watched(dialect))
        .values(state=sa.bindparam("my_state", type_=sa.String), expires_at=dialect.now + bigint("my_keep"))
    )


def forget_observation(dialect: Dialect) -> sa.Delete:
    """Delete the observation of a request that would have been released."""
    return sa.delete(schema.observations).where(*_is_watched(dialect))


def _shown() -> tuple[sa.ColumnElement[Any], ...]:
    return _o.token, _o.fingerprint, _o.state, _o.began_at, _o.watched_at


def _is_watched(dialect: Dialect) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        _o.record_id == binary("my_record_id"),
        _o.token == binary("my_token"),
        _o.state.in_([word(state) for state in schema.WATCHED]),
        _o.expires_at > dialect.now,
    )


class SqlAuditTrail(SqlCapability):
    """Implement `audit.AuditTrail`: one row for each change."""

    def append(self, key: StorageKey, entry: AuditEntry, *, token: bytes) -> None:
        self._change(
            append,
            my_token=token,
            my_record_id=key.rid,
            my_tenant_id=key.tid,
            my_verb=entry.verb,
            my_was=entry.was,
            my_step=escape(entry.step),
            my_actor=escape(entry.actor[:LONGEST_ACTOR]),
            my_reason=escape(entry.reason[:LONGEST_REASON]),
            my_forced=int(entry.forced),
            my_certain=int(entry.certain),
        )

    def entries(self, key: StorageKey, *, limit: int = 100) -> Sequence[AuditEntry]:
        rows = self._rows(read_entries, my_record_id=key.rid, my_limit=limit)
        return [_entry(row) for row in reversed(rows)]

    def count(self, actor: str, *, seconds: float) -> int:
        name, span = escape(actor[:LONGEST_ACTOR]), round(seconds * 1_000_000)
        ((counted,),) = self._rows(count_entries, my_actor=name, my_span=span)
        return int(counted)

    def forget(self, tid: bytes) -> None:
        self._change(forget_entries, my_tenant_id=tid, long=True)


def _entry(row: Any) -> AuditEntry:
    # SQLite keeps values of any type in any column.
    escaped = (row.verb, row.was, row.actor, row.reason, row.step)
    texts = [unescape(text) if isinstance(text, str) else text for text in escaped]
    return read_entry(texts, row.forced, row.certain, row.changed_at, now=0)


def append(dialect: Dialect) -> Any:
    """Add an entry with the server's time, unless an earlier call with this token did."""
    names = ["token", "record_id", "tenant_id", "verb", "was", "step", "actor", "reason", "forced", "certain"]
    values: dict[str, Any] = {name: sa.bindparam(f"my_{name}", type_=_u[name].type) for name in names}
    kept = sa.literal_column(str(round(AUDIT_KEPT_SECONDS * 1_000_000)), sa.BigInteger)
    moment = dialect.moment(bounded=False).subquery("moment")
    values |= {"changed_at": moment.c.now, "expires_at": moment.c.now + kept}
    return upserted(dialect, schema.audit, values, ("token",))


def read_entries(dialect: Dialect) -> sa.Select[Any]:
    """Select the latest entries of a record, the latest first."""
    mine = sa.select(_u.verb, _u.was, _u.step, _u.actor, _u.reason, _u.forced, _u.certain, _u.changed_at).where(
        _u.record_id == binary("my_record_id"), _u.expires_at > dialect.now
    )
    return mine.order_by(_u.changed_at.desc(), _u.token.desc()).limit(integer("my_limit"))


def count_entries(dialect: Dialect) -> sa.Select[Any]:
    """Count the entries of an actor in a span until now."""
    since = dialect.now - bigint("my_span")
    return sa.select(sa.func.count()).where(_u.actor == string("my_actor"), _u.changed_at > since)


def forget_entries(dialect: Dialect) -> sa.Delete:
    """Delete the entries of a tenant's records."""
    return sa.delete(schema.audit).where(_u.tenant_id == binary("my_tenant_id"))


SWEPT: Final = (schema.activity, schema.activity_tokens, schema.observations, schema.audit)
"""Where `SqlExpiry.sweep` removes what has expired, beside records."""


def delete_expired(dialect: Dialect, table: sa.Table) -> Any:
    """Delete a batch of rows of one of these tables that have expired, the earliest first."""
    expired = table.c.expires_at <= bigint("my_horizon"), table.c.expires_at <= dialect.now
    first = (
        sa.select(*table.primary_key.columns).where(*expired).order_by(table.c.expires_at).limit(integer("my_limit"))
    )
    # Repeat the condition: another worker may have changed the row between the select and its lock.
    return of_chosen(dialect, first, lambda these: sa.delete(table).where(these, *expired))
