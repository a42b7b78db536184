"""What one request leaves behind for later ones, and what it says of itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from flask import Response, request

from flask_idempotency.web.policies import claim_here
from flask_idempotency.web.request_state import current_state
from tests.web.apps import new_world

CANARY = "canary"


@pytest.mark.parametrize("shared", (True, False))
def test_a_response_that_requests_share_collects_nothing(shared: bool) -> None:
    """Some applications return one `ACCEPTED = Response(...)` from a module: it must not grow, nor keep bodies."""
    world = new_world()
    one = Response("accepted", 202)
    spools: list[Any] = []

    @world.view()
    def accept() -> Response:
        spools.append(request.environ["wsgi.input"])
        return one if shared else Response("accepted", 202)

    for number in range(3):
        world.post(key=str(number), data=b"x" * 100_000)

    assert [True] * 3 == [spool.closed for spool in spools]
    assert [] == one._on_close


def test_a_mark_whose_wrapper_is_never_called_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """The decorator calls what is below @claim_here, so the hook waits for a claim that nobody asks for."""
    world = new_world()

    def unwrapping(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def calling() -> Any:
            return view.__wrapped__()  # type: ignore[attr-defined]

        return calling

    @world.view()
    @unwrapping
    @claim_here
    def pay() -> str:
        return "paid"

    with caplog.at_level(logging.WARNING):
        for number in range(3):
            world.post(key=f"{CANARY}{number}")

    assert 1 == sum("without entering @claim_here" in message for message in caplog.messages)
    assert CANARY not in caplog.text
    assert [] == world.store.calls


@pytest.mark.parametrize("status", (401, 302, 500))
def test_a_decorator_that_refuses_is_not_reported(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """That is what it stands above @claim_here for."""
    world = new_world()

    def refusing(view: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(view)(lambda: ("no", status))

    world.view()(refusing(claim_here(lambda: "paid")))
    world.post()

    assert [] == caplog.messages


def test_a_hook_that_answers_before_the_view_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The view has not run, protected or not."""
    world = new_world()
    world.app.before_request(lambda: "served from a cache")
    world.view()(claim_here(lambda: "paid"))
    world.post()

    assert [] == caplog.messages


def test_no_repr_tells_who_asked_what() -> None:
    """Error trackers send the repr of every local variable to somebody else's machine."""
    world = new_world(principal=lambda: f"principal-{CANARY}", tenant=lambda: f"tenant-{CANARY}")
    world.idempotency.problem_renderer(lambda *args, **kwargs: None)
    seen: list[Any] = []

    @world.view()
    def pay() -> Response:
        state = current_state()
        assert state is not None
        seen.append(state)
        return Response(f"body-{CANARY}", headers={"Location": f"/{CANARY}"})

    @world.app.after_request
    def look(response: Response) -> Response:
        state = current_state()
        assert state is not None
        desk = world.app.extensions["idempotency"]
        seen.extend((state.capture, state.body, state.claim, state.reply, desk))
        return response

    for _ in range(2):
        world.post(key=f"key-{CANARY}", data=f"data-{CANARY}", headers={"X-User": CANARY})

    assert seen[1].head.metadata
    assert CANARY not in "".join(map(repr, seen))
