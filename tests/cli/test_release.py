"""`flask idempotency release`: a key is freed by hand, and not while its work may be done or be going on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.events import Resolved
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import OnExpiry, Record, State
from flask_idempotency.operations.records import handle_of
from tests.apps import (
    ALICES,
    ANSWER,
    GONE,
    LEASE,
    WHY,
    World,
    key_of,
    lapsed,
    paid,
    record,
    refusal,
    run,
    said,
    shop,
    vanished,
)

RELEASE = ("release", *ALICES, *WHY, "--yes")


def state(world: World, key: str = "k") -> State | None:
    found = record(world, key)
    return None if found is None else found.state


def test_a_key_whose_owner_is_gone_for_good_is_free() -> None:
    """And its next retry runs, once."""
    world = shop()
    lapsed(world, after=GONE)

    told = run(world, *RELEASE)

    assert (0, "Released: the next retry runs.\n") == (told.exit_code, told.output)
    assert [201, 201] == [paid(world).status_code for _ in range(2)]
    assert 1 == len(world.runs)


def test_one_that_its_own_owner_gave_up_is_free_when_its_lease_is_over() -> None:
    """It has said that it cannot tell, and is at work no more; but what it has sent may still arrive."""
    world = shop(on_error="quarantine")
    assert 500 == paid(world, Fail="yes").status_code
    assert State.QUARANTINED is state(world)
    world.clock.advance(LEASE - 1)
    assert "may go on for 1 s" in refusal(run(world, *RELEASE))
    world.clock.advance(1)

    assert 0 == run(world, *RELEASE).exit_code
    assert 201 == paid(world).status_code


@pytest.mark.parametrize("quarantined", (True, False), ids=("quarantined", "in progress"))
def test_while_the_owner_may_live_it_is_refused(quarantined: bool) -> None:
    """
    With when it was last seen, and until when it may be at work. Nothing is changed, and it can still settle its key.
    """
    world = shop()
    key, token = lapsed(world) if quarantined else vanished(world)
    before = record(world)

    told = refusal(run(world, *RELEASE))

    seen, lives = ("31 s", "14 min 59 s") if quarantined else ("0 s", "15 min 30 s")
    assert f"it was last seen {seen} ago, and may go on for {lives}, until 2001-09-09T02:02:10.000Z." in told
    assert "--force" in told
    assert (before, []) == (record(world), world.told(Resolved))
    world.store.complete(key, token, ANSWER, keep=60)
    assert State.COMPLETED is state(world)


@pytest.mark.parametrize("command", (("release",), ("resolve", "--never-happened")), ids=lambda command: command[0])
def test_of_a_deduplicated_endpoint_three_silent_leases_are_enough(command: tuple[str, ...]) -> None:
    """Without --force. Until then the refusal names the seconds that are left, and the word that overrules it."""
    world = shop(effects="deduplicated", on_abandoned="quarantine")
    lapsed(world, after=2 * LEASE)
    asked = (*command, *ALICES, *WHY, "--yes")
    world.clock.advance(LEASE - 0.5)

    assert "Repeat this in 1 s, or release it now all the same: --force." in refusal(run(world, *asked))
    assert State.QUARANTINED is state(world)
    world.clock.advance(0.5)

    assert said(run(world, *asked, "--json")) == {"verb": "released", "forced": False, "settled": 1, "left": 0}
    assert [201, 201] == [paid(world).status_code for _ in range(2)]
    assert 1 == len(world.runs)


def test_a_deduplicated_owner_that_renews_between_the_look_and_the_release_wins() -> None:
    """It was silent for three leases, and is at work after all: no second run begins."""
    world = shop(effects="deduplicated")
    key, token = vanished(world, on_expiry=OnExpiry.TAKEOVER)
    world.clock.advance(3 * LEASE)

    told = _meanwhile(world, lambda: world.store.renew(key, token, lease=LEASE))

    assert "or its worker has just renewed its lease" in told
    assert State.PROCESSING is state(world)
    assert "Repeat this in 90 s" in refusal(run(world, *RELEASE))


@pytest.mark.parametrize("seconds", (GONE - 0.01, GONE), ids=("may live", "cannot live"))
def test_the_owner_may_live_for_as_long_as_a_view_may_run_after_its_lease(seconds: float) -> None:
    """Not for its lease alone: one that is frozen comes back."""
    world = shop()
    vanished(world)
    world.clock.advance(seconds)

    assert (0 if seconds >= GONE else 1) == run(world, *RELEASE).exit_code


def test_what_was_done_is_refused() -> None:
    """Its retries get the answer, and would be a second payment."""
    world = shop()
    paid(world)

    assert "Its request completed, and retries get the response" in refusal(run(world, *RELEASE))
    assert "true" == paid(world).headers["Idempotency-Replayed"]
    assert 1 == len(world.runs)


def condemned(world: World) -> None:
    paid(world)
    found = record(world)
    assert found is not None
    assert found.payload is not None
    world.store.mark_corrupt(key_of(world), found.payload)


def test_what_was_done_and_cannot_be_opened_is_refused() -> None:
    """It is quarantined, and all the same it was done."""
    world = shop()
    condemned(world)

    told = refusal(run(world, *RELEASE))

    assert "Its request completed: the record holds a response that no worker could open" in told
    assert "owner" not in told
    assert State.QUARANTINED is state(world)


@pytest.mark.parametrize(
    ("endpoint", "doubtful"), (("pay", False), ("paid_before", True)), ids=("there", "renamed since")
)
@pytest.mark.parametrize("quarantined", (True, False), ids=("quarantined", "in progress"))
def test_of_an_endpoint_that_is_not_there_nobody_knows_for_how_long_its_views_run(
    endpoint: str, doubtful: bool, quarantined: bool
) -> None:
    """The policy that holds for it now is none that anybody has chosen for it."""
    world = shop()
    vanished(world, endpoint=endpoint)
    world.clock.advance(10 * GONE)
    if quarantined:
        (found,) = world.store.recovery.expired_leases(horizon=world.clock.now, limit=10).found
        assert world.store.recovery.quarantine_expired(found, horizon=world.clock.now)
    never = ("resolve", *ALICES, "--never-happened", *WHY, "--yes")

    for command in (RELEASE, never) if quarantined and doubtful else (RELEASE,):
        told = run(world, *command)
        assert doubtful is ("this application has no endpoint of that name" in told.stderr)
        assert int(doubtful) == told.exit_code
    if doubtful:
        assert said(run(world, *RELEASE, "--force", "--json"))["forced"]


@pytest.mark.parametrize("make", (vanished, lapsed, condemned, paid), ids=lambda make: make.__name__)
def test_force_overrules_each_refusal_and_is_told(make: Any) -> None:
    """In the audit event, and to the one who was slower: a late owner has lost its claim."""
    world = shop()
    owned = make(world)
    world.runs.clear()

    told = run(world, *RELEASE, "--force", "--json")

    assert (0, True) == (told.exit_code, said(told)["forced"])
    (event,) = world.told(Resolved)
    assert isinstance(event, Resolved)
    assert event.forced
    if isinstance(owned, tuple):
        key, token = owned
        with pytest.raises(LeaseLost):
            world.store.complete(key, token, ANSWER, keep=60)
    assert (201, 1) == (paid(world).status_code, len(world.runs))


def test_a_force_that_was_not_needed_is_none() -> None:
    """An auditor looks for those that were."""
    world = shop()
    lapsed(world, after=GONE)

    assert not said(run(world, *RELEASE, "--force", "--json"))["forced"]


def test_it_asks_and_shows_what_about() -> None:
    """No, and no answer at all, leave everything as it is."""
    world = shop()
    lapsed(world, after=GONE)
    told = [run(world, *RELEASE[:-1], typed=typed) for typed in ("n\n", "")]

    assert [1, 1] == [each.exit_code for each in told]
    assert all("owner:        last seen 15 min 30 s ago, not running" in each.stderr for each in told)
    assert State.QUARANTINED is state(world)
    assert 0 == run(world, *RELEASE[:-1], typed="y\n").exit_code
    assert record(world) is None


def test_what_speaks_against_it_is_shown_to_whoever_forces_it() -> None:
    world = shop()
    lapsed(world)

    told = run(world, *RELEASE[:-1], "--force", typed="n\n")

    assert "Its worker may still run" in told.stderr
    assert State.QUARANTINED is state(world)


def test_an_owner_that_was_faster_wins() -> None:
    """Between the look and the yes: nothing is changed, and somebody says so."""
    world = shop()
    key, token = vanished(world)
    world.clock.advance(GONE)

    told = _meanwhile(world, lambda: world.store.complete(key, token, ANSWER, keep=60))

    assert "Another process resolved the key first, or its worker has just renewed its lease" in told
    assert (State.COMPLETED, []) == (state(world), world.told(Resolved))


def _meanwhile(world: World, act: Any) -> str:
    """What is said to whoever releases, while this is done right after they have looked."""
    read = Engine.read

    def looked(self: Engine, key: Any) -> Record | None:
        found = read(self, key)
        act()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "read", looked)
        return refusal(run(world, *RELEASE))


def test_it_is_told_who_and_why() -> None:
    """By what stands for the key in logs, which names nobody."""
    world = shop()
    lapsed(world, after=GONE)

    run(world, *RELEASE)

    label = Identity(b"s").label(key_of(world))
    assert [
        Resolved(label, "pay", verb="released", was="quarantined", actor="ops", reason="asked the bank")
    ] == world.told(Resolved)


def test_whoever_says_no_name_is_the_user_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or unknown, where that has none."""
    actors = []
    for user in (lambda: "carol", _nobody):
        world = shop()
        lapsed(world, after=GONE)
        monkeypatch.setattr("getpass.getuser", user)
        assert 0 == run(world, "release", *ALICES, "--reason", "x", "--yes").exit_code
        actors += [event.actor for event in world.told(Resolved) if isinstance(event, Resolved)]

    assert ["carol", "unknown"] == actors


def _nobody() -> str:
    raise OSError("no user name")


def test_without_a_reason_nothing_is_done() -> None:
    """It is what an auditor asks first; and one line, so that it forges none in a log."""
    world = shop()
    lapsed(world, after=GONE)

    for why in ((), ("--reason", ""), ("--reason", "  "), ("--reason", "a\nb"), ("--reason", "x" * 256)):
        assert 2 == run(world, "release", *ALICES, *why, "--yes").exit_code, why
    assert State.QUARANTINED is state(world)


def test_what_is_free_already_is_refused() -> None:
    world = shop()
    lapsed(world, after=GONE)
    handle = handle_of(key_of(world))
    assert 0 == run(world, "release", handle, *WHY, "--yes").exit_code

    assert "There is no record with this id" in refusal(run(world, "release", handle, *WHY, "--yes"))


@pytest.mark.parametrize("named", ("key", "handle", "other handle"))
def test_while_secrets_rotate_it_is_free_under_each(named: str) -> None:
    """Whichever record it was named by; else the other would still refuse the retry."""
    world = shop(secret=["new", "old"], on_error="quarantine")
    paid(world, Fail="yes")
    world.clock.advance(LEASE)
    told = said(run(world, "show", *ALICES, "--json"))
    by = {"key": ALICES, "handle": (told["handle"],), "other handle": (told["also"][0],)}[named]

    done = said(run(world, "release", *by, *WHY, "--yes", "--json"))

    assert (2, 0) == (done["settled"], done["left"])
    assert 201 == paid(world).status_code
    assert 2 == len(world.told(Resolved))


def test_while_secrets_rotate_an_owner_that_took_the_first_keeps_all() -> None:
    """Owners settle the oldest first, and so does this: there is never one answer here and a second run there."""
    world = shop(secret=["new", "old"], on_error="quarantine")
    paid(world, Fail="yes")
    world.clock.advance(LEASE)
    states = _all_states(world)
    free = type(world.store.recovery).force_release
    asked = []

    def late(self: Any, seen: Any) -> bool:
        asked.append(seen.key.rid)
        return free(self, replace(seen, record=replace(seen.record, token=bytes(16))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.store.recovery), "force_release", late)
        assert "Nothing was changed" in refusal(run(world, *RELEASE))

    oldest = handle_of(_keys(world)[0])
    assert (states, 1) == (_all_states(world), len(asked))
    assert oldest == said(run(world, "show", *ALICES, "--json"))["handle"]


def _keys(world: World) -> list[Any]:
    return [call.key for call in world.store.calls if call.verb == "claim"][:2]


def _all_states(world: World) -> list[State | None]:
    found = [world.store.read(key) for key in _keys(world)]
    return [None if each is None else each.state for each in found]


def test_while_secrets_rotate_a_hashed_name_needs_its_tenant_said() -> None:
    """Nobody can tell from the record what the tenant is called under the other secret."""
    world = shop(secret=["new", "old"], on_error="quarantine", hash_identities=True)
    paid(world, Fail="yes")
    world.clock.advance(LEASE)
    handle = said(run(world, "show", *ALICES, "--json"))["handle"]

    assert "add --tenant T" in refusal(run(world, "release", handle, *WHY, "--yes"))
    assert State.QUARANTINED in _all_states(world)
    assert 2 == said(run(world, "release", handle, "--tenant", "acme", *WHY, "--yes", "--json"))["settled"]


def test_a_store_that_does_not_answer_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell whether it is free, so it is to be repeated; and what is told says so."""
    world = shop()
    lapsed(world, after=GONE)

    def down(*_: Any) -> bool:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(type(world.store.recovery), "force_release", down)

    assert (2, "Error: no answer\n") == ((told := run(world, *RELEASE)).exit_code, told.stderr)
    assert [False] == [event.certain for event in world.told(Resolved) if isinstance(event, Resolved)]
