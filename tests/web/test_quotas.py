"""What a tenant may have: 429 for a new key over it, and never for a known one."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask, request
from werkzeug.test import TestResponse
from werkzeug.wrappers import Response

from flask_idempotency import NewKeys, Quota
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import QuotaRefused
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import OverQuota
from flask_idempotency.engine.quota import Usage
from flask_idempotency.extension import Idempotency
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from flask_idempotency.web.problems import refusal, render
from tests.web.apps import World, is_replay, new_world

DAY = 24 * 3600


def tenant() -> str | None:
    return request.headers.get("X-Tenant")


def shop(**config: Any) -> World:
    """Every payment is answered with its number. Its tenant is whoever X-Tenant names."""
    named = {f"IDEMPOTENCY_{name.upper()}": value for name, value in config.items()}
    world = new_world(config=named, init=False)
    world.idempotency.tenant_loader(tenant)
    world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(request.headers.get("X-Tenant"))
        return str(len(world.runs)), 201

    return world


def usage(world: World, name: str | None = None) -> Usage:
    return world.store.ledger.usage(Identity(b"s").tenant_id("tests.web.app", name))


def fields(response: TestResponse) -> tuple[str, str, str]:
    return tuple(response.headers[name] for name in ("RateLimit-Policy", "RateLimit", "Retry-After"))  # type: ignore[return-value]


def test_a_new_key_too_many_is_429_and_says_when_to_come_back() -> None:
    """In the fields of the IETF draft, to the second, and in the problem document."""
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
def test_what_answers_take_is_free_when_their_life_ends(setting: str, policy: str) -> None:
    """That may be a day off: five seconds would be a lie."""
    world = shop(**{setting: 1})
    world.post(key="first")

    refused = world.post(key="second")

    told_policy, told, retry_after = fields(refused)
    limit = policy.split(";")[0]
    assert (429, policy, f"{limit};r=0;t={retry_after}") == (refused.status_code, told_policy, told)
    assert DAY <= int(retry_after) <= DAY * 33 / 32
    world.clock.advance(float(retry_after))
    assert 201 == world.post(key="second").status_code


def test_a_request_too_many_at_once_is_asked_back_soon() -> None:
    """What is left of a lease says when its owner was last seen, not when it will be done."""
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


@pytest.mark.parametrize("seconds", (0.0, 0.2, 59.2, 86_400.0))
@pytest.mark.parametrize("limit", ("records", "bytes", "in-flight", "new-keys"))
@pytest.mark.parametrize("profile", PROFILES)
def test_every_dialect_says_when(profile: str, limit: str, seconds: float) -> None:
    """Whole seconds, from one up, and the same twice. A store that cannot tell leaves a minute."""
    outcome = OverQuota(limit, 7, retry_after=seconds, window=60.0 if limit == "new-keys" else None)
    response = render(refusal(outcome), profile=PROFILES[profile], docs_url="d/", response_class=Response)

    expected = {0.0: 60, 0.2: 1, 59.2: 60}.get(seconds, 86_400)
    expected = min(expected, 5) if limit == "in-flight" else expected
    assert (429, str(expected)) == (response.status_code, response.headers["Retry-After"])
    assert f'"{limit}";r=0;t={expected}' == response.headers["RateLimit"]
    assert response.headers["RateLimit-Policy"].startswith(f'"{limit}";q=7')


def test_a_stripe_client_gets_its_own_rate_limit_error() -> None:
    """And the playbook's its code, with the same fields."""
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


def test_a_released_key_gives_its_place_back() -> None:
    """A 503 that runs again takes up nothing in between."""
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
    """And so have those that name none."""
    world = shop(quota_records=1)

    def statuses(key: str) -> list[int]:
        callers: tuple[dict[str, str], ...] = ({"X-Tenant": "acme"}, {"X-Tenant": "globex"}, {})
        return [world.post(key=key, headers=headers).status_code for headers in callers]

    assert ([201] * 3, [429] * 3) == (statuses("first"), statuses("second"))


def test_a_loader_has_the_last_word_on_a_tenant_limit_by_limit() -> None:
    """What it leaves out is as configured; None is all of it."""
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


def test_an_operator_has_the_last_word_over_the_loader() -> None:
    """What is stored with the ledger goes before what any deployed code says."""
    world = shop(quota_records=1)
    world.store.ledger.limit(Identity(b"s").tenant_id("tests.web.app", "acme"), Quota(records=2))

    assert [201, 201, 429] == [world.post(key=key, headers={"X-Tenant": "acme"}).status_code for key in ("a", "b", "c")]


def test_nothing_is_counted_where_no_quota_is() -> None:
    """Who has not asked for it does not pay for it."""
    world = shop()

    world.post()

    record = world.record()
    assert record is not None
    assert (False, Usage()) == (record.in_quota, usage(world))


def test_a_loader_alone_has_everything_counted() -> None:
    """Without a limit even: whoever sets one later finds what is there already."""
    world = shop()
    world.idempotency.quota_loader(lambda name: None)

    world.post()

    record = world.record()
    assert record is not None
    assert (True, 1) == (record.in_quota, usage(world).records)


def test_a_loader_may_be_async() -> None:
    """As Flask's own callbacks may."""
    world = shop()

    async def load(name: str | None) -> Quota:
        return Quota(records=0)

    world.idempotency.quota_loader(load)  # type: ignore[type-var]

    assert 429 == world.post().status_code


def test_a_loader_must_return_a_quota() -> None:
    """A number means one of four limits, and nobody knows which."""
    world = shop()
    world.app.config["PROPAGATE_EXCEPTIONS"] = True
    world.idempotency.quota_loader(lambda name: 5)  # type: ignore[type-var]

    with pytest.raises(ConfigurationError, match="quota_loader returned a int"):
        world.post()
    assert [] == world.runs


def test_quotas_over_a_store_that_counts_nothing_are_refused_at_start() -> None:
    """By configuration, or by a loader that is there already."""
    bare = FaultyStore(MemoryStore())
    with pytest.raises(ConfigurationError, match=r"IDEMPOTENCY_QUOTA_\* is set, and the store cannot count"):
        Idempotency(Flask("shop"), store=bare, secret="s-9f2c47d1e8b35a60", quota_records=1)

    idempotency = Idempotency(store=bare, secret="s-9f2c47d1e8b35a60")
    idempotency.quota_loader(lambda name: None)
    with pytest.raises(ConfigurationError, match="A quota_loader is registered, and the store cannot count"):
        idempotency.init_app(Flask("shop"))


def test_a_released_key_is_a_new_one() -> None:
    """Its work has failed, so nothing is to be replayed; and each claim of it was a new key of its window."""
    world = shop(quota_new_keys=(2, 3600))
    failing = [True, True, False]

    @world.view("/failing")
    def fail() -> tuple[str, int]:
        return "", 503 if failing.pop(0) else 201

    assert [503, 503, 429] == [world.post("/failing").status_code for _ in range(3)]
    assert [False] == failing
