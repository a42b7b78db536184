"""Request bodies in a whole application: views, hooks that read first, size limits."""

from __future__ import annotations

import errno
import gc
import io
import json
import sys
from collections.abc import Callable
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import IO, Any

import pytest
from flask import Blueprint, Request, make_response, request
from flask_wtf import CSRFProtect  # type: ignore[import-untyped]
from werkzeug.datastructures import Headers
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.test import EnvironBuilder

from flask_idempotency import idempotent, webhook
from flask_idempotency.engine.errors import ConfigurationError
from tests.apps import KEY, World, is_replay, new_world
from tests.web.sending import DELIVERIES, Delivery, chunked, endless, environ_of, send, terminated


def test_p58_a_form_that_csrf_protection_parsed_first_is_still_compared() -> None:
    """amount=1 and amount=999 under one key are two requests, though get_data() is empty for both."""
    world = new_world(config={"WTF_CSRF_CHECK_DEFAULT": True})
    CSRFProtect(world.app)
    world.app.get("/token", endpoint="token")(lambda: world.app.jinja_env.globals["csrf_token"]())  # type: ignore[operator]
    world.view()(lambda: request.form["amount"])
    client = world.client()
    token = client.get("/token").text

    def pay(amount: str) -> Any:
        return client.post("/", data={"amount": amount, "csrf_token": token}, headers={KEY: "k"})

    assert "1" == pay("1").text
    assert is_replay(pay("1"))
    assert 422 == pay("999").status_code


def test_p59_a_truncated_body_is_refused_before_any_claim() -> None:
    """Some servers pass on a truncated body without an error."""
    world = new_world()
    world.view()(lambda: "paid")
    response = world.post(data=b"abc", environ_overrides={"CONTENT_LENGTH": "1000", "wsgi.input_terminated": True})

    assert (400, "truncated-body") == (response.status_code, response.json["code"])  # type: ignore[index]
    assert [] == world.store.calls


@pytest.mark.skipif(
    getattr(Request.max_content_length, "fset", None) is None, reason="before Flask 3.1 a view could not raise it"
)
def test_p60_a_view_may_raise_its_own_limit() -> None:
    """An announced body over MAX_CONTENT_LENGTH is not read before the view runs."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})

    @world.view()
    def upload() -> str:
        request.max_content_length = 100
        return str(len(request.get_data()))

    assert "50" == world.post(data=b"x" * 50).text
    assert ["claim", "complete"] == world.store.verbs()


def test_two_uploads_over_the_limit_never_share_a_response() -> None:
    """They are not read before the claim, so a retry is refused and never gets another upload's response."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})
    world.view()(lambda: "stored")

    assert [200, 422] == [world.post(data=letter * 50).status_code for letter in (b"x", b"y")]


def test_a_refused_upload_is_refused_again() -> None:
    """413 means that the body was not read: the key is released, so a retry does not get `key-reused`."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})

    @world.view()
    def upload() -> str:
        return str(len(request.get_data()))

    assert [413, 413] == [world.post(data=b"x" * 50).status_code for _ in range(2)]
    assert ["claim", "release"] * 2 == world.store.verbs()


def test_p61_a_413_that_a_hook_puts_over_a_success_releases_no_key() -> None:
    """The view never needed the body, and has done its work."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})
    world.view()(lambda: ("paid", 201))
    world.app.after_request(lambda response: make_response("too large", 413))

    assert 413 == world.post(data=b"x" * 50).status_code
    assert ["complete"] == world.settled()


def test_p61_a_chunked_body_over_the_limit_is_413_and_leaves_no_claim() -> None:
    """Only a read finds its size."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})
    world.view()(lambda: "paid")
    response = world.post(
        input_stream=BytesIO(b"x" * 50), environ_overrides={"wsgi.input_terminated": True, "CONTENT_LENGTH": ""}
    )

    assert RequestEntityTooLarge.code == response.status_code
    assert [] == world.store.calls


def test_p62_a_body_that_an_earlier_hook_consumed_raises() -> None:
    """Never a digest of the rest."""
    world = new_world(config={"PROPAGATE_EXCEPTIONS": True})
    world.view()(lambda: "paid")

    @world.app.before_request
    def consume() -> None:
        request.stream.read()

    with pytest.raises(ConfigurationError, match="get_data"):
        world.post(data=b"body")
    assert [] == world.store.calls


def test_p63_the_spool_is_closed_after_the_response() -> None:
    """A large upload goes through a temporary file, which is gone after the request."""
    world = new_world()
    spools: list[IO[bytes]] = []

    @world.view()
    def upload() -> str:
        spools.append(request.environ["wsgi.input"])
        return str(len(request.get_data()))

    assert str(1 << 20) == world.post(data=b"x" * (1 << 20)).text
    assert spools[0].closed


def test_p63_a_form_without_the_searched_key_is_closed_too() -> None:
    """Only the search spooled it."""
    world = new_world(form_field="idempotency_key")
    spools: list[IO[bytes]] = []

    @world.view()
    def upload() -> str:
        spools.append(request.environ["wsgi.input"])
        return request.form["note"]

    assert 100_000 == len(world.post(key=None, data={"note": "x" * 100_000}).text)
    assert spools[0].closed


def test_p63_a_streaming_view_may_read_its_body_to_the_end() -> None:
    """The spool stays open until the response is exhausted, even after teardown."""
    world = new_world()

    @world.view()
    def echo() -> Any:
        stream = request.stream
        return iter(lambda: stream.read(1 << 18), b"")

    assert 1 << 20 == len(world.post(data=b"x" * (1 << 20)).data)


class Full(io.FileIO):
    """A file on a disk with room for some bytes."""

    room = 0

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def no_folder(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", list)


def removed_folder(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(path / "removed"))


def read_only(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("flask_idempotency.web.body_copies.TemporaryFile", refuse)


def full_disk(monkeypatch: pytest.MonkeyPatch, path: Path, room: int = 150_000) -> None:
    made = type("Full", (Full,), {"room": room})
    monkeypatch.setattr("flask_idempotency.web.body_copies.TemporaryFile", lambda **_: made(path / "full", "w+b"))


def full_at_the_end(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Its last bytes are still in the file's buffer when all are read."""
    full_disk(monkeypatch, path, LARGE - 1)


LARGE = 200_000
BROKEN = {
    "ENOENT": no_folder,
    "ENOENT ": removed_folder,
    "EROFS": read_only,
    "ENOSPC": full_disk,
    "ENOSPC ": full_at_the_end,
}


@pytest.mark.parametrize(
    "delivery", [{}, {"wsgi.input_terminated": True, "CONTENT_LENGTH": ""}], ids=["length", "chunked"]
)
@pytest.mark.parametrize("code", BROKEN)
def test_a_body_without_room_is_503_and_claims_nothing(
    code: str, delivery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And no "Exception ignored" of a file that could not be made, or not be flushed."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    world = new_world(on_store_down="allow", form_field="idempotency_key")
    world.view()(lambda: "paid")
    large: Any = {
        "input_stream": BytesIO(b"x" * LARGE),
        "environ_overrides": {"CONTENT_LENGTH": str(LARGE), **delivery},
    }
    with monkeypatch.context() as patch:
        BROKEN[code](patch, tmp_path)
        answers = [world.post(**large)]
        small = world.post(key="small", data=b"x")
    gc.collect(1)  # What this test made is in the young generations.

    (answer,) = answers
    assert (503, "store-unavailable", "2") == (
        answer.status_code,
        (answer.json or {})["code"],
        answer.headers["Retry-After"],
    )
    assert 200 == small.status_code
    assert ["claim", "complete"] == world.store.verbs()
    assert 1 == caplog.text.count("no temporary file takes its body")
    assert f"({code.strip()}: " in caplog.text
    assert "TMPDIR" in caplog.text
    assert [] == ignored
    large["input_stream"] = BytesIO(b"x" * LARGE)
    assert 200 == world.post(**large).status_code


@pytest.mark.parametrize("kind", ["pointer", "form"])
def test_a_body_without_room_is_503_wherever_it_is_read_first(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = new_world(form_field="idempotency_key")

    def paid() -> str:
        return "paid"

    world.app.post("/events")(webhook("shop", key="/id")(paid) if kind == "pointer" else paid)
    no_folder(monkeypatch, tmp_path)
    about = (
        {"json": {"id": "x" * LARGE}} if kind == "pointer" else {"data": {"idempotency_key": "k", "note": "x" * LARGE}}
    )
    answer = world.app.test_client().post("/events", **about)

    assert (503, "store-unavailable") == (answer.status_code, (answer.json or {})["code"])
    assert [] == world.store.calls


def test_a_test_client_that_preserves_the_context_may_read_the_body_afterwards() -> None:
    """`with client:` reads the request after the response."""
    world = new_world()
    world.view()(lambda: "paid")
    with world.client() as client:
        data = json.dumps({"a": "b" * (1 << 17)})
        client.post("/", data=data, content_type="application/json", headers={KEY: "k"}, buffered=True)
        assert 1 << 17 == len(request.get_json()["a"])


TAKING: tuple[Callable[[Any], Any], ...] = (
    lambda stream: stream.read(4),
    lambda stream: stream.read(1),
    lambda stream: stream.readline(),
    lambda stream: list(stream),
)


def post_as(world: World, data: bytes, delivery: Delivery) -> tuple[int, bytes]:
    return send(world.app, environ_of(data, "text/plain", delivery=delivery, headers={"Idempotency-Key": "k"}))


def echoing(config: dict[str, Any] | None = None) -> World:
    world = new_world(config=config)

    @world.view()
    def echo() -> bytes:
        world.runs.append(1)
        return request.get_data()

    return world


def test_a_hook_that_reads_from_the_server_raises() -> None:
    """Never a digest of the rest, and never `truncated-body` for a complete request."""
    world = echoing({"PROPAGATE_EXCEPTIONS": True})

    taking = TAKING[0]

    @world.app.before_request
    def consume() -> None:
        taking(request.environ["wsgi.input"])

    for delivery, taking in product((chunked, terminated, endless), TAKING):  # noqa: B007 - the hook reads it
        with pytest.raises(ConfigurationError, match="get_data"):
            post_as(world, b"body", delivery)
    assert [] == world.store.calls


@pytest.mark.parametrize("delivery", (chunked, terminated, endless))
def test_an_unread_body_reaches_the_view(delivery: Delivery) -> None:
    """An empty one is legal, in chunks too."""
    for data in (b"", b"body", b"x" * 100_000):
        world = echoing()
        first, again = post_as(world, data, delivery), post_as(world, data, delivery)

        assert (200, data) == first == again
        assert [1] == world.runs


def test_a_truncated_body_differs_from_a_consumed_one() -> None:
    """The client must send it again; the application is correct."""
    world = echoing()

    def cut(environ: dict[str, Any], data: bytes) -> None:
        terminated(environ, data[:2])

    status, body = post_as(world, b"body", cut)

    assert 400 == status
    assert b"truncated-body" in body


def test_a_hook_that_looks_at_an_empty_body_has_consumed_nothing() -> None:
    """Only what was read counts."""
    world = echoing()

    @world.app.before_request
    def look() -> None:
        request.environ["wsgi.input"].read()

    assert (200, b"") == post_as(world, b"", chunked)


class Unread(io.RawIOBase):
    """A body that must not be read."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raise AssertionError("the body was read")


def shop(**policy: Any) -> World:
    world = new_world(**policy)

    @world.view()
    def pay() -> str:
        world.runs.append(request.get_data())
        return "paid"

    return world


def sent(world: World, data: bytes, delivery: Delivery, key: str | None = "k", **more: Any) -> tuple[int, bytes]:
    headers = {} if key is None else {KEY: key}
    return send(world.app, environ_of(data, delivery=delivery, headers=headers, **more))


@pytest.mark.parametrize("delivery", DELIVERIES, ids=lambda delivery: delivery.__name__)
def test_a_body_over_the_limit_is_413_however_it_comes(delivery: Delivery) -> None:
    """With a Content-Length or in chunks; the limit itself is allowed."""
    world = shop(max_request_body=10)

    status, body = sent(world, b"x" * 11, delivery)

    assert (413, True) == (status, b'"request-too-large"' in body)
    assert ([], []) == (world.runs, world.store.calls)
    assert 200 == sent(world, b"x" * 10, delivery)[0]
    assert [b"x" * 10] == world.runs


def test_an_announced_body_over_the_limit_is_not_read() -> None:
    """Not its first byte, and nothing is claimed."""
    world = shop(max_request_body=10)
    environ = environ_of(b"", headers={KEY: "k"})
    environ |= {"CONTENT_LENGTH": "11", "wsgi.input": Unread()}

    assert 413 == send(world.app, environ)[0]
    assert [] == world.store.calls


def test_a_chunked_body_is_cut_off_while_it_is_read() -> None:
    """The request does not wait for a body without an end."""

    class Endless:
        read_bytes = 0

        def read(self, size: int = -1) -> bytes:
            self.read_bytes += size
            return b"x" * size

    world, source = shop(max_request_body=100_000), Endless()
    environ = environ_of(b"", delivery=chunked, headers={KEY: "k"})
    environ["wsgi.input"] = source

    assert 413 == send(world.app, environ)[0]
    assert source.read_bytes <= 100_000 + 64 * 1024
    assert [] == world.store.calls


def test_a_refused_body_does_not_use_up_the_key() -> None:
    """A client that sends less under the same key does not get `key-reused`."""
    world = shop(max_request_body=10)

    assert [413, 200] == [world.post(data=b"x" * size).status_code for size in (11, 10)]


def test_a_form_that_may_carry_the_key_is_not_parsed_over_the_limit() -> None:
    """A search for the key would read the body."""
    world = shop(max_request_body=10, form_field="idempotency_key")

    assert 413 == world.post(key=None, data={"idempotency_key": "k", "amount": "5"}).status_code
    assert [] == world.store.calls


@pytest.mark.parametrize("hook", ("data", "form"))
def test_a_body_that_a_hook_has_read_counts_as_well(hook: str) -> None:
    """It is refused before the claim, whichever function read it."""
    world = shop(max_request_body=10)

    @world.app.before_request
    def read() -> None:
        request.get_data() if hook == "data" else request.form.get("amount")

    form = EnvironBuilder(method="POST", data={"amount": "5" * 10}, headers=Headers({KEY: "k"})).get_environ()
    assert 413 == send(world.app, form)[0]
    if hook == "data":
        assert 413 == sent(world, b"x" * 11, chunked)[0]
    assert ([], []) == (world.runs, world.store.calls)


def test_a_hook_that_unzips_does_not_get_around_the_limit() -> None:
    """The size of the unzipped body counts."""
    world = shop(max_request_body=10)

    @world.app.before_request
    def unzip() -> None:
        request.stream = io.BytesIO(b"x" * 11)

    assert 413 == world.post(data=b"zip").status_code
    assert ([], []) == (world.runs, world.store.calls)


def test_a_request_without_a_key_is_left_alone() -> None:
    """The extension limits keyed requests only."""
    world = shop(max_request_body=10)

    assert 200 == world.post(key=None, data=b"x" * 11).status_code


def test_flasks_own_limit_keeps_working() -> None:
    """Below `max_request_body` the view decides as before: it may raise its limit, or respond 413."""
    world = shop(max_request_body=100)
    world.app.config["MAX_CONTENT_LENGTH"] = 10

    answers = [world.post(key=key, data=b"x" * size) for key, size in (("a", 11), ("b", 101), ("c", 10))]

    assert [413, 413, 200] == [answer.status_code for answer in answers]
    assert [False, True, False] == [b"request-too-large" in answer.data for answer in answers]


def layered(keyword: str, *, app: Any, blueprint: Any, view: Any) -> World:
    """`/` has the application's policy, `/shop/` its blueprint's, `/shop/view` its own."""
    world, shop = new_world(**{keyword: app}), Blueprint("shop", __name__, url_prefix="/shop")
    world.view("/")(lambda: "paid")
    shop.post("/")(lambda: "paid")
    shop.post("/view", endpoint="own")(idempotent(**{keyword: view})(lambda: "paid"))
    world.idempotency.configure(shop, **{keyword: blueprint})
    world.app.register_blueprint(shop)
    return world


PATHS = ("/", "/shop/", "/shop/view")


@pytest.mark.parametrize(
    ("keyword", "limits", "keys"),
    (
        ("max_key_length", (3, 5, 9), ("k" * 3, "k" * 5, "k" * 9)),
        ("key_format", ("a+", "uuid", "b+"), ("aa", "8e03978e-40d5-43e8-bc93-6894a57f9324", "bb")),
    ),
)
def test_the_form_of_a_key_is_up_to_application_blueprint_and_view(
    keyword: str, limits: tuple[Any, Any, Any], keys: tuple[str, str, str]
) -> None:
    """The innermost policy decides; a refused key is 400, before any claim."""
    world = layered(keyword, app=limits[0], blueprint=limits[1], view=limits[2])
    expected = [[200, 400, 400], [400, 200, 400], [400, 400, 200]]
    if keyword == "max_key_length":
        expected = [[200, 400, 400], [200, 200, 400], [200, 200, 200]]

    got = [
        [world.post(path, key=key, headers={"X-User": f"{row}{column}"}).status_code for column, key in enumerate(keys)]
        for row, path in enumerate(PATHS)
    ]

    assert expected == got
    assert sum(row.count(200) for row in expected) == world.store.verbs().count("claim")


def test_the_length_of_a_body_is_up_to_application_blueprint_and_view() -> None:
    """None removes the limit of an outer layer."""
    world = layered("max_request_body", app=3, blueprint=5, view=None)

    got = [
        [world.post(path, key=f"{row}{size}", data=b"x" * size).status_code for size in (3, 5, 9)]
        for row, path in enumerate(PATHS)
    ]

    assert [[200, 413, 413], [200, 200, 413], [200, 200, 200]] == got
