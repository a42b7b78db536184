"""How the data keys and the audit trail of a tenant are erased."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.operations.admin import shred


def test_a_missing_audit_table_keeps_no_data_key() -> None:
    """Between the start of a new release and `db upgrade`, the database has no such table."""
    shredded: list[bytes] = []

    class Keys:
        def shred(self, tid: bytes) -> int:
            shredded.append(tid)
            return 1

    class Trail:
        def forget(self, tid: bytes) -> None:
            raise ConfigurationError("the database has no such table")

    keys: Any = Keys()
    trail: Any = Trail()
    with pytest.raises(ConfigurationError):
        shred(keys, [b"one", b"two"], audit=trail)
    assert [b"one", b"two"] == shredded
