"""Workers are killed before and after the commit, on each kind of database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from sqlalchemy import func, insert, select

from example_app import gateway
from example_app.models import GatewayCharge, GatewayMarker, Invoice, Payment, db
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.reap import ReapReport
from flask_idempotency.web.janitor import janitor_of
from tests.example_app.conftest import Customer, MakeApp, on_records
from tests.example_app.crashing_worker import FROZEN, ask

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORKER_SECONDS = 60


@pytest.fixture
def app(make_app: MakeApp, database: str) -> Flask:
    return make_app(SQLALCHEMY_DATABASE_URI=database)


def command(app: Flask, blueprint: str, moment: str) -> list[str]:
    names = ("SQLALCHEMY_DATABASE_URI", "DEMO_SIMULATE", "DEMO_WITNESS", "IDEMPOTENCY_SECRET")
    config = json.dumps({name: app.config[name] for name in names})
    return [sys.executable, "-m", "tests.example_app.crashing_worker", config, blueprint, moment]


class Frozen:
    """A worker that stopped between its input and its first write."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def thaw(self) -> tuple[int, dict[str, Any]]:
        """Let it go on. Return the status and the body that its client gets."""
        self._process.send_signal(signal.SIGCONT)
        output, errors = self._process.communicate(timeout=WORKER_SECONDS)
        assert self._process.returncode == 0, errors
        status, body = json.loads(output)
        return status, body


@contextmanager
def frozen(app: Flask, blueprint: str) -> Iterator[Frozen]:
    with subprocess.Popen(
        command(app, blueprint, FROZEN), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            yield Frozen(process)
        finally:
            process.kill()


def crash(app: Flask, blueprint: str, moment: str) -> None:
    """Send the request to a worker that is killed, and let its lease expire."""
    worker = subprocess.run(
        command(app, blueprint, moment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS,
    )
    assert -signal.SIGKILL == worker.returncode, worker.stderr
    on_records(app, "UPDATE idempotency_records SET lease_expires_at = requested_at + 1 WHERE state = 'processing'")


def rows(app: Flask) -> int:
    with app.app_context():
        counts = [select(func.count()).select_from(model) for model in (Payment, GatewayCharge, Invoice)]
        return sum(db.session.scalars(count).one() for count in counts)


@pytest.mark.parametrize(
    ("moment", "left", "replayed", "executions"), (("before_commit", 0, None, "2"), ("after_commit", 1, "true", "1"))
)
def test_payment(app: Flask, moment: str, left: int, replayed: str | None, executions: str) -> None:
    """Its retry gets a 201 and there is one payment: a new one, or the one that was made."""
    crash(app, "payments", moment)
    assert left == rows(app)

    answers = [ask(Customer(app), "payments", moment) for _ in range(2)]

    assert [201, 201] == [answer.status_code for answer in answers]
    assert [replayed, "true"] == [answer.headers.get("Idempotency-Replayed") for answer in answers]
    assert executions == answers[-1].headers["X-Executions"]
    assert 1 == rows(app)


@pytest.mark.parametrize(("moment", "left"), (("before_commit", 0), ("after_commit", 1)))
def test_plain_view(app: Flask, moment: str, left: int) -> None:
    """The outcome of a view that commits by itself is unknown: the retry is refused, and there is one charge at most."""
    crash(app, "gateway", moment)

    answer = ask(Customer(app), "gateway", moment)

    assert (409, "1") == (answer.status_code, answer.headers["X-Executions"])
    assert left == rows(app)


@pytest.mark.parametrize(("moment", "left"), (("before_commit", 0), ("after_commit", 1)))
def test_view_with_a_marker(app: Flask, moment: str, left: int) -> None:
    """A retry takes over and runs again. Its marker is the first attempt's, so there is one invoice, and it is written once."""
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
def test_plain_view_with_a_resolver(app: Flask, moment: str, status: int, left: int) -> None:
    """The janitor finds the charge, and the retry gets it. A missing charge proves nothing: the worker may be frozen."""
    crash(app, "gateway", moment)
    report = janitor_of(app).run("reap", Batcher())

    assert isinstance(report, ReapReport)
    assert (1, 1, left, 1 - left) == (report.quarantined, report.asked, report.completed, report.unknown)
    answer = ask(Customer(app), "gateway", moment)
    assert (status, "1") == (answer.status_code, answer.headers["X-Executions"])
    assert left == rows(app)


LONG_AGO = 24 * 60 * 60 * 1_000_000


def a_day_later(app: Flask) -> None:
    """Move the last sign of the worker, and the last call of the resolver, a day back."""
    for column in ("requested_at", "lease_expires_at"):
        on_records(app, f"UPDATE idempotency_records SET {column} = {column} - {LONG_AGO}")  # noqa: S608
    # 0: the janitor has not called the resolver yet. A turn after the end of the lease counts as one.
    on_records(app, "UPDATE idempotency_records SET resolver_due_at = lease_expires_at + 2 WHERE resolver_due_at > 0")


def reaped(app: Flask) -> ReapReport:
    report = janitor_of(app).run("reap", Batcher())
    assert isinstance(report, ReapReport)
    return report


def test_a_frozen_worker_charges_nothing_that_was_ruled_out(app: Flask) -> None:
    """The resolver said `NeverHappened`, and refused the charge to this attempt: it thaws, and its INSERT fails."""
    with frozen(app, "gateway") as worker:
        a_day_later(app)
        assert ReapReport(quarantined=1, asked=1, unknown=1) == reaped(app)
        a_day_later(app)
        assert ReapReport(asked=1, released=1) == reaped(app)

        status, _ = worker.thaw()

    assert status in (409, 503)
    assert 0 == rows(app)
    assert [201, 201] == [ask(Customer(app), "gateway", None).status_code for _ in range(2)]
    assert 1 == rows(app)


def test_a_worker_that_thaws_behind_the_retry_charges_nothing(app: Flask) -> None:
    """The retry charged under the same reference. The thawed worker sends the response of the retry."""
    with frozen(app, "gateway") as worker:
        a_day_later(app)
        reaped(app)
        a_day_later(app)
        assert ReapReport(asked=1, released=1) == reaped(app)
        retried = ask(Customer(app), "gateway", None)

        thawed = worker.thaw()

    assert (201, retried.get_json()) == (retried.status_code, thawed[1])
    assert 201 == thawed[0]
    assert 1 == rows(app)


def test_a_worker_that_thaws_before_it_is_given_up_frees_its_key(app: Flask) -> None:
    """
    The charge was ruled out at the first question, which frees no key. The thawed worker says so by 503, and the retry runs.
    """
    with frozen(app, "gateway") as worker:
        a_day_later(app)
        assert ReapReport(quarantined=1, asked=1, unknown=1) == reaped(app)

        status, body = worker.thaw()

    assert (503, "charge-ruled-out") == (status, body["code"])
    assert 0 == rows(app)
    assert 201 == ask(Customer(app), "gateway", None).status_code
    assert 1 == rows(app)


def test_a_second_attempt_that_vanished_is_ruled_out_too(app: Flask) -> None:
    """The marker of the first one does not stand in its way, and does not rule it out."""
    for _ in range(2):
        with frozen(app, "gateway") as worker:
            a_day_later(app)
            reaped(app)
            a_day_later(app)
            assert ReapReport(asked=1, released=1) == reaped(app)
            assert worker.thaw()[0] in (409, 503)
    assert 0 == rows(app)
    assert 201 == ask(Customer(app), "gateway", None).status_code
    assert 1 == rows(app)


def test_a_charge_whose_transaction_is_open_cannot_be_ruled_out(
    make_app: MakeApp, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that froze between its INSERT and its COMMIT holds the row: the outcome is open, then the charge is there."""
    monkeypatch.setattr(gateway, "LOCK_MS", 50)
    app = make_app(SQLALCHEMY_DATABASE_URI=postgres_url)
    charge = {"id": "gch_1", "tenant": "acme", "account_id": "acc_1", "amount": 1050, "currency": "EUR"}
    with app.app_context(), db.engine.connect() as frozen_inside:
        frozen_inside.execute(insert(GatewayCharge).values(charge))
        frozen_inside.execute(insert(GatewayMarker).values(reference="r", charge="gch_1"))

        assert (False, None) == (gateway.refuse("r", 1), gateway.made_under("r"))
        frozen_inside.commit()
        assert not gateway.refuse("r", 1)
        found = gateway.made_under("r")
        assert found is not None
        assert "gch_1" == found.id


def test_a_charge_without_a_key_needs_no_marker(app: Flask) -> None:
    """The janitor cannot resolve it, and two requests are two charges."""
    assert [201, 201] == [ask(Customer(app), "gateway", None, key=None).status_code for _ in range(2)]
    assert 2 == rows(app)


def test_a_key_that_is_used_again_after_its_record_has_ended(app: Flask) -> None:
    """The marker is still there. The view finds the same charge, and refuses another one."""
    customer = Customer(app)
    first = ask(customer, "gateway", None)
    on_records(app, "DELETE FROM idempotency_records")
    again = ask(customer, "gateway", None)
    on_records(app, "DELETE FROM idempotency_records")
    other = customer.send("POST", "/gateway/charges", "key-1", {"account_id": "acc_1", "amount": 1, "currency": "EUR"})

    assert (201, first.get_json()) == (again.status_code, again.get_json())
    assert 422 == other.status_code
    assert 1 == rows(app)
