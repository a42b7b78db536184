"""Changes that would make every key new are reported, and former names find old keys for one `keep`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from threading import Barrier, Thread
from typing import Any

import pytest
from flask import Flask, request

from flask_idempotency import Step, current_claim, idempotent
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import State
from flask_idempotency.extension import Idempotency
from flask_idempotency.operations.identity import APART_SECONDS, NOTED_EVERY_SECONDS
from flask_idempotency.operations.records import handle_of
from flask_idempotency.web.doctor import run_checks
from tests.apps import World, is_replay, new_world

DAY = 86400.0


def tenant() -> str | None:
    return request.headers.get("X-Tenant", "acme") or None


def shop(
    before: World | None = None, *, name: str = "shop", tenants: bool = False, users: bool = False, **settings: Any
) -> World:
    """A release of the shop, over the store of the one before."""
    world = new_world(
        Flask(name), principal=None, init=False, store=None if before is None else before.store, **settings
    )
    if before is not None:
        world.clock, world.runs = before.clock, before.runs
    if tenants:
        world.idempotency.tenant_loader(tenant)
    if users:
        world.idempotency.principal_loader(lambda: request.headers.get("X-User"))
    world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> tuple[dict[str, Any], int]:
        world.runs.append(1)
        return {"n": len(world.runs), "key": current_claim.downstream_key("charge")}, 201

    return world


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    def errors() -> list[str]:
        found = [
            record.getMessage()
            for record in caplog.records
            if record.name == "flask_idempotency" and record.levelno >= logging.WARNING
        ]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        yield errors


def doctor(world: World) -> list[tuple[str, str]]:
    with world.app.app_context():
        found = run_checks(world.app, environ={}).findings
    return [(each.verdict.value, each.text + " " + each.remedy) for each in found if each.check == "identity"]


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "tenant added": ({}, {"tenants": True}, {"tenant": False}, "a tenant_loader was added"),
    "tenant removed": ({"tenants": True}, {}, {"tenant": tenant}, "a tenant_loader was removed"),
    "principal added": ({}, {"users": True}, {"principal": False}, "a principal_loader was added"),
    "principal removed": (
        {"users": True},
        {},
        {"principal": lambda: request.headers.get("X-User")},
        "a principal_loader was removed",
    ),
    "namespace": ({}, {"namespace": "new"}, {"namespace": "shop"}, "another namespace"),
    "all": (
        {"namespace": "old"},
        {"namespace": "new", "tenants": True, "users": True},
        {"namespace": "old", "tenant": False, "principal": False},
        "a tenant_loader was added; a principal_loader was added",
    ),
}
USER = {"X-User": "alice"}


@pytest.mark.parametrize(("old", "new", "former", "says"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_an_error_at_the_first_request(
    old: dict[str, Any], new: dict[str, Any], former: dict[str, Any], says: str, told: Callable[[], list[str]]
) -> None:
    """Once in each process, with the setting, and until when retries are at risk. `doctor` and `stats` report it too.

    The retry runs again: this is the risk that the error names.
    """
    first = shop(**old)
    first.post(headers=USER)
    assert not told()

    second = shop(first, **new)
    assert "fault" == doctor(second)[0][0]
    assert not is_replay(second.post(headers=USER))
    assert 2 == len(first.runs)
    second.post(key="b", headers=USER)

    (error,) = told()
    assert says in error
    assert "IDEMPOTENCY_FORMER_IDENTITY" in error
    assert says in second.app.test_cli_runner().invoke(args=["idempotency", "stats"]).output
    assert says in second.app.test_cli_runner().invoke(args=["idempotency", "stats", "--json"]).output
    second.clock.advance(DAY + NOTED_EVERY_SECONDS + 1)
    assert ["fine"] == [verdict for verdict, _ in doctor(second)]


@pytest.mark.parametrize(("old", "new", "former", "says"), CHANGES.values(), ids=CHANGES)
def test_keys_are_claimed_under_the_former_name_too(
    old: dict[str, Any],
    new: dict[str, Any],
    former: dict[str, Any],
    says: str,
    told: Callable[[], list[str]],
) -> None:
    """Releases that know only one of the names exclude each other: whichever runs first, the other replays."""
    first = shop(**old)
    answer = first.post(headers=USER)
    second = shop(first, former_identity=former, **new)

    retry = second.post(headers=USER)
    assert (True, answer.json) == (is_replay(retry), retry.json)

    answer = second.post(key="2", headers=USER)
    assert is_replay(first.post(key="2", headers=USER))
    assert is_replay(second.post(key="2", headers=USER))
    third = shop(first, **new)
    assert is_replay(third.post(key="2", headers=USER))
    assert 2 == len(first.runs)
    assert not told()
    third.post(key="3", headers=USER)
    assert says in "".join(told())
    assert ("advice", True) == (doctor(second)[0][0], "Remove it after" in doctor(second)[0][1])


def test_a_change_with_the_former_identity_is_no_error(told: Callable[[], list[str]]) -> None:
    """Neither is its removal one `keep` later, in a rolling deployment at each step."""
    first = shop()
    first.post()
    second = shop(first, tenants=True, former_identity={"tenant": False})
    second.post(key="2")
    shop(first).post(key="3")
    assert not told()

    second.clock.advance(DAY + 2 * NOTED_EVERY_SECONDS)
    third = shop(second, tenants=True)
    third.post(key="4")
    assert not told()


def test_the_former_name_dropped_too_early_is_an_error(told: Callable[[], list[str]]) -> None:
    first = shop()
    first.post()
    shop(first, tenants=True, former_identity={"tenant": False}).post(key="2")

    shop(first, tenants=True).post(key="3")

    assert "a tenant_loader was added" in told()[0]


def test_a_rolling_deployment_does_not_forget_either_shape(told: Callable[[], list[str]]) -> None:
    """Old and new processes alternate. Each logs the change once, and the time of the change stays."""
    old = shop()
    old.post()
    new = shop(old, tenants=True)
    new.post(key="2")
    said = {text.partition(", first used ")[2] for text in told()}
    for number in range(3):
        old.clock.advance(60)
        shop(old).post(key=f"o{number}")
        shop(old, tenants=True).post(key=f"n{number}")
    later = {text.partition(", first used ")[2].partition(":")[0] for text in told()}

    assert 1 == len(said)
    assert 1 == len({text.partition(": ")[0].split(", first used ")[-1] for text in later})


def test_rotating_a_secret_is_no_error_and_replacing_one_is(told: Callable[[], list[str]]) -> None:
    old = shop(secret=["old"])
    old.post()
    shop(old, secret=["new", "old"]).post(key="2")
    assert not told()

    shop(old, secret=["new"]).post(key="3")
    assert "IDEMPOTENCY_SECRET" in told()[0]
    old.clock.advance(DAY + 2 * NOTED_EVERY_SECONDS)
    shop(old, secret=["new"]).post(key="4")
    assert not told()


def test_another_application_in_the_store_is_no_error(told: Callable[[], list[str]]) -> None:
    """Neither with another name, nor with the same name and another namespace after both were in use."""
    one = shop(secret=["one"])
    one.post()
    shop(one, name="billing", secret=["two"], tenants=True).post(key="2")
    assert not told()

    twin = shop(one, namespace="twin", tenants=True)
    twin.post(key="3")
    assert "another namespace" in told()[0]
    for number in range(int(APART_SECONDS / NOTED_EVERY_SECONDS) + 2):
        one.clock.advance(NOTED_EVERY_SECONDS)
        shop(one, secret=["one"]).post(key=f"o{number}")
        shop(one, namespace="twin", tenants=True).post(key=f"t{number}")
    told()
    shop(one, namespace="twin", tenants=True).post(key="5")
    shop(one, secret=["one"]).post(key="6")
    assert not told()


def test_an_application_whose_name_has_changed_is_warned(told: Callable[[], list[str]]) -> None:
    """The module's name is the default namespace: a moved module makes every key new."""
    first = shop()
    first.post()
    first.clock.advance(60)

    moved = shop(first, name="shop.app")
    moved.post(key="2")

    (warning,) = told()
    assert warning.startswith("Possibly")
    assert "another namespace" in warning
    assert "advice" == doctor(moved)[0][0]


def test_the_history_is_read_at_the_first_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in an hour, and not by requests without a key."""
    world = shop()
    asked: list[str] = []
    book = world.store.task_log
    last = book.reports

    def counting() -> Any:
        asked.append("last")
        return last()

    monkeypatch.setattr(book, "reports", counting)
    world.app.get("/")(lambda: "a page")
    world.client().get("/")
    world.post(key=None)
    world.post(key="a\tb")
    assert not asked

    world.post(key="1")
    first = len(asked)
    for number in range(5):
        world.post(key=f"k{number}")
    assert first == len(asked) > 0


def test_a_silent_store_stops_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world = shop()

    def fail() -> Any:
        raise ConnectionError("away")

    monkeypatch.setattr(world.store.task_log, "reports", fail)
    assert 201 == world.post().status_code


@pytest.mark.parametrize("report", ("", "{", "[]", '{"at":NaN,"seen":[]}', '{"at":1e400,"seen":[{}]}', "[" * 3999))
def test_an_unreadable_history_counts_as_none(report: str) -> None:
    """It comes from a store: it is replaced, and stops no request."""
    world = shop()
    world.post()
    (name,) = [name for name in world.store.task_log.reports() if name.startswith("identity:")]
    world.store.task_log.report(name, report)

    again = shop(world)
    assert 201 == again.post(key="2").status_code
    assert "fine" == doctor(again)[0][0]
    assert world.store.task_log.reports()[name].report != report


def test_the_stored_history_reveals_no_names() -> None:
    world = shop(tenants=True, users=True, namespace="canary", name="canary", secret=["canary"])
    world.post(headers={"X-User": "canary", "X-Tenant": "canary"})

    noted = {name: entry.report for name, entry in world.store.task_log.reports().items()}
    assert any(name.startswith("identity:") for name in noted)
    assert "canary" not in str(noted)
    assert all(len(name) <= 40 and len(report) <= 4000 for name, report in noted.items())


def test_many_processes_that_start_together_store_all_shapes() -> None:
    """No process overwrites the entry of another."""
    first = shop()
    worlds = [shop(first, tenants=number % 2 == 0, users=number % 3 == 0) for number in range(6)]
    barrier = Barrier(len(worlds))

    def start(world: World) -> None:
        barrier.wait(60)
        world.post(headers=USER)

    threads = [Thread(target=start, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for world in worlds:  # one that found the others at it notes the next time
        shop(world).clock.advance(1)

    (report,) = [e.report for n, e in first.store.task_log.reports().items() if n.startswith("identity:")]
    assert 1 <= report.count('"shape"') <= 4


# What a former name must not do


def test_a_former_name_without_a_principal_never_shows_another_callers_response() -> None:
    """All callers shared one former name. Each also has its own record, and the same key again is another use."""
    written: tuple[dict[str, Any], ...] = ({}, {"hash_identities": True})
    for settings in written:
        second = shop(shop(**settings), users=True, former_identity={"principal": False}, **settings)

        answers = {user: second.post(key="1", headers={"X-User": user}) for user in ("alice", "bob", "carol")}

        assert 3 == len(second.runs), settings
        assert not any(is_replay(answer) for answer in answers.values()), settings
        for user, answer in answers.items():
            again = second.post(key="1", headers={"X-User": user})
            assert (True, answer.json) == (is_replay(again), again.json), settings


def test_a_former_name_without_a_tenant_never_shows_another_tenants_response() -> None:
    first = shop(users=True)
    second = shop(first, tenants=True, users=True, former_identity={"tenant": False})

    for who in ("acme", "globex"):
        assert not is_replay(second.post(headers={**USER, "X-Tenant": who}))
    for who in ("acme", "globex"):
        assert is_replay(second.post(headers={**USER, "X-Tenant": who}))
    other = second.post(headers={**USER, "X-Tenant": "initech"}, data="another body")
    assert 201 == other.status_code


def test_a_request_without_a_name_is_claimed_once() -> None:
    """Its former name is its present one."""
    second = shop(users=True, former_identity={"principal": False})
    second.post()

    assert ["claim", "complete"] == second.store.verbs()


def test_a_request_without_a_name_does_not_get_what_a_caller_has_under_the_former_name() -> None:
    """Its own name is the former name of all: the key is in use there."""
    second = shop(users=True, former_identity={"principal": False})

    assert 201 == second.post(headers=USER).status_code
    unnamed = second.post()

    assert (422, "key-reused") == (unnamed.status_code, unnamed.json["code"])  # type: ignore[index]
    assert is_replay(second.post(headers=USER))
    assert [1] == second.runs


def test_a_former_name_without_a_tenant_counts_against_no_tenant() -> None:
    """All tenants share it, and one of them would use up what each may have."""
    first = shop()
    second = shop(first, tenants=True, former_identity={"tenant": False}, quota_records=2)

    statuses = [
        second.post(key=f"{who}{number}", headers={"X-Tenant": who}).status_code
        for who in ("acme", "globex")
        for number in range(3)
    ]

    assert [201, 201, 429] * 2 == statuses


@pytest.mark.parametrize(
    "quota", ({"quota_in_flight": 1}, {"quota_records": 3}, {"quota_new_keys": (3, 3600)}), ids=str
)
@pytest.mark.parametrize("former", ({"principal": False}, {"principal": lambda: "old"}), ids=("added", "replaced"))
def test_a_key_counts_once_for_a_tenant_that_has_kept_its_name(quota: dict[str, Any], former: dict[str, Any]) -> None:
    """Both names are in the tenant's one ledger: with one claim in flight allowed, every request got 429."""
    second = shop(users=True, former_identity=former, **quota)

    assert [201] * 3 == [second.post(key=str(number), headers=USER).status_code for number in range(3)]
    if "quota_in_flight" not in quota:
        assert 429 == second.post(key="3", headers=USER).status_code


def test_a_failed_view_frees_both_names() -> None:
    first = shop()
    second = shop(first, tenants=True, former_identity={"tenant": False})
    second.view("/busy")(lambda: ("busy", 503))

    assert 503 == second.post("/busy").status_code
    assert not is_replay(second.post("/busy"))
    assert 404 == first.post("/busy").status_code
    assert State.COMPLETED != second.state()


def crashing(before: World | None = None, **settings: Any) -> World:
    """A release whose worker vanishes in the view."""
    world = shop(before, effects="deduplicated", **settings)

    @world.view("/charge")
    def charge() -> str:
        world.runs.append(current_claim.downstream_key("charge"))
        raise SystemExit if before is None else RuntimeError

    return world


def test_a_downstream_key_stays_the_same_over_the_change() -> None:
    """A retry sends the same downstream key as the former release."""
    first = crashing()
    second = crashing(first, tenants=True, namespace="new", former_identity={"tenant": False, "namespace": "shop"})

    with pytest.raises(SystemExit):
        first.post("/charge")
    first.clock.advance(60)
    second.post("/charge")

    assert 2 == len(first.runs)
    assert 1 == len(set(first.runs))


@pytest.mark.parametrize("by_handle", (False, True))
@pytest.mark.parametrize(("old", "new", "former"), [each[:3] for each in CHANGES.values()][::2], ids=list(CHANGES)[::2])
def test_an_operator_resolves_a_key_under_both_names(
    old: dict[str, Any], new: dict[str, Any], former: dict[str, Any], by_handle: bool
) -> None:
    """A key that is freed under one name only would stay refused."""
    first = shop(**old)
    second = shop(first, former_identity=former, **new)

    @second.view("/charge")
    def charge() -> str:
        second.runs.append(1)
        if len(second.runs) == 1:
            raise RuntimeError
        return "charged"

    assert 500 == second.post("/charge", headers=USER).status_code
    assert "outcome-unknown" == second.post("/charge", headers=USER).json["code"]  # type: ignore[index]
    run = second.app.test_cli_runner().invoke
    if by_handle:
        listed = run(
            args=[
                "idempotency",
                "list",
                "--state",
                "quarantined",
                "--no-tenant" if "tenants" not in new else "--tenant=acme",
                "--json",
            ]
        )
        name = [json.loads(listed.stdout)["records"][0]["handle"]]
    else:
        name = ["--key", "k", *(["--principal", "alice"] if "users" in new else ["--anonymous"])]
    name += ["--tenant", "acme"] if "tenants" in new else ["--no-tenant"]

    freed = run(args=["idempotency", "release", *name, "--yes", "--force", "--reason", "r", "--actor", "a"])

    assert 0 == freed.exit_code, freed.output
    assert 200 == second.post("/charge", headers=USER).status_code


def test_the_record_of_another_tenant_is_not_resolved_by_its_former_name() -> None:
    """Before, all tenants shared one. The record names its present tenant."""
    second = shop(shop(), tenants=True, former_identity={"tenant": False}, on_error="quarantine")
    second.view("/charge", endpoint="charge")(lambda: ("no", 500))
    second.post("/charge", headers={"X-Tenant": "globex"})
    key = next(call.key for call in second.store.calls if call.verb == "claim")  # the oldest name comes first
    run = second.app.test_cli_runner().invoke
    why = ["--yes", "--force", "--reason", "r", "--actor", "a"]

    for tenant, code in (("acme", 1), ("globex", 0)):
        freed = run(args=["idempotency", "release", handle_of(key), "--tenant", tenant, *why])
        assert code == freed.exit_code, freed.output


def test_a_key_is_named_to_the_command_line_under_both_names() -> None:
    """`show --key` finds what was claimed before the change."""
    first = shop(namespace="old")
    first.post(key="k")
    second = shop(first, namespace="new", former_identity={"namespace": "old"})
    run = second.app.test_cli_runner().invoke

    shown = run(args=["idempotency", "show", "--key", "k", "--anonymous", "--no-tenant", "--json"])

    assert 0 == shown.exit_code, shown.output


@pytest.mark.parametrize(
    "former",
    (
        {},
        {"tennant": False},
        {"tenant": True},
        {"principal": "alice"},
        {"namespace": ""},
        {"namespace": False},
        "tenant",
    ),
    ids=str,
)
def test_an_empty_former_identity_is_refused(former: Any) -> None:
    with pytest.raises(ConfigurationError, match="former_identity"):
        Idempotency(Flask("shop"), former_identity=former)


# What a former name must not hand over


def checkout(before: World | None = None, **settings: Any) -> World:
    """A release whose requests charge, and pause while the bank is away. Its answer says whose charge it is."""
    world = shop(before, **settings)

    def charge() -> str:
        user = request.headers["X-User"]
        world.runs.append(user)
        return f"charge of {user}"

    @world.view("/checkout")
    @idempotent(required=True, steps=("charge",))
    def checkout() -> Any:
        charged = current_claim.step("charge", charge)
        return (charged, 503) if request.headers.get("X-Bank") == "away" else (charged, 201)

    return world


SHARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no principal": ({"users": True}, {"principal": False}),
    "one principal": ({"users": True}, {"principal": lambda: "everyone"}),
    "no tenant": ({"users": True, "tenants": True}, {"tenant": False, "principal": False}),
    "no principal, hashed": ({"users": True, "hash_identities": True}, {"principal": False}),
}


def bank_is_away(user: str) -> dict[str, str]:
    return {"X-User": user, "X-Bank": "away"}


@pytest.mark.parametrize(("new", "former"), SHARED.values(), ids=SHARED)
def test_a_paused_request_is_resumed_by_its_own_caller_alone(new: dict[str, Any], former: dict[str, Any]) -> None:
    """The charge of alice stands in a journal under the name that all callers had."""
    world = checkout(former_identity=former, **new)

    paused = world.post("/checkout", headers=bank_is_away("alice"))
    bob = world.post("/checkout", headers={"X-User": "bob"})
    alice = world.post("/checkout", headers={"X-User": "alice"})

    assert "paused" == paused.headers["Idempotency-Status"]
    assert [(201, "charge of bob"), (201, "charge of alice")] == [
        (each.status_code, each.text) for each in (bob, alice)
    ]
    assert ["alice", "bob"] == world.runs


@pytest.mark.parametrize("user", ("alice", "bob"))
def test_a_paused_request_that_shows_no_caller_is_resumed_by_nobody(user: str) -> None:
    """The former release did not know whose it was. It waits for a person; nobody is charged twice."""
    first = checkout()
    assert 503 == first.post("/checkout", headers=bank_is_away("alice")).status_code
    key = first.store.calls[-1].key
    before = first.store.read(key)
    second = checkout(first, users=True, former_identity={"principal": False})

    refused = second.post("/checkout", headers={"X-User": user})

    assert (409, "outcome-unknown") == (refused.status_code, refused.json["code"])  # type: ignore[index]
    assert (["alice"], before) == (second.runs, first.store.read(key))


def test_a_paused_request_of_a_caller_with_another_former_name_is_resumed() -> None:
    """A former name that is the caller's alone shows whose record it is: nobody is charged twice."""
    first = checkout(users=True)
    first.post("/checkout", headers=bank_is_away("alice"))
    named = {"principal": lambda: request.headers.get("X-User")}
    second = checkout(first, namespace="new", former_identity={"namespace": "shop", **named})

    resumed = second.post("/checkout", headers={"X-User": "alice"})

    assert (201, ["alice"]) == (resumed.status_code, second.runs)


def test_a_downstream_key_stays_the_same_when_the_former_name_becomes_free() -> None:
    """Until her response expired, alice had the former name, and bob's charge did not use it."""
    world = shop(users=True, effects="deduplicated", former_identity={"principal": False})
    sent = []

    @world.view("/charge")
    @idempotent(required=True, steps=(Step("charge", effects="deduplicated"),))
    def charge() -> Any:
        sent.append(current_claim.downstream_key("charge"))
        current_claim.step("charge", lambda: None)
        return "charged", 200 if request.headers["X-User"] == "alice" else 503

    for user in ("alice", "bob"):
        world.post("/charge", headers={"X-User": user})
    world.clock.advance(2 * DAY)
    world.post("/charge", headers={"X-User": "bob"})

    assert sent[0] != sent[1] == sent[2]
