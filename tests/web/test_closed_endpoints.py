"""A policy that cannot hold closes its own endpoint, and no other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from flask import Blueprint

from flask_idempotency import ConfigurationError, Quota, exempt, idempotent
from flask_idempotency.engine.events import StoreFailed
from flask_idempotency.stores.memory import MemoryStore
from tests.web.apps import FaultyMemory, World, new_world
from tests.web.cases import run, said

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


def test_the_fault_is_told_to_developers_and_to_nobody_else() -> None:
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
    """Looking for faults at the set-up settles nothing: a blueprint may be configured until the first request."""
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


def test_faults_of_the_whole_application_are_still_refused_at_once() -> None:
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
    """It is looked at once, to tell of it; what is wrong there, the next claim finds too."""
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
    """Whatever somebody registers as a view: a mock has every attribute, a class among them."""

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
