"""Claims among many keys, and the removal of expired records, are measured."""

from __future__ import annotations

import pytest

from benchmarks import storage
from benchmarks.harness import choose_cores


def test_claims_among_many_keys_stand_beside_an_empty_store() -> None:
    """The full server holds that many records more than the empty one, in the store's own format."""
    levels, shown = storage.growth(choose_cores(), levels=(0, 20, 500), rounds=1)

    assert [(level.keys, level.p50 <= level.p99) for level in levels] == [(0, True), (20, True), (500, True)]
    assert [(row.case, bool(row.verdicts)) for row in shown.rows] == [
        ("0 keys", False),
        ("20 keys", True),
        ("500 keys", True),
        ("the tenant's ledger", True),
        ("the filled server", False),
    ]


@pytest.mark.slow
def test_removal_is_timed_beside_claims_and_beside_what_comes_in(postgres_url: str) -> None:
    """On a server and in a file. No expired record is left."""
    shown = storage.expiry_sections(postgres_url, choose_cores(), rows=1500, seconds=1)
    rows = {row.case: row for section in shown for row in section.rows}

    assert ["PostgreSQL", "SQLite", "PostgreSQL, 2,000 a second", "SQLite, 2,000 a second"] == list(rows)
    assert [1500] * 2 == [rows[kind].cells["removed"] for kind in ("PostgreSQL", "SQLite")]
