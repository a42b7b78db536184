"""The statements about messages of the outbox. `tests/stores/sql/snapshots` has the text of each for each database.

Relays claim one after the other, under a lock. Without it, two relays that look at the same time could hold two messages of
one key, and send them in either order. Measured with 900 messages: 11 inversions, and 297 sent twice
(`spec/consumers.md`, B 35). No relay remembers a position: a transaction that commits late may insert a lower number.
"""

from __future__ import annotations

import json
from typing import Any, Final

import sqlalchemy as sa

from flask_idempotency.engine.outbox import Topics, tokens_of
from flask_idempotency.stores.sql.dialects import LOCK_TIMEOUT_MS, POSTGRESQL, SQLITE, Dialect, bigint, binary, string
from flask_idempotency.stores.sql.schema import outbox
from flask_idempotency.stores.sql.statements import ONE, ZERO
from flask_idempotency.stores.sql.writes import Write, of_chosen, returned, upserted

_o = outbox.c
_earlier = outbox.alias("earlier")
_later = outbox.alias("later")

LOCK: Final = 0x6F7574626F780001
"""The advisory lock of relays: "outbox" in ASCII. The whole database shares one space of these locks."""

_NEVER: Final[sa.ColumnElement[int]] = sa.literal_column(str(2**63 - 1), sa.BigInteger)
"""`due_at` of a message with a namespace. A relay of the release before reads only that, and leaves the message alone."""

_WRITTEN: Final = (
    "message_id",
    "topic",
    "key",
    "tenant",
    "tenant_id",
    "headers",
    "body",
    "wrapping_key_id",
    "data_key_number",
    "namespace",
    "sent_id",
    "lane",
    "digest",
)


def publish(dialect: Dialect) -> Any:
    """Insert a message, unless one with its id is there. It is due after a delay from now."""
    moment = dialect.moment(bounded=False).subquery("moment")
    values: dict[str, sa.ColumnElement[Any]] = {
        **{name: sa.bindparam(f"my_{name}", type_=_o[name].type) for name in _WRITTEN},
        "created_at": moment.c.now,
        "due_at": _NEVER,
        "ready_at": moment.c.now + bigint("delay"),
    }
    known = sa.select(ONE).select_from(_earlier).where(_has_former_name(_earlier.c))
    source = sa.select(*values.values()).select_from(moment)
    if not dialect.returns:
        # In the same statement, at REPEATABLE READ, this select would lock a gap that other messages go to.
        return Write([sa.insert(outbox).from_select(list(values), source)], unless=known)
    return upserted(dialect, outbox, values, ("message_id",), source=source.where(~sa.exists(known)), proof=(_o.seq,))


def published(dialect: Dialect) -> sa.Select[Any]:
    """Read what the message has that was published under this id before."""
    body = sa.case((_o.wrapping_key_id.is_(None), _o.body))
    mine = _o.message_id == string("my_message_id")
    columns = (
        _text(dialect, _o.topic),
        _text(dialect, _o.key),
        *(_bytes(dialect, each) for each in (_o.lane, _o.digest)),
    )
    return sa.select(*columns, _bytes(dialect, body, "body")).where(sa.or_(mine, _has_former_name(_o)))


def _has_former_name(columns: Any) -> sa.ColumnElement[bool]:
    """Return whether the message has this id in the namespace before, or from the release before namespaces."""
    before = sa.and_(
        columns.message_id == string("my_sent_id"),
        columns.sent_id.is_(None),
        sa.or_(columns.namespace.is_(None), columns.namespace == string("my_namespace")),
        columns.tenant.is_not_distinct_from(string("plain_tenant")),
    )
    return sa.or_(columns.message_id == string("former_message_id"), before)


def unadopted(dialect: Dialect) -> sa.Select[Any]:
    """Read messages without a namespace, some at a time."""
    columns = (
        _o.seq,
        *(_text(dialect, each) for each in (_o.topic, _o.key, _o.tenant)),
        _bytes(dialect, _o.tenant_id),
        _o.wrapping_key_id.is_not(None).label("sealed"),
    )
    after = _o.seq > bigint("after")
    statement = sa.select(*columns).where(_o.published_at.is_(None), _o.namespace.is_(None), after).order_by(_o.seq)
    return statement.limit(bigint("limit"))


def adopt(dialect: Dialect) -> sa.Update:
    """Give a message of the release before a namespace. Its relays know it as before, and may send it."""
    statement = sa.update(outbox).where(_o.seq == bigint("my_seq"), _o.namespace.is_(None))
    return statement.values(namespace=string("my_namespace"), lane=binary("my_lane"))


def move(dialect: Dialect) -> sa.Update:
    """Give the messages of the namespace before this one."""
    return _of_former().where(_o.dead == ZERO).values(namespace=string("my_namespace"))


def move_lanes(dialect: Dialect) -> sa.Update:
    """Give the messages of the namespace before this one that hold back others. Dead ones are among them."""
    return _of_former().where(_o.lane.is_not(None)).values(namespace=string("my_namespace"))


def _of_former() -> sa.Update:
    # Each of these conditions is that of an index.
    return sa.update(outbox).where(_o.namespace == string("former"), _o.published_at.is_(None))


_CLAIM_SETTINGS: Final = (
    # Not for longer than other writes wait: a relay that is frozen inside its claim must not freeze the others.
    ("lock_timeout", str(LOCK_TIMEOUT_MS)),
    # The claim must walk the index of `seq` and stop at its limit. Without statistics, as after a burst of messages, the
    # planner sorts the whole table first: measured at 50,000 messages, that takes longer than the reply may.
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_sort", "off"),
    ("jit", "off"),
)


def relay_lock(dialect: Dialect) -> sa.Select[Any]:
    """Wait until no other relay claims. PostgreSQL removes the lock with the transaction, so a pooler may be in between."""
    settings = (
        sa.func.set_config(sa.literal_column(f"'{name}'"), sa.literal_column(f"'{value}'"), sa.literal_column("true"))
        for name, value in _CLAIM_SETTINGS
    )
    return sa.select(*settings, sa.func.pg_advisory_xact_lock(sa.literal_column(str(LOCK))))


def claim(dialect: Dialect) -> Any:
    """Hold the first messages that are due, and past no earlier message of their topic and key that waits.

    A repeated claim of one holder finds the same messages again: the reply to the first may be lost. Messages that failed
    come after new ones. A later message of a lane does not overtake an earlier one that failed more often.
    """
    now = dialect.now
    if dialect.name == POSTGRESQL:
        # Read once, as SQLite reads its clock. If it passed the time of one message between that one and the next of its key,
        # the claim would take only the later one.
        moment = dialect.moment(bounded=False).cte("moment").prefix_with("MATERIALIZED")
        now = sa.select(moment.c.now).scalar_subquery()
    mine = _o.holder == binary("holder")
    due = sa.and_(_due(_o) <= now, sa.or_(~_is_held_now(_o, now), mine))
    e = _earlier.c
    blocked = (
        sa.select(ONE)
        .select_from(_earlier)
        .where(
            *_waits_in_lane(e, e.seq < _o.seq),
            sa.or_(
                e.dead != ZERO,
                _due(e) > now,
                e.attempts > _o.attempts,
                sa.and_(_is_held_now(e, now), e.holder != binary("holder")),
            ),
        )
        .correlate(outbox)
    )
    # Whether the route takes the topic: see `patterns`.
    takes, before = string("takes"), string("before")
    if dialect.name == SQLITE:
        other = sa.func.json_each(before).table_valued("value", name="other")
        goes_before = sa.select(ONE).select_from(other).where(_o.topic.op("GLOB")(other.c.value))
        is_taken = sa.and_(_o.topic.op("GLOB")(takes), ~sa.exists(goes_before.correlate(outbox)))
    else:
        is_taken = sa.and_(_o.topic.regexp_match(takes), ~_o.topic.regexp_match(before))
    first = (
        sa.select(_o.seq)
        .where(
            _o.namespace == string("my_namespace"),
            _o.published_at.is_(None),
            _o.dead == ZERO,
            is_taken,
            due,
            sa.or_(_o.lane.is_(None), ~sa.exists(blocked)),
        )
        .order_by(_o.attempts, _o.seq)
        .limit(bigint("limit"))
    )
    first = first.correlate(None)
    held = {"holder": binary("holder"), "held_until": now + bigint("hold")}
    if dialect.name == POSTGRESQL:
        # A subquery with a limit may run for each compared row.
        first = sa.select(first.cte("first").prefix_with("MATERIALIZED").c.seq)
        return sa.update(outbox).where(_o.seq.in_(first)).values(**held).returning(*_claimed(dialect))
    return of_chosen(
        dialect, first, lambda these: sa.update(outbox).where(these).values(**held), *_claimed(dialect), waits=True
    )


def _waits_in_lane(columns: Any, place: sa.ColumnElement[bool]) -> tuple[sa.ColumnElement[bool], ...]:
    """Match another message of the same lane that is not sent."""
    same = columns.namespace == _o.namespace, columns.lane == _o.lane
    return *same, place, columns.published_at.is_(None), columns.lane.is_not(None)


def _claimed(dialect: Dialect) -> list[sa.ColumnElement[Any]]:
    """Return the columns that a relay needs."""
    return [
        _o.seq,
        _text(dialect, sa.func.coalesce(_o.sent_id, _o.message_id), "message_id"),
        *(_text(dialect, each) for each in (_o.topic, _o.key, _o.tenant, _o.headers, _o.wrapping_key_id)),
        *(_bytes(dialect, each) for each in (_o.tenant_id, _o.body, _o.lane)),
        *(_number(dialect, each) for each in (_o.data_key_number, _o.attempts)),
    ]


# SQLite keeps any type in any column, and text that is no UTF-8. Its driver raises for such a value, and so for all rows.


def _text(dialect: Dialect, column: sa.ColumnElement[Any], name: str | None = None) -> sa.ColumnElement[Any]:
    """Read text, on SQLite as bytes. Another type becomes bytes that are no text."""
    if dialect.name != SQLITE:
        return column.label(name or column.key)
    wrong = sa.literal_column("x'ff'", sa.LargeBinary)
    kind = sa.func.typeof(column)
    # Not `IS NOT NULL`: in this CASE of a RETURNING, SQLite 3.40 took it for true where the column was null.
    read = sa.case((kind == sa.literal_column("'text'"), sa.cast(column, sa.LargeBinary)), (kind != _NULL, wrong))
    return read.label(name or column.key)


def _bytes(dialect: Dialect, column: sa.ColumnElement[Any], name: str | None = None) -> sa.ColumnElement[Any]:
    """Read bytes. Another type becomes empty bytes, and of a body null."""
    name = name or str(column.key)
    if dialect.name != SQLITE:
        return column.label(name)
    read = sa.type_coerce(sa.case((sa.func.typeof(column) == sa.literal_column("'blob'"), column)), sa.LargeBinary)
    if name == "body":
        return read.label(name)
    there = sa.func.typeof(column) != _NULL
    return sa.case((there, sa.func.coalesce(read, sa.literal_column("x''", sa.LargeBinary)))).label(name)


def _number(dialect: Dialect, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Read a whole number. Another type becomes null."""
    if dialect.name != SQLITE:
        return column
    return sa.case((sa.func.typeof(column) == sa.literal_column("'integer'"), column)).label(column.key)


def _sane(dialect: Dialect, column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """Return a time that can be subtracted: a damaged one may overflow, and be no number on SQLite."""
    return dialect.smaller(dialect.larger(column, ZERO), _NEVER)


_NULL: Final = sa.literal_column("'null'", sa.Text)

_LONGEST_HOLD: Final[sa.ColumnElement[int]] = sa.literal_column("3600000000", sa.BigInteger)
"""No relay holds a message for an hour, so a later end of a hold is damaged."""


def _is_held_now(columns: Any, now: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    held_until = sa.func.coalesce(columns.held_until, ZERO)
    return sa.and_(held_until > now, held_until <= now + _LONGEST_HOLD)


def _due(columns: Any) -> sa.ColumnElement[int]:
    return sa.func.coalesce(columns.ready_at, columns.due_at)


def patterns(topics: Topics, dialect: Dialect) -> dict[str, str]:
    """Return the parameters of a claim that are the patterns of a route, as the database compares them."""
    every = [tokens_of(pattern) for pattern in (topics.pattern, *topics.before)]
    if dialect.name != SQLITE:
        takes, *before = (f"^{''.join(_AS_REGEX.get(token, token) for token in tokens)}$" for tokens in every)
        return {"takes": takes, "before": "|".join(before) or "(?!)"}
    # GLOB has no empty list. No topic has a space.
    takes, *before = ("".join(tokens).replace("[]", " ") for tokens in every)
    return {"takes": takes, "before": json.dumps(before)}


_AS_REGEX: Final = {"*": ".*", "[]": " ", ".": "[.]"}
"""What these tokens of a pattern are in a regular expression. No topic has a space."""


_FREED: Final[dict[str, Any]] = {"holder": sa.null(), "held_until": sa.null()}


def delete_confirmed(dialect: Dialect) -> sa.Delete:
    """Delete messages that their receivers confirmed."""
    return sa.delete(outbox).where(*_are_held())


def keep_confirmed(dialect: Dialect) -> sa.Update:
    """Mark messages as published that their receivers confirmed."""
    return sa.update(outbox).where(*_are_held()).values(published_at=dialect.now, **_FREED, error=sa.null())


def delay(dialect: Dialect) -> sa.Update:
    """Count a failed attempt, and make the message due after a pause."""
    return _failed(dialect, **_due_again(dialect.now + bigint("pause")))


def _failed(dialect: Dialect, **values: Any) -> sa.Update:
    """Count a failed attempt."""
    # A damaged number must not overflow.
    attempts = dialect.smaller(_o.attempts, sa.literal_column("1000000", sa.BigInteger)) + ONE
    failed = sa.update(outbox).where(_is_held(), _o.seq == bigint("my_seq"))
    return failed.values(attempts=attempts, **values, **_FREED, error=string("error"))


def _due_again(moment: sa.ColumnElement[int]) -> dict[str, sa.ColumnElement[int]]:
    """Return the values of a later attempt. A message without `ready_at` stays one for relays of the release before."""
    return {
        "due_at": sa.case((_o.ready_at.is_(None), moment), else_=_o.due_at),
        "ready_at": sa.case((_o.ready_at.is_not(None), moment)),
    }


def bury(dialect: Dialect) -> sa.Update:
    """Mark the message dead."""
    return _failed(dialect, dead=ONE)


def release(dialect: Dialect) -> sa.Update:
    """Give up messages that this relay still holds."""
    return sa.update(outbox).where(*_are_held()).values(_FREED)


def put_off(dialect: Dialect) -> sa.Update:
    """Give up messages that this relay still holds, for a pause. It counts as no attempt."""
    return sa.update(outbox).where(*_are_held()).values(**_due_again(dialect.now + bigint("pause")), **_FREED)


def expire(dialect: Dialect) -> Any:
    """Delete messages that were published so long ago, some at a time."""
    old = (
        sa.select(_o.seq)
        .where(_o.published_at <= bigint("until"), _is_ours())
        .order_by(_o.published_at)
        .limit(bigint("limit"))
    )
    return of_chosen(dialect, old.correlate(None), sa.delete(outbox).where, waits=True)


def counts(dialect: Dialect) -> sa.Select[Any]:
    """Count the messages that wait, those that are dead, and how long the oldest has been due."""
    now = dialect.now
    due_at = sa.case((sa.and_(_o.dead == ZERO, _due(_o) <= now), _sane(dialect, _due(_o))))
    dead = sa.func.coalesce(_DEAD, ZERO)
    return sa.select(
        (sa.func.count() - dead).label("waiting"), dead.label("dead"), (now - sa.func.min(due_at)).label("oldest")
    ).where(_o.published_at.is_(None), _is_ours())


def rows(dialect: Dialect) -> sa.Select[Any]:
    """Read what an operator may see of the first messages that are not sent: dead ones, then those that failed."""
    now = dialect.now
    behind = (
        sa.select(sa.func.count())
        .select_from(_later)
        .where(*_waits_in_lane(_later.c, _later.c.seq > _o.seq))
        .correlate(outbox)
        .scalar_subquery()
    )
    state = sa.case(
        (_o.dead != ZERO, sa.literal_column("'dead'")),
        (_is_held_now(_o, now), sa.literal_column("'held'")),
        (_due(_o) > now, sa.literal_column("'delayed'")),
        else_=sa.literal_column("'due'"),
    )
    return (
        sa.select(
            _o.seq,
            _text(dialect, sa.func.coalesce(_o.sent_id, _o.message_id), "message_id"),
            _text(dialect, _o.topic),
            state.label("state"),
            _number(dialect, _o.attempts),
            (now - _sane(dialect, _o.created_at)).label("age"),
            (_sane(dialect, _due(_o)) - now).label("wait"),
            _text(dialect, _o.error),
            behind.label("behind"),
        )
        .where(
            _o.published_at.is_(None),
            _is_ours(),
            sa.or_(bigint("only_dead") == ZERO, _o.dead != ZERO),
            sa.or_(string("only_topic").is_(None), _o.topic == string("only_topic")),
        )
        .order_by(sa.case((_o.dead != ZERO, ZERO), (_o.error.is_not(None), ONE), else_=sa.literal_column("2")), _o.seq)
        .limit(bigint("limit"))
    )


def topics(dialect: Dialect) -> sa.Select[Any]:
    """Count the messages of each topic that are not sent: dead ones, and those whose last attempt failed."""
    is_failing = sa.and_(_o.dead == ZERO, _o.error.is_not(None))
    failing = sa.func.sum(sa.case((is_failing, ONE), else_=ZERO)).label("failing")
    return _by_topic(dialect, _DEAD.label("dead"), failing).where(_o.published_at.is_(None), _is_ours())


def _by_topic(dialect: Dialect, *counts: sa.ColumnElement[Any]) -> sa.Select[Any]:
    """Select how many messages each topic has, these counts, the age of the oldest, and one of the errors."""
    oldest: sa.ColumnElement[Any] = (dialect.now - sa.func.min(_sane(dialect, _o.created_at))).label("oldest")
    columns = _text(dialect, _o.topic), sa.func.count().label("messages"), *counts, oldest
    shown = sa.select(*columns, _text(dialect, sa.func.min(_o.error), "error"))
    return shown.group_by(_o.topic).order_by(_o.topic)


_DEAD: Final = sa.func.sum(sa.case((_o.dead == ZERO, ZERO), else_=ONE))


def failing(dialect: Dialect) -> sa.Select[Any]:
    """Count the messages of each topic whose last attempt failed, and that fail for longer than `since`."""
    now, since = dialect.now, bigint("since")
    published = _sane(dialect, _o.created_at)
    # A message may be published long before it is due, so one failed attempt counts a minute after it. The pause was a second.
    second = sa.literal_column("1000000", sa.BigInteger)
    last = sa.or_(_o.attempts > ONE, now - _sane(dialect, _due(_o)) + second > since)
    is_failing = _o.published_at.is_(None), _o.dead == ZERO, _o.error.is_not(None)
    return _by_topic(dialect).where(*is_failing, _is_ours(), now - published > since, last)


def retry(dialect: Dialect) -> Any:
    """Let a message be sent again now. Leave one alone that a relay holds."""
    statement = sa.update(outbox).where(*_settled(dialect))
    again = _due_again(dialect.now)
    retried = statement.values(dead=ZERO, **again, **_FREED, error=sa.null())
    return returned(dialect, retried, _o.seq == bigint("my_seq"), _text(dialect, _o.topic))


def discard(dialect: Dialect) -> Any:
    """Delete a message whose last attempt failed. Leave one alone that a relay holds."""
    discarded = sa.delete(outbox).where(*_settled(dialect), _o.error.is_not(None))
    return returned(dialect, discarded, _o.seq == bigint("my_seq"), _text(dialect, _o.topic))


def sealed_before(dialect: Dialect) -> sa.Select[Any]:
    """Read messages whose bodies are sealed under another key of the ring than this one."""
    return (
        sa.select(*_claimed(dialect))
        .where(_o.published_at.is_(None), _is_ours(), _o.wrapping_key_id != string("newest"), _o.seq > bigint("after"))
        .order_by(_o.seq)
        .limit(bigint("limit"))
    )


def reseal(dialect: Dialect) -> sa.Update:
    """Replace a sealed body, if it is still under the key that it was read with."""
    return (
        sa.update(outbox)
        .where(_o.seq == bigint("my_seq"), _o.data_key_number == bigint("seen_number"))
        .values(
            body=binary("my_body"),
            wrapping_key_id=string("my_wrapping_key_id"),
            data_key_number=bigint("my_data_key_number"),
        )
    )


def _is_ours() -> sa.ColumnElement[bool]:
    """Return whether a message is of this namespace, or of none, so that it may be any application's."""
    return sa.or_(_o.namespace.is_(None), _o.namespace.in_(sa.bindparam("namespaces", expanding=True)))


def _is_held() -> sa.ColumnElement[bool]:
    return sa.and_(_o.holder == binary("holder"), _o.published_at.is_(None))


def _are_held() -> tuple[sa.ColumnElement[bool], ...]:
    return _is_held(), _o.seq.in_(sa.bindparam("seqs", expanding=True))


def _settled(dialect: Dialect) -> tuple[sa.ColumnElement[bool], ...]:
    free = ~_is_held_now(_o, dialect.now)
    return _o.seq == bigint("my_seq"), _o.published_at.is_(None), free, _is_ours()
