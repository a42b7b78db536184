"""What the demo's customers use: a client of the service, and a wire that loses replies.

The demo alone can also look behind the service: at its rows, its records and its cache.
"""

from __future__ import annotations

import select
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx
import redis
from sqlalchemy import NullPool, create_engine, text

from example_app.demo.servers import RedisServer

TABLES = ("payments", "charges", "invoices", "gateway_charges")
RECORDS = ("idempotency_records", "idempotency_tenants", "idempotency_data_keys", "idempotency_quota")
# A busy machine may take as long to start another worker, or a `flask` command.
PATIENCE_SECONDS = 120.0


class Shop:
    """The service as its customers reach it, with its database and its cache."""

    def __init__(self, port: int, *, database: str, cache: RedisServer, environment: Mapping[str, str]) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.cache = cache
        self._environment = environment
        self._database = create_engine(database, poolclass=NullPool)
        # Each request opens a connection: a kept one may belong to a worker that a scenario has killed.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS, limits=limits, trust_env=False)

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
        """Count all payments, charges and invoices in the database."""
        with self._database.connect() as connection:
            return sum(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one() for table in TABLES)  # noqa: S608

    def records(self, operation: str, *states: str) -> int:
        """Count the keys of this endpoint that are in one of these states."""
        query = text("SELECT state FROM idempotency_records WHERE endpoint = :endpoint")
        with self._database.connect() as connection:
            return sum(state in states for state in connection.scalars(query, {"endpoint": operation}))

    def held_in_stores(self) -> list[str]:
        """Return the rows of the records and the entries of the cache, as a thief would see them."""
        held = []
        with self._database.connect() as connection:
            for table in RECORDS:
                held += [repr(tuple(row)) for row in connection.execute(text(f"SELECT * FROM {table}"))]  # noqa: S608
        with redis.Redis.from_url(self.cache.url) as client:
            held += [repr((name, client.get(name))) for name in client.scan_iter() if client.type(name) == b"string"]
        return held

    def run(self, *arguments: str) -> str:
        """Run `flask` with these arguments on this service, as an operator does. Return its output."""
        command = [sys.executable, "-m", "flask", "--app", "example_app.app", *arguments]
        environment = dict(self._environment)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        if done.returncode != 0:
            raise RuntimeError(f"flask {' '.join(arguments)} failed:\n{done.stderr}")
        return done.stdout

    def wipe_cache(self) -> int:
        """Delete every entry of the cache. Return how many there were."""
        with redis.Redis.from_url(self.cache.url) as client:
            held: int = client.dbsize()
            client.flushall()
        return held

    def close(self) -> None:
        self._client.close()


class LossyWire:
    """A proxy that can lose a reply: the server has done the work, and the client sees its connection drop.

    It listens on a free port, passes all bytes on to the server's port, and counts in `lost` the replies that it dropped.
    """

    def __init__(self, server_port: int) -> None:
        self.lost = 0
        self._to_lose = 0
        self._lock = threading.Lock()
        wire = self

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", server_port)) as server:
                    wire._carry(self.request, server)

        self._listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection)
        self._listener.daemon_threads = True
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    def lose_next_reply(self) -> None:
        with self._lock:
            self._to_lose += 1

    def stop(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Copy bytes both ways until one side closes, or until a reply must be lost. Our return closes both sides."""
        while True:
            ready, _, _ = select.select([client, server], [], [])
            for source, target in ((client, server), (server, client)):
                if source not in ready:
                    continue
                data = source.recv(65536)
                if not data or (source is server and self._loses()):
                    return
                target.sendall(data)

    def _loses(self) -> bool:
        with self._lock:
            loses = self._to_lose > 0
            self._to_lose -= loses
            self.lost += loses
        return loses
