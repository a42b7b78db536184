"""The commands of the outbox, its check in doctor, its gauges, and the tables in another database than the records."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from click.testing import Result
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from prometheus_client import CollectorRegistry
from sqlalchemy import MetaData, inspect, make_url

from flask_idempotency import Idempotency, sql
from flask_idempotency.engine.events import MessageDead, MessageSettled
from flask_idempotency.engine.outbox import Message, Topics, Undeliverable
from flask_idempotency.maintenance.relay import Relay, RelayReport, Stop, pause_after
from flask_idempotency.metrics import gauges_of
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.web.doctor import run_checks
from flask_idempotency.web.janitor import drain_of, janitor_of
from janitor.tasks import schedule_of
from tests.outbox.conftest import SECRET, OpenShop, Shop, on_both, on_each, on_postgresql


def run(shop: Shop, *arguments: str) -> Result:
    return shop.app.test_cli_runner().invoke(args=["idempotency", *arguments])


def kill(message: Message) -> Exception | None:
    return Undeliverable("too large") if message.body == b"1" else None


def with_a_dead_message(shop: Shop) -> int:
    shop.sent.fail = kill
    shop.publish("orders", 1, key="secret-key")
    shop.publish("orders", 2, key="secret-key")
    shop.drain()
    seq: int = shop.rows()[0].seq
    return seq


def test_relay_once_sends_what_is_due(shop: Shop) -> None:
    for number in range(120):
        shop.publish("orders", number)

    result = run(shop, "relay", "--once")

    assert (0, "Sent: 120. Delayed: 0. Dead: 0.") == (result.exit_code, result.output.strip())
    assert {"sent": 0, "delayed": 0, "dead": 0} == json.loads(run(shop, "relay", "--once", "--json").output)


@on_each
def test_relay_once_tries_each_message_once_and_logs_a_line_for_each_outcome(
    shop: Shop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the run takes so long that its first messages are due again before it ends."""
    tried: list[bytes] = []
    run_once = Relay.run_once

    def slowly(relay: Relay, *arguments: Any, **options: Any) -> RelayReport | None:
        shop.clock.advance(20)
        return run_once(relay, *arguments, **options)

    def fail(message: Message) -> Exception | None:
        tried.append(message.body)
        # A run that tries again and again ends too, and is found by its count.
        return TimeoutError() if message.body != b"5" and len(tried) < 50 else None

    monkeypatch.setattr(Relay, "run_once", slowly)
    shop.sent.fail = fail
    for number in range(5):
        shop.publish("orders", number)
    shop.publish("orders", 5)
    shop.publish("orders", 6, key="one")
    shop.publish("orders", 7, key="one")  # behind the one before, which fails
    with caplog.at_level("INFO", logger="flask_idempotency"):
        result = run(shop, "relay", "--once")

    assert (0, "Sent: 1. Delayed: 6. Dead: 0.") == (result.exit_code, result.output.strip())
    assert [str(number).encode() for number in range(7)] == sorted(tried)
    assert ["1 messages of * were sent", "6 messages of * were not sent (TimeoutError)"] == [
        record.getMessage() for record in caplog.records if "messages of" in record.getMessage()
    ]
    assert not [record for record in caplog.records if record.getMessage().startswith("message ")]
    shop.sent.fail = lambda message: None
    shop.clock.advance(600)
    assert RelayReport(7) == shop.drain()


def test_relay_once_logs_one_line_for_all_dead_messages_of_a_cause(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.sent.fail = lambda message: Undeliverable("too large")
    for number in range(3):
        shop.publish("orders", number)
    with caplog.at_level("INFO", logger="flask_idempotency"):
        assert "Sent: 0. Delayed: 0. Dead: 3." == run(shop, "relay", "--once").output.strip()

    assert [(logging.ERROR, "3 messages of * can never be sent (too large): see `flask idempotency outbox`")] == [
        (record.levelno, record.getMessage()) for record in caplog.records if record.levelno >= logging.ERROR
    ]
    assert [1, 2, 3] == [each.seq for each in shop.events if isinstance(each, MessageDead)]
    shop.publish("orders", 3)
    with caplog.at_level("INFO", logger="flask_idempotency"):
        shop.drain()
    assert 1 == caplog.text.count("A message can never be sent.")


def test_relay_once_counts_as_a_run(shop: Shop) -> None:
    """Cron may run it. Without a report, `doctor` would say that no relay runs."""
    tasks = shop.app.extensions["idempotency"].built.tasks
    assert "relay" not in tasks.reports()
    shop.publish("orders", 1)
    for sent in (1, 0):
        assert 0 == run(shop, "relay", "--once").exit_code
        assert (sent, True) == (tasks.reports()["relay"].whole("sent"), tasks.reports()["relay"].facts()["finished"])


def test_relay_once_waits_for_the_calls_under_way(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have begun when no time is left to wait for them."""
    monkeypatch.setattr("flask_idempotency.cli.outbox.WAIT_SECONDS", 0)
    stop, ended = Stop(), threading.Event()

    def end(message: Message) -> None:
        stop.set()
        ended.wait(60)

    monkeypatch.setattr("flask_idempotency.cli.outbox.Stop", lambda: stop)
    finish = Relay.finish

    def release(relay: Relay) -> RelayReport:
        ended.set()
        return finish(relay)

    monkeypatch.setattr(Relay, "finish", release)
    shop.sent.fail = end
    shop.publish("orders", 1)

    assert "Sent: 1. Delayed: 0. Dead: 0." == run(shop, "relay", "--once").output.strip()
    assert [] == shop.rows()


@on_each
def test_list_shows_no_key_and_no_body(shop: Shop) -> None:
    with_a_dead_message(shop)

    result, as_json = run(shop, "outbox", "list"), json.loads(run(shop, "outbox", "list", "--json").output)

    assert 1 == result.exit_code
    assert "too large" in result.output
    assert "Waiting: 1. Dead: 1." in result.output
    assert "secret-key" not in result.output + json.dumps(as_json)
    assert (1, 1, ["dead", "due"]) == (as_json["waiting"], as_json["dead"], [m["state"] for m in as_json["messages"]])
    assert 1 == len(json.loads(run(shop, "outbox", "list", "--dead", "--json").output)["messages"])


def test_an_empty_outbox_is_in_order(shop: Shop) -> None:
    result = run(shop, "outbox", "list")

    assert (0, "Waiting: 0. Dead: 0.") == (result.exit_code, result.output.strip())


@on_each
def test_retry_and_discard_leave_an_audit_event(shop: Shop) -> None:
    seq = with_a_dead_message(shop)

    assert 0 == run(shop, "outbox", "retry", str(seq), "--reason", "repaired", "--actor", "ann").exit_code
    shop.drain()
    assert 0 == run(shop, "outbox", "discard", str(seq), "--yes", "--reason", "by hand", "--actor", "bob").exit_code

    settled = [each for each in shop.events if isinstance(each, MessageSettled)]
    assert [("retried", "ann", "repaired", seq), ("discarded", "bob", "by hand", seq)] == [
        (each.verb, each.actor, each.reason, each.seq) for each in settled
    ]
    shop.drain()
    assert [b"2"] == shop.sent.bodies


@on_each
def test_all_dead_messages_of_a_topic_are_retried(shop: Shop) -> None:
    """A receiver may be wrong for a minute, and each of its messages is dead then. Others stay as they are."""
    shop.sent.fail = lambda message: Undeliverable("gone")
    for number in range(3):
        shop.publish("orders", number)
    shop.publish("mail", 4)
    shop.drain()
    shop.sent.fail = lambda message: None

    result = run(shop, "outbox", "retry", "--topic", "orders", "--reason", "repaired", "--actor", "ann")
    shop.drain()

    assert (0, "Messages of orders retried: 3.") == (result.exit_code, result.output.strip())
    assert [b"0", b"1", b"2"] == shop.sent.bodies
    settled = [(each.verb, each.actor) for each in shop.events if isinstance(each, MessageSettled)]
    assert [("retried", "ann")] * 3 == settled
    as_json = json.loads(run(shop, "outbox", "retry", "--topic", "orders", "--json").output)
    assert {"topic": "orders", "retried": [], "left": {"held": 0, "due": 0, "delayed": 0}} == as_json


@on_each
def test_retry_of_a_topic_takes_what_waits_for_its_next_attempt_and_says_what_it_left(shop: Shop) -> None:
    shop.sent.fail = lambda message: ConnectionError()
    shop.publish("orders", 1)
    shop.publish("mail", 2)
    shop.drain()
    shop.publish("orders", 3, delay=3600)
    shop.publish("orders", 4)
    (held,) = shop.table.claim(b"another relay", topics=Topics("orders"), limit=1, hold=30)
    shop.publish("orders", 5)
    shop.sent.fail = lambda message: None

    result = run(shop, "outbox", "retry", "--topic", "orders", "--reason", "repaired")
    shop.drain()

    assert (0, b"4") == (result.exit_code, held.message.body)
    assert (
        "Messages of orders retried: 1. Left: 1 that a relay is sending, 1 due already, 1 not due yet" in result.output
    )
    assert [b"1", b"5"] == sorted(shop.sent.bodies)
    as_json = json.loads(run(shop, "outbox", "retry", "--topic", "orders", "--json").output)
    assert {"topic": "orders", "retried": [], "left": {"held": 1, "due": 0, "delayed": 1}} == as_json


def test_retry_of_a_topic_reaches_the_failed_ones_behind_others(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flask_idempotency.cli.outbox.MOST_ROWS", 2)
    for number in range(3):
        shop.publish("orders", number, delay=3600)
    for number in range(3):
        shop.publish("mail", number)
    shop.sent.fail = lambda message: ConnectionError()
    shop.publish("orders", 9)
    shop.drain()

    result = run(shop, "outbox", "retry", "--topic", "orders")

    assert "Messages of orders retried: 1. Left: 1 not due yet and never failed. There may be more" in result.output


def test_retry_takes_a_number_or_a_topic(shop: Shop) -> None:
    for arguments in ((), ("1", "--topic", "orders")):
        result = run(shop, "outbox", "retry", *arguments)

        assert (2, True) == (result.exit_code, "Give the number of one message, or --topic." in result.output)


def test_discard_asks_first_and_refuses_a_healthy_message(shop: Shop) -> None:
    shop.publish("orders", 2)
    seq = str(shop.rows()[0].seq)

    asked = run(shop, "outbox", "discard", seq, "--reason", "x")
    refused = run(shop, "outbox", "discard", seq, "--yes", "--reason", "x")
    unknown = run(shop, "outbox", "retry", "999999")

    assert (1, 1, 1) == (asked.exit_code, refused.exit_code, unknown.exit_code)
    assert "Only a message whose last attempt failed" in refused.output
    assert "there is no message of this number" in unknown.output
    assert 1 == len(shop.rows())


def test_an_application_without_an_outbox_says_so(open_shop: OpenShop) -> None:
    shop = open_shop()
    del shop.app.extensions["idempotency_outbox"]

    for command in (("relay", "--once"), ("outbox", "list"), ("outbox", "retry", "1")):
        result = run(shop, *command)
        assert 1 == result.exit_code
        assert "This application has no outbox" in result.output


def test_a_relay_does_not_start_without_the_table(shop: Shop) -> None:
    shop.execute("DROP TABLE idempotency_outbox")

    result = run(shop, "relay")

    assert 1 == result.exit_code
    assert "flask idempotency db upgrade" in result.output


def found(shop: Shop) -> dict[str, str]:
    """The verdict and text of the check of the outbox."""
    with shop.app.app_context():
        report = run_checks(shop.app)
    (finding,) = [each for each in report.findings if each.check == "outbox"]
    return {"verdict": finding.verdict.value, "text": finding.text, "remedy": finding.remedy}


def test_doctor_reports_dead_and_late_messages(open_shop: OpenShop) -> None:
    shop = open_shop()
    assert "fine" == found(shop)["verdict"]
    shop.publish("orders", 2)
    assert "fine" == found(shop)["verdict"]
    shop.clock.advance(61)
    assert "advice" == found(shop)["verdict"]
    shop.clock.advance(600)
    assert "fault" == found(shop)["verdict"]
    assert "flask idempotency relay" in found(shop)["remedy"]
    shop.drain()
    with_a_dead_message(shop)
    assert ("fault", True) == (found(shop)["verdict"], "can never be sent: 1" in found(shop)["text"])


@on_each
def test_doctor_reports_topics_that_fail_for_more_than_a_minute(open_shop: OpenShop) -> None:
    """Each attempt makes them due later, so they are never late."""
    shop = open_shop()
    shop.sent.fail = lambda message: ConnectionError("https://secret.example") if message.topic != "mail" else None
    shop.publish("hooks.created")
    shop.publish("mail")
    for _ in range(6):
        shop.drain()
        assert "fine" == found(shop)["verdict"]
        shop.clock.advance(pause_after(shop.rows()[0].attempts - 1))
    shop.drain()

    assert "advice" == found(shop)["verdict"]
    assert "tried again: 1, of hooks.created. The oldest was published 1 min" in found(shop)["text"]
    assert found(shop)["text"].endswith("failed with: ConnectionError.")
    assert "outbox retry --topic" in found(shop)["remedy"]
    shop.sent.fail = lambda message: None
    shop.clock.advance(600)
    shop.drain()
    assert "fine" == found(shop)["verdict"]


@on_each
def test_doctor_leaves_a_message_alone_that_failed_a_moment_ago(open_shop: OpenShop) -> None:
    """It was published an hour before it was due."""
    shop = open_shop()
    shop.sent.fail = lambda message: ConnectionError()
    shop.publish("hooks.created", delay=3600)
    shop.clock.advance(3600)
    shop.drain()

    assert "fine" == found(shop)["verdict"]
    shop.clock.advance(60)
    assert "fine" == found(shop)["verdict"]
    shop.clock.advance(1)
    assert "tried again: 1, of hooks.created" in found(shop)["text"]


@on_both
def test_doctor_names_a_missing_table_and_index(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.execute("DROP INDEX idempotency_outbox_order")
    assert "idempotency_outbox_order is missing" in found(shop)["text"]
    shop.execute("DROP TABLE idempotency_outbox")
    assert "idempotency_outbox is missing" in found(shop)["text"]


def test_an_application_without_an_outbox_needs_no_table(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.execute("DROP TABLE idempotency_outbox")
    del shop.app.extensions["idempotency_outbox"]

    schema = shop.app.extensions["idempotency"].schema
    with shop.app.app_context():
        checks = {each.check for each in run_checks(shop.app).findings}

    assert [] == schema.faults()
    assert "outbox" not in checks


@on_postgresql
def test_doctor_names_the_rights_that_a_role_lacks(open_shop: OpenShop, records_url: str) -> None:
    shop = open_shop()
    role = "outbox_clerk"
    shop.execute(f"CREATE ROLE {role} LOGIN", f"GRANT SELECT, INSERT ON idempotency_outbox TO {role}")
    try:
        clerk = open_shop(make_url(records_url).set(username=role).render_as_string(hide_password=False))
        (fault,) = clerk.table.faults()
        assert fault.endswith(": grant it UPDATE, DELETE, USAGE on the sequence idempotency_outbox_seq_seq.")
    finally:
        shop.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_gauges_tell_the_backlog(open_shop: OpenShop) -> None:
    shop = open_shop()
    with_a_dead_message(shop)
    shop.clock.advance(7)
    registry = CollectorRegistry()
    registry.register(gauges_of(shop.app))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"idempotency_{name}", {"app": "shop", **labels})

    assert (1, 1, 7) == (
        value("outbox_messages", state="waiting"), value("outbox_messages", state="dead"), value("outbox_age_seconds")
    )  # fmt: skip


@on_each
def test_the_janitor_sends_and_expires(open_shop: OpenShop) -> None:
    shop = open_shop(keep=60)
    settings = shop.app.extensions["idempotency"].settings
    shop.table._clock = lambda: None
    shop.publish("orders", 2)

    report: Any = janitor_of(shop.app).run("relay", drain_of("relay", settings))
    shop.execute("UPDATE idempotency_outbox SET published_at = published_at - 61000000")
    removed: Any = janitor_of(shop.app).run("expire", drain_of("expire", settings))

    assert (1, 1, []) == (report.sent, removed.removed, shop.rows())
    assert "relay" in shop.app.extensions["idempotency"].built.tasks.reports()


def test_relay_interval_takes_the_task_out_of_the_schedule(open_shop: OpenShop) -> None:
    on, off = open_shop(), open_shop(IDEMPOTENCY_RELAY_INTERVAL=None)

    entries = [schedule_of(janitor_of(s.app), s.app.extensions["idempotency"].settings) for s in (on, off)]

    assert 5.0 == entries[0]["flask_idempotency.relay"]["schedule"]
    assert "flask_idempotency.relay" not in entries[1]


# The table beside records that are elsewhere.


def tables(shop: Shop) -> set[str]:
    with shop.app.app_context():
        return set(inspect(shop.db.engine).get_table_names())


@on_each
def test_upgrade_makes_the_table_alone_where_records_are_elsewhere(open_shop: OpenShop) -> None:
    shop = open_shop(store="memory://")
    with shop.app.app_context():
        for table in reversed(metadata.sorted_tables):
            table.drop(shop.db.engine, checkfirst=True)
    missing = run(shop, "db", "check")

    first, second = run(shop, "db", "upgrade"), run(shop, "db", "upgrade")

    assert (1, True) == (missing.exit_code, "idempotency_outbox is missing" in missing.output)
    assert (0, ["0002", "0005"]) == (first.exit_code, [line[:4] for line in first.output.splitlines()])
    assert "The schema is up to date." in second.output
    assert {"orders", "idempotency_outbox"} == tables(shop)
    shop.publish("orders", 2)
    assert 1 == shop.drain().sent


def test_create_all_makes_the_table_alone_where_records_are_elsewhere(tmp_path: Path) -> None:
    app = Flask("alone")
    app.testing = True
    app.config |= {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path / 'shop.sqlite'}", "IDEMPOTENCY_SECRET": SECRET}
    app.config |= {"IDEMPOTENCY_STORE": "memory://"}
    db = SQLAlchemy(app)
    Idempotency(app).outbox()

    with app.app_context():
        db.create_all()
        assert {"idempotency_outbox"} == set(inspect(db.engine).get_table_names()) == set(db.metadata.tables)
        db.engine.dispose()
    table = app.extensions["idempotency_outbox"].table
    assert [] == table.faults()
    table.close()


def test_include_in_takes_the_outbox_alone_and_then_all() -> None:
    own = MetaData()
    sql.include_in(own, records=False)
    alone = set(own.tables)
    sql.include_in(own)
    sql.include_in(own, records=False)

    assert ({"idempotency_outbox"}, set(metadata.tables)) == (alone, set(own.tables))


def test_autogenerate_writes_no_drop_of_the_table(open_shop: OpenShop) -> None:
    shop = open_shop()
    with shop.app.app_context(), shop.db.engine.connect() as connection:
        assert [] == compare_metadata(MigrationContext.configure(connection), shop.db.metadata)
