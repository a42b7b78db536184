"""Alembic and Flask-Migrate take our tables for the application's own, and find nothing to change about them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table
from sqlalchemy.exc import ProgrammingError

from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.admin.schema_check import faults
from flask_idempotency.stores.sql.migrations import LATEST, version
from flask_idempotency.stores.sql.migrations.runner import upgrade
from flask_idempotency.stores.sql.schema import include_in
from tests.stores.sql.conftest import on_postgresql

ROOT = Path(__file__).parents[3]

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


def differences(engine: Engine, metadata: MetaData) -> list[Any]:
    """What Alembic would write into the next revision."""
    with engine.connect() as connection:
        options = {"compare_type": True, "compare_server_default": True}
        found: list[Any] = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
        return found


def standing(engine: Engine) -> tuple[int, list[str]]:
    """The schema's version and faults."""
    with engine.connect() as connection:
        # Whoever connects sets the journal; here nobody has.
        return version(connection), [fault for fault in faults(connection) if "journal_mode" not in fault]


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
    """An application factory runs once for every test."""
    metadata = MetaData()

    include_in(metadata)
    include_in(metadata)

    assert set(schema.metadata.tables) == set(metadata.tables)


def test_the_tables_of_an_application_with_a_schema_of_its_own_are_where_ours_are(engine: Engine) -> None:
    """`MetaData(schema=…)` is about the application's tables; the store looks for its own where the connection does."""
    metadata = MetaData(schema="main" if engine.dialect.name == "sqlite" else "shop")
    include_in(metadata)
    upgrade(engine)

    assert [] == differences(engine, metadata)


def test_create_all_serves_those_without_migrations(engine: Engine) -> None:
    """`db.create_all()` in the tests of an application makes tables that may be claimed in."""
    metadata = MetaData(naming_convention=CONVENTION)
    include_in(metadata)

    metadata.create_all(engine)

    assert (LATEST, []) == standing(engine)


@on_postgresql
def test_a_revision_that_fails_takes_our_tables_back(engine: Engine) -> None:
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

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        (folder / "shop.py").write_text(SHOP)

    def flask(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "flask", "--app", "shop", *arguments]
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        environment = {**os.environ, "DATABASE_URL": self.url, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr
        return done.stdout + done.stderr

    def revisions(self) -> list[Path]:
        return sorted((self.folder / "migrations" / "versions").glob("*.py"))


@pytest.mark.slow
def test_the_recipe_of_the_documentation(tmp_path: Path, engine: Engine) -> None:
    """
    One revision makes our tables as `flask idempotency db upgrade` would, and the next one of Alembic's own leaves
    them alone.
    """
    shop = Shop(tmp_path, engine.url.render_as_string(hide_password=False))
    shop.flask("db", "init")
    shop.flask("db", "revision", "-m", "idempotency tables")
    (revision,) = shop.revisions()
    head = revision.read_text().partition("def upgrade")[0]
    revision.write_text(head + recipe())
    shop.flask("db", "upgrade")

    shop.flask("db", "migrate", "-m", "payments")
    (written,) = [each for each in shop.revisions() if each != revision]
    shop.flask("db", "upgrade")
    said = shop.flask("db", "migrate", "-m", "nothing")

    assert (True, False) == ("'payment'" in written.read_text(), "idempotency_" in written.read_text())
    assert "No changes in schema detected" in said
    assert (LATEST, []) == standing(engine)


def recipe() -> str:
    """The revision's functions, as docs/sql.md shows them."""
    page = (ROOT / "docs" / "sql.md").read_text(encoding="utf-8")
    (block,) = [block for block in page.split("```python\n")[1:] if "op.get_bind()" in block]
    return block.partition("```")[0]
