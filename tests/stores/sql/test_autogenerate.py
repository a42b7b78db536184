"""What Alembic's autogenerate writes about our tables is enough to run, and the next one finds nothing to change."""

from __future__ import annotations

from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic import command, op
from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, MetaData, text

from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.model import Claimed
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.migrations.runner import upgrade
from flask_idempotency.stores.sql.schema import include_in
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token
from tests.stores.sql.catalogue import Catalogue, found
from tests.stores.sql.conftest import MakeEngine
from tests.stores.sql.test_alembic import CONVENTION

OPTIONS = {"compare_type": True, "compare_server_default": True}


def written(engine: Engine, metadata: MetaData) -> str:
    """The body of the `upgrade()` that `alembic revision --autogenerate` would write."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=OPTIONS)
        operations = produce_migrations(context, metadata).upgrade_ops
        assert operations is not None
        return str(render_python_code(operations))


def autogenerate(engine: Engine, metadata: MetaData) -> None:
    """Write a revision and run it, as `flask db migrate` and `flask db upgrade` do."""
    body = written(engine, metadata)
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        exec("if True:\n" + body, {"op": op, "sa": sqlalchemy})  # noqa: S102 - what Alembic wrote for our tables


def differences(engine: Engine, metadata: MetaData, **options: Any) -> list[Any]:
    with engine.connect() as connection:
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def included() -> MetaData:
    metadata = MetaData()
    include_in(metadata)
    return metadata


def claim(engine: Engine, *, quota: Quota | None = None) -> int:
    """Run one key from its claim to its response. Returns the fence."""
    key, token = a_key(), a_token()
    with closing(SqlStore(Database(engine))) as store:
        outcome = store.claim(a_request(key), token=token, lease=LEASE, quota=quota)
        assert isinstance(outcome, Claimed)
        store.complete(key, token, PAYLOAD, keep=KEEP)
    return outcome.held.fence


def without_storage(catalogue: Catalogue) -> Catalogue:
    """Leave out how rows are stored: advice that Alembic cannot write."""
    plain = dict(catalogue)
    for name, column in (("tables", 2), ("columns", 4)):
        plain[name] = [(*row[:column], *row[column + 1 :]) for row in plain.get(name, ())]
    # SQLite keeps the text of each statement; Alembic writes the constraints of a table in another order.
    plain["made"] = [(*row[:3], sorted(str(row[3])[:-1].split(",CONSTRAINT"))) for row in plain.get("made", ())]
    return plain


def test_a_claim_runs_on_what_autogenerate_wrote(engine: Engine) -> None:
    autogenerate(engine, included())

    assert claim(engine) > 10**15
    assert claim(engine, quota=Quota(records=1000)) > 10**15


def test_what_autogenerate_wrote_has_a_store_number(engine: Engine) -> None:
    autogenerate(engine, included())

    with closing(SqlStore(Database(engine))) as one, closing(SqlStore(Database(engine))) as other:
        assert one.identity() == other.identity()


def test_data_keys_work_on_what_autogenerate_wrote(engine: Engine) -> None:
    autogenerate(engine, included())
    tid = a_key().tid
    with closing(SqlStore(Database(engine))) as store:
        shelf = store.data_keys.read_keys(tid)

        assert shelf.store == store.identity()
        assert store.data_keys.add(tid, DataKey(1, "kid", b"wrapped"), store=shelf.store, after=shelf.last)
        assert [1] == [each.number for each in store.data_keys.read_keys(tid).keys]


def test_the_ledger_and_chores_work_on_what_autogenerate_wrote(engine: Engine) -> None:
    autogenerate(engine, included())
    key, token = a_key(), a_token()
    with closing(SqlStore(Database(engine))) as store:
        store.claim(a_request(key), token=token, lease=LEASE, quota=Quota(records=1000, new_keys=NewKeys(9, 60)))
        store.complete(key, token, PAYLOAD, keep=KEEP)
        store.task_log.report("expire", "{}")

        assert 1 == store.ledger.usage(key.tid).records
        assert store.task_log.lock("reap", token, lease=LEASE)
        assert {"expire"} <= set(store.task_log.reports())
        assert 0 == store.expiry.sweep(horizon=0, limit=10)


@pytest.mark.parametrize("options", ({}, OPTIONS), ids=("plain", "strict"))
@pytest.mark.parametrize("convention", (None, CONVENTION), ids=("unnamed", "named"))
def test_a_second_autogenerate_finds_nothing(
    engine: Engine, options: dict[str, Any], convention: dict[str, str] | None
) -> None:
    metadata = MetaData(naming_convention=convention)
    include_in(metadata)
    autogenerate(engine, metadata)
    claim(engine)

    assert [] == differences(engine, metadata, **options)


ENV = """\
import os

from alembic import context
from sqlalchemy import MetaData, create_engine

from flask_idempotency.sql import include_in

metadata = MetaData()
include_in(metadata)
engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=metadata, compare_server_default=True)
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""


@pytest.mark.parametrize("ours_first", (False, True))
def test_plain_alembic_makes_a_working_store(tmp_path: Path, engine: Engine, ours_first: bool) -> None:
    """By its own commands: revision, upgrade, and a check that finds nothing."""
    if ours_first:
        upgrade(engine)
    config = Config(str(tmp_path / "alembic.ini"), stdout=StringIO())
    command.init(config, str(tmp_path / "migrations"))
    (tmp_path / "migrations" / "env.py").write_text(ENV)
    url = engine.url.render_as_string(hide_password=False)
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))

    command.revision(config, autogenerate=True)
    command.upgrade(config, "head")

    (revision,) = (tmp_path / "migrations" / "versions").glob("*.py")
    assert ours_first != ("create_table" in revision.read_text())
    assert claim(engine) > 10**15
    command.check(config)


def test_autogenerate_and_our_migrations_make_the_same(engine: Engine, make_engine: MakeEngine) -> None:
    metadata = included()
    upgrade(engine)
    claim(engine)
    migrated = found(engine)
    metadata.drop_all(engine)

    autogenerate(engine, metadata)
    claim(engine)

    assert without_storage(found(engine)) == without_storage(migrated)


def test_our_upgrade_adds_the_rest(engine: Engine) -> None:
    metadata = included()
    upgrade(engine)
    claim(engine)
    migrated = found(engine)
    metadata.drop_all(engine)
    autogenerate(engine, metadata)
    claim(engine)

    upgrade(engine)

    storage = without_storage if engine.dialect.name == "sqlite" else dict
    assert storage(found(engine)) == storage(migrated)


def test_fences_rise_over_tables_that_autogenerate_made_again(engine: Engine) -> None:
    metadata = included()
    autogenerate(engine, metadata)
    before = claim(engine)
    metadata.drop_all(engine)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS alembic_version"))

    autogenerate(engine, metadata)

    assert before < claim(engine)
