"""When a transport sends a request again, through each library, against a server that follows a script."""

from __future__ import annotations

import gc
import gzip
import io
import math
import weakref
from collections.abc import Generator, Iterable
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import requests
from requests.auth import HTTPDigestAuth

from flask_idempotency.client import (
    AnswerErased,
    AnswerExpired,
    AnswerNotKept,
    Attempt,
    ClientError,
    InFlight,
    Intents,
    KeyReused,
    Ledger,
    NotSent,
    OutcomeUnknown,
    Refused,
    Retries,
)
from flask_idempotency.client import requests as requests_transport
from flask_idempotency.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter
from flask_idempotency.client.responses import REPLAY_MARKS
from tests.client.conftest import EACH, MakeCaller
from tests.client.scripted import (
    CERTIFICATES,
    KINDS,
    Caller,
    Clock,
    Drip,
    Drop,
    Line,
    ScriptedServer,
    Silence,
    problem,
    reply,
)
from tests.lab.tls import TlsFront

JSON = {"amount": 5}
BLOCKING = ("httpx", "requests")
"""These callers use one transport for all calls. An event loop ends with its call, so the others make a new one."""


@EACH
def test_a_lost_reply_is_asked_for_again_under_the_same_key(server: ScriptedServer, call: Caller) -> None:
    server.script = [Drop(), reply()]

    got = call("POST", f"{server.url}/payments", json=JSON)

    assert got.status == 201
    first, second = server.seen
    assert first.key is not None
    assert first.key == second.key
    assert first.body == second.body != b""


def test_each_call_without_an_intent_has_its_own_key(server: ScriptedServer, call: Caller) -> None:
    call("POST", server.url, json=JSON)
    call("POST", server.url, json=JSON)

    assert len(set(server.keys)) == 2


@EACH
def test_the_callers_own_key_is_sent_as_it_is(server: ScriptedServer, call: Caller) -> None:
    server.script = [Drop(), reply()]

    call("POST", server.url, json=JSON, headers={"Idempotency-Key": '"My Key"'})

    assert server.keys == ['"My Key"'] * 2


@EACH
def test_another_header_may_have_the_key(server: ScriptedServer, make_caller: MakeCaller) -> None:
    make_caller(transport={"header": "X-Idempotency-Key"})("POST", server.url, json=JSON)

    assert "x-idempotency-key" in server.seen[0].headers
    assert server.keys == [None]


@EACH
def test_a_read_passes_untouched(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(503)]

    assert call("GET", server.url).status == 503
    assert server.keys == [None]


@EACH
def test_without_automatic_keys_a_request_without_one_passes_untouched(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.script = [reply(503)]

    assert make_caller(transport={"automatic": False})("POST", server.url, json=JSON).status == 503
    assert server.keys == [None]


@EACH
def test_waits_are_random_parts_of_the_backoff(server: ScriptedServer, call: Caller, clock: Clock) -> None:
    server.script = [reply(503), reply(503), reply(503), reply(503), reply()]

    assert call("POST", server.url, json=JSON).status == 201
    assert clock.longest == [0.1, 0.2, 0.4, 0.4]
    assert clock.pauses == clock.longest


def test_the_service_says_how_long_to_wait_and_jitter_is_added(
    server: ScriptedServer, call: Caller, clock: Clock
) -> None:
    server.script = [reply(503, b"{}", "Retry-After: 2"), reply()]

    call("POST", server.url, json=JSON)

    assert clock.pauses == [2.1]


def test_a_date_counts_from_the_date_of_the_response(server: ScriptedServer, call: Caller, clock: Clock) -> None:
    # The service's clock is years away from ours.
    then = 1_000_000_000
    fields = (f"Date: {formatdate(then, usegmt=True)}", f"Retry-After: {formatdate(then + 3, usegmt=True)}")
    server.script = [reply(503, b"{}", *fields), reply()]

    call("POST", server.url, json=JSON)

    assert clock.pauses == [3.1]


def sent(server: ScriptedServer, call: Caller, *script: Line) -> tuple[int, int]:
    """Return the status that the caller gets if the server follows this script, and how often the request was sent."""
    server.script = list(script)
    server.seen.clear()
    got = call("POST", server.url, json=JSON)
    assert len(set(server.keys)) == 1
    return got.status, len(server.seen)


def test_which_statuses_are_retried(server: ScriptedServer, make_caller: MakeCaller) -> None:
    call = make_caller(budget=10**6)
    for status in (425, 429, 500, 502, 503, 504, 507, 599):
        assert (201, 2) == sent(server, call, reply(status), reply()), status
    for status in (200, 400, 401, 402, 403, 404, 409, 412, 413, 422, 501, 505):
        assert (status, 1) == sent(server, call, reply(status, b'{"message": "of the view"}')), status


def test_a_replayed_failure_is_returned(server: ScriptedServer, call: Caller) -> None:
    for mark in REPLAY_MARKS:
        assert (500, 1) == sent(server, call, reply(500, b"{}", f"{mark}: true")), mark


STRIPE_IN_USE = reply(409, b'{"error": {"type": "invalid_request_error", "code": "idempotency_key_in_use"}}')
PLAYBOOK_RUNS = reply(409, b'{"error_code": "request_in_progress", "error_message": "runs"}')
RUNNING = (STRIPE_IN_USE, PLAYBOOK_RUNS, problem("in-flight", 409), reply(409, b"{}", "Retry-After: 1"))


def test_an_attempt_that_runs_is_waited_for(server: ScriptedServer, make_caller: MakeCaller) -> None:
    call = make_caller(budget=10**6)

    assert [(201, 2)] * 4 == [sent(server, call, answer, reply()) for answer in RUNNING]


def test_waiting_for_a_running_attempt_does_not_count(server: ScriptedServer, call: Caller, clock: Clock) -> None:
    server.script = [*[problem("in-flight", 409, "Retry-After: 5")] * 8, reply()]

    assert call("POST", server.url, json=JSON).status == 201
    assert len(server.seen) == 9
    assert sum(clock.pauses) < 45


@EACH
def test_an_attempt_that_still_runs_at_the_deadline(server: ScriptedServer, call: Caller, clock: Clock) -> None:
    link = 'Link: </keys>; rel="status", <https://docs.example/x>; rel="describedby"'
    server.script = [problem("in-flight", 409, "Retry-After: 5", link)]

    with pytest.raises(InFlight) as caught:
        call("POST", f"{server.url}/payments", json=JSON)

    assert (caught.value.code, caught.value.retry_after) == ("in-flight", 5.0)
    assert caught.value.status_url == f"{server.url}/keys"
    # A wait that would pass the deadline is not begun.
    assert 1040 - 1 <= clock.now < 1045


def test_a_retry_after_beyond_the_deadline_ends_the_call(server: ScriptedServer, call: Caller, clock: Clock) -> None:
    server.script = [reply(503, b"{}", "Retry-After: 3600")]

    with pytest.raises(OutcomeUnknown) as caught:
        call("POST", server.url, json=JSON)

    assert caught.value.retry_after == 3600
    assert clock.pauses == []


def test_stripe_should_retry_decides_if_no_code_does(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(500, b"{}", "Stripe-Should-Retry: false")]
    assert call("POST", server.url, json=JSON).status == 500

    server.script = [reply(409, b"{}", "Stripe-Should-Retry: true"), reply()]
    assert call("POST", server.url, json=JSON).status == 201


ENDINGS = (
    (problem("missing-key", 400), Refused),
    (problem("invalid-key", 400), Refused),
    (problem("request-too-large", 413), Refused),
    (problem("principal-required", 403), Refused),
    (problem("key-reused", 422), KeyReused),
    (reply(400, b'{"error": {"type": "idempotency_error", "message": "x"}}'), KeyReused),
    (reply(409, b'{"error_code": "idempotency_payload_mismatch"}'), KeyReused),
    (problem("outcome-unknown", 409, "Retry-After: 1"), OutcomeUnknown),
    (problem("record-corrupt", 500), OutcomeUnknown),
    (problem("response-not-kept", 201, "Location: /payments/7"), AnswerNotKept),
    (problem("replay-forbidden", 403), AnswerNotKept),
    (problem("response-erased", 410), AnswerErased),
    (problem("key-expired", 410), AnswerExpired),
)


def test_a_problem_that_ends_the_call(server: ScriptedServer, call: Caller) -> None:
    for answer, error in ENDINGS:
        server.script = [answer]
        server.seen.clear()

        with pytest.raises(ClientError) as caught:
            call("POST", server.url, json=JSON)

        assert (type(caught.value), len(server.seen)) == (error, 1), answer
        assert caught.value.key == server.keys[0]
        assert caught.value.key not in str(caught.value)


@EACH
def test_a_response_that_was_not_kept_shows_where_the_resource_is(server: ScriptedServer, call: Caller) -> None:
    server.script = [problem("response-not-kept", 201, "Location: /payments/7")]

    with pytest.raises(AnswerNotKept) as caught:
        call("POST", server.url, json=JSON)

    assert caught.value.response.headers["Location"] == "/payments/7"
    assert caught.value.response.status_code == 201


def test_a_code_of_the_applications_own_is_not_ours(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(409, b'{"type": "https://shop.example/errors/sold-out", "code": "in-flight"}')]

    assert call("POST", server.url, json=JSON).status == 409


@pytest.mark.parametrize("status", [425, 429])
def test_a_limit_to_the_end_is_a_refusal(server: ScriptedServer, call: Caller, status: int) -> None:
    server.script = [reply(status)]

    with pytest.raises(Refused) as caught:
        call("POST", server.url, json=JSON)

    assert caught.value.attempts == len(server.seen) == 5


def test_failures_to_the_end_leave_a_doubt(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(503)]

    with pytest.raises(OutcomeUnknown) as caught:
        call("POST", server.url, json=JSON)

    assert caught.value.response.status_code == 503
    assert len(server.seen) == 5


@EACH
def test_a_closed_port_is_tried_until_the_deadline(server: ScriptedServer, call: Caller, clock: Clock) -> None:
    url = server.url
    server.close()

    with pytest.raises(NotSent) as caught:
        call("POST", url, json=JSON)

    assert caught.value.__cause__ is not None
    # The next wait would have ended after the deadline.
    assert 40 < clock.now - 1000 <= 45
    assert clock.longest[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@EACH
def test_one_attempt_tries_a_closed_port_once(server: ScriptedServer, make_caller: MakeCaller, clock: Clock) -> None:
    server.close()

    with pytest.raises(NotSent) as caught:
        make_caller(attempts=1)("POST", server.url, json=JSON)

    assert (caught.value.attempts, clock.pauses) == (1, [])


class Restarting(httpx.BaseTransport):
    """A service that refuses connections until some time of the clock, and then takes each request."""

    def __init__(self, clock: Clock, *, until: float, first: Iterable[Exception | int] = ()) -> None:
        self.clock, self.until, self.first = clock, until, list(first)
        self.reached = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.clock.now < self.until:
            raise httpx.ConnectError("Connection refused")
        self.reached += 1
        answer = self.first.pop(0) if self.first else 201
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer, json={})


def test_no_call_is_given_up_while_a_service_restarts(clock: Clock) -> None:
    service = Restarting(clock, until=1010)
    transport = IdempotentTransport(service, retries=Retries(timing=clock.timing()))

    with httpx.Client(transport=transport) as client:
        for jitter in range(400):
            clock.now, clock.jitter = 1000.0, 0.2 + jitter / 500
            assert client.post("http://shop.example/payments", json=JSON).status_code == 201
            assert clock.now - 1000 <= 15

    assert service.reached == 400
    assert transport._rules.tokens == 500


def test_requests_that_may_have_arrived_stay_bounded_after_a_restart(clock: Clock) -> None:
    lost = httpx.ReadError("Connection reset")
    service = Restarting(clock, until=1010, first=[lost] * 9)

    transport = IdempotentTransport(service, retries=Retries(timing=clock.timing()))
    with httpx.Client(transport=transport) as client, pytest.raises(OutcomeUnknown):
        client.post("http://shop.example/payments", json=JSON)

    assert service.reached == 5


@pytest.mark.parametrize("kind", ["httpx", "requests"])
def test_a_certificate_that_does_not_verify_is_not_tried_until_the_deadline(
    kind: str, server: ScriptedServer, clock: Clock, tmp_path: Path
) -> None:
    retries = Retries(timing=clock.timing())
    http = httpx.Client(transport=IdempotentTransport(retries=retries, verify=CERTIFICATES))
    session = requests.Session()
    session.mount("https://", IdempotentAdapter(retries=retries))
    post = http.post if kind == "httpx" else session.post
    with http, session, TlsFront(server.port, folder=tmp_path) as front, pytest.raises(NotSent) as caught:
        post(f"https://127.0.0.1:{front.port}", json=JSON)

    assert caught.value.attempts == 5


@EACH
def test_after_a_lost_reply_refused_connections_prove_nothing(server: ScriptedServer, make_caller: MakeCaller) -> None:
    server.script = [Drop()]
    call = make_caller(observer=lambda attempt: server.close() if attempt.number == 1 else None)

    with pytest.raises(OutcomeUnknown) as caught:
        call("POST", server.url, json=JSON)

    assert caught.value.attempts > 5
    assert len(server.seen) == 1


def test_after_a_lost_reply_these_responses_settle_nothing(server: ScriptedServer, make_caller: MakeCaller) -> None:
    call = make_caller(budget=10**6)
    refusals = [reply(status) for status in (401, 403, 407, 408, 419, 421, 429)]
    for answer in (*refusals, problem("quota-exceeded", 429)):
        server.script = [Drop(), answer]
        with pytest.raises(OutcomeUnknown) as caught:
            call("POST", server.url, json=JSON)
        assert str(caught.value.response.status_code).encode() in answer


DIGEST = reply(401, b"{}", 'WWW-Authenticate: Digest realm="shop", nonce="n", qop="auth"')


def digest(call: Caller) -> Any:
    return HTTPDigestAuth("alice", "secret") if call.kind == "requests" else httpx.DigestAuth("alice", "secret")


class Refreshing(httpx.Auth):
    """Takes a new token when the service refuses the old one, from another address of it if `token` is one."""

    requires_response_body = True

    def __init__(self, token: str = "") -> None:
        self.token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = "Bearer old"
        response = yield request
        if response.status_code in (401, 403, 419) and response.json() == {}:
            if self.token:
                yield httpx.Request("POST", self.token, json={"refresh": "r"})
            request.headers["Authorization"] = "Bearer new"
            yield request


def refresh(call: Caller) -> dict[str, Any]:
    """Return how a caller sends again with another token if the service refuses the first."""
    if call.kind != "requests":
        return {"auth": Refreshing()}

    def hook(response: requests.Response, *_: Any, **options: Any) -> requests.Response | None:
        if response.status_code not in (401, 403, 419) or response.ok or response.json() != {}:
            return None
        request = response.request.copy()
        request.headers["Authorization"] = "Bearer new"
        again: requests.Response = response.connection.send(request, **options)
        again.history.append(response)
        return again

    return {"headers": {"Authorization": "Bearer old"}, "hooks": {"response": hook}}


@EACH
@pytest.mark.parametrize("before", [[], [Drop()], [reply(503)]], ids=["first", "after a lost reply", "after a 503"])
def test_the_authentication_flow_ends_before_doubt_is_judged(
    server: ScriptedServer, call: Caller, before: list[Line]
) -> None:
    for answer, how in (
        (DIGEST, {"auth": digest(call)}),
        *((reply(status, b"{}"), refresh(call)) for status in (401, 403, 419)),
    ):
        server.seen.clear()
        server.script = [*before, answer, reply(201)]

        with Intents()("pay"):
            assert call("POST", server.url, json=JSON, **how).status == 201

        assert len(server.seen) == 2 + len(before)
        assert len(set(server.keys)) == 1
        first, last = server.seen[0].headers.get("authorization"), server.seen[-1].headers["authorization"]
        assert first != last


@pytest.mark.parametrize("make_caller", [kind for kind in KINDS if kind != "requests"], indirect=True)
def test_a_flow_may_ask_for_a_token_while_an_intent_is_open(server: ScriptedServer, call: Caller) -> None:
    """As the documentation of httpx shows. That request is not the intent's, and has a key of its own."""
    server.script = [Drop(), reply(401, b"{}"), Drop(), reply(200), reply(201)]

    with Intents()("pay") as intent:
        assert call("POST", server.url, json=JSON, auth=Refreshing(f"{server.url}/token")).status == 201

    paid, asked = [[one for one in server.seen if (one.path == "/token") is token] for token in (False, True)]
    assert [request.key for request in paid] == [intent.key] * 3
    assert len(asked) == 2
    assert {request.key for request in asked}.isdisjoint({intent.key, None})


class Signing(httpx.Auth):
    """Sends requests of its own making, whose body and query it signs, with another signature when the first is refused."""

    requires_response_body = True

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        response = yield self.signed(request, "old")
        if response.status_code == 401:
            yield self.signed(request, "new")

    @staticmethod
    def signed(request: httpx.Request, how: str) -> httpx.Request:
        content = request.content[:-1] + b',"signed":"' + how.encode() + b'"}'
        return httpx.Request(
            request.method,
            request.url,
            params={"by": how},
            content=content,
            headers={"content-type": "application/json"},
        )


def signing(call: Caller, token: str) -> dict[str, Any]:
    """Return how a caller answers a challenge with a request of its own making, after one for a token."""
    if call.kind != "requests":
        return {"auth": Signing()}

    def hook(response: requests.Response, *_: Any, **options: Any) -> requests.Response | None:
        if response.status_code != 401:
            return None
        if token:
            asked = response.connection.send(
                requests.Request("POST", token, json={"refresh": "r"}).prepare(), **options
            )
            assert asked.status_code == 200
        signed = requests.Request("POST", server_of(response), params={"by": "new"}, json=JSON | {"signed": "new"})
        sent: requests.Response = response.connection.send(signed.prepare(), **options)
        return sent

    return {"hooks": {"response": hook}}


def server_of(response: requests.Response) -> str:
    return str(response.url).partition("?")[0]


@EACH
@pytest.mark.parametrize("before", [[], [Drop()]], ids=["first", "after a lost reply"])
def test_a_request_that_a_flow_builds_keeps_the_key(server: ScriptedServer, call: Caller, before: list[Line]) -> None:
    """After a lost reply, another key would pay twice."""
    server.script = [*before, reply(401, b"{}"), reply(201)]

    assert call("POST", server.url, json=JSON, **signing(call, "")).status == 201

    assert (2 + len(before), 1) == (len(server.keys), len(set(server.keys)))


@pytest.mark.parametrize("make_caller", [kind for kind in KINDS if kind != "requests"], indirect=True)
def test_a_flow_that_signs_the_body_stays_in_its_intent(server: ScriptedServer, make_caller: MakeCaller) -> None:
    """The next run, after a lost reply, has the same key."""
    call, intents = make_caller(attempts=1), Intents()

    for _ in range(2):
        server.script = [Drop()]
        with intents("pay") as intent, pytest.raises(OutcomeUnknown):
            call("POST", server.url, json=JSON, auth=Signing())

    assert [intent.key] * 2 == server.keys


@pytest.mark.parametrize("make_caller", ["requests"], indirect=True)
def test_a_response_hook_may_ask_for_a_token_while_an_intent_is_open(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(401, b"{}"), reply(200), reply(201)]

    with Intents()("pay", compare=False) as intent:
        assert call("POST", server.url, json=JSON, **signing(call, f"{server.url}/token")).status == 201

    paid, asked = [[one.key for one in server.seen if (one.path == "/token") is token] for token in (False, True)]
    assert ([intent.key] * 2, 1) == (paid, len(asked))
    assert intent.key not in asked


@EACH
def test_a_flow_that_ends_without_an_answer_leaves_the_doubt(server: ScriptedServer, call: Caller) -> None:
    """Without an intent too, which would keep it."""
    cases: tuple[tuple[list[Line], dict[str, Any], int], ...] = (
        ([Drop(), reply(403, b"{}")], {"auth": digest(call)}, 2),
        ([Drop(), DIGEST, DIGEST], {"auth": digest(call)}, 3),
        ([Drop(), reply(401, b"{}"), reply(401, b"{}")], refresh(call), 3),
        ([Drop(), reply(401, b"{}"), problem("missing-key", 400)], refresh(call), 3),
    )
    for script, how, count in cases:
        server.seen.clear()
        server.script = list(script)

        with pytest.raises(OutcomeUnknown) as caught:
            call("POST", server.url, json=JSON, **how)

        assert str(caught.value.response.status_code).encode() in script[-1]  # type: ignore[operator]
        assert caught.value.response.content is not None
        assert (len(server.seen), len(set(server.keys))) == (count, 1)


@EACH
def test_a_hook_that_raises_for_the_status_raises_the_doubt(server: ScriptedServer, make_caller: MakeCaller) -> None:
    call = make_caller()
    server.script = [Drop(), reply(403, b"{}")]
    how = refresh(call)
    if call.kind == "requests":
        how["hooks"] = {"response": lambda response, *_, **__: response.raise_for_status()}
    elif call.kind == "httpx":
        how["event_hooks"] = {"response": [lambda response: response.raise_for_status()]}
    else:

        async def hook(response: httpx.Response) -> None:
            response.raise_for_status()

        how["event_hooks"] = {"response": [hook]}

    with pytest.raises(OutcomeUnknown):
        call("POST", server.url, json=JSON, **how)


def test_a_streamed_response_that_no_flow_answers_ends_in_the_doubt(server: ScriptedServer, clock: Clock) -> None:
    client = httpx.Client(transport=IdempotentTransport(retries=Retries(timing=clock.timing())), timeout=60)
    with client:
        for read in (lambda response: None, lambda response: [*response.iter_lines()]):
            server.script = [Drop(), reply(403, b"{}")]
            with (
                pytest.raises(OutcomeUnknown),
                client.stream("POST", server.url, json=JSON, auth=Refreshing()) as response,
            ):
                read(response)
        server.script = [Drop(), reply(403, b"{}"), reply(201, b"12")]
        with client.stream("POST", server.url, json=JSON, auth=Refreshing()) as response:
            assert [*response.iter_bytes()] == [b"12"]


def test_a_file_is_sent_again_by_digest(server: ScriptedServer, clock: Clock, tmp_path: Any) -> None:
    """requests rewinds the file that it was given."""
    path = tmp_path / "body.txt"
    path.write_bytes(b"text")
    server.script = [Drop(), DIGEST, reply()]
    session = requests.Session()
    session.mount("http://", IdempotentAdapter(retries=Retries(timing=clock.timing())))

    with session, path.open("rb") as file:
        auth = HTTPDigestAuth("alice", "secret")
        assert session.post(server.url, data=file, auth=auth, timeout=60).status_code == 201

    assert [request.body for request in server.seen] == [b"text"] * 3


def test_after_a_lost_reply_another_final_status_is_returned(server: ScriptedServer, call: Caller) -> None:
    server.script = [Drop(), reply(402)]

    assert call("POST", server.url, json=JSON).status == 402


@EACH
def test_a_reply_cut_in_its_body_is_asked_for_again(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply()[:-3], reply()]

    assert call("POST", server.url, json=JSON).json() == {"id": 1}
    assert len(set(server.keys)) == 1


@EACH
def test_a_reply_cut_anywhere_is_never_taken_for_a_whole_one(server: ScriptedServer, make_caller: MakeCaller) -> None:
    whole = reply(201, b'{"id": 1}', "Idempotency-Replayed: false", "Location: /payments/1")
    call = make_caller(budget=10**6)
    # Each asynchronous call starts an event loop, which is slow, and both libraries of httpx read with h11.
    step = 3 if call.kind in BLOCKING else 17
    for position in range(0, len(whole), step):
        server.seen.clear()
        server.script = [whole[:position], whole]

        got = call("POST", server.url, json=JSON)

        assert (got.status, got.body, got.headers["Location"]) == (201, b'{"id": 1}', "/payments/1"), position
        assert (len(server.seen), len(set(server.keys))) == (2, 1), position


@EACH
def test_a_compressed_response_stays_as_it_was_sent(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(201, gzip.compress(b'{"id": 1}'), "Content-Encoding: gzip")]

    got = call("POST", server.url, json=JSON)

    assert got.json() == {"id": 1}
    assert got.headers["Content-Encoding"] == "gzip"


@EACH
def test_a_compressed_problem_is_read(server: ScriptedServer, call: Caller) -> None:
    body = gzip.compress(b'{"type": "https://docs.example/key-reused", "code": "key-reused"}')
    server.script = [reply(422, body, "Content-Encoding: gzip", kind="application/problem+json")]

    with pytest.raises(KeyReused):
        call("POST", server.url, json=JSON)


@EACH
def test_a_chunked_response_is_read(server: ScriptedServer, call: Caller) -> None:
    head = b"HTTP/1.1 201 X\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    server.script = [head + b'4\r\n{"id\r\n', head + b'4\r\n{"id\r\n5\r\n": 1}\r\n0\r\n\r\n']

    assert call("POST", server.url, json=JSON).json() == {"id": 1}
    assert len(server.seen) == 2


@EACH
def test_a_response_without_content_is_whole(server: ScriptedServer, call: Caller) -> None:
    server.script = [b"HTTP/1.1 204 X\r\nLocation: /payments/1\r\n\r\n"]

    got = call("DELETE", server.url)

    assert (got.status, got.body) == (204, b"")
    assert len(server.seen) == 1


@EACH
def test_a_body_of_unknown_length_is_sent_once(server: ScriptedServer, make_caller: MakeCaller) -> None:
    call = make_caller()
    server.script = [Drop(), reply()]
    if call.kind in ("httpx-asyncio", "httpx-trio"):

        async def pieces() -> Any:
            yield b"12"
            yield b"34"

        body: Any = pieces()
    else:
        body = iter([b"12", b"34"])

    with pytest.raises(OutcomeUnknown):
        call("POST", server.url, content=body)

    assert len(server.seen) == 1
    assert server.keys[0] is not None


@EACH
def test_a_body_above_the_limit_is_sent_once(server: ScriptedServer, make_caller: MakeCaller) -> None:
    server.script = [reply(503), reply()]

    with pytest.raises(OutcomeUnknown):
        make_caller(transport={"max_body": 10})("POST", server.url, content=b"x" * 11)

    assert len(server.seen) == 1


@EACH
def test_a_file_is_sent_again_from_its_start(server: ScriptedServer, make_caller: MakeCaller, tmp_path: Any) -> None:
    call = make_caller()
    path = tmp_path / "upload.csv"
    path.write_bytes(b"a,b\n1,2\n")
    server.script = [Drop(), reply()]

    with path.open("rb") as file:
        call("POST", server.url, files={"upload": ("upload.csv", file, "text/csv")})

    first, second = server.seen
    assert b"1,2" in first.body
    assert first.body == second.body


@EACH
def test_no_attempt_outlives_the_deadline(server: ScriptedServer, make_caller: MakeCaller) -> None:
    server.script = [Silence()]

    with pytest.raises(OutcomeUnknown):
        # Real seconds: the sockets wait by themselves.
        make_caller(deadline=0.05)("POST", server.url, json=JSON, timeout=None)


@pytest.mark.parametrize("make_caller", BLOCKING, indirect=True)
def test_a_reply_that_drips_past_the_deadline_is_lost(
    server: ScriptedServer, make_caller: MakeCaller, clock: Clock
) -> None:
    """An asynchronous call ends by a scope of its own, in real time, as in the test above."""
    call = make_caller(deadline=1.0)

    def later() -> None:
        clock.now += 0.6

    head = b"HTTP/1.1 201 X\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\n"
    server.script = [Drip([head, b"1", b"2", b"3"], later)]

    with pytest.raises(OutcomeUnknown):
        call("POST", server.url, json=JSON)


@pytest.mark.parametrize("make_caller", BLOCKING, indirect=True)
@pytest.mark.parametrize("first", [b"HTTP/1.1 20", b"HTTP/1.1 204 X\r\n", b"HTTP/1.1 204 X\r\nX-A: b"])
def test_a_head_that_drips_past_the_deadline_is_lost(
    server: ScriptedServer, make_caller: MakeCaller, clock: Clock, first: bytes
) -> None:
    """Each piece begins the read timeout again. The reply has no body, after which the clock would be looked at."""
    call = make_caller(deadline=1.0)

    def later() -> None:
        clock.now += 1.5

    whole = b"HTTP/1.1 204 X\r\nX-A: b\r\n\r\n"
    server.script = [Drip([first, whole[len(first) :]], later)]

    with pytest.raises(OutcomeUnknown):
        call("POST", server.url, json=JSON)


@EACH
@pytest.mark.parametrize("deadline", [math.inf, 1e12, 10**400])
def test_a_deadline_may_be_as_long_as_you_like(
    server: ScriptedServer, make_caller: MakeCaller, deadline: float
) -> None:
    call = make_caller(deadline=deadline)
    server.script = [Drop(), problem("in-flight", 409, "Retry-After: 5"), reply()]
    assert call("POST", server.url, json=JSON, timeout=None).status == 201

    for never in ("9999999999", "9" * 400):
        server.script = [problem("in-flight", 409, f"Retry-After: {never}")]
        with pytest.raises(InFlight):
            call("POST", server.url, json=JSON, timeout=1e12)

    server.script = [Drop(), reply()]
    with pytest.raises(OutcomeUnknown):
        make_caller(deadline=deadline, backoff=(deadline,))("POST", server.url, json=JSON)


@EACH
def test_a_header_that_cannot_be_sent_leaves_no_doubt(
    server: ScriptedServer, make_caller: MakeCaller, clock: Clock
) -> None:
    call, ledger = make_caller(), Ledger()
    for number, value in enumerate(("a\nb", "\u20ac" if call.kind == "requests" else "a\0b")):

        def spoil(request: Any, value: str = value) -> Any:
            # Both libraries check what they are given at the call, and not what an authentication adds.
            request.headers["X-Note"] = value
            return request

        name = f"pay {number}"
        with pytest.raises(NotSent) as caught, Intents(ledger)(name):
            call("POST", server.url, json=JSON, auth=spoil)

        entry = ledger.find(name)
        assert entry is not None
        assert (entry.state, caught.value.attempts, clock.pauses) == ("new", 1, [])
    assert server.seen == []

    # A lost reply before it stays a doubt.
    server.script = [Drop()]
    with pytest.raises(OutcomeUnknown), Intents(ledger)("pay"):
        make_caller(attempts=1)("POST", server.url, json=JSON)
    with pytest.raises(OutcomeUnknown), Intents(ledger)("pay"):
        call("POST", server.url, json=JSON, auth=spoil)


@pytest.mark.parametrize("make_caller", BLOCKING, indirect=True)
def test_the_budget_is_shared_by_the_calls_of_a_transport(server: ScriptedServer, make_caller: MakeCaller) -> None:
    call = make_caller(budget=10)
    server.script = [reply(503)]
    with pytest.raises(OutcomeUnknown):
        call("POST", server.url, json=JSON)
    assert len(server.seen) == 3

    server.seen.clear()
    with pytest.raises(OutcomeUnknown):
        call("POST", server.url, json=JSON)
    assert len(server.seen) == 1


@pytest.mark.parametrize("make_caller", BLOCKING, indirect=True)
def test_success_returns_the_tokens(server: ScriptedServer, make_caller: MakeCaller) -> None:
    call = make_caller(budget=10)
    for _ in range(3):
        server.script = [reply(503), reply(503), reply()]
        assert call("POST", server.url, json=JSON).status == 201


@EACH
def test_an_observer_sees_each_attempt_and_may_fail(server: ScriptedServer, make_caller: MakeCaller) -> None:
    seen: list[Attempt] = []

    def observe(attempt: Attempt) -> None:
        seen.append(attempt)
        raise RuntimeError("broken")

    server.script = [Drop(), problem("in-flight", 409, "Retry-After: 1"), reply()]
    make_caller(observer=observe)("POST", server.url, json=JSON)

    assert [(attempt.number, attempt.status, attempt.code) for attempt in seen] == [
        (1, None, None),
        (2, 409, "in-flight"),
        (3, 201, None),
    ]
    assert [attempt.wait is None for attempt in seen] == [False, False, True]
    assert seen[0].error is not None


@EACH
def test_a_temporary_redirect_keeps_the_key(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(307, b"", "Location: /elsewhere"), reply()]

    with Intents()("pay") as intent:
        assert call("POST", server.url, json=JSON).status == 201

    assert server.keys == [intent.key] * 2
    assert [request.path for request in server.seen] == ["/", "/elsewhere"]


@EACH
def test_see_other_is_followed_by_a_read_without_retries(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(303, b"", "Location: /payments/1"), reply(503)]

    with Intents()("pay"):
        assert call("POST", server.url, json=JSON).status == 503

    assert [request.method for request in server.seen] == ["POST", "GET"]


@EACH
def test_a_torn_reply_without_content_is_never_taken_for_a_whole_one(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    whole = b"HTTP/1.1 409 X\r\nContent-Length: 0\r\nRetry-After: 1\r\nStripe-Should-Retry: true\r\n\r\n"
    call = make_caller(budget=10**6)
    for position in range(whole.index(b"Retry"), len(whole), 2 if call.kind in BLOCKING else 17):
        server.script = [whole[:position], reply()]

        assert call("POST", server.url, json=JSON).status == 201, position


@pytest.mark.parametrize(("end", "whole"), ((b"\r\n\r\n", True), (b"\r\n", False), (b"", False)))
def test_a_torn_head_is_noticed_on_a_connection_of_another_kind_too(end: bytes, whole: bool) -> None:
    """Sockets of other libraries have files of their own."""
    data = b"HTTP/1.1 201 X\r\nStripe-Should-Retry: true" + end
    response = requests_transport._Response(SimpleNamespace(makefile=lambda mode: io.BufferedReader(io.BytesIO(data))))
    response.begin()

    assert whole is response.whole_head


def test_a_wrong_argument_is_refused_before_the_key_is_noted(server: ScriptedServer) -> None:
    """Or a call that sent nothing would leave a name in doubt."""
    ledger = Ledger()
    prepared = requests.Request("POST", server.url, json=JSON).prepare()

    with pytest.raises(TypeError), Intents(ledger)("pay"):
        IdempotentAdapter().send(prepared, deadline=5)

    assert ([], []) == (ledger.unsettled(), server.seen)


def test_a_response_that_is_kept_keeps_no_socket(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: weakref.WeakSet[requests_transport._Raw] = weakref.WeakSet()
    readers: list[int] = []

    class Noted(requests_transport._Raw):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.add(self)
            readers.append(id(self))

    monkeypatch.setattr(requests_transport, "_Raw", Noted)
    with requests.Session() as session:
        session.mount("http://", IdempotentAdapter())
        response = session.post(server.url, json=JSON)
    gc.collect()

    assert (201, 1, 0) == (response.status_code, len(readers), len(made))


@EACH
def test_content_that_cannot_be_decoded_leaves_a_doubt(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(201, b"no gzip", "Content-Encoding: gzip")]

    with pytest.raises(OutcomeUnknown):
        call("POST", server.url, json=JSON)


@EACH
def test_a_reply_with_two_lengths_leaves_a_doubt(server: ScriptedServer, call: Caller) -> None:
    server.script = [reply(201, b"12", "Content-Length: 3")]

    with pytest.raises(OutcomeUnknown):
        call("POST", server.url, json=JSON)


@pytest.mark.parametrize("answer", [Drop(), b"HTTP/1.1 407 X\r\nContent-Length: 0\r\n\r\n"])
def test_a_reply_that_a_proxy_lost_leaves_a_doubt(answer: Line, server: ScriptedServer, clock: Clock) -> None:
    """Through a proxy, urllib3 raises the same class for a lost reply and for a proxy that cannot be reached."""
    server.script = [Drop(), answer]
    session = requests.Session()
    session.mount("http://", IdempotentAdapter(retries=Retries(timing=clock.timing())))
    session.proxies = {"http": server.url}

    with session, pytest.raises(OutcomeUnknown):
        session.post("http://shop.example/payments", json=JSON, timeout=60)


def test_a_proxy_that_cannot_be_reached_leaves_no_doubt(server: ScriptedServer, clock: Clock) -> None:
    server.close()
    session = requests.Session()
    session.mount("http://", IdempotentAdapter(retries=Retries(timing=clock.timing())))
    session.proxies = {"http": server.url}

    with session, pytest.raises(NotSent):
        session.post("http://shop.example/payments", json=JSON, timeout=60)


def test_a_replayed_response_is_returned_whatever_its_body_says(server: ScriptedServer, call: Caller) -> None:
    body = b'{"type": "https://docs.example/in-flight", "code": "in-flight"}'
    server.script = [reply(409, body, "Idempotency-Replayed: true")]

    assert call("POST", server.url, json=JSON).status == 409
    assert len(server.seen) == 1


@EACH
def test_a_hostile_response_breaks_nothing(server: ScriptedServer, call: Caller) -> None:
    for body in (b"[" * 60_000, b'{"a": ' * 9_000):
        assert (400, 1) == sent(server, call, reply(400, body, 'Link: <http://[x>; rel="status"'))


@EACH
def test_the_response_of_an_error_can_be_read(server: ScriptedServer, call: Caller) -> None:
    server.script = [problem("outcome-unknown", 409)]

    with pytest.raises(OutcomeUnknown) as caught:
        call("POST", server.url, json=JSON)

    assert caught.value.response.json()["code"] == "outcome-unknown"
    assert "outcome-unknown" in caught.value.response.text


@pytest.mark.parametrize("kind", [IdempotentAdapter, IdempotentTransport, AsyncIdempotentTransport])
def test_arguments_of_the_wrong_type_are_a_fault(kind: Any) -> None:
    with pytest.raises(TypeError, match="retries"):
        kind(retries=3)
    with pytest.raises(TypeError, match="methods"):
        kind(methods="POST")


def test_a_file_follows_a_temporary_redirect(server: ScriptedServer, clock: Clock, tmp_path: Any) -> None:
    path = tmp_path / "body.txt"
    path.write_bytes(b"text")
    server.script = [reply(307, b"", "Location: /elsewhere"), reply()]
    session = requests.Session()
    session.mount("http://", IdempotentAdapter(retries=Retries(timing=clock.timing())))

    with session, path.open("rb") as file:
        assert session.post(server.url, data=file, timeout=60).status_code == 201

    assert [request.body for request in server.seen] == [b"text", b"text"]
