"""Operators and resolvers settle the records of messages, by the policy of the inbox and with values that it reads."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flask_idempotency import current_claim
from flask_idempotency.consumers import Dead, Inbox, Processed
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import BrokerId
from flask_idempotency.engine.recovery import Happened, NeverHappened, StillUnknown
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.web.janitor import janitor_of
from tests.apps import LEASE, WHY, FaultyMemory, World, new_world, refusal, run, said
from tests.consumers.test_inbox import process, vanish

SIX_HOURS = 6 * 3600.0


@pytest.fixture
def world() -> World:
    world = new_world()
    # Before the host's time: a janitor uses the earlier of the two.
    world.clock.now = 1_000_000_000.0
    return world


def reap(world: World) -> Any:
    return janitor_of(world.app, host_clock=lambda: world.clock.now).run("reap", Batcher())


def quarantined(world: World, inbox: Inbox, message_id: str = "m-1") -> None:
    """Process a message whose worker is stopped in the middle of plain work."""
    with pytest.raises(SystemExit):
        process(world, inbox, message_id, value=SystemExit())


def test_a_replay_returns_the_value_of_a_resolver(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    world.idempotency.resolver("inbox:billing")(lambda unknown: Happened({"id": 7}))
    quarantined(world, inbox)

    assert Dead("outcome-unknown") == process(world, inbox)
    assert 1 == reap(world).completed
    assert Processed({"id": 7}, replayed=True) == process(world, inbox)


def test_a_command_finds_a_message_by_the_id_that_its_broker_gave(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    process(world, inbox, BrokerId("orders/0/101"))
    found = [run(world, "show", "--key", "orders/0/101", "--endpoint", "inbox:billing", "--json")]
    process(world, inbox, "orders/0/101")
    found.append(run(world, "show", "--key", "orders/0/101", "--endpoint", "inbox:billing", "--json"))

    assert [0, 1] == [each.exit_code for each in found]
    assert 2 == found[1].output.count("inbox:billing: ")  # the ids to choose from
    assert 2 == len(world.runs)


@pytest.mark.parametrize("begun", ("under the former name", "under both names"))
def test_a_command_releases_a_message_under_its_former_namespace_too(begun: str) -> None:
    """The consumer claims under both: it stayed dead, and the command said that the next delivery runs."""
    store, former = FaultyMemory(MemoryStore()), {"namespace": "former"}
    worlds = [new_world(namespace="former", store=store)]
    worlds.append(new_world(namespace="shop", former_identity=former, store=store))
    inboxes = [world.idempotency.inbox("billing", on_error="quarantine") for world in worlds]
    first = begun == "under both names"
    with pytest.raises(ZeroDivisionError):
        process(worlds[first], inboxes[first], value=ZeroDivisionError())

    named = ("--key", "m-1", "--endpoint", "inbox:billing", "--yes", "--force", *WHY)
    released = run(worlds[1], "release", *named)

    assert 0 == released.exit_code, released.output
    assert isinstance(process(worlds[1], inboxes[1]), Processed)


def test_a_resolver_gets_the_downstream_key_of_the_work(world: World) -> None:
    inbox, keys = world.idempotency.inbox("billing"), list[str]()

    def charge() -> None:
        keys.append(current_claim.downstream_key("charge"))
        raise SystemExit

    @world.idempotency.resolver("inbox:billing")
    def resolve(unknown: Any) -> Any:
        keys.append(unknown.downstream_key("charge"))
        return StillUnknown()

    with world.app.app_context(), pytest.raises(SystemExit):
        inbox.process("m-1", charge)
    reap(world)

    assert 2 == len(keys)
    assert 1 == len(set(keys))


def test_never_happened_is_believed_after_the_max_runtime_of_the_inbox(world: World) -> None:
    """An HTTP policy allows 15 minutes. A worker of the inbox may be about to take effect for six hours."""
    inbox = world.idempotency.inbox("billing")
    world.idempotency.resolver("inbox:billing")(lambda unknown: NeverHappened())
    with world.app.app_context():
        world.store.points.at("before quarantine", _silent)
        with pytest.raises(SystemExit):
            inbox.process("m-1", _interrupt)
    for _ in range(2):
        world.clock.advance(LEASE + 900.0)
        assert 0 == reap(world).released
    assert Dead("outcome-unknown") == process(world, inbox)
    world.clock.advance(SIX_HOURS)
    for _ in range(2):
        reap(world)
        world.clock.advance(3600.0)

    assert Processed("done", replayed=False) == process(world, inbox)


def _silent() -> None:
    raise ZeroDivisionError("the process ends here")


def _interrupt() -> None:
    raise SystemExit


def test_a_janitor_frees_no_key_of_an_inbox_that_it_does_not_know(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows neither how long the worker may run nor what a value may be."""
    vanish(world, Inbox("billing"))
    world.idempotency.resolver("inbox:billing")(lambda unknown: NeverHappened())
    world.idempotency._loaders.operations._known.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            world.clock.advance(SIX_HOURS)
            reap(world)
    (listed,) = said(run(world, "list", "--json"))["records"]

    assert "quarantined" == listed["state"]
    assert "Import the module that makes it" in caplog.text
    assert "for an unknown time" in refusal(run(world, "release", listed["handle"], *WHY, "--yes"))
    assert "no inbox or task of that name" in refusal(
        run(world, "resolve", listed["handle"], "--happened", *WHY, "--yes")
    )


def message(message_id: str = "m-1") -> tuple[str, ...]:
    return ("--key", message_id, "--endpoint", "inbox:billing")


def test_a_resolver_of_a_misspelt_endpoint_stops_the_janitor(world: World) -> None:
    world.idempotency.resolver("inbx:billing")(lambda unknown: StillUnknown())
    with pytest.raises(ConfigurationError, match="no such endpoint"):
        janitor_of(world.app)


@pytest.mark.parametrize("value", (object(), float("nan"), {1: 2}))
def test_a_resolver_must_return_json(world: World, value: Any) -> None:
    inbox = world.idempotency.inbox("billing")
    world.idempotency.resolver("inbox:billing")(lambda unknown: Happened(value))
    quarantined(world, inbox)

    assert 1 == reap(world).failed
    assert Dead("outcome-unknown") == process(world, inbox)


def test_an_operator_gives_a_value_and_no_response(world: World, tmp_path: Any) -> None:
    inbox = world.idempotency.inbox("billing")
    quarantined(world, inbox)
    file = tmp_path / "value.json"
    file.write_text('{"id": 7}')
    options = ("resolve", *message(), "--happened", "--body-file", str(file), *WHY, "--yes")

    refused = run(world, *options, "--status", "201")
    assert (2, True) == (refused.exit_code, "has no status" in refused.output)
    result = run(world, *options)
    assert (0, True) == (result.exit_code, "the next delivery gets this value" in result.output), result.output
    assert Processed({"id": 7}, replayed=True) == process(world, inbox)


def test_an_operator_may_give_no_value(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    quarantined(world, inbox)

    assert 0 == run(world, "resolve", *message(), "--happened", *WHY, "--yes").exit_code
    assert Processed(None, replayed=True, kept=False) == process(world, inbox)


def test_an_operator_cannot_give_what_is_no_json(world: World, tmp_path: Any) -> None:
    inbox = world.idempotency.inbox("billing")
    quarantined(world, inbox)
    file = tmp_path / "value.json"
    file.write_text("paid")

    assert "no JSON" in refusal(
        run(world, "resolve", *message(), "--happened", "--body-file", str(file), *WHY, "--yes")
    )
    assert Dead("outcome-unknown") == process(world, inbox)


def test_an_operator_releases_a_message(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    quarantined(world, inbox)
    assert "may still run" in refusal(run(world, "release", *message(), *WHY, "--yes"))
    world.clock.advance(SIX_HOURS + LEASE)

    assert 0 == run(world, "release", *message(), *WHY, "--yes").exit_code
    assert Processed("done", replayed=False) == process(world, inbox)


def test_commands_show_messages_by_operation_and_never_by_id(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    quarantined(world, inbox, "order-4711-secret")
    listed = said(run(world, "list", "--json"))["records"]

    assert [("inbox:billing", "message")] == [(each["endpoint"], each["method"]) for each in listed]
    assert 0 == run(world, "show", listed[0]["handle"]).exit_code
    assert said(run(world, "list", "--json", "--endpoint", "inbox:mail"))["records"] == []
    assert all("4711" not in str(each) for each in [listed, *world.events])
    assert {"inbox:billing"} == {event.operation for event in world.events}


def test_the_doctor_names_resolvers_of_messages_that_this_process_does_not_handle(world: World) -> None:
    world.idempotency.resolver("inbox:billing")(lambda unknown: StillUnknown())
    assert "messages that this process does not handle" in run(world, "doctor").output
    world.idempotency.inbox("billing")
    assert "messages that this process does not handle" not in run(world, "doctor").output


def test_the_doctor_names_inboxes_that_only_an_operator_can_resolve(world: World) -> None:
    world.idempotency.inbox("billing")
    world.idempotency.inbox("mail", effects="deduplicated")
    output = run(world, "doctor").output

    assert "inbox:billing" in output
    assert "inbox:mail" not in output
