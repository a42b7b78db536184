"""Create the tables of activity, of observed keys, and of the audit trail."""

from __future__ import annotations

from typing import Final

from tests.stores.sql.migrations.frozen.step import Step, new_index, new_table

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

STEP: Final = Step(
    number=4,
    what="idempotency_activity, _activity_tokens, _observations, _audit",
    parts=(
        *map(new_table, _TABLES),
        new_index("idempotency_activity", "idempotency_activity_expiry", "(expires_at)"),
        new_index("idempotency_activity_tokens", "idempotency_activity_tokens_expiry", "(expires_at)"),
        new_index("idempotency_observations", "idempotency_observations_expiry", "(expires_at)"),
        new_index("idempotency_audit", "idempotency_audit_of_record", "(record_id, changed_at)"),
        new_index("idempotency_audit", "idempotency_audit_of_actor", "(actor, changed_at)"),
        new_index("idempotency_audit", "idempotency_audit_of_tenant", "(tenant_id)"),
        new_index("idempotency_audit", "idempotency_audit_expiry", "(expires_at)"),
    ),
)
