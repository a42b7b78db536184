"""`flask idempotency quota …`: what tenants have, and limits that are set by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import Result
from flask import request

from flask_idempotency.engine.events import QuotaSet
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.apps import World, new_world

SIZE = len("paid") + len("Content-Type: text/html; charset=utf-8\r\n")


def shop(*, store: Any = None, **settings: Any) -> World:
    world = new_world(store=store, tenant=lambda: request.headers.get("X-Tenant"), **settings)
    world.view()(lambda: "paid")
    return world


def run(world: World, *arguments: str) -> Result:
    return world.app.test_cli_runner().invoke(args=["idempotency", "quota", *arguments])


def paid(world: World, key: str, tenant: str = "acme") -> int:
    return world.post(key=key, headers={"X-Tenant": tenant}).status_code


def limits(world: World, tenant: str | None = "acme", secret: bytes = b"s") -> Quota:
    return world.store.ledger.limits(Identity(secret).tenant_id("tests.web.app", tenant))


def test_show_says_what_a_tenant_has_and_may_have() -> None:
    """Beside what an operator has set, and what is configured."""
    world = shop(quota_records=10, quota_new_keys=(5, 60))
    paid(world, "a")
    run(world, "set", "--tenant", "acme", "--bytes", "1000")

    told = run(world, "show", "--tenant", "acme")

    assert 0 == told.exit_code
    lines = [line.split(maxsplit=1) for line in told.output.splitlines()]
    assert [["acme"], ["limit"], ["records"], ["bytes"], ["in-flight"], ["new-keys"]] == [line[:1] for line in lines]
    cells = {line.split()[0]: line.split()[1:] for line in told.output.splitlines()[1:]}
    assert (["1", "-", "10"], ["1", "-", "5", "in", "60", "s"]) == (cells["records"], cells["new-keys"])
    assert ["1000", "-"] == cells["bytes"][1:]


def test_show_all_names_nobody() -> None:
    """Names are not in the ledger: a tenant is shown by what stands for it."""
    world = shop(quota_records=10)
    for tenant in ("acme", "globex"):
        paid(world, "a", tenant)

    told = run(world, "show", "--all", "--json")

    shown = json.loads(told.stdout)
    tids = sorted(Identity(b"s").tenant_id("tests.web.app", tenant).hex() for tenant in ("acme", "globex"))
    assert (0, tids) == (told.exit_code, [tenant["tenant"] for tenant in shown["tenants"]])
    assert [1, 1] == [tenant["usage"]["records"] for tenant in shown["tenants"]]
    assert "acme" not in run(world, "show", "--all").output
    assert "No tenant has a ledger.\n" == run(shop(quota_records=1), "show", "--all").output


def test_machines_get_one_object() -> None:
    world = shop(quota_new_keys=(5, 60))
    paid(world, "a")
    run(world, "set", "--tenant", "acme", "--records", "7")

    told = run(world, "show", "--tenant", "acme", "--json")

    assert {
        "counting": True,
        "configured": {"records": None, "bytes": None, "in-flight": None, "new-keys": {"count": 5, "seconds": 60.0}},
        "tenants": [
            {
                "tenant": "acme",
                "usage": {"records": 1, "bytes": SIZE, "in-flight": 0, "new-keys": 1},
                "limits": {"records": 7, "bytes": None, "in-flight": None, "new-keys": None},
            }
        ],
    } == json.loads(told.stdout)  # fmt: skip


def test_a_limit_that_is_set_holds_from_the_next_new_key_on() -> None:
    """Over the configuration, in both directions, without a restart."""
    world = shop(quota_records=1)
    assert [200, 429] == [paid(world, key) for key in "ab"]

    assert 0 == run(world, "set", "--tenant", "acme", "--records", "2").exit_code
    assert [200, 429] == [paid(world, key) for key in "bc"]

    assert 0 == run(world, "set", "--tenant", "acme", "--clear").exit_code
    assert [429, 200] == [paid(world, "d"), paid(world, "a")]


def test_what_is_not_named_stays_and_clear_begins_anew() -> None:
    world = shop(quota_records=1)

    run(world, "set", "--tenant", "acme", "--records", "5", "--new-keys", "3", "--per", "60")
    run(world, "set", "--tenant", "acme", "--bytes", "7")
    assert Quota(5, 7, None, NewKeys(3, 60.0)) == limits(world)

    run(world, "set", "--tenant", "acme", "--clear", "--in-flight", "0")
    assert Quota(in_flight=0) == limits(world)
    assert Quota() == limits(world, None)


def test_those_without_a_tenant_are_named_by_no_name() -> None:
    world = shop(quota_records=1)

    assert 0 == run(world, "set", "--no-tenant", "--records", "3").exit_code
    assert (Quota(records=3), Quota()) == (limits(world, None), limits(world, ""))
    assert "(no tenant)" in run(world, "show", "--no-tenant").output


def test_during_a_rotation_it_is_set_under_every_secret_and_the_larger_number_is_told() -> None:
    """
    Limits hold under whichever secret is a host's newest. A new key counts under both, and the larger number is what
    meets its limit.
    """
    before = shop(quota_records=10)
    for key in "abc":
        paid(before, key)
    run(before, "set", "--tenant", "acme", "--bytes", "9000")
    world = shop(store=before.store, secret=["new", "s"], quota_records=10)
    paid(world, "d")

    run(world, "set", "--tenant", "acme", "--records", "7")
    told = json.loads(run(world, "show", "--tenant", "acme", "--json").stdout)["tenants"][0]

    assert [Quota(records=7, bytes=9000)] * 2 == [limits(world, secret=secret) for secret in (b"new", b"s")]
    assert (4, 7) == (told["usage"]["records"], told["limits"]["records"])


@pytest.mark.parametrize("option", ("--records", "--bytes", "--in-flight", "--new-keys"))
def test_what_no_store_can_count_to_is_a_usage_error(option: str) -> None:
    told = run(shop(quota_records=10), "set", "--tenant", "acme", option, str(2**53 + 1))

    assert (2, True) == (told.exit_code, str(2**53) in told.output)


def test_where_nothing_is_counted_it_says_so() -> None:
    """A limit that does not hold must not look as if it did. A loader is enough to make it hold."""
    world = shop()

    assert "Quotas are off in this application" in run(world, "set", "--tenant", "acme", "--records", "5").output
    assert "Quotas are off in this application" in run(world, "show", "--tenant", "acme").output
    world.idempotency.quota_loader(lambda tenant: None)
    assert "Quotas are off" not in run(world, "show", "--tenant", "acme").output
    assert 200 == paid(world, "a")


@pytest.mark.parametrize(
    "arguments",
    (
        ("show",),
        ("show", "--all", "--tenant", "acme"),
        ("set", "--records", "5"),
        ("set", "--tenant", "acme", "--no-tenant", "--records", "5"),
        ("set", "--tenant", "", "--records", "5"),
        ("set", "--tenant", "acme"),
        ("set", "--tenant", "acme", "--new-keys", "5"),
        ("set", "--tenant", "acme", "--per", "5"),
        ("set", "--tenant", "acme", "--records", "-1"),
    ),
    ids=" ".join,
)
def test_what_is_not_said_whole_is_not_done(arguments: tuple[str, ...]) -> None:
    """A limit for everybody without a tenant is not what a forgotten option means."""
    world = shop(quota_records=1)

    told = run(world, *arguments)

    assert (2, True) == (told.exit_code, "Usage:" in told.stderr)
    assert (Quota(), Quota()) == (limits(world), limits(world, None))


def test_a_window_of_no_length_is_refused() -> None:
    told = run(shop(quota_records=1), "set", "--tenant", "acme", "--new-keys", "5", "--per", "0")

    assert (1, True) == (told.exit_code, told.stderr.startswith("Error: Quota: new_keys must be"))


def test_a_store_that_counts_nothing_is_refused() -> None:
    told = run(shop(store=FaultyStore(MemoryStore())), "show", "--all", "--json")

    assert (1, True) == (told.exit_code, "does not count" in json.loads(told.stdout)["error"])


def test_it_is_told_as_an_audit_event_and_names_nobody() -> None:
    """Who, why if they said it, and of whom by what stands for them."""
    world = shop(quota_records=5)

    run(world, "set", "--tenant", "acme", "--records", "7", "--actor", "ops", "--reason", "a large customer")
    run(world, "set", "--no-tenant", "--clear", "--actor", "ops")

    limits = {"records": 7, "bytes": None, "in-flight": None, "new-keys": None}
    pseudonym = Identity(b"s").pseudonym("acme")
    assert [
        QuotaSet("", "", tenant=pseudonym, actor="ops", reason="a large customer", limits=limits),
        QuotaSet("", "", tenant="-", actor="ops", reason="", limits={**limits, "records": None}),
    ] == world.told(QuotaSet)
