"""The claim happens after every hook of the application, whatever the order of setup."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, abort, jsonify, request, session
from flask.views import MethodView
from flask_login import LoginManager, UserMixin, login_required, login_user  # type: ignore[import-untyped]
from flask_restx import Api, Resource, fields  # type: ignore[import-untyped]

from flask_idempotency.engine.model import State
from flask_idempotency.extension import Idempotency
from flask_idempotency.web.policies import claim_here
from tests.apps import KEY, World, is_replay, new_world

CREDENTIALS = {"Authorization": "Bearer good"}


def require_credentials() -> None:
    if request.headers.get("Authorization") != CREDENTIALS["Authorization"]:
        abort(401)


def authenticated(view: Callable[..., Any]) -> Callable[..., Any]:
    """A typical application decorator."""

    @wraps(view)
    def checked(*args: Any, **kwargs: Any) -> Any:
        require_credentials()
        return view(*args, **kwargs)

    return checked


def with_view(world: World) -> World:
    @world.view()
    def pay() -> Any:
        world.runs.append(1)
        return {"n": len(world.runs)}, 201

    return world


@pytest.mark.parametrize("init_first", (True, False))
def test_p01_a_late_app_hook_authenticates_before_the_store_is_called(init_first: bool) -> None:
    """A retry without credentials is refused, whether the hook was registered before or after init_app."""
    world = new_world(init=init_first)
    with_view(world).app.before_request(require_credentials)
    if not init_first:
        world.idempotency.init_app(world.app)
    world.post(headers=CREDENTIALS)
    world.store.calls.clear()

    assert 401 == world.post().status_code
    assert [] == world.store.calls


@pytest.mark.parametrize("init_first", (True, False))
def test_p02_p03_app_parent_and_child_hooks_run_before_a_replay_in_that_order(init_first: bool) -> None:
    """Hooks of nested blueprints run before a replay, and equally when init_app comes last."""
    world = new_world(init=init_first)
    ran: list[str] = []
    parent, child = Blueprint("parent", __name__), Blueprint("child", __name__)

    @child.post("/pay")
    def pay() -> str:
        return "paid"

    child.before_request(lambda: ran.append("child"))
    parent.before_request(lambda: ran.append("parent"))
    parent.register_blueprint(child)
    world.app.register_blueprint(parent)
    world.app.before_request(lambda: ran.append("app"))
    if not init_first:
        world.idempotency.init_app(world.app)
    world.post("/pay")
    ran.clear()

    assert is_replay(world.post("/pay"))
    assert ["app", "parent", "child"] == ran


@pytest.mark.parametrize("where", ("app", "parent", "child"))
def test_p02_a_hook_of_any_scope_refuses_a_replay(where: str) -> None:
    """A 401 from the app's, the parent's or the child's hook replaces the stored response."""
    world = new_world()
    parent, child = Blueprint("parent", __name__), Blueprint("child", __name__)

    @child.post("/pay")
    def pay() -> str:
        return "paid"

    {"app": world.app, "parent": parent, "child": child}[where].before_request(require_credentials)
    parent.register_blueprint(child)
    world.app.register_blueprint(parent)
    with_view(world).post(key="of the application's own scope", headers=CREDENTIALS)
    world.post("/pay", headers=CREDENTIALS)
    world.store.calls.clear()

    assert 401 == world.post("/pay").status_code
    assert [] == world.store.calls


def test_p04_a_hook_added_after_the_first_keyed_request_runs_before_the_replay() -> None:
    """Extensions append to the hook lists at run time; the claim stays behind them."""
    world = with_view(new_world())
    world.post()
    world.app.before_request_funcs[None].append(require_credentials)
    world.store.calls.clear()

    assert 401 == world.post().status_code
    assert [] == world.store.calls
    assert is_replay(world.post(headers=CREDENTIALS))


def test_p05_a_hook_that_responds_leaves_no_claim() -> None:
    """Maintenance mode: nothing is claimed."""
    world = with_view(new_world())
    world.app.before_request(lambda: ("back soon", 503))

    assert 503 == world.post().status_code
    assert [] == world.store.calls


def test_p06_a_url_value_preprocessor_that_aborts_leaves_no_claim() -> None:
    """Preprocessors come before all hooks."""
    world = with_view(new_world())
    world.app.url_value_preprocessor(lambda endpoint, values: abort(404))

    assert 404 == world.post().status_code
    assert [] == world.store.calls


@pytest.mark.parametrize(
    ("method", "path", "status"),
    (
        ("POST", "/nowhere", 404),
        ("DELETE", "/", 405),
        ("OPTIONS", "/", 200),
        ("POST", "/slashed", 308),
        ("GET", "/read", 200),
        ("HEAD", "/read", 200),
    ),
)
def test_p07_p08_router_errors_and_safe_methods_never_touch_the_store(method: str, path: str, status: int) -> None:
    """404, 405, automatic OPTIONS, slash redirects, GET and HEAD: no claim, key or not."""
    world = with_view(new_world(required=True))
    world.app.get("/read", endpoint="read")(lambda: "read")
    world.view("/slashed/", endpoint="slashed")(lambda: "ok")

    assert status == world.client().open(path, method=method, headers={KEY: "k"}).status_code
    assert [] == world.store.calls


@pytest.mark.parametrize("method", ("GET", "HEAD", "POST"))
def test_p08_without_a_key_the_response_is_the_same_as_without_the_extension(method: str) -> None:
    """Status line, header list and body are equal to those of an application without the extension."""

    def answer(init: bool) -> tuple[str, list[tuple[str, str]], bytes]:
        world = new_world(init=init)
        world.app.route("/", methods=["GET", "POST"])(lambda: jsonify(a=1))
        world.post()
        response = world.client().open("/", method=method)
        return response.status, list(response.headers), response.data

    assert answer(init=False) == answer(init=True)


def test_p08_without_a_key_the_store_is_not_called() -> None:
    """An optional key that is absent costs no store call."""
    world = with_view(new_world())
    world.post(key=None)

    assert [] == world.store.calls


def test_p09_a_malformed_key_without_credentials_is_401() -> None:
    """A caller learns nothing about keys before signing in."""
    world = with_view(new_world())
    world.app.before_request(require_credentials)

    assert 401 == world.post(key="not one, but two").status_code
    assert 400 == world.post(key="not one, but two", headers=CREDENTIALS).status_code


def test_p10_a_body_is_not_read_before_authentication() -> None:
    """A stranger's upload is not spooled."""

    class Untouchable:
        def read(self, size: int = -1) -> bytes:
            raise AssertionError("the body was read")

        readline = read

    world = with_view(new_world())
    world.app.before_request(require_credentials)
    response = world.client().post(
        "/", headers={KEY: "k"}, environ_overrides={"wsgi.input": Untouchable(), "CONTENT_LENGTH": str(1 << 30)}
    )

    assert 401 == response.status_code


def test_p11_threads_that_race_the_very_first_request_do_not_slip_past_a_late_hook() -> None:
    """30 threads start together on an application that has handled no request yet; the hook rejects all of them."""
    world = with_view(new_world())
    world.app.before_request(require_credentials)
    barrier = threading.Barrier(30)
    statuses: list[int] = []

    def race() -> None:
        barrier.wait(timeout=60)
        statuses.append(world.post().status_code)

    threads = [threading.Thread(target=race) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert [401] * 30 == statuses
    assert [] == world.store.calls


class User(UserMixin):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self.id = name


def with_login(world: World) -> World:
    """Cookie sessions by Flask-Login, and a protected view with the claim below the decorator."""
    manager = LoginManager(world.app)
    manager.user_loader(User)

    @world.app.get("/login/<name>")
    def login(name: str) -> str:
        login_user(User(name))
        return "in"

    @world.view()
    @login_required  # type: ignore[untyped-decorator]
    @claim_here
    def pay() -> Any:
        world.runs.append(1)
        return {"n": len(world.runs)}, 201

    return world


def test_p12_login_required_above_claim_here_runs_on_every_retry() -> None:
    """The decorator is consulted each time, the view runs once."""
    world = with_login(new_world(principal=None))
    client = world.client()
    client.get("/login/alice")
    first = client.post("/", headers={KEY: "k"})
    again = client.post("/", headers={KEY: "k"})

    assert 201 == first.status_code
    assert is_replay(again)
    assert first.data == again.data
    assert 401 == world.post().status_code
    assert [1] == world.runs


def test_p13_claim_here_on_a_method_and_in_decorators() -> None:
    """The claim moves below the decorator in both; a method without it is claimed by the hook."""
    world = new_world()

    class OneMethod(MethodView):
        @authenticated
        @claim_here
        def post(self) -> str:
            world.runs.append("method")
            return "posted"

        def put(self) -> str:
            return "put"

    class All(MethodView):
        decorators = [claim_here, authenticated]  # noqa: RUF012 - as Flask documents it

        def post(self) -> str:
            world.runs.append("decorators")
            return "posted"

    world.app.add_url_rule("/method", view_func=OneMethod.as_view("method"))
    world.app.add_url_rule("/decorators", view_func=All.as_view("decorators"))

    for name in ("method", "decorators"):
        assert 200 == world.post(f"/{name}", key=name, headers=CREDENTIALS).status_code
        assert is_replay(world.post(f"/{name}", key=name, headers=CREDENTIALS))
        assert 401 == world.post(f"/{name}", key=name).status_code
        assert 1 == world.runs.count(name)
    world.client().put("/method", headers={KEY: "put"})
    assert is_replay(world.client().put("/method", headers={KEY: "put"}))


def test_p13_claim_here_on_an_async_view() -> None:
    """The wrapper of a coroutine function is one itself."""
    world = new_world()

    def signed_in(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        async def checked(*args: Any, **kwargs: Any) -> Any:
            require_credentials()
            return await view(*args, **kwargs)

        return checked

    @world.view()
    @signed_in
    @claim_here
    async def pay() -> str:
        world.runs.append(1)
        return "paid"

    assert 200 == world.post(headers=CREDENTIALS).status_code
    assert is_replay(world.post(headers=CREDENTIALS))
    assert 401 == world.post().status_code
    assert [1] == world.runs


def test_p14_a_decorator_without_wraps_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """The mark is hidden, so the hook claims; the first entry of @claim_here logs it, once per endpoint."""
    world = new_world()

    def unwrapped(view: Callable[..., Any]) -> Callable[..., Any]:
        return lambda: view()

    @claim_here
    def pay() -> str:
        world.runs.append(1)
        return "paid"

    world.app.add_url_rule("/", "pay", unwrapped(pay), methods=["POST"])
    world.post(key="1")
    world.post(key="2")

    assert 1 == sum("@claim_here was entered in pay" in message for message in caplog.messages)
    assert ["claim", "complete"] * 2 == world.store.verbs()


def test_p14_a_plain_view_that_calls_a_protected_one_claims_once() -> None:
    """The hook's claim stands for both."""
    world = new_world()

    @world.view("/inner")
    @claim_here
    def inner() -> str:
        return "paid"

    @world.view("/outer")
    def outer() -> Any:
        return inner()

    assert 200 == world.post("/outer").status_code
    assert ["claim", "complete"] == world.store.verbs()


def test_p15_a_marshalling_decorator_above_claim_here_does_not_marshal_a_replay_again() -> None:
    """Flask-RESTX's marshal_with would make an empty document of a Response."""
    world = new_world()
    api = Api(world.app)
    model = api.model("Payment", {"n": fields.Integer})

    @api.route("/pay")
    class Pay(Resource):  # type: ignore[misc]
        @api.marshal_with(model)  # type: ignore[untyped-decorator]
        @claim_here
        def post(self) -> Any:
            world.runs.append(1)
            return {"n": 1, "secret": 2}, 201

    first, again = world.post("/pay"), world.post("/pay")

    assert {"n": 1} == first.json
    assert is_replay(again)
    assert (first.status, first.data) == (again.status, again.data)
    assert [1] == world.runs


def test_p15_a_decorator_that_builds_on_what_the_view_returns_is_not_given_a_response() -> None:
    """The response is raised past it, not returned through it."""
    world = new_world()

    def with_links(view: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        return wraps(view)(lambda: view() | {"links": []})

    @world.view()
    @with_links
    @claim_here
    def pay() -> dict[str, Any]:
        return {"n": 1}

    first, again = world.post(), world.post()

    assert is_replay(again)
    assert {"n": 1, "links": []} == first.json == again.json


def test_p16_a_decorator_that_turns_exceptions_into_500_does_not_spoil_a_replay() -> None:
    """The stored response is put back at the capture point."""
    world = new_world()

    def never_raises(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def caught(*args: Any, **kwargs: Any) -> Any:
            try:
                return view(*args, **kwargs)
            except Exception:  # noqa: BLE001 - what such decorators do
                return "caught", 500

        return caught

    @world.view()
    @never_raises
    @claim_here
    def pay() -> tuple[str, int]:
        return "paid", 201

    first, again = world.post(), world.post()

    assert is_replay(again)
    assert (first.status, first.data) == (again.status, again.data)


def test_p17_two_users_with_one_key_and_body_get_their_own_responses() -> None:
    """The principal is part of the key; a caller without one gets no stored response."""
    world = with_login(new_world(principal=None))
    answers = {}
    for name in ("alice", "bob"):
        client = world.client()
        client.get(f"/login/{name}")
        answers[name] = [client.post("/", headers={KEY: "k"}).json for _ in range(2)]

    assert {"alice": [{"n": 1}] * 2, "bob": [{"n": 2}] * 2} == answers
    assert 401 == world.post().status_code


def test_p18_a_session_cookie_with_a_new_signature_is_the_same_user() -> None:
    """The principal is the subject, not the cookie."""
    world = with_login(new_world(principal=None))
    world.app.get("/refresh", endpoint="refresh")(lambda: str(session.setdefault("seen", 1)))
    client = world.client()
    client.get("/login/alice")
    client.post("/", headers={KEY: "k"})
    before = client.get_cookie("session")
    client.get("/refresh")

    assert before != client.get_cookie("session")
    assert is_replay(client.post("/", headers={KEY: "k"}))
    assert [1] == world.runs


@pytest.mark.parametrize("status", (401, 403, 429))
def test_p20_a_refusal_by_a_view_decorator_is_not_stored(status: int) -> None:
    """The claim came first, so it is released, and a later good attempt runs the view."""
    world = new_world()

    def refuses_at_first(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def checked() -> Any:
            if "X-Good" not in request.headers:
                abort(status)
            return view()

        return checked

    @world.view()
    @refuses_at_first
    def pay() -> str:
        return "paid"

    assert status == world.post().status_code
    assert world.state() is None
    assert 200 == world.post(headers={"X-Good": "1"}).status_code
    assert State.COMPLETED is world.state()


def test_a_form_field_may_carry_the_key_and_is_judged_after_authentication() -> None:
    """A form is parsed for its key at the claim point, and only if the policy allows it."""
    world = with_view(new_world(form_field="idempotency_key"))
    world.app.before_request(require_credentials)
    form = {"idempotency_key": "from-a-form", "amount": "5"}

    assert 401 == world.post(key=None, data=form).status_code
    assert [] == world.store.calls
    assert 201 == world.post(key=None, data=form, headers=CREDENTIALS).status_code
    assert is_replay(world.post(key=None, data=form, headers=CREDENTIALS))
    assert 201 == world.post(key=None, data={"amount": "5"}, headers=CREDENTIALS).status_code
    assert 2 == len(world.runs)


def test_disabled_installs_no_hook_at_all() -> None:
    """IDEMPOTENCY_ENABLED=False leaves the application as if the extension were not there."""
    app = Flask(__name__)
    app.config.update(SECRET_KEY="s", IDEMPOTENCY_ENABLED=False)
    Idempotency(app)

    @app.post("/")
    @claim_here
    def pay() -> Response:
        return jsonify(paid=True)

    assert not app.before_request_funcs[None]
    assert 200 == app.test_client().post("/", headers={KEY: "a,b"}).status_code
