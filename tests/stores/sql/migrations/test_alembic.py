"""Alembic takes our tables for the application's own: what it writes runs, and the next run finds no change."""

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
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, text
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import InvalidRequestError, ProgrammingError
from sqlalchemy.schema import CreateTable

from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.model import Grant
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.admin.schema_check import faults
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.migrations import LATEST, version
from flask_idempotency.stores.sql.migrations.runner import upgrade
from flask_idempotency.stores.sql.schema import include_in
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token
from tests.forks import run
from tests.stores.sql.catalogue import Catalogue, found
from tests.stores.sql.conftest import on_each, on_postgresql

ROOT = Path(__file__).parents[4]


# The convention that Alembic's documentation recommends, and many applications have.
CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

SHOP = """\
import os

from flask import Flask
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from flask_idempotency.sql import include_in

app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
db = SQLAlchemy(app)
Migrate(app, db)
include_in(db.metadata)


class Payment(db.Model):
    id = db.Column(db.Integer, primary_key=True)
"""


OPTIONS = {"compare_type": True, "compare_server_default": True}


def differences(engine: Engine, metadata: MetaData, options: dict[str, Any] = OPTIONS) -> list[Any]:
    """What Alembic would write into the next revision."""
    with engine.connect() as connection:
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def standing(engine: Engine) -> tuple[int, list[str]]:
    """The schema's version and faults."""
    with engine.connect() as connection:
        # Whoever connects sets the journal; here nobody has.
        return version(connection), [fault for fault in faults(connection) if "journal_mode" not in fault]


@on_each
@pytest.mark.parametrize("convention", (None, CONVENTION), ids=("plain", "named"))
def test_autogenerate_finds_no_difference(engine: Engine, convention: dict[str, str] | None) -> None:
    """Neither in types nor in comments, indexes or keys, however the application names its own."""
    metadata = MetaData(naming_convention=convention)
    include_in(metadata)
    upgrade(engine)

    assert [] == differences(engine, metadata)


def test_autogenerate_would_notice_a_difference(engine: Engine) -> None:
    """Else its silence above would mean nothing."""
    metadata = MetaData()
    include_in(metadata)
    metadata.tables["idempotency_records"].append_column(Column("extra", Integer))
    upgrade(engine)

    assert ["add_column"] == [difference[0] for difference in differences(engine, metadata)]


def test_without_us_autogenerate_would_drop_the_tables(engine: Engine) -> None:
    """Which is what `include_in` is for: nobody should find out by paying twice."""
    metadata = MetaData()
    Table("payment", metadata, Column("id", Integer, primary_key=True))
    metadata.create_all(engine)
    upgrade(engine)

    removed = {difference[1].name for difference in differences(engine, metadata) if difference[0] == "remove_table"}

    assert set(schema.metadata.tables) == removed


def test_including_twice_is_including_once() -> None:
    metadata = MetaData()

    include_in(metadata)
    include_in(metadata)

    assert set(schema.metadata.tables) == set(metadata.tables)


@pytest.mark.parametrize("name", ("idempotency_meta", "idempotency_audit"))
def test_a_table_of_the_application_does_not_pass_for_ours(name: str) -> None:
    """The store would find other columns in it, at the first request that needs them."""
    metadata = MetaData(schema="shop")
    Table(name, metadata, Column("id", Integer), schema=sqlalchemy.BLANK_SCHEMA)

    with pytest.raises(InvalidRequestError, match=name):
        include_in(metadata)

    assert ("shop", {name}) == (metadata.schema, set(metadata.tables))


def test_the_outbox_alone_is_kept_when_the_records_join_it() -> None:
    """A model of the application may refer to it by now."""
    metadata = MetaData()
    include_in(metadata, records=False)
    (alone,) = metadata.tables.values()

    include_in(metadata)

    assert (schema.metadata.tables.keys(), alone) == (metadata.tables.keys(), metadata.tables[alone.name])


def test_each_process_writes_the_same_create_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy has the constraints in a set, which has them in another order in each process."""
    declared = sorted(schema.records.constraints, key=lambda each: each._creation_order, reverse=True)
    monkeypatch.setattr(schema.records, "constraints", declared)
    metadata = MetaData()
    include_in(metadata)

    texts = [str(CreateTable(each)) for each in (schema.records, metadata.tables[schema.records.name])]

    assert texts[0] == texts[1]


def test_our_tables_are_in_the_applications_schema(engine: Engine) -> None:
    """`MetaData(schema=…)` is about the application's tables; the store looks for its own where the connection does."""
    metadata = MetaData(schema="main" if engine.dialect.name == "sqlite" else "shop")
    include_in(metadata)
    upgrade(engine)

    assert [] == differences(engine, metadata)


@on_each
def test_create_all_serves_applications_without_migrations(engine: Engine) -> None:
    """`db.create_all()` in the tests of an application makes tables that may be claimed in."""
    metadata = MetaData(naming_convention=CONVENTION)
    include_in(metadata)

    metadata.create_all(engine)

    assert (LATEST, []) == standing(engine)


@on_postgresql
def test_a_revision_that_fails_rolls_our_tables_back(engine: Engine) -> None:
    """They are made in the revision's transaction and not beside it. On SQLite Alembic has none for this."""

    def revision(connection: Connection) -> None:
        context = MigrationContext.configure(connection)
        with context.begin_transaction(), Operations.context(context) as operations:
            upgrade(operations.get_bind())
            operations.execute("SELECT nothing FROM nowhere")

    with engine.connect() as connection, pytest.raises(ProgrammingError, match="nowhere"):
        revision(connection)

    assert 0 == standing(engine)[0]


class Shop:
    """An application in a folder, and its `flask` command."""

    def __init__(self, folder: Path, engine: Engine, source: str = SHOP, **settings: str) -> None:
        self.folder = folder
        self.environment = {"DATABASE_URL": engine.url.render_as_string(hide_password=False), **settings}
        (folder / "shop.py").write_text(source)

    def flask(self, *arguments: str) -> str:
        code, printed = run("flask", "--app", "shop", *arguments, folder=self.folder, environment=self.environment)
        assert 0 == code, printed
        return printed

    def migrate(self) -> str:
        """What the next migration has, which is run. Empty for none."""
        before = self.revisions()
        self.flask("db", "migrate")
        self.flask("db", "upgrade")
        return "".join(each.read_text() for each in self.revisions() - before)

    def revisions(self) -> set[Path]:
        return set((self.folder / "migrations" / "versions").glob("*.py"))


@on_each
@pytest.mark.slow
def test_the_recipe_of_the_documentation(tmp_path: Path, engine: Engine) -> None:
    """
    One revision makes our tables as `flask idempotency db upgrade` would, and the next one of Alembic's own leaves
    them alone.
    """
    shop = Shop(tmp_path, engine)
    shop.flask("db", "init")
    shop.flask("db", "revision", "-m", "idempotency tables")
    (revision,) = shop.revisions()
    head = revision.read_text().partition("def upgrade")[0]
    revision.write_text(head + recipe())
    shop.flask("db", "upgrade")

    written = shop.migrate()
    said = shop.flask("db", "migrate", "-m", "nothing")

    assert (True, False) == ("'payment'" in written, "idempotency_" in written)
    assert "No changes in schema detected" in said
    assert (LATEST, []) == standing(engine)


def recipe() -> str:
    """The revision's functions, as docs/guides/flask-migrate.md shows them."""
    page = (ROOT / "docs" / "guides" / "flask-migrate.md").read_text(encoding="utf-8")
    (block,) = [block for block in page.split("```python\n")[1:] if "op.get_bind()" in block]
    return block.partition("```")[0]


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
        exec("if True:\n" + body, {"op": op, "sa": sqlalchemy, "mysql": mysql})  # noqa: S102 - what Alembic wrote for our tables


def included() -> MetaData:
    metadata = MetaData()
    include_in(metadata)
    return metadata


def claim(engine: Engine, *, quota: Quota | None = None) -> int:
    """Run one key from its claim to its response. Returns the fence."""
    key, token = a_key(), a_token()
    with closing(SqlStore(Database(engine))) as store:
        outcome = store.claim(a_request(key), token=token, lease=LEASE, quota=quota)
        assert isinstance(outcome, Grant)
        store.complete(key, token, PAYLOAD, keep=KEEP)
    return outcome.fence


def without_storage(catalogue: Catalogue) -> Catalogue:
    """Leave out how rows are stored: advice that Alembic cannot write."""
    plain = dict(catalogue)
    for name, column in (("tables", 2), ("columns", 4)):
        plain[name] = [(*row[:column], *row[column + 1 :]) for row in plain.get(name, ())]
    # SQLite keeps the text of each statement; Alembic writes the constraints of a table in another order.
    plain["made"] = [(*row[:3], sorted(str(row[3])[:-1].split(",CONSTRAINT"))) for row in plain.get("made", ())]
    return plain


@on_each
def test_a_store_works_on_what_autogenerate_wrote(engine: Engine) -> None:
    """Claims with and without a quota, the number of the store, data keys, the ledger and tasks."""
    autogenerate(engine, included())
    key, token = a_key(), a_token()

    assert claim(engine) > 10**15
    assert claim(engine, quota=Quota(records=1000)) > 10**15
    with closing(SqlStore(Database(engine))) as store, closing(SqlStore(Database(engine))) as other:
        shelf = store.data_keys.read_keys(key.tid)
        assert shelf.store == store.identity() == other.identity()
        assert store.data_keys.add(key.tid, DataKey(1, "kid", b"wrapped"), store=shelf.store, after=shelf.last)
        assert [1] == [each.number for each in store.data_keys.read_keys(key.tid).keys]

        store.claim(a_request(key), token=token, lease=LEASE, quota=Quota(records=1000, new_keys=NewKeys(9, 60)))
        store.complete(key, token, PAYLOAD, keep=KEEP)
        store.task_log.report("expire", "{}")
        assert 1 == store.ledger.usage(key.tid).records
        assert store.task_log.lock("reap", token, lease=LEASE)
        assert {"expire"} <= set(store.task_log.reports())
        assert 0 == store.expiry.sweep(horizon=0, limit=10)


@on_each
@pytest.mark.parametrize("convention", (None, CONVENTION), ids=("unnamed", "named"))
def test_a_second_autogenerate_finds_nothing(engine: Engine, convention: dict[str, str] | None) -> None:
    metadata = MetaData(naming_convention=convention)
    include_in(metadata)
    autogenerate(engine, metadata)
    claim(engine)

    assert ([], []) == (differences(engine, metadata, {}), differences(engine, metadata))


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


@on_each
@pytest.mark.parametrize("ours_first", (False, True))
def test_plain_alembic_makes_a_working_store(tmp_path: Path, engine: Engine, ours_first: bool) -> None:
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


def test_autogenerate_makes_the_same_as_our_migrations_but_for_storage(engine: Engine) -> None:
    metadata = included()
    upgrade(engine)
    claim(engine)
    migrated = found(engine)
    metadata.drop_all(engine)

    autogenerate(engine, metadata)
    claim(engine)
    assert without_storage(found(engine)) == without_storage(migrated)

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
