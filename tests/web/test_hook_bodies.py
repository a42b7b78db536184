"""The view sees the body it would see without us. How a body is read and fingerprinted: see test_requests and test_bodies."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from typing import IO, Any

import pytest
from flask import Request, make_response, request
from flask_wtf import CSRFProtect  # type: ignore[import-untyped]
from werkzeug.exceptions import RequestEntityTooLarge

from flask_idempotency.engine.errors import ConfigurationError
from tests.web.apps import KEY, is_replay, new_world

MULTIPART = (
    b'--b\r\nContent-Disposition: form-data; name="amount"\r\n\r\n5\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f.txt"\r\nContent-Type: text/plain\r\n\r\nfile\r\n--b--\r\n'
)

BODIES: dict[str, tuple[str, bytes]] = {
    "json": ("application/json", b'{"amount": 5}'),
    "form": ("application/x-www-form-urlencoded", b"amount=5&note=%C3%A4"),
    "multipart": ("multipart/form-data; boundary=b", MULTIPART),
    "broken multipart": ("multipart/form-data; boundary=b", b"--b\r\nnonsense"),
    "octets": ("application/octet-stream", b"\0\1\2\n" * 9),
    "no type": ("", b"bytes"),
    "empty": ("application/json", b""),
}

READINGS: dict[str, Callable[[Request], Any]] = {
    "get_data": lambda request: request.get_data(),
    "get_data, uncached": lambda request: request.get_data(cache=False),
    "data": lambda request: request.data,
    "json": lambda request: request.get_json(silent=True),
    "form": lambda request: [sorted(request.form.items()), sorted(request.files)],
    "files": lambda request: {name: file.read() for name, file in request.files.items()},
    "values": lambda request: sorted(request.values.items()),
    "stream": lambda request: request.stream.read(),
    "lines": lambda request: list(request.stream),
    "wsgi.input": lambda request: request.environ["wsgi.input"].read(request.content_length or -1),
    "mixed": lambda request: [request.stream.read(3), request.get_data()],
}


@pytest.mark.parametrize("chunked", (True, False))
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("reading", READINGS)
def test_p56_the_view_reads_what_it_would_read_without_us(body: str, reading: str, chunked: bool) -> None:
    """Seven kinds of body, eleven ways to read them, with Content-Length and without."""
    content_type, data = BODIES[body]
    without_length = {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}

    def seen(init: bool) -> str:
        world = new_world(init=init)
        world.view()(lambda: repr(READINGS[reading](request)))
        response = world.post(
            input_stream=BytesIO(data),
            content_type=content_type,
            content_length=len(data),
            environ_overrides=without_length if chunked else {},
        )
        return f"{response.status} {response.text}"

    assert seen(init=False) == seen(init=True)


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
    """Some servers hand over what they have without a word."""
    world = new_world()
    world.view()(lambda: "paid")
    response = world.post(data=b"abc", environ_overrides={"CONTENT_LENGTH": "1000", "wsgi.input_terminated": True})

    assert (400, "truncated-body") == (response.status_code, response.json["code"])  # type: ignore[index]
    assert [] == world.store.calls


@pytest.mark.skipif(
    getattr(Request.max_content_length, "fset", None) is None, reason="before Flask 3.1 a view could not raise it"
)
def test_p60_a_view_may_raise_its_own_limit() -> None:
    """An announced body over MAX_CONTENT_LENGTH is not read before the view has had its say."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})

    @world.view()
    def upload() -> str:
        request.max_content_length = 100
        return str(len(request.get_data()))

    assert "50" == world.post(data=b"x" * 50).text
    assert ["claim", "complete"] == world.store.verbs()


def test_two_uploads_over_the_limit_never_pass_for_each_other() -> None:
    """Nobody has read them before the claim: a retry is refused rather than given another upload's answer."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})
    world.view()(lambda: "stored")

    assert [200, 422] == [world.post(data=letter * 50).status_code for letter in (b"x", b"y")]


def test_a_refused_upload_is_refused_alike_again() -> None:
    """413 says that nothing was read: the key is released, so that a retry does not hear `key-reused`."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})

    @world.view()
    def upload() -> str:
        return str(len(request.get_data()))

    assert [413, 413] == [world.post(data=b"x" * 50).status_code for _ in range(2)]
    assert ["claim", "release"] * 2 == world.store.verbs()


def test_p61_a_413_that_a_hook_puts_over_a_success_does_not_say_that_nothing_was_done() -> None:
    """The view never needed the body, and has done its work."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})
    world.view()(lambda: ("paid", 201))
    world.app.after_request(lambda response: make_response("too large", 413))

    assert 413 == world.post(data=b"x" * 50).status_code
    assert ["complete"] == world.settled()


def test_p61_a_chunked_body_over_the_limit_is_413_and_leaves_no_claim() -> None:
    """It has to be read to be known."""
    world = new_world(config={"MAX_CONTENT_LENGTH": 10})
    world.view()(lambda: "paid")
    response = world.post(
        input_stream=BytesIO(b"x" * 50), environ_overrides={"wsgi.input_terminated": True, "CONTENT_LENGTH": ""}
    )

    assert RequestEntityTooLarge.code == response.status_code
    assert [] == world.store.calls


def test_p62_a_body_that_an_earlier_hook_consumed_is_a_loud_error() -> None:
    """Never the digest of what is left."""
    world = new_world(config={"PROPAGATE_EXCEPTIONS": True})
    world.view()(lambda: "paid")

    @world.app.before_request
    def consume() -> None:
        request.stream.read()

    with pytest.raises(ConfigurationError, match="get_data"):
        world.post(data=b"body")
    assert [] == world.store.calls


def test_p63_the_spool_is_closed_when_the_answer_has_left() -> None:
    """A large upload goes through a temporary file, which is gone after the request."""
    world = new_world()
    spools: list[IO[bytes]] = []

    @world.view()
    def upload() -> str:
        spools.append(request.environ["wsgi.input"])
        return str(len(request.get_data()))

    assert str(1 << 20) == world.post(data=b"x" * (1 << 20)).text
    assert spools[0].closed


def test_p63_a_form_that_was_searched_for_a_key_in_vain_is_closed_too() -> None:
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
    """The spool stays open as long as the answer is being produced, after teardown even."""
    world = new_world()

    @world.view()
    def echo() -> Any:
        stream = request.stream
        return iter(lambda: stream.read(1 << 18), b"")

    assert 1 << 20 == len(world.post(data=b"x" * (1 << 20)).data)


def test_a_test_client_that_preserves_the_context_may_read_the_body_afterwards() -> None:
    """`with client:` looks at the request when the answer is long there."""
    world = new_world()
    world.view()(lambda: "paid")
    with world.client() as client:
        data = json.dumps({"a": "b" * (1 << 17)})
        client.post("/", data=data, content_type="application/json", headers={KEY: "k"}, buffered=True)
        assert 1 << 17 == len(request.get_json()["a"])
