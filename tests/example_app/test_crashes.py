"""Workers that are really killed, on either side of the commit, on each kind of database."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flask import Flask
from sqlalchemy import func, select

from example_app.models import GatewayCharge, Invoice, Payment, db
from flask_idempotency.maintenance.drain import Drain
from flask_idempotency.maintenance.reap import Reaping
from flask_idempotency.web.chores import janitor_of
from tests.example_app.conftest import Customer, MakeApp, on_records
from tests.example_app.crashing_worker import ask

ROOT = Path(__file__).parents[2]
WORKER_SECONDS = 60


@pytest.fixture
def app(make_app: MakeApp, database: str) -> Flask:
    return make_app(SQLALCHEMY_DATABASE_URI=database)


def crash(app: Flask, blueprint: str, moment: str) -> None:
    """The request is sent to a worker, which is killed; its lease is over."""
    names = ("SQLALCHEMY_DATABASE_URI", "DEMO_SIMULATE", "DEMO_WITNESS", "IDEMPOTENCY_SECRET")
    config = json.dumps({name: app.config[name] for name in names})
    worker = subprocess.run(
        [sys.executable, "-m", "tests.example_app.crashing_worker", config, blueprint, moment],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS,
    )
    assert -signal.SIGKILL == worker.returncode, worker.stderr
    on_records(app, "UPDATE idempotency_records SET lease_until = requested_at + 1 WHERE state = 'processing'")


def rows(app: Flask) -> int:
    with app.app_context():
        counts = [select(func.count()).select_from(model) for model in (Payment, GatewayCharge, Invoice)]
        return sum(db.session.scalars(count).one() for count in counts)


@pytest.mark.parametrize(
    ("moment", "left", "replayed", "executions"), (("before_commit", 0, None, "2"), ("after_commit", 1, "true", "1"))
)
def test_payment(app: Flask, moment: str, left: int, replayed: str | None, executions: str) -> None:
    """
    Its retry gets a 201 and there is one payment: a new one, or the one that was made.
    """
    crash(app, "payments", moment)
    assert left == rows(app)

    answers = [ask(Customer(app), "payments", moment) for _ in range(2)]

    assert [201, 201] == [answer.status_code for answer in answers]
    assert [replayed, "true"] == [answer.headers.get("Idempotency-Replayed") for answer in answers]
    assert executions == answers[-1].headers["X-Executions"]
    assert 1 == rows(app)


@pytest.mark.parametrize(("moment", "left"), (("before_commit", 0), ("after_commit", 1)))
def test_plain_view(app: Flask, moment: str, left: int) -> None:
    """
    Nobody knows what a view did that commits by itself: its retry is refused, and there is one charge at most.
    """
    crash(app, "gateway", moment)

    answer = ask(Customer(app), "gateway", moment)

    assert (409, "1") == (answer.status_code, answer.headers["X-Executions"])
    assert left == rows(app)


@pytest.mark.parametrize(("moment", "left"), (("before_commit", 0), ("after_commit", 1)))
def test_view_with_a_marker(app: Flask, moment: str, left: int) -> None:
    """
    A retry takes over and runs again. Its marker is the first attempt's, so there is one invoice, and it is written once.
    """
    crash(app, "accounting", moment)
    assert left == rows(app)

    answers = [ask(Customer(app), "accounting", moment) for _ in range(2)]

    assert [201, 201] == [answer.status_code for answer in answers]
    assert [None, "true"] == [answer.headers.get("X-Idempotency-Replay") for answer in answers]
    assert answers[0].data == answers[1].data
    assert "2" == answers[-1].headers["X-Executions"]
    assert 1 == rows(app)
    assert 201 == ask(Customer(app), "accounting", None, key="key-2").status_code
    assert 2 == rows(app)


@pytest.mark.parametrize(
    ("moment", "status", "left"), (("before_commit", 409, 0), ("after_commit", 201, 1)), ids=("not made", "made")
)
def test_plain_view_that_can_be_asked_about(app: Flask, moment: str, status: int, left: int) -> None:
    """
    The janitor finds the charge, and the retry gets it. That there is none yet proves nothing: its worker may be frozen.
    """
    crash(app, "gateway", moment)
    report = janitor_of(app).run("reap", Drain())

    assert isinstance(report, Reaping)
    assert (1, 1, left, 1 - left) == (report.quarantined, report.asked, report.completed, report.unknown)
    answer = ask(Customer(app), "gateway", moment)
    assert (status, "1") == (answer.status_code, answer.headers["X-Executions"])
    assert left == rows(app)
