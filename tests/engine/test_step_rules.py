"""What a step may declare."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
import xmlrpc.client
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import botocore.exceptions  # type: ignore[import-untyped]
import celery.exceptions
import httpcore
import httpx
import kombu.exceptions
import pika.exceptions  # type: ignore[import-untyped]
import psycopg
import pytest
import redis
import requests
import sqlalchemy.exc
import stripe
import urllib3.exceptions

from flask_idempotency import Step, client
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable


class Declined(Exception):
    """A card that the bank refuses."""


class Mine(requests.HTTPError):
    """What a library raised, under another name."""


def of_library(module: str, name: str, *bases: type[Exception]) -> type[Exception]:
    """Return an exception of a library that is not installed here."""
    return type(name, bases or (Exception,), {"__module__": module})


CAN_FOLLOW_AN_EFFECT = (
    Exception,
    ExceptionGroup,
    OSError,
    ConnectionError,
    TimeoutError,
    ConnectionRefusedError,
    ConnectionResetError,
    EOFError,
    asyncio.IncompleteReadError,
    socket.gaierror,
    ssl.SSLError,
    http.client.HTTPException,
    http.client.IncompleteRead,
    http.client.RemoteDisconnected,
    urllib.error.URLError,
    urllib.error.HTTPError,
    json.JSONDecodeError,
    subprocess.TimeoutExpired,
    xmlrpc.client.ProtocolError,
    requests.RequestException,
    requests.ConnectTimeout,
    requests.HTTPError,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.JSONDecodeError,
    Mine,
    httpx.ConnectError,
    httpx.HTTPStatusError,
    httpx.RemoteProtocolError,
    httpx.ResponseNotRead,
    httpcore.ReadTimeout,
    urllib3.exceptions.ReadTimeoutError,
    urllib3.exceptions.MaxRetryError,
    urllib3.exceptions.IncompleteRead,
    botocore.exceptions.ReadTimeoutError,
    botocore.exceptions.EndpointConnectionError,
    botocore.exceptions.ConnectionClosedError,
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ResponseError,
    stripe.APIConnectionError,
    stripe.APIError,
    stripe.IdempotencyError,
    stripe.StripeError,
    psycopg.OperationalError,
    sqlite3.OperationalError,
    sqlite3.DatabaseError,
    sqlalchemy.exc.DBAPIError,
    sqlalchemy.exc.OperationalError,
    celery.exceptions.SoftTimeLimitExceeded,
    celery.exceptions.TimeoutError,
    celery.exceptions.WorkerLostError,
    client.ClientError,
    client.OutcomeUnknown,
    client.AnswerNotKept,
    StoreUnavailable,
    kombu.exceptions.OperationalError,
    pika.exceptions.StreamLostError,
    of_library("aiohttp.client_exceptions", "ClientError"),
    of_library("aiohttp.x", "ServerDisconnectedError", of_library("aiohttp.client_exceptions", "ClientError")),
    of_library("grpc", "RpcError"),
    of_library("google.api_core.exceptions", "RetryError"),
    of_library("shop._vendor.urllib3.exceptions", "HTTPError"),
    of_library("valkey.exceptions", "ValkeyError"),
)


@pytest.mark.parametrize("error", CAN_FOLLOW_AN_EFFECT, ids=lambda error: f"{error.__module__}.{error.__name__}")
def test_an_error_that_may_follow_an_effect_is_not_harmless(error: type[Exception]) -> None:
    with pytest.raises(ConfigurationError, match="can follow an effect"):
        Step("charge", harmless=(Declined, error))


def test_the_libraries_of_these_errors_are_not_imported() -> None:
    code = (
        "import sys; from flask_idempotency import Step; Step('charge', harmless=(LookupError,));"
        "print([name for name in ('requests', 'httpx', 'urllib3', 'botocore', 'redis', 'stripe') if name in sys.modules])"
    )
    assert "[]" == subprocess.check_output([sys.executable, "-c", code], text=True).strip()


@pytest.mark.parametrize("error", (BaseException, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError))
def test_an_interrupt_is_not_harmless(error: Any) -> None:
    with pytest.raises(TypeError, match="An interrupt proves nothing"):
        Step("charge", harmless=(error,))


ANSWERS = (
    Declined,
    LookupError,
    ValueError,
    client.Refused,
    stripe.CardError,
    stripe.InvalidRequestError,
    sqlalchemy.exc.IntegrityError,
    sqlite3.IntegrityError,
    of_library("botocore.errorfactory", "ConditionalCheckFailedException", botocore.exceptions.ClientError),
    of_library("shop.errors", "RequestException"),
)


@pytest.mark.parametrize("error", ANSWERS, ids=lambda error: error.__name__)
def test_an_answer_of_the_other_side_may_be_harmless(error: type[Exception]) -> None:
    assert (error,) == Step("charge", harmless=(error,)).harmless


class LostReply(Declined, requests.ReadTimeout):
    """A provider's library often has one base for what it refuses and for what it lost."""


@pytest.mark.parametrize(
    ("harmless", "raised"), ((Declined, LostReply()), (ValueError, json.JSONDecodeError("no JSON", "<html>", 0)))
)
def test_a_lost_reply_that_inherits_from_a_harmless_error_is_not(harmless: type[Exception], raised: Exception) -> None:
    step = Step("charge", harmless=(harmless,))

    assert (True, False) == (step.is_harmless(harmless()), step.is_harmless(raised))


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
