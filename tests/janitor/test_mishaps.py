"""What goes wrong with workers and beats costs time, and nothing else."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency.assembly import build_store
from flask_idempotency.engine.model import State
from flask_idempotency.testing.contract.support import found
from tests.janitor.conftest import HireCrew
from tests.janitor.crew import BEAT, PREFORK, SOLO, Crew
from tests.janitor.records import abandoned, over, rows
from tests.lab.postgres import _children
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, connect
from tests.sql_backends import make_tables
from tests.tooling.processes import eventually

pytestmark = pytest.mark.slow
ENDED = 12


@pytest.fixture
def broker(redis_servers: RedisServers) -> str:
    return redis_servers.get(REDIS_KINDS[0]).url


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'records.sqlite3'}"
    make_tables(url)
    return url


@pytest.mark.parametrize("struck", ("a process of the pool", "the whole worker"))
def test_who_dies_in_the_middle_of_a_sweep_leaves_the_rest_to_the_next(
    hire_crew: HireCrew, store_url: str, broker: str, struck: str
) -> None:
    store: Any = build_store(store_url, memory={"after_loss": "run"})
    for _ in range(ENDED):
        over(store)
    crew = hire_crew(store=store_url, broker=broker, expire_interval=1, expire_rate=4)
    crew.start(*BEAT)
    worker = crew.start(*PREFORK, SHOP_HURRIES="yes")
    assert eventually(lambda: rows(store_url) < ENDED)

    if struck == "the whole worker":
        worker.kill()
    else:
        for pid in _children(worker.pid):
            os.kill(pid, signal.SIGKILL)
    left = rows(store_url)
    if struck == "the whole worker":
        crew.start(*PREFORK, SHOP_HURRIES="yes")

    assert left > 0
    assert eventually(lambda: rows(store_url) == 0)
    assert [] == crew.diary("failed")
    store.close()


def test_two_beats_and_two_workers_do_everything_once(hire_crew: HireCrew, store_url: str, broker: str) -> None:
    store: Any = build_store(store_url, memory={"after_loss": "run"})
    crew = hire_crew(store=store_url, broker=broker, reap_interval=0.5)
    for number in range(2):
        crew.start("beat", "-s", f"beat/schedule-{number}", "--pidfile=")
        crew.start(*PREFORK, "-n", f"worker-{number}")
    keys = []
    for _ in range(4):
        batch = [abandoned(store) for _ in range(5)]
        keys += batch
        assert eventually(lambda batch=batch: all(found(store, key).state is State.QUARANTINED for key in batch))  # type: ignore[misc]

    crew.stop()
    assert [1] * len(keys) == list(Counter(line.split()[1] for line in crew.diary("reaped")).values())
    store.close()


def test_a_worker_that_was_away_does_not_make_up_for_it(hire_crew: HireCrew, store_url: str, broker: str) -> None:
    """What had its time while nobody worked has expired, and is dropped unread."""
    crew = hire_crew(store=store_url, broker=broker, reap_interval=0.2, expire_interval=None, heartbeat_interval=None)
    beat = crew.start(*BEAT)
    with connect(broker) as queue:
        assert eventually(lambda: queue.llen("idempotency") >= 10)
        beat.end()
        waiting = queue.llen("idempotency")
    worker = crew.start(*SOLO)

    assert eventually(lambda: worker.said("Discarding revoked task") + worker.said("succeeded") == waiting)
    assert worker.said("succeeded") <= 1
    assert len(crew.diary("done reap")) <= 1


def test_a_worker_outlives_its_store(
    hire_crew: HireCrew, redis_servers: RedisServers, start_redis: Any, broker: str
) -> None:
    server = start_redis()
    crew: Crew = hire_crew(store=server.url, broker=broker)
    worker = crew.start(*SOLO, "-B", "-s", "beat/schedule")
    assert eventually(lambda: len(crew.diary("done reap")) > 0)
    server.kill()
    assert eventually(lambda: worker.said("the store did not answer") > 0)
    server.restart()
    done = len(crew.diary("done reap"))

    assert eventually(lambda: len(crew.diary("done reap")) > done)
    assert 0 == worker.said("Traceback")
