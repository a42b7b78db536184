"""Intents: which key a request has, what settles a name, and what the exceptions say."""

from __future__ import annotations

import asyncio
import contextvars
import math
import pickle
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import requests
import tenacity

from flask_idempotency import client
from flask_idempotency.client import (
    Attempt,
    ClientError,
    Intent,
    IntentOver,
    Intents,
    KeyExpired,
    KeyReused,
    Ledger,
    OutcomeUnknown,
    Retries,
    Timing,
    current_intent,
    new_key,
)
from flask_idempotency.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter
from flask_idempotency.client.responses import REPLAY_MARKS, read
from tests.client.conftest import EACH, MakeCaller
from tests.client.scripted import Caller, Clock, Drop, Line, ScriptedServer, problem, reply

JSON = {"amount": 5}
REPLAYED = "Idempotency-Replayed: true"
PAUSED = "Idempotency-Status: paused"


class Days:
    """The time of a ledger."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def days() -> Days:
    return Days()


@pytest.fixture
def ledger(tmp_path: Path, days: Days) -> Ledger:
    return Ledger(tmp_path / "intents.sqlite3", now=days)


@pytest.fixture
def intents(ledger: Ledger) -> Intents:
    return Intents(ledger)


def state(ledger: Ledger, name: str = "pay") -> str | None:
    entry = ledger.find(name)
    return None if entry is None else entry.state


def test_a_key_is_a_uuid_of_version_7_and_later_keys_are_greater() -> None:
    keys = [new_key() for _ in range(100)]

    assert {uuid.UUID(key).version for key in keys} == {7}
    assert {uuid.UUID(key).variant for key in keys} == {uuid.RFC_4122}
    assert len(set(keys)) == 100
    assert [key[:8] for key in keys] == sorted(key[:8] for key in keys)


@EACH
def test_all_attempts_of_an_intent_have_its_key(server: ScriptedServer, call: Caller, intents: Intents) -> None:
    server.script = [Drop(), reply(201, b"{}", REPLAYED)]

    with intents("pay") as intent:
        call("POST", server.url, json=JSON)

    assert server.keys == [intent.key] * 2
    assert (intent.status, intent.replayed) == (201, True)


@EACH
def test_an_intents_key_replaces_one_that_an_sdk_drew(server: ScriptedServer, call: Caller, intents: Intents) -> None:
    with intents("pay") as intent:
        call("POST", server.url, json=JSON, headers={"Idempotency-Key": "drawn by an SDK"})

    assert server.keys == [intent.key]


def test_a_given_key_is_sent(server: ScriptedServer, call: Caller, intents: Intents) -> None:
    with intents("pay", key="order-17"):
        call("POST", server.url, json=JSON)

    assert server.keys == ["order-17"]


def test_a_name_with_another_key_in_the_ledger(intents: Intents) -> None:
    with intents("pay", key="order-17") as intent:
        intent.take()

    with pytest.raises(KeyReused), intents("pay", key="order-18"):
        raise AssertionError("not entered")


def test_the_same_name_has_the_same_key_in_the_next_run(
    server: ScriptedServer, make_caller: MakeCaller, ledger: Ledger, tmp_path: Path, days: Days
) -> None:
    call = make_caller(attempts=1)
    server.script = [Drop(), reply()]
    with pytest.raises(OutcomeUnknown), Intents(ledger)("pay"):
        call("POST", server.url, json=JSON)
    assert state(ledger) == "sent"
    ledger.close()

    again = Ledger(tmp_path / "intents.sqlite3", now=days)
    with Intents(again)("pay"):
        call("POST", server.url, json=JSON)

    assert len(set(server.keys)) == 1
    assert state(again) == "done"


def test_a_finished_name_is_asked_for_again_under_its_key(
    server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger
) -> None:
    for _ in range(2):
        with intents("pay"):
            call("POST", server.url, json=JSON)

    assert len(set(server.keys)) == 1
    assert state(ledger) == "done"


@EACH
def test_another_body_is_refused_before_it_is_sent(server: ScriptedServer, call: Caller, intents: Intents) -> None:
    with intents("pay"):
        call("POST", server.url, json=JSON)
        with pytest.raises(KeyReused) as caught:
            call("POST", server.url, json={"amount": 6})

    assert len(server.seen) == 1
    assert caught.value.intent == "pay"


def test_another_body_of_the_same_name_is_refused_in_the_next_run(
    server: ScriptedServer, call: Caller, intents: Intents
) -> None:
    with intents("pay"):
        call("POST", server.url, json=JSON)

    with pytest.raises(KeyReused), intents("pay"):
        call("POST", server.url, json={"amount": 6})

    assert len(server.seen) == 1


@pytest.mark.parametrize("name", ["pay", None])
def test_another_method_or_media_type_is_another_request(
    server: ScriptedServer, call: Caller, intents: Intents, name: str | None
) -> None:
    with intents(name):
        call("POST", server.url, content=b"a=1", headers={"Content-Type": "application/x-www-form-urlencoded"})
        with pytest.raises(KeyReused):
            call("PUT", server.url, content=b"a=1", headers={"Content-Type": "application/x-www-form-urlencoded"})
        with pytest.raises(KeyReused):
            call("POST", server.url, content=b"a=1", headers={"Content-Type": "text/plain"})


def test_json_is_compared_by_meaning(server: ScriptedServer, call: Caller, intents: Intents) -> None:
    headers = {"Content-Type": "application/json"}
    with intents("pay"):
        call("POST", server.url, content=b'{"a": 1, "b": 2}', headers=headers)
        call("POST", server.url, content=b'{"b":2,"a":1}', headers=headers)

    assert len(server.seen) == 2


@EACH
def test_multipart_bodies_are_not_compared(server: ScriptedServer, call: Caller, intents: Intents) -> None:
    with intents("upload"):
        for _ in range(2):
            call("POST", server.url, files={"file": ("a.txt", b"text", "text/plain")})

    first, second = server.seen
    assert first.body != second.body


def test_nothing_is_compared_if_you_say_so(server: ScriptedServer, call: Caller, intents: Intents) -> None:
    with intents("pay", compare=False):
        call("POST", server.url, json={"at": 1})
        call("POST", server.url, json={"at": 2})

    assert len(set(server.keys)) == 1


def test_a_refusal_ends_the_name_and_the_next_intent_has_a_new_key(
    server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger
) -> None:
    server.script = [reply(402), reply()]
    with intents("pay") as first:
        assert call("POST", server.url, json=JSON).status == 402
    assert state(ledger) == "refused"

    with intents("pay") as second:
        # Corrected.
        call("POST", server.url, json={"amount": 4})

    assert first.key != second.key
    assert state(ledger) == "done"


def test_after_a_lost_reply_only_a_replayed_refusal_ends_the_name(
    server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger
) -> None:
    server.script = [Drop(), reply(402)]
    with intents("pay") as first:
        assert call("POST", server.url, json=JSON).status == 402
    assert state(ledger) == "sent"

    server.script = [reply(402, b"{}", REPLAYED)]
    with intents("pay") as second:
        call("POST", server.url, json=JSON)
    assert state(ledger) == "refused"
    assert first.key == second.key

    with intents("pay") as third:
        assert third.take() != first.key


@pytest.mark.parametrize("lost", [False, True])
def test_a_replayed_refusal_is_final_whatever_its_status(
    server: ScriptedServer, make_caller: MakeCaller, intents: Intents, ledger: Ledger, lost: bool
) -> None:
    """Some of our profiles keep such statuses. The same key would get this response until the service forgets it."""
    call = make_caller(budget=10**6)
    for number, status in enumerate((401, 403, 407, 408, 419, 421, 425, 429)):
        name, mark = f"pay {status}", REPLAY_MARKS[number % len(REPLAY_MARKS)]
        server.script = [*[Drop()] * lost, reply(status, b"{}", f"{mark}: true", "Retry-After: 0"), reply(201)]
        with intents(name) as first:
            assert call("POST", server.url, json=JSON).status == status
        assert (state(ledger, name), first.in_doubt) == ("refused", False), status

        with intents(name) as second:
            call("POST", server.url, json=JSON)
        assert second.key != first.key


def test_an_intent_says_whether_a_response_left_it_in_doubt(
    server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger
) -> None:
    server.script = [Drop(), reply(402)]
    with intents("pay") as lost:
        call("POST", server.url, json=JSON)
    assert lost.in_doubt

    server.script = [reply(402, b"{}", REPLAYED)]
    with intents("pay") as replayed:
        before = replayed.in_doubt
        call("POST", server.url, json=JSON)
    assert (before, replayed.in_doubt) == (True, False)

    server.script = [reply(402)]
    with intents() as unnamed:
        call("POST", server.url, json=JSON)
    assert not unnamed.in_doubt
    assert ledger.unsettled() == []


def test_which_statuses_settle_a_name(
    server: ScriptedServer, make_caller: MakeCaller, intents: Intents, ledger: Ledger
) -> None:
    """The doubt of an intent is that of the ledger. A request with a 401 was not carried out, and has no end."""
    call = make_caller(budget=10**6)
    settled = {201: "done", 303: "done", 402: "refused"}
    doubtful = (301, 302, 501)
    for status in (*settled, *doubtful, 307, 308, 401, 403, 408, 421):
        server.script = [reply(status)]
        name = f"pay {status}"
        with intents(name) as intent:
            call("POST", server.url, json=JSON)

        assert state(ledger, name) == settled.get(status, "sent"), status
        assert intent.in_doubt == (status in doubtful), status
    assert {entry.name for entry in ledger.unsettled()} == {f"pay {status}" for status in doubtful}


def test_a_paused_response_settles_nothing_whatever_its_status(
    server: ScriptedServer, make_caller: MakeCaller, intents: Intents, ledger: Ledger
) -> None:
    """Steps of it are done, and the service goes on behind them only under the same key: it is sent like after a 503."""
    call = make_caller(budget=10**6, attempts=2)
    for status in (200, 307, 401, 403, 408, 409, 421, 422, 425, 429, 501, 503):
        name = f"pay {status}"
        server.script = [reply(status, b"", PAUSED), reply(status, b"", PAUSED), reply(201)]
        before = len(server.keys)
        with intents(name) as intent:
            assert status == call("POST", server.url, json=JSON).status
        assert (state(ledger, name), intent.in_doubt) == ("sent", True), status
        with intents(name):
            call("POST", server.url, json=JSON)

        assert [intent.key] * 3 == server.keys[before:], status
        assert state(ledger, name) == "done"


def test_a_note_that_another_call_made_void_leaves_the_doubt(intents: Intents, ledger: Ledger) -> None:
    with intents("pay") as intent:
        first = intent.begin(None)
        intent.begin(None)
        assert not intent.end(first, "refused", read(402, {}, b""), attempts=1)

    assert intent.in_doubt
    assert [entry.name for entry in ledger.unsettled()] == ["pay"]


def test_a_request_that_comes_again_with_credentials_has_no_doubt(
    server: ScriptedServer, make_caller: MakeCaller, intents: Intents, ledger: Ledger
) -> None:
    server.script = [reply(401), reply(401), reply(402)]
    with intents("pay"):
        statuses = [make_caller()("POST", server.url, json=JSON).status for _ in range(3)]

    assert statuses == [401, 401, 402]
    assert len(set(server.keys)) == 1
    assert state(ledger) == "refused"
    assert ledger.unsettled() == []


def test_an_intent_without_a_name_leaves_no_row(server: ScriptedServer, call: Caller, ledger: Ledger) -> None:
    intents = Intents(ledger)
    with intents() as intent:
        call("POST", server.url, json=JSON)

    assert server.keys == [intent.key]
    assert intents._unnamed.find(intent.key) is None
    assert ledger.unsettled() == []


@EACH
def test_a_redirect_that_may_lead_to_a_sign_in_leaves_a_doubt(
    server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger
) -> None:
    for name, mark, settled in (("pay", (), "sent"), ("again", (REPLAYED,), "done")):
        server.script = [reply(302, b"", "Location: /somewhere", *mark), reply(200)]
        with intents(name):
            call("POST", server.url, json=JSON)

        assert state(ledger, name) == settled
    assert [entry.name for entry in ledger.unsettled()] == ["pay"]


def test_a_replayed_failure_settles_nothing(
    server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger
) -> None:
    server.script = [reply(500, b"{}", REPLAYED)]
    with intents("pay"):
        call("POST", server.url, json=JSON)

    assert state(ledger) == "sent"


def test_a_response_that_cannot_be_had_ends_the_name(
    server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger
) -> None:
    for code in ("response-not-kept", "response-erased", "key-expired", "replay-forbidden"):
        server.script = [problem(code, 410)]
        with pytest.raises(client.CarriedOut), intents(code):
            call("POST", server.url, json=JSON)

        assert state(ledger, code) == "done"


@EACH
def test_what_was_never_sent_leaves_the_name_new(
    server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger, days: Days
) -> None:
    url = server.url
    server.close()
    with pytest.raises(client.NotSent), intents("pay"):
        call("POST", url, json=JSON)
    assert state(ledger) == "new"

    # So it never expires.
    days.now += 100_000
    with intents("pay") as intent:
        intent.take()


@EACH
def test_an_earlier_run_leaves_a_doubt(
    server: ScriptedServer, make_caller: MakeCaller, intents: Intents, ledger: Ledger
) -> None:
    server.script = [Drop()]
    with pytest.raises(OutcomeUnknown), intents("pay") as first:
        make_caller(attempts=1)("POST", server.url, json=JSON)

    for answer in (reply(429), reply(401)):
        server.script = [answer]
        with pytest.raises(OutcomeUnknown), intents("pay") as again:
            make_caller()("POST", server.url, json=JSON)
        assert again.key == first.key

    url = server.url
    server.close()
    with pytest.raises(OutcomeUnknown), intents("pay") as again:
        make_caller()("POST", url, json=JSON)
    assert again.key == first.key
    assert state(ledger) == "sent"


def test_an_unsettled_name_expires_and_stays(
    server: ScriptedServer, make_caller: MakeCaller, intents: Intents, ledger: Ledger, days: Days
) -> None:
    server.script = [Drop()]
    with pytest.raises(OutcomeUnknown), intents("pay"):
        make_caller(attempts=1)("POST", server.url, json=JSON)
    sent = len(server.seen)

    days.now += 86_400
    with pytest.raises(KeyExpired), intents("pay"):
        raise AssertionError("not entered")
    days.now += 400 * 86_400
    ledger.tidy()
    assert [entry.name for entry in ledger.unsettled()] == ["pay"]
    assert len(server.seen) == sent

    assert ledger.forget("pay")
    assert not ledger.forget("pay")
    with intents("pay") as intent:
        intent.take()


def test_an_intent_that_expires_while_it_is_open_sends_nothing(
    server: ScriptedServer, call: Caller, intents: Intents, days: Days
) -> None:
    with intents("pay"):
        call("POST", server.url, json=JSON)
        days.now += 86_400
        with pytest.raises(IntentOver):
            call("POST", server.url, json=JSON)

    assert len(server.seen) == 1


def test_a_finished_name_is_over_after_a_day(
    server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger, days: Days
) -> None:
    with intents("pay"):
        call("POST", server.url, json=JSON)
    days.now += 86_400

    with pytest.raises(IntentOver), intents("pay"):
        raise AssertionError("not entered")

    days.now += 90 * 86_400
    assert ledger.tidy() == 1
    assert state(ledger) is None


def lose(_: object) -> None:
    raise ConnectionError("lost")


def settle_and_lose(intent: Intent) -> None:
    intent.settled(201)
    raise ConnectionError("lost")


class TestTaking:
    """For clients that send the key by themselves."""

    def test_leaving_normally_means_done(self, intents: Intents, ledger: Ledger) -> None:
        with intents("pay") as intent:
            key = intent.take()
            assert state(ledger) == "sent"
            assert intent.take() == key

        assert state(ledger) == "done"

    def test_an_exception_leaves_it_unsettled(self, intents: Intents, ledger: Ledger) -> None:
        with pytest.raises(ConnectionError), intents("pay") as intent:
            lose(intent.take())

        assert state(ledger) == "sent"

    def test_a_refusal_is_yours_to_note(self, intents: Intents, ledger: Ledger) -> None:
        with intents("pay") as intent:
            intent.take()
            intent.refused(402)

        entry = ledger.find("pay")
        assert entry is not None
        assert (entry.state, entry.status) == ("refused", 402)

    def test_done_may_be_noted_early(self, intents: Intents, ledger: Ledger) -> None:
        with pytest.raises(ConnectionError), intents("pay") as intent:
            settle_and_lose(intent)

        assert state(ledger) == "done"

    def test_an_unnamed_intent_can_be_taken(self, intents: Intents) -> None:
        with intents() as intent:
            assert intent.take() == intent.key

    def test_a_transport_knows_better(
        self, server: ScriptedServer, call: Caller, intents: Intents, ledger: Ledger
    ) -> None:
        server.script = [reply(501)]
        with intents("pay") as intent:
            call("POST", server.url, json=JSON, headers={"Idempotency-Key": intent.take()})

        assert state(ledger) == "sent"


UNUSED = "No request was sent under this named intent"


class TestUnused:
    """A request that bypasses the transport has no key of the intent, so a second run of the program sends it again."""

    def test_a_client_that_has_no_transport(self, server: ScriptedServer, intents: Intents) -> None:
        with pytest.warns(RuntimeWarning, match=UNUSED) as warned, intents("pay"):
            httpx.post(server.url, json=JSON)

        assert server.keys == [None]
        assert warned[0].filename == __file__

    def test_a_url_that_the_session_does_not_mount_it_for(self, server: ScriptedServer, intents: Intents) -> None:
        with requests.Session() as session:
            session.mount("https://", IdempotentAdapter())
            with pytest.warns(RuntimeWarning, match=UNUSED), intents("pay"):
                session.post(server.url, json=JSON, timeout=60)
        http = httpx.Client(mounts={"https://": IdempotentTransport()})
        with http, pytest.warns(RuntimeWarning, match=UNUSED), intents("again"):
            http.post(server.url, json=JSON)

    def test_a_thread_of_a_pool(self, server: ScriptedServer, call: Caller, intents: Intents) -> None:
        with ThreadPoolExecutor(1) as pool, pytest.warns(RuntimeWarning, match=UNUSED), intents("pay") as intent:
            pool.submit(call, "POST", server.url, json=JSON).result()

        assert server.keys != [intent.key]

    def test_an_asynchronous_block(self, intents: Intents) -> None:
        async def unused() -> None:
            async with intents("pay"):
                pass

        with pytest.warns(RuntimeWarning, match=UNUSED) as warned:
            asyncio.run(unused())
        assert warned[0].filename == __file__

    def test_what_you_say_yourself_is_use(self, intents: Intents) -> None:
        with intents("taken") as intent:
            intent.take()
        with intents("settled") as intent:
            intent.settled()
        with intents("refused") as intent:
            intent.refused()

    def test_an_exception_and_an_unnamed_intent_give_no_warning(self, intents: Intents) -> None:
        with pytest.raises(ConnectionError), intents("pay"):
            lose(None)
        with intents():
            pass


def test_an_intent_is_current_in_its_block_only(intents: Intents) -> None:
    with intents() as outer:
        with intents() as inner:
            assert current_intent() is inner
        assert current_intent() is outer
    assert current_intent() is None


def test_an_intent_is_used_once(intents: Intents) -> None:
    with intents() as intent:
        pass
    with pytest.raises(RuntimeError, match="used once"), intent:
        raise AssertionError("not entered")


@pytest.mark.parametrize("wrong", [{"name": ""}, {"key": ""}])
def test_an_empty_name_or_key_is_a_fault(intents: Intents, wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        intents(**wrong)  # type: ignore[arg-type]


def test_a_thread_of_asyncio_inherits_the_intent_and_a_pool_does_not(intents: Intents) -> None:
    async def inherited() -> object:
        async with intents() as intent:
            return await asyncio.to_thread(current_intent) is intent

    assert asyncio.run(inherited())

    with intents(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_intent).result() is None


def test_an_asynchronous_intent_keeps_its_name(server: ScriptedServer, ledger: Ledger, clock: Clock) -> None:
    server.script = [Drop(), reply()]

    async def pay() -> None:
        transport = AsyncIdempotentTransport(retries=Retries(timing=clock.timing()))
        async with httpx.AsyncClient(transport=transport) as http, Intents(ledger)("pay"):
            await http.post(server.url, json=JSON)

    asyncio.run(pay())

    assert len(set(server.keys)) == 1
    assert state(ledger) == "done"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cancelled_call_is_noted(server: ScriptedServer, ledger: Ledger, backend: str) -> None:
    server.script = [Drop()]

    async def pay() -> None:
        with anyio.CancelScope() as scope:

            async def sleep(seconds: float) -> None:
                scope.cancel()
                await anyio.lowlevel.checkpoint()

            transport = AsyncIdempotentTransport(retries=Retries(timing=Timing(async_sleep=sleep)))
            async with httpx.AsyncClient(transport=transport) as http, Intents(ledger)("pay"):
                await http.post(server.url, json=JSON)
        assert scope.cancelled_caught

    anyio.run(pay, backend=backend)

    entry = ledger.find("pay")
    assert entry is not None
    assert (entry.state, entry.doubt, entry.attempts) == ("sent", True, 1)


def test_a_retrying_decorator_around_a_named_intent(
    server: ScriptedServer, make_caller: MakeCaller, intents: Intents
) -> None:
    call = make_caller(attempts=1)
    server.script = [Drop(), Drop(), reply()]

    @tenacity.retry(retry=tenacity.retry_if_exception_type(OutcomeUnknown), stop=tenacity.stop_after_attempt(5))
    def pay() -> None:
        with intents("pay"):
            call("POST", server.url, json=JSON)

    pay()

    assert len(server.seen) == 3
    assert len(set(server.keys)) == 1


def test_the_exceptions_of_the_libraries_do_not_catch_ours() -> None:
    ours = [value for value in vars(client).values() if isinstance(value, type) and issubclass(value, ClientError)]

    assert len(ours) == 15
    assert not any(issubclass(kind, (httpx.HTTPError, requests.RequestException, OSError)) for kind in ours)


@pytest.mark.parametrize("kind", [ClientError, OutcomeUnknown, client.AnswerNotKept])
def test_an_exception_survives_pickling_without_its_response(kind: type[ClientError]) -> None:
    error = kind(
        "Why.", key="k", intent="pay", attempts=2, code="in-flight", response=object(), retry_after=1.5, status_url="u"
    )
    error.__cause__ = ConnectionError("lost")

    back = pickle.loads(pickle.dumps(error))  # noqa: S301 - made in the line

    assert type(back) is kind
    assert str(back) == str(error)
    assert (back.key, back.intent, back.attempts, back.code, back.retry_after, back.status_url) == (
        "k", "pay", 2, "in-flight", 1.5, "u",
    )  # fmt: skip
    assert back.response is None
    assert isinstance(back.__cause__, ConnectionError)
    assert not re.search(r"\bk\b", f"{error} {error!r}")


def test_arguments_reach_the_inner_transport_and_both_are_a_fault() -> None:
    inner = httpx.HTTPTransport()
    with pytest.raises(TypeError, match="verify"):
        IdempotentTransport(inner, verify=False)
    with pytest.raises(TypeError, match="http2"):
        AsyncIdempotentTransport(httpx.AsyncHTTPTransport(), http2=False)
    with pytest.raises(TypeError, match="unheard_of"):
        IdempotentTransport(unheard_of=True)
    IdempotentTransport(limits=httpx.Limits(max_connections=1), verify=False).close()


def test_an_adapter_takes_no_second_way_to_retry() -> None:
    with pytest.raises(TypeError, match="max_retries"):
        IdempotentAdapter(max_retries=3)
    assert IdempotentAdapter(pool_maxsize=3)._pool_maxsize == 3


def test_retries_that_cannot_hold_are_a_fault() -> None:
    values: Any = [
        ("attempts", 0),
        ("backoff", ()),
        ("backoff", (-1.0,)),
        ("backoff", (math.nan,)),
        ("deadline", math.nan),
        ("deadline", 0.0),
        ("budget", -1),
    ]
    for name, value in values:
        with pytest.raises(ValueError, match=name):
            Retries(**{name: value})
    numbers: Any = [("attempts", "3"), ("attempts", 2.5), ("backoff", 1.0), ("backoff", ("1",)), ("budget", "1")]
    for name, value in (*numbers, ("deadline", "9")):
        with pytest.raises(TypeError, match=f"{name} must be"):
            Retries(**{name: value})
    Retries(deadline=60)


def test_a_taken_key_keeps_the_doubt_in_a_pool(
    server: ScriptedServer, make_caller: MakeCaller, intents: Intents
) -> None:
    url = server.url
    server.close()

    def send(key: str) -> None:
        make_caller()("POST", url, json=JSON, headers={"Idempotency-Key": key})

    with ThreadPoolExecutor(1) as pool, pytest.raises(OutcomeUnknown), intents("pay") as intent:
        pool.submit(send, intent.take()).result()


@pytest.mark.parametrize("answer", [reply(429), Drop()])
def test_a_call_beside_another_of_its_name_proves_nothing(
    server: ScriptedServer, make_caller: MakeCaller, intents: Intents, ledger: Ledger, answer: Line
) -> None:
    def other(attempt: Attempt) -> None:
        with Intents(ledger)("pay") as beside:
            beside.begin(None)

    server.script = [answer]
    if not isinstance(answer, bytes):
        server.close()
    with pytest.raises(OutcomeUnknown), intents("pay"):
        make_caller(observer=other, attempts=1)("POST", server.url, json=JSON)

    assert state(ledger) == "sent"


def test_no_attempt_is_made_once_the_service_may_have_forgotten_the_key(
    server: ScriptedServer, make_caller: MakeCaller, tmp_path: Path, days: Days
) -> None:
    ledger = Ledger(tmp_path / "other.sqlite3", keep=100, now=days)
    server.script = [reply(503)]
    with pytest.raises(OutcomeUnknown), Intents(ledger)("pay"):
        make_caller(attempts=1)("POST", server.url, json=JSON)

    days.now += 99.5
    server.script = [reply(503, b"{}", "Retry-After: 1")]
    with pytest.raises(OutcomeUnknown), Intents(ledger)("pay"):
        make_caller()("POST", server.url, json=JSON)

    assert len(server.seen) == 2


def test_the_time_of_a_key_begins_with_the_first_attempt_that_may_be_carried_out(
    server: ScriptedServer, call: Caller, intents: Intents, days: Days
) -> None:
    server.script = [reply(401), reply()]
    with intents("pay"):
        call("POST", server.url, json=JSON)
    days.now += 86_399
    with intents("pay"):
        call("POST", server.url, json=JSON)
    days.now += 2

    with intents("pay"):
        assert call("POST", server.url, json=JSON).status == 201


def test_the_credentials_of_a_request_are_not_pickled(server: ScriptedServer, clock: Clock) -> None:
    session = requests.Session()
    session.mount("http://", IdempotentAdapter(retries=Retries(timing=clock.timing())))
    server.close()
    with session, pytest.raises(client.NotSent) as caught:
        session.post(server.url, json=JSON, headers={"Authorization": "Bearer hunter2"}, timeout=60)

    assert b"hunter2" not in pickle.dumps(caught.value)


@EACH
def test_a_status_url_has_no_password(server: ScriptedServer, call: Caller) -> None:
    server.script = [problem("outcome-unknown", 409, 'Link: </keys>; rel="status"')]

    with pytest.raises(OutcomeUnknown) as caught:
        call("POST", server.url.replace("//", "//alice:hunter2@"), json=JSON)

    assert caught.value.status_url == f"{server.url}/keys"


@pytest.mark.parametrize("key", ["a\nb", "schl\u00fcssel", "\x7f"])
def test_a_key_that_no_header_can_have_is_a_fault(intents: Intents, key: str) -> None:
    with pytest.raises(ValueError, match="visible ASCII"):
        intents("pay", key=key)


def test_a_block_may_be_left_in_another_context(intents: Intents) -> None:
    intent = intents("pay")
    contextvars.copy_context().run(intent.__enter__)
    intent.take()

    intent.__exit__(None, None, None)

    assert state(intents.ledger) == "done"
