"""Bodies that a hook takes from the server's own stream, which cannot tell where it stands."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
from flask import request

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.web.request_body import CountingStream
from tests.web.apps import World, new_world
from tests.web.sending import Delivery, Pipe, chunked, endless, environ_of, send, terminated

TAKING: dict[str, Callable[[Any], Any]] = {
    "whole": lambda stream: stream.read(4),
    "some": lambda stream: stream.read(1),
    "a line": lambda stream: stream.readline(),
    "lines": lambda stream: list(stream),
}


def sent(world: World, data: bytes, delivery: Delivery) -> tuple[int, bytes]:
    return send(world.app, environ_of(data, "text/plain", delivery=delivery, headers={"Idempotency-Key": "k"}))


def echoing(config: dict[str, Any] | None = None) -> World:
    world = new_world(config=config)

    @world.view()
    def echo() -> bytes:
        world.runs.append(1)
        return request.get_data()

    return world


@pytest.mark.parametrize("taking", TAKING)
@pytest.mark.parametrize("delivery", (chunked, terminated, endless))
def test_a_hook_that_reads_from_the_server_is_a_loud_error(delivery: Delivery, taking: str) -> None:
    """Never the digest of what is left, nor a client that is told its connection was cut."""
    world = echoing({"PROPAGATE_EXCEPTIONS": True})

    @world.app.before_request
    def consume() -> None:
        TAKING[taking](request.environ["wsgi.input"])

    with pytest.raises(ConfigurationError, match="get_data"):
        sent(world, b"body", delivery)
    assert [] == world.store.calls


@pytest.mark.parametrize("delivery", (chunked, terminated, endless))
@pytest.mark.parametrize("data", (b"", b"body", b"x" * 100_000))
def test_a_body_that_nobody_has_read_is_the_views(delivery: Delivery, data: bytes) -> None:
    """An empty one is legal, in chunks too."""
    world = echoing()
    first, again = sent(world, data, delivery), sent(world, data, delivery)

    assert (200, data) == first == again
    assert [1] == world.runs


def test_a_body_that_was_cut_off_is_still_told_from_one_that_was_consumed() -> None:
    """The client is to send it again; the application has done nothing wrong."""
    world = echoing()

    def cut(environ: dict[str, Any], data: bytes) -> None:
        terminated(environ, data[:2])

    status, body = sent(world, b"body", cut)

    assert 400 == status
    assert b"truncated-body" in body


def test_a_hook_that_looks_at_an_empty_body_has_consumed_nothing() -> None:
    """Only what was read counts."""
    world = echoing()

    @world.app.before_request
    def look() -> None:
        request.environ["wsgi.input"].read()

    assert (200, b"") == sent(world, b"", chunked)


def test_what_is_counted_is_read_as_before() -> None:
    """Whatever the server's stream can do, it still can."""
    source = io.BufferedReader(io.BytesIO(b"one\ntwo\nthree\nfour"))
    counted, buffer = CountingStream(source), bytearray(2)

    assert b"one\n" == counted.readline()
    assert 2 == counted.readinto(buffer)
    assert [b"o\n", b"three\n"] == counted.readlines(3)
    assert b"four" == next(iter(counted))
    assert 18 == counted.bytes_read
    assert counted.readable() is True
    assert 18 == counted.bytes_read
    assert not hasattr(CountingStream(Pipe(b"")), "seek")
    assert b"" == copy.copy(counted).read()
