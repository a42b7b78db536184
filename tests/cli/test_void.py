"""`flask idempotency void`: an operator voids a client's key, and not one whose request ran or may have an effect."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flask_idempotency import idempotent
from flask_idempotency.engine.errors import StoreDataLoss
from flask_idempotency.engine.events import KeyVoided
from flask_idempotency.engine.keys import StorageKey
from tests.apps import ALICES, GONE, KEY, WHY, World, key_of, lapsed, new_world, paid, refusal, run, said, shop

VOID = ("void", *ALICES, "--endpoint", "pay", *WHY, "--yes")


def test_no_request_runs_under_a_voided_key() -> None:
    """The command says so, the audit trail and an event say who did it, and a client is refused."""
    world = shop()
    result = run(world, *VOID)

    assert (0, "Voided: no request runs under this key.\n") == (result.exit_code, result.output)
    assert (409, "key-voided") == (paid(world).status_code, paid(world).get_json()["code"])
    told = [event for event in world.events if isinstance(event, KeyVoided)]
    assert [("ops", "asked the bank")] == [(event.actor, event.reason) for event in told]
    shown = said(run(world, "show", *ALICES, "--json"))
    assert ("completed", "voided", None) == (shown["state"], shown["reason"], shown["answer"])
    assert [("voided", "absent", "ops")] == [(each["verb"], each["was"], each["actor"]) for each in shown["changes"]]
    assert [] == world.runs


def test_list_marks_keys_that_are_voided_or_remembered() -> None:
    world = shop(keep=10.0, remember=1000.0)
    run(world, *VOID)
    paid(world, "other")
    listed = run(world, "list", "--state", "completed").output
    assert (1, 0, 2) == (listed.count("completed, voided"), listed.count("remembered"), listed.count("completed"))

    world.clock.advance(20)
    assert "reduced to a remembered key: 1." in run(world, "expire").output

    listed = run(world, "list", "--state", "completed").output
    assert (1, 1) == (listed.count("completed, voided"), listed.count("completed, remembered"))


def test_it_asks_before() -> None:
    world = shop()
    result = run(world, *VOID[:-1], typed="n\n")

    assert (1, 201) == (result.exit_code, paid(world).status_code)
    assert "Void this key of POST pay?" in result.output


@pytest.mark.parametrize(
    ("happens", "reason"),
    (
        (lambda world: paid(world), "has completed"),
        (lambda world: paid(world, Fail="yes"), "outcome of the request with this key is unknown"),
        (lambda world: lapsed(world, after=GONE), "outcome of the request with this key is unknown"),
    ),
    ids=("done", "failed", "vanished"),
)
def test_what_ran_or_may_have_run_is_refused(happens: object, reason: str) -> None:
    world = shop(on_error="quarantine")
    assert callable(happens)
    happens(world)
    before = world.store.read(key_of(world))

    assert reason in refusal(run(world, *VOID))
    after = world.store.read(key_of(world))
    assert None not in (before, after)
    assert getattr(before, "token", b"") == getattr(after, "token", None)


class Forgetful:
    """A store that lost data: only a key that was made since has surely not run."""

    def would_run(self, key: StorageKey, *, key_timestamp: float | None = None, **_: object) -> bool:
        if key_timestamp is None:
            raise StoreDataLoss("lost", loss="changed")
        return True


@pytest.mark.parametrize(("key", "voided"), [("01890a5d-ac96-774b-bcce-b302099a8057", True), ("k", False)])
def test_after_a_data_loss_a_key_that_was_made_since_is_voided(key: str, voided: bool) -> None:
    """As its client voids it, with `DELETE` on the status view."""
    world = shop()
    engine = world.app.extensions["idempotency"].built.engine
    engine._deps = replace(engine._deps, data_loss=Forgetful())
    result = run(world, *[key if word == "k" else word for word in VOID])

    assert (voided, voided) == (result.exit_code == 0, "Voided: no request runs under this key." in result.output)
    assert voided == any(isinstance(event, KeyVoided) for event in world.events)


def test_a_voided_key_is_released_by_force_only() -> None:
    """The operator reads what its client relies on."""
    world = shop()
    run(world, *VOID)
    release = ("release", *ALICES, *WHY, "--yes")

    assert "It was voided: its client relies on it" in refusal(run(world, *release))
    assert 0 == run(world, *release, "--force").exit_code
    assert 201 == paid(world).status_code


def test_the_key_the_endpoint_and_its_method_are_named() -> None:
    world = shop()
    world.app.add_url_rule("/both", "both", lambda: "ok", methods=["PUT", "POST"])
    without = [*VOID]
    del without[without.index("--endpoint") : without.index("--endpoint") + 2]

    for arguments, text in (
        (without, "the endpoint by --endpoint"),
        (["both" if word == "pay" else word for word in VOID], "POST or PUT"),
        (["nowhere" if word == "pay" else word for word in VOID], "no such endpoint"),
    ):
        result = run(world, *arguments)
        assert (result.exit_code != 0, text in result.output) == (True, True), (text, result.output)
    both = ["both" if word == "pay" else word for word in VOID]
    assert 0 == run(world, *both, "--method", "put").exit_code
    client = world.app.test_client()
    assert 409 == client.put("/both", headers={KEY: "k", "X-User": "alice", "X-Tenant": "acme"}).status_code


def test_a_key_that_is_voided_before_is_voided_again() -> None:
    """Also by an operator who does not know of it. As JSON, a script reads it."""
    world: World = shop()
    run(world, *VOID)

    assert {"verb": "voided"} == json.loads(run(world, *VOID, "--json").stdout)
    assert 1 == len(world.told(KeyVoided))


@pytest.mark.parametrize("policy", ({"mode": "observe"}, {"effects": "steps"}), ids=("observed", "cannot hold"))
def test_where_no_record_is_kept_it_is_refused(policy: dict[str, Any]) -> None:
    """A request with this key would run all the same."""
    world = shop()
    world.app.post("/other", endpoint="other")(idempotent(**policy)(lambda: "ran"))

    assert "would run all the same" in refusal(run(world, *["other" if word == "pay" else word for word in VOID]))


def test_a_tenant_that_no_key_has_is_refused() -> None:
    """Such a key would be voided, and the request would run under its own name."""
    world = new_world()
    world.view(endpoint="pay")(lambda: "ran")
    result = run(world, *VOID)

    assert (2, True) == (result.exit_code, "Leave --tenant out" in result.output)
