"""A duplicate in one process that waits for a request in another, where the store is a Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from flask import Flask

from example_app.demo.servers import RedisServer
from flask_idempotency import Idempotency, idempotent
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record
from flask_idempotency.stores.redis.store import RedisStore
from tests.tooling.processes import DEADLINE_SECONDS

HEADERS = {"Idempotency-Key": "f9d6fcd6-3f6c-4d53-9d1c-8a3a0e2f5a11"}


def test_a_duplicate_is_woken_by_a_settlement_in_another_process(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the policy to the store and back: here nobody would look by themselves for hours."""
    monkeypatch.setattr("flask_idempotency.engine.waiting.FIRST_POLL_SECONDS", 3600.0)
    monkeypatch.setattr("flask_idempotency.engine.waiting.LAST_POLL_SECONDS", 3600.0)
    begun, go_on, looked, read = threading.Event(), threading.Event(), threading.Event(), RedisStore.read

    def look(self: RedisStore, key: StorageKey) -> Record | None:
        record = read(self, key)
        looked.set()
        return record

    monkeypatch.setattr(RedisStore, "read", look)

    def work() -> str:
        begun.set()
        assert go_on.wait(DEADLINE_SECONDS)
        return "done"

    home, away = application(redis_server, work), application(redis_server, work)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: home.test_client().post("/", headers=HEADERS))
        assert begun.wait(DEADLINE_SECONDS)
        second = pool.submit(lambda: away.test_client().post("/", headers=HEADERS))
        # Woken once, when it was subscribed: from now on it is told by a message or not at all.
        assert looked.wait(DEADLINE_SECONDS)
        go_on.set()
        answers = first.result(DEADLINE_SECONDS), second.result(DEADLINE_SECONDS)

    assert [(200, "done"), (200, "done")] == [(answer.status_code, answer.text) for answer in answers]
    assert "true" == answers[1].headers["Idempotency-Replayed"]


def application(server: RedisServer, work: Callable[[], str]) -> Flask:
    app = Flask(__name__)
    app.config.update(
        IDEMPOTENCY_STORE=server.url,
        IDEMPOTENCY_SECRET="s-9f2c47d1e8b35a60",
        IDEMPOTENCY_AFTER_LOSS="run",
    )
    Idempotency(app, principal=lambda: "alice")
    app.add_url_rule("/", "work", idempotent(in_flight="wait", wait=3 * DEADLINE_SECONDS)(work), methods=["POST"])
    return app
