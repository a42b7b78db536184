"""The stream that copies a response body while it leaves, and how its end is reported."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from flask_idempotency.web.responses import StreamEnd, Tee


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
        gc.collect(0)
    assert [] == listener.ends

    listener.orphans.popleft()()
    assert [StreamEnd.CLOSED] == listener.ends


def test_a_body_that_is_not_iterable_is_refused_without_a_note(listener: Listener) -> None:
    with pytest.raises(TypeError):
        listener.tee(3)  # type: ignore[arg-type]

    assert 0 == len(listener.orphans)
