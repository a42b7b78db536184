"""An inbox does the work of each message once, and says what to do with the message."""

from __future__ import annotations

import threading
from ast import literal_eval
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any

import pytest
from flask import Flask

from flask_idempotency import current_claim, exempt, idempotent
from flask_idempotency.consumers import Dead, Inbox, Later, MissingMessageId, Processed
from flask_idempotency.consumers.inbox import drain
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import StoreFailed
from flask_idempotency.engine.model import State
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from tests.apps import KEY, LONG, FaultyMemory, World, new_world, run


class Tenant(str, Enum):  # noqa: UP042 - a StrEnum has another `__str__`
    """The tenants of an application that lists them."""

    ACME = "acme"


@pytest.fixture
def world() -> World:
    return new_world()


def process(world: World, inbox: Inbox, message_id: str = "m-1", value: Any = "done", **more: Any) -> Any:
    """Process one message whose work notes its run and returns this value."""

    def work() -> Any:
        world.runs.append(message_id)
        if isinstance(value, BaseException):
            raise value
        return value

    with world.app.app_context():
        return inbox.process(message_id, work, **more)


def test_a_second_delivery_gets_the_value_of_the_first(world: World) -> None:
    inbox = world.idempotency.inbox("billing")

    assert Processed({"id": 7}, replayed=False) == process(world, inbox, value={"id": 7})
    assert Processed({"id": 7}, replayed=True) == process(world, inbox, value={"id": 8})
    assert ["m-1"] == world.runs


def test_consumers_and_tenants_are_apart(world: World) -> None:
    billing, mail = world.idempotency.inbox("billing"), world.idempotency.inbox("mail")
    deliveries: list[tuple[Inbox, str | None]] = [(billing, None), (mail, None), (billing, "acme"), (billing, "other")]
    verdicts = [process(world, inbox, tenant=tenant) for inbox, tenant in deliveries]

    assert [Processed("done", replayed=False)] * 4 == verdicts


@pytest.mark.parametrize("message_id", (None, ""))
def test_a_message_without_an_id_is_an_error_and_no_claim(world: World, message_id: Any) -> None:
    with pytest.raises(MissingMessageId):
        process(world, world.idempotency.inbox("billing"), message_id)

    assert [] == world.store.calls


def test_what_work_raises_is_raised_again_and_the_next_delivery_runs(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    with pytest.raises(ValueError, match="no such order"):
        process(world, inbox, value=ValueError("no such order"))

    assert world.record() is None
    assert Processed("done", replayed=False) == process(world, inbox)


@pytest.mark.parametrize(("effects", "state"), (("plain", State.QUARANTINED), ("marked", None)))
def test_a_worker_that_is_stopped_ends_its_claim_as_one_that_vanished(
    world: World, effects: str, state: State | None
) -> None:
    inbox = world.idempotency.inbox("billing", effects=effects)
    with pytest.raises(SystemExit):
        process(world, inbox, value=SystemExit())

    assert state is world.state()


def test_a_message_in_flight_is_kept(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    seen: list[Any] = []
    with world.app.app_context():
        inbox.process("m-1", lambda: seen.append(inbox.process("m-1", lambda: None)))

    assert [Later(5.0, "in-flight", lease_left=30.0)] == seen


def test_work_reads_its_claim(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    with world.app.app_context():
        verdict = inbox.process(
            "m-1", lambda: [current_claim.key, current_claim.tenant, current_claim.attempt], tenant="a"
        )
        assert not current_claim

    assert Processed(["m-1", "a", 1], replayed=False) == verdict


def test_unknown_keywords_name_the_one_that_was_meant(world: World) -> None:
    with pytest.raises(ConfigurationError, match=r"Did you mean .* effects"):
        world.idempotency.inbox("billing", efects="plain")


def test_an_inbox_without_an_application() -> None:
    inbox = Inbox.standalone({"IDEMPOTENCY_STORE": MemoryStore(), "IDEMPOTENCY_SECRET": LONG}, "billing")

    assert Processed(1, replayed=False) == inbox.process("m-1", lambda: 1)
    assert Processed(1, replayed=True) == inbox.process("m-1", lambda: 2)


# Identity.


def test_messages_and_requests_never_share_a_record(world: World) -> None:
    """Even if an endpoint, a caller and a key have the names of an inbox and of its message."""
    inbox = world.idempotency.inbox("billing")
    app = world.app
    app.add_url_rule(
        "/a",
        endpoint="inbox:billing",
        view_func=idempotent(scope="operation")(lambda: ({"from": "http"}, 201)),
        methods=["POST"],
    )
    verdicts = [process(world, inbox, "k", value={"from": "message"})]
    callers: list[dict[str, str]] = [{}, {"X-User": ""}, {"X-User": "inbox:billing"}]
    responses = [world.post("/a", key="k", headers=caller) for caller in callers]
    verdicts.append(process(world, inbox, "k", value=None))

    assert [201] * 3 == [response.status_code for response in responses]
    assert [b"message" not in response.data for response in responses] == [True] * 3
    assert [{"from": "message"}] * 2 == [verdict.value for verdict in verdicts]


def test_the_status_of_a_key_shows_no_message() -> None:
    world = new_world(status_url="/status")
    world.view("/pay")(lambda: "paid")
    process(world, world.idempotency.inbox("billing"), "k")
    asked = {"method": "POST", "path": "/pay"}

    assert "absent" == world.client().get("/status", query_string=asked, headers={KEY: "k"}).get_json()["state"]


def test_any_text_is_an_id(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    for message_id in ("x" * 1_000_000, "\ud800", "\0", " ", 'a "quoted", key', "ключ", "a\nb"):
        verdicts = [process(world, inbox, each) for each in (message_id, message_id + "x", message_id)]

        assert [False, False, True] == [verdict.replayed for verdict in verdicts]


WRONG_ARGUMENTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"message_id": b"m-1"}, "decode bytes"),
    ({"message_id": 7}, "format numbers"),
    ({"payload": "text"}, "must be bytes"),
    ({"payload": {"a": 1}}, "must be bytes"),
    ({"tenant": 7}, "tenant must be"),
    ({"tenant": ""}, "tenant must be"),
    ({"born": "yesterday"}, "timestamp"),
    ({"born": True}, "seconds since the epoch"),
    ({"born": 1_800_000_000_000.0}, "divide milliseconds by 1000"),
    ({"born": float("nan")}, "seconds since the epoch"),
    ({"work": "billing"}, "must be a function"),
)


def test_wrong_arguments_name_the_remedy_and_claim_nothing(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    for arguments, remedy in WRONG_ARGUMENTS:
        given: dict[str, Any] = {"message_id": "m-1", "work": lambda: 1, **arguments}
        with world.app.app_context(), pytest.raises((TypeError, ValueError), match=remedy):
            inbox.process(given.pop("message_id"), given.pop("work"), **given)

    assert [] == world.store.calls


def test_another_payload_under_the_same_id_is_refused(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    payloads = (b'{"amount": 1}', b'{"amount": 2}', b'{"amount": 1}')

    assert [Processed("done", replayed=False), Dead("message-reused"), Processed("done", replayed=True)] == [
        process(world, inbox, payload=payload) for payload in payloads
    ]


def test_an_empty_payload_is_a_payload(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    process(world, inbox, payload=b"")

    assert Dead("message-reused") == process(world, inbox, payload=b"x")


# Values.


VALUES: tuple[tuple[Any, Any], ...] = (
    (None, None),
    (False, False),
    (0, 0),
    ("", ""),
    ([], []),
    ((1, (2,)), [1, [2]]),
    ({"b": 1, "a": [None, True, 1.5, "é\ud800"]}, {"a": [None, True, 1.5, "é\ud800"], "b": 1}),
    (10**40, 10**40),
)


def test_a_replay_returns_exactly_what_the_first_delivery_returned(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    for number, (value, again) in enumerate(VALUES):
        first, replay = [process(world, inbox, f"m-{number}", value=value) for _ in range(2)]

        assert [Processed(again, replayed=False), Processed(again, replayed=True)] == [first, replay]
        assert type(first.value) is type(replay.value)


class _Hostile(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("its own method fails")


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


NO_JSON: tuple[Any, ...] = (
    Decimal("1.10"),
    datetime(2026, 1, 1, tzinfo=UTC),
    b"bytes",
    float("nan"),
    float("inf"),
    {1: "a", "1": "b"},
    {"deep": {None: 1}},
    {1, 2},
    object(),
    _nested(100_000),
    _circular(),
    _Hostile(a=1),
    10**5000,
)


def test_what_is_no_json_is_returned_once_and_not_kept(world: World) -> None:
    """The work is done, so the message is."""
    inbox = world.idempotency.inbox("billing")
    for number, value in enumerate(NO_JSON):
        first, replay = [process(world, inbox, f"m-{number}", value=value) for _ in range(2)]

        assert first.value is value
        assert [(False, False), (True, False)] == [(each.replayed, each.kept) for each in (first, replay)]
        assert replay.value is None


def test_a_value_above_max_result_is_returned_once_and_not_kept(world: World) -> None:
    inbox = world.idempotency.inbox("billing", max_result=10)
    verdicts = [process(world, inbox, message_id, value=value) for message_id in "aab" for value in ["x" * 9]]

    assert [("x" * 9, False), (None, False), ("x" * 9, False)] == [(each.value, each.kept) for each in verdicts]
    assert Processed("x" * 8, replayed=False) == process(world, inbox, "c", value="x" * 8)


# Work that fails.


def test_past_the_point_of_no_return_a_failure_is_final(world: World) -> None:
    inbox = world.idempotency.inbox("billing", effects="marked")

    def work() -> None:
        current_claim.point_of_no_return()
        raise ValueError("the bank timed out")

    with world.app.app_context():
        with pytest.raises(ValueError, match="timed out"):
            inbox.process("m-1", work)
        assert Dead("outcome-unknown") == inbox.process("m-1", work)


@pytest.mark.parametrize(
    ("on_error", "verdict"),
    (
        ("quarantine", Dead("outcome-unknown")),
        ("keep", Processed(None, replayed=True, kept=False)),
    ),
)
def test_on_error_decides_what_a_failure_leaves(world: World, on_error: str, verdict: Any) -> None:
    inbox = world.idempotency.inbox("billing", on_error=on_error)
    with pytest.raises(ValueError, match="no"):
        process(world, inbox, value=ValueError("no"))

    assert verdict == process(world, inbox)


@pytest.mark.parametrize(
    ("decision", "first", "second"),
    (
        (None, Processed("done", replayed=False), Processed("done", replayed=True)),
        ("keep", Processed("done", replayed=False), Processed("done", replayed=True)),
        ("release", Later(1.0, "released"), Later(1.0, "released")),
        ("quarantine", Dead("outcome-unknown"), Dead("outcome-unknown")),
    ),
)
def test_decide_sees_the_value(world: World, decision: str | None, first: Any, second: Any) -> None:
    seen: list[Any] = []

    def decide(value: Any, error: BaseException | None) -> str | None:
        seen.append((value, error))
        return decision

    inbox = world.idempotency.inbox("billing", decide=decide)

    assert [first, second] == [process(world, inbox), process(world, inbox)]
    assert ("done", None) == seen[0]


async def _coroutine() -> int:
    return 1


def _generator() -> Any:
    yield 1


async def _both() -> Any:
    yield 1


class _Callable:
    async def __call__(self) -> int:
        return 1


@pytest.mark.parametrize("work", (_coroutine, _generator, _both, _Callable(), partial(_coroutine)))
def test_a_function_that_does_no_work_when_it_is_called_is_refused(world: World, work: Any) -> None:
    inbox = world.idempotency.inbox("billing")
    with world.app.app_context(), pytest.raises(TypeError, match=r"asyncio\.run"):
        inbox.process("m-1", work)

    assert [] == world.store.calls


@pytest.mark.parametrize("work", (_coroutine, _generator, _both))
def test_so_is_work_that_only_returns_such_an_object(world: World, work: Any) -> None:
    inbox = world.idempotency.inbox("billing")
    with world.app.app_context(), pytest.raises(TypeError, match="is not done yet"):
        inbox.process("m-1", lambda: work())

    assert world.record() is None
    assert Processed("done", replayed=False) == process(world, inbox)


# Vanished workers.


def vanish(world: World, inbox: Inbox, message_id: str = "m-1") -> None:
    """Have a worker claim the message, and never end the claim."""
    lost = world.store.verbs().count("claim")
    world.store.points.at("after claim", _gone)
    with pytest.raises(_Gone):
        process(world, inbox, message_id)
    assert world.store.verbs().count("claim") == lost + 1
    # The engine takes back a claim whose reply was lost: here the process has died.
    world.app.extensions["idempotency"].built.engine._deps.repeater._due.clear()


class _Gone(BaseException):
    pass


def _gone() -> None:
    raise _Gone


def test_a_plain_message_of_a_vanished_worker_never_runs_again(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    vanish(world, inbox)

    assert Later(5.0, "in-flight", lease_left=30.0) == process(world, inbox)
    world.clock.advance(29.0)
    assert Later(1.0, "in-flight", lease_left=1.0) == process(world, inbox)
    world.clock.advance(2.0)
    assert [Dead("outcome-unknown")] * 2 == [process(world, inbox), process(world, inbox)]
    assert [] == world.runs


@pytest.mark.parametrize("effects", ("marked", "deduplicated"))
def test_other_messages_are_taken_over_a_few_times(world: World, effects: str) -> None:
    inbox = world.idempotency.inbox("billing", effects=effects)
    for _ in range(5):
        vanish(world, inbox)
        world.clock.advance(31.0)

    assert [Dead("too-many-attempts")] * 2 == [process(world, inbox), process(world, inbox)]
    assert [] == world.runs
    assert State.QUARANTINED is world.state()


def test_the_last_attempt_may_succeed(world: World) -> None:
    inbox = world.idempotency.inbox("billing", effects="deduplicated", max_attempts=2)
    vanish(world, inbox)
    world.clock.advance(31.0)

    assert Processed("done", replayed=False) == process(world, inbox)


def test_handled_failures_are_no_attempts(world: World) -> None:
    inbox = world.idempotency.inbox("billing", effects="deduplicated", max_attempts=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            process(world, inbox, value=ValueError("no"))

    assert Processed("done", replayed=False) == process(world, inbox)


@pytest.mark.parametrize("effects", ("marked", "deduplicated"))
def test_a_late_worker_gets_the_value_of_its_successor(world: World, effects: str) -> None:
    inbox = world.idempotency.inbox("billing", effects=effects)

    def late() -> str:
        world.clock.advance(31.0)
        assert Processed("of the successor", replayed=False) == inbox.process("m-1", lambda: "of the successor")
        return "late"

    with world.app.app_context():
        assert Processed("of the successor", replayed=True) == inbox.process("m-1", late)


def test_a_late_worker_loses_at_its_point_of_no_return(world: World) -> None:
    inbox = world.idempotency.inbox("billing", effects="marked")

    def late() -> str:
        world.clock.advance(31.0)
        inbox.process("m-1", lambda: "of the successor")
        current_claim.point_of_no_return()
        return "late"

    with world.app.app_context():
        assert Processed("of the successor", replayed=True) == inbox.process("m-1", late)


def test_a_late_result_of_plain_work_is_accepted(world: World) -> None:
    inbox = world.idempotency.inbox("billing")

    def late() -> str:
        world.clock.advance(31.0)
        assert Dead("outcome-unknown") == inbox.process("m-1", lambda: "again")
        return "late"

    with world.app.app_context():
        assert Processed("late", replayed=False) == inbox.process("m-1", late)
    assert Processed("late", replayed=True) == process(world, inbox)


# Stores that are away.


def test_a_store_that_is_away_keeps_the_message(world: World, caplog: pytest.LogCaptureFixture) -> None:
    inbox = world.idempotency.inbox("billing")
    world.store.down = True
    assert Later(2.0, "store-unavailable") == process(world, inbox)
    world.store.down = False

    assert Processed("done", replayed=False) == process(world, inbox)
    assert 1 == len(world.told(StoreFailed))
    assert "inbox:billing is kept for later: the store is not available" in caplog.text
    assert "503" not in caplog.text


def test_the_point_of_no_return_needs_the_store(world: World) -> None:
    """Nothing has happened yet, so the message is neither failed nor dead."""
    inbox = world.idempotency.inbox("billing", effects="marked")

    def work() -> None:
        world.store.lose_request("mark_point_of_no_return")
        current_claim.point_of_no_return()

    with world.app.app_context():
        assert Later(2.0, "store-unavailable") == inbox.process("m-1", work)
    assert Processed("done", replayed=False) == process(world, inbox)


def test_the_key_provider_is_away() -> None:
    class Away:
        newest = "k"

        def kids(self) -> list[str]:
            return ["k"]

        def wrap(self, *args: Any) -> bytes:
            raise ConnectionError("no KMS")

        unwrap = wrap

    world = encrypted(key_ring=Away())
    inbox = world.idempotency.inbox("billing")

    assert Later(2.0, "keys-unavailable") == process(world, inbox)
    assert [] == world.runs


def test_a_record_that_cannot_be_read_is_dead() -> None:
    world = encrypted()
    process(world, world.idempotency.inbox("billing"))
    (kept,) = world.store.responses.scan(limit=10).answers
    payload = kept.record.payload
    assert payload is not None
    assert world.store.responses.replace(kept.key, payload, replace(payload, data=payload.data[::-1]))
    other = encrypted(store=world.store)
    inbox = other.idempotency.inbox("billing")

    assert [Dead("record-corrupt")] * 2 == [process(other, inbox), process(other, inbox)]
    assert [] == other.runs


def test_a_record_that_another_ring_sealed_is_kept_for_later() -> None:
    """One worker with a wrong ring must not bury the messages of all."""
    world = encrypted()
    process(world, world.idempotency.inbox("billing"))
    other = encrypted(key_ring={"k": "4" * 43 + "="}, store=world.store)
    inbox = other.idempotency.inbox("billing")

    assert [Later(2.0, "store-unavailable")] * 2 == [process(other, inbox), process(other, inbox)]
    assert [] == other.runs
    assert isinstance(process(world, world.idempotency.inbox("billing")), Processed)


def encrypted(**settings: Any) -> World:
    return new_world(
        **{
            "encryption": "on",
            "key_ring": {"k": "0" * 43 + "="},
            "secret": LONG,
            "allow_plaintext_transport": True,
            **settings,
        }
    )


def test_a_result_that_the_store_takes_late_is_waited_for(world: World) -> None:
    inbox = world.idempotency.inbox("billing", settle_wait=60)

    def work() -> str:
        world.store.lose_request("complete")
        world.store.lose_request("complete", nth=2)
        return "done"

    with world.app.app_context():
        assert Processed("done", replayed=False) == inbox.process("m-1", work)
    assert Processed("done", replayed=True) == process(world, inbox)


@pytest.mark.parametrize("effects", ("plain", "marked", "deduplicated"))
def test_a_result_that_the_store_does_not_take_is_no_acknowledgement(world: World, effects: str) -> None:
    """Also if the lease ends in between: this process knows that the work is done."""
    inbox = world.idempotency.inbox("billing", effects=effects, settle_wait=0)

    def work() -> str:
        world.store.down = True
        return "done"

    with world.app.app_context():
        assert Later(2.0, "result-not-stored") == inbox.process("m-1", work)
    world.clock.advance(3600.0)
    assert Later(2.0, "result-not-stored") == process(world, inbox)
    assert Later(2.0, "store-unavailable") == process(world, inbox, "m-2")
    store_is_back(world)

    assert Processed("done", replayed=True) == process(world, inbox)
    assert [] == world.runs


def test_an_inbox_forgets_the_writes_that_the_store_has_taken(world: World) -> None:
    inbox = world.idempotency.inbox("billing", settle_wait=0)

    def work() -> str:
        world.store.down = True
        return "done"

    with world.app.app_context():
        for number in range(3):
            inbox.process(f"m-{number}", work)
            store_is_back(world)

    assert len(inbox._unstored) == 1


def store_is_back(world: World) -> None:
    """Have the store answer, and wait until it has taken the writes that were repeated."""
    world.store.down = False
    world.app.extensions["idempotency"].built.engine._deps.repeater.drain(60.0)


def test_a_process_that_ends_gives_its_writes_some_time(world: World) -> None:
    inbox = world.idempotency.inbox("billing", settle_wait=0)

    def work() -> str:
        world.store.down = True
        return "done"

    with world.app.app_context():
        inbox.process("m-1", work)
    world.store.down = False
    drain()
    record = world.record()

    assert record is not None
    assert State.COMPLETED is record.state


def test_a_failure_that_the_store_does_not_take_frees_the_message_later(world: World) -> None:
    inbox = world.idempotency.inbox("billing", settle_wait=0)

    def work() -> None:
        world.store.down = True
        raise ValueError("no")

    with world.app.app_context(), pytest.raises(ValueError, match="no"):
        inbox.process("m-1", work)
    world.clock.advance(3600.0)
    assert Later(2.0, "result-not-stored") == process(world, inbox)
    store_is_back(world)

    assert Processed("done", replayed=False) == process(world, inbox)


def test_a_forked_child_does_not_wait_for_a_write_of_its_parent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = world.idempotency.inbox("billing", settle_wait=0)

    def work() -> str:
        world.store.down = True
        return "done"

    with world.app.app_context():
        inbox.process("m-1", work)
    monkeypatch.setattr("os.getpid", lambda: 0)

    assert Later(2.0, "store-unavailable") == process(world, inbox)


def test_an_erased_value_is_no_second_run() -> None:
    world = encrypted()
    inbox = world.idempotency.inbox("billing")
    assert Processed("done", replayed=False) == process(world, inbox, tenant="acme")
    world.idempotency.tenant_loader(lambda: "acme")
    purged = run(world, "purge", "--tenant", "acme", "--yes", "--reason", "asked", "--actor", "ops")

    assert 0 == purged.exit_code, purged.output
    assert Processed(None, replayed=True, kept=False) == process(world, inbox, tenant="acme")
    assert ["m-1"] == world.runs


# Policies.


def test_keywords_of_http_are_refused(world: World) -> None:
    for name in ("on_store_down", "methods", "header", "required", "key_format", "profile", "max_body", "mode"):
        with pytest.raises(ConfigurationError, match=rf"{name}: .*Did you mean"):
            world.idempotency.inbox("billing", **{name: "allow"})


WRONG_VALUES: tuple[dict[str, Any], ...] = (
    {"effects": "exactly-once"},
    {"max_attempts": 0},
    {"max_attempts": True},
    {"lease": 0},
    {"lease": 60, "max_runtime": 30},
    {"keep": -1},
    {"keep": 91 * 86400},
    {"in_flight": "reject"},
    {"max_result": -1},
    {"decide": "keep"},
    {"settle_wait": -1},
)


def test_wrong_values_are_refused(world: World) -> None:
    for policy in WRONG_VALUES:
        with pytest.raises(ConfigurationError, match=f"inbox.'billing'.: .*{next(iter(policy)).split('_')[0]}"):
            world.idempotency.inbox("billing", **policy)


def test_every_fault_is_reported_together(world: World) -> None:
    with pytest.raises(ConfigurationError) as raised:
        world.idempotency.inbox("billing", header="X", kep=1, max_attempts=0)

    assert 3 == len(raised.value.faults)


def test_settings_and_profiles_do_not_reach_an_inbox() -> None:
    world = new_world(
        profile="stripe", keep=60, on_error="keep", effects="deduplicated", in_flight="wait", quota_records=1
    )
    inbox = world.idempotency.inbox("billing")
    policy = inbox.policy

    assert (7 * 86400.0, "release", "plain", "reject") == (
        policy.keep,
        policy.on_error,
        policy.effects,
        policy.in_flight,
    )
    assert [False] * 3 == [process(world, inbox, each).replayed for each in "abc"]


def test_the_defaults_are_those_of_the_guide(world: World) -> None:
    policy = world.idempotency.inbox("billing").policy

    assert (30.0, 21600.0, 604800.0, 262144, 5, 10.0) == (
        policy.lease,
        policy.max_runtime,
        policy.keep,
        policy.max_result,
        policy.max_attempts,
        policy.settle_wait,
    )


def test_a_short_max_runtime_shortens_the_default_lease(world: World) -> None:
    assert 5.0 == world.idempotency.inbox("billing", max_runtime=5).policy.lease


def test_a_consumer_has_a_name(world: World) -> None:
    names: tuple[Any, ...] = ("", None, 7, "x" * 250)
    for name in names:
        with pytest.raises(ConfigurationError, match="name of a consumer"):
            world.idempotency.inbox(name)


def test_one_name_has_one_policy(world: World) -> None:
    world.idempotency.inbox("billing", effects="marked")
    world.idempotency.inbox("billing", effects="marked")
    with pytest.raises(ConfigurationError, match="another policy"):
        world.idempotency.inbox("billing")


def test_transactional_work_needs_a_store_on_its_own_database(world: World) -> None:
    inbox = world.idempotency.inbox("billing", effects="transactional")
    with pytest.raises(ConfigurationError, match="transactional"):
        process(world, inbox)
    with world.app.app_context(), pytest.raises(ConfigurationError, match="transactional"):
        inbox.check()


def test_an_inbox_needs_its_application(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    with pytest.raises(ConfigurationError, match="app_context"):
        inbox.process("m-1", lambda: 1)
    with Flask("bare").app_context(), pytest.raises(ConfigurationError, match="init_app"):
        inbox.process("m-1", lambda: 1)


def test_without_the_extension_work_runs_unprotected() -> None:
    world = new_world(enabled=False)
    inbox = world.idempotency.inbox("billing")

    assert [Processed("done", replayed=False, kept=False)] * 2 == [process(world, inbox), process(world, inbox)]
    assert [] == world.store.calls


def test_transactional_work_is_refused_if_nothing_would_commit_it() -> None:
    world = new_world(enabled=False)

    with pytest.raises(ConfigurationError, match="transactional"):
        process(world, world.idempotency.inbox("billing", effects="transactional"))
    assert [] == world.runs


# The claim of the work.


def test_work_inside_a_request_and_a_request_inside_work_find_their_own_claims(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    seen: list[tuple[str, str]] = []

    @world.view()
    def pay() -> str:
        seen.append(("request", current_claim.key))
        inbox.process("m-1", lambda: seen.append(("message", current_claim.key)))
        seen.append(("request", current_claim.key))
        return "paid"

    @world.view("/open")
    @exempt
    def open_() -> str:
        seen.append(("exempt", str(bool(current_claim))))
        return "ok"

    def work() -> None:
        world.post(key="r-2")
        seen.append(("outer", current_claim.key))
        world.post("/open", key=None)
        inbox.process("m-3", lambda: seen.append(("inner", current_claim.key)))
        seen.append(("outer", current_claim.key))

    world.post(key="r-1")
    with world.app.app_context():
        inbox.process("m-2", work)

    assert [
        ("request", "r-1"),
        ("message", "m-1"),
        ("request", "r-1"),
        ("request", "r-2"),
        ("request", "r-2"),
        ("outer", "m-2"),
        ("exempt", "False"),
        ("inner", "m-3"),
        ("outer", "m-2"),
    ] == seen


def test_downstream_keys_stay_the_same_over_attempts_and_secrets() -> None:
    store = FaultyMemory(MemoryStore(clock=FrozenClock()))
    keys = set[str]()

    def work() -> None:
        keys.add(current_claim.downstream_key("charge"))
        raise ValueError("again")

    for secret in (("old" * 8,), ("new" * 8, "old" * 8)):
        world = new_world(store=store, secret=secret)
        inbox = world.idempotency.inbox("billing", effects="deduplicated")
        with world.app.app_context(), pytest.raises(ValueError, match="again"):
            inbox.process("m-1", work)

    assert 1 == len(keys)


def test_secrets_may_rotate(world: World) -> None:
    store = world.store
    worlds = [new_world(store=store, secret=secret) for secret in (("old" * 8,), ("new" * 8, "old" * 8), ("new" * 8,))]
    inboxes = [each.idempotency.inbox("billing") for each in worlds]
    first = process(worlds[0], inboxes[0])
    both = process(worlds[1], inboxes[1])
    later = [process(each, inbox, "m-2") for each, inbox in zip(worlds[1:], inboxes[1:], strict=True)]

    assert [False, True, False, True] == [each.replayed for each in (first, both, *later)]


def test_names_of_tenants_are_hashed_like_those_of_requests() -> None:
    world = new_world(hash_identities=True)
    process(world, world.idempotency.inbox("billing"), tenant="acme")
    record = world.record()

    assert record is not None
    assert record.info.tenant not in ("", "acme")


def test_a_tenant_of_an_enumeration_is_shown_by_its_text() -> None:
    """`str(Tenant.ACME)` is another text."""
    world = new_world()
    process(world, world.idempotency.inbox("billing"), tenant=Tenant.ACME)
    record = world.record()

    assert record is not None
    assert "acme" == record.info.tenant


def test_stored_values_are_encrypted() -> None:
    world = encrypted()
    inbox = world.idempotency.inbox("billing")
    process(world, inbox, value="4242 4242")
    record = world.record()

    assert record is not None
    assert record.payload is not None
    assert b"4242" not in record.payload.data
    assert Processed("4242 4242", replayed=True) == process(world, inbox)


# Threads.


def test_two_threads_with_one_message_do_its_work_once(world: World) -> None:
    inbox = world.idempotency.inbox("billing")
    barrier = threading.Barrier(8)

    def deliver(_: int) -> Any:
        barrier.wait(60)
        return process(world, inbox)

    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(deliver, range(8)))

    assert 1 == len(world.runs)
    assert 1 == sum(isinstance(verdict, Processed) and not verdict.replayed for verdict in verdicts)


def test_a_duplicate_may_wait_for_the_value(world: World) -> None:
    inbox = world.idempotency.inbox("billing", in_flight="wait", wait=60)
    begun, finish = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert finish.wait(60)
        return "done"

    def deliver(work: Any) -> Any:
        with world.app.app_context():
            return inbox.process("m-1", work)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(deliver, work)
        assert begun.wait(60)
        second = threads.submit(deliver, lambda: "again")
        finish.set()
        verdicts = [first.result(60), second.result(60)]

    assert [Processed("done", replayed=False), Processed("done", replayed=True)] == verdicts


def test_the_shield_is_entered_around_claim_and_settle_and_never_around_work() -> None:
    steps: list[str] = []

    @contextmanager
    def shield() -> Iterator[None]:
        steps.append("shield")
        try:
            yield
        finally:
            steps.append("open")

    inbox = Inbox.standalone({"IDEMPOTENCY_STORE": MemoryStore(), "IDEMPOTENCY_SECRET": LONG}, "billing", shield=shield)
    inbox.process("m-1", lambda: steps.append("work"))
    with pytest.raises(ValueError, match="no"):
        inbox.process("m-2", lambda: int("no"))

    assert ["shield", "open", "work", "shield", "open", "shield", "open", "shield", "open"] == steps


@pytest.mark.parametrize("nth", (1, 2))
def test_a_signal_that_was_held_off_ends_no_claim_twice(nth: int) -> None:
    """It is raised when the shield is left: after the claim its work has not begun, and after the end all is stored."""
    entered: list[int] = []

    @contextmanager
    def shield() -> Iterator[None]:
        entered.append(1)
        yield
        if len(entered) == nth:
            raise SystemExit

    store = MemoryStore()
    inbox = Inbox.standalone({"IDEMPOTENCY_STORE": store, "IDEMPOTENCY_SECRET": LONG}, "billing", shield=shield)
    runs: list[int] = []
    with pytest.raises(SystemExit):
        inbox.process("m-1", lambda: runs.append(1))

    assert [] == runs if nth == 1 else [1] == runs
    assert Processed(None, replayed=nth == 2) == inbox.process("m-1", lambda: runs.append(2))
    assert 1 == len(runs)


def test_work_without_protection_may_mark_its_point_of_no_return() -> None:
    world = new_world(enabled=False)
    inbox = world.idempotency.inbox("billing", effects="marked")
    with world.app.app_context():
        assert inbox.process("m-1", lambda: current_claim.point_of_no_return()) == Processed(
            None, replayed=False, kept=False
        )


def test_a_late_worker_whose_successor_failed_leaves_the_message_to_the_next_delivery(world: World) -> None:
    inbox = world.idempotency.inbox("billing", effects="deduplicated")

    def late() -> str:
        world.clock.advance(31.0)
        with pytest.raises(ValueError, match="no"):
            inbox.process("m-1", lambda: int("no"))
        return "late"

    with world.app.app_context():
        assert Later(1.0, "result-not-stored") == inbox.process("m-1", late)
    assert Processed("done", replayed=False) == process(world, inbox)


def test_messages_are_recognised_after_a_change_of_the_namespace(world: World) -> None:
    process(world, world.idempotency.inbox("billing"))
    former = {"namespace": "tests.web.app"}
    renamed = new_world(store=world.store, namespace="shop", former_identity=former)
    inbox = renamed.idempotency.inbox("billing")

    assert Processed("done", replayed=True) == process(renamed, inbox)
    assert [False, True] == [process(renamed, inbox, "m-2").replayed for _ in range(2)]


def test_a_value_that_is_erased_while_its_work_runs_is_not_kept() -> None:
    world = encrypted()
    world.idempotency.tenant_loader(lambda: "acme")
    inbox = world.idempotency.inbox("billing")

    def work() -> str:
        purged = run(world, "purge", "--tenant", "acme", "--yes", "--reason", "asked", "--actor", "ops")
        assert 0 == purged.exit_code, purged.output
        return "done"

    with world.app.app_context():
        verdict = inbox.process("m-1", work, tenant="acme")

    assert Processed("done", replayed=False, kept=False) == verdict
    assert Processed(None, replayed=True, kept=False) == process(world, inbox, tenant="acme")


def test_work_finds_its_claim_in_an_application_context_of_its_own(world: World) -> None:
    inbox = world.idempotency.inbox("billing")

    def work() -> str:
        with Flask("another").app_context():
            return current_claim.key

    with world.app.app_context():
        assert Processed("m-1", replayed=False) == inbox.process("m-1", work)


def test_quotas_do_not_count_messages() -> None:
    world = new_world(quota_records=1)
    inbox = world.idempotency.inbox("billing")
    verdicts = [process(world, inbox, each) for each in "abc"]
    usage = world.store.ledger.usage(world.store.calls[-1].key.tid)

    assert [Processed("done", replayed=False)] * 3 == verdicts
    assert (0, 0, 0) == (usage.records, usage.bytes, usage.in_flight)


def test_an_inbox_that_writes_values_itself_keeps_what_json_cannot(world: World) -> None:
    inbox = world.idempotency.inbox(
        "billing", dump=lambda value: repr(value).encode(), load=lambda data: literal_eval(data.decode())
    )
    value = {1: "charged", (2, "b"): [{3: None}]}

    assert Processed(value, replayed=False) == process(world, inbox, value=value)
    assert Processed(value, replayed=True) == process(world, inbox, value=value)


def test_a_value_that_is_no_json_is_logged_once_and_never_shown(world: World, caplog: pytest.LogCaptureFixture) -> None:
    inbox = world.idempotency.inbox("billing")
    for message_id in "ab":
        process(world, inbox, message_id, value=Decimal("4242"))

    assert "card" not in repr(Processed("card", replayed=False))
    assert 1 == caplog.text.count("is no JSON")
    assert "4242" not in caplog.text
