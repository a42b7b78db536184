"""Keep messages in the application's database: insert them with its session, and let relays claim and delete them.

Relays claim one after the other, under a lock. Without it, two relays that look at the same time could hold two messages of
one key, and send them in either order. Measured with 900 messages: 11 inversions, and 297 sent twice
(`spec/consumers.md`, B 35). No relay remembers a position: a transaction that commits late may insert a lower number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
    delete,
    exists,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy import text as sql_text
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import SealedBy
from flask_idempotency.engine.outbox import Message, OutboxCounts, OutboxRow, StoredMessage
from flask_idempotency.engine.store import Clock, store_time
from flask_idempotency.stores.sql.database import Database, refuse_inherited, transaction, without_logging
from flask_idempotency.stores.sql.dialects import (
    LOCK_TIMEOUT_MS,
    POSTGRESQL,
    Dialect,
    commits_each_statement,
    dialect_of,
    in_microseconds,
)
from flask_idempotency.stores.sql.errors import explained
from flask_idempotency.stores.sql.migrations import upgrade_outbox
from flask_idempotency.stores.sql.schema import OUTBOX, outbox, outbox_gaps

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
)


class Claimed(NamedTuple):
    """The columns that a relay needs."""

    seq: int
    message_id: str
    topic: str
    key: str | None
    tenant: str | None
    tenant_id: bytes | None
    headers: str
    body: bytes
    wrapping_key_id: str | None
    data_key_number: int | None
    attempts: int

    def stored(self) -> StoredMessage:
        by = None if self.wrapping_key_id is None else SealedBy(self.wrapping_key_id, self.data_key_number or 0)
        headers = _headers_of(self.headers)
        message = Message(
            self.message_id, self.topic, bytes(self.body), key=self.key, headers=headers or {}, tenant=self.tenant
        )
        tenant_id = None if self.tenant_id is None else bytes(self.tenant_id)
        return StoredMessage(self.seq, message, self.attempts, tenant_id, by, damaged=headers is None)


def _headers_of(text: str) -> dict[str, str] | None:
    """Return the headers, or None if they are damaged: one row must not stop the relay of all others."""
    try:
        headers = json.loads(text)
    except ValueError:
        return None
    whole = isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values())
    return headers if whole and "content-type" in headers else None


# The statements. `tests/stores/sql/snapshots` has the text of each for each database.


def publish(dialect: Dialect) -> ReturningInsert[Any]:
    """Insert a message, unless one with its id is there. It is due after a delay from now."""
    moment = dialect.moment(bounded=False).subquery("moment")
    values: dict[str, ColumnElement[Any]] = {
        **{name: bindparam(f"my_{name}", type_=_o[name].type) for name in _WRITTEN},
        "created_at": moment.c.now,
        "due_at": moment.c.now + bindparam("delay", type_=BigInteger),
    }
    # SQLite's parser needs a WHERE before ON CONFLICT.
    source = select(*values.values()).select_from(moment).where(moment.c.now.is_not(None))
    source = source.suffix_with("ON CONFLICT (message_id) DO NOTHING")
    return insert(outbox).from_select(list(values), source).returning(_o.seq)


def topic_of(dialect: Dialect) -> Select[Any]:
    """Read the topic of the message with this id."""
    return select(_o.topic).where(_o.message_id == bindparam("my_message_id", type_=Text))


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

    A repeated claim of one holder finds the same messages again: the reply to the first may be lost.
    """
    now = _read_once(dialect)
    mine = _o.holder == bindparam("holder", type_=LargeBinary)
    due = and_(_o.due_at <= now, or_(_o.held_until.is_(None), _o.held_until <= now, mine))
    e = _earlier.c
    blocked = (
        select(_ONE)
        .select_from(_earlier)
        .where(
            e.topic == _o.topic,
            e.key == _o.key,
            e.seq < _o.seq,
            e.published_at.is_(None),
            e.key.is_not(None),
            or_(
                e.dead == _ONE,
                e.due_at > now,
                and_(e.held_until > now, e.holder != bindparam("holder", type_=LargeBinary)),
            ),
        )
        .correlate(outbox)
    )
    first = (
        select(_o.seq)
        .where(_o.published_at.is_(None), _o.dead == _ZERO, due, or_(_o.key.is_(None), ~exists(blocked)))
        .order_by(_o.seq)
        .limit(bindparam("limit", type_=BigInteger))
    )
    first = first.correlate(None)
    if dialect.name == POSTGRESQL:
        # A subquery with a limit may run for each compared row.
        first = select(first.cte("first").prefix_with("MATERIALIZED").c.seq)
    held = {"holder": bindparam("holder", type_=LargeBinary), "held_until": now + _duration("hold")}
    return update(outbox).where(_o.seq.in_(first)).values(**held).returning(*(_o[name] for name in Claimed._fields))


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
        attempts=_o.attempts + _ONE,
        due_at=dialect.now + _duration("pause"),
        holder=null(),
        held_until=null(),
        error=bindparam("error", type_=Text),
    )


def bury(dialect: Dialect) -> Update:
    """Mark the message dead."""
    return _failed().values(
        attempts=_o.attempts + _ONE,
        dead=_ONE,
        holder=null(),
        held_until=null(),
        error=bindparam("error", type_=Text),
    )


def release(dialect: Dialect) -> Update:
    """Give up what this relay still holds."""
    return update(outbox).where(_is_held()).values(holder=null(), held_until=null())


def expire(dialect: Dialect) -> Delete:
    """Delete messages that were published so long ago, some at a time."""
    old = (
        select(_o.seq)
        .where(_o.published_at <= bindparam("until", type_=BigInteger))
        .order_by(_o.published_at)
        .limit(bindparam("limit", type_=BigInteger))
    )
    return delete(outbox).where(_o.seq.in_(old.correlate(None)))


def counts(dialect: Dialect) -> Select[Any]:
    """Count the messages that wait, those that are dead, and how long the oldest has been due."""
    now = dialect.now
    due_at = case((and_(_o.dead == _ZERO, _o.due_at <= now), _o.due_at))
    dead = func.coalesce(func.sum(_o.dead), _ZERO)
    return select(
        (func.count() - dead).label("waiting"), dead.label("dead"), (now - func.min(due_at)).label("oldest")
    ).where(_o.published_at.is_(None))


def rows(dialect: Dialect) -> Select[Any]:
    """Read what an operator may see of the first messages that are not sent, dead ones first."""
    now = dialect.now
    later = _later.c
    behind = (
        select(func.count())
        .select_from(_later)
        .where(later.topic == _o.topic, later.key == _o.key, later.seq > _o.seq, later.published_at.is_(None))
        .correlate(outbox)
        .scalar_subquery()
    )
    state = case(
        (_o.dead == _ONE, literal_column("'dead'")),
        (_o.held_until > now, literal_column("'held'")),
        (_o.due_at > now, literal_column("'delayed'")),
        else_=literal_column("'due'"),
    )
    return (
        select(
            _o.seq,
            _o.message_id,
            _o.topic,
            state.label("state"),
            _o.attempts,
            (now - _o.created_at).label("age"),
            (_o.due_at - now).label("wait"),
            _o.error,
            behind.label("behind"),
        )
        .where(_o.published_at.is_(None), or_(bindparam("only_dead", type_=BigInteger) == _ZERO, _o.dead == _ONE))
        .order_by(_o.dead.desc(), _o.seq)
        .limit(bindparam("limit", type_=BigInteger))
    )


def retry(dialect: Dialect) -> ReturningUpdate[Any]:
    """Let a message be sent again now. Leave one alone that a relay holds."""
    statement = update(outbox).where(*_settled(dialect))
    return statement.values(dead=_ZERO, due_at=dialect.now, holder=null(), held_until=null(), error=null()).returning(
        _o.topic
    )


def discard(dialect: Dialect) -> Any:
    """Delete a message whose last attempt failed. Leave one alone that a relay holds."""
    return delete(outbox).where(*_settled(dialect), _o.error.is_not(None)).returning(_o.topic)


def sealed_before(dialect: Dialect) -> Select[Any]:
    """Read messages whose bodies are sealed under another key of the ring than this one."""
    return (
        select(*(_o[name] for name in Claimed._fields))
        .where(
            _o.published_at.is_(None),
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
    free = or_(_o.held_until.is_(None), _o.held_until <= dialect.now)
    return _o.seq == bindparam("my_seq", type_=BigInteger), _o.published_at.is_(None), free


_PRIVILEGES: Final = sql_text(
    "SELECT rights.name FROM (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS rights (name)"
    " WHERE NOT has_table_privilege(to_regclass('idempotency_outbox'), rights.name)"
    " UNION ALL SELECT 'USAGE on the sequence idempotency_outbox_seq_seq'"
    " WHERE NOT has_sequence_privilege(to_regclass('idempotency_outbox_seq_seq'), 'USAGE, UPDATE')"
)


class OutboxTable:
    """Implements `OutboxQueue`, and inserts messages with the application's session.

    `database` opens connections of its own for relays. `keep` is how many seconds confirmed messages stay. Tests pass `clock`.
    """

    def __init__(self, database: Database, *, keep: float = 0.0, clock: Clock = store_time) -> None:
        self._database = database
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
        """Insert a message in the transaction of this connection, unless one with its id is there.

        Raises `ConfigurationError` if the table is missing, and `ValueError` if the id belongs to a message of another topic.
        """
        dialect = dialect_of(connection.dialect.name)
        parameters = {
            "my_message_id": message.message_id,
            "my_topic": message.topic,
            "my_key": message.key,
            "my_tenant": message.tenant,
            "my_tenant_id": tenant_id,
            "my_headers": json.dumps(dict(message.headers), separators=(",", ":")),
            "my_body": sealed,
            "my_wrapping_key_id": None if sealed_by is None else sealed_by.kid,
            "my_data_key_number": None if sealed_by is None else sealed_by.number,
            "delay": in_microseconds(delay),
            **self._now(),
        }
        try:
            # The application's engine may log parameters, and these hold a body.
            with without_logging(connection):
                if connection.scalar(self._statement(publish, dialect), parameters) is not None:
                    return
                known = connection.scalar(self._statement(topic_of, dialect), {"my_message_id": message.message_id})
        except StatementError as error:
            error.hide_parameters = True
            remedy = explained(error)
            if isinstance(remedy, ConfigurationError):
                raise ConfigurationError(f"The database has no table {OUTBOX}, or an old one: {UPGRADE}.") from None
            raise
        if known not in (None, message.topic):
            raise ValueError(
                f"message_id: a message of another topic has this id already ({known!r}). Receivers tell messages by their "
                "ids, so give each its own."
            )

    # Relays.

    def claim(self, holder: bytes, *, limit: int, hold: float) -> Sequence[StoredMessage]:
        def work(connection: Connection) -> list[Any]:
            with transaction(connection):
                if connection.dialect.name == POSTGRESQL:
                    connection.execute(self._statement(relay_lock))
                # A statement of its own: it must see what the relay before us committed.
                parameters = {"holder": holder, "limit": limit, "hold": in_microseconds(hold), **self._now()}
                return list(connection.execute(self._statement(claim), parameters))

        # The databases return updated rows in any order.
        claimed = sorted(Claimed(*row) for row in self._database.run(work))
        return [row.stored() for row in claimed]

    def confirm(self, holder: bytes, seqs: Sequence[int]) -> int:
        statement = keep_confirmed if self._keep else delete_confirmed
        return self._write(statement, holder=holder, seqs=list(seqs), **(self._now() if self._keep else {}))

    def delay(self, holder: bytes, seq: int, *, pause: float, error: str) -> None:
        self._write(delay, holder=holder, my_seq=seq, pause=in_microseconds(pause), error=error, **self._now())

    def bury(self, holder: bytes, seq: int, *, error: str) -> None:
        self._write(bury, holder=holder, my_seq=seq, error=error)

    def release(self, holder: bytes) -> None:
        self._write(release, holder=holder)

    # Operators, the janitor and the doctor.

    def sweep(self, *, horizon: float, limit: int) -> int:
        """Delete up to this many messages that were published `keep` seconds before the horizon."""
        until = in_microseconds(horizon - self._keep)
        return self._write(expire, until=until, limit=limit)

    def counts(self) -> OutboxCounts:
        """Count what waits."""
        waiting, dead, oldest = self._database.run(lambda c: c.execute(self._statement(counts), self._now()).one())
        return OutboxCounts(int(waiting), int(dead), max(oldest or 0, 0) / 1e6)

    def rows(self, *, limit: int, only_dead: bool = False) -> list[OutboxRow]:
        """Return the first messages that are not sent, dead ones first."""
        parameters = {"limit": limit, "only_dead": int(only_dead), **self._now()}
        found = self._database.run(lambda c: c.execute(self._statement(rows), parameters).all())
        return [
            OutboxRow(
                row.seq,
                row.message_id,
                row.topic,
                row.state,
                row.attempts,
                row.age / 1e6,
                max(row.wait, 0) / 1e6,
                row.error,
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
        parameters = {"newest": newest, "after": after, "limit": limit}
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
            lacking = list(connection.execute(_PRIVILEGES).scalars())
            if not lacking:
                return []
            named = ", ".join(lacking)
            return [f"The database's role may not use the table {OUTBOX}: grant it {named}."]

        return self._database.run(work)

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
        parameters = {"my_seq": seq, **self._now()}
        topic: str | None = self._database.run(lambda c: c.scalar(self._statement(statement), parameters))
        return topic

    def _write(self, statement: Callable[[Dialect], Any], **parameters: Any) -> int:
        return self._database.run(lambda c: c.execute(self._statement(statement), parameters).rowcount)

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


def _refuse_autocommit(connection: Connection) -> None:
    if commits_each_statement(connection):
        raise ConfigurationError(
            "db.session commits each statement by itself (isolation level AUTOCOMMIT), so a message could be sent whose rows "
            "are rolled back. Use another isolation level for the engine of the default bind."
        )
