"""A policy that cannot hold closes its own endpoint, and no other."""

from __future__ import annotations

import asyncio
import logging
from functools import wraps
from itertools import product
from typing import Any

import pytest
from flask import Blueprint, Flask, current_app
from flask.views import MethodView
from werkzeug.test import TestResponse

from flask_idempotency import ConfigurationError, Idempotency, Quota, claim_here, exempt, idempotent
from flask_idempotency.engine.events import StoreFailed
from flask_idempotency.stores.memory import MemoryStore
from tests.apps import FaultyMemory, World, new_world, run, said

WRONG: dict[str, dict[str, Any]] = {
    "transactional without its store": {"effects": "transactional"},
    "a lease longer than its view may run": {"lease": 3600},
}


def shop(*, init: bool = True, config: dict[str, Any] | None = None, **wrong: Any) -> World:
    """`wrong` is the policy of /wrong; /right, /free and /read are beside it."""
    world = new_world(init=init, config=config)

    def ran() -> str:
        world.runs.append(1)
        return "ran"

    world.view("/wrong", endpoint="wrong")(idempotent(**wrong)(lambda: ran()))
    world.view("/right", endpoint="right")(lambda: "right")
    world.view("/free", endpoint="free")(exempt(lambda: "free"))
    world.app.get("/read", endpoint="read")(lambda: "read")
    world.app.get("/wrong", endpoint="look")(lambda: "looked")
    return world


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("key", ("k", None))
def test_only_its_own_endpoint_is_closed(wrong: dict[str, Any], key: str | None) -> None:
    """With a key or without one: it never runs unprotected. All other URLs work, and replay."""
    world = shop(**wrong)

    answer = world.post("/wrong", key=key)
    others = [world.post(path, key=key).text for path in ("/right", "/right", "/free")]

    assert (500, "misconfigured", []) == (answer.status_code, answer.get_json()["code"], world.runs)
    assert ["right", "right", "free"] == others
    assert ["read", "looked"] == [world.client().get(path).text for path in ("/read", "/wrong")]
    assert 404 == world.post("/nowhere").status_code


def test_the_fault_is_shown_only_in_debug_mode() -> None:
    answers = [shop(config=config, lease=3600).post("/wrong").get_json() for config in ({}, {"TESTING": False})]

    assert ["max_runtime (900 s)" in answer["detail"] for answer in answers] == [True, False]


def test_faults_are_found_when_the_application_is_set_up_and_reported_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once; and those of views that are registered later before the first request is looked at."""
    world = shop(init=False, lease=3600)
    world.app.add_url_rule("/too", "too", idempotent(effects="transactional")(lambda: "x"), methods=["POST"])
    world.idempotency.init_app(world.app)

    (at_start,) = errors(caplog)
    assert all(f"\n  - POST {endpoint}:" in at_start for endpoint in ("wrong", "too"))
    world.app.add_url_rule("/late", "late", idempotent(lease=1800)(lambda: "x"), methods=["POST", "PUT"])
    world.post("/right")
    world.post("/right")

    (at_first,) = errors(caplog)[1:]
    assert "POST late, PUT late: max_runtime" in at_first
    assert "wrong" not in at_first


def test_what_is_configured_after_the_set_up_still_counts(caplog: pytest.LogCaptureFixture) -> None:
    """The check at set-up caches no policy: you may configure a blueprint until the first request."""
    world = new_world(init=False)
    blueprint = Blueprint("shop", __name__)
    blueprint.post("/pay", endpoint="pay")(idempotent(lease=3600)(lambda: "paid"))
    world.app.register_blueprint(blueprint)
    world.idempotency.init_app(world.app)
    world.idempotency.configure(blueprint, max_runtime=7200, required=True)

    assert [200, 400] == [world.post("/pay", key=key).status_code for key in ("k", None)]


def test_a_fault_of_two_layers_closes_the_endpoint_that_they_meet_in() -> None:
    """The application keeps what one view releases."""
    world = new_world(keep_statuses=["5xx"])
    world.view("/wrong", endpoint="wrong")(idempotent(release_statuses=[500])(lambda: "x"))
    world.view("/right", endpoint="right")(lambda: "right")

    answer = world.post("/wrong")

    assert (500, "right") == (answer.status_code, world.post("/right").text)
    assert "keep_statuses and release_statuses both name 500" in answer.get_json()["detail"]


def test_faults_of_the_whole_application_stop_the_start() -> None:
    with pytest.raises(ConfigurationError, match="max_runtime"):
        new_world(lease=3600)
    with pytest.raises(ConfigurationError, match="needs a SQL store"):
        new_world(effects="transactional")


def test_a_quota_that_nothing_counts_closes_requests_with_a_key_only(caplog: pytest.LogCaptureFixture) -> None:
    """A loader that is registered after the set-up, over a store that has no ledger. Others need no quota, and run."""
    store = FaultyMemory(MemoryStore())
    del store.ledger
    world = new_world(store=store)
    world.idempotency.quota_loader(lambda tenant: Quota(records=1))
    world.view("/pay", endpoint="pay")(lambda: "paid")
    world.app.get("/read", endpoint="read")(lambda: "read")

    keyed, free = world.post("/pay"), world.post("/pay", key=None)

    assert (500, "misconfigured", []) == (keyed.status_code, keyed.get_json()["code"], world.store.verbs())
    assert ["paid", "read"] == [free.text, world.client().get("/read").text]
    assert any("quota_loader is registered" in line for line in errors(caplog))


def test_a_schema_that_cannot_be_looked_at_closes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The check only warns. The next claim finds the same fault."""
    world = shop()
    looks = []

    def look() -> None:
        looks.append(1)
        raise RuntimeError("no such file")

    world.app.extensions["idempotency"].hooks.at_first = look

    assert ["right", "read"] == [world.post("/right").text, world.client().get("/read").text]
    assert [1] == looks
    assert not world.told(StoreFailed)
    assert "could not be looked at" in caplog.text


def test_a_view_that_nothing_can_be_known_of_closes_itself_only() -> None:
    """A view may be any object: a mock has every attribute, also `view_class`."""

    class Odd:
        view_class = "not a class"
        __name__ = "odd"

        def __call__(self) -> str:
            return "odd"

    world = shop()
    world.app.add_url_rule("/odd", "odd", Odd(), methods=["POST"])

    assert ["right", "odd"] == [world.post(path, key=path[1:]).text for path in ("/right", "/odd")]


def test_the_doctor_and_the_policy_command_show_what_is_closed() -> None:
    world = shop(lease=3600)

    (row,) = said(run(world, "policy", "wrong", "--json"))["endpoints"]
    assert row["faults"][0].startswith("max_runtime")
    assert "closed: max_runtime" in run(world, "policy", "wrong").output
    assert "POST wrong: max_runtime" in run(world, "doctor").output


def test_an_application_that_is_switched_off_closes_nothing() -> None:
    """Nothing is protected there, in so many words."""
    world = new_world(init=False, enabled=False)
    world.view()(idempotent(lease=3600)(lambda: "paid"))
    world.idempotency.init_app(world.app)

    assert "paid" == world.post().text


KEY = {"Idempotency-Key": "k"}


CONFIGS: dict[str, dict[str, Any]] = {
    "production": {},
    "testing": {"TESTING": True},
    "debug": {"DEBUG": True},
    "trapping": {"TRAP_HTTP_EXCEPTIONS": True, "PROPAGATE_EXCEPTIONS": False},
}


class Shop:
    """An application whose author forgot the extension."""

    def __init__(self, **config: Any) -> None:
        self.app = Flask("tests.web.unguarded")
        self.app.config.update(config)
        self.runs: list[str] = []

    def pay(self) -> str:
        self.runs.append("pay")
        return "paid"

    def post(self, path: str = "/", method: str = "POST", **headers: str) -> TestResponse:
        return self.app.test_client().open(path, method=method, headers=headers or KEY)


def unguarded_view(shop: Shop) -> Any:
    """A new function each time, because annotations belong to one function object."""

    def pay() -> str:
        return shop.pay()

    return pay


def assert_refused(shop: Shop, answer: TestResponse) -> None:
    assert (500, []) == (answer.status_code, shop.runs)
    problem = answer.get_json()
    assert "misconfigured" == problem["code"]
    assert "Idempotency(app)" in problem["detail"]


def test_an_idempotent_view_without_the_extension_refuses_to_run() -> None:
    """With a key or without one: so its author finds out on the first try, and no client does."""
    policies: tuple[dict[str, Any], ...] = ({"required": True}, {"effects": "marked"}, {})
    for headers, policy, config in product((KEY, {"X-None": "x"}), policies, ("production", "testing", "debug")):
        shop = Shop(**CONFIGS[config])
        shop.app.post("/")(idempotent(**policy)(unguarded_view(shop)))

        assert_refused(shop, shop.post(**headers))


def test_trapped_exceptions_let_nothing_run_either() -> None:
    shop = Shop(**CONFIGS["trapping"])
    shop.app.post("/")(idempotent(required=True)(unguarded_view(shop)))

    assert (500, []) == (shop.post().status_code, shop.runs)


def test_the_operator_finds_the_remedy_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    shop.app.post("/", endpoint="pay")(idempotent(unguarded_view(shop)))
    shop.post()

    assert "pay does not run: @idempotent or @claim_here is on its view" in caplog.text
    assert "init_app(app)" in caplog.text


def test_no_error_handler_and_no_hook_makes_it_run() -> None:
    """Neither turns the refusal into something else."""
    shop = Shop()
    shop.app.post("/")(idempotent(required=True)(unguarded_view(shop)))
    shop.app.register_error_handler(Exception, lambda error: ("fine", 200))
    shop.app.register_error_handler(500, lambda error: ("fine", 200))
    shop.app.before_request(lambda: shop.runs.append("before"))

    assert_refused(shop, shop.post())


def test_method_views_blueprints_and_wrappers_are_found() -> None:
    shop = Shop()
    blueprint = Blueprint("shop", __name__, url_prefix="/shop")

    @idempotent(required=True)
    class Marked(MethodView):
        def get(self) -> str:
            return "looked"

        def post(self) -> str:
            return shop.pay()

    class ByMethod(MethodView):
        @idempotent
        def post(self) -> str:
            return shop.pay()

        def put(self) -> str:
            return "put"

    class ByDecorators(MethodView):
        decorators = [idempotent]  # noqa: RUF012 - as Flask documents it

        def post(self) -> str:
            return shop.pay()

    marked = idempotent(unguarded_view(shop))

    @wraps(marked)
    def wrapped() -> Any:
        return marked()

    for path, rule in (("a", Marked.as_view("a")), ("b", ByMethod.as_view("b")), ("c", ByDecorators.as_view("c"))):
        blueprint.add_url_rule(f"/{path}", view_func=rule)
    blueprint.add_url_rule("/d", "d", wrapped, methods=["POST"])
    blueprint.add_url_rule("/e", "e", claim_here(unguarded_view(shop)), methods=["POST"])
    shop.app.register_blueprint(blueprint)

    for path in "abcde":
        assert_refused(shop, shop.post(f"/shop/{path}"))
    assert ["looked", "put"] == [shop.post("/shop/a", "GET").text, shop.post("/shop/b", "PUT").text]


def test_a_blueprint_that_was_configured_counts_as_annotated() -> None:
    """The author wrote a policy and forgot init_app. Its methods and exemptions still apply."""
    shop = Shop()
    blueprint, other = Blueprint("shop", __name__), Blueprint("other", __name__, url_prefix="/other")
    Idempotency().configure(blueprint, required=True, methods=["POST"])
    blueprint.post("/")(unguarded_view(shop))
    blueprint.put("/", endpoint="put")(lambda: "put")
    blueprint.post("/free", endpoint="free")(exempt(lambda: "free"))
    other.post("/")(lambda: "other")
    shop.app.register_blueprint(blueprint)
    shop.app.register_blueprint(other)

    answer = shop.post()
    assert_refused(shop, answer)
    assert "configure(" in answer.get_json()["detail"]
    assert ["put", "free", "other"] == [
        shop.post("/", "PUT").text,
        shop.post("/free").text,
        shop.post("/other/").text,
    ]


def test_what_is_exempt_unmarked_or_not_there_is_left_alone() -> None:
    shop = Shop()
    shop.app.post("/exempt", endpoint="exempt")(exempt(lambda: "exempt"))
    shop.app.post("/plain", endpoint="plain")(lambda: "plain")
    shop.app.post("/marked")(idempotent(unguarded_view(shop)))

    assert ["exempt", "plain"] == [shop.post("/exempt").text, shop.post("/plain").text]
    assert [404, 405] == [shop.post("/nowhere").status_code, shop.post("/marked", "PUT").status_code]


def test_a_test_that_calls_the_view_is_left_alone() -> None:
    """Without a context, in one, and after the hooks were run by hand: nothing was dispatched to it."""
    shop = Shop()
    pay = idempotent(required=True)(unguarded_view(shop))
    shop.app.post("/")(pay)

    assert "paid" == pay()
    with shop.app.test_request_context("/", method="POST", headers=KEY):
        shop.app.preprocess_request()
        assert "paid" == pay()
        assert "paid" == shop.app.dispatch_request()


def test_an_application_that_has_the_extension_is_left_alone() -> None:
    shop = Shop()
    shop.app.post("/")(idempotent(unguarded_view(shop)))
    Idempotency(shop.app, store="memory://", secret="what only the shop knows, and no test")

    assert ["paid", "paid"] == [shop.post().text, shop.post().text]
    assert ["pay"] == shop.runs


@pytest.mark.parametrize("installed", (True, False))
def test_an_application_that_switched_it_off_in_so_many_words_runs(installed: bool) -> None:
    shop = Shop(IDEMPOTENCY_ENABLED=False)
    shop.app.post("/")(idempotent(unguarded_view(shop)))
    if installed:
        Idempotency(shop.app, store="memory://", secret="what only the shop knows, and no test")

    assert ["paid", "paid"] == [shop.post().text, shop.post().text]


def test_of_two_applications_that_share_a_blueprint_the_one_without_it_refuses() -> None:
    """Also where one calls the other: the application that dispatches decides."""
    guarded, bare = Shop(), Shop()
    blueprint = Blueprint("shop", __name__)

    def pay() -> Any:
        current_app.config["RUNS"].append("pay")
        if current_app.config.get("INNER") is not None:
            return str(current_app.config["INNER"].test_client().post("/", headers=KEY).status_code)
        return "paid"

    blueprint.post("/")(idempotent(pay))
    for shop in (guarded, bare):
        shop.app.config["RUNS"] = shop.runs
        shop.app.register_blueprint(blueprint)
    guarded.app.config["INNER"] = bare.app
    Idempotency(guarded.app, store="memory://", secret="what only the shop knows, and no test")

    assert "500" == guarded.post().text
    assert [1, 0] == [len(guarded.runs), len(bare.runs)]


def test_an_async_view_is_refused_too() -> None:
    shop = Shop()

    @idempotent
    async def pay() -> str:
        return shop.pay()

    shop.app.post("/")(pay)
    assert_refused(shop, shop.post())
    assert "paid" == asyncio.run(pay())


@pytest.mark.parametrize("annotate", (idempotent(required=True), claim_here), ids=("idempotent", "claim_here"))
@pytest.mark.parametrize("of_class", (False, True), ids=("view", "method"))
def test_a_mark_that_a_decorator_hides_is_found(annotate: Any, of_class: bool) -> None:
    """The decorator lacks functools.wraps, and the author forgot the extension too."""
    shop = Shop()
    pay = annotate(unguarded_view(shop))

    def hiding(*_: Any) -> Any:
        return pay()

    if of_class:
        shop.app.add_url_rule("/", view_func=type("Pay", (MethodView,), {"post": hiding}).as_view("pay"))  # type: ignore[attr-defined]
    else:
        shop.app.post("/")(hiding)

    assert_refused(shop, shop.post())


def test_an_endpoint_with_a_dot_and_without_a_blueprint_is_left_alone() -> None:
    """Flask-DebugToolbar has one. Flask takes what is before the dot for a blueprint's name."""
    shop = Shop()
    idempotent(unguarded_view(shop))
    shop.app.add_url_rule("/", "_debug_toolbar.static", lambda: "static", methods=["GET", "POST"])

    assert ["static", "static"] == [shop.post("/", method).text for method in ("GET", "POST")]
