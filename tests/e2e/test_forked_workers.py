"""Workers that are forked from a process which has used the application's database, by the servers that people use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from celery import Celery

from example_app.demo.servers import DIE_WITH_PARENT, RedisServer
from tests.e2e.books import Books
from tests.e2e.conftest import Serve
from tests.e2e.forked_shop import APPLICATION, WARM
from tests.e2e.ledger import Ledger
from tests.e2e.processes import ROOT, STOP_SECONDS
from tests.e2e.purchases import Purchase, assert_paid_once
from tests.e2e.shop import ACCOUNTS
from tests.e2e.wire import ask, message

CLIENTS = 16
KEYS = 160
ORDERS, DELIVERIES = 12, 2


@pytest.mark.parametrize(
    ("kind", "fork"),
    (
        ("gthread", "pooled, held"),
        pytest.param("gthread", "pooled", marks=pytest.mark.matrix),
        pytest.param("sync", "pooled", marks=pytest.mark.matrix),
        pytest.param("sync", "pooled, held", marks=pytest.mark.matrix),
    ),
)
def test_gunicorn_preloads_an_application_that_has_used_its_database(
    books: Books, serve_once: Serve, ledger: Ledger, kind: str, fork: str
) -> None:
    """Every key has one row and one answer, and an answer of 201 has a row."""
    server = serve_once(
        books.url,
        app=APPLICATION,
        kind=kind,
        workers=4,
        threads=WARM,
        arguments=("--preload",),
        environment={"E2E_FORK": fork},
    )
    purchases = [Purchase() for _ in range(KEYS)]

    def pay(purchase: Purchase) -> int:
        purchase.pay(server.port)
        # A view that neither has a key nor writes shares the application's connections with those that do.
        found: int = ask(server.port, message("GET", "/balance")).json["accounts"]
        return found

    with ThreadPoolExecutor(CLIENTS) as clients:
        seen = Counter(clients.map(pay, purchases))

    assert seen == {ACCOUNTS: KEYS}

    assert {1} == {ledger.runs(purchase.order.case) for purchase in purchases}
    assert_paid_once(books, server.port, purchases)


@pytest.mark.parametrize("fork", (pytest.param("pooled", marks=pytest.mark.matrix), "pooled, held"))
def test_celery_forks_its_pool_from_an_application_that_has_used_its_database(
    books: Books, ledger_server: RedisServer, ledger: Ledger, tmp_path: Path, fork: str
) -> None:
    """Twelve orders, each delivered twice, and their rows by four prefork children."""
    orders = [(str(uuid4()), uuid4().hex) for _ in range(ORDERS)]
    sender, queue = Celery("sender", broker=ledger_server.url, set_as_current=False), uuid4().hex
    environment = {"E2E_STORE": books.url, "E2E_LEDGER": ledger_server.url, "E2E_FORK": fork}

    with a_worker({**environment, "E2E_BROKER": ledger_server.url}, queue, tmp_path / "log") as log:
        for key, case in orders * DELIVERIES:
            sender.send_task("pay", (key, case), queue=queue)
        statuses = Counter(ledger.awaited("answered", case) for _, case in orders for _ in range(DELIVERIES))

    assert statuses.keys() <= {"201", "409"}, log.read_text()[-4000:]
    assert {case: len(rows) for case, rows in books.payments().items()} == {case: 1 for _, case in orders}
    assert books.records() == {"completed": ORDERS}
    assert books.balance() == 100 * ORDERS
    sender.close()


@contextmanager
def a_worker(environment: dict[str, str], queue: str, log: Path) -> Iterator[Path]:
    """A Celery worker with four children. It dies with the thread that started it."""
    celery = ["-m", "celery", "-A", "tests.e2e.forked_shop:celery", "worker", "-Q", queue, "-P", "prefork", "-c", "4"]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), sys.executable, *celery, *quiet],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            start_new_session=True,
        )
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_SECONDS)
