"""Keep the janitor's log and locks, delete what has expired, and handle records of lost workers.

Only code that does not own a claim calls this. Statements take the parameters that `statements.py` explains. Every one
reads the time from the server, or from `now` in tests.

A caller's horizon is a time by another clock. A statement acts only on what is due by the horizon and by the server's
clock. It compares the two separately, because the server's clock moves while the statement runs, so no index can use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from flask_idempotency.engine.capabilities import RecordPage, SeenRecord, UnfinishedCounts
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.keys import OWNER_BYTES, StorageKey, new_token
from flask_idempotency.engine.model import OnExpiry, State, StoredPayload
from flask_idempotency.engine.tasks import LONGEST_LOCK_SECONDS, TaskReport
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.sql import completion, dialects, quota, schema, statements
from flask_idempotency.stores.sql.activity import SWEPT
from flask_idempotency.stores.sql.activity import delete_expired as delete_expired_beside
from flask_idempotency.stores.sql.capability import SqlCapability
from flask_idempotency.stores.sql.database import TRIES, transaction
from flask_idempotency.stores.sql.dialects import Dialect, bigint, binary, in_microseconds, integer, string
from flask_idempotency.stores.sql.naming import prefix
from flask_idempotency.stores.sql.rows import readable, row_of
from flask_idempotency.stores.sql.statements import ONE, ZERO, columns, is_mine, word
from flask_idempotency.stores.sql.writes import of_chosen, returned, upserted

_t, _r = schema.tasks.c, schema.records.c

TWO: Final[sa.ColumnElement[int]] = sa.literal_column("2", sa.BigInteger)

SQLITE_BATCH: Final = 200
"""Records that one statement deletes on SQLite, where every claim waits for it. Deleting 1,000 rows took 250 ms, 200 took
20 ms."""

COUNTED: Final = 10_000
"""Completed records that are counted one by one, in 6 ms. Above that, an estimate is good enough."""

LOOKED_AT: Final = 2000
"""Rows that a page of one tenant's completed records looks at: some milliseconds. No index has them by tenant."""

_TIME_BYTES: Final = 8


class SqlTaskLog(SqlCapability):
    """Implements `TaskLog`: when each task last ran, and which worker runs it now."""

    def now(self) -> float:
        ((now,),) = self._rows(statements.server_time)
        return float(now / 1_000_000)

    def report(self, task: str, report: str) -> None:
        self._change(save_report, my_name=task, my_report=report)

    def reports(self) -> Mapping[str, TaskReport]:
        rows = self._rows(read_reports)
        if not all(isinstance(row.ago, int) and isinstance(row.report, str) for row in rows):
            raise CorruptRecord("a row of idempotency_tasks cannot be read: delete it, the janitor writes it again")
        return {row.name: TaskReport(max(row.ago, 0) / 1_000_000, row.report) for row in rows}

    def lock(self, task: str, token: bytes, *, lease: float) -> bool:
        return self._row(lock_task, my_name=task, my_locked_by=token, lease=microseconds(lease)) is not None

    def unlock(self, task: str, token: bytes) -> None:
        self._change(unlock_task, my_name=task, my_locked_by=token)


def save_report(dialect: Dialect) -> Any:
    """Save what the last run of a task reported, in place of the report before it."""
    values: dict[str, Any] = {"name": _task_name(), "reported_at": dialect.now, "report": string("my_report")}
    return upserted(dialect, schema.tasks, values, ("name",), ("reported_at", "report"))


def read_reports(dialect: Dialect) -> sa.Select[Any]:
    """Select the last report of each task, and its age."""
    ago = (dialect.now - _t.reported_at).label("ago")
    return sa.select(_t.name, ago, _t.report).where(_t.reported_at.is_not(None))


def lock_task(dialect: Dialect) -> Any:
    """Lock a task for this worker if it is free, locked by this worker, or if its lock expired. Else return no row."""
    now = f"coalesce(:now, {dialect.clock})"
    # Later than any lock can expire: the clock was set back since.
    too_late = f"{now} + {round(LONGEST_LOCK_SECONDS * 1_000_000)}"
    unless_locked = (
        "idempotency_tasks.locked_by IS NULL OR idempotency_tasks.locked_by = excluded.locked_by"
        f" OR idempotency_tasks.lock_expires_at <= {now}"
        f" OR idempotency_tasks.lock_expires_at > {too_late}"
    )
    values: dict[str, Any] = {
        "name": _task_name(),
        "locked_by": binary("my_locked_by"),
        "lock_expires_at": dialect.now + bigint("lease"),
    }
    taken = ("locked_by", "lock_expires_at")
    return upserted(
        dialect, schema.tasks, values, ("name",), taken, where=unless_locked, binds=(bigint("now"),), proof=(_t.name,)
    )


def unlock_task(dialect: Dialect) -> sa.Update:
    """Unlock a task that this worker has locked."""
    mine = sa.update(schema.tasks).where(_t.name == _task_name(), _t.locked_by == binary("my_locked_by"))
    return mine.values(locked_by=sa.null(), lock_expires_at=sa.null())


def _task_name() -> sa.ColumnElement[str]:
    return sa.bindparam("my_name", type_=sa.String)


class SqlExpiry(SqlCapability):
    """Implements `Expiry`: delete expired records and quota buckets, and what has expired beside them: activity,
    observations and audit entries."""

    def sweep(self, *, horizon: float, limit: int) -> int:
        if self._database.dialect.name == dialects.SQLITE:
            limit = min(limit, SQLITE_BATCH)
        removed, by = 0, in_microseconds(horizon)
        beside: list[tuple[Any, ...]] = [(delete_expired_beside, table) for table in SWEPT]
        # Quota buckets have no index by time, so this reads all of them. Do it once, when nothing else is left.
        for make, *form in ((delete_expired,), (remove_responses,), *beside, (quota.delete_expired,)):
            if removed >= limit:
                break
            if make is remove_responses and self._database.dialect.name == dialects.MYSQL:
                removed += self._remove_in_order(by, limit - removed)
            else:
                reads_all = make is quota.delete_expired
                removed += self._change(make, *form, long=reads_all, my_horizon=by, my_limit=limit - removed)
        return removed

    def _remove_in_order(self, horizon: int, limit: int) -> int:
        """Remove a batch of responses, and note up to where none is left. MySQL has no index of those that are left alone."""
        found = self._rows(remove_responses, my_horizon=horizon, my_limit=limit)
        until = max(row.response_expires_at for row in found) if len(found) >= limit else horizon
        (left,) = self._rows(first_response, my_horizon=horizon)
        self._change(note_removed, my_until=until if left.first is None else min(until, left.first))
        return len(found)


REMOVED: Final = "responses_removed"
"""The row of `idempotency_meta` on MySQL with the time up to which responses were removed."""

REMOVED_AGAIN: Final = 60_000_000
"""A minute: a response that a transaction stored when others of its time were removed already is looked at for so long. After
that it goes with its record."""


def note_removed(dialect: Dialect) -> Any:
    """MySQL: note up to where responses were removed, by the server's clock."""
    until = dialect.smaller(bigint("my_until"), dialect.now)
    return upserted(dialect, schema.meta, {"name": word(REMOVED), "value": until}, ("name",), ("value",))


def delete_expired(dialect: Dialect) -> Any:
    """Delete a batch of expired records, the earliest first. Skip locked rows, but not on SQLite: another worker is about to
    claim or delete them."""
    expired = _is_expired(dialect)
    first = sa.select(_r.record_id).where(expired).order_by(_r.expires_at).limit(integer("my_limit"))
    # Repeat the condition: another worker may have claimed the row between the select and its lock.
    return of_chosen(dialect, first, lambda these: sa.delete(schema.records).where(these, expired))


def remove_responses(dialect: Dialect) -> Any:
    """Remove a batch of expired responses, the earliest first, from records that are remembered for longer."""
    expired, unnoted = _has_expired_response(dialect)
    first = sa.select(_r.record_id).where(expired).order_by(_r.response_expires_at).limit(integer("my_limit"))
    empty = sa.literal_column("''::bytea" if dialect.name == dialects.POSTGRESQL else "x''", sa.LargeBinary)
    # As a record of an erased tenant: the release before refuses it, and never runs it again.
    gone = {"response": empty, "response_size": ZERO, "wrapping_key_id": word(""), "data_key_number": ZERO}
    shown: tuple[sa.ColumnElement[Any], ...] = ()
    if dialect.name == dialects.MYSQL:
        first, shown = first.where(unnoted), (_r.response_expires_at,)
    return of_chosen(dialect, first, lambda these: sa.update(schema.records).where(these, expired).values(gone), *shown)


def first_response(dialect: Dialect) -> sa.Select[Any]:
    """MySQL: select when the first of the responses expired that a batch has left, such as one whose row was locked."""
    return sa.select(sa.func.min(_r.response_expires_at).label("first")).where(*_has_expired_response(dialect))


def _has_expired_response(dialect: Dialect) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    """Match the records whose response is to be removed, and those that may be such by what `note_removed` has noted."""
    horizon, kept = bigint("my_horizon"), sa.func.coalesce(_r.data_key_number, ONE) != ZERO
    is_completed = sa.and_(statements.is_completed(), completion.outlives_response())
    expired = sa.and_(is_completed, kept, _r.response_expires_at <= horizon, _r.response_expires_at <= dialect.now)
    # Not where the clock was set back since.
    noted = sa.and_(schema.meta.c.name == word(REMOVED), schema.meta.c.value <= horizon)
    since = sa.select(schema.meta.c.value - sa.literal_column(str(REMOVED_AGAIN))).where(noted).scalar_subquery()
    return expired, _r.response_expires_at > sa.func.coalesce(since, ZERO)


def has_overdue(dialect: Dialect) -> sa.Select[Any]:
    """Select whether a record that expired before the horizon still exists."""
    return sa.select(sa.select(ONE).select_from(schema.records).where(_is_expired(dialect)).exists())


def _is_expired(dialect: Dialect) -> sa.ColumnElement[bool]:
    # A record that expired before it was completed has a damaged time. If it were deleted, its payment could run again.
    is_completed = sa.and_(statements.is_completed(), _r.expires_at >= _r.completed_at)
    horizon = bigint("my_horizon")
    return sa.and_(
        sa.or_(_r.state == word(schema.RELEASED), is_completed), _r.expires_at <= horizon, _r.expires_at <= dialect.now
    )


class SqlRecovery(completion.SqlCompleting):
    """Implements `Recovery`: find records of lost workers, quarantine, resolve and release them."""

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        first, after_key = int.from_bytes(after[:_TIME_BYTES], "big"), after[_TIME_BYTES:]
        by = in_microseconds(horizon)
        rows = self._rows(expired_leases, my_horizon=by, my_first=first, my_after=after_key, my_limit=limit)
        last = rows[-1] if len(rows) == limit else None
        return RecordPage(
            tuple(readable(rows, _seen_record)),
            None if last is None else last.lease_expires_at.to_bytes(_TIME_BYTES, "big") + last.record_id,
        )

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        if seen.record.on_expiry is not OnExpiry.QUARANTINE:
            # On MySQL the statement would lock the row before it sees this, and a retry would be refused for that moment.
            return False
        return (
            self._row(quarantine_expired, **completion.as_seen(seen), my_horizon=in_microseconds(horizon)) is not None
        )

    def next_for_resolver(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[SeenRecord]:
        pauses: dict[str, Any] = {"least": microseconds(least), "most": microseconds(most)}
        given: dict[str, Any] = {"my_horizon": in_microseconds(horizon), "my_limit": limit, "my_owner": owner}
        while True:
            rows = self._rows(next_for_resolver, owner is not None, **given, **pauses)
            found = readable(rows, _seen_record)
            # Unreadable records have had their turn, too, so the next round returns other records.
            if found or len(rows) < limit:
                return sorted(found, key=lambda each: each.record.deadline)

    def resolve(
        self,
        seen: SeenRecord,
        *,
        token: bytes,
        payload: StoredPayload,
        keep: float,
        remember: float | None = None,
    ) -> bool:
        statement = read_as_seen(self._database.dialect)
        parameters = {
            **completion.as_seen(seen),
            "my_tenant_id": seen.key.tid,
            "my_token": token,
            "now": self._now(),
            **completion.answer_of(seen.key, payload, keep, remember),
        }
        completing = self._completing()

        def resolve(connection: sa.Connection) -> bool:
            for _ in range(TRIES):
                if completing.write(connection, parameters, resolving=True) is not None:
                    return True
                row = connection.execute(statement, parameters).one_or_none()
                if row is not None and row.token == token:
                    return row.state in schema.ANSWERED
                if row is None or row.state != schema.QUARANTINED or not row.unchanged:
                    return False
                completing.look_again(connection, parameters, row)
            raise StoreUnavailable(f"the row changed between read and write {TRIES} times")

        return self._database.run(resolve)

    def force_release(self, seen: SeenRecord) -> bool:
        # A new token tells this release from another one: after a lost reply the row is read, and has this token.
        token = new_token()
        rule = schema.TAKEOVER if seen.record.on_expiry is OnExpiry.TAKEOVER else schema.QUARANTINE
        parameters = {**completion.as_seen(seen), "my_tenant_id": seen.key.tid, "my_token": token, "now": self._now()}
        parameters["seen_on_expiry"] = rule
        kept = None if seen.record.remembered_until is None else in_microseconds(seen.record.deadline)

        def release(connection: sa.Connection) -> bool:
            is_completed = seen.record.state is State.COMPLETED
            with transaction(connection):
                row = self._send(connection, force_release, parameters).one_or_none()
                if row is not None and not is_completed:
                    self._send(connection, completion.drop_journal, parameters)
                elif row is not None and row.in_quota:
                    of_key = {**parameters, "my_shard": completion.shard_of(seen.key)}
                    counted = completion.shares(parameters["seen_deadline"], row.response_size, kept)
                    completion.count(connection, self._database.dialect, of_key, counted, sign=-1)
            if row is not None:
                return True
            now = self._send(connection, read_as_seen, parameters).one_or_none()
            return now is not None and (now.state, now.token) == (schema.RELEASED, token)

        return self._database.run(release)

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        parameters: dict[str, Any] = {"my_after": after, "my_tenant_id": tid}
        if state is not State.COMPLETED:
            there = schema.PROCESSING if state is State.PROCESSING else schema.QUARANTINED
            rows = self._rows(scan_unfinished, there, my_limit=limit, **parameters)
            return RecordPage(tuple(readable(rows, _seen_record)), rows[-1].record_id if len(rows) == limit else None)

        # Most records are completed, and one tenant may own few of them.
        looked = limit if tid is None else max(limit, LOOKED_AT)
        rows, last = self._page(completion.page_end, scan_completed, limit=limit, looked=looked, **parameters)
        last = rows[-1].record_id if len(rows) == limit < looked else last
        return RecordPage(tuple(readable(rows, _seen_record)), after=last)

    def counts(self) -> UnfinishedCounts:
        (row,) = self._rows(count_unfinished)
        return UnfinishedCounts(
            in_flight=int(row.in_flight),
            lapsed=int(row.lapsed),
            quarantined=row.quarantined,
            lapsed_for=_seconds(row.lapsed_for),
            quarantined_for=_seconds(row.quarantined_for),
        )

    def about_completed(self) -> int | None:
        """Count a few thousand, and estimate more.

        PostgreSQL: the planner's estimate of all rows by the size of the table, less those that are not completed. So it
        includes expired and released rows, and is as good as the last VACUUM or ANALYZE; None before the first. SQLite:
        the length of the index of rows that ended, which takes 45 ms for a million.
        """
        (few,) = self._rows(count_few_completed, my_limit=COUNTED + 1)
        if few.completed <= COUNTED:
            return int(few.completed)
        (row,) = self._rows(estimate_completed, my_table=f"{self._database.run(prefix)}{schema.records.name}")
        return None if row.completed is None else max(int(row.completed), COUNTED)


def _seen_record(row: Any) -> SeenRecord:
    rid, tid, *columns = row
    # Only `next_for_resolver` selects this column.
    asked = bool(columns.pop()) if "asked" in row._fields else False
    return SeenRecord(StorageKey(rid, tid), row_of(columns).record(), asked)


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else max(microseconds, 0) / 1_000_000


def expired_leases(dialect: Dialect) -> sa.Select[Any]:
    """Select claims whose lease has expired, the earliest first, and start after the last one of the page before."""
    first, after_key = bigint("my_first"), binary("my_after")
    is_next = sa.or_(_r.lease_expires_at > first, sa.and_(_r.lease_expires_at == first, _r.record_id > after_key))
    claims = sa.select(_r.record_id, _r.tenant_id, *columns(), dialect.now.label("now")).where(
        _r.state == word(schema.PROCESSING),
        _r.lease_expires_at >= first,
        is_next,
        *_is_due(dialect, _r.lease_expires_at),
    )
    return claims.order_by(_r.lease_expires_at, _r.record_id).limit(integer("my_limit"))


def quarantine_expired(dialect: Dialect) -> Any:
    """Quarantine a claim whose lease has expired, if it is as seen and its policy says so. Skip a locked row, but not on
    SQLite: its worker is still there, or another janitor does the same."""
    return statements.lapsed_as_met(dialect, schema.QUARANTINE, statements.LEASE_EXPIRED)


def next_for_resolver(dialect: Dialect, one_owner: bool = False) -> Any:
    """Return quarantined records that are due for a resolver, and set their next turn. Two callers never get the same
    record in one turn. `one_owner`: only the records of one application. The others keep their turns."""
    is_turn = sa.and_(statements.is_in(dialect, schema.QUARANTINED), *_is_due(dialect, _r.resolver_due_at))
    if one_owner:
        is_turn = sa.and_(is_turn, sa.func.substr(_r.token, 1, OWNER_BYTES, type_=sa.LargeBinary) == binary("my_owner"))
    turns = sa.select(_r.record_id).where(is_turn).order_by(_r.resolver_due_at, _r.lease_expires_at)
    age = dialect.now - _lease_expires_at(dialect)
    pause = dialect.smaller(dialect.larger(age, bigint("least")), bigint("most"))
    following = dialect.smaller(dialect.now, bigint("my_horizon")) + pause
    # An odd time says that a resolver had a turn since the worker last renewed: RETURNING only sees the new row.
    # Use `following` once: a second expression would read the clock again and get another time.
    divides = "DIV" if dialect.name == dialects.MYSQL else "/"
    half = following.op(divides, precedence=8, return_type=sa.BigInteger())(TWO)
    due_at = half * TWO + sa.case((_r.resolver_due_at > _r.lease_expires_at, ONE), else_=ZERO)
    asked = (_r.resolver_due_at % TWO).label("asked")
    return of_chosen(
        dialect,
        turns.limit(integer("my_limit")),
        lambda these: sa.update(schema.records).where(these, is_turn).values(resolver_due_at=due_at),
        *(_r.record_id, _r.tenant_id, *columns(), dialect.now.label("now"), asked),
    )


def force_release(dialect: Dialect) -> Any:
    """Release a key whose record is as seen, in any state. Clear the response, which no longer counts, and set a token
    that no worker has."""
    same_rule = _r.on_expiry == sa.bindparam("seen_on_expiry", type_=sa.String)
    statement, now = statements.others_update(dialect, *_is_present(dialect), same_rule)
    released = statement.values(
        state=word(schema.RELEASED),
        token=binary("my_token"),
        expires_at=now + sa.literal_column(str(statements.RELEASED_KEEP), sa.BigInteger),
        resolver_due_at=ZERO,
        steps=ZERO,
        succeeded=statements.ended_wait(dialect),
        **{name: sa.null() for name in (*statements.OF_RESPONSE, "lease_expires_at", "reason")},
    )
    # `response_size` stays: the tenant's quota is reduced by it.
    return returned(dialect, released, is_mine(), _r.in_quota, _r.response_size)


def read_as_seen(dialect: Dialect) -> sa.Select[Any]:
    """Select why a write changed no row: whether the record is as seen, its state and its token."""
    unchanged = sa.and_(statements.is_as_met(), *_is_present(dialect))
    return sa.select(_r.state, _r.token, _r.in_quota, unchanged.label("unchanged")).where(is_mine())


def scan_unfinished(dialect: Dialect, state: str) -> sa.Select[Any]:
    """Select a page of records in this state, by their keys. Quarantined ones include corrupt responses."""
    return _scan(dialect, columns(), statements.is_in(dialect, state))


def scan_completed(dialect: Dialect) -> sa.Select[Any]:
    """Select unexpired completed records up to `my_until`. Leave out their responses, which may be large."""
    empty = sa.literal_column("''::bytea" if dialect.name == dialects.POSTGRESQL else "x''", sa.LargeBinary)
    shown = [empty.label("response") if column is _r.response else column for column in columns()]
    return _scan(dialect, shown, completion.is_remembered(dialect.now), _r.record_id <= binary("my_until"), few=False)


def _scan(
    dialect: Dialect, shown: list[sa.ColumnElement[Any]], *conditions: sa.ColumnElement[bool], few: bool = True
) -> sa.Select[Any]:
    # To sort by key SQLite would read the keys' index, with all completed records. A plus sign hides the column from it,
    # so it reads the small index of the state.
    rid = (
        sa.literal_column("+idempotency_records.record_id", sa.LargeBinary)
        if few and dialect.name == dialects.SQLITE
        else _r.record_id
    )
    page = sa.select(_r.record_id, _r.tenant_id, *shown, dialect.now.label("now")).where(
        rid > binary("my_after"), *conditions, _r.tenant_id == sa.func.coalesce(binary("my_tenant_id"), _r.tenant_id)
    )
    return page.order_by(rid).limit(integer("my_limit"))


def count_few_completed(dialect: Dialect) -> sa.Select[Any]:
    """Count completed records, up to a limit."""
    ended = _r.expires_at.is_not(None), statements.is_completed()
    some = (
        sa.select(ONE.label("one"))
        .select_from(schema.records)
        .where(*ended)
        .limit(integer("my_limit"))
        .subquery("some")
    )
    return sa.select(sa.func.count().label("completed")).select_from(some)


def estimate_completed(dialect: Dialect) -> sa.Select[Any]:
    """Estimate the number of completed records from what the database knows of its table, or count an index."""
    if dialect.name != dialects.POSTGRESQL:
        return (
            sa.select(sa.func.count().label("completed")).select_from(schema.records).where(_r.expires_at.is_not(None))
        )
    unfinished = [
        sa.select(sa.func.count()).select_from(schema.records).where(_r.state == word(state)).scalar_subquery()
        for state in (schema.PROCESSING, schema.QUARANTINED)
    ]
    # As the planner does: rows on a page at the last VACUUM or ANALYZE, times the pages of now. It writes -1 before.
    rows = "reltuples / nullif(relpages, 0) * pg_relation_size(oid) / current_setting('block_size')::integer"
    known = sa.literal_column(f"CASE WHEN reltuples >= 0 THEN ({rows})::bigint END", sa.BigInteger)
    table = sa.text("pg_class WHERE oid = to_regclass(:my_table)")
    return sa.select((known - unfinished[0] - unfinished[1]).label("completed")).select_from(table)


def count_unfinished(dialect: Dialect) -> sa.Select[Any]:
    """Count records in flight, expired and quarantined, and tell when the first lease of each ended. Read only indexes
    that hold no completed record."""
    moment = sa.select(dialect.now.label("now")).cte("moment")
    now = sa.select(moment.c.now).scalar_subquery()
    is_over = _r.lease_expires_at <= now
    in_flight = sa.select(
        sa.func.coalesce(sa.func.sum(sa.case((is_over, ZERO), else_=ONE)), ZERO).label("in_flight"),
        sa.func.coalesce(sa.func.sum(sa.case((is_over, ONE), else_=ZERO)), ZERO).label("lapsed"),
        sa.func.min(sa.case((is_over, _lease_expires_at(dialect)))).label("first_lapsed"),
    )
    processing = in_flight.where(statements.is_in(dialect, schema.PROCESSING)).subquery("processing")
    unknown = sa.select(
        sa.func.count().label("quarantined"), sa.func.min(_lease_expires_at(dialect)).label("first_quarantined")
    )
    quarantined = unknown.where(statements.is_in(dialect, schema.QUARANTINED)).subquery("quarantined")
    p, q = processing.c, quarantined.c
    counted = sa.select(
        p.in_flight.label("in_flight"),
        p.lapsed.label("lapsed"),
        (now - p.first_lapsed).label("lapsed_for"),
        q.quarantined.label("quarantined"),
        (now - q.first_quarantined).label("quarantined_for"),
    )
    return counted.select_from(processing.join(quarantined, ONE == ONE))


def _is_present(dialect: Dialect) -> tuple[sa.ColumnElement[bool], ...]:
    """The record is neither released nor expired."""
    return _r.state != word(schema.RELEASED), sa.or_(_r.expires_at.is_(None), _r.expires_at > dialect.now)


def _is_due(dialect: Dialect, when: sa.ColumnElement[Any]) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return when <= bigint("my_horizon"), when <= dialect.now


def _lease_expires_at(dialect: Dialect) -> sa.ColumnElement[int]:
    # A flipped sign bit makes a time whose age overflows, and the statement would fail for all records.
    return dialect.larger(_r.lease_expires_at, ZERO)
