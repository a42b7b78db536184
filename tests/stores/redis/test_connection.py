"""How commands reach the server: as text, in one round trip, and in step with their replies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis
import valkey

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.store import store_time
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.client import make_client
from flask_idempotency.stores.redis.connection import PooledConnection, words
from flask_idempotency.stores.redis.executor import Call, ScriptExecutor
from flask_idempotency.testing import TcpProxy
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token, granted
from tests.forgiving import make_ready, redis_store
from tests.lab.redis import StartRedis, connect

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("path", ("/0", "/1", "/1?protocol=2"))
def test_a_handler_that_raises_while_a_command_is_packed_ends_no_process(redis_server: RedisServer, path: str) -> None:
    url = redis_server.url.rpartition("/")[0] + path
    make_ready(url)

    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.stores.storm", url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )

    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


@pytest.mark.slow
@pytest.mark.parametrize("path", ("/1", "/1?protocol=2"))
def test_a_connection_of_ours_greets_without_numbers(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """redis-py itself sends `HELLO 3` and `SELECT 1`."""
    packed: list[tuple[Any, ...]] = []
    pack = hiredis.pack_command

    def record(command: tuple[Any, ...]) -> bytes:
        packed.append(command)
        return bytes(pack(command))

    monkeypatch.setattr(hiredis, "pack_command", record)
    store = redis_store(redis_server.url.rpartition("/")[0] + path)

    store._server.now()

    assert len(packed) > 1
    assert {type(word) for command in packed for word in command} <= {bytes, str}
    assert (b"SELECT", b"1") in packed
    store.close()


@pytest.mark.slow
def test_numbers_become_text() -> None:
    assert tuple(words((b"EVALSHA", "sha", 2, -1, 2**63, True))) == (
        b"EVALSHA",
        "sha",
        b"2",
        b"-1",
        b"9223372036854775808",
        b"1",
    )


@pytest.mark.slow
def test_a_greeting_that_is_interrupted_leaves_no_connection_to_another_database(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept in the pool, the next claim would be written to database 0, where no retry looks for it."""
    store = redis_store(redis_server.url.rpartition("/")[0] + "/1")
    pack = hiredis.pack_command
    interruptions = [KeyboardInterrupt()]

    def interrupt(command: tuple[Any, ...]) -> bytes:
        if command[0] == b"SELECT" and interruptions:
            raise interruptions.pop()
        return bytes(pack(command))

    monkeypatch.setattr(hiredis, "pack_command", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store._server.now()

    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))

    with connect(redis_server.url) as database_0:
        assert database_0.dbsize() == 0
    store.close()


WAYS: dict[str, Callable[[str], Any]] = {
    "own": make_client,
    "own, newer protocol": lambda url: make_client(f"{url}?protocol=3"),
    "redis-py": connect,
    "redis-py, text": lambda url: connect(url, decode_responses=True),
    "redis-py, newer protocol": lambda url: connect(url, protocol=3),
    "valkey-py": valkey.Valkey.from_url,
}


@pytest.fixture(params=list(WAYS))
def server(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[ScriptExecutor]:
    with ExitStack() as ends:
        client = ends.enter_context(WAYS[request.param](redis_server.url))
        yield ScriptExecutor(client, owned=request.param.startswith("own"), clock=store_time)


def test_each_command_gets_its_own_reply(server: ScriptExecutor, redis_client: redis.Redis) -> None:
    """In bytes, in their order; and none is none."""
    redis_client.set("a", b"\xff")

    assert [b"\xff", None, 1, b"\xff"] == server.execute_all(
        [("GET", "a"), ("GET", "b"), ("EXISTS", "a"), ("GET", "a")]
    )
    assert [] == server.execute_all([])


def test_an_error_reply_keeps_replies_in_step(server: ScriptExecutor, redis_client: redis.Redis) -> None:
    """The answers behind it are read: the next one to ask gets its own."""
    redis_client.set("text", "one")
    redis_client.lpush("list", "two")
    with pytest.raises(CorruptRecord):
        server.execute_all([("GET", "text"), ("GET", "list"), ("GET", "text"), ("EXISTS", "list")])

    assert b"one" == server.execute("GET", "text")
    assert [1, b"one"] == server.execute_all([("EXISTS", "list"), ("GET", "text")])


def test_unknown_scripts_run_once(server: ScriptExecutor, redis_client: redis.Redis) -> None:
    """Each of them: those that were refused, and no others, are sent again in full."""
    calls = [Call((layout.task_lock(f"task-{number}"),), (b"t" * 16, 1_000_000_000)) for number in range(3)]
    for _ in range(2):
        redis_client.script_flush()
        redis_client.config_resetstat()
        assert [b"TAKEN"] * 3 == server.run_all(scripts.TASK_LOCK, calls)
        told: dict[str, Any] = redis_client.info("commandstats")
        assert told["cmdstat_set"]["calls"] == 3
    redis_client.config_resetstat()
    assert [b"TAKEN"] * 3 == server.run_all(scripts.TASK_LOCK, calls)
    assert "cmdstat_eval" not in redis_client.info("commandstats")


def test_many_commands_take_one_round_trip(redis_server: RedisServer) -> None:
    """As far as they fit into one piece."""
    with TcpProxy(redis_server.port) as proxy, make_client(f"redis://127.0.0.1:{proxy.port}/0") as client:
        server = ScriptExecutor(client, owned=True, clock=store_time)
        server.execute("GET", "a")
        before = proxy.chunks
        server.execute_all([("GET", "a")] * 100)

        assert proxy.chunks - before == 1


def test_connections_to_a_demoted_server_are_closed(start_redis: StartRedis, redis_kind: str) -> None:
    """No answer is kept that it still owes, and behind a name the next connection finds the new primary."""
    demoted = start_redis(redis_kind)
    with make_client(demoted.url) as client, redis.Redis.from_url(demoted.url) as operator:
        pool, line = client.connection_pool, PooledConnection(client)
        used = pool.get_connection()
        pool.release(used)
        operator.replicaof("127.0.0.1", "1")

        with pytest.raises(redis.exceptions.ReadOnlyError):
            line.pipeline([("GET", "a"), ("SET", "a", "b"), ("GET", "a")])

        assert not used.is_connected
