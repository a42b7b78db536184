"""Tenants: their quotas, and tenants whose keys are spread over several parts."""

from __future__ import annotations

from base64 import b64encode
from itertools import product
from typing import Any

import pytest
from flask import Flask, request
from werkzeug.test import TestResponse
from werkzeug.wrappers import Response

from flask_idempotency import NewKeys, Quota
from flask_idempotency.assembly import Services
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import QuotaRefused, QuotaSet
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import OverQuota
from flask_idempotency.engine.quota import Usage
from flask_idempotency.extension import Idempotency
from flask_idempotency.operations.records import key_of
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from flask_idempotency.web.problems import refusal, render
from tests.apps import WHY, World, is_replay, new_world, run, said
from tests.apps import refusal as refused
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers

DAY = 24 * 3600


def tenant() -> str | None:
    return request.headers.get("X-Tenant")


def shop(**config: Any) -> World:
    """Every payment returns its number. X-Tenant names its tenant."""
    named = {f"IDEMPOTENCY_{name.upper()}": value for name, value in config.items()}
    world = new_world(config=named, tenant=tenant)

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(request.headers.get("X-Tenant"))
        return str(len(world.runs)), 201

    return world


def usage(world: World, name: str | None = None) -> Usage:
    return world.store.ledger.usage(Identity(b"s").tenant_id("tests.web.app", name))


def fields(response: TestResponse) -> tuple[str, str, str]:
    return tuple(response.headers[name] for name in ("RateLimit-Policy", "RateLimit", "Retry-After"))  # type: ignore[return-value]


def test_a_new_key_over_the_quota_is_429_with_retry_after() -> None:
    """The time is in the fields of the IETF draft, in seconds, and in the problem document."""
    world = shop(quota_new_keys=(1, 3600))
    world.clock.now = 3600.0 * 1000 + 3588.5
    world.post(key="first")

    refused = world.post(key="second")

    assert 429 == refused.status_code
    assert ('"new-keys";q=1;w=3600', '"new-keys";r=0;t=12', "12") == fields(refused)
    assert refused.json is not None
    assert "quota-exceeded" == refused.json["code"]
    assert refused.json["detail"].endswith("The limit is on new keys in this window: 1.")
    world.clock.advance(12)
    assert 201 == world.post(key="second").status_code


@pytest.mark.parametrize(
    ("setting", "policy"),
    (
        ("quota_records", '"records";q=1'),
        ("quota_bytes", '"bytes";q=1;qu="content-bytes"'),
    ),
)
def test_the_space_of_responses_is_free_after_they_expire(setting: str, policy: str) -> None:
    """The space may be full for a day: five seconds would mislead the client."""
    world = shop(**{setting: 1})
    world.post(key="first")

    refused = world.post(key="second")

    told_policy, told, retry_after = fields(refused)
    limit = policy.split(";")[0]
    assert (429, policy, f"{limit};r=0;t={retry_after}") == (refused.status_code, told_policy, told)
    assert DAY <= int(retry_after) <= DAY * 33 / 32
    world.clock.advance(float(retry_after))
    assert 201 == world.post(key="second").status_code


def test_a_request_over_the_in_flight_quota_may_retry_soon() -> None:
    """The rest of a lease shows when its worker was last seen, not when it finishes."""
    world = new_world(config={"IDEMPOTENCY_QUOTA_IN_FLIGHT": 1}, lease=300, max_runtime=300)
    inner: list[TestResponse] = []

    @world.view()
    def pay() -> str:
        if not inner:
            inner.append(world.post(key="second"))
        return "paid"

    assert 200 == world.post(key="first").status_code
    assert ('"in-flight";q=1;qu="concurrent-requests"', '"in-flight";r=0;t=5', "5") == fields(inner[0])
    assert 200 == world.post(key="second").status_code


def test_every_profile_has_the_time_to_retry() -> None:
    """Whole seconds, at least one, the same in both places. Without a time from the store, one minute."""
    for profile, limit, seconds in product(
        PROFILES, ("records", "bytes", "in-flight", "new-keys"), (0.0, 0.2, 59.2, 86_400.0)
    ):
        outcome = OverQuota(limit, 7, retry_after=seconds, window=60.0 if limit == "new-keys" else None)
        response = render(refusal(outcome), profile=PROFILES[profile], docs_url="d/", response_class=Response)

        expected = {0.0: 60, 0.2: 1, 59.2: 60}.get(seconds, 86_400)
        expected = min(expected, 5) if limit == "in-flight" else expected
        assert (429, str(expected)) == (response.status_code, response.headers["Retry-After"]), (
            profile,
            limit,
            seconds,
        )
        assert f'"{limit}";r=0;t={expected}' == response.headers["RateLimit"], (profile, limit, seconds)
        assert response.headers["RateLimit-Policy"].startswith(f'"{limit}";q=7'), (profile, limit, seconds)


def test_a_stripe_client_gets_its_own_rate_limit_error() -> None:
    """A playbook client gets its code, with the same fields."""
    said = {}
    for profile in ("stripe", "playbook"):
        world = shop(quota_records=0, profile=profile)
        refused = world.post()
        assert (429, '"records";q=0') == (refused.status_code, refused.headers["RateLimit-Policy"])
        said[profile] = refused.json

    assert ("rate_limit_error", "rate_limit") == (
        said["stripe"]["error"]["type"],  # type: ignore[index]
        said["stripe"]["error"]["code"],  # type: ignore[index]
    )
    assert "quota_exceeded" == said["playbook"]["error_code"]  # type: ignore[index]


def test_a_tenant_at_its_limit_can_still_retry() -> None:
    """Replays, conflicts and mismatches of known keys always pass; so do keys that were released."""
    world = new_world(config={"IDEMPOTENCY_QUOTA_RECORDS": 1})
    conflicts: list[TestResponse] = []

    @world.view()
    def pay() -> str:
        conflicts.append(world.post(key="known", json={"amount": 1}))
        return "paid"

    first = world.post(key="known", json={"amount": 1})
    again = world.post(key="known", json={"amount": 1})
    other = world.post(key="known", json={"amount": 2})

    assert [200, 409, 200, 422] == [each.status_code for each in (first, conflicts[0], again, other)]
    assert (True, 1) == (is_replay(again), len(conflicts))
    assert 429 == world.post(key="new").status_code


def test_a_released_key_frees_its_quota() -> None:
    """A 503 frees its place until the request runs again."""
    world = new_world(config={"IDEMPOTENCY_QUOTA_RECORDS": 1})

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        return "", 503 if len(world.runs) == 1 else 201

    assert [503, 201] == [world.post().status_code for _ in range(2)]


def test_a_refused_request_leaves_nothing() -> None:
    """No record, no count, no run; and the third caller is refused too."""
    world = shop(quota_records=1)
    world.post(key="first")
    before = usage(world)

    refused = [world.post(key=key).status_code for key in ("second", "second", "third")]

    assert ([429] * 3, [None]) == (refused, world.runs)
    assert (before, None) == (usage(world), world.record())
    told = world.told(QuotaRefused)
    assert ["records"] * 3 == [event.limit for event in told]  # type: ignore[attr-defined]


def test_each_tenant_has_its_own() -> None:
    """Requests without a tenant have one too."""
    world = shop(quota_records=1)

    def statuses(key: str) -> list[int]:
        callers: tuple[dict[str, str], ...] = ({"X-Tenant": "acme"}, {"X-Tenant": "globex"}, {})
        return [world.post(key=key, headers=headers).status_code for headers in callers]

    assert ([201] * 3, [429] * 3) == (statuses("first"), statuses("second"))


def test_a_loader_overrides_each_limit_of_a_tenant() -> None:
    """Limits that the loader omits stay as configured; None keeps them all."""
    world = shop(quota_records=1)
    asked: list[str | None] = []

    @world.idempotency.quota_loader
    def limits(name: str | None) -> Quota | None:
        asked.append(name)
        return {"large": Quota(records=3), "slow": Quota(new_keys=NewKeys(0, 60))}.get(name or "")

    def statuses(name: str) -> list[int]:
        return [world.post(key=f"k{n}", headers={"X-Tenant": name}).status_code for n in range(4)]

    assert {"large": [201, 201, 201, 429], "slow": [429] * 4, "other": [201, 429, 429, 429]} == {
        name: statuses(name) for name in ("large", "slow", "other")
    }
    assert {"large", "slow", "other"} == set(asked)


def test_an_operators_quota_overrides_the_loader() -> None:
    """A quota stored in the ledger overrides the deployed code."""
    world = shop(quota_records=1)
    world.store.ledger.limit(Identity(b"s").tenant_id("tests.web.app", "acme"), Quota(records=2))

    assert [201, 201, 429] == [world.post(key=key, headers={"X-Tenant": "acme"}).status_code for key in ("a", "b", "c")]


def test_without_a_quota_nothing_is_counted() -> None:
    """Without a quota, no request pays for counting."""
    world = shop()

    world.post()

    record = world.record()
    assert record is not None
    assert (False, Usage()) == (record.in_quota, usage(world))


def test_a_loader_alone_makes_everything_count() -> None:
    """Even without a limit: a limit that is set later counts what is there already."""
    world = shop()
    world.idempotency.quota_loader(lambda name: None)

    world.post()

    record = world.record()
    assert record is not None
    assert (True, 1) == (record.in_quota, usage(world).records)


def test_a_loader_may_be_async() -> None:
    """Flask's own callbacks may be async too."""
    world = shop()

    async def load(name: str | None) -> Quota:
        return Quota(records=0)

    world.idempotency.quota_loader(load)  # type: ignore[type-var]

    assert 429 == world.post().status_code


def test_a_loader_must_return_a_quota() -> None:
    """A bare number could mean any of four limits."""
    world = shop()
    world.app.config["PROPAGATE_EXCEPTIONS"] = True
    world.idempotency.quota_loader(lambda name: 5)  # type: ignore[type-var]

    with pytest.raises(ConfigurationError, match="quota_loader returned a int"):
        world.post()
    assert [] == world.runs


def test_quotas_over_a_store_that_counts_nothing_are_refused_at_start() -> None:
    """Whether the quota comes from configuration or from a loader."""
    bare = FaultyStore(MemoryStore())
    with pytest.raises(ConfigurationError, match=r"IDEMPOTENCY_QUOTA_\* is set, and the store cannot count"):
        Idempotency(Flask("shop"), store=bare, secret="s-9f2c47d1e8b35a60", quota_records=1)

    idempotency = Idempotency(store=bare, secret="s-9f2c47d1e8b35a60")
    idempotency.quota_loader(lambda name: None)
    with pytest.raises(ConfigurationError, match="A quota_loader is registered, and the store cannot count"):
        idempotency.init_app(Flask("shop"))


def test_a_released_key_is_a_new_one() -> None:
    """Its view failed, so there is no replay; each of its claims counts as a new key of its window."""
    world = shop(quota_new_keys=(2, 3600))
    failing = [True, True, False]

    @world.view("/failing")
    def fail() -> tuple[str, int]:
        return "", 503 if failing.pop(0) else 201

    assert [503, 503, 429] == [world.post("/failing").status_code for _ in range(3)]
    assert [False] == failing


PARTS = 4
RING = {"a": b64encode(b"a" * 32).decode()}
TWENTY = [f"key-{number}" for number in range(20)]
"""Each of four parts has some of these."""


class Shop:
    """One application on its own Redis, in as many processes as a test likes."""

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
def partitioned_shop(redis_servers: RedisServers) -> Shop:
    """One kind of server is enough: to the scripts a part is an ordinary tenant."""
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


def test_a_list_shows_records_of_all_parts_and_of_no_other_tenant(partitioned_shop: Shop) -> None:
    world = partitioned_shop.world()
    assert [201] * 40 == paid(world) + paid(world, tenant="globex")

    handles = listed(world)

    assert (20, parts_of("acme")) == (len(set(handles)), {key_of(handle).tid for handle in handles})
    assert {"acme"} == {said(run(world, "show", handle, "--json"))["tenant"] for handle in handles[:3]}


def test_keys_are_found_and_resolved_in_every_part(partitioned_shop: Shop) -> None:
    """By the client's key, and by a handle with the tenant. A released key runs exactly one more time."""
    world = partitioned_shop.world()
    keys = TWENTY[:6]
    assert [500] * 6 == paid(world, keys, Fail="yes")
    assert 1 < len({key_of(handle).tid for handle in listed(world, "quarantined")})

    for key in keys[:3]:
        named = ("--key", key, "--tenant", "acme", "--principal", "alice")
        assert "quarantined" == said(run(world, "show", *named, "--json"))["state"]
        assert 0 == run(world, "resolve", *named, "--happened", "--status", "202", *WHY, "--yes").exit_code
    for handle in listed(world, "quarantined"):
        assert "belongs to another tenant" in refused(
            run(world, "release", handle, "--tenant", "globex", *WHY, "--yes")
        )
        assert 0 == run(world, "release", handle, "--tenant", "acme", *WHY, "--yes", "--force").exit_code

    assert [202] * 3 + [201] * 3 == paid(world, keys)
    assert ([202] * 3 + [201] * 3, 9) == (paid(world, keys), len(partitioned_shop.runs))


@pytest.mark.parametrize("shred", (False, True), ids=("wiped", "shredded"))
def test_a_purge_reaches_every_part(partitioned_shop: Shop, shred: bool) -> None:
    """Each has its own data keys. No other tenant's are touched, and no request runs again."""
    world = partitioned_shop.world(encryption="on", key_ring=RING)
    assert [201] * 40 == paid(world) + paid(world, tenant="globex")
    assert 2 * PARTS == said(run(world, "keys", "status", "--json"))["keys"][0]["data_keys"]

    told = said(run(world, "purge", "--tenant", "acme", *(("--shred",) if shred else ()), *WHY, "--yes", "--json"))

    assert (PARTS, 1, None if shred else 20) == (told["data_keys"], told["secrets"], told.get("wiped"))
    assert [410] * 20 + [201] * 20 == paid(world) + paid(world, tenant="globex")
    assert (40, PARTS) == (
        len(partitioned_shop.runs),
        said(run(world, "keys", "status", "--json"))["keys"][0]["data_keys"],
    )


def test_while_secrets_rotate_every_key_is_known_in_the_parts_of_both(partitioned_shop: Shop) -> None:
    """A key has one part per secret. It replays, and is purged, under both."""
    before = partitioned_shop.world(encryption="on", key_ring=RING)
    assert [201] * 20 == paid(before)
    both = partitioned_shop.world(secret=["new", "s"], encryption="on", key_ring=RING)

    assert ([201] * 20, 20) == (paid(both), len(partitioned_shop.runs))
    assert [201] * 20 == paid(both, [f"new-{key}" for key in TWENTY])
    told = said(run(both, "purge", "--tenant", "acme", *WHY, "--yes", "--json"))

    assert (2 * PARTS, 2, 60) == (told["data_keys"], told["secrets"], told["wiped"])
    assert ([410] * 20, [410] * 20) == (paid(both), paid(both, [f"new-{key}" for key in TWENTY]))
    assert 40 == len(partitioned_shop.runs)


def test_while_secrets_rotate_both_records_of_a_use_are_settled(partitioned_shop: Shop) -> None:
    """The handle of either works. They are in different parts, under different secrets."""
    world = partitioned_shop.world(secret=["new", "s"])
    assert [500] * 4 == paid(world, TWENTY[:4], Fail="yes")
    handles = listed(world, "quarantined")
    assert 4 == len(handles)

    for handle in handles:
        told = said(run(world, "release", handle, "--tenant", "acme", *WHY, "--yes", "--force", "--json"))
        assert (2, 0) == (told["settled"], told["left"])
    assert ([], [201] * 4) == (listed(world, "quarantined"), paid(world, TWENTY[:4]))


def test_usage_is_the_sum_over_parts_and_a_quota_is_divided(partitioned_shop: Shop) -> None:
    """Ten over four parts are three each: at most twelve. The client sees the total, and known keys always pass."""
    world = partitioned_shop.world(quota_records=10)
    keys = [f"key-{number}" for number in range(40)]

    assert {201: 12, 429: 28} == {status: paid(world, keys).count(status) for status in (201, 429)}
    refused = next(key for key, status in zip(keys, paid(world, keys), strict=True) if status == 429)
    answer = world.post(key=refused, headers={"X-Tenant": "acme"})
    told = said(run(world, "quota", "show", "--tenant", "acme", "--json"))

    assert '"records";q=12' == answer.headers["RateLimit-Policy"]
    assert (12, 12) == (len(partitioned_shop.runs), told["tenants"][0]["usage"]["records"])
    assert 10 == told["configured"]["records"]
    assert "Tenants: 4. Ledgers corrected: 0." in run(world, "reconcile").output


def test_a_limit_that_is_set_by_hand_is_divided_over_all_parts(partitioned_shop: Shop) -> None:
    """It is shown as it applies, and another limit leaves it unchanged. An indivisible limit is refused."""
    world = partitioned_shop.world(quota_records=4, secret=["new", "s"])

    def limits() -> list[Quota]:
        tids = parts_of("acme", b"new") | parts_of("acme")
        ledger = built(world).ledger
        assert ledger is not None
        return [ledger.limits(tid) for tid in tids]

    assert "cannot be divided over so many: in-flight 3" in refused(
        run(world, "quota", "set", "--tenant", "acme", "--records", "10", "--in-flight", "3")
    )
    assert [Quota()] * 8 == limits()
    told = run(world, "quota", "set", "--tenant", "acme", "--records", "10", "--actor", "ops").output
    run(world, "quota", "set", "--tenant", "acme", "--in-flight", "0", "--actor", "ops")

    assert told.startswith("records: 12\nEach of its 4 parts has a share of that, rounded up")
    assert [Quota(records=3, in_flight=0)] * 8 == limits()
    shown = said(run(world, "quota", "show", "--tenant", "acme", "--json"))["tenants"][0]["limits"]
    assert (12, 0) == (shown["records"], shown["in-flight"])
    assert [12, 12] == [event.limits["records"] for event in world.told(QuotaSet) if isinstance(event, QuotaSet)]
    run(world, "quota", "set", "--tenant", "acme", "--clear", "--actor", "ops")
    assert [Quota()] * 8 == limits()


def test_another_number_of_parts_repeats_no_request(partitioned_shop: Shop) -> None:
    """Lookups would search the wrong parts. So unknown keys are refused, and no purge counts as complete."""
    world, *others = (partitioned_shop.world(shards=shards, after_loss="refuse") for shards in (PARTS, 1, 2 * PARTS))
    memory = built(world).data_loss
    assert memory is not None
    memory.initialise()
    assert [201] * 20 == paid(world)

    for other in others:
        assert {503} <= set(paid(other)) <= {201, 503}
        assert "IDEMPOTENCY_TENANT_SHARDS" in refused(run(other, "purge", "--tenant", "acme", *WHY, "--yes"))
        assert "IDEMPOTENCY_TENANT_SHARDS" in refused(run(other, "quota", "set", "--tenant", "acme", "--clear"))
    assert ([201] * 20, 20) == (paid(world), len(partitioned_shop.runs))


def test_a_loader_that_allows_less_than_there_are_parts_allows_one_in_each(partitioned_shop: Shop) -> None:
    """A loader's limit is unknown at start; a part without any would refuse some new keys for ever."""
    assert 4 == paid(partitioned_shop.world(quota=Quota(records=1))).count(201)
