from __future__ import annotations

import gc
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from flask import Flask, send_file, stream_with_context
from werkzeug.wrappers import Response

from flask_idempotency.engine.policy import Policy
from flask_idempotency.web.responses import CapturedResponse, StreamEnd, capture


class Streaming:
    """An application whose one view answers with `body`, captured as the innermost after_request hook would."""

    def __init__(self, body: Callable[[], Any], *, limit: int = 100) -> None:
        self.ends: list[StreamEnd] = []
        self.orphans: deque[Callable[[], None]] = deque()
        self.captures: list[CapturedResponse] = []
        self.app = app = Flask(__name__)
        app.post("/")(body)

        @app.after_request
        def snap(response: Response) -> Response:
            self.captures.append(
                capture(
                    response,
                    Policy(max_body=limit),
                    on_end=self.ends.append,
                    abandoned=self.orphans,
                )
            )
            return response

    def post(self, *, outer: Callable[[Response], Response] | None = None) -> Iterator[bytes]:
        """Send a request; the body comes as the server's iterator. `outer` is a hook that runs after the capture."""
        if outer is not None:
            self.app.after_request_funcs[None].insert(0, outer)
        return iter(cast("Iterable[bytes]", self.app.test_client().post("/", buffered=False).response))

    @property
    def stored(self) -> bytes | None:
        """What there is to store, now."""
        result = self.captures[-1].result
        return result.body if result is not None and result.kept else None


def chunks() -> Iterator[bytes]:
    yield b"one"
    yield b"two"


def test_a_stream_can_be_stored_once_it_is_exhausted_and_not_before() -> None:
    service = Streaming(chunks)
    body = service.post()

    assert (b"one", None) == (next(body), service.stored)
    assert ([b"two"], b"onetwo", [StreamEnd.EXHAUSTED]) == (list(body), service.stored, service.ends)


def test_nothing_is_stored_of_a_stream_that_was_closed() -> None:
    service = Streaming(chunks)
    body = service.post()
    next(body)
    body.close()  # type: ignore[attr-defined]

    assert (None, [StreamEnd.CLOSED]) == (service.captures[0].result, service.ends)


def test_nothing_is_stored_of_a_stream_that_failed() -> None:
    def failing() -> Iterator[bytes]:
        yield b"one"
        raise ValueError("midway")

    service = Streaming(failing)
    with pytest.raises(ValueError, match="midway"):
        list(service.post())

    assert (None, [StreamEnd.ERROR]) == (service.captures[0].result, service.ends)


def test_a_stream_over_the_limit_is_whole_for_its_caller_and_a_tombstone_for_others() -> None:
    service = Streaming(chunks, limit=5)

    assert [b"one", b"two"] == list(service.post())
    assert service.captures[0].tombstone == service.captures[0].result


def test_a_stream_shorter_than_it_announced_is_no_answer() -> None:
    """Its first caller saw a broken connection; a replay would look whole."""
    service = Streaming(lambda: Response(chunks(), headers={"Content-Length": "9"}))
    list(service.post())

    assert service.captures[0].tombstone == service.captures[0].result


def test_a_file_is_stored_before_its_last_byte_leaves() -> None:
    service = Streaming(lambda: send_file(io.BytesIO(b"a file"), "text/plain"))

    assert (b"a file", b"a file") == (next(service.post()), service.stored)


def test_a_hook_that_drains_the_stream_completes_it() -> None:
    def drain(response: Response) -> Response:
        response.get_data()
        return response

    service = Streaming(chunks)
    body = service.post(outer=drain)

    assert (b"onetwo", [StreamEnd.EXHAUSTED]) == (service.stored, service.ends)
    assert b"onetwo" == b"".join(body)


@pytest.mark.parametrize("taken", (0, 1))
def test_a_hook_that_wraps_the_stream_and_does_not_close_it_leaves_a_note(taken: int) -> None:
    def wrap(response: Response) -> Response:
        source = response.response
        response.response = (bytes(chunk).upper() for chunk in source)  # type: ignore[arg-type]
        return response

    service = Streaming(chunks)
    body = service.post(outer=wrap)
    for _ in range(taken):
        next(body)
    body.close()  # type: ignore[attr-defined]
    del body
    service.captures.clear()
    gc.collect()

    assert ([], 1) == (service.ends, len(service.orphans))


def test_a_hook_that_replaces_the_stream_leaves_a_note() -> None:
    def replace(response: Response) -> Response:
        response.set_data(b"other")
        return response

    service = Streaming(chunks)
    assert [b"other"] == list(service.post(outer=replace))
    service.captures.clear()
    gc.collect()

    assert ([], 1) == (service.ends, len(service.orphans))


def test_a_stream_with_context_ends_once() -> None:
    service = Streaming(lambda: stream_with_context(chunks()))

    assert [b"one", b"two"] == list(service.post())
    assert ([StreamEnd.EXHAUSTED], b"onetwo") == (service.ends, service.stored)
