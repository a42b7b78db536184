"""`Intent.void`: a client makes sure that nothing happens under its key any more."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

from flask_idempotency.client import (
    AnswerExpired,
    InFlight,
    Intents,
    KeyVoided,
    Ledger,
    LedgerError,
    OutcomeUnknown,
    Retries,
)
from flask_idempotency.client.httpx import IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter
from tests.apps import World
from tests.client.conftest import EACH
from tests.client.scripted import Caller, Clock, Drop, ScriptedServer, problem, reply
from tests.web.test_key_status import hold
from tests.web.test_voiding import voiding

STATUS = "http://shop.example/idempotency/status"
PAYMENTS = "http://shop.example/payments"
VOIDED = reply(200, b'{"state": "voided", "attempt": 1}')


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "intents.sqlite3")


@pytest.fixture
def intents(ledger: Ledger) -> Intents:
    return Intents(ledger)


class Cut(httpx.WSGITransport):
    """Reaches the application, and loses the replies of the next requests."""

    lost = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if self.lost:
            self.lost -= 1
            raise httpx.ReadError("the reply was lost")
        return response


@pytest.fixture
def world() -> World:
    return voiding()


@pytest.fixture(params=(True, False), ids=("through the transport", "without"))
def client(request: pytest.FixtureRequest, world: World, clock: Clock) -> Iterator[httpx.Client]:
    cut = Cut(world.app)
    retries = Retries(attempts=1, timing=clock.timing())
    transport = IdempotentTransport(cut, retries=retries) if request.param else cut
    with httpx.Client(transport=transport) as made:
        made.cut = cut  # type: ignore[attr-defined]
        yield made


def test_a_voided_intent_is_over(client: httpx.Client, world: World, intents: Intents, ledger: Ledger) -> None:
    """Its request never runs, also if it is sent by hand; and its name is not used again."""
    with intents("book room 12") as intent:
        assert "voided" == intent.void(client, STATUS, path="/payments")
        key = intent.key
    entry = ledger.find("book room 12")

    assert entry is not None
    assert ("voided", key, False) == (entry.state, entry.key, entry.doubt)
    late = world.post("/payments", key)
    assert (409, "key-voided", []) == (late.status_code, late.get_json()["code"], world.runs)
    with pytest.raises(KeyVoided), intents("book room 12"):
        pass
    assert [] == ledger.unsettled()


def test_after_a_lost_reply_the_client_learns_that_it_is_too_late(
    client: httpx.Client, world: World, intents: Intents, ledger: Ledger
) -> None:
    """The request has run. Sent again it gets its response."""
    client.cut.lost = 1  # type: ignore[attr-defined]
    with pytest.raises((OutcomeUnknown, httpx.ReadError)), intents("pay") as intent:
        client.post(PAYMENTS, headers={"Idempotency-Key": intent.take()})
    with intents("pay") as intent:
        assert "done" == intent.void(client, STATUS, path="/payments")
        assert "true" == client.post(PAYMENTS, headers={"Idempotency-Key": intent.key}).headers["Idempotency-Replayed"]
    entry = ledger.find("pay")
    assert entry is not None
    assert ("done", 1) == (entry.state, len(world.runs))


def test_it_is_too_late_for_a_request_whose_response_is_gone(intents: Intents) -> None:
    """The service remembers that it ran. Sent again, it gets no response."""
    world = voiding(keep=60, remember=3600)
    cut = Cut(world.app)
    cut.lost = 1
    with httpx.Client(transport=cut) as client:
        with pytest.raises(httpx.ReadError), intents("pay") as intent:
            client.post(PAYMENTS, headers={"Idempotency-Key": intent.take()})
        world.clock.advance(61)
        with intents("pay") as intent:
            assert "done" == intent.void(client, STATUS, path="/payments")
    with httpx.Client(transport=IdempotentTransport(cut)) as client, pytest.raises(AnswerExpired):
        client.post(PAYMENTS, headers={"Idempotency-Key": intent.key})

    assert 1 == len(world.runs)


def test_what_may_still_happen_is_no_void(client: httpx.Client, world: World, intents: Intents, ledger: Ledger) -> None:
    """The name stays unsettled, and the same key is asked about again."""
    for happens, error in (
        (hold, InFlight),
        (lambda world, key: world.post("/payments", key, headers={"X-Fail": "1"}), OutcomeUnknown),
    ):
        name = error.__name__
        with intents(name) as intent:
            happens(world, intent.key)
            with pytest.raises(error):
                intent.void(client, STATUS, path="/payments")
        entry = ledger.find(name)
        assert entry is not None
        assert ("sent", True) == (entry.state, entry.doubt)


def test_a_lost_reply_of_the_void_is_repeated(world: World, intents: Intents, ledger: Ledger) -> None:
    """By the caller; and by a transport of this package, as any other request."""
    cut = Cut(world.app)
    cut.lost = 1
    with httpx.Client(transport=cut) as client, intents("a") as intent:
        with pytest.raises(httpx.ReadError):
            intent.void(client, STATUS, path="/payments")
        assert "voided" == intent.void(client, STATUS, path="/payments")
    cut.lost = 1
    with httpx.Client(transport=IdempotentTransport(cut)) as client, intents("b") as intent:
        assert "voided" == intent.void(client, STATUS, path="/payments")
    assert [] == ledger.unsettled()


def test_it_names_the_request_and_sends_its_key(server: ScriptedServer, intents: Intents) -> None:
    """With the header and the fields that the service needs. The request of the intent is another one."""
    server.script = [VOIDED]
    session = requests.Session()
    session.mount("http://", IdempotentAdapter())
    with intents("pay", key="k-1") as intent:
        options: dict[str, Any] = {"headers": {"Authorization": "Bearer t"}, "params": {"tenant": "acme"}}
        intent.void(session, f"{server.url}/s", path="/pay", method="PUT", header="X-Key", timeout=9, **options)
    (seen,) = server.seen

    assert ("DELETE", "/s?tenant=acme&method=PUT&path=%2Fpay") == (seen.method, seen.path)
    assert ("k-1", "Bearer t") == (seen.headers["x-key"], seen.headers["authorization"])


def test_an_asynchronous_client_voids_as_well(world: World, intents: Intents) -> None:
    async def void() -> str:
        transport = httpx.ASGITransport(_asgi(world))
        async with httpx.AsyncClient(transport=transport) as client, intents("pay") as intent:
            return await intent.void_async(client, STATUS, path="/payments")

    assert "voided" == asyncio.run(void())


def _asgi(world: World) -> Callable[..., Any]:
    """Serve the application to one request."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        response = world.client().open(
            scope["path"], method=scope["method"], headers=headers, query_string=scope["query_string"].decode()
        )
        fields = [(name.lower().encode(), value.encode()) for name, value in response.headers]
        await send({"type": "http.response.start", "status": response.status_code, "headers": fields})
        await send({"type": "http.response.body", "body": response.data})

    return serve


@EACH
def test_a_request_under_a_voided_key_was_not_carried_out(
    call: Caller, server: ScriptedServer, intents: Intents, ledger: Ledger
) -> None:
    """Also after a reply that was lost: nothing ran under this key, and the name is over."""
    server.script = [Drop(), problem("key-voided", 409)]
    with pytest.raises(KeyVoided) as raised, intents("pay"):
        call("POST", server.url, json={"amount": 5})
    entry = ledger.find("pay")

    assert ("key-voided", 2) == (raised.value.code, raised.value.attempts)
    assert entry is not None
    assert ("voided", False) == (entry.state, entry.doubt)


def test_an_earlier_version_refuses_a_ledger_with_a_voided_name(
    world: World, tmp_path: Path, intents: Intents, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the state for none, and send the key again. Without such a name it reads the file."""
    file = tmp_path / "intents.sqlite3"

    def form() -> Any:
        with sqlite3.connect(file) as connection:
            return connection.execute("PRAGMA user_version").fetchone()

    with intents("other") as intent:
        intent.refused(400)
    assert (1,) == form()
    with httpx.Client(transport=Cut(world.app)) as client, intents("pay") as intent:
        intent.void(client, STATUS, path="/payments")

    assert (2,) == form()
    assert ["refused", "voided"] == [getattr(Ledger(file).find(name), "state", None) for name in ("other", "pay")]
    monkeypatch.setattr("flask_idempotency.client.ledger.WITH_VOIDED", 1)
    with pytest.raises(LedgerError, match="format 2"):
        Ledger(file)


@pytest.mark.parametrize("failure", (httpx.ConnectError("refused"), httpx.ReadError("lost")), ids=("refused", "lost"))
def test_a_void_that_fails_says_nothing_of_the_request(
    failure: Exception, world: World, clock: Clock, intents: Intents, ledger: Ledger
) -> None:
    """The request may have run: a DELETE that was not sent must not be taken for a request that was not."""
    cut = Cut(world.app)
    retries = Retries(attempts=1, timing=clock.timing())
    with httpx.Client(transport=IdempotentTransport(cut, retries=retries)) as client, intents("pay") as intent:
        cut.lost = 1
        with pytest.raises(OutcomeUnknown):
            client.post(PAYMENTS)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(cut, "handle_request", lambda request: (_ for _ in ()).throw(failure))
            with pytest.raises(OutcomeUnknown):
                intent.void(client, STATUS, path="/payments")
    (entry,) = ledger.unsettled()
    assert ("pay", 1) == (entry.name, len(world.runs))


def test_what_the_ledger_knows_is_done_is_not_voided(world: World, intents: Intents) -> None:
    """The service may have forgotten the key by now."""
    with httpx.Client(transport=Cut(world.app)) as client:
        with intents("pay") as intent:
            client.post(PAYMENTS, headers={"Idempotency-Key": intent.take()})
        world.clock.advance(86_400 - 1)
        world.store.calls.clear()
        with intents("pay") as intent:
            assert "done" == intent.void(client, STATUS, path="/payments")
    assert [] == world.store.calls


def test_the_link_of_a_problem_names_the_operation_already(world: World, intents: Intents) -> None:
    link = f"{STATUS}?method=POST&path=/payments"
    with httpx.Client(transport=Cut(world.app)) as client, intents("pay") as intent:
        assert "voided" == intent.void(client, link, path="/payments", headers=None)


def test_a_taken_key_whose_void_failed_is_not_done(world: World, intents: Intents, ledger: Ledger) -> None:
    """The block ends normally, and nothing is known of the request."""
    with httpx.Client(transport=Cut(world.app)) as client, intents("pay") as intent:
        hold(world, intent.take())
        with pytest.raises(InFlight):
            intent.void(client, STATUS, path="/payments")
    assert ["pay"] == [entry.name for entry in ledger.unsettled()]
