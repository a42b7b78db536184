"""How a body is read: the view sees the body that it would see without the extension."""

from __future__ import annotations

import copy
import gc
import gzip
import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import IO, Any, cast

import pytest
from flask import Flask, Request, request
from hypothesis import example, given
from hypothesis import strategies as st
from werkzeug.exceptions import RequestEntityTooLarge

from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.policy import Policy
from flask_idempotency.web import requests
from flask_idempotency.web.request_body import (
    MEMORY_BYTES,
    BodyConsumed,
    CountingStream,
    TruncatedBody,
    chunks,
    watch_body,
)
from flask_idempotency.web.requests import fingerprints, read_body
from tests.web.sending import (
    DELIVERIES,
    Delivery,
    Pipe,
    by_length,
    chunked,
    endless,
    environ_of,
    multipart,
    request_of,
    seekable,
    send,
    terminated,
)

FORM = "application/x-www-form-urlencoded"
NEEDS_LIMIT_PER_REQUEST = pytest.mark.skipif(
    cast(Any, Request).max_content_length.fset is None, reason="new in Flask 3.1: limits set on the request"
)
PHOTO = multipart(
    ("a", None, None, b"1"), ("photo", "a.png", "image/png", b"\x89PNG\n\xff" * 9), ("a", None, None, b"2")
)
FIELDS = multipart(("a", None, None, b"1"), ("b", None, None, b"2"))
LARGE = multipart(("photo", "a.png", "image/png", (b"0123456789" * 99 + b"\n") * 100))

BODIES: dict[str, tuple[bytes, str]] = {
    "json": (b'{"a": 1,\n "b": [2]}', "application/json"),
    "broken json": (b'{"a": ', "application/json"),
    "urlencoded": (b"a=1&b=2&a=3&c=%ff&d", FORM),
    "broken urlencoded": (b"a=\xff", FORM),
    "multipart": PHOTO,
    "large multipart": LARGE,
    "broken multipart": (FIELDS[0][:-10], FIELDS[1]),
    "multipart without boundary": (PHOTO[0], "multipart/form-data"),
    "octets": (b"\0\n\xff" * 20, "application/octet-stream"),
    "large octets": ((b"line " * 199 + b"\n") * 100, "application/octet-stream"),
    "untyped": (b"a=1", ""),
    "empty": (b"", "application/json"),
    "empty form": (b"", FORM),
}


def files() -> Any:
    return [(name, file.filename, file.content_type, file.read()) for name, file in request.files.items(multi=True)]


def length() -> int:
    """The size that a careful reader passes to the server's own stream."""
    return 10_000_000 if request.content_length is None else request.content_length


READERS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "get_data": lambda: (request.get_data(), request.get_data()),
    "get_data uncached": lambda: (request.get_data(cache=False), request.get_data(cache=False)),
    "get_data parsed": lambda: request.get_data(parse_form_data=True),
    "get_data as text": lambda: request.get_data(as_text=True),
    "data": lambda: request.data,
    "json": lambda: (request.get_json(silent=True), request.get_json(force=True, silent=True)),
    "form": lambda: list(request.form.items(multi=True)),
    "files": files,
    "values": lambda: list(request.values.items(multi=True)),
    "stream": lambda: request.stream.read(),
    "stream in pieces": lambda: list(iter(lambda: request.stream.read(7 if length() < 1000 else 7000), b"")),
    "readline": lambda: [request.stream.readline(), request.stream.readline()],
    "iteration": lambda: list(request.stream),
    "wsgi.input": lambda: request.environ["wsgi.input"].read(length()),
    "input_stream": lambda: request.input_stream.readline(length()),
    "form, then data": lambda: (list(request.form.items(multi=True)), files(), request.get_data()),
    "data, then form": lambda: (request.get_data(), list(request.form.items(multi=True)), files()),
    "stream, then data": lambda: (request.stream.read(3), request.get_data()),
    "another request": lambda: Request(request.environ).get_data(),
}


def reading(reader: Callable[[], Any], *hooks: Callable[[], Any], **config: Any) -> Flask:
    """An application whose view returns what it reads, after these hooks."""
    app = Flask(__name__)
    app.config |= config
    for hook in hooks:
        app.before_request(lambda hook=hook: hook() and None)
    app.add_url_rule("/", "read", lambda: repr(reader()), methods=["POST"])
    return app


def as_the_header_asks() -> Any:
    return READERS[request.headers["X-Reader"]]()


def ours() -> None:
    fingerprints(request, Policy(), [Identity(b"s")], body=read_body(request), app=Flask(__name__))


def taken(
    data: bytes = b"", *, media_type: str = "application/json", before: Callable[[Request], Any], **more: Any
) -> bytes:
    """Return what read_body() reads after an earlier hook."""
    asked = request_of(data, media_type, **more)
    before(asked)
    body = read_body(asked)
    assert body.stream is not None
    return b"".join(chunks(body.stream))


@pytest.mark.parametrize("kind", BODIES)
def test_view_sees_what_it_sees_without_the_extension(kind: str) -> None:
    """Property 56: every kind of body, however it is read and however it arrives, with a limit and without.

    At the limit, Werkzeug's own stream behaves differently for each way of reading, and so does this one.
    """
    data, media_type = BODIES[kind]
    plain, guarded = reading(as_the_header_asks), reading(as_the_header_asks, ours)
    wrong = []
    limits = (None, len(data), len(data) + 1) if kind in LIMITED else (None,)
    for reader, delivery, limit in product(READERS, DELIVERIES, limits):
        plain.config["MAX_CONTENT_LENGTH"] = guarded.config["MAX_CONTENT_LENGTH"] = limit
        if limit is None or reader in AT_THE_LIMIT:
            about = {"delivery": delivery, "headers": {"X-Reader": reader}}
            expected, got = (send(app, environ_of(data, media_type, **about)) for app in (plain, guarded))
            wrong += [(reader, delivery, limit, expected, got)] if expected != got else []

    assert [] == wrong


LIMITED = ("json", "multipart", "large octets", "empty")
AT_THE_LIMIT = ("get_data", "stream", "stream in pieces", "iteration", "json")


@pytest.mark.parametrize("hook", ("get_data", "form"))
@pytest.mark.parametrize("kind", ("json", "urlencoded", "multipart"))
def test_view_sees_the_same_after_another_hook(kind: str, hook: str) -> None:
    """CSRF protection and request logging read bodies too; the view gets what they leave."""
    data, media_type = BODIES[kind]
    plain, guarded = reading(as_the_header_asks, READERS[hook]), reading(as_the_header_asks, READERS[hook], ours)
    wrong = []
    for reader, delivery in product(READERS, DELIVERIES):
        about = {"delivery": delivery, "headers": {"X-Reader": reader}}
        expected, got = (send(app, environ_of(data, media_type, **about)) for app in (plain, guarded))
        wrong += [(reader, delivery, expected, got)] if expected != got else []

    assert [] == wrong


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_whole_body_is_read(delivery: Delivery) -> None:
    """To the last byte, on both sides of every buffer."""
    for size in (0, 1, MEMORY_BYTES - 1, MEMORY_BYTES, MEMORY_BYTES + 1, 5 * MEMORY_BYTES):
        data = bytes(index % 251 for index in range(size))

        assert data == taken(data, delivery=delivery, before=lambda asked: None), size


def test_bytes_beyond_the_announced_length_are_not_cut_off() -> None:
    """If the server ends the stream itself, Werkzeug shows the view all of it."""
    environ = environ_of(b"abcdef", delivery=terminated) | {"CONTENT_LENGTH": "3"}

    assert (200, repr((b"abcdef",) * 2).encode()) == send(reading(READERS["get_data"], ours), environ)


def test_body_is_read_once() -> None:
    """A second call returns the same body, even after the view has begun to read."""
    asked = request_of(b"abc")
    body = read_body(asked)
    asked.stream.read(1)

    assert body is read_body(asked)
    assert b"abc" == b"".join(chunks(cast(IO[bytes], body.stream)))
    assert b"bc" == asked.stream.read()


def test_stream_that_never_ends_is_left_alone() -> None:
    """Without a length or an end, Werkzeug shows the view an empty body, and a read would hang."""
    environ = environ_of(b"abc")
    del environ["CONTENT_LENGTH"]
    asked = Request(environ)

    assert 0 == read_body(asked).length
    assert b"abc" == environ["wsgi.input"].read()


@pytest.mark.parametrize("limit", (None, 5000))
@pytest.mark.parametrize("delivery", (terminated, seekable))
def test_truncated_body_is_refused_if_the_server_does_not_report_it(delivery: Delivery, limit: int | None) -> None:
    """Property 59: gunicorn ends a body of 3 bytes out of 1000 as if it were whole. A copy that a hook cached is cut too."""
    app = Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = limit
    with app.app_context():
        for sent, cached in product((0, 3, 999), (False, True)):
            asked = Request(environ_of(b"x" * sent, delivery=delivery) | {"CONTENT_LENGTH": "1000"})
            asked.get_data() if cached else None
            with pytest.raises(TruncatedBody):
                read_body(asked)


def test_truncated_body_is_refused_if_werkzeug_reports_it() -> None:
    """Its ClientDisconnected becomes the same refusal."""
    with pytest.raises(TruncatedBody):
        read_body(Request(environ_of(b"abc") | {"CONTENT_LENGTH": "1000"}))


def test_connection_lost_in_a_chunked_body_is_a_truncated_body() -> None:
    """Each server raises its own kind of OSError."""

    class Broken(Pipe):
        def read(self, size: int = -1) -> bytes:
            raise ConnectionResetError

    environ = environ_of(delivery=chunked) | {"wsgi.input": Broken(b"")}

    with pytest.raises(TruncatedBody):
        read_body(Request(environ))


@pytest.mark.parametrize("delivery", (seekable, chunked))
def test_another_error_of_a_stream_is_not_its_own_cause(delivery: Delivery) -> None:
    """Code that follows the causes of an error, such as an error tracker's, would never end."""

    class Broken(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise RuntimeError

    environ = environ_of(b"abc", delivery=delivery) | {"wsgi.input": Broken(b"abc")}

    with pytest.raises(RuntimeError) as raised:
        read_body(Request(environ))
    assert raised.value.__cause__ is None


def test_view_responds_to_a_length_over_the_limit() -> None:
    """The body is not read, and Werkzeug's own error stands."""
    assert 413 == send(reading(READERS["get_data"], ours, MAX_CONTENT_LENGTH=5), environ_of(b"0123456789"))[0]


@NEEDS_LIMIT_PER_REQUEST
def test_view_decides_about_a_length_over_the_limit() -> None:
    """Property 60: the body is not read, so a view that raises its own limit still has it."""

    def reads_more() -> bytes:
        cast(Any, request).max_content_length = 100
        return request.get_data()

    data = b"0123456789"

    assert (200, b"b'0123456789'") == send(reading(reads_more, ours, MAX_CONTENT_LENGTH=5), environ_of(data))


@NEEDS_LIMIT_PER_REQUEST
def test_limit_that_the_view_lowers_still_holds() -> None:
    """The view gets a new stream, with the view's limit."""

    def reads_less() -> bytes:
        cast(Any, request).max_content_length = 5
        return request.get_data()

    for delivery in (by_length, terminated):
        assert 413 == send(reading(reads_less, ours), environ_of(b"0123456789", delivery=delivery))[0]


@pytest.mark.parametrize("size", (10, 100_000))
def test_chunked_body_over_the_limit_is_refused(size: int) -> None:
    """Property 61: 413, although Werkzeug would give the view the first part without an error."""
    app = Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = size

    with app.app_context():
        assert size == read_body(request_of(b"x" * size, delivery=chunked)).length
        with pytest.raises(RequestEntityTooLarge):
            read_body(request_of(b"x" * (size + 1), delivery=chunked))


CONSUMERS: dict[str, Callable[[Request], Any]] = {
    "stream": lambda asked: asked.stream.read(),
    "part of the stream": lambda asked: asked.stream.read(3),
    "get_data uncached": lambda asked: asked.get_data(cache=False),
}


def refusal(data: bytes, **about: Any) -> type[Exception] | None:
    """Return the class of the error that `taken` raises."""
    try:
        taken(data, **about)
    except (BodyConsumed, TruncatedBody) as error:
        return type(error)
    return None


def test_an_empty_body_is_never_consumed() -> None:
    """A DELETE without a body passes a hook that reads every body."""
    for delivery, consumer in product((by_length, endless, terminated, seekable), CONSUMERS):
        assert b"" == taken(delivery=delivery, before=CONSUMERS[consumer]), (delivery, consumer)


def cache_the_rest(asked: Request) -> None:
    """Read the first bytes, then cache the rest, as a hook that logs bodies may do."""
    asked.stream.read(3)
    asked.get_data()


def test_consumed_body_raises() -> None:
    """Property 62: never a fingerprint of the rest, on any server."""
    kept = [
        (delivery, consumer)
        for delivery, consumer in product(DELIVERIES, CONSUMERS)
        if refusal(b"{}{}", delivery=delivery, before=CONSUMERS[consumer]) is not BodyConsumed
    ]

    assert [] == kept
    with pytest.raises(BodyConsumed, match="get_data"):
        taken(b"{}", before=CONSUMERS["stream"])


def test_body_cached_in_part_is_refused() -> None:
    """If the server's stream has no position, the missing bytes show the earlier read."""
    got = {
        delivery: refusal(b'{"amount": 1}', delivery=delivery, before=cache_the_rest)
        for delivery in (by_length, endless, seekable, terminated)
    }

    assert got == {by_length: BodyConsumed, endless: BodyConsumed, seekable: BodyConsumed, terminated: TruncatedBody}


@pytest.mark.parametrize("delivery", (by_length, seekable))
def test_input_read_behind_werkzeugs_back_raises(delivery: Delivery) -> None:
    """As long as the server's stream has a position."""
    with pytest.raises(BodyConsumed):
        taken(b"abcdef", delivery=delivery, before=lambda asked: asked.environ["wsgi.input"].read(3))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_body_that_a_hook_kept_is_read_from_there(delivery: Delivery) -> None:
    """CSRF protection looks for a token in `request.form` of a JSON request too, which consumes nothing."""

    def cached(asked: Request) -> None:
        asked.get_data()
        assert asked.form is not None

    assert b"{}" == taken(b"{}", delivery=delivery, before=lambda asked: asked.form)
    assert b"{}" == taken(b"{}", delivery=delivery, before=cached)
    assert b"a=1" == taken(b"a=1", media_type=FORM, delivery=delivery, before=cached)
    assert b"{}" == taken(b"{}", delivery=delivery, before=lambda asked: asked.get_json())

    asked = request_of(b"a=1", FORM, delivery=delivery)
    assert ("1", b"") == (asked.form["a"], asked.get_data())
    assert read_body(asked).parsed


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_stream_that_a_hook_replaced_is_the_body(delivery: Delivery) -> None:
    """A hook that unzips decides what the view sees, and two gzips of one text differ."""
    data = gzip.compress(b'{"amount": 1}' * 99)

    def unzip() -> None:
        request.stream = cast(IO[bytes], gzip.GzipFile(fileobj=request.stream))

    app = reading(lambda: (request.stream.read(), request.get_data()), unzip, ours)

    expected = repr((b'{"amount": 1}' * 99, b"")).encode()
    assert (200, expected) == send(app, environ_of(data, delivery=delivery))


def test_large_body_leaves_no_file_and_no_warning() -> None:
    """Property 63: the temporary file lives as long as a streaming view holds it."""
    app = Flask(__name__)
    seen: list[IO[bytes]] = []

    @app.post("/")
    def view() -> Any:
        body = read_body(cast(Request, request._get_current_object()))  # type: ignore[attr-defined]
        seen.append(cast(IO[bytes], body.stream))
        stream = request.stream
        return (piece for piece in iter(lambda: stream.read(100_000), b""))

    assert b"x" * 300_000 == send(app, environ_of(b"x" * 300_000))[1]
    descriptor = seen[0].fileno()
    assert Path(f"/proc/self/fd/{descriptor}").exists()

    seen.clear()
    gc.collect()
    assert not Path(f"/proc/self/fd/{descriptor}").exists()


def test_file_in_a_cycle_is_closed_without_a_warning() -> None:
    """Tracebacks make cycles, and a user's test suite may turn warnings into errors."""
    gc.collect(1)  # What other tests left open is in an older generation now.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            cycle: list[Any] = [read_body(request_of(b"x" * 300_000))]
            cycle.append(cycle)
        del cycle
        gc.collect(0)

    assert [] == caught


def test_close_gives_the_file_back() -> None:
    """A caller may close it after the last read."""
    body = read_body(request_of(b"x" * 300_000))
    assert body.stream is not None

    body.close()

    assert body.stream.closed
    read_body(request_of(b"a=1", FORM)).close()


UPLOAD = """
import resource, sys
from flask import Flask, Request
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.policy import Policy
from flask_idempotency.web.requests import read_body
from flask_idempotency.web.requests import fingerprints
from tests.web.sending import multipart

class Endless:
    def __init__(self, head, size, tail):
        self.head, self.left, self.tail = head, size, tail
    def read(self, size):
        if self.head:
            piece, self.head = self.head[:size], self.head[size:]
        elif self.left:
            piece = b"x" * min(size, self.left); self.left -= len(piece)
        else:
            piece, self.tail = self.tail[:size], self.tail[size:]
        return piece

def upload(size, media_type, head, tail):
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "SERVER_NAME": "a", "SERVER_PORT": "80",
        "wsgi.url_scheme": "http", "CONTENT_TYPE": media_type, "CONTENT_LENGTH": str(size + len(head + tail)),
        "wsgi.input": Endless(head, size, tail), "wsgi.input_terminated": True}
    asked = Request(environ)
    fingerprints(asked, Policy(), [Identity(b"s")], body=read_body(asked), app=Flask(__name__))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

form, media_type = multipart(("photo", "a.png", "image/png", b"CUT"))
head, tail = form.split(b"CUT")
kinds = {"multipart": (media_type, head, tail), "raw": ("application/octet-stream", b"", b""),
    "json": ("application/json", b'"', b'"'), "form": ("application/x-www-form-urlencoded", b"a=", b"")}
kind = kinds[sys.argv[1]]
upload(1_000_000, *kind)
before = peak()
upload(100 * 1024 * 1024, *kind)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("multipart", "raw", "json", "form"))
def test_hundred_megabytes_take_less_than_five_of_memory(kind: str) -> None:
    """Property 63, in a separate process: its peak memory is that of this upload."""
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", UPLOAD, kind], capture_output=True, text=True, cwd=root, check=False)

    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 5 * 1024


def test_chunks_come_from_the_start_and_keep_the_position() -> None:
    """The position of the stream stays the same."""
    stream = io.BytesIO(b"abcdef")
    stream.seek(2)

    assert [b"abcdef"] == list(chunks(stream))
    assert b"cdef" == stream.read()


class Plain:
    """A server's stream like gunicorn's, without a position."""

    read_timeout = 30

    def __init__(self) -> None:
        self._source = BytesIO(b"one\ntwo\nthree")

    def read(self, size: int = -1) -> bytes:
        return self._source.read(size)

    def __iter__(self) -> Plain:
        return self

    def __next__(self) -> bytes:
        return next(self._source)


def test_every_way_of_reading_is_counted() -> None:
    """By position, by keyword, line by line."""
    stream = CountingStream(Plain())

    assert (b"on", b"e\n") == (stream.read(2), stream.read(size=2))
    assert b"two\n" == next(stream)
    assert [b"three"] == list(stream)
    assert 13 == stream.bytes_read


def test_attributes_of_the_counted_stream_stay() -> None:
    """Even if the name resembles a read method."""
    assert 30 == CountingStream(Plain()).read_timeout


def test_a_counted_stream_reads_as_before() -> None:
    """The wrapper has the same methods as the server's stream."""
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


class Slow:
    """A server's stream: it knows no position, and each read gives at most some bytes."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data = BytesIO(data)
        self._most = most

    def read(self, size: int = -1) -> bytes:
        return self._data.read(self._most if size < 0 else min(size, self._most))


@given(
    data=st.binary(max_size=40),
    announced=st.sampled_from(("", "0", "1", "20", "40", "41", "-1", "+5", "x", "99999", "\u0663")),
    terminated=st.booleans(),
    limit=st.sampled_from((None, 0, 10, 40)),
    most=st.sampled_from((0, 1, 7, 100)),
)
@example(data=b"unzipped by a middleware", announced="20", terminated=True, limit=None, most=7)
@example(data=b"unzipped by a middleware", announced="20", terminated=True, limit=21, most=100)
def test_the_short_way_reads_what_the_long_way_reads(
    data: bytes, announced: str, terminated: bool, limit: int | None, most: int
) -> None:
    """`_read_announced` is a short way for the usual request: the body, the error and the view's body are the same."""

    def read() -> tuple[object, ...]:
        environ = environ_of() | {"CONTENT_TYPE": "application/json", "CONTENT_LENGTH": announced}
        environ.pop("wsgi.input_terminated", None)
        if terminated:
            environ["wsgi.input_terminated"] = True
        environ["wsgi.input"] = Slow(data, most) if most else BytesIO(data)
        app = Flask(__name__)
        app.config["MAX_CONTENT_LENGTH"] = limit
        with app.request_context(environ):
            watch_body(request)
            try:
                body = read_body(request)
                seen = None if body.unread else request.get_data()
            except (TruncatedBody, BodyConsumed, RequestEntityTooLarge) as error:
                return (type(error),)
            return body.length, body.unread, None if body.stream is None else b"".join(chunks(body.stream)), seen

    short = read()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "_read_announced", lambda request: None)
        assert short == read()
