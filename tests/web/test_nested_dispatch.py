"""A request that dispatches another, and a decorator that calls its view again: each dispatch has its own claim and body."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import product
from typing import Any

import pytest
from flask import Flask, Response, current_app, got_request_exception, request, stream_with_context
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client, EnvironBuilder, run_wsgi_app

from flask_idempotency.web.current_claim import current_claim
from flask_idempotency.web.policies import claim_here
from tests.apps import KEY, World, is_replay, new_world

Environ = dict[str, Any]


def by_copy(changes: Environ) -> Response:
    """A WSGI call with a copy of the outer request's environ."""
    return answered({**request.environ, **changes})


def by_same_object(changes: Environ) -> Response:
    """A WSGI call with the very environ of the outer request, as internal redirects do."""
    request.environ.update(changes)
    return answered(request.environ)


def by_environ_base(changes: Environ) -> Response:
    """The test client, given the outer environ as a base."""
    told = {name: value for name, value in changes.items() if name != "wsgi.input"}
    data = changes["wsgi.input"].getvalue() if "wsgi.input" in changes else b""
    client = current_app.test_client(use_cookies=False)
    answer = client.post(
        told["PATH_INFO"], environ_base=dict(request.environ), environ_overrides=told, data=data, buffered=True
    )
    return Response(answer.data, answer.status, answer.headers)


def by_builder(changes: Environ) -> Response:
    """`EnvironBuilder.from_environ`, which copies the headers and the stream of the outer environ."""
    data = changes.get("wsgi.input", io.BytesIO())
    builder = EnvironBuilder.from_environ({**request.environ, **changes, "wsgi.input": data})
    try:
        return answered(builder.get_environ())
    finally:
        builder.close()


def answered(environ: Environ) -> Response:
    body, status, headers = run_wsgi_app(current_app.wsgi_app, environ, buffered=True)
    return Response(body, status, headers)


WAYS: dict[str, Callable[[Environ], Response]] = {
    "copy": by_copy,
    "same object": by_same_object,
    "environ_base": by_environ_base,
    "builder": by_builder,
}


@pytest.fixture(params=WAYS)
def dispatch(request: pytest.FixtureRequest) -> Callable[[Environ], Response]:
    return WAYS[request.param]


def with_body(body: bytes, *, key: str | None, path: str = "/inner") -> Environ:
    changes: Environ = {"PATH_INFO": path, "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
    return changes if key is None else {**changes, "HTTP_IDEMPOTENCY_KEY": key}


def inner_shop(dispatch: Callable[[Environ], Response], *calls: Environ, **policy: Any) -> World:
    """`/outer` makes these calls and returns their results; `/inner` returns its key and its body."""
    world = new_world(**policy)

    @world.view("/inner")
    def inner() -> str:
        world.runs.append(request.get_data(as_text=True))
        return f"{current_claim.key}:{request.get_data(as_text=True)}"

    @world.view("/outer")
    def outer() -> list[Any]:
        said = [dispatch(dict(call)) for call in calls]
        return [[answer.status_code, answer.get_data(as_text=True), is_replay(answer)] for answer in said]

    return world


def test_an_inner_request_has_its_own_key_and_its_own_body(dispatch: Callable[[Environ], Response]) -> None:
    world = inner_shop(dispatch, with_body(b"from inside", key="inner"))

    first = world.post("/outer", key="outer", data=b"from outside")

    assert [[200, "inner:from inside", False]] == first.json
    assert [["claim", "claim", "complete", "complete"], ["from inside"]] == [world.store.verbs(), world.runs]
    assert first.data == world.post("/outer", key="outer", data=b"from outside").data
    direct = world.post("/inner", key="inner", data=b"from inside")
    assert ("inner:from inside", True) == (direct.text, is_replay(direct))


def test_an_inner_request_that_is_sent_twice_runs_once(dispatch: Callable[[Environ], Response]) -> None:
    call = with_body(b"pay", key="inner")
    world = inner_shop(dispatch, call, {**call, "wsgi.input": io.BytesIO(b"pay")})

    assert [[200, "inner:pay", False], [200, "inner:pay", True]] == world.post("/outer", key="outer").json
    assert ["pay"] == world.runs


def test_an_inner_request_with_another_body_is_a_mismatch(dispatch: Callable[[Environ], Response]) -> None:
    """The outer body, which both share, must not be the one that is compared."""
    world = inner_shop(dispatch, with_body(b"pay 1", key="inner"), with_body(b"pay 2", key="inner"))

    said = world.post("/outer", key="outer", data=b"outside").json

    assert said is not None
    assert [200, 422] == [status for status, *_ in said]
    assert ["pay 1"] == world.runs


def test_an_inner_request_that_still_carries_the_outer_key_is_another_request(
    dispatch: Callable[[Environ], Response],
) -> None:
    """One key names one request. A copied header is refused, and the outer claim is as it was."""
    world = inner_shop(dispatch, with_body(b"pay", key=None))

    first = world.post("/outer", key="outer", data=b"outside")

    assert first.json is not None
    assert 422 == first.json[0][0]
    assert [] == world.runs
    assert ["complete"] == world.settled()
    again = world.post("/outer", key="outer", data=b"outside")
    assert (first.data, True) == (again.data, is_replay(again))


@pytest.mark.parametrize("in_flight", ["reject", "wait"])
def test_an_application_that_sends_its_own_request_to_itself_is_refused(in_flight: str) -> None:
    """The same key, path and body as the request that is running: its own claim is in flight."""
    world = new_world(in_flight=in_flight, wait=0)
    answers: list[int] = []

    @world.view()
    def pay() -> str:
        world.runs.append(1)
        answers.append(answered({**request.environ, "wsgi.input": io.BytesIO(request.get_data())}).status_code)
        return "paid"

    assert "paid" == world.post(data=b"pay").text
    assert [[409], [1]] == [answers, world.runs]


def test_an_inner_request_without_a_key_runs_as_part_of_the_outer_one(dispatch: Callable[[Environ], Response]) -> None:
    """The documented remedy: take the key out of the copied environ."""
    world = new_world()

    @world.view("/inner")
    def inner() -> str:
        return f"{bool(current_claim)}:{request.get_data(as_text=True)}"

    @world.view("/outer")
    def outer() -> str:
        key, body = current_claim.key, request.get_data()
        request.environ.pop("HTTP_IDEMPOTENCY_KEY")
        said = dispatch(with_body(b"inside", key=None)).get_data(as_text=True)
        return f"{said} in {current_claim.key}" if (key, body) == (current_claim.key, request.get_data()) else "mixed"

    assert "False:inside in outer" == world.post("/outer", key="outer", data=b"outside").text
    assert ["claim", "complete"] == world.store.verbs()


def test_an_inner_request_under_a_downstream_key_has_its_own_claim() -> None:
    """The documented remedy where the inner view requires a key."""
    world = new_world(required=True)
    world.view("/inner", endpoint="inner")(lambda: current_claim.key)

    @world.view("/outer")
    def outer() -> str:
        key = current_claim.downstream_key("inner")
        said = by_copy(with_body(b"", key=key)).get_data(as_text=True)
        return f"{said == key} in {current_claim.key}"

    assert "True in k" == world.post("/outer").text
    assert ["claim", "claim", "complete", "complete"] == world.store.verbs()


def test_an_outer_request_that_fails_after_an_inner_one_settles_its_own_claim(
    dispatch: Callable[[Environ], Response],
) -> None:
    world = new_world(effects="deduplicated")
    world.view("/inner", endpoint="inner")(lambda: "inner")

    @world.view("/outer")
    def outer() -> str:
        dispatch(with_body(b"inside", key="inner"))
        raise ValueError("the outer view failed")

    assert 500 == world.post("/outer", key="outer").status_code
    assert ["complete", "release"] == world.settled()
    assert is_replay(world.post("/inner", key="inner", data=b"inside"))


def test_an_unkeyed_outer_request_leaves_nothing_for_an_inner_one(dispatch: Callable[[Environ], Response]) -> None:
    world = new_world(required=False)
    world.view("/inner", endpoint="inner")(lambda: f"{current_claim.key}:{request.get_data(as_text=True)}")
    world.view("/outer", endpoint="outer")(lambda: dispatch(with_body(b"inside", key="inner")))

    assert "inner:inside" == world.post("/outer", key=None, data=b"outside").text
    assert is_replay(world.post("/inner", key="inner", data=b"inside"))


def test_a_hook_that_dispatches_before_the_claim(dispatch: Callable[[Environ], Response]) -> None:
    """The inner request is over before the outer one claims its key."""
    world = new_world()
    world.view("/inner", endpoint="inner")(lambda: f"{current_claim.key}:{request.get_data(as_text=True)}")
    world.view("/outer", endpoint="outer")(lambda: f"{current_claim.key}:{request.get_data(as_text=True)}")
    said: list[str] = []

    @world.app.before_request
    def ask() -> None:
        if request.path == "/outer":
            outside = dict(request.environ)
            said.append(dispatch(with_body(b"inside", key="inner")).get_data(as_text=True))
            request.environ.update(outside)

    assert "outer:outside" == world.post("/outer", key="outer", data=b"outside").text
    assert ["inner:inside"] == said
    assert ["complete", "complete"] == world.settled()


def test_a_stream_that_dispatches_while_it_is_sent(dispatch: Callable[[Environ], Response]) -> None:
    world = new_world()
    world.view("/inner", endpoint="inner")(lambda: f"{current_claim.key}:{request.get_data(as_text=True)}")

    @world.view("/outer")
    def outer() -> Response:
        def parts() -> Iterator[str]:
            yield f"{current_claim.key}, "
            yield dispatch(with_body(b"inside", key="inner")).get_data(as_text=True)
            yield f", {current_claim.key}"

        return Response(stream_with_context(parts()))

    first, again = (world.post("/outer", key="outer") for _ in range(2))

    assert "outer, inner:inside, outer" == first.text
    assert (first.data, True) == (again.data, is_replay(again))


@pytest.mark.parametrize("size", [3, 200_000])
def test_the_outer_body_survives_an_inner_request_on_the_same_stream(size: int) -> None:
    """The inner request ends first. It must not close what the outer view still reads."""
    world = new_world()
    world.view("/inner", endpoint="inner")(lambda: "")

    @world.view("/outer")
    def outer() -> str:
        by_copy({"PATH_INFO": "/inner", "HTTP_IDEMPOTENCY_KEY": "inner"})
        return str(len(request.get_data()))

    assert f"{size}" == world.post("/outer", key="outer", data=b"x" * size).text


def test_the_outer_body_is_still_there_after_an_inner_request(dispatch: Callable[[Environ], Response]) -> None:
    world = new_world()
    world.view("/inner", endpoint="inner")(lambda: "")

    @world.view("/outer")
    def outer() -> str:
        source = request.environ["wsgi.input"]
        dispatch(with_body(b"inside", key="inner"))
        request.environ["wsgi.input"] = source
        request.environ["CONTENT_LENGTH"] = str(len(b"outside"))
        return request.get_data(as_text=True)

    assert "outside" == world.post("/outer", key="outer", data=b"outside").text


def test_an_inner_request_that_shares_the_stream_is_compared_by_what_it_carries() -> None:
    """A copied environ keeps the outer stream. Its bytes belong to the inner request's fingerprint."""
    world = new_world()

    @world.view("/inner")
    def inner() -> str:
        return "inner"

    @world.view("/outer")
    def outer() -> list[int]:
        request.get_data()
        again = {"PATH_INFO": "/inner", "HTTP_IDEMPOTENCY_KEY": "inner"}
        return [by_copy(again).status_code, by_copy({**again, "CONTENT_LENGTH": "0"}).status_code]

    assert [200, 422] == world.post("/outer", key="outer", data=b"outside").json


def test_two_applications_behind_a_dispatcher_that_call_each_other() -> None:
    """Each has its own claim under the key that the copied environ carries: they are two namespaces."""
    outer, inner = new_world(Flask("outer")), new_world(Flask("inner"))
    mounted = DispatcherMiddleware(outer.app, {"/api": inner.app})

    @inner.view("/pay")
    def pay() -> str:
        inner.runs.append(request.get_data(as_text=True))
        return f"{current_claim.key}:{request.get_data(as_text=True)}"

    @outer.view("/checkout")
    def checkout() -> Response:
        body, status, headers = run_wsgi_app(mounted, {**request.environ, "PATH_INFO": "/api/pay"}, buffered=True)
        return Response(body, status, headers)

    client = Client(mounted)
    for _ in range(2):
        assert "k:order" == client.post("/checkout", headers={KEY: "k"}, data=b"order").text
    assert ["order"] == inner.runs
    assert [["claim", "complete"], ["claim", "complete", "claim"]] == [inner.store.verbs(), outer.store.verbs()]


def retried(view: Callable[..., Any]) -> Callable[..., Any]:
    """A typical retry decorator: on any exception, try three times."""

    @wraps(view)
    def retrying(*args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            try:
                return view(*args, **kwargs)
            except Exception:  # noqa: BLE001, S112 - this is the mistake that is tested
                continue
        return view(*args, **kwargs)

    return retrying


def called_twice(view: Callable[..., Any]) -> Callable[..., Any]:
    """Consumes the first response, and returns the second."""

    @wraps(view)
    def calling(*args: Any, **kwargs: Any) -> Any:
        try:
            first = view(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see above
            first = getattr(error, "response", None)
        if hasattr(first, "response"):
            first.response = []
        return view(*args, **kwargs)

    return calling


def signalling(view: Callable[..., Any]) -> Callable[..., Any]:
    """Reports to the error tracker by hand, then tries again."""

    @wraps(view)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return view(*args, **kwargs)
        except Exception:  # noqa: BLE001 - see above
            got_request_exception.send(current_app._get_current_object(), exception=ValueError("wrapped"))  # type: ignore[attr-defined]
            return view(*args, **kwargs)

    return telling


def charging(world: World, decorator: Callable[..., Any]) -> World:
    @world.view()
    @decorator
    @claim_here
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        return f"charge {len(world.runs)}", 201

    return world


@pytest.mark.parametrize("trap", (False, True))
@pytest.mark.parametrize("decorator", (retried, called_twice, signalling))
def test_a_replay_is_repeated_however_often_the_view_is_called(decorator: Any, trap: bool) -> None:
    """A decorator that takes the stored response for an error must not charge twice."""
    world = charging(new_world(config={"TRAP_HTTP_EXCEPTIONS": trap}), decorator)
    first = world.post()
    before = len(world.runs)
    again = world.post()

    assert 201 == first.status_code
    assert is_replay(again)
    assert (first.status_code, first.data) == (again.status_code, again.data)
    assert before == len(world.runs)


def test_a_refusal_is_repeated_however_often_the_view_is_called() -> None:
    """A missing key, an invalid key, no store: the view does not run at the second call either."""
    for (policy, key, down, status), decorator, trap in product(
        (({"required": True}, None, False, 400), ({}, "", False, 400), ({}, "k", True, 503)),
        (retried, called_twice, signalling),
        (False, True),
    ):
        world = charging(new_world(config={"TRAP_HTTP_EXCEPTIONS": trap}, **policy), decorator)
        world.store.down = down

        assert status == world.post(key=key).status_code, (policy, key, down, status, decorator, trap)
        assert [] == world.runs, (policy, key, down, status, decorator, trap)


def test_a_view_without_a_key_may_be_called_again_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """There is no key to protect it, and none that was claimed too early."""
    world = new_world(form_field="key")

    @world.view()
    def outer() -> Any:
        return inner()

    @claim_here
    def inner() -> str:
        world.runs.append(1)
        return "paid"

    with caplog.at_level(logging.WARNING):
        response = world.post(key=None, data={"amount": "1"})

    assert "paid" == response.text
    assert [1] == world.runs
    assert not [message for message in caplog.messages if "@claim_here" in message]
