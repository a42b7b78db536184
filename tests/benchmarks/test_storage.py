"""Claims among many keys, and the removal of expired records, are measured."""

from __future__ import annotations

import pytest

from benchmarks import storage
from benchmarks.harness import choose_cores


def test_claims_among_many_keys_stand_beside_an_empty_store() -> None:
    """The full server holds that many records more than the empty one, in the store's own format."""
    shown = storage.million_section(choose_cores(), keys=500, rounds=1)

    assert [(row.case, bool(row.verdicts)) for row in shown.rows] == [
        ("empty", False),
        ("full", True),
        ("the tenant's ledger", True),
    ]


@pytest.mark.slow
def test_removal_is_timed_beside_claims_and_beside_what_comes_in(postgres_url: str) -> None:
    """On a server and in a file. No expired record is left."""
    shown = storage.expiry_sections(postgres_url, choose_cores(), rows=1500, seconds=2)
    rows = {row.case: row for section in shown for row in section.rows}

    assert ["PostgreSQL", "SQLite", "PostgreSQL, 2,000 a second", "SQLite, 2,000 a second"] == list(rows)
    assert [1500] * 2 == [rows[kind].cells["removed"] for kind in ("PostgreSQL", "SQLite")]
