"""The commands show the steps of a request and settle one of them, and never print a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from flask_idempotency import Resume, Step, StillUnknown, UnknownOutcome, current_claim, current_step, idempotent
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.events import Resolved, StepSettled
from flask_idempotency.engine.journal import STEPS_CHANGED, Entry, JournalWrite, StepState
from flask_idempotency.engine.model import OnExpiry, State
from flask_idempotency.engine.store import StepContext
from tests.apps import ALICES, ANSWER, KEY, LEASE, WHY, World, key_of, record, refusal, run, said, shop, vanished

RESOLVE = ("resolve", *ALICES, *WHY, "--yes")
BEGUN, FINISHED = StepState.BEGUN, StepState.FINISHED
LATER = 100_000.0
"""Seconds after which no worker can run any more."""


def doing(**steps: StepState) -> tuple[World, bytes]:
    """A shop in which a request of Alice has taken these plain steps of the item `line-1`."""
    world = shop()
    key, token = vanished(world, on_expiry=OnExpiry.TAKEOVER)
    services: Any = world.app.extensions["idempotency"].built
    claimed = record(world)
    assert claimed is not None
    entries = []
    for name, state in steps.items():
        entry = Entry(name.encode().ljust(12, b"."), name, "plain", state, in_line=True)
        context = StepContext(key, entry.id, claimed.fence, claimed.fingerprint, "plain", b"", state.value)
        result = b'"secret"' if state is FINISHED else None
        entries.append(replace(entry, payload=services.codec.steps.seal(b'"line-1"', result, context)))
    writing = JournalWrite(1, entries, steps=len(entries), in_doubt=BEGUN in steps.values())
    services.journals.write(key, token, fence=claimed.fence, writing=writing, lease=LEASE)
    return world, token


def in_doubt(**steps: StepState) -> tuple[World, bytes]:
    """Its worker died in a step, and the janitor has quarantined the key."""
    world, token = doing(**steps)
    world.clock.advance(LATER)
    for found in world.store.recovery.expired_leases(horizon=world.clock.now, limit=10).found:
        assert world.store.recovery.quarantine_expired(found, horizon=world.clock.now)
    return world, token


def state(world: World) -> State | None:
    found = record(world)
    return None if found is None else found.state


def test_show_lists_the_steps_without_results() -> None:
    world, _ = in_doubt(reserve=FINISHED, charge=BEGUN)

    text = run(world, "show", *ALICES).output
    shown = said(run(world, "show", *ALICES, "--json"))

    assert "reserve of line-1 (plain): finished" in text
    assert "charge of line-1 (plain): in doubt" in text
    assert [("reserve", "finished"), ("charge", "in doubt")] == [
        (each["name"], each["state"]) for each in shown["steps"]
    ]
    assert "secret" not in f"{text}{shown}"


def test_list_finds_paused_requests_alone() -> None:
    world, _ = doing(reserve=FINISHED)
    vanished(world, "other", on_expiry=OnExpiry.TAKEOVER)
    assert [] == said(run(world, "list", "--state", "paused", "--json"))["records"]

    world.clock.advance(LEASE + 1)

    (paused,) = said(run(world, "list", "--state", "paused", "--json"))["records"]
    assert (True, "processing", None) == (paused["paused"], paused["state"], paused["steps"])
    assert 1 == run(world, "list").output.count("paused")


def test_stats_and_list_have_one_set_of_names() -> None:
    """A paused request waits for its retry. Counted as "lease expired", it looked like a worker that vanished."""
    world, _ = doing(reserve=FINISHED)
    vanished(world, "other", on_expiry=OnExpiry.TAKEOVER, endpoint="refund")
    world.clock.advance(LEASE + 1)
    vanished(world, "third", endpoint="ship")

    states = {
        name: sorted(each["endpoint"] for each in said(run(world, "list", "--state", name, "--json"))["records"])
        for name in ("paused", "lease-expired", "in-flight", "processing", "completed", "quarantined")
    }
    stats = run(world, "stats").output

    assert {
        "paused": ["pay"],
        "lease-expired": ["refund"],
        "in-flight": ["ship"],
        "processing": ["pay", "refund", "ship"],
        "completed": [],
        "quarantined": [],
    } == states
    assert ["in flight: 1", "lease expired: 1, the oldest for 1 s", "paused: 1"] == stats.splitlines()[:3]
    assert 1 == said(run(world, "stats", "--json"))["paused"]


def test_a_step_that_happened_is_settled_with_its_result() -> None:
    """Its late worker has lost, and the command says it once."""
    world, token = in_doubt(reserve=FINISHED, charge=BEGUN)

    told = run(world, *RESOLVE, "--step", "charge", "--item", "line-1", "--happened", "--result", '{"id": 7}')

    assert 0 == told.exit_code, told.output
    assert "Resumed: the next retry goes on after the finished steps." in told.output
    assert State.PROCESSING is state(world)
    assert [("charge", "completed", "ops")] == [
        (event.step, event.verb, event.actor) for event in world.events if isinstance(event, StepSettled)
    ]
    with pytest.raises(LeaseLost):
        world.store.complete(key_of(world), token, ANSWER, keep=60.0)


def test_a_step_that_never_happened_is_taken_out() -> None:
    world, _ = in_doubt(reserve=FINISHED, charge=BEGUN)

    told = said(run(world, *RESOLVE, "--step", "charge", "--item", "line-1", "--never-happened", "--json"))

    assert {"verb": "resumed", "forced": False, "settled": 1, "left": 0} == told
    assert ["reserve"] == [each["name"] for each in said(run(world, "show", *ALICES, "--json"))["steps"]]


def test_a_worker_that_may_still_run_needs_force() -> None:
    world, _ = doing(charge=BEGUN)
    world.clock.advance(LEASE + 1)
    for found in world.store.recovery.expired_leases(horizon=world.clock.now, limit=10).found:
        world.store.recovery.quarantine_expired(found, horizon=world.clock.now)
    command = (*RESOLVE, "--step", "charge", "--item", "line-1", "--never-happened")

    assert "may still run" in refusal(run(world, *command))
    assert State.QUARANTINED is state(world)
    assert 0 == run(world, *command, "--force").exit_code


def test_resume_ends_a_quarantine_because_the_code_has_changed() -> None:
    world, token = doing(reserve=FINISHED)
    world.store.quarantine(key_of(world), token, STEPS_CHANGED)

    assert 0 == run(world, *RESOLVE, "--resume").exit_code
    assert State.PROCESSING is state(world)


def test_resume_does_not_end_a_doubt() -> None:
    world, _ = in_doubt(charge=BEGUN)

    assert "charge is in doubt" in refusal(run(world, *RESOLVE, "--resume"))
    assert State.QUARANTINED is state(world)


def test_release_of_recorded_effects_needs_force_and_is_an_audit_event() -> None:
    world, _ = doing(reserve=FINISHED)
    world.clock.advance(LATER)

    assert "recorded: reserve" in refusal(run(world, "release", *ALICES, *WHY, "--yes"))
    assert State.PROCESSING is state(world)

    assert 0 == run(world, "release", *ALICES, *WHY, "--yes", "--force").exit_code
    assert state(world) is None
    assert [("released", True)] == [(event.verb, event.forced) for event in world.events if isinstance(event, Resolved)]


@pytest.mark.parametrize(
    "options",
    (
        ("--step", "charge", "--happened"),
        ("--step", "charge", "--resume"),
        ("--step", "charge", "--never-happened", "--result", "1"),
        ("--item", "line-1", "--never-happened"),
        ("--step", "charge", "--happened", "--result", "not json"),
        ("--step", "charge", "--happened", "--result", "1", "--status", "201"),
    ),
)
def test_options_that_contradict_are_refused_before_anything_is_read(options: tuple[str, ...]) -> None:
    world, _ = in_doubt(charge=BEGUN)

    assert 2 == run(world, *RESOLVE, *options).exit_code
    assert State.QUARANTINED is state(world)


def test_an_unknown_step_is_refused() -> None:
    world, _ = in_doubt(charge=BEGUN)

    for options in (("--step", "refund"), ("--step", "charge", "--item", "line-2")):
        assert "Nothing was changed" in refusal(run(world, *RESOLVE, *options, "--never-happened"))
    assert State.QUARANTINED is state(world)


def test_a_step_of_an_item_is_named_with_it() -> None:
    world, _ = in_doubt(charge=BEGUN)

    assert "This step is recorded with an item. Add --item" in refusal(
        run(world, *RESOLVE, "--step", "charge", "--never-happened")
    )
    assert State.QUARANTINED is state(world)


def shipping(step: Step) -> tuple[World, list[str]]:
    """A shop in which a worker has sent `line-1` to the carrier, and does not know whether it arrived."""
    world, sent = shop(), list[str]()

    def ship(line: str) -> None:
        sent.append(current_step.downstream_key)
        raise TimeoutError

    @world.app.post("/ship")
    @idempotent(required=True, steps=(step,))
    def ship_all() -> Any:
        current_claim.step((step.name, "line-1") if step.item else step.name, ship, "line-1")
        return {}, 201

    headers = {KEY: "k", "X-Tenant": "acme", "X-User": "alice"}
    assert 500 == world.app.test_client().post("/ship", headers=headers).status_code
    return world, sent


def test_show_gives_the_downstream_key_that_a_step_of_an_item_sent() -> None:
    """The key of the bare name is one that no call has carried: it would look as if nothing had arrived."""
    world, sent = shipping(Step("ship", item="line"))

    assert "Give --item" in refusal(run(world, "show", *ALICES, "--downstream", "ship"))
    assert "Give --item" in refusal(run(world, "show", *ALICES, "--downstream", "ship", "--item", "line-2"))
    assert "Give --item" in refusal(run(world, "show", *ALICES, "--downstream", "other", "--item", "line-1"))
    shown = said(run(world, "show", *ALICES, "--downstream", "ship", "--item", "line-1", "--json"))
    assert sent == [shown["downstream_key"]]
    assert 2 == run(world, "show", *ALICES, "--item", "line-1").exit_code


def test_show_gives_the_downstream_key_of_a_renamed_step_under_both_names() -> None:
    world, sent = shipping(Step("post", was="ship"))

    for name in ("post", "ship"):
        assert sent == [said(run(world, "show", *ALICES, "--downstream", name, "--json"))["downstream_key"]]


def test_show_gives_that_key_also_where_the_step_is_not_recorded() -> None:
    """A worker may have paid with the key, and vanished before its journal was written."""
    world = shop()

    @world.app.post("/ship")
    @idempotent(required=True, steps=(Step("post", was="ship"),))
    def ship_all() -> tuple[dict[str, Any], int]:
        return {}, 201

    vanished(world, endpoint="ship_all")
    keys = [
        said(run(world, "show", *ALICES, "--downstream", name, "--json"))["downstream_key"] for name in ("post", "ship")
    ]

    assert keys[0] == keys[1]


def test_a_resolver_finds_a_renamed_step_and_its_downstream_key_under_both_names() -> None:
    world, sent = shipping(Step("post", was="ship"))
    keys: list[str] = []

    @world.idempotency.resolver("ship_all")
    def look(unknown: UnknownOutcome) -> StillUnknown:
        for name in ("post", "ship"):
            keys.extend([unknown.downstream_key(name), unknown.step(name).downstream_key])
        return StillUnknown()

    run(world, "reap")

    assert sent * 4 == keys


class Parcel(NamedTuple):
    number: str


def test_a_result_that_the_step_cannot_return_is_refused() -> None:
    """Recorded, it would quarantine the next retry, and no command could change it."""
    world, _ = shipping(Step("ship", returns=Parcel))
    happened = (*RESOLVE, "--step", "ship", "--happened", "--result")
    world.clock.advance(LATER)

    assert "does not fit `returns=`" in refusal(run(world, *happened, '"p_1"'))
    assert "does not fit `returns=`" in refusal(run(world, *happened, '{"id": "p_1"}'))
    assert State.QUARANTINED is state(world)
    assert "Resumed" in run(world, *happened, '{"number": "p_1"}').output


def test_a_result_that_cannot_be_checked_now_changes_nothing() -> None:
    def away(plain: Any) -> Any:
        raise ConnectionResetError

    world, _ = shipping(Step("ship", returns=(str, away)))
    world.clock.advance(LATER)

    told = refusal(run(world, *RESOLVE, "--step", "ship", "--happened", "--result", '"p_1"'))
    assert "cannot be checked now: the second function of `returns` raised ConnectionResetError" in told
    assert State.QUARANTINED is state(world)


def test_a_step_is_settled_under_its_new_name_too() -> None:
    world, _ = shipping(Step("post", was="ship"))

    assert "Resumed" in run(world, *RESOLVE, "--step", "post", "--happened", "--result", "null").output


def test_a_result_without_quotes_is_refused_with_an_example() -> None:
    world, _ = in_doubt(charge=BEGUN)

    assert "--result '\"ch_1\"'" in run(world, *RESOLVE, "--step", "charge", "--happened", "--result", "ch_1").output


def test_a_paused_request_needs_no_resolution() -> None:
    """`release`, which would run its effects again, is no advice."""
    world, _ = doing(reserve=FINISHED)
    world.clock.advance(LEASE + 1)

    assert "There is nothing to resolve: the request is paused" in refusal(run(world, *RESOLVE, "--resume"))
    assert "the next retry goes on after the finished steps" in run(world, "show", *ALICES).output


def test_the_policy_says_what_steps_leave_of_a_failure() -> None:
    world, _ = shipping(Step("ship"))

    told = run(world, "policy", "ship_all").output

    assert "is taken over, or quarantined in a plain step" in told
    assert "is paused between its steps, or quarantined with one in doubt" in told


def test_reap_reports_requests_that_were_never_resumed_and_those_that_go_on() -> None:
    world, _ = doing(reserve=FINISHED)
    world.idempotency.resolver("pay")(lambda unknown: Resume())
    world.clock.advance(LATER)

    told = run(world, "reap").output

    assert "because no retry resumed them: 1." in told
    assert "for 1 key: 0 completed, 0 released, 1 resumed, 0 still unknown, 0 failed." in told
