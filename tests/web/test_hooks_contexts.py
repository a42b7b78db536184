"""Flask contexts that are shared, copied, nested or kept, and the Flask behaviour that the hooks rely on."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from flask import (
    Blueprint,
    Flask,
    Response,
    after_this_request,
    copy_current_request_context,
    current_app,
    g,
    request,
)
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import LeaseExpired
from flask_idempotency.engine.model import State
from flask_idempotency.extension import Idempotency
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.web.current_claim import current_claim
from tests.apps import KEY, is_replay, new_world


@pytest.mark.parametrize("how", ("called", "thread", "failing thread"))
def test_p64_a_copied_context_that_is_popped_leaves_the_claim_alone(how: str) -> None:
    """Each popped copy runs all teardown functions while the view still runs."""
    world = new_world()
    failures: list[BaseException] = []

    @world.view()
    def pay() -> str:
        @copy_current_request_context
        def work() -> None:
            if how == "failing thread":
                raise ValueError("in the thread")

        def run() -> None:
            try:
                work()
            except ValueError as error:
                failures.append(error)

        if how == "called":
            work()
        else:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(timeout=60)
        assert ["claim"] == world.store.verbs()
        assert current_claim
        return "paid"

    assert "paid" == world.post().text
    assert ["claim", "complete"] == world.store.verbs()


def test_p65_a_nested_call_with_another_key_is_independent() -> None:
    """A view that calls its own application through the test client."""
    world = new_world()

    @world.view("/inner")
    def inner() -> str:
        world.runs.append("inner")
        return current_claim.key

    @world.view("/outer")
    def outer() -> str:
        nested = current_app.test_client().post("/inner", headers={KEY: "inner"}).text
        return f"{nested} in {current_claim.key}"

    assert "inner in outer" == world.post("/outer", key="outer").text
    assert is_replay(world.post("/outer", key="outer"))
    assert is_replay(world.post("/inner", key="inner"))
    assert ["inner"] == world.runs


def test_p65_a_nested_request_that_finishes_does_not_settle_the_outer_one() -> None:
    """A hook dispatches with its own environ, and fails afterwards: the outer response never became final."""
    world = new_world()
    world.view("/inner", endpoint="inner")(lambda: "inner")
    world.view("/outer", endpoint="outer")(lambda: "outer")

    @world.app.after_request
    def call_and_fail(response: Response) -> Response:
        if request.path == "/outer":
            environ = {**request.environ, "PATH_INFO": "/inner"}
            list(world.app(environ, lambda status, headers, exc_info=None: lambda data: None))
            raise ValueError
        return response

    assert 500 == world.post("/outer").status_code
    assert ["quarantine"] == world.settled()


def test_p65_a_view_that_returns_another_guarded_app_as_its_response() -> None:
    """It runs on the same environ; each application finds its own state in it."""
    inner, outer = new_world(), new_world(Flask("outer"))

    @inner.view()
    def inner_view() -> str:
        inner.runs.append(1)
        return current_claim.key

    outer.view()(lambda: inner.app)

    assert ["k", "k"] == [outer.post().text for _ in range(2)]
    assert [["claim", "complete"], ["claim", "complete", "claim"]] == [inner.store.verbs(), outer.store.verbs()]
    assert [1] == inner.runs


def test_p66_several_requests_in_one_application_context_do_not_leak() -> None:
    """They share `g` on Flask 3.1 and before."""
    world = new_world()
    world.view()(lambda: current_claim.key if current_claim else "none")
    with world.app.app_context():
        texts = [world.post(key=key).text for key in ("a", None, "b", "a")]

    assert ["a", "none", "b", "a"] == texts


def test_p67_a_thread_that_was_left_with_a_foreign_context_does_not_matter() -> None:
    """pallets/flask#6123, simulated: an application context stays pushed, with all that was in its `g`."""
    world = new_world()
    world.view()(lambda: str(bool(current_claim)))
    context = world.app.app_context()
    context.push()
    try:
        g.anything = "left over"
        assert ["True", "False", "True"] == [world.post(key=key).text for key in ("a", None, "b")]
    finally:
        context.pop()


def test_p68_a_preserved_context_does_not_delay_completion() -> None:
    """`with client:` keeps the context; the response is stored before it is returned, and replayed within."""
    world = new_world()
    world.view()(lambda: "paid")
    with world.client() as client:
        client.post("/", headers={KEY: "k"})
        assert State.COMPLETED is world.state()
        assert is_replay(client.post("/", headers={KEY: "k"}))
    assert ["complete"] == world.settled()


@pytest.mark.parametrize(("effects", "settled"), (("deduplicated", "release"), ("plain", "quarantine")))
def test_p69_a_context_pushed_by_hand_counts_as_vanished(effects: str, settled: str) -> None:
    """Flask does not report whether a view has run, so the key is free only if takeover is safe."""
    world = new_world(effects=effects)
    world.view()(lambda: "paid")
    with world.app.test_request_context("/", method="POST", headers={KEY: "k"}):
        assert world.app.preprocess_request() is None
        assert current_claim
    assert ["claim", settled] == world.store.verbs()


def test_p70_one_extension_on_two_applications_does_not_mix_them_up() -> None:
    """Behind a dispatcher, with one store: the namespace is part of the key."""
    store = MemoryStore()
    idempotency = Idempotency(principal=lambda: "alice", store=store, secret="s-9f2c47d1e8b35a60")
    apps = []
    for name in ("one", "two"):
        app = Flask(name)
        app.config.update(SECRET_KEY="s", TESTING=True)
        app.post("/")(lambda name=name: name)
        idempotency.init_app(app)
        apps.append(app)
    client = Client(DispatcherMiddleware(apps[0], {"/two": apps[1]}))

    for path, text in (("/", "one"), ("/two/", "two")) * 2:
        assert text == client.post(path, headers={KEY: "k"}).text


def test_p70_setting_up_one_application_twice_is_refused() -> None:
    """Two guards on one application would claim each other's keys."""
    world = new_world()

    with pytest.raises(ConfigurationError, match="once"):
        world.idempotency.init_app(world.app)


def test_p71_a_blueprint_registered_twice_has_two_scopes() -> None:
    """Each registration keeps its own hooks."""
    world = new_world()
    blueprint = Blueprint("shop", __name__)
    ran: list[str] = []

    @blueprint.post("/pay")
    def pay() -> str:
        return request.endpoint or ""

    blueprint.before_request(lambda: ran.append("hook"))
    world.app.register_blueprint(blueprint, url_prefix="/a")
    world.app.register_blueprint(blueprint, url_prefix="/b", name="other")

    for path, endpoint in (("/a/pay", "shop.pay"), ("/b/pay", "other.pay")):
        assert [endpoint] * 2 == [world.post(path, key=path).text for _ in range(2)]
    assert ["hook"] * 4 == ran


def test_p72_async_views_and_hooks() -> None:
    """Flask runs them on their own event loop; the replay is identical."""
    world = new_world(keep_headers=["X-This"])

    @world.app.before_request
    async def before() -> None:
        return None

    @world.app.after_request
    async def after(response: Response) -> Response:
        response.headers.add("X-After", "1")
        return response

    @world.view()
    async def pay() -> str:
        async def add(response: Response) -> Response:
            response.headers.add("X-This", current_claim.key)
            return response

        after_this_request(add)
        return "paid"

    first, again = world.post(), world.post()

    assert is_replay(again)
    assert (first.data, first.headers["X-This"]) == (again.data, again.headers["X-This"])
    assert ["1"] == again.headers.getlist("X-After")


def test_p73_a_dropped_application_is_collected() -> None:
    """Signals hold weak references, and the lease thread holds no application."""
    app = Flask("dropped")
    app.config.update(SECRET_KEY="s", TESTING=True)
    Idempotency(app, principal=lambda: "alice")
    app.post("/")(lambda: "paid")
    app.test_client().post("/", headers={KEY: "k"})
    dropped = weakref.ref(app)
    del app
    gc.collect()

    assert dropped() is None


def test_p73_no_cycle_keeps_a_request_alive() -> None:
    """A request that is over is freed by reference count."""
    world = new_world()
    requests: list[weakref.ref[Any]] = []

    @world.view()
    def pay() -> str:
        requests.append(weakref.ref(request._get_current_object()))  # type: ignore[attr-defined]
        return "paid"

    client = world.client()
    gc.disable()
    try:
        client.post("/", headers={KEY: "k"}, buffered=True).close()
        assert requests[0]() is None
    finally:
        gc.enable()


def test_p77_a_worker_that_lost_its_claim_delivers_the_stored_response() -> None:
    """A outlives its lease, B takes over and completes. A's client gets B's response, never A's own."""
    world = new_world(effects="deduplicated")
    answers = ["from B", "from A"]

    @world.view()
    def pay() -> Response:
        answer = answers.pop()
        if answer == "from A":
            world.clock.advance(31)
            world.runs.append(world.post())
        response = Response(answer, status=201 if answer == "from A" else 202)
        response.set_cookie("answer", answer)
        return response

    slow = world.post()

    assert "from B" == world.runs[0].text
    assert (202, "from B") == (slow.status_code, slow.text)
    assert "Set-Cookie" not in slow.headers
    assert is_replay(slow)
    assert 1 == len(world.told(LeaseExpired))
    assert "from B" == world.post().text


def test_p77_a_worker_whose_successor_still_runs_responds_409() -> None:
    """409 replaces its own response, which may contradict the successor's."""
    world = new_world(effects="deduplicated")
    entered, go_on = threading.Event(), threading.Event()
    successors: list[threading.Thread] = []

    @world.view()
    def pay() -> str:
        if current_claim.attempt == 2:
            entered.set()
            assert go_on.wait(timeout=60)
            return "from B"
        world.clock.advance(31)
        successors.append(threading.Thread(target=world.post))
        successors[0].start()
        assert entered.wait(timeout=60)
        return "from A"

    slow = world.post()
    go_on.set()
    successors[0].join(timeout=60)

    assert (409, "in-flight") == (slow.status_code, slow.json["code"])  # type: ignore[index]
    assert "Retry-After" in slow.headers
    assert "from B" == world.post().text
