"""A tenant whose keys are spread over several parts: to whoever asks for it, it is one."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from flask import Flask, request

from flask_idempotency.assembly import Services
from flask_idempotency.engine.events import QuotaSet
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.quota import Quota
from flask_idempotency.operations.records import key_of
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers
from tests.web.apps import World, new_world
from tests.web.cases import WHY, refusal, run, said

PARTS = 4
RING = {"a": b64encode(b"a" * 32).decode()}
TWENTY = [f"key-{number}" for number in range(20)]
"""None of four parts has none of these."""


class Shop:
    """One application on a Redis of its own, in as many processes as a test likes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runs: list[str] = []

    def world(self, *, shards: int = PARTS, quota: Quota | None = None, **settings: Any) -> World:
        app = Flask("tests.web.app")
        world = new_world(app, store=self.url, init=False, tenant_shards=shards, on_error="quarantine", **settings)  # type: ignore[arg-type]
        world.idempotency.tenant_loader(lambda: request.headers.get("X-Tenant"))
        if quota is not None:
            world.idempotency.quota_loader(lambda tenant: quota)
        world.idempotency.init_app(world.app)

        @world.view()
        def pay() -> tuple[str, int]:
            self.runs.append(request.headers["X-Tenant"])
            if "X-Fail" in request.headers:
                raise RuntimeError("the view failed")
            return "paid", 201

        return world


@pytest.fixture
def shop(redis_servers: RedisServers) -> Shop:
    """On one kind of server: to scripts a part is a tenant like any other."""
    return Shop(redis_servers.get(REDIS_KINDS[0]).url)


def paid(world: World, keys: list[str] = TWENTY, tenant: str = "acme", **headers: str) -> list[int]:
    more = {f"X-{name}": value for name, value in headers.items()}
    return [world.post(key=key, headers={"X-Tenant": tenant, **more}).status_code for key in keys]


def built(world: World) -> Services:
    parts: Services = world.app.extensions["idempotency"].built
    return parts


def parts_of(tenant: str, secret: bytes = b"s", shards: int = PARTS) -> set[bytes]:
    return set(Identity(secret, tenant_shards=shards).tenant_ids("tests.web.app", tenant))


def listed(world: World, state: str = "completed", tenant: str = "acme") -> list[str]:
    records = said(run(world, "list", "--state", state, "--tenant", tenant, "--json"))["records"]
    return [record["handle"] for record in records]


def test_a_list_shows_those_of_all_parts_and_of_nobody_else(shop: Shop) -> None:
    world = shop.world()
    assert [201] * 40 == paid(world) + paid(world, tenant="globex")

    handles = listed(world)

    assert (20, parts_of("acme")) == (len(set(handles)), {key_of(handle).tid for handle in handles})
    assert {"acme"} == {said(run(world, "show", handle, "--json"))["tenant"] for handle in handles[:3]}


def test_keys_are_found_and_settled_in_whichever_part_they_are(shop: Shop) -> None:
    """
    By the key as the client knows it, and by a handle beside the tenant. A retry runs once more, and then no more.
    """
    world = shop.world()
    keys = TWENTY[:6]
    assert [500] * 6 == paid(world, keys, Fail="yes")
    assert 1 < len({key_of(handle).tid for handle in listed(world, "quarantined")})

    for key in keys[:3]:
        named = ("--key", key, "--tenant", "acme", "--principal", "alice")
        assert "quarantined" == said(run(world, "show", *named, "--json"))["state"]
        assert 0 == run(world, "resolve", *named, "--happened", "--status", "202", *WHY, "--yes").exit_code
    for handle in listed(world, "quarantined"):
        assert "not of that tenant" in refusal(run(world, "release", handle, "--tenant", "globex", *WHY, "--yes"))
        assert 0 == run(world, "release", handle, "--tenant", "acme", *WHY, "--yes", "--force").exit_code

    assert [202] * 3 + [201] * 3 == paid(world, keys)
    assert ([202] * 3 + [201] * 3, 9) == (paid(world, keys), len(shop.runs))


@pytest.mark.parametrize("shred", (False, True), ids=("wiped", "shredded"))
def test_a_purge_reaches_every_part(shop: Shop, shred: bool) -> None:
    """Each has data keys of its own. Nobody else's are touched, and nothing runs again."""
    world = shop.world(encryption="on", key_ring=RING)
    assert [201] * 40 == paid(world) + paid(world, tenant="globex")
    assert 2 * PARTS == said(run(world, "keys", "status", "--json"))["keys"][0]["data_keys"]

    told = said(run(world, "purge", "--tenant", "acme", *(("--shred",) if shred else ()), *WHY, "--yes", "--json"))

    assert (PARTS, 1, None if shred else 20) == (told["data_keys"], told["secrets"], told.get("wiped"))
    assert [410] * 20 + [201] * 20 == paid(world) + paid(world, tenant="globex")
    assert (40, PARTS) == (len(shop.runs), said(run(world, "keys", "status", "--json"))["keys"][0]["data_keys"])


def test_while_secrets_rotate_every_key_is_known_in_the_parts_of_both(shop: Shop) -> None:
    """
    A key is in one part under the old secret and in another under the new one. It replays, and is purged under both.
    """
    before = shop.world(encryption="on", key_ring=RING)
    assert [201] * 20 == paid(before)
    both = shop.world(secret=["new", "s"], encryption="on", key_ring=RING)

    assert ([201] * 20, 20) == (paid(both), len(shop.runs))
    assert [201] * 20 == paid(both, [f"new-{key}" for key in TWENTY])
    told = said(run(both, "purge", "--tenant", "acme", *WHY, "--yes", "--json"))

    assert (2 * PARTS, 2, 60) == (told["data_keys"], told["secrets"], told["wiped"])
    assert ([410] * 20, [410] * 20) == (paid(both), paid(both, [f"new-{key}" for key in TWENTY]))
    assert 40 == len(shop.runs)


def test_while_secrets_rotate_both_records_of_a_use_are_settled(shop: Shop) -> None:
    """By the handle of either. They are in different parts, and under different secrets."""
    world = shop.world(secret=["new", "s"])
    assert [500] * 4 == paid(world, TWENTY[:4], Fail="yes")
    handles = listed(world, "quarantined")
    assert 4 == len(handles)

    for handle in handles:
        told = said(run(world, "release", handle, "--tenant", "acme", *WHY, "--yes", "--force", "--json"))
        assert (2, 0) == (told["settled"], told["left"])
    assert ([], [201] * 4) == (listed(world, "quarantined"), paid(world, TWENTY[:4]))


def test_what_a_tenant_has_is_the_sum_and_what_it_may_have_is_divided(shop: Shop) -> None:
    """
    Ten over four parts are three each: twelve at most. A client hears of the whole, and what is known always passes.
    """
    world = shop.world(quota_records=10)
    keys = [f"key-{number}" for number in range(40)]

    assert {201: 12, 429: 28} == {status: paid(world, keys).count(status) for status in (201, 429)}
    refused = next(key for key, status in zip(keys, paid(world, keys), strict=True) if status == 429)
    answer = world.post(key=refused, headers={"X-Tenant": "acme"})
    told = said(run(world, "quota", "show", "--tenant", "acme", "--json"))

    assert '"records";q=12' == answer.headers["RateLimit-Policy"]
    assert (12, 12) == (len(shop.runs), told["tenants"][0]["usage"]["records"])
    assert 10 == told["configured"]["records"]
    assert "Tenants: 4. Ledgers that were wrong, and are right now: 0." in run(world, "reconcile").output


def test_a_limit_that_is_set_by_hand_is_divided_over_all_parts(shop: Shop) -> None:
    """
    It is told as it holds, and setting another leaves it as it is. What cannot be divided is refused, and changes nothing.
    """
    world = shop.world(quota_records=4, secret=["new", "s"])

    def limits() -> list[Quota]:
        tids = parts_of("acme", b"new") | parts_of("acme")
        ledger = built(world).ledger
        assert ledger is not None
        return [ledger.limits(tid) for tid in tids]

    assert "cannot be divided over so many: in-flight 3" in refusal(
        run(world, "quota", "set", "--tenant", "acme", "--records", "10", "--in-flight", "3")
    )
    assert [Quota()] * 8 == limits()
    told = run(world, "quota", "set", "--tenant", "acme", "--records", "10", "--actor", "ops").output
    run(world, "quota", "set", "--tenant", "acme", "--in-flight", "0", "--actor", "ops")

    assert told.startswith("records: 12\nEach of its 4 parts has its share of that, rounded up")
    assert [Quota(records=3, in_flight=0)] * 8 == limits()
    shown = said(run(world, "quota", "show", "--tenant", "acme", "--json"))["tenants"][0]["limits"]
    assert (12, 0) == (shown["records"], shown["in-flight"])
    assert [12, 12] == [event.limits["records"] for event in world.told(QuotaSet) if isinstance(event, QuotaSet)]
    run(world, "quota", "set", "--tenant", "acme", "--clear", "--actor", "ops")
    assert [Quota()] * 8 == limits()


def test_another_number_of_parts_runs_nothing_again(shop: Shop) -> None:
    """
    Keys would be looked for where they are not. So what is not found by chance is refused, and no purge passes for whole.
    """
    world, *others = (shop.world(shards=shards, after_loss="refuse") for shards in (PARTS, 1, 2 * PARTS))
    memory = built(world).data_loss
    assert memory is not None
    memory.initialise()
    assert [201] * 20 == paid(world)

    for other in others:
        assert {503} <= set(paid(other)) <= {201, 503}
        assert "IDEMPOTENCY_TENANT_SHARDS" in refusal(run(other, "purge", "--tenant", "acme", *WHY, "--yes"))
        assert "IDEMPOTENCY_TENANT_SHARDS" in refusal(run(other, "quota", "set", "--tenant", "acme", "--clear"))
    assert ([201] * 20, 20) == (paid(world), len(shop.runs))


def test_a_loader_that_allows_less_than_there_are_parts_allows_one_in_each(shop: Shop) -> None:
    """
    Nobody can refuse to start for it; and with none in some parts, a key would be refused for ever that never ran.
    """
    assert 4 == paid(shop.world(quota=Quota(records=1))).count(201)
