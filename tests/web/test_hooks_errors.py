"""What happens to a key if its view raises, is interrupted, or ends without a response."""

from __future__ import annotations

import contextlib
from itertools import product
from typing import Any

import gevent  # type: ignore[import-untyped]
import pytest
from flask import Flask, Response, abort, current_app, got_request_exception, redirect, url_for
from flask_restx import Api, Resource  # type: ignore[import-untyped]
from greenlet import GreenletExit  # type: ignore[import-untyped]
from werkzeug.exceptions import HTTPException, UnprocessableEntity

from flask_idempotency.engine.events import Completed, Quarantined, Released
from flask_idempotency.engine.model import State
from flask_idempotency.web.current_claim import current_claim
from flask_idempotency.web.policies import claim_here
from tests.apps import KEY, World, is_replay, new_world

PROPAGATION: dict[str, dict[str, Any]] = {
    "production": {"TESTING": False, "PROPAGATE_EXCEPTIONS": None},
    "testing": {"TESTING": True, "PROPAGATE_EXCEPTIONS": None},
    "debug": {"TESTING": False, "DEBUG": True, "PROPAGATE_EXCEPTIONS": None},
    "propagate": {"TESTING": False, "PROPAGATE_EXCEPTIONS": True},
    "testing, not propagating": {"TESTING": True, "PROPAGATE_EXCEPTIONS": False},
}


@pytest.mark.parametrize("handled", (True, False))
def test_p35_an_abort_is_stored_even_if_its_body_is_not_read(handled: bool) -> None:
    """abort(422) is a final response, with an error handler or without; replayed byte for byte."""
    world = new_world()
    if handled:
        world.app.register_error_handler(422, lambda error: ({"problem": error.code}, 422))

    @world.view()
    def pay() -> Any:
        world.runs.append(1)
        abort(422)

    unread = world.client().post("/", headers={KEY: "k"}, buffered=False)
    assert 422 == unread.status_code
    assert State.COMPLETED is world.state()
    again = world.post()

    assert is_replay(again)
    assert (unread.status, unread.data) == (again.status, again.data)
    assert [1] == world.runs


@pytest.mark.parametrize("config", PROPAGATION)
def test_p36_an_unhandled_exception_of_a_plain_view_quarantines_in_every_mode(config: str) -> None:
    """In production, under TESTING, DEBUG and PROPAGATE_EXCEPTIONS alike: how far the view came is unknown."""
    world = crashing_once(config)

    assert ["quarantine"] == world.settled()
    assert (409, "outcome-unknown") == (world.post().status_code, world.post().json["code"])  # type: ignore[index]
    assert 1 == len(world.runs)


@pytest.mark.parametrize(
    ("policy", "settled", "status"),
    (
        ({"effects": "marked"}, "release", 200),
        ({"effects": "deduplicated"}, "release", 200),
        # Stripe's rule: once the view began, even a crash is the response.
        ({"profile": "stripe"}, "complete", 500),
        # The effect may have happened, and must not happen twice.
        ({"effects": "marked", "past_point": True}, "quarantine", 409),
    ),
    ids=("marked", "deduplicated", "keep", "past the point"),
)
@pytest.mark.parametrize("config", PROPAGATION)
def test_p36_the_policy_decides_about_an_unhandled_exception_in_every_mode(
    config: str, policy: dict[str, Any], settled: str, status: int
) -> None:
    world = crashing_once(config, **policy)

    assert [settled] == world.settled()
    assert status == world.post().status_code
    assert (2 if settled == "release" else 1) == len(world.runs)


def crashing_once(config: str, *, past_point: bool = False, **policy: Any) -> World:
    """Send the first request to a view whose first run fails."""
    world = new_world(config=PROPAGATION[config], **policy)

    @world.view()
    def pay() -> str:
        world.runs.append(1)
        if past_point:
            current_claim.point_of_no_return()
        if len(world.runs) == 1:
            raise ValueError("crash")
        return "paid"

    with contextlib.suppress(ValueError):
        assert 500 == world.post().status_code
    return world


GOING: tuple[type[BaseException], ...] = (SystemExit, KeyboardInterrupt, GeneratorExit, GreenletExit, gevent.Timeout)


def p37_an_interrupted_worker_counts_as_vanished(
    interrupt: type[BaseException], policy: dict[str, Any], settled: str
) -> None:
    world = new_world(**policy)

    @world.view()
    def pay() -> str:
        raise interrupt()

    with pytest.raises(interrupt):
        world.post()

    assert [settled] == world.settled()


def test_p37_an_interrupted_worker_counts_as_vanished() -> None:
    """SystemExit and its kin propagate; the key is quarantined for plain effects, free if takeover is safe."""
    for (policy, settled), interrupt in product(
        (
            ({}, "quarantine"),
            ({"effects": "marked"}, "release"),
            ({"effects": "deduplicated"}, "release"),
            ({"on_abandoned": "takeover"}, "release"),
            ({"profile": "x-idempotency", "header": KEY}, "quarantine"),
            ({"profile": "x-idempotency", "header": KEY, "effects": "deduplicated"}, "release"),
            ({"effects": "deduplicated", "on_abandoned": "quarantine"}, "quarantine"),
        ),
        GOING,
    ):
        p37_an_interrupted_worker_counts_as_vanished(interrupt, policy, settled)


def test_p37_an_interrupted_worker_past_the_point_of_no_return_quarantines() -> None:
    """The mark counts for a killed worker as for a vanished one."""
    world = new_world(effects="marked")

    @world.view()
    def pay() -> str:
        current_claim.point_of_no_return()
        raise SystemExit

    with pytest.raises(SystemExit):
        world.post()

    assert ["quarantine"] == world.settled()
    assert "worker-interrupted" == world.told(Quarantined)[0].reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("returned", (None, object(), 5))
def test_p38_a_view_that_returns_an_invalid_value_has_run(returned: Any) -> None:
    """Raised in make_response, where Flask calls no error handler."""
    world = new_world()
    world.view()(lambda: returned)

    assert 500 == world.post().status_code
    assert ["quarantine"] == world.settled()


def test_p38_an_error_handler_that_raises_leaves_no_response() -> None:
    """The 422 never became one."""
    world = new_world()

    @world.app.errorhandler(422)
    def fail(error: HTTPException) -> Any:
        raise ValueError("in the handler")

    world.view()(lambda: abort(422))

    assert 500 == world.post().status_code
    assert ["quarantine"] == world.settled()


@pytest.mark.parametrize(
    ("status", "settled"),
    ((200, "complete"), (422, "complete"), (500, "quarantine"), (502, "quarantine"), (503, "release")),
)
def test_p39_an_error_handlers_response_is_judged_by_its_status(status: int, settled: str) -> None:
    """A handler that turns an exception into a response has chosen that response."""
    world = new_world()
    world.app.register_error_handler(Exception, lambda error: ("sorry", status))

    @world.view()
    def pay() -> str:
        raise ValueError("crash")

    assert status == world.post().status_code
    assert [settled] == world.settled()


def test_p40_flask_restx_abort_is_stored_although_it_signals_an_exception() -> None:
    """Flask-RESTX sends got_request_exception for every abort()."""
    world = new_world()
    api = Api(world.app)
    signalled: list[BaseException] = []

    @api.route("/pay")
    class Pay(Resource):  # type: ignore[misc]
        def post(self) -> Any:
            api.abort(422, "no")

    def note(sender: Any, exception: BaseException) -> None:
        signalled.append(exception)

    with got_request_exception.connected_to(note, world.app):
        first = world.post("/pay")
    again = world.post("/pay")

    assert [UnprocessableEntity] == [type(error) for error in signalled]
    assert is_replay(again)
    assert (first.status, first.data) == (again.status, again.data)


@pytest.mark.parametrize("status", (200, 302, 500))
@pytest.mark.parametrize(("past_point", "settled"), ((False, "release"), (True, "quarantine")))
def test_p39_an_unhandled_error_stays_an_error_with_any_error_page(status: int, past_point: bool, settled: str) -> None:
    """Some applications apologise with a 200; the effect stays unknown."""
    world = new_world(effects="marked")
    world.app.register_error_handler(500, lambda error: ("sorry", status))

    @world.view()
    def pay() -> str:
        if past_point:
            current_claim.point_of_no_return()
        raise ValueError("crash")

    assert status == world.post().status_code
    assert settled == world.settled()[-1]


def test_an_error_hidden_from_teardown_functions_is_judged_as_an_error() -> None:
    """`on_error` decides, not `on_abandoned`."""
    world = new_world(effects="deduplicated", on_error="quarantine", config={"PROPAGATE_EXCEPTIONS": True})
    world.app.should_ignore_error = lambda error: True  # type: ignore[method-assign]

    @world.view()
    def pay() -> str:
        raise ValueError("crash")

    with contextlib.suppress(ValueError):
        world.post()

    assert ["quarantine"] == world.settled()


def test_p40_an_exception_that_flask_restx_has_a_handler_for_is_judged_by_its_status() -> None:
    """The response that the handler chose is stored."""
    world = new_world()
    api = Api(world.app)

    class Declined(Exception):
        pass

    @api.errorhandler(Declined)  # type: ignore[untyped-decorator]
    def declined(error: Declined) -> Any:
        return {"message": "declined"}, 402

    @api.route("/pay")
    class Pay(Resource):  # type: ignore[misc]
        def post(self) -> Any:
            raise Declined

    assert 402 == world.post("/pay").status_code
    assert ["complete"] == world.settled()


@pytest.mark.parametrize("deferred", (True, False))
@pytest.mark.parametrize("propagate", (True, False))
def test_p41_trapped_http_exceptions_do_not_break_replays(deferred: bool, propagate: bool) -> None:
    """Under TRAP_HTTP_EXCEPTIONS a response that is raised would become a 500."""
    world = new_world(config={"TRAP_HTTP_EXCEPTIONS": True, "PROPAGATE_EXCEPTIONS": propagate})

    def pay() -> str:
        return "paid"

    world.view()(claim_here(pay) if deferred else pay)
    first, again = world.post(), world.post()

    assert is_replay(again)
    assert first.data == again.data


def test_p42_a_redirect_is_stored_and_its_target_is_not_claimed() -> None:
    """303 is a final response; the GET that follows carries the key, and the key does not apply to it."""
    world = new_world()
    world.app.get("/done", endpoint="done")(lambda: "done")
    world.view()(lambda: redirect(url_for("done"), 303))

    for _ in range(2):
        response = world.post(follow_redirects=True)
        assert (200, "done") == (response.status_code, response.text)
    assert ["claim", "complete", "claim"] == world.store.verbs()


def test_p42_a_307_to_another_endpoint_with_the_same_key_works_twice() -> None:
    """The client repeats the request elsewhere, so the first key is released; each endpoint has its own key space."""
    world = new_world(scope="operation")

    @world.view("/target", endpoint="target")
    def target() -> str:
        world.runs.append(1)
        return "paid"

    world.view()(lambda: redirect(url_for("target"), 307))

    assert ["paid", "paid"] == [world.post(follow_redirects=True).text for _ in range(2)]
    assert [1] == world.runs


def test_the_outcome_policy_decides_by_status_or_by_function() -> None:
    """SPEC section 5; tests/engine/test_policy.py has the whole table. A `decide` that fails cannot have meant release."""
    for policy, status, settled in (
        ({}, 201, "complete"),
        ({}, 404, "complete"),
        ({}, 409, "release"),
        ({}, 502, "quarantine"),
        ({}, 503, "release"),
        ({"effects": "marked"}, 500, "release"),
        ({"profile": "stripe", "on_error": "release"}, 500, "release"),
        ({"profile": "x-idempotency", "header": KEY}, 500, "complete"),
        ({"profile": "playbook", "keep_statuses": [500]}, 500, "complete"),
        ({"decide": lambda response, error: "quarantine"}, 201, "quarantine"),
        ({"decide": lambda response, error: response.headers.get("X-Settle")}, 201, "release"),
        ({"decide": lambda response, error: 1 / 0}, 201, "quarantine"),
        ({"decide": lambda response, error: "nonsense"}, 201, "quarantine"),
    ):
        world = new_world(**policy)
        world.view()(lambda status=status: ("x", status, {"X-Settle": "release"}))

        assert status == world.post().status_code, policy
        assert [settled] == world.settled(), (policy, status)


def test_a_5xx_past_the_point_of_no_return_quarantines_by_its_status() -> None:
    """The view marked its point of no return, then responded 503."""
    world = new_world()

    @world.view()
    def pay() -> tuple[str, int]:
        current_claim.point_of_no_return()
        return "bad gateway", 502

    assert 502 == world.post().status_code
    assert "status-502" == world.told(Quarantined)[0].reason  # type: ignore[attr-defined]
    assert not world.told(Released) + world.told(Completed)


POLICIES: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "quarantine"),
    ({"effects": "deduplicated"}, "release"),
    ({"on_abandoned": "takeover"}, "release"),
)
"""The same as a vanished worker leaves."""


class Silent(Flask):
    """Runs none of its after_request functions."""

    def process_response(self, response: Response) -> Response:
        return response


class Forgiving(Flask):
    """Passes no error to teardown functions."""

    def should_ignore_error(self, error: BaseException | None) -> bool:
        return True


class Falsy(SystemExit):
    def __bool__(self) -> bool:
        return False


def paying(world: World, error: BaseException | None = None) -> World:
    @world.view()
    def pay() -> str:
        world.runs.append(1)
        if error is not None:
            raise error
        return "paid"

    return world


@pytest.mark.parametrize(("policy", "settled"), POLICIES)
def test_an_application_that_skips_after_request_hooks_may_have_paid(policy: dict[str, Any], settled: str) -> None:
    """process_response was replaced: the hook saw no response, although the view has run."""
    world = paying(new_world(Silent("tests.web.app"), **policy))

    assert 200 == world.post().status_code
    assert ([1], [settled]) == (world.runs, world.settled())


@pytest.mark.parametrize(("policy", "settled"), POLICIES)
def test_a_view_that_was_dispatched_by_hand_may_have_paid(policy: dict[str, Any], settled: str) -> None:
    """A context pushed by hand: the view has run, and Flask made no response."""
    world = paying(new_world(**policy))
    with world.app.test_request_context("/", method="POST", headers={KEY: "k"}):
        assert world.app.preprocess_request() is None
        world.app.dispatch_request()

    assert ([1], [settled]) == (world.runs, world.settled())
    if settled == "quarantine":
        assert ["unanswered"] == [event.reason for event in world.told(Quarantined)]  # type: ignore[attr-defined]


def test_an_interrupt_counts_even_if_it_is_hidden_or_falsy() -> None:
    """should_ignore_error hides it from teardown functions; presence is not truthiness."""
    for (policy, settled), error, app in product(POLICIES, (SystemExit(), Falsy()), (Forgiving, Flask)):
        world = paying(new_world(app("tests.web.app"), **policy), error)
        with pytest.raises(SystemExit):
            world.post()

        assert ([1], [settled]) == (world.runs, world.settled()), (policy, settled, error, app)


@pytest.mark.parametrize(("status", "settled"), ((201, "complete"), (402, "complete"), (503, "release")))
def test_an_error_that_the_view_reported_and_handled_does_not_count(status: int, settled: str) -> None:
    """It sent got_request_exception by hand, to an error tracker: its response is final."""
    world = new_world()

    @world.view()
    def pay() -> tuple[str, int]:
        try:
            raise ValueError("the receipt could not be printed")
        except ValueError as error:
            got_request_exception.send(current_app._get_current_object(), exception=error)  # type: ignore[attr-defined]
        return "paid", status

    assert status == world.post().status_code
    assert [settled] == world.settled()


def test_an_error_that_was_reported_releases_no_key_without_a_response() -> None:
    """The error may not be what ended the request."""
    world = new_world(Silent("tests.web.app"))

    @world.view()
    def pay() -> str:
        got_request_exception.send(current_app._get_current_object(), exception=ValueError("x"))  # type: ignore[attr-defined]
        return "paid"

    world.post()
    assert ["quarantine"] == world.settled()
