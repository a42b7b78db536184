"""`flask idempotency policy`: which policy applies to which endpoint, and where each value was written."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from flask import Blueprint, Flask
from flask.views import MethodView

from flask_idempotency import Idempotency, claim_here, exempt, idempotent
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import StillUnknown
from tests.apps import World, new_world, refusal, run, said


def decide(response: Any, exception: Any) -> None:
    """Leaves it to the other rules."""


@idempotent(lease=41, effects="marked")
class Orders(MethodView):
    """Its methods differ."""

    decorators = [idempotent(wait=42)]  # noqa: RUF012 - as Flask documents it

    def get(self) -> str:
        return "an order"

    @idempotent(max_body=43)
    def post(self) -> str:
        return "ordered"

    def put(self) -> str:
        return "changed"

    @exempt
    def delete(self) -> str:
        return "gone"


def shop(**settings: Any) -> World:
    world = new_world(
        Flask("tests.web.app"),
        config={"IDEMPOTENCY_LEASE": 20, "IDEMPOTENCY_KEEP": 999, "IDEMPOTENCY_PROFILE": "playbook"},
        keep=100,
        **settings,
    )
    outer, inner = Blueprint("outer", __name__), Blueprint("inner", __name__)
    world.idempotency.configure(outer, profile="stripe", required=True, max_key_length=64)
    world.idempotency.configure(inner, lease=31.0, on_abandoned="takeover")

    @inner.post("/charge")
    @claim_here
    @idempotent(keep_statuses=["2xx", 404], decide=decide, ignore_fields=["/sent_at"])
    def charge() -> str:
        return "charged"

    @world.app.route("/", methods=["GET", "POST", "PATCH"])
    def pay() -> str:
        return "paid"

    world.app.get("/look")(lambda: "looked")
    outer.register_blueprint(inner)
    world.app.register_blueprint(outer)
    world.app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    world.idempotency.resolver("pay")(lambda unknown: StillUnknown())
    return world


def origins(world: World, endpoint: str, method: str = "POST") -> dict[str, str]:
    for row in said(run(world, "policy", endpoint, "--json"))["endpoints"]:
        if method in row["methods"]:
            return {name: value["from"] for name, value in row["policy"].items()}
    raise AssertionError(f"{method} {endpoint} was left out")


def test_the_table_has_a_line_for_each_endpoint_and_what_differs_by_method() -> None:
    """Methods that are never in scope are left out, and endpoints that have no others."""
    lines = [" ".join(line.split()) for line in run(shop(), "policy", "--wide").output.splitlines()]

    assert [
        "endpoint methods required effects on abandoned keep lease profile resolver",
        "orders DELETE no marked - 1 min 40 s 41 s playbook - exempt",
        "orders POST no marked taken over, or quarantined past its point 1 min 40 s 41 s playbook -",
        "orders PUT no marked taken over, or quarantined past its point 1 min 40 s 41 s playbook -",
        "outer.inner.charge POST yes plain taken over 1 min 40 s 31 s stripe - claimed in the view",
        "pay PATCH,POST no plain quarantined 1 min 40 s 20 s playbook yes",
    ] == lines


def test_the_table_leaves_out_what_is_rarely_needed() -> None:
    lines = [" ".join(line.split()) for line in run(shop(), "policy").output.splitlines()]

    assert "endpoint methods required effects on abandoned" == lines[0]
    assert "orders DELETE no marked - exempt" == lines[1]
    assert "pay PATCH,POST no plain quarantined" == lines[-1]


def test_each_value_comes_from_where_it_was_written() -> None:
    """The innermost that names it; what a profile brings is the profile's."""
    told = origins(shop(), "outer.inner.charge")
    expected = {
        "required": "configure('outer')",
        "profile": "configure('outer')",
        "max_key_length": "configure('outer')",
        "replayed_header": "profile stripe, of configure('outer')",
        "keep": "Idempotency(keep=…)",
        "on_error": "profile stripe, of configure('outer')",
        "header": "profile stripe, of configure('outer')",
        "lease": "configure('inner')",
        "on_abandoned": "configure('inner')",
        "wait": "default",
    }

    assert expected == {name: told[name] for name in expected}
    assert told["keep_statuses"] == told["decide"] == told["ignore_fields"]
    assert told["decide"].startswith(f"@idempotent on {__name__}.shop.")


def test_a_profile_says_which_of_its_statuses_the_application_has_settled() -> None:
    """They are less than the profile brings, and the reader is told why."""
    world = shop()
    refund = Blueprint("refund", __name__)
    world.idempotency.configure(refund, profile="stripe", on_error="release")
    refund.post("/refund", endpoint="pay")(idempotent(release_statuses=[402])(lambda: "refunded"))
    world.app.register_blueprint(refund)
    (row,) = said(run(world, "policy", "refund.pay", "--json"))["endpoints"]
    kept = row["policy"]["keep_statuses"]

    assert "profile stripe, of configure('refund'), less what release_statuses and on_error decides" == kept["from"]
    assert sorted({*range(200, 500)} - {402}) == kept["value"]
    assert "configure('refund')" == row["policy"]["on_error"]["from"]
    assert row["policy"]["release_statuses"]["from"].startswith("@idempotent on")


def test_a_lease_that_max_runtime_shortens_says_so() -> None:
    """A written lease says where it was written, also if it is shorter than the profile's."""
    world = new_world()
    for name, values in {"brief": {"max_runtime": 120}, "written": {"lease": 60}}.items():
        world.view(f"/{name}", endpoint=name)(idempotent(profile="x-idempotency", **values)(lambda: "done"))
    brief, written = origins(world, "brief")["lease"], origins(world, "written")["lease"]

    assert brief.startswith("profile x-idempotency, of @idempotent on")
    assert brief.endswith(", shortened to max_runtime")
    assert written.startswith("@idempotent on")
    assert "shortened" not in written


def test_what_an_application_says_comes_from_its_configuration_or_its_code() -> None:
    """The code goes before the configuration."""
    told = origins(shop(), "pay")

    assert {
        "lease": "configuration IDEMPOTENCY_LEASE",
        "keep": "Idempotency(keep=…)",
        "profile": "configuration IDEMPOTENCY_PROFILE",
        "replayed_header": "profile playbook, of configuration IDEMPOTENCY_PROFILE",
        "required": "default",
    } == {name: told[name] for name in ("lease", "keep", "profile", "replayed_header", "required")}


def test_what_a_class_says_comes_from_the_class_its_decorators_or_its_method() -> None:
    world = shop()
    orders = f"{__name__}.Orders"

    assert {
        "lease": f"@idempotent on {orders}",
        "wait": f"@idempotent on the decorators of {orders}",
        "max_body": f"@idempotent on {orders}.post",
    } == {name: origins(world, "orders")[name] for name in ("lease", "wait", "max_body")}
    assert "default" == origins(world, "orders", "PUT")["max_body"]


def test_every_value_has_an_origin_and_is_what_the_guard_goes_by() -> None:
    world = shop()
    resolve = world.app.extensions["idempotency"].policies.resolve

    for row in said(run(world, "policy", "--json"))["endpoints"]:
        for method in row["methods"]:
            resolved = resolve(row["endpoint"], method)
            assert {field.name for field in fields(Policy)} == set(row["policy"])
            assert all(value["from"] for value in row["policy"].values())
            assert (resolved.policy.lease, sorted(resolved.policy.methods), resolved.exempt, resolved.deferred) == (
                row["policy"]["lease"]["value"],
                row["policy"]["methods"]["value"],
                row["exempt"],
                row["deferred"],
            )


def test_one_endpoint_is_told_value_by_value() -> None:
    """As it would be written down."""
    told = run(shop(), "policy", "outer.inner.charge").output
    values = {line.split()[0]: " ".join(line.split()[1:]) for line in told.splitlines()}

    assert told.startswith(
        "outer.inner.charge POST: a vanished worker's key is taken over; a failed view's is kept with its response; has no "
        "resolver; claimed in the view\n"
    )
    assert values["keep_statuses"].startswith("200-299, 404 @idempotent on")
    assert values["decide"].startswith("tests.cli.test_policy.decide @idempotent on")
    assert values["ignore_fields"].startswith("/sent_at @idempotent on")
    assert "Idempotent-Replayed: true profile stripe, of configure('outer')" == values["replayed_header"]
    assert "yes configure('outer')" == values["required"]
    assert "- default" == values["form_field"]


def test_a_resolver_is_named_by_its_endpoint() -> None:
    told = run(shop(), "policy", "pay").output

    assert told.startswith(
        "pay PATCH,POST: a vanished worker's key is quarantined; a failed view's is released; calls its resolver\n"
    )
    assert "on_abandoned by effects default" in " ".join(told.split())


def test_an_endpoint_that_is_not_there_is_refused_and_one_out_of_scope_says_so() -> None:
    world = shop()
    (look,) = (rule.endpoint for rule in world.app.url_map.iter_rules() if rule.rule == "/look")

    assert "has no such endpoint" in refusal(run(world, "policy", "nowhere"))
    assert "No method is in scope" in (told := run(world, "policy", look)).output
    assert 0 == told.exit_code


def test_an_application_that_is_switched_off_has_no_policies() -> None:
    world = new_world(Flask("tests.web.app"), init=False)
    Idempotency(world.app, enabled=False, secret="s-9f2c47d1e8b35a60")

    assert "IDEMPOTENCY_ENABLED is False" in refusal(run(world, "policy"))


def test_no_store_is_asked() -> None:
    """It may be run where there is none."""
    world = shop()
    world.store.down = True

    assert 0 == run(world, "policy").exit_code


def test_inboxes_are_listed_below_the_endpoints() -> None:
    world = shop()
    world.idempotency.inbox("billing", effects="marked", max_attempts=3)
    world.idempotency.resolver("inbox:billing")(lambda unknown: StillUnknown())
    (listed,) = said(run(world, "policy", "--json"))["messages"]

    assert ("inbox:billing", True, "takeover") == (listed["operation"], listed["resolver"], listed["abandoned"])
    assert ("later", 3, 262144, 604800.0) == tuple(
        listed["policy"][name] for name in ("in_flight", "max_attempts", "max_result", "keep")
    )
    assert "methods" not in listed["policy"]
    assert "inbox:billing" in run(world, "policy").output.splitlines()[-1]
    assert "max_result" in run(world, "policy", "inbox:billing").output
    assert [] == said(run(world, "policy", "inbox:billing", "--json"))["endpoints"]
    assert "--app" in refusal(run(world, "policy", "inbox:mail"))


def test_a_table_shows_the_form_field_and_how_long_a_duplicate_waits() -> None:
    """Only if an endpoint has one."""
    world = new_world(Flask("tests.web.app"))
    world.app.post("/plain", endpoint="plain")(lambda: "done")
    assert {"form field", "waits"} & set(re.split(r"  +", run(world, "policy").output.splitlines()[0])) == set()

    world = new_world(Flask("tests.web.app"))
    world.app.post("/plain", endpoint="plain")(lambda: "done")
    world.app.post("/form", endpoint="form")(
        idempotent(form_field="order_key", in_flight="wait", wait=7)(lambda: "done")
    )
    head, form, plain = (re.split(r"  +", line.strip()) for line in sorted(run(world, "policy").output.splitlines()))

    rows = [dict(zip(head, row, strict=False)) for row in (form, plain)]
    assert [("order_key", "7 s"), ("-", "-")] == [(row["form field"], row["waits"]) for row in rows]
