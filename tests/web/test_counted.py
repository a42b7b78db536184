"""A server's stream that is counted must otherwise be what it was."""

from __future__ import annotations

from io import BytesIO

from flask_idempotency.web.request_body import CountingStream


class Plain:
    """A server's stream as gunicorn has it: it cannot tell where it stands."""

    read_timeout = 30

    def __init__(self) -> None:
        self._source = BytesIO(b"one\ntwo\nthree")

    def read(self, size: int = -1) -> bytes:
        return self._source.read(size)

    def __iter__(self) -> Plain:
        return self

    def __next__(self) -> bytes:
        return next(self._source)


def test_however_it_is_read_it_is_counted() -> None:
    """By position, by keyword, line by line."""
    stream = CountingStream(Plain())

    assert (b"on", b"e\n") == (stream.read(2), stream.read(size=2))
    assert b"two\n" == next(stream)
    assert [b"three"] == list(stream)
    assert 13 == stream.bytes_read


def test_what_is_no_method_stays_what_it_is() -> None:
    """Whatever it is called."""
    assert 30 == CountingStream(Plain()).read_timeout
