"""What an outbox carries: messages published and relayed in a second, and how long one waits for its relay."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from time import perf_counter

from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from benchmarks import sql_apps
from benchmarks.apps import SECRET
from benchmarks.harness import Cores, quantile
from benchmarks.report import SILENT_TO_IDLE, Row, Section, at_most
from benchmarks.sql_apps import MISSING, Database
from flask_idempotency import Idempotency
from flask_idempotency.engine.outbox import Message
from flask_idempotency.maintenance.relay import SendFailed, Stop, run
from flask_idempotency.outbox.outbox import Outbox, OutboxServices

SIZES = (1, 10, 100)
"""Messages in one transaction."""

BODY = {"id": 1, "amount": 4200, "currency": "EUR", "account": "acct-1", "note": "x" * 100}
POLL_SECONDS = 0.5

NOTE = (
    "`published` and `relayed`: messages a second with one thread each, and an adapter that confirms at once. Each transaction "
    "has that many messages of 150 bytes, with 50 keys. `p50` and `p99`: ms from the commit to the adapter, one message at a "
    "time, with the default poll of half a second, and `busy` while there is always another message."
)


SILENT_NOTE = (
    "ms from the commit to the call of the adapter, for 1,000 messages to 40 hosts that respond after 5 ms, ten at a time. "
    "`silent`: 100 other hosts never respond, and have 5 messages each, which were published first."
)
SILENT_HOSTS, SILENT_EACH, GOOD = 100, 5, 1000
SILENT_SECONDS = 10.0


class Hosts:
    """Tells receivers apart, as `Webhook` does. Those whose tenant is `silent-…` never respond."""

    batch, parallel = 1, 256

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.end = threading.Event()

    def receiver_of(self, message: Message) -> str | None:
        return message.tenant

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        (message,) = messages
        self.began.setdefault(message.message_id, perf_counter())
        if (message.tenant or "").startswith("silent"):
            self.end.wait(SILENT_SECONDS)
            return [SendFailed("no response")]
        time.sleep(0.005)
        return [None]


class Sink:
    """Confirms at once, and notes when."""

    def __init__(self) -> None:
        self.arrived: list[float] = []
        self.came = threading.Event()

    def send(self, messages: Sequence[Message]) -> Sequence[None]:
        self.arrived.append(perf_counter())
        self.came.set()
        return [None] * len(messages)


def sections(url: str | None, cores: Cores, *, rounds: int, messages: int) -> list[Section]:
    rows: list[Row] = []
    with sql_apps.postgresql(url, cores) as database:
        if database is None:
            print(MISSING, file=sys.stderr)
        else:
            rows += _rows(database, rounds=rounds, messages=messages)
    with sql_apps.sqlite() as file:
        rows += _rows(file, rounds=rounds, messages=messages)
        silent = _silent(file)
    return [Section("Outbox", NOTE, rows), Section("Outbox with silent receivers", SILENT_NOTE, silent)]


def _silent(database: Database) -> list[Row]:
    waits = {name: _waits(database, name, silent=name == "silent") for name in ("idle", "silent")}
    cells = {
        name: {"p50": quantile(each, 0.5) * 1e3, "p99": quantile(each, 0.99) * 1e3} for name, each in waits.items()
    }
    ratio = cells["silent"]["p99"] / cells["idle"]["p99"]
    verdict = at_most(f"p99 ≤ {SILENT_TO_IDLE:g} × idle", ratio, SILENT_TO_IDLE)
    return [Row("idle", cells["idle"]), Row("silent", {**cells["silent"], "to idle": ratio}, [verdict])]


def _waits(database: Database, namespace: str, *, silent: bool) -> list[float]:
    """Return how long each good message waited for its first call."""
    db, outbox, services = _application(database, namespace)
    hosts, stop, published = Hosts(), Stop(), dict[str, float]()
    outbox.route("*", hosts)
    thread = threading.Thread(target=lambda: run(services.relay(), stop=stop, poll=POLL_SECONDS))
    try:
        if silent:
            for number in range(SILENT_HOSTS * SILENT_EACH):
                outbox.publish("hooks", BODY, tenant=f"silent-{number % SILENT_HOSTS}")
            db.session.commit()
        thread.start()
        for first in range(0, GOOD, 10):
            ids = [outbox.publish("hooks", BODY, tenant=f"good-{(first + each) % 40}") for each in range(10)]
            db.session.commit()
            published.update(dict.fromkeys(ids, perf_counter()))
            time.sleep(0.02)
        ends = perf_counter() + 60
        while not published.keys() <= hosts.began.keys() and perf_counter() < ends:
            time.sleep(0.05)
    finally:
        hosts.end.set()
        stop.set()
        thread.join()
        db.session.remove()
        services.table.close()
    return [max(hosts.began.get(each, ends) - at, 0.0) for each, at in published.items()]


def _application(database: Database, namespace: str) -> tuple[SQLAlchemy, Outbox, OutboxServices]:
    app = Flask("benchmark")
    app.config |= {"SQLALCHEMY_DATABASE_URI": database.url, "IDEMPOTENCY_SECRET": SECRET}
    app.config |= {"IDEMPOTENCY_STORE": "memory://", "IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT": True}
    app.config["IDEMPOTENCY_NAMESPACE"] = namespace
    app.testing = True
    db = SQLAlchemy(app)
    outbox = Idempotency(app).outbox()
    app.app_context().push()
    return db, outbox, app.extensions["idempotency_outbox"]


def _rows(database: Database, *, rounds: int, messages: int) -> list[Row]:
    app = Flask("benchmark")
    app.config |= {"SQLALCHEMY_DATABASE_URI": database.url, "IDEMPOTENCY_SECRET": SECRET}
    app.config |= {"IDEMPOTENCY_STORE": "memory://", "IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT": True}
    app.testing = True
    db, sink = SQLAlchemy(app), Sink()
    outbox = Idempotency(app).outbox()
    outbox.route("*", sink)
    services: OutboxServices = app.extensions["idempotency_outbox"]
    rows = []
    with app.app_context():
        for size in SIZES:
            count = max(messages * 5, size) // size * size
            published, relayed = _throughput(db, outbox, services, size=size, count=count)
            cells: dict[str, float | str] = {"published": published, "relayed": relayed}
            if size == 1:
                waits = _latencies(db, outbox, services, sink, samples=max(rounds * 2, 5))
                cells |= {"p50": quantile(waits, 0.5) * 1e3, "p99": quantile(waits, 0.99) * 1e3}
                busy = _latencies(db, outbox, services, sink, samples=max(rounds * 10, 20), poll=0.001)
                cells |= {"busy p50": quantile(busy, 0.5) * 1e3, "busy p99": quantile(busy, 0.99) * 1e3}
            rows.append(
                Row(
                    f"{database.kind}, {size} a transaction" if size > 1 else f"{database.kind}, 1 a transaction", cells
                )
            )
        db.session.remove()
        db.engine.dispose()
    services.table.close()
    return rows


def _throughput(
    db: SQLAlchemy, outbox: Outbox, services: OutboxServices, *, size: int, count: int
) -> tuple[float, float]:
    began = perf_counter()
    for first in range(0, count, size):
        for number in range(first, first + size):
            outbox.publish("orders", BODY, key=str(number % 50))
        db.session.commit()
    published = count / (perf_counter() - began)
    relay = services.relay()
    began, sent = perf_counter(), 0
    while (report := relay.run_once()) is not None:
        sent += report.sent
    assert sent == count
    return published, count / (perf_counter() - began)


def _latencies(
    db: SQLAlchemy,
    outbox: Outbox,
    services: OutboxServices,
    sink: Sink,
    *,
    samples: int,
    poll: float = POLL_SECONDS,
) -> list[float]:
    """Publish one message after the other to a relay in another thread. Return the seconds that each waited."""
    stop, waits = Stop(), []
    thread = threading.Thread(target=lambda: run(services.relay(), stop=stop, poll=poll))
    thread.start()
    try:
        for number in range(samples):
            # Spread over the pause between two looks of the relay.
            time.sleep(poll * (number % 10) / 10)
            sink.came.clear()
            outbox.publish("orders", BODY)
            db.session.commit()
            committed = perf_counter()
            sink.came.wait(30)
            waits.append(max(sink.arrived[-1] - committed, 0.0))
    finally:
        stop.set()
        thread.join()
    return waits
