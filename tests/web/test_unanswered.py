"""Requests that end without an answer that could be settled by."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask, Response, current_app, got_request_exception

from flask_idempotency.engine.events import Quarantined
from tests.web.apps import KEY, World, new_world

POLICIES: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "quarantine"),
    ({"effects": "deduplicated"}, "release"),
    ({"on_abandoned": "takeover"}, "release"),
)
"""What a vanished worker leaves."""


class Silent(Flask):
    """Runs none of its after_request functions."""

    def process_response(self, response: Response) -> Response:
        return response


class Forgiving(Flask):
    """Tells teardown functions of no error at all."""

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
def test_an_application_that_runs_no_hooks_of_its_own_may_have_paid(policy: dict[str, Any], settled: str) -> None:
    """process_response was replaced: no answer was seen, and the view has run all the same."""
    world = paying(new_world(Silent("tests.web.app"), **policy))

    assert 200 == world.post().status_code
    assert ([1], [settled]) == (world.runs, world.settled())


@pytest.mark.parametrize(("policy", "settled"), POLICIES)
def test_a_view_that_was_dispatched_by_hand_may_have_paid(policy: dict[str, Any], settled: str) -> None:
    """A context pushed by hand, whose view has run and whose answer nobody made a response of."""
    world = paying(new_world(**policy))
    with world.app.test_request_context("/", method="POST", headers={KEY: "k"}):
        assert world.app.preprocess_request() is None
        world.app.dispatch_request()

    assert ([1], [settled]) == (world.runs, world.settled())
    if settled == "quarantine":
        assert ["unanswered"] == [event.reason for event in world.told(Quarantined)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("app", (Forgiving, Flask))
@pytest.mark.parametrize("error", (SystemExit(), Falsy()))
@pytest.mark.parametrize(("policy", "settled"), POLICIES)
def test_an_interrupt_counts_although_nobody_hears_of_it_or_it_is_falsy(
    app: type[Flask], error: BaseException, policy: dict[str, Any], settled: str
) -> None:
    """should_ignore_error hides it from teardown functions; presence is not truthiness."""
    world = paying(new_world(app("tests.web.app"), **policy), error)
    with pytest.raises(SystemExit):
        world.post()

    assert ([1], [settled]) == (world.runs, world.settled())


@pytest.mark.parametrize(("status", "settled"), ((201, "complete"), (402, "complete"), (503, "release")))
def test_an_error_that_the_view_reported_and_dealt_with_is_none(status: int, settled: str) -> None:
    """It sent got_request_exception by hand, for a tracker to hear: its answer is the answer."""
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


def test_an_error_that_was_reported_is_no_excuse_to_release_when_no_answer_was_seen() -> None:
    """Nothing says that the request ended by it."""
    world = new_world(Silent("tests.web.app"))

    @world.view()
    def pay() -> str:
        got_request_exception.send(current_app._get_current_object(), exception=ValueError("x"))  # type: ignore[attr-defined]
        return "paid"

    world.post()
    assert ["quarantine"] == world.settled()
