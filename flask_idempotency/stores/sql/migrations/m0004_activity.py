"""Create the tables of activity, of observed keys, and of the audit trail."""

from __future__ import annotations

from typing import Final

from flask_idempotency.stores.sql.migrations.step import Step, column_comment, new_index, table_comment

_TABLES: Final = (
    """\
CREATE TABLE IF NOT EXISTS idempotency_activity (
    owner {bytes} NOT NULL,
    bucket_length BIGINT NOT NULL,
    bucket_start BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    counts TEXT NOT NULL,
    PRIMARY KEY (owner, bucket_length, bucket_start)
)""",
    """\
CREATE TABLE IF NOT EXISTS idempotency_activity_tokens (
    token {bytes} NOT NULL,
    expires_at BIGINT NOT NULL,
    PRIMARY KEY (token)
)""",
    """\
CREATE TABLE IF NOT EXISTS idempotency_observations (
    record_id {bytes} NOT NULL,
    token {bytes} NOT NULL,
    fingerprint {bytes} NOT NULL,
    state VARCHAR(10) NOT NULL,
    began_at BIGINT NOT NULL,
    watched_at BIGINT NOT NULL,
    lease_expires_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    PRIMARY KEY (record_id),
    CONSTRAINT idempotency_observation_state CHECK (state IN ('new', 'taken-over', 'replay', 'unknown'))
)""",
    """\
CREATE TABLE IF NOT EXISTS idempotency_audit (
    token {bytes} NOT NULL,
    record_id {bytes} NOT NULL,
    tenant_id {bytes} NOT NULL,
    changed_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    verb VARCHAR(20) NOT NULL,
    was VARCHAR(20) NOT NULL,
    step VARCHAR(64) NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT NOT NULL,
    forced SMALLINT NOT NULL,
    certain SMALLINT NOT NULL,
    PRIMARY KEY (token)
)""",
)

_INDEXES: Final = {
    "idempotency_activity_expiry": ("idempotency_activity", "expires_at"),
    "idempotency_activity_tokens_expiry": ("idempotency_activity_tokens", "expires_at"),
    "idempotency_observations_expiry": ("idempotency_observations", "expires_at"),
    "idempotency_audit_of_record": ("idempotency_audit", "record_id, changed_at"),
    "idempotency_audit_of_actor": ("idempotency_audit", "actor, changed_at"),
    "idempotency_audit_of_tenant": ("idempotency_audit", "tenant_id"),
    "idempotency_audit_expiry": ("idempotency_audit", "expires_at"),
}

_TABLE_COMMENTS: Final = {
    "idempotency_activity": (
        "One row for each minute of a day and each hour of a month: what happened at each endpoint."
    ),
    "idempotency_activity_tokens": "One row for each call of the last minutes, so that a repeated one adds nothing.",
    "idempotency_observations": "One row for each key that was seen in observe mode. No claim reads it.",
    "idempotency_audit": ("One row for each change of a record by an operator or a resolver. It outlives the record."),
}

_COLUMN_COMMENTS: Final = {
    "idempotency_activity.owner": "mark of the application",
    "idempotency_activity.bucket_length": "a minute or an hour",
    "idempotency_activity.counts": "a JSON object: endpoint, counter, number",
    "idempotency_activity_tokens.token": "of a call that has added its counts",
    "idempotency_observations.record_id": "as of the record that a claim would make",
    "idempotency_observations.token": "of the watched request",
    "idempotency_observations.began_at": "when the first request with this key began",
    "idempotency_observations.watched_at": "when the watched request began",
    "idempotency_audit.token": "of the call, so that a repeated one adds nothing",
    "idempotency_audit.was": "state of the record before",
    "idempotency_audit.step": "the step that was settled; empty: the record as a whole",
    "idempotency_audit.actor": "the operator, or resolver",
    "idempotency_audit.forced": "1: the operator overruled a warning",
    "idempotency_audit.certain": "0: the change may not have happened",
}


def _index(name: str) -> str:
    table, columns = _INDEXES[name]
    return f"CREATE INDEX IF NOT EXISTS {name} ON {table} ({columns})"


STEP: Final = Step(
    number=4,
    what="idempotency_activity, _activity_tokens, _observations, _audit",
    statements={
        "postgresql": (
            *(table.format(bytes="BYTEA") for table in _TABLES),
            *(new_index(_INDEXES[name][0], name, _index(name)) for name in _INDEXES),
            *(table_comment(*each) for each in _TABLE_COMMENTS.items()),
            *(column_comment(*each) for each in _COLUMN_COMMENTS.items()),
        ),
        "sqlite": (*(table.format(bytes="BLOB") for table in _TABLES), *map(_index, _INDEXES)),
    },
)
