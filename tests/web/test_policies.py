"""Which policy applies where, and that decorators only annotate."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from functools import cached_property, partial, partialmethod, singledispatchmethod, update_wrapper, wraps
from itertools import product
from typing import Any

import pytest
from flask import Blueprint, Flask, Response
from flask.testing import FlaskClient
from flask.views import MethodView
from flask.views import View as ViewClass
from flask_restx import Api, Resource  # type: ignore[import-untyped]
from werkzeug.local import LocalProxy
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, webhook
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.web import policies as module
from flask_idempotency.web.policies import Policies, claim_here, exempt, idempotent
from tests.apps import new_world


def policies(app: Flask, overrides: Any = None, **base: Any) -> Policies:
    return Policies(app, base=base, overrides=overrides or {})


def test_decorators_return_the_very_function() -> None:
    """A view stays directly callable, and what it was."""

    def view() -> str:
        return "paid"

    assert view is idempotent(view)
    assert view is idempotent(required=True)(view)
    assert exempt(other := lambda: "x") is other
    assert "paid" == view()


def test_claim_here_outside_a_request_calls_the_view() -> None:
    """The one wrapper, and it is transparent; its name and marks are the view's."""

    @claim_here
    @idempotent(required=True)
    def view(number: int) -> int:
        return number + 1

    assert (3, "view") == (view(2), view.__name__)


def test_layers_merge_from_the_application_to_the_method() -> None:
    """The innermost that names a value decides it, value by value."""
    app = Flask(__name__)
    parent, child = Blueprint("parent", __name__), Blueprint("child", __name__)

    @idempotent(keep=4, lease=4, wait=4, max_body=4)
    class Pay(MethodView):
        decorators = [idempotent(lease=5, wait=5, max_body=5)]  # noqa: RUF012 - as Flask documents it

        @idempotent(wait=6, max_body=6)
        def post(self) -> str:
            return "posted"

        def put(self) -> str:
            return "put"

    child.add_url_rule("/pay", view_func=Pay.as_view("pay"))
    parent.register_blueprint(child)
    app.register_blueprint(parent)
    overrides = {
        parent: {"max_key_length": 2, "max_runtime": 99.0, "keep": 2.0},
        child: {"max_runtime": 77.0, "keep": 3.0},
    }
    resolver = policies(app, overrides, key_format="uuid", max_key_length=1)
    post, put = (resolver.resolve("parent.child.pay", method).policy for method in ("POST", "PUT"))

    assert ("uuid", 2, 77.0, 4.0, 5.0) == (
        post.key_format,
        post.max_key_length,
        post.max_runtime,
        post.keep,
        post.lease,
    )
    assert (6.0, 6, 5.0, 5) == (post.wait, post.max_body, put.wait, put.max_body)


def test_what_was_written_outside_beats_a_profile_that_is_named_inside() -> None:
    """At any layer: in the application, a blueprint, or a view."""
    app = Flask(__name__)
    shop = Blueprint("shop", __name__)
    view = idempotent(profile="stripe", release_statuses=[402])(lambda: "x")
    shop.add_url_rule("/pay", "pay", view, methods=["POST"])
    app.register_blueprint(shop)
    policy = policies(app, {shop: {"keep": 5.0}}, on_error="release").resolve("shop.pay", "POST").policy

    assert ("stripe", "release", 5.0) == (policy.profile, policy.on_error, policy.keep)
    assert frozenset(range(200, 500)) - {402} == policy.keep_statuses


def test_a_resolution_is_made_once() -> None:
    """A dict lookup in the steady state."""
    app = Flask(__name__)
    app.post("/")(idempotent(keep=1)(lambda: "x"))
    resolver = policies(app)
    endpoint = next(iter(set(app.view_functions) - {"static"}))

    assert resolver.resolve(endpoint, "POST") is resolver.resolve(endpoint, "POST")


def test_looking_fixes_nothing() -> None:
    """Who describes a policy before the application has configured it must not freeze it for real requests."""
    app, shop = Flask(__name__), Blueprint("shop", __name__)
    shop.post("/")(lambda: "x")
    app.register_blueprint(shop)
    endpoint = next(name for name in app.view_functions if name != "static")
    overrides: dict[Blueprint, Any] = {}
    resolver = Policies(app, base={}, overrides=overrides)

    before = resolver.look(endpoint, "POST").policy.keep, resolver.explain(endpoint, "POST").resolved.policy.keep
    overrides[shop] = {"keep": 60.0}

    assert (86400.0, 86400.0) == before
    assert 60.0 == resolver.resolve(endpoint, "POST").policy.keep


def test_looking_shows_what_requests_got() -> None:
    app = Flask(__name__)
    app.post("/", endpoint="pay")(lambda: "x")
    resolver = policies(app)

    assert resolver.resolve("pay", "POST") is resolver.look("pay", "POST")


def configured(extension: Idempotency, blueprint: Blueprint) -> Flask:
    """Return an application with this blueprint, before its first request."""
    app = Flask(__name__)
    app.config.update(TESTING=True, IDEMPOTENCY_SECRET="s")
    app.register_blueprint(blueprint)
    extension.init_app(app)
    return app


def test_a_policy_does_not_change_after_the_first_request() -> None:
    """Some views would keep the policy that they were resolved with, and others not."""
    extension, shop = Idempotency(), Blueprint("shop", __name__)
    shop.post("/")(lambda: "x")
    extension.configure(shop, keep=60)
    app = configured(extension, shop)
    extension.configure(shop, keep=70)
    app.test_client().post("/")

    with pytest.raises(ConfigurationError, match=r"configure\('shop'\).*first request"):
        extension.configure(shop, keep=80)
    extension.configure(shop, keep=70)
    policy = app.extensions["idempotency"].policies.look("shop.<lambda>", "POST").policy

    assert 70.0 == policy.keep


def test_another_blueprint_can_be_configured_for_the_next_application() -> None:
    """One object serves several applications, and a factory configures each in turn."""
    extension, first, second = Idempotency(), Blueprint("first", __name__), Blueprint("second", __name__)
    app = configured(extension, first)
    app.test_client().post("/")

    extension.configure(second, keep=60)

    assert app is not configured(extension, second)


def test_a_mark_survives_decorators_that_use_wraps() -> None:
    """And no closure is searched: a view that merely calls a marked one has no mark."""
    app = Flask(__name__)

    @claim_here
    @idempotent(required=True)
    def marked() -> str:
        return "x"

    @wraps(marked)
    def wrapped() -> Any:
        return marked()

    def caller() -> Any:
        return marked()

    app.add_url_rule("/wrapped", "wrapped", wrapped, methods=["POST"])
    app.add_url_rule("/caller", "caller", caller, methods=["POST"])
    resolver = policies(app)
    of = {name: resolver.resolve(name, "POST") for name in ("wrapped", "caller")}

    assert (True, True) == (of["wrapped"].deferred, of["wrapped"].policy.required)
    assert (False, False) == (of["caller"].deferred, of["caller"].policy.required)


def test_the_outermost_of_two_annotations_wins_value_by_value() -> None:
    """As for any pair of decorators."""
    app = Flask(__name__)

    @idempotent(keep=2)
    @idempotent(keep=1, lease=5)
    def view() -> str:
        return "x"

    app.add_url_rule("/", "view", view, methods=["POST"])
    policy = policies(app).resolve("view", "POST").policy

    assert (2.0, 5.0) == (policy.keep, policy.lease)


def test_classes_inherit_marks_and_lay_their_own_over_them() -> None:
    """A subclass that names one value keeps its parent's others."""
    app = Flask(__name__)

    @idempotent(keep=1, lease=1)
    class Parent(MethodView):
        def post(self) -> str:
            return "x"

    @idempotent(keep=2)
    class Child(Parent):
        pass

    app.add_url_rule("/p", view_func=Parent.as_view("parent"))
    app.add_url_rule("/c", view_func=Child.as_view("child"))
    resolver = policies(app)
    found = [(p.keep, p.lease) for p in (resolver.resolve(name, "POST").policy for name in ("parent", "child"))]

    assert [(1.0, 1.0), (2.0, 1.0)] == found


def test_a_subclass_of_an_exempt_class_may_be_guarded() -> None:
    """Each class has its own mark, so these two do not contradict each other."""
    app = Flask(__name__)

    @exempt
    class Parent(MethodView):
        def post(self) -> str:
            return "x"

    @idempotent
    class Child(Parent):
        pass

    app.add_url_rule("/p", view_func=Parent.as_view("parent"))
    app.add_url_rule("/c", view_func=Child.as_view("child"))
    resolver = policies(app)

    assert [True, False] == [resolver.resolve(name, "POST").exempt for name in ("parent", "child")]


def test_exempt_is_decided_by_the_innermost_that_says_anything() -> None:
    """A class may be exempt and one of its methods not."""
    app = Flask(__name__)

    @exempt
    class Pay(MethodView):
        @idempotent
        def post(self) -> str:
            return "x"

        def put(self) -> str:
            return "x"

    app.add_url_rule("/", view_func=Pay.as_view("pay"))
    resolver = policies(app)

    assert [False, True] == [resolver.resolve("pay", method).exempt for method in ("POST", "PUT")]


def test_an_exempt_view_never_touches_the_store() -> None:
    """Whatever key it is sent."""
    world = new_world(required=True)
    world.view()(exempt(lambda: "paid"))

    assert [200, 200] == [world.post(key=key).status_code for key in ("a, b", None)]
    assert [] == world.store.calls


def test_methods_out_of_scope_are_exempt() -> None:
    """PUT is natively idempotent for an application that says so."""
    app = Flask(__name__)
    app.put("/", endpoint="put")(lambda: "x")

    assert policies(app, methods=frozenset({"POST"})).resolve("put", "PUT").exempt


def test_both_marks_on_one_function_are_refused() -> None:
    """One of them must be a mistake, and it is not for us to say which."""
    with pytest.raises(ConfigurationError, match="both @idempotent and @exempt"):
        exempt(idempotent(lambda: "x"))
    with pytest.raises(ConfigurationError, match="both @idempotent and @exempt"):
        idempotent(exempt(lambda: "x"))


def test_values_are_checked_where_they_are_written() -> None:
    """The error names the view."""

    def pay() -> str:
        return "x"

    with pytest.raises(ConfigurationError, match=r"test_policies\..*pay.*keeep.*Did you mean"):
        idempotent(keeep=1)(pay)
    assert idempotent(keep=timedelta(days=1))(pay) is pay


def test_claim_here_on_a_class_is_refused() -> None:
    """A class is does not call a class."""
    with pytest.raises(ConfigurationError, match="does not call a class"):
        claim_here(MethodView)


def test_a_blueprint_registered_twice_is_configured_by_object() -> None:
    """Under each of its names."""
    world = new_world()
    blueprint = Blueprint("shop", __name__)
    blueprint.post("/pay", endpoint="pay")(lambda: "x")
    world.idempotency.configure(blueprint, required=True)
    world.app.register_blueprint(blueprint, url_prefix="/a")
    world.app.register_blueprint(blueprint, url_prefix="/b", name="other")

    assert [400, 400] == [world.post(f"/{name}/pay", key=None).status_code for name in ("a", "b")]


def test_all_faults_of_all_endpoints_are_reported_together() -> None:
    """With the endpoints that have them; an exempt one has none."""
    app = Flask(__name__)
    long_lease = idempotent(lease=3600)
    app.add_url_rule("/a", "a", long_lease(lambda: "x"), methods=["POST"])
    app.add_url_rule("/b", "b", long_lease(lambda: "x"), methods=["POST", "PUT"])
    app.add_url_rule("/c", "c", idempotent(lease=60, max_runtime=1)(lambda: "x"), methods=["PATCH"])
    app.add_url_rule("/d", "d", exempt(lambda: "x"), methods=["POST"])

    first, second = policies(app).faults()
    assert first.startswith("POST a, POST b, PUT b: max_runtime (900 s)")
    assert second.startswith("PATCH c: max_runtime")


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


class Slots:
    __slots__ = ("view",)

    def __init__(self, view: View) -> None:
        self.view = view

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.view(*arguments, **named)


def of_class(view: View) -> View:
    """The policy is on the method of a class, and no decorator above `as_view` shows it."""

    class Pay(MethodView):
        post = staticmethod(view)

    return closure(Pay.as_view("pay"))


def of_bound(view: View) -> View:
    class Shop:
        pay = staticmethod(view)

        @wraps(view)
        def bound(self) -> Any:
            return self.pay()

    return closure(Shop().bound)


HIDING: dict[str, Callable[[View], View]] = {
    "closure": closure,
    "two closures": lambda view: closure(closure(view)),
    "object": Object,
    "partial": partial,
    "names only": without_dict,
    "slots": Slots,
    "class": of_class,
    "bound method": of_bound,
    "object in a closure": lambda view: closure(type("Pay", (), {"__call__": wraps(view)(lambda self: view())})()),
    "closure over wraps": lambda view: closure(wraps(view)(lambda: view())),
}


def hiding_shop(guard: str = "all") -> Flask:
    app = Flask("shop")
    app.config.update(TESTING=True, IDEMPOTENCY_SECRET="Zk3m-8fjQwe_09xPlTnbvRsaYcdUh27L", IDEMPOTENCY_GUARD=guard)
    Idempotency(app)
    return app


IDEMPOTENT = idempotent(required=True, effects="marked")


HIDDEN: dict[str, tuple[Callable[[View], View], ...]] = {
    "all": (IDEMPOTENT, exempt),
    "chosen": (IDEMPOTENT, exempt, claim_here),
}


def noting(runs: list[str]) -> View:
    def pay() -> str:
        runs.append("pay")
        return "paid"

    return pay


def served(client: FlaskClient, path: str) -> list[TestResponse]:
    return [client.post(path, headers=headers) for headers in ({}, {"Idempotency-Key": "k"})]


@pytest.mark.parametrize("guard", ("all", "chosen"))
def test_a_view_whose_mark_is_hidden_does_not_run(guard: str) -> None:
    """Else `required`, `effects` and `@exempt` would be ignored: a second payment, rows without a commit, a stored token."""
    app, runs = hiding_shop(guard), list[str]()
    views = {
        f"/{name}{n}": hide(mark(noting(runs))) for name, hide in HIDING.items() for n, mark in enumerate(HIDDEN[guard])
    }
    for path, view in views.items():
        app.add_url_rule(path, path.replace(".", ""), view, methods=["POST", "GET"])
    client = app.test_client()

    for path in views:
        answers = served(client, path)
        assert [500, 500] == [answer.status_code for answer in answers], path
        assert "functools.wraps" in answers[0].get_data(as_text=True), path
    assert runs == []


@pytest.mark.parametrize("guard", ("all", "chosen"))
def test_a_method_of_a_class_whose_mark_is_hidden_does_not_run(guard: str) -> None:
    app, runs = hiding_shop(guard), list[str]()
    paths = []
    for hide, (number, mark) in product((closure, without_dict), enumerate(HIDDEN[guard])):
        paths.append(f"/{hide.__name__}{number}")
        post = staticmethod(hide(mark(noting(runs))))
        view: Any = type("Pay", (MethodView,), {"post": post, "put": staticmethod(lambda: "put")})
        app.add_url_rule(paths[-1], view_func=view.as_view(paths[-1]))
    client = app.test_client()

    for path in paths:
        assert [500, 500] == [answer.status_code for answer in served(client, path)], path
        assert 200 == client.put(path).status_code, path
    assert runs == []


def of_object(pay: View) -> View:
    class Pay:
        @IDEMPOTENT
        def __call__(self) -> Any:
            return pay()

    return Pay()


def of_base(pay: View) -> View:
    return type("Inherits", (type(of_object(pay)),), {})()  # type: ignore[no-any-return]


def of_annotated_classes(pay: View) -> View:
    @idempotent(required=True)
    class Base: ...

    @idempotent(effects="marked")
    class Pay(Base):
        @staticmethod
        def __call__() -> Any:
            return pay()

    return Pay()


def of_instance(pay: View) -> View:
    return IDEMPOTENT(Object(pay))


def of_bound_method(pay: View) -> View:
    class Shop:
        @IDEMPOTENT
        def pay(self) -> Any:
            return pay()

        @classmethod
        @IDEMPOTENT
        def of_class(cls) -> Any:
            return pay()

    return Shop().pay


def of_class_method(pay: View) -> View:
    return of_bound_method(pay).__self__.of_class  # type: ignore[attr-defined, no-any-return]


def of_init(pay: View) -> View:
    class Paid(Response):
        @IDEMPOTENT
        def __init__(self) -> None:
            super().__init__(pay())

    return Paid


@pytest.mark.parametrize("guard", ("all", "chosen"))
def test_a_view_that_is_an_object_has_the_policy_of_what_is_called(guard: str) -> None:
    app, runs = hiding_shop(guard), list[str]()
    made = (of_object, of_base, of_annotated_classes, of_instance, of_bound_method, of_class_method, of_init)
    names = [make.__name__ for make in made]
    for make in made:
        app.add_url_rule(f"/{make.__name__}", make.__name__, make(noting(runs)), methods=["POST"])
    client = app.test_client()

    for name in names:
        statuses = [client.post(f"/{name}").status_code]
        statuses += [client.post(f"/{name}", headers={"Idempotency-Key": name}).status_code for _ in range(2)]
        assert ([400, 200, 200], ["pay"]) == (statuses, runs), name
        assert "marked" == app.extensions["idempotency"].policies.resolve(name, "POST").policy.effects, name
        runs.clear()


@pytest.mark.parametrize("guard", ("all", "chosen"))
def test_a_method_that_replaces_an_annotated_one_needs_an_annotation(guard: str) -> None:
    """Else it takes the place of a guarded payment, and runs again."""

    class Taken(MethodView):
        @IDEMPOTENT
        def post(self) -> str:
            return "paid"

    def replacing(**more: Any) -> View:
        return type("Replaces", (Taken,), more).as_view("pay")  # type: ignore[attr-defined, no-any-return]

    views = {
        "bare": replacing(post=lambda self: "paid"),
        "annotated": replacing(post=IDEMPOTENT(lambda self: "paid")),
        "wraps": replacing(post=wraps(Taken.post)(lambda self: "paid")),
        "class": IDEMPOTENT(type("Replaces", (Taken,), {"post": lambda self: "paid"})).as_view("pay"),  # type: ignore[attr-defined]
        "exempt": replacing(post=exempt(lambda self: "paid")),
        "other": replacing(put=lambda self: "put"),
    }
    app = hiding_shop(guard)
    for name, view in views.items():
        app.add_url_rule(f"/{name}", name, view, methods=["POST"])
    answers = {name: app.test_client().post(f"/{name}") for name in views}

    assert {"bare": 500, "annotated": 400, "wraps": 400, "class": 400, "exempt": 200, "other": 400} == {
        name: answer.status_code for name, answer in answers.items()
    }
    assert "Taken.post is annotated" in answers["bare"].get_data(as_text=True)


@pytest.mark.parametrize("guard", ("all", "chosen"))
def test_a_helper_of_the_class_that_is_annotated_closes_the_view(guard: str) -> None:
    """A request calls `post`, and its policy is on another method."""
    app = hiding_shop(guard)

    class Pay(MethodView):
        def post(self) -> str:
            return self.charge()

        @IDEMPOTENT
        def charge(self) -> str:
            return "paid"

    app.add_url_rule("/pay", view_func=Pay.as_view("pay"))

    assert 500 == app.test_client().post("/pay").status_code


class Uncarried:
    __slots__ = ()

    def __call__(self) -> str:
        return "paid"

    def pay(self) -> str:
        return "paid"


UNCARRIED: dict[str, Callable[[View], Any]] = {
    "staticmethod": staticmethod,
    "classmethod": classmethod,
    "property": property,
    "cached_property": cached_property,
    "partialmethod": partialmethod,
    "singledispatchmethod": singledispatchmethod,
    "method": lambda view: Uncarried().pay,
    "slots": lambda view: Uncarried(),
    "builtin": lambda view: print,
    "blueprint": lambda view: Blueprint("shop", __name__),
    "value": lambda view: "pay",
}


@pytest.mark.parametrize("annotate", (IDEMPOTENT, idempotent, exempt, webhook("acme", key="/id")))
@pytest.mark.parametrize("made", UNCARRIED.values(), ids=UNCARRIED)
def test_what_cannot_carry_an_annotation_is_refused(made: Callable[[View], Any], annotate: Any) -> None:
    """A request finds nothing on it, and would run unguarded."""
    with pytest.raises(ConfigurationError, match="cannot carry an annotation"):
        annotate(made(lambda: "paid"))


def test_a_descriptor_below_claim_here_is_refused() -> None:
    call: Callable[..., Any] = str
    made: Any
    for made in (staticmethod, classmethod, property, cached_property, partialmethod):
        with pytest.raises(ConfigurationError, match="directly above the function"):
            claim_here(made(call))


@pytest.mark.parametrize("guard", ("all", "chosen"))
@pytest.mark.parametrize("hide", (None, closure), ids=("shown", "hidden"))
def test_a_mark_on_dispatch_request_counts(guard: str, hide: Callable[[View], View] | None) -> None:
    """A `View` that is no MethodView has no other function to annotate."""
    app = hiding_shop(guard)
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
    app = hiding_shop("chosen")
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
        app = hiding_shop(guard)
        app.add_url_rule("/pay", "pay", lambda: claim_here(lambda: "paid")(), methods=["GET", "POST"])
        app.add_url_rule("/free", "free", exempt(lambda: claim_here(lambda: "free")()), methods=["POST"])
        client = app.test_client()
        assert 200 == client.get("/pay").status_code
        assert 200 == client.post("/free", headers={"Idempotency-Key": "k"}).status_code
        if guard == "all":
            assert 200 == client.post("/pay", headers={"Idempotency-Key": "k"}).status_code


def test_a_view_that_calls_the_method_of_another_is_no_decorator() -> None:
    app = hiding_shop()

    class Pay(MethodView):
        @idempotent(required=True)
        def post(self) -> str:
            return "paid"

    app.add_url_rule("/pay", view_func=Pay.as_view("pay"))
    app.add_url_rule("/other", "other", partial(Pay.post, Pay()), methods=["POST"])

    assert [400, 200] == [app.test_client().post(path).status_code for path in ("/pay", "/other")]


def test_each_of_many_views_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each once for each other: an application with 1,500 views took seconds to start."""
    looked: list[Any] = []
    shown = module._shown_by

    def counted(view: Any) -> Any:
        looked.append(view)
        return shown(view)

    monkeypatch.setattr(module, "_shown_by", counted)
    app = hiding_shop()
    for number in range(50):
        marked = idempotent(required=True)(lambda: "paid")
        app.add_url_rule(f"/{number}", str(number), wraps(marked)(lambda: "paid"), methods=["POST"])

    assert 400 == app.test_client().post("/1").status_code
    assert len(looked) <= 4 * 50


def test_another_method_of_such_a_view_runs() -> None:
    app = hiding_shop()
    app.add_url_rule("/pay", "pay", closure(idempotent(required=True)(lambda: "paid")), methods=["POST", "GET"])

    assert app.test_client().get("/pay").status_code == 200


def test_a_view_that_calls_another_view_is_no_decorator() -> None:
    """It has its own policy."""
    app = hiding_shop()
    pay = claim_here(idempotent(required=True)(lambda: "paid"))
    app.add_url_rule("/pay", "pay", pay, methods=["POST"])
    app.add_url_rule("/caller", "caller", closure(idempotent(lambda: "called")), methods=["GET"])
    app.add_url_rule("/other", "other", closure(pay), methods=["PUT"])

    client = app.test_client()

    assert 400 == client.post("/pay").status_code
    assert 200 == client.put("/other").status_code


def test_a_mark_above_the_decorator_is_enough() -> None:
    app = hiding_shop()
    app.add_url_rule("/pay", "pay", idempotent(required=True)(closure(lambda: "paid")), methods=["POST"])

    assert "missing-key" == app.test_client().post("/pay").json["code"]  # type: ignore[index]


def test_a_decorator_with_wraps_hides_nothing() -> None:
    app = hiding_shop()

    def decorated(view: View) -> View:
        return wraps(view)(lambda: view())

    view = decorated(idempotent(required=True)(decorated(idempotent(keep=5)(lambda: "paid"))))
    app.add_url_rule("/pay", "pay", view, methods=["POST"])

    assert 200 == app.test_client().post("/pay", headers={"Idempotency-Key": "k"}).status_code


def test_other_objects_in_a_closure_are_ignored() -> None:
    """A proxy without a context, an object that answers nothing, a name that is not assigned yet."""

    class Silent:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __call__(self) -> None: ...

    held: list[Any] = [LocalProxy(ContextVar[View]("unset")), Silent()]
    proxy, silent = held

    def pay() -> str:
        return "paid" if proxy is not silent else later

    app = hiding_shop()
    app.add_url_rule("/pay", "pay", idempotent(required=True)(pay), methods=["POST"])
    later = "never"

    assert 400 == app.test_client().post("/pay").status_code
