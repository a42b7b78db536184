"""Relays in processes of their own: SIGTERM, SIGKILL between sending and deleting, forks, and PgBouncer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.engine.errors import InheritedConnection
from flask_idempotency.maintenance.relay import HOLD_SECONDS
from flask_idempotency.stores.sql.schema import metadata
from tests.outbox.conftest import OpenShop, Shop, on_each, on_postgresql
from tests.tooling.processes import eventually

pytestmark = pytest.mark.slow
PATIENCE = 60
ROOT = Path(__file__).parents[2]


@pytest.fixture
def start_relay(records_url: str, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    with ExitStack() as ends:

        def start() -> subprocess.Popen[str]:
            environment = {
                **os.environ,
                "OUTBOX_URL": make_url(records_url).render_as_string(hide_password=False),
                "OUTBOX_FOLDER": str(tmp_path),
                "PYTHONPATH": str(ROOT),
            }
            command = [sys.executable, "-m", "flask", "--app", "tests.outbox.outbox_process:create_app"]
            process = subprocess.Popen(
                [*command, "idempotency", "relay", "--poll", "0.1"],
                env=environment,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            ends.callback(process.communicate)
            ends.callback(process.kill)
            return process

        yield start


def sent(folder: Path) -> list[list[str]]:
    file = folder / "sent"
    return [line.split(" ", 2) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


@on_postgresql
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_ends_a_relay_between_two_attempts(
    shop: Shop, start_relay: Callable[[], subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    relay = start_relay()
    shop.table._clock = lambda: None
    shop.publish("orders", 1)
    assert eventually(lambda: not shop.rows())

    relay.send_signal(number)
    output, _ = relay.communicate(timeout=PATIENCE)

    assert 0 == relay.returncode, output
    assert "Sent: 1. Delayed: 0. Dead: 0." in output
    assert 1 == len(sent(tmp_path))
    assert "relay" in shop.app.extensions["idempotency"].built.tasks.reports()


@on_each
def test_a_relay_that_is_killed_after_it_sent_sends_again_under_the_same_id(
    shop: Shop, start_relay: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "kill").touch()
    shop.table._clock = lambda: None
    message_id = shop.publish("orders", 1, key="a")
    later = shop.publish("orders", 2, key="a")

    assert -signal.SIGKILL == start_relay().wait(PATIENCE)
    assert [message_id] == [line[0] for line in sent(tmp_path)]
    assert 2 == len(shop.rows())
    # Its hold ends by the database's clock, so another relay waits for that.
    assert shop.relay.run_once() is None
    shop.clock.now = time.time() + HOLD_SECONDS + 1
    shop.table._clock = shop.clock
    shop.drain()

    assert [message_id, later] == shop.sent.ids


def test_killed_relays_lose_nothing_and_keep_the_order(
    shop: Shop, start_relay: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Three times a relay dies right after it sent. Its messages come again, and none is first sent before its elder.

    The inbox of the receiver does the work of each once.
    """
    inbox = shop.idempotency.inbox("billing")
    effects: list[int] = []
    shop.table._clock = lambda: None
    for number in range(30):
        shop.publish("orders", number, key=str(number % 3))
    for _ in range(3):
        (tmp_path / "kill").touch()
        start_relay().wait(PATIENCE)
        with shop.app.app_context(), shop.db.engine.begin() as connection:
            # As if 30 seconds had passed.
            connection.exec_driver_sql("UPDATE idempotency_outbox SET held_until = 0 WHERE held_until IS NOT NULL")
    relay = start_relay()
    assert eventually(lambda: not shop.rows())
    relay.terminate()
    relay.communicate(timeout=PATIENCE)

    lines = sent(tmp_path)
    first = list(dict.fromkeys((key, int(body)) for _, key, body in lines))
    with shop.app.app_context():
        for message_id, _, body in lines:
            inbox.process(message_id, partial(effects.append, int(body)), payload=body.encode())
    assert 30 + 3 == len(lines)
    assert list(range(30)) == sorted(effects)
    assert 30 == len({line[0] for line in lines})
    assert [[number for number in range(30) if number % 3 == key] for key in range(3)] == [
        [body for name, body in first if name == str(key)] for key in range(3)
    ]


@on_each
def test_a_forked_child_publishes_on_connections_of_its_own(open_shop: OpenShop) -> None:
    """As gunicorn with --preload: both processes would write to one socket."""
    shop = open_shop(store="memory://")
    shop.table._clock = lambda: None
    shop.publish("orders", 0)
    assert 1 == shop.table.counts().waiting
    children = []
    for number in (1, 2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for step in range(10):
                    shop.publish("orders", 100 * number + step)
                assert shop.table.counts().waiting > 0
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for step in range(10):
        shop.publish("orders", step)

    assert [0, 0] == [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert 31 == len(shop.rows()) == len({row.sent_id for row in shop.rows()})


@on_postgresql
def test_an_inherited_transaction_is_not_used(open_shop: OpenShop) -> None:
    """The parent's transaction is open at the fork: its connection is dropped, and the child's message is its own."""
    shop = open_shop(store="memory://")
    shop.table._clock = lambda: None
    with shop.app.app_context():
        shop.outbox.publish("orders", 1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                # The transaction is the parent's: it is refused until the child has rolled its copy back.
                with pytest.raises((InheritedConnection, SQLAlchemyError)):
                    shop.outbox.publish("orders", 2)
                shop.db.session.rollback()
                shop.outbox.publish("orders", 3)
                shop.db.session.rollback()
                status = 0
            finally:
                os._exit(status)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shop.db.session.commit()

    assert [b"1"] == [bytes(row.body) for row in shop.rows()]


@pytest.mark.matrix
def test_everything_works_behind_pgbouncer(open_shop: OpenShop, pgbouncer_url: str, records_url: str) -> None:
    """In transaction mode: the lock of a claim ends with its transaction, and no statement needs a session."""
    options = {"connect_args": {"prepare_threshold": None}}
    shop = open_shop(pgbouncer_url, SQLALCHEMY_ENGINE_OPTIONS=options)
    with shop.app.app_context():
        metadata.create_all(shop.db.engine)
    shop.table._clock = lambda: None
    for number in range(20):
        shop.publish("orders", number, key=str(number % 2))

    assert 20 == shop.drain().sent
    assert [] == shop.rows()
