"""The service as its customers reach it, and the two things only the demo can reach: its rows, and its cache."""

from __future__ import annotations

from typing import Any

import httpx
import redis
from sqlalchemy import NullPool, create_engine, text

from example_app.servers import RedisServer

TABLES = ("payments", "charges", "invoices", "gateway_charges")


class Shop:
    def __init__(self, port: int, *, database: str, cache: RedisServer) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.cache = cache
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

    def wipe_cache(self) -> int:
        """Makes the cache forget everything, and returns how much that was."""
        with redis.Redis.from_url(self.cache.url) as client:
            held: int = client.dbsize()
            client.flushall()
        return held

    def close(self) -> None:
        self._client.close()
