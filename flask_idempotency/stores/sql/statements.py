"""Every statement about one record, each a function that returns it. `tests/sql/snapshots/` holds the text of each for
each database.

A statement is built once for a store, so that SQLAlchemy compiles it once. Those that complete a record are in
`completions.py`, those about quotas in `ledger_statements.py`, those about keys and answers in `key_statements.py`.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    LargeBinary,
    Select,
    Text,
    and_,
    bindparam,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
)
from sqlalchemy import insert as insert_into
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from flask_idempotency.engine.model import CORRUPT
from flask_idempotency.stores.sql.clauses import (
    ONE,
    ZERO,
    columns,
    duration,
    given_up,
    has_answer,
    has_lapsed,
    if_as_seen,
    inserted,
    is_absent,
    is_mine,
    owners,
    regranted,
    word,
)
from flask_idempotency.stores.sql.dialects import BRIEFLY_MS, Dialect
from flask_idempotency.stores.sql.schema import (
    PROCESSING,
    QUARANTINE,
    QUARANTINED,
    RELEASED,
    TAKEOVER,
    meta,
    records,
)

LAST_FENCE: Final = "fence"
"""The row of `idempotency_meta` that stands for a sequence where there are none."""

RELEASED_KEEP: Final = 86_400_000_000
"""A released row answers nobody's request; a day is for whoever asks what became of the key."""

LEASE_EXPIRED: Final = "lease-expired"
COMMITTED_EARLY: Final = "committed-early"

_r = records.c


def read(dialect: Dialect) -> Select[Any]:
    """The row of a key, and the time it was read at. Takes no lock and waits for none."""
    return select(*columns(), dialect.now.label("now")).where(is_mine())


def standing(dialect: Dialect) -> Select[Any]:
    """As much of the row as tells an owner why its write found nothing to change."""
    facts: list[ColumnElement[Any]] = [_r.state, _r.token, _r.expires_at, _r.completed_at, _r.in_quota]
    return select(*facts, _r.reason, has_answer().label("answered"), dialect.now.label("now")).where(is_mine())


def renew(dialect: Dialect) -> ReturningUpdate[Any]:
    """The lease ends no sooner than this long from now; never sooner than it did. Also of a row that was quarantined when
    it ended: that stays so, but its owner lives."""
    statement, now = owners(dialect, PROCESSING, QUARANTINED)
    lapsing = or_(_r.state == word(PROCESSING), _r.reason == word(LEASE_EXPIRED))
    longer: ColumnElement[int] = getattr(func, dialect.greatest)(_r.lease_expires_at, now + duration("lease"))
    return statement.where(lapsing).values(lease_expires_at=longer).returning(_r.fence)


def mark(dialect: Dialect) -> ReturningUpdate[Any]:
    """From now on a lapse quarantines this row."""
    statement, _ = owners(dialect, PROCESSING)
    return statement.values(on_expiry=word(QUARANTINE)).returning(_r.fence)


def mark_early(dialect: Dialect) -> ReturningUpdate[Any]:
    """The same, in a transaction that its owner's work commits by itself: whether it has is then told by the reason."""
    statement, _ = owners(dialect, PROCESSING)
    return statement.values(on_expiry=word(QUARANTINE), reason=word(COMMITTED_EARLY)).returning(_r.fence)


def release(dialect: Dialect) -> ReturningUpdate[Any]:
    """The key is free again. The row stays for a day: it is absent to everybody but an auditor.

    Not so a condemned one: whether its answer can be read or not, the work was done.
    """
    statement, now = owners(dialect, PROCESSING, QUARANTINED)
    uncondemned = statement.where(~has_answer(), _r.reason.is_distinct_from(word(CORRUPT)))
    return uncondemned.values(
        state=word(RELEASED),
        lease_expires_at=null(),
        expires_at=now + literal_column(str(RELEASED_KEEP), BigInteger),
        reason=null(),
        resolver_due_at=ZERO,
    ).returning(_r.fence)


def give_up(dialect: Dialect) -> ReturningInsert[Any]:
    """The row of a key that has none, released before it was claimed: what was asked with this token may still arrive."""
    return given_up(dialect, literal_column(str(RELEASED_KEEP), BigInteger)).returning(_r.fence)


def hold(dialect: Dialect) -> ReturningUpdate[Any]:
    """Nobody knows what happened, its owner included."""
    statement, _ = owners(dialect, PROCESSING)
    return statement.values(state=word(QUARANTINED), reason=bindparam("my_reason", type_=Text)).returning(_r.fence)


def claim_or_read(dialect: Dialect) -> Select[Any]:
    """PostgreSQL, always one row: the new row's fence in `granted`, or the row that is there; and `now`.

    Neither is normal as well. Then somebody else's row was committed after this statement's snapshot was taken: ask
    again. A key that is there costs neither a fence nor an attempt to insert.
    """
    granted = inserted(dialect).returning(_r.fence).cte("granted")
    moment = select(dialect.now.label("now")).subquery("moment")
    both = moment.outerjoin(granted, true()).outerjoin(records, is_mine())
    return select(granted.c.fence.label("granted"), *columns(), moment.c.now).select_from(both)


def insert(dialect: Dialect) -> ReturningInsert[Any]:
    """The row of a key that had none. Returns nothing when somebody else was faster."""
    return inserted(dialect).returning(_r.fence)


def take_over(dialect: Dialect) -> ReturningUpdate[Any]:
    """The next attempt of a claim that has lapsed. When the key was first used stays, and whether it is counted."""
    over = and_(has_lapsed(dialect, TAKEOVER), _r.fingerprint == bindparam("my_fingerprint", type_=LargeBinary))
    update = if_as_seen(dialect, over)
    again = regranted(dialect, update, attempt=_r.attempt + literal_column("1"), requested_at=_r.requested_at)
    return again.values(in_quota=_r.in_quota).returning(_r.fence, _r.attempt)


def reclaim(dialect: Dialect) -> ReturningUpdate[Any]:
    """A first attempt, in the row of a claim that was released or of an answer that has expired."""
    update = if_as_seen(dialect, is_absent(dialect))
    first = regranted(dialect, update, attempt=literal_column("1"), requested_at=dialect.now)
    return first.returning(_r.fence, _r.attempt)


def quarantine(dialect: Dialect) -> ReturningUpdate[Any]:
    """A claim that has lapsed, and must not run again by itself. Its token stays good for `complete`."""
    statement = if_as_seen(dialect, has_lapsed(dialect, QUARANTINE))
    return statement.values(state=word(QUARANTINED), reason=word(LEASE_EXPIRED)).returning(_r.fence, _r.attempt)


def read_locked(dialect: Dialect) -> Select[Any]:
    """PostgreSQL: the row, ours until the transaction ends. Absent and locked by somebody else both give no row."""
    return read(dialect).with_for_update(skip_locked=True)


def wait_to_reclaim(dialect: Dialect) -> Select[Any]:
    """PostgreSQL: when this is over, nobody has the row locked that is nobody's any more; or raises after a moment.

    Whoever has locked such a row removes it, or takes it. Of any other row nothing is found, and nothing is waited for.
    """
    moment = dialect.moment(patient=True, patience_ms=BRIEFLY_MS).subquery("moment")
    absent = select(_r.record_id, moment.c.patience).select_from(moment.join(records, is_mine()))
    return absent.where(is_absent(dialect)).with_for_update(of=records)


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


def next_fence(dialect: Dialect) -> ReturningInsert[Any]:
    """SQLite: the next number, inside the transaction that grants it. From the clock if that is ahead.

    Where the last one is not written down, it is above every fence of a record: what Alembic made has no rows, and
    somebody may have deleted this one.
    """
    written = select(meta.c.value).where(meta.c.name == literal_column(f"'{LAST_FENCE}'")).scalar_subquery()
    # `coalesce` does not look at the records where one is written.
    last = func.coalesce(written, select(func.max(_r.fence)).scalar_subquery(), ZERO)
    risen = getattr(func, dialect.greatest)(last + literal_column("1"), dialect.now)
    first: Any = select(literal_column(f"'{LAST_FENCE}'"), risen).where(ONE == ONE)
    source = first.suffix_with("ON CONFLICT (name) DO UPDATE SET value = excluded.value")
    return insert_into(meta).from_select(["name", "value"], source).returning(meta.c.value)
