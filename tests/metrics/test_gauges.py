"""How things stand, as a scrape finds it."""

from __future__ import annotations

import gc
import threading
from math import inf
from pathlib import Path
from typing import Any

import pytest
from flask import Blueprint, Flask
from prometheus_client import CollectorRegistry

from flask_idempotency import Idempotency
from flask_idempotency.engine.capabilities import UnfinishedCounts
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import ClaimRequest, OnExpiry
from flask_idempotency.engine.recovery import StillUnknown
from flask_idempotency.metrics import REMEMBERED_SECONDS, Gauges, gauges_of, watch
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import a_key, a_token
from tests.books import book_in

DEADLINE_SECONDS = 60


class Store(MemoryStore):
    """Counts how often it was asked how things stand, and may be down."""

    def __init__(self, clock: FrozenClock) -> None:
        super().__init__(clock=clock)
        self.asked = 0
        self.down = False
        real = self.recovery.counts

        def standing() -> UnfinishedCounts:
            self.asked += 1
            if self.down:
                raise StoreUnavailable("away")
            return real()

        self.recovery.counts = standing  # type: ignore[method-assign]

    def stand(self, *, lease: float, on_expiry: OnExpiry = OnExpiry.QUARANTINE) -> tuple[Any, bytes]:
        key, token = a_key(), a_token()
        self.claim(ClaimRequest(key, b"\1" + bytes(16), on_expiry), token=token, lease=lease)
        return key, token


@pytest.fixture
def store(clock: FrozenClock) -> Store:
    return Store(clock)


def shop(store: Any, name: str = "shop") -> Flask:
    app = Flask(name)
    app.config.update(TESTING=True, IDEMPOTENCY_NAMESPACE=name)
    Idempotency(app, store=store, secret="s-9f2c47d1e8b35a60")
    return app


def read(gauges: Gauges) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("idempotency_"), *(v for k, v in sample.labels.items() if k != "app")): sample.value
        for family in gauges.collect()
        for sample in family.samples
    }


def test_a_scrape_shows_unfinished_records_and_their_age(store: Store, clock: FrozenClock) -> None:
    """And when each task was last done, and what the clocks said."""
    app = shop(store)
    store.quarantine(*store.stand(lease=10), "test")
    store.stand(lease=20)
    store.stand(lease=500)
    book_in(store, "shop").report("heartbeat", '{"skew_ms":-1500,"stepped_ms":0}')
    clock.advance(60)
    book_in(store, "shop").report("reap", "{}")
    clock.advance(1)

    assert {
        ("store_up",): 1.0,
        ("unsettled_records", "in-flight"): 1.0,
        ("unsettled_records", "lapsed"): 1.0,
        ("unsettled_records", "quarantined"): 1.0,
        ("unsettled_age_seconds", "lapsed"): 41.0,
        ("unsettled_age_seconds", "quarantined"): 51.0,
        ("task_age_seconds", "heartbeat"): 61.0,
        ("task_age_seconds", "reap"): 1.0,
        ("clock_skew_seconds",): -1.5,
    } == read(gauges_of(app))


def test_a_store_without_unfinished_records_shows_0(store: Store) -> None:
    app = shop(store)  # held, or it may be gone before the scrape
    read_now = read(gauges_of(app))

    assert 0.0 == read_now["unsettled_records", "quarantined"] == read_now["unsettled_age_seconds", "quarantined"]
    assert not [name for name in read_now if name[0] in ("task_age_seconds", "clock_skew_seconds")]


def test_each_task_that_should_run_has_its_own_age(tmp_path: Path) -> None:
    """One alert compares each with its interval. A task that never ran is infinitely old, whatever else runs."""
    app = Flask("shop")
    app.config.update(TESTING=True, IDEMPOTENCY_STORE=f"sqlite:///{tmp_path}/s.db", IDEMPOTENCY_NAMESPACE="shop")
    Idempotency(app, secret="s-9f2c47d1e8b35a60", quota_records=5)
    state = app.extensions["idempotency"]
    state.built.schema.upgrade()
    state.built.tasks.report("heartbeat", '{"beating_s":1000}')
    state.built.tasks.report("reap", "{}")
    read_now = read(gauges_of(app))

    assert {"reap": 10.0, "expire": 60.0, "reconcile": 86400.0} == {
        name[1]: value for name, value in read_now.items() if name[0] == "task_interval_seconds"
    }
    ages = {name[1]: value for name, value in read_now.items() if name[0] == "task_age_seconds"}
    # A daily task may be about to run for the first time.
    assert ({"reap", "heartbeat", "expire"}, inf) == ({*ages}, ages["expire"])
    assert ages["reap"] < 100


def test_an_unreadable_heartbeat_shows_no_skew(store: Store) -> None:
    book_in(store, "shop").report("heartbeat", "[1]")
    book_in(store, "shop").report("a-task-of-tomorrow", "{}")

    app = shop(store)  # held, or it may be gone before the scrape
    read_now = read(gauges_of(app))

    assert (True, False, False) == (
        ("task_age_seconds", "heartbeat") in read_now,
        ("clock_skew_seconds",) in read_now,
        ("task_age_seconds", "a-task-of-tomorrow") in read_now,
    )


def test_scrapes_within_ten_seconds_share_a_reading(store: Store) -> None:
    """What a store was asked is good for a while, and then it is asked again."""
    times = FrozenClock()
    gauges = Gauges(monotonic=times)
    app = shop(store)
    gauges.add(app, name="shop")

    read(gauges)
    read(gauges)
    times.advance(REMEMBERED_SECONDS - 1)
    read(gauges)
    asked = store.asked
    times.advance(1)
    read(gauges)

    assert (1, 2) == (asked, store.asked)


def test_concurrent_scrapes_share_a_reading(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for what the first is told."""
    gauges = gauges_of(app := shop(store))
    second, real = threading.Event(), store.recovery.counts

    def standing() -> UnfinishedCounts:
        if store.asked:
            second.set()
        try:
            return real()
        finally:
            second.wait(0.2)  # for one that must not come

    monkeypatch.setattr(store.recovery, "counts", standing)
    threads = [threading.Thread(target=read, args=(gauges,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)

    assert (1, "shop") == (store.asked, app.name)


def test_a_store_that_is_away_shows_0_and_is_not_retried_for_a_while(store: Store) -> None:
    """The scrape succeeds without it; a storm of scrapes does not wait for it each time."""
    store.down = True
    gauges = gauges_of(app := shop(store))

    first, second = read(gauges), read(gauges)

    assert {("store_up",): 0.0} == first == second
    assert (1, "shop") == (store.asked, app.name)


def test_a_store_without_optional_parts_shows_only_that_it_is_up(store: Store) -> None:
    """One of somebody's own, which offers the port and nothing besides."""

    class Bare:
        claim, renew, mark_point_of_no_return, complete = (
            store.claim,
            store.renew,
            store.mark_point_of_no_return,
            store.complete,
        )
        release, quarantine, read, mark_corrupt = store.release, store.quarantine, store.read, store.mark_corrupt

    app = shop(Bare())
    assert {("store_up",): 1.0} == read(gauges_of(app))


def test_registering_does_not_ask_the_store(store: Store) -> None:
    """A registry looks for names when a collector is registered; the application may not be set up by then."""
    registry = CollectorRegistry(auto_describe=True)
    app = shop(store)

    registry.register(gauges_of(app))

    assert 0 == store.asked
    assert 1.0 == registry.get_sample_value("idempotency_store_up", {"app": app.name})


def test_applications_of_one_registry_are_told_apart(store: Store, clock: FrozenClock) -> None:
    registry = CollectorRegistry()
    other = Store(clock)
    other.stand(lease=100)
    apps = [shop(store, "shop"), shop(other, "bank")]
    for app in apps:
        watch(app, name=app.name, registry=registry)

    flying = [
        registry.get_sample_value("idempotency_unsettled_records", {"app": name, "state": "in-flight"})
        for name in ("shop", "bank")
    ]

    assert [0.0, 1.0] == flying


def test_a_scrape_reads_the_latest_application_of_a_name(store: Store, clock: FrozenClock) -> None:
    """Two series of the same labels would make the whole scrape worthless."""
    registry = CollectorRegistry()
    latest = Store(clock)
    apps = [shop(store), shop(latest)]
    for app in apps:
        watch(app, name="shop", registry=registry)
        registry.get_sample_value("idempotency_store_up", {"app": "shop"})

    assert [1, 1] == [store.asked, latest.asked]
    assert 1 == len([s for f in registry.collect() for s in f.samples if s.name == "idempotency_store_up"])


def test_gauges_keep_no_application_alive(store: Store) -> None:
    """Nor told of: what it last said would stay for ever."""
    gauges = gauges_of(app := shop(store))
    read(gauges)

    del app
    gc.collect()

    assert {} == read(gauges)


def test_a_disabled_application_has_no_gauges() -> None:
    app = Flask("shop")
    Idempotency(app, enabled=False, secret="s-9f2c47d1e8b35a60")

    assert {} == read(gauges_of(app))


def test_a_scrape_fixes_nothing_of_an_application_that_is_still_configured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server of metrics, and the thread of an exporter, run from the first line of the start on."""
    app, pay = Flask("shop"), Blueprint("pay", __name__)
    app.config.update(TESTING=True, IDEMPOTENCY_STORE=f"sqlite:///{tmp_path}/s.db", IDEMPOTENCY_NAMESPACE="shop")
    idempotency = Idempotency(app, secret="s-9f2c47d1e8b35a60")
    app.extensions["idempotency"].built.schema.upgrade()
    pay.post("/", endpoint="now")(lambda: "paid")
    idempotency.resolver("later")(lambda unknown: StillUnknown())
    idempotency.resolver("inbox:orders")(lambda unknown: StillUnknown())
    caplog.clear()

    assert not [name for name in read(gauges_of(app)) if name[0] == "task_interval_seconds"]
    app.register_blueprint(pay)
    app.post("/later", endpoint="later")(lambda: "paid")
    read(gauges_of(app))
    idempotency.configure(pay, required=True)

    assert app.test_client().post("/").status_code == 400
    assert ("task_interval_seconds", "reap") in read(gauges_of(app))
    assert [message for message in caplog.messages if "resolver" in message] == []


def test_a_scrape_fixes_no_policy_of_an_endpoint_with_a_resolver(tmp_path: Path) -> None:
    app, pay = Flask("shop"), Blueprint("pay", __name__)
    app.config.update(TESTING=True, IDEMPOTENCY_STORE=f"sqlite:///{tmp_path}/s.db", IDEMPOTENCY_NAMESPACE="shop")
    idempotency = Idempotency(app, secret="s-9f2c47d1e8b35a60")
    app.extensions["idempotency"].built.schema.upgrade()
    pay.post("/", endpoint="now")(lambda: "paid")
    app.register_blueprint(pay)
    idempotency.resolver("pay.now")(lambda unknown: StillUnknown())

    read(gauges_of(app))
    idempotency.configure(pay, required=True)

    assert app.test_client().post("/").status_code == 400
