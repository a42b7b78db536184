"""`flask idempotency list` and `show`: what an auditor may know of a record, and how one is named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from flask import Flask

from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.operations import browse
from flask_idempotency.operations.records import handle_of
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from flask_idempotency.web.current_claim import current_claim
from tests.apps import (
    ALICES,
    GONE,
    LEASE,
    MAX_RUNTIME,
    NAME,
    World,
    key_of,
    lapsed,
    new_world,
    paid,
    refusal,
    run,
    said,
    shop,
    vanished,
)


def listed(world: World, state: str, *arguments: str) -> list[dict[str, Any]]:
    told = run(world, "list", "--state", state, *arguments, "--json")
    assert 0 == told.exit_code, told.output
    found: list[dict[str, Any]] = said(told)["records"]
    return found


def test_a_list_has_a_line_for_each_record_in_its_state() -> None:
    """
    With an id by which it is found again, and its times by the store's clock.
    """
    world = shop()
    key, _ = lapsed(world, after=LEASE + 65)
    vanished(world, "other")

    head, line = run(world, "list", "--state", "quarantined").output.splitlines()
    wide_head, wide_line = run(world, "list", "--state", "quarantined", "--wide").output.splitlines()

    assert ["id", "state", "request", "tenant", "first", "used", "lease"] == head.split()
    assert f"{handle_of(key)[:8]} quarantined POST pay acme 1 min ago ended 1 min ago" == " ".join(line.split())
    assert "status completed principal attempt owner seen reason" == " ".join(wide_head.split()[7:])
    assert f"{' '.join(line.split())} - - alice 1 1 min ago lease-expired" == " ".join(wide_line.split())


def test_machines_get_the_whole_record() -> None:
    world = shop()
    lapsed(world)

    (told,) = listed(world, "quarantined")

    assert {
        "handle": handle_of(key_of(world)),
        "record": Identity(b"s").label(key_of(world)),
        "state": "quarantined",
        "endpoint": "pay",
        "method": "POST",
        "tenant": "acme",
        "principal": "alice",
        "attempt": 1,
        "fence": 1_000_000_000_000_000,
        "requested_at": "2001-09-09T01:46:40.000Z",
        "first_used_ago": LEASE + 1,
        "lease_ended_ago": 1.0,
        "lease_left": None,
        "on_expiry": "quarantine",
        "reason": "lease-expired",
        "owner": {"last_seen_ago": LEASE + 1, "may_live_for": MAX_RUNTIME - 1},
        "completed_at": None,
        "duration": None,
        "expires_at": None,
        "answer": None,
        "paused": False,
        "steps": None,
        "remembered_until": None,
        "tries": 0,
    } == told


def test_a_list_can_be_narrowed() -> None:
    world = shop()
    vanished(world, "old")
    world.clock.advance(600)
    vanished(world, "new")
    vanished(world, "elsewhere", endpoint="refund")
    handles = {handle_of(key_of(world, key)): key for key in ("old", "new", "elsewhere")}
    cases: tuple[tuple[tuple[str, ...], set[str]], ...] = (
        ((), {"old", "new", "elsewhere"}),
        (("--tenant", "acme"), {"old", "new", "elsewhere"}),
        (("--tenant", "globex"), set()),
        (("--no-tenant",), set()),
        (("--older-than", "10m"), {"old"}),
        (("--older-than", "599.5"), {"old"}),
        (("--older-than", "601s"), set()),
        (("--endpoint", "refund"), {"elsewhere"}),
    )

    for arguments, keys in cases:
        assert keys == {handles[each["handle"]] for each in listed(world, "processing", *arguments)}, arguments


def test_a_list_says_when_it_is_not_all() -> None:
    """A person who sees fifty must not believe that there are fifty."""
    world = shop()
    for number in range(3):
        vanished(world, str(number))

    some, all_ = (run(world, "list", "--state", "processing", "--limit", limit) for limit in ("2", "3"))
    machine = said(run(world, "list", "--state", "processing", "--limit", "2", "--json"))

    assert (3, "1 more: see --limit, --older-than and --endpoint.\n") == (len(some.stdout.splitlines()), some.stderr)
    assert (4, "") == (len(all_.stdout.splitlines()), all_.stderr)
    assert (2, True) == (len(machine["records"]), machine["more"])


def test_a_list_needs_no_option_and_begins_with_what_needs_an_operator() -> None:
    """The oldest of each kind first. Completed records are left out."""
    world = shop()
    vanished(world, "expired", on_expiry=OnExpiry.TAKEOVER)
    world.clock.advance(5)
    vanished(world, "expired later", on_expiry=OnExpiry.TAKEOVER)
    world.clock.advance(LEASE + 1)
    world.store.quarantine(*vanished(world, "held"), "status-500")
    vanished(world, "runs")
    world.clock.advance(5)
    world.store.quarantine(*vanished(world, "held later"), "status-500")
    vanished(world, "runs later")
    paid(world, "done")
    names = {handle_of(key_of(world, name))[:8]: name for name in ("held", "held later", "runs", "runs later")}
    names |= {handle_of(key_of(world, name))[:8]: name for name in ("expired", "expired later")}

    rows = [re.split(r"  +", line) for line in run(world, "list").stdout.splitlines()[1:]]
    machine = said(run(world, "list", "--json"))["records"]

    assert [
        ["held", "quarantined", "-"],
        ["held later", "quarantined", "-"],
        ["expired", "lease expired", "ended 11 s ago"],
        ["expired later", "lease expired", "ended 6 s ago"],
        ["runs", "in flight", "25 s left"],
        ["runs later", "in flight", "30 s left"],
    ] == [[names[row[0]], row[1], row[5]] for row in rows]
    assert [row[0] for row in rows] == [each["handle"][:8] for each in machine]
    assert {77} == {len(each["handle"]) for each in machine}
    some = run(world, "list", "--limit", "1")
    assert "held" == names[some.stdout.splitlines()[1].split()[0]]
    assert "5 more: see --limit, --older-than and --endpoint.\n" == some.stderr


def test_a_list_of_completed_records_stops_at_its_limit() -> None:
    """There may be millions, so it counts none."""
    world = shop()
    for number in range(3):
        paid(world, str(number))

    told = run(world, "list", "--state", "completed", "--limit", "2")

    assert said(run(world, "list", "--state", "completed", "--limit", "2", "--json"))["more"] is True
    assert said(run(world, "list", "--state", "completed", "--limit", "3", "--json"))["more"] is False
    assert (3, "More records match: see --limit, --older-than and --endpoint.\n") == (
        len(told.stdout.splitlines()),
        told.stderr,
    )


def test_a_list_of_too_many_records_counts_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    world = shop()
    for number in range(4):
        vanished(world, str(number))
    monkeypatch.setattr(browse, "MOST_LISTED", 3)

    assert "More records match: see" in run(world, "list", "--limit", "2").stderr


def test_many_records_in_one_state_hide_none_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims with an expired lease may pile up after an incident, and the quarantined record needs an operator first."""
    world = shop()
    lapsed(world, "held")
    for number in range(4):
        vanished(world, str(number))
    monkeypatch.setattr(browse, "MOST_LISTED", 3)

    told = run(world, "list", "--limit", "2")

    assert ["quarantined", "in"] == [line.split()[1] for line in told.stdout.splitlines()[1:]]
    assert "More records match: see" in told.stderr


def test_a_list_without_unfinished_records_names_the_completed_ones() -> None:
    assert "No record is unfinished. Completed ones: --state completed.\n" == run(shop(), "list").output


def test_a_list_of_nothing_says_so() -> None:
    assert (0, "No record matches.\n") == ((told := run(shop(), "list", "--state", "completed")).exit_code, told.output)


def test_one_use_under_two_secrets_is_one_line_and_shown_with_both() -> None:
    """While secrets rotate. The record under the oldest comes first: it is the one that decides."""
    world = shop(secret=["new", "old"])
    paid(world)

    (line,) = listed(world, "completed")
    told = said(run(world, "show", *ALICES, "--json"))

    assert line["handle"] in (told["handle"], *told["also"])
    assert 1 == len(told["also"])
    assert handle_of(key_of(world)) == told["also"][0], "that of the newest secret"
    assert f"also under:   {told['also'][0]}" in run(world, "show", *ALICES).output


def charged(**settings: Any) -> tuple[World, list[str]]:
    """Return a shop after one request, and the downstream key of its charge."""
    world, sent = new_world(Flask(NAME), principal=None, **settings), []

    @world.view()
    def pay() -> str:
        sent.append(current_claim.downstream_key("charge"))
        return "paid"

    world.post(key="the-clients-own")
    return world, sent


def test_show_prints_the_downstream_key_of_a_name_and_never_the_clients_key() -> None:
    world, (sent,) = charged()
    named = ("show", "--key", "the-clients-own")

    text = run(world, *named, "--downstream", "charge").output
    found, other, unasked = (
        said(run(world, *named, *option, "--json"))
        for option in (("--downstream", "charge"), ("--downstream", "refund"), ())
    )

    assert f"downstream:   {sent}" in text.splitlines()
    assert sent == found["downstream_key"]
    assert sent != other["downstream_key"]
    assert "downstream_key" not in unasked
    assert "the-clients-own" not in text + json.dumps(found)


@pytest.mark.parametrize(
    ("claimed", "listed"),
    ((("old",), ("new",)), (("new", "old"), ("new", "old"))),
    ids=("an old secret", "two secrets"),
)
def test_show_refuses_a_downstream_key_that_it_cannot_derive(claimed: tuple[str, ...], listed: tuple[str, ...]) -> None:
    """Another secret gives a key that the other side does not know, which would look as if it had made no charge."""
    world, _ = charged(secret=claimed)
    handle = listed_handle(world)
    again = new_world(Flask(NAME), principal=None, store=world.store, secret=listed)
    again.view(endpoint="pay")(lambda: "paid")

    assert "downstream key of this record is unknown" in refusal(run(again, "show", handle, "--downstream", "charge"))
    assert handle == said(run(again, "show", handle, "--json"))["handle"]


def listed_handle(world: World) -> str:
    handle: str = listed(world, "completed")[0]["handle"]
    return handle


def test_show_tells_what_an_auditor_is_told_of_a_completed_record() -> None:
    """The status and the size of its answer, and not the answer."""
    world = shop()
    paid(world)
    world.clock.advance(60)

    told = said(run(world, "show", *ALICES, "--json"))
    text = run(world, "show", *ALICES).output

    size = len("paid") + len("Content-Type: text/html; charset=utf-8\r\n")
    assert {"status": 201, "success": True, "byte_size": size, "sealed_under": None, "erased": False} == told["answer"]
    assert ("completed", 60.0, 0.0, None) == tuple(told[n] for n in ("state", "first_used_ago", "duration", "owner"))
    assert ("2001-09-09T01:46:40.000Z", "2001-09-10T01:46:40.000Z") == (told["completed_at"], told["expires_at"])
    assert f"response:     status 201, {size} bytes, not encrypted" in text
    assert "kept until:   2001-09-10T01:46:40.000Z" in text


def test_show_says_when_the_owner_was_last_seen_and_whether_it_may_live() -> None:
    world = shop()
    vanished(world)
    world.clock.advance(10)
    alive = run(world, "show", *ALICES).output
    world.clock.advance(GONE)
    dead = run(world, "show", *ALICES).output

    assert "lease:        not expired; then quarantined" in alive
    assert "owner:        last seen 10 s ago, may run for another 15 min 20 s" in alive
    assert "lease:        expired 15 min 10 s ago; then quarantined" in dead
    assert "owner:        last seen 15 min 40 s ago, not running" in dead


def test_what_is_quarantined_is_not_told_that_it_will_be() -> None:
    """Its owner has said that it does not know, with lease left; or the lease was over. Neither is to be waited for."""
    world = shop(on_error="quarantine")
    paid(world, Fail="yes")
    held = run(world, "show", *ALICES).output
    world.clock.advance(LEASE + 1)
    over = run(world, "show", *ALICES).output

    assert ("lease:        not expired\n" in held, "lease:        expired 1 s ago\n" in over) == (True, True)


def test_show_finds_by_handle_what_list_told() -> None:
    """In any case of its letters: it may be read out on the telephone."""
    world = shop()
    lapsed(world)
    (line,) = listed(world, "quarantined")

    told = [said(run(world, "show", handle, "--json")) for handle in (line["handle"], line["handle"].upper())]

    assert [{**line, "also": [], "steps": [], "changes": [], "resolver": None}] * 2 == told


@pytest.mark.parametrize("typed", ("k", '"k"'), ids=("bare", "quoted"))
def test_a_key_can_be_read_from_standard_input(typed: str) -> None:
    """Where neither the shell's history nor anybody else on the machine sees it."""
    world = shop()
    paid(world)

    told = run(world, "show", "--key", "-", *ALICES[2:], "--json", typed=f"{typed}\n")

    assert handle_of(key_of(world)) == said(told)["handle"]


def test_a_key_of_an_endpoint_with_a_key_space_of_its_own_is_found_without_its_name() -> None:
    """`scope="operation"`: nobody has to know that who looks for a key."""
    world = shop(scope="operation")
    paid(world)

    assert handle_of(key_of(world, operation="pay")) == said(run(world, "show", *ALICES, "--json"))["handle"]


def test_a_key_that_several_endpoints_know_is_ambiguous() -> None:
    """Each is named, so that the right one can be chosen."""
    world = shop(scope="operation")
    world.view("/refund", endpoint="refund")(lambda: "refunded")
    paid(world)
    world.post("/refund", key="k", headers={"X-Tenant": "acme"})

    told = refusal(run(world, "show", *ALICES))

    assert "used for several endpoints" in told
    for endpoint in ("pay", "refund"):
        handle = handle_of(key_of(world, operation=endpoint))
        assert f"{endpoint}: {handle}" in told
        assert endpoint == said(run(world, "show", *ALICES, "--endpoint", endpoint, "--json"))["endpoint"]
        assert endpoint == said(run(world, "show", handle, "--json"))["endpoint"]


NOTHING: tuple[tuple[tuple[str, ...], str], ...] = (
    (("non-sense",), "That is no id of a record"),
    (("abc",), "4 of them are enough"),
    (("aaaa",), "No unfinished record has an id that begins so"),
    (("nonsense",), "No record has this id from a log"),
    (("a" * 76 + "b",), "That is no id of a record"),  # its spare bits are set
    (("a" * 77,), "There is no record with this id"),
    (("--key", "other", *ALICES[2:]), "There is no record of this key"),
    ((*ALICES[:2], "--tenant", "globex", *ALICES[4:]), "check --tenant"),
    ((*ALICES[:2], "--no-tenant", *ALICES[4:]), "check --tenant"),
    ((*ALICES[:4], "--principal", "bob"), "and --principal"),
    ((*ALICES[:4], "--anonymous"), "and --principal"),
    ((*ALICES, "--endpoint", "refund"), "used for another endpoint, pay"),
    ((*ALICES, "--endpoint", "nowhere"), "has no such endpoint"),
    (("--key", "a b", *ALICES[2:]), "This is not a valid key"),
)


def test_what_names_nothing_is_refused_with_what_may_be_wrong() -> None:
    world = shop()
    world.view("/refund", endpoint="refund")(lambda: "refunded")
    paid(world)

    for arguments, why in NOTHING:
        assert why in refusal(run(world, "show", *arguments)), arguments


def test_a_handle_of_another_tenant_is_refused() -> None:
    """Whoever says whose it is means it."""
    world = shop()
    paid(world)
    handle = handle_of(key_of(world))

    assert "belongs to another tenant" in refusal(run(world, "show", handle, "--tenant", "globex"))
    assert "belongs to another tenant" in refusal(run(world, "show", handle, "--no-tenant"))
    assert handle == said(run(world, "show", handle, "--tenant", "acme", "--json"))["handle"]


def test_what_is_not_said_whole_is_a_mistake_in_typing() -> None:
    """
    Whose key it is has to be said where the application tells people apart: another's record would be settled else.
    """
    world = shop()
    mistakes: tuple[tuple[str, ...], ...] = (
        (),
        ("handle", *ALICES),
        ("handle", "--principal", "alice"),
        ("handle", "--endpoint", "pay"),
        ("--key", "k", "--principal", "alice"),
        ("--key", "k", "--tenant", "acme"),
        ("--key", "k", "--tenant", "", "--principal", "alice"),
        ("--key", "k", "--tenant", "acme", "--principal", ""),
        (*ALICES, "--no-tenant"),
        (*ALICES, "--anonymous"),
    )
    for arguments in mistakes:
        told = run(world, "show", *arguments)
        assert (2, True) == (told.exit_code, "Usage:" in told.stderr), arguments


def test_where_nobody_is_told_apart_nothing_has_to_be_said() -> None:
    world = new_world(Flask("tests.web.app"), principal=None, allow_anonymous=True)
    world.view()(lambda: "paid")
    assert 200 == world.post().status_code

    assert "completed" == said(run(world, "show", "--key", "k", "--json"))["state"]


def test_a_name_cannot_command_a_terminal() -> None:
    """A principal is what a loader says, and may hold anything: it is written so that it can be read."""
    world = shop()
    paid(world, User="eve\x1b[2J")

    shown = run(world, "list", "--state", "completed", "--wide").output

    assert "eve\\x1b[2J" in shown
    assert "\x1b" not in shown
    assert (
        "eve\x1b[2J"
        == json.loads(run(world, "list", "--state", "completed", "--json").stdout)["records"][0]["principal"]
    )


@pytest.mark.parametrize("command", (("list", "--state", "completed"), ("show", "a" * 77)), ids=("list", "show"))
def test_a_store_that_cannot_be_searched_is_said_to_be_so(command: tuple[str, ...]) -> None:
    world = new_world(Flask("tests.web.app"), store=FaultyStore(MemoryStore()))  # type: ignore[arg-type]

    assert "cannot be searched" in refusal(run(world, *command))


def test_a_store_that_does_not_answer_is_exit_code_2() -> None:
    """Which is neither "there is none" nor "there is one"."""
    world = shop()
    paid(world)
    world.store.down = True

    told = run(world, "show", *ALICES, "--json")

    assert (2, True) == (told.exit_code, "error" in json.loads(told.stdout))
