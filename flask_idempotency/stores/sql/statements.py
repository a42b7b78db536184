"""Every statement, each a function that returns it. `tests/sql/snapshots/` holds the text of each for each database.

Parameters: `my_…` is what the asker brings, `seen_…` what it has read and now compares, `now` the time when a test says
it, and durations in microseconds. A statement is built once for a store, so that SQLAlchemy compiles it once.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    LargeBinary,
    Select,
    String,
    Text,
    Update,
    and_,
    bindparam,
    exists,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from flask_idempotency.stores.sql.dialects import POSTGRESQL, Dialect
from flask_idempotency.stores.sql.rows import Row
from flask_idempotency.stores.sql.schema import (
    COMPLETED,
    FAILED,
    PROCESSING,
    QUARANTINE,
    QUARANTINED,
    RELEASED,
    TAKEOVER,
    facts,
    fences,
    records,
)

LAST_FENCE: Final = "fence"
"""The row of the facts that stands for a sequence where there are none."""

RELEASED_KEEP: Final = 86_400_000_000
"""A released row answers nobody's request; a day is for whoever asks what became of the key."""

LEASE_EXPIRED: Final = "lease-expired"
COMMITTED_EARLY: Final = "committed-early"

_ROW = Row._fields[:-1]
_r = records.c


def read(dialect: Dialect) -> Select[Any]:
    """The row of a key, and the time it was read at. Takes no lock and waits for none."""
    return select(*(_r[name] for name in _ROW), dialect.now.label("now")).where(_is_mine())


def standing(dialect: Dialect) -> Select[Any]:
    """As much of the row as tells an owner why its write found nothing to change."""
    return select(_r.state, _r.token, _r.expires_at, dialect.now.label("now")).where(_is_mine())


def renew(dialect: Dialect) -> ReturningUpdate[Any]:
    """The lease ends no sooner than this long from now; never sooner than it did."""
    statement, now = _owners(dialect, PROCESSING)
    longer: ColumnElement[int] = getattr(func, dialect.greatest)(_r.lease_until, now + _duration("lease"))
    return statement.values(lease_until=longer).returning(_r.fence)


def mark(dialect: Dialect) -> ReturningUpdate[Any]:
    """From now on a lapse quarantines this row."""
    statement, _ = _owners(dialect, PROCESSING)
    return statement.values(on_lapse=_word(QUARANTINE)).returning(_r.fence)


def mark_early(dialect: Dialect) -> ReturningUpdate[Any]:
    """The same, in a transaction that its owner's work commits by itself: whether it has is then told by the reason."""
    statement, _ = _owners(dialect, PROCESSING)
    return statement.values(on_lapse=_word(QUARANTINE), reason=_word(COMMITTED_EARLY)).returning(_r.fence)


def complete(dialect: Dialect) -> ReturningUpdate[Any]:
    """The answer is there and will be kept this long. For the store's own connection."""
    return _complete(dialect)[0].returning(_r.fence)


def complete_and_tell(dialect: Dialect) -> ReturningUpdate[Any]:
    """The same for the application's transaction: the patience that it sets on PostgreSQL lasts until that ends.

    Returns the row as it is now, but for the answer, which whoever brings it has.
    """
    statement, now = _complete(dialect)
    return statement.returning(*(_r[name] for name in _ROW if name != "answer"), now.label("now"))


def release(dialect: Dialect) -> ReturningUpdate[Any]:
    """The key is free again. The row stays for a day: it is absent to everybody but an auditor."""
    statement, now = _owners(dialect, PROCESSING, QUARANTINED)
    return statement.values(
        state=_word(RELEASED),
        lease_until=null(),
        expires_at=now + literal_column(str(RELEASED_KEEP), BigInteger),
        reason=null(),
    ).returning(_r.fence)


def hold(dialect: Dialect) -> ReturningUpdate[Any]:
    """Nobody knows what happened, its owner included."""
    statement, _ = _owners(dialect, PROCESSING)
    return statement.values(state=_word(QUARANTINED), reason=bindparam("my_reason", type_=Text)).returning(_r.fence)


def claim_or_read(dialect: Dialect) -> Select[Any]:
    """PostgreSQL, always one row: the new row's fence in `granted`, or the row that is there; and `now`.

    Neither is normal as well. Then somebody else's row was committed after this statement's snapshot was taken: ask
    again. A key that is there costs neither a fence nor an attempt to insert.
    """
    granted = _insert(dialect).returning(_r.fence).cte("granted")
    moment = select(dialect.now.label("now")).subquery("moment")
    both = moment.outerjoin(granted, true()).outerjoin(records, _is_mine())
    return select(granted.c.fence.label("granted"), *(_r[name] for name in _ROW), moment.c.now).select_from(both)


def insert(dialect: Dialect) -> ReturningInsert[Any]:
    """The row of a key that had none. Returns nothing when somebody else was faster."""
    return _insert(dialect).returning(_r.fence)


def take_over(dialect: Dialect) -> ReturningUpdate[Any]:
    """The next attempt of a claim that has lapsed. When the key was first used stays."""
    over = and_(_has_lapsed(dialect, TAKEOVER), _r.fingerprint == bindparam("my_fingerprint", type_=LargeBinary))
    return _regrant(
        dialect, _if_as_seen(dialect, over), attempt=_r.attempt + literal_column("1"), requested_at=_r.requested_at
    )


def reclaim(dialect: Dialect) -> ReturningUpdate[Any]:
    """A first attempt, in the row of a claim that was released or of an answer that has expired."""
    expired = and_(_r.state.in_((_word(COMPLETED), _word(FAILED))), _r.expires_at <= dialect.now)
    absent = or_(_r.state == _word(RELEASED), expired)
    return _regrant(dialect, _if_as_seen(dialect, absent), attempt=literal_column("1"), requested_at=dialect.now)


def quarantine(dialect: Dialect) -> ReturningUpdate[Any]:
    """A claim that has lapsed, and must not run again by itself. Its token stays good for `complete`."""
    statement = _if_as_seen(dialect, _has_lapsed(dialect, QUARANTINE))
    return statement.values(state=_word(QUARANTINED), reason=_word(LEASE_EXPIRED)).returning(_r.fence, _r.attempt)


def read_locked(dialect: Dialect) -> Select[Any]:
    """PostgreSQL: the row, ours until the transaction ends. Absent and locked by somebody else both give no row."""
    return read(dialect).with_for_update(skip_locked=True)


def advisory_lock(dialect: Dialect) -> Select[Any]:
    """PostgreSQL: one asker at a time for keys of this number, until the transaction ends. Read in the NEXT statement.

    This one's snapshot is older than the lock. Never the session's lock: behind a pooler it belongs to strangers.
    """
    moment = dialect.moment(patient=True).subquery("moment")
    lock = func.pg_advisory_xact_lock(bindparam("my_number", type_=BigInteger))
    return select(lock.label("locked")).select_from(moment)


def has_written(dialect: Dialect) -> Select[Any]:
    """PostgreSQL: whether this transaction has been given a number, as each is that writes."""
    return select(func.txid_current_if_assigned().is_not(None))


def next_fence(dialect: Dialect) -> ReturningUpdate[Any]:
    """SQLite: the next number, inside the transaction that grants it. From the clock if that is ahead."""
    risen = getattr(func, dialect.greatest)(facts.c.value + literal_column("1"), dialect.now)
    fence = update(facts).where(facts.c.name == literal_column(f"'{LAST_FENCE}'")).values(value=risen)
    return fence.returning(facts.c.value)


def _is_mine() -> ColumnElement[bool]:
    return _r.rid == bindparam("my_rid", type_=LargeBinary)


def _duration(name: str) -> ColumnElement[int]:
    return bindparam(name, type_=BigInteger)


def _word(word: str) -> ColumnElement[str]:
    """One of ours, spelt out: a parameter would tell whoever reads the text nothing."""
    return literal_column(f"'{word}'", String)


def _owners(dialect: Dialect, *states: str) -> tuple[Update, ColumnElement[int]]:
    """An update of the token's own row, if it is in one of these states; and what the time is there."""
    owned = and_(_r.token == bindparam("my_token", type_=LargeBinary), _r.state.in_([_word(state) for state in states]))
    if dialect.name != POSTGRESQL:
        return update(records).where(_is_mine(), owned), dialect.now
    rid = bindparam("my_rid", type_=LargeBinary)
    moment = dialect.moment(patient=True).add_columns(rid.label("rid")).subquery("moment")
    return update(records).where(_r.rid == moment.c.rid, owned), moment.c.now


def _complete(dialect: Dialect) -> tuple[Update, ColumnElement[int]]:
    statement, now = _owners(dialect, PROCESSING, QUARANTINED)
    completed = statement.values(
        state=bindparam("my_state", type_=String),
        lease_until=null(),
        completed_at=now,
        expires_at=now + _duration("keep"),
        status=bindparam("my_status", type_=_r.status.type),
        byte_size=bindparam("my_byte_size", type_=BigInteger),
        answer=bindparam("my_answer", type_=LargeBinary),
        reason=null(),
    )
    return completed, now


def _if_as_seen(dialect: Dialect, condition: ColumnElement[bool]) -> Update:
    """An update of the row if it still is what was read, and this holds by the server's clock.

    On PostgreSQL the row is found by a select that skips what somebody has locked: an update would wait for them.
    """
    seen = and_(
        _is_mine(),
        _r.state == bindparam("seen_state", type_=String),
        _r.token == bindparam("seen_token", type_=LargeBinary),
        _r.fence == bindparam("seen_fence", type_=BigInteger),
    )
    if dialect.name != POSTGRESQL:
        return update(records).where(seen, condition)
    free = select(_r.rid).where(seen, condition).correlate(None).with_for_update(skip_locked=True).scalar_subquery()
    return update(records).where(_r.rid == free)


def _has_lapsed(dialect: Dialect, rule: str) -> ColumnElement[bool]:
    return and_(_r.state == _word(PROCESSING), _r.on_lapse == _word(rule), _r.lease_until <= dialect.now)


def _fence(dialect: Dialect) -> ColumnElement[int]:
    """Taken when the row is written and not before: who waits for a lock must not come out with a smaller number."""
    if dialect.name == POSTGRESQL:
        return fences.next_value()
    return bindparam("my_fence", type_=BigInteger)


def _new(dialect: Dialect) -> dict[str, ColumnElement[Any]]:
    """What every grant writes, whether or not there was a row."""
    brought = ("token", "fingerprint", "on_lapse", "tenant", "principal", "method", "operation")
    values: dict[str, ColumnElement[Any]] = {name: bindparam(f"my_{name}", type_=_r[name].type) for name in brought}
    return {"state": _word(PROCESSING), "fence": _fence(dialect), **values}


def _regrant(
    dialect: Dialect,
    statement: Update,
    *,
    attempt: ColumnElement[int],
    requested_at: ColumnElement[int],
) -> ReturningUpdate[Any]:
    cleared = ("completed_at", "expires_at", "status", "byte_size", "answer", "reason")
    return statement.values(
        **_new(dialect),
        attempt=attempt,
        requested_at=requested_at,
        lease_until=dialect.now + _duration("lease"),
        **{name: null() for name in cleared},
    ).returning(_r.fence, _r.attempt)


def _insert(dialect: Dialect) -> Insert:
    # The patience is inside, where a replay does not come by: to set it takes a third as long as a replay.
    moment = dialect.moment(patient=True).subquery("moment")
    values: dict[str, ColumnElement[Any]] = {
        "rid": bindparam("my_rid", type_=LargeBinary),
        "tid": bindparam("my_tid", type_=LargeBinary),
        **_new(dialect),
        "attempt": literal_column("1"),
        "requested_at": moment.c.now,
        "lease_until": moment.c.now + _duration("lease"),
    }
    # Without this a key that is there would take a number from the sequence at every replay; SQLite's parser, too,
    # needs some WHERE before ON CONFLICT.
    unless_there = ~exists(select(literal_column("1")).select_from(records).where(_is_mine()))
    source = select(*values.values()).select_from(moment).where(unless_there)
    # As a suffix, because SQLAlchemy 2.0 compiles a statement with its own ON CONFLICT anew each time it is executed.
    return sqlalchemy.insert(records).from_select(list(values), source.suffix_with("ON CONFLICT (rid) DO NOTHING"))


class Statements:
    """What the store itself sends, built once."""

    def __init__(self, dialect: Dialect) -> None:
        self.read = read(dialect)
        self.standing = standing(dialect)
        self.renew = renew(dialect)
        self.mark = mark(dialect)
        self.mark_early = mark_early(dialect)
        self.complete = complete(dialect)
        self.complete_and_tell = complete_and_tell(dialect)
        self.has_written = has_written(dialect)
        self.release = release(dialect)
        self.hold = hold(dialect)
