"""What the demo's customers use: a client of the service, a wire that loses replies, and a company's own server.

The demo alone can also look behind the service: at its rows, its records and its cache.
"""

from __future__ import annotations

import json
import select
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx
import redis
from sqlalchemy import NullPool, create_engine, text

from example_app.demo.servers import RedisServer
from example_app.providers import Providers

TABLES = ("payments", "charges", "invoices", "gateway_charges", "orders")
RECORDS = ("idempotency_records", "idempotency_tenants", "idempotency_data_keys", "idempotency_quota")
# A busy machine may take as long to start another worker, or a `flask` command.
PATIENCE_SECONDS = 120.0


class Shop:
    """The service as its customers reach it, with its database and its cache."""

    def __init__(
        self,
        port: int,
        *,
        database: str,
        cache: RedisServer,
        broker: RedisServer,
        merchant: Merchant,
        providers: Providers,
        environment: Mapping[str, str],
        wait_for_all: Callable[[], None],
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.cache = cache
        self.merchant = merchant
        self.providers = providers
        self.wait_for_all = wait_for_all
        """Call it before you rely on the janitor, the relay or the consumers: they start in the background."""
        self._broker = broker
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

    def charge(self, key: str, form: dict[str, str], *, bearer: str = "tok_alice") -> httpx.Response:
        """Send a form to `/v1/charges`, as Stripe's clients do."""
        headers = {"Authorization": f"Bearer {bearer}", "Idempotency-Key": key}
        return self._client.post("/v1/charges", data=form, headers=headers)

    def rows(self) -> int:
        """Count all payments, charges, invoices and orders in the database."""
        return sum(self._column(" UNION ALL ".join(f"SELECT count(*) FROM {table}" for table in TABLES)))  # noqa: S608

    def records(self, operation: str, *states: str) -> int:
        """Count the keys of this endpoint that are in one of these states."""
        found = self._column("SELECT state FROM idempotency_records WHERE endpoint = :endpoint", endpoint=operation)
        return sum(state in states for state in found)

    def held_in_stores(self) -> list[str]:
        """Return the rows of the records and the entries of the cache, as a thief would see them."""
        held = []
        with self._database.connect() as connection:
            for table in RECORDS:
                held += [repr(tuple(row)) for row in connection.execute(text(f"SELECT * FROM {table}"))]  # noqa: S608
        with redis.Redis.from_url(self.cache.url) as client:
            held += [repr((name, client.get(name))) for name in client.scan_iter() if client.type(name) == b"string"]
        return held

    def payments(self) -> list[str]:
        """Return the ids of all payments of companies whose data key exists."""
        return sorted(self._column("SELECT id FROM payments WHERE tenant <> 'initech'"))

    def bookings(self) -> list[str]:
        """Return the id of a payment for each of its ledger entries."""
        return sorted(self._column("SELECT payment FROM ledger_entries WHERE tenant <> 'initech'"))

    def messages(self) -> int:
        """Count the messages in the outbox, sent or not."""
        return sum(self._column("SELECT count(*) FROM idempotency_outbox"))

    def is_quiet(self) -> bool:
        """Return whether no message waits, neither in the outbox nor in the broker nor in a worker."""
        with redis.Redis.from_url(self._broker.url, socket_timeout=PATIENCE_SECONDS) as broker:
            if self._unsent() or broker.llen("celery") or broker.hlen("unacked"):
                return False
        # Again: a worker that ended between the two looks may have published more.
        return not self._unsent()

    def _unsent(self) -> int:
        return sum(self._column("SELECT count(*) FROM idempotency_outbox WHERE published_at IS NULL AND dead = 0"))

    def forget_what_was_sent(self) -> int:
        """Let the relay send every message again, as if it had vanished before it noted that. Return their number."""
        with self._database.begin() as connection:
            return connection.execute(text("UPDATE idempotency_outbox SET published_at = NULL WHERE dead = 0")).rowcount

    def _column(self, query: str, **values: str) -> list[Any]:
        with self._database.connect() as connection:
            return list(connection.scalars(text(query), values))

    def run(self, *arguments: str) -> str:
        """Run `flask` with these arguments on this service, as an operator does. Return its output."""
        command = [sys.executable, "-m", "flask", "--app", "example_app.app", *arguments]
        environment = dict(self._environment)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        if done.returncode != 0:
            raise RuntimeError(f"flask {' '.join(arguments)} failed:\n{done.stderr}")
        return done.stdout

    def start_buyer(self, url: str, ledger: str) -> subprocess.Popen[str]:
        """Start the program that pays invoices at this URL. Read its output, a line for each invoice."""
        command = [sys.executable, "-m", "example_app.demo.buyer", url, ledger]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wipe_cache(self) -> int:
        """Delete every entry of the cache. Return how many there were."""
        with redis.Redis.from_url(self.cache.url) as client:
            held: int = client.dbsize()
            client.flushall()
        return held

    def close(self) -> None:
        self._client.close()


class Merchant:
    """The server of a company that wants to know of its payments. It counts the calls and does nothing else."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """The payment and the idempotency key of each."""
        merchant = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                merchant.calls.append((body["payment"], self.headers["Idempotency-Key"]))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass  # the demo prints its own report

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/payments"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class LossyWire:
    """A proxy that can lose a reply: the server has done the work, and the client sees its connection drop.

    It listens on a free port, passes all bytes on to the server's port, and counts in `lost` the replies that it dropped.
    """

    def __init__(self, server_port: int) -> None:
        self.lost = 0
        self._to_lose = 0
        self._every: int | None = None
        self._replies = 0
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

    def lose_every(self, number: int) -> None:
        """From now on lose each reply of this number: with 3, the third, the sixth, and so on."""
        with self._lock:
            self._every = number

    def stop(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Copy bytes both ways until one side closes, or until a reply must be lost. Our return closes both sides."""
        replied = False
        while True:
            ready, _, _ = select.select([client, server], [], [])
            for source, target in ((client, server), (server, client)):
                if source not in ready:
                    continue
                data = source.recv(65536)
                if not data:
                    return
                if source is client:
                    replied = False
                elif not replied:
                    # Later pieces belong to the same reply.
                    replied = True
                    if self._loses():
                        return
                try:
                    target.sendall(data)
                except OSError:
                    # The client was killed.
                    return

    def _loses(self) -> bool:
        with self._lock:
            self._replies += 1
            due = self._every is not None and self._replies % self._every == 0
            loses = due or self._to_lose > 0
            self._to_lose -= self._to_lose > 0
            self.lost += loses
        return loses
