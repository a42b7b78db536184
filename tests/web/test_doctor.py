"""What `doctor` finds in whole applications: each check fires on a broken one, and is quiet on one that is well."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask

from example_app.demo.servers import RedisServer
from flask_idempotency import Idempotency, Step, idempotent
from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.recovery import StillUnknown
from flask_idempotency.operations.examination import DoctorReport, _registered
from flask_idempotency.settings import derived_secret
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from flask_idempotency.web.doctor import Application, run_checks
from tests.books import book_in
from tests.operations.judging import worst

FAULT, UNKNOWN, ADVICE, FINE = Verdict.FAULT, Verdict.UNKNOWN, Verdict.ADVICE, Verdict.FINE
RING = {"new": b64encode(b"n" * 32).decode()}


FLASKS, OWN = "flask's-9f2c47d1e8b35a60", "s-9f2c47d1e8b35a60"


class Store(MemoryStore):
    """The memory store, as one that other processes could see."""


def shop(**settings: Any) -> Flask:
    return set_up(Flask("shop"), **settings)


def set_up(app: Flask, *, setup: Callable[[Idempotency], object] = lambda extension: None, **settings: Any) -> Flask:
    app.config.update({"SECRET_KEY": FLASKS, **settings.pop("config", {})})
    extension = Idempotency(**{"secret": "s-9f2c47d1e8b35a60", "store": MemoryStore(), **settings})
    setup(extension)
    app.post("/pay", endpoint="pay")(lambda: "paid")
    extension.init_app(app)
    return app


def test_a_secret_equal_to_secret_key_is_reported() -> None:
    """However both are written; and one that is only listed to be rotated out is no longer in use for new keys."""
    for secret in (FLASKS, FLASKS.encode()):
        (told,) = found(shop(secret=secret), "secret")
        assert "is SECRET_KEY itself" in told.text
    (told,) = found(shop(secret=[OWN, FLASKS]), "secret")
    assert "SECRET_KEY" not in told.text


def examined(app: Flask, environ: Mapping[str, str] | None = None, **timeouts: float) -> DoctorReport:
    with app.app_context():
        return run_checks(app, environ=environ or {}, **timeouts)


def found(app: Flask, check: str, environ: Mapping[str, str] | None = None, **timeouts: float) -> list[Finding]:
    return [each for each in examined(app, environ, **timeouts).findings if each.check == check]


def resolved(extension: Idempotency) -> None:
    extension.resolver("pay")(lambda unknown: StillUnknown())


def misnamed(extension: Idempotency) -> None:
    extension.resolver("refund")(lambda unknown: StillUnknown())


CASES: list[tuple[str, Verdict, dict[str, Any]]] = [
    ("store-kind", FAULT, {"store": "memory://"}),
    ("store-kind", FINE, {"store": "memory://", "config": {"TESTING": True}}),
    ("secret", ADVICE, {"secret": derived_secret(FLASKS)}),
    ("secret", ADVICE, {"secret": FLASKS}),
    ("secret", ADVICE, {"secret": FLASKS.encode()}),
    ("secret", ADVICE, {"secret": [FLASKS, OWN]}),
    ("secret", ADVICE, {"secret": OWN, "config": {"SECRET_KEY": OWN.encode()}}),
    ("secret", ADVICE, {"secret": OWN, "config": {"SECRET_KEY_FALLBACKS": [OWN]}}),
    ("secret", ADVICE, {"secret": derived_secret(OWN), "config": {"SECRET_KEY_FALLBACKS": [OWN]}}),
    ("secret", ADVICE, {"secret": [OWN, "another-9f2c47d1e8b35a60"]}),
    ("secret", ADVICE, {"secret": "a", "config": {"TESTING": True}}),
    ("secret", FINE, {"secret": OWN}),
    ("secret", FINE, {"secret": OWN, "config": {"SECRET_KEY": None}}),
    ("worker-timeout", UNKNOWN, {}),
    ("worker-timeout", ADVICE, {"worker_timeout": 30}),
    ("worker-timeout", FAULT, {"worker_timeout": 30, "max_runtime": 60}),
    ("worker-timeout", FINE, {"worker_timeout": 30, "max_runtime": 30}),
    ("worker-timeout", FINE, {"worker_timeout": 0}),
    ("proxy-timeout", FINE, {}),
    ("proxy-timeout", UNKNOWN, {"in_flight": "wait"}),
    ("proxy-timeout", ADVICE, {"in_flight": "wait", "proxy_timeout": 5}),
    ("proxy-timeout", FINE, {"in_flight": "wait", "proxy_timeout": 0}),
    ("lease", ADVICE, {"lease": 2}),
    ("lease", FINE, {}),
    ("resolvers", ADVICE, {}),
    ("resolvers", ADVICE, {"effects": "marked"}),
    ("resolvers", FINE, {"effects": "deduplicated"}),
    ("resolvers", FINE, {"setup": resolved}),
    ("resolvers", FAULT, {"setup": misnamed}),
    ("policies", FINE, {}),
    ("docs-url", FINE, {}),
    ("docs-url", ADVICE, {"docs_url": "https://docs.example/problems"}),
    ("docs-url", ADVICE, {"docs_url": "/problems/"}),
    ("transport", FINE, {}),
    ("janitor", FINE, {}),
    ("newest-key", FINE, {"encryption": "on", "key_ring": RING}),
    ("keys", FINE, {"encryption": "on", "key_ring": RING}),
    ("persistence", FAULT, {}),
]


def test_every_parameter_of_a_check_is_an_attribute_of_the_application() -> None:
    known = {*Application.__dataclass_fields__, "counted", "endpoints", "intervals", "ran"}

    for each in _registered:
        parameters = signature(each.look).parameters.items()
        assert {name for name, parameter in parameters if parameter.default is Parameter.empty} <= known, each.name


def test_each_setting_gets_its_verdict() -> None:
    for check, verdict, settings in CASES:
        assert verdict is worst(found(shop(**settings), check)), (check, verdict, settings)


class Forgetful(FaultyStore):
    """A store of the application's own, which remembers no steps."""

    journals = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("store", "step", "verdict", "what"),
    (
        (MemoryStore, Step("save", effects="transactional"), FAULT, "transactional"),
        (lambda: Forgetful(MemoryStore()), Step("charge"), FAULT, "remembers steps"),
        (MemoryStore, Step("charge"), FINE, "can hold"),
    ),
    ids=("no-joint-store", "no-journals", "well"),
)
def test_declared_steps_that_the_store_cannot_keep_are_a_fault(
    store: Callable[[], Any], step: Step, verdict: Verdict, what: str
) -> None:
    app = shop(store=store())
    app.post("/refund", endpoint="refund")(idempotent(steps=(step,))(lambda: "back"))

    said = found(app, "policies")

    assert verdict is worst(said)
    assert what in said[0].text


@pytest.mark.parametrize(
    ("step", "verdict"),
    ((Step("charge"), ADVICE), (Step("mail", effects="deduplicated"), FINE)),
    ids=("plain", "other"),
)
def test_a_plain_step_needs_a_resolver(step: Step, verdict: Verdict) -> None:
    """A worker that vanishes in it leaves a quarantine, though the endpoint is taken over otherwise."""
    app = shop(effects="deduplicated")
    app.post("/refund", endpoint="refund")(idempotent(steps=(step,))(lambda: "back"))

    assert verdict is worst(found(app, "resolvers"))


def test_a_missing_folder_for_temporary_files_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FINE is worst(found(shop(), "temporary-files"))
    monkeypatch.setattr("flask_idempotency.web.doctor.disk_usage", lambda path: SimpleNamespace(free=1024))
    assert ADVICE is worst(found(shop(), "temporary-files"))
    monkeypatch.setattr("tempfile.tempdir", "/removed")
    (finding,) = found(shop(), "temporary-files")

    assert FAULT is finding.verdict
    assert "ENOENT" in finding.text
    assert "TMPDIR" in finding.remedy


def test_a_policy_that_cannot_hold_is_a_fault() -> None:
    """Also that of a view, which init_app has not seen."""
    app = shop()
    app.post("/refund", endpoint="refund")(idempotent(effects="transactional")(lambda: "back"))

    said = found(app, "policies")

    assert FAULT is worst(said)
    assert "POST refund" in said[0].text


@pytest.mark.parametrize(
    ("url", "verdict"),
    (
        ("redis://elsewhere.example", ADVICE),
        ("rediss://elsewhere.example", FINE),
        ("redis://localhost", FINE),
        ("postgresql+psycopg://u:password@elsewhere.example/shop", ADVICE),
        ("postgresql+psycopg://u:password@elsewhere.example/shop?sslmode=verify-full", FINE),
        ("tests.web.test_doctor:Store", UNKNOWN),
    ),
)
def test_a_plaintext_connection_is_reported(url: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the setting that names it; never the URL, which may hold a password."""
    monkeypatch.setattr("flask_idempotency.assembly._redis_store", lambda *arguments: Store())
    monkeypatch.setattr("flask_idempotency.assembly._sql_store", lambda strategy, bind: Store())
    app = shop(store=url)

    said = found(app, "transport")

    assert verdict is worst(said)
    assert not [each for each in said if "password" in each.text + each.remedy]


def test_an_allowed_plaintext_connection_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flask_idempotency.assembly._redis_store", lambda *arguments: Store())
    app = shop(store="redis://elsewhere.example", allow_plaintext_transport=True)

    assert FINE is worst(found(app, "transport"))


@pytest.mark.parametrize(
    ("option", "setting", "arguments", "verdict"),
    (
        pytest.param({}, None, "-t 30", ADVICE, id="gunicorn's"),
        pytest.param({}, None, "-t 30 --threads 4", FINE, id="gunicorn's, with threads"),
        pytest.param({}, 901, "-t 30", FINE, id="the setting goes before gunicorn's"),
        pytest.param({"worker_timeout": 30.0}, 901, "-t 901", ADVICE, id="the option goes before both"),
        pytest.param({"worker_timeout": 0.0}, 30, "-t 30", FINE, id="never"),
    ),
)
def test_the_worker_timeout_comes_from_option_then_setting_then_gunicorn(
    option: dict[str, float], setting: float | None, arguments: str, verdict: Verdict
) -> None:
    app = shop(worker_timeout=setting)

    assert verdict is worst(found(app, "worker-timeout", {"GUNICORN_CMD_ARGS": arguments}, **option))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that a janitor could see, where one is made by a function."""
    store = Store()
    monkeypatch.setattr("flask_idempotency.assembly._factory", lambda path: lambda: store)
    return store


def of_function(**settings: Any) -> Flask:
    return shop(store="tests.web.test_doctor:Store", **settings)


def test_a_janitor_that_never_reported_is_a_fault(shared: Store) -> None:
    before = found(of_function(), "janitor")
    book_in(shared, "shop").report("heartbeat", "{}")

    assert [FAULT, FINE] == [worst(before), worst(found(of_function(), "janitor"))]


def test_only_tasks_with_work_are_missed(shared: Store) -> None:
    """Nobody rotates where nothing is encrypted, and nobody recounts where there are no quotas."""
    book_in(shared, "shop").report("heartbeat", '{"beating_s":1000}')

    said = found(of_function(reconcile_interval=10, rotate_interval=10), "tasks")
    counted = found(of_function(reconcile_interval=10, quota_records=5), "tasks")

    assert [True, True, False, False] == [
        f"task {c} is" in str(said) for c in ("reap", "expire", "reconcile", "rotate")
    ]
    assert "task reconcile is" in str(counted)


def test_a_misnamed_resolver_is_a_fault_of_the_resolvers_check_alone(shared: Store) -> None:
    book_in(shared, "shop").report("heartbeat", "{}")
    app = of_function(setup=misnamed)

    assert [FINE, FAULT] == [worst(found(app, check)) for check in ("tasks", "resolvers")]


def test_a_backlog_and_a_clock_step_are_reported(shared: Store) -> None:
    book_in(shared, "shop").report("expire", json.dumps({"removed": 1, "finished": False}))
    book_in(shared, "shop").report("heartbeat", json.dumps({"skew_ms": 0, "stepped_ms": 60_000, "finished": True}))
    app = of_function()

    assert [ADVICE, FAULT] == [worst(found(app, check)) for check in ("backlog", "clock-step")]


def test_a_key_missing_in_the_ring_is_reported(shared: Store) -> None:
    old = {"old": b64encode(b"o" * 32).decode()}
    of_function(encryption="on", key_ring=old).test_client().post("/pay", headers={"Idempotency-Key": "k"})

    said = [worst(found(of_function(encryption="on", key_ring=ring), "keys")) for ring in (old, {**RING, **old}, RING)]

    assert [FINE, ADVICE, FAULT] == said


def test_a_store_without_optional_parts_is_unknown_and_in_order() -> None:
    """One of somebody's own that offers the port alone: it works, and cannot be looked into."""
    whole = MemoryStore()

    class Bare:
        claim, renew, mark_point_of_no_return, complete = (
            whole.claim,
            whole.renew,
            whole.mark_point_of_no_return,
            whole.complete,
        )
        release, quarantine, read, mark_corrupt = whole.release, whole.quarantine, whole.read, whole.mark_corrupt

    said = examined(shop(store=Bare()))

    unknown = {each.check for each in said.findings if each.verdict is UNKNOWN}
    assert {"health", "clock-skew", "janitor", "quarantined", "lapsed"} <= unknown
    assert (True, True) == (said.complete, said.in_order)


def test_a_store_that_is_away_is_one_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what needs no store is looked at all the same."""
    store = MemoryStore()
    app = shop(store=store)

    def away(*arguments: object) -> float:
        raise StoreUnavailable("it is away")

    monkeypatch.setattr(store.task_log, "now", away)

    said = examined(app)

    assert [FAULT, FINE] == [
        worst(each for each in said.findings if each.check == name) for name in ("store", "policies")
    ]
    assert (False, UNKNOWN) == (said.complete, worst(each for each in said.findings if each.check == "quarantined"))


def test_a_database_is_checked_with_and_without_tables(tmp_path: Path) -> None:
    """With its tables, and without: then that is a fault, and the rest of it is looked at all the same."""
    app = shop(store=f"sqlite:///{tmp_path / 'shop.db'}")

    without = examined(app)
    assert 0 == app.test_cli_runner().invoke(args=["idempotency", "db", "upgrade"]).exit_code
    after = examined(app)

    assert [FAULT, FINE] == [
        next(each.verdict for each in examination.findings if each.check == "schema")
        for examination in (without, after)
    ]
    assert [(True, False), (True, False)] == [(each.complete, each.in_order) for each in (without, after)]
    assert ["janitor"] == [each.check for each in after.findings if each.verdict is FAULT]


def test_a_redis_is_checked(redis_server: RedisServer) -> None:
    """What it says of itself, and what every store is asked."""
    app = shop(store=redis_server.url)
    app.test_client().post("/pay", headers={"Idempotency-Key": "k"})

    said = examined(app)

    names = {each.check for each in said.findings}
    assert {"store", "eviction", "persistence", "memory", "clock-skew", "janitor", "quarantined", "lapsed"} <= names
    assert (True, FINE) == (said.complete, worst(each for each in said.findings if each.check == "store"))


def test_a_custom_store_that_is_away_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not tell the time is asked for a key that nobody has used."""
    store = FaultyStore(MemoryStore())
    app = shop(store=store)
    store.down = True

    said = examined(app)

    assert (FAULT, "store", False) == (said.findings[0].verdict, said.findings[0].check, said.complete)
