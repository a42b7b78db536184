"""`doctor` says whether `flask db migrate` would drop the store's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from flask import Flask
from flask_migrate import Migrate  # type: ignore[import-untyped]
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, text

from flask_idempotency import Idempotency
from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.sql import include_object
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.migrations.runner import upgrade
from flask_idempotency.stores.sql.schema import include_in
from flask_idempotency.web.doctor import run_checks

FAULT, UNKNOWN, FINE = Verdict.FAULT, Verdict.UNKNOWN, Verdict.FINE
Open = Callable[..., tuple[Flask, SQLAlchemy]]


def fails(*_: object) -> bool:
    raise LookupError("made for other tables")


@pytest.fixture
def open_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """An application with a database of its own, and a store by a URL: in that database unless it is named."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as ends:

        def open_one(
            store: Any = None, *, migrate: dict[str, Any] | None = None, env: str | None = None, setup: Any = None
        ) -> tuple[Flask, SQLAlchemy]:
            url = f"sqlite:///{tmp_path / 'shop.sqlite3'}"
            for each in {url, store or url}:
                if isinstance(each, str) and each.startswith("sqlite"):
                    engine = create_engine(each)
                    upgrade(engine)
                    engine.dispose()
            app = Flask("shop")
            app.config |= {"SQLALCHEMY_DATABASE_URI": url, "IDEMPOTENCY_SECRET": "s", "TESTING": True}
            db = SQLAlchemy(app)
            if setup is not None:
                setup(db)
            if migrate is not None:
                Migrate(app, db, **migrate)
            if env is not None:
                (tmp_path / "migrations").mkdir()
                (tmp_path / "migrations" / "env.py").write_text(env)
            Idempotency(app, store=store or url)
            built = app.extensions["idempotency"].built.engine._deps.store
            ends.callback(getattr(built, "close", lambda: None))
            with app.app_context():
                ends.callback(db.engine.dispose)
            return app, db

        yield open_one


def found(app: Flask) -> list[Finding]:
    with app.app_context():
        return [each for each in run_checks(app, environ={}).findings if each.check == "autogenerate"]


def verdict(app: Flask) -> Verdict:
    (finding,) = found(app)
    assert bool(finding.remedy) == (finding.verdict is not FINE)
    return finding.verdict


def dropped(app: Flask, db: SQLAlchemy) -> set[str]:
    """The tables of ours that Alembic drops, by the arguments that Flask-Migrate gives it."""
    with app.app_context(), db.engine.connect() as connection:
        options = app.extensions["migrate"].configure_args
        found = compare_metadata(MigrationContext.configure(connection, opts=options), db.metadata)
    return {each[1].name for each in found if each[0] == "remove_table"} & set(schema.metadata.tables)


def test_tables_beside_the_metadata_are_a_fault(open_app: Open) -> None:
    """It says what Alembic does."""
    app, db = open_app(migrate={})

    (finding,) = found(app)

    assert finding.verdict is FAULT
    assert "include_object=flask_idempotency.sql.include_object" in finding.remedy
    assert set(schema.metadata.tables) == dropped(app, db)


def test_tables_are_left_alone_by_the_function_that_is_shipped(open_app: Open) -> None:
    app, db = open_app(migrate={"include_object": include_object})

    assert (FINE, set()) == (verdict(app), dropped(app, db))


def test_the_function_changes_nothing_for_tables_in_the_metadata(open_app: Open) -> None:
    """Else Alembic would make them once more; and of other tables it drops what it dropped before."""
    app, db = open_app(migrate={"include_object": include_object}, setup=lambda db: include_in(db.metadata))
    with app.app_context(), db.engine.begin() as connection:
        connection.execute(text("CREATE TABLE forgotten (id INTEGER)"))
        connection.execute(text("DROP INDEX idempotency_expired_leases"))
        options = app.extensions["migrate"].configure_args
        changes = compare_metadata(MigrationContext.configure(connection, opts=options), db.metadata)

    assert ["add_index", "remove_table"] == sorted(change[0] for change in changes)
    assert FINE is verdict(app)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        ({"include_object": lambda *_: True}, FAULT),
        ({"include_name": lambda name, *_: not name.startswith("idempotency_")}, FINE),
        ({"include_object": fails}, UNKNOWN),
    ),
)
def test_functions_of_the_application_are_asked(open_app: Open, arguments: dict[str, Any], expected: Verdict) -> None:
    app, _ = open_app(migrate=arguments)

    assert expected is verdict(app)


@pytest.mark.parametrize(
    ("env", "expected"),
    (
        ("context.configure(connection=connection, target_metadata=get_metadata())", FAULT),
        ("context.configure(connection=connection, include_name=mine)", UNKNOWN),
        ("from flask_idempotency.sql import include_in", UNKNOWN),
    ),
)
def test_what_env_py_does_cannot_be_seen(open_app: Open, env: str, expected: Verdict) -> None:
    """Whether it does anything can."""
    app, _ = open_app(migrate={}, env=env)

    assert expected is verdict(app)


def test_tables_in_another_database_are_no_concern(open_app: Open, tmp_path: Path) -> None:
    app, _ = open_app(f"sqlite:///{tmp_path / 'other.sqlite3'}", migrate={})

    assert FINE is verdict(app)


def test_the_tables_of_flask_sqlalchemy_are_in_its_metadata(open_app: Open) -> None:
    app, db = open_app("flask-sqlalchemy://", migrate={})

    assert (FINE, set()) == (verdict(app), dropped(app, db))


def test_plain_alembic_is_unknown_where_it_was_used(open_app: Open) -> None:
    app, db = open_app()
    assert FINE is verdict(app)
    with app.app_context(), db.engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))

    assert UNKNOWN is verdict(app)


def test_a_store_without_tables_is_not_looked_at(open_app: Open) -> None:
    app, _ = open_app(MemoryStore(), migrate={})

    assert [] == found(app)
