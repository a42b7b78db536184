"""Redis and Valkey servers, started once per test process and empty for every test."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from example_app.demo.servers import RedisServer, server_programs
from flask_idempotency.stores.redis import client as store_client
from tests.lab.programs import missing

PATIENT_SECONDS: Final = 5.0


class RedisServers:
    """The servers of this test process, by kind."""

    def __init__(self) -> None:
        self._running: dict[str, RedisServer] = {}
        # A busy machine is not a server that is gone. A test of a silent server gives its store a time of its own.
        store_client.CONNECT_SECONDS = store_client.REPLY_SECONDS = PATIENT_SECONDS

    def get(self, kind: str) -> RedisServer:
        """A running, empty server. Others use it after you: take `start_redis` to kill or reconfigure one."""
        if kind not in self._running:
            self._running[kind] = RedisServer(self.program(kind))
        server = self._running[kind]
        with connect(server.url) as client:
            client.flushall()
            client.script_flush()
        return server

    def program(self, kind: str) -> Path:
        program = server_programs().get(kind)
        if program is None or not program.exists():
            missing(kind, remedy="Run `python3 run.py setup`, or name a server in IDEMPOTENCY_TEST_REDIS.")
        return program

    def stop(self) -> None:
        for server in self._running.values():
            server.stop()


def connect(url: str, **options: Any) -> redis.Redis:
    """A client that tries once: redis-py's ten silent retries would hide what a test is about."""
    return redis.Redis.from_url(url, **{"retry": Retry(NoBackoff(), 0), "socket_timeout": 5, **options})


def follow(replica: Any, primary: Any, *, port: int) -> None:
    """Make a server the replica of another one, and return when it has loaded all of it.

    WAIT alone returns too early: the primary counts a replica that still loads.
    """
    replica.replicaof("127.0.0.1", str(port))
    while replica.info("replication")["master_link_status"] != "up":
        time.sleep(0.005)
    while int(primary.execute_command("WAIT", 1, 1000)) < 1:
        pass


def is_written(client: redis.Redis) -> bool:
    """Return True if a kill cannot lose a write. With `everysec` Redis postpones writes while the disk is busy."""
    persistence: Any = client.info("persistence")
    return bool(persistence["aof_buffer_length"] == 0)


class StartRedis(Protocol):
    def __call__(
        self, kind: str = ..., *arguments: str, environment: Mapping[str, str] | None = ...
    ) -> RedisServer: ...
