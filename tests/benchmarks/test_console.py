"""The reads of the console are timed over as many records as there are to be."""

from __future__ import annotations

from contextlib import closing

import pytest

from benchmarks import console
from benchmarks.harness import choose_cores
from benchmarks.sql_apps import Database
from flask_idempotency.engine.activity import HOUR, MINUTE
from flask_idempotency.engine.model import State
from flask_idempotency.stores.sql.database import Database as SqlDatabase
from flask_idempotency.stores.sql.store import SqlStore
from tests.sql_backends import make_tables


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"QUARANTINED": 60, "IN_FLIGHT": 40, "MINUTES": 90}.items():
        monkeypatch.setattr(console, name, number)


def test_the_store_is_filled_with_what_the_table_says(postgres_url: str) -> None:
    """The copies are records as any other: the store lists them, and each tenant has its share."""
    make_tables(postgres_url)
    with closing(SqlStore(SqlDatabase(postgres_url))) as store:
        console.fill_sql(Database("PostgreSQL", postgres_url, ""), store, 520)

        counts = store.recovery.counts()
        assert (520, 60, 40) == (store.recovery.about_completed(), counts.quarantined, counts.in_flight)
        for tid, number in ((console.tenants()[0], 10), (console.tenants()[-1], console.SMALL)):
            page = store.recovery.scan(State.COMPLETED, limit=100, tid=tid)
            assert (number, None) == (len({each.key.rid for each in page.found}), page.after)
        minutes = store.activity.read(console.OWNER, length=MINUTE, seconds=2 * HOUR).buckets
        assert (90, console.ENDPOINTS) == (len(minutes), len(minutes[0].counts))


@pytest.mark.slow
def test_each_part_of_the_overview_is_timed_on_both(postgres_url: str) -> None:
    (section,) = console.sections(postgres_url, choose_cores(), records=520, rounds=1)
    rows = {row.case: row.cells for row in section.rows}

    assert {"Redis", "PostgreSQL"} == set(rows["the overview"])
    for kind in ("Redis", "PostgreSQL"):
        together = sum(float(rows[name].get(kind, 0.0)) for name in console.OVERVIEW)
        assert rows["the overview"][kind] == pytest.approx(together)
    assert all(float(ms) > 0 for cells in rows.values() for ms in cells.values())
