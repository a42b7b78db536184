"""The service as its customers reach it, and the two things only the demo can reach: its rows, and its cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import httpx
import redis
from sqlalchemy import NullPool, create_engine, text

from example_app.servers import RedisServer

TABLES = ("payments", "charges", "invoices", "gateway_charges")
RECORDS = ("idempotency_records", "idempotency_tenants", "idempotency_data_keys", "idempotency_ledger")


class Shop:
    def __init__(self, port: int, *, database: str, cache: RedisServer, environment: Mapping[str, str]) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.cache = cache
        self._environment = environment
        self._database = create_engine(database, poolclass=NullPool)
        # A new connection for each request: a kept one may belong to a worker that a scenario has killed.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, timeout=30, limits=limits, trust_env=False)

    def pay(self, key: str | None, body: dict[str, Any], *, bearer: str = "tok_alice") -> httpx.Response:
        return self.send("POST", "/payments", key, body, bearer=bearer)

    def send(
        self,
        method: str,
        path: str,
        key: str | None,
        body: dict[str, Any],
        *,
        header: str = "Idempotency-Key",
        bearer: str = "tok_alice",
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {bearer}"} | ({header: key} if key is not None else {})
        return self._client.request(method, path, json=body, headers=headers)

    def rows(self) -> int:
        """Everything the service has ever written down as done."""
        with self._database.connect() as connection:
            return sum(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one() for table in TABLES)  # noqa: S608

    def records(self, operation: str, *states: str) -> int:
        """How many keys of this endpoint are in one of these states."""
        query = text("SELECT state FROM idempotency_records WHERE operation = :operation")
        with self._database.connect() as connection:
            return sum(state in states for state in connection.scalars(query, {"operation": operation}))

    def held_in_stores(self) -> list[str]:
        """Everything in the records and in the cache, as whoever steals them would see it."""
        held = []
        with self._database.connect() as connection:
            for table in RECORDS:
                held += [repr(tuple(row)) for row in connection.execute(text(f"SELECT * FROM {table}"))]  # noqa: S608
        with redis.Redis.from_url(self.cache.url) as client:
            held += [repr((name, client.get(name))) for name in client.scan_iter() if client.type(name) == b"string"]
        return held

    def run(self, *arguments: str) -> str:
        """What an operator does: `flask` with these arguments, on this service."""
        command = [sys.executable, "-m", "flask", "--app", "example_app.app", *arguments]
        done = subprocess.run(command, env=dict(self._environment), capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise RuntimeError(f"flask {' '.join(arguments)} failed:\n{done.stderr}")
        return done.stdout

    def wipe_cache(self) -> int:
        """Makes the cache forget everything, and returns how much that was."""
        with redis.Redis.from_url(self.cache.url) as client:
            held: int = client.dbsize()
            client.flushall()
        return held

    def close(self) -> None:
        self._client.close()
