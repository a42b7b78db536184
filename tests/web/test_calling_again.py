"""Decorators above `@claim_here` that call the view once more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from flask import current_app, got_request_exception

from flask_idempotency.web.policies import claim_here
from tests.web.apps import World, is_replay, new_world


def retried(view: Callable[..., Any]) -> Callable[..., Any]:
    """The usual decorator: whatever was raised, try three times."""

    @wraps(view)
    def retrying(*args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            try:
                return view(*args, **kwargs)
            except Exception:  # noqa: BLE001, S112 - this is the mistake that is tested
                continue
        return view(*args, **kwargs)

    return retrying


def called_twice(view: Callable[..., Any]) -> Callable[..., Any]:
    """Consumes the first answer, and returns the second."""

    @wraps(view)
    def calling(*args: Any, **kwargs: Any) -> Any:
        try:
            first = view(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see above
            first = getattr(error, "response", None)
        if hasattr(first, "response"):
            first.response = []
        return view(*args, **kwargs)

    return calling


def signalling(view: Callable[..., Any]) -> Callable[..., Any]:
    """Reports to the error tracker by hand, then tries again."""

    @wraps(view)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return view(*args, **kwargs)
        except Exception:  # noqa: BLE001 - see above
            got_request_exception.send(current_app._get_current_object(), exception=ValueError("wrapped"))  # type: ignore[attr-defined]
            return view(*args, **kwargs)

    return telling


def charging(world: World, decorator: Callable[..., Any]) -> World:
    @world.view()
    @decorator
    @claim_here
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        return f"charge {len(world.runs)}", 201

    return world


@pytest.mark.parametrize("trap", (False, True))
@pytest.mark.parametrize("decorator", (retried, called_twice, signalling))
def test_a_replay_is_given_again_however_often_the_view_is_called(decorator: Any, trap: bool) -> None:
    """A decorator that takes the stored answer for an error must not get the charge done twice."""
    world = charging(new_world(config={"TRAP_HTTP_EXCEPTIONS": trap}), decorator)
    first = world.post()
    before = len(world.runs)
    again = world.post()

    assert 201 == first.status_code
    assert is_replay(again)
    assert (first.status_code, first.data) == (again.status_code, again.data)
    assert before == len(world.runs)


@pytest.mark.parametrize("trap", (False, True))
@pytest.mark.parametrize("decorator", (retried, called_twice, signalling))
@pytest.mark.parametrize(
    ("policy", "key", "down", "status"),
    (({"required": True}, None, False, 400), ({}, "", False, 400), ({}, "k", True, 503)),
)
def test_a_refusal_is_given_again_however_often_the_view_is_called(
    decorator: Any, trap: bool, policy: dict[str, Any], key: str | None, down: bool, status: int
) -> None:
    """No key where one is required, a key that is none, no store: the view does not run at the second call either."""
    world = charging(new_world(config={"TRAP_HTTP_EXCEPTIONS": trap}, **policy), decorator)
    world.store.down = down

    assert status == world.post(key=key).status_code
    assert [] == world.runs


def test_a_view_without_a_key_may_be_called_again_and_nobody_warns(caplog: pytest.LogCaptureFixture) -> None:
    """There is no key to protect it, and none that was claimed too early."""
    world = new_world(form_field="key")

    @world.view()
    def outer() -> Any:
        return inner()

    @claim_here
    def inner() -> str:
        world.runs.append(1)
        return "paid"

    with caplog.at_level(logging.WARNING):
        response = world.post(key=None, data={"amount": "1"})

    assert "paid" == response.text
    assert [1] == world.runs
    assert not [message for message in caplog.messages if "@claim_here" in message]
