"""On MariaDB whose transactions refuse to write to rows that changed since they began, as they do by default from 11.6.2 on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text
from sqlalchemy.orm import Mapped, mapped_column

from flask_idempotency import Idempotency, current_claim, idempotent
from tests.lab.mariadb import MariaDbServer

SECRET = "k6Wq-only-for-this-test-Zt1f0dVb8sXo"


@pytest.fixture
def database_url(mariadb_server: MariaDbServer) -> Iterator[str]:
    with mariadb_server.database() as name:
        yield mariadb_server.url(name)


@pytest.mark.parametrize("renewed", [False, True])
def test_a_session_that_has_read_completes_a_claim_that_is_newer(database_url: str, renewed: bool) -> None:
    """As where a `before_request` hook reads the user, or a view outlives a renewal of its lease. The view's own writes keep
    the protection."""
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = database_url
    strict = {"init_command": "SET SESSION innodb_snapshot_isolation = ON"}
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"pool_size": 1, "max_overflow": 0, "connect_args": strict}
    app.config["IDEMPOTENCY_STORE"] = "flask-sqlalchemy://"
    db = SQLAlchemy(app)
    strictness = list[Any]()

    class Payment(db.Model):  # type: ignore[name-defined, misc, unused-ignore]
        id: Mapped[int] = mapped_column(primary_key=True)

    Idempotency(app, secret=SECRET)

    def read() -> None:
        db.session.execute(text("SELECT count(*) FROM payment")).scalar()
        strictness.append(db.session.execute(text("SELECT @@innodb_snapshot_isolation")).scalar())

    if not renewed:
        app.before_request(read)

    @app.post("/payments")
    @idempotent(required=True, effects="transactional")
    def pay() -> tuple[dict[str, int], int]:
        read()
        if renewed:
            renew()
        db.session.add(Payment())
        return {"attempt": current_claim.attempt}, 201

    def renew() -> None:
        with db.engine.dialect.loaded_dbapi.connect(**db.engine.dialect.create_connect_args(db.engine.url)[1]) as other:
            other.cursor().execute("UPDATE idempotency_records SET lease_expires_at = lease_expires_at + 1")
            other.commit()

    with app.app_context():
        db.create_all()
    answers = [app.test_client().post("/payments", headers={"Idempotency-Key": key}) for key in ("a", "b", "a")]
    with app.app_context():
        rows = db.session.query(Payment).count()
        db.session.remove()
        db.engine.dispose()

    assert [201, 201, 201] == [each.status_code for each in answers]
    assert "true" == answers[2].headers["Idempotency-Replayed"]
    assert (2, {1}) == (rows, set(strictness))
