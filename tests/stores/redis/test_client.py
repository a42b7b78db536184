"""How a client is made or accepted, what is asked of the server at the start, and that a line is never misread."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import fakeredis
import pytest
import redis
import redis.asyncio

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.redis import client as clients
from flask_idempotency.stores.redis.client import make_client
from flask_idempotency.stores.redis.cluster import Cluster
from flask_idempotency.stores.redis.connection import PooledConnection
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.stores.redis.urls import parse_multi_host
from flask_idempotency.testing.contract.support import for_each
from tests.forgiving import redis_store
from tests.lab.redis import StartRedis

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def own(redis_server: RedisServer) -> Iterator[RedisStore]:
    store = redis_store(redis_server.url)
    yield store
    store.close()


def test_our_client_has_timeouts_and_few_retries() -> None:
    """redis-py's own defaults are ten silent retries, and once were no time-out at all. Ours are the line's alone."""
    with make_client("redis://127.0.0.1:1/0") as client:
        options = client.connection_pool.connection_kwargs

    assert (options["socket_connect_timeout"], options["socket_timeout"]) == (
        clients.CONNECT_SECONDS,
        clients.REPLY_SECONDS,
    )
    assert options["retry"].get_retries() == 0


def test_options_in_the_url_take_precedence() -> None:
    with make_client("redis://127.0.0.1:1/3?socket_timeout=0.5") as client:
        options = client.connection_pool.connection_kwargs

    assert (options["socket_timeout"], options["db"]) == (0.5, 3)


def test_the_pool_takes_no_unread_bytes_for_messages() -> None:
    """
    With maintenance messages on, redis-py hands out connections that have something to read: a message, it supposes.
    """
    with make_client("redis://127.0.0.1:1/0") as client:
        assert not client.connection_pool.maint_notifications_enabled()


UNREADABLE = (
    "http://127.0.0.1",
    "redis://127.0.0.1:port/0",
    "127.0.0.1:6379",
    "redis://127.0.0.1/0?no_such_option=1",
    "redis+cluster://",
    "redis+cluster://a,,b",
    "redis+cluster://a:0",
    "redis+cluster://a/1",
    "redis+cluster://a?db=1",
    "redis+cluster://a?no_such_option=1",
    "redis+sentinel://a,b",
    "redis+sentinel://a/payments/zero",
    "redis+sentinel://a/payments/0/1",
    "redis+sentinel://a/payments?sentinel_no_such_option=1",
)


@for_each("url", UNREADABLE)
def test_a_url_that_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="rediss://host:6379/0"):
        redis_store(url)


WITH_PASSWORDS = (
    "redis://:p4ss/w0rd@host",
    "redis://[p4ss@host",
    "redis://:p4ss@host?db=w0rd",
    "redis+cluster://:p4ss/w0rd@host:6379",
    "redis+cluster://user:4444/w0rd@host",
    "redis+cluster://:p4ss#w0rd@host",
    "redis+sentinel://user:4444/w0rd@host/payments",
    "redis+sentinel://p4ss:4444/w0rd@host",
    "redis+sentinel://:p4ss@host/payments/w0rd",
    "redis+sentinel://:p4ss@[host/payments",
)


@for_each("url", WITH_PASSWORDS)
def test_the_error_about_a_url_omits_its_password(url: str) -> None:
    """A start-up error ends up in logs and on screens. What was mistaken for a port is half of the password."""
    with pytest.raises(ConfigurationError) as raised:
        redis_store(url)

    told = "".join(traceback.format_exception(raised.value))
    assert [secret for secret in ("p4ss", "w0rd") if secret in told] == []


def test_a_url_may_name_several_servers() -> None:
    cluster = parse_multi_host("rediss+cluster://u:p%40@a:7000,[::1]:7001,b/?socket_timeout=2")
    sentinels = parse_multi_host("redis+sentinel://a,[fe80::1%25eth0]/pay%20ments/3")

    assert (("a", 7000), ("::1", 7001), ("b", 6379)) == cluster.addresses
    assert (True, "cluster", (), "rediss://u:p%40@localhost/?socket_timeout=2") == (
        cluster.tls,
        cluster.kind,
        cluster.path,
        cluster.single,
    )
    assert (("a", 26379), ("fe80::1%25eth0", 26379)) == sentinels.addresses
    assert (False, "sentinel", ("pay ments", "3")) == (sentinels.tls, sentinels.kind, sentinels.path)
    assert "p%40" not in repr(cluster)


def test_sentinels_have_separate_credentials() -> None:
    """Those of Redis are for Redis: Sentinels are asked about it, and have no business with its password."""
    url = "rediss+sentinel://app:secret@a,b/payments/2?sentinel_username=s&sentinel_password=t&ssl_ca_certs=/ca&protocol=3"
    with make_client(url) as client:
        redis_has, pool = client.connection_pool.connection_kwargs, client.connection_pool
        theirs = [each.connection_pool for each in pool.sentinel_manager.sentinels]

    assert ("app", "secret", 2) == tuple(redis_has[name] for name in ("username", "password", "db"))
    assert "sentinel_password" not in redis_has
    for their in theirs:
        assert ("s", "t", "/ca") == tuple(
            their.connection_kwargs[name] for name in ("username", "password", "ssl_ca_certs")
        )
        assert issubclass(their.connection_class, redis.SSLConnection)
    assert issubclass(pool.connection_class, redis.SSLConnection)


@for_each("url", ("redis+cluster://a?protocol=3", "redis+sentinel://a/payments?protocol=3"))
def test_cluster_and_sentinel_clients_have_the_same_timeouts(url: str) -> None:
    client = make_client(url)
    pool = client.any_pool if isinstance(client, Cluster) else client.connection_pool
    options = pool.connection_kwargs

    assert (options["socket_connect_timeout"], options["socket_timeout"]) == (
        clients.CONNECT_SECONDS,
        clients.REPLY_SECONDS,
    )
    assert options["retry"].get_retries() == 0
    assert not pool.maint_notifications_enabled()


def test_a_client_for_asyncio_is_refused() -> None:
    """Its calls return promises; a Flask view cannot wait for them."""
    with pytest.raises(ConfigurationError, match=r"redis\.Redis"):
        redis_store(redis.asyncio.Redis())


def test_an_object_that_is_no_client_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="PosixPath"):
        redis_store(Path("/run/redis.sock"))


def test_closing_leaves_a_borrowed_client_alone(redis_client: redis.Redis) -> None:
    store = redis_store(redis_client)
    redis_client.ping()
    held = redis_client.connection_pool.get_connection()
    store.close()

    assert held.is_connected
    redis_client.connection_pool.release(held)


def test_a_server_that_evicts_is_refused(start_redis: StartRedis, redis_kind: str) -> None:
    """An evicted answer is a payment made twice. Evicting only what has a TTL evicts answers first."""
    server = start_redis(redis_kind)
    with redis.Redis.from_url(server.url) as client:
        for policy in ("allkeys-lru", "allkeys-lfu", "volatile-lru", "volatile-ttl", "volatile-random"):
            client.config_set("maxmemory-policy", policy)
            with (
                closing(redis_store(server.url)) as store,
                pytest.raises(ConfigurationError, match=f"{policy}.*Set maxmemory-policy to noeviction"),
            ):
                store.check()


def test_a_server_without_eviction_is_accepted(own: RedisStore, caplog: pytest.LogCaptureFixture) -> None:
    own.check()

    assert caplog.records == []


def test_a_server_behind_a_borrowed_client_is_checked(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind, "--maxmemory-policy", "allkeys-lru")
    for decode in (True, False):
        with redis.Redis.from_url(server.url, decode_responses=decode) as client, pytest.raises(ConfigurationError):
            redis_store(client).check()


def test_a_hidden_eviction_policy_is_warned_about(
    redis_server: RedisServer, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Managed services may hide INFO. The operator is told what to make sure of; the application starts."""
    redis_client.acl_setuser("app", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-info"])
    store = redis_store(f"redis://app:pw@127.0.0.1:{redis_server.port}/0")

    store.check()
    redis_client.acl_deluser("app")
    store.close()

    assert [(record.levelno, "noeviction" in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


def test_an_application_starts_while_its_server_is_down(caplog: pytest.LogCaptureFixture) -> None:
    redis_store("redis://127.0.0.1:1/0").check()

    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_fake_server_can_be_checked(caplog: pytest.LogCaptureFixture) -> None:
    redis_store(fakeredis.FakeRedis()).check()

    assert [record.levelno for record in caplog.records] == [logging.WARNING]


class Interrupted(BaseException):
    """As a signal raises it in the middle of anything."""


@pytest.mark.parametrize(
    "send",
    (lambda line: line("ECHO", "another's"), lambda line: line.pipeline_one_node([("ECHO", "another's")])),
    ids=("alone", "in a pipeline"),
)
def test_a_connection_with_an_unread_reply_is_never_used_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, send: Callable[[PooledConnection], object]
) -> None:
    """
    A worker that is interrupted between a question and its answer must not give that answer to the next question:
    that would be another customer's payment.
    """
    with make_client(redis_server.url) as client:
        line = PooledConnection(client)
        assert line("ECHO", "first") == b"first"
        connection = line._pool.get_connection()
        line._pool.release(connection)

        def interrupted(*args: object, **options: object) -> None:
            raise Interrupted

        with monkeypatch.context() as patch:
            patch.setattr(connection, "_received", interrupted)
            with pytest.raises(Interrupted):
                send(line)
        assert not connection.is_connected

        assert line("ECHO", "mine") == b"mine"


def test_an_error_reply_keeps_the_connection(redis_server: RedisServer) -> None:
    with make_client(redis_server.url) as client:
        line = PooledConnection(client)
        before = line("CLIENT", "ID")
        with pytest.raises(redis.exceptions.NoScriptError):
            line("EVALSHA", "0" * 40, "0")

        assert line("CLIENT", "ID") == before


FORK = """
import os, sys
from flask_idempotency.engine.model import Grant
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token
from tests.forgiving import redis_store

store = redis_store(sys.argv[1])

def claims():
    for _ in range(50):
        key, token = a_key(), a_token()
        assert isinstance(store.claim(a_request(key), token=token, lease=LEASE), Grant)
        assert store.read(key).token == token

claims()
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        try:
            claims()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
claims()
sys.exit(max(os.waitpid(child, 0)[1] for child in children) != 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_workers_do_not_share_connections(redis_server: RedisServer) -> None:
    """gunicorn with preload_app forks after the store was made and used: parent and children then talk at once."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, redis_server.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
