"""What a step may declare."""

from __future__ import annotations

import asyncio
import http.client
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import httpx
import pytest
import requests

from flask_idempotency import Step
from flask_idempotency.engine.errors import ConfigurationError


class Declined(Exception):
    """A card that the bank refuses."""


CAN_FOLLOW_AN_EFFECT = (
    Exception,
    OSError,
    ConnectionError,
    TimeoutError,
    ConnectionResetError,
    ConnectionAbortedError,
    BrokenPipeError,
    http.client.RemoteDisconnected,
    requests.Timeout,
    requests.ReadTimeout,
    requests.ConnectionError,
    requests.exceptions.ChunkedEncodingError,
    httpx.TimeoutException,
    httpx.ReadError,
    httpx.RemoteProtocolError,
)


def test_an_error_that_may_follow_an_effect_is_not_harmless() -> None:
    for error in CAN_FOLLOW_AN_EFFECT:
        with pytest.raises(ConfigurationError, match="can follow an effect"):
            Step("charge", harmless=(Declined, error))


@pytest.mark.parametrize("error", (BaseException, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError))
def test_an_interrupt_is_not_harmless(error: Any) -> None:
    with pytest.raises(TypeError, match="An interrupt proves nothing"):
        Step("charge", harmless=(error,))


@pytest.mark.parametrize(
    "error", (Declined, LookupError, ConnectionRefusedError, requests.ConnectTimeout, httpx.ConnectError)
)
def test_an_error_that_precedes_an_effect_is_harmless(error: type[Exception]) -> None:
    assert (error,) == Step("charge", harmless=(error,)).harmless


@pytest.mark.parametrize("harmless", (Declined, [Declined], ("Declined",), (Declined(),)))
def test_harmless_is_a_tuple_of_classes(harmless: Any) -> None:
    with pytest.raises(TypeError, match="harmless is a tuple"):
        Step("charge", harmless=harmless)


@dataclass
class Charge:
    id: str


class Parcel(NamedTuple):
    id: str


@pytest.mark.parametrize("returns", (None, Charge, Parcel, (str, int)))
def test_returns_is_what_can_be_rebuilt(returns: Any) -> None:
    assert Step("charge", returns=returns).returns is returns


@pytest.mark.parametrize(
    "returns", (int, dict, tuple, "Charge", Charge("ch_1"), str.upper, (str,), (str, int, str), (1, 2))
)
def test_returns_that_rebuilds_nothing_is_refused_before_the_step_runs(returns: Any) -> None:
    with pytest.raises(TypeError, match="returns is a dataclass, a NamedTuple, or a pair of functions"):
        Step("charge", returns=returns)


def test_a_former_name_is_text() -> None:
    with pytest.raises(TypeError, match="name of a step is text, not int"):
        Step("charge", was=3)  # type: ignore[arg-type]


def test_a_name_is_ascii_and_short() -> None:
    for field, name in product(("name", "was"), ("", "a b", "Zahlung-ä", "x" * 65, "charge\n", "charge/1")):
        values: dict[str, Any] = {"name": "charge", field: name}
        with pytest.raises(ConfigurationError, match="1 to 64"):
            Step(**values)


def test_the_longest_name_is_taken() -> None:
    assert "x" * 64 == Step("x" * 64, was="y" * 64).name


def test_was_names_another_step() -> None:
    with pytest.raises(ConfigurationError, match="names the step itself"):
        Step("charge", was="charge")


@pytest.mark.parametrize("effects", ("plain", "pure", "transactional"))
def test_only_a_deduplicated_step_may_do_without_intent(effects: Any) -> None:
    with pytest.raises(ConfigurationError, match="intent=False needs"):
        Step("charge", effects=effects, intent=False)
