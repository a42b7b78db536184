"""Let a record outlive its response. The release before replays such a response until it is removed."""

from __future__ import annotations

from typing import Final

from tests.stores.sql.migrations.frozen.step import Step, new_column, new_index

_TABLE: Final = "idempotency_records"

STEP: Final = Step(
    number=6,
    what="response_expires_at in idempotency_records",
    parts=(
        new_column(_TABLE, "response_expires_at", "BIGINT"),
        new_index(
            _TABLE,
            "idempotency_response_expiry",
            "(response_expires_at) WHERE response_expires_at IS NOT NULL AND coalesce(data_key_number, 1) <> 0",
        ),
    ),
)
