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

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    LargeBinary,
    Select,
    Text,
    Update,
    and_,
    bindparam,
    case,
    cast,
    delete,
    exists,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    type_coerce,
    update,
)
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
    commits_each_statement,
    dialect_of,
    in_microseconds,
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
_ONE: Final[ColumnElement[int]] = literal_column("1", BigInteger)
_ZERO: Final[ColumnElement[int]] = literal_column("0", BigInteger)

LOCK: Final = 0x6F7574626F780001
"""The advisory lock of relays: "outbox" in ASCII. The whole database shares one space of these locks."""

_NEVER: Final[ColumnElement[int]] = literal_column(str(2**63 - 1), BigInteger)
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
    values: dict[str, ColumnElement[Any]] = {
        **{name: bindparam(f"my_{name}", type_=_o[name].type) for name in _WRITTEN},
        "created_at": moment.c.now,
        "due_at": _NEVER,
        "ready_at": moment.c.now + bindparam("delay", type_=BigInteger),
    }
    known = select(_ONE).select_from(_earlier).where(_has_former_name(_earlier.c))
    # SQLite's parser needs a WHERE before ON CONFLICT.
    source = select(*values.values()).select_from(moment).where(~exists(known))
    source = source.suffix_with("ON CONFLICT (message_id) DO NOTHING")
    return insert(outbox).from_select(list(values), source).returning(_o.seq)


def published(dialect: Dialect) -> Select[Any]:
    """Read what the message has that was published under this id before."""
    body = case((_o.wrapping_key_id.is_(None), _o.body))
    mine = _o.message_id == bindparam("my_message_id", type_=Text)
    columns = (
        _text(dialect, _o.topic),
        _text(dialect, _o.key),
        *(_bytes(dialect, each) for each in (_o.lane, _o.digest)),
    )
    return select(*columns, _bytes(dialect, body, "body")).where(or_(mine, _has_former_name(_o)))


def _has_former_name(columns: Any) -> ColumnElement[bool]:
    """Return whether the message has this id in the namespace before, or from the release before namespaces."""
    before = and_(
        columns.message_id == bindparam("my_sent_id", type_=Text),
        columns.sent_id.is_(None),
        or_(columns.namespace.is_(None), columns.namespace == bindparam("my_namespace", type_=Text)),
        columns.tenant.is_not_distinct_from(bindparam("plain_tenant", type_=Text)),
    )
    return or_(columns.message_id == bindparam("former_message_id", type_=Text), before)


def unadopted(dialect: Dialect) -> Select[Any]:
    """Read messages without a namespace, some at a time."""
    columns = (
        _o.seq,
        *(_text(dialect, each) for each in (_o.topic, _o.key, _o.tenant)),
        _bytes(dialect, _o.tenant_id),
        _o.wrapping_key_id.is_not(None).label("sealed"),
    )
    after = _o.seq > bindparam("after", type_=BigInteger)
    statement = select(*columns).where(_o.published_at.is_(None), _o.namespace.is_(None), after).order_by(_o.seq)
    return statement.limit(bindparam("limit", type_=BigInteger))


def adopt(dialect: Dialect) -> Update:
    """Give a message of the release before a namespace. Its relays know it as before, and may send it."""
    statement = update(outbox).where(_o.seq == bindparam("my_seq", type_=BigInteger), _o.namespace.is_(None))
    return statement.values(
        namespace=bindparam("my_namespace", type_=Text), lane=bindparam("my_lane", type_=LargeBinary)
    )


def move(dialect: Dialect) -> Update:
    """Give the messages of the namespace before this one."""
    return _of_former().where(_o.dead == _ZERO).values(namespace=bindparam("my_namespace", type_=Text))


def move_lanes(dialect: Dialect) -> Update:
    """Give the messages of the namespace before this one that hold back others. Dead ones are among them."""
    return _of_former().where(_o.lane.is_not(None)).values(namespace=bindparam("my_namespace", type_=Text))


def _of_former() -> Update:
    # Each of these conditions is that of an index.
    return update(outbox).where(_o.namespace == bindparam("former", type_=Text), _o.published_at.is_(None))


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


def relay_lock(dialect: Dialect) -> Select[Any]:
    """Wait until no other relay claims. PostgreSQL removes the lock with the transaction, so a pooler may be in between."""
    settings = (
        func.set_config(literal_column(f"'{name}'"), literal_column(f"'{value}'"), literal_column("true"))
        for name, value in _CLAIM_SETTINGS
    )
    return select(*settings, func.pg_advisory_xact_lock(literal_column(str(LOCK))))


def claim(dialect: Dialect) -> ReturningUpdate[Any]:
    """Hold the first messages that are due, and past no earlier message of their topic and key that waits.

    A repeated claim of one holder finds the same messages again: the reply to the first may be lost. Messages that failed
    come after new ones. A later message of a lane does not overtake an earlier one that failed more often.
    """
    now = _read_once(dialect)
    mine = _o.holder == bindparam("holder", type_=LargeBinary)
    due = and_(_due(_o) <= now, or_(~_is_held_now(_o, now), mine))
    e = _earlier.c
    blocked = (
        select(_ONE)
        .select_from(_earlier)
        .where(
            e.namespace == _o.namespace,
            e.lane == _o.lane,
            e.seq < _o.seq,
            e.published_at.is_(None),
            e.lane.is_not(None),
            or_(
                e.dead != _ZERO,
                _due(e) > now,
                e.attempts > _o.attempts,
                and_(_is_held_now(e, now), e.holder != bindparam("holder", type_=LargeBinary)),
            ),
        )
        .correlate(outbox)
    )
    first = (
        select(_o.seq)
        .where(
            _o.namespace == bindparam("my_namespace", type_=Text),
            _o.published_at.is_(None),
            _o.dead == _ZERO,
            _is_taken(dialect),
            due,
            or_(_o.lane.is_(None), ~exists(blocked)),
        )
        .order_by(_o.attempts, _o.seq)
        .limit(bindparam("limit", type_=BigInteger))
    )
    first = first.correlate(None)
    if dialect.name == POSTGRESQL:
        # A subquery with a limit may run for each compared row.
        first = select(first.cte("first").prefix_with("MATERIALIZED").c.seq)
    held = {"holder": bindparam("holder", type_=LargeBinary), "held_until": now + _duration("hold")}
    return update(outbox).where(_o.seq.in_(first)).values(**held).returning(*_claimed(dialect))


def _claimed(dialect: Dialect) -> list[ColumnElement[Any]]:
    texts = {name: _text(dialect, _o[name]) for name in ("topic", "key", "tenant", "headers", "wrapping_key_id")}
    texts["message_id"] = _text(dialect, func.coalesce(_o.sent_id, _o.message_id), "message_id")
    numbers = {name: _number(dialect, _o[name]) for name in ("data_key_number", "attempts")}
    known = {"seq": _o.seq, **texts, **numbers}
    return [known[name] if name in known else _bytes(dialect, _o[name]) for name in Claimed._fields]


# SQLite keeps any type in any column, and text that is no UTF-8. Its driver raises for such a value, and so for all rows.


def _text(dialect: Dialect, column: ColumnElement[Any], name: str | None = None) -> ColumnElement[Any]:
    """Read text, on SQLite as bytes. Another type becomes bytes that are no text."""
    if dialect.name == POSTGRESQL:
        return column.label(name or column.key)
    wrong = literal_column("x'ff'", LargeBinary)
    kind = func.typeof(column)
    # Not `IS NOT NULL`: in this CASE of a RETURNING, SQLite 3.40 took it for true where the column was null.
    read = case((kind == literal_column("'text'"), cast(column, LargeBinary)), (kind != _NULL, wrong))
    return read.label(name or column.key)


def _bytes(dialect: Dialect, column: ColumnElement[Any], name: str | None = None) -> ColumnElement[Any]:
    """Read bytes. Another type becomes empty bytes, and of a body null."""
    name = name or str(column.key)
    if dialect.name == POSTGRESQL:
        return column.label(name)
    read = type_coerce(case((func.typeof(column) == literal_column("'blob'"), column)), LargeBinary)
    if name == "body":
        return read.label(name)
    there = func.typeof(column) != _NULL
    return case((there, func.coalesce(read, literal_column("x''", LargeBinary)))).label(name)


def _number(dialect: Dialect, column: ColumnElement[Any]) -> ColumnElement[Any]:
    """Read a whole number. Another type becomes null."""
    if dialect.name == POSTGRESQL:
        return column
    return case((func.typeof(column) == literal_column("'integer'"), column)).label(column.key)


def _sane(dialect: Dialect, column: ColumnElement[Any]) -> ColumnElement[int]:
    """Return a time that can be subtracted: a damaged one may overflow, and be no number on SQLite."""
    least, greatest = getattr(func, dialect.least), getattr(func, dialect.greatest)
    sane: ColumnElement[int] = least(greatest(column, _ZERO), _NEVER, type_=BigInteger)
    return sane


_NULL: Final = literal_column("'null'", Text)

_LONGEST_HOLD: Final[ColumnElement[int]] = literal_column("3600000000", BigInteger)
"""No relay holds a message for an hour, so a later end of a hold is damaged."""


def _is_held_now(columns: Any, now: ColumnElement[int]) -> ColumnElement[bool]:
    held_until = func.coalesce(columns.held_until, _ZERO)
    return and_(held_until > now, held_until <= now + _LONGEST_HOLD)


def _due(columns: Any) -> ColumnElement[int]:
    return func.coalesce(columns.ready_at, columns.due_at)


def _is_taken(dialect: Dialect) -> ColumnElement[bool]:
    """Return whether the route takes the topic. Both parameters come from `_patterns`."""
    takes, before = bindparam("takes", type_=Text), bindparam("before", type_=Text)
    if dialect.name == POSTGRESQL:
        return and_(_o.topic.regexp_match(takes), ~_o.topic.regexp_match(before))
    other = func.json_each(before).table_valued("value", name="other")
    goes_before = select(_ONE).select_from(other).where(_o.topic.op("GLOB")(other.c.value))
    return and_(_o.topic.op("GLOB")(takes), ~exists(goes_before.correlate(outbox)))


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


def delete_confirmed(dialect: Dialect) -> Delete:
    """Delete messages that their receivers confirmed."""
    return delete(outbox).where(_is_held(), _o.seq.in_(bindparam("seqs", expanding=True)))


def keep_confirmed(dialect: Dialect) -> Update:
    """Mark messages as published that their receivers confirmed."""
    confirmed = update(outbox).where(_is_held(), _o.seq.in_(bindparam("seqs", expanding=True)))
    return confirmed.values(published_at=dialect.now, holder=null(), held_until=null(), error=null())


def delay(dialect: Dialect) -> Update:
    """Count a failed attempt, and make the message due after a pause."""
    return _failed().values(
        attempts=_one_more(dialect),
        **_due_again(dialect.now + _duration("pause")),
        holder=null(),
        held_until=null(),
        error=bindparam("error", type_=Text),
    )


def _one_more(dialect: Dialect) -> ColumnElement[int]:
    """Return the number of attempts after this one. A damaged number must not overflow."""
    least: ColumnElement[int] = getattr(func, dialect.least)(_o.attempts, literal_column("1000000", BigInteger))
    more: ColumnElement[int] = least + _ONE
    return more


def _due_again(moment: ColumnElement[int]) -> dict[str, ColumnElement[int]]:
    """Return the values of a later attempt. A message without `ready_at` stays one for relays of the release before."""
    return {
        "due_at": case((_o.ready_at.is_(None), moment), else_=_o.due_at),
        "ready_at": case((_o.ready_at.is_not(None), moment)),
    }


def bury(dialect: Dialect) -> Update:
    """Mark the message dead."""
    return _failed().values(
        attempts=_one_more(dialect),
        dead=_ONE,
        holder=null(),
        held_until=null(),
        error=bindparam("error", type_=Text),
    )


def release(dialect: Dialect) -> Update:
    """Give up messages that this relay still holds."""
    held = update(outbox).where(_is_held(), _o.seq.in_(bindparam("seqs", expanding=True)))
    return held.values(holder=null(), held_until=null())


def put_off(dialect: Dialect) -> Update:
    """Give up messages that this relay still holds, for a pause. It counts as no attempt."""
    held = update(outbox).where(_is_held(), _o.seq.in_(bindparam("seqs", expanding=True)))
    return held.values(**_due_again(dialect.now + _duration("pause")), holder=null(), held_until=null())


def expire(dialect: Dialect) -> Delete:
    """Delete messages that were published so long ago, some at a time."""
    old = (
        select(_o.seq)
        .where(_o.published_at <= bindparam("until", type_=BigInteger), _is_ours())
        .order_by(_o.published_at)
        .limit(bindparam("limit", type_=BigInteger))
    )
    return delete(outbox).where(_o.seq.in_(old.correlate(None)))


def counts(dialect: Dialect) -> Select[Any]:
    """Count the messages that wait, those that are dead, and how long the oldest has been due."""
    now = dialect.now
    due_at = case((and_(_o.dead == _ZERO, _due(_o) <= now), _sane(dialect, _due(_o))))
    dead = func.coalesce(func.sum(case((_o.dead == _ZERO, _ZERO), else_=_ONE)), _ZERO)
    return select(
        (func.count() - dead).label("waiting"), dead.label("dead"), (now - func.min(due_at)).label("oldest")
    ).where(_o.published_at.is_(None), _is_ours())


def rows(dialect: Dialect) -> Select[Any]:
    """Read what an operator may see of the first messages that are not sent: dead ones, then those that failed."""
    now = dialect.now
    later = _later.c
    behind = (
        select(func.count())
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
    state = case(
        (_o.dead != _ZERO, literal_column("'dead'")),
        (_is_held_now(_o, now), literal_column("'held'")),
        (_due(_o) > now, literal_column("'delayed'")),
        else_=literal_column("'due'"),
    )
    return (
        select(
            _o.seq,
            _text(dialect, func.coalesce(_o.sent_id, _o.message_id), "message_id"),
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
            or_(bindparam("only_dead", type_=BigInteger) == _ZERO, _o.dead != _ZERO),
            or_(bindparam("only_topic", type_=Text).is_(None), _o.topic == bindparam("only_topic", type_=Text)),
        )
        .order_by(case((_o.dead != _ZERO, _ZERO), (_o.error.is_not(None), _ONE), else_=literal_column("2")), _o.seq)
        .limit(bindparam("limit", type_=BigInteger))
    )


def failing(dialect: Dialect) -> Select[Any]:
    """Count the messages of each topic whose last attempt failed, and that fail for longer than `since`."""
    now, since = dialect.now, _duration("since")
    published = _sane(dialect, _o.created_at)
    # A message may be published long before it is due, so one failed attempt counts a minute after it. The pause was a second.
    second = literal_column("1000000", BigInteger)
    last = or_(_o.attempts > _ONE, now - _sane(dialect, _due(_o)) + second > since)
    return (
        select(
            _text(dialect, _o.topic),
            func.count().label("messages"),
            (now - func.min(published)).label("oldest"),
            _text(dialect, func.min(_o.error), "error"),
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
    statement = update(outbox).where(*_settled(dialect))
    again = _due_again(dialect.now)
    return statement.values(dead=_ZERO, **again, holder=null(), held_until=null(), error=null()).returning(
        _text(dialect, _o.topic)
    )


def discard(dialect: Dialect) -> Any:
    """Delete a message whose last attempt failed. Leave one alone that a relay holds."""
    return delete(outbox).where(*_settled(dialect), _o.error.is_not(None)).returning(_text(dialect, _o.topic))


def sealed_before(dialect: Dialect) -> Select[Any]:
    """Read messages whose bodies are sealed under another key of the ring than this one."""
    return (
        select(*_claimed(dialect))
        .where(
            _o.published_at.is_(None),
            _is_ours(),
            _o.wrapping_key_id != bindparam("newest", type_=Text),
            _o.seq > bindparam("after", type_=BigInteger),
        )
        .order_by(_o.seq)
        .limit(bindparam("limit", type_=BigInteger))
    )


def reseal(dialect: Dialect) -> Update:
    """Replace a sealed body, if it is still under the key that it was read with."""
    return (
        update(outbox)
        .where(
            _o.seq == bindparam("my_seq", type_=BigInteger),
            _o.data_key_number == bindparam("seen_number", type_=BigInteger),
        )
        .values(
            body=bindparam("my_body", type_=LargeBinary),
            wrapping_key_id=bindparam("my_wrapping_key_id", type_=Text),
            data_key_number=bindparam("my_data_key_number", type_=BigInteger),
        )
    )


def _is_ours() -> ColumnElement[bool]:
    """Return whether a message is of this namespace, or of none, so that it may be any application's."""
    return or_(_o.namespace.is_(None), _o.namespace.in_(bindparam("namespaces", expanding=True)))


def _duration(name: str) -> ColumnElement[int]:
    return bindparam(name, type_=BigInteger)


def _read_once(dialect: Dialect) -> ColumnElement[int]:
    """Return the time, the same in every row. SQLite reads its clock once for a statement, PostgreSQL for each row.

    If it passed the time of one message between that one and the next of its key, the claim would take only the later one.
    """
    if dialect.name != POSTGRESQL:
        return dialect.now
    moment = dialect.moment(bounded=False).cte("moment").prefix_with("MATERIALIZED")
    return select(moment.c.now).scalar_subquery()


def _is_held() -> ColumnElement[bool]:
    return and_(_o.holder == bindparam("holder", type_=LargeBinary), _o.published_at.is_(None))


def _failed() -> Update:
    return update(outbox).where(_is_held(), _o.seq == bindparam("my_seq", type_=BigInteger))


def _settled(dialect: Dialect) -> tuple[ColumnElement[bool], ...]:
    free = ~_is_held_now(_o, dialect.now)
    return _o.seq == bindparam("my_seq", type_=BigInteger), _o.published_at.is_(None), free, _is_ours()


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

    def connection_of(self, session: Session, engine: Engine) -> Connection:
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
        connection: Connection,
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

        def work(connection: Connection) -> None:
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

    def _unadopted(self, connection: Connection, after: int) -> Sequence[Any]:
        return connection.execute(self._statement(unadopted), {"after": after, "limit": ADOPTED}).all()

    def claim(self, holder: bytes, *, topics: Topics, limit: int, hold: float) -> Sequence[StoredMessage]:
        def work(connection: Connection) -> list[Any]:
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

        def work(connection: Connection) -> list[str]:
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


def _server_time(dialect: Dialect) -> Select[Any]:
    return select(dialect.now)


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


def _refuse_autocommit(connection: Connection) -> None:
    if commits_each_statement(connection):
        raise ConfigurationError(
            "db.session commits each statement by itself (isolation level AUTOCOMMIT), so a message could be sent whose rows "
            "are rolled back. Use another isolation level for the engine of the default bind."
        )
