"""The statements about journals: rows of `idempotency_steps`, and the columns of the record that say what a journal holds.

Each write updates the record first, which locks its row and compares token, fence and the number of the write. The rows of
steps follow in the same statement on PostgreSQL, and in the same transaction on SQLite. A row belongs to the life of its
record: it has the same `requested_at`. Rows of another life are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from flask_idempotency.engine.journal import NEVER_RESUMED
from flask_idempotency.engine.model import CORRUPT, IN_DOUBT
from flask_idempotency.stores.sql import schema, statements
from flask_idempotency.stores.sql.completion import may_be_sealed, seal_faults
from flask_idempotency.stores.sql.dialects import Dialect, bigint, binary, integer, string
from flask_idempotency.stores.sql.statements import ONE, ZERO, is_mine, word
from flask_idempotency.stores.sql.writes import proven, returned, upserted

MOST_AT_ONCE: Final = 3
"""Entries that one statement writes on PostgreSQL. More are rare, and take a transaction."""

_r, _s = schema.records.c, schema.steps.c

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
_REPLACED: Final = (
    f"idempotency_steps.state = '{schema.BEGUN}' OR idempotency_steps.requested_at <> excluded.requested_at"
)
"""A finished step is never replaced."""
_A_RESULT: Final = Form(finished=True, has_payload=True)


def hold(dialect: Dialect, *, opens: bool = True, sealed: bool = False) -> Any:
    """Change the record for a write to its journal. Return what the rows of its steps need; no row if it was refused.

    `opens`: no plain step is in doubt after the write, so another attempt may go on. `sealed` as for `write`.
    """
    statement, now = statements.owners(dialect, schema.PROCESSING, schema.QUARANTINED)
    number = integer("my_write")
    held = statement.where(
        _r.fence == bigint("my_fence"),
        _r.step_write < number,
        sa.or_(_r.state == word(schema.PROCESSING), _r.reason == word(statements.LEASE_EXPIRED)),
    )
    if sealed:
        held = held.where(may_be_sealed(schema.records))
    if opens:
        goes_on = {"state": word(schema.PROCESSING), "reason": sa.null(), "resolver_due_at": ZERO}
        held = held.values(on_expiry=word(schema.TAKEOVER), **goes_on)
    else:
        held = held.values(on_expiry=word(schema.QUARANTINE))
    longer = dialect.larger(_r.lease_expires_at, now + bigint("lease"))
    steps_now = sa.bindparam("my_steps", type_=_r.steps.type)
    written = held.values(lease_expires_at=longer, steps=steps_now, step_write=number)
    return returned(dialect, written, is_mine(), *_facts(now))


def write(
    dialect: Dialect, forms: Sequence[Form] = (_A_RESULT,), *, opens: bool = True, sealed: bool = False
) -> sa.Select[Any]:
    """PostgreSQL: change the record as `hold` does, and enter steps of these forms. Return no row if it was refused.

    `sealed`: refuse if the data key that seals all of them is missing, or the tenant was erased since the first request.
    """
    held, entered = hold(dialect, opens=opens, sealed=sealed).cte("held"), []
    for number, form in enumerate(forms):
        values = _values(held.c, form, f"_{number}")
        source = sa.select(*values.values()).select_from(held).where(sa.true())
        replacing = _FINISHES if form.finished else _BEGINS
        step = upserted(dialect, schema.steps, values, _KEYS, replacing, where=_REPLACED, source=source)
        entered.append(step.cte(f"entered_{number}"))
    return sa.select(held.c.fence).add_cte(*entered)


def enter(dialect: Dialect, form: Form = _A_RESULT, *, settles: bool = False) -> Any:
    """Enter one step of this form, in the transaction that `hold` began.

    `settles`: in its worker's place. It keeps the fence of the claim that entered it.
    """
    replacing = _SETTLES if settles else _FINISHES if form.finished else _BEGINS
    if not dialect.returns:
        # On MySQL `requested_at` is read by the values before it.
        replacing = dict(sorted(replacing.items(), key=lambda item: item[0] == "requested_at"))
    values = _values(_Life(), form)
    return upserted(dialect, schema.steps, values, _KEYS, replacing, where=_REPLACED, inserts_first=True)


def withdraw(dialect: Dialect, *, settles: bool = False) -> sa.Delete:
    """Remove a step of this fence that began and did nothing. `settles`: of any fence, in its worker's place."""
    begun = _is_step(), _s.state == word(schema.BEGUN)
    return sa.delete(schema.steps).where(*begun, *(() if settles else (_s.fence == bigint("my_fence"),)))


def why_not_held(dialect: Dialect) -> sa.Select[Any]:
    """Read why a write to a journal changed no row."""
    facts: list[sa.ColumnElement[Any]] = [_r.state, _r.token, _r.fence, _r.step_write, _r.expires_at, _r.completed_at]
    return dialect.in_session(sa.select(*facts, _r.reason, dialect.now.label("now")).where(is_mine()))


def read_journal(dialect: Dialect, *, held: bool = False) -> sa.Select[Any]:
    """Select the journal, one row for each step. Without steps, select one row. `held`: for the claim that holds the record."""
    of_life = sa.and_(_s.record_id == _r.record_id, _s.requested_at == _r.requested_at)
    shown = sa.select(_r.fence.label("record_fence"), _r.step_write, *_shown()).select_from(
        schema.records.outerjoin(schema.steps, of_life)
    )
    journal = shown.where(is_mine(), _is_unfinished()).order_by(_s.began_at, _s.position, _s.step_id)
    return journal.where(_r.token == binary("my_token"), _r.fence == bigint("my_fence")) if held else journal


def resume(dialect: Dialect) -> Any:
    """Change a quarantined record in its worker's place, if record and journal are as seen. Pause it unless a step stays
    in doubt."""
    as_seen = (
        _r.state == word(schema.QUARANTINED),
        _r.fence == bigint("my_fence"),
        _r.step_write == integer("seen_write"),
        ~statements.has_answer(),
        _r.reason.is_distinct_from(word(CORRUPT)),
    )
    statement, now = statements.others_update(dialect, *as_seen)
    # Then no plain step is in doubt after this write, so another attempt may go on.
    pauses = sa.bindparam("my_on_expiry", type_=sa.String) == word(schema.TAKEOVER)
    resumed = statement.values(
        token=binary("my_token"),
        state=sa.case((pauses, word(schema.PROCESSING)), else_=_r.state),
        on_expiry=sa.case((pauses, word(schema.TAKEOVER)), else_=_r.on_expiry),
        reason=sa.case((pauses, sa.null()), else_=_r.reason),
        lease_expires_at=sa.case((pauses, now), else_=_r.lease_expires_at),
        resolver_due_at=sa.case((pauses, ZERO), else_=_r.resolver_due_at),
        steps=sa.bindparam("my_steps", type_=_r.steps.type),
        step_write=_r.step_write + sa.literal_column("1"),
    )
    return returned(dialect, resumed, is_mine(), *_facts(now))


def give_up(dialect: Dialect) -> Any:
    """Quarantine a paused or abandoned record with an effect, if it is as seen. Skip a locked row, but not on SQLite."""
    return statements.lapsed_as_met(dialect, schema.TAKEOVER, NEVER_RESUMED, _r.steps > ZERO)


def release(dialect: Dialect) -> Any:
    """Free the key, or keep the record for its journal: pause it, or quarantine it if a step is in doubt.

    A released row stays for a day, but only an operator sees it. Do not release a corrupt record: its view has run, even if
    its response is unreadable.
    """
    statement, now = statements.owners(dialect, schema.PROCESSING, schema.QUARANTINED)
    uncondemned = statement.where(~statements.has_answer(), _r.reason.is_distinct_from(word(CORRUPT)))
    is_free, resumes = _r.steps == ZERO, _r.on_expiry == word(schema.TAKEOVER)
    ended = dialect.smaller(_r.lease_expires_at, now)
    released = uncondemned.values(
        state=sa.case(
            (is_free, word(schema.RELEASED)), (resumes, word(schema.PROCESSING)), else_=word(schema.QUARANTINED)
        ),
        reason=sa.case((sa.or_(is_free, resumes), sa.null()), else_=sa.func.coalesce(_r.reason, word(IN_DOUBT))),
        token=sa.case((sa.and_(~is_free, resumes), binary("my_paused_token")), else_=_r.token),
        # In doubt, the lease stays: a call that timed out may still arrive, and a resolver waits for that.
        lease_expires_at=sa.case((is_free, sa.null()), (resumes, ended), else_=_r.lease_expires_at),
        expires_at=sa.case((is_free, now + sa.literal_column(str(statements.RELEASED_KEEP), sa.BigInteger))),
        succeeded=statements.ended_wait(dialect),
        resolver_due_at=sa.case((sa.or_(is_free, resumes), ZERO), else_=_r.resolver_due_at),
    )
    return returned(dialect, released, is_mine(), _r.state, _r.token, _r.step_write, _r.requested_at)


def drop(dialect: Dialect) -> sa.Delete:
    """Remove the journal of one life of a record."""
    return sa.delete(schema.steps).where(
        _s.record_id == binary("my_record_id"), _s.requested_at == bigint("my_requested_at")
    )


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
    return statements.count_by_key(schema.steps, "payloads").select_from(_current()).where(_s.payload.is_not(None))


def replace(dialect: Dialect, *, sealed: bool = False) -> Any:
    """Replace the payload of a step, if it still is the one that was seen.

    `sealed`: refuse if the new payload's data key is missing, or the tenant was erased since the first request.
    """
    statement = sa.update(schema.steps).where(_holds_seen(), _lives())
    if sealed:
        statement = statement.where(may_be_sealed(schema.steps))
    new: dict[str, Any] = {
        "payload": binary("my_payload"),
        "payload_size": bigint("my_payload_size"),
        "wrapping_key_id": string("my_wrapping_key_id"),
        "data_key_number": integer("my_data_key_number"),
    }
    return proven(dialect, statement.values(new), _s.fence)


def why_not_replaced(dialect: Dialect) -> sa.Select[Any]:
    """Read if a step still holds the payload that was seen, if its tenant was erased since, and if its data key is enabled."""
    return seal_faults(schema.steps).where(_holds_seen(), _lives())


def orphans(dialect: Dialect) -> sa.Select[Any]:
    """Select the steps of a page whose record is gone, is completed or free, or is in another life."""
    found = sa.select(_s.record_id, _s.step_id, _s.requested_at).where(
        _s.record_id > binary("my_after"), _s.record_id <= binary("my_until"), ~_lives()
    )
    return found.order_by(_s.record_id, _s.step_id)


def remove_orphan(dialect: Dialect) -> Any:
    """Remove one step of that life. A claim may have replaced it since: the row of a new life stays."""
    removed = sa.delete(schema.steps).where(_is_step(), ~_lives())
    return proven(dialect, removed, _s.record_id)


def _facts(now: sa.ColumnElement[int]) -> tuple[sa.ColumnElement[Any], ...]:
    """What the rows of steps take from their record."""
    return _r.record_id, _r.tenant_id, _r.requested_at, _r.fence, _r.attempt, now.label("now")


class _Life(NamedTuple):
    """What the row of a step takes from its record, as parameters."""

    record_id: sa.ColumnElement[bytes] = binary("my_record_id")
    tenant_id: sa.ColumnElement[bytes] = binary("my_tenant_id")
    requested_at: sa.ColumnElement[int] = bigint("my_requested_at")
    fence: sa.ColumnElement[int] = bigint("my_fence")
    attempt: sa.ColumnElement[int] = integer("my_attempt")
    now: sa.ColumnElement[int] = bigint("my_moment")


def _values(life: Any, form: Form, suffix: str = "") -> dict[str, sa.ColumnElement[Any]]:
    """Return the values of a step's row. `life` has the attributes of `_Life`."""
    given = {name: sa.bindparam(f"my_{name}{suffix}", type_=_s[name].type) for name in form.columns}
    # Numbers of writes begin at 1 in each attempt.
    before = sa.cast(life.attempt, sa.BigInteger) * sa.literal_column(str(2**32), sa.BigInteger)
    return {
        "record_id": life.record_id,
        "step_id": binary(f"my_step_id{suffix}"),
        "tenant_id": life.tenant_id,
        "requested_at": life.requested_at,
        "fence": life.fence,
        "began_at": life.now - given["took"],
        **({"finished_at": life.now} if form.finished else {}),
        "state": word(schema.FINISHED if form.finished else schema.BEGUN),
        **given,
        "position": before + given["position"],
    }


def _is_step() -> sa.ColumnElement[bool]:
    """Match a step of one life of a record."""
    mine = _s.record_id == binary("my_record_id"), _s.step_id == binary("my_step_id")
    return sa.and_(*mine, _s.requested_at == bigint("my_requested_at"))


def _shown() -> tuple[sa.ColumnElement[Any], ...]:
    columns = ("step_id", "fence", "began_at", "finished_at", *(name for name in ENTERED if name != "position"))
    return (*(_s[name] for name in columns), statements.erased(schema.steps, _s.tenant_id))


def _is_unfinished() -> sa.ColumnElement[bool]:
    return sa.and_(_r.state.in_((word(schema.PROCESSING), word(schema.QUARANTINED))), ~statements.has_answer())


def _current() -> Any:
    """The steps of records that are not completed, in their current life."""
    return schema.steps.join(
        schema.records, sa.and_(_r.record_id == _s.record_id, _r.requested_at == _s.requested_at, _is_unfinished())
    )


def _lives() -> sa.ColumnElement[bool]:
    """The record of this step exists, is not completed, and has the same life."""
    of_life = sa.select(ONE).where(_r.record_id == _s.record_id, _r.requested_at == _s.requested_at, _is_unfinished())
    return sa.exists(of_life.correlate(schema.steps))


def _holds_seen() -> sa.ColumnElement[bool]:
    """Match a step that holds the payload that was seen."""
    return sa.and_(
        _s.record_id == binary("my_record_id"),
        _s.step_id == binary("my_step_id"),
        statements.holds_seen(schema.steps, "payload"),
    )
