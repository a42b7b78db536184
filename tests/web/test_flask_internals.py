"""What of Flask's inside the hooks rely on: one test each, so that a Flask that changes it says which.

If one of these fails: claim in an instance wrap of `dispatch_request`, capture in `after_this_request` (flask-hooks.md).
"""

from __future__ import annotations

from typing import Any

import pytest
from flask import (
    Blueprint,
    Flask,
    Response,
    after_this_request,
    copy_current_request_context,
    got_request_exception,
    request,
    request_finished,
)
from werkzeug.exceptions import HTTPException

from flask_idempotency.web.request_state import context


@pytest.fixture
def app() -> Flask:
    app = Flask(__name__)
    app.config.update(SECRET_KEY="s", TESTING=True, PROPAGATE_EXCEPTIONS=False)
    app.post("/", endpoint="root")(lambda: "view")
    return app


@pytest.mark.parametrize("name", ("before_request_funcs", "after_request_funcs", "teardown_request_funcs"))
def test_hooks_are_lists_by_scope(app: Flask, name: str) -> None:
    """{scope: [function]}; None is the application, a blueprint has its full dotted name."""
    decorator = name.removesuffix("_funcs")
    parent, child = Blueprint("parent", __name__), Blueprint("child", __name__)

    def hook(*passed_on: Any) -> Any:
        return passed_on[0] if passed_on else None

    for scope in (app, parent, child):
        getattr(scope, decorator)(hook)
    parent.register_blueprint(child)
    app.register_blueprint(parent)

    assert {None: [hook], "parent": [hook], "parent.child": [hook]} == getattr(app, name)


def test_a_before_hook_appended_by_a_before_hook_runs_in_the_same_request(app: Flask) -> None:
    """The list is iterated as it stands, not a copy of it."""
    ran: list[str] = []

    @app.before_request
    def append() -> None:
        if not ran:
            ran.append("first")
            app.before_request_funcs[None].append(lambda: ran.append("appended"))

    app.test_client().post("/")
    assert ["first", "appended"] == ran


def test_hook_lists_may_be_appended_to_after_the_first_request(app: Flask) -> None:
    """Only the setup methods refuse."""
    app.test_client().post("/")
    app.before_request_funcs[None].append(lambda: "hook")

    assert "hook" == app.test_client().post("/").text


def test_the_last_after_request_hook_of_the_innermost_scope_runs_first_behind_after_this_request(app: Flask) -> None:
    """And teardown runs in the same direction."""
    ran: list[str] = []
    blueprint = Blueprint("shop", __name__)

    def note(name: str) -> Any:
        def hook(passed_on: Any) -> Any:
            ran.append(name)
            return passed_on

        return hook

    @blueprint.post("/shop")
    def view() -> str:
        after_this_request(note("after_this_request"))
        return "view"

    for name in ("one", "two"):
        blueprint.after_request(note(f"blueprint {name}"))
        app.after_request(note(f"app {name}"))
        blueprint.teardown_request(note(f"teardown blueprint {name}"))
        app.teardown_request(note(f"teardown app {name}"))
    app.register_blueprint(blueprint)
    app.test_client().post("/shop")

    inner_first = ["blueprint two", "blueprint one", "app two", "app one"]
    assert ["after_this_request", *inner_first, *(f"teardown {name}" for name in inner_first)] == ran


def test_request_finished_comes_after_the_session_is_saved(app: Flask) -> None:
    """And before the response starts, so that it can still be changed in place."""
    ran: list[str] = []
    save = app.session_interface.save_session

    def saving(*args: Any) -> None:
        ran.append("saved")
        save(*args)

    def finished(sender: Flask, response: Response) -> None:
        ran.append("finished")
        response.status = "202 Changed"

    app.session_interface.save_session = saving  # type: ignore[assignment, method-assign]
    with request_finished.connected_to(finished, app):
        response = app.test_client().post("/")

    assert ["saved", "finished"] == ran
    assert "202 Changed" == response.status


def test_request_finished_is_not_sent_when_an_after_request_hook_keeps_failing(app: Flask) -> None:
    """The functions run twice, the exception is signalled in between, and teardown is told of it."""
    ran: list[str] = []

    @app.after_request
    def fail(response: Response) -> Response:
        ran.append(f"after {response.status_code}")
        raise ValueError

    app.teardown_request(lambda error: ran.append(f"teardown {type(error).__name__}"))

    def finished(sender: Flask, response: Response) -> None:
        ran.append("finished")

    def signalled(sender: Flask, exception: BaseException) -> None:
        ran.append("signalled")

    with request_finished.connected_to(finished, app), got_request_exception.connected_to(signalled, app):
        assert 500 == app.test_client().post("/").status_code
    assert ["after 200", "signalled", "after 500", "teardown ValueError"] == ran


def test_an_http_exception_without_a_code_passes_all_error_handlers(app: Flask) -> None:
    """How an answer gets past the decorators above @claim_here."""
    app.register_error_handler(Exception, lambda error: "handled")
    app.register_error_handler(HTTPException, lambda error: "handled")

    @app.post("/raise")
    def view() -> str:
        raise HTTPException(response=Response("answer", 202))

    response = app.test_client().post("/raise")
    assert (202, "answer") == (response.status_code, response.text)


def test_a_copied_context_shares_the_environ_and_is_another_context(app: Flask) -> None:
    """And popping it runs all teardown functions."""
    seen: list[Any] = []
    torn: list[int] = []

    @app.post("/copy")
    def view() -> str:
        @copy_current_request_context
        def inner() -> None:
            seen.append((request.environ, id(context.get(None))))

        inner()
        seen.append((request.environ, id(context.get(None))))
        return str(len(torn))

    app.teardown_request(lambda error: torn.append(id(context.get(None))))

    assert "1" == app.test_client().post("/copy").text
    assert seen[0][0] is seen[1][0]
    assert seen[0][1] != seen[1][1]
    assert [seen[0][1], seen[1][1]] == torn


def test_the_context_variable_leads_to_the_request_and_its_application(app: Flask) -> None:
    """`_cv_request` on Flask 3.0 and 3.1, `_cv_app` from 3.2 on."""
    assert context.get(None) is None
    with app.test_request_context("/"):
        assert context.get().request is request._get_current_object()  # type: ignore[attr-defined]
        assert context.get().app is app


def test_what_the_router_refuses_is_known_to_hooks(app: Flask) -> None:
    """Neither 404 nor 405 nor a slash redirect has a rule."""
    seen: list[tuple[str, bool]] = []
    app.post("/slashed/", endpoint="slashed")(lambda: "x")
    app.before_request(lambda: seen.append((request.path, request.url_rule is None)))
    for path in ("/", "/nowhere", "/slashed"):
        app.test_client().post(path)
    app.test_client().delete("/")

    assert [("/", False), ("/nowhere", True), ("/slashed", True), ("/", True)] == seen


def test_an_aborts_response_comes_as_a_stream_of_known_length(app: Flask) -> None:
    """What `capture` buffers."""
    seen: list[tuple[bool, bool]] = []

    @app.post("/abort")
    def view() -> str:
        raise HTTPException(response=Response("answer"))

    @app.after_request
    def look(response: Response) -> Response:
        seen.append((response.is_sequence, response.content_length is not None))
        return response

    app.test_client().post("/abort")
    assert [(False, True)] == seen
