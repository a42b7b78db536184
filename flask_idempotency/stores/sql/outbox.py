"""Keep messages in the application's database: insert them with its session, and let relays claim and delete them.

Relays claim one after the other, under a lock. Without it, two relays that look at the same time could hold two messages of
one key, and send them in either order. Measured with 900 messages: 11 inversions, and 297 sent twice
(`spec/consumers.md`, B 35). No relay remembers a position: a transaction that commits late may insert a lower number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.keys import TID_BYTES
from flask_idempotency.engine.model import SealedBy
from flask_idempotency.engine.outbox import (
    LANE_BYTES,
    FailingTopic,
    FormerRow,
    Message,
    OutboxCounts,
    OutboxNames,
    OutboxRow,
    StoredMessage,
    Topics,
    flaw_of,
    tokens_of,
)
from flask_idempotency.engine.store import Clock, MissingGrant, store_time
from flask_idempotency.stores.sql.admin.grants import OUTBOX_NUMBERS, to_publish
from flask_idempotency.stores.sql.database import Database, refuse_inherited, transaction, without_logging
from flask_idempotency.stores.sql.dialects import (
    LOCK_TIMEOUT_MS,
    POSTGRESQL,
    SQLITE,
    Dialect,
    bigint,
    binary,
    commits_each_statement,
    dialect_of,
    in_microseconds,
    string,
)
from flask_idempotency.stores.sql.errors import explained, forbidden, lacks_grants
from flask_idempotency.stores.sql.migrations import upgrade_outbox
from flask_idempotency.stores.sql.naming import NamedConnection, named, options
from flask_idempotency.stores.sql.schema import OUTBOX, cache_fault, outbox, outbox_gaps
from flask_idempotency.stores.sql.transactional.listeners import role_of

UPGRADE: Final = (
    "run `flask idempotency db upgrade`, or, where Alembic creates the tables, write a migration that calls "
    "`sql.upgrade(op.get_bind())` (see docs/guides/outbox.md)"
)

_o = outbox.c
_earlier = outbox.alias("earlier")
_later = outbox.alias("later")
_ONE: Final[sa.ColumnElement[int]] = sa.literal_column("1", sa.BigInteger)
_ZERO: Final[sa.ColumnElement[int]] = sa.literal_column("0", sa.BigInteger)

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

ADOPTED: Final = 1000
"""How many messages of the release before one statement reads."""


class Claimed(NamedTuple):
    """The columns that a relay needs, of any type: another program may have written them."""

    seq: int
    message_id: Any
    topic: Any
    key: Any
    tenant: Any
    tenant_id: Any
    headers: Any
    body: Any
    wrapping_key_id: Any
    data_key_number: Any
    attempts: Any
    lane: Any

    def stored(self) -> StoredMessage:
        damaged: str | None = None
        values: dict[str, str | None] = {}
        for name in ("message_id", "topic", "key", "tenant", "headers", "wrapping_key_id"):
            value = getattr(self, name)
            values[name] = _shown(value)
            if isinstance(value, bytes) and values[name] != value.decode("utf-8", "ignore"):
                damaged = damaged or f"its {name.removeprefix('message_')} is unreadable"
        kid = values["wrapping_key_id"]
        by = None if kid is None else SealedBy(kid, self.data_key_number or 0)
        former, headers = _headers_of(values["headers"] or "", sealed=by is not None)
        # Names beside a seal are not read: another program may have planted them.
        in_clear = by is None or former
        message = Message(
            values["message_id"] or "",
            values["topic"] or "",
            b"" if self.body is None else bytes(self.body),
            key=values["key"] if in_clear else None,
            headers=headers or {},
            tenant=values["tenant"] if in_clear else None,
        )
        binary = {"tenant": (self.tenant_id, TID_BYTES), "lane": (self.lane, LANE_BYTES)}
        for name, (given, length) in binary.items():
            if given is not None and len(given) != length:
                damaged = damaged or f"its {name} is unreadable"
        if self.body is None:
            damaged = damaged or "its body is unreadable"
        if self.attempts is None:
            damaged = damaged or "its number of attempts is unreadable"
        if headers is None:
            damaged = damaged or "its headers are unreadable"
        if in_clear:
            # A sealed body is longer, and cannot be planted.
            damaged = damaged or flaw_of(message if by is None else replace(message, body=b""))
        tenant_id = None if self.tenant_id is None else bytes(self.tenant_id)
        lane = None if self.lane is None else bytes(self.lane)
        return StoredMessage(self.seq, message, self.attempts or 0, lane, tenant_id, by, former=former, damaged=damaged)


def _shown(value: Any) -> str | None:
    """Return a text column. On SQLite, its bytes may be no text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _headers_of(text: str, *, sealed: bool) -> tuple[bool, dict[str, str] | None]:
    """Return whether a release before namespaces wrote the headers, and the headers. None: they are damaged."""
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError):
        return False, None
    former = isinstance(headers, dict)
    if sealed and headers == []:
        return False, {}
    if isinstance(headers, list) and len(headers) == 1 and not sealed:
        (headers,) = headers
    return former, headers if isinstance(headers, dict) else None


# The statements. `tests/stores/sql/snapshots` has the text of each for each database.


def publish(dialect: Dialect) -> ReturningInsert[Any]:
    """Insert a message, unless one with its id is there. It is due after a delay from now."""
    moment = dialect.moment(bounded=False).subquery("moment")
    values: dict[str, sa.ColumnElement[Any]] = {
        **{name: sa.bindparam(f"my_{name}", type_=_o[name].type) for name in _WRITTEN},
        "created_at": moment.c.now,
        "due_at": _NEVER,
        "ready_at": moment.c.now + bigint("delay"),
    }
    known = sa.select(_ONE).select_from(_earlier).where(_has_former_name(_earlier.c))
    # SQLite's parser needs a WHERE before ON CONFLICT.
    source = sa.select(*values.values()).select_from(moment).where(~sa.exists(known))
    source = source.suffix_with("ON CONFLICT (message_id) DO NOTHING")
    return sa.insert(outbox).from_select(list(values), source).returning(_o.seq)


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
    return _of_former().where(_o.dead == _ZERO).values(namespace=string("my_namespace"))


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


def claim(dialect: Dialect) -> ReturningUpdate[Any]:
    """Hold the first messages that are due, and past no earlier message of their topic and key that waits.

    A repeated claim of one holder finds the same messages again: the reply to the first may be lost. Messages that failed
    come after new ones. A later message of a lane does not overtake an earlier one that failed more often.
    """
    now = _read_once(dialect)
    mine = _o.holder == binary("holder")
    due = sa.and_(_due(_o) <= now, sa.or_(~_is_held_now(_o, now), mine))
    e = _earlier.c
    blocked = (
        sa.select(_ONE)
        .select_from(_earlier)
        .where(
            e.namespace == _o.namespace,
            e.lane == _o.lane,
            e.seq < _o.seq,
            e.published_at.is_(None),
            e.lane.is_not(None),
            sa.or_(
                e.dead != _ZERO,
                _due(e) > now,
                e.attempts > _o.attempts,
                sa.and_(_is_held_now(e, now), e.holder != binary("holder")),
            ),
        )
        .correlate(outbox)
    )
    first = (
        sa.select(_o.seq)
        .where(
            _o.namespace == string("my_namespace"),
            _o.published_at.is_(None),
            _o.dead == _ZERO,
            _is_taken(dialect),
            due,
            sa.or_(_o.lane.is_(None), ~sa.exists(blocked)),
        )
        .order_by(_o.attempts, _o.seq)
        .limit(bigint("limit"))
    )
    first = first.correlate(None)
    if dialect.name == POSTGRESQL:
        # A subquery with a limit may run for each compared row.
        first = sa.select(first.cte("first").prefix_with("MATERIALIZED").c.seq)
    held = {"holder": binary("holder"), "held_until": now + bigint("hold")}
    return sa.update(outbox).where(_o.seq.in_(first)).values(**held).returning(*_claimed(dialect))


def _claimed(dialect: Dialect) -> list[sa.ColumnElement[Any]]:
    texts = {name: _text(dialect, _o[name]) for name in ("topic", "key", "tenant", "headers", "wrapping_key_id")}
    texts["message_id"] = _text(dialect, sa.func.coalesce(_o.sent_id, _o.message_id), "message_id")
    numbers = {name: _number(dialect, _o[name]) for name in ("data_key_number", "attempts")}
    known = {"seq": _o.seq, **texts, **numbers}
    return [known[name] if name in known else _bytes(dialect, _o[name]) for name in Claimed._fields]


# SQLite keeps any type in any column, and text that is no UTF-8. Its driver raises for such a value, and so for all rows.


def _text(dialect: Dialect, column: sa.ColumnElement[Any], name: str | None = None) -> sa.ColumnElement[Any]:
    """Read text, on SQLite as bytes. Another type becomes bytes that are no text."""
    if dialect.name == POSTGRESQL:
        return column.label(name or column.key)
    wrong = sa.literal_column("x'ff'", sa.LargeBinary)
    kind = sa.func.typeof(column)
    # Not `IS NOT NULL`: in this CASE of a RETURNING, SQLite 3.40 took it for true where the column was null.
    read = sa.case((kind == sa.literal_column("'text'"), sa.cast(column, sa.LargeBinary)), (kind != _NULL, wrong))
    return read.label(name or column.key)


def _bytes(dialect: Dialect, column: sa.ColumnElement[Any], name: str | None = None) -> sa.ColumnElement[Any]:
    """Read bytes. Another type becomes empty bytes, and of a body null."""
    name = name or str(column.key)
    if dialect.name == POSTGRESQL:
        return column.label(name)
    read = sa.type_coerce(sa.case((sa.func.typeof(column) == sa.literal_column("'blob'"), column)), sa.LargeBinary)
    if name == "body":
        return read.label(name)
    there = sa.func.typeof(column) != _NULL
    return sa.case((there, sa.func.coalesce(read, sa.literal_column("x''", sa.LargeBinary)))).label(name)


def _number(dialect: Dialect, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Read a whole number. Another type becomes null."""
    if dialect.name == POSTGRESQL:
        return column
    return sa.case((sa.func.typeof(column) == sa.literal_column("'integer'"), column)).label(column.key)


def _sane(dialect: Dialect, column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """Return a time that can be subtracted: a damaged one may overflow, and be no number on SQLite."""
    least, greatest = getattr(sa.func, dialect.least), getattr(sa.func, dialect.greatest)
    sane: sa.ColumnElement[int] = least(greatest(column, _ZERO), _NEVER, type_=sa.BigInteger)
    return sane


_NULL: Final = sa.literal_column("'null'", sa.Text)

_LONGEST_HOLD: Final[sa.ColumnElement[int]] = sa.literal_column("3600000000", sa.BigInteger)
"""No relay holds a message for an hour, so a later end of a hold is damaged."""


def _is_held_now(columns: Any, now: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    held_until = sa.func.coalesce(columns.held_until, _ZERO)
    return sa.and_(held_until > now, held_until <= now + _LONGEST_HOLD)


def _due(columns: Any) -> sa.ColumnElement[int]:
    return sa.func.coalesce(columns.ready_at, columns.due_at)


def _is_taken(dialect: Dialect) -> sa.ColumnElement[bool]:
    """Return whether the route takes the topic. Both parameters come from `_patterns`."""
    takes, before = string("takes"), string("before")
    if dialect.name == POSTGRESQL:
        return sa.and_(_o.topic.regexp_match(takes), ~_o.topic.regexp_match(before))
    other = sa.func.json_each(before).table_valued("value", name="other")
    goes_before = sa.select(_ONE).select_from(other).where(_o.topic.op("GLOB")(other.c.value))
    return sa.and_(_o.topic.op("GLOB")(takes), ~sa.exists(goes_before.correlate(outbox)))


def _patterns(dialect: Dialect, topics: Topics) -> dict[str, str]:
    """Return the patterns of a route as the database compares them."""
    every = [tokens_of(pattern) for pattern in (topics.pattern, *topics.before)]
    if dialect.name == POSTGRESQL:
        takes, *before = (f"^{''.join(map(_as_regex, tokens))}$" for tokens in every)
        return {"takes": takes, "before": "|".join(before) or "(?!)"}
    # GLOB has no empty list. No topic has a space.
    takes, *before = ("".join(tokens).replace("[]", " ") for tokens in every)
    return {"takes": takes, "before": json.dumps(before)}


def _as_regex(token: str) -> str:
    return {"*": ".*", "[]": " ", ".": "[.]"}.get(token, token)


def delete_confirmed(dialect: Dialect) -> sa.Delete:
    """Delete messages that their receivers confirmed."""
    return sa.delete(outbox).where(_is_held(), _o.seq.in_(sa.bindparam("seqs", expanding=True)))


def keep_confirmed(dialect: Dialect) -> sa.Update:
    """Mark messages as published that their receivers confirmed."""
    confirmed = sa.update(outbox).where(_is_held(), _o.seq.in_(sa.bindparam("seqs", expanding=True)))
    return confirmed.values(published_at=dialect.now, holder=sa.null(), held_until=sa.null(), error=sa.null())


def delay(dialect: Dialect) -> sa.Update:
    """Count a failed attempt, and make the message due after a pause."""
    return _failed().values(
        attempts=_one_more(dialect),
        **_due_again(dialect.now + bigint("pause")),
        holder=sa.null(),
        held_until=sa.null(),
        error=string("error"),
    )


def _one_more(dialect: Dialect) -> sa.ColumnElement[int]:
    """Return the number of attempts after this one. A damaged number must not overflow."""
    least: sa.ColumnElement[int] = getattr(sa.func, dialect.least)(
        _o.attempts, sa.literal_column("1000000", sa.BigInteger)
    )
    more: sa.ColumnElement[int] = least + _ONE
    return more


def _due_again(moment: sa.ColumnElement[int]) -> dict[str, sa.ColumnElement[int]]:
    """Return the values of a later attempt. A message without `ready_at` stays one for relays of the release before."""
    return {
        "due_at": sa.case((_o.ready_at.is_(None), moment), else_=_o.due_at),
        "ready_at": sa.case((_o.ready_at.is_not(None), moment)),
    }


def bury(dialect: Dialect) -> sa.Update:
    """Mark the message dead."""
    return _failed().values(
        attempts=_one_more(dialect), dead=_ONE, holder=sa.null(), held_until=sa.null(), error=string("error")
    )


def release(dialect: Dialect) -> sa.Update:
    """Give up messages that this relay still holds."""
    held = sa.update(outbox).where(_is_held(), _o.seq.in_(sa.bindparam("seqs", expanding=True)))
    return held.values(holder=sa.null(), held_until=sa.null())


def put_off(dialect: Dialect) -> sa.Update:
    """Give up messages that this relay still holds, for a pause. It counts as no attempt."""
    held = sa.update(outbox).where(_is_held(), _o.seq.in_(sa.bindparam("seqs", expanding=True)))
    return held.values(**_due_again(dialect.now + bigint("pause")), holder=sa.null(), held_until=sa.null())


def expire(dialect: Dialect) -> sa.Delete:
    """Delete messages that were published so long ago, some at a time."""
    old = (
        sa.select(_o.seq)
        .where(_o.published_at <= bigint("until"), _is_ours())
        .order_by(_o.published_at)
        .limit(bigint("limit"))
    )
    return sa.delete(outbox).where(_o.seq.in_(old.correlate(None)))


def counts(dialect: Dialect) -> sa.Select[Any]:
    """Count the messages that wait, those that are dead, and how long the oldest has been due."""
    now = dialect.now
    due_at = sa.case((sa.and_(_o.dead == _ZERO, _due(_o) <= now), _sane(dialect, _due(_o))))
    dead = sa.func.coalesce(sa.func.sum(sa.case((_o.dead == _ZERO, _ZERO), else_=_ONE)), _ZERO)
    return sa.select(
        (sa.func.count() - dead).label("waiting"), dead.label("dead"), (now - sa.func.min(due_at)).label("oldest")
    ).where(_o.published_at.is_(None), _is_ours())


def rows(dialect: Dialect) -> sa.Select[Any]:
    """Read what an operator may see of the first messages that are not sent: dead ones, then those that failed."""
    now = dialect.now
    later = _later.c
    behind = (
        sa.select(sa.func.count())
        .select_from(_later)
        .where(
            later.namespace == _o.namespace,
            later.lane == _o.lane,
            later.seq > _o.seq,
            later.published_at.is_(None),
            later.lane.is_not(None),
        )
        .correlate(outbox)
        .scalar_subquery()
    )
    state = sa.case(
        (_o.dead != _ZERO, sa.literal_column("'dead'")),
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
            sa.or_(bigint("only_dead") == _ZERO, _o.dead != _ZERO),
            sa.or_(string("only_topic").is_(None), _o.topic == string("only_topic")),
        )
        .order_by(
            sa.case((_o.dead != _ZERO, _ZERO), (_o.error.is_not(None), _ONE), else_=sa.literal_column("2")), _o.seq
        )
        .limit(bigint("limit"))
    )


def failing(dialect: Dialect) -> sa.Select[Any]:
    """Count the messages of each topic whose last attempt failed, and that fail for longer than `since`."""
    now, since = dialect.now, bigint("since")
    published = _sane(dialect, _o.created_at)
    # A message may be published long before it is due, so one failed attempt counts a minute after it. The pause was a second.
    second = sa.literal_column("1000000", sa.BigInteger)
    last = sa.or_(_o.attempts > _ONE, now - _sane(dialect, _due(_o)) + second > since)
    return (
        sa.select(
            _text(dialect, _o.topic),
            sa.func.count().label("messages"),
            (now - sa.func.min(published)).label("oldest"),
            _text(dialect, sa.func.min(_o.error), "error"),
        )
        .where(
            _o.published_at.is_(None),
            _o.dead == _ZERO,
            _o.error.is_not(None),
            _is_ours(),
            now - published > since,
            last,
        )
        .group_by(_o.topic)
        .order_by(_o.topic)
    )


def retry(dialect: Dialect) -> ReturningUpdate[Any]:
    """Let a message be sent again now. Leave one alone that a relay holds."""
    statement = sa.update(outbox).where(*_settled(dialect))
    again = _due_again(dialect.now)
    return statement.values(dead=_ZERO, **again, holder=sa.null(), held_until=sa.null(), error=sa.null()).returning(
        _text(dialect, _o.topic)
    )


def discard(dialect: Dialect) -> Any:
    """Delete a message whose last attempt failed. Leave one alone that a relay holds."""
    return sa.delete(outbox).where(*_settled(dialect), _o.error.is_not(None)).returning(_text(dialect, _o.topic))


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


def _read_once(dialect: Dialect) -> sa.ColumnElement[int]:
    """Return the time, the same in every row. SQLite reads its clock once for a statement, PostgreSQL for each row.

    If it passed the time of one message between that one and the next of its key, the claim would take only the later one.
    """
    if dialect.name != POSTGRESQL:
        return dialect.now
    moment = dialect.moment(bounded=False).cte("moment").prefix_with("MATERIALIZED")
    return sa.select(moment.c.now).scalar_subquery()


def _is_held() -> sa.ColumnElement[bool]:
    return sa.and_(_o.holder == binary("holder"), _o.published_at.is_(None))


def _failed() -> sa.Update:
    return sa.update(outbox).where(_is_held(), _o.seq == bigint("my_seq"))


def _settled(dialect: Dialect) -> tuple[sa.ColumnElement[bool], ...]:
    free = ~_is_held_now(_o, dialect.now)
    return _o.seq == bigint("my_seq"), _o.published_at.is_(None), free, _is_ours()


_PRIVILEGES: Final = (
    "SELECT rights.name FROM (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS rights (name)"
    " WHERE NOT has_table_privilege(to_regclass('{schema}idempotency_outbox'), rights.name)"
    " UNION ALL SELECT 'USAGE on the sequence idempotency_outbox_seq_seq'"
    " WHERE NOT has_sequence_privilege(to_regclass('{schema}idempotency_outbox_seq_seq'), 'USAGE, UPDATE')"
)


class OutboxTable:
    """Implements `OutboxQueue`, and inserts messages with the application's session.

    `database` opens connections of its own for relays. `names` has the namespace whose messages these are. `keep` is how many
    seconds confirmed messages stay. Tests pass `clock`.
    """

    def __init__(self, database: Database, names: OutboxNames, *, keep: float = 0.0, clock: Clock = store_time) -> None:
        self._database = database
        self._names = names
        self._keep = keep
        self._clock = clock
        self._made: dict[tuple[Callable[[Dialect], Any], str], Any] = {}

    # With the application's session.

    def connection_of(self, session: Session, engine: sa.Engine) -> sa.Connection:
        """Write the rows of this session, and return the connection of its transaction on this engine.

        Raises `ConfigurationError` if the session commits each statement by itself.
        """
        # Rows first: their locks put the transactions of one key in order, and so their messages.
        session.flush()
        connection = session.connection(bind_arguments={"bind": engine})
        refuse_inherited(connection)
        _refuse_autocommit(connection)
        return connection

    def publish(
        self,
        connection: sa.Connection,
        message: Message,
        *,
        delay: float,
        tenant_id: bytes | None,
        sealed: bytes,
        sealed_by: SealedBy | None,
    ) -> None:
        """Insert the message on this connection, unless one with its id is there.

        `sealed` is the body, or the whole message if `sealed_by` is set. Raises `ConfigurationError` if the table is missing,
        and `ValueError` if a message of the same id has another topic, key or body.
        """
        dialect, names = dialect_of(connection.dialect.name), self._names
        plain = sealed_by is None
        names_of_it = {
            "my_message_id": names.row_id(message),
            "former_message_id": names.row_id(message, former=True),
            "my_sent_id": message.message_id,
            "my_namespace": names.namespace,
            "plain_tenant": message.tenant,
        }
        lane, digest = names.lane(message.topic, message.key), names.content(message)
        parameters = {
            **names_of_it,
            "my_topic": message.topic,
            "my_key": message.key if plain else None,
            "my_tenant": message.tenant if plain else None,
            "my_tenant_id": tenant_id,
            "my_headers": json.dumps([dict(message.headers)] if plain else [], separators=(",", ":")),
            "my_body": sealed,
            "my_wrapping_key_id": None if sealed_by is None else sealed_by.kid,
            "my_data_key_number": None if sealed_by is None else sealed_by.number,
            "my_lane": lane,
            "my_digest": digest,
            "delay": in_microseconds(delay),
            **self._now(),
        }
        try:
            # The application's engine may log parameters, and these hold a body.
            with without_logging(connection):
                # The relay may not use a SQLite database in memory, which publishes nevertheless.
                named_by = options(None) if dialect.name == SQLITE else self._database.options
                ours = NamedConnection(connection, named_by)
                if ours.scalar(self._statement(publish, dialect), parameters) is not None:
                    return
                known = ours.execute(self._statement(published, dialect), names_of_it).first()
        except StatementError as error:
            error.hide_parameters = True
            if tables := forbidden(error, self._database.schema):
                remedy_text = lacks_grants(role_of(connection), tables)
                raise ConfigurationError(f"{remedy_text[0].upper()}{remedy_text[1:]}.") from None
            remedy = explained(error)
            if isinstance(remedy, ConfigurationError):
                raise ConfigurationError(f"The database has no table {OUTBOX}, or an old one: {UPGRADE}.") from None
            raise
        if known is not None and (what := _difference(known, message, lane, digest)) is not None:
            raise ValueError(
                f"message_id: a message of this tenant has this id already, and another {what}. Receivers tell messages by "
                "their ids, so give each its own. Without a message_id, the id comes from the request and the number of the "
                "call: publish the same messages in each attempt."
            )

    # Relays.

    def adopt(self, is_ours: Callable[[FormerRow], bool]) -> None:
        """Give the messages of the release before, and of the namespace before, to this one. `is_ours` chooses the former."""
        names = self._names

        def work(connection: sa.Connection) -> None:
            with transaction(connection):
                if names.former is not None:
                    moved = {"former": names.former, "my_namespace": names.namespace}
                    for statement in (move, move_lanes):
                        connection.execute(self._statement(statement), moved)
                found, after = self._unadopted(connection, 0), 0
                while found:
                    after = found[-1].seq
                    rows = [(row.seq, _former(row)) for row in found]
                    mine = [(seq, row) for seq, row in rows if is_ours(row)]
                    changes = [
                        {
                            "my_seq": seq,
                            "my_namespace": names.namespace,
                            "my_lane": names.lane(row.topic, row.key),
                        }
                        for seq, row in mine
                    ]
                    if changes:
                        connection.execute(self._statement(adopt), changes)
                    found = self._unadopted(connection, after) if len(found) == ADOPTED else []

        self._database.run(work)

    def _unadopted(self, connection: sa.Connection, after: int) -> Sequence[Any]:
        return connection.execute(self._statement(unadopted), {"after": after, "limit": ADOPTED}).all()

    def claim(self, holder: bytes, *, topics: Topics, limit: int, hold: float) -> Sequence[StoredMessage]:
        def work(connection: sa.Connection) -> list[Any]:
            with transaction(connection):
                if connection.dialect.name == POSTGRESQL:
                    connection.execute(self._statement(relay_lock))
                # A statement of its own: it must see what the relay before us committed.
                parameters = {
                    "holder": holder,
                    "limit": limit,
                    "hold": in_microseconds(hold),
                    "my_namespace": self._names.namespace,
                    **_patterns(self._database.dialect, topics),
                    **self._now(),
                }
                return list(connection.execute(self._statement(claim), parameters))

        # The databases return updated rows in any order.
        claimed = [Claimed(*row).stored() for row in self._database.run(work)]
        return sorted(claimed, key=lambda each: (each.attempts, each.seq))

    def confirm(self, holder: bytes, seqs: Sequence[int]) -> int:
        statement = keep_confirmed if self._keep else delete_confirmed
        return self._write(statement, holder=holder, seqs=list(seqs), **(self._now() if self._keep else {}))

    def delay(self, holder: bytes, seq: int, *, pause: float, error: str) -> None:
        self._write(delay, holder=holder, my_seq=seq, pause=in_microseconds(pause), error=error, **self._now())

    def bury(self, holder: bytes, seq: int, *, error: str) -> None:
        self._write(bury, holder=holder, my_seq=seq, error=error)

    def release(self, holder: bytes, seqs: Sequence[int]) -> None:
        self._write(release, holder=holder, seqs=list(seqs))

    def put_off(self, holder: bytes, seqs: Sequence[int], *, pause: float) -> None:
        self._write(put_off, holder=holder, seqs=list(seqs), pause=in_microseconds(pause), **self._now())

    # Operators, the janitor and the doctor.

    def sweep(self, *, horizon: float, limit: int) -> int:
        """Delete up to this many messages that were published `keep` seconds before the horizon."""
        until = in_microseconds(horizon - self._keep)
        return self._write(expire, until=until, limit=limit, **self._ours())

    def counts(self) -> OutboxCounts:
        """Count what waits."""
        parameters = {**self._ours(), **self._now()}
        waiting, dead, oldest = self._database.run(lambda c: c.execute(self._statement(counts), parameters).one())
        return OutboxCounts(int(waiting), int(dead), max(oldest or 0, 0) / 1e6)

    def failing(self, *, since: float) -> list[FailingTopic]:
        """Return the topics with messages that have failed for longer than this many seconds."""
        parameters = {"since": in_microseconds(since), **self._ours(), **self._now()}
        found = self._database.run(lambda c: c.execute(self._statement(failing), parameters).all())
        return [
            FailingTopic(
                printable(_shown(row.topic) or ""),
                row.messages,
                max(row.oldest, 0) / 1e6,
                printable(_shown(row.error) or ""),
            )
            for row in found
        ]

    def rows(self, *, limit: int, only_dead: bool = False, topic: str | None = None) -> list[OutboxRow]:
        """Return the first messages that are not sent: dead ones first, then those whose last attempt failed."""
        chosen = {"only_dead": int(only_dead), "only_topic": topic}
        parameters = {"limit": limit, **chosen, **self._ours(), **self._now()}
        found = self._database.run(lambda c: c.execute(self._statement(rows), parameters).all())
        return [
            OutboxRow(
                row.seq,
                printable(_shown(row.message_id) or ""),
                printable(_shown(row.topic) or ""),
                row.state,
                row.attempts or 0,
                max(row.age, 0) / 1e6,
                max(row.wait, 0) / 1e6,
                None if row.error is None else printable(_shown(row.error) or ""),
                row.behind,
            )
            for row in found
        ]

    def retry(self, seq: int) -> str | None:
        """Let this message be sent now, and return its topic. None: a relay holds it, or it is gone."""
        return self._change(retry, seq)

    def discard(self, seq: int) -> str | None:
        """Delete this message, and return its topic. None: no attempt has failed, a relay holds it, or it is gone."""
        return self._change(discard, seq)

    def sealed_before(self, newest: str, *, after: int, limit: int) -> list[StoredMessage]:
        """Return messages that another key of the ring seals than the newest."""
        parameters = {"newest": newest, "after": after, "limit": limit, **self._ours()}
        found = self._database.run(lambda c: c.execute(self._statement(sealed_before), parameters).all())
        return [Claimed(*row).stored() for row in found]

    def reseal(self, stored: StoredMessage, body: bytes, by: SealedBy) -> bool:
        """Replace the body of this message. Return False if it is gone or changed."""
        seen = 0 if stored.sealed_by is None else stored.sealed_by.number
        return bool(
            self._write(
                reseal,
                my_seq=stored.seq,
                seen_number=seen,
                my_body=body,
                my_wrapping_key_id=by.kid,
                my_data_key_number=by.number,
            )
        )

    def server_now(self) -> float:
        """Return the database's time."""
        parameters = self._now()
        return int(self._database.run(lambda c: c.scalar(self._statement(_server_time), parameters))) / 1e6

    def faults(self) -> list[str]:
        """Return why messages cannot be published or sent: a sentence for each fault, with its remedy."""

        def work(connection: sa.Connection) -> list[str]:
            gaps = outbox_gaps(connection)
            if gaps:
                what = ", ".join((*gaps.tables, *gaps.columns, *gaps.indexes))
                return [
                    f"The outbox is not complete in this database: {what} is missing. {UPGRADE[0].upper()}{UPGRADE[1:]}."
                ]
            if connection.dialect.name != POSTGRESQL:
                return []
            if fault := cache_fault(connection, OUTBOX_NUMBERS, "messages of one key may be sent in another order"):
                return [fault]
            lacking = list(connection.execute(named(connection, _PRIVILEGES)).scalars())
            if not lacking:
                return []
            rights = ", ".join(lacking)
            return [f"The database's role may not use the table {OUTBOX}: grant it {rights}."]

        return self._database.run(work)

    def missing_grants(self, role: str) -> list[MissingGrant]:
        """Return what this role lacks to publish messages in the transaction of a view."""
        return self._database.run(to_publish, role)

    def advice(self) -> list[str]:
        """Return settings that cost speed only: there are none."""
        return []

    def upgrade(self) -> list[str]:
        """Create the table if it is missing."""
        return upgrade_outbox(self._database.base)

    def close(self) -> None:
        """Close the connections for relays."""
        self._database.close()

    def _change(self, statement: Callable[[Dialect], Any], seq: int) -> str | None:
        parameters = {"my_seq": seq, **self._ours(), **self._now()}
        return _shown(self._database.run(lambda c: c.scalar(self._statement(statement), parameters)))

    def _write(self, statement: Callable[[Dialect], Any], **parameters: Any) -> int:
        return self._database.run(lambda c: c.execute(self._statement(statement), parameters).rowcount)

    def _ours(self) -> dict[str, list[str]]:
        return {"namespaces": list(self._names.namespaces)}

    def _now(self) -> dict[str, int | None]:
        now = self._clock()
        return {"now": None if now is None else in_microseconds(now)}

    def _statement(self, make: Callable[[Dialect], Any], dialect: Dialect | None = None) -> Any:
        dialect = self._database.dialect if dialect is None else dialect
        name = make, dialect.name
        if name not in self._made:
            self._made[name] = make(dialect)
        return self._made[name]


def _server_time(dialect: Dialect) -> sa.Select[Any]:
    return sa.select(dialect.now)


def _former(row: Any) -> FormerRow:
    return FormerRow(_shown(row.topic) or "", _shown(row.key), _shown(row.tenant), row.tenant_id, bool(row.sealed))


def _difference(known: Any, message: Message, lane: bytes | None, digest: bytes) -> str | None:
    """Return what a message has that differs from this one, which is to be published under the same id."""
    if _shown(known.topic) != message.topic:
        return "topic"
    if known.digest is not None:
        same_key, same = known.lane == lane, known.digest == digest
    else:
        # The release before sealed the body alone, and did not keep a digest of it.
        same_key, same = _shown(known.key) == message.key, known.body in (None, message.body)
    return "key" if not same_key else None if same else "body"


def _refuse_autocommit(connection: sa.Connection) -> None:
    if commits_each_statement(connection):
        raise ConfigurationError(
            "db.session commits each statement by itself (isolation level AUTOCOMMIT), so a message could be sent whose rows "
            "are rolled back. Use another isolation level for the engine of the default bind."
        )
