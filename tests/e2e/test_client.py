"""The Python client against a real server: a worker that dies, and replies that are cut on the way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import httpx
import pytest
import requests

from example_app.demo.servers import RedisServer
from flask_idempotency.client import Retries
from flask_idempotency.client.httpx import IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter
from tests.client.scripted import ScriptedServer, reply, scripted
from tests.e2e.conftest import Serve
from tests.e2e.ledger import PATIENCE_SECONDS, Ledger
from tests.e2e.processes import kill
from tests.e2e.service import CASE, STEPS

LEASE = 1.0
QUICK = Retries(backoff=(0.01,), budget=10**6)
TIMEOUT = 60


def by_httpx(url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    with httpx.Client(transport=IdempotentTransport(retries=QUICK), timeout=TIMEOUT) as client:
        response = client.post(url, json={"amount": 100}, headers=headers)
        return response.status_code, response.content


def by_requests(url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    with requests.Session() as session:
        session.mount("http://", IdempotentAdapter(retries=QUICK))
        response = session.post(url, json={"amount": 100}, headers=headers, timeout=TIMEOUT)
        return response.status_code, response.content


@pytest.mark.slow
@pytest.mark.parametrize("send", [by_httpx, by_requests])
def test_a_call_outlives_a_worker_that_was_killed(
    serve: Serve, redis_server: RedisServer, ledger: Ledger, send: Callable[[str, dict[str, str]], tuple[int, bytes]]
) -> None:
    """One call: its first attempt dies with its worker, the next ones wait for the lease, the last takes over."""
    server = serve(redis_server, lease=LEASE, name="client")
    case = uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(send, f"http://127.0.0.1:{server.port}/deduplicated", {CASE: case, STEPS: "effect pause"})
        kill(ledger.paused(case))
        assert ledger.paused(case)
        ledger.let_go(case)
        status, _ = call.result(PATIENCE_SECONDS)

    assert status == 201
    assert ledger.runs(case) == 2
    # Both runs told the other side the same key.
    assert len(set(ledger.effects(case))) == 1


WHOLE = reply(201, b'{"id": 1}', "Location: /payments/1")


def torn(send: Callable[[str], tuple[int, bytes]], server: ScriptedServer) -> int:
    """Return at how many of all cut positions this way to send takes a torn reply for a whole one."""
    wrong = 0
    for position in range(len(WHOLE)):
        server.script = [WHOLE[:position], WHOLE]
        try:
            wrong += send(server.url) != (201, b'{"id": 1}')
        except (requests.RequestException, httpx.HTTPError):
            # Noticed.
            continue
    return wrong


@pytest.mark.slow
def test_a_torn_reply_is_noticed_by_the_client_and_not_by_requests_alone() -> None:
    """The trap that the adapter's rule closes. If requests alone gets strict, the rule can go."""

    def bare(url: str) -> tuple[int, bytes]:
        response = requests.post(url, json={}, timeout=TIMEOUT)
        return response.status_code, response.content

    def with_client(client: httpx.Client) -> Callable[[str], tuple[int, bytes]]:
        # One for all positions: each loads the certificates of all authorities.
        def send(url: str) -> tuple[int, bytes]:
            response = client.post(url, json={})
            return response.status_code, response.content

        return send

    with (
        scripted() as server,
        httpx.Client(timeout=TIMEOUT) as strict,
        httpx.Client(transport=IdempotentTransport(retries=QUICK), timeout=TIMEOUT) as idempotent,
    ):
        found = {
            "requests": torn(bare, server),
            "adapter": torn(lambda url: by_requests(url, {}), server),
            "httpx": torn(with_client(strict), server),
            "transport": torn(with_client(idempotent), server),
        }

    assert found["requests"] > 30
    assert (found["adapter"], found["httpx"], found["transport"]) == (0, 0, 0)
