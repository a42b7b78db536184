"""Give messages a namespace, and ids that are unique in it. Relays of the release before leave such messages alone."""

from __future__ import annotations

from typing import Final

from tests.stores.sql.migrations.frozen.step import Step, new_column, new_index

_TABLE: Final = "idempotency_outbox"

# The unique index on message_id stays: publishers of the release before name it. They write an id there, and this release
# writes a keyed hash of the namespace, the tenant and the id.
STEP: Final = Step(
    number=5,
    what="namespaces of messages in idempotency_outbox",
    parts=(
        new_column(_TABLE, "namespace", "TEXT"),
        new_column(_TABLE, "sent_id", "TEXT"),
        new_column(_TABLE, "lane", "{bytes}"),
        new_column(_TABLE, "digest", "{bytes}"),
        new_column(_TABLE, "ready_at", "BIGINT"),
        new_index(
            _TABLE, "idempotency_outbox_turn", "(namespace, attempts, seq) WHERE published_at IS NULL AND dead = 0"
        ),
        new_index(
            _TABLE, "idempotency_outbox_lane", "(namespace, lane, seq) WHERE published_at IS NULL AND lane IS NOT NULL"
        ),
        new_index(_TABLE, "idempotency_outbox_former", "(seq) WHERE published_at IS NULL AND namespace IS NULL"),
    ),
)
