"""A decorator without functools.wraps must not take a view's policy away in silence."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, update_wrapper, wraps
from typing import Any

import pytest
from flask import Flask
from flask.views import MethodView
from flask.views import View as ViewClass
from flask_restx import Api, Resource  # type: ignore[import-untyped]
from werkzeug.local import LocalProxy

from flask_idempotency import Idempotency, claim_here, exempt, idempotent
from flask_idempotency.web import policies

View = Callable[..., Any]


def closure(view: View) -> View:
    def inner(*arguments: Any, **named: Any) -> Any:
        return view(*arguments, **named)

    return inner


class Object:
    def __init__(self, view: View) -> None:
        self.view = view

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.view(*arguments, **named)


def without_dict(view: View) -> View:
    def inner() -> Any:
        return view()

    return update_wrapper(inner, view, updated=())


HIDING: dict[str, Callable[[View], View]] = {
    "closure": closure,
    "two closures": lambda view: closure(closure(view)),
    "object": Object,
    "partial": partial,
    "names only": without_dict,
    "closure over wraps": lambda view: closure(wraps(view)(lambda: view())),
}


def shop(guard: str = "all") -> Flask:
    app = Flask("shop")
    app.config.update(TESTING=True, IDEMPOTENCY_SECRET="Zk3m-8fjQwe_09xPlTnbvRsaYcdUh27L", IDEMPOTENCY_GUARD=guard)
    Idempotency(app)
    return app


IDEMPOTENT = idempotent(required=True, effects="marked")
CASES = [("all", IDEMPOTENT), ("all", exempt), ("chosen", IDEMPOTENT), ("chosen", exempt), ("chosen", claim_here)]


@pytest.mark.parametrize(("guard", "annotate"), CASES, ids=["-".join((guard, each.__name__)) for guard, each in CASES])
@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING)
def test_a_view_whose_mark_is_hidden_does_not_run(
    guard: str, annotate: Callable[[View], View], hide: Callable[[View], View]
) -> None:
    """Else `required`, `effects` and `@exempt` would be ignored: a second payment, rows without a commit, a stored token."""
    app = shop(guard)
    runs: list[str] = []

    def pay() -> str:
        runs.append("pay")
        return "paid"

    app.add_url_rule("/pay", "pay", hide(annotate(pay)), methods=["POST", "GET"])

    client = app.test_client()
    answers = [client.post("/pay", headers=headers) for headers in ({}, {"Idempotency-Key": "k"})]

    assert [500, 500] == [answer.status_code for answer in answers]
    assert "functools.wraps" in answers[0].get_data(as_text=True)
    assert runs == []


@pytest.mark.parametrize(("guard", "annotate"), CASES, ids=["-".join((guard, each.__name__)) for guard, each in CASES])
@pytest.mark.parametrize("hide", [closure, without_dict], ids=lambda each: each.__name__)
def test_a_method_of_a_class_whose_mark_is_hidden_does_not_run(
    guard: str, annotate: Callable[[View], View], hide: Callable[[View], View]
) -> None:
    app = shop(guard)
    runs: list[str] = []

    def pay(self: Any = None) -> str:
        runs.append("pay")
        return "paid"

    view = type("Pay", (MethodView,), {"post": staticmethod(hide(annotate(pay))), "put": staticmethod(lambda: "put")})
    app.add_url_rule("/pay", view_func=view.as_view("pay"))  # type: ignore[attr-defined]

    client = app.test_client()
    answers = [client.post("/pay", headers=headers) for headers in ({}, {"Idempotency-Key": "k"})]

    assert [500, 500] == [answer.status_code for answer in answers]
    assert runs == []
    assert 200 == client.put("/pay").status_code


@pytest.mark.parametrize("guard", ("all", "chosen"))
@pytest.mark.parametrize("hide", (None, closure), ids=("shown", "hidden"))
def test_a_mark_on_dispatch_request_counts(guard: str, hide: Callable[[View], View] | None) -> None:
    """A `View` that is no MethodView has no other function to annotate."""
    app = shop(guard)
    runs: list[str] = []

    class Pay(ViewClass):
        methods = ("POST",)

        def dispatch_request(self) -> str:
            runs.append("pay")
            return "paid"

    Pay.dispatch_request = idempotent(required=True)(Pay.dispatch_request)  # type: ignore[method-assign]
    if hide is not None:
        Pay.dispatch_request = hide(Pay.dispatch_request)  # type: ignore[method-assign]
    app.add_url_rule("/pay", view_func=Pay.as_view("pay"))

    client = app.test_client()
    statuses = [client.post("/pay", headers=headers).status_code for headers in ({}, *[{"Idempotency-Key": "k"}] * 2)]

    assert ([400, 200, 200] if hide is None else [500, 500, 500]) == statuses
    assert (1 if hide is None else 0) == len(runs)


@pytest.mark.parametrize("of_class", (False, True), ids=("closure", "method_decorators"))
def test_a_claim_here_that_is_made_while_the_request_is_served_does_not_run_unprotected(of_class: bool) -> None:
    """Flask-RESTX applies `method_decorators` then. Under "chosen" nothing has guarded this endpoint."""
    app = shop("chosen")
    runs: list[str] = []

    def pay() -> str:
        runs.append("pay")
        return "paid"

    if of_class:

        class Pay(Resource):  # type: ignore[misc]
            method_decorators = (claim_here,)

            def post(self) -> str:
                return pay()

        Api(app).add_resource(Pay, "/pay")
    else:
        app.add_url_rule("/pay", "pay", lambda: claim_here(pay)(), methods=["POST"])

    answer = app.test_client().post("/pay", headers={"Idempotency-Key": "k"})

    assert (500, []) == (answer.status_code, runs)


def test_a_claim_here_that_is_made_late_is_not_in_the_way_elsewhere() -> None:
    """Of other methods, of exempt views, and of a guard that has claimed before it."""
    for guard in ("all", "chosen"):
        app = shop(guard)
        app.add_url_rule("/pay", "pay", lambda: claim_here(lambda: "paid")(), methods=["GET", "POST"])
        app.add_url_rule("/free", "free", exempt(lambda: claim_here(lambda: "free")()), methods=["POST"])
        client = app.test_client()
        assert 200 == client.get("/pay").status_code
        assert 200 == client.post("/free", headers={"Idempotency-Key": "k"}).status_code
        if guard == "all":
            assert 200 == client.post("/pay", headers={"Idempotency-Key": "k"}).status_code


def test_a_view_that_calls_the_method_of_another_is_no_decorator() -> None:
    app = shop()

    class Pay(MethodView):
        @idempotent(required=True)
        def post(self) -> str:
            return "paid"

    app.add_url_rule("/pay", view_func=Pay.as_view("pay"))
    app.add_url_rule("/other", "other", partial(Pay.post, Pay()), methods=["POST"])

    assert [400, 200] == [app.test_client().post(path).status_code for path in ("/pay", "/other")]


def test_many_views_are_each_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each once for each other: an application with 1,500 views took seconds to start."""
    looked: list[Any] = []
    shown = policies._shown_by

    def counted(view: Any) -> Any:
        looked.append(view)
        return shown(view)

    monkeypatch.setattr(policies, "_shown_by", counted)
    app = shop()
    for number in range(50):
        marked = idempotent(required=True)(lambda: "paid")
        app.add_url_rule(f"/{number}", str(number), wraps(marked)(lambda: "paid"), methods=["POST"])

    assert 400 == app.test_client().post("/1").status_code
    assert len(looked) <= 4 * 50


def test_another_method_of_such_a_view_runs() -> None:
    app = shop()
    app.add_url_rule("/pay", "pay", closure(idempotent(required=True)(lambda: "paid")), methods=["POST", "GET"])

    assert app.test_client().get("/pay").status_code == 200


def test_a_view_that_calls_another_view_is_no_decorator() -> None:
    """It has a policy of its own, as before."""
    app = shop()
    pay = claim_here(idempotent(required=True)(lambda: "paid"))
    app.add_url_rule("/pay", "pay", pay, methods=["POST"])
    app.add_url_rule("/caller", "caller", closure(idempotent(lambda: "called")), methods=["GET"])
    app.add_url_rule("/other", "other", closure(pay), methods=["PUT"])

    client = app.test_client()

    assert 400 == client.post("/pay").status_code
    assert 200 == client.put("/other").status_code


def test_a_mark_above_the_decorator_is_enough() -> None:
    app = shop()
    app.add_url_rule("/pay", "pay", idempotent(required=True)(closure(lambda: "paid")), methods=["POST"])

    assert "missing-key" == app.test_client().post("/pay").json["code"]  # type: ignore[index]


def test_a_decorator_with_wraps_hides_nothing() -> None:
    app = shop()

    def decorated(view: View) -> View:
        return wraps(view)(lambda: view())

    view = decorated(idempotent(required=True)(decorated(idempotent(keep=5)(lambda: "paid"))))
    app.add_url_rule("/pay", "pay", view, methods=["POST"])

    assert 200 == app.test_client().post("/pay", headers={"Idempotency-Key": "k"}).status_code


def test_what_a_closure_holds_besides_is_left_alone() -> None:
    """A proxy without a context, an object that answers nothing, a name that is not assigned yet."""

    class Silent:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __call__(self) -> None: ...

    held: list[Any] = [LocalProxy(ContextVar[View]("unset")), Silent()]
    proxy, silent = held

    def pay() -> str:
        return "paid" if proxy is not silent else later

    app = shop()
    app.add_url_rule("/pay", "pay", idempotent(required=True)(pay), methods=["POST"])
    later = "never"

    assert 400 == app.test_client().post("/pay").status_code
