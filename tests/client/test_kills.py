"""A program that is killed at any instant, over a wire that loses replies, pays each invoice once."""

from __future__ import annotations

import multiprocessing
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import requests
from flask import Flask, request
from werkzeug.serving import make_server

from flask_idempotency import Idempotency
from flask_idempotency.client import Attempt, Ledger, Retries
from flask_idempotency.client.httpx import IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter
from tests.client.buyer import pay

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.client.buyer"])
LONGEST = 60.0
CALLS = 400
PAID_A_ROUND = 5
"""New invoices of each round: more than a program pays before it is killed, or it would be killed too late."""


class Shop:
    """A service that writes down each payment, behind a wire that loses every third reply."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self._lock = threading.Lock()
        app = Flask("shop")
        app.config.update(IDEMPOTENCY_STORE="memory://", IDEMPOTENCY_SECRET="a secret of thirty-two characters!")
        Idempotency(app)
        app.add_url_rule("/payments", view_func=self._create, methods=["POST"])
        self._server = make_server("127.0.0.1", 0, app, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.wire = LossyWire(self._server.port)

    def _create(self) -> tuple[dict[str, str], int]:
        invoice = request.get_json()["invoice"]
        with self._lock:
            self.rows[invoice] += 1
        return {"invoice": invoice}, 201

    def close(self) -> None:
        self.wire.close()
        self._server.shutdown()
        self._thread.join(LONGEST)
        self._server.server_close()


class LossyWire:
    """Passes one request of each connection on, and cuts every third reply somewhere."""

    def __init__(self, port: int) -> None:
        self._upstream = ("127.0.0.1", port)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._random = random.Random(16)
        self._stopping = False
        self.port: int = self._socket.getsockname()[1]
        self.replies = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            client, _ = self._socket.accept()
            if self._stopping:
                client.close()
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        try:
            with client, socket.create_connection(self._upstream, timeout=LONGEST) as server:
                client.settimeout(LONGEST)
                message = b""
                # The buyer's requests end with the brace of their JSON.
                while not message.endswith(b"}"):
                    more = client.recv(65536)
                    if not more:
                        return
                    message += more
                server.sendall(message)
                server.shutdown(socket.SHUT_WR)
                answer = b""
                while more := server.recv(65536):
                    answer += more
                self.replies += 1
                if self.replies % 3 == 0:
                    answer = answer[: self._random.randrange(len(answer))]
                client.sendall(answer)
        except OSError:
            # The buyer was killed.
            return

    def close(self) -> None:
        self._stopping = True
        socket.create_connection(("127.0.0.1", self.port), timeout=LONGEST).close()
        self._thread.join(LONGEST)
        self._socket.close()


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    yield shop
    shop.close()


@pytest.mark.slow
@pytest.mark.parametrize("library", ["httpx", "requests"])
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_a_killed_program_pays_each_invoice_once(shop: Shop, tmp_path: Path, library: str, kills: int) -> None:
    url = f"http://127.0.0.1:{shop.wire.port}/payments"
    ledger = str(tmp_path / "intents.sqlite3")
    names = [f"invoice {number}" for number in range(kills * PAID_A_ROUND)]
    chance = random.Random(kills)
    killed = 0
    for round_ in range(1, kills + 1):
        begun = FORKS.Event()
        process = FORKS.Process(target=pay, args=(url, ledger, names[: round_ * PAID_A_ROUND], library, begun))
        process.start()
        assert begun.wait(LONGEST)
        process.join(chance.uniform(0.0, 0.05))
        killed += process.is_alive()
        process.kill()
        process.join(LONGEST)
    begun = FORKS.Event()
    last = FORKS.Process(target=pay, args=(url, ledger, names, library, begun))
    last.start()
    last.join(LONGEST * 5)

    assert last.exitcode == 0
    assert killed > kills / 2
    assert shop.rows == Counter(names)
    assert Ledger(ledger).unsettled() == []


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["httpx", "requests"])
def test_a_restart_of_ten_seconds_costs_no_call(kind: str) -> None:
    paid: Counter[str] = Counter()
    lock = threading.Lock()
    app = Flask("shop")
    Idempotency(app, store="memory://", secret="a secret of thirty-two characters!")

    @app.post("/payments")
    def create() -> tuple[str, int]:
        with lock:
            paid[request.get_data(as_text=True)] += 1
        return "", 201

    # It is bound and does not listen, so the port is taken and refuses connections.
    port = socket.socket()
    port.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{port.getsockname()[1]}/payments"
    seen: list[Attempt] = []
    retries = Retries(observer=seen.append)
    transport = IdempotentTransport(retries=retries, limits=httpx.Limits())
    http = httpx.Client(transport=transport, timeout=60)
    adapter = IdempotentAdapter(retries=retries, pool_maxsize=CALLS)

    def call(number: int) -> int:
        if kind == "httpx":
            return http.post(url, content=f"invoice {number}").status_code
        with requests.Session() as session:
            session.mount("http://", adapter)
            return session.post(url, data=f"invoice {number}", timeout=60).status_code

    with ThreadPoolExecutor(CALLS) as pool:
        calls = [pool.submit(call, number) for number in range(CALLS)]
        threading.Event().wait(10.0)
        tried = len(seen)
        port.close()
        server = make_server("127.0.0.1", int(url.split(":")[2].split("/")[0]), app, threaded=True)
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        statuses = Counter(call.result(LONGEST) for call in calls)
    server.shutdown()
    serving.join(LONGEST)
    server.server_close()
    http.close()

    assert statuses == {201: CALLS}
    assert (len(paid), set(paid.values())) == (CALLS, {1})
    assert tried >= CALLS  # each met the closed port
    assert (transport if kind == "httpx" else adapter)._rules.tokens == 500
