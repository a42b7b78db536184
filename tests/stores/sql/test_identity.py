"""The first claim creates what a migration tool leaves out, also if many processes start together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, delete, text

from flask_idempotency.engine.model import Grant
from flask_idempotency.stores.sql import identity, store
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.schema import FENCES, VERSION, fence_numbers, metadata, records
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token
from tests.stores.contenders import contended
from tests.stores.sql.catalogue import reached
from tests.stores.sql.conftest import MakeEngine, on_postgresql
from tests.stores.sql.migrations.test_alembic import autogenerate, claim, included
from tests.tooling.processes import eventually

KEYS = 6

ADVISORY = (
    "SELECT 1 FROM pg_locks WHERE locktype = 'advisory'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def rows(engine: Engine, statement: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(statement))]


@pytest.mark.slow
def test_processes_that_open_a_new_database_together_grant_each_key_once(engine: Engine) -> None:
    """The very first claim is contended: everything that is missing is made meanwhile, and fences are all different."""
    autogenerate(engine, included())
    wins, _ = contended(engine.url.render_as_string(hide_password=False), KEYS)

    assert [*range(KEYS)] == [key for key, _ in wins]
    fences = [fence for _, fence in wins]
    assert fences == sorted(set(fences))
    assert fences[0] > 10**15
    assert [(1,)] == rows(engine, "SELECT count(*) FROM idempotency_meta WHERE name = 'store'")
    assert VERSION == reached(engine)


@on_postgresql
def test_a_process_that_waited_to_raise_fences_reads_them_again(engine: Engine) -> None:
    """Another process has lifted them meanwhile, and granted claims: to lift them once more could set them back."""
    autogenerate(engine, included())
    ahead = 10**17
    with ThreadPoolExecutor(1) as other, engine.connect() as first, first.begin():
        first.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": identity._LOCK})
        waiting = other.submit(claim, engine)
        assert eventually(lambda: [] != rows(engine, f"{ADVISORY} AND NOT granted"))
        first.execute(text("SELECT setval(:name, :ahead)"), {"name": FENCES, "ahead": ahead})
        first.commit()

        assert ahead + 1 == waiting.result(timeout=60)


def test_fences_rise_when_every_record_is_gone(engine: Engine) -> None:
    autogenerate(engine, included())
    before = claim(engine)
    with engine.begin() as connection:
        connection.execute(delete(records))

    assert before < claim(engine)


@pytest.fixture
def teller(engine: Engine, make_engine: MakeEngine) -> Iterator[Engine]:
    """The same database, for a role that may neither create nor alter anything."""
    role = f"clerk_{engine.url.database}"
    autogenerate(engine, included())
    used = ", ".join(name for name in metadata.tables if name != fence_numbers.name)
    with engine.begin() as connection:
        connection.execute(text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {used} TO {role}"))
        connection.execute(text(f"GRANT USAGE ON SEQUENCE {FENCES} TO {role}"))
    yield make_engine(engine.url.set(username=role).render_as_string())
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


@on_postgresql
def test_a_role_that_may_only_use_the_tables_can_claim(teller: Engine) -> None:
    """Its fences count from one, and rise."""
    assert [1, 2] == [claim(teller), claim(teller)]
    assert VERSION == reached(teller)


@on_postgresql
def test_a_role_that_may_set_the_sequence_raises_it(engine: Engine, teller: Engine) -> None:
    claim(teller)
    with engine.begin() as connection:
        connection.execute(text(f"GRANT UPDATE ON SEQUENCE {FENCES} TO {teller.url.username}"))

    assert claim(teller) > 10**15


@on_postgresql
def test_a_role_that_may_not_set_the_sequence_reads_at_most_twice(
    teller: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may never be able to, and a claim takes no third statement."""
    looks = []

    def prepare(connection: Connection) -> None:
        looks.append(connection)
        identity.prepare(connection)

    monkeypatch.setattr(store, "prepare", prepare)
    with closing(SqlStore(Database(teller))) as clerk:
        for _ in range(5):
            assert isinstance(clerk.claim(a_request(a_key()), token=a_token(), lease=LEASE), Grant)

    assert len(looks) == 2


@on_postgresql
def test_fences_rise_over_tables_that_are_made_again_while_a_process_runs(engine: Engine) -> None:
    """The second claim after each time is above those of before; the first one's sequence is new."""
    autogenerate(engine, included())
    with closing(SqlStore(Database(engine))) as running:

        def fence() -> int:
            outcome = running.claim(a_request(a_key()), token=a_token(), lease=LEASE)
            assert isinstance(outcome, Grant)
            return outcome.fence

        fences = [fence()]
        for _ in range(2):
            metadata.drop_all(engine)
            autogenerate(engine, included())
            fence()
            fences += [fence(), fence()]

    assert fences == sorted(fences)
    assert VERSION == reached(engine)


def test_a_database_that_has_everything_is_not_written_to(engine: Engine) -> None:
    autogenerate(engine, included())
    claim(engine)
    before = rows(engine, "SELECT name, value FROM idempotency_meta WHERE name <> 'fence' ORDER BY name")

    claim(engine)

    assert before == rows(engine, "SELECT name, value FROM idempotency_meta WHERE name <> 'fence' ORDER BY name")


def test_tables_that_are_made_while_a_process_runs_serve_it(engine: Engine) -> None:
    """A worker that was started before the migration works as soon as that is through."""
    with closing(SqlStore(Database(engine))) as store:
        with pytest.raises(Exception, match="has no tables for idempotency records"):
            store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
        autogenerate(engine, included())

        outcome = store.claim(a_request(a_key()), token=a_token(), lease=LEASE)

    assert isinstance(outcome, Grant)
    assert outcome.fence > 10**15


def test_the_first_claim_works_behind_a_pooler(pgbouncer_url: str) -> None:
    """Nothing is left on a server connection that the next client of the pooler would find."""
    engine = create_engine(pgbouncer_url, connect_args={"prepare_threshold": None})
    try:
        autogenerate(engine, included())

        assert claim(engine) > 10**15
        assert [("0",)] == rows(engine, "SELECT current_setting('lock_timeout')")
        assert [] == rows(engine, ADVISORY)
    finally:
        engine.dispose()
