"""Keep messages in the application's database: insert them with its session, and let relays claim and delete them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import Session

from flask_idempotency.engine import outbox
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.keys import TID_BYTES
from flask_idempotency.engine.model import SealedBy
from flask_idempotency.engine.store import Clock, MissingGrant, store_time
from flask_idempotency.stores.sql import dialects, schema
from flask_idempotency.stores.sql import outbox_statements as statements
from flask_idempotency.stores.sql.admin.grants import ALL, OUTBOX_NUMBERS, TO_PUBLISH, lacking, missing
from flask_idempotency.stores.sql.capability import Make, SqlCapability
from flask_idempotency.stores.sql.database import Database, refuse_inherited, transaction
from flask_idempotency.stores.sql.dialects import in_microseconds, kind_of, made
from flask_idempotency.stores.sql.engines import without_logging
from flask_idempotency.stores.sql.errors import explained, forbidden, lacks_grants
from flask_idempotency.stores.sql.migrations import upgrade_outbox
from flask_idempotency.stores.sql.mysql import in_turn
from flask_idempotency.stores.sql.naming import NamedConnection, options
from flask_idempotency.stores.sql.transactional.listeners import role_of

UPGRADE: Final = (
    "run `flask idempotency db upgrade`, or, where Alembic creates the tables, write a migration that calls "
    "`sql.upgrade(op.get_bind())` (see docs/guides/outbox.md)"
)

ADOPTED: Final = 1000
"""How many messages of the release before one statement reads."""


def _stored(row: Any) -> outbox.StoredMessage:
    """Decode a message. Its columns may be of any type: another program may have written them."""
    damaged: str | None = None
    values: dict[str, str | None] = {}
    for name in ("message_id", "topic", "key", "tenant", "headers", "wrapping_key_id"):
        value = getattr(row, name)
        values[name] = _shown(value)
        if isinstance(value, bytes) and values[name] != value.decode("utf-8", "ignore"):
            damaged = damaged or f"its {name.removeprefix('message_')} is unreadable"
    kid = values["wrapping_key_id"]
    by = None if kid is None else SealedBy(kid, row.data_key_number or 0)
    former, headers = _headers_of(values["headers"] or "", sealed=by is not None)
    # Names beside a seal are not read: another program may have planted them.
    in_clear = by is None or former
    message = outbox.Message(
        values["message_id"] or "",
        values["topic"] or "",
        b"" if row.body is None else bytes(row.body),
        key=values["key"] if in_clear else None,
        headers=headers or {},
        tenant=values["tenant"] if in_clear else None,
    )
    others = {
        "tenant is": row.tenant_id is None or len(row.tenant_id) == TID_BYTES,
        "lane is": row.lane is None or len(row.lane) == outbox.LANE_BYTES,
        "body is": row.body is not None,
        "number of attempts is": row.attempts is not None,
        "headers are": headers is not None,
    }
    damaged = damaged or next((f"its {name} unreadable" for name, readable in others.items() if not readable), None)
    if in_clear:
        # A sealed body is longer, and cannot be planted.
        damaged = damaged or outbox.flaw_of(message if by is None else replace(message, body=b""))
    tenant_id = None if row.tenant_id is None else bytes(row.tenant_id)
    lane = None if row.lane is None else bytes(row.lane)
    return outbox.StoredMessage(
        row.seq, message, row.attempts or 0, lane, tenant_id, by, former=former, damaged=damaged
    )


def _shown(value: Any) -> str | None:
    """Return a text column. On SQLite, its bytes may be no text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _said(value: Any) -> str:
    """Return a text column for a terminal."""
    return printable(_shown(value) or "")


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


class OutboxTable(SqlCapability):
    """Implements `OutboxQueue`, and inserts messages with the application's session.

    `database` opens connections of its own for relays. `names` has the namespace whose messages these are. `keep` is how many
    seconds confirmed messages stay. Tests pass `clock`.
    """

    def __init__(
        self, database: Database, names: outbox.OutboxNames, *, keep: float = 0.0, clock: Clock = store_time
    ) -> None:
        self._clock = clock
        super().__init__(database, now=lambda: None if (now := self._clock()) is None else in_microseconds(now))
        self._names = names
        self._keep = keep

    # With the application's session.

    def connection_of(self, session: Session, engine: sa.Engine) -> sa.Connection:
        """Write the rows of this session, and return the connection of its transaction on this engine.

        Raises `ConfigurationError` if the session commits each statement by itself.
        """
        # Rows first: their locks put the transactions of one key in order, and so their messages.
        session.flush()
        connection = session.connection(bind_arguments={"bind": engine})
        refuse_inherited(connection)
        if dialects.commits_each_statement(connection):
            raise ConfigurationError(
                "db.session commits each statement by itself (isolation level AUTOCOMMIT), so a message could be sent whose "
                "rows are rolled back. Use another isolation level for the engine of the default bind."
            )
        self._refuse_spaces(connection)
        return connection

    def _refuse_spaces(self, connection: sa.Connection) -> None:
        """On MySQL, refuse a namespace that ends in a space. All other names have no space, or are keyed hashes there."""
        padded = any(each.endswith(" ") for each in self._names.namespaces)
        if padded and kind_of(connection.dialect.name) == dialects.MYSQL:
            raise ConfigurationError(
                "IDEMPOTENCY_NAMESPACE ends in a space. MariaDB and MySQL compare names without it, so a relay would take the "
                "messages of the namespace without a space. Remove it."
            )

    def publish(
        self,
        connection: sa.Connection,
        message: outbox.Message,
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
        dialect, names = dialects.dialect_of(connection.dialect.name), self._names
        kid, number = (None, None) if sealed_by is None else (sealed_by.kid, sealed_by.number)
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
            "my_key": message.key if kid is None else None,
            "my_tenant": message.tenant if kid is None else None,
            "my_tenant_id": tenant_id,
            "my_headers": json.dumps([dict(message.headers)] if kid is None else [], separators=(",", ":")),
            "my_body": sealed,
            "my_wrapping_key_id": kid,
            "my_data_key_number": number,
            "my_lane": lane,
            "my_digest": digest,
            "delay": in_microseconds(delay),
            "now": self._now(),
        }
        try:
            # The application's engine may log parameters, and these hold a body.
            with without_logging(connection):
                # The relay may not use a SQLite database in memory, which publishes nevertheless.
                named_by = options(None) if dialect.name == dialects.SQLITE else self._database.options
                ours = NamedConnection(connection, named_by)
                if ours.scalar(made(statements.publish, dialect), parameters) is not None:
                    return
                known = ours.execute(made(statements.published, dialect), names_of_it).first()
        except StatementError as error:
            error.hide_parameters = True
            if tables := forbidden(error, self._database.schema):
                remedy = lacks_grants(role_of(connection), tables)
                raise ConfigurationError(f"{remedy[0].upper()}{remedy[1:]}.") from None
            if isinstance(explained(error), ConfigurationError):
                raise ConfigurationError(
                    f"The database has no table {schema.outbox.name}, or an old one: {UPGRADE}."
                ) from None
            raise
        if known is not None and (what := _difference(known, message, lane, digest)) is not None:
            raise ValueError(
                f"message_id: a message of this tenant has this id already, and another {what}. Receivers tell messages by "
                "their ids, so give each its own. Without a message_id, the id comes from the request and the number of the "
                "call: publish the same messages in each attempt."
            )

    # Relays.

    def adopt(self, is_ours: Callable[[outbox.FormerRow], bool]) -> None:
        """Give the messages of the release before, and of the namespace before, to this one. `is_ours` chooses the former."""
        names = self._names

        def work(connection: sa.Connection) -> None:
            with transaction(connection):
                if names.former is not None:
                    moved = {"former": names.former, "my_namespace": names.namespace}
                    for statement in (statements.move, statements.move_lanes):
                        self._send(connection, statement, moved)
                page: dict[str, Any] = {"after": 0, "limit": ADOPTED}
                while found := self._send(connection, statements.unadopted, page).all():
                    page["after"] = found[-1].seq
                    changes = []
                    for row in found:
                        topic, key = _shown(row.topic) or "", _shown(row.key)
                        if is_ours(outbox.FormerRow(topic, key, _shown(row.tenant), row.tenant_id, bool(row.sealed))):
                            ours = {"my_namespace": names.namespace, "my_lane": names.lane(topic, key)}
                            changes.append({"my_seq": row.seq, **ours})
                    if changes:
                        self._send(connection, statements.adopt, changes)

        self._database.run(work)

    def claim(self, holder: bytes, *, topics: outbox.Topics, limit: int, hold: float) -> Sequence[outbox.StoredMessage]:
        def work(connection: sa.Connection) -> list[Any]:
            self._refuse_spaces(connection)
            with in_turn(connection) as mine, transaction(connection):
                if not mine:
                    return []
                if connection.dialect.name == dialects.POSTGRESQL:
                    self._send(connection, statements.relay_lock, {})
                # A statement of its own: it must see what the relay before us committed.
                parameters = {
                    "holder": holder,
                    "limit": limit,
                    "hold": in_microseconds(hold),
                    "my_namespace": self._names.namespace,
                    **statements.patterns(topics, self._database.dialect),
                    "now": self._now(),
                }
                return list(self._send(connection, statements.claim, parameters))

        # The databases return updated rows in any order.
        claimed = [_stored(row) for row in self._database.run(work)]
        return sorted(claimed, key=lambda each: (each.attempts, each.seq))

    def confirm(self, holder: bytes, seqs: Sequence[int]) -> int:
        make = statements.keep_confirmed if self._keep else statements.delete_confirmed
        return self._change(make, holder=holder, seqs=list(seqs))

    def delay(self, holder: bytes, seq: int, *, pause: float, error: str) -> None:
        self._change(statements.delay, holder=holder, my_seq=seq, pause=in_microseconds(pause), error=error)

    def bury(self, holder: bytes, seq: int, *, error: str) -> None:
        self._change(statements.bury, holder=holder, my_seq=seq, error=error)

    def release(self, holder: bytes, seqs: Sequence[int]) -> None:
        self._change(statements.release, holder=holder, seqs=list(seqs))

    def put_off(self, holder: bytes, seqs: Sequence[int], *, pause: float) -> None:
        self._change(statements.put_off, holder=holder, seqs=list(seqs), pause=in_microseconds(pause))

    # Operators, the janitor and the doctor.

    def sweep(self, *, horizon: float, limit: int) -> int:
        """Delete up to this many messages that were published `keep` seconds before the horizon."""
        until = in_microseconds(horizon - self._keep)
        return self._change(statements.expire, until=until, limit=limit, namespaces=self._namespaces)

    def counts(self) -> outbox.OutboxCounts:
        """Count what waits."""
        ((waiting, dead, oldest),) = self._rows(statements.counts, namespaces=self._namespaces)
        return outbox.OutboxCounts(int(waiting), int(dead), max(oldest or 0, 0) / 1e6)

    def failing(self, *, since: float) -> list[outbox.FailingTopic]:
        """Return the topics with messages that have failed for longer than this many seconds."""
        found = self._rows(statements.failing, since=in_microseconds(since), namespaces=self._namespaces)
        return [
            outbox.FailingTopic(_said(row.topic), row.messages, max(row.oldest, 0) / 1e6, _said(row.error))
            for row in found
        ]

    def topics(self) -> list[outbox.OutboxTopic]:
        """Return the topics with messages that are not sent, those with dead and failing ones first."""
        found = []
        for row in self._rows(statements.topics, namespaces=self._namespaces):
            dead, failing = int(row.dead), int(row.failing)
            error = None if row.error is None else _said(row.error)
            waiting, oldest = row.messages - dead - failing, max(row.oldest, 0) / 1e6
            found.append(outbox.OutboxTopic(_said(row.topic), dead, failing, waiting, oldest, error))
        return sorted(found, key=lambda each: (-each.dead, -each.failing, each.topic))

    def rows(self, *, limit: int, only_dead: bool = False, topic: str | None = None) -> list[outbox.OutboxRow]:
        """Return the first messages that are not sent: dead ones first, then those whose last attempt failed."""
        chosen: dict[str, Any] = {"only_dead": int(only_dead), "only_topic": topic, "namespaces": self._namespaces}
        found = self._rows(statements.rows, limit=limit, **chosen)
        return [
            outbox.OutboxRow(
                row.seq,
                _said(row.message_id),
                _said(row.topic),
                row.state,
                row.attempts or 0,
                max(row.age, 0) / 1e6,
                max(row.wait, 0) / 1e6,
                None if row.error is None else _said(row.error),
                row.behind,
            )
            for row in found
        ]

    def retry(self, seq: int) -> str | None:
        """Let this message be sent now, and return its topic. None: a relay holds it, or it is gone."""
        return self._settle(statements.retry, seq)

    def discard(self, seq: int) -> str | None:
        """Delete this message, and return its topic. None: no attempt has failed, a relay holds it, or it is gone."""
        return self._settle(statements.discard, seq)

    def sealed_before(self, newest: str, *, after: int, limit: int) -> list[outbox.StoredMessage]:
        """Return messages that another key of the ring seals than the newest."""
        ours = self._namespaces
        found = self._rows(statements.sealed_before, newest=newest, after=after, limit=limit, namespaces=ours)
        return [_stored(row) for row in found]

    def reseal(self, stored: outbox.StoredMessage, body: bytes, by: SealedBy) -> bool:
        """Replace the body of this message. Return False if it is gone or changed."""
        seen: dict[str, Any] = {
            "my_seq": stored.seq,
            "seen_number": 0 if stored.sealed_by is None else stored.sealed_by.number,
        }
        new: dict[str, Any] = {"my_body": body, "my_wrapping_key_id": by.kid, "my_data_key_number": by.number}
        return bool(self._change(statements.reseal, **seen, **new))

    def faults(self) -> list[str]:
        """Return why messages cannot be published or sent: a sentence for each fault, with its remedy."""

        def work(connection: sa.Connection) -> list[str]:
            gaps = schema.lacks(connection, (schema.outbox.name,))
            if gaps:
                what = ", ".join((*gaps.tables, *gaps.columns, *gaps.indexes))
                return [
                    f"The outbox is not complete in this database: {what} is missing. {UPGRADE[0].upper()}{UPGRADE[1:]}."
                ]
            if connection.dialect.name != dialects.POSTGRESQL:
                return []
            if fault := schema.cache_fault(
                connection, OUTBOX_NUMBERS, "messages of one key may be sent in another order"
            ):
                return [fault]
            found = lacking(connection, {schema.outbox.name: ALL}, OUTBOX_NUMBERS)
            on_sequence = [f"{right} on the sequence {OUTBOX_NUMBERS}" for right in found.pop(OUTBOX_NUMBERS, ())]
            rights = ", ".join((*found.get(schema.outbox.name, ()), *on_sequence))
            return (
                [f"The database's role may not use the table {schema.outbox.name}: grant it {rights}."]
                if rights
                else []
            )

        return self._database.run(work)

    def missing_grants(self, role: str) -> list[MissingGrant]:
        """Return what this role lacks to publish messages in the transaction of a view."""
        return self._database.run(lambda connection: list(missing(connection, role, TO_PUBLISH, OUTBOX_NUMBERS)))

    def advice(self) -> list[str]:
        """Return settings that cost speed only: there are none."""
        return []

    def upgrade(self) -> list[str]:
        """Create the table if it is missing."""
        return upgrade_outbox(self._database.base)

    def close(self) -> None:
        """Close the connections for relays."""
        self._database.close()

    def _settle(self, make: Make, seq: int) -> str | None:
        found = self._row(make, my_seq=seq, namespaces=self._namespaces)
        return None if found is None else _shown(found.topic)

    @property
    def _namespaces(self) -> list[str]:
        return list(self._names.namespaces)


def _difference(known: Any, message: outbox.Message, lane: bytes | None, digest: bytes) -> str | None:
    """Return what a message has that differs from this one, which is to be published under the same id."""
    if _shown(known.topic) != message.topic:
        return "topic"
    if known.digest is not None:
        same_key, same = known.lane == lane, known.digest == digest
    else:
        # The release before sealed the body alone, and did not keep a digest of it.
        same_key, same = _shown(known.key) == message.key, known.body in (None, message.body)
    return "key" if not same_key else None if same else "body"
