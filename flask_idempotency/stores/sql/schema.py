"""The tables, as declared. `migrations/` makes them step by step; a test holds the two together.

Times are microseconds since the epoch by the database server's clock, as whole numbers: their arithmetic is exact, and
the same on every database. Answers are bytes, never JSON: what is replayed must be what was sent.
"""

from __future__ import annotations

from threading import Lock
from typing import Final, NamedTuple

from sqlalchemy import (
    BLANK_SCHEMA,
    BigInteger,
    CheckConstraint,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Sequence,
    SmallInteger,
    String,
    Table,
    Text,
    text,
)

from flask_idempotency.stores.sql.after_create import complete

VERSION: Final = 1
"""The migration that makes what is declared here."""

RECORDS: Final = "idempotency_records"
FACTS: Final = "idempotency_facts"
TENANTS: Final = "idempotency_tenants"
DATA_KEYS: Final = "idempotency_data_keys"
LEDGER: Final = "idempotency_ledger"
CHORES: Final = "idempotency_chores"
FENCE_NUMBERS: Final = "idempotency_fence_numbers"
FENCES: Final = "idempotency_fence_numbers_number_seq"
"""The sequence that PostgreSQL makes for the key of that table. Alembic writes no sequence but that of a key."""

PROCESSING: Final = "processing"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
"""Completed with an error for an answer. It replays as any other: the two states differ for auditors only."""
QUARANTINED: Final = "quarantined"
RELEASED: Final = "released"
"""Absent, as far as a claim is concerned; kept for a while for whoever asks what became of the key."""

STATES: Final = (PROCESSING, COMPLETED, FAILED, QUARANTINED, RELEASED)

TAKEOVER: Final = "takeover"
QUARANTINE: Final = "quarantine"

ANSWERS: Final = "answers"
"""Of the ledger: answers by the end of their lives, and their bytes."""
NEW_KEYS: Final = "keys"
"""Of the ledger: keys that were new, by the end of the window that they came in. `span` is how long that is."""


def _one_of(column: str, words: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(word) for word in words)})"


class Tables(NamedTuple):
    records: Table
    facts: Table
    tenants: Table
    data_keys: Table
    ledger: Table
    chores: Table
    fence_numbers: Table


def define(metadata: MetaData) -> Tables:
    """Declare everything in this metadata, whose schema is the application's: ours is where the connection looks."""
    records = Table(
        RECORDS,
        metadata,
        Column("rid", LargeBinary(32), primary_key=True, comment="HMAC of scope and client key: leads back to neither"),
        Column("tid", LargeBinary(16), nullable=False, comment="HMAC of namespace and tenant"),
        Column("state", String(11), nullable=False),
        Column("token", LargeBinary(16), nullable=False, comment="random, one for each claim; compared, never ordered"),
        Column("fence", BigInteger, nullable=False, comment="rises with every claim, for ever"),
        Column("attempt", Integer, nullable=False),
        Column("fingerprint", LargeBinary(17), nullable=False),
        Column("on_lapse", String(10), nullable=False, comment="what becomes of it when its lease ends unsettled"),
        Column("tenant", Text, nullable=False),
        Column("principal", Text, nullable=False),
        Column("method", Text, nullable=False),
        Column("operation", Text, nullable=False, comment="the route, by its endpoint"),
        Column("requested_at", BigInteger, nullable=False),
        Column("lease_until", BigInteger, comment="while processing or quarantined"),
        Column("completed_at", BigInteger),
        Column("expires_at", BigInteger, comment="never set while processing or quarantined: time does not end those"),
        Column("status", SmallInteger),
        Column("byte_size", BigInteger, comment="of the plain answer: what quotas count"),
        Column("answer", LargeBinary, comment="status, headers and body, as the codec sealed them"),
        Column("reason", Text, comment="why it is quarantined"),
        Column("counted", SmallInteger, nullable=False, comment="1: it is in its tenant's ledger"),
        Column("key_id", Text, comment="of the key that wraps the data key; NULL: the answer is not encrypted"),
        Column("data_key", Integer, comment="number of the tenant's data key; 0: the answer was erased"),
        Column("succeeded", SmallInteger, comment="of an answer that cannot be opened, for its state says it no more"),
        Column(
            "ask_at",
            BigInteger,
            nullable=False,
            server_default=text("0"),
            comment="while quarantined: not before then a resolver is asked again",
        ),
        CheckConstraint(_one_of("state", STATES), name="idempotency_state"),
        CheckConstraint(_one_of("on_lapse", (TAKEOVER, QUARANTINE)), name="idempotency_on_lapse"),
        CheckConstraint(
            f"({_one_of('state', (PROCESSING, QUARANTINED))} AND lease_until IS NOT NULL AND expires_at IS NULL)"
            f" OR ({_one_of('state', (COMPLETED, FAILED, RELEASED))} AND expires_at IS NOT NULL)",
            name="idempotency_deadline",
        ),
        CheckConstraint(
            f"NOT {_one_of('state', (COMPLETED, FAILED))}"
            " OR (completed_at IS NOT NULL AND status IS NOT NULL AND byte_size IS NOT NULL AND answer IS NOT NULL)",
            name="idempotency_answer",
        ),
        comment="One row for each idempotency key. Written by flask_idempotency only.",
        schema=BLANK_SCHEMA,
    )
    stale = records.c.state == PROCESSING
    Index("idempotency_stale", records.c.lease_until, postgresql_where=stale, sqlite_where=stale)
    quarantined = records.c.state == QUARANTINED
    Index(
        "idempotency_quarantined",
        records.c.ask_at,
        records.c.lease_until,
        postgresql_where=quarantined,
        sqlite_where=quarantined,
    )
    ended = records.c.expires_at.is_not(None)
    Index("idempotency_expiry", records.c.expires_at, postgresql_where=ended, sqlite_where=ended)
    # Those that a ledger does not count: few, and none as long as there are no quotas.
    unsettled = text("counted = 1 AND lease_until IS NOT NULL")
    Index(
        "idempotency_unsettled",
        records.c.tid,
        records.c.lease_until,
        postgresql_where=unsettled,
        sqlite_where=unsettled,
    )
    facts = Table(
        FACTS,
        metadata,
        Column("name", String(40), primary_key=True),
        Column("value", BigInteger, nullable=False),
        comment="The schema's version, the store's own number, and the last fence where there are no sequences.",
        schema=BLANK_SCHEMA,
    )
    tenants, data_keys, ledger = _of_tenants(metadata)
    chores = _of_janitors(metadata)
    fence_numbers = Table(
        FENCE_NUMBERS,
        metadata,
        Column("number", BigInteger, primary_key=True),
        comment="Always empty: where there are sequences, fences come from the one of its key.",
        schema=BLANK_SCHEMA,
    )
    complete(records, facts, fence_numbers, ledger, version=VERSION)
    return Tables(records, facts, tenants, data_keys, ledger, chores, fence_numbers)


def _of_tenants(metadata: MetaData) -> tuple[Table, Table, Table]:
    tenants = Table(
        TENANTS,
        metadata,
        Column("tid", LargeBinary(16), primary_key=True),
        Column("last_key", Integer, nullable=False, comment="the highest number that a data key was ever given"),
        Column("destroyed", Integer, nullable=False, comment="data keys up to this number can never be had again"),
        Column("erased_at", BigInteger, comment="answers of keys first used until then are told as erased"),
        Column("limit_records", BigInteger),
        Column("limit_bytes", BigInteger),
        Column("limit_in_flight", BigInteger),
        Column("limit_new_keys", BigInteger),
        Column("limit_window", BigInteger, comment="of limit_new_keys, in microseconds"),
        comment="One row for each tenant that has had a data key or limits of its own.",
        schema=BLANK_SCHEMA,
    )
    data_keys = Table(
        DATA_KEYS,
        metadata,
        Column("tid", LargeBinary(16), primary_key=True),
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("kid", Text, nullable=False, comment="of the key that wraps it"),
        Column("wrapped", LargeBinary, nullable=False),
        Column("made_at", BigInteger, nullable=False),
        Column("closed_at", BigInteger, comment="since when it opens what it has sealed, and seals no more"),
        comment="What answers are sealed with, wrapped. A row that is gone erases every answer under it.",
        schema=BLANK_SCHEMA,
    )
    ledger = Table(
        LEDGER,
        metadata,
        Column("tid", LargeBinary(16), primary_key=True),
        Column("kind", String(7), primary_key=True),
        Column("edge", BigInteger, primary_key=True, autoincrement=False, comment="when it is over, all of it at once"),
        Column("span", BigInteger, primary_key=True, autoincrement=False, comment="of a window, in microseconds"),
        Column("shard", SmallInteger, primary_key=True, autoincrement=False, comment="so that few wait for each other"),
        Column("records", BigInteger, nullable=False),
        Column("bytes", BigInteger, nullable=False),
        comment="What each tenant has, by when it will be over. Shards are added up: one may be below 0.",
        schema=BLANK_SCHEMA,
    )
    return tenants, data_keys, ledger


def _of_janitors(metadata: MetaData) -> Table:
    return Table(
        CHORES,
        metadata,
        Column("name", String(40), primary_key=True),
        Column("noted_at", BigInteger),
        Column("report", Text, comment="of the last run, as JSON: numbers and words of ours"),
        Column("holder", LargeBinary(16), comment="who is at it; a lock that saves work, and no more"),
        Column("held_until", BigInteger),
        comment="One row for each chore that a janitor was ever at.",
        schema=BLANK_SCHEMA,
    )


def include_in(metadata: MetaData) -> None:
    """Declare the tables in the application's own metadata, so that Alembic and Flask-Migrate know them as its own.

    With `IDEMPOTENCY_STORE = "flask-sqlalchemy://"` you need not call it: `Idempotency(app)` does. Call it for a
    metadata of your own, as in `include_in(Base.metadata)`. A second call changes nothing.
    """
    with _defining:
        if RECORDS not in metadata.tables:
            define(metadata)


# Two first requests may both find that the tables are not declared yet.
_defining: Final = Lock()


metadata = MetaData()
records, facts, tenants, data_keys, ledger, chores, fence_numbers = define(metadata)
fences = Sequence(FENCES, data_type=BigInteger)
"""In no metadata: it comes with its table."""
