"""An application that is measured, from its settings to what a scrape shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

from flask_idempotency import ConfigurationError, Idempotency
from flask_idempotency.extension import AppState
from flask_idempotency.metrics import Meter, made_in
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.timed import TimedStore
from tests.apps import KEY, World, new_world

ROOT = Path(__file__).parents[2]


def shop(name: str, **settings: Any) -> World:
    world = new_world(Flask("tests.web.app"), namespace=name, **settings)
    world.view()(lambda: "paid")
    return world


def value(name: str, app: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"idempotency_{name}", {"app": app, **labels})


def state(world: World) -> AppState:
    found: AppState = world.app.extensions["idempotency"]
    return found


def test_a_measured_application_counts_its_requests_and_times_its_store() -> None:
    """In the registry that everybody's /metrics shows."""
    world = shop("measured", metrics=True)

    for _ in range(3):
        world.post()

    assert [1.0, 2.0, 1.0] == [
        value("claims_total", "measured", kind="first"),
        value("replays_total", "measured", answer="kept"),
        value("completions_total", "measured", status="2xx", answer="kept"),
    ]
    assert [1.0, 2.0, 1.0] == [
        value("store_call_duration_seconds_count", "measured", call=call, outcome=outcome)
        for call, outcome in (("claim", "granted"), ("claim", "replayed"), ("complete", "done"))
    ]


def test_series_start_at_0() -> None:
    """Nobody can be alerted to the first rise of a series that is not there."""
    world = shop("quiet", metrics=True)

    assert [0.0, 0.0, 0.0] == [
        value("quarantines_total", "quiet", cause="lease-expired"),
        value("lease_losses_total", "quiet"),
        value("store_failures_total", "quiet", request="unprotected"),
    ]
    assert state(world).settings.metrics


def test_without_metrics_the_store_is_not_wrapped() -> None:
    """Its store is not wrapped, and nobody counts."""
    world = shop("unmeasured")
    world.post()

    built = state(world).built
    assert built is not None
    assert built.engine._deps.store is world.store
    assert 2 == len(state(world).observers._observers)  # the log, and signals
    assert value("claims_total", "unmeasured", kind="first") is None


def test_two_applications_in_one_process_are_told_apart() -> None:
    one, other = shop("one", metrics=True), shop("other", metrics=True)
    one.post()
    other.post()
    other.post("/", "another")

    assert [1.0, 2.0] == [value("claims_total", name, kind="first") for name in ("one", "other")]


def test_a_timed_store_keeps_its_optional_parts() -> None:
    world = shop("besides", metrics=True, store=MemoryStore())

    built = state(world).built
    assert built is not None
    assert isinstance(built.engine._deps.store, TimedStore)
    assert None not in (built.ledger, built.data_keys, built.responses, built.recovery, built.tasks, built.health)


def test_a_transactional_application_is_measured_too(tmp_path: Path) -> None:
    """Its store is still the one of its own session; what is committed there is no call of the store's port."""
    app = Flask("tests.web.app")
    app.config.update(TESTING=True, SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path / 'shop.db'}")
    db = SQLAlchemy(app)
    Idempotency(
        app,
        store="flask-sqlalchemy://",
        secret="s-9f2c47d1e8b35a60",
        metrics=True,
        namespace="joint",
        effects="transactional",
    )
    app.post("/")(lambda: "paid")
    assert 0 == app.test_cli_runner().invoke(args=["idempotency", "db", "upgrade"]).exit_code

    answers = [app.test_client().post("/", headers={KEY: "k"}) for _ in range(2)]
    counted = [
        value("completions_total", "joint", status="2xx", answer="kept"),
        value("replays_total", "joint", answer="kept"),
        value("store_call_duration_seconds_count", "joint", call="claim", outcome="granted"),
    ]
    up = value("store_up", "joint")
    with app.app_context():
        db.engine.dispose()

    assert [200, 200] == [answer.status_code for answer in answers]
    assert ([1.0, 1.0, 1.0], 1.0) == (counted, up)


def test_without_prometheus_client_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("prometheus_client", "flask_idempotency.metrics"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'flask-idempotency\[metrics\]'"):
        shop("missing", metrics=True)
    assert shop("missing").post().status_code == 200


def test_a_meter_uses_the_given_registry() -> None:
    registry = CollectorRegistry()
    app = Flask("shop")

    Meter(app, name="shop", registry=registry)

    assert b'idempotency_lease_losses_total{app="shop"} 0.0' in generate_latest(registry)


def test_metrics_that_another_library_has_are_refused_each_time() -> None:
    """No application counts in the half of them that were made before the error."""
    registry = CollectorRegistry()
    Counter("idempotency_store_call_duration_seconds", "Of another library.", registry=registry)

    for _ in range(2):
        with pytest.raises(ValueError, match="Duplicated"):
            made_in(registry)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="gunicorn forks")
def test_counters_of_several_processes_add_up(tmp_path: Path) -> None:
    """As gunicorn's workers are, with PROMETHEUS_MULTIPROC_DIR: every worker's counts, and one reading of the store."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.metrics.crowd"],
        cwd=ROOT,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    shown = ran.stdout.splitlines()
    assert 'idempotency_claims_total{app="crowd",kind="first"} 2.0' in shown
    assert 'idempotency_store_up{app="crowd"} 1.0' in shown
