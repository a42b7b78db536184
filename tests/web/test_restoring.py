from __future__ import annotations

import gzip
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, Response, after_this_request
from werkzeug.datastructures import Headers
from werkzeug.test import create_environ, run_wsgi_app

from flask_idempotency.engine.model import InFlight, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.web.problems import refusal, render
from flask_idempotency.web.responses import CapturedResponse, StreamEnd, capture, overlay, replay

STORED = StoredResponse(
    201,
    reason="Made",
    metadata=(("Content-Type", "text/plain"), ("Vary", "Accept"), ("ETag", '"theirs"')),
    body=b"theirs",
)


def theirs() -> Any:
    return replay(STORED, policy=Policy(), response_class=Response)


def mine() -> Response:
    response = Response(b"mine", 200, {"ETag": '"mine"', "X-Receipt": "mine", "Retry-After": "9", "Vary": "Accept"})
    response.set_cookie("seat", "mine")
    return response


def compressed(response: Response) -> Response:
    response.set_data(gzip.compress(response.get_data()))
    response.headers["Content-Encoding"] = "gzip"
    response.headers["Content-Digest"] = "sha-256=:mine:"
    response.vary.add("Accept-Encoding")
    return response


def saved(response: Response) -> Response:
    response.set_cookie("session", "fresh")
    response.headers["X-Request-Id"] = "fresh"
    return response


class Closing:
    """A stream that knows whether it was closed."""

    closed = False

    def __iter__(self) -> Iterator[bytes]:
        return iter([b"mine"])

    def close(self) -> None:
        self.closed = True


class Losing:
    """An application whose claim turns out to be lost after its other hooks have run."""

    def __init__(self, view: Callable[[], Any], *hooks: Callable[[Response], Response], answer: Any = theirs) -> None:
        self.ends: list[StreamEnd] = []
        self.app = app = Flask(__name__)
        app.post("/")(view)
        self.captured: list[CapturedResponse] = []

        def snap(response: Response) -> Response:
            self.captured.append(capture(response, Policy(), on_end=self.ends.append, abandoned=deque()))
            return response

        def lose(response: Response) -> Response:
            overlay(response, answer(), policy=Policy(), lost=self.captured[0])
            return response

        for hook in (lose, *reversed(hooks), snap):
            app.after_request(hook)

    def post(self) -> tuple[bytes, str, Headers]:
        body, status, headers = run_wsgi_app(self.app, create_environ(method="POST"), buffered=True)
        return b"".join(body), status, headers


def test_the_stored_answer_is_delivered_whatever_hooks_made_of_ours() -> None:
    body, status, headers = Losing(mine, compressed, saved).post()

    assert (b"theirs", "201 Made", "6") == (body, status, headers["Content-Length"])
    assert ('"theirs"', "text/plain") == (headers["ETag"], headers["Content-Type"])


def test_nothing_of_the_lost_answer_is_delivered() -> None:
    _, _, headers = Losing(mine, compressed, saved).post()

    assert [] == [(name, value) for name, value in headers if "mine" in value or name == "Retry-After"]
    assert "Content-Encoding" not in headers


def test_what_other_hooks_have_added_stays() -> None:
    _, _, headers = Losing(mine, compressed, saved).post()

    assert (["session=fresh; Path=/"], "fresh") == (headers.getlist("Set-Cookie"), headers["X-Request-Id"])
    assert ["Accept, Accept-Encoding"] == headers.getlist("Vary")


def test_without_other_hooks_it_is_the_replay_itself() -> None:
    assert list(theirs().get_wsgi_headers(create_environ())) == list(Losing(mine).post()[2])


def test_a_problem_can_take_the_place_as_well() -> None:
    body, status, headers = Losing(
        mine,
        answer=lambda: render(
            refusal(InFlight(3)), profile=PROFILES["ietf"], docs_url=DOCS_URL, response_class=Response
        ),
    ).post()

    assert ("409 CONFLICT", "3") == (status, headers["Retry-After"])
    assert b"in-flight" in body


@pytest.mark.parametrize("passed_through", (False, True))
def test_a_stream_that_is_replaced_is_closed_and_not_heard(passed_through: bool) -> None:
    stream = Closing()
    service = Losing(lambda: Response(stream, direct_passthrough=passed_through))

    assert (b"theirs", True, []) == (service.post()[0], stream.closed, service.ends)


def test_a_stream_that_a_hook_has_wrapped_is_closed_and_not_heard() -> None:
    """Some hooks wrap a stream and never close it, Flask-Compress for one."""
    stream = Closing()

    def wrapped(response: Response) -> Response:
        source = response.response
        response.response = (bytes(chunk) for chunk in source)  # type: ignore[arg-type]
        return response

    service = Losing(lambda: Response(stream), wrapped)

    assert (b"theirs", True, []) == (service.post()[0], stream.closed, service.ends)


def test_a_stream_that_was_never_captured_is_closed_as_well() -> None:
    stream = Closing()
    overlay(Response(stream), theirs(), policy=Policy())

    assert stream.closed


def test_what_waits_for_the_end_of_the_response_is_still_called() -> None:
    """Werkzeug does not call it for a body that is passed through, and ours is not."""
    called: list[bool] = []

    def view() -> Response:
        response = Response(Closing(), direct_passthrough=True)
        response.call_on_close(lambda: called.append(True))
        return response

    Losing(view).post()

    assert [True] == called


def test_a_replay_keeps_what_was_added_to_it_for_this_request() -> None:
    """A hook before us may have asked for a cookie by `after_this_request`: it is this caller's, and set once."""
    app = Flask(__name__)

    @app.post("/")
    def never() -> str:
        raise AssertionError("a replay does not run the view")

    @app.before_request
    def language() -> None:
        @after_this_request
        def remember(response: Response) -> Response:
            response.set_cookie("lang", "de")
            response.headers["ETag"] = '"rewritten"'
            return response

    @app.before_request
    def replay() -> Any:
        return theirs()

    @app.after_request
    def again(response: Response) -> Response:
        overlay(response, theirs(), policy=Policy())
        return response

    response = app.test_client().post("/")

    assert ("201 Made", b"theirs", '"theirs"') == (response.status, response.data, response.headers["ETag"])
    assert ["lang=de; Path=/"] == response.headers.getlist("Set-Cookie")
    assert ["true"] == response.headers.getlist("Idempotency-Replayed")
