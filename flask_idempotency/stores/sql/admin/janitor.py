"""The log and the locks of maintenance tasks, the removal of what has expired, and recovery: each class after its statements.

`my_horizon` is a time by the caller's clock. A statement does only what is due by the server's clock as well, and compares the
two apart, because no index can be searched by a clock that goes on. Other parameters as in `statements.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Delete,
    Insert,
    Integer,
    LargeBinary,
    Select,
    String,
    Text,
    TextClause,
    Update,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal_column,
    null,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from flask_idempotency.engine.capabilities import (
    LONGEST_LOCK_SECONDS,
    RecordPage,
    SeenRecord,
    TaskReport,
    UnfinishedCounts,
)
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.keys import OWNER_BYTES, StorageKey, new_token
from flask_idempotency.engine.model import State, StoredPayload
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.sql import completion
from flask_idempotency.stores.sql.completion import CompletionWriter, answer_of, entry, is_answer, shard_of
from flask_idempotency.stores.sql.database import TRIES, Database, transaction
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE, Dialect, in_microseconds
from flask_idempotency.stores.sql.quota import SqlLedger
from flask_idempotency.stores.sql.rows import row_of
from flask_idempotency.stores.sql.schema import (
    COMPLETED,
    FAILED,
    PROCESSING,
    QUARANTINE,
    QUARANTINED,
    RELEASED,
    RESPONSES,
    records,
    tasks,
)
from flask_idempotency.stores.sql.statements import (
    LEASE_EXPIRED,
    ONE,
    RELEASED_KEEP,
    ZERO,
    chosen,
    columns,
    is_as_met,
    is_mine,
    others_update,
    word,
)

_c = tasks.c


def time(dialect: Dialect) -> Select[Any]:
    """What time it is."""
    return select(dialect.now.label("now"))


def note(dialect: Dialect) -> Insert:
    """What the last run of this chore has said, whatever the one before it did."""
    source = select(_name(), dialect.now, bindparam("my_report", type_=Text)).where(ONE == ONE)
    suffix = "ON CONFLICT (name) DO UPDATE SET reported_at = excluded.reported_at, report = excluded.report"
    return sqlalchemy.insert(tasks).from_select(["name", "reported_at", "report"], source.suffix_with(suffix))


def last(dialect: Dialect) -> Select[Any]:
    """What was noted of each, and how long ago."""
    ago = (dialect.now - _c.reported_at).label("ago")
    return select(_c.name, ago, _c.report).where(_c.reported_at.is_not(None))


def take(dialect: Dialect) -> ReturningInsert[Any]:
    """The chore is this holder's from now on, if it is nobody's, or is already, or was somebody's for too long. Else
    nothing is returned."""
    until = dialect.now + bindparam("lease", type_=BigInteger)
    source = select(_name(), _holder(), until).where(ONE == ONE).suffix_with(_unless_held(dialect))
    into = sqlalchemy.insert(tasks).from_select(["name", "locked_by", "lock_expires_at"], source)
    return into.returning(_c.name)


def give_back(dialect: Dialect) -> Update:
    """It is nobody's, if it was this holder's."""
    mine = update(tasks).where(_c.name == _name(), _c.locked_by == _holder())
    return mine.values(locked_by=null(), lock_expires_at=null())


def _unless_held(dialect: Dialect) -> TextClause:
    free = "idempotency_tasks.locked_by IS NULL OR idempotency_tasks.locked_by = excluded.locked_by"
    now = f"coalesce(:now, {dialect.clock})"
    over = f"idempotency_tasks.lock_expires_at <= {now}"
    # By a clock that was set back since.
    too_long = f"idempotency_tasks.lock_expires_at > {now} + {round(LONGEST_LOCK_SECONDS * 1_000_000)}"
    taken = (
        "ON CONFLICT (name) DO UPDATE SET locked_by = excluded.locked_by, lock_expires_at = excluded.lock_expires_at"
    )
    return text(f"{taken} WHERE {free} OR {over} OR {too_long}").bindparams(bindparam("now", type_=BigInteger))


def _name() -> ColumnElement[str]:
    return bindparam("my_name", type_=String)


def _holder() -> ColumnElement[bytes]:
    return bindparam("my_locked_by", type_=LargeBinary)


class SqlTaskLog:
    """Implements `capabilities.TaskLog`. `now` as for `SqlDataKeys`."""

    def __init__(self, database: Database, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._now = now

    def now(self) -> float:
        dialect = self._database.dialect
        parameters = {"now": self._now()}
        now = self._database.run(lambda connection: connection.execute(time(dialect), parameters).scalar_one())
        return float(now / 1_000_000)

    def report(self, chore: str, report: str) -> None:
        dialect = self._database.dialect
        parameters = {"my_name": chore, "my_report": report, "now": self._now()}
        self._database.run(lambda connection: connection.execute(note(dialect), parameters))

    def reports(self) -> Mapping[str, TaskReport]:
        dialect = self._database.dialect
        parameters = {"now": self._now()}
        found = self._database.run(lambda connection: connection.execute(last(dialect), parameters).all())
        if not all(isinstance(row.ago, int) and isinstance(row.report, str) for row in found):
            raise CorruptRecord("what the database holds of a janitor's last run cannot be read")
        return {row.name: TaskReport(max(row.ago, 0) / 1_000_000, row.report) for row in found}

    def lock(self, chore: str, token: bytes, *, lease: float) -> bool:
        dialect = self._database.dialect
        parameters = {"my_name": chore, "my_locked_by": token, "lease": microseconds(lease), "now": self._now()}
        taken = self._database.run(lambda connection: connection.execute(take(dialect), parameters).one_or_none())
        return taken is not None

    def unlock(self, chore: str, token: bytes) -> None:
        dialect = self._database.dialect
        parameters = {"my_name": chore, "my_locked_by": token}
        self._database.run(lambda connection: connection.execute(give_back(dialect), parameters))


_r = records.c


def sweep(dialect: Dialect) -> Delete:
    """Some of the records that are over, those first that were over first. On PostgreSQL what somebody has locked stays:
    they are about to use the row again, or remove it themselves."""
    over = _is_over(dialect)
    first = select(_r.record_id).where(over).order_by(_r.expires_at).limit(bindparam("my_limit", type_=Integer))
    which = chosen(dialect, first)
    # Once more: whoever used the row again between the look and the lock has it.
    return delete(records).where(_r.record_id.in_(select(which.c.record_id)), over)


def is_overdue(dialect: Dialect) -> Select[Any]:
    """Whether there is a record that was over by then, and is still there."""
    there = select(ONE).select_from(records).where(_is_over(dialect)).exists()
    return select(there)


def _is_over(dialect: Dialect) -> ColumnElement[bool]:
    # A life that ended before it began is a flipped bit: to remove that row is to run its payment again.
    is_answer = and_(_r.state.in_((word(COMPLETED), word(FAILED))), _r.expires_at >= _r.completed_at)
    horizon = bindparam("my_horizon", type_=BigInteger)
    return and_(or_(_r.state == word(RELEASED), is_answer), _r.expires_at <= horizon, _r.expires_at <= dialect.now)


AT_ONCE_IN_A_FILE: Final = 200
"""SQLite has one writer at a time, and every claim waits for it: a thousand rows took a quarter of a second, two hundred a
fiftieth."""


class SqlExpiry:
    """Implements `capabilities.Expiry`. `now` as for `SqlDataKeys`."""

    def __init__(self, database: Database, ledger: SqlLedger, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._ledger = ledger
        self._now = now

    def sweep(self, *, horizon: float, limit: int) -> int:
        dialect = self._database.dialect
        if dialect.name == SQLITE:
            limit = min(limit, AT_ONCE_IN_A_FILE)
        parameters = {"my_horizon": in_microseconds(horizon), "my_limit": limit, "now": self._now()}
        removed = self._database.run(lambda connection: connection.execute(sweep(dialect), parameters).rowcount)
        if removed >= limit:
            return removed
        # Entries of ledgers have no index by time: they are looked through once, when no record is left.
        return removed + self._ledger.sweep(limit=limit - removed, horizon=horizon)


TWO: Final[ColumnElement[int]] = literal_column("2", BigInteger)


def stale(dialect: Dialect) -> Select[Any]:
    """Claims whose lease is over, those first that were over first, and what comes behind the last one that was met."""
    first, behind = _number("my_first"), _bytes("my_after")
    met = or_(_r.lease_expires_at > first, and_(_r.lease_expires_at == first, _r.record_id > behind))
    found = select(_r.record_id, _r.tenant_id, *columns(), dialect.now.label("now"))
    over = found.where(
        _r.state == word(PROCESSING), _r.lease_expires_at >= first, met, *_over(dialect, _r.lease_expires_at)
    )
    return over.order_by(_r.lease_expires_at, _r.record_id).limit(_limit())


def lapse(dialect: Dialect) -> ReturningUpdate[Any]:
    """A claim whose lease is over, as it was met, and whose rule says so. On PostgreSQL one that is locked is left alone:
    whoever locks it is its owner, or does the same."""
    wanted = and_(
        is_mine(),
        _r.state == word(PROCESSING),
        is_as_met(),
        _r.on_expiry == word(QUARANTINE),
        *_over(dialect, _r.lease_expires_at),
    )
    statement = _unless_locked(dialect, wanted)
    return statement.values(state=word(QUARANTINED), reason=word(LEASE_EXPIRED)).returning(_r.fence)


def due(dialect: Dialect) -> ReturningUpdate[Any]:
    """Quarantined records whose turn it is, and when the next one is: no two askers are given the same."""
    return _due(dialect)


def due_of_one(dialect: Dialect) -> ReturningUpdate[Any]:
    """The same of one application's. The others keep their turns."""
    begins = func.substr(_r.token, 1, OWNER_BYTES, type_=LargeBinary)
    return _due(dialect, begins == _bytes("my_owner"))


def _due(dialect: Dialect, *meant: ColumnElement[bool]) -> ReturningUpdate[Any]:
    turn = and_(_r.state == word(QUARANTINED), *_over(dialect, _r.resolver_due_at), *meant)
    which = chosen(
        dialect, select(_r.record_id).where(turn).order_by(_r.resolver_due_at, _r.lease_expires_at).limit(_limit())
    )
    age = dialect.now - _lease_expires_at(dialect)
    pause = _the(dialect.least, _the(dialect.greatest, age, _number("least")), _number("most"))
    following = _the(dialect.least, dialect.now, _number("my_horizon")) + pause
    # Odd where there was a turn since the owner was last heard of: what is returned is the row as it is from now on.
    # Asked for once: the next look at the clock would find it gone on.
    half = following.op("/", precedence=8, return_type=BigInteger())(TWO)
    turned = half * TWO + case((_r.resolver_due_at > _r.lease_expires_at, ONE), else_=ZERO)
    taken = update(records).where(_r.record_id.in_(select(which.c.record_id)), turn).values(resolver_due_at=turned)
    asked = (_r.resolver_due_at % TWO).label("asked")
    return taken.returning(_r.record_id, _r.tenant_id, *columns(), dialect.now.label("now"), asked)


def free(dialect: Dialect) -> ReturningUpdate[Any]:
    """The key is free again, in whatever state it was met. No answer is left: who asks for it would be told of one that
    counts no more. The token is nobody's."""
    statement, now = others_update(dialect, *_living(dialect))
    emptied = (
        "lease_expires_at",
        "completed_at",
        "status",
        "response",
        "reason",
        "wrapping_key_id",
        "data_key_number",
        "succeeded",
    )
    freed = statement.values(
        state=word(RELEASED),
        token=_bytes("my_token"),
        expires_at=now + literal_column(str(RELEASED_KEEP), BigInteger),
        resolver_due_at=ZERO,
        **{name: null() for name in emptied},
    )
    # How large the answer was stays: its tenant's ledger has to hear of it.
    return freed.returning(_r.in_quota, _r.response_size)


def glance(dialect: Dialect) -> Select[Any]:
    """As much of a row as tells why there was nothing to change: whether it is what was met, and whose it is."""
    unchanged = and_(is_as_met(), *_living(dialect))
    return select(_r.state, _r.token, _r.in_quota, unchanged.label("unchanged")).where(is_mine())


def walk_processing(dialect: Dialect) -> Select[Any]:
    """Those in flight, by their keys."""
    return _walk(dialect, columns(), _r.state == word(PROCESSING))


def walk_quarantined(dialect: Dialect) -> Select[Any]:
    """Those whose outcome nobody knows, by their keys, with the answers that could not be opened."""
    return _walk(dialect, columns(), _r.state == word(QUARANTINED))


def walk_completed(dialect: Dialect) -> Select[Any]:
    """Those up to `my_until` that are done and whose life has not ended, without their answers: those may be large."""
    empty = literal_column("''::bytea" if dialect.name == POSTGRESQL else "x''", LargeBinary)
    shown = [empty.label("response") if column is _r.response else column for column in columns()]
    return _walk(dialect, shown, is_answer(dialect), _r.record_id <= _bytes("my_until"), few=False)


def standing(dialect: Dialect) -> Select[Any]:
    """How many are not completed, and when the first lease of each kind ended. Reads indexes that hold nothing else."""
    moment = select(dialect.now.label("now")).cte("moment")
    now = select(moment.c.now).scalar_subquery()
    is_over = _r.lease_expires_at <= now
    in_flight = select(
        func.coalesce(func.sum(case((is_over, ZERO), else_=ONE)), ZERO).label("in_flight"),
        func.coalesce(func.sum(case((is_over, ONE), else_=ZERO)), ZERO).label("lapsed"),
        func.min(case((is_over, _lease_expires_at(dialect)))).label("first_lapsed"),
    )
    processing = in_flight.where(_r.state == word(PROCESSING)).subquery("processing")
    unknown = select(func.count().label("quarantined"), func.min(_lease_expires_at(dialect)).label("first_quarantined"))
    quarantined = unknown.where(_r.state == word(QUARANTINED)).subquery("quarantined")
    p, q = processing.c, quarantined.c
    told = (p.in_flight, p.lapsed, now - p.first_lapsed, q.quarantined, now - q.first_quarantined)
    names = ("in_flight", "lapsed", "lapsed_for", "quarantined", "quarantined_for")
    counts = (column.label(name) for column, name in zip(told, names, strict=True))
    return select(*counts).select_from(processing.join(quarantined, ONE == ONE))


def _walk(
    dialect: Dialect, shown: list[ColumnElement[Any]], *conditions: ColumnElement[bool], few: bool = True
) -> Select[Any]:
    tid = _bytes("my_tenant_id")
    # SQLite takes the keys' index for what is to be in their order, and would go through all that is completed: a sign
    # in front of a column keeps it from using an index of it.
    rid = (
        literal_column("+idempotency_records.record_id", LargeBinary)
        if few and dialect.name == SQLITE
        else _r.record_id
    )
    found = select(_r.record_id, _r.tenant_id, *shown, dialect.now.label("now"))
    of_tenant = found.where(rid > _bytes("my_after"), *conditions, _r.tenant_id == func.coalesce(tid, _r.tenant_id))
    return of_tenant.order_by(rid).limit(_limit())


def _living(dialect: Dialect) -> tuple[ColumnElement[bool], ...]:
    """It is there: neither released nor an answer whose life is over."""
    return _r.state != word(RELEASED), or_(_r.expires_at.is_(None), _r.expires_at > dialect.now)


def _over(dialect: Dialect, when: ColumnElement[Any]) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return when <= _number("my_horizon"), when <= dialect.now


def _lease_expires_at(dialect: Dialect) -> ColumnElement[int]:
    # One flipped bit makes a time that cannot be taken away from now. It is not to keep all others waiting.
    return _the(dialect.greatest, _r.lease_expires_at, ZERO)


def _unless_locked(dialect: Dialect, wanted: ColumnElement[bool]) -> Update:
    if dialect.name != POSTGRESQL:
        return update(records).where(wanted)
    free = select(_r.record_id).where(wanted).correlate(None).with_for_update(skip_locked=True).scalar_subquery()
    return update(records).where(_r.record_id == free)


def _the(function: str, one: ColumnElement[int], other: ColumnElement[int]) -> ColumnElement[int]:
    chosen: ColumnElement[int] = getattr(func, function)(one, other)
    return chosen


def _number(name: str) -> ColumnElement[int]:
    return bindparam(name, type_=BigInteger)


def _bytes(name: str) -> ColumnElement[bytes]:
    return bindparam(name, type_=LargeBinary)


def _limit() -> ColumnElement[int]:
    return bindparam("my_limit", type_=Integer)


_LAST: Final = b"\xff" * 33
"""Behind every key there is: those have 32 bytes."""

_TIME_BYTES: Final = 8

_STATES: Final = {
    State.PROCESSING: (PROCESSING, PROCESSING),
    State.QUARANTINED: (QUARANTINED, QUARANTINED),
    State.COMPLETED: (COMPLETED, FAILED),
}


class SqlRecovery:
    """Implements `capabilities.Recovery`. `now` as for `SqlDataKeys`."""

    def __init__(
        self, database: Database, completing: Callable[[], CompletionWriter], *, now: Callable[[], int | None]
    ) -> None:
        self._database = database
        self._completing = completing
        self._now = now

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        dialect = self._database.dialect
        first, behind = int.from_bytes(after[:_TIME_BYTES], "big"), after[_TIME_BYTES:]
        asked = {"my_horizon": in_microseconds(horizon), "my_first": first, "my_after": behind, "my_limit": limit}
        found = self._all(stale(dialect), asked)
        last = found[-1] if len(found) == limit else None
        return RecordPage(
            _readable(found),
            None if last is None else last.lease_expires_at.to_bytes(_TIME_BYTES, "big") + last.record_id,
        )

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        dialect = self._database.dialect
        asked = {**self._seen(seen), "my_horizon": in_microseconds(horizon)}
        return (
            self._database.run(lambda connection: connection.execute(lapse(dialect), asked).one_or_none()) is not None
        )

    def next_for_resolver(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[SeenRecord]:
        dialect = self._database.dialect
        pauses = {"least": microseconds(least), "most": microseconds(most)}
        asked = {"my_horizon": in_microseconds(horizon), "my_limit": limit, "my_owner": owner, **pauses}
        statement = due(dialect) if owner is None else due_of_one(dialect)
        while True:
            taken = self._all(statement, asked)
            found = _readable(taken)
            # Those that cannot be read have had their turn, too: they keep nobody else from theirs.
            if found or len(taken) < limit:
                return sorted(found, key=lambda each: each.record.deadline)

    def resolve(self, seen: SeenRecord, *, token: bytes, payload: StoredPayload, keep: float) -> bool:
        dialect = self._database.dialect
        brought = {"my_tenant_id": seen.key.tid, "my_token": token, **answer_of(seen.key, payload, keep)}
        parameters = {**self._seen(seen), **brought}
        completing = self._completing()

        def settle(connection: Connection) -> bool:
            for _ in range(TRIES):
                if completing.write(connection, parameters, resolving=True) is not None:
                    return True
                found = connection.execute(glance(dialect), parameters).one_or_none()
                if found is not None and found.token == token:
                    return found.state in (COMPLETED, FAILED)
                if found is None or found.state != QUARANTINED or not found.unchanged:
                    return False
                completing.look_again(connection, parameters, found)
            raise StoreUnavailable(f"the row changed between read and write {TRIES} times")

        return self._database.run(settle)

    def force_release(self, seen: SeenRecord) -> bool:
        dialect = self._database.dialect
        # A token of its own, so that a reply that was lost is not taken for somebody else's work.
        parameters = {**self._seen(seen), "my_tenant_id": seen.key.tid, "my_token": new_token()}

        def freed_by(connection: Connection) -> bool:
            with transaction(connection) if seen.record.state is State.COMPLETED else nullcontext():
                freed = connection.execute(free(dialect), parameters).one_or_none()
                if freed is not None and freed.in_quota and seen.record.state is State.COMPLETED:
                    taken = entry(
                        kind=RESPONSES,
                        bucket_end=parameters["seen_deadline"],
                        window_length=0,
                        records=-1,
                        stored=-freed.response_size,
                    )
                    connection.execute(
                        completion.book(dialect), {**parameters, "my_shard": shard_of(seen.key), **taken}
                    )
            if freed is not None:
                return True
            found = connection.execute(glance(dialect), parameters).one_or_none()
            return found is not None and (found.state, found.token) == (RELEASED, parameters["my_token"])

        return self._database.run(freed_by)

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        dialect = self._database.dialect
        asked = {"my_after": after, "my_limit": limit, "my_tenant_id": tid}
        if state is State.COMPLETED:
            # Page by page of all rows: most records are completed.
            found, last = self._database.run(self._page, asked)
            return RecordPage(_readable(found), after=last)
        statement = walk_processing(dialect) if state is State.PROCESSING else walk_quarantined(dialect)
        found = self._all(statement, asked)
        return RecordPage(_readable(found), found[-1].record_id if len(found) == limit else None)

    def counts(self) -> UnfinishedCounts:
        dialect = self._database.dialect
        (found,) = self._all(standing(dialect), {})
        return UnfinishedCounts(
            in_flight=int(found.in_flight),
            lapsed=int(found.lapsed),
            quarantined=found.quarantined,
            lapsed_for=_seconds(found.lapsed_for),
            quarantined_for=_seconds(found.quarantined_for),
        )

    def _page(self, connection: Connection, asked: dict[str, Any]) -> tuple[Sequence[Any], bytes | None]:
        dialect = self._database.dialect
        ends = connection.execute(completion.page_end(dialect), asked).scalars().all()
        last = ends[0] if len(ends) > 1 else None
        bounded = {**asked, "my_until": last or _LAST, "now": self._now()}
        return connection.execute(walk_completed(dialect), bounded).all(), last

    def _all(self, statement: Any, asked: dict[str, Any]) -> Sequence[Any]:
        parameters = {**asked, "now": self._now()}
        return self._database.run(lambda connection: connection.execute(statement, parameters).all())

    def _seen(self, seen: SeenRecord) -> dict[str, Any]:
        state, other = _STATES[seen.record.state]
        return {
            "my_record_id": seen.key.rid,
            "seen_state": state,
            "seen_other": other,
            "seen_token": seen.record.token,
            "seen_deadline": in_microseconds(seen.record.deadline),
            "now": self._now(),
        }


def _readable(found: Sequence[Any]) -> tuple[SeenRecord, ...]:
    """Without those that are none of ours: a claim that meets one says so."""
    return tuple(each for row in found if (each := _found(row)) is not None)


def _found(row: Any) -> SeenRecord | None:
    rid, tid, *columns = row
    # Of those that are given a turn.
    asked = bool(columns.pop()) if "asked" in row._fields else False
    try:
        return SeenRecord(StorageKey(rid, tid), row_of(columns).record(), asked)
    except CorruptRecord:
        return None


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else max(microseconds, 0) / 1_000_000
