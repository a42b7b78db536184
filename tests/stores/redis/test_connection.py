"""How commands reach the server: as text, in one round trip, and in step with their replies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis
import valkey

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.store import store_time
from flask_idempotency.stores.redis import connection as connections
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.client import make_client
from flask_idempotency.stores.redis.connection import DirectConnection, PooledConnection, Tries, words
from flask_idempotency.stores.redis.executor import Call, ScriptExecutor
from flask_idempotency.testing import TcpProxy
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token, for_each, granted
from tests.forgiving import make_ready, redis_store
from tests.lab.redis import StartRedis, connect

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@for_each("path", ("/0", "/1", "/1?protocol=2"))
def test_a_handler_that_raises_while_a_command_is_packed_ends_no_process(redis_server: RedisServer, path: str) -> None:
    url = redis_server.url.rpartition("/")[0] + path
    make_ready(url)

    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.stores.storm", url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
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
    redis_client.set("a", b"\xff")

    assert [b"\xff", None, 1, b"\xff"] == server.execute_all(
        [("GET", "a"), ("GET", "b"), ("EXISTS", "a"), ("GET", "a")]
    )
    assert [] == server.execute_all([])


def test_an_error_reply_keeps_replies_in_step(server: ScriptExecutor, redis_client: redis.Redis) -> None:
    redis_client.set("text", "one")
    redis_client.lpush("list", "two")
    with pytest.raises(CorruptRecord):
        server.execute_all([("GET", "text"), ("GET", "list"), ("GET", "text"), ("EXISTS", "list")])

    assert b"one" == server.execute("GET", "text")
    assert [1, b"one"] == server.execute_all([("EXISTS", "list"), ("GET", "text")])


def test_unknown_scripts_run_once(server: ScriptExecutor, redis_client: redis.Redis) -> None:
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


@pytest.fixture
def line(redis_server: RedisServer) -> Iterator[PooledConnection]:
    """With one open connection that was used just now."""
    with make_client(redis_server.url) as client:
        line = PooledConnection(client)
        line("ECHO", "warm")
        yield line


def idle_connection(line: PooledConnection) -> Any:
    connection = line._pool.get_connection()
    line._pool.release(connection)
    return connection


def closed_by_the_server(line: PooledConnection, client: redis.Redis) -> None:
    assert client.client_kill_filter(_id=line("CLIENT", "ID")) == 1


def test_a_connection_that_the_server_closed_in_a_pause_is_not_used(
    line: PooledConnection, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_by_the_server(line, redis_client)
    monkeypatch.setattr(connections, "FRESH_SECONDS", -1.0)
    tries = Tries()

    assert line("ECHO", "mine", tries=tries) == b"mine"
    assert not tries.repeated


def test_a_connection_that_the_server_closed_just_now_costs_a_retry(
    line: PooledConnection, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_by_the_server(line, redis_client)
    monkeypatch.setattr(connections, "FRESH_SECONDS", float("inf"))
    tries = Tries()

    assert line("ECHO", "mine", tries=tries) == b"mine"
    assert tries.repeated


def test_a_connection_that_its_client_closed_costs_no_retry(line: PooledConnection) -> None:
    line._pool._pool.disconnect()
    tries = Tries()

    assert line("ECHO", "mine", tries=tries) == b"mine"
    assert not tries.repeated


def test_a_connection_that_was_just_used_is_not_checked(
    line: PooledConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FRESH_SECONDS", float("inf"))
    monkeypatch.setattr(redis.Connection, "can_read", None)

    assert line("ECHO", "mine") == b"mine"


def test_a_reply_that_is_left_over_closes_its_connection(line: PooledConnection) -> None:
    """Another request would get it as its own, even on a connection that was used just now."""
    connection = idle_connection(line)
    connection._reader.feed(b"$5\r\nother\r\n")

    assert line("ECHO", "mine") == b"mine"
    assert not connection.is_connected


def test_a_push_message_is_no_reply(line: PooledConnection) -> None:
    connection = line._pool.get_connection()
    connection._reader.feed(b">2\r\n$10\r\ninvalidate\r\n*0\r\n")

    with pytest.raises(redis.exceptions.ConnectionError, match="push"):
        connection.read_response(disable_decoding=True)


def test_a_reply_may_be_longer_than_a_read(line: PooledConnection) -> None:
    long = bytes(range(256)) * 4096

    assert line("ECHO", long) == long
    assert line("ECHO", "next") == b"next"


def test_a_server_that_is_loading_is_asked_again(line: PooledConnection) -> None:
    """As redis-py has it: LOADING is a connection error, and no refusal."""
    connection = line._pool.get_connection()
    connection._reader.feed(b"-LOADING Redis is loading the dataset in memory\r\n")

    with pytest.raises(redis.exceptions.ConnectionError):
        connection.read_response(disable_decoding=True)


@for_each("reply", (connections._PUSH([b"invalidate"]), redis.exceptions.BusyLoadingError("loading")))
def test_one_command_alone_takes_neither_for_its_reply(
    line: PooledConnection, monkeypatch: pytest.MonkeyPatch, reply: object
) -> None:
    line("ECHO", "warm")
    connection = idle_connection(line)
    monkeypatch.setattr(connection, "_received", lambda: reply)

    with pytest.raises(redis.exceptions.ConnectionError):
        connection.ask(("ECHO", "mine"))
    assert not connection.is_connected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@for_each(
    "send",
    (lambda line: line("CLIENT", "ID"), lambda line: line.pipeline_one_node([("CLIENT", "ID")])[0]),
    ids=("alone", "in a pipeline"),
)
def test_a_forked_child_sends_nothing_over_the_connection_of_its_parent(
    line: PooledConnection, send: Callable[[PooledConnection], object]
) -> None:
    """Parent and child would read each other's replies."""
    of_parent = send(line)
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            status = int(send(line) == of_parent)
        os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert send(line) == of_parent


@for_each("options", ("", "?health_check_interval=30"))
def test_a_connection_that_does_more_keeps_to_redis_py(redis_server: RedisServer, options: str) -> None:
    with make_client(redis_server.url + options) as client:
        line = PooledConnection(client)
        line("ECHO", "warm")

        assert isinstance(idle_connection(line), DirectConnection) is (not options)


def test_without_hiredis_redis_py_sends_and_reads(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_hiredis", None)
    with make_client(redis_server.url) as client:
        line = PooledConnection(client)

        assert line("ECHO", "mine") == line("ECHO", "mine") == b"mine"
        assert type(idle_connection(line)) is redis.Connection
