"""The example application by HTTP, once observing and once enforcing: the report shows the same counts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import httpx
import pytest
from flask import Flask

from example_app import simulate
from tests.example_app.conftest import MakeApp, Server

PAYMENT = {"account": "acc_1", "amount": 1050, "currency": "EUR"}
INVOICE = {"customer": "cus_1", "amount": 4200, "currency": "EUR"}
WAIT_SECONDS = 60.0
"""Only a failure takes this long."""

ONLY_OBSERVED = ("unkeyed", "sets-cookie")


class Client:
    """Plays the tour's requests against one server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=WAIT_SECONDS)

    def send(
        self, path: str, key: str | None, *, header: str = "Idempotency-Key", bearer: str = "tok_alice", **body: Any
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {bearer}"} | ({} if key is None else {header: key})
        return self._http.request(body.pop("method", "POST"), path, headers=headers, **body)

    def tour(self) -> None:
        """First requests, retries, other payloads, tenants and callers, missing and malformed keys, and failures."""
        for key in ("order-1", "order-1", "order-2", "order-2", "order-3"):
            self.send("/payments", key, json=PAYMENT)
        self.send("/payments", "order-1", json=PAYMENT | {"amount": 99})
        for bearer in ("tok_bob", "tok_carol", "tok_carol"):
            self.send("/payments", "order-1", json=PAYMENT, bearer=bearer)
        for bad in (None, "", "a b", "x" * 300):
            self.send("/payments", bad, json=PAYMENT)
        for status in (422, 401, 503, 500):
            for _ in range(2):
                self.send("/payments", f"fails-{status}", json=PAYMENT | {"simulate": {"status": status}})
        self.send("/payments", "invalid", json={"account": ""})
        self.send("/payments", "invalid", json={"account": ""})
        for _ in range(2):
            self.send("/v1/charges", "charge-1", data={"amount": "1050", "currency": "eur", "source": "tok_visa"})
        self.send("/v1/charges", "charge-1", data={"amount": "1", "currency": "eur", "source": "tok_visa"})
        self.send("/v1/charges", None, data={"amount": "1050", "currency": "eur", "source": "tok_visa"})
        for _ in range(2):
            self.send("/api/invoices", "inv-1", json=INVOICE, header="X-Idempotency-Key")
        self.send("/api/invoices", None, json=INVOICE)
        for moment in ("2026-01-01", "2026-01-02"):
            body = {"account_id": "acc_1", "amount": 5, "currency": "EUR", "timestamp": moment}
            self.send("/gateway/charges", "gate-1", json=body)

    def at_once(self, number: int, *, entered: Semaphore, leave: Event) -> None:
        """Send equal requests while the first is held in its view. The simulation holds only the first run of a key."""
        # Not payments: on SQLite, the transaction of one excludes the others.
        about = {"header": "X-Idempotency-Key", "json": INVOICE | {"simulate": {"delay": 1.0}}}
        threads = [
            threading.Thread(target=self.send, args=("/api/invoices", "at-once"), kwargs=about) for _ in range(number)
        ]
        threads[0].start()
        assert entered.acquire(timeout=WAIT_SECONDS)
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join(WAIT_SECONDS)
        leave.set()
        for thread in threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()

    def close(self) -> None:
        self._http.close()


class Held:
    """Replaces `time` in the simulation: a delay lasts until `leave` is set."""

    def __init__(self) -> None:
        self.entered, self.leave = Semaphore(0), Event()

    def sleep(self, seconds: float) -> None:
        if seconds:
            self.entered.release()
            assert self.leave.wait(WAIT_SECONDS)


@pytest.fixture
def apps(make_app: MakeApp, tmp_path: Path) -> Iterator[dict[str, Flask]]:
    made = {
        mode: make_app(
            SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path / f'{mode}.sqlite3'}",
            DEMO_WITNESS=str(tmp_path / f"{mode}.witness"),
            IDEMPOTENCY_MODE=mode,
            IDEMPOTENCY_ACTIVITY=True,
            PROPAGATE_EXCEPTIONS=False,
        )
        for mode in ("observe", "enforce")
    }
    yield made
    for app in made.values():
        app.extensions["idempotency"].activity._renewer.remove(app.extensions["idempotency"].activity)


def counts_of(app: Flask) -> dict[str, dict[str, int]]:
    """Return what `flask idempotency report` counts of each endpoint, above 0."""
    assert app.extensions["idempotency"].activity.flush()
    shown = app.test_cli_runner().invoke(args=["idempotency", "report", "--json"])
    assert shown.exit_code == 0, shown.output
    endpoints = json.loads(shown.stdout)["endpoints"]
    return {
        name: {outcome: number for outcome, number in each["counts"].items() if number and outcome not in ONLY_OBSERVED}
        for name, each in endpoints.items()
    }


def test_the_report_of_both_modes_is_the_same(apps: dict[str, Flask], monkeypatch: pytest.MonkeyPatch) -> None:
    for app in apps.values():
        server = Server(app)
        client = Client(server.url)
        held = Held()
        monkeypatch.setattr(simulate, "time", held)
        client.tour()
        client.at_once(5, entered=held.entered, leave=held.leave)
        client.close()
        server.stop()

    observed, enforced = counts_of(apps["observe"]), counts_of(apps["enforce"])
    assert enforced == observed
    payments = enforced["payments.create"]
    assert {"replayed", "mismatch", "missing-key", "bad-request", "released"} <= payments.keys()
    assert 4 == sum(each.get("conflict", 0) for each in enforced.values())
