"""Streamed responses in a whole application: chunks leave immediately, and only an exhausted stream completes its key."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from typing import Any

import flask
import pytest
from flask import Response, send_file, stream_with_context
from werkzeug.test import EnvironBuilder
from werkzeug.wsgi import FileWrapper

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.events import Completed
from flask_idempotency.engine.model import State
from flask_idempotency.web.current_claim import current_claim
from flask_idempotency.web.responses import StreamEnd, Tee
from tests.apps import KEY, World, is_replay, new_world


def begin(world: World, key: str = "k") -> Any:
    """Return the response as a server gets it: an iterable that has not started."""
    environ = EnvironBuilder("/", method="POST", headers=[(KEY, key)]).get_environ()
    return world.app(environ, lambda status, headers, exc_info=None: lambda data: None)


def streaming(world: World, *chunks: str, log: list[str] | None = None, fail: BaseException | None = None) -> None:
    def produce() -> Iterator[str]:
        try:
            for chunk in chunks:
                if log is not None:
                    log.append(chunk)
                yield chunk
            if fail is not None:
                raise fail
        except GeneratorExit:
            if log is not None:
                log.append("closed")
            raise

    @world.view()
    def pay() -> Response:
        world.runs.append(1)
        return Response(produce())


def test_p48_the_first_chunk_leaves_before_the_second_is_made_and_the_end_is_stored_before_it_is_sent() -> None:
    """While the stream runs, a parallel retry gets 409."""
    world, log = new_world(), list[str]()
    streaming(world, "a", "b", log=log)
    answer = begin(world)
    chunks = iter(answer)

    assert (b"a", ["a"]) == (next(chunks), log)
    assert 409 == world.post().status_code
    assert b"b" == next(chunks)
    assert State.PROCESSING is world.state()
    assert next(chunks, None) is None
    assert State.COMPLETED is world.state()
    answer.close()
    assert "ab" == world.post().text
    assert ["a", "b"] == log


def test_p49_a_client_that_closes_in_the_middle_leaves_a_tombstone() -> None:
    """The view's generator sees GeneratorExit; the part is never replayed as the whole, and the view never runs again."""
    world, log = new_world(), list[str]()
    streaming(world, "a", "b", log=log)
    answer = begin(world)
    next(iter(answer))
    answer.close()

    assert ["a", "closed"] == log
    again = world.post()
    assert (200, "response-not-kept") == (again.status_code, again.json["code"])  # type: ignore[index]
    assert [1] == world.runs


def test_p49_a_server_that_never_iterates_leaves_a_tombstone() -> None:
    """Closed without a single chunk."""
    world = new_world()
    streaming(world, "a")
    begin(world).close()

    assert "response-not-kept" == world.post().json["code"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("policy", "settled"),
    (
        ({}, "quarantine"),
        ({"effects": "deduplicated"}, "release"),
        ({"on_error": "release"}, "release"),
        ({"on_error": "keep"}, "complete"),
        ({"on_error": "quarantine"}, "quarantine"),
    ),
)
def test_p49_a_generator_that_fails_is_an_unhandled_exception(policy: dict[str, Any], settled: str) -> None:
    """The error policy decides, as for a view that raises."""
    world = new_world(**policy)
    streaming(world, "a", fail=ValueError("in the stream"))
    answer = begin(world)

    with pytest.raises(ValueError, match="in the stream"):
        list(answer)
    assert [settled] == world.settled()
    assert all(not event.kept for event in world.told(Completed))  # type: ignore[attr-defined]


class Faults(Exception):
    """As libraries collect several errors in one: without an entry it is false."""

    def __len__(self) -> int:
        return 0


def test_p49_an_error_that_is_false_is_an_error() -> None:
    """Also if a hook reads the body, and hides its error."""
    world = new_world()
    streaming(world, "a", fail=Faults())

    @world.app.after_request
    def read(response: Response) -> Response:
        with suppress(Faults):
            list(response.response)
        return response

    world.post()
    assert ["quarantine"] == world.settled()


@pytest.mark.parametrize(("effects", "settled"), (("plain", "quarantine"), ("deduplicated", "release")))
def test_p49_a_worker_killed_in_the_middle_of_a_stream_counts_as_vanished(effects: str, settled: str) -> None:
    """SystemExit in a generator is SystemExit."""
    world = new_world(effects=effects)
    streaming(world, "a", fail=SystemExit())
    answer = begin(world)

    with pytest.raises(SystemExit):
        list(answer)
    assert [settled] == world.settled()


def test_p50_a_stream_over_the_limit_reaches_its_client_whole_and_is_never_replayed_as_a_success() -> None:
    """A tombstone is left."""
    world = new_world(max_body=10)
    streaming(world, *["12345"] * 4)

    assert "12345" * 4 == world.post().text
    again = world.post()
    assert "response-not-kept" == again.json["code"]  # type: ignore[index]
    assert [1] == world.runs


def drain(response: Response) -> Response:
    response.get_data()
    return response


def wrap(response: Response) -> Response:
    """As Flask-Compress does: in a generator that never closes what it reads from."""
    source = iter(response.response)
    response.response = (chunk for chunk in source)  # type: ignore[assignment]
    return response


def replace_body(response: Response) -> Response:
    response.response = ["other"]
    return response


@pytest.mark.parametrize(
    ("hook", "read", "state"),
    (
        (drain, True, "whole"),
        (wrap, True, "whole"),
        (wrap, False, "tombstone"),
        (replace_body, True, "tombstone"),
    ),
)
def test_p51_a_hook_that_drains_wraps_or_replaces_a_stream_never_leaves_it_running(
    hook: Callable[[Response], Response], read: bool, state: str
) -> None:
    """Completed if it was exhausted, otherwise a tombstone; the next attempt settles it at the latest."""
    world = new_world()
    streaming(world, "a", "b")
    world.app.after_request(hook)
    answer = begin(world)
    if read:
        list(answer)
    answer.close()
    del answer
    gc.collect(1)
    world.app.after_request_funcs[None].remove(hook)
    again = world.post()

    assert is_replay(again)
    assert [1] == world.runs
    assert ("ab" == again.text) if state == "whole" else ("response-not-kept" in again.text)


def test_p51_a_replaced_stream_is_settled_with_its_own_request() -> None:
    """The tee is gone by then, so no other request has to come first."""
    world = new_world()
    streaming(world, "a", "b")
    world.app.after_request(replace_body)
    begin(world).close()

    assert ["complete"] == world.settled()


def test_p52_stream_with_context_settles_once() -> None:
    """Its teardown runs twice on Flask 3.1.2 and 3.1.3: neither releases nor completes anything a second time."""
    world = new_world()

    @world.view()
    def pay() -> Response:
        return Response(stream_with_context(iter(["a", flask.request.path])))

    assert "a/" == world.post().text
    assert ["complete"] == world.settled()
    assert "a/" == world.post().text


def test_p53_a_file_over_the_limit_is_left_to_the_server() -> None:
    """sendfile() needs the server's own file wrapper; a tombstone is stored. (Under gunicorn: see the server tests.)"""
    world = new_world(max_body=3)
    bodies: list[Any] = []

    @world.view()
    def download() -> Response:
        response = send_file(BytesIO(b"large"), "text/plain", etag=False)
        response.content_length = 5
        return response

    @world.app.after_request
    def look(response: Response) -> Response:
        bodies.append(response.response)
        return response

    assert b"large" == world.post().data
    assert type(bodies[0]) is FileWrapper
    assert "response-not-kept" in world.post().text


def test_p53_a_file_is_stored_before_its_last_byte_leaves() -> None:
    world = new_world()
    world.view()(lambda: send_file(BytesIO(b"a file"), "text/plain"))

    assert b"a file" == next(iter(begin(world)))
    assert State.COMPLETED is world.state()


def test_a_stream_shorter_than_announced_leaves_a_tombstone() -> None:
    """The first client saw a broken connection; a replay would look complete."""
    world = new_world()
    world.view()(lambda: Response(iter([b"one"]), headers={"Content-Length": "9"}))
    list(begin(world))

    assert "response-not-kept" in world.post().text


def test_p54_a_tee_that_dies_while_the_store_is_busy_waits_for_the_next_claim() -> None:
    """A destructor may run inside the store's own lock: it only queues, and the next claim settles."""
    world = new_world()
    streaming(world, "a", "b")
    answer = begin(world)
    next(iter(answer))
    lock = threading.Lock()
    real = world.store.complete

    def complete(*args: Any, **kwargs: Any) -> None:
        assert lock.acquire(blocking=False), "a destructor did I/O inside the store's lock"
        lock.release()
        real(*args, **kwargs)

    world.store.complete = complete  # type: ignore[method-assign]
    with lock:
        del answer  # as a server does that forgets to close it
        gc.collect(1)
    assert [] == world.settled()

    world.post(key="another")
    assert "complete" in world.settled()
    assert "response-not-kept" in world.post().text


def test_an_abandoned_stream_is_settled_only_after_a_fork_was_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a key may settle it. In a child of a fork below Python, the store must first drop its connections."""
    world, order = new_world(), list[str]()
    streaming(world, "a", "b")
    world.app.add_url_rule("/plain", view_func=lambda: "plain")
    answer = begin(world)
    next(iter(answer))
    complete = world.store.complete

    def settling(*args: Any, **kwargs: Any) -> None:
        order.append("settled")
        complete(*args, **kwargs)

    monkeypatch.setattr(world.store, "complete", settling)
    monkeypatch.setattr("flask_idempotency.engine.forks.notice", lambda: order.append("noticed"))
    del answer
    gc.collect(1)
    assert 200 == world.app.test_client().get("/plain").status_code

    assert ["noticed", "settled"] == order


def test_a_stream_leaves_no_cycle_behind() -> None:
    """Reference counting must report an abandoned body: the garbage collector may be off, or late."""
    world = new_world()
    streaming(world, "a", "b")

    def unfinished() -> list[Tee]:
        return [each for each in gc.get_objects() if isinstance(each, Tee) and each.end is None]

    of_others = len(unfinished())
    gc.disable()
    try:
        answer = begin(world)
        next(iter(answer))
        del answer
        assert of_others == len(unfinished())
    finally:
        gc.enable()


def test_a_stream_whose_status_is_released_runs_again() -> None:
    """The view's own 503, streamed."""
    world = new_world()

    @world.view()
    def pay() -> Response:
        world.runs.append(1)
        return Response(iter(["busy"]), status=503)

    world.post()
    world.post()
    assert ["release", "release"] == world.settled()
    assert [1, 1] == world.runs


def test_a_hook_that_fails_after_a_stream_was_captured_settles_by_the_failure() -> None:
    """The 500 is captured separately; the first response's stream is closed and not read on."""
    world = new_world()

    class Source:
        closed = False

        def __iter__(self) -> Iterator[str]:
            return iter(["a", "b"])

        def close(self) -> None:
            self.closed = True

    source = Source()
    world.view()(lambda: Response(source))

    @world.app.after_request
    def fail(response: Response) -> Response:
        if response.status_code == 200:
            raise ValueError
        return response

    assert 500 == world.post().status_code
    assert ["quarantine"] == world.settled()
    assert source.closed


def lost(end: StreamEnd) -> None:
    raise LeaseLost


def tee(*chunks: bytes, announced: int | None = None) -> Tee:
    return Tee(iter(chunks), limit=9, announced=announced, on_end=lost, abandoned=deque())


def test_a_lost_stream_has_no_end() -> None:
    """Every `next` raises, because the client would take StopIteration for the end of a whole response."""
    stream = tee(b"a", b"b")

    assert [b"a", b"b"] == [next(stream), next(stream)]
    for _ in range(3):
        with pytest.raises(LeaseLost):
            next(stream)


def test_a_lost_stream_of_announced_length_keeps_its_last_chunk() -> None:
    """With the last chunk, the client would have all announced bytes."""
    stream = tee(b"a", b"b", announced=2)

    assert b"a" == next(stream)
    for _ in range(3):
        with pytest.raises(LeaseLost):
            next(stream)


def superseded(length: int | None) -> World:
    """A's stream of two chunks, begun; then B takes over with "from B"."""
    world = new_world(effects="deduplicated")

    @world.view()
    def pay() -> Response:
        if current_claim.attempt == 2:
            return Response("from B")

        def produce() -> Iterator[str]:
            yield "from "
            world.clock.advance(31)
            world.runs.append(world.post())
            yield "A"

        response = Response(produce())
        if length is not None:
            response.content_length = length
        return response

    return world


@pytest.mark.parametrize(("length", "sent"), ((None, [b"from ", b"A"]), (6, [b"from "])))
def test_a_superseded_worker_breaks_its_stream_off(length: int | None, sent: list[bytes]) -> None:
    """B's response is stored, so A's is not delivered whole; A's client retries and gets B's."""
    world = superseded(length)
    answer, received = begin(world), list[bytes]()
    with pytest.raises(LeaseLost):
        received.extend(answer)
    answer.close()
    again = world.post()

    assert sent == received
    assert "from B" == world.runs[0].text
    assert is_replay(again)
    assert "from B" == again.text


def test_a_superseded_stream_that_is_closed_early_ends_without_an_error() -> None:
    """The client is gone already."""
    world = superseded(None)
    answer = begin(world)
    next(iter(answer))
    world.clock.advance(31)
    world.post()
    answer.close()

    assert "from B" == world.post().text


def test_an_abandoned_stream_is_settled_by_the_next_request_of_any_kind() -> None:
    """A quiet night may have no keyed request, but it has health checks."""
    world = new_world()
    streaming(world, "a", "b")
    world.app.get("/health")(lambda: "ok")
    answer = begin(world)
    next(iter(answer))
    del answer
    gc.collect(1)
    assert [] == world.settled()

    assert 200 == world.client().get("/health").status_code
    assert ["complete"] == world.settled()
