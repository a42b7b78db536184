"""Which policy applies where, and that decorators only annotate."""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from typing import Any

import pytest
from flask import Blueprint, Flask
from flask.views import MethodView

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.web.policies import Policies, claim_here, exempt, idempotent
from tests.web.apps import new_world


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
    """Each class has a mark of its own, so these two do not contradict each other."""
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
