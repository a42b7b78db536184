"""Callers, sites and hostile names never share a key."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from flask import Flask, request

from flask_idempotency.engine.model import State
from tests.apps import KEY, World, is_replay, new_world

CALLERS = (
    {"X-User": "alice"}, {"X-User": "bob"}, {"X-User": "alice", "X-Tenant": "acme"},
    {"X-User": "alice", "X-Tenant": "globex"}, {"X-User": ""}, {"X-User": "", "X-Tenant": "acme"},
)  # fmt: skip
"""The same name in two tenants, none in either, and no caller at all."""


def shop() -> World:
    world = new_world(tenant=lambda: request.headers.get("X-Tenant"))

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(request.headers)
        return f"paid by {request.headers.get('X-Tenant')}/{request.headers['X-User']}", 201

    return world


def test_each_caller_has_its_own_key_space() -> None:
    """Each runs once, and gets only its own response again."""
    world = shop()

    first, again = ([world.post(headers=caller) for caller in CALLERS] for _ in range(2))

    assert ([False] * 6, [True] * 6) == tuple([is_replay(answer) for answer in each] for each in (first, again))
    assert [answer.data for answer in first] == [answer.data for answer in again]
    assert 6 == len({answer.data for answer in first}) == len(world.runs)


@pytest.mark.parametrize("other", CALLERS[1:], ids=str)
def test_another_callers_key_looks_unused(other: dict[str, str]) -> None:
    """Neither a mismatch nor a conflict shows that another caller has used it."""
    world = shop()
    world.post(headers=CALLERS[0], json={"amount": 5})

    assert 201 == world.post(headers=other, json={"amount": 7}).status_code
    assert State.COMPLETED is world.state()


ROUTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "by host": ({"host_matching": True, "static_host": "static.test"}, {"host": "<site>.test"}),
    "by subdomain": ({"subdomain_matching": True}, {"subdomain": "<site>"}),
}


def site(world: World, host: str, key: str = "k") -> Any:
    return world.client().post("/", headers={KEY: key}, base_url=f"http://{host}")


@pytest.fixture(params=ROUTING)
def sites(request: pytest.FixtureRequest) -> World:
    of_app, of_rule = ROUTING[request.param]
    # If it is set, Flask 3.0 matches hosts against it, and not against the request's host.
    name = None if "host_matching" in of_app else "test"
    world = new_world(Flask("tests.web.hosts", **of_app), config={"SERVER_NAME": name})

    @world.view("/", **of_rule)
    def pay(site: str) -> str:
        world.runs.append(site)
        return f"paid to {site}"

    return world


def test_a_site_never_gets_the_response_of_another(sites: World) -> None:
    """If the host selects the view, it is part of the fingerprint."""
    site(sites, "a.test")
    other = site(sites, "b.test")

    assert (422, "key-reused") == (other.status_code, other.json["code"])
    assert ["a"] == sites.runs


@pytest.mark.parametrize("again", ("a.test", "A.Test", "a.test:80"))
def test_the_same_site_replays_however_its_name_is_spelt(sites: World, again: str) -> None:
    """Case and the default port do not count."""
    site(sites, "a.test")

    assert is_replay(site(sites, again))
    assert ["a"] == sites.runs


def test_without_host_routing_the_host_does_not_count() -> None:
    """A retry may come in by another name of the same service."""
    world = new_world()
    world.view()(lambda: request.host)
    site(world, "a.test")

    assert is_replay(site(world, "b.test"))


RING = {"a": b64encode(b"a" * 32).decode()}

HOSTILE = (
    "a:b", "a", "b:c", "c", "a:b:c", "{a}", "a}{b", "{", "}", "a\0b", "a\0", "\0", "a\r\nb", "a\nb", "a%b", "%00", "%", "*",
    "ä", "a\u0308", "\u202e", "😀", "\ud800", " ", "a ", "None", "x" * 255, "x" * 254,
)  # fmt: skip
"""Each could be confused with two of the others, or with a store's own syntax."""


def test_hostile_tenants_principals_and_keys_never_meet() -> None:
    """Each pair runs once and is replayed to no other: through loaders, over HTTP, with encryption and quotas."""
    world = new_world(
        init=False, encryption="required", key_ring=RING, allow_plaintext_transport=True, quota_records=1000
    )
    callers = [(tenant, principal) for tenant in (*HOSTILE, None) for principal in (*HOSTILE[:12], None)]
    world.idempotency.tenant_loader(lambda: callers[int(request.headers["X-Caller"])][0])
    world.idempotency.principal_loader(lambda: callers[int(request.headers["X-Caller"])][1])
    world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> str:
        world.runs.append(request.headers["X-Caller"])
        return request.headers["X-Caller"]

    def answers() -> list[tuple[str, bool]]:
        sent = [world.post(key="a:b", headers={"X-Caller": str(number)}) for number in range(len(callers))]
        return [(answer.get_data(as_text=True), is_replay(answer)) for answer in sent]

    assert [(str(number), False) for number in range(len(callers))] == answers()
    assert [(str(number), True) for number in range(len(callers))] == answers()
    claims = [call.key for call in world.store.calls if call.verb == "claim"]
    assert (len(callers), len(HOSTILE) + 1) == (len({key.rid for key in claims}), len({key.tid for key in claims}))


def test_hostile_keys_never_meet_either() -> None:
    """Keys that a header can carry, bare and quoted."""
    world = new_world()
    keys = [
        f'"{key}"' for key in ("a:b", "a", "b", "{a}", "a}{b", "a%00b", "%", "*", "a,b", "a;b", "x" * 255, "x" * 254)
    ]

    @world.view()
    def pay() -> str:
        world.runs.append(1)
        return str(len(world.runs))

    first = [world.post(key=key).data for key in keys]

    assert len(keys) == len(set(first))
    assert first == [world.post(key=key).data for key in keys]
