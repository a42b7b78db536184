"""A resolver says what became of a key that nobody knows the outcome of, and retries hear it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, current_app, has_request_context, jsonify, stream_with_context

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Resolved, ResolverAsked
from flask_idempotency.engine.model import State, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Happened, NeverHappened, Resolution, StillUnknown, UnknownOutcome
from flask_idempotency.extension import Idempotency
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.reap import ReapReport
from flask_idempotency.web.current_claim import current_claim
from flask_idempotency.web.janitor import janitor_of
from flask_idempotency.web.policies import idempotent
from tests.apps import World, is_replay, new_world
from tests.books import book_of

DRAIN = Batcher(sleep=lambda seconds: None, monotonic=lambda: 0.0)


def reap(world: World, app: Flask | None = None) -> Any:
    return janitor_of(app or world.app, host_clock=lambda: world.clock.now).run("reap", DRAIN)


def unknown(says: Callable[[UnknownOutcome], Any] | None = None, **options: Any) -> World:
    """A shop whose only payment has failed in a way that nobody knows the outcome of."""
    world = new_world(on_error="quarantine", **options)

    @world.view(endpoint="pay")
    def pay() -> str:
        world.runs.append(current_claim.downstream_key("charge"))
        if len(world.runs) == 1:
            raise ZeroDivisionError
        return "ran again"

    if says is not None:
        world.idempotency.resolver("pay")(says)
    assert 500 == world.post().status_code
    assert State.QUARANTINED is world.state()
    return world


def test_retries_get_what_the_resolver_says_that_happened() -> None:
    """Until then 409; then the answer, replayed, and nothing runs again."""
    world = unknown(lambda unknown: Happened(("paid", 201, {"Location": "/payments/7"})))
    assert 409 == world.post().status_code

    assert ReapReport(asked=1, completed=1) == reap(world)
    answer = world.post()
    assert (201, b"paid", "/payments/7", True) == (
        answer.status_code,
        answer.data,
        answer.headers["Location"],
        is_replay(answer),
    )
    assert 1 == len(world.runs)
    (settled,) = world.told(Resolved)
    assert ("pay", "completed", "resolver") == (settled.operation, settled.verb, settled.actor)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    (
        ("paid", 200, b"paid"),
        (("declined", 402), 402, b"declined"),
        ({"id": 7}, 200, b'{"id":7}\n'),
        (([1], 201), 201, b"[1]\n"),
        (Response(b"\xff\x00", 201), 201, b"\xff\x00"),
        (StoredResponse(204), 204, b""),
        (("", 204), 204, b""),
    ),
    ids=("text", "tuple", "object", "list", "response", "result", "nothing"),
)
def test_an_answer_may_be_anything_that_a_view_may_return(answer: Any, status: int, body: bytes) -> None:
    """As Flask makes a response of it."""
    world = unknown(lambda unknown: Happened(answer))
    reap(world)
    replay = world.post()

    assert (status, body, True) == (replay.status_code, replay.data, is_replay(replay))


def test_an_answer_keeps_the_headers_that_the_endpoints_keep() -> None:
    """By the policy of the view: no cookie is replayed, whoever said the answer."""

    def says(unknown: UnknownOutcome) -> Resolution:
        response = jsonify(id=7)
        response.set_cookie("session", "secret")
        response.headers.update({"Location": "/payments/7", "X-Trace": "t", "X-Receipt": "r"})
        return Happened(response)

    world = unknown(says, keep_headers=("X-Receipt",), keep=timedelta(days=3))
    reap(world)
    replay, record = world.post(), world.record()

    assert ("/payments/7", "r") == (replay.headers["Location"], replay.headers["X-Receipt"])
    assert not {"Set-Cookie", "X-Trace"} & set(replay.headers.keys())
    assert record is not None
    assert 3 * 86400 == record.remaining


def test_a_resolver_runs_in_an_application_context_and_in_no_request() -> None:
    """It may use the application's database, and there is nobody to answer."""
    seen = list[Any]()

    def says(unknown: UnknownOutcome) -> Resolution:
        seen.extend((current_app.name, has_request_context(), bool(current_claim)))
        return StillUnknown()

    world = unknown(says)
    assert ReapReport(asked=1, unknown=1) == reap(world)

    assert [world.app.name, False, False] == seen
    assert 409 == world.post().status_code


def test_a_resolver_may_be_async() -> None:
    """As a view may."""

    async def says(unknown: UnknownOutcome) -> Resolution:
        return Happened("paid")

    world = unknown(says)

    assert ReapReport(asked=1, completed=1) == reap(world)
    assert b"paid" == world.post().data


def test_what_never_happened_runs_again() -> None:
    """The view itself has failed; what it has sent has had the rest of its lease to arrive."""
    world = unknown(lambda unknown: NeverHappened())
    world.clock.advance(Policy().lease)

    assert ReapReport(asked=1, released=1) == reap(world)
    assert (b"ran again", 2) == (world.post().data, len(world.runs))


def test_a_resolver_is_shown_the_record_and_no_body() -> None:
    """Whose it was and what was called; nothing of it in its repr."""
    seen = list[UnknownOutcome]()

    def says(unknown: UnknownOutcome) -> Resolution:
        seen.append(unknown)
        return StillUnknown()

    world = unknown(says)
    reap(world)
    about = seen[0].record.info

    assert ("POST", "pay", "alice") == (about.method, about.operation, about.principal)
    assert not any(secret in repr(seen[0]) for secret in ("alice", "charge"))


@pytest.mark.parametrize(
    "answer",
    (
        lambda: Response(iter((b"a", b"b"))),
        lambda: stream_with_context(iter((b"a",))),
        lambda: None,
        lambda: object(),
        lambda: ("paid", "not a status", {}, "too much"),
    ),
    ids=("stream", "generator", "nothing", "an object", "a tuple that is none"),
)
def test_an_answer_that_is_none_settles_nothing(answer: Callable[[], Any]) -> None:
    """A stream has nobody to read it. The key stays as it was, and is told as asked about in vain."""
    world = unknown(lambda unknown: Happened(answer()))

    assert ReapReport(asked=1, failed=1) == reap(world)
    assert 409 == world.post().status_code
    assert 1 == len(world.told(ResolverAsked))


def test_an_endpoint_has_one_resolver() -> None:
    """Nobody could say which of two is right."""
    idempotency = Idempotency()
    idempotency.resolver("pay")(lambda unknown: StillUnknown())
    with pytest.raises(ConfigurationError, match="has one already"):
        idempotency.resolver("pay")(lambda unknown: StillUnknown())


def test_a_resolver_is_returned_unchanged() -> None:
    """It may be called, and tested, as it was written."""

    def says(unknown: UnknownOutcome) -> Resolution:
        return StillUnknown()

    assert says is Idempotency().resolver("pay")(says)


def test_a_resolver_of_an_endpoint_that_is_not_there_is_refused() -> None:
    """Its keys would wait for ever. All that are wrong are named."""
    world = new_world()
    for endpoint in ("payments.cretae", "pay"):
        world.idempotency.resolver(endpoint)(lambda unknown: StillUnknown())
    world.view(endpoint="pay")(lambda: "paid")
    with pytest.raises(ConfigurationError, match=r"resolver\('payments\.cretae'\): .*no such endpoint"):
        janitor_of(world.app)


def test_a_blueprints_endpoint_is_named_as_url_for_names_it() -> None:
    """And its policy is the view's own."""
    world, payments = new_world(), Blueprint("payments", __name__)

    @payments.post("/pay")
    @idempotent(on_error="quarantine", keep=600)
    def create() -> str:
        raise ZeroDivisionError

    world.app.register_blueprint(payments)
    world.idempotency.resolver("payments.create")(lambda unknown: Happened("paid"))
    assert 500 == world.post("/pay").status_code

    assert ReapReport(asked=1, completed=1) == reap(world)
    record = world.record()
    assert record is not None
    assert (b"paid", 600) == (world.post("/pay").data, record.remaining)


def test_an_application_without_idempotency_has_no_janitor() -> None:
    """And says what is missing."""
    with pytest.raises(ConfigurationError, match="not set up"):
        janitor_of(Flask("bare"))


class Ask:
    """A resolver that notes what the other side was sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def __call__(self, unknown: UnknownOutcome) -> Resolution:
        self.sent.append(unknown.downstream_key("charge"))
        return StillUnknown()


def restarted(world: World, says: Callable[[UnknownOutcome], Any], *secret: str) -> World:
    """The same shop after a deployment with these secrets."""
    again = new_world(store=world.store, on_error="quarantine", secret=secret)
    again.clock = world.clock
    again.view(endpoint="pay")(lambda: "ran again")
    again.idempotency.resolver("pay")(says)
    return again


def test_the_other_side_is_asked_by_the_key_that_it_was_sent() -> None:
    """Another would be one that it has never heard of, and that would look as if nothing had been done."""
    ask = Ask()
    world = unknown(ask)
    reap(world)

    assert world.runs == ask.sent


def test_it_is_so_after_the_secret_was_rotated() -> None:
    """The record shows which of the secrets it was claimed under."""
    world, ask = unknown(secret=("old",)), Ask()

    assert ReapReport(asked=1, unknown=1) == reap(restarted(world, ask, "new", "old"))
    assert world.runs == ask.sent


@pytest.mark.parametrize("listed", (("new",), ("newer", "new")))
def test_nobody_is_asked_by_a_key_that_cannot_be_told(
    listed: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The secret of its owner is listed no more: a wrong key would be proof of nothing, and look like proof."""
    world, ask = unknown(secret=("old",)), Ask()

    assert ReapReport(asked=1, failed=1) == reap(restarted(world, ask, *listed))
    assert ([], 1) == (ask.sent, len(world.runs))
    assert "downstream_key()" in caplog.text
    assert world.runs[0] not in caplog.text


def test_nor_by_one_of_a_claim_under_two_secrets() -> None:
    """While both were listed it had a record under each, and the other side was told by one."""
    world, ask = unknown(secret=("new", "old")), Ask()

    for listed in (("new", "old"), ("new",), ("old",)):
        world.clock.advance(7200)
        assert ReapReport(asked=2, failed=2) == reap(restarted(world, ask, *listed))
    assert ask.sent == []


def test_a_resolver_that_asks_by_something_else_needs_no_key() -> None:
    """It is told only to those that ask for it."""
    world = unknown(secret=("old",))
    again = restarted(world, lambda unknown: Happened("paid"), "new")

    assert ReapReport(asked=1, completed=1) == reap(again)


def test_another_applications_keys_are_not_asked_about() -> None:
    """
    Two share a store and a secret, and have endpoints of the same name: each asks its own provider, about its own.
    """
    asked = list[str]()

    def says(whose: str) -> Callable[[UnknownOutcome], Resolution]:
        def resolver(unknown: UnknownOutcome) -> Resolution:
            asked.append(whose)
            return Happened(whose)

        return resolver

    billing = unknown(says("billing"), secret="shared-9f2c47d1e8b35a60")
    shop = Flask("another")
    extension = Idempotency(store=billing.store, secret="shared-9f2c47d1e8b35a60")
    shop.post("/", endpoint="pay")(lambda: "never")
    extension.resolver("pay")(says("shop"))
    extension.init_app(shop)

    assert ReapReport() == reap(billing, shop)
    assert ReapReport(asked=1, completed=1) == reap(billing)
    assert (["billing"], b"billing") == (asked, billing.post().data)


def test_each_application_has_a_janitor_of_its_own() -> None:
    """That the other one's has come says nothing about this one's."""
    billing = unknown()
    shop = Flask("another")
    Idempotency(shop, store=billing.store, secret="shared-9f2c47d1e8b35a60")
    reap(billing)

    assert (["reap"], []) == (list(book_of(billing.app).reports()), list(book_of(shop).reports()))
