"""A long search: pool processes and whole workers are killed at any instant while every message is delivered again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from celery import states
from sqlalchemy import create_engine, text

from example_app.demo.servers import RedisServer
from tests.consumers.celery_shop import add_tasks, make_celery
from tests.consumers.celery_worker import ROOT, Shop, ShopLedger, Worker, at, setup_of
from tests.tooling.processes import eventually

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

ROUNDS = int(os.environ.get("CELERY_SOAK_ROUNDS", "500"))
COPIES = 2


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def children(pid: int) -> list[int]:
    """The pool processes of this worker."""
    with suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def test_no_message_is_lost_and_none_takes_effect_twice(
    server: RedisServer, postgres_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each message is delivered twice and its first run is killed; so are others, by chance, and now and then a worker."""
    chance = random.Random(17)
    ledger = ShopLedger(at(server, 2))
    celery_app = make_celery(at(server, 0), at(server, 1))
    add_tasks(celery_app, ledger, transactional=True)
    setup = setup_of(server, tmp_path, store="flask-sqlalchemy://", database=postgres_url)

    def hire() -> Worker:
        return Worker(setup, tmp_path / "log", "-P", "prefork", "-c", "4", "--prefetch-multiplier", "4")

    with redis.Redis.from_url(at(server, 0)) as broker:
        shop = Shop(celery_app, ledger, broker)
        worker, kills, hired = hire(), 0, 1
        sent = {}
        for number in range(ROUNDS):
            case = shop.case(chance.choice(("die:before", "die:after")))
            sent[case], messages = shop.hold_back(shop.task("transactional").s(case))
            shop.deliver(messages, times=COPIES)
            pool = children(worker.process.pid)
            if pool and chance.random() < 0.5:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(pool), signal.SIGKILL)
                    kills += 1
            if number % 100 == 99:
                worker.kill()
                worker, hired = hire(), hired + 1
            # As fast as they are killed, and no faster: else all are claimed before the first one is taken over.
            assert eventually(lambda: broker.llen("shop") < 50)
        ends = {case: message.get(timeout=600, propagate=False) for case, message in sent.items()}
        shop.await_idle()
        engine = create_engine(postgres_url)
        with engine.connect() as connection:
            counted = connection.execute(text('SELECT "case", count(*) FROM charges GROUP BY "case"')).all()
        found = {str(row[0]): int(row[1]) for row in counted}
        engine.dispose()
        runs = sum(ledger.runs(case) for case in sent)
        states_seen = {message.state for message in sent.values()}
        figures = f"{len(sent)} messages, {COPIES} copies each, {kills} kills by chance, {hired} workers, {runs} runs"
        request.node.add_report_section("call", "figures", figures)
        worker.kill()
        shop.close()

    assert states_seen == {states.SUCCESS}, {case: end for case, end in ends.items() if not isinstance(end, int)}
    assert {case: found.get(case) for case in sent} == dict.fromkeys(sent, 1)


def test_soft_time_limits_end_no_call_of_the_store(redis_server: RedisServer, request: pytest.FixtureRequest) -> None:
    """A thousand at random instants. With hiredis, one within a call may crash the process."""
    script = [sys.executable, "-m", "tests.consumers.interrupted", redis_server.url, "1000"]
    done = subprocess.run(script, check=False, capture_output=True, text=True, cwd=ROOT, timeout=600)

    assert done.returncode == 0, done.stderr[-3000:]
    met = json.loads(done.stdout.splitlines()[-1])
    request.node.add_report_section("call", "figures", str(met))
    assert met["ended"] == []
    assert met["unknown"] == 0
    assert met["bodies"] > 0
