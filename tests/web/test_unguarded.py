"""Annotated views in an application that has no extension: they refuse to run, and nothing else changes."""

from __future__ import annotations

import asyncio
from functools import wraps
from typing import Any

import pytest
from flask import Blueprint, Flask, current_app
from flask.views import MethodView
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, claim_here, exempt, idempotent

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


def view(shop: Shop) -> Any:
    """A function of its own: annotations belong to one function object."""

    def pay() -> str:
        return shop.pay()

    return pay


def assert_refused(shop: Shop, answer: TestResponse) -> None:
    assert (500, []) == (answer.status_code, shop.runs)
    problem = answer.get_json()
    assert "misconfigured" == problem["code"]
    assert "Idempotency(app)" in problem["detail"]


@pytest.mark.parametrize("config", ("production", "testing", "debug"))
@pytest.mark.parametrize("policy", ({"required": True}, {"effects": "marked"}, {}))
@pytest.mark.parametrize("headers", (KEY, {"X-None": "x"}))
def test_an_idempotent_view_without_the_extension_refuses_to_run(
    config: str, policy: dict[str, Any], headers: dict[str, str]
) -> None:
    """With a key or without one: so its author finds out on the first try, and no client does."""
    shop = Shop(**CONFIGS[config])
    shop.app.post("/")(idempotent(**policy)(view(shop)))

    assert_refused(shop, shop.post(**headers))


def test_trapped_exceptions_let_nothing_run_either() -> None:
    shop = Shop(**CONFIGS["trapping"])
    shop.app.post("/")(idempotent(required=True)(view(shop)))

    assert (500, []) == (shop.post().status_code, shop.runs)


def test_the_operator_finds_the_remedy_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    shop.app.post("/", endpoint="pay")(idempotent(view(shop)))
    shop.post()

    assert "pay does not run: @idempotent or @claim_here is on its view" in caplog.text
    assert "init_app(app)" in caplog.text


def test_no_error_handler_and_no_hook_makes_it_run() -> None:
    """Neither turns the refusal into something else."""
    shop = Shop()
    shop.app.post("/")(idempotent(required=True)(view(shop)))
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

    marked = idempotent(view(shop))

    @wraps(marked)
    def wrapped() -> Any:
        return marked()

    for path, rule in (("a", Marked.as_view("a")), ("b", ByMethod.as_view("b")), ("c", ByDecorators.as_view("c"))):
        blueprint.add_url_rule(f"/{path}", view_func=rule)
    blueprint.add_url_rule("/d", "d", wrapped, methods=["POST"])
    blueprint.add_url_rule("/e", "e", claim_here(view(shop)), methods=["POST"])
    shop.app.register_blueprint(blueprint)

    for path in "abcde":
        assert_refused(shop, shop.post(f"/shop/{path}"))
    assert ["looked", "put"] == [shop.post("/shop/a", "GET").text, shop.post("/shop/b", "PUT").text]


def test_a_blueprint_that_was_configured_counts_as_annotated() -> None:
    """Somebody wrote a policy for it, and forgot init_app. What it says of methods and of exemptions holds."""
    shop = Shop()
    blueprint, other = Blueprint("shop", __name__), Blueprint("other", __name__, url_prefix="/other")
    Idempotency().configure(blueprint, required=True, methods=["POST"])
    blueprint.post("/")(view(shop))
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
    shop.app.post("/marked")(idempotent(view(shop)))

    assert ["exempt", "plain"] == [shop.post("/exempt").text, shop.post("/plain").text]
    assert [404, 405] == [shop.post("/nowhere").status_code, shop.post("/marked", "PUT").status_code]


def test_a_test_that_calls_the_view_is_left_alone() -> None:
    """Without a context, in one, and after the hooks were run by hand: nothing was dispatched to it."""
    shop = Shop()
    pay = idempotent(required=True)(view(shop))
    shop.app.post("/")(pay)

    assert "paid" == pay()
    with shop.app.test_request_context("/", method="POST", headers=KEY):
        shop.app.preprocess_request()
        assert "paid" == pay()
        assert "paid" == shop.app.dispatch_request()


def test_an_application_that_has_the_extension_is_left_alone() -> None:
    shop = Shop()
    shop.app.post("/")(idempotent(view(shop)))
    Idempotency(shop.app, store="memory://", secret="what only the shop knows, and no test")

    assert ["paid", "paid"] == [shop.post().text, shop.post().text]
    assert ["pay"] == shop.runs


@pytest.mark.parametrize("installed", (True, False))
def test_an_application_that_switched_it_off_in_so_many_words_runs(installed: bool) -> None:
    shop = Shop(IDEMPOTENCY_ENABLED=False)
    shop.app.post("/")(idempotent(view(shop)))
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
    pay = annotate(view(shop))

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
    idempotent(view(shop))
    shop.app.add_url_rule("/", "_debug_toolbar.static", lambda: "static", methods=["GET", "POST"])

    assert ["static", "static"] == [shop.post("/", method).text for method in ("GET", "POST")]
