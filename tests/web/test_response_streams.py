"""The stream that copies a response body while it leaves, and how its end is reported."""

from __future__ import annotations

import gc
import io
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from flask import Flask, send_file, stream_with_context
from werkzeug.wrappers import Response

from flask_idempotency.engine.policy import Policy
from flask_idempotency.web.responses import CapturedResponse, StreamEnd, Tee, capture


class Listener:
    """Collects how streams end."""

    def __init__(self) -> None:
        self.ends: list[StreamEnd] = []
        self.orphans: deque[Callable[[], None]] = deque()

    def tee(self, source: Iterable[str] | Iterable[bytes], *, limit: int = 100, announced: int | None = None) -> Tee:
        return Tee(source, limit=limit, announced=announced, on_end=self.ends.append, abandoned=self.orphans)


class Source:
    """An iterator that records its calls."""

    def __init__(self, *chunks: bytes, fails: BaseException | None = None) -> None:
        self.chunks = iter(chunks)
        self.fails = fails
        self.closed = 0
        self.heard_before_close: list[StreamEnd] = []
        self.listener: Listener | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self.chunks)
        except StopIteration:
            if self.fails is not None:
                raise self.fails from None
            raise

    def close(self) -> None:
        self.closed += 1
        if self.listener is not None:
            self.heard_before_close = list(self.listener.ends)


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_a_chunk_leaves_before_the_next_is_made(listener: Listener) -> None:
    made: list[int] = []

    def view() -> Iterator[bytes]:
        for number in range(3):
            made.append(number)
            yield b"%d" % number

    tee = listener.tee(view())

    assert (b"0", [0], []) == (next(tee), made, listener.ends)


def test_the_end_is_reported_before_the_end_marker(listener: Listener) -> None:
    """So the response is stored before the client can send its next request."""
    tee = listener.tee([b"a"])
    next(tee)
    assert [] == listener.ends

    with pytest.raises(StopIteration):
        next(tee)

    assert [StreamEnd.EXHAUSTED] == listener.ends


def test_a_body_of_announced_length_is_reported_before_its_last_byte(listener: Listener) -> None:
    """No end marker follows: the client knows the end by the last byte."""
    tee = listener.tee(iter([b"ab", b"c"]), announced=3)
    next(tee)
    assert [] == listener.ends

    assert (b"c", [StreamEnd.EXHAUSTED], b"abc") == (next(tee), listener.ends, tee.copied())
    assert [] == list(tee)


def test_chunks_beyond_the_announced_length_are_still_sent(listener: Listener) -> None:
    assert [b"abc", b"d", b"e"] == list(listener.tee(iter([b"abc", b"d", b"e"]), announced=3))
    assert [StreamEnd.EXHAUSTED] == listener.ends


def test_an_error_behind_the_announced_length_is_an_error(listener: Listener) -> None:
    tee = listener.tee(Source(b"abc", fails=ValueError()), announced=3)

    with pytest.raises(ValueError):  # noqa: PT011 - it carries no text
        next(tee)

    assert [StreamEnd.ERROR] == listener.ends


def test_text_is_encoded_and_bytes_are_not_touched(listener: Listener) -> None:
    text, data = listener.tee(["ä", "b"]), listener.tee([b"\xff", b"\x00"])

    assert ([b"\xc3\xa4", b"b"], [b"\xff", b"\x00"]) == (list(text), list(data))
    assert (b"\xc3\xa4b", b"\xff\x00") == (text.copied(), data.copied())


@pytest.mark.parametrize("error", (ValueError(), KeyboardInterrupt(), GeneratorExit(), SystemExit()))
def test_a_failing_source_ends_in_error_and_the_error_goes_on(listener: Listener, error: BaseException) -> None:
    tee = listener.tee(Source(b"a", fails=error))
    next(tee)

    with pytest.raises(type(error)):
        next(tee)
    tee.close()

    assert [StreamEnd.ERROR] == listener.ends


@pytest.mark.parametrize("taken", (0, 1, 2))
def test_closed_before_the_end_is_closed(listener: Listener, taken: int) -> None:
    tee = listener.tee([b"a", b"b"])
    for _ in range(taken):
        next(tee)

    tee.close()

    assert [StreamEnd.CLOSED] == listener.ends


def test_the_source_is_closed_before_the_end_is_reported(listener: Listener) -> None:
    source = Source(b"a")
    source.listener = listener
    listener.tee(source).close()

    assert (1, []) == (source.closed, source.heard_before_close)


def test_a_source_that_fails_to_close_still_ends(listener: Listener) -> None:
    def view() -> Iterator[bytes]:
        try:
            yield b"a"
        finally:
            raise ValueError("while closing")

    tee = listener.tee(view())
    next(tee)

    with pytest.raises(ValueError, match="while closing"):
        tee.close()

    assert [StreamEnd.CLOSED] == listener.ends


def test_closing_reaches_the_views_generator(listener: Listener) -> None:
    seen: list[type[BaseException]] = []

    def view() -> Iterator[bytes]:
        try:
            yield b"a"
            yield b"b"
        except GeneratorExit:
            seen.append(GeneratorExit)
            raise

    tee = listener.tee(view())
    next(tee)
    tee.close()

    assert [GeneratorExit] == seen


def test_an_end_is_reported_once(listener: Listener) -> None:
    tee = listener.tee([b"a"])
    list(tee)
    list(tee)
    tee.close()
    tee.close()
    del tee

    assert ([StreamEnd.EXHAUSTED], 0) == (listener.ends, len(listener.orphans))


@pytest.mark.parametrize(("limit", "over", "copy"), ((2, True, b""), (3, False, b"abc"), (4, False, b"abc")))
def test_over_the_limit_every_chunk_is_sent_and_none_is_kept(
    listener: Listener, limit: int, over: bool, copy: bytes
) -> None:
    tee = listener.tee([b"a", b"b", b"c"], limit=limit)

    assert ([b"a", b"b", b"c"], over, copy) == (list(tee), tee.over_limit, tee.copied())


def test_a_muted_stream_reports_no_end(listener: Listener) -> None:
    closed, exhausted, dropped = listener.tee([b"a"]), listener.tee([b"a"]), listener.tee([b"a"])
    for tee in (closed, exhausted, dropped):
        tee.mute()

    closed.close()
    list(exhausted)
    del dropped, tee

    assert ([], 0) == (listener.ends, len(listener.orphans))


def test_a_dropped_stream_only_leaves_a_note(listener: Listener) -> None:
    """The garbage collector may run in a thread that holds the store's lock: a call into the store would deadlock."""
    lock = threading.Lock()

    def store(end: StreamEnd) -> None:
        assert lock.acquire(blocking=False), "the store was called while its lock was held"
        lock.release()
        listener.ends.append(end)

    tee = Tee(iter([b"a"]), limit=9, on_end=store, abandoned=listener.orphans)
    cycle: list[Any] = [tee]
    cycle.append(cycle)
    del tee, cycle

    with lock:
        gc.collect()
    assert [] == listener.ends

    listener.orphans.popleft()()
    assert [StreamEnd.CLOSED] == listener.ends


def test_a_body_that_is_not_iterable_is_refused_without_a_note(listener: Listener) -> None:
    with pytest.raises(TypeError):
        listener.tee(3)  # type: ignore[arg-type]

    assert 0 == len(listener.orphans)


class Streaming:
    """An application with one view, `body`. It captures each response as the innermost after_request hook does."""

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
        """Return the body that can be stored now."""
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


def test_a_closed_stream_is_not_stored() -> None:
    service = Streaming(chunks)
    body = service.post()
    next(body)
    body.close()  # type: ignore[attr-defined]

    assert (None, [StreamEnd.CLOSED]) == (service.captures[0].result, service.ends)


def test_a_failed_stream_is_not_stored() -> None:
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


def test_a_stream_shorter_than_announced_leaves_a_tombstone() -> None:
    """The first client saw a broken connection; a replay would look complete."""
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
