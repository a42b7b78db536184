"""What the guard counts of each request, how it measures it, and what does not pay for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask, Response, abort, request
from prometheus_client import REGISTRY
from werkzeug.test import EnvironBuilder

from flask_idempotency import Idempotency, exempt, idempotent
from flask_idempotency.activity import Activity
from flask_idempotency.consumers.inbox import Inbox
from flask_idempotency.engine.activity import MINUTE, merged, slot
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.apps import KEY, LONG, World, new_world

NAME = "tests.web.app"
WAIT_SECONDS = 60.0
"""Only a failure takes this long."""


class Counted:
    """An application with activity, whose clock stands still unless its views move it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now = 100.0
        for module in ("guard", "hooks"):
            monkeypatch.setattr(f"flask_idempotency.web.{module}.perf_counter", lambda: self.now)
        self.world: World = new_world(Flask(NAME), activity=True, **settings)
        self.activity: Activity = self.world.app.extensions["idempotency"].activity
        self.activity._renewer = LeaseRenewer(threaded=False)  # no flush by itself

        @self.world.app.after_request
        def later(response: Response) -> Response:
            self.now += 0.25
            return response

    def counts(self) -> dict[str, dict[str, int]]:
        """Return everything that was counted so far."""
        assert self.activity.flush()
        page = self.world.store.activity.read(owner_mark(NAME), length=MINUTE, seconds=MINUTE)
        return merged(bucket.counts for bucket in page.buckets)


def new(seconds: float) -> str:
    return f"t:new:{slot(seconds)}"


def replayed(seconds: float) -> str:
    return f"t:replayed:{slot(seconds)}"


def test_a_request_is_measured_until_its_response_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the view and the hooks behind it, which run for a replay too."""
    counted = Counted(monkeypatch)

    @counted.world.view("/pay")
    def pay() -> str:
        counted.now += 1.0
        return "paid"

    for key in ("k", "k", "other"):
        counted.world.post("/pay", key=key)

    assert counted.counts() == {
        "pay": {"new": 2, "completed": 2, new(1.25): 2, "replayed": 1, replayed(0.25): 1},
    }


@pytest.mark.parametrize(
    ("status", "policy", "ending"),
    (
        (503, {}, "released"),
        (500, {}, "quarantined"),
        (500, {"on_error": "release"}, "released"),
        (404, {}, "completed"),
    ),
)
def test_a_request_that_fails_is_measured_too(
    monkeypatch: pytest.MonkeyPatch, status: int, policy: Any, ending: str
) -> None:
    counted = Counted(monkeypatch, **policy)

    @counted.world.view("/pay")
    def pay() -> str:
        counted.now += 1.0
        abort(status)

    counted.world.post("/pay")

    assert counted.counts() == {"pay": {"new": 1, ending: 1, new(1.25): 1}}


def test_a_view_that_raises_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)

    @counted.world.view("/pay")
    def pay() -> str:
        raise RuntimeError("the view failed")

    counted.world.post("/pay")

    assert counted.counts() == {"pay": {"new": 1, "quarantined": 1, new(0.25): 1}}


def test_a_stream_is_measured_until_its_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)

    @counted.world.view("/pay")
    def pay() -> Response:
        def chunks() -> Iterator[str]:
            for _ in range(4):
                counted.now += 1.0
                yield "x"

        return Response(chunks())

    environ = EnvironBuilder("/pay", method="POST", headers=[(KEY, "k")]).get_environ()
    body = iter(counted.world.app(environ, lambda status, headers, exc_info=None: lambda data: None))
    next(body)
    assert counted.counts() == {"pay": {"new": 1}}

    assert len(list(body)) == 3
    assert counted.counts() == {"pay": {"new": 1, "completed": 1, new(4.25): 1}}


def test_refusals_are_counted_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, max_request_body=20)
    world = counted.world
    inside = list[int]()

    @world.view("/pay")
    def pay() -> str:
        inside.append(world.post("/pay", data="x").status_code)
        return "paid"

    @world.view("/refund")
    @idempotent(required=True)
    def refund() -> str:
        return "never"

    assert [200, 422] == [world.post("/pay", data=data).status_code for data in ("x", "y")]
    assert inside == [409]
    assert 400 == world.post("/refund", key=None).status_code
    assert 400 == world.post("/refund", key="x" * 500).status_code
    assert 413 == world.post("/refund", data="x" * 21).status_code

    assert counted.counts() == {
        "pay": {"new": 1, "completed": 1, new(0.5): 1, "conflict": 1, "mismatch": 1},
        "refund": {"missing-key": 1, "missing-key@anonymous": 1, "bad-request": 2},
    }


def test_a_caller_without_a_name_and_a_truncated_body_are_bad_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, principal=None, allow_anonymous=False)

    @counted.world.view("/pay")
    def pay() -> str:
        return "never"

    assert 403 == counted.world.post("/pay").status_code

    assert counted.counts() == {"pay": {"bad-request": 1}}


def test_a_store_that_is_down_is_counted_by_what_became_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)

    @counted.world.view("/pay")
    def pay() -> str:
        return "never"

    @counted.world.view("/log")
    @idempotent(on_store_down="allow")
    def log() -> str:
        return "logged"

    counted.world.store.down = True
    assert [503, 200] == [counted.world.post(path).status_code for path in ("/pay", "/log")]
    counted.world.store.down = False

    assert counted.counts() == {"pay": {"store-failed": 1}, "log": {"unprotected": 1}}


def test_what_concerns_no_key_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, form_field="key")

    @counted.world.app.route("/pay", methods=("GET", "POST"))
    def pay() -> str:
        return "paid"

    @counted.world.view("/exempt")
    @exempt
    def free() -> str:
        return "free"

    counted.world.client().get("/pay", headers={KEY: "k"})
    counted.world.post("/pay", key=None)
    counted.world.post("/pay", key=None, data={"amount": "1"})
    counted.world.post("/exempt")

    assert not counted.activity._pending
    assert counted.counts() == {}


def test_a_replay_that_a_later_hook_breaks_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets the 500 of that hook."""
    counted = Counted(monkeypatch)
    fails = list[int]()

    @counted.world.view("/pay")
    def pay() -> str:
        return "paid"

    @counted.world.app.after_request
    def fail(response: Response) -> Response:
        if fails and fails.pop():
            raise RuntimeError("the hook failed")
        return response

    counted.world.post("/pay")
    fails.append(1)
    assert 500 == counted.world.post("/pay").status_code

    assert counted.counts() == {"pay": {"new": 1, "completed": 1, new(0.25): 1, "replayed": 1}}


def test_messages_are_counted_under_the_name_of_their_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    inbox = counted.world.idempotency.inbox("billing")

    with counted.world.app.app_context():
        for _ in range(2):
            inbox.process("m-1", lambda: "done")

    assert counted.counts() == {"inbox:billing": {"new": 1, "completed": 1, "replayed": 1}}


def test_the_metrics_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who compares the page of the console with a Prometheus dashboard sees the same numbers."""
    name = "activity-and-metrics"
    counted = Counted(monkeypatch, metrics=True, namespace=name)
    world = counted.world

    @world.view("/pay")
    def pay() -> tuple[str, int]:
        if request.headers.get("X-Again"):
            world.post("/pay", key=request.headers[KEY])
        return "paid", int(request.headers.get("X-Status", 201))

    for number in range(30):
        status = ("200", "404", "500", "503")[number // 2 % 4]
        for _ in range(1 + number % 3):
            world.post(
                "/pay", key=f"k{number // 2}", headers={"X-Status": status} | ({"X-Again": "1"} if number % 5 else {})
            )
        world.post("/pay", key=f"k{number // 3}", data="other")
    world.store.down = True
    world.post("/pay")
    world.store.down = False
    assert counted.activity.flush()
    page = world.store.activity.read(owner_mark(name), length=MINUTE, seconds=MINUTE)
    [found] = merged(bucket.counts for bucket in page.buckets).values()

    def metric(family: str, **labels: str) -> int:
        return int(
            sum(
                sample.value
                for metric in REGISTRY.collect()
                for sample in metric.samples
                if sample.name == f"idempotency_{family}_total"
                and {"app": name, **labels}.items() <= sample.labels.items()
            )
        )

    agreeing = {
        "new": metric("claims", kind="first"),
        "replayed": metric("replays"),
        "conflict": metric("refusals", code="in-flight"),
        "mismatch": metric("refusals", code="key-reused"),
        "unknown": metric("refusals", code="outcome-unknown"),
        "completed": metric("completions"),
        "released": metric("releases"),
        "quarantined": metric("quarantines"),
        "store-failed": metric("store_failures", request="refused"),
    }
    assert agreeing == {counter: number for counter, number in found.items() if not counter.startswith("t:")}
    assert min(agreeing.values()) > 0


# The setting.


def activity_in(app: Flask, **settings: Any) -> Activity | None:
    Idempotency(app, secret=LONG, principal=lambda: "alice", **settings)
    found: Activity | None = app.extensions["idempotency"].activity
    return found


@pytest.mark.parametrize(
    ("testing", "setting", "on"),
    ((False, None, True), (True, None, False), (True, True, True), (False, False, False), (False, True, True)),
)
def test_it_is_on_unless_the_application_is_in_testing_or_switches_it_off(
    testing: bool, setting: bool | None, on: bool
) -> None:
    app = Flask(NAME)
    app.testing = testing

    assert (activity_in(app, activity=setting) is not None) == on


def test_a_store_that_keeps_no_activity_has_none_unless_it_is_demanded() -> None:
    assert activity_in(Flask(NAME), store=FaultyStore(MemoryStore())) is None
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_ACTIVITY is True, and this store keeps no activity"):
        activity_in(Flask(NAME), store=FaultyStore(MemoryStore()), activity=True)


def test_without_activity_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    world = new_world(activity=False)
    monkeypatch.setattr("flask_idempotency.web.guard.perf_counter", _never)
    monkeypatch.setattr("flask_idempotency.web.hooks.perf_counter", _never)

    @world.view()
    def pay() -> str:
        return "paid"

    assert [200, 200, 400] == [world.post(key=key).status_code for key in ("k", "k", "x" * 500)]


def _never() -> float:
    raise AssertionError("this request was measured")


def test_a_store_that_never_answers_to_activity_delays_no_request() -> None:
    """Nor does it delay the renewal of a lease: activity has a thread of its own."""
    world = new_world(activity=True)
    activity: Activity = world.app.extensions["idempotency"].activity
    called, answers = threading.Event(), threading.Event()

    class Silent:
        def add(self, owner: bytes, counts: Any, *, token: bytes) -> None:
            called.set()
            answers.wait(WAIT_SECONDS)
            raise StoreUnavailable

    activity._store = Silent()  # type: ignore[assignment]

    @world.view()
    def pay() -> str:
        return "paid"

    assert 200 == world.post().status_code
    activity._renewer.add(activity, after=0.0)
    assert called.wait(WAIT_SECONDS)
    try:
        assert [200, 200] == [world.post(key=key).status_code for key in ("a", "b")]
        engine = world.app.extensions["idempotency"].built.engine
        assert activity._renewer not in (engine._deps.renewer, engine._deps.repeater)
    finally:
        answers.set()


def test_an_inbox_without_an_application_counts_too() -> None:
    inbox = Inbox.standalone({"IDEMPOTENCY_SECRET": LONG, "IDEMPOTENCY_STORE": "memory://"}, "billing")
    services = inbox._services()
    [activity] = [each.__self__ for each, _ in services.observers._observers if hasattr(each, "__self__")]

    inbox.process("m-1", lambda: "done")

    assert isinstance(activity, Activity)
    assert activity.flush()
    page = activity._store.read(owner_mark(services.settings.namespace), length=MINUTE, seconds=MINUTE)
    assert merged(bucket.counts for bucket in page.buckets) == {"inbox:billing": {"new": 1, "completed": 1}}
