"""A shop whose keys get into trouble, for tests of the commands that settle them."""

from __future__ import annotations

import json
from typing import Any

from click.testing import Result
from flask import Flask, request

from flask_idempotency.assembly import identities
from flask_idempotency.engine.keys import Scope, StorageKey, new_token
from flask_idempotency.engine.model import ClaimRequest, Grant, OnExpiry, Record, RequestInfo, StoredPayload
from tests.web.apps import World, new_world

LEASE, MAX_RUNTIME = 30.0, 900.0
"""Of the default policy."""
GONE = LEASE + MAX_RUNTIME
"""Seconds after its claim an owner that was never heard of again is taken for gone."""

WHY = ("--reason", "asked the bank", "--actor", "ops")
ALICES = ("--key", "k", "--tenant", "acme", "--principal", "alice")
"""How the key of `vanished` and of `paid` is named."""

NAME = "tests.web.app"


def shop(**settings: Any) -> World:
    """Its view is `pay`. It runs until its client says what it is to fail with."""
    world = new_world(Flask(NAME), init=False, **settings)
    # Before the host's time: a janitor goes by the earlier of the two.
    world.clock.now = 1_000_000_000.0
    world.idempotency.tenant_loader(lambda: request.headers.get("X-Tenant"))
    world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(request.get_data(as_text=True))
        if "X-Fail" in request.headers:
            raise RuntimeError("the view failed")
        return "paid", 201

    return world


def paid(world: World, key: str = "k", **headers: str) -> Any:
    return world.post(key=key, headers={"X-Tenant": "acme", **{f"X-{n}": value for n, value in headers.items()}})


def run(world: World, *arguments: str, typed: str | bytes | None = None) -> Result:
    return world.app.test_cli_runner().invoke(args=["idempotency", *arguments], input=typed)


def said(result: Result) -> Any:
    """The object that a machine is told."""
    assert not result.stderr, result.stderr
    return json.loads(result.stdout)


def refusal(result: Result) -> str:
    """Why it was refused: in one sentence, and nothing where answers are expected."""
    assert (1, "") == (result.exit_code, result.stdout), result.output
    return result.stderr.removeprefix("Error: ")


def key_of(
    world: World, key: str = "k", *, principal: str | None = "alice", operation: str | None = None
) -> StorageKey:
    scope = Scope(NAME, "acme", principal, operation)
    return identities(world.app.extensions["idempotency"].settings)[0].storage_key(scope, key)


def vanished(
    world: World, key: str = "k", *, on_lapse: OnExpiry = OnExpiry.QUARANTINE, endpoint: str = "pay", **scope: Any
) -> tuple[StorageKey, bytes]:
    """A claim whose owner is heard of no more. Returns what it would need to come back: its key, and its token."""
    storage_key = key_of(world, key, **scope)
    token = new_token(storage_key.mark)
    about = RequestInfo("acme", "alice", "POST", endpoint)
    asked = ClaimRequest(storage_key, fingerprint=bytes(32), on_expiry=on_lapse, info=about)
    assert isinstance(world.store.claim(asked, token=token, lease=LEASE), Grant)
    return storage_key, token


def lapsed(world: World, key: str = "k", *, after: float = LEASE + 1) -> tuple[StorageKey, bytes]:
    """The same, and it is quarantined when its lease has been over."""
    owned = vanished(world, key)
    world.clock.advance(after)
    found = world.store.recovery.expired_leases(horizon=world.clock.now, limit=10).found
    assert all(world.store.recovery.quarantine_expired(each, horizon=world.clock.now) for each in found)
    return owned


def record(world: World, key: str = "k") -> Record | None:
    return world.store.read(key_of(world, key))


ANSWER = StoredPayload(b"", 201, success=True, byte_size=4)
"""What a late owner stores, where nobody opens it."""


def world_on(store: Any, *, app: Flask | None = None, **settings: Any) -> World:
    """A shop over this store, whose view fails if the client asks for it, and which names tenants by a header."""
    app = app or Flask("tests.web.app")
    world = new_world(app, store=store, init=False, on_error="quarantine", **settings)
    world.idempotency.tenant_loader(lambda: request.headers.get("X-Tenant"))
    world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        if "X-Fail" in request.headers:
            raise RuntimeError("the view failed")
        return "paid", 201

    assert 0 == run(world, "db", "upgrade").exit_code
    return world
