"""What operators read when the store does not answer."""

from __future__ import annotations

import logging

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.web.problems import OutageLog
from tests.web.apps import new_world


class Ticks:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def unavailable(cause: Exception | None = None) -> StoreUnavailable:
    error = StoreUnavailable("Redis cannot decide")
    error.__cause__ = cause
    return error


def test_a_refusal_for_want_of_the_store_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """By default a silent store means 503 for every keyed request: a line says which and why, and names no key."""
    world = new_world()
    world.view()(lambda: "paid")
    world.store.down = True
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            world.post(key=f"canary-{number}")

    (message,) = [message for message in caplog.messages if "503" in message]
    assert "pay" in message or "lambda" in message
    assert "StoreUnavailable" in message
    assert "canary" not in caplog.text


def test_an_outage_is_one_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """With the number of those that were left out."""
    ticks = Ticks()
    log = OutageLog(ticks)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            log.refused("pay", unavailable())
        ticks.now += 9.9
        log.refused("pay", unavailable())
        ticks.now += 0.2
        log.refused("refund", unavailable())
        ticks.now += 10
        log.refused("refund", unavailable())

    assert ["pay", "refund", "refund"] == [message.split()[0] for message in caplog.messages]
    assert [False, True, False] == ["4 more" in message for message in caplog.messages]


@pytest.mark.parametrize(
    ("cause", "named"),
    (
        (ResponseError("OOM command not allowed when used memory > 'maxmemory' canary"), "ResponseError: OOM"),
        (ResponseError("READONLY You can't write against a read only replica canary"), "ResponseError: READONLY"),
        (NoPermissionError("this user canary has no permissions"), "NoPermissionError"),
        (ResponseError("Error running script canary"), "ResponseError"),
        (ResponseError("MISCONF"), "ResponseError: MISCONF"),
        (ResponseError(""), "ResponseError"),
        (TimeoutError("TIMEOUT canary"), "TimeoutError"),
        (None, "StoreUnavailable"),
    ),
)
def test_of_an_error_its_class_is_named_and_of_a_servers_its_code(
    cause: Exception | None, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Never what follows: it may quote arguments."""
    with caplog.at_level(logging.WARNING):
        OutageLog(Ticks()).refused("pay", unavailable(cause))

    assert f"({named})" in caplog.text
    assert "canary" not in caplog.text
