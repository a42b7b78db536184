"""The statements about journals: rows of `idempotency_steps`, and the columns of the record that say what a journal holds.

Each write updates the record first, which locks its row and compares token, fence and the number of the write. The rows of
steps follow in the same statement on PostgreSQL, and in the same transaction on SQLite. A row belongs to the life of its
record: it has the same `requested_at`. Rows of another life are never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from flask_idempotency.engine.journal import NEVER_RESUMED
from flask_idempotency.engine.model import CORRUPT, IN_DOUBT
from flask_idempotency.stores.sql.completion import may_be_sealed
from flask_idempotency.stores.sql.dialects import Dialect, bigint, binary, integer, string
from flask_idempotency.stores.sql.schema import (
    BEGUN,
    FINISHED,
    PROCESSING,
    QUARANTINE,
    QUARANTINED,
    RELEASED,
    TAKEOVER,
    data_keys,
    records,
    steps,
    tenants,
)
from flask_idempotency.stores.sql.statements import (
    LEASE_EXPIRED,
    ONE,
    RELEASED_KEEP,
    ZERO,
    ended_wait,
    has_answer,
    is_as_met,
    is_mine,
    others_update,
    owners,
    unlocked,
    word,
)
from flask_idempotency.stores.sql.writes import proven, returned, upserted

MOST_AT_ONCE: Final = 3
"""Entries that one statement writes on PostgreSQL. More are rare, and take a transaction."""

_r, _s, _t, _k = records.c, steps.c, tenants.c, data_keys.c

ENTERED: Final = (
    "position",
    "name",
    "effects",
    "state",
    "in_line",
    "kept",
    "digest",
    "took",
    "payload_size",
    "payload",
    "wrapping_key_id",
    "data_key_number",
)
"""The columns of a step that a caller passes. The others come from the record and from the clock."""

_WRITTEN: Final = ("record_id", "step_id", "tenant_id", "requested_at", "fence", "began_at", "finished_at", *ENTERED)


class Form(NamedTuple):
    """What is the same for many steps, so that the text of a statement holds it and the database plans less."""

    finished: bool
    has_payload: bool

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a caller passes for such a step."""
        return tuple(name for name in ENTERED if name != "state" and (self.has_payload or name not in _OF_PAYLOAD))


_OF_PAYLOAD: Final = ("payload", "wrapping_key_id", "data_key_number")


def _replacing(*, settling: bool, finishes: bool) -> dict[str, str]:
    """Return how to replace a begun step, and a row of another life."""
    # A step that finishes keeps its place. One that begins again in a later attempt gets another.
    kept = {*(("position", "began_at") if finishes else ()), *(("fence",) if settling else ())}
    stays = "idempotency_steps.requested_at = excluded.requested_at"
    return {
        name: f"CASE WHEN {stays} THEN idempotency_steps.{name} ELSE excluded.{name} END"
        if name in kept
        else f"excluded.{name}"
        for name in _WRITTEN
        if name not in ("record_id", "step_id")
    }


_KEYS: Final = ("record_id", "step_id")
_BEGINS: Final = _replacing(settling=False, finishes=False)
_FINISHES: Final = _replacing(settling=False, finishes=True)
_SETTLES: Final = _replacing(settling=True, finishes=True)
_REPLACED: Final = f"idempotency_steps.state = '{BEGUN}' OR idempotency_steps.requested_at <> excluded.requested_at"
"""A finished step is never replaced."""
_A_RESULT: Final = Form(finished=True, has_payload=True)


def hold(dialect: Dialect, *, opens: bool = True) -> Any:
    """Change the record for a write to its journal. Return what the rows of its steps need; no row if it was refused.

    `opens`: no plain step is in doubt after the write, so another attempt may go on.
    """
    return _held(dialect, opens=opens, sealed=False)


def write(
    dialect: Dialect, forms: Sequence[Form] = (_A_RESULT,), *, opens: bool = True, sealed: bool = False
) -> sa.Select[Any]:
    """PostgreSQL: change the record as `hold` does, and enter steps of these forms. Return no row if it was refused.

    `sealed`: refuse if the data key that seals all of them is missing, or the tenant was erased since the first request.
    """
    held = _held(dialect, opens=opens, sealed=sealed).cte("held")
    entered = [
        _entered(dialect, held, form, f"_{number}").cte(f"entered_{number}") for number, form in enumerate(forms)
    ]
    return sa.select(held.c.fence).add_cte(*entered)


def enter(dialect: Dialect, form: Form = _A_RESULT) -> Any:
    """Enter one step of this form, in the transaction that `hold` began."""
    return _enter(dialect, form, _FINISHES if form.finished else _BEGINS)


def settle(dialect: Dialect, form: Form = _A_RESULT) -> Any:
    """Enter one step in its worker's place. It keeps the fence of the claim that entered it."""
    return _enter(dialect, form, _SETTLES)


def withdraw(dialect: Dialect) -> sa.Delete:
    """Remove a step of this fence that began and did nothing."""
    return _withdrawn(_s.fence == bigint("my_fence"))


def withdraw_any(dialect: Dialect) -> sa.Delete:
    """Remove a step that began and did nothing, in its worker's place."""
    return _withdrawn()


def why_not_held(dialect: Dialect) -> sa.Select[Any]:
    """Read why a write to a journal changed no row."""
    facts: list[sa.ColumnElement[Any]] = [_r.state, _r.token, _r.fence, _r.step_write, _r.expires_at, _r.completed_at]
    return dialect.in_session(sa.select(*facts, _r.reason, dialect.now.label("now")).where(is_mine()))


def recall(dialect: Dialect) -> sa.Select[Any]:
    """Select the journal, one row for each step, for the claim that holds the record. Without steps, select one row."""
    return _journal().where(_r.token == binary("my_token"), _r.fence == bigint("my_fence"))


def read_journal(dialect: Dialect) -> sa.Select[Any]:
    """Select the journal as `recall` does, for anyone."""
    return _journal()


def resume(dialect: Dialect) -> Any:
    """Change a quarantined record in its worker's place, if record and journal are as seen. Pause it unless a step stays
    in doubt."""
    as_seen = (
        _r.state == word(QUARANTINED),
        _r.fence == bigint("my_fence"),
        _r.step_write == integer("seen_write"),
        ~has_answer(),
        _r.reason.is_distinct_from(word(CORRUPT)),
    )
    statement, now = others_update(dialect, *as_seen)
    pauses = _opens()
    resumed = statement.values(
        token=binary("my_token"),
        state=sa.case((pauses, word(PROCESSING)), else_=_r.state),
        on_expiry=sa.case((pauses, word(TAKEOVER)), else_=_r.on_expiry),
        reason=sa.case((pauses, sa.null()), else_=_r.reason),
        lease_expires_at=sa.case((pauses, now), else_=_r.lease_expires_at),
        resolver_due_at=sa.case((pauses, ZERO), else_=_r.resolver_due_at),
        steps=sa.bindparam("my_steps", type_=_r.steps.type),
        step_write=_r.step_write + sa.literal_column("1"),
    )
    return returned(dialect, resumed, is_mine(), *_facts(now))


def give_up(dialect: Dialect) -> Any:
    """Quarantine a paused or abandoned record with an effect, if it is as seen. Skip a locked row, but not on SQLite."""
    horizon = bigint("my_horizon")
    seen = sa.and_(
        is_mine(),
        _r.state == word(PROCESSING),
        is_as_met(),
        _r.on_expiry == word(TAKEOVER),
        _r.steps > ZERO,
        _r.lease_expires_at <= horizon,
        _r.lease_expires_at <= dialect.now,
    )
    values = {"state": word(QUARANTINED), "reason": word(NEVER_RESUMED), "succeeded": ended_wait(dialect)}
    return unlocked(dialect, seen, values)


def release(dialect: Dialect) -> Any:
    """Free the key, or keep the record for its journal: pause it, or quarantine it if a step is in doubt.

    A released row stays for a day, but only an operator sees it. Do not release a corrupt record: its view has run, even if
    its response is unreadable.
    """
    statement, now = owners(dialect, PROCESSING, QUARANTINED)
    uncondemned = statement.where(~has_answer(), _r.reason.is_distinct_from(word(CORRUPT)))
    is_free, resumes = _r.steps == ZERO, _r.on_expiry == word(TAKEOVER)
    ended = dialect.smaller(_r.lease_expires_at, now)
    released = uncondemned.values(
        state=sa.case((is_free, word(RELEASED)), (resumes, word(PROCESSING)), else_=word(QUARANTINED)),
        reason=sa.case((sa.or_(is_free, resumes), sa.null()), else_=sa.func.coalesce(_r.reason, word(IN_DOUBT))),
        token=sa.case((sa.and_(~is_free, resumes), binary("my_paused_token")), else_=_r.token),
        # In doubt, the lease stays: a call that timed out may still arrive, and a resolver waits for that.
        lease_expires_at=sa.case((is_free, sa.null()), (resumes, ended), else_=_r.lease_expires_at),
        expires_at=sa.case((is_free, now + sa.literal_column(str(RELEASED_KEEP), sa.BigInteger))),
        succeeded=ended_wait(dialect),
        resolver_due_at=sa.case((sa.or_(is_free, resumes), ZERO), else_=_r.resolver_due_at),
    )
    return returned(dialect, released, is_mine(), _r.state, _r.token, _r.step_write, _r.requested_at)


def drop(dialect: Dialect) -> sa.Delete:
    """Remove the journal of one life of a record."""
    return sa.delete(steps).where(_s.record_id == binary("my_record_id"), _s.requested_at == bigint("my_requested_at"))


def page_end(dialect: Dialect) -> sa.Select[Any]:
    """Select the last record of a page of journals, and the next one if there is one."""
    rest = sa.select(_s.record_id).where(_s.record_id > binary("my_after")).distinct().order_by(_s.record_id)
    return rest.offset(dialect.all_but_one("my_limit")).limit(sa.literal_column("2"))


def walk(dialect: Dialect) -> sa.Select[Any]:
    """Select the payloads of a page. Two parameters limit it: a tenant, and a wrapping key to leave out."""
    tenant_id, wrapping_key_id = binary("my_tenant_id"), string("my_wrapping_key_id")
    shown = sa.select(_s.record_id, _s.tenant_id, _r.token, _r.fingerprint, *_shown()).select_from(_current())
    return shown.where(
        _s.record_id > binary("my_after"),
        _s.record_id <= binary("my_until"),
        _s.payload.is_not(None),
        _s.tenant_id == sa.func.coalesce(tenant_id, _s.tenant_id),
        sa.or_(wrapping_key_id.is_(None), sa.func.coalesce(_s.wrapping_key_id, word("")) != wrapping_key_id),
    ).order_by(_s.record_id, _s.step_id)


def count_payloads(dialect: Dialect) -> sa.Select[Any]:
    """Count the payloads of steps under each wrapping key. Leave out wiped ones."""
    under = sa.func.coalesce(_s.wrapping_key_id, word("")).label("wrapping_key_id")
    is_wiped = sa.func.coalesce(_s.data_key_number, ONE) == ZERO
    counted: list[sa.ColumnElement[Any]] = [under, sa.func.count().label("payloads")]
    return sa.select(*counted).select_from(_current()).where(_s.payload.is_not(None), ~is_wiped).group_by(under)


def replace(dialect: Dialect, *, sealed: bool = False) -> Any:
    """Replace the payload of a step, if it still is the one that was seen.

    `sealed`: refuse if the new payload's data key is missing, or the tenant was erased since the first request.
    """
    statement = sa.update(steps).where(_holds_seen(), _lives())
    if sealed:
        statement = statement.where(_key_is_there(), ~_is_erased_since())
    new: dict[str, Any] = {
        "payload": binary("my_payload"),
        "payload_size": bigint("my_payload_size"),
        "wrapping_key_id": string("my_wrapping_key_id"),
        "data_key_number": integer("my_data_key_number"),
    }
    return proven(dialect, statement.values(new), _s.fence)


def why_not_replaced(dialect: Dialect) -> sa.Select[Any]:
    """Read if a step still holds the payload that was seen, if its tenant was erased since, and if its data key is enabled."""
    reasons: list[sa.ColumnElement[Any]] = [_is_erased_since().label("erased"), _key_is_there().label("kept")]
    return sa.select(*reasons).where(_holds_seen(), _lives())


def orphans(dialect: Dialect) -> sa.Select[Any]:
    """Select the steps of a page whose record is gone, is completed or free, or is in another life."""
    found = sa.select(_s.record_id, _s.step_id, _s.requested_at).where(
        _s.record_id > binary("my_after"), _s.record_id <= binary("my_until"), ~_lives()
    )
    return found.order_by(_s.record_id, _s.step_id)


def remove_orphan(dialect: Dialect) -> Any:
    """Remove one step of that life. A claim may have replaced it since: the row of a new life stays."""
    row = (_s.record_id == binary("my_record_id"), _s.step_id == binary("my_step_id"))
    removed = sa.delete(steps).where(*row, _s.requested_at == bigint("my_requested_at"), ~_lives())
    return proven(dialect, removed, _s.record_id)


def _held(dialect: Dialect, *, opens: bool, sealed: bool) -> Any:
    statement, now = owners(dialect, PROCESSING, QUARANTINED)
    number = integer("my_write")
    longer = dialect.larger(_r.lease_expires_at, now + bigint("lease"))
    held = statement.where(
        _r.fence == bigint("my_fence"),
        _r.step_write < number,
        sa.or_(_r.state == word(PROCESSING), _r.reason == word(LEASE_EXPIRED)),
    )
    if sealed:
        held = held.where(may_be_sealed())
    if opens:
        goes_on = {"state": word(PROCESSING), "reason": sa.null(), "resolver_due_at": ZERO}
        held = held.values(on_expiry=word(TAKEOVER), **goes_on)
    else:
        held = held.values(on_expiry=word(QUARANTINE))
    steps_now = sa.bindparam("my_steps", type_=_r.steps.type)
    written = held.values(lease_expires_at=longer, steps=steps_now, step_write=number)
    return returned(dialect, written, is_mine(), *_facts(now))


def _facts(now: sa.ColumnElement[int]) -> tuple[sa.ColumnElement[Any], ...]:
    """What the rows of steps take from their record."""
    return _r.record_id, _r.tenant_id, _r.requested_at, _r.fence, _r.attempt, now.label("now")


def _opens() -> sa.ColumnElement[bool]:
    """No plain step is in doubt after this write, so another attempt may go on."""
    return sa.bindparam("my_on_expiry", type_=sa.String) == word(TAKEOVER)


def _entered(dialect: Dialect, held: sa.FromClause, form: Form, suffix: str) -> Any:
    """Enter one step of the record that `held` has updated."""
    given = dict(_given(form, suffix))
    values: dict[str, sa.ColumnElement[Any]] = {
        "record_id": held.c.record_id,
        "step_id": binary(f"my_step_id{suffix}"),
        "tenant_id": held.c.tenant_id,
        "requested_at": held.c.requested_at,
        "fence": held.c.fence,
        "began_at": held.c.now - given["took"],
        **({"finished_at": held.c.now} if form.finished else {}),
        **given,
        "position": _position(held.c.attempt, given["position"]),
    }
    source = sa.select(*values.values()).select_from(held).where(sa.true())
    replacing = _FINISHES if form.finished else _BEGINS
    return upserted(dialect, steps, values, _KEYS, replacing, where=_REPLACED, source=source)


def _enter(dialect: Dialect, form: Form, replacing: Mapping[str, str]) -> Any:
    given = dict(_given(form, ""))
    moment = bigint("my_moment")
    values: dict[str, sa.ColumnElement[Any]] = {
        "record_id": binary("my_record_id"),
        "step_id": binary("my_step_id"),
        "tenant_id": binary("my_tenant_id"),
        "requested_at": bigint("my_requested_at"),
        "fence": bigint("my_fence"),
        "began_at": moment - given["took"],
        **({"finished_at": moment} if form.finished else {}),
        **given,
        "position": _position(integer("my_attempt"), given["position"]),
    }
    # On MySQL `requested_at` is read by the values before it.
    in_order = dict(sorted(replacing.items(), key=lambda item: item[0] == "requested_at"))
    return upserted(
        dialect,
        steps,
        values,
        _KEYS,
        replacing if dialect.returns else in_order,
        where=_REPLACED,
        inserts_first=True,
    )


def _position(attempt: sa.ColumnElement[int], number: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    """Numbers of writes begin at 1 in each attempt."""
    return sa.cast(attempt, sa.BigInteger) * sa.literal_column(str(2**32), sa.BigInteger) + number


def _given(form: Form, suffix: str) -> Iterable[tuple[str, sa.ColumnElement[Any]]]:
    yield "state", word(FINISHED if form.finished else BEGUN)
    for name in form.columns:
        yield name, sa.bindparam(f"my_{name}{suffix}", type_=_s[name].type)


def _withdrawn(*conditions: sa.ColumnElement[bool]) -> sa.Delete:
    return sa.delete(steps).where(
        _s.record_id == binary("my_record_id"),
        _s.step_id == binary("my_step_id"),
        _s.requested_at == bigint("my_requested_at"),
        _s.state == word(BEGUN),
        *conditions,
    )


def _journal() -> sa.Select[Any]:
    of_life = sa.and_(_s.record_id == _r.record_id, _s.requested_at == _r.requested_at)
    shown = sa.select(_r.fence.label("record_fence"), _r.step_write, *_shown()).select_from(
        records.outerjoin(steps, of_life)
    )
    return shown.where(is_mine(), _is_unfinished()).order_by(_s.began_at, _s.position, _s.step_id)


def _shown() -> tuple[sa.ColumnElement[Any], ...]:
    columns = ("step_id", "fence", "began_at", "finished_at", *(name for name in ENTERED if name != "position"))
    by_key = sa.case(
        (_s.data_key_number.is_(None), _s.requested_at <= _t.erased_at),
        else_=_s.data_key_number <= _t.shredded_key_number,
    )
    erased = sa.select(by_key).where(_t.tenant_id == _s.tenant_id, _t.erased_at.is_not(None)).correlate(steps)
    return (*(_s[name] for name in columns), erased.scalar_subquery().label("erased"))


def _is_unfinished() -> sa.ColumnElement[bool]:
    return sa.and_(_r.state.in_((word(PROCESSING), word(QUARANTINED))), ~has_answer())


def _current() -> Any:
    """The steps of records that are not completed, in their current life."""
    return steps.join(
        records, sa.and_(_r.record_id == _s.record_id, _r.requested_at == _s.requested_at, _is_unfinished())
    )


def _lives() -> sa.ColumnElement[bool]:
    """The record of this step exists, is not completed, and has the same life."""
    of_life = sa.select(ONE).where(_r.record_id == _s.record_id, _r.requested_at == _s.requested_at, _is_unfinished())
    return sa.exists(of_life.correlate(steps))


def _holds_seen() -> sa.ColumnElement[bool]:
    """Match a step that holds the payload that was seen. Compare the short columns first."""
    return sa.and_(
        _s.record_id == binary("my_record_id"),
        _s.step_id == binary("my_step_id"),
        _s.payload_size == bigint("seen_payload_size"),
        _s.wrapping_key_id.is_not_distinct_from(string("seen_wrapping_key_id")),
        _s.data_key_number.is_not_distinct_from(integer("seen_data_key_number")),
        _s.payload == binary("seen_payload"),
    )


def _key_is_there() -> sa.ColumnElement[bool]:
    number = integer("my_data_key_number")
    there = sa.select(ONE).where(_k.tenant_id == _s.tenant_id, _k.number == number, _k.disabled_at.is_(None))
    return sa.exists(there.correlate(steps))


def _is_erased_since() -> sa.ColumnElement[bool]:
    erased = sa.select(ONE).where(_t.tenant_id == _s.tenant_id, _t.erased_at >= _s.requested_at)
    return sa.exists(erased.correlate(steps))
