"""A Redis store whose time stands still, and a check of every command that a test sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.stores.redis import cluster, connection, passed_client
from flask_idempotency.stores.redis.executor import ScriptExecutor
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from tests.forgiving import redis_store


@pytest.fixture
def store(redis_server: RedisServer, clock: FrozenClock) -> Iterator[RedisStore]:
    """Overridden by tests that reach it in a way of their own."""
    store = redis_store(redis_server.url, clock=clock)
    yield store
    store.close()


class Handed:
    """Every command and argument that was handed to a client's library, and is neither text nor bytes."""

    def __init__(self) -> None:
        self.numbers: list[tuple[object, ...]] = []

    def look(self, command: Sequence[object]) -> None:
        if not all(type(word) in (bytes, str) for word in command):
            self.numbers.append((command[0], *[type(word).__name__ for word in command[1:]]))


@pytest.fixture(autouse=True)
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handed]:
    """In all tests of this folder, the store contract among them: see `lines.words`."""
    handed = Handed()

    def exchange(pool: Any, commands: Sequence[connection.Command], **options: Any) -> list[Any]:
        for command in commands:
            handed.look(command)
        return real_exchange(pool, commands, **options)

    def piped(client: Any, commands: Sequence[connection.Command]) -> list[Any]:
        for command in commands:
            handed.look(command)
        return real_piped(client, commands)

    def watched(line: type[Any]) -> Any:
        call = line.__call__

        def send(self: Any, *command: Any, **options: Any) -> Any:
            handed.look(command)
            return call(self, *command, **options)

        return send

    def directly(self: Any, ask: Any, *arguments: Any, **options: Any) -> Any:
        handed.look(("directly", *arguments))
        return real_directly(self, ask, *arguments, **options)

    real_exchange, real_piped, real_directly = connection.exchange, passed_client._piped, ScriptExecutor.directly
    for module in (connection, cluster, cluster):
        monkeypatch.setattr(module, "exchange", exchange)
    monkeypatch.setattr(passed_client, "_piped", piped)
    monkeypatch.setattr(ScriptExecutor, "directly", directly)
    for line in (passed_client.ClientConnection, passed_client.ClientClusterConnection):
        monkeypatch.setattr(line, "__call__", watched(line))
    yield handed
    assert handed.numbers == []
