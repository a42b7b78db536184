"""The tables, as declared. `migrations/` makes them step by step; a test holds the two together.

Times are microseconds since the epoch by the database server's clock, as whole numbers: their arithmetic is exact, and
the same on every database. Answers are bytes, never JSON: what is replayed must be what was sent.
"""

from __future__ import annotations

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
)

from flask_idempotency.stores.sql.after_create import complete

VERSION: Final = 1
"""The migration that makes what is declared here."""

RECORDS: Final = "idempotency_records"
FACTS: Final = "idempotency_facts"
FENCES: Final = "idempotency_fences"

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


def _one_of(column: str, words: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(word) for word in words)})"


class Tables(NamedTuple):
    records: Table
    facts: Table
    fences: Sequence


def define(metadata: MetaData) -> Tables:
    """Declare everything in this metadata, whose schema is the application's: ours is where the connection looks."""
    records = Table(
        RECORDS,
        metadata,
        Column("rid", LargeBinary(32), primary_key=True, comment="HMAC of scope and client key: leads back to neither"),
        Column("tid", LargeBinary(32), nullable=False, comment="HMAC of namespace and tenant"),
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
    ended = records.c.expires_at.is_not(None)
    Index("idempotency_expiry", records.c.expires_at, postgresql_where=ended, sqlite_where=ended)
    facts = Table(
        FACTS,
        metadata,
        Column("name", String(40), primary_key=True),
        Column("value", BigInteger, nullable=False),
        comment="The schema's version, the store's own number, and the last fence where there are no sequences.",
        schema=BLANK_SCHEMA,
    )
    fences = Sequence(FENCES, data_type=BigInteger, cache=1, metadata=metadata, schema=BLANK_SCHEMA)
    complete(records, facts, fences, version=VERSION)
    return Tables(records, facts, fences)


def include_in(metadata: MetaData) -> None:
    """Declare the tables in the application's own metadata, so that Alembic and Flask-Migrate know them as its own.

    For Flask-SQLAlchemy: `include_in(db.metadata)`. `docs/sql.md` has the recipe for a migration that makes them.
    """
    if RECORDS not in metadata.tables:
        define(metadata)


metadata = MetaData()
records, facts, fences = define(metadata)
