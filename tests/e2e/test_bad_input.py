"""Whatever a client sends: the exact refusal, nothing in the store afterwards, and a server that serves the next one."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from flask.testing import FlaskClient

from example_app.demo.servers import RedisServer
from tests.e2e.conftest import Serve, keys
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Kind, Server
from tests.e2e.service import CASE, create_app
from tests.e2e.wire import Order, Wire, ask, message

GIGABYTE = 1024**3
CASE_NAME = "bad input"

BAD_KEYS = {
    "empty": [""],
    "blank": ["   "],
    "empty string": ['""'],
    "over-long": ["k" * 256],
    "over-long string": [f'"{"k" * 256}"'],
    "string without an end": ['"abc'],
    "string without a beginning": ['abc"'],
    "quote in a bare key": ['a"bc'],
    "backslash at the end of a string": [r'"abc\"'],
    "text behind the string": ['"abc" def'],
    "unknown escape": [r'"a\bc"'],
    "text for a parameter": ['"abc";V=1'],
    "space": ["a b"],
    "space in a string": ['"a b"'],
    "tab": ["a\tb"],
    "latin-1": ["schl\xfcssel"],
    "utf-8": ["schlüssel".encode().decode("latin-1")],
    "non-ascii string": ['"schl\xfcssel"'],
    "list": ["abc, def"],
    "list of strings": ['"abc", "def"'],
    "two lines": ["abc", "def"],
    "two equal lines": ["abc", "abc"],
    "two lines, one empty": ["abc", ""],
}
"""Header lines that must never pass, and never be taken for no key at all."""

BROKEN_LINES = {
    "nul": ["a\0b"],
    "carriage return": ["a\rb"],
    "line feed": ["a\nb"],
    "escape": ["a\x1bb"],
    "delete": ["a\x7fb"],
}
"""What no HTTP header may hold. A server may refuse the request before we see it."""


@pytest.fixture(params=["gthread", "gevent", "waitress"])
def server(request: pytest.FixtureRequest, serve: Serve) -> Server:
    kind: Kind = request.param
    return serve(kind=kind)


@pytest.fixture(autouse=True)
def _nothing_happened(store: RedisServer, ledger: Ledger) -> Iterator[None]:
    """After every test in here that does not say otherwise: no view was entered and the store is empty."""
    ledger.forget(CASE_NAME)
    yield
    assert ledger.runs(CASE_NAME) == 0
    assert keys(store) == []


def keyed(lines: list[str], path: str = "/plain") -> bytes:
    headers = [("Idempotency-Key", line) for line in lines]
    return message("POST", path, [*headers, (CASE, CASE_NAME)], b"{}")


def test_f61_bad_key_is_refused(server: Server) -> None:
    """A key that names nothing is refused with 400 invalid-key, also where no key is needed."""
    passed = {}
    for shape, lines in BAD_KEYS.items():
        for path in ("/plain", "/required"):
            answer = ask(server.port, keyed(lines, path))
            told = (*answer.told, answer.header("Cache-Control"), answer.header("Link") is not None)
            if told != (400, "invalid-key", "no-store", True):
                passed[shape, path] = told

    assert passed == {}


def test_f61_broken_header_is_refused(server: Server) -> None:
    """A key with control characters is refused, by the server or by us, and the server lives."""
    told = {}
    for shape, lines in BROKEN_LINES.items():
        with Wire(server.port) as wire:
            wire.send(keyed(lines))
            told[shape] = None if wire.ended() else wire.answer().told

    assert set(told.values()) <= {None, (400, None), (400, "invalid-key")}, told
    assert ask(server.port, message("GET", "/free")).status == 200


@pytest.fixture
def client(store: RedisServer, ledger_server: RedisServer) -> Iterator[FlaskClient]:
    app = create_app(store=store.url, ledger=ledger_server.url, config={"TESTING": True})
    with app.test_client() as client:
        yield client
    app.config["LEDGER"].close()


def test_f61_bad_key_is_refused_whatever_server_lets_it_pass(client: FlaskClient) -> None:
    """A server in front may let anything through and join lines with a comma: the key is refused by itself."""
    passed = {}
    for shape, lines in {**BAD_KEYS, **BROKEN_LINES}.items():
        environ = {"HTTP_IDEMPOTENCY_KEY": ",".join(lines)}
        answer = client.post("/plain", data="{}", headers={CASE: CASE_NAME}, environ_overrides=environ)
        if (answer.status_code, answer.get_json()["code"]) != (400, "invalid-key"):
            passed[shape] = answer.data

    assert passed == {}


def test_key_with_underscores_is_no_key(server: Server) -> None:
    """`Idempotency_Key` looks the same in a WSGI environ: servers drop it, so that it cannot slip in another's key."""
    spoofed = message("POST", "/required", [("Idempotency_Key", "abc"), (CASE, CASE_NAME)], b"{}")

    assert ask(server.port, spoofed).told == (400, "missing-key")


UNGUARDED = {
    ("GET", "/free"): 200,
    ("HEAD", "/free"): 200,
    ("OPTIONS", "/plain"): 200,
    ("GET", "/plain"): 405,
    ("POST", "/free"): 405,
    ("DELETE", "/free"): 405,
    ("POST", "/nowhere"): 404,
    ("PATCH", "/"): 404,
    ("POST", "/slash"): 308,
}


def test_7_key_on_what_has_no_view_of_ours_touches_nothing(server: Server) -> None:
    """Safe methods, unknown routes, wrong methods and redirects are answered as if we were not there, also with a bad key."""
    for key in ("abc", ""):
        told, problems = {}, []
        for method, path in UNGUARDED:
            with Wire(server.port) as wire:
                wire.send(message(method, path, [("Idempotency-Key", key), (CASE, CASE_NAME)]))
                answer = wire.head()
                told[method, path] = answer.status
                if answer.getheader("Content-Type") == "application/problem+json":
                    problems.append((method, path))

        assert (told, problems) == (UNGUARDED, [])


def declared(path: str, *headers: tuple[str, str]) -> bytes:
    """The head of a request that announces a gigabyte."""
    told = [("Idempotency-Key", "abc"), (CASE, CASE_NAME), ("Content-Length", str(GIGABYTE)), *headers]
    return message("POST", path, told, None)


@pytest.mark.parametrize("kind", ["sync", "gthread", "gevent"])
def test_10_gigabyte_from_nobody_is_not_read(serve: Serve, kind: Kind) -> None:
    """
    Without credentials the answer comes at once: the extension waits for no body before the application has agreed.
    """
    with Wire(serve(kind=kind).port) as wire:
        assert wire.send(declared("/private")).head().status == 401


@pytest.mark.parametrize("kind", ["sync", "gthread", "gevent"])
def test_10_gigabyte_that_never_comes_is_a_truncated_body(serve: Serve, kind: Kind) -> None:
    """Announced and not sent: 400, and nothing was claimed."""
    with Wire(serve(kind=kind).port) as wire:
        wire.send(declared("/private", ("Authorization", "Bearer acme/alice")) + b"x" * 100_000).half_close()

        assert wire.answer().told == (400, "truncated-body")


def test_10_hung_up_upload_leaves_nothing(server: Server) -> None:
    """The client resets its connection in mid-upload: nothing was claimed, and the server lives."""
    Wire(server.port).send(declared("/plain") + b"x" * 100_000).reset()

    assert ask(server.port, message("GET", "/free")).status == 200


ODD_JSON = (b"", b"{", b"\xff\xfe", b"NaN", b'{"a": 1, "a": 2}', b'"\\ud800"', b"1e999")


class TestWhatOnlyTheViewCanJudge:
    """A body that makes no sense is a request like any other: the view answers it, and retries get that answer."""

    @pytest.fixture(autouse=True)
    def _nothing_happened(self) -> None:
        """Here something does."""

    def test_g68_slow_upload_holds_no_claim(self, server: Server, ledger: Ledger) -> None:
        """While one client uploads at a snail's pace, another with the same key is served."""
        order = Order("/plain")
        headers = (("Idempotency-Key", order.key), (CASE, order.case), ("Content-Length", "1000"))
        with Wire(server.port) as slow:
            slow.send(message("POST", "/plain", headers, None) + b"x")

            assert ask(server.port, order.attempt()).status == 201
            assert slow.silent()
        assert ledger.runs(order.case) == 1

    def test_f60_56_what_only_the_view_can_judge_is_answered_once(self, client: FlaskClient, ledger: Ledger) -> None:
        """Odd JSON, JSON that no parser survives and broken forms reach the view as without us. A retry gets its answer."""
        bounded = "multipart/form-data; boundary=b"
        bodies = (
            *(("application/json", body) for body in ODD_JSON),
            ("application/problem+json", b"[" * 100_000 + b"]" * 100_000),
            ("multipart/form-data", b"--b\r\n\r\n"),
            ("multipart/form-data; boundary=", b"--\r\n\r\n"),
            (bounded, b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nvalue'),
            (bounded, b"no boundary in here"),
            (bounded, b"--b\r\nContent-Disposition: nonsense\r\n\r\nx\r\n--b--\r\n"),
            (bounded, b""),
            ("application/x-www-form-urlencoded", b"%ff=%&&==;"),
        )
        wrong = []
        for number, (media_type, body) in enumerate(bodies):
            headers = {"Idempotency-Key": str(number), CASE: (case := uuid4().hex)}
            path = {"application/json": "/json", "application/problem+json": "/plain"}.get(media_type, "/form")
            first, again = (client.post(path, data=body, headers=headers, content_type=media_type) for _ in range(2))
            same = (again.status_code, again.data, again.headers.get("Idempotency-Replayed")) == (
                first.status_code,
                first.data,
                "true",
            )
            if not same or first.status_code not in (200, 201, 400) or ledger.runs(case) != 1:
                wrong.append((body, first, again))

        assert wrong == []
