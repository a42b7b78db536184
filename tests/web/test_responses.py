from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from flask import Response, abort, jsonify, make_response, redirect, send_file
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException, ImATeapot
from werkzeug.wrappers import Response as WerkzeugResponse

from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings.profiles import PROFILES, policy_of
from tests.apps import Remembering, replayed


class Careful(Response):
    """Refuses to turn streams into lists behind one's back."""

    implicit_sequence_conversion = False


class Talkative(Response):
    """Adds a header when made, and another when sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.headers.add("Link", "<made>")

    def get_wsgi_headers(self, environ: Any) -> Headers:
        headers = super().get_wsgi_headers(environ)
        headers.add("Link", "<sent>")
        return headers


def chunks() -> Iterator[bytes]:
    yield b"one"
    yield b"\xff\x00two"


def pieces_of_eight() -> Response:
    return Response(chunks(), headers={"Content-Length": "8"})


def wsgi_view(environ: Any, start_response: Any) -> list[bytes]:
    start_response("203 Said So", [("Content-Type", "text/plain"), ("Content-Length", "2")])
    return [b"ok"]


FIELDS = [("Link", "</a>; rel=a"), ("ETag", '"1"'), ("link", "</b>; rel=b"), ("Vary", "Accept"), ("Vary", "Origin")]


def with_fields() -> Response:
    response = Response(b"x", status="299 Weird Reason")
    response.headers = Headers(FIELDS)
    return response


class Refused(HTTPException):
    code = 409
    description = "no"


VIEWS: dict[str, Callable[[], Any]] = {
    "text": lambda: "hello",
    "empty": lambda: "",
    "empty 202": lambda: ("", 202),
    "bytes": lambda: b"\x00\xff",
    "zero": lambda: jsonify(0),
    "false": lambda: jsonify(False),
    "none": lambda: jsonify(None),
    "empty list": list,
    "dict": lambda: {"b": 1, "a": [1, 2]},
    "tuple": lambda: ({"id": 7}, 201, {"Location": "/things/7", "ETag": '"v1"'}),
    "jsonify": lambda: (jsonify(id=7), 201),
    "response": lambda: Response("done", 201, {"Content-Language": "de"}),
    "made": lambda: make_response("done", 418),
    "list of str": lambda: Response(["ä", "b"], mimetype="text/plain"),
    "many fields": with_fields,
    "no content type": lambda: Response(b"x", headers=Headers(), content_type=""),
    "other case": lambda: Response("x", status="404 Not Found"),
    "unknown status": lambda: ("x", 299),
    "place in another script": lambda: ("", 201, {"Location": "/größe/日本"}),
    "204": lambda: ("", 204),
    "204 with a generator": lambda: (chunks(), 204),
    "304": lambda: ("", 304, {"ETag": '"1"'}),
    "redirect": lambda: redirect("/elsewhere", 303),
    "abort": lambda: abort(422),
    "abort with text": lambda: abort(409, "not now"),
    "abort with a response": lambda: abort(Response("no", 402)),
    "exception returned": lambda: ImATeapot("short and stout"),
    "exception raised": lambda: (_ for _ in ()).throw(Refused()),
    "generator": chunks,
    "generator of known length": pieces_of_eight,
    "wsgi application": lambda: wsgi_view,
    "werkzeug response": lambda: WerkzeugResponse("plain", 201),
    "file": lambda: send_file(io.BytesIO(b"a file"), "text/plain", download_name="f.txt", as_attachment=True),
    "passed through": lambda: Response(chunks(), direct_passthrough=True),
    "compressed by the view": lambda: Response(b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
}

MARK = ("Idempotency-Replayed", "true")


@pytest.mark.parametrize("response_class", (Response, Careful, Talkative))
def test_a_replay_is_the_first_answer_byte_for_byte(response_class: type[Response]) -> None:
    """Status line, fields with their duplicates, and body; whatever the view returned. It says that it is a replay."""
    for view in VIEWS:
        service = Remembering(VIEWS[view], response_class=response_class)
        first = service.post()
        again = service.replay()

        added = [MARK] if first.all("Cache-Control") else [MARK, ("Cache-Control", "no-store")]
        assert (first.status, sorted([*first.fields, *added]), first.body) == (
            again.status,
            again.fields,
            again.body,
        ), view


def test_a_replay_tells_its_length_unless_it_has_no_body() -> None:
    for view in VIEWS:
        service = Remembering(VIEWS[view])
        first = service.post()

        bodiless = first.status[:3] in ("204", "304")
        assert ([] if bodiless else [str(len(first.body))]) == service.replay().all("Content-Length"), view


def test_fields_keep_their_order_and_their_spelling() -> None:
    service = Remembering(with_fields)
    first = service.post()

    assert [*FIELDS, ("Content-Length", "1")] == first.headers
    assert [*FIELDS, MARK, ("Cache-Control", "no-store"), ("Content-Length", "1")] == service.replay().headers


@pytest.mark.parametrize("name", PROFILES)
def test_a_replay_is_marked_in_its_profiles_way(name: str) -> None:
    policy = policy_of({"profile": name})
    again = replayed(StoredResponse(500), policy=policy)

    assert [*policy.replayed_header, ("Cache-Control", "no-store")] == list(again.headers)


def test_what_the_view_said_of_caching_stands() -> None:
    service = Remembering(lambda: ("x", 200, {"Cache-Control": "private"}))
    service.post()

    assert ["private"] == service.replay().all("Cache-Control")


def test_a_view_cannot_forge_the_mark() -> None:
    service = Remembering(
        lambda: ("x", 200, {"Idempotency-Replayed": "false"}),
        policy=Policy(keep_headers=frozenset({"Idempotency-Replayed"})),
    )
    service.post()

    assert ["true"] == service.replay().all("Idempotency-Replayed")


def test_an_aborted_answer_is_there_before_its_first_byte_leaves() -> None:
    """What abort() made comes as an iterator, but it is no stream: it is stored like any answer that is all there."""
    service = Remembering(VIEWS["abort"])
    service.post(read=False)

    assert service.captured is not None
    assert (None, 422) == (service.captured.tee, service.result.status)


field_names = st.sampled_from(["ETag", "etag", "Link", "Vary", "Content-Type", "Location", "Cache-Control", "X-Total"])
field_values = st.text(st.characters(min_codepoint=32, max_codepoint=126)).map(str.strip)


@given(
    body=st.binary(max_size=300),
    headers=st.lists(st.tuples(field_names, field_values), max_size=8),
    status=st.sampled_from([200, 201, 202, 299, 302, 400, 404, 422, 500]),
    cuts=st.lists(st.integers(0, 300), max_size=3),
    streamed=st.booleans(),
)
def test_any_answer_survives(
    body: bytes, headers: list[tuple[str, str]], status: int, cuts: list[int], streamed: bool
) -> None:
    edges = [0, *sorted(cuts), len(body)]
    pieces = [body[start:end] for start, end in pairwise(edges)]

    def view() -> Response:
        response = Response(iter(pieces) if streamed else pieces, status=status)
        response.headers = Headers(headers)
        return response

    service = Remembering(view, policy=Policy(keep_headers=frozenset({"x-total"})))
    first = service.post()
    again = replayed(service.result, policy=service.policy)

    assert (first.status, b"".join(pieces), headers) == (again.status, again.data, list(again.headers)[: len(headers)])
