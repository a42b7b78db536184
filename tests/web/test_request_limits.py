"""What is too long is refused before anything is read or claimed: keys and bodies, by application, blueprint and view."""

from __future__ import annotations

import io
from typing import Any

import pytest
from flask import Blueprint, request
from werkzeug.datastructures import Headers
from werkzeug.test import EnvironBuilder

from flask_idempotency import idempotent
from tests.web.apps import KEY, World, new_world
from tests.web.sending import DELIVERIES, Delivery, chunked, environ_of, send


class Unread(io.RawIOBase):
    """A body that nobody may touch."""

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
    """One that never ends is not waited for."""

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


def test_the_key_is_not_used_up() -> None:
    """A client that sends less under the same key is not told that it was used for another request."""
    world = shop(max_request_body=10)

    assert [413, 200] == [world.post(data=b"x" * size).status_code for size in (11, 10)]


def test_a_form_that_may_carry_the_key_is_not_parsed_over_the_limit() -> None:
    """The key would be found by reading it."""
    world = shop(max_request_body=10, form_field="idempotency_key")

    assert 413 == world.post(key=None, data={"idempotency_key": "k", "amount": "5"}).status_code
    assert [] == world.store.calls


@pytest.mark.parametrize("hook", ("data", "form"))
def test_a_body_that_a_hook_has_read_counts_as_well(hook: str) -> None:
    """Whoever read it: it is not claimed for."""
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
    """What counts is what the view would be given."""
    world = shop(max_request_body=10)

    @world.app.before_request
    def unzip() -> None:
        request.stream = io.BytesIO(b"x" * 11)

    assert 413 == world.post(data=b"zip").status_code
    assert ([], []) == (world.runs, world.store.calls)


def test_a_request_without_a_key_is_left_alone() -> None:
    """It is not ours to limit."""
    world = shop(max_request_body=10)

    assert 200 == world.post(key=None, data=b"x" * 11).status_code


def test_flasks_own_limit_keeps_working() -> None:
    """Below ours, the view is asked as before: it may raise its limit, or answer 413."""
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
    """The innermost decides; what it refuses is 400, before any claim."""
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
    """None gives a limit back that an outer layer has set."""
    world = layered("max_request_body", app=3, blueprint=5, view=None)

    got = [
        [world.post(path, key=f"{row}{size}", data=b"x" * size).status_code for size in (3, 5, 9)]
        for row, path in enumerate(PATHS)
    ]

    assert [[200, 413, 413], [200, 200, 413], [200, 200, 200]] == got
