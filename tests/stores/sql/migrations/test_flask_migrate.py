"""Flask-Migrate on an application's database creates our tables without a migration by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect

from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.migrations.runner import upgrade
from tests.stores.sql.conftest import on_each
from tests.stores.sql.migrations.test_alembic import Shop, recipe, standing

SHOP = """\
import os

from flask import Flask
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from flask_idempotency.sql import include_object

db = SQLAlchemy()


class Payment(db.Model):
    id = db.Column(db.Integer, primary_key=True)


def create_app():
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
    app.config["IDEMPOTENCY_STORE"] = "flask-sqlalchemy://"
    app.config["IDEMPOTENCY_SECRET"] = "for tests only"
    app.config["IDEMPOTENCY_EFFECTS"] = "transactional"
    app.config["TESTING"] = True
    app.config.from_prefixed_env("SHOP")
    arguments = {"include_object": include_object} if "LEFT_ALONE" in os.environ else {}
    for name in os.environ["SETUP_ORDER"].split():
        {
            "db": lambda: db.init_app(app),
            "migrate": lambda: Migrate(app, db, **arguments),
            "idempotency": lambda: Idempotency(app),
        }[name]()

    @app.post("/payments")
    def pay():
        db.session.add(Payment())
        if app.config["IDEMPOTENCY_EFFECTS"] != "transactional":
            db.session.commit()
        return "paid", 201

    @app.cli.command("pay-twice")
    def pay_twice():
        client = app.test_client(use_cookies=False)
        for _ in range(2):
            response = client.post("/payments", headers={"Idempotency-Key": "k"})
            print(response.status_code, response.headers.get("Idempotency-Replayed"))
        print("rows", db.session.query(Payment).count())

    return app
"""

AFTER, BEFORE = "db migrate idempotency", "idempotency migrate db"


def a_shop(folder: Path, engine: Engine, *, order: str = AFTER, **settings: str) -> Shop:
    return Shop(folder, engine, SHOP, SETUP_ORDER=order, **settings)


def tables(engine: Engine) -> set[str]:
    inspect(engine).clear_cache()
    return {name for name in inspect(engine).get_table_names() if name.startswith("idempotency_")}


@on_each
@pytest.mark.slow
@pytest.mark.parametrize("order", (AFTER, BEFORE))
def test_migrate_and_upgrade_make_a_working_store(tmp_path: Path, engine: Engine, order: str) -> None:
    shop = a_shop(tmp_path, engine, order=order)
    shop.flask("db", "init")

    first = shop.migrate()

    assert "'idempotency_records'" in first
    assert ["201 None", "201 true", "rows 1"] == shop.flask("pay-twice").splitlines()[-3:]
    assert "No changes in schema detected" in shop.flask("db", "migrate")
    assert [] == standing(engine)[1]
    assert "The schema is in order" in shop.flask("idempotency", "db", "check")


@on_each
@pytest.mark.slow
def test_migrate_finds_nothing_where_our_command_made_the_tables(tmp_path: Path, engine: Engine) -> None:
    upgrade(engine)
    shop = a_shop(tmp_path, engine)
    shop.flask("db", "init")

    first = shop.migrate()

    assert ("'payment'" in first, "idempotency_" in first) == (True, False)
    assert ["201 None", "201 true", "rows 1"] == shop.flask("pay-twice").splitlines()[-3:]
    assert set(schema.metadata.tables) == tables(engine)


@pytest.mark.slow
@pytest.mark.parametrize("multidb", (True, False))
def test_a_disabled_guard_drops_no_table(tmp_path: Path, engine: Engine, multidb: bool) -> None:
    """A developer who writes migrations may have switched it off."""
    upgrade(engine)
    settings = {"SHOP_IDEMPOTENCY_ENABLED": "false"}
    if multidb:
        settings["SHOP_SQLALCHEMY_BINDS"] = f'{{"audit": "sqlite:///{tmp_path / "audit.sqlite3"}"}}'
    shop = a_shop(tmp_path, engine, **settings)
    shop.flask("db", "init", *(["--multidb"] if multidb else []))

    assert "idempotency_" not in shop.migrate()
    assert set(schema.metadata.tables) == tables(engine)


@pytest.mark.slow
def test_another_store_on_the_same_database_is_left_alone(tmp_path: Path, engine: Engine) -> None:
    """With the function that docs/guides/flask-migrate.md shows. Without it the tables are dropped, and `doctor` says so."""
    upgrade(engine)
    url = engine.url.render_as_string(hide_password=False)
    settings = {"SHOP_IDEMPOTENCY_STORE": url, "SHOP_IDEMPOTENCY_EFFECTS": "deduplicated"}
    shop = a_shop(tmp_path, engine, LEFT_ALONE="yes", **settings)
    shop.flask("db", "init")

    first = shop.migrate()

    assert ("'payment'" in first, "idempotency_" in first) == (True, False)
    assert ["201 None", "201 true", "rows 1"] == shop.flask("pay-twice").splitlines()[-3:]
    del shop.environment["LEFT_ALONE"]
    shop.flask("db", "migrate")
    assert any("drop_table('idempotency_records')" in each.read_text() for each in shop.revisions())


def tamed(written: str) -> str:
    """An autogenerated migration, changed as docs/guides/flask-migrate.md says."""
    module = ast.parse(written)
    for function in (each for each in module.body if isinstance(each, ast.FunctionDef)):
        function.body = [each for each in function.body if "idempotency_" not in ast.unparse(each)] or [ast.Pass()]
        if function.name == "upgrade":
            function.body.append(ast.parse("sql.upgrade(op.get_bind())").body[0])
    return "from flask_idempotency import sql\n" + ast.unparse(module)


@pytest.mark.slow
@pytest.mark.parametrize("autogenerated", (True, False))
def test_a_downgrade_keeps_the_records_and_can_be_upgraded_again(
    tmp_path: Path, engine: Engine, autogenerated: bool
) -> None:
    """With either migration that docs/guides/flask-migrate.md shows. A retry after both is still the retry of a payment."""
    shop = a_shop(tmp_path, engine)
    shop.flask("db", "init")
    shop.flask("db", *(["migrate"] if autogenerated else ["revision"]))
    (revision,) = shop.revisions()
    written = revision.read_text()
    if autogenerated:
        revision.write_text(tamed(written))
    else:
        revision.write_text(written.partition("def upgrade")[0] + recipe())
    shop.flask("db", "upgrade")
    shop.migrate()
    assert ["201 None", "201 true", "rows 1"] == shop.flask("pay-twice").splitlines()[-3:]

    shop.flask("db", "downgrade", "base")
    between = tables(engine)
    shop.flask("db", "upgrade")

    assert set(schema.metadata.tables) == between
    assert ["201 true", "201 true", "rows 0"] == shop.flask("pay-twice").splitlines()[-3:]
    assert "No changes in schema detected" in shop.flask("db", "migrate")
    assert "The schema is in order" in shop.flask("idempotency", "db", "check")
