"""What is stored of a response, and that every other hook runs once on a replay."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Callable
from typing import Any

import brotli  # type: ignore[import-untyped]
import pytest
from cachelib import FileSystemCache
from flask import (
    Blueprint,
    Flask,
    Response,
    abort,
    after_this_request,
    g,
    got_request_exception,
    make_response,
    request,
    session,
)
from flask_compress import Compress
from flask_cors import CORS
from flask_limiter import Limiter
from flask_session import Session  # type: ignore[import-untyped]
from flask_talisman import Talisman  # type: ignore[import-untyped]

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.events import RecordCorrupt, ReplayServed
from flask_idempotency.engine.model import State, StoredResponse
from tests.apps import KEY, is_replay, new_world


def test_p21_a_request_id_and_timing_occur_once_and_fresh_on_a_replay() -> None:
    """Headers of after_request hooks belong to the exchange, not to the stored response."""
    world = new_world()
    ids = itertools.count(1)
    world.view()(lambda: "paid")

    @world.app.after_request
    def stamp(response: Response) -> Response:
        response.headers.add("X-Request-Id", str(next(ids)))
        response.headers.add("Server-Timing", "app;dur=1")
        return response

    world.post()
    again = world.post()

    assert is_replay(again)
    assert ["2"] == again.headers.getlist("X-Request-Id")
    assert 1 == len(again.headers.getlist("Server-Timing"))


@pytest.mark.parametrize("app_scope_first", (True, False))
def test_p22_headers_that_blueprint_and_app_hooks_add_are_counted_once(app_scope_first: bool) -> None:
    """The capture stands in the innermost scope, also after a key was used in the app's own."""
    world = new_world()
    blueprint = Blueprint("shop", __name__)
    values = itertools.count(1)

    def add(name: str) -> Callable[[Response], Response]:
        def hook(response: Response) -> Response:
            response.headers.add(name, str(next(values)))
            response.headers.add("Vary", name)
            return response

        return hook

    blueprint.after_request(add("X-Bp"))
    world.app.after_request(add("X-App"))
    blueprint.post("/pay")(lambda: "paid")
    world.view("/app", endpoint="app")(lambda: "app")
    world.app.register_blueprint(blueprint)
    if app_scope_first:
        world.post("/app", key="another")
    first, again = world.post("/pay"), world.post("/pay")

    assert is_replay(again)
    for name in ("X-Bp", "X-App"):
        assert 1 == len(again.headers.getlist(name))
        assert first.headers[name] != again.headers[name]
    assert sorted(first.headers.getlist("Vary")) == sorted(again.headers.getlist("Vary"))


def test_p23_headers_of_after_this_request_functions_are_each_sent_once() -> None:
    """Fields of the view, of nested functions and of a before hook: kept once, cookies never stored."""
    world = new_world(keep_headers=["X-Depth"])

    @world.app.before_request
    def language() -> None:
        @after_this_request
        def remember(response: Response) -> Response:
            response.set_cookie("lang", "en")
            response.headers.add("X-Depth", "before")
            return response

    def deeper(depth: int) -> None:
        @after_this_request
        def add(response: Response) -> Response:
            response.headers.add("X-Depth", str(depth))
            if depth < 3:
                deeper(depth + 1)
            return response

    @world.view()
    def pay() -> Response:
        deeper(1)
        response = make_response("paid")
        response.set_cookie("from", "view")
        return response

    first, again = world.post(), world.post()

    assert is_replay(again)
    assert ["before", "1", "2", "3"] == first.headers.getlist("X-Depth") == again.headers.getlist("X-Depth")
    assert ["lang=en; Path=/"] == again.headers.getlist("Set-Cookie")
    assert 2 == len(first.headers.getlist("Set-Cookie"))


def neighbours(app: Flask, tmp_path: Any) -> None:
    """Every extension that shares the request."""
    CORS(app, origins="https://shop.example")
    Compress(app)
    Talisman(app, force_https=False)
    Limiter(lambda: "one", app=app, default_limits=["100/minute"], headers_enabled=True, storage_uri="memory://")
    app.config.update(SESSION_TYPE="cachelib", SESSION_CACHELIB=FileSystemCache(str(tmp_path)))
    Session(app)


def test_p22_a_hook_added_at_run_time_also_runs_once_on_each_replay() -> None:
    """The capture moved behind it, and the earlier one does not capture again."""
    world = new_world()
    world.view()(lambda: "paid")
    world.post(key="the first of all")
    values = itertools.count(1)

    def add(response: Response) -> Response:
        response.headers.add("Link", f"<{next(values)}>")
        return response

    world.app.after_request_funcs[None].append(add)

    assert [["<1>"], ["<2>"]] == [world.post().headers.getlist("Link") for _ in range(2)]


@pytest.mark.parametrize("init_first", (True, False))
@pytest.mark.filterwarnings("ignore::DeprecationWarning:flask_session", "ignore:.*flask_limiter.*")
def test_p24_neighbouring_extensions_see_a_replay_as_they_saw_the_response(init_first: bool, tmp_path: Any) -> None:
    """No header twice and an equal decoded body, set up in either order."""
    world = new_world(init=init_first)
    neighbours(world.app, tmp_path)
    if not init_first:
        world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> dict[str, str]:
        session["paid"] = True
        return {"text": "paid " * 400}

    headers = {KEY: "k", "Accept-Encoding": "gzip", "Origin": "https://shop.example"}
    first, again = (world.client().post("/", headers=headers) for _ in range(2))

    assert is_replay(again)
    assert gzip.decompress(first.data) == gzip.decompress(again.data)
    assert sorted({*first.headers.keys()} - {"Set-Cookie"}) == sorted(
        {*again.headers.keys()} - {"Idempotency-Replayed", "Cache-Control", "Set-Cookie"}
    )
    assert [] == [name for name, _ in again.headers if len(again.headers.getlist(name)) > 1]
    assert "98" == again.headers["X-RateLimit-Remaining"]


def test_p25_a_retry_that_accepts_another_coding_gets_its_own() -> None:
    """The stored response is the one before Flask-Compress."""
    world = new_world()
    Compress(world.app)
    text = "paid " * 400
    world.view()(lambda: Response(text, mimetype="text/plain"))
    first = world.post(headers={"Accept-Encoding": "br"})
    again = world.post(headers={"Accept-Encoding": "identity"})

    assert text.encode() == brotli.decompress(first.data)
    assert is_replay(again)
    assert text == again.text
    assert "Content-Encoding" not in again.headers


def test_p26_a_hook_that_rewrites_the_body_rewrites_a_replay_once() -> None:
    """It gets the same input on the replay as on the first response."""
    world = new_world()
    world.view()(lambda: "paid")

    @world.app.after_request
    def wrap(response: Response) -> Response:
        response.set_data(b"<" + response.get_data() + b">")
        return response

    assert ["<paid>", "<paid>"] == [world.post().text for _ in range(2)]


def test_p27_a_new_response_of_after_this_request_is_the_one_that_is_stored() -> None:
    """The capture comes after all of them."""
    world = new_world()

    @world.view()
    def pay() -> str:
        after_this_request(lambda response: Response("another", status=202))
        return "paid"

    world.post()
    again = world.post()

    assert is_replay(again)
    assert (202, "another") == (again.status_code, again.text)


@pytest.mark.parametrize("effects", ("plain", "deduplicated"))
@pytest.mark.parametrize("scope", ("app", "blueprint"))
def test_p28_a_failing_after_request_hook_completes_no_key(scope: str, effects: str) -> None:
    """The client gets 500 for a failed commit. The view's effect is unknown; if effects allow it, a retry runs."""
    world = new_world(effects=effects)
    blueprint = Blueprint("shop", __name__)

    @blueprint.post("/pay")
    def pay() -> str:
        world.runs.append(1)
        return "paid"

    def commit(response: Response) -> Response:
        if len(world.runs) == 1 and response.status_code == 200:
            raise ValueError("no commit")
        return response

    {"app": world.app, "blueprint": blueprint}[scope].after_request(commit)
    world.app.register_blueprint(blueprint)

    assert 500 == world.post("/pay").status_code
    if effects == "plain":
        assert ["quarantine"] == world.settled()
        assert (409, [1]) == (world.post("/pay").status_code, world.runs)
    else:
        assert ["release"] == world.settled()
        assert (200, [1, 1]) == (world.post("/pay").status_code, world.runs)


@pytest.mark.parametrize("status", (409, 429, 500, 503, 307))
@pytest.mark.parametrize(("effects", "settled"), (("plain", "quarantine"), ("deduplicated", "release")))
def test_p28_a_hook_that_replaces_a_success_does_not_undo_it(status: int, effects: str, settled: str) -> None:
    """A view's own 503 releases its key. A hook's 503 comes after the view has done its work."""
    world = new_world(effects=effects)
    world.view()(lambda: ("paid", 201))
    world.app.after_request(lambda response: make_response("no", status))

    assert status == world.post().status_code
    assert [settled] == world.settled()


@pytest.mark.parametrize("answered", (401, 503))
def test_p28_a_hook_that_rewords_a_refusal_of_the_view_leaves_it_a_refusal(answered: int) -> None:
    world = new_world()
    world.view()(lambda: ("no", answered))
    world.app.after_request(lambda response: make_response("no", 503))

    assert 503 == world.post().status_code
    assert ["release"] == world.settled()


@pytest.mark.parametrize("late", ("after_request", "after_this_request"))
@pytest.mark.parametrize("page", (200, 500, 503))
def test_p28_a_hook_that_aborts_after_the_view_has_failed(late: str, page: int) -> None:
    """Flask treats it as an unhandled error, and its page may have any status."""
    world = new_world()
    world.app.register_error_handler(500, lambda error: ("sorry", page))

    @world.view()
    def pay() -> str:
        world.runs.append(1)
        if late == "after_this_request":
            after_this_request(lambda response: abort(503))
        return "paid"

    @world.app.after_request
    def look(response: Response) -> Response:
        if late == "after_request" and response.get_data(as_text=True) == "paid":
            abort(503)
        return response

    assert page == world.post().status_code
    assert "quarantine" == world.settled()[-1]
    assert (409, [1]) == (world.post().status_code, world.runs)


def test_p28_under_keep_the_500_of_a_failed_hook_is_stored() -> None:
    """Never the success that the client did not receive."""
    world = new_world(on_error="keep")
    world.view()(lambda: "paid")
    world.app.after_request(lambda response: make_response("no commit", 500))
    world.post()

    record = world.record()
    assert record is not None
    assert record.payload is not None
    assert (500, False) == (record.payload.status, record.payload.success)


def test_p29_a_session_that_cannot_be_saved_completes_no_key() -> None:
    """save_session comes after all hooks, and may fail as well."""
    world = new_world(effects="deduplicated")

    @world.view()
    def pay() -> str:
        world.runs.append(1)
        if len(world.runs) == 1:
            session["unserialisable"] = object()
        return "paid"

    assert 500 == world.post().status_code
    assert ["release"] == world.settled()
    assert 200 == world.post().status_code


def test_p30_another_extensions_failing_teardown_does_not_undo_a_success() -> None:
    """The response was stored before; the retry replays it."""
    world = new_world(config={"PROPAGATE_EXCEPTIONS": True})
    world.view()(lambda: "paid")
    failing = [True]

    @world.app.teardown_request
    def fail(error: BaseException | None) -> None:
        if failing:
            raise ValueError(failing.pop())

    with pytest.raises(ValueError, match="True"):
        world.post()

    assert is_replay(world.post())


def test_p30_another_extensions_failing_teardown_does_not_keep_a_crash_from_being_settled() -> None:
    """Flask stops at the first teardown function that raises, so ours is the first."""
    world = new_world(config={"PROPAGATE_EXCEPTIONS": True})

    @world.view()
    def pay() -> str:
        raise ValueError("crash")

    @world.app.teardown_request
    def fail(error: BaseException | None) -> None:
        raise LookupError("teardown")

    with pytest.raises(LookupError):
        world.post()

    assert ["quarantine"] == world.settled()


@pytest.mark.parametrize("verb", ("complete", "release"))
def test_p31_a_store_that_fails_at_the_end_does_not_cost_the_client_its_response(verb: Any) -> None:
    """The work is done; the record stays claimed and the write is repeated."""
    world = new_world()
    world.view()(lambda: ("paid", 201 if verb == "complete" else 503))
    world.store.lose_request(verb)

    assert "paid" == world.post().text
    assert State.PROCESSING is world.state()


def test_p31_a_store_with_a_bug_does_not_cost_the_client_its_response(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does an error that no store should raise; the log has it."""
    world = new_world()
    world.view()(lambda: "paid")

    def broken(*args: Any, **kwargs: Any) -> None:
        raise TypeError("a bug")

    world.store.complete = broken  # type: ignore[method-assign]

    assert "paid" == world.post().text
    assert "could not be settled" in caplog.text


def test_p33_a_principal_loader_that_leaves_the_session_alone_adds_no_vary_cookie() -> None:
    """Merely touching the session would."""
    world = new_world()
    world.view()(lambda: "paid")

    assert [None, None] == [world.post().headers.get("Vary") for _ in range(2)]


def test_p34_hooks_of_others_run_on_a_replay_as_for_any_request() -> None:
    """after_request and teardown run, got_request_exception is not sent."""
    world = new_world()
    world.view()(lambda: "paid")
    ran: list[str] = []

    def note(sender: Any, exception: BaseException) -> None:
        ran.append("exception")

    @world.app.after_request
    def after(response: Response) -> Response:
        ran.append("after")
        return response

    world.app.teardown_request(lambda error: ran.append("teardown"))
    world.post()
    ran.clear()
    with got_request_exception.connected_to(note, world.app):
        world.post()

    assert ["after", "teardown"] == ran


@pytest.mark.parametrize("text", ("a\r\nSet-Cookie: x=y", "a\nb", "a\0b"))
def test_p55_a_stored_header_that_would_split_the_response_is_never_sent(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program wrote to the store: 500, reported as corrupt; neither the header nor a second run."""
    world = new_world()

    @world.view()
    def pay() -> str:
        world.runs.append(1)
        return "paid"

    world.post()
    poisoned = StoredResponse(200, metadata=(("Link", text),), body=b"paid")
    monkeypatch.setattr(EnvelopeCodec, "open", lambda self, *sealed: poisoned)
    again = world.post()

    assert 500 == again.status_code
    assert text not in again.headers.getlist("Link")
    assert (1, 0) == (len(world.told(RecordCorrupt)), len(world.told(ReplayServed)))
    assert [1] == world.runs


def test_hooks_see_g_of_their_own_request_on_a_replay() -> None:
    """The extension stores nothing in `g`."""
    world = new_world()
    world.view()(lambda: "paid")
    world.app.before_request(lambda: setattr(g, "started", request.headers["X-At"]))
    world.app.after_request(lambda response: response.headers.update({"X-Started": g.started}) or response)

    assert ["1", "2"] == [world.post(headers={"X-At": at}).headers["X-Started"] for at in ("1", "2")]
