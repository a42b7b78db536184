"""Declare the tables and indexes, and find out which of them a database lacks.

`create_all` and Alembic make the tables from here, and so does an upgrade.

Times are whole microseconds since the epoch by the database server's clock, so arithmetic is exact on every database.
Responses are bytes and not JSON, so that a replay is exactly what the server sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from threading import Lock
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import LONGBLOB, LONGTEXT
from sqlalchemy.engine.reflection import ObjectKind, ObjectScope
from sqlalchemy.exc import DBAPIError, InvalidRequestError

from flask_idempotency.stores.sql.dialects import DIALECTS, MYSQL, MYSQL_NAMES, POSTGRESQL, SUPPORTED
from flask_idempotency.stores.sql.naming import named, prefix, schema_of

# What a `MetaData` cannot say, for applications that make the tables with `create_all`, and for upgrades.
STORAGE: Final = {
    # Responses arrive compressed, so the server need not try. A record is written twice and grows in between: free space on
    # the page keeps both versions there.
    "idempotency_records": "ALTER TABLE %(fullname)s SET (fillfactor = 80), ALTER COLUMN response SET STORAGE EXTERNAL",
    # Its rows are updated often: with free space on the page, an update touches no index.
    "idempotency_quota": "ALTER TABLE %(fullname)s SET (fillfactor = 50)",
    "idempotency_steps": "ALTER TABLE %(fullname)s ALTER COLUMN payload SET STORAGE EXTERNAL",
}
"""Statements of PostgreSQL, by the table."""
# From the clock and not from one, so that fences rise even over tables that were dropped and created again.
_FENCE_SEQUENCE: Final = (
    "SELECT setval(pg_get_serial_sequence('%(fullname)s', 'number'),"
    " (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)"
)


def fact(kind: str, place: str, name: str, value: str, *, rises: bool = False, where: str = "1 = 1") -> str:
    """Return the statement that writes a row of this table of facts. One that is there stays, or rises to a higher value."""
    written = f"INSERT INTO {place} (name, value) SELECT '{name}', {value} WHERE {where}"
    if kind == MYSQL:
        both = "idempotency_meta.value, VALUES(value)"
        return f"{written} ON DUPLICATE KEY UPDATE value = {f'greatest({both})' if rises else 'idempotency_meta.value'}"
    higher = "UPDATE SET value = excluded.value WHERE idempotency_meta.value < excluded.value"
    return f"{written} ON CONFLICT (name) DO {higher if rises else 'NOTHING'}"


def facts(kind: str, place: str) -> Iterator[str]:
    """Yield the statements that write the store's number, and the last fence where no sequence keeps it.

    The number never changes. It is random, so that no two databases have the same: it tells their responses apart in a Redis
    cache that they share.
    """
    yield fact(kind, place, "store", DIALECTS[kind].random)
    if kind != POSTGRESQL:
        yield fact(kind, place, "fence", DIALECTS[kind].clock, rises=True)


VERSION: Final = 6
"""The number of the last line of `migrations.STEPS`: what is declared here is complete with it."""

FENCES: Final = "idempotency_fence_numbers_number_seq"
"""The sequence that PostgreSQL creates for that table's key. Alembic creates no other kind of sequence."""

PROCESSING: Final = "processing"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
"""Completed with an error response. It replays like any other; only auditors see the difference."""
QUARANTINED: Final = "quarantined"
RELEASED: Final = "released"
"""A claim treats it as absent. The row stays for a day, so that an auditor can see what became of the key."""

BEGUN: Final = "begun"
FINISHED: Final = "finished"
"""The states of a durable step."""

NEW: Final = "new"
TAKEN_OVER: Final = "taken-over"
REPLAY: Final = "replay"
UNKNOWN: Final = "unknown"
"""The states of an observation: what the watched request found while it runs, then what the next request finds."""

WATCHED: Final = (NEW, TAKEN_OVER)
"""The states of an observation whose request has not ended."""

ANSWERED: Final = (COMPLETED, FAILED)
"""The states of a completed record."""

STATES: Final = (PROCESSING, COMPLETED, FAILED, QUARANTINED, RELEASED)

TAKEOVER: Final = "takeover"
QUARANTINE: Final = "quarantine"

RESPONSES: Final = "responses"
"""A kind of bucket: completed records by the time at which they expire, and the bytes of their responses."""
NEW_KEYS: Final = "new_keys"
"""A kind of bucket: new keys by the end of their window. `window_length` says how long that window is."""


def _one_of(column: str, words: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(word) for word in words)})"


_BYTES: Final = sa.LargeBinary().with_variant(LONGBLOB(), *MYSQL_NAMES)
_TEXT: Final = sa.Text().with_variant(LONGTEXT(), *MYSQL_NAMES)
"""On MySQL a BLOB and a TEXT hold 64 KiB. By these names, because Alembic compares the names of types."""

_INDEXED: Final = 255
"""How many letters of a text MySQL keeps in an index. An index has 3,072 bytes, and a letter takes up to four."""

_OF_MYSQL: Final[dict[str, Any]] = {
    f"{name}_{option}": value
    for name in MYSQL_NAMES
    # Each letter is another one, in the case too.
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


def _bytes(length: int) -> Any:
    """Return the type of bytes that a key may hold. On MySQL no key holds a BLOB."""
    return sa.LargeBinary(length).with_variant(sa.VARBINARY(length), *MYSQL_NAMES)


def _table(name: str, *parts: sa.Column[Any] | sa.CheckConstraint, comment: str, **options: Any) -> sa.Table:
    return sa.Table(name, metadata, *parts, comment=comment, **_OF_MYSQL, **options)


def _key(name: str, kind: Any, comment: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, kind, primary_key=True, autoincrement=False, comment=comment)


def _required(name: str, kind: Any, comment: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, comment=comment)


def _from_zero(name: str, kind: Any, comment: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, comment=comment, server_default=sa.text("0"))


def _optional(name: str, kind: Any, comment: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, kind, comment=comment)


def _index(table: sa.Table, name: str, *columns: str, where: str | None = None, unique: bool = False) -> None:
    """Declare an index of these columns, on the rows that meet a condition. On MySQL it is on all rows."""
    condition = None if where is None else sa.text(where)
    lengths = {each: _INDEXED for each in columns if table.c[each].type is _TEXT}
    sa.Index(
        name,
        *(table.c[each] for each in columns),
        unique=unique,
        postgresql_where=condition,
        sqlite_where=condition,
        mysql_length=lengths,
        mariadb_length=lengths,
    )


metadata: Final = sa.MetaData()

records: Final = _table(
    "idempotency_records",
    _key("record_id", _bytes(32), "HMAC of the scope and the client's key; neither can be recovered from it"),
    _required("tenant_id", _bytes(16), "HMAC of the namespace and the tenant"),
    _required("state", sa.String(11)),
    _required("token", _bytes(16), "random, new with every claim; compared, never ordered"),
    _required("fence", sa.BigInteger, "rises with every claim"),
    _required("attempt", sa.Integer),
    _required("fingerprint", _bytes(17)),
    _required("on_expiry", sa.String(10), "what happens when the lease expires: takeover or quarantine"),
    _required("tenant", _TEXT),
    _required("principal", _TEXT),
    _required("method", _TEXT),
    _required("endpoint", _TEXT, "the Flask endpoint"),
    _required("requested_at", sa.BigInteger),
    _optional("lease_expires_at", sa.BigInteger, "set while processing or quarantined"),
    _optional("completed_at", sa.BigInteger),
    _optional("expires_at", sa.BigInteger, "never set while processing or quarantined"),
    _optional("status", sa.SmallInteger),
    _optional("response_size", sa.BigInteger, "bytes of the plain response, as quotas count them"),
    _optional("response", _BYTES, "status, headers and body, as the codec encoded them"),
    _optional("reason", _TEXT, "why the record is quarantined"),
    _required("in_quota", sa.SmallInteger, "1: idempotency_quota counts this record"),
    _optional("wrapping_key_id", _TEXT, "id of the key that wraps the data key; NULL: the response is not encrypted"),
    _optional("data_key_number", sa.Integer, "number of the tenant's data key; 0: the response was erased"),
    _optional(
        "succeeded",
        sa.SmallInteger,
        "of an unreadable response, 1: a success; in flight, 1: other requests may wait for it",
    ),
    _from_zero("resolver_due_at", sa.BigInteger, "while quarantined: the earliest time of the next call to a resolver"),
    _from_zero("steps", sa.SmallInteger, "recorded steps with an effect; above 0, a release keeps the record"),
    _from_zero("step_write", sa.Integer, "number of the last write to the journal by this fence"),
    _optional(
        "response_expires_at",
        sa.BigInteger,
        "set if the record outlives its response: when the response is removed",
    ),
    sa.CheckConstraint(_one_of("state", STATES), name="idempotency_state"),
    sa.CheckConstraint(_one_of("on_expiry", (TAKEOVER, QUARANTINE)), name="idempotency_on_expiry"),
    sa.CheckConstraint(
        f"({_one_of('state', (PROCESSING, QUARANTINED))} AND lease_expires_at IS NOT NULL AND expires_at IS NULL)"
        f" OR ({_one_of('state', (COMPLETED, FAILED, RELEASED))} AND expires_at IS NOT NULL)",
        name="idempotency_deadline",
    ),
    sa.CheckConstraint(
        f"NOT {_one_of('state', ANSWERED)}"
        " OR (completed_at IS NOT NULL AND status IS NOT NULL AND response_size IS NOT NULL AND response IS NOT NULL)",
        name="idempotency_response",
    ),
    comment="One row for each idempotency key. Only flask_idempotency writes to it.",
)
_index(records, "idempotency_expired_leases", "lease_expires_at", where="state = 'processing'")
_index(records, "idempotency_quarantined", "resolver_due_at", "lease_expires_at", where="state = 'quarantined'")
_index(records, "idempotency_expiry", "expires_at", where="expires_at IS NOT NULL")
_index(
    records,
    "idempotency_response_expiry",
    "response_expires_at",
    where="response_expires_at IS NOT NULL AND coalesce(data_key_number, 1) <> 0",
)
# Only records that a quota counts: few, and none without quotas.
_index(
    records,
    "idempotency_unfinished",
    "tenant_id",
    "lease_expires_at",
    where="in_quota = 1 AND lease_expires_at IS NOT NULL",
)
meta: Final = _table(
    "idempotency_meta",
    _key("name", sa.String(40)),
    _required("value", sa.BigInteger),
    comment="The schema's version, the store's own number, and on SQLite the last fence.",
)
fence_numbers: Final = _table(
    "idempotency_fence_numbers",
    sa.Column("number", sa.BigInteger, primary_key=True),
    comment="Always empty: on PostgreSQL, fences come from the sequence of its key.",
)

tenants: Final = _table(
    "idempotency_tenants",
    _key("tenant_id", _bytes(16)),
    _required("last_key_number", sa.Integer, "the highest number that any data key of this tenant had"),
    _required("shredded_key_number", sa.Integer, "data keys up to this number are shredded"),
    _optional("erased_at", sa.BigInteger, "responses of keys first used until then are erased"),
    _optional("limit_records", sa.BigInteger),
    _optional("limit_bytes", sa.BigInteger),
    _optional("limit_in_flight", sa.BigInteger),
    _optional("limit_new_keys", sa.BigInteger),
    _optional("limit_window", sa.BigInteger, "window of limit_new_keys, in microseconds"),
    comment="One row for each tenant that has had a data key or its own limits.",
)
data_keys: Final = _table(
    "idempotency_data_keys",
    _key("tenant_id", _bytes(16)),
    _key("number", sa.Integer),
    _required("wrapping_key_id", _TEXT, "id of the key that wraps it"),
    _required("wrapped_key", _BYTES),
    _required("created_at", sa.BigInteger),
    _optional("disabled_at", sa.BigInteger, "since then the key decrypts, and encrypts nothing new"),
    comment="Wrapped data keys that encrypt responses. Deleting a row erases every response under it.",
)
quota_buckets: Final = _table(
    "idempotency_quota",
    _key("tenant_id", _bytes(16)),
    _key("kind", sa.String(9)),
    _key("bucket_end", sa.BigInteger, "when everything in this bucket expires"),
    _key("window_length", sa.BigInteger, "length of a window of new keys, in microseconds; 0 for responses"),
    _key("shard", sa.SmallInteger, "spreads writers, so that few wait for each other"),
    _required("records", sa.BigInteger),
    _required("bytes", sa.BigInteger),
    comment="What each tenant uses, by the time it expires. Add up the shards: one may be below 0.",
)

tasks: Final = _table(
    "idempotency_tasks",
    _key("name", sa.String(40)),
    _optional("reported_at", sa.BigInteger),
    _optional("report", _TEXT, "report of the last run, as JSON"),
    _optional("locked_by", _bytes(16), "token of the janitor that runs the task; the lock only saves work"),
    _optional("lock_expires_at", sa.BigInteger),
    comment="One row for each task that a janitor has run.",
)

outbox: Final = _table(
    "idempotency_outbox",
    sa.Column(
        "seq",
        # SQLite counts only in a column of this very type.
        sa.BigInteger().with_variant(sa.Integer, "sqlite"),
        primary_key=True,
        comment="the order of messages with one topic and key",
    ),
    _required("message_id", _TEXT, "the same in every attempt; receivers tell repeats by it"),
    _required("topic", _TEXT),
    _optional("key", _TEXT, "messages with one topic and key are sent in order"),
    _optional("tenant", _TEXT),
    _optional("tenant_id", _bytes(16), "set if the body is encrypted: HMAC of the namespace and the tenant"),
    _required("headers", _TEXT, "a JSON object of strings"),
    _required("body", _BYTES),
    _optional("wrapping_key_id", _TEXT, "id of the key that wraps the data key; NULL: the body is not encrypted"),
    _optional("data_key_number", sa.Integer, "number of the tenant's data key"),
    _required("created_at", sa.BigInteger),
    _required("due_at", sa.BigInteger, "the earliest time of the next attempt"),
    _from_zero("attempts", sa.Integer, "attempts that failed"),
    _optional("holder", _bytes(16), "token of the relay that sends the message"),
    _optional("held_until", sa.BigInteger),
    _from_zero("dead", sa.SmallInteger, "1: it can never be sent"),
    _optional("error", _TEXT, "why the last attempt failed"),
    _optional("published_at", sa.BigInteger, "set if confirmed messages are kept"),
    _optional("namespace", _TEXT, "of the application that published it; NULL: a release before namespaces did"),
    _optional(
        "sent_id",
        _TEXT,
        "the id that receivers see; message_id is then a keyed hash of the namespace, the tenant and this id",
    ),
    _optional("lane", _bytes(16), "keyed hash of the topic and the key; messages with one lane are sent in order"),
    _optional("digest", _bytes(16), "keyed digest of the topic, the key and the body"),
    _optional(
        "ready_at",
        sa.BigInteger,
        "the earliest time of the next attempt; due_at is then for relays of the release before",
    ),
    comment="One row for each message that an application has published. A relay sends it and deletes it.",
    sqlite_autoincrement=True,
)
_index(outbox, "idempotency_outbox_message", "message_id", unique=True)
_index(outbox, "idempotency_outbox_unsent", "seq", where="published_at IS NULL")
_index(outbox, "idempotency_outbox_order", "topic", "key", "seq", where="published_at IS NULL AND key IS NOT NULL")
_index(outbox, "idempotency_outbox_turn", "namespace", "attempts", "seq", where="published_at IS NULL AND dead = 0")
_index(outbox, "idempotency_outbox_lane", "namespace", "lane", "seq", where="published_at IS NULL AND lane IS NOT NULL")
_index(outbox, "idempotency_outbox_former", "seq", where="published_at IS NULL AND namespace IS NULL")
_index(outbox, "idempotency_outbox_kept", "published_at", where="published_at IS NOT NULL")

steps: Final = _table(
    "idempotency_steps",
    _key("record_id", _bytes(32)),
    _key("step_id", _bytes(12), "keyed hash of the name and the item of the step"),
    _required("tenant_id", _bytes(16)),
    _required("requested_at", sa.BigInteger, "of the record: a key that is released and runs again has another"),
    _required("position", sa.BigInteger, "order of steps that began in the same microsecond"),
    _required("name", sa.String(64)),
    _required("effects", sa.String(13)),
    _required("state", sa.String(8)),
    _required("in_line", sa.SmallInteger, "1: the view's own thread took the step"),
    _required("kept", sa.SmallInteger, "0: the result could not be kept"),
    _required("fence", sa.BigInteger, "of the claim that entered the step"),
    _required("digest", _BYTES, "keyed digest of the arguments that are compared"),
    _required("took", sa.BigInteger, "microseconds that the function ran"),
    _required("began_at", sa.BigInteger),
    _optional("finished_at", sa.BigInteger),
    _required("payload_size", sa.BigInteger, "bytes of the plain item and result, as quotas count them"),
    _optional("payload", _BYTES, "item and result, as the codec encoded them"),
    _optional("wrapping_key_id", _TEXT, "id of the key that wraps the data key; NULL: the payload is not encrypted"),
    _optional("data_key_number", sa.Integer, "number of the tenant's data key; 0: the payload was erased"),
    sa.CheckConstraint(_one_of("state", (BEGUN, FINISHED)), name="idempotency_step_state"),
    sa.CheckConstraint(
        _one_of("effects", ("plain", "deduplicated", "transactional", "pure")), name="idempotency_step_effects"
    ),
    comment="One row for each durable step of a request that is not completed. Only flask_idempotency writes to it.",
)
_index(steps, "idempotency_steps_of_tenant", "tenant_id")

activity: Final = _table(
    "idempotency_activity",
    _key("owner", _bytes(3), "mark of the application"),
    _key("bucket_length", sa.BigInteger, "a minute or an hour"),
    _key("bucket_start", sa.BigInteger),
    _required("expires_at", sa.BigInteger),
    _required("counts", _TEXT, "a JSON object: endpoint, counter, number"),
    comment="One row for each minute of a day and each hour of a month: what happened at each endpoint.",
)
_index(activity, "idempotency_activity_expiry", "expires_at")
activity_tokens: Final = _table(
    "idempotency_activity_tokens",
    _key("token", _bytes(16), "of a call that has added its counts"),
    _required("expires_at", sa.BigInteger),
    comment="One row for each call of the last minutes, so that a repeated one adds nothing.",
)
_index(activity_tokens, "idempotency_activity_tokens_expiry", "expires_at")
observations: Final = _table(
    "idempotency_observations",
    _key("record_id", _bytes(32), "as of the record that a claim would make"),
    _required("token", _bytes(16), "of the watched request"),
    _required("fingerprint", _bytes(17)),
    _required("state", sa.String(10)),
    _required("began_at", sa.BigInteger, "when the first request with this key began"),
    _required("watched_at", sa.BigInteger, "when the watched request began"),
    _required("lease_expires_at", sa.BigInteger),
    _required("expires_at", sa.BigInteger),
    sa.CheckConstraint(_one_of("state", (NEW, TAKEN_OVER, REPLAY, UNKNOWN)), name="idempotency_observation_state"),
    comment="One row for each key that was seen in observe mode. No claim reads it.",
)
_index(observations, "idempotency_observations_expiry", "expires_at")
audit: Final = _table(
    "idempotency_audit",
    _key("token", _bytes(16), "of the call, so that a repeated one adds nothing"),
    _required("record_id", _bytes(32)),
    _required("tenant_id", _bytes(16)),
    _required("changed_at", sa.BigInteger),
    _required("expires_at", sa.BigInteger),
    _required("verb", sa.String(20)),
    _required("was", sa.String(20), "state of the record before"),
    _required("step", sa.String(64), "the step that was settled; empty: the record as a whole"),
    _required("actor", _TEXT, "the operator, or resolver"),
    _required("reason", _TEXT),
    _required("forced", sa.SmallInteger, "1: the operator overruled a warning"),
    _required("certain", sa.SmallInteger, "0: the change may not have happened"),
    comment="One row for each change of a record by an operator or a resolver. It outlives the record.",
)
_index(audit, "idempotency_audit_of_record", "record_id", "changed_at")
_index(audit, "idempotency_audit_of_actor", "actor", "changed_at")
_index(audit, "idempotency_audit_of_tenant", "tenant_id")
_index(audit, "idempotency_audit_expiry", "expires_at")
fences: Final = sa.Sequence(FENCES, data_type=sa.BigInteger)
"""In no metadata: PostgreSQL creates it with its table."""


def _complete(table: sa.Table) -> None:
    """Make `create_all` also set storage parameters, and write the version, the store's number and the first fence."""
    if table.name in STORAGE:
        _after(table, STORAGE[table.name], POSTGRESQL)
    elif table.name == meta.name:
        for kind in SUPPORTED:
            version = fact(kind, "%(fullname)s", "schema_version", str(VERSION), rises=True)
            for statement in (version, *facts(kind, "%(fullname)s")):
                _after(table, statement, *(MYSQL_NAMES if kind == MYSQL else (kind,)))
    elif table.name == fence_numbers.name:
        _after(table, _FENCE_SEQUENCE, POSTGRESQL)


def _after(target: sa.Table, statement: str, *dialects: str) -> None:
    ddl: Any = sa.DDL(statement)  # type: ignore[no-untyped-call]
    sa.event.listen(target, "after_create", ddl.execute_if(dialect=dialects))


for _each in metadata.tables.values():
    _complete(_each)


def include_in(metadata: sa.MetaData, *, records: bool = True) -> None:
    """Declare the tables in your own metadata, so that Alembic and Flask-Migrate include them.

    With `IDEMPOTENCY_STORE = "flask-sqlalchemy://"` you need not call it: `Idempotency(app)` does. Call it for a
    metadata of your own, as in `include_in(Base.metadata)`. A second call changes nothing. The tables have no schema name,
    even if the metadata has one.

    Pass `records=False` for the table of the outbox alone, if the records are in another database or in Redis.

    Raises SQLAlchemy's `InvalidRequestError` if a table of yours has the name of one that it declares.
    """
    with _defining:
        there = set(metadata.tables)
        every = _TABLES if records and _RECORDS.name not in there else (outbox,)
        # That of the outbox may have been declared alone before.
        wanted = [table for table in every if table is not outbox or outbox.name not in there]
        if taken := [table.name for table in wanted if table.name in there]:
            raise InvalidRequestError(
                f"this MetaData has a table {taken[0]}, and flask_idempotency declares one of that name"
            )
        # `to_metadata` would give them the schema of the metadata.
        schema, metadata.schema = metadata.schema, None
        try:
            for table in wanted:
                copy = table.to_metadata(metadata)
                # It copies the constraints in any order. CREATE TABLE is to read the same in each process.
                order = {str(each.sqltext): each._creation_order for each in _checks(table)}
                for each in _checks(copy):
                    each._creation_order = order[str(each.sqltext)]
                _complete(copy)
        finally:
            metadata.schema = schema


def _checks(table: sa.Table) -> list[sa.CheckConstraint]:
    return [each for each in table.constraints if isinstance(each, sa.CheckConstraint)]


# Two first requests may both find that the tables are not declared yet.
_defining: Final = Lock()
_TABLES: Final = tuple(metadata.tables.values())
_RECORDS: Final = records


SEEDED: Final = 10**15
"""The clock passed this in 2001. A sequence that started from one never reaches it."""

# Not the sequence itself: a role with USAGE may take numbers, and may not read it.
_UNSEEDED_SEQUENCE: Final = sa.text(
    "SELECT CASE WHEN has_sequence_privilege(to_regclass(:name), 'USAGE, SELECT')"
    " THEN coalesce(pg_sequence_last_value(to_regclass(:name)) < :seeded, true) ELSE false END"
)
# A role may lack the rights for either. The first is for roles that see a view of their provider's.
_CACHED: Final = (
    sa.text("SELECT seqcache FROM pg_catalog.pg_sequence WHERE seqrelid = to_regclass(:name)"),
    sa.text(
        "SELECT cache_size FROM pg_catalog.pg_sequences"
        " WHERE to_regclass(quote_ident(schemaname) || '.' || quote_ident(sequencename)) = to_regclass(:name)"
    ),
)
# A fillfactor that an operator has set stays.
_STORAGE_MISSING: Final = (
    "SELECT EXISTS (SELECT 1 FROM pg_class WHERE oid IN (to_regclass('{schema}idempotency_records'),"
    " to_regclass('{schema}idempotency_quota'))"
    " AND NOT coalesce(array_to_string(reloptions, ',') ~ 'fillfactor=', false))"
)
_STORE_NUMBER_MISSING: Final = "SELECT NOT EXISTS (SELECT 1 FROM {schema}idempotency_meta WHERE name = 'store')"


@dataclass(frozen=True, slots=True)
class SchemaGaps:
    """Names of missing tables, columns, indexes and sequences. False if the schema is complete."""

    tables: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    seed: bool = False
    """True if fences would start from one, below earlier fences."""
    store: bool = False
    """True if the database has no number of its own."""
    storage: bool = False
    """True if the tables lack their storage parameters. That costs speed, not correctness."""

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    @property
    def parts(self) -> bool:
        """True if something is missing that only a migration creates."""
        return bool(self.tables or self.columns or self.indexes or self.sequences)


LATER: Final = {
    records.name: ("steps", "step_write", "response_expires_at"),
    outbox.name: ("namespace", "sent_id", "lane", "digest", "ready_at"),
}
"""Columns that a later release has added. An upgrade adds no other: it would be empty, and the lost one holds what replays."""

RECORD_TABLES: Final = tuple(name for name in metadata.tables if name != outbox.name)
"""The tables that every application with this store needs. Only an application with an outbox needs its table."""


def lacks(connection: sa.Connection, names: Collection[str] = RECORD_TABLES) -> SchemaGaps:
    """Return what the database lacks of these tables. Compare names in the catalogue only, not types or predicates.

    A table that this role may not use, and a view that is broken, are not missing: MySQL's error for them is raised.
    """
    inspector, home, broken = sa.inspect(connection), schema_of(connection), dict[Any, Exception]()
    # Of all tables at once: their columns, and their indexes. SQLAlchemy asks MySQL for each name only if the kind and the
    # scope are ANY. Otherwise it reads a list, which lacks the tables that this role may not use.
    asked = list(names), ObjectKind.ANY, ObjectScope.ANY
    known = inspector.get_multi_columns(home, *asked, unreflectable=broken)
    for error in broken.values():
        raise error
    indexed = inspector.get_multi_indexes(home, *asked)
    there = [name for name in names if (home, name) in known]
    tables = tuple(name for name in names if name not in there)
    columns: list[str] = []
    indexes: list[str] = []
    for name in there:
        table, present = metadata.tables[name], {each["name"] for each in known[home, name]}
        columns += [str(each) for each in table.columns if each.name not in present]
        found = {each["name"] for each in indexed.get((home, name), ())}
        indexes += sorted(str(each.name) for each in table.indexes if each.name not in found)
    postgresql, numbered = connection.dialect.name == POSTGRESQL, fence_numbers.name in names
    sequences = (FENCES,) if postgresql and numbered and not inspector.has_sequence(FENCES, schema=home) else ()
    seed = store = storage = False
    if postgresql and numbered and not (tables or sequences):
        # The others have no sequence of ours: the store takes each fence from the clock if that is ahead.
        unseeded = {"seeded": SEEDED, "name": f"{prefix(connection)}{FENCES}"}
        seed = bool(connection.scalar(_UNSEEDED_SEQUENCE, unseeded))
    if meta.name in there:
        store = bool(connection.scalar(named(connection, _STORE_NUMBER_MISSING)))
    if postgresql and set(RECORD_TABLES) <= set(there):
        storage = bool(connection.scalar(named(connection, _STORAGE_MISSING)))
    return SchemaGaps(tables, tuple(columns), tuple(indexes), sequences, seed, store, storage)


def cached_numbers(connection: sa.Connection, sequence: str) -> int | None:
    """Return how many numbers of this sequence a connection of PostgreSQL takes at once. None: it cannot be read.

    The connection must commit each statement by itself.
    """
    if connection.dialect.name != POSTGRESQL:
        return None
    for statement in _CACHED:
        with suppress(DBAPIError):
            found = connection.scalar(statement, {"name": f"{prefix(connection)}{sequence}"})
            if found is not None:
                return int(found)
    return None


def cache_fault(connection: sa.Connection, sequence: str, harm: str) -> str | None:
    """Return what is wrong with a sequence whose numbers do not rise from one connection to the next, and the remedy."""
    cached = cached_numbers(connection, sequence)
    if cached is None or cached <= 1:
        return None
    return (
        f"The sequence {sequence} gives each connection {cached} numbers at once (CACHE {cached}): {harm}. "
        f"Run ALTER SEQUENCE {prefix(connection)}{sequence} CACHE 1."
    )


FENCES_DO_NOT_RISE: Final = "fences do not rise, and `fenced()` refuses updates of the newest worker"
