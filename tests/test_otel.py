"""Spans and metrics with the real SDK, and with OpenTelemetry's own instrumentation of Flask."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from opentelemetry import metrics
from opentelemetry.instrumentation.flask import FlaskInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flask_idempotency import ConfigurationError, Idempotency, durable_step, idempotent, otel
from flask_idempotency.engine.model import Grant, OnExpiry, Record, RequestInfo
from flask_idempotency.otel import NEVER_SECONDS, _context_of
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from tests.apps import World, new_world
from tests.backends import BACKENDS
from tests.sql_backends import maria_database, sql_databases, sql_stores
from tests.stages import CORE

__all__ = ["maria_database", "sql_databases", "sql_stores"]

ROOT = Path(__file__).parents[1]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LATER = "00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203332-00"
SECRETS = ("k-17", "alice", "acme")


class Traced:
    """An application whose spans the test reads."""

    def __init__(self, **settings: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        settings.setdefault("opentelemetry", True)
        self.world: World = new_world(Flask("tests.web.app"), principal=lambda: "alice", **settings)
        FlaskInstrumentor().instrument_app(self.world.app, tracer_provider=provider)  # type: ignore[no-untyped-call]

    def post(self, path: str = "/", key: str | None = "k-17") -> ReadableSpan:
        """Send a keyed POST, and return its span."""
        before = len(self.exporter.get_finished_spans())
        self.world.post(path, key)
        return self.exporter.get_finished_spans()[before]


def shown(span: ReadableSpan) -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if name.startswith("idempotency.")}


def links(span: ReadableSpan) -> list[tuple[int, int, Any]]:
    return [
        (link.context.trace_id, link.context.span_id, (link.attributes or {}).get("idempotency.met_as"))
        for link in span.links
    ]


def place(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def test_a_replay_shows_its_outcome_and_links_to_the_run() -> None:
    traced = Traced()
    traced.world.view()(lambda: "paid")

    first, replay = traced.post(), traced.post()

    fence = shown(first)["idempotency.fence"]
    assert shown(first) == {
        "idempotency.outcome": "first",
        "idempotency.attempt": 1,
        "idempotency.fence": fence,
        "idempotency.ending": "completed",
    }
    assert shown(replay) == {"idempotency.outcome": "replayed", "idempotency.attempt": 1, "idempotency.fence": fence}
    assert (links(first), links(replay)) == ([], [(*place(first), "replay")])


def test_a_conflict_links_to_the_run_that_holds_the_key() -> None:
    traced = Traced()
    met: list[ReadableSpan] = []

    @traced.world.view()
    def pay() -> str:
        met.append(traced.post())
        return "paid"

    traced.world.post("/", "k-17")
    conflict, first = traced.exporter.get_finished_spans()

    assert shown(conflict) == {"idempotency.outcome": "in-flight"}
    assert links(conflict) == [(*place(first), "conflict")]


def test_a_resumed_request_links_to_the_run_before() -> None:
    traced = Traced()
    down = [True]

    @durable_step("charge", effects="deduplicated")
    def charge() -> int:
        return 1

    @traced.world.view()
    @idempotent(steps=(charge,))
    def pay() -> tuple[str, int]:
        charge()
        return ("later", 503) if down and down.pop() else ("paid", 200)

    first, resumed, replay = traced.post(), traced.post(), traced.post()

    assert [shown(span)["idempotency.ending"] for span in (first, resumed)] == ["paused", "completed"]
    assert shown(resumed) | {"idempotency.fence": 0} == {
        "idempotency.outcome": "takeover",
        "idempotency.attempt": 2,
        "idempotency.fence": 0,
        "idempotency.ending": "completed",
    }
    assert links(resumed) == [(*place(first), "resume")]
    assert links(replay) == [(*place(resumed), "replay")]


def test_a_refusal_shows_its_code() -> None:
    traced = Traced()
    traced.world.view()(lambda: "paid")
    traced.post()
    before = len(traced.exporter.get_finished_spans())

    traced.world.post("/", "k-17", json={"other": True})

    assert shown(traced.exporter.get_finished_spans()[before]) == {"idempotency.outcome": "key-reused"}
    assert shown(traced.post("/", None)) == {}


def test_a_span_has_no_key_and_no_name() -> None:
    traced = Traced(tenant=lambda: "acme")
    traced.world.view()(lambda: "paid")

    spans = [traced.post(), traced.post()]

    texts = [str(span.attributes) + str([link.attributes for link in span.links]) for span in spans]
    assert [secret for secret in SECRETS for text in texts if secret in text] == []


def test_without_a_span_and_without_the_setting_a_record_keeps_no_trace() -> None:
    world = new_world(Flask("tests.web.app"), opentelemetry=True)
    world.view()(lambda: "paid")
    assert world.post().status_code == 200
    off = Traced(opentelemetry=False)
    off.world.view()(lambda: "paid")

    assert (shown(off.post()), links(off.post())) == ({}, [])
    records = [each.record() for each in (world, off.world)]
    assert ["", ""] == [None if record is None else record.info.trace for record in records]


def test_a_store_that_fails_to_read_costs_the_link_alone() -> None:
    traced = Traced()
    statuses: list[int] = []

    @traced.world.view()
    def pay() -> str:
        traced.world.store.lose_request("read")
        statuses.append(traced.world.post("/", "k-17").status_code)
        return "paid"

    traced.world.post("/", "k-17")
    conflict, _ = traced.exporter.get_finished_spans()

    assert (statuses, links(conflict), shown(conflict)) == ([409], [], {"idempotency.outcome": "in-flight"})


@pytest.mark.parametrize("kind", CORE)
def test_each_store_keeps_the_trace_of_the_run_that_holds_the_key(kind: str, request: pytest.FixtureRequest) -> None:
    with ExitStack() as ends:
        clock = FrozenClock()
        store: Any = BACKENDS[kind](request, ends)(clock)
        key, about = a_key(), RequestInfo(tenant="acme", principal="alice", method="POST", operation="pay")
        infos = [RequestInfo("acme", "alice", "POST", "pay", each) for each in (TRACE, LATER)]

        def claim(info: RequestInfo, token: bytes) -> Grant:
            asked = a_request(key, about=info, on_expiry=OnExpiry.TAKEOVER)
            return granted(store.claim(asked, token=token, lease=LEASE))

        first = claim(infos[0], a_token())
        seen = [store.read(key).info]
        clock.advance(LEASE + 1)
        token = a_token()
        second = claim(infos[1], token)
        again = claim(infos[1], token)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        replayed = store.claim(a_request(key, about=about, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE)

        assert (first.taken_from, second.taken_from, again.taken_from) == ("", TRACE, "")
        assert isinstance(replayed, Record)
        assert [*seen, replayed.info] == infos
        assert len(TRACE) == 55


@pytest.mark.parametrize(
    "text",
    ("", "POST", "00-1-2-3", TRACE.replace("00-", "01-", 1), TRACE.replace("a", "g"), f"00-{'0' * 32}-{'0' * 16}-01"),
)
def test_what_is_no_trace_makes_no_link(text: str) -> None:
    assert _context_of(text) is None
    assert _context_of(TRACE) is not None


@pytest.fixture(scope="module")
def reader() -> Iterator[InMemoryMetricReader]:
    """The provider of this process. OpenTelemetry lets a program set it once."""
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    yield reader
    reader.shutdown()


def samples(reader: InMemoryMetricReader, name: str, app: str) -> dict[tuple[Any, ...], Any]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        tuple(value for label, value in (point.attributes or {}).items() if label != "app"): getattr(
            point, "value", getattr(point, "count", None)
        )
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
        if (point.attributes or {}).get("app") == app
    }


def test_events_and_gauges_are_counted(reader: InMemoryMetricReader) -> None:
    traced = Traced(namespace="metered")
    traced.world.view()(lambda: "paid")
    for _ in range(3):
        traced.post()

    assert samples(reader, "idempotency.claims", "metered") == {("first",): 1}
    assert samples(reader, "idempotency.replays", "metered") == {("kept",): 2}
    assert samples(reader, "idempotency.response_size", "metered") == {(): 1}
    assert samples(reader, "idempotency.store_up", "metered") == {(): 1.0}


def test_a_task_that_never_ran_has_an_age_that_an_sdk_takes(
    reader: InMemoryMetricReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = Flask("tests.web.app")
    app.config.update(TESTING=True, IDEMPOTENCY_STORE=f"sqlite:///{tmp_path}/s.db", IDEMPOTENCY_OPENTELEMETRY=True)
    Idempotency(app, secret="s-9f2c47d1e8b35a60", namespace="no-janitor")
    app.extensions["idempotency"].built.schema.upgrade()

    ages = samples(reader, "idempotency.task_age_seconds", "no-janitor")

    assert {("reap",): NEVER_SECONDS, ("expire",): NEVER_SECONDS} == ages
    assert "non-finite" not in caplog.text


def test_prometheus_counts_beside_it(reader: InMemoryMetricReader) -> None:
    from prometheus_client import REGISTRY

    traced = Traced(namespace="counted-twice", metrics=True)
    traced.world.view()(lambda: "paid")
    traced.post()

    name, labels = "idempotency_store_call_duration_seconds_count", {"call": "claim", "outcome": "granted"}
    assert REGISTRY.get_sample_value(name, {"app": "counted-twice", **labels}) == 1.0
    assert samples(reader, "idempotency.claims", "counted-twice") == {("first",): 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_that_is_forked_during_an_export_serves_requests(reader: InMemoryMetricReader) -> None:
    """The thread of the exporter does not exist in the child, so no thread there would release its locks."""
    traced = Traced(namespace="forked")
    traced.world.view()(lambda: "paid")
    (telemetry,) = [each for each in otel._apps if each._name == "forked"]

    with telemetry._lock, otel._gauges._lock:
        child = os.fork()
        if not child:
            signal.alarm(30)  # kills a child that waits
            try:
                os._exit(0 if traced.world.post().status_code == 200 and reader.get_metrics_data() else 1)
            finally:
                os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
def test_off_it_is_not_imported() -> None:
    code = (
        "import sys; from flask import Flask; from flask_idempotency import Idempotency; app = Flask('shop');"
        "app.testing = True; Idempotency(app, secret='s' * 16, principal=lambda: 'alice');"
        "app.post('/')(lambda: 'paid'); app.test_client().post('/', headers={'Idempotency-Key': 'k'});"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'flask_idempotency.otel'))])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)

    assert ran.stdout == "[]\n"


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("opentelemetry", "flask_idempotency.otel"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'flask-idempotency\[otel\]'"):
        new_world(Flask("tests.web.app"), opentelemetry=True)
